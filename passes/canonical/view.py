"""Views moved out of the way of what could fuse."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from graphopt.passes.base import Match, Spelling, rule, surely

aten = torch.ops.aten


@rule("canonical")
def cast_before_view(x, shape, dtype):
    """A cast of a view becomes a view of the cast, so that the cast stands beside its producer."""
    return aten.to.dtype(aten.view.default(x, shape), dtype)


@cast_before_view.check
def _(m: Match) -> str | None:
    x = m.tensor("x")
    if x is None or not x.dtype.is_floating_point or not m.dtype.is_floating_point:
        return ""
    if m.x.op != "call_function":
        return ""
    return None if is_contiguous(x) else "its operand is not contiguous, and casts keep strides"


def is_contiguous(x: torch.Tensor) -> bool:
    """Whether a fake tensor is surely contiguous; adds no guard on symbolic sizes."""
    expected: int | torch.SymInt = 1
    for size, stride in zip(reversed(x.shape), reversed(x.stride()), strict=True):
        if not surely(size == 1) and not surely(stride == expected):
            return False
        expected = expected * size
    return True


@cast_before_view.replace
def _(m: Match) -> fx.Node:
    return m.call(aten.view.default, m.call(aten.to.dtype, m.x, m.dtype), m.shape)


@cast_before_view.spellings
def _() -> Iterator[Spelling]:
    yield lambda x: (x * 2).view(-1).to(torch.bfloat16), (torch.randn(3, 4),)


@cast_before_view.refuses
def _() -> Iterator[Spelling]:
    def view_is_kept(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = (x * 2).view(-1)
        return y.to(torch.bfloat16), y

    yield view_is_kept, (torch.randn(3, 4),)
    yield lambda x: x.view(-1).to(torch.bfloat16), (torch.randn(3, 4),)
