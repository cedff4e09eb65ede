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

_DEVICES = ("cpu", "cuda")
_interpreter = torch._C._functorch.peek_interpreter_stack

Ambient = tuple[Any, ...]
Leaf = tuple[torch.dtype, torch.device, torch.Size, bool, bool]


class GraphKey(NamedTuple):
    """What selects a graph.

    Attributes:
        training: the training flag of the root (those of submodules are guarded where read).
        ambient: grad mode, inference mode, default dtype, autocast dtype per device type, default
            device, whether deterministic algorithms are asked for.
        structure: structure of `(args, kwargs)`, plain values included.
        leaves: per tensor argument: dtype, device, shape, requires_grad, contiguous.
    """

    training: bool
    ambient: Ambient
    structure: sig.Structure
    leaves: tuple[Leaf, ...]

    def family(self) -> tuple[Any, ...]:
        """The key without the sizes: graphs of one family differ in sizes only."""
        facts = tuple((d, v, len(s), r, c) for d, v, s, r, c in self.leaves)
        return (self.training, self.ambient, self.structure, facts)

    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shape of each tensor argument."""
        return tuple(tuple(leaf[2]) for leaf in self.leaves)


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
    """The facts of each tensor argument that stand in a key."""
    return tuple([(t.dtype, t.device, t.shape, t.requires_grad, t.is_contiguous()) for t in leaves])
