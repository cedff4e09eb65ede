"""Casts of a block's weights to low precision, done together."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable

import torch
from torch import fx, nn

from graphopt.cost.ops import nodes_cost
from graphopt.graph import ops
from graphopt.graph.body import Body
from graphopt.graph.edit import Editor
from graphopt.graph.record import RewriteRecord, site_of
from graphopt.passes.apply import lift
from graphopt.passes.base import LOW, Log

LEAST = 2
"""How many weights a group has at least."""


@dataclasses.dataclass(frozen=True)
class CastWeights:
    """The pass: one `graphopt.cast_weights` for each block of layers in place of a cast a weight.

    A block is a numbered module (`layers.3`) with all that is inside it; other weights go with
    those of their module. So a gradient is there as soon as its block's backward is done, which is
    early enough for what overlaps communication with it, and a copy lives no longer than its block
    needs it.
    """

    @property
    def name(self) -> str:
        """Name in records."""
        return "cast_weights"

    def run(self, body: Body, log: Log) -> None:
        """Merge the casts of each block; a local rewrite each."""
        groups: dict[tuple[object, ...], list[fx.Node]] = {}
        for node in body.graph.nodes:
            key = _group_of(node, body)
            if key is not None:
                groups.setdefault(key, []).append(node)
        for casts in groups.values():
            if len(casts) >= LEAST and log.room:
                _merge(casts, body, log, self.name)


def _group_of(node: fx.Node, body: Body) -> tuple[object, ...] | None:
    """What the casts of one group have in common; None for a node that is no cast of a weight."""
    if node.op != "call_function" or node.target is not torch.ops.aten.to.dtype:
        return None
    source, to = node.args[0], ops.argument(node, "dtype")
    if not isinstance(source, fx.Node) or source.op != "get_attr" or to not in LOW:
        return None
    weight = body.attribute(str(source.target))
    if not isinstance(weight, nn.Parameter) or type(weight) is not nn.Parameter:
        return None
    plain = weight.dtype == torch.float32 and weight.is_contiguous() and weight.numel() > 0
    if not plain or any(user.op == "output" for user in node.users):
        return None
    no_grad = bool(node.meta.get("graphopt_no_grad"))
    return block_of(str(source.target)), to, weight.device, no_grad


def block_of(path: str) -> str:
    """The block that a state path belongs to: its first numbered module, else its own module.

    Example:
        >>> block_of("model.layers.3.mlp.up.weight"), block_of("lm_head.weight")
        ('model.layers.3', 'lm_head')
    """
    parts = path.split(".")
    for i, part in enumerate(parts[:-1]):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    return ".".join(parts[:-1])


def _merge(casts: list[fx.Node], body: Body, log: Log, name: str) -> None:
    first = casts[0]
    sources = list(_distinct(c.args[0] for c in casts))
    editor = Editor(body.graph, name)
    for source in sources:
        editor.hoist(source, first)
    merged = editor.call(
        torch.ops.graphopt.cast_weights.default,
        sources,
        first.args[1],
        before=first,
        like=first,
    )
    place = {source: i for i, source in enumerate(sources)}
    new = [
        editor.call(operator.getitem, merged, place[c.args[0]], before=first, like=c)  # type: ignore[index]
        for c in casts
    ]
    created = [merged, *new]
    log.rewrites.append(
        RewriteRecord(
            ordinal=len(log.rewrites),
            pass_name=name,
            rule=name,
            kind="local",
            nodes=tuple(c.name for c in casts),
            inputs=tuple(s.name for s in sources),
            outputs=tuple(c.name for c in casts),
            new_outputs=tuple(n.name for n in new),
            site=site_of(first),
            ops_before=tuple(ops.op_name(c.target) for c in casts),
            ops_after=(ops.op_name(merged.target),),
            bytes_before=nodes_cost(casts).bytes,
            bytes_after=nodes_cost(created).bytes,
            reference=lift(casts, sources, tuple(casts)),
            replacement=lift(created, sources, tuple(new)),
        )
    )
    for cast, item in zip(casts, new, strict=True):
        editor.replace_uses(cast, item)
    editor.erase(casts)


def _distinct(nodes: Iterable[object]) -> Iterable[fx.Node]:
    return (n for n in dict.fromkeys(nodes) if isinstance(n, fx.Node))
