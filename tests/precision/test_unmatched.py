"""Precision overrides that decide nothing are told of."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import graphopt
from graphopt.errors import GraphoptWarning


class Net(nn.Module):
    """A softmax in eval alone, a module that is never called, one whose weight others read."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.spare = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.act = nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.linear(self.act(self.up(x)), self.down.weight)
        return y if self.training else y.softmax(-1)


X = torch.randn(2, 8)


def told(**options: object) -> list[str]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        graphopt.optimize(Net(), X, **options)
    texts = [str(w.message) for w in seen if issubclass(w.category, GraphoptWarning)]
    return [t for t in texts if "precision_overrides" in t]


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("addmm", "no such op is there; those that are: gelu, linear"),
        ("softmax", "no such op is there"),
        ("up::gelu", "no such op is inside 'up'; those that are: linear"),
        ("*::relu", "no such op is inside '*'; those that are: gelu, linear"),
        ("spare", "nothing is computed inside 'spare'"),
        ("spare::linear", "nothing is computed inside 'spare'"),
    ],
)
def test_a_pattern_that_matches_nothing_is_told_of(pattern: str, why: str) -> None:
    (text,) = told(precision="bf16", precision_overrides={pattern: "fp32"})
    assert f"{pattern!r} decides nothing in the training graph of Net: {why}" in text


def test_the_module_that_reads_the_parameters_is_named() -> None:
    model = nn.Sequential(nn.MultiheadAttention(8, 2, batch_first=True))
    model.forward = lambda x: model[0](x, x, x)[0]  # type: ignore[method-assign]
    with pytest.warns(GraphoptWarning, match=r"'0.out_proj', whose parameters are read in '0'"):
        graphopt.optimize(
            model, X[None], precision="bf16", precision_overrides={"0.out_proj": "fp32"}
        )


def test_a_pattern_that_later_ones_overrule_is_told_of() -> None:
    (text,) = told(precision="bf16", precision_overrides={"linear": "fp32", "*": "bf16"})
    assert "'linear' decides nothing" in text
    assert "the last that matches decides" in text


def test_patterns_that_decide_are_not_told_of() -> None:
    overrides = {"*": "fp32", "aten.linear": "bf16", "up": "fp16"}
    assert not told(precision="bf16", precision_overrides=overrides)


def test_overrides_without_low_precision_are_told_of_once() -> None:
    (text,) = told(precision_overrides={"up": "fp32", "linear": "fp32"})
    assert "no low precision" in text


def test_each_is_told_of_once_and_each_graph_s_plan_holds_it() -> None:
    opt = graphopt.optimize(
        Net(), precision="bf16", precision_overrides={"softmax": "fp32", "gelu": "fp32"}
    )
    with pytest.warns(GraphoptWarning, match="'softmax' decides nothing in the training graph"):
        opt(X)
    assert [p for p, _ in opt.precision_plan.unmatched] == ["softmax"]
    assert "decide nothing here:\n  'softmax'" in repr(opt.precision_plan)
    assert "decide nothing here:\n  'softmax'" in repr(graphopt.report(opt))
    with warnings.catch_warnings():
        warnings.simplefilter("error", GraphoptWarning)
        opt.eval()(X)
        assert not opt.precision_plan.unmatched
        opt.train()(torch.randn(3, 8))
    assert opt.precision_plan.to_dict()["unmatched"][0]["pattern"] == "softmax"


def test_what_only_reads_a_model_tells_it_too() -> None:
    options = {"precision": "bf16", "precision_overrides": {"addmm": "fp32"}}
    for function in (graphopt.explain, graphopt.precision_check):
        with pytest.warns(GraphoptWarning, match="'addmm' decides nothing"):
            function(Net(), X, **options)
