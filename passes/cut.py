"""In which precisions each value is made so that casts and copies move the fewest bytes: a cut.

A *value* is made by one op. Some values come in one precision, since their op computes (a matrix
product, a norm); some are only moved about (a transpose, a concatenation), and their op may run in
float32, in low precision, or in both. Readers want one precision or the other. Where a value is
wanted in a precision in which it is not made, it is cast, once.

Each value has one of the states WIDE, BOTH, LOW, an order in which "made low" and "not made wide"
only grow. So two bits a value say it all, every cost is a cost of two bits that differ in one given
direction, and the cheapest choice is a minimum cut.

Source: J.-C. Picard, "Maximal closure of a graph and applications to combinatorial problems",
Management Science 22 (1976), for choices that force others; H. Ishikawa, "Exact optimization for
Markov random fields with convex priors", PAMI 25 (2003), for ordered states as bits; L. R. Ford and
D. R. Fulkerson, "Maximal flow through a network" (1956), for the cut.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Sequence

import networkx as nx


class State(enum.Enum):
    """In which precision a value's op runs."""

    WIDE = "wide"
    BOTH = "both"
    LOW = "low"

    @property
    def low(self) -> bool:
        """Whether it is made in low precision."""
        return self is not State.WIDE

    @property
    def wide(self) -> bool:
        """Whether it is made in float32."""
        return self is not State.LOW


ANY = frozenset(State)
Bit = tuple[str, int]
_TRUE, _FALSE = ("true", -1), ("false", -1)


@dataclasses.dataclass(frozen=True)
class Value:
    """One value.

    Attributes:
        inputs: positions of the values that its op moves; empty where the op computes.
        states: those that are allowed; never empty, and with BOTH only beside both others.
        make_wide: bytes that its op moves when it runs in float32.
        make_low: the same in low precision.
        narrow: bytes of a cast from float32 to low precision.
        widen: bytes of a cast the other way; None where it would not give the same numbers.
        read_wide: whether something else reads it in float32.
        read_low: whether something else reads it in low precision.
    """

    inputs: tuple[int, ...] = ()
    states: frozenset[State] = ANY
    make_wide: int = 0
    make_low: int = 0
    narrow: int = 0
    widen: int | None = None
    read_wide: bool = False
    read_low: bool = False


def bytes_moved(values: Sequence[Value], states: Sequence[State]) -> int | None:
    """Bytes that a choice moves; None where it is not allowed.

    Args:
        values: each after its inputs.
        states: one for each value.
    """
    wants_wide = [v.read_wide for v in values]
    wants_low = [v.read_low for v in values]
    total = 0
    for value, state in zip(values, states, strict=True):
        if state not in value.states:
            return None
        total += value.make_wide * state.wide + value.make_low * state.low
        for i in value.inputs:
            wants_wide[i] |= state.wide
            wants_low[i] |= state.low
    for value, state, wide, low in zip(values, states, wants_wide, wants_low, strict=True):
        if low and not state.low:
            total += value.narrow
        if wide and not state.wide:
            if value.widen is None:
                return None
            total += value.widen
    return total


def cheapest(values: Sequence[Value]) -> list[State] | None:
    """The allowed choice that moves the fewest bytes; None where none is allowed.

    Among equal ones it takes one that narrows as early, and widens as late as can be (networkx
    gives the largest source side among minimum cuts).

    Args:
        values: each after its inputs.

    Example:
        >>> product = Value(states=frozenset({State.WIDE}), narrow=6, read_wide=False)
        >>> moved = Value((0,), make_wide=8, make_low=4, narrow=6, read_low=True)
        >>> [s.value for s in cheapest([product, moved])]
        ['wide', 'low']
    """
    cut = _Cut()
    for i, value in enumerate(values):
        _own_terms(cut, i, value)
        for source in value.inputs:
            cut.forces(("low", i), ("wants low", source))
            # What is made wide reads its inputs wide: with the bits turned round, since "not wide".
            cut.forces(("all low", source), ("not wide", i))
    return cut.solve(len(values))


def _own_terms(cut: _Cut, i: int, value: Value) -> None:
    """What a value costs by itself, and what its readers ask of it."""
    low, not_wide = ("low", i), ("not wide", i)
    cut.forces(not_wide, low)  # it is made at least once
    if State.BOTH not in value.states:
        cut.forces(low, not_wide)
    if State.WIDE not in value.states:
        cut.fix(low, True)
    if State.LOW not in value.states:
        cut.fix(not_wide, False)
    cut.costs_if(low, value.make_low)
    cut.costs_unless(not_wide, value.make_wide)
    cut.pays(("wants low", i), low, value.narrow)
    cut.pays(not_wide, ("all low", i), value.widen)
    if value.read_low:
        cut.fix(("wants low", i), True)
    if value.read_wide:
        cut.fix(("all low", i), False)


class _Cut:
    """Bits as nodes of a flow network: those that are true lie on the source's side."""

    def __init__(self) -> None:
        self.costs: dict[tuple[Bit, Bit], float] = {}

    def pays(self, a: Bit, b: Bit, cost: float | None) -> None:
        """A cost where `a` is true and `b` is not; None forbids it."""
        self.costs[a, b] = self.costs.get((a, b), 0) + (math.inf if cost is None else cost)

    def forces(self, a: Bit, b: Bit) -> None:
        """`b` is true where `a` is."""
        self.pays(a, b, None)

    def fix(self, bit: Bit, value: bool) -> None:
        """Decide a bit."""
        self.pays(*((_TRUE, bit) if value else (bit, _FALSE)), None)

    def costs_if(self, bit: Bit, cost: int) -> None:
        """A cost where a bit is true."""
        self.pays(bit, _FALSE, cost)

    def costs_unless(self, bit: Bit, cost: int) -> None:
        """A cost where a bit is false."""
        self.pays(_TRUE, bit, cost)

    def solve(self, count: int) -> list[State] | None:
        """The states of the values at the minimum cut with the most bits true."""
        flow = nx.DiGraph()
        flow.add_nodes_from((_TRUE, _FALSE))
        for (a, b), cost in self.costs.items():
            # networkx takes an edge without a capacity as infinite.
            flow.add_edge(a, b, **({} if math.isinf(cost) else {"capacity": int(cost)}))
        try:
            _, (_, false) = nx.minimum_cut(flow, _TRUE, _FALSE)
        except nx.NetworkXUnbounded:
            return None
        found = []
        for i in range(count):
            low, not_wide = ("low", i) not in false, ("not wide", i) not in false
            found.append(State.LOW if not_wide else State.BOTH if low else State.WIDE)
        return found
