"""What a forward may read beside tensors and Python state: values, autograd's notes, clocks, files.

A trace sees none of these change, so each would be baked into the graph. A mode of torch functions
over the forward sees every call on a tensor; the entry points outside torch are replaced meanwhile.
Environment variables are not refused: they are noted and guarded.
"""

from __future__ import annotations

import builtins
import contextlib
import os
import sys
import threading
import time
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from graphopt.capture.failure import is_stdlib, is_users, user_frame
from graphopt.errors import CaptureError

_VALUES = {
    "item", "tolist", "numpy", "__int__", "__float__", "__bool__", "__index__", "__complex__",
    "__array__", "__contains__", "data_ptr", "equal", "allclose", "is_nonzero",
}  # fmt: skip
"""Calls that give a tensor's values to Python."""

_NOTES = {
    "grad": "Tensor.grad",
    "_version": "Tensor._version",
    "grad_fn": "Tensor.grad_fn of an argument",
    "is_leaf": "Tensor.is_leaf of an argument",
}
"""What autograd keeps on a tensor, which a graph does not see change."""

_WRITES = {
    "__setitem__", "__iadd__", "__isub__", "__imul__", "__imatmul__", "__itruediv__",
    "__ifloordiv__", "__imod__", "__ipow__", "__iand__", "__ior__", "__ixor__", "__ilshift__",
    "__irshift__",
}  # fmt: skip

_CLOCKS = (
    "time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns",
    "process_time", "process_time_ns", "thread_time", "localtime", "gmtime",
)  # fmt: skip
CLOCKS: tuple[tuple[types.ModuleType, str], ...]
CLOCKS = tuple((time, name) for name in _CLOCKS if hasattr(time, name))
_PROCESS = tuple(
    (owner, name)
    for owner, names in (
        (torch, "initial_seed get_rng_state get_num_threads get_float32_matmul_precision"),
        (torch.random, "initial_seed get_rng_state"),
        (torch.backends.cuda, "flash_sdp_enabled mem_efficient_sdp_enabled math_sdp_enabled"),
    )
    for name in names.split()
)
"""Settings of the process that are not in the graph key."""

_OUTSIDE: tuple[tuple[types.ModuleType, str], ...]
_OUTSIDE = (*CLOCKS, *_PROCESS, (os, "urandom"), (builtins, "open"))
_BAKED = "what it reads would be baked into the graph"


