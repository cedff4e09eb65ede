"""A cast over an expand moves only where autocast put it: a gradient is summed in its dtype."""

from __future__ import annotations

import torch
from torch import nn

import graphopt

X = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))


class Repeated(nn.Module):
    def __init__(self, cast: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cast, self.weight = cast, nn.Parameter(torch.randn(16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(x)[None].expand(64, 4, 16).reshape(-1, 16)
        return h.to(torch.float16) if self.cast else h @ self.weight


def test_the_users_own_cast_stays() -> None:
    opt = graphopt.optimize(Repeated(True), X)
    assert "cast_before_view" not in {r.rule for r in opt.rewrites if "expand" in str(r.ops_before)}
    assert graphopt.verify(opt, X).passed


def test_autocasts_own_moves() -> None:
    opt = graphopt.optimize(Repeated(False), X, precision="bf16")
    assert "cast_before_view" in {r.rule for r in opt.rewrites if "expand" in str(r.ops_before)}
