"""The runs of two graphs on one set of values, in their own dtypes and in float64, judged."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from graphopt.luck import agreement, nudged_double, nudged_state, without_rounding
from graphopt.numerics import AGREEMENT, Comparison, compare
from graphopt.step import Step, step


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What two graphs' runs say.

    Attributes:
        status: "right" or "wrong"; "unchecked" where they could not be run.
        reason: why, "" when right.
        agreement: greatest relative difference in float64, None when not run.
        comparison: the errors beside eager's, None when not run.
        rounding: tensors that are nothing but rounding, in float64 as well.
    """

    status: str
    reason: str
    agreement: float | None = None
    comparison: Comparison | None = None
    rounding: tuple[str, ...] = ()


def moved(like: Step, seed: int) -> Step:
    """A step to repeat whose upstream gradients are in float64, moved by about two roundings."""
    upstream = {i: nudged_double(g, seed + i) for i, g in like.upstream.items()}
    return dataclasses.replace(like, upstream=upstream)


@dataclasses.dataclass
class Runs:
    """The runs that a verdict rests on.

    `eager64` is the truth that errors are measured against; `agree64` and `optimized64` must agree.
    The two differ where constants are folded: there agreement asks for equal constants. `moved64`
    gives the first of the two again on values moved by two roundings, from a number. `strided` is
    the optimized run with its upstream gradients in another memory layout.
    """

    eager: Step
    optimized: Step
    eager64: Step
    agree64: Step
    optimized64: Step
    moved64: Callable[[int], Step]
    strided: Step | None = None

    @staticmethod
    def of(
        before: fx.Graph,
        after: fx.Graph,
        attribute: Callable[[str], Any],
        values: Sequence[Any],
        names: Sequence[str],
        backward: bool,
        seed: int,
        needs_grad: Sequence[bool],
    ) -> Runs:
        """Run two small graphs on given values; the first one's random numbers serve all."""

        def go(
            graph: fx.Graph,
            double: bool,
            like: Step | None,
            strided: bool = False,
            state: Callable[[str], Any] = attribute,
            inputs: Sequence[Any] = values,
        ) -> Step:
            return step(
                graph,
                state,
                inputs,
                names,
                backward=backward,
                double=double,
                like=like,
                seed=seed,
                needs_grad=needs_grad,
                strided=strided,
            )

        def moved64(number: int) -> Step:
            first = seed + 1000 * number
            inputs = [nudged_double(v, first + i) for i, v in enumerate(values)]
            state = nudged_state(attribute, first)
            return go(before, True, moved(eager, first), state=state, inputs=inputs)

        eager = go(before, False, None)
        optimized, eager64 = go(after, False, eager), go(before, True, eager)
        strided = go(after, False, eager, strided=True) if backward else None
        optimized64 = go(after, True, eager)
        return Runs(eager, optimized, eager64, eager64, optimized64, moved64, strided)

    def compare(
        self, *, mean_counts: bool = True, precision: torch.dtype | None = None
    ) -> Comparison:
        """The errors of the two beside each other."""
        return compare(
            self.eager.tensors,
            self.optimized.tensors,
            self.eager64.tensors,
            mean_counts=mean_counts,
            precision=precision,
        )

    def verdict(self, broken: str | None, comparison: Comparison) -> Verdict:
        """What is wrong by agreement in float64 and by the contract; `broken` is wrong anyway."""
        found = agreement(
            self.agree64.tensors, self.optimized64.tensors, lambda n: self.moved64(n).tensors
        )
        comparison = without_rounding(comparison, found.rounding)
        reasons = [broken] if broken else []
        if not found.worst <= AGREEMENT:
            reasons.append(
                f"in float64 {found.where} differs by {found.worst:.1e} from what was replaced, "
                f"at most {AGREEMENT:.0e} allowed"
            )
        reasons.extend(comparison.reasons)
        more = [f"and {len(reasons) - 3} more"] if len(reasons) > 3 else []
        status, reason = ("wrong" if reasons else "right"), "; ".join([*reasons[:3], *more])
        return Verdict(status, reason, found.worst, comparison, found.rounding)
