"""Python state outside the tensors before a forward is traced, to see afterwards what it changed.

A graph holds no counters, caches or iterators: what a forward changes in them would neither be seen
nor made by later calls. Before a trace, whatever the forward can reach is copied one level deep:
containers and objects in the attributes of its modules, its classes, and the variables that its
functions take from outside. Afterwards the first difference is named and everything is set back.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import pickle
import re
import types
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from graphopt.capture.functions import functions_in, is_librarys, names_of
from graphopt.capture.reads import CONTAINERS, Reads, can_be_watched

_MOST = 100_000  # containers and objects looked at
_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device})
_SETTING = (bool, str, type(None))
_OF_MODULES = frozenset(nn.Module().__dict__)
_ABSENT = object()
_NEXT = object()
"""Stands for what an iterator gives next."""

Items = tuple[tuple[Any, Any], ...]
"""(key, value) of each item of a container, attribute of an object or variable."""


class _Held:
    """One place with its items: how to read them, and how to set them back."""

    def __init__(
        self, label: str, read: Callable[[], Items], restore: Callable[[Items], None] | None
    ) -> None:
        self.label = label
        self.read = read
        self.restore = restore
        self.then = read()


class Before:
    """What a forward can reach, as it was when this was made.

    Attributes:
        functions: the user's functions found.
        tensors: id -> tensor outside the modules.
    """

    def __init__(
        self, modules: dict[str, nn.Module], reads: Reads, forward: Callable[..., Any]
    ) -> None:
        """Look around.

        Args:
            modules: path -> module of the tree that the trace runs (a shadow).
            reads: told of the objects found outside of modules, so that it notes their reads.
            forward: of the root; it may be a function of the root's own.
        """
        self._reads = reads
        self._held: list[_Held] = []
        self._seen: set[int] = {id(m) for m in modules.values()}
        self._caches: list[tuple[Any, int]] = []
        self.functions: list[types.FunctionType] = []
        self.tensors: dict[int, torch.Tensor] = {}
        for path, module in modules.items():
            for name, value in list(module.__dict__.items()):
                if name not in _OF_MODULES:
                    self._walk(value, f"{path}.{name}" if path else name)
            self._class(type(module))
        self._walk(forward, "forward")

    def changed(self) -> tuple[str, Any, str] | None:
        """(label, new value, variable) of the first difference; whatever differs is set back."""
        for cache, misses in self._caches:
            if cache.cache_info().misses != misses:
                cache.cache_clear()  # its results may be values of the trace
        found = None
        for held in self._held:
            now = held.read()
            name, value = _difference(held.then, now)
            if name is _ABSENT:
                continue
            label = held.label + _suffix(name)
            found = found or (label, value, _variable_in(label))
            if held.restore is not None:
                held.restore(held.then)
        return found

    # ---- looking around

    def _variable(self, variable: contextvars.ContextVar[Any], label: str) -> None:
        def restore(items: Items) -> None:
            if items[0][1] is not _ABSENT:
                variable.set(items[0][1])

        self._hold(label, lambda: (("value", variable.get(_ABSENT)),), restore)

    def _hold(
        self, label: str, read: Callable[[], Items], restore: Callable[[Items], None] | None = None
    ) -> None:
        if len(self._held) < _MOST:
            self._held.append(_Held(label, read, restore))

    def _walk(self, value: Any, label: str) -> None:
        kind = type(value)
        if kind in _ATOMS or isinstance(value, types.ModuleType):
            return
        if isinstance(value, torch.Tensor):
            self.tensors[id(value)] = value
            return
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, CONTAINERS):
            self._container(value, label)
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, types.MethodType):
            self._walk(value.__self__, label)
            self._walk(value.__func__, label)
        elif isinstance(value, functools.partial):
            for part in (value.func, *value.args, *value.keywords.values()):
                self._walk(part, label)
        elif isinstance(value, weakref.ref):
            self._walk(value(), label)
        elif isinstance(value, contextvars.ContextVar):
            self._variable(value, label)
        elif hasattr(kind, "cache_info") and hasattr(kind, "cache_clear"):
            self._caches.append((value, value.cache_info().misses))
            self._walk(getattr(value, "__wrapped__", None), label)
        elif isinstance(value, nn.Module) or can_be_watched(value) or _has_attributes(value):
            self._object(value, label)
        elif hasattr(kind, "__next__"):
            self._hold(label, functools.partial(_position, value))

    def _container(self, value: Any, label: str) -> None:
        if isinstance(value, (tuple, frozenset)):
            for item in value:
                self._walk(item, label)
            return
        self._hold(label, functools.partial(_items, value), functools.partial(_refill, value))
        for key, item in _items(value):
            self._walk(item, f"{label}[{key!r}]" if isinstance(value, dict) else label)

    def _object(self, value: Any, label: str) -> None:
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            read = functools.partial(_attributes, attributes)
            self._hold(label, read, functools.partial(_reset, attributes))
            for name, item in list(attributes.items()):
                self._walk(item, f"{label}.{name}")
        slots = _slots_of(type(value))
        if slots:
            read = functools.partial(_slots, value, slots)
            self._hold(label, read, functools.partial(_reset_slots, value))
        self._class(type(value))

    def _class(self, kind: type) -> None:
        for base in kind.__mro__:
            if id(base) in self._seen or is_librarys(base.__module__):
                continue
            self._seen.add(id(base))
            read = functools.partial(_class_items, base)
            self._hold(base.__name__, read, functools.partial(_reset_class, base))
            for name, value in list(vars(base).items()):
                for function in functions_in(value):
                    self._walk(function, f"{base.__name__}.{name}")
                if not name.startswith("__") and not callable(value):
                    self._walk(value, f"{base.__name__}.{name}")

    def _function(self, function: types.FunctionType) -> None:
        if is_librarys(function.__module__):
            return
        self.functions.append(function)
        names = dict.fromkeys(names_of(function.__code__))
        scope = function.__globals__
        self._scope(scope, names, str(scope.get("__name__")))
        free = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        cells = tuple((n, c) for n, c in free)
        if cells:
            read = functools.partial(_cells, cells)
            self._hold(function.__qualname__, read, functools.partial(_reset_cells, dict(cells)))
        for name, value in _cells(cells):
            self._outer(value, f"{name} in {function.__qualname__}")
        self._walk(function.__defaults__ or (), f"a default of {function.__qualname__}")
        self._walk(function.__kwdefaults__ or (), f"a default of {function.__qualname__}")
        if function.__dict__:
            self._object_of_function(function)

    def _scope(
        self, scope: dict[str, Any], names: Iterable[str], where: str, depth: int = 0
    ) -> None:
        """Variables of a module that a function's code names, those of modules in it too."""
        used = tuple(n for n in names if n in scope and not _is_fixed(scope[n]))
        if used:
            read = functools.partial(_variables, scope, used)
            self._hold(where, read, functools.partial(_reset_variables, scope))
        for name in used:
            if not isinstance(scope[name], types.ModuleType):
                self._outer(scope[name], f"{where}.{name}")
            elif depth < 4:
                inner = vars(scope[name])
                self._scope(inner, names, scope[name].__name__, depth + 1)

    def _object_of_function(self, function: types.FunctionType) -> None:
        read = functools.partial(_attributes, function.__dict__)
        self._hold(function.__qualname__, read, functools.partial(_reset, function.__dict__))
        for name, value in list(function.__dict__.items()):
            self._outer(value, f"{function.__qualname__}.{name}")

    def _outer(self, value: Any, label: str) -> None:
        if not isinstance(value, (type, types.FunctionType)):
            self._reads.watch(value)
        self._walk(value, label)


