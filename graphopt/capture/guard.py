"""What a captured graph relies on outside its arguments, checked at every call.

A graph is right as long as the Python state that its capture read is what it was: training flags,
numbers, strings and containers in attributes, functions, submodules, and of each tensor its dtype,
device, shape and requires_grad. The check is a few list operations that run in C; only when one of
them differs does Python look closer, to tell a real change from an equal value in a new object.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import getitem, is_
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from graphopt.capture.places import ABSENT, Cell, Places, same
from graphopt.capture.shadow import ATTACHED, SOURCE_OF
from graphopt.capture.watch import foreign, hook_dicts
from graphopt.emit import ParamRef

_MOST_REFRESHES = 16
_MOST_LOOKS = 1000

Change = tuple[str, Any, Any]
"""(what, old, new): a piece of state, as a user would name it."""


def modules_of(root: nn.Module) -> list[nn.Module]:
    """The module tree; an optimized module in it stands for its source."""
    return [m.__dict__.get(SOURCE_OF, m) for m in root.modules()]


class Guard:
    """What one graph relies on; `state` checks it and reads the graph's tensors in one go."""

    def __init__(self, root: nn.Module, places: Places, refs: Sequence[ParamRef]) -> None:
        """Take down the present state.

        Args:
            root: the source.
            places: what its capture read.
            refs: the state that the graph reads, in the order in which `state` shall return it.
        """
        modules = modules_of(root)
        self._count = len(refs)
        self._tree(root, modules, places)
        self._tensors(modules, places, refs)
        self._loose = _Cells([c for c in places.cells if _equal_is_same(c.value)])
        self._strict = _Cells([c for c in places.cells if not _equal_is_same(c.value)])
        self._contents = [(c.read, c.items) for c in places.contents]
        self._content_labels = [c.label for c in places.contents]
        self._watch()

    def _tree(self, root: nn.Module, modules: list[nn.Module], places: Places) -> None:
        paths = {id(m.__dict__.get(SOURCE_OF, m)): path for path, m in root.named_modules()}
        self._paths = [paths[id(m)] for m in modules]
        self._parents = [(self._paths[i], m._modules) for i, m in enumerate(modules) if m._modules]
        self._children = [d for _, d in self._parents]
        self._children_then = [dict(d) for d in self._children]
        self._modules = modules
        self._kinds = [type(m) for m in modules]
        shadowing = {id(own): own for own, *_ in places.unshadowed}
        self._registers = [(d, tuple(d), label) for d, label in places.registers]
        shadowing |= {id(d): d for d, _ in places.registers}
        self._dicts = list(({id(m.__dict__): m.__dict__ for m in modules} | shadowing).values())
        self._unshadowed = places.unshadowed
        self._sizes = list(map(len, self._dicts))
        self._hooks = hook_dicts(modules)
        self._handles = RemovableHandle.next_id

    def _tensors(self, modules: list[nn.Module], places: Places, refs: Sequence[ParamRef]) -> None:
        found: dict[tuple[int, str], tuple[Any, str, str]] = {}
        read = {(id(r.owner), r.name) for r in refs}
        for path, module in zip(self._paths, modules, strict=True):
            for owner in (module._parameters, module._buffers):
                for name, tensor in owner.items():
                    if tensor is not None:
                        label = f"{path}.{name}" if path else name
                        found.setdefault((id(owner), name), (owner, name, label))
        for owner, name, label in places.tensors:
            found.setdefault((id(owner), name), (owner, name, label))
        first: dict[int, int] = {}  # id of a tensor -> its position
        self._owners: list[Any] = []
        self._keys: list[str] = []
        self._labels: list[str] = []
        self._tied: list[tuple[Any, str, int, str]] = []
        rest = [place for mark, place in found.items() if mark not in read]
        for i, (owner, name, label) in enumerate(
            [*((r.owner, r.name, r.path) for r in refs), *rest]
        ):
            tensor = owner[name]
            if i >= self._count and id(tensor) in first:
                self._tied.append((owner, name, first[id(tensor)], label))
                continue
            first.setdefault(id(tensor), len(self._owners))
            self._owners.append(owner)
            self._keys.append(name)
            self._labels.append(label)
        tensors = list(map(getitem, self._owners, self._keys))
        self._facts = [_facts(t) for t in tensors]
        self._refreshes = 0
        self._check = _fast_check(tensors)

    def _watch(self) -> None:
        """Take the dicts whose versions stand for what they hold, and the cells outside of them."""
        cells = (*self._loose.cells, *self._strict.cells)
        dicts = [*self._dicts, *self._owners, *self._children, *(c.container for c in cells)]
        plain = {id(d): d for d in dicts if type(d) is dict and "__builtins__" not in d}
        self._watched = list(plain.values())
        rest = [c for c in cells if id(c.container) not in plain]
        self._outside = _Cells(rest)
        self._same: tuple[int, list[Any]] | None = None  # sum of versions, and the tensors then
        self._looks = 0

    # ---- the check

    def state(self) -> list[torch.Tensor] | None:
        """The graph's state tensors; None when the graph is not right for the present state."""
        same = self._same
        if (
            same is not None
            and sum(map(_version, self._watched)) == same[0]
            and self._check(*same[1])
            and (not self._outside.cells or self._outside.identical())
            and list(map(type, self._modules)) == self._kinds
            and self._handles == RemovableHandle.next_id
            and (not self._contents or self._changed_contents() is None)
        ):
            return same[1][: self._count]
        version = self._version()
        tensors = self._tensors_now()
        if tensors is None:
            return None
        self._same = None if version is None else (version, tensors)
        return tensors[: self._count]

    def _version(self) -> int | None:
        """The sum of the dicts' versions, which grow; None where they change at many calls."""
        self._looks += 1
        if _version is None or self._looks > _MOST_LOOKS:
            return None
        return sum(map(_version, self._watched))

    def _tensors_now(self) -> list[Any] | None:
        """The tensors, after each piece of state was compared."""
        try:
            tensors = list(map(getitem, self._owners, self._keys))
            if (
                self._check(*tensors)
                and self._loose.equal()
                and self._strict.identical()
                and self._children == self._children_then
                and list(map(len, self._dicts)) == self._sizes
                and list(map(type, self._modules)) == self._kinds
                and self._handles == RemovableHandle.next_id
                and (not self._contents or self._changed_contents() is None)
                and (not self._tied or self._still_tied(tensors))
            ):
                return tensors
        except KeyError:
            return None
        return tensors if self._holds(tensors) else None

    def _holds(self, tensors: list[Any]) -> bool:
        """The check in full, after which what is equal to before counts as before."""
        if self.change() is not None:
            return False
        self._strict.values = self._strict.now()
        self._sizes = list(map(len, self._dicts))
        self._handles = RemovableHandle.next_id
        if self._refreshes < _MOST_REFRESHES and not self._check(*tensors):
            self._refreshes += 1
            self._check = _fast_check(tensors)
        return True

    def change(self) -> Change | None:
        """The first difference between the state then and now, None where there is none."""
        return (
            self._changed_tree()
            or self._changed_cells()
            or self._changed_contents()
            or self._changed_tensors()
        )

    def _changed_cells(self) -> Change | None:
        for cell in (*self._loose.cells, *self._strict.cells):
            now = _read(cell.container, cell.key)
            if not same(cell.value, now):
                return (cell.label, cell.value, "absent" if now is ABSENT else now)
        return None

    def _changed_contents(self) -> Change | None:
        for label, (read, then) in zip(self._content_labels, self._contents, strict=True):
            if not same_items(then, now := read()):
                return (f"the content of {label}", _short(then), _short(now))
        return None

    def _still_tied(self, tensors: list[Any]) -> bool:
        return all(d.get(k) is tensors[i] for d, k, i, _ in self._tied)

    def _changed_tensors(self) -> Change | None:
        tensors = [_read(d, k) for d, k in zip(self._owners, self._keys, strict=True)]
        for label, tensor, facts in zip(self._labels, tensors, self._facts, strict=True):
            if not isinstance(tensor, torch.Tensor):
                return (label, "a tensor", "absent" if tensor is ABSENT else tensor)
            if (new := _facts(tensor)) != facts:
                return _first_fact(label, facts, new)
        for owner, name, i, label in self._tied:
            if owner.get(name) is not tensors[i]:
                return (f"{self._labels[i]} and {label}", "one tensor", "two tensors")
        return None

    def _changed_tree(self) -> Change | None:
        if self._children != self._children_then:
            for (path, now), then in zip(self._parents, self._children_then, strict=True):
                for name in {**then, **now}:
                    if now.get(name) is not then.get(name):
                        where = f"{path}.{name}" if path else name
                        return (f"submodule {where}", _kind(then, name), _kind(now, name))
        for path, module, kind in zip(self._paths, self._modules, self._kinds, strict=True):
            if type(module) is not kind:
                return (f"class of {path or 'the model'}", kind.__name__, type(module).__name__)
        for own_state, names, label in self._registers:
            if tuple(own_state) != names:
                return (label, names, tuple(own_state))
        for own, name, label in self._unshadowed:
            if name in own and not getattr(own[name], ATTACHED, False):
                return (label, "the class's", own[name])
        if foreign(self._hooks):
            return ("hooks", "none", "some")
        return None


