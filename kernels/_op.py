"""The record of an operator. Tests, benchmarks, docs and the memory planner walk these records."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Cost:
    """What one call must move and compute, at least.

    Args:
        bytes_read: bytes read from device memory when every input is read once.
        bytes_written: bytes written when every output is written once.
        flops: floating-point operations, transcendental functions counted as one.

    Example:
        >>> Cost(8, 8, 4).bytes
        16
    """

    bytes_read: int
    bytes_written: int
    flops: int

    @property
    def bytes(self) -> int:
        """Bytes moved in both directions."""
        return self.bytes_read + self.bytes_written


@dataclass(frozen=True)
class Sample:
    """Arguments of one call: ``op(*args, **kwargs)``.

    Example:
        >>> Sample((torch.ones(2),), {"p": 0.5}).kwargs
        {'p': 0.5}
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Op:
    """One operator of ``torch.ops.graphopt``.

    Args:
        name: the name below ``torch.ops.graphopt``.
        overload: the torch operator.
        reference: plain torch, same arguments and results; the meaning of the operator, and its
            implementation wherever Triton does not run.
        launch: the Triton path, same arguments and results; None for composites, which have none.
        samples: ``samples(device)`` yields calls that tests run, one for each mode of the operator.
        example: ``example(rows, cols, dtype, device)`` is the typical call at that size, for
            benchmarks; dtype is that of the activations.
        cost: ``cost(*args, **kwargs)`` of the forward, from shapes and dtypes alone (fake tensors
            do).
        backward_cost: the same for a backward that differentiates every floating input.
        saved: what the backward keeps alive, in words and multiples of the input's bytes.
        random: whether it takes a seed and drops values.
        pure: whether equal arguments give equal results and nothing else changes.
        workspace: device memory beyond outputs, in words.

    Example:
        >>> from graphopt.kernels import registry
        >>> registry()["draw_seed"].pure
        False
    """

    name: str
    overload: torch._ops.OpOverload
    reference: Callable[..., Any]
    launch: Callable[..., Any] | None
    samples: Callable[[torch.device], Iterable[Sample]]
    cost: Callable[..., Cost]
    saved: str
    example: Callable[[int, int, torch.dtype, torch.device], Sample] | None = None
    backward_cost: Callable[..., Cost] | None = None
    random: bool = False
    pure: bool = True
    workspace: str = "none"


_REGISTRY: dict[str, Op] = {}


def register(op: Op) -> Op:
    """Add an operator's record; a name may be registered once.

    Raises:
        ValueError: the name is taken.
    """
    if op.name in _REGISTRY:
        raise ValueError(f"the operator {op.name!r} is registered already")
    _REGISTRY[op.name] = op
    return op


def registry() -> dict[str, Op]:
    """Every operator's record by name, in order of registration (a copy).

    Example:
        >>> "layer_norm" in registry()
        True
    """
    return dict(_REGISTRY)


def tensor_bytes(*tensors: torch.Tensor | None) -> int:
    """Bytes of the elements of the tensors that are there.

    Example:
        >>> tensor_bytes(torch.ones(2, 3), None)
        24
    """
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)
