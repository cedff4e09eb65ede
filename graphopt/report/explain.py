"""The dry run: what graphopt would rewrite in a model, what it would not, and why."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from graphopt.capture import capture
from graphopt.capture.key import ambient, autocast_dtypes
from graphopt.cost.ops import nodes_cost
from graphopt.graph import ops
from graphopt.graph.record import Refusal, RewriteRecord
from graphopt.graph.text import type_text
from graphopt.memory.asked import check_memory
from graphopt.memory.plan import MemoryPlan, plan
from graphopt.options import (
    PRECISION,
    check_call,
    check_choice,
    check_model,
    check_overrides,
    check_passes,
    names_checked,
)
from graphopt.passes import PipelineResult, Rule, run_pipeline
from graphopt.passes.autocast import MaterializeAutocast
from graphopt.passes.base import Log
from graphopt.passes.overrides import MarkOverrides
from graphopt.precision import lowered, tell_unmatched
from graphopt.report.memory import memory_parts
from graphopt.report.progress import progress
from graphopt.report.rules import (
    RefusalSummary,
    RuleSummary,
    by_reason,
    by_rule,
    reason_table,
    rule_table,
)
from graphopt.report.table import Table, percent, size
from graphopt.report.view import Part, html_fragment, plain


@dataclasses.dataclass(frozen=True, repr=False)
class Explanation:
    """What one captured forward of a model would become. Its repr is the table.

    Attributes:
        model: class name of the model.
        mode: "train" or "eval".
        inputs: one text per tensor input, "input_ids: i64[2, 64]".
        nodes_before: ops in the captured graph.
        nodes_after: ops in the optimized graph.
        bytes_before: bytes that the captured graph reads and writes, each op run as a kernel.
        bytes_after: the same for the optimized graph.
        seconds: how long capture and passes took.
        rules: what each rule did, the greatest saving first.
        refused: the near misses by reason and line of code, the nearest first.
        rewrites: the records behind `rules`.
        refusals: the records behind `refused`.
        stages: (pass, ops after it, seconds) in the order in which the passes ran.
        memory: how a memory budget would be kept, None without one.
    """

    model: str
    mode: str
    inputs: tuple[str, ...]
    nodes_before: int
    nodes_after: int
    bytes_before: int
    bytes_after: int
    seconds: float
    rules: tuple[RuleSummary, ...]
    refused: tuple[RefusalSummary, ...]
    rewrites: tuple[RewriteRecord, ...]
    refusals: tuple[Refusal, ...]
    stages: tuple[tuple[str, int, float], ...]
    memory: MemoryPlan | None = None

    @classmethod
    def of(
        cls,
        model: torch.nn.Module,
        names: Sequence[str],
        result: PipelineResult,
        seconds: float,
        memory: MemoryPlan | None = None,
    ) -> Explanation:
        """Sum up what the passes did to one captured forward.

        Args:
            model: the source model, for its class name.
            names: a name per input of the captured graph.
            result: what `run_pipeline` returned.
            seconds: what capture and passes took together.
            memory: the plan for a memory budget.
        """
        before, after = result.captured, result.body
        return cls(
            model=type(model).__name__,
            mode="train" if before.training else "eval",
            inputs=tuple(
                f"{name}: {type_text(node.meta.get('val'))}"
                for name, node in zip(names, before.placeholders, strict=True)
            ),
            nodes_before=ops.count(before.graph),
            nodes_after=ops.count(after.graph),
            bytes_before=nodes_cost(before.graph.nodes).bytes,
            bytes_after=nodes_cost(after.graph.nodes).bytes,
            seconds=seconds,
            rules=by_rule(result.rewrites, result.refusals),
            refused=by_reason(result.refusals),
            rewrites=tuple(result.rewrites),
            refusals=tuple(result.refusals),
            stages=tuple((s.name, s.nodes, s.seconds) for s in result.stages),
            memory=memory,
        )

    @property
    def headline(self) -> str:
        """One line: the model, its inputs, ops and bytes before and after."""
        less = 1 - self.bytes_after / self.bytes_before if self.bytes_before else 0.0
        return (
            f"{self.model}  {self.mode}  {', '.join(self.inputs)}   "
            f"{self.nodes_before} ops -> {self.nodes_after}   "
            f"{size(self.bytes_before)} moved -> {size(self.bytes_after)} ({percent(less)})   "
            f"{self.seconds:.1f} s"
        )

    @property
    def closing(self) -> str:
        """What the numbers mean and what to do next."""
        budget = ""
        if self.memory is not None and self.memory.budget_bytes is not None:
            budget = f", memory_budget={self.memory.asked}"
            budget += ", offload='auto'" if self.memory.offload else ""
        return (
            "Bytes are counted, not measured: forward only, an op reads its inputs, writes its "
            f"results once.\nnext: opt = graphopt.optimize(model, inputs{budget}); "
            "graphopt.verify(opt, inputs)"
        )

    def tables(self) -> list[Table]:
        """The table of rules and, where something was refused, that of reasons."""
        fired = [row for row in self.rules if row.fired]
        tables = [rule_table(fired)] if fired else []
        return tables + ([reason_table(self.refused)] if self.refused else [])

    def parts(self) -> list[Part]:
        """What is shown, in order."""
        memory = [] if self.memory is None else memory_parts(self.memory)
        return [self.headline, *self.tables(), *memory, self.closing]

    def __repr__(self) -> str:
        """The tables as plain text."""
        return plain(self.parts())

    def _repr_html_(self) -> str:
        return html_fragment(self.parts())

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        nested = ("rules", "refused", "rewrites", "refusals", "memory")
        data = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in nested
        }
        lists = {name: [r.to_dict() for r in getattr(self, name)] for name in nested[:-1]}
        return {**data, **lists, "memory": None if self.memory is None else self.memory.to_dict()}


@names_checked
def explain(
    model: torch.nn.Module,
    example_inputs: torch.Tensor | Sequence[Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    precision: str | None = None,
    precision_overrides: Mapping[str, str | torch.dtype] | None = None,
    fuse: bool | str = True,
    rules: str | Rule | Iterable[str | Rule] = "default",
    max_rewrites: int | None = None,
    memory_budget: int | float | str | None = None,
    segments: int | None = None,
    offload: bool | str | None = False,
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    resident_bytes: int | str = 0,
) -> Explanation:
    """Say what `optimize` would do to a model: a dry run that changes and computes nothing.

    The model is captured in its present mode, under the grad mode and autocast of the call.

    Args:
        model: the model, which stays as it is.
        example_inputs: a tensor, or a tuple of positional arguments.
        example_kwargs: keyword arguments.
        precision: as in `optimize`.
        precision_overrides: as in `optimize`.
        fuse: as in `optimize`.
        rules: as in `optimize`.
        max_rewrites: as in `optimize`.
        memory_budget: as in `optimize`.
        segments: as in `optimize`.
        offload: as in `optimize`.
        loss_fn: as in `optimize`.
        resident_bytes: as in `optimize`.

    Returns:
        What would be rewritten, what would not, and why. Printing it shows the tables.

    Raises:
        CaptureError: when the model cannot be captured, naming the construct and its line.
        OptionError: for wrong arguments, before any work.
        BudgetError: when no plan keeps the memory budget.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.ReLU())
        >>> [row.rule for row in explain(model, torch.ones(2, 8)).rules if row.fired]
        ['layer_norm']
    """
    check_model(model, attached=True)
    names = ("example_inputs", "example_kwargs")
    args, kwargs = check_call(model, example_inputs, example_kwargs, names)
    check_choice("precision", precision, PRECISION)
    overrides = check_overrides(model, precision_overrides)
    options = check_passes(fuse, rules, max_rewrites)
    memory = check_memory(memory_budget, segments, loss_fn, resident_bytes, offload)
    start = time.perf_counter()
    with progress(f"explain {type(model).__name__}"):
        with lowered(model, precision):
            captured = capture(model, args, kwargs)
            body = captured.body
            body.autocast = autocast_dtypes(ambient())
        if overrides:
            MarkOverrides(overrides).run(body, Log())
            tell_unmatched(body, overrides)
        result = run_pipeline(body, options, leading=(MaterializeAutocast(),))
        planned = None if memory is None else plan(result.body, memory).plan
    return Explanation.of(model, captured.names, result, time.perf_counter() - start, planned)
