"""Which passes run, in which order, with which rules; and the one callback that watches them."""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import importlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from torch import fx

from graphopt.errors import OptionError
from graphopt.graph import lint
from graphopt.graph.body import Body
from graphopt.graph.record import Refusal, RewriteRecord
from graphopt.graph.text import ir_text
from graphopt.passes.apply import ApplyRules
from graphopt.passes.base import Log, Pass, Timer
from graphopt.passes.casts import NAME as PLACE
from graphopt.passes.casts import PlaceCasts
from graphopt.passes.clean import Clean
from graphopt.passes.merge import NAME as MERGE
from graphopt.passes.merge import MergeLinear
from graphopt.passes.observe import only
from graphopt.passes.payoff import ALWAYS
from graphopt.passes.rule import REGISTRY, Rule
from graphopt.passes.seed import SeedDropout
from graphopt.passes.strides import KeepOutputStrides
from graphopt.passes.weights import CastWeights
from graphopt.passes.wide import NAME as WIDE
from graphopt.passes.wide import WideGradients

RULE_MODULES = (
    "graphopt.passes.canonical.activation",
    "graphopt.passes.canonical.norm",
    "graphopt.passes.canonical.softmax",
    "graphopt.passes.canonical.rope",
    "graphopt.passes.canonical.attention",
    "graphopt.passes.canonical.mask",
    "graphopt.passes.canonical.grouped",
    "graphopt.passes.canonical.loss",
    "graphopt.passes.canonical.batch_norm",
    "graphopt.passes.canonical.view",
    "graphopt.passes.fusion.norm",
    "graphopt.passes.fusion.glu",
    "graphopt.passes.fusion.activation",
    "graphopt.passes.fusion.dropout",
    "graphopt.passes.fusion.cast",
    "graphopt.passes.fusion.linear",
    "graphopt.passes.fusion.loss",
)
"""Where the rules that ship with graphopt live; a new file of rules is named here."""


@dataclasses.dataclass(frozen=True)
class PassOptions:
    """What a user may choose about the passes.

    Attributes:
        fuse: whether op chains become fused kernels: True does where they pay (`payoff`), "always"
            everywhere; False leaves cleaning and canonical forms.
        rules: "default"; or names, globs and minus signs ("default,-rope", "layer_norm*"); or a
            sequence of these and of `Rule` objects of the user's own.
        max_rewrites: stop after so many rewrites, to bisect a wrong number.
    """

    fuse: bool | str = True
    rules: str | Rule | Iterable[str | Rule] = "default"
    max_rewrites: int | None = None


@dataclasses.dataclass(frozen=True)
class Stage:
    """One pass as it ran: its name, the nodes it left, the rewrites it did, its seconds."""

    name: str
    nodes: int
    rewrites: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class PipelineResult:
    """What came out of the passes.

    Attributes:
        body: the optimized body.
        captured: the body as captured, untouched.
        rewrites: what was done, by ordinal.
        refusals: what nearly was, and why not.
        stages: the passes in the order in which they ran.
    """

    body: Body
    captured: Body
    rewrites: list[RewriteRecord]
    refusals: list[Refusal]
    stages: list[Stage]


def all_rules() -> list[Rule]:
    """Every rule that ships with graphopt, in the order in which equal patterns are tried."""
    for name in RULE_MODULES:
        importlib.import_module(name)
    order = {name: i for i, name in enumerate(RULE_MODULES)}
    return sorted(REGISTRY.values(), key=lambda r: order.get(r.module, len(order)))


OPTIONAL_PASSES = (PLACE, MERGE, WIDE)
"""Passes that `rules=` names as it names rules."""


def select_rules(spec: str | Rule | Iterable[str | Rule]) -> list[Rule]:
    """The rules that a `rules=` argument names.

    Args:
        spec: see `PassOptions.rules`.

    Raises:
        OptionError: for an unknown name, with the nearest known one; for a wrong type.

    Example:
        >>> "rope" in [r.name for r in select_rules("default,-rope")]
        False
    """
    return [r for r in _selected(spec).values() if isinstance(r, Rule)]


