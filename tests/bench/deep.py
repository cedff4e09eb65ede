"""A deep net: how much less activation memory for how much time, beside `checkpoint_sequential`.

    python tests/bench/deep.py                       # 100 blocks of an MLP, width 1024, on a GPU
    python tests/bench/deep.py --device cpu --width 32 --rows 512
    ... --precision bf16 --markdown table.md

A block is LayerNorm, Linear to four times the width, GELU, Linear back, around a skip. Activation
memory is the peak of a training step beyond what is there when it ends (weights, gradients, inputs,
workspaces of cuBLAS). graphopt's budgets are set for a half, a fifth, a tenth and a fortieth of its
activations without a budget, or the least that can be had. Eager and `checkpoint_sequential` run
under autocast if a precision is given.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from memory import Step, clean
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential

import graphopt
from graphopt.errors import GraphoptWarning

MIB = 2**20


class Block(nn.Module):
    """One block, its skip included."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x and what the block adds to it."""
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Deep(nn.Module):
    """Blocks in a row and the mean squared error of what they make.

    Args:
        blocks: the blocks.
        segments: of `checkpoint_sequential`; 0 to keep everything.
    """

    def __init__(self, blocks: nn.Sequential, segments: int = 0) -> None:
        super().__init__()
        self.blocks, self.segments = blocks, segments

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss."""
        if self.segments:
            y = checkpoint_sequential(self.blocks, self.segments, x, use_reentrant=False)
        else:
            y = self.blocks(x)
        return nn.functional.mse_loss(y.float(), labels)


class Table:
    """Measures one way after the other and tells each beside the first."""

    def __init__(self, inputs: dict[str, torch.Tensor], device: str, steps: int) -> None:
        self.inputs, self.device, self.steps = inputs, device, steps
        self.lines = ["| | activations MiB | less | ms | x |", "|---|---|---|---|---|"]
        self.first: tuple[int, float] | None = None
        print("\n".join(self.lines))

    def add(self, name: str, module: nn.Module, autocast: torch.dtype | None = None) -> int:
        """Measure a module; its activations in bytes."""
        clean()
        step = Step(module, self.inputs, self.device)
        with torch.autocast(self.device, autocast) if autocast else contextlib.nullcontext():
            peak = step.peak()
            activations = peak - self.kept(step)
            ms = step.ms(self.steps) if self.device == "cuda" else self.host_ms(step)
        self.first = self.first or (activations, ms)
        less, more = self.first[0] / activations, ms / self.first[1]
        self.lines.append(
            f"| {name} | {activations / MIB:.1f} | {less:.2f}x | {ms:.2f} | {more:.3f} |"
        )
        print(self.lines[-1], flush=True)
        return activations

    def kept(self, step: Step) -> int:
        """Bytes that are there when a step ends."""
        if self.device == "cuda":
            return torch.cuda.memory_allocated()
        own = [*step.module.parameters(), *self.inputs.values()]
        gradients = [p.grad for p in step.parameters if p.grad is not None]
        return sum(t.nbytes for t in (*own, *gradients))

    def host_ms(self, step: Step) -> float:
        """The median time of some steps on the CPU."""
        times = []
        for _ in range(self.steps):
            start = time.perf_counter()
            step.run()
            times.append(1000 * (time.perf_counter() - start))
        return statistics.median(times)


def compare(options: argparse.Namespace) -> list[str]:
    """The table of one net."""
    clean()
    torch.manual_seed(0)
    width, device = options.width, options.device
    blocks = nn.Sequential(*(Block(width) for _ in range(options.blocks))).to(device)
    shape = (options.rows, width)
    inputs = {k: torch.randn(shape, device=device) for k in ("x", "labels")}
    low = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(options.precision)
    table = Table(inputs, device, options.steps)
    more: dict[str, Any] = {"precision": options.precision}
    model = Deep(blocks)
    opt = graphopt.optimize(model, None, inputs, memory_budget=1.0, **more)
    plain, whole = table.add("graphopt", opt), opt.memory_plan.unplanned_peak_bytes
    table.add("eager", model, low)
    for segments in (n for n in (10, 20, 50) if n <= options.blocks):
        table.add(f"checkpoint_sequential, {segments} segments", Deep(blocks, segments), low)
    for share in options.shares.split(","):
        budget = whole - plain + int(plain / float(share))
        try:
            opt = graphopt.optimize(model, None, inputs, memory_budget=budget, **more)
        except graphopt.BudgetError as error:
            opt = graphopt.optimize(model, None, inputs, memory_budget=error.lowest_bytes, **more)
        plan = opt.memory_plan
        extra = plan.extra_ms / plan.forward_ms
        table.add(f"graphopt, 1/{share}, +{100 * extra:.0f}% of a forward", opt)
        del opt
    if options.segments:
        opt = graphopt.optimize(model, None, inputs, segments=options.segments, **more)
        table.add(f"graphopt, segments={options.segments}", opt)
    return table.lines


def main() -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--blocks", type=int, default=100)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--precision", default=None, choices=("bf16", "fp16"))
    parser.add_argument("--shares", default="2,5,10,40", help="parts that budgets keep, as 1/n")
    parser.add_argument("--segments", type=int, help="graphopt's own segments, as well")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--markdown", type=Path, help="write the table there")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("there is no CUDA device", file=sys.stderr)
        return 2
    warnings.simplefilter("ignore", GraphoptWarning)
    torch.set_float32_matmul_precision("high")
    lines = compare(options)
    if options.markdown:
        options.markdown.write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
