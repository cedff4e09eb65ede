"""The error contract where a step is a handful of tensors, or in float64 itself."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence

import torch

from graphopt.numerics import MAX_RATIO, Comparison, TensorError, compare, pool
from graphopt.prover import AGREEMENT

ENOUGH = 24
"""From so many tensors on the geometric mean of the errors counts; over fewer it is luck."""

LUCK = 16.0
"""From this ratio to eager's error on, a tensor is off on any input."""

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


def may_be_luck(comparison: Comparison) -> bool:
    """Whether a comparison failed by so little that other inputs may show it as luck.

    A tensor that is the small difference of large terms has an error that is a single draw.
    """
    bad = [t for t in comparison.tensors if not t.passed]
    return not comparison.passed and all(_by_size(t) and t.ratio < LUCK for t in bad)


def settle(first: Comparison, draws: Sequence[Comparison]) -> Comparison:
    """The first comparison, with what was luck in it settled by others of the same step.

    A tensor that was off by its size stays so where it is off in most of the draws; the geometric
    mean is that of all draws.

    Args:
        first: the comparison that failed.
        draws: comparisons on inputs moved by a few roundings, from other upstream gradients.
    """
    found = pool([first, *draws])
    tensors = []
    for i, t in enumerate(first.tensors):
        others = [d.tensors[i] for d in draws]
        most = sum(not o.passed for o in others) > len(others) / 2
        ratio = statistics.median([t.ratio, *(o.ratio for o in others)])
        if not t.passed and not most and ratio <= MAX_RATIO:
            t = dataclasses.replace(t, ratio=ratio, verdict="ok")
        tensors.append(t)
    return dataclasses.replace(found, tensors=tuple(tensors))


def _settled(t: TensorError) -> TensorError:
    if _by_size(t) and t.eager > NO_DIGIT and t.ratio < LUCK:
        return dataclasses.replace(t, verdict="ok")
    if t.dtype in _DOUBLE and t.difference <= AGREEMENT and (t.passed or _by_size(t)):
        return dataclasses.replace(t, ratio=1.0, verdict="ok")
    return t


def _by_size(t: TensorError) -> bool:
    """Whether a tensor is off by the size of its error alone."""
    return t.verdict.startswith(("error ", "greatest error "))
