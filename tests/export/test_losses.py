"""What artifacts train: cross-entropy with its options, squared errors, losses of one's own."""

import json

import numpy as np
import onnx
import pytest

import graphgen as gg
from graphgen import nn, ops
from graphgen.errors import GraphgenError
from graphgen.train.data import Dataset

RNG = np.random.default_rng(0)
X = RNG.normal(size=(6, 3)).astype("f")
LABELS = np.array([0, 3, -100, 1, 2, -100])


def linear(features=4):
    return gg.build(nn.Linear(3, features), x=gg.float32["n", 3])


def trainer(folder, **kwargs):
    return gg.Trainer(folder, threads=1, schedule=gg.schedule.constant(1e-2), **kwargs)


def logits_of(model):
    values = model.graph.initializers
    weight, bias = (values[name].const_value.numpy() for name in ("weight", "bias"))
    return X.astype("d") @ weight + bias


@pytest.mark.parametrize(("smoothing", "z"), [(0.0, 0.0), (0.2, 0.0), (0.0, 0.5), (0.1, 1e-4)])
def test_cross_entropy_with_its_options(tmp_path, smoothing, z):
    model = linear()
    gg.artifacts(model, tmp_path / "art", label_smoothing=smoothing, z_loss=z)
    logits = logits_of(model)
    lse = np.log(np.exp(logits).sum(-1))
    logp = logits - lse[:, None]
    kept = LABELS != -100
    target = np.eye(4)[np.where(kept, LABELS, 0)] * (1 - smoothing) + smoothing / 4
    wanted = ((-target * logp).sum(-1) + z * lse**2)[kept].mean()
    one = trainer(tmp_path / "art")
    batch = {"x": X, "labels": LABELS}
    assert one.evaluate([batch]) == pytest.approx(wanted, rel=1e-6)
    assert one.fit([batch], progress=False)[0]["loss"] == pytest.approx(wanted, rel=1e-6)


def test_z_loss_pulls_the_logits_to_a_normalizer_of_one(tmp_path):
    last = []
    for z in (0.0, 1.0):
        gg.artifacts(linear(), tmp_path / str(z), z_loss=z, optimizer=gg.AdamW(weight_decay=0.0))
        one = trainer(tmp_path / str(z))
        one.fit([{"x": X, "labels": LABELS}], steps=300, progress=False)
        logits = X @ one.parameters["weight"] + one.parameters["bias"]
        last.append(np.abs(np.log(np.exp(logits).sum(-1))[LABELS != -100]).mean())
    assert 2 * last[1] < last[0]


def hinge(output, target, margin):
    """Σ max(0, margin - target · output) / n over the outputs of one column."""
    loss = ops.relu(margin - target * ops.squeeze(output, [-1]))
    return ops.reduce_mean(loss, None, keepdims=0)


SPECS = {"target": gg.float32["n"], "margin": gg.float32["n"]}


def test_a_loss_of_ones_own_with_inputs_of_its_own(tmp_path):
    model = linear(1)
    gg.artifacts(model, tmp_path / "art", loss=hinge, **SPECS)
    for file in ("training", "eval"):
        inputs = onnx.load(tmp_path / f"art/{file}_model.onnx").graph.input
        assert [value.name for value in inputs][:3] == ["x", "target", "margin"]
    target, margin = np.sign(X[:, 0]), np.linspace(0.5, 1.5, 6, dtype=np.float32)
    batch = {"x": X, "target": target, "margin": margin}
    one = trainer(tmp_path / "art")
    wanted = np.maximum(0, margin - target * logits_of(model)[:, 0]).mean()
    assert one.evaluate([batch]) == pytest.approx(wanted, rel=1e-6)
    history = one.fit([batch], steps=200, progress=False)
    assert history[-1]["loss"] < 0.2 * history[0]["loss"]


X4 = gg.float32["n", 4]


class Weighted(nn.Module):
    """Gains of 1 on x, which is the output a; b is the distance from the mask."""

    def __init__(self):
        self.norm = nn.Parameter((4,), initialize=lambda rng, shape: np.ones(shape, np.float32))

    def __call__(self, x, mask):
        return {"a": x * self.norm, "b": x - mask}


def test_a_loss_may_take_inputs_of_the_model_and_several_outputs(tmp_path):
    model = gg.build(Weighted(), x=X4, mask=X4)

    def loss(a, b, mask, scale=2.0):
        return ops.reduce_sum(a * b * mask, None, keepdims=0) * scale

    gg.artifacts(model, tmp_path / "art", loss=loss)
    x, mask = RNG.normal(size=(2, 2, 4)).astype("f")
    found = trainer(tmp_path / "art").evaluate([{"x": x, "mask": mask}])
    assert found == pytest.approx(2 * (x * (x - mask) * mask).sum(), rel=1e-5)


