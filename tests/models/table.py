"""Print the zoo beside the error contract: model x (mode, shape) -> errors, rewrites, seconds.

python tests/models/table.py [model ...] [--autocast [bf16|fp16]] [--device cuda] [--verify]
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from contract import judge, optimized
from zoo import SHAPES, ZOO

import graphopt
from graphopt.precision import LOW


def rows(name: str, device: str, autocast: torch.dtype | None, prove: bool) -> bool:
    """Print the rows of one model; whether all keep the contract."""
    entry, good = ZOO[name], True
    for training in (True, False):
        model = entry.make(training=training, device=device)
        with torch.autocast(device, autocast, enabled=autocast is not None):
            start = time.perf_counter()
            opt = optimized(model, entry.batch(0, device))
            seconds = time.perf_counter() - start
            rewrites = len(opt.rewrites)
            proof = graphopt.verify(opt, (), entry.batch(0, device)) if prove else None
        for shape in SHAPES:
            found = judge(model, opt, entry.batch(shape, device), autocast)
            worst = found.worst
            good = good and found.passed
            print(
                f"{name:10s} {'train' if training else 'eval':6s} {shape:5d} "
                f"{found.geometric_mean:9.3f} {worst.ratio if worst else 1.0:7.2f} "
                f"{rewrites:9d} {seconds:8.1f}  {'ok' if found.passed else found.reasons[0]}",
                flush=True,
            )
        if proof is not None and not proof.passed:
            good = False
            print(*(f"  {c}: {c.reason}" for c in proof.all if not c.passed), sep="\n", flush=True)
    return good


def main() -> int:
    """Print the table; 1 when a row is outside the contract."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", help="default: all")
    parser.add_argument(
        "--autocast", nargs="?", const="bf16", choices=LOW, help="under autocast; bf16 if not named"
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--verify", action="store_true", help="prove every rewrite, too")
    options = parser.parse_args()
    autocast = LOW.get(options.autocast)
    head = ("geo.mean", "worst", "rewrites", "seconds")
    print(
        f"{'model':10s} {'mode':6s} shape {head[0]:>9s} {head[1]:>7s} {head[2]:>9s} {head[3]:>8s}"
    )
    names = options.models or list(ZOO)
    good = [rows(name, options.device, autocast, options.verify) for name in names]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
