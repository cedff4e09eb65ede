"""Memory layout: a replacement may lay its result out otherwise than what it replaced.

Inside the graph that is harmless, except for a view that needs the old layout; outside, a caller
may rely on the strides that eager gives. Metadata is brought up to date behind a replacement, a
copy is put in where a view would fail, and results leave in the layout in which they were captured.
"""

from __future__ import annotations

import dataclasses
import heapq
from typing import Any

import torch
from torch import fx

from graphopt.graph.body import Body, copy_graph
from graphopt.graph.edit import Editor, fake_value
from graphopt.graph.facts import concrete
from graphopt.passes.base import Log, surely

aten = torch.ops.aten
COPY_OF = "graphopt_copy_of"
"""On a copy that no record tells of: the name of the value that it copies, for later records."""


def same_strides(a: Any, b: Any) -> bool:
    """Whether two values surely lie in memory alike; sizes of 1 have no layout."""
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return all(map(same_strides, a, b))
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return True
    triples = zip(a.shape, a.stride(), b.stride(), strict=True)
    return all(surely(n == 1) or surely(s == t) for n, s, t in triples)


def settle(node: fx.Node, before: Any, editor: Editor) -> None:
    """Bring metadata up to date behind a node whose layout was changed.

    Args:
        node: the node that took another's place.
        before: the `val` of the one it replaced.
        editor: of the graph.
    """
    if same_strides(node.meta["val"], before):
        return
    changed: dict[fx.Node, Any] = {node: before}
    waiting = [(user._sort_key, user) for user in node.users]
    heapq.heapify(waiting)
    seen: set[fx.Node] = set()
    while waiting:
        _, user = heapq.heappop(waiting)
        if user in seen or user.op != "call_function":
            continue
        seen.add(user)
        old = user.meta["val"]
        try:
            user.meta["val"] = fake_value(user)
        except (RuntimeError, ValueError):
            for source in [n for n in user.all_input_nodes if n in changed]:
                laid_out = lay_out(source, changed[source], user, editor)
                editor.replace_use(user, source, laid_out or source)
            user.meta["val"] = fake_value(user)
        if not same_strides(user.meta["val"], old):
            changed[user] = old
            for further in user.users:
                heapq.heappush(waiting, (further._sort_key, further))


def lay_out(node: fx.Node, wanted: torch.Tensor, user: fx.Node, editor: Editor) -> fx.Node | None:
    """A copy of a value in the memory layout of another tensor; None where that is not dense.

    Args:
        node: the value.
        wanted: has its shape and the strides to give it.
        user: before which the copy is made.
        editor: of the graph.
    """
    order = sorted(range(wanted.dim()), key=lambda d: -concrete(wanted.stride(d)))
    expected: Any = 1
    for d in reversed(order):
        if not surely(wanted.shape[d] == 1):
            if not surely(wanted.stride(d) == expected):
                return None
            expected = expected * wanted.shape[d]
    inverse = [order.index(d) for d in range(len(order))]
    moved = editor.call(aten.permute.default, node, order, before=user, like=node)
    dense = editor.call(
        aten.clone.default,
        moved,
        before=user,
        like=node,
        memory_format=torch.contiguous_format,
    )
    copy = editor.call(aten.permute.default, dense, inverse, before=user, like=node)
    copy.meta[COPY_OF] = node.meta.get(COPY_OF, node.name)
    return copy


@dataclasses.dataclass(frozen=True)
class KeepOutputStrides:
    """Give every result of the user's the strides with which it was captured.

    Attributes:
        captured: the `val` of each output of the captured graph.
    """

    captured: tuple[Any, ...]

    @property
    def name(self) -> str:
        """Name in records."""
        return "output_strides"

    def run(self, body: Body, log: Log) -> None:
        """Copy the outputs that lie otherwise; recorded as one global rewrite.

        It runs whatever `max_rewrites` says: it only undoes what other passes changed.
        """
        output = body.output
        values: list[Any] = list(output.args[0])  # type: ignore[arg-type]
        moved = [
            i
            for i, node in enumerate(values[: body.user_outputs])
            if isinstance(node, fx.Node)
            and node.op == "call_function"
            and not same_strides(node.meta["val"], self.captured[i])
        ]
        if not moved:
            return
        before = copy_graph(body.graph)
        editor = Editor(body.graph, self.name)
        copies: dict[fx.Node, fx.Node] = {}  # a value that is returned twice stays one tensor
        for i in moved:
            node = values[i]
            if node not in copies and not same_strides(node.meta["val"], self.captured[i]):
                copies[node] = self._copied(node, self.captured[i], output, editor)
            values[i] = copies.get(node, node)
        output.args = (tuple(values),)
        log.add_global(self.name, before, body, ())

    @staticmethod
    def _copied(node: fx.Node, wanted: torch.Tensor, output: fx.Node, editor: Editor) -> fx.Node:
        """A copy that every reader is given, so that a view of it shares its memory as in eager."""
        readers = list(node.users)
        copy = lay_out(node, wanted, min(readers), editor)
        if copy is None:
            return node
        for reader in readers:
            if reader is not output:
                editor.replace_use(reader, node, copy)
        settle(copy, node.meta["val"], editor)
        return copy
