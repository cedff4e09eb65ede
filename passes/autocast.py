"""Write an ambient `torch.autocast` into the graph as explicit casts.

A forward that is captured under autocast holds the ops as they were called, while the casts happen
unseen in the dispatcher. This pass makes them nodes, so that the body runs with autocast off, gives
what eager gives, and later passes can see, merge and fold the casts.

Which op is cast to what differs between devices and between torch versions (`rms_norm` joined
CUDA's float32 list in 2.12, CPU's list holds `cross_entropy_loss` and CUDA's `softmax`). So it is
not torch's lists, which stand in `op_classes` for a reader, that decide here: the op is run once on
fake tensors under autocast, and the casts that reach its operands are read off (`observe`). What an
observation says, by class:

| class | examples (2.13, CUDA) | written as |
|---|---|---|
| low precision | linear, matmul, conv, bmm, attention | operands cast to the dtype |
| float32 | exp, pow, rsqrt, layer_norm, losses | operands cast to float32 |
| float32 by argument | softmax, log_softmax, cumsum, sum, prod | `dtype=torch.float32` |
| promote | addcmul, index_put, scatter_add | operands cast to the widest |
| composite | einsum, cross_entropy_loss on CUDA | cast whole (`op_classes.DIFFERENCES`) |
| oneDNN's layer | lstm on the CPU | cast whole (`recurrent`) |
| other composites | label smoothing by hand | opened, its inner ops cast |
| the rest | add, mul, relu, dropout | left as they are |
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from graphopt.errors import PassError
from graphopt.graph import ops
from graphopt.graph.body import Body, copy_graph
from graphopt.graph.edit import Editor, fake_value
from graphopt.graph.record import site_of
from graphopt.passes.base import LOW, Log
from graphopt.passes.observe import (
    Observation,
    casting,
    dtypes_of,
    is_float,
    observe,
    with_dtype,
)
from graphopt.passes.op_classes import DIFFERENCES
from graphopt.passes.overrides import EXPLICIT, MARK, widens
from graphopt.passes.recurrent import inside, one_kernel

aten = torch.ops.aten

MAX_DEPTH = 4
"""How deep composites are opened one inside another."""


@dataclasses.dataclass(frozen=True)
class MaterializeAutocast:
    """The pass: writes the casts of `Body.autocast` and of inner regions, and empties the former.

    Nodes marked `graphopt_precision_fixed` (an inner region with autocast off) keep their
    precision; nodes marked `graphopt_autocast` are cast by that region's dtype. A value is cast
    once to each dtype, as autocast's own cache does for parameters.
    """

    @property
    def name(self) -> str:
        """Name in records."""
        return "materialize_autocast"

    def run(self, body: Body, log: Log) -> None:
        """Write the casts; recorded as one global rewrite.

        It runs whatever `max_rewrites` says: without it the body would not be what was captured.

        Raises:
            PassError: when an op's casts cannot be written as nodes.
        """
        regions = any("graphopt_autocast" in node.meta for node in body.graph.nodes)
        if not body.autocast and not regions:
            return
        before = copy_graph(body.graph)
        _Writer(body, self.name).run()
        body.autocast = {}
        log.add_global(self.name, before, body, ())


def materialize_autocast(body: Body, device_type: str, dtype: torch.dtype) -> Body:
    """A copy of a body with the casts of an ambient autocast written out.

    Args:
        body: captured under that autocast, so that its metadata has the dtypes of such a run.
            One captured without it gets its metadata corrected, but dtype literals that the
            model's own Python read off a tensor (`h.to(x.dtype)`) stay as they were read.
        device_type: "cuda" or "cpu".
        dtype: torch.bfloat16 or torch.float16.

    Raises:
        PassError: when an op's casts cannot be written as nodes.
    """
    work = body.copy()
    work.autocast = {device_type: dtype}
    MaterializeAutocast().run(work, Log())
    return work


class _Writer:
    """Goes once through a graph and writes each node's casts before it."""

    def __init__(self, body: Body, name: str) -> None:
        self.body = body
        self.editor = Editor(body.graph, name)
        self.kind = next(iter(body.autocast), body.device.type)
        self.casts: dict[tuple[fx.Node, torch.dtype, bool], fx.Node] = {}
        self.known: dict[Any, Observation] = {}
        self.recast: set[fx.Node] = set()  # nodes that now give another dtype than was recorded

    def run(self) -> None:
        """Rewrite every call of the graph."""
        for node in list(self.body.graph.nodes):
            if node.op == "call_function":
                self.write(node, 0)

    def write(self, node: fx.Node, depth: int) -> None:
        """Write the casts of one call, and correct its metadata where it was captured without."""
        if widens(node):
            self._pin(node)
            return
        region = self._region(node)
        if region is None:
            self._refresh(node, None)
            return
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        seen = self._observe(node, args, kwargs, *region)
        if seen.inside and node.target in DIFFERENCES:
            seen = _kept_whole(args, kwargs, seen, DIFFERENCES[node.target].dtype or region[1])
        elif seen.inside and one_kernel(node.target, args, region[0]):
            seen = _kept_whole(args, kwargs, seen, region[1])
        if seen.inside:
            self._open(node, depth, region)
            return
        if not seen.proved:
            raise PassError(
                f"the casts of {ops.op_name(node.target)} under autocast cannot be written",
                at=str(site_of(node)),
                why=f"it gives {seen.dtypes}, and not by casts of its operands",
            )
        if seen.casts or seen.dtype_argument is not None:
            self._rewrite(node, seen)
        self._refresh(node, seen)

    def _region(self, node: fx.Node) -> tuple[str, torch.dtype] | None:
        """Device type and dtype of the autocast that a call stands under, None for none.

        An inner region's mark names no device type: it is that of the ambient one.
        """
        schema = getattr(node.target, "_schema", None)
        fixed = MARK not in node.meta and node.meta.get("graphopt_precision_fixed")
        if schema is None or schema.name in EXPLICIT or fixed:
            return None
        for source in node.all_input_nodes:
            val = source.meta.get("val")
            if isinstance(val, torch.Tensor) and val.is_floating_point():
                kind = val.device.type
                dtype = node.meta.get(MARK) or node.meta.get("graphopt_autocast")
                dtype = dtype or self.body.autocast.get(kind)
                if dtype is not None:
                    return kind, dtype
        return None

    def _pin(self, node: fx.Node) -> None:
        """Let a call run in float32, as an override asks: widen its low-precision operands."""
        flat, _ = tree_flatten((node.args, dict(node.kwargs)))
        low = [
            i
            for i, a in enumerate(flat)
            if isinstance(a, fx.Node) and getattr(a.meta["val"], "dtype", None) in LOW
        ]
        self._rewrite(node, Observation(dict.fromkeys(low, torch.float32), None, ()))
        before = dtypes_of(node.meta.get("val"))
        with casting(self.kind, None):
            node.meta["val"] = fake_value(node)
        if dtypes_of(node.meta["val"]) != before:
            self.recast.add(node)

    def _observe(
        self, node: fx.Node, args: Any, kwargs: Any, kind: str, dtype: torch.dtype
    ) -> Observation:
        """What autocast does to the call, from memory for a like one."""
        key = (node.target, kind, dtype, *(_like(v) for v in tree_leaves((args, kwargs))))
        if key not in self.known:
            try:
                self.known[key] = observe(node.target, args, kwargs, kind, dtype)
            except Exception as error:
                raise PassError(
                    f"{ops.op_name(node.target)} fails under autocast({kind!r}, {dtype})",
                    at=str(site_of(node)),
                    why=f"{type(error).__name__}: {error}",
                    try_="torch.autocast(enabled=False) around it in the model",
                ) from error
        return self.known[key]

    def _rewrite(self, node: fx.Node, seen: Observation) -> None:
        """Give the call its cast operands."""
        flat, spec = tree_flatten((node.args, dict(node.kwargs)))
        for i, dtype in seen.casts.items():
            flat[i] = self._cast(flat[i], dtype, node)
        args, kwargs = tree_unflatten(flat, spec)
        node.args, node.kwargs = tuple(args), kwargs
        if seen.dtype_argument is not None:
            node.args, node.kwargs = with_dtype(
                node.target, node.args, dict(node.kwargs), seen.dtype_argument
            )

    def _cast(self, value: fx.Node, dtype: torch.dtype, user: fx.Node) -> fx.Node:
        """The value in another dtype, cast once and read by all."""
        key = (value, dtype, bool(user.meta.get("graphopt_no_grad")))
        if key not in self.casts:
            like = value if value.op == "call_function" else user
            self.casts[key] = self.editor.call(aten.to.dtype, value, dtype, before=user, like=like)
        return self.casts[key]

    def _refresh(self, node: fx.Node, seen: Observation | None) -> None:
        """Recompute `val` where the call now gives another dtype than was recorded."""
        before = dtypes_of(node.meta.get("val"))
        stale = any(source in self.recast for source in node.all_input_nodes)
        if not stale and (seen is None or before == seen.dtypes):
            return
        with casting(self.kind, None):
            node.meta["val"] = fake_value(node)
        if dtypes_of(node.meta["val"]) != before:
            self.recast.add(node)

    def _open(self, node: fx.Node, depth: int, region: tuple[str, torch.dtype]) -> None:
        """Replace a composite by the ops that it is made of, and write their casts."""
        if depth >= MAX_DEPTH:
            raise PassError(
                f"{ops.op_name(node.target)} is a composite {MAX_DEPTH} levels deep",
                at=str(site_of(node)),
                why="its inner ops are cast under autocast, so it must be opened",
            )
        made, result = open_composite(node, self.editor, *region)
        pairs = [(node, result)]
        if not isinstance(result, fx.Node):  # users are getitems of the tuple
            pairs = [(user, result[user.args[1]]) for user in node.users]
        wanted = [dtypes_of(old.meta.get("val")) for old, _ in pairs]
        for old, new in pairs:
            self.editor.replace_uses(old, new)
        self.editor.erase({node, *(old for old, _ in pairs)})
        for inner in made:
            self.write(inner, depth + 1)
        for (_, new), before in zip(pairs, wanted, strict=True):
            self.recast.discard(new)
            if dtypes_of(new.meta["val"]) != before:
                self.recast.add(new)


