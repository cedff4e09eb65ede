"""An ambient autocast written into the graph gives what eager gives under autocast."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import graphopt
from graphopt.graph.body import Body
from graphopt.graph.edit import Editor
from graphopt.graph.ops import is_mutating
from graphopt.numerics import compare
from graphopt.passes import Log
from graphopt.passes.autocast import MaterializeAutocast, materialize_autocast, open_composite
from graphopt.passes.observe import casting, observe
from graphopt.step import step

BF16 = torch.bfloat16
aten = torch.ops.aten
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def body_of(model: nn.Module, x: torch.Tensor, dtype: torch.dtype | None = BF16) -> Body:
    """Captured under autocast, unless `dtype` is None."""
    with casting(x.device.type, dtype):
        exported = torch.export.export(model, (x,), strict=False)
    graph = exported.module(check_guards=False).graph
    for node in list(graph.nodes):
        if node.op == "call_module" or "_assert_tensor_metadata" in str(node.target):
            graph.erase_node(node)
    output = next(iter(reversed(graph.nodes)))
    return Body(graph, model, len(output.args[0]), device=x.device)


class Call(nn.Module):
    """A function of the input and of a float32 weight, as a module."""

    def __init__(self, call: Callable[..., Any], device: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.rand(8, 8) + 0.5).to(device)
        self.weight = nn.Parameter(self.weight.detach())
        self.call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low = F.linear(x, self.weight)  # bf16 under autocast
        return self.call(x.abs() + 0.1, self.weight, low.abs() + low.new_full((), 0.5))


CALLS: dict[str, Callable[..., torch.Tensor]] = {
    "linear": lambda x, w, h: F.linear(x, w),
    "matmul": lambda x, w, h: x @ w,
    "mm_mixed": lambda x, w, h: torch.mm(h, w),
    "addmm": lambda x, w, h: torch.addmm(x, h, w),
    "bmm": lambda x, w, h: torch.bmm(x[None], w[None]),
    "baddbmm": lambda x, w, h: torch.baddbmm(h[None], x[None], w[None]),
    "conv": lambda x, w, h: F.conv1d(x[None], w[..., None]),
    "attention": lambda x, w, h: F.scaled_dot_product_attention(x[None], h[None], w[None]),
    "einsum": lambda x, w, h: torch.einsum("ij,jk->ik", x, w),
    "einsum_mixed": lambda x, w, h: torch.einsum("ij,jk,kl->il", h, w, x),
    "prelu": lambda x, w, h: F.prelu(h, w[0, 0]),
    "exp": lambda x, w, h: torch.exp(h),
    "log": lambda x, w, h: torch.log(h),
    "pow": lambda x, w, h: h**2,
    "rsqrt": lambda x, w, h: torch.rsqrt(h),
    "softplus": lambda x, w, h: F.softplus(h),
    "softmax": lambda x, w, h: torch.softmax(h, -1),
    "log_softmax": lambda x, w, h: torch.log_softmax(h, -1),
    "softmax_dtype": lambda x, w, h: torch.softmax(h, -1, dtype=torch.float32).to(h.dtype),
    "layer_norm": lambda x, w, h: F.layer_norm(h, (8,), w[0], w[1]),
    "group_norm": lambda x, w, h: F.group_norm(h, 2, w[0], w[1]),
    "rms_norm": lambda x, w, h: F.rms_norm(h, (8,), w[0], 1e-6),
    "batch_norm": lambda x, w, h: F.batch_norm(h, w[0].detach(), w[1].detach()),
    "cross_entropy": lambda x, w, h: F.cross_entropy(h, torch.arange(8, device=h.device)),
    "smoothed": lambda x, w, h: F.cross_entropy(
        h, torch.arange(8, device=h.device), label_smoothing=0.1
    ),
    "nll_loss": lambda x, w, h: F.nll_loss(h, torch.arange(8, device=h.device)),
    "mse_loss": lambda x, w, h: F.mse_loss(h, x),
    "bce_logits": lambda x, w, h: F.binary_cross_entropy_with_logits(h, x.sigmoid()),
    "cumsum": lambda x, w, h: torch.cumsum(h, 0),
    "sum": lambda x, w, h: h.sum(-1),
    "prod": lambda x, w, h: (h * 0.5).prod(-1),
    "norm": lambda x, w, h: h.norm(),
    "vector_norm": lambda x, w, h: torch.linalg.vector_norm(h, dim=-1),
    "logsumexp": lambda x, w, h: torch.logsumexp(h, -1),
    "mean": lambda x, w, h: h.mean(-1),
    "cat": lambda x, w, h: torch.cat([x, h]),
    "stack": lambda x, w, h: torch.stack([h, x]),
    "addcmul": lambda x, w, h: torch.addcmul(h, x, h),
    "add": lambda x, w, h: x + h,
    "where": lambda x, w, h: torch.where(x > 1, x, h),
    "gelu": lambda x, w, h: F.gelu(h),
    "interpolate": lambda x, w, h: F.interpolate(h[None, None], scale_factor=2, mode="bilinear"),
    "avg_pool": lambda x, w, h: F.avg_pool2d(h[None, None], 2),
    "cosine": lambda x, w, h: F.cosine_similarity(h, x),
    "cdist": lambda x, w, h: torch.cdist(h, x),
    "embedding": lambda x, w, h: F.embedding(torch.arange(8, device=h.device), w) + h,
    "user_cast": lambda x, w, h: (h.float() * x).to(torch.bfloat16) + h,
}

CLOSER = {("cross_entropy", "cuda"), ("smoothed", "cuda")}
"""CUDA rounds the log-probabilities of low-precision logits; an op that stays whole does not."""


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CALLS)
def test_values_and_gradients_are_those_under_autocast(name: str, device: str) -> None:
    model = Call(CALLS[name], device)
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(1)).to(device)
    try:
        body = body_of(model, x)
    except RuntimeError as error:
        pytest.skip(f"eager refuses it: {str(error).splitlines()[0]}")
    work = materialize_autocast(body, device, BF16)
    eager = step(body.graph, body.attribute, [x], ["x"], autocast={device: BF16})
    written = step(work.graph, work.attribute, [x], ["x"], like=eager)
    exact = step(body.graph, body.attribute, [x], ["x"], like=eager, double=True)
    result = eager.tensors["output/0"]
    assert result is not None
    if (name, device) not in CLOSER:
        assert torch.equal(result, written.tensors["output/0"]), "forward differs in some bit"
    assert work.output.args[0][0].meta["val"].dtype == result.dtype
    found = compare(eager.tensors, written.tensors, exact.tensors, mean_counts=False)
    assert found.passed, repr(found)


@pytest.mark.parametrize("name", ["cross_entropy", "smoothed", "einsum"])
def test_a_composite_can_be_opened(name: str) -> None:
    x = torch.randn(8, 8)
    body = body_of(Call(CALLS[name], "cpu"), x)
    node = list(body.graph.nodes)[-2]
    made, result = open_composite(node, Editor(body.graph, "test"), "cpu", BF16)
    expected = step(body.graph, body.attribute, [x], ["x"], autocast={"cpu": BF16})
    node.replace_all_uses_with(result)
    body.graph.erase_node(node)
    assert len(made) > 1
    assert not any(is_mutating(n) for n in body.graph.nodes)
    found = step(body.graph, body.attribute, [x], ["x"], autocast={"cpu": BF16})
    torch.testing.assert_close(found.tensors, expected.tensors, rtol=2e-2, atol=2e-2)


class Shared(nn.Module):
    """One weight read twice, a region with autocast off, and one with another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(self.a(x)))


