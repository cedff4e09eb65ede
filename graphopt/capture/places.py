"""Where the Python state that a forward read lives: cells that can be read again at every call."""

from __future__ import annotations

import dis
import enum
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from graphopt.capture.assigned import assigned
from graphopt.capture.reads import CONTAINERS, Reads, can_be_watched
from graphopt.capture.shadow import ATTACHED, SOURCE_OF

ABSENT = object()
_PLAIN: tuple[type, ...] = (bool, int, float, complex, str, bytes, type(None), enum.Enum)
_PLAIN = (*_PLAIN, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)
_SMALL_ARRAY = 1 << 16  # bytes of a numpy array whose content is compared at every call


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
    """

    def __init__(self, root: nn.Module, reads: Reads) -> None:
        self.cells: list[Cell] = []
        self.contents: list[Contents] = []
        self.tensors: list[tuple[dict[str, Any], str, str]] = []
        self.unshadowed: list[tuple[dict[str, Any], str, str]] = []
        self._paths = {id(m.__dict__.get(SOURCE_OF, m)): p for p, m in root.named_modules()}
        self._known: set[tuple[int, str]] = set()
        self._functions: set[int] = set()
        for (_, name), owner in reads.seen.items():
            self._attribute(owner, name)
        self._attribute(root, "forward")

    # ---- attributes

    def _attribute(self, owner: Any, name: str) -> None:
        label = self._label(owner, name)
        own = owner.__dict__ if hasattr(owner, "__dict__") else {}
        if name in own:
            value = own[name]
            if id(owner) in self._paths and isinstance(value, torch.Tensor):  # read live
                self.tensors.append((own, name, label))
            elif not getattr(value, ATTACHED, False):  # our own forward, put there
                self._cell(own, name, value, label)
                self._content(value, label)
            return
        if isinstance(owner, nn.Module):
            for kept in (owner._parameters, owner._buffers):
                if kept.get(name, ABSENT) is None or (
                    name in kept and id(owner) not in self._paths
                ):
                    self._cell(kept, name, kept[name], label)
            if any(name in d for d in (owner._parameters, owner._buffers, owner._modules)):
                return
        if own:
            self.unshadowed.append((own, name, label))
        if self._of_class(owner, name, label) or isinstance(owner, nn.Module):
            return
        if own and getattr(owner, name, ABSENT) is not ABSENT:  # computed from other attributes
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
            if _is_torchs(kind.__module__) and name != "forward" and not isinstance(value, _PLAIN):
                continue
            self._cell(kind.__dict__, name, value, f"{kind.__name__}.{name}", id(kind))
            self._content(value, f"{kind.__name__}.{name}")
            for function in _functions_in(value):
                self._function(function, 0)
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
            if depth > 3 or not value or (id(value), "") in self._known:
                return
            self._known.add((id(value), ""))
            if not isinstance(value, (tuple, frozenset)):
                self._content_of(functools.partial(_items, value), label)
            for item in value.values() if isinstance(value, dict) else value:
                self._content(item, label, depth + 1)
        elif _is_array(value) and value.nbytes <= _SMALL_ARRAY:
            self._content_of(functools.partial(_array_items, value), label)
        elif _is_opaque(value):
            self._content_of(functools.partial(_plain_items, value.__dict__), label)

    def _content_of(self, read: Callable[[], tuple[Any, ...]], label: str) -> None:
        self.contents.append(Contents(read, read(), label))

    def _class_data(self, kind: type) -> None:
        """Plain attributes of a class that stands as a value (a class used as a config)."""
        if _is_torchs(kind.__module__) or kind.__module__ == "builtins":
            return
        for name, value in list(kind.__dict__.items()):
            if not name.startswith("__") and isinstance(value, _PLAIN):
                self._cell(kind.__dict__, name, value, f"{kind.__name__}.{name}", id(kind))

    # ---- what a function takes from outside

    def _function(self, function: types.FunctionType, depth: int) -> None:
        """Cells for the globals and closure that a function's code names, its helpers' too."""
        if id(function) in self._functions or _is_librarys(function.__module__):
            return
        self._functions.add(id(function))
        names = set(_names(function.__code__))
        if depth == 0:
            _refuse_stores(function)
        scope = function.__globals__
        for name in sorted(names & scope.keys()):
            label = f"{scope.get('__name__')}.{name}"
            self._outer(scope, name, names, label, depth)
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            label = f"{name} in {function.__qualname__}"
            self._outer(_Closure(cell), name, names, label, depth)

    def _outer(self, scope: Any, name: str, names: set[str], label: str, depth: int) -> None:
        """Cells for one variable outside a function, and for what its code may read off it."""
        value = scope[name]
        owner = id(scope.owner) if isinstance(scope, _Closure) else id(scope)
        if isinstance(value, (*_PLAIN, *CONTAINERS, torch.Tensor)):
            if isinstance(value, CONTAINERS):
                _refuse_kept(value, label)
            if not isinstance(value, CONTAINERS) or _all_plain(value):
                self._cell(scope, name, value, label, owner)
                self._content(value, label)
        elif isinstance(value, types.FunctionType):
            if not _is_librarys(value.__module__):
                self._cell(scope, name, value, label, owner)
                if depth < 4:
                    self._function(value, depth + 1)
        elif isinstance(value, type):
            for kind in value.__mro__:
                if not _is_librarys(kind.__module__):
                    self._members(kind.__dict__, names, kind.__name__, id(kind))
        elif isinstance(value, types.ModuleType):
            if not _is_librarys(value.__name__):
                self._members(vars(value), names, value.__name__, id(value))
        elif can_be_watched(value) and not _is_librarys(type(value).__module__):
            own = getattr(value, "__dict__", {})
            self._members(own, names, label, id(own))

    def _members(self, scope: Any, names: set[str], label: str, owner: int) -> None:
        for name in sorted(names & scope.keys()):
            if isinstance(scope[name], _PLAIN) and not name.startswith("__"):
                self._cell(scope, name, scope[name], f"{label}.{name}", owner)


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


def _refuse_stores(function: types.FunctionType) -> None:
    """Refuse a function that assigns a number to a global: a graph would not count on.

    Raises:
        CaptureError: names the global.
    """
    for instruction in dis.get_instructions(function):
        if instruction.opname == "STORE_GLOBAL":
            value = function.__globals__.get(instruction.argval)
            if isinstance(value, (int, float, torch.Tensor)) and not isinstance(value, bool):
                raise assigned(f"{function.__module__}.{instruction.argval}", value)


def _refuse_kept(container: Any, label: str) -> None:
    """Refuse a trace that put one of its tensors into a container outside the model.

    Raises:
        CaptureError: names the variable; a list is set back.
    """
    if not any(isinstance(v, FakeTensor) for v in _items(container)):
        return
    if isinstance(container, list):
        container[:] = [v for v in container if not isinstance(v, FakeTensor)]
    raise assigned(label, container)


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


def _is_torchs(module: str | None) -> bool:
    return (module or "").partition(".")[0] == "torch"


@functools.cache
def _is_librarys(module: str | None) -> bool:
    """Whether a module belongs to an installed package: its globals are taken as fixed."""
    name = module or "builtins"
    if _is_torchs(name) or (
        name.partition(".")[0] in sys.stdlib_module_names and name != "__main__"
    ):
        return True
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    return "site-packages" in file or "dist-packages" in file


def _functions_in(value: Any) -> Iterator[types.FunctionType]:
    """The Python functions behind a class attribute: a method, a property, a decorated one."""
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    if isinstance(value, property):
        value = value.fget
    value = inspect.unwrap(value) if callable(value) else value
    if isinstance(value, types.FunctionType):
        yield value


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
