"""The error contract: what it lets pass and what it does not."""

from __future__ import annotations

import math

import pytest
import torch
from torch import fx

from graphopt.errors import UnsupportedError
from graphopt.numerics import Comparison, compare, to_float64

aten = torch.ops.aten


def judge(
    eager: torch.Tensor, optimized: torch.Tensor, ref: torch.Tensor, **other: torch.Tensor
) -> Comparison:
    more = {f"output/{k}": v for k, v in other.items()}
    return compare(
        {"output/y": eager, **more}, {"output/y": optimized, **more}, {"output/y": ref, **more}
    )


def truth(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_equal_runs_have_ratio_one() -> None:
    y = truth(100)
    found = judge(y.float(), y.float(), y)
    assert found.passed
    assert found.geometric_mean == 1.0


def test_both_exact_is_ratio_one() -> None:
    y = torch.ones(100, dtype=torch.float64)
    assert judge(y.float(), y.float(), y).tensors[0].ratio == 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_last_bit_is_allowed(dtype: torch.dtype) -> None:
    y = truth(1000).to(dtype).double()
    eager = y.to(dtype)
    assert judge(eager, eager * (1 + 0.25 * torch.finfo(dtype).eps), y).passed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_four_ulps_of_drift_fail_where_eager_is_rounded_once(dtype: torch.dtype) -> None:
    y = truth(1000)
    found = judge(y.to(dtype), (y * (1 + 4 * torch.finfo(dtype).eps)).to(dtype), y)
    assert not found.passed
    assert "times eager's" in found.tensors[0].verdict


def test_one_percent_on_a_small_gradient_fails_although_assert_close_lets_it_pass() -> None:
    big, small = truth(1000), truth(1000) * 1e-4
    wrong = (small * 1.01).float()
    torch.testing.assert_close(wrong, small.float(), rtol=1.3e-6, atol=1e-4)
    eager = {"grad/a": big.float(), "grad/b": small.float()}
    found = compare(eager, {**eager, "grad/b": wrong}, {"grad/a": big, "grad/b": small})
    assert [t.name for t in found.tensors if not t.passed] == ["grad/b"]


def test_one_bad_element_fails_by_the_greatest_error() -> None:
    y = truth(100_000)
    noise = y * (1 + 1e-4 * truth(100_000).flip(0))
    bad = noise.clone()
    bad[7] = y[7] + 0.01
    found = judge(noise.float(), bad.float(), y)
    assert found.tensors[0].ratio <= 2
    assert "greatest error" in found.tensors[0].verdict


def test_a_true_zero_gradient_is_measured_on_the_steps_scale() -> None:
    weight, zero = truth(1000), torch.zeros(64, dtype=torch.float64)
    eager = {"grad/w": weight.float(), "grad/key_bias": zero.float() + 1e-9}
    opt = {**eager, "grad/key_bias": zero.float() + 9e-9}
    found = compare(eager, opt, {"grad/w": weight, "grad/key_bias": zero})
    assert found.passed
    assert found.tensors[1].step_scale


def test_a_scalar_is_judged_beside_the_steps_median() -> None:
    y, loss = truth(1000), torch.tensor(2.0, dtype=torch.float64)
    noisy = (y * (1 + 1e-3 * truth(1000).flip(0))).float()
    eager = {"output/loss": loss.float(), "output/y": noisy}
    opt = {"output/loss": (loss * (1 + 1e-4)).float(), "output/y": noisy}
    assert compare(eager, opt, {"output/loss": loss, "output/y": y}).passed
    opt["output/loss"] = (loss * (1 + 1e-2)).float()
    assert not compare(eager, opt, {"output/loss": loss, "output/y": y}).passed


def test_geometric_mean_fails_where_every_ratio_is_slightly_up() -> None:
    names = [f"grad/{i}" for i in range(24)]
    ref = {n: truth(1000) for n in names}
    noise = truth(1000).flip(0)
    eager = {n: (r * (1 + 1e-4 * noise)).float() for n, r in ref.items()}
    opt = {n: (r * (1 + 1.2e-4 * noise)).float() for n, r in ref.items()}
    found = compare(eager, opt, ref)
    assert all(t.passed for t in found.tensors)
    assert not found.passed
    assert math.isclose(found.geometric_mean, 1.2, rel_tol=0.01)
    assert compare(eager, opt, ref, mean_counts=False).passed
    few = [{n: run[n] for n in names[:5]} for run in (eager, opt, ref)]
    assert compare(*few).passed  # the mean of a handful is luck


def test_a_like_error_is_as_good_where_eager_has_no_digit_right() -> None:
    ref, noise = truth(1000) * 1e-20, truth(1000).flip(0)
    eager, like = (noise * 1e-9).float(), (noise * -9e-9).float()
    assert judge(eager, like, ref).passed
    assert not judge(eager, (noise * 1e-6).float(), ref).passed


def test_float64_runs_must_agree() -> None:
    y = truth(1000)
    assert judge(y, y * (1 + 1e-10), y).geometric_mean == 1.0
    assert not judge(y, y * (1 + 1e-8), y).passed


@pytest.mark.parametrize(("odd", "fine"), [(math.nan, True), (math.inf, True), (-math.inf, False)])
def test_infinities_and_nans_stand_where_eager_has_them(odd: float, fine: bool) -> None:
    y = truth(100)
    eager, opt = y.float(), y.float()
    eager[3], opt[3] = abs(odd), odd
    found = judge(eager, opt, y)
    assert found.passed is fine
    opt[4] = math.nan
    assert not judge(eager, opt, y).passed


def test_integers_and_dtypes_are_equal() -> None:
    y = truth(10)
    ids = torch.arange(10)
    assert judge(y.float(), y.float(), y, ids=ids).passed
    assert not judge(ids, ids + 1, ids).passed
    assert (
        "bfloat16[10] where eager has float32[10]" in judge(y.float(), y.bfloat16(), y).reasons[0]
    )


def test_a_missing_gradient_is_right_only_where_eager_has_none_or_zeros() -> None:
    y, zero = truth(10), torch.zeros(10)
    ref = {"grad/w": y}
    assert not compare({"grad/w": y.float()}, {"grad/w": None}, ref).passed
    assert not compare({"grad/w": None}, {"grad/w": y.float()}, ref).passed
    assert compare({"grad/w": None}, {"grad/w": zero}, {"grad/w": None}).passed
    assert compare({"grad/w": None}, {"grad/w": None}, {"grad/w": None}).passed


def test_different_names_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"grad/b"):
        compare({"grad/a": None}, {"grad/b": None}, {"grad/a": None})