def select_passes(spec: str | Rule | Iterable[str | Rule]) -> list[str]:
    """The passes among `OPTIONAL_PASSES` that a `rules=` argument names.

    Args:
        spec: see `PassOptions.rules`.

    Raises:
        OptionError: as `select_rules`.

    Example:
        >>> select_passes("default"), select_passes("default,-merge_linear")
        (['place_casts', 'merge_linear'], ['place_casts'])
    """
    return [name for name, r in _selected(spec).items() if not isinstance(r, Rule)]


def _selected(spec: str | Rule | Iterable[str | Rule]) -> dict[str, Rule | None]:
    """What a `rules=` argument names: rules, and None for a pass."""
    rules = {r.name: r for r in all_rules()}
    known: dict[str, Rule | None] = {**rules, **dict.fromkeys(OPTIONAL_PASSES)}
    items: list[str | Rule] = []
    for part in [spec] if isinstance(spec, (str, Rule)) else _iterated(spec):
        items += (
            [p.strip() for p in part.split(",") if p.strip()] if isinstance(part, str) else [part]
        )
    chosen: dict[str, Rule | None] = {}
    if items and all(isinstance(i, Rule) or i.startswith("-") for i in items):
        chosen = dict(known)
    for item in items:
        if isinstance(item, Rule):
            if item.replacement is None:
                raise OptionError(f"rule {item.name!r} has no replacement", try_="@rule.replace")
            if chosen.get(item.name, item) is not item or known.get(item.name, item) is not item:
                raise OptionError(
                    f"two rules are called {item.name!r}", try_="give yours another name"
                )
            chosen[item.name] = item
        elif item == "default":
            chosen.update(known)
        else:
            names = _named(item.removeprefix("-"), known)
            for name in names:
                if item.startswith("-"):
                    chosen.pop(name, None)
                else:
                    chosen[name] = known[name]
    return chosen


def _iterated(spec: Iterable[str | Rule]) -> list[str | Rule]:
    try:
        items = list(spec)
    except TypeError:
        items = [spec]  # type: ignore[list-item]
    for item in items:
        if not isinstance(item, (str, Rule)):
            raise OptionError(
                f"rules= holds {item!r}, a {type(item).__name__}",
                why="it takes names, globs, minus signs, or Rule objects",
                try_="rules='default,-rope', or rules=['default', my_rule]",
            )
    return items


def _named(text: str, known: Iterable[str]) -> list[str]:
    names = fnmatch.filter(known, text)
    if not names:
        near = difflib.get_close_matches(text, known, n=1)
        raise OptionError(
            f"no rule is called {text!r}",
            try_=f"{near[0]!r}" if near else f"one of {', '.join(sorted(known))}",
        )
    return names


def pipeline(options: PassOptions, leading: tuple[Pass, ...] = ()) -> tuple[Pass, ...]:
    """The passes for some options, in order.

    Args:
        options: the user's choices.
        leading: passes that run first (the precision that an ambient autocast asks for).
    """
    rules = select_rules(options.rules)
    canonical = tuple(r for r in rules if r.family == "canonical")
    fusion = tuple(r for r in rules if r.family == "fusion")
    passes: tuple[Pass, ...] = (
        *leading,
        Clean(fold=False),
        ApplyRules("canonical", canonical),
        SeedDropout(),
        Clean(),
    )
    if not options.fuse:
        return passes
    casts = tuple(r for r in fusion if r.module == "graphopt.passes.fusion.cast")
    chosen = select_passes(options.rules)
    placed = (PlaceCasts(), ApplyRules("fusion", casts)) if PLACE in chosen else ()
    merged = (MergeLinear(),) if MERGE in chosen else ()
    wide = (WideGradients(),) if WIDE in chosen else ()
    cast = (*placed, *merged, CastWeights(), *wide)
    judged = options.fuse != ALWAYS
    return (*passes, ApplyRules("fusion", fusion, judged=judged), Clean(), *cast)


Watcher = Callable[[str, Body, Log], None]


