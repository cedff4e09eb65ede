"""Dropped values: what is freed, held and computed how often."""

from __future__ import annotations

import gc

import torch
from remat_chains import Storages, chain, grads, x
from remat_models import (
    MODELS,
    case,
    dropping,
)
from torch import fx, nn

from graphopt import remat
from graphopt.emit import Program


def test_dropped_values_are_freed_in_forward() -> None:
    plain, opt = chain()
    values = x()
    alive = []
    for module in (plain, opt):
        module.capture((values,))
        with Storages() as storages:
            y = module(values)
            alive.append(storages.alive - 4)
        y.backward()
    size = values.nbytes
    assert alive[0] == 11 * size  # of each of the sines its argument, of the products the sine
    assert alive[1] == 0


def test_what_a_recipe_reads_is_held_and_no_more() -> None:
    plain, opt = chain(choose=lambda names: [n for n in names if n != "sin_2"])
    values = x()
    opt.capture((values,))
    with Storages() as storages:
        y = opt(values)
        assert storages.alive - 4 == values.nbytes
    y.backward()
    assert torch.equal(opt.w.grad, grads(plain, values)[0])


def test_a_value_is_computed_once_however_many_want_it() -> None:
    _, opt = chain(3)
    values = x()
    y = opt(values)
    with Storages() as storages:
        y.backward()
    assert storages.ops["sin"] == 2  # not the last
    assert storages.ops["cos"] == 3


def test_backward_frees_a_value_with_its_last_handle() -> None:
    _, opt = chain(8)
    values = x()
    opt.capture((values,))
    alive = []
    with Storages() as storages:
        y = opt(values)
        opt.w.register_hook(lambda g: alive.append(storages.alive))
        y.backward()
        assert storages.alive - 4 <= opt.w.nbytes


def test_every_model_frees_what_autograd_saved_of_its_dropped_values() -> None:
    from graphopt.passes.remat import saved_bytes

    for name in ("conv", "chunks"):
        found = case(name)
        saved = saved_bytes(found.body)
        for names in ([], found.names):
            program = found.program(names)
            with Storages() as storages:
                values = program(found.x)
                alive = storages.alive
            if not names:
                plain = alive
        # what is still there: results, what ops keep for themselves, what recipes read
        lost = sum(size for value, size in saved.items() if value in found.names)
        assert plain - alive >= 0.9 * lost, name
        del values


def test_forward_without_backward_leaves_nothing() -> None:
    opt, values = dropping(MODELS["mlp"][0]()), torch.ones(4, 6)
    opt(values)
    gc.collect()
    gc.disable()
    try:
        with Storages() as storages:
            for _ in range(100):
                opt(values)
            assert storages.alive == 0
    finally:
        gc.enable()


def test_handles_and_scopes_need_no_collector() -> None:
    _, opt = chain(3)
    values = x()[:4]
    opt(values)
    gc.collect()
    gc.disable()
    try:
        before = len(gc.get_objects())
        for _ in range(40):
            opt(values).backward()
            opt(values)
        assert len(gc.get_objects()) - before < 40
    finally:
        gc.enable()


def test_long_chains_need_no_deep_stack() -> None:
    graph = fx.Graph()
    value = graph.placeholder("x")
    first = value
    for i in range(3000):
        new = graph.call_function(torch.sin, (value,))
        if i:
            held = [[first]] if i == 1 else []
            graph.call_function(remat.drop, (value, value.name, *held))
        value = new
    graph.output((value,))
    from graphopt.graph import Body

    program = Program(Body(graph, nn.Module(), 1), "chain")
    inputs = torch.ones(2, requires_grad=True)
    program(inputs)[0].sum().backward()
    plain = torch.ones(2, requires_grad=True)
    y = plain
    for _ in range(3000):
        y = torch.sin(y)
    y.sum().backward()
    assert torch.equal(inputs.grad, plain.grad)
    del y
    program(inputs)
