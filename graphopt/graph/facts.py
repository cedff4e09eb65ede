"""Facts about a graph that passes and planners read: users, aliases, sizes, cuts, dominators."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import networkx as nx
import torch
from torch import fx

from graphopt.graph import ops


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in a node's `val`: itself, or the items of a tuple or list."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_of(item)


def concrete(size: Any) -> int:
    """An integer for a possibly symbolic size: its hint where it has one, else 1.

    Only for estimates (bytes, FLOPs); nothing that decides correctness may ask this.
    """
    if isinstance(size, int):
        return size
    hint = getattr(getattr(size, "node", None), "hint", None)
    return int(hint) if hint is not None else 1


def nbytes(value: Any) -> int:
    """Bytes of the tensors in a node's `val`."""
    total = 0
    for t in tensors_of(value):
        count = t.element_size()
        for size in t.shape:
            count *= concrete(size)
        total += count
    return total


@dataclasses.dataclass(frozen=True)
class Facts:
    """What is known about one graph at one moment; made anew after the graph changes.

    Attributes:
        graph: the graph.
        roots: for each node, the node at which its storage was made (itself where it owns it).
        outputs: nodes whose values leave the graph.
        output_roots: roots of those; a storage that leaves may be written to by the user later.
    """

    graph: fx.Graph
    roots: dict[fx.Node, fx.Node]
    outputs: frozenset[fx.Node]
    output_roots: frozenset[fx.Node]

    @staticmethod
    def of(graph: fx.Graph) -> Facts:
        """Compute the facts of a graph, in time linear in its nodes."""
        roots: dict[fx.Node, fx.Node] = {}
        outputs: frozenset[fx.Node] = frozenset()
        for node in graph.nodes:
            if node.op == "output":
                outputs = frozenset(node.all_input_nodes)
            base = next(iter(node.all_input_nodes), None) if ops.is_view(node) else None
            roots[node] = roots[base] if base is not None else node
        return Facts(graph, roots, outputs, frozenset(roots[n] for n in outputs))

    def may_alias(self, a: fx.Node, b: fx.Node) -> bool:
        """Whether two values may share storage."""
        return self.roots[a] is self.roots[b]

    def leaves(self, node: fx.Node) -> bool:
        """Whether the node's storage is visible outside after the call."""
        return self.roots[node] in self.output_roots


def to_networkx(graph: fx.Graph) -> nx.DiGraph:
    """The graph as a networkx digraph: nodes by name with `bytes` and `op`, edges along values.

    Example:
        >>> g = fx.Graph(); x = g.placeholder("x"); _ = g.output((x,))
        >>> list(to_networkx(g).edges)
        [('x', 'output')]
    """
    view = nx.DiGraph()
    for node in graph.nodes:
        view.add_node(node.name, op=ops.op_name(node.target), bytes=nbytes(node.meta.get("val")))
        for source in node.all_input_nodes:
            view.add_edge(source.name, node.name)
    return view


def dominators(graph: fx.Graph) -> dict[str, str]:
    """Immediate dominator of each node by name, from a virtual entry before all inputs ("").

    Source: Cooper, Harvey, Kennedy, "A Simple, Fast Dominance Algorithm" (2001), in networkx.
    """
    view = to_networkx(graph)
    for name in [n for n in view if view.in_degree(n) == 0]:
        view.add_edge("", name)
    return {k: v for k, v in nx.immediate_dominators(view, "").items() if k != "" and v is not None}


def cuts(graph: fx.Graph) -> list[str]:
    """Names of nodes through which every path from an input to the output runs, in order.

    These are the places where a graph falls into a chain of blocks. State and constants count as
    part of the node that reads them, not as inputs.
    """
    view = to_networkx(graph)
    view.remove_nodes_from([n.name for n in graph.nodes if n.op == "get_attr"])
    inputs = [n.name for n in graph.nodes if n.op == "placeholder"]
    view.add_edges_from(("", name) for name in inputs)
    if "" not in view:
        return []
    idom = nx.immediate_dominators(view, "")
    chain: list[str] = []
    name = idom.get("output")
    while name and name != "":
        chain.append(name)
        name = idom[name]
    return chain[::-1]


def min_cut(graph: fx.Graph, sources: list[str], sinks: list[str]) -> tuple[int, set[str]]:
    """The cheapest set of values (by bytes) that separates `sources` from `sinks`.

    Each value is split into an in- and an out-node joined by an edge that costs its bytes, the
    usual reduction of a vertex cut to an edge cut.

    Returns:
        bytes of the cut, and the names of its values.
    """
    flow = nx.DiGraph()
    for node in graph.nodes:
        # The output is no value and cannot be cut: networkx reads a missing capacity as infinite.
        size = {} if node.op == "output" else {"capacity": nbytes(node.meta.get("val")) or 1}
        flow.add_edge((node.name, 0), (node.name, 1), **size)
        for source in node.all_input_nodes:
            flow.add_edge((source.name, 1), (node.name, 0))
    flow.add_edges_from(("source", (name, 0)) for name in sources)
    flow.add_edges_from(((name, 1), "sink") for name in sinks)
    cost, (left, _) = nx.minimum_cut(flow, "source", "sink")
    return int(cost), {n[0] for n in left if n[1] == 0 and (n[0], 1) not in left and n != "source"}
