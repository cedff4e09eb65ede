"""Functional forms without a kernel: batch_norm, fold_batch_norm.

Each is a composite of ATen operators, so autograd, fake tensors and cuDNN treat it as the eager
spelling. They exist as operators so that a rewritten graph stays pure (batch_norm writes no
buffer) and so that a kernel can take their place later without touching a rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from graphopt.errors import OptionError
from graphopt.kernels._library import LIBRARY
from graphopt.kernels._op import Cost, Op, Sample, register, tensor_bytes
from graphopt.kernels._pointwise import arithmetic

aten = torch.ops.aten


def _define(schema: str, composite: Callable[..., Any]) -> torch._ops.OpOverload:
    """Define an operator by what it is composed of; everything else follows from the parts."""
    name = schema.split("(", 1)[0]
    LIBRARY.define(schema)
    LIBRARY.impl(name, composite, "CompositeImplicitAutograd")
    overload: torch._ops.OpOverload = getattr(torch.ops.graphopt, name).default
    return overload


# batch_norm -------------------------------------------------------------------------------------


def batch_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    momentum: float,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Training-mode batch norm that returns its new running statistics and writes nothing.

    Args:
        x: [B, C, ...], floating.
        weight: [C] or None.
        bias: [C] or None.
        running_mean: [C], left as it is.
        running_var: [C], left as it is.
        momentum: the weight of this batch; for a cumulative average 1 / number of batches.
        eps: added to the variance.

    Returns:
        (y, new running mean, new running variance); the last two carry no gradient.

    Example:
        >>> mean, var = torch.zeros(1), torch.ones(1)
        >>> x = torch.tensor([[1.0], [3.0]])
        >>> _, new_mean, _ = batch_norm(x, None, None, mean, var, 0.5, 0.0)
        >>> new_mean, mean
        (tensor([1.]), tensor([0.]))
    """
    mean, var = running_mean.detach().clone(), running_var.detach().clone()
    cudnn = torch.backends.cudnn.enabled
    y = aten.batch_norm(x, weight, bias, mean, var, True, momentum, eps, cudnn)
    return y, mean, var


def _batch_norm_cost(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    momentum: float,
    eps: float,
) -> Cost:
    statistics = tensor_bytes(running_mean, running_var)
    # The statistics need a whole pass before the first value can be written.
    read = 2 * tensor_bytes(x) + tensor_bytes(weight, bias) + statistics
    return Cost(read, tensor_bytes(x) + statistics, 6 * x.numel())


def _batch_norm_samples(device: torch.device) -> Iterator[Sample]:
    x = torch.linspace(-2, 3, 4 * 3 * 5, device=device).sin().reshape(4, 3, 5)
    mean, var = torch.zeros(3, device=device), torch.ones(3, device=device)
    weight, bias = torch.linspace(0.5, 2, 3, device=device), torch.linspace(-1, 1, 3, device=device)
    yield Sample((x, weight, bias, mean, var, 0.1, 1e-5))
    yield Sample((x, None, None, mean, var, 0.25, 1e-3))


register(
    Op(
        name="batch_norm",
        overload=_define(
            "batch_norm(Tensor x, Tensor? weight, Tensor? bias, Tensor running_mean,"
            " Tensor running_var, float momentum, float eps) -> (Tensor, Tensor, Tensor)",
            batch_norm,
        ),
        reference=batch_norm,
        launch=None,
        samples=_batch_norm_samples,
        cost=_batch_norm_cost,
        saved="x and the batch's mean and 1 / deviation: 1 x the input's bytes",
    )
)


# fold_batch_norm --------------------------------------------------------------------------------


def fold_batch_norm(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gamma: torch.Tensor | None,
    beta: torch.Tensor | None,
    mean: torch.Tensor,
    var: torch.Tensor,
    eps: float,
    transposed: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight and bias of one layer that does what layer and evaluation-mode batch norm do.

    weight' = weight * s and bias' = beta + (bias - mean) * s, s = gamma / sqrt(var + eps), along
    the output channels. Differentiable in every argument.

    Args:
        weight: [out, ...]; [in, out, ...] if transposed, groups = 1.
        bias: [out] or None.
        gamma: the norm's weight, [out] or None.
        beta: the norm's bias, [out] or None.
        mean: running mean, [out].
        var: running variance, [out].
        eps: added to the variance.
        transposed: the layer is a transposed convolution.

    Returns:
        (weight, bias), both of the weight's dtype; scale and shift are computed in float64 (one
        value for each channel: their error would be that of a whole channel), the weight in
        float32, or float64 if an argument is.

    Raises:
        OptionError: the statistics are not one value for each output channel.

    Example:
        >>> one = torch.ones(1)
        >>> fold_batch_norm(torch.ones(1, 1), None, one * 2, one, one, one, 0.0)
        (tensor([[2.]]), tensor([-1.]))
    """
    channels = weight.shape[1 if transposed else 0]
    if mean.dim() != 1 or mean.shape[0] != channels:
        raise OptionError(
            f"graphopt::fold_batch_norm: statistics {tuple(mean.shape)} for {channels} channels",
            why="each output channel has its own scale and shift",
        )
    compute = arithmetic(weight, bias, gamma, beta, mean, var)
    exact = compute if weight.device.type == "mps" else torch.float64  # which has no float64
    scale = torch.rsqrt(var.to(exact) + eps)
    scale = scale if gamma is None else scale * gamma
    shift = -mean.to(exact) if bias is None else bias.to(exact) - mean
    shift = shift * scale
    shift = shift if beta is None else shift + beta
    shape = [1] * weight.dim()
    shape[1 if transposed else 0] = -1
    folded = weight.to(compute) * scale.to(compute).reshape(shape)
    return folded.to(weight.dtype), shift.to(weight.dtype)


def _fold_cost(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gamma: torch.Tensor | None,
    beta: torch.Tensor | None,
    mean: torch.Tensor,
    var: torch.Tensor,
    eps: float,
    transposed: bool = False,
) -> Cost:
    read = tensor_bytes(weight, bias, gamma, beta, mean, var)
    written = tensor_bytes(weight) + mean.numel() * weight.element_size()
    return Cost(read, written, weight.numel() + 6 * mean.numel())


def _fold_samples(device: torch.device) -> Iterator[Sample]:
    weight = torch.linspace(-1, 1, 4 * 3 * 9, device=device).reshape(4, 3, 3, 3)
    four = [torch.linspace(a, 2, 4, device=device) for a in (-1.0, 0.5, -0.5, 0.0, 0.1)]
    three = [t[:3] for t in four]
    yield Sample((weight, *four, 1e-5))
    yield Sample((weight, None, None, None, *four[3:], 1e-5))
    yield Sample((weight, *three, 1e-5, True))
    yield Sample((weight[:, :, 0, 0].bfloat16(), *four, 1e-3))


register(
    Op(
        name="fold_batch_norm",
        overload=_define(
            "fold_batch_norm(Tensor weight, Tensor? bias, Tensor? gamma, Tensor? beta, Tensor mean,"
            " Tensor var, float eps, bool transposed=False) -> (Tensor, Tensor)",
            fold_batch_norm,
        ),
        reference=fold_batch_norm,
        launch=None,
        samples=_fold_samples,
        cost=_fold_cost,
        saved="the weight and a few values a channel",
    )
)
