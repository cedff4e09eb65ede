"""What `torch.export` would drop without a word, detected while it traces.

A custom `autograd.Function` loses its backward, tensor hooks and inner gradients vanish. During a
capture the entry points of these are replaced by ones that refuse by name; calls from other threads
go through to the originals. What runs under `torch.utils.checkpoint` is inlined, and its nodes are
marked with the number of their region, for a later pass to recompute.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import random
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils.checkpoint
from torch import fx, nn
from torch.nn.modules import module as nn_module

from graphopt.capture.failure import user_frame
from graphopt.errors import CaptureError
from graphopt.graph.edit import REGION

_HOOKS = {
    "_forward_hooks": "forward hook",
    "_forward_pre_hooks": "forward pre-hook",
    "_backward_hooks": "backward hook",
    "_backward_pre_hooks": "backward pre-hook",
}
GLOBAL_HOOKS: dict[str, dict[int, Any]] = {
    name: hooks
    for name, hooks in vars(nn_module).items()
    if name.startswith("_global_") and name.endswith("_hooks") and "registration" not in name
}
"""The hooks of every module of the process, by torch's name for them."""


_HARMLESS = ("transformers.utils.output_capturing", "transformers.modeling_utils")


def foreign(dicts: list[dict[int, Any]]) -> bool:
    """Whether any of these hooks would be lost in a graph.

    Hugging Face's recorders of hidden states, attentions and router logits would not: they do
    nothing but hand values on to the forward around them, which a trace follows. Nor would the hook
    that makes the embeddings require a gradient, which activation checkpointing switches on: where
    results then require one that would not otherwise, capture says so.
    """
    hooks = (h for d in dicts if d for h in d.values())
    return any(getattr(h, "__module__", None) not in _HARMLESS for h in hooks)


def refuse_hooks(module: nn.Module) -> None:
    """Refuse a module tree that holds hooks below its root.

    Raises:
        CaptureError: names the submodule and the kind of hook. Hooks of the root are fine, since
            they run around the captured graph.
    """
    for name, hooks in GLOBAL_HOOKS.items():
        if hooks:
            kind = name.removeprefix("_global_").removesuffix("s").replace("_", " ")
            raise _hooked(f"a global {kind} (of every module of the process)", hooks)
    for path, child in module.named_modules():
        if child is module:
            continue
        for name, kind in _HOOKS.items():
            hooks = child.__dict__.get(name) or {}
            lost = {k: h for k, h in hooks.items() if foreign([{k: h}])}
            if lost:
                raise _hooked(f"a {kind} on the submodule {path!r}", lost)


def _hooked(what: str, hooks: dict[int, Any]) -> CaptureError:
    function = next(iter(hooks.values()))
    label = getattr(function, "__qualname__", type(function).__name__)
    return CaptureError(
        what,
        at=_place(function),
        why=f"the hook {label} would run once, on fake tensors, and never again",
        try_="remove the hook, move it to the root module, or on_error='fallback'",
    )


def hook_dicts(modules: list[nn.Module]) -> list[dict[int, Any]]:
    """The hooks of a module tree's submodules (its root first, which may have some), and global."""
    return [*(m.__dict__[h] for m in modules[1:] for h in _HOOKS), *GLOBAL_HOOKS.values()]


class _Regions:
    """The calls of `torch.utils.checkpoint` during a trace.

    Attributes:
        now: the region that runs, the outermost of nested ones; None outside.
    """

    def __init__(self) -> None:
        self.now: int | None = None
        self._count = 0

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """One region."""
        before = self.now
        if before is None:
            self._count += 1
            self.now = self._count
        try:
            yield
        finally:
            self.now = before

    def watched_create(self, original: Any, here: Any) -> Any:
        """`Graph.create_node` that marks what a region makes."""

        def create_node(graph: fx.Graph, *args: Any, **kwargs: Any) -> fx.Node:
            node = original(graph, *args, **kwargs)
            if self.now is not None and here():
                node.meta[REGION] = self.now
            return node

        return create_node

    def watched_checkpoint(self, original: Any, here: Any) -> Any:
        """Checkpointing without reentrant autograd: runs the function as a region."""
        signature = inspect.signature(original)

        def checkpoint(*args: Any, **kwargs: Any) -> Any:
            if not here() or not torch.is_grad_enabled():
                yield from original(*args, **kwargs)
                return
            contexts = signature.bind(*args, **kwargs).arguments.get("context_fn")
            if contexts not in (None, torch.utils.checkpoint.noop_context_fn):
                raise CaptureError(
                    "activation checkpointing with a context_fn (a selective policy)",
                    at=user_frame(),
                    why="capture keeps a checkpoint as a region that is recomputed; it cannot ask"
                    " a policy about ops that a graph no longer holds",
                    try_="leave context_fn out; optimize(..., memory_budget=...) chooses what to"
                    " recompute; or on_error='fallback'",
                )
            with self.inside():
                yield

        return checkpoint

    def reentrant(self, function: Any, preserve_rng_state: bool, *args: Any) -> Any:
        """`CheckpointFunction.apply`, as a region."""
        if not any(isinstance(a, torch.Tensor) and a.requires_grad for a in args):
            raise CaptureError(
                "reentrant activation checkpointing of inputs that take no gradient",
                at=user_frame(),
                why="eager then gives the parameters inside no gradients either",
                try_="checkpoint(..., use_reentrant=False)",
            )
        with self.inside():
            return function(*args)


def _place(function: Any) -> str | None:
    code = getattr(function, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno} in {function.__qualname__}" if code else None


