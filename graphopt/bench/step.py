"""One step of a variant, and the care that nothing of the user's is changed by it."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from graphopt.bench.trace import synchronize
from graphopt.capture import signature as sig
from graphopt.errors import CaptureError, OptionError

Params = Iterable[torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Plan:
    """What every variant does in one step.

    Attributes:
        args: positional arguments of forward.
        kwargs: keyword arguments.
        train: backward follows the forward; else gradients are off.
        autocast: the dtype of autocast around forward and loss, None for what the caller has.
        device: where the model is.
        loss_fn: makes a scalar of forward's result, None for its own loss or random gradients.
        optimizer: steps after backward, None for no such step.
        modules: whose gradients are dropped after each step.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    train: bool
    autocast: torch.dtype | None
    device: torch.device
    loss_fn: Callable[[Any], torch.Tensor] | None
    optimizer: torch.optim.Optimizer | None
    modules: tuple[nn.Module, ...]

    def drop_gradients(self) -> None:
        """Forget the gradients of every module and input, so that each step starts alike."""
        for tensor in (*_parameters(self.modules), *_tensors((self.args, self.kwargs))):
            tensor.grad = None

    def resident(self, module: nn.Module) -> int:
        """Bytes that a step needs before it starts: parameters, buffers, inputs, optimizer."""
        held = [*module.parameters(), *module.buffers(), *_tensors((self.args, self.kwargs))]
        if self.optimizer is not None:
            held += [t for s in self.optimizer.state.values() for t in _tensors(dict(s))]
        return storage_bytes(t for t in held if t.device.type == self.device.type)


class Step:
    """One step of one variant: forward, with `train` backward, optimizer, gradients dropped.

    Attributes:
        value: after the first step: its loss, or the mean absolute value of its results.
    """

    def __init__(self, call: Callable[..., Any], plan: Plan) -> None:
        self.call = call
        self.plan = plan
        self.value: float | None = None
        self._upstream: list[torch.Tensor] = []

    def __call__(self) -> None:
        """Run it; the device may still be at work when this returns."""
        plan = self.plan
        with contextlib.ExitStack() as stack:
            if plan.train:
                stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.set_grad_enabled(plan.train))
            with contextlib.ExitStack() as inner:
                if plan.autocast is not None:
                    inner.enter_context(torch.autocast(plan.device.type, plan.autocast))
                result = self.call(*plan.args, **plan.kwargs)
                loss = self._loss(result)
            if self.value is None:
                self.value = _value(result if loss is None else loss)
            if plan.train:
                self._backward(result, loss)
                if plan.optimizer is not None:
                    plan.optimizer.step()
                plan.drop_gradients()

    def _loss(self, result: Any) -> torch.Tensor | None:
        if self.plan.loss_fn is None:
            loss = getattr(result, "loss", None)
            return loss if isinstance(loss, torch.Tensor) and loss.numel() == 1 else None
        loss = self.plan.loss_fn(result)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            shape = f" of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else ""
            raise OptionError(
                f"loss_fn returned a {type(loss).__name__}{shape}",
                try_="a function of forward's result that returns a tensor with one element",
            )
        return loss

    def _backward(self, result: Any, loss: torch.Tensor | None) -> None:
        roots = [loss] if loss is not None else _tensors(result)
        roots = [t for t in roots if t.requires_grad]
        if not roots:
            raise OptionError(
                "nothing that forward returns requires a gradient",
                try_="train=False, to measure the forward alone",
            )
        if loss is not None:
            torch.autograd.backward(roots)
            return
        if [t.shape for t in self._upstream] != [t.shape for t in roots]:
            self._upstream = [torch.randn_like(t) for t in roots]
        torch.autograd.backward(roots, list(self._upstream))


def first_step(step: Step, rng: Rng) -> float:
    """Run the first step from a known random state; seconds until the device has done it."""
    rng.restore()
    start = time.perf_counter()
    step()
    synchronize(step.plan.device)
    return time.perf_counter() - start