# ---- items of each kind of place


def _items(value: Any) -> Items:
    if isinstance(value, dict):
        return tuple(value.items())
    if isinstance(value, (set, frozenset)):
        return tuple((v, None) for v in value)
    return tuple(enumerate(value))


def _refill(value: Any, items: Items) -> None:
    value.clear()
    if isinstance(value, dict):
        value.update(items)
    elif isinstance(value, set):
        value.update(k for k, _ in items)
    elif isinstance(value, (list, deque)):
        value.extend(v for _, v in items)


def _attributes(attributes: dict[str, Any]) -> Items:
    """Attributes of an object without its settings, which stay as eager would leave them."""
    return tuple((k, v) for k, v in attributes.items() if not isinstance(v, _SETTING))


def _reset(attributes: dict[str, Any], items: Items) -> None:
    then = dict(items)
    for name, _ in _attributes(attributes):
        if name not in then:
            del attributes[name]
    attributes.update(then)


def _slots_of(kind: type) -> tuple[str, ...]:
    given = [k.__dict__.get("__slots__", ()) for k in kind.__mro__]
    return tuple(n for names in given for n in ([names] if isinstance(names, str) else names))


def _slots(value: Any, names: tuple[str, ...]) -> Items:
    return tuple((n, getattr(value, n, _ABSENT)) for n in names if n != "__dict__")


