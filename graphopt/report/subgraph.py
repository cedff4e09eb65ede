"""The two subgraphs of a rewrite as code: what was there, and what took its place."""

from __future__ import annotations

import dataclasses
import difflib

from torch import fx, nn

from graphopt.graph.body import Body
from graphopt.graph.record import RewriteRecord
from graphopt.graph.text import function_code

SHOWN = 60
"""Lines of a whole graph's diff that are shown."""


def code_of(graph: fx.Graph | None, name: str, captured: Body | None = None) -> str:
    """One subgraph of a record as a Python function.

    Args:
        graph: a record's `reference` or `replacement`.
        name: the function's name.
        captured: the body that a whole graph belongs to; None for a part, which reads no state.
    """
    if graph is None:
        return ""
    if captured is not None:
        return function_code(dataclasses.replace(captured, graph=graph), name)
    count = len(next(iter(reversed(graph.nodes))).args[0])
    return function_code(Body(graph, nn.Module(), count), name, owner=())


def change_of(record: RewriteRecord, captured: Body) -> str:
    """What a rewrite of the whole graph changed, as a diff of at most `SHOWN` lines."""
    before, after = (
        code_of(graph, "forward", captured).splitlines()
        for graph in (record.reference, record.replacement)
    )
    diff = list(difflib.unified_diff(before, after, "before", "after", lineterm="", n=1))
    more = [f"... and {len(diff) - SHOWN} lines more"] if len(diff) > SHOWN else []
    return "\n".join([*diff[:SHOWN], *more])
