"""What a plan does to memory: a replay of forward and backward over measured facts.

The oracle (`graphopt.memory.oracle`) runs the program on fake tensors and is exact; it takes as
long as a step takes to dispatch. A search asks thousands of questions, so it asks this replay: the
timeline of the program without a plan was measured once, and a plan changes it, value by value.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Collection


@dataclasses.dataclass(frozen=True)
class Value:
    """A node that owns its storage, as the planner sees it. Steps are indices of the timeline.

    Attributes:
        name: name of the node.
        bytes: of everything that its op writes, as the allocator counts.
        saved: bytes of that which autograd keeps for backward.
        made: the step that makes it.
        last_use: the last step of the forward that reads it or a view of it.
        freed: the step after which it is gone when nothing is planned.
        unpacks: the steps of the backward that ask autograd for it, ascending.
        reads: the values that its op reads, by position; parameters, inputs and constants left out.
        ms: time of running its op once more.
        transient: bytes that live only inside its op, beside its result.
        why_not: why it may not be recomputed, None where it may.
    """

    name: str
    bytes: int
    saved: int
    made: int
    last_use: int
    freed: int
    unpacks: tuple[int, ...] = ()
    reads: tuple[int, ...] = ()
    ms: float = 0.0
    transient: int = 0
    why_not: str | None = None


@dataclasses.dataclass(frozen=True)
class Timeline:
    """A step of training without a plan: forward, loss and backward, one op after the other.

    Attributes:
        before: live bytes as each step begins; parameters, gradients, inputs: all that is counted.
        peak: the most live bytes during each step.
        values: in the order in which the forward makes them; a value reads only earlier ones.
    """

    before: tuple[int, ...]
    peak: tuple[int, ...]
    values: tuple[Value, ...]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a plan costs and brings.

    Attributes:
        peak: the most live bytes of the step.
        at: the step where that is reached first.
        ms: time of all recomputes.
        levels: the most live bytes during each step.
    """

    peak: int
    at: int
    ms: float
    levels: tuple[int, ...] = dataclasses.field(repr=False, default=())


def needed(timeline: Timeline, dropped: Collection[int]) -> set[int]:
    """The dropped values that are ever recomputed: what autograd asks for, and what that reads.

    Example:
        >>> values = (Value("a", 4, 0, 0, 1, 1), Value("b", 4, 4, 1, 2, 3, (3,), (0,)))
        >>> line = Timeline((), (), values)
        >>> needed(line, {0}), needed(line, {0, 1})
        (set(), {0, 1})
    """
    values = timeline.values
    found: set[int] = set()
    for i in sorted(dropped, reverse=True):
        if values[i].unpacks:
            found.add(i)
        if i in found:
            found.update(j for j in values[i].reads if j in dropped)
    return found


def simulate(timeline: Timeline, dropped: Collection[int], *, levels: bool = False) -> Outcome:
    """Replay a step in which some values are dropped after the forward's last use of them.

    A dropped value is made again when backward first asks for it or for a value that is computed
    from it, and then kept until backward asked for it the last time. What a recompute reads and
    nobody drops is held until then. Values that autograd does not save may be among the dropped:
    those that a recompute needs are made again, and not held.

    Args:
        timeline: the step without a plan.
        dropped: positions in `timeline.values`.
        levels: whether the outcome lists the bytes at each step.

    Returns:
        The outcome; `ms` is zero and `peak` the timeline's own for an empty plan.
    """
    values = timeline.values
    used = needed(timeline, dropped)
    change = [0] * (len(timeline.before) + 2)
    asked: dict[int, list[int]] = {}
    release: dict[int, int] = {}  # until when a value may be asked for
    for i in sorted(used, reverse=True):
        v = values[i]
        if v.unpacks:
            change[v.last_use + 1] -= v.saved
            change[v.freed + 1] += v.saved
            for step in v.unpacks:
                asked.setdefault(step, []).append(i)
            release[i] = max(release.get(i, 0), v.unpacks[-1])
        for j in v.reads:
            release[j] = max(release.get(j, 0), release[i])
    for j, until in release.items():
        v = values[j]
        if j not in used and until > v.freed:
            change[v.freed + 1] += v.bytes
            change[until + 1] -= v.bytes
    run = _Recompute(timeline, used)
    inside: dict[int, tuple[int, int]] = {}  # step -> what its recomputes leave, their own most
    for step in sorted(asked):
        left = most = 0
        for i in sorted(asked[step]):
            made, highest = run.ask(i, step, change)
            most = max(most, left + highest)
            left += made
        change[step] += left
        inside[step] = left, most
    extra = list(itertools.accumulate(change[: len(timeline.peak)]))
    found = list(map(operator.add, timeline.peak, extra))
    for step, (left, most) in inside.items():
        found[step] = max(found[step], timeline.before[step] + extra[step] - left + most)
    top = max(found)
    return Outcome(top, found.index(top), run.ms, tuple(found) if levels else ())


