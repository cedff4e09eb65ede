"""Softmax from its spelled-out, overflow-safe form."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from graphopt.graph.pattern import either
from graphopt.passes.canonical.activation import floating
from graphopt.passes.rule import Match, Spelling, rule

aten = torch.ops.aten


@rule("canonical")
def softmax(x, dim, index_dim):
    """exp(x - max(x)) / sum(exp(x - max(x))) over one dim is aten.softmax."""
    from operator import getitem

    top = either(
        aten.amax.default(x, dim, True),
        getitem(aten.max.dim(x, index_dim, True), 0),
    )
    e = aten.exp.default(aten.sub.Tensor(x, either(top, aten.detach.default(top))))
    return aten.div.Tensor(e, aten.sum.dim_IntList(e, dim, True))


@softmax.check
def _(m: Match) -> str | None:
    if not isinstance(m.dim, (list, tuple)) or len(m.dim) != 1:
        return f"the sum is over {m.dim}, softmax takes one dim"
    rank = m.val.dim()
    index = m.captures.get("index_dim")
    if index is not None and (not isinstance(index, int) or index % rank != m.dim[0] % rank):
        return f"the maximum is over {index}, the sum over {m.dim[0]}"
    return floating(m)


@softmax.replace
def _(m: Match) -> fx.Node:
    return m.call(aten.softmax.int, m.x, m.dim[0])


@softmax.spellings
def _() -> Iterator[Spelling]:
    x = torch.randn(3, 8)

    def by_amax(x: torch.Tensor) -> torch.Tensor:
        e = torch.exp(x - x.amax(-1, keepdim=True))
        return e / e.sum(-1, keepdim=True)

    def by_max(x: torch.Tensor) -> torch.Tensor:
        e = (x - x.max(dim=1, keepdim=True).values.detach()).exp()
        return e / e.sum(dim=1, keepdim=True)

    yield by_amax, (x,)
    yield by_max, (x,)


@softmax.refuses
def _() -> Iterator[Spelling]:
    x, y = torch.randn(3, 8), torch.randn(3, 8)

    def unsafe(x: torch.Tensor) -> torch.Tensor:
        return x.exp() / x.exp().sum(-1, keepdim=True)

    def two(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        e = torch.exp(x - x.amax(-1, keepdim=True))
        return e / torch.exp(y - y.amax(-1, keepdim=True)).sum(-1, keepdim=True)

    yield unsafe, (x,)
    yield two, (x, y)
