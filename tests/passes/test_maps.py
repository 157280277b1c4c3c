"""Maps (dictionaries) as inputs and outputs, as converters of scikit-learn and others write."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import parser
from small_models import run_plain

import graphgen as gg
from graphgen.commands import main
from graphgen.match import UNVERIFIED
from graphgen.measure.accuracy import differ

CLASSES = """
<ir_version: 8, opset_import: ["" : OPSET, "ai.onnx.ml" : 1]>
main (float[n,2] x) => (LABEL[n] label, seq(map(LABEL, float)) chances) {
   LOW
   kept = Clip (low)
   label, scores = ai.onnx.ml.LinearClassifier <
      CLASSES, coefficients: floats = [1.0, 2.0, -1.0, 0.5, 0.3, -3.0],
      intercepts: floats = [0.0, 0.1, 0.2], post_transform = "SOFTMAX"> (kept)
   same = Identity (scores)
   chances = ai.onnx.ml.ZipMap <KEYS> (same)
}"""
INTEGERS = {
    "LABEL": "int64",
    "CLASSES": "classlabels_ints: ints = [4, 7, 9]",
    "KEYS": "classlabels_int64s: ints = [4, 7, 9]",
}
TEXTS = {
    "LABEL": "string",
    "CLASSES": 'classlabels_strings: strings = ["a", "b", "c"]',
    "KEYS": 'classlabels_strings: strings = ["a", "b", "c"]',
}
WORDS = """
<ir_version: 8, opset_import: ["" : 12, "ai.onnx.ml" : 1]>
main (map(string, float) words) => (float[1,3] y) {
   found = ai.onnx.ml.DictVectorizer <string_vocabulary: strings = ["a", "b", "c"]> (words)
   same = Identity (found)
   y = Softmax <axis: int = 1> (same)
}"""
X = np.linspace(-2, 2, 10, dtype=np.float32).reshape(5, 2)


def classifier(opset: int, kinds: dict[str, str]) -> onnx.ModelProto:
    """Below opset 11 a Clip holds its bounds, so that onnx has to convert the graph."""
    low = "low = Clip <min: float = -1.0> (x)" if opset < 11 else "low = Abs (x)"
    text = CLASSES.replace("OPSET", str(opset)).replace("LOW", low)
    for name, written in kinds.items():
        text = text.replace(name, written)
    return parser.parse_model(text)


def types_of(model: onnx.ModelProto) -> dict[str, bytes]:
    return {v.name: v.type.SerializeToString() for v in (*model.graph.input, *model.graph.output)}


@pytest.mark.parametrize("opset", [9, 12, 21])
@pytest.mark.parametrize("kinds", [INTEGERS, TEXTS], ids=["int64", "string"])
def test_probabilities_by_class(tmp_path: Path, opset: int, kinds: dict[str, str]) -> None:
    given, path = classifier(opset, kinds), tmp_path / "m.onnx"
    onnx.save(given, path)
    best = gg.optimize(gg.load(path), target="cpu", verify=True)
    assert UNVERIFIED not in " ".join(best.report.remarks())
    made = onnx.load(gg.export(best, tmp_path / "best.onnx"))
    assert [node.op_type for node in made.graph.node].count("Identity") == 0
    assert types_of(made) == types_of(given)
    runs = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    labels, chances = runs.run(None, {"x": X})
    for found in (run_plain(best.model, {"x": X}), gg.Session(best)(x=X)):
        np.testing.assert_array_equal(found[0], labels)
        assert [list(row) for row in found[1]] == [list(row) for row in chances]
        for row, wanted in zip(found[1], chances, strict=True):
            np.testing.assert_allclose([*row.values()], [*wanted.values()], rtol=1e-6)


def test_a_map_of_words(tmp_path: Path) -> None:
    onnx.save(given := parser.parse_model(WORDS), path := tmp_path / "m.onnx")
    best = gg.optimize(gg.load(path), target="cpu")
    made = onnx.load(gg.export(best, tmp_path / "best.onnx"))
    assert types_of(made) == types_of(given)
    words: Any = {"c": 2.0, "a": -1.0, "z": 5.0}
    [wanted] = ort.InferenceSession(path, providers=["CPUExecutionProvider"]).run(
        None, {"words": words}
    )
    [found] = gg.Session(best)(words=words)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_what_cannot_be_invented_or_written_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    onnx.save(parser.parse_model(WORDS), words := tmp_path / "words.onnx")
    assert main(["optimize", str(words), "-o", str(tmp_path / "best.onnx"), "--verify"]) == 0
    assert UNVERIFIED in capsys.readouterr().out
    onnx.save(classifier(12, TEXTS), classes := tmp_path / "classes.onnx")
    np.save(tmp_path / "x.npy", X)
    assert main(["run", str(classes), "--input", f"x={tmp_path / 'x.npy'}"]) == 2
    assert "chances is a sequence or a map" in capsys.readouterr().err


def test_maps_differ_by_keys_and_by_values() -> None:
    maps = [{"a": 0.25, "b": 0.75}]
    assert differ([maps], [[{"a": 0.25, "b": 0.75}]]).max_abs == 0
    assert 0 < differ([maps], [[{"a": 0.2500001, "b": 0.75}]]).max_abs < 1e-6
    assert differ([maps], [[{"a": 0.25, "c": 0.75}]]).max_abs > 0
    assert differ([maps], [[{"a": 0.25, "b": 0.5}]]).max_abs > 0
