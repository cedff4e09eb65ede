"""Checks of what a user gives to the public functions, before any work is done."""

from __future__ import annotations

import difflib
import fnmatch
import functools
import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from graphopt.capture.shadow import ATTACHED
from graphopt.capture.signature import signature_of
from graphopt.errors import OptionError, UnsupportedError
from graphopt.module import GraphoptModule
from graphopt.passes import REGISTRY, PassOptions, Rule, select_rules
from graphopt.passes.pipeline import watchers
from graphopt.precision import LOW

ON_ERROR = ("raise", "fallback")
DYNAMIC = ("auto", True, False)
PRECISION = (None, "auto", *LOW)
FUSE = (True, False, "always")


NOT_YET = frozenset(
    {
        "autotune",
        "cuda_graph",
    }
)
"""Options of later versions."""

P = ParamSpec("P")
R = TypeVar("R")


def names_checked(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: keyword arguments that the function does not have are an `OptionError`.

    Example:
        >>> @names_checked
        ... def scale(x, *, factor=2):
        ...     return x * factor
        >>> scale(3, facter=4)
        Traceback (most recent call last):
            ...
        graphopt.errors.OptionError: scale has no option 'facter'
          try  'factor'
    """
    known = tuple(inspect.signature(function).parameters)

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        check_names(function.__name__, kwargs, known)
        return function(*args, **kwargs)

    return checked


def check_names(function: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Check the names of keyword arguments.

    Raises:
        OptionError: for one that is not known, with the nearest that is.
    """
    known = tuple(known)
    for name in given:
        if name in known:
            continue
        if name in NOT_YET:
            raise OptionError(
                f"{name}= is not available yet", try_=f"{function} without it, in this version"
            )
        near = difflib.get_close_matches(name, known, n=1)
        cure = repr(near[0]) if near else ", ".join(known)
        raise OptionError(f"{function} has no option {name!r}", try_=cure)


def check_model(model: Any, *, attached: bool = False) -> nn.Module:
    """The model, when it is one that can be optimized.

    Args:
        model: what the user gave.
        attached: whether a model that `attach` optimized may be given.

    Raises:
        OptionError: for anything but an `nn.Module` with a forward; for a module that is
            optimized, compiled or scripted already; for parallel and sharding wrappers; for
            parameters on the meta device or without a shape yet.
        UnsupportedError: for quantized modules.
    """
    if not isinstance(model, nn.Module):
        raise _no_module(model)
    kind = type(model).__name__
    if isinstance(model, GraphoptModule):
        raise OptionError(f"{kind} is optimized already", try_="opt.source is the model itself")
    if getattr(model.__dict__.get("forward"), ATTACHED, False) and not attached:
        raise OptionError(
            f"{kind} is optimized in place already, by attach",
            try_="the model as it is, or graphopt.detach(model) first",
        )
    if isinstance(model, torch._dynamo.eval_frame.OptimizedModule):
        raise OptionError(
            "the model is wrapped by torch.compile",
            why="its forward is compiled code, which cannot be captured",
            try_="optimize the module before it is compiled (model._orig_mod)",
        )
    if model._compiled_call_impl is not None:
        raise OptionError(
            f"{kind} was compiled in place by its compile()",
            why="a call of it runs compiled code, whatever its forward is",
            try_="a model on which compile() was not called",
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise OptionError("the model is a TorchScript module", try_="optimize the eager module")
    if type(model).forward is nn.Module.forward and "forward" not in model.__dict__:
        raise OptionError(
            f"{kind} has no forward",
            why="nothing can be called, so nothing can be captured",
            try_="a module that calls its parts in a forward of its own",
        )
    _check_parts(model)
    _check_tensors(model)
    return model


def _no_module(model: Any) -> OptionError:
    if isinstance(model, type):
        return OptionError(
            f"model is the class {model.__name__}, not an nn.Module",
            try_=f"an instance: {model.__name__}(...)",
        )
    cure = "an nn.Module"
    if isinstance(model, torch.export.ExportedProgram):
        cure = "the nn.Module that was exported"
    elif callable(model):
        cure = "a module whose forward calls the function"
    return OptionError(f"model is of type {type(model).__name__}, not an nn.Module", try_=cure)


def _check_parts(model: nn.Module) -> None:
    """Refuse wrappers that change how the modules inside them run, and quantized modules."""
    for path, module in model.named_modules():
        kind = type(module).__name__
        where = f"{path} is" if path else "the model is"
        if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            raise OptionError(
                f"{where} wrapped in {kind}", try_=f"optimize .module, then wrap it in {kind}"
            )
        if any(c.__name__ in _SHARDED for c in type(module).__mro__):
            raise OptionError(
                f"{where} sharded ({kind})",
                why="its parameters are whole only while it runs",
                try_="optimize it before it is sharded",
            )
        if type(module).__module__.startswith(_QUANTIZED):
            raise UnsupportedError(
                f"{where} quantized ({kind})",
                why="its weights are packed in a form that cannot be captured",
                try_="the model before it is quantized",
            )


_SHARDED = ("FullyShardedDataParallel", "FSDPModule")
_QUANTIZED = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized", "torch.nn.quantized")


def check_shapes(model: nn.Module) -> None:
    """Check that every parameter and buffer has its shape.

    Raises:
        OptionError: for one of a lazy module that was not called yet.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            raise OptionError(
                f"{name} has no shape yet",
                why="it is that of a lazy module, which takes it from its first input",
                try_="call the model once first",
            )


def _check_tensors(model: nn.Module) -> None:
    check_shapes(model)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise OptionError(
                f"{name} is on the meta device",
                why="there is no memory behind it to compute with",
                try_="model.to_empty(device=...) and load weights first",
            )


def check_inputs(
    inputs: Any, kwargs: Any, names: tuple[str, str] = ("example_inputs", "example_kwargs")
) -> tuple[tuple[Any, ...] | None, dict[str, Any]]:
    """Example inputs as a tuple of positional arguments (None for none) and keyword arguments.

    Args:
        inputs: a tensor, or a tuple or list of positional arguments.
        kwargs: a mapping of keyword arguments, or None.
        names: what the user calls the two.

    Raises:
        OptionError: for a dict in the place of positional arguments, or another wrong type.
    """
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise OptionError(
            f"{names[1]} is of type {type(kwargs).__name__}", try_="a dict of keyword arguments"
        )
    strange = next((k for k in kwargs or {} if not isinstance(k, str)), None)
    if strange is not None:
        raise OptionError(
            f"{names[1]} has a key that is no string: {strange!r}",
            try_="the names of forward's parameters",
        )
    if isinstance(inputs, Mapping):
        raise OptionError(
            f"{names[0]} is a dict",
            try_=f"{names[1]}=... for keyword arguments, (d,) for one argument that is a dict",
        )
    named = dict(kwargs or {})
    if inputs is None:
        return (() if named else None), named
    if isinstance(inputs, torch.Tensor):
        return (inputs,), named
    if isinstance(inputs, (tuple, list)) and not isinstance(inputs, torch.Size):
        return tuple(inputs), named
    cure = "a tensor, or a tuple of forward's positional arguments"
    if type(inputs).__module__ == "numpy":
        cure = "torch.from_numpy(...)"
    raise OptionError(f"{names[0]} is of type {type(inputs).__name__}", try_=cure)


def check_fit(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Check that arguments fit the signature of a model's forward.

    Raises:
        OptionError: when they are too many or too few, or one has an unknown name.
    """
    signature = signature_of(model)
    if signature is None:
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        given = [*(type(a).__name__ for a in args), *(f"{k}=" for k in kwargs)]
        parameters = ", ".join(map(str, signature.parameters.values()))
        raise OptionError(
            f"the inputs do not fit the forward of {type(model).__name__}: {error}",
            why=f"it is forward({parameters}), given were ({', '.join(given)})",
            try_="the arguments with which the model is called",
        ) from None


def check_call(
    model: nn.Module,
    inputs: Any,
    kwargs: Any,
    names: tuple[str, str] = ("inputs", "example_kwargs"),
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments for a model's forward, after a check that they fit it.

    Args:
        model: whose forward they are for.
        inputs: a tensor, or a tuple or list of positional arguments; None for none.
        kwargs: a mapping of keyword arguments, or None.
        names: what the user calls the two.

    Raises:
        OptionError: for a wrong type, or arguments that do not fit.

    Example:
        >>> check_call(nn.Linear(2, 2), None, {"input": 1})
        ((), {'input': 1})
    """
    args, named = check_inputs(inputs, kwargs, names)
    check_fit(model, args or (), named)
    return args or (), named


def has_backward(model: nn.Module, args: Any, kwargs: Any) -> bool:
    """Whether a step of a model has a backward, where the user does not say.

    Args:
        model: the model.
        args: positional arguments of its forward.
        kwargs: keyword arguments.

    Returns:
        Whether it is in training mode, gradients are on, and a parameter or an input requires one.

    Example:
        >>> has_backward(nn.Linear(2, 2), (), {}), has_backward(nn.Softmax(-1), (), {})
        (True, False)
    """
    tensors = (*model.parameters(), *tree_leaves((args, kwargs)))
    wanted = any(isinstance(t, torch.Tensor) and t.requires_grad for t in tensors)
    return model.training and torch.is_grad_enabled() and wanted


def check_passes(
    fuse: Any, rules: str | Rule | Iterable[str | Rule], max_rewrites: Any
) -> PassOptions:
    """The options of the passes.

    `GRAPHOPT_MAX_REWRITES` stands in for `max_rewrites` where that is None.

    Raises:
        OptionError: for a wrong type or an unknown rule.
    """
    check_choice("fuse", fuse, FUSE)
    if max_rewrites is None and os.environ.get("GRAPHOPT_MAX_REWRITES"):
        text = os.environ["GRAPHOPT_MAX_REWRITES"]
        if not (text.isascii() and text.isdigit()):
            raise OptionError(f"GRAPHOPT_MAX_REWRITES={text}", try_="a whole number from 0")
        max_rewrites = int(text)
    if max_rewrites is not None and (
        isinstance(max_rewrites, bool) or not isinstance(max_rewrites, int) or max_rewrites < 0
    ):
        raise OptionError(f"max_rewrites is {max_rewrites!r}", try_="None or a number from 0")
    if isinstance(rules, (Mapping, bytes)):
        raise OptionError(
            f"rules= is of type {type(rules).__name__}",
            try_="rules='default,-rope', or rules=['default', my_rule]",
        )
    chosen = tuple(rules) if isinstance(rules, (list, tuple, set, frozenset)) else rules
    for each in select_rules(chosen):
        if REGISTRY.get(each.name) is not each:
            _check_patterns(each)
    watchers()  # what GRAPHOPT_PRINT and GRAPHOPT_DUMP ask for must be possible
    return PassOptions(fuse=fuse, rules=chosen, max_rewrites=max_rewrites)


def _check_patterns(rule: Rule) -> None:
    """Trace the patterns of a rule now: a user's own may be wrong."""
    try:
        _ = rule.patterns
    except Exception as error:
        raise OptionError(
            f"the pattern of rule {rule.name} raised {type(error).__name__}: {error}",
            at=f"{rule.functions[0].__code__.co_filename}:"
            f"{rule.functions[0].__code__.co_firstlineno} in {rule.name}",
            try_="a function that calls torch.ops.aten.* on its parameters and returns the result",
        ) from error


_DTYPES: dict[Any, torch.dtype] = {"fp32": torch.float32, **LOW}
_DTYPES |= {dtype: dtype for dtype in (*_DTYPES.values(),)}


def check_overrides(model: nn.Module, given: Any) -> tuple[tuple[str, torch.dtype], ...]:
    """The precision overrides as (pattern, dtype) pairs.

    Raises:
        OptionError: for a wrong type, an unknown precision, or a pattern that names neither a
            module of the model nor an op.
    """
    if given is None:
        return ()
    if not isinstance(given, Mapping):
        raise OptionError(
            f"precision_overrides is of type {type(given).__name__}",
            try_="a dict of patterns, such as {'encoder.*': 'fp32'}",
        )
    found = []
    for pattern, precision in given.items():
        if not isinstance(pattern, str):
            raise OptionError(
                f"precision_overrides has the key {pattern!r}", try_="a module path, glob or op"
            )
        dtype = _DTYPES.get(precision) if isinstance(precision, (str, torch.dtype)) else None
        if dtype is None:
            raise OptionError(
                f"precision_overrides[{pattern!r}] is {precision!r}", try_="'fp32', 'bf16', 'fp16'"
            )
        _check_pattern(model, pattern)
        found.append((pattern, dtype))
    return tuple(found)


def _check_pattern(model: nn.Module, pattern: str) -> None:
    path, both, op = pattern.partition("::")
    paths = [name for name, _ in model.named_modules()]
    is_path = any(fnmatch.fnmatchcase(p, path) for p in paths)
    is_op = _names_an_op(op if both else path)
    if (is_path and is_op) if both else (is_path or is_op):
        return
    inside = path.removesuffix(".*")
    if not both and inside in paths:
        raise OptionError(
            f"precision_overrides: there is no module inside {inside!r}", try_=repr(inside)
        )
    near = difflib.get_close_matches(path, paths, n=1)
    raise OptionError(
        f"precision_overrides: {pattern!r} names neither a module nor an op",
        try_=repr(near[0]) if near else "a path of model.named_modules(), or an op as 'softmax'",
    )


def _names_an_op(pattern: str) -> bool:
    """Whether a pattern names an ATen op: "softmax", "aten.softmax", "aten.softmax.int"."""
    name, _, overload = pattern.removeprefix("aten.").partition(".")
    packets = fnmatch.filter(dir(torch.ops.aten), name)
    if not overload:
        return bool(packets)
    return any(
        fnmatch.filter(getattr(torch.ops.aten, p).overloads(), overload)
        for p in packets
        if isinstance(getattr(torch.ops.aten, p), torch._ops.OpOverloadPacket)
    )


def check_choice(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    """Check an option that takes one of a few values.

    Raises:
        OptionError: naming the option, its value and the allowed ones.
    """
    if not any(type(value) is type(a) and value == a for a in allowed):
        raise OptionError(f"{name} is {value!r}", try_=" or ".join(repr(a) for a in allowed))


def disabled() -> bool:
    """Whether `GRAPHOPT_DISABLE=1` asks that models be left as they are.

    Raises:
        OptionError: for a value that is neither a yes nor a no.
    """
    text = os.environ.get("GRAPHOPT_DISABLE", "").strip().lower()
    if text in ("1", "true", "yes", "on"):
        return True
    if text in ("", "0", "false", "no", "off"):
        return False
    raise OptionError(f"GRAPHOPT_DISABLE={text}", try_="1 or 0")
