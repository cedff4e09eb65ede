"""Casts that autocast asks for, placed so that they move the fewest bytes.

`materialize_autocast` writes each cast beside the op that needs it. A cast commutes with ops that
only move elements about, so it may stand elsewhere on such a path: before a copy, which then moves
half the bytes, behind a slice, which leaves less to cast, beside a kernel that takes it into its
store. Which values are made in which precision is a minimum cut (`graphopt.passes.cut`), solved for
each part of the graph that such ops connect.

What does not change:

- a cast that the user wrote to low precision is a rounding step of the model, and one that he wrote
  to float32 gives the same numbers wherever it stands: the former stays, the latter goes only where
  everything that reads it reads low precision again;
- forward values, to the bit: only ops that move elements (or, on values that are exact in low
  precision, relu) run in another precision;
- gradients: where several of them are summed, they are summed in no lower precision and rounded no
  more often than before (`Part.restrict`); only the order of a float32 sum may differ.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher

from graphopt.graph.body import Body, copy_graph
from graphopt.graph.edit import Editor
from graphopt.passes.base import Log, same_shape, surely
from graphopt.passes.casts_part import WRITTEN, Part, dtype_of, is_written, low_of, parts, widens
from graphopt.passes.cut import State, bytes_moved, cheapest

aten = torch.ops.aten

NAME = "place_casts"
"""Name of the pass, in records and for `rules="default,-place_casts"`."""


@dataclasses.dataclass(frozen=True)
class PlaceCasts:
    """The pass: moves the casts of autocast along views and copies to where they cost least."""

    @property
    def name(self) -> str:
        """Name in records."""
        return NAME

    def run(self, body: Body, log: Log) -> None:
        """Move the casts; recorded as one global rewrite where any moved."""
        if not log.room:
            return
        before = copy_graph(body.graph)
        names = {n.name for n in body.graph.nodes}
        casts = [n for n in body.graph.nodes if is_written(n)]
        moved = 0
        for dtype in dict.fromkeys(low_of(c) for c in casts):
            moved += sum(_place(part) for part in list(parts(body, dtype)))
        if moved:
            left = {n.name for n in body.graph.nodes}
            log.add_global(self.name, before, body, sorted(names - left))


def _place(part: Part) -> bool:
    """Choose, and change the graph where that saves bytes; whether it did."""
    values = part.values()
    states = cheapest(values)
    if states is None:
        return False
    now = bytes_moved(values, [part.now(n) for n in part.nodes])
    then = bytes_moved(values, states)
    if now is None or then is None or then >= now:
        return False
    chosen = dict(zip(part.nodes, states, strict=True))
    if not _Trial(part, chosen).keeps_layout():
        return False
    _Rewrite(part, chosen).run()
    return True


class _Trial:
    """Evaluates a choice on fake tensors, before the graph is touched."""

    def __init__(self, part: Part, chosen: dict[fx.Node, State]) -> None:
        self.part, self.chosen = part, chosen
        self.known: dict[tuple[fx.Node, torch.dtype], torch.Tensor] = {}

    def keeps_layout(self) -> bool:
        """Whether every reader outside gets tensors of the strides that it has now."""
        try:
            with torch.no_grad(), enable_python_dispatcher():
                return all(self._keeps(node) for node in self.part.nodes)
        except RuntimeError:  # a view that the new strides do not allow
            return False

    def _keeps(self, node: fx.Node) -> bool:
        part = self.part
        pairs = [(node, u) for u in node.users if part.casts.get(u) is not node]
        pairs += [(u, r) for u in node.users if part.casts.get(u) is node for r in u.users]
        for read, reader in pairs:
            if reader not in part.moving:
                old: torch.Tensor = read.meta["val"]
                new = self.value(node, old.dtype)
                if not same_shape(old, new) or not _same_strides(old, new):
                    return False
        return True

    def value(self, node: fx.Node, dtype: torch.dtype) -> torch.Tensor:
        """A value of the part in a dtype, as the choice makes it."""
        key = (node, dtype)
        if key not in self.known:
            made = self._made(node, dtype)
            if made is None:
                other = torch.float32 if dtype == self.part.low else self.part.low
                made = self.value(node, other).to(dtype)
            self.known[key] = made
        return self.known[key]

    def _made(self, node: fx.Node, dtype: torch.dtype) -> torch.Tensor | None:
        """The value as its op makes it; None where it is a cast."""
        part, state = self.part, self.chosen[node]
        if not (state.low if dtype == part.low else state.wide):
            return None
        val: torch.Tensor = node.meta["val"]
        if node not in part.moving:
            return val if val.dtype == dtype else val.to(dtype)
        if widens(node, part.low):
            return self.value(part.inputs(node)[0], part.low).to(dtype)

        def operand(source: fx.Node) -> Any:
            source = part.casts.get(source, source)
            return self.value(source, dtype) if source in part.place_of else source.meta["val"]

        args, kwargs = fx.node.map_arg((node.args, node.kwargs), operand)
        made: torch.Tensor = node.target(*args, **kwargs)  # type: ignore[operator]
        return made


def _same_strides(a: torch.Tensor, b: torch.Tensor) -> bool:
    pairs = zip(a.shape, a.stride(), b.stride(), strict=True)
    return all(surely(size == 1) or surely(x == y) for size, x, y in pairs)


class _Rewrite:
    """Writes a choice into the graph."""

    def __init__(self, part: Part, chosen: dict[fx.Node, State]) -> None:
        self.part, self.chosen = part, chosen
        self.editor = Editor(part.body.graph, NAME)
        self.made: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}

    def run(self) -> None:
        """Give every reader what it reads in its precision; erase what is left over."""
        part = self.part
        old_casts = [c for c, source in part.casts.items() if source in part.place_of]
        for node in list(part.body.graph.nodes):
            if node in old_casts or (node in part.moving and not self._stays(node)):
                continue
            for read in node.all_input_nodes:
                source = part.casts.get(read, read)
                if source in part.place_of and not (widens(node, part.low) and source is read):
                    new = self.value(source, read.meta["val"].dtype, node)
                    if new is not read:
                        self.editor.replace_use(node, read, new)
        for node in sorted({*old_casts, *part.moving}, reverse=True):
            if not node.users:
                self.editor.erase([node])

    def _stays(self, node: fx.Node) -> bool:
        """Whether a movable op still runs in the precision in which it runs now."""
        state = self.chosen[node]
        return state.low if self.part.now(node) is State.LOW else state.wide

    def value(self, node: fx.Node, dtype: torch.dtype, before: fx.Node) -> fx.Node:
        """The node that gives a value in a dtype; made before its first reader."""
        key = (node, dtype)
        if key not in self.made:
            self.made[key] = self._make(node, dtype, before)
        return self.made[key]

    def _make(self, node: fx.Node, dtype: torch.dtype, before: fx.Node) -> fx.Node:
        part, state = self.part, self.chosen[node]
        is_made = state.low if dtype == part.low else state.wide
        if node not in part.moving:  # a kernel's store takes the cast in, where it can
            is_made = dtype_of(node) == dtype
        if is_made and dtype_of(node) == dtype:
            return node
        if is_made and widens(node, part.low):
            return self.value(part.inputs(node)[0], dtype, before)
        if is_made:
            return self._again(node, dtype, before)
        other = torch.float32 if dtype == part.low else part.low
        source = self.value(node, other, before)
        like = node if node.op == "call_function" else before
        cast = self.editor.call(aten.to.dtype, source, dtype, before=before, like=like)
        cast.meta["graphopt_rule"] = WRITTEN
        return cast

    def _again(self, node: fx.Node, dtype: torch.dtype, before: fx.Node) -> fx.Node:
        """The same op on operands of the other precision."""

        def operand(read: fx.Node) -> fx.Node:
            source = self.part.casts.get(read, read)
            return self.value(source, dtype, before) if source in self.part.place_of else read

        args, kwargs = fx.node.map_arg((node.args, node.kwargs), operand)
        return self.editor.call(node.target, *args, before=before, like=node, **kwargs)