class _Cells:
    """Cells in columns, so that comparing them runs in C."""

    def __init__(self, cells: Sequence[Cell]) -> None:
        self.cells = cells
        self.values = [c.value for c in cells]
        self._containers = [c.container for c in cells]
        self._keys = [c.key for c in cells]

    def now(self) -> list[Any]:
        return list(map(getitem, self._containers, self._keys))

    def equal(self) -> bool:
        return self.now() == self.values

    def identical(self) -> bool:
        return all(map(is_, map(getitem, self._containers, self._keys), self.values))


def _equal_is_same(value: Any) -> bool:
    """Whether what compares equal to a value is the same for a graph; not so 1, 1.0 and True.

    Flags are taken as such whatever their type.
    """
    if type(value) is float:
        return not value.is_integer()
    return value is None or type(value) in (bool, str)


def same_items(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    """Whether two containers hold the same items: equal plain values, else the very objects."""
    return len(a) == len(b) and (all(map(is_, a, b)) or all(map(same, a, b)))


def _read(container: Any, key: str) -> Any:
    try:
        return container[key]
    except KeyError:
        return ABSENT


def _facts(tensor: Any) -> tuple[Any, ...]:
    return (tensor.dtype, tensor.device, tensor.shape, tensor.requires_grad, tensor.layout)


def _first_fact(label: str, then: tuple[Any, ...], now: tuple[Any, ...]) -> Change:
    for what, a, b in zip(_FACTS, then, now, strict=True):
        if a != b:
            old, new = (tuple(v) if isinstance(v, torch.Size) else v for v in (a, b))
            return (f"{what} of {label}", old, new)
    raise AssertionError("the facts are equal")


_FACTS = ("dtype", "device", "shape", "requires_grad", "layout")


def _fast_check(tensors: list[Any]) -> Callable[..., bool]:
    """A function that compares the facts of all tensors with those of these, in C.

    Torch's own guards do this for `torch.compile`. They are a private interface: where it is
    missing, or says that the very tensors differ (it does for tied ones), Python compares.
    """
    try:
        from torch._C._dynamo.guards import TensorGuards

        sizes: list[Any] = [list(t.shape) for t in tensors]
        strides: list[Any] = [list(t.stride()) for t in tensors]
        guards = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        if tensors and guards.check(*tensors):
            return guards.check
    except (ImportError, TypeError, RuntimeError, AttributeError):
        pass
    facts = [_facts(t) for t in tensors]
    return lambda *now: [_facts(t) for t in now] == facts


def _dict_versions() -> Callable[[dict[Any, Any]], int] | None:
    """Torch's function that tells a dict's version, where it is there and works.

    A dict has another version after each change: one look at it stands for all that it holds. Like
    `TensorGuards` it is private; without it each value is compared.
    """
    try:
        from torch._C._dynamo.guards import dict_version

        trial = {"a": 1}
        first, again = dict_version(trial), dict_version(trial)
        trial["a"] = 2
        second = dict_version(trial)
        trial["b"] = 1
        works = first == again and len({first, second, dict_version(trial)}) == 3
    except (ImportError, TypeError, RuntimeError):
        return None
    return dict_version if works else None


_version: Any = _dict_versions()


def _kind(children: dict[str, Any], name: str) -> str:
    child = children.get(name)
    return type(child).__name__ if child is not None else "absent"


def _short(items: tuple[Any, ...], limit: int = 80) -> str:
    text = repr(items)
    return text if len(text) <= limit else text[: limit - 3] + "..."
