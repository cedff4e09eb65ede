"""Six small models for the state machine; all without dropout, each with three input shapes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

Inputs = dict[str, torch.Tensor]


class Mlp(nn.Module):
    """LayerNorm, GELU, dropout of p = 0, residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(12)
        self.up, self.down = nn.Linear(12, 20), nn.Linear(20, 12)
        self.drop = nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Conv(nn.Module):
    """Convolutions with batch norm and ReLU, pooled; two results."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(6)
        self.conv = nn.Conv2d(6, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6, momentum=0.3)
        self.head = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = F.relu(self.bn(self.stem(x)))
        h = F.relu(self.norm(self.conv(h)) + h)
        pooled = h.mean((2, 3))
        return self.head(pooled), pooled


class RmsNorm(nn.Module):
    """Written out, as llama has it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = 1e-5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.float() if x.dtype is torch.bfloat16 else x
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * h.to(x.dtype)


class Llama(nn.Module):
    """A decoder block: RMSNorm, rotary embedding, grouped attention, gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.post = RmsNorm(16), RmsNorm(16)
        self.q, self.kv = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)
        self.o = nn.Linear(16, 16, bias=False)
        self.gate, self.up = nn.Linear(16, 24, bias=False), nn.Linear(16, 24, bias=False)
        self.down = nn.Linear(24, 16, bias=False)
        self.register_buffer("frequency", 1.0 / 100 ** (torch.arange(0, 4, 2) / 4), False)

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, heads, length, 4], turned by position."""
        angle = torch.arange(x.shape[2], device=x.device)[:, None] * self.frequency
        cos, sin = (f(torch.cat((angle, angle), -1)).to(x.dtype) for f in (torch.cos, torch.sin))
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat((-b, a), -1) * sin

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, _ = x.shape
        h = self.norm(x)
        q = self.q(h).view(b, s, 4, 4).transpose(1, 2)
        k, v = self.kv(h).view(b, s, 2, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        k, v = (t.repeat_interleave(2, dim=1) for t in (self.rotate(k), v))
        a = F.scaled_dot_product_attention(self.rotate(q), k, v, is_causal=True)
        x = x + self.o(a.transpose(1, 2).reshape(b, s, 16))
        h = self.post(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Encoder(nn.Module):
    """Tied embedding and head, attention written out, buffers that a forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(23, 12)
        self.register_buffer("position", torch.randn(16, 12) * 0.1)
        self.qkv, self.out = nn.Linear(12, 36), nn.Linear(12, 12)
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(2))
        self.norm = nn.LayerNorm(12)
        self.head = nn.Linear(12, 23, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mean", torch.zeros(12))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embed(ids) + self.position[: ids.shape[1]]
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        scores = q @ k.transpose(-1, -2) / 12**0.5
        scores = scores.masked_fill(~mask[:, None, :], torch.finfo(scores.dtype).min)
        x = x + self.out(scores.softmax(-1) @ v)
        for layer in self.layers:
            x = x + F.relu(layer(x))
        if self.training:
            self.calls += 1
            self.mean.mul_(0.9).add_(x.detach().mean((0, 1)).to(self.mean.dtype), alpha=0.1)
        return {"logits": self.head(x), "mean": x.mean(1) - self.mean}


def gpt2() -> nn.Module:
    """GPT-2 from transformers, one narrow layer, with its loss."""
    import transformers

    config = transformers.GPT2Config(
        vocab_size=29, n_embd=16, n_layer=1, n_head=2, n_positions=16,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, use_cache=False,
    )  # fmt: skip
    made: nn.Module = transformers.GPT2LMHeadModel(config)
    return made


def resnet() -> nn.Module:
    """A residual network from timm, four narrow stages of one block."""
    from timm.models.resnet import BasicBlock, ResNet

    made: nn.Module = ResNet(
        BasicBlock, layers=(1, 1, 1, 1), channels=(6, 6, 8, 8), num_classes=5, stem_width=6
    )
    return made


def _ids(vocabulary: int, sizes: tuple[int, int]) -> torch.Tensor:
    return torch.randint(3, vocabulary, sizes)


def _encoder_inputs(shape: int) -> Inputs:
    sizes = ((2, 6), (3, 6), (2, 9))[shape]
    mask = torch.rand(sizes) > 0.3
    mask[:, 0] = True
    return {"ids": _ids(23, sizes), "mask": mask}


def _gpt2_inputs(shape: int) -> Inputs:
    sizes = ((2, 7), (3, 7), (2, 5))[shape]
    return {"input_ids": _ids(29, sizes), "labels": _ids(29, sizes)}


def _floats(*shapes: tuple[int, ...]) -> Callable[[int], Inputs]:
    return lambda shape: {"x": torch.randn(shapes[shape])}


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model of the machine.

    Attributes:
        name: for test names.
        build: makes it.
        inputs: keyword arguments for shape 0, 1 or 2.
        inner: a submodule that is frozen in eval mode, and hooked.
        weight: a parameter that is replaced, frozen, written.
        norm: a submodule with an `eps` that a forward reads.
        loss_in_float32: whether it computes its loss in float32 whatever its own dtype is.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int], Inputs]
    inner: str
    weight: str
    norm: str
    loss_in_float32: bool = False

    def make(self) -> nn.Module:
        """The model, its parameters moved off zeros and ones."""
        torch.manual_seed(sum(map(ord, self.name)))
        model = self.build().train()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p) * 0.05)
        return model

    def batch(self, shape: int, seed: int, dtype: torch.dtype) -> Inputs:
        """Inputs by seed, floating ones in a dtype."""
        torch.manual_seed(seed)
        found = self.inputs(shape)
        return {k: v.to(dtype) if v.is_floating_point() else v for k, v in found.items()}


SUBJECTS = (
    Subject("mlp", Mlp, _floats((4, 12), (6, 12), (2, 3, 12)), "up", "up.weight", "norm"),
    Subject("conv", Conv, _floats((3, 3, 6, 6), (4, 3, 6, 6), (3, 3, 8, 6)),
            "bn", "conv.weight", "norm"),
    Subject("llama", Llama, _floats((2, 5, 16), (3, 5, 16), (2, 8, 16)),
            "post", "q.weight", "norm"),
    Subject("gpt2", gpt2, _gpt2_inputs, "transformer.h.0.mlp", "transformer.h.0.mlp.c_fc.weight",
            "transformer.ln_f", loss_in_float32=True),
    Subject("resnet", resnet, _floats((2, 3, 32, 32), (3, 3, 32, 32), (2, 3, 40, 32)),
            "layer1.0.bn2", "layer1.0.conv1.weight", "bn1"),
    Subject("encoder", Encoder, _encoder_inputs, "norm", "embed.weight", "norm"),
)  # fmt: skip
"""The models of the state machine."""
