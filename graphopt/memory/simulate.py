"""What a plan does to memory: a replay of forward and backward over measured facts.

The oracle (`graphopt.memory.oracle`) runs the program on fake tensors and is exact; it takes as
long as a step takes to dispatch. A search asks thousands of questions, so it asks this replay: the
timeline of the program without a plan was measured once, and a plan changes it, value by value.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Collection, Mapping, Sequence

from graphopt.memory.trips import MARGIN, NO_TIMES, Movable, Stay, Times, Traffic, traffic


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
        part_of: for one of several results of an op that may be dropped alone, the value of the
            whole op, which counts it too; then nothing is dropped twice. None for all else.
        spans: where results of one op differ in that: (saved bytes, last use, freed) of each.
        spare: by how much the last step that asks for it is lower in a plan, since it then writes
            its gradient over it, unless that is held for a recompute.
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
    part_of: int | None = None
    spans: tuple[tuple[int, int, int], ...] = ()
    spare: int = 0

    def saved_spans(self) -> tuple[tuple[int, int, int], ...]:
        """Saved bytes with the steps of their last use and their end, each result by itself."""
        return self.spans or ((self.saved, self.last_use, self.freed),)


@dataclasses.dataclass(frozen=True)
class Timeline:
    """A step of training without a plan: forward, loss and backward, one op after the other.

    Attributes:
        before: live bytes as each step begins; parameters, gradients, inputs: all that is counted.
        peak: the most live bytes during each step.
        values: in the order in which the forward makes them; a value reads only earlier ones.
        movable: what may go to host memory; none where there is no link to it.
        times: of the steps, where something may.
    """

    before: tuple[int, ...]
    peak: tuple[int, ...]
    values: tuple[Value, ...]
    movable: tuple[Movable, ...] = ()
    times: Times = NO_TIMES


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a plan costs and brings.

    Attributes:
        peak: the most live bytes of the step.
        at: the step where that is reached first.
        ms: time of all recomputes, of waiting for copies, and by which they slow the step.
        levels: the most live bytes during each step.
        stays: of what goes to host memory.
        wait_ms: time of waiting for its copies.
    """

    peak: int
    at: int
    ms: float
    levels: tuple[int, ...] = dataclasses.field(repr=False, default=())
    stays: tuple[Stay, ...] = ()
    wait_ms: float = 0.0


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
        if values[i].part_of in dropped:
            continue
        if values[i].unpacks:
            found.add(i)
        if i in found:
            found.update(
                j for j in values[i].reads if j in dropped and values[j].part_of not in dropped
            )
    return found


def simulate(
    timeline: Timeline,
    dropped: Collection[int],
    away: Collection[int] = (),
    *,
    levels: bool = False,
    margin: float = MARGIN,
    again: Recomputes | None = None,
) -> Outcome:
    """Replay a step in which some values are dropped after the forward's last use of them.

    A dropped value is made again, once: when backward first asks for it or for what is computed
    from it. It stays until backward asked for it the last time and all that is computed from it is
    there. What a recompute reads and nobody drops is held as long as it may be asked for. Values
    that autograd does not save may be among the dropped: those that a recompute reads are made
    again and not held.

    Args:
        timeline: the step without a plan.
        dropped: positions in `timeline.values`.
        away: positions in `timeline.movable` of what goes to host memory.
        levels: whether the outcome lists the bytes at each step.
        margin: see `trips.traffic`.
        again: what `recomputes` gave for the same, where that is there.

    Returns:
        The outcome; `ms` is zero and `peak` the timeline's own for an empty plan.
    """
    values = timeline.values
    if again is None:
        again = recomputes(timeline, dropped)
    change, release, last = list(again.change), again.release, again.last
    moved = _moved(timeline, away, again.made, margin)
    elsewhere = _leave(change, timeline.movable, moved)
    for j in release.keys() - again.chosen:
        v = values[j]
        held = v.bytes - elsewhere.get(j, 0)
        if release[j] > v.freed and held > 0:
            change[v.freed + 1] += held
            change[release[j] + 1] -= held
    spent = [i for i in again.chosen if values[i].spare and last[i] == values[i].unpacks[-1]]
    for i, v in enumerate(values):
        kept = v.spare and i not in again.chosen and i not in elsewhere and (again.chosen or away)
        if kept and release.get(i, -1) < v.unpacks[-1]:
            spent.append(i)  # it is the gradient from there on
            change[v.unpacks[-1] + 1] -= v.bytes
            change[v.freed + 1] += v.bytes
    extra = list(itertools.accumulate(change[: len(timeline.peak)]))
    found = list(map(operator.add, timeline.peak, extra))
    for i in spent:
        found[values[i].unpacks[-1]] -= values[i].spare
    for step, most in again.making.items():
        found[step] = max(found[step], timeline.before[step] + extra[step] + most)
    top = max(found)
    ms = again.ms + moved.wait_ms + moved.toll_ms
    steps = tuple(found) if levels else ()
    return Outcome(top, found.index(top), ms, steps, moved.stays, moved.wait_ms)


@dataclasses.dataclass(frozen=True)
class Recomputes:
    """What a plan computes again, and when.

    Attributes:
        chosen: the values.
        made: step -> those that are made again in it, in order.
        last: value -> the last step that reads it.
        release: value that a recompute reads -> the last step for which it is held.
        change: by how much the bytes alive change as each step begins.
        making: step that makes some -> the most bytes meanwhile above those at its start.
        ms: time of all.
    """

    chosen: set[int]
    made: dict[int, list[int]]
    last: dict[int, int]
    release: dict[int, int]
    change: list[int]
    making: dict[int, int]
    ms: float


