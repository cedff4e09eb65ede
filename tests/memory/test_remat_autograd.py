"""What autograd promises holds for dropped values: twice, in part, batched, versions."""

from __future__ import annotations

import pytest
import torch
from remat_chains import Storages, chain, grads, x
from remat_models import (
    dropping,
    same,
    twins,
)
from torch import nn


def test_backward_twice_and_once_more() -> None:
    plain, opt = chain()
    values = x()
    y = opt(values)
    expected = grads(plain, values)
    for last in (False, False, True):
        found = torch.autograd.grad(y, list(opt.parameters()), retain_graph=not last)
        assert same(found, expected)
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()


def test_double_backward() -> None:
    for length in (1, 3):
        found = []
        for opt in chain(length):
            values = x().requires_grad_()
            (g,) = torch.autograd.grad(opt(values), values, create_graph=True)
            (g**2).sum().backward()
            found.append([values.grad, opt.w.grad])
        assert same(*found)


def test_two_forwards_before_one_backward() -> None:
    plain, opt = chain()
    one, two = x(), x() + 1
    for module in (plain, opt):
        (module(one) + 2 * module(two)).backward()
    assert torch.equal(plain.w.grad, opt.w.grad)
    a, b = opt(one), opt(two)
    opt.w.grad = None
    b.backward()
    a.backward()
    plain.w.grad = None
    plain(two).backward()
    plain(one).backward()
    assert torch.equal(plain.w.grad, opt.w.grad)


def test_part_of_the_gradients_leaves_nothing_cached() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            shared = torch.sin(torch.sin(x))
            return self.a(shared).sum() + torch.cos(self.b(shared)).sum()

    plain, opt = twins(Two)
    values = x().requires_grad_()
    y, expected = opt(values), plain(values)
    with Storages() as storages:
        found = torch.autograd.grad(y, list(opt.b.parameters()), retain_graph=True)
        assert storages.alive == sum(g.nbytes for g in found)
    assert same(found, torch.autograd.grad(expected, list(plain.b.parameters()), retain_graph=True))
    y.backward()
    expected.backward()
    assert torch.equal(opt.a.weight.grad, plain.a.weight.grad)


def test_saved_tensors_can_be_looked_at() -> None:
    _, opt = chain(2, lambda names: ["sin", "mul", "mul_1"])
    y = opt(x())
    saved = y.grad_fn.next_functions[0][0]._saved_self
    assert torch.equal(saved, torch.sin(x() * opt.w) * opt.w)
    y.backward()


def test_batched_gradients() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.linspace(0, 1, 8))

        def forward(self, x):
            return torch.sin(torch.sin(x) * self.w).view(-1)

    found = []
    for opt in twins(Model):
        values = x()[:1].requires_grad_()
        grad = torch.autograd.grad(opt(values), values, torch.eye(8), is_grads_batched=True)
        found.append(grad)
    assert same(*found)


def test_torch_func_runs_the_source() -> None:
    plain, opt = chain()
    values = x()
    state = dict(opt.named_parameters())

    def loss(module):
        return lambda state: torch.func.functional_call(module, state, (values,))

    found = torch.func.grad(loss(opt))(state)
    assert torch.allclose(found["w"], grads(plain, values)[0])


@pytest.mark.parametrize("what", ["input", "weight", "kept"])
def test_a_write_between_forward_and_backward_raises(what) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(8))

        def forward(self, x):
            kept = torch.exp(torch.sin(x * self.w))
            return torch.sin(kept * 2).sum(), kept

    opt = dropping(Model())
    values = x()
    y, kept = opt(values)
    with torch.no_grad():
        {"input": values, "weight": opt.w, "kept": kept}[what].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_a_write_that_no_backward_minds_is_none() -> None:
    _, opt = chain(2)
    values = x()
    y = opt(values)
    y2 = y.detach()
    y2.add_(1)
    y.backward()


def test_backward_under_autocast_computes_as_forward_did() -> None:
    plain, opt = twins(
        lambda: nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 3), nn.Tanh())
    )
    values = x()
    y, expected = opt(values).sum(), plain(values).sum()
    with torch.autocast("cpu", torch.bfloat16):
        y.backward()
        expected.backward()
    assert same([p.grad for p in opt.parameters()], [p.grad for p in plain.parameters()])


def test_nothing_is_dropped_without_gradients() -> None:
    _, opt = chain()
    values = x()
    with torch.no_grad():
        opt(values)
        with Storages() as storages:
            opt(values)
    assert not storages.ops["detach"]
    assert not opt.entry.program.recipes
