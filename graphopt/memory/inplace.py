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
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten

_IN_PLACE = frozenset(
    {
        aten.add.Tensor,
        aten.scatter_add.default,
        aten.index_put.default,
        aten.index_add.default,
    }
)


def takes_over(func: Any, args: Sequence[Any]) -> bool:
    """Whether the result of an operation of the backward takes the place of its first operand.

    Called inside the dispatch of the operation: it counts who holds the operand.
    """
    if func not in _IN_PLACE or torch.is_grad_enabled() or not isinstance(args[0], torch.Tensor):
        return False
    node: Any = torch._C._current_autograd_node()
    if node is None or (func is aten.add.Tensor and not _same(args[0], args[1])):
        return False
    return _holders(args[0]) == sole()


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
