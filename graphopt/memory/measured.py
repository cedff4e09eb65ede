"""The peak of a real step on a GPU, as its allocator has it."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from graphopt.errors import GraphOptError, OptionError
from graphopt.memory.eager import device_of
from graphopt.memory.fakestep import LossFn, tensors_in


def measured_peak(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    loss_fn: LossFn | None,
    train: bool,
    workspaces: int,
) -> int:
    """The most bytes that the allocator of a GPU has handed out in the second of two steps.

    The steps run on a copy of the model; what else the process holds on the device is not counted.
    The device's statistics of peaks start anew.

    Args:
        model: the model or optimized module; parameters, buffers and random state stay as they are.
        args: positional arguments of its forward.
        kwargs: keyword arguments.
        loss_fn: makes a scalar of the result, None for the result's own loss.
        train: whether a backward follows.
        workspaces: bytes of what cuBLAS keeps from its first step on: that is there before the
            second one, and is added to what that takes.

    Raises:
        OptionError: where the model cannot be copied.
        GraphOptError: where the device has too little memory for it.
    """
    device = device_of(model, args, kwargs)
    try:
        twin = copy.deepcopy(model)
    except Exception as error:
        raise OptionError(
            f"{type(model).__name__} cannot be copied",
            why=f"{type(error).__name__}: {error}",
            try_="measure=False",
        ) from error
    held = _bytes([*twin.parameters(), *twin.buffers(), *tensors_in((tuple(args), dict(kwargs)))])
    try:
        with torch.random.fork_rng(devices=[device]), torch.set_grad_enabled(train):
            for _ in range(2):
                twin.zero_grad(set_to_none=True)
                torch.cuda.synchronize(device)
                before = torch.cuda.memory_allocated(device)
                torch.cuda.reset_peak_memory_stats(device)
                _step(twin, args, kwargs, loss_fn, train)
                torch.cuda.synchronize(device)
                peak = torch.cuda.max_memory_allocated(device) - before
    except torch.OutOfMemoryError as error:
        raise GraphOptError(
            f"the device has too little memory for a step of {type(model).__name__}",
            why=str(error).splitlines()[0],
            try_="measure=False, for the prediction alone",
        ) from error
    return peak + held + workspaces


def _step(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], loss_fn: Any, train: bool
) -> None:
    if train and loss_fn is not None:
        loss_fn(model(*args, **kwargs)).backward()
        return
    result = model(*args, **kwargs)
    if not train:
        return
    own = getattr(result, "loss", None)
    floating = [t for t in tensors_in(result) if t.requires_grad]
    scalar = (
        own if isinstance(own, torch.Tensor) else next((t for t in floating if not t.dim()), None)
    )
    if scalar is not None:
        scalar.backward()
    else:
        torch.autograd.backward(floating, [torch.empty_like(t) for t in floating])


def _bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Bytes of the storages of some tensors on a GPU, as the allocator rounds them."""
    sizes = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.is_cuda
    }
    return sum(-(-size // 512) * 512 for size in sizes.values())
