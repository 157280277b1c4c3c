"""What a user expects of a result, and what is told where it falls short."""

import json
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
from small_models import block

import graphgen as gg
from graphgen import commands, ops
from graphgen.match import PassReport, Site
from graphgen.passes import Report, optimize, word_of, words_of


@pytest.mark.parametrize(
    ("operator", "word"),
    [
        ("Attention", "attention"),
        ("com.microsoft::MultiHeadAttention", "attention"),
        ("com.microsoft::GroupQueryAttention", "attention"),
        ("LayerNormalization", "layer_norm"),
        ("com.microsoft::SkipLayerNormalization", "layer_norm"),
        ("SimplifiedLayerNormalization", "rms_norm"),
        ("com.microsoft::SkipSimplifiedLayerNormalization", "rms_norm"),
        ("RMSNormalization", "rms_norm"),
        ("com.microsoft::FastGelu", "gelu"),
        ("com.microsoft::QuickGelu", "quick_gelu"),
        ("RotaryEmbedding", "rotary_embedding"),
        ("LogSoftmax", "log_softmax"),
        ("MatMul", "mat_mul"),
    ],
)
def test_every_spelling_counts_as_its_operator(operator: str, word: str) -> None:
    assert word_of(operator) == word


def test_words_come_from_the_table_of_operators() -> None:
    assert words_of("attention") == ("attention",)
    assert words_of("norm") == ("layer_norm", "rms_norm")
    for word in ("mat_mul", "cast", "Attention", ""):  # no fused operators, or none of that name
        with pytest.raises(gg.GraphgenError, match=r"choose from attention, .*gelu, .*norm, "):
            words_of(word)


def test_what_is_expected_and_there_passes() -> None:
    model = block(primitives=True)
    best = optimize(model, expect={"attention": 1, "layer_norm": 2, "norm": 2, "gelu": 1})
    assert best.report.unmet({"rms_norm": 0}) == []


def shared_weights() -> ir.Model:
    """Attention as primitives, whose weights are an output as well."""

    def both(q: Any, k: Any, v: Any) -> Any:
        weights = ops.softmax(ops.matmul(q, ops.transpose(k, perm=[0, 1, 3, 2])))
        return {"weights": weights, "y": ops.matmul(weights, v)}

    q, k = gg.float32["b", 4, "q", 8], gg.float32["b", 4, "k", 8]
    return gg.build(both, primitives=True, q=q, k=k, v=k)


def test_a_shortfall_tells_what_was_missed_and_why() -> None:
    model = block(primitives=True)
    with pytest.raises(gg.GateError) as error:
        optimize(model, expect={"attention": 1, "norm": 5, "gelu": 1})
    told = "norm: found 2, wanted 5 (no other candidate was seen)"
    assert f": {told} (test_expect.py:" in str(error.value)
    assert "attention" not in str(error.value)


def test_a_shortfall_gives_the_reasons_of_its_own_sites_only() -> None:
    report = Report("cpu", "1.31.1", ops_after={"LayerNormalization": 2})
    best = optimize(shared_weights())
    report.passes = best.report.passes
    [told] = report.unmet({"attention": 1})
    assert told.startswith("attention: found 0, wanted 1 (")
    assert "the result of Softmax is used elsewhere" in told
    assert "no other candidate" in report.unmet({"gelu": 1})[0]


def test_what_remarks_tell_is_not_told_twice() -> None:
    missed = [Site("missed", f"layers.{i}", f"reason {i}") for i in range(5)]
    report = Report("cpu", "1.31.1", [PassReport("fuse_attention", sites=missed)])
    assert report.reasons(["attention"])[2:] == ["layers.2: reason 2", "2 more reasons"]
    assert report.reasons(["attention"], inlined=True) == []
    best = optimize(block(primitives=False, norm="rms"), target="official")
    [told] = best.report.reasons(["rms_norm"], inlined=True)
    assert told.startswith("norm1 and 1 more: ") and told.endswith(": its body instead")


def test_bodies_on_the_target_are_told_as_the_reason() -> None:
    model = block(primitives=False, norm="rms")
    with pytest.raises(gg.GateError, match=r"^optimize for official \(onnxruntime 1.19.2\): ") as e:
        optimize(model, target="official", expect={"rms_norm": 2, "attention": 1})
    assert "rms_norm: found 0, wanted 2 (norm1 and 1 more: official" in str(e.value)
    assert "has no RMSNormalization: its body instead)" in str(e.value)


def test_an_unknown_word_is_told_before_the_work() -> None:
    with pytest.raises(gg.GraphgenError, match="'heads' is not a fused operator"):
        optimize(block(), expect={"heads": 1}, after_each=lambda *_: pytest.fail("it has begun"))


def test_the_command_writes_the_report_and_not_the_model(
    tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    gg.export(block(primitives=True), "in.onnx")
    command = "optimize in.onnx -o out.onnx --report report.json --expect norm=2".split()
    assert commands.main([*command, "--expect", "attention=2"]) == 3
    assert capsys.readouterr().err.startswith("graphgen: out.onnx is not written: attention: found")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.onnx", "report.json"]
    assert json.loads((tmp_path / "report.json").read_text())["ops_after"]["Attention"] == 1
    assert commands.main([*command, "--expect", "attention=1"]) == 0
    assert (tmp_path / "out.onnx").exists()
    for bad, told in (("heads=1", "choose from"), ("norm=1", "2 times"), ("norm", "NAME=INT")):
        assert commands.main([*command, "--expect", bad]) == 2
        assert told in capsys.readouterr().err


def test_the_command_takes_another_version(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    gg.export(block(primitives=True), "in.onnx")
    command = "optimize in.onnx -o out.onnx --json --runtime".split()
    assert commands.main([*command, "1.22"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["target"], told["runtime"]) == ("cpu", "1.22.1")
    assert told["ops_after"]["com.microsoft::MultiHeadAttention"] == 1
    assert commands.main([*command, "0.5"]) == 2
