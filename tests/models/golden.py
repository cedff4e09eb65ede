"""The golden table: how often each rule fires on each of the first architectures of the sweep.

    python tests/models/golden.py            compare with golden_counts.json
    python tests/models/golden.py --write    write what is found to golden_counts.json

A count that falls is a fusion that died; one that rises is to be looked at and written down.
"""

from __future__ import annotations

import argparse
import collections
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from architectures import ARCHITECTURES
from contract import optimized

FILE = Path(__file__).resolve().parent / "golden_counts.json"
CURE = "python tests/models/golden.py --write, when the change is meant"
MODES = ("train", "eval", "autocast")
Counts = dict[str, dict[str, int]]

MODELS = {a.name: a.entry for a in ARCHITECTURES if a.first}
"""What is in the table."""


def count(name: str) -> Counts:
    """Rule -> rewrites of one model: in training, in inference, in training under autocast.

    Dropout is as its config has it. Autocast is the CPU's, to bfloat16; its lists differ from a
    GPU's.
    """
    entry = MODELS[name]
    found: Counts = {}
    for mode in MODES:
        training = mode != "eval"
        cast = torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast")
        with torch.set_grad_enabled(training), cast:
            opt = optimized(entry.make(training=training, dropout=True), entry.batch(0))
        rules = collections.Counter(r.rule for r in opt.rewrites if r.kind == "local")
        found[mode] = dict(sorted(rules.items()))
    return found


def golden() -> dict[str, Counts]:
    """The committed table."""
    table: dict[str, Counts] = json.loads(FILE.read_text())
    return table


def differences(name: str, found: Counts, expected: Counts) -> list[str]:
    """One line for each rule whose count is not the committed one."""
    lines = []
    for mode in MODES:
        new, old = found.get(mode, {}), expected.get(mode, {})
        for rule in sorted({*new, *old}):
            a, b = old.get(rule, 0), new.get(rule, 0)
            if a != b:
                what = "fell" if b < a else "rose"
                lines.append(f"{name} {mode}: {rule} {what} from {a} to {b}")
    return lines


def main() -> int:
    """Compare, or write the table; 1 when something differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write golden_counts.json")
    write = parser.parse_args().write
    found = {name: count(name) for name in MODELS}
    if write:
        FILE.write_text(json.dumps(found, indent=1) + "\n")
        print(f"wrote {FILE.name}: {sum(len(c) for c in found.values())} graphs")
        return 0
    lines = [d for n in MODELS for d in differences(n, found[n], golden().get(n, {}))]
    print("\n".join([*lines, CURE] if lines else ["every count is the committed one"]))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
