"""The pass that applies rules: where each may fire, what it replaces, and the record of it."""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable
from typing import Any

from torch import fx

from graphopt.errors import GraphOptError, PassError
from graphopt.graph.body import Body
from graphopt.graph.edit import Editor
from graphopt.graph.pattern import Bindings, Matcher, Pattern
from graphopt.graph.record import Refusal, site_of
from graphopt.passes.base import Log, same_shape
from graphopt.passes.payoff import Balance, balance_of
from graphopt.passes.rule import Match, Rule, leaving_out
from graphopt.passes.strides import settle


@dataclasses.dataclass(frozen=True)
class ApplyRules:
    """The pass that applies rules until none fires, the largest pattern first.

    Attributes:
        family: name of the pass in records.
        rules: the rules to apply.
        rounds: how often all rules are tried again after one fired.
        judged: leave rewrites out that would make a step slower, see `payoff`.
    """

    family: str
    rules: tuple[Rule, ...]
    rounds: int = 4
    judged: bool = False

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
        balance = balance_of(body) if self.judged else None
        for _ in range(self.rounds):
            index: dict[Any, list[fx.Node]] = {}
            for node in body.graph.nodes:
                if node.op == "call_function":
                    index.setdefault(node.target, []).append(node)
            before = len(log.rewrites)
            for pattern, r in tries:
                for target in pattern.targets:
                    # A copy: a rule that makes what it matches must not run on for ever.
                    for node in list(index.get(target, ())):
                        if not log.room:
                            return
                        if not node._erased and pattern.may_match(node):
                            made = apply_rule(r, pattern, node, body, log, self.name, balance)
                            for new in made:
                                index.setdefault(new.target, []).append(new)
            if len(log.rewrites) == before:
                return


def apply_rule(
    r: Rule,
    pattern: Pattern,
    root: fx.Node,
    body: Body,
    log: Log,
    pass_name: str,
    balance: Balance | None = None,
) -> list[fx.Node]:
    """Try one rule at one node; returns the nodes that it made.

    A match that fails late is kept in the log as a refusal when it bound more than half of the
    pattern; a structure that matched wholly but was refused is always kept, as is a rewrite that
    does not pay.

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
            if reason is not None and not isinstance(reason, str):
                raise PassError(
                    f"a check of rule {r.name} returned {reason!r}",
                    at=str(site_of(root)),
                    try_="None where the rule may fire, a text that says why not where it may not",
                )
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
    return _replace(found[-1], log, pass_name, balance)


def _guarded(r: Rule, root: fx.Node, function: Callable[[Match], Any], m: Match) -> Any:
    """Run a rule's own code; what it raises names the rule and the place."""
    try:
        return function(m)
    except GraphOptError:
        raise
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise PassError(
            f"rule {r.name} raised {type(error).__name__}: {error}",
            at=str(site_of(root)),
            why=f"{last.filename}:{last.lineno} in {last.name} failed on {root.name}; "
            "the model is as it was",
            try_=leaving_out(r.name),
        ) from error


def _replace(m: Match, log: Log, pass_name: str, balance: Balance | None) -> list[fx.Node]:
    r = m.rule
    assert r.replacement is not None, f"rule {r.name} has no replacement"
    inputs, old, site = m.inputs, m.nodes, site_of(m.root)
    m.open()
    result = _guarded(r, m.root, r.replacement, m)
    new = result if isinstance(result, tuple) else (result,)
    _check_results(m, new)
    reason = balance.refuses(old, m.created) if balance is not None else None
    if reason is not None:
        Editor(m.body.graph, r.name).erase(m.created)
        log.refuse(Refusal(r.name, reason, site, m.root.name, len(old), m.pattern.size))
        return []
    for extra in (n for node in m.created for n in node.all_input_nodes):
        if extra not in inputs and extra not in m.created:
            inputs.append(extra)
    log.add_local(pass_name, r.name, old, inputs, m.outputs, m.created, new, site=site)
    editor = Editor(m.body.graph, r.name)
    for before, after in zip(m.outputs, new, strict=True):
        if before is not after:
            editor.replace_uses(before, after)
            settle(after, before, Editor(m.body.graph), made=after in m.created)
    editor.erase(old)
    return [n for n in m.created if not n._erased]


def _check_results(m: Match, new: tuple[Any, ...]) -> None:
    """A replacement must have the shape and dtype of what it replaces."""
    if len(new) != len(m.outputs):
        raise PassError(
            f"rule {m.rule.name} returned {len(new)} values for {len(m.outputs)} results",
            at=str(site_of(m.root)),
            try_="return one node for each result of the pattern",
        )
    for before, after in zip(m.outputs, new, strict=True):
        if not isinstance(after, fx.Node):
            raise PassError(
                f"rule {m.rule.name} returned a {type(after).__name__}, not a node",
                at=str(site_of(before)),
                try_="return m.call(...)",
            )
        if after.graph is not m.body.graph:
            raise PassError(
                f"rule {m.rule.name} returned a node of another graph",
                at=str(site_of(before)),
                try_="return m.call(...), or a capture such as m.x",
            )
        a, b = before.meta["val"], after.meta["val"]
        if a.dtype != b.dtype or not same_shape(a, b):
            raise PassError(
                f"rule {m.rule.name} gives {b.dtype}{list(b.shape)} where the model has "
                f"{a.dtype}{list(a.shape)}",
                at=str(site_of(before)),
                try_=leaving_out(m.rule.name),
            )
