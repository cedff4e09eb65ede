"""Operands that a backward may write over, since nobody will see them again.

The gradient of an activation or a gated unit is as large as its operand, and both are there at
once: often the highest moment of a step. Where the operand was computed again for this one use
(`graphopt.remat`), or will not be asked for again, its memory can take the gradient.

Three things make that safe. The runtime *lends* the tensor: it computed it and has let go of it,
and a second backward computes it anew; or it *offers* a tensor that was kept, where autograd is
about to let go of it for good (no `retain_graph`). The graph says so: only values whose marker has
`overwrite=True`, or that a marker `spend` names, are lent and offered. And when the kernel is to
run, the holders of the tensor and of its memory are counted: a hook, a profiler or a tracer that
holds it, too, makes one more, and then the gradient gets memory of its own. So it does where
gradients are recorded (`create_graph=True`), under `torch.func`, in forward mode and for tensor
subclasses.
"""

from __future__ import annotations

import dataclasses
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _disable_current_modes

from graphopt.kernels._batched import is_batched
from graphopt.kernels._library import _FUNCTIONALIZE, _PLAIN, _is_functionalizing


@dataclasses.dataclass(frozen=True)
class Overwriting:
    """A backward that may write over operands of its forward.

    Attributes:
        backward: the operator that gives the gradients memory of their own.
        operands: positions of the operands in the forward's arguments.
        saved: their positions in the arguments of `backward`.
        over: takes the arguments of `backward`, and writes the gradients over the operands.
    """

    backward: torch._ops.OpOverload
    operands: tuple[int, ...]
    saved: tuple[int, ...]
    over: Callable[..., Any]


_BY_FORWARD: dict[Any, Overwriting] = {}
_BY_BACKWARD: dict[Any, Overwriting] = {}


def overwrites(forward: torch._ops.OpOverload, how: Overwriting) -> None:
    """Say that the backward of an operator may write over operands."""
    _BY_FORWARD[forward] = _BY_BACKWARD[how.backward] = how


def operands_of(forward: Any) -> tuple[int, ...]:
    """Positions of the operands that the backward of an operator may write over; none of most.

    Example:
        >>> operands_of(torch.ops.graphopt.glu.default), operands_of(torch.ops.aten.mul.Tensor)
        ((0, 1), ())
    """
    how = _BY_FORWARD.get(forward)
    return how.operands if how is not None else ()


def overwriting(backward: Any) -> Overwriting | None:
    """How a backward's operator can write over its operands; None where it cannot."""
    return _BY_BACKWARD.get(backward)


# ------------------------------------------------------------------------------------ at run time


class Keeper(Protocol):
    """Who holds a tensor for autograd, and offers it."""

    def give(self) -> None:
        """Let go of the tensor: it is about to be written over."""

    def take_back(self, tensor: torch.Tensor) -> None:
        """It is not, since others hold it, too."""


class _Local(threading.local):
    def __init__(self) -> None:
        self.lent: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self.offered: weakref.WeakValueDictionary[int, Keeper] = weakref.WeakValueDictionary()


_LOCAL = _Local()


def lend(tensor: torch.Tensor) -> None:
    """Give up a tensor to the backward that is about to read it on this thread.

    The caller made it for that alone and keeps no reference to it. Nothing is lent where gradients
    are recorded.
    """
    if not torch.is_grad_enabled():
        storage = tensor.untyped_storage()
        _LOCAL.lent[storage._cdata] = storage


def offer(tensor: torch.Tensor, keeper: Keeper) -> None:
    """Let the backward that is about to read a tensor on this thread have it for good.

    Only where autograd lets go of it then: in a backward that neither records nor retains.
    """
    if torch.is_grad_enabled() or torch._C._current_graph_task_id() == -1:
        return
    autograd: Any = torch._C._autograd
    if not autograd._get_current_graph_task_keep_graph():
        _LOCAL.offered[tensor.untyped_storage()._cdata] = keeper


def may_overwrite(saved: tuple[Any, ...], index: int, grad: torch.Tensor) -> bool:
    """Whether a backward may write over one of its saved tensors.

    It may once: what was lent or offered is then the caller's.

    Args:
        saved: what `ctx.saved_tensors` gave, held by nothing but its caller.
        index: which of them.
        grad: the gradient that is to be written there by way of.
    """
    lent, offered = _LOCAL.lent, _LOCAL.offered
    if not (lent or offered) or not (_plain(saved[index]) and _plain(grad)):
        return False
    storage = saved[index].untyped_storage()
    keeper = offered.pop(storage._cdata, None)
    if lent.pop(storage._cdata, None) is not storage and keeper is None:
        return False
    del storage
    if keeper is not None:
        keeper.give()
    watched = forward_ad._current_level >= 0 or _is_functionalizing(_FUNCTIONALIZE)
    if not watched and saved[index].is_contiguous() and _holders(saved, index) == _SOLE:
        return True
    if keeper is not None:
        keeper.take_back(saved[index])
    return False


def _plain(tensor: Any) -> bool:
    kind = type(tensor)
    if kind not in _PLAIN and kind is not FakeTensor:
        return False
    # `is_grads_batched` still takes the older kind of batches
    return not (torch._C._functorch.is_functorch_wrapped_tensor(tensor) or is_batched(tensor))


def _holders(saved: tuple[Any, ...], index: int) -> tuple[int, int, int]:
    """How often the object of a tensor, the tensor and its storage are held, by whomever."""
    tensor = saved[index]
    storage = tensor.untyped_storage()
    count = getattr(tensor, "_use_count", None)
    found: int = torch._C._storage_Use_Count(storage._cdata)
    return sys.getrefcount(tensor), (count() if count is not None else 1), found


def _sole() -> tuple[int, int, int]:
    """What `_holders` counts for a tensor that only its tuple holds, in this Python and torch."""
    with _disable_current_modes():
        made = (torch.empty(1, device="cpu"),)
        return _holders(made, 0)


_SOLE = _sole()
