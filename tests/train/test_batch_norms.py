"""Norms in training mode: by the batch, whose statistics move the running ones."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import graphgen as gg
from graphgen import nn, ops
from graphgen.commands import main
from graphgen.errors import GraphgenError
from graphgen.export import checkpoint_data
from graphgen.export.checkpoint import Checkpoint
from graphgen.graph import TORCH_CALL
from graphgen.nn.module import zeros
from graphgen.passes.training.batch_norms import MOMENTUM, UNBIASED
from graphgen.train.parallel import Processes
from graphgen.train.web import write_web

RNG = np.random.default_rng(0)
WEIGHTS = {
    "up": RNG.normal(size=(3, 4)).astype(np.float32),
    "scale": np.float32([1.0, 0.5, 2.0, 1.5]),
    "bias": np.float32([0.1, 0.2, 0.3, 0.4]),
    "mean": np.float32([0.5, 0.0, -0.5, 1.0]),
    "var": np.float32([1.0, 2.0, 0.5, 1.0]),
    "down": RNG.normal(size=(4, 2)).astype(np.float32),
}
BATCHES = [
    {
        "x": RNG.normal(size=(5, 3)).astype(np.float32),
        "labels": RNG.normal(size=(5, 2)).astype(np.float32),
    }
    for _ in range(4)
]
KEPT, EPSILON = 0.75, 1e-3


def norm_file(path: Path, *, noted: bool = False, twice: bool = False) -> Path:
    """y = down(norm(up(x))), in training mode in the file, or noted as one of torch."""
    names = ["scale", "bias", "mean", "var"]
    how: dict[str, Any] = {"momentum": KEPT, "epsilon": EPSILON}
    outputs = ["n"] if noted else ["n", "mean_out", "var_out"]
    norm = helper.make_node(
        "BatchNormalization", ["h", *names], outputs, training_mode=int(not noted), **how
    )
    nodes = [helper.make_node("MatMul", ["x", "up"], ["h"]), norm]
    if noted:
        for key, value in ((MOMENTUM, str(1 - KEPT)), (UNBIASED, "1")):
            norm.metadata_props.add(key=key, value=value)
    if twice:
        again = onnx.NodeProto()
        again.CopyFrom(norm)
        again.input[0], again.output[0] = "n", "m"
        if noted:  # dynamo's exporter of torch writes what the first call leaves as a copy
            again.input[3:] = ["mean_copy", "var_copy"]
            nodes += [helper.make_node("Identity", [n], [f"{n}_copy"]) for n in ("mean", "var")]
        nodes.append(again)
    nodes.append(helper.make_node("MatMul", ["m" if twice else "n", "down"], ["y"]))
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "g",
        [value("x", TensorProto.FLOAT, ["n", 3])],
        [value("y", TensorProto.FLOAT, ["n", 2])],
        [numpy_helper.from_array(array, name) for name, array in WEIGHTS.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.save(model, path)
    return path


def made(path: Path, **options: Any) -> gg.Trainer:
    """A trainer of the file, by plain gradients."""
    options = {"loss": "mse", "optimizer": gg.SGD(), "profile": "stock"} | options
    gg.artifacts(path, path.with_suffix(""), **options)
    return gg.Trainer(path.with_suffix(""), schedule=gg.schedule.constant(0.1), threads=1)


def loss_of(weights: dict[str, Any], batch: dict[str, Any]) -> tuple[float, Any, Any]:
    """The loss by the batch, its mean and its variance, in float64."""
    w = {name: np.asarray(array, np.float64) for name, array in weights.items()}
    h = batch["x"] @ w["up"]
    mean, var = h.mean(0), h.var(0)
    n = (h - mean) / np.sqrt(var + EPSILON) * w["scale"] + w["bias"]
    return float(((n @ w["down"] - batch["labels"]) ** 2).mean()), mean, var


class Declared(nn.Module):
    """The same model, declared here."""

    def __init__(self) -> None:
        for name, array in WEIGHTS.items():
            setattr(self, name, nn.Parameter(array.shape, initialize=zeros))

    def __call__(self, x: Any) -> Any:
        own: Any = self
        weights = own.scale, own.bias, own.mean, own.var
        how: dict[str, Any] = {"momentum": KEPT, "epsilon": EPSILON, "training_mode": 1}
        n = ops.batch_normalization(ops.matmul(x, own.up), *weights, **how)
        return {"y": ops.matmul(n, own.down)}


def test_the_norm_of_a_declared_model_is_that_of_the_file(tmp_path: Path) -> None:
    found = []
    for path in (norm_file(tmp_path / "m.onnx"), tmp_path / "declared.onnx"):
        if not path.exists():
            gg.export(gg.build(Declared(), weights=WEIGHTS, x=gg.float32["n", 3]), path)
        [y] = gg.Session(gg.optimize(gg.load(path)), threads=1)(x=BATCHES[0]["x"])
        trainer = made(path)
        losses = [line["loss"] for line in trainer.fit(BATCHES, progress=False)]
        found.append((y, losses, *(trainer.parameters[name] for name in WEIGHTS)))
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


@pytest.mark.parametrize("noted", [False, True])
def test_a_step_is_by_the_batch_and_moves_the_statistics(tmp_path: Path, noted: bool) -> None:
    """Gradients by central differences; the variance is the batch's, or as torch's unbiased."""
    profile = "official" if noted else "stock"
    trainer = made(norm_file(tmp_path / "m.onnx", noted=noted), profile=profile)
    before = trainer.parameters
    [line] = trainer.fit(BATCHES[:1], progress=False)
    loss, mean, var = loss_of(WEIGHTS, BATCHES[0])
    assert line["loss"] == pytest.approx(loss, rel=1e-5)
    var = var * 5 / 4 if noted else var
    after = trainer.parameters
    for name, new in (("mean", mean), ("var", var)):
        np.testing.assert_allclose(
            after[name], KEPT * WEIGHTS[name] + (1 - KEPT) * new, rtol=1e-5, atol=1e-6
        )
    for name, place in (("up", (1, 2)), ("scale", (2,)), ("bias", (0,)), ("down", (3, 1))):
        moved = []
        for by in (1e-4, -1e-4):
            changed = {n: np.array(x, np.float64) for n, x in WEIGHTS.items()}
            changed[name][place] += by
            moved.append(loss_of(changed, BATCHES[0])[0])
        gradient = (before[name] - after[name])[place] / 0.1
        assert gradient == pytest.approx((moved[0] - moved[1]) / 2e-4, rel=1e-3, abs=1e-4)


def test_evaluation_and_export_use_the_running_statistics(tmp_path: Path) -> None:
    path = norm_file(tmp_path / "m.onnx")
    trainer = made(path)
    trainer.fit(BATCHES, progress=False)
    w, x = trainer.parameters, BATCHES[0]["x"]
    n = (x @ w["up"] - w["mean"]) / np.sqrt(w["var"] + EPSILON) * w["scale"] + w["bias"]
    wanted = n @ w["down"]
    np.testing.assert_allclose(trainer.predict(BATCHES[:1])["y"], wanted, rtol=1e-4, atol=1e-5)
    out = trainer.export(path, tmp_path / "out.onnx")
    [given] = gg.Session(out, threads=1)({"x": x})
    np.testing.assert_allclose(given, wanted, rtol=1e-4, atol=1e-5)
    loss = float(((wanted - BATCHES[0]["labels"]) ** 2).mean())
    assert trainer.evaluate(BATCHES[:1]) == pytest.approx(loss, rel=1e-4)


def test_a_resumed_run_has_the_statistics_of_one_that_never_stopped(tmp_path: Path) -> None:
    path = norm_file(tmp_path / "m.onnx")
    whole = made(path)
    whole.fit(BATCHES, steps=4, progress=False)
    made(path).fit(BATCHES, steps=2, checkpoint=tmp_path / "run", progress=False)
    saved = Checkpoint.load(tmp_path / "run" / "checkpoint")
    assert not np.array_equal(saved.frozen["mean"], WEIGHTS["mean"])
    again = made(path)
    again.fit(BATCHES, steps=4, checkpoint=tmp_path / "run", resume=True, progress=False)
    for name, array in whole.parameters.items():
        np.testing.assert_array_equal(again.parameters[name], array, name)
    session = gg.TrainingSession(path.with_suffix(""), threads=1)
    for batch in BATCHES:
        session.train_step(batch)
        session.optimizer_step()
        session.lazy_reset_grad()
    assert not np.array_equal(session.parameters["var"], WEIGHTS["var"])


@pytest.mark.parametrize("linked", [True, False])
def test_what_no_step_changes_is_written_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, linked: bool
) -> None:
    """A frozen weight, but no statistic. On a disk without links, each state has its own copy."""
    monkeypatch.setattr(checkpoint_data, "_SMALL", 0)
    monkeypatch.setattr(checkpoint_data, "_APART", 0)
    if not linked:
        monkeypatch.setattr(checkpoint_data.os, "link", lambda *_: (_ for _ in ()).throw(OSError))
    path = norm_file(tmp_path / "m.onnx")
    options: dict[str, Any] = {"save_every": 1, "keep": 2, "evaluate": BATCHES[:1]}
    options |= {"evaluate_every": 1, "progress": False}
    made(path, frozen=["up"]).fit(BATCHES, steps=4, checkpoint=tmp_path / "whole", **options)
    cut = tmp_path / "cut"
    made(path, frozen=["up"]).fit(BATCHES, steps=2, checkpoint=cut, **options)
    trainer = made(path, frozen=["up"])
    trainer.fit(BATCHES, steps=4, checkpoint=cut, resume=True, **options)
    places = [".", "best", "step-3", "step-4"]
    for place in places:
        own = [tmp_path / run / place / "checkpoint.data" for run in ("whole", "cut")]
        assert [file.read_bytes() for file in own] == [WEIGHTS["up"].tobytes()] * 2
        one, other = (file.with_suffix("").read_bytes() for file in own)
        assert one == other and WEIGHTS["down"].tobytes() not in one
        saved = Checkpoint.load(own[0].with_suffix(""))
        np.testing.assert_array_equal(saved.frozen["up"], WEIGHTS["up"])
    np.testing.assert_array_equal(saved.frozen["mean"], trainer.parameters["mean"])
    for run in ("whole", "cut"):
        files = {(tmp_path / run / place / "checkpoint.data").stat().st_ino for place in places}
        assert len(files) == (1 if linked else len(places))
    assert [*tmp_path.rglob("*.partial")] == []


def test_several_batches_of_an_update_move_them_in_turn_and_so_does_a_norm_used_twice(
    tmp_path: Path,
) -> None:
    trainer = made(norm_file(tmp_path / "m.onnx"), accumulate=2, recompute="full")
    trainer.fit(BATCHES[:2], progress=False)
    wanted = WEIGHTS["mean"]
    for batch in BATCHES[:2]:
        wanted = KEPT * wanted + (1 - KEPT) * loss_of(WEIGHTS, batch)[1]
    np.testing.assert_allclose(trainer.parameters["mean"], wanted, rtol=1e-5, atol=1e-6)
    trainer = made(norm_file(tmp_path / "two.onnx", noted=True, twice=True))
    trainer.fit(BATCHES[:1], progress=False)
    once = KEPT * WEIGHTS["mean"] + (1 - KEPT) * loss_of(WEIGHTS, BATCHES[0])[1]
    wanted = KEPT * once + (1 - KEPT) * WEIGHTS["bias"]  # the mean of what the first norm gave
    np.testing.assert_allclose(trainer.parameters["mean"], wanted, rtol=1e-5, atol=1e-6)


def test_a_step_that_fails_leaves_the_statistics(tmp_path: Path) -> None:
    trainer = made(norm_file(tmp_path / "m.onnx", noted=True), accumulate=2)
    one = {name: array[:1] for name, array in BATCHES[0].items()}
    for bad, problem in (
        (one, "the norm needs more than one value per channel"),
        (BATCHES[0] | {"x": np.full((5, 3), np.inf, np.float32)}, "is (nan|inf)"),
    ):
        with pytest.raises(GraphgenError, match=problem):
            trainer.fit([BATCHES[0], bad], progress=False)
        np.testing.assert_array_equal(trainer.parameters["mean"], WEIGHTS["mean"])


def test_what_cannot_be_moved_is_refused(tmp_path: Path, capsys: Any) -> None:
    path = norm_file(tmp_path / "m.onnx")
    trainer = made(path)
    assert repr(trainer).count("frozen") == 1
    command = ["artifacts", str(path), "-o", str(tmp_path / "official"), "--loss", "mse"]
    assert main(command) == 0
    model = onnx.load(norm_file(path, twice=True))
    del model.graph.node[2].output[1:], model.graph.node[2].attribute[:]  # in evaluation mode
    onnx.save(model, path)
    assert main(command) == 2
    assert "each batch moves mean, which something else reads, too" in capsys.readouterr().err
    model = onnx.load(norm_file(path, noted=True, twice=True))
    model.graph.node.insert(4, helper.make_node("Add", ["n", "mean_copy"], ["read"]))
    model.graph.node[5].input[0] = "read"
    onnx.save(model, path)
    with pytest.raises(GraphgenError, match="reads a running statistic after a norm in training"):
        made(path)
    norm_file(path)
    for options, problem in (
        ({"trainable": ["up", "mean"]}, "mean is moved by each batch, .*: no gradient may"),
        ({"trainable": "mean"}, "mean is moved by each batch"),
    ):
        with pytest.raises(GraphgenError, match=problem):
            made(path, **options)
    with pytest.raises(GraphgenError, match="each batch moves mean, which the loop in a browser"):
        write_web(path.with_suffix(""), tmp_path / "web")

    class Two(Processes):
        size = 2

    with pytest.raises(GraphgenError, match="each batch moves mean, and 2 processes have diff"):
        gg.Trainer(path.with_suffix(""), processes=Two())
    model = onnx.load(path)
    model.graph.output.append(helper.make_tensor_value_info("mean_out", TensorProto.FLOAT, [4]))
    onnx.save(model, path)
    with pytest.raises(GraphgenError, match="its running statistics are outputs of the graph"):
        made(path)
    model.graph.output.pop()
    model.graph.node[1].input[3] = "other"
    model.graph.node.insert(0, helper.make_node("Abs", ["mean"], ["other"]))
    onnx.save(model, path)
    with pytest.raises(GraphgenError, match="is in training mode, and its running stat"):
        made(path)


def called(path: Path, call: str, *, folded: bool = False) -> Path:
    """The file as dynamo writes a norm in training mode: as in evaluation, beside its call."""
    model = onnx.load(norm_file(path, noted=True))
    node = model.graph.node[1]
    del node.metadata_props[:]
    node = model.graph.node[0 if folded else 1]
    target = f"%n : call_function[target=torch.ops.aten.{call}, kwargs = {{}})"
    node.metadata_props.add(key=TORCH_CALL, value=target)
    onnx.save(model, path)
    return path


def losses_of(path: Path) -> list[float]:
    gg.artifacts(path, path.with_suffix(""), loss="mse", output="y")
    trainer = gg.Trainer(path.with_suffix(""), schedule=gg.schedule.constant(0.1), threads=1)
    return [line["loss"] for line in trainer.fit(BATCHES, progress=False)]


FUNCTIONAL = "_native_batch_norm_legit_functional.default](args = (%h, %s, %b, %m, %v, True, {})"


def test_a_call_of_torch_in_training_mode_uses_the_batch(tmp_path: Path) -> None:
    """Dynamo's exporter writes its norm as in evaluation; that was trained without a word."""
    noted = losses_of(norm_file(tmp_path / "noted.onnx", noted=True))
    kept = losses_of(called(tmp_path / "eval.onnx", "batch_norm.default](args = (%h, False, 0.25"))
    for name, call in {
        "functional": FUNCTIONAL.format("0.25, 0.001"),
        "whole": "batch_norm.default](args = (%h, %s, %b, %m, %v, True, 0.25, 1e-03, True)",
    }.items():
        assert losses_of(called(tmp_path / f"{name}.onnx", call)) == noted != kept


