"""Calls that are prepared once and repeated launch what Triton would: kernel, grid, arguments."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from graphopt.kernels import _launch, _library, _prepared

G = torch.ops.graphopt

# In a process of its own: Triton without its interpreter, and a driver that launches nothing. Each
# call runs three times: as Triton launches it, prepared, and repeated.
SCRIPT = """
import json, sys
sys.path.insert(0, sys.argv[1])
import silent_driver, torch
from graphopt.kernels import _prepared
silent_driver.install()
G, LAUNCHES = torch.ops.graphopt, silent_driver.LAUNCHES

def misaligned(t):
    flat = torch.empty(t.numel() + 1, dtype=t.dtype)[1:]
    return flat.view(t.shape).copy_(t)

def columns(t):
    return torch.empty(t.shape[0], 3 * t.shape[1], dtype=t.dtype)[:, t.shape[1] : 2 * t.shape[1]]

x, w = torch.randn(6, 64), torch.randn(64)
low, seed = x.bfloat16(), torch.tensor(3)
inputs = [x, misaligned(x), x, columns(x), low, x[:1], x[:, :1], x[:0], x[:, :33]]
CALLS = {
    "layer_norm": lambda x: G.layer_norm(x, w[: x.shape[1]], None, 1e-5),
    "add_rms_norm": lambda x: G.add_rms_norm(x, x, None, 1e-6, dropout_p=0.1, seed=seed, site=2),
    "bias_act": lambda x: G.bias_act(x, w[: x.shape[1]], "gelu"),
    "dropout_add": lambda x: G.dropout_add(x, x, 0.5, seed, 1),
    "rope": lambda x: G.rope(x.unsqueeze(0), x.unsqueeze(0), x) if x.shape[1] % 2 == 0 else None,
}
again = _prepared.Launch.__call__

def launched(call, x):
    LAUNCHES.clear()
    torch.manual_seed(0)
    x = x.detach().requires_grad_()
    y = call(x)
    y = y[0] if isinstance(y, tuple) else y
    if y is not None:
        y.backward(torch.ones_like(y))
    # A pointer is told by whether it is a multiple of 16 bytes; a tensor or its address.
    def told(a):
        a = a.data_ptr() if isinstance(a, torch.Tensor) else a
        return a % 16 == 0 if isinstance(a, int) and a > 2**32 else str(a)
    return [(n, f, g, [told(a) for a in given]) for n, f, g, given in LAUNCHES]

silent_driver.Silent.recording = True
wrong, count, fast = [], 0, 0
for name, call in CALLS.items():
    for i, x in enumerate(inputs):
        _prepared.Launch.__call__ = _prepared.Launch._by_triton
        expected = launched(call, x)
        _prepared.Launch.__call__ = again
        first, second = launched(call, x), launched(call, x)
        count += len(expected)
        if not expected == first == second:
            wrong.append((name, i, expected, first, second))
by_triton = _prepared.Launch._by_triton
def counted(self, *pointers):
    counted.calls += 1
    return by_triton(self, *pointers)
counted.calls, _prepared.Launch._by_triton = 0, counted
launched(CALLS["layer_norm"], inputs[0])
aligned = counted.calls
launched(CALLS["layer_norm"], inputs[1])
import warnings
from graphopt.kernels._library import implementation
from graphopt.memory.device import launching_nothing
from graphopt.memory.fakestep import fake_mode
mode = fake_mode()
fake = [mode.from_tensor(t) for t in (inputs[0], w)]
gelu = lambda t, b: implementation(G.bias_act.default)(t, b, "gelu")
LAUNCHES.clear()
gelu(inputs[0], w)
one = len(LAUNCHES)
with warnings.catch_warnings(), launching_nothing(), mode:
    warnings.simplefilter("error")
    gelu(*fake)
