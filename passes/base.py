"""What a pass and a rule are, and the log that both write to."""

from __future__ import annotations

import dataclasses
import importlib
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import fx

import graphopt.kernels  # noqa: F401  (defines the ops that rules emit)
from graphopt.cost.ops import nodes_cost
from graphopt.errors import GraphOptError, PassError
from graphopt.graph import ops
from graphopt.graph.body import Body, copy_graph
from graphopt.graph.edit import MARKS, Editor
from graphopt.graph.pattern import Bindings, Matcher, Pattern
from graphopt.graph.record import Refusal, RewriteRecord, Site, site_of


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
        """Pickle as the place where the rule is defined."""
        return _rule_at, (self.module, self.functions[0].__name__)

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
        ValueError: when a rule of that name exists already.
    """

    def decorate(function: Callable[..., Any]) -> Rule:
        made = Rule(function, family, before)
        if register:
            if made.name in REGISTRY:
                raise ValueError(f"two rules are called {made.name!r}")
            REGISTRY[made.name] = made
        return made

    return decorate


@dataclasses.dataclass
class Log:
    """What the passes of one pipeline run did, and how much they still may do.

    Attributes:
        max_rewrites: stop after so many rewrites; None for no limit.
        rewrites: records in the order in which they were applied.
        refusals: near misses by (rule, node name); the furthest is kept.
    """

    max_rewrites: int | None = None
    rewrites: list[RewriteRecord] = dataclasses.field(default_factory=list)
    refusals: dict[tuple[str, str], Refusal] = dataclasses.field(default_factory=dict)

    @property
    def room(self) -> bool:
        """Whether another rewrite may be applied."""
        return self.max_rewrites is None or len(self.rewrites) < self.max_rewrites

    def refuse(self, refusal: Refusal) -> None:
        """Keep a near miss, unless a nearer one is known for the same rule and node."""
        key = (refusal.rule, refusal.node)
        known = self.refusals.get(key)
        if known is None or known.matched <= refusal.matched:
            self.refusals[key] = refusal

    def add_global(self, name: str, before: fx.Graph, body: Body, dropped: Iterable[str]) -> None:
        """Record a rewrite of the whole graph."""
        inputs = tuple(n.name for n in before.nodes if n.op in ("placeholder", "get_attr"))
        self.rewrites.append(
            RewriteRecord(
                ordinal=len(self.rewrites),
                pass_name=name,
                rule=name,
                kind="global",
                nodes=tuple(dropped),
                inputs=inputs,
                outputs=("output",),
                new_outputs=("output",),
                site=Site(),
                ops_before=(),
                ops_after=(),
                bytes_before=nodes_cost(before.nodes).bytes,
                bytes_after=nodes_cost(body.graph.nodes).bytes,
                reference=before,
                replacement=copy_graph(body.graph),
            )
        )


class Pass(Protocol):
    """A pass: a frozen dataclass whose fields are its options; valid graph in, valid graph out."""

    @property
    def name(self) -> str:
        """Name in records, dumps and messages."""

    def run(self, body: Body, log: Log) -> None:
        """Rewrite the body's graph in place and record what was done."""


@dataclasses.dataclass(frozen=True)
class ApplyRules:
    """The pass that applies rules until none fires, the largest pattern first.

    Attributes:
        family: name of the pass in records.
        rules: the rules to apply.
        rounds: how often all rules are tried again after one fired.
    """

    family: str
    rules: tuple[Rule, ...]
    rounds: int = 4

    @property
    def name(self) -> str:
        """The family's name."""
        return self.family

    def order(self) -> list[tuple[Pattern, Rule]]:
        """Patterns as they are tried: larger ones first, save where a rule goes before others."""
        largest = {r.name: max(p.size for p in r.patterns) for r in self.rules}

        def rank(pair: tuple[Pattern, Rule]) -> int:
            pattern, r = pair
            return max([pattern.size, *(largest[n] + 1 for n in r.before if n in largest)])

        return sorted(((p, r) for r in self.rules for p in r.patterns), key=lambda t: -rank(t))

    def run(self, body: Body, log: Log) -> None:
        """Apply the rules."""
        tries = self.order()
        for _ in range(self.rounds):
            index: dict[Any, list[fx.Node]] = {}
            for node in body.graph.nodes:
                if node.op == "call_function":
                    index.setdefault(node.target, []).append(node)
            before = len(log.rewrites)
            for pattern, r in tries:
                for target in pattern.targets:
                    for node in index.get(target, ()):
                        if not log.room:
                            return
                        if not node._erased and pattern.may_match(node):
                            made = apply_rule(r, pattern, node, body, log, self.name)
                            for new in made:
                                index.setdefault(new.target, []).append(new)
            if len(log.rewrites) == before:
                return


