"""Which plan is taken where the oracle's peaks lie above the replay's, each by another amount."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from graphopt.capture.export import capture
from graphopt.errors import BudgetError
from graphopt.memory import plan as planning
from graphopt.memory.allocator import SMALL
from graphopt.memory.budget import Budget


@dataclasses.dataclass
class Oracle:
    """Stands for a body whose plans the oracle finds at some peaks."""

    peaks: dict[int, int]
    asked: int = 0

    def applied(self, choice: Any) -> tuple[Any, tuple[()]]:
        """The plan itself."""
        return choice, ()

    def predicted(self, choice: Any) -> Any:
        """Its peak."""
        self.asked += 1
        return SimpleNamespace(peak_bytes=self.peaks[choice.peak])


def confirmed(peaks: dict[int, int], limit: int) -> tuple[int, int]:
    """The replay's peak of the plan that is taken, and how many were judged."""
    points = [SimpleNamespace(peak=p) for p in sorted(peaks, reverse=True)]
    oracle = Oracle(peaks)
    found = planning._Asked.confirmed(cast(Any, oracle), cast(Any, points), limit)
    return found.choice.peak, oracle.asked


def test_no_excess_takes_the_fastest() -> None:
    assert confirmed({p: p for p in range(100, 1000, 20)}, 500) == (500, 1)


def test_equal_excess_shifts_the_target() -> None:
    taken, asked = confirmed({p: p + 37 for p in range(100, 1000)}, 500)
    assert taken == 463
    assert asked <= 4


def test_growing_excess_converges() -> None:
    peaks = {p: p + (1000 - p) // 8 for p in range(100, 1000, 10)}
    taken, asked = confirmed(peaks, 500)
    assert taken == 420  # 430 takes 501
    assert asked <= 2 * planning.TRIES


def test_the_tightest_may_have_more_slack_than_others() -> None:
    peaks = {p: p + 10 for p in range(100, 300, 10)} | {100: 160}
    assert peaks[confirmed(peaks, 125)[0]] <= 125


@given(
    st.dictionaries(st.integers(100, 1000), st.integers(0, 60), min_size=1, max_size=40),
    st.integers(90, 1000),
)
@settings(max_examples=150, deadline=None)
def test_never_gives_up_needlessly(excess: dict[int, int], limit: int) -> None:
    peaks = {p: p + more for p, more in excess.items()}
    taken, asked = confirmed(peaks, limit)
    assert asked <= 3 * planning.TRIES + 1
    near = sorted(peaks)[: planning.TRIES]
    if any(peaks[p] <= limit for p in near):
        assert peaks[taken] <= limit


class Deep(nn.Module):
    """Activations of 3.3 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(432, 432) for _ in range(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A loss."""
        for layer in self.layers:
            x = torch.nn.functional.gelu(layer(x))
        return x.square().mean()


def test_plans_keep_the_allocated_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """The replay knows requested bytes alone; what is accepted is within the budget with slack."""
    real = planning.predict
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.setattr(planning, "predict", lambda body, **k: real(body, device="cuda", **k))
    body = capture(Deep(), (torch.randn(2000, 432),)).body

    def plan(size: int) -> planning.MemoryPlan:
        return planning.plan(body, planning.MemoryOptions(Budget(size=size))).plan

    top = plan(2**40).unplanned_peak_bytes
    with pytest.raises(BudgetError) as error:
        plan(1024)
    low = error.value.lowest_bytes
    assert low is not None
    assert low + 8 * SMALL < top
    for share in (0.8, 0.4, 0.0):
        budget = low + int(share * (top - low))
        assert plan(budget).predicted_peak_bytes <= budget
