"""What every launch needs: may Triton run, on which device, how the rows of a tensor lie."""

from __future__ import annotations

import functools
import importlib.util
import os
import traceback
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from graphopt.errors import GraphOptError

# The interpreter has no multiprocessors; small enough that tests see programs with several rows.
INTERPRETER_SMS = 2


def use_triton(tensor: torch.Tensor) -> bool:
    """Whether operators on this tensor launch Triton kernels.

    True on CUDA if Triton is installed. On the CPU only when Triton's interpreter is asked for
    (TRITON_INTERPRET=1, set before Triton is imported) and GRAPHOPT_TRITON_ON_CPU=1: that is how
    kernels are tested without a GPU.

    Example:
        >>> use_triton(torch.ones(2))
        False
    """
    if tensor.is_cuda:
        return _has_triton()
    return (
        tensor.device.type == "cpu"
        and os.environ.get("GRAPHOPT_TRITON_ON_CPU") == "1"
        and os.environ.get("TRITON_INTERPRET") == "1"
    )


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def triton_failure(name: str, error: Exception) -> GraphOptError | None:
    """What to raise for a launch that failed inside Triton, None where it failed elsewhere.

    A damaged file in Triton's cache, a cache folder that cannot be written, a missing C compiler
    and a kernel that the GPU has no room for all end there, in errors that name none of these.

    Args:
        name: the operator's, without the namespace.
        error: what the launch raised.
    """
    frames = traceback.walk_tb(error.__traceback__)
    inside = any(f.f_globals.get("__name__", "").startswith("triton.") for f, _ in frames)
    if not inside or isinstance(error, (GraphOptError, torch.OutOfMemoryError)):
        return None
    folder = os.environ.get("TRITON_CACHE_DIR") or os.path.join("~", ".triton", "cache")
    return GraphOptError(
        f"the Triton kernel of graphopt::{name} could not be built or launched",
        why=f"{type(error).__name__}: {error}"[:500],
        try_=f"empty Triton's cache ({folder}) and see that it can be written; "
        "optimize(..., fuse=False) runs without such kernels",
    )


def on_device(tensor: torch.Tensor) -> AbstractContextManager[None]:
    """A context in which the tensor's GPU is the current one, since Triton launches there.

    Example:
        >>> with on_device(torch.ones(2)):
        ...     pass
    """
    if not tensor.is_cuda or tensor.device.index == torch.cuda.current_device():
        return nullcontext()
    return _guard(tensor.device)


@contextmanager
def _guard(device: torch.device) -> Iterator[None]:
    with torch.cuda.device(device):
        yield


