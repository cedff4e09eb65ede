"""`verify` names the rewrite that is wrong, and says what it could not check."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

import graphopt
from graphopt.errors import VerifyError
from graphopt.graph.body import Body, copy_graph
from graphopt.graph.record import RewriteRecord, Site, site_of
from graphopt.verify import VerifyResult, verify_body

aten = torch.ops.aten
MakeBody = Callable[..., Body]


class Norms(nn.Module):
    """Two RMS norms, spelled out, around a linear layer."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Parameter(torch.rand(16, dtype=dtype) + 0.5)
        self.linear = nn.Linear(16, 16, dtype=dtype)
        self.second = nn.Parameter(torch.rand(16, dtype=dtype) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in (self.first, self.second):
            h = x.float()
            x = (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * weight
            x = self.linear(x)
        return x


def rms_records(body: Body, eps: tuple[float, float]) -> tuple[Body, list[RewriteRecord]]:
    """Replace both norms by `aten.rms_norm` with the given eps, leaving records."""
    work = body.copy()
    records = []
    roots = [n for n in work.graph.nodes if n.target is aten.mul.Tensor and "weight" not in n.name]
    roots = [n for n in roots if any(a.op == "get_attr" for a in n.all_input_nodes)]
    for root, e in zip(roots, eps, strict=True):
        weight = next(a for a in root.all_input_nodes if a.op == "get_attr")
        inside, todo = {root}, [a for a in root.all_input_nodes if a is not weight]
        x = None
        while todo:
            node = todo.pop()
            inside.add(node)
            for a in node.all_input_nodes:
                if a.op == "placeholder" or a.target is aten.linear.default:
                    x = a
                else:
                    todo.append(a)
        assert x is not None
        nodes = sorted(inside)
        reference, replacement = fx.Graph(), fx.Graph()
        env = {n: reference.placeholder(n.name) for n in (x, weight)}
        for n in nodes:
            env[n] = reference.node_copy(n, env.__getitem__)
        reference.output((env[root],))
        a, w = (replacement.placeholder(n.name) for n in (x, weight))
        replacement.output((replacement.call_function(aten.rms_norm.default, (a, [16], w, e)),))
        with work.graph.inserting_before(root):
            new = work.graph.call_function(aten.rms_norm.default, (x, [16], weight, e))
        new.meta = dict(root.meta)
        root.replace_all_uses_with(new)
        for n in reversed(nodes):
            work.graph.erase_node(n)
        records.append(
            RewriteRecord(
                len(records), "fusion", "rms_norm", "local", tuple(n.name for n in nodes),
                (x.name, weight.name), (root.name,), (new.name,), site_of(root), (), (),
                reference=reference, replacement=replacement,
            )
        )  # fmt: skip
    return work, records


def prove(make_body: MakeBody, *eps: float, dtype: torch.dtype = torch.float32) -> VerifyResult:
    body = make_body(Norms(dtype), torch.randn(64, 16, dtype=dtype))
    work, records = rms_records(body, (eps[0], eps[1]))
    return verify_body(body, work, records, [torch.randn(64, 16, dtype=dtype)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_right_rewrites_pass(make_body: MakeBody, dtype: torch.dtype) -> None:
    result = prove(make_body, 1e-5, 1e-5, dtype=dtype)
    assert result.passed, repr(result)
    assert result.check() is result
    assert [c.kind for c in result.all] == ["local", "local", "whole"]
    names = [t.name for t in result.checks[0].comparison.tensors]  # type: ignore[union-attr]
    assert names == ["output/0", "grad/x", "grad/first"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_wrong_eps_is_named_in_any_precision(make_body: MakeBody, dtype: torch.dtype) -> None:
    result = prove(make_body, 1e-5, 1e-4, dtype=dtype)
    assert [c.status for c in result.checks] == ["right", "wrong"]
    with pytest.raises(VerifyError, match=r"rewrite #1 rms_norm at the root module") as caught:
        result.check()
    text = str(caught.value)
    assert "test_verify.py:" in text
    assert "max_rewrites=1" in text
    assert "in float64" in text
    assert "WRONG" in repr(result)
    assert result.to_dict()["passed"] is False


def test_verify_leaves_model_gradients_and_generator(make_body: MakeBody) -> None:
    model = Norms()
    body = make_body(model, torch.randn(64, 16))
    work, records = rms_records(body, (1e-5, 1e-5))
    state = {k: v.clone() for k, v in model.state_dict().items()}
    rng = torch.get_rng_state()
    verify_body(body, work, records, [torch.ones(64, 16)])
    assert torch.equal(rng, torch.get_rng_state())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert torch.get_default_dtype() == torch.float32


def test_what_cannot_run_is_unchecked_and_not_passed(make_body: MakeBody) -> None:
    body = make_body(Norms(), torch.randn(64, 16))
    work, records = rms_records(body, (1e-5, 1e-5))
    records[0] = dataclasses.replace(records[0], replacement=None)
    records[1] = dataclasses.replace(records[1], inputs=("nowhere", "second"))
    result = verify_body(body, work, records, [torch.randn(64, 16)])
    assert [c.status for c in result.checks] == ["unchecked", "unchecked"]
    assert "not among the values" in result.checks[1].reason
    assert result.whole.passed
    assert not result.passed
    with pytest.raises(VerifyError, match="could not be checked"):
        result.check()


def test_a_failing_op_is_told_not_raised(make_body: MakeBody) -> None:
    body = make_body(Norms(), torch.randn(64, 16))
    work, records = rms_records(body, (1e-5, 1e-5))
    bad = fx.Graph()
    x, w = bad.placeholder("x"), bad.placeholder("w")
    bad.output((bad.call_function(aten.rms_norm.default, (x, [15], w, 1e-5)),))
    records[0] = dataclasses.replace(records[0], replacement=bad)
    result = verify_body(body, work, records, [torch.randn(64, 16)])
    assert result.checks[0].status == "unchecked"
    assert "RuntimeError" in result.checks[0].reason


class Dropped(nn.Module):
    """A dropout between two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.drop, self.b = nn.Linear(16, 16), nn.Dropout(0.1), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.drop(self.a(x)))


def whole_record(before: fx.Graph, after: fx.Graph) -> RewriteRecord:
    return RewriteRecord(
        0, "clean", "clean", "global", (), (), ("output",), ("output",), Site(), (), (),
        reference=before, replacement=copy_graph(after),
    )  # fmt: skip


@pytest.mark.parametrize(("p", "right"), [(0.1, True), (0.2, False)])
def test_a_changed_dropout_probability_is_wrong(make_body: MakeBody, p: float, right: bool) -> None:
    body = make_body(Dropped(), torch.randn(8, 16))
    work = body.copy()
    node = next(n for n in work.graph.nodes if n.target is aten.dropout.default)
    node.update_arg(1, p)
    record = whole_record(body.graph, work.graph)
    result = verify_body(body, work, [record], [torch.randn(8, 16)])
    assert result.passed is right, repr(result)
    assert "dropout p = 0" in result.notes[0]


def test_a_global_rewrite_that_changes_the_numbers_is_named(make_body: MakeBody) -> None:
    body = make_body(Dropped(), torch.randn(8, 16))
    work = body.copy()
    node = next(n for n in work.graph.nodes if n.target is aten.dropout.default)
    node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
    work.graph.erase_node(node)
    result = verify_body(body, work, [whole_record(body.graph, work.graph)], [torch.randn(8, 16)])
    assert "became []" in result.checks[0].reason


class Table(nn.Module):
    """A float table that depends on nothing, as rotary embeddings make it."""

    def forward(self, x: torch.Tensor) -> Any:
        return x * torch.cos(torch.arange(16, dtype=torch.float32) * 0.37)


def test_a_folded_constant_agrees_although_it_is_rounded(make_body: MakeBody) -> None:
    body = make_body(Table(), torch.randn(8, 16))
    work = body.copy()
    cos = next(n for n in work.graph.nodes if n.target is aten.cos.default)
    work.constants["c0"] = torch.cos(torch.arange(16, dtype=torch.float32) * 0.37)
    with work.graph.inserting_before(cos):
        new = work.graph.create_node("get_attr", "_graphopt_constants.c0")
    new.meta = dict(cos.meta)
    cos.replace_all_uses_with(new)
    work.graph.eliminate_dead_code()
    record = whole_record(body.graph, work.graph)
    assert verify_body(body, work, [record], [torch.randn(8, 16)]).passed
    work.constants["c0"][3] *= 1 + 1e-6
    assert not verify_body(body, work, [record], [torch.randn(8, 16)]).passed


class Repeated(nn.Module):
    """Heads repeated and cast, as grouped attention does under autocast."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, None].expand(8, 4, 64).to(torch.bfloat16)


def test_a_moved_cast_is_judged_in_its_own_precision(make_body: MakeBody) -> None:
    body = make_body(Repeated(), torch.randn(8, 64))
    graphs = []
    for early in (False, True):
        graph = fx.Graph()
        x = graph.placeholder("x")
        steps = [(aten.unsqueeze.default, (1,)), (aten.expand.default, ([8, 4, 64],))]
        steps.insert(0 if early else 2, (aten.to.dtype, (torch.bfloat16,)))
        h = x
        for target, args in steps:
            h = graph.call_function(target, (h, *args))
        graph.output((h,))
        graphs.append(graph)
    record = RewriteRecord(
        0, "fusion", "early_cast", "local", (), ("x",), ("to",), ("to",), Site(), (), (),
        reference=graphs[0], replacement=graphs[1],
    )  # fmt: skip
    result = verify_body(body, body, [record], [torch.randn(8, 64)])
    gradient = result.checks[0].comparison.tensors[1]  # type: ignore[union-attr]
    assert gradient.optimized > 100 * gradient.eager, "the sum is rounded to bfloat16"
    assert result.checks[0].passed, repr(result)


class ReadsContiguously(torch.autograd.Function):
    """y = 2 x, with a backward that reads its gradient as if it were contiguous."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        strides = torch.empty(g.shape).stride()
        return g.as_strided(g.shape, strides) * 2


def test_a_backward_that_needs_contiguous_gradients_is_wrong(make_body: MakeBody) -> None:
    body = make_body(Repeated(), torch.randn(8, 64))
    graphs = []
    for target, args in ((aten.mul.Tensor, (2,)), (ReadsContiguously.apply, ())):
        graph = fx.Graph()
        graph.output((graph.call_function(target, (graph.placeholder("x"), *args)),))
        graphs.append(graph)
    record = RewriteRecord(
        0, "fusion", "double", "local", (), ("x",), ("y",), ("y",), Site(), (), (),
        reference=graphs[0], replacement=graphs[1],
    )  # fmt: skip
    result = verify_body(body, body, [record], [torch.randn(8, 64)])
    assert result.checks[0].status == "wrong"
    assert "grad/x" in result.checks[0].reason


@pytest.mark.parametrize("fault", ["values", "gradients"])
def test_a_fault_of_the_whole_alone_is_placed(make_body: MakeBody, fault: str) -> None:
    body = make_body(Norms(), torch.randn(64, 16))
    work = body.copy()
    node = next(n for n in work.graph.nodes if n.target is aten.rsqrt.default)
    target, args = (aten.mul.Tensor, (1.01,)) if fault == "values" else (aten.detach.default, ())
    with work.graph.inserting_after(node):
        new = work.graph.call_function(target, (node, *args))
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    new.args = (node, *args)
    result = verify_body(body, work, [], [torch.randn(64, 16)])
    assert result.whole.status == "wrong"
    assert f"{fault} part" in result.whole.reason
    assert "test_verify.py:" in result.whole.reason


def test_verify_switches_an_ambient_autocast_off(make_body: MakeBody) -> None:
    body = make_body(Norms(), torch.randn(64, 16))
    work, records = rms_records(body, (1e-5, 1e-5))
    with torch.autocast("cpu", torch.bfloat16):
        result = verify_body(body, work, records, [torch.randn(64, 16)])
        assert torch.is_autocast_enabled("cpu")
    assert result.passed
    assert all(t.dtype == "float32" for t in result.whole.comparison.tensors)  # type: ignore[union-attr]


class Grouped(nn.Module):
    """Causal attention over keys and values that are repeated for the heads, q and k in float32."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out = nn.Linear(32, 64), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, _ = x.shape
        qkv = self.qkv(x)
        q, k, v = (t.view(b, s, -1, 8).transpose(1, 2) for t in qkv.split((32, 16, 16), -1))
        k, v = (t[:, :, None].expand(b, 2, 2, s, 8).reshape(b, 4, s, 8) for t in (k.float(), v))
        y = nn.functional.scaled_dot_product_attention(q.float(), k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, s, -1))


def test_a_rewrite_that_starts_inside_another_is_checked() -> None:
    model, x = Grouped(), torch.randn(2, 16, 32)
    with torch.autocast("cpu", torch.bfloat16):
        opt = graphopt.optimize(model, x)
        found = graphopt.verify(opt, x)
    made = {"cast_before_view", "grouped_attention"}
    assert made <= {record.rule for record in opt.rewrites}
    assert not found.unchecked, found


@pytest.mark.gpu
def test_verify_leaves_cudnn_attention_as_it_was() -> None:
    model, x = Grouped().cuda(), torch.randn(2, 16, 32, device="cuda")

    def gradients() -> list[torch.Tensor]:
        with torch.autocast("cuda", torch.bfloat16):
            loss = opt(x).float().square().mean()
        return list(torch.autograd.grad(loss, list(model.parameters())))

    with torch.autocast("cuda", torch.bfloat16):
        opt = graphopt.optimize(model, x)
        assert graphopt.verify(opt, x).passed
    after = gradients()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        exact = gradients()
    for a, b in zip(after, exact, strict=True):
        assert (a - b).norm() <= 0.05 * b.norm()


def test_a_rewrite_behind_a_copy_that_a_view_needed_is_checked() -> None:
    class Heads(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = x.view(3, 6, 2, 8).transpose(1, 2)
            h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
            # the norm's kernel writes rows: this view is given a copy, which no record tells of
            return h.transpose(1, 2).view(3, 6, 16).to(torch.bfloat16)

    opt = graphopt.optimize(Heads(), torch.randn(3, 6, 16))
    assert "cast_before_view" in [record.rule for record in opt.rewrites]
    assert not graphopt.verify(opt, torch.randn(3, 6, 16)).unchecked


class Zeros(nn.Module):
    """Every gradient is zero in truth: a norm takes away the one direction that the sum has."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.layer_norm(self.linear(x).sin(), (8,)).sum(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_gradients_that_are_zero_in_truth_are_told_from_wrong_ones(dtype: torch.dtype) -> None:
    x = torch.randn(64, 8, dtype=dtype)
    opt = graphopt.optimize(Zeros(dtype), x)
    result = graphopt.verify(opt, x)
    assert result.passed, result
    assert any("nothing but rounding" in note for note in result.notes)


def test_what_should_be_zero_and_is_not_is_wrong(make_body: MakeBody) -> None:
    body = make_body(Zeros(torch.float32), torch.randn(64, 8))
    work = body.copy()
    total = next(n for n in work.graph.nodes if n.target is aten.sum.dim_IntList)
    with work.graph.inserting_before(total):
        (norm,) = total.all_input_nodes
        new = work.graph.call_function(aten.mul.Tensor, (norm, norm))
        new = work.graph.call_function(aten.mul.Tensor, (new, 1e-9))
        new = work.graph.call_function(aten.add.Tensor, (norm, new))
    total.replace_input_with(norm, new)
    result = verify_body(body, work, [], [torch.randn(64, 8)])
    assert "in float64" in result.whole.reason
    assert not any("grad/linear.weight" in note for note in result.notes)


def test_float64_needs_only_agree() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)).double()
    x = torch.randn(512, 8, dtype=torch.float64)
    opt = graphopt.optimize(nn.Sequential(model), x)
    result = graphopt.verify(opt, x)
    assert result.passed, result
    assert result.whole.comparison is not None
    assert result.whole.comparison.geometric_mean == 1.0


def test_results_made_of_constants_alone() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            table = torch.arange(16, dtype=torch.float32) * 0.37
            return x.relu(), table.cos(), table.sin().bfloat16(), torch.ones(3) * 0.1

    x = torch.randn(4, 16)
    assert graphopt.verify(graphopt.optimize(Model(), x), x).passed


def test_progress_counts_the_rewrites(make_body: MakeBody) -> None:
    body = make_body(Norms(), torch.randn(8, 16))
    work, records = rms_records(body, (1e-5, 1e-5))
    said: list[str] = []
    verify_body(body, work, records, [torch.randn(8, 16)], say=said.append)
    assert said == ["0 of 2 rewrites", "1 of 2 rewrites", "2 of 2 rewrites", "the whole step"]


def test_what_is_zero_whatever_the_inputs_are_depends_on_the_upstream_gradients() -> None:
    class Equal(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            row = x[:, :1].expand(x.shape)
            e = torch.exp(row - row.max(1, keepdim=True).values)
            return e / e.sum(1, keepdim=True)

    x = torch.randn(3, 6, 16)
    result = graphopt.verify(graphopt.optimize(Equal(), x), x)
    assert result.passed, result
