"""What `torch.export` drops or breaks without a word: each is kept right, or refused by name."""

from __future__ import annotations

import copy
import dataclasses
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from graphopt.errors import CaptureError, GraphoptWarning
from graphopt.module import GraphoptModule, Settings


def of(forward, **attributes):
    model = type("Of", (nn.Module,), {"forward": forward})()
    for name, value in attributes.items():
        setattr(model, name, value)
    return model


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, g):
        return g


class Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale
        return x.mean() * scale

    @staticmethod
    def backward(ctx, g):
        return g.expand(3) * ctx.scale, None


def hooked(x):
    h = x * 2
    h.register_hook(lambda g: g * 3)
    return h


def penalty(x):
    (g,) = torch.autograd.grad(x.square().sum(), x, create_graph=True)
    return x + g


def inner_backward(self, x):
    y = (x * 2).sum()
    y.backward(retain_graph=True)
    return y


def layer_drop(self, x):
    for _ in range(3):
        if torch.rand(()) > 0.5:
            x = x * 2
    return x


def retained(self, x):
    h = x * 2
    h.retain_grad()
    return h


KEPT = []
COUNT = 0


class Record:
    last = None


def counting(self, x):
    global COUNT
    COUNT += 1
    return x * COUNT


def forked(self, x):
    with torch.random.fork_rng(devices=[]):
        return x * torch.rand(3)


def saved_on_cpu(self, x):
    with torch.autograd.graph.save_on_cpu():
        return x.sin()


def selective():
    return create_selective_checkpoint_contexts([torch.ops.aten.mm.default])


REFUSED = {
    "a custom function": (lambda self, x: Straight.apply(x), "autograd.Function (Straight)"),
    "one with two arguments": (lambda self, x: Mean.apply(x, 2), "autograd.Function (Mean)"),
    "a tensor hook": (lambda self, x: hooked(x), "Tensor.register_hook"),
    "an inner gradient": (lambda self, x: penalty(x), "inner torch.autograd.grad"),
    "an inner backward": (inner_backward, "inner backward"),
    "retain_grad": (retained, "Tensor.retain_grad"),
    "a selective checkpoint": (
        lambda self, x: checkpoint(torch.sin, x, use_reentrant=False, context_fn=selective),
        "activation checkpointing with a context_fn",
    ),
    "a reentrant checkpoint without gradients": (
        lambda self, x: checkpoint(torch.sin, x.detach(), use_reentrant=True) + x,
        "reentrant activation checkpointing of inputs that take no gradient",
    ),
    "torch.manual_seed": (lambda self, x: (torch.manual_seed(0), x)[1], "torch.manual_seed"),
    "fork_rng": (forked, "torch.set_rng_state"),
    "saved-tensor hooks": (saved_on_cpu, "saved_tensors_hooks"),
    "requires_grad_": (lambda self, x: x.detach().requires_grad_() * 2, "Tensor.requires_grad_"),
    "a grad mode left off": (
        lambda self, x: (torch.set_grad_enabled(False), x * 2)[1],
        "leaves the grad mode",
    ),
    "vmap": (lambda self, x: torch.vmap(lambda v: v * v)(x), "transform of torch.func"),
    "a list outside": (lambda self, x: (KEPT.append(x * 2), x)[1], "KEPT"),
    "a global counter": (counting, "COUNT"),
    "a dict that counts": (
        lambda self, x: (self.notes.__setitem__("n", self.notes["n"] + 1), x)[1],
        "'notes'",
    ),
    "an object's attribute": (
        lambda self, x: (setattr(self.record, "last", x * 2), x)[1],
        "'Record.last'",
    ),
    "a generator": (
        lambda self, x: x * torch.rand(3, generator=torch.Generator()),
        "an object of class Generator",
    ),
    "Python's random": (lambda self, x: x * random.random(), "Python's random module"),
    "numpy's random": (lambda self, x: x * float(np.random.rand()), "numpy's global generator"),
    "a branch on a value": (lambda self, x: x if x.sum() > 0 else -x, "data-dependent"),
    "a loop on a value": (
        lambda self, x: x * sum(1 for _ in range(int(x.sum()))),
        "data-dependent",
    ),
    "LayerDrop": (layer_drop, "data-dependent"),
    "item": (lambda self, x: x * x.sum().item() if x.max().item() > 0 else x, "data-dependent"),
    "tolist": (lambda self, x: x * max(x.tolist()), ""),
    "nonzero": (lambda self, x: x[x.nonzero().flatten()[: len(x.nonzero())]] * len(x[x > 0]), ""),
}


