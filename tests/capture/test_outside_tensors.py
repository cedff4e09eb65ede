"""Tensors in plain attributes, memory that is shared, caches, modes: what a graph relies on."""

from __future__ import annotations

import os
import sys
import types

import pytest
import torch
from outside_helpers import X, of
from torch import nn

from graphopt.capture import functions
from graphopt.errors import CaptureError, GraphoptWarning
from graphopt.module import GraphoptModule


def test_a_plain_tensor_is_written_once(twin):
    def forward(self, x):
        self.kept.add_(1)
        self.kept += 1
        return x + self.kept

    model = of(forward, kept=torch.zeros(3))
    opt = GraphoptModule(model)
    assert torch.equal(opt(X), X + 2)
    assert model.kept.tolist() == [2, 2, 2]
    assert torch.equal(opt(X), X + 4)
    assert not list(model.buffers())


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: x[:, : int(self.k)],
        lambda self, x: x if self.k else -x,
        lambda self, x: x * sum(self.k.reshape(1).tolist()),
        lambda self, x: x[self.k],
    ],
)
def test_a_value_of_a_plain_tensor_is_never_baked_in(forward):
    model = of(forward, k=torch.tensor(1))
    opt = GraphoptModule(model)
    for k in (1, 0):
        model.k = torch.tensor(k)
        try:
            got = opt(X)
        except CaptureError as error:
            assert os.path.basename(__file__) in error.at  # noqa: PT017
        else:
            assert torch.equal(got, model(X))


def test_which_arguments_are_one_object_is_a_part_of_the_key():
    opt = GraphoptModule(of(lambda self, x, y: x * (2 if x is y else 3)))
    for _ in range(2):
        assert torch.equal(opt(X, X), X * 2)
        assert torch.equal(opt(X, X.clone()), X * 3)


def test_strides_are_a_part_of_the_key():
    model = of(lambda self, x: x * (2 if x.stride(0) == 1 else 3) * (1 + x.stride(-1)))
    opt = GraphoptModule(model)
    for x in (X, torch.ones(3, 2).t(), torch.ones(2, 6)[:, ::2], torch.ones(2, 6)[:, :3], X):
        assert torch.equal(opt(x), model(x))


@pytest.mark.parametrize("other", ["buffer", "attribute"])
def test_state_that_shares_written_memory_runs_the_model_itself(other):
    def forward(self, x):
        self.whole.add_(1)
        return x + self.part

    model = of(forward)
    model.register_buffer("whole", torch.zeros(2, 3))
    if other == "buffer":
        model.register_buffer("part", model.whole[0])
    else:
        model.part = model.whole[0]
    opt = GraphoptModule(model)
    for calls in (1, 2):
        with pytest.warns(GraphoptWarning, match="shares memory"):
            assert torch.equal(opt(X), X + calls)


def test_an_argument_that_is_written_state_runs_the_model_itself():
    def forward(self, x):
        x.add_(1)
        return x + self.kept

    model = of(forward)
    model.register_buffer("kept", torch.zeros(2, 3))
    opt = GraphoptModule(model)
    opt(X.clone())
    with pytest.warns(GraphoptWarning, match="shares memory"):
        assert opt(model.kept[:]).eq(2).all()


class Cached(nn.Module):
    """A cache as timm's LeViT has it: filled in eval, emptied by `train()`."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.register_buffer("index", torch.tensor([0, 1, 1]))
        self.cache = {}

    def train(self, mode=True):
        super().train(mode)
        if mode and self.cache:
            self.cache = {}
        return self

    def forward(self, x):
        if self.training:
            return x + self.bias[self.index]
        if "cpu" not in self.cache:
            self.cache["cpu"] = self.bias[self.index]
        return x + self.cache["cpu"]


def test_a_cache_is_refused_until_it_is_filled():
    model = Cached().eval()
    opt = GraphoptModule(model)
    with torch.no_grad():
        with pytest.raises(CaptureError, match="for a cache: call the model once") as caught:
            opt(X)
        assert 'self.cache["cpu"] = self.bias[self.index]' in caught.value.at
        want = model(X)
        assert torch.equal(opt(X), want)
        model.bias.mul_(3)  # eager goes on with what it kept, too
        assert torch.equal(opt(X), want)
        assert torch.equal(model(X), want)
        model.train()
        assert torch.equal(opt(X), model(X))
        model.eval()
        want = model(X)
        assert torch.equal(opt(X), want)


def test_inference_mode_is_the_callers() -> None:
    class Asks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * (13 if torch.is_inference_mode_enabled() else 1)

    opt = GraphoptModule(Asks())
    assert opt(torch.ones(2)).tolist() == [1.0, 1.0]
    with torch.inference_mode():
        assert opt(torch.ones(2)).tolist() == [13.0, 13.0]


def test_a_package_installed_beside_torch_is_a_library(monkeypatch):
    beside = types.ModuleType("graphopt_test_beside")
    beside.__file__ = "/opt/packages/graphopt_test_beside/__init__.py"
    monkeypatch.setitem(sys.modules, beside.__name__, beside)
    monkeypatch.setattr(functions, "_BESIDE_TORCH", "/opt/packages/")
    assert functions.is_librarys(beside.__name__)