def casts(body: Body) -> list[str]:
    return [n.args[0].name for n in body.graph.nodes if n.target is aten.to.dtype]


def test_a_value_is_cast_once() -> None:
    work = materialize_autocast(body_of(Shared(), torch.randn(4, 8)), "cpu", BF16)
    assert sorted(casts(work)) == ["a_bias", "a_weight", "b_bias", "b_weight", "x"]


def test_marks_of_inner_regions_are_kept() -> None:
    body = body_of(Shared(), torch.randn(4, 8), None)
    first, second, _third = (n for n in body.graph.nodes if n.target is aten.linear.default)
    first.meta["graphopt_precision_fixed"] = True
    second.meta["graphopt_autocast"] = torch.float16
    work = materialize_autocast(body, "cpu", BF16)
    linears = [n for n in work.graph.nodes if n.target is aten.linear.default]
    assert [n.meta["val"].dtype for n in linears] == [torch.float32, torch.float16, BF16]
    assert "a_weight" not in [a.name for a in linears[2].all_input_nodes]


def test_metadata_is_corrected_where_capture_saw_no_autocast() -> None:
    model, x = Shared(), torch.randn(4, 8)
    work = materialize_autocast(body_of(model, x, None), "cpu", BF16)
    assert work.output.args[0][0].meta["val"].dtype == BF16
    with torch.autocast("cpu", BF16):
        expected = model(x)
    found = step(work.graph, work.attribute, [x], ["x"]).tensors["output/0"]
    assert torch.equal(found, expected)


