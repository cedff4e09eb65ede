"""The stand-alone script that reproduces a failure."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import site
import sys
import sysconfig
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from graphopt.capture import signature as sig
from graphopt.graph.body import CONSTANTS, Body
from graphopt.graph.text import python_code
from graphopt.module import graphopt_of
from graphopt.passes import Rule
from graphopt.testing.data import BUDGET, SMALL, numbers, pack
from graphopt.testing.failure import Finding
from graphopt.testing.inputs import copy_arguments
from graphopt.testing.observe import Plan


@dataclasses.dataclass(frozen=True)
class Script:
    """A program as text.

    Attributes:
        text: the program, "" where none could be written.
        data: tensors that are too large for it, for the file beside it.
        notes: what a reader should know.
    """

    text: str = ""
    data: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()


def write_script(
    model: nn.Module,
    optimized: nn.Module,
    plan: Plan,
    factory: Callable[[], nn.Module] | None,
    strides: bool,
    finding: Finding,
) -> Script:
    """The script for a failing call; never raises, since the failure itself must be told."""
    try:
        return _Writer(model, optimized, plan, strides).write(factory, finding)
    except Exception as error:
        return Script(notes=(f"no script: {type(error).__name__}: {error}",))


class _Writer:
    def __init__(self, model: nn.Module, optimized: nn.Module, plan: Plan, strides: bool) -> None:
        opt = graphopt_of(optimized)
        if opt is None:
            raise ValueError("the optimized module is not one that graphopt made")
        self.model = model
        self.opt = opt
        self.plan = plan
        self.strides = strides
        self.room = BUDGET
        self.seeds = 0
        self.data: dict[str, torch.Tensor] = {}
        self.helpers: set[str] = set()
        self.notes: list[str] = []

    def write(self, factory: Callable[[], nn.Module] | None, finding: Finding) -> Script:
        """The whole program."""
        args, kwargs, leaves = copy_arguments(
            self.plan.args, self.plan.kwargs, requires=self.plan.requires
        )
        made = None if factory is None else self._place(factory.__module__, factory)
        if factory is not None and made is None:
            self.notes.append("the script's model is the captured graph: the factory is not at the "
                              "top level of a file")  # fmt: skip
        call = [self._tensor(f"argument {i}", t) for i, t in enumerate(leaves)]
        upstream = self._upstream()
        if made is not None:
            lines = self._by_factory(made, args, kwargs, call)
        elif finding.capture:
            raise ValueError("the captured graph is what is wrong; give factory=")
        else:
            lines = self._by_graph(args, kwargs, call)
        lines += [*self._optimize(made is not None), *self._assertion(upstream)]
        lines = [*self._head(str(finding)), *lines, 'print("equivalent")', ""]
        return Script("\n".join(lines), self.data, tuple(self.notes))

    def _by_factory(
        self, made: str, args: tuple[Any, ...], kwargs: dict[str, Any], call: list[str]
    ) -> list[str]:
        """The model as the user's function makes it, its state and modes as they are now."""
        self.helpers.add("fill")
        state = dict((*self.model.named_parameters(), *self.model.named_buffers()))
        rows = [f"    {k!r}: {self._tensor(k, t.detach())}," for k, t in state.items()]
        lines = [f"model = {made}()", "fill(model, {", *rows, "})", self._mode()]
        for name, module in self.model.named_modules():
            if module.training != self.model.training:
                lines.append(f"model.get_submodule({name!r}).training = {module.training}")
        structure, items = sig.flatten((args, kwargs), []), iter(call)
        pair = [_source(part, items) for part in structure[1]]
        return [*lines, "", f"args = {pair[0]}", f"kwargs = {pair[1]}"]

    def _by_graph(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], call: list[str]
    ) -> list[str]:
        """The captured graph as a module that takes the tensors alone."""
        entry = self.opt.capture(args, kwargs)
        if entry is None:
            raise ValueError("there is no captured graph")
        lines = [*self._graph(entry.capture.body), "", "", "model = Captured()", self._mode(), ""]
        values = f"args = ({', '.join(call)}{',' if len(call) == 1 else ''})"
        return [*lines, values, "kwargs = {}"]

    def _mode(self) -> str:
        return f"model.train({self.opt.source.training})"

    # ---- parts of the program

    def _head(self, headline: str) -> list[str]:
        first = headline.splitlines()[0].replace("\\", "/").replace('"""', "'''")
        said = "Written by graphopt.testing; fails as long as it is so."
        lines = [f'"""{first}', "", said, '"""']
        lines += ["", "import operator", "", "import torch", "", "from graphopt import optimize"]
        lines += ["from graphopt.testing import assert_equivalent"]
        if self.helpers:
            listed = ", ".join(sorted(self.helpers))
            lines.append(f"from graphopt.testing.data import {listed}")
        return [*lines, "", 'inf, nan = float("inf"), float("nan")', "aten = torch.ops.aten", ""]

    def _optimize(self, by_factory: bool) -> list[str]:
        options: Any = getattr(self.opt._compile_body, "options", None)
        given = []
        if options is not None:
            if options.fuse is not True:
                given.append(f"fuse={options.fuse!r}")
            rules = self._rules(options.rules)
            if rules != "'default'":
                given.append(f"rules={rules}")
            if options.max_rewrites is not None:
                given.append(f"max_rewrites={options.max_rewrites}")
        for name, usual in (("dynamic", "auto"), ("precision", None)):
            value = getattr(self.opt._settings, name)
            if value != usual:
                given.append(f"{name}={value!r}")
        overrides = {p: str(d) for p, d in getattr(self.opt._compile_body, "overrides", ())}
        if overrides and not by_factory:
            self.notes.append("the script leaves out precision_overrides: its modules are others")
        elif overrides:
            pairs = ", ".join(f"{p!r}: {d}" for p, d in overrides.items())
            given.append(f"precision_overrides={{{pairs}}}")
        return ["optimized = " + f"optimize({', '.join(['model', *given])})"]

    def _rules(self, rules: str | Rule | Iterable[str | Rule]) -> str:
        if isinstance(rules, str):
            return repr(rules)
        listed = []
        for item in [rules] if isinstance(rules, Rule) else rules:
            if isinstance(item, str):
                listed.append(repr(item))
                continue
            place = self._place(item.module, item)
            if place is None:
                self.notes.append(
                    f"the script leaves out the rule {item.name}: it is not at the top level of a "
                    "file"
                )
            else:
                listed.append(place)
        return f"[{', '.join(listed)}]"

    def _upstream(self) -> str:
        if not self.plan.given:
            return ""
        last = max(self.plan.given)
        given = [self.plan.given.get(i) for i in range(last + 1)]
        items = [
            "None" if g is None else self._tensor(f"upstream {i}", g) for i, g in enumerate(given)
        ]
        return f", upstream=[{', '.join(items)}]"

    def _assertion(self, upstream: str) -> list[str]:
        more = "" if self.strides else ", strides=False"
        call = (
            f"assert_equivalent(model, optimized, args, kwargs, input_gradients=False, "
            f"seed={self.plan.seed}{upstream}{more})"
        )
        around = [
            f"torch.autocast({kind!r}, {torch.get_autocast_dtype(kind)})"
            for kind in ("cpu", "cuda")
            if torch.is_autocast_enabled(kind)
        ]
        if not self.plan.backward:
            around.append("torch.no_grad()")
        return [f"with {', '.join(around)}:", f"    {call}"] if around else [call]

    # ---- the captured graph as a model

    def _graph(self, body: Body) -> list[str]:
        code = python_code(body)
        text = "def forward(" + code.partition("def forward(")[2].rstrip()
        text = text.replace(f"self.{CONSTANTS}.", "self.constants.")
        inputs = [p.name for p in body.placeholders]
        names = text.partition(")")[0].partition("(")[2]
        self.helpers.add("Holder")
        lines = ["class Captured(Holder):", '    """The captured graph, before any rewrite."""', ""]
        lines += ["    def __init__(self):", "        super().__init__()", *self._state(body), ""]
        first, *rest = text.replace("def forward(", "def graph(", 1).splitlines()
        lines += [f"    {first}", *(f"    {line}".rstrip() for line in rest)]
        lines += ["", f"    def forward({names}):", f"        out = Captured.graph({names})"]
        if body.mutations:
            lines.append("        with torch.no_grad():")
        called = names.split(", ")[1:]
        for m in body.mutations:
            target = called[inputs.index(m.target)] if m.kind == "input" else None
            place = target or _path(m.target)
            lines.append(f"            {place}.copy_(out[{m.output}])")
        count = body.user_outputs
        lines.append(f"        return {'out[0]' if count == 1 else f'out[:{count}]'}")
        return lines

    def _state(self, body: Body) -> list[str]:
        lines = []
        seen: dict[int, str] = {}
        root = body.root
        parameters = dict(root.named_parameters(remove_duplicate=False))
        buffers = dict(root.named_buffers(remove_duplicate=False))
        for path, tensor in (*parameters.items(), *buffers.items()):
            if id(tensor) in seen:
                lines.append(f"        self.tie({path!r}, {seen[id(tensor)]!r})")
                continue
            seen[id(tensor)] = path
            trains = f", trains={tensor.requires_grad}" if path in parameters else ""
            lines.append(
                f"        self.put({path!r}, {self._tensor(path, tensor.detach())}{trains})"
            )
        known = {*parameters, *buffers}
        for node in body.graph.nodes:
            target = str(node.target)
            if node.op != "get_attr" or target in known:
                continue
            known.add(target)
            path = target.replace(CONSTANTS + ".", "constants.")
            value = body.attribute(target)
            lines.append(f"        self.put({path!r}, {self._tensor(path, value.detach())})")
        return lines

    # ---- tensors and places

    def _tensor(self, name: str, tensor: torch.Tensor) -> str:
        """A tensor as an expression: numbers, packed bytes, or drawn by a seed."""
        plain = tensor.detach()
        if plain.layout is not torch.strided or plain.is_complex():
            raise ValueError(f"{name} is {plain.layout}, {plain.dtype}")
        if plain.is_contiguous():
            text = self._values(name, plain)
        else:
            size = plain.untyped_storage().nbytes() // plain.element_size()
            whole = torch.as_strided(plain, (size,), (1,), 0)
            layout = f"{tuple(plain.shape)}, {plain.stride()}, {plain.storage_offset()}"
            text = f"torch.as_strided({self._values(name, whole)}, {layout})"
        if plain.device.type != "cpu":
            text += f".to({str(plain.device)!r})"
        return text + (".requires_grad_()" if tensor.requires_grad else "")

    def _values(self, name: str, tensor: torch.Tensor) -> str:
        shape, dtype = tuple(tensor.shape), tensor.dtype
        if tensor.numel() == 0:
            return f"torch.empty({shape}, dtype={dtype})"
        if tensor.numel() <= SMALL:
            exact = tensor.double() if tensor.is_floating_point() else tensor
            return f"torch.tensor({numbers(exact.tolist())}, dtype={dtype})"
        if tensor.numel() * tensor.element_size() <= 4 * BUDGET:
            text = pack(tensor)
            if len(text) <= self.room:
                self.room -= len(text)
                self.helpers.add("packed")
                return f"packed({text!r}, {dtype}, {shape})"
        self.data[name] = tensor.detach().cpu().clone()
        if len(self.data) == 1:
            self.notes.append("the script draws large tensors by a seed where reproduce.pt "
                              "(EquivalenceError.save) is not beside it")  # fmt: skip
        self.helpers.add("stored")
        return f"stored(__file__, {name!r}, {self._drawn(tensor)})"

    def _drawn(self, tensor: torch.Tensor) -> str:
        self.seeds += 1
        shape, dtype = tuple(tensor.shape), tensor.dtype
        if tensor.is_floating_point():
            finite = tensor.double()[tensor.double().isfinite()]
            mean = float(finite.mean()) if finite.numel() else 0.0
            std = float(finite.std()) if finite.numel() > 1 else 1.0
            self.helpers.add("normal")
            return f"normal({shape}, {dtype}, {self.seeds}, {mean:.4g}, {std:.4g})"
        self.helpers.add("integers")
        low, high = int(tensor.min()), int(tensor.max())
        return f"integers({shape}, {dtype}, {self.seeds}, {low}, {high})"

    def _place(self, module_name: str, value: Any) -> str | None:
        """An expression for what stands at the top level of a file; None where nothing does."""
        module = sys.modules.get(module_name)
        names = [n for n, v in vars(module).items() if v is value] if module is not None else []
        file = inspect.getsourcefile(module) if module is not None and names else None
        if module is None or file is None:
            return None
        if _installed(module):
            self.helpers.add("load")
            return f"load({module.__name__!r}).{names[0]}"
        self.helpers.add("load_file")
        return f"load_file({str(Path(file).resolve())!r}).{names[0]}"


