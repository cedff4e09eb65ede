"""Random programs as data: drawn, built into modules, printed as scripts, cut down.

A program is a list of instructions over numbered values: the inputs first, then the state, then
one value for each instruction. References are absolute, so that an instruction can be dropped and
the rest renumbered, which is how a failing program becomes one of a few lines.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import linecache
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

__all__ = ["Input", "Instruction", "Program", "minimize", "programs", "random_program"]

_TORCH_DTYPE = re.compile(r"torch\.(?:float16|bfloat16|float32)\b")
_CAST = re.compile(r"\.(?:float|bfloat16|half)\(\)")


@dataclasses.dataclass(frozen=True)
class Input:
    """One argument of a program.

    Attributes:
        shape: sizes, some of them by name ("B"), so that a program runs at other sizes too.
        dtype: "float32", "bfloat16", "float16" or "float64"; "int64" and "bool" go with the kind.
        kind: "normal"; "mask" (True two times in three, and where the last index is 0);
            "index:N" (0 to N-1).
        requires_grad: whether a gradient is taken of it (floating inputs only).
    """

    shape: tuple[int | str, ...]
    dtype: str = "float32"
    kind: str = "normal"
    requires_grad: bool = True

    def code(self) -> str:
        """The expression that draws it from generator `g`; `shape` stands for its sizes."""
        sizes = ", ".join(str(s) for s in self.shape)
        shape = f"({sizes},)" if len(self.shape) == 1 else f"({sizes})"
        if self.kind == "mask":
            return f"torch.rand({shape}, generator=g).index_fill(-1, torch.tensor(0), 1.0) > 0.33"
        if self.kind.startswith("index:"):
            return f"torch.randint({self.kind.partition(':')[2]}, {shape}, generator=g)"
        code = f"torch.randn({shape}, generator=g)"
        code = code if self.dtype == "float32" else f"{code}.to(torch.{self.dtype})"
        return f"{code}.requires_grad_()" if self.requires_grad else code


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a program.

    Attributes:
        code: an expression in which {0}, {1}, ... stand for the operands.
        args: numbers of the operands among all values.
        keep: it writes into its first operand: kept where that is read, though its result is not.
    """

    code: str
    args: tuple[int, ...] = ()
    keep: bool = False


