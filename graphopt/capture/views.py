"""View operations and their inverses: how a write to a view becomes a new value of its base."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

Emit = Callable[..., fx.Node]
"""`emit(op, *args)` adds an operation to the new graph and returns its node."""


def _reshape(emit: Emit, base: fx.Node, new: fx.Node, *_: Any) -> fx.Node:
    shape = list(base.meta["val"].shape)
    if all(isinstance(s, int) for s in shape):
        return emit(aten.reshape.default, new, shape)
    return emit(aten.reshape_as.default, new, base)


def _same(emit: Emit, base: fx.Node, new: fx.Node, *_: Any) -> fx.Node:
    return new


def _transpose(emit: Emit, base: fx.Node, new: fx.Node, a: int, b: int) -> fx.Node:
    return emit(aten.transpose.int, new, a, b)


def _permute(emit: Emit, base: fx.Node, new: fx.Node, dims: Sequence[int]) -> fx.Node:
    rank = len(dims)
    back = [0] * rank
    for i, d in enumerate(dims):
        back[d % rank] = i
    return emit(aten.permute.default, new, back)


def _t(emit: Emit, base: fx.Node, new: fx.Node) -> fx.Node:
    return emit(aten.t.default, new)


def _reverse(emit: Emit, base: fx.Node, new: fx.Node) -> fx.Node:
    return emit(aten.permute.default, new, list(range(base.meta["val"].dim()))[::-1])


def _swap_last(emit: Emit, base: fx.Node, new: fx.Node) -> fx.Node:
    return emit(aten.transpose.int, new, -2, -1)


def _movedim(emit: Emit, base: fx.Node, new: fx.Node, src: Any, dst: Any) -> fx.Node:
    if isinstance(src, int):
        return emit(aten.movedim.int, new, dst, src)
    return emit(aten.movedim.intlist, new, dst, src)


def _slice(
    emit: Emit,
    base: fx.Node,
    new: fx.Node,
    dim: int = 0,
    start: Any = None,
    end: Any = None,
    step: int = 1,
) -> fx.Node:
    return emit(aten.slice_scatter.default, base, new, dim, start, end, step)


def _narrow(emit: Emit, base: fx.Node, new: fx.Node, dim: int, start: Any, length: Any) -> fx.Node:
    if not (isinstance(start, int) and isinstance(length, int)):
        raise NotImplementedError
    start = start + base.meta["val"].shape[dim] if start < 0 else start
    return emit(aten.slice_scatter.default, base, new, dim, start, start + length)


def _select(emit: Emit, base: fx.Node, new: fx.Node, dim: int, index: Any) -> fx.Node:
    return emit(aten.select_scatter.default, base, new, dim, index)


def _diagonal(
    emit: Emit, base: fx.Node, new: fx.Node, offset: int = 0, a: int = 0, b: int = 1
) -> fx.Node:
    return emit(aten.diagonal_scatter.default, base, new, offset, a, b)


def _as_strided(
    emit: Emit, base: fx.Node, new: fx.Node, size: Any, stride: Any, offset: Any = None
) -> fx.Node:
    return emit(aten.as_strided_scatter.default, base, new, size, stride, offset)


def _expand(emit: Emit, base: fx.Node, new: fx.Node, *_: Any) -> fx.Node:
    if tuple(base.meta["val"].shape) != tuple(new.meta["val"].shape):
        raise NotImplementedError  # eager refuses such a write too: elements share memory
    return new


def _view_as_real(emit: Emit, base: fx.Node, new: fx.Node) -> fx.Node:
    return emit(aten.view_as_complex.default, new)


def _view_as_complex(emit: Emit, base: fx.Node, new: fx.Node) -> fx.Node:
    return emit(aten.view_as_real.default, new)


INVERSES: dict[str, Callable[..., fx.Node]] = {
    **dict.fromkeys(
        ("view", "reshape", "_unsafe_view", "flatten", "unflatten", "view_as", "reshape_as"),
        _reshape,
    ),
    **dict.fromkeys(("squeeze", "unsqueeze", "ravel", "atleast_1d", "atleast_2d"), _reshape),
    **dict.fromkeys(("detach", "alias", "positive", "lift_fresh"), _same),
    **dict.fromkeys(("resolve_conj", "resolve_neg"), _same),
    **dict.fromkeys(("transpose", "swapaxes", "swapdims"), _transpose),
    "permute": _permute,
    "t": _t,
    "numpy_T": _reverse,
    "mT": _swap_last,
    **dict.fromkeys(("movedim", "moveaxis"), _movedim),
    **dict.fromkeys(("expand", "expand_as"), _expand),
    "slice": _slice,
    "narrow": _narrow,
    "select": _select,
    "diagonal": _diagonal,
    "as_strided": _as_strided,
    "view_as_real": _view_as_real,
    "view_as_complex": _view_as_complex,
}
"""Inverse of a view by op name: (emit, base now, new value of the view, *the view's arguments)."""

IN_PLACE_VIEWS = {
    f"{n}_" for n in ("transpose", "t", "squeeze", "unsqueeze", "swapaxes", "swapdims")
}
"""Operations that change a tensor's own shape in place, not its values."""


def dense_order(value: torch.Tensor) -> list[int] | None:
    """Dimensions from the outermost in memory to the innermost; None when there are gaps."""
    sizes, strides = value.shape, value.stride()
    if not all(isinstance(s, int) for s in (*sizes, *strides)):
        return None
    order = sorted(range(len(sizes)), key=lambda d: (-strides[d], d))
    expected = 1
    for d in reversed(order):
        if sizes[d] != 1 and strides[d] != expected:
            return None
        expected *= sizes[d]
    return order


def laid_out_as(emit: Emit, want: Any, new: fx.Node) -> fx.Node:
    """A value with the strides of another, where a functional form laid it out otherwise."""
    have = new.meta["val"]
    if not isinstance(want, torch.Tensor) or want.stride() == have.stride():
        return new
    order = dense_order(want)
    if order is None or order == dense_order(have):
        return new
    moved = emit(aten.permute.default, new, order)
    dense = emit(aten.clone.default, moved, memory_format=torch.contiguous_format)
    return emit(aten.permute.default, dense, [order.index(d) for d in range(len(order))])


def write_over(emit: Emit, base: fx.Node, source: fx.Node) -> fx.Node:
    """The source in place of all of a value that requires grad (whose gradient is then zero)."""
    if base.meta["val"].dim() > 0:
        return emit(aten.slice_scatter.default, base, source)
    rows = [emit(aten.unsqueeze.default, v, 0) for v in (base, source)]
    return emit(aten.squeeze.dim, emit(aten.slice_scatter.default, *rows), 0)


def write_part(
    emit: Emit, base: fx.Node, new: fx.Node, op: str, args: Sequence[Any], index: int
) -> fx.Node:
    """The base after its `index`-th part (of a split, chunk or unbind) took a new value."""
    value = base.meta["val"]
    dim = _dim_of(op, args)
    if op == "unbind":
        return emit(aten.select_scatter.default, base, new, dim, index)
    parts = PART_SIZES[op](value, args, dim)
    start = sum(parts[:index])
    return emit(aten.slice_scatter.default, base, new, dim, start, start + parts[index])


def _dim_of(op: str, args: Sequence[Any]) -> int:
    position = 0 if op == "unbind" else 1
    return int(args[position]) if len(args) > position else 0


def _even(value: torch.Tensor, args: Sequence[Any], dim: int) -> list[int]:
    if isinstance(args[0], (list, tuple)):
        return list(args[0])
    total, size = value.shape[dim], args[0]
    return [min(size, total - i) for i in range(0, total, size)]


def _chunks(value: torch.Tensor, args: Sequence[Any], dim: int) -> list[int]:
    return _even(value, [-(-value.shape[dim] // args[0])], dim)


def _tensor_split(value: torch.Tensor, args: Sequence[Any], dim: int) -> list[int]:
    total = value.shape[dim]
    if isinstance(args[0], int):
        short, longer = divmod(total, args[0])
        return [short + 1] * longer + [short] * (args[0] - longer)
    ends = [min(i, total) for i in args[0]] + [total]
    return [b - a for a, b in zip([0, *ends], ends, strict=False)]


PART_SIZES: dict[str, Callable[[torch.Tensor, Sequence[Any], int], list[int]]] = {
    "split": _even,
    "split_with_sizes": _even,
    "chunk": _chunks,
    "tensor_split": _tensor_split,
}
"""Sizes of the parts along the split dimension, by op name."""

PARTS = {*PART_SIZES, "unbind"}
"""Views with several results."""
