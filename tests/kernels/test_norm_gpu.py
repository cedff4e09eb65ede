"""The norm family on a GPU at real sizes: full matrices, wide rows, more than 2^31 elements."""

from __future__ import annotations

import pytest
import torch

from graphopt.kernels import Sample, registry

pytestmark = pytest.mark.gpu

G = torch.ops.graphopt
NORMS = ["layer_norm", "add_layer_norm", "rms_norm", "add_rms_norm"]
CUDA = torch.device("cuda")


SHAPES = [(16384, 1024), (4096, 4096), (2047, 5120), (513, 16384), (4097, 1000), (9, 8)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NORMS)
def test_real_sizes(check, name, shape):
    op = registry()[name]
    check.against_float64(op, op.example(*shape, torch.bfloat16, CUDA))


@pytest.mark.parametrize("cols", [32768, 65536, 128256])
@pytest.mark.parametrize("name", NORMS)
def test_wide_rows(check, name, cols):
    op = registry()[name]
    check.against_float64(op, op.example(130, cols, torch.bfloat16, CUDA))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("cols", [64, 128, 200, 256, 512, 1024, 2048, 3072, 8192])
def test_every_tile(check, cols, dtype):
    op = registry()["add_layer_norm"]
    sample = op.example(3000, cols, dtype, CUDA)
    seed = torch.tensor(5, device=CUDA)
    for options in ({}, {"dropout_p": 0.1, "seed": seed, "site": 1}):
        check.against_float64(op, Sample(sample.args, options), factor=2.0)


def test_more_than_two_to_the_31_elements():
    rows, cols = 2**31 // 4096 + 3, 4096
    x = torch.empty(rows, cols, device=CUDA, dtype=torch.bfloat16)
    x[-3:].normal_()
    x[:-3] = 1.0
    weight = torch.randn(cols, device=CUDA).requires_grad_()
    tail = x[-3:].clone().requires_grad_()
    x.requires_grad_()
    seed = torch.tensor(9, device=CUDA)
    y = G.rms_norm(x, weight, 1e-6)
    expected = G.rms_norm(tail, weight, 1e-6)
    assert torch.equal(y[-3:], expected)
    grad = torch.zeros_like(y)
    grad[-3:].normal_()
    dx, dw = torch.autograd.grad(y, (x, weight), grad)
    dtail, dtail_weight = torch.autograd.grad(expected, (tail, weight), grad[-3:])
    assert torch.equal(dx[-3:], dtail)
    torch.testing.assert_close(dw, dtail_weight)
    del y, grad, dx
    with torch.no_grad():
        dropped = G.rms_norm(x, None, 1e-6, dropout_p=0.5, seed=seed)
    # Rows whose counter is beyond 2^31: not the mask of another row.
    assert not torch.equal(dropped[-4] != 0, dropped[0] != 0)


def test_more_than_two_to_the_31_rows():
    rows = 2**31 + 5
    x = torch.ones(rows, 1, device=CUDA, dtype=torch.bfloat16)
    bias = torch.tensor([2.0], device=CUDA)
    with torch.no_grad():
        y = G.layer_norm(x, None, bias, 1e-5)
    assert y[-3:].flatten().tolist() == [2.0] * 3
    assert y[:3].flatten().tolist() == [2.0] * 3


def test_another_stream_gives_the_same_bits():
    op = registry()["layer_norm"]
    sample = op.example(1024, 4096, torch.bfloat16, CUDA)
    expected = op.overload(*sample.args)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        y = op.overload(*sample.args)
    stream.synchronize()
    assert torch.equal(y, expected)


def test_cuda_graph_replays_draw_new_masks_and_repeat_with_the_seed():
    x, ones = torch.zeros(64, 512, device=CUDA), torch.ones(512, device=CUDA)

    def step():
        seed = G.draw_seed(CUDA)
        return G.layer_norm(x, None, ones, 1e-5, dropout_p=0.5, seed=seed, site=1)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step()

    def replay():
        graph.replay()
        return y.clone()

    torch.cuda.manual_seed(1)
    first, second = replay(), replay()
    torch.cuda.manual_seed(1)
    again = replay()
    assert not torch.equal(first, second)
    assert torch.equal(first, again)


def test_no_partial_sums_without_weight_gradients():
    x = torch.randn(4096, 4096, device=CUDA, dtype=torch.bfloat16).requires_grad_()
    weight = torch.ones(4096, device=CUDA)
    y = G.rms_norm(x, weight, 1e-6)
    grad = torch.ones_like(y)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.autograd.grad(y, x, grad)
    # The gradient itself, and nothing of the size of partial sums (float32 [programs, N]: 4 MB).
    assert torch.cuda.max_memory_allocated() - before < x.numel() * 2 + 2**20


def test_tensors_on_a_gpu_that_is_not_current():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    x = torch.randn(64, 512, device="cuda:1")
    y = G.rms_norm(x, None, 1e-6)
    torch.testing.assert_close(y.cpu(), G.rms_norm(x.cpu(), None, 1e-6), atol=1e-5, rtol=1e-5)
