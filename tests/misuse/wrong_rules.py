"""Rules of a user's own that are wrong, for `relu(x)` in a small model."""

from __future__ import annotations

from typing import Any

import torch

from graphopt.passes import Rule, rule

aten = torch.ops.aten


def relu_rule(name: str = "my_relu") -> Rule:
    """relu(x), with neither check nor replacement."""

    def pattern(x: Any) -> Any:
        return aten.relu.default(x)

    pattern.__name__ = name
    return rule("fusion", register=False)(pattern)


def replaced_by(function: Any, name: str = "my_relu") -> Rule:
    """relu(x) becomes what the function of the match returns."""
    made = relu_rule(name)
    made.replace(function)
    return made


def checked_by(function: Any) -> Rule:
    """relu(x) stays relu(x) where the function of the match allows it."""
    made = replaced_by(lambda m: m.call(aten.relu.default, m.x))
    made.check(function)
    return made


def with_pattern(pattern: Any) -> Rule:
    """A pattern that becomes relu(x)."""
    made = rule("fusion", register=False)(pattern)
    made.replace(lambda m: m.call(aten.relu.default, m.x))
    return made


def fail(*args: Any) -> Any:
    raise ZeroDivisionError("a fault in the rule")
