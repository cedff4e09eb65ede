"""bisect by the user's own predicate: which graphs run, what is put back, what cannot be told."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from bisect_models import RIGHT, Model, aten, planted
from torch import fx, nn

import graphopt
from graphopt.passes import Match, rule


@rule("canonical", register=False)
def only_without_gradients(x):  # type: ignore[no-untyped-def]
    """relu becomes sigmoid, in graphs without gradients."""
    return aten.relu.default(x)


@only_without_gradients.check
def _(m: Match) -> str | None:
    return "there are gradients" if m.body.grad else None


@only_without_gradients.replace
def _(m: Match) -> fx.Node:
    return m.call(aten.sigmoid.default, m.x)


@rule("canonical", register=False)
def for_seven_rows(x):  # type: ignore[no-untyped-def]
    """relu becomes sigmoid, in graphs of seven rows."""
    return aten.relu.default(x)


@for_seven_rows.check
def _(m: Match) -> str | None:
    return None if m.val.shape[1] == 7 else "other rows"


@for_seven_rows.replace
def _(m: Match) -> fx.Node:
    return m.call(aten.sigmoid.default, m.x)


@pytest.fixture
def block() -> Model:
    """One block, for predicates: each of their runs captures the model anew."""
    return Model(1)


@pytest.fixture
def x() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(2, 5, 16)


def test_the_model_is_left_as_it_was(block: Model, x: torch.Tensor) -> None:
    block.layers[0].norm.eval()
    block.layers[0].up.weight.grad = torch.ones(16, 16)
    before = {k: v.clone() for k, v in block.state_dict().items()}
    attributes = {name: dict(vars(m)) for name, m in block.named_modules()}

    def trains(opt: nn.Module) -> bool:
        optimizer = torch.optim.SGD(opt.parameters(), lr=0.1)
        opt.train()
        opt(x).sum().backward()
        optimizer.step()
        opt.spoiled = True
        return len(opt.rewrites) < 2

    state = torch.get_rng_state()
    assert graphopt.bisect(block, x, predicate=trains).status == "found"
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[k], v) for k, v in block.state_dict().items())
    assert torch.equal(block.layers[0].up.weight.grad, torch.ones(16, 16))
    assert not block.layers[0].norm.training
    assert {name: set(vars(m)) for name, m in block.named_modules()} == {
        name: set(a) for name, a in attributes.items()
    }
    graphopt.bisect(block, x, rules=[RIGHT, planted("layers.2.norm")])
    assert all(torch.equal(before[k], v) for k, v in block.state_dict().items())


def test_a_predicate_decides(block: Model, x: torch.Tensor) -> None:
    found = graphopt.bisect(block, x, predicate=lambda opt: len(opt.rewrites) < 2)
    assert [c.record.ordinal for c in found.culprits[:1]] == [1]
    assert found.judged_by == "<lambda>"


def test_a_predicate_needs_no_example_inputs_when_it_calls_the_module(
    block: Model, x: torch.Tensor
) -> None:
    def right(opt: nn.Module) -> bool:
        return bool(torch.allclose(opt(x), block(x), rtol=1e-5, atol=1e-5))

    found = graphopt.bisect(block, predicate=right, rules=[RIGHT, planted("layers.0.norm")])
    assert [c.record.site.module for c in found.culprits] == ["layers.0.norm"]


def test_the_graph_that_a_predicate_runs_is_searched(block: Model, x: torch.Tensor) -> None:
    def right(opt: graphopt.GraphoptModule) -> bool:
        with torch.no_grad():
            return torch.allclose(opt(x), block(x), atol=1e-4)

    rules = ["default,-bias_act", only_without_gradients]
    found = graphopt.bisect(block, x, predicate=right, rules=rules)
    assert found.culprit is not None
    assert found.culprit.rule == "only_without_gradients"


@pytest.mark.parametrize("grad_first", [True, False])
def test_the_guilty_graph_is_named_though_it_is_not_the_longest(
    block: Model, x: torch.Tensor, grad_first: bool
) -> None:
    modes = [contextlib.nullcontext, torch.no_grad]

    def right(opt: graphopt.GraphoptModule) -> bool:
        good = True
        for mode in modes if grad_first else reversed(modes):
            with mode():
                good &= torch.allclose(opt(x), opt.source(x), atol=1e-4)
        return good

    # With gradients there are two rewrites; the guilty one is the second of the other graph's.
    rules = ["default,-layer_norm,-bias_act", RIGHT, only_without_gradients]
    found = graphopt.bisect(block.eval(), predicate=right, rules=rules)
    (culprit,) = found.culprits
    assert culprit.rule == "only_without_gradients"
    number = 2 if grad_first else 1
    assert culprit.graph == f"graph {number} of 2: eval, no gradients, x: f32[2, 5, 16]"
    assert f"in {culprit.graph}" in repr(found)
    assert (found.graphs, found.cured) == (2, True)
    assert f"all {found.rewrites} rewrites of 2 graphs" in repr(found)
    assert found.to_dict()["culprits"][0]["graph"] == culprit.graph


def test_guilty_rewrites_in_two_graphs_are_both_found(block: Model, x: torch.Tensor) -> None:
    wide = torch.randn(2, 7, 16)

    def right(opt: graphopt.GraphoptModule) -> bool:
        good = [torch.allclose(opt(y), opt.source(y), atol=1e-4) for y in (x, wide)]
        return all(good)

    rules = ["default,-layer_norm,-bias_act", planted("layers.0.norm"), for_seven_rows]
    opt = graphopt.optimize(block.eval(), rules=rules, dynamic=False)
    found = graphopt.bisect(opt, predicate=right)
    graphs = {c.rule: c.graph for c in found.culprits}
    assert graphs["for_seven_rows"] == "graph 2 of 2: eval, x: f32[2, 7, 16]"
    assert graphs["planted_norm"].startswith("graph ")
    assert found.cured


def test_a_graph_behind_one_that_raises_is_searched_too(block: Model, x: torch.Tensor) -> None:
    def right(opt: graphopt.GraphoptModule) -> bool:
        if not torch.allclose(opt(x), opt.source(x), atol=1e-4):
            raise FloatingPointError("the first graph is off")
        with torch.no_grad():
            return torch.allclose(opt(x), opt.source(x), atol=1e-4)

    rules = ["default,-layer_norm,-bias_act", planted("layers.0.norm"), only_without_gradients]
    found = graphopt.bisect(block.eval(), predicate=right, rules=rules)
    assert [c.rule for c in found.culprits] == ["planted_norm", "only_without_gradients"]
    assert found.cured


def test_one_graph_has_no_name(block: Model, x: torch.Tensor) -> None:
    found = graphopt.bisect(block, x, predicate=lambda opt: len(opt.rewrites) < 2)
    assert (found.culprits[0].graph, found.graphs) == ("", 1)


def test_a_copy_that_a_predicate_makes_has_as_many_rewrites(block: Model, x: torch.Tensor) -> None:
    def right(opt: graphopt.GraphoptModule) -> bool:
        twin = copy.deepcopy(opt)
        return torch.allclose(twin(x), block(x), atol=1e-4)

    rules = ["default,-layer_norm,-bias_act", planted("layers.0.norm")]
    found = graphopt.bisect(block, x, predicate=right, rules=rules)
    assert [c.rule for c in found.culprits] == ["planted_norm"]


def test_a_predicate_that_raises_counts_as_wrong(block: Model, x: torch.Tensor) -> None:
    def raises(opt: Any) -> bool:
        if len(opt.rewrites) > 1:
            raise FloatingPointError("loss is nan")
        return True

    culprit = graphopt.bisect(block, x, predicate=raises).culprit
    assert culprit is not None
    assert culprit.record.ordinal == 1
    assert "FloatingPointError: loss is nan" in culprit.detail


def test_a_flaky_predicate_is_told(block: Model, x: torch.Tensor) -> None:
    answers = iter([False, True, False, True])
    found = graphopt.bisect(block, x, predicate=lambda opt: next(answers))
    assert found.status == "flaky"
    assert "gave two answers" in repr(found)
    assert found.culprits == ()
