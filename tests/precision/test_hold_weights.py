"""hold_weights: one copy for all calls inside, gradients as ever, writes that can be seen raise."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import graphopt

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


def make() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    return model, graphopt.optimize(model, X, precision="bf16")


def casts(opt: nn.Module, calls: int) -> int:
    """How many multi-tensor copies some calls make."""
    with torch.profiler.profile() as seen:
        for _ in range(calls):
            opt(X)
    return sum(e.count for e in seen.key_averages() if e.key == "aten::_foreach_copy_")


def test_copies_are_made_once_inside() -> None:
    _, opt = make()
    assert casts(opt, 3) == 6
    with graphopt.hold_weights(opt):
        assert casts(opt, 3) == 2
    assert casts(opt, 1) == 2


def test_micro_batches_add_up_as_without() -> None:
    model, opt = make()
    found = []
    for hold in (False, True):
        model.zero_grad()
        if hold:
            with graphopt.hold_weights(opt):
                for part in X.split(2):
                    opt(part).float().square().sum().backward()
        else:
            for part in X.split(2):
                opt(part).float().square().sum().backward()
        found.append([p.grad.clone() for p in model.parameters()])
    assert all(map(torch.equal, *found))


def test_a_write_that_can_be_seen_raises() -> None:
    model, opt = make()
    with graphopt.hold_weights(opt):
        opt(X)
        with torch.no_grad():
            model[0].weight.add_(1)
        with pytest.raises(graphopt.GraphOptError, match="inside hold_weights"):
            opt(X)
    opt(X)


def test_after_the_block_weights_are_fresh() -> None:
    model, opt = make()
    with graphopt.hold_weights(opt):
        before = opt(X)
    with torch.no_grad():
        model[0].weight.data.mul_(2)
    assert not torch.equal(opt(X), before)
    with graphopt.hold_weights(opt):
        assert not torch.equal(opt(X), before)


def test_no_grad_and_inference_calls_leave_no_trap_for_training() -> None:
    model, opt = make()
    with graphopt.hold_weights(opt):
        with torch.inference_mode():
            opt(X)
        with torch.no_grad():
            opt(X)
        opt(X).float().sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_nested_blocks_and_two_models() -> None:
    first, second = make()[1], make()[1]
    with graphopt.hold_weights(first), graphopt.hold_weights(second):
        with graphopt.hold_weights(first):
            first(X)
        assert casts(first, 2) == 2
        assert casts(second, 2) == 2


def test_an_attached_model() -> None:
    model, _ = make()
    graphopt.attach(model, precision="bf16")
    model(X)
    with graphopt.hold_weights(model):
        assert casts(model, 2) == 2


def test_anything_else_is_refused() -> None:
    with pytest.raises(graphopt.OptionError, match="optimized module"):
        graphopt.hold_weights(nn.Linear(2, 2)).__enter__()
