"""The captured graphs of one module: which one serves a call, and when another is captured."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from graphopt.capture import signature as sig
from graphopt.capture.entry import Compiled, Eager, Entry
from graphopt.capture.export import capture
from graphopt.capture.key import GraphKey, autocast_dtypes
from graphopt.errors import CaptureError, GraphoptWarning
from graphopt.graph.body import Body
from graphopt.graph.hooks import unwatched

logger = logging.getLogger("graphopt.recaptures")

_MOST_FAMILIES = 64
_MOST_KEYS = 4096


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a module is captured.

    Attributes:
        dynamic: "auto": sizes are fixed until they are seen to vary, then symbolic; True: symbolic
            from the first capture; False: one graph per size.
        on_error: "raise" a `CaptureError`, or "fallback": warn once and run the source.
        recapture_limit: graphs that one argument may ask for before a warning names it and the
            oldest are dropped.
        precision: "bf16", "fp16", "auto" or None: the autocast of calls that stand in none.
    """

    dynamic: bool | str = "auto"
    on_error: str = "raise"
    precision: str | None = None
    recapture_limit: int = 8


@dataclasses.dataclass(frozen=True)
class Recapture:
    """A capture after the first, and why it was needed.

    Attributes:
        reason: in words.
        argument: the argument or state that differed.
        old: what it was.
        new: what it is.
        symbolic: names of the sizes that became symbolic.
        seconds: what the capture and the passes cost.
    """

    reason: str
    argument: str
    old: Any
    new: Any
    symbolic: tuple[str, ...] = ()
    seconds: float = 0.0

    def __str__(self) -> str:
        """One line for a log."""
        made = f", now symbolic: {', '.join(self.symbolic)}" if self.symbolic else ""
        return f"{self.reason}: {self.argument} was {self.old}, is {self.new}{made}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        data = dataclasses.asdict(self)
        return {**data, "old": str(self.old), "new": str(self.new)}


@dataclasses.dataclass
class _Family:
    """Graphs whose keys differ in sizes only."""

    entries: list[Entry | Eager] = dataclasses.field(default_factory=list)
    seen: list[tuple[tuple[int, ...], ...]] = dataclasses.field(default_factory=list)
    fixed: set[tuple[int, int]] = dataclasses.field(default_factory=set)  # never symbolic again

    def varying(self, shapes: tuple[tuple[int, ...], ...]) -> set[tuple[int, int]]:
        """(leaf, dimension) pairs whose size was seen to differ."""
        return {
            (i, d)
            for old in self.seen
            for i, (a, b) in enumerate(zip(old, shapes, strict=True))
            for d, (m, n) in enumerate(zip(a, b, strict=True))
            if m != n
        }


