"""Valid files of any origin: what the runtime runs is optimized, and means the same."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import parser

import graphgen as gg

CPU = ["CPUExecutionProvider"]
X = np.linspace(-3, 3, 12, dtype=np.float32)
OPTIONAL = """
<ir_version: 10, opset_import: ["" : 17]>
main (int32[1] x, bool flag) => (int32[1] y) {
   chosen = If (flag) <else_branch: graph = none () => (optional(int32[1]) empty) {
      empty = Optional <type: type_proto = int32[1]> ()
      other = Optional <type: type_proto = int32[1]> ()
   }, then_branch: graph = one () => (optional(int32[1]) full) {
      full = Optional (x)
   }>
   has = OptionalHasElement (chosen)
   y = If (has) <else_branch: graph = nothing () => (int32[1] zero) {
      zero = Constant <value: tensor = int32[1] {0}> ()
   }, then_branch: graph = something () => (int32[1] get) {
      get = OptionalGetElement (chosen)
   }>
}"""
SEQUENCE = """
<ir_version: 10, opset_import: ["" : 16]>
main (bool flag) => (optional(seq(float[3])) y) {
   y = If (flag) <else_branch: graph = some () => (optional(seq(float[3])) full) {
      x = Constant <value: tensor = float[3] {1, 2, 3}> ()
      list = SequenceConstruct (x)
      full = Optional (list)
   }, then_branch: graph = none () => (optional(seq(float[3])) empty) {
      empty = Optional <type: type_proto = seq(float[3])> ()
   }>
}"""
SPLIT = """
<ir_version: 10, opset_import: ["" : 13]>
main (float[3,4] x, int64 size) => (seq(float[3,n]) y) {
   y = SplitToSequence <axis: int = 1> (x, size)
}"""

NORMS = """
<ir_version: 7, opset_import: ["" : OPSET]>
main (float[n,4] x, float[4] scale, float[4] bias) => (float[n,4] y, float[n,1] mean) {
   normal, mean = LayerNormalization <epsilon: float = 0.01> (x, scale, bias)
   z = Clip (normal)
   simple = SimplifiedLayerNormalization <axis: int = -1> (z, scale)
   y = Softmax <axis: int = 1> (simple)
}"""


def optimized(model: onnx.ModelProto, path: Path) -> onnx.ModelProto:
    """The file that `optimize` makes of another."""
    onnx.save(model, path)
    return onnx.load(gg.export(gg.optimize(gg.load(path)), path))


def run(model: onnx.ModelProto, feeds: dict[str, Any], *, optimize: bool) -> list[Any]:
    options = ort.SessionOptions()
    if not optimize:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    results: list[Any] = ort.InferenceSession(model.SerializeToString(), options, CPU).run(
        None, feeds
    )
    return results


def check(text: str, path: Path, **feeds: Any) -> onnx.ModelProto:
    """The optimized model, which gives what the given one gives."""
    model = parser.parse_model(text)
    made = optimized(model, path / "model.onnx")
    wanted = run(model, feeds, optimize=False)
    for optimize in (False, True):
        for y, expected in zip(run(made, feeds, optimize=optimize), wanted, strict=True):
            np.testing.assert_equal(y, expected)
    return made


@pytest.mark.parametrize("flag", [True, False])
def test_attributes_may_be_types(tmp_path: Path, flag: bool) -> None:
    check(OPTIONAL, tmp_path, x=np.array([7], np.int32), flag=np.array(flag))
    made = check(SEQUENCE, tmp_path, flag=np.array(flag))
    assert made.opset_import[0].version == 16, "an If gives optional values from there on"


def test_a_sequence_may_be_split_at_run_time(tmp_path: Path) -> None:
    check(SPLIT, tmp_path, x=X.reshape(3, 4), size=np.array(3))


@pytest.mark.parametrize("opset", [12, 16])
def test_the_runtime_has_norms_before_onnx(tmp_path: Path, opset: int) -> None:
    """They stand in files that it has optimized; ONNX has LayerNormalization from 17 on."""
    scale, bias = X[:4], X[4:8]
    made = check(
        NORMS.replace("OPSET", str(opset)), tmp_path, x=X.reshape(3, 4), scale=scale, bias=bias
    )
    assert made.opset_import[0].version == 17
    assert [n.op_type for n in made.graph.node][:1] == ["LayerNormalization"]
