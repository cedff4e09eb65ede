"""The long run of the state machine: counts its steps, and prints the first failure at once.

    python tests/state/run.py --examples 200 --steps 40 --seed 1 [--only mlp,conv]

The exit code is 1 when the two differed. A failure is shrunk unless `--no-shrink` is given.
"""

from __future__ import annotations

import argparse
import collections
import runpy
import sys
import time
import traceback
import warnings
from pathlib import Path

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test
from state_machine import Twins
from state_models import SUBJECTS

import graphopt

# what every test session prepares, so that timm and transformers import beside a CPU build of torch
PREPARED = runpy.run_path(str(Path(__file__).resolve().parents[1] / "conftest.py"))


def main() -> int:
    """Run the machine for each model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=100, help="runs for each model")
    parser.add_argument("--steps", type=int, default=40, help="at most so many steps a run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="names of models, with commas between")
    parser.add_argument("--no-shrink", action="store_true")
    given = parser.parse_args()
    warnings.simplefilter("ignore", graphopt.GraphoptWarning)
    known = [s.name for s in SUBJECTS]
    chosen = given.only.split(",") if given.only else known
    if unknown := sorted(set(chosen) - set(known)):
        parser.error(f"no model is called {unknown[0]}; there are {', '.join(known)}")
    failed = 0
    for subject in SUBJECTS:
        if subject.name not in chosen:
            continue
        counts: collections.Counter[str] = collections.Counter()
        machine = type(f"Twins_{subject.name}", (Twins,), {"subject": subject, "counts": counts})
        phases = [Phase.generate] if given.no_shrink else [Phase.generate, Phase.shrink]
        chosen_settings = settings(
            max_examples=given.examples,
            stateful_step_count=given.steps,
            database=None,
            deadline=None,
            phases=phases,
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
        )
        start, verdict = time.perf_counter(), "0 mismatches"
        try:
            run_state_machine_as_test(seed(given.seed)(machine), settings=chosen_settings)
        except Exception:
            traceback.print_exc()
            verdict, failed = "MISMATCH", failed + 1
        seconds, steps = time.perf_counter() - start, sum(counts.values())
        print(f"{subject.name}: {verdict}, {steps} steps, {seconds:.0f} s", flush=True)
        print("   " + ", ".join(f"{k} {v}" for k, v in sorted(counts.items())), flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