@functools.cache
def _sms(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def sm_count(tensor: torch.Tensor) -> int:
    """Number of multiprocessors of the tensor's GPU; a small constant on the CPU.

    Example:
        >>> sm_count(torch.ones(2))
        2
    """
    return _sms(tensor.device.index) if tensor.is_cuda else INTERPRETER_SMS


@functools.cache
def _shared_bytes(index: int) -> int:
    properties = torch.cuda.get_device_properties(index)
    # AMD's properties lack it; 64 KiB is what its compute units have.
    return int(getattr(properties, "shared_memory_per_block_optin", 2**16))


def shared_bytes(tensor: torch.Tensor) -> int:
    """Shared memory that one program may have on the tensor's GPU; plenty on the CPU.

    Example:
        >>> shared_bytes(torch.ones(2)) > 2**16
        True
    """
    return _shared_bytes(tensor.device.index) if tensor.is_cuda else 2**20


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n (1 for n < 2).

    Example:
        >>> next_power_of_2(1000), next_power_of_2(0)
        (1024, 1)
    """
    return 1 << max(n - 1, 0).bit_length()


def cdiv(a: int, b: int) -> int:
    """A / b, rounded up. Triton's own costs the host 9 us a call.

    Example:
        >>> cdiv(7, 2)
        4
    """
    return -(-a // b)


def is_aligned(tensor: torch.Tensor) -> bool:
    """Whether a tensor begins at a multiple of 16 bytes; a fake one's storage is taken to.

    Example:
        >>> is_aligned(torch.ones(8)), is_aligned(torch.ones(8)[1:])
        (True, False)
    """
    if isinstance(tensor, FakeTensor):  # has no address
        return tensor.storage_offset() * tensor.element_size() % 16 == 0
    return tensor.data_ptr() % 16 == 0


def nothing(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The tensor of no element that stands for a result that nobody wants.

    One for all calls: an allocation costs the host 3 to 5 us. Under a dispatch mode it is a new
    one, since a mode of fake tensors would leave a fake one behind.

    Example:
        >>> nothing(torch.float32, torch.device("cpu")).shape
        torch.Size([0])
    """
    if torch._C._len_torch_dispatch_stack():
        return torch.empty(0, dtype=dtype, device=device)
    return _nothing(dtype, device)


@functools.cache
def _nothing(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):  # one of inference could not be saved for a backward
        return torch.empty(0, dtype=dtype, device=device)


class Rows(NamedTuple):
    """A tensor seen as [rows, cols], cols contiguous.

    Args:
        tensor: the tensor, or a contiguous copy of it.
        rows: how many, the product of all dimensions but the last.
        cols: elements of the last dimension.
        stride: elements from one row to the next; 0 if all rows are one.
    """

    tensor: torch.Tensor
    rows: int
    cols: int
    stride: int


def row_view(tensor: torch.Tensor, copy: bool = True) -> Rows:
    """See a tensor of any strides as rows, copying only if it must.

    No copy if the last dimension is contiguous and the leading ones lie at one stride: slices of
    columns, halves of a chunk, broadcast rows. Everything else is made contiguous. A tensor of no
    dimension is one row of one element.

    Args:
        tensor: any tensor.
        copy: False to see where the copy's rows would lie, without making it.

    Example:
        >>> half = torch.zeros(3, 8).chunk(2, dim=-1)[1]
        >>> rows = row_view(half)
        >>> rows.stride, rows.tensor is half
        (8, True)
    """
    cols = tensor.shape[-1] if tensor.dim() else 1
    count = tensor.numel() // cols if cols else 0
    if tensor.is_contiguous():
        return Rows(tensor, count, cols, cols)
    stride = _row_stride(tensor)
    if stride is None:
        return Rows(tensor.contiguous() if copy else tensor, count, cols, cols)
    return Rows(tensor, count, cols, stride)


def lies_in_rows(tensor: torch.Tensor) -> bool:
    """Whether `row_view` sees a tensor as rows without a copy.

    Example:
        >>> lies_in_rows(torch.zeros(3, 8)[:, 2:4]), lies_in_rows(torch.zeros(3, 8).t())
        (True, False)
    """
    return tensor.is_contiguous() or _row_stride(tensor) is not None


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor, as torch makes them.

    Example:
        >>> contiguous_strides((2, 3, 4)), contiguous_strides((2, 0, 4))
        ((12, 4, 1), (4, 4, 1))
    """
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _row_stride(tensor: torch.Tensor) -> int | None:
    """The one stride of all leading dimensions, or None if there is none."""
    if tensor.shape[-1] != 1 and tensor.stride(-1) != 1:
        return None
    stride: int | None = None  # of the innermost leading dimension longer than one
    expected = 0
    for size, step in zip(reversed(tensor.shape[:-1]), reversed(tensor.stride()[:-1]), strict=True):
        if size == 1:
            continue
        if stride is None:
            stride = step
        elif step != expected:
            return None
        expected = step * size
    return tensor.shape[-1] if stride is None else stride


class Config(NamedTuple):
    """One line of a launch table.

    Args:
        block: widest block of columns that the line serves (a power of two).
        rows: rows a step.
        warps: warps a program.
        per_sm: programs a multiprocessor; 0 for one program a step.
        stages: pipeline stages of the loop over steps; 0 if there is no loop.
    """

    block: int
    rows: int
    warps: int
    per_sm: int
    stages: int


def pick(table: tuple[Config, ...], block: int) -> Config:
    """The first line of a table, sorted by block, that serves a block; else the last.

    Example:
        >>> pick((Config(64, 8, 4, 0, 1), Config(1024, 1, 4, 0, 1)), 128).rows
        1
    """
    for line in table:
        if block <= line.block:
            return line
    return table[-1]
