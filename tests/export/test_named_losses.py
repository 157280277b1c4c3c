"""Losses with a name and options, and sums of them; tests/parity compares them with torch's."""

import numpy as np
import onnx
import pytest

import graphgen as gg
from graphgen import nn, ops
from graphgen.errors import GraphgenError
from graphgen.train.data import Dataset

RNG = np.random.default_rng(0)
IMAGE = np.asarray(RNG.normal(size=(2, 3, 2, 4)), "f")
KINDS = np.array([[[0, 1, 2, -100], [2, 2, 1, 0]], [[-100, 0, 1, 1], [2, 0, 0, -100]]])
WANTED = np.asarray(RNG.uniform(-3, 3, size=IMAGE.shape), "f")


class Scaled(nn.Module):
    """x times a gain for each channel, x (n, 3, ...)."""

    def __init__(self):
        self.gain = nn.Parameter((3, 1, 1), initialize=lambda _, shape: np.full(shape, 1.5, "f"))

    def __call__(self, x):
        return x * self.gain


@pytest.fixture(scope="module")
def pixels():
    return gg.build(Scaled(), x=gg.float32["n", 3, "h", 4])


def trainer(folder, **kwargs):
    return gg.Trainer(folder, threads=1, schedule=gg.schedule.constant(1.0), **kwargs)


def trained(folder, model, loss, **batch):
    """The loss of evaluation, and the gradient of the gain in one step of SGD."""
    gg.artifacts(model, folder, loss=loss, optimizer=gg.SGD())
    one = trainer(folder)
    before, evaluated = one.parameters["gain"], one.evaluate([batch])
    [line] = one.fit([batch], steps=1, progress=False)
    assert line["loss"] == pytest.approx(evaluated, rel=1e-6)
    return evaluated, before - one.parameters["gain"]


def by_hand(gain, weight, smoothing):
    """Cross-entropy of pixels along axis 1, as torch defines its weighted mean."""
    logits = IMAGE.astype("d") * gain
    logp = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    kept = KINDS != -100
    target = np.moveaxis(np.eye(3)[np.where(kept, KINDS, 0)], -1, 1)
    target = target * (1 - smoothing) + smoothing / 3
    each = -(logp * target * np.reshape(weight, (3, 1, 1))).sum(1)[kept]
    return each.sum() / np.asarray(weight)[KINDS[kept]].sum()


@pytest.mark.parametrize(
    ("weight", "smoothing"), [(None, 0.0), ([1, 2, 0.5], 0.0), ([3, 0, 1], 0.2)]
)
def test_cross_entropy_along_an_axis_with_weights(tmp_path, pixels, weight, smoothing):
    loss = gg.Loss("cross_entropy", axis=1, weight=weight, label_smoothing=smoothing)
    got, slope = trained(tmp_path / "art", pixels, loss, x=IMAGE, labels=KINDS)
    weight, h = weight or [1.0, 1.0, 1.0], 1e-6
    assert got == pytest.approx(by_hand(1.5, weight, smoothing), rel=1e-6)
    for i in range(3):
        step = h * np.eye(3)[i].reshape(3, 1, 1)
        up, down = (by_hand(1.5 + s * step, weight, smoothing) for s in (1, -1))
        assert slope[i, 0, 0] == pytest.approx((up - down) / (2 * h), rel=1e-5, abs=1e-6)


def test_classes_may_be_places_of_an_output_that_is_named(tmp_path, pixels):
    """As the tokens where an answer starts: each batch has as many classes as places."""
    places = RNG.integers(0, 2, (2, 3, 4))
    places[0, 1, 2] = -100
    loss = "cross_entropy:axis=2,output=output"
    got, slope = trained(tmp_path / "art", pixels, loss, x=IMAGE, labels=places)

    def entropy(gain):
        logits = IMAGE.astype("d") * gain
        logp = logits - np.log(np.exp(logits).sum(2, keepdims=True))
        kept = places != -100
        chosen = np.take_along_axis(logp, np.where(kept, places, 0)[:, :, None], 2)[:, :, 0]
        return -chosen[kept].sum() / kept.sum()

    assert got == pytest.approx(entropy(1.5), rel=1e-6)
    up, down = (entropy(1.5 + h) for h in (1e-6, -1e-6))
    assert slope.sum() == pytest.approx((up - down) / 2e-6, rel=1e-5)
    one = trainer(tmp_path / "art")
    with pytest.raises(GraphgenError, match="they must be 0 to the number of classes - 1"):
        one.evaluate([{"x": IMAGE, "labels": np.full_like(places, -1)}])
    with pytest.raises(GraphgenError, match="batch 0"):
        one.evaluate([{"x": IMAGE, "labels": np.full_like(places, 2)}])


