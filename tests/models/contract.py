"""A training step of a model beside that of its optimized twin, judged by the error contract."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import graphopt
from graphopt.capture.signature import flatten
from graphopt.luck import only_mean_failed, pool
from graphopt.module import GraphoptModule
from graphopt.numerics import Comparison, compare
from graphopt.replay import dropout_arguments
from graphopt.step import Step, step

DRAWS = 8
Tensors = dict[str, "torch.Tensor | None"]


def device_of(model: nn.Module) -> torch.device:
    """Where a model's parameters are."""
    return next(model.parameters()).device


def optimized(model: nn.Module, batch: dict[str, torch.Tensor], **options: Any) -> GraphoptModule:
    """`graphopt.optimize` on keyword inputs, its warning that there is no GPU left out."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", graphopt.GraphoptWarning)
        return graphopt.optimize(model, (), batch, **{"fuse": "always", **options})


def eager_step(
    model: nn.Module, batch: dict[str, torch.Tensor], upstream: dict[int, torch.Tensor]
) -> Tensors:
    """Outputs and gradients of a module as a user calls it.

    Args:
        model: the source or the optimized module, called like any other.
        batch: keyword arguments.
        upstream: gradient for each output leaf by position; filled where it is missing.
    """
    flat: list[torch.Tensor] = []
    flatten(model(**batch), flat, results=True)
    found: Tensors = {f"output/{i}": y.detach() for i, y in enumerate(flat)}
    roots = [i for i, y in enumerate(flat) if y.requires_grad]
    if not roots:
        return found
    for i in roots:
        generator = torch.Generator().manual_seed(9 + i)
        if i not in upstream:
            upstream[i] = torch.randn(flat[i].shape, generator=generator).to(flat[i])
    wrt = {k: p for k, p in model.named_parameters() if p.requires_grad}
    grads = torch.autograd.grad(
        [flat[i] for i in roots], list(wrt.values()), [upstream[i] for i in roots],
        allow_unused=True,
    )  # fmt: skip
    return found | {f"grad/{k}": g for k, g in zip(wrt, grads, strict=True)}


def judge(
    model: nn.Module,
    opt: GraphoptModule,
    batch: dict[str, torch.Tensor],
    autocast: torch.dtype | None = None,
) -> Comparison:
    """The contract over one step: eager, optimized, and the captured graph in float64.

    Args:
        model: the source, without dropout.
        opt: its optimized module.
        batch: keyword arguments.
        autocast: run both under autocast of this dtype.
    """
    ambient = torch.autocast(device_of(model).type, autocast, enabled=autocast is not None)
    with ambient:
        entry = opt.capture((), batch)
    assert entry is not None
    body = entry.capture.body
    assert not any(dropout_arguments(n) for n in body.graph.nodes), "dropout is on"
    state = {k: v.clone() for k, v in model.state_dict().items()}

    inputs: list[torch.Tensor] = []
    flatten(((), batch), inputs)
    names = [p.name for p in body.placeholders]

    def draw(number: int) -> Comparison:
        upstream: dict[int, torch.Tensor] = {}
        if number:
            upstream = {i: torch.randn_like(g) for i, g in first.items()}
        with ambient:
            eager = eager_step(model, batch, upstream)
            model.load_state_dict(state)  # running statistics start from the same values
            fused = eager_step(opt, batch, upstream)
            model.load_state_dict(state)
        first.update(upstream)
        exact = step(
            body.graph, body.attribute, inputs, names,
            backward=bool(upstream), double=True, like=Step({}, upstream, {}),
            outputs=list(upstream), needs_grad=[False] * len(inputs),
        ).tensors  # fmt: skip
        return compare(eager, fused, {k: exact.get(k) for k in eager})

    first: dict[int, torch.Tensor] = {}
    found = draw(0)
    if only_mean_failed(found) and first:
        found = pool([found, *(draw(k) for k in range(1, DRAWS))])
    return found
