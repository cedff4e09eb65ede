"""What would help a model most on a device: precision, kernels, memory. It only advises."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from graphopt.bench import bench
from graphopt.capture.export import capture
from graphopt.capture.key import ambient, autocast_dtypes
from graphopt.cost.roofline import rates_of
from graphopt.errors import BudgetError, OptionError
from graphopt.graph import ops
from graphopt.graph.body import Body
from graphopt.memory.asked import MemoryOptions
from graphopt.memory.budget import Budget, check_budget, check_resident
from graphopt.memory.facts import Facts, measure
from graphopt.memory.oracle import predict
from graphopt.memory.plan import plan
from graphopt.memory.problem import CurvePoint
from graphopt.options import check_call, check_choice, check_model, has_backward, names_checked
from graphopt.passes import PassOptions, run_pipeline
from graphopt.passes.autocast import MaterializeAutocast
from graphopt.precision import has_bf16, lowered, own_low
from graphopt.report.advice import Advice, Setting
from graphopt.report.progress import progress
from graphopt.report.table import percent, size

WORTH = 0.02
"""Share of the step below which a predicted gain in time is not worth an option."""

CHEAP = 0.10
"""Share of the step that a memory budget may cost where memory is not short."""

ROOM = 0.9
"""Share of a device's memory that a budget asks for: allocator and driver need the rest."""


