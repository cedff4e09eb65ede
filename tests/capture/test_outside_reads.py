"""What a forward reads beside tensors: guarded, or refused by name with its line."""

from __future__ import annotations

import contextvars
import datetime
import functools
import itertools
import os
import threading
import time
import weakref
from time import perf_counter

import numpy as np
import outside_helpers as helpers
import pytest
import torch
from outside_helpers import Schedule, X, of
from torch import nn

from graphopt.errors import CaptureError, GraphoptWarning
from graphopt.module import GraphoptModule

NUMBERS = itertools.cycle([1.0, 2.0])


VARIABLE = contextvars.ContextVar("VARIABLE", default=2.0)


LOCAL = threading.local()


LOCAL.gain = 2.0


ARRAY = np.ones(3)


class Weak:
    gain = 2.0


def closed_over(value, change, read):
    return lambda: (of(lambda self, x: x * read(value)), lambda model: change(value))


def through_dict(self, x):
    return x * self.__dict__["notes"]["gain"]


def with_keyword(x, options):
    return x * options["gain"]


def default_of_a_helper():
    def helper(x, gain=2.0):
        return x * gain

    return of(lambda self, x: helper(x)), lambda m: setattr(helper, "__defaults__", (5.0,))


def attribute_of_a_helper():
    def helper(x):
        return x * helper.gain

    helper.gain = 2.0
    return of(lambda self, x: helper(x)), lambda m: setattr(helper, "gain", 5.0)


def function_in_a_list():
    gain = [2.0]
    model = of(lambda self, x: self.steps[0](x), steps=[lambda x: x * gain[0]])
    return model, lambda m: gain.__setitem__(0, 5.0)


def named_buffers():
    def forward(self, x):
        return sum((b for _, b in self.named_buffers()), x)

    model = of(forward)
    model.register_buffer("first", torch.ones(3))
    return model, lambda m: m.register_buffer("second", torch.ones(3))


def number_of_the_class():
    model = of(lambda self, x: x * type(self).gain)
    type(model).gain = 2.0
    return model, lambda m: setattr(type(m), "gain", 5.0)


WEAK = Weak()


READ = {
    "a number of a module": lambda: (
        of(lambda self, x: helpers.scaled(x)),
        lambda m: setattr(helpers, "SCALE", helpers.SCALE + 1),
    ),
    "a class in a module": lambda: (
        of(lambda self, x: helpers.Static.apply(x)),
        lambda m: setattr(helpers.Static, "gain", helpers.Static.gain + 1),
    ),
    "an object in a module": lambda: (
        of(lambda self, x: x * helpers.CONFIG.value()),
        lambda m: setattr(helpers.CONFIG, "gain", helpers.CONFIG.gain + 1),
    ),
    "a namespace in a module": lambda: (
        of(lambda self, x: x * helpers.SPACE.gain),
        lambda m: setattr(helpers.SPACE, "gain", helpers.SPACE.gain + 1),
    ),
    "a dict in a module": lambda: (
        of(lambda self, x: x * helpers.TABLE["gain"]),
        lambda m: helpers.TABLE.__setitem__("gain", helpers.TABLE["gain"] + 1),
    ),
    "an object outside": closed_over(
        Schedule(), lambda v: setattr(v, "step", 3.0), lambda v: v.step
    ),
    "an array outside": lambda: (
        of(lambda self, x: x * float(ARRAY[0])),
        lambda m: ARRAY.__setitem__(0, ARRAY[0] + 1),
    ),
    "a context variable": lambda: (
        of(lambda self, x: x * VARIABLE.get()),
        lambda m: VARIABLE.set(VARIABLE.get() + 1),
    ),
    "a thread's variable": lambda: (
        of(lambda self, x: x * LOCAL.gain),
        lambda m: setattr(LOCAL, "gain", LOCAL.gain + 1),
    ),
    "behind a weak reference": lambda: (
        of(lambda self, x: x * self.ref().gain, ref=weakref.ref(WEAK)),
        lambda m: setattr(WEAK, "gain", WEAK.gain + 1),
    ),
    "through __dict__": lambda: (
        of(through_dict, notes={"gain": 2.0}),
        lambda m: m.notes.__setitem__("gain", 5.0),
    ),
    "an argument of a partial": lambda: (
        of(
            lambda self, x: self.step(x),
            step=functools.partial(with_keyword, options={"gain": 2.0}),
        ),
        lambda m: m.step.keywords["options"].__setitem__("gain", 5.0),
    ),
    "a default": default_of_a_helper,
    "an attribute of a function": attribute_of_a_helper,
    "a function in a list": function_in_a_list,
    "an item of an empty dict": lambda: (
        of(lambda self, x: x * self.notes.get("gain", 2.0), notes={}),
        lambda m: m.notes.__setitem__("gain", 5.0),
    ),
    "an attribute that an object lacks": lambda: (
        of(lambda self, x: x * getattr(self.kept, "gain", 3.0), kept=type("C", (), {})()),
        lambda m: setattr(m.kept, "gain", 5.0),
    ),
    "a number of the class": number_of_the_class,
    "the names of the buffers": named_buffers,
}


