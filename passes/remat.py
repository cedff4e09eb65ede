"""Which values are dropped after their last use in forward and computed again in backward.

The pass only places markers; `graphopt.remat` is what they do.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from operator import getitem
from typing import Any

import torch
from torch import fx

from graphopt.errors import OptionError, PassError
from graphopt.graph.body import Body, copy_graph
from graphopt.graph.edit import PROVENANCE, REGION
from graphopt.graph.facts import nbytes
from graphopt.graph.recipes import sum_of
from graphopt.graph.record import site_of
from graphopt.passes.base import Log
from graphopt.passes.values import (
    Values,
    items_of,
    overwriter,
    reasons,
    saved_bytes,
    sources_of,
    value_of,
)
from graphopt.remat import drop, is_marker, is_release, release, spend

__all__ = [
    "RecomputeRegions",
    "Rematerialize",
    "Trip",
    "reasons",
    "region_values",
    "saved_bytes",
    "segment_values",
]


LEAVING = 2
"""How many values are on their way to host memory at a time where no plan says more."""


@dataclasses.dataclass(frozen=True)
class Trip:
    """When a value goes to host memory and comes back.

    Attributes:
        name: the value; of an op with several results the item.
        until: the node behind which the device lets go of it, its copy done; None for the end of
            forward.
        ahead: the dropped value whose turn in backward begins the copy back; None: none does, it
            comes when it is asked for.
    """

    name: str
    until: str | None
    ahead: str | None


@dataclasses.dataclass(frozen=True)
class Rematerialize:
    """The pass: a marker behind the last use of each value that is dropped.

    Where something is dropped, values that are kept are marked, too, if a gradient may be written
    over them (`graphopt.remat.spend`).

    Attributes:
        recompute: names of values to compute again in backward. Of those that autograd does not
            save, only what the others are computed from gets a marker. A norm that an op returns
            beside the sum under it may be named alone (`graphopt.graph.recipes.sum_of`).
        offload: names of values, or of items of them, to keep in host memory between forward and
            backward.
        trips: when those go and come, for each by name; where one is left out, its copy is waited
            for when `LEAVING` others were sent after it, and begins to come back in the turn of
            the one that was sent next.
    """

    recompute: frozenset[str]
    offload: frozenset[str] = frozenset()
    trips: tuple[Trip, ...] = ()

    @property
    def name(self) -> str:
        """Name in records."""
        return "rematerialize"

    def run(self, body: Body, log: Log) -> None:
        """Place the markers; recorded as one global rewrite.

        Raises:
            PassError: for a name that is no value, or one that may not be recomputed.
        """
        if not log.room or not (self.recompute or self.offload):
            return
        values = Values.of(body.graph)
        away = _away(self.offload, values)
        chosen = _chosen(self.recompute - self.offload, body)
        saved = saved_bytes(body)
        needed = _needed(chosen, away, values, saved)
        if not needed:
            return
        before = copy_graph(body.graph)
        markers = _place(needed, set(away), values)
        _spend([v for v in values if v.name in saved and v not in needed], set(away), values)
        _send(markers, {t.name: t for t in self.trips}, values.graph)
        log.add_global(self.name, before, body, ())


def _chosen(names: frozenset[str], body: Body) -> list[fx.Node]:
    known = {value.name: (value, reason) for value, reason in reasons(body).items()}
    known |= {n.name: (n, None) for n in body.graph.nodes if sum_of(n) is not None}
    chosen = []
    for name in sorted(names):
        value, reason = known.get(name, (None, "is no value of the graph"))
        if value is None or reason is not None:
            raise PassError(
                f"{name} cannot be recomputed",
                at=str(site_of(value)) if value is not None else None,
                why=f"{name} {reason}",
                try_="choose among the values for which passes.remat.reasons() gives None",
            )
        chosen.append(value)
    return chosen


def _away(names: frozenset[str], values: Values) -> list[fx.Node]:
    """The parts of the values that go to host memory."""
    if not names:
        return []
    known = {value.name: value for value in values if value.op == "call_function"}
    items = {p.name: p for value in known.values() for p in values.parts_of(value)}
    away: list[fx.Node] = []
    for name in sorted(names):
        value = known.get(name) or items.get(name)
        why = "is no value that the graph computes" if value is None else None
        parts = [] if value is None else values.parts_of(value)
        if value is not None and any(p in values.left for p in parts):
            why = "is a result of the graph"
        elif any(not isinstance(p.meta.get("val"), torch.Tensor) for p in parts):
            why = "is several tensors in one buffer"
        if why is not None:
            raise PassError(
                f"{name} cannot be kept in host memory",
                at=str(site_of(value)) if value is not None else None,
                why=f"{name} {why}",
                try_="choose among the values between forward's inputs and results",
            )
        away += parts
    return away


@dataclasses.dataclass(frozen=True)
class _Needs:
    """What the recipe of a value reads: dropped values, and nodes that its marker holds."""

    reads: list[fx.Node]
    held: list[fx.Node]


def _needed(
    chosen: list[fx.Node], away: list[fx.Node], values: Values, saved: dict[str, int]
) -> dict[fx.Node, _Needs]:
    """The chosen values that autograd saves and those that their recipes read, with their needs."""
    dropped = {*chosen, *away}
    needs: dict[fx.Node, _Needs] = {}
    waiting = [v for v in chosen if v.name in saved or sum_of(v) is not None]
    waiting += [p for p in away if value_of(p).name in saved]
    while waiting:
        value = waiting.pop()
        if value in away:
            needs[value] = _Needs([], [])
        elif value not in needs:
            needs[value] = _needs(value, dropped, values)
            waiting += needs[value].reads
    return dict(sorted(needs.items()))


def _needs(value: fx.Node, dropped: set[fx.Node], values: Values) -> _Needs:
    reads: dict[fx.Node, None] = {}
    held: dict[fx.Node, None] = {}
    waiting = sources_of(value)[::-1]
    while waiting:
        node = waiting.pop()
        part = values.parts[node]
        owner = value_of(part)
        source = part if part in dropped else owner
        if source not in dropped or part in values.left:
            held[node] = None
        elif node in (part, owner):
            reads[source] = None
        else:
            waiting += node.all_input_nodes[::-1]  # a view, to be taken again
    return _Needs(list(reads), list(held))


def _place(needed: dict[fx.Node, _Needs], away: set[fx.Node], values: Values) -> dict[str, fx.Node]:
    """Insert the markers; those of values in `away` send them to host memory, and are returned."""
    last = _last_uses(needed, values)
    sent: dict[str, fx.Node] = {}
    after: dict[fx.Node, fx.Node] = {}  # where the next marker behind a node goes
    for value, needs in needed.items():
        parts = [p for p in values.parts_of(value) if p not in values.left]
        parts = [p for p in parts if p is value or p not in away]  # those have their own markers
        held: list[fx.Node] = needs.held
        for part in sorted(parts, key=lambda p: last[p]):
            args = (_tensors(part), value.name, *([held] if held else []))
            kwargs: dict[str, Any] = {"output": part.args[1]} if part is not value else {}
            if part in away:
                kwargs["host"] = True
            if overwriter(part) is not None:
                kwargs["overwrite"] = True
            place = _behind_items(last[part])
            marker = _insert(drop, args, kwargs, place, after.get(place, place))
            after[place] = marker
            if part in away:
                sent[value.name] = marker
            held = []
    return sent


def _spend(kept: list[fx.Node], away: set[fx.Node], values: Values) -> None:
    """Mark the kept values over which a gradient may be written when they are asked for last."""
    for value in kept:
        for part in values.parts_of(value):
            reader = overwriter(part)
            if reader is not None and part not in values.left and part not in away:
                _insert(spend, (part,), {}, reader, _behind_items(reader))


def _insert(
    target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], like: fx.Node, after: fx.Node
) -> fx.Node:
    """A marker behind a node, from the same place of the model as another."""
    with after.graph.inserting_after(after):
        marker = after.graph.call_function(target, args, kwargs)
    marker.meta = {k: like.meta[k] for k in PROVENANCE if k in like.meta}
    marker.meta |= {"val": None, "graphopt_rule": "rematerialize"}
    return marker


def _send(markers: dict[str, fx.Node], trips: dict[str, Trip], graph: fx.Graph) -> None:
    """Say in the graph when what goes to host memory leaves the device, and when it comes back."""
    nodes = {n.name: n for n in graph.nodes}
    place = {n: i for i, n in enumerate(graph.nodes)}
    order = sorted(markers, key=lambda name: place[markers[name]])
    after: dict[fx.Node, fx.Node] = {}
    for i, name in enumerate(order):
        marker = markers[name]
        trip = trips.get(name)
        if trip is None:
            later = order[i + LEAVING] if i + LEAVING < len(order) else None
            ahead = order[i + 1] if i + 1 < len(order) else None
            until = None if later is None else markers[later]
        else:
            ahead, until = trip.ahead, nodes[trip.until] if trip.until is not None else None
        if ahead is not None:
            marker.kwargs = {**marker.kwargs, "ahead": ahead}
        if until is not None:
            behind = max(marker, _behind_markers(until), key=place.__getitem__)
            after[behind] = _insert(release, (name,), {}, behind, after.get(behind, behind))


def _behind_markers(node: fx.Node) -> fx.Node:
    """The last of a node's items and of the markers right behind it."""
    place = _behind_items(node)
    while is_marker(place.next) and not is_release(place.next):
        place = place.next
    return place


