"""Before and after, module by module, with equal blocks folded into one."""

from __future__ import annotations

import dataclasses
import difflib
import operator
import re
from collections.abc import Iterable, Iterator
from typing import Any

from torch import fx

from graphopt.graph.body import CONSTANTS, Body
from graphopt.graph.record import RewriteRecord, site_of
from graphopt.graph.text import base_name, identifier, results_of, state_text, statement, unpacked
from graphopt.options import names_checked
from graphopt.remat import is_marker
from graphopt.report.fold import fold, fold_text
from graphopt.report.subject import Subject, subject_of
from graphopt.report.view import Code, Part, html_fragment, html_page, plain

SCHEMA = "graphopt.diff/1"
"""Name and version of the JSON: the number rises when a key goes or changes its meaning."""

_SITE = frozenset({"site"})
"""Arguments that number the places of random numbers, and so differ from block to block."""
_INDEX = re.compile(r"\[\d+\]")


@dataclasses.dataclass(frozen=True)
class ModuleDiff:
    """What became of one module, or of equal modules of repeated blocks.

    Attributes:
        where: module path, the numbers that differ replaced by a star; "" for the root.
        modules: every module path behind it.
        rules: the rules that made its new ops.
        before: one line of code for each op as captured.
        after: the same, optimized.
        ops_before: ops as captured; taking one of several results is a line, but no op.
        ops_after: ops as optimized.
    """

    where: str
    modules: tuple[str, ...]
    rules: tuple[str, ...]
    before: tuple[str, ...]
    after: tuple[str, ...]
    ops_before: int
    ops_after: int

    @property
    def count(self) -> int:
        """How many equal modules there are."""
        return len(self.modules)

    @property
    def title(self) -> str:
        """One line: module, number of equal ones, ops before and after, rules."""
        times = f" x{self.count}" if self.count > 1 else ""
        rules = f"   {', '.join(self.rules)}" if self.rules else ""
        ops = f"{self.ops_before} ops -> {self.ops_after}"
        return f"@@ {self.where or '(root)'}{times}   {ops}{rules}"

    def lines(self, context: int = 1) -> list[str]:
        """The diff: "-" was there, "+" took its place, " " stayed.

        Args:
            context: how many lines that stayed are shown around each change.
        """
        matcher = difflib.SequenceMatcher(a=self.before, b=self.after, autojunk=False)
        lines: list[str] = []
        end = 0
        for group in matcher.get_grouped_opcodes(context):
            lines += ["  ..."] if group[0][1] > end else []
            end = group[-1][2]
            for kind, a0, a1, b0, b1 in group:
                if kind == "equal":
                    lines += [f"  {line}" for line in self.before[a0:a1]]
                else:
                    lines += [f"- {line}" for line in self.before[a0:a1]]
                    lines += [f"+ {line}" for line in self.after[b0:b1]]
        return lines + (["  ..."] if end < len(self.before) else [])

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        data = {k: list(v) if isinstance(v, tuple) else v for k, v in vars(self).items()}
        return {**data, "count": self.count, "diff": self.lines()}


@dataclasses.dataclass(frozen=True, repr=False)
class DiffResult:
    """Before and after, by module. Its repr is a unified diff.

    Attributes:
        model: class name of the model.
        mode: "train" or "eval".
        inputs: one text per tensor input.
        ops_before: ops in the captured graph.
        ops_after: ops in the optimized graph.
        changed: what changed, in the order of the forward.
        unchanged: paths of the modules that stayed as they were.
    """

    model: str
    mode: str
    inputs: tuple[str, ...]
    ops_before: int
    ops_after: int
    changed: tuple[ModuleDiff, ...]
    unchanged: tuple[str, ...]

    def parts(self) -> list[Part]:
        """What is shown, in order."""
        parts: list[Part] = [
            f"{self.model}  {self.mode}  {', '.join(self.inputs)}   "
            f"{self.ops_before} ops -> {self.ops_after}\n--- captured\n+++ optimized"
        ]
        parts += [Code("\n".join(m.lines()), m.title, diff=True) for m in self.changed]
        if not self.changed:
            parts.append("nothing changed")
        if self.unchanged:
            parts.append(f"unchanged: {fold_text(self.unchanged, limit=40)}")
        return parts

    def __repr__(self) -> str:
        """The diff as plain text."""
        return plain(self.parts())

    def _repr_html_(self) -> str:
        return html_fragment(self.parts())

    def html(self) -> str:
        """The diff as one HTML file that needs no network."""
        return html_page(f"graphopt diff: {self.model}", self.parts())

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        data = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        changed = [m.to_dict() for m in self.changed]
        return {"schema": SCHEMA, **data, "changed": changed, "unchanged": list(self.unchanged)}


