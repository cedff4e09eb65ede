"""What random programs are strung together from: the chains that models hold, and near misses.

Each idiom takes the builder and a value, adds a few lines and gives the value to go on from. In
each choice the plain form stands first.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from graphopt.testing import _norms, _pointwise
from graphopt.testing._attention import ATTENTION
from graphopt.testing._builder import Builder, Chooser
from graphopt.testing._memory import MEMORY
from graphopt.testing.programs import Program

Idiom = Callable[[Builder, str], "str | None"]


def softmax(b: Builder, x: str) -> str:
    """Softmax as a function or written out, safe or not, over the last dim or another."""
    dim = b.choose.pick((-1, 1, -2))
    e = b.choose.pick(
        (
            f"torch.exp({{0}} - {{0}}.amax({dim}, keepdim=True))",
            f"torch.exp({{0}} - {{0}}.max({dim}, keepdim=True).values)",
            f"({{0}} - {{0}}.amax({dim}, keepdim=True).detach()).exp()",
            "torch.exp(torch.tanh({0}))",
        )
    )
    if b.choose.once_in(3):
        return b(b.choose.pick((f"F.softmax({{0}}, {dim})", f"F.log_softmax({{0}}, {dim})")), x)
    h = b(e, x)
    other = b.choose.pick((dim, dim, dim, -1))
    return b(f"{{0}} / {{0}}.sum({other}, keepdim=True)", h)


def loss(b: Builder, x: str) -> str:
    """Cross entropy of rows, whole or from log_softmax; the program goes on from the input."""
    b.need(len(b.shape(x)) == 3 and not b.varies(x, -1) and b.shape(x)[:2] == b.shape("x0")[:2])
    target = b.input("B", "S", dtype="int64", kind=f"index:{b.shape(x)[-1]}", requires_grad=False)
    reduction = b.choose.pick(("mean", "sum"))
    form = b.choose.pick(
        (
            "F.nll_loss(F.log_softmax({0}.flatten(0, 1), -1), {1}.flatten(), "
            f"reduction='{reduction}')",
            f"F.cross_entropy({{0}}.flatten(0, 1), {{1}}.flatten(), reduction='{reduction}')",
            "F.nll_loss({0}.transpose(1, 2).log_softmax(1), {1})",
            "F.nll_loss(F.log_softmax({0}.flatten(0, 1), 0), {1}.flatten())",
            "F.nll_loss(F.log_softmax({0}.flatten(0, 1), -1, dtype=torch.float32), {1}.flatten())",
        )
    )
    return b("{0} * {1}", x, b(form, x, target))


def reduction(b: Builder, x: str) -> str:
    """A reduction, broadcast back onto its operand."""
    dim = b.choose.pick((-1, 1))
    op = b.choose.pick(("mean", "sum", "amax", "var"))
    r = b(f"{{0}}.{op}({dim}, keepdim=True)", x)
    return b(b.choose.pick(("{0} - {1}", "{0} * {1}", "{1}.expand_as({0}) + {0}")), x, r)


def embedding(b: Builder, x: str) -> str:
    """Rows of a table added to the value, and now and then the table as the last linear, tied."""
    b.need(len(b.shape(x)) == 3 and not b.varies(x, -1) and b.shape(x)[:2] == b.shape("x0")[:2])
    index = b.input("B", "S", dtype="int64", kind="index:13", requires_grad=False)
    table = b.parameter(f"nn.Embedding(13, {b.shape(x)[-1]}{b.dtype_code(x)})")
    h = b("{0} + {1}({2})", x, table, index)
    return b("F.linear({0}, {1}.weight)", h, table) if b.choose.once_in(3) else h


IDIOMS: tuple[tuple[Idiom, int], ...] = (
    (_pointwise.activation, 2),
    (_pointwise.arithmetic, 3),
    (_pointwise.linear, 3),
    (_norms.norm_chain, 4),
    (_norms.add_norm, 5),
    (_norms.layer_norm, 2),
    (_norms.rms_norm, 3),
    (_pointwise.linear_chain, 4),
    (_pointwise.gate, 4),
    (_pointwise.gelu, 2),
    (_pointwise.gelu_tanh, 2),
    (_pointwise.silu, 2),
    (_pointwise.softcap, 1),
    (_pointwise.dropout, 1),
    (_pointwise.residual, 3),
    (_pointwise.shared, 1),
    (_pointwise.selection, 2),
    (softmax, 2),
    (loss, 1),
    (reduction, 1),
    (embedding, 1),
    (_norms.other_norm, 2),
    (_pointwise.odd_linear, 1),
    *((a, 2) for a in ATTENTION),
    *((m, 1) for m in MEMORY),
)
"""Each idiom and how often it is drawn."""

_DRAWN: tuple[Idiom, ...] = tuple(idiom for idiom, times in IDIOMS for _ in range(times))


def compose(choose: Chooser, max_idioms: int) -> Program:
    """String idioms together into a program, its results from anywhere in it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        b = Builder(choose)
        dtype = choose.pick(("float32",) * 6 + ("bfloat16", "float64", "float16"))
        last = b.input("B", "S", 16, dtype=dtype, requires_grad=not choose.once_in(5))
        for _ in range(1 + choose.below(max_idioms)):
            last = b.attempt(choose.pick(_DRAWN), b.operand()) or last
        return b.program(_outputs(b, last))


def _outputs(b: Builder, last: str) -> list[str]:
    """The last value, and now and then others: inside values, an input, one value twice."""
    found = [b.operand() if b.values[last].dead else last]
    live = b.floats()
    while b.choose.once_in(3) and len(found) < 4:
        found.append(b.choose.pick(live))
    return found
