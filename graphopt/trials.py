"""One run with so many rewrites, judged by the error contract; what any judge takes and gives."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from graphopt.api import PassCompiler
from graphopt.capture import capture
from graphopt.capture import signature as sig
from graphopt.capture.key import ambient, autocast_dtypes
from graphopt.capture.shadow import eager_forward
from graphopt.graph.body import Body
from graphopt.graph.record import RewriteRecord
from graphopt.numerics import compare
from graphopt.passes import (
    OPTIONAL_PASSES,
    PipelineResult,
    Rule,
    all_rules,
    select_passes,
    select_rules,
)
from graphopt.precision import lowered
from graphopt.prover import Prover
from graphopt.replay import SEED, as_leaf, forked_rng, without_dropout
from graphopt.restore import restored
from graphopt.step import step
from graphopt.verdict import Check
from graphopt.verify import verify_body


@dataclasses.dataclass(frozen=True)
class Ran:
    """One graph of a run.

    Attributes:
        label: its mode and inputs in words, "" where there is one graph alone.
        rewrites: what the passes did to it, by its own ordinals.
        captured: the graph before them.
    """

    label: str
    rewrites: tuple[RewriteRecord, ...]
    captured: Body


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one run gave.

    Attributes:
        good: whether it is right.
        detail: what is wrong, in words.
        graphs: the graphs that ran, in the order in which they were captured.
        error: what the predicate raised, None where it answered.
        strange: how many graphs ran that did not with all rewrites.
    """

    good: bool
    detail: str
    graphs: tuple[Ran, ...]
    error: Exception | None = None
    strange: int = 0

    @property
    def rewrites(self) -> tuple[RewriteRecord, ...]:
        """What the passes did to all graphs, one graph after the other."""
        return tuple(r for g in self.graphs for r in g.rewrites)

    def place(self, position: int) -> tuple[Ran, RewriteRecord]:
        """The rewrite at a position of `rewrites`, and its graph."""
        return [(g, r) for g in self.graphs for r in g.rewrites][position]


class Judge(Protocol):
    """Judges a model with some of its rewrites."""

    repeats: bool
    """Whether the same run may give another answer, so that asking again tells something."""

    def run(self, limit: int | None, without: Sequence[str]) -> Outcome:
        """Judge the first `limit` rewrites (None: all) with some rules left out.

        They are counted through all graphs: those of the first graph, then those of the second.
        """

    def nothing(self) -> Outcome:
        """Judge the run without any rewrite."""

    def each(self, limit: int) -> Outcome:
        """Judge the first `limit` rewrites of each graph, as `max_rewrites=` has them."""


def without_rules(spec: Any, names: Sequence[str]) -> tuple[str | Rule, ...]:
    """A `rules=` argument with some rules left out of it.

    Args:
        spec: the user's own, see `PassOptions.rules`.
        names: the rules to leave out.

    Example:
        >>> "rope" in [r.name for r in select_rules(without_rules("default", ["rope"]))]
        False
    """
    chosen = {r.name: r for r in select_rules(spec) if r.name not in names}
    known = {r.name: r for r in all_rules()}
    minus = [f"-{name}" for name, r in known.items() if chosen.get(name) is not r]
    passes = set(select_passes(spec)) - set(names)
    minus += [f"-{name}" for name in OPTIONAL_PASSES if name not in passes]
    return ("default", *minus, *(r for n, r in chosen.items() if n not in known))


def limited(compiler: PassCompiler, limit: int | None, without: Sequence[str]) -> PassCompiler:
    """The same passes with only the first `limit` rewrites and without some rules."""
    options = dataclasses.replace(compiler.options, max_rewrites=limit)
    if without:
        options = dataclasses.replace(options, rules=without_rules(options.rules, without))
    return dataclasses.replace(compiler, options=options)


