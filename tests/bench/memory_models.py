"""The models of the memory benchmark: twelve, each in a size for a CPU and one for a GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "models"))

import zoo
from zoo import WithLoss

Made = tuple[nn.Module, dict[str, torch.Tensor]]
WORDS = 1000


def tokens(batch: int, length: int) -> torch.Tensor:
    """Token ids."""
    return torch.randint(3, WORDS, (batch, length))


def _text(kind: str, model: str, big: bool, **config: Any) -> Made:
    shape = (8, 512) if big else (4, 64)
    made = zoo._transformer(kind, model, vocab_size=WORDS, **config, **zoo._SPECIAL)()
    return made, {"input_ids": tokens(*shape), "labels": tokens(*shape)}


def _image(model: nn.Module, batch: int, size: int) -> Made:
    pixels, labels = torch.randn(batch, 3, size, size), torch.randint(0, 10, (batch,))
    return model, {"pixel_values": pixels, "labels": labels}


def llama(big: bool) -> Made:
    """Decoder with rotary embeddings and gated linear units."""
    width = 512 if big else 64
    return _text(
        "LlamaConfig", "LlamaForCausalLM", big, hidden_size=width, intermediate_size=3 * width,
        num_hidden_layers=8 if big else 4, num_attention_heads=8, num_key_value_heads=4,
        max_position_embeddings=512,
    )  # fmt: skip


def gpt2(big: bool) -> Made:
    """Decoder with learned positions."""
    return _text(
        "GPT2Config", "GPT2LMHeadModel", big, n_embd=512 if big else 64,
        n_layer=8 if big else 4, n_head=8, n_positions=512,
    )  # fmt: skip


def bert(big: bool) -> Made:
    """Encoder with a masked-language head."""
    width = 512 if big else 64
    return _text(
        "BertConfig", "BertForMaskedLM", big, hidden_size=width, intermediate_size=4 * width,
        num_hidden_layers=8 if big else 4, num_attention_heads=8, max_position_embeddings=512,
    )  # fmt: skip


def t5(big: bool) -> Made:
    """Encoder and decoder with relative positions."""
    made = zoo._transformer(
        "T5Config", "T5ForConditionalGeneration", vocab_size=WORDS,
        d_model=512 if big else 64, d_kv=64 if big else 8, d_ff=2048 if big else 256,
        num_layers=6 if big else 2, num_heads=8, decoder_start_token_id=0,
    )()  # fmt: skip
    source, target = ((8, 512), (8, 256)) if big else ((4, 64), (4, 32))
    return made, {"input_ids": tokens(*source), "labels": tokens(*target)}


def vit(big: bool) -> Made:
    """Patches of an image through an encoder."""
    width = 512 if big else 64
    made = zoo._transformer(
        "ViTConfig", "ViTForImageClassification", hidden_size=width, intermediate_size=4 * width,
        num_hidden_layers=8 if big else 4, num_attention_heads=8,
        image_size=224 if big else 32, patch_size=16 if big else 4, num_labels=10,
    )()  # fmt: skip
    return _image(made, 32 if big else 8, 224 if big else 32)


def swin(big: bool) -> Made:
    """Attention in shifted windows."""
    config = {} if big else {"img_size": 32, "window_size": 4, "patch_size": 2, "embed_dim": 24,
                             "depths": (2, 2), "num_heads": (2, 4)}  # fmt: skip
    return _image(
        zoo._timm("swin_tiny_patch4_window7_224", **config)(), 32 if big else 8, 224 if big else 32
    )


def convnext(big: bool) -> Made:
    """Depthwise convolutions, LayerNorm and a wide MLP in each block."""
    config = {} if big else {"depths": (2, 2, 4, 2), "dims": (16, 32, 48, 64)}
    return _image(zoo._timm("convnext_atto", **config)(), 32 if big else 4, 224 if big else 64)


def resnet50(big: bool) -> Made:
    """Convolutions, BatchNorm and skips."""
    config = {} if big else {"layers": (2, 2, 2, 2), "channels": (8, 16, 24, 32)}
    return _image(zoo._timm("resnet50", **config)(), 32 if big else 4, 224 if big else 64)


def mixer(big: bool) -> Made:
    """MLPs over tokens and channels in turns."""
    zoo._declare_torchvision_ops()
    from timm.models.mlp_mixer import MlpMixer

    size, width, depth = (224, 512, 8) if big else (32, 64, 4)
    made = MlpMixer(10, img_size=size, patch_size=size // 8, num_blocks=depth, embed_dim=width)
    return _image(WithLoss(made), 64 if big else 8, size)


def whisper(big: bool) -> Made:
    """Speech to text: a convolutional front, encoder and decoder."""
    width, layers, length = (384, 4, 1500) if big else (64, 2, 64)
    made = zoo._transformer(
        "WhisperConfig", "WhisperForConditionalGeneration", vocab_size=WORDS, d_model=width,
        encoder_layers=layers, decoder_layers=layers, encoder_attention_heads=8,
        decoder_attention_heads=8, encoder_ffn_dim=4 * width, decoder_ffn_dim=4 * width,
        num_mel_bins=8, max_source_positions=length, max_target_positions=64,
        decoder_start_token_id=1, **zoo._SPECIAL,
    )()  # fmt: skip
    sound = torch.randn(4, 8, 2 * length)
    return made, {"input_features": sound, "labels": tokens(4, 32)}


class UNet(nn.Module):
    """Three levels down and up, with a skip at each."""

    def __init__(self, width: int) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width]
        self.down = nn.ModuleList(
            self._block(a, b) for a, b in zip([3, *widths], widths, strict=False)
        )
        self.middle = self._block(4 * width, 8 * width)
        self.up = nn.ModuleList(self._block(3 * w, w) for w in reversed(widths))
        self.head = nn.Conv2d(width, 3, 1)

    @staticmethod
    def _block(inside: int, out: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(inside, out, 3, padding=1), nn.GroupNorm(4, out), nn.SiLU(),
            nn.Conv2d(out, out, 3, padding=1), nn.GroupNorm(4, out), nn.SiLU(),
        )  # fmt: skip

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The mean squared error of the output beside `labels`."""
        x, skips = pixel_values, []
        for block in self.down:
            skips.append(block(x))
            x = nn.functional.max_pool2d(skips[-1], 2)
        x = self.middle(x)
        for block, skip in zip(self.up, reversed(skips), strict=True):
            x = nn.functional.interpolate(x, scale_factor=2.0)
            x = block(torch.cat([x, skip], 1))
        return nn.functional.mse_loss(self.head(x), labels)


