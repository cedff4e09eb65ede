"""Which Python state a forward reads: attributes of its modules and of objects reached from them.

`torch.export` runs the forward as plain Python, so every attribute read passes through
`__getattribute__`. While a trace runs, that of `nn.Module` and of the classes of the objects that
its attributes hold is replaced by one that notes (owner, name); other threads and other objects
pass through. What the notes become is `graphopt.capture.places`' business.
"""

from __future__ import annotations

import contextlib
import enum
import pickle
import random
import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from graphopt.capture.assigned import (
    assigned,
    changed_objects,
    switched_settings,
    written_at,
)
from graphopt.capture.failure import is_users
from graphopt.capture.watch import drawing
from graphopt.errors import CaptureError

CONTAINERS = (list, tuple, dict, set, frozenset, deque)
_IMMUTABLE, _HEAP = 1 << 8, 1 << 9  # flags of a type: its attributes are fixed; made by Python
_FIXED = (torch.Tensor, nn.Module, type, types.ModuleType, enum.Enum, BaseException)
_SILENT = frozenset(nn.Module().__dict__) - {"training", "_parameters", "_buffers"}
"""What `nn.Module` itself keeps: submodules and hooks are guarded as such."""


class Reads:
    """Notes of what was read.

    Attributes:
        seen: (id of the owner, name) -> owner, in the order of the first read. Owners are modules
            of the source (never of its shadow) and objects reached from their attributes.
    """

    def __init__(self, sources: dict[int, nn.Module]) -> None:
        """Start empty.

        Args:
            sources: id of a module that the trace runs -> the source's module it stands for.
        """
        self.seen: dict[tuple[int, str], Any] = {}
        self._sources = dict(sources)
        self._objects: dict[int, Any] = {}
        self._patched: list[tuple[type, Any]] = []
        self._before: list[tuple[Any, dict[str, Any]]] = []
        self._generators: dict[int, tuple[Any, bytes]] = {}
        self._thread = -1

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Note the reads of this thread during the block."""
        self._thread = threading.get_ident()
        self._patch(nn.Module, self._of_modules)
        try:
            yield
        finally:
            for kind, own in reversed(self._patched):
                if own is None:
                    del kind.__getattribute__
                else:
                    kind.__getattribute__ = own
            self._patched.clear()
            self._thread = -1

    def watch(self, value: Any) -> None:
        """Note the reads of an object that is reached otherwise than by a module's attribute."""
        self._watched(value)

    def changed(self) -> CaptureError | None:
        """The error for a forward that wrote to an object that it reached; objects are set back."""
        change = changed_objects(self._before)
        if change is None:
            return None
        kinds = [type(m) for m in self._sources.values()]
        return assigned(*change, written_at(change[0].rpartition(".")[2], kinds))

    def switched(self) -> list[tuple[Any, str, Any, Any]]:
        """Settings (flags, strings) that the forward decided in objects that it reached."""
        return switched_settings(self._before)

    def refuse_draws(self) -> None:
        """Refuse a forward that drew from a generator of its own (`random.Random`, numpy's).

        Raises:
            CaptureError: names its class.
        """
        for generator, before in self._generators.values():
            if pickle.dumps(generator) != before:
                kind = type(generator)
                raise drawing(f"a generator of its own ({kind.__module__}.{kind.__qualname__})")

    def _patch(self, kind: type, make: Callable[[Any], Any]) -> None:
        own = kind.__dict__.get("__getattribute__")
        new = make(kind.__getattribute__)
        kind.__getattribute__ = new  # type: ignore[method-assign]
        self._patched.append((kind, own))

    def _of_modules(self, original: Any) -> Any:
        def __getattribute__(module: Any, name: str) -> Any:  # noqa: N807
            if name in _SILENT or name.startswith("__") or threading.get_ident() != self._thread:
                if name == "__dict__" and threading.get_ident() == self._thread:
                    self._whole(module, sys._getframe(1))
                return original(module, name)
            source = self._sources.get(id(module))
            if source is None:
                return original(module, name)
            self.seen.setdefault((id(source), name), source)
            return self._watched(original(module, name))

        return __getattribute__

    def _whole(self, module: Any, frame: types.FrameType) -> None:
        """Note every attribute of a module whose `__dict__` the user's code takes."""
        source = self._sources.get(id(module))
        if source is None or not is_users(frame.f_code.co_filename):
            return
        for name, value in object.__getattribute__(source, "__dict__").items():
            if name not in _SILENT:
                self.seen.setdefault((id(source), name), source)
                self._watched(value)

    def _of_objects(self, original: Any) -> Any:
        def __getattribute__(owner: Any, name: str) -> Any:  # noqa: N807
            watched = id(owner) in self._objects and threading.get_ident() == self._thread
            if not watched or name.startswith("__"):
                return original(owner, name)
            self.seen.setdefault((id(owner), name), owner)
            return self._watched(original(owner, name))

        return __getattribute__

    def _watched(self, value: Any, depth: int = 0) -> Any:
        """The value, after the objects that can be reached from it are watched too."""
        kind = type(value)
        if kind.__module__ == "builtins" and not isinstance(value, CONTAINERS):
            return value
        if isinstance(value, weakref.ref):
            self._watched(value(), depth)
            return value
        if isinstance(value, random.Random) or kind.__module__.startswith("numpy.random"):
            self._generators.setdefault(id(value), (value, pickle.dumps(value)))
        if isinstance(value, CONTAINERS):
            if depth < 3 and len(value) <= 1000:
                for item in value.values() if isinstance(value, dict) else value:
                    self._watched(item, depth + 1)
        elif isinstance(value, nn.Module):
            self._sources.setdefault(id(value), value)  # one that is no submodule of the tree
        elif id(value) not in self._objects and can_be_watched(value):
            self._objects[id(value)] = value
            if hasattr(value, "__dict__"):
                self._before.append((value, dict(value.__dict__)))
            if not any(k is kind for k, _ in self._patched):
                self._patch(kind, self._of_objects)
        return value


def can_be_watched(value: Any) -> bool:
    """Whether reads of an object's attributes can be noted: a user's class, not a library's type.

    Example:
        >>> can_be_watched(types.SimpleNamespace(a=1)), can_be_watched(torch.ones(1))
        (False, False)
    """
    kind = type(value)
    if isinstance(value, _FIXED) or not kind.__flags__ & _HEAP or kind.__flags__ & _IMMUTABLE:
        return False
    package = kind.__module__.partition(".")[0]
    return package != "torch" and package not in sys.stdlib_module_names
