"""Attention masks that a model builds as a graph, proved causal or empty.

Hugging Face models build their mask op by op when they are captured, where eager passes
`is_causal=True`; with a mask tensor, flash and cuDNN attention are lost.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from graphopt.passes.base import same_shape, surely
from graphopt.passes.canonical.index_algebra import mask_kind
from graphopt.passes.rule import Match, Spelling, rule

aten = torch.ops.aten


@rule("canonical")
def attention_mask(q, k, v, mask, p, scale, gqa):
    """A mask proved causal becomes is_causal=True; one proved to hide nothing goes."""
    return aten.scaled_dot_product_attention.default(
        q, k, v, mask, p, False, scale=scale, enable_gqa=gqa
    )


@attention_mask.check
def _(m: Match) -> str | None:
    if not isinstance(m.mask, fx.Node):
        return ""
    found = mask_kind(m.mask)
    if found.kind == "none":
        return f"the mask is not proved causal: {found.reason}"
    q, k = m.tensor("q"), m.tensor("k")
    square = q is not None and k is not None and surely(q.shape[-2] == k.shape[-2])
    if found.kind == "causal" and not square:
        return "it is causal, but queries and keys differ in number"
    return None


@attention_mask.replace
def _(m: Match) -> fx.Node:
    causal = mask_kind(m.mask).kind == "causal"
    return m.call(
        aten.scaled_dot_product_attention.default,
        m.q,
        m.k,
        m.v,
        None,
        m.p,
        causal,
        scale=m.scale,
        enable_gqa=m.gqa or None,
    )


def _attend(q: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)


@attention_mask.spellings
def _() -> Iterator[Spelling]:
    q = torch.randn(2, 3, 6, 8)

    def compared(q: torch.Tensor) -> torch.Tensor:
        at = torch.arange(q.shape[-2])
        return _attend(q, at[None, :] <= at[:, None])

    def triangle(q: torch.Tensor) -> torch.Tensor:
        return _attend(q, torch.ones(6, 6, dtype=torch.bool).tril())

    def additive(q: torch.Tensor) -> torch.Tensor:
        at = torch.arange(6)
        seen = at[None, :] <= at[:, None]
        return _attend(q, torch.where(seen, 0.0, torch.finfo(torch.float32).min))

    def window_wider_than_rows(q: torch.Tensor) -> torch.Tensor:
        at = torch.arange(6)
        seen = (at[None, :] <= at[:, None]) & (at[None, :] > at[:, None] - 64)
        return _attend(q, seen.expand(2, 1, 6, 6))

    def nothing_hidden(q: torch.Tensor) -> torch.Tensor:
        return _attend(q, torch.ones(6, 6, dtype=torch.bool))

    yield compared, (q,)
    yield triangle, (q,)
    yield additive, (q,)
    yield window_wider_than_rows, (q,)
    yield nothing_hidden, (q,)


@attention_mask.refuses
def _() -> Iterator[Spelling]:
    q = torch.randn(2, 3, 6, 8)

    def strict(q: torch.Tensor) -> torch.Tensor:
        at = torch.arange(6)
        return _attend(q, (at[None, :] < at[:, None]) | (at[None, :] == 0))

    def turned(q: torch.Tensor) -> torch.Tensor:
        at = torch.arange(6)
        return _attend(q, at[None, :] >= at[:, None])

    def window(q: torch.Tensor) -> torch.Tensor:
        at = torch.arange(6)
        return _attend(q, (at[None, :] <= at[:, None]) & (at[None, :] > at[:, None] - 3))

    def given(q: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return _attend(q, mask)

    yield strict, (q,)
    yield turned, (q,)
    yield window, (q,)
    yield given, (q, torch.ones(6, 6, dtype=torch.bool).tril())


@rule("canonical")
def where_true(condition, x, other):
    """where(condition proved true, x, y) is x."""
    return aten.where.self(condition, x, other)


@where_true.also
def _where_true_scalar(condition, x, other):
    return aten.where.ScalarOther(condition, x, other)


@where_true.check
def _(m: Match) -> str | None:
    x, condition = m.tensor("x"), m.tensor("condition")
    if (
        x is None
        or condition is None
        or condition.dim() < 2
        or mask_kind(m.condition).kind != "all"
    ):
        return ""
    if x.dtype != m.val.dtype:
        return "the result is wider than its first branch"
    if not same_shape(x, m.val) and not all(isinstance(s, int) for s in m.val.shape):
        return "its first branch is broadcast to symbolic sizes"
    return None


@where_true.replace
def _(m: Match) -> fx.Node:
    if same_shape(m.x.meta["val"], m.val):
        return m.call(aten.alias.default, m.x)
    return m.call(aten.expand.default, m.x, list(m.val.shape))


@where_true.spellings
def _() -> Iterator[Spelling]:
    def positions(x: torch.Tensor) -> torch.Tensor:
        at = torch.arange(6)
        return torch.where((at[:, None] >= 0).expand(6, 6), x, torch.full((), -1e9)) + 1

    def broadcast(x: torch.Tensor) -> torch.Tensor:
        at = torch.arange(6)
        seen = (at[:, None] >= 0).expand(2, 6, 6)
        return torch.where(seen, x, torch.full((), -1e9)) + 1

    yield positions, (torch.randn(6, 6),)
    yield broadcast, (torch.randn(1, 6, 6),)


@where_true.refuses
def _() -> Iterator[Spelling]:
    def some(x: torch.Tensor) -> torch.Tensor:
        at = torch.arange(6)
        return torch.where((at[:, None] >= 1).expand(6, 6), x, torch.full((), -1e9)) + 1

    yield some, (torch.randn(6, 6),)
