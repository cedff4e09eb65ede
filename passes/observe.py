"""See what autocast does to one op call, by running it on fake tensors under autocast."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from graphopt.graph import ops
from graphopt.graph.edit import fake_mode_of

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Observation:
    """What autocast does to one call.

    Attributes:
        casts: position among the flattened arguments -> dtype that the operand is cast to.
        dtype_argument: value for the op's `dtype` argument, None where it is left alone.
        dtypes: dtypes of the results.
        inside: whether a composite casts values that are not its operands.
        proved: whether the call with these casts gives those dtypes with autocast off.
    """

    casts: dict[int, torch.dtype]
    dtype_argument: torch.dtype | None
    dtypes: tuple[torch.dtype, ...]
    inside: bool = False
    proved: bool = True


@contextlib.contextmanager
def casting(kind: str, dtype: torch.dtype | None) -> Iterator[None]:
    """Autocast of a device type on (to a dtype, without its cache) or off (None).

    Unlike `torch.autocast` it does not ask whether the device is there: fake tensors need none.
    """
    enabled, low = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    cache = torch.is_autocast_cache_enabled()
    try:
        torch.set_autocast_enabled(kind, dtype is not None)
        torch.set_autocast_dtype(kind, low if dtype is None else dtype)
        torch.set_autocast_cache_enabled(False)
        yield
    finally:
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, low)
        torch.set_autocast_cache_enabled(cache)


@contextlib.contextmanager
def only(autocast: Mapping[str, torch.dtype]) -> Iterator[None]:
    """The autocast of a body and no other, whatever the caller stands under.

    Args:
        autocast: device type -> dtype, as `Body.autocast`; empty where the casts are written out.

    Example:
        >>> a = torch.ones(2, 2)
        >>> with torch.autocast("cpu", torch.bfloat16), only({}):
        ...     (a @ a).dtype
        torch.float32
    """
    with contextlib.ExitStack() as stack:
        for kind in ("cpu", "cuda"):
            dtype = autocast.get(kind)
            if dtype is not None or torch.is_autocast_enabled(kind):
                stack.enter_context(casting(kind, dtype))
        yield


class _SeeCasts(TorchDispatchMode):
    """Notes which operands are cast while an op runs: by a cast, or copied into another dtype.

    cuDNN's recurrent layers copy their weights so, into one flat buffer of low precision.

    Args:
        operands: the tensors among the arguments, by their places.
    """

    def __init__(self, operands: dict[int, torch.Tensor]) -> None:
        super().__init__()
        self.operands = operands
        self.casts: dict[int, torch.dtype] = {}
        self.copies = 0  # casts of distinct values

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is aten._to_copy.default and kwargs.get("dtype") is not None:
            self.copies += 1
            for i, operand in self.operands.items():
                if operand is args[0]:
                    self.casts[i] = kwargs["dtype"]
        elif func is aten.copy_.default and args[0].dtype != args[1].dtype:
            places = [i for i, operand in self.operands.items() if _same_memory(operand, args[1])]
            self.copies += bool(places)
            self.casts.update(dict.fromkeys(places, args[0].dtype))
        return func(*args, **kwargs)


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors name the same elements, be it in another shape."""
    if a is b:
        return True
    return (
        a.layout is b.layout is torch.strided
        and a.untyped_storage()._cdata == b.untyped_storage()._cdata
        and a.numel() == b.numel()
    )


