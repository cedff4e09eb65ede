"""The values of a graph: what owns memory, what may be computed again, what autograd saves.

A value is a node that owns the memory of its result: views of it, and the items of a tuple, belong
to it. Rematerialization and the memory planner speak of values by the names of their nodes.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from operator import getitem
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from graphopt.graph import ops
from graphopt.graph.body import CONSTANTS, Body
from graphopt.graph.edit import fake_value
from graphopt.graph.facts import concrete, tensors_of
from graphopt.graph.recipes import again
from graphopt.kernels._overwrite import operands_of
from graphopt.remat import is_marker

aten = torch.ops.aten

_OURS = ("aten", "prims", "graphopt", "torchvision")
"""Namespaces whose ops say by schema and tags what they write and draw."""

_WRITES_STATISTICS: dict[Any, tuple[int, int]] = {
    aten.batch_norm.default: (3, 5),
    aten.native_batch_norm.default: (3, 5),
    aten.cudnn_batch_norm.default: (3, 5),
    aten.instance_norm.default: (3, 5),
}
"""Ops that write running statistics though their schema says nothing: the positions of the
statistics and of the flag under which they are written."""

_CHOOSES = (
    "topk", "sort", "argsort", "argmax", "argmin", "kthvalue", "mode", "median", "nanmedian",
    "max", "min", "searchsorted", "bucketize",
)  # fmt: skip
"""Ops whose integer results depend on how floats compare."""


# --------------------------------------------------------------------------------------- values


@dataclasses.dataclass(frozen=True)
class Values:
    """The values of a graph and the nodes that share their memory.

    Attributes:
        graph: the graph.
        parts: for each node the node at which its memory was made: itself, the source of the views
            between, or the item of a tuple that it is or views.
        left: parts whose memory is visible outside after the call.
    """

    graph: fx.Graph
    parts: dict[fx.Node, fx.Node]
    left: frozenset[fx.Node]

    @staticmethod
    def of(graph: fx.Graph) -> Values:
        """Read them off a graph."""
        parts: dict[fx.Node, fx.Node] = {}
        left: set[fx.Node] = set()
        for node in graph.nodes:
            if node.op == "output":
                left.update(parts[n] for n in node.all_input_nodes)
            parts[node] = _part(node, parts)
        return Values(graph, parts, frozenset(left))

    def __iter__(self) -> Iterator[fx.Node]:
        """The values, in the order of the graph."""
        for node in self.graph.nodes:
            if node.op == "output" or is_marker(node) or ops.is_symbolic(node):
                continue
            if self.parts[node] is node and value_of(node) is node:
                yield node

    def parts_of(self, value: fx.Node) -> list[fx.Node]:
        """The nodes at which a value's memory is made: itself, or the items of its tuple."""
        if not isinstance(value.meta.get("val"), tuple):
            return [value]
        return items_of(value)


def items_of(value: fx.Node) -> list[fx.Node]:
    """The nodes that take an item out of what an op returns."""
    return [u for u in value.users if u.target is getitem]


def _part(node: fx.Node, parts: dict[fx.Node, fx.Node]) -> fx.Node:
    if node.op != "call_function" or not node.all_input_nodes:
        return node
    source = node.all_input_nodes[0]
    if node.target is getitem:
        # an item of a tuple has its own memory; those of a list may lie in one buffer
        own = not ops.is_view(node) and isinstance(source.meta.get("val"), tuple)
        return node if own else parts[source]
    if not ops.is_view(node) or (ops.may_copy(node) and _copies(node, source)):
        return node
    return parts[source]


def _copies(node: fx.Node, source: fx.Node) -> bool:
    theirs = {t.untyped_storage()._cdata for t in tensors_of(source.meta["val"])}
    ours = [t.untyped_storage()._cdata for t in tensors_of(fake_value(node))]
    return not any(place in theirs for place in ours)


def value_of(part: fx.Node) -> fx.Node:
    """The value that a part belongs to: the op of which it is an item, else itself."""
    source = part.args[0] if part.target is getitem else part
    return source if isinstance(source, fx.Node) else part


