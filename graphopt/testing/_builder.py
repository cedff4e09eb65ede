"""Builds a program line by line; each line is run at two sizes as soon as it is written.

Running it is what keeps programs valid: shapes, dtypes and memory are torch's own, and a line that
raises, that gives a value out of range, or whose result depends on the sizes in an unnamed way is
not taken.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from graphopt.testing.programs import Input, Instruction, Program, build_module

T = TypeVar("T")
LARGEST = 300.0
"""No value of a program is greater: half precision stays far from its limit."""
SIZES = ({"B": 3, "S": 6}, {"B": 4, "S": 5})


class MisfitError(Exception):
    """What was to be added does not fit the operands; the builder drops it."""


class Chooser:
    """Draws choices from one source of integers, hypothesis or a seeded generator.

    Args:
        below: gives an integer from 0 to n-1; hypothesis shrinks towards 0, so the simplest choice
            stands first everywhere.
    """

    def __init__(self, below: Callable[[int], int]) -> None:
        self.below = below

    def pick(self, options: Sequence[T]) -> T:
        """One of several."""
        return options[self.below(len(options))]

    def once_in(self, n: int) -> bool:
        """True one time in n."""
        return self.below(n) == n - 1


@dataclasses.dataclass
class _Value:
    """A value at both sizes, and what an in-place op must know of it."""

    code: str
    at: tuple[torch.Tensor, ...]
    fresh: bool = False  # made by an op that keeps neither its result nor a view, and unread
    dead: bool = False  # written over: its number is no longer used
    mask: bool = False  # a mask or a constant: only its own idiom goes on from it


class Builder:
    """The program so far, with the values that its lines gave."""

    def __init__(self, choose: Chooser) -> None:
        self.choose = choose
        self.inputs: list[Input] = []
        self.state: list[str] = []
        self.body: list[tuple[str, tuple[str, ...], bool]] = []
        self.values: dict[str, _Value] = {}
        self.modules: dict[str, Any] = {}

    # -- parts of the program; values are called by name until `program` numbers them

    def input(self, *shape: int | str, **options: Any) -> str:
        """A new argument."""
        given = Input(shape, **options)
        name = f"x{len(self.inputs)}"
        single = Program((given,), (), (), (0,))
        at = tuple(
            x.detach().requires_grad_(x.requires_grad)
            for sizes in SIZES
            for x in single.example_inputs(len(self.inputs), sizes)
        )
        self.inputs.append(given)
        self.values[name] = _Value(name, at)
        return name

    def parameter(self, code: str) -> str:
        """A parameter, buffer or submodule from its constructor."""
        name = f"s{len(self.state)}"
        alone = Program((Input((1,)),), (code,), (), (0,))
        try:
            module = build_module(alone.source(), len(self.state))
        except ValueError as error:  # a number of channels that the groups do not divide
            raise MisfitError(str(error)) from error
        self.state.append(code)
        self.modules[name] = module.s0
        if isinstance(module.s0, torch.Tensor):
            self.values[name] = _Value(code, (module.s0, module.s0))
        return name

    def weight(self, *shape: int, like: str) -> str:
        """A parameter in the dtype of a value; one time in six it is frozen."""
        dtype = self.dtype_code(like)
        frozen = ", requires_grad=False" if self.choose.once_in(6) else ""
        return self.parameter(f"nn.Parameter(torch.randn({shape}{dtype}){frozen})")

    def __call__(
        self, code: str, *args: str, keep: bool = False, fresh: bool = False, mask: bool = False
    ) -> str:
        """Add a line and give the name of its value.

        Args:
            code: the expression, its operands as {0}, {1}, ...
            args: names of the operands.
            keep: it writes into its first operand, which is called by the result's name from here.
            fresh: its result may be written into, as long as nothing reads it.
            mask: its own idiom alone goes on from it: a mask, with infinities, or a constant.

        Raises:
            MisfitError: when it does not run, or gives what no program may hold.
        """
        if any(self.values[a].dead for a in args if a in self.values):
            raise MisfitError("an operand was written over")
        at = tuple(self._run(code, args, i) for i in range(len(SIZES)))
        if not all(isinstance(v, torch.Tensor) for v in at):
            raise MisfitError("not a tensor")
        if not (mask or all(map(self._in_range, at))) or at[0].dtype != at[1].dtype:
            raise MisfitError("out of range")
        name = f"v{len(self.body)}"
        self.body.append((code, args, keep))
        for i, a in enumerate(args):
            if a in self.values:
                self.values[a].fresh = False
                self.values[a].dead |= keep and i == 0
        self.values[name] = _Value(code, at, fresh=fresh, mask=mask)
        return name

    def _run(self, code: str, args: tuple[str, ...], i: int) -> Any:
        env = {a: self.values[a].at[i] if a in self.values else self.modules[a] for a in args}
        try:
            return eval(code.format(*args), _GLOBALS, env)
        except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError) as error:
            raise MisfitError(str(error)) from error

    @staticmethod
    def _in_range(value: torch.Tensor) -> bool:
        if not value.is_floating_point() or not value.numel():
            return bool(value.numel())
        top = float(value.detach().abs().nan_to_num(1e9, 1e9, 1e9).amax())
        return top <= LARGEST

    def attempt(self, make: Callable[..., str | None], *args: str) -> str | None:
        """Add what `make` adds, or nothing when it does not fit."""
        kept = len(self.inputs), len(self.state), len(self.body)
        fresh = {n: (v.fresh, v.dead) for n, v in self.values.items()}
        try:
            return make(self, *args)
        except MisfitError:
            del self.inputs[kept[0] :], self.state[kept[1] :], self.body[kept[2] :]
            self.values = {n: v for n, v in self.values.items() if n in fresh}
            for name, (was, dead) in fresh.items():
                self.values[name].fresh, self.values[name].dead = was, dead
            return None

    # -- facts

    def shape(self, name: str) -> tuple[int, ...]:
        """Sizes of a value, at the first of the two sizes."""
        return tuple(self.values[name].at[0].shape)

    def dtype(self, name: str) -> torch.dtype:
        """Element type of a value."""
        return self.values[name].at[0].dtype

    def dtype_code(self, name: str) -> str:
        """`, dtype=...` for a constructor, "" for float32."""
        dtype = self.dtype(name)
        return "" if dtype == torch.float32 else f", dtype={dtype}"

    def varies(self, name: str, dim: int) -> bool:
        """Whether a size of a value changes with the named sizes."""
        one, other = self.values[name].at
        return one.shape[dim] != other.shape[dim]

    def need(self, condition: Any, why: str = "") -> None:
        """Give up the idiom where a condition does not hold."""
        if not condition:
            raise MisfitError(why)

    def wide(self, x: str) -> int:
        """The last size of a value that may be normed over: fixed, and no row nearly constant."""
        self.need(len(self.shape(x)) >= 2 and not self.varies(x, -1) and self.shape(x)[-1] >= 4)
        for at in self.values[x].at:
            spread = at.detach().double().std(-1)
            self.need(float(spread.amin()) > 0.05, "a row is nearly constant")
        return self.shape(x)[-1]

    def floats(self) -> list[str]:
        """Values that instructions may read: floating, of at least two dims; the first first."""
        return [
            n
            for n, v in self.values.items()
            if n[0] != "s"
            and not (v.dead or v.mask)
            and v.at[0].is_floating_point()
            and v.at[0].dim() >= 2
        ]

    def operand(self) -> str:
        """A value to go on from: the last one mostly."""
        values = self.floats()
        return values[-1] if not self.choose.once_in(3) else self.choose.pick(values)

    def partner(self, x: str) -> str | None:
        """Another value of the same shape and dtype, None where there is none."""
        found = [n for n in self.floats() if n != x and self._like(n) == self._like(x)]
        return self.choose.pick(found) if found else None

    def _like(self, name: str) -> tuple[Any, ...]:
        return tuple((t.shape, t.dtype) for t in self.values[name].at)

    def program(self, outputs: Sequence[str]) -> Program:
        """The program that gives back some values."""
        names = [f"x{i}" for i in range(len(self.inputs))]
        names += [f"s{i}" for i in range(len(self.state))]
        names += [f"v{i}" for i in range(len(self.body))]
        number = {n: i for i, n in enumerate(names)}
        body = tuple(Instruction(c, tuple(number[a] for a in args), k) for c, args, k in self.body)
        return Program(
            tuple(self.inputs), tuple(self.state), body, tuple(number[o] for o in outputs)
        ).live()


class _Training:
    """What `self` is while lines are tried."""

    training = True


_GLOBALS: dict[str, Any] = {
    "torch": torch,
    "nn": torch.nn,
    "F": torch.nn.functional,
    "math": __import__("math"),
    "self": _Training(),
}
