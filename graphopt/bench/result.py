"""What `bench` found, as data and as tables."""

from __future__ import annotations

import dataclasses
from typing import Any

from graphopt.errors import OptionError
from graphopt.report.table import Table, size
from graphopt.report.view import Part, html_fragment, plain

HOST_BOUND = 0.8
"""A GPU that is busy for less than this part of a step waits for the host."""

_TITLES = {"gemm": "GEMM", "convolution": "conv"}


@dataclasses.dataclass(frozen=True)
class KernelTime:
    """One kernel (on the CPU: operation) of a step.

    Attributes:
        name: as the profiler gives it.
        kind: one of `graphopt.bench.kinds.KINDS`.
        ms: milliseconds of all its calls in one step.
        calls: calls in one step.
    """

    name: str
    kind: str
    ms: float
    calls: float


@dataclasses.dataclass(frozen=True)
class DeviceTime:
    """Where the time of one step goes.

    Attributes:
        kinds: milliseconds by kind (`graphopt.bench.kinds.KINDS`).
        busy_ms: milliseconds in which something ran; kernels that overlap count once.
        idle_ms: the rest of the step: on a GPU it waited for the host, on the CPU no operation ran
            (Python, dispatch).
        kernels: the longest by name, at most 30.
    """

    kinds: dict[str, float]
    busy_ms: float
    idle_ms: float
    kernels: tuple[KernelTime, ...]


@dataclasses.dataclass(frozen=True)
class Row:
    """One variant. Figures are None where it failed or where they cannot be had.

    Attributes:
        name: "graphopt", "eager", "compile", or what `against` called it.
        error: why it could not be measured, None where it could.
        ms: median milliseconds of a step: by events on a GPU, by the clock elsewhere.
        low_ms: the lower quartile.
        high_ms: the upper quartile.
        wall_ms: median over the rounds of milliseconds on the clock.
        steps: how many steps were timed.
        peak_bytes: parameters, buffers, inputs, optimizer state and what a step adds at its most.
        start_s: seconds of the first step, with capture or compilation.
        value: the first step's loss, or the mean absolute value of its results: a coarse check
            that all compute the same (dropout draws other numbers in each).
        device: where the time goes; None without `profile`.
        notes: warnings that it gave.
    """

    name: str
    error: str | None = None
    ms: float | None = None
    low_ms: float | None = None
    high_ms: float | None = None
    wall_ms: float | None = None
    steps: int = 0
    peak_bytes: int | None = None
    start_s: float | None = None
    value: float | None = None
    device: DeviceTime | None = None
    notes: tuple[str, ...] = ()

    @property
    def busy(self) -> float | None:
        """Which part of a step, on the clock, the device is busy."""
        if self.device is None or not self.wall_ms:
            return None
        return min(1.0, self.device.busy_ms / self.wall_ms)


