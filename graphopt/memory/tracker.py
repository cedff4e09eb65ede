"""Bytes that are alive, storage by storage, while anything runs: real tensors or fake ones.

A dispatch mode sees every tensor that an operation returns; a weak reference to its storage tells
when the storage goes. Only the order of births and deaths is written down, so that backward on
autograd's own threads can be followed, too; peaks and timelines are worked out afterwards.

What an operation allocates inside and frees before it returns is not seen here.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

CUDA_BLOCK = 512
"""Bytes at a multiple of which the CUDA caching allocator hands out memory."""

Dispatched = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]
"""Told of every operation: the overload, its arguments, what it returned."""


@dataclasses.dataclass(slots=True)
class Allocation:
    """One storage.

    Attributes:
        index: its place in the order of births.
        bytes: its size as the allocator hands it out.
        label: whoever made it, as the tracker's `where` says it.
        op: the operation that returned it, such as "aten.mm.default"; "" for what was there before.
        dtype: of the first tensor in it.
        shape: likewise.
        device: where it lies, "cpu" or "cuda:0".
        kind: what it is for, as far as it is known ("parameters", ...); "" else.
        born: the event at which it came; 0 for what was there before.
        died: the event at which it went, None while it is alive.
        node: sequence number of autograd's node that made it; None outside of a backward.
    """

    index: int
    bytes: int
    label: Any
    op: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    device: str
    kind: str = ""
    born: int = 0
    died: int | None = None
    node: int | None = None


@dataclasses.dataclass(frozen=True)
class Peak:
    """The moment at which most bytes were alive.

    Attributes:
        bytes: how many.
        event: which birth it was.
        live: what was alive then, the largest first.
    """

    bytes: int
    event: int
    live: tuple[Allocation, ...]


class StorageTracker(TorchDispatchMode):
    """Follows live bytes by storage.

    Args:
        rounding: sizes are rounded up to a multiple of it; None for what the storage's device does
            (512 bytes on CUDA, exact elsewhere). A storage of no byte takes nothing.
        where: called at each operation; says who runs it, for `Allocation.label`.
        watch: called after each operation with the operation, its arguments and its result.
        within: operation -> a function to run in its place, whose own operations are followed,
            or None to run the operation as it is; so does a function that returns NotImplemented.
        only: follow only tensors on a device of this type.
        takes_over: says of an operation, whose first operand has a record, whether its result takes
            that operand's place.
        whole: operation, arguments, result -> the result to go on with: where the fake form of an
            operation has less than the real one.
        form: operation -> its fake form, where torch has none, or None to run the operation.

    Attributes:
        allocations: every storage met, in the order of births.
        events: indices into `allocations`: `i` for the birth of storage i, `~i` for its death.

    Example:
        >>> with StorageTracker() as seen:
        ...     x = torch.ones(1000)
        ...     y = (x + x).sum()
        >>> seen.peak().bytes
        8004
    """

    def __init__(
        self,
        rounding: int | None = None,
        *,
        where: Callable[[], Any] | None = None,
        watch: Dispatched | None = None,
        within: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any] | None = None,
        only: str | None = None,
        takes_over: Callable[[Any, Sequence[Any], Allocation], bool] | None = None,
        whole: Callable[[Any, Any, Any, Any], Any] | None = None,
        form: Callable[[Any], Callable[..., Any] | None] | None = None,
    ) -> None:
        super().__init__()
        self.rounding = rounding
        self.allocations: list[Allocation] = []
        self.events: list[int] = []
        self._known: dict[int, tuple[weakref.ref[Any], Allocation]] = {}
        self._where = where
        self._watch = watch
        self._within = within
        self._only = only
        self._takes_over = takes_over
        self._whole = whole
        self._form = form

    # ---- recording

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operation and take down the storages of what it returns."""
        kwargs = kwargs or {}
        label = self._where() if self._where is not None else None
        over = self._overwritten(func, args)
        instead = self._within(func, args, kwargs) if self._within is not None else None
        out = NotImplemented
        if instead is not None:
            with self:
                out = instead(*args, **kwargs)
        if out is NotImplemented:
            form = self._form(func) if self._form is not None else None
            out = (form or func)(*args, **kwargs)
        if self._whole is not None:
            out = self._whole(func, args, kwargs, out)
        if over is not None:
            self._dead(args[0].untyped_storage()._cdata, over)
        for tensor in storages_of(out):
            self._meet(tensor, label, func, (args, kwargs))
        if self._watch is not None:
            self._watch(func, args, kwargs, out)
        return out

    def _overwritten(self, func: Any, args: Sequence[Any]) -> Allocation | None:
        """The record of the first operand, where the result takes its place."""
        if self._takes_over is None or not args or not isinstance(args[0], torch.Tensor):
            return None
        key = _key(args[0])
        known = self._known.get(key) if key is not None else None
        if known is None or not known[1].op:
            return None
        return known[1] if self._takes_over(func, args, known[1]) else None

    def hold(self, tensor: torch.Tensor, kind: str, label: Any, size: int | None = None) -> bool:
        """Count a tensor that was there before.

        Args:
            tensor: the tensor; its storage counts once however often it is met.
            kind: what it is for: "parameters", "inputs".
            label: its name.
            size: its storage's bytes, where the tensor at hand is only a stand-in of another size.

        Returns:
            Whether its storage was new.
        """
        new = False
        for part in storages_of(tensor):
            if part.untyped_storage()._cdata not in self._known:
                self._born(part, label, "", kind, size)
                new = True
        return new

    def take(self, size: int, label: Any, op: str, device: str, kind: str = "") -> Allocation:
        """Count memory that no tensor shows, such as a workspace.

        Args:
            size: its bytes.
            label: who takes it.
            op: the operation that does.
            device: where it lies.
            kind: what it is for.

        Returns:
            Its record, for `give_back`.
        """
        made = Allocation(
            index=len(self.allocations),
            bytes=self.rounded(size, torch.device(device)),
            label=label,
            op=op,
            dtype=torch.uint8,
            shape=(size,),
            device=device,
            kind=kind,
            born=len(self.events),
        )
        self.allocations.append(made)
        self.events.append(made.index)
        return made

    def give_back(self, made: Allocation) -> None:
        """Memory of `take` is free again."""
        made.died = len(self.events)
        self.events.append(~made.index)

    def find(self, tensor: torch.Tensor) -> Allocation | None:
        """The record of a tensor's storage, None for one that was never met."""
        for part in storages_of(tensor):
            known = self._known.get(part.untyped_storage()._cdata)
            return known[1] if known is not None else None
        return None

    def _meet(self, tensor: torch.Tensor, label: Any, func: Any, given: Any) -> None:
        storage = tensor.untyped_storage()
        known = self._known.get(storage._cdata)
        if known is None:
            before = any(t.untyped_storage()._cdata == storage._cdata for t in storages_of(given))
            if not before:  # else a view of what was there before and was not said to be counted
                self._born(tensor, label, str(func), "", _size(tensor, func, given))
        elif known[1].op and known[1].bytes != self.rounded(storage.nbytes(), tensor.device):
            self._dead(
                storage._cdata, known[1]
            )  # resized: its memory was given back, new one taken
            self._born(tensor, label, str(func), known[1].kind, None)

    def _born(self, tensor: torch.Tensor, label: Any, op: str, kind: str, size: int | None) -> None:
        if self._only is not None and tensor.device.type != self._only:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        size = storage.nbytes() if size is None else size
        made = self.take(size, label, op, str(tensor.device), kind)
        made.dtype, made.shape = tensor.dtype, tuple(map(int, tensor.shape))
        node: Any = torch._C._current_autograd_node()
        made.node = node._sequence_nr() if node is not None else None
        self._known[key] = weakref.ref(storage, lambda _: self._dead(key, made)), made

    def _dead(self, key: int, made: Allocation) -> None:
        known = self._known.get(key)
        if known is not None and known[1] is made:
            del self._known[key]
            self.give_back(made)

    def close(self) -> None:
        """Follow nothing any more: what is alive now stays alive in the record."""
        self._known.clear()

    def rounded(self, size: int, device: torch.device) -> int:
        """Bytes that a storage of some size takes from the allocator."""
        step = self.rounding
        if step is None:
            step = CUDA_BLOCK if device.type == "cuda" else 1
        return -(-size // step) * step

    # ---- reading

    @property
    def live_bytes(self) -> int:
        """Bytes alive after the last event."""
        return self.live_after(len(self.events) - 1)

    def curve(self) -> list[int]:
        """Live bytes after each event."""
        curve, live = [], 0
        for event in self.events:
            live += self.allocations[event].bytes if event >= 0 else -self.allocations[~event].bytes
            curve.append(live)
        return curve

    def live_after(self, event: int) -> int:
        """Live bytes after one event."""
        return sum(a.bytes for a in self.live_at(event))

    def live_at(self, event: int) -> list[Allocation]:
        """What is alive right after an event, in the order of births."""
        return [
            a for a in self.allocations if a.born <= event and (a.died is None or a.died > event)
        ]

    def peak(
        self, start: int = 0, end: int | None = None, curve: Sequence[int] | None = None
    ) -> Peak:
        """The moment at which most bytes were alive.

        Args:
            start: the first event that counts.
            end: the event before which to stop.
            curve: what counts after each event, where it is not what `curve()` gives.
        """
        curve = (self.curve() if curve is None else curve)[:end]
        if start >= len(curve):
            return Peak(curve[-1] if curve else 0, max(0, len(curve) - 1), ())
        event = max(range(start, len(curve)), key=curve.__getitem__)
        live = sorted((a for a in self.live_at(event) if a.bytes), key=lambda a: -a.bytes)
        return Peak(curve[event], event, tuple(live))


def _key(tensor: torch.Tensor) -> int | None:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else None


_REDUCED = {"aten::mse_loss", "aten::smooth_l1_loss", "aten::soft_margin_loss"}
_REDUCED |= {"aten::binary_cross_entropy"}
"""Losses that return their mean or sum in a storage as large as all losses, as their C++ has it."""


def _size(tensor: torch.Tensor, func: Any, given: Any) -> int:
    """Bytes of a new result's storage; those of a fake one may be fewer than a real one's."""
    size = int(tensor.untyped_storage().nbytes())
    if tensor.dim() == 0 and func._schema.name in _REDUCED:
        first, second = given[0][:2]
        count = torch.broadcast_shapes(first.shape, second.shape).numel()
        size = max(size, int(count) * tensor.element_size())
    return size


def storages_of(value: Any) -> Iterator[torch.Tensor]:
    """The strided tensors in a result, those inside sparse and nested tensors included.

    Tensors without a storage (of a layout that torch knows no parts of) are left out.
    """
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided:
            if not torch._C._functorch.is_functorch_wrapped_tensor(value):
                yield value
        elif value.layout is torch.sparse_coo:
            yield from (value._indices(), value._values())
        elif value.layout in (torch.sparse_csr, torch.sparse_bsr):
            yield from (value.crow_indices(), value.col_indices(), value.values())
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from storages_of(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from storages_of(item)
