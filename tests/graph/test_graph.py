"""Facts, views of the graph, edits, lint and text."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from graphopt.errors import PassError
from graphopt.graph import Body, Mutation, copy_graph, lint, site_of
from graphopt.graph.edit import Editor
from graphopt.graph.facts import Facts, cuts, dominators, min_cut, nbytes, to_networkx
from graphopt.graph.ops import arguments, is_random
from graphopt.graph.text import ir_text, parse, python_code
from tests.passes.bodies import body_of

aten = torch.ops.aten


def named(body: Body, name: str) -> fx.Node:
    return next(n for n in body.graph.nodes if n.name == name)


def block() -> Body:
    return body_of(lambda x: torch.exp(x).view(-1) * torch.sin(x).view(-1), (torch.ones(2, 3),))


def test_views_share_a_root():
    body = block()
    facts = Facts.of(body.graph)
    assert facts.may_alias(named(body, "view"), named(body, "exp"))
    assert not facts.may_alias(named(body, "view"), named(body, "sin"))
    assert facts.leaves(named(body, "mul"))
    assert not facts.leaves(named(body, "exp"))


def test_a_cast_to_another_dtype_is_no_view():
    body = body_of(lambda x: (x.to(torch.float64), x.to(torch.float32) + 1), (torch.ones(2),))
    facts = Facts.of(body.graph)
    assert facts.roots[named(body, "to")] is named(body, "to")
    assert facts.roots[named(body, "to_1")] is not named(body, "to_1")


def test_bytes_of_a_value():
    assert nbytes(torch.empty(2, 3, dtype=torch.bfloat16)) == 12
    assert nbytes((torch.empty(2), [torch.empty(3)])) == 20
    assert nbytes(3) == 0


def test_networkx_views():
    body = block()
    assert to_networkx(body.graph).nodes["exp"]["bytes"] == 24
    assert dominators(body.graph)["mul"] == body.placeholders[0].name
    chain = body_of(lambda x: torch.exp(torch.sin(x)).cos(), (torch.ones(2),))
    assert cuts(chain.graph)[1:] == ["sin", "exp", "cos"]


def test_min_cut_takes_the_smallest_values():
    body = body_of(lambda x: torch.exp(x.sum(0)).cos() * 1.5, (torch.ones(64, 3),))
    cost, names = min_cut(body.graph, [body.placeholders[0].name], ["output"])
    assert cost == 12
    assert len(names) == 1


def test_arguments_fill_in_defaults():
    body = body_of(lambda x: F.layer_norm(x, (3,)), (torch.ones(2, 3),))
    assert arguments(named(body, "layer_norm"))[2:5] == (None, None, 1e-5)


def test_randomness_is_seen_also_in_composites():
    body = body_of(lambda x: F.dropout(x, 0.5, True) + F.dropout(x, 0.5, False), (torch.ones(2),))
    assert is_random(named(body, "dropout"))
    assert not is_random(named(body, "dropout_1"))


def test_provenance_of_a_node():
    body = body_of(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), (torch.ones(2, 3),))
    site = site_of(named(body, "linear"))
    assert (site.module, site.module_class) == ("0", "Linear")
    assert site.file.endswith("linear.py")
    assert site.line


def test_edits_keep_provenance_and_compute_values():
    body = body_of(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), (torch.ones(2, 3),))
    relu = named(body, "relu")
    new = Editor(body.graph, "test").call(aten.gelu.default, relu.args[0], before=relu, like=relu)
    assert new.meta["val"].shape == (2, 3)
    assert site_of(new) == site_of(relu)
    assert new.meta["graphopt_rule"] == "test"


def test_a_bad_edit_leaves_the_graph_as_it_was():
    body = block()
    before = ir_text(body)
    mul = named(body, "mul")
    with pytest.raises(PassError, match=r"aten\.mm does not take the arguments that wrong gave it"):
        Editor(body.graph, "wrong").call(aten.mm.default, mul, mul, before=mul.next, like=mul)
    assert ir_text(body) == before


def test_a_node_in_use_is_not_erased():
    body = block()
    with pytest.raises(PassError, match="would erase exp, which view still reads"):
        Editor(body.graph, "test").erase([named(body, "exp")])


def broken(change) -> list[str]:
    body = block()
    change(body)
    return [v.rule for v in lint.violations(body)]


def test_lint_finds_each_kind_of_break():
    def no_value(body):
        del named(body, "exp").meta["val"]

    def dead(body):
        Editor(body.graph).call(
            aten.cos.default, named(body, "exp"), before=named(body, "mul"), like=named(body, "mul")
        )

    def writes(body):
        named(body, "exp").target = aten.exp_.default

    def early(body):
        next(iter(body.graph.nodes)).prepend(named(body, "sin"))

    def one_output_too_many(body):
        body.mutations = (Mutation(1, "buffer", "b"),)

    assert broken(lambda body: None) == []
    assert broken(no_value) == ["metadata"]
    assert broken(dead) == ["no dead nodes"]
    assert broken(writes) == ["functional"]
    assert broken(early) == ["order"]
    assert broken(one_output_too_many) == ["flat output"]
    body = block()
    no_value(body)
    with pytest.raises(PassError, match="breaks the rule 'metadata' after some pass: exp"):
        lint.check(body, "some pass")


def test_a_copy_has_the_same_names_and_values():
    body = block()
    copy = body.copy()
    assert ir_text(copy) == ir_text(body)
    assert [n.name for n in copy_graph(body.graph).nodes] == [n.name for n in body.graph.nodes]


def test_what_is_added_to_the_constants_of_a_copy_is_its_own():
    body = block()
    before = dict(body.constants)
    body.copy().constants["c9"] = torch.zeros(1)
    assert body.constants == before


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.norm = nn.LayerNorm(4)

    def forward(self, x):
        for linear in self.blocks:
            x = F.silu(linear(x))
        return self.norm(x)


def test_code_is_named_after_modules():
    body = body_of(Small(), (torch.ones(2, 4),))
    assert python_code(body).splitlines()[7:] == [
        "    # x: f32[2, 4]",
        "    # blocks.0",
        "    blocks_0 = aten.linear(x, self.blocks[0].weight, self.blocks[0].bias)  # f32[2, 4]",
        "    # the root module",
        "    silu = aten.silu(blocks_0)  # f32[2, 4]",
        "    # blocks.1",
        "    blocks_1 = aten.linear(silu, self.blocks[1].weight, self.blocks[1].bias)  # f32[2, 4]",
        "    # the root module",
        "    silu_1 = aten.silu(blocks_1)  # f32[2, 4]",
        "    # norm",
        "    norm = aten.layer_norm(silu_1, [4], self.norm.weight, self.norm.bias)  # f32[2, 4]",
        "    return (norm,)",
    ]


def test_code_runs_on_the_module_itself():
    model = Small()
    body = body_of(model, (torch.ones(2, 4),))
    scope: dict = {}
    exec(python_code(body), scope)
    x = torch.randn(2, 4)
    torch.testing.assert_close(scope["forward"](model, x)[0], model(x))


def test_code_round_trips():
    body = body_of(Small(), (torch.ones(2, 4),))
    again = Body(parse(python_code(body), body), body.root, 1)
    reads = [n.target for n in again.graph.nodes if n.op == "get_attr"]
    assert sorted(reads) == sorted(dict(body.root.named_parameters()))
    for old, new in zip(
        [n for n in body.graph.nodes if n.op == "call_function"],
        [n for n in again.graph.nodes if n.op == "call_function"],
        strict=True,
    ):
        assert old.target == new.target


def test_listing_leaves_out_what_differs_by_machine():
    body = body_of(lambda x: F.layer_norm(x, (3,)), (torch.ones(2, 3),))
    assert "cudnn" not in ir_text(body)
    assert "False" not in ir_text(body)


def test_code_of_a_sequential_runs_on_any_module_with_its_children():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    body = body_of(model, (torch.ones(2, 4),))
    assert "getattr(self, '0').weight" in python_code(body)
