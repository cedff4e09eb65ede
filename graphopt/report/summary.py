"""The report on an optimized module: what became faster, why not the rest, is it still right."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import graphopt
from graphopt.capture.store import Recapture
from graphopt.cost.ops import nodes_cost
from graphopt.diff import DiffResult, diff_of
from graphopt.errors import OptionError
from graphopt.graph import ops
from graphopt.graph.record import RewriteRecord
from graphopt.graph.text import python_code
from graphopt.memory.plan import MemoryPlan
from graphopt.options import names_checked
from graphopt.precision import PrecisionPlan, plan_of
from graphopt.report.fold import fold
from graphopt.report.kernels import KernelSummary, kernels_of
from graphopt.report.progress import progress
from graphopt.report.remaining import Remaining, Shares, matrix_flops, remaining
from graphopt.report.rules import (
    RefusalSummary,
    RuleSummary,
    by_reason,
    by_rule,
    meanings,
    op_count,
)
from graphopt.report.save import check_path, json_text, save
from graphopt.report.subject import Subject, subject_of
from graphopt.report.view import Part, html_fragment, html_page, plain
from graphopt.verdict import VerifyResult

SCHEMA = "graphopt.report/1"
"""Name and version of the JSON, described in docs/report.schema.json.

The number rises when a key goes or changes its meaning; a new key does not raise it.
"""

SUFFIXES = (".txt", ".json", ".html")


@dataclasses.dataclass(frozen=True)
class Totals:
    """The graph before and after; of one forward.

    Attributes:
        ops_before: ops as captured.
        ops_after: ops as optimized.
        bytes_before: bytes read and written as captured, each op run as a kernel.
        bytes_after: the same, optimized.
        flops_before: of matrix products, convolutions and attention, as captured.
        flops_after: the same, optimized.
    """

    ops_before: int
    ops_after: int
    bytes_before: int
    bytes_after: int
    flops_before: int
    flops_after: int

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        saved = {
            "bytes_saved": self.bytes_before - self.bytes_after,
            "flops_saved": self.flops_before - self.flops_after,
        }
        return {**dataclasses.asdict(self), **saved}


@dataclasses.dataclass(frozen=True)
class PrecisionSummary:
    """The precision of a graph and what its casts move in a forward; `opt.precision_plan` has all.

    Attributes:
        ambient: the low precision, None in a graph without any.
        weight_casts: casts of parameters and buffers.
        weight_cast_bytes: bytes that they read and write.
        activation_casts: casts of values, those left out that a kernel does as it loads or stores.
        activation_cast_bytes: bytes that they read and write.
        pinned: ops that `precision_overrides` decided.
        unmatched: (pattern, why) of `precision_overrides` that decide nothing in this graph.
    """

    ambient: str | None
    weight_casts: int
    weight_cast_bytes: int
    activation_casts: int
    activation_cast_bytes: int
    pinned: int
    unmatched: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, plan: PrecisionPlan) -> PrecisionSummary:
        """Sum up a plan."""
        weights = [c.bytes for c in plan.casts if c.weight]
        values = [c.bytes for c in plan.casts if not c.weight]
        return cls(
            plan.ambient,
            len(weights),
            sum(weights),
            len(values),
            sum(values),
            len(plan.pinned),
            plan.unmatched,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        unmatched = [{"pattern": pattern, "why": why} for pattern, why in self.unmatched]
        return {**dataclasses.asdict(self), "unmatched": unmatched}


@dataclasses.dataclass(frozen=True)
class ModuleSummary:
    """What was rewritten in a module, or in the equal modules of repeated blocks.

    Attributes:
        where: module path, the numbers that differ replaced by a star; "" for the root.
        count: how many modules that is.
        rewrites: rewrites in all of them.
        rules: the rules that fired there.
        ops_before: ops that were replaced.
        ops_after: ops that took their place.
        bytes_saved: bytes no longer moved in a forward.
    """

    where: str
    count: int
    rewrites: int
    rules: tuple[str, ...]
    ops_before: int
    ops_after: int
    bytes_saved: int

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {**dataclasses.asdict(self), "rules": list(self.rules)}


@dataclasses.dataclass(frozen=True, repr=False)
class Report:
    """All that there is to know about one optimized graph. Its repr is the text.

    Attributes:
        model: class name of the model.
        mode: "train" or "eval".
        inputs: one text per tensor input, "input_ids: i64[2, 64]".
        totals: the graph before and after.
        precision: the low precision and its casts.
        memory: how the memory budget is kept, None without one.
        rules: what each rule did, the greatest saving first.
        modules: what was rewritten where, in the order of the forward.
        rewrites: the records.
        kernels_used: the fused kernels, and what each must move and compute.
        shares: who moves the bytes that are left.
        remaining: the ops that no rule took, and why.
        refused: the near misses by reason and line, the nearest first.
        recaptures: captures after the first, with their reasons.
        graphs: how many graphs the module keeps, this one included.
        verification: what `verify` found, None where it was not run.
        capture_seconds: time of the capture.
        export_seconds: the part of it inside `torch.export`.
        passes: (pass, ops after it, rewrites, seconds) in order.
        kernels: how fused ops run on this machine, one sentence.
        versions: package -> version, None where it is not installed.
        code: the optimized graph as Python.
        changes: before and after by module, which the page shows, too.
    """

    model: str
    mode: str
    inputs: tuple[str, ...]
    totals: Totals
    precision: PrecisionSummary
    memory: MemoryPlan | None
    rules: tuple[RuleSummary, ...]
    modules: tuple[ModuleSummary, ...]
    rewrites: tuple[RewriteRecord, ...]
    kernels_used: tuple[KernelSummary, ...]
    shares: Shares
    remaining: tuple[Remaining, ...]
    refused: tuple[RefusalSummary, ...]
    recaptures: tuple[Recapture, ...]
    graphs: int
    verification: VerifyResult | None
    capture_seconds: float
    export_seconds: float
    passes: tuple[tuple[str, int, int, float], ...]
    kernels: str
    versions: dict[str, str | None]
    code: str
    changes: DiffResult

    def parts(self, *, stable: bool = False) -> list[Part]:
        """What is shown, in order.

        Args:
            stable: leave out what differs from run to run and from machine to machine: seconds,
                versions, rounding errors.
        """
        from graphopt.report.story import story

        return story(self, stable=stable)

    def text(self, *, stable: bool = False) -> str:
        """The report as plain text.

        Args:
            stable: as for `parts`.
        """
        return plain(self.parts(stable=stable)) + "\n"

    def html(self) -> str:
        """The report as one HTML file that needs no network, with the changed code."""
        from graphopt.report.story import code_parts

        return html_page(f"graphopt report: {self.model}", [*self.parts(), *code_parts(self)])

    def __repr__(self) -> str:
        """The report as plain text."""
        return self.text().rstrip("\n")

    def _repr_html_(self) -> str:
        return html_fragment(self.parts())

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; docs/report.schema.json describes it."""
        return {
            "schema": SCHEMA,
            "graphopt": graphopt.__version__,
            "model": self.model,
            "mode": self.mode,
            "inputs": list(self.inputs),
            "totals": self.totals.to_dict(),
            "precision": self.precision.to_dict(),
            "memory": None if self.memory is None else self.memory.to_dict(),
            "rules": [r.to_dict() for r in self.rules],
            "modules": [m.to_dict() for m in self.modules],
            "rewrites": [_rewrite(r) for r in self.rewrites],
            "kernels": [k.to_dict() for k in self.kernels_used],
            "bytes_after_by_kind": self.shares.to_dict(),
            "remaining": [r.to_dict() for r in self.remaining],
            "refusals": [r.to_dict() for r in self.refused],
            "recaptures": [r.to_dict() for r in self.recaptures],
            "graphs": self.graphs,
            "verification": None if self.verification is None else self.verification.to_dict(),
            "seconds": {
                "capture": self.capture_seconds,
                "export": self.export_seconds,
                "passes": sum(p[3] for p in self.passes),
            },
            "passes": [
                dict(zip(("name", "ops", "rewrites", "seconds"), p, strict=True))
                for p in self.passes
            ],
            "environment": {"kernels": self.kernels, "versions": self.versions},
            "code": self.code,
        }

    def json(self) -> str:
        """`to_dict` as JSON text; numbers that JSON cannot hold (inf, nan) become null."""
        return json_text(self.to_dict())


