"""cross_entropy: of logits of any precision, in one read; the gradient in one read and one write.

    loss = w[t] * (lse - x[t])                          a row; lse = log(sum(exp(x)))
    loss = (1 - e) * loss + e / C * sum_c w[c] * (lse - x[c])    with label smoothing e
    mean: the sum over w[t] of the rows that are not ignored

Forward reads a row once (online softmax: Milakov and Gimelshein, 2018) and keeps its maximum and
the logarithm of its sum, two float32 values. Saved: the logits as they came, the targets, these two
a row. Backward writes p - 1[t], scaled, in the logits' dtype. Arithmetic in float32 (float64 if an
input is: by the reference on every device), one rounding at the store; sums in a fixed order.

Rows may lie at two strides, so a slice of a batch of sequences is read in place. The gradient's
rows are padded to a multiple of 16 bytes, since no GEMM reads odd rows at full speed; the padding
is not part of its shape.

A target that is no class and not ignored raises IndexError on the CPU, as eager does. A kernel
cannot raise without stopping the device: there, that row's loss and gradient are NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from graphopt.errors import OptionError, UnsupportedError
from graphopt.kernels._launch import nothing, use_triton
from graphopt.kernels._library import Args, Gradient, define, invoke
from graphopt.kernels._op import Cost, Op, Sample, register, tensor_bytes
from graphopt.kernels._pointwise import arithmetic, check_floating, kernel_serves

NONE, MEAN, SUM = 0, 1, 2  # torch's numbers for reductions
INDEX_DTYPES = (torch.int64, torch.uint8)
ROW_BYTES = 16  # what the rows of the gradient are padded to


class Call(NamedTuple):
    """The arguments of the operator, defaults filled in."""

    logits: torch.Tensor
    target: torch.Tensor
    weight: torch.Tensor | None = None
    reduction: int = MEAN
    ignore_index: int = -100
    label_smoothing: float = 0.0
    classes: int | None = None
    out_dtype: torch.dtype | None = None

    @property
    def width(self) -> int:
        """How many classes there are; columns beyond are padding."""
        return self.logits.shape[-1] if self.classes is None else self.classes

    @property
    def rows(self) -> int:
        """How many rows of logits there are."""
        return math.prod(self.logits.shape[:-1])

    @property
    def result(self) -> torch.dtype:
        """The loss's dtype."""
        return self.out_dtype or self.logits.dtype


def _check(c: Call) -> None:
    check_floating("cross_entropy", c.logits, c.weight)
    where = f"graphopt::cross_entropy of logits {list(c.logits.shape)}"
    if c.target.dtype not in INDEX_DTYPES:
        raise UnsupportedError(
            f"{where}: target of {c.target.dtype}", why="it takes class indices, int64 or uint8"
        )
    if c.logits.dim() == 0 or c.target.numel() != c.rows:
        raise OptionError(f"{where}: {c.target.numel()} targets", why="it takes one a row")
    if not 1 <= c.width <= c.logits.shape[-1]:
        raise OptionError(f"{where}: {c.width} classes", why="a row holds at least one class")
    if c.weight is not None and c.weight.shape != (c.width,):
        raise OptionError(
            f"{where}: weight {list(c.weight.shape)}", why=f"it takes one a class, [{c.width}]"
        )
    if c.reduction not in (NONE, MEAN, SUM) or not 0.0 <= c.label_smoothing <= 1.0:
        raise OptionError(
            f"{where}: reduction {c.reduction}, label_smoothing {c.label_smoothing}",
            try_="reduction 0 (none), 1 (mean) or 2 (sum); label_smoothing from 0 to 1",
        )


