"""The exported program as one flat graph over the source's state, its regions inlined."""

from __future__ import annotations

import dataclasses
import gc
import operator
import os
import re
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import fx, nn

from graphopt.errors import CaptureError
from graphopt.graph.body import CONSTANTS, HELD
from graphopt.graph.edit import REGION

_DROPPED = re.compile(
    r"aten\._assert_tensor_metadata|aten\._assert_scalar|aten\._assert_async"
    r"|aten\.sym_constrain_range|_guards_fn|aten\._functional_assert"
)
_OUR_FRAME = f'File "{os.path.dirname(os.path.abspath(__file__))}'
_NEXT_FRAME = '\n  File "'
_KEPT_META = ("val", "nn_module_stack", "stack_trace", "torch_fn", REGION)


@dataclasses.dataclass(frozen=True)
class Region:
    """What the surrounding regions of a node say.

    Attributes:
        grad: whether autograd records.
        fixed: whether autocast was switched off by the user.
        autocast: dtype of an inner autocast region, None where there is none.
    """

    grad: bool
    fixed: bool = False
    autocast: torch.dtype | None = None


@dataclasses.dataclass
class Flat:
    """A flat graph that may still hold in-place operations.

    Attributes:
        graph: placeholders, `get_attr` nodes, operations; the output holds the user's results.
        constants: lifted constants by name.
        grads: nodes whose value would require grad in eager.
        parameters: state paths that are parameters.
    """

    graph: fx.Graph
    constants: dict[str, torch.Tensor]
    grads: set[fx.Node]
    parameters: set[str]


def normalize(
    program: Any,
    source: nn.Module,
    names: list[str],
    tracked: list[bool],
    grad: bool,
    outside: Mapping[int, torch.Tensor] = MappingProxyType({}),
) -> Flat:
    """Flatten an exported program.

    Args:
        program: the `torch.export.ExportedProgram` of a shadow of `source`.
        source: the module whose state paths the graph shall name.
        names: one name per input leaf.
        tracked: whether each input leaf requires grad.
        grad: whether autograd records at the top level.
        outside: id -> tensor of the user's own, outside the source's modules.

    Returns:
        The flat graph.

    Raises:
        CaptureError: for a higher-order operator that has no place in a flat graph.
    """
    inliner = _Inliner(program, source, grad, outside)
    inliner.state(names, tracked)
    results = inliner.region(program.graph_module, inliner.env, Region(grad))
    inliner.graph.output(tuple(results))
    if grad:
        return Flat(inliner.graph, inliner.constants, inliner.grads, inliner.parameters)
    for node in results:
        if node in inliner.grads and node.op == "call_function":
            raise CaptureError(
                "a result computed under enable_grad while the call runs under no_grad",
                at=_site(node),
                why="one graph runs in one grad mode, so this result would not require grad",
                try_="call the model with gradients enabled; or on_error='fallback'",
            )
    return Flat(inliner.graph, inliner.constants, set(), inliner.parameters)


