"""The parts of a graph in which casts may move, as values whose precisions can be chosen.

A part is what ops connect that only move elements about; see `graphopt.passes.casts`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import networkx as nx
import torch
from torch import fx, nn

from graphopt.graph import ops
from graphopt.graph.body import Body
from graphopt.graph.facts import nbytes
from graphopt.passes.base import LOW, surely
from graphopt.passes.cut import ANY, State, Value

aten = torch.ops.aten
graphopt = torch.ops.graphopt

WRITTEN = "materialize_autocast"
"""Rule name on the casts that autocast asked for."""

RELOCATES = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.flatten.using_ints,
    aten.unflatten.int,
    aten.transpose.int,
    aten.t.default,
    aten.numpy_T.default,
    aten.mT.default,
    aten.swapaxes.default,
    aten.swapdims.default,
    aten.permute.default,
    aten.movedim.int,
    aten.movedim.intlist,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.slice.Tensor,
    aten.select.int,
    aten.narrow.default,
    aten.contiguous.default,
    aten.clone.default,
    aten.cat.default,
    aten.stack.default,
    aten.flip.default,
    aten.roll.default,
    aten.pixel_shuffle.default,
    aten.pixel_unshuffle.default,
    aten.neg.default,
}
"""Ops that move elements, each to one place at most: gradients are moved back, not summed."""

FILLS = {
    aten.pad.default: "value",
    aten.constant_pad_nd.default: "value",
    aten.masked_fill.Scalar: "value",
    aten.where.ScalarOther: "other",
    aten.where.ScalarSelf: "self",
}
"""Ops that move elements and put one number between them -> the name of that argument."""

REPEATS = {aten.expand.default, aten.repeat.default, aten.index_select.default}
"""Ops that move elements to several places: their gradients are sums, so only without gradients."""

SELECTS = {aten.relu.default, aten.abs.default}
"""Ops that are the same in both precisions for values that low precision holds exactly."""

STORES = {
    graphopt.layer_norm.default,
    graphopt.rms_norm.default,
    graphopt.add_layer_norm.default,
    graphopt.add_rms_norm.default,
    graphopt.glu.default,
    graphopt.bias_act.default,
    graphopt.softcap.default,
    graphopt.dropout_add.default,
    graphopt.rope.default,
}
"""Fused ops whose first result a cast folds into (`graphopt.passes.fusion.cast`)."""


def is_written(node: fx.Node) -> bool:
    """Whether a node is a cast of autocast between float32 and low precision that may move."""
    if node.target is not aten.to.dtype or node.meta.get("graphopt_rule") != WRITTEN:
        return False
    if node.meta.get("graphopt_no_grad") or len(node.args) != 2 or node.kwargs:
        return False
    source = node.args[0]
    assert isinstance(source, fx.Node)
    pair = {source.meta["val"].dtype, node.meta["val"].dtype}
    return torch.float32 in pair and len(pair) == 2 and not pair.isdisjoint(LOW)


def low_of(cast: fx.Node) -> torch.dtype:
    """The low precision that a cast is from or to."""
    here: torch.dtype = cast.meta["val"].dtype
    source: torch.dtype = cast.all_input_nodes[0].meta["val"].dtype
    return here if here in LOW else source


def dtype_of(node: fx.Node) -> torch.dtype | None:
    """Dtype of a node's tensor; None for anything else."""
    val = node.meta.get("val")
    return val.dtype if isinstance(val, torch.Tensor) else None


def widens(node: fx.Node, low: torch.dtype) -> bool:
    """Whether a node is a cast from low precision to float32 that the user wrote."""
    if node.target is not aten.to.dtype or node.meta.get("graphopt_rule") == WRITTEN:
        return False
    plain = len(node.args) == 2 and not node.kwargs
    return plain and dtype_of(node) == torch.float32 and dtype_of(node.all_input_nodes[0]) == low


def _needing_grad(body: Body) -> set[fx.Node]:
    """Nodes through which a gradient may flow."""
    found: set[fx.Node] = set()
    if not body.grad:
        return found
    for node in body.graph.nodes:
        if node.op == "placeholder":
            val = node.meta.get("val")
            needs = isinstance(val, torch.Tensor) and val.is_floating_point()
        elif node.op == "get_attr":
            state = body.attribute(str(node.target))
            needs = isinstance(state, nn.Parameter) and state.requires_grad
        else:
            stopped = node.meta.get("graphopt_no_grad") or node.target is aten.detach.default
            needs = not stopped and any(n in found for n in node.all_input_nodes)
        if needs:
            found.add(node)
    return found


