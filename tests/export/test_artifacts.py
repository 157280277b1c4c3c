"""The four training artifacts: the official contract, determinism, bad input."""

import filecmp
import json
from pathlib import Path

import jsonschema
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

import graphgen as gg
from graphgen import nn, ops
from graphgen.errors import GraphgenError
from graphgen.export.artifact_files import TRAINING
from graphgen.export.artifacts import artifacts
from graphgen.export.checkpoint import Checkpoint
from graphgen.export.optimizers import SGD, AdamW, Group, read_optimizer
from graphgen.export.write import export
from graphgen.graph import parameters
from graphgen.match import Engine, Miss, Rewrite
from graphgen.measure.reference import evaluate
from graphgen.passes.training import lowering, products
from graphgen.runtime import Session
from graphgen.targets import newest_opset, target
from graphgen.train.lower import lower

DOCS = Path(__file__).resolve().parents[2] / "docs"
FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
X = gg.float32["n", 3]
X4 = np.ones((2, 4), np.float32)
FILES = ["checkpoint", "eval_model.onnx", "optimizer_model.onnx", "training_model.onnx"]


class Model(nn.Module):
    def __init__(self, norm="layer", dropout=0.1):
        self.embedding = nn.Embedding(11, 8)
        self.stack = nn.Encoder(
            8, layers=1, num_heads=2, causal=True, norm=norm, dropout=dropout, hidden=12
        )

    def __call__(self, ids):
        return {"logits": self.embedding.logits(self.stack(self.embedding(ids)))}


def build(**kwargs):
    return gg.build(Model(**kwargs), ids=gg.int64["batch", "seq"], training=True)


def linear():
    return gg.build(nn.Linear(3, 2), x=X)


def names(values):
    return [value.name for value in values]


def test_the_files_follow_the_official_contract(tmp_path):
    model = build()
    artifacts(model, tmp_path / "art", optimizer=AdamW(weight_decay=0.5, clip_norm=2.0))
    assert sorted(p.name for p in (tmp_path / "art").iterdir()) == FILES
    trainable = list(parameters(model.graph))
    training = onnx.load(tmp_path / "art/training_model.onnx")
    assert names(training.graph.input) == [
        *("ids", "seed", "step", "labels", *trainable),
        *(f"{name}_grad.accumulation.buffer" for name in trainable),
        "lazy_reset_grad",
    ]
    flags = [f"{name}_grad.accumulation.out" for name in trainable]
    assert names(training.graph.output) == ["loss", *flags]
    last = training.graph.node[-len(trainable) :]
    for node, name in zip(last, trainable, strict=True):
        assert (node.domain, node.op_type) == ("com.microsoft", "InPlaceAccumulatorV2")
        buffer = f"{name}_grad.accumulation.buffer"
        assert [*node.input] == [buffer, f"{name}_grad", "lazy_reset_grad"]
    evaluation = onnx.load(tmp_path / "art/eval_model.onnx")
    assert names(evaluation.graph.input) == ["ids", "labels", *trainable]
    assert names(evaluation.graph.output) == ["loss"]
    assert "BitShift" not in {node.op_type for node in evaluation.graph.node}  # dropout's hash
    optimizer = onnx.load(tmp_path / "art/optimizer_model.onnx")
    sequences = ["params", "gradients", "first_order_moments", "second_order_moments"]
    assert names(optimizer.graph.input) == ["learning_rate", "step", *sequences]
    assert [n.op_type for n in optimizer.graph.node] == ["InplaceClipGradNorm", "AdamWOptimizer"]
    checkpoint = Checkpoint.load(tmp_path / "art/checkpoint")
    assert list(checkpoint.trainable) == trainable and not checkpoint.frozen
    for name, array in checkpoint.trainable.items():
        np.testing.assert_array_equal(array, model.graph.initializers[name].const_value.numpy())


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_opset_21_and_both_runtimes_can_load_it(tmp_path, norm):
    artifacts(build(norm=norm), tmp_path / "art")
    for file in FILES[1:]:
        proto = onnx.load(tmp_path / "art" / file)
        opsets = {entry.domain: entry.version for entry in proto.opset_import}
        assert opsets[""] <= 21 and proto.ir_version <= 10
        assert opsets.keys() <= {"", "com.microsoft"}
        ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])