def test_how_many_batches_make_an_update_is_in_the_metadata(tmp_path):
    found = []
    for number in (1, 4):
        gg.artifacts(linear(), tmp_path / "art", accumulate=number)
        metadata = onnx.load(tmp_path / "art/training_model.onnx").metadata_props
        [entry] = (entry.value for entry in metadata if entry.key == "graphgen.loss")
        found.append(json.loads(entry))
    plain = {"axes": {"labels": -1}, "classes": 4, "loss": "cross_entropy", "outputs": ["output"]}
    plain["peak_bytes"] = found[0]["peak_bytes"]
    assert found == [plain, plain | {"accumulate": 4}]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": hinge}, "hinge: missing a required argument: 'target'; .*output.* new inputs"),
        ({"loss": hinge, **SPECS, "x": X4}, "the model has a x already"),
        ({"loss": hinge, **SPECS, "weight": X4}, "the model has a weight already"),
        ({"loss": hinge, **SPECS, "weights": X4}, "unexpected keyword argument 'weights'"),
        ({"loss": hinge, "target": gg.float32, "margin": X4}, "target is .*; give a dtype with"),
        ({"loss": hinge, "target": np.ones(3), "margin": X4}, "target is .*; give a dtype with"),
        ({"loss": lambda output: output * 2.0}, r"float\[n, 4\]; a loss must be one float"),
        ({"loss": lambda output: 3.0}, "returned float; it must return one float value"),
        ({"loss": lambda x: ops.reduce_mean(x, None, keepdims=0)}, "on none of the 2 float"),
        ({"loss": lambda x: x}, "on none of the 2 float parameters"),
        (
            {"loss": lambda output: (ops.reduce_mean(output, keepdims=0), output)},
            "the weight .*; it must be one numb",
        ),
        (
            {"loss": lambda output: (ops.reduce_mean(output, keepdims=0),) * 2},
            "depends on weights of the model",
        ),
        ({"loss": hinge, **SPECS, "output": "output"}, "output has no effect with loss=hinge"),
        ({"loss": hinge, **SPECS, "z_loss": 0.1}, "z_loss has no effect with loss=hinge"),
        ({"loss": "mse", "label_smoothing": 0.1}, "label_smoothing has no effect with loss=mse"),
        ({"loss": "mse", "weights": X4}, "weights has no effect with loss=mse"),
        ({"loss": "output", "output": "output"}, "output has no effect with loss=output"),
        ({"z_loss": -1.0}, "z_loss is -1.0; it must be at least 0"),
        ({"z_loss": float("nan")}, "z_loss is nan"),
        ({"accumulate": 0}, "accumulate is 0; it must be an integer of at least 1"),
        ({"accumulate": 2.5}, "accumulate is 2.5"),
        ({"accumulate": True}, "accumulate is True; it must be an int"),
    ],
)
def test_a_loss_that_makes_no_sense_is_one_error(tmp_path, options, message):
    with pytest.raises(GraphgenError, match=message):
        gg.artifacts(linear(), tmp_path / "art", **options)
    assert not [*tmp_path.iterdir()]


def by_classes(output, answers):
    return ops.cross_entropy(output, answers, ignore_index=-7)


def masked_by_hand(output, labels):
    """No operator of ours knows that these are labels; it picks along the samples."""
    kept = ops.cast(labels >= 0, to=output.dtype)
    picked = ops.gather_elements(output, ops.unsqueeze(ops.where(labels < 0, 0, labels), [-1]))
    return -ops.reduce_sum(ops.squeeze(picked, [-1]) * kept, None, keepdims=0)


def batches_of(name, *labels):
    return [{"x": X[:4] * (i + 1), name: np.array(row)} for i, row in enumerate(labels)]


def test_labels_of_a_loss_of_ones_own_count_as_those_of_ours(tmp_path):
    rows = [0, -100, -100, -100], [1, 1, 2, 0]
    gg.artifacts(linear(), tmp_path / "ours", accumulate=2)
    gg.artifacts(linear(), tmp_path / "own", loss=by_classes, accumulate=2, answers=gg.int64["n"])
    found = []
    for name, own in (("ours", "labels"), ("own", "answers")):
        data = batches_of(own, *([-7 if own != "labels" and x < 0 else x for x in r] for r in rows))
        one = trainer(tmp_path / name)
        evaluated = one.evaluate(data)
        [line] = one.fit(data, steps=1, progress=False)
        found.append((evaluated, line, one.parameters["weight"].tobytes()))
    assert found[0] == found[1]
    for wrong, told in (
        (
            [1, 2, 3, -1],
            "batch 1: labels go from -1 to 3; they must be 0 to 3, or -7 .*: row 3 has -1",
        ),
        ([1, 4, -7, 0], "batch 1: labels go from 0 to 4; .*: row 1 has 4"),
        ([1, -100, 0, 0], "row 1 has -100"),
    ):
        for work in (one.evaluate, lambda data: one.fit(data, progress=False)):
            before = one.step
            with pytest.raises(GraphgenError, match=told):
                work(batches_of("answers", [0, 0, 0, 0], wrong))
            assert one.step == before


