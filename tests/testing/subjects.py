"""Models under test, right optimized twins, and twins with one fault each."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import graphopt
from graphopt.passes import Match, rule

aten = torch.ops.aten


class Block(nn.Module):
    """Norm, dropout, activation, a buffer that counts, an argument written in place."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(16, 24)
        self.norm = nn.LayerNorm(24)
        self.down = nn.Linear(24, 16)
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("mean", torch.zeros(16))
        self.drop = 0.1
        with torch.no_grad():
            for p in self.parameters():
                p.add_(torch.randn_like(p) * 0.1)

    def forward(self, x: torch.Tensor, seen: torch.Tensor | None = None) -> Any:
        h = F.relu(F.dropout(self.norm(self.up(x)), self.drop, self.training))
        y = x + self.down(h)
        self.mean.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        if seen is not None:
            seen.add_(1)
        return {"y": y, "pair": (y.t(), y.sum())}


def inputs() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(6, 16)


def optimized(model: nn.Module, **options: Any) -> Any:
    """`graphopt.optimize`, its warning that there is no GPU left out."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", graphopt.GraphoptWarning)
        return graphopt.optimize(model, **options)


class Twin(nn.Module):
    """A right twin of a model over the same state; a fault is planted by replacing `step`."""

    def __init__(self, model: nn.Module, step: Callable[..., Any]) -> None:
        super().__init__()
        self.__dict__["inner"] = model
        self.__dict__["step"] = step
        for cells in ("_parameters", "_buffers", "_modules"):
            self.__dict__[cells] = model.__dict__[cells]
        self.train(model.training)

    def forward(self, x: torch.Tensor, seen: torch.Tensor | None = None) -> Any:
        return self.step(self.inner, x, seen)


class _Scale(torch.autograd.Function):
    """The value itself; its gradient times a factor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        return g * ctx.factor, None


def _one_gradient(model: Any, x: torch.Tensor, seen: Any) -> Any:
    weight = model.norm.weight
    return torch.func.functional_call(model, {"norm.weight": _Scale.apply(weight, 1.01)}, (x, seen))


def _input_gradient(model: Any, x: torch.Tensor, seen: Any) -> Any:
    return model(_Scale.apply(x, 1.001), seen)


def _no_gradient(model: Any, x: torch.Tensor, seen: Any) -> Any:
    bias = model.down.bias.detach()
    return torch.func.functional_call(model, {"down.bias": bias}, (x, seen))


def _gradient_of_unused(model: Any, x: torch.Tensor, seen: Any) -> Any:
    found = model(x, seen)
    return {"y": found["y"], "pair": (found["pair"][0], found["pair"][1] + 0 * model.unused.sum())}


def _value(model: Any, x: torch.Tensor, seen: Any) -> Any:
    found = model(x, seen)
    y = found["y"]
    bump = torch.zeros_like(y)
    bump[2, 3] = 1e-4
    return {"y": y + bump, "pair": found["pair"]}


def _buffer(model: Any, x: torch.Tensor, seen: Any) -> Any:
    found = model(x, seen)
    model.mean.mul_(1.0001)
    return found


def _no_buffer(model: Any, x: torch.Tensor, seen: Any) -> Any:
    before = model.mean.clone()
    found = model(x, seen)
    model.mean.copy_(before)
    return found


def _no_effect(model: Any, x: torch.Tensor, seen: Any) -> Any:
    return model(x, None if seen is None else seen.clone())


def _stray_effect(model: Any, x: torch.Tensor, seen: Any) -> Any:
    found = model(x, seen)
    return found if seen is None else (seen.add_(1), found)[1]


def _dtype(model: Any, x: torch.Tensor, seen: Any) -> Any:
    found = model(x, seen)
    return {"y": found["y"].double(), "pair": found["pair"]}


def _strides(model: Any, x: torch.Tensor, seen: Any) -> Any:
    found = model(x, seen)
    return {"y": found["y"], "pair": (found["pair"][0].contiguous(), found["pair"][1])}


