"""Merged matrix products against separate ones in the training step of whole models, on a GPU.

    python tests/bench/gemms.py                  # llama, with grouped queries as well, bert, gpt2
    python tests/bench/gemms.py --models llama --steps 20 --json gemms.json

Eager under bf16 autocast, graphopt without `merge_linear`, without `wide_gradients` and with both
take turns in one process over the same weights. For each it prints the median step (forward,
backward, zero_grad), the peak, and from a trace of three steps: launches and time of matrix
products, of the multi-tensor copies (weights to low precision, gradients to float32), of the other
copies and casts (activations; what puts gradients together), and of additions (gradients of one
input summed).
bert has no rope: there the gradients of q, k and v are put together by a copy.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from models import GIB, MODELS, llama, tokens
from torch import nn

import graphopt
from graphopt.bench.kinds import kind_of_kernel
from graphopt.bench.trace import record

Step = Callable[[], object]


def llama_grouped() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The llama of models.py with 4 heads of keys and values for its 16 of queries."""
    return llama(key_value_heads=4)


def bert() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """BERT base, 110 M parameters, batch 32 of 512 tokens."""
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig()), tokens(32, 512, 30522)


BUILDERS = {**MODELS, "llama_grouped": llama_grouped, "bert": bert}
CAST = re.compile(r"multi_tensor_apply.*copy", re.IGNORECASE)
ADD = re.compile(r"CUDAFunctor_?[aA]dd|AddFunctor")
GROUPS = ("gemm", "weight casts", "copies", "adds")


def group_of(name: str) -> str | None:
    """Which column a kernel counts in."""
    if CAST.search(name):
        return "weight casts"
    kind = kind_of_kernel(name)
    if kind in ("gemm", "copies"):
        return kind
    return "adds" if ADD.search(name) else None


def traced(step: Step, steps: int = 3, kernels: bool = False) -> dict[str, tuple[float, float]]:
    """Launches and milliseconds of a step by group; with `kernels` prints those that copy, too."""

    def run() -> None:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()

    run()
    found = {g: [0.0, 0.0] for g in GROUPS}
    copies: dict[str, list[float]] = {}
    for event in record(run, cuda=True):
        group = group_of(str(event.get("name"))) if event.get("cat") == "kernel" else None
        if group is not None:
            found[group][0] += 1 / steps
            found[group][1] += float(event["dur"]) / 1e3 / steps
        if group in ("copies", "weight casts"):
            copies.setdefault(str(event["name"]), []).append(float(event["dur"]))
    for name, each in sorted(copies.items(), key=lambda pair: -sum(pair[1])) if kernels else ():
        print(f"    {len(each) / steps:5.0f} x {sum(each) / len(each):7.1f} us  {name[:150]}")
    return {g: (count, ms) for g, (count, ms) in found.items()}


def step_of(module: Callable[..., Any], model: nn.Module, inputs: dict[str, torch.Tensor]) -> Step:
    """A training step without an optimizer."""

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = module(**inputs).loss
        loss.backward()
        model.zero_grad(set_to_none=True)

    return step


def measure(name: str, steps: int, kernels: bool) -> dict[str, dict[str, Any]]:
    """All variants of one model."""
    torch.manual_seed(0)
    model, inputs = BUILDERS[name]()
    model = model.cuda().train()
    inputs = {k: v.cuda() for k, v in inputs.items()}
    apart = graphopt.optimize(model, rules="default,-merge_linear")
    narrow = graphopt.optimize(model, rules="default,-wide_gradients")
    both = graphopt.optimize(model)
    result = graphopt.bench(
        model,
        (),
        ["eager", {"apart": apart, "narrow": narrow, "both": both}],
        example_kwargs=inputs,
        train=True,
        autocast="bf16",
        rounds=max(1, steps // 2),
        seconds=1e-3,  # the shortest turn, of two steps
        copy=False,
        profile=False,
    )
    rows = {row.name: row for row in result.rows}
    found = {}
    modules = {"eager": model, "apart": apart, "narrow": narrow, "both": both}
    for label, module in modules.items():
        row = rows[label]
        if kernels:
            print(f"  {label}")
        if row.error is not None:
            print(f"{name} {label} failed: {row.error}")
            continue
        found[label] = {
            "ms": row.ms,
            "low_ms": row.low_ms,
            "high_ms": row.high_ms,
            "peak_bytes": row.peak_bytes,
            "loss": row.value,
            "groups": traced(step_of(module, model, inputs), kernels=kernels),
        }
    rewrites = [r.rule for r in both.rewrites]
    found.setdefault("both", {})["rewrites"] = rewrites.count("merge_linear")
    return found


def show(name: str, found: dict[str, dict[str, Any]]) -> None:
    """One line a variant."""
    print(f"{name}: {found['both']['rewrites']} merges")
    for label, row in found.items():
        if "ms" not in row:
            continue
        parts = [f"{g} {n:5.0f} x {ms:7.2f} ms" for g, (n, ms) in row["groups"].items()]
        spread = row["high_ms"] - row["low_ms"]
        print(
            f"  {label:7s} {row['ms']:8.2f} ms (+-{spread:.2f})  peak"
            f" {row['peak_bytes'] / GIB:6.2f} GiB  loss {row['loss']:.4f}  " + "  ".join(parts),
            flush=True,
        )


def main() -> int:
    """Run the models that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="llama,llama_grouped,bert,gpt2")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--kernels", action="store_true", help="name the kernels that copy")
    parser.add_argument("--json", type=Path, help="write the results there")
    options = parser.parse_args()
    unknown = sorted({*options.models.split(",")} - {*BUILDERS})
    if unknown:
        parser.error(f"no model is called {', '.join(unknown)}; there are {', '.join(BUILDERS)}")
    if not torch.cuda.is_available():
        print("this benchmark needs a CUDA device", file=sys.stderr)
        return 2
    torch.set_float32_matmul_precision("high")
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    results = {}
    for name in options.models.split(","):
        results[name] = measure(name, options.steps, options.kernels)
        show(name, results[name])
        gc.collect()
        torch.cuda.empty_cache()
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
