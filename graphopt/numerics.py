"""The error contract: how far from float64 eager is, how far graphopt is, and what may lie between.

E(y) is the relative L2 error of y against a float64 run of the same program. Over the outputs and
gradients of one step the contract asks, with eager in the same precision beside it:

- the geometric mean of E(optimized) / E(eager) is at most 1.05, where there are tensors enough;
- each ratio is at most 2;
- the greatest absolute error of each tensor is at most 3 times eager's, or within 2 ulps of its
  dtype at the tensor's scale;
- infinities and NaNs stand where eager has them; integers and booleans are equal.

Three places where a bare ratio would measure luck are settled in `_floor` and `_scales`. An error
below half an ulp is as good as none, and the fewer elements an error is taken over the more it is a
single draw (eager and an equally good run differed by a factor of 2.1 in gradients of 32 elements),
so the floor under both errors is (0.5 + 4 / sqrt(n)) ulps. A tensor of at most 128 elements is also
judged beside the step's median error. A tensor that is nothing beside the step (a key bias, whose
true gradient is zero) is measured on the step's scale; where eager has not one digit of a tensor
right, a like error is as good. In float64 there is no better truth: two runs must agree to 1e-9.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from graphopt.graph.float64 import to_float64

__all__ = [
    "AGREEMENT",
    "Comparison",
    "TensorError",
    "compare",
    "mean_of",
    "to_float64",
]

MAX_GEOMETRIC_MEAN = 1.05
MAX_RATIO = 2.0
MAX_ABSOLUTE_RATIO = 3.0
MAX_ULPS = 2.0
NOTHING = 1e-6
"""A tensor whose norm is below this share of its group's greatest is measured on that scale."""
FEW = 128
"""Up to so many elements, an error is judged beside the step's median error."""
ENOUGH = 24
"""From so many tensors on the geometric mean counts; over fewer it is luck."""
AGREEMENT = 1e-9
"""Greatest relative L2 difference of two float64 runs that do the same."""
NO_DIGIT = 0.5
"""Eager's relative error from which a value is nothing but rounding: a gradient that is zero."""
LUCK = 16.0
"""From this ratio to eager's error on, a tensor is off on any input."""


