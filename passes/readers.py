"""Who reads a value, through views, and whether a slice of a wider tensor would do for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from graphopt.graph import ops
from graphopt.graph.edit import fake_value
from graphopt.graph.facts import Facts
from graphopt.passes.base import surely

aten = torch.ops.aten
graphopt = torch.ops.graphopt

_STRIDED: dict[Any, bool] = {
    aten.scaled_dot_product_attention.default: True,
    aten.matmul.default: True,
    aten.bmm.default: True,
    aten.mul.Tensor: True,
    aten.relu.default: True,
    aten.gelu.default: True,
    aten.silu.default: True,
    aten.sigmoid.default: True,
    aten.tanh.default: True,
    aten.add.Tensor: False,
    aten.to.dtype: False,
    aten.cat.default: False,
    graphopt.rope.default: False,
}
"""Ops that read any strides in place (last dimension contiguous) -> whether backward needs what
they read. The other graphopt kernels do so where the rows lie at one stride."""


def kept_by_readers(linear: fx.Node, width: int, facts: Facts) -> bool | str:
    """Whether backward needs a linear's result itself, or why a slice would not do in its place.

    Args:
        linear: what is read.
        width: columns of the result that it would be a slice of.
        facts: of its graph.
    """
    if facts.leaves(linear):
        return LEAVES
    val = linear.meta["val"]
    wide = val.new_empty((*val.shape[:-1], width))
    found = _walk(linear, wide[..., : val.shape[-1]])
    return found if isinstance(found, str) else any(found)


LEAVES = "its result leaves the graph, where its strides matter"


def _walk(node: fx.Node, val: torch.Tensor) -> list[bool] | str:
    """Whether each reader of a value keeps it, or why one cannot read `val` in its place."""
    kept: list[bool] = []
    for user in node.users:
        if user.op == "output":
            return LEAVES
        if ops.is_view(user):
            seen = _as_view(user, node, val)
            inner = seen if isinstance(seen, str) else _walk(user, seen)
        else:
            inner = _terminal(user, val)
        if isinstance(inner, str):
            return inner
        kept += inner
    return kept


def _as_view(user: fx.Node, node: fx.Node, val: torch.Tensor) -> torch.Tensor | str:
    """What a view gives of the slice, or why it is none of it."""
    reason = f"{ops.op_name(user.target)} would need a copy of a slice"
    if isinstance(user.meta["val"], (tuple, list)):
        return f"it is split up by {ops.op_name(user.target)}"
    try:
        seen = fake_value(user, {node: val})
    except (RuntimeError, ValueError):
        return reason
    was_view = _storage(user.meta["val"]) == _storage(node.meta["val"])
    may_copy = user.target in (aten.reshape.default, aten.contiguous.default)
    if may_copy or was_view:
        return seen if _storage(seen) == _storage(val) else reason
    return seen


def _storage(val: torch.Tensor) -> int:
    return val.untyped_storage()._cdata


def _terminal(user: fx.Node, val: torch.Tensor) -> list[bool] | str:
    if user.target in _STRIDED:
        return [_STRIDED[user.target]]
    name = ops.op_name(user.target)
    if name.startswith("graphopt.") and _one_stride(val):
        return [True]
    return f"{name} may copy a slice before it reads it"


def _one_stride(val: torch.Tensor) -> bool:
    """Whether the rows of a tensor surely lie at one stride."""
    expected: Any = None
    for size, step in zip(reversed(val.shape[:-1]), reversed(val.stride()[:-1]), strict=True):
        if surely(size == 1):
            continue
        if expected is not None and not surely(step == expected):
            return False
        expected = step * size
    return surely(val.stride(-1) == 1)
