"""`graphopt.bench`: checks what it is given, measures the variants in turns, leaves no trace."""

from __future__ import annotations

import contextlib
import importlib.metadata
import inspect
import math
import platform
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from graphopt.api import optimize
from graphopt.bench.measure import Bench, Variant
from graphopt.bench.result import BenchResult, Row
from graphopt.bench.step import (
    Plan,
    Rng,
    Step,
    chosen_optimizer,
    copied,
    detached,
    first_step,
    kept,
)
from graphopt.capture import signature as sig
from graphopt.errors import OptionError
from graphopt.graph.text import type_text
from graphopt.options import (
    check_choice,
    check_fit,
    check_inputs,
    check_model,
    check_names,
    disabled,
)
from graphopt.report.progress import progress

KNOWN = ("eager", "compile")
NOT_HANDED_ON = ("verify", "on_error")
"""Options of `optimize` that `bench` does not take."""

_DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    torch.bfloat16: torch.bfloat16,
    torch.float16: torch.float16,
    None: None,
}

Against = Mapping[str, Any] | Iterable[str | Mapping[str, Any]]


def bench(
    model: nn.Module,
    inputs: torch.Tensor | Sequence[Any] | None,
    against: Against = KNOWN,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    train: bool | None = None,
    autocast: torch.dtype | str | None = None,
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    optimizer: bool | Callable[[list[torch.Tensor]], torch.optim.Optimizer] = False,
    seconds: float = 2.0,
    rounds: int = 10,
    warmup: int = 3,
    copy: bool = True,
    profile: bool = True,
    **options: Any,
) -> BenchResult:
    """Measure graphopt beside eager and `torch.compile`, in turns, in one run.

    Each variant has a short turn in every round, so that a clock or a neighbour that changes
    meets all of them. A step is forward, and with `train` backward and the dropping of gradients.
    All variants run over one deepcopy of the model and of the inputs: the model's parameters,
    gradients, buffers, modes and the random state stay as they were. A variant that fails is a row
    with its error.

    Args:
        model: the model, in the mode that is to be measured.
        inputs: a tensor, or the positional arguments of `forward`.
        against: what else to measure: "eager"; "compile" (`torch.compiler.reset()` goes before
            it); and `{"name": callable}` for a module or function that takes the inputs as the
            model does (it is called as it is, and its gradients and buffers are set back). The
            first that runs is what ratios are to.
        example_kwargs: the keyword arguments of `forward`.
        train: True puts the model in training mode and measures forward and backward, False puts
            it in eval mode and measures the forward without gradients. None leaves the modes and
            goes by `model.training`, the caller's grad mode, and whether anything requires a
            gradient.
        autocast: "bf16", "fp16" or the torch dtype: autocast around the forward.
        loss_fn: makes a scalar tensor of forward's result. Without it: `result.loss` where there
            is one, else random gradients, made once, are sent into every result.
        optimizer: True adds a step of AdamW with a learning rate of 0 (fused on CUDA); or a
            function of a list of parameters that returns an optimizer.
        seconds: how long each variant is timed, all its turns together.
        rounds: turns of each variant; a turn is one step or more (on a GPU two or more).
        warmup: steps after the first that are not timed.
        copy: False measures the model itself and not a copy, for a model that is too large to
            stand in memory twice; its gradients, buffers and modes are set back afterwards.
        profile: whether to tell where the time goes, by kernel.
        **options: those of `optimize`, without `verify` and `on_error`.

    Returns:
        The figures; printing them shows two tables. Milliseconds are medians, by CUDA events on a
        GPU; "wall ms" is the time on the clock; the peak is what one step of that variant alone
        needs at its most; "start s" is the first step with capture, passes and compilation, with
        whatever the caches on disk hold.

    Raises:
        OptionError: for wrong arguments, before any work.
        Exception: what the model itself raises for these inputs.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.GELU())
        >>> result = bench(model, torch.ones(2, 8), against=["eager"], seconds=0.01, rounds=2)
        >>> [row.name for row in result.rows], result["graphopt"].error
        (['eager', 'graphopt'], None)
    """
    check_model(model)
    args, kwargs = _inputs(inputs, example_kwargs)
    check_fit(model, args, kwargs)
    others = _variants(against)
    _options(model, options)
    _numbers(seconds, rounds, warmup)
    _choices(train, loss_fn, optimizer, copy, profile)
    device = _device(model, args, kwargs)
    training = _training(train, model, args, kwargs, optimizer)
    rng = Rng(device)
    foreign = [f for f in others.values() if isinstance(f, nn.Module)]
    with contextlib.ExitStack() as stack:
        stack.enter_context(kept([model, *foreign], rng))
        cure = "copy=False, to measure the model itself"
        with torch.inference_mode(False):  # what is copied inside could not be trained
            subject = copied(model, type(model).__name__, cure) if copy else model
            given = copied(detached((args, kwargs)), "the inputs", "tensors in plain containers")
        for module in (subject, model, *foreign):
            mode = subject.training if train is None else train
            if module.training != mode:
                module.train(mode)
        plan = Plan(
            args=given[0],
            kwargs=given[1],
            train=training,
            autocast=_DTYPES[_known_dtype(autocast)],
            device=device,
            loss_fn=loss_fn,
            optimizer=chosen_optimizer(optimizer, subject, device),
            modules=(subject, model, *foreign),
        )
        plan.drop_gradients()
        _try_eager(subject, plan, rng)
        variants = [
            _variant(name, call, subject, foreign, options)
            for name, call in {**others, "graphopt": "graphopt"}.items()
        ]
        say = stack.enter_context(progress("bench"))
        _measure(Bench(plan, rng, say), variants, seconds, rounds, warmup, profile)
        return _result(model, plan, subject.training, variants, rounds, options)


