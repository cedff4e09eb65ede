"""Time against peak memory: a language model's training step under budgets, beside what others do.

    python tests/bench/curve.py                                  # llama, 542 M parameters, bf16
    python tests/bench/curve.py --budgets 9GiB,5.47GiB --offload --beside eager,liger-checkpoints
    ... --markdown table.md

One process, one GPU, the same weights and tokens for all. A step is forward, loss and backward from
`zero_grad(set_to_none=True)`, of which the loss alone is kept. The peak is
`torch.cuda.max_memory_allocated`, the time a median by CUDA events. Besides graphopt:

    eager, eager-checkpoints            autocast; with Hugging Face's own checkpoint of each block
    compile, compile-0.5, ...           torch.compile; with its activation_memory_budget
    liger, liger-checkpoints            eager with the kernels of Liger, chunked loss included
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from memory import GIB, LossOnly, Step, clean
from models import llama

import graphopt
from graphopt.errors import BudgetError, GraphoptWarning

BUDGETS = "12GiB,9GiB,7GiB,6GiB,5.47GiB,5.2GiB,5.0GiB"
BESIDE = "eager,eager-checkpoints,compile,compile-0.7,compile-0.5,liger-checkpoints"


@dataclasses.dataclass(frozen=True)
class Point:
    """One way to run the step.

    Attributes:
        name: which.
        budget: what was asked for, "" where nothing was.
        ms: of a step.
        peak: bytes.
        predicted: bytes, 0 where nothing predicts them.
        start: seconds until the first step was done.
        values: how many are recomputed and how many sent to the host.
        why: what failed.
    """

    name: str
    budget: str = ""
    ms: float = 0.0
    peak: int = 0
    predicted: int = 0
    start: float = 0.0
    values: tuple[int, int] = (0, 0)
    why: str = ""

    def line(self, first: float) -> str:
        """The row of the table.

        Args:
            first: time of the row that all are compared with.
        """
        if self.why:
            return f"| {self.name} | {self.budget} | {self.why} |  |  |  |  |  |"
        error = f"{100 * (self.predicted / self.peak - 1):+.2f}%" if self.predicted else ""
        again, away = self.values
        values = f"{again} + {away}" if again + away else ""
        return (
            f"| {self.name} | {self.budget} | {self.peak / GIB:.3f} | {error} | {self.ms:.2f} | "
            f"{self.ms / first:.3f} | {values} | {self.start:.1f} |"
        )


HEADER = (
    "| | budget | peak GiB | prediction | ms | x | recomputed + offloaded | start s |\n"
    "|---|---|---|---|---|---|---|---|"
)


class Curve:
    """The model, its inputs, and how each way is measured."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        torch.manual_seed(0)
        network, inputs = llama()
        self.weights = network.state_dict()
        self.inputs = {k: v.cuda() for k, v in inputs.items()}
        self.network = network.cuda().train()

    def measured(
        self, point: Point, module: torch.nn.Module, since: float, *, auto: bool, stray: int = 0
    ) -> Point:
        """A point with its figures.

        Args:
            point: without them.
            module: what is run.
            since: when its making began.
            auto: under autocast.
            stray: bytes on the GPU that are not its own.
        """
        step = Step(module, self.inputs, "cuda")
        with torch.autocast("cuda", torch.bfloat16) if auto else contextlib.nullcontext():
            step.run()
            torch.cuda.synchronize()
            start = time.perf_counter() - since
            clean()
            return dataclasses.replace(
                point, peak=step.peak(stray), ms=step.ms(self.steps), start=start
            )

    def graphopt(self, budget: str, **options: Any) -> Point:
        """The step as graphopt plans it; the budget "none" for no plan."""
        clean()
        point, since = Point("graphopt" + (", offload" if options else ""), budget), _now()
        model = LossOnly(self.network)
        options |= {} if budget == "none" else {"memory_budget": budget}
        try:
            opt = graphopt.optimize(model, None, self.inputs, precision="bf16", **options)
        except BudgetError as error:
            return dataclasses.replace(point, why=error.what)
        point = self.measured(point, opt, since, auto=False)
        plan = opt.memory_plan
        if plan is None:
            return point
        print(plan, flush=True)
        values = len(plan.recompute), len(plan.offload)
        return dataclasses.replace(point, predicted=plan.predicted_peak_bytes, values=values)

    def other(self, name: str) -> Point:
        """The step as others run it."""
        clean()
        kind, _, how = name.partition("-")
        since = _now()
        with _liger() if kind == "liger" else contextlib.nullcontext():
            network, stray = self.network, 0
            if kind == "liger":
                stray = clean()
                network = llama()[0].cuda().train()
                network.load_state_dict(self.weights)
            if how == "checkpoints":
                network.gradient_checkpointing_enable({"use_reentrant": False})
            module: Any = LossOnly(network)
            try:
                with _compiled(kind, how):
                    module = torch.compile(module) if kind == "compile" else module
                    return self.measured(Point(name), module, since, auto=True, stray=stray)
            finally:
                network.gradient_checkpointing_disable()
                torch._dynamo.reset()


def _now() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


@contextlib.contextmanager
def _compiled(kind: str, budget: str) -> Iterator[None]:
    import torch._functorch.config as config

    before = config.activation_memory_budget
    if kind == "compile" and budget:
        config.activation_memory_budget = float(budget)
    try:
        yield
    finally:
        config.activation_memory_budget = before


@contextlib.contextmanager
def _liger() -> Iterator[None]:
    """Models of llama that are made in this block have Liger's kernels; no model later has."""
    from liger_kernel.transformers import apply_liger_kernel_to_llama
    from transformers.models.llama import modeling_llama as source

    before = dict(vars(source))
    forward = source.LlamaForCausalLM.forward
    apply_liger_kernel_to_llama()
    try:
        yield
    finally:
        vars(source).update(before)
        source.LlamaForCausalLM.forward = forward


def tried(curve: Curve, name: str) -> Point:
    """What another way takes, or how it failed."""
    try:
        return curve.other(name)
    except (RuntimeError, ImportError) as error:
        said = str(error).splitlines() or [""]
        return Point(name, why=f"{type(error).__name__}: {said[0][:100]}")


def main() -> int:
    """Measure what is asked for and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budgets", default=BUDGETS)
    parser.add_argument("--offload", action="store_true", help="each budget with offload as well")
    parser.add_argument("--beside", default=BESIDE)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--markdown", type=Path, help="write the table there")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("this benchmark needs a CUDA device", file=sys.stderr)
        return 2
    warnings.simplefilter("ignore", GraphoptWarning)
    torch.set_float32_matmul_precision("high")
    curve = Curve(options.steps)
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    print(HEADER)
    lines, first = [HEADER], 0.0

    def add(point: Point) -> None:
        lines.append(point.line(first or point.ms))
        print(lines[-1], flush=True)
        gc.collect()

    plain = curve.graphopt("none")
    add(plain)
    first = plain.ms
    for budget in filter(None, options.budgets.split(",")):
        add(curve.graphopt(budget))
        if options.offload:
            add(curve.graphopt(budget, offload="auto"))
    for name in filter(None, options.beside.split(",")):
        add(tried(curve, name))
    if options.markdown:
        options.markdown.write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
