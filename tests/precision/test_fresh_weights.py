"""Every forward casts the weights as they are then, whatever wrote them; merged weights, too."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import graphopt
from graphopt.passes.weights import why_not_packed

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


class Gated(nn.Module):
    """A merged pair, a layer beside it in the block, and a head alone in its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.ModuleDict()])
        for name, shape in (("gate", (8, 12)), ("up", (8, 12)), ("down", (12, 8))):
            self.layers[0][name] = nn.Linear(*shape, bias=False)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        part = self.layers[0]
        return self.head(part["down"](F.silu(part["gate"](x)) * part["up"](x)))


def make() -> tuple[nn.Module, nn.Module]:
    model = Gated()
    opt = graphopt.optimize(model, X, precision="bf16")
    assert any(r.rule == "merge_linear" for r in opt.rewrites)
    return model, opt


def step(name: str, **options: bool) -> Callable[[nn.Module, nn.Module], None]:
    def change(model: nn.Module, opt: nn.Module) -> None:
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1, **options)
        opt(X).float().square().sum().backward()
        optimizer.step()

    return change


def load(assign: bool) -> Callable[[nn.Module, nn.Module], None]:
    def change(model: nn.Module, opt: nn.Module) -> None:
        state = {k: 1.5 * v for k, v in model.state_dict().items()}
        model.load_state_dict(state, assign=assign)

    return change


def into_data(model: nn.Module, opt: nn.Module) -> None:
    for p in model.parameters():
        p.data.mul_(1.5)


def other_data(model: nn.Module, opt: nn.Module) -> None:
    for p in model.parameters():
        p.data = 1.5 * p.data


def numpy_write(model: nn.Module, opt: nn.Module) -> None:
    for p in model.parameters():
        values = p.detach().numpy()
        values *= 1.5


def averaged(model: nn.Module, opt: nn.Module) -> None:
    """Exponential averages swapped in for an evaluation."""
    for p in model.parameters():
        mean = 0.5 * p.detach() + 0.1
        with torch.no_grad():
            p.copy_(mean)


def new_parameter(model: nn.Module, opt: nn.Module) -> None:
    layer = model.layers[0]["up"]
    layer.weight = nn.Parameter(2 * layer.weight.detach())


WRITES = {
    **{
        f"{name} {how}": step(name, **{how: True} if how != "loop" else {"foreach": False})
        for name in ("SGD", "AdamW")
        for how in ("loop", "foreach", "fused")
    },
    "load_state_dict": load(False),
    "load_state_dict by assignment": load(True),
    "into .data": into_data,
    "another .data": other_data,
    "through numpy": numpy_write,
    "averages": averaged,
    "a new parameter": new_parameter,
}


@pytest.mark.parametrize("write", WRITES)
def test_a_write_shows_in_the_next_forward_and_backward(write: str) -> None:
    model, opt = make()
    before = opt(X)
    WRITES[write](model, opt)
    after = opt(X)
    fresh = graphopt.optimize(copy.deepcopy(model), X, precision="bf16")
    assert not torch.equal(after, before)
    assert torch.equal(after, fresh(X))
    model.zero_grad()
    fresh.zero_grad()
    for each in (opt, fresh):
        each(X).float().square().sum().backward()
    pairs = zip(model.parameters(), fresh.source.parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs)


@pytest.mark.parametrize("write", ["AdamW fused", "into .data", "load_state_dict by assignment"])
def test_after_a_block_that_held_them_as_well(write: str) -> None:
    model, opt = make()
    with graphopt.hold_weights(opt):
        before = opt(X)
    WRITES[write](model, opt)
    with graphopt.hold_weights(opt):
        after = opt(X)
    assert not torch.equal(after, before)
    assert torch.equal(after, opt(X))


SEEN = ("SGD loop", "AdamW foreach", "load_state_dict", "another .data", "averages")


@pytest.mark.parametrize("write", SEEN)
def test_a_write_inside_that_can_be_seen_raises(write: str) -> None:
    model, opt = make()
    with graphopt.hold_weights(opt):
        opt(X)
        WRITES[write](model, opt)
        with pytest.raises(graphopt.GraphOptError, match="inside hold_weights"):
            opt(X)
    opt(X)


def test_a_parameter_that_is_replaced_inside_is_cast_anew() -> None:
    model, opt = make()
    with graphopt.hold_weights(opt):
        before = opt(X)
        for factor in (2.0, 3.0, 4.0):  # the id of a dead one may come back
            layer = model.layers[0]["up"]
            layer.weight = nn.Parameter(factor * layer.weight.detach())
            after = opt(X)
            assert not torch.equal(after, before)
            before = after
    assert torch.equal(opt(X), before)


def test_every_weight_is_held_the_lone_head_as_well() -> None:
    _, opt = make()

    def casts() -> int:
        with torch.profiler.profile() as seen:
            opt(X)
        names = ("aten::_foreach_copy_", "aten::_to_copy")
        return sum(e.count for e in seen.key_averages() if e.key in names)

    alone = casts()
    with graphopt.hold_weights(opt):
        opt(X)
        assert casts() == alone - 2  # the block and the head; the input is cast still


def test_all_modes_in_turn_over_held_weights() -> None:
    """No call leaves copies that another cannot use, whichever comes first."""
    modes = (torch.no_grad, torch.inference_mode, torch.enable_grad)
    for first in modes:
        model, opt = make()
        with graphopt.hold_weights(opt):
            for mode in (first, *modes):
                with mode():
                    y = opt(X)
            y.float().sum().backward()
        assert all(p.grad is not None for p in model.parameters())
        opt(X).float().sum().backward()


# What stays out of the buffer ---------------------------------------------------------------------


def reasons(opt: nn.Module) -> list[str]:
    return [r.reason for r in opt.refusals if r.rule == "cast_weights"]


def test_a_weight_without_elements() -> None:
    class Empty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 0, bias=False), nn.Linear(8, 4, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat((self.a(x), self.b(x)), -1)

    opt = graphopt.optimize(Empty(), X, precision="bf16")
    assert reasons(opt) == ["a.weight has no elements (sharded?)"]
    opt(X).float().sum().backward()


def test_a_quantized_parameter() -> None:
    class Quantized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            whole = torch.randint(-9, 9, (4, 8), dtype=torch.int8)
            self.weight = nn.Parameter(whole, requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(x, self.weight.to(torch.bfloat16) / 9)

    opt = graphopt.optimize(Quantized(), X.bfloat16())
    assert reasons(opt) == ["weight is torch.int8, not float32"]
    assert torch.equal(opt(X.bfloat16()), opt.source(X.bfloat16()))


def test_a_parameter_of_another_class() -> None:
    """As the shards of DTensor are, which need a process group to be made."""

    class Shard(torch.Tensor):
        pass

    weight = nn.Parameter(torch.ones(2, 2).as_subclass(Shard))
    body = types.SimpleNamespace(attribute=lambda path: weight)
    node = types.SimpleNamespace(target="up.weight", users={})
    assert "is a Shard" in (why_not_packed(node, node, body) or "")


def test_laid_out_otherwise() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten()).to(memory_format=torch.channels_last)
    opt = graphopt.optimize(model, torch.randn(1, 3, 4, 4), precision="bf16")
    assert reasons(opt) == ["0.weight is not contiguous"]
