"""The cut finds the choice that moves the fewest bytes: compared with all choices."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from graphopt.passes.cut import ANY, State, Value, bytes_moved, cheapest

ONE_OF_TWO = frozenset({State.WIDE, State.LOW})
sizes = st.integers(0, 40)


@st.composite
def problems(draw: st.DrawFn) -> list[Value]:
    """Up to three computed values, then up to seven that move earlier ones."""
    values: list[Value] = []
    for _ in range(draw(st.integers(1, 3))):
        states = draw(st.sampled_from([*[frozenset({s}) for s in State], ONE_OF_TWO]))
        values.append(draw(value_of((), states)))
    for _ in range(draw(st.integers(0, 7))):
        inputs = draw(
            st.lists(st.integers(0, len(values) - 1), min_size=1, max_size=3, unique=True)
        )
        states = draw(st.sampled_from([ANY, ANY, ONE_OF_TWO, frozenset({State.WIDE})]))
        values.append(draw(value_of(tuple(inputs), states)))
    return values


def value_of(inputs: tuple[int, ...], states: frozenset[State]) -> st.SearchStrategy[Value]:
    return st.builds(
        Value,
        inputs=st.just(inputs),
        states=st.just(states),
        make_wide=sizes,
        make_low=sizes,
        narrow=sizes,
        widen=st.none() | sizes,
        read_wide=st.booleans(),
        read_low=st.booleans(),
    )


def every_choice(values: list[Value]) -> list[int]:
    """Bytes of all allowed choices."""
    choices = itertools.product(*(sorted(v.states, key=lambda s: s.value) for v in values))
    return [m for c in choices if (m := bytes_moved(values, c)) is not None]


@given(problems())
@settings(max_examples=80, deadline=None)
def test_no_choice_moves_less(values: list[Value]) -> None:
    found, possible = cheapest(values), every_choice(values)
    if found is None:
        assert possible == []
    else:
        assert bytes_moved(values, found) == min(possible)


WIDE_OP = Value(states=frozenset({State.WIDE}), narrow=60)
LOW_OP = Value(states=frozenset({State.LOW}), widen=60)


def test_a_copy_is_narrowed_before_it_is_made() -> None:
    copy = Value((0,), make_wide=80, make_low=40, narrow=60, read_low=True)
    assert cheapest([WIDE_OP, copy]) == [State.WIDE, State.LOW]


def test_a_part_is_narrowed_after_it_is_cut_out() -> None:
    part = Value((0,), narrow=6, read_low=True)
    assert cheapest([WIDE_OP, part]) == [State.WIDE, State.WIDE]


def test_equal_costs_narrow_early_and_widen_late() -> None:
    view = Value((0,), narrow=60, widen=60, read_low=True)
    assert cheapest([WIDE_OP, view]) == [State.WIDE, State.LOW]
    view = Value((0,), narrow=60, widen=60, read_wide=True)
    assert cheapest([LOW_OP, view]) == [State.LOW, State.LOW]


def test_what_is_rounded_is_never_widened_again() -> None:
    view = Value((0,), narrow=60, read_low=True, read_wide=True)
    assert cheapest([WIDE_OP, view]) in ([State.WIDE, s] for s in (State.WIDE, State.BOTH))


def test_no_choice() -> None:
    assert cheapest([Value(states=frozenset({State.LOW}), read_wide=True)]) is None
