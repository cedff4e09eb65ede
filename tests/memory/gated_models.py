"""A model whose gradients may be written over their operands, and steps of it."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from remat_models import everything, twins
from torch import nn

KINDS = ("packed", "apart", "activation")


class Gated(nn.Module):
    """Two gated units, the gate and the other factor by one product, or by two; or activations."""

    def __init__(self, kind: str = "packed", width: int = 8) -> None:
        super().__init__()
        self.kind = kind
        inside = width if kind == "packed" else 2 * width
        self.up = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(2))
        self.gate = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(inside, width) for _ in range(2))

    @property
    def operands(self) -> int:
        """How many values gradients may be written over."""
        return 4 if self.kind == "apart" else 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, gate, down in zip(self.up, self.gate, self.down, strict=True):
            if self.kind == "activation":
                x = x + down(F.gelu(up(x)))
                continue
            a, b = up(x).chunk(2, -1) if self.kind == "packed" else (gate(x), up(x))
            x = x + down(F.silu(a) * b)
        return x


@functools.cache
def dropped_pair(kind: str):
    """A module that drops nothing and one that drops all it may."""
    return twins(lambda: Gated(kind), everything)


def x() -> torch.Tensor:
    return torch.linspace(-1, 1, 5 * 8).view(5, 8).requires_grad_()


def grads(module: nn.Module, **options) -> list[torch.Tensor]:
    values = x()
    wanted = [values, *(p for p in module.parameters() if p.requires_grad)]
    found = torch.autograd.grad(module(values).square().sum(), wanted, allow_unused=True, **options)
    return [g.detach().clone() for g in found if g is not None]
