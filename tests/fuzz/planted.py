"""The mutation check: plant each fault, see which check catches it; none may survive.

    python tests/fuzz/planted.py                 the table, each fault on its own small program
    python tests/fuzz/planted.py --random 300    and which random program is the first to show it

Exit code 1 when a fault survives.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from faults import FAULTS, Fault
from harness import CHECKS, Outcome, examine, examine_seed


def caught_by(fault: Fault) -> Outcome:
    """What the checks say of the fault's own program while it is planted."""
    with fault.plant():
        return examine(fault.program, fault.scenario)


def first_random(fault: Fault, programs: int) -> int | None:
    """The first random program that shows the fault, None where none does."""
    with fault.plant():
        return next((s for s in range(programs) if examine_seed(s)[2].faults), None)


def table(random: int = 0) -> tuple[str, list[str]]:
    """The table as Markdown, and the faults that survive."""
    heads = ["planted fault", *CHECKS] + (["random program"] if random else [])
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    survivors = []
    for fault in FAULTS:
        outcome = caught_by(fault)
        cells = ["x" if check in outcome.faults else "" for check in CHECKS]
        if random:
            seed = first_random(fault, random)
            cells.append("none" if seed is None else f"#{seed}")
        if not outcome.faults:
            survivors.append(f"{fault.name} {outcome.skipped}".rstrip())
        lines.append(f"| {' | '.join([fault.name, *cells])} |")
        print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines), survivors


def main(argv: list[str] | None = None) -> int:
    """Print the table; 1 when a fault survives."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--random", type=int, default=0, help="random programs to try for each")
    options = parser.parse_args(argv)
    text, survivors = table(options.random)
    print(text)
    print(
        f"\n{len(FAULTS)} faults planted, {len(survivors)} survived{': ' if survivors else ''}"
        + "; ".join(survivors)
    )
    return int(bool(survivors))


if __name__ == "__main__":
    sys.exit(main())
