"""The runs behind one assertion: eager, optimized and float64, and what is wrong between them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from graphopt.errors import GraphOptError
from graphopt.luck import may_be_luck, settle
from graphopt.module import graphopt_of
from graphopt.numerics import Comparison
from graphopt.testing.atrest import graph_at_rest
from graphopt.testing.failure import Finding, facts_differ, first_tensor
from graphopt.testing.inputs import copy_arguments
from graphopt.testing.judge import judge
from graphopt.testing.observe import Observed, Plan, Upstream, observe
from graphopt.testing.truth import GraphTruth, ModelTruth, Tensors, capture_fault

DRAWS = 8
"""Over how many inputs a comparison is taken that only rounds too much on the first."""

Truth = Callable[[Upstream], Tensors]


class Trial:
    """The runs of one assertion.

    Args:
        model: the source.
        optimized: what shall be equivalent to it.
        plan: arguments, seed, upstream gradients.
        eager: the source's run.
        strides: whether the strides of results count.
    """

    def __init__(
        self, model: nn.Module, optimized: nn.Module, plan: Plan, eager: Observed, strides: bool
    ) -> None:
        self.model = model
        self.optimized = optimized
        self.plan = plan
        self.eager = eager
        self.strides = strides
        self.notes: list[str] = []
        self.comparison: Comparison | None = None

    def note(self, text: str) -> None:
        """Keep a condition under which something was compared."""
        if text not in self.notes:
            self.notes.append(text)

    def again(self, optimized: nn.Module) -> bool:
        """Whether another optimized module passes the same trial."""
        return Trial(self.model, optimized, self.plan, self.eager, self.strides).run() is None

    def run(self) -> Finding | None:
        """What is wrong, None when nothing is."""
        if self.eager.dropped:
            self.note("dropout: compared at p = 0")
        try:
            optimized = self._optimized(self.plan, self.eager.upstream)
        except GraphOptError:
            raise
        except Exception as error:  # eager did not raise, so this is the finding
            return Finding(f"{type(self.optimized).__name__} raised, eager does not",
                           f"{type(error).__name__}: {error}", cause=error)  # fmt: skip
        differs = facts_differ(self.eager, optimized, strides=self.strides)
        if differs is not None and not _comparable(self.eager, optimized):
            return differs
        found = self._judge(optimized)
        first = found is not None and (found.tensor or "output/").startswith("output/")
        return found if first else differs or found

    def _judge(self, optimized: Observed) -> Finding | None:
        """The contract, and whether the capture itself can be trusted."""
        graph, model = self._graph_truth(self.plan), None
        if graph is None or not graph.drawn:
            model = self._model_truth()
        else:
            self.note("the model draws random numbers: measured against its graph alone")
        truth = graph or model
        if truth is None:
            return Finding("there is no float64 run to measure against", "; ".join(self.notes))
        exact = truth(self.eager.upstream)
        comparison = judge(self.eager.tensors, optimized.tensors, exact)
        if may_be_luck(comparison):
            draws = [self._draw(k, model) for k in range(1, DRAWS)]
            comparison = settle(comparison, draws)
        self.comparison = comparison
        if not comparison.passed:
            return first_tensor(comparison, self.eager, optimized, exact)
        if graph is not None and model is not None:
            fault = capture_fault(self.eager, optimized, model(self.eager.upstream), graph.body)
            if fault is not None:
                return Finding("the captured graph is not the model", fault, capture=True)
        return None

    def _graph_truth(self, plan: Plan) -> GraphTruth | None:
        entry, opt = self._entry(plan), graphopt_of(self.optimized)
        if entry is None or opt is None:
            return None
        try:
            return GraphTruth(entry, opt.source, plan)
        except Exception as error:  # a note, and the other truth serves
            self.note(f"the captured graph does not run in float64: {error}")
            return None

    def _model_truth(self) -> ModelTruth | None:
        try:
            model = ModelTruth(self.model, self.plan)
            model(self.eager.upstream)
            return model
        except Exception as error:  # a note, and the other truth serves
            self.note(f"the model does not run in float64 ({type(error).__name__}: {error})")
            return None

    def _entry(self, plan: Plan) -> Any:
        opt = graphopt_of(self.optimized)
        if opt is None:
            return None
        args, kwargs, _ = copy_arguments(plan.args, plan.kwargs, requires=plan.requires)
        return opt.capture(args, kwargs)

    def _optimized(self, plan: Plan, upstream: Upstream) -> Observed:
        entry = self._entry(plan) if self.eager.dropped else None
        # None: any other module has its dropouts at rest like the model.
        around: contextlib.AbstractContextManager[None] | None = None
        if not self.eager.dropped:
            around = contextlib.nullcontext()
        elif entry is not None:
            around = graph_at_rest(entry)
        return observe(self.optimized, plan, upstream, around=around)

    def _draw(self, number: int, model: ModelTruth | None) -> Comparison:
        """The comparison on inputs moved by a few roundings, from other upstream gradients."""
        plan = self.plan
        args, kwargs, _ = copy_arguments(plan.args, plan.kwargs, nudge=number)
        plan = dataclasses.replace(plan, args=args, kwargs=kwargs)
        generator = torch.Generator().manual_seed(plan.seed + 1000 * number)
        upstream = dict(self.eager.upstream)
        for i, g in upstream.items():
            if i not in plan.given:
                drawn = torch.randn(g.shape, generator=generator, dtype=torch.float64)
                upstream[i] = drawn.to(g.device, g.dtype)
        eager = observe(self.model, plan, upstream)
        truth: Truth | None = self._graph_truth(plan)
        if truth is None:
            assert model is not None
            truth = ModelTruth(self.model, plan)
        return judge(eager.tensors, self._optimized(plan, upstream).tensors, truth(upstream))


def _comparable(eager: Observed, optimized: Observed) -> bool:
    """Whether the two hold tensors of the same names."""
    return eager.tensors.keys() == optimized.tensors.keys()
