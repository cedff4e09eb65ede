"""One real call of an operation on made-up operands, to learn what it takes beside its results.

What an operation allocates inside is seen by no dispatch mode and told by no fake form: a copy of
an operand that lies otherwise than it wants, a result in float32 of operands in bf16, a library's
workspace. All of it depends on the operation and on how its operands lie, not on their values. So
each kind of call runs once; what it took is remembered, and kept on disk where that took long.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map

from graphopt.cost.kept import load, store
from graphopt.memory.tracker import storages_of

FILE = "workspaces.json"
"""Holds what was measured, of every device."""

SLOW_MS = 2.0
"""What took longer to measure is kept in the file; the rest is measured anew by each process."""

NAMESPACES = frozenset({"aten", "prims", "torch_nn", "torchvision"})
"""Whose operations may be called: a user's own may do anything."""

FREE = frozenset(
    {"clone", "copy_", "_to_copy", "fill_", "zero_", "lift_fresh", "lift_fresh_copy", "set_"}
    | {f"{name}_like" for name in ("empty", "zeros", "ones", "full")}
    | {f"new_{name}" for name in ("empty", "empty_strided", "zeros", "ones", "full")}
)
"""ATen operations that take nothing beside their results, however their operands lie."""

PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm"})
"""ATen operations that are one product of matrices."""

BY_VALUE = frozenset({"linalg_matrix_exp", "unique_dim", "_unique2", "unique_consecutive"})
"""ATen operations that take more or less inside by the values of their operands."""

_NUMBERS = (int, float, complex, torch.SymInt, torch.SymFloat, torch.SymBool)
_NAMES = (str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


@dataclasses.dataclass(frozen=True, slots=True)
class Lies:
    """How a result lies in memory.

    Attributes:
        place: which of the results it is.
        dtype: its dtype.
        stride: its strides.
        bytes: of its storage.
    """

    place: int
    dtype: torch.dtype
    stride: tuple[int, ...]
    bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Taken:
    """What one real call took.

    Attributes:
        inside: the most bytes that it held at once beside its results.
        results: those that lie otherwise in memory than the fake form says.
    """

    inside: int
    results: tuple[Lies, ...] = ()

    def to_json(self) -> list[Any]:
        """Plain data for JSON."""
        names = [str(r.dtype).removeprefix("torch.") for r in self.results]
        rows = zip(self.results, names, strict=True)
        return [self.inside, [[r.place, name, list(r.stride), r.bytes] for r, name in rows]]

    @staticmethod
    def of_json(value: Any) -> Taken | None:
        """What `to_json` gave; None for anything else."""
        try:
            inside, rows = value
            found = tuple(Lies(p, getattr(torch, name), tuple(s), n) for p, name, s, n in rows)
        except (TypeError, ValueError, AttributeError):
            return None
        counts = [inside, *(n for r in found for n in (r.place, r.bytes, *r.stride))]
        if not all(type(n) is int and n >= 0 for n in counts):
            return None
        return Taken(inside, found) if all(type(r.dtype) is torch.dtype for r in found) else None


NOTHING = Taken(0)
"""A call that takes nothing beside its results, which lie as the fake form says."""


class BusyError(Exception):
    """A call cannot be measured now, but later it may be."""


class Book:
    """What calls took: those of this process, and slow ones of earlier ones through a file."""

    def __init__(self) -> None:
        self._known: dict[Any, Taken | None] = {}
        self._kept: dict[str, dict[str, Any]] = {}
        self._lock = threading.Lock()

    def look(
        self, device: str, key: tuple[Any, ...], measure: Callable[[], Taken | None]
    ) -> Taken | None:
        """What a call took: as it is known, else as it is measured now.

        Args:
            device: whose call it is.
            key: the call, as of `key_of` and what else decides about it.
            measure: makes the call; None where that fails, which it is not asked again in this
                process.
        """
        with self._lock:
            if (device, key) in self._known:
                return self._known[device, key]
            if device not in self._kept:
                self._kept[device] = load(FILE, device)
            text = " ".join(map(str, key))
            found = Taken.of_json(self._kept[device].get(text))
        if found is None:
            begun = time.perf_counter()
            try:
                found = measure()
            except BusyError:
                return None
            if found is not None and 1e3 * (time.perf_counter() - begun) > SLOW_MS:
                self._keep(device, text, found)
        with self._lock:
            self._known[device, key] = found
        return found

    def _keep(self, device: str, text: str, found: Taken) -> None:
        with self._lock:
            table = {k: v for k, v in load(FILE, device).items() if Taken.of_json(v) is not None}
            table[text] = found.to_json()
            self._kept[device] = table
            store(FILE, device, table)


@functools.cache
def worth_a_call(func: Any) -> bool:
    """Whether an operation may be called, and takes what is not known beside its results.

    Args:
        func: the operation.
    """
    return (
        func.namespace in NAMESPACES
        and not func.is_view
        and name_of(func) not in FREE
        and torch.Tag.data_dependent_output not in func.tags
    )


def may_call(leaves: list[Any], device_type: str) -> bool:
    """Whether there are tensors among arguments, all on one kind of device, and nothing unusual.

    Args:
        leaves: the arguments of a call, flat.
        device_type: "cpu" or "cuda".
    """
    tensors = [v for v in leaves if isinstance(v, torch.Tensor)]
    if not all(t.layout is torch.strided and t.device.type == device_type for t in tensors):
        return False
    others = (v for v in leaves if not isinstance(v, torch.Tensor))
    return bool(tensors) and all(isinstance(v, (*_NUMBERS, *_NAMES)) for v in others)


@functools.cache
def name_of(func: Any) -> str:
    """The name of an operation without its namespace and overload: "mm"."""
    return str(func._schema.name).partition("::")[2]


def in_rows(matrix: torch.Tensor) -> bool:
    """Whether the rows, or the columns, of a matrix or batch of matrices lie one by one."""
    *batch, high, wide = matrix.shape
    *over, down, along = matrix.stride()
    rows = along == 1 and down >= max(1, wide)
    columns = down == 1 and along >= max(1, high)
    whole = all(n == 1 or s >= high * wide for n, s in zip(batch, over, strict=True))
    return bool(matrix.numel()) and (rows or columns) and whole


def key_of(func: Any, leaves: list[Any]) -> tuple[Any, ...]:
    """A call as far as its memory depends on it, to be looked up by; with `str` of it to be kept.

    Args:
        func: the operation.
        leaves: its arguments, flat.
    """
    return func, *map(described, leaves), *_repeated(leaves)


def described(value: Any) -> Any:
    """An argument as far as a call's memory depends on it."""
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), value.stride()
    return repr(value)


