"""What oneDNN takes inside convolutions, LSTMs and products of low precision, by one call each.

Which kernel oneDNN picks, and in which layout it wants its operands, is its own affair: it depends
on the processor, the sizes, the dtypes and the number of threads. So a call of each kind and size
runs once on zeros, and its allocations are followed one by one. What is found is kept on disk.

Torch's allocator tells of an allocation only to its profilers. The older of the two is the one
that fits here: it sees one thread, keeps the order, and refuses to start inside another one, where
the newer would end that.
"""

from __future__ import annotations

import functools
import platform
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map

from graphopt.cost.dispatched import dispatched_cost
from graphopt.cost.kept import load, store
from graphopt.memory.tracker import storages_of

FILE = "workspaces.json"
"""Holds what was measured, of every device."""

MOST_FLOPS = 2e10
"""A call that computes more is not run: a second or so for most processors."""
MOST_BYTES = 2**30
"""Nor is one whose operands and results take more."""

_CONVOLUTIONS = frozenset({"convolution", "convolution_backward"})
_LAYERS = frozenset({"mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"})
_GPU_LAYERS = frozenset({"_cudnn_rnn", "_cudnn_rnn_backward", "miopen_rnn", "miopen_rnn_backward"})
KEPT_FOR = {"mkldnn_rnn_layer_backward": 22, "_cudnn_rnn_backward": 20, "miopen_rnn_backward": 19}
"""Operations -> the operand that forward kept for them in a layout of the library's own."""
_OTHERS = frozenset(
    {
        "_trilinear",
        "im2col",
        "col2im",
        "_embedding_bag",
        "_embedding_bag_backward",
        "soft_margin_loss_backward",
        "binary_cross_entropy_with_logits",
        "huber_loss",
        "kthvalue",
        "cumsum",
        "cumprod",
        "logcumsumexp",
        "logsumexp",
        "upsample_nearest2d",
        "upsample_bilinear2d",
        "upsample_bicubic2d",
        "_euclidean_dist",
    }
)
"""Torch's own, which copy operands or keep whole results inside: found by calls of many ops."""
_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm"})
_known: dict[str, dict[str, int]] = {}
_lock = threading.Lock()


