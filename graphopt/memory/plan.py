"""The memory plan of a graph: what is recomputed, what that brings and costs, and the curve."""

from __future__ import annotations

import dataclasses
import logging
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from graphopt.cost.link import link_gbs
from graphopt.cost.ops import Cost
from graphopt.cost.roofline import Rates, rates_of
from graphopt.errors import GraphOptError, GraphoptWarning
from graphopt.graph.body import Body
from graphopt.graph.facts import concrete, nbytes, tensors_of
from graphopt.graph.record import RewriteRecord
from graphopt.kernels.linear_cross_entropy import CHUNK_BYTES, sum_bytes
from graphopt.memory.asked import MemoryOptions
from graphopt.memory.away import with_offloads
from graphopt.memory.budget import Budget, unreachable
from graphopt.memory.facts import measure
from graphopt.memory.fakestep import NoGradientError
from graphopt.memory.oracle import Prediction, predict
from graphopt.memory.problem import CurvePoint, Problem
from graphopt.memory.result import MemoryPlan, by_module, spread
from graphopt.memory.search import Choice, Point, pareto
from graphopt.memory.simulate import compressed, needed
from graphopt.passes.base import LOW, Log
from graphopt.passes.chunked_loss import ChunkLoss
from graphopt.passes.remat import Rematerialize, region_values, segment_values

__all__ = [
    "CurvePoint",
    "MemoryOptions",
    "MemoryPlan",
    "Planned",
    "by_module",
    "plan",
    "spread",
]

TRIES = 5
"""How often a tighter plan is taken where the oracle finds one above the budget."""

SPARE = 0.005
"""Share of a budget that a plan leaves free where it can: for what a GPU's allocator adds as it
cuts blocks (allocated less requested memory was 0.01% to 0.44% of four models' peaks on an H200),
and for what operations take inside that no prediction knows.
"""

CHUNKS = (4, 16)
"""Into how many parts the largest logits go: few, which cost little time, or many for the least
memory; as many more as keep a chunk within `CHUNK_BYTES`."""
LEAST_CHUNK = 2**20
"""Bytes of the smallest chunk of logits."""

logger = logging.getLogger("graphopt.memory")


@dataclasses.dataclass(frozen=True)
class Planned:
    """What planning gives.

    Attributes:
        body: the body with its markers; the given one where nothing is recomputed.
        plan: the plan.
        rewrites: the record of the markers, if any.
    """

    body: Body
    plan: MemoryPlan
    rewrites: tuple[RewriteRecord, ...] = ()


def plan(
    body: Body,
    options: MemoryOptions,
    *,
    offset: int = 0,
    limits: dict[str, int] | None = None,
) -> Planned:
    """Plan a body so that its predicted peak stays within a budget, in the least extra time.

    A body that was captured without gradients, or whose parameters are all frozen, is only checked,
    and not against a fraction of its own peak: nothing waits for a backward in it, so nothing
    brings that down.

    Args:
        body: a body after the passes; it stays as it is.
        options: the budget or the segments, and what else the prediction is to know.
        offset: the ordinal of the first rewrite that is recorded.
        limits: of the module's graphs so far; a fraction is one of the largest of their peaks, so
            that a smaller last batch, or a graph of another mode, has the same room. Added to.

    Raises:
        BudgetError: where no plan keeps the budget.
    """
    try:
        return _plan(body, options, offset, limits)
    except NoGradientError:
        forward = body.copy()
        forward.grad = False
        return dataclasses.replace(_plan(forward, options, offset, limits), body=body)


