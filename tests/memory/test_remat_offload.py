"""Values kept in host memory: equal to the bit, out of the device's memory, back in time."""

from __future__ import annotations

import functools
import gc

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from remat_models import case, same
from test_remat_runtime import Storages

from graphopt.emit import Program
from graphopt.errors import PassError
from graphopt.graph import lint
from graphopt.graph.recipes import sum_of
from graphopt.graph.text import python_code
from graphopt.offload import HostCopy
from graphopt.passes.base import Log
from graphopt.passes.remat import Rematerialize, Trip, saved_bytes
from graphopt.passes.values import Values
from graphopt.remat import drop


@functools.cache
def movable(found) -> list[str]:
    """Values that may go to host memory and that autograd saves."""
    names = saved_bytes(found.body)
    return [n for n in names if "cast_weights" not in n and _goes(found, n)]


def _goes(found, name: str) -> bool:
    values = Values.of(found.body.graph)
    node = next(v for v in values if v.name == name)
    return not any(part in values.left for part in values.parts_of(node))


@pytest.mark.parametrize("name", ["gpt", "conv", "chunks"])
def test_a_step_with_everything_away_is_equal_to_the_bit(name) -> None:
    found = case(name)
    names = movable(found)
    assert len(found.program([], names).recipes) >= len(names) > 2
    assert same(found.step([], names), found.plain)


@pytest.mark.parametrize(("name", "precision"), [("mlp", None), ("conv", None), ("gpt", "bf16")])
@hypothesis.settings(max_examples=3, deadline=None)
@hypothesis.given(data=st.data())
def test_some_recomputed_and_some_away(name, precision, data) -> None:
    found = case(name, precision)
    away = data.draw(st.sets(st.sampled_from(movable(found))))
    names = data.draw(st.sets(st.sampled_from(found.names)))
    assert same(found.step(names, away), found.plain)


@pytest.mark.parametrize("name", ["mlp", "gpt", "conv"])
@hypothesis.settings(max_examples=4, deadline=None)
@hypothesis.given(data=st.data())
def test_whenever_they_go_and_come(name, data) -> None:
    """Any place of the forward to let go at, any value's turn to come back in."""
    found = case(name)
    away = sorted(data.draw(st.sets(st.sampled_from(movable(found)), min_size=1)))
    names = data.draw(st.sets(st.sampled_from(found.names)))
    nodes = [n.name for n in found.body.graph.nodes if n.op == "call_function"]
    until, ahead = (st.none() | st.sampled_from(choice) for choice in (nodes, [*away, *names]))
    trips = tuple(Trip(n, data.draw(until), data.draw(ahead)) for n in away)
    body = found.body.copy()
    Rematerialize(frozenset(names), frozenset(away), trips).run(body, Log())
    lint.check(body, "rematerialize")
    program = Program(body, "test")
    torch.manual_seed(1)
    values = program(*found.inputs)
    roots = [y for y in values if y.requires_grad]
    sent = [torch.linspace(-1, 1, y.numel()).view(y.shape) for y in roots]
    wanted = [t for t in (*found.inputs, *found.model.parameters()) if t.requires_grad]
    grads = torch.autograd.grad(roots, wanted, sent, allow_unused=True)
    got = [*(v.detach() for v in values), *(g for g in grads if g is not None)]
    assert same(got, found.plain)


def test_an_item_may_go_alone() -> None:
    """The sum under a norm goes to host memory; the norm is computed again from it."""
    found = case("llama")
    body = found.body.copy()
    items = [n for n in body.graph.nodes if sum_of(n) is not None]
    sums = {sum_of(n).name for n in items}
    Rematerialize(frozenset(n.name for n in items), frozenset(sums)).run(body, Log())
    markers = {n.args[1]: n.kwargs.get("host") for n in body.graph.nodes if n.target is drop}
    assert all(markers[name] for name in sums)
    assert not any(markers[n.name] for n in items)
    norms, sums = (frozenset(n.name for n in items), frozenset(sums))
    assert same(found.step(norms, sums), found.plain)


def test_random_values_may_go() -> None:
    found = case("gpt")
    assert "draw_seed_default" in movable(found)


def test_the_device_is_free_of_them() -> None:
    found = case("gpt")
    names = movable(found)
    alive = []
    for away in ([], names):
        program = found.program([], away)
        with Storages() as storages:
            values = program(found.x)
            alive.append(storages.alive)
        del values
    lost = sum(saved_bytes(found.body)[n] for n in names)
    assert alive[0] - alive[1] >= 0.9 * lost


def test_nothing_outlives_the_graph() -> None:
    found = case("mlp")
    program = found.program([], movable(found))
    program(found.x)
    gc.collect()
    gc.disable()
    try:
        for _ in range(5):
            program(found.x)
        assert not any(type(o) is HostCopy for o in gc.get_objects())
    finally:
        gc.enable()


def test_backward_twice() -> None:
    found = case("mlp")
    y = found.program([], movable(found))(found.x)[0].sum()
    wanted = list(found.model.parameters())
    first = torch.autograd.grad(y, wanted, retain_graph=True)
    assert same(torch.autograd.grad(y, wanted), first)


def test_the_graph_says_so() -> None:
    found = case("conv")
    body = found.body.copy()
    Rematerialize(frozenset(), frozenset(movable(found))).run(body, Log())
    lint.check(body, "rematerialize")
    assert "host=True)  # kept in host memory" in python_code(body)


@pytest.mark.parametrize("name", ["input_1", "no_such", "linear_default_2"])
def test_what_cannot_go_is_refused(name) -> None:
    body = case("mlp").body.copy()
    with pytest.raises(PassError, match=f"{name} cannot be kept in host memory"):
        Rematerialize(frozenset(), frozenset({name})).run(body, Log())


def test_the_copies_of_weights_do_not_go() -> None:
    body = case("mlp", "bf16").body.copy()
    name = next(n.name for n in body.graph.nodes if "cast_weights" in n.name)
    with pytest.raises(PassError, match="several tensors in one buffer"):
        Rematerialize(frozenset(), frozenset({name})).run(body, Log())
