"""What functionalization knows of tensors that share memory: roots, aliases, who writes to what."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import torch
from torch import fx

from graphopt.capture.normalize import storage_of
from graphopt.errors import CaptureError
from graphopt.graph.record import site_of

_DROPOUTS = ("aten::dropout", "aten::feature_dropout", "aten::alpha_dropout")
SELVES = {"to", "contiguous", "dropout", "feature_dropout", "alpha_dropout", "type_as"}
"""Operations that, where their result shares memory with their first argument, return it itself."""
FRESH = ("aten::lift_fresh_copy", "aten::clone")
_RENAMED = {"normal_": "normal_functional", "__iand__": "__and__", "__ior__": "__or__"}
_RENAMED |= {"__ixor__": "__xor__", "__ilshift__": "__lshift__", "__irshift__": "__rshift__"}
_OVERLOADS = {("bernoulli_", "float"): "p"}


# ---- which storages are written to


def written_storages(graph: fx.Graph) -> set[int]:
    """Storages that some operation writes to, with those that eager would have them share."""
    written: set[int] = set()
    shared: list[tuple[int | None, int | None]] = []
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        for target in targets(node):
            storage = storage_of(target)
            if storage is None:
                raise refusal(node, "writes to a value that is not one tensor")
            written.add(storage)
        if is_dropout_off(node):
            shared.append((storage_of(node), storage_of(node.args[0])))
    for a, b in reversed(shared):
        if a in written and b is not None:
            written.add(b)
    for a, b in shared:
        if b in written and a is not None:
            written.add(a)
    return written


def targets(node: fx.Node) -> list[fx.Node]:
    """The argument nodes that an operation writes to."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return []
    if schema.name in ("aten::batch_norm", "aten::instance_norm") and node.args[5]:
        return [a for a in node.args[3:5] if isinstance(a, fx.Node)]
    if not schema.is_mutable:
        return []
    found = []
    for i, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
            values = value if isinstance(value, (list, tuple)) else [value]
            found += [v for v in values if isinstance(v, fx.Node)]
    return found


def is_dropout_off(node: fx.Node) -> bool:
    """Whether a dropout drops nothing: eager then returns its very input."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or schema.name not in _DROPOUTS:
        return False
    _, p, train = node.args
    return not train or bool(p == 0)


def refusal(node: fx.Node, why: str) -> CaptureError:
    """The error for an operation that cannot be made functional: "it <why>"."""
    site = site_of(node)
    return CaptureError(
        f"an in-place operation that has no functional form ({node.target})",
        at=f"{site.file}:{site.line}    {site.code}" if site.file else None,
        why=f"it {why}",
        try_="write it out of place; or on_error='fallback'",
    )


# ---- aliases


def check_write(node: fx.Node, root: Root, grads: bool) -> None:
    """Refuse a write whose effect on values or gradients a pure graph cannot have.

    Args:
        node: the writing operation.
        root: what it writes to.
        grads: whether the written value requires grad.

    Raises:
        CaptureError: names the operation and its line.
    """
    if root.kind == "constant":
        raise refusal(node, "writes to a tensor that is neither a buffer nor an attribute")
    no_grad = bool(node.meta.get("graphopt_no_grad"))
    if root.grads and (root.kind == "input" or (root.kind == "parameter" and not no_grad)):
        raise refusal(node, f"writes to the {root.kind} {root.target}, which requires grad")
    if root.kind == "input" and grads:
        raise refusal(node, f"gives the input {root.target} a value that requires grad")
    if root.grads and no_grad and root.kind != "parameter":
        raise refusal(node, "writes under no_grad to a value that requires grad")


class Root:
    """One tensor that is not a view of another, and its value at the present point."""

    def __init__(self, value: fx.Node, kind: str, target: str, grads: bool) -> None:
        self.value = value
        self.kind = kind  # "input", "buffer", "parameter", "constant" or "intermediate"
        self.target = target
        self.grads = grads
        self.version = 0
        self.cut = False  # written under no_grad: its value has no way back to the parameter

    def outside(self) -> bool:
        """Whether a write to it must be seen outside the graph."""
        return self.version > 0 and self.kind != "intermediate"


@dataclasses.dataclass(frozen=True)
class View:
    """A view operation, as the old node that made it holds it."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    meta: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Returned:
    """A result that shares memory with an input or with state that was written to.

    Attributes:
        kind: "input", "buffer" or "parameter".
        target: the placeholder's name, or the state path.
        views: (operation, arguments after the tensor, keyword arguments, part) that make the
            result of it, in order; part picks one of several results.
    """

    kind: str
    target: str
    views: tuple[tuple[Any, tuple[Any, ...], dict[str, Any], int | None], ...] = ()

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The result, of the written tensor."""
        value: Any = tensor
        for op, args, kwargs, part in self.views:
            value = op(value, *args, **kwargs)
            value = value if part is None else value[part]
        return value


class Alias:
    """A tensor of the exported program, as a view of its parent (None for a root)."""

    def __init__(
        self, root: Root, parent: Alias | None, node: fx.Node | View, part: int | None
    ) -> None:
        self.root = root
        self.parent = parent
        self.node = node
        self.part = part
        self.cached: fx.Node | None = None
        self.version = -1


class Parts:
    """The results of a view with several results."""

    def __init__(self, parent: Alias, node: Any) -> None:
        self.parent = parent
        self.node = node
        self.cached: fx.Node | None = None
        self.version = -1


def fake_result(op: Any, args: Any, kwargs: Any) -> Any:
    """The value of an operation on the fake values of its argument nodes."""
    values, options = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
    mode = next((v.fake_mode for v in _tensors(values) if hasattr(v, "fake_mode")), None)
    if op is operator.getitem or mode is None:
        return op(*values, **options)
    with mode, torch.no_grad():
        return op(*values, **options)


def _tensors(values: Any) -> list[Any]:
    found: list[Any] = []
    for v in values:
        if isinstance(v, torch.Tensor):
            found.append(v)
        elif isinstance(v, (list, tuple)):
            found += _tensors(v)
    return found


def op_name(node: fx.Node | View) -> str:
    """An operator's name without namespace and overload: "slice" of `aten.slice.Tensor`."""
    target: Any = node.target
    return str(target._schema.name.partition("::")[2])


def functional_overload(target: Any, name: str) -> Any:
    """The out-of-place overload that goes with an in-place one, None where there is none."""
    base = _RENAMED.get(name, name.removesuffix("_"))
    namespace = getattr(torch.ops, target.namespace)
    packet = getattr(namespace, base, None)
    overload_name = _OVERLOADS.get((name, target._overloadname), target._overloadname)
    overload = getattr(packet, overload_name, None) if packet is not None else None
    return None if overload is None or overload._schema.is_mutable else overload


def without_out(target: Any) -> Any:
    """The overload that returns what an `out=` one writes, None where there is none."""
    wanted = [(a.name, str(a.type)) for a in target._schema.arguments if a.name != "out"]
    packet = target.overloadpacket
    for name in packet.overloads():
        overload = getattr(packet, name)
        found = [(a.name, str(a.type)) for a in overload._schema.arguments]
        if found == wanted and not overload._schema.is_mutable:
            return overload
    return None


def nodes_in(value: Any) -> list[fx.Node]:
    """Every node in nested arguments."""
    found: list[fx.Node] = []
    fx.map_arg(value, found.append)
    return found
