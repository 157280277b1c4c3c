"""Dropout that files of other tools have, or had in training."""

import json

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import graphgen as gg
from graphgen.commands import main
from graphgen.errors import GraphgenError
from graphgen.export.torch_modules import from_function

X = np.random.default_rng(0).standard_normal((64, 32)).astype(np.float32)


def save(path, ratio=0.5, mode=True, kind="Dropout", mask=False):
    """y = dropout(x) w, as torch exports it in training mode, or an Identity in its place."""
    inputs = ["x", "ratio", "mode"] if kind == "Dropout" else ["x"]
    node = helper.make_node(kind, inputs, ["d", "mask"] if mask else ["d"], name="drop_1")
    entries = {
        "name_scopes": "['', 'block.drop', 'clone']",
        "class_hierarchy": "['M', 'torch.nn.modules.dropout.Dropout', 'aten.clone']",
    }
    for name, text in entries.items():
        entry = node.metadata_props.add()
        entry.key, entry.value = f"pkg.torch.onnx.{name}", text
    weights = {
        "w": np.eye(32, dtype=np.float32),
        "ratio": np.float32(ratio),
        "mode": np.array(mode),
    }
    outputs = {"y": TensorProto.FLOAT, **({"mask": TensorProto.BOOL} if mask else {})}
    graph = helper.make_graph(
        [node, helper.make_node("MatMul", ["d", "w"], ["y"], name="product")],
        "main",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 32])],
        [helper.make_tensor_value_info(n, t, ["n", 32]) for n, t in outputs.items()],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    opsets = [helper.make_opsetid("", 18)]
    model = helper.make_model(graph, opset_imports=opsets, producer_name="pytorch", ir_version=10)
    onnx.checker.check_model(model)
    onnx.save(model, path)
    return path


def zeroed(path, dropout=None, **options):
    """Two losses of training, the mean of y²: near 1 / (1 - p) where x is 1."""
    folder = path.with_suffix("")
    how = {"loss": "mse", "output": "y", "trainable": ["w"], "dropout": dropout, **options}
    gg.artifacts(path, folder, **how)
    trainer = gg.Trainer(folder, schedule=gg.schedule.constant(0.0), threads=1)
    batch = {"x": np.ones_like(X), "labels": np.zeros_like(X)}
    assert trainer.evaluate([batch]) == pytest.approx(1.0)
    return [line["loss"] for line in trainer.fit([batch] * 2, progress=False)]


def test_what_a_file_has_switched_on_is_taken(tmp_path):
    path = save(tmp_path / "m.onnx")
    first, second = zeroed(path)
    assert 1.8 < first < 2.2 and 1.8 < second < 2.2 and first != second
    assert zeroed(path) == [first, second]  # a function of seed and step
    assert zeroed(save(tmp_path / "none.onnx", ratio=0.0)) == [1.0, 1.0]
    assert zeroed(save(tmp_path / "off.onnx", mode=False)) == [1.0, 1.0]


def test_rates_are_declared_given_or_by_pattern(tmp_path):
    path = save(tmp_path / "m.onnx", mode=False)
    assert zeroed(path, "declared") == zeroed(path, 0.5) == zeroed(path, {"block": 0.5})
    assert 1.2 < zeroed(path, 0.25)[0] < 1.5
    assert zeroed(save(tmp_path / "identity.onnx", kind="Identity"), {"drop": 0.5})[0] > 1.8
    command = ["artifacts", str(path), "-o", str(tmp_path / "m"), "--loss", "mse", "--output", "y"]
    assert main([*command, "--dropout", "block:0.5"]) == 0
    assert main([*command, "--dropout", "0.1"]) == main([*command, "--dropout", "declared"]) == 0
    assert main([*command, "--dropout", "block"]) == 2


def test_what_cannot_be_dropped_is_refused(tmp_path):
    path = save(tmp_path / "identity.onnx", kind="Identity")
    for dropout, problem in (
        ("declared", "block.drop drops out at a rate that the file does not say"),
        ({"heads": 0.1}, "'heads' matches no module with dropout; there are block.drop"),
        ({"(": 0.1}, "is not a regular expression"),
        (1.0, "the dropout of block.drop is 1.0; it must be from 0, below 1"),
    ):
        with pytest.raises(GraphgenError, match=problem):
            zeroed(path, dropout)
    model = gg.build(gg.nn.Linear(4, 4), x=gg.float32["n", 4])
    with pytest.raises(GraphgenError, match="dropout= has no place in this graph"):
        gg.artifacts(model, tmp_path / "a", dropout=0.1)
    with pytest.raises(GraphgenError, match="Dropout: its mask is used"):
        zeroed(save(tmp_path / "mask.onnx", mask=True), loss=lambda y, mask: y.mean())


def test_the_inference_model_has_no_dropout(tmp_path):
    path = save(tmp_path / "m.onnx")
    zeroed(path)
    trainer = gg.Trainer(tmp_path / "m", threads=1)
    [y] = gg.Session(trainer.export(path, tmp_path / "out.onnx"))(x=X)
    np.testing.assert_allclose(y, X)


def test_what_import_refuses(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    with pytest.raises(GraphgenError, match=r"from_torch needs torch 2.6 or newer .*pip install"):
        gg.from_torch(json.dumps, ())
    for text, problem in (
        ("nothing_here:f", "ModuleNotFoundError"),
        ("json:dump_s", "json has no function 'dump_s'; did you mean 'dumps'"),
        ("time:time", "time:time returned float; it must return a module and its example inputs"),
        ("json:loads", "import json:loads: TypeError"),
    ):
        with pytest.raises(GraphgenError, match=problem):
            from_function(text)
    assert main(["import", "json:loads", "-o", str(tmp_path / "m.onnx")]) == 2
    assert capsys.readouterr().err.count("\n") == 1 and not [*tmp_path.iterdir()]
