"""Graphs as text: a stable listing for tests and diffs, and Python code a person can read."""

from __future__ import annotations

import builtins
import inspect
import keyword
import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn

from graphopt import remat
from graphopt.graph import ops
from graphopt.graph.body import CONSTANTS, Body
from graphopt.graph.recipes import marked
from graphopt.graph.record import site_of
from graphopt.remat import is_marker, is_release, is_spend

DTYPES = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
}

# Literals that differ from machine to machine and mean nothing to a reader.
_ENVIRONMENT = {"cudnn_enable", "cudnn_enabled", "pin_memory"}


def type_text(value: Any) -> str:
    """Dtype and shape of a node's `val`: "f32[2, 16]", a tuple of these, or the number's type.

    Example:
        >>> type_text(torch.zeros(2, 3))
        'f32[2, 3]'
    """
    if isinstance(value, torch.Tensor):
        sizes = ", ".join(str(s) for s in value.shape)
        return f"{DTYPES.get(value.dtype, str(value.dtype))}[{sizes}]"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(type_text(v) for v in value)})"
    return type(value).__name__


def ir_text(body: Body) -> str:
    """A listing with one op a line, renumbered so that equal graphs give equal text.

    Machine-dependent literals are left out, so that a golden listing holds on other machines.
    """
    names: dict[fx.Node, str] = {}
    lines = []
    for node in body.graph.nodes:
        if node.op == "get_attr":
            names[node] = str(node.target)
            continue
        if node.op == "output":
            outs = ", ".join(_value(a, names) for a in node.args[0])
            lines.append(f"return ({outs})")
            continue
        if is_marker(node):
            kind = getattr(node.target, "__name__", "drop")
            lines.append(f"{kind}({', '.join(_arguments(node, names))})")
            continue
        names[node] = f"%{len(lines)}"
        if node.op == "placeholder":
            lines.append(f"{names[node]} = input {node.target} : {type_text(node.meta.get('val'))}")
            continue
        rule = node.meta.get("graphopt_rule")
        place = site_of(node)
        notes = [n for n in (place.module, f"rule {rule}" if rule else "") if n]
        call = f"{ops.op_name(node.target)}({', '.join(_arguments(node, names))})"
        comment = f"  # {', '.join(notes)}" if notes else ""
        lines.append(f"{names[node]} = {call} : {type_text(node.meta.get('val'))}{comment}")
    lines += [f"{m.kind} {m.target} <- output {m.output}" for m in body.mutations]
    return "\n".join(lines)


def _arguments(
    node: fx.Node, names: dict[fx.Node, str], hidden: frozenset[str] = frozenset()
) -> list[str]:
    """The arguments as text; those equal to the schema's default are left out."""
    known = ops.parameters(node.target)
    if known is None:
        given = [_value(a, names) for a in node.args]
        return given + [f"{k}={_value(v, names)}" for k, v in node.kwargs.items()]
    schema = node.target._schema  # type: ignore[union-attr]
    parts, positional = [], True
    for (name, default), value, info in zip(
        known, ops.arguments(node), schema.arguments, strict=True
    ):
        if name in _ENVIRONMENT or (not isinstance(value, fx.Node) and _is_default(value, default)):
            positional = False
            continue
        positional = positional and not info.kwarg_only
        text = "*" if name in hidden else _value(value, names)
        parts.append(text if positional else f"{name}={text}")
    return parts


def _is_default(value: Any, default: Any) -> bool:
    return type(value) is type(default) and repr(value) == repr(default)


def _value(value: Any, names: dict[fx.Node, str]) -> str:
    """A literal or a node as Python source."""
    if isinstance(value, fx.Node):
        return names[value]
    if isinstance(value, (list, tuple)):
        inner = ", ".join(_value(v, names) for v in value)
        if isinstance(value, list):
            return f"[{inner}]"
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if isinstance(value, slice):
        return (
            f"slice({', '.join(_value(v, names) for v in (value.start, value.stop, value.step))})"
        )
    if isinstance(value, torch.device):
        return f"torch.device({str(value)!r})"
    if isinstance(value, float) and not math.isfinite(value):
        return f"float({str(value)!r})"
    return repr(value)


