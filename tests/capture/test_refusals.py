"""What cannot be captured is refused by name, with the user's line and a cure."""

from __future__ import annotations

import random
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from graphopt.capture import capture
from graphopt.errors import (
    BudgetError,
    CaptureError,
    GraphOptError,
    GraphoptWarning,
    OptionError,
    PassError,
    UnsupportedError,
    VerifyError,
)
from graphopt.module import GraphoptModule, Settings


class Straight(torch.autograd.Function):
    """A straight-through estimator: its backward is not its forward's."""

    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, g):
        return g


class Branch(nn.Module):
    def forward(self, x):
        if x.sum() > 0:
            return x
        return -x


class Item(nn.Module):
    def forward(self, x):
        return x[: int(x.sum())]


class Function(nn.Module):
    def forward(self, x):
        return Straight.apply(x)


class Hook(nn.Module):
    def forward(self, x):
        x.register_hook(lambda g: g * 2)
        return x * 2


class Gradient(nn.Module):
    def forward(self, x):
        return torch.autograd.grad(x.square().sum(), x, create_graph=True)[0]


class PythonRandom(nn.Module):
    def forward(self, x):
        return x * random.random()


class NumpyRandom(nn.Module):
    def forward(self, x):
        return x * float(np.random.rand())


class Assigns(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = torch.zeros(3)

    def forward(self, x):
        self.last = x * 2
        return self.last


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * self.calls


class Appends(nn.Module):
    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x):
        self.seen.append(x)
        return x * 2


class LayerDrop(nn.Module):
    def __init__(self):
        super().__init__()
        self.layerdrop = 0.5

    def forward(self, x):
        if torch.rand([]) < self.layerdrop:
            return x
        return x * 2


def given():
    return torch.rand(3, requires_grad=True) + 0.5


@pytest.mark.parametrize(
    ("module", "what", "line"),
    [
        (Branch, "data-dependent control flow", "if x.sum() > 0:"),
        (Item, "data-dependent control flow", "return x[: int(x.sum())]"),
        (Function, "autograd.Function (Straight)", "return Straight.apply(x)"),
        (Hook, "Tensor.register_hook in forward", "x.register_hook"),
        (Gradient, "an inner torch.autograd.grad", "return torch.autograd.grad"),
        (PythonRandom, "Python's random module", None),
        (NumpyRandom, "numpy's global generator", None),
        (Assigns, "assigns the attribute 'last' (a tensor)", None),
        (Counts, "assigns the attribute 'calls' (of type int)", None),
        (Appends, "assigns the attribute 'seen' (of type list)", None),
        (LayerDrop, "LayerDrop", "if torch.rand([]) < self.layerdrop:"),
    ],
)
def test_refused_by_name_with_line_and_cure(module, what, line, capfd):
    with pytest.raises(CaptureError) as caught:
        capture(module(), (given(),))
    error = caught.value
    assert what in error.what
    assert error.try_
    if line:
        assert line in error.at
        assert "test_refusals.py:" in error.at
    assert capfd.readouterr() == ("", "")


def test_a_custom_function_is_fine_where_no_gradient_flows():
    with torch.no_grad():
        opt = GraphoptModule(Function())
        assert opt(torch.tensor([1.2])).item() == 1


@pytest.mark.parametrize(
    ("register", "kind"),
    [
        ("register_forward_hook", "forward hook"),
        ("register_forward_pre_hook", "forward pre-hook"),
        ("register_full_backward_hook", "backward hook"),
        ("register_full_backward_pre_hook", "backward pre-hook"),
    ],
)
@pytest.mark.parametrize("late", [False, True])
def test_a_hook_on_a_submodule_is_refused(register, kind, late):
    net = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    opt = GraphoptModule(net)
    if late:
        opt(torch.ones(1, 3))
    getattr(net[1], register)(lambda *args: None)
    with pytest.raises(CaptureError, match=f"a {kind} on the submodule '1'"):
        opt(torch.ones(1, 3))


def test_the_models_own_error_goes_through():
    class Raises(nn.Module):
        def forward(self, x):
            raise ValueError("give me something else")

    with pytest.raises(ValueError, match="something else"):
        capture(Raises(), (torch.ones(1),))


def test_a_wrong_size_names_the_line():
    with pytest.raises(CaptureError, match=r"same reduction dim.*\[2, 5\] X \[3, 4\]"):
        GraphoptModule(nn.Linear(3, 4))(torch.ones(2, 5))


def test_fallback_warns_once_and_runs_the_source():
    opt = GraphoptModule(Branch(), Settings(on_error="fallback"))
    x = torch.ones(2)
    with pytest.warns(GraphoptWarning, match="data-dependent"):
        assert torch.equal(opt(x), x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(opt(-x), x)
        assert torch.equal(opt(-x[:1]), x[:1])


def test_a_failed_capture_leaves_everything_as_it_was():
    apply, grad = torch.autograd.Function.apply, torch.autograd.grad
    state, python = torch.get_rng_state(), random.getstate()
    for module in (Branch, Function, PythonRandom):
        with pytest.raises(CaptureError):
            capture(module(), (given().detach().requires_grad_(),))
        torch.set_rng_state(state)
    assert torch.autograd.Function.apply == apply
    assert torch.autograd.grad is grad
    assert random.getstate() == python


def test_a_script_module_is_refused():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(nn.Linear(2, 2))
    with pytest.raises(CaptureError, match="TorchScript"):
        capture(nn.Sequential(scripted), (torch.ones(1, 2),))


def test_the_layout_of_an_error():
    error = CaptureError("a thing", at="f.py:1 in f    x", why="because", try_="another")
    assert str(error) == "a thing\n  at   f.py:1 in f    x\n  why  because\n  try  another"
    assert str(CaptureError("only what")) == "only what"


@pytest.mark.parametrize(
    "kind", [CaptureError, PassError, VerifyError, BudgetError, UnsupportedError, OptionError]
)
def test_every_error_is_a_graphopt_error_and_pickles(kind):
    import pickle

    error = pickle.loads(pickle.dumps(kind("what", at="at", why="why", try_="try")))
    assert isinstance(error, GraphOptError)
    assert type(error) is kind
    assert str(error) == "what\n  at   at\n  why  why\n  try  try"


class _Cached(nn.Module):
    def __init__(self):
        super().__init__()
        self.kept = {}

    def forward(self, x):
        if "x" not in self.kept:
            self.kept["x"] = x * 2
        return self.kept["x"] + x


def test_an_assigned_attribute_is_refused_with_its_line():
    with pytest.raises(CaptureError, match=r"'kept' \(of type dict\)") as caught:
        GraphoptModule(_Cached())(torch.ones(2))
    assert 'in _Cached.forward    self.kept["x"] = x * 2' in caught.value.at