def test_a_profile_keeps_to_what_its_runtime_has(tmp_path):
    rng = np.random.default_rng(0)
    batch = dict(zip(("ids", "labels"), rng.integers(0, 11, (2, 3, 5)), strict=True))
    newer, losses = {"Attention", "RMSNormalization"}, []
    for profile in ("official", "stock"):
        artifacts(build(norm="rms"), tmp_path / profile, profile=profile)
        found = onnx.load(tmp_path / profile / "training_model.onnx")
        has = newer & target("cpu").kernels[""].keys() if profile == "stock" else set()
        assert {n.op_type for n in found.graph.node} & newer == has
        assert (found.opset_import[0].version > 21) == bool(has)
        trainer = gg.Trainer(tmp_path / profile, threads=1)
        losses += [[s["loss"] for s in trainer.fit([batch] * 3, progress=False)]]
    np.testing.assert_allclose(*losses, rtol=1e-6)


UNFOLDED = """
    <ir_version: 8, opset_import: ["" : 18, "com.microsoft" : 1]>
    graph (float[n, 4] x) => (float[n, 4] y) <float[4] w = {1, 2, 3, 4}> {
        windows = com.microsoft.UnfoldTensor <dim: int = 1, size: int = 2> (x)
        mean = ReduceMean <keepdims: int = 0> (windows)
        product = Mul (x, w)
        y = Add (product, mean)
    }"""


def test_an_operator_that_the_profile_lacks_is_named(tmp_path):
    onnx.save(onnx.parser.parse_model(UNFOLDED), tmp_path / "m.onnx")
    lacking = r"official \(onnxruntime 1.19.*\) has no UnfoldTensor; profile 'stock' may have it"
    with pytest.raises(GraphgenError, match=lacking):
        artifacts(tmp_path / "m.onnx", tmp_path / "art", loss="mse")
    if "UnfoldTensor" in target("cpu").kernels["com.microsoft"]:
        artifacts(tmp_path / "m.onnx", tmp_path / "art", loss="mse", profile="stock")
        assert len(gg.Trainer(tmp_path / "art").fit([{"x": X4, "labels": X4}], progress=False)) == 1


def test_labels_follow_the_loss(tmp_path):
    artifacts(build(), tmp_path / "a")
    artifacts(build(), tmp_path / "b", loss="mse")
    found = []
    for folder in "ab":
        model = ir.load(tmp_path / folder / "eval_model.onnx")
        [labels] = (value for value in model.graph.inputs if value.name == "labels")
        found.append((labels.dtype, str(labels.shape)))
    assert found == [(ir.DataType.INT64, "[batch,seq]"), (ir.DataType.FLOAT, "[batch,seq,11]")]


def test_what_is_not_trainable_is_frozen(tmp_path):
    artifacts(build(), tmp_path / "art", trainable=r"(up|down)\.weight$")
    checkpoint = Checkpoint.load(tmp_path / "art/checkpoint")
    assert [name.split(".")[-2] for name in checkpoint.trainable] == ["up", "down"]
    assert "embedding.weight" in checkpoint.frozen
    inputs = names(onnx.load(tmp_path / "art/training_model.onnx").graph.input)
    assert "embedding.weight" in inputs
    assert "embedding.weight_grad.accumulation.buffer" not in inputs


