"""Linear layers that read the same input become one matrix product over one stacked weight.

Queries, keys and values, or gate and up, read one activation. Their low-precision weights are made
anew at every forward anyway; laid one below the other they are one matrix, so that the forward is
one GEMM, the gradient of the input one GEMM in place of several and their additions, and the
gradient of the weights one GEMM whose rows are cut into the parameters' gradients as they are
widened. Parameters, state_dict and optimizers see nothing of it.

What comes out of the merged product are slices of its last dimension. Where several gradients have
to be put together again, that is a copy of 2 N elements a row for N columns, against the additions
of 3 K elements a row and layer that merging saves: past that it is refused. Two readers write their
gradients where they belong, so that no copy is needed: `glu_packed`, and `linear_rope`, which turns
q and k inside the product's own buffer.
"""

from __future__ import annotations

import collections
import dataclasses
import operator
from typing import Any

import torch
from torch import fx

from graphopt.graph import ops
from graphopt.graph.body import Body
from graphopt.graph.edit import MARKS, Editor
from graphopt.graph.facts import Facts
from graphopt.graph.record import Refusal, site_of
from graphopt.passes.base import LOW, Log
from graphopt.passes.readers import kept_by_readers
from graphopt.passes.rotary import Rotary, rotary_of
from graphopt.passes.strides import settle
from graphopt.passes.weights import block_of, emit_casts, why_not_packed

aten = torch.ops.aten
NAME = "merge_linear"


@dataclasses.dataclass(frozen=True)
class MergeLinear:
    """The pass: linears that read one input, with weights cast together, become one product.

    A local rewrite each. What stands in the way is recorded as a refusal, where two linears of a
    block read the same input.
    """

    @property
    def name(self) -> str:
        """Name in records."""
        return NAME

    def run(self, body: Body, log: Log) -> None:
        """Merge what can be merged."""
        siblings: dict[fx.Node, list[fx.Node]] = {}
        for node in body.graph.nodes:
            if node.op == "call_function" and node.target is aten.linear.default:
                siblings.setdefault(node.args[0], []).append(node)
        seen = collections.Counter(
            id(body.attribute(str(n.target))) for n in body.graph.nodes if n.op == "get_attr"
        )
        for linears in siblings.values():
            if len(linears) > 1 and log.room:
                _merge_siblings(linears, body, log, seen)


@dataclasses.dataclass(frozen=True)
class Member:
    """A linear that may be merged.

    Attributes:
        linear: the call.
        casts: of its weight, and of its bias where it has one.
        sources: the state that those read.
        key: what the members of one group have in common, each part with the word for it.
    """

    linear: fx.Node
    casts: tuple[fx.Node, ...]
    sources: tuple[fx.Node, ...]
    key: tuple[tuple[str, Any], ...]

    @property
    def width(self) -> int:
        """Columns of its result."""
        return int(self.casts[0].meta["val"].shape[0])

    @property
    def depth(self) -> int:
        """Columns of its input."""
        return int(self.casts[0].meta["val"].shape[1])


def _merge_siblings(
    linears: list[fx.Node], body: Body, log: Log, seen: collections.Counter[int]
) -> None:
    """Merge the linears that read one input, in groups that are alike.

    Args:
        linears: they read one input.
        body: theirs.
        log: of the passes.
        seen: how often the graph reads each tensor of state, by its id.
    """
    members: list[Member] = []
    wide: list[fx.Node] = []
    for linear in linears:
        found = _member(linear, body, seen)
        if isinstance(found, Member):
            members.append(found)
        elif found == FLOAT32:
            wide.append(linear)
        else:
            _refuse(log, linear, found, len(linears))
    if wide and len(wide) + len(members) > 1:
        _refuse(log, wide[0], FLOAT32, len(linears))
    groups: dict[tuple[tuple[str, Any], ...], list[Member]] = {}
    for member in members:
        groups.setdefault(member.key, []).append(member)
    for key, group in groups.items():
        if len(group) > 1:
            _merge_group(group, body, log)
            continue
        for other in groups:
            word = next((w for (w, a), (_, b) in zip(key, other, strict=True) if a != b), BLOCK)
            if word != BLOCK:
                _refuse(log, group[0].linear, f"it differs from another in {word}", len(linears))


BLOCK = "its block"
FLOAT32 = "its weight is not cast to low precision: stacking it would cost a copy at every call"


