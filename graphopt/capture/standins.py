"""Forwards that stand in, during a trace, for ones of torch that read a tensor's value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


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
