"""Tensors of an exported program as aliases: what each holds at the present point of a new graph.

Every tensor is a chain of view operations over a root. Reading one replays its chain from the
root's present value.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from graphopt.capture.aliases import Alias, Parts, Root, fake_result, refusal
from graphopt.capture.normalize import Flat

aten = torch.ops.aten


class Values:
    """The old graph's values in the new one, as they are at the node in hand."""

    def __init__(self, flat: Flat, written: set[int]) -> None:
        self.flat = flat
        self.written = written
        self.graph = fx.Graph()
        self.env: dict[fx.Node, Any] = {}
        self.roots: list[Root] = []
        # the old node in hand: metadata of new nodes comes from it
        self.at: fx.Node = next(iter(flat.graph.nodes))

    def _root(self, node: fx.Node, value: fx.Node, kind: str, target: str) -> None:
        root = Root(value, kind, target, node in self.flat.grads)
        self.roots.append(root)
        self.env[node] = Alias(root, None, node, None)

    def _read(self, value: Any, *, replay: bool = False) -> Any:
        """The new node that holds an old node's value at the present point."""
        if not isinstance(value, fx.Node):
            return value
        held = self.env[value]
        if isinstance(held, Alias):
            return self._current(held, replay)
        return self._current_parts(held) if isinstance(held, Parts) else held

    def _current(self, alias: Alias, replay: bool = False) -> fx.Node:
        at = self.at
        if alias.root.cut and at.op != "output" and not at.meta.get("graphopt_no_grad"):
            raise refusal(at, "reads a parameter after a write to it under no_grad")
        if alias.parent is None:
            return alias.root.value
        if (
            alias.cached is None
            or alias.version != alias.root.version
            or (replay and alias.version > 0)
        ):
            alias.cached = self._replay(alias)
            alias.version = alias.root.version
        return alias.cached

    def _replay(self, alias: Alias) -> fx.Node:
        node: Any = alias.node
        parent = alias.parent
        assert parent is not None
        if alias.part is not None:
            parts = self.env[node.args[0]]
            return self._emit(operator.getitem, self._current_parts(parts), alias.part, like=node)
        _, *rest = node.args
        args, kwargs = fx.map_arg((tuple(rest), node.kwargs), self._read)
        return self._emit_view(node, self._current(parent), args, kwargs)

    def _emit_view(self, node: fx.Node, base: fx.Node, args: Any, kwargs: Any) -> fx.Node:
        target: Any = node.target
        try:
            return self._emit(target, base, *args, like=node, **kwargs)
        except RuntimeError:  # a value that took the place of the base may be laid out otherwise
            if target is not aten.view.default:
                raise
            return self._emit(aten.reshape.default, base, *args, like=node, **kwargs)

    def _current_parts(self, parts: Parts) -> fx.Node:
        if parts.cached is None or parts.version != parts.parent.root.version:
            _, *rest = parts.node.args
            args, kwargs = fx.map_arg((tuple(rest), parts.node.kwargs), self._read)
            base = self._current(parts.parent)
            parts.cached = self._emit(parts.node.target, base, *args, like=parts.node, **kwargs)
            parts.version = parts.parent.root.version
        return parts.cached

    # ---- new nodes

    def _emit(self, op: Any, *args: Any, like: fx.Node, **kwargs: Any) -> fx.Node:
        """Add an operation, with its fake value and the marks of the node in hand."""
        value = fake_result(op, args, kwargs)
        new = self.graph.call_function(op, args, kwargs)
        source = like if self.at.op == "output" else self.at
        new.meta = {k: v for k, v in source.meta.items() if k not in ("val", "torch_fn")}
        new.meta["val"] = value
        return new
