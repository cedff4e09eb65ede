"""One training step on fake tensors: parameters, inputs, forward, loss and backward, all unreal.

Nothing is computed and nothing is allocated, yet autograd's own engine runs the backward, so that
every tensor comes and goes when it would in a real step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from graphopt.capture import signature as sig
from graphopt.errors import CaptureError, GraphOptError, OptionError
from graphopt.graph.body import Body
from graphopt.graph.facts import concrete
from graphopt.graph.hooks import unwatched
from graphopt.memory.device import Inside, launching_nothing
from graphopt.memory.forms import form_of
from graphopt.memory.held import held_tensors
from graphopt.memory.inner import Account, Inner, expanded
from graphopt.memory.inplace import sole, takes_over
from graphopt.memory.labels import LOSS, Label, Labels
from graphopt.memory.numbers import Numbers
from graphopt.memory.tracker import Allocation, Dispatched, StorageTracker
from graphopt.replay import without_autocast

LossFn = Callable[[Any], torch.Tensor]

OWN_LOSS = "the loss that forward returns"
GIVEN_LOSS = "loss_fn"
NO_LOSS = "a gradient as large as each result of forward (no loss_fn, and forward returns no loss)"
NO_BACKWARD = "none: the forward alone"


@dataclasses.dataclass
class FakeStep:
    """What happened in one step.

    Attributes:
        tracker: births and deaths of all storages.
        resident: the event at which the forward began.
        forward_end: the event at which it ended.
        loss_end: the event at which the loss was there and backward began.
        loss: what the backward began from, in words.
        gradients: the allocations that parameters and inputs hold as `.grad` in the end.
        unknown: operations whose memory inside could not be found out.
    """

    tracker: StorageTracker
    resident: int
    forward_end: int
    loss_end: int
    loss: str
    gradients: list[Allocation]
    unknown: tuple[str, ...] = ()

    def kind(self, made: Allocation) -> str:
        """What an allocation is for: see `Prediction.breakdown`."""
        if made.kind:
            return made.kind
        if made.born < self.loss_end:
            kept = made.died is None or made.died >= self.loss_end
            return "activations" if kept else "temporaries"
        return "temporaries"


def fake_mode() -> FakeTensorMode:
    """A mode in which a tensor that nobody made fake is one all the same."""
    return FakeTensorMode(allow_non_fake_inputs=True)


class Fakes:
    """Fake twins of real tensors; what shares a storage shares one among the twins, too.

    Args:
        mode: the mode that they belong to.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode
        self._kept: list[torch.Tensor] = []

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The twin of a tensor; a leaf that requires a gradient where the tensor does."""
        if not tensor.is_leaf:
            tensor = tensor.detach().requires_grad_(tensor.requires_grad)
        self._kept.append(tensor)
        with torch.inference_mode(False):
            twin: torch.Tensor = self.mode.from_tensor(tensor, static_shapes=True)
        if twin.is_leaf:
            twin.grad = None  # it comes with a twin of the gradient, too
        return twin

    def like(self, value: Any, needs_grad: bool | None = None) -> Any:
        """A new fake tensor of the sizes, strides and dtype of a value from a graph's metadata.

        Symbolic sizes take the example's; numbers come back as they are.
        """
        if not isinstance(value, torch.Tensor):
            return concrete(value) if isinstance(value, torch.SymInt) else value
        shape, strides = (list(map(concrete, s)) for s in (value.shape, value.stride()))
        with torch.inference_mode(False), torch.no_grad(), self.mode:
            made = torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device)
        floating = made.is_floating_point() or made.is_complex()
        needs = value.requires_grad if needs_grad is None else needs_grad
        return made.requires_grad_(bool(needs and floating))


def state_of(body: Body, device_type: str) -> dict[str, tuple[str, torch.Tensor]]:
    """Path -> (kind, tensor) of all that the root of a body holds on a kind of device.

    Args:
        body: the body.
        device_type: "cpu" or "cuda".
    """
    root: nn.Module = body.root
    found = {n: ("parameters", p) for n, p in root.named_parameters(remove_duplicate=False)}
    found |= {
        n: ("buffers", b)  # type: ignore[misc]
        for n, b in root.named_buffers(remove_duplicate=False)
    }
    found |= {n: ("buffers", t) for n, t in held_tensors(root).items()}  # type: ignore[misc]
    found |= {f"constant {n}": ("buffers", c) for n, c in body.constants.items()}  # type: ignore[misc]
    return {n: (k, t) for n, (k, t) in found.items() if t.device.type == device_type}


@contextlib.contextmanager
def autocast_of(body: Body) -> Iterator[None]:
    """The autocast that a body still runs under, and no other."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(without_autocast())
        for device, dtype in body.autocast.items():
            stack.enter_context(torch.autocast(device, dtype))
        yield


