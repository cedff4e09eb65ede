"""The strategies give what they say, of the kinds that they name, and shrink to the plainest."""

from __future__ import annotations

import pytest
import torch
from hypothesis import find, given, settings
from hypothesis import strategies as st

import graphopt
from graphopt.testing import (
    dtypes,
    inputs_like,
    lay_out,
    make_values,
    shapes,
    tensors,
    upstream_gradients,
    values,
)
from graphopt.testing.strategies import KINDS, LAYOUTS, UPSTREAM

SHAPE = (4, 6)

HAS = {
    "normal": lambda x: x.unique().numel() == x.numel(),
    "ties": lambda x: x.unique().numel() <= 5,
    "zeros": lambda x: bool((x == 0).any() and (x != 0).any()),
    "offset": lambda x: float(x.mean()) > 2.5 and float(x.std()) < 0.2,
    "wide": lambda x: float(x.abs().max() / x.abs().min()) > 100,
    "tiny": lambda x: float(x.abs().max()) < 1e-2,
    "denormal": lambda x: 0 < float(x.abs().max()) < torch.finfo(x.dtype).tiny * 2,
    "huge": lambda x: bool((x * x).isinf().any()) and bool(x.isfinite().all()),
    "infinities": lambda x: bool(x.isinf().any()) and not bool(x.isnan().any()),
    "nan": lambda x: bool(x.isnan().any()) and not bool(x.isnan().all()),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_is_what_it_says(kind: str, dtype: torch.dtype) -> None:
    x = make_values(kind, (40,), dtype, 3)
    assert x.dtype is dtype
    if not (kind == "normal" and dtype is torch.bfloat16):
        assert HAS[kind](x)
    assert torch.equal(x.view(torch.uint8), make_values(kind, (40,), dtype, 3).view(torch.uint8))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(4, 6), (0, 3), (), (5,), (2, 3, 4, 5)])
def test_a_layout_keeps_the_values(layout: str, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    y = lay_out(x, layout)
    assert y.shape == x.shape
    if layout == "expanded" and shape[:1] > (1,):
        assert y.stride(0) == 0
    else:
        assert torch.equal(x, y)
    if shape == (4, 6):
        odd = not y.is_contiguous() or y.storage_offset() > 0
        assert odd == (layout not in ("contiguous", "channels_last"))


@given(tensors(shapes(min_dims=2, max_dims=3), dtypes(double=True), requires_grad=True))
def test_tensors(x: torch.Tensor) -> None:
    assert x.is_floating_point()
    assert x.is_leaf
    assert x.requires_grad
    assert 2 <= x.dim() <= 3


@given(st.data())
def test_upstream_gradients_fit_the_results(data: st.DataObject) -> None:
    results = [torch.ones(3, 2), torch.ones((), dtype=torch.bfloat16), torch.ones(0, 2)]
    found = data.draw(upstream_gradients(results))
    assert [(g.shape, g.dtype) for g in found] == [(y.shape, y.dtype) for y in results]


@pytest.mark.parametrize("kind", UPSTREAM)
def test_every_kind_of_upstream_gradient(kind: str) -> None:
    (g,) = find(upstream_gradients(torch.ones(3, 2), [kind]), lambda g: True)
    assert g.isfinite().all()
    assert (kind == "zeros") == (not bool(g.any()))
    assert (kind == "expanded") == (g.stride() == (0, 0))


IDS = torch.tensor([[1, 7, 3], [2, 2, 6]])


@given(inputs_like((torch.randn(2, 5),), {"ids": IDS, "mask": IDS > 2, "flag": True}))
def test_inputs_like_varies_the_batch(drawn: tuple[tuple[torch.Tensor], dict[str, object]]) -> None:
    (x,), kwargs = drawn
    ids, mask = kwargs["ids"], kwargs["mask"]
    assert isinstance(ids, torch.Tensor)
    assert isinstance(mask, torch.Tensor)
    assert 1 <= x.shape[0] <= 4
    assert x.shape[1:] == (5,)
    assert ids.shape == mask.shape == (x.shape[0], 3)
    assert ids.dtype is torch.int64
    assert int(ids.min()) >= 1
    assert int(ids.max()) <= 7
    assert bool(mask.any())
    assert kwargs["flag"] is True


@given(inputs_like((torch.randn(5, 7), torch.randn(7, 5)), sizes={5: (0, 3), 7: (7, 9)}))
def test_equal_sizes_stay_equal(drawn: tuple[tuple[torch.Tensor, ...], dict[str, object]]) -> None:
    (a, b), _ = drawn
    assert a.shape == b.shape[::-1]
    assert a.shape[0] <= 3
    assert 7 <= a.shape[1] <= 9


FEW = settings(max_examples=60, database=None)


def test_they_shrink_to_the_plainest() -> None:
    x = find(tensors(shapes(min_side=1)), lambda t: True, settings=FEW)
    assert x.shape == (1,)
    assert x.is_contiguous()
    assert torch.equal(x, make_values("normal", (1,), torch.float32, 0))
    assert find(
        values((2, 2), kinds=KINDS), lambda t: bool(t.isnan().any()), settings=FEW
    ).shape == (2, 2)


WRONG = {
    "a kind": lambda: make_values("odd", (2,), torch.float32, 0),
    "a layout": lambda: lay_out(torch.ones(2), "odd"),
    "sizes by a word": lambda: find(inputs_like(torch.ones(2), sizes="all"), lambda x: True),
    "a size that is none": lambda: find(
        inputs_like(torch.ones(2), sizes={3: (1, 2)}), lambda x: True
    ),
}


@pytest.mark.parametrize("use", WRONG)
def test_wrong_uses(use: str) -> None:
    with pytest.raises(graphopt.OptionError):
        WRONG[use]()
