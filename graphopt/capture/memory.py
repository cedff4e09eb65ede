"""Whether what a graph writes at its end is also reached by another tensor of the call.

A graph reads all of its inputs and state before it writes any. Where two of them share memory that
is written, eager would see the write in both.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphopt.emit import ParamRef


class Memory:
    """The memory that one graph writes: inputs by position, state by its place."""

    def __init__(self, targets: Sequence[int | ParamRef]) -> None:
        self._inputs = [t for t in targets if isinstance(t, int)]
        self._places = [t for t in targets if isinstance(t, ParamRef)]
        self._ids: list[int] | None = None  # of the state tensors that the rest is about
        self._within = False
        self._storages: frozenset[int] = frozenset()

    def overlaps(self, state: list[torch.Tensor], leaves: Sequence[torch.Tensor]) -> bool:
        """Whether a written tensor shares memory with another argument or with other state.

        Args:
            state: the state that the graph reads.
            leaves: the tensor arguments.
        """
        ids = list(map(id, state))
        if ids != self._ids:
            self._look(state)
            self._ids = ids
        if self._within:
            return True
        storages = [t.untyped_storage()._cdata for t in leaves]
        if not self._storages.isdisjoint(storages):
            return True
        return any(
            storages[j] == storages[i] and leaves[j] is not leaves[i]
            for i in self._inputs
            for j in range(len(leaves))
        )

    def _look(self, state: list[torch.Tensor]) -> None:
        """Take down the storages of the state; where an input is written, all of it counts."""
        written = [p.read() for p in self._places]
        self._within = overlapping(written, state)
        shared = [*written, *state] if self._inputs else written
        self._storages = frozenset(t.untyped_storage()._cdata for t in shared)


def overlapping(written: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    """Whether any written tensor shares an address with another tensor.

    Example:
        >>> x = torch.zeros(4)
        >>> overlapping([x[:2]], [x[2:]]), overlapping([x[:3]], [x[2:]]), overlapping([x], [x])
        (False, True, False)
    """
    marks = set(map(id, written))
    spans = sorted(_span(t) for t in {id(t): t for t in (*written, *others)}.values())
    last, last_written = 0, 0  # where the furthest span so far ends, and the furthest written one
    for start, end, mark in spans:
        if start < last_written or (mark in marks and start < last):
            return True
        last = max(last, end)
        last_written = max(last_written, end) if mark in marks else last_written
    return False


def _span(tensor: torch.Tensor) -> tuple[int, int, int]:
    """First address, the one after the last, and id."""
    start = tensor.data_ptr() if tensor.numel() else 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    reach = 1 + sum((n - 1) * s for n, s in steps) if tensor.numel() else 0
    return start, start + reach * tensor.element_size(), id(tensor)
