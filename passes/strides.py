"""Memory layout: a replacement may lay its result out otherwise than what it replaced.

Inside the graph that is harmless, except for a view that needs the old layout; outside, a caller
may rely on the strides that eager gives, and on which results share memory. Metadata is brought up
to date behind a replacement, a value is copied into eager's layout where a view would fail, and
results leave in the layout, and share memory, as they were captured.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
from typing import Any

import torch
from torch import fx

from graphopt.graph import ops
from graphopt.graph.body import Body, copy_graph
from graphopt.graph.edit import Editor, fake_value
from graphopt.graph.facts import concrete, tensors_of
from graphopt.passes.base import COPY_OF, Log, surely

aten = torch.ops.aten
EAGER = "graphopt_eager_layout"
"""On a value that lies otherwise than in eager: a fake tensor that lies as eager's does."""


def same_strides(a: Any, b: Any) -> bool:
    """Whether two values surely lie in memory alike; sizes of 1 have no layout."""
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return all(map(same_strides, a, b))
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return True
    triples = zip(a.shape, a.stride(), b.stride(), strict=True)
    return all(surely(n == 1) or surely(s == t) for n, s, t in triples)


def settle(node: fx.Node, old: fx.Node, editor: Editor, *, made: bool = True) -> None:
    """Bring metadata up to date behind a node that took another's place.

    Args:
        node: the new node; the readers of the old one read it already.
        old: the one whose place it took.
        editor: of the graph.
        made: whether it was made for this place; one that stood before has a layout of its own.
    """
    if made and EAGER in old.meta:
        node.meta[EAGER] = old.meta[EAGER]
    if same_strides(node.meta["val"], old.meta["val"]):
        return
    if made:
        _remember(node, old.meta["val"])
    changed: dict[fx.Node, Any] = {node: old.meta["val"]}
    waiting = [(user._sort_key, user) for user in node.users]
    heapq.heapify(waiting)
    seen: set[fx.Node] = set()
    while waiting:
        _, user = heapq.heappop(waiting)
        if user in seen or user.op != "call_function":
            continue
        seen.add(user)
        before = user.meta["val"]
        try:
            user.meta["val"] = fake_value(user)
        except (RuntimeError, ValueError):
            for source in [n for n in user.all_input_nodes if n in changed]:
                _lay_out_for(user, source, changed[source], editor)
            user.meta["val"] = fake_value(user)
        if not same_strides(user.meta["val"], before):
            _remember(user, before)
            changed[user] = before
            for further in user.users:
                heapq.heappush(waiting, (further._sort_key, further))


def _remember(node: fx.Node, before: Any) -> None:
    """Note eager's layout on a node whose layout changed; nothing where it is eager's again."""
    eager = node.meta.pop(EAGER, before)
    if not same_strides(node.meta["val"], eager):
        node.meta[EAGER] = eager


def _lay_out_for(user: fx.Node, source: fx.Node, wanted: Any, editor: Editor) -> None:
    """Give a view that fails what it can view: its whole memory as in eager, or a copy for it."""
    root = laid_out_anew(source)
    if root is None or not restore(root, root.meta[EAGER], editor):
        editor.replace_use(user, source, lay_out(source, wanted, user, editor) or source)


def laid_out_anew(node: fx.Node) -> fx.Node | None:
    """The value whose layout is not eager's and whose memory a value may share; None for none."""
    found = None
    while True:
        if EAGER in node.meta and isinstance(node.meta["val"], torch.Tensor):
            found = node
        if not ops.is_view(node) or not node.all_input_nodes:
            return found
        node = node.all_input_nodes[0]


def restore(node: fx.Node, wanted: torch.Tensor, editor: Editor) -> bool:
    """Copy a value into a layout for all its readers, so that its views share memory as in eager.

    Args:
        node: the value.
        wanted: has the layout to give it.
        editor: of the graph.

    Returns:
        False where the layout is not dense, and nothing was done.
    """
    readers = list(node.users)
    copy = lay_out(node, wanted, min(readers), editor)
    if copy is None:
        return False
    for reader in readers:
        editor.replace_use(reader, node, copy)
    settle(copy, node, editor)
    return True


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


