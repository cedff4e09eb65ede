"""Models, and steps of them with some values dropped, for the tests of rematerialization."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from graphopt.api import PassCompiler
from graphopt.capture.entry import Compiled
from graphopt.emit import Program
from graphopt.graph.body import Body
from graphopt.module import GraphoptModule, Settings
from graphopt.passes.base import Log
from graphopt.passes.remat import Rematerialize, reasons


class Block(nn.Module):
    def __init__(self, width: int, heads: int, p: float) -> None:
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(p)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        qkv = self.qkv(self.ln1(x)).view(b, t, 3, self.heads, d // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.proj(y.transpose(1, 2).reshape(b, t, d)))
        return x + self.drop(self.down(F.gelu(self.up(self.ln2(x)))))


class Feedforward(nn.Module):
    """A norm and two products around a skip."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class GPT(nn.Module):
    def __init__(self, layers: int = 2, width: int = 16, p: float = 0.1) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, width)
        self.blocks = nn.ModuleList([Block(width, 2, p) for _ in range(layers)])
        self.ln, self.head = nn.LayerNorm(width), nn.Linear(width, 31)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln(x))


class ConvNet(nn.Module):
    """Batch norm, a skip connection, concatenation, pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.bn1, self.bn2 = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        self.out = nn.Linear(8 * 16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = F.relu(self.bn1(self.one(x)))
        b = F.silu(self.bn2(self.two(a)) + a)
        joined = F.max_pool2d(torch.cat([a, b], 1), 2)
        return self.out(joined.flatten(1))


class Chunks(nn.Module):
    """Views of one value used far apart, a tuple, integers, and a copy made by reshape."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, value = self.up(x).chunk(2, -1)
        y = self.down(torch.sigmoid(gate) * value)
        best, where = torch.max(y, -1, keepdim=True)
        y = y.transpose(0, 1).reshape(-1, 6) * torch.exp(value.transpose(0, 1).reshape(-1, 6))
        return y + best.transpose(0, 1).reshape(-1, 1) * (where.sum() + 1)


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 16),
        nn.GELU(),
        nn.LayerNorm(16),
        nn.Linear(16, 16),
        nn.Tanh(),
        nn.Linear(16, 3),
    )


def llama() -> nn.Module:
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=31,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def tokens() -> torch.Tensor:
    return torch.randint(0, 31, (2, 8))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "mlp": (mlp, lambda: torch.randn(4, 6, requires_grad=True)),
    "gpt": (GPT, tokens),
    "conv": (ConvNet, lambda: torch.randn(2, 3, 8, 8, requires_grad=True)),
    "chunks": (Chunks, lambda: torch.randn(3, 4, 6, requires_grad=True)),
    "llama": (llama, tokens),
}


@dataclasses.dataclass(frozen=True)
class Dropping:
    """A compiler of bodies that drops what `choose` picks; remembers nothing, so it pickles."""

    choose: Callable[[list[str]], Collection[str]]

    def __call__(self, body: Body) -> Compiled:
        compiled = PassCompiler()(body)
        if body.grad:
            dropped(compiled.body, self.choose(droppable(compiled.body)), compiled.result.rewrites)
        return compiled


def everything(names: list[str]) -> list[str]:
    return names


def droppable(body: Body) -> list[str]:
    return [value.name for value, reason in reasons(body).items() if reason is None]


def dropped(
    body: Body,
    names: Collection[str],
    rewrites: list[Any] | None = None,
    offload: Collection[str] = (),
) -> Body:
    log = Log(rewrites=[] if rewrites is None else rewrites)
    Rematerialize(frozenset(names), frozenset(offload)).run(body, log)
    return body


def dropping(
    model: nn.Module,
    choose: Callable[[list[str]], Collection[str]] = everything,
    precision: str | None = None,
    **settings: Any,
) -> GraphoptModule:
    """An optimized module that drops the chosen values."""
    return GraphoptModule(model, Settings(precision=precision, **settings), Dropping(choose))


class Case:
    """A model captured once, whose body is run with different values dropped."""

    def __init__(self, name: str, precision: str | None = None) -> None:
        torch.manual_seed(0)
        make, inputs = MODELS[name]
        self._capture(make(), (inputs(),), precision)

    @classmethod
    def of(cls, model: nn.Module, inputs: tuple[Any, ...], precision: str | None = None) -> Case:
        self = cls.__new__(cls)
        self._capture(model, inputs, precision)
        return self

    def _capture(self, model: nn.Module, inputs: tuple[Any, ...], precision: str | None) -> None:
        self.model, self.inputs, self.x = model, inputs, inputs[0]
        opt = dropping(model, lambda names: [], precision)
        self.entry = opt.capture(inputs)
        self.body = self.entry.compiled.body
        self.names = droppable(self.body)
        self.plain = self.step([])

    def program(self, names: Collection[str], offload: Collection[str] = ()) -> Program:
        return Program(dropped(self.body.copy(), names, offload=offload), "test")

    def step(self, names: Collection[str], offload: Collection[str] = ()) -> list[torch.Tensor]:
        """Outputs, what mutations write, and every gradient, with some values dropped."""
        program = self.program(names, offload)
        torch.manual_seed(1)
        values = program(*self.inputs)
        roots = [y for y in values if y.requires_grad]
        sent = [torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.dtype) for y in roots]
        wanted = [t for t in (*self.inputs, *self.model.parameters()) if t.requires_grad]
        grads = torch.autograd.grad(roots, wanted, sent, allow_unused=True)
        return [*(v.detach() for v in values), *(g for g in grads if g is not None)]


@functools.cache
def case(name: str, precision: str | None = None) -> Case:
    return Case(name, precision)


def same(a: Collection[torch.Tensor], b: Collection[torch.Tensor]) -> bool:
    return all(torch.equal(s, t) for s, t in zip(a, b, strict=True))


def twins(
    make: Callable[[], nn.Module], choose: Callable[[list[str]], Collection[str]] = everything
) -> tuple[GraphoptModule, GraphoptModule]:
    """Two optimized modules with equal weights: one that drops nothing, and one that does."""
    torch.manual_seed(0)
    model = make()
    return dropping(copy.deepcopy(model), lambda names: []), dropping(model, choose)
