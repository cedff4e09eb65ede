"""`graphopt.profile_memory`: where the memory of a step goes, predicted without running it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from graphopt.capture import signature as sig
from graphopt.capture.entry import Entry
from graphopt.errors import GraphOptError, OptionError
from graphopt.graph.body import Body
from graphopt.graph.ops import op_name
from graphopt.graph.record import Site
from graphopt.memory.budget import check_resident
from graphopt.memory.draw import (
    SUFFIXES,
    groups_table,
    picture,
    share,
    shares_table,
    timeline_text,
)
from graphopt.memory.eager import device_of, run_model
from graphopt.memory.fakestep import FakeStep, LossFn
from graphopt.memory.labels import LOSS, Label
from graphopt.memory.measured import measured_peak
from graphopt.memory.oracle import (
    KINDS,
    Holder,
    Prediction,
    Sites,
    curve_of,
    holder,
    run_body,
    summarize,
)
from graphopt.memory.shares import (
    ELSEWHERE,
    Group,
    Share,
    groups,
    module_names,
    module_of,
    shares,
)
from graphopt.memory.tracker import Allocation
from graphopt.module import graphopt_of
from graphopt.options import check_call, check_choice, check_shapes, names_checked
from graphopt.report.progress import progress
from graphopt.report.save import check_path, json_text, save
from graphopt.report.table import Table, percent, size
from graphopt.report.view import Code, Part, html_fragment, plain


@dataclasses.dataclass(frozen=True, repr=False)
class MemoryProfile:
    """The memory of one step of a model. Its repr is the report.

    Attributes:
        model: class name.
        optimized: whether it is the graph of an optimized module; else the model as it is.
        mode: "train" or "eval".
        step: what a step is: "forward, loss, backward" or "forward".
        prediction: peak, breakdown, what is alive at the peak, timeline.
        by_op: what each op holds.
        by_module: what each module holds, repeated blocks together.
        at_peak: what is alive at the peak, equal storages together.
        source_peak_bytes: for an optimized module the predicted peak of the model as it is; None
            where there is none.
        measured_peak_bytes: the allocator's peak in a real step, None where none was run.
        names: what the nodes of the timeline are called for a reader: op and module.
        notes: what is assumed.
    """

    model: str
    optimized: bool
    mode: str
    step: str
    prediction: Prediction
    by_op: tuple[Share, ...]
    by_module: tuple[Share, ...]
    at_peak: tuple[Group, ...]
    source_peak_bytes: int | None
    measured_peak_bytes: int | None
    names: dict[str, str]
    notes: tuple[str, ...]

    @property
    def peak_bytes(self) -> int:
        """The predicted peak."""
        return self.prediction.peak_bytes

    def parts(self) -> list[Part]:
        """What is shown, in order."""
        found = self.prediction
        kinds = tuple(
            (kind, size(held), share(held, found.peak_bytes))
            for kind, held in found.breakdown.items()
            if held
        )
        return [
            self._headline(),
            Table(("at the peak", "bytes", "share"), kinds, right=("bytes", "share")),
            shares_table("module", self.by_module, found.peak_bytes),
            shares_table("op", self.by_op, found.peak_bytes),
            groups_table(self.at_peak),
            Code(
                timeline_text(found, self.names),
                title="live bytes from the beginning of the step to its end",
            ),
            "\n".join(self.notes),
        ]

    def _headline(self) -> str:
        found = self.prediction
        what = "the graph of" if self.optimized else "as it is:"
        text = (
            f"{what} {self.model}, {self.mode}, {self.step}, on {found.device}: predicted peak "
            f"{size(found.peak_bytes)}, in {self._where()}"
        )
        if self.source_peak_bytes:
            less = 1 - found.peak_bytes / self.source_peak_bytes
            text += f"\nthe model as it is: {size(self.source_peak_bytes)} ({percent(less)})"
        if self.measured_peak_bytes:
            off = found.peak_bytes / self.measured_peak_bytes - 1
            text += f"\nmeasured: {size(self.measured_peak_bytes)} (predicted {off:+.1%})"
        return text

    def _where(self) -> str:
        label = self.prediction.where
        if label.name == LOSS:
            return str(label)
        held = next((h for h in self.prediction.live if h.name == label.name), None)
        site = str(held.site) if held is not None and held.op else label.name
        return f"the {label.phase} of {site}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "model": self.model,
            "optimized": self.optimized,
            "mode": self.mode,
            "step": self.step,
            "peak_bytes": self.peak_bytes,
            "source_peak_bytes": self.source_peak_bytes,
            "measured_peak_bytes": self.measured_peak_bytes,
            "by_op": [s.to_dict() for s in self.by_op],
            "by_module": [s.to_dict() for s in self.by_module],
            "at_peak": [g.to_dict() for g in self.at_peak],
            "notes": list(self.notes),
            "prediction": self.prediction.to_dict(),
        }

    def json(self) -> str:
        """The same as JSON text."""
        return json_text(self.to_dict())

    def save(self, path: Any) -> None:
        """Write it to a file: text (.txt), JSON (.json) or a picture (.png, .svg, .pdf).

        Args:
            path: where to; the suffix says as what.

        Raises:
            OptionError: for another suffix, a path that cannot be written, or a picture where
                matplotlib is not installed.
        """
        found = check_path(path, SUFFIXES)
        if found.suffix.lower() == ".json":
            save(found, self.json())
        elif found.suffix.lower() == ".txt":
            save(found, f"{self!r}\n")
        else:
            picture(self.prediction, self.names, self.model, found)

    def __repr__(self) -> str:
        """The report as plain text."""
        return plain(self.parts())

    def _repr_html_(self) -> str:
        return html_fragment(self.parts())


@names_checked
def profile_memory(
    model: nn.Module,
    inputs: torch.Tensor | Sequence[Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    loss_fn: LossFn | None = None,
    train: bool = True,
    resident_bytes: int | str = 0,
    gradients_resident: bool = False,
    device: str | torch.device | None = None,
    measure: bool = False,
) -> MemoryProfile:
    """Where the memory of a step goes: by op, by module, over time, and at the peak.

    Nothing is run: forward, loss and backward go through on tensors without data, so a model whose
    step would not fit in memory can be profiled, too. For an optimized module it is its graph, and
    the peak of the model as it is stands beside it.

    Args:
        model: a model, or what `optimize` or `attach` returned. It is not changed; an optimized
            module captures the graph of inputs that it has not met, as a call with them would.
        inputs: a tensor, or the positional arguments of forward.
        example_kwargs: the keyword arguments.
        loss_fn: makes a scalar of forward's result, which is let go then: what
            `loss_fn(model(inputs)).backward()` does. None: the loss that forward returns itself,
            else a gradient as large as each result (the profile says so); the result stays alive
            during the backward. `lambda out: out.loss` tells that only the loss is kept.
        train: whether a backward follows; else the forward alone, without gradients.
        resident_bytes: what else lies on the device, such as an optimizer's state (AdamW: twice
            the parameters); bytes, or "4GiB".
        gradients_resident: gradients are there before the step: the second micro-batch, or
            `zero_grad(set_to_none=False)`.
        device: "cuda" to count a model on the CPU as a GPU's allocator would, which is an
            estimate; by default the model's own device.
        measure: run a real step on a copy of the model, too, for the allocator's own peak (CUDA).

    Raises:
        OptionError: for wrong arguments, a loss that is no scalar, or nothing to differentiate.
        CaptureError: when an optimized module cannot be captured for these inputs.
        GraphOptError: when the model needs values to run.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
        >>> found = profile_memory(model, torch.ones(32, 64), loss_fn=lambda y: y.sum())
        >>> found.prediction.breakdown["parameters"] == (64 * 256 + 256 + 256 * 8 + 8) * 4
        True
    """
    _check(model, loss_fn, train, gradients_resident, measure)
    check_shapes(model)
    resident = check_resident(resident_bytes)
    opt = graphopt_of(model)
    source = model if opt is None else opt.source
    args, kwargs = check_call(source, inputs, example_kwargs)
    wanted = _device(source, args, kwargs, device)
    how = _How(source, args, kwargs, loss_fn, train, gradients_resident, wanted)
    if measure and wanted.type != "cuda":
        raise OptionError(
            "measure=True needs a model on a GPU", try_="graphopt.bench, which measures on the CPU"
        )
    with progress(f"memory of {type(source).__name__}"), torch.inference_mode(False):
        before, notes = None, list(_notes(how))
        if opt is not None:
            if wanted.type == "cpu":
                notes.append(
                    "on the CPU fused ops run their plain-torch reference: the temporaries of that "
                    "are not there on a GPU"
                )
            in_force = opt._store.last
            with torch.set_grad_enabled(train):
                entry = opt.capture(how.args, how.kwargs)
            opt._store.last = in_force or opt._store.last
            step, sites, op_of = _graph(entry, how)
            before = _source_peak(how, resident, notes)
        else:
            step, sites = how.run_source()
            op_of = _dispatched_op
        found = summarize(step, sites, resident_bytes=resident, device=wanted)
        notes += found.notes
        measured = None
        if measure:
            kept = found.breakdown["workspaces"]
            measured = measured_peak(model, how.args, how.kwargs, loss_fn, train, kept)
            measured += resident
    return _profile(how, opt is not None, step, sites, op_of, found, before, measured, notes)


@dataclasses.dataclass(frozen=True)
class _How:
    """What a step is."""

    source: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss_fn: LossFn | None
    train: bool
    gradients_resident: bool
    device: torch.device

    def run_source(self) -> tuple[FakeStep, Callable[[Label], Site]]:
        """The step of the model as it is."""
        return run_model(
            self.source,
            self.args,
            self.kwargs,
            loss_fn=self.loss_fn,
            grad=self.train,
            gradients_resident=self.gradients_resident,
            device=self.device,
        )


def _graph(
    entry: Any, how: _How
) -> tuple[FakeStep, Callable[[Label], Site], Callable[[Label, str], str]]:
    """The step of the graph that an optimized module runs for these inputs."""
    if not isinstance(entry, Entry):
        raise GraphOptError(
            "there is no graph to profile",
            why="the model could not be captured, and on_error='fallback' runs it as it is",
            try_="profile_memory(opt.source, ...), or on_error='raise', which says what is amiss",
        )
    body: Body = entry.compiled.body
    outputs = entry.capture.outputs
    step = run_body(
        body,
        how.loss_fn,
        gradients_resident=how.gradients_resident,
        device=how.device,
        result=lambda values: sig.unflatten(outputs, values),
    )
    names = {n.name: op_name(n.target) for n in body.graph.nodes if n.op == "call_function"}
    return step, Sites(body), lambda label, op: names.get(label.name) or _dispatched_op(label, op)


def _source_peak(how: _How, resident_bytes: int, notes: list[str]) -> int | None:
    """The predicted peak of the model as it is."""
    try:
        step, sites = how.run_source()
    except GraphOptError as error:
        notes.append(f"the model as it is cannot be predicted: {error.why or error.what}")
        return None
    return summarize(step, sites, resident_bytes=resident_bytes, device=how.device).peak_bytes


def _profile(
    how: _How,
    optimized: bool,
    step: FakeStep,
    sites: Callable[[Label], Site],
    op_of: Callable[[Label, str], str],
    found: Prediction,
    before: int | None,
    measured: int | None,
    notes: list[str],
) -> MemoryProfile:
    curve = curve_of(step, how.device)
    peak = step.tracker.peak(start=max(0, step.resident - 1), curve=curve).live

    def held(made: Allocation) -> Holder:
        return holder(made, step.kind(made), sites)

    paths = {a.index: module_of(held(a)) for a in step.tracker.allocations if a.op}
    named = module_names(paths.values())
    modules = shares(step, peak, lambda a: named[paths[a.index]][0])
    counts = dict(named.values())
    label = Label("")
    return MemoryProfile(
        model=type(how.source).__name__,
        optimized=optimized,
        mode="train" if how.source.training else "eval",
        step="forward, loss, backward" if how.train else "forward",
        prediction=found,
        by_op=shares(step, peak, lambda a: op_of(a.label or label, a.op)),
        by_module=tuple(dataclasses.replace(s, count=counts[s.name]) for s in modules),
        at_peak=groups(found.live, lambda h: op_of(Label(h.name, h.phase), h.op) if h.op else ""),
        source_peak_bytes=before,
        measured_peak_bytes=measured,
        names=_names(found, sites, op_of) if optimized else {},
        notes=(f"backward begins from {found.loss}", *notes) if how.train else tuple(notes),
    )


def _names(
    found: Prediction, sites: Callable[[Label], Site], op_of: Callable[[Label, str], str]
) -> dict[str, str]:
    """Node -> "op in module"."""
    named = {}
    for name in dict.fromkeys(m.name for m in found.timeline if m.name != LOSS):
        label = Label(name)
        op, module = op_of(label, ""), sites(label).module
        if op:
            named[name] = f"{op} in {module}" if module else op
    return named


def _dispatched_op(label: Label, op: str) -> str:
    return ELSEWHERE if label.name == LOSS else op.removesuffix(".default")


def _notes(how: _How) -> list[str]:
    notes = [
        "counted is what the allocator hands out: with parameters, gradients and inputs, without "
        "an optimizer's state (resident_bytes=) and CUDA's own context"
    ]
    here = device_of(how.source, how.args, how.kwargs)
    if here.type != how.device.type:
        notes.append(
            f"the model is on {here.type}: its operations stand for those of {how.device.type}, "
            "which may save and allocate other things"
        )
    return notes


# ---- checks


def _check(model: Any, loss_fn: Any, train: Any, gradients_resident: Any, measure: Any) -> None:
    if not isinstance(model, nn.Module):
        raise OptionError(
            f"profile_memory takes a model, not a {type(model).__name__}",
            try_="profile_memory(model, inputs)",
        )
    if loss_fn is not None and not callable(loss_fn):
        raise OptionError(
            f"loss_fn is a {type(loss_fn).__name__}", try_="a function of what forward returns"
        )
    check_choice("train", train, (True, False))
    check_choice("gradients_resident", gradients_resident, (True, False))
    check_choice("measure", measure, (True, False))


def _device(source: nn.Module, args: Any, kwargs: Any, device: Any) -> torch.device:
    if device is None:
        return device_of(source, args, kwargs)
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise OptionError(
            f"device is {device!r}", try_='"cuda", or None for the model\'s'
        ) from error
    if found.type not in ("cpu", "cuda"):
        raise OptionError(f"device is {device!r}", try_='"cuda" or "cpu"')
    return found


__all__ = ["KINDS", "MemoryProfile", "profile_memory"]