def _measure(
    run: Bench, variants: list[Variant], seconds: float, rounds: int, warmup: int, profile: bool
) -> None:
    for variant in variants:
        run.guarded(variant, lambda v: run.start(v, warmup, seconds / rounds))
    for i in range(rounds):
        run.say(f"round {i + 1} of {rounds}")
        first = i % len(variants)  # nobody always comes after the same one
        for variant in (*variants[first:], *variants[:first]):
            run.guarded(variant, run.turn)
    for variant in variants:
        run.guarded(variant, run.memory)
        if profile:
            run.guarded(variant, run.profile)


def _try_eager(subject: nn.Module, plan: Plan, rng: Rng) -> None:
    """One step of the model: what it raises is the user's to see; it wakes the device, too.

    Too little memory is no such error: graphopt may need less.
    """
    try:
        first_step(Step(subject, plan), rng)
    except torch.OutOfMemoryError:
        plan.drop_gradients()


def _variant(
    name: str,
    call: Any,
    subject: nn.Module,
    foreign: Sequence[nn.Module],
    optimizing: Mapping[str, Any],
) -> Variant:
    if call == "eager":
        return Variant(name, lambda: subject, subject)
    if call == "compile":
        return Variant(name, lambda: _compiled(subject), subject)
    if call == "graphopt":
        return Variant(name, lambda: optimize(subject, **optimizing), subject)
    return Variant(name, lambda: call, call if isinstance(call, nn.Module) else subject)


def _compiled(subject: nn.Module) -> Callable[..., Any]:
    torch.compiler.reset()  # so that the first step compiles
    return torch.compile(subject)


def _result(
    model: nn.Module,
    plan: Plan,
    training: bool,
    variants: Sequence[Variant],
    rounds: int,
    options: Mapping[str, Any],
) -> BenchResult:
    rows = tuple(v.row() for v in variants)
    leaves: list[Any] = []
    structure = sig.flatten((plan.args, plan.kwargs), leaves, results=True)
    names = sig.leaf_names(structure, sig.signature_of(model))
    parts = ["forward"] + ["backward"] * plan.train + ["optimizer"] * (plan.optimizer is not None)
    return BenchResult(
        model=type(model).__name__,
        step=", ".join(parts),
        mode="train" if training else "eval",
        inputs=tuple(f"{n}: {type_text(t)}" for n, t in zip(names, leaves, strict=True)),
        precision="" if plan.autocast is None else str(plan.autocast).removeprefix("torch."),
        device=torch.cuda.get_device_name(plan.device) if plan.device.type == "cuda" else "cpu",
        versions=_versions(),
        baseline=next((r.name for r in rows[:-1] if r.ms is not None), None),
        rows=rows,
        rounds=rounds,
        notes=tuple(_notes(plan, rows, options)),
    )


def _notes(plan: Plan, rows: Sequence[Row], options: Mapping[str, Any]) -> list[str]:
    notes = []
    if plan.device.type == "cpu":
        notes.append(
            f"on the CPU ({torch.get_num_threads()} threads) fused ops run their plain-torch "
            "reference: no speed-up is to be expected, the figures say what graphopt costs here"
        )
        notes.append("memory is what torch's own allocator gave out; compiled code may take more")
    elif plan.autocast is None:
        precision = torch.get_float32_matmul_precision()
        notes.append(f"float32 matrix products run in {precision!r} precision")
    if options.get("precision") is not None and plan.autocast is None:
        notes.append(
            f"graphopt alone runs with precision={options['precision']!r}; autocast= gives the "
            "others as much"
        )
    if disabled():
        notes.append("GRAPHOPT_DISABLE is set: the row graphopt is the model as it is")
    if any(r.name == "compile" and r.error is None for r in rows):
        notes.append("start-up is with what Inductor's and Triton's caches on disk already hold")
    notes += [f"{r.name}: {n}" for r in rows for n in r.notes if "plain-torch reference" not in n]
    return notes


