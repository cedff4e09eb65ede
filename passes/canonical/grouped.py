"""Grouped-query attention (Ainslie et al., 2023): keys and values that are repeated for each head.

Hugging Face models repeat them only where they pass a mask, as they do when they are captured; in
eager they leave that to the attention kernel. With the mask proved causal, so can the graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from graphopt.passes.base import surely
from graphopt.passes.rule import Match, Spelling, rule

aten = torch.ops.aten


def repeated(x: Any, dim: Any, shape: Any, flat: Any) -> Any:
    """Pattern of `repeat_kv`: each head of x several times, side by side."""
    return aten.reshape.default(aten.expand.default(aten.unsqueeze.default(x, dim), shape), flat)


@rule("canonical")
def grouped_attention(
    q, k, v, k_dim, k_shape, k_flat, v_dim, v_shape, v_flat, p, causal, scale
):  # fmt: skip
    """Attention over repeated keys and values reads them unrepeated, with enable_gqa=True."""
    return aten.scaled_dot_product_attention.default(
        q,
        repeated(k, k_dim, k_shape, k_flat),
        repeated(v, v_dim, v_shape, v_flat),
        None,
        p,
        causal,
        scale=scale,
    )


@grouped_attention.check
def _(m: Match) -> str | None:
    q, k, v = m.tensor("q"), m.tensor("k"), m.tensor("v")
    if q is None or k is None or v is None or not q.dim() == k.dim() == v.dim() == 4:
        return "q, k and v do not have four dims"
    if not q.dtype == k.dtype == v.dtype:
        return "q, k and v differ in dtype"
    if any(d % 5 != 2 for d in (m.k_dim, m.v_dim)):
        return "the heads are not repeated side by side"
    if not surely(k.shape[1] == v.shape[1]) or not surely(k.shape[2] == v.shape[2]):
        return "keys and values differ in number"
    if (
        not isinstance(q.shape[1], int)
        or not isinstance(k.shape[1], int)
        or q.shape[1] % k.shape[1]
    ):
        return "the number of heads is no multiple of that of the keys"
    for name, x in (("k", k), ("v", v)):
        flat = _repeated_shape(m, name)
        wanted = (x.shape[0], q.shape[1], x.shape[2], x.shape[3])
        if len(flat) != 4 or not all(surely(a == b) for a, b in zip(flat, wanted, strict=True)):
            return f"{name} is repeated to {list(flat)}, not to the heads of q"
    return None


def _repeated_shape(m: Match, name: str) -> torch.Size:
    """The shape of the repeated keys or values."""
    source = getattr(m, name)
    for node in m.nodes:
        if node.target is aten.reshape.default:
            view = node.args[0].args[0]  # type: ignore[union-attr]
            if view.args[0] is source:  # type: ignore[union-attr]
                shape: torch.Size = node.meta["val"].shape
                return shape
    return torch.Size()


@grouped_attention.replace
def _(m: Match) -> fx.Node:
    return m.call(
        aten.scaled_dot_product_attention.default,
        m.q,
        m.k,
        m.v,
        None,
        m.p,
        m.causal,
        scale=m.scale,
        enable_gqa=True,
    )


def _repeat(x: torch.Tensor, n: int) -> torch.Tensor:
    b, h, s, d = x.shape
    return x[:, :, None, :, :].expand(b, h, n, s, d).reshape(b, h * n, s, d)


@grouped_attention.spellings
def _() -> Iterator[Spelling]:
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    attend = torch.nn.functional.scaled_dot_product_attention
    yield lambda q, k, v: attend(q, _repeat(k, 2), _repeat(v, 2), is_causal=True), (q, k, v)
    yield lambda q, k, v: attend(q, _repeat(k, 2), _repeat(v, 2), scale=0.3), (q, k, v)


@grouped_attention.refuses
def _() -> Iterator[Spelling]:
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    attend = torch.nn.functional.scaled_dot_product_attention

    def tiled(x: torch.Tensor) -> torch.Tensor:
        return x[:, None].expand(2, 2, 2, 5, 8).reshape(2, 4, 5, 8)

    def kept(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        keys = _repeat(k, 2)
        return attend(q, keys, _repeat(v, 2)), keys

    yield lambda q, k, v: attend(q, tiled(k), tiled(v)), (q, k, v)
    yield kept, (q, k, v)
