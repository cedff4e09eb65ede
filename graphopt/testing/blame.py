"""Which rewrite is to blame: first by replaying each alone, then by halving their number."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from graphopt.capture import signature as sig
from graphopt.module import GraphoptModule, graphopt_of
from graphopt.passes.rule import leaving_out
from graphopt.testing.inputs import copy_arguments
from graphopt.testing.observe import Plan
from graphopt.verify import verify_body


@dataclasses.dataclass(frozen=True)
class Suspect:
    """The rewrite to blame.

    Attributes:
        rule: its rule, "" where no rewrite was found.
        ordinal: its number among all rewrites, -1 where none was found.
        text: rule and place, or what is known instead.
        cure: how to leave it out.
        how: "verify" (its replay alone is wrong) or "max_rewrites" (right without it, wrong with
            it); "" where none was found.
    """

    rule: str = ""
    ordinal: int = -1
    text: str = ""
    cure: str = ""
    how: str = ""


def find_suspect(passes: Callable[[nn.Module], bool], optimized: nn.Module, plan: Plan) -> Suspect:
    """The rewrite of an optimized module that makes it wrong.

    Args:
        passes: whether an optimized module of the same model is right.
        optimized: the one that is not.
        plan: the arguments of the failing call.
    """
    opt = graphopt_of(optimized)
    if opt is None:
        return Suspect(text="an unknown place: the module is not one that graphopt made")
    args, kwargs, leaves = copy_arguments(plan.args, plan.kwargs, requires=plan.requires)
    try:
        entry = opt.capture(args, kwargs)
        if entry is None or entry.compiled.result is None:
            return Suspect(text="no rewrite: the model runs unoptimized")
        result = entry.compiled.result
        sig.flatten((args, kwargs), leaves := [])
        return _by_replay(result, leaves, plan) or _by_halving(passes, opt, result.rewrites)
    except Exception as error:  # the failure itself must be told, whatever happens here
        return Suspect(text=f"the search for the rewrite failed: {type(error).__name__}: {error}")


def _by_replay(result: Any, leaves: list[torch.Tensor], plan: Plan) -> Suspect | None:
    found = verify_body(
        result.captured, result.body, result.rewrites, leaves, backward=plan.backward or None
    )
    wrong = next((c for c in found.wrong if c.kind != "whole"), None)
    if wrong is None:
        return None
    return _suspect(wrong.rule, wrong.ordinal, str(wrong.site), "verify", wrong.kind == "local")


def _by_halving(
    passes: Callable[[nn.Module], bool], opt: GraphoptModule, rewrites: list[Any]
) -> Suspect:
    """The last of the fewest rewrites that make it wrong."""
    compile_body: Any = opt._compile_body
    if not hasattr(compile_body, "options"):
        return Suspect(text="an unknown rewrite: each alone is right")

    def right(count: int) -> bool:
        options = dataclasses.replace(compile_body.options, max_rewrites=count)
        fewer = dataclasses.replace(compile_body, options=options)
        return passes(GraphoptModule(opt.source, opt._settings, fewer))

    if not right(0):
        return Suspect(text="no rewrite: it is wrong with max_rewrites=0, so the capture is")
    good, bad = 0, len(rewrites)
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if right(middle) else (good, middle)
    record = next(r for r in rewrites if r.ordinal == good)
    return _suspect(record.rule, good, str(record.site), "max_rewrites", record.kind == "local")


def _suspect(rule: str, ordinal: int, site: str, how: str, local: bool) -> Suspect:
    cure = f"max_rewrites={ordinal} stops before it"
    if local:
        cure += f", {leaving_out(rule)}"
    place = f" at {site}" if local else ""
    return Suspect(rule, ordinal, f"rewrite #{ordinal} {rule}{place}", cure, how)
