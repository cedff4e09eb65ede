"""diff: what changed by module, equal blocks as one, names that stay where values do."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import graphopt
from graphopt.diff import DiffResult, ModuleDiff


class Block(nn.Module):
    """A pre-norm block with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc, self.drop = nn.LayerNorm(16), nn.Linear(16, 16), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(torch.sin(self.fc(self.norm(x))))


class Blocks(nn.Module):
    """Six of them, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(6))
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.fixture(scope="module")
def found() -> DiffResult:
    return graphopt.diff(graphopt.optimize(Blocks(), torch.randn(2, 16)))


def test_equal_blocks_are_one_entry(found: DiffResult) -> None:
    norms = {m.where: m.count for m in found.changed if m.where.endswith("norm")}
    # The first follows no sum, the second reads the model's input.
    assert norms == {"layers.0.norm": 1, "layers.1.norm": 1, "layers.*.norm": 4}
    (norm,) = [m for m in found.changed if m.where == "layers.*.norm"]
    assert norm.modules == tuple(f"layers.{i}.norm" for i in range(2, 6))
    assert norm.rules == ("add_layer_norm",)
    assert norm.title == "@@ layers.*.norm x4   1 ops -> 1   add_layer_norm"


def test_lines_are_code_with_the_blocks_numbers_starred(found: DiffResult) -> None:
    (norm,) = [m for m in found.changed if m.where == "layers.*.norm"]
    before, after = norm.lines()
    state = "self.layers[*].norm.weight, self.layers[*].norm.bias"
    assert before == f"- norm = aten.layer_norm(layers_*, [16], {state})  # f32[2, 16]"
    # dropout is the norm's own, of its first summand
    assert after.startswith(f"+ norm, layers_* = graphopt.add_layer_norm(sin, layers_*, {state}")
    assert "dropout_p=0.1, seed=draw_seed, site=*" in after


def test_a_line_that_only_reads_a_replaced_value_does_not_change(found: DiffResult) -> None:
    assert "layers.3.fc" in found.unchanged  # it reads norm, which another op makes now
    assert "unchanged: layers.*.fc x6, " in repr(found)


def test_ops_are_counted_as_explain_does(found: DiffResult) -> None:
    told = graphopt.explain(Blocks(), torch.randn(2, 16))
    assert (found.ops_before, found.ops_after) == (told.nodes_before, told.nodes_after)


def test_nothing_changed_is_said() -> None:
    opt = graphopt.optimize(nn.Linear(4, 4), torch.randn(2, 4))
    assert "nothing changed" in repr(graphopt.diff(opt))


def test_context_is_shown_around_changes() -> None:
    lines = tuple(f"v{i} = aten.op{i}()" for i in range(9))
    changed = (*lines[:4], "v4 = graphopt.fused()", *lines[5:])
    entry = ModuleDiff("m", ("m",), (), lines, changed, 9, 9)
    assert entry.lines() == [
        "  ...",
        "  v3 = aten.op3()",
        "- v4 = aten.op4()",
        "+ v4 = graphopt.fused()",
        "  v5 = aten.op5()",
        "  ...",
    ]


def test_to_dict_is_json_with_these_keys(found: DiffResult) -> None:
    data = json.loads(json.dumps(found.to_dict()))
    assert list(data) == [
        "schema", "model", "mode", "inputs", "ops_before", "ops_after", "changed", "unchanged",
    ]  # fmt: skip
    assert data["schema"] == "graphopt.diff/1"
    assert list(data["changed"][0]) == [
        "where", "modules", "rules", "before", "after", "ops_before", "ops_after", "count", "diff",
    ]  # fmt: skip


def test_html_colours_lines_and_needs_no_network(found: DiffResult) -> None:
    page = found.html()
    assert "<span class='del'>- norm = aten.layer_norm" in page
    assert "<span class='add'>+ norm" in page
    assert "http" not in page
    assert found._repr_html_() in page
