"""Idioms of pointwise ops and linear layers: activations in their spellings, gates, residuals."""

from __future__ import annotations

import math

import torch

from graphopt.testing._builder import Builder

ACTIVATIONS = (
    "F.relu({0})",
    "F.gelu({0})",
    "F.silu({0})",
    "F.gelu({0}, approximate='tanh')",
    "torch.tanh({0})",
    "torch.sigmoid({0})",
    "F.leaky_relu({0}, 0.1)",
    "F.softplus({0})",
)
UNARY = (
    *("{0} * 2.0", "{0} + 1.0", "1.0 - {0}", "-{0}", "{0} / 3.0", "{0} * 1", "{0} * -0.0625"),
    *("torch.exp(-{0}.abs())", "{0}.clamp(-1.0, 1.0)", "torch.sqrt({0} * {0} + 1.0)"),
    *("{0}.square()", "{0} ** 2", "torch.rsub({0}, 0.5, alpha=2)", "torch.sin({0})"),
)
BINARY = (
    *("{0} + {1}", "{0} - {1}", "{0} * {1}", "torch.add({0}, {1}, alpha=0.5)"),
    *("torch.maximum({0}, {1})", "{0} / ({1} * {1} + 1.0)", "torch.lerp({0}, {1}, 0.25)"),
)
EPSILONS = (1e-5, 1e-6, 1e-3)
PROBABILITIES = (0.1, 0.5, 0.0)


def activation(b: Builder, x: str) -> str:
    """An activation function."""
    return b(b.choose.pick(ACTIVATIONS), x)


def gelu(b: Builder, x: str) -> str:
    """GELU written out, in the associations that model files hold; one in six a near miss."""
    root = b.choose.pick((math.sqrt(2.0),) * 5 + (1.5,))
    wide = ".float()" if b.choose.once_in(4) else ""
    inner = b.choose.pick((f"{{0}}{wide} / {root}", f"{{0}}{wide} * {1 / root}"))
    factor = f"(1.0 + torch.erf({inner}))"
    forms = (
        f"0.5 * {{0}} * {factor}",
        f"{{0}} * 0.5 * {factor}",
        f"{{0}} * (0.5 * {factor})",
        f"{{0}} * {factor} * 0.5",
        f"{{0}} * {factor} / 2",
        f"{{0}} / 2 * {factor}",
    )
    return b(b.choose.pick(forms), x)


def gelu_tanh(b: Builder, x: str) -> str:
    """The tanh form of GELU written out; one in six a near miss."""
    c = b.choose.pick((math.sqrt(2 / math.pi), 0.7978845608028654, 0.7978845608, 0.8))
    k = b.choose.pick((0.044715,) * 5 + (0.05,))
    inner = b.choose.pick(
        (
            f"{c} * ({{0}} + {k} * torch.pow({{0}}, 3.0))",
            f"{c} * ({{0}} + {k} * {{0}} * {{0}} * {{0}})",
            f"{{0}} * {c} * (1.0 + {k} * {{0}} * {{0}})",
            f"{c} * {{0}} * (1 + {k} * {{0}} ** 2)",
        )
    )
    form = b.choose.pick(
        ("0.5 * {0} * (1.0 + torch.tanh(%s))", "{0} * (0.5 * (1 + torch.tanh(%s)))")
    )
    return b(form % inner, x)


def silu(b: Builder, x: str) -> str:
    """X * sigmoid(x) in several spellings, or another factor in the sigmoid."""
    forms = (
        "{0} * torch.sigmoid({0})",
        "torch.sigmoid({0}) * {0}",
        "{0} / (1 + torch.exp(-{0}))",
        "{0} * torch.sigmoid(1.702 * {0})",
        "{0} * torch.sigmoid(-{0})",
    )
    return b(b.choose.pick(forms), x)


def softcap(b: Builder, x: str) -> str:
    """The logit soft cap, or a near miss whose two caps differ."""
    cap, other = b.choose.pick(((30.0, 30.0), (2.0, 2.0), (5.0, 4.0)))
    form = b.choose.pick(
        (f"torch.tanh({{0}} / {cap}) * {other}", f"{other} * torch.tanh({{0}} * {1 / cap})")
    )
    return b(form, x)


def arithmetic(b: Builder, x: str) -> str:
    """A pointwise op with a number, or with another value of the same shape."""
    y = b.partner(x)
    if y is None or b.choose.once_in(3):
        form = b.choose.pick(UNARY)
        return b(form, x, fresh="exp" not in form and "sqrt" not in form)  # these keep their result
    return b(b.choose.pick(BINARY), x, y, fresh=True)


def shared(b: Builder, x: str) -> str:
    """One value computed twice or used twice."""
    forms = (
        "{0} + F.relu({0})",
        "F.gelu({0}) * F.gelu({0})",
        "{0} * torch.sigmoid({0}) + torch.sigmoid({0})",
    )
    return b(b.choose.pick(forms), x)