# ------------------------------------------------------------------------------- Python code


def python_code(body: Body, signature: inspect.Signature | None = None) -> str:
    """The body as a Python function over the optimized module: `forward(self, *inputs)`.

    It runs as it stands (`self` is the module that holds the state) and `parse` turns it back
    into the same graph. Values are named after the modules that made them.

    Args:
        body: the body to print.
        signature: how the module is called, for a comment; the function takes the leaves.

    Example:
        >>> print(opt.code)  # doctest: +SKIP
        def forward(self, input_ids):
            # transformer.wte
            wte = aten.embedding(self.transformer.wte.weight, input_ids)  # f32[2, 16, 64]
    """
    lines = function_code(body).splitlines()
    if signature is not None:
        called = str(signature).partition(" -> ")[0]
        lines.insert(0, f"# called as forward{called}; here the tensors alone")
    # Sizes are computed with Python's operators, where any are.
    used = any(" = operator." in line for line in lines)
    head = ["import operator", ""] if used else []
    ours = ["from graphopt import remat", ""] if any(map(is_marker, body.graph.nodes)) else []
    head += [
        "import torch",
        "",
        *ours,
        "aten = torch.ops.aten",
        "graphopt = torch.ops.graphopt",
        "",
        "",
    ]
    return "\n".join([*head, *lines]) + "\n"


def function_code(body: Body, name: str = "forward", owner: tuple[str, ...] = ("self",)) -> str:
    """The function that `python_code` prints, without the imports above it.

    Args:
        body: the body to print.
        name: the function's name.
        owner: its first parameter; empty for a graph that reads no state.
    """
    names = _Names(body)
    inputs = [names.of(n) for n in body.placeholders]
    lines = [f"def {name}({', '.join([*owner, *inputs])}):"]
    shapes = [
        f"{i}: {type_text(n.meta.get('val'))}"
        for i, n in zip(inputs, body.placeholders, strict=True)
    ]
    if shapes:
        lines.append(f"    # {', '.join(shapes)}")
    where: str | None = None
    for node in body.graph.nodes:
        if node.op == "call_function" and node not in names.unpacked:
            module = site_of(node).module
            if module != where:
                lines.append(f"    # {module or 'the root module'}")
                where = module
            lines.append(f"    {statement(node, names.all, names.items.get(node))}")
        elif node.op == "output":
            lines.append(f"    return {_value(tuple(node.args[0]), names.all)}")
    return "\n".join(lines) + "\n"


def statement(
    node: fx.Node,
    names: dict[fx.Node, str],
    items: Sequence[fx.Node] | None = None,
    hidden: frozenset[str] = frozenset(),
) -> str:
    """One line of Python for one op, with its result's type and its rule as a comment.

    Args:
        node: the op.
        names: what its operands and its result are called.
        items: the items of its tuple result, where they are unpacked on the same line.
        hidden: names of arguments whose values are shown as "*".
    """
    if is_release(node):
        name = "*" if hidden else repr(node.args[0])
        return f"remat.release({name})  # in host memory by now"
    if is_spend(node):
        (name,) = _arguments(node, names)
        return f"remat.spend({name})  # its gradient is written over it"
    if is_marker(node):
        parts, op = _arguments(node, names), ops.op_name(marked(node).op.target)
        parts[1] = "*" if hidden else parts[1]  # numbers the values of the whole graph
        note = "kept in host memory" if node.kwargs.get("host") else f"computed again by {op}"
        note += ", its gradient written over it" if node.kwargs.get("overwrite") else ""
        return f"remat.drop({', '.join(parts)})  # {note}"
    rule = node.meta.get("graphopt_rule")
    note = type_text(node.meta.get("val")) + (f", {rule}" if rule else "")
    left = ", ".join(names[i] for i in items) if items else names[node]
    if node.target is operator.getitem:
        source, index = node.args
        right = f"{_value(source, names)}[{_value(index, names)}]"
    else:
        right = f"{_callable(node)}({', '.join(_arguments(node, names, hidden))})"
    return f"{left} = {right}  # {note}"


