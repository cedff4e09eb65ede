"""What operations copy, widen and lay out inside on the CPU: predictions and budgets hold to it."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import graphopt
from graphopt.bench.trace import peak_allocated, record
from graphopt.errors import BudgetError
from graphopt.memory import cpucalls, trial
from graphopt.memory.oracle import predict

LABELS = torch.arange(64) % 96


class Headed(nn.Module):
    """A small network under a function that ends in a loss."""

    def __init__(self, head):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 96))
        self.slope = nn.Parameter(torch.full((1,), 0.2))
        self.head = head

    def forward(self, x):
        return self.head(self.body(x), self.slope)


def _blocks(y):
    return y.view(4, 16, 96)


def _smoothed(y, _):
    found = F.log_softmax(y, -1)
    return -(found.gather(1, LABELS[:, None]).mean() + found.mean())


HEADS = {
    # operations that copy a gradient which is expanded or transposed
    "sum": lambda y, _: y.sum(),
    "log_softmax, sum": lambda y, _: F.log_softmax(y, -1).sum(-1).mean(),
    "softmax, sum over rows": lambda y, _: y.softmax(-1).sum(0).square().sum(),
    "softmax, transposed": lambda y, _: (
        _blocks(y).softmax(-1).transpose(1, 2).flatten(1).square().sum()
    ),
    "pool, transposed": lambda y, _: (
        F.avg_pool1d(_blocks(y), 2).transpose(1, 2).flatten(1).square().sum()
    ),
    "largest": lambda y, _: (y - y.amax(-1, keepdim=True)).square().mean(),
    # operations that widen bf16, or take room of their own
    "mean over rows": lambda y, _: _blocks(y).mean(1).square().mean(),
    "gather": lambda y, _: y.gather(0, torch.zeros(40, 96, dtype=torch.long)).square().mean(),
    "unfold": lambda y, _: _blocks(y).unfold(1, 5, 1).mean(-1).square().mean(),
    "bilinear": lambda y, _: (
        F.interpolate(y.view(4, 4, 4, 96), scale_factor=2, mode="bilinear").mean((2, 3)).sum()
    ),
    "smoothed labels": _smoothed,
    "prelu": lambda y, slope: F.prelu(y, slope).square().mean(),
    "singular values": lambda y, _: torch.linalg.svdvals(_blocks(y).float()).sum(),
    "weighed classes": lambda y, _: F.binary_cross_entropy_with_logits(
        y, torch.ones(64, 96, dtype=y.dtype), pos_weight=torch.full((96,), 2.0, dtype=y.dtype)
    ),
    # operations whose operands are of several dtypes
    "times whole numbers": lambda y, _: (y * torch.ones(64, 96, dtype=torch.long)).sum(),
    "plus float64": lambda y, _: (y + torch.ones(64, 96, dtype=torch.double)).square().mean(),
    # formulas that write into zeros of their own
    "rows": lambda y, _: _blocks(y)[:, [0, 2, 2, 5]].square().mean(),
    "top": lambda y, _: y.topk(5, -1).values.square().mean(),
    "take": lambda y, _: y.take(torch.arange(9)).square().mean(),
}


class Normed(nn.Module):
    """BatchNorm over a sequence that lies transposed, and a gate behind it."""

    def __init__(self, gated=False):
        super().__init__()
        self.inner, self.norm = nn.Linear(32, 64), nn.BatchNorm1d(64)
        self.gated = gated

    def forward(self, x):
        y = self.norm(self.inner(x).transpose(1, 2))
        y = F.glu(y, 1) if self.gated else F.gelu(y)
        return y.square().mean()


def _convolved(frozen):
    model = nn.Sequential(nn.Conv1d(24, 48, 5), nn.GELU(), nn.Conv1d(48, 48, 5), nn.Flatten())
    for layer in (model[0], model[2]):
        layer.weight.requires_grad_(not frozen)
    return model


def _net():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.SiLU(), nn.Conv2d(16, 16, 3),
        nn.GroupNorm(4, 16), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    )  # fmt: skip


class Bags(nn.Module):
    """The largest of the rows of each bag: backward asks for the bags that are not empty."""

    def __init__(self):
        super().__init__()
        self.bags, self.head = nn.EmbeddingBag(50, 24, mode="max"), nn.Linear(24, 4)

    def forward(self, x):
        return self.head(self.bags(torch.arange(240, device=x.device).view(60, 4) % 50)).sum()


class Pooled(nn.Module):
    """Takes the largest of a sequence that lies transposed: torch does otherwise unrecorded."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        y = F.max_pool1d(self.first(x).transpose(1, 2), 3, 1, 1).transpose(1, 2)
        return self.last(F.gelu(y)).square().mean()


