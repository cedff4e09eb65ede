"""Cross entropy in one read of the logits as they were computed, and one pass of their gradient.

The kernel widens what it reads, so a cast to float32 before the loss (the model's own, or
autocast's) is not written to memory, nor are the log-probabilities and their float32 gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from graphopt.graph.pattern import either
from graphopt.passes.base import LOW, surely
from graphopt.passes.rule import Match, Spelling, rule

aten = torch.ops.aten
graphopt = torch.ops.graphopt


def _widened(x: Any, wide: Any) -> Any:
    return either(aten.to.dtype(x, wide), x)


def _as_rows(x: Any, shape: Any) -> Any:
    """[..., C] as [rows, C], through the copy that a slice needs for it."""
    packed = either(
        aten.contiguous.default(x), aten.clone.default(x, memory_format=torch.contiguous_format), x
    )
    return either(
        aten.view.default(packed, shape),
        aten.reshape.default(packed, shape),
        aten._unsafe_view.default(packed, shape),
        aten.flatten.using_ints(packed, 0, 1),
        aten.flatten.using_ints(packed, 0, -2),
        packed,
    )


def _loss(x: Any, target: Any, weight: Any, reduction: Any, ignore: Any, smoothing: Any) -> Any:
    return aten.cross_entropy_loss.default(x, target, weight, reduction, ignore, smoothing)


_MOVES = (aten.transpose.int, aten.permute.default, aten.mT.default)


@rule("fusion")
def fused_cross_entropy(x, first, shape, last, target, weight, reduction, ignore, smoothing):
    """Cross entropy reads the logits in the precision, and the shape, in which they were made."""
    logits = _widened(_as_rows(_widened(x, first), shape), last)
    return _loss(logits, target, weight, reduction, ignore, smoothing)


@fused_cross_entropy.also
def _classes_moved(x, first, last, target, weight, reduction, ignore, smoothing):
    moved = either(
        aten.transpose.int(_widened(x, first), 1, 2),
        aten.transpose.int(_widened(x, first), -1, -2),
        aten.permute.default(_widened(x, first), [0, 2, 1]),
        aten.mT.default(_widened(x, first)),
    )
    return _loss(_widened(moved, last), target, weight, reduction, ignore, smoothing)


@fused_cross_entropy.check
def _(m: Match) -> str | None:
    x, target = m.tensor("x"), m.tensor("target")
    if x is None or target is None or not x.is_floating_point():
        return ""
    loss = m.root
    given = loss.args[0].meta["val"]  # type: ignore[union-attr]
    moved = any(n.target in _MOVES for n in m.nodes)
    if target.is_floating_point() or given.dtype == torch.float64 or x.dtype == torch.float64:
        return "the kernel takes class indices, and logits of up to 32 bits"
    if given.dim() != (3 if moved else 2):
        return f"the classes of {list(given.shape)} are not the last dim"
    classes = given.shape[1]
    if not surely(x.shape[-1] == classes) or surely(classes == 0) or x.dim() < 2:
        return f"logits {list(x.shape)} are not rows of {classes} classes"
    for name in ("first", "last"):
        if m.captures.get(name, torch.float32) != torch.float32:
            return f"the logits are rounded to {m.captures[name]} before the loss"
    if m.captures.keys() & {"first", "last"} and x.dtype not in LOW:
        return f"{x.dtype} is not widened by the cast"
    if m.requires_grad("weight"):
        return "the class weights are trained"
    return None


@fused_cross_entropy.replace
def _(m: Match) -> fx.Node:
    out = None if m.val.dtype == m.x.meta["val"].dtype else m.val.dtype
    return m.call(
        graphopt.cross_entropy.default,
        m.x, m.target, m.weight, m.reduction, m.ignore, m.smoothing,
        out_dtype=out,
    )  # fmt: skip


@fused_cross_entropy.spellings
def _() -> Iterator[Spelling]:
    x, y = torch.randn(2, 5, 9), torch.tensor([[1, 8, -100, 3, 0], [0, 2, 5, -100, 7]])
    low = x.bfloat16()

    def language_model(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, Any]:
        shifted = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
        wide = logits.float().view(-1, 9)
        return F.cross_entropy(wide, shifted.view(-1), ignore_index=-100), logits

    yield language_model, (low, y)

    def shifted_logits(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        before = logits.float()[..., :-1, :].contiguous()
        return F.cross_entropy(before.view(-1, 9), labels[..., 1:].contiguous().view(-1))

    yield shifted_logits, (low, y)
    yield lambda x, y: F.cross_entropy(x[:, :-1].flatten(0, 1), y[:, 1:].flatten()), (x, y)
    yield lambda x, y: F.cross_entropy(x.transpose(1, 2), y, reduction="none"), (x, y)
    yield lambda x, y: F.cross_entropy(x.float().mT, y, label_smoothing=0.1), (low, y)
    rows, labels = x.flatten(0, 1), y.flatten()
    yield lambda x, y: F.cross_entropy(x, y, reduction="sum") / 7, (rows, labels)
    yield lambda x, y: F.cross_entropy(x, y), (rows.half(), labels)
    yield lambda x, y: F.nll_loss(F.log_softmax(x, -1), y), (rows, labels)

    def weighted(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(x, y, w.detach(), label_smoothing=0.2)

    yield weighted, (rows, labels, torch.rand(9))

    def wide_is_kept(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        wide = x.float()
        return F.cross_entropy(wide.view(-1, 9), y.view(-1)), wide

    yield wide_is_kept, (low, y)


@fused_cross_entropy.refuses
def _() -> Iterator[Spelling]:
    x = torch.randn(4, 9)
    y = torch.tensor([1, 8, -100, 3])
    yield lambda x, y: F.cross_entropy(x, F.one_hot(y.clamp(min=0), 9).float()), (x, y)
    yield lambda x, y: F.cross_entropy(x.double(), y), (x, y)
    yield lambda x, y: F.cross_entropy(x[0], y[0]), (x, y)
    images = torch.randn(2, 3, 4, 4), torch.zeros(2, 4, 4, dtype=torch.int64)
    yield lambda x, y: F.cross_entropy(x, y), images


@rule("fusion")
def padded_cross_entropy(x, width, target, weight, reduction, ignore, smoothing, out):
    """Logits from a padded linear layer are read where they lie, and so is their gradient written.

    The gradient of a slice is a copy into zeros; the kernel writes the zeros itself.
    """
    logits = aten.contiguous.default(aten.slice.Tensor(x, -1, 0, width))
    return _fused(logits, target, weight, reduction, ignore, smoothing, out), logits


@padded_cross_entropy.also
def _only_read(x, width, target, weight, reduction, ignore, smoothing, out):
    logits = aten.slice.Tensor(x, -1, 0, width)
    return _fused(logits, target, weight, reduction, ignore, smoothing, out), logits


def _fused(x: Any, target: Any, weight: Any, *options: Any) -> Any:
    *numbers, out = options
    return graphopt.cross_entropy.default(x, target, weight, *numbers, classes=None, out_dtype=out)


@padded_cross_entropy.check
def _(m: Match) -> str | None:
    x = m.tensor("x")
    if x is None or not isinstance(m.width, int) or not surely(x.shape[-1] - m.width < 16):
        return "more than padding is cut off"
    return None


@padded_cross_entropy.replace
def _(m: Match) -> tuple[fx.Node, fx.Node]:
    loss = m.call(
        graphopt.cross_entropy.default,
        m.x, m.target, m.weight, m.reduction, m.ignore, m.smoothing,
        classes=m.width, out_dtype=m.out,
    )  # fmt: skip
    logits = m.call(aten.slice.Tensor, m.x, -1, 0, m.width)
    if m.outputs[1].target is aten.contiguous.default:
        logits = m.call(aten.contiguous.default, logits)
    return loss, logits


@padded_cross_entropy.spellings
def _() -> Iterator[Spelling]:
    x, w = torch.randn(1024, 8).bfloat16(), torch.randn(1025, 8).bfloat16()
    y = torch.arange(1024)
    yield lambda x, w, y: F.cross_entropy(F.linear(x, w).float(), y), (x, w, y)

    def logits_too(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> Any:
        logits = F.linear(x.view(2, 512, 8), w)
        return F.cross_entropy(logits.view(-1, 1025).float(), y), logits

    yield logits_too, (x, w, y)


@padded_cross_entropy.refuses
def _() -> Iterator[Spelling]:
    x, y = torch.randn(8, 64), torch.arange(8)
    yield lambda x, y: F.cross_entropy(x[:, :10], y), (x, y)


@rule("fusion")
def shifted_cross_entropy(x, stop, target, weight, reduction, ignore, smoothing, classes, out):
    """Logits of which the last tokens are cut off are read whole, with nothing asked of these.

    The gradient of the slice would be a copy of all others into zeros; rows whose target is the
    ignored one get their zeros from the kernel.
    """
    return graphopt.cross_entropy.default(
        aten.slice.Tensor(x, 1, 0, stop), target, weight, reduction, ignore, smoothing,
        classes=classes, out_dtype=out,
    )  # fmt: skip


@shifted_cross_entropy.check
def _(m: Match) -> str | None:
    x, target = m.tensor("x"), m.tensor("target")
    if not m.body.grad or m.reduction == 0:
        return ""
    if x is None or target is None or x.dim() != 3:
        return "the logits are no sequences of rows"
    if not all(isinstance(n, int) and n > 0 for n in (*x.shape, *target.shape)):
        return "sizes are symbolic, or there are no rows"
    if _cut(m) * 4 > x.shape[1]:
        return "so many tokens are cut off that reading them would cost more"
    return None


def _cut(m: Match) -> int:
    batch, tokens, _ = m.x.meta["val"].shape
    return int(tokens - m.target.meta["val"].numel() // batch)


@shifted_cross_entropy.replace
def _(m: Match) -> fx.Node:
    batch, tokens, _ = m.x.meta["val"].shape
    target = m.call(aten.reshape.default, m.target, [batch, tokens - _cut(m)])
    target = m.call(aten.constant_pad_nd.default, target, [0, _cut(m)], m.ignore)
    return m.call(
        graphopt.cross_entropy.default,
        m.x, target, m.weight, m.reduction, m.ignore, m.smoothing,
        classes=m.classes, out_dtype=m.out,
    )  # fmt: skip


@shifted_cross_entropy.spellings
def _() -> Iterator[Spelling]:
    x, y = torch.randn(2, 5, 9), torch.tensor([[1, 8, -100, 3, 0], [0, 2, 5, -100, 7]])

    def loss(x: torch.Tensor, y: torch.Tensor, **options: Any) -> torch.Tensor:
        before, after = x[..., :-1, :].contiguous(), y[..., 1:].contiguous()
        return F.cross_entropy(before.view(-1, 9), after.view(-1), **options)

    yield loss, (x.requires_grad_(), y)
    yield lambda x, y: loss(x.float(), y, label_smoothing=0.1, reduction="sum"), (x.bfloat16(), y)


@shifted_cross_entropy.refuses
def _() -> Iterator[Spelling]:
    x, y = torch.randn(2, 5, 9), torch.arange(10).view(2, 5) % 9
    rows = F.cross_entropy
    yield lambda x, y: rows(x[:, :-1].flatten(0, 1), y[:, 1:].flatten(), reduction="none"), (x, y)
    yield lambda x, y: rows(x[:, :2].flatten(0, 1), y[:, :2].flatten()), (x, y)
    yield lambda x, y: rows(x[:, 1:].flatten(0, 1), y[:, 1:].flatten()), (x, y)
