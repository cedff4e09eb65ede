"""Every rule fires on its spellings, stays off its look-alikes, and changes no number."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import graphopt.kernels  # noqa: F401  (registers the ops)
from graphopt.graph.text import ir_text, parse, python_code
from graphopt.passes import Rule, all_rules, run_pipeline, seed_dropouts
from tests.passes.bodies import body_of, run


def cases(which: str) -> Iterator[Any]:
    for rule in all_rules():
        make = getattr(rule, which)
        count = sum(1 for _ in make()) if make else 0
        for i in range(count):
            yield pytest.param(rule, i, id=f"{rule.name}-{i}")


def case(rule: Rule, which: str, index: int) -> tuple[Any, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    return list(getattr(rule, which)())[index]


def double(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.detach().double().requires_grad_(value.requires_grad)
    return value


@pytest.mark.parametrize("rule", all_rules(), ids=lambda r: r.name)
def test_a_rule_documents_itself(rule: Rule) -> None:
    assert rule.doc
    assert rule.replacement is not None
    assert rule.examples is not None


@pytest.mark.parametrize(("rule", "index"), list(cases("examples")))
def test_spelling_fires(rule: Rule, index: int) -> None:
    target, inputs = case(rule, "examples", index)
    result = run_pipeline(body_of(target, inputs))
    fired = [r.rule for r in result.rewrites]
    assert rule.name in fired, f"fired {fired}\n{ir_text(result.body)}\n{result.refusals}"


@pytest.mark.parametrize(("rule", "index"), list(cases("counterexamples")))
def test_look_alike_is_left_alone(rule: Rule, index: int) -> None:
    target, inputs = case(rule, "counterexamples", index)
    result = run_pipeline(body_of(target, inputs))
    assert rule.name not in [r.rule for r in result.rewrites], ir_text(result.body)


@pytest.mark.parametrize("which", ["examples", "counterexamples"])
@pytest.mark.parametrize("rule", all_rules(), ids=lambda r: r.name)
def test_numbers_stay(rule: Rule, which: str) -> None:
    """Outputs and the gradients of every float input, against the same program in float64."""
    for target, inputs in list((getattr(rule, which) or (lambda: ()))()):
        given = tuple(x.detach().requires_grad_() if x.is_floating_point() else x for x in inputs)
        result = run_pipeline(body_of(target, given))
        seeded = result.captured.copy()
        seed_dropouts(seeded)
        eager = outputs_and_gradients(seeded, given)
        optimized = outputs_and_gradients(result.body, given)
        low = any(t is not None and t.dtype in (torch.bfloat16, torch.float16) for t in eager)
        for a, b in zip(eager, optimized, strict=True):
            if a is not None and a.is_floating_point():
                tolerance = 3e-2 if low else 2e-5
                torch.testing.assert_close(b, a, rtol=tolerance, atol=tolerance, equal_nan=True)
            else:
                assert (a is None) == (b is None)


def outputs_and_gradients(body: Any, inputs: tuple[torch.Tensor, ...]) -> list[Any]:
    values = list(run(body, inputs))
    floats = [v for v in values if v.requires_grad]
    leaves = [x for x in inputs if x.requires_grad]
    leaves += [p for p in body.root.parameters() if p.requires_grad]
    if not floats or not leaves:
        return values
    weights = [
        torch.cos(torch.arange(v.numel()).double()).view(v.shape).to(v.dtype) for v in floats
    ]
    grads = torch.autograd.grad(floats, leaves, weights, allow_unused=True)
    return [*values, *grads]


@pytest.mark.parametrize(("rule", "index"), list(cases("examples")))
def test_code_runs_and_round_trips(rule: Rule, index: int) -> None:
    target, inputs = case(rule, "examples", index)
    body = run_pipeline(body_of(target, inputs)).body
    again = copy.copy(body)
    again.graph = parse(python_code(body), body)
    for a, b in zip(run(body, inputs), run(again, inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    calls = [n.target for n in body.graph.nodes if n.op == "call_function"]
    assert [n.target for n in again.graph.nodes if n.op == "call_function"] == calls


def test_modules_in_spellings_are_real_models() -> None:
    assert any(isinstance(t, nn.Module) for r in all_rules() if r.examples for t, _ in r.examples())


@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("first", [True, False])
def test_a_norm_takes_the_dropout_of_either_summand(norm: str, first: bool) -> None:
    def model(x: torch.Tensor, r: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        dropped = F.dropout(x, 0.5, True)
        total = dropped + r if first else r + dropped
        return getattr(F, norm)(total, (8,)), total

    body = run_pipeline(body_of(model, (torch.randn(3, 8), torch.randn(3, 8)))).body
    calls = [str(n.target) for n in body.graph.nodes if n.op == "call_function"]
    assert f"graphopt.add_{norm}.default" in calls
    assert "graphopt.dropout.default" not in calls
