"""A model and planted rules for the tests of bisect."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from graphopt.graph.record import site_of
from graphopt.passes import Match, Rule, rule

aten = torch.ops.aten


RIGHT = "default,-layer_norm,-add_layer_norm"


class Layer(nn.Module):
    """A pre-norm MLP block without dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.relu(self.up(self.norm(x))))


class Model(nn.Module):
    """Some blocks."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(16) for _ in range(blocks))
        self.register_buffer("calls", torch.zeros(()))
        with torch.no_grad():
            for p in self.parameters():
                p.add_(torch.randn_like(p) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        for layer in self.layers:
            x = layer(x)
        return x


def planted(*wrong: str) -> Rule:
    """A rule on every LayerNorm, with a wrong eps in some modules."""

    @rule("fusion", register=False)
    def planted_norm(x, shape, weight, bias, eps, _cudnn):  # type: ignore[no-untyped-def]
        """A LayerNorm, done wrong in places."""
        return aten.layer_norm.default(x, shape, weight, bias, eps, _cudnn)

    @planted_norm.replace
    def _(m: Match) -> Any:
        eps = m.eps * 100 if site_of(m.root).module in wrong else m.eps
        return m.call(torch.ops.graphopt.layer_norm.default, m.x, m.weight, m.bias, eps)

    return planted_norm


def planted_act(*wrong: str) -> Rule:
    """A rule on every ReLU, which becomes a leaky one in some modules."""

    @rule("fusion", register=False)
    def planted_relu(x):  # type: ignore[no-untyped-def]
        """A ReLU, done wrong in places."""
        return aten.relu.default(x)

    @planted_relu.replace
    def _(m: Match) -> Any:
        slope = 0.01 if site_of(m.root).module in wrong else 0.0
        return m.call(aten.leaky_relu.default, m.x, slope)

    return planted_relu