def test_a_path_a_model_and_the_same_again_give_the_same_bytes(tmp_path):
    model = build()
    export(model, tmp_path / "model.onnx")
    for folder, source in (("a", model), ("b", model), ("c", tmp_path / "model.onnx")):
        artifacts(source, tmp_path / folder)
    same = filecmp.cmpfiles(tmp_path / "a", tmp_path / "b", FILES, shallow=False)[0]
    assert same == FILES
    same = filecmp.cmpfiles(tmp_path / "a", tmp_path / "c", FILES, shallow=False)[0]
    assert {"checkpoint", "optimizer_model.onnx"} <= {*same}
    a, c = (onnx.load(tmp_path / f / "training_model.onnx").graph for f in "ac")
    assert (names(a.input), names(a.output)) == (names(c.input), names(c.output))


@pytest.mark.parametrize(
    "optimizer",
    [
        AdamW(0.125, betas=(0.5, 0.75), epsilon=2**-20),
        AdamW(clip_norm=0.5, no_decay=r"\.bias$|ü"),
        SGD(),
        SGD(4.0),
        SGD(momentum=0.5, nesterov=True, weight_decay=0.125),
        AdamW(groups=(Group("ü", rate=0.3, weight_decay=0.1), Group("b", rate=2))),
    ],
)
def test_the_settings_are_read_back_as_float32(optimizer):
    model = optimizer.official()
    onnx.checker.check_model(model)
    found = read_optimizer(model, "it")
    given = dict(vars(optimizer))
    assert given.pop("no_decay", None) == getattr(found, "no_decay", None)
    assert given.pop("groups") == found.groups
    for key, value in given.items():
        exact = None if value is None else np.float32(value)
        np.testing.assert_equal(value if value is None else np.float32(getattr(found, key)), exact)


class Tied(nn.Module):
    """One table for embedding and logits, between them two maps that start alike."""

    def __init__(self):
        self.table, self.a, self.b = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def __call__(self, ids):
        return self.table.logits(self.b(ops.relu(self.a(self.table(ids)))))


@pytest.mark.parametrize("profile", ["official", "stock"])
def test_one_weight_used_twice_is_tied_and_equal_bytes_are_not(tmp_path, profile):
    model = gg.build(Tied(), ids=gg.int64["n"])
    values = model.graph.initializers
    values["b.weight"].const_value = values["a.weight"].const_value
    export(model, tmp_path / "m.onnx")
    artifacts(tmp_path / "m.onnx", tmp_path / "art", optimizer=SGD(), profile=profile)
    start = Checkpoint.load(tmp_path / "art/checkpoint").trainable
    assert list(start) == [*parameters(model.graph)]
    trainer = gg.Trainer(tmp_path / "art", schedule=gg.schedule.constant(0.5), threads=1)
    feeds = {"ids": np.array([0, 3, 3, 6]), "labels": np.array([3, 0, 1, 5])}
    trainer.fit([feeds], progress=False)
    eval_model = ir.load(tmp_path / "art/eval_model.onnx")
    rng = np.random.default_rng(0)
    for name, array in start.items():  # the slope along a random direction, of all uses together
        direction = rng.normal(size=array.shape)
        sides = []
        for h in (1e-5, -1e-5):
            moved = start | {name: array.astype("d") + h * direction}
            sides += evaluate(eval_model, feeds | moved)
        slope = (trainer.parameters[name].astype("d") - array) * direction / -0.5
        np.testing.assert_allclose(slope.sum(), (sides[0] - sides[1]) / 2e-5, rtol=1e-3, atol=1e-6)
    assert not np.allclose(trainer.parameters["a.weight"], trainer.parameters["b.weight"])


