"""Dropout and the residual addition after it, in one pass; the bias's gradient comes with it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import fx, nn

from graphopt.passes.base import same_shape
from graphopt.passes.fusion.activation import bias_of_row, product_of_held_bias
from graphopt.passes.rule import Match, Spelling, rule

aten = torch.ops.aten
graphopt = torch.ops.graphopt


@rule("fusion")
def dropout_add(h, residual, p, seed, site):
    """Residual + dropout(x) in one pass, which sums the gradient of a linear layer's bias."""
    return aten.add.Tensor(graphopt.dropout.default(h, p, seed, site), residual)


@dropout_add.also
def _bias_dropout_add(x, w, b, residual, p, seed, site):
    h = aten.linear.default(x, w, b)
    return aten.add.Tensor(graphopt.dropout.default(h, p, seed, site), residual)


@dropout_add.also
def _bias_dropout_add_addmm(x, w, b, shape, residual, p, seed, site):
    h = aten.view.default(aten.addmm.default(b, x, w), shape)
    return aten.add.Tensor(graphopt.dropout.default(h, p, seed, site), residual)


@dropout_add.check
def _(m: Match) -> str | None:
    residual = m.tensor("residual")
    if residual is None or not same_shape(residual, m.val):
        return "the residual is broadcast"
    dropped = next(n for n in m.nodes if n.target is graphopt.dropout.default).meta["val"]
    if not same_shape(dropped, m.val):
        return "the dropped value is broadcast"
    if "b" in m.captures:
        if not m.body.grad:
            return "without a gradient the linear layer's own epilogue adds the bias for free"
        return bias_of_row(m.tensor("b"), dropped)
    return None


@dropout_add.replace
def _(m: Match) -> fx.Node:
    biased = "b" in m.captures
    x = product_of_held_bias(m) if biased else m.h
    return m.call(
        graphopt.dropout_add.default,
        x,
        m.residual,
        m.p,
        m.seed,
        m.site,
        bias=m.b if biased else None,
        bias_added=True if biased else None,
        out_dtype=_wider(m, x),
    )


def _wider(m: Match, x: fx.Node) -> torch.dtype | None:
    plain = torch.promote_types(x.meta["val"].dtype, m.residual.meta["val"].dtype)
    return None if m.val.dtype == plain else m.val.dtype


@dropout_add.spellings
def _() -> Iterator[Spelling]:
    x, r = torch.randn(3, 8), torch.randn(3, 8)
    yield lambda x, r: F.dropout(x, 0.3, True) + r, (x, r)
    yield lambda x, r: r + F.dropout(x, 0.3, True), (x, r)

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.drop = nn.Linear(8, 8), nn.Dropout(0.1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.drop(self.linear(x))

    yield Residual(), (x,)


@dropout_add.refuses
def _() -> Iterator[Spelling]:
    x = torch.randn(3, 8)
    yield lambda x, r: F.dropout(x, 0.3, True) + r, (x, torch.randn(8))
    yield lambda x: F.dropout(x, 0.3, True) + 1.0, (x,)