@names_checked
def report(opt: Any, path: Any = None, *, verify: VerifyResult | None = None) -> Report:
    """Report on the graph in force of an optimized module.

    Args:
        opt: what `optimize` or `attach` returned, with a graph captured.
        path: a file to write, too: ".txt", ".json" (docs/report.schema.json) or ".html" (one file,
            no network). It is written whole or not at all.
        verify: what `graphopt.verify` returned, to be told in the report.

    Returns:
        The report: its repr is the text, `.to_dict()` is plain data, `.html()` a page.

    Raises:
        OptionError: for something that is no optimized module, and for a path that cannot be
            written, before any work.
        GraphOptError: when there is no graph yet.

    Example:
        >>> graphopt.report(opt, "report.html", verify=graphopt.verify(opt, x))  # doctest: +SKIP
    """
    if verify is not None and not isinstance(verify, VerifyResult):
        raise OptionError(f"verify is {verify!r}"[:80], try_="verify=graphopt.verify(opt, inputs)")
    target = None if path is None else check_path(path, SUFFIXES)
    subject = subject_of(opt, "report")
    with progress("report"):
        made = _report_on(subject, verify)
        if target is not None:
            write(made, target)
    return made


def write(made: Report, path: Path) -> None:
    """Write a report in the format that the path's suffix names.

    Raises:
        OptionError: when it cannot be written.
    """
    formats = {".txt": made.text, ".json": made.json, ".html": made.html}
    save(path, formats[path.suffix.lower()]())


