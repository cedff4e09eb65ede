"""Python state that a forward reads: a change of it is seen, whatever holds it."""

from __future__ import annotations

import dataclasses
import enum
import functools
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from graphopt.capture.guard import Guard
from graphopt.errors import CaptureError, GraphoptWarning
from graphopt.module import GraphoptModule, Settings

SCALE = 2.0
TABLE = {"gain": 3.0}


def helper(x):
    return x * SCALE


class Kind(enum.Enum):
    SUM = 1
    MEAN = 2


@dataclasses.dataclass
class Config:
    gain: float = 2.0
    kind: Kind = Kind.SUM
    inner: types.SimpleNamespace = dataclasses.field(
        default_factory=lambda: types.SimpleNamespace(bias=1.0)
    )


class Slotted:
    __slots__ = ("gain",)

    def __init__(self):
        self.gain = 2.0


class Mapped:
    """Gives an attribute under another name, as Hugging Face's configs do."""

    def __init__(self):
        self.n_embd = 2.0

    def __getattribute__(self, name):
        return super().__getattribute__("n_embd" if name == "hidden" else name)


class Reader(nn.Module):
    """Reads state of many kinds; `act` alone changes none."""

    shared = 1.5

    def __init__(self):
        super().__init__()
        self.scale = 2.0
        self.flag = True
        self.name = "relu"
        self.sizes = (2, 3)
        self.items = [1.0, 2.0]
        self.options = {"a": {"b": 1.0}}
        self.config = Config()
        self.slotted = Slotted()
        self.mapped = Mapped()
        self.act = F.relu
        self.part = functools.partial(F.leaky_relu, negative_slope=0.1)
        self.dtype = torch.float32
        self.numbers = torch.ones(3).numpy()
        self.drop = nn.Dropout(0.0)
        self._hidden = 1.0
        self.classes = type("Constants", (), {"gain": 2.0})

    @property
    def hidden(self):
        return self._hidden

    def pick(self, x):
        return x + 1

    def forward(self, x):
        x = getattr(F, self.name)(x) * self.scale * self.shared * self.hidden
        x = x * sum(self.items) * self.options["a"]["b"] * self.config.gain + self.sizes[0]
        x = x.sum(0) if self.config.kind is Kind.SUM else x.mean(0)
        x = x + self.config.inner.bias * self.slotted.gain * self.mapped.hidden
        x = self.part(self.act(x)).to(self.dtype) * float(self.numbers[0])
        x = x * 2 if self.flag else x
        x = x * self.classes.gain * getattr(self, "extra", 1.0) * TABLE["gain"]
        return self.drop(self.pick(helper(x)))


def drop_hard(m):
    m.drop.p = 1.0


CHANGES = {
    "a number": lambda m: setattr(m, "scale", 3.0),
    "its type": lambda m: setattr(m, "scale", 2),
    "a flag": lambda m: setattr(m, "flag", False),
    "a string": lambda m: setattr(m, "name", "sigmoid"),
    "a tuple": lambda m: setattr(m, "sizes", (5, 3)),
    "an item of a list": lambda m: m.items.__setitem__(0, 4.0),
    "a longer list": lambda m: m.items.append(4.0),
    "a nested dict": lambda m: m.options["a"].__setitem__("b", 2.0),
    "a config": lambda m: setattr(m.config, "gain", 5.0),
    "an enum": lambda m: setattr(m.config, "kind", Kind.MEAN),
    "a namespace": lambda m: setattr(m.config.inner, "bias", 7.0),
    "another config": lambda m: setattr(m, "config", Config(gain=9.0)),
    "a slot": lambda m: setattr(m.slotted, "gain", 5.0),
    "a mapped attribute": lambda m: setattr(m.mapped, "n_embd", 5.0),
    "a function": lambda m: setattr(m, "act", F.gelu),
    "a partial": lambda m: setattr(m, "part", functools.partial(F.leaky_relu, negative_slope=0.5)),
    "a dtype": lambda m: setattr(m, "dtype", torch.float64),
    "an array": lambda m: m.numbers.__setitem__(0, 2.0),
    "a probability": drop_hard,
    "behind a property": lambda m: setattr(m, "_hidden", 2.0),
    "an attribute over the class's": lambda m: setattr(m, "shared", 2.5),
    "a method over the class's": lambda m: setattr(m, "pick", lambda x: x + 2),
    "an attribute that was missing": lambda m: setattr(m, "extra", 2.0),
    "of a class as a value": lambda m: setattr(m.classes, "gain", 3.0),
    "a forward of a submodule": lambda m: setattr(m.drop, "forward", lambda x: x * 3),
    "the forward of the root": lambda m: setattr(m, "forward", lambda x: x * 3),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_change_is_seen(change):
    model = Reader()
    opt = GraphoptModule(model)
    x = torch.tensor([[-1.0, 2.0], [0.5, 3.0]])
    before = opt(x)
    assert torch.equal(before, model(x))
    change(model)
    want = model(x)
    got = opt(x)
    assert got.dtype is want.dtype
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
    assert len(opt.recaptures) == 1
    assert opt.recaptures[0].reason == "state"
    opt(x)
    assert len(opt.recaptures) == 1


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        (Reader, "shared", 2.5),
        (Reader, "pick", lambda self, x: x - 1),
        (nn.Dropout, "forward", None),
    ],
)
def test_a_change_of_a_class_is_seen(monkeypatch, owner, name, value):
    model = Reader()
    opt = GraphoptModule(model)
    x = torch.ones(2, 2)
    opt(x)
    monkeypatch.setattr(owner, name, value or (lambda self, x: x * 3))
    assert torch.equal(opt(x), model(x))
    assert len(opt.recaptures) == 1


