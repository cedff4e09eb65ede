"""What low precision costs each op of a model: error, overflow, underflow; beside float64."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from graphopt.capture import signature as sig
from graphopt.errors import OptionError
from graphopt.graph import ops
from graphopt.graph.body import Body
from graphopt.graph.float64 import DOUBLE, to_float64
from graphopt.graph.record import Site, site_of
from graphopt.module import Compiled, GraphoptModule, Settings
from graphopt.options import check_call, check_model, check_overrides, names_checked
from graphopt.passes.base import Log
from graphopt.passes.overrides import MarkOverrides, op_names
from graphopt.precision import LOW, tell_unmatched
from graphopt.replay import (
    SEED,
    State,
    as_leaf,
    compute,
    forked_rng,
    is_draw_seed,
    is_random,
    last_uses,
    without_autocast,
    without_cudnn_attention,
    without_dropout,
)

_ROWS = 20
"""Rows of a printed table."""


@dataclasses.dataclass(frozen=True)
class NodeError:
    """What low precision does to the value of one op.

    Attributes:
        node: the node's name.
        op: the op.
        site: module path and file:line.
        dtype: the dtype of its value in the low-precision run.
        error: relative L2 error against float64, with what it got from the ops before it.
        own: the same when the op is given exact operands: what it adds itself.
        overflow: values that are infinite or NaN here and finite in float64.
        begins: whether overflow begins here: there is some, and the op's operands are finite.
        underflow: values that are 0 here and not in float64.
        largest: greatest absolute value in float64.
        smallest: smallest absolute value in float64 that is not 0.
    """

    node: str
    op: str
    site: Site
    dtype: str
    error: float
    own: float
    overflow: int
    begins: bool
    underflow: int
    largest: float
    smallest: float

    @property
    def pattern(self) -> str:
        """The key of `precision_overrides` that names this op in its module."""
        return f"{self.site.module}::{self.op}"

    def row(self) -> str:
        """One line of a table."""
        place = f"{self.site.file.rsplit('/', 1)[-1]}:{self.site.line}" if self.site.file else ""
        return (
            f"{self.error:9.2e} {self.own:9.2e} {self.overflow:8d} {self.underflow:8d} "
            f"{self.largest:9.2e} {self.smallest:9.2e}  {self.dtype:9s} {self.op:30s} "
            f"{self.site.module} {place}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {**dataclasses.asdict(self), "pattern": self.pattern}


@dataclasses.dataclass(frozen=True, repr=False)
class PrecisionCheck:
    """What `precision_check` found.

    Attributes:
        precision: the low precision.
        nodes: every op with a floating result, the one that adds the greatest error first.
        outputs: relative L2 error of each floating output.
        overrides: for `optimize(precision_overrides=...)`: those given, then those pinned.
        before: `outputs` before anything was pinned; None where nothing was.
    """

    precision: str
    nodes: tuple[NodeError, ...]
    outputs: tuple[float, ...]
    overrides: dict[str, str]
    before: tuple[float, ...] | None = None

    def __repr__(self) -> str:
        """The worst ops as a table."""
        head = (
            f"{'error':>9s} {'own':>9s} {'overflow':>8s} {'underfl.':>8s} {'largest':>9s} "
            f"{'smallest':>9s}  {'dtype':9s} {'op':30s} where"
        )
        rows = [node.row() for node in self.nodes[:_ROWS]]
        if len(self.nodes) > _ROWS:
            rows.append(f"... {len(self.nodes) - _ROWS} more in .nodes")
        told = ", ".join(f"{e:.2e}" for e in self.outputs)
        lines = [f"{self.precision} against float64", head, *rows, f"outputs: {told}"]
        if self.before is not None:
            lines[-1] += f" (before pinning: {', '.join(f'{e:.2e}' for e in self.before)})"
            lines.append(f"optimize(..., precision_overrides={self.overrides})")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return dataclasses.asdict(self) | {"nodes": [n.to_dict() for n in self.nodes]}


@names_checked
def precision_check(
    model: nn.Module,
    inputs: torch.Tensor | Sequence[Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    precision: str = "bf16",
    precision_overrides: Mapping[str, Any] | None = None,
    pin: float | None = None,
) -> PrecisionCheck:
    """Run a forward in low precision and in float64 side by side, and compare op by op.

    Dropout is off for it. The model is not changed.

    Args:
        model: the model, in the mode to be checked.
        inputs: a tensor, or the positional arguments of `forward`.
        example_kwargs: the keyword arguments.
        precision: "bf16" or "fp16".
        precision_overrides: as for `optimize`.
        pin: ops that add a relative error of more than this, or where an overflow begins, are
            pinned to float32; the check then runs once more with them. From 0; `math.inf` pins
            where an overflow begins, and nothing else.

    Returns:
        The errors and ranges; `.overrides` is what to hand to `optimize`.

    Raises:
        OptionError: for wrong arguments, before any work.
        CaptureError: when the model cannot be captured.

    Example:
        >>> found = precision_check(nn.Linear(4, 4), torch.ones(2, 4))
        >>> found.nodes[0].op, found.nodes[0].overflow
        ('aten.linear', 0)
    """
    check_model(model)
    args, kwargs = check_call(model, inputs, example_kwargs)
    if precision not in LOW:
        raise OptionError(f"precision is {precision!r}", try_=" or ".join(map(repr, LOW)))
    real = isinstance(pin, (int, float)) and not isinstance(pin, bool)
    if pin is not None and not (real and pin >= 0):  # nan, too, of which nothing is larger
        raise OptionError(f"pin is {pin!r}", try_="a relative error such as 0.02, or None")
    overrides = dict(precision_overrides or {})
    checked = check_overrides(model, precision_overrides)
    opt = GraphoptModule(model, Settings(precision=precision), Compiled)
    entry = opt.capture(args, kwargs)
    assert entry is not None
    leaves: list[torch.Tensor] = []
    sig.flatten((args, kwargs), leaves)
    body = _marked(entry.capture.body, checked)
    tell_unmatched(body, checked)
    nodes, outputs = _compare(body, leaves)
    if pin is None:
        return PrecisionCheck(precision, nodes, outputs, overrides)
    worst = [n for n in nodes if n.begins or n.own > pin]
    pinned = {n.pattern: "fp32" for n in worst if n.dtype != "float32"}
    overrides |= pinned
    before = outputs
    body = _marked(entry.capture.body, check_overrides(model, overrides))
    nodes, outputs = _compare(body, leaves)
    return PrecisionCheck(precision, nodes, outputs, overrides, before)


def _marked(body: Body, overrides: tuple[tuple[str, torch.dtype], ...]) -> Body:
    """A copy of a body whose nodes tell what the overrides decide."""
    body = body.copy()
    MarkOverrides(overrides).run(body, Log())
    return body


def _compare(
    body: Body, leaves: Sequence[torch.Tensor]
) -> tuple[tuple[NodeError, ...], tuple[float, ...]]:
    """Run both precisions node by node."""
    graph = without_dropout(body.graph)
    pair = _Pair(body, graph, leaves)
    quiet = (torch.no_grad(), forked_rng(SEED, body.device), without_autocast())
    with contextlib.ExitStack() as stack:
        for context in (*quiet, without_cudnn_attention(), _ambient(body)):
            stack.enter_context(context)
        pair.run()
    nodes = sorted(pair.found, key=lambda n: (not n.begins, -n.own, n.node))
    return tuple(nodes), pair.outputs(body.user_outputs)


def _ambient(body: Body) -> Any:
    kind, dtype = next(iter(body.autocast.items()))
    return torch.autocast(kind, dtype)


class _Pair:
    """One graph twice: in its low precision, and in float64."""

    def __init__(self, body: Body, graph: fx.Graph, leaves: Sequence[torch.Tensor]) -> None:
        self.graph = graph
        self.twins = dict(zip(graph.nodes, to_float64(graph).nodes, strict=True))
        self.autocast = dict(body.autocast)
        self.states = State(body.attribute), State(body.attribute, double=True)
        self.leaves = iter(leaves)
        self.env: dict[fx.Node, Any] = {}
        self.env64: dict[fx.Node, Any] = {}
        self.found: list[NodeError] = []
        self.results: list[tuple[Any, Any]] = []

    def run(self) -> None:
        """Interpret both graphs in step, dropping each pair of values after its last use."""
        last = last_uses(self.graph)
        twins = self.twins
        for node, twin in twins.items():
            if node.op == "output":
                pairs = zip(node.args[0], twin.args[0], strict=True)
                self.results = [
                    (self.env[a], self.env64[b]) for a, b in pairs if isinstance(a, fx.Node)
                ]
                return
            self._step(node, twin)
            for dead in last.get(node, ()):
                self.env.pop(dead, None)
                self.env64.pop(twins[dead], None)

    def _step(self, node: fx.Node, twin: fx.Node) -> None:
        if node.op == "placeholder":
            leaf = next(self.leaves)
            self.env[node] = leaf
            self.env64[twin] = as_leaf(leaf, double=True, needs_grad=False)
        elif node.op == "get_attr":
            low, exact = (state(str(node.target)) for state in self.states)
            self.env[node], self.env64[twin] = low, exact
        elif is_draw_seed(node) or is_random(node):
            self.env[node] = value = compute(node, self.env, self.autocast)
            self.env64[twin] = _widen(value)
        else:
            self.env[node] = value = compute(node, self.env, self.autocast)
            with torch.autocast(next(iter(self.autocast)), enabled=False):
                self.env64[twin] = compute(twin, self.env64, {})
            self._note(node, value, self.env64[twin])

    def _note(self, node: fx.Node, value: Any, exact: Any) -> None:
        """Measure one op; views compute nothing."""
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return
        if ops.is_view(node) or exact.numel() == 0:
            return
        known = {}
        for source in node.all_input_nodes:
            known[source] = _like(self.env[source], self.env64[self.twins[source]])
        own = compute(node, known, self.autocast)
        overflow = int((~value.isfinite() & exact.isfinite()).sum())
        met = [self.env[source] for source in node.all_input_nodes]
        size = exact.abs()
        there = size[(size > 0) & size.isfinite()]
        self.found.append(
            NodeError(
                node=node.name,
                op=op_names(node.target)[1],
                site=site_of(node),
                dtype=str(value.dtype).removeprefix("torch."),
                error=_distance(value, exact),
                own=_distance(own, exact),
                overflow=overflow,
                begins=overflow > 0 and all(map(_is_finite, met)),
                underflow=int(((value == 0) & (exact != 0)).sum()),
                largest=float(there.max()) if there.numel() else 0.0,
                smallest=float(there.min()) if there.numel() else 0.0,
            )
        )

    def outputs(self, count: int) -> tuple[float, ...]:
        """The error of each floating output of the user's."""
        return tuple(
            _distance(a, b)
            for a, b in self.results[:count]
            if isinstance(a, torch.Tensor) and a.is_floating_point()
        )


def _is_finite(value: Any) -> bool:
    values = value if isinstance(value, (tuple, list)) else (value,)
    return all(bool(v.isfinite().all()) for v in values if isinstance(v, torch.Tensor))


def _widen(value: Any) -> Any:
    known = isinstance(value, torch.Tensor) and value.dtype in DOUBLE
    return value.to(DOUBLE[value.dtype]) if known else value


def _like(value: Any, exact: Any) -> Any:
    """An exact value in the dtype that the low-precision run has it in."""
    if isinstance(value, (tuple, list)):
        return type(value)(_like(a, b) for a, b in zip(value, exact, strict=True))
    return exact.to(value.dtype) if isinstance(value, torch.Tensor) else value


def _distance(value: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative L2 distance over the places where both are finite."""
    fine = value.isfinite() & exact.isfinite()
    norm = float(exact[fine].double().norm())
    far = float((value[fine].double() - exact[fine].double()).norm())
    return far / norm if norm > 0 else (0.0 if far == 0 else math.inf)
