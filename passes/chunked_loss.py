"""For tight memory: the last linear layer and its cross entropy, in chunks of rows."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import fx

from graphopt.graph.body import Body
from graphopt.kernels.linear_cross_entropy import CHUNK_BYTES
from graphopt.passes.apply import apply_rule
from graphopt.passes.base import Log
from graphopt.passes.rule import Match, Rule, rule

aten = torch.ops.aten
graphopt = torch.ops.graphopt


@dataclasses.dataclass(frozen=True)
class ChunkLoss:
    """The pass: logits and their gradient are never whole, for one more product in backward.

    It is not among the passes that run by default, and runs after those of fusion. Where the logits
    are a result of the model they are still computed, but backward does not keep them.

    Attributes:
        chunk_bytes: of a chunk of logits; backward holds two.

    Example:
        >>> ChunkLoss(chunk_bytes=2**24).name
        'chunk_loss'
    """

    chunk_bytes: int = CHUNK_BYTES

    @property
    def name(self) -> str:
        """Name in records."""
        return "chunk_loss"

    def run(self, body: Body, log: Log) -> None:
        """Chunk every loss that is fused and reads a linear layer; each is one local record."""
        chunked = chunk_loss(self.chunk_bytes)
        for node in [n for n in body.graph.nodes if n.target is graphopt.cross_entropy.default]:
            for pattern in chunked.patterns:
                if log.room and not node._erased:
                    apply_rule(chunked, pattern, node, body, log, self.name)


LINEARS = (aten.linear.default, graphopt.linear_wide.default)


def _loss(logits: Any, target: Any, weight: Any, numbers: tuple[Any, ...]) -> Any:
    reduction, ignore, smoothing, classes, out = numbers
    return graphopt.cross_entropy.default(
        logits, target, weight, reduction, ignore, smoothing, classes=classes, out_dtype=out
    )


def chunk_loss(chunk_bytes: int) -> Rule:
    """The rule that the pass applies.

    Args:
        chunk_bytes: of a chunk of logits.
    """

    @rule("fusion", register=False)
    def chunk_loss(x, w, b, target, weight, reduction, ignore, smoothing, classes, out):  # type: ignore[no-untyped-def]
        """A linear layer and its cross entropy take the rows in chunks, and again in backward."""
        logits = aten.linear.default(x, w, b)
        return _loss(logits, target, weight, (reduction, ignore, smoothing, classes, out))

    @chunk_loss.also
    def _logits_kept(x, w, b, target, weight, reduction, ignore, smoothing, classes, out):  # type: ignore[no-untyped-def]
        logits = aten.linear.default(x, w, b)
        return _loss(logits, target, weight, (reduction, ignore, smoothing, classes, out)), logits

    @chunk_loss.also
    def _wide(  # type: ignore[no-untyped-def]
        x, w, b, masters, held, turned, target, weight, reduction, ignore, smoothing, classes, out
    ):
        logits = graphopt.linear_wide.default(x, w, b, masters, held, turned)
        return _loss(logits, target, weight, (reduction, ignore, smoothing, classes, out))

    @chunk_loss.also
    def _wide_kept(  # type: ignore[no-untyped-def]
        x, w, b, masters, held, turned, target, weight, reduction, ignore, smoothing, classes, out
    ):
        logits = graphopt.linear_wide.default(x, w, b, masters, held, turned)
        return _loss(logits, target, weight, (reduction, ignore, smoothing, classes, out)), logits

    @chunk_loss.check
    def _(m: Match) -> str | None:
        parts = [m.captures.get(name) for name in ("masters", "held")]
        if m.captures.get("turned") or any(p is not None and len(p) != 1 for p in parts):
            return "its weight is the copy of several, or is stored transposed"
        return None

    @chunk_loss.replace
    def _(m: Match) -> fx.Node | tuple[fx.Node, ...]:
        old = next(n for n in m.nodes if n.target in LINEARS)
        kept = len(m.outputs) > 1
        logits = m.call(old.target, *old.args, **old.kwargs) if kept else None
        (master,) = m.captures.get("masters") or (None,)
        (bias_master,) = m.captures.get("held") or (None,)
        loss = m.call(
            graphopt.linear_cross_entropy.default,
            m.x, m.w, m.b, m.target, m.weight, m.reduction, m.ignore, m.smoothing,
            classes=m.classes,
            out_dtype=m.out,
            chunk_bytes=None if chunk_bytes == CHUNK_BYTES else chunk_bytes,
            logits=logits,
            master=master,
            bias_master=bias_master,
        )  # fmt: skip
        return loss if logits is None else (loss, logits)

    return chunk_loss