def test_one_class_is_refused(tmp_path):
    model = gg.build(nn.Linear(3, 1), x=gg.float32["n", 3])
    with pytest.raises(GraphgenError, match="cross_entropy of one class is 0: give loss='mse'"):
        gg.artifacts(model, tmp_path / "art")


def test_weights_of_classes_make_the_mean_over_batches(tmp_path, pixels):
    gg.artifacts(pixels, tmp_path / "art", loss="cross_entropy:axis=1,weight=1/20/0.5")
    one = trainer(tmp_path / "art", accumulate=2)
    parts = [{"x": IMAGE[i : i + 1], "labels": KINDS[i : i + 1]} for i in range(2)]
    wanted = by_hand(1.5, [1, 20, 0.5], 0.0)
    assert one.evaluate(parts) == pytest.approx(wanted, rel=1e-6)
    assert one.fit(parts, steps=1, progress=False)[0]["loss"] == pytest.approx(wanted, rel=1e-6)
    assert one.parameters.keys() == {"gain"}


IN_THE_FILE = """
    <ir_version: 8, opset_import: ["" : 18]>
    graph (float[n, 3] x, int64[n] y) => (float loss)
    <float[3, 4] w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3}, float[4] c = {1, 5, 0.25, 2}> {
        scores = MatMul (x, w)
        loss = SoftmaxCrossEntropyLoss (scores, y, c)
    }"""


def test_weights_of_classes_in_a_file_count_and_are_not_trained(tmp_path):
    onnx.save(onnx.parser.parse_model(IN_THE_FILE), tmp_path / "m.onnx")
    table = gg.artifacts(tmp_path / "m.onnx", tmp_path / "art", loss="loss")
    assert [weight.name for weight in table if weight.trained] == ["w"]
    one, x = trainer(tmp_path / "art", accumulate=2), RNG.normal(size=(4, 3)).astype("f")
    data = [{"x": x[i : i + 2], "y": np.array(y)} for i, y in ((0, [2, 1]), (2, [0, 3]))]
    joined = {name: np.concatenate([batch[name] for batch in data]) for name in ("x", "y")}
    assert one.evaluate(data) == pytest.approx(one.evaluate([joined]), rel=1e-6)


def of_differences(name, delta):
    d = np.abs(IMAGE.astype("d") * 1.5 - WANTED)
    if name == "l1":
        return d.mean()
    huber = np.where(d <= delta, d * d / 2, delta * (d - delta / 2)).mean()
    return huber if name == "huber" else huber / delta


@pytest.mark.parametrize(
    ("loss", "delta"), [("l1", 0), ("huber", 1), ("huber:delta=0.3", 0.3), ("smooth_l1:delta=2", 2)]
)
def test_losses_of_differences(tmp_path, pixels, loss, delta):
    got, _ = trained(tmp_path / "art", pixels, loss, x=IMAGE, labels=WANTED)
    assert got == pytest.approx(of_differences(loss.partition(":")[0], delta), rel=1e-6)


@pytest.mark.parametrize("weight", [None, 3.0, [2.0, 0.5, 1.0]])
def test_binary_cross_entropy_of_large_logits(tmp_path, pixels, weight):
    x, target = IMAGE * 60, (WANTED > 0).astype("f")
    axis = 1 if isinstance(weight, list) else None
    loss = gg.Loss("binary_cross_entropy", weight=weight, axis=axis)
    got, slope = trained(tmp_path / "art", pixels, loss, x=x, labels=target)
    z = x.astype("d") * 1.5
    w = 1.0 if weight is None else np.reshape(weight, (-1, 1, 1))
    each = w * target * np.logaddexp(0, -z) + (1 - target) * np.logaddexp(0, z)
    assert got == pytest.approx(each.mean(), rel=1e-6)
    p = 1 / (1 + np.exp(-z))
    each = ((1 - target) * p - w * target * (1 - p)) * x
    wanted = each.sum((0, 2, 3), keepdims=True)[0] / x.size
    np.testing.assert_allclose(slope, wanted, 1e-5, 1e-6)


class Detector(nn.Module):
    def __init__(self):
        self.kinds, self.boxes = nn.Linear(3, 4), nn.Linear(3, 2)

    def __call__(self, x):
        return {"kinds": self.kinds(x), "boxes": self.boxes(x)}


