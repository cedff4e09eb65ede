"""The oracle: the peak memory of a training step of a body, without a step being run.

The body's own program runs forward, loss and backward on fake tensors, through the real autograd
engine; every storage is followed. On the CPU the result is the allocator's own peak to the byte.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from graphopt.emit import ParamRef, Program
from graphopt.graph.body import Body
from graphopt.graph.record import Site, site_of
from graphopt.memory.allocator import allocated_curve
from graphopt.memory.fakestep import (
    FakeStep,
    LossFn,
    Recorder,
    autocast_of,
    state_of,
    told,
)
from graphopt.memory.labels import LOSS, Label, Labels, lines_of
from graphopt.memory.tracker import Allocation
from graphopt.remat import scope

KINDS = (
    "parameters",
    "buffers",
    "inputs",
    "gradients",
    "activations",
    "temporaries",
    "workspaces",
    "slack",
    "resident",
)
"""What memory is for, in the order in which it is told; "slack" is what CUDA's allocator hands out
in its blocks beyond what was asked for (see `graphopt.memory.allocator`)."""


@dataclasses.dataclass(frozen=True)
class Holder:
    """A storage that is alive at the peak.

    Attributes:
        name: the node that made it, or the parameter, buffer or input that it is.
        phase: "forward", "loss" or "backward" (then it belongs to the backward of that node).
        kind: one of `KINDS`.
        bytes: as the allocator hands it out.
        op: the operation that returned it, "" for what was there before.
        dtype: of its first tensor.
        shape: likewise.
        site: module and line that the node came from; empty where it came from none.
    """

    name: str
    phase: str
    kind: str
    bytes: int
    op: str
    dtype: str
    shape: tuple[int, ...]
    site: Site = dataclasses.field(default_factory=lambda: Site("", ""))

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class Moment:
    """One stretch of the timeline: what one node did, forward or backward.

    Attributes:
        name: the node; a parameter for the arrival of its gradient.
        phase: "forward", "loss" or "backward".
        peak_bytes: the most bytes that were alive in it.
        end_bytes: bytes alive at its end.
    """

    name: str
    phase: str
    peak_bytes: int
    end_bytes: int


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The memory of one step, as predicted.

    Attributes:
        peak_bytes: the most bytes that the allocator has handed out at once, with all that is
            there before the step and `resident_bytes`.
        where: whose work the peak falls into: a node and its phase.
        breakdown: bytes at the peak by `KINDS`; they sum up to the peak.
        live: what is alive at the peak, the largest first; with the slack and `resident_bytes` it
            sums up to the peak.
        timeline: the step from its beginning to its end.
        start_bytes: before the forward.
        end_bytes: after the backward, gradients in place.
        saved_bytes: activations that wait for the backward when it begins.
        loss: what the backward began from, in words.
        device: whose allocator it is.
        notes: what is assumed.
    """

    peak_bytes: int
    where: Label
    breakdown: dict[str, int]
    live: tuple[Holder, ...]
    timeline: tuple[Moment, ...]
    start_bytes: int
    end_bytes: int
    saved_bytes: int
    loss: str
    device: str
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return dataclasses.asdict(self)


def predict(
    body: Body,
    *,
    loss_fn: LossFn | None = None,
    resident_bytes: int = 0,
    gradients_resident: bool = False,
    device: torch.device | str | None = None,
    result: Callable[[Sequence[Any]], Any] | None = None,
) -> Prediction:
    """The peak memory of one training step of a body.

    Gradients are accumulated into `.grad` as a training step does it, from
    `zero_grad(set_to_none=True)`. Nothing of the body, its parameters, their gradients or the
    random state is touched.

    Args:
        body: what to run; where it was captured without gradients, the forward alone.
        loss_fn: makes a scalar of the result of forward, which is let go then: the step is
            `loss_fn(model(inputs)).backward()`. None: the loss that forward returns (its `.loss`,
            or the first scalar that requires a gradient), else a gradient as large as each result;
            the result stays alive during the backward, as a caller may hold it.
            `lambda out: out.loss` tells that only the loss is kept.
        resident_bytes: what else lies on the device, such as the state of an optimizer.
        gradients_resident: the parameters have gradients before the step already (the second
            micro-batch of a step, or `zero_grad(set_to_none=False)`).
        device: "cuda" to count a body on the CPU as a GPU's allocator would (an estimate: the CPU's
            operations save other things than a GPU's); by default the body's own device.
        result: makes the result of forward, as `loss_fn` takes it, of the body's outputs; by
            default the only one, or a tuple of all.

    Raises:
        OptionError: where loss_fn returns no scalar, or nothing requires a gradient.
        GraphOptError: where an operation cannot run on tensors without values.

    Example:
        >>> from graphopt.capture.export import capture
        >>> body = capture(torch.nn.Linear(4, 2), (torch.ones(3, 4),)).body
        >>> found = predict(body, loss_fn=lambda y: y.sum())
        >>> found.start_bytes == (4 * 2 + 2 + 3 * 4) * 4  # parameters and input, in float32
        True
    """
    run = run_body(
        body, loss_fn, gradients_resident=gradients_resident, device=device, result=result
    )
    return summarize(run, Sites(body), resident_bytes=resident_bytes, device=_device(body, device))