@pytest.mark.parametrize("make", READ.values(), ids=READ.keys())
def test_a_change_of_what_a_forward_reads_is_seen(make):
    model, change = make()
    opt = GraphoptModule(model)
    assert torch.equal(opt(X), model(X))
    before = model(X)
    change(model)
    want = model(X)
    assert not torch.equal(want, before)
    assert torch.equal(opt(X), want)


def test_environment_variables_are_guarded(monkeypatch):
    monkeypatch.delenv("GRAPHOPT_TEST_GAIN", raising=False)
    opt = GraphoptModule(
        of(lambda self, x: x * float(os.environ.get("GRAPHOPT_TEST_GAIN", "1"))),
    )
    assert torch.equal(opt(X), X)
    monkeypatch.setenv("GRAPHOPT_TEST_GAIN", "3")
    assert torch.equal(opt(X), X * 3)
    monkeypatch.setenv("GRAPHOPT_TEST_GAIN", "4")
    assert torch.equal(opt(X), X * 4)
    assert [r.argument for r in opt.recaptures] == ["os.environ['GRAPHOPT_TEST_GAIN']"] * 2


def reading(self, x):
    with open(__file__) as file:
        return x * len(file.read())


REFUSED = {
    "a clock": (lambda self, x: x * time.time(), "time.time"),
    "a clock by its name": (lambda self, x: x * perf_counter(), "perf_counter"),
    "a date": (lambda self, x: x * datetime.datetime.now().microsecond, "datetime.now"),
    "a file": (reading, "open"),
    "random bytes": (lambda self, x: x * os.urandom(1)[0], "urandom"),
    "the seed": (lambda self, x: x * (torch.initial_seed() % 7), "initial_seed"),
    "the number of threads": (lambda self, x: x * torch.get_num_threads(), "get_num_threads"),
    "a gradient": (lambda self, x: x if self.weight.grad is None else x * 2, "Tensor.grad"),
    "a version": (lambda self, x: x * (x._version + 1), "Tensor._version"),
    "a value from outside": (lambda self, x: x * float(self.many[0]), "__float__"),
    "a list from outside": (lambda self, x: x * sum(self.many[0].tolist()), "tolist"),
    "a write outside": (lambda self, x: x + self.many[0].add_(1), "in-place"),
    "inference mode": (lambda self, x: x + inferred(self.weight), "inference_mode"),
    "a frozen parameter": (lambda self, x: x * self.weight.requires_grad_(False), "requires_grad"),
}


def inferred(weight):
    with torch.inference_mode():
        return (weight * 2).sum().item()


@pytest.mark.parametrize(("forward", "what"), REFUSED.values(), ids=REFUSED.keys())
def test_what_a_graph_cannot_see_change_is_refused(forward, what):
    many = [torch.ones(1)]
    model = of(forward, many=many, weight=nn.Parameter(torch.ones(3)))
    with pytest.raises(CaptureError) as caught:
        GraphoptModule(model)(X)
    assert what in caught.value.what
    assert os.path.basename(__file__) in caught.value.at
    assert many[0].item() == 1
    assert model.weight.requires_grad


def test_requires_grad_by_assignment():
    def frozen(self, x):
        self.weight.requires_grad = False
        return x * self.weight

    def given(self, x):
        x.requires_grad = True
        return x * 2

    def result(self, x):
        h = x.detach() * 2
        h.requires_grad = True
        return h * 2

    for forward in (frozen, given, result):
        model = of(forward, weight=nn.Parameter(torch.ones(3)))
        with pytest.raises(CaptureError, match="requires_grad") as caught:
            GraphoptModule(model)(X.clone())
        assert "requires_grad = " in caught.value.at
    assert model.weight.requires_grad


def test_an_inner_value_may_require_grad_where_no_result_shows_it(twin):
    def forward(self, x):
        h = x.detach() * 2
        h.requires_grad = True
        return h * self.weight

    twin(of(forward, weight=nn.Parameter(torch.ones(3))), X.clone())


def test_a_print_is_warned_of(capsys):
    opt = GraphoptModule(of(lambda self, x: (print("seen"), x * 2)[1]))
    with pytest.warns(GraphoptWarning, match="forward prints"):
        opt(X)
    assert torch.equal(opt(X), X * 2)
    assert capsys.readouterr().out == "seen\n"
    print("after")
    assert capsys.readouterr().out == "after\n"


def test_entry_points_are_as_before_after_a_capture():
    import builtins

    kind = type(os.environ)
    before = (time.time, builtins.open, builtins.print, kind.__getitem__, torch.initial_seed)
    with pytest.raises(CaptureError):
        GraphoptModule(of(lambda self, x: x * time.time()))(X)
    GraphoptModule(of(lambda self, x: x * 2))(X)
    after = (time.time, builtins.open, builtins.print, kind.__getitem__, torch.initial_seed)
    assert before == after
