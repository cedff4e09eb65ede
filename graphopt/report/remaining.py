"""What still runs as the model has it, and why no rule took it."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from graphopt.cost.ops import node_cost
from graphopt.graph import ops
from graphopt.graph.pattern import Bindings, Matcher, Pattern, either
from graphopt.graph.record import Refusal, site_of
from graphopt.kernels import registry
from graphopt.passes import PassOptions, PipelineResult, Rule, select_rules
from graphopt.passes.rule import Match
from graphopt.report.fold import fold_text
from graphopt.report.rules import line_of, without_numbers
from graphopt.report.table import Table, size

aten = torch.ops.aten

MATRIX = frozenset(
    {
        aten.linear.default,
        aten.mm.default,
        aten.bmm.default,
        aten.matmul.default,
        aten.addmm.default,
        aten.baddbmm.default,
        aten.scaled_dot_product_attention.default,
        aten.conv1d.default,
        aten.conv2d.default,
        aten.conv3d.default,
    }
)
"""Ops that are one tuned library kernel each; their floating-point operations are counted."""


@dataclasses.dataclass(frozen=True)
class Remaining:
    """Equal ops that run as they did, for one reason.

    Attributes:
        op: the op's name.
        count: how many there are.
        bytes: what they read and write in a forward.
        where: module paths, repeated blocks folded.
        line: "file:line" of the first one, "" where it is unknown.
        why: why no rule took them.
    """

    op: str
    count: int
    bytes: int
    where: str
    line: str
    why: str

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class Shares:
    """Bytes that a forward of the optimized graph moves, by who moves them.

    Attributes:
        fused: graphopt's fused kernels.
        matrix: matrix products, convolutions and attention.
        other: every other op.
    """

    fused: int
    matrix: int
    other: int

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        """One sentence."""
        total = self.fused + self.matrix + self.other
        parts = {
            "fused kernels": self.fused,
            "matrix products, convolutions and attention": self.matrix,
            "other ops": self.other,
        }
        shares = [f"{100 * n / max(total, 1):.0f}% {name}" for name, n in parts.items()]
        return f"Of the {size(total)} that a forward still moves: {', '.join(shares)}."


def matrix_flops(graph: fx.Graph) -> int:
    """Floating-point operations of a graph's matrix products, convolutions and attention."""
    return sum(node_cost(n).flops for n in graph.nodes if n.target in MATRIX)


def remaining(result: PipelineResult, options: PassOptions) -> tuple[Shares, tuple[Remaining, ...]]:
    """Who moves how many bytes, and the ops that no rule took with the reason.

    Args:
        result: what the passes did.
        options: the options that they ran with.

    Returns:
        The shares, and the ops that are neither fused nor matrix products, the most bytes first.
    """
    why = _Why(result, options)
    groups: dict[tuple[str, str], list[tuple[fx.Node, str]]] = {}
    shares = {"fused": 0, "matrix": 0, "other": 0}
    for node in result.body.graph.nodes:
        moved = node_cost(node).bytes
        if node.op != "call_function" or node.target is operator.getitem or not moved:
            continue
        kind = _kind(node)
        shares[kind] += moved
        if kind == "other":
            reason = why.of(node)
            key = (ops.op_name(node.target), without_numbers(reason))
            groups.setdefault(key, []).append((node, reason))
    rows = [_row(op, reason, found) for (op, reason), found in groups.items()]
    rows.sort(key=lambda r: (-r.bytes, r.op, r.why))
    return Shares(**shares), tuple(rows)


def remaining_table(rows: Sequence[Remaining], limit: int = 12) -> Table:
    """The ops that no rule took, those that move most; crumbs are summed in the last row."""
    total = sum(r.bytes for r in rows)
    shown = [r for r in rows[:limit] if r.bytes * 100 >= total]
    rest = rows[len(shown) :]
    cells = [(r.op, str(r.count), size(r.bytes), r.line or "-", r.where) for r in shown]
    if rest:
        count, moved = sum(r.count for r in rest), sum(r.bytes for r in rest)
        cells.append(("other", str(count), size(moved), "-", "all of them are in the JSON report"))
    return Table(
        header=("op", "count", "bytes", "line", "where"),
        rows=tuple(cells),
        right=("count", "bytes"),
        notes=(*(r.why for r in shown), *([""] if rest else [])),
    )


