"""Sizes: fixed at first, symbolic once seen to vary, guarded, logged and bounded."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from graphopt.errors import GraphoptWarning
from graphopt.module import GraphoptModule, Settings


def of(function):
    return type("Of", (nn.Module,), {"forward": function})()


def shapes(*sizes):
    return [torch.randn(s) for s in sizes]


def test_a_second_size_makes_the_dimension_symbolic_once():
    net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU())
    opt = GraphoptModule(net)
    for n in (8, 3, 5, 13, 8, 100):
        x = torch.randn(n, 4)
        assert torch.equal(opt(x), net(x))
    assert len(opt._store.entries()) == 2
    record = opt.recaptures[0]
    assert (record.argument, record.old, record.new) == ("input", (8, 4), (3, 4))
    assert record.symbolic == ("input.shape[0]",)
    assert "input was (8, 4), is (3, 4), now symbolic: input.shape[0]" in str(record)


def test_size_one_is_a_graph_of_its_own():
    opt = GraphoptModule(of(lambda self, x, y: x + y))
    y = torch.ones(4, 3)
    for n in (4, 1, 4):
        assert opt(torch.zeros(n, 3), y).shape == (4, 3)


def test_gradients_through_a_symbolic_graph():
    net = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    opt = GraphoptModule(net)
    for n in (2, 3, 6):
        x = torch.randn(n, 4, requires_grad=True)
        (want,) = torch.autograd.grad(net(x).sin().sum(), x)
        (got,) = torch.autograd.grad(opt(x).sin().sum(), x)
        torch.testing.assert_close(got, want)


def test_two_dimensions_that_vary_alone():
    opt = GraphoptModule(of(lambda self, x: x.flatten().cumsum(0).view(x.shape)))
    for size in ((2, 3), (4, 3), (4, 5), (7, 8), (8, 7)):
        x = torch.randn(size)
        assert torch.equal(opt(x), x.flatten().cumsum(0).view(size))
    assert len(opt._store.entries()) <= 3


def test_sizes_equal_at_capture_may_differ_later():
    def forward(self, x, y):
        return x.sum() + y.sum() * 2

    opt = GraphoptModule(of(forward))
    for m, n in ((3, 3), (4, 4), (4, 6), (9, 5)):
        x, y = torch.randn(m), torch.randn(n)
        torch.testing.assert_close(opt(x, y), x.sum() + y.sum() * 2)


def test_a_branch_on_a_size_is_guarded():
    def forward(self, x):
        return x * 2 if x.shape[0] > 5 else x + 1

    opt = GraphoptModule(of(forward))
    for n in (8, 9, 3, 12, 4):
        x = torch.zeros(n)
        assert torch.equal(opt(x), forward(None, x)), n


def test_sizes_in_results_follow_the_call():
    opt = GraphoptModule(of(lambda self, x: (x, x.shape[0], x.numel())))
    for n in (2, 3, 6):
        assert opt(torch.zeros(n, 2))[1:] == (n, 2 * n)


def test_a_size_that_the_model_fixes_is_captured_per_size():
    def forward(self, x):
        return x * len(x)

    opt = GraphoptModule(of(forward))
    for n in (2, 3, 5, 2, 3):
        assert opt(torch.ones(n)).tolist() == [float(n)] * n
    assert len(opt._store.entries()) == 3


def test_other_facts_of_an_argument_select_the_graph():
    opt = GraphoptModule(of(lambda self, x: x.reshape(-1) * 2))
    x = torch.randn(3, 4)
    for t in (x, x.double(), x.t(), x.clone().requires_grad_()):
        assert torch.equal(opt(t), t.reshape(-1) * 2)
    assert [r.reason for r in opt.recaptures] == ["dtype", "dtype", "shape"]


def test_dynamic_false_keeps_a_graph_per_size():
    opt = GraphoptModule(nn.ReLU(), Settings(dynamic=False))
    for n in (2, 3, 4, 2):
        opt(torch.ones(n))
    assert len(opt._store.entries()) == 3


def test_dynamic_true_is_symbolic_from_the_start():
    opt = GraphoptModule(nn.ReLU(), Settings(dynamic=True))
    for n in (2, 3, 4, 2):
        opt(torch.ones(n, 3))
    assert len(opt._store.entries()) == 1


def test_past_the_limit_a_warning_names_the_argument():
    opt = GraphoptModule(of(lambda self, x, step: x + step), Settings(recapture_limit=3))
    x = torch.zeros(1)
    for step in range(4):
        opt(x, step)
    with pytest.warns(GraphoptWarning, match="because step keeps changing"):
        assert opt(x, 4).item() == 4
    for step in range(5, 12):
        assert opt(x, step).item() == step
    assert len(opt._store.entries()) <= 66


def test_the_reason_of_a_recapture_is_recorded():
    opt = GraphoptModule(nn.Dropout(0.5))
    opt(torch.ones(2))
    opt.eval()(torch.ones(2))
    with torch.no_grad():
        opt(torch.ones(2))
    assert [(r.reason, r.argument) for r in opt.recaptures][1] == ("mode", "grad mode")
    assert opt.recaptures[0].to_dict()["argument"] == "training"


def test_a_second_call_of_a_kind_captures_nothing(monkeypatch):
    opt = GraphoptModule(nn.Linear(3, 3))
    opt(torch.ones(2, 3))
    monkeypatch.setattr("graphopt.capture.store.capture", None)
    opt(torch.ones(2, 3))
