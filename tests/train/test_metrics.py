"""Metrics over all predictions, the best by one of them, and what calls back."""

import csv
import json
import math
from importlib import import_module

import numpy as np
import pytest

import graphgen as gg
from graphgen import commands, nn, ops
from graphgen.errors import GraphgenError
from graphgen.export import checkpoint
from graphgen.export.checkpoint import Checkpoint
from graphgen.train import Trainer, metrics
from graphgen.train.callbacks import Callback, CsvLog, TensorBoard, Wandb


@pytest.fixture
def sklearn_metrics():
    """Imported here: it takes a second, which each process that only collects would spend, too."""
    return import_module("sklearn.metrics")


class Heads(nn.Module):
    def __init__(self):
        self.body, self.kinds, self.sizes = nn.Linear(4, 6), nn.Linear(6, 3), nn.Linear(6, 1)

    def __call__(self, x):
        h = ops.relu(self.body(x))
        return {"kinds": self.kinds(h), "sizes": self.sizes(h)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("metrics") / "art"
    model = gg.build(Heads(), x=gg.float32["n", 4])
    losses = [
        gg.Loss("cross_entropy", output="kinds"),
        gg.Loss("mse", output="sizes", labels="given"),
    ]
    gg.artifacts(model, path, loss=losses)
    return path


def batches(count, *, seed=0, rows=5):
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        x = rng.normal(size=(rows, 4)).astype("f")
        found.append({"x": x, "labels": x[:, :3].argmax(-1), "given": x[:, 3:]})
    return found


def trainer(folder, **options):
    return Trainer(folder, threads=1, schedule=gg.schedule.constant(0.05), **options)


def fit(one, data, **options):
    return one.fit(data, progress=False, **options)


class Logits(nn.Module):
    """A linear map, and the loss of its labels that leaves class 0 out, if there are labels."""

    def __init__(self, size):
        self.map = nn.Linear(size, 3, bias=False)

    def __call__(self, x, labels=None):
        y = self.map(x)
        if labels is None:
            return {"y": y}
        return {"y": y, "own": ops.softmax_cross_entropy_loss(y, labels, ignore_index=0)}


@pytest.mark.parametrize("axis", [1, -1, None])
def test_classes_are_along_the_axis_of_the_loss(tmp_path, axis):
    """Also where another axis has the same size."""
    rng = np.random.default_rng(0)
    x, labels = rng.normal(size=(4, 3, 3)).astype("f"), rng.integers(0, 3, (4, 3))
    data = [{"x": x, "labels": labels}]
    model = gg.build(Logits(3), x=gg.float32["n", 3, 3])
    gg.artifacts(model, tmp_path / "art", loss=gg.Loss("cross_entropy", axis=axis), outputs=["y"])
    one = trainer(tmp_path / "art")
    right = [float((one.predict(data)["y"].argmax(of) == labels).mean()) for of in (1, 2)]
    assert right[0] != right[1]
    assert one.measure(data, ["accuracy"])["accuracy"] == pytest.approx(right[axis != 1])


def test_labels_that_the_loss_ignores_do_not_count(tmp_path):
    """Whichever label the model's own loss leaves out."""
    made = gg.build(Logits(4), x=gg.float32["n", 4], labels=gg.int64["n"])
    gg.artifacts(made, tmp_path / "art", loss="own", outputs=["y"])
    one, x = trainer(tmp_path / "art"), np.random.default_rng(0).normal(size=(50, 4)).astype("f")
    labels = np.arange(50) % 3
    predicted = one.predict([{"x": x, "labels": labels}])["y"].argmax(-1)
    right = float((predicted == labels)[labels != 0].mean())
    assert right != (predicted == labels).mean()
    found = one.measure([{"x": x, "labels": labels}], ["accuracy"])
    assert found["accuracy"] == pytest.approx(right)


def test_metrics_are_those_of_scikit_learn(folder, sklearn_metrics):
    one, data = trainer(folder), batches(3) + batches(1, rows=2)
    fit(one, data, steps=10)
    found = one.predict(data)
    assert {n: a.shape for n, a in found.items()} == {"kinds": (17, 3), "sizes": (17, 1)}
    labels, given = (np.concatenate([b[n] for b in data]) for n in ("labels", "given"))
    predicted = found["kinds"].argmax(-1)
    named = [f"{name}:kinds" for name in ("accuracy", "f1", "matthews")]
    sizes = [f"{name}:sizes" for name in ("mse", "mae", "pearson")]
    own = metrics.Metric(lambda p, y: float((p - y).std()), "own", output="sizes", labels="given")
    measures = [
        metrics.Metric(**{**vars(metrics.read_metric(n)), "labels": "given"}) for n in sizes
    ]
    got = one.measure(data, [*named, *measures, own, "perplexity"])
    assert got == pytest.approx(
        {
            "loss": one.evaluate(data),
            "accuracy_kinds": sklearn_metrics.accuracy_score(labels, predicted),
            "f1_kinds": sklearn_metrics.f1_score(labels, predicted, average="macro"),
            "matthews_kinds": sklearn_metrics.matthews_corrcoef(labels, predicted),
            "mse_sizes": sklearn_metrics.mean_squared_error(given, found["sizes"]),
            "mae_sizes": sklearn_metrics.mean_absolute_error(given, found["sizes"]),
            "pearson_sizes": np.corrcoef(given[:, 0], found["sizes"][:, 0])[0, 1],
            "own": (found["sizes"] - given).std(),
            "perplexity": math.exp(one.evaluate(data)),
        },
        rel=1e-5,
    )


class OwnLoss(nn.Module):
    """The loss of logits with classes along an axis, each scaled by a weight of its own."""

    def __init__(self, axis):
        self.axis, self.scale = (
            axis,
            nn.Parameter((1,), initialize=lambda _, size: np.ones(size, "f")),
        )

    def __call__(self, y, labels):
        z = y * self.scale
        z1 = z if self.axis == 1 else ops.transpose(z, perm=[0, 2, 1])
        return {"z": z, "own": ops.softmax_cross_entropy_loss(z1, labels, ignore_index=-100)}


def test_classes_are_read_along_either_axis_and_ignored_labels_left_out(tmp_path, sklearn_metrics):
    logits = np.random.default_rng(0).normal(size=(2, 3, 4)).astype("f")
    labels = logits.argmax(1)
    labels[0, 1], labels[1, 2] = -100, (labels[1, 2] + 1) % 3
    for dims in (["n", 3, "t"], ["n", "t", 3]):
        axis = dims.index(3)
        model = gg.build(OwnLoss(axis), y=gg.float32[*dims], labels=gg.int64["n", "t"])
        gg.artifacts(model, tmp_path / f"{axis}", loss="own", outputs=["z"])
        data = [{"y": np.moveaxis(logits, 1, axis), "labels": labels}]
        found = trainer(tmp_path / f"{axis}").measure(data, ["accuracy"])
        assert found["accuracy"] == pytest.approx(6 / 7)
    one = np.array([[1.0], [-1.0], [2.0]]), np.array([[1], [0], [0]])
    found = sklearn_metrics.f1_score(one[1], one[0] > 0)
    for labels_of_one in (one[1], one[1][:, 0]):
        given = one[0], labels_of_one  # one class, which argmax takes for the right one of 0 only
        assert metrics.f1(*metrics.class_counts(*given)) == pytest.approx(found)
        assert metrics.accuracy(*metrics.classes(*given)) == pytest.approx(2 / 3)
    same = np.full(3, 0.1)
    assert metrics.pearson(same, same) == 0.0  # their mean is another number
    with pytest.raises(GraphgenError, match=r"output is \[2, 4, 3\] and the labels \[2, 5\]"):
        metrics.classes(np.moveaxis(logits, 1, -1), labels[:, [0] * 5])
    rows = [np.ones((1, 2)), np.ones((2, 3))]
    assert metrics.joined(rows, -100).tolist() == [[1, 1, -100], [1, 1, 1], [1, 1, 1]]


@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize("length", [3, "t"])
def test_the_axis_of_a_loss_in_the_model_is_known_by_its_sizes(tmp_path, axis, length):
    """Also in a batch that is as long as there are classes; unless all of them are."""
    dims = ["n", length, 3] if axis == 2 else ["n", 3, length]
    model = gg.build(OwnLoss(axis), y=gg.float32[*dims], labels=gg.int64["n", length])
    gg.artifacts(model, tmp_path / "art", loss="own", outputs=["z"])
    y = np.random.default_rng(0).normal(size=(2, 3, 3)).astype("f")
    labels = y.argmax(axis)
    assert (labels != y.argmax(3 - axis)).any()
    if length == 3:
        with pytest.raises(GraphgenError, match=r"classes may be along its axes \[1, 2\]"):
            trainer(tmp_path / "art").measure([{"y": y, "labels": labels}], ["accuracy"])
    else:
        found = trainer(tmp_path / "art").measure([{"y": y, "labels": labels}], ["accuracy", "f1"])
        assert found["accuracy"] == found["f1"] == 1.0


@pytest.mark.parametrize("count", [2, 3])
def test_f1_is_of_as_many_classes_as_there_are_logits(sklearn_metrics, count):
    """Also if the data only have classes 0 and 1."""
    labels, chosen = np.array([0, 1, 1, 0, 1]), np.array([0, 1, 0, 0, 1])
    pairs = [metrics.class_counts(np.eye(count)[chosen[x]], labels[x]) for x in ([0, 1], [2, 3, 4])]
    average = "binary" if count == 2 else "macro"
    wanted = sklearn_metrics.f1_score(labels, chosen, average=average)
    assert metrics.NAMED["f1"].value(0.0, pairs) == pytest.approx(wanted)
    with pytest.raises(GraphgenError, match="f1: labels are int64 from -1 to 1"):
        metrics.class_counts(np.eye(count)[chosen], labels - (labels == 0))


def test_the_best_is_kept_by_a_metric(folder, tmp_path):
    values = iter([0.5, 0.9, 0.9, 0.3, 0.8])
    metric = metrics.Metric(lambda p, y: next(values), "score", output="kinds")
    options = {"evaluate": batches(1), "evaluate_every": 1, "metrics": [metric], "patience": 2}
    run = tmp_path / "run"
    history = fit(trainer(folder), batches(5), checkpoint=run, best="score", **options)
    assert [line["evaluation_score"] for line in history] == [0.5, 0.9, 0.9, 0.3]
    assert Checkpoint.load(run / "best/checkpoint").optimizer.step == 2
    with pytest.raises(GraphgenError, match="has evaluation, best by score, this trainer loss"):
        fit(trainer(folder), batches(5), checkpoint=run, resume=True, **options)
    with pytest.raises(GraphgenError, match=r"best is 'scores'; .* did you mean 'score'"):
        fit(trainer(folder), batches(5), best="scores", **options)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["acuracy"], "metric 'acuracy': choose accuracy, .*did you mean 'accuracy'"),
        (["accuracy"], "metric accuracy needs an output to predict with, and there are kinds, siz"),
        (["accuracy:kind"], "there are kinds, sizes; did you mean 'kinds'"),
        (["accuracy:kinds", "accuracy:kinds"], "two metrics are called accuracy_kinds"),
        ("accuracy", "metrics is 'accuracy'; it must be a list"),
        (["nowhere:f"], "metric nowhere:f: ModuleNotFoundError"),
        ([metrics.Metric(max, output="kinds", labels="y")], "wants the labels 'y'; the inputs are"),
        ([metrics.Metric(lambda p, y: math.nan, "m", output="kinds")], "metric m is nan; it must"),
        (["mse:sizes"], r"output is \[5, 1\] and the labels \[5\]; they must have one shape"),
    ],
)
def test_a_metric_that_cannot_be_measured_is_one_error(folder, given, told):
    with pytest.raises(GraphgenError, match=told):
        trainer(folder).measure(batches(1), given)


