"""One training step of a captured graph: outputs, and gradients from random upstream gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_map

from graphopt.graph.float64 import DOUBLE, to_float64
from graphopt.graph.record import site_of
from graphopt.numerics import compare
from graphopt.replay import (
    SEED,
    State,
    Watch,
    as_leaf,
    default_dtype,
    forked_rng,
    run,
    without_autocast,
)


@dataclasses.dataclass
class Step:
    """The values of one forward and backward.

    Attributes:
        tensors: "output/<i>" and "grad/<name>" to detached tensors (None for no gradient).
        upstream: the gradients that were sent in, by output index, for the next run to repeat.
        drawn: values of nodes that drew from torch's generator.
    """

    tensors: dict[str, torch.Tensor | None]
    upstream: dict[int, torch.Tensor]
    drawn: dict[str, Any]


def step(
    graph: fx.Graph,
    attribute: Callable[[str], Any],
    inputs: Sequence[Any],
    names: Sequence[str],
    *,
    backward: bool = True,
    double: bool = False,
    like: Step | None = None,
    given: Mapping[str, Any] | None = None,
    outputs: Sequence[int] | None = None,
    needs_grad: Sequence[bool] | None = None,
    seed: int = SEED,
    autocast: Mapping[str, torch.dtype] | None = None,
    inside: Collection[str] = (),
    strided: bool = False,
) -> Step:
    """Run a graph forward and backward from random upstream gradients.

    Args:
        graph: the graph; with `double` it is rewritten by `to_float64` first.
        attribute: gives the tensor of a `get_attr` target.
        inputs: one value per placeholder.
        names: what to call the inputs' gradients, one per placeholder.
        backward: whether to differentiate.
        double: run in float64.
        like: an earlier step whose upstream gradients and random draws are repeated.
        given: values to take, by node name, in place of running a node.
        outputs: which outputs take part in the backward pass; all when None.
        needs_grad: which inputs get a gradient; every floating one when None.
        seed: for `draw_seed`, torch's generator and the upstream gradients.
        autocast: as for `run`; of no effect in float64.
        inside: names of nodes whose values and gradients are wanted, too, as "value/<name>" and
            "inside/<name>".
        strided: send the upstream gradients in another memory layout, as a transpose leaves them.

    Returns:
        Outputs and gradients by name: a parameter's under its `get_attr` target.
    """
    device = next((t.device for t in inputs if isinstance(t, torch.Tensor)), torch.device("cpu"))
    state = State(attribute, double=double)
    wanted = needs_grad if needs_grad is not None else [True] * len(inputs)
    leaves = [
        as_leaf(v, double=double, needs_grad=backward and w)
        for v, w in zip(inputs, wanted, strict=True)
    ]
    drawn: dict[str, Any] = {}
    met: dict[str, Any] = {}
    fixed = {**(given or {}), **({} if like is None else like.drawn)}
    fixed = {k: tree_map(lambda v: _cast(v, double), v) for k, v in fixed.items()}
    dtype = torch.float64 if double else torch.get_default_dtype()
    with forked_rng(seed, device), default_dtype(dtype), torch.set_grad_enabled(backward):
        flat = run(
            to_float64(graph) if double else graph,
            state,
            leaves,
            given=fixed,
            drawn=drawn,
            seed=seed,
            autocast=None if double else autocast,
            watch=Watch(inside, met.__setitem__) if inside else None,
        )
    tensors: dict[str, torch.Tensor | None] = {
        f"output/{i}": y.detach() for i, y in enumerate(flat) if isinstance(y, torch.Tensor)
    }
    upstream = dict(like.upstream) if like is not None else {}
    if backward:
        wrt = {f"grad/{n}": t for n, t in zip(names, leaves, strict=True) if _wants_grad(t)}
        wrt.update({f"grad/{n}": t for n, t in state.parameters.items()})
        wrt.update({f"inside/{n}": t for n, t in met.items() if _wants_grad(t)})
        chosen = range(len(flat)) if outputs is None else outputs
        with without_autocast():
            gradients = _gradients({i: flat[i] for i in chosen}, wrt, upstream, seed, strided)
        tensors.update(gradients)
    tensors.update(
        {f"value/{n}": t.detach() for n, t in met.items() if isinstance(t, torch.Tensor)}
    )
    return Step(tensors, upstream, drawn if like is None else like.drawn)


def _cast(value: Any, double: bool) -> Any:
    if double and isinstance(value, torch.Tensor):
        return value.to(DOUBLE.get(value.dtype, value.dtype))
    return value


def _wants_grad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _gradients(
    outputs: Mapping[int, Any],
    wrt: Mapping[str, torch.Tensor],
    upstream: dict[int, torch.Tensor],
    seed: int,
    strided: bool,
) -> dict[str, torch.Tensor | None]:
    """Gradients of `wrt`; fills `upstream` for the outputs that it does not hold yet."""
    roots = {i: y for i, y in outputs.items() if _wants_grad(y)}
    for i, y in roots.items():
        if i not in upstream:
            upstream[i] = _random_like(y, seed + i)
    if not roots or not wrt:
        return dict.fromkeys(wrt)
    sent = [upstream[i].to(device=y.device, dtype=y.dtype) for i, y in roots.items()]
    sent = [_strided(g) for g in sent] if strided else sent
    found = torch.autograd.grad(list(roots.values()), list(wrt.values()), sent, allow_unused=True)
    return dict(zip(wrt, found, strict=True))


def _random_like(y: torch.Tensor, seed: int) -> torch.Tensor:
    """A random tensor of a value's shape and dtype; the same on every device."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.device, y.dtype)


def _strided(g: torch.Tensor) -> torch.Tensor:
    """The same values in the layout that a transpose in a model's backward leaves."""
    if g.dim() < 2:
        return g
    a, b = (0, 1) if g.dim() == 2 else (-3, -2)
    return g.transpose(a, b).contiguous().transpose(a, b)


def where_they_part(
    before: fx.Graph, after: fx.Graph, run_one: Callable[[fx.Graph, bool, Collection[str]], Step]
) -> str:
    """Between which values, known to both graphs, two runs of a step part; "" when nowhere.

    Args:
        before: the graph that is right.
        after: the one that is not.
        run_one: runs a graph (the first: in float64 when the flag says so) and hands back the
            values and gradients of the named nodes.
    """
    known = {n.name for n in before.nodes if n.op == "call_function"}
    nodes = [n for n in after.nodes if n.op == "call_function" and n.name in known]
    names = [n.name for n in nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    sites = {n.name: str(site_of(n)) for n in nodes}
    runs = [
        run_one(before, False, names),
        run_one(after, False, names),
        run_one(before, True, names),
    ]
    for group, order, what in (("value", names, "values"), ("inside", names[::-1], "gradients")):
        keys = [k for n in order if all((k := f"{group}/{n}") in r.tensors for r in runs)]
        found = compare(*({k: r.tensors[k] for k in keys} for r in runs), mean_counts=False)
        right = ""
        for t in found.tensors:
            name = t.name.partition("/")[2]
            if not t.passed and t.ratio > 4:
                after_what = f" after {right}" if right else ""
                return f"{what} part{after_what} at {name}, {sites[name]}"
            right = name
    return ""
