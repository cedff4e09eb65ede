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
