"""Predicted and measured memory peaks of whole training steps on a GPU.

    python tests/bench/oracle.py                       # llama, gpt2, a conv net, an MLP
    python tests/bench/oracle.py --models conv --precision none --live

For each model the peak of a training step is predicted on fake tensors (`graphopt.memory.oracle`),
then two real steps are run; `max_memory_allocated` of the second is the measured peak. Exit code 1
where a prediction is off by more than 3 %.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import graphopt
from graphopt.memory.oracle import Prediction, predict

MIB = 2**20
ALLOWED = 0.03

Loss = Callable[[Any], torch.Tensor] | None
Made = tuple[nn.Module, tuple[Any, ...], dict[str, Any], Loss]


def _language_model(name: str) -> Made:
    path = Path(__file__).with_name("models.py")
    spec = importlib.util.spec_from_file_location("bench_models", path)
    assert spec is not None
    assert spec.loader is not None
    models = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(models)
    model, inputs = models.MODELS[name]()
    return model, (), inputs, None


class Residual(nn.Module):
    """Two convolutions with batch norm around a shortcut."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(after), nn.BatchNorm2d(after)
        self.short = nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + self.short(x))


def conv() -> Made:
    """11 M parameters, 64 images of 224 x 224, eight residual blocks."""
    widths = [(64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1)]
    blocks = [Residual(*w) for w in (*widths, (256, 512, 2), (512, 512, 1))]
    stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000)]
    labels = torch.randint(0, 1000, (64,))
    images = torch.randn(64, 3, 224, 224)
    return nn.Sequential(*stem, *blocks, *head), (images,), {}, _classes(labels)


def mlp() -> Made:
    """Six layers of width 4096 with LayerNorm, GELU and dropout, 16,384 rows."""
    layers: list[nn.Module] = []
    for _ in range(6):
        layers += [nn.LayerNorm(4096), nn.Linear(4096, 4096), nn.GELU(), nn.Dropout(0.1)]
    labels = torch.randint(0, 1000, (16384,))
    model = nn.Sequential(*layers, nn.Linear(4096, 1000))
    return model, (torch.randn(16384, 4096),), {}, _classes(labels)


def _classes(labels: torch.Tensor) -> Callable[[Any], torch.Tensor]:
    held = labels.cuda()
    return lambda y: F.cross_entropy(y.float(), held)


MODELS: dict[str, Callable[[], Made]] = {
    "llama": lambda: _language_model("llama"),
    "gpt2": lambda: _language_model("gpt2"),
    "conv": conv,
    "mlp": mlp,
}


def compare(name: str, precision: str | None, fuse: bool) -> tuple[dict[str, Any], Prediction]:
    """Predict the step of one model, run it twice, and tell both."""
    torch.manual_seed(0)
    model, args, kwargs, loss_fn = MODELS[name]()
    model = model.cuda().train()
    args = tuple(a.cuda() for a in args)
    kwargs = {k: v.cuda() for k, v in kwargs.items()}
    opt = graphopt.optimize(model, args, kwargs, precision=precision, fuse=fuse)
    start = time.perf_counter()
    found = predict(opt.body, loss_fn=loss_fn)
    seconds = time.perf_counter() - start
    start = time.perf_counter()
    predict(opt.body, loss_fn=loss_fn)
    again = time.perf_counter() - start
    peaks = {}
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        if loss_fn is not None:
            loss_fn(opt(*args, **kwargs)).backward()
        else:
            result = opt(*args, **kwargs)  # the logits stay alive, as the prediction has it
            result.loss.backward()
            del result
        torch.cuda.synchronize()
        stats = torch.cuda.memory_stats()
        peaks = {
            "allocated": torch.cuda.max_memory_allocated(),
            "requested": stats["requested_bytes.all.peak"],
            "reserved": torch.cuda.max_memory_reserved(),
        }
    row = {
        "model": name,
        "precision": precision,
        "fuse": fuse,
        "predicted": found.peak_bytes,
        **peaks,
        "error": found.peak_bytes / peaks["allocated"] - 1,
        "seconds": seconds,
        "seconds_again": again,
        "where": str(found.where),
        "breakdown": {k: v for k, v in found.breakdown.items() if v},
        "notes": found.notes,
    }
    return row, found


def main() -> int:
    """Compare the models asked for and print one line each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--precision", default="bf16", help='"bf16", "fp16" or "none"')
    parser.add_argument("--no-fuse", action="store_true")
    parser.add_argument("--live", action="store_true", help="show what is alive at the peak")
    parser.add_argument("--json", type=Path, help="write the results there")
    options = parser.parse_args()
    unknown = sorted({*options.models.split(",")} - {*MODELS})
    if unknown:
        parser.error(f"no model is called {', '.join(unknown)}; there are {', '.join(MODELS)}")
    if not torch.cuda.is_available():
        print("this comparison needs a CUDA device", file=sys.stderr)
        return 2
    torch.set_float32_matmul_precision("high")
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    precision = None if options.precision == "none" else options.precision
    rows = []
    for name in options.models.split(","):
        row, found = compare(name, precision, not options.no_fuse)
        rows.append(row)
        print(
            f"{name:6s} predicted {row['predicted'] / MIB:10.2f} MiB, allocated "
            f"{row['allocated'] / MIB:10.2f} ({row['error']:+.2%}), requested "
            f"{row['requested'] / MIB:10.2f}, reserved {row['reserved'] / MIB:10.2f}; "
            f"in {row['seconds']:.2f} s, again {row['seconds_again']:.2f} s; peak in {row['where']}"
        )
        for kind, size in row["breakdown"].items():
            print(f"       {kind:12s} {size / MIB:10.2f} MiB")
        for note in row["notes"]:
            print(f"       {note}")
        if options.live:
            for h in found.live[:20]:
                print(f"       {h.bytes / MIB:9.2f} {h.kind:11s} {h.phase:8s} {h.name} {h.op}")
        gc.collect()
        torch.cuda.empty_cache()
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    return int(any(abs(row["error"]) > ALLOWED for row in rows))


if __name__ == "__main__":
    sys.exit(main())
