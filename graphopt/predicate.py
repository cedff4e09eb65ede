"""A run with so many rewrites, judged by a predicate of the user over all graphs that it runs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from graphopt.api import PassCompiler
from graphopt.capture import Capture
from graphopt.capture.entry import Compiled, Entry
from graphopt.capture.key import GraphKey
from graphopt.capture.store import GraphStore
from graphopt.errors import GraphoptWarning, OptionError
from graphopt.graph.text import type_text
from graphopt.module import GraphoptModule, Settings
from graphopt.replay import SEED, forked_rng
from graphopt.restore import restored
from graphopt.trials import Outcome, Ran, limited

Predicate = Callable[[GraphoptModule], Any]


Place = tuple[Any, int]
"""Which graph of a run: the key and the symbolic sizes of its capture, and the how manieth of these
(a changed attribute of the module captures anew under the same key)."""


class _KeepingStore(GraphStore):
    """Graphs of one run, from the captures that earlier runs made.

    A capture does not depend on how many rewrites are applied to it, and takes most of a run.
    """

    def __init__(
        self,
        source: nn.Module,
        settings: Settings,
        kept: dict[Place, Capture],
        passes: Callable[[Place], PassCompiler],
    ) -> None:
        super().__init__(source, settings, lambda body: Compiled(body))
        self.kept = kept
        self.passes = passes
        self.made: dict[Place, Entry] = {}

    def _capture(self, key: GraphKey, family: Any, args: Any, kwargs: Any) -> Entry:
        kind = (key, frozenset(self._symbolic(key, family)))
        place = (kind, sum(made[0] == kind for made in self.made))
        self.compile_body = self.passes(place)
        known = self.kept.get(place)
        entry = None
        if known is not None:
            compiled = self.compile_body(known.body)
            entry = Entry(known, compiled, key, type(self.source).__name__)
        if entry is None or entry.state() is None:  # the module's state is not as at the capture
            entry = super()._capture(key, family, args, kwargs)
            self.kept[place] = entry.capture
        self.made[place] = entry
        return entry


class PredicateJudge:
    """The user's own predicate, on a module that is optimized anew for each run.

    Each run starts from the same weights, buffers, gradients, modes and random state.
    """

    repeats = True

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...] | None,
        kwargs: Mapping[str, Any],
        compiler: PassCompiler,
        settings: Settings,
        predicate: Predicate,
    ) -> None:
        self.model = model
        self.args, self.kwargs = args, dict(kwargs)
        self.compiler = compiler
        self.settings = settings
        self.predicate = predicate
        self.kept: dict[Place, Capture] = {}
        self.counts: dict[tuple[str, ...], dict[Place, int]] = {}
        """Without these rules: how many rewrites each graph has, in order."""

    def run(self, limit: int | None, without: Sequence[str]) -> Outcome:
        """See `Judge`."""
        known = self.counts.get(tuple(without))
        if limit is None or known is None:
            return self._run(limit, without, {}, limit)
        shares: dict[Place, int | None] = {}
        left = limit
        for place, count in known.items():
            shares[place] = None if 0 < count <= left else left
            left = max(0, left - count)
        # A graph that did not run with all rewrites is not among those that are searched.
        return self._run(limit, without, shares, 0)

    def nothing(self) -> Outcome:
        """The predicate on the graphs as captured."""
        return self.run(0, ())

    def each(self, limit: int) -> Outcome:
        """See `Judge`."""
        return self._run(limit, (), {}, limit)

    def _run(
        self,
        limit: int | None,
        without: Sequence[str],
        shares: Mapping[Place, int | None],
        other: int | None,
    ) -> Outcome:
        """One run.

        Args:
            limit: how many rewrites a copy of the module may have, whose graphs are not seen.
            without: the rules that are left out.
            shares: how many rewrites each graph may have.
            other: and how many one that does not stand in `shares`.
        """
        opt = GraphoptModule(self.model, self.settings, limited(self.compiler, limit, without))
        opt._store = store = _KeepingStore(
            self.model,
            self.settings,
            self.kept,
            lambda place: limited(self.compiler, shares.get(place, other), without),
        )
        if self.args is not None:
            opt.capture(self.args, self.kwargs)
            store.exact.clear()  # from here on it holds the graphs that the predicate runs
        before = set(store.made)
        device = next((t.device for t in self.model.parameters()), torch.device("cpu"))
        with warnings.catch_warnings(), restored(self.model), forked_rng(SEED, device):
            warnings.simplefilter("ignore", GraphoptWarning)
            good, detail, raised = False, "the predicate says no", None
            try:
                answer = self.predicate(opt)
            except Exception as error:
                raised = error
                detail = f"the predicate raised {type(error).__name__}: {error}"
            else:
                good = _truth(answer)
        in_force = {id(entry) for entry in store.exact.values()}
        made = store.made
        ran = {p: e for p, e in made.items() if p not in before or id(e) in in_force} or made
        if not ran:
            raise OptionError(
                "the predicate did not call the module that it was given",
                why="a graph is captured at a module's first call, and there is none",
                try_="pass example_inputs, or call the module in the predicate",
            )
        if limit is None:
            counts = {p: len(e.compiled.result.rewrites) for p, e in ran.items()}
            self.counts.setdefault(tuple(without), counts)
        strange = sum(place not in shares for place in ran) if shares else 0
        return Outcome(good, detail, _graphs(list(ran.values())), raised, strange)


def _graphs(entries: Sequence[Entry]) -> tuple[Ran, ...]:
    results = [e.compiled.result for e in entries]
    labels = [""] if len(entries) == 1 else [_label(e) for e in entries]
    return tuple(
        Ran(label, tuple(result.rewrites), result.captured)
        for label, result in zip(labels, results, strict=True)
    )


def _label(entry: Entry) -> str:
    """A graph in words: "eval, no gradients, x: f32[4, 16]"."""
    body = entry.capture.body
    inputs = [
        f"{name}: {type_text(node.meta.get('val'))}"
        for name, node in zip(entry.capture.names, body.placeholders, strict=True)
    ]
    words = ["train" if body.training else "eval", *([] if body.grad else ["no gradients"])]
    words += [f"autocast {str(t).removeprefix('torch.')}" for t in body.autocast.values()]
    return ", ".join([*words, *inputs])


def _truth(value: Any) -> bool:
    """The answer of a predicate.

    Raises:
        OptionError: when it is no truth value, such as the None of a forgotten `return`.
    """
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return bool(value)
    if isinstance(value, bool) or type(value).__name__ in ("bool_", "bool"):
        return bool(value)
    raise OptionError(
        f"the predicate returned {value!r}, a {type(value).__name__}",
        try_="return True where the module is right and False where it is wrong",
    )
