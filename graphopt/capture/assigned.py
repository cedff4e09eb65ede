"""Attributes that a forward assigns: their new values would not outlive the trace."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from graphopt.capture.signature import holds_tensor
from graphopt.errors import CaptureError

_MISSING = object()
_PLAIN = (bool, int, float, str, type(None))


class Attributes:
    """What the attributes of a module tree were before a forward ran.

    Buffers are left out: assigning one becomes a write to it.
    """

    def __init__(self, root: nn.Module) -> None:
        self._before = [(path, m, _attributes(m)) for path, m in root.named_modules()]

    def refuse_changed(self) -> None:
        """Compare with the present attributes.

        Raises:
            CaptureError: names an attribute that holds another tensor or number than before, or a
                list or dict whose items changed.
        """
        for path, module, before in self._before:
            for name, (value, items) in _attributes(module).items():
                old, old_items = before.get(name, (_MISSING, None))
                if _changed(value, old) or (items != old_items and _holds(value)):
                    raise _assigned(f"{path}.{name}" if path else name, value)


def _attributes(module: nn.Module) -> dict[str, tuple[Any, list[int] | None]]:
    found = {}
    for name, value in (*module.__dict__.items(), *module._parameters.items()):
        if name in ("_parameters", "_buffers", "_modules"):
            continue
        items = None
        if type(value) is list:
            items = [id(v) for v in value]
        elif type(value) is dict:
            items = [id(v) for v in value.values()]
        found[name] = (value, items)
    return found


def _changed(value: Any, old: Any) -> bool:
    if value is old:
        return False
    if isinstance(value, _PLAIN) and isinstance(old, _PLAIN):
        return type(value) is not type(old) or value != old
    return isinstance(value, int | float) or _holds(value)


def _holds(value: Any) -> bool:
    return holds_tensor(value, set())


def _assigned(name: str, value: Any) -> CaptureError:
    kind = "a tensor" if isinstance(value, torch.Tensor) else f"of type {type(value).__name__}"
    return CaptureError(
        f"forward assigns the attribute {name!r} ({kind})",
        why="a graph holds no attributes: later calls would neither see nor make the change",
        try_="a buffer (register_buffer) in place of the attribute; or on_error='fallback'",
    )
