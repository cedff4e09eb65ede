"""Print every wrong use beside what it raises: python tests/misuse/table.py [--area NAME]

The exit code is 1 where something is not as it must be.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from every_use import USES
from use import tried


def main() -> int:
    """Try the uses and print one line each, then the counts."""
    from graphopt.report.table import Table
    from graphopt.report.view import show_parts

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--area", choices=sorted({u.area for u in USES}))
    area = parser.parse_args().area
    chosen = [u for u in USES if area in (None, u.area)]
    rows, bad = [], 0
    for use in chosen:
        outcome = tried(use)
        bad += bool(outcome.faults)
        text = str(outcome.error).strip().splitlines() or [""]
        said = "; ".join(outcome.faults) if outcome.faults else text[0]
        kind = type(outcome.error).__name__
        rows.append((use.area, use.name, kind, "BAD" if outcome.faults else "good", said[:200]))
    table = Table(("area", "wrong use", "error", "", "what it says"), tuple(rows))
    show_parts([table, f"{len(rows)} wrong uses, {bad} not as they must be"])
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
