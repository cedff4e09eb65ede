"""Sweep over architectures: each is equal to eager, refused with its line, or wrong.

    python tests/models/sweep.py [--only gpt2,timm.vit] [--first] [--shapes 2]
                                 [--json FILE ...] [--markdown docs/models.md]

Each model runs in training (loss, outputs and every gradient, dropout at p = 0) and in inference,
at two shapes, with no attention_mask, one of ones and a padded one where it takes one. "equal" is
the error contract against float64; the result's class and the buffers after the step must be
eager's, too. A run without gradients has two tensors, whose errors scatter by 5% from batch to
batch: where their geometric mean is above the bound it is taken over 16 batches, then over 32, 64
and 128, and is wrong if it stays above. With --json the results are kept in FILE, and models that
are in it are not run again; of several files the first is written. With --markdown the table
replaces what stands between the two marks in that file.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import datetime
import functools
import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from architectures import ARCHITECTURES, BY_NAME, Architecture
from contract import eager_step, judge
from torch import nn
from zoo import Inputs

import graphopt
from graphopt.luck import only_mean_failed, pool
from graphopt.module import GraphoptModule
from graphopt.numerics import Comparison

APART = 1e-3
"""Eager's own relative error in float32, above which the captured graph is another program."""

DRAWS = (16, 32, 64, 128)
"""Batches over which the geometric mean is taken where it is above the bound over fewer."""

VERDICTS = ("equal", "refused", "wrong")
MARKS = ("<!-- table: begin -->", "<!-- table: end -->")


@dataclasses.dataclass
class Result:
    """What became of one architecture.

    Attributes:
        name: short name.
        verdict: "equal", "refused" or "wrong"; the worst over all runs.
        modes: "train" and "eval" -> the worst verdict in that mode.
        reason: why it was refused, or what is wrong, with the run.
        runs: how many (mode, mask, shape) were judged.
        geometric_mean: greatest geometric mean of the error ratios.
        ratio: greatest ratio of one tensor's errors.
        rewrites: local rewrites of the training graph.
        recaptures: captures after the first, over both modes.
        seconds: wall time of everything.
    """

    name: str
    verdict: str = "equal"
    modes: dict[str, str] = dataclasses.field(default_factory=dict)
    reason: str = ""
    runs: int = 0
    geometric_mean: float = 0.0
    ratio: float = 0.0
    rewrites: int = 0
    recaptures: int = 0
    seconds: float = 0.0

    def note(self, verdict: str, reason: str, mode: str) -> None:
        """Keep the worst verdict, of a mode and of all, and the first reason for it."""
        self.modes[mode] = max(verdict, self.modes.get(mode, VERDICTS[0]), key=VERDICTS.index)
        if VERDICTS.index(verdict) > VERDICTS.index(self.verdict):
            self.verdict, self.reason = verdict, reason


def sweep(architecture: Architecture, shapes: int = 2) -> Result:
    """Run one architecture in every mode, mask and shape."""
    result, start = Result(architecture.name), time.perf_counter()
    for mode in ("train", "eval"):
        training = mode == "train"
        model = architecture.entry.make(training=training)
        opt = _optimized(model)
        with torch.set_grad_enabled(training):
            for mask in architecture.masks:
                for shape in range(shapes):
                    run = f"mask {mask}, shape {shape}"
                    draw = functools.partial(architecture.batch, shape, mask)
                    _judge(result, mode, run, model, opt, draw)
        if training and result.verdict != "refused":
            result.rewrites = sum(r.kind == "local" for r in opt.rewrites)
        result.recaptures += len(opt.recaptures)
    result.seconds = time.perf_counter() - start
    return result


def _optimized(model: nn.Module) -> GraphoptModule:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", graphopt.GraphoptWarning)
        return graphopt.optimize(model, fuse="always")


def _judge(
    result: Result,
    mode: str,
    run: str,
    model: nn.Module,
    opt: GraphoptModule,
    draw: Callable[[int], Inputs],
) -> None:
    """Add one run to a result."""
    batch = draw(0)
    try:
        found = judge(model, opt, batch)
        if only_mean_failed(found) and not torch.is_grad_enabled():
            found = _over_many(found, lambda k: judge(model, opt, draw(k)))
        effects = _other_effects(model, opt, batch)
        apart = _apart(found) and _apart(found, _in_float64(model, batch))
    except graphopt.CaptureError as error:
        reason = f"{error.what} ({_short(error.at)}; {mode}, {run})"
        return result.note("refused", reason, mode)
    except Exception as error:  # whatever else is a fault, and the sweep goes on
        reason = f"{type(error).__name__}: {str(error)[:200]} ({mode}, {run})"
        return result.note("wrong", reason, mode)
    result.runs += 1
    result.geometric_mean = max(result.geometric_mean, found.geometric_mean)
    result.ratio = max(result.ratio, found.worst.ratio if found.worst else 0.0)
    reason = effects or apart or next(iter(found.reasons), "")
    result.note("wrong" if reason else "equal", f"{reason} ({mode}, {run})" if reason else "", mode)


def _over_many(first: Comparison, judged: Callable[[int], Comparison]) -> Comparison:
    """The geometric mean over more and more batches, until it is inside the bound or all are taken.

    The two outputs of a run without gradients scatter by 5% from batch to batch.
    """
    draws, found = [first], first
    for count in DRAWS:
        draws += [judged(k) for k in range(len(draws), count)]
        found = pool(draws)
        if not only_mean_failed(found):
            break
    return found