def _plan(
    body: Body, options: MemoryOptions, offset: int, limits: dict[str, int] | None
) -> Planned:
    asked = _Asked(body, options, offset)
    if options.segments is not None:
        return asked.in_segments(options.segments, asked.predicted(body))
    own = region_values(body) if body.grad else frozenset()
    given = asked.marked(own) if own else None
    plain = asked.predicted(given[0] if given is not None else body)
    budget = options.budget or Budget(fraction=1.0)
    limit = budget.bytes_of(plain.peak_bytes)
    if budget.fraction is not None:
        limit = max(limit, (limits or {}).get("bytes", 0)) if body.grad else plain.peak_bytes
    low = any(t.dtype in LOW for n in body.graph.nodes for t in tensors_of(n.meta.get("val")))
    resident = options.resident_bytes
    if plain.peak_bytes <= limit:
        if own:  # the model's own checkpoints do
            return asked.with_names(str(budget), limit, own, plain)
        return Planned(body, asked.described(str(budget), limit, plain, plain))
    if not body.grad:
        peak = plain.peak_bytes
        raise unreachable(budget, limit, peak, peak, plain.live, resident=resident, low=low)
    linked = bool(rates_of(body.device).host_gbs)
    if options.offload and not linked:
        _say_that_nothing_goes(body.device)
    routes = asked.routes(asked.predicted(body) if own else plain)
    plans = asked.plans(routes, offload=options.offload)
    found = asked.confirmed(plans, limit - int(SPARE * limit))
    lowest = found.prediction
    if lowest.peak_bytes > limit:
        peaks = lowest.peak_bytes, plain.peak_bytes
        reach = asked.lowest(plans) if linked and not options.offload else None
        raise unreachable(
            budget, limit, *peaks, lowest.live, resident=resident, low=low, offloaded=reach
        )
    if limits is not None:
        limits["bytes"] = max(limit, limits.get("bytes", 0))
    curve = tuple(p.point for p in plans)
    described = asked.described(str(budget), limit, plain, lowest, found.choice, curve)
    return Planned(found.body, described, found.rewrites)


def _say_that_nothing_goes(device: torch.device) -> None:
    why = "it is host memory already" if device.type == "cpu" else "its link is not known"
    warnings.warn(
        f"offload='auto' keeps nothing in host memory: the model is on {device}, and {why};"
        " the plan recomputes only",
        GraphoptWarning,
        stacklevel=2,
    )


@dataclasses.dataclass(frozen=True)
class _Route:
    """The body in one of the forms that values may be dropped in.

    Attributes:
        body: the form.
        rewrites: what made it of the given body.
        problem: what the search sees of it.
        ms: what a step takes longer than in the given form.
    """

    body: Body
    rewrites: tuple[RewriteRecord, ...]
    problem: Problem
    ms: float = 0.0


@dataclasses.dataclass(frozen=True)
class _Choice:
    """One plan on one route: its peak by the replay, all that it costs, what it drops and sends."""

    route: _Route
    peak: int
    ms: float
    dropped: Choice
    away: Choice = frozenset()

    @property
    def point(self) -> CurvePoint:
        """The plan as it stands in the curve."""
        count = self.route.problem.count(self.dropped)
        return CurvePoint(self.peak, self.ms, count, len(self.away))


@dataclasses.dataclass(frozen=True)
class _Found:
    """A plan that the oracle has judged."""

    choice: _Choice
    body: Body
    prediction: Prediction
    rewrites: tuple[RewriteRecord, ...]