class ContractJudge:
    """The equality contract over the whole step, on one set of inputs.

    The graph is captured once, and each run applies the passes to it. Without rewrites, the graph
    as captured is compared with the model itself.
    """

    repeats = False  # seeds are fixed, and equal graphs are run once

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        compiler: PassCompiler,
        precision: str | None,
        backward: bool | None,
    ) -> None:
        self.model = model
        self.compiler = compiler
        self.precision = precision
        self.args, self.kwargs = args, dict(kwargs)
        with lowered(model, precision):
            self.body = capture(model, args, self.kwargs).body
            self.body.autocast = autocast_dtypes(ambient())
        self.leaves: list[Any] = []
        self.structure = sig.flatten((args, self.kwargs), self.leaves)
        self.backward = self.body.grad if backward is None else backward
        self.prover: Prover | None = None

    def pipeline(self, limit: int | None, without: Sequence[str]) -> PipelineResult:
        """The passes over the captured graph."""
        result: PipelineResult = limited(self.compiler, limit, without)(self.body).result
        return result

    def run(self, limit: int | None, without: Sequence[str]) -> Outcome:
        """See `Judge`."""
        result = self.pipeline(limit, without)
        if self.prover is None:
            self.prover = Prover(result.captured, result.body, self.leaves, self.backward, SEED)
        # One prover for all runs: it keeps what the captured graph gave.
        self.prover.body = result.captured
        self.prover.optimized, self.prover.attribute = result.body, result.body.attribute
        self.prover.ambient = bool(result.body.autocast)
        whole = self.prover.check_whole()
        ran = Ran("", tuple(result.rewrites), self.body)
        return Outcome(whole.passed, whole.reason, (ran,))

    def each(self, limit: int) -> Outcome:
        """See `Judge`."""
        return self.run(limit, ())

    def alone(self, ordinal: int, without: Sequence[str]) -> Check | None:
        """The proof of one rewrite by itself; None where it cannot be had."""
        result = self.pipeline(None, without)
        records = [r for r in result.rewrites if r.ordinal <= ordinal]
        checks = verify_body(
            result.captured, result.body, records, self.leaves, backward=self.backward
        ).checks
        return next((c for c in checks if c.ordinal == ordinal), None)

    def suspects(self) -> tuple[Check, ...]:
        """The rewrites that their own proof finds wrong, although the whole step is right."""
        result = self.pipeline(None, ())
        found = verify_body(
            result.captured, result.body, result.rewrites, self.leaves, backward=self.backward
        )
        return tuple(c for c in found.checks if c.status == "wrong")

    def nothing(self) -> Outcome:
        """The captured graph against the model itself, outputs, gradients and buffers."""
        names = [p.name for p in self.body.placeholders]
        needs = [isinstance(v, torch.Tensor) and v.requires_grad for v in self.leaves]
        common: dict[str, Any] = {
            "backward": self.backward,
            "outputs": range(self.body.user_outputs),
            "needs_grad": needs,
        }
        # At p = 0: two runs in different precision do not drop the same elements.
        graph, attribute = without_dropout(self.body.graph), self.body.attribute
        mine = step(graph, attribute, self.leaves, names, autocast=self.body.autocast, **common)
        exact = step(graph, attribute, self.leaves, names, double=True, like=mine, **common)
        eager = self._eager(mine.upstream, mine.tensors, names)
        # The truth is the captured graph in float64, so the model's forward is what may be off it.
        runs = ({k: t[k] for k in eager} for t in (mine.tensors, eager, exact.tensors))
        odd = [t for t in compare(*runs, mean_counts=False).tensors if not t.passed]
        words = [
            f"{t.name} of the captured graph and of the model's own forward differ by "
            f"{t.difference:.1e}"
            for t in odd[:3]
        ]
        words += [f"and {len(odd) - 3} more"] if len(odd) > 3 else []
        return Outcome(not odd, "; ".join(words), (Ran("", (), self.body),))

    def _eager(
        self, upstream: Mapping[int, torch.Tensor], like: Mapping[str, Any], names: Sequence[str]
    ) -> dict[str, torch.Tensor | None]:
        """The same tensors from the model's own forward; the model is put back after it."""
        leaves = [
            as_leaf(v.clone(), needs_grad=v.requires_grad) if isinstance(v, torch.Tensor) else v
            for v in self.leaves
        ]
        args, kwargs = sig.unflatten(self.structure, leaves)
        with (
            restored(self.model, parameters=False),
            forked_rng(SEED, self.body.device),
            torch.set_grad_enabled(self.body.grad),
            lowered(self.model, self.precision),
            _NoDropout(),
        ):
            flat: list[Any] = []
            sig.flatten(eager_forward(self.model)(*args, **kwargs), flat, results=True)
            found = {f"output/{i}": y.detach() for i, y in enumerate(flat) if _is_tensor(y)}
            for m in self.body.mutations:
                written = self.body.attribute(m.target) if m.kind != "input" else None
                written = leaves[names.index(m.target)] if written is None else written
                found[f"output/{m.output}"] = written.detach().clone()
            inputs = dict(zip(names, leaves, strict=True))
            wanted = [k for k in like if k.startswith("grad/")]
            targets = [k.removeprefix("grad/") for k in wanted]
            sources = [inputs[t] if t in inputs else self.body.attribute(t) for t in targets]
            grads = _gradients(flat, sources, upstream)
        both = {**found, **dict(zip(wanted, grads, strict=True))}
        return {k: v for k, v in both.items() if k in like}


def _gradients(
    outputs: Sequence[Any], sources: Sequence[torch.Tensor], upstream: Mapping[int, torch.Tensor]
) -> Sequence[torch.Tensor | None]:
    """Gradients of some tensors from gradients sent into outputs, by position."""
    sent = {i: g for i, g in upstream.items() if i < len(outputs) and outputs[i].requires_grad}
    if not sent or not sources:
        return [None] * len(sources)
    return torch.autograd.grad(
        [outputs[i] for i in sent], list(sources), list(sent.values()), allow_unused=True
    )


class _NoDropout(TorchFunctionMode):
    """Every dropout that a forward calls runs with probability zero."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call a function, with its dropout probability set to zero."""
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        position, key = _PROBABILITY.get(name, (1, "p") if "dropout" in name else (None, ""))
        if position is not None:
            if position < len(args):
                args = (*args[:position], 0.0, *args[position + 1 :])
            else:
                kwargs[key] = 0.0
        return func(*args, **kwargs)


_PROBABILITY = {
    "scaled_dot_product_attention": (4, "dropout_p"),
    "multi_head_attention_forward": (10, "dropout_p"),
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), (5, "dropout")),
}
"""Functions that drop out by another name: position and name of the probability."""


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)
