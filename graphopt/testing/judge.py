"""The error contract where a step is a handful of tensors, or in float64 itself."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import torch

from graphopt.numerics import LUCK, Comparison, TensorError, compare, off_by_size
from graphopt.prover import AGREEMENT

ENOUGH = 24
"""From so many tensors on the geometric mean of the errors counts; over fewer it is luck."""

NO_DIGIT = 0.5
"""Eager's relative error from which a value is nothing but rounding: a gradient that is zero."""

_DOUBLE = ("float64", "complex128")


def judge(
    eager: Mapping[str, torch.Tensor | None],
    optimized: Mapping[str, torch.Tensor | None],
    exact: Mapping[str, torch.Tensor | None],
) -> Comparison:
    """The contract over the tensors that eager has.

    A tensor in float64 has no truth beside it that is better: there the two must agree to 1e-9.

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
    found = compare(eager, {k: optimized.get(k) for k in names}, {k: exact.get(k) for k in names})
    tensors = tuple(map(_settled, found.tensors))
    logs = [math.log(t.ratio) for t in tensors if t.ratio > 0]
    finite = all(map(math.isfinite, logs))
    mean = math.exp(sum(logs) / max(len(logs), 1)) if finite else math.inf
    return Comparison(tensors, mean, sum(t.eager > 0 for t in tensors) >= ENOUGH)


def _settled(t: TensorError) -> TensorError:
    if off_by_size(t) and t.eager > NO_DIGIT and t.ratio < LUCK:
        return dataclasses.replace(t, verdict="ok")
    if t.dtype in _DOUBLE and t.difference <= AGREEMENT and (t.passed or off_by_size(t)):
        return dataclasses.replace(t, ratio=1.0, verdict="ok")
    return t
