"""What objects show of themselves: one line, tables for results, escaped HTML for notebooks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import graphopt


class Net(nn.Module):
    """A norm and a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.fc(x))


class Branch(nn.Module):
    """Branches on a value."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.sum() > 0 else x - 1


@pytest.fixture(scope="module")
def opt() -> nn.Module:
    return graphopt.optimize(Net(), torch.ones(2, 8))


def test_an_optimized_module_shows_its_modules_and_its_graph(opt: nn.Module) -> None:
    text = repr(opt)
    assert text.startswith("OptimizedNet(\n  (norm): LayerNorm")
    assert text.endswith("graphopt: train graph, 3 ops -> 2, 2 rewrites; .code shows it")
    assert str(opt) == text


def test_before_the_first_call_there_is_no_graph() -> None:
    fresh = graphopt.optimize(Net())
    assert repr(fresh).endswith("graphopt: no graph yet")
    assert "no graph yet" in fresh._repr_html_()


def test_a_fallback_says_that_it_runs_unoptimized_and_why() -> None:
    with pytest.warns(graphopt.GraphoptWarning, match="running the model unoptimized"):
        opt = graphopt.optimize(Branch(), torch.ones(3), on_error="fallback")
    assert "graphopt: runs unoptimized, for " in repr(opt)
    with pytest.raises(graphopt.GraphOptError, match="Branch runs unoptimized") as caught:
        _ = opt.code
    assert "test_reprs.py" in str(caught.value)
    for function in (graphopt.report, graphopt.diff):
        with pytest.raises(graphopt.GraphOptError, match="Branch runs unoptimized"):
            function(opt)


def test_records_and_refusals_are_one_line(opt: nn.Module) -> None:
    record = next(r for r in opt.rewrites if r.rule == "add_layer_norm")
    assert repr(record).startswith(
        f"<rewrite #{record.ordinal} add_layer_norm at norm (test_reprs.py:"
    )
    assert "aten.add.Tensor, aten.layer_norm -> graphopt.add_layer_norm, " in repr(record)
    assert "\n" not in repr(record)

    class Odd(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.relu(nn.functional.layer_norm(x, x.shape[1:]))

    refusals = graphopt.optimize(Odd(), torch.ones(2, 3, 4)).refusals
    assert all(repr(r).startswith(f"<refusal {r.rule} at ") for r in refusals)
    assert refusals


def test_a_check_is_one_line(opt: nn.Module) -> None:
    result = graphopt.verify(opt, torch.ones(2, 8))
    assert repr(result.whole) == "<the whole step: right>"
    assert all(repr(c).startswith(f"<rewrite #{c.ordinal} {c.rule} at ") for c in result.checks)
    assert all(repr(c).endswith(": right>") for c in result.checks)


def test_results_have_html_for_notebooks(opt: nn.Module) -> None:
    x = torch.ones(2, 8)
    results = [
        graphopt.explain(Net(), x),
        graphopt.verify(opt, x),
        graphopt.report(opt),
        graphopt.diff(opt),
        graphopt.bisect(Net(), x),
    ]
    for result in results:
        page = result._repr_html_()
        assert "class='graphopt'" in page
        assert "<script" not in page


def test_html_of_an_optimized_module_is_escaped() -> None:
    class Odd(nn.Module):
        def extra_repr(self) -> str:
            return "<img src=x>"

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    page = graphopt.optimize(Odd(), torch.ones(2))._repr_html_()
    assert "<img" not in page
    assert "&lt;img src=x&gt;" in page
    assert "def forward(self, x)" in page