def _repeated(leaves: list[Any]) -> list[tuple[int, int]]:
    """Which tensors among the arguments of a call are one."""
    first: dict[Any, int] = {}
    places = [
        (i, first.setdefault(_place(v), i))
        for i, v in enumerate(leaves)
        if isinstance(v, torch.Tensor)
    ]
    return [(i, j) for i, j in places if i != j]


def _place(value: Any) -> Any:
    """Where a tensor lies; of anything else that it is itself."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return id(value)
    lies = tuple(map(int, value.shape)), tuple(map(int, value.stride()))
    return value.untyped_storage()._cdata, int(value.storage_offset()), value.dtype, *lies


def zeros(value: torch.Tensor) -> torch.Tensor:
    """A tensor of zeros of the sizes, strides, dtype and device of another; of truths, if of bools.

    What a mask chooses is then as much as there can be.
    """
    shape, stride = tuple(map(int, value.shape)), tuple(map(int, value.stride()))
    extent = _extent(shape, stride)
    truths = value.dtype is torch.bool
    base = torch.full((extent,), truths, dtype=value.dtype, device=value.device)
    return base.as_strided(shape, stride)


def identities(value: torch.Tensor) -> torch.Tensor:
    """As `zeros`, but of ones, matrices of identities: factorisations fail on zeros."""
    made = zeros(value)
    if made.is_floating_point() or made.is_complex():
        (made.diagonal(dim1=-2, dim2=-1) if made.dim() > 1 else made).fill_(1)
    return made


def counts(value: torch.Tensor) -> torch.Tensor:
    """As `identities`, and whole numbers are ones: pivots are counted from 1, bags are not empty.

    Not for a GPU: an index beyond its dimension would be the end of the process's context.
    """
    made = identities(value)
    return made if made.is_floating_point() or made.is_complex() else made.fill_(1)


def _extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements of the shortest storage that sizes and strides fit into."""
    if 0 in shape:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))


