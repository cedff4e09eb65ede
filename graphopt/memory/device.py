"""What operations take from the allocator beside their results: workspaces and inner buffers.

A dispatch mode sees what an operation returns, not what it allocates inside. Three things matter:

- cuBLAS keeps one workspace a thread and stream, taken at the first product ever and never given
  back: the forward's thread has one, autograd's another (32 MiB each on an H200, measured).
  cuBLASLt, which adds a bias to a product, has another for each thread (1 MiB, measured).
- Convolutions and attention take a workspace for the length of a call, and reductions over many
  rows room for partial results: the sum that is the gradient of a bias takes 125 MiB for 16,384
  rows of 1,000 (H200). How much is the library's own choice, so a call of each kind and size is
  measured once on the device, and kept on disk.
- graphopt's kernels allocate in their launch functions, which run on fake tensors with the kernels
  themselves left out.

On the CPU a few operations are known by their source, and oneDNN's are measured
(`graphopt.memory.cpucalls`).
"""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map

from graphopt.memory.cpucalls import (
    cpu_bytes,
    cpu_result,
    described,
    keeps_more,
    lacks_operand,
    remembered,
    result_size,
    takes_inside,
    zeros,
)
from graphopt.memory.forms import APART, UNTOLD, apart
from graphopt.memory.labels import Label
from graphopt.memory.tracker import Allocation, StorageTracker, storages_of

