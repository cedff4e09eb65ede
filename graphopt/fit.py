"""The largest batch that a memory budget holds."""

from __future__ import annotations

import dataclasses
import numbers
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from graphopt.api import PassCompiler
from graphopt.capture.signature import flatten_arguments
from graphopt.errors import BudgetError, CaptureError, GraphOptError, OptionError
from graphopt.memory.asked import check_memory
from graphopt.memory.budget import Budget, check_budget, shown, unreachable
from graphopt.memory.plan import MemoryPlan
from graphopt.module import GraphoptModule, Settings
from graphopt.options import (
    PRECISION,
    check_choice,
    check_fit,
    check_inputs,
    check_model,
    check_overrides,
    check_passes,
    names_checked,
)
from graphopt.passes import Rule
from graphopt.report.progress import progress

FAR = 2**40
"""No larger batch is looked for."""

MOST = 2**20
"""Nor a larger one than this where `make_inputs` cannot run on tensors without memory."""


@dataclasses.dataclass(frozen=True, repr=False)
class Fit:
    """The largest batch that fits. Its repr is a short table.

    Attributes:
        batch: the batch; `make_inputs(batch)` makes it.
        budget_bytes: the budget.
        predicted_peak_bytes: of a step with that batch and its plan.
        plan: what is recomputed for it.
        tried: (batch, whether it fits, predicted peak: with its plan where it fits, else the
            smallest that can be had).
        limit: where the search ended before the budget was used up, the batch that it did not go
            beyond; None where the next batch does not fit.
    """

    batch: int
    budget_bytes: int
    predicted_peak_bytes: int
    plan: MemoryPlan
    tried: tuple[tuple[int, bool, int], ...]
    limit: int | None = None

    def __repr__(self) -> str:
        """The batch, its peak and plan, and what was tried."""
        lines = [
            f"fit: batch {self.batch}, predicted peak {shown(self.predicted_peak_bytes)} of"
            f" {shown(self.budget_bytes)}"
        ]
        for batch, fits, peak in sorted(self.tried):
            said = "fits" if fits else "does not fit"
            lines.append(f"  batch {batch:6d}  {said:12}  {shown(peak)}")
        if self.limit is not None:
            lines.append(_limited(self.limit))
        return "\n".join([*lines, repr(self.plan)])

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "batch": self.batch,
            "budget_bytes": self.budget_bytes,
            "predicted_peak_bytes": self.predicted_peak_bytes,
            "plan": self.plan.to_dict(),
            "tried": [
                dict(zip(("batch", "fits", "peak_bytes"), row, strict=True)) for row in self.tried
            ],
            "limit": self.limit,
        }


def _limited(limit: int) -> str:
    text = f"larger batches may fit, too: none beyond {limit} was looked for"
    if limit > MOST:
        return text
    return f"{text}, since make_inputs makes real tensors of each that is tried"


@names_checked
def fit(
    model: nn.Module,
    make_inputs: Callable[[int], Any],
    budget: int | float | str,
    *,
    multiple_of: int = 1,
    recompute: bool = True,
    offload: bool | str | None = False,
    precision: str | None = None,
    precision_overrides: Mapping[str, str | torch.dtype] | None = None,
    fuse: bool | str = True,
    rules: str | Rule | Iterable[str | Rule] = "default",
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    resident_bytes: int | str = 0,
) -> Fit:
    """Find the largest batch whose training step fits into a budget, without running one.

    For a few batches the model is captured and its peak predicted, with the plan that recomputes
    as much as the budget asks for. Nothing is allocated: `make_inputs` runs under a mode in which
    tensors have no memory. Where it cannot (it reads values, or takes parts of a tensor of yours),
    its inputs are real ones, and the search ends at a batch of 2**20; `.limit` and the text of the
    result say so.

    Args:
        model: the model, in the mode to train in; it is not changed.
        make_inputs: batch -> a tensor, a tuple of positional arguments, or a dict of keyword
            arguments; their sizes follow the batch.
        budget: bytes or "12GiB"; on a GPU also a float, a fraction of its memory.
        multiple_of: only multiples of this are looked at.
        recompute: whether backward may recompute; False for the largest batch without.
        offload: as in `optimize`; the budget is there.
        precision: as in `optimize`.
        precision_overrides: as in `optimize`.
        fuse: as in `optimize`.
        rules: as in `optimize`.
        loss_fn: as in `optimize`.
        resident_bytes: as in `optimize`; AdamW keeps 8 bytes for each float32 parameter.

    Returns:
        The batch, its predicted peak and its plan.

    Raises:
        OptionError: for wrong arguments.
        BudgetError: when not even the smallest batch fits.
        CaptureError: when the model cannot be captured with some batch.

    Example:
        >>> net = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
        >>> found = fit(net, lambda batch: torch.ones(batch, 64), "200KiB")
        >>> found.predicted_peak_bytes <= 200 * 1024 < fit(
        ...     net, lambda batch: torch.ones(batch, 64), "400KiB"
        ... ).predicted_peak_bytes
        True
    """
    check_model(model)
    if not callable(make_inputs):
        raise OptionError(
            f"make_inputs is of type {type(make_inputs).__name__}",
            try_="a function of the batch: lambda batch: torch.randn(batch, 512)",
        )
    step: Any = multiple_of  # a whole number of numpy's, too
    whole = isinstance(step, numbers.Integral) and not isinstance(step, bool)
    if not whole or operator.index(step) < 1:
        raise OptionError(f"multiple_of is {multiple_of!r}", try_="a whole number from 1")
    check_choice("recompute", recompute, (True, False))
    check_choice("precision", precision, PRECISION)
    overrides = check_overrides(model, precision_overrides)
    limit = _limit(model, budget)
    memory = check_memory(limit, None, loss_fn, resident_bytes, offload)
    assert memory is not None
    options = check_passes(fuse, rules, None)
    if not recompute:
        memory = dataclasses.replace(memory, budget=Budget(fraction=1.0))
    settings = Settings(dynamic=False, precision=precision)
    compiler = PassCompiler(options, overrides, memory)
    search = _Search(
        lambda: GraphoptModule(model, settings, compiler),
        make_inputs,
        operator.index(step),
        limit,
        recompute,
    )
    with progress("fit"), torch.inference_mode(False), torch.enable_grad():
        return search.found()


