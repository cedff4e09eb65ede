"""Wrong calls of an optimized model, and wrong uses of what proves, explains and measures it."""

from __future__ import annotations

import pickle
from pathlib import Path
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
    called("endless recursion", CaptureError, "recursion", "Recurses", model=m.Recurses),
    called("too much memory", RuntimeError, "allocate memory", model=m.Allocates),
    called(
        "a leaf written in place",
        CaptureError,
        "leaf",
        args=lambda: (X.clone().requires_grad_(),),
        model=m.WritesToInput,
    ),
]


def proving(
    name: str, call: Any, *words: str, model: Any = m.optimized, expect: Any = OptionError
) -> Use:
    return Use("verify", name, call, expect, words, model)


def fallen_back() -> Any:
    return graphopt.optimize(m.Branches(), on_error="fallback")


VERIFY = [
    proving("a plain model", lambda o: graphopt.verify(o, X), "optimized module", model=m.block),
    proving("a number", lambda o: graphopt.verify(3, X), "not a int"),
    proving("no inputs", graphopt.verify, "missing a required argument: 'input'"),
    proving("too many inputs", lambda o: graphopt.verify(o, (X, X)), "too many positional"),
    proving("a string", lambda o: graphopt.verify(o, "x"), "inputs is of type str"),
    proving("an unknown name", lambda o: graphopt.verify(o, X, {"mask": X}), "'mask'"),
    proving("backward=3", lambda o: graphopt.verify(o, X, backward=3), "backward is 3"),
    proving("an unknown option", lambda o: graphopt.verify(o, X, backwards=True), "'backward'"),
    proving(
        "a wrong width",
        lambda o: graphopt.verify(o, torch.ones(4, 9)),
        "its forward raised",
        "from (4, 8) to (4, 9)",
        expect=CaptureError,
    ),
    proving(
        "a model that fell back",
        lambda o: graphopt.verify(o, X),
        "no graph to verify",
        model=fallen_back,
        expect=GraphOptError,
    ),
]


def explaining(
    name: str, call: Any, *words: str, model: Any = m.block, expect: Any = OptionError
) -> Use:
    return Use("explain", name, call, expect, words, model)


EXPLAIN = [
    explaining("no inputs", graphopt.explain, "missing a required argument: 'input'"),
    explaining("too many inputs", lambda o: graphopt.explain(o, (X, X)), "too many positional"),
    explaining("a class", lambda o: graphopt.explain(nn.Linear, X), "the class Linear"),
    explaining(
        "an optimized module", lambda o: graphopt.explain(o, X), "opt.source", model=m.optimized
    ),
    explaining("an option of optimize", lambda o: graphopt.explain(o, X, verify=True), "'verify'"),
    explaining(
        "a wrong width",
        lambda o: graphopt.explain(o, torch.ones(4, 9)),
        "4, 9",
        expect=CaptureError,
    ),
]


def measuring(
    name: str, *words: str, model: Any = m.block, expect: Any = OptionError, **options: Any
) -> Use:
    given = {"inputs": X, "seconds": 1e-3, "rounds": 1, "against": ["eager"], **options}
    return Use("bench", name, lambda o: graphopt.bench(o, **given), expect, words, model)


def twice(y: torch.Tensor) -> torch.Tensor:
    return 2 * y


