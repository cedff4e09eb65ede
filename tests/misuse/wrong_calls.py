"""Wrong calls of an optimized model, and rules of the user's own that are wrong."""

from __future__ import annotations

import pickle
from typing import Any

import torch
import wrong_models as m
import wrong_rules as r
from torch import nn
from use import Use
from wrong_models import X

import graphopt
from graphopt import (
    CaptureError,
    GraphOptError,
    OptionError,
    PassError,
    UnsupportedError,
    VerifyError,
)

aten = torch.ops.aten


def called(
    name: str, expect: type, *words: str, args: Any = (X,), kwargs: Any = None, model: Any = m.block
) -> Use:
    """A call that is wrong; eager's own error is right, too."""
    kwargs = kwargs or {}

    def call(source: Any) -> object:
        return graphopt.optimize(source)(*args(), **kwargs)

    def eager(source: Any) -> object:
        return source(*args(), **kwargs)

    given = args
    if not callable(args):
        args = lambda: given  # noqa: E731
    own = None if issubclass(expect, GraphOptError) else eager
    return Use("call", name, call, expect, words, model, eager=own)


def wrong_in_value() -> list[Any]:
    return ["default", r.replaced_by(lambda match: match.call(aten.neg.default, match.x))]


def second_derivative(source: Any, **options: Any) -> object:
    opt, weight = graphopt.optimize(source), source[0].weight
    (gradient,) = torch.autograd.grad(opt(X).square().sum(), weight, create_graph=True)
    return torch.autograd.grad(gradient.square().sum(), weight, **options)


TWICE = [
    Use("call", name, call, UnsupportedError, ("double backward of graphopt::", "fuse=False"))
    for name, call in (
        ("a gradient of a gradient", second_derivative),
        (
            "a gradient of a gradient that may be missing",
            lambda o: second_derivative(o, allow_unused=True),
        ),
    )
]

CALLS = [
    *TWICE,
    called("too few", TypeError, "forward() missing 1 required", args=()),
    called("too many", TypeError, "takes 2 positional arguments but 3 were given", args=(X, X)),
    called("an unknown name", TypeError, "unexpected keyword", "'mask'", kwargs={"mask": X}),
    called("one twice", TypeError, "multiple values for argument", kwargs={"input": X}),
    called("a wrong width", CaptureError, "4, 9", "its forward raised", args=(torch.ones(4, 9),)),
    called("a wrong dtype", RuntimeError, "same dtype", args=(X.double(),)),
    called(
        "a dtype that LayerNorm does not mix",
        RuntimeError,
        "mixed dtype",
        args=(X.double(),),
        model=lambda: nn.LayerNorm(8),
    ),
    called("integers", RuntimeError, "same dtype", args=(X.long(),)),
    called("another device", CaptureError, "meta", args=(X.to("meta"),)),
    called("complex numbers", CaptureError, "complex", args=(X.to(torch.complex64),)),
    called("None", CaptureError, "not NoneType", args=(None,)),
    called("a string", CaptureError, "not str", args=("x",)),
    called("a list", CaptureError, "not list", args=([X],)),
    called("a list that holds itself", CaptureError, "holds itself", args=(m.endless(),)),
    called("a tuple", CaptureError, "not tuple", args=((X, X),)),
    called("an array", CaptureError, "numpy.ndarray", args=(X.numpy(),)),
    called("a generator", CaptureError, "generator", args=lambda: ((x for x in [X]),)),
    called("a set", CaptureError, "set", args=({X},), model=m.SumOf),
    called("dict.values()", CaptureError, "dict_values", args=({"a": X}.values(),), model=m.SumOf),
    called("an object", CaptureError, "object", args=(object(),)),
    called("a sparse tensor", CaptureError, "sparse", args=(X.to_sparse(),)),
    called(
        "a nested tensor",
        CaptureError,
        "nested",
        args=lambda: (torch.nested.nested_tensor([X, X]),),
    ),
    called("an index out of range", IndexError, args=(torch.tensor([9]),), model=m.Table),
    called("a float for an index", CaptureError, "Long", args=(torch.ones(2),), model=m.Table),
    called(
        "one value to normalize",
        ValueError,
        "more than 1 value",
        args=(X[:1],),
        model=lambda: nn.BatchNorm1d(8),
    ),
    called("a forward that raises", ValueError, "own complaint", model=m.Refuses),
    called("a forward with a wrong key", CaptureError, "scael", "LooksUp.forward", model=m.LooksUp),
    called("a forward with a wrong name", CaptureError, "no_such_layer", model=m.MissesAttribute),
    called(
        "endless recursion",
        CaptureError,
        "recursion",
        "Recurses",
        "setrecursionlimit",
        model=m.Recurses,
    ),
    called("too much memory", RuntimeError, "allocate memory", model=m.Allocates),
    called(
        "a leaf written in place",
        CaptureError,
        "leaf",
        args=lambda: (X.clone().requires_grad_(),),
        model=m.WritesToInput,
    ),
]


