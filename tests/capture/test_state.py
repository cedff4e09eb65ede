"""State that changes between calls, and memory: what is shared, kept and let go."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import graphopt
from graphopt.capture import capture
from graphopt.errors import CaptureError
from graphopt.module import GraphoptModule

pytestmark = pytest.mark.filterwarnings("ignore::graphopt.errors.GraphoptWarning")
X = torch.tensor([[0.5, -1.0, 2.0], [1.5, 0.0, -3.0]])


def of(forward, **attributes):
    model = type("Of", (nn.Module,), {"forward": forward})()
    for name, value in attributes.items():
        setattr(model, name, value)
    return model


def parametrize(m):
    nn.utils.parametrizations.weight_norm(m)


def unparametrize(m):
    parametrize(m)
    nn.utils.parametrize.remove_parametrizations(m, "weight")


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.load_state_dict(nn.Linear(3, 3).state_dict()),
        lambda m: m.load_state_dict(nn.Linear(3, 3).state_dict(), assign=True),
        lambda m: setattr(m.weight, "data", torch.ones(3, 3)),
        lambda m: m.weight.data.mul_(2),
        lambda m: m.weight.detach().numpy().fill(2),
        lambda m: m.requires_grad_(False),
        lambda m: m.requires_grad_(False).requires_grad_(True),
        lambda m: setattr(m, "weight", nn.Parameter(torch.rand(5, 3))) or setattr(m, "bias", None),
        parametrize,
        unparametrize,
        lambda m: m.to(torch.bfloat16).to(torch.float32),
        lambda m: nn.init.zeros_(m.weight),
    ],
)
def test_a_change_of_state_is_seen(change):
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    opt = graphopt.optimize(model, X)
    opt(X)
    change(model)
    want, got = model(X), opt(X)
    torch.testing.assert_close(got, want)
    assert got.requires_grad == want.requires_grad
    if want.requires_grad:
        names = [n for n, _ in model.named_parameters()]
        wanted = torch.autograd.grad(want.sum(), list(model.parameters()))
        for name, a, b in zip(
            names, torch.autograd.grad(got.sum(), list(model.parameters())), wanted, strict=True
        ):
            torch.testing.assert_close(a, b, msg=name)


def test_another_dtype_and_back():
    opt = graphopt.optimize(nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)), X)
    assert opt.to(torch.bfloat16)(X.bfloat16()).dtype is torch.bfloat16
    assert opt.double()(X.double()).dtype is torch.float64
    assert opt.float()(X).dtype is torch.float32


def test_copies_stand_alone():
    model = nn.Sequential(nn.Linear(3, 3), nn.GELU())
    opt = graphopt.optimize(model, X)
    file = io.BytesIO()
    torch.save(opt, file)
    file.seek(0)
    want = model(X)
    copies = (
        copy.deepcopy(opt),
        pickle.loads(pickle.dumps(opt)),
        torch.load(file, weights_only=False),
    )
    with torch.no_grad():
        model[0].weight.zero_()
    for other in copies:
        torch.testing.assert_close(other(X), want)


def test_nothing_keeps_the_example_inputs():
    x = torch.ones(2, 3)
    seen = weakref.ref(x)
    opt = graphopt.optimize(nn.Linear(3, 3), x)
    del x
    gc.collect()
    assert seen() is None
    y = torch.ones(4, 3)
    seen = weakref.ref(y)
    out = weakref.ref(opt(y))
    del y
    gc.collect()
    assert seen() is None
    assert out() is None


def test_nothing_keeps_the_model():
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    opt = graphopt.optimize(model, X)
    opt(X)
    kept = [weakref.ref(m) for m in (model, model[0].weight, opt)]
    del model, opt
    gc.collect()
    assert [ref() for ref in kept] == [None, None, None]


def test_an_unused_parameter_has_no_gradient(twin):
    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            return self.used(x)

    twin(Part(), X)


def test_strides_are_eagers(twin):
    def forward(self, x):
        return x.t(), x.t() * 2, x[:, 1:] + 0, x.t().relu(), F.layer_norm(x.t(), (2,))

    twin(of(forward), X.clone())


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[:, 0],
        lambda x: x.t(),
        lambda x: x.view(-1)[2:5],
        lambda x: x.chunk(3, 1)[1],
        lambda x: x,
        lambda x: x.unbind()[1].unsqueeze(0),
    ],
)
@pytest.mark.parametrize("where", ["input", "buffer"])
def test_a_view_of_written_memory_shares_it(view, where):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("kept", torch.zeros(2, 3))

        def forward(self, x):
            memory = x if where == "input" else self.kept
            result = view(memory)
            memory.add_(1)
            return result

    model = Net()
    opt = GraphoptModule(model)
    x = torch.zeros(2, 3)
    y = opt(x)
    memory = x if where == "input" else model.kept
    assert memory.eq(1).all()
    y.fill_(7)
    assert torch.equal(view(memory), y)
    assert y.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()


class Buffered(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 3)
        self.register_buffer("kept", torch.zeros(3))


def test_buffers_that_take_values_with_gradients(twin):
    class Assigns(Buffered):
        def forward(self, x):
            h = self.lin(x)
            self.kept = self.kept * 0.9 + h.mean(0).detach() * 0.1
            return h * self.kept

    twin(Assigns(), X)


@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 5)])
def test_a_cumulative_batch_norm(twin, shape):
    opt = twin(nn.Sequential(nn.BatchNorm1d(3, momentum=None), nn.ReLU()), torch.randn(shape))
    assert opt[0].num_batches_tracked == 2
    assert len(opt._store.entries()) == 3


def test_a_spectral_norm_writes_its_vectors(twin):
    twin(nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4)), X)


def test_parameters_of_an_unregistered_module_are_trained():
    inner = nn.Linear(3, 3)
    weight = nn.Parameter(torch.ones(3))
    model = of(lambda self, x: self.parts[0](x) * self.parts[1], parts=[inner, weight])
    opt = GraphoptModule(model)
    opt(X).sum().backward()
    assert inner.weight.grad is not None
    assert weight.grad is not None
    inner.weight = nn.Parameter(torch.zeros(3, 3))
    assert torch.equal(opt(X), model(X))


def test_nothing_changes_in_a_capture():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 3))
    before = copy.deepcopy(model.state_dict())
    dicts = [dict(m.__dict__) for m in model.modules()]
    capture(model, (X,))
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())
    for then, module in zip(dicts, model.modules(), strict=True):
        assert then.keys() == module.__dict__.keys()
        assert all(module.__dict__[n] is v for n, v in then.items())
    assert all(p.grad is None for p in model.parameters())


def test_a_wrong_call_names_the_argument_and_writes_nothing():
    class Net(Buffered):
        def forward(self, x, y):
            x.add_(1)
            self.kept.add_(1)
            return x @ y

    model = Net()
    opt = GraphoptModule(model)
    opt(torch.zeros(2, 3), torch.ones(3, 2))
    x = torch.zeros(2, 3)
    with pytest.raises(
        CaptureError, match=r"(?s)\[2, 3\] X \[4, 2\].*shape of y .* \(3, 2\) to \(4, 2\)"
    ):
        opt(x, torch.ones(4, 2))
    with pytest.raises(Exception, match=r"(?i)double"):
        opt(x, torch.ones(3, 2).double())
    with pytest.raises(
        TypeError, match=r"Net.forward\(\) missing 1 required positional argument: 'y'"
    ):
        opt(x)
    with pytest.raises(TypeError, match="unexpected keyword argument 'z'"):
        opt(x, torch.ones(3, 2), z=1)
    assert x.eq(0).all()
    assert model.kept.eq(1).all()