@pytest.mark.parametrize("profile", ["official", "stock"])
def test_dropout_is_a_function_of_seed_and_step(tmp_path, profile):
    artifacts(build(dropout=0.4), tmp_path / "art", profile=profile)
    program = lower(tmp_path / "art")
    weights = Checkpoint.load(tmp_path / "art/checkpoint").trainable
    ids, labels = np.random.default_rng(0).integers(0, 11, (2, 3, 5))

    def run(weights, seed=1, step=2):
        session = Session(program.training)  # a new one: it must not count its own runs
        keys = {"seed": np.array(seed), "step": np.array(step)}
        names = [*session.outputs]
        return dict(zip(names, session(ids=ids, labels=labels, **keys, **weights), strict=True))

    first = run(weights)
    for name, array in run(weights).items():
        np.testing.assert_array_equal(array, first[name])
    others = [float(run(weights, **other)["loss"]) for other in ({"seed": 2}, {"step": 3})]
    assert len({float(first["loss"]), *others}) == 3
    # The backward pass drops what the forward pass drops: its slope is that of this very loss.
    gradient = first["embedding.weight_grad"].astype("d")
    exact = ir.from_proto(onnx.load_from_string(program.training))
    feeds = {"ids": ids, "labels": labels, "seed": np.array(1), "step": np.array(2), **weights}
    sides = [
        evaluate(exact, feeds | {"embedding.weight": weights["embedding.weight"] + h * gradient})[0]
        for h in (1e-5, -1e-5)
    ]
    np.testing.assert_allclose((sides[0] - sides[1]) / 2e-5, (gradient**2).sum(), rtol=1e-4)


def test_the_walks_over_a_graph_do_not_grow_with_its_layers(tmp_path, monkeypatch):
    walks, walk = [], Engine.run

    def counted(*given, **how):
        walks.append(given)
        return walk(*given, **how)

    monkeypatch.setattr(Engine, "run", counted)
    found = []
    for layers in (2, 7):
        stack = nn.Encoder(8, layers=layers, num_heads=2, causal=True, hidden=12)
        artifacts(gg.build(stack, x=gg.float32["batch", "seq", 8]), tmp_path / "art", loss="mse")
        found.append(len(walks))
        walks.clear()
    assert found[0] == found[1]


CONSTANT = """
    <ir_version: 8, opset_import: ["" : 18]>
    graph (float[n, 4] x) => (float[n, 4] y) <float[4] w = {1, 2, 3, 4}> {
        half = Constant <value_floats = [0.5, 0.5, 0.5, 0.5]> ()
        product = Mul (x, w)
        y = Mul (product, half)
    }"""


def test_a_constant_of_a_file_is_no_weight_unless_it_is_named(tmp_path):
    onnx.save(onnx.parser.parse_model(CONSTANT), tmp_path / "m.onnx")
    for options, trained in (({}, ["w"]), ({"trainable": "half"}, ["half"])):
        artifacts(tmp_path / "m.onnx", tmp_path / "art", loss="mse", **options)
        checkpoint = Checkpoint.load(tmp_path / "art/checkpoint")
        assert [*checkpoint.trainable] == trained
        assert {*checkpoint.frozen} == {"w"} - {*trained}


BRANCHES = """
    <ir_version: 8, opset_import: ["" : 18]>
    graph (float[n, 4] x, bool c) => (float[n, 4] y) <float[4] w = {1, 2, 3, 4}> {
        y = If (c) <then_branch = twice () => (float[n, 4] a) { a = Mul (x, w) },
                    else_branch = keep () => (float[n, 4] b) { b = Identity (x) }>
    }"""


@pytest.mark.skipif(
    newest_opset() < 23,
    reason="the gradient has Constant in a branch, which graphgen refuses for this runtime",
)
def test_a_parameter_in_a_branch_is_trained_by_the_batches_that_take_it(tmp_path):
    """d mean((x w)²) / dw = mean(2 x² w) over the batch, or 0 where the other branch runs."""
    onnx.save(onnx.parser.parse_model(BRANCHES), tmp_path / "m.onnx")
    artifacts(tmp_path / "m.onnx", tmp_path / "art", loss="mse")
    session = gg.TrainingSession(tmp_path / "art", threads=1)
    x = np.ones((2, 4), np.float32)
    for taken in (1, 0):
        session.train_step({"x": x, "c": np.array(bool(taken)), "labels": 0 * x})
        np.testing.assert_allclose(session.gradients["w"], taken * np.float32([0.5, 1, 1.5, 2]))
        session.lazy_reset_grad()


