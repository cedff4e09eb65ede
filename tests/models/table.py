"""Print models beside the error contract: model x (mode, shape) -> errors, rewrites, seconds, peak.

python tests/models/table.py [model ...] [--autocast [bf16|fp16]] [--device cuda] [--verify]

A model is named as in the zoo or the sweep; by default it is those of `DEFAULT`. The peak is that
of a training step, measured (`peaks`), beside eager's; under autocast ours may be larger by the
low-precision copies of the parameters, two bytes each.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from architectures import ARCHITECTURES
from contract import judge, optimized
from peaks import peak_of
from unet import UNET
from zoo import SHAPES, Entry

import graphopt
from graphopt.precision import LOW

MODELS: dict[str, Entry] = {a.name: a.entry for a in ARCHITECTURES} | {"unet": UNET}
DEFAULT = [a.name for a in ARCHITECTURES if a.first] + ["deit", "unet"]


def rows(name: str, device: str, autocast: torch.dtype | None, prove: bool) -> bool:
    """Print the rows of one model; whether all keep the contract."""
    entry, good = MODELS[name], True
    for training in (True, False):
        model = entry.make(training=training, device=device)
        with torch.autocast(device, autocast, enabled=autocast is not None):
            start = time.perf_counter()
            opt = optimized(model, entry.batch(0, device))
            seconds = time.perf_counter() - start
            rewrites = len(opt.rewrites)
            proof = graphopt.verify(opt, (), entry.batch(0, device)) if prove else None
        peaks = None
        if training:
            peaks = [peak_of(c, model, entry.batch(0, device), autocast) for c in (model, opt)]
        copies = 0 if autocast is None else 2 * sum(p.numel() for p in model.parameters())
        told, kept = peak_text(peaks, copies)
        good = good and kept
        for shape in SHAPES:
            found = judge(model, opt, entry.batch(shape, device), autocast)
            worst = found.worst
            good = good and found.passed
            print(
                f"{name:18s} {'train' if training else 'eval':6s} {shape:5d} "
                f"{found.geometric_mean:9.3f} {worst.ratio if worst else 1.0:7.2f} "
                f"{rewrites:9d} {seconds:8.1f} {told if shape == 0 else '':>19s}  "
                f"{'ok' if found.passed else found.reasons[0]}",
                flush=True,
            )
        if proof is not None and not proof.passed:
            good = False
            print(*(f"  {c}: {c.reason}" for c in proof.all if not c.passed), sep="\n", flush=True)
    return good


def peak_text(peaks: list[int] | None, copies: int) -> tuple[str, bool]:
    """Peaks of eager and ours in KiB and their ratio; whether ours is no larger than allowed."""
    if peaks is None:
        return "", True
    eager, ours = peaks
    kept = ours <= eager + copies
    text = f"{eager / 1024:.0f} {ours / 1024:.0f} {ours / eager:.2f}"
    return text + ("" if kept else " LARGER"), kept


def main() -> int:
    """Print the table; 1 when a row is outside the contract."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", help="default: 24 of them")
    parser.add_argument(
        "--autocast", nargs="?", const="bf16", choices=LOW, help="under autocast; bf16 if not named"
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--verify", action="store_true", help="prove every rewrite, too")
    options = parser.parse_args()
    autocast = LOW.get(options.autocast)
    head = ("geo.mean", "worst", "rewrites", "seconds", "peak KiB")
    print(
        f"{'model':18s} {'mode':6s} shape {head[0]:>9s} {head[1]:>7s} {head[2]:>9s} {head[3]:>8s} "
        f"{head[4]:>19s}"
    )
    names = options.models or DEFAULT
    unknown = sorted({*names} - {*MODELS})
    if unknown:
        parser.error(f"no model is called {', '.join(unknown)}")
    good = [rows(name, options.device, autocast, options.verify) for name in names]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