def run_body(
    body: Body,
    loss_fn: LossFn | None = None,
    *,
    gradients_resident: bool = False,
    device: torch.device | str | None = None,
    result: Callable[[Sequence[Any]], Any] | None = None,
) -> FakeStep:
    """Run the program of a body for one step on fake tensors; arguments as of `predict`."""
    program = Program(body, "memory")
    running = lines_of(program.function.__code__, program.text, lambda: Label(""))
    wanted = _device(body, device)
    recorder = Recorder(
        Labels(running),
        device=wanted,
        only=body.device.type,
        inside=wanted.type == body.device.type,
    )
    state = _hold_state(recorder, body, program)
    inputs = [
        recorder.hold(n.name, "inputs", recorder.fakes.like(n.meta.get("val")))
        for n in body.placeholders
    ]
    if gradients_resident:
        recorder.hold_gradients()

    def forward() -> Any:
        with autocast_of(body), scope(program.recipes):
            values = program.function(state, *inputs)
            _write(body, values, inputs, program)
        return values

    def finish(values: Any) -> Any:
        own = values[: body.user_outputs]
        if result is not None:
            return result(own)
        return own[0] if len(own) == 1 else tuple(own)

    try:
        return recorder.step(forward, loss_fn, grad=body.grad, finish=finish)
    except Exception as error:
        raise told(error, type(body.root).__name__) from error


def _hold_state(recorder: Recorder, body: Body, program: Program) -> list[torch.Tensor]:
    """Count all state of the root; the twins of what the program reads, in its order."""
    for path, (kind, tensor) in state_of(body, body.device.type).items():
        recorder.hold(path, kind, recorder.fakes.of(tensor), tensor)
    return [_twin(recorder, ref) for ref in program.refs]


def _twin(recorder: Recorder, ref: ParamRef) -> torch.Tensor:
    real = ref.read()
    twin: torch.Tensor = recorder.hold(ref.path, "buffers", recorder.fakes.of(real), real)
    return twin


def _write(body: Body, values: Sequence[Any], inputs: Sequence[Any], program: Program) -> None:
    """What the epilogue writes back: copies into what is there already."""
    if not body.mutations:
        return
    names = [n.name for n in body.placeholders]
    with torch.no_grad():
        for m in body.mutations:
            if m.kind == "input":
                inputs[names.index(m.target)].detach().copy_(values[m.output])


def _device(body: Body, device: torch.device | str | None) -> torch.device:
    return body.device if device is None else torch.device(device)


class Sites:
    """Where the nodes of a body came from, by name."""

    def __init__(self, body: Body) -> None:
        self._nodes = {n.name: n for n in body.graph.nodes}

    def __call__(self, label: Label) -> Site:
        """The place of a label; empty for what is no node."""
        node = self._nodes.get(label.name)
        return site_of(node) if node is not None else Site("", "")


def summarize(
    run: FakeStep,
    sites: Callable[[Label], Site],
    *,
    resident_bytes: int,
    device: torch.device,
) -> Prediction:
    """The prediction that a step amounts to.

    Args:
        run: the step.
        sites: where a label came from.
        resident_bytes: what else lies on the device.
        device: whose allocator it is.
    """
    tracker = run.tracker
    curve = curve_of(run, device)
    peak = tracker.peak(start=max(0, run.resident - 1), curve=curve)
    breakdown = dict.fromkeys(KINDS, 0)
    for made in peak.live:
        breakdown[run.kind(made)] += made.bytes
    breakdown["slack"] = peak.bytes - sum(breakdown.values())
    breakdown["resident"] = resident_bytes
    saved = [a for a in tracker.live_at(run.loss_end - 1) if run.kind(a) == "activations"]
    event = tracker.events[peak.event] if peak.event < len(tracker.events) else -1
    return Prediction(
        peak_bytes=peak.bytes + resident_bytes,
        where=tracker.allocations[event].label if event >= 0 else Label(""),
        breakdown=breakdown,
        live=tuple(holder(a, run.kind(a), sites) for a in peak.live),
        timeline=timeline(run, curve, resident_bytes),
        start_bytes=resident_bytes + (curve[run.resident - 1] if run.resident else 0),
        end_bytes=resident_bytes + (curve[-1] if curve else 0),
        saved_bytes=sum(a.bytes for a in saved),
        loss=run.loss,
        device=str(device),
        notes=tuple(f"what {op} takes inside is not known" for op in run.unknown),
    )


def curve_of(run: FakeStep, device: torch.device) -> list[int]:
    """Bytes that the allocator of a device has handed out after each event of a step."""
    tracker = run.tracker
    if device.type != "cuda":
        return tracker.curve()
    return allocated_curve(tracker.allocations, tracker.events, run.resident)


def holder(made: Allocation, kind: str, sites: Callable[[Label], Site]) -> Holder:
    """An allocation as it is told."""
    label = made.label or Label("")
    return Holder(
        name=label.name,
        phase=label.phase,
        kind=kind,
        bytes=made.bytes,
        op=made.op,
        dtype=str(made.dtype).removeprefix("torch."),
        shape=made.shape,
        site=sites(label),
    )


def timeline(run: FakeStep, curve: Sequence[int], resident_bytes: int) -> tuple[Moment, ...]:
    """The step as stretches of one node each; a stretch begins with a birth."""
    tracker = run.tracker
    moments: list[Moment] = []
    for at in range(run.resident, len(curve)):
        event, live = tracker.events[at], curve[at] + resident_bytes
        label = tracker.allocations[event].label if event >= 0 else None
        last = moments[-1] if moments else None
        if label is not None and (
            last is None or (last.name, last.phase) != (label.name, label.phase)
        ):
            moments.append(Moment(label.name, label.phase, live, live))
        elif last is not None:
            moments[-1] = Moment(last.name, last.phase, max(last.peak_bytes, live), live)
    return tuple(moments)


__all__ = ["KINDS", "LOSS", "Holder", "Moment", "Prediction", "predict", "run_body", "summarize"]
