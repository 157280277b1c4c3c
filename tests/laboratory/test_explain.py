"""`explain`: every candidate of a pass, with its place, its reason and its line."""

import json
from pathlib import Path

import jsonschema
import onnx_ir as ir
import pytest
from small_models import block

import graphgen as gg
from graphgen import commands, explain, nn
from graphgen.errors import GraphgenError

DOCS = Path(__file__).parents[2] / "docs"


class Layers(nn.Module):
    """Attention by hand, in layers: the last has its softmax along the queries."""

    def __init__(self, count: int, *, wrong: bool = True):
        self.layers = [Scores(wrong=wrong and i == count - 1) for i in range(count)]

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Scores(nn.Module):
    def __init__(self, *, wrong: bool):
        self.wrong = wrong

    def __call__(self, x):
        scores = x @ gg.ops.swap_last(x) * 0.125
        return gg.ops.softmax(scores, axis=-2 if self.wrong else -1) @ x


def layers(count: int, **options: bool) -> ir.Model:
    return gg.build(Layers(count, **options), primitives=True, x=gg.float32["b", 4, "t", 16])


def test_every_candidate_is_told_with_its_reason() -> None:
    model = layers(3)
    for node in model.graph:
        node.metadata_props["pkg.torch.onnx.stack_trace"] = 'File "m.py", line 7, in f\n    y = x'
    found = explain(model, "fuse_attention")
    assert [(s.where, s.status) for s in found.sites] == [
        ("layers.0", "fired"),
        ("layers.1", "fired"),
        ("layers.2", "missed"),
    ]
    assert [s.number is None for s in found.sites] == [False, False, True]
    told = found.to_json()["sites"]
    assert {s["operator"] for s in told} == {"MatMul"} and found.tried == {"MatMul": 6}
    assert {s["source"] for s in told} == {"m.py:7: y = x"}
    text = str(found).splitlines()
    assert text[0].startswith("fuse_attention for cpu (onnxruntime ")
    assert text[0].endswith("): 2 fired, 1 missed, 0 refused")
    assert text[3] == f"missed, 1: {found.sites[2].reason}"
    assert text[4].startswith("  layers.2  MatMul  ")
    assert text[5] == "      m.py:7: y = x"


def test_the_numbers_are_those_of_optimize() -> None:
    found = explain(layers(2, wrong=False), "fuse_attention")
    last = max(s.number or 0 for s in found.sites)
    for stop, count in ((last, 2), (last - 1, 1)):
        best = gg.optimize(layers(2, wrong=False), stop_after=stop)
        assert best.report.ops_after.get("Attention", 0) == count


def test_where_chooses_a_module_or_a_part_of_a_name() -> None:
    model = layers(11)
    assert len(explain(model, "fuse_attention", "layers").sites) == 11
    assert [s.where for s in explain(model, "fuse_attention", "layers.1").sites] == ["layers.1"]
    assert [s.where for s in explain(model, "fuse_attention", "s.10").sites] == ["layers.10"]
    assert [s.where for s in explain(model, "fuse_attention", "1").sites] == ["layers.1"]
    with pytest.raises(GraphgenError) as told:
        explain(model, "fuse_attention", "blocks.0")
    assert str(told.value).partition(" (test_")[0] == (
        "explain: fuse_attention has no candidate at 'blocks.0'; it has "
        + ", ".join(f"layers.{i}" for i in range(10))
        + " and 1 more"
    )
    with pytest.raises(GraphgenError, match="at 'x'; it has none at all"):
        explain(block(), "fuse_rotary", "x")


def test_equal_sites_are_a_line_each_only_up_to_ten() -> None:
    many = explain(layers(12), "fuse_attention")
    assert "  and 8 more; text(every=True) lists them" in str(many).splitlines()
    assert "  and 8 more; --all lists them" in many.text(command=True).splitlines()
    assert str(many).count("layers.") == 4
    assert many.text(every=True).count("layers.") == 12
    assert str(explain(layers(10, wrong=False), "fuse_attention")).count("layers.") == 10


def test_a_pass_without_candidates_says_where_it_looked() -> None:
    found = explain(gg.build(lambda x: x @ x, x=gg.float32[4, 4]), "fuse_attention")
    assert str(found).endswith("0 fired, 0 missed, 0 refused\nlooked at 1 MatMul")
    assert "looked at the whole graph" in str(explain(block(), "clean"))


@pytest.mark.share(3)
@pytest.mark.parametrize("name", gg.passes.PIPELINE)
def test_every_pass_can_be_explained(name: str) -> None:
    found = explain(block(), name).to_json()
    schema = json.loads((DOCS / "explain.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(json.loads(json.dumps(found)), schema)
    assert found["pass"] == name


def test_a_site_that_verification_rolls_back_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphgen.passes.compare", lambda *_, **__: "relative RMS 1 (bound 0)")
    found = explain(block(), "fuse_norm", verify=True)
    assert {(s.status, s.reason) for s in found.sites} == {("missed", "relative RMS 1 (bound 0)")}


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(tmp_path / "m.onnx")
    gg.export(layers(12), file)
    command = ["explain", file, "--pass", "fuse_attention"]
    assert commands.main([*command, "--dim", "b=2", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["sites"]) == 12
    assert commands.main([*command, "--all"]) == 0
    assert capsys.readouterr().out.count("layers.") == 12
    for more, told in (
        (["--where", "blocks"], "explain: fuse_attention has no candidate at 'blocks'; it has"),
        (["--pass", "fuse_atention"], "there is no pass 'fuse_atention'; there are"),
        (["--target", "tpu"], "targets: target is 'tpu'; choose"),
    ):
        assert commands.main([*command, *more]) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith(f"graphgen: {told}")
