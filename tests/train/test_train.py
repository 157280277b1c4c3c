"""The trainer: optimizer against a float64 reference, resume, evaluation."""

import copy
import json
import math
import multiprocessing
import os
import pickle
import resource
import shutil
import subprocess
import sys
import time
from collections import namedtuple
from typing import get_args

import numpy as np
import onnx_ir as ir
import pytest
from small_models import pretend_no_placement

import graphgen as gg
from graphgen import commands, nn, ops
from graphgen.autodiff import grad
from graphgen.errors import GraphgenError
from graphgen.export.artifacts import artifacts
from graphgen.export.checkpoint import Checkpoint
from graphgen.export.optimizers import SGD, AdamW, Group
from graphgen.export.write import export, to_bytes
from graphgen.graph import parameters
from graphgen.measure.reference import evaluate
from graphgen.runtime import Session
from graphgen.train import Change, Trainer, schedule
from graphgen.train.data import Dataset
from graphgen.train.run import History, Run

VOCABULARY = 11


class Decoder(nn.Module):
    def __init__(self, dropout=0.0):
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.stack = nn.Encoder(
            8, layers=1, num_heads=2, causal=True, dropout=dropout, activation="gelu_tanh"
        )

    def __call__(self, ids):
        return self.embedding.logits(self.stack(self.embedding(ids)))


def decoder(*, training=True, **kwargs):
    return gg.build(Decoder(**kwargs), ids=gg.int64["batch", "seq"], training=training)


def batches(count, *, seed=0, shape=(3, 6)):
    """Sequences that count up, from random starts; some labels are ignored."""
    rng = np.random.default_rng(seed)
    result = []
    for _ in range(count):
        ids = (rng.integers(0, VOCABULARY, (shape[0], 1)) + np.arange(shape[1] + 1)) % VOCABULARY
        labels = ids[:, 1:].copy()
        labels[0, 0] = -100
        result.append({"ids": ids[:, :-1], "labels": labels})
    return result


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("dropout") / "art"
    artifacts(decoder(dropout=0.2), path, optimizer=AdamW(clip_norm=1.0))
    return path


def trainer(folder, **kwargs):
    return Trainer(folder, threads=1, **{"schedule": schedule.constant(1e-2), **kwargs})


def fit(trainer, data, **kwargs):
    return trainer.fit(data, progress=False, **kwargs)


def assert_same_bits(a, b):
    assert list(a) == list(b)
    for name in a:
        assert a[name].tobytes() == b[name].tobytes(), name


def test_the_loss_falls(folder):
    one = trainer(folder, schedule=schedule.cosine(3e-2, warmup=5, steps=80))
    history = fit(one, batches(20), steps=80, evaluate=batches(3, seed=1), evaluate_every=40)
    losses = [line["loss"] for line in history]
    assert abs(losses[0] - math.log(VOCABULARY)) < 0.5
    assert np.mean(losses[-5:]) < 0.5
    assert [line["step"] for line in history if "evaluation_loss" in line] == [40, 80]
    assert history[-1]["evaluation_loss"] < 0.6


class Classifier(nn.Module):
    """A linear map with its loss, for the reference in float64."""

    def __init__(self):
        self.linear = nn.Linear(3, 4)

    def __call__(self, x, labels):
        return ops.cross_entropy(self.linear(x), labels, label_smoothing=0.1)


def reference(model, optimizer, data, rates):
    """Losses and parameters by numpy in float64, gradients by the operators' meanings."""
    wanted = list(parameters(model.graph))
    model = grad(model, wrt=wanted)
    values = model.graph.initializers
    p = {n: values[n].const_value.numpy().astype(np.float64) for n in wanted}
    m, v = ({n: np.zeros_like(x) for n, x in p.items()} for _ in range(2))
    chosen = {n: optimizer.setting(n) for n in wanted}
    losses = []
    for t, (batch, rate) in enumerate(zip(data, rates, strict=True), 1):
        for n in wanted:
            values[n].const_value = ir.tensor(p[n])
        loss, *gradients = evaluate(model, batch)
        losses.append(float(loss))
        norm = np.sqrt(sum((g**2).sum() for g in gradients))
        scale = min(1.0, (optimizer.clip_norm or np.inf) / (norm + 1e-6))
        for n, g in zip(wanted, gradients, strict=True):
            g, factor, decay = g * scale, rate * chosen[n].rate, chosen[n].weight_decay
            if isinstance(optimizer, SGD):
                g = g + decay * p[n]
                m[n] = optimizer.momentum * m[n] + g
                ahead = g + optimizer.momentum * m[n]
                p[n] -= factor * (ahead if optimizer.nesterov else m[n])
                continue
            a, b = optimizer.betas
            m[n] = a * m[n] + (1 - a) * g
            v[n] = b * v[n] + (1 - b) * g * g
            root = np.sqrt(v[n] / (1 - b**t)) + optimizer.epsilon
            p[n] = p[n] * (1 - factor * decay) - factor * (m[n] / (1 - a**t)) / root
    return losses, p


@pytest.mark.share(3)
@pytest.mark.parametrize(
    "optimizer",
    [
        AdamW(weight_decay=0.3),
        AdamW(0.0, betas=(0.9, 0.98), epsilon=1e-9),  # Adam as the paper of the Transformer has it
        AdamW(betas=(0.8, 0.9), clip_norm=0.2),
        AdamW(weight_decay=0.9, no_decay="weight"),
        AdamW(groups=(Group("bias", rate=0.25), Group("linear", weight_decay=0.9))),
        SGD(),
        SGD(clip_norm=0.2),
        SGD(clip_norm=0.2, momentum=0.9),
        SGD(momentum=0.8, nesterov=True, weight_decay=0.1),
        SGD(weight_decay=0.1, groups=(Group("bias", rate=0.5, weight_decay=0.0),)),
    ],
)
def test_twenty_steps_equal_a_float64_reference(tmp_path, optimizer):
    rng = np.random.default_rng(0)
    data = [
        {"x": rng.normal(size=(5, 3)).astype("f"), "labels": rng.integers(0, 4, 5)}
        for _ in range(20)
    ]
    model = gg.build(Classifier(), x=gg.float32["n", 3], labels=gg.int64["n"])
    artifacts(model, tmp_path / "art", loss="output", optimizer=optimizer, profile="stock")
    rate = schedule.linear(0.1, warmup=4, steps=40)
    one = trainer(tmp_path / "art", schedule=rate)
    history = fit(one, data)
    losses, expected = reference(model, optimizer, data, [rate(t) for t in range(1, 21)])
    np.testing.assert_allclose([line["loss"] for line in history], losses, rtol=1e-5)
    for name, array in one.parameters.items():
        np.testing.assert_allclose(array, expected[name], rtol=1e-4, atol=2e-6)
    if optimizer.clip_norm:
        assert max(line["gradient_norm"] for line in history) > optimizer.clip_norm


