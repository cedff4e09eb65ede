"""A forward that is a function of the instance, over modules that its closure or globals hold."""

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import graphopt
from graphopt import CaptureError

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """Two layers, a norm with state, a weight and a counter."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.bn = nn.Linear(8, 8), nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.w = nn.Parameter(torch.randn(8, 8))
        self.register_buffer("n", torch.zeros(8))

    def forward(self, x):
        return self.b(self.a(x))


def calls(net):
    return lambda x: net.b(F.relu(net.a(x))) + x @ net.w


def of_a_default(net):
    return lambda x, net=net: net.bn(net.a(x))


def partial(net):
    return functools.partial(lambda net, x: net.bn(net.a(x)), net)


def of_a_list(net):
    layers = [net.a, net.bn, net.b]
    return lambda x: functools.reduce(lambda x, layer: layer(x), layers, x)


def around_its_own(net):
    own = net.forward

    @functools.wraps(own)
    def forward(x):
        return net.bn(own(x)) * 2

    return forward


def counts(net):
    def forward(x):
        net.n.add_(1)
        return net.a(x) + net.n

    return forward


def assigns(net):
    def forward(x):
        net.n = net.n + 1
        return net.a(x) + net.n

    return forward


def calls_itself(net):
    def twice(x, again=1):
        return twice(net.a(x), again - 1) if again else net.b(x)

    return lambda x: twice(x)


def of_a_tensor(net):
    weight, buffer = net.w, net.n
    return lambda x: x @ weight + buffer


GLOBAL = Net()


def of_a_global(net):
    return lambda x: GLOBAL.bn(GLOBAL.a(x))


FORWARDS = [
    calls, of_a_default, partial, of_a_list, around_its_own, counts, assigns, calls_itself,
    of_a_tensor,
]  # fmt: skip


def step(model, net):
    y = model(X)
    net.zero_grad()
    y.square().sum().backward()
    grads = {n: p.grad for n, p in net.named_parameters() if p.grad is not None}
    return y.detach(), grads, {n: b.clone() for n, b in net.named_buffers()}


@pytest.mark.parametrize("make", FORWARDS)
@pytest.mark.parametrize("where", ["root", "submodule"])
def test_numbers_gradients_and_buffers_are_those_of_eager(make, where):
    results = []
    for optimized in (False, True):
        net = Net()
        net.forward = make(net)
        model = net if where == "root" else nn.Sequential(net, nn.ReLU())
        results.append(step(graphopt.optimize(model, X) if optimized else model, net))
    (y, grads, buffers), (y_, grads_, buffers_) = results
    torch.testing.assert_close(y_, y)
    torch.testing.assert_close(grads_, grads)
    torch.testing.assert_close(buffers_, buffers)


@pytest.mark.parametrize("make", FORWARDS)
def test_state_stands_in_the_graph_by_its_path(make):
    net = Net()
    net.forward = make(net)
    before = {n: (id(t), type(t)) for n, t in [*net.named_parameters(), *net.named_buffers()]}
    code = graphopt.optimize(net, X).code
    assert "_graphopt_constants" not in code
    after = {n: (id(t), type(t)) for n, t in [*net.named_parameters(), *net.named_buffers()]}
    assert after == before


def test_a_global_model_as_in_a_script(monkeypatch):
    monkeypatch.setattr(GLOBAL, "forward", of_a_global(None), raising=False)
    opt = graphopt.optimize(GLOBAL, X)
    assert "self.bn.running_mean" in opt.code
    assert "# bn" in opt.code
    before = GLOBAL.bn.running_mean.clone()
    opt(X)
    assert not torch.equal(GLOBAL.bn.running_mean, before)


def test_a_function_in_a_plain_attribute():
    class Holds(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = Net()
            self.also = lambda x: self.net.bn(x)

        def forward(self, x):
            return self.also(x)

    assert "self.net.bn.running_mean" in graphopt.optimize(Holds(), X).code


def test_what_such_a_forward_changes_outside_is_refused():
    net, seen = Net(), []

    def forward(x):
        seen.append(1)
        return net.a(x)

    net.forward = forward
    with pytest.raises(CaptureError, match="seen in"):
        graphopt.optimize(net, X)
    assert seen == []


def test_a_variable_that_such_a_forward_counts_in_is_refused():
    net, count = Net(), 0

    def forward(x):
        nonlocal count
        count += 1
        return net.a(x)

    net.forward = forward
    with pytest.raises(CaptureError, match="count"):
        graphopt.optimize(net, X)
    assert count == 0


def test_a_scale_in_its_closure_is_guarded():
    net, scale = Net(), 2.0
    net.forward = lambda x: net.a(x) * scale
    opt = graphopt.optimize(net, X)
    torch.testing.assert_close(opt(X), net(X))
    scale = 3.0
    torch.testing.assert_close(opt(X), net(X))


@pytest.mark.parametrize("detach", [torch.Tensor.detach, lambda p: p.data], ids=["detach", "data"])
@pytest.mark.parametrize("beside", [False, True])
def test_a_detached_alias_of_a_parameter_sends_it_no_gradient(detach, beside):
    net = Net()
    kept = detach(net.w)
    net.forward = lambda x: net.a(x) + x @ kept + (x @ net.w * 2 if beside else 0)
    _, expected, _ = step(net, net)
    expected = {k: g.clone() for k, g in expected.items()}
    _, found, _ = step(graphopt.optimize(net, X), net)
    torch.testing.assert_close(found, expected)
