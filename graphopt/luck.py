"""What is luck in a comparison: more draws settle it, and moved inputs tell rounding from fault.

A tensor that is the small difference of large terms has an error that is a single draw, and one
that is zero in truth (the gradient of what a norm takes away again) is nothing but rounding. Both
show when the same program runs on values that are moved by a rounding or two.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from graphopt.graph.float64 import DOUBLE
from graphopt.numerics import (
    AGREEMENT,
    LUCK,
    MAX_RATIO,
    Comparison,
    TensorError,
    Tensors,
    compare,
    mean_of,
)

TIMES = 4
"""At most so often are all values moved."""
MOVED = 64.0
"""Float64 runs may part by so many times what moving all values by two roundings changes."""


def pool(draws: Sequence[Comparison]) -> Comparison:
    """The first of several draws, with the geometric mean taken over all of them.

    In a model of 60 small tensors the mean of one draw scatters by 3% although nothing is wrong,
    since all gradients share the errors of a few values. Other upstream gradients average that out.

    Args:
        draws: comparisons of the same step, each from other upstream gradients.

    Raises:
        ValueError: when there is none.
    """
    if not draws:
        raise ValueError("pool needs at least one comparison")
    mean = mean_of(d.geometric_mean for d in draws)
    return dataclasses.replace(draws[0], geometric_mean=mean, draws=len(draws))


def only_mean_failed(comparison: Comparison) -> bool:
    """Whether a comparison failed by its geometric mean alone, so that more draws may settle it."""
    return not comparison.passed and all(t.passed for t in comparison.tensors)


def may_be_luck(comparison: Comparison) -> bool:
    """Whether a comparison failed by so little that other inputs may show it as luck.

    A tensor that is the small difference of large terms has an error that is a single draw.
    """
    bad = [t for t in comparison.tensors if not t.passed]
    return not comparison.passed and all(off_by_size(t) and t.ratio < LUCK for t in bad)


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


def off_by_size(t: TensorError) -> bool:
    """Whether a tensor is off by the size of its error alone."""
    return t.verdict.startswith(("error ", "greatest error "))


def nudged(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """A copy whose floating values are moved by about two roundings each."""
    if not tensor.is_floating_point():
        return tensor.clone()
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
    factor = 1 + 2 * torch.finfo(tensor.dtype).eps * noise.to(tensor.device)
    return (tensor.double() * factor).to(tensor.dtype)


def nudged_double(tensor: Any, seed: int) -> Any:
    """A tensor in float64, moved by about two roundings of it; anything else unchanged."""
    if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
        return tensor
    wide = tensor.detach().to(DOUBLE.get(tensor.dtype, tensor.dtype))
    return nudged(wide, seed).requires_grad_(tensor.requires_grad)


def nudged_state(attribute: Callable[[str], Any], seed: int) -> Callable[[str], Any]:
    """State whose tensors are moved by `nudged_double`; tied ones stay one tensor."""
    known: dict[int, tuple[Any, Any]] = {}

    def moved(target: str) -> Any:
        value = attribute(target)
        if id(value) not in known:  # the value is kept too, so that its id stays its own
            known[id(value)] = (value, nudged_double(value, seed + len(known)))
        return known[id(value)][1]

    return moved


@dataclasses.dataclass(frozen=True)
class Agreement:
    """How far two float64 runs are apart.

    Attributes:
        worst: greatest relative L2 difference of a tensor that has digits.
        where: the tensor where it stands, "" where all are equal.
        rounding: tensors that differ by more than `AGREEMENT`, and by no more than rounding does.
    """

    worst: float
    where: str
    rounding: tuple[str, ...] = ()


def agreement(before: Tensors, after: Tensors, moved: Callable[[int], Tensors]) -> Agreement:
    """Compare two float64 runs; what differs is held against a run on moved values.

    Args:
        before: the run that is right.
        after: the other.
        moved: gives the first run again with all values moved by two roundings, from a seed; asked
            for only where something differs.
    """
    far = _apart(before, after)
    rounding: set[str] = set()
    for seed in range(TIMES):  # one value alone may happen to be where it was
        if all(d <= AGREEMENT for n, d in far.items() if n not in rounding):
            break
        noise = _apart(before, moved(seed))
        rounding |= {n for n, d in far.items() if AGREEMENT < d <= MOVED * noise[n]}
    rest = {n: d for n, d in far.items() if n not in rounding}
    where = max(rest, key=lambda n: rest[n], default="")
    worst = rest.get(where, 0.0)
    return Agreement(worst, where if worst > 0 else "", tuple(n for n in far if n in rounding))


def _apart(before: Tensors, after: Tensors) -> dict[str, float]:
    """How far each tensor is from what it should be; infinite where it cannot be measured."""
    found = compare(before, after, before, mean_counts=False)
    return {
        t.name: t.difference if t.passed or t.optimized > 0 else float("inf") for t in found.tensors
    }


def without_rounding(comparison: Comparison, names: Sequence[str]) -> Comparison:
    """A comparison in which the error of some tensors, which are nothing but rounding, is none."""
    if not names:
        return comparison
    tensors = tuple(
        dataclasses.replace(t, ratio=1.0, verdict="ok") if t.name in names and off_by_size(t) else t
        for t in comparison.tensors
    )
    mean = mean_of(t.ratio for t in tensors)
    return dataclasses.replace(comparison, tensors=tensors, geometric_mean=mean)