class Recorder(Callback):
    def __init__(self, stop_at=None):
        self.calls, self.stop_at = [], stop_at

    def begin(self, trainer, history):
        self.calls.append(("begin", len(history)))

    def step(self, trainer, metrics):
        self.calls.append(("step", metrics["step"]))
        return trainer.step == self.stop_at

    def evaluation(self, trainer, metrics):
        assert "evaluation_loss" in metrics
        self.calls.append(("evaluation", metrics["step"]))

    def checkpoint(self, trainer, path):
        assert Checkpoint.load(path).optimizer.step == trainer.step
        self.calls.append(("checkpoint", trainer.step))

    def end(self, trainer, history):
        self.calls.append(("end", len(history)))


def test_callbacks_are_called_and_may_end_a_run(folder, tmp_path):
    one, data = Recorder(stop_at=4), batches(3)
    options = {"checkpoint": tmp_path / "run", "evaluate": data, "evaluate_every": 2}
    options |= {"save_every": 3, "callbacks": [one]}
    history = fit(trainer(folder), data, steps=9, **options)
    assert [line["step"] for line in history] == [1, 2, 3, 4]
    assert one.calls == [
        *[("begin", 0), ("step", 1), ("evaluation", 2), ("step", 2), ("step", 3)],
        *[("checkpoint", 3), ("evaluation", 4), ("step", 4), ("checkpoint", 4), ("end", 4)],
    ]
    two = options | {"callbacks": [again := Recorder()]}
    fit(trainer(folder), data, steps=5, resume=True, **two)
    assert again.calls[:2] == [("begin", 4), ("evaluation", 5)]