def test_to_dict_and_repr_tell_the_verdict() -> None:
    y = truth(100)
    found = judge(y.float(), y.float() * 1.01, y)
    assert found.to_dict()["passed"] is False
    assert "OUTSIDE the contract" in repr(found)
    assert "output/y" in repr(found)


def test_float64_copy_rewrites_every_float_literal() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    h = graph.call_function(aten.to.dtype, (x, torch.bfloat16))
    h = graph.call_function(aten.softmax.int, (h, -1, torch.float32))
    i = graph.call_function(aten.arange.default, (4,), {"dtype": torch.int64})
    f = graph.call_function(aten.full.default, ([4], 0.1))
    f.meta["val"] = torch.empty(4)
    h = graph.call_function(aten.add.Tensor, (h, f))
    graph.output((h, i))
    out, ints = fx.GraphModule({}, to_float64(graph))(truth(4))
    assert out.dtype == torch.float64
    assert torch.equal(out, truth(4).softmax(-1) + 0.1)
    assert ints.dtype == torch.int64
    assert "bfloat16" in str(graph)  # the graph itself is left as it was


def test_a_view_of_bits_has_no_float64_copy() -> None:
    graph = fx.Graph()
    graph.output((graph.call_function(aten.view.dtype, (graph.placeholder("x"), torch.int32)),))
    with pytest.raises(UnsupportedError):
        to_float64(graph)
