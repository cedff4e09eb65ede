"""Small random models of the architectures that graphopt is tested on, with inputs and labels.

Each entry is a default config of its library shrunk to a few narrow layers, so that a training
step takes milliseconds on a CPU. Labels are never the input tensors, and each model has two input
shapes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Inputs = dict[str, torch.Tensor]
SHAPES = (0, 1)


@dataclasses.dataclass(frozen=True)
class Entry:
    """A model of the zoo.

    Attributes:
        name: short name of the architecture.
        build: makes the model, in the mode that its library gives.
        inputs: keyword arguments of a forward with a loss, for shape 0 or 1.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int], Inputs]

    def make(self, *, training: bool, dropout: bool = False, device: str = "cpu") -> nn.Module:
        """The model with weights that depend on its name alone.

        Args:
            training: its mode.
            dropout: keep the config's dropout; otherwise every probability is set to zero.
            device: where it shall be.
        """
        torch.manual_seed(sum(map(ord, self.name)))
        model = self.build()
        _shake(model)
        if not dropout:
            no_dropout(model)
        return model.to(device).train(training)

    def batch(self, shape: int, device: str = "cpu") -> Inputs:
        """Inputs and labels, the same at each call."""
        torch.manual_seed(100 + shape)
        return {name: value.to(device) for name, value in self.inputs(shape).items()}


PROBABILITIES = (
    "dropout", "attention_dropout", "activation_dropout", "attn_dropout", "drop_prob", "drop_rate",
)  # fmt: skip
"""Attributes that hold a dropout probability."""


def no_dropout(model: nn.Module) -> None:
    """Set every dropout probability of a model to zero (module attributes and config)."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name in PROBABILITIES:
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def _shake(model: nn.Module) -> None:
    """Move every parameter off the zeros and ones that initializers leave.

    A bias of zero or a norm weight of one would hide a rewrite that forgets it.
    """
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.02)


class WithLoss(nn.Module):
    """An image classifier with cross entropy in its forward, as the language models have it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, pixel_values: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.model(pixel_values)
        return F.cross_entropy(logits, labels), logits


VOCAB = 131


def _ids(batch: int, length: int) -> torch.Tensor:
    return torch.randint(3, VOCAB, (batch, length))


def _causal(shape: int) -> Inputs:
    size = ((2, 16), (3, 11))[shape]
    return {"input_ids": _ids(*size), "labels": _ids(*size)}


def _masked(shape: int) -> Inputs:
    inputs = _causal(shape)
    mask = torch.ones_like(inputs["input_ids"])
    mask[0, -3:] = 0
    return {**inputs, "attention_mask": mask}


def _translation(shape: int) -> Inputs:
    source, target = (((2, 12), (2, 7)), ((3, 9), (3, 5)))[shape]
    return {"input_ids": _ids(*source), "labels": _ids(*target)}


def _image(size: int) -> Callable[[int], Inputs]:
    def inputs(shape: int) -> Inputs:
        batch = (2, 3)[shape]
        pixels = torch.randn(batch, 3, size, size)
        return {"pixel_values": pixels, "labels": torch.randint(0, 10, (batch,))}

    return inputs


def _speech(shape: int) -> Inputs:
    batch, target = ((2, 7), (3, 5))[shape]
    return {"input_features": torch.randn(batch, 8, 32), "labels": _ids(batch, target)}


_KEPT_ALIVE: list[torch.library.Library] = []


@functools.cache
def _declare_torchvision_ops() -> None:
    """Let timm and transformers import where torchvision's compiled part does not fit torch.

    That is so beside a CPU build of torch. torchvision describes two of its detection ops to torch
    at import, which fails when they are missing. No model here calls them: their schemas do.
    """
    try:
        import torchvision  # noqa: F401
    except ImportError:
        return
    except RuntimeError:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for op in ("nms", "qnms"):
            library.define(f"{op}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _KEPT_ALIVE.append(library)


def _transformer(kind: str, model: str, **config: Any) -> Callable[[], nn.Module]:
    """A transformers model by the names of its config class and model class."""

    def build() -> nn.Module:
        _declare_torchvision_ops()
        import transformers

        made: nn.Module = getattr(transformers, model)(getattr(transformers, kind)(**config))
        return made

    return build


def _timm(name: str, **kwargs: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        _declare_torchvision_ops()
        import timm

        return WithLoss(timm.create_model(name, num_classes=10, **kwargs))

    return build


def _mixer() -> nn.Module:
    _declare_torchvision_ops()
    from timm.models.mlp_mixer import MlpMixer

    return WithLoss(MlpMixer(10, img_size=32, patch_size=8, num_blocks=2, embed_dim=32))


_DECODER: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_SPECIAL: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

ENTRIES = (
    Entry(
        "gpt2",
        _transformer(
            "GPT2Config", "GPT2LMHeadModel",
            vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64, **_SPECIAL,
        ),
        _causal,
    ),
    Entry(
        "llama", _transformer("LlamaConfig", "LlamaForCausalLM", **_DECODER, **_SPECIAL), _causal
    ),
    Entry(
        "qwen3",
        _transformer("Qwen3Config", "Qwen3ForCausalLM", head_dim=8, **_DECODER, **_SPECIAL),
        _causal,
    ),
    Entry(
        "gemma2",
        _transformer(
            "Gemma2Config", "Gemma2ForCausalLM",
            head_dim=8, query_pre_attn_scalar=8, sliding_window=8, **_DECODER, **_SPECIAL,
        ),
        _causal,
    ),
    Entry(
        "bert",
        _transformer(
            "BertConfig", "BertForMaskedLM",
            vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, max_position_embeddings=64,
        ),
        _masked,
    ),
    Entry(
        "t5",
        _transformer(
            "T5Config", "T5ForConditionalGeneration",
            vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
            decoder_start_token_id=0,
        ),
        _translation,
    ),
    Entry(
        "vit",
        _transformer(
            "ViTConfig", "ViTForImageClassification",
            hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            image_size=32, patch_size=8, num_labels=10,
        ),
        _image(32),
    ),
    Entry(
        "whisper",
        _transformer(
            "WhisperConfig", "WhisperForConditionalGeneration",
            vocab_size=VOCAB, d_model=32, encoder_layers=2, decoder_layers=2,
            encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64,
            decoder_ffn_dim=64, num_mel_bins=8, max_source_positions=16, max_target_positions=32,
            decoder_start_token_id=1, **_SPECIAL,
        ),
        _speech,
    ),
    Entry("resnet50", _timm("resnet50", layers=(2, 1, 1, 1), channels=(8, 16, 24, 32)), _image(64)),
    Entry(
        "convnext", _timm("convnext_atto", depths=(1, 1, 2, 1), dims=(8, 16, 24, 32)), _image(64)
    ),
    Entry("mixer", _mixer, _image(32)),
)  # fmt: skip

ZOO = {e.name: e for e in ENTRIES}
"""The zoo by name."""
