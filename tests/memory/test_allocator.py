"""The caching allocator, rule by rule, and over random requests."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from graphopt.capture.export import capture
from graphopt.memory import pool
from graphopt.memory.allocator import (
    CachingAllocator,
    allocated_curve,
    expandable_segments,
    rounded,
)
from graphopt.memory.oracle import predict
from graphopt.memory.tracker import StorageTracker

MIB = 2**20


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(pool.CONF, raising=False)
    monkeypatch.delenv(pool.OLD_CONF, raising=False)


# ---- the rules


@pytest.mark.parametrize(
    ("asked", "block", "segment"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),  # the largest small one
        (MIB + 1, MIB + 512, 20 * MIB),
        (9 * MIB, 9 * MIB, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),  # from here on segments of their own
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB),  # exactly 1 MiB would remain: not cut
        (11 * MIB - 1, 12 * MIB, 12 * MIB),
        (11 * MIB - 512, 11 * MIB - 512, 12 * MIB),
        (15 * MIB + 10, 16 * MIB, 16 * MIB),
    ],
)
def test_one_request(asked: int, block: int, segment: int) -> None:
    allocator = CachingAllocator()
    taken = allocator.take(asked)
    assert (taken.size, allocator.allocated, allocator.reserved) == (block, block, segment)
    assert (allocator.requested, taken.slack) == (asked, block - rounded(asked))


def test_requests_share_a_segment() -> None:
    allocator = CachingAllocator()
    sizes = [allocator.take(4 * MIB).size for _ in range(5)]
    assert sizes == [4 * MIB] * 5
    assert allocator.reserved == 20 * MIB
    allocator.take(4 * MIB)
    assert allocator.reserved == 40 * MIB


def test_last_of_a_segment_gets_the_rest() -> None:
    allocator = CachingAllocator()
    sizes = [allocator.take(s * MIB).size // MIB for s in (4, 4, 3, 4, 4)]
    assert sizes == [4, 4, 3, 4, 5]


def test_small_blocks_are_cut_at_512_bytes() -> None:
    allocator = CachingAllocator()
    allocator.take(MIB)
    assert allocator.take(MIB - 512).size == MIB - 512
    assert allocator.take(512).size == 512
    assert allocator.reserved == 2 * MIB


def test_pools_do_not_share() -> None:
    allocator = CachingAllocator()
    allocator.give_back(allocator.take(19 * MIB))
    allocator.take(512)
    assert allocator.reserved == 20 * MIB + 2 * MIB


def test_best_fit_takes_the_smallest() -> None:
    allocator = CachingAllocator()
    large, small = allocator.take(40 * MIB), allocator.take(12 * MIB)
    allocator.give_back(large)
    allocator.give_back(small)
    assert allocator.take(12 * MIB).address == small.address


def test_best_fit_takes_the_lowest_of_equals() -> None:
    allocator = CachingAllocator()
    first, second = allocator.take(12 * MIB), allocator.take(12 * MIB)
    allocator.give_back(second)
    allocator.give_back(first)
    assert allocator.take(11 * MIB).address == first.address


def test_a_reused_block_has_slack() -> None:
    allocator = CachingAllocator()
    allocator.give_back(allocator.take(12 * MIB))
    assert allocator.take(11 * MIB + 512).size == 12 * MIB
    assert allocator.allocated == 12 * MIB


def test_neighbours_merge() -> None:
    allocator = CachingAllocator()
    a, b, c = (allocator.take(4 * MIB) for _ in range(3))
    allocator.give_back(a)
    allocator.give_back(c)  # merges with the 8 MiB that follow it
    assert [f.size // MIB for f in allocator.free_blocks()] == [4, 12]
    allocator.give_back(b)
    assert [f.size // MIB for f in allocator.free_blocks()] == [20]


def test_segments_do_not_merge() -> None:
    allocator = CachingAllocator()
    for block in [allocator.take(12 * MIB) for _ in range(2)]:
        allocator.give_back(block)
    assert [f.size // MIB for f in allocator.free_blocks()] == [12, 12]


def test_an_expandable_segment_has_no_slack() -> None:
    allocator = CachingAllocator(expandable=True)
    first = allocator.take(11 * MIB)
    assert (first.size, allocator.reserved) == (11 * MIB, 20 * MIB)
    second = allocator.take(11 * MIB)  # 9 MiB are there: the segment grows by one page
    assert (second.size, allocator.reserved) == (11 * MIB, 40 * MIB)
    assert second.address == first.address + 11 * MIB
    allocator.give_back(first)
    allocator.give_back(second)
    assert [f.size // MIB for f in allocator.free_blocks()] == [40]


# ---- random requests

SIZES = st.one_of(st.integers(1, 4096), st.integers(1, 2 * MIB), st.integers(MIB - 600, 25 * MIB))
REQUESTS = st.lists(st.one_of(SIZES, st.integers(-100, -1)), min_size=1, max_size=60)
"""A size to take, or the negative place of a block to give back."""


@given(REQUESTS, st.booleans())
@settings(max_examples=60, deadline=None)
def test_invariants(requests: list[int], expandable: bool) -> None:
    allocator = CachingAllocator(expandable)
    held = []
    for request in requests:
        if request > 0:
            held.append(allocator.take(request))
        elif held:
            allocator.give_back(held.pop(request % len(held)))
        free = allocator.free_blocks()
        assert allocator.requested == sum(b.requested for b in held)
        assert allocator.allocated == sum(b.size for b in held) >= allocator.requested
        assert allocator.reserved == allocator.allocated + sum(b.size for b in free)
        for block in held:
            small = rounded(block.requested) <= MIB
            assert 0 <= block.slack <= (0 if small or expandable else MIB)
        spans = sorted((b.address, b.size) for b in (*held, *free))
        assert all(a + s <= b for (a, s), (b, _) in itertools.pairwise(spans))
    for block in held:
        allocator.give_back(block)
    assert allocator.allocated == allocator.requested == 0
    assert allocator.reserved == sum(b.size for b in allocator.free_blocks())
    assert all(b.before is None and b.after is None for b in allocator.free_blocks())


# ---- a step


def _step(sizes: list[int], kept: int = 0) -> tuple[StorageTracker, int]:
    """A record of tensors that are all taken, then given back in turn, after some that stay."""
    tracker = StorageTracker(512)
    made = [tracker.take(s, "", "op" if i >= kept else "", "cuda:0") for i, s in enumerate(sizes)]
    for one in made[kept:]:
        tracker.give_back(one)
    return tracker, kept


def test_curve_counts_slack() -> None:
    tracker, start = _step([9 * MIB, 10 * MIB + 512], kept=1)
    curve = allocated_curve(tracker.allocations, tracker.events, start)
    assert curve == [9 * MIB, 20 * MIB, 9 * MIB]  # all 11 MiB that the first one left
    exact = allocated_curve(tracker.allocations, tracker.events, start, expandable=True)
    assert exact == tracker.curve()


def test_a_warm_cache_may_have_more_slack() -> None:
    tracker = StorageTracker(512)
    for first, second in ((12 * MIB, 0), (11 * MIB + 512, 11 * MIB + 512)):
        made = [tracker.take(s, "", "op", "cuda:0") for s in (first, second)]
        for one in made:
            tracker.give_back(one)
    cold = max(allocated_curve(tracker.allocations, tracker.events, 0, steps=1))
    warm = max(allocated_curve(tracker.allocations, tracker.events, 0))
    requested = tracker.peak().bytes
    assert requested < cold <= warm == 24 * MIB


def test_state_that_dies_in_the_step_is_followed_once() -> None:
    tracker = StorageTracker(512)
    state = tracker.take(11 * MIB, "", "", "cuda:0")
    tracker.give_back(state)
    assert allocated_curve(tracker.allocations, tracker.events, 1) == [12 * MIB, 0]


@given(st.lists(SIZES, max_size=30), st.integers(0, 5))
@settings(max_examples=40, deadline=None)
def test_curve_lies_above_what_is_alive(sizes: list[int], kept: int) -> None:
    tracker, start = _step(sizes, min(kept, len(sizes)))
    curve, alive = allocated_curve(tracker.allocations, tracker.events, start), tracker.curve()
    assert len(curve) == len(alive)
    for at, (taken, asked) in enumerate(zip(curve, alive, strict=True)):
        large = sum(a.bytes > MIB for a in tracker.live_at(at))
        assert asked <= taken <= asked + large * MIB


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        (pool.CONF, "expandable_segments:True", True),
        (pool.OLD_CONF, "max_split_size_mb:64, expandable_segments:True", True),
        (pool.CONF, "expandable_segments:False", False),
        (pool.CONF, "", False),
    ],
)
def test_settings(name: str, value: str, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    assert expandable_segments() is expected


def test_settings_that_came_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(pool.OLD_CONF, "expandable_segments:True")
    monkeypatch.setattr(pool, "_unread", {"expandable_segments:True"})
    assert not expandable_segments()


# ---- predictions


class Net(nn.Module):
    """Weights of 4.87 MiB: the last of four in a segment gets what is left of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(1130, 1130) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A loss."""
        return self.layers(x).square().mean()


def test_prediction_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    body = capture(Net(), (torch.randn(64, 1130),)).body
    found = predict(body, device="cuda")
    assert sum(found.breakdown.values()) == found.peak_bytes
    assert found.breakdown["slack"] > 0
    assert found.peak_bytes == sum(h.bytes for h in found.live) + found.breakdown["slack"]
    assert found.peak_bytes == max(m.peak_bytes for m in found.timeline)
    monkeypatch.setenv(pool.CONF, "expandable_segments:True")
    exact = predict(body, device="cuda")
    assert exact.breakdown["slack"] == 0
    assert exact.peak_bytes < found.peak_bytes


def test_prediction_on_the_cpu_has_no_slack() -> None:
    body = capture(Net(), (torch.randn(64, 1130),)).body
    assert predict(body).breakdown["slack"] == 0
