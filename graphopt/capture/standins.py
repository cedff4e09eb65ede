"""Forwards that stand in, during a trace, for ones that a trace would break.

They compute the same without reading a tensor's value or calling an `autograd.Function`; or refuse.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from graphopt.errors import CaptureError

_BLOOM = "transformers.models.bloom.modeling_bloom"


def stand_in(module: nn.Module) -> Callable[..., torch.Tensor] | None:
    """A forward that computes the same and can be traced, None where the module's own can.

    Args:
        module: a module of the shadow.

    Returns:
        A function of the module and its arguments.

    Example:
        >>> stand_in(nn.BatchNorm1d(3)) is None, stand_in(nn.BatchNorm1d(3, momentum=None)) is None
        (True, False)
    """
    norm: Any = module
    if type(norm).forward is nn.TransformerEncoder.forward:
        return _encoder
    if type(norm).__qualname__ == "BloomGelu" and type(norm).__module__ == _BLOOM:
        return _bloom_gelu
    if type(norm).forward is not _BatchNorm.forward or "forward" in module.__dict__:
        return None
    counted = norm.momentum is None and norm.num_batches_tracked is not None
    return _cumulative_batch_norm if counted else None


def _cumulative_batch_norm(module: Any, x: torch.Tensor) -> torch.Tensor:
    """Batch norm whose running statistics are the plain average over all batches.

    Torch's own divides by `float(num_batches_tracked)`, a number that changes at every call; here
    the count stays a tensor. The batch's statistics come from a batch norm with momentum 1.
    """
    tracked = module.training and module.track_running_stats and module.running_mean is not None
    if module.momentum is not None or not tracked:
        return _BatchNorm.forward(module, x)
    module._check_input_dim(x)
    module.num_batches_tracked.add_(1)
    stats = (module.running_mean, module.running_var)
    batch = [s.clone() for s in stats]
    y = F.batch_norm(x, batch[0], batch[1], module.weight, module.bias, True, 1.0, module.eps)
    share = 1.0 / module.num_batches_tracked.double()
    for running, new in zip(stats, batch, strict=True):
        running.copy_(running.double() * (1.0 - share) + new.double() * share)
    return y


def _encoder(
    module: Any, src: Any, mask: Any = None, src_key_padding_mask: Any = None, **kw: Any
) -> Any:
    """Refuse where eager packs padded inputs into nested tensors, whose padding comes out as zeros.

    Whether it does depends on the values of the mask.
    """
    packs = getattr(module, "use_nested_tensor", True) and not torch.is_grad_enabled()
    if packs and src_key_padding_mask is not None and not module.training:
        raise CaptureError(
            "nn.TransformerEncoder with a padding mask, in eval mode and without gradients",
            why="eager then packs the inputs into nested tensors, which a graph cannot",
            try_="nn.TransformerEncoder(..., enable_nested_tensor=False); or on_error='fallback'",
        )
    return nn.TransformerEncoder.forward(module, src, mask, src_key_padding_mask, **kw)


def _bloom_gelu(module: Any, x: torch.Tensor) -> torch.Tensor:
    """Bloom's GELU without the `autograd.Function` that training wraps around it.

    That function's backward is the derivative of its forward, written out; autograd's is the same.
    """
    gelu: Callable[[torch.Tensor], torch.Tensor]
    gelu = type(module).forward.__globals__["bloom_gelu_forward"]
    return gelu(x)