def _kept_whole(args: Any, kwargs: Any, seen: Observation, dtype: torch.dtype) -> Observation:
    """The casts of a composite that is to stay one op."""
    flat = tree_leaves((args, kwargs))
    casts = {i: dtype for i, v in enumerate(flat) if is_float(v) and v.dtype != dtype}
    return Observation(casts, None, seen.dtypes)


def open_composite(
    node: fx.Node, editor: Editor, kind: str, dtype: torch.dtype
) -> tuple[list[fx.Node], Any]:
    """Insert the ops that a composite op is made of before it, as called under autocast.

    Returns:
        The new calls in order, and the node (or nodes) of the result.

    Raises:
        PassError: when it cannot be traced, or writes into an operand inside.
    """
    sources = list(node.all_input_nodes)
    vals = [n.meta["val"] for n in sources]

    def call(*given: Any) -> Any:
        values = dict(zip(sources, given, strict=True))
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        with torch._C.DisableTorchFunction():  # else the tracer sees the composite itself
            return inside(node.target, args, kwargs)

    try:
        with casting(kind, dtype), torch.no_grad():
            traced = make_fx(call, pre_dispatch=True, _allow_non_fake_inputs=True)(*vals).graph
    except Exception as error:
        raise PassError(
            f"the inside of {ops.op_name(node.target)} cannot be traced",
            at=str(site_of(node)),
            why=f"{type(error).__name__}: {error}",
        ) from error
    env: dict[fx.Node, Any] = {}
    made: list[fx.Node] = []
    feed = iter(sources)
    for inner in traced.nodes:
        if inner.op == "placeholder":
            env[inner] = next(feed)
        elif inner.op == "output":
            return made, fx.node.map_arg(inner.args[0], env.__getitem__)
        elif inner.op != "call_function":
            raise PassError(
                f"the inside of {ops.op_name(node.target)} holds a {inner.op}",
                at=str(site_of(node)),
            )
        else:
            args, kwargs = fx.node.map_arg((inner.args, inner.kwargs), env.__getitem__)
            target = _out_of_place(inner.target) if ops.is_mutating(inner) else inner.target
            with casting(kind, dtype):
                env[inner] = editor.call(target, *args, before=node, like=node, **kwargs)
            made.append(env[inner])
            if target is not inner.target:  # what was written in place is the new value from here
                env[inner.args[0]] = env[inner]
    raise PassError(f"{ops.op_name(node.target)} has no result", at=str(site_of(node)))


def _out_of_place(target: Any) -> Any:
    """The pure form of an in-place op: `masked_fill_` -> `masked_fill`."""
    name = target._schema.name.rpartition("::")[2]
    return getattr(getattr(aten, name.removesuffix("_")), target._overloadname)


def _like(value: Any) -> Any:
    """What of an argument decides on casts: a tensor's dtype and device, a literal's own value."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.device.type
    if value is None or isinstance(value, (torch.dtype, bool, str)):
        return value
    return type(value).__name__