def test_a_training_norm_that_an_exporter_dropped_is_refused(tmp_path: Path) -> None:
    path = called(tmp_path / "folded.onnx", FUNCTIONAL.format("0.25, 0.001"), folded=True)
    with pytest.raises(GraphgenError, match="folded a norm in training mode into it"):
        gg.artifacts(path, tmp_path / "art", loss="mse", output="y")
    call = "_native_batch_norm_legit.no_stats](args = (%h, %s, %b, True, 0.1, 1e-05)"
    with pytest.raises(GraphgenError, match="make it with track_running_stats=True"):
        gg.artifacts(called(tmp_path / "m.onnx", call), tmp_path / "art", loss="mse", output="y")


def test_a_norm_without_running_statistics_uses_the_batch(tmp_path: Path) -> None:
    """Its statistics are calculated in the file, in evaluation, too."""
    found = []
    legit = "_native_batch_norm_legit.no_stats](args = (%h, None, None, True, 0.1, 1e-3)"
    for noted, call in ((True, f"torch.ops.aten.{legit}"), (False, "")):
        model = onnx.load(norm_file(tmp_path / "m.onnx", noted=noted))
        nodes = [*model.graph.node]
        for name in ("mean", "var"):
            axes = numpy_helper.from_array(np.array([0]), f"axes_{name}")
            model.graph.initializer.append(axes)
        parts = [
            helper.make_node("ReduceMean", ["h", "axes_mean"], ["mu"], keepdims=0),
            helper.make_node("Sub", ["h", "mu"], ["d"]),
            helper.make_node("Mul", ["d", "d"], ["dd"]),
            helper.make_node("ReduceMean", ["dd", "axes_var"], ["s"], keepdims=0),
        ]
        nodes[1].input[3:] = ["mu", "s"]
        del nodes[1].metadata_props[:], model.graph.node[:]
        nodes[1].metadata_props.add(key=TORCH_CALL, value=call)
        model.graph.node.extend([nodes[0], *parts, *nodes[1:]])
        onnx.save(model, tmp_path / "m.onnx")
        trainer = made(tmp_path / "m.onnx")
        [line] = trainer.fit(BATCHES[:1], progress=False)
        assert line["loss"] == pytest.approx(loss_of(WEIGHTS, BATCHES[0])[0], rel=1e-5)
        after = trainer.parameters
        wanted = loss_of(WEIGHTS | after, BATCHES[0])[0]
        assert trainer.evaluate(BATCHES[:1]) == pytest.approx(wanted, rel=1e-5)
        found.append(after)
    for name in ("up", "scale", "bias", "down"):
        np.testing.assert_allclose(found[0][name], found[1][name], rtol=1e-5)