def test_globals_and_closures_are_seen(monkeypatch):
    factor = 2.0

    class Net(nn.Module):
        def forward(self, x):
            return helper(x) * factor * TABLE["gain"]

    opt = GraphoptModule(Net())
    x = torch.ones(2)
    assert opt(x).tolist() == [12, 12]
    monkeypatch.setitem(globals(), "SCALE", 5.0)
    assert opt(x).tolist() == [30, 30]
    factor = 1.0
    assert opt(x).tolist() == [15, 15]
    monkeypatch.setitem(TABLE, "gain", 1.0)
    assert opt(x).tolist() == [5, 5]
    monkeypatch.setitem(globals(), "helper", lambda x: x)
    assert opt(x).tolist() == [1, 1]
    names = [r.argument.removeprefix(f"{__name__}.") for r in opt.recaptures]
    factor = f"factor in {Net.forward.__qualname__}"
    assert names == ["SCALE", factor, f"the content of {__name__}.TABLE", "helper"]


def test_a_change_back_takes_the_old_graph():
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.1))
    opt = GraphoptModule(model)
    x = torch.ones(2, 3)
    for p in (0.1, 0.5, 0.1, 0.5, 0.1):
        model[1].p = p
        opt(x)
    assert len(opt._store.entries()) == 2
    record = opt.recaptures[0]
    assert str(record) == "state: Dropout.p of 1 was 0.1, is 0.5"


def test_an_equal_value_in_a_new_object_captures_nothing():
    model = Reader()
    opt = GraphoptModule(model)
    x = torch.ones(2, 2)
    opt(x)
    model.scale, model.sizes, model.name = float("2.0"), tuple(map(int, "23")), "".join("relu")
    model.items[:] = [float("1.0"), float("2.0")]
    model.unread = 3
    opt(x)
    assert not opt.recaptures


def test_what_is_not_read_may_change():
    model = nn.Sequential(nn.Linear(3, 3))
    model.unread, model[0].note = 1, "a"
    opt = GraphoptModule(model)
    x = torch.ones(1, 3)
    opt(x)
    model.unread, model[0].note = 2, "b"
    model[0].in_features = 3
    opt(x)
    assert not opt.recaptures


def test_a_value_that_always_changes_is_warned_of_by_name():
    model = Reader()
    opt = GraphoptModule(model, Settings(recapture_limit=2))
    x = torch.ones(2, 2)
    opt(x)
    for step in range(2):
        model.scale = step + 0.5
        assert torch.equal(opt(x), model(x))
    model.scale = 9.0
    with pytest.warns(GraphoptWarning, match=r"because Reader\.scale keeps changing"):
        opt(x)
    model.scale = 10.0
    assert torch.equal(opt(x), model(x))
    assert len(opt._store.entries()) <= 3


def test_a_training_flag_of_a_submodule_that_reads_it():
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
    opt = GraphoptModule(model)
    x = torch.ones(4, 3)
    opt(x)
    model[0].eval()
    opt(x)
    assert not opt.recaptures  # a Linear reads none
    model[1].eval()
    assert torch.equal(opt(x), opt(x))
    assert str(opt.recaptures[0]) == "state: Dropout.training of 1 was True, is False"


def test_a_tensor_attribute_is_read_live_and_its_facts_are_guarded():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.shift = torch.ones(3)

        def forward(self, x):
            return x + self.shift.expand(2, 3)

    model = Net()
    opt = GraphoptModule(model)
    x = torch.zeros(2, 3)
    opt(x)
    model.shift = torch.full((3,), 4.0)
    assert opt(x).sum() == 24
    assert not opt.recaptures
    for other in (torch.ones(1), torch.ones(3).double(), torch.ones(3).requires_grad_()):
        model.shift = other
        got, want = opt(x), model(x)
        assert (got.dtype, got.requires_grad) == (want.dtype, want.requires_grad)
        assert torch.equal(got, want)
        model.shift = torch.ones(3)
        opt(x)
    assert [r.argument for r in opt.recaptures] == [
        "shape of shift",
        "dtype of shift",
        "requires_grad of shift",
    ]