def two_outputs(x):
    return {"a": x * 2.0, "b": x * 3.0}


def with_labels(labels):
    return labels * 2.0


class Two(nn.Module):
    def __init__(self):
        self.used, self.unused = nn.Linear(3, 2), nn.Linear(3, 2)

    def __call__(self, x):
        return {"y": self.used(x), "z": self.unused(x)}


def test_one_of_two_outputs_is_trained(tmp_path):
    artifacts(gg.build(Two(), x=X), tmp_path / "art", output="y", loss="mse")
    checkpoint = Checkpoint.load(tmp_path / "art/checkpoint")
    assert (list(checkpoint.trainable), checkpoint.frozen) == (["used.weight", "used.bias"], {})
    batch = {"x": np.ones((4, 3), np.float32), "labels": np.ones((4, 2), np.float32)}
    assert gg.Trainer(tmp_path / "art", threads=1).fit([batch], progress=False)[0]["loss"] > 0


def test_the_table_tells_rates_and_decay_and_vectors_that_decay_are_named(tmp_path):
    """Norms are called as their maker likes: "bias|norm" left out those of a BERT, silently."""
    own = AdamW(0.1, no_decay="weight", groups=(Group("bias", rate=0.5),))
    with pytest.warns(UserWarning, match="no_decay='weight': vectors that decay: bias; name them"):
        table = artifacts(linear(), tmp_path / "art", loss="mse", optimizer=own, profile="stock")
    assert {w.name: w.why for w in table} == {"weight": "no weight decay", "bias": "rate × 0.5"}


def integer_model():
    model = linear()
    offset = ir.Value(name="offset", const_value=ir.tensor(np.ones(2, np.int64), name="offset"))
    offset.type, offset.shape = ir.TensorType(ir.DataType.INT64), ir.Shape([2])
    model.graph.register_initializer(offset)
    return model


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (linear, {"trainable": "bais"}, "'bais' matches no parameter; there are weight, bias"),
        (linear, {"trainable": "("}, "not a regular expression"),
        (linear, {"loss": "output"}, r"float\[n, 2\]; a loss must be one float"),
        (
            linear,
            {"loss": "hinge"},
            "loss is .hinge.; choose .cross_entropy., .*'smooth_l1', a scalar.*output.*function",
        ),
        (linear, {"output": "logits"}, "output is 'logits'; choose.*output"),
        (linear, {"label_smoothing": 1.0}, "label_smoothing is 1.0"),
        (
            linear,
            {"optimizer": SGD(momentum=0.9)},
            "no momentum and no decay; choose profile='stock'",
        ),
        (
            linear,
            {"optimizer": AdamW(groups=(Group("bais"),)), "profile": "stock"},
            "group 'bais' matches no trainable parameter",
        ),
        (linear, {"optimizer": AdamW(no_decay="bias")}, "one group of parameters.*'stock'"),
        (
            linear,
            {"optimizer": AdamW(no_decay="bais"), "profile": "stock"},
            "no_decay matches no trainable parameter; there are weight, bias",
        ),
        (linear, {"profile": "new"}, "profile is 'new'; choose 'official' or 'stock'"),
        (lambda: gg.build(two_outputs, x=X), {}, "not given; choose.* a, b"),
        (lambda: gg.build(with_labels, labels=X), {}, "has an input 'labels' already"),
        (lambda: gg.build(ops.relu, x=X), {}, "depends on none of the 0 float parameters"),
        (lambda: gg.build(ops.relu, x=gg.float32["n", "m"]), {}, "known number of classes"),
        (
            lambda: gg.build(Two(), x=X),
            {"output": "y", "trainable": "weight"},
            "does not depend on parameter unused.weight",
        ),
        (integer_model, {"trainable": "offset"}, r"offset is int64\[2\]; only float32"),
        (lambda: "missing.onnx", {}, "missing.onnx cannot be read"),
        (lambda: 3, {}, "artifacts: 3 is not a model"),
    ],
)
def test_bad_input_is_one_error_and_writes_nothing(tmp_path, make, options, message):
    with pytest.raises(GraphgenError, match=message):
        artifacts(make(), tmp_path / "art", **options)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    "make",
    [
        lambda: AdamW(betas=(0.9, 1.0)),
        lambda: AdamW(float("inf")),
        lambda: AdamW(no_decay="("),
        lambda: SGD(momentum=1.0),
        lambda: SGD(nesterov=True),
        lambda: Group("("),
        lambda: Group("x", rate=-1),
        lambda: AdamW(groups=("x",)),
        lambda: SGD(clip_norm=0.0),
    ],
)
def test_a_wrong_setting_is_one_error(make):
    with pytest.raises(GraphgenError, match=r"must be|is not a regular expression"):
        make()


