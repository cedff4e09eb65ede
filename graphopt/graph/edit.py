"""The one place through which a graph changes: new nodes, replaced uses, erased nodes."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode

from graphopt.errors import PassError
from graphopt.graph import ops
from graphopt.graph.facts import tensors_of
from graphopt.graph.record import site_of

PROVENANCE = ("nn_module_stack", "stack_trace", "source_fn_stack", "torch_fn")
REGION = "graphopt_checkpoint"
"""On a node that ran inside the user's own `torch.utils.checkpoint`: the number of that call."""
MARKS = (
    REGION,
    "graphopt_precision_fixed",
    "graphopt_autocast",
    "graphopt_precision",
    "graphopt_no_grad",
)


@dataclasses.dataclass
class Editor:
    """Changes one graph, keeping metadata, provenance and marks on every node it makes.

    Attributes:
        graph: the graph being changed.
        rule: name written on new nodes as `meta["graphopt_rule"]`.
    """

    graph: fx.Graph
    rule: str | None = None

    def call(
        self, target: Any, *args: Any, before: fx.Node, like: fx.Node, **kwargs: Any
    ) -> fx.Node:
        """Insert a call before a node, with `val` computed on fake tensors.

        Args:
            target: an op overload or a Python callable.
            args: nodes or constants.
            before: where to insert; every node among the arguments must stand before it.
            like: the node whose provenance and marks the new one carries.
            kwargs: keyword arguments of the op.

        Raises:
            PassError: when the op rejects these arguments.
        """
        with self.graph.inserting_before(before):
            node = self.graph.call_function(target, args, kwargs)
        try:
            node.meta["val"] = fake_value(node)
        except Exception as error:
            self.graph.erase_node(node)
            raise PassError(
                f"{ops.op_name(target)} does not take the arguments that {self.rule} gave it",
                at=str(site_of(like)),
                why=f"{type(error).__name__}: {error}",
                try_=f"switch the rule off with rules='default,-{self.rule}' and report it",
            ) from error
        self.inherit(node, like)
        return node

    def inherit(self, node: fx.Node, like: fx.Node) -> None:
        """Copy provenance and marks of `like` to `node`, and write the rule's name on it."""
        for key in (*PROVENANCE, *MARKS):
            if key in like.meta:
                node.meta[key] = like.meta[key]
        if self.rule is not None:
            node.meta["graphopt_rule"] = self.rule

    def get_attr(self, target: str, value: torch.Tensor, *, like: fx.Node) -> fx.Node:
        """A node that reads state or a constant, placed after the placeholders.

        Args:
            target: dotted path, see `Body.attribute`.
            value: fake (or real) tensor that stands for it in metadata.
            like: the node whose provenance it carries.
        """
        for node in self.graph.nodes:
            if node.op == "get_attr" and node.target == target:
                return node
        first = next(n for n in self.graph.nodes if n.op != "placeholder")
        with self.graph.inserting_before(first):
            node = self.graph.create_node("get_attr", target)
        node.meta["val"] = value
        self.inherit(node, like)
        return node

    def hoist(self, node: fx.Node, before: fx.Node) -> None:
        """Move a node that reads state up, to stand before another; nothing where it does."""
        if before < node:
            before.prepend(node)

    def replace_uses(self, old: fx.Node, new: fx.Node) -> None:
        """Make every user of `old` read `new`. `old` stays until it is erased."""
        old.replace_all_uses_with(new)

    def replace_use(self, user: fx.Node, old: fx.Node, new: fx.Node) -> None:
        """Make one user read `new` where it read `old`."""
        user.replace_input_with(old, new)

    def set_args(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Give a call other arguments and recompute its `val`."""
        node.args, node.kwargs = args, kwargs
        node.meta["val"] = fake_value(node)

    def erase(self, nodes: Iterable[fx.Node]) -> None:
        """Erase nodes that nothing uses any more, users before what they use.

        Raises:
            PassError: when one of them still has a user.
        """
        for node in sorted(set(nodes), reverse=True):
            if node.users:
                users = ", ".join(u.name for u in node.users)
                raise PassError(
                    f"{self.rule} would erase {node.name}, which {users} still reads",
                    at=str(site_of(node)),
                )
            self.graph.erase_node(node)

    def drop_dead(self) -> list[str]:
        """Erase every pure node without users; returns their names."""
        dropped = []
        for node in reversed(self.graph.nodes):
            if not node.users and ops.is_pure(node):
                dropped.append(node.name)
                self.graph.erase_node(node)
        return dropped


def fake_mode_of(values: Any) -> FakeTensorMode | None:
    """The fake mode of the first fake tensor among some values."""
    for t in tensors_of(values):
        mode = getattr(t, "fake_mode", None)
        if mode is not None:
            return mode
    return None


def fake_value(node: fx.Node, instead: Mapping[fx.Node, Any] = MappingProxyType({})) -> Any:
    """What a call returns on fake tensors, from its operands' `val`.

    Args:
        node: the call.
        instead: operands whose value is to be another than their `val`.
    """
    args, kwargs = fx.node.map_arg(
        (node.args, node.kwargs), lambda n: instead[n] if n in instead else n.meta["val"]
    )
    mode = fake_mode_of([n.meta.get("val") for n in node.all_input_nodes])
    if mode is None:
        mode = _mode_of_graph(node.graph)
    # Without the Python dispatcher, composites on symbolic sizes fail in some versions of torch.
    with torch.no_grad(), enable_python_dispatcher(), mode or contextlib.nullcontext():
        return node.target(*args, **kwargs)  # type: ignore[operator]


def _mode_of_graph(graph: fx.Graph) -> FakeTensorMode | None:
    for node in graph.nodes:
        mode = fake_mode_of([node.meta.get("val")])
        if mode is not None:
            return mode
    return None