@names_checked
def advise(
    model: nn.Module,
    inputs: torch.Tensor | Sequence[Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    resident_bytes: int | str = 0,
    memory: int | str | None = None,
    train: bool | None = None,
    measured: bool | None = None,
) -> Advice:
    """Say which options of `optimize` would help a model, in the order of what each would gain.

    The step is profiled first, on tensors without values: where its time and its memory go. Then
    low precision and fused kernels are tried, the greatest predicted gain first, and what a memory
    budget would cost on top of them. Nothing of the model is changed.

    Args:
        model: the model; its modes stay as they are.
        inputs: a tensor, or the positional arguments of `forward`.
        example_kwargs: the keyword arguments of `forward`.
        loss_fn: makes a scalar of forward's result; without it the result's own loss, or gradients
            of ones.
        resident_bytes: what else lies on the device (optimizer state: 8 bytes a parameter for
            AdamW in float32); "4GiB" is understood, too.
        memory: bytes of device memory that there are, or "40GiB"; by default those of the GPU.
        train: whether a step has a backward; by default where the model is in training mode,
            gradients are on, and a parameter or an input requires one.
        measured: whether every setting is run, too; by default on a GPU.

    Returns:
        The advice; printing it shows the table. `.options` are the options that are advised.

    Raises:
        OptionError: for wrong arguments, before any work.
        CaptureError: when the model cannot be captured.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU())
        >>> advise(model, torch.ones(4, 8)).settings[0].name
        'as it is'
    """
    check_model(model)
    args, kwargs = check_call(model, inputs, example_kwargs)
    check_choice("measured", measured, (None, True, False))
    if loss_fn is not None and not callable(loss_fn):
        raise OptionError("loss_fn is not callable", try_="a function of forward's result")
    check_choice("train", train, (None, True, False))
    resident = check_resident(resident_bytes)
    room = _room(memory)
    backward = has_backward(model, args, kwargs) if train is None else train
    with progress(f"advise {type(model).__name__}"):
        adviser = _Adviser(model, args, kwargs, loss_fn, resident, room, backward)
        advice = adviser.advice()
    if adviser.on_gpu if measured is None else measured:
        advice = adviser.with_measures(advice)
    return advice


@dataclasses.dataclass
class _Tried:
    """A body for some options, and what is predicted of it."""

    options: dict[str, Any]
    body: Body
    facts: Facts

    @property
    def ms(self) -> float:
        return self.facts.forward_ms + self.facts.backward_ms


class _Adviser:
    """One model on one device; bodies and facts are made as they are asked for."""

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        loss_fn: Callable[[Any], torch.Tensor] | None,
        resident_bytes: int,
        memory: int | None,
        backward: bool,
    ) -> None:
        self.model, self.args, self.kwargs, self.backward = model, args, kwargs, backward
        self.loss_fn, self.resident = loss_fn, resident_bytes
        tensor = next(iter((*model.parameters(), *model.buffers())), torch.empty(0))
        self.device, self.on_gpu = tensor.device, tensor.is_cuda
        part, self.low = own_low(model)
        self.precision = part or ("bf16" if has_bf16(self.device.type) else "fp16")
        if memory is None and self.on_gpu:
            memory = torch.cuda.get_device_properties(self.device).total_memory
        self.memory = memory
        self._bodies: dict[str | None, Body] = {}
        self._short = False  # whether the step does not fit without a plan

    def tried(self, options: dict[str, Any]) -> _Tried:
        """The body with some options of `optimize`; without any, the captured one as it is."""
        body = self._captured(options.get("precision"))
        if options:
            passes = PassOptions(fuse=options.get("fuse", True))
            body = run_pipeline(body, passes, leading=(MaterializeAutocast(),)).body
        return _Tried(options, body, measure(body, **self._circumstances(body)))

    def _captured(self, precision: str | None) -> Body:
        """The model's graph, captured once for each precision."""
        if precision not in self._bodies:
            with torch.set_grad_enabled(self.backward), lowered(self.model, precision):
                body = capture(self.model, self.args, self.kwargs).body
                body.autocast = autocast_dtypes(ambient())
            self._bodies[precision] = body
        return self._bodies[precision]

    def _circumstances(self, body: Body) -> dict[str, Any]:
        given: dict[str, Any] = {"loss_fn": self.loss_fn, "resident_bytes": self.resident}
        return {**given, "result": body.result if self.loss_fn is not None else None}

    def advice(self) -> Advice:
        """Settings in the order of their predicted gain, and the memory plan on top."""
        first = self.tried({})
        prediction = predict(first.body, **self._circumstances(first.body))
        rows = [Setting("as it is", {}, first.ms, prediction.peak_bytes)]
        left_out: list[tuple[str, str]] = []
        current = self._faster(first, rows, left_out)
        curve = self._memory(current, rows, left_out)
        rates = rates_of(self.device)
        notes = [f"predicted by the roofline of {rates.name} ({rates.source}), kernels alone"]
        if not self.on_gpu:
            notes.append("fused kernels run on NVIDIA GPUs; elsewhere nothing gets faster")
        if self.memory is not None and rows[-1].peak_bytes > self.memory:
            notes.append(
                f"the step does not fit {size(self.memory)}, whatever is recomputed: a smaller"
                " batch, which graphopt.fit finds"
            )
        if rows[-1].options.get("precision") == "fp16":
            notes.append("fp16 needs torch.amp.GradScaler around the loss")
        return Advice(
            model=type(self.model).__name__,
            device=rates.name,
            settings=tuple(rows),
            left_out=tuple(left_out),
            time_by_op=_by_op(first),
            memory_by_kind=tuple(prediction.breakdown.items()),
            curve=curve,
            notes=tuple(notes),
        )

    def _faster(
        self, first: _Tried, rows: list[Setting], left_out: list[tuple[str, str]]
    ) -> _Tried:
        """Add precision and kernels, the greater gain first, as long as a gain is there."""
        steps: dict[str, tuple[dict[str, Any], str]] = {
            "kernels": ({"fuse": True}, "op chains become fused kernels"),
        }
        if self.low:
            left_out.append(("precision", "the model is in low precision already"))
        else:
            why = "products in low precision, casts written into the graph"
            steps["precision"] = ({"precision": self.precision}, why)
        current = first
        while steps:
            tried = {}
            for name, (more, _) in steps.items():
                options = {"fuse": False, **current.options, **more}
                tried[name] = self.tried(options)
            name = min(tried, key=lambda n: tried[n].ms)
            if tried[name].ms > current.ms * (1 - WORTH):
                for n in steps:
                    change = percent(1 - tried[n].ms / current.ms)
                    left_out.append((n, f"a step would take {change} of time"))
                break
            current = tried[name]
            why = steps.pop(name)[1]
            rows.append(
                Setting(
                    f"+ {name}",
                    _written(current.options),
                    current.ms,
                    self._peak(current.body),
                    why=why,
                )
            )
        return current

    def _peak(self, body: Body) -> int:
        return predict(body, **self._circumstances(body)).peak_bytes

    def _memory(
        self, current: _Tried, rows: list[Setting], left_out: list[tuple[str, str]]
    ) -> tuple[CurvePoint, ...]:
        """Add the budget that is needed, or the tightest that costs little; gives the curve."""
        if not current.body.grad:
            left_out.append(("memory", "nothing waits for a backward in this graph"))
            return ()
        peak = rows[-1].peak_bytes
        asked = MemoryOptions(
            Budget(size=peak - 1), loss_fn=self.loss_fn, resident_bytes=self.resident
        )
        try:
            curve = plan(current.body, asked).plan.curve
        except BudgetError:
            left_out.append(("memory", "recomputing brings the peak no lower"))
            return ()
        short = self._short = self.memory is not None and peak > ROOM * self.memory
        if short:
            assert self.memory is not None
            wanted = [p for p in curve if p.peak_bytes <= ROOM * self.memory]
        else:
            wanted = [p for p in curve[::-1] if p.extra_ms <= CHEAP * current.ms]
        if not wanted or wanted[0].peak_bytes > 0.95 * peak:
            why = "no plan makes the step fit" if short else "it would save less than 5%"
            left_out.append(("memory", why))
            return curve
        point = wanted[0]
        why = f"{point.recomputed} values are computed again in backward"
        if short:
            why += f"; without it the step does not fit {size(self.memory or 0)}"
        options = _written({"fuse": False, **current.options})
        options["memory_budget"] = point.peak_bytes
        if self.resident:
            options["resident_bytes"] = self.resident
        row = Setting("+ memory", options, current.ms + point.extra_ms, point.peak_bytes, why=why)
        rows.append(row)
        return curve

    def with_measures(self, advice: Advice) -> Advice:
        """Run every setting beside eager; the first of these runs stands for the model as it is."""
        rows = list(advice.settings)
        for i, setting in enumerate(rows[1:], 1):
            found = bench(
                self.model,
                self.args,
                ("eager",),
                example_kwargs=self.kwargs,
                train=self.backward,
                loss_fn=self.loss_fn,
                seconds=1.0,
                profile=False,
                **setting.options,
            )
            for at, name in ((0, "eager"), (i, "graphopt")):
                row = found[name]
                if row.error is None and (at or rows[0].measured_ms is None):
                    rows[at] = dataclasses.replace(
                        rows[at], measured_ms=row.ms, measured_peak_bytes=row.peak_bytes
                    )
        at = borne_out(rows, self._short)
        notes = [*advice.notes, *map(_slower, rows[at + 1 :])]
        return dataclasses.replace(advice, settings=tuple(rows), notes=tuple(notes), advised=at)