def test_norms_of_torchscript_move_as_in_torch(tmp_path: Path) -> None:
    """Its file of momentum=None has a momentum of 0: the last batch, where torch has the mean."""
    model = onnx.load(norm_file(tmp_path / "m.onnx"))
    model.producer_name = "pytorch"
    onnx.save(model, tmp_path / "m.onnx")
    trainer = made(tmp_path / "m.onnx")
    trainer.fit(BATCHES[:1], progress=False)
    var = KEPT * WEIGHTS["var"] + (1 - KEPT) * loss_of(WEIGHTS, BATCHES[0])[2] * 5 / 4
    np.testing.assert_allclose(trainer.parameters["var"], var, rtol=1e-5)
    [momentum] = [x for x in model.graph.node[1].attribute if x.name == "momentum"]
    momentum.f = 0.0
    onnx.save(model, tmp_path / "m.onnx")
    with pytest.raises(GraphgenError, match="as torch's exporter also writes momentum=None"):
        made(tmp_path / "m.onnx")


def test_instance_norms_with_running_statistics_are_refused_in_training(tmp_path: Path) -> None:
    call = "instance_norm.default](args = (%h, None, None, %b_m, %b_v, True, 0.1, 1e-05, False)"
    with pytest.raises(GraphgenError, match="an instance norm with running statistics in training"):
        made(called(tmp_path / "m.onnx", call))
    model = onnx.load(norm_file(tmp_path / "m.onnx"))
    model.graph.node[1].output.extend(["a", "b"])  # as TorchScript's exporter writes one
    onnx.save(model, tmp_path / "m.onnx")
    with pytest.raises(GraphgenError, match=r"instance norms .* in training mode, and no run"):
        gg.load(tmp_path / "m.onnx")
