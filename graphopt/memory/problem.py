"""A body as the search sees it, and what the search found in words."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from graphopt.graph import ops
from graphopt.graph.body import Body
from graphopt.graph.record import Site, site_of
from graphopt.memory.facts import Facts
from graphopt.memory.search import Choice, Point
from graphopt.memory.simulate import Timeline, Value, needed
from graphopt.passes.remat import reasons


@dataclasses.dataclass(frozen=True)
class Recompute:
    """A value that backward computes again.

    Attributes:
        value: name of its node.
        op: what computes it.
        bytes: that autograd no longer keeps; 0 for what is only computed on the way to others.
        ms: predicted time of computing it once more.
        reason: what it is computed from, and why it may be, in words.
        site: module and line that it came from.
    """

    value: str
    op: str
    bytes: int
    ms: float
    reason: str
    site: Site

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class CurvePoint:
    """One plan among those that no other beats in both.

    Attributes:
        peak_bytes: predicted by the replay, which agrees with the oracle to about a percent.
        extra_ms: predicted time of all its recomputes.
        recomputed: how many values it recomputes.
    """

    peak_bytes: int
    extra_ms: float
    recomputed: int


@dataclasses.dataclass(frozen=True)
class Problem:
    """A body as the search sees it.

    Attributes:
        timeline: its step without a plan, with one value per node that owns storage.
        sites: where each value came from, and its op.
        forward_ms: predicted time of the forward.
    """

    timeline: Timeline
    sites: tuple[tuple[Site, str], ...]
    forward_ms: float

    @classmethod
    def of(cls, body: Body, facts: Facts, plain: int | None = None) -> Problem:
        """The problem that measured facts pose.

        Args:
            body: the body.
            facts: measured on it.
            plain: the peak by the oracle, to which the timeline is shifted.
        """
        shift = 0 if plain is None else plain - facts.peak_bytes
        why = {node.name: reason for node, reason in reasons(body).items()}
        nodes = {n.name: n for n in body.graph.nodes}
        names = sorted(facts.values, key=lambda n: facts.values[n].made)
        place = {name: i for i, name in enumerate(names)}
        asked: dict[str, list[int]] = {}
        for i, step in enumerate(facts.steps):
            for name in step.unpacks:
                asked.setdefault(name, []).append(i)
        values = []
        for name in names:
            f = facts.values[name]
            values.append(
                Value(
                    name=name,
                    bytes=f.bytes,
                    saved=f.saved_bytes,
                    made=f.made,
                    last_use=f.last_use,
                    freed=f.freed,
                    unpacks=tuple(dict.fromkeys(asked.get(name, ()))) if f.saved_bytes else (),
                    reads=tuple(sorted(place[r] for r in f.reads if r in place)),
                    ms=f.ms,
                    transient=f.transient,
                    why_not=why.get(name, "is no value of the graph"),
                )
            )
        before = tuple(s.before + shift for s in facts.steps)
        peak = tuple(s.peak + shift for s in facts.steps)
        timeline = Timeline(before, peak, tuple(values))
        sites = tuple((site_of(nodes[n]), ops.op_name(nodes[n].target)) for n in names)
        return cls(timeline, sites, sum(v.ms for v in values))

    def names(self, dropped: Choice) -> frozenset[str]:
        """The names of some values."""
        return frozenset(self.timeline.values[i].name for i in dropped)

    def recomputes(self, dropped: Choice) -> tuple[Recompute, ...]:
        """What a plan recomputes, in words."""
        used = needed(self.timeline, dropped)
        return tuple(self._recompute(i, used) for i in sorted(used))

    def _recompute(self, i: int, used: set[int]) -> Recompute:
        v, (site, op) = self.timeline.values[i], self.sites[i]
        sources = [self.timeline.values[j].name for j in v.reads]
        reason = f"from {', '.join(sources)}" if sources else "from inputs and parameters alone"
        if not v.saved:
            readers = [
                self.timeline.values[j].name for j in used if i in self.timeline.values[j].reads
            ]
            reason += f", on the way to {', '.join(sorted(readers)[:3])}"
        return Recompute(v.name, op, v.saved, v.ms, reason, site)

    def curve(self, points: Sequence[Point]) -> tuple[CurvePoint, ...]:
        """The points as they are told."""
        return tuple(
            CurvePoint(p.peak, p.ms, len(needed(self.timeline, p.dropped))) for p in points
        )