def recomputes(timeline: Timeline, dropped: Collection[int]) -> Recomputes:
    """What a plan computes again; arguments as of `simulate`."""
    values = timeline.values
    chosen = needed(timeline, dropped) if dropped else set()
    used = sorted(chosen)
    first: dict[int, int] = {}  # the step that makes it again
    last: dict[int, int] = {}  # the last step that reads it
    release: dict[int, int] = {}  # the last step for which what it reads is held
    for i in reversed(used):
        v = values[i]
        if v.unpacks:
            first[i] = min(first.get(i, v.unpacks[0]), v.unpacks[0])
            last[i] = max(last.get(i, 0), v.unpacks[-1])
            release[i] = max(release.get(i, 0), v.unpacks[-1])
        for j in v.reads:
            if j in chosen:
                first[j] = min(first.get(j, first[i]), first[i])
                last[j] = max(last.get(j, 0), first[i])
            release[j] = max(release.get(j, 0), release[i])
    change = [0] * (len(timeline.peak) + 2)
    made: dict[int, list[int]] = {}
    stays: dict[int, int] = {}  # step -> bytes made by it that outlive its recomputes
    ends: dict[int, int] = {}  # step -> bytes made before that its recomputes let go
    for i in used:
        v = values[i]
        if v.unpacks:
            for saved, last_use, freed in v.saved_spans():
                change[last_use + 1] -= saved
                change[freed + 1] += saved
        made.setdefault(first[i], []).append(i)
        change[first[i]] += v.bytes
        asked = bool(v.unpacks) and v.unpacks[-1] == last[i]
        change[last[i] + asked] -= v.bytes  # else gone before the step's own work
        if asked or last[i] > first[i]:
            stays[first[i]] = stays.get(first[i], 0) + v.bytes
        if not asked and last[i] > first[i]:
            ends[last[i]] = ends.get(last[i], 0) + v.bytes
    making = {
        step: _while_making(values, makes, step, last) - stays.get(step, 0) + ends.get(step, 0)
        for step, makes in made.items()
    }
    ms = sum(values[i].ms for i in used)
    return Recomputes(chosen, made, last, release, change, making, ms)


def _moved(
    timeline: Timeline,
    away: Collection[int],
    made: Mapping[int, Sequence[int]],
    margin: float,
) -> Traffic:
    """When what goes to host memory is not on the device."""
    if not away:
        return Traffic((), 0.0, 0.0)
    values = timeline.values
    turns = {step: tuple(values[i].name for i in sorted(makes)) for step, makes in made.items()}
    again = {step: sum(values[i].ms for i in makes) for step, makes in made.items()}
    first = {i: step for step, makes in made.items() for i in makes}
    return traffic(timeline.movable, away, timeline.times, turns, first, again, margin)


def _leave(change: list[int], movable: Sequence[Movable], moved: Traffic) -> dict[int, int]:
    """Take what goes to host memory out of the levels; gives its bytes by the value it is of."""
    elsewhere: dict[int, int] = {}
    for stay in moved.stays:
        m = movable[stay.value]
        elsewhere[m.owner] = elsewhere.get(m.owner, 0) + m.bytes
        change[m.freed + 1] += m.bytes
        change[stay.gone + 1] -= m.bytes
        change[stay.back] += m.bytes
        change[stay.last + 1] -= m.bytes
    return elsewhere


def _while_making(
    values: Sequence[Value], makes: Sequence[int], step: int, last: Mapping[int, int]
) -> int:
    """The most bytes above those at the step's start while its recomputes run."""
    reader = {j: i for i in makes for j in values[i].reads}  # the last one that reads it
    live = most = 0
    for i in makes:
        v = values[i]
        live += v.bytes
        most = max(most, live + v.transient)
        for j in v.reads:
            over = last.get(j) == step and reader[j] == i
            if over and (not values[j].unpacks or values[j].unpacks[-1] < step):
                live -= values[j].bytes
    return most


def compressed(timeline: Timeline) -> Timeline:
    """The same timeline with the steps between two events merged into one: as exact, and shorter.

    An event is where a value may come or go: every plan changes the levels only there.
    """
    count = len(timeline.peak)
    starts = {0}
    for v in timeline.values:
        for step in v.unpacks:
            starts |= {step, step + 1}
        for _, last_use, freed in (*v.saved_spans(), (0, v.last_use, v.freed)):
            starts |= {v.made, last_use, last_use + 1, freed, freed + 1}
    for m in timeline.movable:
        starts |= {m.last_use, m.last_use + 1, m.freed, m.freed + 1, timeline.times.forward}
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
            spans=tuple((saved, place[last], place[freed]) for saved, last, freed in v.spans),
        )
        for v in timeline.values
    )
    before = tuple(timeline.before[s] for s in kept)
    ends = [*kept[1:], count]
    peak = tuple(max(timeline.peak[a:b]) for a, b in zip(kept, ends, strict=True))
    if not timeline.movable:
        return Timeline(before, peak, values)
    movable = tuple(
        dataclasses.replace(
            m,
            last_use=place[m.last_use],
            freed=place[m.freed],
            unpacks=tuple(place[s] for s in m.unpacks),
        )
        for m in timeline.movable
    )
    spent = tuple(sum(timeline.times.ms[a:b]) for a, b in zip(kept, ends, strict=True))
    times = Times(spent, place[timeline.times.forward])
    return Timeline(before, peak, values, movable, times)
