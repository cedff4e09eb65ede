"""Casts of a block's weights to low precision, done together."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable

import torch
from torch import fx, nn

from graphopt.graph import ops
from graphopt.graph.body import Body
from graphopt.graph.edit import Editor
from graphopt.graph.record import Refusal, site_of
from graphopt.passes.base import LOW, Log

aten = torch.ops.aten
CAST = torch.ops.graphopt.cast_weights.default


@dataclasses.dataclass(frozen=True)
class CastWeights:
    """The pass: one `graphopt.cast_weights` for each block of layers in place of a cast a weight.

    A block is a numbered module (`layers.3`) with all that is inside it; other weights go with
    those of their module. So a gradient is there as soon as its block's backward is done, which is
    early enough for what overlaps communication with it, and a copy lives no longer than its block
    needs it. A weight alone in its block is cast so as well: `hold_weights` keeps these copies.
    """

    @property
    def name(self) -> str:
        """Name in records."""
        return "cast_weights"

    def run(self, body: Body, log: Log) -> None:
        """Merge the casts of each block; a local rewrite each."""
        groups: dict[tuple[object, ...], list[fx.Node]] = {}
        for node in body.graph.nodes:
            sources = cast_sources(node)
            if sources is None:
                continue
            reasons = [why_not_packed(s, node, body) for s in sources]
            if all(reason is None for reason in reasons):
                groups.setdefault(_key(node, sources, body), []).append(node)
            for reason in filter(None, reasons):
                log.refuse(Refusal(self.name, reason, site_of(node), node.name, 1, 1))
        for casts in groups.values():
            if log.room and (len(casts) > 1 or casts[0].target is aten.to.dtype):
                _merge(casts, body, log, self.name)


def cast_sources(node: fx.Node) -> list[fx.Node] | None:
    """The state that a node is the low-precision copy of; several for a stack, None for others."""
    if node.op != "call_function":
        return None
    if node.target is aten.to.dtype:
        source = node.args[0]
        low = ops.argument(node, "dtype") in LOW
        return [source] if low and isinstance(source, fx.Node) and source.op == "get_attr" else None
    made = node.args[0] if node.target is operator.getitem else None
    if not isinstance(made, fx.Node) or made.target is not CAST:
        return None
    weights: list[fx.Node] = list(made.args[0])  # type: ignore[arg-type]
    stacks = list(ops.argument(made, "stacks")) or [1] * len(weights)
    index: int = node.args[1]  # type: ignore[assignment]
    first = sum(stacks[:index])
    return weights[first : first + stacks[index]]


def why_not_packed(source: fx.Node, cast: fx.Node, body: Body) -> str | None:
    """Why the copy of some state cannot lie in a buffer with others, None where it can.

    Empty where nobody needs to read it: the state is no parameter.

    Args:
        source: the node that reads the state.
        cast: the node that casts it.
        body: of both.
    """
    weight = body.attribute(str(source.target))
    if not isinstance(weight, nn.Parameter):
        return ""
    if type(weight) is not nn.Parameter:
        return f"{source.target} is a {type(weight).__name__}, which has a memory of its own"
    if weight.dtype != torch.float32:
        return f"{source.target} is {weight.dtype}, not float32"
    if weight.numel() == 0:
        return f"{source.target} has no elements (sharded?)"
    if not weight.is_contiguous():
        return f"{source.target} is not contiguous"
    if any(user.op == "output" for user in cast.users):
        return f"the copy of {source.target} is an output"
    return None


def _key(cast: fx.Node, sources: list[fx.Node], body: Body) -> tuple[object, ...]:
    """What the casts of one group have in common."""
    value = cast.meta["val"]
    no_grad = bool(cast.meta.get("graphopt_no_grad"))
    return block_of(str(sources[0].target)), value.dtype, value.device, no_grad


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


def emit_casts(
    stacks: list[list[fx.Node]], dtype: torch.dtype, before: fx.Node, like: fx.Node, editor: Editor
) -> tuple[fx.Node, list[fx.Node]]:
    """Insert one `cast_weights`: the node, and an item of it for each stack of weights."""
    sources = [s for stack in stacks for s in stack]
    for source in sources:
        editor.hoist(source, before)
    counts = [len(stack) for stack in stacks]
    sizes = (counts,) if max(counts) > 1 else ()
    made = editor.call(CAST, sources, dtype, *sizes, before=before, like=like)
    items = [
        editor.call(operator.getitem, made, i, before=before, like=like) for i in range(len(stacks))
    ]
    return made, items


def _merge(casts: list[fx.Node], body: Body, log: Log, name: str) -> None:
    first = casts[0]
    before = _maker(first)
    stacks = list(dict.fromkeys(tuple(cast_sources(c) or ()) for c in casts))
    stacks.sort(key=lambda stack: _place(stack[0], body))
    editor = Editor(body.graph, name)
    merged, items = emit_casts(
        [list(s) for s in stacks], first.meta["val"].dtype, before, first, editor
    )
    new = [items[stacks.index(tuple(cast_sources(c) or ()))] for c in casts]
    old = sorted(set(_distinct(n for c in casts for n in (c, _maker(c)))))
    sources = list(_distinct(s for stack in stacks for s in stack))
    created = [merged, *items]
    log.add_local(
        name, name, old, sources, casts, created, new, site=site_of(first), shown=[merged]
    )
    for cast, item in zip(casts, new, strict=True):
        editor.inherit(item, cast)
        editor.replace_uses(cast, item)
    editor.erase(old)


def _place(source: fx.Node, body: Body) -> int:
    """Where a weight begins in its storage.

    Copies lie in the order of the weights, since those of a recurrent layer are parts of one buffer
    in cuDNN's order: it reads copies that lie as the weights do, and gathers others at every call.
    """
    return int(body.attribute(str(source.target)).storage_offset())


def _maker(cast: fx.Node) -> fx.Node:
    """The node that makes a cast's value: itself, or the op that it is an item of."""
    made = cast.args[0] if cast.target is operator.getitem else cast
    assert isinstance(made, fx.Node)
    return made


def _distinct(nodes: Iterable[object]) -> Iterable[fx.Node]:
    return (n for n in dict.fromkeys(nodes) if isinstance(n, fx.Node))
