"""A body as the search sees it, and what the search found in words."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from graphopt.graph import ops
from graphopt.graph.body import Body
from graphopt.graph.recipes import sum_of
from graphopt.graph.record import Site, site_of
from graphopt.memory.facts import Facts
from graphopt.memory.search import Choice
from graphopt.memory.simulate import Timeline, Value, needed, simulate
from graphopt.memory.trips import LATENCY_MS, WIDE, Movable, Times, relaxed
from graphopt.offload import may_leave
from graphopt.passes.remat import Trip
from graphopt.passes.values import Values, overwriter, reasons, value_of


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
class Offload:
    """A value that lies in host memory between forward and backward.

    Attributes:
        value: name of its node; of an op with several results that of the item.
        op: what computes it.
        bytes: of it.
        ms: predicted time of its copy, one way, beside the computation.
        until: the node of forward behind which the device lets go of it; None for forward's end.
        ahead: the dropped value in whose turn in backward it comes back; None: when asked for.
        site: module and line that it came from.
    """

    value: str
    op: str
    bytes: int
    ms: float
    until: str | None
    ahead: str | None
    site: Site

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class CurvePoint:
    """One plan among those that no other beats in both.

    Attributes:
        peak_bytes: predicted by the replay, which agrees with the oracle to about a percent.
        extra_ms: predicted time of all its recomputes, and of waiting for copies.
        recomputed: how many values it recomputes.
        offloaded: how many values it keeps in host memory.
    """

    peak_bytes: int
    extra_ms: float
    recomputed: int
    offloaded: int = 0


@dataclasses.dataclass(frozen=True)
class Problem:
    """A body as the search sees it.

    Attributes:
        timeline: its step without a plan, with one value per node that owns storage.
        sites: where each value came from, and its op.
        forward_ms: predicted time of the forward.
        nodes: the node of each step.
    """

    timeline: Timeline
    sites: tuple[tuple[Site, str], ...]
    forward_ms: float
    nodes: tuple[str | None, ...] = ()

    @classmethod
    def of(cls, body: Body, facts: Facts, shift: int = 0) -> Problem:
        """The problem that measured facts pose.

        Args:
            body: the body.
            facts: measured on it.
            shift: by how much the oracle's peak lies above that of the facts.
        """
        why = {node.name: reason for node, reason in reasons(body).items()}
        nodes = {n.name: n for n in body.graph.nodes}
        alone = {n.name for n in body.graph.nodes if sum_of(n) is not None}
        place: dict[str, int] = {}
        for name in sorted(facts.values, key=lambda n: facts.values[n].made):
            for one in (name, *(i for i in facts.values[name].items if i in alone)):
                place[one] = len(place)
        reads = _reads(body, place)
        left = Values.of(body.graph).left
        values = []
        for name in (n for n in place if n in facts.values):
            f = facts.values[name]
            whole = Value(
                name=name,
                bytes=f.bytes,
                saved=f.saved_bytes,
                made=f.made,
                last_use=f.last_use,
                freed=f.freed,
                unpacks=f.unpacks if f.saved_bytes else (),
                reads=reads[name],
                ms=f.ms,
                transient=f.transient,
                why_not=why.get(name, "is no value of the graph"),
                spans=tuple((i.saved_bytes, i.last_use, i.freed) for i in f.items.values()),
                spare=0 if nodes[name] in left or overwriter(nodes[name]) is None else f.spare,
            )
            values.append(whole)
            for item in (i for i in f.items if i in place):
                own = f.items[item]
                values.append(
                    Value(
                        name=item,
                        bytes=own.bytes,
                        saved=own.saved_bytes,
                        made=f.made,
                        last_use=own.last_use,
                        freed=own.freed,
                        unpacks=own.unpacks if own.saved_bytes else (),
                        reads=(place[name],),
                        ms=f.ms
                        / 2,  # of the sum, which is there, no operand is read nor result written
                        why_not=whole.why_not and f"its op {whole.why_not}",
                        part_of=place[name],
                    )
                )
        before = tuple(s.before + shift for s in facts.steps)
        peak = tuple(s.peak + shift for s in facts.steps)
        movable = _movable(body, facts, place) if facts.rates.host_gbs else ()
        ends = max(
            (i + 1 for i, s in enumerate(facts.steps) if s.node and not s.backward), default=0
        )
        times = Times(tuple(s.ms for s in facts.steps), ends)
        timeline = Timeline(before, peak, tuple(values), movable, times)
        sites = tuple(map(_site, (nodes[n] for n in place)))
        forward_ms = sum(v.ms for v in values if v.part_of is None)
        return cls(timeline, sites, forward_ms, tuple(s.node for s in facts.steps))

    def names(self, dropped: Choice) -> frozenset[str]:
        """The names of some values."""
        values = self.timeline.values
        return frozenset(values[i].name for i in dropped if values[i].part_of not in dropped)

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
            some = [*sorted(readers)[:3], *([f"{len(readers) - 3} more"] if readers[3:] else [])]
            reason += f", on the way to {', '.join(some)}"
        if v.spare:
            reason += "; its gradient is written over it"
        return Recompute(v.name, op, v.saved, v.ms, reason, site)

    def offloads(self, dropped: Choice, away: Choice) -> tuple[Offload, ...]:
        """What a plan keeps in host memory, and when, in words."""
        found = []
        if not away:
            return ()
        line = self.timeline
        outcome = simulate(line, dropped, away, levels=True)
        early = simulate(line, dropped, away, margin=WIDE).stays
        for stay in relaxed(outcome.stays, early, line.movable, line.times, outcome.levels):
            m = line.movable[stay.value]
            site, op = self.sites[m.owner]
            last = stay.gone >= line.times.forward - 1
            until = None if last else self.nodes[stay.gone]
            found.append(Offload(m.name, op, m.bytes, m.copy_ms, until, stay.ahead, site))
        return tuple(found)

    def trips(self, dropped: Choice, away: Choice) -> tuple[Trip, ...]:
        """When what a plan keeps in host memory goes and comes, for the pass."""
        return tuple(Trip(o.value, o.until, o.ahead) for o in self.offloads(dropped, away))

    def count(self, dropped: Choice) -> int:
        """How many values a plan recomputes."""
        return len(needed(self.timeline, dropped))


def _site(node: fx.Node) -> tuple[Site, str]:
    """Where a value came from, and its op; for an item those of the op that returned it."""
    op: Any = node.args[0] if node.target is operator.getitem else node
    return site_of(op), ops.op_name(op.target)


def _reads(body: Body, place: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """For each value those that its op reads, whole ones and items, views of them included."""
    values = Values.of(body.graph)
    found = {}
    for node in body.graph.nodes:
        if node.name in place:
            parts = [values.parts[source] for source in node.all_input_nodes]
            owners = [value_of(part) for part in parts]
            found[node.name] = tuple(
                sorted({place[n.name] for n in (*parts, *owners) if n.name in place})
            )
    return found


def _movable(body: Body, facts: Facts, place: Mapping[str, int]) -> tuple[Movable, ...]:
    """The tensors that may go to host memory: dense, computed, and not seen outside.

    Not a norm that is returned beside its sum: that is computed from the sum in no time.
    """
    values = Values.of(body.graph)
    readers: dict[fx.Node, dict[int, None]] = {}
    step = {s.node: i for i, s in enumerate(facts.steps) if not s.backward}
    known: dict[fx.Node, int] = {}  # the last step that reads it, by the graph
    for node in body.graph.nodes:
        for source in node.all_input_nodes:
            part = values.parts[source]
            known[part] = step.get(node.name, known.get(part, 0))
            if node.name in place:
                readers.setdefault(part, {})[place[node.name]] = None
    found = []
    for value in values:
        f = facts.values.get(value.name)
        if f is None:
            continue
        for part in values.parts_of(value):
            own = f if part is value else f.items.get(part.name)
            if own is None or part in values.left or not _may_go(part):
                continue
            if part is not value and part.name in place:
                continue
            if own.last_use > max(known.get(part, 0), f.made):
                continue  # read through an alias that the graph does not tell
            found.append(
                Movable(
                    name=part.name,
                    bytes=own.bytes,
                    owner=place[value.name],
                    last_use=max(own.last_use, f.made),
                    freed=own.freed,
                    unpacks=own.unpacks if own.saved_bytes else (),
                    readers=tuple(readers.get(part, ())),
                    copy_ms=LATENCY_MS + facts.rates.offload_ms(own.bytes),
                )
            )
    return tuple(found)


def _may_go(part: fx.Node) -> bool:
    val = part.meta.get("val")
    if not isinstance(val, torch.Tensor) or val.layout is not torch.strided:
        return False
    sizes = (*val.shape, *val.stride())
    return all(isinstance(s, int) for s in sizes) and may_leave(val)