IN_THE_FILE = """
    <ir_version: 8, opset_import: ["" : 18]>
    graph (float[n, 3] x, int64[n, 1] y) => (float loss)
    <float[3, 4] w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3}> {
        axis = Constant <value = int64[1] {1}> ()
        scores = MatMul (x, w)
        labels = Squeeze (y, axis)
        loss = SoftmaxCrossEntropyLoss <ignore_index: int = -1> (scores, labels)
    }"""


def test_labels_of_a_loss_that_the_file_has(tmp_path):
    onnx.save(onnx.parser.parse_model(IN_THE_FILE), tmp_path / "m.onnx")
    gg.artifacts(tmp_path / "m.onnx", tmp_path / "art", loss="loss")
    one = trainer(tmp_path / "art", accumulate=2)
    data = [{"x": X[:2], "y": np.array(y)[:, None]} for y in ([2, -1], [0, 3], [1, -1])]
    joined = {name: np.concatenate([batch[name] for batch in data]) for name in ("x", "y")}
    assert one.evaluate(data) == pytest.approx(one.evaluate([joined]), rel=1e-6)
    data[1]["y"][1] = -2
    with pytest.raises(GraphgenError, match=r"they must be 0 to 3, or -1 .*: row 1 has -2"):
        one.fit(data, progress=False)


def test_labels_that_may_not_count_are_no_mean_over_batches(tmp_path):
    gg.artifacts(linear(), tmp_path / "art", loss=masked_by_hand, labels=gg.int64["n"])
    data = batches_of("labels", [0, 1, 2, 3], [1, -100, 2, 3])
    one = trainer(tmp_path / "art")
    one.fit(data, progress=False)
    assert one.evaluate(data[1:]) != one.evaluate(data[:1])
    told = r"batch [01]: it is not known for how much it counts .* return \(loss, weight\)"
    for work in (
        one.evaluate,
        lambda data: trainer(tmp_path / "art", accumulate=2).fit(data, progress=False),
    ):
        with pytest.raises(GraphgenError, match=told):
            work(data)
    both = {"loss": lambda output, a, b: by_classes(output, a) + by_classes(output, b)}
    gg.artifacts(linear(), tmp_path / "two", **both, a=gg.int64["n"], b=gg.int64["n"])
    one = trainer(tmp_path / "two", accumulate=2)
    two = [{**batch, "b": batch["a"]} for batch in batches_of("a", [0, 1, 2, 3], [1, 1, 2, 3])]
    one.fit(two, progress=False)
    two[1]["b"] = np.array([-7, 0, 0, 0])
    with pytest.raises(GraphgenError, match=r"batch 2 is 0.5 of what one part .* 0.571 of an"):
        one.fit(two, progress=False)


def test_all_labels_of_a_file_are_looked_at_before_the_first_step(tmp_path):
    gg.artifacts(linear(), tmp_path / "art")
    one, good = trainer(tmp_path / "art"), np.arange(6) % 4
    bad = np.where(np.arange(6) == 5, -1, good)
    with pytest.raises(GraphgenError, match=r"data: labels go from -1 to 3; .*: row 5 has -1"):
        one.fit(Dataset({"x": X, "labels": bad}, 1, seed=None), progress=False)
    ragged = [np.array([0, 1]), np.array([2, 4, 1])]
    columns = {"x": X[:2], "labels": ragged}
    evaluated = Dataset(columns, 1, seed=None, who="--eval e.jsonl")
    with pytest.raises(GraphgenError, match=r"--eval e.jsonl: labels go .*: row 1 has 4"):
        one.fit([{"x": X, "labels": good}], evaluate=evaluated, evaluate_every=9, progress=False)
    assert one.step == 0


def test_labels_of_another_name_are_not_filled_up_with_a_class(tmp_path):
    gg.artifacts(linear(), tmp_path / "art", loss=by_classes, answers=gg.int64["n"])
    columns = {"x": [X[:1], X[:2]], "answers": [np.array([0]), np.array([1, 2])]}
    with pytest.raises(GraphgenError, match="answers are labels of different lengths, which would"):
        trainer(tmp_path / "art").fit(Dataset(columns, 2), progress=False)
