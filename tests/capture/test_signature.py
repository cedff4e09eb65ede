"""Arguments and results of every shape come in and go out as in eager."""

from __future__ import annotations

import collections
import dataclasses
import enum
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from graphopt.capture.signature import flatten, leaf_names, signature_of, unflatten
from graphopt.errors import CaptureError, GraphoptWarning
from graphopt.module import GraphoptModule, Settings


@dataclasses.dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor
    extra: Any = None


@dataclasses.dataclass(frozen=True)
class Batch:
    x: torch.Tensor
    scale: float


class Pair(NamedTuple):
    a: torch.Tensor
    b: torch.Tensor


class Mode(enum.Enum):
    UP = 1
    DOWN = 2


class Cache:
    """A class that nobody registered, filled by forward."""

    def __init__(self):
        self.layers, self.label = [], "cache"

    def add(self, x):
        self.layers.append(x)


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(2),
        (torch.ones(2), [torch.zeros(1), None, 3, "s"], {"k": torch.ones(3), "n": 1.5}),
        Pair(torch.ones(1), torch.zeros(1)),
        Batch(torch.ones(1), 2.0),
        collections.OrderedDict(b=torch.ones(1), a=torch.zeros(1)),
        collections.defaultdict(list, x=[torch.ones(1)]),
        torch.ones(3, 2).max(0),
        slice(torch.ones(()), 4),
        torch.Size([1, 2]),
    ],
)
def test_flatten_and_back(value):
    leaves = []
    structure = flatten(value, leaves)
    hash(structure)
    again = unflatten(structure, leaves)
    assert type(again) is type(value)
    more = []
    assert flatten(again, more) == structure
    assert all(a is b for a, b in zip(leaves, more, strict=True))


def test_values_that_compare_equal_are_kept_apart():
    kinds = [True, 1, 1.0, 0.0, -0.0, False, 0]
    assert len({flatten(v, []) for v in kinds}) == len(kinds)


def test_an_object_in_a_result_is_built_anew_each_time():
    class Fills(nn.Module):
        def forward(self, x):
            cache = Cache()
            cache.add(x * 2)
            return x, cache

    opt = GraphoptModule(Fills())
    one, two = opt(torch.ones(2))[1], opt(torch.zeros(2))[1]
    assert type(one) is Cache
    assert one.label == "cache"
    assert one.layers[0].tolist() == [2, 2]
    assert two.layers[0].tolist() == [0, 0]
    assert one.layers is not two.layers


def of(function):
    return type("Of", (nn.Module,), {"forward": function})()


def test_a_dataclass_comes_back_and_backpropagates(twin):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(3, 3)

        def forward(self, batch):
            z = self.lin(batch.x) * batch.scale
            return Output(z.sum(), z)

    twin(Model(), Batch(torch.randn(2, 3), 0.5))


def test_arguments_by_position_by_name_and_by_default(twin):
    def forward(self, x, y=None, *rest, scale=1.0, **more):
        out = x * scale
        for t in (y, *rest, *more.values()):
            out = out if t is None else out + t
        return {"out": out, "given": y is not None}

    x, y = torch.randn(2), torch.randn(2)
    opt = GraphoptModule(of(forward))
    assert torch.equal(opt(x)["out"], x)
    assert torch.equal(opt(x, y)["out"], x + y)
    assert torch.equal(opt(x, y=y)["out"], x + y)
    assert torch.equal(opt(x, y, x, scale=2.0)["out"], x * 2 + y + x)
    assert torch.equal(opt(x, bias=y)["out"], x + y)
    assert opt(x)["given"] is False


def test_wrong_arguments_raise_as_in_eager():
    opt = GraphoptModule(of(lambda self, x, *, y=None: x))
    with pytest.raises(TypeError, match="z"):
        opt(torch.ones(1), z=1)
    with pytest.raises(TypeError, match="'x'"):
        opt()


@pytest.mark.parametrize("values", [(1, 2), (True, False), ("a", "b"), (Mode.UP, Mode.DOWN)])
def test_plain_values_select_the_graph(values):
    def forward(self, x, flag):
        return x + 1 if flag in (2, False, "b", Mode.DOWN) else x

    opt = GraphoptModule(of(forward))
    x = torch.zeros(1)
    assert [opt(x, v).item() for v in (*values, *values)] == [0, 1, 0, 1]
    assert len(opt._store.entries()) == 2


def test_none_given_and_none_omitted():
    opt = GraphoptModule(of(lambda self, x, mask=None: x if mask is None else x * mask))
    x = torch.ones(2)
    assert torch.equal(opt(x, None), opt(x, mask=None))
    assert opt(x, mask=torch.zeros(2)).sum() == 0


def test_dict_keys_select_the_graph():
    opt = GraphoptModule(of(lambda self, batch: batch["a"] - batch.get("b", 0)))
    a, b = torch.ones(1), torch.ones(1)
    assert opt({"a": a, "b": b}).item() == 0
    assert opt({"b": b, "a": a}).item() == 0
    assert opt({"a": a}).item() == 1


def test_results_that_are_no_tensors(twin):
    twin(of(lambda self, x: (x, x.shape, 3, "s", None, [x.dtype], {"k": (x,)})), torch.ones(2, 3))


def test_no_result_at_all(twin):
    twin(of(lambda self, x: None), torch.ones(2))


def test_names_of_leaves():
    def forward(self, x, batch, *rest, mask=None):
        return x

    t = torch.ones(1)
    structure = flatten(((t, {"k": [t, t]}, t), {"mask": t}), [])
    names = leaf_names(structure, signature_of(of(forward)))
    assert names == ["x", "batch['k'][0]", "batch['k'][1]", "rest[0]", "mask"]


def test_an_argument_of_an_unknown_class_is_refused_by_name():
    with pytest.raises(CaptureError, match=r"test_signature\.Cache"):
        GraphoptModule(of(lambda self, x, c: x))(torch.ones(1), Cache())


def test_an_argument_of_an_unknown_class_falls_back():
    opt = GraphoptModule(of(lambda self, x, c: x + 1), Settings(on_error="fallback"))
    with pytest.warns(GraphoptWarning, match="Cache"):
        assert opt(torch.ones(1), Cache()).item() == 2


def test_a_changed_container_among_the_arguments_is_refused():
    def forward(self, x, history):
        history.append(x)
        return x + 1

    with pytest.raises(CaptureError, match="changes a container"):
        GraphoptModule(of(forward))(torch.ones(1), [])
