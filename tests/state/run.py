"""The long run of the state machine: counts its steps, and prints the first failure at once.

    python tests/state/run.py --examples 200 --steps 40 --seed 1 --jobs 2 [--only mlp,conv]

The runs of a model are split into parts of a few, each with a seed of its own, whatever the number
of jobs: the same options do the same. The exit code is 1 when the two differed. A failure is shrunk
unless `--no-shrink` is given.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import multiprocessing
import runpy
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test
from state_machine import Twins
from state_models import SUBJECTS

import graphopt

# what every test session prepares, so that timm and transformers import beside a CPU build of torch
PREPARED = runpy.run_path(str(Path(__file__).resolve().parents[1] / "conftest.py"))

PART = 5
"""So many runs of one model are one piece of work."""


@dataclasses.dataclass(frozen=True)
class Part:
    """Some runs of one model, and how they are done."""

    model: str
    seed: int
    examples: int
    steps: int
    shrink: bool


@dataclasses.dataclass
class Done:
    """What came of a part: how often each rule ran, the failure if there was one, seconds."""

    part: Part
    counts: collections.Counter[str]
    failure: str
    seconds: float


def run_part(part: Part) -> Done:
    """Run the machine for one part."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", graphopt.GraphoptWarning)
    subject = next(s for s in SUBJECTS if s.name == part.model)
    counts: collections.Counter[str] = collections.Counter()
    machine = type(f"Twins_{subject.name}", (Twins,), {"subject": subject, "counts": counts})
    chosen = settings(
        max_examples=part.examples,
        stateful_step_count=part.steps,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink] if part.shrink else [Phase.generate],
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    start, failure = time.perf_counter(), ""
    try:
        run_state_machine_as_test(seed(part.seed)(machine), settings=chosen)
    except Exception:
        failure = traceback.format_exc()
    return Done(part, counts, failure, time.perf_counter() - start)


def parts_of(models: list[str], given: argparse.Namespace) -> list[Part]:
    """All parts, the models taking turns so that all jobs end at about the same time."""
    sizes = [min(PART, given.examples - done) for done in range(0, given.examples, PART)]
    return [
        Part(model, 1000 * given.seed + i, size, given.steps, not given.no_shrink)
        for i, size in enumerate(sizes)
        for model in models
    ]


def results(parts: list[Part], jobs: int) -> Iterator[Done]:
    """What came of all parts, from as many processes as are asked for."""
    if jobs <= 1:
        yield from map(run_part, parts)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap_unordered(run_part, parts)


def main() -> int:
    """Run the machine for each model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=100, help="runs for each model")
    parser.add_argument("--steps", type=int, default=40, help="at most so many steps a run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--only", default="", help="names of models, with commas between")
    parser.add_argument("--no-shrink", action="store_true")
    given = parser.parse_args()
    known = [s.name for s in SUBJECTS]
    models = given.only.split(",") if given.only else known
    if unknown := sorted(set(models) - set(known)):
        parser.error(f"no model is called {unknown[0]}; there are {', '.join(known)}")
    totals = {name: collections.Counter[str]() for name in models}
    seconds: collections.Counter[str] = collections.Counter()
    failed: collections.Counter[str] = collections.Counter()
    start, parts = time.perf_counter(), parts_of(models, given)
    for number, done in enumerate(results(parts, given.jobs), 1):
        name = done.part.model
        totals[name].update(done.counts)
        seconds[name] += done.seconds
        if done.failure:
            failed[name] += 1
            print(f"{name}, seed {done.part.seed}:\n{done.failure}", flush=True)
        print(
            f"{number} of {len(parts)} parts, {failed.total()} with a mismatch, "
            f"{time.perf_counter() - start:.0f} s",
            file=sys.stderr,
            flush=True,
        )
    for name, counts in totals.items():
        verdict = f"MISMATCH in {failed[name]} parts" if failed[name] else "0 mismatches"
        print(f"{name}: {verdict}, {counts.total()} steps, {seconds[name]:.0f} s")
        print("   " + ", ".join(f"{k} {v}" for k, v in sorted(counts.items())))
    steps = sum(c.total() for c in totals.values())
    print(f"all: {failed.total()} mismatches, {steps} steps, {time.perf_counter() - start:.0f} s")
    return int(failed.total() > 0)


if __name__ == "__main__":
    sys.exit(main())
