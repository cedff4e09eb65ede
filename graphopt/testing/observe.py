"""One step of a module as its user sees it: results, gradients, buffers, effects on arguments."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from graphopt.capture import signature as sig
from graphopt.errors import OptionError
from graphopt.replay import default_dtype, forked_rng, without_autocast
from graphopt.testing.atrest import AtRest
from graphopt.testing.inputs import copy_arguments

Upstream = dict[int, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Facts:
    """What of a result is not its values.

    Attributes:
        dtype: of the tensor.
        shape: of the tensor.
        stride: in elements, of the dimensions whose stride means something.
        requires_grad: whether a gradient flows out of it.
        shares: what it shares memory with: arguments, parameters, buffers, earlier results.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool
    shares: tuple[str, ...]


@dataclasses.dataclass
class Observed:
    """One step.

    Attributes:
        tensors: "output/i", "grad/name", "buffer/name", "input/name" to values.
        facts: of each result tensor.
        structure: of the result.
        upstream: the gradients sent in, by result.
        dropped: how many calls dropped with a probability above zero (they ran at p = 0).
    """

    tensors: dict[str, torch.Tensor | None]
    facts: tuple[Facts, ...]
    structure: sig.Structure
    upstream: Upstream
    dropped: int = 0


@dataclasses.dataclass(frozen=True)
class Plan:
    """How steps are run.

    Attributes:
        args: positional arguments, never changed.
        kwargs: keyword arguments, never changed.
        names: what to call the tensors among them.
        requires: which argument tensors get a gradient.
        backward: whether gradients are taken.
        seed: of torch's generators, and of random upstream gradients.
        given: upstream gradients by result; others are drawn.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    names: tuple[str, ...]
    requires: tuple[bool, ...]
    backward: bool
    seed: int
    given: Mapping[int, torch.Tensor] = dataclasses.field(default_factory=dict)


def observe(
    module: nn.Module,
    plan: Plan,
    upstream: Upstream | None = None,
    *,
    around: contextlib.AbstractContextManager[Any] | None = None,
    double: bool = False,
) -> Observed:
    """Run a module once, forward and backward, and put its state back.

    Args:
        module: called like any other; with `around` None its dropouts are at rest.
        plan: arguments, seed, upstream gradients.
        upstream: gradients to repeat; drawn where missing.
        around: entered around the call in the place of `AtRest`.
        double: arguments and upstream gradients in float64, autocast off.
    """
    names = plan.names
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    upstream = dict(upstream or {})
    mode = AtRest() if around is None else around
    dtype = torch.float64 if double else torch.get_default_dtype()
    with contextlib.ExitStack() as stack:
        stack.enter_context(unchanged(module))
        stack.enter_context(forked_rng(plan.seed, device))
        if double:
            stack.enter_context(without_autocast())
            stack.enter_context(default_dtype(dtype))
        args, kwargs, leaves = copy_arguments(
            plan.args, plan.kwargs, requires=plan.requires, double=double
        )
        with mode:
            result = module(*args, **kwargs)
        flat: list[torch.Tensor] = []
        structure = sig.flatten(result, flat, results=True)
        tensors: dict[str, torch.Tensor | None] = {
            f"output/{i}": y.detach().clone() for i, y in enumerate(flat)
        }
        facts = _facts(module, dict(zip(names, leaves, strict=True)), flat)
        state = {f"buffer/{k}": b.detach().clone() for k, b in module.named_buffers()}
        inputs = {f"input/{n}": t.detach().clone() for n, t in zip(names, leaves, strict=True)}
        if plan.backward:
            _fill(upstream, flat, plan)
            with without_autocast():
                tensors |= _gradients(module, dict(zip(names, leaves, strict=True)), flat, upstream)
        tensors |= state | inputs
    return Observed(tensors, facts, structure, upstream, getattr(mode, "found", 0))


def _fill(upstream: Upstream, flat: Sequence[torch.Tensor], plan: Plan) -> None:
    """An upstream gradient for each result that takes one.

    Raises:
        OptionError: for a given one that fits no result.
    """
    for i, g in plan.given.items():
        if i >= len(flat) or g.shape != flat[i].shape:
            wanted = f"is of shape {list(flat[i].shape)}" if i < len(flat) else "is not there"
            raise OptionError(
                f"upstream[{i}] is of shape {list(g.shape)}, result {i} {wanted}",
                try_="one gradient for each result that is a tensor, None for a drawn one",
            )
    for i, y in enumerate(flat):
        if not y.requires_grad or i in upstream:
            continue
        if i in plan.given:
            upstream[i] = plan.given[i]
            continue
        generator = torch.Generator().manual_seed(plan.seed + i)
        drawn = torch.randn(y.shape, generator=generator, dtype=torch.float64)
        upstream[i] = drawn.to(y.device, y.dtype)


def _gradients(
    module: nn.Module,
    arguments: Mapping[str, torch.Tensor],
    flat: Sequence[torch.Tensor],
    upstream: Upstream,
) -> dict[str, torch.Tensor | None]:
    """The gradient of every parameter and argument that requires one."""
    wrt: dict[str, torch.Tensor] = {}
    for prefix, tensors in (("", dict(module.named_parameters())), ("argument ", arguments)):
        wrt |= {f"grad/{prefix}{k}": t for k, t in tensors.items() if t.requires_grad}
    roots = [i for i, y in enumerate(flat) if y.requires_grad]
    fits = all(upstream[i].shape == flat[i].shape for i in roots)
    if not roots or not wrt or not fits:  # a result of a wrong shape is told as that
        return dict.fromkeys(wrt)
    sent = [upstream[i].to(flat[i].dtype) for i in roots]
    found = torch.autograd.grad(
        [flat[i] for i in roots], list(wrt.values()), sent, allow_unused=True
    )
    return {k: None if g is None else g.detach().clone() for k, g in zip(wrt, found, strict=True)}


def _facts(
    module: nn.Module, arguments: Mapping[str, torch.Tensor], flat: Sequence[torch.Tensor]
) -> tuple[Facts, ...]:
    owners: dict[int, set[str]] = {}

    def note(name: str, tensor: torch.Tensor) -> None:
        if tensor.layout is torch.strided and tensor.numel():
            owners.setdefault(tensor.untyped_storage()._cdata, set()).add(name)

    for name, tensor in arguments.items():
        note(f"the argument {name}", tensor)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        note(name, tensor)
    facts = []
    for i, y in enumerate(flat):
        strided = y.layout is torch.strided
        shares = owners.get(y.untyped_storage()._cdata, set()) if strided and y.numel() else set()
        stride = y.stride() if strided and y.numel() else ()
        kept = tuple(s for s, n in zip(stride, y.shape, strict=False) if n > 1)
        facts.append(Facts(y.dtype, tuple(y.shape), kept, y.requires_grad, tuple(sorted(shares))))
        note(f"result {i}", y)
    return tuple(facts)


@contextlib.contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Put parameters and buffers back afterwards, the objects and their values."""
    places: list[tuple[dict[str, Any], str, Any]] = []
    saved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for owner in module.modules():
        for cells in (owner._parameters, owner._buffers):
            for name, tensor in cells.items():
                places.append((cells, name, tensor))
                if isinstance(tensor, torch.Tensor):
                    saved[id(tensor)] = (tensor, tensor.detach().clone())
    try:
        yield
    finally:
        for cells, name, tensor in places:
            if cells.get(name) is not tensor:
                cells[name] = tensor
        with torch.no_grad():
            for tensor, value in saved.values():
                if not _same(tensor, value):
                    tensor.copy_(value)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors hold the same values, NaN equal to NaN."""
    if torch.equal(a, b):
        return True
    floats = a.is_floating_point()
    return floats and bool(((a == b) | (a.isnan() & b.isnan())).all())


def double_of(module: nn.Module) -> nn.Module:
    """A float64 copy of a module, from which nothing leads back to the module's tensors."""
    return copy.deepcopy(module).double()


def requirements(
    run: Callable[[tuple[bool, ...]], Any], asked: tuple[bool, ...], given: tuple[bool, ...]
) -> tuple[tuple[bool, ...], Any]:
    """The argument gradients that eager can give, and its run with them.

    A tensor that is written in place cannot be a leaf that requires a gradient: eager says so, and
    then the arguments are taken as they were given.
    """
    try:
        return asked, run(asked)
    except RuntimeError as error:
        if asked == given or "leaf Variable" not in str(error):
            raise
    return given, run(given)