def _row(op: str, reason: str, found: Sequence[tuple[fx.Node, str]]) -> Remaining:
    sites = [site_of(node) for node, _ in found]
    return Remaining(
        op=op,
        count=len(found),
        bytes=sum(node_cost(node).bytes for node, _ in found),
        where=fold_text((s.module for s in sites), limit=3),
        line=line_of(sites[0]),
        why=found[0][1] if len(found) == 1 else reason,
    )


def _kind(node: fx.Node) -> str:
    if node.target in MATRIX:
        return "matrix"
    name = ops.op_name(node.target)
    own = registry().get(name.removeprefix("graphopt.")) if name.startswith("graphopt.") else None
    return "fused" if own is not None and own.launch is not None else "other"


class _Why:
    """The nearest that any rule came to an op, in words."""

    def __init__(self, result: PipelineResult, options: PassOptions) -> None:
        self.body = result.body
        limit = options.max_rewrites
        self.stopped = ""
        if limit is not None and len(result.rewrites) >= limit:
            self.stopped = f"max_rewrites={limit} was reached"
        rules = select_rules(options.rules)
        self.rules = [r for r in rules if options.fuse or r.family == "canonical"]
        self.refused: dict[str, list[Refusal]] = {}
        for refusal in result.refusals:
            self.refused.setdefault(refusal.node, []).append(refusal)
        self.inside: dict[Any, dict[str, None]] = {}
        for r in self.rules:
            for target in {t for p in r.patterns for t in _targets(p.graph)}:
                self.inside.setdefault(target, {}).setdefault(r.name)

    def of(self, node: fx.Node) -> str:
        """Why this op was not taken."""
        made_by = node.meta.get("graphopt_rule")
        if made_by:
            return f"put there by {made_by}"
        if self.stopped:
            return self.stopped
        refused = self.refused.get(node.name)
        if refused:
            best = max(refused, key=lambda r: r.matched / r.total)
            return f"{best.rule}: {best.reason}"
        near = self._nearest(node)
        if near:
            return near
        ends = [r.name for r in self.rules if any(node.target in p.targets for p in r.patterns)]
        if ends:
            return f"fused only at the end of {_listed(ends)}; here it follows {_sources(node)}"
        known = list(self.inside.get(node.target, ()))
        if known:
            return f"fused only inside {_listed(known)}"
        return "no rule fuses it"

    def _nearest(self, node: fx.Node) -> str:
        """The rule that matched most of itself at this op, "" where none matched two ops."""
        best: tuple[float, str] = (0.0, "")
        for r in self.rules:
            for pattern in r.patterns:
                if node.target not in pattern.targets:
                    continue
                matcher = Matcher(pattern)
                matcher.match(node, functools.partial(self._refusal, r, pattern))
                miss = matcher.miss
                share = miss.matched / pattern.size
                if miss.matched > 1 and share > best[0]:
                    best = (share, f"{r.name}, {miss.matched} of {pattern.size} ops: {miss}")
        return best[1]

    def _refusal(self, r: Rule, pattern: Pattern, bound: Bindings) -> str:
        """Why a rule whose whole structure is there does not apply."""
        match = Match(r, pattern, bound, self.body)
        reasons = (match.inside_use(), match.mixed_regions(), *(c(match) for c in r.checks))
        return next((x for x in reasons if x), "") or "the rule does not apply here"


def _sources(node: fx.Node) -> str:
    """What an op reads, in words."""
    words: dict[str, None] = {}
    for source in node.all_input_nodes:
        while source.target is operator.getitem:
            source = source.all_input_nodes[0]
        kinds = {"placeholder": "an input", "get_attr": "a parameter or buffer"}
        words.setdefault(kinds.get(source.op) or ops.op_name(source.target))
    return " and ".join(words) or "nothing"


def _listed(names: Sequence[str]) -> str:
    """The first three names: "a", "a or b", "a, b, c or 2 more"."""
    words = [*names[:3], f"{len(names) - 3} more"] if len(names) > 3 else list(names)
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _targets(graph: fx.Graph) -> set[Any]:
    return {n.target for n in graph.nodes if n.op == "call_function" and n.target is not either}