@names_checked
def diff(opt: Any) -> DiffResult:
    """What the passes changed in the graph in force, module by module.

    An op stands under the module that it came from; a fused op stands where the last op of its
    chain stood, so the ops that it took in show as "-" under their own modules. Equal changes in
    repeated blocks are one entry ("h.*.mlp x12").

    Args:
        opt: what `optimize` or `attach` returned, with a graph captured.

    Returns:
        The changes; printing it shows them, `.html()` is a page, `.to_dict()` plain data.

    Raises:
        OptionError: when it is no optimized module.
        GraphOptError: when there is no graph yet.

    Example:
        >>> diff(opt).changed[0].where  # doctest: +SKIP
        'h.*.mlp'
    """
    return diff_of(subject_of(opt, "diff"))


def diff_of(subject: Subject) -> DiffResult:
    """The diff of a graph that is at hand."""
    before, after = subject.before, subject.after
    names = _Names(before, after, subject.result.rewrites)
    old, new = names.lines(before), names.lines(after)
    groups: dict[tuple[Any, ...], list[str]] = {}
    unchanged: list[str] = []
    rules: dict[str, tuple[str, ...]] = _rules_of(after)
    for path in names.paths:
        a, b = old.get(path, ()), new.get(path, ())
        if [line.key for line in a] == [line.key for line in b]:
            unchanged.append(path)
            continue
        stars = ".".join("*" if p.isdigit() else p for p in path.split("."))
        key = (stars, tuple(x.key for x in a), tuple(x.key for x in b), rules.get(path, ()))
        groups.setdefault(key, []).append(path)
    changed = tuple(
        ModuleDiff(
            where=next(iter(fold(paths))),
            modules=tuple(paths),
            rules=key[3],
            before=_shown(old.get(paths[0], ()), len(paths)),
            after=_shown(new.get(paths[0], ()), len(paths)),
            ops_before=_count(old.get(paths[0], ())),
            ops_after=_count(new.get(paths[0], ())),
        )
        for key, paths in groups.items()
    )
    return DiffResult(
        model=subject.model,
        mode=subject.mode,
        inputs=subject.inputs,
        ops_before=sum(map(_count, old.values())),
        ops_after=sum(map(_count, new.values())),
        changed=changed,
        unchanged=tuple(unchanged),
    )


@dataclasses.dataclass(frozen=True)
class _Line:
    """One op: its code, and the same with everything starred that numbers the block."""

    text: str
    key: str
    is_op: bool