def memory_of(node: fx.Node) -> fx.Node:
    """The node at which the memory of a value was made, as its metadata tells.

    Unlike `Facts.roots`, which asks what may share memory, it tells a reshape that copies from one
    that is a view.
    """
    while ops.is_view(node) and node.all_input_nodes:
        source = node.all_input_nodes[0]
        if node.target is aten.dropout.default:  # off: itself in eager, a new fake tensor
            node = source
            continue
        theirs = {t.untyped_storage()._cdata for t in tensors_of(source.meta["val"])}
        if not any(t.untyped_storage()._cdata in theirs for t in tensors_of(fake_value(node))):
            break
        node = source
    return node


@dataclasses.dataclass(frozen=True)
class KeepOutputStrides:
    """Give the user's results the strides with which they were captured; share memory as they did.

    Attributes:
        captured: the graph as captured.
    """

    captured: fx.Graph

    @property
    def name(self) -> str:
        """Name in records."""
        return "output_strides"

    def run(self, body: Body, log: Log) -> None:
        """Copy the values that lie otherwise; recorded as one global rewrite.

        It runs whatever `max_rewrites` says: it only undoes what other passes changed.
        """
        eager = _results(self.captured.output_node(), body.user_outputs)
        memory = {i: memory_of(node) for i, node in eager.items()}
        if not _moved(body, eager, memory) and not _joined(body, memory):
            return
        before = copy_graph(body.graph)
        editor = Editor(body.graph, self.name)
        changed = _restore_all(body, eager, memory, editor)
        changed |= _part(body, eager, memory, editor)
        if changed:
            log.add_global(self.name, before, body, ())


Results = dict[int, fx.Node]
"""Results that are tensors by position; or the nodes at which their memory was made."""


def _results(output: fx.Node, count: int) -> Results:
    flat: list[Any] = list(output.args[0])[:count]  # type: ignore[arg-type]
    return {
        i: node
        for i, node in enumerate(flat)
        if isinstance(node, fx.Node) and isinstance(node.meta.get("val"), torch.Tensor)
    }


def _moved(body: Body, eager: Results, memory: Results) -> list[int]:
    """Results with other strides than in eager, or apart from one that shares its memory there."""
    values = _results(body.output, body.user_outputs)
    found = [
        i
        for i, node in values.items()
        if node.op == "call_function" and not same_strides(node.meta["val"], eager[i].meta["val"])
    ]
    ours = {i: memory_of(node) for i, node in values.items()}
    first: dict[fx.Node, int] = {}
    for i, made in memory.items():
        j = first.setdefault(made, i)
        if ours[i] is not ours[j]:
            found += [i, j]
    return found


def _joined(body: Body, memory: Results) -> list[int]:
    """Results that share memory with one that they do not share it with in eager."""
    values = _results(body.output, body.user_outputs)
    ours = {i: memory_of(node) for i, node in values.items()}
    return [
        i for i in values if any(ours[i] is ours[j] and memory[i] is not memory[j] for j in values)
    ]


def _restore_all(body: Body, eager: Results, memory: Results, editor: Editor) -> bool:
    """Restore the layout of what the moved results were made from; whether any was."""
    tried: set[fx.Node] = set()
    changed = False
    while True:
        values = _results(body.output, body.user_outputs)
        roots = {i: laid_out_anew(values[i]) or values[i] for i in _moved(body, eager, memory)}
        chosen = next((i for i, root in roots.items() if root not in tried), None)
        if chosen is None:
            return changed
        root = roots[chosen]
        tried.add(root)
        wanted = root.meta.get(EAGER, eager[chosen].meta["val"])
        if not same_strides(root.meta["val"], wanted):
            changed |= restore(root, wanted, editor)


def _part(body: Body, eager: Results, memory: Results, editor: Editor) -> bool:
    """Copy joined results until none is; whether any was copied."""
    sizes = collections.Counter(memory.values())
    changed = False
    while joined := _joined(body, memory):
        i = min(joined, key=lambda i: sizes[memory[i]])  # the others go on sharing theirs
        flat = list(body.output.args[0])  # type: ignore[arg-type]
        copy = lay_out(flat[i], eager[i].meta["val"], body.output, editor)
        if copy is None:
            break
        flat[i] = copy
        body.output.args = (tuple(flat),)
        changed = True
    return changed
