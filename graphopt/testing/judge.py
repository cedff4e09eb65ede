"""The error contract over the tensors that eager has."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from graphopt.numerics import Comparison, compare


def judge(
    eager: Mapping[str, torch.Tensor | None],
    optimized: Mapping[str, torch.Tensor | None],
    exact: Mapping[str, torch.Tensor | None],
) -> Comparison:
    """The contract over the tensors that eager has.

    Args:
        eager: the unoptimized step.
        optimized: the optimized one; a tensor that it lacks counts as None.
        exact: the step in float64; likewise.

    Example:
        >>> x = torch.ones(3, dtype=torch.float64)
        >>> step = {"output/0": x}
        >>> judge(step, {"output/0": x * (1 + 1e-12)}, step).passed
        True
    """
    names = list(eager)
    return compare(eager, {k: optimized.get(k) for k in names}, {k: exact.get(k) for k in names})
