"""A forward that assigns a buffer a new tensor: a write to it, in the root and in submodules."""

import pytest
import torch
from torch import nn

import graphopt
from graphopt import CaptureError

X = torch.ones(2, 4)


class Holder(nn.Module):
    """Two buffers and a weight, and what a test does with them."""

    def __init__(self, does):
        super().__init__()
        self.does = does
        self.register_buffer("n", torch.zeros(4))
        self.register_buffer("m", torch.ones(4))
        self.register_buffer("empty", None)
        self.w = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return self.does(self, x)


class Around(nn.Module):
    """A module around it."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


def counts(self, x):
    self.n = self.n + 1
    return x + self.n


def counts_twice(self, x):
    self.n = self.n + 1
    self.n = self.n * 2
    return x + self.n


def keeps_the_old(self, x):
    old = self.n
    self.n = self.n + 1
    return x + old


def returns_the_old(self, x):
    old = self.n
    self.n = self.n + 1
    return old


def returns_a_view_of_the_old(self, x):
    old = self.n[:2]
    self.n = self.n + 1
    return old


def swaps(self, x):
    self.n, self.m = self.m, self.n
    return x + self.n


def swaps_and_adds(self, x):
    self.n, self.m = self.m, self.n + 2
    return x + self.n


def becomes_a_view_of_another(self, x):
    self.n = self.m.view(4)
    return x + self.n


def takes_a_weight(self, x):
    self.n = self.n.detach() + self.w
    return x + self.n


DOES = [
    counts, counts_twice, keeps_the_old, returns_the_old, returns_a_view_of_the_old, swaps,
    swaps_and_adds, becomes_a_view_of_another, takes_a_weight,
]  # fmt: skip


@pytest.mark.parametrize("around", [lambda module: module, Around], ids=["root", "submodule"])
@pytest.mark.parametrize("does", DOES)
def test_results_and_buffers_are_those_of_eager(does, around):
    eager, source = Holder(does), Holder(does)
    opt = graphopt.optimize(around(source), X)
    for _ in range(3):
        expected, found = around(eager)(X), opt(X)
        assert torch.equal(found, expected)
        assert found.requires_grad == expected.requires_grad
        assert torch.equal(source.n, eager.n)
        assert torch.equal(source.m, eager.m)


def longer(self, x):
    self.n = torch.cat([self.n, self.n])
    return x


def wider(self, x):
    self.n = self.n.double()
    return x


def fills(self, x):
    self.empty = x.sum(0)
    return x


@pytest.mark.parametrize("around", [lambda module: module, Around], ids=["root", "submodule"])
@pytest.mark.parametrize(("does", "name"), [(longer, "n"), (wider, "n"), (fills, "empty")])
def test_another_shape_or_dtype_is_refused(does, name, around):
    source = Holder(does)
    before = dict(source._buffers)
    with pytest.raises(CaptureError, match=f"{name}' a value of another shape"):
        graphopt.optimize(around(source), X)
    assert source._buffers == before


def grows(self, x):
    if self.n.shape[0] < x.shape[-1] + 4:
        self.n = torch.ones(x.shape[-1] + 4)
    return x + self.n[: x.shape[-1]]


def test_a_cache_that_grew_is_captured_once_it_is_filled():
    source = Holder(grows)
    with pytest.raises(CaptureError, match="call the model once"):
        graphopt.optimize(Around(source), X)
    expected = source(X)
    assert torch.equal(graphopt.optimize(Around(source), X)(X), expected)
