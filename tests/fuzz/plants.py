"""Ways to make the optimizer wrong while a context is open."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager as Context
from typing import Any
from unittest import mock

import torch
from torch import fx

from graphopt.capture.entry import Entry
from graphopt.graph import facts
from graphopt.kernels import _norm_reference
from graphopt.passes import all_rules, clean
from graphopt.passes.rule import Match

Change = Callable[[Any, list[Any], dict[str, Any]], tuple[Any, list[Any], dict[str, Any]] | None]


class _Altered:
    """A match whose emitted calls are changed."""

    def __init__(self, match: Match, change: Change) -> None:
        self._match, self._change = match, change

    def __getattr__(self, name: str) -> Any:
        return getattr(self._match, name)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        given = list(args), dict(kwargs)
        changed = self._change(target, *given) or (target, *given)
        return self._match.call(changed[0], *changed[1], **changed[2])


def rule_named(name: str) -> Any:
    """A rule that ships with graphopt."""
    return next(r for r in all_rules() if r.name == name)


def altered(rule: str, change: Change) -> Callable[[], Context[Any]]:
    """A rule whose replacement is changed; a change in place may return None."""

    def plant() -> Context[Any]:
        found = rule_named(rule)
        right = found.replacement
        return mock.patch.object(found, "replacement", lambda m: right(_Altered(m, change)))

    return plant


def replaced(rule: str, wrong: Callable[[Any, Match], Any]) -> Callable[[], Context[Any]]:
    """A rule with another replacement, which is handed the right one."""

    def plant() -> Context[Any]:
        found = rule_named(rule)
        right = found.replacement
        return mock.patch.object(found, "replacement", lambda m: wrong(right, m))

    return plant


def unchecked(rule: str) -> Callable[[], Context[Any]]:
    """A rule that fires whenever its structure matches."""
    return lambda: mock.patch.object(rule_named(rule), "checks", [])


def patched(where: Any, name: str, wrong: Callable[..., Any]) -> Callable[[], Context[Any]]:
    """A function of graphopt's own in a wrong version, which is handed the right one."""

    def plant() -> Context[Any]:
        right = getattr(where, name)
        return mock.patch.object(where, name, lambda *a, **k: wrong(right, *a, **k))

    return plant


def argument(op: str, position: int, value: Callable[[Any], Any]) -> Change:
    """The emitted calls of an op get another value in one place."""

    def change(target: Any, args: list[Any], kwargs: dict[str, Any]) -> None:
        if op in str(target):
            args[position] = value(args[position])

    return change


def option(name: str, value: Any) -> Change:
    """Emitted calls that take an option get another value, None for its default."""

    def change(target: Any, args: list[Any], kwargs: dict[str, Any]) -> None:
        if name in kwargs:
            kwargs[name] = value

    return change


def swapped(first: int, second: int) -> Change:
    """Two arguments of the emitted calls change places."""

    def change(target: Any, args: list[Any], kwargs: dict[str, Any]) -> None:
        if max(first, second) < len(args):
            args[first], args[second] = args[second], args[first]

    return change


def constant_seed(right: Any, body: Any, editor: Any) -> fx.Node:
    node = right(body, editor)
    body.constants["seed"] = torch.tensor(1234)
    constant = editor.get_attr(f"{clean.CONSTANTS}.seed", node.meta["val"], like=node)
    editor.replace_uses(node, constant)
    return constant


def half_p(right: Any, body: Any, *rest: Any) -> int:
    count: int = right(body, *rest)
    for node in body.graph.nodes:
        if str(node.target) == "graphopt.dropout.default":
            node.update_arg(1, node.args[1] / 2)
    return count


def one_site(right: Any, body: Any, *rest: Any) -> int:
    count: int = right(body, *rest)
    for node in body.graph.nodes:
        if str(node.target) == "graphopt.dropout.default":
            node.update_arg(3, 0)
    return count


def norm_gradient(change: Callable[[list[Any]], None]) -> Callable[[], Context[Any]]:
    """The norms' backward with its arguments changed (x, dy, dsum, weight, bias, mean, ...)."""

    def wrong(right: Any, *args: Any) -> Any:
        given = list(args)
        change(given)
        return right(*given)

    return patched(_norm_reference, "backward", wrong)


def assign(at: int, value: Callable[[Any], Any]) -> Callable[[list[Any]], None]:
    def change(given: list[Any]) -> None:
        given[at] = value(given[at])

    return change


@contextlib.contextmanager
def no_user_check() -> Any:
    """Inside values may have other users: those are given the result of the fused op."""

    def erase(editor: Any, nodes: Any) -> None:
        new = [n for n in editor.graph.nodes if str(n.target).startswith("graphopt.")]
        for node in sorted(set(nodes), reverse=True):
            if node.users:
                node.replace_all_uses_with(new[-1])
            editor.graph.erase_node(node)

    from graphopt.passes import apply

    with (
        mock.patch.object(Match, "inside_use", return_value=None),
        mock.patch.object(apply.Editor, "erase", erase),
    ):
        yield


def frozen_state(right: Any, entry: Entry, state: Any, *rest: Any) -> Any:
    """The call runs on the state as it was at the first call, copied."""
    kept = entry.__dict__.setdefault("_planted", [t.detach().clone() for t in state])
    return right(entry, kept, *rest)


def literal_blind(right: Any, node: fx.Node) -> Any:
    """A key under which calls are equal whatever numbers they take."""
    target, args, marks = right(node)
    return target, tuple(a for a in args if isinstance(a, fx.Node)), marks


def fold_along_inputs(target: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """The folded weight is scaled as that of a transposed layer is."""
    return (target, [*args, True], kwargs) if "fold" in str(target) else None


def through_bf16(right: Any, m: Match) -> fx.Node:
    low = m.call(torch.ops.aten.to.dtype, m.x, torch.bfloat16)
    m.captures["x"] = m.call(torch.ops.aten.to.dtype, low, torch.float32)
    return right(m)


def through(value: Any) -> Any:
    floating = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.bfloat16().to(value.dtype) if floating else value


@contextlib.contextmanager
def copies_dropped() -> Any:
    """A copy is dropped wherever it stands: nothing leaves the graph, nothing is an input."""
    with (
        mock.patch.object(facts.Facts, "leaves", return_value=False),
        mock.patch.object(clean, "_is_given", return_value=False),
    ):
        yield
