"""What `verify` finds, as data: a verdict for each rewrite and for the whole step."""

from __future__ import annotations

import dataclasses
from typing import Any

from graphopt.errors import VerifyError
from graphopt.graph.record import Site
from graphopt.numerics import Comparison
from graphopt.passes.rule import leaving_out


@dataclasses.dataclass(frozen=True, repr=False)
class Check:
    """The verdict on one rewrite, or on the whole step.

    Attributes:
        ordinal: the rewrite's, -1 for the whole.
        rule: the rule's name, "the whole step" for the whole.
        pass_name: the pass that did it.
        kind: "local", "global" or "whole".
        site: module path and file:line.
        status: "right", "wrong" or "unchecked".
        reason: why it is wrong or could not be checked, "" when right.
        agreement: greatest relative difference of the two in float64, None when not run.
        comparison: the errors of each tensor beside eager's, None when not run.
    """

    ordinal: int
    rule: str
    pass_name: str
    kind: str
    site: Site
    status: str
    reason: str = ""
    agreement: float | None = None
    comparison: Comparison | None = None

    @property
    def passed(self) -> bool:
        """Whether the rewrite was checked and found right."""
        return self.status == "right"

    def __str__(self) -> str:
        """One phrase that names the rewrite and its place."""
        if self.kind == "whole":
            return self.rule
        return f"rewrite #{self.ordinal} {self.rule} at {self.site}"

    def __repr__(self) -> str:
        """The same phrase with the verdict; `.comparison` has the errors."""
        return f"<{self}: {self.status}{f', {self.reason}' if self.reason else ''}>"

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        skip = ("site", "comparison")
        data = {
            f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in skip
        }
        comparison = None if self.comparison is None else self.comparison.to_dict()
        return {**data, "site": self.site.to_dict(), "comparison": comparison}

    def row(self) -> str:
        """One line of a table: the errors of the worst tensor."""
        worst = None if self.comparison is None else self.comparison.worst
        numbers = " " * 39
        if worst is not None:
            errors = (worst.eager, worst.optimized, worst.difference)
            numbers = " ".join(f"{e:9.2e}" for e in errors) + f" {worst.ratio:9.2f}"
        agreement = "        -" if self.agreement is None else f"{self.agreement:9.1e}"
        number = "" if self.kind == "whole" else str(self.ordinal)
        status = self.status if self.passed else f"{self.status.upper()}: {self.reason}"
        head = f"{number:>4} {self.rule[:24]:24s} {_short(self.site):38s}"
        return f"{head} {numbers} {agreement}  {status}"


def _short(site: Site) -> str:
    place = f"{site.file.rsplit('/', 1)[-1]}:{site.line}" if site.file else ""
    room = 37 - len(place)
    return f"{site.module[-room:] if room > 0 else ''} {place}".strip()


_HEAD = (
    f"{'#':>4} {'rule':24s} {'where':38s} {'eager':>9s} {'graphopt':>9s} "
    f"{'between':>9s} {'ratio':>9s} {'float64':>9s}"
)


@dataclasses.dataclass(frozen=True)
class VerifyResult:
    """What `verify` found.

    Attributes:
        checks: one per rewrite, in ordinal order.
        whole: the captured graph against the optimized one: outputs and every gradient.
        notes: what was compared under a condition (dropout at p = 0, say).
    """

    checks: tuple[Check, ...]
    whole: Check
    notes: tuple[str, ...] = ()

    @property
    def all(self) -> tuple[Check, ...]:
        """The rewrites in order, then the whole step."""
        return (*self.checks, self.whole)

    @property
    def wrong(self) -> tuple[Check, ...]:
        """What was checked and found wrong, in order."""
        return tuple(c for c in self.all if c.status == "wrong")

    @property
    def unchecked(self) -> tuple[Check, ...]:
        """What could not be checked, in order."""
        return tuple(c for c in self.all if c.status == "unchecked")

    @property
    def passed(self) -> bool:
        """Whether everything was checked and everything is right."""
        return all(c.passed for c in self.all)

    def check(self) -> VerifyResult:
        """Give the result back when it passed.

        Raises:
            VerifyError: naming the first wrong rewrite (rule, ordinal, module path, file:line), or,
                when none is wrong, the first that could not be checked.
        """
        if self.passed:
            return self
        bad = (*self.wrong, *self.unchecked)
        first, more = bad[0], len(bad) - 1
        what = "is wrong" if first.status == "wrong" else "could not be checked"
        tail = f" ({more} more like it in the result)" if more else ""
        cure = "print the result for the table of errors"
        if first.kind == "local":
            cure = f"max_rewrites={first.ordinal} stops before it; {leaving_out(first.rule)}"
        site, at = first.site, None
        if first.kind == "local":
            code = f"    {site.code}" if site.code else ""
            at = f"{site.module or 'the root module'}, {site.file}:{site.line}{code}"
        raise VerifyError(f"{first} {what}{tail}", at=at, why=first.reason, try_=cure)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "passed": self.passed,
            "checks": [c.to_dict() for c in self.checks],
            "whole": self.whole.to_dict(),
            "notes": list(self.notes),
        }

    def _repr_html_(self) -> str:
        from graphopt.report.proof import proof_table, proof_text
        from graphopt.report.view import html_fragment

        return html_fragment([proof_table(self), proof_text(self)])

    def __repr__(self) -> str:
        """A table: what is wrong first, then the rewrites in order, then the whole step."""
        bad = [c for c in self.checks if not c.passed]
        good = [c for c in self.checks if c.passed]
        lines = [_HEAD, *(c.row() for c in bad[:20]), *(c.row() for c in good[:20])]
        hidden = max(len(bad) - 20, 0) + max(len(good) - 20, 0)
        if hidden:
            lines.append(f"     ... and {hidden} more")
        lines.append(self.whole.row())
        lines.extend(f"note: {n}" for n in self.notes)
        verdict = "every rewrite and the whole step are inside the contract"
        if not self.passed:
            verdict = f"{len(self.wrong)} wrong, {len(self.unchecked)} unchecked"
        lines.append(f"{len(self.checks)} rewrites: {verdict}")
        return "\n".join(lines)
