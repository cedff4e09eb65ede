"""One random program beside its optimized twin: every check, and which of them found a fault."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import math
import warnings
from collections.abc import Iterator, Mapping
from unittest import mock

import torch
from twins import Pair, Run, Scenario, same_memory

import graphopt
from graphopt import prover
from graphopt.graph import lint
from graphopt.luck import only_mean_failed
from graphopt.module import GraphoptModule
from graphopt.numerics import AGREEMENT, Comparison, compare
from graphopt.passes.fusion import linear as linear_rules
from graphopt.replay import dropout_arguments
from graphopt.testing.programs import Program, minimize, random_program
from graphopt.verdict import Check

DRAWS = 8
"""Over how many inputs a comparison is taken that fails on the first: luck averages out."""
SURE = 1000.0
"""From this ratio to eager's error on it is no luck."""
SURE_OF_KNOWN = 10_000.0
"""And from this one where torch's own op is known to round more: a saturated softmax, say."""
COARSER = 1.5
"""From this ratio to eager's error on, a rewrite is the reason where the whole rounds too much."""
TORCHS_OWN = ("gelu", "gelu_tanh", "silu", "softmax", "attention", "cross_entropy")
"""Rules that bring a spelled-out form to torch's own op, which may round more in a bad spot: where
1 + erf(x) cancels, say. Right in float64 all the same."""
GROUPS = {"output": "values", "grad": "gradients", "buffer": "effects", "input": "effects"}


@dataclasses.dataclass
class Outcome:
    """What was found.

    Attributes:
        faults: check -> what is wrong; the checks are those of `CHECKS`.
        rules: how often each rule fired.
        skipped: why the program was not run ("refused", "invalid"), "" when it was.
        notes: what was left out of the comparison.
        log_ratio: sum of the logarithms of the error ratios, and over how many tensors. The mean of
            one small program is its one kernel's own rounding; the contract asks it of the run.
    """

    faults: dict[str, str] = dataclasses.field(default_factory=dict)
    rules: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    skipped: str = ""
    notes: set[str] = dataclasses.field(default_factory=set)
    log_ratio: tuple[float, int] = (0.0, 0)

    def add_ratios(self, comparison: Comparison) -> None:
        """Take the error ratios of a comparison into the mean of the run."""
        ratios = [t.ratio for t in comparison.tensors if t.optimized and 0 < t.ratio < math.inf]
        log, count = self.log_ratio
        self.log_ratio = log + sum(map(math.log, ratios)), count + len(ratios)

    def __str__(self) -> str:
        return "\n".join(f"{check}: {what}" for check, what in self.faults.items())


CHECKS = (
    "error",
    "verify rewrite",
    "verify whole",
    "values",
    "gradients",
    "effects",
    "memory",
    "lint",
    "state",
)


def examine_seed(seed: int) -> tuple[Program, Scenario, Outcome]:
    """The program and scenario of a seed, run."""
    program = random_program(seed)
    scenario = Scenario.of(seed, program)
    return program, scenario, examine(program, scenario)


def examine(program: Program, scenario: Scenario) -> Outcome:
    """Optimize a program and compare all that can be seen of it with eager."""
    found = Outcome()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pair = Pair(program, scenario)
        try:
            pair.eager_run(scenario.seed)
        except Exception as error:  # cut down too far, say: no fault of anyone's
            found.skipped = f"invalid: {type(error).__name__}"
            return found
        try:
            with small():
                _examine(pair, found)
        except graphopt.CaptureError as error:
            found.skipped = "refused: " + str(error).splitlines()[0]
        except Exception as error:
            found.faults["error"] = f"{type(error).__name__}: {error}"
    return found


@contextlib.contextmanager
def small() -> Iterator[None]:
    """Let `pad_linear` fire on small sizes; no more draws for a mean that is not judged here."""
    with mock.patch.object(linear_rules, "WORTH", 1), mock.patch.object(prover, "DRAWS", 1):
        yield


# ------------------------------------------------------------------------------------ corpus, size


def cut_down(program: Program, scenario: Scenario, outcome: Outcome) -> Program:
    """The smallest program found that still fails one of the same checks."""
    wanted = set(outcome.faults)
    return minimize(program, lambda p: bool(wanted & set(examine(p, scenario).faults)), limit=150)


