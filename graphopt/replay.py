"""Run a captured graph by itself, node by node, on given values.

Nothing here touches the model: parameters and buffers are read through detached leaves, generators
are forked. `graphopt.step` adds the backward pass.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map

from graphopt.graph.body import Body, copy_graph, is_fixed
from graphopt.graph.float64 import DOUBLE
from graphopt.graph.ops import is_view
from graphopt.graph.recipes import recipes
from graphopt.passes.base import LOW
from graphopt.passes.overrides import MARK, widens
from graphopt.remat import scope

SEED = 20_011
"""Value of every `draw_seed` and of the forked generators, unless told otherwise."""


def is_draw_seed(node: fx.Node) -> bool:
    """Whether a node draws graphopt's seed of the forward."""
    return str(node.target) == "graphopt.draw_seed.default"


def dropout_arguments(node: fx.Node) -> list[tuple[str, int, float]]:
    """The dropout probabilities that an op takes, as (argument name, position, value).

    Only those in effect: an op with `train=False` drops nothing. Covers `aten.*dropout*`,
    attention and recurrent layers with dropout, and graphopt's fused ops.

    Example:
        >>> g = fx.Graph(); x = g.placeholder("x")
        >>> dropout_arguments(g.call_function(torch.ops.aten.dropout.default, (x, 0.1, True)))
        [('p', 1, 0.1)]
    """
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None:
        return []
    own = "dropout" in schema.name.rpartition("::")[2]
    values = _values(node)
    if values.get("train") is False or values.get("training") is False or not _draws(node):
        return []
    found = []
    for i, argument in enumerate(schema.arguments):
        if argument.name in ("dropout_p", "dropout") or (own and argument.name == "p"):
            p = values[argument.name]
            if isinstance(p, (int, float)) and p > 0:
                found.append((argument.name, i, float(p)))
    return found


def _values(node: fx.Node) -> dict[str, Any]:
    """A call's value for each argument of its schema."""
    schema: Any = node.target._schema  # type: ignore[union-attr]
    return {a.name: _argument(node, i, a) for i, a in enumerate(schema.arguments)}


def _draws(node: fx.Node) -> int:
    """How many dropouts one call makes: a stack of recurrent layers has one between any two."""
    layers = _values(node).get("num_layers")
    return layers - 1 if isinstance(layers, int) else 1


def _argument(node: fx.Node, position: int, argument: Any) -> Any:
    """A node's value for a schema argument, its default when not given."""
    if argument.name in node.kwargs:
        return node.kwargs[argument.name]
    if position < len(node.args) and not argument.kwarg_only:
        return node.args[position]
    return argument.default_value


def without_dropout(graph: fx.Graph) -> fx.Graph:
    """A copy of a graph in which every dropout probability is zero.

    Eager's dropout stream cannot be repeated by a fused kernel, so whole graphs are compared at
    p = 0 (and their probabilities as literals).
    """
    copy = copy_graph(graph)
    for node in copy.nodes:
        for name, position, _ in dropout_arguments(node):
            if name in node.kwargs:
                node.kwargs = {**node.kwargs, name: 0.0}
            else:
                node.update_arg(position, 0.0)
    return copy


def is_random(node: fx.Node) -> bool:
    """Whether a node draws from torch's generator (a dropout of p = 0 does not)."""
    tags = getattr(node.target, "tags", ())
    if node.op != "call_function" or torch.Tag.nondeterministic_seeded not in tags:
        return False
    schema = node.target._schema  # type: ignore[union-attr]
    only_dropout = "dropout" in schema.name or any("dropout" in a.name for a in schema.arguments)
    return bool(dropout_arguments(node)) if only_dropout else True


