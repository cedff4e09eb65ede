"""Hypothesis strategies for tensors that bite: ties, zeros, extremes, odd strides and gradients.

Random normal numbers never tie, are never zero and never lie transposed in memory, so tests on them
alone pass over wrong gradients at ties, wrong masks and kernels that assume a layout. Every
strategy draws a kind and a seed rather than single numbers: examples are made fast and shrink to
the plainest kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from graphopt.capture import signature as sig
from graphopt.errors import OptionError, UnsupportedError

try:
    from hypothesis import strategies as st
    from hypothesis.strategies import SearchStrategy
except ImportError:
    raise UnsupportedError(
        "the strategies of graphopt.testing need hypothesis, which is not installed",
        try_="pip install 'graphopt[testing]'; assert_equivalent works without it",
    ) from None

TAME = ("normal", "ties", "zeros", "offset", "wide", "tiny")
"""Kinds of values on which every model is well-conditioned enough to be judged."""

EXTREME = ("denormal", "huge", "infinities", "nan")
"""Kinds at the ends of a dtype's range."""

KINDS = TAME + EXTREME
"""Every kind of float values, the plainest first."""

LAYOUTS = ("contiguous", "transposed", "offset", "step", "expanded", "channels_last")
"""Every memory layout, the plainest first."""

UPSTREAM = ("normal", "ones", "zeros", "one_hot", "ties", "wide", "expanded")
"""Every kind of upstream gradient, the plainest first."""

_SEEDS = st.integers(0, 2**16)


def shapes(
    *, min_dims: int = 1, max_dims: int = 4, min_side: int = 0, max_side: int = 9
) -> SearchStrategy[tuple[int, ...]]:
    """Shapes of tensors; with `min_side=0` empty ones too.

    Args:
        min_dims: least number of dimensions.
        max_dims: greatest number of dimensions.
        min_side: least size of a dimension.
        max_side: greatest size of a dimension.

    Example:
        >>> from hypothesis import find
        >>> find(shapes(min_side=1), lambda s: len(s) == 2)
        (1, 1)
    """
    sides = st.integers(min_side, max_side)
    return st.lists(sides, min_size=min_dims, max_size=max_dims).map(tuple)


def dtypes(*, low: bool = True, double: bool = False) -> SearchStrategy[torch.dtype]:
    """Floating dtypes: float32, with `low` bfloat16 and float16, with `double` float64."""
    found = [torch.float32]
    found += [torch.bfloat16, torch.float16] if low else []
    return st.sampled_from(found + ([torch.float64] if double else []))


@st.composite
def values(
    draw: Any,
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    kinds: Sequence[str] = TAME,
    scale: float = 1.0,
) -> torch.Tensor:
    """A contiguous float tensor of one kind of values.

    Args:
        draw: given by hypothesis.
        shape: sizes.
        dtype: a floating dtype.
        kinds: some of `KINDS`: "normal"; "ties" (few distinct values); "zeros" (a third of them,
            of both signs); "offset" (far from zero, close together); "wide" (magnitudes from 1e-3
            to 1e3); "tiny" (1e-4); "denormal"; "huge" (near the square root of the dtype's
            greatest number, so that squares overflow); "infinities"; "nan".
        scale: what the plain kinds are multiplied by.
    """
    kind, seed = draw(st.sampled_from(tuple(kinds))), draw(_SEEDS)
    return make_values(kind, shape, dtype, seed, scale)


