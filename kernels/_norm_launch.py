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
    on_device,
    pick,
    row_view,
    shared_bytes,
    sm_count,
)
from graphopt.kernels._philox import need_seed, scale, threshold

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


def _dropout(dropout_p: float, seed: torch.Tensor | None, device: torch.device) -> tuple[Any, ...]:
    """(seed pointer, threshold, scale, is on)."""
    limit = threshold(dropout_p)
    if limit == 0:
        return None, 0, 1.0, False
    return need_seed(seed).to(device), limit, scale(dropout_p), True


@functools.lru_cache(maxsize=4096)
def _aligned(*strides: int) -> tuple[int, tuple[int, ...]]:
    """The largest power of two up to 16 that divides all strides, and the strides in its units."""
    align = 16
    while any(stride % align for stride in strides):
        align //= 2
    return align, tuple(stride // align for stride in strides)


def _is_short(dtype: torch.dtype) -> bool:
    return dtype in _TRITON_DTYPE


def forward(
    x: torch.Tensor, residual: torch.Tensor | None, outputs: tuple[torch.Tensor, ...],
    weight: torch.Tensor | None, bias: torch.Tensor | None, seed: torch.Tensor | None,
    eps: float, rms: bool, weight_offset: float, round_dtype: torch.dtype | None,
    dropout_p: float, site: int, activation: str,
) -> None:  # fmt: skip
    """Write (y, sum, mean, rstd), which are contiguous and not empty; sum only with a residual."""
    y, total, mean, rstd = outputs
    view = row_view(x)
    other = row_view(residual) if residual is not None else None
    seed, limit, factor, drops = _dropout(dropout_p, seed, x.device)
    block = max(8, next_power_of_2(view.cols))
    pointers = (
        view.tensor, other.tensor if other else None, _vector(weight), _vector(bias), seed,
        y, total if other else None, None if rms else mean, rstd,
    )  # fmt: skip
    align, strides = _aligned(view.stride, other.stride if other else 0)
    scalars = (view.rows, *strides, site, limit, factor, float(eps), float(weight_offset), align)
    flags = {
        "RMS": rms, "ROUND": _TRITON_DTYPE.get(round_dtype), "DROPOUT": drops,
        "ACT": activation, "FAST": _is_short(y.dtype),
    }  # fmt: skip
    with on_device(x):
        if block > FORWARD[-1].block:
            wide.norm_fwd_wide[(view.rows,)](
                *pointers, *scalars, N=view.cols, BLOCK=WIDE.block, **flags, num_warps=WIDE.warps
            )
            return
        line, programs = _tile(FORWARD, (x, residual), view.rows, block)
        limit_registers = x.is_cuda and drops and residual is None and block in DROPOUT_REGISTERS
        options = {"maxnreg": DROPOUT_REGISTERS[block]} if limit_registers else {}
        kernels.norm_fwd[(programs,)](
            *pointers, *scalars, N=view.cols, BLOCK=block, R=line.rows, STAGES=line.stages,
            **flags, num_warps=line.warps, **options,
        )  # fmt: skip


def backward(
    x: torch.Tensor, dy: torch.Tensor, dsum: torch.Tensor | None,
    outputs: tuple[torch.Tensor | None, ...],
    weight: torch.Tensor | None, bias: torch.Tensor | None,
    mean: torch.Tensor, rstd: torch.Tensor, seed: torch.Tensor | None,
    rms: bool, weight_offset: float, round_dtype: torch.dtype | None,
    dropout_p: float, site: int, activation: str, add: bool,
) -> None:  # fmt: skip
    """Write (dx, dresidual, dweight, dbias); those that are None are not computed.

    x is the normed tensor: the input, or with ``add`` the sum.
    """
    dx, dres, dw, db = outputs
    view, grad = row_view(x), row_view(dy)
    extra = row_view(dsum) if dsum is not None else None
    rows, cols = view.rows, view.cols
    seed, limit, factor, drops = _dropout(dropout_p, seed, x.device)
    operands = (_vector(weight), _vector(bias), None if rms else mean, rstd, seed)
    align, strides = _aligned(grad.stride, extra.stride if extra else 0, view.stride)
    scalars = (site, limit, factor, float(weight_offset), align)
    flags = {
        "RMS": rms, "ROUND": _TRITON_DTYPE.get(round_dtype), "DROPOUT": drops, "ADD": add,
        "ACT": activation, "FAST": _is_short(dy.dtype),
    }  # fmt: skip
    added = extra.tensor if extra else None
    block = max(8, next_power_of_2(cols))
    with on_device(x):
        if block <= BACKWARD[-1].block:
            table = BACKWARD_ADD if add else BACKWARD
            line, programs = _tile(table, (x, dy, dsum), rows, block)
            partials = _partials(x, programs, cols, dw, db)
            kernels.norm_bwd[(programs,)](
                grad.tensor, added, view.tensor, *operands, dx, dres, *partials,
                rows, *strides, *scalars,
                N=cols, BLOCK=block, R=line.rows, STAGES=line.stages,
                **flags, num_warps=line.warps,
            )  # fmt: skip
        else:
            if dx is not None or dres is not None:
                wide.norm_bwd_wide[(rows,)](
                    grad.tensor, added, view.tensor, *operands, dx, dres,
                    *strides, *scalars,
                    N=cols, BLOCK=WIDE.block, **flags, num_warps=WIDE.warps,
                )  # fmt: skip
            if dw is None and db is None:
                return
            line = WIDE_WEIGHTS
            across = cdiv(cols, line.block)
            programs = min(cdiv(rows, line.rows), cdiv(sm_count(x) * line.per_sm, across))
            partials = _partials(x, programs, cols, dw, db)
            wide.norm_bwd_wide_weights[(across, programs)](
                grad.tensor, view.tensor, *operands, *partials,
                rows, strides[0], strides[2], *scalars,
                N=cols, BLOCK=line.block, R=line.rows, **flags, num_warps=line.warps,
            )  # fmt: skip
        if dw is not None or db is not None:
            kernels.norm_bwd_reduce[(cdiv(cols, 32),)](
                *partials, dw, db, programs, cols, BLOCK_P=64, BLOCK=32, num_warps=4
            )


def _partials(
    x: torch.Tensor, programs: int, cols: int, dw: torch.Tensor | None, db: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Float32 [programs, N] for each weight gradient wanted; every program writes its row."""
    wanted = (dw is not None) + (db is not None)
    if not wanted:
        return None, None
    both = torch.empty(wanted, programs, cols, device=x.device, dtype=torch.float32)
    return both[0] if dw is not None else None, both[-1] if db is not None else None


def _vector(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.contiguous()
