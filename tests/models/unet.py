"""A small UNet with group norms, attention and skip connections, as diffusion models have it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from zoo import Entry, Inputs

WIDTH = 16


class Residual(nn.Module):
    """Two convolutions, each after a group norm and a SiLU, around a skip."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(4, inside), nn.GroupNorm(4, outside)
        self.conv1 = nn.Conv2d(inside, outside, 3, padding=1)
        self.conv2 = nn.Conv2d(outside, outside, 3, padding=1)
        self.time = nn.Linear(WIDTH, outside)
        self.skip = nn.Conv2d(inside, outside, 1) if inside != outside else nn.Identity()

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        h = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(time))[..., None, None]
        h = self.conv2(F.silu(self.norm2(h)))
        return h + self.skip(x)


class Attention(nn.Module):
    """Self-attention over the pixels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pixels = self.norm(x).flatten(2).transpose(1, 2)
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(pixels).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x + self.out(y).transpose(1, 2).reshape(x.shape)


class UNet(nn.Module):
    """Predicts the noise in a picture at a time, and gives the loss with it."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.down, self.up = Residual(WIDTH, 2 * WIDTH), Residual(3 * WIDTH, WIDTH)
        self.middle, self.attention = Residual(2 * WIDTH, 2 * WIDTH), Attention(2 * WIDTH)
        self.pool = nn.Conv2d(2 * WIDTH, 2 * WIDTH, 3, stride=2, padding=1)
        self.norm, self.end = nn.GroupNorm(4, WIDTH), nn.Conv2d(WIDTH, 3, 3, padding=1)

    def forward(
        self, pixel_values: torch.Tensor, time: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        steps = torch.arange(WIDTH // 2, device=time.device)
        angles = time[:, None] * torch.exp(-steps / 2)
        embedded = torch.cat([angles.sin(), angles.cos()], -1)
        x = self.start(pixel_values)
        h = self.pool(self.down(x, embedded))
        h = self.attention(self.middle(h, embedded))
        h = F.interpolate(h, scale_factor=2.0, mode="nearest")
        h = self.up(torch.cat([h, x], 1), embedded)
        noise = self.end(F.silu(self.norm(h)))
        return F.mse_loss(noise, labels), noise


def _inputs(shape: int) -> Inputs:
    batch = (2, 3)[shape]
    picture = (batch, 3, 16, 16)
    return {
        "pixel_values": torch.randn(picture),
        "time": torch.rand(batch),
        "labels": torch.randn(picture),
    }


UNET = Entry("unet", UNet, _inputs)
