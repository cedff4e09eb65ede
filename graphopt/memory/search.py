"""Which values to recompute: for every peak between the plain one and the least, the least time.

The plans for all peaks are found at once and kept as a list without dominated ones, from loose to
tight. A budget only picks from that list, so a smaller budget never gives a larger peak or a faster
step. For each of a row of peaks two greedy searches meet, and the better plan stays:

- from above: drop, among the values alive at the highest step, those that free the most bytes for
  the least time, until that step fits (first what is cheap: casts, norms, activations);
- from below: begin with a plan that keeps little more than where segments of the graph begin, and
  keep, of what is left, that which saves the most time for its bytes, as long as every step fits.

Between two plans whose peaks are far apart more are looked for, from the tighter one.

Both look at the peak of the replay (`graphopt.memory.simulate`) and not at the sum of what is
saved: a recompute brings back all that its chain drops at once.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Iterable, Sequence

from graphopt.memory.simulate import Outcome, Timeline, Value, simulate

LEVELS = 48
"""For how many peaks between the plain one and the least a plan is searched."""

NEAR = 0.01
"""Plans lie that near to each other, as a share of what can be saved, where there are any."""

SMALL = 100
"""Up to so many values every single change of every plan of the list is tried."""

Choice = frozenset[int]


@dataclasses.dataclass(frozen=True)
class Point:
    """One plan of the list.

    Attributes:
        peak: predicted bytes.
        ms: predicted time of all recomputes.
        dropped: positions of the dropped values in the timeline.
        away: positions of those that go to host memory among the movable ones.
    """

    peak: int
    ms: float
    dropped: Choice
    away: Choice = frozenset()


def pareto(timeline: Timeline, levels: int = LEVELS) -> list[Point]:
    """The plans that no other one beats in both peak and time, from loose to tight.

    The first is that of no recompute at all. Equal timelines give equal lists.

    Args:
        timeline: the step without a plan.
        levels: how many peaks between the plain and the least are searched.

    Example:
        >>> values = (Value("a", 8, 8, 0, 1, 3, (3,), ms=2.0), Value("b", 8, 0, 1, 1, 1))
        >>> line = Timeline((0, 8, 8, 8), (8, 16, 16, 8), values)
        >>> [(p.peak, p.ms) for p in pareto(line)]
        [(16, 0.0)]
    """
    search = _Search(timeline)
    plain = search.tried(frozenset())
    tightest = min((search.tried(s) for s in search.seeds()), key=_order, default=plain)
    lowest = search.down(plain.dropped, 0, best=True)
    floor = search.lowest(search.settle(min(plain, tightest, lowest, key=_order))).peak
    seeds = sorted({*search.points}, key=_order)
    above: Choice = frozenset()
    for i in range(1, levels + 1):
        limit = plain.peak - (plain.peak - floor) * i // levels
        found = search.down(above, limit)
        if found.peak > limit:
            found = search.squeeze(found, limit)
        if found.peak <= limit:
            above = found.dropped
            search.up(above, limit)
        for seed in _spread([s for s in seeds if s.peak <= limit]):
            search.up(seed.dropped, limit)
        search.polish(limit)
    for loose, tight in itertools.pairwise(search.front()):
        parts = round((loose.peak - tight.peak) / (NEAR * (plain.peak - floor + 1)))
        for i in range(1, parts):
            limit = tight.peak + (loose.peak - tight.peak) * i // parts
            search.up(tight.dropped, limit)
            search.polish(limit)
    if len(timeline.values) <= SMALL:
        front = search.front()[1:]
        for point in front[:: max(1, len(front) // levels)]:
            search.settle(point)
    return search.front()


def _order(point: Point) -> tuple[int, float, list[int]]:
    """Ties end the same way on every machine."""
    return point.peak, point.ms, sorted(point.dropped)


def _spread(seeds: Sequence[Point], most: int = 3) -> list[Point]:
    """A few of the seeds: the tightest, the fastest, one between."""
    if len(seeds) <= most:
        return list(seeds)
    return [seeds[0], seeds[len(seeds) // 2], seeds[-1]]


def prices(values: Sequence[Value]) -> tuple[dict[int, float], dict[int, int]]:
    """What dropping a value costs when all that autograd saves is there, and what it holds.

    What it reads and autograd does not save is run again, too; what cannot be run is held.
    """
    cost: dict[int, float] = {}
    holds: dict[int, int] = {}
    closed: dict[int, frozenset[int]] = {}
    lazy = {i for i, v in enumerate(values) if v.why_not is None and not v.unpacks}
    for i, v in enumerate(values):
        chain = {i}
        for j in v.reads:
            if not values[j].saved:
                chain |= closed[j]
        closed[i] = frozenset(chain)
        cost[i] = sum(values[j].ms for j in chain if j == i or j in lazy)
        holds[i] = sum(values[j].bytes for j in chain if j != i and j not in lazy)
    return cost, holds


class _Search:
    """All plans tried on one timeline."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.values = timeline.values
        may = [i for i, v in enumerate(self.values) if v.why_not is None]
        self.lazy = frozenset(i for i in may if not self.values[i].unpacks)
        self.choices = [i for i in may if self.values[i].unpacks and self.values[i].saved]
        self.cost, self.holds = prices(self.values)
        self.points: dict[Point, None] = {}
        self._outcomes: dict[Choice, Outcome] = {}

    def outcome(self, dropped: Choice) -> Outcome:
        """Replay a plan, with what is recomputed on the way."""
        found = self._outcomes.get(dropped)
        if found is None:
            found = simulate(self.timeline, dropped, levels=True)
            self._outcomes[dropped] = found
        return found

    def tried(self, dropped: Choice) -> Point:
        """Replay a plan and keep it."""
        found = self.outcome(dropped)
        point = Point(found.peak, found.ms, dropped)
        self.points[point] = None
        return point

    def front(self) -> list[Point]:
        """The plans that none beats, from loose to tight."""
        kept: list[Point] = []
        for p in sorted(self.points, key=lambda p: (p.ms, p.peak, sorted(p.dropped))):
            if not kept or p.peak < kept[-1].peak:
                kept.append(p)
        return kept

    # ---- from above

    def down(self, dropped: Choice, limit: int, *, best: bool = False) -> Point:
        """Drop values until the peak is within a limit, or cannot be brought down.

        Args:
            dropped: where to begin.
            limit: bytes.
            best: give the lowest point on the way, not the last.
        """
        point = lowest = self.tried(dropped | self.lazy if dropped else dropped)
        for _ in range(2 * len(self.choices) + 1):
            if point.peak <= limit:
                break
            chosen = self._to_drop(point, limit)
            if not chosen:
                break
            point = self.tried(point.dropped | self.lazy | chosen)
            lowest = min(lowest, point, key=_order)
        return lowest if best else point

    def _to_drop(self, point: Point, limit: int) -> Choice:
        """The next values to drop: enough, by the look of it, for the highest step to fit."""
        at = self.outcome(point.dropped).at
        over = point.peak - limit
        there = [
            i
            for i in self.choices
            if i not in point.dropped
            and self.values[i].part_of not in point.dropped
            and self.values[i].last_use < at < self.values[i].unpacks[0]
            and self._gain(i) > 0
        ]
        there.sort(key=lambda i: (self.cost[i] / self._gain(i), i))
        chosen: list[int] = []
        for i in there[: max(1, len(self.choices) // 8)]:
            if over <= 0:
                break
            chosen.append(i)
            over -= self._gain(i)
        return frozenset(chosen)

    def _gain(self, i: int) -> int:
        return self.values[i].saved - self.holds[i]

    # ---- from below

    def seeds(self) -> list[Choice]:
        """Plans that keep only what the rest of the graph reads at the start of each segment."""
        every = frozenset(self.choices) | self.lazy
        found = [every - kept for kept in _Places(self.values).kept_sets()]
        return list(dict.fromkeys([every, *found]))

    def up(self, dropped: Choice, limit: int) -> Point:
        """Keep values again, the most time for its bytes first, while every step fits.

        Args:
            dropped: a plan within the limit.
            limit: bytes.
        """
        point = self.tried(dropped)
        order = [i for i in self.choices if i in dropped]
        order.sort(key=lambda i: (-self.cost[i] / self.values[i].saved, i))
        slack = [limit - level for level in self.outcome(point.dropped).levels]
        kept: list[int] = []
        for i in order:
            v = self.values[i]
            first, last = v.last_use + 1, v.unpacks[0]
            if min(slack[first:last], default=v.saved) >= v.saved:
                slack[first:last] = [s - v.saved for s in slack[first:last]]
                kept.append(i)
        return self._keep(point, kept, limit)

    def _keep(self, point: Point, kept: list[int], limit: int) -> Point:
        """Keep as many of some values as fit; the replay, not the estimate, decides."""
        whole = self.tried(point.dropped - frozenset(kept))
        if whole.peak <= limit or not kept:
            return min(whole, point, key=lambda p: (p.ms, *_order(p)))
        if len(kept) == 1:
            return point
        half = len(kept) // 2
        point = self._keep(point, kept[:half], limit)
        return self._keep(point, kept[half:], limit)

    # ---- better

    @property
    def tries(self) -> int:
        """How many single changes of a plan are tried: all of a small graph's, a few of a large."""
        return max(4, 800 // (len(self.values) + 1))

    def settle(self, point: Point) -> Point:
        """Bring the peak down by one change after the other, as long as one helps."""
        while True:
            at = self.outcome(point.dropped).at
            there = [
                i
                for i in (*self.choices, *self.lazy)
                if self.values[i].last_use < at <= max(self.values[i].unpacks, default=at)
            ]
            there.sort(key=lambda i: (-self.values[i].bytes, i))
            moved = [self.tried(point.dropped ^ {i}) for i in there[: self.tries]]
            best = min(moved, key=_order, default=point)
            if best.peak >= point.peak:
                return point
            point = best

    def lowest(self, point: Point) -> Point:
        """The lowest peak that small changes lead to."""
        for percent in (90, 95, 98, 99):
            while True:
                lower = self.squeeze(point, point.peak * percent // 100)
                if lower.peak * 100 > point.peak * percent:
                    break
                point = lower
        return point

    def squeeze(self, point: Point, limit: int) -> Point:
        """Bring all steps within a limit by one change after the other, or give the lowest met.

        What counts is by how much all steps together are above the limit: a change that lowers one
        of two high steps is one in the right direction, though the peak stays.
        """
        over, lowest = self._excess(point, limit), point
        for _ in range(self.turns):
            if not over:
                break
            moved = [self.tried(point.dropped ^ {i}) for i in self._suspects(point, limit)]
            best = min(moved, key=lambda p: (self._excess(p, limit), *_order(p)), default=point)
            if self._excess(best, limit) >= over:
                break
            point, over = best, self._excess(best, limit)
            lowest = min(lowest, point, key=_order)
        return lowest

    def _excess(self, point: Point, limit: int) -> int:
        return sum(level - limit for level in self.outcome(point.dropped).levels if level > limit)

    def _suspects(self, point: Point, limit: int) -> list[int]:
        """Values whose change may lower a step that is above a limit, a few for each such step.

        Kept ones that lie there and are asked for later; dropped ones that are there early, for
        what is computed from them.
        """
        levels = self.outcome(point.dropped).levels
        high = [s for s, level in enumerate(levels) if level > limit]
        high.sort(key=lambda s: (-levels[s], s))
        found: dict[int, None] = {}
        for step in high[:2]:
            there = [
                i
                for i in (*self.choices, *self.lazy)
                if self.values[i].last_use < step <= max(self.values[i].unpacks, default=step)
            ]
            there.sort(key=lambda i: (-self.values[i].bytes, i))
            large = there[: 4 * self.tries]
            found |= dict.fromkeys(large[:: max(1, len(large) // self.tries)])
            found |= dict.fromkeys(sorted(there)[-2:])  # near the end of the forward
        return list(found)

    @property
    def turns(self) -> int:
        """How many changes one squeeze makes."""
        return max(6, 1000 // (len(self.values) + 1))

    def polish(self, limit: int) -> None:
        """Keep the dearest recomputes of the best plan and drop others in their place."""
        best = min(
            (p for p in self.points if p.peak <= limit),
            key=lambda p: (p.ms, *_order(p)),
            default=None,
        )
        if best is None:
            return
        dear = sorted((i for i in self.choices if i in best.dropped), key=lambda i: -self.cost[i])
        for i in dear[: self.tries]:
            moved = self.down(best.dropped - {i}, limit)
            if moved.peak > limit:
                continue
            moved = self.up(moved.dropped, limit)
            if moved.ms < best.ms:
                best = moved


class _Places:
    """Where a graph can be cut into segments, by the bytes that cross."""

    def __init__(self, values: Sequence[Value]) -> None:
        self.values = values
        n = len(values)
        sizes = [v.bytes if v.part_of is None else 0 for v in values]
        for v in values:
            if v.part_of is not None:  # cheap to make again: no reason to keep it at a border
                sizes[v.part_of] -= v.bytes
        self.last = list(range(n))
        for i, v in enumerate(values):
            for j in v.reads:
                self.last[j] = i
        change = [0] * (n + 2)
        for j, end in enumerate(self.last):
            change[j + 1] += sizes[j]
            change[end + 1] -= sizes[j]
        self.crossing, live = [], 0
        for i in range(n + 1):
            live += change[i]
            self.crossing.append(live)  # alive before value i is made
        self.cuts = [
            i
            for i in range(1, n)
            if self.crossing[i] <= min(self.crossing[i - 1], self.crossing[i + 1])
        ]
        sums = [0]
        for v in values:
            sums.append(sums[-1] + (v.saved if v.part_of is None else 0))
        self.sums = sums

    def kept_sets(self, most: int = 14) -> Iterable[frozenset[int]]:
        """Values to keep, for longer and longer segments."""
        total = self.sums[-1]
        widest = total
        for _ in range(most):
            kept = frozenset(
                j
                for cut in self._chosen(widest)
                for j in range(cut)
                if cut <= self.last[j] and self.values[j].part_of is None
            )
            yield kept
            widest = widest * 3 // 4

    def _chosen(self, widest: int) -> list[int]:
        """The cuts whose crossing bytes are least in sum, with no segment above a width."""
        places = [0, *self.cuts, len(self.values)]
        best: list[tuple[int, int]] = [(0, -1)]
        for n in range(1, len(places)):
            end = places[n]
            cost = self.crossing[end] if end < len(self.values) else 0
            first = bisect.bisect_left(
                places,
                True,
                key=lambda p: self.sums[end] - self.sums[p] <= widest,
            )
            first = min(first, n - 1)
            before = min(range(first, n), key=lambda m: (best[m][0], -m))
            best.append((best[before][0] + cost, before))
        found, n = [], best[-1][1]
        while n > 0:
            found.append(places[n])
            n = best[n][1]
        return found
