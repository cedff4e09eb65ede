"""Hugging Face records hidden states, attentions and router logits through hooks of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import graphopt
from graphopt.capture.signature import flatten

pytestmark = pytest.mark.filterwarnings("ignore::graphopt.errors.GraphoptWarning")

IDS = torch.tensor([[5, 9, 11, 3], [7, 8, 30, 31]])


def llama() -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=32, attn_implementation="eager",
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def hooks(model: torch.nn.Module) -> int:
    return sum(len(m._forward_hooks) for m in model.modules())


def assert_equal(model: torch.nn.Module, opt: Any, **options: bool) -> None:
    expected: list[torch.Tensor] = []
    found: list[torch.Tensor] = []
    flatten(model(IDS, **options), expected, results=True)
    flatten(opt(IDS, **options), found, results=True)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("option", ["output_hidden_states", "output_attentions"])
def test_recorded_outputs_are_eagers(option: str) -> None:
    model = llama()
    opt = graphopt.optimize(model, IDS, {option: True})
    assert hooks(model) == 0, "a capture leaves no hook on the model"
    key = option.removeprefix("output_")
    assert len(opt(IDS, **{option: True})[key]) == {"hidden_states": 3, "attentions": 2}[key]
    assert_equal(model, opt, **{option: True})
    assert hooks(model) > 0, "eager installed its recorders"
    assert_equal(model, opt, **{option: True})
    assert_equal(model, opt)


def test_a_model_that_recorded_before_is_captured() -> None:
    model = llama()
    model(IDS, output_hidden_states=True)
    opt = graphopt.optimize(model, IDS, {"output_hidden_states": True})
    assert_equal(model, opt, output_hidden_states=True)


def test_another_hook_beside_a_recorder_is_named() -> None:
    model = llama()
    model(IDS, output_hidden_states=True)

    def scaled(module: Any, args: Any, output: Any) -> Any:
        return output * 2

    model.model.layers[0].register_forward_hook(scaled)
    with pytest.raises(graphopt.CaptureError, match="scaled"):
        graphopt.optimize(model, IDS)
