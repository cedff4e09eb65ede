"""Idioms of norms: alone, of a sum, before dropout and activation, after a convolution."""

from __future__ import annotations

from graphopt.testing._builder import Builder
from graphopt.testing._pointwise import EPSILONS, activation, dropout, linear


def layer_norm(b: Builder, x: str) -> str:
    """LayerNorm: module, function, without weight, over another dim; or written out."""
    d, eps = b.wide(x), b.choose.pick(EPSILONS)
    kind = b.choose.below(8)
    if kind <= 1:
        code = f"nn.LayerNorm({d}, eps={eps}, elementwise_affine={kind == 0}{b.dtype_code(x)})"
        return b("{1}({0})", x, b.parameter(code))
    if kind == 2:
        return b(f"F.layer_norm({{0}}, ({d},), eps={eps})", x)
    if kind == 3:
        w, v = b.weight(d, like=x), b.weight(d, like=x)
        return b(f"F.layer_norm({{0}}, ({d},), {{1}}, {{2}}, {eps})", x, w, v)
    mean = "{0}.mean(-1, keepdim=True)"
    centered = f"({{0}} - {mean})"
    variance = b.choose.pick(
        (
            f"{centered}.pow(2).mean(-1, keepdim=True)",
            "{0}.var(-1, unbiased=False, keepdim=True)",
            f"({centered} * {centered}).mean(-1, keepdim=True)",
            "{0}.var(-1, keepdim=True)",
        )
    )
    form = b.choose.pick(
        (
            f"{centered} / torch.sqrt({variance} + {eps})",
            f"{centered} * torch.rsqrt({variance} + {eps})",
        )
    )
    if kind == 4:
        return b(form, x)
    w = b.weight(d, like=x)
    if kind == 5:
        return b(f"{{1}} * ({form})", x, w)
    return b(f"({form}) * {{1}} + {{2}}", x, w, b.weight(d, like=x))


def rms_norm(b: Builder, x: str) -> str:
    """RMSNorm as torch's function, and as Llama, Gemma, T5 and others write it out."""
    d, eps = b.wide(x), b.choose.pick(EPSILONS)
    kind = b.choose.below(6)
    w = b.weight(d, like=x)
    if kind == 0:
        return b(f"F.rms_norm({{0}}, ({d},), {{1}}, {eps})", x, w)
    h = b.choose.pick(("{0}", "{0}.to(torch.float32)", "{0}.float()"))
    square = b.choose.pick((f"{h}.pow(2)", f"{h} * {h}", f"{h}.square()", f"{h}.pow(4)"))
    mean = f"({square}).mean(-1, keepdim=True)"
    normed = b.choose.pick(
        (f"{h} * torch.rsqrt({mean} + {eps})", f"{h} / torch.sqrt({mean} + {eps})")
    )
    forms = (
        f"{{1}} * ({normed}).to({{0}}.dtype)",
        f"(({normed}) * (1.0 + {{1}}.float())).type_as({{0}})",
        f"{{1}} * ({normed})",
        f"({normed}) * ({{1}} + 1)",
        normed,
    )
    form = b.choose.pick(forms)
    return b(form, x) if form is normed else b(form, x, w)


def norm_chain(b: Builder, x: str) -> str:
    """Norm, dropout and activation, each part now and then missing, now and then used elsewhere."""
    h = b.choose.pick((layer_norm, rms_norm))(b, x)
    inner = h
    if not b.choose.once_in(3):
        h = dropout(b, h)
    if not b.choose.once_in(3):
        h = activation(b, h)
    return b("{0} + {1}", h, inner) if b.choose.once_in(5) else h


def add_norm(b: Builder, x: str) -> str:
    """Norm of a sum, with dropout before it or not; the sum is read again in half of the cases."""
    y = b.partner(x) or b("{0} * 0.5", x)
    x = dropout(b, x) if b.choose.once_in(3) else x
    x = linear(b, x, out=b.shape(x)[-1]) if b.choose.once_in(3) else x
    total = b("{0} + {1}", *b.choose.pick(((x, y), (y, x))))
    h = b.choose.pick((layer_norm, rms_norm))(b, total)
    h = b("{0}.to(torch.bfloat16)", h) if b.choose.once_in(6) else h
    return b("{0} + {1}", h, total) if b.choose.once_in(2) else h


def other_norm(b: Builder, x: str) -> str:
    """GroupNorm and BatchNorm, alone or after a linear or convolution that may be frozen."""
    b.need(len(b.shape(x)) == 3 and not b.varies(x, -1))
    d, dtype = b.wide(x), b.dtype_code(x)
    if b.choose.once_in(3):
        norm = b.parameter(f"nn.GroupNorm(4, {d}{dtype})")
        return b("{1}({0}.transpose(1, 2)).transpose(1, 2)", x, norm)
    frozen = ".requires_grad_(False)" if b.choose.once_in(2) else ""
    affine = b.choose.pick(("", ", affine=False", ", eps=1e-3"))
    if b.choose.once_in(2):
        conv = b.choose.pick(
            (
                f"nn.Conv1d({d}, 8, 1{dtype})",
                f"nn.Conv1d({d}, 8, 1, bias=False{dtype})",
                f"nn.Conv1d({d}, 8, 3, padding=1, groups=4{dtype})",
            )
        )
        layer = b.parameter(conv + frozen)
        norm = b.parameter(f"nn.BatchNorm1d(8{affine}{dtype}){frozen}")
        return b("{2}({1}({0}.transpose(1, 2))).transpose(1, 2)", x, layer, norm)
    layer = b.parameter(f"nn.Linear({d}, 8{dtype}){frozen}")
    norm = b.parameter(f"nn.BatchNorm1d(8{affine}{dtype}){frozen}")
    return b("{2}({1}({0}.flatten(0, 1))).unflatten(0, {0}.shape[:2])", x, layer, norm)
