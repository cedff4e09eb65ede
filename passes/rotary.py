"""The attention whose queries and keys are turned by rope, found from its three projections."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import fx

from graphopt.graph import ops
from graphopt.graph.body import Body
from graphopt.graph.facts import Facts
from graphopt.passes.base import surely
from graphopt.passes.readers import LEAVES

aten = torch.ops.aten
graphopt = torch.ops.graphopt


@dataclasses.dataclass(frozen=True)
class Rotary:
    """The projections of one attention.

    Attributes:
        linears: of q, k and v (q and k as attention takes them).
        outputs: the turned q and k, and the linear of v.
        nodes: all that `linear_rope` does: the linears, and the views and ropes of q and k.
        cos: the table of both.
        sin: likewise.
        interleaved: of both ropes.
    """

    linears: tuple[fx.Node, fx.Node, fx.Node]
    outputs: list[fx.Node]
    nodes: list[fx.Node]
    cos: fx.Node
    sin: fx.Node
    interleaved: bool


def rotary_of(linears: list[fx.Node], body: Body) -> Rotary | str | None:
    """The three of some linears that are q, k and v of an attention with rope.

    Args:
        linears: calls that read one input, with results of [B, S, N].
        body: theirs.

    Returns:
        None where no two of them end in ropes; why not, where they do and it cannot be.
    """
    chains = {n: chain for n in linears if (chain := _to_rope(n))}
    if len(chains) != 2:
        return None
    ropes = {n: chain[-1] for n, chain in chains.items()}
    attention = _attention(next(iter(ropes.values())))
    if attention is None:
        return "what rope turns is not read by an attention alone"
    order = {n: _place(rope, attention) for n, rope in ropes.items()}
    if set(order.values()) != {0, 1}:
        return "rope does not turn the queries and keys of one attention"
    q, k = sorted(chains, key=lambda n: order[n] or 0)
    v = next((n for n in linears if n not in chains and _place(n, attention) == 2), None)
    if v is None:
        return "the values do not come from a linear of the same input"
    facts = Facts.of(body.graph)
    if any(facts.leaves(n) for n in (ropes[q], ropes[k], v)):
        return LEAVES
    nodes = [q, *chains[q], k, *chains[k], v]
    reason = _mismatch(q, k, ropes) or _fixed(ropes[q], nodes, body)
    if reason is not None:
        return reason
    _, cos, sin, interleaved, *_ = ops.arguments(ropes[q])
    return Rotary((q, k, v), [ropes[q], ropes[k], v], nodes, cos, sin, interleaved)


def _to_rope(linear: fx.Node) -> list[fx.Node]:
    """The view, the transpose and the rope behind a linear, each read by the next alone."""
    chain: list[fx.Node] = []
    node = linear
    for targets in (_VIEWS, _SWAPS, (graphopt.rope.default,)):
        user = next(iter(node.users), None)
        if len(node.users) != 1 or user is None or user.target not in targets:
            return []
        chain.append(user)
        node = user
    return chain if chain[-1].args[0] is chain[-2] else []


_VIEWS = (aten.view.default, aten.reshape.default, aten.unflatten.int)
_SWAPS = (aten.transpose.int, aten.permute.default)


def _attention(node: fx.Node) -> fx.Node | None:
    """The attention that alone reads a value, through views."""
    while True:
        user = next(iter(node.users), None)
        if len(node.users) != 1 or user is None:
            return None
        if user.target is _ATTENTION:
            return user
        if user.target not in (*_VIEWS, *_SWAPS):
            return None
        node = user


_ATTENTION = aten.scaled_dot_product_attention.default


def _place(node: fx.Node, attention: fx.Node) -> int | None:
    """Which operand of an attention a value is, through views that are read by nothing else."""
    while True:
        user = next(iter(node.users), None)
        if len(node.users) != 1 or user is None:
            return None
        if user is attention:
            operands = list(attention.args[:3])
            return operands.index(node) if operands.count(node) == 1 else None
        if user.target not in (*_VIEWS, *_SWAPS):
            return None
        node = user


def _mismatch(q: fx.Node, k: fx.Node, ropes: dict[fx.Node, fx.Node]) -> str | None:
    """Why q and k cannot be turned by one op, None where they can."""
    first, second = (ops.arguments(ropes[n]) for n in (q, k))
    if first[1:] != second[1:]:
        return "q and k are turned by other tables"
    for linear in (q, k):
        val, turned = linear.meta["val"], ropes[linear].meta["val"]
        given = ropes[linear].args[0].meta["val"]  # type: ignore[union-attr]
        if val.dim() != 3 or given.dim() != 4 or turned.dtype != val.dtype:
            return "rope gives another dtype than the linear, or is not of [B, H, S, D]"
        width = given.shape[-1]
        wanted = (val.shape[0], val.shape[2] // width, val.shape[1], width)
        steps = (val.stride(0), width, val.stride(1), 1)
        if not _equal(given.shape, wanted) or not _steps(given, steps):
            return "the heads of q and k do not lie side by side"
    for table in first[1:3]:
        val = table.meta["val"]
        if val.dim() > 2 and not surely(val.shape[-3] == 1):
            return "each head has a table of its own"
    return None


def _equal(a: Any, b: Any) -> bool:
    return len(a) == len(b) and all(surely(x == y) for x, y in zip(a, b, strict=True))


def _steps(val: torch.Tensor, steps: tuple[Any, ...]) -> bool:
    """Whether a tensor has these strides; those of a size of 1 do not matter."""
    triples = zip(val.shape, val.stride(), steps, strict=True)
    return all(surely(n == 1) or surely(a == b) for n, a, b in triples)


def _fixed(rope: fx.Node, nodes: list[fx.Node], body: Body) -> str | None:
    """Why the tables of a rope cannot be had before the projections, or may want a gradient."""
    seen: set[fx.Node] = set()
    waiting = [rope.args[1], rope.args[2]]
    while waiting:
        node = waiting.pop()
        if not isinstance(node, fx.Node) or node in seen:
            continue
        seen.add(node)
        if node in nodes or (node.op == "call_function" and not ops.is_pure(node)):
            return "the tables are made after the projections"
        learned = node.meta["val"] if node.op == "placeholder" else None
        learned = body.attribute(str(node.target)) if node.op == "get_attr" else learned
        if isinstance(learned, torch.Tensor) and learned.requires_grad:
            return "the tables may want a gradient"
        waiting += node.all_input_nodes
    return None
