"""Which values go to host memory, as the second choice beside recomputing them.

From some of the plans that only recompute, values are sent one after the other: of those alive at
the highest step first the ones that are dear to compute again, as long as the link carries them
beside the computation and nothing waits. Then, for smaller peaks, those that are waited for. And
at an equal peak, where that is faster, in place of being recomputed. The replay judges each step;
what no other plan beats in both peak and time is kept by the caller.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterable, Iterator, Sequence

from graphopt.memory.search import Choice, Point, prices
from graphopt.memory.simulate import Outcome, Timeline, recomputes, simulate

STARTS = 24
"""From how many plans values are sent; from fewer where a replay takes long."""

TRIES = 4
"""Of how many values that are waited for the best is taken."""

SWAPS = 80
"""For how many recomputed values of a plan it is tried to send them instead."""

REPLAYS = 120_000
"""How many replays, times the values of each, look for plans between others."""

GAP = 1.005
"""Between two plans whose peaks are farther apart others are looked for."""

LEAST_MS = 1e-6

HOST_SHARE = 0.5
"""Share of the host's memory that may be pinned: what is, cannot be paged out for others."""


def pinned(size: int) -> int:
    """Bytes that torch's pool of pinned memory takes for some bytes.

    Example:
        >>> pinned(3 * 2**20) == 4 * 2**20
        True
    """
    return 1 << max(0, size - 1).bit_length()


def host_room() -> int:
    """Bytes of host memory that this process may pin.

    A share of the machine's, or of the container's, divided among the processes that torchrun says
    there are on the machine.
    """
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not a system that tells
        memory = sys.maxsize
    try:
        with open("/sys/fs/cgroup/memory.max") as file:
            said = file.read().strip()
    except OSError:
        said = "max"
    processes = os.environ.get("LOCAL_WORLD_SIZE", "1")
    share = HOST_SHARE / max(1, int(processes) if processes.isdigit() else 1)
    return int(share * min(memory, int(said) if said.isdigit() else memory))


