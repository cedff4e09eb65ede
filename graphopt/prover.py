"""Runs the graphs of one body, before and after each rewrite, and judges them."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from graphopt.graph.body import Body
from graphopt.graph.record import RewriteRecord, Site
from graphopt.luck import may_be_luck, nudged, nudged_double, nudged_state, settle
from graphopt.numerics import Comparison, compare
from graphopt.replay import (
    State,
    Watch,
    constant_values,
    drops_unseeded,
    forked_rng,
    moved_rounding,
    probabilities,
    requiring_grad,
    run,
    without_dropout,
)
from graphopt.runs import Runs, Verdict, moved
from graphopt.step import Step, step, where_they_part
from graphopt.verdict import Check

DRAWS = 8
"""How many draws of inputs and upstream gradients settle what is a little off in the first."""


class Prover:
    """Runs graphs of one body on one set of inputs and collects the verdicts."""

    def __init__(
        self,
        body: Body,
        optimized: Body,
        inputs: list[Any],
        backward: bool,
        seed: int,
        checked: Callable[[Check], None] = lambda check: None,
    ) -> None:
        self.body = body
        self.optimized = optimized
        self.attribute = optimized.attribute  # knows the constants that passes lifted, too
        self.inputs = inputs
        self.names = [p.name for p in body.placeholders]
        self.backward = backward
        self.seed = seed
        self.ambient = bool(body.autocast)
        self.checked = checked  # told of each verdict on a rewrite
        self.checks: list[Check] = []
        self.notes: list[str] = []
        self._seen: collections.OrderedDict[tuple[Any, ...], Step] = collections.OrderedDict()
        self._base: Step | None = None

    # -- local records: on the values met in a replay ------------------------------------------

    def check_local(self, graph: fx.Graph, records: Sequence[RewriteRecord]) -> None:
        """Replay a graph and check each record as soon as its inputs are there."""
        if not records:
            return
        replay = _Values(self, records, requiring_grad(graph, self.optimized))
        try:
            with forked_rng(self.seed, self.body.device), torch.no_grad():
                run(
                    graph,
                    self.attribute,
                    self.inputs,
                    seed=self.seed,
                    watch=Watch(replay.wanted, replay.met),
                    autocast=self.body.autocast if self.ambient else None,
                )
        except Exception as error:  # whatever an op raises is told in the verdicts
            replay.give_up(f"the replay of the graph failed: {_first_line(error)}")
        replay.give_up("its inputs are not among the values of the replayed graph")

    def check_record(
        self, record: RewriteRecord, values: Sequence[Any], needs_grad: Sequence[bool]
    ) -> tuple[Any, ...]:
        """Check one local record; gives the values of its outputs, as eager has them."""
        if record.reference is None or record.replacement is None:
            self._unchecked(record, "the record holds no subgraphs")
            return ()
        backward = self.backward and any(needs_grad)
        try:
            before, after = record.reference, record.replacement
            if drops_unseeded(before) or drops_unseeded(after):
                before, after = self._at_rest(record, before, after)
            steps = Runs.of(
                before,
                after,
                self.attribute,
                values,
                record.inputs,
                backward,
                self.seed,
                needs_grad,
            )
            precision = moved_rounding(before, values)
            comparison = steps.compare(mean_counts=False, precision=precision)
            if comparison.passed and steps.strided is not None:
                steps.optimized = steps.strided
                comparison = steps.compare(mean_counts=False, precision=precision)
            found = self._judged(steps, self._changed_dropout(record), comparison)
        except Exception as error:  # whatever an op raises is told in the verdict
            self._unchecked(record, f"it failed to run alone: {_first_line(error)}")
            return ()
        self._add(_check_of(record, found))
        return tuple(steps.eager.tensors.get(f"output/{i}") for i in range(len(record.outputs)))

    # -- whole graphs ----------------------------------------------------------------------------

    def check_global(self, record: RewriteRecord) -> None:
        """Check a pass that rewrote the whole graph, graph before against graph after."""
        if record.reference is None or record.replacement is None:
            self._unchecked(record, "the record holds no graphs")
            return
        writes_autocast = self.ambient and record.rule == "materialize_autocast"
        try:
            before, after = self._at_rest(record, record.reference, record.replacement)
            ambient = (self.ambient, self.ambient and not writes_autocast)
            found = self._verdict(before, after, ambient, self._changed_dropout(record))
            self._add(_check_of(record, found))
        except Exception as error:  # whatever an op raises is told in the verdict
            self._unchecked(record, f"a whole graph failed to run: {_first_line(error)}")
        self.ambient = self.ambient and not writes_autocast

    def check_whole(self) -> Check:
        """Check the captured graph against the optimized one."""
        try:
            before, after = map(without_dropout, (self.body.graph, self.optimized.graph))
            ambient = (bool(self.body.autocast), self.ambient)
            found = self._verdict(before, after, ambient, None)
            if found.status == "wrong" and not any(c.status == "wrong" for c in self.checks):
                part = self._part(before, after, ambient)
                reason = f"{found.reason}; {part}" if part else found.reason
                found = dataclasses.replace(found, reason=reason)
        except Exception as error:  # whatever an op raises is told in the verdict
            found = Verdict("unchecked", f"failed to run: {_first_line(error)}")
        return Check(
            -1,
            "the whole step",
            "",
            "whole",
            Site(),
            found.status,
            found.reason,
            found.agreement,
            found.comparison,
        )

    def _verdict(
        self, before: fx.Graph, after: fx.Graph, ambient: tuple[bool, bool], broken: str | None
    ) -> Verdict:
        """Judge two whole graphs; other draws settle what is just too high."""
        steps = self._steps(before, after, *ambient)
        comparison = steps.compare()
        if may_be_luck(comparison):
            draws = [self._draw(before, after, ambient, k) for k in range(1, DRAWS)]
            comparison = settle(comparison, draws)
        return self._judged(steps, broken, comparison)

    def _judged(self, steps: Runs, broken: str | None, comparison: Comparison) -> Verdict:
        """The verdict, with a note on what is nothing but rounding."""
        found = steps.verdict(broken, comparison)
        for name in found.rounding:
            note = f"{name}: nothing but rounding, values moved by two roundings change it as much"
            if note not in self.notes:
                self.notes.append(note)
        return found

    def _draw(
        self, before: fx.Graph, after: fx.Graph, ambient: tuple[bool, bool], number: int
    ) -> Comparison:
        """The comparison on inputs moved by a few roundings, from other upstream gradients."""
        base = Step({}, {}, {} if self._base is None else self._base.drawn)
        seed = self.seed + 1000 * number
        values = [
            nudged(v, seed + i) if isinstance(v, torch.Tensor) else v
            for i, v in enumerate(self.inputs)
        ]
        eager = self._run(before, ambient[0], base, seed, inputs=values)
        optimized, eager64 = (
            self._run(g, a, eager, seed, inputs=values)
            for g, a in ((after, ambient[1]), (before, None))
        )
        return compare(eager.tensors, optimized.tensors, eager64.tensors)

    def _part(self, before: fx.Graph, after: fx.Graph, ambient: tuple[bool, bool]) -> str:
        """Where a whole step goes wrong although each rewrite alone is right."""

        def run_one(graph: fx.Graph, double: bool, inside: Collection[str]) -> Step:
            flag = ambient[0] if graph is before else ambient[1]
            return self._run(graph, None if double else flag, self._base, self.seed, inside=inside)

        return where_they_part(before, after, run_one)

    def _steps(self, before: fx.Graph, after: fx.Graph, *ambient: bool) -> Runs:
        """The runs of two whole graphs; `ambient` says which run under the ambient autocast."""
        eager, optimized = self._step(before, ambient[0]), self._step(after, ambient[1])
        eager64, optimized64 = self._step(before, None), self._step(after, None)
        constants = [constant_values(g, self.attribute) for g in (before, after)]

        def moved64(number: int) -> Step:
            first = self.seed + 1000 * number
            return self._run(
                before,
                None,
                moved(eager, first),
                self.seed,
                constants[0] or None,
                inputs=[nudged_double(v, first + i) for i, v in enumerate(self.inputs)],
                state=nudged_state(self.attribute, first),
            )

        steps = Runs(eager, optimized, eager64, eager64, optimized64, moved64)
        if any(constants):
            steps.agree64, steps.optimized64 = (
                self._step(g, None, c) for g, c in zip((before, after), constants, strict=True)
            )
        return steps

    def _step(
        self, graph: fx.Graph, ambient: bool | None, given: Mapping[str, Any] | None = None
    ) -> Step:
        """One step of a whole graph, from memory when the same text was just run.

        `ambient` says whether it runs under the ambient autocast; None means in float64.
        """
        key = (str(graph), ambient, bool(given))
        if key not in self._seen:
            if len(self._seen) >= 6:  # a graph's three runs, and those of the graph before it
                self._seen.popitem(last=False)
            self._seen[key] = self._run(graph, ambient, self._base, self.seed, given)
        self._seen.move_to_end(key)
        if self._base is None:
            self._base = self._seen[key]
        return self._seen[key]

    def _run(
        self,
        graph: fx.Graph,
        ambient: bool | None,
        like: Step | None,
        seed: int,
        given: Mapping[str, Any] | None = None,
        inside: Collection[str] = (),
        inputs: Sequence[Any] | None = None,
        state: Callable[[str], Any] | None = None,
    ) -> Step:
        return step(
            graph,
            self.attribute if state is None else state,
            self.inputs if inputs is None else inputs,
            self.names,
            backward=self.backward,
            double=ambient is None,
            like=like,
            given=given,
            outputs=range(self.body.user_outputs),
            seed=seed,
            autocast=self.body.autocast if ambient else None,
            inside=inside,
        )

    # -- dropout ---------------------------------------------------------------------------------

    def _at_rest(
        self, record: RewriteRecord, before: fx.Graph, after: fx.Graph
    ) -> tuple[fx.Graph, fx.Graph]:
        """Both graphs at p = 0, with a note when that changed something."""
        if probabilities(before) or probabilities(after):
            where = "whole graphs" if record.kind == "global" else f"rewrite #{record.ordinal}"
            note = f"{where}: compared at dropout p = 0; the probabilities are compared as literals"
            if note not in self.notes:
                self.notes.append(note)
        return without_dropout(before), without_dropout(after)

    def _changed_dropout(self, record: RewriteRecord) -> str | None:
        """What is wrong with the dropout probabilities of a rewrite."""
        before, after = probabilities(record.reference), probabilities(record.replacement)
        if before == after:
            return None
        return (
            f"dropout probabilities {sorted(before.elements())} became {sorted(after.elements())}"
        )

    def _unchecked(self, record: RewriteRecord, reason: str) -> None:
        self._add(_check_of(record, Verdict("unchecked", reason)))

    def _add(self, check: Check) -> None:
        self.checks.append(check)
        self.checked(check)


class _Values:
    """Values met in a replay, kept while a record still waits for them."""

    def __init__(
        self, prover: Prover, records: Sequence[RewriteRecord], requiring: set[str]
    ) -> None:
        self.prover = prover
        self.waiting = {r.ordinal: r for r in records}
        self.requiring = requiring
        self.readers: dict[str, list[RewriteRecord]] = collections.defaultdict(list)
        for record in records:
            for name in dict.fromkeys(record.inputs):
                self.readers[name].append(record)
        self.values: dict[str, Any] = {}

    @property
    def wanted(self) -> set[str]:
        """Names that some record reads."""
        return set(self.readers)

    def met(self, name: str, value: Any) -> None:
        """Take a value, and check every record that it completes."""
        if name in self.values or name not in self.readers:
            return
        self.values[name] = value
        for record in list(self.readers[name]):
            if record.ordinal in self.waiting and all(i in self.values for i in record.inputs):
                self._check(record)

    def _check(self, record: RewriteRecord) -> None:
        del self.waiting[record.ordinal]
        values = [self.values[i] for i in record.inputs]
        needs = [i in self.requiring for i in record.inputs]
        made = self.prover.check_record(record, values, needs)
        within = self._made_within(record, values)
        for name in dict.fromkeys(record.inputs):
            self.readers[name].remove(record)
            if not self.readers[name]:
                self.values.pop(name)
        for old, new, value in zip(record.outputs, record.new_outputs, made, strict=False):
            if old in self.requiring:
                self.requiring.add(new)
            self.met(new, value)
        for name, value in within.items():
            if any(i in self.requiring for i in record.inputs):
                self.requiring.add(name)
            self.met(name, value)

    def _made_within(self, record: RewriteRecord, values: Sequence[Any]) -> dict[str, Any]:
        """The values inside a replacement that a later rewrite starts from."""
        graph = record.replacement
        wanted = {n.name for n in graph.nodes if n.op == "call_function"} if graph else set()
        wanted = wanted.intersection(self.readers).difference(record.new_outputs)
        found: dict[str, Any] = {}
        if graph is not None and wanted:
            state, seed = State(self.prover.attribute), self.prover.seed
            with torch.no_grad():
                run(graph, state, values, seed=seed, watch=Watch(wanted, found.__setitem__))
        return found

    def give_up(self, reason: str) -> None:
        """Tell of every record that still waits."""
        for record in self.waiting.values():
            self.prover._unchecked(record, reason)
        self.waiting.clear()


def _check_of(record: RewriteRecord, found: Verdict) -> Check:
    return Check(
        record.ordinal,
        record.rule,
        record.pass_name,
        record.kind,
        record.site,
        found.status,
        found.reason,
        found.agreement,
        found.comparison,
    )


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"
