"""Dropped values of one forward: what autograd holds in their place, and how they come back.

A `Handle` is what autograd keeps of a saved tensor. Where the tensor belongs to a `Value` that is
dropped, the handle gives it up for a promise; the first handle that is unpacked has the value, and
those that it reads, computed again. A `Run` is what the values of one forward share.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from graphopt.errors import GraphOptError
from graphopt.graph.calls import Recipe
from graphopt.kernels._overwrite import lend, offer
from graphopt.offload import HostCopy, Line

_DEVICES = ("cpu", "cuda")  # with an autocast of their own


class ModifiedError(GraphOptError, RuntimeError):
    """A tensor that backward needs was written in place after forward.

    A `RuntimeError` too, as autograd's own.
    """


# -------------------------------------------------------------------------------------- forward


class Layout(NamedTuple):
    """How a tensor lies in its storage."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    offset: Any

    @staticmethod
    def of(tensor: torch.Tensor) -> Layout:
        """That of a tensor."""
        return Layout(tensor.shape, tensor.stride(), tensor.dtype, tensor.storage_offset())


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without its past, marked as it is, see `Recipe.function`."""
    found = tensor.detach()
    return found.requires_grad_() if tensor.requires_grad else found


class Handle:
    """What autograd keeps of one saved tensor: the tensor, or a dropped value and a place in it."""

    __slots__ = ("__weakref__", "_layout", "_output", "_tensor", "_value", "_version", "spent")

    def __init__(self, tensor: torch.Tensor) -> None:
        # detached: a saved output would keep its own node, and so itself, alive for ever
        self._tensor: torch.Tensor | None = tensor.detach()
        try:
            self._version: int | None = tensor._version
        except RuntimeError:  # as in `_version`, which costs a call
            self._version = None
        self._value: Value | None = None
        self.spent = False  # whether backward may have the tensor for good

    def promise(self, value: Value, output: int) -> None:
        """Give up the tensor for a value that can be computed again."""
        tensor = self._tensor
        assert tensor is not None
        was = value.layouts[output]
        if tensor.dtype != was.dtype or tensor.is_conj() or tensor.is_neg():
            return  # a view as another dtype: no strides of the value give it back
        if self._version is not None and tensor._version != self._version:
            return  # it was written since: unpacking says so
        layout = Layout.of(tensor)
        self._layout, self._output = was if layout == was else layout, output
        self._value, self._tensor = value, None
        value.handles[id(self)] = weakref.ref(self)

    def unpack(self) -> torch.Tensor:
        """The tensor, computed again where it was dropped."""
        value = self._value
        if value is None:
            tensor = self._tensor
            if tensor is None:
                raise ModifiedError(
                    "a tensor that was saved for backward is gone",
                    why="backward has written its gradient over it, for it was to be the last",
                    try_="look at it before its node has run, or backward(retain_graph=True)",
                )
            if self._version is not None and tensor._version != self._version:
                raise _modified(tensor, self._version)
            if self.spent:
                offer(tensor, self)
            return tensor
        return value.take(id(self), self._output, self._layout)

    def give(self) -> None:
        """Let go of the tensor: a gradient is written over it."""
        self._tensor = None

    def take_back(self, tensor: torch.Tensor) -> None:
        """It is not."""
        self._tensor = tensor

    def __del__(self) -> None:
        if self._value is not None:
            self._value.had(id(self))


def _version(tensor: torch.Tensor) -> int | None:
    """How often a tensor was written; None for one of inference, which counts no writes."""
    try:
        return tensor._version
    except RuntimeError:
        return None


def _modified(tensor: torch.Tensor, version: int) -> ModifiedError:
    return ModifiedError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: a tensor of shape {list(tensor.shape)}, at version {tensor._version} "
        f"where {version} is expected",
        why="backward needs its value of the forward, also to compute dropped values again",
        try_="write it after backward, or write a copy",
    )


# ------------------------------------------------------------------------------------- backward


class Run:
    """What the values of one forward share: a lock, the ambient modes, and what is cached."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # the backward passes of several devices run side by side
        self.cached: list[weakref.ref[Value]] = []
        self._tasks: set[int] = set()
        self._autocast = _autocast_now()
        self._plain = not torch._C._is_any_autocast_enabled()
        self.line = Line()

    def as_in_forward(self) -> contextlib.AbstractContextManager[Any]:
        """Without recording, under the autocast of the forward."""
        if not torch.is_grad_enabled():
            if self._plain and not torch._C._is_any_autocast_enabled():
                return _NOTHING  # as it mostly is
            if self._autocast == _autocast_now():
                return _NOTHING
        return _switched(self._autocast, _autocast_now())

    def keeps(self) -> bool:
        """Whether values may be kept: in a backward pass, whose end lets go of those left."""
        task = torch._C._current_graph_task_id()
        if task == -1:
            return False
        if task not in self._tasks:
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(functools.partial(self._end, task))
            self._tasks.add(task)
        return True

    def _end(self, task: int) -> None:
        self._tasks.discard(task)
        self.line.forget_ahead()
        cached, self.cached = self.cached, []
        for found in cached:
            value = found()
            if value is not None:
                value.forget()


def _autocast_now() -> tuple[bool, ...]:
    return tuple([torch.is_autocast_enabled(d) for d in _DEVICES])


