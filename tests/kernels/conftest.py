"""Backends that every kernel test runs on, and the comparisons they share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from graphopt.kernels import Op, Sample, _prepared


@dataclass(frozen=True)
class Backend:
    """Where an operator runs: `device`, and whether Triton runs it (interpreted on the CPU)."""

    name: str
    device: torch.device

    @property
    def interpreted(self) -> bool:
        return self.name == "triton" and self.device.type == "cpu"


@pytest.fixture(params=["reference", "triton"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Backend:
    """The reference on the CPU; then Triton, on the GPU if there is one, else interpreted."""
    return _backend(request.param, monkeypatch)


@pytest.fixture
def triton_backend(monkeypatch: pytest.MonkeyPatch) -> Backend:
    """Triton alone, on the GPU if there is one, else interpreted."""
    return _backend("triton", monkeypatch)


def _backend(name: str, monkeypatch: pytest.MonkeyPatch) -> Backend:
    if name == "reference":
        return Backend(name, torch.device("cpu"))
    if torch.cuda.is_available():
        return Backend(name, torch.device("cuda", 0))
    pytest.importorskip("triton")
    assert os.environ.get("TRITON_INTERPRET") == "1", "set by tests/conftest.py"
    monkeypatch.setenv("GRAPHOPT_TRITON_ON_CPU", "1")
    return Backend(name, torch.device("cpu"))


@pytest.fixture
def narrow_tables(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Launch tables of the norms that send rows of more than 32 columns to the wide kernels."""
    launch = pytest.importorskip("graphopt.kernels._norm_launch")
    config = type(launch.WIDE)
    narrow = (config(block=32, rows=2, warps=1, per_sm=0, stages=0),)
    monkeypatch.setattr(launch, "FORWARD", narrow)
    monkeypatch.setattr(launch, "BACKWARD", narrow)
    monkeypatch.setattr(launch, "WIDE", config(block=64, rows=1, warps=1, per_sm=0, stages=1))
    monkeypatch.setattr(
        launch, "WIDE_WEIGHTS", config(block=32, rows=4, warps=1, per_sm=4, stages=1)
    )
    _prepared.forget()
    yield
    _prepared.forget()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(20260112)


Results = tuple[tuple[torch.Tensor, ...], list[torch.Tensor | None]]


class Check:
    """Runs an operator forward and backward beside its reference in float64."""

    def leaves(self, sample: Sample, dtype: torch.dtype | None = None) -> Sample:
        """The sample with floating tensors as leaves that want gradients, strides kept."""

        def leaf(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or not value.is_floating_point():
                return value
            if dtype is not None:
                return value.detach().to(dtype, copy=True).requires_grad_()
            return value.detach().requires_grad_()

        kwargs = {key: leaf(value) for key, value in sample.kwargs.items()}
        return Sample(tuple(leaf(value) for value in sample.args), kwargs)

    def run(
        self, function: Callable[..., Any], sample: Sample, grads: Any = None
    ) -> tuple[tuple[torch.Tensor, ...], list[torch.Tensor], tuple[torch.Tensor, ...]]:
        """(outputs, gradients of every floating argument, the gradients that went in)."""
        outputs = function(*sample.args, **sample.kwargs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        if grads is None:
            grads = tuple(torch.randn_like(out) for out in outputs)
        wanted = [
            value
            for value in (*sample.args, *sample.kwargs.values())
            if isinstance(value, torch.Tensor) and value.requires_grad
        ]
        found = torch.autograd.grad(
            outputs, wanted, [g.to(o.dtype) for g, o in zip(grads, outputs, strict=True)],
            allow_unused=True,
        )  # fmt: skip
        return outputs, list(found), grads

    def against_float64(
        self, op: Op, sample: Sample, grads: Any = None, factor: float = 1.0, size: float = 0.0
    ) -> None:
        """Outputs and gradients within a few roundings of the reference's in float64.

        `size` is that of the terms that a result is the difference of, where they are larger.
        """
        sample = self.leaves(sample)
        outputs, found, grads = self.run(op.overload, sample, grads)
        exact = self.leaves(sample, torch.float64)
        wide = tuple(g.double() for g in grads)
        expected, slopes, _ = self.run(op.reference, exact, wide)
        lowest = max(
            torch.finfo(t.dtype).eps for t in (*outputs, *(g for g in found if g is not None))
        )
        for name, ours, theirs in [
            *((f"output {i}", *pair) for i, pair in enumerate(zip(outputs, expected, strict=True))),
            *((f"gradient {i}", *pair) for i, pair in enumerate(zip(found, slopes, strict=True))),
        ]:
            self.near(
                name, ours, theirs, max(lowest, torch.finfo(torch.float32).eps) * factor, size
            )
        for value, grad in zip(
            [v for v in (*sample.args, *sample.kwargs.values()) if isinstance(v, torch.Tensor)],
            found,
            strict=False,
        ):
            if grad is not None and value.is_floating_point():
                assert grad.dtype == value.dtype
                assert grad.shape == value.shape

    def near(
        self,
        name: str,
        ours: torch.Tensor | None,
        theirs: torch.Tensor | None,
        eps: float,
        size: float = 0.0,
    ) -> None:
        """Within 4 eps of the value plus 8 eps of the tensor's root mean square (or `size`)."""
        assert (ours is None) == (theirs is None), name
        if ours is None or theirs is None or ours.numel() == 0:
            return
        ours, theirs = ours.detach().double(), theirs.detach().double().to(ours.device)
        assert torch.equal(ours.isnan(), theirs.isnan()), f"{name}: NaN in other places"
        finite = theirs.isfinite()
        typical = theirs[finite].square().mean().sqrt() if finite.any() else torch.tensor(0.0)
        typical = max(float(typical), size, 1e-30)
        allowed = eps * (4 * theirs.abs() + 8 * typical)
        worst = ((ours - theirs).abs() - allowed)[finite]
        assert worst.numel() == 0 or worst.max() <= 0, (
            f"{name}: off by {(ours - theirs)[finite].abs().max():.3g}, typical {typical:.3g}"
        )


@pytest.fixture
def check() -> Check:
    """The shared comparisons."""
    return Check()
