"""`torch.utils.checkpoint` around an optimized module; what a forward takes from outside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import graphopt

SCALE = 2.0


def net(tail: bool) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU()]
    return nn.Sequential(*layers, *([nn.Linear(8, 8)] if tail else []))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize("fuse", [True, False])
def test_a_checkpoint_around_it(tail: bool, warm: bool, reentrant: bool, fuse: bool) -> None:
    model, x = net(tail), torch.randn(4, 8, requires_grad=True)
    opt = graphopt.optimize(model, fuse=fuse)
    if warm:
        opt(x)
    wanted = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    checkpoint(opt, x, use_reentrant=reentrant).square().sum().backward()
    for p, g in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(p.grad, g, atol=1e-5, rtol=1e-4)


def test_attached_blocks_in_a_model_that_checkpoints() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([net(True), net(False)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x

    model, x = Outer(), torch.randn(4, 8)
    wanted = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    for block in model.blocks:
        graphopt.attach(block)
    for _ in range(2):
        found = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_a_capture_leaves_the_callers_hooks_on_saved_tensors_alone() -> None:
    seen: list[Any] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(type(tensor))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        graphopt.optimize(net(True))(torch.randn(4, 8))
    assert seen
    assert set(seen) <= {torch.Tensor, nn.Parameter}


class Scaled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * SCALE


@pytest.mark.parametrize("attached", [True, False])
def test_a_global_of_forward_is_watched(attached: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Scaled()
    call = graphopt.attach(model) if attached else graphopt.optimize(model)
    assert call(torch.ones(2)).tolist() == [2.0, 2.0]
    monkeypatch.setitem(Scaled.forward.__globals__, "SCALE", 20.0)
    assert call(torch.ones(2)).tolist() == [20.0, 20.0]


def test_another_forward_of_the_class_is_seen_when_attached() -> None:
    class Twice(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    model = graphopt.attach(Twice())
    assert model(torch.ones(2)).tolist() == [2.0, 2.0]
    Twice.forward = lambda self, x: x * 5  # type: ignore[method-assign]
    assert model(torch.ones(2)).tolist() == [5.0, 5.0]


def test_a_copy_that_guards_state_from_a_later_write_stays() -> None:
    class Queue(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("queue", torch.randn(4, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            logits = self.linear(x) @ self.queue.clone().detach()
            with torch.no_grad():
                self.queue[:, :2] = x[:2].T
            return logits

    graphopt.optimize(Queue())(torch.randn(3, 4)).sum().backward()


def test_a_copy_of_an_input_that_the_caller_writes_stays() -> None:
    class Copies(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x.clone())

    model, x = Copies(), torch.ones(2, 4)
    y = graphopt.optimize(model)(x)
    x.zero_()
    y.sum().backward()
    assert torch.equal(model.linear.weight.grad, torch.full((4, 4), 2.0))
