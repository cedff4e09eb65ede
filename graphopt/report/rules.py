"""Records summed by rule and by place: the rows of the tables that explain() and the demo print."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from graphopt.graph.record import Refusal, RewriteRecord, Site
from graphopt.passes import PassOptions, select_rules
from graphopt.passes.autocast import MaterializeAutocast
from graphopt.passes.pipeline import pipeline
from graphopt.report.fold import fold_text
from graphopt.report.table import Table, size

# Node names as reasons spell them: "mul_3 (aten.mul)", "aten.mul (mul_3)", plain "mul_3".
_NODE_BEFORE_OP = re.compile(r"\b(\w+?)(?:_\d+)? \((?=aten\.|graphopt\.)")
_NODE_AFTER_OP = re.compile(r"((?:aten|graphopt)\.\w+) \((\w+?)(?:_\d+)?\)")
_NUMBERED = re.compile(r"(?<=[a-z])_\d+(?=_|\b)")


@dataclasses.dataclass(frozen=True)
class RuleSummary:
    """All that one rule did and did not do.

    Attributes:
        rule: the rule's name.
        fired: how often it was applied.
        refused: how often it came near and was not.
        bytes_saved: bytes that are no longer read or written per forward pass, as counted by the
            records; negative where a rewrite adds traffic.
        where: the modules that it fired in, repeated blocks folded.
        does: what the rule or pass does, in one line.
    """

    rule: str
    fired: int
    refused: int
    bytes_saved: int
    where: str
    does: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class RefusalSummary:
    """One reason why one rule did not fire, with the places it holds for.

    Attributes:
        rule: the rule's name.
        reason: why, in words.
        count: how often.
        where: module paths, repeated blocks folded.
        line: "file:line" of the user's code, "" where it is unknown.
        matched: ops of the pattern that were there, in the nearest miss.
        total: ops of the pattern.
    """

    rule: str
    reason: str
    count: int
    where: str
    line: str
    matched: int
    total: int

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return dataclasses.asdict(self)


def by_rule(
    rewrites: Sequence[RewriteRecord],
    refusals: Sequence[Refusal],
    does: Mapping[str, str] | None = None,
) -> tuple[RuleSummary, ...]:
    """Sum records by rule, the rule that saves most first.

    Args:
        rewrites: the records of one optimized graph.
        refusals: its refusals.
        does: what each rule or pass does, see `meanings`.

    Example:
        >>> by_rule([], [])
        ()
    """
    names = dict.fromkeys([*(r.rule for r in rewrites), *(r.rule for r in refusals)])
    rows = []
    for name in names:
        fired = [r for r in rewrites if r.rule == name]
        rows.append(
            RuleSummary(
                rule=name,
                fired=len(fired),
                refused=sum(r.rule == name for r in refusals),
                bytes_saved=sum(r.bytes_before - r.bytes_after for r in fired),
                where=fold_text(
                    "whole graph" if r.kind == "global" else r.site.module for r in fired
                ),
                does=(does or {}).get(name, ""),
            )
        )
    return tuple(sorted(rows, key=lambda row: (-row.bytes_saved, -row.fired, row.rule)))


PASSES = {
    "clean": "Drops dead and repeated ops, folds constants.",
    "rematerialize": "Values that backward needs are dropped in forward and computed again.",
    "seed_dropout": "One seed a forward for all dropouts, so that a kernel can repeat them.",
    "materialize_autocast": "Writes the casts of autocast into the graph.",
    "place_casts": "Moves autocast's casts along views and copies to where they cost least.",
    "output_strides": "Results keep their memory layout.",
}
"""What some passes do, where their own docstring speaks to those who read the code."""


def meanings(options: PassOptions) -> dict[str, str]:
    """What each rule and pass does, in one line: from its docstring.

    Args:
        options: the options of the passes, with the user's own rules among them.

    Example:
        >>> meanings(PassOptions())["clean"]
        'Drops dead and repeated ops, folds constants.'
    """
    passes = pipeline(options, (MaterializeAutocast(),))
    found = {p.name: (type(p).__doc__ or "").split("\n")[0] for p in passes}
    rules = {r.name: r.doc.split("\n")[0] for r in select_rules(options.rules)}
    return {**found, **PASSES, **rules}


def by_reason(refusals: Sequence[Refusal]) -> tuple[RefusalSummary, ...]:
    """Sum refusals by rule, reason and line of code, the nearest misses first.

    Example:
        >>> by_reason([])
        ()
    """
    groups: dict[tuple[str, str, str], list[Refusal]] = {}
    for refusal in refusals:
        key = (refusal.rule, without_numbers(refusal.reason), line_of(refusal.site))
        groups.setdefault(key, []).append(refusal)
    rows = [
        RefusalSummary(
            rule=rule,
            reason=group[0].reason if len(group) == 1 else reason,
            count=len(group),
            where=fold_text(r.site.module for r in group),
            line=line,
            matched=max(r.matched for r in group),
            total=group[0].total,
        )
        for (rule, reason, line), group in groups.items()
    ]
    return tuple(sorted(rows, key=lambda row: (row.total - row.matched, row.rule, row.line)))


def without_numbers(reason: str) -> str:
    """A reason with the numbers of its node names starred: repeated blocks differ in these only."""
    reason = _NODE_BEFORE_OP.sub(r"\1_* (", reason)
    reason = _NODE_AFTER_OP.sub(r"\1 (\2_*)", reason)
    return _NUMBERED.sub("_*", reason)


def op_count(names: Sequence[str]) -> int:
    """How many ops run: taking one of several results is none."""
    return sum(name != "getitem" for name in names)


def line_of(site: Site) -> str:
    """The place as "file.py:12", "" where export left none.

    Example:
        >>> line_of(Site("mlp", "MLP", "models/mlp.py", 12, "return gelu(x)"))
        'mlp.py:12'
    """
    return f"{PurePath(site.file).name}:{site.line}" if site.file else ""


def rule_table(rows: Iterable[RuleSummary]) -> Table:
    """The rules as a table: fired, refused, bytes saved, where."""
    return Table(
        header=("rule", "fired", "refused", "bytes saved", "where"),
        rows=tuple(
            (
                row.rule,
                str(row.fired),
                str(row.refused),
                size(row.bytes_saved) if row.bytes_saved else "-",
                row.where,
            )
            for row in rows
        ),
        right=("fired", "refused", "bytes saved"),
    )


def reason_table(rows: Iterable[RefusalSummary]) -> Table:
    """The refusals as a table: rule, how near it came, how often, where; why on a line below."""
    rows = tuple(rows)
    return Table(
        header=("not fused", "ops", "times", "line", "where"),
        rows=tuple(
            (r.rule, f"{r.matched}/{r.total}", str(r.count), r.line or "-", r.where) for r in rows
        ),
        right=("ops", "times"),
        notes=tuple(row.reason for row in rows),
    )
