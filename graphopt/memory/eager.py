"""The memory of a model as it is: its own forward runs on a fake copy of it.

No graph is captured: values live as long as the model's own code lets them, and an operation is
told by the module and the line that ran it.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeCopyMode
from torch.utils._pytree import tree_leaves, tree_map

import graphopt
from graphopt.errors import GraphOptError
from graphopt.graph.record import Site
from graphopt.memory.fakestep import BENCH, FakeStep, LossFn, Recorder, told
from graphopt.memory.held import held_tensors
from graphopt.memory.labels import Label, Labels

_TORCH = os.path.dirname(torch.__file__) + os.sep
_HERE = os.path.dirname(graphopt.__file__) + os.sep
_CALL = nn.Module._call_impl.__code__


def run_model(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    loss_fn: LossFn | None = None,
    grad: bool = True,
    gradients_resident: bool = False,
    device: torch.device | str | None = None,
) -> tuple[FakeStep, Callable[[Label], Site]]:
    """Run a model for one step on fake tensors.

    Args:
        model: the model; it is copied without its data, and not changed.
        args: positional arguments of its forward.
        kwargs: keyword arguments.
        loss_fn: makes a scalar of the result.
        grad: whether a backward follows.
        gradients_resident: whether there are gradients before the step.
        device: whose allocator counts; by default the one that the model is on.

    Returns:
        The step, and where a label of it came from.

    Raises:
        OptionError: where loss_fn returns no scalar, or nothing requires a gradient.
        GraphOptError: where the model cannot be copied, or needs values to run.

    Example:
        >>> step, _ = run_model(nn.Linear(4, 2), (torch.ones(3, 4),), {}, loss_fn=torch.sum)
        >>> step.tracker.allocations[step.resident].op
        'aten.addmm.default'
    """
    here = device_of(model, args, kwargs)
    wanted = here if device is None else torch.device(device)
    modules: dict[int, str] = {}
    recorder = Recorder(
        Labels(lambda: _running(modules)),
        device=wanted,
        only=here.type,
        inside=wanted.type == here.type,
    )
    twins: dict[int, Any] = {}  # id of an object -> its copy
    try:
        with FakeCopyMode(recorder.fakes.mode):
            twin = copy.deepcopy(model, twins)
    except Exception as error:
        raise GraphOptError(
            f"the memory of {type(model).__name__} cannot be predicted",
            why=f"copying it without its data raised {type(error).__name__}: {error}"[:500],
            try_=BENCH,
        ) from error
    modules.update((id(m), path) for path, m in twin.named_modules())
    _hold(recorder, model, twin)
    for path, tensor in held_tensors(model).items():
        recorder.hold(path, "buffers", twins.get(id(tensor)), tensor)
    fakes = tree_map(lambda v: _fake(recorder, v), (tuple(args), dict(kwargs)))
    for i, value in enumerate(tree_leaves(fakes)):
        recorder.hold(f"input {i}", "inputs", value)
    if gradients_resident:
        recorder.hold_gradients()

    def forward() -> Any:
        result = twin(*fakes[0], **fakes[1])
        torch.clear_autocast_cache()  # as at the end of a `with torch.autocast` around the forward
        return result

    try:
        step = recorder.step(forward, loss_fn, grad=grad)
    except Exception as error:
        cure = f"{BENCH}; or the optimized module, which need not run the model's own code"
        raise told(error, type(model).__name__, cure) from error
    classes = {path: type(m).__name__ for path, m in twin.named_modules()}
    return step, lambda label: _site(label, classes)


def device_of(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.device:
    """Where a model computes: the first device of its state and inputs that is not the CPU."""
    tensors = [*model.parameters(), *model.buffers(), *tree_leaves((args, dict(kwargs)))]
    devices = [t.device for t in tensors if isinstance(t, torch.Tensor)]
    return next((d for d in devices if d.type != "cpu"), torch.device("cpu"))


def _fake(recorder: Recorder, value: Any) -> Any:
    return recorder.fakes.of(value) if isinstance(value, torch.Tensor) else value


def _hold(recorder: Recorder, model: nn.Module, twin: nn.Module) -> None:
    """Count the state of the copy, with the sizes of the real storages."""
    for kind, real, fake in (
        ("parameters", model.named_parameters, twin.named_parameters),
        ("buffers", model.named_buffers, twin.named_buffers),
    ):
        sizes = dict(real(remove_duplicate=False))
        for path, tensor in fake(remove_duplicate=False):
            if tensor.is_leaf:
                tensor.grad = None
            recorder.hold(path, kind, tensor, sizes.get(path))


def _running(modules: Mapping[int, str]) -> Label:
    """The innermost module that runs, and the innermost line that is not torch's or graphopt's."""
    frame: Any = sys._getframe(1)
    place = ""
    while frame is not None:
        code = frame.f_code
        if code is _CALL:
            path = modules.get(id(frame.f_locals.get("self")))
            if path is not None:
                return Label(path or "(root)", place=place)
        elif not place and _is_the_users(code.co_filename):
            place = f"{code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return Label("", place=place)


def _is_the_users(filename: str) -> bool:
    return not filename.startswith((_TORCH, _HERE, "<"))


def _site(label: Label, classes: Mapping[str, str]) -> Site:
    path = "" if label.name == "(root)" else label.name
    file, _, line = label.place.rpartition(":")
    known = classes.get(path, "") if label.name else ""
    return Site(path, known, file or None, int(line) if line.isdigit() else None)
