"""Models for the wrong uses: some are wrong themselves, some are called wrongly."""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import graphopt

X = torch.linspace(-1, 1, 32).reshape(4, 8)
"""Input that every model here takes."""


def block() -> nn.Module:
    """A good model."""
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU())


def optimized() -> Any:
    return graphopt.optimize(block(), X)


def lazily_optimized() -> Any:
    return graphopt.optimize(block())


def attached() -> nn.Module:
    return graphopt.attach(block(), X)


def wrapped_after_attach() -> nn.Module:
    model = attached()
    inner = model.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        return inner(x)

    forward.__wrapped__ = inner  # type: ignore[attr-defined]
    model.forward = forward
    return model


def compiled_in_place() -> nn.Module:
    model = block()
    model.compile()
    return model


def on_meta() -> nn.Module:
    return block().to("meta")


def meta_buffer() -> nn.Module:
    model = block()
    model.register_buffer("mask", torch.empty(8, device="meta"))
    return model


def quantized() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(block(), {nn.Linear})


def scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(nn.Linear(8, 8))


def scripted_inside() -> nn.Module:
    return nn.Sequential(scripted(), nn.ReLU())


def traced() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.trace(nn.Linear(8, 8), X)


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    """A process group of one process, which the parallel wrappers ask for."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def replicated() -> nn.Module:
    with process_group():
        return nn.parallel.DistributedDataParallel(nn.Linear(8, 8))


def sharded() -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    with process_group(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return FullyShardedDataParallel(nn.Linear(8, 8), device_id=torch.device("cpu"))


def sharded_in_place() -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with process_group():
        return fully_shard(nn.Linear(8, 8), mesh=init_device_mesh("cpu", (1,)))


def endless() -> list[Any]:
    found: list[Any] = [X]
    found.append(found)
    return found


class SparseBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mix", torch.eye(4).to_sparse())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix @ x


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(4, 3)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return self.rows(index)


class SumOf(nn.Linear):
    """Takes anything that yields tensors."""

    def __init__(self) -> None:
        super().__init__(8, 8)

    def forward(self, parts: Any) -> torch.Tensor:
        return sum(super(SumOf, self).forward(p) for p in parts)


class _Linear(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 8)


class Refuses(_Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("the model's own complaint")


class LooksUp(_Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * {"scale": 2}["scael"]


class MissesAttribute(_Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.no_such_layer(x)


class Recurses(_Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward(x)


class Yields(_Linear):
    def forward(self, x: torch.Tensor) -> Any:
        for _ in range(2):
            yield super().forward(x)


class Waits(_Linear):
    async def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
        return super().forward(x)


class WritesToInput(_Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.add_(1))


class Allocates(_Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + torch.empty(2**60)[0]


class Branches(_Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if y.sum() > 0:
            return y
        return -y


class Draws(_Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * random.random()


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 3


class OwnFunction(_Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Twice.apply(super().forward(x))


def hooked() -> nn.Module:
    model = block()
    model[1].register_forward_hook(lambda module, args, result: result)
    return model


class Uncopied(_Linear):
    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("cannot pickle 'socket' object")
