"""The user's own choice of precision, by module path or by op: `precision_overrides=`."""

from __future__ import annotations

import dataclasses
import difflib
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
        """Write the marks and `Body.unmatched`; no node is changed, so nothing is recorded.

        A graph without an ambient low precision is left alone.
        """
        if not body.autocast:
            body.unmatched = dict.fromkeys(dict(self.overrides), NO_LOW)
            return
        met: set[str] = set()
        decides: set[str] = set()
        for node in _calls(body.graph):
            hits = [(pattern, dtype) for pattern, dtype in self.overrides if matches(pattern, node)]
            if not hits:
                continue
            node.meta[MARK] = hits[-1][1]
            if _computes(node):
                met.update(pattern for pattern, _ in hits)
                decides.add(hits[-1][0])
        body.unmatched = {
            p: OVERRULED if p in met else _why(p, body)
            for p, _ in self.overrides
            if p not in decides
        }


NO_LOW = "the graph has no low precision, neither from precision= nor from an autocast around it"
OVERRULED = "patterns behind it match all that it does, and the last that matches decides"


def _calls(graph: fx.Graph) -> list[fx.Node]:
    return [
        n
        for n in graph.nodes
        if n.op == "call_function" and getattr(n.target, "_schema", None) is not None
    ]


def _computes(node: fx.Node) -> bool:
    """Whether a precision means anything to a call: not to views and the user's own casts."""
    return not ops.is_view(node) and node.target._schema.name not in EXPLICIT  # type: ignore[union-attr]


def _why(pattern: str, body: Body) -> str:
    """Why a pattern matches nothing in a graph: what there is instead."""
    path, both, op = pattern.partition("::")
    computing = [n for n in _calls(body.graph) if _computes(n)]
    paths = [name for name, _ in body.root.named_modules()]
    if not both and not any(fnmatch.fnmatchcase(p, path) for p in paths):
        return f"no such op is there; those that are: {_listed(computing, pattern)}"
    inside = [n for n in computing if _is_path(path, n)]
    if inside:
        return f"no such op is inside {path!r}; those that are: {_listed(inside, op)}"
    owners = {site_of(user).module for n in body.graph.nodes if _reads(n, path) for user in n.users}
    owners -= {""}
    elsewhere = f", whose parameters are read in {', '.join(map(repr, sorted(owners)[:4]))}"
    return f"nothing is computed inside {path!r}" + (elsewhere if owners else "")


def _reads(node: fx.Node, pattern: str) -> bool:
    """Whether a node reads state of a module that a glob of paths names."""
    return node.op == "get_attr" and any(
        fnmatch.fnmatchcase(p, pattern) for p in _with_ancestors(str(node.target))
    )


def _listed(nodes: list[fx.Node], wanted: str) -> str:
    """The names of ops, the likeliest first."""
    names = sorted({op_names(n.target)[2] for n in nodes})
    near = difflib.get_close_matches(wanted.removeprefix("aten."), names, n=3)
    names = [*near, *(n for n in names if n not in near)]
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return (", ".join(names[:_LISTED]) or "none") + more


_LISTED = 12
"""How many names a message tells."""


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
