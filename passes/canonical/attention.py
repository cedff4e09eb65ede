"""Attention spelled out as matmul, scale, mask, softmax, dropout, matmul, to one SDPA call."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from graphopt.graph.pattern import either
from graphopt.passes.base import same_shape, surely
from graphopt.passes.rule import Match, Spelling, rule

aten = torch.ops.aten


def product(a: Any, b: Any) -> Any:
    """Pattern of a batched matrix product."""
    return either(aten.matmul.default(a, b), aten.bmm.default(a, b))


def _weighted(scores: Any, v: Any, dim: Any, wide: Any, narrow: Any, p: Any, train: Any) -> Any:
    weights = aten.softmax.int(scores, dim, wide)
    weights = either(aten.to.dtype(weights, narrow), weights)
    return product(either(aten.dropout.default(weights, p, train), weights), v)


def _scaled(q: Any, k_t: Any, times: Any, over: Any) -> Any:
    scores = product(q, k_t)
    return either(aten.mul.Tensor(scores, times), aten.div.Tensor(scores, over), scores)


@rule("canonical")
def attention(q, k_t, v, times, over, dim, wide, narrow, p, train):
    """softmax(q k^T * scale) v, with a mask added or filled in, is scaled_dot_product_attention."""
    return _weighted(_scaled(q, k_t, times, over), v, dim, wide, narrow, p, train)


@attention.also
def _attention_added(q, k_t, v, times, over, dim, wide, narrow, p, train, mask):
    scores = aten.add.Tensor(_scaled(q, k_t, times, over), mask)
    return _weighted(scores, v, dim, wide, narrow, p, train)


@attention.also
def _attention_filled(q, k_t, v, times, over, dim, wide, narrow, p, train, hidden, fill):
    scores = aten.masked_fill.Scalar(_scaled(q, k_t, times, over), hidden, fill)
    return _weighted(scores, v, dim, wide, narrow, p, train)


@attention.check
def _(m: Match) -> str | None:
    q, k_t, v = m.tensor("q"), m.tensor("k_t"), m.tensor("v")
    if q is None or k_t is None or v is None or not q.dtype.is_floating_point:
        return "q, k or v is not a floating-point tensor"
    if not q.dtype == k_t.dtype == v.dtype == m.val.dtype:
        return f"dtypes differ: q {q.dtype}, k {k_t.dtype}, v {v.dtype}, result {m.val.dtype}"
    if not 3 <= q.dim() == k_t.dim() == v.dim():
        return f"q, k, v have {q.dim()}, {k_t.dim()}, {v.dim()} dims"
    lead = zip(q.shape[:-2], k_t.shape[:-2], v.shape[:-2], strict=True)
    if not all(surely(a == b) and surely(b == c) for a, b, c in lead):
        return "q, k and v differ in their leading dims"
    if m.dim % q.dim() != q.dim() - 1:
        return f"the softmax is over dim {m.dim}"
    if m.captures.get("wide") not in (None, torch.float32, q.dtype):
        return f"the softmax is in {m.wide}"
    if m.captures.get("narrow") not in (None, q.dtype):
        return f"the weights are cast to {m.narrow}"
    for name in ("times", "over"):
        value = m.captures.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
            return "the scale is not a number"
    return _mask_problem(m, q, k_t)


def _mask_problem(m: Match, q: torch.Tensor, k_t: torch.Tensor) -> str | None:
    if "mask" in m.captures:
        mask = m.tensor("mask")
        if mask is None or mask.dtype != q.dtype:
            return "the mask is not a tensor of q's dtype"
    elif "hidden" in m.captures:
        mask = m.tensor("hidden")
        if mask is None or mask.dtype != torch.bool or not isinstance(m.fill, (int, float)):
            return "the mask is not boolean"
        if m.fill != -math.inf and m.fill > torch.finfo(q.dtype).min / 2:
            return f"hidden scores become {m.fill}, not minus infinity"
    else:
        return None
    rank = q.dim()
    if mask.dim() > rank:
        return "the mask has more dims than the scores"
    sizes = [*q.shape[:-1], k_t.shape[-1]][rank - mask.dim() :]
    if not all(surely(a == 1) or surely(a == b) for a, b in zip(mask.shape, sizes, strict=True)):
        return "the mask broadcasts the scores"
    return None


@attention.replace
def _(m: Match) -> fx.Node:
    q = m.tensor("q")
    assert q is not None
    times, over = m.captures.get("times"), m.captures.get("over")
    scale = float(times) if times is not None else 1.0 / float(over) if over is not None else 1.0
    p = float(m.captures["p"]) if m.captures.get("train") else 0.0
    k = m.call(aten.transpose.int, m.k_t, -2, -1)
    return m.call(
        aten.scaled_dot_product_attention.default, m.q, k, m.v, _additive(m), p, scale=scale
    )


def _additive(m: Match) -> fx.Node | None:
    """The mask as SDPA takes it.

    Where a row hides every key, eager's softmax gives NaN and SDPA gives 0: such a row of the
    mask is made NaN, so that the place of a NaN does not move. That costs one pass over the mask,
    which is small beside the scores; a mask filled with a finite value cannot hide a whole row.
    """
    if "mask" in m.captures:
        return m.mask if _is_finite(m.mask) else _guard_rows(m, m.mask)
    if "hidden" not in m.captures:
        return None
    zeros = m.call(aten.zeros_like.default, m.hidden, dtype=m.val.dtype)
    mask = m.call(aten.masked_fill.Scalar, zeros, m.hidden, float(m.fill))
    return mask if m.fill != -math.inf else _guard_rows(m, mask)


def _is_finite(mask: fx.Node) -> bool:
    """Whether an additive mask is surely finite: zeros and finfo.min, chosen by a condition."""
    if mask.target in (aten.expand.default, aten.contiguous.default, aten.slice.Tensor):
        return isinstance(mask.args[0], fx.Node) and _is_finite(mask.args[0])
    if mask.target is aten.where.ScalarOther:
        other = mask.args[2]
        source = mask.args[1]
        zeros = isinstance(source, fx.Node) and source.target is aten.zeros.default
        return zeros and isinstance(other, float) and math.isfinite(other)
    return False


def _guard_rows(m: Match, mask: fx.Node) -> fx.Node:
    dead = m.call(aten.eq.Scalar, mask, -math.inf)
    dead = m.call(aten.all.dim, dead, -1, True)
    return m.call(aten.masked_fill.Scalar, mask, dead, math.nan)


def _heads() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(2, 3, 5, 8), torch.randn(2, 3, 5, 8), torch.randn(2, 3, 5, 8)


@attention.spellings
def _() -> Iterator[Spelling]:
    q, k, v = _heads()
    causal = torch.ones(5, 5, dtype=torch.bool).tril()

    def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return ((q @ k.transpose(-2, -1)) / math.sqrt(8)).softmax(-1) @ v

    def added(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        return (((q @ k.transpose(2, 3)) / 0.7) + m).softmax(-1) @ v

    def filled(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        scores = (q @ k.transpose(-2, -1)) * 0.3
        return scores.masked_fill(m == 0, float("-inf")).softmax(dim=-1) @ v

    yield plain, (q, k, v)
    yield added, (q, k, v, torch.randn(5, 5))
    yield filled, (q, k, v, causal)


@attention.refuses
def _() -> Iterator[Spelling]:
    q, k, v = _heads()

    def two_uses(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        weights = (q @ k.transpose(-2, -1)).softmax(-1)
        return weights @ v, weights

    def other_dim(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (q @ k.transpose(-2, -1)).softmax(-2) @ v

    yield two_uses, (q, k, v)
    yield other_dim, (q, k, v)


@rule("canonical")
def double_transpose(x, a, b, c, d):
    """A transpose that undoes the one before it goes."""
    return aten.transpose.int(aten.transpose.int(x, a, b), c, d)


@double_transpose.check
def _(m: Match) -> str | None:
    rank = m.val.dim()
    if {m.a % rank, m.b % rank} != {m.c % rank, m.d % rank} or not same_shape(m.val, m.tensor("x")):  # type: ignore[arg-type]
        return "the second transpose does not undo the first"
    return None


@double_transpose.replace
def _(m: Match) -> fx.Node:
    return m.call(aten.alias.default, m.x)


@double_transpose.spellings
def _() -> Iterator[Spelling]:
    yield lambda x: x.transpose(0, 1).transpose(-1, -2) + 1, (torch.randn(3, 4),)


@double_transpose.refuses
def _() -> Iterator[Spelling]:
    yield lambda x: x.transpose(0, 1).transpose(1, 2) + 1, (torch.randn(3, 3, 3),)