_NOTHING = contextlib.nullcontext()


@contextlib.contextmanager
def _switched(to: tuple[bool, ...], back: tuple[bool, ...]) -> Iterator[None]:
    def switch(flags: tuple[bool, ...]) -> None:
        for device, flag in zip(_DEVICES, flags, strict=True):
            torch.set_autocast_enabled(device, flag)

    switch(to)
    try:
        with torch.no_grad():
            yield
    finally:
        switch(back)


class Value:
    """One dropped value of one forward."""

    __slots__ = (
        "__weakref__", "_cache", "_held", "_pending", "_readers", "_reads", "_run", "_versions",
        "handles", "layouts", "recipe", "spent", "wakes",
    )  # fmt: skip

    def __init__(self, run: Run) -> None:
        self._run = run
        self.recipe: Recipe | None = None
        self.layouts: dict[int, Layout] = {}
        self.handles: dict[int, weakref.ref[Handle]] = {}
        self.wakes: list[weakref.ref[HostCopy]] = []
        self.spent: set[int] = set()  # outputs that backward may write over
        self._held: list[Any] = []
        self._versions: list[tuple[torch.Tensor, int]] = []
        self._reads: list[Value] = []
        self._readers: list[weakref.ref[Value]] = []
        self._cache: Any = None
        self._pending: set[int] = set()

    def hold(self, recipe: Recipe, held: Sequence[Any], reads: list[Value]) -> None:
        """Take the recipe and what it reads."""
        self.recipe = recipe
        for item in held:
            if isinstance(item, torch.Tensor):
                item = _detached(item)
                version = _version(item)
                if version is not None:
                    self._versions.append((item, version))
            self._held.append(item)
        self._reads = reads
        for value in reads:
            value._readers.append(weakref.ref(self))

    def take(self, reader: int, output: int, layout: Layout) -> torch.Tensor:
        """A part of the value for one of its handles; lent to its last reader to write over."""
        base = self._part(reader, output, layout)
        if output in self.spent and self._cache is None and layout == self.layouts[output]:
            lend(base)
        return base

    def _part(self, reader: int, output: int, layout: Layout) -> torch.Tensor:
        run = self._run
        with run.lock, run.as_in_forward():
            made = self._cache
            if made is None:
                made = self._made()
            base: torch.Tensor = made[output] if isinstance(made, (list, tuple)) else made
            was = self.layouts[output]
            if layout is not was:
                offset = layout.offset + base.storage_offset() - was.offset
                base = base.as_strided(layout.shape, layout.strides, offset)
            self.had(reader)
            return base

    def _made(self) -> Any:
        """The value; computes those that it reads first, each of them once."""
        have: dict[Value, Any] = {}
        order = self._order(have)
        uses: dict[Value, int] = dict.fromkeys([*order, *have], 0)
        for value in order:
            for source in value._reads:
                uses[source] += 1
        for value in order:
            have[value] = value._compute(have)
            for source in value._reads:
                uses[source] -= 1
                if not uses[source]:
                    del have[source]
        return have[self]

    def _order(self, have: dict[Value, Any]) -> list[Value]:
        """What must be computed, in order; fills `have` with what is there."""
        order, seen = [], set()
        waiting = [(self, False)]
        while waiting:
            value, ready = waiting.pop()
            if ready:
                order.append(value)
            elif value not in seen:
                seen.add(value)
                kept = value._cache
                if kept is not None:
                    have[value] = kept
                    continue
                waiting.append((value, True))
                waiting.extend((source, False) for source in reversed(value._reads))
        return order

    def _compute(self, have: Mapping[Value, Any]) -> Any:
        assert self.recipe is not None
        for tensor, version in self._versions:
            if tensor._version != version:
                raise _modified(tensor, version)
        for found in self.wakes:
            copy = found()
            if copy is not None:
                copy.fetch_ahead()
        made = self.recipe.function(self._held, [have[v] for v in self._reads])
        self._check_layouts(made)
        if self._run.keeps():
            readers = [v for r in self._readers if (v := r()) is not None and v._cache is None]
            self._pending = {i for i, h in self.handles.items() if h() is not None}
            self._pending.update(map(id, readers))
            self._cache = made
            self._run.cached.append(weakref.ref(self))
        for source in self._reads:
            source.had(id(self))
        return made

    def _check_layouts(self, made: Any) -> None:
        for output, was in self.layouts.items():
            tensor = made[output] if isinstance(made, (list, tuple)) else made
            if (tensor.shape, tensor.stride(), tensor.dtype) != was[:3]:
                raise GraphOptError(
                    f"the dropped value {self.recipe and self.recipe.name} came out otherwise",
                    why=f"{list(was.shape)} {was.dtype} with strides {was.strides} in forward, "
                    f"{list(tensor.shape)} {tensor.dtype} with {tensor.stride()} in backward",
                    try_="leave it out of what is recomputed, and report it",
                )

    def had(self, reader: int) -> None:
        """Note that a handle or another value needs it no more, for now."""
        self._pending.discard(reader)
        if not self._pending:
            self.forget()

    def forget(self) -> None:
        """Let go of the computed value."""
        self._cache = None

    def __del__(self) -> None:
        for source in self._reads:
            source.had(id(self))
