"""What the markers of dropped values say, and the recipes that are read off a graph for them."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.fx.node import map_aggregate

from graphopt.errors import PassError
from graphopt.graph import ops
from graphopt.graph.calls import Again, Call, Held, Recipe
from graphopt.offload import fetched
from graphopt.remat import is_marker, is_release, is_spend


def recipes(graph: fx.Graph, given: Mapping[str, Any] | None = None) -> dict[str, Recipe]:
    """The recipe of every value that a graph drops, by the value's name.

    Read off the graph at hand: what a copy of it changes (dtypes, dropout probabilities) the
    recipes follow.

    Args:
        graph: a graph with `drop` markers; without, there are no recipes.
        given: values, by node name, that its runner takes in place of running a node.

    Raises:
        PassError: when a recipe would need a value that its marker does not hold.

    Example:
        >>> from graphopt.remat import drop
        >>> g = fx.Graph(); x = g.placeholder("x"); y = g.call_function(torch.exp, (x,))
        >>> z = g.call_function(torch.sin, (y,)); _ = g.call_function(drop, (y, "y", [x]))
        >>> recipes(g)["y"].call.args
        (Held(index=0),)
    """
    names: dict[fx.Node, str] = {}
    held: dict[str, tuple[fx.Node, ...]] = {}
    away: set[str] = set()
    for node in graph.nodes:
        if is_marker(node) and not (is_release(node) or is_spend(node)):
            mark = marked(node)
            names[mark.op] = mark.name
            held[mark.name] = held.get(mark.name) or mark.held
            if node.kwargs.get("host"):
                away.add(mark.name)
    found = {}
    for node, name in names.items():
        if name in away:
            found[name] = Recipe(name, Call(fetched, (Held(0),)), ())
        elif given is not None and node.name in given:
            found[name] = Recipe(name, Call(_given, (given[node.name],)), ())
        else:
            found[name] = _Reader(names, held[name]).recipe(node, name)
    return found


class Mark(NamedTuple):
    """What a marker says.

    Attributes:
        op: the node that made the value.
        name: the name of its recipe.
        held: what is held to compute it again.
    """

    op: fx.Node
    name: str
    held: tuple[fx.Node, ...]


def marked(marker: fx.Node) -> Mark:
    """What a marker says."""
    value, name, *rest = marker.args
    part: Any = value[0] if isinstance(value, (list, tuple)) else value
    item = "output" in marker.kwargs or part is not value
    held: Any = rest[0] if rest else ()
    return Mark(part.args[0] if item else part, str(name), tuple(held))


def again(node: fx.Node) -> Call:
    """The call, over nodes, that gives a node's value again.

    The op itself; for a batch norm in training one that writes its running statistics, which
    forward has replaced meanwhile, nowhere.
    """
    if node.target is torch.ops.graphopt.batch_norm.default:
        x, weight, bias, mean, _var, momentum, eps = node.args
        dtype = mean.meta["val"].dtype  # type: ignore[union-attr]
        return Call(_batch_norm, (x, weight, bias, dtype, momentum, eps))
    total = sum_of(node)
    if total is not None:
        return _norm_of(node.args[0], total)  # type: ignore[arg-type]
    return Call(node.target, node.args, node.kwargs)


_NORMS = {"graphopt.add_rms_norm": "rms_norm", "graphopt.add_layer_norm": "layer_norm"}
"""Norms of a sum, which return the norm and the sum: the norm alone, of the sum."""


def sum_of(item: fx.Node) -> fx.Node | None:
    """For the norm that an op returns beside the sum under it, that sum; None for all else.

    The norm can be computed again from the sum alone, so it can be dropped where the sum is kept.
    What the op drops, it drops of a summand.
    """
    if item.target is not operator.getitem or item.args[1] != 0:
        return None
    op: Any = item.args[0]
    if ops.op_name(op.target) not in _NORMS:
        return None
    return next((u for u in op.users if u.target is operator.getitem and u.args[1] == 1), None)


def _norm_of(op: fx.Node, total: fx.Node) -> Call:
    names = ("weight", "bias", "eps", "weight_offset", "round_dtype", "out_dtype")
    known = [n for n, _ in ops.parameters(op.target) or ()]
    more = {n: ops.argument(op, n) for n in names if n in known}
    norm = getattr(torch.ops.graphopt, _NORMS[ops.op_name(op.target)]).default
    return Call(norm, (total,), more)


def _batch_norm(
    x: Any, weight: Any, bias: Any, dtype: torch.dtype, momentum: float, eps: float
) -> Any:
    # Statistics of any value, since training reads none; their dtype decides how y is rounded.
    # Wider where x is: the recipe runs in float64, too.
    mean, var = x.new_empty((2, x.shape[1]), dtype=torch.promote_types(dtype, x.dtype)).unbind()
    cudnn = torch.backends.cudnn.enabled
    args = (x, weight, bias, mean, var, True, momentum, eps, cudnn)
    return (torch.ops.aten.batch_norm.default(*args),)


def _given(value: Any) -> Any:
    return value


class _Reader:
    """Builds one recipe from a graph."""

    def __init__(self, names: Mapping[fx.Node, str], held: Sequence[fx.Node]) -> None:
        self._names = names
        self._held = {node: Held(i) for i, node in enumerate(held)}
        self._reads: dict[str, None] = {}
        self._calls: dict[fx.Node, Call] = {}

    def recipe(self, node: fx.Node, name: str) -> Recipe:
        call = again(node)
        args, kwargs = map_aggregate((call.args, dict(call.kwargs)), self._operand)
        return Recipe(name, Call(call.target, args, kwargs), tuple(self._reads))

    def _operand(self, value: Any) -> Any:
        if not isinstance(value, fx.Node):
            return value
        if value in self._held:
            return self._held[value]
        if value in self._names:
            self._reads[self._names[value]] = None
            return Again(self._names[value])
        if value.op != "call_function":
            raise PassError(
                f"a dropped value needs {value.name} to be computed again, and nothing holds it",
                why="its marker was made for another graph",
            )
        if value not in self._calls:
            args, kwargs = map_aggregate((value.args, dict(value.kwargs)), self._operand)
            self._calls[value] = Call(value.target, args, kwargs)
        return self._calls[value]
