"""The unit that passes work on: one captured forward as a pure function."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn

CONSTANTS = "_graphopt_constants"
"""Prefix of the `get_attr` targets of lifted constants, which never stand in a `state_dict`."""

HELD = "held_"
"""How the names of constants begin that are tensors of the user's own, in a list or a global: they
are read at each call, for he may write into them, and may require a gradient."""


@dataclasses.dataclass(frozen=True)
class Mutation:
    """One write that the epilogue does after the body, under `no_grad`.

    Attributes:
        output: position, in the body's flat output tuple, of the new value.
        kind: "buffer", "parameter" or "input".
        target: the state path ("bn.running_mean"), or the placeholder's name for an input.
    """

    output: int
    kind: str
    target: str


@dataclasses.dataclass
class Body:
    """A captured forward: functional ATen and graphopt ops, nothing read or written outside.

    Attributes:
        graph: placeholders (one per tensor or symbolic-integer input leaf), `get_attr` nodes for
            state and constants, `call_function` nodes, and one flat tuple as output.
        root: the module against which `get_attr` targets resolve; it shares the source's state.
        user_outputs: the first so many outputs are the user's; the rest are mutated values.
        mutations: what the epilogue writes back.
        constants: lifted constant tensors by the last part of their `get_attr` target; those whose
            names begin with `HELD` are the user's own.
        training: the training flag of the root at capture.
        grad: whether autograd was recording at capture.
        device: where the body computes; seeds are drawn from that device's generator.
        autocast: dtype of the ambient `torch.autocast` by device type, empty where there is none.
        result: makes what the user's forward returns of the first `user_outputs` outputs; None in a
            body that was not captured from a module.
        unmatched: patterns of `precision_overrides` that decide nothing in this graph, and why.
    """

    graph: fx.Graph
    root: nn.Module
    user_outputs: int
    mutations: tuple[Mutation, ...] = ()
    constants: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    training: bool = False
    grad: bool = True
    device: torch.device = dataclasses.field(default_factory=lambda: torch.device("cpu"))
    autocast: dict[str, torch.dtype] = dataclasses.field(default_factory=dict)
    result: Callable[[Sequence[Any]], Any] | None = None
    unmatched: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def output(self) -> fx.Node:
        """The graph's output node."""
        return next(iter(reversed(self.graph.nodes)))

    @property
    def placeholders(self) -> list[fx.Node]:
        """The input nodes, in calling order."""
        return [n for n in self.graph.nodes if n.op == "placeholder"]

    def attribute(self, target: str) -> Any:
        """The parameter, buffer or constant that a `get_attr` node reads.

        Args:
            target: a dotted path, as `node.target` holds it.

        Raises:
            AttributeError: when no such state exists on the root.
        """
        if target.startswith(CONSTANTS + "."):
            return self.constants[target.removeprefix(CONSTANTS + ".")]
        value: Any = self.root
        for part in target.split("."):
            value = getattr(value, part)
        return value

    def copy(self) -> Body:
        """The same body over copies of its graph and of its table of constants.

        Nodes are new; names, metadata and the constants themselves are shared.
        """
        constants = dict(self.constants)  # passes add to it
        return dataclasses.replace(self, graph=copy_graph(self.graph), constants=constants)


def is_fixed(node: fx.Node) -> bool:
    """Whether a node reads a constant that nobody can write into.

    Example:
        >>> g = fx.Graph()
        >>> [is_fixed(g.get_attr(f"{CONSTANTS}.{name}")) for name in ("c0", "held_table")]
        [True, False]
    """
    path, _, name = str(node.target).rpartition(".")
    return node.op == "get_attr" and path == CONSTANTS and not name.startswith(HELD)


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """A node-by-node copy of a graph, with the same names and metadata.

    Example:
        >>> g = fx.Graph(); x = g.placeholder("x"); _ = g.output((x,))
        >>> [n.name for n in copy_graph(g).nodes]
        ['x', 'output']
    """
    copy = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        env[node] = copy.node_copy(node, env.__getitem__)
    return copy
