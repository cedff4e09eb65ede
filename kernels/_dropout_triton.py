"""Triton for dropout and dropout_add; the mask is made from (seed, site, row, column), not stored.

Forward: read x (and bias, residual), write y. Backward: read dy, write dx = dy * mask * scale; the
bias gradient is the column sum of dx, taken on the way in float32 partials [parts, N] and added in
a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graphopt.kernels._column_sum_triton import prepare_column_sum
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
from graphopt.kernels._prepared import Launch, MaybeTensor, Run, maker, on_rows
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


def prepare_forward(
    x: torch.Tensor,
    residual: MaybeTensor,
    bias: MaybeTensor,
    p: float,
    site: int,
    out_dtype: torch.dtype,
) -> Run:
    """A function of (x, residual, bias, seed): residual + dropout(x + bias), each if it is there.

    Its result is contiguous, of out_dtype.
    """
    make = maker(x, x.shape, out_dtype)
    if x.numel() == 0:
        return lambda x, *rest: make(x)
    flat = bias is None and _aligned(x, p)
    views, count, cols = lay_out(x, x if residual is None else residual, flat=flat, copy=False)
    rows_x, rows_residual = views
    tiles = tile(count, cols, FORWARD_TILE)
    launch = Launch(
        _dropout_fwd, (tiles.across * tiles.down,), count, cols,
        rows_x.stride, rows_residual.stride, site, threshold(p), scale(p),
        DROP=threshold(p) > 0, BM=tiles.rows_a_tile, BN=tiles.cols_a_tile, num_warps=4,
    )  # fmt: skip

    def run(
        x: torch.Tensor, residual: MaybeTensor, bias: MaybeTensor, seed: torch.Tensor
    ) -> torch.Tensor:
        y = make(x)
        launch(x, residual, bias, y, seed)
        return y

    return on_rows(run, (x, residual), (bias,))


def prepare_backward(
    dy: torch.Tensor, p: float, site: int, x_dtype: torch.dtype, bias_dtype: torch.dtype | None
) -> Run:
    """A function of (dy, seed): dx and the bias gradient; of no element if bias_dtype is None."""
    summed = bias_dtype is not None
    make_dx = maker(dy, dy.shape, x_dtype)
    make_dbias = maker(dy, (dy.shape[-1],) if summed else None, bias_dtype or x_dtype)
    if dy.numel() == 0:
        return lambda dy, seed: (
            make_dx(dy), make_dbias(dy).zero_() if summed else make_dbias(dy)
        )  # fmt: skip
    (rows_dy,), count, cols = lay_out(dy, flat=not summed and _aligned(dy, p), copy=False)
    tiles = tile(count, cols, SUMMING_TILE if summed else BACKWARD_TILE)
    parts = summing_parts(tiles, dy) if summed else tiles.down
    launch = Launch(
        _dropout_bwd, (tiles.across * parts,),
        count, cols, rows_dy.stride, site, threshold(p), scale(p),
        DROP=threshold(p) > 0, BM=tiles.rows_a_tile, BN=tiles.cols_a_tile,
        STAGES=SUMMING_STAGES if summed else 1, num_warps=4,
    )  # fmt: skip
    make_partial = maker(dy, (parts, cols), torch.float32)
    column_sum = prepare_column_sum(parts, cols)

    def run(dy: torch.Tensor, seed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        dx, dbias = make_dx(dy), make_dbias(dy)
        partial = make_partial(dy) if summed else None
        launch(dy, dx, partial, seed)
        if partial is not None:
            column_sum(partial, dbias)
        return dx, dbias

    return on_rows(run, (dy,), ())


def _aligned(x: torch.Tensor, p: float) -> bool:
    # Bits are counted in groups of 8 columns: rows of whole groups can be walked as one long row.
    return threshold(p) == 0 or (x.dim() > 0 and x.shape[-1] % 8 == 0)