class Impure(TorchFunctionMode):
    """Refuses, while a forward is traced, what a graph could not keep right.

    Attributes:
        environ: environment variables that the forward read, with their values (None: not set).
        printed: the line of a `print` in the forward, None where there is none.
        switched: the line that made an intermediate value require grad, None where there is none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.environ: dict[str, str | None] = {}
        self.printed: str | None = None
        self.switched: str | None = None
        self._outer: set[int] = set()
        self._arguments: set[int] = set()
        self._thread = -1
        self._inference = torch.is_inference_mode_enabled()  # a trace runs outside it

    @contextlib.contextmanager
    def watching(self, arguments: tuple[Any, ...], state: Iterable[Any]) -> Iterator[None]:
        """Refuse and note in this thread during the block.

        Args:
            arguments: the tensors that the traced forward is given.
            state: parameters and buffers of the traced module.

        Raises:
            CaptureError: from inside the forward, with the user's line.
        """
        self._thread = threading.get_ident()
        self._arguments = {id(t) for t in arguments if t.requires_grad}
        self._outer = {id(t) for t in (*arguments, *state)}
        kind: Any = type(os.environ)
        saved = [(owner, name, getattr(owner, name)) for owner, name in _OUTSIDE]
        read, printing, inference = (
            kind.__getitem__,
            builtins.print,
            torch.is_inference_mode_enabled,
        )
        try:
            torch.is_inference_mode_enabled = self._told(inference)
            for owner, name, original in saved:
                setattr(owner, name, self._refusing(owner, name, original))
            kind.__getitem__ = self._noting(read)
            builtins.print = self._printing(printing)
            with self:
                yield
        finally:
            kind.__getitem__ = read
            builtins.print = printing
            torch.is_inference_mode_enabled = inference
            for owner, name, original in saved:
                setattr(owner, name, original)
            self._thread = -1

    def _here(self) -> bool:
        return threading.get_ident() == self._thread

    # ---- outside torch

    def _refusing(self, owner: types.ModuleType, name: str, original: Any) -> Any:
        def refuse(*args: Any, **kwargs: Any) -> Any:
            if self._here() and is_users(sys._getframe(1).f_code.co_filename):
                raise impure(f"{owner.__name__}.{name} in forward", user_frame())
            return original(*args, **kwargs)

        return refuse

    def _told(self, original: Any) -> Any:
        def is_inference_mode_enabled() -> bool:
            if self._here() and is_users(sys._getframe(1).f_code.co_filename):
                return self._inference
            return bool(original())

        return is_inference_mode_enabled

    def _printing(self, original: Any) -> Any:
        def printing(*args: Any, **kwargs: Any) -> None:
            if self._here() and is_users(sys._getframe(1).f_code.co_filename):
                self.printed = self.printed or user_frame()
            original(*args, **kwargs)

        return printing

    def _noting(self, original: Any) -> Any:
        def __getitem__(environ: Any, key: str) -> str:  # noqa: N807
            if not self._here() or not _asked_by_user(sys._getframe(1)):
                return str(original(environ, key))
            self.environ.setdefault(key, None)
            self.environ[key] = value = str(original(environ, key))
            return value

        return __getitem__

    # ---- calls on tensors

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at one call of a torch function before it is traced."""
        name = getattr(func, "__name__", "")
        first = args[0] if args else None
        if name in ("__get__", "__set__"):
            self._property(name, str(getattr(func.__self__, "__name__", "")), args)
        elif name == "requires_grad_":
            self._switch(first, args[1] if len(args) > 1 else (kwargs or {}).get("requires_grad"))
        elif name in _VALUES:
            for tensor in args[:2]:
                if _is_real(tensor):
                    raise impure(f"Tensor.{name} of a tensor from outside the trace", user_frame())
        elif name in _WRITES or (name.endswith("_") and not name.endswith("__")):
            self._write(first, name)
        out = kwargs.get("out") if kwargs else None
        if out is not None:
            self._write(out, f"{name}(out=)")
        return func(*args, **(kwargs or {}))

    def _property(self, kind: str, name: str, args: Any) -> None:
        if kind == "__set__":
            if name == "requires_grad":
                self._switch(args[0], args[1])
            elif name == "grad" and is_users(sys._getframe(2).f_code.co_filename):
                raise impure("an assignment to Tensor.grad in forward", user_frame())
        elif (
            name in _NOTES
            and (name in ("grad", "_version") or id(args[0]) in self._arguments)
            and is_users(sys._getframe(2).f_code.co_filename)
        ):
            raise impure(f"{_NOTES[name]} in forward", user_frame())

    def _switch(self, tensor: Any, on: bool | None) -> None:
        on = on is None or bool(on)
        if tensor.requires_grad == on:
            return
        if not on or id(tensor) in self._outer or _is_real(tensor):
            raise switching(user_frame())
        self.switched = self.switched or user_frame()  # fine unless a result requires grad by it

    def _write(self, target: Any, name: str) -> None:
        for tensor in target if isinstance(target, (tuple, list)) else (target,):
            if _is_real(tensor):
                raise CaptureError(
                    f"an in-place operation ({name}) on a tensor that is neither an argument nor"
                    " state of the model",
                    at=user_frame(),
                    why="a list, a global or a closure holds it, so the trace would change it",
                    try_="a buffer (register_buffer) for it; or on_error='fallback'",
                )


def switching(at: str | None) -> CaptureError:
    """The error for a forward that switches requires_grad."""
    return CaptureError(
        "Tensor.requires_grad_ in forward (or an assignment to requires_grad)",
        at=at,
        why="it has no place in a captured forward: torch.export drops it",
        try_="move it out of forward, or on_error='fallback'",
    )


def impure(what: str, at: str | None) -> CaptureError:
    """The error for a forward that reads what a graph cannot see change."""
    return CaptureError(
        what,
        at=at,
        why=_BAKED,
        try_="give it as an argument or keep it in a buffer; or on_error='fallback'",
    )


def _is_real(value: Any) -> bool:
    """Whether a tensor has values: during a trace, one that comes from outside of it."""
    if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
        return False
    return type(value) in (torch.Tensor, nn.Parameter)


def _asked_by_user(frame: types.FrameType | None) -> bool:
    """Whether the first frame outside the standard library is neither torch's nor ours."""
    while frame is not None and is_stdlib(frame.f_code.co_filename):
        frame = frame.f_back
    return frame is not None and is_users(frame.f_code.co_filename)