class _Names:
    """What values are called in each module: the same before and after, and in each block.

    A name is numbered within its module, so that equal blocks read alike. A value from outside is
    called after the module or op that made it. A value that takes the place of another one keeps
    its name, so that the lines that read it do not change.
    """

    def __init__(self, before: Body, after: Body, rewrites: Iterable[RewriteRecord]) -> None:
        self.base: dict[str, str] = {}
        self.module: dict[str, str] = {}
        self.paths: dict[str, None] = {}
        self.given: dict[str, dict[str, str]] = {}
        self.same: dict[str, str] = {}
        for r in rewrites:
            if r.kind == "local":
                for old, new in zip(r.outputs, r.new_outputs, strict=True):
                    self.same.setdefault(new, self.same.get(old, old))
        self.same.update(_successors(self._see(before), self._see(after), self.same))

    def _see(self, body: Body) -> dict[tuple[str, str], list[str]]:
        """Name the values of a body; gives its ops by module and name."""
        results = results_of(body.graph)
        found: dict[tuple[str, str], list[str]] = {}
        for node in body.graph.nodes:
            if node.op == "call_function" and not is_marker(node):
                path = self.module.setdefault(node.name, site_of(node).module)
                base = self.base.setdefault(node.name, identifier(base_name(node, results)))
                self.paths.setdefault(path)
                found.setdefault((path, base), []).append(node.name)
            elif node.op == "placeholder":
                self.base.setdefault(node.name, identifier(str(node.target)))
        return found

    def lines(self, body: Body) -> dict[str, list[_Line]]:
        """The code of a body by module path."""
        found: dict[str, list[_Line]] = {}
        skip: set[fx.Node] = set()
        for node in body.graph.nodes:
            if node.op != "call_function" or node in skip:
                continue
            items = unpacked(node)
            skip.update(items or ())
            path = site_of(node).module
            names = {n: self._name(n, path, body) for n in _met(node, items)}
            text = statement(node, names, items)
            starred = {n: self._starred(t, n) for n, t in names.items()}
            key = statement(node, starred, items, _SITE)
            counts = node.target is not operator.getitem and not is_marker(node)
            found.setdefault(path, []).append(_Line(text, key, counts))
        return found

    def _starred(self, name: str, node: fx.Node) -> str:
        """A name without the number of its block: "layers_3" is the result of module layers.3."""
        if node.op == "get_attr":
            return _INDEX.sub("[*]", name)
        made = self.module.get(self.same.get(node.name, node.name), "")
        part = made.rpartition(".")[2]
        return re.sub(rf"_{part}(?=$|_)", "_*", name, count=1) if part.isdigit() else name

    def _name(self, node: fx.Node, path: str, body: Body) -> str:
        if node.op == "get_attr":
            target = str(node.target)
            # A constant's own name counts the constants of the whole graph.
            return "constant" if target.startswith(CONSTANTS + ".") else state_text(body, target)
        name = self.same.get(node.name, node.name)
        given = self.given.setdefault(path, {})
        if name not in given:
            base = self.base.get(name, self.base[node.name])
            taken, count = set(given.values()), 0
            text = base
            while text in taken:
                count += 1
                text = f"{base}_{count}"
            given[name] = text
        return given[name]


def _successors(
    old: dict[tuple[str, str], list[str]],
    new: dict[tuple[str, str], list[str]],
    known: dict[str, str],
) -> dict[str, str]:
    """New op -> the op of its module and name that is gone, where they pair up one to one."""
    same: dict[str, str] = {}
    taken = set(known.values())
    for place, names in old.items():
        there = new.get(place, [])
        gone = [n for n in names if n not in there and n not in taken]
        fresh = [n for n in there if n not in names and n not in known]
        if len(gone) == len(fresh):
            same.update(zip(fresh, gone, strict=True))
    return same


def _met(node: fx.Node, items: list[fx.Node] | None) -> Iterator[fx.Node]:
    """The nodes that a line names, operands first."""
    yield from node.all_input_nodes
    if not is_marker(node):
        yield node
    yield from items or ()


def _shown(lines: Iterable[_Line], count: int) -> tuple[str, ...]:
    return tuple(line.key if count > 1 else line.text for line in lines)


def _count(lines: Iterable[_Line]) -> int:
    return sum(line.is_op for line in lines)


def _rules_of(body: Body) -> dict[str, tuple[str, ...]]:
    """The rules that made the ops of each module."""
    found: dict[str, dict[str, None]] = {}
    for node in body.graph.nodes:
        rule = node.meta.get("graphopt_rule")
        if node.op == "call_function" and rule and node.target is not operator.getitem:
            found.setdefault(site_of(node).module, {}).setdefault(str(rule))
    return {path: tuple(rules) for path, rules in found.items()}
