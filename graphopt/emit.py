"""A body as a Python function: compiled once, kept, and called with its state and its inputs."""

from __future__ import annotations

import itertools
import linecache
import math
import weakref
from typing import Any

import torch
from torch import fx, nn

from graphopt.graph.body import CONSTANTS, Body
from graphopt.graph.recipes import recipes
from graphopt.kernels._library import direct, positional
from graphopt.remat import is_marker, scope

_count = itertools.count()


class ParamRef:
    """Where a state tensor lives: the dict that holds it and its name there.

    Reading through the dict sees a parameter that was replaced, at the cost of one look-up.

    Attributes:
        owner: `_parameters`, `_buffers` or `__dict__` of the owning module, or a dict of constants.
        name: the key in it.
        path: the full state path.
    """

    __slots__ = ("name", "owner", "path")

    def __init__(self, owner: dict[str, Any], name: str, path: str) -> None:
        self.owner = owner
        self.name = name
        self.path = path

    @classmethod
    def of(cls, body: Body, path: str) -> ParamRef:
        """The place of a state path of a body.

        Raises:
            AttributeError: when the body's root has no such state.
        """
        if path.startswith(CONSTANTS + "."):
            return cls(body.constants, path.removeprefix(CONSTANTS + "."), path)
        parent, _, name = path.rpartition(".")
        module: nn.Module = body.root.get_submodule(parent)
        for owner in (module._parameters, module._buffers, module.__dict__):
            if name in owner:
                return cls(owner, name, path)
        raise AttributeError(f"{type(body.root).__name__} has no state {path!r}")

    def read(self) -> Any:
        """The tensor as it is now."""
        return self.owner[self.name]


class Program:
    """A body's function and the state that it reads.

    Attributes:
        text: the Python source of the function.
        refs: where its state comes from, in the order of the function's first argument.
        recipes: how each value that its markers drop is computed again; empty where none is.
    """

    def __init__(self, body: Body, label: str) -> None:
        """Compile a body.

        Args:
            body: what to run; not changed.
            label: a name for tracebacks.
        """
        writer = _Writer(body.graph)
        self.text = writer.text()
        self.refs = [ParamRef.of(body, path) for path in writer.state]
        self.recipes = recipes(body.graph)
        self._cells = [(r.owner, r.name) for r in self.refs]
        filename = f"<graphopt {label} #{next(_count)}>"
        scope = dict(writer.scope)
        exec(compile(self.text, filename, "exec"), scope)
        linecache.cache[filename] = (len(self.text), None, self.text.splitlines(True), filename)
        weakref.finalize(self, linecache.cache.pop, filename, None)
        self.function = scope["forward"]

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        """Run the body on its input leaves; returns its flat outputs."""
        with scope(self.recipes):
            return self.function([d[n] for d, n in self._cells], *inputs)


class _Writer:
    """Python source for a graph of placeholders, state, calls and one output."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.scope: dict[str, Any] = {"torch": torch, "inf": math.inf, "nan": math.nan}
        self.state: list[str] = []
        self._functions: dict[Any, str] = {}

    def text(self) -> str:
        """The source of `forward(state, *inputs)`."""
        inputs = [n.name for n in self.graph.nodes if n.op == "placeholder"]
        reads = [n for n in self.graph.nodes if n.op == "get_attr"]
        self.state = [str(n.target) for n in reads]
        lines = [f"def forward({', '.join(['_state', *inputs])}):"]
        if reads:
            lines.append(f"    ({', '.join(n.name for n in reads)},) = _state")
        done = self._last_uses()
        for node in self.graph.nodes:
            if is_marker(node):
                lines.append(f"    {self._call(node)}")
            elif node.op == "call_function":
                lines.append(f"    {node.name} = {self._call(node)}")
            elif node.op == "output":
                lines.append(f"    return {self._value(tuple(node.args[0]))}")
            if done.get(node):
                lines.append(f"    del {', '.join(done[node])}")
        return "\n".join(lines) + "\n"

    def _last_uses(self) -> dict[fx.Node, list[str]]:
        """Node -> names whose last use it is: they are dropped there, so that memory is freed."""
        seen: set[fx.Node] = set()
        done: dict[fx.Node, list[str]] = {}
        for node in reversed(self.graph.nodes):
            if node.op == "output":
                seen.update(node.all_input_nodes)
                continue
            if node.op != "call_function":
                continue
            names = []
            own = () if is_marker(node) else (node,)
            for used in (*node.all_input_nodes, *own):
                if used not in seen and used.op == "call_function":
                    seen.add(used)
                    names.append(used.name)
            done[node] = names
        return done

    def _call(self, node: fx.Node) -> str:
        short = direct(node.target)
        if short is not None:  # an operator of graphopt's: past the dispatcher
            given = map(self._value, positional(node.target, node.args, node.kwargs))
            return f"{self._function(node.target, short)}({', '.join(given)})"
        arguments = [self._value(a) for a in node.args]
        arguments += [f"{k}={self._value(v)}" for k, v in node.kwargs.items()]
        return f"{self._function(node.target)}({', '.join(arguments)})"

    def _function(self, target: Any, called: Any = None) -> str:
        if target not in self._functions:
            name = str(getattr(target, "__name__", target)).replace(".", "_")
            name = f"_f_{name}" if name.isidentifier() else "_f"
            while name in self.scope:
                name += "_"
            self._functions[target] = name
            self.scope[name] = called or target
        return self._functions[target]

    def _value(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return value.name
        if type(value) in (int, bool, str, float, complex) or value is None:
            return repr(value)
        if isinstance(value, list):
            return f"[{', '.join(map(self._value, value))}]"
        if isinstance(value, tuple):
            return f"({', '.join(map(self._value, value))}{',' if len(value) == 1 else ''})"
        if isinstance(value, dict):
            return f"{{{', '.join(f'{k!r}: {self._value(v)}' for k, v in value.items())}}}"
        if isinstance(value, slice):
            return f"slice({self._value((value.start, value.stop, value.step))[1:-1]})"
        if isinstance(value, (torch.dtype, torch.device, torch.layout, torch.memory_format)):
            text = repr(value)  # "torch.float32", "device(type='cpu')"
            return text if text.startswith("torch.") else f"torch.{text}"
        name = f"_k{len(self.scope)}"
        self.scope[name] = value
        return name
