"""Calls prepared once and repeated: what a fused operator costs the host.

Where a kernel's tiles lie, which of its forms is compiled and which buffers it needs follow from
the shapes, strides, dtypes and devices of its tensors and from the options of the call. `Prepared`
works that out once for each such key and keeps a function that only allocates and launches;
`Launch` keeps the compiled kernel and all its arguments but the pointers, and hands them to
Triton's launcher, past the part of Triton that finds the kernel again (host time in
docs/performance.md).

What Triton specializes a kernel for beyond the key is whether each pointer is a multiple of 16
bytes. Only launches whose pointers all are get repeated; any other goes the long way, as do all
while a tool watches launches through Triton's hooks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from operator import is_, itemgetter
from typing import Any

import torch

from graphopt.kernels._launch import contiguous_strides, lies_in_rows, nothing, on_device

MaybeTensor = torch.Tensor | None
Run = Callable[..., Any]

_REAL = frozenset({torch.Tensor, torch.nn.Parameter})

MOST = 4096
"""Keys that are kept for an operator; where shapes never repeat, all are forgotten at once."""

FIRST = 4
"""Kinds of tensors that are looked for first, for each set of options."""

_ALL: weakref.WeakSet[Prepared] = weakref.WeakSet()


def facts(tensor: MaybeTensor) -> tuple[Any, ...] | None:
    """What a prepared call may depend on: shape, strides, dtype, device; None for no tensor.

    Example:
        >>> facts(torch.ones(2, 3))
        (torch.Size([2, 3]), (3, 1), torch.float32, -1)
    """
    if tensor is None:
        return None
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device()


class Prepared:
    """A function of tensors and options that is worked out once for each kind of arguments.

    Args:
        prepare: `prepare(tensors, options)` returns `run(*tensors)`. It may look at the tensors'
            shapes, strides, dtypes and devices, not at their values or addresses, and allocates
            nothing on their device, which a prediction of memory would count; `run` must keep none
            of them alive.

    Example:
        >>> double = Prepared(lambda tensors, options: lambda x: options[0] * x)
        >>> double((torch.ones(1),), (2,))
        tensor([2.])
    """

    def __init__(self, prepare: Callable[[tuple[MaybeTensor, ...], tuple[Any, ...]], Run]) -> None:
        self._prepare = prepare
        self._known: dict[Any, Run] = {}
        self._first: dict[Any, list[tuple[Callable[[Any], bool], Run]]] = {}
        _ALL.add(self)

    def __call__(self, tensors: tuple[MaybeTensor, ...], options: tuple[Any, ...]) -> Any:
        """Run on some tensors; options must be hashable."""
        first = self._first.get(options)
        if first is not None:
            for alike, run in first:
                if alike(tensors):
                    return run(*tensors)
        key = (options, *[facts(t) for t in tensors])
        known = self._known.get(key)
        if known is None:
            known = self._prepare(tensors, options)
            if len(self._known) >= MOST:
                self.forget()
            self._known[key] = known
        elif first is None or len(first) < FIRST:  # the second time: it may come often
            self._first.setdefault(options, []).append((_alike(tensors), known))
        return known(*tensors)

    def forget(self) -> None:
        """Forget what was worked out."""
        self._known.clear()
        self._first.clear()


def _never(given: Any) -> bool:
    return False


def _alike(tensors: tuple[MaybeTensor, ...]) -> Callable[[Any], bool]:
    """Whether some tensors are as these in all that `facts` tells, as a function that runs in C.

    Torch's own guards compare, and compare more (class, dispatch keys, `requires_grad`): what they
    do not know may be equal all the same. They are private, and say of a tensor that is there twice
    that it differs; where they cannot serve, nothing is alike.
    """
    there = [i for i, t in enumerate(tensors) if t is not None]
    found = [tensors[i] for i in there]
    if not found or not _REAL.issuperset(map(type, found)):
        return _never
    try:
        from torch._C._dynamo.guards import TensorGuards

        sizes: list[Any] = [list(t.shape) for t in found if t is not None]
        strides: list[Any] = [list(t.stride()) for t in found if t is not None]
        guards = TensorGuards(*found, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        if not guards.check(*found):
            return _never
    except (ImportError, TypeError, RuntimeError, AttributeError):
        return _never
    check = guards.check
    missing = [i for i, t in enumerate(tensors) if t is None]
    if not missing:
        return lambda given: check(*given)
    # an index twice, so that one alone gives a tuple, too
    rest, none = itemgetter(missing[0], *missing), (None,) * (1 + len(missing))
    if len(there) == 1:
        only = there[0]
        return lambda given: check(given[only]) and all(map(is_, rest(given), none))
    pick = itemgetter(*there)
    return lambda given: check(*pick(given)) and all(map(is_, rest(given), none))


def forget() -> None:
    """Forget every prepared call, for whoever changes a launch table."""
    for prepared in _ALL:
        prepared.forget()


def maker(like: torch.Tensor, shape: Any, dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    """How to allocate a contiguous tensor, as a function of one like ``like``, the cheapest way.

    Args:
        like: of the kind that the function will be given.
        shape: of the result; None for one that nobody wants, which has no element.
        dtype: of the result.

    Example:
        >>> make = maker(torch.ones(2, 3), (4,), torch.float16)
        >>> make(torch.zeros(2, 3)).shape
        torch.Size([4])
    """
    device = like.device
    if shape is None:
        return lambda given: nothing(dtype, device)
    shape = torch.Size(shape)
    plain = contiguous_strides(shape)
    if like.shape == shape and like.dtype == dtype and like.stride() == plain:
        return torch.empty_like
    # Half the host time of torch.empty.
    return lambda given: torch.empty_strided(shape, plain, dtype=dtype, device=device)


def on_rows(write: Run, rows: tuple[MaybeTensor, ...], vectors: tuple[MaybeTensor, ...]) -> Run:
    """A function of tensors that are given as kernels read them, copied where they do not lie so.

    Args:
        write: takes the tensors, first those of ``rows``, then those of ``vectors``, then others.
        rows: of the kind that will be given, to be seen as rows by `row_view`.
        vectors: to be contiguous.
    """
    copied = [
        i
        for i, t in enumerate((*rows, *vectors))
        if t is not None and not (lies_in_rows(t) if i < len(rows) else t.is_contiguous())
    ]
    if not copied:
        return write

    def run(*tensors: Any) -> Any:
        laid = list(tensors)
        for i in copied:
            laid[i] = laid[i].contiguous()
        return write(*laid)

    return run


class Launch:
    """A kernel with its grid and all its arguments but the pointers, which come first.

    Args:
        kernel: the `triton.jit` function.
        grid: programs, of one to three dimensions.
        scalars: the arguments behind the pointers that are not constants.
        constants: the constants by name, and Triton's options (`num_warps=`).
    """

    __slots__ = (
        "_again", "_device", "_devices", "_head", "_knobs", "_start", "_streams", "_tail",
        "constants", "grid", "kernel", "scalars",
    )  # fmt: skip

    def __init__(self, kernel: Any, grid: tuple[int, ...], *scalars: Any, **constants: Any) -> None:
        self.kernel = kernel
        self.grid = grid
        self.scalars = scalars
        self.constants = constants
        self._again: Callable[..., Any] | None = None

    def __call__(self, *pointers: MaybeTensor) -> None:
        """Launch on the GPU of the first tensor; None for a pointer that the kernel lacks."""
        again = self._again
        if again is None:
            self._first(pointers)
            return
        places: list[int | None] = []
        low = 0
        for tensor in pointers:
            if tensor is None:
                places.append(None)
            elif type(tensor) in _REAL:
                place = tensor.data_ptr()
                low |= place
                places.append(place)
            else:  # without memory (a prediction's): Triton's launch is replaced, or refuses them
                self._by_triton(*pointers)
                return
        device = self._device
        if low & 15 or self._devices() != device or self._watched():
            self._by_triton(*pointers)
            return
        again(*self._start, self._streams(device), *self._head, *places, *self._tail)

    def _by_triton(self, *pointers: MaybeTensor) -> Any:
        """As Triton does it, which finds the kernel for these pointers or compiles it."""
        first = next(t for t in pointers if t is not None)
        with on_device(first):
            return self.kernel[self.grid](*pointers, *self.scalars, **self.constants)

    def _first(self, pointers: tuple[MaybeTensor, ...]) -> None:
        compiled = self._by_triton(*pointers)
        if not hasattr(compiled, "packed_metadata"):  # the interpreter and predictions give None
            return
        if any(t is not None and (type(t) not in _REAL or t.data_ptr() % 16) for t in pointers):
            return
        from triton import knobs
        from triton.runtime import driver

        self._knobs = knobs.runtime
        self._devices = driver.active.get_current_device
        if self._devices is torch.cuda.current_device:  # CUDA is awake by now: without its Python
            self._devices = torch._C._cuda_getDevice
        self._streams = driver.active.get_current_stream
        self._device = next(t.get_device() for t in pointers if t is not None)
        if self._device < 0:  # tensors of another kind of memory: Triton's own device
            self._device = self._devices()
        self._start = (*self.grid, 1, 1)[:3]
        names = self.kernel.arg_names[len(pointers) + len(self.scalars) :]
        self._tail = (*self.scalars, *(self.constants[name] for name in names))
        # No metadata and no hooks: `_watched` sees to it that nobody is there to read them.
        self._head = (compiled.function, compiled.packed_metadata, None, None, None)
        self._again = compiled.run

    def _watched(self) -> bool:
        """Whether something wants to see launches, or to change how kernels are compiled."""
        knobs = self._knobs
        enter, leave = knobs.launch_enter_hook, knobs.launch_exit_hook
        return bool(
            getattr(enter, "calls", enter)
            or getattr(leave, "calls", leave)
            or knobs.add_stages_inspection_hook
            or self.kernel.pre_run_hooks
        )
