"""Several batches are one: their losses and gradients are those of the joined batch."""

import json
from itertools import pairwise

import numpy as np
import onnx
import pytest
from test_parallel import together

import graphgen as gg
from graphgen import nn, ops
from graphgen.errors import GraphgenError

RNG = np.random.default_rng(0)
X = RNG.normal(size=(6, 4, 3)).astype("f")
TARGET = RNG.normal(size=(6, 4)).astype("f")
MASK = np.ones((6, 4), "f")
MASK[0, 1:] = MASK[1] = 0
LENGTHS = np.array([1, 4, 3, 2, 4, 4])
ANSWERS = RNG.integers(0, 3, (6, 4))
ANSWERS[:2, 1:] = -1
T, INTS = gg.float32["n", "t"], gg.int64["n", "t"]
ALL = {"x": X, "target": TARGET, "mask": MASK, "lengths": LENGTHS, "answers": ANSWERS}
SPECS = {"target": T, "mask": T, "lengths": gg.int64["n"], "answers": INTS}


def total(x):
    return ops.reduce_sum(x, None, keepdims=0)


def mean(x, axes=None):
    return ops.reduce_mean(x, axes, keepdims=0)


def squares(output, target):
    error = output[..., 0] - target
    return error * error


def masked(output, target, mask):
    return total(squares(output, target) * mask) / total(mask)


def guarded(output, target, mask):
    return total(squares(output, target) * mask) / ops.maximum(total(mask), 1.0)


def almost(output, target, mask):
    return total(squares(output, target) * mask) / (total(mask) + 1e-8)


def divided_inside(output, target, mask):
    return -total(-squares(output, target) * mask / total(mask))


def times_inverse(output, target, mask):
    return total(squares(output, target) * mask) * (2.0 / total(mask))


def by_sign(output, target):
    kept = ops.cast(target >= 0.0, to=gg.int64)
    return total(squares(output, target) * ops.cast(kept, to=gg.float32)) / ops.cast(
        total(kept), to=gg.float32
    )


def by_length(output, target, lengths):
    length = ops.dim(output, 1)
    kept = ops.cast(ops.arange(length) < lengths[:, None], to=gg.float32)[:, :length]
    return total(squares(output, target) * kept) / total(kept)


def by_hand(output, answers):
    """Cross-entropy, written out; answers of -1 do not count."""
    kept = ops.cast(answers >= 0, to=gg.float32)
    picked = ops.gather_elements(output, ops.maximum(answers, 0)[..., None], axis=-1)[..., 0]
    each = ops.reduce_log_sum_exp(output, [-1], keepdims=0) - picked
    return total(each * kept) / total(kept)


def shifted(output, answers):
    return ops.cross_entropy(output[:, :-1], answers[:, 1:], ignore_index=-1)


def by_class(output, answers):
    weight = np.array([1.0, 2.0, 0.5], np.float32)
    return ops.weighted_cross_entropy(output, answers, weight, ignore_index=-1)


def plain(output, target):
    return mean(squares(output, target)) + 3.0


def by_row(output, target):
    return mean(mean(squares(output, target), [-1]))


def by_row_by_hand(output, target):
    each = ops.reduce_sum(squares(output, target), [-1], keepdims=0)
    return mean(each / ops.cast(ops.dim(output, 1), to=gg.float32))


def by_batch(output, target):
    return total(squares(output, target)) / ops.cast(ops.dim(output, 0), to=gg.float32)


def summed(output, target):
    return total(squares(output, target)) * 0.5


def two_parts(output, target):
    return mean(squares(output, target)) + mean(ops.abs(output[:, 0]))


def told(output, target, mask):
    """The gate hides what the loss divides by, which the function then says."""
    return masked(output, target, mask) * ops.exp(total(mask) * 0.0), total(mask)


def told_a_size(output, target):
    return plain(output, target), ops.dim(output, 0) * 4


OWN = [masked, guarded, almost, divided_inside, times_inverse, by_sign, by_length, by_hand]
OWN += [
    shifted,
    by_class,
    plain,
    by_row,
    by_row_by_hand,
    by_batch,
    summed,
    two_parts,
    told,
    told_a_size,
]


def inputs_of(loss):
    return loss.__code__.co_varnames[1 : loss.__code__.co_argcount]


