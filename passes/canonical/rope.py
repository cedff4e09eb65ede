"""Rotary position embedding (Su et al., RoFormer, 2021) from its half-rotated spelling."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from graphopt.graph.pattern import either
from graphopt.passes.base import same_shape, surely
from graphopt.passes.rule import Match, Spelling, rule

aten = torch.ops.aten
graphopt = torch.ops.graphopt


@rule("canonical")
def rope(x, cos, sin, dim, middle, end, cat_dim):
    """X * cos + cat(-x2, x1) * sin, as rotate_half spells it, is graphopt.rope."""
    first = aten.slice.Tensor(x, dim, 0, middle)
    second = aten.slice.Tensor(x, dim, middle, end)
    return _turned(x, first, second, cos, sin, cat_dim)


def _turned(x: Any, first: Any, second: Any, cos: Any, sin: Any, cat_dim: Any) -> Any:
    rotated = aten.cat.default([aten.neg.default(second), first], cat_dim)
    return aten.add.Tensor(aten.mul.Tensor(x, cos), aten.mul.Tensor(rotated, sin))


@rope.also
def _rope_chunked(x, cos, sin, dim, parts, cat_dim):
    halves = either(aten.chunk.default(x, parts, dim), aten.split.Tensor(x, parts, dim))
    first, second = operator.getitem(halves, 0), operator.getitem(halves, 1)
    return _turned(x, first, second, cos, sin, cat_dim)


@rope.check
def _(m: Match) -> str | None:
    x, cos, sin = m.tensor("x"), m.tensor("cos"), m.tensor("sin")
    if x is None or cos is None or sin is None:
        return "cos or sin is not a tensor"
    if not m.val.dtype.is_floating_point:
        return "it is not floating point"
    rank = x.dim()
    if any(not isinstance(d, int) or d % rank != rank - 1 for d in (m.dim, m.cat_dim)):
        return "the halves are not those of the last dim"
    size = x.shape[-1]
    if "middle" in m.captures:
        if not surely(m.middle * 2 == size) or not surely(m.end >= size):
            return f"the slices are not the halves of {size}"
    elif not (m.parts == 2 and any(n.target is aten.chunk.default for n in m.nodes)) and not (
        isinstance(m.parts, int)
        and surely(m.parts * 2 == size)
        and any(n.target is aten.split.Tensor for n in m.nodes)
    ):
        return f"it is not cut into two halves of {size}"
    if not surely(size % 2 == 0) or not same_shape(m.val, x):
        return "cos and sin do not broadcast to x"
    if m.val.dtype != torch.promote_types(torch.promote_types(x.dtype, cos.dtype), sin.dtype):
        return "its parts are promoted apart"
    return None


@rope.replace
def _(m: Match) -> fx.Node:
    return m.call(graphopt.rope.default, m.x, m.cos, m.sin)


def _rotate_half(x: torch.Tensor) -> torch.Tensor:
    x1, x2 = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def _rotate_chunk(x: torch.Tensor) -> torch.Tensor:
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


@rope.spellings
def _() -> Iterator[Spelling]:
    tensors = (torch.randn(2, 3, 5, 8), torch.randn(5, 8), torch.randn(5, 8))
    yield lambda x, cos, sin: x * cos + _rotate_half(x) * sin, tensors
    yield lambda x, cos, sin: x * cos + _rotate_chunk(x) * sin, tensors


@rope.refuses
def _() -> Iterator[Spelling]:
    tensors = (torch.randn(2, 3, 5, 8), torch.randn(5, 8), torch.randn(5, 8))

    def other_cut(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return x * cos + torch.cat((-x[..., 2:], x[..., :2]), -1) * sin

    yield other_cut, tensors
    yield lambda x, cos, sin: x * cos + torch.cat((x[..., 4:], x[..., :4]), -1) * sin, tensors
