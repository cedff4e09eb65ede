"""Train a language model on real text: low precision, a memory budget and fused kernels at once.

    python examples/train_all_three.py                                # a small run, on any machine
    python examples/train_all_three.py --precision bf16 --memory-budget 0.6 --compare
    python examples/train_all_three.py --precision fp16 --segments 4 --checkpoint run.pt
    python examples/train_all_three.py --checkpoint run.pt --resume --steps 40

The text is Python's own documentation, which ships with Python; tokens are its bytes. With
`--compare` the same model is first trained by plain PyTorch in float32 from the same weights and
batches, and time, peak memory and losses of both are printed beside each other.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import pydoc_data.topics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import graphopt

VOCABULARY = 256


class Block(nn.Module):
    """A transformer block: causal attention and a feed-forward net, each on a residual."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, length, width] -> [batch, length, width]."""
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norm_1(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(mixed.transpose(1, 2).flatten(2)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm_2(x)))))


class Transformer(nn.Module):
    """Bytes in, the mean cross entropy of the next byte out."""

    def __init__(self, width: int, layers: int, heads: int, length: int, dropout: float) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.place = nn.Parameter(torch.randn(length, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Tokens and targets are int64 [batch, length]; the loss is a scalar."""
        x = self.token(tokens) + self.place[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def corpus() -> torch.Tensor:
    """Python's documentation topics as one int64 tensor of bytes."""
    text = "\n\n".join(pydoc_data.topics.topics.values())
    return torch.tensor(list(text.encode()), dtype=torch.int64)


def batches(
    text: torch.Tensor, args: argparse.Namespace, start: int, device: torch.device
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless (tokens, targets); batch i is the same in every run, resumed ones too.

    The next batch is made in pinned memory and copied while the step before it computes.
    """

    def on_device(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(args.seed * 1_000_003 + step)
        begins = torch.randint(len(text) - args.length - 1, (args.batch,), generator=generator)
        windows = torch.stack([text[b : b + args.length + 1] for b in begins.tolist()])
        if device.type == "cuda":
            windows = windows.pin_memory().to(device, non_blocking=True)
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    step = start
    ready = on_device(step)
    while True:
        current, step = ready, step + 1
        ready = on_device(step)
        yield current


@dataclasses.dataclass
class Run:
    """What one training showed."""

    losses: list[float]
    ms_per_step: float | None
    peak_gib: float | None
    start_s: float
    skipped: int


def train(
    model: nn.Module, args: argparse.Namespace, *, optimized: bool, start: int = 0
) -> tuple[Run, torch.optim.Optimizer, torch.amp.GradScaler]:
    """Train a model in place for `args.steps` steps."""
    device = next(model.parameters()).device
    cuda = device.type == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=cuda)
    scaler = torch.amp.GradScaler(device.type, enabled=optimized and args.precision == "fp16")
    if optimized and args.resume:
        start = restore(args.checkpoint, model, optimizer, scaler)
    data = batches(corpus(), args, start, device)
    began = time.perf_counter()
    step_model: nn.Module = model
    if optimized:
        step_model = graphopt.optimize(model.train(), next(data), **options(args))
        data = batches(corpus(), args, start, device)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    losses: list[torch.Tensor] = []
    start_s, warm, skipped = 0.0, 0.0, 0
    for i in range(args.steps):
        tokens, targets = next(data)
        loss = step_model(tokens, targets)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        skipped += scaler.get_scale() < before
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        if i == 0:
            wait(device)
            start_s = time.perf_counter() - began
        if i == min(4, args.steps - 1):
            wait(device)
            warm = time.perf_counter()
    wait(device)
    timed = args.steps - 5  # what is left behind the warm-up
    ms = (time.perf_counter() - warm) * 1e3 / timed if timed > 0 else None
    peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else None
    if optimized and args.checkpoint:
        save(args.checkpoint, model, optimizer, scaler, start + args.steps)
    values = torch.stack(losses).float().tolist()
    return Run(values, ms, peak, start_s, skipped), optimizer, scaler


def options(args: argparse.Namespace) -> dict[str, object]:
    """What the command line asks of `graphopt.optimize`; what is not asked for is left out."""
    given = {
        "precision": args.precision,
        "memory_budget": args.memory_budget,
        "segments": args.segments,
        # AdamW keeps two float32 numbers a parameter, which the budget counts
        "resident_bytes": 8 * args.parameters if args.memory_budget is not None else None,
    }
    return {name: value for name, value in given.items() if value is not None}


def wait(device: torch.device) -> None:
    """Until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def save(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    step: int,
) -> None:
    """Write everything that a resumed run needs; first beside the file, so none is half written."""
    device = next(model.parameters()).device
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scaler": scaler.state_dict(),
        "random": torch.get_rng_state(),
        "random_device": torch.cuda.get_rng_state() if device.type == "cuda" else None,
        "step": step,
    }
    unfinished = path.with_suffix(path.suffix + ".part")
    torch.save(state, unfinished)
    unfinished.replace(path)


def restore(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler
) -> int:
    """Load what `save` wrote; the step at which to go on."""
    state = torch.load(path, map_location="cpu")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    if scaler.is_enabled() and state["scaler"]:  # a float32 or bf16 run had none
        scaler.load_state_dict(state["scaler"])
    torch.set_rng_state(state["random"])
    if state["random_device"] is not None:
        torch.cuda.set_rng_state(state["random_device"])
    return int(state["step"])


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--precision", choices=("bf16", "fp16", "auto"))
    parser.add_argument("--memory-budget", type=budget, help="12GiB, or 0.6 of the plain peak")
    parser.add_argument("--segments", type=int, help="recompute all but what crosses N segments")
    parser.add_argument("--checkpoint", type=Path, help="where the training state is saved")
    parser.add_argument("--resume", action="store_true", help="go on from --checkpoint")
    parser.add_argument("--compare", action="store_true", help="train plain eager beside it")
    parser.add_argument("--json", type=Path, help="write what was seen")
    parser.add_argument("--plot", type=Path, help="draw the losses there (.svg, .png; matplotlib)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    if args.resume and not args.checkpoint:
        parser.error("--resume needs --checkpoint")
    if args.resume and not args.checkpoint.exists():
        parser.error(f"{args.checkpoint} does not exist")
    return args


def plot(losses: dict[str, list[float]], path: Path) -> None:
    """Draw the loss of every run by step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    matplotlib.rcParams["svg.fonttype"] = "none"
    figure, axes = plt.subplots(figsize=(6, 3.5), constrained_layout=True)
    for (name, values), line in zip(losses.items(), ("-", "--"), strict=False):
        axes.plot(range(1, len(values) + 1), values, line, label=name)
    axes.set(xlabel="step", ylabel="loss")
    axes.legend()
    figure.savefig(path)


def budget(text: str) -> str | float:
    """A fraction as a number, anything else as it is written."""
    try:
        return float(text)
    except ValueError:
        return text


def main() -> None:
    """Train, and print what was seen."""
    args = arguments()
    torch.manual_seed(args.seed)
    model = Transformer(args.width, args.layers, args.heads, args.length, args.dropout)
    model.to(args.device)
    args.parameters = sum(p.numel() for p in model.parameters())
    runs: dict[str, Run] = {}
    if args.compare:
        plain = copy.deepcopy(model)
        runs["eager float32"], *_ = train(plain, args, optimized=False)
        del plain
    torch.manual_seed(args.seed)
    runs["graphopt"], *_ = train(model, args, optimized=True)

    print(f"{args.parameters / 1e6:.1f} M parameters, {args.batch} x {args.length} tokens a step")
    print(f"{'':14s} {'ms a step':>10s} {'peak GiB':>9s} {'first step s':>13s} {'loss':>18s}")
    for name, run in runs.items():
        peak = "-" if run.peak_gib is None else f"{run.peak_gib:.2f}"
        ms = "-" if run.ms_per_step is None else f"{run.ms_per_step:.2f}"
        losses = f"{run.losses[0]:.4f} -> {run.losses[-1]:.4f}"
        print(f"{name:14s} {ms:>10s} {peak:>9s} {run.start_s:13.1f} {losses:>18s}")
    if args.precision == "fp16":
        print(f"steps skipped by the GradScaler: {runs['graphopt'].skipped}")
    if args.json:
        found = {name: dataclasses.asdict(run) for name, run in runs.items()}
        args.json.write_text(json.dumps(found, indent=1))
    if args.plot:
        plot({name: run.losses for name, run in runs.items()}, args.plot)


if __name__ == "__main__":
    try:
        main()
    except graphopt.GraphOptError as error:  # a budget that cannot be kept says what can
        sys.exit(str(error))