def overwriter(part: fx.Node) -> fx.Node | None:
    """The op whose backward may write its gradient over a part, None where there is none.

    It is the op that asks for the part last in backward: the first that reads it in forward, where
    no other reader is a view of it.
    """
    first = min((n for n in part.users if not is_marker(n)), default=None)
    if first is None:
        return None
    places = [i for i in operands_of(first.target) if i < len(first.args)]
    return first if any(first.args[i] is part for i in places) else None


# -------------------------------------------------------------------------------------- reasons


def reasons(body: Body) -> dict[fx.Node, str | None]:
    """For each value of a body None where it may be recomputed, else why not.

    Example:
        >>> from graphopt import optimize
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU(), torch.nn.Linear(4, 4))
        >>> opt = optimize(net, torch.ones(2, 4), fuse=False)
        >>> {n.name: r for n, r in reasons(opt.body).items() if n.op == "call_function"}
        {'linear': None, 'gelu': None, 'linear_1': 'is a result of the graph'}
    """
    values = Values.of(body.graph)
    written = _written(body)
    return {v: _reason(v, values, written) for v in values}


def _written(body: Body) -> set[fx.Node]:
    """Inputs and state that forward writes when it is done."""
    targets = {(m.kind == "input", m.target) for m in body.mutations}
    return {
        n
        for n in body.graph.nodes
        if (n.op == "placeholder" and (True, n.name) in targets)
        or (n.op == "get_attr" and (False, n.target) in targets)
    }


def _reason(value: fx.Node, values: Values, written: set[fx.Node]) -> str | None:
    if value.op == "placeholder":
        return "is an input"
    if value.op == "get_attr":
        constant = str(value.target).startswith(CONSTANTS + ".")
        return "is a constant" if constant else "is state of the module"
    if all(p in values.left for p in values.parts_of(value)):
        return "is a result of the graph"
    for test in _TESTS:
        found = test(value)
        if found is not None:
            return found
    for source in sources_of(value):
        part = values.parts.get(source)
        if part in written:
            return f"reads {part.target if part else source}, which forward writes"
    return None


def sources_of(value: fx.Node) -> list[fx.Node]:
    """The nodes that a value's recipe reads."""
    call = again(value)
    found: list[fx.Node] = []
    fx.node.map_arg((call.args, dict(call.kwargs)), found.append)
    return list(dict.fromkeys(found))


def _random(node: fx.Node) -> str | None:
    return "draws random numbers" if ops.is_random(node) else None


def _unknown(node: fx.Node) -> str | None:
    space = getattr(node.target, "namespace", None)
    if "c10d" in str(space):
        return "communicates with other processes"
    if space not in _OURS:
        return f"{ops.op_name(node.target)} is not known to be pure"
    return None


def _writes(node: fx.Node) -> str | None:
    if ops.is_mutating(node):
        return "writes into an operand"
    places = _WRITES_STATISTICS.get(node.target)
    if places is not None:
        args = ops.arguments(node)
        if args[places[0]] is not None and args[places[1]]:
            return "writes running statistics"
    return None


def _by_data(node: fx.Node) -> str | None:
    tags = getattr(node.target, "tags", ())
    if torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags:
        return "has a shape that depends on data"
    sizes: list[Any] = [s for t in tensors_of(node.meta.get("val")) for s in t.shape]
    unbacked = [s for s in sizes if not isinstance(s, int) and not s.node.has_hint()]
    return "has a shape that depends on data" if unbacked else None


def _undefined(node: fx.Node) -> str | None:
    name = str(node.target)
    return "is memory that nothing has filled" if "empty" in name else None


def _choice(node: fx.Node) -> str | None:
    name = getattr(node.target, "_opname", "")
    floats = [t.is_floating_point() for t in tensors_of(node.meta.get("val"))]
    if name in _CHOOSES and not all(floats):
        return "chooses by comparing floats: a rounding could turn the choice"
    return None


