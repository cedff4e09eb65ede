"""How a dropped value is computed again, as data: a call of calls, of what is held, constants."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx.node import map_aggregate


@dataclasses.dataclass(frozen=True)
class Held:
    """In a recipe: the tensor or number that the marker holds at this position."""

    index: int


@dataclasses.dataclass(frozen=True)
class Again:
    """In a recipe: another dropped value, computed again where it must be."""

    name: str


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """In a recipe: a function of constants, held tensors, other values and further calls.

    Attributes:
        target: the function.
        args: its arguments.
        kwargs: likewise.
        nested: whether something to be filled in stands inside a list, or among the keywords.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    nested: bool = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        """Look once, for all the times that it is called."""
        inside: list[Any] = []
        below = [a for a in self.args if not isinstance(a, _PARTS)]
        map_aggregate((below, dict(self.kwargs)), inside.append)
        object.__setattr__(self, "nested", any(isinstance(a, _PARTS) for a in inside))


_PARTS = (Held, Again, Call)


@dataclasses.dataclass(frozen=True, eq=False)
class Recipe:
    """How one dropped value is computed again.

    Attributes:
        name: the value's name.
        call: the op that made it, over the views between it and what is held.
        reads: names of the dropped values that it reads.
    """

    name: str
    call: Call
    reads: tuple[str, ...]


def evaluate(call: Call, held: Sequence[Any], reads: Mapping[str, Any]) -> Any:
    """The value of a call of a recipe, which runs without recording.

    What it makes is marked (`requires_grad`) as its twin of the forward was: nothing is recorded
    for that, but some ops (matmul) choose by the mark of their operands how to compute, and round
    otherwise.

    Args:
        call: the call.
        held: what `Held` stands for.
        reads: what `Again` stands for, by name.
    """

    def operand(part: Any) -> Any:
        if isinstance(part, Held):
            return held[part.index]
        if isinstance(part, Again):
            return reads[part.name]
        return evaluate(part, held, reads) if isinstance(part, Call) else part

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    if call.nested:
        args, kwargs = map_aggregate((call.args, dict(call.kwargs)), operand)
        found: list[Any] = []
        map_aggregate((args, kwargs), found.append)
    else:
        found = args = [operand(a) if isinstance(a, _PARTS) else a for a in call.args]
        kwargs = call.kwargs
    made = call.target(*args, **kwargs)
    for a in found:
        if isinstance(a, torch.Tensor) and a.requires_grad:
            _mark(made, call.target)
            break
    return made


def _mark(made: Any, target: Any) -> None:
    """Mark what an op made of operands that require a gradient."""
    if target is torch.ops.aten.detach.default:
        return
    for tensor in made if isinstance(made, (list, tuple)) else (made,):
        if isinstance(tensor, torch.Tensor) and (tensor.is_floating_point() or tensor.is_complex()):
            tensor.requires_grad_()
