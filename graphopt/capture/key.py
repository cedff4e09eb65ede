"""The graph key: what of a call selects a graph.

A key has four parts: the module's mode, the ambient modes (grad, inference, autocast, defaults),
the structure of the arguments with their plain values, and the facts of each tensor argument. What
a graph relies on beside these, the state of the module, is its own `graphopt.capture.guard.Guard`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from graphopt.capture import signature as sig
from graphopt.capture.arguments import nested

_DEVICES = ("cpu", "cuda")
_interpreter = torch._C._functorch.peek_interpreter_stack

Ambient = tuple[Any, ...]
Leaf = tuple[torch.dtype, torch.device, torch.Size, bool, Any]


class GraphKey(NamedTuple):
    """What selects a graph.

    Attributes:
        training: the training flag of the root (those of submodules are guarded where read).
        ambient: grad mode, inference mode, default dtype, autocast dtype per device type, default
            device, whether deterministic algorithms are asked for.
        structure: structure of `(args, kwargs)`, plain values included.
        leaves: per tensor argument: dtype, device, shape, requires_grad, strides (True where it
            is contiguous).
        same: for arguments of which some are one object: per leaf the first leaf that it is.
    """

    training: bool
    ambient: Ambient
    structure: sig.Structure
    leaves: tuple[Leaf, ...]
    same: tuple[int, ...] = ()

    def family(self) -> tuple[Any, ...]:
        """The key without the sizes: graphs of one family differ in sizes only."""
        facts = tuple((d, v, len(s), r, _order(c)) for d, v, s, r, c in self.leaves)
        return (self.training, self.ambient, self.structure, facts, self.same)

    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shape of each tensor argument."""
        return tuple(tuple(leaf[2]) for leaf in self.leaves)

    def strides(self) -> tuple[Any, ...]:
        """The strides of each tensor argument, True for a contiguous one."""
        return tuple(leaf[4] for leaf in self.leaves)


def ambient() -> Ambient:
    """The process's modes that a captured graph depends on.

    Example:
        >>> with torch.no_grad():
        ...     ambient()[0]
        False
    """
    # a default device is a mode of torch functions
    device = torch.get_default_device() if torch._C._len_torch_function_stack() else None
    return (*switches(), device, torch.are_deterministic_algorithms_enabled())


def switches() -> tuple[Any, ...]:
    """The modes that a forward could switch: grad, inference, default dtype, autocast dtypes."""
    casts = tuple(
        [torch.get_autocast_dtype(d) if torch.is_autocast_enabled(d) else None for d in _DEVICES]
    )
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        casts,
    )


def transformed() -> bool:
    """Whether the call stands inside a transform of torch.func or forward-mode differentiation.

    They replace tensors by wrappers, for which fused ops have no rules.
    """
    return forward_ad._current_level >= 0 or _interpreter() is not None


def autocast_dtypes(modes: Ambient) -> dict[str, torch.dtype]:
    """Device type -> dtype of the ambient autocast in what `ambient` returned."""
    return {d: t for d, t in zip(_DEVICES, modes[3], strict=True) if t is not None}


def leaf_facts(leaves: Sequence[torch.Tensor]) -> tuple[Leaf, ...]:
    """The facts of each tensor argument that stand in a key.

    Raises:
        CaptureError: for a nested tensor, which has none.
    """
    try:
        return tuple(
            [
                (t.dtype, t.device, t.shape, t.requires_grad, t.is_contiguous() or _strides(t))
                for t in leaves
            ]
        )
    except RuntimeError as error:
        raise nested(error) from None


def same_objects(leaves: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Per leaf the first leaf that is the very same object; empty where all are distinct.

    Example:
        >>> x, y = torch.ones(1), torch.ones(1)
        >>> same_objects([x, y]), same_objects([x, y, x])
        ((), (0, 1, 0))
    """
    marks = list(map(id, leaves))
    return () if len(set(marks)) == len(marks) else tuple([marks.index(m) for m in marks])


def _strides(tensor: torch.Tensor) -> tuple[int, ...] | None:
    return tensor.stride() if tensor.layout is torch.strided else None


def _order(strides: Any) -> Any:
    """Which dimension has the greatest stride, which the next; True where it is contiguous."""
    if strides is True or strides is None:
        return strides
    return tuple(sorted(range(len(strides)), key=lambda d: -strides[d]))
