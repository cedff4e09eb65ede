"""glu against float64: modes, packed halves, sizes, dtypes, layouts, extremes, autograd."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch.nn import functional as F

from graphopt.errors import OptionError, UnsupportedError
from graphopt.kernels import Sample, registry
from graphopt.kernels.glu import NAMES

G = torch.ops.graphopt
OP = registry()["glu"]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SAMPLES = range(len(list(OP.samples(torch.device("cpu")))))
EAGER = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
}


def packed(device, shape, dtype=torch.float32):
    """The halves of one buffer, as a merged gate and up projection gives them."""
    return torch.randn(*shape[:-1], 2 * shape[-1], device=device).to(dtype).chunk(2, dim=-1)


@pytest.mark.parametrize("index", SAMPLES)
def test_every_mode(backend, check, index):
    check.against_float64(
        OP, next(itertools.islice(OP.samples(backend.device), index, None)), factor=2.0
    )


@pytest.mark.parametrize("activation", NAMES)
def test_forward_is_eagers(backend, check, activation):
    gate, up = packed(backend.device, (5, 33))
    expected = EAGER[activation](gate.double()) * up.double()
    check.near("y", G.glu(gate, up, activation), expected, torch.finfo(torch.float32).eps)


@pytest.mark.parametrize("rows", [1, 3, 19])
@pytest.mark.parametrize("cols", [1, 7, 17, 1024, 2500])
def test_sizes(triton_backend, check, rows, cols):
    check.against_float64(
        OP, Sample((*packed(triton_backend.device, (rows, cols)), "silu")), factor=2.0
    )


@pytest.mark.parametrize("shape", [(), (7,), (2, 3, 4, 16), (3, 1)])
def test_ranks(backend, check, shape):
    gate, up = (torch.randn(shape, device=backend.device) for _ in range(2))
    check.against_float64(OP, Sample((gate, up, "gelu")), factor=2.0)


@pytest.mark.parametrize("shape", [(0, 8), (5, 0), (2, 0, 8)])
def test_empty(backend, shape):
    gate, up = (torch.ones(shape, device=backend.device, requires_grad=True) for _ in range(2))
    G.glu(gate, up, "silu").sum().backward()
    assert gate.grad.shape == up.grad.shape == shape


@pytest.mark.parametrize(("gate_dtype", "up_dtype"), list(itertools.product(DTYPES, DTYPES)))
def test_dtype_mix(backend, check, gate_dtype, up_dtype):
    gate, up = (
        torch.randn(5, 24, device=backend.device).to(dtype) for dtype in (gate_dtype, up_dtype)
    )
    assert G.glu(gate, up, "silu").dtype == torch.promote_types(gate_dtype, up_dtype)
    check.against_float64(OP, Sample((gate, up, "silu")), factor=2.0)


def test_halves_of_a_packed_buffer_are_read_in_place(triton_backend, monkeypatch):
    from graphopt.kernels import _glu_triton, _prepared

    _prepared.forget()  # what is known of such tensors is not worked out again
    gate, up = packed(triton_backend.device, (2, 6, 24))
    seen = []
    lay_out = _glu_triton.lay_out

    def spy(*tensors, **options):
        views, count, cols = lay_out(*tensors, **options)
        seen.extend(views)
        return views, count, cols

    monkeypatch.setattr(_glu_triton, "lay_out", spy)
    G.glu(gate, up, "silu")
    assert [(v.tensor.data_ptr(), v.stride) for v in seen] == [
        (gate.data_ptr(), 48),
        (up.data_ptr(), 48),
    ]


LAYOUTS = {
    "rows of a wider matrix": lambda r, c: torch.randn(r, 3 * c)[:, c : 2 * c],
    "transposed": lambda r, c: torch.randn(c, r).t(),
    "one row expanded": lambda r, c: torch.randn(1, c).expand(r, c),
    "all one value": lambda r, c: torch.randn(()).expand(r, c),
    "misaligned": lambda r, c: torch.randn(r * c + 1)[1:].view(r, c),
}


@pytest.mark.parametrize("gate_layout", LAYOUTS)
@pytest.mark.parametrize("other_layout", LAYOUTS)
def test_layouts(triton_backend, check, gate_layout, other_layout):
    gate = LAYOUTS[gate_layout](6, 20).to(triton_backend.device)
    up, dy = (LAYOUTS[other_layout](6, 20).to(triton_backend.device) for _ in range(2))
    check.against_float64(OP, Sample((gate, up, "gelu_tanh")), (dy,), factor=2.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("activation", NAMES)
def test_extremes_as_eager(triton_backend, activation, dtype):
    values = [0.0, -0.0, 1e-6, -1e-6, 20, -20, 88, -88, 3e4, -3e4, -math.inf, math.nan]
    gate = torch.tensor(values, device=triton_backend.device, dtype=dtype).requires_grad_()
    up = torch.full_like(gate, 2.0).requires_grad_()
    y = G.glu(gate, up, activation)
    ours = torch.autograd.grad(y, (gate, up), torch.ones_like(y))
    expected = EAGER[activation](gate) * up
    theirs = torch.autograd.grad(expected, (gate, up), torch.ones_like(y))
    eps = torch.finfo(dtype).eps
    for a, b in zip((y, *ours), (expected, *theirs), strict=True):
        torch.testing.assert_close(a, b, rtol=4 * eps, atol=4 * eps, equal_nan=True)


def test_a_closed_relu_gate_stops_an_infinite_gradient(backend):
    gate = torch.tensor([-1.0, 1.0], device=backend.device, requires_grad=True)
    up = torch.tensor([math.inf, 2.0], device=backend.device)
    G.glu(gate, up, "relu").backward(torch.ones(2, device=backend.device))
    assert gate.grad.tolist() == [0.0, 2.0]


@pytest.mark.parametrize("wanted", [0, 1])
def test_only_the_wanted_gradient(backend, wanted):
    both = [t.clone().requires_grad_() for t in packed(backend.device, (9, 8))]
    G.glu(*both, "silu").sin().sum().backward()
    alone = [t.detach().clone().requires_grad_(i == wanted) for i, t in enumerate(both)]
    G.glu(*alone, "silu").sin().sum().backward()
    assert torch.equal(alone[wanted].grad, both[wanted].grad)
    assert alone[1 - wanted].grad is None


def test_gradient_reaches_the_packed_buffer(backend, check):
    buffer = torch.randn(5, 32, device=backend.device, requires_grad=True)
    G.glu(*buffer.chunk(2, dim=-1), "silu").sin().sum().backward()
    exact = buffer.detach().double().requires_grad_()
    gate, up = exact.chunk(2, dim=-1)
    (F.silu(gate) * up).sin().sum().backward()
    check.near("buffer", buffer.grad, exact.grad, 4 * torch.finfo(torch.float32).eps)


def test_saved_are_the_inputs_alone(backend):
    gate, up = (t.requires_grad_() for t in packed(backend.device, (4, 8)))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda t: t):
        G.glu(gate, up, "silu")
    assert [t.data_ptr() for t in saved] == [gate.data_ptr(), up.data_ptr()]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_no_graph_without_gradients(backend, mode):
    gate, up = (t.requires_grad_() for t in packed(backend.device, (4, 8)))
    with mode():
        y = G.glu(gate, up, "silu")
    assert y.grad_fn is None
    assert torch.equal(y, G.glu(gate, up, "silu"))


def test_second_derivative_is_refused(backend):
    gate, up = (t.requires_grad_() for t in packed(backend.device, (4, 8)))
    (slope,) = torch.autograd.grad(G.glu(gate, up, "silu").sum(), up, create_graph=True)
    with pytest.raises(UnsupportedError, match="double backward of graphopt::glu"):
        slope.sum().backward()


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda x: G.glu(x, x, "tanh"), OptionError, "unknown activation 'tanh'"),
        (lambda x: G.glu(x, x[:1], "silu"), OptionError, r"shapes \(2, 8\) and \(1, 8\) differ"),
        (lambda x: G.glu(x.long(), x, "silu"), UnsupportedError, "torch.int64"),
    ],
)
def test_errors_say_what_is_wrong(backend, call, error, text):
    with pytest.raises(error, match=text):
        call(torch.ones(2, 8, device=backend.device))


def test_opcheck(check):
    sample = check.leaves(next(iter(OP.samples(torch.device("cpu")))))
    torch.library.opcheck(OP.overload, sample.args, sample.kwargs)


@pytest.mark.gpu
@pytest.mark.parametrize("cols", [5632, 11008])
def test_real_size(check, cols):
    gate, up = packed(torch.device("cuda"), (2048, cols), torch.bfloat16)
    check.against_float64(OP, Sample((gate, up, "silu")), factor=2.0)
