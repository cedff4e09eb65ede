"""The passes take time linear in the graph, whatever is reused in it."""

from __future__ import annotations

import time

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from graphopt.graph import Body
from graphopt.graph.edit import Editor
from graphopt.passes import run_pipeline

aten = torch.ops.aten


def chain(blocks: int) -> Body:
    """x + 0.1 * gelu(layer_norm(x)) again and again, made node by node: four ops a block."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = FakeTensorMode().from_tensor(torch.empty(4, 8))
    output = graph.output((x,))
    editor = Editor(graph)
    for _ in range(blocks):
        h = editor.call(aten.layer_norm.default, x, [8], before=output, like=output)
        h = editor.call(aten.gelu.default, h, before=output, like=output)
        h = editor.call(aten.mul.Tensor, h, 0.1, before=output, like=output)
        x = editor.call(aten.add.Tensor, x, h, before=output, like=output)
    output.args = ((x,),)
    return Body(graph, nn.Module(), 1)


def seconds(body: Body) -> float:
    start = time.process_time()
    run_pipeline(body)
    return time.process_time() - start


def test_four_times_the_nodes_take_about_four_times_as_long():
    run_pipeline(chain(4))
    # the least of a few: the collector, or another process, may fall into any one of them
    small, large = (min(seconds(chain(blocks)) for _ in range(3)) for blocks in (100, 400))
    assert large < 8 * max(small, 0.1)


@pytest.mark.slow
def test_twenty_thousand_nodes():
    run_pipeline(chain(4))
    small, large = seconds(chain(500)), seconds(chain(5000))
    print(f"2,000 nodes {small:.2f} s, 20,000 nodes {large:.2f} s")
    assert large < 15 * small


def test_reuse_does_not_multiply():
    """Each value is read twice by the next, so that there are 2^60 paths through the graph."""
    graph = fx.Graph()
    a = graph.placeholder("a")
    a.meta["val"] = FakeTensorMode().from_tensor(torch.empty(4, 8))
    output = graph.output((a,))
    editor = Editor(graph)
    for _ in range(60):
        s = editor.call(aten.sigmoid.default, a, before=output, like=output)
        a = editor.call(aten.mul.Tensor, a, s, before=output, like=output)
        a = editor.call(aten.add.Tensor, a, a, before=output, like=output)
    output.args = ((a,),)
    assert seconds(Body(graph, nn.Module(), 1)) < 10
