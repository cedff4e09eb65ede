"""Device time of every fused operator beside a copy, eager, torch.compile and Liger.

    python tests/bench/kernels.py [--ops layer_norm,glu] [--shapes 16384x4096] [--json FILE]

Times are the sum of kernel durations in torch's profiler, so that host time counts for nobody;
inputs rotate through more than the L2 cache. "%" is the time of a copy that moves the same bytes
(each input read once, each output written once), measured the same way in the same run, over the
kernel's time. "err" is the distance from float64 relative to its norm: the output's, then the worst
gradient's; beside it eager's.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch._functorch.config
from torch.autograd import DeviceType
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from graphopt.kernels import Op, Sample, registry

L2_BYTES = 200 * 2**20  # what the rotating inputs of one measurement must exceed
CALLS = 24
SHAPES = "16384x4096,8191x5120,4096x1000"


# ---- the spellings a model would use -------------------------------------------------------------


def eager_layer_norm(x, weight, bias, eps, dropout_p=0.0, activation="none", **_):
    y = F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    y = F.dropout(y, dropout_p) if dropout_p else y
    return F.relu(y) if activation == "relu" else y


def eager_add_layer_norm(x, residual, weight, bias, eps, **_):
    total = x + residual
    return F.layer_norm(total, x.shape[-1:], weight, bias, eps), total


def eager_rms_norm(x, weight, eps, **_):
    h = x.float()
    return weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def eager_add_rms_norm(x, residual, weight, eps, **_):
    total = x + residual
    return eager_rms_norm(total, weight, eps), total


ACTIVATIONS = {
    "relu": F.relu, "gelu": F.gelu, "silu": F.silu, "tanh": torch.tanh, "sigmoid": torch.sigmoid,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "none": lambda x: x,
}  # fmt: skip


def eager_dropout_add(x, residual, p, seed, site, bias=None, **_):
    return residual + F.dropout(x if bias is None else x + bias, p)


def eager_rope(x, cos, sin, out_dtype=None, **_):
    half = x.shape[-1] // 2
    y = x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin
    return y.to(out_dtype)


def eager_linear_rope(x, weight, bias, cos, sin, widths, interleaved=False):
    q, k, v = F.linear(x, weight, bias).split(widths, dim=-1)
    q, k = (t.unflatten(-1, (-1, cos.shape[-1])).transpose(1, 2) for t in (q, k))
    return *(eager_rope(t, cos, sin, out_dtype=x.dtype) for t in (q, k)), v


def eager_cross_entropy(logits, target, classes=None, out_dtype=None, **_):
    return F.cross_entropy(logits[..., :classes].to(out_dtype), target)


EAGER: dict[str, Callable[..., Any]] = {
    "layer_norm": eager_layer_norm,
    "add_layer_norm": eager_add_layer_norm,
    "rms_norm": eager_rms_norm,
    "add_rms_norm": eager_add_rms_norm,
    "bias_act": lambda x, bias, act, **_: ACTIVATIONS[act](x if bias is None else x + bias),
    "softcap": lambda x, cap, **_: cap * torch.tanh(x / cap),
    "glu": lambda gate, up, act, **_: ACTIVATIONS[act](gate) * up,
    "glu_packed": lambda x, act, **_: ACTIVATIONS[act](x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
    "dropout": lambda x, p, seed, site: F.dropout(x, p),
    "dropout_add": eager_dropout_add,
    "rope": eager_rope,
    "linear_rope": eager_linear_rope,
    "cross_entropy": eager_cross_entropy,
}
# Positions of floating arguments that no model differentiates.
TABLES: dict[str, tuple[int, ...]] = {"rope": (1, 2), "linear_rope": (3, 4)}


def liger_spellings() -> dict[str, Callable[..., Any]]:
    """Liger's kernels under our arguments; empty if it is not installed."""
    try:
        from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction as AddRms
        from liger_kernel.ops.layer_norm import LigerLayerNormFunction as Layer
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction as Rms
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction as Swiglu
    except ImportError as error:
        print(f"no Liger: {error}", file=sys.stderr)
        return {}
    return {
        "layer_norm": lambda x, w, b, eps, **_: Layer.apply(x, w, b, eps),
        "rms_norm": lambda x, w, eps, **_: Rms.apply(x, w, eps, 0.0, "llama", False),
        "add_rms_norm": lambda x, r, w, eps, **_: AddRms.apply(x, r, w, eps, 0.0, "llama", False),
        "glu": lambda gate, up, act, **_: Swiglu.apply(gate.contiguous(), up.contiguous()),
    }


# ---- cases ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One row of the table: an operator with the arguments of its typical call, or a variant."""

    label: str
    op: Op
    make: Callable[[int, int], Sample]
    peers: bool = True  # whether Liger has the same function


