"""Training steps of whole models on a GPU: eager, torch.compile and graphopt in one run.

    python tests/bench/models.py                     # llama and gpt2, bf16 autocast, all three
    python tests/bench/models.py --models gpt2 --variants eager,graphopt --profile

Prints for each model and variant the median time of forward, backward and zero_grad, the peak of
allocated memory, and the time of the first step (start-up); ratios are to eager of the same run.
Variants run one after the other in one process, each on a freshly built model with equal weights.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import graphopt

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Result:
    """One variant of one model: milliseconds, bytes, seconds."""

    model: str
    variant: str
    step_ms: float
    spread_ms: float
    peak_bytes: int
    start_s: float
    loss: float


def llama() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """542 M parameters, batch 8 of 2048 tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=16,
        vocab_size=32000,
        max_position_embeddings=4096,
        use_cache=False,
    )
    return LlamaForCausalLM(config), tokens(8, 2048, 32000)


def gpt2() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """124 M parameters, batch 16 of 1024 tokens, dropout 0.1."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(use_cache=False)), tokens(16, 1024, 50257)


def tokens(batch: int, length: int, vocabulary: int) -> dict[str, torch.Tensor]:
    """Random token ids and labels that are not the same tensor."""
    ids = torch.randint(0, vocabulary, (batch, length))
    return {"input_ids": ids, "labels": ids.clone()}


MODELS: dict[str, Callable[[], tuple[torch.nn.Module, dict[str, torch.Tensor]]]] = {
    "llama": llama,
    "gpt2": gpt2,
}
VARIANTS: dict[str, Callable[[torch.nn.Module], Any]] = {
    "eager": lambda model: model,
    "compile": torch.compile,
    "graphopt": graphopt.optimize,
    "graphopt_unfused": lambda model: graphopt.optimize(model, fuse=False),
}


def measure(name: str, variant: str, steps: int, profile: bool) -> Result:
    """Build a model, run one variant of it, and time its training step."""
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    model = model.cuda().train()
    inputs = {k: v.cuda() for k, v in inputs.items()}
    run = VARIANTS[variant](model)

    def step() -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            loss = run(**inputs)[0]
        loss.backward()
        model.zero_grad(set_to_none=True)
        return loss.detach()

    start = time.perf_counter()
    loss = step()
    torch.cuda.synchronize()
    start_s = time.perf_counter() - start
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(steps):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        step()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    peak = torch.cuda.max_memory_allocated()
    if profile:
        print(device_time(step))
    quartiles = statistics.quantiles(times, n=4)
    return Result(
        model=name,
        variant=variant,
        step_ms=statistics.median(times),
        spread_ms=quartiles[2] - quartiles[0],
        peak_bytes=peak,
        start_s=start_s,
        loss=float(loss),
    )


def device_time(step: Callable[[], object], rows: int = 30) -> str:
    """Device milliseconds of one step by kernel, the largest first."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    with profiler(activities=[ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    events = sorted(seen.key_averages(), key=lambda e: -e.self_device_time_total)
    total = sum(e.self_device_time_total for e in events) / 1e3
    lines = [f"device time {total:.2f} ms"]
    lines += [
        f"  {e.self_device_time_total / 1e3:8.3f} ms {e.count:5d} x {e.key[:90]}"
        for e in events[:rows]
    ]
    return "\n".join(lines)


def main() -> int:
    """Run the models and variants asked for and print one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--variants", default="eager,compile,graphopt")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--profile", action="store_true", help="device time by kernel as well")
    parser.add_argument("--json", type=Path, help="write the results there")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("this benchmark needs a CUDA device", file=sys.stderr)
        return 2
    torch.set_float32_matmul_precision("high")
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    results: list[Result] = []
    for name in options.models.split(","):
        for variant in options.variants.split(","):
            result = measure(name, variant, options.steps, options.profile)
            results.append(result)
            eager = next((r for r in results if r.model == name), result)
            print(
                f"{name:8s} {variant:18s} {result.step_ms:8.2f} ms (+-{result.spread_ms:.2f}) "
                f"{result.step_ms / eager.step_ms:5.2f}x  peak {result.peak_bytes / GIB:6.2f} GiB "
                f"{result.peak_bytes / eager.peak_bytes:5.2f}x  start {result.start_s:5.1f} s  "
                f"loss {result.loss:.4f}",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps([dataclasses.asdict(r) for r in results], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
