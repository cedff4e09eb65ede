"""A training step that runs out of memory as it is, and fits within a budget.

    python tests/bench/beyond.py                     # llama, 542 M parameters, 128 x 2048 tokens
    python tests/bench/beyond.py --batch 96 --budget 100GiB --cap 0.75

Prints for each variant the time of a step and the peak of allocated memory, or that it ran out.
`--cap` lets the process have that share of the GPU's memory, to show the same on a smaller one.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
import warnings
from collections.abc import Callable

import torch
from models import llama, tokens

import graphopt
from graphopt.errors import GraphoptWarning

GIB = 2**30


def told(name: str, make: Callable[[], torch.nn.Module], batch: int, steps: int) -> bool:
    """Train for a few steps and print what was seen; whether it fitted."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    try:
        module = make()
        times, losses = [], []
        for _ in range(steps):
            inputs = {k: v.cuda() for k, v in tokens(batch, 2048, 32000).items()}
            torch.cuda.synchronize()
            start = time.perf_counter()
            loss = module(**inputs).loss
            loss.backward()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
            losses.append(loss.item())
            for p in module.parameters():
                p.grad = None
    except (torch.OutOfMemoryError, graphopt.BudgetError) as error:
        print(f"{name}: {type(error).__name__}: {str(error).splitlines()[0][:120]}", flush=True)
        return False
    peak = torch.cuda.max_memory_allocated() / GIB
    seconds = ", ".join(f"{t:.2f}" for t in times)
    print(f"{name}: peak {peak:.2f} GiB, steps {seconds} s, losses {losses}", flush=True)
    plan = getattr(module, "memory_plan", None)
    if plan is not None and plan.budget_bytes is not None:
        print(plan, flush=True)
    return True


def main() -> int:
    """Unbudgeted, then with the budget."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--budget", default="125GiB")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--cap", type=float, help="share of the GPU's memory")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("there is no CUDA device", file=sys.stderr)
        return 2
    warnings.simplefilter("ignore", GraphoptWarning)
    if options.cap:
        torch.cuda.set_per_process_memory_fraction(options.cap)
    torch.manual_seed(0)
    model = llama()[0].cuda().train()
    inputs = {k: v.cuda() for k, v in tokens(options.batch, 2048, 32000).items()}

    def optimized(**more: object) -> Callable[[], torch.nn.Module]:
        return lambda: graphopt.optimize(model, None, inputs, precision="bf16", **more)

    print(f"llama, 542 M parameters, {options.batch} x 2048 tokens, bf16")
    plain = told("without a budget", optimized(), options.batch, options.steps)
    budgeted = optimized(memory_budget=options.budget, loss_fn=lambda out: out.loss)
    within = told(f"within {options.budget}", budgeted, options.batch, options.steps)
    return 0 if within and not plain else 1


if __name__ == "__main__":
    sys.exit(main())
