"""What passes did and did not do, as data; reports, diffs and proofs read only this."""

from __future__ import annotations

import dataclasses
import os
import re
from typing import Any

import torch
from torch import fx

_TORCH = os.path.join(os.path.dirname(torch.__file__), "")
_HERE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
_FRAME = re.compile(
    r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<fn>\S+)\n\s+(?P<code>[^\n]*)'
)


@dataclasses.dataclass(frozen=True)
class Site:
    """Where a node comes from in the user's code.

    Attributes:
        module: path of the module that computed it ("layers.0.mlp"), "" for the root.
        module_class: class name of that module.
        file: source file of the innermost frame outside torch (the line that calls `self.norm(x)`,
            not one in torch's LayerNorm); torch's where there is no other, None where is none.
        line: line in that file.
        code: the text of that line.
    """

    module: str = ""
    module_class: str = ""
    file: str | None = None
    line: int | None = None
    code: str | None = None

    def __str__(self) -> str:
        """One phrase: module path and file:line, as far as known."""
        place = f"{self.file.rsplit('/', 1)[-1]}:{self.line}" if self.file else "no source line"
        return f"{self.module or 'the root module'} ({place})"

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True, repr=False)
class RewriteRecord:
    """One rewrite that was applied, with the subgraph that it replaced.

    Attributes:
        ordinal: position among all rewrites of the graph, from 0; `max_rewrites` counts these.
        pass_name: the pass that did it.
        rule: the rule's name ("add_rms_norm"), or the pass's for a global rewrite.
        kind: "local" (a rule fired on some nodes) or "global" (the whole graph was rewritten).
        nodes: names of the replaced nodes.
        inputs: names of the boundary values, parameters included.
        outputs: names of the old nodes whose values live on.
        new_outputs: names of the nodes that took their place, in the same order.
        site: where the replaced root node came from.
        ops_before: op names of the replaced nodes.
        ops_after: op names of the new nodes.
        bytes_before: bytes read and written by the replaced nodes, each run as a kernel.
        bytes_after: the same for the new nodes.
        reference: the replaced subgraph, runnable: placeholders in the order of `inputs`, a tuple
            in the order of `outputs`. The whole graph before, for a global rewrite.
        replacement: the new subgraph in the same calling convention; the whole graph after.
    """

    ordinal: int
    pass_name: str
    rule: str
    kind: str
    nodes: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    new_outputs: tuple[str, ...]
    site: Site
    ops_before: tuple[str, ...]
    ops_after: tuple[str, ...]
    bytes_before: int = 0
    bytes_after: int = 0
    reference: fx.Graph | None = dataclasses.field(default=None, repr=False, compare=False)
    replacement: fx.Graph | None = dataclasses.field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        """One line for a table or a log."""
        return f"#{self.ordinal} {self.rule} at {self.site}"

    def __repr__(self) -> str:
        """One line: rule, place, ops before and after, bytes saved."""
        if self.kind == "global":
            what = f"the whole graph by pass {self.pass_name}"
        else:
            before, after = map(", ".join, (self.ops_before, self.ops_after))
            what = f"at {self.site}: {before} -> {after or 'nothing new'}"
        saved = self.bytes_before - self.bytes_after
        return f"<rewrite #{self.ordinal} {self.rule} {what}; {saved} bytes saved>"

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; the graphs are left out."""
        skip = {"reference", "replacement", "site"}
        data = {
            f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in skip
        }
        return {**data, "site": self.site.to_dict()}


@dataclasses.dataclass(frozen=True, repr=False)
class Refusal:
    """A rule that came near and did not fire, and why.

    Attributes:
        rule: the rule's name.
        reason: why it did not fire, in words, with the nearest miss.
        site: where the root of the match came from.
        node: name of the root node.
        matched: how many of the pattern's ops were matched.
        total: how many ops the pattern has.
    """

    rule: str
    reason: str
    site: Site
    node: str
    matched: int
    total: int

    def __str__(self) -> str:
        """One line for a table or a log."""
        count = f"({self.matched} of {self.total} ops matched)"
        return f"{self.rule} at {self.site}: {self.reason} {count}"

    def __repr__(self) -> str:
        """The same line, marked as an object."""
        return f"<refusal {self}>"

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return dataclasses.asdict(self)


def site_of(node: fx.Node) -> Site:
    """Provenance of a node, from the metadata that `torch.export` left on it.

    Example:
        >>> site_of(fx.Graph().placeholder("x"))
        Site(module='', module_class='', file=None, line=None, code=None)
    """
    path, cls = "", ""
    stack = node.meta.get("nn_module_stack")
    if stack:
        path, kind = list(stack.values())[-1]
        cls = kind if isinstance(kind, str) else getattr(kind, "__name__", str(kind))
        cls = cls.rsplit(".", 1)[-1]
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    if not frames:
        return Site(path, cls)
    # A frame of torch's own modules tells a user nothing; the line that called them does.
    frames = [f for f in frames if not f[0].startswith(_HERE)]
    if not frames:
        return Site(path, cls)
    outside = [f for f in frames if not f[0].startswith(_TORCH)]
    file, line, _fn, code = (outside or frames)[-1]
    return Site(path, cls, file, int(line), code.strip())