def _member(linear: fx.Node, body: Body, seen: collections.Counter[int]) -> Member | str:
    """The linear with what it reads, or why it cannot be merged."""
    operands = [a for a in ops.arguments(linear)[1:] if a is not None]
    casts: list[fx.Node] = []
    sources: list[fx.Node] = []
    for operand in operands:
        if not isinstance(operand, fx.Node) or operand.target is not aten.to.dtype:
            computed = isinstance(operand, fx.Node) and operand.op == "call_function"
            return "its weight is computed at every call (parametrized)" if computed else FLOAT32
        source = operand.args[0]
        if not isinstance(source, fx.Node) or source.op != "get_attr":
            return "its weight is computed at every call (parametrized)"
        if operand.meta["val"].dtype not in LOW:
            return FLOAT32
        reason = why_not_packed(source, operand, body)
        if reason is not None:
            return reason or f"{source.target} is no parameter"
        weight = body.attribute(str(source.target))
        if len(operand.users) > 1 or len(source.users) > 1 or seen[id(weight)] > 1:
            return f"{source.target} is used elsewhere, too (tied or shared)"
        if weight._backward_hooks or weight._post_accumulate_grad_hooks:
            return f"{source.target} has a hook"
        casts.append(operand)
        sources.append(source)
    if linear.meta["val"].dim() < 2 or casts[0].meta["val"].dim() != 2:
        return "it is a product with a vector"
    trained = [body.attribute(str(s.target)).requires_grad for s in sources]
    key = (
        (BLOCK, _owner(str(sources[0].target))),
        ("its dtype", casts[0].meta["val"].dtype),
        ("having a bias", len(casts) > 1),
        ("what is frozen", tuple(trained)),
        ("its region", tuple(str(linear.meta.get(m)) for m in MARKS)),
    )
    return Member(linear, tuple(casts), tuple(sources), key)


def _owner(path: str) -> str:
    """The block of a weight; outside all blocks, the module that holds its layer.

    Example:
        >>> _owner("layers.3.mlp.up.weight"), _owner("mlp.up.weight")
        ('layers.3', 'mlp')
    """
    block = block_of(path)
    numbered = any(part.isdigit() for part in block.split("."))
    return block if numbered else block.rpartition(".")[0]


def _merge_group(group: list[Member], body: Body, log: Log) -> None:
    """Merge linears that are alike: with rope or glu where those read them, else where it pays."""
    rotary = rotary_of([m.linear for m in group], body)
    if isinstance(rotary, Rotary) and log.room and _one_region(rotary.nodes):
        parts = [m for n in rotary.linears for m in group if m.linear is n]
        _with_rope(parts, rotary, body, log)
        group = [m for m in group if m not in parts]
    elif isinstance(rotary, str):
        _refuse(log, group[0].linear, rotary, len(group), matched=2)
    for glu in [u for m in group for u in m.linear.users if u.target is _GLU]:
        parts = [m for m in group if list(m.linear.users) == [glu]]
        if len(parts) == 2 and log.room and _one_region([parts[0].linear, glu]):
            _with_glu(parts, glu, body, log)
            group = [m for m in group if m not in parts]
    _merge_plain(group, body, log)


def _one_region(nodes: list[fx.Node]) -> bool:
    """Whether nodes stand under the same modes."""
    return all(len({str(n.meta.get(mark)) for n in nodes}) == 1 for mark in MARKS)


_GLU = torch.ops.graphopt.glu.default


def _merge_plain(group: list[Member], body: Body, log: Log) -> None:
    """Merge those whose readers take slices, as long as more is saved than moved."""
    facts = Facts.of(body.graph)
    width = sum(m.width for m in group)
    kept: dict[Member, bool] = {}
    for member in group if len(group) > 1 else ():
        found = kept_by_readers(member.linear, width, facts)
        if isinstance(found, str):
            _refuse(log, member.linear, found, len(group))
        else:
            kept[member] = found
    while len(kept) > 1:
        reason = _too_dear(kept) if body.grad else None
        if reason is None:
            if log.room:
                _split_up(list(kept), body, log)
            return
        widest = max(kept, key=lambda m: m.width)
        _refuse(log, widest.linear, reason, len(group))
        del kept[widest]


def _too_dear(kept: dict[Member, bool]) -> str | None:
    """Why merging would cost more than it saves in a training step, None where it pays."""
    if len(set(kept.values())) > 1:
        return "a part that backward does not need would be kept in memory by one that it needs"
    width = sum(m.width for m in kept)
    saved = 3 * next(iter(kept)).depth * (len(kept) - 1)
    if 2 * width <= saved:
        return None
    return (
        f"to put its gradients together moves {2 * width} elements a row; the additions that it"
        f" saves, {saved}"
    )