def make_values(
    kind: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int, scale: float = 1.0
) -> torch.Tensor:
    """The tensor behind `values`: a kind and a seed make the same one on every machine.

    Raises:
        OptionError: for an unknown kind.

    Example:
        >>> bool(make_values("nan", (9,), torch.float32, 0).isnan().any())
        True
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    pick = torch.rand(shape, generator=generator, dtype=torch.float64)
    info = torch.finfo(dtype)
    if kind == "ties":
        x = x.mul(2).round().clamp(-2, 2).div(2)
    elif kind == "zeros":
        x = torch.where(pick < 1 / 6, 0.0, torch.where(pick < 1 / 3, -0.0, x))
    elif kind == "offset":
        x = x * 0.05 + 3
    elif kind == "wide":
        x = x * 10 ** (6 * pick - 3)
    elif kind == "tiny":
        x = x * 1e-4
    elif kind == "denormal":
        x = x * (info.tiny / 4)
    elif kind == "huge":
        x = x * info.max**0.5
    elif kind == "infinities":
        x = torch.where(pick < 0.1, torch.inf, torch.where(pick > 0.9, -torch.inf, x))
        x = _at_least_one(x, torch.inf, pick)
    elif kind == "nan":
        x = _at_least_one(torch.where(pick < 0.1, torch.nan, x), torch.nan, pick)
    elif kind != "normal":
        raise OptionError(f"no kind of values is called {kind!r}", try_=", ".join(KINDS))
    plain = kind not in EXTREME
    return (x * scale if plain else x).to(dtype)


def _at_least_one(x: torch.Tensor, value: float, pick: torch.Tensor) -> torch.Tensor:
    if x.numel():
        x.view(-1)[int(pick.view(-1).argmin())] = value
    return x


def lay_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """The same shape in another memory layout.

    Args:
        x: a tensor.
        layout: one of `LAYOUTS`. "transposed" swaps the last two dimensions in memory, "offset"
            starts inside its storage, "step" takes every other element of the last dimension,
            "expanded" repeats its first row with stride 0 (this alone changes values). A layout
            that the shape does not have gives a contiguous tensor.

    Raises:
        OptionError: for an unknown layout.

    Example:
        >>> lay_out(torch.ones(2, 3), "transposed").stride()
        (1, 2)
    """
    if layout not in LAYOUTS:
        raise OptionError(f"no layout is called {layout!r}", try_=", ".join(LAYOUTS))
    if layout == "transposed" and x.dim() > 1:
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "offset":
        room = torch.zeros(x.numel() + 3, dtype=x.dtype, device=x.device)
        return room[3:].view(x.shape).copy_(x)
    if layout == "step" and x.dim():
        room = torch.zeros((*x.shape[:-1], 2 * x.shape[-1]), dtype=x.dtype, device=x.device)
        return room[..., ::2].copy_(x)
    if layout == "expanded" and x.dim() and x.shape[0] > 1:
        return x[:1].clone().expand(x.shape)
    if layout == "channels_last" and x.dim() == 4:
        return x.contiguous(memory_format=torch.channels_last)
    return x.contiguous()


def laid_out(x: torch.Tensor, layouts: Sequence[str] = LAYOUTS) -> SearchStrategy[torch.Tensor]:
    """A tensor in one of several memory layouts; see `lay_out`."""
    return st.sampled_from(tuple(layouts)).map(lambda layout: lay_out(x, layout))


@st.composite
def tensors(
    draw: Any,
    shape: tuple[int, ...] | SearchStrategy[tuple[int, ...]] | None = None,
    dtype: torch.dtype | SearchStrategy[torch.dtype] = torch.float32,
    kinds: Sequence[str] = TAME,
    layouts: Sequence[str] = LAYOUTS,
    requires_grad: bool = False,
) -> torch.Tensor:
    """Float tensors: a shape, a dtype, a kind of values and a memory layout.

    Args:
        draw: given by hypothesis.
        shape: a shape or a strategy for one; `shapes()` when None.
        dtype: a dtype or a strategy for one, such as `dtypes()`.
        kinds: see `values`.
        layouts: see `lay_out`.
        requires_grad: of the tensor.

    Example:
        >>> from hypothesis import find
        >>> find(tensors((2, 2)), lambda t: not t.is_contiguous()).stride()
        (1, 2)
    """
    if shape is None:
        shape = shapes()
    size = shape if isinstance(shape, tuple) else draw(shape)
    kind = dtype if isinstance(dtype, torch.dtype) else draw(dtype)
    x = draw(laid_out(draw(values(size, kind, kinds)), layouts))
    return x.requires_grad_(requires_grad)


@st.composite
def upstream_gradients(
    draw: Any, results: torch.Tensor | Sequence[torch.Tensor], kinds: Sequence[str] = UPSTREAM
) -> list[torch.Tensor]:
    """One upstream gradient for each result tensor, for `assert_equivalent(..., upstream=...)`.

    A loss that is a plain sum sends ones, expanded; a real one sends anything. Kinds: those of
    `values` up to "wide", "ones", "one_hot" (a single element), "expanded" (one value, stride 0).

    Args:
        draw: given by hypothesis.
        results: tensors of the shapes and dtypes of the results.
        kinds: some of `UPSTREAM`.
    """
    found = []
    for y in [results] if isinstance(results, torch.Tensor) else results:
        kind, seed = draw(st.sampled_from(tuple(kinds))), draw(_SEEDS)
        found.append(_upstream(kind, y, seed))
    return found


def _upstream(kind: str, y: torch.Tensor, seed: int) -> torch.Tensor:
    dtype = y.dtype if y.is_floating_point() else torch.float32
    if kind == "ones":
        g = torch.ones(y.shape, dtype=dtype)
    elif kind == "zeros":
        g = torch.zeros(y.shape, dtype=dtype)
    elif kind == "one_hot":
        g = torch.zeros(y.shape, dtype=dtype)
        if g.numel():
            g.view(-1)[seed % g.numel()] = 1
    elif kind == "expanded":
        g = torch.full((), 0.5, dtype=dtype).expand(y.shape)
    else:
        g = make_values(kind, tuple(y.shape), dtype, seed)
    return g.to(y.device)


@st.composite
def inputs_like(
    draw: Any,
    example_inputs: torch.Tensor | Sequence[Any] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    sizes: Mapping[int, tuple[int, int]] | str | None = "batch",
    kinds: Sequence[str] = TAME,
    layouts: Sequence[str] = LAYOUTS,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Inputs like the example ones: same structure and dtypes, other sizes, values and strides.

    A float tensor takes one kind of values on the example's scale; an integer tensor takes whole
    numbers between the least and the greatest of the example (token numbers stay in the
    vocabulary); a bool tensor is random, its first element True. What is no tensor stays.

    Args:
        draw: given by hypothesis.
        example_inputs: a tensor, or the positional arguments.
        example_kwargs: the keyword arguments.
        sizes: which sizes vary. A mapping from a size in the example to a range: every dimension
            of that size, in all tensors, takes the same drawn size, so give dimensions that differ
            different sizes in the example. "batch": the first dimension of the first tensor, and
            of the others where it is equal, from 1 to twice the example's. None: none.
        kinds: see `values`.
        layouts: see `lay_out`; integer and bool tensors take them, too.

    Returns:
        Positional and keyword arguments.

    Raises:
        OptionError: for a size that the example does not have.

    Example:
        >>> from hypothesis import find
        >>> x, y = torch.randn(5, 7), torch.randn(7, 5)
        >>> args, _ = find(inputs_like((x, y), sizes={5: (2, 9)}), lambda a: True)
        >>> [tuple(t.shape) for t in args]
        [(2, 7), (7, 2)]
    """
    args = (example_inputs,) if isinstance(example_inputs, torch.Tensor) else tuple(example_inputs)
    leaves: list[torch.Tensor] = []
    structure = sig.flatten((args, dict(example_kwargs or {})), leaves)
    shaped = _sizes(draw, leaves, sizes)
    made = []
    for leaf, shape in zip(leaves, shaped, strict=True):
        made.append(draw(laid_out(_like(draw, leaf, shape, kinds), layouts)))
        made[-1].requires_grad_(leaf.requires_grad)
    new_args, new_kwargs = sig.unflatten(structure, made)
    return new_args, new_kwargs


