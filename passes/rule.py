"""What a rule is: patterns, checks, a replacement, spellings; and the match that it works on."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

import graphopt.kernels  # noqa: F401  (defines the ops that rules emit)
from graphopt.errors import GraphOptError
from graphopt.graph import ops
from graphopt.graph.body import Body
from graphopt.graph.edit import MARKS, Editor
from graphopt.graph.pattern import Bindings, Pattern


class Match:
    """A structural match of a rule, handed to its check and its replacement.

    Captures are attributes: `m.x` is the node or the constant that parameter `x` bound.
    """

    def __init__(self, rule: Rule, pattern: Pattern, bound: Bindings, body: Body) -> None:
        self.rule = rule
        self.pattern = pattern
        self.body = body
        self.captures = bound.captures
        self.nodes = sorted(set(bound.nodes.values()))
        self.outputs = tuple(bound.nodes[out] for out in pattern.outputs if out in bound.nodes)
        self._editor = Editor(body.graph, rule.name)
        self._before: fx.Node | None = None
        self.created: list[fx.Node] = []

    def __getattr__(self, name: str) -> Any:
        """A capture by the name of the pattern's parameter."""
        try:
            return self.__dict__["captures"][name]
        except KeyError:
            raise AttributeError(
                f"rule {self.rule.name} has no capture {name!r}; it has {sorted(self.captures)}"
            ) from None

    @property
    def root(self) -> fx.Node:
        """The node that the pattern's first result matched."""
        return self.outputs[0]

    @property
    def val(self) -> torch.Tensor:
        """The fake tensor of the root."""
        value: torch.Tensor = self.root.meta["val"]
        return value

    def tensor(self, name: str) -> torch.Tensor | None:
        """The fake tensor of a capture, None where it bound no tensor."""
        bound = self.captures.get(name)
        value = bound.meta.get("val") if isinstance(bound, fx.Node) else None
        return value if isinstance(value, torch.Tensor) else None

    def requires_grad(self, name: str) -> bool:
        """Whether a capture reads state that is being trained."""
        node = self.captures.get(name)
        if not isinstance(node, fx.Node) or node.op != "get_attr":
            return False
        return bool(self.body.attribute(str(node.target)).requires_grad)

    @property
    def inputs(self) -> list[fx.Node]:
        """The nodes from outside that the matched ones read, in graph order."""
        inside = set(self.nodes)
        found = {n for node in self.nodes for n in node.all_input_nodes if n not in inside}
        return sorted(found)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Emit one op of the replacement; keyword arguments of None are left out."""
        assert self._before is not None, "m.call belongs into replace, not into check"
        kwargs = {k: v for k, v in kwargs.items() if v is not None}
        node = self._editor.call(target, *args, before=self._before, like=self.root, **kwargs)
        self.created.append(node)
        return node

    def inside_use(self) -> str | None:
        """Why the match may not be fused because of a value that is used elsewhere, or None."""
        inside = set(self.nodes)
        for name, bound in self.captures.items():
            if isinstance(bound, fx.Node) and bound in inside:
                return f"the inside value {_call(bound)} is also the operand {name}"
        for node in self.nodes:
            if node in self.outputs:
                continue
            for user in node.users:
                if user not in inside:
                    what = "an output" if user.op == "output" else f"used by {_call(user)}"
                    return f"the inside value {_call(node)} is also {what}"
        return None

    def mixed_regions(self) -> str | None:
        """Why the match may not be fused because its ops stand under different modes, or None."""
        for mark in MARKS:
            if len({str(n.meta.get(mark)) for n in self.nodes}) > 1:
                return f"its ops stand in different regions ({mark.removeprefix('graphopt_')})"
        return None

    def insertion_point(self) -> fx.Node | None:
        """Where the replacement fits: after every input, before every outside user."""
        inside = set(self.nodes)
        users = [u for out in self.outputs for u in out.users if u not in inside]
        point = min([*users, self.root.next])
        last = max(self.inputs, default=None)
        return None if last is not None and not last < point else point

    def open(self) -> None:
        """Allow `call`: emitted ops are inserted at the insertion point."""
        self._before = self.insertion_point()


def _call(node: fx.Node) -> str:
    return f"{node.name} ({ops.op_name(node.target)})"


Spelling = tuple[Callable[..., Any], tuple[torch.Tensor, ...]]


class Rule:
    """One rewrite: patterns, a check, a replacement, and spellings that test and document it.

    Made with the decorator `rule`; `check`, `replace`, `also` and `spellings` are decorators too.

    Attributes:
        name: the first pattern function's name.
        doc: its docstring, one line of what the rule does.
        family: "canonical" or "fusion", the pass that runs it.
        before: names of rules with larger patterns that this one goes before.
        module: import path of the file that holds it.
    """

    def __init__(
        self, function: Callable[..., Any], family: str, before: tuple[str, ...] = ()
    ) -> None:
        self.name = function.__name__.strip("_")
        self.doc = (function.__doc__ or "").strip()
        self.family = family
        self.before = before
        self.module = function.__module__
        self.functions = [function]
        self.compiled: tuple[Pattern, ...] | None = None
        self.checks: list[Callable[[Match], str | None]] = []
        self.replacement: Callable[[Match], fx.Node | tuple[fx.Node, ...]] | None = None
        self.examples: Callable[[], Iterator[Spelling]] | None = None
        self.counterexamples: Callable[[], Iterator[Spelling]] | None = None

    def __repr__(self) -> str:
        """Name and what it does."""
        return f"Rule({self.name!r}: {self.doc.splitlines()[0] if self.doc else self.module})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the place where the rule is defined.

        Raises:
            GraphOptError: for a rule that cannot be found there again.
        """
        name = self.functions[0].__name__
        if getattr(sys.modules.get(self.module), name, None) is not self:
            raise GraphOptError(
                f"rule {self.name} cannot be pickled",
                why=f"a rule is loaded from where it is defined, and {self.module}.{name} is "
                "not this one",
                try_="define it at the top of a module that can be imported",
            )
        return _rule_at, (self.module, name)

    @property
    def patterns(self) -> tuple[Pattern, ...]:
        """The traced patterns, largest first."""
        if self.compiled is None:
            traced = [Pattern.of(f) for f in self.functions]
            taken = {c for p in traced for c in p.captures if hasattr(Match, c)}
            if taken:
                raise ValueError(f"rule {self.name}: {sorted(taken)} are attributes of Match")
            self.compiled = tuple(sorted(traced, key=lambda p: -p.size))
        return self.compiled

    def also(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorator: another pattern with the same captures and replacement."""
        self.functions.append(function)
        self.compiled = None
        return function

    def check(self, function: Callable[[Match], str | None]) -> Callable[[Match], str | None]:
        """Decorator: a condition; returns why the rule may not fire here, or None.

        An empty string means that the rule does not apply at all, which nobody needs to read.
        """
        self.checks.append(function)
        return function

    def replace(
        self, function: Callable[[Match], fx.Node | tuple[fx.Node, ...]]
    ) -> Callable[[Match], fx.Node | tuple[fx.Node, ...]]:
        """Decorator: emits the replacement; returns one node for each result of the pattern."""
        self.replacement = function
        return function

    def spellings(self, function: Callable[[], Iterator[Spelling]]) -> Callable[..., Any]:
        """Decorator: yields (callable, example inputs) in which the rule must fire."""
        self.examples = function
        return function

    def refuses(self, function: Callable[[], Iterator[Spelling]]) -> Callable[..., Any]:
        """Decorator: yields look-alikes in which the rule must not fire."""
        self.counterexamples = function
        return function


def _rule_at(module: str, name: str) -> Rule:
    found: Rule = getattr(importlib.import_module(module), name)
    return found


REGISTRY: dict[str, Rule] = {}
"""The rules that ship with graphopt, by name, filled as their files are imported."""


def leaving_out(name: str) -> str:
    """How to switch a rule off, in words; one that is not registered has no name in `rules=`."""
    if name in REGISTRY:
        return f"rules='default,-{name}' leaves it out"
    return f"leave {name} out of your rules="


FAMILIES = ("canonical", "fusion")


def rule(
    family: str, *, before: tuple[str, ...] = (), register: bool = True
) -> Callable[[Callable[..., Any]], Rule]:
    """Make a rule from a pattern function.

    Args:
        family: "canonical" (one spelling for each meaning) or "fusion" (one kernel for a chain).
        before: rules that would take the same ops with a larger pattern, but save fewer bytes.
        register: False for a rule of one's own that is handed to `optimize(rules=[...])`.

    Example:
        @rule("fusion")
        def relu_relu(x):
            \"\"\"relu(relu(x)) is relu(x).\"\"\"
            return aten.relu.default(aten.relu.default(x))

        @relu_relu.replace
        def _(m):
            return m.call(aten.relu.default, m.x)

    Raises:
        ValueError: for another family, or when a rule of that name exists already.
    """
    if family not in FAMILIES:
        raise ValueError(f"a rule is of the family {' or '.join(FAMILIES)}, not {family!r}")

    def decorate(function: Callable[..., Any]) -> Rule:
        made = Rule(function, family, before)
        if register:
            if made.name in REGISTRY:
                raise ValueError(f"two rules are called {made.name!r}")
            REGISTRY[made.name] = made
        return made

    return decorate
