"""What a forward changes beside tensors: refused by name with its line, and as it was."""

from __future__ import annotations

import collections
import functools
import itertools
import types

import outside_helpers as helpers
import pytest
import torch
from outside_helpers import Schedule, X, of
from torch import nn

from graphopt.errors import CaptureError, GraphoptWarning
from graphopt.module import GraphoptModule, Settings


def closure():
    count = [0]

    def bump():
        count[0] += 1
        return count[0]

    return of(lambda self, x: x * bump()), lambda: count == [0]


def variable():
    count = 0

    def forward(self, x):
        nonlocal count
        count += 1
        return x * count

    return of(forward), lambda: count == 0


def class_counter():
    def forward(self, x):
        type(self).calls += 1
        return x * self.calls

    model = of(forward)
    type(model).calls = 0
    return model, lambda: type(model).calls == 0


def default():
    def helper(x, seen=[]):  # noqa: B006
        seen.append(1)
        return x * len(seen)

    return of(lambda self, x: helper(x)), lambda: helper.__defaults__ == ([],)


def of_a_function():
    def helper(x):
        helper.calls += 1
        return x * helper.calls

    helper.calls = 0
    return of(lambda self, x: helper(x)), lambda: helper.calls == 0


def outside_object():
    schedule = Schedule()
    return of(lambda self, x: x * schedule.value()), lambda: schedule.step == 0


class Slotted:
    __slots__ = ("calls",)

    def __init__(self):
        self.calls = 0

    def next(self):
        self.calls += 1
        return self.calls


def slots():
    model = of(lambda self, x: x * self.kept.next(), kept=Slotted())
    return model, lambda: model.kept.calls == 0


def changing(value, change, same):
    def make():
        model = of(lambda self, x: x * change(self.kept), kept=value())
        return model, lambda: same(model.kept)

    return make


def nested(kept):
    kept["a"][0].append(1)
    return len(kept["a"][0])


def namespace(kept):
    kept.n += 1
    return kept.n


def counter(kept):
    kept["n"] += 1
    return kept["n"]


def deep_cache(kept):
    return kept["a"].setdefault(0, torch.ones(3)).sum()


def flip(kept):
    kept.on = not kept.on
    return 2 if kept.on else 1


CHANGED = {
    "a closure's list": closure,
    "a closure's number": variable,
    "a number of the class": class_counter,
    "a default": default,
    "an attribute of a function": of_a_function,
    "an object outside": outside_object,
    "a slot": slots,
    "a nested list": changing(lambda: {"a": [[]]}, nested, lambda k: k == {"a": [[]]}),
    "a deque": changing(collections.deque, lambda k: k.append(1) or len(k), lambda k: not k),
    "a set": changing(set, lambda k: k.add(len(k)) or len(k), lambda k: not k),
    "a Counter": changing(collections.Counter, counter, lambda k: not k),
    "a namespace": changing(lambda: types.SimpleNamespace(n=0), namespace, lambda k: k.n == 0),
    "a nested cache": changing(lambda: {"a": {}}, deep_cache, lambda k: k == {"a": {}}),
    "a setting that flips": changing(
        lambda: type("C", (), {"__init__": lambda self: setattr(self, "on", False)})(),
        flip,
        lambda k: k.on is False,
    ),
    "a variable of a module": lambda: (
        of(lambda self, x: helpers.counted(x)),
        lambda: helpers.COUNT == 0,
    ),
    "a cache of a module": lambda: (
        of(lambda self, x: helpers.cached(x)),
        lambda: not helpers.CACHE,
    ),
}


@pytest.mark.parametrize("make", CHANGED.values(), ids=CHANGED.keys())
def test_what_a_forward_changes_is_refused_and_set_back(make):
    model, as_before = make()
    with pytest.raises(CaptureError, match=r"forward (changes|assigns)") as caught:
        GraphoptModule(model)(X)
    assert as_before()
    assert caught.value.at.partition(":")[0].endswith((__file__, "outside_helpers.py"))
    want = [model(X), model(X)]
    assert all(type(y) is torch.Tensor for y in want)


@pytest.mark.parametrize(
    "iterator",
    [lambda: itertools.count(1), lambda: (i for i in (1.0, 2.0)), lambda: iter([1.0, 2.0])],
)
def test_an_iterator_that_moves_is_refused(iterator):
    model = of(lambda self, x: x * next(self.numbers), numbers=iterator())
    with pytest.raises(CaptureError, match="forward changes 'numbers'"):
        GraphoptModule(model)(X)


def test_a_cached_function_keeps_nothing_of_a_trace():
    @functools.lru_cache
    def table(n):
        return torch.arange(float(n))

    opt = GraphoptModule(of(lambda self, x: x + table(x.shape[1])))
    assert torch.equal(opt(X), X + torch.arange(3.0))
    assert table(3).tolist() == [0, 1, 2]


def test_what_a_fallback_runs_counts_once():
    model, _ = closure()
    opt = GraphoptModule(model, Settings(on_error="fallback"))
    with pytest.warns(GraphoptWarning, match="forward changes"):
        assert torch.equal(opt(X), X)
    assert torch.equal(opt(X), X * 2)


@pytest.mark.parametrize("register", ["buffer", "parameter"])
def test_state_registered_in_a_forward_is_refused(register):
    def forward(self, x):
        if not hasattr(self, "table"):
            made = nn.Parameter(torch.ones(3)) if register == "parameter" else torch.ones(3)
            getattr(self, f"register_{register}")("table", made)
        return x + self.table

    model = of(forward)
    with pytest.raises(CaptureError, match="'table'"):
        GraphoptModule(model)(X)
    assert not hasattr(model, "table")
