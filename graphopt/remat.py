"""Rematerialization at run time: values that autograd saved are dropped and computed again.

A graph holds a marker `drop(value, name, held)` behind the last use of each value that is not to
live until the backward pass. While a `scope` is open, hooks on saved tensors hand autograd handles
in place of tensors; the marker turns those of its value into promises to compute it again, by the
op that made it (a `Recipe`), from tensors that the marker holds and from other dropped values. In
backward the first handle that is unpacked runs the recipes it needs under `no_grad`, each once: a
value is kept until its last pending handle, and the last recipe that reads it, had it.

Without an open scope a marker does nothing: under `no_grad`, in an interpreter, in printed code.

What autograd promises still holds: a tensor that was written in place between forward and backward
raises, `retain_graph` and double backward work, nothing outlives the autograd graph.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from graphopt.errors import GraphOptError
from graphopt.graph.calls import Recipe, evaluate
from graphopt.kernels._overwrite import lend, offer
from graphopt.offload import HostCopy, Line, may_leave

_DEVICES = ("cpu", "cuda")  # with an autocast of their own


class ModifiedError(GraphOptError, RuntimeError):
    """A tensor that backward needs was written in place after forward.

    A `RuntimeError` too, as autograd's own.
    """


# -------------------------------------------------------------------------------------- forward


class _Local(threading.local):
    scope: _Scope | None = None


_LOCAL = _Local()


@fx.node.has_side_effect
def drop(
    value: Any,
    name: str,
    held: Sequence[Any] = (),
    output: int | None = None,
    host: bool = False,
    ahead: str | None = None,
    overwrite: bool = False,
) -> None:
    """Let go of what autograd saved of a value; backward computes it again.

    Args:
        value: the value behind its last use: a tensor, or all the tensors of a list.
        name: the name of its recipe.
        held: what the recipe reads, tensors and numbers; one marker of each value gives it.
        output: which of its op's tensors it is; None where it is all there are.
        host: keep a copy in host memory, from which backward takes it, in place of a recipe.
        ahead: for a copy in host memory the name of the recipe in whose turn, in backward, it
            begins to come back; None for when it is asked for.
        overwrite: computed again, its memory may take its gradient (`graphopt.kernels._overwrite`).
    """
    scope = _LOCAL.scope
    if scope is None:
        return
    if host:
        held = [scope.sent(value, name, ahead)]
        overwrite = overwrite and isinstance(held[0], HostCopy)
    scope.drop(value, name, held, output, overwrite)


@fx.node.has_side_effect
def release(name: str) -> None:
    """Let the device go of a value that was sent to host memory: wait for its copy.

    Args:
        name: the name of its recipe.
    """
    scope = _LOCAL.scope
    if scope is not None:
        scope.release(name)


@fx.node.has_side_effect
def spend(value: torch.Tensor) -> None:
    """Let a gradient be written over what autograd keeps of a value, where nobody else reads it."""
    scope = _LOCAL.scope
    if scope is not None:
        scope.spend(value)


def is_marker(node: fx.Node) -> bool:
    """Whether a node marks where a value is dropped, its copy is done, or it may be spent."""
    return node.op == "call_function" and node.target in (drop, release, spend)


def is_spend(node: fx.Node) -> bool:
    """Whether a node marks a value over which a gradient may be written."""
    return node.op == "call_function" and node.target is spend


def is_release(node: fx.Node) -> bool:
    """Whether a node marks where a value's copy to host memory is done."""
    return node.op == "call_function" and node.target is release


def scope(found: Mapping[str, Recipe]) -> contextlib.AbstractContextManager[Any]:
    """Around the forward of a graph: its markers take effect.

    They do not where nothing is recorded, nor where the caller has hooks on saved tensors of his
    own (`save_on_cpu`, `torch.utils.checkpoint` around the module): then his have all tensors.

    Args:
        found: what `recipes` gave for the graph.

    Example:
        >>> from graphopt.graph.calls import Call, Held
        >>> x = torch.ones(2, requires_grad=True)
        >>> with scope({"y": Recipe("y", Call(torch.exp, (Held(0),)), ())}):
        ...     y = torch.exp(x)
        ...     z = torch.sin(y).sum()
        ...     drop(y, "y", [x])
        >>> del y
        >>> z.backward()  # computes y again
        >>> torch.equal(x.grad, x.exp() * x.exp().cos())
        True
    """
    if not found or not torch.is_grad_enabled() or _hooked():
        return contextlib.nullcontext()
    return _opened(found)


def dropping(function: Callable[..., Any], found: Mapping[str, Recipe]) -> Callable[..., Any]:
    """A function whose markers take effect: it runs inside a `scope`."""

    def run(*args: Any) -> Any:
        with scope(found):
            return function(*args)

    return run


def _hooked() -> bool:
    """Whether hooks on saved tensors are in force, or forbidden."""
    autograd: Any = torch._C._autograd
    if not autograd._saved_tensors_hooks_is_enabled():
        return True
    return autograd._top_saved_tensors_default_hooks(True) is not None


