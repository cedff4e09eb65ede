"""A rule of one's own: exp(log(x)) is x. Pattern, check, replacement, proof.

python examples/02_own_rule.py
"""

import torch
from torch import nn

import graphopt
from graphopt.passes import Match, rule

aten = torch.ops.aten


@rule("canonical", register=False)
def exp_of_log(x):
    """exp(log(x)) is x."""
    return aten.exp.default(aten.log.default(x))


@exp_of_log.check
def _(m: Match) -> str | None:
    """Integers become floats in log, so x itself would have another dtype."""
    return None if m.tensor("x").dtype == m.val.dtype else "the logarithm changes the dtype"


@exp_of_log.replace
def _(m: Match):
    """The input itself."""
    return m.x


class Model(nn.Module):
    """Something that the rule fits."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Any shape of positive numbers."""
        return 2 * (x + 1).log().exp()


def main() -> None:
    """Optimize with the rule and without it."""
    x = torch.rand(8)
    opt = graphopt.optimize(Model(), x, rules=["default", exp_of_log])
    print(opt.code)
    print(graphopt.verify(opt, x))
    print("without it:", graphopt.optimize(Model(), x).rewrites)


if __name__ == "__main__":
    main()