def with_offloads(
    timeline: Timeline, points: Sequence[Point], *, share: float = 1.0
) -> list[Point]:
    """Plans that keep values in host memory, found from some that do not.

    Args:
        timeline: the step without a plan, with what may go.
        points: plans from loose to tight; between two of them others are looked for, too.
        share: of the work that is done at most.
    """
    if not timeline.movable or not points:
        return []
    search = _Offloads(timeline)
    count = max(4, round(share * max(10, min(STARTS, 3000 // len(timeline.values)))))
    last = len(points) - 1
    found: list[Point] = []
    for i in sorted({round(n * last / (count - 1)) for n in range(count)}):
        found += search.beside(points[i])
        found += search.swapped(points[i])
    if len(points) == 1:
        return found
    tried: set[tuple[Point, Point]] = set()
    most = search.runs + round(share * REPLAYS / len(timeline.values))
    while search.runs < most:
        pairs = [
            (loose, tight)
            for loose, tight in itertools.pairwise(unbeaten([*points, *found]))
            if tight.away and loose.peak > GAP * tight.peak and (loose, tight) not in tried
        ]
        if not pairs:
            break
        widest = max(pairs, key=lambda pair: (pair[0].peak / pair[1].peak, pair[0].peak))
        tried.add(widest)
        found += search.between(*widest)
    return found


def unbeaten(points: Iterable[Point]) -> list[Point]:
    """The plans that none of the others beats in both peak and time, from loose to tight."""
    kept: list[Point] = []
    for p in sorted(points, key=lambda p: (p.ms, p.peak, sorted(p.dropped), sorted(p.away))):
        if not kept or p.peak < kept[-1].peak:
            kept.append(p)
    return kept


class _Offloads:
    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.room = host_room()
        self.runs = 0
        self._again = frozenset[int](), recomputes(timeline, ())
        self.pinned = [pinned(m.bytes) for m in timeline.movable]
        self.cost, _ = prices(timeline.values)
        self.norms: dict[int, list[int]] = {}
        for i, v in enumerate(timeline.values):
            if v.part_of is not None and v.why_not is None:
                self.norms.setdefault(v.part_of, []).append(i)
        worth = [self._worth(c) for c in range(len(timeline.movable))]
        self.order = sorted(range(len(worth)), key=lambda c: (-worth[c], c))

    def _worth(self, c: int) -> float:
        """Time of computing a value again for each byte; what cannot be is worth the most."""
        m = self.timeline.movable[c]
        if self.timeline.values[m.owner].why_not is not None:
            return float("inf")
        return self.cost[m.owner] / max(1, m.bytes)

    def _left(self, away: Choice) -> int:
        """Bytes that the host has beside some values."""
        return self.room - sum(self.pinned[c] for c in away)

    def _run(self, dropped: Choice, away: Choice) -> Outcome:
        self.runs += 1
        known, again = self._again
        if known != dropped:
            again = recomputes(self.timeline, dropped)
            self._again = dropped, again
        return simulate(self.timeline, dropped, away, levels=True, again=again)

    def _there(self, at: int, dropped: Choice, away: Choice) -> Iterator[int]:
        """What lies on the device at a step and waits for backward, the dearest first."""
        left = self._left(away)
        for c in self.order:
            m = self.timeline.movable[c]
            if c in away or m.owner in dropped or m.last_use >= at:
                continue
            if self.pinned[c] > left:
                continue
            if at < m.unpacks[0] if m.unpacks else any(r in dropped for r in m.readers):
                yield c

    def beside(self, start: Point) -> list[Point]:
        """Send what nothing waits for, as long as the peak falls; then what is waited for."""
        away: Choice = frozenset()
        outcome = self._run(start.dropped, away)
        found: list[Point] = []
        refused: set[int] = set()
        free = True
        while True:
            best: tuple[float, int, Outcome] | None = None
            tries = 0
            for c in self._there(outcome.at, start.dropped, away):
                if free and c in refused:
                    continue
                moved = self._run(start.dropped, away | {c})
                gain = outcome.levels[outcome.at] - moved.levels[outcome.at]
                price = max(0.0, moved.ms - outcome.ms)
                waits = moved.wait_ms > outcome.wait_ms + LEAST_MS
                if gain <= 0 or moved.peak > outcome.peak or (free and waits):
                    refused.add(c)
                    continue
                if best is None or price / gain < best[0]:
                    best = price / gain, c, moved
                tries += 1
                if free or tries == TRIES:
                    break
            if best is None and free:
                free = False
                continue
            if best is None:
                return found
            away, outcome = away | {best[1]}, best[2]
            found.append(Point(outcome.peak, outcome.ms, start.dropped, away))

    def swapped(self, start: Point) -> list[Point]:
        """Send in place of computing again, where that is faster and the peak stays."""
        dropped, away = start.dropped, frozenset[int]()
        outcome = self._run(dropped, away)
        limit = outcome.peak
        recomputed = [c for c in self.order if self.timeline.movable[c].owner in dropped]
        for c in recomputed[:SWAPS]:
            owner = self.timeline.movable[c].owner
            if owner not in dropped or self.pinned[c] > self._left(away):
                continue
            kept = (dropped - {owner}) | set(self.norms.get(owner, ()))
            moved = self._run(kept, away | {c})
            if moved.peak <= limit and moved.ms < outcome.ms - LEAST_MS:
                dropped, away, outcome = kept, away | {c}, moved
        if not away:
            return []
        return [Point(outcome.peak, outcome.ms, dropped, away)]

    def between(self, loose: Point, tight: Point) -> list[Point]:
        """Keep values again that the tighter of two plans computes again, the dearest first.

        Where one does not fit, cheaper ones are computed again in its place.
        """
        point, found = tight, list[Point]()
        order = sorted(tight.dropped, key=lambda i: (-self.cost[i], i))
        for i in order[: SWAPS // 2]:
            moved = self._within(point.dropped - {i}, point.away, loose.peak, i)
            if moved is not None and moved.ms < point.ms - LEAST_MS:
                point = moved
                found.append(point)
        return found

    def _within(self, dropped: Choice, away: Choice, limit: int, kept: int) -> Point | None:
        """A plan with its peak below a limit, by a few more values that are computed again."""
        values = self.timeline.values
        sent = {self.timeline.movable[c].owner for c in away}
        for _ in range(TRIES):
            outcome = self._run(dropped, away)
            if outcome.peak < limit:
                return Point(outcome.peak, outcome.ms, dropped, away)
            there = [
                i
                for i, v in enumerate(values)
                if v.why_not is None
                and v.saved
                and v.unpacks
                and v.last_use < outcome.at < v.unpacks[0]
                and i not in dropped
                and i != kept
                and i not in sent
                and v.part_of not in dropped
            ]
            if not there:
                return None
            dropped |= {min(there, key=lambda i: (self.cost[i] / values[i].saved, i))}
        return None
