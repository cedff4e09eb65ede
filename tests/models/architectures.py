"""The architectures of the sweep: default configs of transformers and timm, few and narrow layers.

The first 22 are those that must be captured; `zoo.py` holds the ones that the other model tests
share.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import zoo
from torch import nn
from zoo import VOCAB, ZOO, Entry, Inputs, WithLoss

MASKS = ("none", "ones", "padded")


@dataclasses.dataclass(frozen=True)
class Architecture:
    """An architecture of the sweep.

    Attributes:
        entry: how to build it, and its inputs without a mask.
        masked: the input that an attention_mask goes with; None where the model takes no mask.
        first: whether it is one of the 22 that must be captured.
    """

    entry: Entry
    masked: str | None = None
    first: bool = False

    @property
    def name(self) -> str:
        """Short name."""
        return self.entry.name

    @property
    def masks(self) -> tuple[str, ...]:
        """The kinds of attention_mask that it is run with."""
        return MASKS if self.masked else MASKS[:1]

    def batch(self, shape: int, mask: str, draw: int = 0) -> Inputs:
        """Inputs and labels of one shape with one kind of mask; other values for another draw."""
        torch.manual_seed(100 + shape + 10 * draw)
        inputs = self.entry.inputs(shape)
        inputs.pop("attention_mask", None)
        if mask == "none":
            return inputs
        given = torch.ones_like(inputs[self.masked or "input_ids"])
        if given.dim() > 2:
            given = given[..., 0]
        given = given.long()
        if mask == "padded":
            given[0, -3:] = 0
            given[1, :2] = 0
            if "labels" in inputs and inputs["labels"].shape == given.shape:
                inputs["labels"] = inputs["labels"].masked_fill(given == 0, -100)
        return {**inputs, "attention_mask": given}


_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_WIDTHS: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
_DECODER = {**_WIDTHS, "num_key_value_heads": 2, "max_position_embeddings": 64, **_SPECIAL}
_ENCODER = {**_WIDTHS, "max_position_embeddings": 64, "pad_token_id": 0}
_SEQ2SEQ: dict[str, Any] = {
    "vocab_size": VOCAB, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 56,
    "decoder_ffn_dim": 56, "max_position_embeddings": 64, "decoder_start_token_id": 1,
    "forced_eos_token_id": None, **_SPECIAL,
}  # fmt: skip
_VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 4,
    "image_size": 32, "patch_size": 8, "num_labels": 10,
}  # fmt: skip


def _first(name: str, masked: str | None = None) -> Architecture:
    return Architecture(ZOO[name], masked, first=True)


def _text(
    name: str, prefix: str, head: str, inputs: Callable[[int], Inputs] = zoo._causal, *,
    first: bool = False, masked: str | None = "input_ids", **config: Any,
) -> Architecture:  # fmt: skip
    build = zoo._transformer(f"{prefix}Config", f"{prefix}{head}", **config)
    return Architecture(Entry(name, build, inputs), masked, first)


def _image(name: str, prefix: str, head: str = "ForImageClassification", size: int = 32,
           **config: Any) -> Architecture:  # fmt: skip
    build = zoo._transformer(f"{prefix}Config", f"{prefix}{head}", **config)
    return Architecture(Entry(name, build, zoo._image(size)))


def _timm(
    name: str, model: str, size: int = 64, *, first: bool = False, other: int | None = None,
    **kwargs: Any,
) -> Architecture:  # fmt: skip
    def inputs(shape: int) -> Inputs:
        return zoo._image((size, other or size)[shape])(shape)

    return Architecture(Entry(f"timm.{name}", zoo._timm(model, **kwargs), inputs), None, first)


def _mpt() -> nn.Module:
    zoo._declare_torchvision_ops()
    import transformers

    config = transformers.MptConfig(
        vocab_size=VOCAB, d_model=32, n_heads=4, n_layers=2, max_seq_len=64
    )
    made: nn.Module = transformers.MptForCausalLM(config)
    return made


def _clip() -> nn.Module:
    zoo._declare_torchvision_ops()
    import transformers

    tower = {k: v for k, v in _WIDTHS.items() if k != "vocab_size"}
    config = transformers.CLIPConfig(
        text_config={**tower, "vocab_size": VOCAB, "max_position_embeddings": 32, **_SPECIAL},
        vision_config={**tower, "image_size": 32, "patch_size": 8},
        projection_dim=16,
    )
    made: nn.Module = transformers.CLIPModel(config)
    return made


def _clip_inputs(shape: int) -> Inputs:
    ids = zoo._causal(shape)["input_ids"][:, :9]
    return {"input_ids": ids, "pixel_values": torch.randn(len(ids), 3, 32, 32)}


def _wav2vec2() -> nn.Module:
    zoo._declare_torchvision_ops()
    import transformers

    config = transformers.Wav2Vec2Config(
        **{**_WIDTHS, "vocab_size": 32}, conv_dim=(16, 16), conv_stride=(5, 4), conv_kernel=(10, 8),
        num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=4, num_labels=10, layerdrop=0.0,
        classifier_proj_size=16, apply_spec_augment=False,
    )  # fmt: skip
    made: nn.Module = transformers.Wav2Vec2ForSequenceClassification(config)
    return made


def _waves(shape: int) -> Inputs:
    batch = (2, 3)[shape]
    return {
        "input_values": torch.randn(batch, (400, 460)[shape]),
        "labels": torch.randint(0, 10, (batch,)),
    }


def _vgg() -> nn.Module:
    zoo._declare_torchvision_ops()
    from timm.models.vgg import VGG

    layers = [8, "M", 16, "M", 16, 16, "M", 16, "M", 16, "M"]
    model = VGG(layers, num_classes=10, mlp_ratio=0.01, norm_layer=nn.BatchNorm2d)
    return WithLoss(model)


_CAUSAL = "ForCausalLM"
_MLM = "ForMaskedLM"
_S2S = "ForConditionalGeneration"

ARCHITECTURES = (
    _first("gpt2", "input_ids"),
    _first("llama", "input_ids"),
    _text("mistral", "Mistral", _CAUSAL, first=True, sliding_window=8, **_DECODER),
    _first("qwen3", "input_ids"),
    _first("gemma2", "input_ids"),
    _text("phi", "Phi", _CAUSAL, first=True, **_DECODER),
    _text(
        "falcon", "Falcon", _CAUSAL, first=True, vocab_size=VOCAB, hidden_size=32,
        num_hidden_layers=2, num_attention_heads=4, **_SPECIAL,
    ),
    _text(
        "opt", "OPT", _CAUSAL, first=True, vocab_size=VOCAB, hidden_size=32, ffn_dim=56,
        num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64,
        word_embed_proj_dim=32, **_SPECIAL,
    ),
    _text(
        "bloom", "Bloom", _CAUSAL, first=True, vocab_size=VOCAB, hidden_size=32, n_layer=2,
        n_head=4, **_SPECIAL,
    ),
    _text("mixtral", "Mixtral", _CAUSAL, first=True, num_local_experts=4, **_DECODER),
    _first("bert", "input_ids"),
    _text("roberta", "Roberta", _MLM, first=True, **_ENCODER),
    _first("t5", "input_ids"),
    _text("bart", "Bart", _S2S, zoo._translation, first=True, **_SEQ2SEQ),
    _first("vit"),
    _first("whisper"),
    _first("resnet50"),
    _first("convnext"),
    _timm(
        "vit", "vit_tiny_patch16_224", 32, first=True, img_size=32, patch_size=8, embed_dim=32,
        depth=2, num_heads=4,
    ),
    _timm(
        "swin", "swin_tiny_patch4_window7_224", 32, first=True, img_size=32, window_size=4,
        embed_dim=16, depths=(2, 2), num_heads=(2, 4),
    ),
    _timm("efficientnet", "efficientnet_b0", first=True),
    _first("mixer"),
    # ---- more of transformers
    _text("gpt_neox", "GPTNeoX", _CAUSAL, **_ENCODER),
    _text(
        "gptj", "GPTJ", _CAUSAL, vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, rotary_dim=4,
        n_positions=64, **_SPECIAL,
    ),
    _text(
        "gpt_neo", "GPTNeo", _CAUSAL, vocab_size=VOCAB, hidden_size=32, num_layers=2, num_heads=4,
        attention_types=[[["global", "local"], 1]], window_size=8, max_position_embeddings=64,
        **_SPECIAL,
    ),
    _text("stablelm", "StableLm", _CAUSAL, **_DECODER),
    _text("olmo2", "Olmo2", _CAUSAL, **_DECODER),
    _text("cohere", "Cohere", _CAUSAL, **_DECODER),
    _text("starcoder2", "Starcoder2", _CAUSAL, **_DECODER),
    _text("granite", "Granite", _CAUSAL, **_DECODER),
    _text("persimmon", "Persimmon", _CAUSAL, **_ENCODER),
    Architecture(Entry("mpt", _mpt, zoo._causal), "input_ids"),
    _text(
        "mamba", "Mamba", _CAUSAL, vocab_size=VOCAB, hidden_size=32, state_size=4,
        num_hidden_layers=2, **_SPECIAL,
    ),
    _text(
        "qwen2_moe", "Qwen2Moe", _CAUSAL, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=24, shared_expert_intermediate_size=24, **_DECODER,
    ),
    _text(
        "distilbert", "DistilBert", _MLM, vocab_size=VOCAB, dim=32, hidden_dim=56, n_layers=2,
        n_heads=4, max_position_embeddings=64,
    ),
    _text("albert", "Albert", _MLM, embedding_size=16, **_ENCODER),
    _text("electra", "Electra", _MLM, embedding_size=16, **_ENCODER),
    _text(
        "deberta_v2", "DebertaV2", _MLM, relative_attention=True, pos_att_type=["p2c", "c2p"],
        **_ENCODER,
    ),
    _text("xlm_roberta", "XLMRoberta", _MLM, **_ENCODER),
    _text("modernbert", "ModernBert", _MLM, **_ENCODER),
    _text("mpnet", "MPNet", _MLM, **_ENCODER),
    _text("convbert", "ConvBert", _MLM, embedding_size=32, **_ENCODER),
    _text("fnet", "FNet", _MLM, masked=None, **{k: v for k, v in _ENCODER.items()
          if k != "num_attention_heads"}),
    _text("mbart", "MBart", _S2S, zoo._translation, **_SEQ2SEQ),
    _text("pegasus", "Pegasus", _S2S, zoo._translation, **_SEQ2SEQ),
    _image("deit", "DeiT", **_VISION),
    _image("beit", "Beit", **_VISION),
    _image("dinov2", "Dinov2", **{k: v for k, v in _VISION.items() if k != "intermediate_size"}),
    Architecture(Entry("clip", _clip, _clip_inputs), "input_ids"),
    _image("swinv2", "Swinv2", image_size=32, patch_size=4, embed_dim=16, depths=(1, 1),
           num_heads=(2, 4), window_size=4, num_labels=10),
    _image("segformer", "Segformer", size=64, num_encoder_blocks=4, depths=[1, 1, 1, 1],
           hidden_sizes=[8, 16, 16, 32], num_attention_heads=[1, 2, 2, 4], num_labels=10),
    Architecture(Entry("wav2vec2", _wav2vec2, _waves), "input_values"),
    # ---- more of timm
    _timm("densenet", "densenet121", other=80, growth_rate=8, block_config=(2, 2, 2, 2)),
    _timm("regnet", "regnetx_002", other=80),
    _timm("mobilenetv3", "mobilenetv3_small_050", other=80),
    _timm("ghostnet", "ghostnet_050", other=80),
    Architecture(Entry("timm.vgg", _vgg, zoo._image(224))),
    _timm("xception", "xception41", 64),
    _timm("deit", "deit_tiny_distilled_patch16_224", 32, img_size=32, patch_size=8, embed_dim=32,
          depth=2, num_heads=4),
    _timm("cait", "cait_xxs24_224", 32, img_size=32, patch_size=8, embed_dim=32, depth=2,
          num_heads=4),
    _timm("coat", "coat_lite_tiny", 64, img_size=64, embed_dims=(16, 16, 32, 32),
          serial_depths=(1, 1, 1, 1), num_heads=8),
    _timm("maxvit", "maxvit_pico_rw_256", 64, img_size=64),
    _timm("poolformer", "poolformer_s12", other=96),
    _timm("edgenext", "edgenext_xx_small", other=96),
    _timm("levit", "levit_128s", 64, img_size=64),
    _timm("pvt_v2", "pvt_v2_b0", 64),
    _timm("nfnet", "nf_regnet_b0", other=80),
    _timm("resnext", "resnext50_32x4d", other=80, layers=(1, 1, 1, 1)),
    _timm("senet", "seresnet50", other=80, layers=(1, 1, 1, 1)),
    _timm("hrnet", "hrnet_w18_small", 64),
    _timm("res2net", "res2net50_26w_4s", other=80, layers=(1, 1, 1, 1)),
    _timm("efficientformer", "efficientformer_l1", 224),
    _timm("mobilevit", "mobilevit_xxs", 64),
    _timm("xcit", "xcit_nano_12_p16_224", 64, img_size=64, depth=2),
    _timm("inception_next", "inception_next_atto", other=96),
    _timm("twins", "twins_svt_small", 64, img_size=64, depths=(1, 1, 2, 1),
          embed_dims=(16, 16, 32, 32), num_heads=(1, 2, 4, 4)),
)  # fmt: skip

BY_NAME = {a.name: a for a in ARCHITECTURES}
"""The architectures by name."""