def test_artifacts_are_replaced_only_when_complete(tmp_path, monkeypatch):
    artifacts(linear(), tmp_path / "art")
    before = (tmp_path / "art/checkpoint").read_bytes()

    def full(self, path):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(GraphgenError, match="No space left"):
        patch.setattr(Checkpoint, "save", full)
        artifacts(linear(), tmp_path / "art", optimizer=SGD())
    assert [p.name for p in tmp_path.iterdir()] == ["art"]
    assert (tmp_path / "art/checkpoint").read_bytes() == before
    artifacts(linear(), tmp_path / "art", optimizer=SGD())
    optimizer = onnx.load(tmp_path / "art/optimizer_model.onnx")
    assert optimizer.graph.node[0].op_type == "SGDOptimizerV2"
    assert [p.name for p in tmp_path.iterdir()] == ["art"]


def test_the_evaluation_has_no_dropout_if_built_of_primitives(tmp_path):
    layer = nn.EncoderLayer(8, num_heads=2, dropout=0.5)
    model = gg.build(layer, training=True, primitives=True, x=gg.float32["batch", "seq", 8])
    artifacts(model, tmp_path / "art", loss="mse")
    names = {
        file: {value.name for value in onnx.load(tmp_path / "art" / file).graph.input}
        for file in ("training_model.onnx", "eval_model.onnx")
    }
    assert names["training_model.onnx"] >= {"seed", "step"}
    assert not names["eval_model.onnx"] & {"seed", "step"}


def test_a_link_to_the_folder_stays(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "art").symlink_to("real")
    artifacts(linear(), tmp_path / "art")
    assert (tmp_path / "art").is_symlink()
    assert (tmp_path / "real" / "checkpoint").exists()


