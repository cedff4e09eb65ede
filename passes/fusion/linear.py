"""Linear layers whose width the tensor cores cannot take as it is."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from graphopt.graph.facts import Facts, concrete
from graphopt.passes.base import LOW
from graphopt.passes.rule import Match, Spelling, rule

aten = torch.ops.aten
ALIGNMENT = 8
"""Elements of 16 bits in the 16 bytes that a row must be a multiple of."""
WORTH = 1 << 20
"""Output elements from which the padded copy of the weight pays."""


@rule("fusion")
def pad_linear(x, w):
    """A low-precision linear whose width is no multiple of 8 is computed at the next one.

    With an odd vocabulary no row of the logits is aligned, and the GEMMs fall back to kernels
    that are several times slower. The added columns come from zero rows and are sliced off, so
    that no value changes.
    """
    return aten.linear.default(x, w, None)


@pad_linear.check
def _(m: Match) -> str | None:
    w, out = m.tensor("w"), m.val
    if w is None or w.dtype not in LOW or w.dim() != 2:
        return ""
    width = w.shape[0]
    if not isinstance(width, int) or width % ALIGNMENT == 0:
        return ""
    if concrete(out.numel()) < WORTH:
        return f"its output of {concrete(out.numel())} elements is too small to pay for a copy"
    return None


@pad_linear.replace
def _(m: Match) -> fx.Node:
    width = m.w.meta["val"].shape[0]
    missing = -width % ALIGNMENT
    wide = m.call(aten.constant_pad_nd.default, m.w, [0, 0, 0, missing])
    out = m.call(aten.slice.Tensor, m.call(aten.linear.default, m.x, wide), -1, 0, width)
    # A caller may rely on the strides of what he gets; the copy is cheap beside such a GEMM.
    returned = Facts.of(m.body.graph).leaves(m.root)
    return m.call(aten.contiguous.default, out) if returned else out


@pad_linear.spellings
def _() -> Iterator[Spelling]:
    x, w = torch.randn(1024, 8).bfloat16(), torch.randn(1025, 8).bfloat16()
    yield lambda x, w: torch.nn.functional.linear(x, w).float(), (x, w)
    yield lambda x, w: torch.nn.functional.linear(x, w), (x, w)


@pad_linear.refuses
def _() -> Iterator[Spelling]:
    x, w = torch.randn(1024, 8), torch.randn(1025, 8)
    linear = torch.nn.functional.linear
    yield lambda x, w: linear(x, w).float(), (x, w)
    yield lambda x, w: linear(x, w).float(), (x.bfloat16(), w[:1024].bfloat16())
    yield lambda x, w: linear(x, w).float(), (x[:8].bfloat16(), w.bfloat16())