Fill = Callable[[torch.Tensor], torch.Tensor]
"""Makes an operand up: a tensor that lies like another."""


def first_that_runs(call: Callable[[Fill], Taken | None], fills: Sequence[Fill]) -> Taken | None:
    """What a call says on the first made-up operands that it takes; None where it refuses all.

    Args:
        call: makes the call on operands of a fill.
        fills: in the order in which they are tried.

    Raises:
        BusyError: where the call does.
    """
    for fill in fills:
        with contextlib.suppress(*REFUSALS):
            return call(fill)
    return None


REFUSALS = (RuntimeError, TypeError, ValueError, IndexError)
"""What operations raise that have no memory, lack a dtype, or cannot do with made-up operands."""


def made_up(args: Any, kwargs: Any, fill: Fill = zeros) -> Any:
    """Arguments with new tensors; operands that are one stay one: some calls then copy it.

    Args:
        args: positional arguments.
        kwargs: keyword arguments.
        fill: makes a tensor like another.
    """
    made: dict[Any, Any] = {}

    def one(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        place = _place(value)
        if place not in made:
            made[place] = fill(value)
        return made[place]

    return tree_map(one, (args, kwargs))


def taken(peak: int, func: Any, given: Any, real: Any, fake: Any, rounding: int = 1) -> Taken:
    """What a real call took, by the most bytes that it held at once.

    Args:
        peak: these bytes.
        func: the operation.
        given: the operands.
        real: what the call returned.
        fake: what the fake form did. A result that it has not (the gradient of a frozen weight) is
            one that is let go at once.
        rounding: at a multiple of how many bytes the allocator hands out memory.
    """
    before = {t.untyped_storage()._cdata for t in storages_of(given)}
    pairs = list(enumerate(zip(_places(real), _places(fake), strict=False)))
    keys = [_storage_key(r) for _, (r, _) in pairs]
    kept: dict[int | None, int] = {}
    found = []
    for place, (r, f) in pairs:
        if keys[place] is None:
            kept |= {t.untyped_storage()._cdata: _size(t) for t in storages_of(r)}
        elif isinstance(f, torch.Tensor):
            kept[keys[place]] = _size(r)
            alone = keys.count(keys[place]) == 1 and keys[place] not in before
            if alone and (r.dtype, r.stride(), _size(r)) != (f.dtype, f.stride(), _size(f)):
                found.append(Lies(place, r.dtype, r.stride(), _size(r)))
    own = sum(-(-size // rounding) * rounding for key, size in kept.items() if key not in before)
    return Taken(max(0, peak - own), () if func._schema.is_mutable else tuple(found))


def refitted(out: Any, results: tuple[Lies, ...]) -> Any:
    """The results of a fake form as the real ones lie in memory.

    Args:
        out: what the fake form returned.
        results: as of `Taken`.
    """
    places = list(_places(out))
    for lies in results:
        fake = places[lies.place]
        count = lies.bytes // lies.dtype.itemsize
        flat = fake.new_empty(count, dtype=lies.dtype)
        fits = len(lies.stride) == fake.dim() and 0 < _extent(fake.shape, lies.stride) <= count
        places[lies.place] = flat.as_strided(fake.shape, lies.stride) if fits else flat
    return places[0] if isinstance(out, torch.Tensor) else type(out)(places)


def _size(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().nbytes())


def _places(out: Any) -> tuple[Any, ...]:
    """The results of an operation, one after the other; a list among them counts as one."""
    return tuple(out) if isinstance(out, (tuple, list)) else (out,)


def _storage_key(value: Any) -> int | None:
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        return int(value.untyped_storage()._cdata)
    return None


def flat(args: Any, kwargs: Any) -> list[Any]:
    """The arguments of a call, one after the other, those in lists included."""
    leaves: list[Any] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, (list, tuple)):
            leaves += value
        else:
            leaves.append(value)
    return leaves
