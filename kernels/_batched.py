"""Batched gradients: `torch.autograd.grad(..., is_grads_batched=True)`, and Jacobians made by it.

The gradients are then tensors without memory of their own, each of which stands for several; a
kernel cannot read them, nor can what writes in place. So a backward runs once for each sample.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# The older kind of batches, which `torch.autograd.grad` still makes; private to torch.
is_batched: Callable[[torch.Tensor], bool] = getattr(
    torch._C._functorch, "is_legacy_batchedtensor", lambda tensor: False
)
_MOST_LEVELS = 64  # torch's own limit of batches inside batches


def for_each_sample(
    backward: Callable[..., tuple[Any, ...]], ctx: Any, grads: tuple[Any, ...]
) -> tuple[Any, ...]:
    """What an `autograd.Function`'s backward gives for batched gradients.

    Args:
        backward: the Function's; takes (ctx, *grads).
        ctx: the Function's.
        grads: tensors or None, at least one of them batched.

    Returns:
        A batched tensor or None an argument.
    """
    level, size = _batch_of(next(g for g in grads if g is not None and is_batched(g)))
    plain = [g if g is None else torch._remove_batch_dim(g, level, size, 0) for g in grads]
    again = _Again(ctx)
    samples = [backward(again, *(g if g is None else g[i] for g in plain)) for i in range(size)]
    return tuple(
        None if parts[0] is None else torch._add_batch_dim(torch.stack(parts), 0, level)
        for parts in zip(*samples, strict=True)
    )


def _batch_of(grad: torch.Tensor) -> tuple[int, int]:
    """The innermost level of the batches in batches that a tensor stands for, and its size.

    A tensor that has no batch at a level is expanded to the size that one asks for.
    """
    found = 0, 0
    for level in range(1, _MOST_LEVELS + 1):
        first, second = (torch._remove_batch_dim(grad, level, n, 0) for n in (2, 3))
        if first.shape[0] == second.shape[0]:
            found, grad = (level, int(first.shape[0])), first
            if not is_batched(grad):
                break
    return found


class _Again:
    """A `ctx` whose saved tensors may be asked for several times.

    A checkpoint gives them once. They are held here, too, so that no sample's gradient is written
    over what the next one reads.
    """

    def __init__(self, ctx: Any) -> None:
        self.saved_tensors = ctx.saved_tensors
        self._held = list(self.saved_tensors)
        self._ctx = ctx

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)
