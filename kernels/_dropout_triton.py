"""Triton for dropout and dropout_add; the mask is made from (seed, site, row, column), not stored.

Forward: read x (and bias, residual), write y. Backward: read dy, write dx = dy * mask * scale; the
bias gradient is the column sum of dx, taken on the way in float32 partials [parts, N] and added in
a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graphopt.kernels._column_sum_triton import column_sum
from graphopt.kernels._launch import nothing, on_device
from graphopt.kernels._philox import scale, threshold
from graphopt.kernels._pointwise import (
    BACKWARD_TILE,
    FORWARD_TILE,
    SUMMING_STAGES,
    SUMMING_TILE,
    lay_out,
    summing_parts,
    tile,
)
from graphopt.kernels._tl import dropout_factor


@triton.jit(do_not_specialize=["site", "threshold"])
def _dropout_fwd(
    X, RESIDUAL, BIAS, Y, SEED, M, N, stride_x, stride_residual, site, threshold, scale,
    DROP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(N, BN)
    rows = (tl.program_id(0) // across).to(tl.int64) * BM + tl.arange(0, BM)
    first = (tl.program_id(0) % across).to(tl.int64) * BN
    cols = tl.arange(0, BN)
    inside = cols < N - first
    mask = (rows < M)[:, None] & inside[None, :]
    y = tl.load(X + first + rows[:, None] * stride_x + cols[None, :], mask=mask).to(tl.float32)
    if BIAS is not None:
        y += tl.load(BIAS + first + cols, mask=inside).to(tl.float32)[None, :]
    if DROP:
        group = rows * ((N + 7) // 8) + first // 8
        y *= dropout_factor(tl.load(SEED), site, group, threshold, scale, BN)
    if RESIDUAL is not None:
        at_residual = first + rows[:, None] * stride_residual + cols[None, :]
        y += tl.load(RESIDUAL + at_residual, mask=mask).to(tl.float32)
    place = first + rows[:, None] * N + cols[None, :]
    tl.store(Y + place, y.to(Y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["site", "threshold"])
def _dropout_bwd(
    DY, DX, PARTIAL, SEED, M, N, stride_dy, site, threshold, scale,
    DROP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # One program: one block of columns, every parts-th block of rows.
    across = tl.cdiv(N, BN)
    part = tl.program_id(0) // across
    parts = tl.num_programs(0) // across
    first = (tl.program_id(0) % across).to(tl.int64) * BN
    cols = tl.arange(0, BN)
    inside = cols < N - first
    if DROP:
        seed = tl.load(SEED)
    if PARTIAL is not None:
        total = tl.zeros((BM, BN), tl.float32)
    for block in tl.range(part, tl.cdiv(M, BM), parts, num_stages=STAGES):
        rows = (block * BM + tl.arange(0, BM)).to(tl.int64)
        mask = (rows < M)[:, None] & inside[None, :]
        at_dy = first + rows[:, None] * stride_dy + cols[None, :]
        dx = tl.load(DY + at_dy, mask=mask).to(tl.float32)
        if DROP:
            group = rows * ((N + 7) // 8) + first // 8
            dx *= dropout_factor(seed, site, group, threshold, scale, BN)
        place = first + rows[:, None] * N + cols[None, :]
        tl.store(DX + place, dx.to(DX.dtype.element_ty), mask=mask)
        if PARTIAL is not None:
            total += tl.where(mask, dx, 0.0)
    if PARTIAL is not None:
        place = part.to(tl.int64) * N + first + cols
        tl.store(PARTIAL + place, tl.sum(total, 0), mask=inside)


def forward(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    bias: torch.Tensor | None,
    p: float,
    seed: torch.Tensor,
    site: int,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Residual + dropout(x + bias), each of the two if there; contiguous, of out_dtype."""
    y = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    if x.numel() == 0:
        return y
    flat = bias is None and _aligned(x, p)
    views, count, cols = lay_out(x, x if residual is None else residual, flat=flat)
    rows_x, rows_residual = views
    tiles = tile(count, cols, FORWARD_TILE)
    with on_device(x):
        _dropout_fwd[(tiles.across * tiles.down,)](
            rows_x.tensor, None if residual is None else rows_residual.tensor,
            None if bias is None else bias.contiguous(), y, seed, count, cols,
            rows_x.stride, rows_residual.stride, site, threshold(p), scale(p),
            DROP=threshold(p) > 0, BM=tiles.rows_a_tile, BN=tiles.cols_a_tile, num_warps=4,
        )  # fmt: skip
    return y


def backward(
    dy: torch.Tensor,
    p: float,
    seed: torch.Tensor,
    site: int,
    x_dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(dx, the bias gradient; of no element if bias_dtype is None)."""
    dx = torch.empty(dy.shape, dtype=x_dtype, device=dy.device)
    dbias = nothing(dx.dtype, dx.device)
    if dy.numel() == 0:
        return dx, dbias if bias_dtype is None else dx.new_zeros(dy.shape[-1], dtype=bias_dtype)
    (rows_dy,), count, cols = lay_out(dy, flat=bias_dtype is None and _aligned(dy, p))
    tiles = tile(count, cols, BACKWARD_TILE if bias_dtype is None else SUMMING_TILE)
    parts, partial = tiles.down, None
    if bias_dtype is not None:
        parts = summing_parts(tiles, dy)
        partial = torch.empty(parts, cols, dtype=torch.float32, device=dy.device)
    with on_device(dy):
        _dropout_bwd[(tiles.across * parts,)](
            rows_dy.tensor, dx, partial, seed,
            count, cols, rows_dy.stride, site, threshold(p), scale(p),
            DROP=threshold(p) > 0, BM=tiles.rows_a_tile, BN=tiles.cols_a_tile,
            STAGES=1 if bias_dtype is None else SUMMING_STAGES, num_warps=4,
        )  # fmt: skip
        if partial is not None and bias_dtype is not None:
            dbias = column_sum(partial, bias_dtype)
    return dx, dbias


def _aligned(x: torch.Tensor, p: float) -> bool:
    # Bits are counted in groups of 8 columns: rows of whole groups can be walked as one long row.
    return threshold(p) == 0 or (x.dim() > 0 and x.shape[-1] % 8 == 0)
