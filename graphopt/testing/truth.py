"""The float64 runs that a step is measured against.

Two of them, since each sees what the other cannot. The captured graph with every float literal
rewritten is exact, yet it would share a fault of the capture with the optimized module. The model
itself, copied and cast to float64, shares nothing with it; where the model casts to float32 by
itself its truth is only that good.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from graphopt.capture import signature as sig
from graphopt.capture.entry import Entry
from graphopt.graph.body import Body
from graphopt.numerics import compare
from graphopt.replay import is_random, without_dropout
from graphopt.step import Step, step
from graphopt.testing.observe import Observed, Plan, Upstream, double_of, observe

Tensors = dict[str, "torch.Tensor | None"]

FAR = 8.0
"""How many times eager's distance from the float64 model an optimized module may have."""
ROUNDINGS = 64.0
"""Distances of so many ulps of the coarsest dtype in the graph are rounding, not a fault."""


class GraphTruth:
    """Runs the captured graph of one call in float64.

    Args:
        entry: the graph in force for the call.
        module: whose parameter names are used.
        plan: arguments and seed.
    """

    def __init__(self, entry: Entry, module: nn.Module, plan: Plan) -> None:
        self.body: Body = entry.capture.body
        self.graph = without_dropout(self.body.graph)
        self.module = module
        self.plan = plan
        self.leaves: list[torch.Tensor] = []
        sig.flatten((plan.args, plan.kwargs), self.leaves)
        self.names = plan.names
        self.drawn: dict[str, Any] = {}
        if any(is_random(n) for n in self.graph.nodes):
            self.drawn = self._step({}, double=False).drawn

    def __call__(self, upstream: Upstream) -> Tensors:
        """Results, gradients, buffers and arguments after the call, by the names of `observe`."""
        found = self._step(upstream, double=True).tensors
        names: dict[int, str] = {}
        for name, tensor in (*self.module.named_parameters(), *self.module.named_buffers()):
            names.setdefault(id(tensor), name)
        tensors: Tensors = {}
        for key, value in found.items():
            group, _, name = key.partition("/")
            if group == "grad" and not name.startswith("argument "):
                name = names.get(id(self.body.attribute(name)), name)
            tensors[f"{group}/{name}"] = value
        for name, buffer in self.module.named_buffers():
            tensors[f"buffer/{name}"] = buffer.detach()
        for name, leaf in zip(self.names, self.leaves, strict=True):
            tensors[f"input/{name}"] = leaf.detach()
        placeholders = [p.name for p in self.body.placeholders]
        for m in self.body.mutations:
            value = found[f"output/{m.output}"]
            if m.kind == "input":
                tensors[f"input/{self.names[placeholders.index(m.target)]}"] = value
            elif m.kind == "buffer":
                name = names.get(id(self.body.attribute(m.target)), m.target)
                tensors[f"buffer/{name}"] = value
        return tensors

    def _step(self, upstream: Upstream, *, double: bool) -> Step:
        count = self.body.user_outputs
        return step(
            self.graph,
            self.body.attribute,
            [t.detach() for t in self.leaves],
            [f"argument {n}" for n in self.names],
            backward=self.plan.backward and bool(upstream),
            double=double,
            like=Step({}, dict(upstream), self.drawn) if double else None,
            outputs=[i for i in range(count) if i in upstream],
            needs_grad=list(self.plan.requires),
            seed=self.plan.seed,
        )


class ModelTruth:
    """Runs a float64 copy of a module.

    Raises:
        Exception: whatever the module raises that does not take float64.
    """

    def __init__(self, module: nn.Module, plan: Plan) -> None:
        self.module = double_of(module)
        self.plan = plan

    def __call__(self, upstream: Upstream) -> Tensors:
        """The same, by the names of `observe`."""
        wide = {i: g.double() if g.is_floating_point() else g for i, g in upstream.items()}
        return observe(self.module, self.plan, wide, double=True).tensors


def capture_fault(
    eager: Observed, optimized: Observed, model64: Mapping[str, torch.Tensor | None], body: Body
) -> str | None:
    """What is right by the captured graph and wrong by the model: a fault of the capture.

    Args:
        eager: the unoptimized step.
        optimized: the optimized one.
        model64: the step of the model's float64 copy.
        body: the captured graph.
    """
    eps = max((torch.finfo(d).eps for d in _dtypes(body)), default=0.0)
    truth = {k: model64.get(k) for k in eager.tensors}
    found = compare(eager.tensors, optimized.tensors, truth, mean_counts=False)
    for t in found.tensors:
        limit = max(FAR * t.eager, ROUNDINGS * eps)
        if math.isfinite(t.optimized) and t.optimized > limit and t.difference > limit:
            return (
                f"{t.name}: {t.optimized:.1e} from the model's own float64 run, eager {t.eager:.1e}"
            )
    return None


def _dtypes(body: Body) -> set[torch.dtype]:
    """The floating dtypes of a graph's values and of the autocast around it."""
    found = set(body.autocast.values())
    for node in body.graph.nodes:
        val = node.meta.get("val")
        if isinstance(val, torch.Tensor) and val.is_floating_point():
            found.add(val.dtype)
    return found
