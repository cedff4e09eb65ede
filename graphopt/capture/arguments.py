"""Arguments that no graph can take: told apart before anything is traced."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from graphopt.capture.shadow import eager_forward
from graphopt.errors import CaptureError


def refuse_unfit(
    module: nn.Module,
    signature: inspect.Signature | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Raise what Python raises when a forward is called with arguments that do not fit it.

    Raises:
        TypeError: as the model itself does.

    Example:
        >>> linear = nn.Linear(4, 2)
        >>> refuse_unfit(linear, inspect.signature(linear.forward), (), {})
        Traceback (most recent call last):
            ...
        TypeError: Linear.forward() missing 1 required positional argument: 'input'
    """
    if signature is None:
        return
    try:
        signature.bind(*args, **kwargs)
        return
    except TypeError as error:
        reason = str(error)
    forward = eager_forward(module)
    function = getattr(forward, "__func__", None)
    if inspect.isfunction(function) and not hasattr(function, "__wrapped__"):
        forward(*args, **kwargs)  # Python refuses before the first line of it runs
    raise TypeError(f"{type(module).__name__}.forward() {reason}")


def refuse_layouts(module: nn.Module, names: Iterable[str], leaves: Iterable[torch.Tensor]) -> None:
    """Refuse tensors that are not one block of memory with strides.

    Args:
        module: the source, whose parameters and buffers are looked at, too.
        names: a name for each tensor argument.
        leaves: the tensor arguments.

    Raises:
        CaptureError: naming the first such tensor.
    """
    state = (*module.named_parameters(), *module.named_buffers())
    for name, tensor in (*zip(names, leaves, strict=True), *state):
        if tensor.layout is not torch.strided:
            raise CaptureError(
                f"{name} has the layout {tensor.layout}",
                why="what a graph does with memory is only known for tensors with strides",
                try_="tensor.to_dense(); or optimize(..., on_error='fallback')",
            )


def nested(error: RuntimeError) -> CaptureError:
    """The refusal of a nested tensor, which has no shape."""
    return CaptureError(
        "a nested tensor among the arguments",
        why=str(error).partition(".")[0],
        try_="torch.nested.to_padded_tensor(tensor, 0.0); or optimize(..., on_error='fallback')",
    )
