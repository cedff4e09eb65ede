"""Views moved out of the way of what could fuse."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from graphopt.passes.base import LOW, surely
from graphopt.passes.rule import Match, Spelling, rule

aten = torch.ops.aten


@rule("canonical")
def cast_before_view(x, shape, dtype):
    """A narrowing cast of a view becomes a view of the cast, beside the op that made the value."""
    return aten.to.dtype(aten.view.default(x, shape), dtype)


@cast_before_view.also
def _cast_before_reshape(x, shape, dtype):
    return aten.to.dtype(aten.reshape.default(x, shape), dtype)


@cast_before_view.also
def _cast_before_expand(x, shape, dtype):
    return aten.to.dtype(aten.expand.default(x, shape), dtype)


@cast_before_view.also
def _cast_before_unsqueeze(x, dim, dtype):
    return aten.to.dtype(aten.unsqueeze.default(x, dim), dtype)


@cast_before_view.also
def _cast_before_transpose(x, dim, other, dtype):
    return aten.to.dtype(aten.transpose.int(x, dim, other), dtype)


@cast_before_view.check
def _(m: Match) -> str | None:
    x = m.tensor("x")
    if x is None or x.dtype != torch.float32 or m.dtype not in LOW or m.x.op != "call_function":
        return ""
    target = _view(m).target
    if target is aten.view.default and not is_contiguous(x):
        return "its operand is not contiguous, and a cast keeps strides"
    # A cast of an expanded tensor is dense and the new form is not: only reshape takes both.
    if target is aten.expand.default and any(
        u.target is not aten.reshape.default for u in m.root.users
    ):
        return "the cast makes an expanded tensor dense, which is relied upon"
    if target is aten.expand.default and not by_autocast(m.root):
        return "the gradient of the expand would be summed in low precision, which the user did not"
    return None


def by_autocast(cast: fx.Node) -> bool:
    """Whether a cast was written for an autocast, and not by the user."""
    return cast.meta.get("graphopt_rule") == "materialize_autocast"


def _view(m: Match) -> fx.Node:
    return next(n for n in m.nodes if n is not m.root)


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
    view = _view(m)
    cast = m.call(aten.to.dtype, m.x, m.dtype)
    if by_autocast(m.root):
        cast.meta["graphopt_rule"] = m.root.meta["graphopt_rule"]
    return m.call(view.target, cast, *view.args[1:], **view.kwargs)


@cast_before_view.spellings
def _() -> Iterator[Spelling]:
    x, low = torch.randn(3, 4), torch.bfloat16
    yield lambda x: (x * 2).view(-1).to(low), (x,)
    yield lambda x: (x * 2).t().reshape(-1).to(low), (x,)
    yield lambda x: (x * 2).transpose(0, 1).to(low), (x,)


@cast_before_view.refuses
def _() -> Iterator[Spelling]:
    def view_is_kept(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = (x * 2).view(-1)
        return y.to(torch.bfloat16), y

    x = torch.randn(3, 4)
    yield view_is_kept, (x,)
    yield lambda x: x.view(-1).to(torch.bfloat16), (x,)
    yield lambda x: (x * 2).view(-1).to(torch.float64), (x,)
    yield lambda x: (x * 2)[None].expand(2, 3, 4).to(torch.bfloat16), (x,)
    yield lambda x: (x * 2)[None].expand(2, 3, 4).to(torch.bfloat16).reshape(6, 4), (x,)
