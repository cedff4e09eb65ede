"""Train a small language model on real text in five precisions and compare where they end.

    python tests/bench/train_text.py --jobs 5 --json train_text.json   # 5 modes x 3 seeds
    python tests/bench/train_text.py --plot train_text.json            # table, checks, picture

The text is Python's own: the help topics and the sources of its standard library, byte by byte. A
seed decides the initial weights and the order of the data; every mode of a seed sees the same. The
modes are float32 (no TF32), `torch.autocast` and `graphopt.optimize(precision=...)` in bf16, and
both in fp16 with a `torch.amp.GradScaler`, whose scale grows every 200 steps so that overflows
happen. What is compared is the mean loss of the last 100 steps and the loss on held-out text; two
modes agree when their means over the seeds differ by at most twice the standard deviation over
seeds (pooled over the modes).
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import hashlib
import itertools
import json
import math
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import graphopt
from graphopt.precision import LOW

MODES = ("float32", "autocast-bf16", "graphopt-bf16", "autocast-fp16", "graphopt-fp16")
PAIRS = (
    ("autocast-bf16", "float32"),
    ("graphopt-bf16", "float32"),
    ("graphopt-bf16", "autocast-bf16"),
    ("autocast-fp16", "float32"),
    ("graphopt-fp16", "float32"),
    ("graphopt-fp16", "autocast-fp16"),
)
GROWTH = 200
"""Steps without an overflow after which the scale doubles (torch's default, 2000, is one run)."""
START = 2.0**16
"""Scale at the start: torch's default."""
LAST = 100
EVERY = 10
HELD_OUT = 0.05
Run = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Size:
    """The model and its batches."""

    width: int = 384
    layers: int = 6
    heads: int = 6
    length: int = 256
    batch: int = 32
    dropout: float = 0.1


class Block(nn.Module):
    """Attention and feed-forward, each after a layer norm and with dropout."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.width
        self.heads, self.p = size.heads, size.dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        heads = (batch, length, self.heads, width // self.heads)
        q, k, v = (t.view(heads).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        p = self.p if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        y = self.proj(y.transpose(1, 2).reshape(x.shape))
        x = x + F.dropout(y, self.p, self.training)
        y = self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))
        return x + F.dropout(y, self.p, self.training)


class ByteModel(nn.Module):
    """A GPT over bytes; its forward gives the mean cross entropy of the next byte."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, size.width)
        self.places = nn.Embedding(size.length, size.width)
        self.drop = nn.Dropout(size.dropout)
        self.layers = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, 256, bias=False)
        for name, p in self.named_parameters():
            if name.endswith(("proj.weight", "down.weight")):
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * size.layers))
            elif p.ndim == 2:
                nn.init.normal_(p, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        x = self.drop(x)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, 256), targets.reshape(-1))


def corpus() -> torch.Tensor:
    """Python's help topics and the modules of its standard library as bytes."""
    from pydoc_data.topics import topics

    library = Path(sysconfig.get_paths()["stdlib"])
    parts = [topics[name].encode() for name in sorted(topics)]
    parts += [path.read_bytes() for path in sorted(library.glob("*.py"))]
    return torch.frombuffer(bytearray(b"\n".join(parts)), dtype=torch.uint8)


def batch_at(text: torch.Tensor, starts: torch.Tensor, length: int) -> tuple[torch.Tensor, ...]:
    """Inputs and targets, (batch, length) each, that begin at the given places."""
    window = text[starts[:, None] + torch.arange(length + 1, device=text.device)].long()
    return window[:, :-1], window[:, 1:]