class Recorder:
    """Runs the phases of a step under a tracker, one after the other.

    Args:
        labels: says who runs the present operation.
        device: whose allocator counts.
        only: the kind of device whose memory is followed.
        inside: whether operations are those of that device: graphopt's are then followed inside,
            and torch's may be measured.
        watch: as of the tracker; of equal calls of an operator of graphopt only the first is seen
            inside.
        account: what the others are added to.
    """

    def __init__(
        self,
        labels: Labels,
        *,
        device: torch.device,
        only: str | None = None,
        inside: bool = True,
        watch: Dispatched | None = None,
        account: Account | None = None,
    ) -> None:
        self.mode = fake_mode()
        self.fakes = Fakes(self.mode)
        self.labels = labels
        self._state: list[torch.Tensor] = []
        self.leaves: dict[int, tuple[str, torch.Tensor]] = {}
        self._loss_running = False
        self._watch = watch
        self._launch = launching_nothing if inside and only == "cuda" else contextlib.nullcontext
        self.inside = Inside(torch.device(device), real=inside)
        self._numbers = Numbers() if torch.device(device).type == "cpu" else None
        self.inner = Inner(account)
        self.expanded = expanded if inside else None
        sole()  # what it counts is found outside of the modes
        self.tracker = StorageTracker(
            512 if self.inside.device.type == "cuda" else None,
            where=self.label,
            watch=self._dispatched,
            within=self.inner.within if inside else None,
            only=only,
            takes_over=takes_over,
            whole=self.inside.whole,
            form=form_of,
        )
        self.inner.tracker = self.tracker

    def _dispatched(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        backward = self.labels.in_backward()
        label = self.label()
        self.inside.add(self.tracker, label, backward, (func, args, kwargs, out))
        if self._numbers is not None:
            self._numbers.seen(self.tracker, label, func, args)
        if func.namespace == "graphopt":
            self.inner.done(label, func, args, kwargs, out)
        if self._watch is not None:
            self._watch(func, args, kwargs, out)

    def label(self) -> Label:
        """Who runs the present operation."""
        if self._loss_running and not self.labels.in_backward():
            self.labels.note(Label(LOSS, LOSS))
            return Label(LOSS, LOSS)
        return self.labels()

    def hold(self, name: str, kind: str, twin: Any, real: torch.Tensor | None = None) -> Any:
        """Count what is there before the step.

        Args:
            name: what to call it.
            kind: "parameters", "buffers", "inputs".
            twin: the fake tensor; anything else is left alone.
            real: the tensor that it stands for, whose storage may be larger.
        """
        if isinstance(twin, torch.Tensor):
            size = _bytes(real) if real is not None else None
            self.tracker.hold(twin, kind, Label(name), size)
            if real is not None:  # it is there for the whole step, whether anything reads it or not
                self._state.append(twin)
            if twin.requires_grad and twin.is_leaf:
                self.leaves[id(twin)] = (name, twin)
        return twin

    def hold_gradients(self) -> None:
        """Give every leaf a gradient that is there before the step: the second micro-batch."""
        with self.mode, torch.no_grad():
            for name, leaf in self.leaves.values():
                leaf.grad = torch.empty_like(leaf)
                self.tracker.hold(leaf.grad, "gradients", Label(name))

    def step(
        self,
        forward: Callable[[], Any],
        loss_fn: LossFn | None,
        *,
        grad: bool,
        finish: Callable[[Any], Any] = lambda result: result,
    ) -> FakeStep:
        """Run forward, loss and backward.

        Args:
            forward: runs the forward.
            loss_fn: makes a scalar of what `finish` returned, which is let go then; without it
                the result stays alive during the backward.
            grad: whether autograd records, and a backward follows.
            finish: makes the user's result of what forward returned, and drops the rest.

        Raises:
            OptionError: where loss_fn returns no scalar, or nothing requires a gradient.
        """
        tracker = self.tracker
        self.labels.name_parameters({key: name for key, (name, _) in self.leaves.items()})
        self.inside.begin(tracker)
        start = len(tracker.events)
        with (
            _quiet(),
            unwatched(),
            torch.inference_mode(False),
            torch.set_grad_enabled(grad),
            self._launch(),
            self.mode,
            tracker,
        ):
            result = finish(forward())
            forward_end = len(tracker.events)
            self._loss_running = True
            said, roots = NO_BACKWARD, list[torch.Tensor]()
            if grad:
                said, roots = _roots(result, loss_fn)
            if loss_fn is not None:
                del result  # only the loss is held, as by `loss_fn(model(inputs)).backward()`
            loss_end = len(tracker.events)
            if roots:
                with without_autocast():
                    _backward(roots, said)
            self._loss_running = False
            found = [tracker.find(t.grad) for _, t in self.leaves.values() if t.grad is not None]
        tracker.close()
        gradients = [g for g in found if g is not None]
        if said == GIVEN_LOSS and self.leaves and not gradients:
            raise OptionError(
                "loss_fn's loss depends on no parameter and no input",
                why="backward from it gave no gradient",
                try_="a loss computed from what forward returns",
            )
        for made in gradients:
            made.kind = "gradients"
        unknown = tuple(sorted(self.inside.unknown | self.inner.unknown))
        return FakeStep(tracker, start, forward_end, loss_end, said, gradients, unknown)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Torch would log at length why an operation cannot run on fake tensors: our error tells it."""
    log = logging.getLogger("torch._subclasses")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


class NoGradientError(OptionError):
    """A step is asked for of a forward whose result requires no gradient."""


def _roots(result: Any, loss_fn: LossFn | None) -> tuple[str, list[torch.Tensor]]:
    """What the backward begins from, in words and as tensors."""
    if loss_fn is not None:
        loss = _loss(loss_fn, result)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            shape = f" of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else ""
            raise OptionError(
                f"loss_fn returned a {'Tensor' if shape else type(loss).__name__}{shape}",
                try_="a function of forward's result that returns a tensor with one element",
            )
        if not loss.requires_grad:
            raise OptionError(
                "the loss requires no gradient", try_="a loss computed from what forward returns"
            )
        return GIVEN_LOSS, [loss]
    floating = [t for t in tensors_in(result) if t.requires_grad]
    own = getattr(result, "loss", None)
    if isinstance(own, torch.Tensor) and own.numel() == 1 and own.requires_grad:
        return OWN_LOSS, [own]
    scalar = next((t for t in floating if t.dim() == 0), None)
    if scalar is not None:
        return OWN_LOSS, [scalar]
    if not floating:
        raise NoGradientError(
            "nothing that forward returns requires a gradient",
            why="no parameter and no input that it comes from does",
            try_="parameters with requires_grad=True; or the forward alone (train=False, on the "
            "command line --no-train, or --mode eval for advise)",
        )
    return NO_LOSS, floating


def _loss(loss_fn: LossFn, result: Any) -> Any:
    """What loss_fn makes of the result of forward; what it raises is told as its own fault."""
    try:
        return loss_fn(result)
    except GraphOptError:
        raise
    except Exception as error:
        text = (str(error).strip().splitlines() or [""])[0]
        given = "Tensor" if isinstance(result, torch.Tensor) else type(result).__name__
        raise OptionError(
            f"loss_fn raised {type(error).__name__}: {text}"[:500],
            why=f"it is called with what forward returns, a {given}, whose tensors have sizes and "
            "dtypes but no values",
            try_="a function of that alone, without .item() or branches on values",
        ) from error


def _backward(roots: Sequence[torch.Tensor], said: str) -> None:
    if said == NO_LOSS:
        torch.autograd.backward(list(roots), [torch.empty_like(t) for t in roots])
    else:
        torch.autograd.backward(list(roots))


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Every tensor in a nested result."""
    leaves: list[Any] = []
    try:
        sig.flatten(value, leaves, results=True)
    except CaptureError:  # of a class that nobody can look into
        leaves = tree_leaves(value)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _bytes(tensor: torch.Tensor) -> int | None:
    return tensor.untyped_storage().nbytes() if tensor.layout is torch.strided else None


BENCH = "graphopt.bench(model, inputs), which measures a real step"


def told(error: Exception, what: str, cure: str = BENCH) -> GraphOptError:
    """The error to raise where a step cannot be followed on fake tensors."""
    if isinstance(error, GraphOptError):
        return error
    text = (str(error).strip().splitlines() or [""])[0]
    return GraphOptError(
        f"the memory of {what} cannot be predicted",
        why=f"on tensors without values it raised {type(error).__name__}: {text}"[:500],
        try_=cure,
    )