BENCH = [
    measuring("no inputs", "bench needs inputs", inputs=None),
    measuring("too many inputs", "too many positional", inputs=(X, X)),
    measuring("a class", "the class Linear", model=lambda: nn.Linear),
    measuring("an attached model", "by attach", model=m.attached),
    measuring("against a name", "against is 'eager'", '("eager", "compile")', against="eager"),
    measuring("against an unknown name", "against holds 'compil'", against=["compil"]),
    measuring("against a class", "against holds 'mine'", against={"mine": nn.Linear}),
    measuring("against itself twice", "two variants", against=["eager", "eager"]),
    measuring("against graphopt", "always measured", against={"graphopt": twice}),
    measuring("no time", "seconds is 0", seconds=0),
    measuring("endless time", "seconds is inf", seconds=float("inf")),
    measuring("no rounds", "rounds is 0", rounds=0),
    measuring("half a round", "rounds is 2.5", rounds=2.5),
    measuring("negative warm-up", "warmup is -1", warmup=-1),
    measuring("train='yes'", "train is 'yes'", train="yes"),
    measuring("autocast='int8'", "autocast is 'int8'", autocast="int8"),
    measuring("loss_fn=3", "loss_fn is a int", loss_fn=3),
    measuring("a loss that is no scalar", "loss_fn returned", "[4, 8]", loss_fn=twice),
    measuring(
        "an optimizer that is made",
        "optimizer is a SGD",
        optimizer=torch.optim.SGD(m.block().parameters()),
    ),
    measuring("an optimizer without a copy", "would train the model", optimizer=True, copy=False),
    measuring(
        "an optimizer without training", "needs a training step", optimizer=True, train=False
    ),
    measuring("nothing to train", "requires a gradient", model=lambda: nn.Flatten(), train=True),
    measuring(
        "a model without a copy", "Uncopied cannot be copied", "copy=False", model=m.Uncopied
    ),
    measuring("an unknown option", "no option 'round'", "'rounds'", round=3),
    measuring("verify=True", "no option 'verify'", verify=True),
    Use(
        "bench",
        "a forward that raises",
        lambda o: graphopt.bench(o, X, ["eager"]),
        ValueError,
        ("own complaint",),
        m.Refuses,
        eager=lambda o: o(X),
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
        "-my_relu",
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


REPORTS = [
    Use("report", "a plain model", graphopt.report, OptionError, ("optimized module",)),
    Use(
        "report",
        "nothing captured",
        graphopt.report,
        GraphOptError,
        ("no graph",),
        m.lazily_optimized,
    ),
    Use(
        "report",
        "an unknown ending",
        lambda o: graphopt.report(o, "a.pdf"),
        OptionError,
        (".pdf",),
        m.optimized,
    ),
    Use(
        "report",
        "no ending",
        lambda o: graphopt.report(o, "report"),
        OptionError,
        ("report",),
        m.optimized,
    ),
    Use(
        "report",
        "a folder that is not there",
        lambda o: graphopt.report(o, "no/such/a.html"),
        OptionError,
        ("no/such",),
        m.optimized,
    ),
    Use(
        "report",
        "a file in a folder's place",
        lambda o: graphopt.report(o, "taken/a.html"),
        OptionError,
        ("taken",),
        m.optimized,
        files=lambda: Path("taken").write_text(""),
    ),
    Use(
        "report",
        "a folder in a file's place",
        lambda o: graphopt.report(o, "a.html"),
        OptionError,
        ("a.html",),
        m.optimized,
        files=lambda: Path("a.html").mkdir(),
    ),
    Use(
        "report",
        "a disk that is full",
        lambda o: graphopt.report(o, "/proc/self/a.html"),
        OptionError,
        ("/proc/self",),
        m.optimized,
    ),
    Use(
        "report",
        "a path that is a number",
        lambda o: graphopt.report(o, 3),
        OptionError,
        ("int",),
        m.optimized,
    ),
    Use(
        "report",
        "verify=True",
        lambda o: graphopt.report(o, verify=True),
        OptionError,
        ("verify",),
        m.optimized,
    ),
    Use("diff", "a plain model", graphopt.diff, OptionError, ("optimized module",)),
    Use(
        "diff", "nothing captured", graphopt.diff, GraphOptError, ("no graph",), m.lazily_optimized
    ),
    Use("diff", "a number", lambda o: graphopt.diff(3), OptionError, ("int",)),
]


def halving(
    name: str, call: Any, *words: str, model: Any = m.block, expect: Any = OptionError
) -> Use:
    return Use("bisect", name, call, expect, words, model)


BISECT = [
    halving(
        "neither inputs nor predicate", graphopt.bisect, "needs example_inputs, or a predicate"
    ),
    halving(
        "a predicate that is a number", lambda o: graphopt.bisect(o, X, predicate=3), "predicate"
    ),
    halving("too many inputs", lambda o: graphopt.bisect(o, (X, X)), "too many positional"),
    halving("a class", lambda o: graphopt.bisect(nn.Linear, X), "the class Linear"),
    halving("an unknown rule", lambda o: graphopt.bisect(o, X, rules="roep"), "'rope'"),
    halving("an unknown option", lambda o: graphopt.bisect(o, X, rule="rope"), "'rules'"),
    halving(
        "a model that cannot be captured",
        lambda o: graphopt.bisect(o, X),
        "data-dependent",
        model=m.Branches,
        expect=CaptureError,
    ),
]