def _installed(module: Any) -> bool:
    """Whether a fresh process finds a module by its name."""
    file = getattr(module, "__file__", None)
    if file is None or module.__name__ == "__main__":
        return False
    folders = {*site.getsitepackages(), sysconfig.get_paths()["stdlib"]}
    return any(Path(file).is_relative_to(f) for f in folders) and (
        importlib.util.find_spec(module.__name__) is not None
    )


def _path(target: str) -> str:
    return "self" + "".join(f"[{p}]" if p.isdigit() else f".{p}" for p in target.split("."))


def _source(structure: sig.Structure, items: Any) -> str:
    """Arguments as source, their tensors from `items`."""
    tag = structure[0]
    if tag == "leaf":
        return str(next(items))
    if tag == "value":
        value = structure[2]
        if isinstance(value, (torch.dtype, torch.device, int, float, str, bytes, type(None))):
            text = repr(value)
            return f"torch.{text}" if text.startswith("device(") else text
    if tag == "tuple":
        inner = [_source(s, items) for s in structure[1]]
        return f"({', '.join(inner)}{',' if len(inner) == 1 else ''})"
    if tag == "list":
        return f"[{', '.join(_source(s, items) for s in structure[1])}]"
    if tag == "dict":
        pairs = zip(structure[1], structure[2], strict=True)
        return f"{{{', '.join(f'{k!r}: {_source(s, items)}' for k, s in pairs)}}}"
    raise ValueError(f"an argument of this kind cannot be written as source: {tag}")
