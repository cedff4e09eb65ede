"""Live bytes by storage."""

import gc

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from graphopt.memory.tracker import StorageTracker


def test_peak_is_the_most_that_was_alive_at_once():
    with StorageTracker() as seen:
        x = torch.ones(1000)
        y = (x + x).sum()
        assert seen.live_bytes == 4004
    assert seen.peak().bytes == 8004
    assert [a.op for a in seen.peak().live] == [
        "aten.ones.default",
        "aten.add.Tensor",
        "aten.sum.default",
    ]
    del x, y
    assert seen.live_bytes == 0


def test_views_take_nothing():
    with StorageTracker() as seen:
        x = torch.ones(10, 10)
        views = [x.t(), x[2:], x.view(100), x.expand(3, 10, 10), x.detach()]
        del x
    assert len(seen.allocations) == 1
    assert seen.live_bytes == 400
    del views
    assert seen.live_bytes == 0


def test_a_view_of_a_tensor_from_before_takes_nothing():
    x = torch.ones(10, 10)
    with StorageTracker() as seen:
        y = x.t() + 1
    assert seen.live_bytes == y.untyped_storage().nbytes() == 400


def test_what_is_held_counts_once_by_storage():
    w = torch.ones(100)
    seen = StorageTracker()
    assert seen.hold(w, "parameters", "w")
    assert not seen.hold(w[10:], "parameters", "tied")
    assert seen.live_bytes == 400


@pytest.mark.parametrize(("rounding", "size"), [(1, 4), (512, 512), (None, 4)])
def test_sizes_are_rounded_up(rounding, size):
    with StorageTracker(rounding) as seen:
        x = torch.ones(1)
        nothing = torch.ones(0)
    assert seen.live_bytes == size
    del x, nothing


def test_a_resized_storage_counts_with_its_new_size():
    with StorageTracker() as seen:
        x = torch.empty(10)
        x.resize_(1000)
    assert seen.live_bytes == 4000
    assert seen.peak().bytes == 4000
    del x
    assert seen.live_bytes == 0


def test_storages_that_follow_each_other_are_told_apart():
    with StorageTracker() as seen:
        for _ in range(50):
            torch.ones(100)
    assert len(seen.allocations) == 50
    assert seen.peak().bytes == 400
    assert seen.live_bytes == 0


def test_parts_of_sparse_tensors_count():
    with StorageTracker() as seen:
        x = torch.eye(8).to_sparse()
    parts = (x._indices(), x._values())
    assert seen.live_bytes == sum(t.untyped_storage().nbytes() for t in parts)


def test_fake_tensors_count_as_real_ones_do():
    def step():
        x = torch.ones(8, 16, requires_grad=True)
        (x @ torch.ones(16, 4)).relu().pow(2).sum().backward()
        return x

    with StorageTracker() as real:
        kept = step()
    with FakeTensorMode(), StorageTracker() as fake:
        fakes = step()
    assert fake.curve() == real.curve()
    assert fake.live_bytes == real.live_bytes > 0
    del kept, fakes


def test_peak_within_a_part_of_the_run():
    with StorageTracker() as seen:
        torch.ones(1000)
        middle = len(seen.events)
        torch.ones(10)
    assert seen.peak(start=middle).bytes == 40
    assert seen.peak(end=middle).bytes == 4000


def test_after_close_nothing_is_followed():
    with StorageTracker() as seen:
        x = torch.ones(10)
        seen.close()
    del x
    gc.collect()
    assert seen.live_bytes == 40


def test_who_ran_an_operation_is_kept():
    name = "first"
    with StorageTracker(where=lambda: name) as seen:
        x = torch.ones(1)
        name = "second"
        y = x + 1
    assert [a.label for a in seen.allocations] == ["first", "second"]
    del y


def test_an_operation_can_be_followed_inside():
    def inside(func, args, kwargs):
        return (lambda x: (x + 1) * 2) if func is torch.ops.aten.relu.default else None

    with StorageTracker(within=inside) as seen:
        y = torch.relu(torch.ones(100))
    assert seen.peak().bytes == 1200
    assert y[0] == 4


@pytest.mark.gpu
def test_backward_on_autograds_own_thread_is_followed():
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)).cuda()
    x = torch.randn(128, 64, device="cuda")
    with StorageTracker(only="cuda") as seen:
        model(x).sum().backward()
    held = sum(-(-p.grad.nbytes // 512) * 512 for p in model.parameters())
    assert seen.live_bytes == held
