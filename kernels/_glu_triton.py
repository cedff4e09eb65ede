"""Triton for glu: activation(gate) * up, one pass forward and one pass backward.

Rows of gate and of up may lie at any stride, so the halves of a packed [M, 2F] projection are read
in place. Backward reads dy, gate and up and writes dgate and dup, which may be the halves of one
buffer as well.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graphopt.kernels._launch import row_view
from graphopt.kernels._pointwise import BACKWARD_TILE, FORWARD_TILE, HALF, lay_out, tile
from graphopt.kernels._prepared import Launch, Run, maker, on_rows
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


def prepare_forward(
    gate: torch.Tensor, up: torch.Tensor, activation: str, out_dtype: torch.dtype
) -> Run:
    """A function of (gate, up): activation(gate) * up, contiguous, of out_dtype."""
    make = maker(gate, gate.shape, out_dtype)
    if gate.numel() == 0:
        return lambda gate, up: make(gate)
    (rows_gate, rows_up), count, cols = lay_out(gate, up, flat=True, copy=False)
    tiles = tile(count, cols, FORWARD_TILE)
    launch = Launch(
        _glu_fwd, (tiles.across * tiles.down,), count, cols, rows_gate.stride, rows_up.stride,
        ACT=activation, FAST=out_dtype in HALF,
        BM=tiles.rows_a_tile, BN=tiles.cols_a_tile, num_warps=4,
    )  # fmt: skip

    def run(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        y = make(gate)
        launch(gate, up, y)
        return y

    return on_rows(run, (gate, up), ())


def prepare_backward(
    dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: str
) -> Run:
    """A function of (dy, gate, up): dgate and dup, contiguous, each in its input's dtype."""
    make_dgate = maker(gate, gate.shape, gate.dtype)
    make_dup = maker(up, up.shape, up.dtype)
    if gate.numel() == 0:
        return lambda dy, gate, up: (make_dgate(gate), make_dup(up))
    stride = gate.shape[-1] if gate.dim() else 1
    launch = _backward_launch(stride, dy, gate, up, activation, flat=True)

    def run(
        dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dgate, dup = make_dgate(gate), make_dup(up)
        launch(dy, gate, up, dgate, dup)
        return dgate, dup

    return on_rows(run, (dy, gate, up), ())


def prepare_backward_packed(
    dy: torch.Tensor, packed: torch.Tensor, activation: str, gate_first: bool
) -> Run:
    """A function of (dy, packed): the gradient of [..., 2N], contiguous.

    Both halves are written where they lie.
    """
    make = maker(packed, packed.shape, packed.dtype)
    if packed.numel() == 0:
        return lambda dy, packed: make(packed)
    gate, up = _halves(packed, gate_first)
    # One long row only where the results lie so, too.
    flat = packed.numel() == packed.shape[-1]  # a single row
    launch = _backward_launch(packed.shape[-1], dy, gate, up, activation, flat=flat)

    def write(dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, *grads: torch.Tensor) -> None:
        launch(dy, gate, up, *grads)

    laid = on_rows(write, (dy, gate, up), ())

    def run(dy: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
        grad = make(packed)
        laid(dy, *_halves(packed, gate_first), *_halves(grad, gate_first))
        return grad

    return run


def prepare_backward_out(
    dy: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    dgate: torch.Tensor,
    dup: torch.Tensor,
    activation: str,
) -> Run:
    """A function of (dy, gate, up, dgate, dup), which writes the last two.

    They may lie where gate and up do: each program reads its part of those before it writes the
    same part of the gradients, and no program reads what another writes. The rows of both lie at
    one stride.
    """
    if gate.numel() == 0:
        return lambda *_: None
    flat = dgate.is_contiguous() and dup.is_contiguous()
    launch = _backward_launch(row_view(dgate).stride, dy, gate, up, activation, flat=flat)
    return on_rows(lambda *tensors: launch(*tensors), (dy, gate, up), ())


def _halves(packed: torch.Tensor, gate_first: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(gate, up) of [..., 2N]."""
    first, second = packed.chunk(2, dim=-1)
    return (first, second) if gate_first else (second, first)


def _backward_launch(
    stride: int, dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: str, *,
    flat: bool,
) -> Launch:  # fmt: skip
    """A launch of (dy, gate, up, dgate, dup), both results with rows `stride` elements apart."""
    (rows_dy, rows_gate, rows_up), count, cols = lay_out(dy, gate, up, flat=flat, copy=False)
    tiles = tile(count, cols, BACKWARD_TILE)
    return Launch(
        _glu_bwd, (tiles.across * tiles.down,),
        count, cols, rows_dy.stride, rows_gate.stride, rows_up.stride, stride,
        ACT=activation, FAST=gate.dtype in HALF and up.dtype in HALF,
        BM=tiles.rows_a_tile, BN=tiles.cols_a_tile, num_warps=4,
    )  # fmt: skip