def _no_tensor(node: fx.Node) -> str | None:
    tensors = list(tensors_of(node.meta.get("val")))
    if not tensors or any(t.layout is not torch.strided for t in tensors):
        return "is no plain tensor"
    return None


def _by_gradients(node: fx.Node) -> str | None:
    if ops.op_name(node.target).partition(".")[2].partition(".")[0] in _OTHERWISE_UNRECORDED:
        return "is computed otherwise where no gradients are recorded"
    return None


_OTHERWISE_UNRECORDED = frozenset(
    {
        "max_pool1d",
        "linalg_svdvals",
        "linalg_eigvals",
        "linalg_eigvalsh",
        "linalg_cond",
        "linalg_lstsq",
        "linalg_norm",
        "linalg_matrix_norm",
        "linalg_matrix_rank",
        "nuclear_norm",
    }
)
"""ATen operations that choose a kernel by whether gradients are recorded.

Found by running torch's own samples of all operators with and without: the strides of results
differ, or the last bits.
"""


_TESTS: tuple[Callable[[fx.Node], str | None], ...] = (
    _random,
    _unknown,
    _writes,
    _by_data,
    _by_gradients,
    _undefined,
    _choice,
    _no_tensor,
)
"""Each says why a value may not be computed again, or None."""


# ------------------------------------------------------------------------------- what is saved


def saved_bytes(body: Body) -> dict[str, int]:
    """Bytes that autograd saves of each computed value, by name; inputs and state are there anyway.

    The graph runs once on fake tensors, symbolic sizes at their hints. What an op keeps for
    itself (statistics of a norm) belongs to no value and is not counted.

    Example:
        >>> from graphopt import optimize
        >>> net = torch.nn.Sequential(torch.nn.Tanh(), torch.nn.Sigmoid())
        >>> saved_bytes(optimize(net, torch.ones(2, requires_grad=True)).body)
        {'tanh': 8, 'sigmoid': 8}
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    values = Values.of(body.graph)
    owner: dict[int, str] = {}
    saved: dict[int, int] = {}
    keep: list[Any] = []  # so that no storage's identity is used twice

    def pack(t: torch.Tensor) -> torch.Tensor:
        keep.append(t.detach())  # an op saves its result before the result has an owner
        saved[t.untyped_storage()._cdata] = t.untyped_storage().nbytes()
        return keep[-1]

    env: dict[fx.Node, Any] = {}
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t)
    with contextlib.ExitStack() as inside:
        for kind in ("cpu", "cuda"):
            inside.enter_context(torch.autocast(kind, enabled=False))
        for context in (mode, torch.enable_grad(), hooks):
            inside.enter_context(context)
        for node in body.graph.nodes:
            if node.op == "output":
                break
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
            if node.op == "call_function":
                env[node] = node.target(*args, **kwargs)
            else:
                env[node] = _stand_in(node, body, mode)
            keep.append(env[node])
            if values.parts[node].op != "call_function":
                continue
            for t in tensors_of(env[node]):
                name = value_of(values.parts[node]).name
                owner.setdefault(t.untyped_storage()._cdata, name)
    found: dict[str, int] = {}
    for place, size in saved.items():
        if place in owner:
            found[owner[place]] = found.get(owner[place], 0) + size
    return found


def _stand_in(node: fx.Node, body: Body, mode: FakeTensorMode) -> Any:
    """A fake tensor of plain sizes for an input or state, with its requires_grad."""
    value = body.attribute(str(node.target)) if node.op == "get_attr" else node.meta["val"]
    if not isinstance(value, torch.Tensor):
        return concrete(value) if ops.is_symbolic(node) else value
    shape, strides = map(concrete_all, (value.shape, value.stride()))
    fake = torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device)
    return fake.requires_grad_(value.requires_grad)


def concrete_all(sizes: Iterable[Any]) -> tuple[int, ...]:
    """Plain integers for sizes, symbolic ones at their hints."""
    return tuple(map(concrete, sizes))
