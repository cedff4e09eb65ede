"""Arguments and results as a flat list of tensors plus a structure to build them up again.

A structure is a nested tuple whose first item names the kind of node; it is hashable when it comes
from arguments, so that it can stand in a graph key. Everything that is not a tensor (numbers,
strings, None, flags) is part of the structure, because a captured graph is specialised on it.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

import torch

from graphopt.errors import CaptureError

Structure = tuple[Any, ...]

LEAF: Structure = ("leaf",)
_PLAIN = frozenset({type(None), bool, int, str, bytes, complex})
_STATIC: tuple[type, ...] = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_STATIC = (*_STATIC, torch.Size, enum.Enum, type, range, type(Ellipsis), type(NotImplemented))


class Held:
    """An object kept in a structure by identity (hashable whatever the object is)."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Held) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


class Equal(Held):
    """An object kept in a structure by equality (the context of a registered container)."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Equal) and bool(other.value == self.value)

    def __hash__(self) -> int:
        return hash(type(self.value))


def flatten(value: Any, leaves: list[Any], *, results: bool = False) -> Structure:
    """Append the tensors of a nested value to `leaves` and return its structure.

    Args:
        value: tensors in lists, tuples, named tuples, dicts, dataclasses, Hugging Face outputs or
            containers registered with `torch.utils._pytree`, beside plain Python values.
        leaves: receives the tensors (and symbolic numbers) in order.
        results: whether the value is a result: then objects of any class are taken apart by their
            attributes (a key-value cache), and what holds no tensor is kept by reference.

    Raises:
        CaptureError: for an argument of a class that is none of the above.

    Example:
        >>> leaves = []
        >>> s = flatten({"x": torch.ones(2), "n": 3}, leaves)
        >>> len(leaves), unflatten(s, leaves)["n"]
        (1, 3)
    """
    kind = type(value)
    if isinstance(value, torch.Tensor):
        leaves.append(value)
        return LEAF
    if kind in _PLAIN:
        return ("value", kind, value)
    if kind is float:  # 0.0 == -0.0, yet they are two values
        return ("value", kind, value, value.hex()) if value == 0.0 else ("value", kind, value)
    if kind is list or kind is tuple:
        return (kind.__name__, tuple([flatten(v, leaves, results=results) for v in value]))
    if kind is dict:
        items = tuple([flatten(v, leaves, results=results) for v in value.values()])
        return ("dict", tuple(value), items)
    return _flatten_rare(value, leaves, results)


def flatten_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[torch.Tensor]
) -> Structure:
    """`flatten` of the arguments of a call.

    Raises:
        CaptureError: for an argument of an unknown class, or one that holds itself.
    """
    try:
        return flatten((args, kwargs), leaves)
    except RecursionError:
        raise CaptureError(
            "an argument that holds itself, or is nested too deeply",
            why="its tensors cannot be counted",
            try_="pass its tensors; or optimize(..., on_error='fallback')",
        ) from None


def _flatten_rare(value: Any, leaves: list[Any], results: bool) -> Structure:
    kind = type(value)
    if results and isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        leaves.append(value)
        return LEAF
    if isinstance(value, _STATIC) or inspect.isroutine(value):
        return ("value", kind, value)
    if isinstance(value, slice):
        return ("slice", flatten((value.start, value.stop, value.step), leaves, results=results))
    if isinstance(value, (bool, int, float, str)):  # numpy scalars and str subclasses
        return ("value", kind, value)
    if dataclasses.is_dataclass(value):
        return _flatten_fields(value, leaves, results)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return ("named", kind, tuple([flatten(v, leaves, results=results) for v in value]))
    registered = _registry().get(kind)
    whole = results and hasattr(value, "__dict__")  # all attributes, not only registered children
    if registered is not None and not whole and not isinstance(value, (Mapping, list, tuple)):
        children, context = registered.flatten_fn(value)
        items = tuple([flatten(v, leaves, results=results) for v in children])
        return ("registered", kind, Equal(context), items)
    if isinstance(value, Mapping):
        items = tuple([flatten(v, leaves, results=results) for v in value.values()])
        return ("mapping", kind, tuple(value), items, Held(getattr(value, "default_factory", None)))
    if isinstance(value, (list, tuple)):  # subclasses and torch.return_types
        return ("sequence", kind, tuple([flatten(v, leaves, results=results) for v in value]))
    if results:
        return _flatten_object(value, leaves)
    raise CaptureError(
        f"an argument of class {kind.__module__}.{kind.__qualname__}",
        why="it is neither a tensor, nor a plain value, nor a container whose tensors are known",
        try_="pass its tensors, or register it with torch.utils._pytree.register_pytree_node",
    )


def _flatten_fields(value: Any, leaves: list[Any], results: bool) -> Structure:
    kind = type(value)
    if isinstance(value, Mapping):  # Hugging Face ModelOutput: only what is not None is a key
        keys = tuple(value.keys())
        items = tuple([flatten(value[k], leaves, results=results) for k in keys])
        return ("output", kind, keys, items)
    names = [f.name for f in dataclasses.fields(value) if hasattr(value, f.name)]
    items = tuple([flatten(getattr(value, n), leaves, results=results) for n in names])
    return ("fields", kind, tuple(names), items)


def _flatten_object(value: Any, leaves: list[Any]) -> Structure:
    """An object of a class unknown here, in a result: its attributes, when one holds a tensor."""
    if isinstance(value, (Iterator, Awaitable)):
        kind = "coroutine" if isinstance(value, Awaitable) else type(value).__name__
        raise CaptureError(
            f"forward returns a {kind}",
            why="it would run after the capture, and once for all calls",
            try_="return a list or a tuple; or optimize(..., on_error='fallback')",
        )
    attributes = getattr(value, "__dict__", None)
    if not attributes or isinstance(value, torch.nn.Module) or not holds_tensor(value, set()):
        return ("held", Held(value))
    fixed, keys, items = {}, [], []
    for key, inner in attributes.items():
        if holds_tensor(inner, {id(value)}):
            keys.append(key)
            items.append(flatten(inner, leaves, results=True))
        elif isinstance(inner, (list, dict, set)):
            keys.append(key)
            items.append(("held", Held(inner)))
        else:
            fixed[key] = inner
    return ("object", type(value), tuple(keys), tuple(items), fixed)


def holds_tensor(value: Any, seen: set[int]) -> bool:
    """Whether a tensor can be reached through containers and attributes; `seen` holds ids."""
    if isinstance(value, torch.Tensor):
        return True
    if id(value) in seen or type(value) in _PLAIN or isinstance(value, torch.nn.Module):
        return False
    seen.add(id(value))
    if isinstance(value, Mapping):
        return any(holds_tensor(v, seen) for v in value.values())
    if isinstance(value, (list, tuple, set)):
        return any(holds_tensor(v, seen) for v in value)
    attributes = getattr(value, "__dict__", None)
    if not isinstance(attributes, dict) or isinstance(value, type) or inspect.isroutine(value):
        return False
    return any(holds_tensor(v, seen) for v in attributes.values())


def _registry() -> Mapping[type, Any]:
    pytree = getattr(torch.utils, "_pytree", None)
    return getattr(pytree, "SUPPORTED_NODES", {})


def unflatten(structure: Structure, leaves: Any) -> Any:
    """Build a value from its structure and its leaves, the reverse of `flatten`.

    Args:
        structure: what `flatten` returned.
        leaves: the leaves, as a sequence or an iterator.

    Returns:
        A new value of the same classes; containers are new objects at every call.
    """
    return _build(structure, iter(leaves))


def _build(structure: Structure, leaves: Iterator[Any]) -> Any:
    tag = structure[0]
    if tag == "leaf":
        return next(leaves)
    if tag == "value":
        return structure[2]
    if tag == "tuple":
        return tuple([_build(s, leaves) for s in structure[1]])
    if tag == "list":
        return [_build(s, leaves) for s in structure[1]]
    if tag == "dict":
        return dict(zip(structure[1], [_build(s, leaves) for s in structure[2]], strict=True))
    return _BUILDERS[tag](structure, leaves)


def _build_output(s: Structure, leaves: Iterator[Any]) -> Any:
    values = [_build(v, leaves) for v in s[3]]
    return s[1](**dict(zip(s[2], values, strict=True)))


def _build_fields(s: Structure, leaves: Iterator[Any]) -> Any:
    value = object.__new__(s[1])  # not __init__: __post_init__ ran at capture
    for name, item in zip(s[2], s[3], strict=True):
        object.__setattr__(value, name, _build(item, leaves))
    return value


def _build_mapping(s: Structure, leaves: Iterator[Any]) -> Any:
    items = dict(zip(s[2], [_build(v, leaves) for v in s[3]], strict=True))
    factory = s[4].value
    return s[1](factory, items) if factory is not None else s[1](items)


def _build_registered(s: Structure, leaves: Iterator[Any]) -> Any:
    return _registry()[s[1]].unflatten_fn([_build(v, leaves) for v in s[3]], s[2].value)


def _build_object(s: Structure, leaves: Iterator[Any]) -> Any:
    value = object.__new__(s[1])
    attributes = value.__dict__
    attributes.update(s[4])
    for name, item in zip(s[2], s[3], strict=True):
        attributes[name] = _build(item, leaves)
    return value


def _build_held(s: Structure, leaves: Iterator[Any]) -> Any:
    value = s[1].value
    # mutable containers are copied, so that two results never share one
    return copy.copy(value) if isinstance(value, (list, dict, set)) else value


_BUILDERS: dict[str, Callable[[Structure, Iterator[Any]], Any]] = {
    "slice": lambda s, leaves: slice(*_build(s[1], leaves)),
    "named": lambda s, leaves: s[1]._make([_build(v, leaves) for v in s[2]]),
    "sequence": lambda s, leaves: s[1]([_build(v, leaves) for v in s[2]]),
    "registered": _build_registered,
    "mapping": _build_mapping,
    "output": _build_output,
    "fields": _build_fields,
    "object": _build_object,
    "held": _build_held,
}


def leaf_names(structure: Structure, signature: inspect.Signature | None) -> list[str]:
    """A name for each leaf of `(args, kwargs)`, as a user would write it.

    Args:
        structure: of the pair `(args, kwargs)`.
        signature: of the module's forward, None where it has none.

    Returns:
        Names such as "input_ids", "batch['x']", "args[2]", in the order of the leaves.

    Example:
        >>> s = flatten(((torch.ones(1),), {"y": [torch.ones(1)]}), [])
        >>> leaf_names(s, inspect.signature(lambda x, y: None))
        ['x', 'y[0]']
    """
    return [name for name, value in _named(structure, signature) if value is LEAF]


def plain_values(structure: Structure, signature: inspect.Signature | None) -> dict[str, Any]:
    """The values in `(args, kwargs)` that are not tensors, by the name a user would write."""
    return {n: v[2] for n, v in _named(structure, signature) if v is not LEAF}


def _named(
    structure: Structure, signature: inspect.Signature | None
) -> list[tuple[str, Structure]]:
    args, kwargs = structure[1]
    positional: list[str] = []
    rest = "args"
    for p in (signature.parameters if signature else {}).values():
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD):
            positional.append(p.name)
        elif p.kind is p.VAR_POSITIONAL:
            rest = p.name
    names: list[tuple[str, Structure]] = []
    for i, child in enumerate(args[1]):
        extra = f"{rest}[{i - len(positional)}]"
        _name(child, positional[i] if i < len(positional) else extra, names)
    for key, child in zip(kwargs[1], kwargs[2], strict=True):
        _name(child, key, names)
    return names


def _name(structure: Structure, prefix: str, names: list[tuple[str, Structure]]) -> None:
    tag = structure[0]
    if tag in ("leaf", "value"):
        names.append((prefix, structure))
    elif tag in ("list", "tuple"):
        for i, s in enumerate(structure[1]):
            _name(s, f"{prefix}[{i}]", names)
    elif tag == "dict":
        for k, s in zip(structure[1], structure[2], strict=True):
            _name(s, f"{prefix}[{k!r}]", names)
    elif tag in ("fields", "output", "mapping"):
        for k, s in zip(structure[2], structure[3], strict=True):
            _name(s, f"{prefix}.{k}" if tag == "fields" else f"{prefix}[{k!r}]", names)
    elif tag in ("named", "sequence"):
        fields = getattr(structure[1], "_fields", None)
        for i, s in enumerate(structure[2]):
            _name(s, f"{prefix}.{fields[i]}" if fields else f"{prefix}[{i}]", names)
    elif tag == "registered":
        for i, s in enumerate(structure[3]):
            _name(s, f"{prefix}.{i}", names)
    elif tag == "slice":
        _name(structure[1], prefix, names)


def signature_of(module: torch.nn.Module) -> inspect.Signature | None:
    """The signature of a module's forward as `inspect` sees it, None where there is none."""
    try:
        return inspect.signature(module.forward)
    except (TypeError, ValueError):
        return None
