"""Attributes that a forward assigns: their new values would not outlive the trace."""

from __future__ import annotations

import inspect
import re
from typing import Any

import torch
from torch import nn

from graphopt.capture.signature import holds_tensor
from graphopt.errors import CaptureError

_MISSING = object()
_OWN_OF_A_TRACE = frozenset({"_output_capturing_hooks_installed"})
"""Set where Hugging Face installs the hooks that record hidden states: on the shadow alone."""
_PLAIN = (bool, int, float, str, type(None))


class Attributes:
    """What the attributes of a module tree were before a forward ran.

    Buffers are left out: assigning one becomes a write to it.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._before = [(path, m, _attributes(m)) for path, m in root.named_modules()]

    def refuse_changed(self) -> None:
        """Compare with the present attributes.

        Raises:
            CaptureError: names an attribute that holds another tensor or number than before, or a
                list or dict whose items changed.
        """
        own = {id(t) for t in (*self._root.parameters(), *self._root.buffers())}
        for path, module, before in self._before:
            for name, (value, items) in _attributes(module).items():
                old, old_items = before.get(name, (_MISSING, None))
                changed = _changed(value, old) or _items_changed(items, old_items)
                if changed and not _only_own(items, own):
                    label = f"{path}.{name}" if path else name
                    raise assigned(label, value, _written_at(type(module), name))


def _attributes(module: nn.Module) -> dict[str, tuple[Any, tuple[Any, ...] | None]]:
    """Name -> (value, items of a list or dict) of a module's attributes."""
    found = {}
    for name, value in (*module.__dict__.items(), *module._parameters.items()):
        if name not in ("_parameters", "_buffers", "_modules") and name not in _OWN_OF_A_TRACE:
            found[name] = (value, items_of(value))
    return found


def items_of(value: Any) -> tuple[Any, ...] | None:
    """The items of a list or dict, one level deep."""
    if type(value) is dict:
        return (*value, *value.values())
    return tuple(value) if type(value) is list else None


def _items_changed(now: tuple[Any, ...] | None, then: tuple[Any, ...] | None) -> bool:
    if now is None or then is None:
        return False
    return len(now) != len(then) or any(map(_changed, now, then))


def _only_own(items: tuple[Any, ...] | None, own: set[int]) -> bool:
    """Whether a container lists the model's own state alone (the flat weights of an LSTM)."""
    return bool(items) and all(id(t) in own for t in items or ())


def changed_objects(before: list[tuple[Any, dict[str, Any]]]) -> tuple[str, Any] | None:
    """The first number or tensor that a forward wrote to an object's attribute; all are set back.

    Args:
        before: objects with what their `__dict__` was.

    Returns:
        (its name, its new value), None where nothing was written that a graph would lack.
    """
    found = None
    for owner, then in before:
        now = owner.__dict__
        for name, value in list(now.items()):
            # a setting (config.problem_type, decided at the first call) stays as eager leaves it
            setting = value is None or isinstance(value, bool | str)
            if not setting and _changed(value, then.get(name, _MISSING)):
                found = found or (f"{type(owner).__name__}.{name}", value)
                if name in then:
                    now[name] = then[name]
                else:
                    del now[name]
    return found


def _changed(value: Any, old: Any) -> bool:
    if value is old:
        return False
    if isinstance(value, _PLAIN) and isinstance(old, _PLAIN):
        return type(value) is not type(old) or value != old
    return isinstance(value, int | float) or _holds(value)


def _holds(value: Any) -> bool:
    return holds_tensor(value, set())


def _written_at(kind: type, name: str) -> str | None:
    """The first line outside of `__init__` where a class writes an attribute of its instances."""
    written = re.compile(rf"\bself\.{re.escape(name)}\b(\[.*\])?\s*([-+*/|&]|//|\*\*)?=(?!=)")
    for base in kind.__mro__:
        for function in vars(base).values():
            if not inspect.isfunction(function) or function.__name__ == "__init__":
                continue
            try:
                lines, first = inspect.getsourcelines(function)
            except (OSError, TypeError):
                continue
            for number, line in enumerate(lines, first):
                if written.search(line):
                    file, where = function.__code__.co_filename, function.__qualname__
                    return f"{file}:{number} in {where}    {line.strip()}"
    return None


def assigned(name: str, value: Any, at: str | None = None) -> CaptureError:
    """The error for an attribute that a forward writes."""
    kind = "a tensor" if isinstance(value, torch.Tensor) else f"of type {type(value).__name__}"
    return CaptureError(
        f"forward assigns the attribute {name!r} ({kind})",
        at=at,
        why="a graph holds no attributes: later calls would neither see nor make the change",
        try_="a buffer (register_buffer) in place of the attribute; or on_error='fallback'",
    )
