"""Patterns: plain Python functions over ATen ops, traced once into a small graph.

In a pattern, a parameter captures whatever stands there (a node or a constant) and must be the
same wherever it occurs again; a parameter whose name begins with `_` matches anything and keeps
nothing; a constant matches exactly. `either(a, b)` matches one of several spellings.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import fx, nn

from graphopt.graph import ops


def either(*spellings: Any) -> Any:
    """In a pattern: any one of these values, tried in order.

    Example:
        def pattern(x):
            return aten.relu.default(either(aten.to.dtype(x, torch.float32), x))
    """
    for value in spellings:
        if isinstance(value, fx.Proxy):
            return value.tracer.create_proxy("call_function", either, spellings, {})
    return spellings[0]


@dataclasses.dataclass(frozen=True)
class Pattern:
    """A traced pattern.

    Attributes:
        name: the function's name.
        graph: its ops; placeholders are the captures.
        outputs: the pattern's results; the first is the root that matching starts at.
        captures: names of the parameters, in order.
        size: how many ops it has; of an `either`, the ops of its longest spelling.
        targets: the ops that the root may be.
        producers: for each operand of the root that must be an op: which ops it may be. Most
            nodes are ruled out by a look at these.
    """

    name: str
    graph: fx.Graph
    outputs: tuple[fx.Node, ...]
    captures: tuple[str, ...]
    size: int
    targets: tuple[Any, ...]
    producers: tuple[frozenset[Any], ...]

    def may_match(self, node: fx.Node) -> bool:
        """Whether a node has, beside the root's op, the operands that the pattern needs."""
        if not self.producers:
            return True
        found = [n.target for n in node.all_input_nodes]
        return all(any(t in wanted for t in found) for wanted in self.producers)

    @staticmethod
    def of(function: Callable[..., Any]) -> Pattern:
        """Trace a pattern function.

        Raises:
            TypeError: when it returns anything but ops of the pattern.
        """
        graph = _PatternTracer().trace(function)
        result = next(iter(reversed(graph.nodes))).args[0]
        outputs = tuple(result) if isinstance(result, (tuple, list)) else (result,)
        for out in outputs:
            if not isinstance(out, fx.Node) or out.op != "call_function":
                raise TypeError(f"pattern {function.__name__} returns {out!r}, not one of its ops")
        names = tuple(inspect.signature(function).parameters)
        return Pattern(
            name=function.__name__,
            graph=graph,
            outputs=outputs,
            captures=names,
            size=_size(outputs),
            targets=tuple(_targets(outputs[0])),
            producers=_producers(outputs[0]),
        )


class _PatternTracer(fx.Tracer):
    """Traces a free function of its own parameters, defaults ignored."""

    def trace(self, root: Callable[..., Any], concrete_args: Any = None) -> fx.Graph:
        self.root = _EMPTY
        self.graph = fx.Graph(tracer_cls=type(self))
        self.tensor_attrs: dict[Any, str] = {}
        proxies = [
            self.create_proxy("placeholder", name, (), {})
            for name in inspect.signature(root).parameters
        ]
        self.create_node("output", "output", (self.create_arg(root(*proxies)),), {})
        return self.graph


_EMPTY: Any = nn.Module()


def _size(outputs: tuple[fx.Node, ...]) -> int:
    seen: set[fx.Node] = set()

    def visit(node: fx.Node) -> int:
        if node in seen or node.op != "call_function":
            return 0
        seen.add(node)
        inner = [visit(n) for n in node.all_input_nodes]
        return max(inner, default=0) if node.target is either else 1 + sum(inner)

    return sum(visit(n) for n in outputs)


def _targets(node: fx.Node) -> list[Any]:
    if node.target is not either:
        return [node.target]
    found: list[Any] = []
    for value in node.args:
        if isinstance(value, fx.Node) and value.op == "call_function":
            found += _targets(value)
    return found


def _producers(root: fx.Node) -> tuple[frozenset[Any], ...]:
    """The ops that each operand of a root may be, for operands that can be nothing else."""
    if root.target is either:
        return ()
    found = []
    for operand in root.all_input_nodes:
        options = operand.args if operand.target is either else (operand,)
        if all(isinstance(o, fx.Node) and o.op == "call_function" for o in options):
            targets = [_targets(o) for o in options]  # type: ignore[arg-type]
            if all(targets) and not any(_has_capture(o) for o in options):
                found.append(frozenset(t for ts in targets for t in ts))
    return tuple(found)


def _has_capture(node: Any) -> bool:
    """Whether an operand may be anything: a capture, or a choice that holds one."""
    if not isinstance(node, fx.Node) or node.op == "placeholder":
        return True
    return node.target is either and any(_has_capture(o) for o in node.args)


@dataclasses.dataclass
class Bindings:
    """What a match bound.

    Attributes:
        captures: parameter name -> node or constant.
        nodes: pattern op -> graph node, `either` left out.
    """

    captures: dict[str, Any]
    nodes: dict[fx.Node, fx.Node]


@dataclasses.dataclass
class Miss:
    """The furthest that a match came before it failed, as data: the words are made on demand.

    Attributes:
        matched: pattern ops bound at that moment.
        wanted: what the pattern has there.
        found: what the graph has there.
        reason: words, where the failure was not one of structure.
    """

    matched: int = 0
    wanted: Any = None
    found: Any = None
    reason: str | None = None

    def __str__(self) -> str:
        """The nearest miss in words."""
        if self.reason is not None:
            return self.reason
        return f"the pattern wants {_words(self.wanted)} where the graph has {_words(self.found)}"


