"""What planning gives: the memory plan, as data and as a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from graphopt.memory.budget import shown
from graphopt.memory.problem import CurvePoint, Offload, Recompute
from graphopt.report.fold import fold


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
        extra_ms: predicted time of all recomputes in a step, and of waiting for copies.
        forward_ms: predicted time of one forward, to compare with.
        recompute: what is computed again, in the order of the graph.
        offload: what lies in host memory between forward and backward.
        curve: the plans to choose from, from loose to tight.
        chunked_loss: whether the last linear layer and its loss run in chunks of rows.
        loss: what the predicted backward began from, in words.
        device: whose allocator and speed were reckoned with.
        notes: what the prediction could not see, such as an operator's memory inside.
    """

    budget: str
    budget_bytes: int | None
    predicted_peak_bytes: int
    unplanned_peak_bytes: int
    where: str
    extra_ms: float
    forward_ms: float
    recompute: tuple[Recompute, ...]
    offload: tuple[Offload, ...]
    curve: tuple[CurvePoint, ...]
    chunked_loss: bool
    loss: str
    device: str
    notes: tuple[str, ...] = ()

    @property
    def asked(self) -> str:
        """The budget as it is written in a call."""
        return f"'{self.budget}'" if self.budget.endswith("B") else self.budget

    def __repr__(self) -> str:
        """A table: the peaks, what is recomputed by module, the curve."""
        notes = [f"  note: {note}" for note in self.notes]
        rows = [*self._rows(), *self._offload_rows(), *self._curve_rows(), *notes]
        return "\n".join([self.headline, *rows])

    @property
    def headline(self) -> str:
        """Budget, peaks and cost in one line."""
        limit = "" if self.budget_bytes is None else f" ({shown(self.budget_bytes)})"
        cost = "nothing is recomputed"
        if self.recompute or self.chunked_loss or self.offload:
            share = 100 * self.extra_ms / self.forward_ms if self.forward_ms else 0.0
            away = sum(o.bytes for o in self.offload)
            kept = f" and {len(self.offload)} ({shown(away)}) kept in host memory" if away else ""
            cost = (
                f"{len(self.recompute)} values are recomputed{kept},"
                f" +{self.extra_ms:.3g} ms ({share:.0f}% of a forward)"
            )
        if self.chunked_loss:
            cost += "; the loss runs in chunks"
        return (
            f"memory: budget {self.budget}{limit}, predicted peak"
            f" {shown(self.unplanned_peak_bytes)} -> {shown(self.predicted_peak_bytes)}; {cost}"
        )

    def modules(self) -> list[tuple[str, int, int, float, str]]:
        """By module, equal blocks as one: (where, values, bytes, ms, ops)."""
        return by_module(self.recompute)

    def _rows(self) -> list[str]:
        return _table("module", self.modules())

    def _offload_rows(self) -> list[str]:
        return _table("in host memory", by_module(self.offload))

    def _curve_rows(self) -> list[str]:
        if len(self.curve) < 2:
            return []
        picked = spread(self.curve, 8)
        points = ", ".join(f"{shown(p.peak_bytes)} +{p.extra_ms:.3g} ms" for p in picked)
        some = f" ({len(picked)} of {len(self.curve)} plans)" if picked != [*self.curve] else ""
        return [f"  curve: {points}{some}"]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "notes": list(self.notes),
            **{
                f.name: getattr(self, f.name)
                for f in dataclasses.fields(self)
                if f.name not in ("recompute", "offload", "curve", "notes")
            },
            "recompute": [r.to_dict() for r in self.recompute],
            "offload": [o.to_dict() for o in self.offload],
            "curve": [dataclasses.asdict(p) for p in self.curve],
        }


_Row = tuple[str, int, int, float, str]


def by_module(chosen: Sequence[Recompute] | Sequence[Offload]) -> list[_Row]:
    """By module, equal blocks as one: (where, values, bytes, ms, ops)."""
    groups: dict[str, list[Any]] = {}
    for r in chosen:
        groups.setdefault(r.site.module, []).append(r)
    alike: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for path, found in groups.items():
        stars = ".".join("*" if p.isdigit() else p for p in path.split("."))
        alike.setdefault((stars, tuple(r.op for r in found)), []).append(path)
    rows = []
    for (_, kinds), paths in alike.items():
        found = [r for path in paths for r in groups[path]]
        name, count = next(iter(fold(paths).items()))
        where = (name or "(root)") + (f" x{count}" if count > 1 else "")
        size, ms = sum(r.bytes for r in found), sum(r.ms for r in found)
        rows.append((where, len(found), size, ms, ", ".join(dict.fromkeys(kinds))))
    return rows


def _table(title: str, rows: Sequence[_Row]) -> list[str]:
    if not rows:
        return []
    width = max(len(title), *(len(r[0]) for r in rows))
    lines = [f"  {title:{width}}  values       kept        ms  ops"]
    for where, count, size, ms, kinds in rows:
        less = f"-{shown(size)}" if size else "-"
        lines.append(f"  {where:{width}}  {count:6d}  {less:>9}  {ms:8.3g}  {kinds}")
    return lines


def spread(curve: Sequence[CurvePoint], most: int) -> list[CurvePoint]:
    """At most so many points of a curve, its ends among them, evenly spread over the peaks."""
    if len(curve) <= most:
        return list(curve)
    top, low = curve[0].peak_bytes, curve[-1].peak_bytes
    wanted = [top - (top - low) * i // (most - 1) for i in range(most)]
    picked = [min(curve, key=lambda p: abs(p.peak_bytes - w)) for w in wanted]
    return list(dict.fromkeys(picked))
