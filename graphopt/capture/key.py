"""The graph key: everything that, when it differs, needs another graph.

A key has four parts: the state of the module (training flags, which parameters require gradients,
dtypes, devices), the ambient modes (grad, inference, autocast, default dtype), the structure of
the arguments with their plain values, and the facts of each tensor argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from graphopt.capture import signature as sig
from graphopt.capture.shadow import SOURCE_OF

_DEVICES = ("cpu", "cuda")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

Ambient = tuple[Any, ...]
Leaf = tuple[torch.dtype, torch.device, torch.Size, bool, bool]


class GraphKey(NamedTuple):
    """What selects a graph.

    Attributes:
        state: number of the module state, as `StateGuard.number` gives it.
        ambient: grad mode, inference mode, default dtype, autocast dtype per device type.
        structure: structure of `(args, kwargs)`, plain values included.
        leaves: per tensor argument: dtype, device, shape, requires_grad, contiguous.
    """

    state: int
    ambient: Ambient
    structure: sig.Structure
    leaves: tuple[Leaf, ...]

    def family(self) -> tuple[Any, ...]:
        """The key without the sizes: graphs of one family differ in sizes only."""
        facts = tuple((d, v, len(s), r, c) for d, v, s, r, c in self.leaves)
        return (self.state, self.ambient, self.structure, facts)

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
    casts = tuple(
        [torch.get_autocast_dtype(d) if torch.is_autocast_enabled(d) else None for d in _DEVICES]
    )
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        casts,
    )


def autocast_dtypes(modes: Ambient) -> dict[str, torch.dtype]:
    """Device type -> dtype of the ambient autocast in what `ambient` returned."""
    return {d: t for d, t in zip(_DEVICES, modes[3], strict=True) if t is not None}


def leaf_facts(leaves: Sequence[torch.Tensor]) -> tuple[Leaf, ...]:
    """The facts of each tensor argument that stand in a key."""
    return tuple([(t.dtype, t.device, t.shape, t.requires_grad, t.is_contiguous()) for t in leaves])


class StateGuard:
    """The state of a module tree as a small number that is cheap to read at every call.

    Equal numbers mean: the same submodules, training flags, gradient flags, dtypes and devices.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.epoch = -1
        self._numbers: dict[Any, int] = {}
        self._snapshot()

    def _snapshot(self) -> None:
        """Walk the tree: what is in it now is what later reads compare with."""
        # an optimized module inside a larger one stands for its source
        modules = [m.__dict__.get(SOURCE_OF, m) for m in self.module.modules()]
        self.epoch += 1
        self._dicts = [m.__dict__ for m in modules]
        self._children = [m._modules for m in modules if m._modules]
        self._children_seen = [dict(c) for c in self._children]
        self._refs: list[tuple[dict[str, Any], str]] = [
            (d, n)
            for m in modules
            for d in (m._parameters, m._buffers)
            for n, t in d.items()
            if t is not None
        ]
        self._hooks = [m.__dict__[h] for m in modules[1:] for h in _HOOKS]
        self._handles = -1
        self._last: Any = None
        self._number = -1

    def number(self) -> int:
        """The number of the present state."""
        if self._children != self._children_seen or self._hooked():
            self._snapshot()
        flags = [d["training"] for d in self._dicts]
        try:
            tensors = [d[n] for d, n in self._refs]
            facts = [t.requires_grad for t in tensors]
            dtypes = [t.dtype for t in tensors]
            # one device at each end: a model moved in part fails loudly in its operations
            devices = [t.device for t in (*tensors[:1], *tensors[-1:])]
        except (KeyError, AttributeError):  # a parameter was removed or set to None
            self._snapshot()
            return self.number()
        now = (flags, facts, dtypes, devices)
        if now != self._last:
            self._last = now
            key = (self.epoch, *(tuple(part) for part in now))
            self._number = self._numbers.setdefault(key, len(self._numbers))
        return self._number

    def _hooked(self) -> bool:
        """Whether a hook was added below the root since the last look."""
        handles = RemovableHandle.next_id  # counts every registration in the process
        if handles == self._handles:
            return False
        self._handles = handles
        return any(self._hooks)
