"""What an op is: its full argument list, whether it is a view, random, or commutes."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from graphopt.remat import is_marker

aten = torch.ops.aten

# Unseeded draws from torch's generator. The dispatcher's own tag misses the composites among them
# (aten.dropout, scaled_dot_product_attention with a dropout probability), so both are asked.
_RANDOM_COMPOSITES: dict[Any, int] = {
    aten.dropout.default: 1,
    aten.alpha_dropout.default: 1,
    aten.feature_dropout.default: 1,
    aten.feature_alpha_dropout.default: 1,
    aten.scaled_dot_product_attention.default: 4,
}
"""Composite op -> position of the probability that makes it random when it is not zero."""

_COMMUTES = {
    aten.add.Tensor,
    aten.mul.Tensor,
    aten.eq.Tensor,
    aten.ne.Tensor,
    aten.maximum.default,
    aten.minimum.default,
    aten.logical_and.default,
    aten.logical_or.default,
    aten.bitwise_and.Tensor,
    aten.bitwise_or.Tensor,
}

# These return their input (or a view of it) although their schema declares no alias.
_CASTS = {
    aten.to.dtype,
    aten.to.device,
    aten.to.other,
    aten.to.dtype_layout,
    aten.type_as.default,
}
"""These return their operand only where dtype and device are its own."""

_MAYBE_ALIASES = {
    aten.contiguous.default,
    aten.reshape.default,
    aten.reshape_as.default,
    aten.flatten.using_ints,
    aten.dropout.default,
    aten.einsum.default,
}

NO_DEFAULT = object()
"""Stands for "this argument has no default" in a parameter list."""


@functools.cache
def parameters(target: Any) -> tuple[tuple[str, Any], ...] | None:
    """Names and defaults of an ATen op's arguments in schema order; None for other callables.

    Example:
        >>> parameters(torch.ops.aten.add.Tensor)[2]
        ('alpha', 1)
    """
    schema = getattr(target, "_schema", None)
    if schema is None:
        return None
    return tuple(
        (a.name, a.default_value if a.has_default_value() else NO_DEFAULT) for a in schema.arguments
    )


def arguments(node: fx.Node) -> tuple[Any, ...]:
    """All arguments of a call in schema order, defaults filled in.

    Two calls that mean the same compare equal whichever way their arguments were spelled.
    Callables without a schema give their positional arguments, then keyword values by name.
    """
    names = parameters(node.target)
    if names is None:
        return (*node.args, *(node.kwargs[k] for k in sorted(node.kwargs)))
    given, kwargs = node.args, node.kwargs
    return tuple(
        given[i] if i < len(given) else kwargs.get(name, default)
        for i, (name, default) in enumerate(names)
    )


def argument(node: fx.Node, name: str) -> Any:
    """One argument of an ATen call by name, its default where it was left out.

    Raises:
        KeyError: when the op has no argument of that name.
    """
    names = parameters(node.target) or ()
    for i, (known, default) in enumerate(names):
        if known == name:
            return node.args[i] if i < len(node.args) else node.kwargs.get(name, default)
    raise KeyError(f"{node.target} has no argument {name!r}")


def is_commutative(target: Any) -> bool:
    """Whether the first two operands may be exchanged."""
    return target in _COMMUTES


@functools.cache
def _declares_view(target: Any) -> bool:
    schema = getattr(target, "_schema", None)
    if schema is None:
        return False
    infos = [r.alias_info for r in schema.returns]
    return any(info is not None and not info.is_write for info in infos)


@functools.cache
def _declares_write(target: Any) -> bool:
    schema = getattr(target, "_schema", None)
    if schema is None:
        return False
    return any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)


def count(graph: fx.Graph) -> int:
    """How many ops a graph runs; taking one of several results is none, nor is dropping one."""
    calls = (n for n in graph.nodes if n.op == "call_function" and not is_marker(n))
    return sum(n.target is not operator.getitem for n in calls)


def is_view(node: fx.Node) -> bool:
    """Whether the result may share storage with an operand (getitem of such a result included)."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return isinstance(node.args[0], fx.Node) and is_view(node.args[0])
    if node.target in _CASTS:
        x, y = node.args[0].meta.get("val"), node.meta.get("val")  # type: ignore[union-attr]
        if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor):
            return True
        return (x.dtype, x.device) == (y.dtype, y.device)
    if node.target in _RANDOM_COMPOSITES and is_random(node):
        return False
    return _declares_view(node.target) or node.target in _MAYBE_ALIASES


def may_copy(node: fx.Node) -> bool:
    """Whether a node that `is_view` holds for gives a copy where no view would do (reshape)."""
    return node.target in _MAYBE_ALIASES


def is_mutating(node: fx.Node) -> bool:
    """Whether the op writes into an operand; a body holds none of these."""
    return node.op == "call_function" and _declares_write(node.target)


def is_random(node: fx.Node) -> bool:
    """Whether the op draws from torch's generator (seeded graphopt ops do not; draw_seed does)."""
    if node.op != "call_function":
        return False
    where = _RANDOM_COMPOSITES.get(node.target)
    if where is not None:
        args = arguments(node)
        trains = where != 1 or bool(args[2])
        return trains and args[where] != 0.0
    if is_draw_seed(node):
        return True
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags


def is_draw_seed(node: fx.Node) -> bool:
    """Whether the node is the one that draws the forward's seed."""
    return node.op == "call_function" and str(node.target) == "graphopt.draw_seed.default"


def is_symbolic(node: fx.Node) -> bool:
    """Whether the node computes a Python or symbolic number, not a tensor."""
    value = node.meta.get("val")
    return isinstance(value, (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool))


def is_pure(node: fx.Node) -> bool:
    """Whether the node may be dropped when unused and merged with an equal one."""
    if node.op not in ("call_function", "get_attr") or is_marker(node):
        return False
    return not is_random(node) and not is_mutating(node)


def op_name(target: Callable[..., Any] | str) -> str:
    """A short readable name: "aten.linear", "aten.add.Tensor", "graphopt.rms_norm", "getitem".

    Example:
        >>> op_name(torch.ops.aten.linear.default)
        'aten.linear'
    """
    text = str(target)
    if hasattr(target, "_schema"):
        return text.removesuffix(".default")
    return text if isinstance(target, str) else getattr(target, "__name__", text)
