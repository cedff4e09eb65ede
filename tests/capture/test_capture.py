"""The body that capture makes, and that making it changes nothing."""

from __future__ import annotations

import gc
import random
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from graphopt.capture import capture
from graphopt.module import GraphoptModule


def targets(graph: fx.Graph) -> list[str]:
    return [str(n.target) for n in graph.nodes if n.op == "call_function"]


def nodes(graph: fx.Graph, op: str) -> list[fx.Node]:
    return [n for n in graph.nodes if str(n.target) == op]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(self.bn(self.conv(x)).relu_())


def test_one_tensor_in_two_arguments_gives_two_inputs():
    class Loss(nn.Module):
        def forward(self, x, labels):
            return (x - 2 * labels).sum()

    x, other = torch.randn(4), torch.randn(4)
    opt = GraphoptModule(Loss())
    opt(x, x)
    torch.testing.assert_close(opt(x, other), (x - 2 * other).sum())
    torch.testing.assert_close(opt(other, other), -other.sum())
    assert len(opt._store.entries()) == 2  # which arguments are one object is a part of the key


def test_state_is_read_by_its_own_path():
    body = capture(Net(), (torch.randn(2, 3, 6, 6),)).body
    paths = {str(n.target) for n in body.graph.nodes if n.op == "get_attr"}
    assert {"conv.weight", "bn.running_mean", "bn.num_batches_tracked"} <= paths


def test_composite_operations_stay_whole():
    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(8)

        def forward(self, q, y):
            h = F.dropout(self.norm(q), 0.1, self.training)
            h = F.scaled_dot_product_attention(h, h, h)
            return F.cross_entropy(h.flatten(0, 1), y)

    c = capture(Whole(), (torch.randn(2, 3, 8), torch.zeros(6, dtype=torch.long)))
    names = [t.removeprefix("aten.").partition(".")[0] for t in targets(c.body.graph)]
    for name in ("layer_norm", "dropout", "scaled_dot_product_attention", "cross_entropy_loss"):
        assert name in names


def test_every_operation_has_value_and_provenance():
    for node in capture(Net(), (torch.randn(2, 3, 6, 6),)).body.graph.nodes:
        if node.op == "call_function":
            assert "val" in node.meta, node
            assert node.meta.get("nn_module_stack"), node
            assert "test_capture.py" in node.meta["stack_trace"], node


def test_nothing_in_place_and_no_region_is_left():
    body = capture(Net(), (torch.randn(2, 3, 6, 6),)).body
    for node in body.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload):
            assert not node.target._schema.is_mutable, node
        assert not isinstance(node.target, torch._ops.HigherOrderOperator), node
        assert "assert" not in str(node.target), node


def test_inner_regions_are_marked():
    class Regions(nn.Module):
        def forward(self, x):
            with torch.autocast("cpu", enabled=False):
                a = x.float().sin()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                b = x @ x
            with torch.no_grad():
                c = x.cos()
            return a + b + c

    graph = capture(Regions(), (torch.randn(3, 3, requires_grad=True),)).body.graph
    assert nodes(graph, "aten.sin.default")[0].meta["graphopt_precision_fixed"] is True
    assert nodes(graph, "aten.matmul.default")[0].meta["graphopt_autocast"] is torch.bfloat16
    cos = nodes(graph, "aten.cos.default")[0]
    assert cos.meta["graphopt_no_grad"] is True
    assert str(cos.args[0].target) == "aten.detach.default"


def test_no_grad_region_stops_gradients(twin):
    class Cut(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.rand(3))

        def forward(self, x):
            with torch.no_grad():
                scale = (x * self.w).abs().amax()
                with torch.enable_grad():
                    inner = self.w * 3
            return x * self.w / scale + inner

    twin(Cut(), torch.randn(2, 3))


def test_a_constant_is_lifted_out_of_the_state_dict(twin):
    class Constant(nn.Module):
        def forward(self, x):
            return x * torch.tensor([1.0, 2.0, 3.0])

    opt = twin(Constant(), torch.randn(2, 3))
    assert list(opt.state_dict()) == []
    assert opt.body.constants