def small(boxes):
    return ops.reduce_mean(boxes * boxes, None, keepdims=0) * 0.1


def test_a_sum_of_losses(tmp_path):
    model = gg.build(Detector(), x=gg.float32["n", 3])
    x, boxes = (RNG.normal(size=(6, n)).astype("f") for n in (3, 2))
    batch = {"x": x, "labels": np.array([0, 3, -100, 1, 2, -100]), "wanted": boxes}
    parts = [
        gg.Loss("cross_entropy", output="kinds"),
        gg.Loss("l1", output="boxes", labels="wanted", factor=0.5),
        small,
    ]
    found = []
    for number, loss in enumerate([*([part] for part in parts), parts]):
        gg.artifacts(model, tmp_path / str(number), loss=loss)
        one = trainer(tmp_path / str(number))
        found.append(one.evaluate([{n: a for n, a in batch.items() if n in one.inputs}]))
    assert found[3] == pytest.approx(sum(found[:3]), rel=1e-6)
    assert one.evaluate([batch, batch]) == pytest.approx(found[3], rel=1e-6)
    halves = [{name: array[at] for name, array in batch.items()} for at in (slice(3), slice(3, 6))]
    assert one.evaluate(halves) == pytest.approx(found[3], rel=1e-6)  # both leave one out
    thirds = [{name: array[at] for name, array in batch.items()} for at in (slice(4), slice(4, 6))]
    with pytest.raises(GraphgenError, match=r"batch 0 is 0.667 of what one .* 0.75 of another"):
        one.evaluate(thirds)  # l1 counts rows that cross-entropy leaves out
    both = [gg.Loss("mse", output="boxes"), gg.Loss("l1", output="boxes")]
    gg.artifacts(model, tmp_path / "both", loss=both)
    assert trainer(tmp_path / "both").inputs.keys() == {"x", "labels"}


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ("cross_entropy", r"output is float\[n, 3, h, 4\]; loss='cross_entropy' needs the axis"),
        ("cross_entropy:axis=2", "cross_entropy needs logits with a known number of classes"),
        ("cross_entropy:axis=4", "which has no axis 4"),
        ("cross_entropy:axis=1,weight=1/2", "weight has 2 numbers, but .* 3 classes"),
        ("binary_cross_entropy:weight=1/2/3", "needs the axis of its classes"),
        ("binary_cross_entropy:axis=1", "axis has no effect with loss=binary_cross_entropy"),
        ("l1:delta=2", "delta has no effect with loss=l1"),
        ("output:axis=1", "axis has no effect with loss=output"),
        ("l2", "loss is 'l2'; choose 'cross_entropy', .*'smooth_l1', a scalar output"),
        ("l1:factor", "'factor' is not NAME=VALUE"),
        ("l1:faktor=2", "not NAME=VALUE, each name once, of .*; did you mean 'factor'"),
        ("l1:factor=2,factor=3", "each name once"),
        ("huber:delta=x", "delta is 'x', which is no number"),
        ("huber:delta=-1", "delta is -1.0; it must be above 0 and finite"),
        ("cross_entropy:axis=1.5", "axis is '1.5', which is no number"),
        ("cross_entropy:weight=0/0", r"weight is \(0.0, 0.0\); it must be numbers from 0"),
        ([], r"loss is \[\]; give a loss, or a list"),
        ([3], r"loss\[0\] is 3; it must be a text, Loss\(...\) or a function"),
        (["mse", "l1:labels=x"], "the model has an input 'x' already"),
        (["mse", "cross_entropy:axis=1"], "'labels' are labels of two losses"),
    ],
)
def test_options_that_make_no_sense_are_one_error(tmp_path, pixels, loss, message):
    with pytest.raises(GraphgenError, match=message):
        gg.artifacts(pixels, tmp_path / "art", loss=loss)
    assert not [*tmp_path.iterdir()]


def test_numbers_of_different_lengths_are_no_labels(tmp_path, pixels):
    gg.artifacts(pixels, tmp_path / "art", loss="l1")
    columns = {"x": [IMAGE[0], IMAGE[0, :, :1]], "labels": [WANTED[0], WANTED[0, :, :1]]}
    with pytest.raises(GraphgenError, match="numbers of different lengths, and what they would be"):
        trainer(tmp_path / "art").fit(Dataset(columns, 2), progress=False)
