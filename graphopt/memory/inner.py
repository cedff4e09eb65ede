"""graphopt's own operators, followed inside: once for each kind and size of call.

Where an operator runs its plain-torch reference, that is up to a hundred operations. They are
followed the first time; a call like it later runs the operator's fake implementation, and what the
reference held inside at most is added to the record. So a model of many equal blocks is predicted
about as fast as its graph is long.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_leaves

from graphopt.kernels._library import implementation, launches
from graphopt.kernels.linear import ADD_WIDE_MM
from graphopt.memory.tracker import StorageTracker, storages_of


def expanded(func: Any, args: Any, kwargs: Any) -> Callable[..., Any] | None:
    """For a tracker: every operator of graphopt with anything inside is followed there."""
    return None if func is ADD_WIDE_MM else implementation(func)  # one product, without a fake form


class Account(Protocol):
    """Sums that the operations inside an operator add to, such as their costs."""

    def total(self) -> tuple[float, ...]:
        """The sums now."""

    def add(self, more: tuple[float, ...]) -> None:
        """Add what an earlier call like this one added."""


class Inner:
    """For a tracker: which operations are followed inside, and what others hold there.

    Args:
        account: what else a call like an earlier one adds to.

    Attributes:
        tracker: the record.
        unknown: operators that could not be followed inside.
        added: what the operations inside the last operator added to the account.
    """

    def __init__(self, account: Account | None) -> None:
        self.tracker: StorageTracker | None = None
        self.unknown: set[str] = set()
        self.added: tuple[float, ...] = ()
        self._account = account
        # call -> (bytes inside, additions to the account); None: to be followed each time
        self._known: dict[Any, tuple[int, tuple[float, ...]] | None] = {}
        self._open: list[tuple[Any, int, int, tuple[float, ...]]] = []

    def within(self, func: Any, args: Any, kwargs: Any) -> Callable[..., Any] | None:
        """What to run in the place of an operation, None to run it as it is."""
        run = expanded(func, args, kwargs)
        if run is None:
            return None
        key = None if launches(func, args) else _key(func, args, kwargs)
        if self._known.get(key) is not None:
            return None
        assert self.tracker is not None
        begun = len(self.tracker.events), len(self.tracker.allocations), self._total()
        self._open.append((key, *begun))

        def followed(*args: Any, **kwargs: Any) -> Any:
            try:
                return run(*args, **kwargs)
            except Exception:
                # Something inside cannot run on tensors without values. The operator's fake
                # implementation can; the prediction says so.
                self.unknown.add(str(func).removesuffix(".default"))
                return NotImplemented

        return followed

    def done(self, label: Any, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """After an operation: learn what it held inside, or add what is known of it."""
        self.added = ()
        if expanded(func, args, kwargs) is None:
            return
        assert self.tracker is not None
        key = None if launches(func, args) else _key(func, args, kwargs)
        if self._open and self._open[-1][0] == key:
            _, event, first, before = self._open.pop()
            self.added = tuple(b - a for a, b in zip(before, self._total(), strict=True))
            if key is not None and key not in self._known:
                same = _layout(func(*args, **kwargs), args) == _layout(out, args)
                self._known[key] = (self._inside(event, first), self.added) if same else None
            return
        known = self._known.get(key)
        if known is None:
            return
        size, added = known
        if size:
            device = str(next((t.device for t in storages_of(out)), torch.device("cpu")))
            made = self.tracker.take(size, label, str(func), device, "temporaries")
            self.tracker.give_back(made)
        if self._account is not None:
            self._account.add(added)

    def _total(self) -> tuple[float, ...]:
        return self._account.total() if self._account is not None else ()

    def _inside(self, event: int, first: int) -> int:
        """The most bytes held since an event beyond those that are held still.

        Args:
            event: the event at which the operation began.
            first: the first allocation since then.
        """
        assert self.tracker is not None
        live = most = 0
        for e in self.tracker.events[event:]:
            made = self.tracker.allocations[e if e >= 0 else ~e]
            if made.index >= first:
                live += made.bytes if e >= 0 else -made.bytes
                most = max(most, live)
        return most - live


def _key(func: Any, args: Any, kwargs: Any) -> Any:
    """What a call's memory depends on: all but which dropout of the forward it is."""
    names = [a.name for a in func._schema.arguments]
    named = {**dict(zip(names, args, strict=False)), **kwargs}
    return func, tuple(
        (name, *map(_described, tree_leaves(value)))
        for name, value in named.items()
        if name != "site"
    )


def _described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        strides = value.stride() if value.layout is torch.strided else None
        return value.shape, strides, value.dtype, value.device
    return value if isinstance(value, (int, float, str, bool, type(None))) else str(value)


def _layout(out: Any, given: Any) -> list[Any]:
    """How results lie in memory: of what size, in which storage among them or the operands."""
    places: dict[int, int] = {}
    for tensor in storages_of(given):
        places.setdefault(tensor.untyped_storage()._cdata, len(places))
    found = []
    for tensor in storages_of(out):
        storage = tensor.untyped_storage()
        place = places.setdefault(storage._cdata, len(places))
        found.append(
            (tensor.shape, tensor.stride(), tensor.storage_offset(), place, storage.nbytes())
        )
    return found