def borne_out(rows: Sequence[Setting], short: bool) -> int:
    """Which setting to advise: the last whose measured time bears out that it should be added.

    Args:
        rows: each with what the rows before it have; those that were not run count as predicted.
        short: whether a budget is needed, whatever it costs.

    Example:
        >>> times = {"as it is": 9.0, "+ precision": 4.0, "+ kernels": 5.0}
        >>> borne_out([Setting(n, {}, 9.0, 1, measured_ms=ms) for n, ms in times.items()], False)
        1
    """
    at, least = 0, rows[0].measured_ms or float("inf")
    for i, row in enumerate(rows[1:], 1):
        extra = WORTH if "memory_budget" not in row.options else float("inf") if short else CHEAP
        if row.measured_ms is None or row.measured_ms <= least * (1 + extra):
            at = i
        least = min(least, row.measured_ms or least)
    return at


def _slower(row: Setting) -> str:
    return (
        f"{row.name} is not advised: measured, it costs more time than it may, and more than its"
        " kernels take by prediction; where tensors are small the host limits, which issues them"
    )


def _room(memory: int | str | None) -> int | None:
    """Bytes of device memory from what a user wrote."""
    asked = check_budget(memory, "memory", None)
    if asked is not None and asked.size is None:
        raise OptionError(f"memory is {memory!r}", try_="a number of bytes, or '40GiB'")
    return None if asked is None else asked.size


def _written(options: dict[str, Any]) -> dict[str, Any]:
    """Options as a user would write them: what is the default is left out."""
    return {name: value for name, value in options.items() if (name, value) != ("fuse", True)}


def _by_op(tried: _Tried) -> tuple[tuple[str, float], ...]:
    """Predicted milliseconds by op, forward and backward together, the longest first."""
    names = {n.name: ops.op_name(n.target) for n in tried.body.graph.nodes if callable(n.target)}
    found: dict[str, float] = {}
    for step in tried.facts.steps:
        name = "loss" if step.node is None else names.get(step.node, "other")
        found[name] = found.get(name, 0.0) + step.ms
    return tuple(sorted(found.items(), key=lambda item: -item[1]))
