"""The long run: many random programs through every pass; prints counts and what each rule did.

    python tests/fuzz/run.py --programs 2000 --seed 0 --jobs 2

A program that fails is cut down to few lines that still fail the same check, printed as a
stand-alone script and, with `--save DIR`, written there as an entry for the corpus. Progress goes
to stderr. The exit code is 1 when a program failed.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import math
import multiprocessing
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from harness import Outcome, cut_down, entry, examine_seed

from graphopt.passes import all_rules

MEAN = 1.05
"""The contract's geometric mean of error ratios, asked of all programs of a run together."""


@dataclasses.dataclass
class Totals:
    """What a run found."""

    programs: int = 0
    compared: int = 0
    rules: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    skipped: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    notes: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    failed: list[int] = dataclasses.field(default_factory=list)
    log: float = 0.0
    ratios: int = 0

    def add(self, seed: int, outcome: Outcome) -> None:
        """Take in what one program gave."""
        self.programs += 1
        self.compared += not outcome.skipped
        self.rules.update(outcome.rules)
        self.notes.update(outcome.notes)
        if outcome.skipped:
            self.skipped[outcome.skipped] += 1
        if outcome.faults:
            self.failed.append(seed)
        self.log += outcome.log_ratio[0]
        self.ratios += outcome.log_ratio[1]

    @property
    def mean(self) -> float:
        """Geometric mean of graphopt's errors over eager's."""
        return math.exp(self.log / self.ratios) if self.ratios else 1.0

    @property
    def silent(self) -> list[str]:
        """Rules that never fired."""
        return [r.name for r in all_rules() if not self.rules[r.name]]

    def __str__(self) -> str:
        fired = sorted(self.rules.items(), key=lambda item: -item[1])
        lines = [
            f"{self.programs} programs, {self.compared} compared with eager and float64: "
            f"{len(self.failed)} mismatches {self.failed or ''}".rstrip(),
            f"error over eager's, geometric mean of {self.ratios} tensors: {self.mean:.3f} "
            f"(at most {MEAN})",
            f"{sum(self.rules.values())} rewrites:",
            *(f"  {count:6d}  {name}" for name, count in fired),
            f"rules that never fired: {', '.join(self.silent) or 'none'}",
        ]
        for title, counts in (("not run", self.skipped), ("notes", self.notes)):
            lines += [f"{title}:"] if counts else []
            lines += [f"  {count:6d}  {what}" for what, count in counts.most_common()]
        return "\n".join(lines)


def one(seed: int) -> tuple[int, Outcome]:
    """The outcome of one seed, for a worker."""
    torch.set_num_threads(1)
    return seed, examine_seed(seed)[2]


def outcomes(seeds: range, jobs: int) -> Iterator[tuple[int, Outcome]]:
    """Outcomes of all seeds, from as many processes as are asked for."""
    if jobs <= 1:
        yield from map(one, seeds)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap_unordered(one, seeds, chunksize=4)


def show_failure(seed: int, save: Path | None) -> None:
    """Print a failing program cut down, and keep it."""
    program, scenario, outcome = examine_seed(seed)
    print(f"\nseed {seed}: {outcome}\n{scenario}\n", flush=True)
    if not outcome.faults:
        print("it passed when it was run again")
        return
    small = cut_down(program, scenario, outcome)
    print(f"# cut down from {program.calls} instructions to {small.calls}\n{small.script()}")
    if save is not None:
        save.mkdir(parents=True, exist_ok=True)
        (save / f"seed_{seed}.json").write_text(entry(small, scenario, str(outcome)))


def main(argv: list[str] | None = None) -> int:
    """Run the programs; 1 when one of them failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--programs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--save", type=Path, help="directory for programs that fail")
    options = parser.parse_args(argv)
    totals, start = Totals(), time.perf_counter()
    for seed, outcome in outcomes(
        range(options.seed, options.seed + options.programs), options.jobs
    ):
        totals.add(seed, outcome)
        if outcome.faults:
            print(f"seed {seed}: {outcome}", file=sys.stderr, flush=True)
        if totals.programs % 50 == 0:
            seconds = time.perf_counter() - start
            print(
                f"{totals.programs} of {options.programs} programs, "
                f"{len(totals.failed)} mismatches, {seconds:.0f} s",
                file=sys.stderr,
                flush=True,
            )
    for seed in totals.failed:
        show_failure(seed, options.save)
    print(totals)
    return int(bool(totals.failed) or totals.mean > MEAN)


if __name__ == "__main__":
    sys.exit(main())
