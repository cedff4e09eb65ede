"""fp16 as under autocast: a GradScaler's decisions step by step, masks, large numbers, overflow."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import graphopt

FP16 = torch.float16
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


# ------------------------------------------------------------------------------ GradScaler


class Net(nn.Module):
    """Two linear layers with a norm and an activation; small enough to overflow on purpose."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.norm(self.up(x)))) + x


@dataclasses.dataclass
class Seen:
    """What happened in one step."""

    loss: float
    norm: float
    found_inf: float
    scale: float
    moved: bool


def train(
    optimized: bool,
    device: str,
    *,
    clip: float | None = 1.0,
    init_scale: float = 2.0**14,
    micro_batches: int = 1,
    steps: int = 24,
) -> list[Seen]:
    """Train with a GradScaler; every fifth batch is so large that fp16 overflows in forward."""
    model = Net().to(device)
    call: Callable[..., Any] = graphopt.optimize(model, precision="fp16") if optimized else model
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scaler = torch.amp.GradScaler(device, init_scale=init_scale, growth_interval=3)
    generator = torch.Generator().manual_seed(1)
    seen = []
    for i in range(steps):
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        total = 0.0
        for _ in range(micro_batches):
            x = torch.randn(4, 8, generator=generator).to(device) * (1e5 if i % 5 == 4 else 1.0)
            with torch.autocast(device, FP16, enabled=not optimized):
                loss = call(x).float().square().mean() / micro_batches
            scaler.scale(loss).backward()
            total += float(loss.detach())
        norm = math.nan
        if clip is not None:
            scaler.unscale_(optimizer)
            norm = float(nn.utils.clip_grad_norm_(model.parameters(), clip))
        scaler.step(optimizer)
        states = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        found = max(float(v) for v in states.values())
        scaler.update()
        moved = any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        seen.append(Seen(total, norm, found, scaler.get_scale(), moved))
    return seen


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "options",
    [{}, {"clip": None}, {"init_scale": 2.0**30}, {"micro_batches": 2}],
    ids=["clip", "no_clip", "scale_too_large", "micro_batches"],
)
def test_every_decision_of_a_grad_scaler_is_autocasts(device: str, options: dict[str, Any]) -> None:
    eager, ours = train(False, device, **options), train(True, device, **options)
    assert [s.found_inf for s in ours] == [s.found_inf for s in eager]
    assert [s.scale for s in ours] == [s.scale for s in eager]
    assert [s.moved for s in ours] == [s.moved for s in eager]
    assert [s.moved for s in eager] == [not s.found_inf for s in eager]
    skipped = sum(not s.moved for s in eager)
    assert 4 <= skipped < len(eager) - 4, "steps are skipped, and others are not"
    finite = [(a, b) for a, b in zip(eager, ours, strict=True) if a.moved]
    for name in ("loss", "norm"):
        wanted, found = zip(*((getattr(a, name), getattr(b, name)) for a, b in finite), strict=True)
        torch.testing.assert_close(
            torch.tensor(found), torch.tensor(wanted), rtol=3e-2, atol=1e-3, equal_nan=True
        )


# ------------------------------------------------------------- masks, large constants, overflow

LOWEST = torch.finfo(torch.float32).min
N = 16


