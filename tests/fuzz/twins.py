"""A random program, its optimized twin and the same in float64, and how they are run."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import re
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional as F

from graphopt.module import GraphoptModule
from graphopt.testing.programs import Program

CPU = torch.device("cpu")
Tensors = dict[str, "torch.Tensor | None"]


@dataclasses.dataclass(frozen=True)
class Scenario:
    """How a program is run.

    Attributes:
        training: in training mode, its dropouts on.
        grad: with gradients; a frozen model takes those of its inputs alone.
        frozen: no parameter requires a gradient.
        autocast: under bfloat16 autocast.
        lowered: eager is, graphopt is told precision="bf16" instead.
        resized: called at another size afterwards.
        turned: the inputs lie in memory as a transpose leaves them.
        tied: the inputs are multiples of one half: zeros, and equal values.
        summed: the upstream gradients are one number, expanded, as a sum sends it.
        dynamic: sizes are symbolic from the start.
        rewrites: only the first so many; all when None.
        seed: of inputs and dropout.
    """

    training: bool = True
    grad: bool = True
    frozen: bool = False
    autocast: bool = False
    lowered: bool = False
    resized: bool = False
    turned: bool = False
    tied: bool = False
    summed: bool = False
    dynamic: bool = False
    rewrites: int | None = None
    seed: int = 0

    @staticmethod
    def of(seed: int, program: Program) -> Scenario:
        """The scenario that goes with a seed."""
        rng = random.Random(f"scenario {seed}")
        training, grad, frozen = rng.choices(
            [(True, True, False), (False, False, False), (False, True, False), (False, True, True)],
            weights=[11, 4, 2, 3],
        )[0]
        single = all(i.dtype in ("float32", "int64", "bool") for i in program.inputs)
        autocast = single and rng.random() < 0.2
        return Scenario(
            training,
            grad,
            frozen,
            autocast=autocast,
            lowered=autocast and rng.random() < 0.4,
            resized=rng.random() < 0.2,
            turned=rng.random() < 0.2,
            tied=rng.random() < 0.1,
            summed=rng.random() < 0.2,
            dynamic=rng.random() < 0.05,
            rewrites=rng.randrange(4) if rng.random() < 0.1 else None,
            seed=seed,
        )


class Pair:
    """A program, the same program optimized, and the same in float64."""

    def __init__(self, program: Program, scenario: Scenario) -> None:
        self.program, self.scenario = program, scenario
        self.eager = self._prepared(program.build())
        self.source = self._prepared(program.build())
        self.double = self._prepared(program.in_float64())
        self.state = {k: v.clone() for k, v in self.source.state_dict().items()}
        self.opt: GraphoptModule | None = None
        source = program.source()
        narrow = re.search(r"float16|float32|float\(\)|half\(\)", source)
        self.all_double = "float64" in source and not narrow

    def _prepared(self, module: nn.Module) -> nn.Module:
        module.train(self.scenario.training)
        return module.requires_grad_(False) if self.scenario.frozen else module

    def inputs(self, seed: int, sizes: Mapping[str, int] | None = None) -> tuple[Any, ...]:
        found = self.program.example_inputs(seed, sizes)
        return tuple(self._laid_out(x) if x.is_floating_point() else x for x in found)

    def _laid_out(self, x: torch.Tensor) -> torch.Tensor:
        """An input with the values and in the memory layout of the scenario."""
        y = x.detach()
        if self.scenario.tied:
            y = (y * 2).round() / 2
        if self.scenario.turned:
            y = y.transpose(0, 1).contiguous().transpose(0, 1)
        return y.requires_grad_(x.requires_grad)

    @contextlib.contextmanager
    def ambient(self, which: str = "graphopt") -> Iterator[None]:
        """The modes of the scenario, for "eager", "graphopt" or "float64"."""
        on = self.scenario.autocast and which != "float64"
        on = on and not (self.scenario.lowered and which == "graphopt")
        with (
            torch.set_grad_enabled(self.scenario.grad),
            torch.autocast("cpu", torch.bfloat16, enabled=on),
        ):
            yield

    def eager_run(self, seed: int, sizes: Mapping[str, int] | None = None) -> Run:
        with seeded_dropout():
            return self._run("eager", self.eager, self.inputs(seed, sizes), seed)

    def optimized_run(self, seed: int, sizes: Mapping[str, int] | None = None) -> Run:
        assert self.opt is not None
        return self._run("graphopt", self.opt, self.inputs(seed, sizes), seed)

    def double_run(self, seed: int, sizes: Mapping[str, int] | None = None) -> Run:
        inputs = tuple(_double(x) for x in self.inputs(seed, sizes))
        with seeded_dropout():
            return self._run("float64", self.double, inputs, seed)

    def _run(self, which: str, module: nn.Module, inputs: tuple[Any, ...], seed: int) -> Run:
        """One call and its backward pass."""
        with self.ambient(which):
            outputs = module(*inputs)
        tensors: Tensors = {f"output/{i}": y.detach().clone() for i, y in enumerate(outputs)}
        memory = _memory(outputs, inputs, module)
        wrt = {f"input{i}": x for i, x in enumerate(inputs) if x.requires_grad}
        wrt |= {n: p for n, p in module.named_parameters() if p.requires_grad}
        roots = [(i, y) for i, y in enumerate(outputs) if y.requires_grad]
        if roots and wrt and self.scenario.grad:
            upstream = [_upstream(y, seed + i, self.scenario.summed) for i, y in roots]
            grads = torch.autograd.grad(
                [y for _, y in roots], list(wrt.values()), upstream, allow_unused=True
            )
            tensors |= {f"grad/{n}": g for n, g in zip(wrt, grads, strict=True)}
            # A gradient that is nothing beside what was sent in is measured on that scale.
            tensors["grad/sent"] = torch.cat([g.reshape(-1).double() for g in upstream])
        tensors |= {f"buffer/{n}": v.detach().clone() for n, v in module.named_buffers()}
        tensors |= {f"input/{i}": x.detach().clone() for i, x in enumerate(inputs)}
        return Run(tensors, memory, tuple(y.requires_grad for y in outputs))

    def reset(self) -> None:
        """Give all three the state that they were built with."""
        for module in (self.eager, self.source, self.double):
            module.load_state_dict(self.state)


@dataclasses.dataclass
class Run:
    """What can be seen of one call."""

    tensors: Tensors
    memory: Any
    requires_grad: tuple[bool, ...]


def _double(x: torch.Tensor) -> torch.Tensor:
    return x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x


def _upstream(y: torch.Tensor, seed: int, summed: bool) -> torch.Tensor:
    """A gradient to send in, exact in every dtype: of its own everywhere, or one number."""
    generator = torch.Generator().manual_seed(1000 + seed)
    drawn = torch.randn(() if summed else y.shape, generator=generator)
    return drawn.to(torch.bfloat16).to(y.dtype).expand(y.shape)


def _memory(outputs: Any, inputs: Any, module: nn.Module) -> Any:
    """Strides of the outputs, and which of the outputs, inputs and state share memory."""
    state = [*module.parameters(), *module.buffers()]
    everything = [*outputs, *inputs, *state]
    first: dict[int, int] = {}
    groups = [first.setdefault(t.untyped_storage().data_ptr(), i) for i, t in enumerate(everything)]
    strides = [
        tuple(s for n, s in zip(y.shape, y.stride(), strict=True) if n > 1) if _dense(y) else ()
        for y in outputs
    ]
    return strides, groups


def same_memory(eager: Run, optimized: Run) -> bool:
    """Equal sharing, and equal strides of what fills its memory (a part of a value need not)."""
    layouts = zip(eager.memory[0], optimized.memory[0], strict=True)
    return eager.memory[1] == optimized.memory[1] and all(a == b for a, b in layouts if a)


def _dense(y: torch.Tensor) -> bool:
    """Whether a tensor fills its memory."""
    expected = 1
    for stride, size in sorted((s, n) for n, s in zip(y.shape, y.stride(), strict=True) if n > 1):
        if stride != expected:
            return False
        expected *= size
    return True


@contextlib.contextmanager
def seeded_dropout() -> Iterator[None]:
    """Let eager's dropouts drop what graphopt's drop: one seed a forward, a site for each."""
    plain = F.dropout
    sites = iter(range(10_000))
    seed: list[torch.Tensor] = []

    def dropout(x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        if not training or p == 0.0:
            return plain(x, p, training, inplace)
        if not seed:
            seed.append(torch.ops.graphopt.draw_seed(CPU))
        dropped = torch.ops.graphopt.dropout(x, p, seed[0], next(sites))
        return torch.empty_like(x).copy_(dropped)  # in the layout that torch's dropout gives

    with mock.patch.object(F, "dropout", dropout):
        yield
