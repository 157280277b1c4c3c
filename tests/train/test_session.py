"""The session that gives each part of a step to its caller: the trainer's numbers, to the bit."""

import numpy as np
import pytest

import graphgen as gg
from graphgen import TrainingSession, nn, ops, schedule
from graphgen.errors import GraphgenError
from graphgen.export.checkpoint import Checkpoint
from graphgen.train import Trainer

WORDS = 11


class Decoder(nn.Module):
    def __init__(self):
        self.embedding = nn.Embedding(WORDS, 8)
        self.stack = nn.Encoder(8, layers=1, num_heads=2, causal=True, dropout=0.2)

    def __call__(self, ids):
        return self.embedding.logits(self.stack(self.embedding(ids)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("session") / "art"
    model = gg.build(Decoder(), ids=gg.int64["batch", "seq"], training=True)
    gg.artifacts(model, path, optimizer=gg.AdamW(clip_norm=0.5), trainable="stack")
    return path


def batches(count, *, seed=0, rows=3):
    rng = np.random.default_rng(seed)
    ids = [(rng.integers(0, WORDS, (rows, 1)) + np.arange(7)) % WORDS for _ in range(count)]
    return [{"ids": x[:, :-1], "labels": np.where(x[:, 1:] == 3, -100, x[:, 1:])} for x in ids]


def session(folder, **options):
    return TrainingSession(folder, threads=1, **options)


def update(one, *batch):
    loss = one.train_step(*batch)
    assert one.optimizer_step()
    one.lazy_reset_grad()
    return loss


def assert_same_bits(one, other):
    assert list(one) == list(other)
    for name in one:
        assert one[name].tobytes() == other[name].tobytes(), name


def test_losses_parameters_and_checkpoints_are_the_trainers(folder, tmp_path):
    data, rate = batches(6), schedule.linear(0.02, warmup=2, steps=8)
    trainer = Trainer(folder, threads=1, schedule=rate)
    history = trainer.fit(data, checkpoint=tmp_path / "run", progress=False)
    one = session(folder)
    losses = []
    for batch in data:
        one.set_learning_rate(rate(one.step + 1))
        losses.append(update(one, batch))
    assert losses == [line["loss"] for line in history]
    assert_same_bits(one.parameters, trainer.parameters)
    assert one.eval_step(data[0]) == trainer.evaluate(data[:1])
    one.save_checkpoint(tmp_path / "saved", properties={"own": 3})
    saved, wanted = (
        Checkpoint.load(tmp_path / "saved"),
        Checkpoint.load(tmp_path / "run/checkpoint"),
    )
    for kind in ("momentum0", "momentum1"):
        assert_same_bits(getattr(saved.optimizer, kind), getattr(wanted.optimizer, kind))
    assert (saved.optimizer.step, saved.properties["own"]) == (6, 3)
    other = session(folder, checkpoint=tmp_path / "run/checkpoint", learning_rate=rate(7))
    one.set_learning_rate(rate(7))
    assert update(one, data[0]) == update(other, data[0])  # dropout goes on, too
    assert_same_bits(one.parameters, other.parameters)


def test_gradients_are_summed_until_they_are_reset(folder):
    one, [a, b] = session(folder), batches(2)
    one.train_step(a)
    first = one.gradients
    one.lazy_reset_grad()
    assert not any(array.any() for array in one.gradients.values())
    again = session(folder)
    again.train_step(b)  # dropout of the first call
    two = session(folder)
    assert two.train_step(a) == pytest.approx(session(folder).train_step(a), abs=0)
    two.train_step(b)
    both = two.gradients
    other = session(folder)
    other.train_step(a)
    other.lazy_reset_grad()
    other.train_step(b)
    for name, array in other.gradients.items():
        np.testing.assert_allclose(first[name] + array, both[name], rtol=1e-5, atol=1e-7)
    assert two.optimizer_step() and two.step == 1
    assert_same_bits(two.gradients, both)  # they stay until the reset, as in the official runtime


def test_parameters_go_out_and_in_as_one_buffer(folder):
    one, other = session(folder), session(folder)
    update(one, *batches(1)[0].values())
    for trainable_only in (True, False):
        buffer = one.get_contiguous_parameters(trainable_only)
        assert buffer.shape == (one.get_parameters_size(trainable_only),)
    assert buffer.size == sum(array.size for array in one.parameters.values())
    other.copy_buffer_to_parameters(buffer, trainable_only=False)
    assert_same_bits(one.parameters, other.parameters)
    other.copy_buffer_to_parameters(0 * one.get_contiguous_parameters(True))
    assert not any(x.any() for n, x in other.parameters.items() if "stack" in n)
    assert other.parameters["embedding.weight"].any()
    with pytest.raises(GraphgenError, match=r"buffer is float64\[2\]; it must be float32\["):
        other.copy_buffer_to_parameters(np.zeros(2))


def test_modes_rates_and_wrong_calls(folder, tmp_path):
    one, [batch] = session(folder), batches(1)
    with pytest.raises(GraphgenError, match="optimizer_step without gradients: call train_step"):
        one.optimizer_step()
    assert one.eval()(batch) == one.eval()(batch)
    assert one.train()(batch) != one(batch)  # each has its own dropout
    one.set_learning_rate(0.5)
    assert one.get_learning_rate() == 0.5
    with pytest.raises(GraphgenError, match="learning_rate is nan; a learning rate is finite"):
        one.set_learning_rate(float("nan"))
    with pytest.raises(GraphgenError, match=r"is a tuple of 1; give one array for .*ids, labels"):
        one.train_step(batch["ids"])
    with pytest.raises(GraphgenError, match="without gradients"):  # an error resets them
        one.optimizer_step()
    ignored = {**batch, "labels": np.full_like(batch["labels"], -100)}
    with pytest.raises(GraphgenError, match="nothing to learn from"):
        one.train_step(ignored)
    gg.artifacts(gg.build(nn.Linear(2, 2), x=gg.float32["n", 2]), tmp_path / "other")
    with pytest.raises(GraphgenError, match=r"frozen embedding\.weight is another one"):
        one.load_checkpoint(tmp_path / "other/checkpoint")


def test_an_inference_model_has_the_parameters(folder, tmp_path):
    one, [batch] = session(folder), batches(1)
    update(one, batch)
    path = one.export_model_for_inferencing(tmp_path / "m.onnx", ["output"])
    inference = gg.Session(path)
    assert list(inference.inputs) == ["ids"]
    [logits] = inference({"ids": batch["ids"]})
    labels, kept = batch["labels"], batch["labels"] != -100
    logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    chosen = np.take_along_axis(logs, np.maximum(labels, 0)[..., None], -1)[..., 0]
    assert -chosen[kept].mean() == pytest.approx(one.eval_step(batch), rel=1e-5)
    with pytest.raises(GraphgenError, match="has no value 'outptu'; did you mean 'output'"):
        one.export_model_for_inferencing(tmp_path / "n.onnx", ["outptu"])


class Heads(nn.Module):
    def __init__(self):
        self.body, self.kinds, self.sizes = nn.Linear(4, 6), nn.Linear(6, 3), nn.Linear(6, 1)

    def __call__(self, x):
        h = ops.relu(self.body(x))
        return {"kinds": self.kinds(h), "sizes": self.sizes(h)}


def test_other_outputs_are_there_if_the_artifacts_were_asked_for_them(tmp_path):
    model = gg.build(Heads(), x=gg.float32["n", 4])
    x, labels = np.random.default_rng(0).normal(size=(5, 4)).astype("f"), np.arange(5) % 3
    for asked in ([], ["sizes"]):
        weights = gg.artifacts(model, tmp_path / "art", output="kinds", outputs=asked)
        assert {w.name for w in weights if w.trained} == {
            f"{layer}.{part}" for layer in ("body", "kinds") for part in ("weight", "bias")
        }
        one = session(tmp_path / "art")
        update(one, x, labels)
        found = gg.Session(one.export_model_for_inferencing(tmp_path / "m.onnx"))
        assert [*found.outputs] == ["kinds", *asked]
        trainer = gg.Trainer(tmp_path / "art", threads=1)
        assert trainer.evaluate([{"x": x, "labels": labels}]) > 0
        predicted = trainer.predict([{"x": x, "labels": labels}])
        assert {*predicted} == {"kinds", *asked}
    wanted = gg.Session(model)(x=x)[1]
    assert not np.allclose(found(x=x)[1], wanted)  # the trained body
    with pytest.raises(GraphgenError, match=r"outputs has 'size'; .*did you mean 'sizes'"):
        gg.artifacts(model, tmp_path / "art", output="kinds", outputs=["size"])


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_gradient_that_no_input_changes_is_trained_with(tmp_path, accumulate):
    """That of a bias, of a mean over a size that is known: it is a constant of the file."""

    class Line(nn.Module):
        def __init__(self):
            self.weight = nn.Parameter((3,), initialize=nn.module.ones)
            self.bias = nn.Parameter((3,), initialize=nn.module.zeros)

        def __call__(self, x):
            return ops.reduce_mean(x * self.weight + self.bias, keepdims=0)

    how = {"optimizer": gg.SGD(), "accumulate": accumulate}
    gg.artifacts(gg.build(Line(), x=gg.float32[2, 3]), tmp_path, loss="output", **how)
    one, x = session(tmp_path), np.arange(6, dtype=np.float32).reshape(2, 3)
    one.set_learning_rate(0.5)
    for _ in range(accumulate):
        one.train_step({"x": x})
    np.testing.assert_allclose(one.gradients["bias"], np.full(3, accumulate / 3), rtol=1e-6)
    np.testing.assert_allclose(one.gradients["weight"], accumulate * x.sum(0) / 6, rtol=1e-6)
    assert one.optimizer_step()
    np.testing.assert_allclose(one.parameters["bias"], np.full(3, -accumulate / 6), rtol=1e-6)


def test_a_model_without_inputs_is_trained(tmp_path):
    class Point(nn.Module):
        def __init__(self):
            self.place = nn.Parameter((3,), initialize=nn.module.ones)

        def __call__(self):
            return ops.reduce_sum((self.place - np.float32([1, 2, 3])) ** 2, keepdims=0)

    gg.artifacts(gg.build(Point()), tmp_path, loss="output", optimizer=gg.SGD())
    assert session(tmp_path).train_step() == session(tmp_path).train_step({}) == 5
    trainer = Trainer(tmp_path, threads=1, schedule=schedule.constant(0.1))
    trainer.fit([{}] * 30, progress=False)
    np.testing.assert_allclose(trainer.parameters["place"], [1, 2, 3], atol=0.01)
