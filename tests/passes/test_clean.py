"""Cleaning: what goes, and what must stay."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from graphopt import optimize, verify
from graphopt.graph.text import ir_text
from graphopt.passes import PassOptions, run_pipeline
from tests.passes.bodies import body_of, run

aten = torch.ops.aten
NO_RULES = PassOptions(rules=["glu"])


def ops_after(function, *inputs):
    result = run_pipeline(body_of(function, inputs), NO_RULES)
    for a, b in zip(run(result.captured, inputs), run(result.body, inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    return [
        str(n.target).removeprefix("aten.")
        for n in result.body.graph.nodes
        if n.op == "call_function"
    ]


X = torch.tensor([[-0.0, 1.0, float("nan")], [float("inf"), -2.0, 3.0]])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.to(torch.float32) + 1,
        lambda x: x.contiguous() + 1,
        lambda x: x.view(2, 3) + 1,
        lambda x: x.expand(2, 3) + 1,
        lambda x: x[:, :] + 1,
        lambda x: x * 1.0 + 1,
        lambda x: x / 1 + 1,
        lambda x: F.dropout(x, 0.5, False) + 1,
        lambda x: F.dropout(x, 0.0, True) + 1,
        lambda x: x.type_as(x) + 1,
    ],
)
def test_no_ops_go(function):
    assert ops_after(function, X) == ["add.Tensor"]


def test_a_clone_inside_goes_and_one_of_an_input_stays():
    assert ops_after(lambda x: x.exp().clone() + 1, X) == ["exp.default", "add.Tensor"]
    assert ops_after(lambda x: x[0].clone() + 1, X) == [
        "select.int",
        "clone.default",
        "add.Tensor",
    ]


def test_a_float_plus_zero_stays_since_it_turns_minus_zero():
    assert "add.Tensor" in ops_after(lambda x: (x + 0).sign(), X)
    assert ops_after(lambda x: (x + 0).abs(), X.nan_to_num().long()) == ["abs.default"]


def test_casts_that_round_stay():
    assert ops_after(lambda x: x.bfloat16().float(), X) == ["to.dtype", "to.dtype"]


def test_a_returned_clone_or_view_stays_a_tensor_of_its_own():
    assert ops_after(lambda x: x.clone(), X) == ["clone.default"]
    assert ops_after(lambda x: x.view(2, 3), X) == ["view.default"]


def test_equal_ops_are_computed_once():
    assert ops_after(lambda x: torch.exp(x) * torch.exp(x).sin(), X) == [
        "exp.default",
        "sin.default",
        "mul.Tensor",
    ]


def test_one_and_true_are_no_equal_arguments():
    def function(x):
        return torch.sum(x, 1, keepdim=True) + torch.sum(x, 0, keepdim=True)

    assert ops_after(function, X).count("sum.dim_IntList") == 2


def test_two_outputs_never_become_one_tensor():
    def function(x):
        return torch.exp(x), torch.exp(x)

    body = run_pipeline(body_of(function, (X,))).body
    a, b = run(body, (X,))
    assert a.data_ptr() != b.data_ptr()


def test_random_ops_are_neither_merged_nor_dropped():
    def function(x):
        torch.rand_like(x)
        return torch.rand_like(x) + torch.rand_like(x)

    result = run_pipeline(body_of(function, (X,)))
    assert sum("rand_like" in str(n.target) for n in result.body.graph.nodes) == 3


def test_dropouts_share_one_seed_and_keep_their_sites():
    def function(x):
        return F.dropout(x, 0.5, True) - F.dropout(x, 0.5, True)

    result = run_pipeline(body_of(function, (torch.ones(64, 64),)), NO_RULES)
    sites = [
        n.args[3] for n in result.body.graph.nodes if str(n.target) == "graphopt.dropout.default"
    ]
    assert sites == [0, 1]
    assert ir_text(result.body).count("draw_seed") == 1
    first, again, other = (run(result.body, (torch.ones(64, 64),), seed)[0] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.any(), "both sites drew the same mask"


def test_constants_are_folded_but_state_is_not():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("steps", torch.arange(4))

        def forward(self, x):
            return x + torch.arange(4).add(1).mul(2) + self.steps.add(1).mul(2)

    body = run_pipeline(body_of(Model(), (torch.ones(4),))).body
    text = ir_text(body)
    assert "_graphopt_constants.c0" in text
    assert "aten.add.Tensor(steps, 1)" in text
    assert torch.equal(body.constants["c0"], torch.arange(4).add(1).mul(2))


TABLE = torch.arange(4.0)


class Holding(torch.nn.Module):
    """Tensors that no module registers: in a list, in a global."""

    def __init__(self):
        super().__init__()
        self.kept = [torch.nn.Parameter(torch.arange(8.0)), torch.arange(4.0)]

    def forward(self, x):
        y = x * self.kept[0].view(2, 4).sum(0)
        return y + self.kept[1].add(1).mul(2) + TABLE.add(1).mul(3)


def test_tensors_that_the_user_keeps_are_read_at_each_call():
    model, x = Holding(), torch.ones(4)
    opt = optimize(model, x)
    assert torch.equal(opt(x), model(x))
    for kept in (*model.kept, TABLE):
        kept.data.add_(1)
        assert torch.equal(opt(x), model(x))
    assert not opt.recaptures


def test_a_parameter_that_the_user_keeps_gets_its_gradient():
    model, x = Holding(), torch.ones(4)
    opt = optimize(model, x)
    opt(x).sum().backward()
    assert torch.equal(model.kept[0].grad, torch.ones(8))
    assert verify(opt, x).passed


def test_a_returned_constant_is_computed_at_each_call():
    def function(x):
        return torch.arange(4).add(1).mul(2), x + 1

    body = run_pipeline(body_of(function, (X,))).body
    first, second = run(body, (X,))[0], run(body, (X,))[0]
    assert first.data_ptr() != second.data_ptr()


OPS = [
    torch.exp,
    torch.sin,
    torch.neg,
    lambda x: x * 1.0,
    lambda x: x.reshape(-1).view(3, 4),
    lambda x: x.to(torch.float32),
    lambda x: x.t().contiguous().t(),
    lambda x: x[:, :],
]


@given(st.lists(st.tuples(st.integers(0, len(OPS) - 1), st.integers(0, 99)), max_size=12))
@settings(max_examples=25, deadline=None, derandomize=True)
def test_random_programs_keep_their_bits(program):
    def function(x):
        live = [x]
        for op, operand in program:
            live.append(OPS[op](live[operand % len(live)]))
        return live[-1] + live[len(live) // 2]

    inputs = (torch.linspace(-1, 1, 12).view(3, 4),)
    result = run_pipeline(body_of(function, inputs))
    for a, b in zip(run(result.captured, inputs), run(result.body, inputs), strict=True):
        assert torch.equal(a, b)
