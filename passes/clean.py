"""Cleaning: no-op nodes, constants, common subexpressions, dead code."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import fx

from graphopt.graph import ops
from graphopt.graph.body import CONSTANTS, Body, copy_graph, is_fixed
from graphopt.graph.edit import MARKS, REGION, Editor
from graphopt.graph.facts import Facts, nbytes
from graphopt.passes.base import Log, same_shape, surely

aten = torch.ops.aten

FOLD_LIMIT = 1 << 20
"""Bytes up to which a constant is stored instead of computed at each call."""


@dataclasses.dataclass(frozen=True)
class Clean:
    """Drop what computes nothing: no-op casts and views, repeated and dead nodes; fold constants.

    Attributes:
        fold: whether subgraphs of constants are computed once.
    """

    fold: bool = True

    @property
    def name(self) -> str:
        """Name in records."""
        return "clean"

    def run(self, body: Body, log: Log) -> None:
        """Clean the graph; recorded as one global rewrite when anything changed."""
        if not log.room:
            return
        before = copy_graph(body.graph)
        names = {n.name for n in body.graph.nodes}
        editor = Editor(body.graph, self.name)
        changed = drop_no_ops(body, editor)
        if self.fold:
            changed += fold_constants(body, editor)
        changed += merge_common(body, editor)
        changed += len(editor.drop_dead())
        if changed:
            left = {n.name for n in body.graph.nodes}
            log.add_global(self.name, before, body, sorted(names - left))


# ---------------------------------------------------------------------------------- no-op nodes


def _same_dtype_device(node: fx.Node, x: torch.Tensor) -> bool:
    value = node.meta["val"]
    return bool(
        value.dtype == x.dtype
        and value.device == x.device
        and not ops.argument(node, "copy")
        and ops.argument(node, "memory_format") in (None, torch.preserve_format)
    )


def _same_type(node: fx.Node, x: torch.Tensor) -> bool:
    return bool(node.meta["val"].dtype == x.dtype and node.meta["val"].device == x.device)


def _same_view(node: fx.Node, x: torch.Tensor) -> bool:
    return same_shape(node.meta["val"], x)


def _full_slice(node: fx.Node, x: torch.Tensor) -> bool:
    _, _, start, end, step = ops.arguments(node)
    return start in (None, 0) and step == 1 and end is not None and _same_view(node, x)


def _times_one(node: fx.Node, x: torch.Tensor) -> bool:
    other = node.args[1]
    one = isinstance(other, (int, float)) and not isinstance(other, bool) and other == 1
    return one and node.meta["val"].dtype == x.dtype


def _plus_zero(node: fx.Node, x: torch.Tensor) -> bool:
    """Only for integers: -0.0 + 0 is 0.0."""
    value = node.meta["val"]
    is_zero = isinstance(node.args[1], int) and node.args[1] == 0
    return is_zero and value.dtype == x.dtype and not x.dtype.is_floating_point


def _no_dropout(node: fx.Node, x: torch.Tensor) -> bool:
    _, p, train = ops.arguments(node)
    return not train or p == 0.0


def _is_contiguous(node: fx.Node, x: torch.Tensor) -> bool:
    if ops.argument(node, "memory_format") is not torch.contiguous_format:
        return False
    expected: Any = 1
    for size, stride in zip(reversed(x.shape), reversed(x.stride()), strict=True):
        if not surely(size == 1) and not surely(stride == expected):
            return False
        expected = expected * size
    return True


def _plain_clone(node: fx.Node, x: torch.Tensor) -> bool:
    return ops.argument(node, "memory_format") in (None, torch.preserve_format)


_NO_OPS: dict[Any, Callable[[fx.Node, torch.Tensor], bool]] = {
    aten.to.dtype: _same_dtype_device,
    aten.to.device: _same_dtype_device,
    aten.to.dtype_layout: _same_dtype_device,
    aten.type_as.default: _same_type,
    aten.contiguous.default: _is_contiguous,
    aten.dropout.default: _no_dropout,
    aten.feature_dropout.default: _no_dropout,
    aten.alpha_dropout.default: _no_dropout,
    aten.alias.default: _same_view,
    aten.lift_fresh_copy.default: _same_view,
    aten.view.default: _same_view,
    aten.reshape.default: _same_view,
    aten.expand.default: _same_view,
    aten.slice.Tensor: _full_slice,
    aten.mul.Tensor: _times_one,
    aten.div.Tensor: _times_one,
    aten.add.Tensor: _plus_zero,
    aten.sub.Tensor: _plus_zero,
    aten.clone.default: _plain_clone,
}
"""Op -> whether a call of it gives back its first operand, exactly."""

# In eager these return the very tensor that they got, so an output may become the operand too.
_RETURNS_ITSELF = {
    aten.to.dtype,
    aten.to.device,
    aten.to.dtype_layout,
    aten.type_as.default,
    aten.contiguous.default,
    aten.dropout.default,
}


def _is_given(node: fx.Node) -> bool:
    """Whether a value is, or is a view of, an input or state."""
    while node.op == "call_function" and ops.is_view(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node.op == "placeholder" or (node.op == "get_attr" and not is_fixed(node))


def drop_no_ops(body: Body, editor: Editor) -> int:
    """Replace each call that gives back its operand by the operand; returns how many.

    A new tensor that leaves the graph stays one (a clone or a view that is returned), so the
    caller never gets an input or another output where eager gives a tensor of its own.
    """
    facts = Facts.of(body.graph)
    count = 0
    for node in list(body.graph.nodes):
        test = _NO_OPS.get(node.target)
        x = node.args[0] if node.args else None
        if (
            test is None
            or not isinstance(x, fx.Node)
            or not isinstance(node.meta["val"], torch.Tensor)
        ):
            continue
        value = x.meta["val"]
        keeps = node in facts.outputs and node.target not in _RETURNS_ITSELF
        if node.target is aten.clone.default:
            # Without the clone, an output could share storage with an input or another output.
            keeps = facts.leaves(node) or facts.leaves(x)
            # It may stand there so that the original can be written before the backward is done.
            keeps = keeps or (body.grad and _is_given(x))
        if not keeps and isinstance(value, torch.Tensor) and test(node, value):
            editor.replace_uses(node, x)
            count += 1
    return count


# ------------------------------------------------------------------------------------- constants


def fold_constants(body: Body, editor: Editor) -> int:
    """Compute subgraphs that depend on nothing but constants; returns how many nodes went.

    State (parameters, buffers) is not constant, nor is a tensor of the user's own, wherever he
    keeps it; symbolic sizes are not, and a constant that leaves the graph stays computed, since the
    caller may write into what he gets.
    """
    facts = Facts.of(body.graph)
    depth: dict[fx.Node, int] = {}
    for node in body.graph.nodes:
        if is_fixed(node):
            depth[node] = 0
        elif _foldable(node) and all(n in depth for n in node.all_input_nodes):
            depth[node] = 1 + sum(depth[n] for n in node.all_input_nodes)
    count = 0
    values: dict[fx.Node, Any] = {}
    for node, below in list(depth.items()):
        edge = any(user not in depth for user in node.users)
        fits = isinstance(node.meta["val"], torch.Tensor) and nbytes(node.meta["val"]) <= FOLD_LIMIT
        if below < 2 or not edge or not fits or facts.leaves(node):
            continue
        name = f"c{len(body.constants)}"
        body.constants[name] = evaluate(node, body, values)
        new = editor.get_attr(f"{CONSTANTS}.{name}", node.meta["val"], like=node)
        editor.replace_uses(node, new)
        count += 1
    return count


def _foldable(node: fx.Node) -> bool:
    """A pure op on concrete sizes that gives a tensor."""
    if node.op != "call_function" or not ops.is_pure(node) or ops.is_symbolic(node):
        return False
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return False
    sizes = (*value.shape, *value.stride())
    return ops.parameters(node.target) is not None and all(isinstance(s, int) for s in sizes)


def evaluate(node: fx.Node, body: Body, values: dict[fx.Node, Any]) -> Any:
    """The real value of a node that depends on constants alone; `values` is a cache."""
    if node not in values:
        if node.op == "get_attr":
            values[node] = body.attribute(str(node.target))
        else:
            for source in node.all_input_nodes:
                evaluate(source, body, values)
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            with torch.no_grad():
                values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    return values[node]


# ------------------------------------------------------------------------ common subexpressions


def merge_common(body: Body, editor: Editor) -> int:
    """Let equal pure calls be computed once; returns how many were merged.

    Never across randomness, and never so that two outputs become one tensor.
    """
    facts = Facts.of(body.graph)
    first: dict[Hashable, fx.Node] = {}
    count = 0
    for node in list(body.graph.nodes):
        if node.op != "call_function" or not ops.is_pure(node):
            continue
        key = _key(node)
        known = first.setdefault(key, node)
        if known is node or (facts.leaves(known) and facts.leaves(node)):
            continue
        editor.replace_uses(node, known)
        if node.meta.get(REGION) != known.meta.get(REGION):
            known.meta.pop(REGION, None)  # it serves several regions, or none
        count += 1
    return count


def _key(node: fx.Node) -> Hashable:
    args = tuple(_frozen(a) for a in ops.arguments(node))
    return (node.target, args, tuple(str(node.meta.get(m)) for m in MARKS if m != REGION))


def _frozen(value: Any) -> Hashable:
    """A hashable stand-in that keeps 1, 1.0 and True apart."""
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(v) for v in value)
    if isinstance(value, fx.Node):
        return value
    return (type(value).__name__, repr(value))