def _reset_slots(value: Any, items: Items) -> None:
    for name, item in items:
        if item is not _ABSENT and getattr(value, name, _ABSENT) is not item:
            setattr(value, name, item)


def _class_items(kind: type) -> Items:
    return tuple((k, v) for k, v in vars(kind).items() if not k.startswith("__"))


def _reset_class(kind: type, items: Items) -> None:
    then = dict(items)
    for name, value in _class_items(kind):
        if name not in then:
            delattr(kind, name)
        elif value is not then[name]:
            setattr(kind, name, then[name])


def _variables(scope: dict[str, Any], names: tuple[str, ...]) -> Items:
    return tuple((n, scope.get(n, _ABSENT)) for n in names)


def _reset_variables(scope: dict[str, Any], items: Items) -> None:
    scope.update((k, v) for k, v in items if v is not _ABSENT)


def _cells(cells: tuple[tuple[str, types.CellType], ...]) -> Items:
    return tuple((name, _content(cell)) for name, cell in cells)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not yet assigned
        return _ABSENT


def _reset_cells(cells: dict[str, types.CellType], items: Items) -> None:
    for name, value in items:
        if value is not _ABSENT:
            cells[name].cell_contents = value


def _position(iterator: Any) -> Items:
    """What can be told of how far an iterator has got; it cannot be set back."""
    frame = getattr(iterator, "gi_frame", None)
    hint = getattr(iterator, "__length_hint__", None)
    told = [repr(iterator), None if frame is None else frame.f_lasti, hint() if hint else None]
    if frame is None:
        with contextlib.suppress(Exception), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # pickling an itertools object is deprecated
            told.append(pickle.dumps(iterator))
    return ((_NEXT, tuple(told)),)


# ---- differences


def _difference(then: Items, now: Items) -> tuple[Any, Any]:
    """The first key whose value is another one, with the new value."""
    if len(then) == len(now) and all(
        a is c and b is d for (a, b), (c, d) in zip(then, now, strict=True)
    ):
        return _ABSENT, None
    before = {_key(k): (k, v) for k, v in then}
    after = {_key(k): (k, v) for k, v in now}
    for mark, (key, value) in after.items():
        old = before.get(mark, (key, _ABSENT))[1]
        if old is not value and not _equal(old, value):
            return key, value
    gone = next((k for m, (k, _) in before.items() if m not in after), _ABSENT)
    return gone, None


def _key(key: Any) -> Any:
    return (type(key), key) if type(key) in _ATOMS else id(key)


def _equal(a: Any, b: Any) -> bool:
    """Whether two values are as good as one: equal plain values, a method bound anew."""
    if type(a) is not type(b):
        return False
    if isinstance(a, types.MethodType):
        return a.__self__ is b.__self__ and a.__func__ is b.__func__
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return type(a) in _ATOMS and (a == b or (a != a and b != b))


def _same(a: Any, b: Any) -> bool:
    return a is b or _equal(a, b)


def _suffix(name: Any) -> str:
    if isinstance(name, str) and name.isidentifier():
        return f".{name}"
    return f"[{name!r}]" if type(name) in _ATOMS else ""


def _variable_in(label: str) -> str:
    """The name that a line of code would write to: "n" of "n in f[0]", "q" of "sub.q['a'][0]"."""
    plain = re.sub(r"\[[^\]]*\]", "", label.partition(" in ")[0])
    return plain.rpartition(".")[2]


def _is_fixed(value: Any) -> bool:
    """Whether a global cannot change in a forward other than by an assignment to its name."""
    if isinstance(value, types.ModuleType):
        return is_librarys(value.__name__)
    return isinstance(value, (type, types.FunctionType)) and is_librarys(value.__module__)


def _has_attributes(value: Any) -> bool:
    """Whether an object has attributes whose reads cannot be noted (a SimpleNamespace)."""
    if callable(value) or isinstance(value, torch.Tensor):
        return False
    return isinstance(getattr(value, "__dict__", None), dict) and (
        type(value) is types.SimpleNamespace or not is_librarys(type(value).__module__)
    )
