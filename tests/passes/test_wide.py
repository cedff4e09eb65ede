"""Trained weights of large linear layers get float32 gradients from backward's product itself."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import graphopt
from graphopt.passes import wide
from tests.passes.test_merge import Attention, Mlp, X


@pytest.fixture(autouse=True)
def _any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wide, "WORTH", 0)


class Stored(nn.Module):
    """Weights stored [in, out], as GPT-2 has them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = (nn.Parameter(torch.randn(16, 16) / 4) for _ in range(2))
        self.bias = nn.Parameter(torch.randn(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.addmm(self.bias, x.view(-1, 16), self.a)
        return torch.mm(torch.tanh(h), self.b)


MODELS = {
    "gate and up": (Mlp, 2),
    "biases": (lambda: Mlp(bias=True), 2),
    "rope": (lambda: Attention(bias=True), 2),
    "no rope": (lambda: Attention(kv=4, rope=False), 2),
    "stored [in, out]": (Stored, 2),
    "one after another": (lambda: nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4)), 2),
}


def count(opt: nn.Module) -> int:
    """Products that give float32 gradients."""
    return sum(
        "linear_wide" in str(n.target) or ("linear_rope" in str(n.target) and len(n.args) > 7)
        for n in opt.graph.nodes
    )


def optimized(model: nn.Module, **options: Any) -> nn.Module:
    return graphopt.optimize(model, X, precision="bf16", **options)


@pytest.mark.parametrize("name", ["biases", "rope", "stored [in, out]"])
def test_the_whole_step_is_proved(name: str) -> None:
    make, products = MODELS[name]
    opt = optimized(make())
    assert count(opt) == products
    found = graphopt.verify(opt, X)
    assert found.passed, found


@pytest.mark.parametrize("name", MODELS)
def test_gradients_add_up_over_two_calls(name: str) -> None:
    model = MODELS[name][0]()
    opt = optimized(model)
    for scale in (1.0, 0.5):
        opt(scale * X).float().square().sum().backward()
    exact = copy.deepcopy(model).double()
    exact.zero_grad()
    for scale in (1.0, 0.5):
        exact(scale * X.double()).square().sum().backward()
    for p, e in zip(model.parameters(), exact.parameters(), strict=True):
        assert p.grad.dtype == torch.float32
        assert p.grad.is_contiguous()
        assert (p.grad - e.grad).norm() < 0.03 * e.grad.norm() + 1e-3


def test_an_optimizer_step_between_forward_and_backward() -> None:
    model, alone = Mlp(), Mlp()
    y = optimized(model)(X)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
    y.float().sum().backward()
    optimized(alone)(X).float().sum().backward()
    assert all(map(torch.equal, *([p.grad for p in m.parameters()] for m in (model, alone))))


def test_held_weights_train() -> None:
    model, alone = Mlp(), Mlp()
    opt = optimized(model)
    with graphopt.hold_weights(opt):
        for _ in range(2):
            opt(X).float().sum().backward()
    for _ in range(2):
        optimized(alone)(X).float().sum().backward()
    assert all(map(torch.equal, *([p.grad for p in m.parameters()] for m in (model, alone))))


def test_what_is_frozen_stays_plain() -> None:
    model = Mlp()
    model.down.requires_grad_(False)
    assert count(optimized(model)) == 1


def test_a_weight_that_two_read_stays_plain() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(16, 16, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(torch.tanh(self.a(x)))

    assert count(optimized(Twice())) == 0


def test_without_gradients_and_left_out() -> None:
    opt = graphopt.optimize(Mlp(), precision="bf16")
    with torch.no_grad():
        opt(X)
    assert count(opt) == 0
    assert count(optimized(Mlp(), rules="default,-wide_gradients")) == 0


def test_small_products_stay_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wide, "WORTH", 1 << 32)
    assert count(optimized(Mlp())) == 0


def test_a_gradient_penalty() -> None:
    model = Mlp()
    x, wide_x = X.clone().requires_grad_(), X.double().requires_grad_()
    opt = graphopt.optimize(model, x, precision="bf16", rules="default,-glu,-bias_act")
    exact = copy.deepcopy(model).double()
    for module, given in ((opt, x), (exact, wide_x)):
        (slope,) = torch.autograd.grad(module(given).sum(), given, create_graph=True)
        slope.square().sum().backward()
    for p, e in zip(model.parameters(), exact.parameters(), strict=True):
        assert (p.grad - e.grad).norm() < 0.05 * e.grad.norm()
