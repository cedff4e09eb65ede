"""Checks of what a user gives to the public functions, before any work is done."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from graphopt.errors import OptionError
from graphopt.module import GraphoptModule
from graphopt.passes import PassOptions, Rule, select_rules

ON_ERROR = ("raise", "fallback")
DYNAMIC = ("auto", True, False)


def check_model(model: Any) -> nn.Module:
    """The model, when it is one that can be optimized.

    Raises:
        OptionError: for anything but an `nn.Module`; for a module that is optimized, compiled or
            scripted already; for parallel wrappers; for parameters on the meta device.
    """
    if not isinstance(model, nn.Module):
        cure = "pass an instance: optimize(Model())" if isinstance(model, type) else None
        kind = "the class" if isinstance(model, type) else "a"
        raise OptionError(
            f"model is {kind} {getattr(model, '__name__', type(model).__name__)}, not an nn.Module",
            try_=cure or "wrap the function in a module whose forward calls it",
        )
    kind = type(model).__name__
    if isinstance(model, GraphoptModule):
        raise OptionError(f"{kind} is optimized already", try_="optimize(opt.source, ...)")
    if isinstance(model, torch._dynamo.eval_frame.OptimizedModule):
        raise OptionError(
            "the model is wrapped by torch.compile",
            why="its forward is compiled code, which cannot be captured",
            try_="optimize the module before it is compiled (model._orig_mod)",
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise OptionError("the model is a TorchScript module", try_="optimize the eager module")
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise OptionError(
            f"the model is wrapped in {kind}", try_=f"optimize model.module, then wrap it in {kind}"
        )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise OptionError(
                f"{name} is on the meta device",
                why="there is no memory behind it to compute with",
                try_="model.to_empty(device=...) and load weights first",
            )
    return model


def check_inputs(inputs: Any, kwargs: Any) -> tuple[tuple[Any, ...] | None, dict[str, Any]]:
    """Example inputs as a tuple of positional arguments (None for none) and keyword arguments.

    Raises:
        OptionError: for a dict in the place of positional arguments, or another wrong type.
    """
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise OptionError(
            f"example_kwargs is a {type(kwargs).__name__}", try_="a dict of keyword arguments"
        )
    if kwargs is not None and any(not isinstance(k, str) for k in kwargs):
        raise OptionError("example_kwargs has a key that is no string")
    if isinstance(inputs, Mapping):
        raise OptionError(
            "example_inputs is a dict",
            try_="example_kwargs=... for keyword arguments, (d,) for one argument that is a dict",
        )
    named = dict(kwargs or {})
    if inputs is None:
        return (() if named else None), named
    if isinstance(inputs, torch.Tensor):
        return (inputs,), named
    if isinstance(inputs, (tuple, list)):
        return tuple(inputs), named
    raise OptionError(
        f"example_inputs is a {type(inputs).__name__}",
        try_="a tensor, or a tuple of forward's positional arguments",
    )


def check_passes(
    fuse: Any, rules: str | Rule | Iterable[str | Rule], max_rewrites: Any
) -> PassOptions:
    """The options of the passes.

    `GRAPHOPT_MAX_REWRITES` stands in for `max_rewrites` where that is None.

    Raises:
        OptionError: for a wrong type or an unknown rule.
    """
    if not isinstance(fuse, bool):
        raise OptionError(f"fuse is {fuse!r}", try_="True or False")
    if max_rewrites is None and os.environ.get("GRAPHOPT_MAX_REWRITES"):
        text = os.environ["GRAPHOPT_MAX_REWRITES"]
        if not text.isdigit():
            raise OptionError(f"GRAPHOPT_MAX_REWRITES={text}", try_="a whole number from 0")
        max_rewrites = int(text)
    if max_rewrites is not None and (
        isinstance(max_rewrites, bool) or not isinstance(max_rewrites, int) or max_rewrites < 0
    ):
        raise OptionError(f"max_rewrites is {max_rewrites!r}", try_="None or a number from 0")
    chosen = tuple(rules) if isinstance(rules, (list, tuple, set, frozenset)) else rules
    select_rules(chosen)
    return PassOptions(fuse=fuse, rules=chosen, max_rewrites=max_rewrites)


def check_choice(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    """Check an option that takes one of a few values.

    Raises:
        OptionError: naming the option, its value and the allowed ones.
    """
    if not any(type(value) is type(a) and value == a for a in allowed):
        raise OptionError(f"{name} is {value!r}", try_=" or ".join(repr(a) for a in allowed))


def disabled() -> bool:
    """Whether `GRAPHOPT_DISABLE=1` asks that models be left as they are."""
    return os.environ.get("GRAPHOPT_DISABLE", "") not in ("", "0")
