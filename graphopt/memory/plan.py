"""The memory plan of a graph: what is recomputed, what that brings and costs, and the curve."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from graphopt.errors import OptionError
from graphopt.graph.body import Body
from graphopt.graph.record import RewriteRecord
from graphopt.memory.budget import Budget, check_budget, check_resident, shown, unreachable
from graphopt.memory.facts import measure
from graphopt.memory.oracle import Prediction, predict
from graphopt.memory.problem import CurvePoint, Problem, Recompute
from graphopt.memory.search import Point, pareto
from graphopt.memory.simulate import compressed
from graphopt.passes.base import Log
from graphopt.passes.remat import Rematerialize, segment_values
from graphopt.report.fold import fold

TRIES = 5
"""How often a tighter plan is taken where the oracle finds one above the budget."""

LossFn = Callable[[Any], Any]


@dataclasses.dataclass(frozen=True, repr=False)
class MemoryPlan:
    """How one captured graph keeps its memory budget. Its repr is a table.

    Attributes:
        budget: as it was asked for ("0.5", "12GiB"); "4 segments" where those were.
        budget_bytes: the same in bytes; None for segments.
        predicted_peak_bytes: of a training step with the plan, by the oracle; parameters,
            gradients, inputs, activations, temporaries and `resident_bytes`.
        unplanned_peak_bytes: the same without a plan.
        where: the op at which the peak with the plan is.
        extra_ms: predicted time of all recomputes in a step.
        forward_ms: predicted time of one forward, to compare with.
        recompute: what is computed again, in the order of the graph.
        offload: names of values that lie in host memory between forward and backward.
        curve: the plans to choose from, from loose to tight.
        loss: what the predicted backward began from, in words.
        device: whose allocator and speed were reckoned with.
    """

    budget: str
    budget_bytes: int | None
    predicted_peak_bytes: int
    unplanned_peak_bytes: int
    where: str
    extra_ms: float
    forward_ms: float
    recompute: tuple[Recompute, ...]
    offload: tuple[str, ...]
    curve: tuple[CurvePoint, ...]
    loss: str
    device: str

    def __repr__(self) -> str:
        """A table: the peaks, what is recomputed by module, the curve."""
        return "\n".join([self.headline, *self._rows(), *self._curve_rows()])

    @property
    def headline(self) -> str:
        """Budget, peaks and cost in one line."""
        limit = "" if self.budget_bytes is None else f" ({shown(self.budget_bytes)})"
        cost = "nothing is recomputed"
        if self.recompute:
            share = 100 * self.extra_ms / self.forward_ms if self.forward_ms else 0.0
            cost = (
                f"{len(self.recompute)} values are recomputed,"
                f" +{self.extra_ms:.3g} ms ({share:.0f}% of a forward)"
            )
        return (
            f"memory: budget {self.budget}{limit}, predicted peak"
            f" {shown(self.unplanned_peak_bytes)} -> {shown(self.predicted_peak_bytes)}; {cost}"
        )

    def modules(self) -> list[tuple[str, int, int, float, str]]:
        """By module, equal blocks as one: (where, values, bytes, ms, ops)."""
        groups: dict[str, list[Recompute]] = {}
        for r in self.recompute:
            groups.setdefault(r.site.module, []).append(r)
        alike: dict[tuple[str, tuple[str, ...]], list[str]] = {}
        for path, chosen in groups.items():
            stars = ".".join("*" if p.isdigit() else p for p in path.split("."))
            alike.setdefault((stars, tuple(r.op for r in chosen)), []).append(path)
        rows = []
        for (_, kinds), paths in alike.items():
            chosen = [r for path in paths for r in groups[path]]
            name, count = next(iter(fold(paths).items()))
            where = (name or "(root)") + (f" x{count}" if count > 1 else "")
            size, ms = sum(r.bytes for r in chosen), sum(r.ms for r in chosen)
            rows.append((where, len(chosen), size, ms, ", ".join(dict.fromkeys(kinds))))
        return rows

    def _rows(self) -> list[str]:
        rows = self.modules()
        if not rows:
            return []
        width = max(len("module"), *(len(r[0]) for r in rows))
        lines = [f"  {'module':{width}}  values       kept        ms  ops"]
        for where, count, size, ms, kinds in rows:
            less = f"-{shown(size)}" if size else "-"
            lines.append(f"  {where:{width}}  {count:6d}  {less:>9}  {ms:8.3g}  {kinds}")
        return lines

    def _curve_rows(self) -> list[str]:
        if len(self.curve) < 2:
            return []
        picked = spread(self.curve, 8)
        points = ", ".join(f"{shown(p.peak_bytes)} +{p.extra_ms:.3g} ms" for p in picked)
        return [f"  curve: {points}"]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            **{
                f.name: getattr(self, f.name)
                for f in dataclasses.fields(self)
                if f.name not in ("recompute", "offload", "curve")
            },
            "recompute": [r.to_dict() for r in self.recompute],
            "offload": list(self.offload),
            "curve": [dataclasses.asdict(p) for p in self.curve],
        }


def spread(curve: Sequence[CurvePoint], most: int) -> list[CurvePoint]:
    """At most so many points of a curve, its ends among them, evenly spread over the peaks."""
    if len(curve) <= most:
        return list(curve)
    top, low = curve[0].peak_bytes, curve[-1].peak_bytes
    wanted = [top - (top - low) * i // (most - 1) for i in range(most)]
    picked = [min(curve, key=lambda p: abs(p.peak_bytes - w)) for w in wanted]
    return list(dict.fromkeys(picked))


@dataclasses.dataclass(frozen=True)
class MemoryOptions:
    """What a user may ask for; one of budget and segments is set.

    Attributes:
        budget: the most bytes that a step may take at once.
        segments: recompute all but the borders of so many parts, as `checkpoint_sequential` does.
        loss_fn: makes a scalar of the result of forward.
        resident_bytes: what else lies on the device.
    """

    budget: Budget | None = None
    segments: int | None = None
    loss_fn: LossFn | None = None
    resident_bytes: int = 0

    def planned(self, body: Body, offset: int = 0, limits: dict[str, int] | None = None) -> Planned:
        """Plan a body; see `plan`."""
        return plan(body, self, offset=offset, limits=limits)


def check_memory(
    memory_budget: Any, segments: Any = None, loss_fn: Any = None, resident_bytes: Any = 0
) -> MemoryOptions | None:
    """The memory options from what a user wrote; None where nothing is asked for.

    Raises:
        OptionError: for a wrong type or value, for both a budget and segments, and for what says
            nothing without a budget.

    Example:
        >>> check_memory("8GiB").budget.size == 8 * 2**30
        True
    """
    budget = check_budget(memory_budget)
    resident = check_resident(resident_bytes)
    if segments is not None and (
        isinstance(segments, bool) or not isinstance(segments, int) or segments < 1
    ):
        raise OptionError(f"segments is {segments!r}"[:100], try_="a whole number from 1, or None")
    if loss_fn is not None and not callable(loss_fn):
        raise OptionError(
            f"loss_fn is of type {type(loss_fn).__name__}",
            try_="a function that takes what forward returns and returns a tensor of one element",
        )
    if budget is not None and segments is not None:
        raise OptionError(
            "memory_budget and segments are given together",
            why="each of them decides what is recomputed",
            try_="memory_budget alone: it finds what segments would, where that is best",
        )
    if budget is None and segments is None:
        for name, given in (("loss_fn", loss_fn is not None), ("resident_bytes", resident > 0)):
            if given:
                raise OptionError(
                    f"{name} is given without memory_budget",
                    why="it is for the prediction of the peak, and nothing is predicted",
                    try_=f"memory_budget='8GiB', {name}=...",
                )
        return None
    return MemoryOptions(budget, segments, loss_fn, resident)


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

    A body that was captured without gradients is only checked, and not against a fraction of its
    own peak: nothing waits for a backward in it, so nothing brings that down.

    Args:
        body: a body after the passes; it stays as it is.
        options: the budget or the segments, and what else the prediction is to know.
        offset: the ordinal of the first rewrite that is recorded.
        limits: of the module's graphs so far; a fraction is one of the largest of their peaks, so
            that a smaller last batch, or a graph of another mode, has the same room. Added to.

    Raises:
        BudgetError: where no plan keeps the budget.
    """
    asked = _Asked(body, options, offset)
    plain = asked.predicted(body)
    if options.segments is not None:
        return asked.in_segments(options.segments, plain)
    budget = options.budget or Budget(fraction=1.0)
    limit = budget.bytes_of(plain.peak_bytes)
    if budget.fraction is not None:
        limit = max(limit, (limits or {}).get("bytes", 0)) if body.grad else plain.peak_bytes
    if plain.peak_bytes <= limit:
        return Planned(body, asked.described(str(budget), limit, plain, plain))
    if not body.grad:
        raise unreachable(budget, limit, plain.peak_bytes, plain.peak_bytes, plain.live)
    problem = asked.problem(plain)
    points = pareto(compressed(problem.timeline))
    found = asked.confirmed(problem, points, limit)
    lowest = found.prediction
    if lowest.peak_bytes > limit:
        raise unreachable(budget, limit, lowest.peak_bytes, plain.peak_bytes, lowest.live)
    chosen = problem.recomputes(found.point.dropped)
    curve = problem.curve(points)
    if limits is not None:
        limits["bytes"] = max(limit, limits.get("bytes", 0))
    described = asked.described(
        str(budget), limit, plain, lowest, chosen, curve, problem.forward_ms
    )
    return Planned(found.body, described, found.rewrites)