predicted = len(LAUNCHES) - one
from triton import knobs
unaligned = counted.calls - aligned
seen = []
knobs.runtime.launch_enter_hook.add(seen.append)
launched(CALLS["layer_norm"], inputs[0])
print(json.dumps({"wrong": wrong, "one": one, "predicted": predicted, "count": count,
                  "aligned": aligned, "unaligned": unaligned,
                  "hooked": counted.calls - aligned - unaligned}))
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict:
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(Path(__file__).parent)],
        env={k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"},
        cwd=tmp_path_factory.mktemp("elsewhere"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_repeated_launches_are_those_that_triton_would_make(report):
    assert report["wrong"] == []
    assert report["count"] > 50


def test_only_aligned_pointers_are_repeated(report):
    assert report["aligned"] == 0
    assert report["unaligned"] > 0


def test_a_tool_that_watches_launches_sees_each(report):
    assert report["hooked"] > 0


def test_a_prediction_launches_nothing(report):
    assert report["one"] == 1
    assert report["predicted"] == 0


def layouts() -> list[torch.Tensor]:
    """One shape in several layouts, addresses and dtypes, and others around it."""
    base = torch.linspace(-2, 2, 6 * 24 + 1)
    x = base[:-1].view(6, 24)
    return [
        x, base[1:].view(6, 24), x, x.t().contiguous().t(), torch.stack((x, x), 1)[:, 0],
        x.bfloat16(), x, x[:1], x[:, :1], x[:0], x.double(), x[:1].expand(6, 24), x.view(2, 3, 24),
    ]  # fmt: skip


CALLS = {
    "layer_norm": lambda x: G.layer_norm(x, None, None, 1e-5, activation="relu"),
    "add_layer_norm": lambda x: G.add_layer_norm(x, x + 1, None, None, 1e-5)[0],
    "bias_act": lambda x: G.bias_act(x, x.detach().reshape(-1, x.shape[-1]).sum(0), "silu"),
    "glu": lambda x: G.glu(x, x.sin(), "gelu"),
    "glu_packed": lambda x: G.glu_packed(torch.cat((x, x), -1), "silu"),
    "dropout_add": lambda x: G.dropout_add(x, x, 0.3, torch.tensor(5, device=x.device), 1),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_does_not_depend_on_those_before(triton_backend, name):
    def run(x: torch.Tensor) -> list[torch.Tensor]:
        x = x.to(triton_backend.device).detach().requires_grad_()
        y = CALLS[name](x)
        (dx,) = torch.autograd.grad(y, x, y.detach())
        return [y, dx]

    after_others = [run(x) for _ in range(3) for x in layouts()][-len(layouts()) :]
    for x, found in zip(layouts(), after_others, strict=True):
        _prepared.forget()
        for a, b in zip(found, run(x), strict=True):
            assert a.dtype == b.dtype
            assert a.stride() == b.stride()
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def test_results_keep_nothing_of_the_first_call_alive(triton_backend):
    import weakref

    x = torch.randn(5, 24, device=triton_backend.device)
    _prepared.forget()
    G.layer_norm(x, None, None, 1e-5)
    gone = weakref.ref(x)
    del x
    assert gone() is None


def test_working_a_call_out_allocates_nothing(triton_backend):
    # A prediction of memory would count it.
    from torch.utils._python_dispatch import TorchDispatchMode

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(func.name())
            return func(*args, **(kwargs or {}))

    def operations(call) -> list[str]:
        names.clear()
        with Seen():
            call()
        return [n for n in names if n not in ("aten::split.Tensor", "aten::slice.Tensor")]

    names: list[str] = []
    x = torch.randn(24, 6, device=triton_backend.device).t()  # must be copied
    inside = _library.implementation
    for call in (
        lambda: inside(G.layer_norm.default)(x, None, None, 1e-5),
        lambda: inside(G.bias_act.default)(x, None, "gelu"),
        lambda: inside(G.dropout_add_backward.default)(x, 0.1, torch.tensor(1), 0, torch.half),
        lambda: inside(G.glu_packed_backward.default)(x[:, :12], x, "silu", True),
    ):
        _prepared.forget()
        first = operations(call)
        assert first == operations(call)
        assert first


def test_what_is_known_is_bounded(monkeypatch):
    monkeypatch.setattr(_prepared, "MOST", 3)
    prepared = _prepared.Prepared(lambda tensors, options: lambda x: options[0])
    for i in range(10):
        assert prepared((torch.ones(1),), (i,)) == i
    assert len(prepared._known) <= 3


def test_a_call_is_known_by_all_that_its_tensors_are():
    x, y = torch.ones(2, 3), torch.ones(3)
    kinds = [
        (x, None, None), (x, y, None), (x, None, y), (None, None, y), (y, None, None), (x, x, y),
        (x.t(), None, None), (x.half(), y, None), (x.clone(), y.clone().requires_grad_(), None),
    ]  # fmt: skip
    prepared = _prepared.Prepared(lambda tensors, options: lambda *given: told(tensors))

    def told(tensors):
        return [_prepared.facts(t) for t in tensors]

    for _ in range(3):
        for kind in (*kinds, *reversed(kinds)):
            for _ in range(2):
                assert prepared(kind, ("an option",)) == told(kind)
    assert len(prepared._first[("an option",)]) == _prepared.FIRST
    assert len(prepared._known) == len(kinds) - 1  # the last differs from another in no fact


def test_what_is_looked_for_first_needs_no_guards_of_torch(monkeypatch):
    monkeypatch.setattr(torch._C._dynamo.guards, "TensorGuards", None)
    prepared = _prepared.Prepared(lambda tensors, options: lambda x: len(tensors[0]))
    assert [prepared((torch.ones(n),), ()) for n in (1, 1, 1, 2, 2, 2)] == [1, 1, 1, 2, 2, 2]


def test_an_error_is_raised_every_time(triton_backend):
    x = torch.ones(2, 8, device=triton_backend.device)
    for _ in range(2):
        with pytest.raises(Exception, match="does not fit"):
            G.layer_norm(x, torch.ones(7, device=x.device), None, 1e-5)


@pytest.mark.parametrize("shape", [(2, 3), (1, 5), (4,), (), (0, 3)])
@pytest.mark.parametrize("like", [torch.zeros(3, 2).t(), torch.zeros(2, 3), torch.zeros(1, 5)])
def test_made_tensors_are_contiguous_as_torch_makes_them(shape, like):
    for dtype in (torch.float32, torch.float16):
        made = _prepared.maker(like, shape, dtype)(like)
        assert (made.shape, made.dtype) == (shape, dtype)
        assert made.stride() == torch.empty(shape).stride()


def test_inference_before_training(triton_backend):
    # What stands for a result that nobody wants is shared, and saved for the backward.
    _launch._nothing.cache_clear()
    x, w = (torch.randn(s, device=triton_backend.device) for s in ((4, 24), (24,)))
    with torch.inference_mode():
        G.rms_norm(x, w, 1e-6)
    y = G.rms_norm(x, w.requires_grad_(), 1e-6)
    y.sum().backward()
    assert w.grad is not None


# Past the dispatcher ------------------------------------------------------------------------------


def called(name, *args, **kwargs):
    """The result of an operator's short way."""
    overload = getattr(G, name).default
    return _library.direct(overload)(*_library.positional(overload, args, kwargs))


def test_the_short_way_gives_the_same(triton_backend):
    x, w = (torch.randn(s, device=triton_backend.device, requires_grad=True) for s in ((4, 24), 24))
    results = []
    for y in (called("rms_norm", x, w, 1e-6), G.rms_norm(x, w, 1e-6)):
        assert type(y.grad_fn).__name__.endswith("Backward")
        results.append((y, *torch.autograd.grad(y, (x, w), torch.ones_like(y))))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    with torch.no_grad():
        assert not called("rms_norm", x, w, 1e-6).requires_grad
    assert not called("rms_norm", x.detach(), w.detach(), 1e-6).requires_grad


class Wrapped(torch.Tensor):
    """A subclass that counts what it sees."""

    seen: list = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.seen.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


def test_whoever_watches_sees_the_operator():
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.utils._python_dispatch import TorchDispatchMode

    x, names = torch.randn(4, 24), []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    with Mode():
        called("softcap", x, 3.0)
    assert names == ["graphopt.softcap.default"]
    graph = make_fx(lambda x: called("softcap", x, 3.0))(x).graph
    assert any(n.target is G.softcap.default for n in graph.nodes)
    called("softcap", x.as_subclass(Wrapped), 3.0)
    assert Wrapped.seen
    with torch.profiler.profile() as profile:
        called("softcap", x, 3.0)
    assert any(e.key == "graphopt::softcap" for e in profile.key_averages())
    with torch.autograd.forward_ad.dual_level(), pytest.raises(Exception, match=r"jvp|forward"):
        called("softcap", torch.autograd.forward_ad.make_dual(x, x), 3.0)


def test_numbers_arrive_as_the_dispatcher_gives_them():
    values = _library.positional(G.softcap.default, (torch.ones(1), 3), {})
    assert type(values[1]) is float
    assert values[2] is None


def test_a_subclass_in_a_list_is_seen():
    from torch.testing._internal.two_tensor import TwoTensor

    w = torch.ones(2)
    (plain,) = _library.invoke(G.cast_weights.default, [w], torch.half)
    assert type(plain) is torch.Tensor
    both = TwoTensor(w, 2 * w)
    (cast,) = _library.invoke(G.cast_weights.default, [both], torch.half)
    assert (cast.a[0], cast.b[0]) == (1, 2)
    (cast,) = called("cast_weights", [both], torch.half)
    assert (cast.a[0], cast.b[0]) == (1, 2)


def test_a_weight_in_a_list_gets_its_gradient():
    w = torch.ones(2, requires_grad=True)
    (cast,) = called("cast_weights", [torch.ones(1), w], torch.half)[1:]
    cast.sum().backward()
    assert w.grad.tolist() == [1, 1]
    x, low = torch.ones(1, 3).half(), torch.ones(2, 3).half()
    v = torch.ones(2, 3, requires_grad=True)
    called("linear_wide", x, low, None, [v]).sum().backward()
    assert v.grad.dtype == torch.float32