def _structure(model: Any, x: torch.Tensor, seen: Any) -> Any:
    found = model(x, seen)
    return {"y": found["y"], "pair": list(found["pair"])}


def _missing(model: Any, x: torch.Tensor, seen: Any) -> Any:
    return {"y": model(x, seen)["y"]}


def _shape(model: Any, x: torch.Tensor, seen: Any) -> Any:
    found = model(x, seen)
    return {"y": found["y"][None], "pair": found["pair"]}


def _detached(model: Any, x: torch.Tensor, seen: Any) -> Any:
    found = model(x, seen)
    return {"y": found["y"], "pair": (found["pair"][0], found["pair"][1].detach())}


def _copy_of_view(model: Any, x: torch.Tensor, seen: Any) -> Any:
    found = model(x, seen)
    y = found["y"]
    return {"y": y.clone(), "pair": found["pair"]}


def _raises(model: Any, x: torch.Tensor, seen: Any) -> Any:
    raise ZeroDivisionError("planted")


def _nan(model: Any, x: torch.Tensor, seen: Any) -> Any:
    found = model(x, seen)
    return {"y": found["y"], "pair": (found["pair"][0], found["pair"][1] * torch.nan)}


RIGHT: Callable[..., Any] = lambda model, x, seen: model(x, seen)  # noqa: E731

FAULTS: dict[str, tuple[Callable[..., Any], str]] = {
    "one parameter's gradient": (_one_gradient, r"the gradient of norm\.weight is off"),
    "an argument's gradient": (_input_gradient, "the gradient of argument x is off"),
    "a missing gradient": (_no_gradient, r"the gradient of down\.bias is off"),
    "a gradient where none is": (_gradient_of_unused, r"unused is off(.|\n)*eager has None"),
    "one element of a value": (_value, r"result 0 is off(.|\n)*worst element \[2, 3\]"),
    "a buffer's update": (_buffer, "the buffer mean is off"),
    "a missing buffer update": (_no_buffer, "the buffer mean is off"),
    "a missing effect on an argument": (_no_effect, "the argument after the call, seen is off"),
    "an effect too many": (_stray_effect, "the argument after the call, seen is off"),
    "a dtype": (_dtype, r"result 0 is off(.|\n)*float64"),
    "strides": (_strides, r"result 1 is off(.|\n)*stride \(16, 1\)|stride \(6, 1\)"),
    "a container": (_structure, "another structure"),
    "a missing result": (_missing, "another structure"),
    "a shape": (_shape, r"result 0 is off(.|\n)*1, 6, 16"),
    "a result without gradient": (_detached, "requires_grad False"),
    "a view that is a copy": (_copy_of_view, "shares memory"),
    "an exception": (_raises, "ZeroDivisionError: planted"),
    "a NaN": (_nan, "infinities or NaNs"),
}
"""Name of a fault -> the step with it, and what the message says."""


def wrong_norm(replace: Callable[[Match], Any]) -> Any:
    """A rule on every LayerNorm with a replacement of the test's own."""

    @rule("fusion", register=False)
    def planted_norm(x, shape, weight, bias, eps, _cudnn):  # type: ignore[no-untyped-def]
        """A LayerNorm, done wrong."""
        return aten.layer_norm.default(x, shape, weight, bias, eps, _cudnn)

    planted_norm.replace(replace)
    return planted_norm


planted_norm = wrong_norm(
    lambda m: m.call(torch.ops.graphopt.layer_norm.default, m.x, m.weight, m.bias, 0.1)
)
"""A rule that takes a wrong eps, at the top level so that a script finds it."""

WRONG_RULES = ["default,-layer_norm,-add_layer_norm", planted_norm]


def make_block() -> Block:
    """A factory."""
    return Block().train()


def right_twin(model: nn.Module) -> Any:
    """Optimized, over parameters of its own."""
    return optimized(copy.deepcopy(model))