def test_a_folder_with_other_files_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(GraphgenError, match=r"holds 'notes.txt', which is not a training artifact"):
        artifacts(linear(), tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(GraphgenError, match="cannot be written: File exists"):
        artifacts(linear(), tmp_path / "file" / "art")


def rewrites(path):
    report = json.loads(path.read_text())
    schema = json.loads((DOCS / "report.schema.json").read_text())
    jsonschema.validate(report, schema)
    return [(done["name"], site) for done in report["passes"] for site in done["sites"]]


def test_each_rewrite_is_reported_and_verified(tmp_path, monkeypatch):
    art, report, model = tmp_path / "art", tmp_path / "report.json", build()
    artifacts(model, art, profile="stock", recompute="full", verify=True, report=report)
    found = rewrites(report)
    fired = [site["number"] for _, site in found if site["status"] == "fired"]
    assert sorted(fired) == [*range(1, len(fired) + 1)]
    assert {"inline", "canonicalize", "products", "recompute"} <= {name for name, _ in found}
    artifacts(model, tmp_path / "plain", profile="stock", recompute="full")
    for file in FILES:
        assert filecmp.cmp(art / file, tmp_path / "plain" / file, shallow=False), file

    right = products.transposed_operands

    def wrong(node):
        found = right(node)
        return None if found is None else Rewrite(found.results * 1.01, found.inputs, "wrong")

    monkeypatch.setattr(products, "transposed_operands", wrong)
    artifacts(model, tmp_path / "mended", profile="stock", verify=True, report=report)
    missed = [name for name, site in rewrites(report) if site["status"] == "missed"]
    assert missed and {*missed} == {"products"}
    artifacts(model, tmp_path / "wrong", profile="stock", report=report)
    reasons = [site["reason"] for _, site in rewrites(report) if site["status"] == "fired"]
    assert "wrong" in reasons


@pytest.mark.parametrize("place", ["art/report.json", "art/below/report.json", "link/report.json"])
def test_a_report_does_not_lie_in_the_folder_that_is_replaced(tmp_path, place):
    (tmp_path / "link").symlink_to("art")
    art, report = tmp_path / "art", tmp_path / place
    with pytest.raises(GraphgenError, match=r"the report \S+report.json would lie in the folder"):
        artifacts(linear(), art, loss="mse", report=report)
    assert not art.exists()


def test_a_report_that_cannot_be_written_leaves_the_old_artifacts(tmp_path):
    art, report = tmp_path / "art", tmp_path / "missing" / "report.json"
    artifacts(linear(), art, loss="mse")
    old = (art / TRAINING).stat().st_ino
    with pytest.raises(GraphgenError, match=r"artifacts: report: \S+ cannot be written"):
        artifacts(linear(), art, loss="mse", report=report)
    assert (art / TRAINING).stat().st_ino == old


def test_a_dropout_that_stays_in_the_evaluation_model_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(lowering, "_mean", lambda node: Miss("it is odd"))
    with pytest.raises(GraphgenError, match="evaluation model would keep a dropout: it is odd"):
        artifacts(build(dropout=0.1), tmp_path / "art")
    assert not (tmp_path / "art").exists()


def test_the_first_rewrites_are_applied_alone(tmp_path):
    report, model = tmp_path / "report.json", linear()
    artifacts(model, tmp_path / "whole", loss="mse", report=report)
    count = sum(site["status"] == "fired" for _, site in rewrites(report))
    artifacts(model, tmp_path / "less", loss="mse", report=report, stop_after=count - 2)
    names = [name for name, site in rewrites(report) if site["status"] == "fired"]
    assert len(names) == count - 1 and names[-1] == "into_buffers"
    with pytest.raises(GraphgenError, match=r"no Attention; only 1 rewrites .* larger stop_after"):
        artifacts(build(), tmp_path / "none", stop_after=1)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("name", ["llama_torchscript_eager_14", "bert_dynamo_sdpa_18"])
def test_a_file_that_the_runtime_saved_trains_what_its_source_does(tmp_path, name):
    """With SimplifiedLayerNormalization, which ONNX lacks, and Constants as initializers."""
    source, saved = FIXTURES / f"{name}.onnx", tmp_path / "saved.onnx"
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath, options.log_severity_level = str(saved), 3
    output = ort.InferenceSession(source, options).get_outputs()[0].name
    found = []
    for path in (source, saved):
        artifacts(path, tmp_path / path.stem, loss="mse", output=output, profile="stock")
        session = gg.TrainingSession(tmp_path / path.stem, threads=1)
        rng = np.random.default_rng(0)
        batch = {}
        for given, kind in session.inputs.items():
            shape = [d if isinstance(d, int) else 3 for d in kind.dims]
            x = rng.normal(size=shape) if kind.dtype == np.float32 else rng.integers(1, 2, shape)
            batch[given] = x.astype(kind.dtype)
        found.append((session.train_step(batch), session.gradients))
    (loss, wanted), (again, gradients) = found
    assert again == pytest.approx(loss, rel=1e-5)
    assert gradients.keys() == wanted.keys()
    largest = max(np.abs(g).max() for g in wanted.values())  # those of keys' biases are 0
    for name, g in wanted.items():
        np.testing.assert_allclose(gradients[name], g, rtol=1e-4, atol=1e-6 * largest)
