"""Attributes that a forward assigns: their new values would not outlive the trace."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from graphopt.capture.functions import functions_in, is_torchs
from graphopt.capture.signature import holds_tensor
from graphopt.errors import CaptureError

_MISSING = object()
_OWN_OF_A_TRACE = frozenset({"_output_capturing_hooks_installed"})
"""Set where Hugging Face installs the hooks that record hidden states: on the shadow alone."""
_PLAIN = (bool, int, float, str, type(None))


class Attributes:
    """What the attributes of a module tree were before a forward ran.

    Buffers are apart: assigning one becomes a write to it.
    """

    def __init__(self, root: nn.Module, sources: dict[int, nn.Module]) -> None:
        """Take down the attributes.

        Args:
            root: the module that the trace runs (a shadow).
            sources: id of its modules -> the source's module; a buffer that the source does not
                have is a plain tensor attribute of it.
        """
        self._root = root
        self._plain = {
            id(m): frozenset(m._buffers.keys() - sources.get(id(m), m)._buffers.keys())
            for m in root.modules()
        }
        self._before = [(path, m, self._attributes(m)) for path, m in root.named_modules()]
        self._names = [(path, m, _registered(m)) for path, m in root.named_modules()]
        self._buffers = [(path, m, dict(m._buffers)) for path, m in root.named_modules()]

    def _attributes(self, module: nn.Module) -> dict[str, tuple[Any, tuple[Any, ...] | None]]:
        """Name -> (value, items of a list or dict) of a module's attributes."""
        plain = {n: module._buffers.get(n) for n in self._plain.get(id(module), ())}
        found = {}
        for name, value in (*module.__dict__.items(), *module._parameters.items(), *plain.items()):
            if name not in ("_parameters", "_buffers", "_modules") and name not in _OWN_OF_A_TRACE:
                found[name] = (value, items_of(value))
        return found

    def write_buffers(self, results: list[Any]) -> None:
        """Make of each buffer that was assigned (`self.steps = self.steps + 1`) a write to it.

        `torch.export` does so for the root alone, and drops what submodules assign.

        Args:
            results: of the forward; one that is the old buffer becomes a copy of it.

        Raises:
            CaptureError: where the new value has another shape, dtype or device, or is no tensor.
        """
        pairs = list(self._assigned_buffers())
        olds = [old for *_, old, _ in pairs]
        for i, result in enumerate(results):
            if _lies_in(result, olds):
                results[i] = result.clone()
        news = [new.clone() if _lies_in(new, olds) else new for *_, new in pairs]
        for (module, name, old, _), new in zip(pairs, news, strict=True):
            if module is self._root:
                setattr(module, name, new)  # torch.export has taken note, and does once more
            else:
                module._buffers[name] = old
                old.copy_(new.detach() if new.requires_grad else new)

    def _assigned_buffers(self) -> Iterator[tuple[nn.Module, str, torch.Tensor, torch.Tensor]]:
        """(module, name, old, new) of each buffer that was assigned."""
        for path, module, before in self._buffers:
            for name in before.keys() & module._buffers.keys() - self._plain.get(id(module), ()):
                old, new = before[name], module._buffers[name]
                if new is old:
                    continue
                if old is None or new is None or _kind(old) != _kind(new):
                    label = f"{path}.{name}" if path else name
                    kinds = [type(module), type(self._root)]
                    raise assigned(label, new, written_at(name, kinds), buffer=True)
                yield module, name, old, new

    def refuse_changed(self) -> None:
        """Compare with the present attributes.

        Raises:
            CaptureError: names an attribute that holds another tensor or number than before, or a
                list or dict whose items changed.
        """
        own = {id(t) for t in (*self._root.parameters(), *self._root.buffers())}
        for path, module, before in self._before:
            for name, (value, items) in self._attributes(module).items():
                old, old_items = before.get(name, (_MISSING, None))
                changed = _changed(value, old) or _items_changed(items, old_items)
                if changed and not _only_own(items, own):
                    label = f"{path}.{name}" if path else name
                    kinds = [type(module), type(self._root)]
                    raise assigned(label, value, written_at(name, kinds))
        for path, module, names in self._names:
            for name in sorted(_registered(module) ^ names):
                label = f"{path}.{name}" if path else name
                raise assigned(
                    label, getattr(module, name, None), forward_of([type(module), type(self._root)])
                )


def _kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (tensor.shape, tensor.dtype, tensor.device)


