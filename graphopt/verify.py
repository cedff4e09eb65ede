"""Prove an optimized graph: each rewrite alone against what it replaced, then the whole step.

Every record of a rewrite holds the subgraph before and after. Both run on the values that the
captured graph meets there, forward and backward, in their own dtypes and in float64:

- in float64 the two must agree to 1e-9: a wrong formula, constant or axis shows there, whatever
  the precision of the model;
- in their own dtypes graphopt must keep the error contract (graphopt.numerics) beside eager.

The model is not touched: its parameters are read, never written, and generators are put back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from graphopt.graph.body import Body
from graphopt.graph.record import RewriteRecord
from graphopt.numerics import AGREEMENT
from graphopt.prover import Prover
from graphopt.replay import SEED
from graphopt.verdict import Check, VerifyResult

__all__ = ["AGREEMENT", "Check", "VerifyResult", "verify_body"]


def verify_body(
    captured: Body,
    optimized: Body,
    records: Sequence[RewriteRecord],
    inputs: Sequence[Any],
    *,
    backward: bool | None = None,
    seed: int = SEED,
    say: Callable[[str], None] = lambda text: None,
) -> VerifyResult:
    """Check every record of a pipeline run, and the whole graph before and after.

    Args:
        captured: the body before the passes.
        optimized: the body after them.
        records: what the passes did, in ordinal order, each with its two graphs.
        inputs: one value per placeholder of the body.
        backward: whether gradients are compared too; as the body was captured when None.
        seed: for dropout seeds, generators and the upstream gradients.
        say: takes the progress, "3 of 12 rewrites", one text at a time.

    Returns:
        The verdicts; call `.check()` to raise on a bad one.
    """
    backward = captured.grad if backward is None else backward
    count = f"of {len(records)} rewrites"
    say(f"0 {count}")

    def checked(check: Check) -> None:
        say(f"{len(prover.checks)} {count}")

    prover = Prover(captured, optimized, list(inputs), backward, seed, checked)
    graph, pending = captured.graph, list[RewriteRecord]()
    for record in sorted(records, key=lambda r: r.ordinal):
        if record.kind == "local":
            pending.append(record)
            continue
        prover.check_local(graph, pending)
        prover.check_global(record)
        graph, pending = record.replacement or graph, []
    prover.check_local(graph, pending)
    say("the whole step")
    whole = prover.check_whole()
    checks = sorted(prover.checks, key=lambda c: c.ordinal)
    return VerifyResult(tuple(checks), whole, tuple(prover.notes))
