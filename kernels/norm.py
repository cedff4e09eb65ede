"""LayerNorm and RMSNorm over the last dimension, alone or after a residual add, with dropout.

    h    = x                                         layer_norm, rms_norm
    h    = (residual + dropout(x)).to(sum_dtype)     add_*: returned beside y
    xhat = (h - mean(h)) * rsqrt(var(h) + eps)       or h * rsqrt(mean(h^2) + eps)
    y    = xhat * weight + bias                      rms: round(xhat) * (weight_offset + weight)
    y    = activation(dropout(y))                    layer_norm, rms_norm

One read of each input and one write of each output, forward and backward. Arithmetic is float32
(float64 if any input is) with one rounding at the store; the variance is E[(h - mean)^2]. The
backward keeps the inputs (add_*: the sum, which the model holds anyway) and a float32 mean and rstd
a row; it recomputes xhat and the dropout mask. Weight gradients are summed in a fixed order:
equal runs give equal bits. Rows wider than the launch tables take a second read of the row; float64
takes the reference on every device. Outputs are contiguous.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from graphopt.kernels._library import define
from graphopt.kernels._norm_core import (
    Call,
    MaybeTensor,
    forward_fake,
    forward_launch,
    forward_reference,
    gradient,
)
from graphopt.kernels._op import Cost, Op, Sample, register, tensor_bytes


def _layer_norm_call(
    x, weight, bias, eps, dropout_p=0.0, seed=None, site=0, activation="none", out_dtype=None
) -> Call:
    out = out_dtype or x.dtype
    return Call(
        x, None, weight, bias, seed, eps, False, 0.0, None, dropout_p, site, activation, out, out
    )


def _add_layer_norm_call(
    x, residual, weight, bias, eps, dropout_p=0.0, seed=None, site=0, sum_dtype=None, out_dtype=None
) -> Call:
    total = sum_dtype or torch.promote_types(x.dtype, residual.dtype)
    return Call(
        x, residual, weight, bias, seed, eps, False, 0.0, None, dropout_p, site, "none",
        total, out_dtype or total,
    )  # fmt: skip


def _rms_norm_call(
    x, weight, eps, weight_offset=0.0, round_dtype=None, dropout_p=0.0, seed=None, site=0,
    activation="none", out_dtype=None,
) -> Call:  # fmt: skip
    out = out_dtype or x.dtype
    return Call(
        x, None, weight, None, seed, eps, True, weight_offset, round_dtype, dropout_p, site,
        activation, out, out,
    )  # fmt: skip


def _add_rms_norm_call(
    x, residual, weight, eps, weight_offset=0.0, round_dtype=None, dropout_p=0.0, seed=None, site=0,
    sum_dtype=None, out_dtype=None,
) -> Call:  # fmt: skip
    total = sum_dtype or torch.promote_types(x.dtype, residual.dtype)
    return Call(
        x, residual, weight, None, seed, eps, True, weight_offset, round_dtype, dropout_p, site,
        "none", total, out_dtype or total,
    )  # fmt: skip


def layer_norm(
    x: torch.Tensor, weight: MaybeTensor, bias: MaybeTensor, eps: float, **more: Any
) -> torch.Tensor:
    """activation(dropout(layer_norm(x) * weight + bias)) over the last dimension, in plain torch.

    Args:
        x: [..., N], any floating dtype, any strides.
        weight: [N] or None, any floating dtype.
        bias: [N] or None.
        eps: added to the variance.
        **more: dropout_p=0.0, seed=None (0-d int64), site=0, activation="none",
            out_dtype=None (x's).

    Returns:
        y, shaped as x, contiguous.

    Raises:
        OptionError: shapes do not fit, the activation is unknown, or dropout has no seed.

    Example:
        >>> layer_norm(torch.tensor([[1.0, 3.0]]), None, None, 0.0)
        tensor([[-1.,  1.]])
    """
    return forward_reference(*_layer_norm_call(x, weight, bias, eps, **more))[0]


def add_layer_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: MaybeTensor, bias: MaybeTensor, eps: float,
    **more: Any,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """(layer_norm(sum), sum) with sum = residual + dropout(x), in plain torch.

    Args:
        x: [..., N], any floating dtype, any strides.
        residual: shaped as x.
        weight: [N] or None.
        bias: [N] or None.
        eps: added to the variance.
        **more: dropout_p=0.0, seed=None, site=0, sum_dtype=None (the promotion of x and residual),
            out_dtype=None (the sum's).

    Returns:
        (y, sum); y is computed from the sum as rounded.

    Example:
        >>> y, total = add_layer_norm(torch.tensor([[1.0, 2.0]]), torch.tensor([[0.0, 1.0]]),
        ...                           None, None, 0.0)
        >>> y, total
        (tensor([[-1.,  1.]]), tensor([[1., 3.]]))
    """
    return forward_reference(*_add_layer_norm_call(x, residual, weight, bias, eps, **more))[:2]


def rms_norm(x: torch.Tensor, weight: MaybeTensor, eps: float, **more: Any) -> torch.Tensor:
    """activation(dropout(round(x * rsqrt(mean(x^2) + eps)) * (weight_offset + weight))).

    Args:
        x: [..., N], any floating dtype, any strides.
        weight: [N] or None.
        eps: added to the mean square.
        **more: weight_offset=0.0 (Gemma: 1.0), round_dtype=None (Llama: the model's dtype, since
            it casts before the weight), dropout_p=0.0, seed=None, site=0, activation="none",
            out_dtype=None (x's).

    Returns:
        y, shaped as x, contiguous.

    Example:
        >>> rms_norm(torch.tensor([[3.0, 3.0]]), None, 0.0)
        tensor([[1., 1.]])
    """
    return forward_reference(*_rms_norm_call(x, weight, eps, **more))[0]


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: MaybeTensor, eps: float, **more: Any
) -> tuple[torch.Tensor, ...]:
    """(rms_norm(sum), sum) with sum = residual + dropout(x), in plain torch.

    Args:
        x: [..., N], any floating dtype, any strides.
        residual: shaped as x.
        weight: [N] or None.
        eps: added to the mean square.
        **more: weight_offset=0.0, round_dtype=None, dropout_p=0.0, seed=None, site=0,
            sum_dtype=None (the promotion of x and residual), out_dtype=None (the sum's).

    Returns:
        (y, sum); y is computed from the sum as rounded.

    Example:
        >>> add_rms_norm(torch.tensor([[1.0, 1.0]]), torch.tensor([[1.0, 1.0]]), None, 0.0)
        (tensor([[1., 1.]]), tensor([[2., 2.]]))
    """
    return forward_reference(*_add_rms_norm_call(x, residual, weight, eps, **more))[:2]


# ---- cost, samples, registration -----------------------------------------------------------------


def _cost(to_call: Callable[..., Call]) -> Callable[..., Cost]:
    def cost(*args: Any, **kwargs: Any) -> Cost:
        c = to_call(*args, **kwargs)
        read = tensor_bytes(c.x, c.residual, c.weight, c.bias)
        return Cost(read, tensor_bytes(*forward_fake(*c)), 8 * c.x.numel())

    return cost


def _backward_cost(to_call: Callable[..., Call]) -> Callable[..., Cost]:
    def cost(*args: Any, **kwargs: Any) -> Cost:
        c = to_call(*args, **kwargs)
        y, total, mean, rstd = forward_fake(*c)
        normed = c.x if c.residual is None else total
        # dy, the sum's gradient, the normed tensor and the statistics in; a gradient an input out,
        # but one for both summands if nothing drops.
        read = tensor_bytes(y, total, normed, mean, rstd, c.weight)
        shared = c.residual is not None and c.residual.dtype == c.x.dtype and not c.dropout_p
        written = tensor_bytes(c.x, None if shared else c.residual, c.weight, c.bias)
        return Cost(read, written, 14 * c.x.numel())

    return cost


def _tensors(
    rows: int, cols: int, dtype: torch.dtype, device: torch.device, count: int
) -> list[torch.Tensor]:
    """Count activations [rows, cols], then weight and bias [cols] in float32."""
    shapes = [(rows, cols)] * count + [(cols,)] * 2
    dtypes = [dtype] * count + [torch.float32] * 2
    return [torch.randn(s, device=device, dtype=t) for s, t in zip(shapes, dtypes, strict=True)]


def _modes(add: bool, rms: bool) -> Iterator[tuple[bool, dict[str, Any]]]:
    """(with weights, keyword arguments): each mode of an operator once."""
    yield True, {}
    yield False, {}
    yield True, {"out_dtype": torch.float32}
    yield True, {"dropout_p": 0.3, "site": 1}
    yield True, {"dropout_p": 1.0}
    if add:
        yield True, {"sum_dtype": torch.float32, "out_dtype": torch.bfloat16}
    else:
        yield True, {"dropout_p": 0.3, "site": 5, "activation": "relu"}
        yield True, {"activation": "gelu"}
    if rms:
        yield True, {"round_dtype": torch.bfloat16}
        yield True, {"weight_offset": 1.0}


def _arguments(add: bool, rms: bool, tensors: list[torch.Tensor], weights: bool) -> tuple[Any, ...]:
    *inputs, weight, bias = tensors
    vectors = (weight,) if rms else (weight, bias)
    return (*inputs, *(v if weights else None for v in vectors), 1e-5)


def _samples(add: bool, rms: bool) -> Callable[[torch.device], Iterator[Sample]]:
    def samples(device: torch.device) -> Iterator[Sample]:
        for dtype in (torch.float32, torch.bfloat16):
            for weights, options in _modes(add, rms):
                if options.get("dropout_p"):
                    options["seed"] = torch.tensor(1234, device=device)
                tensors = _tensors(6, 40, dtype, device, 1 + add)
                yield Sample(_arguments(add, rms, tensors, weights), options)

    return samples


def _example(add: bool, rms: bool) -> Callable[..., Sample]:
    def example(rows: int, cols: int, dtype: torch.dtype, device: torch.device) -> Sample:
        return Sample(_arguments(add, rms, _tensors(rows, cols, dtype, device, 1 + add), True))

    return example


_DROPOUT = "float dropout_p=0.0, Tensor? seed=None, int site=0"


def _register(
    name: str, schema: str, to_call: Callable[..., Call], reference: Callable[..., Any]
) -> Op:
    """Define one operator around the shared forward and record it."""
    add, rms = name.startswith("add_"), name.endswith("rms_norm")
    names = ("x", *(["residual"] if add else []), "weight", *([] if rms else ["bias"]))

    def through(run: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            outputs = run(*to_call(*args, **kwargs))
            return tuple(outputs[:2]) if add else outputs[0]

        return call

    launch = through(forward_launch)
    overload = define(
        name + schema,
        launch=launch,
        reference=reference,
        fake=through(forward_fake),
        gradient=gradient(to_call, names),
    )
    return register(
        Op(
            name=name,
            overload=overload,
            reference=reference,
            launch=launch,
            samples=_samples(add, rms),
            example=_example(add, rms),
            cost=_cost(to_call),
            backward_cost=_backward_cost(to_call),
            saved=("sum" if add else "x") + ", weights; float32 mean (layer norm) and rstd a row",
            random=True,
            workspace="backward: float32 [programs, N] a weight gradient, at most 8 programs an SM",
        )
    )


LAYER_NORM = _register(
    "layer_norm",
    f"(Tensor x, Tensor? weight, Tensor? bias, float eps, *, {_DROPOUT}, "
    'str activation="none", ScalarType? out_dtype=None) -> Tensor',
    _layer_norm_call,
    layer_norm,
)
ADD_LAYER_NORM = _register(
    "add_layer_norm",
    f"(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps, *, {_DROPOUT}, "
    "ScalarType? sum_dtype=None, ScalarType? out_dtype=None) -> (Tensor y, Tensor sum)",
    _add_layer_norm_call,
    add_layer_norm,
)
RMS_NORM = _register(
    "rms_norm",
    "(Tensor x, Tensor? weight, float eps, *, float weight_offset=0.0, "
    f"ScalarType? round_dtype=None, {_DROPOUT}, "
    'str activation="none", ScalarType? out_dtype=None) -> Tensor',
    _rms_norm_call,
    rms_norm,
)
ADD_RMS_NORM = _register(
    "add_rms_norm",
    "(Tensor x, Tensor residual, Tensor? weight, float eps, *, float weight_offset=0.0, "
    f"ScalarType? round_dtype=None, {_DROPOUT}, "
    "ScalarType? sum_dtype=None, ScalarType? out_dtype=None) -> (Tensor y, Tensor sum)",
    _add_rms_norm_call,
    add_rms_norm,
)