class _Inliner:
    def __init__(
        self, program: Any, source: nn.Module, grad: bool, outside: Mapping[int, torch.Tensor]
    ) -> None:
        self.program = program
        self.source = source
        self.ambient = grad
        self.graph = fx.Graph()
        self.env: dict[fx.Node, Any] = {}
        self.constants: dict[str, torch.Tensor] = {}
        self.parameters: set[str] = set()
        self.grads: set[fx.Node] = set()
        self.grad_storages: set[int] = set()
        self.detached: dict[fx.Node, fx.Node] = {}
        self.originals = _originals(program.constants, outside)
        self.theirs = {_storage(t) for t in outside.values()}

    # ---- inputs and state

    def state(self, names: list[str], tracked: list[bool]) -> None:
        """Placeholders for the leaves, `get_attr` nodes for parameters, buffers and constants."""
        nodes = [n for n in self.program.graph.nodes if n.op == "placeholder"]
        specs = self.program.graph_signature.input_specs
        inputs = [n for n, s in zip(nodes, specs, strict=True) if s.kind.name == "USER_INPUT"]
        for node, name, rg in zip(inputs, names, tracked, strict=True):
            new = self.graph.create_node("placeholder", name, name=_identifier(name))
            new.target = new.name
            self._bind(node, new, rg)
        paths = {id(t): p for p, t in _named_state(self.source)}
        seen: dict[int, fx.Node] = {}
        for node, spec in zip(nodes, specs, strict=True):
            if spec.kind.name == "USER_INPUT":
                continue
            if spec.kind.name not in ("PARAMETER", "BUFFER", "CONSTANT_TENSOR"):
                held = self.program.constants.get(spec.target)
                what = f"{type(held).__module__}.{type(held).__qualname__}"
                raise CaptureError(
                    f"forward uses an object of class {what.removeprefix('torch._C.')}",
                    why="its state would not live in the graph, which takes tensors only",
                    try_="draw from torch's default generator, or on_error='fallback'"
                    if "Generator" in what
                    else "on_error='fallback'",
                )
            tensor = self._tensor(spec)
            if id(tensor) in seen:
                self.env[node] = seen[id(tensor)]
                continue
            target = paths.get(id(tensor)) or self._constant(spec.target, tensor)
            new = self.graph.create_node("get_attr", target, name=_identifier(target))
            if isinstance(tensor, nn.Parameter):
                self.parameters.add(target)
            seen[id(tensor)] = new
            self._bind(node, new, tensor.requires_grad)

    def _bind(self, node: fx.Node, new: fx.Node, requires_grad: bool) -> None:
        new.meta = _kept(node)
        self.env[node] = new
        if requires_grad:
            self.grads.add(new)

    def _tensor(self, spec: Any) -> torch.Tensor:
        if spec.kind.name == "CONSTANT_TENSOR":
            found = _resolve(self.source, spec.target)
            return found if found is not None else self.originals[spec.target]
        tensor = _resolve(self.source, spec.target)
        if tensor is None:
            raise CaptureError(f"state {spec.target!r} is not on the source module")
        return tensor

    def _constant(self, target: str, tensor: torch.Tensor) -> str:
        if _resolve(self.source, target) is tensor:
            return target  # a plain tensor attribute: read live, by its path
        own = isinstance(tensor, nn.Parameter) or _storage(tensor) in self.theirs
        name = HELD * own + _identifier(target)
        while name in self.constants:
            name += "_"
        self.constants[name] = tensor
        return f"{CONSTANTS}.{name}"

    # ---- operations

    def region(self, module: fx.GraphModule, env: dict[fx.Node, Any], at: Region) -> list[Any]:
        """Copy one region's operations; returns its results as new nodes (or constants)."""
        for node in module.graph.nodes:
            if node.op == "call_function":
                self._call(module, node, env, at)
            elif node.op == "output":
                results = fx.map_arg(node.args[0], env.__getitem__)
                return list(results) if isinstance(results, (list, tuple)) else [results]
            elif node.op == "get_attr":
                env[node] = operator.attrgetter(str(node.target))(module)
            elif node.op == "call_module" and not _DROPPED.search(str(node.target)):
                raise CaptureError(f"a nested module call {node.target!r} in the exported program")
        return []

    def _call(
        self, module: fx.GraphModule, node: fx.Node, env: dict[fx.Node, Any], at: Region
    ) -> None:
        target = node.target
        if isinstance(target, torch._ops.HigherOrderOperator):
            env[node] = self._higher_order(node, env, at)
            return
        if _DROPPED.search(str(target)):
            return
        if "functorch" in str(getattr(target, "__module__", "")):
            raise CaptureError(
                "a transform of torch.func inside forward (vmap, grad, jvp)",
                at=_site(node),
                why="a captured graph is flat: it holds no levels of transforms",
                try_="write it with batched operations; or on_error='fallback'",
            )
        given: tuple[Any, ...] = node.args
        if target is operator.getitem and not isinstance(env[given[0]], fx.Node):
            env[node] = env[given[0]][given[1]]  # result of an inlined region
            return
        lookup: Callable[[fx.Node], Any] = env.__getitem__
        if self.ambient and not at.grad:
            lookup = lambda n: self._without_grad(env[n])  # noqa: E731
        args, kwargs = fx.map_arg((node.args, node.kwargs), lookup)
        new = self.graph.create_node("call_function", target, args, kwargs, name=node.name)
        new.meta = _kept(node)
        if at.fixed:
            new.meta["graphopt_precision_fixed"] = True
        if at.autocast is not None:
            new.meta["graphopt_autocast"] = at.autocast
        if not at.grad:
            new.meta["graphopt_no_grad"] = True
        env[node] = new
        if at.grad:
            self._track(new)

    def _higher_order(self, node: fx.Node, env: dict[fx.Node, Any], at: Region) -> list[Any]:
        name = str(getattr(node.target, "__name__", node.target))
        given: tuple[Any, ...] = node.args
        args: list[Any] = [env[a] if isinstance(a, fx.Node) else a for a in given]
        if name == "wrap_with_set_grad_enabled":
            enabled, inner, *rest = args
            at = dataclasses.replace(at, grad=bool(enabled))
        elif name == "wrap_with_autocast":
            device_type, dtype, enabled, _cache, inner, *rest = args
            if not enabled:
                at = dataclasses.replace(at, fixed=True, autocast=None)
            else:
                dtype = dtype or torch.get_autocast_dtype(device_type)
                at = dataclasses.replace(at, fixed=False, autocast=dtype)
        else:
            raise CaptureError(
                f"the higher-order operator {name}",
                at=_site(node),
                why="a captured graph is flat: it holds no branches, loops or regions",
                try_="write it with plain operations; or on_error='fallback'",
            )
        inputs = [n for n in inner.graph.nodes if n.op == "placeholder"]
        return self.region(inner, dict(zip(inputs, rest, strict=True)), at)

    # ---- autograd under no_grad

    def _without_grad(self, value: Any) -> Any:
        """What an operation under no_grad reads: the value cut off from autograd."""
        if not isinstance(value, fx.Node) or not self._requires_grad(value):
            return value
        if value not in self.detached:
            new = self.graph.call_function(torch.ops.aten.detach.default, (value,))
            new.meta = {**value.meta, "graphopt_no_grad": True}
            self.detached[value] = new
        return self.detached[value]

    def _requires_grad(self, node: fx.Node) -> bool:
        return node in self.grads or storage_of(node) in self.grad_storages

    def _track(self, new: fx.Node) -> None:
        """Note whether a value would require grad in eager."""
        schema = getattr(new.target, "_schema", None)
        if not any(self._requires_grad(n) for n in new.all_input_nodes):
            return
        if schema is not None and schema.name in ("aten::detach", "aten::detach_"):
            return
        if not _differentiable(new.meta.get("val")):
            return
        self.grads.add(new)
        if schema is not None and schema.is_mutable:
            storage = storage_of(new)
            if storage is not None:
                self.grad_storages.add(storage)


