"""The backward of glu into memory that is there already, which may be that of gate and up.

Each program reads its part of dy, gate and up before it writes the same part of the gradients, and
no program reads what another writes, so that a gradient may lie where its operand does.
"""

from __future__ import annotations

import torch

from graphopt.kernels._glu_triton import _glu_bwd
from graphopt.kernels._launch import on_device, row_view
from graphopt.kernels._pointwise import BACKWARD_TILE, HALF, lay_out, tile


def backward_out(
    dy: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    activation: str,
    dgate: torch.Tensor,
    dup: torch.Tensor,
) -> None:
    """Write both gradients; rows of dgate and of dup lie at one stride."""
    if gate.numel() == 0:
        return
    # One long row only where the results lie so, too.
    flat = dgate.is_contiguous() and dup.is_contiguous()
    (rows_dy, rows_gate, rows_up), count, cols = lay_out(dy, gate, up, flat=flat)
    tiles = tile(count, cols, BACKWARD_TILE)
    with on_device(gate):
        _glu_bwd[(tiles.across * tiles.down,)](
            rows_dy.tensor, rows_gate.tensor, rows_up.tensor, dgate, dup, count, cols,
            rows_dy.stride, rows_gate.stride, rows_up.stride, row_view(dgate).stride,
            ACT=activation, FAST=gate.dtype in HALF and up.dtype in HALF,
            BM=tiles.rows_a_tile, BN=tiles.cols_a_tile, num_warps=4,
        )  # fmt: skip