def learning_rate(step: int, steps: int) -> float:
    """Warm-up over the first twentieth, then a cosine to a tenth."""
    warm = max(1, steps // 20)
    done = max(0, step - warm) / max(1, steps - warm)
    return 1e-3 * min((step + 1) / warm, 0.55 + 0.45 * math.cos(math.pi * done))


def called(model: nn.Module, mode: str, example: tuple[torch.Tensor, ...]) -> Callable[..., Any]:
    """The model as a mode calls it."""
    kind, _, name = mode.partition("-")
    if kind == "graphopt":
        return graphopt.optimize(model, example, precision=name)
    if kind == "float32":
        return model
    device = example[0].device.type

    def call(*args: torch.Tensor) -> Any:
        with torch.autocast(device, LOW[name]):
            return model(*args)

    return call


def train(mode: str, seed: int, steps: int, size: Size, device: str) -> Run:
    """Train once; losses, the scale's history, times and the peak of memory."""
    torch.manual_seed(seed)
    torch.set_float32_matmul_precision("highest")
    text = corpus()
    digest = hashlib.sha256(text.numpy().tobytes()).hexdigest()[:16]
    text = text.to(device)
    cut = int(len(text) * (1 - HELD_OUT))
    order = torch.Generator().manual_seed(seed)
    starts = torch.randint(cut - size.length - 1, (steps, size.batch), generator=order).to(device)
    model = ByteModel(size).to(device)
    started = time.perf_counter()
    call = called(model, mode, batch_at(text, starts[0], size.length))
    optimizer = torch.optim.AdamW(
        model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=device == "cuda"
    )
    scaler = torch.amp.GradScaler(
        device, enabled=mode.endswith("fp16"), init_scale=START, growth_interval=GROWTH
    )
    losses = torch.zeros(steps, device=device)
    scales: list[float] = []
    marks = [started]
    for i in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(i, steps)
        loss = call(*batch_at(text, starts[i], size.length))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses[i] = loss.detach()
        scales.append(scaler.get_scale())
        if i == 0 or (i + 1) % EVERY == 0 or i + 1 == steps:
            if device == "cuda":
                torch.cuda.synchronize()
            marks.append(time.perf_counter())
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
    values = losses.tolist()
    changes = scale_changes(scales) if scaler.is_enabled() else []
    settled = sorted(b - a for a, b in itertools.pairwise(marks[2:]))
    return {
        "mode": mode,
        "seed": seed,
        "steps": steps,
        "parameters": sum(p.numel() for p in model.parameters()),
        "text": {"bytes": len(text), "sha256": digest},
        "loss": [sum(v) / len(v) for v in _chunks(values, EVERY)],
        "final": sum(values[-LAST:]) / len(values[-LAST:]),
        "held_out": held_out(model, call, text[cut:], size),
        "scale": changes,
        "skipped": sum(new < old for old, new in itertools.pairwise(s for _, s in changes)),
        "first_step_s": marks[1] - marks[0],
        "ms_per_step": settled[len(settled) // 2] / EVERY * 1e3 if settled else None,
        "peak_bytes": peak,
    }


def scale_changes(scales: list[float]) -> list[tuple[int, float]]:
    """(0, scale at the start), then (step, new scale) at each change; a fall is a skipped step."""
    old, found = START, [(0, START)]
    for i, scale in enumerate(scales):
        if scale != old:
            found.append((i, scale))
        old = scale
    return found


def _chunks(values: list[float], size: int) -> Iterable[list[float]]:
    return (values[i : i + size] for i in range(0, len(values), size))


def held_out(model: nn.Module, call: Callable[..., Any], text: torch.Tensor, size: Size) -> float:
    """Mean loss without dropout over text that was not trained on, in the mode's own precision."""
    trained = model.training
    for module in (model, call):
        if isinstance(module, nn.Module):
            module.eval()
    limit = (len(text) - 1) // size.length
    starts = torch.arange(min(limit, 8 * size.batch), device=text.device) * size.length
    with torch.no_grad():
        found = [
            float(call(*batch_at(text, part, size.length)))
            for part in starts.split(size.batch)
            if len(part) == size.batch
        ]
    model.train(trained)
    return sum(found) / max(1, len(found))


def run_all(options: argparse.Namespace, size: Size) -> list[Run]:
    """Every mode of every seed; each in a process of its own where there are several jobs."""
    tasks = [(m, s) for s in range(options.seeds) for m in options.modes]
    runs: list[Run] = []

    def done(run: Run) -> None:
        runs.append(run)
        print(row(run), flush=True)
        if options.json:  # after each run, so that nothing is lost when time runs out
            about = {"device": device_name(options.device), "torch": torch.__version__}
            options.json.write_text(json.dumps({**about, "runs": runs}))

    if options.jobs == 1:
        for mode, seed in tasks:
            done(train(mode, seed, options.steps, size, options.device))
        return runs
    with (
        tempfile.TemporaryDirectory() as folder,
        concurrent.futures.ThreadPoolExecutor(options.jobs) as pool,
    ):
        waiting = [pool.submit(_apart, m, s, options, size, Path(folder)) for m, s in tasks]
        for future in concurrent.futures.as_completed(waiting):
            error = future.exception()
            if error is None:
                done(future.result())
            else:
                print(f"FAIL  {error}", flush=True)
    return sorted(runs, key=lambda r: (MODES.index(r["mode"]), r["seed"]))


def _apart(mode: str, seed: int, options: argparse.Namespace, size: Size, folder: Path) -> Run:
    """One run in another process."""
    out = folder / f"{mode}-{seed}.json"
    sizes = [f"--{name}={value}" for name, value in dataclasses.asdict(size).items()]
    command = [
        sys.executable, __file__, f"--worker={mode}:{seed}", f"--steps={options.steps}",
        f"--device={options.device}", f"--json={out}", *sizes,
    ]  # fmt: skip
    finished = subprocess.run(command, capture_output=True, text=True, env={**os.environ})
    if finished.returncode != 0:
        raise RuntimeError(f"{mode} seed {seed} failed:\n{finished.stdout}{finished.stderr}")
    run: Run = json.loads(out.read_text())
    return run


def row(run: Run) -> str:
    """One line of the table."""
    peak = f"{run['peak_bytes'] / 2**30:6.2f} GiB" if run["peak_bytes"] else "     -    "
    scale = f"{run['scale'][-1][1]:.0f}" if run["scale"] else "-"
    ms = f"{run['ms_per_step']:7.2f}" if run["ms_per_step"] else "      -"
    return (
        f"{run['mode']:14s} seed {run['seed']}  loss {run['loss'][0]:.4f} -> {run['final']:.4f}  "
        f"held out {run['held_out']:.4f}  skipped {run['skipped']:3d}  last scale {scale:>8s}  "
        f"{ms} ms a step  first step {run['first_step_s']:5.1f} s  peak {peak}"
    )


def checks(runs: list[Run]) -> bool:
    """Print each comparison with its bound; whether all hold."""
    good = all(math.isfinite(r["final"]) and math.isfinite(r["held_out"]) for r in runs)
    if not good:
        print("FAIL  a loss is not finite")
    for figure in ("final", "held_out"):
        by_mode = {m: [r[figure] for r in runs if r["mode"] == m] for m in MODES}
        by_mode = {m: v for m, v in by_mode.items() if v}
        deviation = pooled_deviation(list(by_mode.values()))
        if deviation is None:
            print(f"no check of {figure}: one seed has no noise to compare with")
            continue
        for a, b in PAIRS:
            if a in by_mode and b in by_mode:
                gap = mean(by_mode[a]) - mean(by_mode[b])
                held = abs(gap) <= 2 * deviation
                good = good and held
                print(
                    f"{'PASS' if held else 'FAIL'}  {figure:8s} {a} - {b}: {gap:+.5f}, "
                    f"bound 2 x {deviation:.5f}"
                )
    lost = {m: [r["skipped"] for r in runs if r["mode"] == m] for m in MODES[3:]}
    if all(lost.values()):
        eager, ours = (sum(lost[m]) for m in MODES[3:])
        held = ours <= eager + len(lost[MODES[3]])
        good = good and held
        print(
            f"{'PASS' if held else 'FAIL'}  skipped steps: graphopt {ours}, autocast {eager}; "
            "bound: one more for each seed"
        )
    return good


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def pooled_deviation(groups: list[list[float]]) -> float | None:
    """Standard deviation within the groups, pooled; None where no group has two values."""
    squares = sum((v - mean(g)) ** 2 for g in groups for v in g)
    freedom = sum(len(g) - 1 for g in groups)
    return math.sqrt(squares / freedom) if freedom else None


def plot(runs: list[Run], path: Path) -> bool:
    """Draw losses and scales; False where there is no matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    matplotlib.rcParams["svg.fonttype"] = "none"
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(14, 4), constrained_layout=True)
    reference = {r["seed"]: r["loss"] for r in runs if r["mode"] == "float32"}
    for number, mode in enumerate(m for m in MODES if any(r["mode"] == m for r in runs)):
        chosen = [r for r in runs if r["mode"] == mode]
        color, dashes = f"C{number}", "--" if mode.startswith("autocast") else "-"
        for i, run in enumerate(chosen):
            label = mode if i == 0 else None
            steps = [EVERY * (j + 1) for j in range(len(run["loss"]))]
            left.plot(steps, run["loss"], dashes, color=color, label=label, linewidth=0.8)
            if run["seed"] in reference and mode != "float32":
                pairs = zip(run["loss"], reference[run["seed"]], strict=True)
                gap = smoothed([a - b for a, b in pairs])
                middle.plot(steps, gap, dashes, color=color, label=label, linewidth=0.8)
            if run["scale"]:
                at, scale = zip(*run["scale"], (run["steps"], run["scale"][-1][1]), strict=True)
                right.step(at, scale, dashes, color=color, label=label, where="post", linewidth=0.8)
    left.set(xlabel="step", ylabel="training loss, nats a byte", yscale="log")
    right.set(xlabel="step", ylabel="scale of the GradScaler", yscale="log")
    middle.set(xlabel="step", ylabel="loss - float32's, mean of 100 steps")
    left.legend(fontsize="small")
    if right.get_legend_handles_labels()[0]:
        right.legend(fontsize="small")
    figure.savefig(path)
    plt.close(figure)
    return True


def smoothed(values: list[float], size: int = LAST // EVERY) -> list[float]:
    """Each value's mean with those before it, `size` in all."""
    return [mean(values[max(0, i + 1 - size) : i + 1]) for i in range(len(values))]


def device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "cpu"


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--modes", default=",".join(MODES), help="comma-separated")
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, a process each")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--plot", type=Path, help="run nothing: show these results again")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    for field in dataclasses.fields(Size):
        parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default)
    options = parser.parse_args(arguments)
    options.modes = options.modes.split(",")
    unknown = [m for m in options.modes if m not in MODES]
    if unknown:
        parser.error(f"no mode is called {', '.join(unknown)}; there are {', '.join(MODES)}")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Train or show; 1 when two modes end apart."""
    options = parse(arguments)
    size = Size(**{f.name: getattr(options, f.name) for f in dataclasses.fields(Size)})
    if options.worker:
        mode, _, seed = options.worker.partition(":")
        run = train(mode, int(seed), options.steps, size, options.device)
        options.json.write_text(json.dumps(run))
        return 0
    if options.plot:
        found = json.loads(options.plot.read_text())
        runs = sorted(found["runs"], key=lambda r: (MODES.index(r["mode"]), r["seed"]))
        print(found["device"], "torch", found["torch"], *map(row, runs), sep="\n")
    else:
        print(device_name(options.device), "torch", torch.__version__, flush=True)
        started = time.perf_counter()
        runs = run_all(options, size)
        print(f"{len(runs)} runs in {time.perf_counter() - started:.0f} s")
        if len(runs) < len(options.modes) * options.seeds:
            checks(runs)
            print("FAIL")
            return 1
    good = checks(runs)
    source = options.plot or options.json
    if source is not None:
        picture = source.with_suffix(".svg")
        with contextlib.suppress(OSError):
            print(picture if plot(runs, picture) else "no matplotlib: --plot draws it elsewhere")
    print("PASS" if good else "FAIL")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