def _originals(constants: dict[str, Any], outside: Collection[int]) -> dict[str, Any]:
    """Lifted constants, where torch.export detached a parameter the parameter itself.

    Parameters that no module of the tree registers (of a module in a plain list, a global) are
    lifted as detached aliases, whose gradients would be lost. An alias that is the user's own
    (`kept = layer.weight.detach()`) is meant to have none.
    """
    found = dict(constants)
    aliases = {
        _memory(t): name
        for name, t in constants.items()
        if isinstance(t, torch.Tensor) and not t.requires_grad and _differentiable(t)
        if id(t) not in outside
    }
    if aliases:
        for parameter in [p for p in gc.get_objects() if type(p) is nn.Parameter]:
            name = aliases.get(_memory(parameter))
            if name is not None:
                found[name] = parameter
    return found


def _memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    storage = _storage(tensor)
    if storage == id(tensor):
        return (storage,)
    return (storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def _storage(tensor: torch.Tensor) -> int:
    """What tells the storage of a tensor from others."""
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # sparse tensors and the like have none
        return id(tensor)


def _kept(node: fx.Node) -> dict[str, Any]:
    """The metadata that goes on, with the stack trace without capture's own frame."""
    meta = {k: node.meta[k] for k in _KEPT_META if k in node.meta}
    trace = meta.get("stack_trace")
    if trace and trace.startswith(_OUR_FRAME):
        _, _, rest = trace.partition(_NEXT_FRAME)
        meta["stack_trace"] = f'File "{rest}' if rest else None
    return meta


def _differentiable(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.is_floating_point() or value.is_complex()
    if isinstance(value, (list, tuple)):
        return any(_differentiable(v) for v in value)
    return False


def storage_of(node: fx.Node) -> int | None:
    """Which storage a node's fake value lies in; aliases of one tensor share it."""
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


def _named_state(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Every parameter and buffer with the first path that reaches it."""
    return [*module.named_parameters(), *module.named_buffers()]


def _resolve(module: nn.Module, path: str) -> torch.Tensor | None:
    value: Any = module
    for part in path.split("."):
        value = getattr(value, part, None)
    return value if isinstance(value, torch.Tensor) else None


def _identifier(name: str) -> str:
    text = re.sub(r"\W+", "_", name).strip("_") or "value"
    return f"_{text}" if text[0].isdigit() else text


def _site(node: fx.Node) -> str | None:
    from graphopt.graph.record import site_of

    site = site_of(node)
    return f"{site.file}:{site.line}    {site.code}" if site.file else None
