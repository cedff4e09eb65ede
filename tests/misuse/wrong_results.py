"""Wrong uses of what proves, explains, measures, reports and bisects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import wrong_models as m
from torch import nn
from use import Use
from wrong_models import X

import graphopt
from graphopt import CaptureError, GraphOptError, OptionError


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


def lowering(name: str, call: Any, *words: str, model: Any = m.block) -> Use:
    """A wrong use of what concerns low precision."""
    return Use("precision", name, call, OptionError, words, model)


def held(opt: Any) -> None:
    with graphopt.hold_weights(opt):
        pass


PRECISION = [
    lowering("hold_weights of a plain model", held, "optimized module"),
    lowering("hold_weights of a number", lambda o: held(3), "not a int"),
    lowering("check of a class", lambda o: graphopt.precision_check(nn.Linear, X), "the class"),
    lowering("check without inputs", graphopt.precision_check, "missing a required argument"),
    lowering(
        "check of an optimized module",
        lambda o: graphopt.precision_check(o, X),
        "opt.source",
        model=m.optimized,
    ),
    lowering(
        "check in an unknown precision",
        lambda o: graphopt.precision_check(o, X, precision="int8"),
        "precision is 'int8'",
    ),
    lowering(
        "a limit that is a word",
        lambda o: graphopt.precision_check(o, X, pin="much"),
        "pin is 'much'",
    ),
]
