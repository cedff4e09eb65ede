"""The planted faults, and small programs in which each shows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager as Context
from typing import Any
from unittest import mock

import torch
from plants import (
    altered,
    argument,
    assign,
    constant_seed,
    copies_dropped,
    fold_along_inputs,
    frozen_state,
    half_p,
    literal_blind,
    no_user_check,
    norm_gradient,
    one_site,
    option,
    patched,
    replaced,
    swapped,
    through,
    through_bf16,
    unchecked,
)
from twins import Scenario

from graphopt.capture.entry import Entry
from graphopt.kernels import _activations, activation, rope
from graphopt.passes import clean, seed
from graphopt.passes.canonical import attention, norm
from graphopt.passes.strides import KeepOutputStrides
from graphopt.testing.programs import Input, Instruction, Program

ROWS = Input(("B", "S", 16))
EVAL = Scenario(training=False, grad=False)
LINEAR = "nn.Linear(16, 16)"
HEADS = "{1}({0}).view(*{0}.shape[:2], 2, 8).transpose(1, 2)"
TURNED = "torch.cat((-{0}[..., 4:], {0}[..., :4]), -1)"
AT = "torch.arange({0}.shape[-2])"


@dataclasses.dataclass(frozen=True)
class Fault:
    """One way to be wrong.

    Attributes:
        name: short, for the table.
        plant: gives the context in which the optimizer is wrong.
        program: in which it shows.
        scenario: how that is run.
    """

    name: str
    plant: Callable[[], Context[Any]]
    program: Program
    scenario: Scenario = Scenario()  # noqa: RUF009  (frozen)


def program(
    state: Sequence[str],
    *body: tuple[str, ...],
    inputs: tuple[Input, ...] = (ROWS,),
    outputs: tuple[str, ...] = (),
    keep: Sequence[int] = (),
) -> Program:
    """A program from lines (code, operands by name: x0, s0, v0); gives its last value."""
    names = [f"x{i}" for i in range(len(inputs))] + [f"s{i}" for i in range(len(state))]
    names += [f"v{i}" for i in range(len(body))]
    lines = tuple(
        Instruction(code, tuple(map(names.index, args)), i in keep)
        for i, (code, *args) in enumerate(body)
    )
    returned = tuple(map(names.index, outputs or (names[-1],)))
    return Program(inputs, tuple(state), lines, returned)


# ------------------------------------------------------------------------------------- the faults

NORM = program(["nn.LayerNorm(16)"], ("{1}({0})", "x0", "s0"))
NORM_CHAIN = program(
    ["nn.LayerNorm(16)"],
    ("{1}({0})", "x0", "s0"),
    ("F.dropout({0}, 0.5, self.training)", "v0"),
    ("F.gelu({0})", "v1"),
)
GEMMA = program(
    ["nn.Parameter(torch.randn(16))"],
    ("{0} * torch.rsqrt({0}.pow(2).mean(-1, keepdim=True) + 1e-6) * (1.0 + {1})", "x0", "s0"),
)
GATE = program(
    ["nn.Linear(16, 16, bias=False)", "nn.Linear(16, 16, bias=False)"],
    ("{1}({0})", "x0", "s0"),
    ("{1}({0})", "x0", "s1"),
    ("F.silu({0}) * {1}", "v0", "v1"),
)
MLP = program([LINEAR], ("{1}({0})", "x0", "s0"), ("F.gelu({0})", "v0"))
SUM = program(
    ["nn.LayerNorm(16)", LINEAR],
    ("{1}({0})", "x0", "s1"),
    ("{0} + {1}", "v0", "x0"),
    ("{1}({0})", "v1", "s0"),
    outputs=("v2", "v1"),
)
TWO_DROPOUTS = program(
    [LINEAR],
    ("F.dropout({0}, 0.5, self.training)", "x0"),
    ("{1}({0})", "v0", "s0"),
    ("F.dropout({0}, 0.5, self.training)", "v1"),
    ("{0} + {1}", "v2", "x0"),
)


def attending(scores: str, *more: tuple[str, ...]) -> Program:
    """Attention written out, its scores as given."""
    return program(
        [LINEAR, LINEAR, LINEAR],
        *((HEADS, "x0", f"s{i}") for i in range(3)),
        (scores, "v0", "v1"),
        *more,
        ("{0}.softmax(-1) @ {1}", f"v{3 + len(more)}", "v2"),
    )


CAUSAL = attending(
    "({0} @ {1}.mT) * 0.3",
    (f"{{0}}.masked_fill({AT}[None, :] > {AT}[:, None], float('-inf'))", "v3"),
)
HIDES_THE_PAST = attending(
    "({0} @ {1}.mT) * 0.3",
    (f"{{0}}.masked_fill({AT}[None, :] <= {AT}[:, None], torch.finfo({{0}}.dtype).min)", "v3"),
)
ROPE = program(
    [LINEAR],
    (HEADS, "x0", "s0"),
    ("torch.outer(torch.arange({0}.shape[2]).float(), torch.tensor([0.5, 0.2] * 4))", "v0"),
    (f"{{0}} * {{1}}.cos() + {TURNED} * {{1}}.sin()", "v0", "v1"),
)
TILED = program(
    ["nn.Linear(16, 32)", LINEAR],
    ("{1}({0}).view(*{0}.shape[:2], 4, 8).transpose(1, 2)", "x0", "s0"),
    (HEADS, "x0", "s1"),
    ("{0}[:, None].expand(-1, 2, -1, -1, -1).reshape({0}.shape[0], 4, -1, 8)", "v1"),
    ("F.scaled_dot_product_attention({0}, {1}, {1})", "v0", "v2"),
)
FOLDED = program(
    [LINEAR, "nn.BatchNorm1d(16)"],
    ("{2}({1}({0}.flatten(0, 1)))", "x0", "s0", "s1"),
)
SQUARE = Input((16, 16))

FAULTS = (
    Fault(
        "eps of a LayerNorm times 10",
        altered("layer_norm", argument("layer_norm", 3, lambda e: e * 10)),
        NORM,
    ),
    Fault("1 + weight becomes weight", altered("rms_norm", option("weight_offset", None)), GEMMA),
    Fault("gate and up swapped", altered("glu", swapped(0, 1)), GATE),
    Fault("weight and bias swapped", altered("layer_norm", swapped(1, 2)), NORM),
    Fault(
        "tanh GELU for erf GELU",
        altered("bias_act", argument("bias_act", 2, lambda _: "gelu_tanh")),
        MLP,
    ),
    Fault("bias ignored", altered("bias_act", argument("bias_act", 1, lambda _: None)), MLP),
    Fault("activation lost", altered("layer_norm", option("activation", None)), NORM_CHAIN),
    Fault(
        "causal flag lost",
        altered("attention", argument("attention", 5, lambda _: False)),
        CAUSAL,
    ),
    Fault("attention scale dropped", altered("attention", option("scale", None)), CAUSAL),
    Fault(
        "mask inverted",
        patched(attention, "mask_kind", lambda right, node, hides=False: right(node)),
        HIDES_THE_PAST,
    ),
    Fault("tiled heads taken for repeated ones", unchecked("grouped_attention"), TILED),
    Fault(
        "RMS over another dim",
        patched(norm, "last_dim", lambda right, x, dim: True),
        program(
            [],
            ("{0} * torch.rsqrt({0}.pow(2).mean(0, keepdim=True) + 1e-6)", "x0"),
            inputs=(SQUARE,),
        ),
    ),
    Fault(
        "softmax over another dim",
        altered("softmax", argument("softmax", 1, lambda _: -1)),
        program(
            [],
            ("torch.exp({0} - {0}.amax(1, keepdim=True))", "x0"),
            ("{0} / {0}.sum(1, keepdim=True)", "v0"),
        ),
    ),
    Fault(
        "folded scale along the input channels",
        altered("fold_batch_norm", fold_along_inputs),
        FOLDED,
        EVAL,
    ),
    Fault(
        "sum over classes for mean",
        altered("cross_entropy", argument("cross_entropy", 3, lambda _: 2)),
        program(
            [],
            ("F.nll_loss(F.log_softmax({0}.flatten(0, 1), -1), {1}.flatten())", "x0", "x1"),
            inputs=(ROWS, Input(("B", "S"), "int64", "index:16", False)),
        ),
    ),
    Fault(
        "cast to float32 dropped",
        replaced(
            "cross_entropy",
            lambda right, m: m.call(
                torch.ops.aten.cross_entropy_loss.default,
                m.x,
                m.target,
                m.weight,
                m.reduction,
                m.ignore,
            ),
        ),
        program(
            [],
            ("F.log_softmax({0}.flatten(0, 1).bfloat16(), -1, dtype=torch.float32)", "x0"),
            ("F.nll_loss({0}, {1}.flatten())", "v0", "x1"),
            inputs=(ROWS, Input(("B", "S"), "int64", "index:16", False)),
        ),
    ),
    Fault("operand rounded to bfloat16", replaced("layer_norm", through_bf16), NORM),
    Fault("rotation the other way", patched(rope, "_rotate", lambda right, *a: -right(*a)), ROPE),
    Fault("cos and sin swapped", altered("rope", swapped(1, 2)), ROPE),
    Fault(
        "slope of an activation negated",
        patched(activation, "slope_times", lambda right, *a: -right(*a)),
        MLP,
    ),
    Fault(
        "slope of an activation in a norm negated",
        patched(_activations, "derivative", lambda right, *a: -right(*a)),
        NORM_CHAIN,
    ),
    Fault("residual dropped from the gradient", norm_gradient(assign(2, lambda _: None)), SUM),
    Fault("another mask in backward", norm_gradient(assign(12, lambda site: site + 1)), NORM_CHAIN),
    Fault(
        "bias gradient summed over the other dim",
        patched(activation, "sum_to_bias", lambda right, g, dtype: g.sum(-1).to(dtype)),
        dataclasses.replace(MLP, inputs=(SQUARE,)),
    ),
    Fault("half the dropout probability", patched(seed, "seed_dropouts", half_p), TWO_DROPOUTS),
    Fault("stale seed", patched(seed, "_seed_node", constant_seed), TWO_DROPOUTS),
    Fault("one mask for all dropouts", patched(seed, "seed_dropouts", one_site), TWO_DROPOUTS),
    Fault(
        "dropout taken for a no-op",
        lambda: mock.patch.dict(clean._NO_OPS, {torch.ops.aten.dropout.default: lambda *_: True}),
        TWO_DROPOUTS,
    ),
    Fault(
        "no check of other users",
        no_user_check,
        program(
            ["nn.LayerNorm(16)"],
            ("{1}({0})", "x0", "s0"),
            ("F.relu({0})", "v0"),
            ("{0} + {1}", "v0", "v1"),
        ),
    ),
    Fault(
        "results of an op swapped",
        replaced("add_layer_norm", lambda right, m: right(m)[::-1]),
        SUM,
    ),
    Fault(
        "a constant folded in bfloat16",
        patched(clean, "evaluate", lambda right, *a: through(right(*a))),
        program([], ("{0} * (torch.arange(16).float() / 7.0 + 0.5)", "x0")),
    ),
    Fault(
        "calls merged whatever their numbers",
        patched(clean, "_key", literal_blind),
        program([], ("{0} * 2.0", "x0"), ("{0} * 3.0", "x0"), ("{0} * {1}", "v0", "v1")),
    ),
    Fault(
        "buffer update lost",
        patched(Entry, "_epilogue", lambda right, *a: None),
        program(
            ["nn.Buffer(torch.rand(16))"],
            ("{0}.mul_(0.9).add_({1}.detach().mean((0, 1)), alpha=0.1)", "s0", "x0"),
            ("{0} * 2.0", "x0"),
            keep=(0,),
        ),
    ),
    Fault(
        "a copy returned for the buffer itself",
        patched(Entry, "_with_returned", lambda right, entry, values, leaves: list(values)),
        program(
            ["nn.Buffer(torch.rand(16))"], ("{0}.add_({1}.detach().mean())", "s0", "x0"), keep=(0,)
        ),
    ),
    Fault(
        "an input returned for its copy",
        copies_dropped,
        program([], ("{0}.clone()", "x0")),
    ),
    Fault(
        "strides of a result changed",
        patched(KeepOutputStrides, "run", lambda right, *a: None),
        program(
            ["nn.LayerNorm(16)"],
            ("{1}({0}.transpose(0, 1)) + {0}.transpose(0, 1)", "x0", "s0"),
            ("F.relu(F.dropout({0}.transpose(0, 1), 0.1, self.training))", "v0"),
        ),
    ),
    Fault("weights copied at the first call", patched(Entry, "call", frozen_state), MLP),
)
"""Every fault; `planted.py` shows which check catches each."""