def ruled(name: str, expect: type, rules: Any, *words: str) -> Use:
    """A rule of the user's own that is wrong, over a model with a ReLU."""

    def call(source: Any) -> object:
        return graphopt.optimize(source, X, rules=rules() if callable(rules) else rules)

    return Use("rules", name, call, expect, words, nn.ReLU)


def two_of_a_name() -> list[Any]:
    return [r.replaced_by(lambda m: m.x), r.replaced_by(lambda m: m.x)]


RULES = [
    ruled("without a replacement", OptionError, [r.relu_rule()], "'my_relu' has no replacement"),
    ruled("two of a name", OptionError, two_of_a_name, "two rules are called 'my_relu'"),
    ruled("the name of another", OptionError, [r.replaced_by(lambda m: m.x, "glu")], "'glu'"),
    ruled(
        "a pattern that raises",
        OptionError,
        lambda: [r.with_pattern(lambda x: r.fail())],
        "ZeroDivisionError",
        "wrong_",
    ),
    ruled(
        "a pattern of no op",
        OptionError,
        lambda: [r.with_pattern(lambda x: x)],
        "not one of its ops",
    ),
    ruled(
        "a pattern of a tensor's method",
        OptionError,
        lambda: [r.with_pattern(lambda x: x.no_such_method())],
        "pattern",
    ),
    ruled(
        "a check that raises",
        PassError,
        lambda: [r.checked_by(r.fail)],
        "my_relu",
        "wrong_rules.py",
        "ZeroDivisionError",
        "your rules=",
    ),
    ruled(
        "a check that returns True",
        PassError,
        lambda: [r.checked_by(lambda m: True)],
        "my_relu",
        "True",
    ),
    ruled(
        "a replacement that raises", PassError, lambda: [r.replaced_by(r.fail)], "ZeroDivisionError"
    ),
    ruled(
        "a replacement of None",
        PassError,
        lambda: [r.replaced_by(lambda m: None)],
        "NoneType",
        "m.call",
    ),
    ruled("a replacement of a tensor", PassError, lambda: [r.replaced_by(lambda m: X)], "a Tensor"),
    ruled(
        "two results for one",
        PassError,
        lambda: [r.replaced_by(lambda m: (m.x, m.x))],
        "2 values for 1",
    ),
    ruled(
        "another dtype",
        PassError,
        lambda: [r.replaced_by(lambda m: m.call(aten._to_copy.default, m.x, dtype=torch.float64))],
        "float64",
        "float32",
    ),
    ruled(
        "another shape",
        PassError,
        lambda: [r.replaced_by(lambda m: m.call(aten.t.default, m.x))],
        "[8, 4]",
        "[4, 8]",
    ),
    ruled(
        "an op with wrong arguments",
        PassError,
        lambda: [r.replaced_by(lambda m: m.call(aten.view.default, m.x, [3, 5]))],
        "my_relu",
    ),
    ruled(
        "an unknown capture", PassError, lambda: [r.replaced_by(lambda m: m.y)], "no capture 'y'"
    ),
    ruled(
        "a node from nowhere",
        PassError,
        lambda: [r.replaced_by(lambda m: torch.fx.Graph().placeholder("z"))],
        "my_relu",
    ),
    Use(
        "rules",
        "another value, with verify=True",
        lambda o: graphopt.optimize(o, X, rules=wrong_in_value(), verify=True),
        VerifyError,
        ("my_relu", "is wrong", "max_rewrites="),
        nn.ReLU,
    ),
    Use(
        "rules",
        "one that raises, with attach",
        lambda o: graphopt.attach(o, X, rules=[r.replaced_by(r.fail)]),
        PassError,
        ("ZeroDivisionError",),
        nn.ReLU,
    ),
    Use(
        "rules",
        "a local one that is pickled",
        lambda o: pickle.dumps(graphopt.optimize(o, X, rules=wrong_in_value())),
        GraphOptError,
        ("rule my_relu cannot be pickled", "at the top of a module"),
        nn.ReLU,
    ),
]
