"""Idioms of attention: rotary embedding, attention written out and as one call, masks."""

from __future__ import annotations

from graphopt.testing._builder import Builder
from graphopt.testing._norms import add_norm, layer_norm, rms_norm
from graphopt.testing._pointwise import activation, dropout, gate, residual

HEADS, HEAD = 2, 8


def _heads(b: Builder, x: str, heads: int = HEADS) -> str:
    """A projection of rows, cut into heads: [B, heads, S, HEAD]."""
    width = heads * HEAD
    layer = b.parameter(f"nn.Linear({b.shape(x)[-1]}, {width}, bias=False{b.dtype_code(x)})")
    cut = b.choose.pick(("view", "reshape"))
    return b(f"{{1}}({{0}}).{cut}(*{{0}}.shape[:2], {heads}, {HEAD}).transpose(1, 2)", x, layer)


def _rows(b: Builder, x: str) -> str:
    """Heads back to rows: [B, S, heads * HEAD]."""
    form = b.choose.pick(
        (
            "{0}.transpose(1, 2).flatten(2)",
            "{0}.transpose(1, 2).contiguous().view({0}.shape[0], {0}.shape[2], -1)",
        )
    )
    return b(form, x)


def _fits(b: Builder, x: str) -> None:
    shape = b.shape(x)
    b.need(len(shape) == 3 and not b.varies(x, -1) and b.varies(x, 1), "not rows of a sequence")


def _turned(b: Builder, x: str, cos: str, sin: str) -> str:
    """X turned by its angles, halves as slices or chunks; one in six a near miss."""
    rotated = b.choose.pick(
        (
            f"torch.cat((-{{0}}[..., {HEAD // 2}:], {{0}}[..., :{HEAD // 2}]), -1)",
            "torch.cat((-{0}.chunk(2, -1)[1], {0}.chunk(2, -1)[0]), dim=-1)",
            f"torch.cat((-{{0}}.split({HEAD // 2}, -1)[1], {{0}}.split({HEAD // 2}, -1)[0]), -1)",
            "torch.cat((-{0}[..., {0}.shape[-1] // 2:], {0}[..., :{0}.shape[-1] // 2]), dim=-1)",
            f"torch.cat((-{{0}}[..., :{HEAD // 2}], {{0}}[..., {HEAD // 2}:]), -1)",
            "torch.cat((-{0}[..., 2:], {0}[..., :2]), -1)",
        )
    )
    form = b.choose.pick(
        (f"({{0}} * {{1}}) + ({rotated} * {{2}})", f"{{0}} * {{1}} - {rotated} * {{2}}")
    )
    out = b(form, x, cos, sin)
    if b.choose.once_in(4):
        return b("{0}.to(torch.bfloat16)", out)
    return b("{0}.type_as({1})", out, x) if b.dtype(out) != b.dtype(x) else out


def _angles(b: Builder, q: str) -> tuple[str, str]:
    """Cosines and sines [S, HEAD] from index algebra, in float32 or in the value's dtype."""
    steps = f"1.0 / (100.0 ** (torch.arange(0, {HEAD}, 2).float() / {HEAD}))"
    angles = b(f"torch.outer(torch.arange({{0}}.shape[2]).float(), {steps})", q, mask=True)
    both = b("torch.cat(({0}, {0}), -1)", angles, mask=True)
    low = b.choose.pick((".to({1}.dtype)", ""))
    cos = b(f"{{0}}.cos(){low}", both, q, mask=True)
    return cos, b(f"{{0}}.sin(){low}", both, q, mask=True)


def rope(b: Builder, x: str) -> str:
    """Rotary position embedding of rows cut into heads."""
    _fits(b, x)
    q = _heads(b, x)
    cos, sin = _angles(b, q)
    return _rows(b, _turned(b, q, cos, sin))


def _mask(b: Builder, q: str, *, additive: bool) -> str:
    """A mask [S, S] that is causal, or nearly, or given."""
    at = "torch.arange({0}.shape[-2])"
    seen = b.choose.pick(
        (
            f"{at}[None, :] <= {at}[:, None]",
            "torch.ones({0}.shape[-2], {0}.shape[-2], dtype=torch.bool).tril()",
            f"({at}[None, :] <= {at}[:, None]) & ({at}[None, :] > {at}[:, None] - 64)",
            f"({at}[None, :] <= {at}[:, None]) & ({at}[None, :] > {at}[:, None] - 3)",
            f"({at}[None, :] >= {at}[:, None])",
            f"({at}[None, :] >= 0).expand({{0}}.shape[-2], {{0}}.shape[-2])",
            "given",
        )
    )
    if seen == "given":
        mask = b.input("S", "S", dtype="bool", kind="mask", requires_grad=False)
    else:
        mask = b(seen, q)
    if not additive:
        return mask
    low = b.choose.pick(("float('-inf')", "torch.finfo({1}.dtype).min", "-1e4"))
    zero = b.choose.pick(("0.0", "0.0", "0.25"))
    return b(f"torch.where({{0}}, {zero}, {low}).to({{1}}.dtype)", mask, q, mask=True)