@dataclasses.dataclass(frozen=True)
class _Asked:
    """The body and the circumstances of its step."""

    body: Body
    options: MemoryOptions
    offset: int

    def predicted(self, body: Body) -> Prediction:
        """The oracle's judgement on the body with some markers."""
        return predict(body, **self._circumstances())

    def plans(self, routes: Sequence[_Route], *, offload: bool) -> list[_Choice]:
        """The plans that no other beats, on all routes, from loose to tight."""
        found = []
        for route in routes:
            points = pareto(compressed(dataclasses.replace(route.problem.timeline, movable=())))
            found += [_Choice(route, p.peak, p.ms + route.ms, p.dropped) for p in points]
        kept = _unbeaten(found)
        if not offload:
            return kept
        found = list(kept)
        for route in routes:
            own = [Point(c.peak, c.ms - route.ms, c.dropped) for c in kept if c.route is route]
            line = compressed(route.problem.timeline)
            more = with_offloads(line, own, share=len(own) / len(kept))
            found += [_Choice(route, p.peak, p.ms + route.ms, p.dropped, p.away) for p in more]
        return _unbeaten(found)

    def lowest(self, plans: Sequence[_Choice]) -> int:
        """About the smallest peak that can be had with values in host memory, too.

        Args:
            plans: without, from loose to tight.
        """
        found = [
            _Choice(c.route, p.peak, p.ms, p.dropped, p.away)
            for c in plans[-2:]
            for p in with_offloads(
                compressed(c.route.problem.timeline), [Point(c.peak, c.ms, c.dropped)]
            )
        ]
        lowest = min([*plans[-1:], *found], key=lambda c: c.peak)
        return self.predicted(self.applied(lowest)[0]).peak_bytes

    def routes(self, plain: Prediction) -> list[_Route]:
        """The body as it is, and with its loss in chunks, few or many, where it can be."""
        rates = self._rates()
        facts = measure(self.body, rates=rates, **self._circumstances())
        shift = plain.peak_bytes - facts.peak_bytes
        found = [_Route(self.body, (), Problem.of(self.body, facts, shift))]
        for size in _chunk_sizes(self.body):
            work, log = self.body.copy(), Log()
            ChunkLoss(size).run(work, log)
            if not log.rewrites:
                break
            try:
                chunked = measure(work, rates=rates, **self._circumstances())
            except GraphOptError as error:  # the other routes are still there
                logger.warning("the loss in chunks is left out of the plans: %s", error)
                break
            more = chunked.forward_ms + chunked.backward_ms - facts.forward_ms - facts.backward_ms
            more = max(0.0, more) + _sums_ms(work, rates or rates_of(work.device))
            records = self._numbered(log.rewrites)
            found.append(_Route(work, records, Problem.of(work, chunked, shift), more))
        return found

    def _numbered(
        self, records: Iterable[RewriteRecord], start: int = 0
    ) -> tuple[RewriteRecord, ...]:
        """Records with ordinals that follow those of the passes before."""
        return tuple(
            dataclasses.replace(r, ordinal=self.offset + i) for i, r in enumerate(records, start)
        )

    def _rates(self) -> Rates | None:
        """The device's, with its link as measured, where something may go there; else None."""
        gbs = link_gbs(self.body.device) if self.options.offload else None
        if gbs is None:
            return None
        return dataclasses.replace(rates_of(self.body.device), host_gbs=gbs)

    def _circumstances(self) -> dict[str, Any]:
        loss_fn = self.options.loss_fn
        return {
            "loss_fn": loss_fn,
            "resident_bytes": self.options.resident_bytes,
            "result": self.body.result if loss_fn is not None else None,
        }

    def in_segments(self, segments: int, plain: Prediction) -> Planned:
        """The body with all recomputed but the borders of some segments."""
        name = f"{segments} segment{'s' * (segments != 1)}"
        names = segment_values(self.body, segments) if self.body.grad else frozenset()
        if not names:
            return Planned(self.body, self.described(name, None, plain, plain))
        return self.with_names(name, None, names, plain)

    def marked(self, names: frozenset[str]) -> tuple[Body, tuple[RewriteRecord, ...]]:
        """The body with markers for some values."""
        work, log = self.body.copy(), Log()
        Rematerialize(names).run(work, log)
        return work, self._numbered(log.rewrites)

    def with_names(
        self, name: str, limit: int | None, names: frozenset[str], plain: Prediction
    ) -> Planned:
        """The plan that recomputes some values, whatever that costs."""
        problem = Problem.of(self.body, measure(self.body, **self._circumstances()))
        place = {v.name: i for i, v in enumerate(problem.timeline.values)}
        dropped = frozenset(place[n] for n in names if n in place)
        used = needed(problem.timeline, dropped)
        ms = sum(problem.timeline.values[i].ms for i in used)
        choice = _Choice(_Route(self.body, (), problem), 0, ms, dropped)
        body, rewrites = self.marked(names)
        described = self.described(name, limit, plain, self.predicted(body), choice)
        return Planned(body, described, rewrites)

    def applied(self, choice: _Choice) -> tuple[Body, tuple[RewriteRecord, ...]]:
        """The body with markers for what a plan drops."""
        route = choice.route
        work, log = route.body.copy(), Log()
        names = route.problem.names(choice.dropped)
        trips = route.problem.trips(choice.dropped, choice.away)
        Rematerialize(names, frozenset(t.name for t in trips), trips).run(work, log)
        return work, (*route.rewrites, *self._numbered(log.rewrites, len(route.rewrites)))

    def confirmed(self, points: Sequence[_Choice], limit: int) -> _Found:
        """The fastest plan that the oracle finds within a limit, or the tightest there is.

        The replay is off by little, and much the same for neighbours: where the oracle finds more
        than the replay said, the next try aims lower by as much. On a GPU the oracle counts the
        slack of the allocator's blocks, too, which is some percent and another for each plan.
        """
        judged: dict[int, _Found] = {}
        last = len(points) - 1

        def judge(n: int) -> _Found:
            if n not in judged:
                body, rewrites = self.applied(points[n])
                judged[n] = _Found(points[n], body, self.predicted(body), rewrites)
            return judged[n]

        def fits(n: int) -> bool:
            return judge(n).prediction.peak_bytes <= limit

        n = _first(points, limit)
        for _ in range(TRIES):
            if fits(n) or n == last:
                break
            worst = max(f.prediction.peak_bytes - f.choice.peak for f in judged.values())
            n = max(n + 1, _first(points, limit - worst))
        if not fits(n):
            n = last
        if not fits(n):  # the tightest by the replay may have more slack than those before it
            near = [m for m in range(last) if m not in judged and points[m].peak <= limit]
            n = next((m for m in near[: -TRIES - 1 : -1] if fits(m)), last)
        if not fits(n):
            return min(judged.values(), key=lambda f: f.prediction.peak_bytes)
        low = max((m for m in judged if m < n and not fits(m)), default=n - 1)
        for _ in range(2 if n < last else TRIES):  # a faster plan after the last that failed
            middle = (low + n) // 2
            if middle in (low, n):
                break
            if fits(middle):
                n = middle
            else:
                low = middle
        return judge(n)

    def described(
        self,
        budget: str,
        limit: int | None,
        plain: Prediction,
        found: Prediction,
        choice: _Choice | None = None,
        curve: tuple[CurvePoint, ...] = (),
    ) -> MemoryPlan:
        """The plan, in words and numbers."""
        problem = choice.route.problem if choice is not None else None
        return MemoryPlan(
            budget=budget,
            budget_bytes=limit,
            predicted_peak_bytes=found.peak_bytes,
            unplanned_peak_bytes=plain.peak_bytes,
            where=str(found.where),
            extra_ms=choice.ms if choice is not None else 0.0,
            forward_ms=problem.forward_ms if problem is not None else 0.0,
            recompute=problem.recomputes(choice.dropped) if problem and choice else (),
            offload=problem.offloads(choice.dropped, choice.away) if problem and choice else (),
            curve=curve,
            chunked_loss=bool(choice is not None and choice.route.rewrites),
            loss=plain.loss,
            device=found.device,
            notes=found.notes,
        )


