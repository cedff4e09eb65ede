"""What every pass is made of: the protocol, the log that all write to, sizes compared safely."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import fx

from graphopt.cost.ops import nodes_cost
from graphopt.graph.body import Body, copy_graph
from graphopt.graph.ops import op_name
from graphopt.graph.record import Refusal, RewriteRecord, Site


@dataclasses.dataclass
class Log:
    """What the passes of one pipeline run did, and how much they still may do.

    Attributes:
        max_rewrites: stop after so many rewrites; None for no limit.
        rewrites: records in the order in which they were applied.
        refusals: near misses by (rule, node name); the furthest is kept.
    """

    max_rewrites: int | None = None
    rewrites: list[RewriteRecord] = dataclasses.field(default_factory=list)
    refusals: dict[tuple[str, str], Refusal] = dataclasses.field(default_factory=dict)

    @property
    def room(self) -> bool:
        """Whether another rewrite may be applied."""
        return self.max_rewrites is None or len(self.rewrites) < self.max_rewrites

    def refuse(self, refusal: Refusal) -> None:
        """Keep a near miss, unless a nearer one is known for the same rule and node."""
        key = (refusal.rule, refusal.node)
        known = self.refusals.get(key)
        if known is None or known.matched <= refusal.matched:
            self.refusals[key] = refusal

    def add_local(
        self,
        pass_name: str,
        rule: str,
        old: Sequence[fx.Node],
        inputs: Sequence[fx.Node],
        outputs: Sequence[fx.Node],
        created: Sequence[fx.Node],
        new: Sequence[fx.Node],
        *,
        site: Site,
        shown: Iterable[fx.Node] | None = None,
    ) -> None:
        """Record a rewrite of some nodes, with both subgraphs; old and new nodes are in the graph.

        Args:
            pass_name: the pass that does it.
            rule: the rule's name.
            old: the nodes that are replaced, in order.
            inputs: the values that they and the new nodes read, parameters included.
            outputs: those of the old nodes that others read.
            created: the new nodes, in order.
            new: those of them (or of the inputs) that take the place of `outputs`.
            site: where the replaced nodes came from.
            shown: the new nodes whose ops are named; by default all.
        """
        self.rewrites.append(
            RewriteRecord(
                ordinal=len(self.rewrites),
                pass_name=pass_name,
                rule=rule,
                kind="local",
                nodes=tuple(n.name for n in old),
                inputs=tuple(n.meta.get(COPY_OF, n.name) for n in inputs),
                outputs=tuple(n.name for n in outputs),
                new_outputs=tuple(n.name for n in new),
                site=site,
                ops_before=tuple(op_name(n.target) for n in old),
                ops_after=tuple(op_name(n.target) for n in (created if shown is None else shown)),
                bytes_before=nodes_cost(old).bytes,
                bytes_after=nodes_cost(created).bytes,
                reference=lift(old, inputs, outputs),
                replacement=lift(created, inputs, new),
            )
        )

    def add_global(self, name: str, before: fx.Graph, body: Body, dropped: Iterable[str]) -> None:
        """Record a rewrite of the whole graph."""
        inputs = tuple(n.name for n in before.nodes if n.op in ("placeholder", "get_attr"))
        self.rewrites.append(
            RewriteRecord(
                ordinal=len(self.rewrites),
                pass_name=name,
                rule=name,
                kind="global",
                nodes=tuple(dropped),
                inputs=inputs,
                outputs=("output",),
                new_outputs=("output",),
                site=Site(),
                ops_before=(),
                ops_after=(),
                bytes_before=nodes_cost(before.nodes).bytes,
                bytes_after=nodes_cost(body.graph.nodes).bytes,
                reference=before,
                replacement=copy_graph(body.graph),
            )
        )


COPY_OF = "graphopt_copy_of"
"""On a copy that no record tells of: the name of the value that it copies, for later records."""


def lift(
    nodes: Iterable[fx.Node], inputs: Iterable[fx.Node], outputs: Iterable[fx.Node]
) -> fx.Graph:
    """Some nodes as a graph of their own: placeholders for the inputs, a tuple of outputs."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        env[node] = graph.placeholder(node.name)
        env[node].meta = dict(node.meta)
    for node in nodes:
        env[node] = graph.node_copy(node, env.__getitem__)
    graph.output(tuple(env[n] for n in outputs))
    return graph


LOW = (torch.float16, torch.bfloat16)
"""The low precisions."""


class Pass(Protocol):
    """A pass: a frozen dataclass whose fields are its options; valid graph in, valid graph out."""

    @property
    def name(self) -> str:
        """Name in records, dumps and messages."""

    def run(self, body: Body, log: Log) -> None:
        """Rewrite the body's graph in place and record what was done."""


def same_shape(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two fake tensors surely have the same shape; adds no guard on symbolic sizes."""
    return len(a.shape) == len(b.shape) and all(
        surely(x == y) for x, y in zip(a.shape, b.shape, strict=True)
    )


def surely(condition: Any) -> bool:
    """Whether a condition on symbolic sizes holds for all sizes, as far as can be told."""
    if isinstance(condition, bool):
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return bool(statically_known_true(condition))


class Timer:
    """Wall-clock seconds of a block, for the pipeline's stages."""

    def __enter__(self) -> Timer:
        """Start."""
        self.start = time.perf_counter()
        return self

    def __exit__(self, *exc: object) -> None:
        """Stop."""
        self.seconds = time.perf_counter() - self.start
