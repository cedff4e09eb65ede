"""What `bisect` found, as data and as text."""

from __future__ import annotations

import dataclasses
from typing import Any

from graphopt.graph.record import RewriteRecord
from graphopt.report.table import Table
from graphopt.report.view import Code, Part, html_fragment, plain
from graphopt.verdict import Check

SCHEMA = "graphopt.bisect/1"
"""Name and version of the JSON: the number rises when a key goes or changes its meaning."""


@dataclasses.dataclass(frozen=True)
class Trial:
    """One run with some of the rewrites.

    Attributes:
        rewrites: how many rewrites were allowed, None for all of them. They are counted through all
            graphs that the predicate runs, one graph after the other.
        without: the rules that were left out.
        good: whether it was right.
        detail: what was wrong, "" when right.
        seconds: how long it took.
    """

    rewrites: int | None
    without: tuple[str, ...]
    good: bool
    detail: str
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        """One line: which rewrites, and the verdict."""
        count = "all rewrites" if self.rewrites is None else f"the first {self.rewrites}"
        rules = f" without {', '.join(self.without)}" if self.without else ""
        return f"{count}{rules}: {'right' if self.good else f'wrong ({self.detail})'}"


@dataclasses.dataclass(frozen=True)
class Culprit:
    """A rewrite that turns right into wrong.

    Attributes:
        record: the rewrite, with its rule, place, ops and both subgraphs.
        without: the rules that were left out when it was found (those of the culprits before it).
        detail: what was wrong with it.
        alone: the proof of this rewrite by itself, None where it was not run.
        reference: the code of what was there.
        replacement: the code of what took its place.
        change: for a rewrite of the whole graph, the diff that it made; "" otherwise.
        cure: the argument of `optimize` that avoids it.
        graph: which graph it stands in, "" where there is one.
    """

    record: RewriteRecord
    without: tuple[str, ...]
    detail: str
    alone: Check | None
    reference: str
    replacement: str
    change: str
    cure: str
    graph: str

    @property
    def rule(self) -> str:
        """The rule's name."""
        return self.record.rule

    @property
    def verdict_alone(self) -> str:
        """What the rewrite's own proof says, "" where it was not run."""
        if self.alone is None:
            return ""
        if self.alone.status == "wrong":
            return f"it is wrong: {self.alone.reason.split('; ')[0]}"
        if self.alone.status == "unchecked":
            return f"it could not be checked: {self.alone.reason}"
        return "it is right on these inputs: look at how it stands in the graph"

    def parts(self) -> list[Part]:
        """What is shown of it."""
        record, site, k = self.record, self.record.site, self.record.ordinal
        where = "the whole graph" if record.kind == "global" else site.module or "the root module"
        lines = [f"guilty: rewrite #{k}, rule {record.rule}, at {where}"]
        if self.graph:
            lines.append(f"  in {self.graph}")
        if site.file and record.kind == "local":
            lines += [f"  {site.file}:{site.line}", f"    {site.code or ''}"]
        if record.kind == "local":
            before, after = map(", ".join, (record.ops_before, record.ops_after))
            lines.append(f"  {before} -> {after or 'nothing new'}")
        if self.graph:
            lines.append(f"  right with its first {k} rewrites, wrong with the first {k + 1}:")
        else:
            lines.append(f"  right with max_rewrites={k}, wrong with max_rewrites={k + 1}:")
        lines += [f"    - {reason}" for reason in self.detail.split("; ")]
        if self.without:
            lines.append(f"  found with {', '.join(self.without)} left out")
        if self.alone is not None:
            lines.append(f"  replayed alone, {self.verdict_alone}")
        parts: list[Part] = ["\n".join(line for line in lines if line.strip())]
        if self.change:
            return [*parts, Code(self.change, "what it changed:", diff=True)]
        parts.append(Code(self.reference, "what was there:"))
        return [*parts, Code(self.replacement, "what took its place:")]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "rewrite": self.record.to_dict(),
            "without": list(self.without),
            "detail": self.detail,
            "alone": None if self.alone is None else self.alone.to_dict(),
            "reference": self.reference,
            "replacement": self.replacement,
            "change": self.change,
            "cure": self.cure,
            "graph": self.graph,
        }


