"""What a user may ask for of memory, checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from graphopt.errors import OptionError
from graphopt.memory.budget import Budget, check_budget, check_resident

LossFn = Callable[[Any], Any]


@dataclasses.dataclass(frozen=True)
class MemoryOptions:
    """What a user may ask for; one of budget and segments is set.

    Attributes:
        budget: the most bytes that a step may take at once.
        segments: recompute all but the borders of so many parts, as `checkpoint_sequential` does.
        loss_fn: makes a scalar of the result of forward.
        resident_bytes: what else lies on the device.
        offload: whether values may lie in host memory between forward and backward.
    """

    budget: Budget | None = None
    segments: int | None = None
    loss_fn: LossFn | None = None
    resident_bytes: int = 0
    offload: bool = False


def check_memory(
    memory_budget: Any,
    segments: Any = None,
    loss_fn: Any = None,
    resident_bytes: Any = 0,
    offload: Any = False,
) -> MemoryOptions | None:
    """The memory options from what a user wrote; None where nothing is asked for.

    Raises:
        OptionError: for a wrong type or value, for both a budget and segments, and for what says
            nothing without a budget.

    Example:
        >>> check_memory("8GiB").budget.size == 8 * 2**30
        True
    """
    budget = check_budget(memory_budget)
    resident = check_resident(resident_bytes)
    if segments is not None and (
        isinstance(segments, bool) or not isinstance(segments, int) or segments < 1
    ):
        raise OptionError(f"segments is {segments!r}"[:100], try_="a whole number from 1, or None")
    if loss_fn is not None and not callable(loss_fn):
        raise OptionError(
            f"loss_fn is of type {type(loss_fn).__name__}",
            try_="a function that takes what forward returns and returns a tensor of one element",
        )
    if budget is not None and segments is not None:
        raise OptionError(
            "memory_budget and segments are given together",
            why="each of them decides what is recomputed",
            try_="memory_budget alone: it finds what segments would, where that is best",
        )
    away = _check_offload(offload, budget, segments)
    if budget is None and segments is None:
        for name, given in (("loss_fn", loss_fn is not None), ("resident_bytes", resident > 0)):
            if given:
                raise OptionError(
                    f"{name} is given without memory_budget",
                    why="it is for the prediction of the peak, and nothing is predicted",
                    try_=f"memory_budget='8GiB', {name}=...",
                )
        return None
    return MemoryOptions(budget, segments, loss_fn, resident, away)


def _check_offload(offload: Any, budget: Budget | None, segments: Any) -> bool:
    """Whether values may go to host memory."""
    if offload is None or offload is False:
        return False
    if offload is not True and not (isinstance(offload, str) and offload == "auto"):
        raise OptionError(
            f"offload is {offload!r}"[:100],
            try_="'auto' (the plan chooses what goes to host memory), or False",
        )
    if segments is not None:
        raise OptionError(
            "offload and segments are given together",
            why="segments says what is kept, and where: on the device",
            try_="memory_budget='8GiB', offload='auto': the plan finds both",
        )
    if budget is None:
        raise OptionError(
            f"offload={offload!r} is given without memory_budget",
            why="what goes to host memory is chosen so that a budget is kept",
            try_="memory_budget='8GiB', offload='auto'",
        )
    return True