class _Recompute:
    """The recomputes of one replay: what is cached until when, and what it cost."""

    def __init__(self, timeline: Timeline, used: set[int]) -> None:
        self.values = timeline.values
        self.used = used
        self.cached: dict[int, int] = {}  # value -> the last step that it is kept for
        self.ms = 0.0

    def ask(self, i: int, step: int, change: list[int]) -> tuple[int, int]:
        """Make a value, if it is not there.

        Returns:
            bytes that stay when it is done, and the most that lived above the start meanwhile.
        """
        if self.cached.get(i, -1) >= step:
            return 0, 0
        live = most = 0
        order = self._chain(i, step)
        last = {j: n for n, k in enumerate(order) for j in self.values[k].reads}
        passing: dict[int, int] = {}  # made for this chain only -> bytes
        for n, k in enumerate(order):
            v = self.values[k]
            self.ms += v.ms
            live += v.bytes
            most = max(most, live + v.transient)
            if v.unpacks and v.unpacks[-1] >= step:
                self.cached[k] = v.unpacks[-1]
                change[v.unpacks[-1] + 1] -= v.bytes
            else:
                passing[k] = v.bytes
            for j in [j for j in passing if last.get(j, n) <= n]:
                live -= passing.pop(j)
        return live, most

    def _chain(self, i: int, step: int) -> list[int]:
        """The values to run for one, each after what it reads."""
        order: list[int] = []
        seen: set[int] = set()
        stack: list[tuple[int, bool]] = [(i, False)]
        while stack:
            j, ready = stack.pop()
            if ready:
                order.append(j)
            elif j not in seen:
                seen.add(j)
                stack.append((j, True))
                stack += [
                    (k, False)
                    for k in self.values[j].reads
                    if k in self.used and self.cached.get(k, -1) < step
                ]
        return order


def compressed(timeline: Timeline) -> Timeline:
    """The same timeline with the steps between two events merged into one: as exact, and shorter.

    An event is where a value may come or go: every plan changes the levels only there.
    """
    count = len(timeline.peak)
    starts = {0}
    for v in timeline.values:
        for step in v.unpacks:
            starts |= {step, step + 1}
        starts |= {v.made, v.last_use, v.last_use + 1, v.freed, v.freed + 1}
    kept = sorted(s for s in starts if s < count)
    place = [0] * count
    for n, (first, end) in enumerate(zip(kept, [*kept[1:], count], strict=True)):
        place[first:end] = [n] * (end - first)
    values = tuple(
        dataclasses.replace(
            v,
            made=place[v.made],
            last_use=place[v.last_use],
            freed=place[v.freed],
            unpacks=tuple(place[s] for s in v.unpacks),
        )
        for v in timeline.values
    )
    before = tuple(timeline.before[s] for s in kept)
    ends = [*kept[1:], count]
    peak = tuple(max(timeline.peak[a:b]) for a, b in zip(kept, ends, strict=True))
    return Timeline(before, peak, values)