def _callable(node: fx.Node) -> str:
    if ops.parameters(node.target) is not None:
        text = ops.op_name(node.target)
        known = ("aten.", "graphopt.")
        return text if text.startswith(known) else f"torch.ops.{text}"
    module = getattr(node.target, "__module__", "")
    name = getattr(node.target, "__name__", str(node.target))
    return f"operator.{name}" if module == "_operator" else f"torch.{name}"


class _Names:
    """Readable, unique names: a module's result is called as the module, the rest as their op."""

    def __init__(self, body: Body) -> None:
        self.all: dict[fx.Node, str] = {}
        self.taken: dict[str, int] = dict.fromkeys([*_RESERVED, *dir(builtins)], 1)
        self.items = {n: found for n in body.graph.nodes if (found := unpacked(n))}
        self.unpacked = {item for found in self.items.values() for item in found}
        results = results_of(body.graph)
        for node in body.graph.nodes:
            if node.op == "placeholder":
                self.all[node] = self._unique(str(node.target))
            elif node.op == "get_attr":
                self.all[node] = state_text(body, str(node.target))
            elif node.op == "call_function" and not is_marker(node):
                self.all[node] = self._unique(base_name(node, results))

    def of(self, node: fx.Node) -> str:
        """The name of one node."""
        return self.all[node]

    def _unique(self, wanted: str) -> str:
        base = identifier(wanted)
        count = self.taken.get(base, 0)
        name = base if count == 0 else f"{base}_{count}"
        while name != base and name in self.taken:
            count += 1
            name = f"{base}_{count}"
        self.taken[base] = count + 1
        self.taken.setdefault(name, 1)
        return name


_RESERVED = ("self", "torch", "aten", "graphopt", "operator", "remat")


def identifier(text: str) -> str:
    """A text as a Python identifier: "layers.0" -> "layers_0"."""
    base = "".join(c if c.isalnum() or c == "_" else "_" for c in text) or "value"
    return f"_{base}" if base[0].isdigit() or keyword.iskeyword(base) else base


def base_name(node: fx.Node, results: set[fx.Node]) -> str:
    """What the result of an op is called, before numbers keep it apart from its likes.

    Args:
        node: the op.
        results: see `results_of`.
    """
    return _last(site_of(node).module) if node in results else _short(node)


def unpacked(node: fx.Node) -> list[fx.Node] | None:
    """The items of a tuple result, where all of them are taken out right after it."""
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(value, (tuple, list)) or len(value) < 2:
        return None
    items: list[fx.Node] = []
    item = node.next
    while item.target is operator.getitem and item.args == (node, len(items)):
        items.append(item)
        item = item.next
    return items if len(items) == len(value) == len(node.users) else None


def results_of(graph: fx.Graph) -> set[fx.Node]:
    """For each module path the node that makes its result: the last, of a pair the first item."""
    last: dict[str, fx.Node] = {}
    for node in graph.nodes:
        if is_marker(node):
            continue
        if node.op == "call_function" and not (node.target is operator.getitem and node.args[1]):
            last[site_of(node).module] = node
    return {node for path, node in last.items() if path}


def _last(path: str) -> str:
    """The end of a module path, from the last part that is a word: "layers.0" -> "layers_0"."""
    parts = path.split(".")
    start = len(parts) - 1
    while start > 0 and parts[start].isdigit():
        start -= 1
    return "_".join(parts[start:])


