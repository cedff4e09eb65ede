"""Operations that autograd runs in place, but not while a dispatch mode watches.

Where a gradient arrives from two sides, the engine adds the second to the first in place if nobody
else holds the first; some backward formulas scatter into the zeros that they just made. Under a
dispatch mode both make a new tensor, since a mode need not cope with writes. A step without a mode
does not need that memory: the result takes the place of the first operand.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.utils._python_dispatch import TorchDispatchMode

from graphopt.memory.tracker import Allocation

aten = torch.ops.aten

_INTO_ZEROS = frozenset(
    {
        aten.scatter.src,
        aten.scatter_add.default,
        aten.index_put.default,
        aten.index_add.default,
        aten.put.default,
    }
)
"""Operations by which backward formulas write a gradient into zeros."""
_ZEROS = frozenset({"aten.new_zeros.default", "aten.zeros_like.default", "aten.zeros.default"})
"""Operations that make them."""


_CHAINED = frozenset({aten.sub.Tensor, aten.mul.Tensor})
_CHAINS = frozenset({"BinaryCrossEntropyWithLogitsBackward0"})
"""Nodes whose formula goes on in place with what it made itself, and by which operations."""

_MAY = _INTO_ZEROS | _CHAINED | {aten.add.Tensor}


def takes_over(func: Any, args: Sequence[Any], first: Allocation) -> bool:
    """Whether the result of an operation of the backward takes the place of its first operand.

    Called inside the dispatch of the operation: it counts who holds the operand.

    Args:
        func: the operation.
        args: its positional arguments.
        first: the record of the first of them.
    """
    if torch.is_grad_enabled() or func not in _MAY:
        return False
    node: Any = torch._C._current_autograd_node()
    if node is None:
        return False
    found, alone = _holders(args[0]), sole()
    if func in _CHAINED and node.name() in _CHAINS and first.node == node._sequence_nr():
        return found == alone and args[0].shape == node._saved_self.shape
    if func is aten.add.Tensor:
        return found == alone and _same(args[0], args[1]) and _engine_adds(node, first)
    if (
        func not in _INTO_ZEROS
        or alone is None
        or isinstance(node, BackwardCFunction)
        or first.op not in _ZEROS
    ):
        return False
    # In torch's own formulas; some operations hold their operand once more on the way here.
    return found in (alone, (alone[0] + 1, alone[1]))


def _engine_adds(node: Any, first: Allocation) -> bool:
    """Whether the engine adds two gradients, and not a node's own formula two of its terms.

    The engine's first one comes from an earlier node, or from this one, if that has two edges to
    the same place.
    """
    edges = [edge for edge in node.next_functions if edge[0] is not None]
    return first.node != node._sequence_nr() or len(set(edges)) < len(edges)


_EVENLY = frozenset({"MaxBackward1", "MinBackward1", "MedianBackward0", "NanmedianBackward0"})
"""Nodes that share a gradient out among the elements that are the largest, smallest, middle."""


def beside(func: Any, args: Sequence[Any]) -> int:
    """Bytes that lie there beside an operation of the backward only without a dispatch mode.

    On the CPU `_EVENLY` writes shares into zeros, which are made before it counts how many share;
    under a mode it multiplies a mask by the share.

    Args:
        func: the operation.
        args: its positional arguments.
    """
    if func is not aten.sum.default or args[0].dtype is not torch.bool or args[0].is_cuda:
        return 0
    node: Any = torch._C._current_autograd_node()
    if node is None or node.name() not in _EVENLY:
        return 0
    return int(args[0].numel() * node._saved_self.element_size())


def _same(a: torch.Tensor, b: Any) -> bool:
    return isinstance(b, torch.Tensor) and a.shape == b.shape and a.dtype == b.dtype


def _holders(tensor: torch.Tensor) -> tuple[int, int]:
    """How often a tensor and its storage are held, by whomever."""
    count = getattr(tensor, "_use_count", None)
    storage = tensor.untyped_storage()
    return (count() if count is not None else -1), torch._C._storage_Use_Count(storage._cdata)


@functools.cache
def sole() -> tuple[int, int] | None:
    """What `_holders` counts for a gradient that the engine alone holds, in this torch.

    Found by a tiny backward, so to be asked for outside of any mode first; None where unclear.
    """
    found: list[tuple[int, int]] = []

    class Probe(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            if func is aten.add.Tensor:
                found.append(_counted(func, args))
            return func(*args, **(kwargs or {}))

    with torch.inference_mode(False), torch.enable_grad():
        x = torch.ones(2, requires_grad=True)
        y = x.exp()
        z = ((y * 2) * (y * 3)).sum()
        with Probe():
            z.backward()
    return found[0] if len(found) == 1 else None


def _counted(func: Any, args: Sequence[Any]) -> tuple[int, int]:
    """As `takes_over` is called: with the operation and its operands."""
    return _holders(args[0])
