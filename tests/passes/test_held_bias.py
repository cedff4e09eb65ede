"""A bias is added inside the matrix product, as in eager; the fused op after it gives its gradient.

Added after the product was rounded to low precision, a bias that cancels the product leaves the
rounding error of the product.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from graphopt.passes import run_pipeline
from tests.passes.bodies import body_of, run

LOW = torch.bfloat16


def cancelling() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, w, b in which b takes all but a thousandth of the product away; a residual."""
    torch.manual_seed(0)
    x = torch.randn(1, 64).to(LOW).expand(5, 64).contiguous()
    w = torch.randn(6, 64).to(LOW)
    b = -(F.linear(x[:1].double(), w.double())[0] * 0.999).to(LOW)
    return x, w.requires_grad_(), b.requires_grad_(), torch.zeros(5, 6, dtype=LOW)


def of_linear(x, w, b, r):
    return F.relu(F.linear(x, w, b)) + 0 * r


def of_addmm(x, w, b, r):
    return F.relu(torch.addmm(b, x, w.t())) + 0 * r


def of_dropout(x, w, b, r):
    return r + F.dropout(F.linear(x, w, b), 0.5, True)


@pytest.mark.parametrize(
    ("function", "name"),
    [(of_linear, "bias_act"), (of_addmm, "bias_act"), (of_dropout, "dropout_add")],
)
def test_a_bias_that_cancels_the_product(function, name) -> None:
    x, w, b, r = cancelling()
    result = run_pipeline(body_of(function, (x, w, b, r)))
    assert name in [record.rule for record in result.rewrites]
    (y,) = run(result.body, (x, w, b, r))
    z = F.linear(x, w, b)
    if name == "dropout_add":
        kept = y != 0
        assert kept.any()
        assert torch.equal(y[kept], (2 * z)[kept])
        assert torch.equal(*(torch.autograd.grad(v.sum(), b)[0] for v in (y, (z * 2 * kept))))
    else:
        assert torch.equal(y, F.relu(z))
        found, expected = (torch.autograd.grad(v.sum(), (w, b)) for v in (y, F.relu(z)))
        torch.testing.assert_close(found, expected)


def test_the_product_does_not_sum_the_biass_gradient() -> None:
    x, w, b, r = cancelling()
    body = run_pipeline(body_of(of_linear, (x, w, b, r))).body
    (linear,) = [n for n in body.graph.nodes if n.target is torch.ops.aten.linear.default]
    assert linear.args[2].target is torch.ops.aten.detach.default