@dataclasses.dataclass(frozen=True)
class TensorError:
    """The errors of one tensor of a step.

    Attributes:
        name: "output/0", "grad/layers.0.weight", ...; what stands before the slash is its group.
        dtype: dtype of the optimized tensor, as text.
        shape: its shape.
        eager: relative L2 error of eager against float64.
        optimized: relative L2 error of graphopt against float64.
        difference: relative L2 distance between the two.
        max_eager: greatest absolute error of eager.
        max_optimized: greatest absolute error of graphopt.
        ratio: optimized / eager with both raised to the floor; 1.0 where both are exact, eager has
            no digit right, or two float64 runs agree.
        step_scale: whether the errors are relative to the step rather than to the tensor itself.
        verdict: "ok", or what is wrong.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    eager: float
    optimized: float
    difference: float
    max_eager: float
    max_optimized: float
    ratio: float
    step_scale: bool
    verdict: str

    @property
    def passed(self) -> bool:
        """Whether this tensor alone keeps the contract."""
        return self.verdict == "ok"

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return dataclasses.asdict(self)

    def row(self) -> str:
        """One line of a table."""
        return (
            f"{self.name[-40:]:40s} {self.dtype:9s} {self.eager:9.2e} {self.optimized:9.2e} "
            f"{self.difference:9.2e} {self.ratio:6.2f}  {self.verdict}"
        )


_HEAD = f"{'tensor':40s} {'dtype':9s} {'eager':>9s} {'graphopt':>9s} {'between':>9s} {'ratio':>6s}"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The errors of a whole step beside eager's.

    Attributes:
        tensors: one entry per tensor, in the order given.
        geometric_mean: of the ratios, 1.0 when there are none; over all draws where it was pooled.
        mean_counts: whether the geometric mean is part of the verdict (it is for a whole step of
            enough tensors; in a handful it would be luck).
        draws: how many upstream gradients the mean was taken over.

    Example:
        >>> run = {"output/0": torch.ones(3)}
        >>> compare(run, run, run).passed
        True
    """

    tensors: tuple[TensorError, ...]
    geometric_mean: float
    mean_counts: bool = True
    draws: int = 1

    @property
    def worst(self) -> TensorError | None:
        """The tensor of the greatest ratio, a failing one first."""
        return max(self.tensors, key=lambda t: (not t.passed, t.ratio), default=None)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why the comparison failed, empty when it passed."""
        found = [f"{t.name}: {t.verdict}" for t in self.tensors if not t.passed]
        if self.mean_counts and not self.geometric_mean <= MAX_GEOMETRIC_MEAN:
            found.append(
                f"geometric mean of the error ratios is {self.geometric_mean:.3f}, "
                f"at most {MAX_GEOMETRIC_MEAN} allowed"
            )
        return tuple(found)

    @property
    def passed(self) -> bool:
        """Whether the whole contract is kept."""
        return not self.reasons

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "passed": self.passed,
            "geometric_mean": self.geometric_mean,
            "draws": self.draws,
            "reasons": list(self.reasons),
            "tensors": [t.to_dict() for t in self.tensors],
        }

    def __repr__(self) -> str:
        """A table: failing tensors first, then the greatest ratios."""
        order = sorted(self.tensors, key=lambda t: (t.passed, -t.ratio))
        lines = [_HEAD] + [t.row() for t in order[:12]]
        if len(order) > 12:
            lines.append(f"... and {len(order) - 12} more")
        lines.append(
            f"geometric mean {self.geometric_mean:.3f} over {len(order)} tensors"
            + (f" and {self.draws} draws: " if self.draws > 1 else ": ")
            + ("inside the contract" if self.passed else "OUTSIDE the contract")
        )
        return "\n".join(lines)


Tensors = Mapping[str, "torch.Tensor | None"]


def compare(
    eager: Tensors,
    optimized: Tensors,
    reference64: Tensors,
    *,
    mean_counts: bool = True,
    precision: torch.dtype | None = None,
) -> Comparison:
    """Judge a step by the error contract.

    Args:
        eager: tensors of the unoptimized run by name. A name's part before its first "/" is its
            group ("output", "grad"): scales are taken within a group. None for a missing gradient.
        optimized: the same names, from the optimized run.
        reference64: the same names, from a float64 run.
        mean_counts: whether the geometric mean is part of the verdict, given tensors enough.
        precision: count ulps in this dtype where it is coarser than a tensor's own.

    Raises:
        ValueError: when the three do not have the same names.

    Example:
        >>> x = torch.randn(1000, dtype=torch.float64)
        >>> good = {"output/0": x.float()}; bad = {"output/0": x.float() * (1 + 1e-5)}
        >>> compare(good, good, {"output/0": x}).passed, compare(good, bad, {"output/0": x}).passed
        (True, False)
    """
    if not (eager.keys() == optimized.keys() == reference64.keys()):
        odd = set(eager) ^ set(optimized) | set(eager) ^ set(reference64)
        raise ValueError(f"the three runs hold different tensors: {sorted(odd)}")
    raw = [_measure(n, eager[n], optimized[n], reference64[n]) for n in eager]
    scales = _scales(raw)
    few = _median([m.error_eager / scales[m.name][0] for m in raw if m.judged])
    tensors = tuple(_judge(m, *scales[m.name], few, precision) for m in raw)
    enough = sum(t.eager > 0 for t in tensors) >= ENOUGH
    return Comparison(tensors, mean_of(t.ratio for t in tensors), mean_counts and enough)


def mean_of(ratios: Iterable[float]) -> float:
    """The geometric mean of some error ratios; 1.0 of none, infinite where one is not finite.

    Example:
        >>> mean_of([1.0, 4.0])
        2.0
    """
    ratios = [r for r in ratios if not r <= 0]
    if not all(map(math.isfinite, ratios)):
        return math.inf
    return math.exp(sum(map(math.log, ratios)) / max(len(ratios), 1))


@dataclasses.dataclass(frozen=True)
class _Measure:
    """Absolute figures of one tensor, before any scale is chosen."""

    name: str
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    norm: float = 0.0
    peak: float = 0.0
    error_eager: float = 0.0
    error_optimized: float = 0.0
    difference: float = 0.0
    max_eager: float = 0.0
    max_optimized: float = 0.0
    count: int = 0
    wrong: str | None = None

    @property
    def judged(self) -> bool:
        """Whether there are float errors to judge."""
        return self.wrong is None and self.count > 0

    @property
    def group(self) -> str:
        return self.name.partition("/")[0]


def _measure(
    name: str, eager: torch.Tensor | None, opt: torch.Tensor | None, ref: torch.Tensor | None
) -> _Measure:
    if eager is None or opt is None or ref is None:
        return _missing(name, eager, opt, ref)
    shape = tuple(opt.shape)
    if eager.shape != opt.shape or eager.dtype != opt.dtype:
        wrong = f"{_say(opt)} where eager has {_say(eager)}"
        return _Measure(name, opt.dtype, shape, wrong=wrong)
    if not (opt.is_floating_point() or opt.is_complex()):
        same = torch.equal(eager, opt)
        return _Measure(name, opt.dtype, shape, wrong=None if same else "differs from eager")
    wide = torch.complex128 if opt.is_complex() else torch.float64
    e, o, r = (t.detach().to(device=opt.device, dtype=wide) for t in (eager, opt, ref))
    if not _same_places(e, o):
        wrong = "infinities or NaNs stand elsewhere than in eager"
        return _Measure(name, opt.dtype, shape, wrong=wrong)
    finite = torch.isfinite(e) & torch.isfinite(r)
    e, o, r = e[finite], o[finite], r[finite]
    if not e.numel():
        return _Measure(name, opt.dtype, shape)
    peak = [t.abs().amax().item() for t in (r, e - r, o - r)]
    norm = [torch.linalg.vector_norm(t).item() for t in (r, e - r, o - r, o - e)]
    return _Measure(
        name,
        opt.dtype,
        shape,
        norm[0],
        peak[0],
        norm[1],
        norm[2],
        norm[3],
        peak[1],
        peak[2],
        e.numel(),
    )


def _missing(
    name: str, eager: torch.Tensor | None, opt: torch.Tensor | None, ref: torch.Tensor | None
) -> _Measure:
    """A gradient that one run does not have: right where the others have none, or zeros."""
    some = next((t for t in (opt, eager, ref) if t is not None), None)
    if some is None:
        return _Measure(name, None, ())
    zero = all(t is None or not bool(torch.any(t != 0)) for t in (eager, opt))
    wrong = None if zero else f"{'missing' if opt is None else 'present'}, unlike in eager"
    return _Measure(name, some.dtype, tuple(some.shape), wrong=wrong)


def _say(t: torch.Tensor) -> str:
    return f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}"


def _same_places(e: torch.Tensor, o: torch.Tensor) -> bool:
    """Whether two tensors agree where either is not finite (NaN with NaN, +inf with +inf)."""
    odd = ~(torch.isfinite(e) & torch.isfinite(o))
    if not bool(odd.any()):
        return True
    return torch.equal(torch.nan_to_num(e[odd], nan=1.5), torch.nan_to_num(o[odd], nan=1.5))


def _scales(raw: Sequence[_Measure]) -> dict[str, tuple[float, float, bool]]:
    """Per tensor: the norm and the peak that its errors are relative to, and whether the step's."""
    norm: dict[str, float] = {}
    peak: dict[str, float] = {}
    for m in raw:
        norm[m.group] = max(norm.get(m.group, 0.0), m.norm)
        peak[m.group] = max(peak.get(m.group, 0.0), m.peak)
    found = {}
    for m in raw:
        step = m.norm < NOTHING * norm[m.group] or m.norm == 0.0
        scale = (norm[m.group], peak[m.group]) if step else (m.norm, m.peak)
        found[m.name] = (scale[0] or 1.0, scale[1], step)
    return found


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2] if ordered else 0.0


