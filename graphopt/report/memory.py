"""The memory plan as a report shows it."""

from __future__ import annotations

from collections.abc import Sequence

from graphopt.memory.problem import CurvePoint
from graphopt.memory.result import MemoryPlan, by_module, spread
from graphopt.report.table import Table, size
from graphopt.report.view import Part

COUNTED = (
    "Peaks are predicted for a whole training step, everything counted: parameters, gradients, "
    "inputs, activations, temporaries. Times are estimates from bytes and FLOPs."
)


def memory_line(plan: MemoryPlan) -> str:
    """Budget, peaks and cost in a sentence."""
    limit = "" if plan.budget_bytes is None else f", budget {size(plan.budget_bytes)}"
    cost = "nothing is recomputed"
    if plan.recompute:
        cost = f"{len(plan.recompute)} values are recomputed in backward ({_cost(plan)})"
    if plan.offload:
        away = size(sum(o.bytes for o in plan.offload))
        more = "" if plan.recompute else f" ({_cost(plan)})"
        kept = f"{len(plan.offload)} values ({away}) wait in host memory{more}"
        cost = f"{cost}; {kept}" if plan.recompute else kept
    if plan.chunked_loss:
        cost += "; the last linear layer and its loss run in chunks of rows"
    return (
        f"predicted peak {size(plan.unplanned_peak_bytes)} -> {size(plan.predicted_peak_bytes)}"
        f"{limit}; {cost}"
    )


def memory_parts(plan: MemoryPlan) -> list[Part]:
    """What a plan does, and what other plans there are."""
    parts: list[Part] = [f"{memory_line(plan)}. The peak is at {plan.where or 'no op'}."]
    if plan.recompute:
        parts += ["Recomputed, by module:", _module_table(plan)]
    if plan.offload:
        parts += ["In host memory between forward and backward, by module:", _away_table(plan)]
    if len(plan.curve) > 1:
        picked = spread(plan.curve, 10)
        some = (
            f" ({len(picked)} of {len(plan.curve)} plans)" if len(picked) < len(plan.curve) else ""
        )
        parts += [f"What other budgets would cost{some}:", _curve_table(plan, picked)]
    return [*parts, COUNTED]


def _module_table(plan: MemoryPlan) -> Table:
    rows = tuple(
        (where, str(count), size(kept) if kept else "-", f"{ms:.3g}", kinds)
        for where, count, kept, ms, kinds in plan.modules()
    )
    header = ("module", "values", "no longer kept", "ms", "ops that run again")
    return Table(header, rows, right=header[1:4])


def _away_table(plan: MemoryPlan) -> Table:
    rows = tuple(
        (where, str(count), size(kept), f"{ms:.3g}", kinds)
        for where, count, kept, ms, kinds in by_module(plan.offload)
    )
    header = ("module", "values", "bytes", "ms a way", "ops that made them")
    return Table(header, rows, right=header[1:4])


def _curve_table(plan: MemoryPlan, points: Sequence[CurvePoint]) -> Table:
    columns = 4 if any(p.offloaded for p in plan.curve) else 3
    rows = tuple(
        (size(p.peak_bytes), f"+{p.extra_ms:.3g}", str(p.recomputed), str(p.offloaded))[:columns]
        for p in points
    )
    header = ("predicted peak", "ms", "values", "in host memory")[:columns]
    return Table(header, rows, right=header)


def _cost(plan: MemoryPlan) -> str:
    share = 100 * plan.extra_ms / plan.forward_ms if plan.forward_ms else 0.0
    return f"+{plan.extra_ms:.3g} ms, {share:.0f}% of a forward"
