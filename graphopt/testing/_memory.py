"""Idioms of casts, views, constants and memory: what is shared, what is written into."""

from __future__ import annotations

import torch

from graphopt.testing._builder import Builder

LOW = ("torch.bfloat16", "torch.float16")


def cast(b: Builder, x: str) -> str:
    """A cast, or a way there and back."""
    forms = (
        "{0}.to(torch.bfloat16)",
        "{0}.float()",
        "{0}.to(torch.float16).float()",
        "{0}.to({0}.dtype)",
        "{0}.double()",
        "{0}.bfloat16().to({0}.dtype)",
    )
    return b(b.choose.pick(forms), x)


def narrow_view(b: Builder, x: str) -> str:
    """A view of a computed value that is then narrowed."""
    b.need(b.dtype(x) == torch.float32)
    low = b.choose.pick(LOW)
    h = b(b.choose.pick(("{0} * 2.0", "{0} + 0.5", "torch.tanh({0})")), x)
    forms = (
        "{0}.reshape(-1, {0}.shape[-1])",
        "{0}.transpose(-1, -2)",
        "{0}.unsqueeze(1)",
        "{0}[None].expand(2, *{0}.shape).reshape(-1, {0}.shape[-1])",
        "{0}.transpose(-1, -2).reshape({0}.shape[0], -1)",
    )
    h = b(b.choose.pick(forms), h)
    y = b(f"{{0}}.to({low})", h)
    return b("{0} + {1}", y, h) if b.choose.once_in(5) else y


def narrow_norm(b: Builder, x: str) -> str:
    """A norm that reads a widened value or is stored narrow, the wide one now and then kept."""
    d = b.wide(x)
    h = x
    if b.dtype(x) in (torch.bfloat16, torch.float16):
        h = b("{0}.float()", x)
    w = b.weight(d, like=h)
    form = b.choose.pick(
        (f"F.layer_norm({{0}}, ({d},), {{1}})", f"F.rms_norm({{0}}, ({d},), {{1}}, 1e-6)")
    )
    y = b(form, h, w)
    low = b(f"{{0}}.to({b.choose.pick(LOW)})", y)
    return b("{0} + {1} + {2}", low, y, h) if b.choose.once_in(5) else low


def view(b: Builder, x: str) -> str:
    """A view or a copy in another layout; rank and sizes may change."""
    forms = (
        "{0}.transpose(-1, -2)",
        "{0}.transpose(0, 1).transpose(0, 1)",
        "{0}.transpose(-1, -2).contiguous().transpose(-2, -1)",
        "{0}.reshape(-1, {0}.shape[-1])",
        "{0}.unsqueeze(1).squeeze(1)",
        "{0}.clone()",
        "{0}.contiguous()",
        "{0}.view({0}.shape)",
        "{0}.flip(-1)",
        "{0}[:, 1:]",
        "{0}[..., ::2]",
        "{0}[..., : {0}.shape[-1] // 2]",
        "torch.cat(({0}, {0} * 2.0), -1)",
        "torch.cat((-{0}[..., 4:], {0}[..., :4]), -1)",
        "torch.stack(({0}, {0}), 1).mean(1)",
        "{0}.expand({0}.shape)",
        "{0}[:, :1].expand({0}.shape)",
        "{0}.roll(1, -1)",
        "{0}.split(4, -1)[1]",
        "{0}.detach()",
        "{0}.permute(*range(1, {0}.dim()), 0)",
    )
    return b(b.choose.pick(forms), x)


def constant(b: Builder, x: str) -> str:
    """A value computed from nothing but numbers, read by the program."""
    b.need(not b.varies(x, -1))
    d = b.shape(x)[-1]
    forms = (
        f"{{0}} * (torch.arange({d}).float() / {d} + 0.5)",
        f"{{0}} + torch.full(({d},), 0.5)",
        f"{{0}} * torch.linspace(0.5, 1.5, {d}).cos()",
        f"{{0}} + torch.ones({d}).cumsum(0).mul(0.125).to({{0}}.dtype)",
        f"{{0}} * torch.tensor([0.1]) + torch.eye({d})[0]",
    )
    return b(b.choose.pick(forms), x)


def in_place(b: Builder, x: str) -> str:
    """A write into a value that nothing else reads, whole or through a view."""
    x = x if b.values[x].fresh else b(b.choose.pick(("{0} * 1.5", "{0} + 0.25")), x, fresh=True)
    forms = (
        "{0}.add_(1.0)",
        "{0}.mul_(0.5)",
        "F.relu({0}, inplace=True)",
        "{0}.clamp_(-1.0, 2.0)",
        "{0}.tanh_()",
        "{0}.masked_fill_(torch.arange({0}.shape[-1]) == 1, 0.5)",
    )
    if b.choose.once_in(3):
        y = b("{0} * 1.5", x, fresh=True)
        part = b.choose.pick(
            (
                "{0}[..., 1:3].add_(1.0)",
                "{0}[..., ::2].mul_(0.5)",
                "{0}[:, :1].zero_()",
                "{0}.transpose(-1, -2).mul_(2.0)",
                "{0}.view(-1)[2:9].fill_(0.5)",
            )
        )
        v = b(part, y, keep=True)
        b.values[y].dead = False
        return b("{0} + {1}.mean()", y, v)
    return b(b.choose.pick(forms), x, keep=True)


def buffer(b: Builder, x: str) -> str:
    """A buffer that forward updates, read before or after."""
    b.need(not b.varies(x, -1) and b.dtype(x) == torch.float32)
    d = b.shape(x)[-1]
    s = b.parameter(f"nn.Buffer(torch.rand({d}))")
    rows = f"{{1}}.detach().reshape(-1, {d}).mean(0)"
    update = b.choose.pick(
        (f"{{0}}.mul_(0.9).add_({rows}, alpha=0.1)", f"{{0}}.copy_({rows})", f"{{0}}.add_({rows})")
    )
    if b.choose.once_in(2):
        x = b("{0} + {1}", x, s)
    after = b(update, s, x, keep=True)
    b.values[s].dead = False
    return b("{0} * {1}", x, after) if b.choose.once_in(2) else x


def input_written(b: Builder, x: str) -> str:
    """A second argument that forward writes into."""
    b.need(len(b.shape(x)) == 3 and b.shape(x) == b.shape("x0") and b.dtype(x) == torch.float32)
    y = b.input("B", "S", 16, requires_grad=False)
    h = b("{0} + {1}", x, y)
    b(
        b.choose.pick(("{0}.mul_(0.5)", "{0}[:, 0].zero_()", "{0}.copy_({1}.detach())")),
        y,
        x,
        keep=True,
    )
    return h


def alias(b: Builder, x: str) -> str:
    """Views of one value, written into or not, that may be returned beside it."""
    y = b("{0}.view({0}.shape)", x)
    b("{0}[..., :2]", x)
    return y


MEMORY = (
    cast,
    cast,
    narrow_view,
    narrow_norm,
    view,
    view,
    constant,
    in_place,
    buffer,
    input_written,
    alias,
)
"""The idioms of this file."""
