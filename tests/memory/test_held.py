"""Tensors in plain attributes of a model are there for the whole step, read or not."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

import graphopt
from graphopt.memory.held import held_tensors

SIZE = 2**14


@dataclasses.dataclass
class Box:
    tensor: torch.Tensor


class Slots:
    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Net(nn.Module):
    def __init__(self, value: Any = None, read: Any = None) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.value, self.read = value, read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.b(torch.relu(self.a(x)))
        return (y if self.read is None else y + self.read(self.value)[:8]).square().mean()


def big() -> torch.Tensor:
    return torch.zeros(SIZE // 4)


PLACES = {
    "attribute": (lambda: big(), lambda v: v),
    "list": (lambda: [1, big()], lambda v: v[1]),
    "nested": (lambda: {"k": ({"t": big()},)}, lambda v: v["k"][0]["t"]),
    "dataclass": (lambda: Box(big()), lambda v: v.tensor),
    "slots": (lambda: Slots(big()), lambda v: v.tensor),
    "a view of it": (lambda: big()[:8], lambda v: v),
    "twice": (lambda: (t := big(), t.view(2, -1), [t]), lambda v: v[0]),
    "no registered module": (
        lambda: [nn.Linear(SIZE // 4, 1, bias=False)],
        lambda v: v[0].weight[0],
    ),
}
X = torch.ones(4, 8)


def peak(model: nn.Module) -> int:
    return graphopt.profile_memory(model, X).peak_bytes


@pytest.mark.parametrize("place", PLACES)
def test_what_a_model_holds_is_counted_once(place: str) -> None:
    make, _ = PLACES[place]
    assert peak(Net(make())) == peak(Net()) + SIZE


@pytest.mark.parametrize("place", ["attribute", "list", "nested", "dataclass", "a view of it"])
def test_the_model_and_its_graph_count_the_same(place: str) -> None:
    make, read = PLACES[place]
    model = Net(make(), read)
    assert peak(graphopt.optimize(model, X, fuse=False)) == peak(model)


def test_optimizers_and_data_are_not_the_model_s() -> None:
    net = Net()
    net.value = [
        torch.optim.AdamW([big()], 1e-3),
        torch.utils.data.TensorDataset(big()),
        Net,
        torch.Generator(),
    ]
    assert not held_tensors(net)


def test_what_holds_itself_is_looked_into_once() -> None:
    net, loop = Net(), [big()]
    loop.append(loop)  # type: ignore[arg-type]
    net.value = [loop, net, net.a.weight]
    assert list(held_tensors(net)) == ["value[0][0]"]