def test_the_pass_records_itself_and_empties_the_ambient() -> None:
    body = body_of(Shared(), torch.randn(4, 8))
    body.autocast = {"cpu": BF16}
    log = Log(max_rewrites=0)
    MaterializeAutocast().run(body, log)
    assert body.autocast == {}
    assert [(r.rule, r.kind) for r in log.rewrites] == [("materialize_autocast", "global")]
    MaterializeAutocast().run(body, log)
    assert len(log.rewrites) == 1


def test_a_region_inside_the_model_counts_without_one_around_it():
    class Inside(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(8, 8)

        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                h = self.linear(x)
            return h, self.linear(x)

    model, x = Inside(), torch.randn(3, 8)
    opt = graphopt.optimize(model, x)
    for a, b in zip(model(x), opt(x), strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b)


def _flattened(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    """What autocast does to cuDNN's recurrent layers: one buffer for all weights, in float16."""
    flat = x.new_zeros(sum(w.numel() for w in weights), dtype=torch.float16)
    parts = flat.split([w.numel() for w in weights])
    for part, weight in zip(parts, weights, strict=True):
        part.unsqueeze(1).copy_(weight.view(-1, 1))
    with casting("cpu", None):
        return torch.ops.autocast_tests.layer(x.to(torch.float16), list(parts))


@pytest.fixture
def layer() -> Iterator[Any]:
    """An operator that autocast treats as cuDNN's recurrent layers, while the test runs."""
    with torch.library._scoped_library("autocast_tests", "FRAGMENT") as library:
        library.define("layer(Tensor x, Tensor[] weights) -> Tensor")
        library.impl("layer", lambda x, weights: torch.empty_like(x), "CompositeExplicitAutograd")
        library.impl("layer", _flattened, "AutocastCPU")
        yield torch.ops.autocast_tests.layer.default


def test_weights_that_autocast_copies_into_a_buffer_are_cast(layer: Any) -> None:
    args = (torch.ones(2, 3), [torch.ones(4, 3), torch.ones(4)])
    seen = observe(layer, args, {}, "cpu", BF16)
    assert seen.casts == dict.fromkeys(range(3), torch.float16)
    assert seen.proved
    assert not seen.inside


@pytest.mark.gpu
@pytest.mark.parametrize("make", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("bias", [True, False])
def test_cudnn_s_layers_are_cast_as_under_autocast(
    make: type[nn.RNNBase], bias: bool, recwarn: pytest.WarningsRecorder
) -> None:
    torch.manual_seed(0)
    model = make(64, 64, 2, batch_first=True, bidirectional=True, bias=bias).cuda()
    x = torch.randn(4, 7, 64, device="cuda")
    found = []
    for run in (model, graphopt.optimize(model, x, precision="bf16")):
        model.zero_grad()
        with torch.autocast("cuda", BF16, enabled=run is model):
            y = run(x)[0]
        assert y.dtype == torch.float16  # whatever dtype is asked for
        y.float().square().sum().backward()
        found.append([y, *(p.grad for p in model.parameters())])
    torch.testing.assert_close(*found, atol=1e-2, rtol=1e-2)
    if bias:  # copies without biases leave no room for them, as cuDNN wants it: it gathers them
        assert not [w for w in recwarn if "contiguous chunk of memory" in str(w.message)]