class GraphStore:
    """Captures and keeps the graphs of one module; safe to use from several threads."""

    def __init__(
        self, source: nn.Module, settings: Settings, compile_body: Callable[[Body], Compiled]
    ) -> None:
        self.source = source
        self.settings = settings
        self.compile_body = compile_body
        self.exact: dict[GraphKey, Entry | Eager] = {}
        self.recaptures: list[Recapture] = []
        self.last: Entry | None = None
        self.chosen: tuple[Entry, Any] | None = None
        """A graph, and what `precision="auto"` means for the state that its guard compares."""
        self.failed: CaptureError | None = None
        self._families: dict[tuple[Any, ...], _Family] = {}
        self._latest: GraphKey | None = None
        self._asked: dict[str, int] = {}
        self._warned: set[str] = set()
        self._lock = threading.RLock()

    def entries(self) -> list[Entry]:
        """Every captured graph, oldest first."""
        found = [e for f in self._families.values() for e in f.entries]
        return [e for e in found if isinstance(e, Entry)]

    def find(self, key: GraphKey, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Entry | Eager:
        """The graph for a key that was not seen in just this form: a known one, or a new capture.

        Raises:
            CaptureError: when a capture is needed and fails, unless `on_error="fallback"`.
        """
        with self._lock:
            known = self.exact.get(key)
            if known is not None and known.state() is not None:
                return known
            family = self._families.setdefault(key.family(), _Family())
            shapes = key.shapes()
            strides = key.strides()
            near = [e for e in reversed(family.entries) if e.serves(shapes, strides)]
            entry = next((e for e in near if e.state() is not None), None)
            if entry is None:
                family.entries = [e for e in family.entries if isinstance(e, Entry)]
                entry = self._new(key, family, near, args, kwargs)
                family.entries.append(entry)
            if shapes not in family.seen:
                family.seen = [*family.seen[-31:], shapes]
            if len(self.exact) >= _MOST_KEYS:
                self.exact.clear()
            self.exact[key] = entry
            return entry

    def fallback(self, error: CaptureError) -> Eager:
        """The source itself, with a warning once per cause, where the settings allow it.

        Raises:
            CaptureError: the given error, with `on_error="raise"`.
        """
        if self.settings.on_error != "fallback":
            raise error
        self.failed = error
        return self.unoptimized(str(error))

    def unoptimized(self, cause: str) -> Eager:
        """The source itself, with a warning once per cause."""
        if cause not in self._warned:
            self._warned.add(cause)
            warnings.warn(f"running the model unoptimized: {cause}", GraphoptWarning, 7)
        return Eager(self.source)

    # ---- a new capture

    def _new(
        self,
        key: GraphKey,
        family: _Family,
        near: Sequence[Entry | Eager],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Entry | Eager:
        latest_first = sorted(near, key=lambda e: e is not self.last)
        changes = (e.guard.change() for e in latest_first if isinstance(e, Entry))
        change = next((c for c in changes if c is not None), None)
        why = ("state", *change) if change is not None else self._why(key)
        entry: Entry | Eager
        try:
            with _no_collections(), unwatched():
                entry = self._capture(key, family, args, kwargs)
        except CaptureError as error:
            self._families = {k: f for k, f in self._families.items() if f.entries or f is family}
            entry = self.fallback(_with_difference(error, why))
        self._record(key, family, entry, why)
        self._latest = key
        return entry

    def _capture(
        self, key: GraphKey, family: _Family, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Entry:
        wanted = self._symbolic(key, family)
        found = None
        if wanted:
            dims: dict[int, set[int]] = {}
            for leaf, d in wanted:
                dims.setdefault(leaf, set()).add(d)
            try:
                found = capture(self.source, args, kwargs, dynamic=dims)
            except CaptureError as error:
                logger.info("sizes stay fixed, a symbolic capture failed: %s", error)
                family.fixed |= wanted
            else:
                symbolic = found.guards.symbolic() if found.guards else {}
                family.fixed |= {(i, d) for i, d in wanted if d not in symbolic.get(i, ())}
        if found is None:
            found = capture(self.source, args, kwargs)
        found.body.autocast = autocast_dtypes(key.ambient)
        compiled = self.compile_body(found.body)
        return Entry(found, compiled, key, type(self.source).__name__)

    def _symbolic(self, key: GraphKey, family: _Family) -> set[tuple[int, int]]:
        """The sizes to make symbolic; 0 and 1 stay fixed, since broadcasting differs there."""
        shapes = key.shapes()
        if self.settings.dynamic is False:
            return set()
        if self.settings.dynamic is True:
            wanted = {(i, d) for i, s in enumerate(shapes) for d in range(len(s))}
        else:
            wanted = family.varying(shapes)
        return {(i, d) for i, d in wanted if shapes[i][d] > 1 and (i, d) not in family.fixed}

    # ---- the log

    def _record(
        self, key: GraphKey, family: _Family, entry: Entry | Eager, why: tuple[str, str, Any, Any]
    ) -> None:
        reason, argument, old, new = why
        if self._latest is None:
            return
        symbolic: tuple[str, ...] = ()
        seconds = 0.0
        if isinstance(entry, Entry):
            names, guards = entry.capture.names, entry.capture.guards
            dims = guards.symbolic() if guards else {}
            symbolic = tuple(f"{names[i]}.shape[{d}]" for i in dims for d in sorted(dims[i]))
            seconds = entry.capture.seconds
        record = Recapture(reason, argument, old, new, symbolic, seconds)
        self.recaptures.append(record)
        logger.info("%s: %s", type(self.source).__name__, record)
        if reason == "mode" or type(old) is bool:
            return  # as many as there are modes, training flags and requires_grad flags
        self._asked[argument] = self._asked.get(argument, 0) + 1
        if self._asked[argument] > self.settings.recapture_limit:
            self._drop_oldest(family)
            if argument not in self._warned:
                self._warned.add(argument)
                warnings.warn(
                    f"{type(self.source).__name__} was captured {self._asked[argument]} times"
                    f" because {argument} keeps changing (last: {old} -> {new}); the oldest graphs"
                    " are dropped. Keep it fixed, pass it as a tensor, or pad it to few sizes",
                    GraphoptWarning,
                    7,
                )

    def _drop_oldest(self, family: _Family) -> None:
        limit = self.settings.recapture_limit
        dropped = family.entries[:-limit]
        family.entries = family.entries[-limit:]
        keys = list(self._families)
        for old in keys[: max(0, len(keys) - _MOST_FAMILIES)]:
            dropped += self._families.pop(old).entries
        self.exact = {k: e for k, e in self.exact.items() if e not in dropped}

    def _why(self, key: GraphKey) -> tuple[str, str, Any, Any]:
        """(reason, argument, old, new): the first difference between a key and the latest one."""
        old = self._latest
        if old is None:
            return ("first", "", None, None)
        signature = sig.signature_of(self.source)
        if old.structure != key.structure:
            return self._plain_difference(old, key, signature)
        names = sig.leaf_names(key.structure, signature)
        for name, a, b in zip(names, old.leaves, key.leaves, strict=True):
            for what, m, n in zip(_FACTS, a, b, strict=True):
                if m != n:
                    if isinstance(m, torch.Size) and isinstance(n, torch.Size):
                        return (what, name, tuple(m), tuple(n))
                    return (what, name, m, n)
        if old.same != key.same:
            return ("structure", "which arguments are one tensor", old.same, key.same)
        if old.ambient != key.ambient:
            for what, m, n in zip(_MODES, old.ambient, key.ambient, strict=True):
                if m != n:
                    return ("mode", what, m, n)
        return ("mode", "training", old.training, key.training)

    def _plain_difference(
        self, old: GraphKey, key: GraphKey, signature: Any
    ) -> tuple[str, str, Any, Any]:
        before = sig.plain_values(old.structure, signature)
        after = sig.plain_values(key.structure, signature)
        for name in (*before, *after):
            m, n = before.get(name, "absent"), after.get(name, "absent")
            if m is not n and m != n:
                return ("value", name, m, n)
        given = [set(sig.leaf_names(k.structure, signature)) for k in (old, key)]
        changed = sorted(given[0] ^ given[1])
        name = changed[0] if changed else "the arguments' structure"
        was, now = ("given" if name in g else "absent" for g in given)
        return ("structure", name, was, now)


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """Keep Python's cycle collector from running: a capture makes many objects and few cycles.

    Each full collection walks all of torch's and the model's objects for nothing.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _with_difference(error: CaptureError, why: tuple[str, str, Any, Any]) -> CaptureError:
    """A failure of a later capture, with what differs from the call that could be captured."""
    reason, what, old, new = why
    if reason == "first":
        return error
    changed = f"since the last graph the {reason} of {what} changed from {old} to {new}"
    if reason in ("mode", "state", "structure"):
        changed = f"since the last graph {what} changed from {old} to {new}"
    return CaptureError(error.what, at=error.at, why=f"{error.why}; {changed}", try_=error.try_)


_FACTS = ("dtype", "device", "shape", "requires_grad", "strides")
_MODES = (
    "grad mode",
    "inference mode",
    "default dtype",
    "autocast",
    "default device",
    "deterministic algorithms",
)
