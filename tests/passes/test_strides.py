"""A replacement may lay its result out otherwise; nobody outside notices, and no view fails."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from graphopt.passes import PassOptions, rule, run_pipeline
from tests.passes.bodies import body_of, run

aten = torch.ops.aten


def attend(x: torch.Tensor) -> torch.Tensor:
    return (x @ x.transpose(-2, -1)).softmax(-1) @ x


def heads() -> torch.Tensor:
    return torch.randn(2, 5, 3, 8).transpose(1, 2)


@pytest.mark.parametrize(
    "function",
    [
        attend,
        lambda x: F.layer_norm(x, (8,)),
        lambda x: F.layer_norm(x + x.sin(), (8,)),
        lambda x: F.silu(x) * x.sin(),
        lambda x: F.rms_norm(x, (8,)),
    ],
)
def test_results_keep_their_strides(function):
    x = heads()
    result = run_pipeline(body_of(function, (x,)))
    assert any(r.kind == "local" for r in result.rewrites)
    want, got = function(x), run(result.body, (x,))[0]
    assert got.stride() == want.stride()
    torch.testing.assert_close(got, want)


def test_a_view_behind_another_layout_gets_a_copy():
    def function(x):
        return attend(x).view(6, 5, 8) * 2

    x = heads()
    result = run_pipeline(body_of(function, (x,)))
    torch.testing.assert_close(run(result.body, (x,))[0], function(x))


def test_what_follows_a_dropout_keeps_its_strides():
    def function(x):
        return F.relu(F.dropout(x, 0.5, True))

    x = heads()
    got = run(run_pipeline(body_of(function, (x,))).body, (x,))[0]
    assert got.stride() == function(x).stride()


def test_parts_of_a_value_keep_their_strides():
    def function(x):
        return (F.silu(x) * x.sin()).chunk(2, 0)[1]

    x = heads()
    got = run(run_pipeline(body_of(function, (x,))).body, (x,))[0]
    assert got.stride() == function(x).stride()


def test_a_value_that_is_returned_twice_stays_one_tensor():
    def function(x):
        y = F.silu(x) * x.sin()
        return y, y

    x = heads()
    one, other = run(run_pipeline(body_of(function, (x,))).body, (x,))
    assert one.stride() == function(x)[0].stride()
    assert one is other


def test_a_value_and_a_part_of_it_share_memory():
    def function(x):
        y = F.silu(x) * x.sin()
        return y.chunk(2, -1)[1], y, y[:, 1:]

    x = heads()
    values = run(run_pipeline(body_of(function, (x,))).body, (x,))
    assert [v.stride() for v in values] == [v.stride() for v in function(x)]
    assert len({v.untyped_storage().data_ptr() for v in values}) == 1


def test_a_view_behind_a_dropout_gets_a_copy():
    def function(x):
        return F.dropout(x, 0.5, True).transpose(1, 2).view(2, 5, 24) * 2

    x = heads()
    got = run(run_pipeline(body_of(function, (x,))).body, (x,))[0]
    kept = got != 0
    torch.testing.assert_close(got[kept], (x.transpose(1, 2).reshape(2, 5, 24) * 4)[kept])


def test_a_rule_that_makes_what_it_matches_ends():
    @rule("fusion", register=False)
    def again(x):
        """relu(x) is relu(x)."""
        return aten.relu.default(x)

    @again.replace
    def _(m):
        return m.call(aten.relu.default, m.x)

    result = run_pipeline(body_of(nn.ReLU(), (torch.ones(2),)), PassOptions(rules=[again]))
    assert len(result.rewrites) <= 4


def _turned(h: torch.Tensor) -> torch.Tensor:
    return h.transpose(1, 2)


OF_HEADS = {
    "a value and a view that needs its layout": lambda h: (h, _turned(h).view(2, 5, -1)),
    "the view first": lambda h: (_turned(h).view(2, 5, -1), h),
    "two views that need it": lambda h: (_turned(h).view(2, 5, -1), _turned(h).view(10, -1)),
    "two reshapes that are views": lambda h: (_turned(h).reshape(2, 5, -1), h.reshape(2, 3, -1)),
    "two orders of its dims": lambda h: (_turned(h), h.mT, h),
    "a head": lambda h: (h[:, 0], _turned(h).view(2, 5, -1)),
    "heads": lambda h: (*h.unbind(1), _turned(h).flatten(2)),
    "expanded": lambda h: (h.expand(2, -1, -1, -1, -1), _turned(h).view(2, 5, -1)),
    "behind an activation": lambda h: (h.relu(), _turned(h.relu()).view(2, 5, -1)),
    "read inside": lambda h: (h @ h.mT, _turned(h).view(2, 5, -1), h),
    "two copies": lambda h: (h.contiguous(), h.contiguous()),
    "copies that need no copy any more": lambda h: (h.reshape(2, -1), h.reshape(-1), h.sum()),
    "a copy and its views": lambda h: (h.reshape(-1), *h.contiguous().chunk(2, 0)),
}


def _sharing(values: tuple[torch.Tensor, ...]) -> list[int]:
    """For each tensor, the first that shares its memory."""
    memory = [v.untyped_storage().data_ptr() for v in values]
    return [memory.index(m) for m in memory]


@pytest.mark.parametrize("results", OF_HEADS.values(), ids=OF_HEADS)
def test_results_share_memory_as_in_eager(results):
    def function(x):
        return results(F.silu(x) * x.sin())

    x = heads()
    rewritten = run_pipeline(body_of(function, (x,)))
    assert any(r.kind == "local" for r in rewritten.rewrites)
    want, got = function(x), run(rewritten.body, (x,))
    assert [v.stride() for v in got] == [v.stride() for v in want]
    assert _sharing(got) == _sharing(want)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other)


def test_one_copy_serves_all_views():
    def function(x):
        h = F.silu(x) * x.sin()
        return _turned(h).view(2, 5, -1) + 1, _turned(h).view(10, -1) + 2, h @ h.mT

    x = heads()
    body = run_pipeline(body_of(function, (x,))).body
    assert sum(n.target is aten.clone.default for n in body.graph.nodes) == 1


def test_results_that_lie_as_in_eager_get_no_copy():
    def function(x):
        return (F.silu(x) * x.sin()).contiguous(), x.sin().relu()

    body = run_pipeline(body_of(function, (heads(),))).body
    assert not any(n.target is aten.clone.default for n in body.graph.nodes)


def test_a_dropout_that_is_off_gives_back_its_input():
    def function(x):
        return x, F.dropout(x, 0.5, False), F.dropout(x, 0.0, True)

    x = heads()
    got = run(run_pipeline(body_of(function, (x,))).body, (x,))
    assert all(v is x for v in got)