def _lies_in(value: Any, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether a tensor shares the memory of one of some tensors."""
    alias: Any = torch._C._is_alias_of  # type: ignore[attr-defined]
    return isinstance(value, torch.Tensor) and any(alias(value, t) for t in tensors)


def _registered(module: nn.Module) -> frozenset[str]:
    return frozenset((*module._parameters, *module._buffers, *module._modules))


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


def switched_settings(
    before: list[tuple[Any, dict[str, Any]]],
) -> list[tuple[Any, str, Any, Any]]:
    """(object, name, old, new) of the flags and strings that a forward set in objects."""
    found = []
    for owner, then in before:
        for name, value in owner.__dict__.items():
            old = then.get(name, _MISSING)
            setting = value is None or isinstance(value, bool | str)
            if setting and value is not old and (type(value) is not type(old) or value != old):
                found.append((owner, name, old, value))
    return found


def set_back(switched: list[tuple[Any, str, Any, Any]]) -> None:
    """Undo what `switched_settings` found."""
    for owner, name, old, _ in switched:
        if old is _MISSING:
            owner.__dict__.pop(name, None)
        else:
            owner.__dict__[name] = old


def _changed(value: Any, old: Any) -> bool:
    if value is old:
        return False
    if isinstance(value, _PLAIN) and isinstance(old, _PLAIN):
        return type(value) is not type(old) or value != old
    return isinstance(value, int | float) or _holds(value)


def _holds(value: Any) -> bool:
    return holds_tensor(value, set())


_CHANGING = "append|appendleft|extend|add|update|pop|popleft|insert|setdefault|clear|remove|discard"


def written_at(name: str, kinds: list[type], functions: Sequence[Any] = ()) -> str | None:
    """The first line outside of `__init__` where one of some classes writes to an attribute.

    Args:
        name: of the attribute, or of a variable outside.
        kinds: classes of modules, the likeliest first.
        functions: where to look before the classes.

    Returns:
        "file:line in Class.function    code"; the first class's forward where no line is found.
    """
    assigned_to = re.compile(
        rf"\b{re.escape(name)}\b(\[.*\]|\.\w+)*(\s*(?:[-+*/|&@%^]|//|\*\*|<<|>>)?=(?!=)"
        rf"|\.(?:{_CHANGING})\()"
    )
    bases = dict.fromkeys(base for k in kinds for base in k.__mro__)
    methods = [f for base in bases for f in list(vars(base).values())]
    lines = [
        line
        for function in (*functions, *methods)
        for line in _lines(function)
        if assigned_to.search(line.partition("    ")[2])
    ]
    item = re.compile(rf"\b{re.escape(name)}(\[|\.(?:{_CHANGING})\()")
    lines.sort(key=lambda line: (not item.search(line), ".train    " in line))  # emptied there
    return lines[0] if lines else forward_of(kinds)


def _lines(value: Any) -> Iterator[str]:
    """The lines of a method that is not `__init__`, each with its place."""
    for function in functions_in(value):
        if function.__name__ == "__init__" or is_torchs(function.__module__):
            continue
        try:
            lines, first = inspect.getsourcelines(function)
        except (OSError, TypeError):
            continue
        file, where = function.__code__.co_filename, function.__qualname__
        for number, line in enumerate(lines, first):
            yield f"{file}:{number} in {where}    {line.strip()}"


def forward_of(kinds: list[type]) -> str | None:
    """The place of the first forward of some classes that is not torch's own."""
    for base in (base for kind in kinds for base in kind.__mro__):
        for function in functions_in(base.__dict__.get("forward")):
            if function.__module__.partition(".")[0] not in ("torch", "graphopt"):
                code = function.__code__
                return f"{code.co_filename}:{code.co_firstlineno} in {function.__qualname__}"
    return None


def assigned(
    name: str, value: Any, at: str | None = None, *, outside: bool = False, buffer: bool = False
) -> CaptureError:
    """The error for an attribute that a forward writes (or a variable outside of the model)."""
    kind = "a tensor" if isinstance(value, torch.Tensor) else f"of type {type(value).__name__}"
    cache = "; for a cache: call the model once, so that it is filled, and then optimize it"
    cache = cache if isinstance(value, dict | torch.Tensor) else ""
    if buffer:
        return CaptureError(
            f"forward assigns the buffer {name!r} a value of another shape, dtype or device",
            at=at,
            why="a graph writes into the buffer that is there",
            try_=f"a buffer that has the shape from the start{cache}; or on_error='fallback'",
        )
    if outside:
        return CaptureError(
            f"forward changes {name!r} ({kind})",
            at=at,
            why="a graph holds no Python state: later calls would neither see nor make the change",
            try_=f"a buffer (register_buffer) in its place{cache}; or on_error='fallback'",
        )
    return CaptureError(
        f"forward assigns the attribute {name!r} ({kind})",
        at=at,
        why="a graph holds no attributes: later calls would neither see nor make the change",
        try_=f"a buffer (register_buffer) in place of the attribute{cache}; or on_error='fallback'",
    )
