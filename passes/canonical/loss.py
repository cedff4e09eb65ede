"""Cross entropy from log-softmax and negative log-likelihood."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import fx

from graphopt.passes.canonical.activation import floating
from graphopt.passes.rule import Match, Spelling, rule

aten = torch.ops.aten


@rule("canonical")
def cross_entropy(x, dim, wide, target, weight, reduction, ignore):
    """nll_loss(log_softmax(x), target) is aten.cross_entropy_loss."""
    return aten.nll_loss_nd.default(
        aten.log_softmax.int(x, dim, wide), target, weight, reduction, ignore
    )


@cross_entropy.also
def _cross_entropy_2d(x, dim, wide, target, weight, reduction, ignore):
    return aten.nll_loss.default(
        aten.log_softmax.int(x, dim, wide), target, weight, reduction, ignore
    )


@cross_entropy.check
def _(m: Match) -> str | None:
    x = m.tensor("x")
    assert x is not None
    class_dim = 1 if x.dim() > 1 else 0
    if m.dim % x.dim() != class_dim:
        return f"the log-softmax is over dim {m.dim}, the loss's classes are dim {class_dim}"
    return floating(m)


@cross_entropy.replace
def _(m: Match) -> fx.Node:
    x = m.x
    if m.wide is not None and m.wide != x.meta["val"].dtype:
        x = m.call(aten.to.dtype, x, m.wide)
    return m.call(aten.cross_entropy_loss.default, x, m.target, m.weight, m.reduction, m.ignore)


@cross_entropy.spellings
def _() -> Iterator[Spelling]:
    x, y = torch.randn(4, 9), torch.tensor([1, 8, -100, 3])
    yield lambda x, y: F.nll_loss(F.log_softmax(x, -1), y), (x, y)
    yield lambda x, y: F.nll_loss(x.log_softmax(1), y, reduction="sum"), (x, y)


@cross_entropy.refuses
def _() -> Iterator[Spelling]:
    x, y = torch.randn(4, 9), torch.tensor([1, 8, 2, 3])
    yield lambda x, y: F.nll_loss(F.log_softmax(x, 0), y), (x, y)