def test_a_tensor_attribute_is_read_live():
    class Attribute(nn.Module):
        def __init__(self):
            super().__init__()
            self.shift = torch.ones(3)

        def forward(self, x):
            return x + self.shift

    opt = GraphoptModule(Attribute())
    x = torch.zeros(3)
    opt(x)
    opt.source.shift = torch.full((3,), 5.0)
    assert opt(x).tolist() == [5.0, 5.0, 5.0]


def test_capture_changes_nothing():
    model = Net()
    x = torch.randn(2, 3, 6, 6, requires_grad=True)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    flags = [m.training for m in model.modules()]
    attributes = {k: list(m.__dict__) for k, m in model.named_modules()}
    torch.manual_seed(3)
    random.seed(3)
    generator, python = torch.get_rng_state(), random.getstate()
    value = x.detach().clone()
    capture(model, (x,))
    assert torch.equal(generator, torch.get_rng_state())
    assert python == random.getstate()
    assert flags == [m.training for m in model.modules()]
    assert attributes == {k: list(m.__dict__) for k, m in model.named_modules()}
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert all(p.grad is None and type(p) is nn.Parameter for p in model.parameters())
    assert x.grad is None
    assert torch.equal(x, value)


def test_capture_runs_no_kernel_on_an_input_that_it_mutates():
    class Writes(nn.Module):
        def forward(self, x):
            return x.mul_(2)

    x = torch.ones(3)
    capture(Writes(), (x,))
    assert x.tolist() == [1, 1, 1]


def test_example_inputs_are_not_kept_alive():
    x = torch.randn(2, 3, 6, 6)
    seen = weakref.ref(x)
    opt = GraphoptModule(Net())
    opt.capture((x,))
    del x
    gc.collect()
    assert seen() is None


def test_the_module_is_not_kept_alive():
    opt = GraphoptModule(Net())
    opt(torch.randn(2, 3, 6, 6))
    seen = [weakref.ref(opt), weakref.ref(opt.source)]
    del opt
    gc.collect()
    assert [s() for s in seen] == [None, None]


def test_another_thread_meets_no_fake_tensor():
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(30)])
    x = torch.randn(2, 4)
    want = model(x)
    kinds, stop = set(), threading.Event()

    def run():
        while not stop.is_set():
            kinds.add(type(model(x)))

    thread = threading.Thread(target=run)
    thread.start()
    for _ in range(2):
        capture(model, (x,))
    stop.set()
    thread.join()
    assert kinds == {torch.Tensor}
    torch.testing.assert_close(model(x), want)


def test_captures_in_parallel_threads():
    x = torch.randn(2, 4)
    models = [nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(4)]
    opts = [GraphoptModule(m) for m in models]
    results = [None] * len(opts)

    def run(i):
        results[i] = opts[i](x)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(opts))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for model, result in zip(models, results, strict=True):
        torch.testing.assert_close(model(x), result)


def test_capture_under_inference_mode():
    model = Net().eval()
    opt = GraphoptModule(model)
    with torch.inference_mode():
        x = torch.randn(2, 3, 6, 6)
        assert torch.equal(opt(x), model(x))
        assert opt(x).is_inference()


def test_capture_holds_dtypes_of_the_ambient_autocast():
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(4, 4)

        def forward(self, x):
            return torch.zeros(2, dtype=self.lin(x).dtype)

    opt = GraphoptModule(Reads())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert opt(torch.randn(2, 4)).dtype is torch.bfloat16
    assert opt(torch.randn(2, 4)).dtype is torch.float32


@pytest.mark.parametrize("depth", [2, 12])
def test_what_is_added_to_export_is_small(depth):
    layers = [
        nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU()) for _ in range(4 * depth)
    ]
    c = capture(nn.Sequential(*layers), (torch.randn(2, 16),))
    assert c.seconds - c.export_seconds < 0.3 * c.export_seconds + 0.1
