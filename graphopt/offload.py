"""Values kept in host memory between forward and backward.

On CUDA the copies run on a side stream. On the way out a value's device memory is let go of once
the copy is done: at most `STASH` values wait for that at a time. On the way back the value that was
sent before is fetched ahead, since backward wants it next. Elsewhere the copy is a plain one.
"""

from __future__ import annotations

import collections
import weakref
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

STASH = 2
"""How many values may wait for their copy to host memory before the device waits for the first."""

_STREAMS: dict[torch.device, torch.cuda.Stream] = {}


class HostCopy:
    """A value in host memory.

    Args:
        tensor: the value; its own, dense memory.
        line: the copies of the same forward.
    """

    __slots__ = ("__weakref__", "_ahead", "_before", "_device", "_host", "_marked")

    def __init__(self, tensor: torch.Tensor, line: Line) -> None:
        self._device = tensor.device
        self._marked = tensor.requires_grad
        self._ahead: tuple[torch.Tensor, torch.cuda.Event] | None = None
        self._before = line.last
        line.last = weakref.ref(self)
        tensor = tensor.detach()
        if not _overlaps(tensor):
            # out of sight of whoever counts the memory of the device
            with torch.no_grad(), _disable_current_modes():
                self._host = tensor.clone() if _same(tensor) else tensor.to("cpu")
            return
        self._host = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, pin_memory=True
        )
        line.wait_for(tensor, _copied(self._host, tensor, self._device))

    def fetch(self) -> torch.Tensor:
        """The value on its device again, for the stream that is current there."""
        if not _overlaps(self._host, self._device):
            made = self._host.clone() if _same(self._host) else self._host.to(self._device)
            return made.requires_grad_(self._marked)
        made, done = self._ahead or self._start()
        self._ahead = None
        torch.cuda.current_stream(self._device).wait_event(done)
        before = self._before()
        if before is not None and before._ahead is None:
            before._ahead = before._start()
        return made.requires_grad_(self._marked)

    def _start(self) -> tuple[torch.Tensor, torch.cuda.Event]:
        host = self._host
        made = torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=self._device)
        return made, _copied(made, host, self._device)

    def forget_ahead(self) -> None:
        """Let go of what was fetched ahead and not asked for."""
        if self._ahead is not None:
            self._ahead[1].synchronize()  # its memory may be written until then
            self._ahead = None

    def __del__(self) -> None:
        self.forget_ahead()


def fetched(kept: HostCopy | torch.Tensor) -> torch.Tensor:
    """The value of a copy; a tensor that was kept in its place as it is."""
    return kept.fetch() if isinstance(kept, HostCopy) else kept


class Line:
    """The copies of one forward, in order.

    Attributes:
        last: the one that was sent last.
    """

    def __init__(self) -> None:
        self.last: Any = _nothing
        self._waiting: collections.deque[tuple[torch.Tensor, torch.cuda.Event]]
        self._waiting = collections.deque()

    def wait_for(self, tensor: torch.Tensor, done: torch.cuda.Event) -> None:
        """Keep a value until its copy is done."""
        self._waiting.append((tensor, done))
        self._release(STASH)

    def close(self) -> None:
        """Let go of every value that still waits."""
        self._release(0)

    def _release(self, most: int) -> None:
        while len(self._waiting) > most:
            tensor, done = self._waiting.popleft()
            # what takes over its memory on this stream comes after the copy
            torch.cuda.current_stream(tensor.device).wait_event(done)

    def forget_ahead(self) -> None:
        """Let go of what was fetched ahead and not asked for."""
        copy = self.last()
        while copy is not None:
            copy.forget_ahead()
            copy = copy._before()


def _nothing() -> None:
    """A dead reference."""


def may_leave(tensor: torch.Tensor) -> bool:
    """Whether a tensor has dense memory of its own, which a copy can stand for."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return expected * tensor.element_size() == tensor.untyped_storage().nbytes()


def _same(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


def _overlaps(tensor: torch.Tensor, device: torch.device | None = None) -> bool:
    """Whether copies run beside the computation."""
    device = device or tensor.device
    return device.type == "cuda" and not isinstance(tensor, FakeTensor)


def _copied(to: torch.Tensor, source: torch.Tensor, device: torch.device) -> torch.cuda.Event:
    """Copy on the side stream, behind what the current stream has been given so far."""
    stream = _STREAMS.get(device)
    if stream is None:
        stream = _STREAMS[device] = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.no_grad(), torch.cuda.stream(stream):
        to.copy_(source, non_blocking=True)
        return stream.record_event()
