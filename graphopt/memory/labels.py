"""Whose operation is running: the node of a graph, or the module and line of a model."""

from __future__ import annotations

import bisect
import dataclasses
import sys
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch

FORWARD, LOSS, BACKWARD = "forward", "loss", "backward"


@dataclasses.dataclass(frozen=True)
class Label:
    """Who runs an operation.

    Attributes:
        name: a node of a graph, a module path, a parameter; "" where nobody is known.
        phase: "forward", "loss" or "backward" (then `name` is what the gradient is taken of).
        place: "file.py:12" where the name says no place itself.
    """

    name: str
    phase: str = FORWARD
    place: str = ""

    def __str__(self) -> str:
        """The name, and the phase where it is not the forward."""
        if self.phase == FORWARD:
            return self.name
        return f"{self.phase} of {self.name}" if self.name and self.name != LOSS else self.phase


class Labels:
    """Says who runs the present operation, in the forward and in the backward that follows.

    Autograd numbers the nodes that it makes one after the other. Which label ran while a number
    was given out is written down, so that the backward of a node can be told by its number.

    Args:
        running: who runs the present operation of the forward.
    """

    def __init__(self, running: Callable[[], Label]) -> None:
        self.running = running
        self._upper: list[int] = []
        self._labels: list[Label] = []
        self._parameters: dict[int, str] = {}

    def name_parameters(self, names: dict[int, str]) -> None:
        """Say what leaves are called, by `id` of the tensor."""
        self._parameters = names

    def __call__(self) -> Label:
        """The label of the operation that is about to run."""
        node: Any = torch._C._current_autograd_node()  # None outside of a backward
        if node is not None:
            return self.of_node(node)
        label = self.running()
        self.note(label)
        return label

    def in_backward(self) -> bool:
        """Whether this thread runs one of autograd's nodes."""
        node: Any = torch._C._current_autograd_node()
        return node is not None

    def note(self, label: Label) -> None:
        """Autograd's nodes up to now that nobody claimed belong to a label."""
        made = torch._C._autograd._get_sequence_nr()
        if not self._upper or made > self._upper[-1]:
            self._upper.append(made)
            self._labels.append(label)

    def of_node(self, node: Any) -> Label:
        """The label of the backward of one of autograd's nodes."""
        variable = getattr(node, "variable", None)
        if variable is not None:
            return Label(self._parameters.get(id(variable), "an input"), BACKWARD)
        at = bisect.bisect_right(self._upper, node._sequence_nr())
        if at == len(self._labels):
            return Label("", BACKWARD)
        found = self._labels[at]
        return Label(found.name, BACKWARD, found.place)


def lines_of(code: CodeType, text: str, otherwise: Callable[[], Label]) -> Callable[[], Label]:
    """For `Labels`: which node's line of an emitted program is running.

    Args:
        code: of the program's function.
        text: its source, a node a line: `name = function(...)`; other lines belong to the node
            before.
        otherwise: who runs what no line of it runs.
    """
    labels = [Label("")]
    for line in text.splitlines():
        name, equals, _ = line.strip().partition(" = ")
        labels.append(Label(name) if equals and name.isidentifier() else labels[-1])

    def running() -> Label:
        frame: Any = sys._getframe(1)
        while frame is not None:
            if frame.f_code is code:
                return labels[frame.f_lineno]
            frame = frame.f_back
        return otherwise()

    return running
