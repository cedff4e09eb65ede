"""The text tables: folding, alignment, sums by rule and by reason."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphopt.graph.record import Refusal, RewriteRecord, Site
from graphopt.numerics import Comparison, TensorError
from graphopt.report.fold import fold, fold_text
from graphopt.report.proof import proof_table, proof_text
from graphopt.report.rules import by_reason, by_rule, line_of, reason_table, rule_table
from graphopt.report.table import WIDTH, Table, size
from graphopt.report.view import show
from graphopt.verdict import Check, VerifyResult


def rewrite(rule, module, saved=0, kind="local", ordinal=0):
    return RewriteRecord(
        ordinal=ordinal,
        pass_name="fusion",
        rule=rule,
        kind=kind,
        nodes=("add", "norm"),
        inputs=("x",),
        outputs=("norm",),
        new_outputs=("fused",),
        site=Site(module, "LayerNorm", "models/gpt.py", 41, "h = self.ln_1(x)"),
        ops_before=("aten.add.Tensor", "aten.layer_norm.default"),
        ops_after=("graphopt.add_layer_norm",),
        bytes_before=1000 + saved,
        bytes_after=1000,
    )


def refusal(rule, module, reason="the sum is used elsewhere", matched=2, line=7):
    site = Site(module, "MLP", "models/gpt.py", line, "return self.act(x)")
    return Refusal(rule, reason, site, "gelu", matched, 3)


def test_fold_replaces_only_the_numbers_that_vary():
    paths = ["seq.0.h.1.ln", "seq.0.h.2.ln", "seq.0.out"]
    assert fold(paths) == {"seq.0.h.*.ln": 2, "seq.0.out": 1}


def test_fold_counts_a_path_that_comes_twice():
    assert fold_text(["mlp", "mlp", ""]) == "mlp x2, (root)"


def test_fold_text_says_how_many_it_left_out():
    assert fold_text(["a", "b", "c"], limit=1) == "a and 2 more"


@given(st.lists(st.lists(st.sampled_from(["h", "ln", "0", "1", "12"]), min_size=1).map(".".join)))
def test_fold_loses_no_path(paths):
    assert sum(fold(paths).values()) == len(paths)


def test_table_aligns_numbers_right_and_words_left():
    text = str(
        Table(("rule", "fired", "where"), (("glu", "12", "h"), ("softcap", "3", "a")), ("fired",))
    )
    assert text == "rule     fired  where\nglu         12  h\nsoftcap      3  a"


def test_table_wraps_its_last_column_under_itself():
    text = str(Table(("rule", "why"), (("glu", "word " * 40),)))
    lines = text.split("\n")
    assert all(len(line) <= WIDTH for line in lines)
    assert lines[2].startswith("      word")


def test_show_writes_no_escape_codes_into_a_pipe():
    out = io.StringIO()
    show("title", [Table(("rule",), (("glu",),))], file=out)
    assert out.getvalue() == "title\n\nrule\nglu\n"


def test_show_on_a_terminal_keeps_brackets():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    out = Terminal()
    show("bf16[8, 2]", [Table(("rule",), (("a[0]",),))], file=out)
    assert "bf16[8, 2]" in out.getvalue()
    assert "a[0]" in out.getvalue()


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (-1536, "-1.5 KiB"), (2**42, "4.0 TiB")],
)
def test_size_units(count, text):
    assert size(count) == text


def test_by_rule_sums_and_puts_the_greatest_saving_first():
    rewrites = [rewrite("glu", "h.0.mlp", 10), rewrite("add_ln", "h.0.ln", 900)]
    rewrites += [rewrite("add_ln", "h.1.ln", 900)]
    rows = by_rule(rewrites, [refusal("bias_act", "h.0.mlp")])
    assert [(r.rule, r.fired, r.refused, r.bytes_saved, r.where) for r in rows] == [
        ("add_ln", 2, 0, 1800, "h.*.ln x2"),
        ("glu", 1, 0, 10, "h.0.mlp"),
        ("bias_act", 0, 1, 0, ""),
    ]


def test_by_rule_names_the_whole_graph_for_global_rewrites():
    (row,) = by_rule([rewrite("dead_code", "", kind="global")], [])
    assert row.where == "whole graph"


def test_by_reason_groups_repeated_blocks_and_puts_the_nearest_miss_first():
    refusals = [refusal("glu", f"h.{i}.mlp", "other dtype", matched=1) for i in range(12)]
    rows = by_reason([*refusals, refusal("bias_act", "h.3.mlp")])
    assert [(r.rule, r.count, r.where, r.line) for r in rows] == [
        ("bias_act", 1, "h.3.mlp", "gpt.py:7"),
        ("glu", 12, "h.*.mlp x12", "gpt.py:7"),
    ]


@pytest.mark.parametrize(
    ("reasons", "shown"),
    [
        (("used by add (aten.add)", "used by add_3 (aten.add)"), "used by add_* (aten.add)"),
        (("found aten.mul (mul)", "found aten.mul (mul_17)"), "found aten.mul (mul_*)"),
        (("h_0_w is 3", "h_1_w is 3"), "h_*_w is 3"),
        (("over dim 1",), "over dim 1"),
        (("used by add_3 (aten.add)",), "used by add_3 (aten.add)"),
    ],
)
def test_by_reason_folds_node_names_of_repeated_blocks(reasons, shown):
    rows = by_reason([refusal("glu", f"h.{i}", reason) for i, reason in enumerate(reasons)])
    assert [row.reason for row in rows] == [shown]


def test_line_of_a_site_without_a_file_is_empty():
    assert line_of(Site("mlp")) == ""


def test_rule_table_text():
    rows = by_rule([rewrite("add_ln", f"h.{i}.ln", 2**20) for i in range(3)], [])
    assert str(rule_table(rows)) == (
        "rule    fired  refused  bytes saved  where\nadd_ln      3        0      3.0 MiB  h.*.ln x3"
    )


def test_reason_table_text():
    assert str(reason_table(by_reason([refusal("bias_act", "mlp")]))) == (
        "not fused  ops  times  line      where\n"
        "bias_act   2/3      1  gpt.py:7  mlp\n"
        "    the sum is used elsewhere"
    )


def check(rule, module, ratio, status="right", kind="local"):
    error = TensorError(
        name="output/0",
        dtype="float32",
        shape=(2,),
        eager=1e-7,
        optimized=ratio * 1e-7,
        difference=0.0,
        max_eager=1e-7,
        max_optimized=1e-7,
        ratio=ratio,
        step_scale=False,
        verdict="ok",
    )
    site = Site(module, "LayerNorm", "models/gpt.py", 41, "h = self.ln_1(x)")
    comparison = Comparison((error,), ratio)
    reason = "" if status == "right" else "they differ by 0.1 in float64"
    return Check(0, rule, "fusion", kind, site, status, reason, 2e-16, comparison)


def test_proof_table_shows_the_worst_of_each_rule():
    checks = (check("glu", "h.0.mlp", 0.5), check("glu", "h.1.mlp", 1.5))
    text = str(proof_table(VerifyResult(checks, check("the whole step", "", 1.0, kind="whole"))))
    assert text == (
        "rule             right    eager  graphopt  ratio  float64  where\n"
        "glu             2 of 2  1.0e-07   1.5e-07   1.50    2e-16  h.*.mlp x2\n"
        "the whole step  1 of 1  1.0e-07   1.0e-07   1.00    2e-16  whole graph"
    )


def test_proof_text_names_what_is_wrong():
    bad = check("glu", "h.1.mlp", 9.0, "wrong")
    result = VerifyResult((bad,), check("the whole step", "", 1.0, kind="whole"))
    text = proof_text(result)
    assert text == "wrong: glu at h.1.mlp gpt.py:41: they differ by 0.1 in float64"


def test_proof_text_of_a_good_result_counts_the_rewrites():
    result = VerifyResult((check("glu", "mlp", 1.0),), check("the whole step", "", 1.0))
    assert proof_text(result).startswith("1 rewrites: each one and the whole step keep")