@pytest.mark.parametrize(("forward", "what"), REFUSED.values(), ids=REFUSED.keys())
def test_refused_by_name(forward, what):
    model = of(forward, notes={"n": 0}, record=Record())
    opt = GraphoptModule(model)
    with pytest.raises(CaptureError) as caught:
        opt(torch.full((3,), 1.4, requires_grad=True))
    assert what in f"{caught.value.what} {caught.value.why}"
    assert caught.value.try_
    assert torch.is_grad_enabled()
    assert not KEPT
    assert model.notes == {"n": 0}
    assert vars(model.record) == {}


@pytest.mark.parametrize("generator", [random.Random(0), np.random.default_rng(0)])
def test_a_generator_of_the_models_own_is_refused(generator):
    model = of(lambda self, x: x * self.generator.random(), generator=generator)
    with pytest.raises(CaptureError, match="draws from a generator of its own"):
        GraphoptModule(model)(torch.ones(3))


@pytest.mark.parametrize("form", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_inside(form, when):
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    opt = GraphoptModule(model)
    x = torch.ones(1, 3)
    if when == "after":
        opt(x)
    handle = getattr(model[0], f"register_{form}_hook")(lambda *args: None)
    with pytest.raises(CaptureError, match=r"hook on the submodule '0'"):
        opt(x)
    handle.remove()
    assert torch.equal(opt(x), model(x))


def test_hooks_on_parameters_run():
    model = nn.Linear(3, 3)
    opt = GraphoptModule(model)
    seen = []
    model.weight.register_hook(lambda g: seen.append("grad"))
    model.weight.register_post_accumulate_grad_hook(lambda p: seen.append("accumulated"))
    opt(torch.ones(1, 3)).sum().backward()
    assert seen == ["grad", "accumulated"]


def test_one_tensor_as_two_arguments():
    opt = GraphoptModule(of(lambda self, x, y: x * 2 + y))
    x = torch.ones(3)
    assert opt(x, x).tolist() == [3, 3, 3]
    assert opt(x, 2 * x).tolist() == [4, 4, 4]


def test_writes_to_inputs_and_buffers(twin):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(3))

        def forward(self, x):
            x.relu_().mul_(2)
            self.count.add_(x.sum(0))
            return F.relu(x + 1, inplace=True) * self.count.fill_(2.0)

    twin(Net(), torch.randn(2, 3))


def test_a_default_of_none_may_be_given_later():
    opt = GraphoptModule(of(lambda self, x, y=None: x if y is None else x + y))
    x = torch.ones(2)
    assert opt(x).tolist() == [1, 1]
    assert opt(x, x).tolist() == [2, 2]
    assert opt(x, y=x).tolist() == [2, 2]


class Box:
    """A class unknown to torch, in a result."""

    def __init__(self, items):
        self.items = items


def test_an_unregistered_class_in_the_result():
    opt = GraphoptModule(of(lambda self, x: (x * 2, Box([x + 1, "a"]))))
    for x in (torch.ones(2), torch.zeros(2)):
        y, box = opt(x)
        assert torch.equal(y, x * 2)
        assert type(box) is Box
        assert torch.equal(box.items[0], x + 1)


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    scale: float = 2.0


def test_structured_arguments_by_key():
    opt = GraphoptModule(of(lambda self, batch: batch["x"].x * batch["x"].scale + batch["y"][0]))
    x = torch.ones(2)
    assert opt({"x": Batch(x), "y": [x]}).tolist() == [3, 3]
    assert opt({"y": [x], "x": Batch(x, 5.0)}).tolist() == [6, 6]


