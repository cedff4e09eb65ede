"""linear_cross_entropy: cross entropy of x @ weight^T + bias, a chunk of its rows at once.

For tight memory. Unchunked, the logits and their gradient are the largest tensors of a language
model's step: rows x classes each. Here neither is ever whole: forward computes a chunk of logits,
takes its loss and, for a loss whose own gradient is 1, the gradients of x, weight and bias; then it
drops the chunk. Backward multiplies these by the loss's gradient. That costs no product more than
without chunks. (The idea is that of Hsu et al. 2024, "Liger Kernel", arXiv 2410.10989.)

Where that cannot be (see `_ahead`), and in a second backward through the same graph, backward
computes the chunks again, for one more product of the size of the linear layer's. Where the logits
are a result of the model anyway, forward reads those, and only backward computes them again, so
that they are freed when the caller drops them.

Products are torch's own, logits are rounded to x's dtype as the linear layer rounds them; the
gradients of weight and bias are added over the chunks in float32 and rounded once, or not at all
where the parameters of which they are low-precision copies ("masters") stand beside them (see
linear.py). Saved: x, weight, bias, targets and two float32 values a row, beside the gradients. The
chunks' work is done by `cross_entropy`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from graphopt.errors import OptionError
from graphopt.kernels import cross_entropy
from graphopt.kernels._library import Args, Gradient, define, invoke
from graphopt.kernels._op import Cost, Op, Sample, register, tensor_bytes
from graphopt.kernels._pointwise import arithmetic, check_floating
from graphopt.kernels.cross_entropy import MEAN, NONE
from graphopt.kernels.linear import ADD_WIDE_MM, WIDE_MM
from graphopt.kernels.scale import SCALE

CHUNK_BYTES = 2**28
"""Bytes of a chunk of logits: 4096 rows of 32768 classes in 16 bits, enough for a GEMM to run at
full speed."""
EVEN = 128
"""Rows of a chunk are a multiple of this, where it holds so many: no partly filled tiles."""


Shapes = list[tuple[torch.Size, torch.dtype]]
"""Shape and dtype of each parameter that gets a gradient: weight's, then bias's."""


class Call(NamedTuple):
    """The arguments of the operator, defaults filled in."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    target: torch.Tensor
    class_weight: torch.Tensor | None = None
    reduction: int = MEAN
    ignore_index: int = -100
    label_smoothing: float = 0.0
    classes: int | None = None
    out_dtype: torch.dtype | None = None
    chunk_bytes: int = CHUNK_BYTES
    logits: torch.Tensor | None = None
    master: torch.Tensor | None = None
    bias_master: torch.Tensor | None = None

    @property
    def rows(self) -> int:
        """How many rows x has."""
        return math.prod(self.x.shape[:-1])

    def loss_of(self, logits: torch.Tensor, target: torch.Tensor, **other: Any) -> Args:
        """(loss, statistics, total) of some rows, by the kernel of `cross_entropy`."""
        c = cross_entropy.Call(logits, target, self.class_weight, *self[5:10])._replace(**other)
        return invoke(cross_entropy._FORWARD, *c)