def apply_rule(
    r: Rule, pattern: Pattern, root: fx.Node, body: Body, log: Log, pass_name: str
) -> list[fx.Node]:
    """Try one rule at one node; returns the nodes that it made.

    A match that fails late is kept in the log as a refusal when it bound more than half of the
    pattern; a structure that matched wholly but was refused is always kept.

    Raises:
        PassError: when the rule's own code raises.
    """
    matcher = Matcher(pattern)
    found: list[Match] = []

    def accept(bound: Bindings) -> str | None:
        m = Match(r, pattern, bound, body)
        reason = m.inside_use() or m.mixed_regions()
        for check in [] if reason else r.checks:
            reason = _guarded(r, root, check, m)
            if reason is not None:
                return reason
        if reason is None and m.insertion_point() is None:
            reason = "an input is computed only after a result is already used"
        if reason is None:
            found.append(m)
        return reason

    if matcher.match(root, accept) is None:
        miss = matcher.miss
        if miss.reason is not None or miss.matched * 2 > pattern.size > 3:
            site = site_of(root)
            log.refuse(Refusal(r.name, str(miss), site, root.name, miss.matched, pattern.size))
        return []
    log.refusals.pop((r.name, root.name), None)
    return _replace(found[-1], log, pass_name)


def _guarded(r: Rule, root: fx.Node, function: Callable[[Match], Any], m: Match) -> Any:
    """Run a rule's own code; what it raises names the rule and the place."""
    try:
        return function(m)
    except GraphOptError:
        raise
    except Exception as error:
        raise PassError(
            f"rule {r.name} raised {type(error).__name__}: {error}",
            at=str(site_of(root)),
            why=f"its code in {r.module} failed on {root.name}; the model is as it was",
            try_=f"rules='default,-{r.name}' switches it off",
        ) from error


def _replace(m: Match, log: Log, pass_name: str) -> list[fx.Node]:
    r = m.rule
    assert r.replacement is not None, f"rule {r.name} has no replacement"
    inputs, old, site = m.inputs, m.nodes, site_of(m.root)
    cost_before = nodes_cost(old).bytes
    m.open()
    result = _guarded(r, m.root, r.replacement, m)
    new = result if isinstance(result, tuple) else (result,)
    _check_results(m, new)
    for extra in (n for node in m.created for n in node.all_input_nodes):
        if extra not in inputs and extra not in m.created:
            inputs.append(extra)
    names = tuple(n.name for n in m.outputs)
    record = RewriteRecord(
        ordinal=len(log.rewrites),
        pass_name=pass_name,
        rule=r.name,
        kind="local",
        nodes=tuple(n.name for n in old),
        inputs=tuple(n.name for n in inputs),
        outputs=names,
        new_outputs=tuple(n.name for n in new),
        site=site,
        ops_before=tuple(ops.op_name(n.target) for n in old),
        ops_after=tuple(ops.op_name(n.target) for n in m.created),
        bytes_before=cost_before,
        bytes_after=nodes_cost(m.created).bytes,
        reference=lift(old, inputs, m.outputs),
        replacement=lift(m.created, inputs, new),
    )
    editor = Editor(m.body.graph, r.name)
    for before, after in zip(m.outputs, new, strict=True):
        if before is not after:
            editor.replace_uses(before, after)
    editor.erase(old)
    log.rewrites.append(record)
    return [n for n in m.created if not n._erased]


def _check_results(m: Match, new: tuple[Any, ...]) -> None:
    """A replacement must have the shape and dtype of what it replaces."""
    if len(new) != len(m.outputs):
        raise PassError(
            f"rule {m.rule.name} returned {len(new)} values for {len(m.outputs)} results",
            at=str(site_of(m.root)),
        )
    for before, after in zip(m.outputs, new, strict=True):
        a, b = before.meta["val"], after.meta["val"]
        if a.dtype != b.dtype or not same_shape(a, b):
            raise PassError(
                f"rule {m.rule.name} gives {b.dtype}{list(b.shape)} where the model has "
                f"{a.dtype}{list(a.shape)}",
                at=str(site_of(before)),
                try_=f"rules='default,-{m.rule.name}' switches the rule off",
            )


def same_shape(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two fake tensors surely have the same shape; adds no guard on symbolic sizes."""
    return len(a.shape) == len(b.shape) and all(
        surely(x == y) for x, y in zip(a.shape, b.shape, strict=True)
    )


def surely(condition: Any) -> bool:
    """Whether a condition on symbolic sizes holds for all sizes, as far as can be told."""
    if isinstance(condition, bool):
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return bool(statically_known_true(condition))


def lift(nodes: list[fx.Node], inputs: list[fx.Node], outputs: tuple[fx.Node, ...]) -> fx.Graph:
    """Some nodes as a graph of their own: placeholders for the inputs, a tuple of outputs."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        env[node] = graph.placeholder(node.name)
        env[node].meta = dict(node.meta)
    for node in nodes:
        env[node] = graph.node_copy(node, env.__getitem__)
    graph.output(tuple(env[n] for n in outputs))
    return graph


class Timer:
    """Wall-clock seconds of a block, for the pipeline's stages."""

    def __enter__(self) -> Timer:
        """Start."""
        self.start = time.perf_counter()
        return self

    def __exit__(self, *exc: object) -> None:
        """Stop."""
        self.seconds = time.perf_counter() - self.start
