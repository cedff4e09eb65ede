"""From "the loss is off" to the one rewrite: a search over how many rewrites are applied."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from graphopt.api import PassCompiler
from graphopt.errors import OptionError
from graphopt.module import Settings, graphopt_of
from graphopt.options import (
    PRECISION,
    check_choice,
    check_fit,
    check_inputs,
    check_model,
    check_overrides,
    check_passes,
    names_checked,
)
from graphopt.passes import Rule
from graphopt.predicate import Predicate, PredicateJudge
from graphopt.report.blame import BisectResult, Culprit, RuleTrial, Trial
from graphopt.report.progress import Step, progress
from graphopt.report.subgraph import change_of, code_of
from graphopt.trials import ContractJudge, Judge, Outcome

PROBES = 2
"""Runs on each side of a culprit that check whether the verdict turns just once."""


@names_checked
def bisect(
    model: nn.Module,
    example_inputs: torch.Tensor | Sequence[Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    predicate: Predicate | None = None,
    precision: str | None = None,
    precision_overrides: Mapping[str, str | torch.dtype] | None = None,
    fuse: bool | str = True,
    rules: str | Rule | Iterable[str | Rule] = "default",
    backward: bool | None = None,
) -> BisectResult:
    """Find the rewrite that makes a model wrong.

    The number of rewrites that are applied is halved until one rewrite more turns right into wrong.
    A few runs more tell whether the verdict turns just once (where it does not, every number is
    tried), and each rule is left out in turn, to see whether several are guilty. Where a predicate
    runs several graphs (modes, sizes), the rewrites of all of them are searched, one graph after
    the other, and the guilty one's graph is named.

    Without a predicate a run is right when outputs and every gradient of the whole step keep the
    error contract on these inputs, and without any rewrite the captured graph is compared with the
    model's own forward. With one, each run optimizes the model anew, from the same weights,
    buffers, gradients, modes and random state; all are put back afterwards. That takes the model's
    memory once more.

    Args:
        model: the model; or what `optimize` or `attach` returned, whose options are then taken.
        example_inputs: a tensor, or the positional arguments of `forward`. With a predicate they
            may be left out.
        example_kwargs: the keyword arguments of `forward`.
        predicate: takes the optimized module, returns True where it is right. One that raises
            counts as wrong.
        precision: as in `optimize`.
        precision_overrides: as in `optimize`.
        fuse: as in `optimize`.
        rules: as in `optimize`; your own rules are searched like any other.
        backward: whether the contract compares gradients, too; by default where grad mode is on.

    Returns:
        The guilty rewrites with rule, module path, line, code before and after, and the cure.

    Raises:
        OptionError: for wrong arguments, before any work; for a predicate that gives no truth value
            or raises without any rewrite, too.
        CaptureError: when the model cannot be captured.

    Example:
        >>> bisect(nn.Sequential(nn.Linear(4, 4), nn.GELU()), torch.ones(2, 4)).status
        'right'
    """
    args, kwargs = check_inputs(example_inputs, example_kwargs)
    model, settings, compiler = _subject(model, precision, precision_overrides, fuse, rules)
    if predicate is not None and not callable(predicate):
        raise OptionError(
            f"predicate is a {type(predicate).__name__}",
            try_="a function that takes the optimized module and returns True where it is right",
        )
    if predicate is None and args is None:
        raise OptionError(
            "bisect needs example_inputs, or a predicate",
            try_="graphopt.bisect(model, inputs), or bisect(model, predicate=is_right)",
        )
    if args is not None:
        check_fit(model, args, kwargs)
    check_choice("backward", backward, (None, True, False))
    start = time.perf_counter()
    with progress("bisect") as say:
        judge: Judge
        if predicate is None:
            say("capturing")
            judge = ContractJudge(model, args or (), kwargs, compiler, settings.precision, backward)
        else:
            judge = PredicateJudge(model, args, kwargs, compiler, settings, predicate)
        search = _Search(judge, compiler.options.rules, say)
        search.go()
    name = "the error contract"
    if predicate is not None:
        name = getattr(predicate, "__name__", type(predicate).__name__)
    return search.result(type(model).__name__, name, time.perf_counter() - start)


def _subject(
    model: nn.Module,
    precision: Any,
    overrides: Any,
    fuse: Any,
    rules: Any,
) -> tuple[nn.Module, Settings, PassCompiler]:
    """The source, and how it is captured and rewritten: as the user says, or as `opt` was made.

    Raises:
        OptionError: for wrong options, and for options beside a module that is optimized already.
    """
    optimized = graphopt_of(model)
    if optimized is None:
        check_model(model)
        check_choice("precision", precision, PRECISION)
        pairs = check_overrides(model, overrides)
        compiler = PassCompiler(check_passes(fuse, rules, None), pairs)
        return model, Settings(precision=precision), compiler
    if (precision, overrides, fuse, rules) != (None, None, True, "default"):
        raise OptionError(
            "options of optimize() are given with a module that is optimized already",
            why="it is searched with the options that it was made with",
            try_="graphopt.bisect(opt.source, inputs, ...) with all of them",
        )
    made = optimized._compile_body
    if not isinstance(made, PassCompiler):
        raise OptionError("no passes ran on this module", try_="pass the model itself")
    return optimized.source, optimized._settings, made


class _Search:
    """The runs of one search, each done once, and what they say."""

    def __init__(self, judge: Judge, rules: Any, say: Step) -> None:
        self.judge = judge
        self.spec = rules
        self.say = say
        self.trials: list[Trial] = []
        self.known: dict[tuple[int | None, tuple[str, ...]], Outcome] = {}
        self.status = "right"
        self.count, self.graphs = 0, 1
        self.culprits: list[Culprit] = []
        self.suspects: tuple[Any, ...] = ()
        self.rules: list[RuleTrial] = []
        self.monotone = True
        self.cured = False
        self.notes: list[str] = []

    # ---- runs

    def outcome(
        self, limit: int | None, without: Sequence[str] = (), again: bool = False
    ) -> Outcome:
        """One run; `again` runs it anew although its outcome is known."""
        key = (limit, tuple(without))
        if key in self.known and not again:
            return self.known[key]
        self.say(f"run {len(self.trials) + 1}")
        start = time.perf_counter()
        found = self.judge.nothing() if limit == 0 else self.judge.run(limit, key[1])
        seconds = time.perf_counter() - start
        detail = "" if found.good else found.detail
        self.trials.append(Trial(limit, key[1], found.good, detail, seconds))
        self.known.setdefault(key, found)
        return found

    def steady(self, limit: int | None) -> bool:
        """Whether one end of the search gives the same answer twice."""
        first = self.outcome(limit)
        if not self.judge.repeats:
            return True
        return self.outcome(limit, again=True).good == first.good

    # ---- the search

    def go(self) -> None:
        """Search, as far as there is something to find."""
        if not self.steady(None):
            self.status = "flaky"
            return
        everything = self.outcome(None)
        self.count, self.graphs = len(everything.rewrites), len(everything.graphs)
        if everything.good:
            if isinstance(self.judge, ContractJudge):
                self.say("proving each rewrite")
                self.suspects = self.judge.suspects()
            return
        if not self.steady(0):
            self.status = "flaky"
            return
        nothing = self.outcome(0)
        if nothing.error is not None:
            raise OptionError(
                f"without any rewrite, too, {nothing.detail}",
                why="then it is no rewrite that makes it raise",
                try_="call it with graphopt.optimize(model, inputs, max_rewrites=0)",
            ) from nothing.error
        if not nothing.good:
            self.status = "capture"
            return
        self.status = "found"
        self._find_all(everything)
        if self.status == "found":
            self._tell_rounding()
            self._leave_out_each(everything)

    def _find_all(self, everything: Outcome) -> None:
        """Find a culprit, leave its rule out, and look again until the rest is right."""
        without: tuple[str, ...] = ()
        while not everything.good:
            limits = self._turns(len(everything.rewrites), without)
            for limit in limits:
                self._blame(everything, limit, without)
            rules = {c.rule for c in self.culprits if c.record.kind == "local"} - set(without)
            if not rules or not limits:  # a pass cannot be left out
                break
            without = (*without, *sorted(rules))
            everything = self.outcome(None, without)
        self.cured = everything.good
        if not all(
            c.record.kind == "local" for c in self.culprits
        ):  # only stopping before it helps
            first = min(c.record.ordinal for c in self.culprits)
            self.cured = len(everything.graphs) == 1 or self.judge.each(first).good

    def _turns(self, count: int, without: tuple[str, ...]) -> list[int]:
        """The numbers of rewrites at which right turns into wrong; more than one is rare."""

        def good(limit: int) -> bool:
            return self.outcome(limit if limit < count else None, without).good

        lo, hi = 0, count
        seen = {0: True, count: False}
        while hi - lo > 1:
            middle = (lo + hi) // 2
            seen[middle] = good(middle)
            lo, hi = (middle, hi) if seen[middle] else (lo, middle)
        if self.judge.repeats and (not good(lo) or self._again(hi, count, without)):
            self.status = "flaky"
            self.notes.append(f"{hi} rewrites were wrong at first and right when asked again")
            return []
        for limit in _gaps(seen, lo, hi, count):
            seen[limit] = good(limit)
            if seen[limit] != (limit <= lo):
                return self._scan(count, good)
        return [hi]

    def _again(self, limit: int, count: int, without: tuple[str, ...]) -> bool:
        return self.outcome(limit if limit < count else None, without, again=True).good

    def _scan(self, count: int, good: Any) -> list[int]:
        """Every number of rewrites, where the verdict turns more than once."""
        self.monotone = False
        verdicts = [good(limit) for limit in range(count + 1)]
        self.notes.append(
            f"the verdict turns more than once, so every number was tried: {_stretches(verdicts)}"
        )
        return [k for k in range(1, count + 1) if verdicts[k - 1] and not verdicts[k]]

    def _blame(self, everything: Outcome, limit: int, without: tuple[str, ...]) -> None:
        """Write down the rewrite that a turn at `limit` accuses."""
        ran, record = everything.place(limit - 1)
        count = len(everything.graphs)
        nth = 1 + next(i for i, g in enumerate(everything.graphs) if g is ran)
        key = limit if limit < len(everything.rewrites) else None
        detail = self.outcome(key, without).detail
        alone = None
        if isinstance(self.judge, ContractJudge):
            alone = self.judge.alone(record.ordinal, without)
        whole = ran.captured if record.kind == "global" else None
        self.culprits.append(
            Culprit(
                record=record,
                without=without,
                detail=detail,
                alone=alone,
                reference=code_of(record.reference, "before", whole),
                replacement=code_of(record.replacement, "after", whole),
                change=change_of(record, whole) if whole is not None else "",
                cure=cure(self.spec, [record.rule])
                if record.kind == "local"
                else f"max_rewrites={record.ordinal}",
                graph=f"graph {nth} of {count}: {ran.label}" if count > 1 else "",
            )
        )

    def _tell_rounding(self) -> None:
        """Say where nothing but rounding is wrong, which in small tensors can be chance."""
        exact = [c for c in self.culprits if "in float64" in c.detail]
        if isinstance(self.judge, ContractJudge) and self.culprits and not exact:
            self.notes.append(
                "in float64 both graphs agree, so only the rounding is worse than eager's; in "
                "small tensors that can be chance: try other inputs"
            )

    def _leave_out_each(self, everything: Outcome) -> None:
        """The run without each rule that fired."""
        fired = [r.rule for r in everything.rewrites if r.kind == "local"]
        for rule in dict.fromkeys(fired):
            good = self.outcome(None, (rule,)).good
            self.rules.append(RuleTrial(rule, fired.count(rule), good))
        guilty = list(dict.fromkeys(c.rule for c in self.culprits))
        if len(guilty) > 1:
            alone = [r.rule for r in self.rules if r.good]
            self.notes.append(
                f"several rules are guilty together: {', '.join(guilty)}"
                if not alone
                else f"leaving out any one of {', '.join(alone)} is enough"
            )

    # ---- the result

    def result(self, model: str, judged_by: str, seconds: float) -> BisectResult:
        """What was found."""
        local = list(dict.fromkeys(c.rule for c in self.culprits if c.record.kind == "local"))
        first = min((c.record.ordinal for c in self.culprits), default=0)
        strange = max((outcome.strange for outcome in self.known.values()), default=0)
        if strange:
            self.notes.append(
                f"some runs met graphs (up to {strange}) that the run with all rewrites did not, "
                "and left them without rewrites; a predicate that calls with the same sizes and "
                "modes each time has all of its graphs searched"
            )
        # Where a pass itself is guilty, only stopping before it helps.
        only_rules = len({c.rule for c in self.culprits}) == len(local)
        text = cure(self.spec, local) if only_rules else f"max_rewrites={first}"
        return BisectResult(
            model=model,
            judged_by=judged_by,
            status=self.status,
            rewrites=self.count,
            graphs=self.graphs,
            culprits=tuple(self.culprits),
            suspects=self.suspects,
            rules=tuple(self.rules),
            monotone=self.monotone,
            cure=text if self.culprits else "",
            cured=self.cured,
            trials=tuple(self.trials),
            notes=tuple(self.notes),
            seconds=seconds,
        )


def cure(spec: Any, names: Sequence[str]) -> str:
    """The `rules=` argument that leaves some rules out of the user's own.

    Example:
        >>> cure("default", ["glu", "rope"])
        'rules="default,-glu,-rope"'
    """
    if isinstance(spec, (str, Rule)):
        spec = (spec,)
    texts = [i for i in spec if isinstance(i, str)]
    own = [i for i in spec if isinstance(i, Rule)]
    minus = [f"-{n}" for n in names if n not in {r.name for r in own}]
    text = ",".join([*(texts or ["default"]), *minus])
    kept = [r.name for r in own if r.name not in names]
    if not kept:
        return f'rules="{text}"'
    return f'rules=["{text}", {", ".join(kept)}]'


def _gaps(seen: Mapping[int, bool], lo: int, hi: int, count: int) -> list[int]:
    """A few numbers not tried yet, in the middle of the widest gaps on each side of the turn."""
    chosen = []
    for low, high in ((0, lo), (hi, count)):
        points = sorted(k for k in seen if low <= k <= high)
        widths = sorted(((b - a, a) for a, b in itertools.pairwise(points)), reverse=True)
        chosen += [a + width // 2 for width, a in widths[:PROBES] if width > 1]
    return chosen


def _stretches(verdicts: Sequence[bool]) -> str:
    """Runs of equal verdicts in words: "right with 0 to 4, wrong with 5 to 8"."""
    words, start = [], 0
    for k in range(1, len(verdicts) + 1):
        if k == len(verdicts) or verdicts[k] != verdicts[start]:
            span = f"{start}" if k - 1 == start else f"{start} to {k - 1}"
            words.append(f"{'right' if verdicts[start] else 'wrong'} with {span}")
            start = k
    return ", ".join(words)
