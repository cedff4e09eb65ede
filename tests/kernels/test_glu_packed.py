"""glu_packed: values of glu on the halves, one gradient for the whole."""

from __future__ import annotations

import itertools

import pytest
import torch

from graphopt.errors import OptionError, UnsupportedError
from graphopt.kernels import Sample, registry

G = torch.ops.graphopt
OP = registry()["glu_packed"]
SAMPLES = range(len(list(OP.samples(torch.device("cpu")))))


@pytest.mark.parametrize("index", SAMPLES)
def test_every_mode(backend, check, index):
    check.against_float64(
        OP, next(itertools.islice(OP.samples(backend.device), index, None)), factor=2.0
    )


@pytest.mark.parametrize("shape", [(1, 2), (3, 14), (2, 5, 34), (4, 2048), (2, 5000), (64,)])
@pytest.mark.parametrize("gate_first", [True, False])
def test_sizes(triton_backend, check, shape, gate_first):
    packed = torch.randn(shape, device=triton_backend.device)
    check.against_float64(OP, Sample((packed, "silu", gate_first)), factor=2.0)


@pytest.mark.parametrize("gate_first", [True, False])
def test_the_same_bits_as_glu_of_the_halves(backend, gate_first):
    packed = torch.randn(3, 5, 48, device=backend.device).bfloat16().requires_grad_()
    halves = [h.detach().requires_grad_() for h in packed.chunk(2, -1)]
    y = G.glu_packed(packed, "silu", gate_first)
    wanted = G.glu(*(halves if gate_first else halves[::-1]), "silu")
    assert torch.equal(y, wanted)
    grad = torch.randn_like(y)
    (whole,) = torch.autograd.grad(y, packed, grad)
    assert whole.is_contiguous()
    assert torch.equal(whole, torch.cat(torch.autograd.grad(wanted, halves, grad), -1))


@pytest.mark.parametrize(
    "layout",
    [
        lambda: torch.randn(4, 60)[:, 20:40],
        lambda: torch.randn(20, 4).t(),
        lambda: torch.randn(1, 20).expand(4, 20),
    ],
)
def test_layouts(triton_backend, check, layout):
    packed, dy = layout().to(triton_backend.device), layout().to(triton_backend.device)[:, :10]
    check.against_float64(OP, Sample((packed, "gelu")), (dy,), factor=2.0)


@pytest.mark.parametrize("shape", [(0, 8), (5, 0)])
def test_empty(backend, shape):
    packed = torch.ones(shape, device=backend.device, requires_grad=True)
    G.glu_packed(packed, "silu").sum().backward()
    assert packed.grad.shape == shape


def test_saved_is_the_input_alone(backend):
    packed = torch.randn(4, 16, device=backend.device, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda t: t):
        G.glu_packed(packed, "silu")
    assert [t.data_ptr() for t in saved] == [packed.data_ptr()]


def test_errors_say_what_is_wrong(backend):
    with pytest.raises(OptionError, match="last dimension"):
        G.glu_packed(torch.ones(3, 7, device=backend.device), "silu")
    packed = torch.randn(4, 16, device=backend.device, requires_grad=True)
    (slope,) = torch.autograd.grad(G.glu_packed(packed, "silu").sum(), packed, create_graph=True)
    with pytest.raises(UnsupportedError, match="double backward of graphopt::glu_packed"):
        slope.sum().backward()


@pytest.mark.gpu
def test_real_size(check):
    packed = torch.randn(2048, 2 * 5632, device="cuda", dtype=torch.bfloat16)
    check.against_float64(OP, Sample((packed, "silu")), factor=2.0)