MADE = {}


class FakeWriter:
    def __init__(self, folder):
        self.found = MADE.setdefault(folder, [])

    def add_scalar(self, name, value, step):
        self.found.append((step, name, value))

    def flush(self):
        self.found.append("flushed")

    def close(self):
        self.found.append("closed")


def test_logs_hold_the_history(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("graphgen.train.callbacks._event_writer", FakeWriter)
    logs = [CsvLog(tmp_path / "log.csv"), TensorBoard("events")]
    options = {"evaluate": batches(1), "evaluate_every": 2, "checkpoint": tmp_path / "run"}
    history = fit(trainer(folder), batches(3), callbacks=logs, **options)
    with (tmp_path / "log.csv").open() as file:
        rows = [{n: float(v) for n, v in row.items() if v} for row in csv.DictReader(file)]
    assert rows == history
    found = MADE["events"]
    assert found[-2:] == ["flushed", "closed"]
    for line in history:
        told = {name: value for step, name, value in found[:-2] if step == line["step"]}
        assert told == {name: value for name, value in line.items() if name != "step"}


def test_a_log_whose_package_is_missing_is_one_error(folder, monkeypatch):
    for name in ("wandb", "tensorboard.summary", "tensorboardX"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    for log, told in ((Wandb(), "pip install wandb"), (TensorBoard("x"), r"graphgen-onnx\[log\]")):
        with pytest.raises(GraphgenError, match=told):
            fit(trainer(folder), batches(1), callbacks=[log])


@pytest.mark.parametrize("files", [1, 2])
def test_earlier_states_are_kept_and_gone_back_to(folder, tmp_path, monkeypatch, files):
    """Also where a state is two files, as those of more than 2 GiB are."""
    if files == 2:
        monkeypatch.setattr(checkpoint, "_ROOM", 64)
    data, run, options = batches(3), tmp_path / "run", {"save_every": 2, "keep": 2}
    options |= {"evaluate": data, "evaluate_every": 1}
    whole = trainer(folder)
    wanted = fit(whole, data, steps=9, checkpoint=run, **options)
    assert sorted(path.name for path in run.glob("step-*")) == ["step-8", "step-9"]
    one = fit(trainer(folder), data, steps=9, checkpoint=run, resume=8, **options)
    assert one == wanted
    assert sorted(path.name for path in run.glob("step-*")) == ["step-8", "step-9"]
    for place in (run, run / "best", run / "step-8"):
        assert len([*place.glob("checkpoint*")]) == files
    with pytest.raises(GraphgenError, match=r"resume=5, but of the steps of .* are kept: 8, 9"):
        fit(trainer(folder), data, steps=9, checkpoint=run, resume=5, **options)
    (run / "step-8").rename(run / "step-4")
    Checkpoint.load(run / "step-4/checkpoint")
    with pytest.raises(GraphgenError, match="keep is -1; it must be a number from 0"):
        fit(trainer(folder), data, steps=9, checkpoint=run, keep=-1)


def test_the_command_prints_a_table_of_the_metrics(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arrays = {n: np.concatenate([b[n] for b in batches(4)]) for n in ("x", "labels", "given")}
    np.savez("data.npz", **arrays)
    text = f"train {folder} --data data.npz --steps 4 --batch 5 --eval data.npz --eval-every 2 "
    text += "--metric accuracy:kinds --metric perplexity --best accuracy_kinds --checkpoint run "
    assert commands.main([*text.split(), "--log", "csv", "--keep", "1", "--save-every", "2"]) == 0
    out = capsys.readouterr().out.splitlines()
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").open()]
    assert out[0].split() == ["metric", "last", "best", "at", "step"]
    rows = {line.split()[0]: line.split()[1:] for line in out[1:4]}
    assert [*rows] == ["loss", "accuracy_kinds", "perplexity"]
    for name, (last, best, step) in rows.items():
        found = {x["step"]: x[f"evaluation_{name}"] for x in lines if len(x) > 4}
        top = (max if "accuracy" in name else min)(found.values())
        assert float(last) == pytest.approx(found[4], rel=1e-3)
        assert float(best) == pytest.approx(top, rel=1e-3) and found[int(step)] == top
    assert (tmp_path / "run/metrics.csv").exists() and (tmp_path / "run/step-4").exists()
    assert commands.main([*text.split(), "--resume-at", "4", "--steps", "6"]) == 2
    assert "schedule" in capsys.readouterr().err
