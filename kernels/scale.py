"""scale_: a tensor multiplied by a scalar tensor, in place; a factor of one costs next to nothing.

Gradients that were taken for a loss of 1 are multiplied by the loss's own gradient, which is 1
unless a scaler or an accumulation stands behind the loss. Only the device knows: to ask would make
the host wait, so the kernel looks, and then leaves the tensor alone. Arithmetic in float32 (float64
if an input is: by the reference), one rounding at the store.
"""

from __future__ import annotations

from typing import Any

import torch

from graphopt.kernels._library import define
from graphopt.kernels._pointwise import kernel_serves
from graphopt.kernels._prepared import Prepared, Run


def _reference(x: torch.Tensor, factor: torch.Tensor) -> None:
    # a factor of one dimension takes part in the choice of the dtype that is computed in
    flat = x.view(-1)
    torch.mul(flat, factor.reshape(1), out=flat)


def _prepare(tensors: tuple[Any, ...], options: tuple[Any, ...]) -> Run:
    x, factor = tensors
    if not kernel_serves(x, factor) or x.numel() == 0:
        return _reference
    from graphopt.kernels._scale_triton import prepare_scale

    return prepare_scale(x)


_LAUNCH = Prepared(_prepare)

# x is contiguous, factor has one element.
SCALE = define(
    "scale_(Tensor(a!) x, Tensor factor) -> ()",
    launch=lambda x, factor: _LAUNCH((x, factor), ()),
    reference=_reference,
    fake=lambda x, factor: None,
)