def attention(b: Builder, x: str) -> str:
    """Attention written out: scale, mask, softmax, dropout; one part now and then wrong."""
    _fits(b, x)
    q, k, v = (_heads(b, x) for _ in range(3))
    if b.choose.once_in(4):
        cos, sin = _angles(b, q)
        q, k = _turned(b, q, cos, sin), _turned(b, k, cos, sin)
    turned = b.choose.pick(("{1}.transpose(-2, -1)", "{1}.mT", "{1}.transpose(2, 3)"))
    scale = b.choose.pick((f" / {HEAD**0.5}", f" * {HEAD**-0.5}", "", " * 0.3"))
    scores = b(f"({{0}} @ {turned}){scale}", q, k)
    kind = b.choose.below(5)
    if kind == 1:
        scores = b("{0} + {1}", scores, _mask(b, q, additive=True), mask=True)
    elif kind == 2:
        hide = b.choose.pick(("~{1}", "{1} == 0"))
        low = b.choose.pick(("float('-inf')", "torch.finfo({0}.dtype).min"))
        scores = b(
            f"{{0}}.masked_fill({hide}, {low})", scores, _mask(b, q, additive=False), mask=True
        )
    dim = b.choose.pick((-1, -1, -1, 3, -2))
    weights = b.choose.pick(
        (f"F.softmax({{0}}, {dim})", f"{{0}}.softmax({dim}, dtype=torch.float32).to({{1}}.dtype)")
    )
    w = b(weights, scores, q)
    if b.choose.once_in(6):
        w = b("F.dropout({0}, 0.1, self.training)", w)
    out = b("{0} @ {1}", w, v)
    return _rows(b, b("{0} + {1}.mean()", out, w) if b.choose.once_in(6) else out)


def fused_attention(b: Builder, x: str) -> str:
    """scaled_dot_product_attention: plain, causal, with masks, with keys repeated for the heads."""
    _fits(b, x)
    kind = b.choose.below(5)
    if kind >= 3:
        q, k, v = _heads(b, x, 4), _heads(b, x, 2), _heads(b, x, 2)
        if kind == 3:
            repeated = (
                f"[:, :, None].expand(-1, -1, 2, -1, -1).reshape({{0}}.shape[0], 4, -1, {HEAD})"
            )
        else:
            repeated = f"[:, None].expand(-1, 2, -1, -1, -1).reshape({{0}}.shape[0], 4, -1, {HEAD})"
        k, v = b("{0}" + repeated, k), b("{0}" + repeated, v)
        options = b.choose.pick(("is_causal=True", "scale=0.3", "is_causal=False"))
        return _rows(
            b, b(f"F.scaled_dot_product_attention({{0}}, {{1}}, {{2}}, {options})", q, k, v)
        )
    q, k, v = (_heads(b, x) for _ in range(3))
    if kind == 0:
        options = b.choose.pick(("", ", is_causal=True", ", scale=0.25"))
        return _rows(b, b(f"F.scaled_dot_product_attention({{0}}, {{1}}, {{2}}{options})", q, k, v))
    mask = _mask(b, q, additive=kind == 2)
    options = b.choose.pick(("", ", scale=0.25"))
    return _rows(
        b,
        b(
            f"F.scaled_dot_product_attention({{0}}, {{1}}, {{2}}, attn_mask={{3}}{options})",
            q,
            k,
            v,
            mask,
        ),
    )


def per_head(b: Builder, x: str) -> str:
    """Pointwise ops, norms and dropout on heads: values that do not lie in memory by rows."""
    _fits(b, x)
    h = _heads(b, x)
    for _ in range(1 + b.choose.below(3)):
        step = b.choose.pick((activation, dropout, layer_norm, rms_norm, residual, gate, add_norm))
        h = step(b, h)
    form = b.choose.pick(
        (
            "{0}.transpose(1, 2).flatten(2)",
            "{0}.transpose(1, 2).view({0}.shape[0], {0}.shape[2], -1)",
        )
    )
    return b(form, h)


ATTENTION = (rope, attention, fused_attention, per_head)
"""The idioms of this file."""
