"""Cuts a fake step into the work of single nodes, and sums up what each moves and asks for."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from graphopt.cost.dispatched import dispatched_cost
from graphopt.cost.ops import Cost
from graphopt.cost.roofline import Rates
from graphopt.kernels._library import launches
from graphopt.kernels._overwrite import Overwriting, overwriting
from graphopt.memory.labels import Label
from graphopt.memory.tracker import Allocation, StorageTracker, storages_of


class Mark:
    """The beginning of one step: where in the events, and what it did.

    `spared` tells of what it asked for by how many bytes its peak is lower where it writes over it.
    """

    def __init__(self, event: int, label: Label, name: str, key: Any) -> None:
        self.event, self.label, self.name, self.key = event, label, name, key
        self.unpacked: list[Allocation] = []
        self.spared: dict[int, int] = {}
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
        # stand-ins for saved tensors, by the identity of their storage
        self._standing: dict[int, tuple[weakref.ref[Any], Allocation, Any]] = {}
        self._let_go: int | None = None  # the event at which one of them went
        self._spared: dict[Any, int] = {}

    def begin(self, label: Label, name: str, key: Any) -> Mark:
        """The present step, a new one where the key is another.

        A new one, too, where a backward goes on after it has let go of something that it asked for:
        that is free from there on if it was computed again.
        """
        same = bool(self.marks) and self.marks[-1].key == key
        if not same or self._let_go is not None:
            event = self._let_go if same else None
            event = len(self.recorder.tracker.events) if event is None else event
            self.marks.append(Mark(event, label, name, key))
            if same:
                self.marks[-1].unpacked += [a for _, a, k in self._standing.values() if k == key]
            self._let_go = None
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
        how = overwriting(func)
        if how is not None:
            self._spare(mark, how, args)
        if func.namespace == "graphopt" and not launches(func, args):
            return  # plain torch: its operations came here one by one
        cost = dispatched_cost(func, args, kwargs, out)
        if func.namespace == "graphopt" and self.recorder.inner.added:
            # products inside it, of a linear layer say, came here by themselves
            moved, flops, _ = self.recorder.inner.added
            cost = Cost(max(0, cost.bytes - int(moved)), max(0, cost.flops - int(flops)))
        # products are of the narrowest: what they are added to (addmm) may be wider
        floats = [t.dtype for t in storages_of(args) if t.is_floating_point()]
        dtype = min(floats, key=lambda d: d.itemsize, default=None)
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
        if found is None:
            return tensor
        mark = self.present()
        mark.unpacked.append(found)
        return self._stand_in(tensor, found, mark.key)

    def _stand_in(self, tensor: torch.Tensor, found: Allocation, key: Any) -> torch.Tensor:
        """A tensor like a saved one in a storage of its own, which tells when backward lets it go.

        Nobody counts its bytes.
        """
        if type(tensor) is not FakeTensor or tensor.layout is not torch.strided:
            return tensor
        size = tensor.untyped_storage().nbytes() // tensor.element_size()
        with _disable_current_modes(), self.recorder.mode:
            whole = torch.empty(size, dtype=tensor.dtype, device=tensor.device)
            twin = whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        storage = twin.untyped_storage()
        place = storage._cdata
        self._standing[place] = weakref.ref(storage, lambda _: self._gone(place)), found, key
        return twin

    def _gone(self, place: int) -> None:
        self._standing.pop(place, None)
        if self._let_go is None:
            self._let_go = len(self.recorder.tracker.events)

    def _spare(self, mark: Mark, how: Overwriting, args: Sequence[Any]) -> None:
        """Note by how much a backward's peak is lower where it writes over what it asked for."""
        there = {i: self._standing.get(args[i].untyped_storage()._cdata) for i in how.saved}
        found = {i: s[1] for i, s in there.items() if s is not None and args[i].is_contiguous()}
        if len(found) != len(how.saved):
            return
        key = how.backward, tuple((a.shape, a.stride(), a.dtype) for a in storages_of(args))
        if key not in self._spared:
            self._spared[key] = self._held(how.backward, args) - self._held(how.over, args)
        total = sum(a.bytes for a in found.values())
        for made in found.values():
            mark.spared[made.index] = max(0, self._spared[key]) * made.bytes // max(1, total)

    def _held(self, call: Any, args: Sequence[Any]) -> int:
        """The most bytes that a call takes beside its arguments."""
        tracker = self.recorder.tracker
        with StorageTracker(tracker.rounding, within=self.recorder.expanded) as seen:
            call(*args)
        return seen.peak().bytes