def _split_up(group: list[Member], body: Body, log: Log) -> None:
    """One product, its results split off the last dimension."""
    first = _first(group)
    editor = Editor(body.graph, NAME)
    created, operands = _stacked(group, first, editor)
    product = editor.call(aten.linear.default, first.args[0], *operands, before=first, like=first)
    widths = [m.width for m in group]
    split = editor.call(
        aten.split_with_sizes.default, product, widths, -1, before=first, like=first
    )
    parts = [
        editor.call(operator.getitem, split, i, before=first, like=m.linear)
        for i, m in enumerate(group)
    ]
    linears = [m.linear for m in group]
    _record(group, linears, linears, [*created, product, split, *parts], parts, body, log)


def _with_glu(group: list[Member], glu: fx.Node, body: Body, log: Log) -> None:
    """One product for gate and up, which the gated unit reads packed."""
    gate, _, activation, *_ = ops.arguments(glu)
    first = _first(group)
    editor = Editor(body.graph, NAME)
    created, operands = _stacked(group, first, editor)
    product = editor.call(aten.linear.default, first.args[0], *operands, before=first, like=first)
    new = editor.call(
        torch.ops.graphopt.glu_packed.default,
        product,
        activation,
        *([] if gate is group[0].linear else [False]),
        before=first,
        like=glu,
        **glu.kwargs,
    )
    linears = [m.linear for m in group]
    _record(group, [*linears, glu], [glu], [*created, product, new], [new], body, log)


def _with_rope(group: list[Member], rotary: Rotary, body: Body, log: Log) -> None:
    """One product that turns q and k where they lie."""
    first = _first(group)
    editor = Editor(body.graph, NAME)
    for table in (rotary.cos, rotary.sin):
        _raise(table, first, editor)
    created, operands = _stacked(group, first, editor)
    merged = editor.call(
        torch.ops.graphopt.linear_rope.default,
        first.args[0],
        operands[0],
        operands[1] if len(operands) > 1 else None,
        rotary.cos,
        rotary.sin,
        [m.width for m in group],
        *([True] if rotary.interleaved else []),
        before=first,
        like=first,
    )
    parts = [
        editor.call(operator.getitem, merged, i, before=first, like=o)
        for i, o in enumerate(rotary.outputs)
    ]
    _record(group, rotary.nodes, rotary.outputs, [*created, merged, *parts], parts, body, log)


def _first(group: list[Member]) -> fx.Node:
    """The first linear of a group, before which all is inserted."""
    return min(m.linear for m in group)


def _stacked(
    group: list[Member], before: fx.Node, editor: Editor
) -> tuple[list[fx.Node], list[fx.Node]]:
    """Insert the casts of a group: all new nodes, and the stacked weight (and bias)."""
    created: list[fx.Node] = []
    operands: list[fx.Node] = []
    for i, cast in enumerate(group[0].casts):
        stack = [m.sources[i] for m in group]
        made, (item,) = emit_casts([stack], cast.meta["val"].dtype, before, before, editor)
        created += [made, item]
        operands.append(item)
    return created, operands


def _raise(node: fx.Node, before: fx.Node, editor: Editor) -> None:
    """Move a pure value, with what it is made of, up before another node."""
    if node < before or node.op == "placeholder":
        return
    for source in node.all_input_nodes:
        _raise(source, before, editor)
    editor.hoist(node, before)


def _record(
    group: list[Member],
    nodes: list[fx.Node],
    outputs: list[fx.Node],
    created: list[fx.Node],
    new: list[fx.Node],
    body: Body,
    log: Log,
) -> None:
    """Write the record of one merge, then let the readers read the new values.

    Args:
        group: what was merged; their casts go as well.
        nodes: the other nodes that were replaced.
        outputs: those of them that are read by others.
        created: all new nodes, in order.
        new: those of them that take the place of `outputs`.
        body: of the graph.
        log: gets the record.
    """
    old = sorted({*(c for m in group for c in m.casts), *nodes})
    inside = set(old)
    inputs = sorted({s for n in (*old, *created) for s in n.all_input_nodes} - inside - {*created})
    shown = [n for n in created if n.target is not operator.getitem]
    site = site_of(outputs[0])
    log.add_local(NAME, NAME, old, inputs, outputs, created, new, site=site, shown=shown)
    editor = Editor(body.graph, NAME)
    for before, after in zip(outputs, new, strict=True):
        editor.replace_uses(before, after)
        settle(after, before, Editor(body.graph))
    editor.erase(old)


def _refuse(log: Log, node: fx.Node, reason: str, siblings: int, matched: int = 1) -> None:
    log.refuse(Refusal(NAME, reason, site_of(node), node.name, matched, siblings))
