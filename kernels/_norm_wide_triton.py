"""Triton kernels for rows that do not fit in one block; ``_norm_triton.py`` has the others."""

from __future__ import annotations

import triton
import triton.language as tl

from graphopt.kernels import _tl, _tl_activations
from graphopt.kernels._norm_triton import (
    SCALARS,
    affine,
    before_outer,
    load,
    load_weight,
    round_to,
    store,
)


@triton.jit(do_not_specialize=SCALARS)
def norm_fwd_wide(
    X, RES, W, B, SEED, Y, SUM, MEAN, RSTD,
    M, stride_x, stride_res, site, threshold, scale, eps, OFFSET: tl.constexpr, ALIGN: tl.constexpr,
    N: tl.constexpr, BLOCK: tl.constexpr,
    RMS: tl.constexpr, ROUND: tl.constexpr, DROPOUT: tl.constexpr,
    ACT: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """One row a program, in blocks of columns: one pass for the statistics, one for the output."""
    stride_x *= ALIGN
    stride_res *= ALIGN
    row = tl.program_id(0).to(tl.int64)
    rows = row + tl.arange(0, 1)
    lane = tl.arange(0, BLOCK)
    if DROPOUT:
        seed = tl.load(SEED)
    count = tl.zeros((1,), tl.float32)
    mean = tl.zeros((1,), tl.float32)
    moment = tl.zeros((1,), tl.float32)
    for first in tl.range(0, N, BLOCK):
        cols = first + lane
        mask = (cols < N)[None, :]
        x = load(X + row * stride_x + cols[None, :], mask, True)
        if RES is not None:
            if DROPOUT:
                group = rows * ((N + 7) // 8) + first // 8
                x = x * _tl.dropout_factor(seed, site, group, threshold, scale, BLOCK)
            x += load(RES + row * stride_res + cols[None, :], mask, True)
            x = x.to(SUM.dtype.element_ty)
            store(SUM + row * N + cols[None, :], x, mask, True)
            x = x.to(tl.float32)
        if RMS:
            moment += tl.sum(x * x, 1)
        else:
            # Blocks are merged by their means (Chan et al.), so that a large mean cancels nothing.
            here = tl.sum(mask.to(tl.float32), 1)
            centre = tl.sum(x, 1) / here
            d = tl.where(mask, x - centre[:, None], 0.0)
            delta = centre - mean
            total = count + here
            moment += tl.sum(d * d, 1) + delta * delta * (count * here / total)
            mean += delta * (here / total)
            count = total
    rstd = tl.rsqrt(moment / N + eps)
    tl.store(RSTD + rows, rstd)
    if not RMS:
        tl.store(MEAN + rows, mean)
    tl.debug_barrier()  # the sum was written by the threads of this program
    for first in tl.range(0, N, BLOCK):
        cols = first + lane
        mask = (cols < N)[None, :]
        w = 1.0
        b = 0.0
        if W is not None:
            w = load_weight(W, cols, N, OFFSET, True)
        if B is not None:
            b = load_weight(B, cols, N, 0.0, True)
        if RES is not None:
            x = load(SUM + row * N + cols[None, :], mask, True)
        else:
            x = load(X + row * stride_x + cols[None, :], mask, True)
        y = affine(round_to((x - mean[:, None]) * rstd[:, None], ROUND), w, b, W, B)
        if DROPOUT and RES is None:
            group = rows * ((N + 7) // 8) + first // 8
            y = y * _tl.dropout_factor(seed, site, group, threshold, scale, BLOCK)
        y = _tl_activations.activate(y, ACT, FAST)
        store(Y + row * N + cols[None, :], y, mask, True)


@triton.jit(do_not_specialize=SCALARS)
def norm_bwd_wide(
    DY, DSUM, X, W, B, MEAN, RSTD, SEED, DX, DRES,
    stride_dy, stride_dsum, stride_x, site, threshold, scale,
    OFFSET: tl.constexpr, ALIGN: tl.constexpr,
    N: tl.constexpr, BLOCK: tl.constexpr,
    RMS: tl.constexpr, ROUND: tl.constexpr, DROPOUT: tl.constexpr, ADD: tl.constexpr,
    ACT: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """The dx of one row a program, in blocks of columns: one pass for the two means, one for dx."""
    stride_dy *= ALIGN
    stride_dsum *= ALIGN
    stride_x *= ALIGN
    row = tl.program_id(0).to(tl.int64)
    rows = row + tl.arange(0, 1)
    lane = tl.arange(0, BLOCK)
    rstd = tl.load(RSTD + rows)[:, None]
    mean = 0.0
    if not RMS:
        mean = tl.load(MEAN + rows)[:, None]
    if DROPOUT:
        seed = tl.load(SEED)
    c1 = tl.zeros((1,), tl.float32)
    c2 = tl.zeros((1,), tl.float32)
    for sweep in tl.static_range(2):
        for first in tl.range(0, N, BLOCK):
            cols = first + lane
            mask = (cols < N)[None, :]
            dy = load(DY + row * stride_dy + cols[None, :], mask, True)
            x = load(X + row * stride_x + cols[None, :], mask, True)
            xhat = (x - mean) * rstd
            w = 1.0
            b = 0.0
            factor = 1.0
            if W is not None:
                w = load_weight(W, cols, N, OFFSET, True)
            if B is not None and ACT != "none":
                b = load_weight(B, cols, N, 0.0, True)
            if DROPOUT and (sweep == 1 or not ADD):
                group = rows * ((N + 7) // 8) + first // 8
                factor = _tl.dropout_factor(seed, site, group, threshold, scale, BLOCK)
            if not ADD:
                rounded = round_to(xhat, ROUND)
                dy = before_outer(dy, rounded, w, b, W, B, factor, DROPOUT, ACT, FAST)
            if W is not None:
                dy = dy * w
            if sweep == 0:
                c1 += tl.sum(dy * xhat, 1)
                c2 += tl.sum(dy, 1)
            else:
                dx = dy - xhat * (c1 / N)[:, None]
                if not RMS:
                    dx -= (c2 / N)[:, None]
                dx *= rstd
                out = row * N + cols[None, :]
                if DSUM is not None:
                    dx += load(DSUM + row * stride_dsum + cols[None, :], mask, True)
                if DRES is not None:
                    store(DRES + out, dx, mask, True)
                if DX is not None:
                    if ADD and DROPOUT:
                        dx = dx * factor
                    store(DX + out, dx, mask, True)


@triton.jit(do_not_specialize=SCALARS)
def norm_bwd_wide_weights(
    DY, X, W, B, MEAN, RSTD, SEED, DW, DB,
    M, stride_dy, stride_x, site, threshold, scale,
    OFFSET: tl.constexpr, ALIGN: tl.constexpr,
    N: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr,
    RMS: tl.constexpr, ROUND: tl.constexpr, DROPOUT: tl.constexpr, ADD: tl.constexpr,
    ACT: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """DW and dB partials [programs of axis 1, N] of BLOCK columns a program."""
    stride_dy *= ALIGN
    stride_x *= ALIGN
    first = tl.program_id(0) * BLOCK
    cols = first + tl.arange(0, BLOCK)
    w = 1.0
    b = 0.0
    if W is not None:
        w = load_weight(W, cols, N, OFFSET, True)
    if B is not None and ACT != "none":
        b = load_weight(B, cols, N, 0.0, True)
    if DROPOUT:
        seed = tl.load(SEED)
    dw = tl.zeros((R, BLOCK), tl.float32)
    db = tl.zeros((R, BLOCK), tl.float32)
    for step in tl.range(tl.program_id(1), tl.cdiv(M, R), tl.num_programs(1)):
        rows = step * R + tl.arange(0, R).to(tl.int64)
        mask = (rows < M)[:, None] & (cols < N)[None, :]
        dy = load(DY + rows[:, None] * stride_dy + cols[None, :], mask, True)
        xhat = load(X + rows[:, None] * stride_x + cols[None, :], mask, True)
        if not RMS:
            xhat -= load(MEAN + rows, rows < M, True)[:, None]
        xhat = round_to(xhat * load(RSTD + rows, rows < M, True)[:, None], ROUND)
        if not ADD:
            factor = 1.0
            if DROPOUT:
                group = rows * ((N + 7) // 8) + first // 8
                factor = _tl.dropout_factor(seed, site, group, threshold, scale, BLOCK)
            dy = before_outer(dy, xhat, w, b, W, B, factor, DROPOUT, ACT, FAST)
        dw += dy * xhat
        db += dy
    partial = tl.program_id(1).to(tl.int64) * N + cols
    if DW is not None:
        tl.store(DW + partial, tl.sum(dw, 0), mask=cols < N)
    if DB is not None:
        tl.store(DB + partial, tl.sum(db, 0), mask=cols < N)