def takes_inside(name: str, out: Any) -> bool:
    """Whether an operation's inner allocations must be measured: oneDNN's, and some of torch's.

    Products in float32 are the BLAS's own, unless `torch.set_float32_matmul_precision` allows less.

    Args:
        name: of the ATen operation, "mm".
        out: what it returned.
    """
    if name in _CONVOLUTIONS | _LAYERS | _OTHERS:
        return True
    return name in _PRODUCTS and (
        out.dtype in (torch.bfloat16, torch.float16)
        or (out.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest")
    )


def cpu_bytes(func: Any, args: Any, kwargs: Any, out: Any) -> int | None:
    """Bytes that one call on the CPU holds inside at most, beside its results.

    Each kind and size of call runs once a machine and number of threads, on new tensors of zeros.

    Args:
        func: the operation.
        args: positional arguments; their tensors may be fake.
        kwargs: keyword arguments.
        out: what it returned.

    Returns:
        None where the call fails on zeros or is too large (`MOST_FLOPS`, `MOST_BYTES`), or a
        profiler is running already.

    Example:
        >>> a = torch.zeros(8, 8)
        >>> cpu_bytes(torch.ops.aten.relu.default, (a,), {}, a)
        0
    """
    return _asked(_settings(), func, args, kwargs, out, _measure)


def keeps_more(func: Any) -> bool:
    """Whether an operation keeps something for backward, since gradients are recorded now.

    Args:
        func: the operation.
    """
    return torch.is_grad_enabled() and _name(func) in _LAYERS | _GPU_LAYERS


def lacks_operand(func: Any, args: Any) -> bool:
    """Whether a call must not be run: it would read what forward kept, whose size is not known.

    Args:
        func: the operation.
        args: its positional arguments.
    """
    place = KEPT_FOR.get(_name(func))
    return place is not None and not args[place].numel()


def cpu_result(func: Any, args: Any, kwargs: Any, out: Any, place: int) -> int | None:
    """Bytes of one result's storage, where its fake form does not tell them.

    Args:
        func: the operation.
        args: positional arguments; their tensors may be fake.
        kwargs: keyword arguments.
        out: what it returned.
        place: which of the results.

    Returns:
        None as for `cpu_bytes`; 0 for a result that is not there.

    Example:
        >>> a = torch.zeros(8, 8)
        >>> cpu_result(torch.ops.aten.max.dim, (a, 0), {}, a.max(0), 1)
        64
    """

    def size(func: Any, args: Any, kwargs: Any) -> int | None:
        return result_size(func, args, kwargs, place)

    return _asked(f"result {place} {_settings()}", func, args, kwargs, out, size)


def _asked(
    what: str, func: Any, args: Any, kwargs: Any, out: Any, measure: Callable[..., int | None]
) -> int | None:
    """A number about a call: as it is known, else by the call."""
    leaves, _ = tree_flatten((args, kwargs))
    operands = [*storages_of(leaves), *storages_of(out)]
    if any(t.device.type != "cpu" for t in operands):  # a model on `meta` is counted, not run
        return 0
    grad = keeps_more(func)
    key = f"{what} {func}{' grad' * grad} {[described(v) for v in leaves]}{_repeated(leaves)}"
    device = f"{cpu_name()}, {torch.get_num_threads()} threads"

    def run() -> int | None:
        if (
            lacks_operand(func, args)
            or sum(t.nbytes for t in operands) > MOST_BYTES
            or dispatched_cost(func, tuple(args), dict(kwargs), out).flops > MOST_FLOPS
        ):
            return None
        autocast = torch.autocast("cpu", enabled=False)
        with _disable_current_modes(), torch.set_grad_enabled(grad), autocast:
            return measure(func, args, kwargs)

    return remembered(_known, device, key, run)


def remembered(
    known: dict[str, dict[str, int]], device: str, key: str, measure: Callable[[], int | None]
) -> int | None:
    """A number about a call: as it is known here or on disk, else measured and kept in both.

    Args:
        known: device -> call -> number, of this process.
        device: whose number it is.
        key: the call.
        measure: gives the number; None where it cannot, which is not kept.
    """
    with _lock:
        table = known.setdefault(device, {})
        if not table:
            table.update(_counts(load(FILE, device)))
        if key in table:
            return table[key]
    found = measure()
    if found is not None:
        with _lock:
            table[key] = found
            store(FILE, device, dict(table))
    return found


def _name(func: Any) -> str:
    return str(func._schema.name).removeprefix("aten::")


def described(value: Any) -> str:
    """An argument as far as a call's memory depends on it."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{list(value.shape)}{list(value.stride())}"
    return str(value)


def zeros(value: Any) -> Any:
    """A tensor of zeros of the sizes, strides and dtype of another; else the value itself."""
    if not isinstance(value, torch.Tensor):
        return value
    shape, stride = tuple(map(int, value.shape)), tuple(map(int, value.stride()))
    made = torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)
    return made.zero_()


def all_zeros(args: Any, kwargs: Any) -> Any:
    """Arguments with `zeros` for tensors; operands that are one stay one: some calls then copy it.

    Args:
        args: positional arguments.
        kwargs: keyword arguments.
    """
    made: dict[Any, Any] = {}
    return tree_map(lambda v: made.setdefault(_place(v), zeros(v)), (args, kwargs))


def _place(value: Any) -> Any:
    """Where a tensor lies; of anything else that it is itself."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return id(value)
    lies = tuple(map(int, value.shape)), tuple(map(int, value.stride()))
    return value.untyped_storage()._cdata, int(value.storage_offset()), value.dtype, *lies


def _repeated(leaves: list[Any]) -> str:
    """Which tensors among the arguments of a call are one."""
    first: dict[Any, int] = {}
    places = [
        (i, first.setdefault(_place(v), i))
        for i, v in enumerate(leaves)
        if isinstance(v, torch.Tensor)
    ]
    return "".join(f" {i}={j}" for i, j in places if i != j)


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


def _settings() -> str:
    """What else decides which kernel runs."""
    mkldnn = torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled
    matmul = torch.get_float32_matmul_precision()
    return f"{torch.__version__} {torch.backends.cpu.get_cpu_capability()} {mkldnn} {matmul}"


def _counts(kept: dict[str, Any]) -> dict[str, int]:
    """The entries of a file of sizes that can be meant."""
    return {k: v for k, v in kept.items() if type(v) is int and v >= 0}


def result_size(func: Any, args: Any, kwargs: Any, place: int) -> int | None:
    """Bytes of one result's storage, by a call on zeros; None where the call fails.

    Args:
        func: the operation.
        args: positional arguments; their tensors may be fake.
        kwargs: keyword arguments.
        place: which of the results.
    """
    try:
        given, named = all_zeros(args, kwargs)
        result = func(*given, **named)[place]
    except (RuntimeError, TypeError):  # no memory, or a dtype that it lacks
        return None
    return int(result.untyped_storage().nbytes()) if isinstance(result, torch.Tensor) else 0


def _measure(func: Any, args: Any, kwargs: Any) -> int | None:
    try:
        given, named = all_zeros(args, kwargs)
        func(*given, **named)  # the first call builds what is kept for the next ones
        results: list[Any] = []
        peak = _peak(lambda: results.append(func(*given, **named)))
    except (RuntimeError, TypeError):  # no memory, a dtype that it lacks, a profiler runs already
        return None
    if peak is None:
        return None
    made = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in storages_of(results)}
    return max(0, peak - sum(made.values()))


def _peak(run: Callable[[], None]) -> int | None:
    """The most bytes that a function holds at once; None where this torch cannot tell.

    Raises:
        RuntimeError: where a profiler runs already.
    """
    try:
        from torch._C._autograd import _disable_profiler_legacy
        from torch.autograd.profiler_legacy import profile
    except ImportError:  # it is deprecated
        return None
    profile(profile_memory=True)._start_trace()
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
