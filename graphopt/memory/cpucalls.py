"""What operations take inside on the CPU: by one real call each, else by their source.

Which kernel oneDNN picks, and in which layout it wants its operands, is its own affair: it depends
on the processor, the sizes, the dtypes and the number of threads. Torch's own operations copy what
does not lie as they want it, and widen bf16. So a call of each kind and size runs once on made-up
operands (`graphopt.memory.trial`), and its allocations are followed one by one.

Torch's allocator tells of an allocation only to its profilers. The older of the two is the one
that fits here: it sees one thread, keeps the order, and refuses to start inside another one, where
the newer would end that.
"""

from __future__ import annotations

import functools
import platform
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from graphopt.cost.dispatched import dispatched_cost
from graphopt.memory import trial
from graphopt.memory.tracker import storages_of
from graphopt.memory.trial import NOTHING, PRODUCTS, Taken, name_of

MOST_FLOPS = 2e10
"""A call that computes more is not run: a second or so for most processors."""
MOST_BYTES = 2**30
"""Nor is one whose operands and results take more."""

_LAYERS = frozenset({"mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"})
_PREPARED = PRODUCTS | _LAYERS | {"convolution", "convolution_backward"}
"""Operations whose first call takes what is kept for the next ones."""
_GPU_LAYERS = frozenset({"_cudnn_rnn", "_cudnn_rnn_backward", "miopen_rnn", "miopen_rnn_backward"})
KEPT_FOR = {"mkldnn_rnn_layer_backward": 22, "_cudnn_rnn_backward": 20, "miopen_rnn_backward": 19}
"""Operations -> the operand that forward kept for them in a layout of the library's own."""

_book = trial.Book()


def cpu_call(func: Any, args: Any, kwargs: Any, out: Any) -> Taken | None:
    """What one call on the CPU takes beside its results.

    Each kind and size of call runs once a machine and number of threads, on made-up operands.

    Args:
        func: the operation.
        args: positional arguments; their tensors may be fake.
        kwargs: keyword arguments.
        out: what it returned.

    Returns:
        None where it is not known: the call fails on made-up operands, it is too large
        (`MOST_FLOPS`, `MOST_BYTES`), or a profiler is running already.

    Example:
        >>> a = torch.zeros(8, 8)
        >>> cpu_call(torch.ops.aten.relu.default, (a,), {}, a)
        Taken(inside=0, results=())
    """
    if not trial.worth_a_call(func):
        return NOTHING
    leaves = trial.flat(args, kwargs)
    if not trial.may_call(leaves, "cpu") or _is_blas(name_of(func), leaves):
        return NOTHING
    grad = keeps_more(func)
    key = (*trial.key_of(func, leaves), grad, *_settings())

    def run() -> Taken | None:
        tensors = [*storages_of(leaves), *storages_of(out)]
        if (
            lacks_operand(func, args)
            or name_of(func) in trial.BY_VALUE
            or sum(t.nbytes for t in tensors) > MOST_BYTES
            or dispatched_cost(func, tuple(args), dict(kwargs), out).flops > MOST_FLOPS
        ):
            return None
        autocast = torch.autocast("cpu", enabled=False)
        with _disable_current_modes(), torch.set_grad_enabled(grad), autocast:
            return _measure(func, args, kwargs, out)

    device = f"{cpu_name()}, {torch.get_num_threads()} threads"
    return _book.look(device, key, run) or _by_source(func, args, out)


def keeps_more(func: Any) -> bool:
    """Whether an operation keeps something for backward, since gradients are recorded now.

    Args:
        func: the operation.
    """
    return torch.is_grad_enabled() and name_of(func) in _LAYERS | _GPU_LAYERS


def lacks_operand(func: Any, args: Any) -> bool:
    """Whether a call must not be run: it would read what forward kept, whose size is not known.

    Args:
        func: the operation.
        args: its positional arguments.
    """
    place = KEPT_FOR.get(name_of(func))
    return place is not None and not args[place].numel()


def _is_blas(name: str, leaves: list[Any]) -> bool:
    """Whether the BLAS multiplies as it is called, in the dtype and layout of the operands.

    Not in float32 where `torch.set_float32_matmul_precision` allows less: oneDNN then does.
    """
    if name not in PRODUCTS:
        return False
    tensors = [v for v in leaves if isinstance(v, torch.Tensor)]
    dtype = tensors[0].dtype
    exact = dtype is torch.float64 or (
        dtype is torch.float32 and torch.get_float32_matmul_precision() == "highest"
    )
    return (
        exact and all(map(trial.in_rows, tensors[-2:])) and all(t.dtype is dtype for t in tensors)
    )


