"""What torch gives no gradient has none here: what it detaches, and the row that pads."""

from pathlib import Path

import numpy as np
import onnx
import pytest

import graphgen as gg
from graphgen.graph import HELD
from graphgen.models.published import from_folder


@pytest.mark.parametrize("held", [False, True])
def test_no_gradient_reaches_what_is_held(tmp_path, held):
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 18]>
        g (int64[n] i, float[n, 2] x) => (float[n, 2] y) <float[3, 2] w, float[2, 2] v> {
            e = Gather (w, i) h = MatMul (x, v) d = Identity (h) s = Mul (d, h) y = Add (e, s) }""")
    rng = np.random.default_rng(0)
    weights = {"w": rng.normal(size=(3, 2)), "v": rng.normal(size=(2, 2))}
    weights = {name: array.astype(np.float32) for name, array in weights.items()}
    del model.graph.initializer[:]
    for name, array in weights.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    for node, row in zip(model.graph.node, ["1", None, "", None, None], strict=True):
        if held and row is not None:
            entry = node.metadata_props.add()
            entry.key, entry.value = HELD, row
    onnx.save(model, tmp_path / "m.onnx")
    gg.artifacts(tmp_path / "m.onnx", tmp_path / "art", loss="mse")
    session = gg.TrainingSession(tmp_path / "art", threads=1)
    i, x = np.array([0, 1, 1, 2]), rng.normal(size=(4, 2)).astype(np.float32)
    t = rng.normal(size=(4, 2)).astype(np.float32)
    session.train_step(i, x, t)
    h = x @ weights["v"]
    g = 2 * (weights["w"][i] + h * h - t) / t.size
    wanted = np.zeros((3, 2), np.float32)
    np.add.at(wanted, i, g)
    wanted[1] *= not held
    np.testing.assert_allclose(session.gradients["w"], wanted, atol=1e-6)
    whole = x.T @ (g * h * (1 if held else 2))
    np.testing.assert_allclose(session.gradients["v"], whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "rows"), [("bert", {"encoder.embedding.weight": "0"}), ("t5", {})]
)
def test_the_row_that_pads_is_held_in_a_folder(kind, rows):
    """As the `padding_idx` of transformers' tables; T5's have none."""
    folder = Path(__file__).parents[1] / f"fixtures/{kind}_checkpoint"
    for model in from_folder(folder).models.values():
        found = [node for node in model.graph.all_nodes() if HELD in node.metadata_props]
        assert {str(n.inputs[0].name): n.metadata_props[HELD] for n in found} == rows