def _value(result: Any) -> float | None:
    with torch.no_grad():
        tensors = [t for t in _tensors(result) if t.numel()]
        floats = [t for t in tensors if t.is_floating_point() and t.layout == torch.strided]
        if len(tensors) == 1 and floats and floats[0].numel() == 1:
            return float(floats[0])
        means = [float(t.detach().abs().mean(dtype=torch.float64)) for t in floats]
        return sum(means) / len(means) if means else None


def _tensors(value: Any) -> list[torch.Tensor]:
    """Every tensor in a nested value."""
    leaves: list[Any] = []
    with contextlib.suppress(CaptureError):  # of a class that nobody can look into
        sig.flatten(value, leaves, results=True)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _parameters(modules: Sequence[nn.Module]) -> Iterator[torch.Tensor]:
    for module in modules:
        yield from module.parameters()


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes behind some tensors; what two of them share counts once."""
    return sum(dict(map(_storage, tensors)).values())


def _storage(tensor: torch.Tensor) -> tuple[int, int]:
    """(which storage, its bytes)."""
    if tensor.layout != torch.strided:  # its parts have storages of their own
        return id(tensor), tensor.element_size() * tensor.numel()
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def copied(value: Any, what: str, cure: str) -> Any:
    """A deepcopy.

    Raises:
        OptionError: naming what cannot be copied.
    """
    try:
        return copy.deepcopy(value)
    except Exception as error:
        raise OptionError(
            f"{what} cannot be copied", why=f"{type(error).__name__}: {error}", try_=cure
        ) from error


def detached(value: Any) -> Any:
    """The same containers with every tensor cut from the graph that made it."""
    if isinstance(value, torch.Tensor):
        return value if value.is_leaf else value.detach().requires_grad_(value.requires_grad)
    if type(value) in (tuple, list):
        return type(value)(map(detached, value))
    if type(value) is dict:
        return {k: detached(v) for k, v in value.items()}
    return value


class Rng:
    """The state of torch's generators and of Python's, as it was when this was made."""

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._python = random.getstate()
        self._cpu = torch.get_rng_state()
        self._gpu = torch.cuda.get_rng_state(device) if self._device is not None else None

    def restore(self) -> None:
        """Set the generators back."""
        random.setstate(self._python)
        torch.set_rng_state(self._cpu)
        if self._gpu is not None and self._device is not None:
            torch.cuda.set_rng_state(self._gpu, self._device)


@contextlib.contextmanager
def kept(modules: Sequence[nn.Module], rng: Rng) -> Iterator[None]:
    """Set gradients, buffers, training flags and random state back at the end of the block."""
    parameters = list(dict.fromkeys(_parameters(modules)))
    gradients = [p.grad for p in parameters]
    every = list(dict.fromkeys(m for module in modules for m in module.modules()))
    registered = {m: dict(m._buffers) for m in every}
    buffers = {b: b.detach().clone() for m in modules for b in m.buffers()}
    flags = {m: m.training for m in every}
    for p in parameters:
        p.grad = None
    try:
        yield
    finally:
        for p, gradient in zip(parameters, gradients, strict=True):
            p.grad = gradient
        for m, own in registered.items():
            m._buffers.update(own)
        with torch.no_grad():
            for buffer, value in buffers.items():
                if not torch.equal(buffer, value):
                    buffer.copy_(value)
        for m, flag in flags.items():
            m.training = flag
        rng.restore()


def chosen_optimizer(
    optimizer: bool | Callable[[list[torch.Tensor]], torch.optim.Optimizer],
    module: nn.Module,
    device: torch.device,
) -> torch.optim.Optimizer | None:
    """The optimizer of the measured copy: AdamW for True, what the user's function makes of it.

    Raises:
        OptionError: when the function returns something else.
    """
    parameters: list[torch.Tensor] = [p for p in module.parameters() if p.requires_grad]
    if optimizer is False or not parameters:
        return None
    if optimizer is True:  # it moves nothing, so that every variant meets the same weights
        return torch.optim.AdamW(parameters, lr=0.0, weight_decay=0.0, fused=device.type == "cuda")
    made = optimizer(parameters)
    if not isinstance(made, torch.optim.Optimizer):
        raise OptionError(
            f"optimizer returned a {type(made).__name__}",
            try_="True for AdamW, or a function: parameters -> torch.optim.Optimizer",
        )
    return made
