"""Python numbers that autograd keeps for backward: `x / 3.0` saves 3.0 as a tensor of 8 bytes.

That tensor is made on the way to the dispatcher, which hands on the number: no operation returns
it. It lies on the CPU until the node of the division or multiplication has run in backward.
"""

from __future__ import annotations

from typing import Any

import torch

from graphopt.memory.tracker import Allocation, StorageTracker

aten = torch.ops.aten

_SAVED = frozenset({aten.mul.Tensor, aten.div.Tensor})
"""Operations that save the second operand, which may be a number, for the first one's gradient."""


class Numbers:
    """Adds the numbers that are kept for backward to a tracker's record."""

    def __init__(self) -> None:
        self._kept: dict[int, Allocation] = {}
        self._node: int | None = None  # whose backward runs

    def seen(self, tracker: StorageTracker, label: Any, func: Any, args: Any) -> None:
        """After an operation: keep its number; let go of that of the node that has run.

        Args:
            tracker: the record.
            label: who ran the operation.
            func: the operation.
            args: its positional arguments.
        """
        node: Any = torch._C._current_autograd_node()
        running = node._sequence_nr() if node is not None else None
        if running != self._node:
            done = self._kept.pop(self._node, None) if self._node is not None else None
            if done is not None:
                tracker.give_back(done)
            self._node = running
        if func in _SAVED and torch.is_grad_enabled() and _saves(args):
            size = 16 if isinstance(args[1], complex) else 8
            made = tracker.take(size, label, str(func), "cpu")
            self._kept[torch._C._autograd._get_sequence_nr() - 1] = made


def _saves(args: Any) -> bool:
    first, second = args[:2]
    number = isinstance(second, (int, float, complex)) and not isinstance(second, bool)
    return number and isinstance(first, torch.Tensor) and first.requires_grad