def _behind_items(node: fx.Node) -> fx.Node:
    """The last of the items that are taken right behind an op: those stay beside it."""
    place = node
    while place.next.target is getitem and place.next.args[0] is node:
        place = place.next
    return place


def _tensors(part: fx.Node) -> Any:
    """What a marker drops: a part, of a list all items where each of them is taken."""
    val = part.meta.get("val")
    if not isinstance(val, list):
        return part
    items = {u.args[1]: u for u in items_of(part)}
    return [items[i] for i in range(len(val))] if len(items) == len(val) else part


def _last_uses(needed: Iterable[fx.Node], values: Values) -> dict[fx.Node, fx.Node]:
    """For each part of some values the last node that reads it or a view of it."""
    wanted = set(needed)
    last: dict[fx.Node, fx.Node] = {}
    for node in values.graph.nodes:
        if node.op == "output":
            continue
        for source in (*node.all_input_nodes, node):
            part = values.parts[source]
            if value_of(part) in wanted or part in wanted:
                last[part] = node
    for value in wanted:  # behind all items, so that a tuple is still unpacked on one line
        items = items_of(value)
        for part in values.parts_of(value):
            last[part] = max([last[part], *items])
    return last


# ---------------------------------------------------------------- the user's own checkpoints


def region_values(body: Body) -> frozenset[str]:
    """The values to recompute so that the user's own checkpoints save what they saved in eager.

    Those made inside one `torch.utils.checkpoint` and read only there, as capture and the passes
    marked them; what comes out of a region is kept.
    """
    values = Values.of(body.graph)
    free = [v for v, reason in reasons(body).items() if reason is None and REGION in v.meta]
    return frozenset(v.name for v in free if _stays(v, values))


