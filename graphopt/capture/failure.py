"""Failures of the trace turned into `CaptureError`s: construct, the user's line, cure."""

from __future__ import annotations

import functools
import linecache
import os
import re
import sys
import sysconfig
import traceback
import types
from collections.abc import Iterator

import torch

from graphopt.errors import CaptureError, GraphOptError

_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_TORCH_NN = os.path.join(_TORCH, "nn") + os.sep
_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_STDLIB = tuple({sysconfig.get_path(k) + os.sep for k in ("stdlib", "platstdlib")})
_SITE = tuple({sysconfig.get_path(k) + os.sep for k in ("purelib", "platlib")})


@functools.cache
def is_users(filename: str) -> bool:
    """Whether a file is neither torch's, nor ours, nor the standard library's."""
    if filename.startswith((_TORCH, _HERE, "<frozen", "<string")):
        return False
    return filename.startswith(_SITE) or not filename.startswith(_STDLIB)


def is_stdlib(filename: str) -> bool:
    """Whether a file is one of the standard library's."""
    known = filename.startswith(_STDLIB) and not filename.startswith(_SITE)
    return known or filename.startswith("<frozen")


def _describe(frame: types.FrameType, line: int) -> str:
    code = frame.f_code
    where = code.co_name
    owner = frame.f_locals.get("self")
    if owner is not None:
        where = f"{type(owner).__name__}.{where}"
    text = linecache.getline(code.co_filename, line).strip()
    return f"{code.co_filename}:{line} in {where}" + (f"    {text}" if text else "")


def user_frame(error: BaseException | None = None) -> str | None:
    """The innermost frame that is neither torch's, nor ours, nor the standard library's.

    Args:
        error: take the frames of its traceback; None takes those of the running call.

    Returns:
        "file:line in Class.function    code", None where there is no such frame.
    """
    frames = _frames_of(error) if error is not None else traceback.walk_stack(sys._getframe(1))
    picked = None
    for frame, line in frames:
        if is_users(frame.f_code.co_filename):
            picked = _describe(frame, line)
            if error is None:  # walk_stack starts at the innermost
                break
    return picked


def _frames_of(error: BaseException) -> Iterator[tuple[types.FrameType, int]]:
    """Frames of the error, or of what caused it when the error itself holds no user frame."""
    chain: list[list[tuple[types.FrameType, int]]] = []
    current: BaseException | None = error
    while current is not None and len(chain) < 10:
        chain.append(list(traceback.walk_tb(current.__traceback__)))
        current = current.__cause__ or current.__context__
    for in_method in (True, False):  # a free function may stand in for a forward
        for frames in chain:
            users = (f for f, _ in frames if is_users(f.f_code.co_filename))
            if any("self" in f.f_locals or not in_method for f in users):
                yield from frames
                return
    yield from chain[0]


def _is_models_own(error: BaseException) -> bool:
    """Whether the model itself raised: a line of user code, or a check of torch.nn, that raises."""
    if type(error).__module__.startswith("torch.") or isinstance(error, AttributeError):
        return False
    frames = list(traceback.walk_tb(error.__traceback__))
    if not frames:
        return False
    frame, line = frames[-1]
    file = frame.f_code.co_filename
    if not (is_users(file) or file.startswith(_TORCH_NN)):
        return False
    text = linecache.getline(frame.f_code.co_filename, line).strip()
    return text.startswith(("raise", "assert"))


_KINDS: tuple[tuple[str, str, str, str], ...] = (
    # (regex over "TypeName: message", what, why, try)
    (
        r"GuardOnDataDependent|data-dependent expression|Could not guard|Could not extract special",
        "data-dependent control flow (a branch, a loop or a size from a tensor's value)",
        "the line reads a tensor's value, so one graph cannot hold every case",
        "torch.where or a mask instead of the branch; or optimize(..., on_error='fallback')",
    ),
    (
        r"DataDependentOutput|_local_scalar_dense|item\(\)",
        "a tensor's value is read (.item(), .tolist(), bool(), float())",
        "while capturing there are no values, only shapes and dtypes",
        "keep the value in a tensor; or optimize(..., on_error='fallback')",
    ),
    (
        r"DynamicOutputShape",
        "an operation whose output size depends on values (nonzero, masked_select, unique)",
        "one graph cannot hold every size",
        "torch.where or a fixed size; or optimize(..., on_error='fallback')",
    ),
    (
        r"UnsupportedOperator|UnsupportedFakeTensor|no fake impl|fake impl",
        "an operator without a fake implementation",
        "its output's shape and dtype cannot be told without running it",
        "register one with torch.library.register_fake; or on_error='fallback'",
    ),
    (
        r"were assigned during export|assigned during export",
        "a tensor attribute is assigned in forward",
        "the assignment would be lost in a graph",
        "self.register_buffer(...) in __init__ and .copy_() in forward; or on_error='fallback'",
    ),
    (
        r"fake tensor in the exported program constant",
        "a tensor that the trace cannot follow (tensor.data, or one kept from an earlier call)",
        "what is done to it would not be in the graph",
        "tensor.detach() in place of tensor.data; or optimize(..., on_error='fallback')",
    ),
    (
        r"^RecursionError",
        "too many calls inside one another (recursion without end, or modules nested deeply)",
        "a trace takes more of Python's stack than a call",
        "end the recursion, or raise sys.setrecursionlimit(); or on_error='fallback'",
    ),
    (
        r"allocate|out of memory",
        "out of memory while capturing",
        "the model allocates real tensors while it is traced",
        "create tensors in __init__",
    ),
)


def convert(error: BaseException, model: str) -> BaseException:
    """The exception to raise in place of one that came out of the trace.

    Args:
        error: what `torch.export` raised.
        model: the source's class name, for the message.

    Returns:
        A `CaptureError`; or the error itself when the model raised it (eager raises it too).
    """
    if isinstance(error, GraphOptError):
        return error
    if _is_models_own(error):
        return error
    at = user_frame(error)
    message = f"{type(error).__name__}: {error}"
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    if at and "layerdrop" in at.lower():
        return CaptureError(
            "LayerDrop (a layer skipped by a random draw: a data-dependent branch)",
            at=at,
            why="one graph cannot hold every choice of layers",
            try_="set layerdrop to 0 in the model's config; or on_error='fallback'",
        )
    for pattern, what, why, cure in _KINDS:
        if re.search(pattern, message):
            return CaptureError(what, at=at, why=f"{why} ({_short(first)})", try_=cure)
    raised = _short(f"{type(error).__name__}: {first}")
    return CaptureError(
        f"{model} cannot be captured: its forward raised {raised}",
        at=at,
        why="it was traced with these inputs, on tensors that have no values",
        try_="call the model itself with them: where that works, on_error='fallback' does, too",
    )


def _short(text: str, limit: int = 300) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."
