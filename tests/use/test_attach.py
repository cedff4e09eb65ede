"""A model optimized in place stays the model that it was."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import pickle
import sys
import types
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import graphopt
from graphopt.attach import AttachedForward

pytestmark = pytest.mark.filterwarnings("ignore::graphopt.errors.GraphoptWarning")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8)
        self.scale = 1.0

    def forward(self, x: torch.Tensor, *, twice: bool = False) -> torch.Tensor:
        """Ours."""
        y = self.down(torch.relu(self.norm(self.up(x)))) * self.scale
        return y + y if twice else y


def net() -> Net:
    torch.manual_seed(0)
    return Net()


X = torch.linspace(-2, 2, 24).reshape(3, 8)


def loaded(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)


def saved(model: nn.Module) -> bytes:
    file = io.BytesIO()
    torch.save(model, file)
    return file.getvalue()


# ---- the same object


def test_it_is_the_same_object_and_computes_the_same() -> None:
    model, twin = net(), net()
    keys = list(model.state_dict())
    assert graphopt.attach(model, X) is model
    assert type(model) is Net
    assert list(model.state_dict()) == keys
    assert list(dict(model.named_modules())) == list(dict(twin.named_modules()))
    torch.testing.assert_close(model(X, twice=True), twin(X, twice=True))
    assert any(r.rule == "layer_norm" for r in model.forward.optimized.rewrites)


def test_verify_takes_it() -> None:
    assert graphopt.verify(graphopt.attach(net(), X), X).passed


def test_gradients_arrive_in_its_parameters() -> None:
    model, twin = graphopt.attach(net()), net()
    for m in (model, twin):
        m(X).square().sum().backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_forward_looks_like_the_models_own() -> None:
    model = graphopt.attach(net())
    assert inspect.signature(model.forward) == inspect.signature(Net().forward)
    assert list(inspect.signature(model.forward).parameters) == ["x", "twice"]
    assert model.forward.__name__ == "forward"
    assert model.forward.__self__ is model


def test_hooks_of_the_model_and_modules_run() -> None:
    model = graphopt.attach(net(), X)
    seen: list[str] = []
    model.register_forward_pre_hook(lambda m, a: seen.append("pre"))
    model.register_forward_hook(lambda m, a, y: seen.append("post"))
    model(X)
    assert seen == ["pre", "post"]


def test_detach_undoes_it() -> None:
    model = net()
    before = dict(model.__dict__)
    assert graphopt.detach(graphopt.attach(model, X)) is model
    assert model.__dict__ == before
    assert isinstance(model.forward, types.MethodType)


def test_a_forward_of_its_own_is_captured_and_comes_back() -> None:
    model = net()

    def patched(self: Net, x: torch.Tensor) -> torch.Tensor:
        return Net.forward(self, x) + 1

    own = types.MethodType(patched, model)
    model.forward = own  # type: ignore[method-assign]
    graphopt.attach(model)
    torch.testing.assert_close(model(X), net()(X) + 1)
    assert graphopt.detach(model).forward is own


def test_it_is_freed() -> None:
    model = graphopt.attach(net(), X)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


# ---- copies


def test_a_deepcopy_runs_on_its_own_parameters() -> None:
    model = graphopt.attach(net(), X)
    ema = copy.deepcopy(model)
    with torch.no_grad():
        ema.down.weight.zero_()
        ema.down.bias.fill_(3.0)
    torch.testing.assert_close(ema(X), torch.full((3, 8), 3.0))
    torch.testing.assert_close(model(X), net()(X))
    assert ema.forward.model is ema
    assert ema.forward.optimized.rewrites
    assert type(graphopt.detach(ema).forward) is types.MethodType


@pytest.mark.parametrize(
    "copied", [lambda m: pickle.loads(pickle.dumps(m)), lambda m: loaded(saved(m))],
    ids=["pickle", "torch.save"],
)  # fmt: skip
def test_a_loaded_model_is_attached(copied: Any) -> None:
    sys.modules.setdefault(Net.__module__, sys.modules[__name__])
    model = graphopt.attach(net(), X)
    other = copied(model)
    assert isinstance(other.forward, AttachedForward)
    assert other.forward.model is other
    with torch.no_grad():
        other.down.bias.add_(1.0)
    torch.testing.assert_close(other(X), net()(X) + 1.0)
    assert other.forward.optimized.rewrites


def test_a_forward_alone_pickles_with_its_model() -> None:
    forward = pickle.loads(pickle.dumps(graphopt.attach(net(), X).forward))
    torch.testing.assert_close(forward(X), net()(X))


def test_a_replica_of_data_parallel_runs_its_own_forward() -> None:
    model = graphopt.attach(net(), X)
    replica = model._replicate_for_data_parallel()
    assert "forward" not in replica.__dict__
    assert isinstance(model.forward, AttachedForward)


# ---- inside a larger one


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x))


def test_a_submodule_attached_in_a_larger_model() -> None:
    model, twin = Outer(), Outer()
    graphopt.attach(model.inner)
    torch.testing.assert_close(model(X), twin(X))
    assert model.inner.forward.optimized.rewrites


def test_a_larger_model_is_captured_through_an_attached_submodule() -> None:
    model, twin = Outer(), Outer()
    graphopt.attach(model.inner, X)
    graphopt.attach(model, X)
    torch.testing.assert_close(model(X), twin(X))
    assert any(r.rule == "layer_norm" for r in model.forward.optimized.rewrites)
    opt = graphopt.optimize(graphopt.detach(model), X)
    torch.testing.assert_close(opt(X), twin(X))


def test_changes_of_the_model_are_seen() -> None:
    model = graphopt.attach(net(), X)
    model.scale = 2.0
    torch.testing.assert_close(model(X), net()(X) * 2)
    model.down = nn.Linear(16, 4)
    assert model(X).shape == (3, 4)


# ---- refused, and left alone


def test_twice_is_refused() -> None:
    model = graphopt.attach(net())
    with pytest.raises(graphopt.OptionError, match="Net is attached already"):
        graphopt.attach(model)


def test_detach_of_what_is_not_attached_is_refused() -> None:
    with pytest.raises(graphopt.OptionError, match="Net is not attached"):
        graphopt.detach(net())
    with pytest.raises(graphopt.OptionError, match="came from optimize"):
        graphopt.detach(graphopt.optimize(net()))
    with pytest.raises(graphopt.OptionError, match=r"of type int, not an nn\.Module"):
        graphopt.detach(3)  # type: ignore[type-var]


def test_detach_under_another_wrapper_is_refused() -> None:
    import functools

    model = graphopt.attach(net())
    model.forward = functools.partial(model.forward, twice=True)  # type: ignore[method-assign]
    with pytest.raises(graphopt.OptionError, match="something else replaced the forward"):
        graphopt.detach(model)


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(graphopt.OptionError, match="attach has no option 'fused'"):
        graphopt.attach(net(), X, fused=True)


def test_a_failed_attach_leaves_the_model() -> None:
    model = net()
    with pytest.raises(graphopt.OptionError):
        graphopt.attach(model, rules="no_such_rule")
    assert "forward" not in model.__dict__


def test_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    data = pickle.dumps(graphopt.attach(net()).state_dict())
    monkeypatch.setenv("GRAPHOPT_DISABLE", "1")
    model = net()
    assert graphopt.attach(model, X) is model
    assert "forward" not in model.__dict__
    assert graphopt.detach(model) is model
    model.load_state_dict(pickle.loads(data))


def test_a_copy_made_while_disabled_runs_its_own_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    model = graphopt.attach(net(), X)
    monkeypatch.setenv("GRAPHOPT_DISABLE", "1")
    ema = copy.deepcopy(model)
    assert torch.equal(ema(X), net()(X))
    assert ema.forward._optimized is None


# ---- Hugging Face


def gpt2() -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=61, n_embd=16, n_layer=2, n_head=2, n_positions=32, bos_token_id=1,
        eos_token_id=2, pad_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).eval()


IDS = torch.tensor([[5, 9, 11, 3], [7, 8, 30, 31]])


@pytest.mark.parametrize(
    "options",
    [{}, {"use_cache": False}, {"num_beams": 2}, {"do_sample": True}],
    ids=["greedy", "no cache", "beams", "sample"],
)
def test_generate_gives_equal_tokens(options: dict[str, Any]) -> None:
    model = gpt2()

    def tokens() -> torch.Tensor:
        torch.manual_seed(4)
        mask = torch.ones_like(IDS)
        found = model.generate(IDS, attention_mask=mask, max_new_tokens=6, **options)
        assert isinstance(found, torch.Tensor)
        return found

    expected = tokens()
    graphopt.attach(model)
    assert torch.equal(tokens(), expected)
    assert torch.equal(tokens(), expected)


def test_generate_says_that_its_cache_runs_the_own_forward() -> None:
    model = graphopt.attach(gpt2())
    for count in (1, 0):  # said once
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", graphopt.GraphoptWarning)
            model.generate(IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=2)
        told = [w for w in caught if "DynamicCache run the model's own forward" in str(w.message)]
        assert len(told) == count


def test_save_pretrained_and_back(tmp_path: Path) -> None:
    model = graphopt.attach(gpt2().train())
    loss = model(input_ids=IDS, labels=IDS).loss
    model.save_pretrained(tmp_path)
    other = type(model).from_pretrained(tmp_path).train()
    torch.testing.assert_close(other(input_ids=IDS, labels=IDS).loss, loss)
    assert model.forward.optimized.rewrites
    assert other.config.architectures == ["GPT2LMHeadModel"]


def test_a_trainers_look_at_it() -> None:
    import transformers

    model = graphopt.attach(gpt2())
    assert isinstance(model, transformers.PreTrainedModel)
    columns = list(inspect.signature(model.forward).parameters)
    assert columns == list(inspect.signature(transformers.GPT2LMHeadModel.forward).parameters)[1:]
    assert {"input_ids", "attention_mask", "labels"} <= set(columns)


def test_a_language_model_copies_and_pickles() -> None:
    model = graphopt.attach(gpt2())
    expected = model(IDS).logits
    for other in (copy.deepcopy(model), loaded(saved(model))):
        assert other.lm_head.weight is other.transformer.wte.weight
        torch.testing.assert_close(other(IDS).logits, expected)
        assert other.forward.optimized.rewrites
