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
    """Try the uses and print a table for each area, then the counts."""
    from graphopt.report.table import Table
    from graphopt.report.view import Heading, Part, show_parts

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--area", choices=sorted({u.area for u in USES}))
    area = parser.parse_args().area
    rows: dict[str, list[tuple[str, str]]] = {}
    bad = 0
    for use in USES:
        if area not in (None, use.area):
            continue
        outcome = tried(use)
        bad += bool(outcome.faults)
        said = str(outcome.error).strip().splitlines()[0]
        text = f"{type(outcome.error).__name__}: {said}"
        if outcome.faults:
            text = f"BAD: {'; '.join(outcome.faults)}"
        rows.setdefault(use.area, []).append((use.name, text[:300]))
    parts: list[Part] = []
    for name, lines in rows.items():
        parts += [Heading(name), Table(("wrong use", "what it raises"), tuple(lines))]
    total = sum(map(len, rows.values()))
    show_parts([*parts, f"{total} wrong uses, {bad} not as they must be"])
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
