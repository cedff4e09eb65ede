"""report: what it holds, its JSON schema, its files; and what it says of refusals and leftovers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import graphopt
from graphopt.module import GraphoptModule
from graphopt.passes import rule
from graphopt.report import save as saving

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "report.schema.json").read_text())


class Block(nn.Module):
    """What is fused, what is refused, and what no rule has."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x + torch.relu(self.fc(x)))
        odd = nn.functional.layer_norm(h, h.shape[1:])  # two dims, which the kernel does not take
        return torch.cumsum(odd, -1)


class Blocks(nn.Sequential):
    """Three of them, <b>escaped</b>."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(*(Block() for _ in range(3)))


@pytest.fixture(scope="module")
def x() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(2, 3, 16)


@pytest.fixture(scope="module")
def opt(x: torch.Tensor) -> GraphoptModule:
    return graphopt.optimize(Blocks(), x)


@pytest.fixture(scope="module")
def proof(opt: GraphoptModule, x: torch.Tensor) -> Any:
    return graphopt.verify(opt, x)


def conforms(value: Any, schema: dict[str, Any], at: str = "$") -> None:
    """The keys and types of a value are just those of a schema (the part of JSON Schema used)."""
    if "$ref" in schema:
        schema = SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]]
    if "oneOf" in schema:
        schema = schema["oneOf"][0 if value is None else 1]
    if "const" in schema or "enum" in schema:
        assert value in schema.get("enum", [schema.get("const")]), at
        return
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    known = {
        "null": type(None), "string": str, "integer": int, "number": (int, float),
        "boolean": bool, "array": list, "object": dict,
    }  # fmt: skip
    assert any(isinstance(value, known[k]) for k in kinds), f"{at} is {value!r}, not {kinds}"
    if isinstance(value, dict) and "properties" in schema:
        assert sorted(value) == sorted(schema["properties"]), at
        assert sorted(schema["required"]) == sorted(schema["properties"]), at
        for key, item in value.items():
            conforms(item, schema["properties"][key], f"{at}.{key}")
    for i, item in enumerate(value if isinstance(value, list) else []):
        conforms(item, schema["items"], f"{at}[{i}]")


def test_json_is_what_the_schema_says(opt: GraphoptModule, proof: Any, x: torch.Tensor) -> None:
    with torch.no_grad():
        opt(x)  # another mode: a recapture
    data = json.loads(graphopt.report(opt, verify=proof).json())
    assert data["rewrites"]
    assert data["recaptures"]
    assert data["refusals"]
    conforms(data, SCHEMA)
    opt(x)
    conforms(json.loads(graphopt.report(opt).json()), SCHEMA)


def test_the_schema_names_its_version(opt: GraphoptModule) -> None:
    """A change of these keys is a new version: see `graphopt.report.summary.SCHEMA`."""
    assert graphopt.report(opt).to_dict()["schema"] == "graphopt.report/1"
    assert SCHEMA["properties"]["schema"] == {"const": "graphopt.report/1"}
    assert list(SCHEMA["properties"]) == [
        "schema", "graphopt", "model", "mode", "inputs", "totals", "precision", "memory",
        "rules", "modules", "rewrites", "kernels", "bytes_after_by_kind", "remaining", "refusals",
        "recaptures", "graphs", "verification", "seconds", "passes", "environment", "code",
    ]  # fmt: skip


def test_totals_are_those_of_the_records(opt: GraphoptModule) -> None:
    made = graphopt.report(opt)
    saved = made.totals.bytes_before - made.totals.bytes_after
    assert saved == sum(row.bytes_saved for row in made.rules)
    assert sum(row.fired for row in made.rules) == len(opt.rewrites)
    assert made.totals.bytes_after < made.totals.bytes_before
    # Three linears of 2 x 3 rows, 16 to 16, two per multiply-add.
    assert made.totals.flops_before == made.totals.flops_after == 3 * 2 * 6 * 16 * 16
    parts = made.shares
    assert parts.fused + parts.matrix + parts.other == made.totals.bytes_after


def test_equal_modules_are_one_row(opt: GraphoptModule) -> None:
    rows = {m.where: (m.count, m.rewrites) for m in graphopt.report(opt).modules}
    assert rows["*.norm"] == (3, 3)


def test_what_stayed_has_its_reason(opt: GraphoptModule) -> None:
    made = graphopt.report(opt)
    why = {row.op: (row.count, row.why) for row in made.remaining}
    assert why["aten.cumsum"] == (3, "no rule fuses it")
    assert "last 2 dims" in why["aten.layer_norm"][1]
    (refused,) = [row for row in made.refused if row.rule == "layer_norm"]
    assert (refused.count, refused.where) == (3, "* x3")
    assert refused.line.startswith("test_summary.py:")
    text = made.text()
    assert "no rule fuses it" in text
    assert refused.reason in " ".join(text.split())


def test_what_a_rule_could_end_in_names_what_it_follows() -> None:
    class Odd(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(torch.cumsum(x, 0))

    model = Odd()
    (row,) = [
        r for r in graphopt.report(graphopt.optimize(model, torch.ones(3, 4))).remaining
        if r.op == "aten.relu"
    ]  # fmt: skip
    assert row.why.startswith("fused only at the end of ")
    assert row.why.endswith("; here it follows aten.cumsum")


def test_each_rule_says_what_it_does_also_ones_own(x: torch.Tensor) -> None:
    @rule("fusion", register=False)
    def own_cumsum(x, dim):  # type: ignore[no-untyped-def]
        """A cumsum, made two."""
        return torch.ops.aten.cumsum.default(x, dim)

    @own_cumsum.replace
    def _(m: Any) -> Any:
        flat = m.call(torch.ops.aten.clone.default, m.x)
        return m.call(torch.ops.aten.cumsum.default, flat, m.dim)

    made = graphopt.report(graphopt.optimize(Blocks(), x, rules=["default", own_cumsum]))
    does = {row.rule: row.does for row in made.rules if row.fired}
    assert does["own_cumsum"] == "A cumsum, made two."
    assert all(does.values())
    assert "put there by own_cumsum" in {row.why for row in made.remaining}


def test_max_rewrites_is_a_reason(x: torch.Tensor) -> None:
    made = graphopt.report(graphopt.optimize(Blocks(), x, max_rewrites=1))
    assert {row.why for row in made.remaining} == {"max_rewrites=1 was reached"}


def test_is_it_right_is_answered(opt: GraphoptModule, proof: Any) -> None:
    assert "Yes: " in graphopt.report(opt, verify=proof).text()
    assert "Not checked in this report" in graphopt.report(opt).text()


def test_kernels_count_themselves(opt: GraphoptModule) -> None:
    made = graphopt.report(opt)
    rows = {k.op: k for k in made.kernels_used}
    norm = rows["graphopt.add_layer_norm"]
    # Two inputs and two outputs of 2 x 3 x 16 floats; weight and bias; mean and rstd of 6 rows.
    floats = 4 * 2 * 3 * 16 + 2 * 16 + 2 * 6
    assert norm.calls == 3
    assert norm.bytes_forward == 3 * 4 * floats
    assert norm.bytes_backward > norm.bytes_forward
    assert "graphopt.add_layer_norm      3" in made.text()


def test_kernels_are_counted_where_sizes_are_symbolic(x: torch.Tensor) -> None:
    fixed = graphopt.report(graphopt.optimize(Blocks(), x)).kernels_used
    assert graphopt.report(graphopt.optimize(Blocks(), x, dynamic=True)).kernels_used == fixed


def test_without_gradients_kernels_have_no_backward(x: torch.Tensor) -> None:
    with torch.no_grad():
        made = graphopt.report(graphopt.optimize(Blocks(), x))
    assert {k.bytes_backward for k in made.kernels_used} == {0}


def test_low_precision_and_its_casts_are_told(x: torch.Tensor) -> None:
    options: dict[str, Any] = {"precision": "bf16", "precision_overrides": {"0.fc": "fp32"}}
    made = graphopt.report(graphopt.optimize(Blocks(), x, **options))
    assert made.precision.ambient == "bfloat16"
    assert made.precision.weight_casts == 4  # weight and bias of two of three linears
    assert made.precision.weight_cast_bytes == 2 * (16 * 16 + 16) * (4 + 2)
    assert "Precision: bfloat16. A forward casts 4 weights" in made.text()
    conforms(json.loads(made.json()), SCHEMA)


def test_recaptures_are_told(x: torch.Tensor) -> None:
    opt = graphopt.optimize(nn.Linear(16, 4), x)
    opt(torch.randn(5, 7, 16))
    text = graphopt.report(opt).text()
    assert "Captured again:" in text
    assert "was (2, 3, 16), is (5, 7, 16)" in text
    assert "2 graphs are kept; this is the one in force, train." in text


def test_an_attached_model_is_reported_and_diffed(x: torch.Tensor) -> None:
    model = graphopt.attach(Blocks(), x)
    assert graphopt.report(model).model == "Blocks"
    assert graphopt.diff(model).model == "Blocks"


@pytest.mark.parametrize("suffix", [".txt", ".json", ".html"])
def test_the_suffix_decides_the_format(opt: GraphoptModule, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"report{suffix}"
    made = graphopt.report(opt, path)
    texts = {".txt": made.text(), ".json": made.json(), ".html": made.html()}
    assert path.read_text() == texts[suffix]
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_the_page_needs_no_network_and_escapes(x: torch.Tensor, tmp_path: Path) -> None:
    class Odd(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    Odd.__name__ = "<script>alert(1)</script>"
    made = graphopt.report(graphopt.optimize(Odd(), x))
    for page in (made.html(), made._repr_html_()):
        assert "<script" not in page
        assert "&lt;script&gt;" in page
        assert not [
            word for word in ("http:", "https:", "src=", "href=", "@import") if word in page
        ]


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("report.pdf", "'.pdf'"),
        ("report", "no suffix"),
        ("absent/report.html", "no folder"),
        (3, "path is of type int"),
        (".", "no suffix"),
    ],
)
def test_a_bad_path_is_told_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: Any, text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(graphopt.OptionError, match=text):
        graphopt.report("not looked at yet", path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_told_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(**kwargs: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(saving.tempfile, "mkstemp", denied)
    with pytest.raises(graphopt.OptionError, match="Permission denied"):
        graphopt.report("not looked at yet", tmp_path / "report.html")


def test_a_failed_write_leaves_what_was_there(
    opt: GraphoptModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.html"
    path.write_text("the old report")

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saving.os, "replace", full)
    with pytest.raises(graphopt.OptionError, match="No space left"):
        graphopt.report(opt, path)
    assert path.read_text() == "the old report"
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]


@pytest.mark.parametrize("function", [graphopt.report, graphopt.diff])
@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        (nn.Linear(2, 2), graphopt.OptionError, "takes an optimized module, not a Linear"),
        (nn.Linear, graphopt.OptionError, "not the class Linear"),
        (None, graphopt.OptionError, "not a NoneType"),
    ],
)
def test_something_else_than_an_optimized_module_is_told(
    function: Any, given: Any, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        function(given)


@pytest.mark.parametrize("function", [graphopt.report, graphopt.diff, graphopt.verify])
def test_graphopt_disable_is_told(monkeypatch: pytest.MonkeyPatch, function: Any) -> None:
    monkeypatch.setenv("GRAPHOPT_DISABLE", "1")
    with pytest.raises(graphopt.OptionError, match="GRAPHOPT_DISABLE is set"):
        function(graphopt.optimize(nn.Linear(2, 2), torch.ones(1, 2)))


def test_no_graph_yet_is_told() -> None:
    with pytest.raises(graphopt.GraphOptError, match="no graph yet"):
        graphopt.report(graphopt.optimize(nn.Linear(2, 2)))


def test_verify_takes_a_result_not_a_flag(opt: GraphoptModule) -> None:
    with pytest.raises(graphopt.OptionError, match="verify=graphopt"):
        graphopt.report(opt, verify=True)  # type: ignore[arg-type]
