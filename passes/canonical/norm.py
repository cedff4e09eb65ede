"""LayerNorm and RMSNorm from their spelled-out forms.

RMSNorm differs from model to model in where it rounds (Llama before the weight, Gemma after) and
in what the weight is (w, or 1 + w); `graphopt.rms_norm` carries both, so no number changes place.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from graphopt.graph.pattern import either
from graphopt.passes.base import surely
from graphopt.passes.rule import Match, Spelling, rule

aten = torch.ops.aten
graphopt = torch.ops.graphopt
FLOAT = torch.float32


def square(x: Any) -> Any:
    """Pattern of x ** 2."""
    return either(aten.pow.Tensor_Scalar(x, 2), aten.mul.Tensor(x, x), aten.square.default(x))


def inverse_root(value: Any, eps: Any) -> Any:
    """Pattern of 1 / sqrt(value + eps)."""
    return aten.rsqrt.default(aten.add.Tensor(value, eps))


def last_dim(x: torch.Tensor, dim: Any) -> bool:
    """Whether a dim argument (int or list) means the last dim alone."""
    dims = [dim] if isinstance(dim, int) else dim
    return isinstance(dims, (list, tuple)) and list(dims) in ([-1], [x.dim() - 1])


def row_weight(m: Match, name: str) -> str | None:
    """Why a captured weight is not one value for each position of the last dim, or None."""
    x, w = m.tensor("x"), m.tensor(name)
    if x is None or w is None:
        return f"{name} is not a tensor"
    if w.dim() != 1 or not surely(w.shape[0] == x.shape[-1]):
        return f"{name} has shape {list(w.shape)}, the last dim has {x.shape[-1]}"
    return None


def normalized(x: Any, dim: Any, eps: Any) -> Any:
    """Pattern of x / rms(x), with x cast to float32 before or not."""
    wide = either(aten.to.dtype(x, FLOAT), x)
    mean = aten.mean.dim(square(wide), dim, True)
    return either(
        aten.mul.Tensor(wide, inverse_root(mean, eps)),
        aten.div.Tensor(wide, aten.sqrt.default(aten.add.Tensor(mean, eps))),
    )


@rule("canonical")
def rms_norm(x, dim, eps, weight):
    """X * rsqrt(mean(x^2) + eps) * weight, in each rounding order, is graphopt.rms_norm."""
    return aten.mul.Tensor(weight, normalized(x, dim, eps))


@rms_norm.also
def _rms_norm_rounded(x, dim, eps, weight, rounded):
    return aten.mul.Tensor(weight, aten.to.dtype(normalized(x, dim, eps), rounded))


@rms_norm.also
def _rms_norm_offset(x, dim, eps, weight, offset):
    wide = either(aten.to.dtype(weight, FLOAT), weight)
    return aten.mul.Tensor(normalized(x, dim, eps), aten.add.Tensor(wide, offset))


@rms_norm.also
def _rms_norm_bare(x, dim, eps):
    return normalized(x, dim, eps)


@rms_norm.check
def _(m: Match) -> str | None:
    x = m.tensor("x")
    if x is None or x.dtype not in (torch.float16, torch.bfloat16, FLOAT, torch.float64):
        return "x is not a floating-point tensor"
    if x.dtype == torch.float64 and any(n.target is aten.to.dtype for n in m.nodes):
        return "x is float64 and is rounded to float32 on purpose"
    mean = next(n for n in m.nodes if n.target is aten.mean.dim).meta["val"]
    if mean.dtype not in (FLOAT, torch.float64):
        return f"its mean is taken in {mean.dtype}: each step rounds, on purpose or not"
    if not last_dim(x, m.dim):
        return f"the mean is over {m.dim}, the kernel norms the last dim"
    if not isinstance(m.eps, (int, float)):
        return "eps is not a number"
    rounded = m.captures.get("rounded")
    if rounded is not None and rounded not in (torch.float16, torch.bfloat16, FLOAT):
        return f"the normed value is rounded to {rounded}"
    offset = m.captures.get("offset")
    if offset is not None and (isinstance(offset, bool) or not isinstance(offset, (int, float))):
        return "the weight's offset is not a number"
    return row_weight(m, "weight") if "weight" in m.captures else None


@rms_norm.replace
def _(m: Match) -> fx.Node:
    rounded = m.captures.get("rounded")
    return m.call(
        graphopt.rms_norm.default,
        m.x,
        m.captures.get("weight"),
        float(m.eps),
        weight_offset=float(m.captures["offset"]) if m.captures.get("offset") else None,
        round_dtype=None if rounded == FLOAT else rounded,
        out_dtype=None if m.val.dtype == m.x.meta["val"].dtype else m.val.dtype,
    )


def _llama(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    h = x.to(FLOAT)
    return w * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def _gemma(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (h * (1.0 + w.float())).type_as(x)


@rms_norm.spellings
def _() -> Iterator[Spelling]:
    for dtype in (torch.float32, torch.bfloat16):
        x, w = torch.randn(3, 8).to(dtype), torch.rand(8).to(dtype)
        yield _llama, (x, w)
        yield _gemma, (x, w)
    x, w = torch.randn(3, 8), torch.rand(8)
    yield lambda x, w: x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6) * w, (x, w)
    yield lambda x: x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-6), (x,)


@rms_norm.refuses
def _() -> Iterator[Spelling]:
    x, w = torch.randn(8, 8), torch.rand(8)
    yield lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + 1e-6)), (x, w)
    yield (
        lambda x, y: x * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6),
        (x, torch.randn(8, 8)),
    )
    low = (x.bfloat16(), w)
    yield lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)), low
    yield lambda x: x * torch.rsqrt(x.pow(3).mean(-1, keepdim=True) + 1e3), (x,)


@rule("canonical")
def torch_rms_norm(x, shape, weight, eps):
    """aten.rms_norm over the last dim is graphopt.rms_norm."""
    return aten.rms_norm.default(x, shape, weight, eps)


@torch_rms_norm.check
def _(m: Match) -> str | None:
    x = m.tensor("x")
    if x is None or not x.dtype.is_floating_point:
        return "x is not a floating-point tensor"
    if len(m.shape) != 1:
        return f"it norms the last {len(m.shape)} dims, the kernel takes one"
    if m.eps is None and x.dtype not in (FLOAT, torch.float64):
        return "eps is left to torch, which takes another for low precision in each version"
    return None if m.weight is None else row_weight(m, "weight")


@torch_rms_norm.replace
def _(m: Match) -> fx.Node:
    x = m.x.meta["val"]
    eps = torch.finfo(x.dtype).eps if m.eps is None else float(m.eps)
    out = None if m.val.dtype == x.dtype else m.val.dtype
    return m.call(graphopt.rms_norm.default, m.x, m.weight, eps, out_dtype=out)


@torch_rms_norm.spellings
def _() -> Iterator[Spelling]:
    x, w = torch.randn(3, 8), torch.rand(8)
    yield lambda x, w: torch.nn.functional.rms_norm(x, (8,), w, 1e-6), (x, w)
    yield lambda x: torch.nn.functional.rms_norm(x, (8,)), (x,)


@torch_rms_norm.refuses
def _() -> Iterator[Spelling]:
    yield lambda x: torch.nn.functional.rms_norm(x, (4, 8)), (torch.randn(3, 4, 8),)


def _standardized(x: Any, dim: Any, eps: Any) -> Any:
    mean = aten.mean.dim(x, dim, True)
    centered = aten.sub.Tensor(x, mean)
    variance = either(
        aten.var.correction(x, dim, correction=0, keepdim=True),
        aten.var.dim(x, dim, False, True),
        aten.mean.dim(square(centered), dim, True),
    )
    return either(
        aten.mul.Tensor(centered, inverse_root(variance, eps)),
        aten.div.Tensor(centered, aten.sqrt.default(aten.add.Tensor(variance, eps))),
    )


@rule("canonical")
def spelled_layer_norm(x, dim, eps):
    """(x - mean) / sqrt(var + eps), with weight and bias or without, is aten.layer_norm."""
    return _standardized(x, dim, eps)


@spelled_layer_norm.also
def _layer_norm_weight(x, dim, eps, weight):
    return aten.mul.Tensor(_standardized(x, dim, eps), weight)


@spelled_layer_norm.also
def _layer_norm_weight_bias(x, dim, eps, weight, bias):
    return aten.add.Tensor(aten.mul.Tensor(_standardized(x, dim, eps), weight), bias)


@spelled_layer_norm.check
def _(m: Match) -> str | None:
    x = m.tensor("x")
    if x is None or x.dtype not in (FLOAT, torch.float64):
        return "in low precision the spelled-out form rounds at each step, on purpose or not"
    if not last_dim(x, m.dim):
        return f"the statistics are over {m.dim}, not over the last dim"
    if not isinstance(m.eps, (int, float)):
        return "eps is not a number"
    for name in ("weight", "bias"):
        if name in m.captures and (reason := row_weight(m, name)):
            return reason
    if m.val.dtype != x.dtype:
        return "the result is wider than x"
    return None


@spelled_layer_norm.replace
def _(m: Match) -> fx.Node:
    shape = [m.x.meta["val"].shape[-1]]
    if not isinstance(shape[0], int):
        shape = [m.call(aten.sym_size.int, m.x, -1)]
    weight, bias = m.captures.get("weight"), m.captures.get("bias")
    return m.call(aten.layer_norm.default, m.x, shape, weight, bias, float(m.eps))


def _by_hand(x: torch.Tensor) -> torch.Tensor:
    centered = x - x.mean(-1, keepdim=True)
    return centered / torch.sqrt((centered**2).mean(-1, keepdim=True) + 1e-5)


@spelled_layer_norm.spellings
def _() -> Iterator[Spelling]:
    x, w, b = torch.randn(3, 8), torch.rand(8), torch.rand(8)
    yield _by_hand, (x,)
    yield lambda x, w, b: _by_hand(x) * w + b, (x, w, b)

    def with_var(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        var = x.var(-1, keepdim=True, unbiased=False)
        return w * ((x - x.mean(-1, keepdim=True)) * torch.rsqrt(var + 1e-5))

    yield with_var, (x, w)


@spelled_layer_norm.refuses
def _() -> Iterator[Spelling]:
    x = torch.randn(3, 8)
    yield (
        lambda x: (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, keepdim=True) + 1e-5),
        (x,),
    )
    yield (
        lambda x, y: (
            (x - y.mean(-1, keepdim=True))
            / torch.sqrt(x.var(-1, keepdim=True, unbiased=False) + 1e-5)
        ),
        (x, torch.randn(3, 8)),
    )
