"""Recipes of dropped values as Python functions."""

from __future__ import annotations

import operator
import weakref

import pytest
import torch

import graphopt.kernels  # noqa: F401  (registers the ops)
from graphopt.graph.calls import Again, Call, Held, Recipe

aten = torch.ops.aten


def value_of(call: Call, held=(), reads=None):
    reads = reads or {}
    with torch.no_grad():
        return Recipe("y", call, tuple(reads)).function(list(held), list(reads.values()))


def test_what_is_filled_in_may_stand_inside_of_containers() -> None:
    def told(*args, **kwargs):
        return args, kwargs

    call = Call(
        told,
        ([Held(0), Again("a")], (Again("b"),), slice(None, Held(1), 2), {"k": Held(0)}, ()),
        {"more": [1.5, None, "text", torch.half]},
    )
    found = value_of(call, (10, 11), {"b": 2, "a": 1})
    given = ([10, 1], (2,), slice(None, 11, 2), {"k": 10}, ())
    assert found == (given, {"more": [1.5, None, "text", torch.half]})


def test_a_call_in_several_places_is_made_once() -> None:
    seen = []

    def noted(x):
        seen.append(x)
        return x

    inner = Call(noted, (Held(0),))
    assert value_of(Call(operator.add, (inner, Call(operator.neg, (inner,)))), (5,)) == 0
    assert seen == [5]


def test_what_was_read_for_the_last_time_is_let_go_of() -> None:
    alive = []

    def noted(x):
        alive.append(weakref.ref(x))
        return x * 2

    def last(x):
        return [a() is not None for a in alive]

    first = Call(noted, (Call(torch.neg, (Held(0),)),))
    second = Call(noted, (first,))
    assert value_of(Call(last, (second,)), (torch.ones(2),)) == [False, False]


@pytest.mark.parametrize("marked", [True, False])
def test_results_are_marked_as_in_forward(marked: bool) -> None:
    x = torch.ones(2, 3, requires_grad=marked)
    rows, index = value_of(Call(torch.max, (Call(aten.t.default, (Held(0),)), 1)), (x,))
    assert rows.requires_grad is marked
    assert not index.requires_grad
    other = x[0].detach().requires_grad_(marked)
    inside = value_of(Call(torch.cat, ([Held(0), Held(1)],)), (torch.ones(1), other))
    assert inside.requires_grad is marked
    assert not value_of(Call(aten.detach.default, (Held(0),)), (x,)).requires_grad


def test_operators_of_graphopt_take_their_defaults() -> None:
    x, w = torch.randn(3, 8), torch.rand(8)
    call = Call(torch.ops.graphopt.rms_norm.default, (Held(0), Held(1)), {"eps": 1})
    assert torch.equal(value_of(call, (x, w)), torch.ops.graphopt.rms_norm(x, w, 1.0))