def _stays(value: fx.Node, values: Values) -> bool:
    """Whether everything that reads a value, or a view of it, lies in its region."""
    region = value.meta[REGION]
    aliases = [value]
    for node in aliases:
        for user in node.users:
            if is_marker(user):
                continue
            if user.meta.get(REGION) != region:
                return False
            if value_of(values.parts[user]) is value:
                aliases.append(user)
    return True


@dataclasses.dataclass(frozen=True)
class RecomputeRegions:
    """The pass: the user's own calls of `torch.utils.checkpoint`, by way of `Rematerialize`."""

    @property
    def name(self) -> str:
        """Name in records."""
        return "rematerialize"

    def run(self, body: Body, log: Log) -> None:
        """Place the markers; nothing where no gradient is recorded or nothing was checkpointed."""
        if body.grad and any(REGION in node.meta for node in body.graph.nodes):
            Rematerialize(region_values(body)).run(body, log)


# ------------------------------------------------------------------------------------- segments


def segment_values(body: Body, n: int) -> frozenset[str]:
    """The values to recompute so that only the borders of equal segments are kept.

    What `torch.utils.checkpoint.checkpoint_sequential` does: the graph is cut where few bytes
    live, so that autograd saves about as many bytes in each segment; what crosses a cut is kept,
    and so is the last segment, which backward wants at once.

    Args:
        body: the body.
        n: how many segments, at least 1 (which recomputes nothing).

    Returns:
        names for `Rematerialize`.

    Raises:
        OptionError: for a number of segments below 1.

    Example:
        >>> from graphopt import optimize
        >>> net = torch.nn.Sequential(*(torch.nn.Tanh() for _ in range(4)))
        >>> body = optimize(net, torch.ones(2, requires_grad=True)).body
        >>> sorted(segment_values(body, 2))
        ['tanh']
    """
    if n < 1:
        raise OptionError(f"segments={n}", try_="a number of segments from 1")
    values = Values.of(body.graph)
    place = {node: i for i, node in enumerate(body.graph.nodes)}
    free = {v for v, reason in reasons(body).items() if reason is None}
    spans = _spans(values, place)
    cuts = _cuts(body, spans, place, n)
    last = cuts[-1] if cuts else -1
    crossing = {v for v, (i, j) in spans.items() if any(i <= cut < j for cut in cuts)}
    inside = {v.name for v, (i, _) in spans.items() if i <= last and v in free - crossing}
    # of a norm that is returned beside the sum under it, the sum is enough
    norms = {n.name for n in body.graph.nodes if sum_of(n) is not None and n.args[0] in crossing}
    return frozenset(inside | norms)