def parts(body: Body, low: torch.dtype) -> Iterator[Part]:
    """The parts of a graph that movable ops connect, each with a cast in it."""
    casts = {
        n: n.all_input_nodes[0]
        for n in body.graph.nodes
        if is_written(n) and low_of(n) == low and not is_written(n.all_input_nodes[0])
    }
    grads = _needing_grad(body)
    moving = {n for n in body.graph.nodes if _is_movable(n, low, casts, grads)}
    net = nx.Graph()
    net.add_nodes_from(casts.values())
    for node in moving:
        net.add_edges_from((node, casts.get(s, s)) for s in _moved_inputs(node, low))
    order = {n: i for i, n in enumerate(body.graph.nodes)}
    for group in nx.connected_components(net):
        if moving & group and not group.isdisjoint(casts.values()):
            nodes = sorted(group, key=order.__getitem__)
            yield Part(body, low, nodes, casts, moving & group, grads)


def _moved_inputs(node: fx.Node, low: torch.dtype) -> list[fx.Node]:
    """The operands whose elements an op moves."""
    return [n for n in node.all_input_nodes if dtype_of(n) in (torch.float32, low)]


def _is_movable(
    node: fx.Node, low: torch.dtype, casts: dict[fx.Node, fx.Node], grads: set[fx.Node]
) -> bool:
    """Whether an op may run in either precision."""
    if node.op != "call_function" or node in casts or node.meta.get("graphopt_no_grad"):
        return False
    if any(user.op == "output" for user in node.users):
        return False  # what leaves the graph keeps its memory, which others may share
    if widens(node, low):
        return True
    known = node.target in RELOCATES or node.target in SELECTS or _fills(node, low)
    if not known and (node.target not in REPEATS or node in grads):
        return False
    inputs = _moved_inputs(node, low)
    return bool(inputs) and {dtype_of(n) for n in inputs} == {dtype_of(node)}


def _fills(node: fx.Node, low: torch.dtype) -> bool:
    """Whether an op puts a number between elements that is the same in low precision."""
    target: Any = node.target
    name = FILLS.get(target)
    if name is None:
        return False
    if node.target is aten.pad.default and ops.argument(node, "mode") != "constant":
        return False
    value = ops.argument(node, name)
    if value is None:
        return True  # pad's zero
    return isinstance(value, (int, float)) and float(torch.tensor(value, dtype=low)) == value