def unet(big: bool) -> Made:
    """A U-Net."""
    size = 256 if big else 32
    pixels = torch.randn(16 if big else 4, 3, size, size)
    return UNet(32 if big else 8), {"pixel_values": pixels, "labels": torch.randn_like(pixels)}


class DeepMLP(nn.Module):
    """A hundred blocks of one width, each with a skip."""

    def __init__(self, width: int, blocks: int = 100) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)
            )
            for _ in range(blocks)
        )

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The mean squared error beside `labels`."""
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.mse_loss(x, labels)


def mlp100(big: bool) -> Made:
    """A hundred blocks: the activations of a deep net."""
    width, batch = (512, 8192) if big else (16, 512)
    return DeepMLP(width), {"x": torch.randn(batch, width), "labels": torch.randn(batch, width)}


MODELS: dict[str, Callable[[bool], Made]] = {
    f.__name__: f
    for f in (
        llama, gpt2, bert, t5, vit, swin, convnext, resnet50, mixer, whisper, unet, mlp100,
    )
}  # fmt: skip
"""Name -> a function of whether the size for a GPU is wanted: the model and its inputs."""


def make(name: str, device: str) -> Made:
    """A model in training mode without dropout, and its inputs, on a device."""
    torch.manual_seed(0)
    model, inputs = MODELS[name](device == "cuda")
    zoo.no_dropout(model)
    return model.to(device).train(), {k: v.to(device) for k, v in inputs.items()}