def test_resume_is_bit_identical(folder, tmp_path):
    rate = schedule.linear(1e-2, warmup=3, steps=12)
    data = batches(5)  # twelve steps start again at the list's end
    straight = trainer(folder, schedule=rate)
    whole = fit(straight, data, steps=12, checkpoint=tmp_path / "a")
    fit(trainer(folder, schedule=rate), data, steps=7, checkpoint=tmp_path / "b", save_every=3)
    with (tmp_path / "b/metrics.jsonl").open("a") as file:  # as a run broken off leaves it
        file.write('{"step": 8, "loss": 0.0}\n{"step"')
    again = trainer(folder, schedule=rate)
    history = fit(again, lambda: iter(data), steps=12, checkpoint=tmp_path / "b", resume=True)
    assert_same_bits(straight.parameters, again.parameters)
    assert history == whole
    for file in ("checkpoint", "metrics.jsonl"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    lines = (tmp_path / "b/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == whole
    plan = json.loads((tmp_path / "a/plan.json").read_text())
    assert plan["training"]["execution_order"] == "PRIORITY_BASED"
    assert not plan["training"]["enable_mem_pattern"]


TORN = b'{"step": 6, "lo'  # as a run broken off leaves it
DAMAGE = {
    "line 2 is": lambda lines: [lines[0], b"\0\0\0\xff", *lines[2:], TORN],
    "lines 2, 4 are": lambda lines: [lines[0], b"[" * 10_000, lines[2], lines[3][:9], lines[4]],
    "line 3 is": lambda lines: [*lines[:2], b'{"step": 3}', *lines[3:]],
    "lines 5, 6 are": lambda lines: [*lines[:4], b'{"step": "5", "loss": 1.0}', TORN],
    "line 4 is damaged and left out": lambda lines: [
        *lines[:3],
        lines[3].replace(b'"loss": ', b'"loss": 1' + b"0" * 400 + b', "was": ', 1),
        lines[4],
    ],
    "ends at step 3, but the checkpoint at 5": lambda lines: lines[:3],
    "cannot be read: No such file": lambda lines: None,
}


@pytest.mark.parametrize("told", DAMAGE)
def test_damaged_lines_of_metrics_are_named_and_the_others_kept(folder, tmp_path, told):
    fit(trainer(folder), batches(5), checkpoint=tmp_path / "run")
    path = tmp_path / "run/metrics.jsonl"
    lines, kept = path.read_bytes().splitlines(), DAMAGE[told](path.read_bytes().splitlines())
    if kept is None:
        path.unlink()
    else:
        path.write_bytes(b"\n".join(kept))
    with pytest.warns(UserWarning, match=rf"run/metrics.jsonl: {told}") as caught:
        again = trainer(folder)
        history = fit(again, batches(5), checkpoint=tmp_path / "run", resume=True)
    assert len(caught) == 1 and caught[0].filename == __file__
    assert history == [json.loads(line) for line in lines if line in (kept or ())]
    assert [json.loads(line) for line in path.read_text().splitlines()] == history


def test_a_run_is_not_overwritten_and_keeps_its_seed(folder, tmp_path):
    fit(trainer(folder), batches(1), checkpoint=tmp_path / "run")
    with pytest.raises(GraphgenError, match="holds a run; continue it with resume=True"):
        fit(trainer(folder), batches(1), checkpoint=tmp_path / "run")
    with pytest.raises(GraphgenError, match="has seed 0, this trainer 1"):
        fit(trainer(folder, seed=1), batches(2), checkpoint=tmp_path / "run", resume=True)
    with pytest.raises(GraphgenError, match="cannot be read"):
        fit(trainer(folder), batches(2), checkpoint=tmp_path / "none", resume=True)
    with pytest.raises(GraphgenError, match="needs the folder"):
        fit(trainer(folder), batches(2), resume=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(GraphgenError, match="cannot be written: File exists"):
        fit(trainer(folder), batches(1), checkpoint=tmp_path / "file")


def test_a_run_with_a_wrong_checkpoint_is_not_continued(folder, plain, tmp_path):
    fit(trainer(folder), batches(1), checkpoint=tmp_path / "run")
    metrics = (tmp_path / "run/metrics.jsonl").read_bytes()
    whole = (tmp_path / "run/checkpoint").read_bytes()
    other = Checkpoint({"weight": np.ones(3, np.float32)})
    for damage, message in (
        (lambda file: file.write_bytes(whole[: len(whole) // 2]), "damaged or cut short"),
        (lambda file: file.write_bytes(b""), "not an ONNX Runtime training checkpoint"),
        (
            other.save,
            "embedding.weight is missing in the checkpoint, but float32.* resume with the",
        ),
    ):
        damage(tmp_path / "run/checkpoint")
        with pytest.raises(GraphgenError, match=message):
            fit(trainer(folder), batches(2), checkpoint=tmp_path / "run", resume=True)
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == metrics


def numbered(rows, size=2, seed=0, last=0):
    """Batches of sequences that count up; `last` is added to one in the last batch."""
    ids = (np.arange(rows)[:, None] + np.arange(6)) % VOCABULARY
    ids[np.random.default_rng([seed, 0]).permutation(rows)[-1]] -= last
    return Dataset({"ids": ids % VOCABULARY, "labels": (ids + 1) % VOCABULARY}, size, seed=seed)


def one_by_one(data):
    return lambda: iter(data)


@pytest.mark.share(3)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    "make",
    [
        lambda: numbered(9),
        lambda: batches(5),
        lambda: one_by_one(batches(5)),
        lambda: (batch for batch in batches(20)),
    ],
    ids=["dataset", "list", "function", "iterator"],
)
def test_fit_called_again_goes_on_where_it_stopped(folder, make, accumulate):
    whole, parts = (trainer(folder, accumulate=accumulate) for _ in range(2))
    wanted = fit(whole, make(), steps=7)
    data = make()
    assert [line for steps in (1, 2, 5, 7) for line in fit(parts, data, steps=steps)] == wanted
    assert_same_bits(whole.parameters, parts.parameters)
    assert fit(parts, data, steps=7) == []
    with pytest.raises(GraphgenError, match="steps is 3, but 7 updates are already made"):
        fit(parts, data, steps=3)


def test_a_pass_ends_where_the_data_ends_and_the_next_is_another_one(folder):
    data, still = numbered(9), {"schedule": lambda t: 0.0}
    whole, parts = trainer(folder, **still), trainer(folder, **still)
    wanted = fit(whole, data, steps=10)
    assert fit(parts, data, steps=3) + fit(parts, data) + fit(parts, data) == wanted
    losses = [line["loss"] for line in wanted]
    assert losses[:5] != losses[5:]  # each epoch has its order
    one, again = batches(3), trainer(folder, **still)
    for count in (3, 3):  # a function of unknown length and other batches begin at their first
        assert len(fit(again, lambda: iter(one))) == count
    assert fit(again, one[:1])[0]["loss"] != fit(again, one[1:2])[0]["loss"]


def test_an_error_uses_up_no_batch(folder):
    data = batches(4)
    whole, right = fit(trainer(folder), batches(4)), data[2]
    for given in (data, one_by_one(data)):
        one = trainer(folder)
        data[2] = {"ids": right["ids"]}
        with pytest.raises(GraphgenError, match=r"batch 2: .*'labels' is missing"):
            fit(one, given, steps=4)
        data[2] = right
        assert fit(one, given, steps=4) == whole[2:]


ANOTHER = {
    "data, first batch": {"data": lambda: numbered(9, size=3)},
    "data, batches": {"data": lambda: numbered(12)},
    "data, first batch .* checksum": {"data": lambda: numbered(9, seed=5)},
    "data, checksum": {"data": lambda: numbered(9, last=1)},
    "seed 0, this trainer 3": {"seed": 3},
    "accumulate 1, this trainer 2": {"accumulate": 2},
    r"schedule constant\(0.01, warmup=0\), this trainer linear\(0.01, warmup=2, steps=9\)": {
        "schedule": schedule.linear(1e-2, warmup=2, steps=9)
    },
    "schedule 0.01 at step 4, this trainer 0.02 at step 4": {"schedule": lambda t: 0.02},
    r"optimizer AdamW\(.*clip_norm=1.0.*, this trainer SGD\(": {"artifacts": SGD()},
    "loss .*classes.*, this trainer .*mse": {"artifacts": "mse"},
    "model [0-9a-f]{8}, this trainer [0-9a-f]{8}": {"artifacts": "dropout"},
    "evaluation, first batch": {"evaluate": batches(1, seed=2)},
}


@pytest.mark.share(3)
@pytest.mark.parametrize("told", ANOTHER)
def test_a_run_is_not_resumed_as_another_one_unless_told(folder, tmp_path, told):
    change = {"data": lambda: numbered(9), "evaluate": batches(1, seed=1), **ANOTHER[told]}
    made, run = change.pop("artifacts", None), tmp_path / "run"
    fit(trainer(folder), numbered(9), steps=4, checkpoint=run, evaluate=batches(1, seed=1))
    if made is not None:
        model = decoder(dropout=0.3 if made == "dropout" else 0.2)
        how = {"optimizer": made if isinstance(made, SGD) else AdamW(clip_norm=1.0)}
        if made == "mse":
            how["loss"] = "mse"
        artifacts(model, tmp_path / "art", **how)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    given = {"steps": 5, "checkpoint": run, "resume": True, "evaluate": change.pop("evaluate")}
    data = change.pop("data")()
    one = trainer(folder if made is None else tmp_path / "art", **change)
    with pytest.raises(GraphgenError, match=f"the run in .*run has .*{told}.* to resume, or"):
        fit(one, data, **given)
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    what = told.replace(",", "").split()[0]
    if what == "loss":
        return  # for which the data has other labels
    with pytest.raises(GraphgenError, match="the run in"):
        fit(one, data, **given, allow_changes=[n for n in get_args(Change) if n != what])
    names = [what, "model"] if made is not None else [what]
    assert len(fit(one, data, **given, allow_changes=names)) == 5
    with pytest.raises(GraphgenError, match="allow_changes is 'rate'; choose 'data', "):
        fit(one, data, **given, allow_changes=["rate"])


def test_another_frozen_weight_is_another_model(tmp_path):
    for name, seed in (("a", 0), ("b", 1)):
        model = gg.build(Decoder(), ids=gg.int64["batch", "seq"], seed=seed)
        artifacts(model, tmp_path / name, trainable="norm")
    fit(trainer(tmp_path / "a"), batches(2), checkpoint=tmp_path / "run")
    with pytest.raises(GraphgenError, match=r"has model a frozen .*weight, this trainer another"):
        fit(trainer(tmp_path / "b"), batches(2), checkpoint=tmp_path / "run", resume=True)


def test_a_checkpoint_that_notes_less_is_resumed_with_one_warning(folder, tmp_path):
    data, run = batches(3), tmp_path / "run"
    whole = fit(trainer(folder), data, steps=6)
    fit(trainer(folder), data, steps=4, checkpoint=run)
    saved = Checkpoint.load(run / "checkpoint")
    del saved.properties["graphgen.run"]  # as versions before wrote them
    saved.save(run / "checkpoint")
    with pytest.warns(UserWarning, match="data, .*, model are not compared$") as caught:
        assert fit(trainer(folder), data, steps=6, checkpoint=run, resume=True) == whole
    assert len(caught) == 1
    saved = Checkpoint.load(run / "checkpoint")
    saved.properties.clear()  # as the official trainer does
    saved.save(run / "checkpoint")
    with pytest.warns(UserWarning, match="are not compared; its batches begin at 0"):
        fit(trainer(folder), data, steps=7, checkpoint=run, resume=True)
    Checkpoint(saved.trainable, saved.frozen).save(run / "checkpoint")
    one = trainer(folder)
    first = fit(one, data, steps=2)
    with pytest.warns(UserWarning, match="its step and moments and batches begin at 0"):
        again = fit(one, data, steps=2, checkpoint=run, resume=True)
    other = trainer(folder)
    for name, array in other._engine.state.views["p"].items():
        array[...] = saved.trainable[name]
    assert fit(other, data, steps=2) == again != first


def test_dropout_depends_on_seed_and_step_only(folder):
    data = batches(1) * 2
    a, b, c = (fit(trainer(folder, seed=s, schedule=lambda t: 0.0), data) for s in (0, 0, 1))
    assert a == b
    assert a[0]["loss"] != a[1]["loss"] and a[0]["loss"] != c[0]["loss"]
    one = trainer(folder)
    assert one.evaluate(data) == trainer(folder, seed=1).evaluate(data)


def test_evaluation_counts_labels_not_batches(folder):
    one = trainer(folder)
    long, short = batches(1, shape=(2, 9)), batches(1, shape=(1, 2))
    together, alone = one.evaluate(long + short), [one.evaluate(b) for b in (long, short)]
    kept = [int((b[0]["labels"] != -100).sum()) for b in (long, short)]
    assert together == pytest.approx(np.average(alone, weights=kept), rel=1e-6)
    with pytest.raises(GraphgenError, match="no batches"):
        one.evaluate([])


def joined(group):
    """One batch of several, the shorter ones filled up with what does not count."""
    width = max(batch["ids"].shape[1] for batch in group)
    wide = [
        {
            name: np.pad(a, [(0, 0), (0, width - a.shape[1])], constant_values=fill)
            for (name, a), fill in zip(batch.items(), (0, -100), strict=True)
        }
        for batch in group
    ]
    return {name: np.concatenate([batch[name] for batch in wide]) for name in ("ids", "labels")}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    path = tmp_path_factory.mktemp("plain") / "art"
    artifacts(decoder(), path, optimizer=SGD())
    return path


def test_accumulated_batches_are_one_joined_batch(plain):
    data = batches(2) + batches(1, shape=(1, 2)) + batches(3, seed=1)
    data[0]["labels"][1:] = -100  # a mean of means would be another loss
    data[4]["labels"][:] = -100
    rate = schedule.constant(0.05)
    one, other = trainer(plain, accumulate=3, schedule=rate), trainer(plain, schedule=rate)
    history = fit(one, data, steps=4)
    wanted = fit(other, [joined(data[:3]), joined(data[3:])], steps=4)
    for a, b in zip(history, wanted, strict=True):
        assert a == pytest.approx(b, rel=1e-5)
    for name, array in one.parameters.items():
        np.testing.assert_allclose(array, other.parameters[name], rtol=1e-4, atol=1e-6)
    assert len(fit(trainer(plain, accumulate=4), data)) == 2  # the last of two batches


def test_the_artifacts_say_how_many_batches_are_an_update(plain, tmp_path):
    copied = shutil.copytree(plain, tmp_path / "art")
    model = ir.load(copied / "training_model.onnx")
    loss = json.loads(model.metadata_props["graphgen.loss"])
    model.metadata_props["graphgen.loss"] = json.dumps({**loss, "accumulate": 2})
    ir.save(model, copied / "training_model.onnx")
    assert (trainer(copied).accumulate, trainer(copied, accumulate=1).accumulate) == (2, 1)
    assert len(fit(trainer(copied), batches(6))) == 3


def test_each_accumulated_batch_has_dropout_of_its_own(folder):
    still = {"schedule": lambda t: 0.0}
    [twice] = fit(trainer(folder, accumulate=2, **still), batches(1) * 2)
    first, second = (line["loss"] for line in fit(trainer(folder, **still), batches(1) * 2))
    assert twice["loss"] == pytest.approx((first + second) / 2, rel=1e-6)
    assert first != second


def test_a_batch_that_counts_for_nothing_is_one_error(plain):
    [batch] = batches(1)
    ignored = {**batch, "labels": np.full_like(batch["labels"], -100)}
    empty = {name: array[:0] for name, array in batch.items()}
    for nothing in (ignored, empty):
        with pytest.raises(
            GraphgenError, match="batch 1: there is nothing to learn from: it has no"
        ):
            fit(trainer(plain), [batch, nothing])
    with pytest.raises(GraphgenError, match="batch 0 is a tuple of 3; give one array for each of"):
        fit(trainer(plain), [(1, 2, 3)])
    with pytest.raises(GraphgenError, match=r"batches\[0\] is 1; it must be a dictionary"):
        fit(trainer(plain), [1])
    one = trainer(plain)
    assert one.evaluate([batch, empty, ignored]) == one.evaluate([batch])


def test_the_fields_of_a_named_tuple_are_inputs(plain):
    """Two inputs of one shape would else be exchanged without a word."""
    [batch] = batches(1)
    order = [*reversed([*batch])]
    named, other = namedtuple("Named", order), namedtuple("Other", ["a", "b"])
    wanted = fit(trainer(plain), [batch])
    assert fit(trainer(plain), [named(**batch)]) == wanted
    assert fit(trainer(plain), [other(*(batch[n] for n in trainer(plain).inputs))]) == wanted
    with pytest.raises(GraphgenError, match="there is no input 'b'"):
        fit(trainer(plain), [namedtuple("Odd", [order[0], "b"])(*batch.values())])


@pytest.fixture
def command(folder, tmp_path):
    """A training command in a process of its own, with dropout; saved at every step."""
    data = batches(40)
    arrays = {n: np.concatenate([batch[n] for batch in data]) for n in ("ids", "labels")}
    np.savez(tmp_path / "data.npz", **arrays)
    steps = ["--steps", "40", "--batch", "7", "--lr", "0.01", "--threads", "1"]
    data = ["--data", str(tmp_path / "data.npz"), "--save-every", "1"]
    return [sys.executable, "-m", "graphgen", "train", str(folder), *data, *steps, "--checkpoint"]


def test_a_killed_run_goes_on_bit_identically(command, tmp_path):
    """The order of the data, dropout, the schedule and the moments go on where they were.

    KILLS=50 kills it so many times: while a step runs, or while its checkpoint is written.
    """
    run, metrics, step = tmp_path / "run", tmp_path / "run/metrics.jsonl", 0
    rng = np.random.default_rng()
    for stop in sorted(rng.integers(2, 36, int(os.environ.get("KILLS", "1")))):
        resume = ["--resume"] if (run / "checkpoint").exists() else []
        process = subprocess.Popen([*command, str(run), *resume], stderr=subprocess.PIPE)
        while process.poll() is None and not (
            metrics.exists() and metrics.read_bytes().count(b"\n") >= stop
        ):
            time.sleep(1e-3)
        time.sleep(rng.uniform(0.0, 5e-3))
        process.kill()
        assert not process.communicate()[1]
        if (run / "checkpoint").exists():  # a killed first step may have left none
            found = Checkpoint.load(run / "checkpoint").optimizer.step
            assert stop - 1 <= found and step <= found
            step = found
    assert 1 <= step < 40
    assert commands.main([*command[3:], str(run), "--resume"]) == 0
    assert commands.main([*command[3:], str(tmp_path / "whole")]) == 0
    for file in ("checkpoint", "metrics.jsonl"):
        assert (run / file).read_bytes() == (tmp_path / "whole" / file).read_bytes(), file
    assert not [*run.glob(".*")]


def test_strict_reaches_the_runtime(command, tmp_path, capsys, monkeypatch):
    pretend_no_placement(monkeypatch)
    assert commands.main([*command[3:], str(tmp_path / "run"), "--strict"]) == 2
    assert "strict: onnx" in capsys.readouterr().err


DISK = """
mount -t tmpfs -o size=$1k none run || exit 77
shift
"$@" run
code=$?
cp run/checkpoint left
exit $code
"""


def test_a_full_disk_leaves_the_old_checkpoint(command, folder, tmp_path):
    fit(trainer(folder), batches(1), checkpoint=tmp_path / "size")
    size = (tmp_path / "size/checkpoint").stat().st_size * 3 // 2 // 1024 + 12
    (tmp_path / "run").mkdir()
    disk = ["unshare", "-rm", "sh", "-c", DISK, "sh", str(size), *command]
    if shutil.which("unshare") is None:
        pytest.skip("unshare, which mounts a small disk for one process, is not installed")
    done = subprocess.run(disk, cwd=tmp_path, capture_output=True, text=True, check=False)
    if done.returncode == 77 or "unshare: " in done.stderr:
        pytest.skip(f"no small disk can be mounted here: {done.stderr.strip()}")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "run/checkpoint cannot be written: No space left on device" in done.stderr
    assert Checkpoint.load(tmp_path / "left").optimizer.step == 1


@pytest.mark.parametrize("made", [False, True])
def test_no_run_begins_without_room_for_its_checkpoint(command, tmp_path, capsys, made):
    if made:
        (tmp_path / "run").mkdir()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        assert commands.main([*command[3:], str(tmp_path / "run")]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "run' cannot be written: File too large; choose another" in capsys.readouterr().err
    assert (tmp_path / "run").exists() == made and not [*tmp_path.glob("run/*")]


def test_two_runs_never_write_to_one_folder(folder, tmp_path):
    options = {"checkpoint": tmp_path / "run", "steps": 2}
    other = Run(tmp_path / "run", "other")
    with other:
        other.start(History(), {}, False, Checkpoint({}))  # which has no checkpoint yet
        for resume in (False, True):
            if resume:
                Checkpoint({}).save(other.checkpoint)
            with pytest.raises(
                GraphgenError, match=r"another run writes to .*run; wait for its end"
            ):
                fit(trainer(folder), batches(2), resume=resume, **options)
    other.checkpoint.unlink()
    for _ in range(2):
        (tmp_path / "run/checkpoint").unlink(missing_ok=True)
        fit(trainer(folder), batches(2), **options)  # the lock ends with the run


def losses_of(trainer, monkeypatch, losses):
    """Lets the evaluations of a trainer give these losses, one after the other."""
    name = "graphgen.train.fitting.mean_loss"
    monkeypatch.setattr(name, lambda engine, batches: losses[trainer.step // 2 - 1])


def test_the_best_is_kept_and_patience_ends_a_run(plain, tmp_path, monkeypatch):
    losses = [3.0, 1.0, 2.0, 1.0, 0.5]  # at steps 2, 4, ...; 1.0 again is no better
    options = {"steps": 10, "save_every": 3, "evaluate_every": 2, "patience": 2}
    options["evaluate"] = batches(1)

    def run(name, **kwargs):
        one = trainer(plain)
        losses_of(one, monkeypatch, losses)
        history = fit(one, batches(5), checkpoint=tmp_path / name, **{**options, **kwargs})
        kept = [Checkpoint.load(tmp_path / name / p) for p in ("checkpoint", "best/checkpoint")]
        return history, *[found.optimizer.step for found in kept]

    history, last, best = run("a")
    assert (len(history), last, best) == (8, 8, 4)
    run("b", steps=6)
    assert run("b", resume=True) == (history, 8, 4)
    assert run("b", resume=True) == (history, 8, 4)
    for file in ("checkpoint", "best/checkpoint", "metrics.jsonl"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    assert run("a", resume=True, patience=3)[1:] == (10, 10)
    with pytest.raises(GraphgenError, match="patience=2 needs evaluate= and evaluate_every="):
        fit(trainer(plain), batches(1), patience=2)


TRAIN_ELSEWHERE = """
import json, sys
import numpy as np
from graphgen.train import Trainer
from graphgen.train.schedule import constant
data = [dict(zip(("ids", "labels"), pair)) for pair in zip(*np.load("data.npz").values())]
history = Trainer("copy", threads=1, schedule=constant(1e-2)).fit(data, progress=False)
print(json.dumps([line["loss"] for line in history]))
assert "tests" not in sys.modules and "test_train" not in sys.modules
"""


def test_a_copied_folder_trains_where_the_model_code_is_not(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "copy")
    data = batches(6)
    arrays = {name: np.stack([batch[name] for batch in data]) for name in ("ids", "labels")}
    np.savez(tmp_path / "data.npz", **arrays)
    command = [sys.executable, "-I", "-c", TRAIN_ELSEWHERE]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    here = [line["loss"] for line in fit(trainer(folder), data)]
    assert json.loads(run.stdout) == here


def test_the_trained_parameters_go_into_an_inference_model(folder, tmp_path):
    one = trainer(folder)
    fit(one, batches(3))
    inference = decoder(training=False)
    export(inference, tmp_path / "model.onnx")
    one.export(inference, tmp_path / "a.onnx")
    one.export(tmp_path / "model.onnx", tmp_path / "b.onnx")
    assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "b.onnx").read_bytes()
    batch = batches(1)[0]
    (logits,) = Session(tmp_path / "a.onnx")(ids=batch["ids"])
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    keep = batch["labels"] != -100
    picked = np.take_along_axis(logp, np.where(keep, batch["labels"], 0)[..., None], -1)[..., 0]
    assert -picked[keep].mean() == pytest.approx(one.evaluate([batch]), rel=1e-5)
    other = gg.build(nn.Linear(2, 2), x=gg.float32["n", 2])
    with pytest.raises(GraphgenError, match=r"parameter embedding.weight, .* is missing"):
        one.export(other, tmp_path / "c.onnx")
    assert not (tmp_path / "c.onnx").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: {"ids": b["ids"]}, "batch 1: .*'labels' is missing"),
        (lambda b: {**b, "mask": b["ids"]}, "batch 1: .*no input 'mask'"),
        (lambda b: {**b, "labels": b["labels"].astype("f")}, "batch 1: .*'labels' is float32"),
        (lambda b: {**b, "labels": b["labels"][:, :2]}, "batch 1: .*'labels' is int64"),
        (lambda b: {**b, "labels": b["labels"] + VOCABULARY}, "batch 1: labels go from -89 to 21"),
        (lambda b: {**b, "labels": np.full_like(b["labels"], -1)}, "labels go from -1 to -1"),
        (
            lambda b: {**b, "ids": b["ids"] + VOCABULARY},
            "batch 1: ids looks up rows 0 to 10: row 0",
        ),
        (lambda b: {**b, "ids": b["ids"] - VOCABULARY}, "batch 1: ids .*: row 0 has -"),
    ],
)
def test_a_wrong_batch_is_one_error_and_changes_nothing(folder, change, message):
    good = batches(1)[0]
    one = trainer(folder)
    with pytest.raises(GraphgenError, match=message):
        fit(one, [good, change(good)])
    assert one.step == 1
    fit(one, [good])
    assert one.step == 2


def test_batches_that_end_too_early_are_one_error(folder):
    with pytest.raises(GraphgenError, match="ended at step 2 of 3; give a list"):
        fit(trainer(folder), iter(batches(2)), steps=3)


def test_a_loss_that_is_not_finite_stops_before_the_update(tmp_path):
    model = gg.build(nn.Linear(3, 2), x=gg.float32["n", 3])
    artifacts(model, tmp_path / "art", loss="mse", optimizer=SGD())
    one = trainer(tmp_path / "art")
    x, labels = np.ones((4, 3), np.float32), np.ones((4, 2), np.float32)
    fit(one, [{"x": x, "labels": labels}])
    before = one.parameters
    bad = {"x": x, "labels": np.where(np.arange(8).reshape(4, 2) == 3, np.nan, labels).astype("f")}
    with pytest.raises(
        GraphgenError, match="at step 2 the loss is nan: in batch 0, labels, which was fed"
    ):
        fit(one, [bad])
    assert one.step == 1
    assert_same_bits(one.parameters, before)
    start = Checkpoint.load(tmp_path / "art/checkpoint")
    start.trainable["weight"][0, 0] = np.inf
    start.save(tmp_path / "art/checkpoint")
    with pytest.raises(
        GraphgenError, match=r"at step 1 the loss is (nan|inf): in batch 0, weight, which"
    ):
        fit(trainer(tmp_path / "art"), [{"x": x, "labels": labels}])


class Scaled(nn.Module):
    """x · log(Σ x²), which is 0 · -inf where x is 0."""

    def __call__(self, x):
        return x * ops.log(ops.reduce_sum(x * x, [-1]))


class Deep(nn.Module):
    def __init__(self):
        self.linear = nn.Linear(3, 2)
        self.layers = [nn.Linear(2, 2, bias=False), Scaled()]

    def __call__(self, x):
        return self.layers[1](self.layers[0](self.linear(x)))


def test_the_first_value_that_is_not_finite_is_named_with_its_module(tmp_path):
    artifacts(gg.build(Deep(), x=gg.float32["n", 3]), tmp_path / "art", loss="mse")
    good, zero = (np.full((4, 3), v, np.float32) for v in (1.0, 0.0))
    labels = np.ones((4, 2), np.float32)
    data = [{"x": x, "labels": labels} for x in (good, zero)]
    named = r"batch 1, .* made by Log in layers\.1, is infinite first"
    for accumulate in (1, 2):
        with pytest.raises(GraphgenError, match=rf"the loss is nan: in {named}"):
            fit(trainer(tmp_path / "art", accumulate=accumulate, schedule=lambda t: 0.0), data)
    with pytest.raises(
        GraphgenError, match=rf"at step 1 the loss of the evaluation before it is nan: in {named}"
    ):
        trainer(tmp_path / "art").evaluate(data)


class Root(nn.Module):
    """√(W x), whose slope at 0 is infinite."""

    def __init__(self):
        self.linear = nn.Linear(3, 2, bias=False)

    def __call__(self, x):
        return ops.sqrt(self.linear(x))


def test_a_gradient_that_is_not_finite_stops_before_the_update(tmp_path):
    artifacts(gg.build(Root(), x=gg.float32["n", 3]), tmp_path / "art", loss="mse")
    one = trainer(tmp_path / "art")
    before = one.parameters
    bad = {"x": np.zeros((4, 3), np.float32), "labels": np.ones((4, 2), np.float32)}
    with pytest.raises(
        GraphgenError, match=r"norm is nan: in batch 0, .* made by Div in .*infinite"
    ):
        fit(one, [bad])
    assert_same_bits(one.parameters, before)


SUM = to_bytes(gg.build(lambda x: x + x, x=gg.float32[2]))


@pytest.mark.parametrize(
    ("file", "data", "message"),
    [
        ("training_model.onnx", None, "training_model.onnx cannot be read"),
        ("training_model.onnx", b"text, not a graph", "training_model.onnx is not an ONNX model"),
        ("optimizer_model.onnx", b"", "optimizer_model.onnx is not an ONNX model"),
        ("optimizer_model.onnx", SUM, "it has neither AdamWOptimizer nor SGDOptimizerV2"),
        ("eval_model.onnx", None, "eval_model.onnx cannot be read"),
        ("checkpoint", b"text, not a checkpoint", "no.* checkpoint"),
    ],
)
def test_a_damaged_folder_is_one_error(folder, tmp_path, file, data, message):
    copied = shutil.copytree(folder, tmp_path / "art")
    (copied / file).unlink()
    if data is not None:
        (copied / file).write_bytes(data)
    with pytest.raises(GraphgenError, match=message):
        Trainer(copied)


def test_a_checkpoint_of_another_model_is_one_error(folder, tmp_path):
    copied = shutil.copytree(folder, tmp_path / "art")
    Checkpoint({"weight": np.ones(3, np.float32)}).save(copied / "checkpoint")
    with pytest.raises(GraphgenError, match=r"'embedding.weight' is only in one of"):
        Trainer(copied)


def test_schedules():
    linear = schedule.linear(2.0, warmup=4, steps=12)
    assert [linear(t) for t in (1, 2, 5, 9, 12, 13, 14)] == [0.0, 0.5, 2.0, 1.0, 0.25, 0.0, 0.0]
    cosine = schedule.cosine(2.0, warmup=2, steps=10, final=1.0)
    assert [cosine(t) for t in (1, 2, 3, 7, 11, 99)] == pytest.approx([0, 1.0, 2.0, 1.5, 1.0, 1.0])
    noam = schedule.noam(512, warmup=4000)
    assert noam(4000) == pytest.approx(512**-0.5 * 4000**-0.5)
    assert noam(1) == pytest.approx(512**-0.5 * 4000**-1.5)
    assert noam(16000) == pytest.approx(noam(4000) / 2)
    constant = schedule.constant(2.0, warmup=4)
    assert [constant(t) for t in (1, 2, 5, 9)] == [0.0, 0.5, 2.0, 2.0]
    assert schedule.constant(2.0)(1) == 2.0
    sizes = {"rate": 2.0, "warmup": 2, "steps": 10, "features": None}
    for name in ("linear", "cosine"):
        direct = getattr(schedule, name)(2.0, warmup=2, steps=10)
        assert schedule.named(name, **sizes)(5) == direct(5)
    assert schedule.named("constant", **sizes)(2) == 1.0
    found = schedule.named("noam", rate=None, warmup=4000, steps=None, features=512)
    assert found(9) == noam(9)
    for name, wrong, told in (
        ("cosine", {"steps": None}, "schedule cosine needs steps"),
        ("constant", {"features": 8}, "schedule constant takes no features"),
        ("noam", {"features": 8}, "schedule noam takes no rate"),
        ("noam", {"rate": None}, "schedule noam needs features"),
        ("plateau", {}, "schedule 'plateau': choose cosine, linear, polynomial"),
        ("cosine:cycle=3", {}, "'cycle=3' does not fit: cosine takes final=X, cycles=X"),
        ("cosine:cycles=2,cycles=3", {}, "'cycles=3' does not fit"),
        ("linear:final=1", {}, "linear takes no options"),
        ("polynomial:power=x", {}, "'power=x' does not fit"),
    ):
        with pytest.raises(GraphgenError, match=told):
            schedule.named(name, **{**sizes, **wrong})
    found = schedule.named("cosine:cycles=2,final=1", **sizes)
    assert repr(found) == "cosine(2.0, warmup=2, steps=10, final=1.0, cycles=2)"
    for make in (schedule.linear, schedule.cosine, schedule.polynomial):
        with pytest.raises(GraphgenError, match="below steps"):
            make(1.0, warmup=5, steps=5)
        assert make(1.0, warmup=0, steps=1)(1) == 1.0


def test_schedules_of_several_cycles_powers_and_roots():
    again = schedule.cosine(2.0, warmup=2, steps=10, final=1.0, cycles=2)
    rates = [again(t) for t in (2, 3, 5, 7, 9, 11, 12)]
    assert rates == pytest.approx([1, 2, 1.5, 2, 1.5, 1, 1])
    power = schedule.polynomial(2.0, warmup=2, steps=10, final=1.0, power=2.0)
    assert [power(t) for t in (2, 3, 7, 11, 12)] == pytest.approx([1.0, 2.0, 1.25, 1.0, 1.0])
    straight = schedule.polynomial(2.0, warmup=2, steps=10)
    linear = schedule.linear(2.0, warmup=2, steps=10)
    assert [straight(t) for t in range(1, 13)] == [linear(t) for t in range(1, 13)]
    root = schedule.inverse_sqrt(2.0, warmup=4)
    assert [root(t) for t in (1, 2, 5, 17)] == [0.0, 0.5, 2.0, 1.0]
    late = schedule.warmup_stable_decay(2.0, warmup=2, steps=10, decay=4, final=1.0)
    rates = [late(t) for t in (1, 2, 3, 7, 9, 11, 12)]
    assert rates == pytest.approx([1, 1.5, 2, 2, 1.5, 1, 1])
    own = {"rate": 2.0, "warmup": 4, "steps": 9, "features": None}
    assert schedule.named("inverse_sqrt", **own)(17) == 1.0
    assert repr(again).endswith("steps=10, final=1.0, cycles=2)")
    for one in (again, power, root, late, schedule.noam(8, warmup=3), schedule.constant(1)):
        for copied in (pickle.loads(pickle.dumps(one)), copy.deepcopy(one)):
            assert repr(copied) == repr(one) and copied(5) == one(5)
    for make, told in (
        (lambda: schedule.inverse_sqrt(1.0, warmup=0), "warmup must be at least 1"),
        (lambda: schedule.polynomial(1.0, warmup=0, steps=2, power=0.0), "power must be positive"),
        (lambda: schedule.cosine(1.0, warmup=0, steps=2, cycles=0), "cycles is 0"),
        (
            lambda: schedule.warmup_stable_decay(1.0, warmup=1, steps=2, decay=2),
            "decay must be at least 1 and at most steps - warmup",
        ),
        (lambda: schedule.cosine(1.0, warmup=0, steps=2, final=-1.0), r"cosine\(final=-1.0\)"),
    ):
        with pytest.raises(GraphgenError, match=told):
            make()


def test_the_last_checkpoint_is_written_once(folder, tmp_path, monkeypatch):
    saved, save = [], Checkpoint.save

    def noted(self, path, **options):
        saved.append(self.optimizer.step)
        save(self, path, **options)

    monkeypatch.setattr(Checkpoint, "save", noted)
    fit(trainer(folder), batches(2), steps=5, checkpoint=tmp_path / "run", save_every=2)
    assert saved == [2, 4, 5]


def test_averages_are_evaluated_kept_and_resumed(plain, tmp_path):
    data, held_out, rate = batches(5), batches(2, seed=1), {"schedule": schedule.constant(0.05)}
    one, rates = (
        trainer(plain, ema=0.7, **rate),
        [0.0] + [min(0.7, (1 + t) / (10 + t)) for t in range(1, 7)],
    )
    raw, average = trainer(plain, **rate), None
    average = raw.parameters
    for t in range(1, 7):
        fit(raw, data, steps=t)
        for n, x in raw.parameters.items():
            average[n] = average[n] + np.float32(1 - rates[t]) * (x - average[n])
    options = {"evaluate": held_out, "evaluate_every": 6, "checkpoint": tmp_path / "run"}
    history = fit(one, data, steps=6, **options)
    assert_same_bits(one.parameters, raw.parameters)
    saved = Checkpoint.load(tmp_path / "run/checkpoint")
    for n, x in saved.optimizer.average.items():
        np.testing.assert_allclose(x, average[n], rtol=1e-5, atol=1e-7)
    best = Checkpoint.load(tmp_path / "run/best/checkpoint")
    assert_same_bits(best.trainable, saved.optimizer.average)
    assert not best.optimizer.average
    again = trainer(plain)
    again._engine.restore(best)
    assert history[-1]["evaluation_loss"] == again.evaluate(held_out) != one.evaluate(held_out)
    model = decoder(training=False)
    exported = gg.load(one.export(model, tmp_path / "m.onnx"))
    for n, x in saved.optimizer.average.items():
        assert exported.graph.initializers[n].const_value.numpy().tobytes() == x.tobytes()
    options["checkpoint"] = tmp_path / "b"
    fit(trainer(plain, ema=0.7, **rate), data, steps=4, **options)
    fit(trainer(plain, ema=0.7, **rate), data, steps=6, resume=True, **options)
    for file in ("checkpoint", "best/checkpoint"):
        assert (tmp_path / "run" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    with pytest.raises(GraphgenError, match=r"has ema 0\.7, this trainer 0\.5"):
        fit(trainer(plain, ema=0.5, **rate), data, steps=7, resume=True, **options)
    with pytest.raises(GraphgenError, match=r"ema is 1\.5; it must be between 0 and 1"):
        trainer(plain, ema=1.5)


def test_the_rate_finder_leaves_nothing_behind(folder, tmp_path):
    one, data = trainer(folder), batches(8)
    fit(one, data, steps=2)
    before = one.parameters
    curve = one.find_rate(data, lowest=1e-5, highest=30.0, steps=60)
    assert_same_bits(one.parameters, before)
    assert 1e-4 < curve.suggestion < 1.0 and len(curve.rates) == len(curve.losses) <= 60
    assert curve.losses[-1] > 2 * curve.losses.min()
    assert curve.plot(tmp_path / "curve.png").read_bytes()[:4] == b"\x89PNG"
    other = trainer(folder)
    assert fit(one, data, steps=4) == fit(other, data, steps=4)[2:]
    with pytest.raises(GraphgenError, match="the loss does not fall"):
        one.find_rate(data, lowest=1e3, highest=1e4, steps=10)
    with pytest.raises(GraphgenError, match="rates are positive and grow"):
        one.find_rate(data, lowest=1.0, highest=0.1)


def test_a_schedule_that_is_not_finite_stops_before_the_update(folder):
    one = trainer(folder, schedule=lambda step: math.nan if step == 2 else 0.01)
    with pytest.raises(GraphgenError, match="at step 2 the schedule gives nan; a learning rate is"):
        fit(one, batches(3))
    assert one.step == 1
    assert all(np.isfinite(array).all() for array in one.parameters.values())
    with pytest.raises(GraphgenError, match=r"constant\(warmup=-1\)"):
        schedule.constant(1.0, warmup=-1)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"patience": 0, "evaluate": [], "evaluate_every": 1}, "patience is 0; it must be an"),
        ({"evaluate": [], "evaluate_every": 0}, "evaluate_every is 0"),
        ({"save_every": 0}, "save_every is 0"),
        ({"evaluate_every": 2}, "evaluate_every=2 needs evaluate="),
        ({"evaluate": []}, "evaluate= needs evaluate_every= or steps="),
    ],
)
def test_options_that_would_do_nothing_are_refused(folder, options, told):
    one = trainer(folder)
    with pytest.raises(GraphgenError, match=told + r".* \(test_train.py:\d+\)$"):
        fit(one, one_by_one(batches(2)), **options)
    assert one.step == 0


def test_a_schedule_of_the_same_name_with_another_rate_is_not_resumed(folder, tmp_path):
    rate, data = schedule.constant(0.25, warmup=4), batches(2)
    fit(trainer(folder, schedule=rate), data, checkpoint=tmp_path)
    saved = Checkpoint.load(tmp_path / "checkpoint")
    assert saved.optimizer.learning_rate == 0.0625
    saved.optimizer.learning_rate = 0.125  # as before schedules counted from 0
    saved.save(tmp_path / "checkpoint")
    with pytest.raises(GraphgenError, match=r"schedule 0\.125 at step 2, .* 0\.0625 at step 2"):
        fit(trainer(folder, schedule=rate), data, steps=3, checkpoint=tmp_path, resume=True)


@pytest.mark.parametrize("steps", [None, 2])
@pytest.mark.parametrize("none", [list, lambda: iter(()), lambda: list])
def test_what_would_train_or_measure_nothing_is_refused(folder, tmp_path, none, steps):
    one = trainer(folder)
    calls = (one.evaluate, one.predict, lambda nothing: one.measure(nothing, ["accuracy"]))
    options = {"steps": steps, "checkpoint": tmp_path / "run"}
    for call in (lambda nothing: fit(one, nothing, **options), one.find_rate, *calls):
        with pytest.raises(GraphgenError, match=r"there are no batches.* \(test_train.py:\d+\)$"):
            call(none())
    with pytest.raises(GraphgenError, match=r"no batches|is an iterator, which can"):
        fit(one, batches(2), evaluate=none(), evaluate_every=1)
    assert one.step == (none() is list) and not (tmp_path / "run").exists()


def test_an_iterator_at_its_end_is_not_trained_on_again(folder):
    one, ended = trainer(folder), iter(batches(2))
    assert len(fit(one, ended)) == 2
    with pytest.raises(GraphgenError, match="there are no batches"):
        fit(one, ended)


def test_an_opened_folder_is_not_copied_and_trains_in_a_fork(folder):
    one, data = trainer(folder), batches(4)
    fit(one, data, steps=2)
    for opened in (one, one._engine._train.session, gg.TrainingSession(folder)):
        for make in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(GraphgenError, match=r"cannot be pickled .* \(test_train.py:\d+\)"):
                make(opened)
    context = multiprocessing.get_context("fork")
    losses = context.Queue()
    child = context.Process(target=lambda: losses.put(fit(one, data, steps=4)[-1]["loss"]))
    child.start()
    try:
        assert losses.get(timeout=60) == fit(one, data, steps=4)[-1]["loss"]
    finally:
        child.kill()
        child.join()


class LikeTorch:
    """An array of another library, which gives numpy's on request, or does not."""

    def __init__(self, array, where="cpu", requires_grad=False):
        self.array, self.where, self.requires_grad = array, where, requires_grad

    def detach(self):
        return LikeTorch(self.array, self.where)

    def __array__(self, *_, **__):
        if self.requires_grad:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad")
        if self.where != "cpu":
            raise TypeError(f"can't convert {self.where} tensor to numpy")
        return self.array

    def size(self):
        return self.array.shape


class LikeALoader:
    """A DataLoader of torch: lists of tensors, in each pass anew; its length may be unknown."""

    def __init__(self, given, known):
        self.given, self.known = given, known

    def __len__(self):
        if not self.known:
            raise TypeError("object of type 'Endless' has no len()")
        return len(self.given)

    def __iter__(self):
        return ([LikeTorch(a, requires_grad=True) for a in b.values()] for b in self.given)


@pytest.mark.parametrize("known", [True, False])
def test_a_loader_of_another_library_gives_lists_of_tensors(folder, known, tmp_path):
    data, run = batches(3), tmp_path / "run"
    loader, one = LikeALoader(data, known), trainer(folder)
    wanted = fit(trainer(folder), data, steps=5)
    assert fit(one, loader, steps=2) + fit(one, loader, steps=5) == wanted
    assert len(fit(trainer(folder), loader)) == 3
    assert trainer(folder).evaluate(loader) == trainer(folder).evaluate(data)
    fit(trainer(folder), loader, steps=4, checkpoint=run)
    assert fit(trainer(folder), loader, steps=5, checkpoint=run, resume=True) == wanted
    with pytest.raises(GraphgenError, match="run has data, first batch"):
        other = LikeALoader(batches(3, seed=4), known)
        fit(trainer(folder), other, steps=6, checkpoint=run, resume=True)


def test_arrays_of_another_library(folder):
    [batch] = batches(1)
    other = {name: LikeTorch(array) for name, array in batch.items()}
    assert fit(trainer(folder), [other]) == fit(trainer(folder), [batch])
    far = {name: LikeTorch(array, "cuda:0") for name, array in batch.items()}
    with pytest.raises(
        GraphgenError, match=r"batch 0: can't convert cuda:0 .*give arrays of numpy"
    ):
        fit(trainer(folder), [far])
    masked = {
        name: np.ma.masked_array(array, array == array.max()) for name, array in batch.items()
    }
    with pytest.raises(GraphgenError, match="batch 0: some of its entries are masked"):
        fit(trainer(folder), [masked])


def test_the_order_in_a_batch_is_none_of_its_weight(tmp_path):
    class Sum(nn.Module):
        def __init__(self):
            self.linear = nn.Linear(3, 1)

        def __call__(self, x, scale):
            return {"loss": ops.reduce_mean(self.linear(x) * scale, None, keepdims=0)}

    model = gg.build(Sum(), x=gg.float32["n", 3], scale=gg.float32[2, 1, 1])
    artifacts(model, tmp_path / "art", loss="loss")
    rng = np.random.default_rng(0)
    scale = np.ones((2, 1, 1), np.float32)
    data = [{"x": rng.normal(size=(n, 3)).astype("f"), "scale": scale} for n in (1, 5)]
    turned = [dict(reversed(batch.items())) for batch in data]
    one = trainer(tmp_path / "art")
    assert one.evaluate(data) == one.evaluate(turned)
    means = [one.evaluate([batch]) for batch in data]
    assert one.evaluate(turned) == pytest.approx((means[0] + 5 * means[1]) / 6, rel=1e-5)


def test_an_export_keeps_the_dtype_of_the_model(folder, tmp_path):
    one, model = trainer(folder), decoder(training=False)
    value = model.graph.initializers["embedding.weight"]
    value.const_value = ir.tensor(value.const_value.numpy().astype(np.float16))
    value.dtype = ir.DataType.FLOAT16
    with pytest.raises(GraphgenError, match=r"embedding.weight, float32\[11, 8\], is float16\["):
        one.export(model, tmp_path / "m.onnx")
    assert not (tmp_path / "m.onnx").exists()