def chunks(rows: int, row_bytes: int, chunk_bytes: int) -> list[tuple[int, int]]:
    """(first, end) of the rows of each chunk.

    Args:
        rows: how many in all.
        row_bytes: bytes of one row of logits.
        chunk_bytes: the most that a chunk of logits may take; one row is the least.

    Example:
        >>> chunks(1000, 64, 2**15)
        [(0, 512), (512, 1000)]
    """
    step = max(1, chunk_bytes // row_bytes)
    step -= step % EVEN if step >= EVEN else 0
    return [(first, min(first + step, rows)) for first in range(0, rows, step)]


def sum_bytes(rows: int, row_bytes: int, chunk_bytes: int, weight: int) -> int:
    """Bytes read and written of the float32 sum of the weight's gradient, by chunks but the first.

    Args:
        rows: of logits.
        row_bytes: of one of them.
        chunk_bytes: see `chunks`.
        weight: how many elements it has.

    Example:
        >>> sum_bytes(1000, 64, 2**15, 10)
        80
    """
    return 8 * weight * (len(chunks(rows, row_bytes, chunk_bytes)) - 1) if rows else 0


def _chunks(x: torch.Tensor, weight: torch.Tensor, chunk_bytes: int) -> list[tuple[int, int]]:
    return chunks(x.shape[0], weight.shape[0] * x.element_size(), chunk_bytes)


def _check(c: Call) -> None:
    check_floating("linear_cross_entropy", c.x, c.weight, c.bias)
    where = f"graphopt::linear_cross_entropy of x {list(c.x.shape)}"
    if c.weight.dim() != 2 or c.x.dim() == 0 or c.x.shape[-1] != c.weight.shape[1]:
        raise OptionError(f"{where}: weight {list(c.weight.shape)}", try_="[classes, x.shape[-1]]")
    if c.target.numel() != c.rows:
        raise OptionError(f"{where}: {c.target.numel()} targets", why="it takes one a row")
    copies = ((c.weight, c.master), (c.bias, c.bias_master))
    if any(m is not None and (t is None or t.shape != m.shape) for t, m in copies):
        raise OptionError(f"{where}: a master of another shape", why="it is what the copy is of")
    if c.chunk_bytes < 1:
        raise OptionError(f"{where}: chunks of {c.chunk_bytes} bytes", try_="a positive number")


def _forward(
    c: Call, parameters: Shapes | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, _Gradients | None]:
    """(loss, statistics [2, rows], total of the targets' weights, gradients for a loss of 1).

    Args:
        c: the call.
        parameters: those that get weight's and bias's gradient; None to take no gradients.
    """
    _check(c)
    result = c.out_dtype or c.x.dtype
    if c.logits is not None:
        return *c.loss_of(c.logits, c.target, out_dtype=result), None  # type: ignore[return-value]
    x, target = c.x.reshape(-1, c.x.shape[-1]), c.target.reshape(-1)
    stats = arithmetic(c.x, c.class_weight)
    rows = torch.empty(c.rows, dtype=stats, device=x.device)
    statistics = torch.empty((2, c.rows), dtype=stats, device=x.device)
    mean = c.reduction == MEAN
    total = _weights_of(c, target, stats).sum() if mean else x.new_empty(0, dtype=stats)
    parts = _chunks(x, c.weight, c.chunk_bytes)
    found = None if parameters is None else _Gradients(x, parameters, len(parts), _needs(c))
    one = None if found is None else torch.ones((), dtype=stats, device=x.device)
    for a, b in parts:
        logits = F.linear(x[a:b], c.weight, c.bias)
        rows[a:b], part, _ = c.loss_of(logits, target[a:b], reduction=NONE, out_dtype=stats)
        statistics[:, a:b] = part
        if found is None or one is None:
            continue
        options = (target[a:b], c.class_weight, *c[5:9], part, total)
        slope = cross_entropy.gradient_over(one, logits, *options)
        found.add(slope, x, c.weight, a, b)
        del logits, slope  # before the next chunk's logits are made
    if c.reduction == NONE:
        return rows.to(result).reshape(c.target.shape), statistics, total, found
    loss = rows.sum()
    return (loss / total if mean else loss).to(result), statistics, total, found


def _weights_of(c: Call, target: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What each row counts in a mean."""
    counts = target != c.ignore_index
    if c.class_weight is None:
        return counts.to(dtype)
    return torch.where(counts, c.class_weight.to(dtype)[torch.where(counts, target.long(), 0)], 0.0)


def linear_cross_entropy_reference(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Cross entropy of a linear layer's output, in chunks of rows.

    Args:
        *args: x [..., H]; weight [C, H]; bias [C] or None; target, int64 or uint8, one a row in any
            shape; class_weight=None, [C]; reduction=1 (0 none, 1 mean, 2 sum); ignore_index=-100;
            label_smoothing=0.0.
        **kwargs: the same by name; classes=None: how many of the rows of weight are classes, the
            rest is padding; out_dtype=None (x's); chunk_bytes: of a chunk of logits; logits=None:
            those of x where they exist, read by forward in place of computing them; master=None:
            the parameter that weight is the low-precision copy of, which gets the gradient in
            weight's place; bias_master=None: the same for bias.

    Returns:
        The loss: a scalar, or shaped as target without a reduction.

    Raises:
        OptionError: shapes, reduction, smoothing or chunk size do not fit.
        UnsupportedError: a dtype that it does not take.
        IndexError: a target that is no class.

    Example:
        >>> x, weight = torch.zeros(2, 3), torch.ones(4, 3)
        >>> linear_cross_entropy_reference(x, weight, None, torch.tensor([1, 3]))
        tensor(1.3863)
    """
    return _forward(Call(*args, **kwargs))[0]


def _fake(*args: Any, **kwargs: Any) -> torch.Tensor:
    c = Call(*args, **kwargs)
    _check(c)
    shape = c.target.shape if c.reduction == NONE else ()
    return c.x.new_empty(shape, dtype=c.out_dtype or c.x.dtype)


def _forward_grad(*args: Any) -> tuple[torch.Tensor, Args, Any]:
    c = Call(*args)
    parameters = [c.weight if c.master is None else c.master]
    parameters += [] if c.bias is None else [c.bias if c.bias_master is None else c.bias_master]
    shapes = [(t.shape, t.dtype) for t in parameters]
    loss, statistics, total, ready = _forward(c, shapes if _ahead(c) else None)
    saved = (c.x, c.weight, c.bias, c.target, c.class_weight, statistics, total)
    return loss, saved, (*c[5:9], c.chunk_bytes, shapes, _Once(ready))


def _ahead(c: Call) -> bool:
    """Whether forward takes the gradients, for a loss of 1, while it has the logits.

    Then no logits are computed again. Not where they are at hand anyway, where each row has a loss
    of its own, and not in float16, whose range needs the scale that comes with the loss's gradient.
    """
    return c.logits is None and c.reduction != NONE and c.x.dtype != torch.float16


class _Once:
    """Gradients that are given away once, so that whoever gets them may overwrite them."""

    def __init__(self, gradients: _Gradients | None) -> None:
        self._gradients = gradients

    def take(self) -> _Gradients | None:
        """The gradients, or None from the second time on."""
        found, self._gradients = self._gradients, None
        return found


def _needs(c: Call) -> tuple[bool, ...]:
    return tuple(isinstance(v, torch.Tensor) and v.requires_grad for v in c)


def _backward_grad(saved: Args, kept: Any, needs: tuple[bool, ...], grads: Args) -> Args:
    x, weight, bias, target, class_weight, statistics, total = saved
    *options, chunk_bytes, parameters, ready = kept
    cross_entropy.refuse_weight_gradient(needs[4])
    rows, target = x.reshape(-1, x.shape[-1]), target.reshape(-1)
    parts = _chunks(rows, weight, chunk_bytes)
    found = ready.take()
    if found is not None and found.serves(needs):
        found.scale(grads[0])
        return found.of(needs, x.shape)
    found = _Gradients(rows, parameters, len(parts), needs)
    grad = grads[0].reshape(-1) if options[0] == NONE else grads[0]
    for a, b in parts:
        slope = cross_entropy.gradient_over(
            grad[a:b] if options[0] == NONE else grad,
            F.linear(rows[a:b], weight, bias),
            target[a:b], class_weight, *options,
            statistics[:, a:b].contiguous(), total,
        )  # fmt: skip
        found.add(slope, rows, weight, a, b)
        del slope  # before the next chunk's logits are made
    return found.of(needs, x.shape)


def _wanted(needs: tuple[bool, ...]) -> tuple[bool, bool, bool]:
    """Whether the gradients of x, weight (or its master) and bias (or its) are wanted."""
    return needs[0], needs[1] or needs[_MASTER], needs[2] or needs[_MASTER + 1]


class _Gradients:
    """The gradients of x, weight and bias, made chunk by chunk.

    Args:
        x: [rows, H].
        parameters: shape and dtype of those that get weight's and bias's gradient.
        count: of the chunks.
        needs: for each argument of the operator, whether its gradient is wanted.
    """

    def __init__(
        self,
        x: torch.Tensor,
        parameters: Shapes,
        count: int,
        needs: tuple[bool, ...],
    ) -> None:
        self.wanted = _wanted(needs)
        of_x, of_weight, of_bias = self.wanted
        self.x = torch.empty(x.shape, dtype=x.dtype, device=x.device) if of_x else None
        self.weight = _Sum(x, parameters[0], count) if of_weight else None
        self.bias = _Sum(x, parameters[1], count) if of_bias else None

    def serves(self, needs: tuple[bool, ...]) -> bool:
        """Whether all that is wanted is here."""
        return all(a or not b for a, b in zip(self.wanted, _wanted(needs), strict=True))

    def add(
        self, slope: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, a: int, b: int
    ) -> None:
        """Add the rows from a to b, whose logits have this gradient."""
        if self.x is not None:
            torch.mm(slope, weight, out=self.x[a:b])
        if self.weight is not None:
            self.weight.add_product(slope.t(), x[a:b])
        if self.bias is not None:
            self.bias.add(slope.sum(0, dtype=arithmetic(slope)))

    def scale(self, grad: torch.Tensor) -> None:
        """Multiply all by the loss's gradient, in place."""
        sums = [s.total for s in (self.weight, self.bias) if s is not None]
        for tensor in (self.x, *sums):
            if tensor is not None:
                invoke(SCALE, tensor, grad)

    def of(self, needs: tuple[bool, ...], shape: torch.Size) -> Args:
        """One gradient or None for each argument of the operator."""
        gradients: list[torch.Tensor | None] = [None] * len(needs)
        gradients[0] = None if self.x is None else self.x.reshape(shape)
        if self.weight is not None:
            gradients[_MASTER if needs[_MASTER] else 1] = self.weight.result()
        if self.bias is not None:
            gradients[_MASTER + 1 if needs[_MASTER + 1] else 2] = self.bias.result()
        return tuple(gradients)


_MASTER = Call._fields.index("master")


class _Sum:
    """The gradient of a parameter, added over chunks in float32 and rounded once."""

    def __init__(
        self, x: torch.Tensor, parameter: tuple[torch.Size, torch.dtype], count: int
    ) -> None:
        self.shape, self.dtype = parameter
        self.device, dtype = x.device, self.dtype
        # One chunk alone is rounded by its product.
        self.wide = dtype if count == 1 else torch.promote_types(dtype, torch.float32)
        self.total: torch.Tensor | None = None

    def add(self, part: torch.Tensor) -> None:
        """Add the gradient of some rows."""
        self.total = part if self.total is None else self.total.add_(part)

    def add_product(self, a: torch.Tensor, b: torch.Tensor) -> None:
        """Add a @ b."""
        if a.dtype == self.wide:
            if self.total is None:
                self.total = torch.mm(a, b)
            else:
                self.total.addmm_(a, b)
        elif not a.is_cuda:  # no product there writes a wider dtype than it reads
            self.add(torch.mm(a.to(self.wide), b.to(self.wide)))
        elif self.total is None:
            self.total = invoke(WIDE_MM, a, b, self.wide)
        else:
            invoke(ADD_WIDE_MM, self.total, a, b)

    def result(self) -> torch.Tensor:
        """The gradient, in the parameter's dtype."""
        if self.total is None:  # no rows
            return torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        return self.total.to(self.dtype)


_LINEAR_CROSS_ENTROPY = define(
    "linear_cross_entropy(Tensor x, Tensor weight, Tensor? bias, Tensor target, "
    "Tensor? class_weight=None, int reduction=1, SymInt ignore_index=-100, "
    "float label_smoothing=0.0, *, SymInt? classes=None, ScalarType? out_dtype=None, "
    f"int chunk_bytes={CHUNK_BYTES}, Tensor? logits=None, Tensor? master=None, "
    "Tensor? bias_master=None) -> Tensor",
    launch=None,
    reference=linear_cross_entropy_reference,
    fake=_fake,
    gradient=Gradient(_forward_grad, _backward_grad),
)


def _cost(*args: Any, **kwargs: Any) -> Cost:
    c = Call(*args, **kwargs)
    logits = c.rows * c.weight.shape[0]
    read = tensor_bytes(c.target, c.logits)
    flops = 5 * logits
    if c.logits is None:
        # A chunk is written by the product and read by the loss.
        read += tensor_bytes(c.x, c.weight, c.bias) + 2 * logits * c.x.element_size()
        flops += 2 * logits * c.x.shape[-1]
    return Cost(read, tensor_bytes(_fake(*c)), flops)


def _backward_cost(*args: Any, **kwargs: Any) -> Cost:
    c = Call(*args, **kwargs)
    logits = c.rows * c.weight.shape[0]
    operands = tensor_bytes(c.x, c.weight, c.bias)
    # Logits read, their gradient written and read twice; the sum of the weight's gradient read and
    # written by each chunk; where forward has not done all that, logits computed again.
    row_bytes = c.weight.shape[0] * c.x.element_size()
    sums = sum_bytes(c.rows, row_bytes, c.chunk_bytes, c.weight.numel())
    again = not _ahead(c)
    read = (1 + again) * operands + (4 + again) * logits * c.x.element_size() + sums
    return Cost(read, operands, logits * ((4 + 2 * again) * c.x.shape[-1] + 5))


def _samples(device: torch.device) -> Iterator[Sample]:
    x = torch.linspace(-3, 3, 12 * 8, device=device).sin().reshape(3, 4, 8)
    weight = torch.linspace(-2, 2, 21 * 8, device=device).mul(3).cos().reshape(21, 8)
    bias = torch.linspace(-1, 1, 21, device=device)
    target = torch.arange(12, device=device)
    some = torch.where(target % 3 == 0, -100, target)
    class_weight = torch.linspace(0.5, 2, 21, device=device)
    for reduction in (NONE, MEAN, 2):
        yield Sample((x, weight, bias, target, None, reduction), {"chunk_bytes": 5 * 21 * 4})
        yield Sample((x, weight, None, some, class_weight, reduction, -100, 0.1))
    yield Sample((x, weight, bias, target % 19), {"classes": 19, "chunk_bytes": 1})
    low = [t.bfloat16() for t in (x, weight)]
    yield Sample((*low, None, some), {"out_dtype": torch.float32, "chunk_bytes": 7 * 21 * 2})
    given = F.linear(x, weight)
    yield Sample((x, weight, None, some), {"logits": given, "chunk_bytes": 5 * 21 * 4})


register(
    Op(
        name="linear_cross_entropy",
        overload=_LINEAR_CROSS_ENTROPY,
        reference=linear_cross_entropy_reference,
        launch=None,
        samples=_samples,
        cost=_cost,
        backward_cost=_backward_cost,
        saved="x, weight, bias, targets; float32 [2, rows]",
        workspace="a chunk of logits forward, two backward; float32 gradient of the weight",
    )
)