@dataclasses.dataclass(frozen=True)
class Program:
    """A straight-line program over tensors.

    Attributes:
        inputs: values 0, 1, ...
        state: constructors of parameters, buffers and submodules: the next values.
        body: one value for each instruction: the values after these.
        outputs: numbers of the values that forward returns.
        sizes: what the named sizes are, by default.
        other_sizes: what else they may be.

    Example:
        >>> program = Program((Input(("B", 4)),), (), (Instruction("F.relu({0})", (0,)),), (1,))
        >>> program.build()(*program.example_inputs())[0].shape
        torch.Size([3, 4])
    """

    inputs: tuple[Input, ...]
    state: tuple[str, ...]
    body: tuple[Instruction, ...]
    outputs: tuple[int, ...]
    sizes: tuple[tuple[str, int], ...] = (("B", 3), ("S", 6))
    other_sizes: tuple[tuple[str, int], ...] = (("B", 4), ("S", 5))

    # -- text and modules

    def name(self, value: int) -> str:
        """How a value is called in the program's text."""
        if value < len(self.inputs):
            return f"x{value}"
        value -= len(self.inputs)
        return f"self.s{value}" if value < len(self.state) else f"v{value - len(self.state)}"

    def source(self) -> str:
        """The module and its inputs as Python, without anything that runs them."""
        init = [f"        self.s{i} = {code}" for i, code in enumerate(self.state)]
        first = len(self.inputs) + len(self.state)
        lines = [
            f"        {self.name(first + i)} = {line.code.format(*map(self.name, line.args))}"
            for i, line in enumerate(self.body)
        ]
        names = ", ".join(self.name(i) for i in range(len(self.inputs)))
        results = ", ".join(map(self.name, self.outputs))
        given = [f"    x{i} = {x.code()}" for i, x in enumerate(self.inputs)]
        sizes = ", ".join(f"{n}={v}" for n, v in self.sizes)
        return "\n".join(
            [
                *_HEAD,
                *init,
                *_SPREAD,
                f"    def forward(self, {names}):",
                *lines,
                f"        return ({results},)",
                "",
                "",
                f"def example_inputs(seed=0, {sizes}):",
                "    g = torch.Generator().manual_seed(seed)",
                *given,
                f"    return ({names},)",
                "",
            ]
        )

    def script(self) -> str:
        """The program as a stand-alone script that optimizes it and proves the result."""
        return self.source() + _TAIL

    def build(self, seed: int = 0) -> nn.Module:
        """The program as a module, in training mode.

        Args:
            seed: of the parameters; torch's generator is left as it was.
        """
        return build_module(self.source(), seed)

    def example_inputs(
        self, seed: int = 0, sizes: Mapping[str, int] | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Inputs for the module; the same seed gives the same values.

        Args:
            seed: of the values.
            sizes: other values for the named sizes; `dict(program.other_sizes)`, say.
        """
        found: tuple[torch.Tensor, ...] = _module(self.source()).example_inputs(
            seed, **dict(self.sizes, **(sizes or {}))
        )
        return found

    def in_float64(self) -> nn.Module:
        """The same module computed in float64: each dtype that the text names becomes float64.

        The parameters hold the values that `build(0)` gives them.
        """
        source = _CAST.sub(".double()", _TORCH_DTYPE.sub("torch.float64", self.source()))
        module = build_module(source, 0)
        module.double().load_state_dict(self.build().state_dict())
        forward = module.forward

        def in_double(*args: torch.Tensor) -> Any:
            before = torch.get_default_dtype()
            torch.set_default_dtype(torch.float64)
            try:
                return forward(*args)
            finally:
                torch.set_default_dtype(before)

        module.forward = in_double
        return module

    # -- data

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; `from_dict` reads it."""
        return {
            "inputs": [
                {k: v for k, v in vars(i).items() if k == "shape" or v != getattr(Input, k)}
                for i in self.inputs
            ],
            "state": list(self.state),
            "body": [[i.code, list(i.args), *([True] if i.keep else [])] for i in self.body],
            "outputs": list(self.outputs),
            "sizes": dict(self.sizes),
            "other_sizes": dict(self.other_sizes),
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Program:
        """A program from what `to_dict` gave."""
        return Program(
            tuple(Input(**{**i, "shape": tuple(i["shape"])}) for i in data["inputs"]),
            tuple(data["state"]),
            tuple(Instruction(c, tuple(a), *keep) for c, a, *keep in data["body"]),
            tuple(data["outputs"]),
            tuple(data["sizes"].items()),
            tuple(data["other_sizes"].items()),
        )

    @property
    def calls(self) -> int:
        """How many instructions it has."""
        return len(self.body)

    # -- smaller programs

    def live(self) -> Program:
        """Without the inputs, state and instructions that nothing reads; renumbered."""
        first = len(self.inputs) + len(self.state)
        wanted = set(self.outputs)
        for i in reversed(range(len(self.body))):
            line = self.body[i]
            written = line.args[0] if line.keep else first + i  # the model's, or read afterwards
            if first + i in wanted or written < first or written in wanted:
                wanted |= {first + i, *line.args}
        return self._only(wanted | {0})

    def without(self, value: int, instead: int) -> Program:
        """Without one instruction, its readers given an earlier value; dead code goes too."""
        body = list(self.body)
        for i, line in enumerate(body):
            if value in line.args:
                args = tuple(instead if a == value else a for a in line.args)
                body[i] = dataclasses.replace(line, args=args)
        at = value - len(self.inputs) - len(self.state)
        body[at] = dataclasses.replace(body[at], keep=False)
        outputs = tuple(dict.fromkeys(instead if o == value else o for o in self.outputs))
        return dataclasses.replace(self, body=tuple(body), outputs=outputs).live()

    def _only(self, wanted: Iterable[int]) -> Program:
        wanted = sorted(wanted)
        new = {old: i for i, old in enumerate(wanted)}
        inputs, state, body = [], [], []
        for old in wanted:
            if old < len(self.inputs):
                inputs.append(self.inputs[old])
            elif old < len(self.inputs) + len(self.state):
                state.append(self.state[old - len(self.inputs)])
            else:
                line = self.body[old - len(self.inputs) - len(self.state)]
                args = tuple(new[a] for a in line.args)
                body.append(dataclasses.replace(line, args=args))
        outputs = tuple(new[o] for o in self.outputs)
        return dataclasses.replace(
            self, inputs=tuple(inputs), state=tuple(state), body=tuple(body), outputs=outputs
        )

    def smaller(self) -> Iterator[Program]:
        """Programs that are one step smaller, the greatest steps first."""
        first = len(self.inputs) + len(self.state)
        if len(self.outputs) > 1:
            for out in self.outputs:
                yield dataclasses.replace(
                    self, outputs=tuple(o for o in self.outputs if o != out)
                ).live()
        for value in reversed(range(first, first + len(self.body))):
            line = self.body[value - first]
            sources = [a for a in dict.fromkeys(line.args) if not self._is_state(a)]
            for instead in [*sources, *(i for i in range(len(self.inputs)) if i not in sources)]:
                yield self.without(value, instead)

    def _is_state(self, value: int) -> bool:
        return len(self.inputs) <= value < len(self.inputs) + len(self.state)


def minimize(program: Program, fails: Callable[[Program], bool], limit: int = 400) -> Program:
    """The smallest program found, step by step, that still fails.

    Args:
        program: one that fails.
        fails: whether a smaller one does; a program that cannot run is to give False.
        limit: how many programs may be tried.

    Example:
        >>> relu = Instruction("F.relu({0})", (0,))
        >>> twice = Program((Input((4,)),), (), (relu, Instruction("-{0}", (1,))), (2,))
        >>> minimize(twice, lambda p: any("relu" in i.code for i in p.body)).calls
        1
    """
    left = itertools.count(limit, -1)
    while True:
        for candidate in program.smaller():
            if next(left) <= 0:
                return program
            changed = (candidate.body, candidate.outputs) != (program.body, program.outputs)
            if changed and candidate.body and fails(candidate):
                program = candidate
                break
        else:
            return program


# -------------------------------------------------------------------------------- text to module

_HEAD = (
    "import math",
    "",
    "import torch",
    "from torch import nn",
    "from torch.nn import functional as F",
    "",
    "",
    "class Program(nn.Module):",
    "    def __init__(self):",
    "        super().__init__()",
)
_SPREAD = (
    "        for tensor in self.state_dict().values():  # no weight is 1, no bias 0",
    "            if tensor.is_floating_point():",
    "                tensor.mul_(torch.rand_like(tensor) * 0.2 + 0.9)",
    "                tensor.add_(torch.rand_like(tensor) * 0.2)",
    "",
)
_TAIL = """

if __name__ == "__main__":
    import graphopt

    torch.manual_seed(0)
    model, inputs = Program(), example_inputs()
    opt = graphopt.optimize(model, inputs)
    print(opt.code)
    print(graphopt.verify(opt, inputs))
"""


@functools.lru_cache(maxsize=64)
def _module(source: str) -> types.ModuleType:
    """The text, run; its lines are known to tracebacks and to provenance."""
    name = f"<program {abs(hash(source)):x}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    module = types.ModuleType("graphopt_program")
    exec(compile(source, name, "exec"), module.__dict__)
    return module


def build_module(source: str, seed: int) -> nn.Module:
    """An instance of the `Program` of a program's text."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        found: nn.Module = _module(source).Program()
    return found


# ------------------------------------------------------------------------------------ strategies


def random_program(seed: int, *, max_idioms: int = 8) -> Program:
    """A random program that runs forward and backward; the same seed gives the same program.

    Args:
        seed: any integer.
        max_idioms: how many idioms (a norm, an attention, a cast; one to twenty lines each) are
            strung together at most.

    Example:
        >>> random_program(3) == random_program(3)
        True
    """
    import random

    from graphopt.testing._builder import Chooser
    from graphopt.testing.idioms import compose

    rng = random.Random(seed)
    return compose(Chooser(rng.randrange), max_idioms)


def programs(*, max_idioms: int = 8) -> SearchStrategy[Program]:
    """A hypothesis strategy for programs that run forward and backward.

    They hold chains that graphopt's rules know (norm, dropout and activation; a gate; rotary
    embedding; attention written out) and near misses of these: another eps, an operand swapped, a
    value that is used elsewhere, a cast in between.

    Args:
        max_idioms: as for `random_program`.

    Raises:
        UnsupportedError: when hypothesis is not installed.

    Example:
        >>> from hypothesis import given
        >>> @given(programs())
        ... def test(program):
        ...     graphopt.optimize(program.build(), program.example_inputs(), verify=True)
    """
    try:
        from hypothesis import strategies as st
    except ImportError as error:
        from graphopt.errors import UnsupportedError

        raise UnsupportedError(
            "programs() needs hypothesis", try_="pip install 'graphopt[testing]'"
        ) from error
    from graphopt.testing._builder import Chooser
    from graphopt.testing.idioms import compose

    @st.composite
    def draw_program(draw: Any) -> Program:
        chooser = Chooser(lambda n: draw(st.integers(0, n - 1)))
        return compose(chooser, max_idioms)

    return draw_program()
