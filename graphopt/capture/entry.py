"""One captured, rewritten and compiled forward, ready to be called."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from graphopt.capture import signature as sig
from graphopt.capture.aliases import Returned
from graphopt.capture.export import Capture
from graphopt.capture.guard import Guard, modules_of
from graphopt.capture.key import GraphKey
from graphopt.capture.memory import Memory
from graphopt.capture.shadow import eager_forward
from graphopt.capture.watch import foreign, hook_dicts
from graphopt.emit import ParamRef, Program
from graphopt.errors import GraphoptWarning
from graphopt.graph.body import Body
from graphopt.remat import dropping


@dataclasses.dataclass
class Compiled:
    """What `compile_body` gives back.

    Attributes:
        body: the body to run.
        result: what the passes recorded (`.rewrites`, `.refusals`), None where none ran.
        memory: the memory plan, None where none was asked for.
    """

    body: Body
    result: Any = None
    memory: Any = None


class Eager:
    """Stands for a graph where the source itself runs (`on_error="fallback"`)."""

    def __init__(self, source: nn.Module) -> None:
        self.source = source
        self._hooks = hook_dicts(modules_of(source))
        self._hooked = foreign(self._hooks)

    def serves(self, shapes: Sequence[Sequence[int]], strides: Sequence[Any]) -> bool:
        """Every size: what cannot be captured at one size cannot be at another."""
        return True

    def state(self) -> list[torch.Tensor] | None:
        """Nothing; None once the hooks that stood in the way are gone."""
        return None if self._hooked and not foreign(self._hooks) else []

    def call(
        self,
        state: list[torch.Tensor],
        leaves: Sequence[torch.Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run the source."""
        return eager_forward(self.source)(*args, **kwargs)


class Entry:
    """A graph in force for one key.

    Attributes:
        capture: what was captured (its body is the graph before the passes).
        compiled: the body after the passes, and their record.
        program: the compiled function of that body.
        state: checks that the graph is right for the state of the module now, and reads the
            tensors that `call` takes; None where it is not.
        shapes: the sizes it was captured with.
        strides: likewise.
    """

    def __init__(self, capture: Capture, compiled: Compiled, key: GraphKey, label: str) -> None:
        self.capture = capture
        self.compiled = compiled
        self.shapes, self.strides = key.shapes(), key.strides()
        body = compiled.body
        mode = "train" if body.training else "eval"
        self.program = Program(body, f"{label} {mode}")
        # where values are dropped, through the program: it opens the scope of their recipes
        function, found = self.program.function, self.program.recipes
        self._function = dropping(function, found) if found else function
        self.guard = Guard(capture.body.root, capture.places, self.program.refs)
        self.state = self.guard.state
        self._outputs = capture.outputs
        self._count = body.user_outputs
        # a pass that wrote the casts into the graph empties the body's autocast; until one did,
        # the body runs under the ambient autocast
        self._autocast = () if body.autocast else tuple(capture.body.autocast)
        inputs = [n.name for n in body.placeholders]
        self._writes: list[tuple[int, ParamRef | int]] = []
        for m in body.mutations:
            target = inputs.index(m.target) if m.kind == "input" else ParamRef.of(body, m.target)
            self._writes.append((m.output, target))
        self._memory = Memory([t for _, t in self._writes])
        self._returned: list[tuple[int, ParamRef | int, Returned]] = []
        for i, result in capture.returned.items():
            name = result.target
            place = inputs.index(name) if result.kind == "input" else ParamRef.of(body, name)
            self._returned.append((i, place, result))

    def serves(self, shapes: Sequence[Sequence[int]], strides: Sequence[Any]) -> bool:
        """Whether the graph is right for these sizes (and, where they are fixed, strides)."""
        guards = self.capture.guards
        if guards is None:
            return self.shapes == tuple(map(tuple, shapes)) and self.strides == tuple(strides)
        return guards.broken(shapes) is None

    def call(
        self,
        state: list[torch.Tensor],
        leaves: Sequence[torch.Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run the graph: run the body, write what it mutates, build the result.

        Args:
            state: what `state()` returned just now.
            leaves: the tensor arguments, in order.
            args: the arguments as given, for a call whose arguments overlap in memory.
            kwargs: likewise.
        """
        if self._writes and self._memory.overlaps(state, leaves):
            warnings.warn(
                "a tensor that forward writes in place shares memory with another argument or with"
                " other state: running the model unoptimized for this call",
                GraphoptWarning,
                3,
            )
            return eager_forward(self.compiled.body.root)(*args, **kwargs)
        if self._autocast:
            values = self._without_autocast(state, leaves)
        else:
            values = self._function(state, *leaves)
        if self._writes:
            self._epilogue(values, leaves)
        if self._returned:
            values = tuple(self._with_returned(values, leaves))
        return sig.unflatten(self._outputs, values)

    def _without_autocast(
        self, state: list[torch.Tensor], leaves: Sequence[torch.Tensor]
    ) -> tuple[Any, ...]:
        """Run with the ambient autocast off: its casts stand in the graph."""
        for device in self._autocast:
            torch.set_autocast_enabled(device, False)
        try:
            return self._function(state, *leaves)
        finally:
            for device in self._autocast:
                torch.set_autocast_enabled(device, True)

    def _epilogue(self, values: tuple[Any, ...], leaves: Sequence[torch.Tensor]) -> None:
        """Write mutated inputs and state back, in the order of the graph."""
        with torch.no_grad():
            for output, target in self._writes:
                place = leaves[target] if isinstance(target, int) else target.read()
                place.copy_(values[output])

    def _with_returned(self, values: tuple[Any, ...], leaves: Sequence[torch.Tensor]) -> list[Any]:
        """Put the written tensors themselves in the places where eager returns them."""
        found = list(values)
        for i, target, result in self._returned:
            tensor = leaves[target] if isinstance(target, int) else target.read()
            found[i] = result.of(tensor)
        return found
