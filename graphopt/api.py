"""The public functions: each checks what it is given, then does the work."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from graphopt.capture import signature as sig
from graphopt.errors import GraphOptError, GraphoptWarning, OptionError
from graphopt.graph import lint
from graphopt.graph.body import Body
from graphopt.memory.asked import MemoryOptions, check_memory
from graphopt.memory.plan import plan
from graphopt.module import Compiled, GraphoptModule, Settings
from graphopt.options import (
    DYNAMIC,
    ON_ERROR,
    PRECISION,
    check_call,
    check_choice,
    check_fit,
    check_inputs,
    check_model,
    check_overrides,
    check_passes,
    disabled,
    names_checked,
)
from graphopt.passes import PassOptions, Rule, run_pipeline
from graphopt.passes.autocast import MaterializeAutocast
from graphopt.passes.base import Log, Timer
from graphopt.passes.overrides import MarkOverrides
from graphopt.passes.payoff import ALWAYS
from graphopt.passes.pipeline import Stage
from graphopt.passes.remat import RecomputeRegions
from graphopt.precision import tell_unmatched
from graphopt.report.progress import progress
from graphopt.report.subject import optimized_of
from graphopt.verify import VerifyResult, verify_body


@dataclasses.dataclass(frozen=True)
class PassCompiler:
    """Turns a captured body into the one that runs: the passes, with some options.

    An object and not a closure, so that an optimized module pickles.
    """

    options: PassOptions = dataclasses.field(default_factory=PassOptions)
    overrides: tuple[tuple[str, torch.dtype], ...] = ()
    memory: MemoryOptions | None = None
    limits: dict[str, int] = dataclasses.field(default_factory=dict, compare=False)
    """The largest budget in bytes so far, which a budget that is a fraction came to."""
    told: set[str] = dataclasses.field(default_factory=set, compare=False)
    """Precision overrides that earlier graphs have told of."""

    def __call__(self, body: Body) -> Compiled:
        """Run the passes over one captured body."""
        if self.overrides:
            body = body.copy()
            MarkOverrides(self.overrides).run(body, Log())
            tell_unmatched(body, self.overrides, self.told)
        # without a plan, what the user's own checkpoints would recompute is recomputed
        trailing = (RecomputeRegions(),) if self.memory is None else ()
        options = self.options
        if self.memory is not None and options.fuse is True:
            options = dataclasses.replace(options, fuse=ALWAYS)  # what is fused saves memory, too
        with progress("passes"):
            result = run_pipeline(
                body, options, leading=(MaterializeAutocast(),), trailing=trailing
            )
        done, most = len(result.rewrites), self.options.max_rewrites
        if self.memory is None:
            return Compiled(result.body, result)
        if most is not None and done >= most:
            warnings.warn(
                f"max_rewrites={most} leaves none for the memory plan: the budget is not kept",
                GraphoptWarning,
                stacklevel=2,
            )
            return Compiled(result.body, result)
        with progress("memory plan"), Timer() as timer:
            planned = plan(result.body, self.memory, offset=done, limits=self.limits)
        lint.check(planned.body, "memory plan", skip=("no dead nodes",))
        stage = Stage(
            "memory plan", len(planned.body.graph.nodes), len(planned.rewrites), timer.seconds
        )
        result = dataclasses.replace(
            result,
            body=planned.body,
            rewrites=[*result.rewrites, *planned.rewrites],
            stages=[*result.stages, stage],
        )
        return Compiled(planned.body, result, planned.plan)


@names_checked
def optimize(
    model: nn.Module,
    example_inputs: torch.Tensor | Sequence[Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    precision: str | None = None,
    precision_overrides: Mapping[str, str | torch.dtype] | None = None,
    fuse: bool | str = True,
    rules: str | Rule | Iterable[str | Rule] = "default",
    memory_budget: int | float | str | None = None,
    segments: int | None = None,
    offload: bool | str | None = False,
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    resident_bytes: int | str = 0,
    dynamic: bool | str = "auto",
    on_error: str = "raise",
    max_rewrites: int | None = None,
    verify: bool = False,
) -> GraphoptModule:
    """Turn a model into an optimized module over the same parameters.

    The result computes what the model computes. Parameters, buffers and submodules are shared:
    an optimizer made for one trains the other, and a `state_dict` of one loads into the other.
    With example inputs the graph is captured now, in the model's present mode; other modes and
    sizes, and everything without example inputs, are captured at the first call that needs them.

    Args:
        model: the model; it stays usable and is not changed.
        example_inputs: a tensor, or the positional arguments of `forward`.
        example_kwargs: the keyword arguments of `forward`.
        precision: "bf16" or "fp16": as under `torch.autocast` of that dtype, with the casts written
            into the graph; "auto": bf16 where the hardware has it, else fp16. The parameters stay
            as they are. An ambient autocast at a call wins.
        precision_overrides: pattern -> "fp32", "bf16" or "fp16", for parts that are to run
            otherwise: a glob of module paths ("encoder.*"), an op ("softmax"), or both
            ("encoder.*::softmax"). The last pattern that matches decides. A warning tells of a
            pattern that decides nothing in the graph, as where that has no low precision.
        fuse: whether chains of ops become fused kernels; False leaves the canonical graph. True
            leaves a chain alone on a GPU where the launch of its kernel would take the host longer
            than the device saves, as in models of small tensors (`.refusals` tells); "always" does
            not, nor does True with a memory budget, since fused ops save memory, too.
        rules: "default"; names, globs and minus signs ("default,-rope", "layer_norm*"); or a
            list of these and of your own `Rule` objects.
        memory_budget: the most bytes of device memory that a training step may take at once, all
            counted: parameters, gradients, inputs, activations, temporaries. Bytes; "12GiB" or
            "900MB"; or a float, as a fraction of the predicted peak without a plan. What backward
            needs is then recomputed where that costs the least time; `.memory_plan` tells. Each
            size of the inputs is planned by itself (`dynamic="auto"` counts as False).
        segments: recompute all but the borders of so many parts of the model instead.
        offload: "auto" (or True): with a memory budget, values may wait for backward in pinned host
            memory, too, where that is cheaper than computing them again or the budget cannot be
            kept otherwise; the copies run beside the computation. On a CPU that brings nothing: a
            warning says so. False or None: what is kept, is kept on the device.
        loss_fn: for the prediction of the peak: makes the loss of what forward returns. Without
            it that is the loss that forward returns, else gradients of its results.
        resident_bytes: what else lies on the device, such as the state of the optimizer (bytes,
            or "4GiB"); it counts for the budget.
        dynamic: "auto": a size that is seen to vary becomes symbolic; True: sizes are symbolic
            from the start; False: one graph for each size.
        on_error: "raise", or "fallback" to run the model as it is, with a warning, where it
            cannot be captured.
        max_rewrites: apply only the first so many rewrites, to find the one that is wrong.
        verify: prove every rewrite on the example inputs before returning.

    Returns:
        A `GraphoptModule`: `.code` is the optimized program, `.rewrites` what was done,
        `.refusals` what was not and why. With `GRAPHOPT_DISABLE=1` in the environment the model
        itself comes back.

    Raises:
        OptionError: for wrong arguments, before any work.
        CaptureError: when the model cannot be captured, with the construct and its line.
        PassError: when a rule fails.
        BudgetError: when no plan keeps the memory budget; it names the smallest peak that can be
            had, and what holds it.
        VerifyError: when `verify=True` and a rewrite is wrong.

    Example:
        >>> model = nn.Sequential(nn.LayerNorm(8), nn.Dropout(0.1), nn.ReLU())
        >>> opt = optimize(model, torch.ones(2, 8))
        >>> [r.rule for r in opt.rewrites if r.kind == "local"]
        ['layer_norm']
    """
    check_model(model)
    args, kwargs = check_inputs(example_inputs, example_kwargs)
    check_choice("precision", precision, PRECISION)
    overrides = check_overrides(model, precision_overrides)
    options = check_passes(fuse, rules, max_rewrites)
    memory = check_memory(memory_budget, segments, loss_fn, resident_bytes, offload)
    check_choice("dynamic", dynamic, DYNAMIC)
    check_choice("on_error", on_error, ON_ERROR)
    check_choice("verify", verify, (True, False))
    if args is not None:
        check_fit(model, args, kwargs)
    elif verify:
        raise OptionError("verify=True needs example_inputs", try_="optimize(model, inputs, ...)")
    if disabled():
        return model  # type: ignore[return-value]
    _say_where_it_runs(model)
    if memory is not None and dynamic == "auto":
        dynamic = False  # a plan is right for the sizes that it was made for
    settings = Settings(dynamic=dynamic, on_error=on_error, precision=precision)
    opt = GraphoptModule(model, settings, PassCompiler(options, overrides, memory))
    if args is not None:
        with progress(f"capture {type(model).__name__}"):
            opt.capture(args, kwargs)
        if verify:
            _verify(opt, args, kwargs).check()
    return opt


@names_checked
def verify(
    opt: GraphoptModule,
    inputs: torch.Tensor | Sequence[Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    backward: bool | None = None,
) -> VerifyResult:
    """Prove an optimized module on some inputs.

    Every rewrite is replayed alone against the ops that it replaced, forward and backward, and
    so is the whole program; errors are measured against float64 beside eager's own. Nothing of
    the module changes: not its parameters, gradients, buffers, mode or random state.

    Args:
        opt: what `optimize` returned, or an attached model.
        inputs: a tensor, or the positional arguments.
        example_kwargs: the keyword arguments.
        backward: whether gradients are compared; by default where the graph was captured with
            gradients on.

    Returns:
        The verdicts: `.passed`, `.check()` raises for the first wrong rewrite; its repr is a table.

    Raises:
        OptionError: when `opt` is not an optimized module, or the inputs do not fit its forward.
        CaptureError: when the inputs ask for a graph that cannot be captured.

    Example:
        >>> opt = optimize(nn.Sequential(nn.Linear(4, 4), nn.GELU()), torch.ones(2, 4))
        >>> verify(opt, torch.ones(2, 4)).passed
        True
    """
    opt = optimized_of(opt, "verify")
    args, named = check_call(opt.source, inputs, example_kwargs)
    check_choice("backward", backward, (None, True, False))
    entry = opt.capture(args, named)
    if entry is None:
        raise GraphOptError(
            "there is no graph to verify",
            why="the model could not be captured, and on_error='fallback' runs it as it is",
            try_="on_error='raise', which says what stands in the way",
        )
    leaves: list[torch.Tensor] = []
    sig.flatten((args, named), leaves)
    result = entry.compiled.result
    records = result.rewrites
    with progress("verify") as say:
        return verify_body(
            result.captured, result.body, records, leaves, backward=backward, say=say
        )


_verify = verify  # inside `optimize`, `verify` is an option

_said: set[str] = set()


def _say_where_it_runs(model: nn.Module) -> None:
    """Warn, once in a process, where fused ops run their reference instead of a kernel."""
    from graphopt.kernels._launch import use_triton

    tensor = next(iter(model.parameters()), next(iter(model.buffers()), None))
    if tensor is None or use_triton(tensor) or tensor.device.type in _said:
        return
    _said.add(tensor.device.type)
    why = "Triton is not installed" if tensor.is_cuda else f"the model is on {tensor.device.type}"
    warnings.warn(
        f"{why}: fused ops run their plain-torch reference, so nothing gets faster",
        GraphoptWarning,
        stacklevel=4,  # past the check of names: the user's line
    )
