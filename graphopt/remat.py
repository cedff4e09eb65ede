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
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from graphopt.dropped import Handle, Layout, ModifiedError, Run, Value
from graphopt.graph.calls import Recipe
from graphopt.graph.hooks import hooked
from graphopt.offload import HostCopy, may_leave

__all__ = [
    "ModifiedError",
    "drop",
    "dropping",
    "is_marker",
    "is_release",
    "is_spend",
    "release",
    "scope",
    "spend",
]


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
    if not found or not torch.is_grad_enabled() or hooked():
        return contextlib.nullcontext()
    return _opened(found)


def dropping(function: Callable[..., Any], found: Mapping[str, Recipe]) -> Callable[..., Any]:
    """A function whose markers take effect: it runs inside a `scope`."""

    def run(*args: Any) -> Any:
        with scope(found):
            return function(*args)

    return run


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
        self._handles: dict[int, list[weakref.ref[Handle]]] = {}
        self._values: dict[str, Value] = {}
        self._run = Run()

    def pack(self, tensor: torch.Tensor) -> Handle:
        """What autograd keeps in a tensor's place."""
        handle = Handle(tensor)
        place = _storage_of(tensor)
        if place is not None:
            # weakly: what autograd lets go of meanwhile is not kept alive by this table
            known = self._handles.get(place)
            if known is None:
                self._handles[place] = [weakref.ref(handle)]
            else:
                known.append(weakref.ref(handle))
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
            known.layouts[i] = Layout.of(tensor)
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

    def _value(self, name: str) -> Value:
        if name not in self._values:
            self._values[name] = Value(self._run)
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


def _unpack(handle: Handle) -> torch.Tensor:
    return handle.unpack()
