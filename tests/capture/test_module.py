"""The optimized module beside its source: one state, one mode, one interface."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import timeit

import pytest
import torch
from torch import fx, nn

from graphopt.errors import GraphOptError
from graphopt.module import Compiled, GraphoptModule, Settings


class Net(nn.Module):
    """A small net, at module level so that it pickles."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.emb.weight
        self.norm, self.drop = nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.register_buffer("scale", torch.tensor(2.0), persistent=False)
        self.name = "net"

    def forward(self, ids, *, bias=None, gain: float = 1.0):
        h = self.drop(self.norm(self.emb(ids))) * self.scale * gain
        return self.head(h if bias is None else h + bias)

    def greet(self):
        return f"hello from {self.name}"


IDS = torch.arange(5)


def test_class_and_graph_module():
    opt = GraphoptModule(Net())
    assert type(opt).__name__ == "OptimizedNet"
    assert isinstance(opt, fx.GraphModule)
    assert isinstance(opt, GraphoptModule)


def test_signature_is_the_sources():
    net = Net()
    opt = GraphoptModule(net)
    assert inspect.signature(opt.forward) == inspect.signature(net.forward)


class Doubled:
    """A wrapper's forward, as accelerate's and `torch.cuda.make_graphed_callables`' are."""

    def __init__(self, forward):
        self.forward = forward

    def __call__(self, *args, **kwargs):
        return 2 * self.forward(*args, **kwargs)


def test_a_forward_that_a_wrapper_sets_is_called_and_the_source_is_left_alone():
    net = nn.Linear(4, 2)
    opt, x = GraphoptModule(net), torch.ones(1, 4)
    opt.forward = Doubled(opt.forward)
    assert torch.equal(opt(x), 2 * net(x))
    assert "forward" not in net.__dict__
    assert opt.recaptures == []
    for made in (copy.copy(opt), copy.deepcopy(opt), pickle.loads(pickle.dumps(opt))):
        assert torch.equal(made(x), 2 * net(x))
    del opt.forward
    assert torch.equal(opt(x), net(x))


def test_state_is_the_sources():
    net, twin = Net(), Net()
    opt = GraphoptModule(net)
    assert list(opt.state_dict()) == list(twin.state_dict())
    assert [n for n, _ in opt.named_parameters(remove_duplicate=False)] == [
        n for n, _ in twin.named_parameters(remove_duplicate=False)
    ]
    assert all(a is b for a, b in zip(opt.parameters(), net.parameters(), strict=True))
    assert opt.head.weight is opt.emb.weight
    opt.load_state_dict(twin.state_dict())
    assert torch.equal(net.emb.weight, twin.emb.weight)
    assert opt.emb.weight is opt.head.weight


def test_modes_switch_without_a_new_capture():
    opt = GraphoptModule(Net())
    opt.train()(IDS)
    opt.eval()(IDS)
    functions = [e.program.function for e in opt._store.entries()]
    assert len(functions) == 2
    for training in (True, False, True):
        opt.train(training)
        out = opt(IDS)
        assert opt.body.training is training
        assert opt.source.training is training
        assert torch.equal(out, opt(IDS)) is not training
    assert [e.program.function for e in opt._store.entries()] == functions


def test_a_mode_set_on_the_source_counts():
    opt = GraphoptModule(Net())
    opt.source.eval()
    assert not opt.training
    assert torch.equal(opt(IDS), opt(IDS))


def test_a_frozen_submodule_is_another_graph():
    opt = GraphoptModule(Net())
    opt(IDS)
    opt.norm.eval()
    before = opt.norm.running_mean.clone()
    opt(IDS)
    assert torch.equal(before, opt.norm.running_mean)


def test_unknown_attributes_are_the_sources():
    opt = GraphoptModule(Net())
    assert opt.greet() == "hello from net"
    opt.name = "other"
    assert opt.source.name == "other"
    with pytest.raises(AttributeError, match="nothing"):
        _ = opt.nothing


def test_freezing_takes_effect():
    opt = GraphoptModule(Net())
    opt(IDS).sum().backward()
    assert opt.emb.weight.grad is not None
    opt.zero_grad()
    opt.emb.weight.requires_grad_(False)
    out = opt(IDS)
    out.sum().backward()
    assert opt.emb.weight.grad is None


def test_a_replaced_parameter_is_seen():
    net = nn.Linear(3, 2, bias=False)
    opt = GraphoptModule(net)
    opt(torch.ones(1, 3))
    net.weight = nn.Parameter(torch.full((2, 3), 4.0))
    assert opt(torch.ones(1, 3)).tolist() == [[12.0, 12.0]]


def test_a_swapped_submodule_is_captured_again():
    net = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    opt = GraphoptModule(net)
    x = torch.randn(2, 3)
    opt(x)
    net[1] = nn.Sigmoid()
    assert torch.equal(opt(x), net(x))


def test_a_change_of_dtype_is_captured_again():
    opt = GraphoptModule(nn.Linear(3, 3))
    opt(torch.ones(1, 3))
    opt.double()
    assert opt(torch.ones(1, 3).double()).dtype is torch.float64


def test_a_parametrization_registered_later():
    class Double(nn.Module):
        def forward(self, w):
            return w * 2

    net = nn.Linear(3, 3)
    opt = GraphoptModule(net)
    x = torch.randn(2, 3)
    plain = opt(x)
    nn.utils.parametrize.register_parametrization(net, "weight", Double())
    assert torch.equal(opt(x), net(x))
    assert not torch.equal(opt(x), plain)


def test_hooks_of_the_root_run():
    net = nn.Linear(3, 3)
    opt = GraphoptModule(net)
    seen = []
    net.register_forward_hook(lambda m, i, o: o * 0)
    opt.register_forward_pre_hook(lambda m, i: seen.append(i))
    assert opt(torch.ones(1, 3)).abs().sum() == 0
    assert len(seen) == 1


