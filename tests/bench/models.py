"""Training steps of whole models on a GPU: eager, torch.compile and graphopt in one run.

    python tests/bench/models.py                     # llama and gpt2, bf16 autocast, all three
    python tests/bench/models.py --models gpt2 --variants eager,graphopt --profile

Prints for each model and variant the median time of forward, backward and zero_grad, the peak of
allocated memory, and the time of the first step (start-up); ratios are to eager of the same run.
The variants take turns in one process, over the same weights (`graphopt.bench`).
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import graphopt
from graphopt.bench import BenchResult, Row

GIB = 2**30


def llama(key_value_heads: int = 16) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """542 M parameters with 16 heads of keys and values, batch 8 of 2048 tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=key_value_heads,
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
VARIANTS = ("eager", "compile", "graphopt", "graphopt_unfused")


def measure(name: str, variants: list[str], steps: int, profile: bool) -> BenchResult:
    """Build a model and time its training step under bf16 autocast in every variant."""
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    model = model.cuda().train()
    against: list[Any] = [v for v in variants if v in ("eager", "compile")]
    if "graphopt_unfused" in variants:
        against.append({"graphopt_unfused": graphopt.optimize(model, fuse=False)})
    return graphopt.bench(
        model,
        (),
        against,
        example_kwargs={k: v.cuda() for k, v in inputs.items()},
        train=True,
        autocast="bf16",
        rounds=max(1, steps // 2),
        seconds=1e-3,  # the shortest turn, of two steps
        copy=False,
        profile=profile,
    )


def line(result: BenchResult, row: Row) -> str:
    """The figures of one variant."""
    if row.error is not None:
        return f"{row.name:18s} failed: {row.error}"
    return (
        f"{row.name:18s} {row.ms:8.2f} ms (+-{row.high_ms - row.low_ms:.2f}) "
        f"{result.ratio(row.name) or 1:5.2f}x  peak {row.peak_bytes / GIB:6.2f} GiB "
        f"{result.ratio(row.name, 'peak_bytes') or 1:5.2f}x  start {row.start_s:5.1f} s  "
        f"loss {row.value:.4f}"
    )


def main() -> int:
    """Run the models and variants asked for and print one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--variants", default="eager,compile,graphopt")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--profile", action="store_true", help="device time by kernel as well")
    parser.add_argument("--json", type=Path, help="write the results there")
    options = parser.parse_args()
    variants = options.variants.split(",")
    unknown = sorted({*variants} - {*VARIANTS})
    if unknown:
        parser.error(f"no variant is called {', '.join(unknown)}; there are {', '.join(VARIANTS)}")
    if not torch.cuda.is_available():
        print("this benchmark needs a CUDA device", file=sys.stderr)
        return 2
    torch.set_float32_matmul_precision("high")
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    results = []
    for name in options.models.split(","):
        result = measure(name, variants, options.steps, options.profile)
        results.append(result.to_dict())
        for row in result.rows:
            if row.name in variants:
                print(f"{name:8s} {line(result, row)}", flush=True)
        if options.profile:
            print(f"\n{result!r}\n")
            for row in result.rows:
                print(f"{name} {row.name}: device time by kernel")
                for k in row.device.kernels if row.device else ():
                    print(f"  {k.ms:8.3f} ms {k.calls:5.0f} x {k.kind:11s} {k.name[:80]}")
        gc.collect()
        torch.cuda.empty_cache()
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
