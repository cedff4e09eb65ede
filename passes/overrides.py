"""The user's own choice of precision, by module path or by op: `precision_overrides=`."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Iterator

import torch
from torch import fx

from graphopt.graph import ops
from graphopt.graph.body import Body
from graphopt.graph.record import site_of
from graphopt.passes.base import Log

MARK = "graphopt_precision"
"""Node metadata: the dtype that an override asks for."""

EXPLICIT = {"aten::to", "aten::_to_copy", "aten::type_as", "aten::detach", "aten::alias"}
"""Ops that are casts, or nothing: what the user wrote stays as it is."""


def widens(node: fx.Node) -> bool:
    """Whether an override has a call's low-precision operands widened to float32.

    Views and the user's own casts are left: they compute nothing.
    """
    return (
        node.meta.get(MARK) == torch.float32
        and not ops.is_view(node)
        and node.target._schema.name not in EXPLICIT  # type: ignore[union-attr]
    )


@dataclasses.dataclass(frozen=True)
class MarkOverrides:
    """Marks the nodes that an override names, for the pass that writes the casts.

    Attributes:
        overrides: (pattern, dtype) in the user's order; the last that matches a node decides.
    """

    overrides: tuple[tuple[str, torch.dtype], ...]

    @property
    def name(self) -> str:
        """Name in records."""
        return "precision_overrides"

    def run(self, body: Body, log: Log) -> None:
        """Write the marks; no node is changed, so nothing is recorded.

        A graph without an ambient low precision is left alone.
        """
        if not body.autocast:
            return
        for node in body.graph.nodes:
            if node.op != "call_function" or getattr(node.target, "_schema", None) is None:
                continue
            for pattern, dtype in self.overrides:
                if matches(pattern, node):
                    node.meta[MARK] = dtype


def matches(pattern: str, node: fx.Node) -> bool:
    """Whether an override's pattern names a node.

    Args:
        pattern: a glob over module paths, which takes in what is inside a module that it names
            ("encoder.*", "layers.0"); an op ("softmax", "aten.softmax"); or both, as
            "encoder.*::softmax".
        node: a call of an ATen op.
    """
    path, both, op = pattern.partition("::")
    if both:
        return _is_path(path, node) and _is_op(op, node)
    return _is_path(pattern, node) or _is_op(pattern, node)


def _is_op(pattern: str, node: fx.Node) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for name in op_names(node.target))


def _is_path(pattern: str, node: fx.Node) -> bool:
    return any(fnmatch.fnmatchcase(p, pattern) for p in _with_ancestors(site_of(node).module))


def op_names(target: object) -> tuple[str, ...]:
    """The names by which a user may call an op: "aten.softmax.int", "aten.softmax", "softmax".

    Example:
        >>> op_names(torch.ops.aten.softmax.int)
        ('aten.softmax.int', 'aten.softmax', 'softmax')
    """
    full = str(target)
    space, name, _ = (full + "..").split(".", 2)
    return full, f"{space}.{name}", name


def _with_ancestors(path: str) -> Iterator[str]:
    yield path
    while "." in path:
        path = path.rpartition(".")[0]
        yield path
