"""Who holds the memory of a step: sums by op, by module and at the peak, over equal blocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from graphopt.memory.fakestep import FakeStep
from graphopt.memory.labels import BACKWARD, LOSS
from graphopt.memory.oracle import Holder
from graphopt.memory.tracker import Allocation
from graphopt.report.fold import fold

ELSEWHERE = "(loss)"
"""Module and op of what the loss and nobody of the model holds."""


@dataclasses.dataclass(frozen=True)
class Share:
    """What an op, or a module, holds in a step. Parameters, buffers and inputs are not in it.

    Attributes:
        name: the op, or the module path with a star for the numbers of repeated blocks.
        count: how many modules stand behind it; 1 for an op.
        saved_bytes: of its results that wait for the backward when it begins.
        temporary_bytes: the most that it holds at once of what does not wait for the backward.
        peak_bytes: what it holds at the peak of the step, gradients included.
    """

    name: str
    count: int
    saved_bytes: int
    temporary_bytes: int
    peak_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return dataclasses.asdict(self)


def shares(
    step: FakeStep, peak: Iterable[Allocation], key: Callable[[Allocation], str]
) -> tuple[Share, ...]:
    """Sum a step by some key, the largest at the peak first.

    Args:
        step: the step.
        peak: what is alive at its peak.
        key: names the group of an allocation.
    """
    tracker = step.tracker
    saved: dict[str, int] = {}
    temporary: dict[str, int] = {}
    at_peak: dict[str, int] = {}
    live: dict[str, int] = {}
    keys = {a.index: key(a) for a in tracker.allocations if a.op}
    kinds = {a.index: step.kind(a) for a in tracker.allocations if a.op}
    for event in tracker.events:
        made = tracker.allocations[event if event >= 0 else ~event]
        if not made.op:
            continue
        name = keys[made.index]
        if kinds[made.index] == "temporaries":
            live[name] = live.get(name, 0) + (made.bytes if event >= 0 else -made.bytes)
            temporary[name] = max(temporary.get(name, 0), live[name])
        elif event >= 0 and kinds[made.index] == "activations":
            saved[name] = saved.get(name, 0) + made.bytes
    for made in peak:
        if made.op:
            at_peak[keys[made.index]] = at_peak.get(keys[made.index], 0) + made.bytes
    found = [
        Share(n, 1, saved.get(n, 0), temporary.get(n, 0), at_peak.get(n, 0))
        for n in dict.fromkeys(keys.values())
    ]
    order = sorted(found, key=lambda s: (-s.peak_bytes, -s.saved_bytes, -s.temporary_bytes))
    return tuple(s for s in order if s.peak_bytes or s.saved_bytes or s.temporary_bytes)


def stars(path: str) -> str:
    """A module path with a star for each number in it.

    Example:
        >>> stars("h.11.mlp")
        'h.*.mlp'
    """
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def module_names(paths: Iterable[str]) -> dict[str, tuple[str, int]]:
    """Module path -> the name of its group of repeated blocks, and how many are in it.

    Example:
        >>> module_names(["h.0.mlp", "h.1.mlp", "head"])["h.1.mlp"]
        ('h.*.mlp', 2)
    """
    groups: dict[str, list[str]] = {}
    for path in dict.fromkeys(paths):
        groups.setdefault(stars(path), []).append(path)
    named = {}
    for members in groups.values():
        (name, count), *_ = fold(members).items()
        named.update(dict.fromkeys(members, (name or "(root)", count)))
    return named


@dataclasses.dataclass(frozen=True)
class Group:
    """Equal storages that are alive at the peak.

    Attributes:
        what: "activations", "gradients", ... ("backward temporaries" for those of the backward).
        op: the op that made them, "" for what was there before.
        module: path of the module, with stars.
        place: "file.py:12", "" where no line is known.
        dtype: of each.
        shape: likewise.
        count: how many.
        bytes: of all of them.
    """

    what: str
    op: str
    module: str
    place: str
    dtype: str
    shape: tuple[int, ...]
    count: int
    bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return dataclasses.asdict(self)


def groups(live: Sequence[Holder], op_of: Callable[[Holder], str]) -> tuple[Group, ...]:
    """What is alive at the peak, equal storages of repeated blocks together, the largest first.

    Args:
        live: the storages.
        op_of: the op of one.
    """
    found: dict[tuple[Any, ...], list[Holder]] = {}
    for h in live:
        back = h.phase == BACKWARD and h.kind == "temporaries"
        what = "backward temporaries" if back else h.kind
        place = f"{h.site.file.rsplit('/', 1)[-1]}:{h.site.line}" if h.site.file else ""
        key = (what, op_of(h), stars(module_of(h)), place, h.dtype, h.shape)
        found.setdefault(key, []).append(h)
    made = [
        Group(
            what,
            op,
            next(iter(fold(map(module_of, members)))) or "(root)",
            place,
            dtype,
            shape,
            count=len(members),
            bytes=sum(h.bytes for h in members),
        )
        for (what, op, _, place, dtype, shape), members in found.items()
    ]
    return tuple(sorted(made, key=lambda g: -g.bytes))


def module_of(held: Holder) -> str:
    """The module path of a storage; the whole name of a parameter, buffer or input."""
    if not held.op:
        return held.name
    return ELSEWHERE if held.name == LOSS else held.site.module
