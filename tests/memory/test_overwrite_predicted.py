"""What writing gradients over operands takes: by the oracle, by the replay, in a real step."""

from __future__ import annotations

import dataclasses
import gc

import pytest
import torch
import torch.nn.functional as F
from gated_models import KINDS, Gated, dropped_pair, grads
from remat_models import Case, droppable, dropped, dropping, everything, same
from torch import nn

from graphopt.bench.trace import peak_allocated, record
from graphopt.memory.facts import measure
from graphopt.memory.oracle import predict
from graphopt.memory.problem import Problem
from graphopt.memory.simulate import Timeline, Value, simulate


@pytest.mark.parametrize("kind", KINDS)
def test_the_replay_knows(kind) -> None:
    """On a GPU's count, where no reference takes memory inside, the replay is exact."""
    plain, _ = dropped_pair(kind)
    grads(plain)
    body = plain.body
    options = {"device": "cuda", "loss_fn": lambda y: y.square().sum()}
    facts = measure(body, **options)
    assert facts.peak_bytes == predict(body, **options).peak_bytes
    problem = Problem.of(body, facts)
    place = {v.name: i for i, v in enumerate(problem.timeline.values)}
    every = frozenset(place[n] for n in droppable(body))
    found = predict(dropped(body.copy(), droppable(body)), **options)
    # cuBLASLt's workspace, taken where backward's thread adds its first bias, no value brings
    assert found.peak_bytes - simulate(problem.timeline, every).peak in (0, 2**20)
    spared = [v for v in problem.timeline.values if v.spare]
    assert len(spared) == plain.operands
    assert all(v.spare == v.bytes for v in spared)


def test_a_step_is_lower_where_the_gradient_is_written_over() -> None:
    values = (Value("a", 8, 8, 0, 1, 3, (3,), spare=6),)
    line = Timeline((0, 8, 8, 8), (8, 12, 12, 16), values)
    assert simulate(line, (), levels=True).levels == (8, 12, 12, 16)
    assert simulate(line, {0}, levels=True).levels == (8, 12, 4, 10)
    other = Value("b", 1, 1, 0, 1, 3, (2,))
    line = dataclasses.replace(line, values=(*values, other))
    assert simulate(line, {1}, levels=True).levels == (8, 12, 12, 9)
    other = dataclasses.replace(other, unpacks=(3,), reads=(0,))
    line = dataclasses.replace(line, values=(*values, other))
    assert simulate(line, {1}, levels=True).levels == (8, 12, 11, 16)  # held for b


class Wide(nn.Module):
    """The highest steps are those of the unit and of the product behind it, as in a llama."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32, bias=False), nn.Parameter(torch.ones(8, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, value = self.up(x).chunk(2, -1)
        y = F.silu(gate) * value
        return torch.ops.graphopt.linear_wide(y, self.down * 2, None, [self.down])


@pytest.mark.parametrize("some", [["linear"], ["glu_packed_default"], []])
def test_the_replay_knows_what_is_let_go_of_on_the_way(some) -> None:
    given = Case.of(Wide(), (torch.randn(999, 8),))
    names = [n for n in given.names if n in some or not some]
    assert names
    options = {"device": "cuda", "loss_fn": lambda y: y.square().sum()}
    timeline = Problem.of(given.body, measure(given.body, **options)).timeline
    place = {v.name: i for i, v in enumerate(timeline.values)}
    found = predict(dropped(given.body.copy(), names), **options)
    assert simulate(timeline, [place[n] for n in names]).peak == found.peak_bytes


@pytest.mark.parametrize("kind", KINDS)
def test_a_real_step_on_the_cpu_takes_what_is_predicted_to_the_byte(kind, written) -> None:
    opt = dropping(Gated(kind, 32))
    values = torch.randn(64, 32)

    def run() -> None:
        opt(values).square().sum().backward()

    for _ in range(2):
        run()
        opt.zero_grad()
    written.clear()
    measured = peak_allocated(record(run, cuda=False, memory=True))
    assert len(written) == 2
    state = sum(t.nbytes for t in (*opt.parameters(), values))
    said = predict(opt.body, loss_fn=lambda y: y.square().sum())
    assert said.peak_bytes == state + measured


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_a_real_step_on_a_gpu_takes_what_is_predicted(kind, written) -> None:
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    stray = torch.cuda.memory_allocated()  # of tests before
    torch.manual_seed(0)
    model = Gated(kind, 1024).cuda()
    values = torch.randn(16384, 1024, device="cuda")
    found = []
    for choose in (lambda names: [], lambda names: [n for n in names if "linear" in n], everything):
        opt = dropping(model, choose, precision="bf16")
        for _ in range(3):
            model.zero_grad()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            opt(values).square().sum().backward()
            peak = torch.cuda.max_memory_allocated() - stray
        found.append([p.grad.cpu() for p in model.parameters() if p.grad is not None])
        said = predict(opt.body, loss_fn=lambda y: y.square().sum()).peak_bytes
        assert abs(said / peak - 1) < 0.01
        fused = any(name in opt.code for name in ("graphopt.glu", "graphopt.bias_act"))
        del opt
    assert bool(written) == fused
    assert same(found[1], found[0])
    assert same(found[2], found[0])
