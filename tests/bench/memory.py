"""Memory budgets, kept or not: models x budgets, with equal gradients and measured peaks.

    python tests/bench/memory.py                          # 12 small models on the CPU, 5 budgets
    python tests/bench/memory.py --device cuda            # the same, larger, on a GPU
    ... --markdown table.md --json table.json

A model's budgets are its peak without a plan, the smallest that can be had, and three between, each
with half a percent of room, which a plan leaves free.
On the CPU the peak is that of the allocations that torch's profiler records in a real step; on a
GPU it is `torch.cuda.max_memory_allocated`. Gradients are compared with those of the graph without
a budget, over the same weights and inputs.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import json
import statistics
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from memory_models import MODELS, make

import graphopt
from graphopt.bench.trace import peak_allocated, record
from graphopt.errors import BudgetError, GraphoptWarning

GIB = 2**30
SHARES = (1.0, 0.75, 0.5, 0.25, 0.0)
"""Where between the smallest peak (0) and the plain one (1) the budgets lie."""
ROOM = 1.005
"""By so much the budgets are above that: what a plan leaves free where it can."""


@dataclasses.dataclass
class Row:
    """One model under one budget.

    Attributes:
        model: its name.
        budget: bytes.
        predicted: the plan's peak.
        measured: the peak of a real step.
        equal: whether all gradients are equal to the last bit.
        apart: the greatest difference of a gradient, relative to its largest entry.
        recomputed: values that are computed again.
        extra_share: predicted time of that as a share of a forward.
        ms: measured time of a step; 0 where it was not taken.
    """

    model: str
    budget: int
    predicted: int
    measured: int
    equal: bool
    apart: float
    recomputed: int
    extra_share: float
    ms: float = 0.0

    @property
    def error(self) -> float:
        """The prediction beside the measurement."""
        return self.predicted / self.measured - 1

    @property
    def kept(self) -> bool:
        """Whether the budget was kept."""
        return self.measured <= self.budget


class Step:
    """A real training step of a module, on one device, and what it takes."""

    def __init__(
        self, module: torch.nn.Module, inputs: dict[str, torch.Tensor], device: str
    ) -> None:
        self.module, self.inputs, self.device = module, inputs, device
        self.parameters = [p for p in module.parameters() if p.requires_grad]

    def run(self) -> None:
        """Forward and backward from `zero_grad(set_to_none=True)`."""
        for p in self.parameters:
            p.grad = None
        loss_of(self.module(**self.inputs)).backward()

    def gradients(self) -> list[torch.Tensor | None]:
        """The gradients of one step, on the CPU: beside the next step they must take nothing."""
        self.run()
        return [None if p.grad is None else p.grad.to("cpu", copy=True) for p in self.parameters]

    def peak(self, stray: int = 0) -> int:
        """The most bytes at once: what lies there before the step and what the step adds.

        Args:
            stray: bytes on the GPU that belong to nobody here.
        """
        self.run()
        for p in self.parameters:
            p.grad = None
        if self.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.run()
            torch.cuda.synchronize()
            return torch.cuda.max_memory_allocated() - stray
        held: dict[int, int] = {}
        for t in (*self.module.parameters(), *self.module.buffers(), *self.inputs.values()):
            held[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return sum(held.values()) + (peak_allocated(record(self.run, cuda=False, memory=True)) or 0)

    def ms(self, steps: int) -> float:
        """The median time of some steps, by CUDA events."""
        times = []
        for _ in range(steps + 3):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            self.run()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        return statistics.median(times[3:])


class LossOnly(torch.nn.Module):
    """A model that returns its loss, and so keeps no logits for its caller."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss."""
        loss: torch.Tensor = self.model(input_ids=input_ids, labels=labels).loss
        return loss


def loss_of(result: Any) -> torch.Tensor:
    """The loss that a model returns."""
    if isinstance(result, torch.Tensor):
        return result
    loss = getattr(result, "loss", None)
    return loss if isinstance(loss, torch.Tensor) else result[0]


def clean() -> int:
    """Free what nobody holds; the bytes on the GPU that stay."""
    gc.collect()
    if not torch.cuda.is_available():
        return 0
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


def smallest(model: torch.nn.Module, inputs: dict[str, torch.Tensor], options: Any) -> int:
    """The smallest peak that can be had, from what the error for too small a budget says."""
    try:
        graphopt.optimize(model, None, inputs, memory_budget=1024, **options)
    except BudgetError as error:
        return int(error.lowest_bytes or 0)
    raise AssertionError("a budget of 1 KiB was kept")