def _versions() -> dict[str, str]:
    found = {"torch": torch.__version__, "python": platform.python_version()}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found["triton"] = importlib.metadata.version("triton")
    return found


# ---- checks


def _inputs(inputs: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args, named = check_inputs(inputs, kwargs, ("inputs", "example_kwargs"))
    if args is None:
        raise OptionError(
            "bench needs inputs", try_="bench(model, inputs); () where forward takes none"
        )
    return args, named


def _variants(against: Any) -> dict[str, Any]:
    if isinstance(against, (str, nn.Module)) or not isinstance(against, Iterable):
        raise OptionError(
            f"against is {against!r}"
            if isinstance(against, str)
            else f"against is a {type(against).__name__}",
            try_='a tuple of names ("eager", "compile") and of dicts {"name": callable}',
        )
    found: dict[str, Any] = {}
    for item in [against] if isinstance(against, Mapping) else against:
        for name, call in item.items() if isinstance(item, Mapping) else [(item, item)]:
            known = isinstance(call, str) and call in KNOWN
            if not isinstance(name, str) or not (known or callable(call)) or isinstance(call, type):
                raise OptionError(
                    f"against holds {name!r}" + (f": {call!r}" if call is not name else ""),
                    try_='"eager" or "compile" or {"name": a module or function}',
                )
            if name in found or name == "graphopt":
                raise OptionError(
                    f"two variants are called {name!r}",
                    why="graphopt is always measured" if name == "graphopt" else None,
                    try_="another name",
                )
            found[name] = call
    return found


def _options(model: nn.Module, options: Mapping[str, Any]) -> None:
    """Check the options of `optimize`, as it does itself; without inputs it captures nothing."""
    own = [n for n, p in inspect.signature(bench).parameters.items() if p.kind is not p.VAR_KEYWORD]
    of_optimize = inspect.signature(optimize).parameters.values()
    handed_on = [p.name for p in of_optimize if p.kind is p.KEYWORD_ONLY]
    check_names("bench", options, [*own, *(n for n in handed_on if n not in NOT_HANDED_ON)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimize(model, **options)


def _numbers(seconds: Any, rounds: Any, warmup: Any) -> None:
    real = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not real or not math.isfinite(seconds) or seconds <= 0:
        raise OptionError(f"seconds is {seconds!r}", try_="a number above 0")
    for name, value, least in (("rounds", rounds, 1), ("warmup", warmup, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise OptionError(f"{name} is {value!r}", try_=f"a whole number from {least}")


def _choices(train: Any, loss_fn: Any, optimizer: Any, copy: Any, profile: Any) -> None:
    check_choice("train", train, (None, True, False))
    check_choice("copy", copy, (True, False))
    check_choice("profile", profile, (True, False))
    if loss_fn is not None and not callable(loss_fn):
        raise OptionError(
            f"loss_fn is a {type(loss_fn).__name__}", try_="a function of what forward returns"
        )
    if isinstance(optimizer, torch.optim.Optimizer) or not (
        isinstance(optimizer, bool) or callable(optimizer)
    ):
        raise OptionError(
            f"optimizer is a {type(optimizer).__name__}",
            why="the measured copy has parameters of its own",
            try_="True for AdamW, or a function: parameters -> torch.optim.Optimizer",
        )
    if optimizer is not False and not copy:
        raise OptionError("optimizer= with copy=False would train the model", try_="one of the two")


def _known_dtype(autocast: Any) -> Any:
    if not isinstance(autocast, (str, torch.dtype, type(None))) or autocast not in _DTYPES:
        raise OptionError(f"autocast is {autocast!r}", try_='None, "bf16" or "fp16"')
    return autocast


def _training(train: bool | None, model: nn.Module, args: Any, kwargs: Any, optimizer: Any) -> bool:
    leaves: list[Any] = []
    sig.flatten((args, kwargs), leaves, results=True)
    tensors = [*model.parameters(), *(t for t in leaves if isinstance(t, torch.Tensor))]
    able = any(t.requires_grad for t in tensors)
    by_itself = model.training and able and torch.is_grad_enabled()
    training = by_itself if train is None else train
    if training and not able:
        raise OptionError(
            "train=True, and neither a parameter nor an input requires a gradient",
            try_="train=False, or requires_grad_() on what shall be trained",
        )
    if optimizer is not False and not training:
        raise OptionError("optimizer= needs a training step", try_="train=True")
    return training


def _device(model: nn.Module, args: Any, kwargs: Any) -> torch.device:
    leaves: list[Any] = []
    sig.flatten((args, kwargs), leaves, results=True)
    tensors = [*model.parameters(), *model.buffers(), *leaves]
    devices = [t.device for t in tensors if isinstance(t, torch.Tensor)]
    return next((d for d in devices if d.type != "cpu"), torch.device("cpu"))
