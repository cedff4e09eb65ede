"""Bytes and FLOPs of one operation as the dispatcher sees it, forward or backward alike."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import torch

from graphopt.cost.ops import Cost
from graphopt.kernels import registry

aten = torch.ops.aten

_NO_KERNEL = frozenset(
    {
        "aten::empty",
        "aten::empty_like",
        "aten::empty_strided",
        "aten::empty_permuted",
        "aten::new_empty",
        "aten::new_empty_strided",
        "aten::resize_",
        "aten::set_",
        "prim::device",
    }
)
"""Operations that give out memory or names and launch nothing."""

_LIKE = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": (
        "aten::_scaled_dot_product_flash_attention"
    ),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": (
        "aten::_scaled_dot_product_flash_attention_backward"
    ),
}
"""Operations without a formula of their own -> the one whose formula is right for them."""

_RECURRENT = {
    "aten::mkldnn_rnn_layer": 1,
    "aten::mkldnn_rnn_layer_backward": 2,
    "aten::_cudnn_rnn": 1,
    "aten::_cudnn_rnn_backward": 2,
    "aten::miopen_rnn": 1,
    "aten::miopen_rnn_backward": 2,
}
"""Layers that step through a sequence -> how many products each weight is in."""


def dispatched_cost(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Cost:
    """What one operation moves and computes: operands read once, results written once.

    Fake tensors do. FLOPs come from torch's formulas where it has one (matrix products,
    convolutions, attention), else one per element of the result. Views and bare allocations are
    free.

    Args:
        func: the overload.
        args: its positional arguments.
        kwargs: its keyword arguments.
        out: what it returned.

    Example:
        >>> x = torch.ones(4, 4)
        >>> dispatched_cost(aten.mm.default, (x, x), {}, x @ x)
        Cost(bytes=192, flops=128)
        >>> dispatched_cost(aten.t.default, (x,), {}, x.t())
        Cost(bytes=0, flops=0)
    """
    if launches_nothing(func):
        return Cost(0, 0)
    given = list(_tensors((args, kwargs)))
    made = list(_tensors(out))
    shared = {t.untyped_storage()._cdata for t in given if t.layout is torch.strided}
    writes = _writes(func)
    if made and not writes and all(_storage(t) in shared for t in made):
        return Cost(0, 0)  # a view, though its schema may not say so (reshape, contiguous)
    moved = sum(map(touched_bytes, given)) + sum(map(touched_bytes, made))
    if writes and not made:
        moved += touched_bytes(given[0]) if given else 0
    return Cost(moved, _flops(func, args, kwargs, out, made))


@functools.cache
def launches_nothing(func: Any) -> bool:
    """Whether an operation starts no kernel: a view, or memory given out."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return True
    if schema.name in _NO_KERNEL or schema.name.startswith("prim::"):
        return True
    infos = [r.alias_info for r in schema.returns]
    return any(info is not None and not info.is_write for info in infos)


@functools.cache
def _writes(func: Any) -> bool:
    return any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)


def touched_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the elements that a tensor names; those of an expanded one count once.

    Example:
        >>> touched_bytes(torch.ones(1).expand(1000))
        4
    """
    if tensor.layout is not torch.strided:
        return tensor.numel() * tensor.element_size()
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= int(size) if stride else min(1, int(size))
    return count * tensor.element_size()


def _flops(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, made: list[torch.Tensor]
) -> int:
    name = _LIKE.get(func._schema.name)
    packet = func.overloadpacket if name is None else _packet(name)
    from torch.utils.flop_counter import flop_registry  # which loads Triton

    formula = flop_registry.get(packet)
    if formula is not None:
        try:
            return int(formula(*args, **kwargs, out_val=out))
        except (AssertionError, IndexError, TypeError, ValueError):
            pass  # a shape that torch's formula was not written for: count the elements
    own = registry().get(func._schema.name.removeprefix("graphopt::"))
    if own is not None and own.overload is func:
        return int(own.cost(*args, **kwargs).flops)
    times = _RECURRENT.get(func._schema.name)
    if times is not None:  # every weight meets every row of the input, at each step
        x, weights = args[0], args[1] if isinstance(args[1], (tuple, list)) else args[1:3]
        rows = math.prod(map(int, x.shape[:-1]))
        return 2 * times * rows * sum(math.prod(map(int, w.shape)) for w in weights)
    return sum(math.prod(map(int, t.shape)) for t in made)


def _packet(name: str) -> Any:
    return getattr(aten, name.removeprefix("aten::"), None)


def _storage(tensor: torch.Tensor) -> int | None:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else None


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
