"""`graphopt demo`: a GPT-2 with random weights, optimized, proved and trained for one step."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import graphopt
from graphopt.env import describe
from graphopt.report.proof import proof_table, proof_text
from graphopt.report.rules import RuleSummary, by_rule, rule_table
from graphopt.report.table import Table, size
from graphopt.report.view import show
from graphopt.verdict import VerifyResult


@dataclasses.dataclass(frozen=True)
class Timing:
    """One training step (forward, backward, optimizer), the median of several.

    Attributes:
        name: "eager" or "graphopt".
        milliseconds: median time of a step.
        peak_bytes: greatest device memory in use during the steps.
    """

    name: str
    milliseconds: float
    peak_bytes: int


@dataclasses.dataclass(frozen=True)
class DemoResult:
    """What the demo found.

    Attributes:
        device: where it ran.
        optimize_seconds: time of `graphopt.optimize`, capture included.
        rules: what each rule did.
        verified: the verdict of `graphopt.verify`.
        loss: loss of the training step.
        gradients: how many parameters got a finite gradient.
        parameters: how many parameters there are.
        timings: eager and graphopt on a GPU; empty on a CPU.
    """

    device: str
    optimize_seconds: float
    rules: tuple[RuleSummary, ...]
    verified: VerifyResult
    loss: float
    gradients: int
    parameters: int
    timings: tuple[Timing, ...]

    @property
    def passed(self) -> bool:
        """Whether every rewrite was proved and every parameter got its gradient."""
        return self.verified.passed and self.gradients == self.parameters

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        data = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {
            **data,
            "passed": self.passed,
            "rules": [row.to_dict() for row in self.rules],
            "verified": self.verified.to_dict(),
            "timings": [dataclasses.asdict(timing) for timing in self.timings],
        }


def run(device: str | None = None, say: Callable[..., None] | None = show) -> DemoResult:
    """Run the demo.

    Args:
        device: "cpu" or "cuda"; CUDA where there is one by default.
        say: how to print, a function of a text and of tables; None prints nothing.

    Raises:
        ImportError: when transformers is not installed.

    Example:
        >>> run("cpu", say=None).passed  # doctest: +SKIP
        True
    """
    say = say or (lambda *_: None)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    model, inputs = gpt2(device, batch=2, length=32)
    count = sum(p.numel() for p in model.parameters()) / 1e6
    say(
        f"GPT-2 from transformers, random weights: {model.config.n_layer} layers, width "
        f"{model.config.n_embd}, {count:.0f} M parameters, on {device}"
    )
    say(describe().why[0].upper() + describe().why[1:] + ".")

    start = time.perf_counter()
    with warnings.catch_warnings():
        # The line above says it already.
        warnings.filterwarnings("ignore", ".*fused ops run their", graphopt.GraphoptWarning)
        opt = graphopt.optimize(model, example_kwargs=inputs)
    seconds = time.perf_counter() - start
    rules = by_rule(opt.rewrites, opt.refusals)
    say(f"\n1. optimize: {len(opt.rewrites)} rewrites in {seconds:.1f} s")
    say("", [rule_table(row for row in rules if row.fired)])

    say("\n2. verify: every rewrite and the whole step, forward and backward, against float64")
    verified = graphopt.verify(opt, example_kwargs=inputs)
    say("", [proof_table(verified)])
    say(proof_text(verified))

    loss, gradients, parameters = _train_one_step(opt, inputs)
    say(
        f"\n3. one training step: loss {loss:.4f}, "
        f"finite gradients for {gradients} of {parameters} parameters"
    )

    timings = _time_on_gpu(model, opt) if device.startswith("cuda") else ()
    if timings:
        say(
            "\n4. a training step, batch 8 x 1024, bfloat16 autocast, medians of 20",
            [_table(timings)],
        )
    return DemoResult(device, seconds, rules, verified, loss, gradients, parameters, timings)


def gpt2(device: str, batch: int, length: int) -> tuple[Any, dict[str, torch.Tensor]]:
    """GPT-2 with random weights, and random text for it.

    On a GPU it has the smallest published size. On a CPU it is as deep and a third as wide, which
    shows the same rewrites; proving 124 M parameters in float64 takes a CPU minutes.

    Args:
        device: where to build it.
        batch: sequences.
        length: tokens of each.

    Returns:
        The model in training mode and its keyword arguments, labels included.
    """
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.utils import logging

    logging.set_verbosity_error()  # it would remark that the default loss is the default one
    torch.manual_seed(0)
    size = {} if device.startswith("cuda") else {"n_embd": 256, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(use_cache=False, **size)).to(device).train()
    tokens = torch.randint(0, model.config.vocab_size, (2, batch, length), device=device)
    return model, {"input_ids": tokens[0], "labels": tokens[1]}


def _train_one_step(opt: nn.Module, inputs: dict[str, torch.Tensor]) -> tuple[float, int, int]:
    """Loss, how many parameters got a finite gradient, how many there are."""
    optimizer = torch.optim.AdamW(opt.parameters(), lr=1e-4)
    loss = opt(**inputs).loss
    loss.backward()
    gradients = [p.grad for p in opt.parameters()]
    optimizer.step()
    optimizer.zero_grad()
    finite = sum(g is not None and bool(g.isfinite().all()) for g in gradients)
    return loss.item(), finite, len(gradients)


def _time_on_gpu(model: nn.Module, opt: nn.Module) -> tuple[Timing, ...]:
    """Both, step by step in turn, so that a clock that drifts drifts for both."""
    _, inputs = gpt2("cuda", batch=8, length=1024)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    runs: dict[str, list[tuple[float, int]]] = {"eager": [], "graphopt": []}
    for _ in range(23):
        for name, module in (("eager", model), ("graphopt", opt)):
            with _measured(runs[name]):
                with torch.autocast("cuda", torch.bfloat16):
                    loss = module(**inputs).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    # The first three steps of each are warm-up: capture, kernel compilation, the allocator.
    return tuple(
        Timing(name, statistics.median(t for t, _ in steps[3:]), max(b for _, b in steps[3:]))
        for name, steps in runs.items()
    )


@contextlib.contextmanager
def _measured(results: list[tuple[float, int]]) -> Iterator[None]:
    """Append milliseconds and peak bytes of the block."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    yield
    torch.cuda.synchronize()
    results.append(((time.perf_counter() - start) * 1000, torch.cuda.max_memory_allocated()))


def _table(timings: tuple[Timing, ...]) -> Table:
    rows = tuple((t.name, f"{t.milliseconds:.1f}", size(t.peak_bytes)) for t in timings)
    return Table(("", "ms a step", "peak memory"), rows, right=("ms a step", "peak memory"))
