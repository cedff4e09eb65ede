"""bias_act and softcap against float64: modes, sizes, dtypes, layouts, extremes, autograd."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from graphopt.errors import OptionError, UnsupportedError
from graphopt.kernels import Sample, _pointwise, registry
from graphopt.kernels._activations import NAMES

G = torch.ops.graphopt
EAGER = {
    "none": lambda x: x * 1,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SAMPLES = [
    pytest.param(name, i, id=f"{name}-{i}")
    for name in ("bias_act", "softcap")
    for i, _ in enumerate(registry()[name].samples(torch.device("cpu")))
]


def make(device, rows, cols, dtype=torch.float32, bias_dtype=torch.float32, spread=2.0):
    x = (torch.randn(rows, cols, device=device) * spread).to(dtype)
    return x, torch.randn(cols, device=device).to(bias_dtype)


@pytest.mark.parametrize(("name", "index"), SAMPLES)
def test_every_mode(backend, check, name, index):
    sample = next(itertools.islice(registry()[name].samples(backend.device), index, None))
    check.against_float64(registry()[name], sample, factor=2.0)


@pytest.mark.parametrize("activation", NAMES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_every_activation_is_eagers(backend, check, activation, dtype):
    x, bias = make(backend.device, 7, 200, dtype)
    x, bias = x.requires_grad_(), bias.to(dtype).requires_grad_()
    exact = [t.detach().double().requires_grad_() for t in (x, bias)]
    dy = torch.randn(7, 200, device=backend.device).to(dtype)
    y = G.bias_act(x, bias, activation)
    y.backward(dy)
    expected = EAGER[activation](exact[0] + exact[1])
    expected.backward(dy.double())
    eps = 4 * torch.finfo(dtype).eps  # eager's own gelu_tanh is 6 roundings off in float32
    check.near("y", y, expected, eps)
    check.near("dx", x.grad, exact[0].grad, eps)
    check.near("dbias", bias.grad, exact[1].grad, eps)


@pytest.mark.parametrize("rows", [1, 3, 19])
@pytest.mark.parametrize("cols", [1, 7, 8, 17, 100, 1024, 2500])
def test_sizes(triton_backend, check, rows, cols):
    x, bias = make(triton_backend.device, rows, cols)
    check.against_float64(registry()["bias_act"], Sample((x, bias, "silu")), factor=2.0)


@pytest.mark.parametrize("shape", [(), (1,), (7,), (5000,), (2, 3, 4, 16), (3, 1)])
@pytest.mark.parametrize("name", ["bias_act", "softcap"])
def test_ranks_without_bias(backend, check, name, shape):
    x = torch.randn(shape, device=backend.device)
    args = (x, None, "gelu") if name == "bias_act" else (x, 2.0)
    check.against_float64(registry()[name], Sample(args), factor=2.0)


@pytest.mark.parametrize("shape", [(0, 8), (5, 0), (0,), (2, 0, 8)])
def test_empty(backend, shape):
    x = torch.ones(shape, device=backend.device, requires_grad=True)
    bias = torch.ones(shape[-1], device=backend.device, requires_grad=True)
    (G.bias_act(x, bias, "relu").sum() + G.softcap(x, 3.0).sum()).backward()
    assert x.grad.shape == shape
    assert bias.grad.tolist() == [0.0] * shape[-1]


@pytest.mark.parametrize(("dtype", "bias_dtype"), list(itertools.product(DTYPES, DTYPES)))
def test_dtype_mix(backend, check, dtype, bias_dtype):
    x, bias = make(backend.device, 5, 24, dtype, bias_dtype)
    assert G.bias_act(x, bias, "gelu").dtype == torch.promote_types(dtype, bias_dtype)
    check.against_float64(registry()["bias_act"], Sample((x, bias, "gelu")), factor=2.0)


@pytest.mark.parametrize("out_dtype", DTYPES)
def test_out_dtype_is_the_only_rounding(backend, out_dtype):
    x, bias = make(backend.device, 5, 24, torch.bfloat16)
    if backend.interpreted and out_dtype == torch.bfloat16:
        pytest.skip("the interpreter's cast to bfloat16 truncates")
    y = G.bias_act(x, bias, "none", out_dtype=out_dtype)
    assert torch.equal(y, (x.float() + bias).to(out_dtype))


def test_float64_computes_in_float64(backend):
    x, bias = make(backend.device, 5, 24, torch.float64)
    torch.testing.assert_close(G.bias_act(x, bias, "silu"), F.silu(x + bias), rtol=1e-14, atol=0)


LAYOUTS = {
    "rows of a wider matrix": lambda r, c: torch.randn(r, 3 * c)[:, c : 2 * c],
    "every second row": lambda r, c: torch.randn(2 * r, c)[::2],
    "transposed": lambda r, c: torch.randn(c, r).t(),
    "one row expanded": lambda r, c: torch.randn(1, c).expand(r, c),
    "all one value": lambda r, c: torch.randn(()).expand(r, c),
    "misaligned": lambda r, c: torch.randn(r * c + 1)[1:].view(r, c),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("with_bias", [True, False])
def test_layouts_of_inputs_and_gradients(triton_backend, check, layout, with_bias):
    x, dy = (LAYOUTS[layout](6, 20).to(triton_backend.device) for _ in range(2))
    bias = torch.randn(40, device=triton_backend.device)[::2] if with_bias else None
    check.against_float64(registry()["bias_act"], Sample((x, bias, "gelu")), (dy,), factor=2.0)


EXTREMES = [0.0, -0.0, 1e-38, -1e-38, 1e-6, -1e-6, 20, -20, 88, -88, 3e4, -3e4]
SPECIAL = [math.inf, -math.inf, math.nan]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("activation", NAMES)
def test_extremes_as_eager(triton_backend, activation, dtype):
    values = EXTREMES + SPECIAL
    if activation == "gelu":
        values = [*EXTREMES, -math.inf, math.nan]  # eager's gelu(inf) depends on the device
    x = torch.tensor(values, device=triton_backend.device, dtype=dtype).requires_grad_()
    eager = x.detach().clone().requires_grad_()
    y, expected = G.bias_act(x, None, activation), EAGER[activation](eager)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    (slope,) = torch.autograd.grad(expected, eager, torch.ones_like(y))
    eps = torch.finfo(dtype).eps
    # atol: a quotient by more than 2^126 may come out as 0 on the GPU.
    torch.testing.assert_close(y, expected, rtol=4 * eps, atol=1e-36, equal_nan=True)
    torch.testing.assert_close(dx, slope, rtol=4 * eps, atol=2 * eps, equal_nan=True)


def test_relu_at_zero_and_nan(backend):
    x = torch.tensor([0.0, -0.0, math.nan, 1.0], device=backend.device, requires_grad=True)
    y = G.bias_act(x, None, "relu")
    y.backward(torch.full_like(y, 3.0))
    assert x.grad.tolist() == [0.0, 0.0, 3.0, 3.0]
    assert y[2].isnan()


def test_a_dead_relu_stops_even_an_infinite_gradient(backend):
    x = torch.tensor([-1.0, 1.0], device=backend.device, requires_grad=True)
    G.bias_act(x, None, "relu").backward(torch.tensor([math.inf, 2.0], device=backend.device))
    assert x.grad.tolist() == [0.0, 2.0]


@pytest.mark.parametrize("activation", ["silu", "tanh", "sigmoid", "gelu_tanh"])
def test_float32_is_accurate_over_the_whole_range(triton_backend, activation):
    x = torch.linspace(-30, 30, 20001, device=triton_backend.device)
    exact = EAGER[activation](x.double())
    ours = (G.bias_act(x, None, activation).double() - exact).abs()
    eager = (EAGER[activation](x).double() - exact).abs()
    # Relative to the value itself, where eager keeps it: also in the tails.
    bound = 1.5e-6 * exact.abs() + 2 * eager.max() * (exact.abs() < 1e-30)
    assert (ours <= torch.maximum(bound, 4 * eager)).all()


def test_tanh_of_small_values_keeps_its_digits(triton_backend):
    x = torch.logspace(-12, 0, 500, device=triton_backend.device)
    y = G.bias_act(x, None, "tanh").double()
    assert ((y / torch.tanh(x.double()) - 1).abs() < 5e-7).all()


@pytest.mark.parametrize("cap", [30.0, 0.5, -2.0])
def test_softcap_is_bounded_and_the_identity_near_zero(backend, cap):
    x = torch.tensor([-3e38, -1e3, 1e-9, 1e3, 3e38], device=backend.device)
    y = G.softcap(x, cap)
    assert y[2] == x[2]
    assert y.abs().max() == abs(cap)
    assert not y.isnan().any()


def test_equal_runs_give_equal_bits(triton_backend):
    x, bias = make(triton_backend.device, 300, 24)
    bias.requires_grad_()
    dy = torch.randn_like(x)
    first, second = (
        torch.autograd.grad(G.bias_act(x, bias, "gelu"), bias, dy)[0] for _ in range(2)
    )
    assert torch.equal(first, second)


def test_bias_gradient_is_summed_in_float32(triton_backend, check):
    x, bias = make(triton_backend.device, 4000, 8, torch.bfloat16, torch.float32)
    x = torch.ones_like(x)
    bias = torch.zeros_like(bias).requires_grad_()
    (dbias,) = torch.autograd.grad(G.bias_act(x, bias, "none").sum(), bias)
    assert dbias.tolist() == [4000.0] * 8  # bfloat16 would stop counting at 256


@pytest.mark.parametrize("wanted", ["x", "bias"])
def test_only_the_wanted_gradient(backend, wanted):
    tensors = dict(zip(("x", "bias"), make(backend.device, 9, 8), strict=True))
    both = {n: t.clone().requires_grad_() for n, t in tensors.items()}
    G.bias_act(*both.values(), "silu").sin().sum().backward()
    alone = {n: t.clone().requires_grad_(n == wanted) for n, t in tensors.items()}
    G.bias_act(*alone.values(), "silu").sin().sum().backward()
    assert torch.equal(alone[wanted].grad, both[wanted].grad)
    assert all(t.grad is None for n, t in alone.items() if n != wanted)


def test_saved_are_the_inputs_alone(backend):
    x, bias = (t.requires_grad_() for t in make(backend.device, 4, 8))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda t: t):
        G.bias_act(x, bias, "gelu")
    assert [t.data_ptr() for t in saved] == [x.data_ptr(), bias.data_ptr()]


@pytest.mark.parametrize("activation", NAMES)
def test_result_never_shares_memory_with_the_input(backend, activation):
    x = torch.randn(3, 8, device=backend.device)
    y = G.bias_act(x, None, activation)
    assert y.data_ptr() != x.data_ptr()
    leaf = x.clone().requires_grad_()
    dy = torch.randn_like(x)
    (dx,) = torch.autograd.grad(G.bias_act(leaf, None, activation), leaf, dy)
    assert dx.data_ptr() != dy.data_ptr()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_no_graph_without_gradients(backend, mode):
    x, bias = (t.requires_grad_() for t in make(backend.device, 4, 8))
    with mode():
        y, capped = G.bias_act(x, bias, "silu"), G.softcap(x, 1.0)
    assert y.grad_fn is None
    assert capped.grad_fn is None
    assert torch.equal(y, G.bias_act(x, bias, "silu"))


@pytest.mark.parametrize("call", [lambda x: G.bias_act(x, None, "gelu"), lambda x: G.softcap(x, 2)])
def test_second_derivative_is_refused(backend, call):
    x = torch.randn(3, 8, device=backend.device, requires_grad=True)
    (slope,) = torch.autograd.grad(call(x).sum(), x, create_graph=True)
    with pytest.raises(UnsupportedError, match="double backward of graphopt::"):
        slope.sum().backward()


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda x: G.bias_act(x, None, "swish"), OptionError, "unknown activation"),
        (lambda x: G.bias_act(x, x[0, :4], "relu"), OptionError, r"bias \(4,\) for x \(2, 8\)"),
        (lambda x: G.bias_act(x, x, "relu"), OptionError, r"bias \(2, 8\)"),
        (lambda x: G.bias_act(x.int(), None, "relu"), UnsupportedError, "torch.int32"),
        (lambda x: G.softcap(x, 0.0), OptionError, "cap 0"),
    ],
)
def test_errors_say_what_is_wrong(backend, call, error, text):
    with pytest.raises(error, match=text):
        call(torch.ones(2, 8, device=backend.device))


@pytest.mark.parametrize("name", ["bias_act", "softcap"])
def test_opcheck(check, name):
    op = registry()[name]
    sample = check.leaves(next(iter(op.samples(torch.device("cpu")))))
    torch.library.opcheck(op.overload, sample.args, sample.kwargs)


@given(st.integers(1, 5000), st.integers(1, 5000), st.sampled_from([2048, 4096]))
def test_tiles_cover_every_value_once(count, cols, values):
    tiles = _pointwise.tile(count, cols, values)
    assert tiles.down * tiles.rows_a_tile >= count > (tiles.down - 1) * tiles.rows_a_tile
    assert tiles.across * tiles.cols_a_tile >= cols > (tiles.across - 1) * tiles.cols_a_tile
    assert tiles.cols_a_tile >= 8
    assert tiles.rows_a_tile * tiles.cols_a_tile <= max(values, 8 * tiles.rows_a_tile)


@given(st.data())
def test_flat_walk_needs_contiguous_tensors(data):
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    x = torch.randn(shape)
    wide = torch.randn([*shape[:-1], shape[-1] + 1])[..., :-1]
    views, count, cols = _pointwise.lay_out(x, x, flat=True)
    assert count * cols == x.numel()
    views, count, cols = _pointwise.lay_out(x, wide, flat=True)
    assert cols == shape[-1] or all(v.tensor.is_contiguous() for v in views)


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ["relu", "gelu", "silu"])
def test_real_size(check, activation):
    device = torch.device("cuda")
    x, bias = make(device, 4096, 4096, torch.bfloat16)
    sample = Sample((x, bias, activation), {"out_dtype": torch.bfloat16})
    check.against_float64(registry()["bias_act"], sample, factor=2.0)


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements():
    rows = 2**31 // 4096 + 8
    x = torch.zeros(rows, 4096, device="cuda", dtype=torch.bfloat16)
    x[-1] = 2.0
    bias = torch.ones(4096, device="cuda", dtype=torch.bfloat16)
    assert G.bias_act(x, bias, "relu")[-1].eq(3.0).all()
    assert G.bias_act(x, None, "relu")[-1].eq(2.0).all()
