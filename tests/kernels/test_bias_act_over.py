"""bias_act's gradient written over its operand: the bits of one in memory of its own."""

from __future__ import annotations

import pytest
import torch

from graphopt.kernels import _activations
from graphopt.kernels._overwrite import operands_of, overwriting

G = torch.ops.graphopt


@pytest.mark.parametrize("activation", _activations.NAMES)
@pytest.mark.parametrize("sum_dtype", [None, torch.float32], ids=str)
def test_every_activation(backend, activation, sum_dtype):
    x, dy = (torch.randn(3, 5, 20, device=backend.device) for _ in "ab")
    bias = torch.randn(20, device=backend.device)
    wanted = G.bias_act_backward(dy, x, bias, activation, sum_dtype)
    found = overwriting(G.bias_act_backward.default).over(dy, x, bias, activation, sum_dtype)
    assert torch.equal(x, wanted[0])
    assert torch.equal(found, wanted[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(1,), (3, 7), (300, 17), (2, 1500), (0, 4), (5, 0)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_sizes(backend, dtype, shape, bias):
    x, dy = (torch.randn(shape, device=backend.device, dtype=dtype) for _ in "ab")
    given = torch.randn(shape[-1], device=backend.device) if bias else None
    rest = given, "gelu", torch.float32 if bias else None
    wanted = G.bias_act_backward(dy, x, *rest)
    found = G.bias_act_backward_(dy, x, *rest)
    assert torch.equal(x, wanted[0])
    assert torch.equal(found, wanted[1])


def test_which_operand():
    assert operands_of(G.bias_act.default) == (0,)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_real_size(dtype):
    for cols in (4096, 4095):
        x, dy = (torch.randn(16384, cols, device="cuda", dtype=dtype) for _ in "ab")
        bias = torch.randn(cols, device="cuda")
        for sum_dtype in (None, torch.float32):
            wanted = G.bias_act_backward(dy, x, bias, "gelu", sum_dtype)
            over = x.clone()
            found = G.bias_act_backward_(dy, over, bias, "gelu", sum_dtype)
            assert torch.equal(over, wanted[0])
            assert torch.equal(found, wanted[1])
