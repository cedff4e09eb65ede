"""The rules that every graph keeps between passes, as data: one row a rule."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import torch
from torch import fx

from graphopt.errors import PassError
from graphopt.graph import ops
from graphopt.graph.body import Body
from graphopt.graph.record import site_of


@dataclasses.dataclass(frozen=True)
class Violation:
    """One node that breaks one rule."""

    rule: str
    node: str
    message: str


def _has_value(node: fx.Node) -> str | None:
    if node.op != "output" and "val" not in node.meta:
        return "has no metadata `val`"
    return None


def _known_op(node: fx.Node) -> str | None:
    if node.op in ("call_module", "call_method"):
        return f"is a {node.op}; a body holds placeholders, get_attr, call_function and output"
    return None


def _functional(node: fx.Node) -> str | None:
    if ops.is_mutating(node):
        return f"{ops.op_name(node.target)} writes into an operand"
    return None


def _no_higher_order(node: fx.Node) -> str | None:
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return f"{node.target} holds a submodule; it is inlined or refused at capture"
    return None


def _used(node: fx.Node) -> str | None:
    if node.op in ("call_function", "get_attr") and not node.users and ops.is_pure(node):
        return "is dead"
    return None


def _complex_arguments(node: fx.Node) -> str | None:
    if node.op == "call_function":
        names = ops.parameters(node.target)
        if names is not None and len(node.args) > len(names):
            return f"has {len(node.args)} arguments, its schema {len(names)}"
    return None


RULES: tuple[tuple[str, Callable[[fx.Node], str | None]], ...] = (
    ("metadata", _has_value),
    ("node kinds", _known_op),
    ("functional", _functional),
    ("no higher-order ops", _no_higher_order),
    ("no dead nodes", _used),
    ("schema", _complex_arguments),
)
"""Name and check of each rule; a check returns what is wrong with a node, or None."""


def violations(body: Body, *, skip: tuple[str, ...] = ()) -> Iterator[Violation]:
    """Every broken rule of a body's graph.

    Args:
        body: the body to look at.
        skip: names of rules that may be broken for now.
    """
    seen: set[fx.Node] = set()
    seeds = 0
    for node in body.graph.nodes:
        for name, check in RULES:
            message = None if name in skip else check(node)
            if message is not None:
                yield Violation(name, node.name, message)
        for source in node.all_input_nodes:
            if source not in seen:
                yield Violation("order", node.name, f"reads {source.name} before it is made")
        seen.add(node)
        seeds += ops.is_draw_seed(node)
    if seeds > 1:
        yield Violation("one seed", "", f"{seeds} nodes draw a seed; a forward draws one")
    outputs = body.output.args[0]
    if not isinstance(outputs, (tuple, list)):
        yield Violation("flat output", "output", "the output is not one flat tuple")
    elif len(outputs) != body.user_outputs + len(body.mutations):
        yield Violation(
            "flat output",
            "output",
            f"{len(outputs)} outputs, but {body.user_outputs} of the user's and "
            f"{len(body.mutations)} mutations",
        )


def check(body: Body, after: str, *, skip: tuple[str, ...] = ()) -> None:
    """Raise for the first broken rule.

    Args:
        body: the body to look at.
        after: the pass that ran last, for the message.
        skip: names of rules that may be broken for now.

    Raises:
        PassError: naming the pass, the rule and the node.
    """
    for v in violations(body, skip=skip):
        node = next((n for n in body.graph.nodes if n.name == v.node), None)
        raise PassError(
            f"the graph breaks the rule '{v.rule}' after {after}: {v.node} {v.message}",
            at=str(site_of(node)) if node is not None else None,
            why="a pass takes a valid graph and leaves a valid graph",
            try_="GRAPHOPT_PRINT=changes shows the pass's change; report it as a bug of that pass",
        )