def _sizes(
    draw: Any, leaves: Sequence[torch.Tensor], sizes: Mapping[int, tuple[int, int]] | str | None
) -> list[tuple[int, ...]]:
    shapes = [tuple(t.shape) for t in leaves]
    if sizes is None or not shapes:
        return shapes
    if isinstance(sizes, str):
        if sizes != "batch":
            raise OptionError(f"sizes is {sizes!r}", try_='"batch", None, or {5: (1, 9)}')
        first = next((s[0] for s in shapes if s), 0)
        if first == 0:
            return shapes
        batch = draw(st.integers(1, 2 * first))
        return [(batch, *s[1:]) if s and s[0] == first else s for s in shapes]
    unknown = set(sizes) - {n for s in shapes for n in s}
    if unknown:
        raise OptionError(f"no dimension of the example has the size {min(unknown)}")
    drawn = {old: draw(st.integers(*bounds)) for old, bounds in sizes.items()}
    return [tuple(drawn.get(n, n) for n in s) for s in shapes]


def _like(
    draw: Any, leaf: torch.Tensor, shape: tuple[int, ...], kinds: Sequence[str]
) -> torch.Tensor:
    if leaf.is_floating_point():
        finite = leaf.detach().double()
        scale = float(finite.std(correction=0)) if finite.numel() > 1 else 1.0
        usable = scale if 0 < scale < float("inf") else 1.0
        return draw(values(shape, leaf.dtype, kinds, usable)).to(leaf.device)
    generator = torch.Generator().manual_seed(draw(_SEEDS))
    if leaf.is_complex():
        return torch.randn(shape, generator=generator, dtype=leaf.dtype).to(leaf.device)
    low, high = (int(leaf.min()), int(leaf.max())) if leaf.numel() else (0, 0)
    if leaf.dtype is torch.bool:
        low, high = 0, 1
    x = torch.randint(low, high + 1, shape, generator=generator).to(leaf.dtype)
    if leaf.dtype is torch.bool and x.numel():
        x.view(-1)[0] = True
    return x.to(leaf.device)