def _short(node: fx.Node) -> str:
    if node.target is operator.getitem:
        rule = node.meta.get("graphopt_rule")
        return "residual" if rule and str(rule).startswith("add_") else "item"
    name = getattr(node.target, "_opname", None) or getattr(node.target, "__name__", "value")
    return str(name).strip("_") + ("_" if keyword.iskeyword(str(name).strip("_")) else "")


def state_text(body: Body, target: str) -> str:
    """A state path as an expression on `self`: "h.0.ln.weight" -> "self.h[0].ln.weight"."""
    if target.startswith(CONSTANTS + "."):
        return f"self.{target}"
    text, owner = "self", body.root
    for part in target.split("."):
        listed = isinstance(owner, (nn.ModuleList, nn.Sequential)) and owner is not body.root
        if listed and part.isdigit():
            text += f"[{part}]"
        elif part.isidentifier() and not keyword.iskeyword(part):
            text += f".{part}"
        else:
            text = f"getattr({text}, {part!r})"
        owner = getattr(owner, part, None)  # type: ignore[assignment]
    return text


# ------------------------------------------------------------------------------- and back


def parse(code: str, body: Body) -> fx.Graph:
    """Turn `python_code` back into a graph, without metadata.

    Args:
        code: text that `python_code` printed, edited or not.
        body: the body whose root holds the state that the code reads.
    """
    scope: dict[str, Any] = {}
    exec(compile(code, "<graphopt code>", "exec"), scope)
    return _CodeTracer().run(scope["forward"], body)


class _CodeTracer(fx.Tracer):
    def run(self, function: Any, body: Body) -> fx.Graph:
        self.root = nn.Module()
        self.graph = fx.Graph(tracer_cls=type(self))
        self.tensor_attrs: dict[Any, str] = {}
        self.state: dict[str, fx.Proxy] = {}
        # Through these, ops without a tensor operand (arange, draw_seed) become nodes as well.
        for name in ("aten", "graphopt"):
            function.__globals__[name] = _OpWalker(self, getattr(torch.ops, name))
        function.__globals__["remat"] = _OpWalker(self, remat)
        code = function.__code__
        inputs = code.co_varnames[1 : code.co_argcount]
        proxies = [self.create_proxy("placeholder", name, (), {}) for name in inputs]
        result = function(_StateWalker(self, body, body.root, ""), *proxies)
        self.create_node("output", "output", (self.create_arg(tuple(result)),), {})
        for node in self.graph.nodes:
            if isinstance(node.target, torch._ops.OpOverloadPacket):
                node.target = node.target.default
        return self.graph

    def read(self, path: str) -> fx.Proxy:
        if path not in self.state:
            self.state[path] = self.create_proxy("get_attr", path, (), {})
        return self.state[path]


class _OpWalker:
    """Stands for an op namespace or an op while code is traced: a call becomes a node."""

    def __init__(self, tracer: _CodeTracer, owner: Any) -> None:
        self._tracer = tracer
        self._owner = owner

    def __getattr__(self, name: str) -> _OpWalker:
        return _OpWalker(self._tracer, getattr(self._owner, name))

    def __call__(self, *args: Any, **kwargs: Any) -> fx.Proxy:
        return self._tracer.create_proxy("call_function", self._owner, args, kwargs)


class _StateWalker:
    """Stands for `self` while code is traced: modules are walked, tensors become get_attr nodes."""

    def __init__(self, tracer: _CodeTracer, body: Body, owner: Any, path: str) -> None:
        self.__dict__.update(_tracer=tracer, _body=body, _owner=owner, _path=path)

    def __getattr__(self, name: str) -> Any:
        path = f"{self._path}.{name}" if self._path else name
        if path.startswith(CONSTANTS):
            return (
                self._tracer.read(path)
                if path != CONSTANTS
                else _StateWalker(self._tracer, self._body, None, path)
            )
        value = getattr(self._owner, name)
        if isinstance(value, torch.Tensor):
            return self._tracer.read(path)
        return _StateWalker(self._tracer, self._body, value, path)

    def __getitem__(self, index: int) -> Any:
        return self.__getattr__(str(index))
