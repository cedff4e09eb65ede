"""Attention spelled out as matmul, scale, mask, softmax, dropout, matmul, to one SDPA call."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from graphopt.graph.pattern import either
from graphopt.passes.base import same_shape, surely
from graphopt.passes.canonical.index_algebra import Mask, mask_kind
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
    """Why the mask cannot go to SDPA, or None.

    A row in which every key is hidden is NaN in eager with -inf, and uniform with a finite value;
    fused attention gives zeros, and in backward probabilities that do not sum to one. So a mask
    is taken over only where it is proved that no row is hidden: no mask, or a causal one.
    """
    if "hidden" in m.captures and (
        not isinstance(m.fill, (int, float)) or m.fill > torch.finfo(q.dtype).min / 2
    ):
        return f"hidden scores become {m.fill}, not minus infinity"
    found = _mask(m)
    if found.kind == "none":
        return f"its mask might hide a whole row, where fused attention differs: {found.reason}"
    if found.kind == "causal" and not surely(q.shape[-2] == k_t.shape[-1]):
        return "it is causal, but queries and keys differ in number"
    return None


def _mask(m: Match) -> Mask:
    """What is proved of the mask that was matched; "all" without one."""
    if "hidden" in m.captures:
        return mask_kind(m.hidden, hides=True) if m.tensor("hidden") is not None else NOT_A_TENSOR
    if "mask" in m.captures:
        return mask_kind(m.mask) if m.tensor("mask") is not None else NOT_A_TENSOR
    return Mask("all")


NOT_A_TENSOR = Mask("none", "it is not a tensor")


@attention.replace
def _(m: Match) -> fx.Node:
    q = m.tensor("q")
    assert q is not None
    times, over = m.captures.get("times"), m.captures.get("over")
    scale = float(times) if times is not None else 1.0 / float(over) if over is not None else 1.0
    p = float(m.captures["p"]) if m.captures.get("train") else 0.0
    k = m.call(aten.transpose.int, m.k_t, -2, -1)
    causal = _mask(m).kind == "causal"
    return m.call(
        aten.scaled_dot_product_attention.default, m.q, k, m.v, None, p, causal, scale=scale
    )


def _heads() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(2, 3, 5, 8), torch.randn(2, 3, 5, 8), torch.randn(2, 3, 5, 8)


@attention.spellings
def _() -> Iterator[Spelling]:
    q, k, v = _heads()

    def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return ((q @ k.transpose(-2, -1)) / math.sqrt(8)).softmax(-1) @ v

    def filled(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = (q @ k.transpose(-2, -1)) * 0.3
        hidden = torch.ones(5, 5, dtype=torch.bool).triu(1)
        return scores.masked_fill(hidden, float("-inf")).softmax(dim=-1) @ v

    def filled_where_zero(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = (q @ k.transpose(2, 3)) / 0.7
        lowest = torch.finfo(torch.float32).min
        return scores.masked_fill(torch.ones(5, 5).tril() == 0, lowest).softmax(dim=-1) @ v

    def added(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        at = torch.arange(5)
        mask = torch.where(at[None, :] <= at[:, None], 0.0, torch.finfo(torch.float32).min)
        return ((q @ k.transpose(2, 3)) / 0.7 + mask).softmax(-1) @ v

    yield plain, (q, k, v)
    yield filled, (q, k, v)
    yield filled_where_zero, (q, k, v)
    yield added, (q, k, v)


@attention.refuses
def _() -> Iterator[Spelling]:
    q, k, v = _heads()

    def two_uses(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        weights = (q @ k.transpose(-2, -1)).softmax(-1)
        return weights @ v, weights

    def other_dim(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (q @ k.transpose(-2, -1)).softmax(-2) @ v

    def bias(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        return ((q @ k.transpose(2, 3)) / 0.7 + m).softmax(-1) @ v

    def given(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        return (q @ k.transpose(2, 3)).masked_fill(m, float("-inf")).softmax(-1) @ v

    def row_hidden(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        hidden = torch.ones(5, 5, dtype=torch.bool).triu(0)
        lowest = torch.finfo(torch.float32).min
        return (q @ k.transpose(2, 3)).masked_fill(hidden, lowest).softmax(-1) @ v

    def alibi(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (q @ k.transpose(2, 3) - torch.arange(5).to(q.dtype)).softmax(-1) @ v

    yield bias, (q, k, v, torch.randn(5, 5))
    yield given, (q, k, v, torch.ones(5, 5, dtype=torch.bool).triu(1))
    yield row_hidden, (q, k, v)
    yield alibi, (q, k, v)
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