@torch.inference_mode(False)  # in which a cast is one opaque `to`, and composites stay whole
def observe(
    target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], kind: str, dtype: torch.dtype
) -> Observation:
    """See what autocast does to a call, on fake tensors.

    Args:
        target: an ATen overload.
        args: its arguments with fake tensors for nodes.
        kwargs: its keyword arguments, likewise.
        kind: device type of the autocast.
        dtype: its low precision.

    Raises:
        RuntimeError: what the op itself raises under autocast (binary_cross_entropy, say).
    """
    flat, spec = tree_flatten((args, kwargs))
    flat = _concrete(flat)
    on = _run(target, flat, spec, casting(kind, dtype))
    off = _run(target, flat, spec, casting(kind, None), may_fail=True)  # refuses unlike dtypes
    casts = {i: d for i, d in on.casts.items() if off.casts.get(i) != d}
    # Autocast casts to one dtype, before the op begins; other casts are the op's own (attention's).
    first = next(iter(casts.values()), None)
    casts = {i: d for i, d in casts.items() if d == first}
    off = _run(target, _cast(flat, casts), spec, casting(kind, None), may_fail=True)
    dtypes, argument = dtypes_of(on.result), None
    inside = on.copies - len(casts) > off.copies  # more than the op itself casts
    if not inside and dtypes != dtypes_of(off.result):
        if takes_dtype(target):
            argument = dtypes[0]
            args, kwargs = tree_unflatten(_cast(flat, casts), spec)
            flat, spec = tree_flatten(with_dtype(target, args, kwargs, argument))
        elif not casts:  # an overload with a dtype was called in its place (norm)
            casts = {i: dtypes[0] for i, v in enumerate(flat) if is_float(v)}
            flat = _cast(flat, casts)
        off = _run(target, flat, spec, casting(kind, None), may_fail=True)
    return Observation(casts, argument, dtypes, inside, dtypes == dtypes_of(off.result))


def _concrete(flat: Sequence[Any]) -> list[Any]:
    """The same arguments with concrete sizes, on a fake mode of their own.

    Sizes have no say in casts, while an op run on symbolic ones may add guards to them.
    """
    mode = FakeTensorMode()
    made: dict[int, torch.Tensor] = {}

    def concrete(value: Any) -> Any:
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return _hint(value)
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in made:
            size, stride = (tuple(map(_hint, v)) for v in (value.shape, value.stride()))
            with mode:
                made[id(value)] = torch.empty_strided(
                    size, stride, dtype=value.dtype, device=value.device
                )
        return made[id(value)]

    return [concrete(v) for v in flat]


def _hint(value: Any) -> Any:
    """The size that a symbolic number stands for in the example; 2 where it has none."""
    if isinstance(value, (int, float)):
        return value
    hint = value.node.hint
    return 2 if hint is None else hint


def _cast(flat: Sequence[Any], casts: dict[int, torch.dtype]) -> list[Any]:
    with torch.no_grad():
        return [v.to(casts[i]) if i in casts else v for i, v in enumerate(flat)]


def with_dtype(
    target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call's arguments with its `dtype` argument set."""
    position = [name for name, _ in ops.parameters(target) or ()].index("dtype")
    if position < len(args):
        return (*args[:position], dtype, *args[position + 1 :]), kwargs
    return args, {**kwargs, "dtype": dtype}


@dataclasses.dataclass
class _Run:
    casts: dict[int, torch.dtype]
    copies: int
    result: Any


def _run(
    target: Any, flat: Sequence[Any], spec: Any, autocast: Any, may_fail: bool = False
) -> _Run:
    operands = {i: value for i, value in enumerate(flat) if isinstance(value, torch.Tensor)}
    args, kwargs = tree_unflatten(list(flat), spec)
    mode = fake_mode_of(list(flat)) or contextlib.nullcontext()
    see = _SeeCasts(operands)
    result = None
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    try:
        if may_fail:
            log.setLevel(logging.CRITICAL)  # it would report the expected failure
        with torch.no_grad(), mode, see, autocast:
            result = target(*args, **kwargs)
    except Exception:
        if not may_fail:
            raise
    finally:
        log.setLevel(level)
    return _Run(see.casts, see.copies, result)


def dtypes_of(value: Any) -> tuple[torch.dtype, ...]:
    """Dtypes of the tensors in a result."""
    return tuple(t.dtype for t in tree_leaves(value) if isinstance(t, torch.Tensor))


def is_float(value: Any) -> bool:
    """Whether a value is a floating tensor."""
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def takes_dtype(target: Any) -> bool:
    """Whether an op has a `dtype` argument."""
    return any(name == "dtype" for name, _ in ops.parameters(target) or ())