@dataclasses.dataclass(frozen=True)
class _Found:
    """A plan that the oracle has judged."""

    point: Point
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

    def problem(self, plain: Prediction) -> Problem:
        """The body's own problem."""
        facts = measure(self.body, **self._circumstances())
        return Problem.of(self.body, facts, plain.peak_bytes)

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
        problem = self.problem(plain)
        place = {v.name: i for i, v in enumerate(problem.timeline.values)}
        body, rewrites = self.applied(names)
        chosen = problem.recomputes(frozenset(place[n] for n in names if n in place))
        described = self.described(
            name, None, plain, self.predicted(body), chosen, (), problem.forward_ms
        )
        return Planned(body, described, rewrites)

    def applied(self, names: frozenset[str]) -> tuple[Body, tuple[RewriteRecord, ...]]:
        """The body with markers for some values."""
        work, log = self.body.copy(), Log()
        Rematerialize(names).run(work, log)
        records = [
            dataclasses.replace(r, ordinal=self.offset + i) for i, r in enumerate(log.rewrites)
        ]
        return work, tuple(records)

    def confirmed(self, problem: Problem, points: Sequence[Point], limit: int) -> _Found:
        """The fastest plan that the oracle finds within a limit, or the tightest there is.

        The replay is off by little, and much the same for neighbours: where the oracle finds more
        than the replay said, the next try aims lower by as much.
        """
        judged: dict[int, _Found] = {}

        def judge(n: int) -> _Found:
            if n not in judged:
                body, rewrites = self.applied(problem.names(points[n].dropped))
                judged[n] = _Found(points[n], body, self.predicted(body), rewrites)
            return judged[n]

        n = _first(points, limit)
        for _ in range(TRIES):
            found = judge(n)
            over = found.prediction.peak_bytes - limit
            if over <= 0 or n == len(points) - 1:
                break
            n = max(n + 1, _first(points, points[n].peak - over))
        if judge(n).prediction.peak_bytes > limit:
            n = len(points) - 1
            return min((judge(n), *judged.values()), key=lambda f: f.prediction.peak_bytes)
        low = max((m for m, f in judged.items() if f.prediction.peak_bytes > limit), default=n - 1)
        for _ in range(2):  # a faster plan between the last that failed and this one
            middle = (low + n) // 2
            if middle in (low, n):
                break
            if judge(middle).prediction.peak_bytes <= limit:
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
        recompute: tuple[Recompute, ...] = (),
        curve: tuple[CurvePoint, ...] = (),
        forward_ms: float = 0.0,
    ) -> MemoryPlan:
        """The plan, in words and numbers."""
        return MemoryPlan(
            budget=budget,
            budget_bytes=limit,
            predicted_peak_bytes=found.peak_bytes,
            unplanned_peak_bytes=plain.peak_bytes,
            where=str(found.where),
            extra_ms=sum(r.ms for r in recompute),
            forward_ms=forward_ms,
            recompute=recompute,
            offload=(),
            curve=curve,
            loss=plain.loss,
            device=found.device,
        )


def _first(points: Sequence[Point], limit: int) -> int:
    """The first of the points, from loose to tight, within a limit; the last where none is."""
    return next((i for i, p in enumerate(points) if p.peak <= limit), len(points) - 1)
