"""Where the Python state that a forward read lives: cells that can be read again at every call."""

from __future__ import annotations

import contextvars
import datetime
import enum
import functools
import os
import sys
import threading
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from graphopt.capture.functions import functions_in, is_librarys, is_torchs, names_of
from graphopt.capture.impure import CLOCKS, impure
from graphopt.capture.reads import CONTAINERS, Reads, can_be_watched
from graphopt.capture.shadow import ATTACHED, SOURCE_OF

ABSENT = object()
_PLAIN: tuple[type, ...] = (bool, int, float, complex, str, bytes, type(None), enum.Enum)
_PLAIN = (*_PLAIN, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)
_STATE = ("_parameters", "_buffers")
_LARGEST_ARRAY = 1 << 24  # bytes of a numpy array whose content is compared at every call


class Cell(NamedTuple):
    """One value that is read again as `container[key]`.

    Attributes:
        container: an instance's `__dict__`, a class's, a function's globals, or an adapter.
        key: the name in it.
        value: what it held at the capture.
        label: as a user would name it: "Dropout.p of layers.0.drop".
    """

    container: Any
    key: str
    value: Any
    label: str


class Contents(NamedTuple):
    """The items of a list, dict or set (or the plain attributes of an object).

    Attributes:
        read: gives the items as one tuple.
        items: what it gave at the capture.
        label: as a user would name it.
    """

    read: Callable[[], tuple[Any, ...]]
    items: tuple[Any, ...]
    label: str