def _report_on(subject: Subject, verification: VerifyResult | None) -> Report:
    from graphopt.env import describe

    result, before, after = subject.result, subject.before.graph, subject.after.graph
    shares, left = remaining(result, subject.options)
    environment = describe()
    return Report(
        model=subject.model,
        mode=subject.mode,
        inputs=subject.inputs,
        totals=Totals(
            ops_before=ops.count(before),
            ops_after=ops.count(after),
            bytes_before=nodes_cost(before.nodes).bytes,
            bytes_after=nodes_cost(after.nodes).bytes,
            flops_before=matrix_flops(before),
            flops_after=matrix_flops(after),
        ),
        precision=PrecisionSummary.of(plan_of(result.captured, result.body)),
        memory=subject.memory,
        rules=by_rule(result.rewrites, result.refusals, meanings(subject.options)),
        modules=by_module(result.rewrites),
        rewrites=tuple(result.rewrites),
        kernels_used=kernels_of(result.body),
        shares=shares,
        remaining=left,
        refused=by_reason(result.refusals),
        recaptures=subject.recaptures,
        graphs=subject.graphs,
        verification=verification,
        capture_seconds=subject.capture_seconds,
        export_seconds=subject.export_seconds,
        passes=tuple((s.name, s.nodes, s.rewrites, s.seconds) for s in result.stages),
        kernels=f"{environment.kernels}: {environment.why}",
        versions=environment.versions,
        code=python_code(subject.after),
        changes=diff_of(subject),
    )


def by_module(rewrites: Sequence[RewriteRecord]) -> tuple[ModuleSummary, ...]:
    """Sum local rewrites by module; equal modules of repeated blocks are one row.

    Example:
        >>> by_module([])
        ()
    """
    modules: dict[str, list[RewriteRecord]] = {}
    for r in rewrites:
        if r.kind == "local":
            modules.setdefault(r.site.module, []).append(r)
    groups: dict[tuple[Any, ...], list[str]] = {}
    for path, records in modules.items():
        stars = ".".join("*" if p.isdigit() else p for p in path.split("."))
        what = tuple((r.rule, r.ops_before, r.ops_after, _saved(r)) for r in records)
        groups.setdefault((stars, what), []).append(path)
    return tuple(
        ModuleSummary(
            where=next(iter(fold(paths))),
            count=len(paths),
            rewrites=len(what) * len(paths),
            rules=tuple(dict.fromkeys(rule for rule, *_ in what)),
            ops_before=sum(op_count(old) for _, old, _, _ in what) * len(paths),
            ops_after=sum(op_count(new) for _, _, new, _ in what) * len(paths),
            bytes_saved=sum(saved for *_, saved in what) * len(paths),
        )
        for (_, what), paths in groups.items()
    )


def _saved(record: RewriteRecord) -> int:
    return record.bytes_before - record.bytes_after


def _rewrite(record: RewriteRecord) -> dict[str, Any]:
    flops = [0 if g is None else matrix_flops(g) for g in (record.reference, record.replacement)]
    return {
        **record.to_dict(),
        "bytes_saved": _saved(record),
        "flops_before": flops[0],
        "flops_after": flops[1],
    }
