"""Hugging Face models in their default config, caches and outputs included."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from graphopt.errors import CaptureError
from graphopt.graph.edit import REGION
from graphopt.module import GraphoptModule

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def hf() -> Any:
    """The transformers package, imported with the repository's own `kernels` off the path."""
    kept = list(sys.path)
    sys.path[:] = [p for p in kept if Path(p or ".").resolve() != ROOT]
    transformers = pytest.importorskip("transformers")
    _ = transformers.GPT2LMHeadModel, transformers.LlamaForCausalLM
    _ = transformers.BertForMaskedLM, transformers.T5ForConditionalGeneration
    sys.path[:] = kept
    return transformers


def gpt2(hf: Any) -> torch.nn.Module:
    drop = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = hf.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=50, n_positions=32, **drop)
    return hf.GPT2LMHeadModel(config)


def llama(hf: Any) -> torch.nn.Module:
    sizes = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": 0}
    return hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=50, **sizes, **heads))


def bert(hf: Any) -> torch.nn.Module:
    sizes = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 32}
    drop = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = hf.BertConfig(vocab_size=50, num_attention_heads=2, **sizes, **drop)
    return hf.BertForMaskedLM(config)


def t5(hf: Any) -> torch.nn.Module:
    sizes = {"num_layers": 2, "d_model": 16, "d_ff": 32, "num_heads": 2, "d_kv": 8}
    return hf.T5ForConditionalGeneration(
        hf.T5Config(vocab_size=50, dropout_rate=0.0, decoder_start_token_id=0, **sizes)
    )


def inputs(batch: int, length: int) -> dict[str, torch.Tensor]:
    return {
        "input_ids": torch.randint(2, 50, (batch, length)),
        "labels": torch.randint(2, 50, (batch, length)),
    }


@pytest.mark.parametrize("make", [gpt2, llama, bert, t5])
def test_default_config_trains_and_infers_as_eager(hf, twin, make):
    twin(make(hf), **inputs(2, 8))


@pytest.mark.parametrize("make", [gpt2, llama, t5])
def test_the_cache_in_the_output_is_a_real_one(hf, make):
    model = make(hf).eval()
    opt = GraphoptModule(model)
    given = inputs(2, 8)
    with torch.no_grad():
        want, got = model(**given), opt(**given)
    assert list(got) == list(want)
    cache, expected = got.past_key_values, want.past_key_values
    assert type(cache) is type(expected)
    assert cache.get_seq_length() == expected.get_seq_length()
    if not hasattr(cache, "layers"):  # T5 holds one for itself and one for the encoder
        cache, expected = cache.self_attention_cache, expected.self_attention_cache
    for mine, theirs in zip(cache.layers, expected.layers, strict=True):
        assert torch.equal(mine.keys, theirs.keys)
        assert vars(mine).keys() == vars(theirs).keys()
    step = torch.randint(2, 50, (2, 1))
    if make is not t5:  # the source goes on from the optimized module's cache
        again = model(step, past_key_values=got.past_key_values).logits
        assert torch.equal(again, model(step, past_key_values=want.past_key_values).logits)


def test_batches_of_other_sizes_share_one_symbolic_graph(hf):
    model = llama(hf)
    opt = GraphoptModule(model)
    for batch, length in ((2, 8), (3, 9), (4, 12), (5, 7)):
        given = inputs(batch, length)
        torch.testing.assert_close(opt(**given).loss, model(**given).loss)
    assert len(opt._store.entries()) == 2
    assert len(opt.recaptures) == 1


def test_generate_runs_the_source(hf):
    model = llama(hf).eval()
    opt = GraphoptModule(model)
    ids = torch.randint(2, 50, (1, 4))
    how = {"max_new_tokens": 3, "do_sample": False}
    assert torch.equal(opt.generate(ids, **how), model.generate(ids, **how))


def test_a_cache_as_an_argument_is_refused_by_name(hf):
    opt = GraphoptModule(llama(hf).eval())
    ids = torch.randint(2, 50, (1, 4))
    with torch.no_grad():
        cache = opt(ids).past_key_values
        with pytest.raises(CaptureError, match=r"[cC]ache"):
            opt(ids[:, :1], past_key_values=cache)


def test_their_checkpointing_switch_marks_the_layers(hf):
    model = llama(hf).train()
    model.gradient_checkpointing_enable()
    opt = GraphoptModule(model)
    opt(**inputs(2, 8))
    regions = {n.meta.get(REGION) for n in opt.graph.nodes if n.op == "call_function"}
    assert regions == {None, *range(1, model.config.num_hidden_layers + 1)}
    model.gradient_checkpointing_disable()
    opt(**inputs(2, 8))
    assert not any(REGION in n.meta for n in opt.graph.nodes)
