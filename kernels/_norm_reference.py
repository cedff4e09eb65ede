"""The norm family in plain torch: its meaning, and its implementation where Triton does not run.

Forward and backward are written out separately, so that each tests the other: the gradients below
are checked against autograd through the forward in float64.
"""

from __future__ import annotations

import torch

from graphopt.kernels import _activations
from graphopt.kernels._philox import dropout_factor


def compute_dtype(*tensors: torch.Tensor | None) -> torch.dtype:
    """float64 if any tensor is, else float32.

    Example:
        >>> compute_dtype(torch.ones(1, dtype=torch.bfloat16), None)
        torch.float32
    """
    wide = any(t is not None and t.dtype == torch.float64 for t in tensors)
    return torch.float64 if wide else torch.float32


def forward(
    x: torch.Tensor, residual: torch.Tensor | None,
    weight: torch.Tensor | None, bias: torch.Tensor | None, seed: torch.Tensor | None,
    eps: float, rms: bool, weight_offset: float, round_dtype: torch.dtype | None,
    dropout_p: float, site: int, activation: str,
    sum_dtype: torch.dtype, out_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(y, sum, mean [rows], rstd [rows]); sum is empty without a residual, mean empty for rms."""
    dtype = compute_dtype(x, residual, weight, bias)
    factor = dropout_factor(x, dropout_p, seed, site, dtype)
    h, total = x.to(dtype), x.new_empty(0)
    if residual is not None:
        h = residual.to(dtype) + (h if factor is None else h * factor)
        total = h.to(sum_dtype).contiguous()
        h = total.to(dtype)
    w = None if weight is None else weight.to(dtype) + weight_offset
    b = None if bias is None else bias.to(dtype)
    if rms:
        mean = h.new_empty(0)
        rstd = torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
        y = _rounded(h * rstd, round_dtype)
        y = y if w is None else w * y
    else:
        # torch's own kernel: the same bits as eager's layer_norm in this dtype.
        y, mean, rstd = torch.native_layer_norm(h, h.shape[-1:], w, b, eps)
    if factor is not None and residual is None:
        y = y * factor
    y = _activations.apply(y, activation).to(out_dtype)
    return y.contiguous(), total, mean.reshape(-1), rstd.reshape(-1)


def backward(
    x: torch.Tensor, dy: torch.Tensor, dsum: torch.Tensor | None,
    weight: torch.Tensor | None, bias: torch.Tensor | None,
    mean: torch.Tensor, rstd: torch.Tensor, seed: torch.Tensor | None,
    rms: bool, weight_offset: float, round_dtype: torch.dtype | None,
    dropout_p: float, site: int, activation: str, add: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Gradients (input, residual, weight, bias) in the compute dtype; see ``norm_backward``."""
    dtype = rstd.dtype
    lead = (*x.shape[:-1], 1)
    rstd = rstd.reshape(lead)
    xhat = x.to(dtype) * rstd if rms else (x.to(dtype) - mean.reshape(lead)) * rstd
    rounded = _rounded(xhat, round_dtype)
    w = None if weight is None else weight.to(dtype) + weight_offset
    factor = dropout_factor(x, dropout_p, seed, site, dtype)
    g = dy.to(dtype)
    if not add:
        z = rounded if w is None else rounded * w
        z = z if bias is None else z + bias.to(dtype)
        z = z if factor is None else z * factor
        g = g if activation == "none" else g * _activations.derivative(z, activation)
        g = g if factor is None else g * factor
    cols = x.shape[-1]
    dw, db = (g * rounded).reshape(-1, cols).sum(0), g.reshape(-1, cols).sum(0)
    g = g if w is None else g * w
    dres = g - xhat * (g * xhat).mean(-1, keepdim=True)
    if not rms:
        dres = dres - g.mean(-1, keepdim=True)
    dres = dres * rstd
    if dsum is not None:
        dres = dres + dsum.to(dtype)
    dx = dres * factor if add and factor is not None else dres
    return dx, dres, dw, db


def _rounded(xhat: torch.Tensor, round_dtype: torch.dtype | None) -> torch.Tensor:
    return xhat if round_dtype is None else xhat.to(round_dtype).to(xhat.dtype)
