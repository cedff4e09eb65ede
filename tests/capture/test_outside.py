"""What a forward reads or changes beside tensors: guarded, or refused by name with its line."""

from __future__ import annotations

import collections
import contextvars
import datetime
import functools
import itertools
import os
import sys
import threading
import time
import types
import weakref
from time import perf_counter

import numpy as np
import outside_helpers as helpers
import pytest
import torch
from torch import nn

from graphopt.capture import functions
from graphopt.errors import CaptureError, GraphoptWarning
from graphopt.module import GraphoptModule, Settings

X = torch.tensor([[0.5, -1.0, 2.0], [1.5, 0.25, -3.0]])
NUMBERS = itertools.cycle([1.0, 2.0])


def of(forward, **attributes):
    model = type("Of", (nn.Module,), {"forward": forward})()
    for name, value in attributes.items():
        setattr(model, name, value)
    return model


# ---- changed by a forward: refused, and as it was


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


class Schedule:
    def __init__(self):
        self.step = 0

    def value(self):
        self.step += 1
        return 1.0 / self.step


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


# ---- read: a change is seen


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


# ---- read: refused


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


# ---- tensors in plain attributes


def test_a_plain_tensor_is_written_once(twin):
    def forward(self, x):
        self.kept.add_(1)
        self.kept += 1
        return x + self.kept

    model = of(forward, kept=torch.zeros(3))
    opt = GraphoptModule(model)
    assert torch.equal(opt(X), X + 2)
    assert model.kept.tolist() == [2, 2, 2]
    assert torch.equal(opt(X), X + 4)
    assert not list(model.buffers())


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: x[:, : int(self.k)],
        lambda self, x: x if self.k else -x,
        lambda self, x: x * sum(self.k.reshape(1).tolist()),
        lambda self, x: x[self.k],
    ],
)
def test_a_value_of_a_plain_tensor_is_never_baked_in(forward):
    model = of(forward, k=torch.tensor(1))
    opt = GraphoptModule(model)
    for k in (1, 0):
        model.k = torch.tensor(k)
        try:
            got = opt(X)
        except CaptureError as error:
            assert os.path.basename(__file__) in error.at  # noqa: PT017
        else:
            assert torch.equal(got, model(X))


# ---- memory and identity


def test_which_arguments_are_one_object_is_a_part_of_the_key():
    opt = GraphoptModule(of(lambda self, x, y: x * (2 if x is y else 3)))
    for _ in range(2):
        assert torch.equal(opt(X, X), X * 2)
        assert torch.equal(opt(X, X.clone()), X * 3)


def test_strides_are_a_part_of_the_key():
    model = of(lambda self, x: x * (2 if x.stride(0) == 1 else 3) * (1 + x.stride(-1)))
    opt = GraphoptModule(model)
    for x in (X, torch.ones(3, 2).t(), torch.ones(2, 6)[:, ::2], torch.ones(2, 6)[:, :3], X):
        assert torch.equal(opt(x), model(x))


@pytest.mark.parametrize("other", ["buffer", "attribute"])
def test_state_that_shares_written_memory_runs_the_model_itself(other):
    def forward(self, x):
        self.whole.add_(1)
        return x + self.part

    model = of(forward)
    model.register_buffer("whole", torch.zeros(2, 3))
    if other == "buffer":
        model.register_buffer("part", model.whole[0])
    else:
        model.part = model.whole[0]
    opt = GraphoptModule(model)
    for calls in (1, 2):
        with pytest.warns(GraphoptWarning, match="shares memory"):
            assert torch.equal(opt(X), X + calls)


def test_an_argument_that_is_written_state_runs_the_model_itself():
    def forward(self, x):
        x.add_(1)
        return x + self.kept

    model = of(forward)
    model.register_buffer("kept", torch.zeros(2, 3))
    opt = GraphoptModule(model)
    opt(X.clone())
    with pytest.warns(GraphoptWarning, match="shares memory"):
        assert opt(model.kept[:]).eq(2).all()


class Cached(nn.Module):
    """A cache as timm's LeViT has it: filled in eval, emptied by `train()`."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.register_buffer("index", torch.tensor([0, 1, 1]))
        self.cache = {}

    def train(self, mode=True):
        super().train(mode)
        if mode and self.cache:
            self.cache = {}
        return self

    def forward(self, x):
        if self.training:
            return x + self.bias[self.index]
        if "cpu" not in self.cache:
            self.cache["cpu"] = self.bias[self.index]
        return x + self.cache["cpu"]


def test_a_cache_is_refused_until_it_is_filled():
    model = Cached().eval()
    opt = GraphoptModule(model)
    with torch.no_grad():
        with pytest.raises(CaptureError, match="for a cache: call the model once") as caught:
            opt(X)
        assert 'self.cache["cpu"] = self.bias[self.index]' in caught.value.at
        want = model(X)
        assert torch.equal(opt(X), want)
        model.bias.mul_(3)  # eager goes on with what it kept, too
        assert torch.equal(opt(X), want)
        assert torch.equal(model(X), want)
        model.train()
        assert torch.equal(opt(X), model(X))
        model.eval()
        want = model(X)
        assert torch.equal(opt(X), want)


def test_inference_mode_is_the_callers() -> None:
    class Asks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * (13 if torch.is_inference_mode_enabled() else 1)

    opt = GraphoptModule(Asks())
    assert opt(torch.ones(2)).tolist() == [1.0, 1.0]
    with torch.inference_mode():
        assert opt(torch.ones(2)).tolist() == [13.0, 13.0]


def test_a_package_installed_beside_torch_is_a_library(monkeypatch):
    beside = types.ModuleType("graphopt_test_beside")
    beside.__file__ = "/opt/packages/graphopt_test_beside/__init__.py"
    monkeypatch.setitem(sys.modules, beside.__name__, beside)
    monkeypatch.setattr(functions, "_BESIDE_TORCH", "/opt/packages/")
    assert functions.is_librarys(beside.__name__)