@contextlib.contextmanager
def _opened(found: Mapping[str, Recipe]) -> Iterator[None]:
    opened, outer = _Scope(found), _LOCAL.scope
    _LOCAL.scope = opened
    try:
        with torch.autograd.graph.saved_tensors_hooks(opened.pack, _unpack):
            yield
    finally:
        _LOCAL.scope = outer
        opened.close()


class _Scope:
    """One forward: the handles that autograd got, by storage, and the values dropped so far.

    It lives as long as the autograd graph (which keeps its hooks); once closed, it holds nothing.
    """

    def __init__(self, found: Mapping[str, Recipe]) -> None:
        self._recipes = found
        self._handles: dict[int, list[weakref.ref[_Handle]]] = {}
        self._values: dict[str, _Value] = {}
        self._run = _Run()

    def pack(self, tensor: torch.Tensor) -> _Handle:
        """What autograd keeps in a tensor's place."""
        handle = _Handle(tensor)
        place = _storage_of(tensor)
        if place is not None:
            # weakly: what autograd lets go of meanwhile is not kept alive by this table
            self._handles.setdefault(place, []).append(weakref.ref(handle))
        return handle

    def drop(
        self,
        value: Any,
        name: str,
        held: Sequence[Any],
        output: int | None,
        overwrite: bool = False,
    ) -> None:
        """Turn the handles of a value's storages into promises."""
        recipe = self._recipes.get(name)
        if recipe is None:
            return
        known = self._value(name)
        if known.recipe is None:
            known.hold(recipe, held, [self._value(n) for n in recipe.reads])
        if overwrite:
            known.spent.add(output or 0)
        tensors = value if isinstance(value, (list, tuple)) else (value,)
        for i, tensor in enumerate(tensors, output or 0):
            known.layouts[i] = _Layout.of(tensor)
            place = _storage_of(tensor)
            for found in self._handles.pop(place, ()) if place is not None else ():
                handle = found()
                if handle is not None:
                    handle.promise(known, i)

    def sent(self, value: torch.Tensor, name: str, ahead: str | None) -> HostCopy | torch.Tensor:
        """A copy of a value in host memory; the value where no copy can stand for it."""
        if not may_leave(value):
            return value
        copy = self._run.line.send(name, value)
        if ahead is not None:
            self._value(ahead).wakes.append(weakref.ref(copy))
        return copy

    def spend(self, tensor: torch.Tensor) -> None:
        """Mark the handles of a value: backward may have what they hold."""
        place = _storage_of(tensor)
        for found in self._handles.get(place, ()) if place is not None else ():
            handle = found()
            if handle is not None:
                handle.spent = True

    def release(self, name: str) -> None:
        """Let the device go of a value that was sent."""
        self._run.line.release(name)

    def _value(self, name: str) -> _Value:
        if name not in self._values:
            self._values[name] = _Value(self._run)
        return self._values[name]

    def close(self) -> None:
        """Forget; autograd's handles keep what backward needs."""
        self._run.line.close()
        self._handles.clear()
        self._values.clear()


def _storage_of(tensor: torch.Tensor) -> int | None:
    """An identity of a tensor's memory while it lives; None where it has none to share."""
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # sparse tensors, wrappers
        return None


class _Layout(NamedTuple):
    """How a tensor lies in its storage."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    offset: Any

    @staticmethod
    def of(tensor: torch.Tensor) -> _Layout:
        return _Layout(tensor.shape, tensor.stride(), tensor.dtype, tensor.storage_offset())


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without its past, marked as it is, see `evaluate`."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


class _Handle:
    """What autograd keeps of one saved tensor: the tensor, or a dropped value and a place in it."""

    __slots__ = ("__weakref__", "_layout", "_output", "_tensor", "_value", "_version", "spent")

    def __init__(self, tensor: torch.Tensor) -> None:
        # detached: a saved output would keep its own node, and so itself, alive for ever
        self._tensor: torch.Tensor | None = tensor.detach()
        self._version = _version(tensor)
        self._value: _Value | None = None
        self.spent = False  # whether backward may have the tensor for good

    def promise(self, value: _Value, output: int) -> None:
        """Give up the tensor for a value that can be computed again."""
        tensor = self._tensor
        assert tensor is not None
        layout = _Layout.of(tensor)
        plain = not (tensor.is_conj() or tensor.is_neg())
        if layout.dtype != value.layouts[output].dtype or not plain:
            return  # a view as another dtype: no strides of the value give it back
        if _version(tensor) != self._version:
            return  # it was written since: unpacking says so
        self._layout, self._output = layout, output
        self._value, self._tensor = value, None
        value.handles[id(self)] = weakref.ref(self)

    def unpack(self) -> torch.Tensor:
        """The tensor, computed again where it was dropped."""
        value = self._value
        if value is None:
            if self._tensor is None:
                raise ModifiedError(
                    "a tensor that was saved for backward is gone",
                    why="backward has written its gradient over it, for it was to be the last",
                    try_="look at it before its node has run, or backward(retain_graph=True)",
                )
            _check_version(self._tensor, self._version)
            if self.spent:
                offer(self._tensor, self)
            return self._tensor
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


def _unpack(handle: _Handle) -> torch.Tensor:
    return handle.unpack()


def _version(tensor: torch.Tensor) -> int:
    try:
        return tensor._version
    except RuntimeError:  # inference tensors count no writes
        return 0


def _check_version(tensor: torch.Tensor, version: int) -> None:
    if _version(tensor) != version:
        raise ModifiedError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: a tensor of shape {list(tensor.shape)}, at version {tensor._version} "
            f"where {version} is expected",
            why="backward needs its value of the forward, also to compute dropped values again",
            try_="write it after backward, or write a copy",
        )


# ------------------------------------------------------------------------------------- backward


class _Run:
    """What the values of one forward share: a lock, the ambient modes, and what is cached."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # the backward passes of several devices run side by side
        self.cached: list[weakref.ref[_Value]] = []
        self._tasks: set[int] = set()
        self._autocast = tuple([torch.is_autocast_enabled(d) for d in _DEVICES])
        self.line = Line()

    def as_in_forward(self) -> contextlib.AbstractContextManager[Any]:
        """Without recording, under the autocast of the forward."""
        now = tuple([torch.is_autocast_enabled(d) for d in _DEVICES])
        if now == self._autocast and not torch.is_grad_enabled():
            return _NOTHING  # as it mostly is
        return _switched(self._autocast, now)

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


