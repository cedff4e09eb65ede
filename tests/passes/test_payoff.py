"""Fusions that would make a step slower are left out, on GPUs alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import graphopt
from graphopt.cost.roofline import H200, Rates
from graphopt.errors import OptionError
from graphopt.graph.body import Body
from graphopt.passes import PassOptions, apply, payoff, run_pipeline
from tests.passes.bodies import body_of

SLOW = Rates("slow", 1e-3, {"float32": 1e-3}, 4.0)


def block(*more: nn.Module) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(16), *more, nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))


@pytest.fixture
def as_on(monkeypatch: pytest.MonkeyPatch):
    """Judge every body as if it ran on a device of some rates."""

    def use(rates: Rates) -> list[payoff.Balance]:
        made: list[payoff.Balance] = []

        def balance(body: Body) -> payoff.Balance:
            made.append(payoff.Balance(body.graph, rates, body.grad))
            return made[-1]

        monkeypatch.setattr(apply, "balance_of", balance)
        return made

    return use


def rules_of(model: nn.Module, **options: object) -> tuple[list[str], list[str]]:
    """The rules that fired, and the reasons why others did not."""
    body = body_of(model, (torch.randn(8, 16),))
    result = run_pipeline(body, PassOptions(**options))  # type: ignore[arg-type]
    fired = [r.rule for r in result.rewrites if r.kind == "local"]
    return fired, [r.reason for r in result.refusals]


def test_where_the_device_waits_nothing_is_fused_that_costs_the_host(as_on):
    as_on(H200)
    fired, reasons = rules_of(block())
    assert fired == []
    assert len(reasons) == 2
    assert all("too small to pay" in r and "fuse='always'" in r for r in reasons)


def test_where_the_host_waits_everything_is(as_on):
    as_on(SLOW)
    fired, reasons = rules_of(block())
    assert sorted(fired) == ["bias_act", "layer_norm"]
    assert reasons == []


def test_one_call_in_the_place_of_several_pays_anywhere(as_on):
    as_on(H200)
    assert "layer_norm" in rules_of(block(nn.Dropout(0.1), nn.ReLU()))[0]


def test_always_is_not_judged(as_on):
    as_on(H200)
    assert sorted(rules_of(block(), fuse="always")[0]) == ["bias_act", "layer_norm"]


def test_what_is_refused_leaves_the_graph_as_it_was(as_on):
    as_on(H200)
    body = body_of(block(), (torch.randn(8, 16),))
    expected = [n.target for n in run_pipeline(body, PassOptions(fuse=False)).body.graph.nodes]
    assert [n.target for n in run_pipeline(body).body.graph.nodes] == expected


def test_the_balance_follows_what_is_made(as_on):
    (made,) = [as_on(SLOW)]
    rules_of(block())
    (balance,) = made
    after = payoff.Balance(
        run_pipeline(body_of(block(), (torch.randn(8, 16),))).body.graph, SLOW, 1
    )
    assert balance.host_us == pytest.approx(after.host_us)
    assert balance.device_us == pytest.approx(after.device_us)


def test_the_slower_of_the_two_decides():
    graph = body_of(block(), (torch.randn(8, 16),)).graph
    linear = next(n for n in graph.nodes if n.target is torch.ops.aten.linear.default)
    fused = run_pipeline(body_of(block(), (torch.randn(8, 16),))).body.graph
    (new,) = [n for n in fused.nodes if n.target is torch.ops.graphopt.bias_act.default]
    balance = payoff.Balance(graph, H200, grad=True)
    balance.device_us = balance.host_us + balance.host([new]) + 100
    assert balance.refuses([], [new]) is not None  # the device would be slower by the new kernel
    assert balance.refuses([linear], [new]) is None
    assert balance.refuses([], [linear]) is None  # none of ours: not judged


def test_other_devices_are_not_judged():
    assert payoff.balance_of(body_of(block(), (torch.randn(8, 16),))) is None


def test_every_operator_of_the_table_is_one():
    assert all(isinstance(target, torch._ops.OpOverload) for target in payoff.HOST_US)
    assert all(len(times) == 2 for times in payoff.HOST_US.values())


def test_the_option():
    model, x = block(), torch.randn(8, 16)
    assert len(graphopt.optimize(model, x, fuse="always").rewrites) == 2
    with pytest.raises(OptionError, match="fuse is 'sometimes'"):
        graphopt.optimize(model, x, fuse="sometimes")


@pytest.mark.gpu
def test_a_tiny_model_on_a_gpu_runs_as_it_is_and_a_large_one_is_fused():
    model = nn.Sequential(*(block() for _ in range(4))).cuda()
    small = graphopt.optimize(model, torch.randn(8, 16, device="cuda"))
    assert not small.rewrites
    assert any("too small to pay" in r.reason for r in small.refusals)
    assert graphopt.optimize(model, torch.randn(8, 16, device="cuda"), fuse="always").rewrites
    large = nn.Sequential(nn.LayerNorm(4096), nn.Linear(4096, 4096), nn.GELU()).cuda()
    assert len(graphopt.optimize(large, torch.randn(8192, 4096, device="cuda")).rewrites) == 2