def _apart(found: Comparison, truth: dict[str, float] | None = None) -> str:
    """A tensor of eager that is far from the captured graph in float64: captured wrongly.

    Not so where the model itself in float64 is as far from eager (`truth`): batch norms over a
    handful of values lose digits.
    """
    far = [t for t in found.tensors if t.eager > APART and not t.step_scale]
    far = [t for t in far if truth is None or t.eager > 2 * truth.get(t.name, 0.0)]
    return f"{far[0].name}: eager is {far[0].eager:.1e} from its graph in float64" if far else ""


def _in_float64(model: nn.Module, batch: Inputs) -> dict[str, float]:
    """Name of an output or gradient -> relative distance of eager from the model in float64."""
    double = copy.deepcopy(model).double()
    state = {k: v.clone() for k, v in model.state_dict().items()}
    wide = {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
    exact, found = eager_step(double, wide, {}), eager_step(model, batch, {})
    model.load_state_dict(state)
    return {
        k: ((t.double() - e).norm() / e.norm()).item()
        for k, t in found.items()
        if t is not None and (e := exact[k]) is not None and t.is_floating_point()
    }


def _other_effects(model: nn.Module, opt: GraphoptModule, batch: Inputs) -> str:
    """What differs between the two in the result's class, its keys, or the buffers afterwards."""
    state = {k: v.clone() for k, v in model.state_dict().items()}
    seen: list[tuple[Any, dict[str, torch.Tensor]]] = []
    for module in (model, opt):
        result = module(**batch)
        seen.append((result, {k: v.clone() for k, v in model.named_buffers()}))
        model.load_state_dict(state)
    (a, before), (b, after) = seen
    if type(a) is not type(b) or getattr(a, "keys", list)() != getattr(b, "keys", list)():
        return f"the result is a {type(b).__name__}, eager's a {type(a).__name__}"
    for name, value in before.items():
        if not torch.allclose(value, after[name], rtol=1e-5, atol=1e-6, equal_nan=True):
            return f"buffer {name} differs from eager's"
    return ""


def _short(place: str | None) -> str:
    """A place with its path from site-packages on."""
    return " ".join((place or "no line").split("site-packages/")[-1].split())


def table(results: list[Result]) -> str:
    """The results as a Markdown table, and the counts."""
    lines = [
        "| model | train | eval | runs | rewrites | mean of ratios | worst ratio | why |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r.name} | {r.modes.get('train', '')} | {r.modes.get('eval', '')} | {r.runs}"
        f" | {r.rewrites} | {r.geometric_mean:.3f} | {r.ratio:.2f} | {r.reason.replace('|', '/')} |"
        for r in results
    ]
    counts = [f"{sum(r.verdict == v for r in results)} {v}" for v in VERDICTS]
    return "\n".join([*lines, "", f"{len(results)} models: {', '.join(counts)}."])


def heading() -> str:
    """Date and versions."""
    import timm
    import transformers

    versions = [f"{m.__name__} {m.__version__}" for m in (torch, transformers, timm)]
    cores = f"{os.cpu_count()} CPU cores"
    return f"{datetime.date.today()}, {cores}, float32, {', '.join(versions)}"


def into(page: str, text: str) -> str:
    """A page with a text between its two marks.

    Raises:
        ValueError: when the page lacks one.

    Example:
        >>> print(into(f"a\\n{MARKS[0]}\\nold\\n{MARKS[1]}\\nb", "new").splitlines()[2])
        new
    """
    before, begin, rest = page.partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    if not begin or not end:
        raise ValueError(f"the page lacks {MARKS[0]} or {MARKS[1]}")
    return f"{before}{begin}\n{text}\n{end}{after}"


def main() -> int:
    """Run, print the table; 1 when something is wrong."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--only", help="names, with commas between them")
    parser.add_argument("--first", action="store_true", help="the first 22 only")
    parser.add_argument("--shapes", type=int, default=2, choices=(1, 2))
    parser.add_argument("--json", type=Path, nargs="+", help="keep results, and go on from them")
    parser.add_argument("--markdown", type=Path, help="write the table into this file")
    options = parser.parse_args()
    names = options.only.split(",") if options.only else list(BY_NAME)
    chosen = [a for a in ARCHITECTURES if a.name in names and (a.first or not options.first)]
    known: dict[str, Any] = {}
    for file in reversed(options.json or []):
        known |= json.loads(file.read_text()) if file.exists() else {}
    for a in sorted(chosen, key=lambda a: names.index(a.name)):
        if a.name not in known:
            found = sweep(a, options.shapes)
            known[a.name] = dataclasses.asdict(found)
            print(f"{found.name:20s} {found.verdict:8s} {found.seconds:5.0f} s  {found.reason}",
                  file=sys.stderr, flush=True)  # fmt: skip
            if options.json:
                options.json[0].write_text(json.dumps(known, indent=1) + "\n")
    results = [Result(**known[a.name]) for a in chosen]
    text = f"{heading()}\n\n{table(results)}"
    print(text)
    if options.markdown:
        options.markdown.write_text(into(options.markdown.read_text(), text))
    return 1 if any(r.verdict == "wrong" for r in results) else 0


if __name__ == "__main__":
    sys.exit(main())
