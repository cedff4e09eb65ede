"""What a report, a diff or a proof is about: the graph in force of an optimized module."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn

from graphopt.capture.store import Recapture
from graphopt.errors import GraphOptError, OptionError
from graphopt.graph.body import Body
from graphopt.graph.text import type_text
from graphopt.memory.plan import MemoryPlan
from graphopt.module import GraphoptModule, graphopt_of
from graphopt.options import disabled
from graphopt.passes import PassOptions, PipelineResult


@dataclasses.dataclass(frozen=True)
class Subject:
    """The graph in force and how it came about.

    Attributes:
        model: class name of the source.
        mode: "train" or "eval".
        inputs: one text per tensor input, "input_ids: i64[2, 64]".
        result: what the passes did.
        options: the user's choices for the passes.
        memory: how the memory budget is kept, None without one.
        capture_seconds: time of the whole capture.
        export_seconds: the part of it inside `torch.export`.
        recaptures: the captures after the first.
        graphs: how many graphs are kept, this one included.
    """

    model: str
    mode: str
    inputs: tuple[str, ...]
    result: PipelineResult
    options: PassOptions
    memory: MemoryPlan | None
    capture_seconds: float
    export_seconds: float
    recaptures: tuple[Recapture, ...]
    graphs: int

    @property
    def before(self) -> Body:
        """The body as captured."""
        return self.result.captured

    @property
    def after(self) -> Body:
        """The body after the passes."""
        return self.result.body


def optimized_of(opt: Any, who: str) -> GraphoptModule:
    """The optimized module that a user means: what `optimize` or `attach` returned.

    Args:
        opt: what the user gave.
        who: name of the public function, for the message.

    Raises:
        OptionError: when it is neither.
    """
    found = graphopt_of(opt)
    if found is not None:
        return found
    if disabled() and isinstance(opt, nn.Module):
        raise OptionError(
            f"there is no graph for {who} to look at",
            why="GRAPHOPT_DISABLE is set, so optimize() returned the model as it is",
            try_="unset GRAPHOPT_DISABLE",
        )
    kind = f"the class {opt.__name__}" if isinstance(opt, type) else f"a {type(opt).__name__}"
    raise OptionError(
        f"{who} takes an optimized module, not {kind}",
        try_=f"graphopt.{who}(graphopt.optimize(model, inputs), ...)",
    )


def subject_of(opt: Any, who: str) -> Subject:
    """The graph in force of what the user gave.

    Raises:
        OptionError: when it is no optimized module.
        GraphOptError: when there is no graph yet, or the model runs unoptimized.
    """
    module = optimized_of(opt, who)
    entry = module.entry
    result = entry.compiled.result
    if not isinstance(result, PipelineResult):
        raise GraphOptError(
            f"there is nothing for {who} to tell",
            why="no passes ran on this graph: it is as captured",
            try_="graphopt.optimize(model, inputs)",
        )
    before = result.captured
    return Subject(
        model=type(module.source).__name__,
        mode="train" if before.training else "eval",
        inputs=input_texts(entry.capture.names, before),
        result=result,
        options=getattr(module._compile_body, "options", PassOptions()),
        memory=entry.compiled.memory,
        capture_seconds=entry.capture.seconds,
        export_seconds=entry.capture.export_seconds,
        recaptures=tuple(module.recaptures),
        graphs=len(module._store.entries()),
    )


def input_texts(names: list[str], body: Body) -> tuple[str, ...]:
    """One text per input of a captured graph: "x: f32[2, 16]"."""
    return tuple(
        f"{name}: {type_text(node.meta.get('val'))}"
        for name, node in zip(names, body.placeholders, strict=True)
    )
