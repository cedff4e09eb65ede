"""Values kept in host memory between forward and backward.

A value is sent when forward has read it for the last time. It stays on the device until its copy is
done: a second marker says where that is waited for. In backward the copy back begins when another
value has its turn, early enough by the plan, and is waited for when the value is asked for.

On CUDA the copies run on a side stream, beside the computation; memory of the device is taken and
let go of in the order of the computing stream, so that its allocator sees what the plan foresaw.
Pinned memory comes from torch's pool of it, which gives a buffer to nobody else before the copies
that were begun with it are done. Elsewhere a copy is a plain one, at the same places.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from graphopt.errors import GraphOptError

_STREAMS: dict[torch.device, torch.cuda.Stream] = {}

Arriving = tuple[torch.Tensor, torch.cuda.Event | None]
"""A tensor that a copy writes to or reads from, and when that is done; None for at once."""


class HostCopy:
    """A value in host memory.

    Args:
        tensor: the value; its own, dense memory.
    """

    __slots__ = ("__weakref__", "_ahead", "_beside", "_device", "_had", "_host", "_marked", "done")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._device = tensor.device
        self._marked = tensor.requires_grad
        self._ahead: Arriving | None = None
        self._had = False
        self._beside = tensor.is_cuda and not isinstance(tensor, FakeTensor)
        self.done: torch.cuda.Event | None = None
        tensor = tensor.detach()
        with _unseen():
            if not self._beside:
                self._host = tensor.clone() if tensor.device.type == "cpu" else tensor.to("cpu")
                return
            _check_capture()
            self._host = torch.empty_strided(
                tensor.shape,
                tensor.stride(),
                dtype=tensor.dtype,
                device="cpu",  # whatever `torch.device` as a context says
                pin_memory=True,
            )
            self.done = _copied(self._host, tensor, self._device)

    def fetch(self) -> torch.Tensor:
        """The value on its device again, for the stream that is current there."""
        made, done = self._ahead or self._start()
        self._ahead, self._had = None, True
        if done is not None:
            torch.cuda.current_stream(self._device).wait_event(done)
        return made.requires_grad_(self._marked)

    def fetch_ahead(self) -> None:
        """Begin to fetch the value, unless this backward had it."""
        if self._ahead is None and not self._had:
            self._ahead = self._start()

    def _start(self) -> Arriving:
        host = self._host
        if not self._beside:
            same = self._device.type == "cpu"
            return (host.clone() if same else host.to(self._device)), None
        made = torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=self._device)
        return made, _copied(made, host, self._device)

    def forget_ahead(self) -> None:
        """Let go of what was fetched ahead and not asked for; the next backward has it anew."""
        if self._ahead is not None and self._ahead[1] is not None:
            self._ahead[1].synchronize()  # its memory may be written until then
        self._ahead, self._had = None, False

    def __del__(self) -> None:
        self.forget_ahead()


def fetched(kept: HostCopy | torch.Tensor) -> torch.Tensor:
    """The value of a copy; a tensor that was kept in its place as it is."""
    return kept.fetch() if isinstance(kept, HostCopy) else kept


class Line:
    """The copies of one forward."""

    def __init__(self) -> None:
        self._leaving: dict[str, Arriving] = {}
        self._copies: list[weakref.ref[HostCopy]] = []

    def send(self, name: str, tensor: torch.Tensor) -> HostCopy:
        """Begin to copy a value to host memory; it is kept until it is released."""
        copy = HostCopy(tensor)
        self._leaving[name] = tensor, copy.done
        self._copies.append(weakref.ref(copy))
        return copy

    def release(self, name: str) -> None:
        """Let go of a value, behind its copy."""
        tensor, done = self._leaving.pop(name, (None, None))
        if tensor is not None and done is not None:
            # what takes over its memory on this stream comes after the copy
            torch.cuda.current_stream(tensor.device).wait_event(done)

    def close(self) -> None:
        """Let go of every value that is still kept."""
        for name in list(self._leaving):
            self.release(name)

    def forget_ahead(self) -> None:
        """Let go of what was fetched ahead and not asked for."""
        for found in self._copies:
            copy = found()
            if copy is not None:
                copy.forget_ahead()


def may_leave(tensor: torch.Tensor) -> bool:
    """Whether a tensor has dense memory of its own, which a copy can stand for."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return expected * tensor.element_size() == tensor.untyped_storage().nbytes()


def _check_capture() -> None:
    if torch.cuda.is_current_stream_capturing():
        raise GraphOptError(
            "a value cannot go to host memory inside a CUDA graph",
            why="each step takes pinned memory and waits for copies, which a graph cannot record",
            try_="offload=False for a step that is captured, or the step without a CUDA graph",
        )


def _unseen() -> contextlib.AbstractContextManager[Any]:
    """Out of sight of whoever counts the memory of the device."""
    return _disable_current_modes() if _dispatch_modes() else _NOTHING


_dispatch_modes = torch._C._len_torch_dispatch_stack
_NOTHING = contextlib.nullcontext()


def _copied(to: torch.Tensor, source: torch.Tensor, device: torch.device) -> torch.cuda.Event:
    """Copy on the side stream, behind what the current stream has been given so far."""
    stream = _STREAMS.get(device)
    if stream is None:
        stream = _STREAMS[device] = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.no_grad(), torch.cuda.stream(stream):
        to.copy_(source, non_blocking=True)
        return stream.record_event()