class Part:
    """One part of the graph: its values, what reads them, and the choice of their precisions."""

    def __init__(
        self,
        body: Body,
        low: torch.dtype,
        nodes: list[fx.Node],
        casts: dict[fx.Node, fx.Node],
        moving: set[fx.Node],
        grads: set[fx.Node],
    ) -> None:
        self.body, self.low, self.nodes = body, low, nodes
        self.casts, self.moving, self.grads = casts, moving, grads
        self.place_of = {n: i for i, n in enumerate(nodes)}
        self.exact: set[fx.Node] = set()  # values that low precision holds without rounding
        for node in nodes:
            inputs = self.inputs(node)
            if node in moving and not widens(node, low):
                exact = all(s in self.exact for s in inputs)
            else:
                exact = dtype_of(node) == low or node in moving
            if exact:
                self.exact.add(node)

    def inputs(self, node: fx.Node) -> list[fx.Node]:
        """The values of this part that a movable op moves; none for other ops."""
        if node not in self.moving:
            return []
        return [self.casts.get(s, s) for s in _moved_inputs(node, self.low)]

    def readers(self, node: fx.Node) -> Iterator[tuple[fx.Node, torch.dtype]]:
        """What reads a value, and in which dtype; casts are looked through."""
        for user in node.users:
            if self.casts.get(user) is node:
                yield from ((u, user.meta["val"].dtype) for u in user.users)
            else:
                yield user, node.meta["val"].dtype

    # ------------------------------------------------------------------------------- the choice

    def now(self, node: fx.Node) -> State:
        """The state of a value in the graph as it is."""
        return State.LOW if dtype_of(node) == self.low else State.WIDE

    def wanted(self) -> dict[fx.Node, set[State]]:
        """The precisions in which a value may come to be read, by any way to a fixed reader."""
        found: dict[fx.Node, set[State]] = {}
        for node in reversed(self.nodes):
            found[node] = set()
            for reader, dtype in self.readers(node):
                found[node] |= self._wanted_by(reader, dtype, found)
        return found

    def _wanted_by(
        self, reader: fx.Node, dtype: torch.dtype, known: dict[fx.Node, set[State]]
    ) -> set[State]:
        if reader in self.moving:
            return known[reader]
        return {State.LOW if dtype == self.low else State.WIDE}

    def restrict(self, node: fx.Node, wanted: dict[fx.Node, set[State]]) -> frozenset[State]:
        """The states that a movable op may have, so that its gradients stay what they are.

        A value's gradients from float32 readers are summed in float32, those from low-precision
        readers in low precision. An op that changes sides must not add its own to a sum in lower
        precision, nor round what was rounded together with others.
        """
        if node.target in SELECTS and node not in self.exact:
            return frozenset({self.now(node)})
        states = ANY
        if widens(node, self.low):  # the user's: it does not move, but may turn out to be unread
            if wanted[node] != {State.LOW}:
                return frozenset({self.now(node)})
            states = frozenset({State.WIDE, State.LOW})
        for source in self.inputs(node):
            if source not in self.grads or node not in self.grads:
                continue
            exact = source in self.exact
            side = State.WIDE if exact else State.LOW
            others = (r for r in self.readers(source) if r[0] is not node)
            if any(side in self._wanted_by(*other, wanted) for other in others):
                return frozenset({self.now(node)})
            if exact:
                if len(wanted[node]) > 1:
                    return frozenset({self.now(node)})
                states = frozenset({State.WIDE, State.LOW})
        return states

    def values(self) -> list[Value]:
        """The values for `cheapest`, in the order of `nodes`."""
        wanted = self.wanted()
        return [self._value(node, wanted) for node in self.nodes]

    def _value(self, node: fx.Node, wanted: dict[fx.Node, set[State]]) -> Value:
        wide, low = self._bytes(node)
        cast = wide + low
        fixed = {
            State.LOW if dtype == self.low else State.WIDE
            for reader, dtype in self.readers(node)
            if reader not in self.moving
        }
        make_wide, make_low = 0, 0
        if node in self.moving:
            states = self.restrict(node, wanted)
            if _copies(node):
                make_wide, make_low = 2 * wide, 2 * low
        else:
            states = frozenset({self.now(node)})
            if self.now(node) is State.WIDE and _folds(node):
                states = frozenset({State.WIDE, State.LOW})
                make_wide, make_low = wide, low
        return Value(
            inputs=tuple(self.place_of[s] for s in self.inputs(node)),
            states=states,
            make_wide=make_wide,
            make_low=make_low,
            # Equal bytes: a weight itself is better cast than a view of it, with the other weights.
            narrow=cast - (node.op == "get_attr"),
            widen=cast if node in self.exact else None,
            read_wide=State.WIDE in fixed,
            read_low=State.LOW in fixed,
        )

    def _bytes(self, node: fx.Node) -> tuple[int, int]:
        val = node.meta["val"]
        count = nbytes(val) // val.element_size()
        return 4 * count, self.low.itemsize * count


def _copies(node: fx.Node) -> bool:
    """Whether an op that moves elements writes them anew."""
    if not ops.is_view(node):
        return True
    if node.target is aten.contiguous.default:
        return True  # one that does nothing is gone by now
    x, y = node.all_input_nodes[0].meta["val"], node.meta["val"]
    return ops.may_copy(node) and not _is_dense(x) and len(x.shape) != len(y.shape)


def _is_dense(x: torch.Tensor) -> bool:
    expected: Any = 1
    for size, stride in zip(reversed(x.shape), reversed(x.stride()), strict=True):
        if not surely(size == 1) and not surely(stride == expected):
            return False
        expected = expected * size
    return True


def _folds(node: fx.Node) -> bool:
    """Whether a cast of the value, when nothing else reads it, folds into the kernel's store."""
    if node.target is operator.getitem:
        pair = node.args[0]
        assert isinstance(pair, fx.Node)
        return bool(node.args[1] == 0) and pair.target in STORES
    return node.target in STORES
