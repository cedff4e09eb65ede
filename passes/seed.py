"""Dropout with a seed in the graph: reproducible, recomputable, the same mask in backward."""

from __future__ import annotations

import dataclasses

import torch
from torch import fx

from graphopt.graph import ops
from graphopt.graph.body import Body, copy_graph
from graphopt.graph.edit import Editor
from graphopt.graph.record import site_of
from graphopt.passes.base import Log
from graphopt.passes.strides import settle

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class SeedDropout:
    """Turn every `aten.dropout` that drops into `graphopt.dropout` with one seed and its own site.

    The seed is one value a forward, drawn from torch's generator of the body's device, so
    `torch.manual_seed` and a restored generator state repeat it; sites keep the masks apart.
    """

    @property
    def name(self) -> str:
        """Name in records."""
        return "seed_dropout"

    def run(self, body: Body, log: Log) -> None:
        """Rewrite the dropouts; recorded as one global rewrite."""
        sites = dropouts(body.graph)
        if not sites or not log.room:
            return
        before = copy_graph(body.graph)
        seed_dropouts(body, self.name)
        log.add_global(self.name, before, body, [n.name for n in sites])


def dropouts(graph: fx.Graph) -> list[fx.Node]:
    """The dropouts of a graph that are on, in order; the position is the site."""
    return [
        n
        for n in graph.nodes
        if n.target is aten.dropout.default
        and ops.is_random(n)
        and n.meta["val"].dtype.is_floating_point
    ]


def seed_dropouts(body: Body, rule: str = "seed_dropout") -> int:
    """Make the dropouts of a body seeded, in place; returns how many.

    Used on a captured graph too, so that it and the optimized one can be run with equal masks.
    """
    nodes = dropouts(body.graph)
    if not nodes:
        return 0
    editor = Editor(body.graph, rule)
    seed = _seed_node(body, editor)
    for site, node in enumerate(nodes):
        x, p, _train = ops.arguments(node)
        new = editor.call(
            torch.ops.graphopt.dropout.default, x, p, seed, site, before=node, like=node
        )
        editor.replace_uses(node, new)
        settle(new, node, Editor(body.graph))  # it writes rows, eager keeps the layout
    editor.erase(nodes)
    return len(nodes)


def _seed_node(body: Body, editor: Editor) -> fx.Node:
    """The node that draws the forward's seed, made where there is none yet."""
    for node in body.graph.nodes:
        if ops.is_draw_seed(node):
            return node
    first = next(n for n in body.graph.nodes if n.op not in ("placeholder", "get_attr"))
    node = editor.call(torch.ops.graphopt.draw_seed.default, body.device, before=first, like=first)
    for key in ("nn_module_stack", "stack_trace", "graphopt_no_grad"):
        node.meta.pop(key, None)
    assert site_of(node).module == ""
    return node
