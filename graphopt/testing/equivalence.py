"""`assert_equivalent`: one step of a model and of its optimized twin, under the error contract."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from graphopt.errors import OptionError
from graphopt.module import graphopt_of
from graphopt.numerics import Comparison
from graphopt.options import check_inputs, names_checked
from graphopt.precision import lowered
from graphopt.testing.blame import Suspect, find_suspect
from graphopt.testing.failure import EquivalenceError
from graphopt.testing.inputs import argument_names, copy_arguments, floating
from graphopt.testing.observe import Plan, observe, requirements
from graphopt.testing.script import write_script
from graphopt.testing.trial import Trial

SEED = 20_011


@dataclasses.dataclass(frozen=True)
class Equivalence:
    """What `assert_equivalent` found, when it found nothing wrong.

    Attributes:
        comparison: the errors of each tensor beside eager's.
        notes: what was compared under a condition (dropout at p = 0, say).
    """

    comparison: Comparison
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"comparison": self.comparison.to_dict(), "notes": list(self.notes)}

    def __repr__(self) -> str:
        """The table of errors, then the notes."""
        return "\n".join([repr(self.comparison), *(f"note: {n}" for n in self.notes)])


@names_checked
def assert_equivalent(
    model: nn.Module,
    optimized: nn.Module,
    inputs: torch.Tensor | Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    upstream: torch.Tensor | Sequence[torch.Tensor | None] | None = None,
    input_gradients: bool = True,
    strides: bool = True,
    blame: bool = True,
    factory: Callable[[], nn.Module] | None = None,
    seed: int = SEED,
) -> Equivalence:
    """Assert that an optimized module does what its model does, in one step.

    Both run once on copies of the inputs, in the model's present mode and under the caller's
    autocast and grad mode; a third run in float64 is the truth. Compared are: results (values by
    the error contract of `graphopt.verify`; structure, dtype, shape, strides, shared memory and
    `requires_grad` exactly), the gradient of every parameter and of every floating argument, a
    gradient of None where eager has none, buffers, and what the call wrote into its arguments.
    Dropout is compared at p = 0. Afterwards both modules, their gradients and torch's generators
    are as they were.

    Args:
        model: the source. It may share its parameters with `optimized`.
        optimized: what `graphopt.optimize` returned, an attached model, or any other module that
            shall be equivalent, with the same parameter and buffer names.
        inputs: a tensor, or the positional arguments.
        kwargs: the keyword arguments.
        upstream: gradients of the results that backward starts from, one per result tensor (None
            for a drawn one). By default each is drawn from a normal distribution.
        input_gradients: compare the gradient of every floating argument; False: only of those
            that require one.
        strides: compare the strides of results.
        blame: look for the rewrite that is at fault, with `graphopt.verify` and then by halving
            `max_rewrites`; takes a few captures more.
        factory: a function at the top level of a file that makes the model: the script of a
            failure then builds the model by it instead of from the captured graph.
        seed: of torch's generators in both runs, and of drawn upstream gradients.

    Returns:
        The errors of each tensor, and under what conditions they were taken.

    Raises:
        EquivalenceError: an `AssertionError` and a `VerifyError`: names the first tensor that is
            off with its numbers, the rewrite to blame, and holds a script that reproduces it.
        OptionError: for wrong arguments, before any run.
        CaptureError: when `optimized` cannot capture the call.
        Exception: whatever the model itself raises on these inputs.

    Example:
        >>> model, x = nn.Sequential(nn.Linear(4, 4), nn.GELU()), torch.ones(2, 4)
        >>> import graphopt
        >>> assert_equivalent(model, graphopt.optimize(model, x), x).comparison.passed
        True
    """
    args, named = _check(model, optimized, inputs, kwargs)
    leaves = copy_arguments(args, named)[2]
    given = tuple(t.requires_grad for t in leaves)
    asked = tuple(
        g or (input_gradients and floating(t)) for g, t in zip(given, leaves, strict=True)
    )
    backward = torch.is_grad_enabled()
    names = argument_names(model, args, named)
    plan = Plan(args, named, names, asked, backward, seed, _upstream(upstream))
    plan_of = lambda r: dataclasses.replace(plan, requires=r)  # noqa: E731
    opt = graphopt_of(optimized)
    precision = None if opt is None else opt._settings.precision
    with lowered(model, precision):  # eager in the precision that the optimized one was given
        requires, eager = requirements(lambda r: observe(model, plan_of(r)), asked, given)
        trial = Trial(model, optimized, plan_of(requires), eager, strides)
        if precision is not None:
            trial.note(f"eager ran under autocast, as precision={precision!r} has it")
        if requires != asked:
            trial.note("arguments that are written in place: compared without their gradients")
        finding = trial.run()
        if finding is None:
            assert trial.comparison is not None
            return Equivalence(trial.comparison, tuple(trial.notes))
        suspect = find_suspect(trial.again, optimized, trial.plan) if blame else Suspect()
    script = write_script(model, optimized, trial.plan, factory, strides, finding)
    raise EquivalenceError.of(finding, suspect, script, trial.comparison, trial.notes)


def _check(
    model: Any, optimized: Any, inputs: Any, kwargs: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments, when all is as it should be."""
    for name, value in (("model", model), ("optimized", optimized)):
        if not isinstance(value, nn.Module):
            raise OptionError(f"{name} is a {type(value).__name__}, not an nn.Module")
    if graphopt_of(model) is not None:
        raise OptionError(
            "model is optimized itself",
            why="it is what the optimized one is measured against",
            try_="assert_equivalent(opt.source, opt, inputs); for an attached model keep a "
            "deepcopy from before attach()",
        )
    args, named = check_inputs(inputs, kwargs)
    ours, theirs = _state(model), _state(optimized)
    if ours.keys() != theirs.keys():
        odd = sorted(ours.keys() ^ theirs.keys())
        raise OptionError(
            f"the two modules hold different parameters or buffers: {', '.join(odd[:5])}",
            try_="optimize the model itself, or a deepcopy of it",
        )
    for name, tensor in ours.items():
        other = theirs[name]
        if tensor is not other and not _equal(tensor, other):
            raise OptionError(
                f"the two modules do not start from the same state: {name} differs",
                try_="optimized.load_state_dict(model.state_dict())",
            )
    if model.training != optimized.training:
        raise OptionError(
            f"model.training is {model.training}, optimized.training is {optimized.training}",
            try_="set both by train() or eval()",
        )
    return args or (), named


def _state(module: nn.Module) -> dict[str, torch.Tensor]:
    return dict((*module.named_parameters(), *module.named_buffers()))


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(torch.equal(a, b.to(a.device)) or torch.allclose(
        a.double(), b.double().to(a.device), rtol=0, atol=0, equal_nan=True
    ))  # fmt: skip


def _upstream(given: Any) -> dict[int, torch.Tensor]:
    if given is None:
        return {}
    if isinstance(given, torch.Tensor):
        return {0: given}
    if isinstance(given, Sequence) and all(g is None or isinstance(g, torch.Tensor) for g in given):
        return {i: g for i, g in enumerate(given) if g is not None}
    raise OptionError(
        f"upstream is a {type(given).__name__}",
        try_="a tensor for the first result, or a sequence with one per result tensor",
    )