def _words(value: Any) -> str:
    if isinstance(value, fx.Node):
        if value.op == "placeholder":
            return f"{value.name}"
        return f"{ops.op_name(value.target)} ({value.name})"
    return repr(value)


class Matcher:
    """One attempt to match a pattern at a graph node.

    Matching is by continuation: each step gets what remains to be matched as a function and
    succeeds only if that succeeds too, so exchanged operands and `either` backtrack completely.
    """

    LIMIT = 4000
    """Steps after which an attempt gives up, so that no pattern can take exponential time."""

    def __init__(self, pattern: Pattern) -> None:
        self.pattern = pattern
        self.bound = Bindings({}, {})
        self.miss = Miss()
        self.steps = 0
        self.chosen: dict[fx.Node, fx.Node] = {}

    def match(self, root: fx.Node, accept: Callable[[Bindings], str | None]) -> Bindings | None:
        """Match with the pattern's root at `root`.

        Args:
            root: graph node to start at.
            accept: has the last word on a structural match; returns why not, or None. Other
                spellings are tried when it refuses.

        Returns:
            The bindings, or None; `self.miss` then says how far it came.
        """
        rest = self.pattern.outputs[1:]

        def finish() -> bool:
            # A root spelled with `either` has no op of its own.
            self.bound.nodes.setdefault(self.pattern.outputs[0], root)
            for out in rest:
                if out not in self.bound.nodes:
                    self._find_beside(out)
            reason = accept(self.bound)
            if reason is not None:
                # A whole structure that was refused is always the nearest miss, unless the rule
                # says by an empty reason that it does not apply here at all.
                if reason == "":
                    self.miss = Miss()
                elif self.miss.reason is None or self.miss.matched < self.pattern.size:
                    self.miss = Miss(self.pattern.size, reason=reason)
                return False
            return True

        return self.bound if self._value(self.pattern.outputs[0], root, finish) else None

    def _find_beside(self, out: fx.Node) -> None:
        """Bind a result that the root does not read, such as the second of a pair; it may lack."""
        for source in out.all_input_nodes:
            known = self.bound.nodes.get(source) or self.chosen.get(source)
            for user in known.users if isinstance(known, fx.Node) else ():
                if user not in self.bound.nodes.values() and self._value(out, user, lambda: True):
                    return

    def _fail(self, wanted: Any, found: Any) -> bool:
        if len(self.bound.nodes) > self.miss.matched and self.miss.reason is None:
            self.miss = Miss(len(self.bound.nodes), wanted, found)
        return False

    def _value(self, want: Any, have: Any, then: Callable[[], bool]) -> bool:
        self.steps += 1
        if self.steps > self.LIMIT:
            return False
        if isinstance(want, fx.Node):
            if want.op == "placeholder":
                return self._capture(want, have, then)
            if want.target is either:
                self.chosen[want] = have
                return any(self._value(option, have, then) for option in want.args)
            return self._call(want, have, then)
        if isinstance(want, (list, tuple)):
            if not isinstance(have, (list, tuple)) or len(want) != len(have):
                return self._fail(want, have)
            return self._all(list(zip(want, have, strict=True)), then)
        return then() if _equal(want, have) else self._fail(want, have)

    def _all(self, pairs: list[tuple[Any, Any]], then: Callable[[], bool]) -> bool:
        for i, (want, have) in enumerate(pairs):
            if isinstance(want, (fx.Node, list, tuple)):
                rest = pairs[i + 1 :]
                return self._value(want, have, partial(self._all, rest, then) if rest else then)
            if not _equal(want, have):  # a constant: nothing to choose, no continuation
                return self._fail(want, have)
        return then()

    def _capture(self, want: fx.Node, have: Any, then: Callable[[], bool]) -> bool:
        name = str(want.target)
        if name.startswith("_"):
            return then()
        captures = self.bound.captures
        if name in captures:
            return then() if _equal(captures[name], have) else self._fail(captures[name], have)
        captures[name] = have
        if then():
            return True
        del captures[name]
        return False

    def _call(self, want: fx.Node, have: Any, then: Callable[[], bool]) -> bool:
        nodes = self.bound.nodes
        if want in nodes:
            return then() if nodes[want] is have else self._fail(nodes[want], have)
        if not isinstance(have, fx.Node) or have.target != want.target:
            return self._fail(want, have)
        wanted, had = _wanted(want), ops.arguments(have)
        orders = [had]
        if ops.is_commutative(want.target):
            orders.append((had[1], had[0], *had[2:]))
        for order in orders:
            nodes[want] = have
            if len(wanted) == len(order) and self._all(list(zip(wanted, order, strict=True)), then):
                return True
            del nodes[want]
        return False


def _wanted(node: fx.Node) -> tuple[Any, ...]:
    """The arguments of a pattern's node, which never change."""
    found: tuple[Any, ...] | None = node.meta.get("graphopt_arguments")
    if found is None:
        found = node.meta["graphopt_arguments"] = ops.arguments(node)
    return found


def _equal(a: Any, b: Any) -> bool:
    """Whether two constants or nodes are the same; True is not 1, and 2 is 2.0."""
    if isinstance(a, fx.Node) or isinstance(b, fx.Node):
        return a is b
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_equal, a, b))
    return bool(a == b)
