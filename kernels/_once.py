"""Tensors that may be used, and refuse to be differentiated.

torch lets an operator without a gradient pass at the level of autograd: what is plain torch inside
is then differentiated as far as it goes, a kernel is not, and a backward through it is silently
wrong, with a warning at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd import forward_ad

from graphopt.errors import UnsupportedError

Args = tuple[Any, ...]


class Once(torch.autograd.Function):
    """Passes gradients through; refuses to be differentiated itself."""

    @staticmethod
    def forward(ctx: Any, name: str, count: int, *tensors: torch.Tensor) -> tuple[Any, ...]:
        ctx.name = name
        return tuple(g.detach() for g in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise UnsupportedError(
            f"double backward of graphopt::{ctx.name}",
            why="its gradient is a kernel of its own that has no derivative",
            try_="optimize the module with fuse=False, or leave this module as it is",
        )


def once(name: str, results: Args, sources: Args, function: type[Once] | None = None) -> Args:
    """Gradients made under create_graph=True: usable, but an error when differentiated again.

    torch's own ``once_differentiable`` looks only at the incoming gradients, so a gradient penalty
    on ``y.sum()`` would be silently constant there; here every result carries the refusal. It hangs
    on what the gradients were computed from, too: ``autograd.grad(..., allow_unused=True)`` walks
    only towards the tensors that it is asked for, and would find nothing on the way to a weight.
    """
    there = [i for i, g in enumerate(results) if g is not None]
    with torch.enable_grad():
        made = [results[i].detach().requires_grad_() for i in there]
        behind = [t for t in sources if t is not None and t.requires_grad]
        marked = (function or Once).apply(name, len(made), *made, *behind)
    merged = list(results)
    for i, g in zip(there, marked, strict=True):
        merged[i] = g
    return tuple(merged)


class Never(Once):
    """Passes results through; refuses to be differentiated."""

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise _refusal(ctx.name)


def without_gradient(overload: Any) -> Callable[..., Any]:
    """What an operator without a gradient runs at the level of autograd.

    Its results can be used; a backward through them raises `UnsupportedError`. So does the call
    itself where it would write into its operands, or with tangents of forward-mode differentiation.

    Args:
        overload: the operator.
    """
    name = overload._schema.name.removeprefix("graphopt::")
    writes = overload._schema.is_mutable

    def run(*args: Any, **kwargs: Any) -> Any:
        given = list(_tensors((*args, *kwargs.values())))
        sources = [t for t in given if t.requires_grad] if torch.is_grad_enabled() else []
        dual = forward_ad._current_level >= 0 and any(
            forward_ad.unpack_dual(t).tangent is not None for t in given
        )
        if dual or (sources and writes):
            raise _refusal(name)
        with torch._C._AutoDispatchBelowAutograd():
            out = overload(*args, **kwargs)
        if not sources:
            return out
        results = out if isinstance(out, (tuple, list)) else (out,)
        marked = once(name, tuple(results), tuple(sources), Never)
        return marked if isinstance(out, (tuple, list)) else marked[0]

    return run


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)


def _refusal(name: str) -> UnsupportedError:
    return UnsupportedError(
        f"backward of graphopt::{name}",
        why="the operator has no derivative",
        try_="torch.no_grad() around the call, or plain torch where a gradient is needed",
    )