@dataclasses.dataclass(frozen=True)
class RuleTrial:
    """All rewrites but those of one rule.

    Attributes:
        rule: the rule that was left out.
        fired: how often it fires when it is not.
        good: whether the run without it was right.
    """

    rule: str
    fired: int
    good: bool

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True, repr=False)
class BisectResult:
    """What `bisect` found. Its repr tells the guilty rewrite and the cure.

    Attributes:
        model: class name of the model.
        judged_by: "the error contract", or the predicate's name.
        status: "right" (nothing is wrong with all rewrites), "found", "capture" (wrong without any
            rewrite already), or "flaky" (the same run gave two answers).
        rewrites: how many rewrites there are, in all graphs together.
        graphs: how many graphs were searched: a predicate may run several modes and sizes.
        culprits: the guilty rewrites, empty unless found.
        suspects: where the whole is right: rewrites that are wrong when each is replayed alone.
        rules: the run without each rule, empty unless found.
        monotone: whether the verdict turned just once over the number of rewrites.
        cure: the argument of `optimize` that avoids all culprits, "" where there is none.
        cured: whether a run with that cure was right.
        trials: every run, in order.
        notes: what else was seen.
        seconds: time of the whole search.
    """

    model: str
    judged_by: str
    status: str
    rewrites: int
    graphs: int
    culprits: tuple[Culprit, ...]
    suspects: tuple[Check, ...]
    rules: tuple[RuleTrial, ...]
    monotone: bool
    cure: str
    cured: bool
    trials: tuple[Trial, ...]
    notes: tuple[str, ...]
    seconds: float

    @property
    def good(self) -> bool:
        """Whether nothing is wrong: with all rewrites, and with each alone where that was run."""
        return self.status == "right" and not self.suspects

    @property
    def culprit(self) -> Culprit | None:
        """The first guilty rewrite, None where none was found."""
        return self.culprits[0] if self.culprits else None

    @property
    def headline(self) -> str:
        """One sentence: what was found."""
        how = f"{len(self.trials)} runs, {self.seconds:.1f} s, judged by {self.judged_by}"
        all_of_them = f"all {self.rewrites} rewrites"
        if self.graphs > 1:
            all_of_them += f" of {self.graphs} graphs"
        if self.status == "flaky":
            text = "the same run gave two answers, so nothing can be searched"
        elif self.status == "capture":
            text = (
                "wrong without any rewrite already: the fault is in the captured graph (or in the "
                "check), not in a rule"
            )
        elif self.status == "right" and self.suspects:
            text = (
                f"the whole step is right with {all_of_them}, but {len(self.suspects)} of them "
                "are wrong when replayed alone"
            )
        elif self.status == "right":
            text = f"nothing is wrong with {all_of_them}"
        else:
            rules = ", ".join(dict.fromkeys(c.rule for c in self.culprits))
            text = f"wrong with {all_of_them}, right without any; guilty: {rules}"
        return f"{self.model}: {text}\n({how})"

    def parts(self) -> list[Part]:
        """What is shown, in order."""
        parts: list[Part] = [self.headline]
        for culprit in self.culprits:
            parts += culprit.parts()
        parts += [str(check) + f" is wrong: {check.reason}" for check in self.suspects[:10]]
        if len(self.suspects) > 10:
            parts.append(f"... and {len(self.suspects) - 10} more, in .suspects")
        if self.cure:
            tried = "the run with it is right" if self.cured else "the run with it is still wrong"
            parts.append(f"cure: optimize(..., {self.cure})   ({tried})")
        if self.rules:
            rows = [(r.rule, str(r.fired), "right" if r.good else "wrong") for r in self.rules]
            header = ("rule", "fired", "without it")
            parts.append(Table(header, tuple(rows), right=("fired",)))
        if self.notes:
            parts.append("\n".join(f"note: {note}" for note in self.notes))
        if self.status in ("capture", "flaky"):
            parts.append("\n".join(f"  {trial}" for trial in self.trials))
        return parts

    def __repr__(self) -> str:
        """The findings as plain text."""
        return plain(self.parts())

    def _repr_html_(self) -> str:
        return html_fragment(self.parts())

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        nested = ("culprits", "suspects", "rules", "trials")
        plain_fields = [f.name for f in dataclasses.fields(self) if f.name not in nested]
        return {
            "schema": SCHEMA,
            "good": self.good,
            **{name: getattr(self, name) for name in plain_fields},
            **{name: [x.to_dict() for x in getattr(self, name)] for name in nested},
        }
