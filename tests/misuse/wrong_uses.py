"""Wrong uses of `optimize`, `attach`, `detach`, the environment and the optimized module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import wrong_models as m
from torch import nn
from use import Use
from wrong_models import X

import graphopt
from graphopt import CaptureError, GraphOptError, OptionError, UnsupportedError
from graphopt.testing import assert_equivalent


def is_model(name: str, make: Any, *words: str, expect: type = OptionError) -> Use:
    """Something that is no model for `optimize`."""
    return Use("model", name, lambda model: graphopt.optimize(model), expect, words, make)


MODELS = [
    is_model("a class", lambda: nn.Linear, "the class Linear", "an instance: Linear(...)"),
    is_model("a function", lambda: lambda x: x, "type function", "whose forward calls"),
    is_model("None", lambda: None, "NoneType", "an nn.Module"),
    is_model("a path", lambda: "model.pt", "type str"),
    is_model("a list of modules", lambda: [nn.Linear(8, 8)], "type list"),
    is_model("a state_dict", lambda: m.block().state_dict(), "type OrderedDict"),
    is_model("an optimizer", lambda: torch.optim.SGD(m.block().parameters()), "type SGD"),
    is_model(
        "an exported program",
        lambda: torch.export.export(m.block(), (X,)),
        "ExportedProgram",
        "that was exported",
    ),
    is_model("a module without forward", nn.Module, "Module has no forward"),
    is_model("a ModuleList", lambda: nn.ModuleList([nn.Linear(8, 8)]), "ModuleList has no forward"),
    is_model("a ModuleDict", nn.ModuleDict, "ModuleDict has no forward"),
    is_model("an optimized module", m.optimized, "optimized already", "opt.source"),
    is_model("an attached model", m.attached, "by attach", "graphopt.detach(model)"),
    is_model("torch.compile around it", lambda: torch.compile(m.block()), "wrapped by torch.com"),
    is_model("compiled in place", m.compiled_in_place, "compiled in place", "compile()"),
    is_model("a scripted module", m.scripted, "TorchScript", "eager module"),
    is_model("a traced module", m.traced, "TorchScript", "eager module"),
    is_model(
        "DataParallel", lambda: nn.DataParallel(m.block()), "wrapped in DataParallel", ".module"
    ),
    is_model(
        "DataParallel inside",
        lambda: nn.Sequential(nn.DataParallel(m.block())),
        "0 is wrapped in DataParallel",
    ),
    is_model("DistributedDataParallel", m.replicated, "wrapped in DistributedDataParallel"),
    is_model("FullyShardedDataParallel", m.sharded, "is sharded", "before it is sharded"),
    is_model("fully_shard", m.sharded_in_place, "is sharded", "before it is sharded"),
    is_model("parameters on meta", m.on_meta, "0.weight is on the meta device", "to_empty"),
    is_model("a buffer on meta", m.meta_buffer, "mask is on the meta device"),
    is_model("a lazy module", lambda: nn.LazyLinear(3), "weight has no shape yet", "call the mod"),
    is_model("a lazy norm", nn.LazyBatchNorm1d, "weight has no shape yet"),
    is_model("a quantized model", m.quantized, "0 is quantized", expect=UnsupportedError),
]


def is_input(name: str, args: Any, *words: str, kwargs: Any = None) -> Use:
    """Example inputs that `optimize` refuses."""
    return Use("inputs", name, lambda o: graphopt.optimize(o, args, kwargs), OptionError, words)


INPUTS = [
    is_input("a number", 3, "example_inputs is of type int", "a tensor, or a tuple"),
    is_input("a string", "x", "example_inputs is of type str"),
    is_input("a dict", {"input": X}, "example_inputs is a dict", "example_kwargs="),
    is_input("a set", {X}, "example_inputs is of type set"),
    is_input("a generator", (x for x in [X]), "example_inputs is of type generator"),
    is_input("an array", X.numpy(), "example_inputs is of type ndarray", "torch.from_numpy"),
    is_input("a shape", X.shape, "example_inputs is of type Size"),
    is_input("too few", (), "missing a required argument: 'input'", "forward(input"),
    is_input("too many", (X, X), "too many positional arguments", "given were (Tensor, Tensor)"),
    is_input("an unknown name", X, "unexpected keyword argument 'mask'", kwargs={"mask": X}),
    is_input("one twice", X, "multiple values for argument 'input'", kwargs={"input": X}),
    is_input("kwargs as a list", X, "example_kwargs is of type list", kwargs=[X]),
    is_input("kwargs as a tensor", X, "example_kwargs is of type Tensor", kwargs=X),
    is_input("a name that is a number", X, "no string: 1", kwargs={1: X}),
]


def is_option(*words: str, **options: Any) -> Use:
    """An option with a wrong name or value."""
    name = ", ".join(f"{k}={v!r}" for k, v in options.items())
    return Use("options", name, lambda o: graphopt.optimize(o, X, **options), OptionError, words)


OPTIONS = [
    is_option("fuse is 1", "True or False", fuse=1),
    is_option("fuse is None", fuse=None),
    is_option("dynamic is 'yes'", "'auto' or True or False", dynamic="yes"),
    is_option("dynamic is 1", dynamic=1),
    is_option("on_error is 'ignore'", "'raise' or 'fallback'", on_error="ignore"),
    is_option("max_rewrites is -1", "a number from 0", max_rewrites=-1),
    is_option("max_rewrites is '3'", max_rewrites="3"),
    is_option("max_rewrites is True", max_rewrites=True),
    is_option("max_rewrites is 2.0", max_rewrites=2.0),
    is_option("max_rewrites is nan", max_rewrites=float("nan")),
    is_option("verify is 'yes'", verify="yes"),
    is_option("rules= holds 3", rules=3),
    is_option("rules= holds None", rules=None),
    is_option("no rule is called 'roep'", "'rope'", rules="default,-roep"),
    is_option("no rule is called 'zzz'", "one of ", rules="zzz"),
    is_option("rules= is of type dict", rules={"rope": True}),
    is_option("rules= is of type bytes", rules=b"default"),
    is_option("rules= holds 7", rules=["default", 7]),
    is_option("precision is 'int8'", "'bf16' or 'fp16'", precision="int8"),
    is_option("precision is torch.int8", precision=torch.int8),
    is_option("is of type list", "a dict of patterns", precision_overrides=[("0", "fp32")]),
    is_option("has the key 0", "a module path", precision_overrides={0: "fp32"}),
    is_option("['0'] is 'fp8'", "'fp32', 'bf16', 'fp16'", precision_overrides={"0": "fp8"}),
    is_option("'head' names neither a module nor an op", precision_overrides={"head": "fp32"}),
    is_option("segments is 0", segments=0),
    is_option("memory_budget is '4 parsecs'", memory_budget="4 parsecs"),
    is_option("given together", memory_budget="4GiB", segments=4),
    is_option("without memory_budget", offload="auto"),
    is_option("cuda_graph= is not available yet", cuda_graph=True),
    is_option("optimize has no option 'fused'", "'fuse'", fused=True),
    is_option("optimize has no option 'on_errors'", "'on_error'", on_errors="raise"),
    Use(
        "options",
        "verify=True without inputs",
        lambda o: graphopt.optimize(o, verify=True),
        OptionError,
        ("verify=True needs example_inputs",),
    ),
]


def in_env(name: str, value: str, *words: str, files: Any = None) -> Use:
    """A setting of the environment that makes no sense."""
    return Use(
        "environment",
        f"{name}={value}",
        lambda o: graphopt.optimize(o),
        OptionError,
        words,
        env={name: value},
        files=files,
    )


ENVIRONMENT = [
    in_env("GRAPHOPT_MAX_REWRITES", "many", "GRAPHOPT_MAX_REWRITES=many", "whole number"),
    in_env("GRAPHOPT_MAX_REWRITES", "-1", "GRAPHOPT_MAX_REWRITES=-1"),
    in_env("GRAPHOPT_MAX_REWRITES", "²", "GRAPHOPT_MAX_REWRITES=²"),
    in_env("GRAPHOPT_PRINT", "everything", "GRAPHOPT_PRINT=everything", "before, after or"),
    in_env("GRAPHOPT_DISABLE", "perhaps", "GRAPHOPT_DISABLE=perhaps", "1 or 0"),
    in_env(
        "GRAPHOPT_DUMP",
        "taken",
        "GRAPHOPT_DUMP=taken cannot be written",
        files=lambda: Path("taken").write_text("a file, not a folder"),
    ),
    in_env(
        "GRAPHOPT_DUMP",
        "taken/below",
        "GRAPHOPT_DUMP=taken/below cannot be written",
        files=lambda: Path("taken").write_text("a file, not a folder"),
    ),
    Use(
        "environment",
        "GRAPHOPT_DUMP that is full",
        lambda o: graphopt.optimize(o, X),
        OptionError,
        ("GRAPHOPT_DUMP=/proc/self cannot be written",),
        env={"GRAPHOPT_DUMP": "/proc/self"},
    ),
]


def in_place(name: str, call: Any, *words: str, model: Any = m.block) -> Use:
    """A wrong use of `attach` or `detach`."""
    return Use("attach", name, call, OptionError, words, model)


ATTACH = [
    in_place("a class", lambda o: graphopt.attach(nn.Linear), "the class Linear"),
    in_place("twice", graphopt.attach, "attached already", "detach(model) first", model=m.attached),
    in_place("an optimized module", graphopt.attach, "optimized already", model=m.optimized),
    in_place(
        "an unknown option", lambda o: graphopt.attach(o, fused=True), "no option 'fused'", "'fuse'"
    ),
    in_place(
        "an option of later",
        lambda o: graphopt.attach(o, cuda_graph=True),
        "cuda_graph= is not available yet",
    ),
    in_place("a wrong value", lambda o: graphopt.attach(o, dynamic="no"), "dynamic is 'no'"),
    Use(
        "attach",
        "a model that cannot be captured",
        lambda o: graphopt.attach(o, X),
        CaptureError,
        ("data-dependent",),
        m.Branches,
    ),
    in_place("inputs that do not fit", lambda o: graphopt.attach(o, (X, X)), "too many"),
    in_place("detach of a plain model", graphopt.detach, "is not attached"),
    in_place("detach of a number", lambda o: graphopt.detach(3), "of type int"),
    in_place("detach of an optimized module", graphopt.detach, "opt.source", model=m.optimized),
    in_place(
        "detach under another wrapper",
        graphopt.detach,
        "something else replaced the forward",
        model=m.wrapped_after_attach,
    ),
]


def on_module(name: str, call: Any, *words: str, model: Any = m.lazily_optimized) -> Use:
    """A wrong use of an optimized module."""
    return Use("module", name, call, GraphOptError, words, model)


MODULE = [
    on_module("graph before a call", lambda o: o.graph, "no graph yet", "call the module once"),
    on_module("code before a call", lambda o: o.code, "no graph yet"),
    on_module("rewrites before a call", lambda o: o.rewrites, "no graph yet"),
    on_module(
        "a new graph", lambda o: setattr(o, "graph", None), "graph of an optimized module cannot"
    ),
    on_module("new code", lambda o: setattr(o, "code", ""), "code of an optimized module cannot"),
    on_module(
        "torch.export of it",
        lambda o: torch.export.export(o, (X,)),
        "cannot be exported",
        "opt.source",
        model=lambda: graphopt.optimize(nn.Linear(8, 8), X),
    ),
    on_module(
        "torch.jit.trace of it",
        lambda o: torch.jit.trace(o, X),
        "cannot be exported, scripted or traced",
        model=m.optimized,
    ),
    Use("module", "capture(3)", lambda o: o.capture(3), OptionError, ("type int",), m.optimized),
    Use("module", "capture(x)", lambda o: o.capture(X), OptionError, ("(x,)",), m.optimized),
]


def is_refused(name: str, make: Any, *words: str) -> Use:
    """A model that holds what one graph cannot keep right."""
    return Use("capture", name, lambda o: graphopt.optimize(o)(X), CaptureError, words, make)


CAPTURE = [
    is_refused("a branch on a value", m.Branches, "data-dependent", "if y.sum() > 0", "torch.wh"),
    is_refused("Python's random", m.Draws, "random", "wrong_models.py"),
    is_refused("an autograd.Function", m.OwnFunction, "autograd.Function", "Twice"),
    is_refused("a hook inside", m.hooked, "forward hook on the submodule '1'"),
    is_refused("TorchScript inside", m.scripted_inside, "TorchScript"),
    is_refused("a sparse buffer", m.SparseBuffer, "mix has the layout torch.sparse_coo"),
    is_refused("a generator as forward", m.Yields, "generator"),
    is_refused("a coroutine as forward", m.Waits, "coroutine"),
]

TESTING = [
    Use(
        "testing",
        "no inputs that fit",
        lambda o: assert_equivalent(o.source, o, (X, X)),
        TypeError,
        ("takes 2 positional arguments",),
        m.optimized,
        eager=lambda o: o.source(X, X),
    ),
    Use(
        "testing",
        "an optimized module twice",
        lambda o: assert_equivalent(o, o, X),
        OptionError,
        ("model is optimized itself", "opt.source"),
        m.optimized,
    ),
    Use(
        "testing",
        "of another model",
        lambda pair: assert_equivalent(*pair, X),
        OptionError,
        ("different parameters or buffers",),
        lambda: (nn.Linear(8, 8), m.optimized()),
    ),
    Use(
        "testing",
        "of other weights",
        lambda pair: assert_equivalent(*pair, X),
        OptionError,
        ("do not start from the same state", "load_state_dict"),
        lambda: (m.block(), m.optimized()),
    ),
    Use(
        "testing",
        "inputs as a string",
        lambda o: assert_equivalent(o.source, o, "x"),
        OptionError,
        ("of type str",),
        m.optimized,
    ),
]
