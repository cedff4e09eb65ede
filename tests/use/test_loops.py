"""Training loops around an attached model: by hand, with an EMA, and Hugging Face's Trainer."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import graphopt

pytestmark = pytest.mark.filterwarnings("ignore::graphopt.errors.GraphoptWarning")


class Lit(nn.Module):
    """As in Lightning: the network is a submodule, steps are methods that log."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 12), nn.LayerNorm(12), nn.GELU(), nn.Linear(12, 3))
        self.logged: list[float] = []

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self.model(x), y)
        self.logged.append(loss.item())
        return loss


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    sizes = [8] * (count - 1) + [5]  # the last batch is smaller
    return [
        (
            torch.randn(n, 6, generator=generator),
            torch.randint(0, 3, (n,), generator=generator),
        )
        for n in sizes
    ]


def train(lit: Lit) -> tuple[Lit, nn.Module]:
    ema = copy.deepcopy(lit.model)
    optimizer = torch.optim.AdamW(lit.parameters(), lr=1e-2)
    for epoch in range(2):
        lit.train()
        for batch in batches(4):
            optimizer.zero_grad()
            lit.training_step(batch).backward()
            nn.utils.clip_grad_norm_(lit.parameters(), 1.0)
            optimizer.step()
            with torch.no_grad():
                for mean, p in zip(ema.parameters(), lit.model.parameters(), strict=True):
                    mean.lerp_(p, 0.1)
        lit.eval()
        with torch.no_grad():
            lit.logged.append(lit.model(batches(1)[0][0]).sum().item() + epoch)
    return lit, ema


def test_a_loop_of_lightnings_kind_with_an_ema() -> None:
    plain, plain_ema = train(Lit())
    lit = Lit()
    graphopt.attach(lit.model)
    attached, ema = train(lit)
    assert attached.logged == pytest.approx(plain.logged, rel=1e-4)
    for p, q in zip(plain_ema.parameters(), ema.parameters(), strict=True):
        torch.testing.assert_close(q, p, rtol=1e-4, atol=1e-5)
    x = batches(1)[0][0]
    torch.testing.assert_close(ema(x), plain_ema(x), rtol=1e-4, atol=1e-5)
    assert attached.state_dict().keys() == plain.state_dict().keys()


@pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None, reason="transformers' Trainer needs accelerate"
)
def test_hugging_faces_trainer(tmp_path: Path) -> None:
    import transformers

    def losses(attach: bool) -> list[float]:
        torch.manual_seed(0)
        config = transformers.GPT2Config(
            vocab_size=61, n_embd=16, n_layer=1, n_head=2, n_positions=16, resid_pdrop=0.0,
            embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2,
        )  # fmt: skip
        model: Any = transformers.GPT2LMHeadModel(config)
        rows = torch.randint(3, 61, (12, 9), generator=torch.Generator().manual_seed(2))
        data = [{"input_ids": r, "labels": r} for r in rows]
        settings = transformers.TrainingArguments(
            output_dir=str(tmp_path), max_steps=4, per_device_train_batch_size=3, logging_steps=1,
            save_strategy="no", report_to=[], use_cpu=True, seed=1,
        )  # fmt: skip
        model = graphopt.attach(model) if attach else model
        trainer = transformers.Trainer(model=model, args=settings, train_dataset=data)
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    assert losses(attach=True) == pytest.approx(losses(attach=False), rel=1e-3)