@contextlib.contextmanager
def forked_rng(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the generators of the CPU and of a device, and put their states back afterwards."""
    devices = [device] if device.type not in ("cpu", "meta") else []
    kind = device.type if devices else "cuda"
    with torch.random.fork_rng(devices=devices, device_type=kind):
        torch.manual_seed(seed)
        yield


@contextlib.contextmanager
def without_autocast() -> Iterator[None]:
    """Switch off the autocast that a caller of `verify` may stand in."""
    active = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    for kind in active:
        torch.set_autocast_enabled(kind, False)
    try:
        yield
    finally:
        for kind in active:
            torch.set_autocast_enabled(kind, True)


@contextlib.contextmanager
def without_cudnn_attention() -> Iterator[None]:
    """Leave cuDNN's attention out, which remembers how a gradient lay in memory.

    Torch keeps one compiled cuDNN backward for each layout of q, k and v, built for the first
    gradient that it met; a later gradient in another layout is read as if it lay like that one
    (torch 2.11, cuDNN 9). A graph that is run to be checked gets its gradients in layouts that the
    model never has, so it would spoil not only its own check but the user's training afterwards.
    """
    others = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(others):
        yield


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Integer division and the like give torch's default dtype: float64 in a float64 run."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class State:
    """The parameters, buffers and constants of a body as detached leaves.

    Tied weights stay one leaf. Leaves share storage with the model (its values are read, never
    written) unless they are cast.

    Args:
        attribute: gives the tensor of a `get_attr` target, as `Body.attribute`.
        double: cast floating values to float64.
    """

    def __init__(self, attribute: Callable[[str], Any], *, double: bool = False) -> None:
        self._attribute = attribute
        self._double = double
        self._leaves: dict[int, torch.Tensor] = {}
        self.parameters: dict[str, torch.Tensor] = {}

    def __call__(self, target: str) -> Any:
        """The leaf for a `get_attr` target; what is not a tensor is handed on."""
        value = self._attribute(target)
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in self._leaves:
            leaf = as_leaf(value, double=self._double, needs_grad=value.requires_grad)
            self._leaves[id(value)] = leaf
            if leaf.requires_grad:
                self.parameters[target] = leaf
        return self._leaves[id(value)]


def as_leaf(value: Any, *, double: bool = False, needs_grad: bool = True) -> Any:
    """A detached copy of a tensor's identity that can collect a gradient; other values unchanged.

    Args:
        value: anything; only tensors are touched, and only floating ones cast or given gradients.
        double: cast to float64.
        needs_grad: whether the leaf requires a gradient (floating tensors only).
    """
    if not isinstance(value, torch.Tensor):
        return value
    leaf = value.detach()
    if double:
        leaf = leaf.to(DOUBLE.get(leaf.dtype, leaf.dtype))
    differentiable = leaf.is_floating_point() or leaf.is_complex()
    return leaf.requires_grad_(True) if needs_grad and differentiable else leaf


@dataclasses.dataclass(frozen=True)
class Watch:
    """What a run is asked to hold on to, and what to call when it does.

    Attributes:
        names: nodes whose values are handed to `met`.
        met: called with (name, value) as soon as the value exists.
    """

    names: Collection[str]
    met: Callable[[str, Any], None]


def run(
    graph: fx.Graph,
    state: Callable[[str], Any],
    inputs: Sequence[Any],
    *,
    given: Mapping[str, Any] | None = None,
    drawn: dict[str, Any] | None = None,
    seed: int = SEED,
    watch: Watch | None = None,
    autocast: Mapping[str, torch.dtype] | None = None,
) -> tuple[Any, ...]:
    """Run a graph node by node, dropping each value after its last use.

    Args:
        graph: placeholders, `get_attr`, `call_function`, and an output that is one flat tuple.
        state: the value of a `get_attr` target.
        inputs: one value per placeholder.
        given: values to take, by node name, in place of running a node (random draws).
        drawn: filled with the values of the nodes that draw from torch's generator.
        seed: value of `graphopt.draw_seed`.
        watch: values to hand out on the way.
        autocast: ambient dtype by device type, for a graph in which it is not yet written out.
            Nodes marked as standing in an inner autocast region run as that region says.

    Returns:
        The flat outputs.

    Raises:
        ValueError: when the number of inputs is not the number of placeholders.
    """
    with without_autocast(), without_cudnn_attention(), contextlib.ExitStack() as ambient:
        for kind, dtype in (autocast or {}).items():
            ambient.enter_context(torch.autocast(kind, dtype))
        ambient.enter_context(scope(recipes(graph, given)))
        return _run(graph, state, inputs, given, drawn, seed, watch, dict(autocast or {}))


def _run(
    graph: fx.Graph,
    state: Callable[[str], Any],
    inputs: Sequence[Any],
    given: Mapping[str, Any] | None,
    drawn: dict[str, Any] | None,
    seed: int,
    watch: Watch | None,
    autocast: Mapping[str, torch.dtype],
) -> tuple[Any, ...]:
    last = last_uses(graph)
    env: dict[fx.Node, Any] = {}
    feed = iter(inputs)
    for node in graph.nodes:
        if node.op == "output":
            return _flat(map_aggregate(node.args[0], lambda a: _load(env, a)))
        if node.op == "placeholder":
            try:
                env[node] = next(feed)
            except StopIteration:
                raise ValueError(f"no value for the input {node.name}") from None
        elif given is not None and node.name in given:
            env[node] = given[node.name]
        elif node.op == "get_attr":
            env[node] = state(str(node.target))
        elif is_draw_seed(node):
            env[node] = torch.tensor(seed, dtype=torch.int64, device=node.args[0])
        else:
            env[node] = compute(node, env, autocast)
            if drawn is not None and is_random(node):
                drawn[node.name] = tree_map(_detached, env[node])
        if watch is not None and node.name in watch.names:
            watch.met(node.name, env[node])
        for dead in last.get(node, ()):
            env.pop(dead, None)
    raise ValueError("the graph has no output node")


def compute(node: fx.Node, env: Mapping[fx.Node, Any], autocast: Mapping[str, torch.dtype]) -> Any:
    """The value of a call whose operands are known.

    Args:
        node: a `call_function`.
        env: the values of its operands.
        autocast: the ambient autocast in which the call stands, which its marks may change.
    """
    args = map_aggregate(node.args, lambda a: _load(env, a))
    kwargs = map_aggregate(node.kwargs, lambda a: _load(env, a))
    if autocast and widens(node):
        args, kwargs = tree_map(_widened, (args, kwargs))
    with _inner_autocast(node, autocast):
        return node.target(*args, **kwargs)  # type: ignore[operator]


def _inner_autocast(
    node: fx.Node, ambient: Mapping[str, torch.dtype]
) -> contextlib.AbstractContextManager[Any]:
    """The autocast region that a node's marks put it in, where that is not the ambient one."""
    if not ambient:
        return contextlib.nullcontext()
    kind = next(iter(ambient))
    inner = node.meta.get(MARK)
    if inner is None:
        fixed = node.meta.get("graphopt_precision_fixed")
        inner = torch.float32 if fixed else node.meta.get("graphopt_autocast")
    if inner == torch.float32:
        return torch.autocast(kind, enabled=False)
    return contextlib.nullcontext() if inner is None else torch.autocast(kind, inner)


def _widened(value: Any) -> Any:
    low = isinstance(value, torch.Tensor) and value.dtype in LOW
    return value.float() if low else value


def _load(env: Mapping[fx.Node, Any], a: Any) -> Any:
    return env[a] if isinstance(a, fx.Node) else a


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _flat(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def constant_values(graph: fx.Graph, attribute: Callable[[str], Any]) -> dict[str, torch.Tensor]:
    """Floating values that depend on no input and no state, each computed in its own dtype.

    A rotary table that a pass folds into a constant carries float32's rounding. Where two graphs
    are to agree in float64 both must carry it: hand these to `step` as `given`.

    Args:
        graph: the graph.
        attribute: gives the tensor of a `get_attr` target; only constants that are fixed are read.
    """
    env: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        if is_fixed(node):
            env[node] = attribute(str(node.target)).detach()
        elif node.op != "call_function" or is_draw_seed(node) or is_random(node):
            continue
        elif all(source in env for source in node.all_input_nodes):
            args = map_aggregate(node.args, lambda a: _load(env, a))
            kwargs = map_aggregate(node.kwargs, lambda a: _load(env, a))
            with torch.no_grad():
                env[node] = node.target(*args, **kwargs)
    return {
        node.name: value
        for node, value in env.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    }


def last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """For each node, the values that nothing needs after it."""
    seen: set[fx.Node] = set()
    last: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed(graph.nodes):
        for used in (*node.all_input_nodes, node):
            if used not in seen:
                seen.add(used)
                last.setdefault(node, []).append(used)
    return last


def requiring_grad(graph: fx.Graph, body: Body) -> set[str]:
    """Names of the values that a gradient flows into, by the graph alone.

    Every floating input counts, so that the gradients that a caller may ask for are checked too.
    """
    found: set[str] = set()
    for node in graph.nodes:
        val = node.meta.get("val")
        if isinstance(val, torch.Tensor) and not (val.is_floating_point() or val.is_complex()):
            continue
        if node.op == "placeholder":
            found.add(node.name)
        elif node.op == "get_attr":
            value = body.attribute(str(node.target))
            if isinstance(value, torch.Tensor) and value.requires_grad:
                found.add(node.name)
        elif "detach" not in str(node.target) and any(
            a.name in found for a in node.all_input_nodes
        ):
            found.add(node.name)
    return found


def probabilities(graph: fx.Graph | None) -> collections.Counter[float]:
    """The dropout probabilities in effect in a graph, dead nodes left out."""
    found: collections.Counter[float] = collections.Counter()
    live: set[fx.Node] = set()
    for node in reversed(graph.nodes) if graph is not None else ():
        if node.op == "output" or node in live:
            live.update(node.all_input_nodes)
            for _, _, p in dropout_arguments(node):
                found[p] += _draws(node)
    return found


def drops_unseeded(graph: fx.Graph) -> bool:
    """Whether a graph drops by torch's generator rather than by a seed value."""
    return any(
        dropout_arguments(n) and not str(n.target).startswith("graphopt.") for n in graph.nodes
    )


def moved_rounding(graph: fx.Graph, values: Sequence[Any]) -> torch.dtype | None:
    """The coarsest dtype of a rewrite of casts and views alone, None for any other.

    Such a rewrite moves a rounding step on purpose (a cast to bfloat16 goes above an expand, whose
    gradient is then summed in bfloat16); no error below that dtype's ulp is a fault of it.
    """
    calls = [n for n in graph.nodes if n.op == "call_function"]
    if not all(is_view(n) or n.target is torch.ops.aten.to.dtype for n in calls):
        return None
    dtypes = {v.dtype for v in values if isinstance(v, torch.Tensor)}
    dtypes.update(
        a for n in calls for a in (*n.args, *n.kwargs.values()) if isinstance(a, torch.dtype)
    )
    floats = [d for d in dtypes if d.is_floating_point]
    return max(floats, key=lambda d: torch.finfo(d).eps, default=None)
