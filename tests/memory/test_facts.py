"""Facts per node: what is saved, when it is made, read, asked for and freed."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import graphopt
from graphopt.capture.export import capture
from graphopt.cost.roofline import Rates
from graphopt.memory.facts import measure
from graphopt.memory.labels import Label
from graphopt.memory.oracle import predict
from graphopt.memory.watcher import Watcher

RATES = Rates("test", 1000.0, {"float32": 10.0}, 1.0)


def model():
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 4))


def facts_of(module, x, **options):
    body = graphopt.optimize(module, (x,), **options).body
    return body, measure(body, loss_fn=lambda y: y.float().sum(), rates=RATES)


@pytest.mark.parametrize("options", [{}, {"fuse": False}, {"precision": "bf16"}], ids=str)
def test_the_peak_is_the_oracles(options):
    body, facts = facts_of(model(), torch.randn(32, 16), **options)
    found = predict(body, loss_fn=lambda y: y.float().sum())
    assert facts.peak_bytes == found.peak_bytes
    assert max(s.peak for s in facts.steps) == found.peak_bytes
    assert facts.start_bytes == found.start_bytes


def test_saved_bytes_owner_and_internals():
    _, facts = facts_of(model(), torch.randn(32, 16), fuse=False)
    values = facts.values
    assert values["linear"].saved_bytes == values["linear"].bytes == 32 * 64 * 4
    assert values["linear_1"].saved_bytes == 0  # nobody needs the last one's result
    assert values["layer_norm"].internal_bytes == 2 * 32 * 4  # mean and rstd a row


def test_life_of_a_value():
    _, facts = facts_of(model(), torch.randn(32, 16), fuse=False)
    gelu, steps = facts.values["gelu"], facts.steps
    assert steps[gelu.made].name == "gelu"
    assert gelu.reads == ("linear",)
    assert steps[gelu.last_use].name == "layer_norm"
    (asked,) = gelu.unpacks
    assert steps[asked].node == "layer_norm"
    assert steps[asked].backward
    # autograd lets go of it behind its node, whose checks of its results are a step of their own
    assert steps[gelu.freed].name == steps[asked].name
    assert gelu.freed in (asked, asked + 1)


def test_a_view_is_no_value_and_reads_through():
    class Views(nn.Module):
        def forward(self, x):
            y = (x * 2).view(4, 8).t()
            return y.exp()

    _, facts = facts_of(Views(), torch.randn(32, requires_grad=True), fuse=False)
    assert list(facts.values) == ["mul", "exp"]
    assert facts.values["exp"].reads == ("mul",)
    assert facts.steps[facts.values["mul"].last_use].name == "exp"


def test_several_results_are_one_value():
    class Parts(nn.Module):
        def forward(self, x):
            values, indices = (x * 2).topk(3)
            return values.exp() + indices

    _, facts = facts_of(Parts(), torch.randn(8, 16, requires_grad=True), fuse=False)
    assert facts.values["topk"].bytes == 8 * 3 * (4 + 8)
    assert "topk" in facts.values["exp"].reads


def test_times_follow_the_rates():
    class Product(nn.Module):
        def forward(self, a, b):
            return a @ b

    a, b = torch.randn(512, 512, requires_grad=True), torch.randn(512, 512, requires_grad=True)
    facts = measure(capture(Product(), (a, b)).body, rates=RATES)
    product = facts.values["matmul"]
    assert product.cost.flops == 2 * 512**3
    assert product.ms == pytest.approx(2 * 512**3 / 10e12 * 1e3)
    assert product.backward_ms == pytest.approx(2 * product.ms)
    assert facts.backward_ms >= product.backward_ms


def test_no_op_is_free_of_the_launch():
    _, facts = facts_of(model(), torch.randn(2, 16), fuse=False)
    assert all(v.ms >= RATES.floor_us / 1e3 for v in facts.values.values())


def test_without_grad_there_is_no_backward():
    with torch.no_grad():
        body = capture(model().eval(), (torch.randn(2, 16),)).body
        facts = measure(body, rates=RATES)
    assert not any(s.backward for s in facts.steps)
    assert all(not v.saved_bytes for v in facts.values.values())


def test_a_backward_that_lets_go_on_the_way_is_two_steps():
    """The product for the weight is done with its operand before that for the operand begins."""

    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 8))

        def forward(self, x):
            copy = self.weight * 2
            return torch.ops.graphopt.linear_wide(x.tanh(), copy, None, [self.weight])

    _, facts = facts_of(Wide(), torch.randn(16, 8, requires_grad=True), fuse=False)
    asked = [s.unpacks for s in facts.steps if s.backward and s.node == "linear_wide"]
    assert asked[:2] == [("tanh", "mul"), ("mul",)]
    assert facts.values["mul"].unpacks[1] == facts.values["tanh"].unpacks[0] + 1


def test_a_product_is_as_fast_as_its_operands_are_narrow():
    """What it is added to may be wider: sums of weights' gradients in float32."""
    rates = Rates("test", 1e6, {"float32": 1.0, "bfloat16": 10.0}, 0.0)
    watcher = Watcher(rates)
    tracker = SimpleNamespace(events=[])
    watcher.recorder = SimpleNamespace(tracker=tracker, label=lambda: Label("node"))
    total, a = torch.empty(64, 64), torch.empty(64, 64, dtype=torch.bfloat16)
    watcher.dispatched(torch.ops.aten.addmm.default, (total, a, a), {}, total.clone())
    assert watcher.marks[0].ms == pytest.approx(2 * 64**3 / 1e10)


def test_a_product_inside_an_operator_counts_once(monkeypatch):
    """`linear_rope` launches a kernel beside its product, which torch runs."""

    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(48, 32))

        def forward(self, x, table):
            parts = torch.ops.graphopt.linear_rope(
                x, self.weight, None, table, table, [16, 16, 16], False
            )
            return sum(p.sum() for p in parts)

    monkeypatch.setattr("graphopt.memory.watcher.launches", lambda func, args: True)
    given = torch.ones(2, 64, 32), torch.ones(64, 8)
    body = graphopt.optimize(Turned(), given, fuse=False).body
    made = measure(body, rates=RATES).values["linear_rope"]
    product = 2 * 2 * 64 * 48 * 32
    assert product <= made.cost.flops < 1.5 * product
