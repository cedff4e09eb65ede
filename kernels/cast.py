"""cast_weights: the low-precision copies of many weights by one multi-tensor copy.

One `to` a weight is a kernel of its own forward and another backward, of a few microseconds each;
with hundreds of weights a step spends more host time on them than the bytes take. Here the copies
lie side by side in one buffer that one `torch._foreach_copy_` fills, and the gradients are widened
the same way. The buffer is made anew at every call, as eager's copies are: no copy outlives a
change of its weight, and graphs of two forwards do not share one. Only inside `holding` are the
copies kept: whoever opens it promises that the weights stay as they are.

Weights that are used as one matrix (q, k and v of an attention) are stacked: their copies lie one
below the other without a gap, so that the stack is one contiguous tensor, and the gradient of the
stack is cut into theirs as it is widened.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from graphopt.errors import GraphOptError, OptionError
from graphopt.kernels._batched import for_each_sample, is_batched
from graphopt.kernels._launch import contiguous_strides
from graphopt.kernels._library import Short, applied, define, differentiable, invoke
from graphopt.kernels._op import Cost, Op, Sample, register

ALIGNMENT = 128
"""Bytes at a multiple of which each copy begins: what GEMMs and vector loads want."""


def side_by_side(
    like: Sequence[torch.Tensor], dtype: torch.dtype, stacks: Sequence[int] = ()
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Empty contiguous tensors of the shapes of others, in one buffer.

    Args:
        like: tensors of one device, at least one.
        dtype: of the new tensors.
        stacks: how many of them, in order, lie one below the other; empty: each for itself.

    Returns:
        A tensor for each of `like`, and one for each stack, of which those are the rows.

    Example:
        >>> parts, whole = side_by_side([torch.ones(2, 3), torch.ones(4, 3)], torch.half, [2])
        >>> [t.shape for t in (*parts, *whole)]
        [torch.Size([2, 3]), torch.Size([4, 3]), torch.Size([6, 3])]
    """
    shapes = tuple([t.shape for t in like])  # a list: a generator costs more
    size, places = _places(shapes, max(1, ALIGNMENT // dtype.itemsize), tuple(stacks))
    flat = torch.empty(size, dtype=dtype, device=like[0].device)
    parts: list[torch.Tensor] = []
    whole: list[torch.Tensor] = []
    for place, inside in places:
        whole.append(flat.as_strided(*place))
        parts += [flat.as_strided(*p) for p in inside] if inside else whole[-1:]
    return parts, whole


Place = tuple[tuple[int, ...], tuple[int, ...], int]
"""Shape, strides and offset of a tensor in a buffer."""


@functools.lru_cache(maxsize=1024)
def _places(
    shapes: tuple[torch.Size, ...], step: int, stacks: tuple[int, ...]
) -> tuple[int, tuple[tuple[Place, tuple[Place, ...]], ...]]:
    """Elements of the buffer, and where each stack lies in it, with its parts if it has several."""
    at, places = 0, []
    for group in _groups(shapes, stacks):
        strides = contiguous_strides(group[0])
        inside, first = [], at
        for shape in group:
            inside.append((tuple(shape), strides, first))
            first += math.prod(shape)
        stack = (_stacked_shape(group), strides, at)
        places.append((stack, tuple(inside) if len(group) > 1 else ()))
        at += -(-(first - at) // step) * step
    return at, tuple(places)


def _groups(items: Sequence[Any], stacks: Sequence[int]) -> Iterator[Sequence[Any]]:
    """The items of each stack."""
    if stacks and sum(stacks) != len(items):
        raise OptionError(f"stacks {list(stacks)} of {len(items)} weights", try_="their sum")
    at = 0
    for count in stacks or [1] * len(items):
        yield items[at : at + count]
        at += count


def _stacked_shape(group: Sequence[torch.Size]) -> tuple[int, ...]:
    """The shape of tensors of some shapes one below the other."""
    first = group[0]
    if len(group) == 1:
        return tuple(first)
    if any(len(shape) == 0 or shape[1:] != first[1:] for shape in group):
        raise OptionError(
            f"weights of shapes {', '.join(str(list(shape)) for shape in group)} in one stack",
            why="they lie one below the other, so all but the first size must be the same",
        )
    return (sum(shape[0] for shape in group), *first[1:])


def cast_weights(
    weights: Sequence[torch.Tensor], dtype: torch.dtype, stacks: Sequence[int] = ()
) -> list[torch.Tensor]:
    """Copies of tensors in another dtype, in plain torch.

    Args:
        weights: tensors of one device and of any shapes and floating dtypes.
        dtype: the dtype of the copies.
        stacks: how many weights, in order, each result holds one below the other (their shapes
            then differ in the first size alone); empty: one each.

    Returns:
        One contiguous tensor a stack; they lie in one buffer.

    Raises:
        OptionError: stacks that do not fit the weights.

    Example:
        >>> cast_weights([torch.ones(2), torch.zeros(1)], torch.bfloat16)
        [tensor([1., 1.], dtype=torch.bfloat16), tensor([0.], dtype=torch.bfloat16)]
        >>> cast_weights([torch.ones(2), torch.zeros(1)], torch.bfloat16, [2])
        [tensor([1., 1., 0.], dtype=torch.bfloat16)]
    """
    if not weights:
        return []
    held = _HELD.get(id(weights[0]))
    if held is not None:
        return held.copies(weights, dtype, stacks)
    return _copied(weights, dtype, stacks)


def _copied(
    weights: Sequence[torch.Tensor], dtype: torch.dtype, stacks: Sequence[int] = ()
) -> list[torch.Tensor]:
    copies, whole = side_by_side(weights, dtype, stacks)
    if torch.is_grad_enabled():
        with torch.no_grad():
            torch._foreach_copy_(copies, list(weights))
    else:
        torch._foreach_copy_(copies, list(weights))
    return whole


class _Held:
    """The copies of one block of `holding`, with what tells whether their weights were written."""

    def __init__(self) -> None:
        # The weights are kept as well: another tensor could take the place, and the id, of one.
        self._known: dict[tuple[Any, ...], tuple[list[Any], list[Any], list[torch.Tensor]]] = {}

    def copies(
        self, weights: Sequence[torch.Tensor], dtype: torch.dtype, stacks: Sequence[int]
    ) -> list[torch.Tensor]:
        key = (dtype, tuple(stacks), *map(id, weights))
        marks = [(w.data_ptr(), 0 if w.is_inference() else w._version) for w in weights]
        if key not in self._known:
            with torch.inference_mode(False):
                copies = _copied([w.detach() for w in weights], dtype, stacks)
            self._known[key] = list(weights), marks, copies
        _, before, copies = self._known[key]
        if before != marks:
            changed = next(i for i, mark in enumerate(marks) if mark != before[i])
            raise GraphOptError(
                "a weight was written inside hold_weights",
                why=f"a tensor of shape {list(weights[changed].shape)} changed since its"
                " low-precision copy was made, which is the old one still",
                try_="step the optimizer, load and average weights outside hold_weights",
            )
        return [c.detach() for c in copies]


_HELD: dict[int, _Held] = {}
"""By the id of a weight: the block of `holding` that it is in."""


@contextlib.contextmanager
def holding(weights: Iterable[torch.Tensor]) -> Iterator[None]:
    """Keep the low-precision copies of some weights during the block.

    Args:
        weights: the tensors, which must not be written meanwhile. A write that shows in a tensor's
            version or address raises at the next call; one that does not (a fused optimizer's,
            one into `.data`) goes unseen.

    Example:
        >>> w = torch.ones(2)
        >>> with holding([w]):
        ...     first, second = (cast_weights([w], torch.bfloat16)[0] for _ in range(2))
        >>> first.data_ptr() == second.data_ptr()
        True
    """
    known, held = list(weights), _Held()
    before = {id(w): _HELD.get(id(w)) for w in known}
    _HELD.update((id(w), held) for w in known)
    try:
        yield
    finally:
        for mark, outer in before.items():
            if outer is None:
                _HELD.pop(mark, None)
            else:
                _HELD[mark] = outer


def _fake(
    weights: Sequence[torch.Tensor], dtype: torch.dtype, stacks: Sequence[int] = ()
) -> list[torch.Tensor]:
    groups = _groups(weights, stacks)
    shape = [_stacked_shape([t.shape for t in group]) for group in groups]
    return [weights[0].new_empty(s, dtype=dtype) for s in shape]


_CAST = define(
    "cast_weights(Tensor[] weights, ScalarType dtype, int[] stacks=[]) -> Tensor[]",
    launch=None,
    reference=cast_weights,
    fake=_fake,
    own_autograd=True,
)


class _CastWeights(torch.autograd.Function):
    """The copies of the weights that want a gradient; backward widens the gradients together."""

    @staticmethod
    def forward(
        ctx: Any, dtype: torch.dtype, stacks: Sequence[int], *weights: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        with torch._C._AutoDispatchBelowAutograd():
            copies = invoke(_CAST, list(weights), dtype, stacks)
        ctx.rows = [
            [w.shape[0] for w in g] if len(g) > 1 else None for g in _groups(weights, stacks)
        ]
        ctx.dtypes = [w.dtype for w in weights]
        ctx.set_materialize_grads(False)
        return tuple(copies)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if any(g is not None and is_batched(g) for g in grads):
            return for_each_sample(_CastWeights.backward, ctx, grads)
        parts: list[torch.Tensor | None] = []
        for grad, rows in zip(grads, ctx.rows, strict=True):
            if rows is None:
                parts.append(grad)
            else:
                parts += [None] * len(rows) if grad is None else grad.split(rows)
        if torch.is_grad_enabled():  # create_graph=True: casts that can be differentiated again
            pairs = zip(parts, ctx.dtypes, strict=True)
            return None, None, *(None if g is None else g.to(d) for g, d in pairs)
        needs = ctx.needs_input_grad[2:]
        wide: list[torch.Tensor | None] = [None] * len(parts)
        for dtype in dict.fromkeys(ctx.dtypes):
            there = [i for i, d in enumerate(ctx.dtypes) if d == dtype and needs[i]]
            there = [i for i in there if parts[i] is not None]
            given = [g for i in there if (g := parts[i]) is not None]
            widened = _copied(given, dtype) if given else []
            for i, grad in zip(there, widened, strict=True):
                wide[i] = grad
        return None, None, *wide


def _autograd(
    weights: list[torch.Tensor], dtype: torch.dtype, stacks: Sequence[int] = ()
) -> list[torch.Tensor]:
    if torch.is_grad_enabled() and any(w.requires_grad for w in weights):
        return _recorded(weights, dtype, stacks)
    with torch._C._AutoDispatchBelowAutograd():
        copies: list[torch.Tensor] = _CAST(weights, dtype, stacks)
    return copies


_APPLY = applied(_CastWeights)


def _recorded(
    weights: list[torch.Tensor], dtype: torch.dtype, stacks: Sequence[int]
) -> list[torch.Tensor]:
    return list(_APPLY(dtype, stacks, *weights))


differentiable(_CAST, _autograd, Short(_recorded, cast_weights))


def _cost(weights: Sequence[torch.Tensor], dtype: torch.dtype, stacks: Sequence[int] = ()) -> Cost:
    count = sum(w.numel() for w in weights)
    return Cost(sum(w.numel() * w.element_size() for w in weights), count * dtype.itemsize, 0)


def _samples(device: torch.device) -> Iterator[Sample]:
    weights = [torch.linspace(-3, 3, n, device=device).reshape(-1, 3) for n in (12, 3, 33)]
    yield Sample((weights, torch.bfloat16))
    yield Sample((weights[:1], torch.float16))
    yield Sample((weights, torch.bfloat16, [1, 2]))


register(
    Op(
        name="cast_weights",
        overload=_CAST,
        reference=cast_weights,
        launch=None,
        samples=_samples,
        cost=_cost,
        backward_cost=_cost,
        saved="nothing",
    )
)
