"""What `advise` found, as data and as text."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from graphopt.memory.problem import CurvePoint
from graphopt.report.table import Table, percent, size
from graphopt.report.view import Part, html_fragment, plain


@dataclasses.dataclass(frozen=True)
class Setting:
    """The model with some options, as predicted and, where it ran, as measured.

    Attributes:
        name: what is new in it: "as it is", "precision", "kernels", "memory".
        options: the options of `optimize` that it stands for, all of them.
        ms: predicted time of a step by the roofline: kernels alone, without the host.
        peak_bytes: predicted peak memory of a step.
        measured_ms: median of a step; None where it was not run.
        measured_peak_bytes: likewise.
        why: what it changes, in words.
    """

    name: str
    options: dict[str, Any]
    ms: float
    peak_bytes: int
    measured_ms: float | None = None
    measured_peak_bytes: int | None = None
    why: str = ""


@dataclasses.dataclass(frozen=True, repr=False)
class Advice:
    """What helps a model most, the greatest gain first. Its repr is the table.

    Attributes:
        model: class name of the model.
        device: what it was reckoned for.
        settings: the model as it is, then one setting more in each row; each row has the options
            of all rows before it.
        left_out: what was looked at and would not help, and why.
        time_by_op: predicted milliseconds of the model as it is, by op, the longest first.
        memory_by_kind: bytes at the predicted peak of the model as it is, by what they are for.
        curve: what a memory budget costs on top of the last row: (peak bytes, extra ms).
        notes: what the figures leave out.
        advised: which of the settings; the last, unless a measurement speaks against it.
    """

    model: str
    device: str
    settings: tuple[Setting, ...]
    left_out: tuple[tuple[str, str], ...]
    time_by_op: tuple[tuple[str, float], ...]
    memory_by_kind: tuple[tuple[str, int], ...]
    curve: tuple[CurvePoint, ...]
    notes: tuple[str, ...]
    advised: int = -1

    @property
    def options(self) -> dict[str, Any]:
        """The options of `optimize` that are advised together."""
        return dict(self.settings[self.advised].options)

    @property
    def call(self) -> str:
        """The call that is advised, as code."""
        given = "".join(f", {name}={value!r}" for name, value in self.options.items())
        return f"graphopt.optimize(model, inputs{given})"

    def parts(self) -> list[Part]:
        """What is shown, in order."""
        first = self.settings[0]
        total = sum(ms for _, ms in self.time_by_op) or 1.0
        ops = ", ".join(f"{op} {ms / total:.0%}" for op, ms in self.time_by_op[:_OPS])
        rest = self.time_by_op[_OPS:]
        if rest:
            ops += f", {len(rest)} others {sum(ms for _, ms in rest) / total:.0%}"
        kinds = ", ".join(f"{kind} {size(b)}" for kind, b in self.memory_by_kind if b)
        parts: list[Part] = [
            f"{self.model} on {self.device}: predicted {first.ms:.3g} ms of kernels and "
            f"{size(first.peak_bytes)} at the peak, as it is",
            f"time: {ops}\nmemory at the peak: {kinds}",
            self._table(),
        ]
        if self.left_out:
            parts.append("\n".join(f"not {name}: {why}" for name, why in self.left_out))
        parts.append("\n".join((*self.notes, f"next: opt = {self.call}")))
        return parts

    def _table(self) -> Table:
        first, measured = self.settings[0], self.settings[0].measured_ms is not None
        header: tuple[str, ...] = ("setting", "ms", "peak")
        if measured:
            header += ("measured ms", "measured peak")
        rows = []
        for s in self.settings:
            cells: tuple[str, ...] = (
                s.name,
                _against(s.ms, first.ms, _ms),
                _against(s.peak_bytes, first.peak_bytes, size),
            )
            if measured:
                cells += (
                    _against(s.measured_ms, first.measured_ms, _ms),
                    _against(s.measured_peak_bytes, first.measured_peak_bytes, size),
                )
            rows.append((*cells, s.why))
        return Table((*header, "what it does"), tuple(rows), right=header[1:])

    def __repr__(self) -> str:
        """The table as plain text."""
        return plain(self.parts())

    def _repr_html_(self) -> str:
        return html_fragment(self.parts())

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {**dataclasses.asdict(self), "options": self.options, "call": self.call}


_OPS = 6
"""How many ops are told by name, the longest."""


def _ms(value: float) -> str:
    return f"{value:.3g}"


def _against(value: float | None, first: float | None, text: Callable[[Any], str]) -> str:
    """A figure and its change from that of the first row."""
    if value is None:
        return "-"
    if not first or value == first:
        return text(value)
    return f"{text(value)} ({percent(1 - value / first)})"