def _spans(values: Values, place: dict[fx.Node, int]) -> dict[fx.Node, tuple[int, int]]:
    """For each value that is computed, where it is made and where it is read last."""
    spans = {v: (place[v], place[v]) for v in values if v.op == "call_function"}
    for node in values.graph.nodes:
        for source in node.all_input_nodes:
            value = value_of(values.parts[source])
            if value in spans:
                spans[value] = (spans[value][0], place[node])
    return spans


def _cuts(
    body: Body, spans: dict[fx.Node, tuple[int, int]], place: dict[fx.Node, int], n: int
) -> list[int]:
    """The nodes, by place, behind which the graph is cut: n - 1 of them, where so many fit."""
    live = [0] * (len(place) + 1)
    for value, (start, end) in spans.items():
        live[start] += nbytes(value.meta["val"])
        live[end] -= nbytes(value.meta["val"])
    live = list(itertools.accumulate(live))
    saved = saved_bytes(body)
    sizes = [saved.get(node.name, 0) for node in body.graph.nodes]
    before = list(itertools.accumulate(sizes))
    total, n = before[-1], min(n, len(sizes))  # no more cuts than nodes, whatever is asked for
    cuts: list[int] = []
    for k in range(1, n):
        middle, reach = total * k / n, total / (2 * n)
        near = [
            i
            for i, node in enumerate(body.graph.nodes)
            if node.op == "call_function"
            and abs(before[i] - middle) <= reach
            and i > (cuts[-1] if cuts else 0)
        ]
        if near:
            cuts.append(min(near, key=lambda i: (live[i], abs(before[i] - middle), i)))
    return cuts