def _unbeaten(choices: Iterable[_Choice]) -> list[_Choice]:
    """The plans that none of the others beats in both peak and time, from loose to tight."""
    kept: list[_Choice] = []
    for choice in sorted(choices, key=lambda c: (c.ms, c.peak)):
        if not kept or choice.peak < kept[-1].peak:
            kept.append(choice)
    return kept


def _first(points: Sequence[_Choice], limit: int) -> int:
    """The first of the points, from loose to tight, within a limit; the last where none is."""
    return next((i for i, p in enumerate(points) if p.peak <= limit), len(points) - 1)


def _chunk_sizes(body: Body) -> list[int]:
    """Bytes of a chunk of logits, for a fast plan and for a tight one: parts of the largest."""
    losses = [n for n in body.graph.nodes if n.target is torch.ops.graphopt.cross_entropy.default]
    largest = max((nbytes(n.all_input_nodes[0].meta["val"]) for n in losses), default=0)
    sizes = [min(max(LEAST_CHUNK, largest // n), CHUNK_BYTES) for n in CHUNKS]
    return list(dict.fromkeys(sizes)) if losses else []


def _sums_ms(body: Body, rates: Rates) -> float:
    """Milliseconds in which chunks read and write the sum of the weight's gradient.

    Behind each product, not beside it: a tile's sum is read once the tile is computed.
    """
    moved = 0
    for node in body.graph.nodes:
        if node.target is torch.ops.graphopt.linear_cross_entropy.default:
            x, weight = (n.meta["val"] for n in node.args[:2])
            rows, classes, width = map(concrete, (x.shape[:-1].numel(), *weight.shape))
            size = node.kwargs.get("chunk_bytes") or CHUNK_BYTES
            moved += sum_bytes(rows, classes * x.element_size(), size, classes * width)
    return rates.ms(Cost(moved, 0), None)
