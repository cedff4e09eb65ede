"""Cuts a fake step into the work of single nodes, and sums up what each moves and asks for."""

from __future__ import annotations

from typing import Any

import torch

from graphopt.cost.dispatched import dispatched_cost
from graphopt.cost.roofline import Rates
from graphopt.kernels._library import launches
from graphopt.memory.labels import Label
from graphopt.memory.tracker import Allocation, storages_of


class Mark:
    """The beginning of one step: where in the events, and what it did."""

    def __init__(self, event: int, label: Label, name: str, key: Any) -> None:
        self.event, self.label, self.name, self.key = event, label, name, key
        self.unpacked: list[Allocation] = []
        self.bytes = self.flops = 0
        self.ms = 0.0


class Watcher:
    """Cuts the run into steps, and sums up what each moves and asks for."""

    def __init__(self, rates: Rates) -> None:
        self.rates = rates
        self.label = Label("")
        self.marks: list[Mark] = []
        self.saved: dict[int, Label] = {}
        self.recorder: Any = None

    def begin(self, label: Label, name: str, key: Any) -> Mark:
        """The present step, a new one where the key is another."""
        if not self.marks or self.marks[-1].key != key:
            self.marks.append(Mark(len(self.recorder.tracker.events), label, name, key))
        return self.marks[-1]

    def present(self) -> Mark:
        """The step that runs now."""
        node: Any = torch._C._current_autograd_node()
        if node is None:
            label = self.recorder.label()
            return self.begin(label, label.name, (label.name, label.phase))
        label = self.recorder.labels.of_node(node)
        kind = node.name().rpartition("::")[2]
        name = f"{kind} of {label.name}" if label.name else kind
        return self.begin(label, name, (name, node._sequence_nr()))

    def dispatched(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Add an operation to its step."""
        mark = self.present()
        if func.namespace == "graphopt" and not launches(func, args):
            return  # plain torch: its operations came here one by one
        cost = dispatched_cost(func, args, kwargs, out)
        dtype = next((t.dtype for t in storages_of(args) if t.is_floating_point()), None)
        mark.bytes += cost.bytes
        mark.flops += cost.flops
        mark.ms += self.rates.ms(cost, dtype)

    def total(self) -> tuple[float, ...]:
        """Bytes, FLOPs and milliseconds of the present step so far."""
        mark = self.present()
        return mark.bytes, mark.flops, mark.ms

    def add(self, more: tuple[float, ...]) -> None:
        """Add those of an operation that ran before in the same way."""
        mark = self.present()
        mark.bytes += int(more[0])
        mark.flops += int(more[1])
        mark.ms += more[2]

    def pack(self, tensor: torch.Tensor) -> Any:
        """Autograd saves a tensor."""
        found = self.recorder.tracker.find(tensor)
        if found is not None and self.label.name:
            self.saved.setdefault(found.index, self.label)
        return found, tensor.detach()

    def unpack(self, packed: Any) -> torch.Tensor:
        """Autograd asks for it."""
        found, tensor = packed
        if found is not None:
            self.present().unpacked.append(found)
        return tensor
