"""What verify found as a short table: one row a rule, repeated blocks folded."""

from __future__ import annotations

from collections.abc import Sequence

from graphopt.report.fold import fold_text
from graphopt.report.rules import line_of
from graphopt.report.table import Table
from graphopt.verdict import Check, VerifyResult


def proof_table(result: VerifyResult) -> Table:
    """One row for each rule, the whole step last.

    The errors are relative L2 distances from a float64 run, of the tensor (output or gradient)
    whose ratio of graphopt's error to eager's is greatest; "float64" is how far the replaced and
    the new subgraph are apart when both run in float64.
    """
    groups: dict[str, list[Check]] = {}
    for check in result.checks:
        groups.setdefault(check.rule, []).append(check)
    rows = [_row(rule, checks) for rule, checks in groups.items()]
    header = ("rule", "right", "eager", "graphopt", "ratio", "float64", "where")
    return Table(header, (*rows, _row("the whole step", [result.whole])), right=header[1:-1])


def proof_text(result: VerifyResult) -> str:
    """The verdict in words: what is wrong or unchecked with its place, or that nothing is."""
    bad = [*result.wrong, *result.unchecked]
    lines = [
        f"{check.status}: {check.rule} at {check.site.module or '(root)'} "
        f"{line_of(check.site)}: {check.reason}"
        for check in bad[:10]
    ]
    if len(bad) > 10:
        lines.append(f"... and {len(bad) - 10} more")
    if not bad:
        lines.append(
            f"{len(result.checks)} rewrites: each one and the whole step keep the error contract"
        )
    return "\n".join(lines)


def folded_notes(notes: Sequence[str]) -> list[str]:
    """Notes with equal ones about several rewrites told once.

    Example:
        >>> folded_notes(["rewrite #3: at p = 0", "rewrite #4: at p = 0", "slow"])
        ['rewrites #3, #4: at p = 0', 'slow']
    """
    about: dict[str, list[str]] = {}
    for note in notes:
        who, colon, what = note.partition(": ")
        one = bool(colon) and who.startswith("rewrite #")
        about.setdefault(what if one else note, []).append(
            who.removeprefix("rewrite ") if one else ""
        )
    return [
        f"rewrite{'s' * (len(who) > 1)} {', '.join(who)}: {what}" if who[0] else what
        for what, who in about.items()
    ]


def _row(rule: str, checks: Sequence[Check]) -> tuple[str, ...]:
    right = sum(check.passed for check in checks)
    worst = max(
        (c.comparison.worst for c in checks if c.comparison and c.comparison.worst),
        key=lambda tensor: tensor.ratio,
        default=None,
    )
    apart = max((c.agreement for c in checks if c.agreement is not None), default=None)
    local = [check.site.module for check in checks if check.kind == "local"]
    return (
        rule,
        f"{right} of {len(checks)}",
        "-" if worst is None else f"{worst.eager:.1e}",
        "-" if worst is None else f"{worst.optimized:.1e}",
        "-" if worst is None else f"{worst.ratio:.2f}",
        "-" if apart is None else f"{apart:.0e}",
        fold_text(local) if local else "whole graph",
    )
