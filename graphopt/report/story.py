"""The report as a new user reads it: what became faster, why not the rest, is it still right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from graphopt.report.kernels import kernel_table
from graphopt.report.memory import memory_line, memory_parts
from graphopt.report.proof import folded_notes, proof_table, proof_text
from graphopt.report.remaining import remaining_table
from graphopt.report.rules import op_count, reason_table
from graphopt.report.table import Table, flops_text, percent, size
from graphopt.report.view import Code, Heading, Part

if TYPE_CHECKING:
    from graphopt.report.summary import ModuleSummary, Report

COUNTED = (
    "Bytes are counted, not measured: one forward, each op reads its inputs and writes its results "
    "once. Pointwise FLOPs are not counted: a fused kernel computes what its ops did, with fewer "
    "trips to memory."
)


def story(made: Report, *, stable: bool) -> list[Part]:
    """The parts of a report.

    Args:
        made: the report.
        stable: leave out what differs from run to run and from machine to machine.
    """
    parts: list[Part] = [
        f"graphopt report: {made.model}, {made.mode}, {', '.join(made.inputs)}",
        in_short(made),
        Heading("1. What became faster"),
        *_faster(made, stable=stable),
        *_memory(made),
        Heading("2. Why not the rest"),
        *_rest(made),
        Heading("3. Is it still right"),
        *_right(made, stable=stable),
        Heading("4. How it was made"),
        *_made(made, stable=stable),
    ]
    return [*parts, "The code: opt.code. What changed in it, module by module: graphopt.diff(opt)."]


def code_parts(made: Report) -> list[Part]:
    """What the page shows beside the report: the diff, and the whole code folded."""
    return [
        Heading("5. What changed in the code"),
        *made.changes.parts(),
        Code(made.code, "The optimized graph (opt.code)"),
    ]


def in_short(made: Report) -> str:
    """The answers, a line each."""
    t, left = made.totals, made.remaining
    faster = "nothing was rewritten"
    if made.rewrites:
        less = 1 - t.bytes_after / max(t.bytes_before, 1)
        faster = (
            f"{len(made.rewrites)} rewrites; {t.ops_before} ops -> {t.ops_after}, bytes moved in a "
            f"forward {size(t.bytes_before)} -> {size(t.bytes_after)} ({percent(less)})"
        )
    rest = "all of it is fused kernels and matrix products"
    if left:
        share = 100 * left[0].bytes / max(t.bytes_after, 1)
        rest = f"the most is moved by {left[0].op}, {share:.0f}% of the bytes: {left[0].why}"
    proof = made.verification
    right = "not checked here, see 3."
    if proof is not None:
        right = "yes, proved against float64" if proof.passed else "NO, see 3."
    memory = "" if made.memory is None else f"  - memory: {memory_line(made.memory)}\n"
    return f"  - faster: {faster}\n{memory}  - the rest: {rest}\n  - still right: {right}"


def _memory(made: Report) -> list[Part]:
    """The memory plan, where a budget was asked for."""
    if made.memory is None:
        return []
    return [Heading("How the memory budget is kept"), *memory_parts(made.memory)]


def _faster(made: Report, *, stable: bool) -> list[Part]:
    t = made.totals
    less = 1 - t.bytes_after / t.bytes_before if t.bytes_before else 0.0
    flops = flops_text(t.flops_before)
    if t.flops_before != t.flops_after:
        flops += f" -> {flops_text(t.flops_after)}"
    else:
        flops += ", as before"
    local = [r for r in made.rewrites if r.kind == "local"]
    summary = (
        f"{t.ops_before} ops -> {t.ops_after}.  {size(t.bytes_before)} moved in a forward -> "
        f"{size(t.bytes_after)} ({percent(less)}).  Matrix products, convolutions and "
        f"attention: {flops}."
    )
    parts: list[Part] = [summary]
    p = made.precision
    if p.ambient is not None:
        parts.append(
            f"Precision: {p.ambient}. A forward casts {p.weight_casts} weights "
            f"({size(p.weight_cast_bytes)} moved) and {p.activation_casts} values "
            f"({size(p.activation_cast_bytes)}); kernels do the other casts as they load and store."
            + (f" {p.pinned} ops run as precision_overrides say." if p.pinned else "")
        )
    if p.unmatched:
        lines = [f"  {pattern!r}: {why}" for pattern, why in p.unmatched]
        parts.append("\n".join(["These precision_overrides decide nothing here:", *lines]))
    if not made.rewrites:
        parts.append("Nothing: no rule found anything to rewrite. Section 2 says why.")
    if made.rewrites:
        parts += [_rule_table(made), _meanings(made)]
    if local:
        parts += ["By module, in the order of the forward:", _module_table(made.modules)]
    if made.kernels_used:
        parts += [
            "The fused kernels, and what they must move at least, by their own count:",
            kernel_table(made.kernels_used),
        ]
    here = [] if stable else [f"On this machine: {made.kernels}."]
    return [*parts, COUNTED, *here]


def _rule_table(made: Report) -> Table:
    rows = []
    for rule in (r for r in made.rules if r.fired):
        fired = [r for r in made.rewrites if r.rule == rule.rule]
        before, after = (
            sum(op_count(names) for names in side)
            for side in ([r.ops_before for r in fired], [r.ops_after for r in fired])
        )
        ops = f"{before} -> {after}" if before or after else "-"
        saved = size(rule.bytes_saved) if rule.bytes_saved else "-"
        rows.append((rule.rule, str(rule.fired), ops, saved, rule.where))
    header = ("rule", "fired", "ops", "bytes saved", "where")
    return Table(header, tuple(rows), right=header[1:4])


def _meanings(made: Report) -> str:
    """One line for each rule that fired: what it does."""
    return "\n".join(f"  {r.rule}: {r.does or 'no description'}" for r in made.rules if r.fired)


def _module_table(modules: Sequence[ModuleSummary]) -> Table:
    rows = tuple(
        (
            (m.where or "(root)") + (f" x{m.count}" if m.count > 1 else ""),
            f"{m.ops_before} -> {m.ops_after}",
            size(m.bytes_saved) if m.bytes_saved else "-",
            ", ".join(m.rules),
        )
        for m in modules
    )
    header = ("module", "ops", "bytes saved", "rules")
    return Table(header, rows, right=header[1:3])


def _rest(made: Report) -> list[Part]:
    parts: list[Part] = [
        f"{made.shares} Fused kernels are graphopt's; matrix products, convolutions and attention "
        "are tuned library kernels already and stay as they are."
    ]
    if made.remaining:
        parts += ["The other ops, those that move most first:", remaining_table(made.remaining)]
    if made.refused:
        parts += [
            "Rules that came near and were refused, the nearest first:",
            reason_table(made.refused),
        ]
    elif made.remaining:
        parts.append("No rule that came near was refused.")
    return parts


def _right(made: Report, *, stable: bool) -> list[Part]:
    found = made.verification
    if found is None:
        return [
            "Not checked in this report. The proof, rewrite by rewrite and for the whole step:\n"
            "  graphopt.report(opt, verify=graphopt.verify(opt, inputs))"
        ]
    if found.passed:
        verdict = (
            f"Yes: {len(found.checks)} rewrites and the whole step, outputs and gradients, keep "
            "the error contract against float64 beside eager."
        )
    else:
        verdict = (
            f"NO: {len(found.wrong)} wrong, {len(found.unchecked)} unchecked. "
            "graphopt.bisect(model, inputs) finds the guilty rewrite."
        )
    table = proof_table(found)
    if stable:
        rows = tuple((row[0], row[1], row[-1]) for row in table.rows)
        table = Table(("rule", "right", "where"), rows, right=("right",))
    parts: list[Part] = [verdict, table]
    if not found.passed:
        parts.append(proof_text(found))
    if found.notes:
        parts.append("\n".join(f"note: {note}" for note in folded_notes(found.notes)))
    return parts


def _made(made: Report, *, stable: bool) -> list[Part]:
    parts: list[Part] = []
    if not stable:
        total = sum(p[3] for p in made.passes)
        parts.append(
            f"capture {made.capture_seconds:.2f} s (torch.export {made.export_seconds:.2f} s), "
            f"passes {total:.2f} s"
        )
    header: tuple[str, ...] = ("pass", "rewrites", "nodes after", "seconds")
    rows = [(p, str(n), str(ops), f"{s:.2f}") for p, ops, n, s in made.passes]
    if stable:
        header, rows = header[:3], [row[:3] for row in rows]  # type: ignore[misc]
    parts.append(Table(header, tuple(rows), right=header[1:]))
    if made.recaptures:
        parts.append("Captured again:\n" + "\n".join(f"  - {text}" for text in _folded(made)))
    else:
        parts.append("Captured once.")
    if made.graphs > 1:
        parts.append(f"{made.graphs} graphs are kept; this is the one in force, {made.mode}.")
    if not stable:
        versions = ", ".join(f"{k} {v}" for k, v in made.versions.items() if v)
        parts.append(versions)
    return parts


def _folded(made: Report) -> list[str]:
    """The recaptures, equal ones counted."""
    counts: dict[str, int] = {}
    for recapture in made.recaptures:
        text = str(recapture)
        counts[text] = counts.get(text, 0) + 1
    return [text + (f" (x{n})" if n > 1 else "") for text, n in counts.items()]
