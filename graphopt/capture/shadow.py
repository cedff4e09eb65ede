"""A copy of a module's Python structure over the same tensors, which capture may touch freely.

`torch.export` swaps parameters for fake tensors while it traces, and a forward may set attributes;
done on a shadow, another thread that runs the source never meets a fake tensor and the source's
attributes stay as they were.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from graphopt.capture.mend import mended
from graphopt.capture.standins import stand_in
from graphopt.errors import CaptureError

SOURCE_OF = "_graphopt_source"
"""Attribute of an optimized module that holds its source; a shadow is made of the source."""

ATTACHED = "_graphopt_attached"
"""Mark on a forward that `attach` put on a module; its `previous` is what stood there before."""

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OWN = {
    "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", *_HOOKS,
    "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs",
}  # fmt: skip
"""Dicts that a shadow has of its own: a forward may register hooks at its first run."""


def instance_forward(module: nn.Module) -> Callable[..., Any] | None:
    """The forward in a module's own dict that is not an attached one; None: its class's counts."""
    own: Any = module.__dict__.get("forward")
    while getattr(own, ATTACHED, False):
        own = own.previous
    return own


def eager_forward(module: nn.Module) -> Callable[..., Any]:
    """A module's own forward, also while an optimized one is attached to it."""
    own = instance_forward(module)
    return own if own is not None else type(module).forward.__get__(module)


def shadow_of(
    module: nn.Module, forward: Callable[[Callable[..., Any], tuple[Any, ...]], Any]
) -> tuple[nn.Module, dict[int, nn.Module]]:
    """A shadow of a module tree whose root takes flat leaves.

    Args:
        module: the source; unchanged.
        forward: called with the shadow's own forward and the leaves; returns what the shadow's
            root returns.

    Returns:
        A module with the source's class name, state paths and tensors, without the root's hooks;
        and id of a shadow's module -> the source's module that it stands for.

    Raises:
        CaptureError: when a submodule is a TorchScript module.
    """
    copies: dict[int, nn.Module] = {}
    sources: dict[int, nn.Module] = {}
    root = _clone(module, copies, sources)
    links: dict[int, Any] = dict(copies)
    for copied in copies.values():
        _mend(copied, links)
    own = root.__dict__.pop("forward", None)
    source_class = type(root)
    original = own if own is not None else functools.partial(source_class.forward, root)

    inside = False

    def flat_forward(self: nn.Module, *leaves: Any, **named: Any) -> Any:
        nonlocal inside
        if inside:  # a forward that calls itself
            return original(*leaves, **named)
        inside = True
        try:
            return forward(original, leaves)
        finally:
            inside = False

    names = {"forward": flat_forward, "__module__": source_class.__module__}
    # torch.export runs the graph of a GraphModule and not its forward
    base = nn.Module if issubclass(source_class, fx.GraphModule) else source_class
    root.__class__ = type(source_class.__name__, (base,), names)
    type(root).__qualname__ = source_class.__qualname__
    for name in _HOOKS:
        root.__dict__[name] = type(root.__dict__[name])()
    return root, sources


def _clone(
    module: nn.Module, copies: dict[int, nn.Module], sources: dict[int, nn.Module]
) -> nn.Module:
    if id(module) in copies:
        return copies[id(module)]
    if isinstance(module, torch.jit.ScriptModule):
        raise CaptureError(
            f"a TorchScript module ({type(module).__name__})",
            why="its code is not Python any more and cannot be traced",
            try_="optimize the nn.Module that it was scripted from",
        )
    source = module.__dict__.get(SOURCE_OF)
    if source is not None:  # an optimized module inside a larger one
        copies[id(module)] = _clone(source, copies, sources)
        return copies[id(module)]
    copy = object.__new__(type(module))
    copy.__dict__.update(module.__dict__)
    copy.__dict__["_compiled_call_impl"] = None  # of Module.compile(): not Python any more
    if getattr(copy.__dict__.get("forward"), ATTACHED, False):
        del copy.__dict__["forward"]
        own = instance_forward(module)
        copy.__dict__.update({} if own is None else {"forward": own})
    forward = stand_in(copy)
    if forward is not None:
        copy.__dict__["forward"] = types.MethodType(forward, copy)
    copies[id(module)] = copy
    sources[id(copy)] = module
    for name in _OWN:
        copy.__dict__[name] = module.__dict__[name].copy()
    _register_plain(copy)
    for name, tensor in copy.__dict__["_parameters"].items():
        if tensor is not None and not isinstance(tensor, nn.Parameter):
            # put there by torch.func.functional_call; torch.export takes parameters only
            alias = nn.Parameter(tensor.detach(), requires_grad=tensor.requires_grad)
            copy.__dict__["_parameters"][name] = alias
    children = copy.__dict__["_modules"]
    for name, child in children.items():
        if child is not None:
            children[name] = _clone(child, copies, sources)
    return copy


def _register_plain(copy: nn.Module) -> None:
    """Make buffers of the tensors in plain attributes: a trace takes those for inputs.

    Otherwise it would run in-place operations on them, and bake in the values it reads.
    """
    for name, value in list(copy.__dict__.items()):
        plain = type(value) is torch.Tensor and value.layout is torch.strided
        if not plain or name in _OWN or (value.requires_grad and not value.is_leaf):
            continue
        if "." in name or hasattr(type(copy), name):  # the class's would be found first
            continue
        del copy.__dict__[name]
        copy.__dict__["_buffers"][name] = value
        copy.__dict__["_non_persistent_buffers_set"].add(name)


def _mend(copied: nn.Module, links: dict[int, Any]) -> None:
    """Point plain attributes that refer to a source module to its copy, and copy containers."""
    for name, value in list(copied.__dict__.items()):
        if name not in _OWN:
            copied.__dict__[name] = mended(value, links)
