"""Launches of the norm kernels: which kernel, which tile, which buffers.

The tables were swept on an H200 (2026-12-01, Triton 3.6, bfloat16). Forward: one step a program,
which beats a pipelined loop but at 1024 columns. Backward: persistent throughout, since it carries
the partial sums of the weights' gradients in registers.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton.language as tl

from graphopt.kernels import _norm_triton as kernels
from graphopt.kernels import _norm_wide_triton as wide
from graphopt.kernels._launch import (
    Config,
    cdiv,
    next_power_of_2,
    pick,
    row_view,
    shared_bytes,
    sm_count,
)
from graphopt.kernels._norm_core import BackwardCall, Call
from graphopt.kernels._philox import need_seed, scale, threshold
from graphopt.kernels._prepared import Launch, Run, maker, on_rows

FORWARD = (
    Config(block=128, rows=32, warps=4, per_sm=0, stages=0),
    Config(block=256, rows=8, warps=2, per_sm=0, stages=0),
    Config(block=512, rows=2, warps=1, per_sm=0, stages=0),
    Config(block=1024, rows=2, warps=2, per_sm=8, stages=3),
    Config(block=2048, rows=1, warps=2, per_sm=0, stages=0),
    Config(block=4096, rows=1, warps=4, per_sm=0, stages=0),
    Config(block=8192, rows=1, warps=4, per_sm=0, stages=0),
    Config(block=16384, rows=1, warps=8, per_sm=0, stages=0),
    Config(block=32768, rows=1, warps=16, per_sm=0, stages=0),
)
BACKWARD = (
    Config(block=64, rows=16, warps=4, per_sm=4, stages=3),
    Config(block=128, rows=8, warps=1, per_sm=8, stages=3),
    Config(block=256, rows=8, warps=2, per_sm=4, stages=3),
    Config(block=512, rows=4, warps=2, per_sm=4, stages=3),
    Config(block=1024, rows=2, warps=2, per_sm=4, stages=3),
    Config(block=2048, rows=1, warps=4, per_sm=4, stages=3),
    Config(block=4096, rows=1, warps=4, per_sm=2, stages=3),
    Config(block=8192, rows=1, warps=8, per_sm=1, stages=3),
)
# With the gradient of the sum as a third input, 4096 columns want more bytes on their way.
BACKWARD_ADD = (
    *BACKWARD[:6],
    Config(block=4096, rows=1, warps=8, per_sm=1, stages=4),
    BACKWARD[7],
)
# Rows wider than the last line of the table are read in blocks of this many columns.
WIDE = Config(block=4096, rows=1, warps=8, per_sm=0, stages=1)
WIDE_WEIGHTS = Config(block=256, rows=8, warps=4, per_sm=4, stages=1)

# LayerNorm, dropout and ReLU of 4096 columns take 78 registers a thread, so that six programs share
# a multiprocessor; at 72 nothing is spilled and seven do: 76.8 us for 83.0 (float32 weights, H200,
# three runs each, 2026-12-01). At 64, 16 bytes are spilled and nothing is won.
DROPOUT_REGISTERS = {4096: 72}

_TRITON_DTYPE: dict[torch.dtype | None, tl.dtype] = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}


def _tile(
    table: tuple[Config, ...], inputs: tuple[torch.Tensor | None, ...], rows: int, block: int
) -> tuple[Config, int]:
    """The line for a block, fitted to the tensors that are read; and the programs.

    Rows a step are halved until every multiprocessor has work, stages dropped until the rows that
    wait in shared memory fit there (float32 on GPUs smaller than an H200).
    """
    x = inputs[0]
    assert x is not None
    size = sum(t.element_size() for t in inputs if t is not None)
    return _fitted(pick(table, block), rows, block * size, sm_count(x), shared_bytes(x))


@functools.lru_cache(maxsize=4096)
def _fitted(line: Config, rows: int, row_bytes: int, sms: int, shared: int) -> tuple[Config, int]:
    step, stages = line.rows, line.stages
    while step > 1 and cdiv(rows, step) < 2 * sms:
        step //= 2
    while stages > 1 and (stages - 1) * step * row_bytes > 0.9 * shared:
        stages -= 1
    steps = cdiv(rows, step)
    programs = min(steps, sms * line.per_sm) if line.per_sm else steps
    return Config(line.block, step, line.warps, line.per_sm, stages), programs


def _dropout(dropout_p: float, seed: torch.Tensor | None) -> tuple[Any, ...]:
    """(threshold, scale, is on)."""
    limit = threshold(dropout_p)
    if limit == 0:
        return 0, 1.0, False
    need_seed(seed)
    return limit, scale(dropout_p), True


@functools.lru_cache(maxsize=4096)
def _aligned(*strides: int) -> tuple[int, tuple[int, ...]]:
    """The largest power of two up to 16 that divides all strides, and the strides in its units."""
    align = 16
    while any(stride % align for stride in strides):
        align //= 2
    return align, tuple(stride // align for stride in strides)


def _is_short(dtype: torch.dtype) -> bool:
    return dtype in _TRITON_DTYPE


def prepare_forward(c: Call) -> Run:
    """How to write (y, sum, mean, rstd): a function of the call's five tensors and of these.

    The results are contiguous and not empty; sum is written only with a residual.
    """
    view = row_view(c.x, copy=False)
    other = row_view(c.residual, copy=False) if c.residual is not None else None
    limit, factor, drops = _dropout(c.dropout_p, c.seed)
    rows, cols = view.rows, view.cols
    block = max(8, next_power_of_2(cols))
    align, strides = _aligned(view.stride, other.stride if other else 0)
    scalars = (rows, *strides, c.site, limit, factor, float(c.eps), float(c.weight_offset), align)
    flags = {
        "RMS": c.rms, "ROUND": _TRITON_DTYPE.get(c.round_dtype), "DROPOUT": drops,
        "ACT": c.activation, "FAST": _is_short(c.out_dtype), "N": cols,
    }  # fmt: skip
    if block > FORWARD[-1].block:
        wide_flags = {**flags, "BLOCK": WIDE.block, "num_warps": WIDE.warps}
        launch = Launch(wide.norm_fwd_wide, (rows,), *scalars, **wide_flags)
    else:
        line, programs = _tile(FORWARD, (c.x, c.residual), rows, block)
        options = {"BLOCK": block, "R": line.rows, "STAGES": line.stages, "num_warps": line.warps}
        if c.x.is_cuda and drops and c.residual is None and block in DROPOUT_REGISTERS:
            options["maxnreg"] = DROPOUT_REGISTERS[block]
        launch = Launch(kernels.norm_fwd, (programs,), *scalars, **flags, **options)
    add, rms = other is not None, c.rms

    def write(x, residual, weight, bias, seed, y, total, mean, rstd):  # type: ignore[no-untyped-def]
        seed = seed.to(x.device) if drops else None
        launch(
            x, residual, weight, bias, seed, y, total if add else None, None if rms else mean, rstd
        )

    return on_rows(write, (c.x, c.residual), (c.weight, c.bias))


def prepare_backward(c: BackwardCall) -> Run:
    """How to write (dx, dresidual, dweight, dbias): a function of the call's tensors and of these.

    Those whose dtype the call does not name are not computed. x is the normed tensor: the input,
    or with ``add`` the sum.
    """
    view, grad = row_view(c.x, copy=False), row_view(c.dy, copy=False)
    extra = row_view(c.dsum, copy=False) if c.dsum is not None else None
    rows, cols = view.rows, view.cols
    limit, factor, drops = _dropout(c.dropout_p, c.seed)
    align, strides = _aligned(grad.stride, extra.stride if extra else 0, view.stride)
    scalars = (c.site, limit, factor, float(c.weight_offset), align)
    flags = {
        "RMS": c.rms, "ROUND": _TRITON_DTYPE.get(c.round_dtype), "DROPOUT": drops, "ADD": c.add,
        "ACT": c.activation, "FAST": _is_short(c.dy.dtype), "N": cols,
    }  # fmt: skip
    block = max(8, next_power_of_2(cols))
    over_rows: Launch | None = None
    if block <= BACKWARD[-1].block:
        line, programs = _tile(
            BACKWARD_ADD if c.add else BACKWARD, (c.x, c.dy, c.dsum), rows, block
        )
        whole = Launch(
            kernels.norm_bwd, (programs,), rows, *strides, *scalars,
            BLOCK=block, R=line.rows, STAGES=line.stages, **flags, num_warps=line.warps,
        )  # fmt: skip
    else:
        if c.dx is not None or c.dresidual is not None:
            over_rows = Launch(
                wide.norm_bwd_wide, (rows,), *strides, *scalars,
                BLOCK=WIDE.block, **flags, num_warps=WIDE.warps,
            )  # fmt: skip
        line = WIDE_WEIGHTS
        across = cdiv(cols, line.block)
        programs = min(cdiv(rows, line.rows), cdiv(sm_count(c.x) * line.per_sm, across))
        whole = Launch(
            wide.norm_bwd_wide_weights, (across, programs),
            rows, strides[0], strides[2], *scalars,
            BLOCK=line.block, R=line.rows, **flags, num_warps=line.warps,
        )  # fmt: skip
    reduce = Launch(
        kernels.norm_bwd_reduce,
        (cdiv(cols, 32),),
        programs,
        cols,
        BLOCK_P=64,
        BLOCK=32,
        num_warps=4,
    )
    narrow = block <= BACKWARD[-1].block
    wanted = [dtype is not None for dtype in (c.dx, c.dresidual, c.dweight, c.dbias)]
    make_dw, make_db = (
        maker(c.x, (programs, cols) if asked else None, torch.float32) for asked in wanted[2:]
    )
    rms = c.rms

    def write(x, dy, dsum, weight, bias, mean, rstd, seed, *outputs):  # type: ignore[no-untyped-def]
        seed = seed.to(x.device) if drops else None
        operands = (weight, bias, None if rms else mean, rstd, seed)
        dx, dresidual, dweight, dbias = (
            t if asked else None for t, asked in zip(outputs, wanted, strict=True)
        )
        if over_rows is not None:
            over_rows(dy, dsum, x, *operands, dx, dresidual)
        sums = dweight is not None or dbias is not None
        dw = make_dw(x) if dweight is not None else None
        db = make_db(x) if dbias is not None else None
        if narrow:
            whole(dy, dsum, x, *operands, dx, dresidual, dw, db)
        elif sums:
            whole(dy, x, *operands, dw, db)
        if sums:
            reduce(dw, db, dweight, dbias)

    return on_rows(write, (c.x, c.dy, c.dsum), (c.weight, c.bias))