def selection(b: Builder, x: str) -> str:
    """Where and masked_fill with masks that are given, computed from values or from indices."""
    shape = b.inputs[0].shape
    forms = ["torch.where({0} > 0.25, {0}, {0} * 0.5)", "{0}.masked_fill({0} < -0.5, 0.75)"]
    rows = "torch.arange({0}.shape[-2])[:, None]"
    forms += [
        f"torch.where(({rows} >= 0).expand({{0}}.shape[-2], {{0}}.shape[-1]), {{0}}, "
        "torch.full((), 9.0)) * 2.0"
    ]
    forms += [f"torch.where({rows} >= 1, {{0}}, {{0}} * 2.0)"]
    if b.choose.once_in(3) and b.shape(x) == b.shape("x0"):
        mask = b.input(*shape, dtype="bool", kind="mask", requires_grad=False)
        return b(
            b.choose.pick(("{0}.masked_fill({1}, 0.5)", "torch.where({1}, {0}, 0.0)")), x, mask
        )
    return b(b.choose.pick(forms), x)


def linear(b: Builder, x: str, out: int | None = None, bias: bool | None = None) -> str:
    """A linear layer: a module, an older one again, or the function on parameters."""
    width = b.shape(x)[-1]
    b.need(not b.varies(x, -1) and len(b.shape(x)) >= 2)
    out = out or b.choose.pick((16, 8, 32))
    bias = (not b.choose.once_in(4)) if bias is None else bias
    code = f"nn.Linear({width}, {out}, bias={bias}{b.dtype_code(x)})"
    if code in b.state and b.choose.once_in(3):
        return b("{1}({0})", x, f"s{b.state.index(code)}", fresh=True)
    if b.choose.once_in(4):
        w = b.weight(out, width, like=x)
        if not bias:
            return b(b.choose.pick(("F.linear({0}, {1})", "{0} @ {1}.t()")), x, w, fresh=True)
        v = b.weight(out, like=x)
        form = b.choose.pick(("F.linear({0}, {1}, {2})", "{0} @ {1}.t() + {2}", CONV1D))
        return b(form, x, w, v, fresh=True)
    return b("{1}({0})", x, b.parameter(code), fresh=True)


CONV1D = "torch.addmm({2}, {0}.reshape(-1, {0}.shape[-1]), {1}.t()).view(*{0}.shape[:-1], -1)"


def dropout(b: Builder, x: str) -> str:
    """Dropout as a function or a module, on or off."""
    p = b.choose.pick(PROBABILITIES)
    if b.choose.once_in(3):
        return b("{1}({0})", x, b.parameter(f"nn.Dropout({p})"))
    return b(f"F.dropout({{0}}, {p}, self.training)", x)


def residual(b: Builder, x: str) -> str:
    """The sum with an older value, in either order, or with a broadcast one."""
    y = b.partner(x)
    if y is None or b.choose.once_in(6):
        return b("{0} + {1}", x, b.weight(b.shape(x)[-1], like=x)) if not b.varies(x, -1) else x
    return b("{0} + {1}", *b.choose.pick(((x, y), (y, x))), fresh=True)


def linear_chain(b: Builder, x: str) -> str:
    """Linear and activation; or linear, dropout and residual."""
    if b.choose.once_in(2):
        h = dropout(b, linear(b, x, out=b.shape(x)[-1]))
        return b("{0} + {1}", *b.choose.pick(((h, x), (x, h))))
    h = linear(b, x)
    if b.dtype(h) in (torch.bfloat16, torch.float16) and b.choose.once_in(3):
        h = b("{0}.float()", h)
    return activation(b, h)


def odd_linear(b: Builder, x: str) -> str:
    """A low-precision linear without bias whose width is no multiple of 8."""
    b.need(not b.varies(x, -1))
    low = b.choose.pick(("torch.bfloat16", "torch.float16", "torch.float32"))
    w = b.parameter(f"nn.Parameter(torch.randn(9, {b.shape(x)[-1]}, dtype={low}))")
    return b("F.linear({0}.to({1}.dtype), {1})", x, w)


def gate(b: Builder, x: str) -> str:
    """Gated linear unit: activation(gate) * up from two linears, from halves, or swapped."""
    if b.choose.once_in(3):
        b.need(b.shape(x)[-1] % 2 == 0 and not b.varies(x, -1))
        g, u = b("{0}.chunk(2, -1)[0]", x), b("{0}.chunk(2, -1)[1]", x)
    else:
        bias = b.choose.pick((False, True))
        g, u = linear(b, x, out=16, bias=bias), linear(b, x, out=16, bias=bias)
    act = b.choose.pick(
        (
            "F.silu({0})",
            "F.gelu({0})",
            "F.relu({0})",
            "F.gelu({0}, approximate='tanh')",
            "{0} * torch.sigmoid({0})",
            "torch.sigmoid({0})",
            "torch.tanh({0})",
        )
    )
    if b.choose.once_in(5):
        a = b(act, g)
        return b("{0} * {1} + {0}", a, u)
    form = b.choose.pick((f"{act} * {{1}}", f"{{1}} * ({act})", f"({act}) * ({{1}} + 1.0)"))
    out = b(form, g, u)
    return b("{0}.to(torch.bfloat16)", out) if b.choose.once_in(6) else out