def cases() -> list[Case]:
    """Every registered operator that launches a kernel, then the variants with named targets."""
    found = [Case(name, op, _example(op)) for name, op in registry().items() if op.launch]
    table = registry()
    seed = {"seed": torch.tensor(7, device="cuda"), "site": 1}
    found.append(
        Case(
            "layer_norm+dropout+relu",
            table["layer_norm"],
            _example(table["layer_norm"], dropout_p=0.1, activation="relu", **seed),
            peers=False,
        )
    )
    if "bias_act" in table:
        found.append(Case("bias_act relu", table["bias_act"], _example(table["bias_act"], "relu")))
    found.append(Case("cross_entropy padded", table["cross_entropy"], _padded_logits))
    return found


def _example(op: Op, activation: str | None = None, **options: Any) -> Callable[[int, int], Sample]:
    def make(rows: int, cols: int) -> Sample:
        assert op.example is not None, f"{op.name} has no example"
        sample = op.example(rows, cols, torch.bfloat16, torch.device("cuda"))
        args = tuple(activation if activation and isinstance(a, str) else a for a in sample.args)
        return Sample(args, {**sample.kwargs, **options})

    return make


def _padded_logits(rows: int, cols: int) -> Sample:
    """Logits as a padded linear layer gives them: rows of a multiple of 8 columns."""
    logits = torch.randn(rows, -(-cols // 8) * 8, device="cuda", dtype=torch.bfloat16)
    target = torch.randint(cols, (rows,), device="cuda")
    return Sample((logits, target), {"classes": cols, "out_dtype": torch.float32})


# ---- measuring -----------------------------------------------------------------------------------


def device_us(calls: list[Callable[[], Any]]) -> float:
    """Mean device time of a call, all kernels and copies of it, in microseconds."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        for i in range(CALLS):
            calls[i % len(calls)]()
        torch.cuda.synchronize()
    # By device type: a launch on the host may bear its kernel's time too.
    events = [e for e in prof.key_averages() if e.device_type == DeviceType.CUDA]
    return sum(e.self_device_time_total for e in events) / CALLS


_COPIES: dict[int, float] = {}


def copy_us(moved: int) -> float:
    """Device time of a copy that reads and writes `moved` bytes in all."""
    if moved not in _COPIES:
        sets = max(2, L2_BYTES // max(moved, 1) + 1)
        pairs = [
            torch.empty(2, moved // 4, device="cuda", dtype=torch.bfloat16) for _ in range(sets)
        ]
        _COPIES[moved] = device_us([lambda p=p: p[1].copy_(p[0]) for p in pairs])
    return _COPIES[moved]


def leaves(op: Op, sample: Sample, vectors: torch.dtype | None = None) -> Sample:
    """Floating tensors as leaves, but for tables; vectors in another dtype if asked."""
    tables = TABLES.get(op.name, ())

    def leaf(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        value = value.to(vectors) if vectors and value.dim() == 1 else value
        return value.detach().requires_grad_()

    args = tuple(v if i in tables else leaf(v) for i, v in enumerate(sample.args))
    return Sample(args, {k: leaf(v) for k, v in sample.kwargs.items()})


def floating(sample: Sample) -> list[torch.Tensor]:
    values = (*sample.args, *sample.kwargs.values())
    return [v for v in values if isinstance(v, torch.Tensor) and v.requires_grad]


def as_tuple(outputs: Any) -> tuple[torch.Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def measure(function: Callable[..., Any], samples: list[Sample]) -> tuple[float, float]:
    """Device time (forward, backward) in microseconds; the backward takes a gradient an output."""

    def forward(sample: Sample) -> Callable[[], Any]:
        def call() -> Any:
            with torch.no_grad():
                return function(*sample.args, **sample.kwargs)

        return call

    def backward(sample: Sample) -> Callable[[], Any]:
        outputs = as_tuple(function(*sample.args, **sample.kwargs))
        grads = [torch.randn_like(o) for o in outputs]
        wanted = floating(sample)
        return lambda: torch.autograd.grad(outputs, wanted, grads, retain_graph=True)

    forward_us = device_us([forward(s) for s in samples])
    return forward_us, device_us([backward(s) for s in samples])


def attempt(function: Callable[..., Any], samples: list[Sample]) -> tuple[float, float] | None:
    """As `measure`, for a peer: its failure is a result, not the end of the run."""
    try:
        return measure(function, samples)
    except Exception as error:
        print(f"a peer failed: {error}"[:300], file=sys.stderr)
        return None


def errors(function: Callable[..., Any], sample: Sample, op: Op) -> tuple[float, float]:
    """(output's, worst gradient's) distance from the float64 reference, relative to its norm."""
    outputs = as_tuple(function(*sample.args, **sample.kwargs))
    grads = [torch.randn_like(o) for o in outputs]
    found = torch.autograd.grad(outputs, floating(sample), grads)

    def widen(value: Any) -> Any:
        wide = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.detach().double().requires_grad_(value.requires_grad) if wide else value

    exact = Sample(
        tuple(widen(v) for v in sample.args),
        {k: widen(v) for k, v in sample.kwargs.items() if k != "out_dtype"},
    )
    expected = as_tuple(op.reference(*exact.args, **exact.kwargs))
    slopes = torch.autograd.grad(expected, floating(exact), [g.double() for g in grads])

    def distance(a: torch.Tensor, b: torch.Tensor) -> float:
        return float((a.detach().double() - b.detach()).norm() / b.norm().detach())

    return (
        max(distance(a, b) for a, b in zip(outputs, expected, strict=True)),
        max(distance(a, b) for a, b in zip(found, slopes, strict=True)),
    )


def is_random(sample: Sample, op: Op) -> bool:
    return op.random and any(
        isinstance(v, torch.Tensor) and v.dtype == torch.int64
        for v in (*sample.args, *sample.kwargs.values())
    )


def bench(
    case: Case, rows: int, cols: int, liger: dict[str, Any], compiled: bool
) -> dict[str, Any]:
    """All numbers of one case at one shape."""
    op = case.op
    first = leaves(op, case.make(rows, cols))
    cost = op.cost(*first.args, **first.kwargs)
    back = op.backward_cost(*first.args, **first.kwargs) if op.backward_cost else cost
    sets = max(2, L2_BYTES // max(cost.bytes, 1) + 1)
    ours = [first, *(leaves(op, case.make(rows, cols)) for _ in range(sets - 1))]
    # Peers get bfloat16 weights, the cheapest for them: eager's norms take no mixed dtypes.
    theirs = [leaves(op, s, torch.bfloat16) for s in ours]
    peers: dict[str, tuple[Callable[..., Any], list[Sample]]] = {"graphopt": (op.overload, ours)}
    eager = EAGER.get(op.name)
    if eager is not None:
        peers["eager"] = (eager, theirs)
        if compiled:
            torch.compiler.reset()
            peers["compile"] = (torch.compile(eager, dynamic=False), theirs)
    if case.peers and op.name in liger:
        peers["liger"] = (liger[op.name], theirs)
    row: dict[str, Any] = {"case": case.label, "shape": f"{rows}x{cols}"}
    row["copy"] = (copy_us(cost.bytes), copy_us(back.bytes))
    for name, (function, samples) in peers.items():
        times = measure(function, samples) if name == "graphopt" else attempt(function, samples)
        if times is not None:
            row[name] = times
    if not is_random(first, op):
        row["error"] = errors(op.overload, first, op)
        if eager is not None:
            row["eager error"] = errors(eager, theirs[0], op)
    return row


def line(row: dict[str, Any]) -> str:
    """One row of the table."""

    def one(name: str, i: int) -> str:
        if name not in row:
            return f"{'-':>11}"
        return f"{row[name][i]:6.1f} {row['copy'][i] / row[name][i]:4.0%}"

    cells = [f"{row['case']:<24}{row['shape']:>11}"]
    cells += [
        " ".join(one(n, i) for n in ("graphopt", "eager", "compile", "liger")) for i in (0, 1)
    ]
    if "error" in row:
        eager = row.get("eager error", (float("nan"),) * 2)
        cells.append(" ".join(f"{a:.0e}/{b:.0e}" for a, b in zip(row["error"], eager, strict=True)))
    return " | ".join(cells)


def main() -> None:
    """Parse the command line and print the table as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ops", help="comma-separated labels; all if left out")
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--json", help="also write the numbers to this file")
    options = parser.parse_args()
    torch._functorch.config.donated_buffer = False  # the backward is run many times
    liger = liger_spellings()
    rows = []
    start = time.monotonic()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16, microseconds")
    peers = f"{'graphopt':>11} {'eager':>11} {'compile':>11} {'liger':>11}"
    print(f"{'':<35} | {'forward':<47} | {'backward':<47} | err graphopt/eager")
    print(f"{'case':<24}{'shape':>11} | {peers} | {peers} | forward, backward")
    for case in cases():
        if options.ops and case.label not in options.ops.split(","):
            continue
        for shape in options.shapes.split(","):
            m, n = (int(part) for part in shape.split("x"))
            rows.append(bench(case, m, n, liger, not options.no_compile))
            print(line(rows[-1]), flush=True)
            torch.cuda.empty_cache()
    print(f"{time.monotonic() - start:.0f} s")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