def test_a_full_backward_hook_of_the_root_runs():
    net = nn.Linear(3, 3)
    opt = GraphoptModule(net)
    seen = []
    net.register_full_backward_hook(lambda m, gi, go: seen.append(go))
    opt(torch.ones(1, 3, requires_grad=True)).sum().backward()
    assert len(seen) == 1


def test_deepcopy_has_its_own_state():
    opt = GraphoptModule(Net())
    opt.eval()(IDS)
    other = copy.deepcopy(opt)
    with torch.no_grad():
        other.emb.weight.zero_()
    assert not torch.equal(opt(IDS), other(IDS))
    assert other(IDS).abs().sum() == 0
    assert other.head.weight is other.emb.weight


def test_pickle_and_save():
    opt = GraphoptModule(Net(), Settings(dynamic=False))
    want = opt.eval()(IDS)
    file = io.BytesIO()
    torch.save(opt, file)
    file.seek(0)
    for other in (pickle.loads(pickle.dumps(opt)), torch.load(file, weights_only=False)):
        assert torch.equal(other(IDS), want)
        assert type(other).__name__ == "OptimizedNet"
        assert other._settings == Settings(dynamic=False)


def test_graph_and_code_show_what_is_in_force(capsys):
    opt = GraphoptModule(Net())
    with pytest.raises(GraphOptError, match="no graph yet"):
        _ = opt.graph
    opt(IDS)
    assert any("batch_norm" in str(n.target) for n in opt.graph.nodes)
    assert "graphopt.batch_norm" in opt.code
    opt.eval()(IDS)
    assert "graphopt.batch_norm" not in opt.code
    assert opt.print_readable() in capsys.readouterr().out


def test_submodules_named_graph_and_code(twin):
    class Clash(nn.Module):
        def __init__(self):
            super().__init__()
            self.graph, self.code = nn.Linear(3, 3), nn.Linear(3, 3)
            self.training_, self.forward_ = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            return self.forward_(self.training_(self.code(self.graph(x))))

    opt = twin(Clash(), torch.randn(2, 3))
    assert "graph.weight" in opt.state_dict()
    assert isinstance(opt.graph, fx.Graph)


def test_inside_a_larger_module():
    net = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    outer = nn.Sequential(nn.Linear(3, 3), GraphoptModule(net))
    assert list(outer.state_dict())[2:] == ["1.0.weight", "1.0.bias"]
    x = torch.randn(2, 3)
    want = outer(x)
    assert torch.equal(GraphoptModule(outer)(x), want)
    assert net[0].weight in set(outer.parameters())


def test_two_forwards_before_a_backward():
    net = nn.Linear(3, 3)
    opt = GraphoptModule(net)
    x, y = torch.randn(2, 3), torch.randn(2, 3)
    (opt(x).sin().sum() + opt(y).cos().sum()).backward()
    got = net.weight.grad.clone()
    net.zero_grad()
    (net(x).sin().sum() + net(y).cos().sum()).backward()
    torch.testing.assert_close(got, net.weight.grad)


def test_compile_body_runs_once_per_graph_and_its_result_is_shown():
    calls = []

    class Record:
        rewrites = ("one",)
        refusals = ()

    def compile_body(body):
        calls.append(body)
        return Compiled(body, Record())

    opt = GraphoptModule(Net(), None, compile_body)
    for training in (True, False, True, False):
        opt.train(training)(IDS)
    assert len(calls) == 2
    assert opt.rewrites == ["one"]


def test_the_ambient_autocast_is_a_part_of_the_body():
    opt = GraphoptModule(nn.Linear(4, 4))
    x = torch.randn(2, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert opt(x).dtype is torch.bfloat16
        assert opt.body.autocast == {"cpu": torch.bfloat16}
    assert opt(x).dtype is torch.float32
    assert opt.body.autocast == {}


def test_a_body_whose_casts_are_written_runs_without_autocast():
    states = []

    def compile_body(body):
        copied = body.copy()
        copied.autocast = {}
        return Compiled(copied)

    class Look(nn.Module):
        def forward(self, x):
            return x @ x

    opt = GraphoptModule(Look(), None, compile_body)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert opt(torch.ones(2, 2)).dtype is torch.float32
        states.append(torch.is_autocast_enabled("cpu"))
    assert states == [True]


def test_memory_is_freed_while_the_body_runs():
    opt = GraphoptModule(nn.Sequential(*[nn.ReLU() for _ in range(4)]))
    opt(torch.ones(2))
    assert opt.entry.program.text.count("del ") == 3


def test_overhead_of_a_call():
    net = nn.Sequential(*[nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)) for _ in range(40)])
    opt = GraphoptModule(net)
    x = torch.ones(2, 4)
    opt(x)
    entry = opt.entry
    values = entry.program(x)
    entry._function = lambda state, *inputs: values
    seconds = min(timeit.repeat(lambda: opt(x), number=100, repeat=5)) / 100
    assert seconds < 500e-6  # 60 us on an idle core; the bound only catches a blow-up


def test_a_container_stays_one():
    net = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    opt = GraphoptModule(net)
    assert len(opt) == 2
    assert opt[1] is net[1]
    assert list(opt) == list(net)
    opt[1] = nn.Sigmoid()
    x = torch.ones(1, 3)
    assert torch.equal(opt(x), net(x))
    with pytest.raises(TypeError):
        len(GraphoptModule(nn.Linear(3, 3)))


def test_a_graph_cannot_be_set():
    opt = GraphoptModule(nn.Linear(3, 3))
    opt(torch.ones(1, 3))
    with pytest.raises(GraphOptError, match="cannot be set"):
        opt.graph = opt.graph