def test_tensors_outside_the_tree_are_guarded_by_identity():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.many = [torch.ones(2), torch.ones(2)]
            self.holder = Config()
            self.holder.table = torch.ones(2)

        def forward(self, x):
            return x + self.many[1] + self.holder.table

    model = Net()
    opt = GraphoptModule(model)
    x = torch.zeros(2)
    assert opt(x).tolist() == [2, 2]
    model.many[1].add_(1)  # the same tensor: its values are read live
    assert opt(x).tolist() == [3, 3]
    model.many[1] = torch.full((2,), 5.0)
    assert opt(x).tolist() == [6, 6]
    model.holder.table = torch.full((2,), 7.0)
    assert opt(x).tolist() == [12, 12]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda m: setattr(m[0], "bias", None), "0.bias"),
        (lambda m: setattr(m[1], "bias", nn.Parameter(torch.ones(3))), "Linear.bias of 1"),
        (lambda m: setattr(m[0], "weight", m[1].weight), None),
        (lambda m: setattr(m[0].weight, "data", torch.ones(3, 3).double()), "dtype of 0.weight"),
        (lambda m: m.__setitem__(1, nn.Sigmoid()), "submodule 1"),
        (lambda m: m[2].requires_grad_(False), "requires_grad of 2.weight"),
        (
            lambda m: setattr(m[2], "weight", nn.Parameter(torch.rand(3, 3))),
            "2.weight and 3.weight",
        ),
    ],
)
def test_parameters_that_change(change, what):
    model = nn.Sequential(*[nn.Linear(3, 3, bias=i == 0) for i in range(4)])
    model[3].weight = model[2].weight
    opt = GraphoptModule(model)
    x = torch.ones(2, 3)
    opt(x)
    change(model)
    try:
        want = model(x)
    except RuntimeError:
        with pytest.raises(RuntimeError):
            opt(x)
    else:
        got = opt(x)
        assert torch.equal(got, want)
        assert got.requires_grad == want.requires_grad
    seen = [r.argument for r in opt.recaptures]
    assert seen == ([what] if what else []) or what.startswith("dtype")


def test_a_global_hook_is_refused_until_it_goes():
    opt = GraphoptModule(nn.Sequential(nn.Linear(2, 2)))
    x = torch.ones(1, 2)
    opt(x)
    handle = nn.modules.module.register_module_forward_hook(lambda m, i, o: o * 0)
    with pytest.raises(CaptureError, match="global"):
        opt(x)
    handle.remove()
    opt(x)


def test_with_fallback_a_hook_runs_and_the_graph_comes_back():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    opt = GraphoptModule(model, Settings(on_error="fallback"))
    x = torch.ones(1, 2)
    opt(x)
    handle = model[0].register_forward_hook(lambda m, i, o: o * 0)
    with pytest.warns(GraphoptWarning, match="forward hook"):
        assert opt(x).abs().sum() == 0
    handle.remove()
    assert torch.equal(opt(x), model(x))
    assert len(opt._store.entries()) == 1


def test_the_state_is_the_same_without_torchs_own_guards(monkeypatch):
    monkeypatch.setattr("torch._C._dynamo.guards.TensorGuards", None)
    model = nn.Linear(3, 3)
    opt = GraphoptModule(model)
    x = torch.ones(1, 3)
    opt(x)
    opt(x)
    model.weight.requires_grad_(False)
    opt(x)
    assert [r.argument for r in opt.recaptures] == ["requires_grad of weight"]
    assert isinstance(opt.entry.guard, Guard)


def test_classes_are_as_before_after_a_capture():
    model = Reader()
    GraphoptModule(model)(torch.ones(2, 2))
    assert "__getattribute__" not in nn.Module.__dict__
    assert "__getattribute__" not in Config.__dict__
    assert "__getattribute__" in Mapped.__dict__
    assert Mapped().hidden == 2.0


def test_a_call_without_changes_looks_at_versions_alone(monkeypatch):
    model = Reader()
    opt = GraphoptModule(model)
    x = torch.ones(2, 2)
    opt(x)
    opt(x)
    looks = []
    monkeypatch.setattr(Guard, "_tensors_now", lambda self: looks.append(1))
    assert opt.entry.state() is not None
    assert not looks
    model.scale = 9.0
    opt.entry.state()
    assert looks


def test_the_state_is_the_same_without_versions(monkeypatch):
    monkeypatch.setattr("graphopt.capture.guard._version", None)
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
    opt = GraphoptModule(model)
    x = torch.ones(1, 3)
    opt(x)
    model[1].p = 1.0
    assert opt(x).abs().sum() == 0
    assert [r.argument for r in opt.recaptures] == ["Dropout.p of 1"]
