"""Symbolic sizes: what must hold of a call's shapes for a graph with symbolic sizes to be right."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx


@dataclasses.dataclass(frozen=True)
class ShapeGuards:
    """Conditions on the sizes of the input leaves.

    Attributes:
        sizes: per leaf, per dimension: an int (must be equal) or a sympy expression.
        ranges: symbol -> (least, greatest) size, None where unbounded.
        conditions: sympy relations between symbols that the trace relied on.
    """

    sizes: tuple[tuple[Any, ...], ...]
    ranges: tuple[tuple[Any, int | None, int | None], ...]
    conditions: tuple[Any, ...]

    @classmethod
    def of(cls, graph: fx.Graph) -> ShapeGuards:
        """The conditions that a captured graph's placeholders and its shape environment hold."""
        sizes: list[tuple[Any, ...]] = []
        environment = None
        symbols: set[Any] = set()
        for node in graph.nodes:
            if node.op != "placeholder":
                continue
            dims: list[Any] = []
            for size in node.meta["val"].shape:
                if isinstance(size, torch.SymInt) and not size.node.expr.is_number:
                    environment = size.node.shape_env
                    dims.append(size.node.expr)
                    symbols |= size.node.expr.free_symbols
                else:
                    dims.append(int(size))
            sizes.append(tuple(dims))
        if environment is None:
            return cls(tuple(sizes), (), ())
        ranges = []
        for symbol in sorted(symbols, key=str):
            bounds = environment.var_to_range.get(symbol)
            if bounds is not None:
                ranges.append((symbol, _finite(bounds.lower), _finite(bounds.upper)))
        conditions = tuple({g.expr for g in environment.guards if g.expr.free_symbols})
        return cls(tuple(sizes), tuple(ranges), conditions)

    def symbolic(self) -> dict[int, set[int]]:
        """Leaf -> dimensions that are symbolic."""
        found: dict[int, set[int]] = {}
        for i, dims in enumerate(self.sizes):
            picked = {d for d, s in enumerate(dims) if not isinstance(s, int)}
            if picked:
                found[i] = picked
        return found

    def broken(self, shapes: Sequence[Sequence[int]]) -> str | None:
        """Why the graph may not serve these shapes, None when it may.

        Args:
            shapes: the shape of each input leaf, of the ranks seen at capture.
        """
        values: dict[Any, int] = {}
        derived = []
        for leaf, (dims, shape) in enumerate(zip(self.sizes, shapes, strict=True)):
            for d, (size, now) in enumerate(zip(dims, shape, strict=True)):
                if isinstance(size, int):
                    if size != now:
                        return f"input {leaf}, dimension {d}: {now}, captured for {size}"
                elif size.is_Symbol:
                    if values.setdefault(size, now) != now:
                        return f"input {leaf}, dimension {d}: {now}, expected {values[size]}"
                else:
                    derived.append((leaf, d, size, now))
        for symbol, low, high in self.ranges:
            size = values.get(symbol)
            if size is None:
                continue
            if (low is not None and size < low) or (high is not None and size > high):
                return f"a size of {size} is outside {low}..{high}"
        for leaf, d, expression, now in derived:
            if expression.subs(values) != now:
                return f"input {leaf}, dimension {d}: {now}, expected {expression}"
        for condition in self.conditions:
            if condition.free_symbols <= values.keys() and not condition.subs(values):
                return f"the sizes break {condition}"
        return None


def _finite(bound: Any) -> int | None:
    try:
        return int(bound)
    except (OverflowError, TypeError, ValueError, AttributeError):
        return None