GEMMS = frozenset({"linear", "mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "_scaled_mm", "dot"})
"""ATen operations that run on cuBLAS."""

MEASURED = (
    "convolution",
    "convolution_backward",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_efficient_attention_backward",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_cudnn_attention_backward",
    "native_layer_norm_backward",
    "native_group_norm_backward",
    "embedding_dense_backward",
    "_fused_rms_norm_backward",
    "cudnn_batch_norm",
    "cudnn_batch_norm_backward",
    "native_batch_norm_backward",
    "_cudnn_rnn",
    "_cudnn_rnn_backward",
    "miopen_rnn",
    "miopen_rnn_backward",
    "index_put",
    "_index_put_impl_",
    "sort",
    "topk",
    "cumsum",
    "_safe_softmax",  # a softmax, a mask of what was masked, and their choice
    "_softmax_backward_data",  # multiplies gradient and result beforehand
    # reductions: over many rows they write partial results, which may outweigh their operand
    "sum",
    "mean",
    "prod",
    "var",
    "var_mean",
    "std",
    "std_mean",
    "amax",
    "amin",
    "aminmax",
    "max",
    "min",
    "argmax",
    "argmin",
    "all",
    "any",
    "logsumexp",
    "norm",
    "linalg_vector_norm",
)
"""ATen operations whose inner allocations on CUDA are measured by a call."""


def gemm_workspace(device: torch.device) -> int:
    """Bytes that cuBLAS keeps for one thread, as torch sets it up.

    `CUBLAS_WORKSPACE_CONFIG` is honoured; else 32 MiB from compute capability 9.0 on and 8,320 KiB
    below. 0 on the CPU.
    """
    if device.type != "cuda":
        return 0
    given = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")
    parts = given.split(":")[1:]
    if given.startswith(":") and len(parts) % 2 == 0 and all(p.isdigit() for p in parts):
        pairs = zip(parts[::2], parts[1::2], strict=True)
        return 1024 * sum(int(size) * int(count) for size, count in pairs)
    major = torch.cuda.get_device_capability(device)[0] if torch.cuda.is_available() else 9
    return 32 * 2**20 if major >= 9 else 8320 * 1024


def lt_workspace(device: torch.device) -> int:
    """Bytes that cuBLASLt keeps for one thread beside cuBLAS, as torch sets it up.

    1 MiB, or the KiB that `CUBLASLT_WORKSPACE_SIZE` says, and no more than cuBLAS has; 0 where it
    shares that of cuBLAS, where it is switched off (`DISABLE_ADDMM_CUDA_LT`), and on the CPU.
    """
    # torch can tell its size since it shares cuBLAS's by itself; before, one had to ask for that
    by_itself = hasattr(torch.backends.cuda, "cublaslt_workspace_size")
    shared = os.environ.get("TORCH_CUBLASLT_UNIFIED_WORKSPACE", str(int(by_itself)))
    if device.type != "cuda" or shared == "1" or os.environ.get("DISABLE_ADDMM_CUDA_LT") == "1":
        return 0
    given = os.environ.get("CUBLASLT_WORKSPACE_SIZE", "")
    return min(1024 * int(given) if given.isdigit() else 2**20, gemm_workspace(device))


def adds_bias(name: str, args: Any) -> bool:
    """Whether an operation is a product that cuBLASLt adds a bias to."""
    if name == "linear":
        return len(args) > 2 and args[2] is not None and min(args[1].shape) > 1
    if name != "addmm" or args[0].dim() != 1:
        return False
    return min(args[2].shape) > 1 and args[0].shape[0] == args[2].shape[1]


class Inside:
    """Adds what operations take inside to a tracker's record.

    Args:
        device: whose operations they are.
        real: whether calls may be measured there.

    Attributes:
        unknown: operations whose inner allocations could not be measured.
    """

    def __init__(self, device: torch.device, real: bool) -> None:
        self.device = device
        self.unknown: set[str] = set()
        self._real = real
        self._workspace, self._lt_workspace = gemm_workspace(device), lt_workspace(device)
        self._kept: dict[tuple[str, bool], Allocation] = {}

    def begin(self, tracker: StorageTracker) -> None:
        """Before the step: what cuBLAS and cuBLASLt keep is there from the step before.

        How much it is shows at the first product of each thread.

        Args:
            tracker: the record.
        """
        for backward, name in ((False, "the forward's thread"), (True, "autograd's thread")):
            for library in ("cuBLAS", "cuBLASLt"):
                taken = tracker.take(
                    0, Label(f"{library} of {name}"), "", str(self.device), "workspaces"
                )
                self._kept[library, backward] = taken

    def add(
        self, tracker: StorageTracker, label: Any, backward: bool, call: tuple[Any, Any, Any, Any]
    ) -> None:
        """Add one operation.

        Args:
            tracker: the record.
            label: who ran it.
            backward: whether autograd's thread did.
            call: the overload, its arguments and its result.
        """
        func, args, kwargs, out = call
        if func.namespace != "aten":
            return
        name = func._schema.name.removeprefix("aten::")
        if name in GEMMS:
            self._kept["cuBLAS", backward].bytes = self._workspace
        if adds_bias(name, args):
            self._kept["cuBLASLt", backward].bytes = self._lt_workspace
        size = self._bytes(name, func, args, kwargs, out)
        if size:
            tracker.give_back(tracker.take(size, label, str(func), str(self.device), "temporaries"))

    def whole(self, func: Any, args: Any, kwargs: Any, out: Any) -> Any:
        """The results of an operation as the real ones lie in memory (`UNTOLD`, `APART`).

        Args:
            func: the overload.
            args: positional arguments.
            kwargs: keyword arguments.
            out: what its fake form returned.
        """
        name = func._schema.name.removeprefix("aten::")
        if func.namespace != "aten" or not (name in UNTOLD or name in APART):
            return out
        found = apart(name, out) if name in APART else list(out)
        for place in UNTOLD.get(name, ()):
            fake = out[place]
            if not isinstance(fake, torch.Tensor) or fake.numel():
                continue
            size = self._result(func, args, kwargs, out, place)
            if size is None:
                self.unknown.add(name)
            elif size:
                found[place] = fake.new_empty(size // fake.element_size())
        return tuple(found)

    def _result(self, func: Any, args: Any, kwargs: Any, out: Any, place: int) -> int | None:
        if not self._real:
            return None
        if self.device.type == "cuda":
            return measured_result(func, args, kwargs, place)
        return cpu_result(func, args, kwargs, out, place)

    def _bytes(self, name: str, func: Any, args: Any, kwargs: Any, out: Any) -> int:
        if self.device.type != "cuda":
            if self._real and takes_inside(name, out):
                found = cpu_bytes(func, args, kwargs, out)
                if found is not None:
                    return found
                self.unknown.add(name)
            known = _ON_CPU.get(name)
            return known(args, out) if known is not None else 0
        if not self._real or name not in MEASURED:
            return 0
        found = measured_bytes(func, args, kwargs)
        if found is None:
            self.unknown.add(name)
        return found or 0


# ---- the CPU, by its source


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


_ON_CPU: dict[str, Callable[[Any, Any], int]] = {
    "native_layer_norm_backward": _layer_norm_backward,
    "mse_loss": _mse_loss,
    "smooth_l1_loss": _mse_loss,
    "native_batch_norm_backward": _batch_norm_backward,
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
}


# ---- CUDA, by one call each


_known: dict[str, dict[str, int]] = {}
"""By the name of a GPU: bytes by call."""


def measured_bytes(func: Any, args: Any, kwargs: Any) -> int | None:
    """Bytes that one call holds inside at most, beside its results; None where it cannot be run.

    The call runs on new tensors of the same sizes, strides and dtypes, filled with zeros; the
    device's random state is put back, its statistics of peaks start anew. Each kind and size of
    call runs once a machine and model of GPU.
    """
    return _asked(_settings(), func, args, kwargs, _measure)


def measured_result(func: Any, args: Any, kwargs: Any, place: int) -> int | None:
    """Bytes of one result's storage, by a call as of `measured_bytes`."""

    def size(func: Any, args: Any, kwargs: Any, device: torch.device) -> int | None:
        with torch.random.fork_rng(devices=[device]):
            return result_size(func, args, kwargs, place)

    return _asked(f"result {place} {_settings()}", func, args, kwargs, size)


def _asked(
    what: str, func: Any, args: Any, kwargs: Any, measure: Callable[..., int | None]
) -> int | None:
    """A number about a call: as it is known, else by the call."""
    leaves, _ = tree_flatten((args, kwargs))
    tensors = [t for t in leaves if isinstance(t, torch.Tensor) and t.is_cuda]
    if not tensors:
        return 0
    device = tensors[0].device
    grad = keeps_more(func)
    key = f"{what} {func}{' grad' * grad} {[described(v) for v in leaves]}"

    def run() -> int | None:
        if lacks_operand(func, args):
            return None
        with _disable_current_modes(), torch.set_grad_enabled(grad), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the user's own call warns, too
            return measure(func, args, kwargs, device)

    return remembered(_known, torch.cuda.get_device_name(device), key, run)


def _settings() -> str:
    """What else decides which kernel a call runs, and so its workspace."""
    cudnn = torch.backends.cudnn
    return (
        f"{torch.__version__} {cudnn.version()} {cudnn.enabled} {cudnn.benchmark} "
        f"{cudnn.deterministic} {torch.are_deterministic_algorithms_enabled()} "
        f"{torch.get_float32_matmul_precision()}"
    )


def _measure(func: Any, args: Any, kwargs: Any, device: torch.device) -> int | None:
    try:
        with torch.random.fork_rng(devices=[device]):
            real = tree_map(zeros, (args, kwargs))
            forward = _LAYERS.get(func)
            if forward is not None:
                real = _with_reserve(func, forward, real[0]), real[1]
            func(*real[0], **real[1])  # the first call builds plans and takes lasting workspaces
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
            out = func(*real[0], **real[1])
            torch.cuda.synchronize(device)
            peak = torch.cuda.max_memory_allocated(device)
            sizes = {
                t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in storages_of(out)
            }
            kept = sum(-(-size // 512) * 512 for size in sizes.values())
            return max(0, peak - before - kept)
    except (RuntimeError, TypeError):  # no memory for it, or arguments that must not be zero
        return None


_LAYERS = {
    torch.ops.aten._cudnn_rnn_backward.default: torch.ops.aten._cudnn_rnn.default,
    torch.ops.aten.miopen_rnn_backward.default: torch.ops.aten.miopen_rnn.default,
}
"""Backward of a recurrent layer -> its forward."""


def _with_reserve(func: Any, forward: Any, args: Any) -> tuple[Any, ...]:
    """Arguments of a layer's backward, with what its forward keeps for it in the place of zeros."""
    given = {a.name: v for a, v in zip(func._schema.arguments, args, strict=True)}
    with torch.enable_grad():
        kept = forward(*(given[a.name] for a in forward._schema.arguments))[3]
    return tuple(kept if name == "reserve" else value for name, value in given.items())


@contextlib.contextmanager
def launching_nothing() -> Iterator[None]:
    """Triton kernels that are launched on fake tensors do nothing in this block.

    So the launch functions run as they are, with every buffer that they allocate. Launches on real
    tensors, from other threads, go through.
    """
    try:
        from triton.runtime.jit import JITFunction
    except ImportError:
        yield
        return
    with _lock_launches:
        run = JITFunction.run

        def skip(self: Any, *args: Any, **kwargs: Any) -> Any:
            if any(isinstance(a, FakeTensor) for a in args):
                return None
            return run(self, *args, **kwargs)

        JITFunction.run = skip
        try:
            yield
        finally:
            JITFunction.run = run


_lock_launches = threading.RLock()
