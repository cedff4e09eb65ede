"""batch_norm and fold_batch_norm against the eager spelling, forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from graphopt.errors import OptionError
from graphopt.kernels import registry

G = torch.ops.graphopt
OPS = ["batch_norm", "fold_batch_norm"]


@pytest.mark.parametrize("shape", [(6, 3), (4, 3, 5), (2, 3, 4, 5)])
@pytest.mark.parametrize("momentum", [0.1, 0.25, 1.0])
@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm_is_eagers(shape, momentum, affine):
    x = torch.randn(shape, requires_grad=True)
    weight, bias = (torch.randn(3, requires_grad=True) if affine else None for _ in range(2))
    mean, var = torch.randn(3), torch.rand(3)
    y, new_mean, new_var = G.batch_norm(x, weight, bias, mean.clone(), var.clone(), momentum, 1e-5)
    ours = torch.autograd.grad(y.sin().sum(), [t for t in (x, weight, bias) if t is not None])
    expected = F.batch_norm(x, mean, var, weight, bias, True, momentum, 1e-5)
    theirs = torch.autograd.grad(
        expected.sin().sum(), [t for t in (x, weight, bias) if t is not None]
    )
    for a, b in zip((y, new_mean, new_var, *ours), (expected, mean, var, *theirs), strict=True):
        assert torch.equal(a, b)


def test_batch_norm_writes_no_buffer_and_its_statistics_carry_no_gradient():
    x = torch.randn(4, 3, requires_grad=True)
    mean, var = torch.zeros(3), torch.ones(3)
    _, new_mean, new_var = G.batch_norm(x, None, None, mean, var, 0.1, 1e-5)
    assert mean.eq(0).all()
    assert var.eq(1).all()
    assert mean._version == var._version == 0
    assert not new_mean.requires_grad
    assert not new_var.requires_grad


def test_batch_norm_of_half_with_float32_statistics():
    x = torch.randn(8, 3, 4, dtype=torch.bfloat16, requires_grad=True)
    weight, bias = torch.rand(3), torch.rand(3)
    y, mean, _ = G.batch_norm(x, weight, bias, torch.zeros(3), torch.ones(3), 0.1, 1e-5)
    y.float().square().sum().backward()
    assert (y.dtype, mean.dtype, x.grad.dtype) == (torch.bfloat16, torch.float32, torch.bfloat16)


def layer_of(kind):
    if kind == "linear":
        return torch.nn.Linear(5, 4), torch.randn(7, 5), torch.nn.BatchNorm1d(4)
    if kind == "conv":
        return torch.nn.Conv2d(3, 4, 3), torch.randn(2, 3, 6, 6), torch.nn.BatchNorm2d(4)
    if kind == "grouped":
        return torch.nn.Conv1d(4, 4, 3, groups=2), torch.randn(2, 4, 6), torch.nn.BatchNorm1d(4)
    return torch.nn.ConvTranspose2d(3, 4, 3), torch.randn(2, 3, 6, 6), torch.nn.BatchNorm2d(4)


def apply_folded(layer, x, weight, bias):
    return torch.func.functional_call(layer, {"weight": weight, "bias": bias}, (x,))


@pytest.mark.parametrize("kind", ["linear", "conv", "grouped", "transposed"])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("affine", [True, False])
def test_folded_layer_does_what_layer_and_norm_do(kind, with_bias, affine):
    layer, x, norm = layer_of(kind)
    layer, x = layer.double(), x.double()
    norm = type(norm)(4, affine=affine).double().eval()
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2)
    for p in norm.parameters():
        torch.nn.init.normal_(p)
    bias = layer.bias if with_bias else None
    if not with_bias:
        torch.nn.init.zeros_(layer.bias)
    leaves = [t for t in (layer.weight, bias, norm.weight, norm.bias) if t is not None]
    folded = G.fold_batch_norm(
        layer.weight, bias, norm.weight, norm.bias, norm.running_mean, norm.running_var, norm.eps,
        kind == "transposed",
    )  # fmt: skip
    y = apply_folded(layer, x, *folded)
    expected = norm(layer(x))
    torch.testing.assert_close(y, expected)
    ours = torch.autograd.grad(y.sin().sum(), leaves)
    theirs = torch.autograd.grad(expected.sin().sum(), leaves)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_fold_computes_in_float32_and_returns_the_weights_dtype():
    weight = torch.randn(4, 8).bfloat16()
    gamma, beta, mean = torch.randn(3, 4).unbind()
    var = torch.rand(4) + 0.5
    folded, bias = G.fold_batch_norm(weight, None, gamma, beta, mean, var, 1e-5)
    scale = gamma / torch.sqrt(var + 1e-5)
    assert folded.dtype == bias.dtype == torch.bfloat16
    torch.testing.assert_close(folded, (weight.float() * scale[:, None]).bfloat16())
    torch.testing.assert_close(bias, (beta - mean * scale).bfloat16())


def test_fold_refuses_statistics_of_other_channels():
    one = torch.ones(3)
    with pytest.raises(OptionError, match=r"statistics \(3,\) for 4 channels"):
        G.fold_batch_norm(torch.ones(4, 3), None, None, None, one, one, 1e-5)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", OPS)
def test_no_graph_without_gradients(check, name, mode):
    op = registry()[name]
    sample = check.leaves(next(iter(op.samples(torch.device("cpu")))))
    with mode():
        outputs = op.overload(*sample.args)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    assert all(out.grad_fn is None for out in outputs)


@pytest.mark.parametrize("name", OPS)
def test_fake_tensors_with_gradients(check, name):
    op = registry()[name]
    for sample in op.samples(torch.device("cpu")):
        real = op.overload(*sample.args)
        with FakeTensorMode() as mode:
            args = [
                mode.from_tensor(a).requires_grad_() if isinstance(a, torch.Tensor) else a
                for a in sample.args
            ]
            fake = op.overload(*args)
            real, fake = (o if isinstance(o, tuple) else (o,) for o in (real, fake))
            fake[0].sum().backward()
        assert args[0].grad.shape == args[0].shape
        for a, b in zip(real, fake, strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)


POINTWISE = {
    "bias_act": lambda x, v, s: G.bias_act(x, v, "gelu"),
    "softcap": lambda x, v, s: G.softcap(x, 3.0),
    "glu": lambda x, v, s: G.glu(*x.chunk(2, dim=-1), "silu"),
    "dropout": lambda x, v, s: G.dropout(x, 0.3, s, 1),
    "dropout_add": lambda x, v, s: G.dropout_add(x, x.sin(), 0.3, s, 1, bias=v),
    "rope": lambda x, v, s: G.rope(x, v, v),
    "batch_norm": lambda x, v, s: G.batch_norm(x, v, v, v, v, 0.1, 1e-5)[0],
    "fold_batch_norm": lambda x, v, s: G.fold_batch_norm(x.t(), v, v, v, v, v * v, 1e-5)[0],
}


@pytest.mark.parametrize("name", POINTWISE)
def test_symbolic_shapes_forward_and_backward(name):
    x, v = torch.randn(6, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    seed = torch.tensor(3)

    def step(x, v, seed):
        y = POINTWISE[name](x, v, seed)
        return y, *torch.autograd.grad(y.sum(), (x, v), allow_unused=True)

    symbolic = make_fx(step, tracing_mode="symbolic")(x, v, seed)
    wide, wide_v = torch.randn(9, 10, requires_grad=True), torch.randn(10, requires_grad=True)
    for ours, theirs in zip(symbolic(wide, wide_v, seed), step(wide, wide_v, seed), strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs)


def test_a_folded_convolution_is_no_further_from_float64_than_eager() -> None:
    """With scale and shift in float32 the mean ratio of the errors is 1.05 here."""
    generator = torch.Generator().manual_seed(0)
    logs = []
    for _ in range(100):
        x = torch.randn(2, 8, 12, 12, generator=generator)
        weight = torch.randn(8, 8, 1, 1, generator=generator)
        gamma, var = (torch.rand(8, generator=generator) + 0.5 for _ in range(2))
        beta, mean = (torch.randn(8, generator=generator) for _ in range(2))

        def eager(dtype: torch.dtype, given: tuple[torch.Tensor, ...]) -> torch.Tensor:
            x, weight, gamma, var, beta, mean = (t.to(dtype) for t in given)
            y = F.conv2d(x, weight)
            return F.batch_norm(y, mean, var, gamma, beta, False, 0.0, 1e-5)

        given = (x, weight, gamma, var, beta, mean)
        exact = eager(torch.float64, given)
        folded = F.conv2d(x, *G.fold_batch_norm(weight, None, gamma, beta, mean, var, 1e-5))
        errors = [(y.double() - exact).norm() for y in (folded, eager(torch.float32, given))]
        logs.append((errors[0] / errors[1]).log())
    assert torch.stack(logs).mean().exp() < 1.0
