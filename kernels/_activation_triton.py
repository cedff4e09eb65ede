"""Triton for bias_act and softcap: pointwise forward, backward with the bias gradient on the way.

Both see x as [M, N]. Forward: read x (and the N bias values), write y. Backward: read dy and x,
write dx, and sum dx's columns in registers over a program's rows into float32 partials
[parts, N], which a second kernel adds in a fixed order: no atomics, the same bits every time.
Softcap is the activation "softcap", z -> cap * tanh(z / cap).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graphopt.kernels._column_sum_triton import column_sum
from graphopt.kernels._launch import nothing, on_device
from graphopt.kernels._pointwise import (
    BACKWARD_TILE,
    FORWARD_TILE,
    HALF,
    SUMMING_STAGES,
    SUMMING_TILE,
    lay_out,
    summing_parts,
    tile,
)
from graphopt.kernels._tl_activations import activate, activate_grad


@triton.jit
def _bias_act_fwd(
    X, BIAS, Y, M, N, stride_x, cap,
    CAPPED: tl.constexpr, ACT: tl.constexpr, FAST: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(N, BN)
    rows = (tl.program_id(0) // across).to(tl.int64) * BM + tl.arange(0, BM)
    first = (tl.program_id(0) % across).to(tl.int64) * BN
    cols = tl.arange(0, BN)
    inside = cols < N - first
    mask = (rows < M)[:, None] & inside[None, :]
    z = tl.load(X + first + rows[:, None] * stride_x + cols[None, :], mask=mask).to(tl.float32)
    if BIAS is not None:
        z += tl.load(BIAS + first + cols, mask=inside).to(tl.float32)[None, :]
    y = cap * activate(z / cap, "tanh", FAST) if CAPPED else activate(z, ACT, FAST)
    place = first + rows[:, None] * N + cols[None, :]
    tl.store(Y + place, y.to(Y.dtype.element_ty), mask=mask)


@triton.jit
def _bias_act_bwd(
    DY, X, BIAS, DX, PARTIAL, M, N, stride_dy, stride_x, cap,
    CAPPED: tl.constexpr, ACT: tl.constexpr, FAST: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # One program: one block of columns, every parts-th block of rows.
    across = tl.cdiv(N, BN)
    part = tl.program_id(0) // across
    parts = tl.num_programs(0) // across
    first = (tl.program_id(0) % across).to(tl.int64) * BN
    cols = tl.arange(0, BN)
    inside = cols < N - first
    if BIAS is not None:
        bias = tl.load(BIAS + first + cols, mask=inside).to(tl.float32)[None, :]
    if PARTIAL is not None:
        total = tl.zeros((BM, BN), tl.float32)
    for block in tl.range(part, tl.cdiv(M, BM), parts, num_stages=STAGES):
        rows = (block * BM + tl.arange(0, BM)).to(tl.int64)
        mask = (rows < M)[:, None] & inside[None, :]
        at_dy = first + rows[:, None] * stride_dy + cols[None, :]
        at_x = first + rows[:, None] * stride_x + cols[None, :]
        dy = tl.load(DY + at_dy, mask=mask).to(tl.float32)
        z = tl.load(X + at_x, mask=mask).to(tl.float32)
        if BIAS is not None:
            z += bias
        at = z / cap if CAPPED else z
        dz = activate_grad(dy, at, "tanh" if CAPPED else ACT, FAST)
        place = first + rows[:, None] * N + cols[None, :]
        tl.store(DX + place, dz.to(DX.dtype.element_ty), mask=mask)
        if PARTIAL is not None:
            total += tl.where(mask, dz, 0.0)
    if PARTIAL is not None:
        place = part.to(tl.int64) * N + first + cols
        tl.store(PARTIAL + place, tl.sum(total, 0), mask=inside)


def forward(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    out_dtype: torch.dtype,
    cap: float | None = None,
) -> torch.Tensor:
    """activation(x + bias), or softcap if a cap is given; contiguous, of out_dtype."""
    y = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    if x.numel() == 0:
        return y
    (rows,), count, cols = lay_out(x, flat=bias is None)
    tiles = tile(count, cols, FORWARD_TILE)
    with on_device(x):
        _bias_act_fwd[(tiles.across * tiles.down,)](
            rows.tensor, None if bias is None else bias.contiguous(), y,
            count, cols, rows.stride, 1.0 if cap is None else cap,
            CAPPED=cap is not None, ACT=activation, FAST=out_dtype in HALF,
            BM=tiles.rows_a_tile, BN=tiles.cols_a_tile, num_warps=4,
        )  # fmt: skip
    return y


def backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    sum_dtype: torch.dtype | None,
    cap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(dx in x's dtype, the bias gradient in sum_dtype; of no element if that is None)."""
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dbias = nothing(dx.dtype, dx.device)
    if x.numel() == 0:
        return dx, dbias if sum_dtype is None else x.new_zeros(x.shape[-1], dtype=sum_dtype)
    flat = bias is None and sum_dtype is None
    (rows_dy, rows_x), count, cols = lay_out(dy, x, flat=flat)
    tiles = tile(count, cols, BACKWARD_TILE if sum_dtype is None else SUMMING_TILE)
    parts, partial = tiles.down, None
    if sum_dtype is not None:
        parts = summing_parts(tiles, x)
        partial = torch.empty(parts, cols, dtype=torch.float32, device=x.device)
    with on_device(x):
        _bias_act_bwd[(tiles.across * parts,)](
            rows_dy.tensor, rows_x.tensor, None if bias is None else bias.contiguous(), dx, partial,
            count, cols, rows_dy.stride, rows_x.stride, 1.0 if cap is None else cap,
            CAPPED=cap is not None, ACT=activation, FAST=x.dtype in HALF,
            BM=tiles.rows_a_tile, BN=tiles.cols_a_tile,
            STAGES=1 if sum_dtype is None else SUMMING_STAGES, num_warps=4,
        )  # fmt: skip
        if partial is not None and sum_dtype is not None:
            dbias = column_sum(partial, sum_dtype)
    return dx, dbias