class Scaled(nn.Module):
    """Divides by numbers, which autograd keeps."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = ((q @ k.transpose(-1, -2)) / 3.0).masked_fill(torch.eye(40) > 0, float("-inf"))
        return ((scores * 2).softmax(-1) @ v).square().mean()


MODELS = {
    **{name: lambda head=head: (Headed(head), torch.randn(64, 32)) for name, head in HEADS.items()},
    "BatchNorm, transposed": lambda: (Normed(), torch.randn(8, 40, 32)),
    "BatchNorm and gate": lambda: (Normed(gated=True), torch.randn(8, 40, 32)),
    "bias of a frozen convolution": lambda: (_convolved(True), torch.randn(4, 24, 20)),
    "convolution": lambda: (_convolved(False), torch.randn(4, 24, 20)),
    "bags": lambda: (Bags(), torch.randn(2)),
    "largest, transposed": lambda: (Pooled(), torch.randn(64, 30, 16)),
    "attention by hand": lambda: (Scaled(), torch.randn(4, 40, 32)),
    "convolutions and norms": lambda: (_net(), torch.randn(4, 3, 20, 20)),
}


def _scalar(result):
    return result if result.dim() == 0 else result.float().square().mean()


def _peak(module, x):
    """The most bytes that a real step adds to what was there."""

    def step():
        module.zero_grad(set_to_none=True)
        _scalar(module(x)).backward()

    step()
    module.zero_grad(set_to_none=True)
    return peak_allocated(record(step, cuda=False, memory=True))


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_a_budget_is_kept_and_the_prediction_is_exact(name, precision):
    model, x = MODELS[name]()
    with pytest.raises(BudgetError) as lowest:
        graphopt.optimize(model, x, memory_budget=1024, precision=precision, loss_fn=_scalar)
    budget = lowest.value.lowest_bytes
    opt = graphopt.optimize(model, x, memory_budget=budget, precision=precision, loss_fn=_scalar)
    found = predict(opt.body, loss_fn=_scalar)
    assert found.peak_bytes == opt.memory_plan.predicted_peak_bytes
    assert found.start_bytes + _peak(opt, x) == found.peak_bytes
    assert found.notes == ()


def test_a_call_that_draws_leaves_the_random_state_alone(monkeypatch):
    monkeypatch.setattr(cpucalls, "_book", trial.Book())
    state = torch.get_rng_state()
    x = torch.zeros(64)
    found = cpucalls.cpu_call(torch.ops.aten.bernoulli.p, (x, 0.5), {}, x)
    assert found == trial.Taken(0)
    assert torch.equal(torch.get_rng_state(), state)


class Given(nn.Module):
    """Calls an operator of a user's."""

    def forward(self, x):
        return torch.ops.memory_test_inside.shout(x).sum()


def test_a_user_s_own_operator_is_not_called_to_be_measured():
    calls = []

    @torch.library.custom_op("memory_test_inside::shout", mutates_args=())
    def shout(x: torch.Tensor) -> torch.Tensor:
        calls.append(x)
        return x.clone()

    shout.register_fake(torch.empty_like)
    shout.register_autograd(lambda ctx, grad: grad)
    x = torch.randn(4, requires_grad=True)
    found = graphopt.profile_memory(Given(), x).prediction.notes
    assert calls == []
    assert found == ("what memory_test_inside.shout takes inside is not known",)


@pytest.mark.parametrize(
    "lies", [((3, 4), (4, 1)), ((3, 4), (0, 0)), ((4, 3), (1, 4)), ((0, 2), (2, 1))]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.long, torch.bool])
@pytest.mark.parametrize("fill", [trial.zeros, trial.identities, trial.counts])
def test_made_up_operands_lie_as_the_given_ones(lies, dtype, fill):
    given = torch.empty_strided(*lies, dtype=dtype)
    made = fill(given)
    assert (made.shape, made.stride(), made.dtype) == (given.shape, given.stride(), dtype)


def test_a_plan_says_what_its_prediction_could_not_see(monkeypatch):
    monkeypatch.setattr(trial, "BY_VALUE", frozenset({"cumsum"}))
    monkeypatch.setattr(cpucalls, "_book", trial.Book())
    model = Headed(lambda y, _: y.cumsum(-1).sum())
    plan = graphopt.optimize(model, torch.randn(64, 32), memory_budget=1.0).memory_plan
    assert plan.notes == ("what cumsum takes inside is not known",)
    assert "  note: what cumsum takes inside is not known" in str(plan).splitlines()
    assert plan.to_dict()["notes"] == list(plan.notes)