@functools.cache
def cpu_name() -> str:
    """The processor as it calls itself, with family and model where the system tells them."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0]
    except OSError:  # not Linux
        text = ""
    pairs = [[part.strip() for part in line.partition(":")[::2]] for line in text.splitlines()]
    named = [f"{k} {v}" for k, v in pairs if k in ("model name", "cpu family", "model")]
    return ", ".join(named) or platform.processor() or platform.machine()


def _settings() -> tuple[Any, ...]:
    """What else decides which kernel runs."""
    return (
        torch.__version__,
        torch.backends.cpu.get_cpu_capability(),
        torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled,
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
    )


def _measure(func: Any, args: Any, kwargs: Any, out: Any) -> Taken | None:
    """What a call takes on the first made-up operands that it takes; None where it takes none.

    Raises:
        BusyError: where a profiler runs already.
    """
    seeded = torch.Tag.nondeterministic_seeded in func.tags
    with torch.random.fork_rng(devices=[], enabled=seeded), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the user's own call warns, too
        return trial.first_that_runs(
            lambda fill: _once(func, trial.made_up(args, kwargs, fill), out), _fills(func, args)
        )


def _fills(func: Any, args: Any) -> tuple[trial.Fill, ...]:
    """How operands are made up: the backward of bags that are all empty would copy nothing."""
    if name_of(func) == "_embedding_bag_backward" and args[6] > 1:  # weights, so 1 is an index
        return trial.counts, trial.zeros
    return trial.zeros, trial.counts


def _once(func: Any, given: Any, out: Any) -> Taken | None:
    args, kwargs = given
    if name_of(func) in _PREPARED:
        func(*args, **kwargs)
    results: list[Any] = []
    peak = _peak(lambda: results.append(func(*args, **kwargs)))
    if peak is None:
        return None
    return trial.taken(peak, func, given, results[0], out)


def _peak(run: Callable[[], None]) -> int | None:
    """The most bytes that a function holds at once; None where this torch cannot tell.

    Raises:
        BusyError: where a profiler runs already.
    """
    try:
        from torch._C._autograd import _disable_profiler_legacy
        from torch.autograd.profiler_legacy import profile
    except ImportError:  # it is deprecated
        return None
    try:
        profile(profile_memory=True)._start_trace()
    except RuntimeError as error:
        raise trial.BusyError(str(error)) from error
    try:
        run()
    finally:
        threads: Any = _disable_profiler_legacy()
    held = most = 0
    for record in (r for records in threads for r in records):
        if record.kind() == "memory_alloc":
            held += record.cpu_memory_usage()
            most = max(most, held)
    return most


# ---- by their source: what was not run


def _by_source(func: Any, args: Any, out: Any) -> Taken | None:
    known = _SOURCES.get(name_of(func))
    if known is not None:
        return Taken(known(args, out))
    tensors = list(storages_of((args, out)))
    same = len({(t.dtype, t.shape, t.stride()) for t in tensors}) == 1
    return Taken(0) if same and torch.Tag.pointwise in func.tags else None


def guessed(func: Any, args: Any, out: Any) -> int:
    """Bytes that a convolution which was not run may take inside; 0 for other operations.

    Args:
        func: the operation.
        args: its positional arguments.
        out: what it returned.
    """
    known = _GUESSES.get(name_of(func))
    return known(args, out) if known is not None else 0


def _layer_norm_backward(args: Any, out: Any) -> int:
    """Partial sums of the weights' gradients, one pair a thread."""
    _, x, shape = args[:3]
    if args[5] is None and args[6] is None:
        return 0
    count = 1
    for size in shape:
        count *= int(size)
    return 2 * torch.get_num_threads() * count * x.element_size()


def _batch_norm_backward(args: Any, out: Any) -> int:
    """The input's gradient before it is laid out."""
    return int(args[1].numel() * args[1].element_size())


def _mse_loss(args: Any, out: Any) -> int:
    """All losses, of which the mean or sum is taken."""
    shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
    return int(shape.numel()) * out.element_size() if out.dim() == 0 else 0


def _attention(args: Any, out: Any) -> int:
    """Scores of one block of rows, their maximum and sum, and its result: one set a thread."""
    rows, columns = _attention_block(args[0], args[1])
    size = rows * columns + 2 * rows + rows * int(args[0].shape[-1])
    return 4 * size * torch.get_num_threads()


def _attention_backward(args: Any, out: Any) -> int:
    """Scores of one block and their gradient, and a sum for each row: one set a thread.

    And the incoming gradient in the layout [batch, rows, heads, columns], where it has another.
    """
    rows, columns = _attention_block(args[1], args[2])
    grad = args[0]
    copy = 0 if grad.transpose(1, 2).is_contiguous() else grad.numel() * grad.element_size()
    return copy + 4 * (2 * rows * columns + rows) * torch.get_num_threads()


def _attention_block(query: torch.Tensor, key: torch.Tensor) -> tuple[int, int]:
    rows, columns = int(query.shape[-2]), int(key.shape[-2])
    return min(rows, 256 if rows >= 768 else 64 if rows >= 192 else 32), min(columns, 512)


def _convolution(args: Any, out: Any) -> int:
    """A result in oneDNN's own layout, of which the one that is returned is a copy."""
    return int(out.nbytes) if _mkldnn(out, args[1]) else 0


def _convolution_backward(args: Any, out: Any) -> int:
    grad, x, weight = args[:3]
    if not _mkldnn(grad, weight):
        return 0
    copy = 0 if grad.is_contiguous() else grad.numel() * grad.element_size()
    of_input, *others = (0 if t is None else int(t.nbytes) for t in out)
    if not of_input:
        return copy + int(grad.nbytes)
    # The input's gradient exists three times before those of weight and bias are made, and while
    # these are made, gradient and input lie there in oneDNN's layout.
    return copy + max(2 * of_input - sum(others), int(grad.nbytes + x.nbytes))


def _mkldnn(result: torch.Tensor, weight: torch.Tensor) -> bool:
    plain = (
        not result.is_contiguous(memory_format=torch.channels_last) if result.dim() == 4 else True
    )
    usable = torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled
    return bool(usable and plain and weight.dtype in (torch.float32, torch.bfloat16))


_GUESSES: dict[str, Callable[[Any, Any], int]] = {
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
}
_SOURCES: dict[str, Callable[[Any, Any], int]] = {
    "native_layer_norm_backward": _layer_norm_backward,
    "mse_loss": _mse_loss,
    "smooth_l1_loss": _mse_loss,
    "native_batch_norm_backward": _batch_norm_backward,
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
}