@pytest.mark.parametrize("names", [("graph", "code"), ("_store", "source"), ("entry", "body")])
def test_submodules_with_names_of_graph_modules(twin, names):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            for name in names:
                self.add_module(name, nn.Linear(3, 3))

        def forward(self, x):
            for name in names:
                x = self._modules[name](x)
            return x

    opt = twin(Net(), torch.randn(2, 3))
    assert list(opt.state_dict()) == [f"{n}.{p}" for n in names for p in ("weight", "bias")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_ambient_autocast_is_a_part_of_the_key(dtype):
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    opt = GraphoptModule(model)
    x = torch.randn(2, 4)
    for enabled in (False, True, False, True):
        with torch.autocast("cpu", dtype, enabled=enabled):
            want, got = model(x), opt(x)
        assert got.dtype is want.dtype
        torch.testing.assert_close(got, want)


def test_inference_mode_then_training():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    opt = GraphoptModule(model)
    x = torch.randn(2, 4)
    with torch.inference_mode():
        assert opt(x).is_inference()
    assert opt(x).requires_grad
    opt(x).sum().backward()
    assert model[0].weight.grad is not None


def test_inner_no_grad_and_detach(twin):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            with torch.no_grad():
                target = self.a(x)
            return self.b(x) - target + self.a(x).detach()

    twin(Net(), torch.randn(2, 3))


def test_a_second_differentiation_is_right_or_refused():
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    opt = GraphoptModule(model)
    for net in (model, opt):
        x = torch.ones(1, 3, requires_grad=True)
        (g,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        g.square().sum().backward()
        if net is model:
            want = x.grad
    torch.testing.assert_close(x.grad, want)


def test_versions_do_not_matter():
    model = nn.Linear(3, 3)
    opt = GraphoptModule(model)
    x = torch.ones(1, 3)
    opt(x)
    for write in (
        lambda w: w.data.add_(1),
        lambda w: w.detach().numpy().fill(3),
        lambda w: torch.optim.SGD([w], 0.1, fused=True).step(),
    ):
        model.weight.grad = torch.ones(3, 3)
        write(model.weight)
        assert torch.equal(opt(x), model(x))


def test_sizes_are_guarded():
    model = of(lambda self, x: x.view(x.shape[0], -1).mean(0) * x.shape[0])
    opt = GraphoptModule(model)
    for rows in (4, 7, 1, 4, 9):
        x = torch.randn(rows, 3)
        torch.testing.assert_close(opt(x), model(x))


def test_python_state_that_a_forward_writes_is_refused():
    def forward(self, x):
        self.calls += 1
        return x

    with pytest.raises(CaptureError, match="assigns the attribute 'calls'"):
        GraphoptModule(of(forward, calls=0))(torch.ones(1))


def test_the_refused_run_with_fallback():
    model = of(lambda self, x: Straight.apply(x) * 2)
    opt = GraphoptModule(model, Settings(on_error="fallback"))
    x = torch.full((3,), 1.4, requires_grad=True)
    with pytest.warns(GraphoptWarning, match=r"autograd\.Function"):
        y = opt(x)
    y.sum().backward()
    assert x.grad.tolist() == [2, 2, 2]


def test_a_model_in_eager_is_untouched_by_a_capture():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.0))
    other = copy.deepcopy(model)
    GraphoptModule(model).capture((torch.randn(4, 3),))
    x = torch.randn(4, 3)
    assert torch.equal(model(x), other(x))
    assert torch.equal(model[1].running_mean, other[1].running_mean)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers(twin, kind):
    twin(kind(3, 4, 2, batch_first=True), torch.randn(2, 5, 3))


def test_a_transformer_encoder_that_eager_packs_is_refused():
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    opt = GraphoptModule(model)
    x = torch.randn(2, 4, 8)
    mask = torch.tensor([[False, False, True, True], [False] * 4])
    torch.testing.assert_close(opt(x), model(x))
    torch.testing.assert_close(
        opt(x, src_key_padding_mask=mask), model(x, src_key_padding_mask=mask)
    )
    with torch.no_grad(), pytest.raises(CaptureError, match="nested tensors"):
        opt(x, src_key_padding_mask=mask)


def test_a_setting_that_a_forward_decides_stays_as_in_eager():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.config = Record()
            self.config.kind = None

        def forward(self, x):
            if self.config.kind is None:
                self.config.kind = "double" if x.dim() == 2 else "triple"
            return x * (2 if self.config.kind == "double" else 3)

    model = Net()
    opt = GraphoptModule(model)
    assert opt(torch.ones(1, 1)).item() == 2
    assert model.config.kind == "double"
    assert opt(torch.ones(1)).item() == 2
    model.config.kind = "triple"
    assert opt(torch.ones(1)).item() == 3
