"""The norm family against its reference in float64: modes, sizes, dtypes, layouts, extremes."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn import functional as F

from graphopt.kernels import Sample, registry

NORMS = ["layer_norm", "add_layer_norm", "rms_norm", "add_rms_norm"]


def sample_of(name, x, residual, weight, bias, **options):
    """Arguments in the order of the operator."""
    inputs = (x, residual) if name.startswith("add_") else (x,)
    vectors = (weight,) if name.endswith("rms_norm") else (weight, bias)
    return Sample((*inputs, *vectors, 1e-5), options)


def make(name, rows, cols, device, dtype=torch.float32, weight_dtype=torch.float32, **options):
    x, residual = (torch.randn(rows, cols, device=device).to(dtype) for _ in range(2))
    weight, bias = (torch.randn(cols, device=device).to(weight_dtype) for _ in range(2))
    return sample_of(name, x, residual, weight, bias, **options)


SAMPLES = [
    pytest.param(name, i, id=f"{name}-{i}")
    for name in NORMS
    for i, _ in enumerate(registry()[name].samples(torch.device("cpu")))
]


@pytest.mark.parametrize(("name", "index"), SAMPLES)
def test_every_mode(backend, check, name, index):
    op = registry()[name]
    sample = next(itertools.islice(op.samples(backend.device), index, None))
    if sample.kwargs.get("round_dtype") or sample.kwargs.get("out_dtype") == torch.bfloat16:
        factor = 2.0**17  # values pass through bfloat16 whatever the outputs' dtypes
        factor = factor if sample.args[0].dtype == torch.float32 else 2.0
    else:
        factor = 2.0 if "activation" in sample.kwargs else 1.0
    check.against_float64(op, sample, factor=factor)


@pytest.mark.parametrize("rows", [1, 3, 33])
@pytest.mark.parametrize("cols", [1, 17, 64, 100, 1000])
@pytest.mark.parametrize("name", NORMS)
def test_sizes(triton_backend, check, name, rows, cols):
    # One column: the gradient is a difference of terms of up to rsqrt(eps) = 316.
    size = 316.0 if cols == 1 else 0.0
    sample = make(name, rows, cols, triton_backend.device)
    check.against_float64(registry()[name], sample, size=size)


@pytest.mark.parametrize("shape", [(0, 8), (5, 0), (0, 0), (2, 0, 8)])
@pytest.mark.parametrize("name", NORMS)
def test_empty(backend, name, shape):
    x, residual = (torch.ones(shape, device=backend.device).requires_grad_() for _ in range(2))
    weight, bias = (torch.ones(shape[-1], device=backend.device).requires_grad_() for _ in range(2))
    outputs = registry()[name].overload(*sample_of(name, x, residual, weight, bias).args)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    sum(out.sum() for out in outputs).backward()
    assert all(out.shape == shape for out in outputs)
    assert x.grad.shape == shape
    assert weight.grad.tolist() == [0.0] * shape[-1]


@pytest.mark.parametrize("shape", [(7,), (2, 3, 4, 16)])
@pytest.mark.parametrize("name", NORMS)
def test_ranks(backend, check, name, shape):
    x, residual = (torch.randn(shape, device=backend.device) for _ in range(2))
    weight, bias = (torch.randn(shape[-1], device=backend.device) for _ in range(2))
    check.against_float64(registry()[name], sample_of(name, x, residual, weight, bias))


DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["add_layer_norm", "rms_norm"])
def test_dtype_mix(backend, check, name, dtype, weight_dtype):
    sample = make(name, 5, 24, backend.device, dtype, weight_dtype)
    if dtype == weight_dtype == torch.float64:
        op = registry()[name]
        outputs, found, grads = check.run(op.overload, check.leaves(sample))
        expected, slopes, _ = check.run(op.reference, check.leaves(sample), grads)
        for ours, theirs in zip((*outputs, *found), (*expected, *slopes), strict=True):
            torch.testing.assert_close(ours, theirs)
    else:
        check.against_float64(registry()[name], sample, factor=2.0)


@pytest.mark.parametrize("residual_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sum_takes_the_promoted_dtype(backend, dtype, residual_dtype):
    x = torch.randn(4, 8, device=backend.device, dtype=dtype)
    residual = torch.randn(4, 8, device=backend.device, dtype=residual_dtype)
    y, total = torch.ops.graphopt.add_rms_norm(x, residual, None, 1e-6)
    assert y.dtype == total.dtype == torch.promote_types(dtype, residual_dtype)
    torch.testing.assert_close(total, x + residual, atol=0.02, rtol=0)


LAYOUTS = {
    "rows of a wider matrix": lambda r, c: torch.randn(r, 3 * c)[:, c : 2 * c],
    "every second row": lambda r, c: torch.randn(2 * r, c)[::2],
    "transposed": lambda r, c: torch.randn(c, r).t(),
    "one row expanded": lambda r, c: torch.randn(1, c).expand(r, c),
    "all one value": lambda r, c: torch.ones(()).expand(r, c),
    "misaligned": lambda r, c: torch.randn(r * c + 1)[1:].view(r, c),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NORMS)
def test_layouts_of_inputs_and_gradients(triton_backend, check, name, layout):
    def tensor():
        return LAYOUTS[layout](6, 20).to(triton_backend.device)

    weight = torch.randn(40, device=triton_backend.device)[::2]
    sample = sample_of(name, tensor(), torch.randn_like(tensor()) + tensor(), weight, weight)
    if layout == "all one value":  # a constant row has no direction to compare gradients in
        sample = sample_of(name, torch.randn(6, 20).to(weight), tensor(), weight, weight)
    grads = tuple(tensor() for _ in range(2 if name.startswith("add_") else 1))
    check.against_float64(registry()[name], sample, grads, factor=2.0)


def test_strided_rows_are_read_without_a_copy():
    from graphopt.kernels._launch import row_view

    x = torch.randn(4, 3, 24)[..., 8:16]
    assert row_view(x).tensor is x
    assert row_view(x).stride == 24


@pytest.mark.parametrize(
    "options", [{}, {"dropout_p": 0.25, "site": 3}, {"activation": "silu"}], ids=str
)
@pytest.mark.parametrize("cols", [100, 264])
@pytest.mark.parametrize("name", NORMS)
def test_rows_wider_than_a_block(triton_backend, narrow_tables, check, name, cols, options):
    if name.startswith("add_") and "activation" in options:
        pytest.skip("add_* have no activation")
    if "dropout_p" in options:
        options = {**options, "seed": torch.tensor(7, device=triton_backend.device)}
    check.against_float64(registry()[name], make(name, 9, cols, triton_backend.device, **options))


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("name", ["layer_norm", "add_layer_norm"])
def test_large_mean(triton_backend, request, name, wide):
    if wide:
        request.getfixturevalue("narrow_tables")
    cols = 512
    x = torch.randn(4, cols, device=triton_backend.device) + 100
    residual = torch.zeros_like(x)
    y = registry()[name].overload(*sample_of(name, x, residual, None, None).args)
    y = y[0] if isinstance(y, tuple) else y
    expected = F.layer_norm(x.double(), (cols,), eps=1e-5)
    # x itself is known to 100 * 2^-24; E[x^2] - E[x]^2 would be off by 1e-3.
    torch.testing.assert_close(y.double(), expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("value", [1e-30, 1e15, 1e25, float("inf"), float("nan"), 0.0])
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_extremes_come_out_as_in_eager(backend, name, value):
    if name == "layer_norm" and value == 1e25:
        pytest.skip("the square overflows: eager's answer differs by device, NaN or 0")
    x = torch.randn(4, 32, device=backend.device)
    x[1] *= value if value == value else 1.0
    x[1, 3] = value
    x[2] = 5.0  # a constant row: variance 0
    if name == "layer_norm":
        expected = F.layer_norm(x, (32,), eps=1e-5)
    else:
        expected = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
    y = registry()[name].overload(*sample_of(name, x, None, None, None).args)
    torch.testing.assert_close(y, expected, atol=1e-5, rtol=1e-4, equal_nan=True)


def test_relu_at_ties_infinity_and_nan(backend):
    x = torch.zeros(1, 8, device=backend.device).requires_grad_()
    bias = torch.tensor([0.0, 1, -1, float("inf"), -float("inf"), float("nan"), 2, 0])
    bias = bias.to(backend.device).requires_grad_()
    y = torch.ops.graphopt.layer_norm(x, None, bias, 1e-5, activation="relu")
    torch.testing.assert_close(y[0], torch.relu(bias), equal_nan=True)
    y.sum().backward()
    (slope,) = torch.autograd.grad(torch.relu(bias).sum(), bias)
    torch.testing.assert_close(bias.grad, slope)


@pytest.mark.parametrize(
    "activation", ["none", "relu", "gelu", "gelu_tanh", "silu", "tanh", "sigmoid"]
)
def test_activations(backend, check, activation):
    sample = make("layer_norm", 4, 24, backend.device, activation=activation)
    check.against_float64(registry()["layer_norm"], sample, factor=2.0)


def test_reference_has_the_bits_of_eager_layer_norm():
    x, weight, bias = torch.randn(33, 100), torch.randn(100), torch.randn(100)
    ours = torch.ops.graphopt.layer_norm(x, weight, bias, 1e-5)
    assert torch.equal(ours, F.layer_norm(x, (100,), weight, bias, 1e-5))


@pytest.mark.parametrize("name", NORMS)
def test_equal_runs_give_equal_bits(triton_backend, check, name):
    sample = check.leaves(make(name, 65, 72, triton_backend.device, torch.bfloat16))
    outputs, found, grads = check.run(registry()[name].overload, sample)
    again, found_again, _ = check.run(registry()[name].overload, sample, grads)
    for first, second in zip((*outputs, *found), (*again, *found_again), strict=True):
        assert torch.equal(first, second)