def _outputs(c: Call, unwanted: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Check the arguments and allocate (loss, statistics [2, rows], total); total for a mean."""
    _check(c)
    device, stats = c.logits.device, arithmetic(c.logits, c.weight)
    shape = c.target.shape if c.reduction == NONE else ()
    loss = torch.empty(shape, dtype=c.result, device=device)
    statistics = torch.empty((2, c.rows), dtype=stats, device=device)
    if c.reduction == MEAN:
        return loss, statistics, torch.empty((), dtype=stats, device=device)
    return loss, statistics, unwanted((0,), dtype=stats, device=device)


def _forward_fake(*arguments: Any) -> tuple[torch.Tensor, ...]:
    return _outputs(Call(*arguments), torch.empty)


def _forward_launch(*arguments: Any) -> tuple[torch.Tensor, ...]:
    c = Call(*arguments)
    if not kernel_serves(c.logits, c.weight) or c.rows == 0:
        return _forward_reference(*arguments)

    def unwanted(shape: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return nothing(dtype, device)

    outputs = _outputs(c, unwanted)
    from graphopt.kernels import _cross_entropy_triton as triton_path

    triton_path.forward(c.logits, c.target, c.weight, *c[3:6], c.width, *outputs)
    return outputs


def _targets(c: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """(class of each row, 0 where ignored; whether it counts), both [rows].

    Raises:
        IndexError: on the CPU, for a target that is no class.
    """
    target = c.target.reshape(-1).long()
    counts = target != c.ignore_index
    at = torch.where(counts, target, 0)
    if at.device.type == "cpu" and not isinstance(at, FakeTensor):  # which has no values to check
        wrong = at[(at < 0) | (at >= c.width)]
        if wrong.numel():
            raise IndexError(f"Target {int(wrong[0])} is out of bounds.")  # eager's words
    return at, counts


def _forward_reference(*arguments: Any) -> tuple[torch.Tensor, ...]:
    c = Call(*arguments)
    loss, statistics, total = _outputs(c, torch.empty)
    at, counts = _targets(c)
    x = c.logits[..., : c.width].reshape(-1, c.width).to(statistics.dtype)
    log_p = torch.log_softmax(x, -1)
    statistics[0], statistics[1] = x.amax(-1), -log_p.amax(-1)  # at the maximum: -log(sum)
    w = x.new_ones(()) if c.weight is None else c.weight.to(x.dtype)
    w_row = w.expand(c.width)[at]
    rows = -log_p.gather(-1, at[:, None])[:, 0] * w_row
    if c.label_smoothing:
        smooth = -(log_p * w).sum(-1)
        rows = (1 - c.label_smoothing) * rows + c.label_smoothing / c.width * smooth
    rows = torch.where(counts, rows, 0.0)
    if c.reduction == NONE:
        return loss.copy_(rows.reshape(loss.shape)), statistics, total
    value = rows.sum()
    if c.reduction == MEAN:
        total.copy_(torch.where(counts, w_row, 0.0).sum())
        value = value / total
    return loss.copy_(value), statistics, total


_FORWARD = define(
    "cross_entropy_forward(Tensor logits, Tensor target, Tensor? weight, int reduction, "
    "SymInt ignore_index, float label_smoothing, SymInt? classes, ScalarType? out_dtype) "
    "-> (Tensor loss, Tensor statistics, Tensor total)",
    launch=_forward_launch,
    reference=_forward_reference,
    fake=_forward_fake,
)


def gradient_like(logits: torch.Tensor) -> torch.Tensor:
    """An empty gradient of logits [..., V], rows padded to 16 bytes where V is no multiple.

    Example:
        >>> gradient_like(torch.ones(2, 3, 5)).stride()
        (24, 8, 1)
    """
    columns = logits.shape[-1]
    group = max(1, ROW_BYTES // logits.element_size())
    padded = (columns + group - 1) // group * group
    return logits.new_empty((*logits.shape[:-1], padded))[..., :columns]


def _backward_fake(grad: torch.Tensor, logits: torch.Tensor, *_: Any) -> torch.Tensor:
    return gradient_like(logits)


def _backward_launch(grad: torch.Tensor, *arguments: Any) -> torch.Tensor:
    *call, statistics, total = arguments
    c = Call(*call)
    if statistics.dtype == torch.float64 or c.rows == 0:
        return _backward_reference(grad, *arguments)
    dx = gradient_like(c.logits)
    from graphopt.kernels import _cross_entropy_triton as triton_path

    triton_path.backward(
        grad, c.logits, c.target, c.weight, *c[3:6], c.width, statistics, total, dx
    )
    return dx


def _backward_reference(grad: torch.Tensor, *arguments: Any) -> torch.Tensor:
    *call, statistics, total = arguments
    c = Call(*call)
    dx = gradient_like(c.logits)
    at, counts = _targets(c)
    dtype = statistics.dtype
    x = c.logits[..., : c.width].reshape(-1, c.width).to(dtype)
    p = (x - statistics[0][:, None]).sub_(statistics[1][:, None]).exp_()
    w = x.new_ones(()) if c.weight is None else c.weight.to(dtype)
    scale = grad.to(dtype) / total if c.reduction == MEAN else grad.to(dtype).reshape(-1)
    # Ignored rows: zero whatever comes in, but NaN where the softmax is, as in eager.
    scale = torch.where(counts, scale.expand(c.rows), 0.0)[:, None]
    hit = (1 - c.label_smoothing) * w.expand(c.width)[at][:, None] * scale
    every = c.label_smoothing / c.width * scale
    slope = p.mul_(hit + every * w.expand(c.width).sum())
    slope.scatter_add_(-1, at[:, None], -hit)
    if c.label_smoothing:
        slope -= every * w
    if dx.is_contiguous() and dx.dtype == dtype and c.width == dx.shape[-1]:
        return slope.reshape(dx.shape)
    dx[..., : c.width] = slope.reshape(*c.logits.shape[:-1], c.width)
    dx[..., c.width :] = 0
    return dx


_BACKWARD = define(
    "cross_entropy_backward(Tensor grad, Tensor logits, Tensor target, Tensor? weight, "
    "int reduction, SymInt ignore_index, float label_smoothing, SymInt? classes, "
    "Tensor statistics, Tensor total) -> Tensor",
    launch=lambda grad, *rest: _backward_launch(grad, *_with_dtype(rest)),
    reference=lambda grad, *rest: _backward_reference(grad, *_with_dtype(rest)),
    fake=_backward_fake,
)


def _over_launch(grad: torch.Tensor, logits: torch.Tensor, *rest: Any) -> None:
    *call, statistics, total = _with_dtype((logits, *rest))
    c = Call(*call)
    if statistics.dtype == torch.float64 or c.rows == 0:
        _over_reference(grad, logits, *rest)
        return
    from graphopt.kernels import _cross_entropy_triton as triton_path

    options = (*c[3:6], c.width, statistics, total)
    triton_path.backward(grad, logits, c.target, c.weight, *options, dx=logits)


def _over_reference(grad: torch.Tensor, logits: torch.Tensor, *rest: Any) -> None:
    logits.copy_(_backward_reference(grad, *_with_dtype((logits, *rest))))


# Each program of the kernel reads an element before it writes it, and no other's.
_BACKWARD_OVER = define(
    "cross_entropy_backward_over(Tensor grad, Tensor(a!) logits, Tensor target, Tensor? weight, "
    "int reduction, SymInt ignore_index, float label_smoothing, SymInt? classes, "
    "Tensor statistics, Tensor total) -> ()",
    launch=_over_launch,
    reference=_over_reference,
    fake=lambda *_: None,
)


def gradient_over(grad: torch.Tensor, logits: torch.Tensor, *rest: Any) -> torch.Tensor:
    """The gradient of logits that nobody reads again: written over them, where they lie as it does.

    Args:
        grad: of the loss.
        logits: contiguous [rows, C], not to be read after this.
        *rest: the other arguments of the backward.
    """
    padded = logits.shape[-1] * logits.element_size() % ROW_BYTES != 0
    if padded or not (logits.is_contiguous() and use_triton(logits)):
        return invoke(_BACKWARD, grad, logits, *rest)  # type: ignore[no-any-return]
    invoke(_BACKWARD_OVER, grad, logits, *rest)
    return logits


def _with_dtype(rest: Args) -> Args:
    """The arguments of the backward with the out_dtype of `Call`, which it does not need."""
    return (*rest[:7], None, *rest[7:])


# ---- the operator --------------------------------------------------------------------------------


def cross_entropy_reference(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Cross entropy of logits and class indices, in plain torch.

    Args:
        *args: logits [..., C], any floating dtype, any strides; target, int64 or uint8, one a row
            in any shape; weight=None, [C]; reduction=1 (0 none, 1 mean, 2 sum); ignore_index=-100;
            label_smoothing=0.0.
        **kwargs: the same by name; classes=None: how many of the columns are classes, the rest is
            padding with a gradient of zero; out_dtype=None (the logits').

    Returns:
        The loss: a scalar, or shaped as target without a reduction.

    Raises:
        OptionError: shapes, reduction or smoothing do not fit.
        UnsupportedError: a dtype that it does not take, class probabilities among them.
        IndexError: a target that is no class.

    Example:
        >>> cross_entropy_reference(torch.zeros(2, 4), torch.tensor([1, 3]))
        tensor(1.3863)
    """
    return _forward_reference(*Call(*args, **kwargs))[0]


def _launch(*args: Any, **kwargs: Any) -> torch.Tensor:
    return _forward_launch(*Call(*args, **kwargs))[0]


def _fake(*args: Any, **kwargs: Any) -> torch.Tensor:
    return _forward_fake(*Call(*args, **kwargs))[0]


def _forward_grad(*args: Any) -> tuple[torch.Tensor, Args, Any]:
    c = Call(*args)
    loss, statistics, total = invoke(_FORWARD, *c)
    return loss, (c.logits, c.target, c.weight, statistics, total), c[3:7]


def refuse_weight_gradient(wanted: bool) -> None:
    """Refuse to differentiate the class weights, as torch does.

    Raises:
        UnsupportedError: when their gradient is wanted.
    """
    if wanted:
        raise UnsupportedError(
            "gradient of cross_entropy's class weights", why="torch has none either"
        )


def _backward_grad(saved: Args, options: Any, needs: tuple[bool, ...], grads: Args) -> Args:
    logits, target, weight, statistics, total = saved
    refuse_weight_gradient(needs[2])
    dx = invoke(_BACKWARD, grads[0], logits, target, weight, *options, statistics, total)
    return (dx, *(None,) * (len(needs) - 1))


_CROSS_ENTROPY = define(
    "cross_entropy(Tensor logits, Tensor target, Tensor? weight=None, int reduction=1, "
    "SymInt ignore_index=-100, float label_smoothing=0.0, *, SymInt? classes=None, "
    "ScalarType? out_dtype=None) -> Tensor",
    launch=_launch,
    reference=cross_entropy_reference,
    fake=_fake,
    gradient=Gradient(_forward_grad, _backward_grad),
)


def _cost(*args: Any, **kwargs: Any) -> Cost:
    c = Call(*args, **kwargs)
    read = c.rows * c.width * c.logits.element_size() + tensor_bytes(c.target, c.weight)
    return Cost(read, tensor_bytes(*_forward_fake(*c)), 5 * c.rows * c.width)


def _backward_cost(*args: Any, **kwargs: Any) -> Cost:
    c = Call(*args, **kwargs)
    forward = _cost(*args, **kwargs)
    read = forward.bytes_read + forward.bytes_written
    return Cost(read, tensor_bytes(c.logits), 5 * c.rows * c.width)


def _samples(device: torch.device) -> Iterator[Sample]:
    logits = torch.linspace(-6, 6, 10 * 37, device=device).sin().mul(5).reshape(10, 37)
    target = torch.arange(10, device=device) * 3
    some = torch.where(target % 2 == 0, target, -100)
    weight = torch.linspace(0.5, 2, 37, device=device)
    for reduction in (NONE, MEAN, SUM):
        yield Sample((logits, target, None, reduction))
        yield Sample((logits, some, weight, reduction, -100, 0.1))
    yield Sample((logits, target, None, MEAN, 3), {"out_dtype": torch.float32})
    yield Sample((logits.bfloat16(), some), {"out_dtype": torch.float32})
    yield Sample((logits.bfloat16(), target, None, MEAN, -100, 0.2))
    yield Sample((logits.reshape(2, 5, 37)[:, :4], target[:8].view(2, 4), None, SUM))
    yield Sample((logits, target % 33, None, MEAN, 6), {"classes": 33})


def _example(rows: int, cols: int, dtype: torch.dtype, device: torch.device) -> Sample:
    logits = torch.randn(rows, cols, device=device, dtype=dtype)
    target = torch.randint(cols, (rows,), device=device)
    return Sample((logits, target), {"out_dtype": torch.float32})


register(
    Op(
        name="cross_entropy",
        overload=_CROSS_ENTROPY,
        reference=cross_entropy_reference,
        launch=_launch,
        samples=_samples,
        example=_example,
        cost=_cost,
        backward_cost=_backward_cost,
        saved="logits: 1 x the input's bytes; targets; float32 [2, rows]",
        workspace="forward with a reduction: float32 [rows]",
    )
)
