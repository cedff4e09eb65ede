"""The best of all plans on a small graph, by integer programming: the measure of the search.

It minimizes the same time under the same replay (`graphopt.memory.simulate`), so that the two can
be compared plan by plan. The number of variables grows with the cube of the values: for graphs of
up to about 15 values. Needs scipy (the extra `memory`), whose `milp` runs HiGHS.

Source of the formulation: Jain et al., "Checkmate: Breaking the Memory Wall with Optimal Tensor
Rematerialization" (2020), for one recompute of each value, as the runtime does it.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from typing import Any

from graphopt.errors import GraphOptError, OptionError
from graphopt.memory.search import Point
from graphopt.memory.simulate import Timeline, compressed, simulate

Terms = dict[Hashable, float]

MOST = 24
"""Up to so many values that may be recomputed are taken."""


def best(timeline: Timeline, limit: int, *, seconds: float = 30.0) -> Point | None:
    """The plan of least time whose peak is within a limit; None where there is none.

    Args:
        timeline: the step without a plan; parts of a value are not dropped alone.
        limit: bytes.
        seconds: how long to look for it.

    Raises:
        OptionError: where scipy is not installed, or the graph is too large.
        GraphOptError: where the time did not suffice.

    Example:
        >>> values = (Value("a", 8, 8, 0, 1, 3, (3,), ms=2.0), Value("b", 8, 0, 1, 1, 1))
        >>> line = Timeline((0, 8, 8, 8), (8, 16, 24, 8), values)
        >>> found = best(line, 20)  # doctest: +SKIP
    """
    model = _Model(compressed(timeline), limit)
    chosen = model.solved(seconds)
    if chosen is None:
        return None
    found = simulate(timeline, chosen)
    return Point(found.peak, found.ms, chosen)


class _Model:
    """Variables, rows and their solution.

    Variables, each between 0 and 1 (the first two whole numbers, the others follow from them):
        ("d", i): value i is dropped.
        ("m", i, e): it is made again at event e or before.
        ("p", i, e): it is there during the own work of event e.
        ("q", i, e): it is there between event e and the next.
        ("a", i, e): what it reads may still be asked for at event e.
        ("h", j, e): value j, which is kept, is held for that.
        ("l", k, i, e): k is alive while i is made at event e.
    """

    def __init__(self, timeline: Timeline, limit: int) -> None:
        self.timeline, self.limit = timeline, limit
        self.values = timeline.values
        self.free = [
            i for i, v in enumerate(self.values) if v.why_not is None and v.part_of is None
        ]
        if len(self.free) > MOST:
            raise OptionError(
                f"the graph has {len(self.free)} values that may be recomputed",
                why=f"the exact planner takes up to {MOST}",
                try_="graphopt.memory.search.pareto",
            )
        self.events = sorted({s for v in self.values for s in v.unpacks})
        self.readers: dict[int, list[int]] = {i: [] for i in range(len(self.values))}
        for r in self.free:
            for j in self.values[r].reads:
                self.readers[j].append(r)
        self.index: dict[Hashable, int] = {}
        self.rows: list[tuple[Terms, float]] = []
        self.last = len(self.events) - 1
        self._build()

    def at_most(self, terms: Terms, bound: float) -> None:
        """Add a row: the terms sum up to at most a bound."""
        for name in terms:
            self.index.setdefault(name, len(self.index))
        self.rows.append((terms, bound))

    def _build(self) -> None:
        for i in self.free:
            self.index.setdefault(("d", i), len(self.index))
        for i, e in itertools.product(self.free, range(len(self.events))):
            self._made(i, e)
            self._there(i, e)
            self._asked(i, e)
        for step in range(len(self.timeline.peak)):
            terms, constant = self._level(step)
            self.at_most(terms, self.limit - self.timeline.peak[step] - constant)
        for i, e in itertools.product(self.free, range(len(self.events))):
            self._making(i, e)

    def _made(self, i: int, e: int) -> None:
        """A value is made when it is asked for first, by backward or by what is made of it."""
        v, m = self.values[i], ("m", i, e)
        asked = bool(v.unpacks) and self.events[e] >= v.unpacks[0]
        self.at_most({m: 1, ("d", i): -1}, 0)
        if e:
            self.at_most({("m", i, e - 1): 1, m: -1}, 0)
        if asked:
            self.at_most({("d", i): 1, m: -1}, 0)
        else:
            self.at_most({m: 1, **{("m", r, e): -1 for r in self.readers[i]}}, 0)
        for r in self.readers[i]:
            self.at_most({("m", r, e): 1, ("d", i): 1, m: -1}, 1)

    def _there(self, i: int, e: int) -> None:
        """A value that was made stays until it was asked for last and its readers are made."""
        v, now = self.values[i], self.events[e]
        for kind, more in (("p", now), ("q", now + 1)):
            here = (kind, i, e)
            self.at_most({here: -1}, 0)
            if v.unpacks and v.unpacks[-1] >= more:
                self.at_most({("m", i, e): 1, here: -1}, 0)
            for r in self.readers[i]:
                used, done = ("m", r, self.last), ("m", r, e)
                if e != self.last:
                    self.at_most({("m", i, e): 1, used: 1, done: -1, here: -1}, 1)

    def _asked(self, i: int, e: int) -> None:
        """What a value reads is held as long as it may be asked for."""
        v = self.values[i]
        self.at_most({("a", i, e): -1}, 0)
        if v.unpacks and v.unpacks[-1] >= self.events[e]:
            self.at_most({("m", i, self.last): 1, ("a", i, e): -1}, 0)
        for j in v.reads:
            if j in self.free:
                self.at_most({("a", i, e): 1, ("m", j, self.last): 1, ("a", j, e): -1}, 1)
                self.at_most({("a", i, e): 1, ("d", j): -1, ("h", j, e): -1}, 0)
            else:
                self.at_most({("a", i, e): 1, ("h", j, e): -1}, 0)

    def _level(self, step: int, *, own: bool = True) -> tuple[Terms, float]:
        """What a plan adds to the bytes of a step, without those that are only passing."""
        terms: Terms = {}
        for i in self.free:
            gone = sum(s for s, last, end in self.values[i].saved_spans() if last < step <= end)
            if gone and self.values[i].unpacks:
                terms["d", i] = -gone
        before = [e for e, s in enumerate(self.events) if s <= step]
        if before and own:
            e = before[-1]
            kind = "p" if self.events[e] == step else "q"
            terms |= {(kind, i, e): self.values[i].bytes for i in self.free}
        behind = next((e for e, s in enumerate(self.events) if s >= step), None)
        if behind is not None:
            for j, v in enumerate(self.values):
                if ("h", j, behind) in self.index and step > v.freed:
                    terms["h", j, behind] = v.bytes
        return terms, 0.0

    def _making(self, i: int, e: int) -> None:
        """While a value is made its own bytes are there, and what it was made from."""
        step, v = self.events[e], self.values[i]
        terms, _ = self._level(step, own=False)
        for k in self.free:
            if k == i:
                continue
            alive = ("l", k, i, e)
            made = ("m", k, e) if k < i else ("m", k, e - 1)
            if made not in self.index:
                continue
            self.at_most({alive: -1}, 0)
            self.at_most({made: 1, ("p", k, e): 1, alive: -1}, 1)
            for r in self.readers[k]:
                if r >= i:
                    now: dict[Hashable, float] = {made: 1, ("m", r, e): 1, alive: -1}
                    if e:
                        now[("m", r, e - 1)] = -1
                    self.at_most(now, 1)
            terms[alive] = self.values[k].bytes
        free = self.limit - self.timeline.before[step] - v.bytes - v.transient
        much = 2 * max(max(self.timeline.peak), sum(u.bytes + u.transient for u in self.values), 1)
        terms[("m", i, e)] = much
        if e:
            terms[("m", i, e - 1)] = -much
        self.at_most(terms, free + much)

    def solved(self, seconds: float) -> frozenset[int] | None:
        """The values to drop, None where no plan keeps the limit."""
        try:
            import numpy as np
            from scipy import sparse
            from scipy.optimize import Bounds, LinearConstraint, milp
        except ImportError as error:
            raise OptionError(
                "the exact planner needs scipy", try_="pip install 'graphopt[memory]'"
            ) from error
        count = len(self.index)
        cost, whole = np.zeros(count), np.zeros(count)
        for name, at in self.index.items():
            kind: Any = name[0]  # type: ignore[index]
            whole[at] = kind in ("d", "m")
        for i in self.free:
            if ("m", i, self.last) in self.index:
                cost[self.index["m", i, self.last]] = self.values[i].ms
        entries = [
            (n, self.index[name], factor)
            for n, (terms, _) in enumerate(self.rows)
            for name, factor in terms.items()
        ]
        rows, columns, factors = zip(*entries, strict=True)
        table = sparse.csr_array((factors, (rows, columns)), shape=(len(self.rows), count))
        found = milp(
            cost,
            integrality=whole,
            bounds=Bounds(0, 1),
            constraints=LinearConstraint(table, ub=np.array([bound for _, bound in self.rows])),
            options={"time_limit": seconds, "mip_rel_gap": 0.0},
        )
        if found.status == 2:  # infeasible
            return None
        if found.status != 0:
            raise GraphOptError(
                "the exact plan was not found in time", why=found.message, try_="seconds="
            )
        return frozenset(i for i in self.free if found.x[self.index["d", i]] > 0.5)
