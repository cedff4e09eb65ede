"""Peak of live bytes of a training step, measured storage by storage while it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from contract import device_of
from torch import nn

from graphopt.capture.signature import flatten
from graphopt.memory.tracker import StorageTracker


def peak_of(
    call: Callable[..., Any],
    model: nn.Module,
    batch: dict[str, torch.Tensor],
    autocast: torch.dtype | None,
) -> int:
    """Most bytes alive at once in forward and backward: parameters, gradients and all the rest.

    The step is run once before, so that nothing is counted which is made but once. What an op
    allocates inside and frees before it returns is not seen.

    Args:
        call: the model, or its optimized module.
        model: whose parameters and buffers are there before.
        batch: keyword arguments.
        autocast: the dtype of an autocast around the forward; None for none.
    """
    _step(call, model, batch, autocast)
    with StorageTracker() as seen:
        for name, tensor in (*model.named_parameters(), *model.named_buffers(), *batch.items()):
            seen.hold(tensor, "", name)
        _step(call, model, batch, autocast)
    seen.close()
    return seen.peak().bytes


def _step(
    call: Callable[..., Any],
    model: nn.Module,
    batch: dict[str, torch.Tensor],
    autocast: torch.dtype | None,
) -> None:
    state = {k: v.clone() for k, v in model.named_buffers()}
    with torch.autocast(device_of(model).type, autocast, enabled=autocast is not None):
        result = call(**batch)
    flat: list[torch.Tensor] = []
    flatten(result, flat, results=True)
    next(y for y in flat if y.dim() == 0 and y.requires_grad).backward()
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(state[name])
    model.zero_grad(set_to_none=True)