@contextlib.contextmanager
def watching() -> Iterator[None]:
    """Refuse, during the block and in this thread, what export drops in silence.

    Raises:
        CaptureError: from inside the traced forward, with the user's line.
    """
    thread = threading.get_ident()
    saved: list[tuple[Any, str, Any]] = []

    def replace(owner: Any, name: str, make: Any) -> None:
        own = owner.__dict__.get(name)  # None where a base class has it
        saved.append((owner, name, own))
        original = getattr(owner, name) if own is None else own
        setattr(owner, name, make(original, lambda: threading.get_ident() == thread))

    regions = _Regions()
    replace(fx.Graph, "create_node", regions.watched_create)
    replace(torch.autograd.Function, "apply", functools.partial(_watched_apply, regions))
    checkpointing = "_checkpoint_without_reentrant_generator"
    if hasattr(torch.utils.checkpoint, checkpointing):
        replace(torch.utils.checkpoint, checkpointing, regions.watched_checkpoint)
    replace(torch.autograd, "grad", _refusing("an inner torch.autograd.grad"))
    replace(torch.autograd, "backward", _refusing("an inner backward"))
    for name in ("register_hook", "register_post_accumulate_grad_hook"):
        if name in torch.Tensor.__dict__:
            replace(torch.Tensor, name, _refusing(f"Tensor.{name} in forward"))
    replace(torch.Tensor, "retain_grad", _refusing("Tensor.retain_grad in forward"))
    replace(torch.inference_mode, "__enter__", _watched_inference)
    hooks = torch.autograd.graph.saved_tensors_hooks
    replace(
        hooks, "__enter__", _refusing("hooks on saved tensors (saved_tensors_hooks) in forward")
    )
    for owner, name in _seeding():
        replace(owner, name, _refusing(f"{owner.__name__}.{name} in forward"))
    try:
        yield
    finally:
        for owner, name, own in reversed(saved):
            if own is None:
                delattr(owner, name)
            else:
                setattr(owner, name, own)


class Draws:
    """Random draws outside torch during a trace: from Python's and numpy's global generators.

    Their states tell whether anybody drew; a profile of this thread tells who drew from Python's.
    """

    def __init__(self, *, profiled: bool) -> None:
        self._python, self._numpy = random.getstate(), _numpy_state()
        self._profiled = profiled
        self.place: str | None = None
        self._drew = False

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Note this thread's draws during the block, where that was asked for (it is slow)."""
        before = sys.getprofile()
        if self._profiled:
            sys.setprofile(self._note)
        try:
            yield
        finally:
            if self._profiled:
                sys.setprofile(before)

    def _note(self, frame: types.FrameType, event: str, function: Any) -> None:
        if event == "c_call" and getattr(function, "__self__", None) is _PYTHONS:
            self.place = self.place or user_frame()
            self._drew = True

    def seen(self) -> str | None:
        """Which generator was drawn from; without a profile, by whichever thread."""
        if self._drew or (not self._profiled and random.getstate() != self._python):
            return "Python's random module"
        now = _numpy_state()
        if self._numpy is not None and (
            now[2:] != self._numpy[2:] or (now[1] != self._numpy[1]).any()
        ):
            return "numpy's global generator"
        return None

    def restore(self) -> None:
        """Set the generators back to where they were."""
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)


_PYTHONS = random.random.__self__  # type: ignore[attr-defined]  # the generator of the module


def drawing(drawn: str, at: str | None = None) -> CaptureError:
    """The error for a forward that draws random numbers outside torch."""
    return CaptureError(
        f"forward draws from {drawn}",
        at=at,
        why="the drawn number would be baked into the graph (LayerDrop does this)",
        try_="draw with torch (torch.rand), set layerdrop=0, or on_error='fallback'",
    )


def _seeding() -> Iterator[tuple[Any, str]]:
    """Functions that set the state of a generator (`fork_rng` sets it back through them)."""
    for owner in (torch, torch.random, torch.cuda, torch.cuda.random):
        for name in ("manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state"):
            if isinstance(owner.__dict__.get(name), types.FunctionType):
                yield owner, name


def _watched_apply(regions: _Regions, original: Any, here: Any) -> Any:
    function = original.__func__ if isinstance(original, classmethod) else original

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        # of a registered operator (torch.library), which stays whole in the graph
        operator = cls.__module__.startswith(("graphopt.", "torch._library."))
        if here() and not operator and torch.is_grad_enabled():
            if cls.__module__ == "torch.utils.checkpoint":
                return regions.reentrant(*args, **kwargs)
            tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
            if any(t.requires_grad for t in tensors):
                raise CaptureError(
                    f"a custom autograd.Function ({cls.__qualname__})",
                    at=user_frame(),
                    why="torch.export keeps its forward and drops its backward",
                    try_="write it with differentiable operations, or on_error='fallback'",
                )
        return function(cls, *args, **kwargs)

    return classmethod(apply)


def _watched_inference(original: Any, here: Any) -> Any:
    refuse = _refusing("torch.inference_mode in forward")(original, here)

    def enter(mode: Any) -> Any:
        # where nothing is recorded outside, it changes no value and no gradient
        return (refuse if mode.mode and torch.is_grad_enabled() else original)(mode)

    return enter


def _refusing(what: str) -> Any:
    def make(original: Any, here: Any) -> Any:
        def refuse(*args: Any, **kwargs: Any) -> Any:
            if here():
                raise CaptureError(
                    what,
                    at=user_frame(),
                    why="it has no place in a captured forward: torch.export drops it",
                    try_="move it out of forward, or on_error='fallback'",
                )
            return original(*args, **kwargs)

        return refuse

    return make


def _numpy_state() -> Any:
    numpy = sys.modules.get("numpy")
    return numpy.random.get_state() if numpy is not None else None
