"""How a dropped value is computed again: a call of calls, of what is held, constants."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from graphopt.kernels._library import direct, positional


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

    A call that stands in several places is made once.

    Attributes:
        target: the function.
        args: its arguments; what is filled in may stand inside of tuples, lists, dicts and slices.
        kwargs: likewise.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)


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

    @functools.cached_property
    def function(self) -> Callable[[Sequence[Any], Sequence[Any]], Any]:
        """The value, as a function of what the marker holds and of the values of `reads`.

        It runs without recording. What it makes is marked (`requires_grad`) as its twin of the
        forward was: nothing is recorded for that, but some ops (matmul) choose by the mark of their
        operands how to compute, and round otherwise.

        Example:
            >>> double = Call(torch.mul, (Held(0), 2))
            >>> Recipe("y", Call(torch.add, (double, double)), ()).function([torch.ones(1)], [])
            tensor([4.])
        """
        return _Source(self).function()


class _Source:
    """Python source for a recipe: straight-line code costs the host least."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._scope: dict[str, Any] = {"mark": _mark}
        self._made: dict[Call, str] = {}
        self._lines: list[tuple[str, list[str]]] = []  # and what each reads

    def function(self) -> Callable[[Sequence[Any], Sequence[Any]], Any]:
        result = self._call(self._recipe.call)
        lines, seen = [f"return {result}"], {result}
        for line, reads in reversed(self._lines):
            last = sorted({n for n in reads if n in self._made.values()} - seen)
            if last:  # so that memory is freed
                lines.append(f"del {', '.join(last)}")
                seen.update(last)
            lines.append(line)
        lines.append("def again(held, reads):")
        code = compile("\n    ".join(reversed(lines)), f"<recipe of {self._recipe.name}>", "exec")
        exec(code, self._scope)
        made: Callable[[Sequence[Any], Sequence[Any]], Any] = self._scope["again"]
        return made

    def _call(self, call: Call) -> str:
        """The name of a call's result, behind the lines that make it."""
        if call in self._made:
            return self._made[call]
        function, args, kwargs = call.target, call.args, call.kwargs
        short = direct(function)
        if short is not None:  # an operator of graphopt's: past the dispatcher
            function, args, kwargs = short, positional(function, args, kwargs), {}
        tensors: list[str] = []
        given = [self._value(a, tensors) for a in args]
        given += [f"{k}={self._value(v, tensors)}" for k, v in kwargs.items()]
        name = self._made[call] = f"v{len(self._made)}"
        self._lines.append((f"{name} = {self._bound(function)}({', '.join(given)})", tensors))
        if tensors and call.target is not torch.ops.aten.detach.default:
            self._lines.append((f"mark({name}, {', '.join(tensors)})", [name, *tensors]))
        return name

    def _value(self, value: Any, tensors: list[str]) -> str:
        """An argument as source; adds the names of those tensors of it that are operands."""
        if isinstance(value, _PARTS):
            name = self._part(value)
            tensors.append(name)
            return name
        if isinstance(value, torch.Tensor):
            tensors.append(self._bound(value))
            return tensors[-1]
        if isinstance(value, slice):
            parts = (value.start, value.stop, value.step)
            return f"slice({', '.join(self._value(v, tensors) for v in parts)})"
        if isinstance(value, dict):
            return f"{{{', '.join(f'{k!r}: {self._value(v, tensors)}' for k, v in value.items())}}}"
        if type(value) is tuple:
            return f"({''.join(f'{self._value(v, tensors)}, ' for v in value)})"
        if isinstance(value, list):
            return f"[{', '.join(self._value(v, tensors) for v in value)}]"
        if value is None or type(value) in (int, bool, str):
            return repr(value)
        return self._bound(value)

    def _part(self, part: Held | Again | Call) -> str:
        if isinstance(part, Held):
            return f"held[{part.index}]"
        if isinstance(part, Again):
            return f"reads[{self._recipe.reads.index(part.name)}]"
        return self._call(part)

    def _bound(self, value: Any) -> str:
        name = f"k{len(self._scope)}"
        self._scope[name] = value
        return name


_PARTS = (Held, Again, Call)


def _mark(made: Any, *operands: Any) -> None:
    """Mark what was made where an operand requires a gradient."""
    for operand in operands:
        if isinstance(operand, torch.Tensor) and operand.requires_grad:
            break
    else:
        return
    for tensor in made if isinstance(made, (list, tuple)) else (made,):
        if isinstance(tensor, torch.Tensor) and (tensor.is_floating_point() or tensor.is_complex()):
            tensor.requires_grad_()