def _limit(model: nn.Module, budget: Any) -> int:
    """The budget in bytes."""
    asked = check_budget(budget, "budget", "the memory of the model's GPU")
    if asked is None:
        raise OptionError("budget is None", try_="bytes, '12GiB', or on a GPU a fraction of it")
    if asked.size is not None:
        return asked.size
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if device.type != "cuda":
        raise OptionError(
            f"budget is {budget!r}, and the model is on {device.type}",
            why="a fraction is one of the memory of the model's GPU",
            try_="bytes, or '12GiB'",
        )
    return int((asked.fraction or 1.0) * torch.cuda.get_device_properties(device).total_memory)


class _Search:
    """Batches tried so far, counted in multiples of the step between them."""

    def __init__(
        self,
        make: Callable[[], GraphoptModule],
        make_inputs: Callable[[int], Any],
        step: int,
        limit: int,
        recompute: bool,
    ) -> None:
        self.recompute = recompute
        self.make = make
        self.make_inputs = make_inputs
        self.step = step
        self.limit = limit
        self.plans: dict[int, MemoryPlan] = {}
        self.peaks: dict[int, int] = {}  # count -> the smallest peak that is known
        self.refused: dict[int, BudgetError] = {}
        self.sizes: dict[int, Any] = {}  # batch -> structure and sizes of its inputs
        self.unreal = True  # whether make_inputs works on tensors without memory

    def found(self) -> Fit:
        """The largest batch that fits."""
        low, high = self._first(), None  # fits, does not fit
        if low in self.refused:
            error, batch = self.refused[low], low * self.step
            found = BudgetError(
                f"no batch fits: of batch {batch}, {error.what}",
                at=error.at,
                why=error.why,
                try_="a larger budget"
                + (", multiple_of=1" if batch > 1 else ", or a smaller model"),
            )
            found.lowest_bytes = error.lowest_bytes
            raise found
        turn = 0
        while high is None or high - low > 1:
            turn += 1
            most = (FAR if self.unreal else MOST) // self.step
            if high is None and low >= most:
                break
            guess = self._guess(low, high, turn)
            guess = guess if high is not None else min(guess, most)
            if self.fits(guess):
                low = guess
            else:
                high = guess
        plan = self.plans[low]
        tried = tuple(
            (n * self.step, n in self.plans, self.plans[n].predicted_peak_bytes)
            if n in self.plans
            else (n * self.step, False, p)
            for n, p in self.peaks.items()
        )
        peak, batch = plan.predicted_peak_bytes, low * self.step
        return Fit(batch, self.limit, peak, plan, tried, batch if high is None else None)

    def _first(self) -> int:
        """The smallest count that is tried: 1, or 2 where the model refuses 1 (batch norm)."""
        try:
            self.fits(1)
        except OptionError:
            raise
        except GraphOptError:
            try:
                self.fits(2)
            except GraphOptError:
                pass
            else:
                return 2
            raise
        return 1

    def _check_new(self, args: tuple[Any, ...], kwargs: dict[str, Any], batch: int) -> None:
        """Refuse inputs that are of the sizes of another batch's: they would fit for ever."""
        leaves: list[torch.Tensor] = []
        structure = flatten_arguments(args, kwargs, leaves)
        self.unreal = self.unreal and all(isinstance(leaf, FakeTensor) for leaf in leaves)
        sizes = (structure, tuple(leaf.shape for leaf in leaves))
        other = next((b for b, known in self.sizes.items() if known == sizes), None)
        if other is not None:
            raise OptionError(
                f"make_inputs({other}) and make_inputs({batch}) are of the same sizes",
                why="what make_inputs returns does not grow with the batch that it is given",
                try_="make_inputs=lambda batch: torch.randn(batch, ...), as large as is asked for",
            )
        self.sizes[batch] = sizes

    def _inputs(self, batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The inputs of a batch: without memory where `make_inputs` works so, else real."""
        if self.unreal:
            try:
                with FakeTensorMode():  # which takes no real tensors
                    return _arguments(self.make_inputs(batch), batch)
            except Exception:  # a real call tells what is wrong, if anything is
                self.unreal = False
        try:
            given = self.make_inputs(batch)
        except Exception as error:
            raise OptionError(
                f"make_inputs({batch}) raised {type(error).__name__}: {error}"[:500],
                try_="a function of the batch: lambda batch: torch.randn(batch, 512)",
            ) from error
        return _arguments(given, batch)

    def _guess(self, low: int, high: int | None, turn: int) -> int:
        """Where the peak would reach the limit if it grew evenly; now and then the middle."""
        known = sorted(self.peaks)
        if high is None:  # nothing too large yet
            reach = 4 * low
            if len(known) > 1:
                a, b = known[-2], known[-1]
                slope = (self.peaks[b] - self.peaks[a]) / (b - a)
                reach = max(2 * low, min(reach * 4, self._at(b, slope) + 1))
            return max(low + 1, reach)
        if turn % 3 == 0:
            return (low + high) // 2
        slope = (self.peaks[high] - self.peaks[low]) / (high - low)
        guess = self._at(high, slope) if self.peaks[high] > self.limit else (low + high) // 2
        return min(max(low + 1, guess), high - 1)

    def _at(self, count: int, slope: float) -> int:
        if slope <= 0:
            return 4 * count
        return int(count + (self.limit - self.peaks[count]) / slope)

    def fits(self, count: int) -> bool:
        """Whether some multiple of the step fits; keeps its plan."""
        batch = count * self.step
        args, kwargs = self._inputs(batch)
        opt = self.make()
        check_fit(opt.source, args, kwargs)
        self._check_new(args, kwargs, batch)
        try:
            opt.capture(args, kwargs)
        except BudgetError as error:
            self.refused[count] = error
            self.peaks[count] = error.lowest_bytes or 2 * self.limit
            return False
        except OptionError:
            raise
        except Exception as error:
            raise _of_batch(batch, error) from error
        plan: MemoryPlan = opt.memory_plan
        lowest = min([plan.predicted_peak_bytes, *(p.peak_bytes for p in plan.curve)])
        self.peaks[count] = lowest
        if plan.predicted_peak_bytes > self.limit:  # asked without recomputing
            self.refused[count] = unreachable(
                Budget(size=self.limit), self.limit, lowest, plan.unplanned_peak_bytes, ()
            )
            return False
        if not self.recompute:
            plan = dataclasses.replace(plan, budget="without recomputing", budget_bytes=self.limit)
        self.plans[count] = plan
        return True


def _of_batch(batch: int, error: Exception) -> GraphOptError:
    """The error of a batch that the model does not take, or whose step cannot be predicted."""
    if not isinstance(error, GraphOptError):
        error = CaptureError(f"forward raised {type(error).__name__}: {error}"[:500])
    cure = "multiple_of=, where the model takes some batches alone"
    if error.try_ and "on_error" not in error.try_:  # which is no option here
        cure = f"{error.try_}; {cure}"
    return type(error)(f"of batch {batch}: {error.what}", at=error.at, why=error.why, try_=cure)


def _arguments(given: Any, batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(given, Mapping):
        args, kwargs = check_inputs(None, given, ("make_inputs", f"make_inputs({batch})"))
        return args or (), kwargs
    names = (f"make_inputs({batch})", "")
    args, kwargs = check_inputs(given, None, names)
    if args is None:
        raise OptionError(
            f"{names[0]} is None", try_="a tensor, a tuple of arguments, or a dict of them"
        )
    return args, kwargs
