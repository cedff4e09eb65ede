"""Triton for glu: activation(gate) * up, one pass forward and one pass backward.

Rows of gate and of up may lie at any stride, so the halves of a packed [M, 2F] projection are read
in place. Backward reads dy, gate and up and writes dgate and dup, which may be the halves of one
buffer as well.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graphopt.kernels._launch import on_device
from graphopt.kernels._pointwise import BACKWARD_TILE, FORWARD_TILE, HALF, lay_out, tile
from graphopt.kernels._tl_activations import activate, activate_grad


@triton.jit
def _glu_fwd(
    GATE, UP, Y, M, N, stride_gate, stride_up,
    ACT: tl.constexpr, FAST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(N, BN)
    rows = (tl.program_id(0) // across).to(tl.int64) * BM + tl.arange(0, BM)
    first = (tl.program_id(0) % across).to(tl.int64) * BN
    cols = tl.arange(0, BN)
    mask = (rows < M)[:, None] & (cols < N - first)[None, :]
    at_gate = first + rows[:, None] * stride_gate + cols[None, :]
    at_up = first + rows[:, None] * stride_up + cols[None, :]
    z = tl.load(GATE + at_gate, mask=mask).to(tl.float32)
    up = tl.load(UP + at_up, mask=mask).to(tl.float32)
    y = activate(z, ACT, FAST) * up
    place = first + rows[:, None] * N + cols[None, :]
    tl.store(Y + place, y.to(Y.dtype.element_ty), mask=mask)


@triton.jit
def _glu_bwd(
    DY, GATE, UP, DGATE, DUP, M, N, stride_dy, stride_gate, stride_up, stride_out,
    ACT: tl.constexpr, FAST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(N, BN)
    rows = (tl.program_id(0) // across).to(tl.int64) * BM + tl.arange(0, BM)
    first = (tl.program_id(0) % across).to(tl.int64) * BN
    cols = tl.arange(0, BN)
    mask = (rows < M)[:, None] & (cols < N - first)[None, :]
    at_dy = first + rows[:, None] * stride_dy + cols[None, :]
    at_gate = first + rows[:, None] * stride_gate + cols[None, :]
    at_up = first + rows[:, None] * stride_up + cols[None, :]
    dy = tl.load(DY + at_dy, mask=mask).to(tl.float32)
    z = tl.load(GATE + at_gate, mask=mask).to(tl.float32)
    up = tl.load(UP + at_up, mask=mask).to(tl.float32)
    dgate = activate_grad(dy * up, z, ACT, FAST)
    dup = dy * activate(z, ACT, FAST)
    place = first + rows[:, None] * stride_out + cols[None, :]
    tl.store(DGATE + place, dgate.to(DGATE.dtype.element_ty), mask=mask)
    tl.store(DUP + place, dup.to(DUP.dtype.element_ty), mask=mask)


def forward(
    gate: torch.Tensor, up: torch.Tensor, activation: str, out_dtype: torch.dtype
) -> torch.Tensor:
    """activation(gate) * up; contiguous, of out_dtype."""
    y = torch.empty(gate.shape, dtype=out_dtype, device=gate.device)
    if gate.numel() == 0:
        return y
    (rows_gate, rows_up), count, cols = lay_out(gate, up, flat=True)
    tiles = tile(count, cols, FORWARD_TILE)
    with on_device(gate):
        _glu_fwd[(tiles.across * tiles.down,)](
            rows_gate.tensor, rows_up.tensor, y, count, cols, rows_gate.stride, rows_up.stride,
            ACT=activation, FAST=out_dtype in HALF,
            BM=tiles.rows_a_tile, BN=tiles.cols_a_tile, num_warps=4,
        )  # fmt: skip
    return y


def backward(
    dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """(dgate, dup), contiguous, each in its input's dtype."""
    dgate = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    dup = torch.empty(up.shape, dtype=up.dtype, device=up.device)
    _backward_into(dgate, dup, gate.shape[-1] if gate.dim() else 1, dy, gate, up, activation)
    return dgate, dup


def backward_packed(
    dy: torch.Tensor, packed: torch.Tensor, activation: str, gate_first: bool
) -> torch.Tensor:
    """The gradient of [..., 2N], contiguous: both halves are written where they lie."""
    grad = torch.empty(packed.shape, dtype=packed.dtype, device=packed.device)
    halves, slopes = packed.chunk(2, dim=-1), grad.chunk(2, dim=-1)
    (gate, up), (dgate, dup) = (h if gate_first else h[::-1] for h in (halves, slopes))
    _backward_into(dgate, dup, packed.shape[-1], dy, gate, up, activation)
    return grad


def _backward_into(
    dgate: torch.Tensor, dup: torch.Tensor, stride: int,
    dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: str,
) -> None:  # fmt: skip
    """Write both gradients, whose rows lie `stride` elements apart."""
    if gate.numel() == 0:
        return
    # One long row only where the results lie so, too.
    flat = dgate.is_contiguous()
    (rows_dy, rows_gate, rows_up), count, cols = lay_out(dy, gate, up, flat=flat)
    tiles = tile(count, cols, BACKWARD_TILE)
    with on_device(gate):
        _glu_bwd[(tiles.across * tiles.down,)](
            rows_dy.tensor, rows_gate.tensor, rows_up.tensor, dgate, dup,
            count, cols, rows_dy.stride, rows_gate.stride, rows_up.stride, stride,
            ACT=activation, FAST=gate.dtype in HALF and up.dtype in HALF,
            BM=tiles.rows_a_tile, BN=tiles.cols_a_tile, num_warps=4,
        )  # fmt: skip