class Places:
    """What a capture read, as cells, contents and tensors.

    Attributes:
        cells: values that must stay.
        contents: containers whose items must stay.
        tensors: (instance `__dict__`, name, label) of tensors kept as plain attributes of modules.
        unshadowed: (instance `__dict__`, name, label) of names that must stay absent from it,
            because the class (or nobody) provides them.
        registers: (`_parameters` or `_buffers`, label) of modules whose names forward listed.
    """

    def __init__(self, root: nn.Module, reads: Reads, environ: dict[str, str | None]) -> None:
        self.cells: list[Cell] = []
        self.contents: list[Contents] = []
        self.tensors: list[tuple[dict[str, Any], str, str]] = []
        self.unshadowed: list[tuple[dict[str, Any], str, str]] = []
        self.registers: list[tuple[dict[str, Any], str]] = []
        self._paths = {id(m.__dict__.get(SOURCE_OF, m)): p for p, m in root.named_modules()}
        self._known: set[tuple[int, str]] = set()
        self._functions: set[int] = set()
        for (_, name), owner in reads.seen.items():
            self._attribute(owner, name)
        self._attribute(root, "forward")
        for name, value in environ.items():
            self._cell(_Environment(), name, value, f"os.environ[{name!r}]", id(os.environ))

    # ---- attributes

    def _attribute(self, owner: Any, name: str) -> None:
        label = self._label(owner, name)
        own = owner.__dict__ if hasattr(owner, "__dict__") else None
        if own is not None and name in own:
            value = own[name]
            if name in _STATE:
                self.registers.append((own[name], label))
            elif id(owner) in self._paths and isinstance(value, torch.Tensor):  # read live
                self.tensors.append((own, name, label))
            elif name != "forward" or not getattr(value, ATTACHED, False):
                self._cell(own, name, value, label)
                self._content(value, label)
            elif value.previous is not None:  # our own, put there over another
                self._content(value.previous, label)
            else:
                self._of_class(owner, name, label)
            return
        if isinstance(owner, nn.Module):
            for kept in (owner._parameters, owner._buffers):
                if kept.get(name, ABSENT) is None or (
                    name in kept and id(owner) not in self._paths
                ):
                    self._cell(kept, name, kept[name], label)
            if any(name in d for d in (owner._parameters, owner._buffers, owner._modules)):
                return
        if own is not None:
            self.unshadowed.append((own, name, label))
        if self._of_class(owner, name, label) or isinstance(owner, nn.Module):
            return
        if (
            own is not None and getattr(owner, name, ABSENT) is not ABSENT
        ):  # computed from other attributes
            self._content_of(functools.partial(_plain_items, own), label)

    def _of_class(self, owner: Any, name: str, label: str) -> bool:
        """Cells of the classes that define an attribute; False where none does."""
        found = False
        for kind in type(owner).__mro__:
            if name not in kind.__dict__ or kind in (nn.Module, object):
                continue
            found = True
            value = kind.__dict__[name]
            if isinstance(value, types.MemberDescriptorType):  # a slot
                now = getattr(owner, name, ABSENT)
                self._cell(_Attribute(owner), name, now, label, id(owner))
                self._content(now, label)
                return True
            if is_torchs(kind.__module__) and name != "forward" and not isinstance(value, _PLAIN):
                continue
            self._cell(kind.__dict__, name, value, f"{kind.__name__}.{name}", id(kind))
            self._content(value, f"{kind.__name__}.{name}")
            for function in functions_in(value):
                self._function(function, 0)
                if not is_librarys(kind.__module__):  # type(self).name
                    names = set(names_of(function.__code__))
                    self._members(kind.__dict__, names, kind.__name__, id(kind), 4)
        return found

    def _label(self, owner: Any, name: str) -> str:
        path = self._paths.get(id(owner))
        return f"{type(owner).__name__}.{name}" + (f" of {path}" if path else "")

    def _cell(
        self, container: Any, key: str, value: Any, label: str, owner: int | None = None
    ) -> None:
        """Note a cell once; `owner` identifies a container that is a new object at every look."""
        mark = (id(container) if owner is None else owner, key)
        if mark not in self._known:
            self._known.add(mark)
            self.cells.append(Cell(container, key, value, label))

    def _content(self, value: Any, label: str, depth: int = 0) -> None:
        if isinstance(value, type):
            self._class_data(value)
        elif isinstance(value, CONTAINERS):
            if depth > 3 or (id(value), "") in self._known:
                return
            self._known.add((id(value), ""))
            if not isinstance(value, (tuple, frozenset)):
                self._content_of(functools.partial(_items, value), label)
            for item in value.values() if isinstance(value, dict) else value:
                self._content(item, label, depth + 1)
        elif _is_array(value):
            if value.nbytes > _LARGEST_ARRAY and value.flags.writeable:
                raise impure(
                    f"a numpy array of {value.nbytes >> 20} MiB ({label}) in forward", None
                )
            self._content_of(functools.partial(_array_items, value), label)
        elif isinstance(value, types.FunctionType):
            self._function(value, 0)
        elif isinstance(value, functools.partial):
            for part in (value.func, value.args, value.keywords):
                self._content(part, label, depth + 1)
        elif _is_opaque(value) and depth <= 3 and (id(value), "") not in self._known:
            self._known.add((id(value), ""))
            self._content_of(functools.partial(_items, value.__dict__), label)
            for item in list(value.__dict__.values()):
                self._content(item, label, depth + 1)

    def _content_of(self, read: Callable[[], tuple[Any, ...]], label: str) -> None:
        self.contents.append(Contents(read, read(), label))

    def _class_data(self, kind: type) -> None:
        """Plain attributes of a class that stands as a value (a class used as a config)."""
        if is_torchs(kind.__module__) or kind.__module__ == "builtins":
            return
        for name, value in list(kind.__dict__.items()):
            if not name.startswith("__") and isinstance(value, _PLAIN):
                self._cell(kind.__dict__, name, value, f"{kind.__name__}.{name}", id(kind))

    # ---- what a function takes from outside

    def _function(self, function: types.FunctionType, depth: int) -> None:
        """Cells for the globals and closure that a function's code names, its helpers' too."""
        if id(function) in self._functions or is_librarys(function.__module__):
            return
        self._functions.add(id(function))
        names = set(names_of(function.__code__))
        scope = function.__globals__
        at = f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}"
        for name in sorted(names & scope.keys()):
            _refuse_clock(scope[name], names, f"{at} in {function.__qualname__}")
            label = f"{scope.get('__name__')}.{name}"
            self._outer(scope, name, names, label, depth)
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            label = f"{name} in {function.__qualname__}"
            self._outer(_Closure(cell), name, names, label, depth)
        for name in ("__defaults__", "__kwdefaults__"):
            if (value := getattr(function, name)) is not None:
                label = f"{name} of {function.__qualname__}"
                self._cell(_Attribute(function), name, value, label, id(function))
                self._content(value, label)
        self._members(function.__dict__, names, function.__qualname__, id(function.__dict__), depth)

    def _outer(self, scope: Any, name: str, names: set[str], label: str, depth: int) -> None:
        """Cells for one variable outside a function, and for what its code may read off it."""
        value = scope[name]
        owner = id(scope.owner) if isinstance(scope, _Closure) else id(scope)
        if isinstance(value, contextvars.ContextVar):
            value = value.get(ABSENT)
            self._cell(_Variable(scope[name]), name, value, label, id(scope[name]))
        elif isinstance(value, threading.local):
            for inner in sorted(names & value.__dict__.keys()):
                now = value.__dict__[inner]
                self._cell(_Attribute(value), inner, now, f"{label}.{inner}", id(value))
        elif isinstance(value, (*_PLAIN, *CONTAINERS, torch.Tensor)):
            if not isinstance(value, CONTAINERS) or _all_plain(value):
                self._cell(scope, name, value, label, owner)
                self._content(value, label)
        elif isinstance(value, (types.FunctionType, type, types.ModuleType)):
            self._code(scope, name, names, label, owner, depth)
        elif isinstance(value, nn.Module) or can_be_watched(value):
            self._cell(scope, name, value, label, owner)  # what is read off it was noted
        elif _is_array(value) or _is_opaque(value):
            self._cell(scope, name, value, label, owner)
            self._content(value, label)

    def _code(
        self, scope: Any, name: str, names: set[str], label: str, owner: int, depth: int
    ) -> None:
        """Cells for a function, a class or a module that a function names, and what it names."""
        value = scope[name]
        if isinstance(value, types.FunctionType):
            if not is_librarys(value.__module__):
                self._cell(scope, name, value, label, owner)
                if depth < 4:
                    self._function(value, depth + 1)
        elif isinstance(value, type):
            for kind in value.__mro__:
                if not is_librarys(kind.__module__):
                    self._members(kind.__dict__, names, kind.__name__, id(kind), depth)
        elif not is_librarys(value.__name__):
            self._members(vars(value), names, value.__name__, id(value), depth)

    def _members(self, scope: Any, names: set[str], label: str, owner: int, depth: int) -> None:
        """Cells for what a class, a module or a function holds under names that a code has."""
        mark = (owner, "*" + ",".join(sorted(names)))
        if mark in self._known or depth > 4:
            return
        self._known.add(mark)
        for name in sorted(names & scope.keys()):
            value = scope[name]
            if name.startswith("__"):
                continue
            if isinstance(value, _PLAIN) or (isinstance(value, CONTAINERS) and _all_plain(value)):
                self._cell(scope, name, value, f"{label}.{name}", owner)
                self._content(value, f"{label}.{name}")
            elif isinstance(value, (types.FunctionType, type, types.ModuleType)):
                self._code(scope, name, names, f"{label}.{name}", owner, depth + 1)
            elif any(True for _ in functions_in(value)):
                for function in functions_in(value):
                    self._function(function, depth + 1)
            elif not isinstance(value, CONTAINERS):
                self._outer(scope, name, names, f"{label}.{name}", depth + 1)


