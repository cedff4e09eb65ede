"""Copies of arguments: same values, same memory layout, nothing shared with the caller's."""

from __future__ import annotations

from typing import Any

import torch

from graphopt.capture import signature as sig
from graphopt.graph.float64 import DOUBLE
from graphopt.luck import nudged


def copy_arguments(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    requires: tuple[bool, ...] | None = None,
    double: bool = False,
    nudge: int | None = None,
) -> tuple[tuple[Any, ...], dict[str, Any], list[torch.Tensor]]:
    """Arguments whose tensors are copies, laid out in memory as the given ones.

    Strides, offsets and overlap (an expanded tensor) are kept; tensors that share memory share it
    in the copy as well, and a tensor given twice is one tensor given twice.

    Args:
        args: positional arguments: tensors in containers beside plain values.
        kwargs: keyword arguments.
        requires: which tensors shall require a gradient; as the given ones when None.
        double: cast floating tensors to float64 (the copies are then contiguous).
        nudge: a seed, to move floating values by a few roundings.

    Returns:
        The arguments, the keyword arguments, and their tensors in order.

    Raises:
        CaptureError: for an argument of a class whose tensors cannot be found.

    Example:
        >>> x = torch.arange(6.0).view(2, 3).t()
        >>> (y,), _, _ = copy_arguments((x,), {})
        >>> y.stride() == x.stride(), y.data_ptr() == x.data_ptr()
        (True, False)
    """
    leaves: list[torch.Tensor] = []
    structure = sig.flatten((tuple(args), dict(kwargs)), leaves)
    storages: dict[int, torch.Tensor] = {}
    made: dict[int, torch.Tensor] = {}
    copies = []
    for i, leaf in enumerate(leaves):
        if id(leaf) not in made:
            wanted = leaf.requires_grad if requires is None else requires[i]
            made[id(leaf)] = _copy(leaf, storages, double, nudge).requires_grad_(wanted)
        copies.append(made[id(leaf)])
    new_args, new_kwargs = sig.unflatten(structure, copies)
    return new_args, new_kwargs, copies


def _copy(
    leaf: torch.Tensor, storages: dict[int, torch.Tensor], double: bool, nudge: int | None
) -> torch.Tensor:
    value = leaf.detach()
    if double and value.dtype in DOUBLE:
        return value.to(DOUBLE[value.dtype], copy=True)
    if type(value) is not torch.Tensor or value.layout is not torch.strided:
        return value.clone()
    size = leaf.untyped_storage().nbytes() // leaf.element_size()
    key = leaf.untyped_storage()._cdata
    if key not in storages:
        whole = torch.as_strided(value, (size,), (1,), 0)
        storages[key] = whole.clone() if nudge is None else nudged(whole, nudge + len(storages))
    base = storages[key]
    if base.dtype != leaf.dtype:
        base = base.view(leaf.dtype)
    return torch.as_strided(base, leaf.shape, leaf.stride(), leaf.storage_offset())


def argument_names(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[str, ...]:
    """A name for each tensor of the arguments, as a user would write it."""
    structure = sig.flatten((tuple(args), dict(kwargs)), [])
    return tuple(sig.leaf_names(structure, sig.signature_of(module)))


def floating(tensor: torch.Tensor) -> bool:
    """Whether a tensor can require a gradient."""
    return tensor.is_floating_point() or tensor.is_complex()