def table_of(name: str, device: str, steps: int, options: dict[str, Any]) -> list[Row]:
    """The rows of one model."""
    stray = clean()
    model, inputs = make(name, device)
    options = {**options, "loss_fn": loss_of}  # the rest of the result is let go
    plain = graphopt.optimize(model, None, inputs, memory_budget=1.0, **options)
    top = plain.memory_plan.unplanned_peak_bytes
    low = smallest(model, inputs, options)
    expected = Step(plain, inputs, device).gradients()
    del plain
    rows = []
    for share in SHARES:
        budget = int(ROOM * (low + share * (top - low)))
        opt = graphopt.optimize(model, None, inputs, memory_budget=budget, **options)
        found, step = opt.memory_plan, Step(opt, inputs, device)
        got = step.gradients()
        scale = max(float(g.abs().max()) for g in expected if g is not None)
        apart = max(differ(a, b, scale) for a, b in zip(expected, got, strict=True))
        equal = apart == 0.0
        del got
        clean()
        peak = step.peak(stray)
        rows.append(
            Row(
                name, budget, found.predicted_peak_bytes, peak, equal, apart,
                len(found.recompute), found.extra_ms / (found.forward_ms or 1.0),
                step.ms(steps) if steps and device == "cuda" else 0.0,
            )
        )  # fmt: skip
        print(text(rows[-1], rows[0]), flush=True)
        del opt, step
    return rows


def differ(a: torch.Tensor | None, b: torch.Tensor | None, scale: float) -> float:
    """How far two gradients are apart, relative to the largest entry.

    A gradient that is nothing beside the others (that of a key's bias is zero but for rounding) is
    measured on a thousandth of their scale.
    """
    if a is None or b is None:
        return 0.0 if a is b else float("inf")
    return float((a - b).abs().max()) / max(float(a.abs().max()), 1e-3 * scale, 1e-30)


HEADER = ("model", "budget", "predicted", "measured", "error", "kept", "gradients", "again", "time")


def text(row: Row, first: Row) -> str:
    """One line of the table."""
    unit, name = (GIB, "GiB") if first.budget > GIB else (2**20, "MiB")
    time = f"+{100 * row.extra_share:.0f}% fwd"
    if row.ms:
        time = f"{row.ms:.2f} ms, {row.ms / first.ms:.2f}x"
    cells = (
        row.model,
        f"{row.budget / unit:.3f} {name}",
        f"{row.predicted / unit:.3f}",
        f"{row.measured / unit:.3f}",
        f"{100 * row.error:+.2f}%",
        "yes" if row.kept else "NO",
        "equal" if row.equal else f"{row.apart:.1e}",
        str(row.recomputed),
        time,
    )
    return "| " + " | ".join(cells) + " |"


def checks(rows: list[Row]) -> list[str]:
    """What is not as it must be."""
    wrong = [f"{r.model}: {r.measured} bytes, budget {r.budget}" for r in rows if not r.kept]
    for a, b in itertools.pairwise(rows):
        if a.model == b.model and b.measured > a.measured:
            wrong.append(f"{a.model}: the peak rises from {a.measured} to {b.measured}")
        if a.model == b.model and b.extra_share < a.extra_share:
            wrong.append(f"{a.model}: a smaller budget is faster")
    return wrong


def main() -> int:
    """Run what is asked for and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--precision", default=None, choices=("bf16", "fp16"))
    parser.add_argument("--offload", action="store_true", help="values may go to host memory")
    parser.add_argument("--steps", type=int, default=10, help="timed steps on a GPU")
    parser.add_argument("--markdown", type=Path, help="write the table there")
    parser.add_argument("--json", type=Path, help="write the rows there")
    options = parser.parse_args()
    names = options.models.split(",")
    unknown = sorted({*names} - {*MODELS})
    if unknown:
        parser.error(f"no model is called {', '.join(unknown)}; there are {', '.join(MODELS)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        print("there is no CUDA device", file=sys.stderr)
        return 2
    warnings.simplefilter("ignore", GraphoptWarning)
    torch.use_deterministic_algorithms(options.device == "cpu")
    rows: list[Row] = []
    lines = [f"| {' | '.join(HEADER)} |", "|---" * len(HEADER) + "|"]
    print("\n".join(lines))
    asked = {"precision": options.precision, "offload": "auto" if options.offload else False}
    for name in names:
        found = table_of(name, options.device, options.steps, asked)
        lines += [text(row, found[0]) for row in found]
        rows += found
    if options.markdown:
        options.markdown.write_text("\n".join(lines) + "\n")
    if options.json:
        options.json.write_text(json.dumps([dataclasses.asdict(r) for r in rows], indent=1))
    wrong = checks(rows)
    print("\n".join(wrong) or f"{len(rows)} rows, every budget kept")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