def written(folder, loss, **options):
    model = gg.build(nn.Linear(3, 3), x=gg.float32["n", "t", 3])
    given = {name: SPECS[name] for name in inputs_of(loss)}
    gg.artifacts(model, folder, loss=loss, optimizer=gg.SGD(), **given, **options)
    return folder


def batches(loss, *cuts):
    names = ["x", *inputs_of(loss)]
    bounds = [0, *cuts, 6]
    return [{name: ALL[name][at:end] for name in names} for at, end in pairwise(bounds)]


def trainer(folder, **options):
    return gg.Trainer(folder, threads=1, schedule=gg.schedule.constant(1.0), **options)


def step(folder, data, **options):
    """The loss of one update, and its gradients, as SGD at the rate 1 subtracts them."""
    one = trainer(folder, accumulate=len(data), **options)
    before = one.parameters
    [line] = one.fit(data, steps=1, progress=False)
    return line["loss"], {name: before[name] - array for name, array in one.parameters.items()}


def same(found, wanted):
    assert found[0] == pytest.approx(wanted[0], rel=1e-6)
    for name, gradient in wanted[1].items():
        np.testing.assert_allclose(found[1][name], gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.share(2)
@pytest.mark.parametrize("loss", OWN)
def test_batches_of_a_loss_of_ones_own_are_one(loss, tmp_path):
    folder = written(tmp_path / "art", loss)
    whole, parts = batches(loss), batches(loss, 2, 3)
    wanted = step(folder, whole)
    same(step(folder, parts), wanted)
    assert trainer(folder).evaluate(parts) == pytest.approx(wanted[0], rel=1e-6)
    for found in together(2, lambda p: step(folder, batches(loss, 3), processes=p)):
        same(found, wanted)
    work = lambda p: trainer(folder, processes=p).evaluate(parts)  # noqa: E731
    assert together(2, work) == pytest.approx([wanted[0]] * 2, rel=1e-6)


def test_the_joined_loss_is_that_of_numpy(tmp_path):
    folder = written(tmp_path / "art", masked)
    one = trainer(folder)
    error = (X @ one.parameters["weight"] + one.parameters["bias"])[..., 0] - TARGET
    wanted = (error**2 * MASK).sum(dtype="d") / MASK.sum()
    slope = np.einsum("bt,bti->i", 2 * error * MASK, X) / MASK.sum()
    loss, gradients = step(folder, batches(masked, 2))
    assert loss == pytest.approx(wanted, rel=1e-6)
    np.testing.assert_allclose(gradients["weight"][:, 0], slope, rtol=1e-5, atol=1e-6)


def root(output, target):
    return ops.sqrt(mean(squares(output, target)))


def centered(output, target):
    return mean(squares(output - mean(output), target))


def backwards(output, target):
    return mean(output[::-1][..., 0] * target)


def gated(output, target):
    gate = ops.sigmoid(output[..., 1])
    return total(squares(output, target) * gate) / total(gate)


def by_place(output, target):
    places = ops.cast(ops.arange(ops.dim(target, 0)), to=gg.float32)
    return total(squares(output, target) * places[:, None])


def pairs_by_reshape(output, target):
    other = ops.reshape(ops.transpose(target, perm=[1, 0]), [-1])
    return mean(ops.reshape(output[..., 0], [-1]) * other)


def pairs_by_einsum(output, target):
    return mean(ops.einsum(output, target, equation="ntd,kt->kd"))


def by_other_size(output, target):
    """Samples may be along this axis, if a model has time first."""
    return total(squares(output, target)) / ops.cast(ops.dim(output, 1), to=gg.float32)


def times_other_size(output, target):
    return total(squares(output, target)) * (1.0 / ops.cast(ops.dim(output, 1), to=gg.float32))


def triangle(output, target):
    return mean(ops.trilu(squares(output, target)))


def highest(output, target):
    return ops.reduce_max(squares(output, target), None, keepdims=0)


def other_rows(output, target):
    return mean(ops.softmax(output, axis=0)[..., 0] * target)


def mixed(output, target, mask):
    return masked(output, target, mask) + summed(output, target)


NO_MEANS = [root, centered, backwards, gated, highest, other_rows, mixed, by_place, triangle]
NO_MEANS += [pairs_by_reshape, pairs_by_einsum, by_other_size, times_other_size]


@pytest.mark.parametrize("loss", NO_MEANS)
def test_what_is_no_mean_over_samples_is_not_guessed(loss, tmp_path):
    folder = written(tmp_path / "art", loss)
    whole, parts = batches(loss), batches(loss, 3)
    assert trainer(folder).evaluate(whole) == pytest.approx(step(folder, whole)[0], rel=1e-6)
    message = r"it is not known for how much it counts .*: let the function .* return \(loss, wei"
    for work in (
        lambda: trainer(folder).evaluate(parts),
        lambda: step(folder, parts),
        lambda: trainer(folder).measure(parts, ["perplexity"]),
    ):
        with pytest.raises(GraphgenError, match=message):
            work()
    found = together(2, lambda p: step(folder, whole, processes=p))
    assert any("it is not known for how much" in str(error) for error in found)


def test_a_count_that_is_given_may_be_of_a_batch_or_of_all(tmp_path):
    def counted(output, target, count):
        return total(squares(output, target)) / count

    def says(output, target, count):
        return counted(output, target, count), count

    model = gg.build(nn.Linear(3, 3), x=gg.float32["n", "t", 3])
    specs = {"target": T, "count": gg.float32[()]}
    parts = [{**one, "count": np.float32(one["target"].size)} for one in batches(plain, 2)]
    whole = [{**batches(plain)[0], "count": np.float32(24)}]
    for loss in (counted, says):
        gg.artifacts(model, tmp_path / loss.__name__, loss=loss, **specs)
    with pytest.raises(GraphgenError, match="it is not known for how much"):
        trainer(tmp_path / "counted").evaluate(parts)
    one = trainer(tmp_path / "says")
    assert one.evaluate(parts) == pytest.approx(one.evaluate(whole), rel=1e-6)
    found = together(2, lambda p: trainer(tmp_path / "says", processes=p).evaluate(whole))
    assert any("depends on no input that 2 processes divide" in str(error) for error in found)
    whole[0]["count"] = parts[0]["count"] = np.float32(-1)
    with pytest.raises(GraphgenError, match="batch 0: the weight of its loss is -1; it must be"):
        one.evaluate(parts)


def test_a_batch_without_anything_that_counts_changes_nothing(tmp_path):
    folder = written(tmp_path / "art", guarded)
    first, rest = batches(guarded, 2)
    empty = {**first, "mask": first["mask"] * 0}
    same(step(folder, [empty, rest]), step(folder, [rest]))
    assert trainer(folder).evaluate([empty, rest]) == trainer(folder).evaluate([rest])
    with pytest.raises(GraphgenError, match="nothing to learn from"):
        step(folder, [empty, empty])
    less = {**first, "mask": first["mask"] * np.float32(0.25)}  # divided by the guard
    with pytest.raises(GraphgenError, match="batch 0: it is not known for how much"):
        step(folder, [less, rest])


def test_parts_that_count_differently_are_no_mean(tmp_path):
    def loss(output, target, mask):
        return masked(output, target, mask) + mean(ops.abs(output))

    folder = written(tmp_path / "art", loss)
    even = [{**one, "mask": one["mask"] * 0 + 1} for one in batches(loss, 2)]
    whole = {name: np.concatenate([one[name] for one in even]) for name in even[0]}
    same(step(folder, even), step(folder, [whole]))
    with pytest.raises(GraphgenError, match=r"batch 0 is 0.0588 of what one part .*0.333 of anot"):
        step(folder, batches(loss, 2))
    with pytest.raises(GraphgenError, match=r"batch 0 is 0.0588 of what .* return \(loss, weight"):
        trainer(folder).evaluate(batches(loss, 2))


def test_the_file_of_the_evaluation_returns_the_loss_alone(tmp_path):
    for loss in (masked, told_a_size):
        folder = written(tmp_path / loss.__name__, loss)
        outputs = onnx.load(folder / "eval_model.onnx").graph.output
        assert [value.name for value in outputs] == ["loss"]


def test_a_folder_that_does_not_say_what_counts_counts_labels(tmp_path):
    folder = written(tmp_path / "art", by_class)
    wanted = step(folder, batches(by_class, 2))
    model = onnx.load(folder / "training_model.onnx")
    [entry] = (entry for entry in model.metadata_props if entry.key == "graphgen.loss")
    said = json.loads(entry.value)
    assert said.pop("weights") == ["loss_weight_0"]
    entry.value = json.dumps(said)
    onnx.save(model, folder / "training_model.onnx")
    same(step(folder, batches(by_class, 2)), wanted)


def test_a_fixed_number_of_samples_counts_alike(tmp_path):
    model = gg.build(nn.Linear(3, 3), x=gg.float32[3, 4, 3])
    given = {"target": gg.float32[3, 4]}
    gg.artifacts(model, tmp_path / "art", loss=plain, **given)
    one, data = trainer(tmp_path / "art"), batches(plain, 3)
    each = [one.evaluate([batch]) for batch in data]
    assert one.evaluate(data) == pytest.approx(np.mean(each), rel=1e-6)
    gg.artifacts(model, tmp_path / "sum", loss=summed, **given)
    with pytest.raises(GraphgenError, match="it is not known for how much"):
        trainer(tmp_path / "sum").evaluate(data)  # of 3 samples, 0.5 may be a mean's


def test_a_model_that_has_its_loss_says_what_it_divides_by(tmp_path):
    class WithLoss(nn.Module):
        def __init__(self):
            self.linear = nn.Linear(3, 3)

        def __call__(self, x, target, mask):
            return {"loss": masked(ops.tanh(self.linear(x)), target, mask)}

    model = gg.build(WithLoss(), x=gg.float32["n", "t", 3], target=T, mask=T)
    gg.artifacts(model, tmp_path / "art", loss="loss", optimizer=gg.SGD())
    same(step(tmp_path / "art", batches(masked, 2)), step(tmp_path / "art", batches(masked)))


FROM_TORCH = """
    <ir_version: 8, opset_import: ["" : 18]>
    graph (float[n, t, 3] x, float[n, t] target, float[n, t] mask) => (float loss)
    <float[3, 1] w = {1, 2, 3}> {
        one = Constant <value = int64 {1}> ()
        axes = Constant <value = int64[1] {-1}> ()
        y = MatMul (x, w)
        output = Squeeze (y, axes)
        error = Sub (output, target)
        square = Mul (error, error)
        kept = Mul (square, mask)
        summed = ReduceSum <keepdims: int = 0> (kept)
        counted = ReduceSum <keepdims: int = 0> (mask)
        least = CastLike (one, counted)
        count = Clip (counted, least)
        loss = Div (summed, count)
    }"""


def test_a_file_of_another_tool_says_what_it_divides_by(tmp_path):
    onnx.save(onnx.parser.parse_model(FROM_TORCH), tmp_path / "m.onnx")
    gg.artifacts(tmp_path / "m.onnx", tmp_path / "art", loss="loss", optimizer=gg.SGD())
    same(step(tmp_path / "art", batches(masked, 2)), step(tmp_path / "art", batches(masked)))


def test_an_auxiliary_loss_needs_a_weight_that_is_told(tmp_path):
    class Routed(nn.Module):
        def __init__(self):
            self.experts, self.head = nn.MixtureOfExperts(3, 6, experts=2, k=1), nn.Linear(3, 3)

        def __call__(self, x):
            return {"output": self.head(self.experts(x)), "balance": self.experts.balance(x)}

    def alone(output, answers):
        return ops.cross_entropy(output, answers, ignore_index=-1)

    def both(output, balance, answers):
        return ops.cross_entropy(output, answers, ignore_index=-1) + 0.01 * balance

    def says(output, balance, answers):
        return both(output, balance, answers), total(ops.cast(answers >= 0, to=gg.int64))

    model = gg.build(Routed(), x=gg.float32["n", "t", 3])
    for loss in (alone, both, says):
        gg.artifacts(model, tmp_path / loss.__name__, loss=loss, answers=INTS)
    data, whole = batches(by_hand, 2), batches(by_hand)
    one = trainer(tmp_path / "alone")
    assert one.evaluate(data) == pytest.approx(one.evaluate(whole), rel=1e-6)
    with pytest.raises(GraphgenError, match="it is not known for how much"):
        trainer(tmp_path / "both").evaluate(data)
    one, counts = trainer(tmp_path / "says"), [(x["answers"] >= 0).sum() for x in data]
    each = [one.evaluate([batch]) for batch in data]
    assert one.evaluate(data) == pytest.approx(np.average(each, weights=counts), rel=1e-6)


def test_a_sum_has_no_perplexity(tmp_path):
    folder = written(tmp_path / "art", summed)
    with pytest.raises(GraphgenError, match="perplexity is of a loss that is a mean"):
        trainer(folder).measure(batches(summed), ["perplexity"])