@dataclasses.dataclass(frozen=True, repr=False)
class BenchResult:
    """Variants of one model, measured in turns in one run. Its repr is the table.

    Attributes:
        model: class name of the model.
        step: what one step is, "forward" or "forward, backward" or with ", optimizer".
        mode: "train" or "eval".
        inputs: one text per tensor input.
        precision: the autocast dtype, "" for none.
        device: where it ran.
        versions: of python, torch and triton.
        baseline: the row that ratios are to; None where every variant but graphopt failed.
        rows: one per variant, graphopt last.
        rounds: how often each variant had its turn.
        notes: what to know before the figures are used.
    """

    model: str
    step: str
    mode: str
    inputs: tuple[str, ...]
    precision: str
    device: str
    versions: dict[str, str]
    baseline: str | None
    rows: tuple[Row, ...]
    rounds: int
    notes: tuple[str, ...]

    def __getitem__(self, name: str) -> Row:
        """The row of a variant.

        Raises:
            OptionError: for a name that is not there.
        """
        for row in self.rows:
            if row.name == name:
                return row
        raise OptionError(
            f"no variant is called {name!r}", try_=" or ".join(repr(r.name) for r in self.rows)
        )

    def ratio(self, name: str, of: str = "ms") -> float | None:
        """A variant's time (or "peak_bytes", "start_s", ...) over the baseline's.

        Args:
            name: the variant.
            of: a figure of `Row`.

        Returns:
            Less than 1 is better than the baseline; None where either is not known.
        """
        mine = getattr(self[name], of)
        base = getattr(self[self.baseline], of) if self.baseline else None
        return mine / base if mine is not None and base else None

    @property
    def headline(self) -> str:
        """One line: the model, its inputs, the step, the device."""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        precision = f" under {self.precision} autocast" if self.precision else ""
        return (
            f"{self.model}  {self.mode}  {', '.join(self.inputs)}\n"
            f"a step: {self.step}{precision}   {self.device}   {versions}"
        )

    @property
    def closing(self) -> str:
        """The verdict in words, then the notes."""
        return "\n".join([*self._verdict(), *(f"note: {note}" for note in self.notes)])

    def _verdict(self) -> list[str]:
        lines = [f"{r.name} failed: {r.error}" for r in self.rows if r.error]
        mine = self["graphopt"]
        for row in self.rows:
            if row is mine or mine.ms is None or not row.ms:
                continue
            if mine.low_ms <= row.high_ms and row.low_ms <= mine.high_ms:  # type: ignore[operator]
                lines.append(f"graphopt against {row.name}: no difference beyond the spread")
                continue
            factor = row.ms / mine.ms
            word = f"{factor:.2f} times as fast as"
            if factor < 1:
                word = f"{1 / factor:.2f} times as slow as"
            lines.append(f"graphopt is {word} {row.name}")
        waiting = [r for r in self.rows if r.busy is not None and r.busy < HOST_BOUND]
        lines += [
            f"{row.name} is bound by the host: the device is busy for {row.busy:.0%} of a step, "
            "so a faster kernel changes little"
            for row in waiting
            if self.device != "cpu"
        ]
        return lines

    def tables(self) -> list[Table]:
        """The table of figures and, where it was measured, that of the time by kind."""
        kinds = self._kinds()
        return [self._figures()] + ([kinds] if kinds is not None else [])

    def _figures(self) -> Table:
        to = f"to {self.baseline}" if self.baseline else "ratio"
        header = ("variant", "ms", "quartiles", to, "wall ms", "peak", to, "start s", "value")
        rows = [
            (
                row.name,
                _number(row.ms),
                "-" if row.ms is None else f"{_number(row.low_ms)}..{_number(row.high_ms)}",
                _ratio(self.ratio(row.name)),
                _number(row.wall_ms),
                "-" if row.peak_bytes is None else size(row.peak_bytes),
                _ratio(self.ratio(row.name, "peak_bytes")),
                _number(row.start_s),
                "-" if row.value is None else f"{row.value:.5g}",
            )
            for row in self.rows
        ]
        return Table(header, tuple(rows), right=header[1:])

    def _kinds(self) -> Table | None:
        times = {row.name: row.device for row in self.rows if row.device is not None}
        if not times:
            return None
        shown = [
            kind
            for kind in next(iter(times.values())).kinds
            if kind in ("gemm", "fused", "other")
            or any(t.kinds[kind] >= 5e-4 for t in times.values())
        ]
        on_cpu = self.device == "cpu"
        rest = ("outside ops",) if on_cpu else ("idle", "busy")
        header = ("ms a step", *(_TITLES.get(k, k) for k in shown), *rest)
        rows = []
        for name, t in times.items():
            busy = self[name].busy
            part = "-" if busy is None else f"{busy:.0%}"
            figures = [*(t.kinds[kind] for kind in shown), t.idle_ms]
            rows.append((name, *map(_number, figures), *(() if on_cpu else (part,))))
        return Table(header, tuple(rows), right=header[1:])

    def parts(self) -> list[Part]:
        """What is shown, top to bottom."""
        return [self.headline, *self.tables(), self.closing]

    def __repr__(self) -> str:
        """The tables as plain text."""
        return plain(self.parts())

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; "schema" changes when a key changes its meaning or goes."""
        data = {"schema": "graphopt.bench/1", **dataclasses.asdict(self)}
        for row in data["rows"]:
            row["ratio"] = self.ratio(row["name"])
            row["peak_ratio"] = self.ratio(row["name"], "peak_bytes")
        return data

    def _repr_html_(self) -> str:
        """The tables for a notebook."""
        return html_fragment(self.parts())


def _number(value: float | None) -> str:
    """Three or four significant digits, no exponent."""
    if value is None:
        return "-"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"