class _Value:
    """One dropped value of one forward."""

    def __init__(self, run: _Run) -> None:
        self._run = run
        self.recipe: Recipe | None = None
        self.layouts: dict[int, _Layout] = {}
        self.handles: dict[int, weakref.ref[_Handle]] = {}
        self.wakes: list[weakref.ref[HostCopy]] = []
        self.spent: set[int] = set()  # outputs that backward may write over
        self._held: list[Any] = []
        self._versions: list[tuple[torch.Tensor, int]] = []
        self._reads: list[_Value] = []
        self._readers: list[weakref.ref[_Value]] = []
        self._cache: Any = None
        self._pending: set[int] = set()

    def hold(self, recipe: Recipe, held: Sequence[Any], reads: list[_Value]) -> None:
        """Take the recipe and what it reads."""
        self.recipe = recipe
        self._held = [_detached(t) if isinstance(t, torch.Tensor) else t for t in held]
        self._versions = [(t, _version(t)) for t in self._held if isinstance(t, torch.Tensor)]
        self._reads = reads
        for value in reads:
            value._readers.append(weakref.ref(self))

    def take(self, reader: int, output: int, layout: _Layout) -> torch.Tensor:
        """A part of the value for one of its handles; lent to its last reader to write over."""
        base = self._part(reader, output, layout)
        if self._cache is None and output in self.spent and layout == self.layouts[output]:
            lend(base)
        return base

    def _part(self, reader: int, output: int, layout: _Layout) -> torch.Tensor:
        run = self._run
        with run.lock, run.as_in_forward():
            made = self._cache
            if made is None:
                made = self._made()
            base = made[output] if isinstance(made, (list, tuple)) else made
            was, now = self.layouts[output], _Layout.of(base)
            if now[:3] != was[:3]:
                raise GraphOptError(
                    f"the dropped value {self.recipe and self.recipe.name} came out otherwise",
                    why=f"{list(was.shape)} {was.dtype} with strides {was.strides} in forward, "
                    f"{list(now.shape)} {now.dtype} with {now.strides} in backward",
                    try_="leave it out of what is recomputed, and report it",
                )
            if layout != was:
                offset = layout.offset + now.offset - was.offset
                base = base.as_strided(layout.shape, layout.strides, offset)
            self.had(reader)
            return base

    def _made(self) -> Any:
        """The value; computes those that it reads first, each of them once."""
        have: dict[_Value, Any] = {}
        order = self._order(have)
        uses: dict[_Value, int] = dict.fromkeys([*order, *have], 0)
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

    def _order(self, have: dict[_Value, Any]) -> list[_Value]:
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

    def _compute(self, have: Mapping[_Value, Any]) -> Any:
        assert self.recipe is not None
        for tensor, version in self._versions:
            _check_version(tensor, version)
        for found in self.wakes:
            copy = found()
            if copy is not None:
                copy.fetch_ahead()
        reads = {n: have[v] for n, v in zip(self.recipe.reads, self._reads, strict=True)}
        made = evaluate(self.recipe.call, self._held, reads)
        if self._run.keeps():
            readers = [v for r in self._readers if (v := r()) is not None and v._cache is None]
            self._pending = {i for i, h in self.handles.items() if h() is not None}
            self._pending.update(map(id, readers))
            self._cache = made
            self._run.cached.append(weakref.ref(self))
        for source in self._reads:
            source.had(id(self))
        return made

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