class Call(nn.Module):
    """A function of the input, of a weight, and of what a linear layer makes of the input."""

    def __init__(self, call: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(N, N)
        self.weight = nn.Parameter(torch.rand(N) + 0.5)
        self.call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(x, self.weight, self.linear(x))


def additive(h: torch.Tensor, value: float, whole_row: bool = False) -> torch.Tensor:
    """A mask to be added, with `value` above the diagonal; or in all of the last row, too."""
    mask = torch.full((N, N), value, device=h.device).triu(1)
    if whole_row:
        mask[-1] = value
    return mask


def heads(h: torch.Tensor) -> torch.Tensor:
    return h.view(1, N, 2, N // 2).transpose(1, 2)


def attention(h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(heads(h), heads(h), heads(h), mask[None, None])


def by_hand(h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    scores = heads(h) @ heads(h).transpose(-1, -2) / math.sqrt(N // 2) + mask
    return torch.softmax(scores, -1) @ heads(h)


def lowest(h: torch.Tensor) -> float:
    return torch.finfo(h.dtype).min


IDIOMS: dict[str, Callable[..., torch.Tensor]] = {
    "mask_added": lambda x, w, h: by_hand(h, additive(h, LOWEST)),
    "mask_added_own_dtype": lambda x, w, h: by_hand(h, additive(h, lowest(h)).to(h.dtype)),
    "mask_of_1e9": lambda x, w, h: by_hand(h, additive(h, -1e9)),
    "mask_of_inf": lambda x, w, h: by_hand(h, additive(h, -math.inf)),
    "row_masked": lambda x, w, h: by_hand(h, additive(h, LOWEST, True)),
    "attention_mask": lambda x, w, h: attention(h, additive(h, LOWEST)),
    "attention_mask_own_dtype": lambda x, w, h: attention(h, additive(h, lowest(h)).to(h.dtype)),
    "attention_row_masked": lambda x, w, h: attention(h, additive(h, LOWEST, True)),
    "masked_fill": lambda x, w, h: torch.softmax(
        h.masked_fill(additive(h, 1.0).bool(), lowest(h)), -1
    ),
    "masked_fill_float32": lambda x, w, h: torch.softmax(
        h.float().masked_fill(additive(h, 1.0).bool(), LOWEST), -1
    ),
    "where": lambda x, w, h: torch.where(additive(h, 1.0).bool(), lowest(h), h).softmax(-1),
    "times_1e5": lambda x, w, h: h * 1e5,
    "plus_7e4": lambda x, w, h: h + 7e4,
    "over_1e_6": lambda x, w, h: h / 1e-6,
    "square_of_300": lambda x, w, h: (h * 300).square(),
    "rms_norm_of_large": lambda x, w, h: (
        h * 3e3 * torch.rsqrt((h * 3e3).pow(2).mean(-1, keepdim=True) + 1e-6) * w
    ),
    "rms_norm_float32": lambda x, w, h: (
        (
            (h * 3e3).float() * torch.rsqrt((h * 3e3).float().pow(2).mean(-1, keepdim=True) + 1e-6)
        ).to(h.dtype)
        * w
    ),
    "layer_norm_of_large": lambda x, w, h: F.layer_norm(h * 1e4, (N,), w),
    "gelu_tanh_of_large": lambda x, w, h: F.gelu(h * 300, approximate="tanh"),
    "gelu_by_hand": lambda x, w, h: (
        0.5 * (h * 100) * (1 + torch.tanh(0.8 * (h * 100 + 0.0447 * (h * 100) ** 3)))
    ),
    "silu_times": lambda x, w, h: F.silu(h * 200) * (h * 200),
    "softcap": lambda x, w, h: torch.tanh(h * 1e3 / 50.0) * 50.0,
    "linear_of_large": lambda x, w, h: F.linear(h * 1e3, (w * 100).expand(N, N)),
    "residual_of_large": lambda x, w, h: F.layer_norm(h * 4e4 + x * 4e4, (N,), w),
    "sum": lambda x, w, h: (h * 1e4).sum(-1),
    "small": lambda x, w, h: (h * 1e-5) * 1e-3,
    "exp": lambda x, w, h: torch.exp(h * 20),
    "cross_entropy": lambda x, w, h: F.cross_entropy(
        h * 1e4, torch.arange(N, device=h.device), reduction="none"
    ),
}


def results(model: nn.Module, call: Callable[..., torch.Tensor], x: torch.Tensor) -> list[Any]:
    y = call(x)
    total = torch.where(y.isfinite(), y, 0).float().sum()
    grads = torch.autograd.grad(total, list(model.parameters()), allow_unused=True)
    return [y.detach(), *grads]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", IDIOMS)
def test_overflow_is_where_autocast_has_it_or_nowhere(name: str, device: str) -> None:
    model = Call(IDIOMS[name]).to(device)
    x = torch.randn(N, N, generator=torch.Generator().manual_seed(1)).to(device)

    def autocast(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device, FP16):
            return model(x)

    wanted = results(model, autocast, x)
    ours = results(model, graphopt.optimize(model, x, precision="fp16"), x)
    assert ours[0].dtype == wanted[0].dtype
    for a, b in zip(wanted, ours, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            finite = a.isfinite()
            assert bool(b[finite].isfinite().all()), "finite under autocast, and not here"
            scale = float(a[finite].abs().max()) if finite.any() else 1.0
            torch.testing.assert_close(b[finite], a[finite], rtol=2e-2, atol=4e-3 * scale)
