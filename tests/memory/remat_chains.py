"""A chain of saved values, and what is alive of a step, for the tests of rematerialization."""

from __future__ import annotations

import collections
import functools

import torch
from remat_models import (
    everything,
    twins,
)
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from graphopt.graph.facts import tensors_of


class Storages(TorchDispatchMode):
    """Counts ops, and the bytes of storages made inside that are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: collections.Counter[str] = collections.Counter()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.ops[function._opname] += 1
        given = {t.untyped_storage()._cdata for t in tensors_of([*args])}
        for t in tensors_of(result):
            storage = t.untyped_storage()
            if storage._cdata not in given:
                self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return result

    @property
    def alive(self) -> int:
        return sum(size for ref, size in self._made.values() if not ref.expired())


class Chain(nn.Module):
    """Each activation is saved by the next one; the first of them may not be the last to go."""

    def __init__(self, length: int = 6) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(8))
        self.length = length

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.length):
            x = torch.sin(x * self.w)
        return x.sum()


@functools.cache
def _chain(length: int, choose):
    return twins(lambda: Chain(length), choose)


def chain(length: int = 6, choose=everything):
    """A chain that drops nothing and one that does, without gradients; captured once."""
    pair = _chain(length, choose)
    for module in pair:
        module.zero_grad()
    return pair


def x() -> torch.Tensor:
    return torch.linspace(-1, 1, 1024 * 8).view(1024, 8)


def grads(opt: nn.Module, values: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(opt(values), list(opt.parameters())))


def grads_of(opt: nn.Module, values: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(opt(values).sum(), list(opt.parameters())))