def _floor(eps: float, count: int, typical: float) -> float:
    """The error below which two runs are equally good."""
    own = (0.5 + 4.0 / math.sqrt(count)) * eps
    return max(own, typical) if count <= FEW else own


def _judge(
    m: _Measure,
    norm: float,
    peak: float,
    step: bool,
    typical: float,
    precision: torch.dtype | None,
) -> TensorError:
    """The relative errors of one tensor and its verdict."""
    dtype = "-" if m.dtype is None else str(m.dtype).removeprefix("torch.")
    eager, opt, between = (v / norm for v in (m.error_eager, m.error_optimized, m.difference))
    ratio, verdict = 1.0, m.wrong or "ok"
    if m.wrong is not None:
        ratio = math.inf
    elif m.judged and m.dtype is not None:
        eps = max(torch.finfo(d).eps for d in (m.dtype, precision or m.dtype))
        floor = _floor(eps, m.count, typical)
        ratio = max(opt, floor) / max(eager, floor)
        allowed = max(MAX_ABSOLUTE_RATIO * m.max_eager, MAX_ULPS * eps * peak)
        if not ratio <= MAX_RATIO:
            verdict = f"error {ratio:.2f} times eager's, at most {MAX_RATIO:g} allowed"
        elif m.count > FEW and not m.max_optimized <= allowed:
            verdict = f"greatest error {m.max_optimized:.2e}, at most {allowed:.2e} allowed"
        double = m.dtype in (torch.float64, torch.complex128)
        if (double and between <= AGREEMENT) or (eager > NO_DIGIT and ratio < LUCK):
            ratio, verdict = 1.0, "ok"
    return TensorError(
        m.name,
        dtype,
        m.shape,
        eager,
        opt,
        between,
        m.max_eager,
        m.max_optimized,
        ratio,
        step,
        verdict,
    )