def run_pipeline(
    body: Body,
    options: PassOptions | None = None,
    *,
    leading: tuple[Pass, ...] = (),
    trailing: tuple[Pass, ...] = (),
) -> PipelineResult:
    """Run the passes over a captured body.

    The body that is given stays as it is; the result holds a rewritten copy. Between passes the
    graph is linted. `GRAPHOPT_PRINT` and `GRAPHOPT_DUMP` show each stage, see `watchers`.

    Args:
        body: what capture made.
        options: the user's choices; None for the defaults.
        leading: passes that run before all others.
        trailing: passes that run behind all others.

    Raises:
        OptionError: for unknown rules.
        PassError: when a rule raises, or a pass leaves an invalid graph.
    """
    options = options or PassOptions()
    passes = (*pipeline(options, leading), KeepOutputStrides(body.graph), *trailing)
    work = body.copy()
    log = Log(options.max_rewrites)
    stages: list[Stage] = []
    watching = watchers()
    for watch in watching:
        watch("captured", work, log)
    for p in passes:
        done = len(log.rewrites)
        with Timer() as timer, only(work.autocast):  # what is made is valued as it will run
            p.run(work, log)
        lint.check(work, p.name, skip=("no dead nodes",))
        stages.append(Stage(p.name, len(work.graph.nodes), len(log.rewrites) - done, timer.seconds))
        for watch in watching:
            watch(p.name, work, log)
    return PipelineResult(work, body, log.rewrites, list(log.refusals.values()), stages)


def watchers() -> list[Watcher]:
    """What the environment asks to see of each stage.

    `GRAPHOPT_PRINT=before` prints the captured graph, `after` each pass's result, `changes` what
    each pass changed as a diff; several may be joined by commas. They print to stderr.
    `GRAPHOPT_DUMP=DIR` writes each stage as readable Python, numbered.

    Raises:
        OptionError: for another value of GRAPHOPT_PRINT, or a directory that cannot be written.
    """
    found: list[Watcher] = []
    wanted = [w.strip() for w in os.environ.get("GRAPHOPT_PRINT", "").split(",") if w.strip()]
    for word in wanted:
        if word not in ("before", "after", "changes"):
            raise OptionError(f"GRAPHOPT_PRINT={word}", try_="before, after or changes")
    if wanted:
        found.append(_Printer(frozenset(wanted)))
    if os.environ.get("GRAPHOPT_DUMP"):
        found.append(_Dumper(Path(os.environ["GRAPHOPT_DUMP"])))
    return found


class _Printer:
    def __init__(self, wanted: frozenset[str]) -> None:
        self.wanted = wanted
        self.last: list[str] = []

    def __call__(self, stage: str, body: Body, log: Log) -> None:
        lines = ir_text(body).splitlines()
        if "before" in self.wanted and stage == "captured":
            self._print(f"captured, {len(lines)} lines", lines)
        if "after" in self.wanted and stage != "captured":
            self._print(f"after {stage}", lines)
        if "changes" in self.wanted and stage != "captured" and lines != self.last:
            diff = difflib.unified_diff(
                self.last, lines, "before", f"after {stage}", lineterm="", n=1
            )
            self._print(f"changed by {stage}", list(diff))
        self.last = lines

    @staticmethod
    def _print(title: str, lines: list[str]) -> None:
        print(f"# graphopt: {title}", *lines, sep="\n", file=sys.stderr)


class _Dumper:
    count = 0

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=directory):
                pass
        except OSError as error:
            raise self._unwritable(error) from error

    def __call__(self, stage: str, body: Body, log: Log) -> None:
        from graphopt.graph.text import python_code

        name = f"{_Dumper.count:03d}_{stage}.py"
        _Dumper.count += 1
        try:
            (self.directory / name).write_text(python_code(body))
        except OSError as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> OptionError:
        return OptionError(
            f"GRAPHOPT_DUMP={self.directory} cannot be written",
            why=str(error),
            try_="a folder that can be made and written, or unset GRAPHOPT_DUMP",
        )


def graph_size(graph: fx.Graph) -> int:
    """How many ops a graph has, inputs and state left out."""
    return sum(n.op == "call_function" for n in graph.nodes)
