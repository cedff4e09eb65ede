"""What a call of an optimized module costs before its body runs: guards, key and state.

    python tests/bench/guards.py            # microseconds: gpt2 (12 layers), llama (32)

The models are narrow: the cost depends on the number of modules and parameters alone. Run it on a
quiet machine; the least of several repeats is printed.
"""

from __future__ import annotations

import timeit
import warnings
from collections.abc import Callable
from typing import Any

import torch

import graphopt


def models() -> dict[str, torch.nn.Module]:
    """gpt2 with 12 layers and llama with 32, a few channels wide."""
    library = torch.library.Library("torchvision", "FRAGMENT")
    try:
        import torchvision  # noqa: F401
    except ImportError:
        pass
    except RuntimeError:  # beside a CPU build of torch its compiled part is missing
        for op in ("nms", "qnms"):
            library.define(f"{op}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    gpt2 = GPT2Config(n_layer=12, n_embd=16, n_head=2, vocab_size=64)
    llama = LlamaConfig(
        num_hidden_layers=32,
        hidden_size=16,
        intermediate_size=32,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=64,
    )
    return {"gpt2": GPT2LMHeadModel(gpt2), "llama": LlamaForCausalLM(llama)}


def microseconds(call: Callable[[], Any], number: int = 50, repeat: int = 200) -> float:
    """The least mean time of a call, in microseconds: short runs, which others disturb less."""
    return min(timeit.repeat(call, number=number, repeat=repeat)) / number * 1e6


def main() -> None:
    """Print one line a model."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    for name, model in models().items():
        model.train()
        given = {"input_ids": torch.arange(8)[None], "use_cache": False}
        opt = graphopt.optimize(model, (), given)
        opt(**given)
        entry = opt.entry
        guard = microseconds(entry.state)
        entry.call = lambda *args: None
        call = microseconds(lambda given=given, opt=opt: opt._call((), given))
        cells = sum(len(c.values) for c in (entry.guard._loose, entry.guard._strict))
        print(
            f"{name:6s} guards {guard:6.1f} us, call without the body {call:6.1f} us"
            f"  ({len(list(model.modules()))} modules, {len(entry.guard._facts)} tensors,"
            f" {cells} cells)"
        )


if __name__ == "__main__":
    main()