class _Variable:
    """A context variable, read like an item."""

    def __init__(self, owner: contextvars.ContextVar[Any]) -> None:
        self.owner = owner

    def __getitem__(self, name: str) -> Any:
        return self.owner.get(ABSENT)


class _Environment:
    """The environment, read like a dict; None where a variable is not set."""

    def __getitem__(self, name: str) -> Any:
        return os.environ.get(name)


class _Attribute:
    """An attribute of an object without a `__dict__`, read like an item."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner

    def __getitem__(self, name: str) -> Any:
        return getattr(self.owner, name, ABSENT)


class _Closure:
    """A variable of an enclosing function, read like an item."""

    def __init__(self, owner: types.CellType) -> None:
        self.owner = owner

    def __getitem__(self, name: str) -> Any:
        try:
            return self.owner.cell_contents
        except ValueError:  # not yet assigned
            return ABSENT


def same(a: Any, b: Any) -> bool:
    """Whether two plain values are one for a graph: equal and of one type, zeros of one sign.

    Example:
        >>> same(1, 1.0), same(0.5, 0.5), same((1, "a"), (1, "a"))
        (False, True, True)
    """
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        return a == b and str(a) == str(b)
    if isinstance(a, types.MethodType):
        return a.__self__ is b.__self__ and a.__func__ is b.__func__
    return isinstance(a, _PLAIN) and bool(a == b)


def _refuse_clock(value: Any, names: set[str], at: str) -> None:
    """Refuse a function that names a clock in a way in which its calls cannot be seen.

    Raises:
        CaptureError: names the clock and the function.
    """
    if isinstance(value, types.BuiltinFunctionType):
        if any(value is getattr(owner, name) for owner, name in CLOCKS):
            raise impure(f"{value.__module__}.{value.__name__} in forward", at)
    elif any(value is v for v in (datetime, datetime.datetime, datetime.date)):
        read = sorted(names & {"now", "utcnow", "today"})
        if read:
            raise impure(f"datetime.{read[0]} in forward", at)


def _items(container: Any) -> tuple[Any, ...]:
    if isinstance(container, dict):
        return (*container, *container.values())
    return tuple(container)


def _plain_items(attributes: dict[str, Any]) -> tuple[Any, ...]:
    return tuple([v for v in attributes.values() if isinstance(v, _PLAIN)])


def _array_items(array: Any) -> tuple[Any, ...]:
    return (str(array.dtype), array.shape, array.tobytes())


def _is_opaque(value: Any) -> bool:
    """Whether an object has attributes whose reads cannot be noted (a SimpleNamespace)."""
    if callable(value) or isinstance(value, torch.Tensor) or can_be_watched(value):
        return False
    return isinstance(getattr(value, "__dict__", None), dict)


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _all_plain(container: Any) -> bool:
    return all(
        isinstance(v, _PLAIN) or (isinstance(v, CONTAINERS) and _all_plain(v))
        for v in _items(container)
    )
