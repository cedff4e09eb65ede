"""The measuring itself: start-up, turns, memory, profile; a variant that fails is left behind."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import statistics
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from graphopt.bench.result import DeviceTime, Row
from graphopt.bench.step import Plan, Rng, Step, first_step
from graphopt.bench.trace import device_time, host_time, peak_allocated, record, synchronize
from graphopt.errors import GraphoptWarning
from graphopt.module import GraphoptModule

MOST_STEPS = 1000
"""Steps in one turn at most."""


@dataclasses.dataclass
class Variant:
    """One way of running the model, and what was measured of it so far.

    Attributes:
        name: what its row is called.
        make: builds what is called with the inputs; part of the start-up.
        module: whose parameters and buffers it needs.
        step: the step, once it was built.
        error: why it cannot be measured.
        failure: the exception behind `error`.
        start_s: seconds of building and of the first step.
        held: bytes on the GPU that it keeps between steps beside state and inputs.
        each: steps in one turn.
        times: milliseconds of each timed step.
        walls: milliseconds of a step on the clock, one figure a turn.
        peak: bytes, see `Row.peak_bytes`.
        device: where the time of a step goes.
        notes: warnings that it gave.
    """

    name: str
    make: Callable[[], Callable[..., Any]]
    module: nn.Module
    step: Step | None = None
    error: str | None = None
    failure: BaseException | None = None
    start_s: float | None = None
    held: int = 0
    each: int = 1
    times: list[float] = dataclasses.field(default_factory=list)
    walls: list[float] = dataclasses.field(default_factory=list)
    peak: int | None = None
    device: DeviceTime | None = None
    notes: list[str] = dataclasses.field(default_factory=list)

    def row(self) -> Row:
        """The figures."""
        if self.error is not None or not self.times:
            return Row(self.name, self.error, start_s=self.start_s, notes=tuple(self.notes))
        low, _, high = quartiles(self.times)
        return Row(
            name=self.name,
            ms=statistics.median(self.times),
            low_ms=low,
            high_ms=high,
            wall_ms=statistics.median(self.walls),
            steps=len(self.times),
            peak_bytes=self.peak,
            start_s=self.start_s,
            value=None if self.step is None else self.step.value,
            device=self.device,
            notes=tuple(self.notes),
        )


def quartiles(times: Sequence[float]) -> tuple[float, float, float]:
    """The 25th, 50th and 75th percentile; of a single figure, that figure."""
    if len(times) == 1:
        return times[0], times[0], times[0]
    low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
    return low, middle, high


class Bench:
    """Runs variants through the stages; whatever a variant raises ends that variant alone."""

    def __init__(self, plan: Plan, rng: Rng, say: Callable[[str], None]) -> None:
        """Set up.

        Args:
            plan: what a step is.
            rng: the random state that every first step starts from.
            say: takes the progress, one text at a time.
        """
        self.plan = plan
        self.rng = rng
        self.say = say
        self.cuda = plan.device.type == "cuda"

    def guarded(self, variant: Variant, stage: Callable[[Variant], None]) -> None:
        """Run one stage of a variant unless it failed before."""
        if variant.error is not None:
            return
        try:
            stage(variant)
        except Exception as error:
            variant.error = describe(error)
            variant.failure = error
            traceback.clear_frames(error.__traceback__)  # they hold the step's tensors
            variant.step = None
            self.plan.drop_gradients()
            self._collect()

    def start(self, variant: Variant, warmup: int, seconds: float) -> None:
        """Build a variant and take its first step, then warm it up and choose the turn's length.

        Args:
            variant: it.
            warmup: steps after the first that are not timed.
            seconds: how long a turn shall last.
        """
        self.say(f"{variant.name}: first step")
        self._collect()
        before, resident = self._allocated(), self.plan.resident(variant.module)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("ignore")
            warnings.filterwarnings("always", category=GraphoptWarning)
            begun = time.perf_counter()
            variant.step = step = Step(variant.make(), self.plan)
            built = time.perf_counter() - begun
            variant.start_s = built + first_step(step, self.rng)
            for _ in range(warmup):
                step()
            synchronize(self.plan.device)
        variant.notes += dict.fromkeys(str(w.message) for w in caught)
        if isinstance(step.call, GraphoptModule) and not step.call.rewrites:
            variant.notes.append("nothing was rewritten in this graph")
        begun = time.perf_counter()
        step()
        synchronize(self.plan.device)
        took = max(time.perf_counter() - begun, 1e-6)
        # two or more on a GPU: the queue is filled by one step while the next is timed
        variant.each = min(max(round(seconds / took), 2 if self.cuda else 1), MOST_STEPS)
        self._collect()
        grown = self.plan.resident(variant.module) - resident
        variant.held = max(0, self._allocated() - before - grown)

    def turn(self, variant: Variant) -> None:
        """Time a few steps in a row."""
        assert variant.step is not None
        if self.cuda:
            times, wall = _turn_on_gpu(variant.step, variant.each, self.plan.device)
        else:
            times, wall = _turn_on_host(variant.step, variant.each, self.plan.device)
        variant.times += times
        variant.walls.append(wall)

    def memory(self, variant: Variant) -> None:
        """The peak of one step, beside nothing that is another variant's."""
        assert variant.step is not None
        self.say(f"{variant.name}: memory")
        self._collect()
        if self.cuda:
            torch.cuda.reset_peak_memory_stats(self.plan.device)
            before = self._allocated()
            variant.step()
            synchronize(self.plan.device)
            peak: int | None = torch.cuda.max_memory_allocated(self.plan.device) - before
        elif self.plan.device.type == "cpu":
            peak = peak_allocated(record(variant.step, cuda=False, memory=True))
        else:
            return
        if peak is not None:
            variant.peak = peak + variant.held + self.plan.resident(variant.module)

    def profile(self, variant: Variant) -> None:
        """Where the time of a step goes."""
        assert variant.step is not None
        if not self.cuda and self.plan.device.type != "cpu":
            return
        self.say(f"{variant.name}: profile")
        step, step_ms = variant.step, statistics.median(variant.times)
        steps = 3 if step_ms < 300 else 1
        took = 0.0

        def run() -> None:
            nonlocal took
            begun = time.perf_counter()
            for _ in range(steps):
                step()
            synchronize(self.plan.device)
            took = (time.perf_counter() - begun) * 1e3 / steps

        events = record(run, cuda=self.cuda)
        if self.cuda:
            variant.device = device_time(events, steps, step_ms)
        else:
            variant.device = host_time(events, steps, took, step_ms)

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated(self.plan.device) if self.cuda else 0

    def _collect(self) -> None:
        """Leave no garbage on the GPU; the CPU's peak is a difference, which none alters."""
        synchronize(self.plan.device)
        if self.cuda:
            gc.collect()


def _turn_on_gpu(
    step: Callable[[], object], count: int, device: torch.device
) -> tuple[list[float], float]:
    """(milliseconds of each step between events, milliseconds of a step on the clock).

    One step goes ahead, so that the GPU has work queued when the first timed one is launched.
    """
    torch.cuda.synchronize(device)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    begun = time.perf_counter()
    step()
    with torch.cuda.device(device):
        marks[0].record()
        for mark in marks[1:]:
            step()
            mark.record()
    torch.cuda.synchronize(device)
    wall = (time.perf_counter() - begun) * 1e3 / (count + 1)
    return [a.elapsed_time(b) for a, b in itertools.pairwise(marks)], wall


def _turn_on_host(
    step: Callable[[], object], count: int, device: torch.device
) -> tuple[list[float], float]:
    times = []
    for _ in range(count):
        begun = time.perf_counter()
        step()
        synchronize(device)
        times.append((time.perf_counter() - begun) * 1e3)
    return times, statistics.fmean(times)


def describe(error: BaseException) -> str:
    """An exception in one line: its class and the first line that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else ""
    return f"{type(error).__name__}: {text}"[:300]
