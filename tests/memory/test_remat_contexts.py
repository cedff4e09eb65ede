"""Dropped values among hooks, checkpoints, threads, copies and sizes that vary."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch
from remat_chains import chain, grads, grads_of, x
from remat_models import (
    MODELS,
    case,
    dropping,
    everything,
    same,
    twins,
)
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from graphopt import remat


def test_an_exception_in_forward_leaves_no_hooks() -> None:
    class Failing(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function._opname == "sum":
                raise ValueError("no memory")
            return function(*args, **(kwargs or {}))

    plain, opt = chain()
    values = x()
    opt.capture((values,))
    with pytest.raises(ValueError, match="no memory"), Failing():
        opt(values)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert remat._LOCAL.scope is None
    assert same(grads(opt, values), grads(plain, values))


def test_an_exception_in_backward_can_be_tried_again() -> None:
    plain, opt = chain()
    values = x()
    y = opt(values)
    handle = opt.w.register_hook(lambda g: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        y.backward(retain_graph=True)
    handle.remove()
    opt.w.grad = None
    y.backward()
    assert torch.equal(opt.w.grad, grads(plain, values)[0])


def test_the_callers_hooks_have_every_tensor() -> None:
    plain, opt = chain()
    values = x()
    expected = grads(plain, values)
    counts = []
    for module in (plain, opt):
        packed: list[torch.Tensor] = []

        def pack(t, packed=packed):
            packed.append(t)
            return t.detach()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = module(values)
        counts.append(len(packed))
        assert same(torch.autograd.grad(y, [module.w]), expected)
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize(
    "around",
    [
        torch.autograd.graph.save_on_cpu,
        lambda: torch.autograd.graph.disable_saved_tensors_hooks("not here"),
        torch.autograd.graph.allow_mutation_on_saved_tensors,
    ],
)
def test_inside_other_contexts(around) -> None:
    plain, opt = chain()
    values = x()
    opt.capture((values,))
    with around():
        y = opt(values)
        found = torch.autograd.grad(y, [opt.w])
    assert same(found, grads(plain, values))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around(reentrant) -> None:
    found = []
    for opt in twins(MODELS["mlp"][0]):
        values = torch.linspace(-1, 1, 24).view(4, 6).requires_grad_()
        y = checkpoint(opt, values, use_reentrant=reentrant)
        y.sum().backward()
        found.append([values.grad, *(p.grad for p in opt.parameters())])
    assert same(*found)


def test_optimized_modules_one_after_another_and_inside() -> None:
    class Outer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner, self.last = inner, nn.Linear(3, 3)

        def forward(self, x):
            return self.last(torch.tanh(self.inner(x)))

    found = []
    for inner in twins(MODELS["mlp"][0]):
        torch.manual_seed(3)
        outer = Outer(inner)
        values = torch.linspace(-1, 1, 24).view(4, 6)
        for module in (outer, dropping(outer)):
            module.zero_grad()
            (module(values) + inner(values)).sum().backward()
            found.append([p.grad.clone() for p in outer.parameters()])
    assert all(same(found[0], other) for other in found[1:])


def test_threads() -> None:
    plain, opt = chain()
    inputs = [x() + i for i in range(4)]
    expected = [grads(plain, v) for v in inputs]
    grads(opt, inputs[0])
    found: list[list[torch.Tensor]] = [[] for _ in inputs]
    losses = [opt(v) for v in inputs]

    def work(i: int) -> None:
        for _ in range(5):
            found[i] = grads(opt, inputs[i])
        # and one whose forward ran on the other thread
        assert same(torch.autograd.grad(losses[i], [opt.w]), expected[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(inputs))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert all(same(a, b) for a, b in zip(found, expected, strict=True))


def test_two_threads_on_one_graph() -> None:
    plain, opt = chain(20)
    values = x()
    expected = grads(plain, values)
    y = opt(values)
    found: list[bool] = []

    def work() -> None:
        for _ in range(10):
            grad = torch.autograd.grad(y, [opt.w], retain_graph=True)
            found.append(same(grad, expected))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert found == [True] * 30


def test_a_copy_and_a_pickle_drop_too() -> None:
    opt = dropping(MODELS["mlp"][0]())
    values = torch.linspace(-1, 1, 24).view(4, 6)
    expected = grads_of(opt, values)
    for other in (copy.deepcopy(opt), pickle.loads(pickle.dumps(opt))):
        assert same(grads_of(other, values), expected)
        assert other.entry.program.recipes


def test_sizes_that_vary() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Linear(8, 8)

        def forward(self, x):
            y = self.w(torch.sin(x.reshape(x.shape[0] * 2, -1, 8)))
            return torch.cos(y.view(-1, x.shape[0], 8)).mean() * x.shape[0]

    torch.manual_seed(0)
    model = Model()
    opt = dropping(copy.deepcopy(model), dynamic=True)
    for rows in (4, 6, 10):
        values = torch.randn(rows, 2, 8)
        assert same(grads_of(opt, values), grads_of(model, values))
    assert len(opt.recaptures) <= 1
    assert opt.entry.program.recipes


def test_held_weights_are_cast_again() -> None:
    import graphopt

    found = []
    for opt in (
        dropping(MODELS["mlp"][0](), choose, "bf16") for choose in (lambda n: [], everything)
    ):
        with torch.no_grad():
            for i, p in enumerate(opt.parameters()):
                p.copy_(torch.linspace(-1, 1, p.numel()).view(p.shape) + i / 10)
        values = torch.linspace(-1, 1, 24).view(4, 6)
        with graphopt.hold_weights(opt):
            y = opt(values)
            grads_of(opt, values)
        y.sum().backward()
        found.append([p.grad for p in opt.parameters()])
    assert same(*found)


def test_without_a_scope_a_marker_does_nothing() -> None:
    found = case("mlp")
    program = found.program(found.names)
    state = [ref.read() for ref in program.refs]
    assert same(program.function(state, found.x), found.plain[:1])
    assert remat.drop(torch.ones(2), "nothing") is None