def entry(program: Program, scenario: Scenario, why: str) -> str:
    """An entry for the corpus, as JSON with a line for each part."""
    plain = dataclasses.asdict(Scenario())
    changed = {k: v for k, v in dataclasses.asdict(scenario).items() if v != plain[k]}
    parts = {"why": why, "scenario": changed, **program.to_dict()}
    body = "[\n  " + ",\n  ".join(map(json.dumps, parts["body"])) + "\n ]"
    lines = [f' "{k}": {body if k == "body" else json.dumps(v)}' for k, v in parts.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def read_entry(text: str) -> tuple[Program, Scenario]:
    """What `entry` wrote."""
    data = json.loads(text)
    return Program.from_dict(data), Scenario(**data["scenario"])


# ----------------------------------------------------------------------------------------- checks


def _examine(pair: Pair, found: Outcome) -> None:
    """All checks, in the order in which they say most."""
    scenario = pair.scenario
    pair.reset()
    with pair.ambient():
        pair.opt = graphopt.optimize(
            pair.source,
            pair.inputs(scenario.seed),
            dynamic=True if scenario.dynamic else "auto",
            max_rewrites=scenario.rewrites,
            precision="bf16" if scenario.lowered else None,
        )
    _look(pair, found, scenario.seed, None)
    if scenario.resized:
        sizes = dict(pair.program.other_sizes)
        with pair.ambient():
            pair.opt.capture(pair.inputs(scenario.seed + 1, sizes))
        _look(pair, found, scenario.seed + 1, sizes)


def _look(pair: Pair, found: Outcome, seed: int, sizes: Mapping[str, int] | None) -> None:
    """The checks at one size."""
    opt = pair.opt
    assert opt is not None
    found.rules.update(r.rule for r in opt.rewrites)
    # With a limit, the last cleaning does not run, and a result that nothing reads may stay.
    _check_lint(opt, found, () if pair.scenario.rewrites is None else ("no dead nodes",))
    known = _check_verify(pair, found, seed, sizes)
    if any(dropout_arguments(n) and str(n.target).startswith("aten.") for n in opt.graph.nodes):
        found.notes.add("a dropout draws from torch's own generator: compared by verify alone")
        return
    _check_runs(pair, found, seed, sizes, known)
    _check_state(pair, found)


def _check_lint(opt: GraphoptModule, found: Outcome, skip: tuple[str, ...]) -> None:
    broken = [f"{v.rule}: {v.node} {v.message}" for v in lint.violations(opt.body, skip=skip)]
    if broken:
        found.faults["lint"] = "; ".join(broken[:3])


def _check_verify(pair: Pair, found: Outcome, seed: int, sizes: Mapping[str, int] | None) -> str:
    """`graphopt.verify`; what only rounds too much must do so on most of several inputs.

    Returns:
        Why the whole may round more than eager does, "" where it may not.
    """
    wrong = collections.Counter[str]()
    reasons: dict[str, str] = {}
    known = _known_rounding(pair)
    for draw in range(5):
        with pair.ambient():
            result = graphopt.verify(pair.opt, pair.inputs(seed + 100 * draw, sizes))
        for check in result.checks:
            if check.rule in TORCHS_OWN and _coarser(check.comparison):
                known = known or f"torch's own {check.rule} rounds more than what was written out"
        for check in (*result.unchecked, *result.wrong):
            sure = not _rounds_too_much(check)
            if not sure and (known or _no_measure(check.comparison)):
                continue
            wrong[str(check)] += 5 if sure else 1
            reasons[str(check)] = check.reason
        if not wrong or max(wrong.values()) >= 5:
            break
    for name, count in wrong.items():
        if count >= 4:
            kind = "verify whole" if name == "the whole step" else "verify rewrite"
            found.faults[kind] = f"{name}: {reasons[name]}"
    if known:
        found.notes.add(known)
    return known


def _rounds_too_much(check: Check) -> bool:
    """Whether a check failed by the error contract alone: right in float64, too coarse."""
    agrees = check.agreement is not None and check.agreement <= AGREEMENT  # None: not checked
    return agrees and check.comparison is not None and not check.comparison.passed


def _coarser(comparison: Comparison | None) -> bool:
    """Whether a rewrite alone rounds so much more that a whole step may be off by it."""
    worst = None if comparison is None else comparison.worst
    return worst is not None and worst.ratio > COARSER


def _no_measure(comparison: Comparison | None) -> bool:
    """Whether only the mean is off, or only float64 tensors, for which there is no better truth."""
    if comparison is None or only_mean_failed(comparison):
        return comparison is not None
    return all(t.passed or t.dtype == "float64" for t in comparison.tensors)


def _known_rounding(pair: Pair) -> str:
    """Why this graph may round more than eager by one of its steps, "" where it may not."""
    opt = pair.opt
    assert opt is not None
    for record in opt.rewrites:
        if record.rule == "cast_before_view" and any("expand" in op for op in record.ops_before):
            return "a cast moved above an expand: its gradient is summed in low precision"
    if any(r.rule == "attention" for r in opt.rewrites):
        return "attention written out became aten's kernel"
    return ""


def _check_runs(
    pair: Pair, found: Outcome, seed: int, sizes: Mapping[str, int] | None, known: str
) -> None:
    """Two calls in a row beside eager's; what only rounds too much must do so for most inputs."""
    drawn = [_two_calls(pair, seed, sizes)]
    precision = torch.bfloat16 if known else torch.float32
    found.add_ratios(_compare(drawn[0], precision))
    wrong = collections.Counter[str]()
    for draw in range(DRAWS):
        if draw:
            drawn.append(_two_calls(pair, seed + 100 * draw, sizes))
        for tensor in _compare(drawn[-1], precision).tensors:
            if not tensor.passed and (not known or tensor.ratio > SURE):
                name = tensor.name.partition("#")[0]
                sure = not tensor.ratio <= SURE
                wrong[name] += DRAWS if sure else 1
                if wrong[name] >= 0.75 * 2 * DRAWS or sure:
                    check = GROUPS[name.partition("/")[0]]
                    found.faults.setdefault(check, f"{name}: {tensor.verdict}")
        if not wrong or found.faults:
            break
    eager, optimized = drawn[0][0], drawn[0][1]
    if pair.all_double:
        _check_double(eager, optimized, found)
    for a, b in zip(eager, optimized, strict=True):
        if not same_memory(a, b):
            found.faults["memory"] = f"strides and sharing {b.memory} where eager has {a.memory}"
        elif a.requires_grad != b.requires_grad:
            found.faults["memory"] = f"requires_grad {b.requires_grad}, eager {a.requires_grad}"


def _check_double(eager: list[Run], optimized: list[Run], found: Outcome) -> None:
    """A program in float64 throughout agrees with eager to nearly all digits."""
    for a, b in zip(eager, optimized, strict=True):
        for t in compare(a.tensors, b.tensors, a.tensors, mean_counts=False).tensors:
            if not t.difference <= 1e-11:
                check = GROUPS[t.name.partition("/")[0]]
                found.faults.setdefault(
                    check, f"{t.name}: differs by {t.difference:.1e} in float64"
                )


def _two_calls(pair: Pair, seed: int, sizes: Mapping[str, int] | None) -> list[list[Run]]:
    """Eager's, graphopt's and float64's runs of two calls from one state of the generator."""
    pair.reset()
    runs = []
    for run in (pair.eager_run, pair.optimized_run, pair.double_run):
        torch.manual_seed(seed)
        runs.append([run(seed, sizes), run(seed + 50, sizes)])
    return runs


def _compare(runs: list[list[Run]], precision: torch.dtype) -> Comparison:
    """The contract over all values, gradients and effects of both calls.

    In float64 there is nothing to measure eager against (`_check_double` does without); elsewhere
    a float64 tensor carries the rounding of the float32 ones that it was made from.
    """
    eager, optimized, exact = (
        {f"{name}#{i}": t for i, run in enumerate(calls) for name, t in run.tensors.items()}
        for calls in runs
    )
    return compare(eager, optimized, exact, mean_counts=False, precision=precision)


def _check_state(pair: Pair, found: Outcome) -> None:
    """The same state_dict, over the very tensors of the source."""
    assert pair.opt is not None
    ours, own = pair.opt.state_dict(), pair.source.state_dict()
    if list(ours) != list(own) or any(ours[k].data_ptr() != own[k].data_ptr() for k in own):
        found.faults["state"] = "state_dict differs from the source's"
    if any(
        p is not q for p, q in zip(pair.opt.parameters(), pair.source.parameters(), strict=True)
    ):
        found.faults["state"] = "the parameters are not the source's"
