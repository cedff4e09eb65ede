"""Recurrent layers under autocast on the CPU: whole as oneDNN's, and dropout between layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import graphopt
from graphopt.passes.recurrent import one_kernel
from graphopt.replay import probabilities

aten = torch.ops.aten
BF16 = torch.bfloat16


def one_dnn() -> bool:
    """Whether eager's LSTM under autocast runs on this processor."""
    try:
        with torch.autocast("cpu", BF16):
            nn.LSTM(4, 4)(torch.ones(2, 2, 4))
    except RuntimeError:
        return False
    return bool(torch.backends.mkldnn.is_available())


def calls(graph: torch.fx.Graph) -> list[Any]:
    return [n.target for n in graph.nodes if n.op == "call_function"]


@pytest.mark.skipif(not one_dnn(), reason="oneDNN has no LSTM in bfloat16 for this processor")
@pytest.mark.parametrize("needs_grad", [True, False])
def test_an_lstm_is_autocast_s_to_the_bit(needs_grad: bool) -> None:
    model = nn.LSTM(8, 8, 2, bidirectional=True, batch_first=True)
    x = torch.randn(3, 5, 8, requires_grad=needs_grad)
    found = []
    for run in (model, graphopt.optimize(model, x, precision="bf16")):
        model.zero_grad()
        with torch.autocast("cpu", BF16, enabled=run is model):
            y, (h, c) = run(x)
        (y.float().square().sum() + c.float().sum()).backward()
        found.append([y, h, c, *(p.grad for p in model.parameters())])
    for a, b in zip(*found, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def test_an_lstm_with_symbolic_batch_is_one_op() -> None:
    model = nn.LSTM(8, 8, 2, batch_first=True)
    opt = graphopt.optimize(
        model, torch.randn(3, 5, 8, requires_grad=True), precision="bf16", dynamic=True
    )
    assert calls(opt.graph).count(aten.lstm.input) == 1
    assert opt(torch.randn(6, 5, 8, requires_grad=True))[0].shape == (6, 5, 8)
    assert len(opt.recaptures) == 0


@pytest.mark.parametrize(
    ("options", "dtype", "whole"),
    [
        ({}, torch.float32, True),
        ({"proj_size": 2}, torch.float32, False),
        ({}, torch.float64, False),
    ],
)
def test_which_lstm_eager_hands_to_one_dnn(
    options: dict[str, int], dtype: torch.dtype, whole: bool
) -> None:
    if not torch.backends.mkldnn.is_available():
        pytest.skip("torch without oneDNN")
    h = torch.zeros(1, 2, options.get("proj_size", 4), dtype=dtype)
    args = (torch.zeros(3, 2, 4, dtype=dtype), [h, torch.zeros(1, 2, 4, dtype=dtype)], [])
    assert one_kernel(aten.lstm.input, args, "cpu") == whole
    assert not one_kernel(aten.lstm.input, args, "cuda")


STACKS = [
    pytest.param(lambda: nn.LSTM(8, 8, 3, dropout=0.5), id="lstm"),
    pytest.param(lambda: nn.LSTM(8, 8, 2, dropout=0.5, proj_size=4), id="lstm with projections"),
    pytest.param(lambda: nn.GRU(8, 8, 2, dropout=0.5), id="gru"),
    pytest.param(lambda: nn.RNN(8, 8, 3, dropout=0.5, batch_first=True), id="rnn"),
    pytest.param(lambda: nn.RNN(8, 8, 2, "relu", dropout=0.5, bidirectional=True), id="relu"),
]


@pytest.mark.parametrize("make", STACKS)
def test_dropout_between_the_layers_is_there(make: Callable[[], nn.RNNBase]) -> None:
    model, x = make(), torch.randn(2, 2, 8)
    opt = graphopt.optimize(model, x, precision="bf16")
    assert probabilities(opt.graph) == {0.5: model.num_layers - 1}
    assert not torch.equal(opt(x)[0], opt(x)[0])  # drawn anew
    assert graphopt.verify(opt, x).passed
    model.eval()
    assert torch.equal(opt(x)[0], opt(x)[0])
    assert not probabilities(opt.graph)


@pytest.mark.parametrize("make", STACKS[1:])
def test_a_stack_taken_apart_gives_what_autocast_gives(make: Callable[[], nn.RNNBase]) -> None:
    """At a probability that drops nothing, all that differs is where values are rounded."""
    model, x = make(), torch.randn(2, 2, 8)
    model.dropout = 1e-12
    opt = graphopt.optimize(model, x, precision="bf16")
    with torch.autocast("cpu", BF16):
        wanted = model(x)
    found = opt(x)
    torch.testing.assert_close(found, wanted, atol=2e-2, rtol=2e-2)


def test_one_layer_draws_nothing() -> None:
    with pytest.warns(UserWarning, match="dropout option adds dropout after all but last"):
        model = nn.GRU(8, 8, 1, dropout=0.5)
    opt = graphopt.optimize(model, torch.randn(3, 4, 8))
    assert not probabilities(opt.graph)
