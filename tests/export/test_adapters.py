"""Low-rank adapters: what is trained, what it adds, and the files it goes into and comes from."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import published_vision
import pytest
from random_checkpoints import CAUSAL, random_checkpoint
from small_models import relative_rms, vary

import graphgen as gg
from graphgen import nn, safetensors
from graphgen.commands import main
from graphgen.errors import GraphgenError
from graphgen.export.adapters import LORA, Adapter
from graphgen.export.attached import attach
from graphgen.export.by_row import beside
from graphgen.export.checkpoint import Checkpoint
from graphgen.export.peft import CONFIG, WEIGHTS, write_folder
from graphgen.export.trained import export_trained
from graphgen.graph import PUBLISHED
from graphgen.models.published import from_folder
from graphgen.passes.training.adapters import A, B, LoRA, adapt, published_names

RNG = np.random.default_rng(0)
IDS, LABELS = RNG.integers(0, 11, (3, 5)), RNG.integers(0, 11, (3, 5))
BATCH = {"ids": IDS, "labels": LABELS}


class Model(nn.Module):
    """A small decoder whose head is tied to its table."""

    def __init__(self) -> None:
        self.embedding = nn.Embedding(11, 8)
        self.stack = nn.Encoder(8, layers=2, num_heads=2, causal=True, dropout=0.0, hidden=12)

    def __call__(self, ids: Any) -> Any:
        return {"logits": self.embedding.logits(self.stack(self.embedding(ids)))}


@pytest.fixture(scope="module")
def model(tmp_path_factory: Any) -> Path:
    path = tmp_path_factory.mktemp("adapters") / "m.onnx"
    built = gg.build(vary(Model()), ids=gg.int64["batch", "seq"])
    return Path(gg.export(gg.optimize(built), path))  # for the runtime that is installed


def trained(model: Path, folder: Path, lora: Any, steps: int = 4, **options: Any) -> gg.Trainer:
    gg.artifacts(model, folder, lora=lora, optimizer=gg.AdamW(weight_decay=0.0), **options)
    trainer = gg.Trainer(folder, schedule=gg.schedule.constant(0.05), threads=1)
    trainer.fit([BATCH], steps=steps, progress=False)
    return trainer


@pytest.fixture(scope="module")
def trainer(model: Path, tmp_path_factory: Any) -> gg.Trainer:
    folder = tmp_path_factory.mktemp("trained") / "art"
    return trained(model, folder, LoRA(r"query|down", 3, alpha=6.0))


def test_only_the_adapters_are_trained(model: Path, trainer: gg.Trainer, tmp_path: Path) -> None:
    table = gg.artifacts(model, tmp_path / "art", lora="query|down:3")
    names = [weight.name for weight in table if weight.trained]
    modules = [
        f"stack.layers.{i}.{m}" for i in (0, 1) for m in ("attention.query", "feed_forward.down")
    ]
    assert names == [m + part for m in modules for part in (".lora_A.weight", ".lora_B.weight")]
    sizes = {weight.name: weight.shape for weight in table}
    assert sizes[names[2]] == (3, 12) and sizes[names[3]] == (8, 3)
    before = {n: w.const_value.numpy() for n, w in gg.load(model).graph.initializers.items()}
    for name, array in trainer.parameters.items():
        assert name in names or np.array_equal(array, before[name])
    both = gg.artifacts(model, tmp_path / "both", lora="query:2", trainable="norm")
    assert {w.name.split(".")[-3] for w in both if w.trained and "lora" in w.name} == {"query"}
    assert any(w.trained and "norm" in w.name for w in both)


def test_nothing_has_changed_at_first(model: Path, tmp_path: Path) -> None:
    losses = []
    for lora in (None, "query|value|up:4"):
        gg.artifacts(model, tmp_path / "art", lora=lora)
        losses.append(gg.Trainer(tmp_path / "art", threads=1).evaluate([BATCH]))
    assert losses[0] == losses[1]


@pytest.mark.share(2)
@pytest.mark.parametrize("stabilized", [False, True])
def test_the_first_step_is_that_of_the_weight(
    model: Path, tmp_path: Path, stabilized: bool
) -> None:
    """y = x (W + s Aᵀ Bᵀ): from B = 0, dB = s dWᵀ Aᵀ and dA = 0."""
    lora = LoRA("layers.0.attention.query", 2, alpha=3.0, rank_stabilized=stabilized)
    weight, after = "stack.layers.0.attention.query.weight", []
    for given in ({"trainable": weight}, {"lora": lora}):
        gg.artifacts(model, tmp_path / "art", optimizer=gg.SGD(), **given)
        trainer = gg.Trainer(tmp_path / "art", schedule=gg.schedule.constant(1.0), threads=1)
        before = trainer.parameters
        trainer.fit([BATCH], steps=1, progress=False)
        after.append({n: x - before[n] for n, x in trainer.parameters.items()})
    a, b = (f"{weight.removesuffix('.weight')}.lora_{x}.weight" for x in "AB")
    wanted = lora.scale * after[0][weight].T @ before[a].T
    assert lora.scale == pytest.approx(3 / 2**0.5 if stabilized else 1.5)
    assert relative_rms(wanted, after[1][b]) < 1e-5 and not after[1][a].any()


def test_merged_beside_and_in_training_are_the_same(
    model: Path, trainer: gg.Trainer, tmp_path: Path
) -> None:
    merged = trainer.export(model, tmp_path / "merged.onnx")
    fused = gg.optimize(gg.load(merged), verify=True)
    [logits] = gg.Session(merged, threads=1)(ids=IDS)
    assert relative_rms(logits, gg.Session(fused, threads=1)(ids=IDS)[0]) < 1e-6
    shifted = logits - logits.max(-1, keepdims=True)
    chances = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    loss = -np.take_along_axis(chances, LABELS[..., None], -1).mean()
    assert trainer.evaluate([BATCH]) == pytest.approx(loss, rel=1e-6)
    [plain] = gg.Session(model, threads=1)(ids=IDS)
    assert relative_rms(plain, logits) > 0.01
    adapter = trainer.adapter
    assert adapter is not None
    gg.export(adapter.base(model), tmp_path / "base.onnx")
    base = ort.InferenceSession(tmp_path / "base.onnx")
    assert relative_rms(plain, base.run(None, {"ids": IDS})[0]) < 1e-6
    options = ort.RunOptions()
    file = ort.LoraAdapter()
    file.Load(str(adapter.export(tmp_path / "a.onnx_adapter")))
    options.add_active_adapter(file)
    assert relative_rms(logits, base.run(None, {"ids": IDS}, options)[0]) < 1e-6


def loss_of(path: Path) -> float:
    """The mean cross-entropy of the logits of a model, in float64."""
    logits = gg.Session(path, threads=1)(ids=IDS)[0].astype(np.float64)
    shifted = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return float(-np.take_along_axis(shifted, LABELS[..., None], -1).mean())


@pytest.mark.share(2)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_magnitudes_are_trained_saved_and_merged(
    model: Path, tmp_path: Path, dropout: float
) -> None:
    """DoRA: a gradient is that of a gain whose norm is constant; files hold what was trained."""
    lora = LoRA("query|down|embedding", 2, alpha=3.0, dora=True, dropout=dropout)
    gg.artifacts(model, tmp_path / "art", lora=lora, optimizer=gg.SGD())
    start = gg.Trainer(tmp_path / "art", threads=1)
    assert start.evaluate([BATCH]) == pytest.approx(loss_of(model), rel=1e-6)
    if not dropout:
        name = "stack.layers.1.feed_forward.down"
        before = start.parameters[f"{name}.lora_magnitude_vector"].astype(np.float64)
        start.fit([BATCH], steps=1, progress=False)
        rate = start.schedule(1)
        slope = (before - start.parameters[f"{name}.lora_magnitude_vector"]) / rate
        weight = gg.load(model).graph.initializers[f"{name}.weight"]
        assert weight.const_value is not None
        matrix, losses = weight.const_value.numpy().copy(), []
        np.testing.assert_allclose(before, np.linalg.norm(matrix, axis=0), rtol=1e-6)
        for step in (1e-2, -1e-2):
            other = gg.load(model)
            scaled = matrix.copy()
            scaled[:, 0] *= 1 + step / before[0]
            other.graph.initializers[f"{name}.weight"].const_value = ir.tensor(scaled)
            losses.append(loss_of(saved(other, tmp_path / "other.onnx")))
        assert slope[0] == pytest.approx((losses[0] - losses[1]) / 2e-2, rel=1e-2)
    trainer = trained(model, tmp_path / "run", lora)
    merged = trainer.export(model, tmp_path / "merged.onnx")
    assert trainer.evaluate([BATCH]) == pytest.approx(loss_of(merged), rel=1e-5)
    assert loss_of(merged) < loss_of(model) - 0.01
    assert trainer.adapter is not None and trainer.adapter.dora
    again = Adapter.load(trainer.adapter.save(tmp_path / "peft"))
    saved(again.merged(model), tmp_path / "again.onnx")
    assert (tmp_path / "again.onnx").read_bytes() == Path(merged).read_bytes()
    del again.matrices["stack.layers.0.attention.query.lora_magnitude_vector"]
    with pytest.raises(GraphgenError, match="its magnitudes are not one of each output"):
        Adapter.load(again.save(tmp_path / "peft"))


def test_an_output_without_weights_keeps_its_zeros(tmp_path: Path) -> None:
    """The norm of a column of zeros is 0, and so is its magnitude: no 0 / 0."""
    model = product_model("a.weight")
    array = onnx.numpy_helper.to_array(model.graph.initializer[0]).copy()
    array[:, 1] = 0
    model.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(array, "a.weight"))
    path = saved(model, tmp_path / "m.onnx")
    gg.artifacts(path, tmp_path / "art", loss="mse", lora=LoRA("a", 2, dora=True))
    trainer = gg.Trainer(tmp_path / "art", threads=1)
    x = np.ones((3, 4), np.float32)
    trainer.fit([{"x": x, "labels": x}], steps=3, progress=False)
    assert all(np.isfinite(x).all() for x in trainer.parameters.values())
    trainer.export(path, tmp_path / "merged.onnx")
    assert np.isfinite(gg.Session(tmp_path / "merged.onnx", threads=1)(x=x)[0]).all()


def test_a_tied_head_leaves_its_table_alone(model: Path, tmp_path: Path) -> None:
    """The product with the table has a weight of its own once its update is merged."""
    trainer = trained(model, tmp_path / "art", LoRA("embedding", 2))
    merged = gg.load(trainer.export(model, tmp_path / "m.onnx"))
    table = "embedding.weight"
    before = gg.load(model).graph.initializers[table].const_value
    after = merged.graph.initializers[table].const_value
    assert before is not None and after is not None
    np.testing.assert_array_equal(before.numpy(), after.numpy())
    [logits] = gg.Session(tmp_path / "m.onnx", threads=1)(ids=IDS)
    shifted = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    loss = -np.take_along_axis(shifted, LABELS[..., None], -1).mean()
    assert trainer.evaluate([BATCH]) == pytest.approx(loss, rel=1e-5)


def test_a_tied_head_that_was_trained_as_a_whole_has_a_weight_of_its_own(model: Path) -> None:
    """As PEFT's modules_to_save of a tied lm_head; the table of tokens stays."""
    table = gg.load(model).graph.initializers["embedding.weight"].const_value
    assert table is not None
    head, ones = table.numpy() * np.float32(2), np.ones((1, table.shape[1]), np.float32)
    query = "stack.layers.0.attention.query"
    matrices = {query + A: ones, query + B: ones.T * 0}
    for name in ("embedding", "lm_head"):
        saved = {f"{name}.weight": head}
        adapter = gg.Adapter(matrices, 1, 1.0, saved=saved)
        source = gg.load(model)
        source.metadata_props[PUBLISHED] = json.dumps({"embedding": ["lm_head", 0, 1, 1, 1]})
        with pytest.raises(GraphgenError, match=f"{name} was trained as a whole, and the model"):
            attach(source.clone(), adapter, few_bits=False)
        merged = adapter.merged(source)
        kept = merged.graph.initializers["embedding.weight"].const_value
        assert kept is not None
        np.testing.assert_array_equal(kept.numpy(), table.numpy())
        [before], [after] = (gg.Session(one, threads=1)(ids=IDS) for one in (source, merged))
        np.testing.assert_allclose(after, 2 * before, rtol=1e-5, atol=1e-5)


@pytest.mark.exhaustive
def test_dropout_is_of_training_only(model: Path, tmp_path: Path) -> None:
    trainer = trained(model, tmp_path / "art", LoRA("query|value", 2, dropout=0.5))
    again = trained(model, tmp_path / "again", LoRA("query|value", 2, dropout=0.5))
    other = trained(model, tmp_path / "other", LoRA("query|value", 2))
    assert all(np.array_equal(x, again.parameters[n]) for n, x in trainer.parameters.items())
    assert any(not np.array_equal(x, other.parameters[n]) for n, x in trainer.parameters.items())
    assert trainer.evaluate([BATCH]) == trainer.evaluate([BATCH])
    assert {*trainer.inputs} == {"ids", "labels"}


def test_a_run_is_resumed_and_its_files_come_back(model: Path, tmp_path: Path, capsys: Any) -> None:
    run, data = tmp_path / "run", tmp_path / "a.npz"
    np.savez(data, **BATCH)
    for words in (
        ["artifacts", model, "-o", tmp_path / "art", "--lora", "query|value:2"],
        ["train", tmp_path / "art", "--data", data, "--batch", 3, "--steps", 3, "--checkpoint",
         run],
        ["adapter", run, "-o", tmp_path / "peft"],
        ["adapter", run, "-o", tmp_path / "x.onnx_adapter", "--model", model, "--base",
         tmp_path / "base.onnx"],
        ["export", model, "--checkpoint", run, "-o", tmp_path / "merged.onnx"],
    ):  # fmt: skip
        assert main([*map(str, words)]) == 0, capsys.readouterr().err
    assert "4 modules" in capsys.readouterr().out
    saved, found = Checkpoint.load(run / "checkpoint"), Adapter.load(tmp_path / "peft")
    assert {*found.matrices} == {*saved.trainable} and len(found.modules) == 4
    for name, array in found.matrices.items():
        np.testing.assert_array_equal(array, saved.trainable[name])
    config = json.loads((tmp_path / "peft" / CONFIG).read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 2, 2)
    gg.export(found.merged(model), tmp_path / "again.onnx")
    assert (tmp_path / "again.onnx").read_bytes() == (tmp_path / "merged.onnx").read_bytes()
    assert len(ort.InferenceSession(tmp_path / "base.onnx").get_inputs()) == 1
    # A prefix of the exporter's own is no obstacle.
    shorter = {n.removeprefix("stack."): x for n, x in found.matrices.items()}
    gg.export(Adapter(shorter, 2, 2.0).merged(model), tmp_path / "prefix.onnx")
    assert (tmp_path / "prefix.onnx").read_bytes() == (tmp_path / "merged.onnx").read_bytes()


@pytest.mark.parametrize(
    ("lora", "told"),
    [
        ("query", r"'query' is not PATTERN:RANK"),
        ("query:8,alpha=x", "is not PATTERN:RANK"),
        ("query:8,alpha=2,alpha=3", "is not PATTERN:RANK"),
        ("query:8,beta=2", "is not PATTERN:RANK"),
        ("query:8,dropout=1", "dropout is 1.0"),
        ("query:0", "rank is 0; it must be an integer from 1"),
        ("qu(ery:2", "is not a regular expression: .*; it is searched in names"),
        ("nothing:2", "matches no module with a product; there are embedding, stack.layers.0"),
    ],
)
def test_bad_targets(model: Path, tmp_path: Path, lora: str, told: str) -> None:
    with pytest.raises(GraphgenError, match=told):
        gg.artifacts(model, tmp_path / "art", lora=lora)
    assert not (tmp_path / "art").exists()


def test_the_text_of_an_option() -> None:
    text = "layer(?:s|_):8,alpha=32,dropout=0.1,rank_stabilized=true,seed=3,dora=true"
    assert LoRA.read(text) == LoRA("layer(?:s|_)", 8, 32.0, 0.1, True, 3, True)
    assert LoRA.read("query|value:4") == LoRA("query|value", 4)


@pytest.mark.parametrize(
    ("fields", "told"),
    [({"alpha": 0.0}, "alpha is 0.0"), ({"alpha": np.nan}, "alpha"), ({"dropout": 1.0}, "dropout")],
)
def test_bad_settings(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(GraphgenError, match=f"LoRA: {told}"):
        LoRA("x", 2, **fields)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; only LORA is read: merge the adapter with"),
        ({"peft_type": "PROMPT_TUNING"}, "only LORA is read: it adds tokens, which no weight"),
        ({"peft_type": "XLORA"}, "only LORA is read: PEFT does not merge it, so only PEFT runs it"),
        (
            {"alora_invocation_tokens": [4]},
            r"is \[4\], which is .*: it begins in the middle of a text",
        ),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"use_dora": True}, "use_dora is True, and the file of matrices says otherwise"),
        ({"modules_to_save": "classifier"}, "modules_to_save is 'classifier'; it must be a list"),
        ({"bias": "all"}, "bias is 'all'"),
        (
            {"alpha_pattern": {"query": 0}},
            "alpha_pattern is damaged .*alpha is 0.0; it must be pos",
        ),
        (
            {"rank_pattern": {"(": 2}},
            "alpha_pattern is damaged .*missing \\), unterminated subpattern",
        ),
        ({"rank_pattern": {"query": 5}}, "query.* is .*, not of rank 5, or has no part"),
        ({"rank_pattern": [2]}, "alpha_pattern is damaged"),
        ({"r": "two"}, "r, lora_alpha or lora_dropout is missing or damaged"),
        ({"r": 5}, "not of rank 5, or has no partner"),
    ],
)
def test_bad_files_of_peft(
    trainer: gg.Trainer, tmp_path: Path, config: dict[str, Any], told: str
) -> None:
    assert trainer.adapter is not None
    folder = trainer.adapter.save(tmp_path / "peft")
    written = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**written, **config}))
    with pytest.raises(GraphgenError, match=told):
        Adapter.load(folder)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the killed processes are forks of this one")
def test_no_kill_leaves_a_part_of_an_adapter(tmp_path: Path) -> None:
    """Before each call that opens, renames or removes a file: the old one is there, or the new."""
    place = tmp_path / "adapter"

    def write(value: int) -> list[bytes]:
        ones = np.full((4, 2), value, np.float32)
        Adapter({f"q{A}": ones.T.copy(), f"q{B}": ones}, 2, float(value)).save(place)
        return content()

    def content() -> list[bytes]:
        return [file.read_bytes() for file in sorted(place.iterdir())]

    def write_until(last: int) -> None:
        seen = iter(range(last + 1))

        def kill(_: str, arguments: Any) -> None:
            here = (
                isinstance(x, str | Path) and str(x).startswith(str(tmp_path)) for x in arguments
            )
            if any(here) and next(seen, None) == last:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(kill)
        write(2)

    new, status, found = write(2), int(signal.SIGKILL), list[list[bytes]]()
    old = write(1)
    while status == signal.SIGKILL:
        write(1)
        child = os.fork()
        if not child:
            write_until(len(found))
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        found.append(content())
    assert status == 0 and len(found) > 5 and found[0] == old != new == found[-1]
    assert all(files in (old, new) for files in found)
    assert [*tmp_path.iterdir()] == [place]


@pytest.mark.parametrize("stabilized", [False, True])
def test_ranks_and_alphas_by_pattern(tmp_path: Path, stabilized: bool) -> None:
    """Each module has the update that its own rank and alpha make."""
    random = np.random.default_rng(0)
    own = {"m.0.query": (2, 3.0), "m.0.value": (5, 8.0), "m.1.query": (4, 3.0), "n.up": (4, 8.0)}
    arrays = dict[str, Any]()
    for name, (rank, _) in own.items():
        arrays[name + A] = random.standard_normal((rank, 6)).astype("f")
        arrays[name + B] = random.standard_normal((7, rank)).astype("f")
    config = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "use_rslora": stabilized}
    config |= {
        "rank_pattern": {"0.query": 2, "value": 5, "query": 4},
        "alpha_pattern": {"query": 3},
    }
    found = Adapter.load(write_folder(tmp_path / "a", config, arrays, {}))
    again = Adapter.load(found.save(tmp_path / "b"))
    assert found.own == again.own == {n: x for n, x in own.items() if n != "n.up"}
    for name, (rank, alpha) in own.items():
        wanted = alpha / (rank**0.5 if stabilized else rank) * arrays[name + B] @ arrays[name + A]
        for adapter in (found, again):
            update = adapter.updates()[name]
            assert relative_rms(wanted, update.b @ update.a) < 1e-6


def test_training_goes_on_with_parts_of_one_module_and_settings_by_pattern(
    model: Path, tmp_path: Path
) -> None:
    """As PEFT trains GPT-2's c_attn: three products read one A, and one mask of dropout."""
    source, random = gg.load(model), np.random.default_rng(0)
    parts = {
        f"stack.layers.{i}.attention.{name}": [f"h.{i}.c_attn", place, 3, 1, 1]
        for i in (0, 1)
        for place, name in enumerate(("query", "key", "value"))
    }
    source.metadata_props[PUBLISHED] = json.dumps(parts)
    arrays = {}
    for i, rank in enumerate((2, 3)):
        arrays[f"h.{i}.c_attn{A}"] = random.standard_normal((rank, 8)).astype("f")
        arrays[f"h.{i}.c_attn{B}"] = random.standard_normal((24, rank)).astype("f")
    config = {"r": 2, "lora_alpha": 4, "lora_dropout": 0.5}
    config |= {"rank_pattern": {"1.c_attn": 3}, "alpha_pattern": {"1.c_attn": 1.5}}
    folder = write_folder(tmp_path / "peft", config, arrays, {})
    noted, _ = attach(graph := source.clone(), str(folder), few_bits=False)
    values = {n: v.const_value for n, v in graph.graph.initializers.items() if ".lora_" in n}
    trained = {n: x.numpy() for n, x in values.items() if x is not None}
    assert sum(x.size for x in trained.values()) == sum(x.size for x in arrays.values())
    drops = [n.inputs[4].const_value for n in graph.graph if n.op_type == "Dropout"]  # type: ignore[union-attr]
    assert len(drops) == 6 and len({str(x.numpy()) for x in drops}) == 2  # type: ignore[union-attr]
    ended = Adapter.of(Checkpoint(trained, properties={LORA: json.dumps(noted)}), "")
    assert ended is not None
    again = Adapter.load(ended.save(tmp_path / "again"))
    assert again.own["h.1.c_attn"] == (3, 1.5) and again.matrices.keys() == arrays.keys()
    assert all(np.array_equal(x, arrays[n]) for n, x in again.matrices.items())
    adapt(source, LoRA("c_attn", 2))  # so does a new one, by its name
    assert sum(name.endswith(A) for name in source.graph.initializers) == 2


def test_an_adapter_of_another_model_is_refused(
    trainer: gg.Trainer, model: Path, tmp_path: Path
) -> None:
    adapter = trainer.adapter
    assert adapter is not None
    name = "stack.layers.0.attention.query"
    wide = {
        n: np.concatenate([x, x], int("A" in n)) if name in n else x
        for n, x in adapter.matrices.items()
    }
    with pytest.raises(GraphgenError, match=r"\[16, 16\] for module .* in another size, \[8, 8\]"):
        Adapter(wide, 3, 3.0).merged(model)
    other = {n.replace("down", "sideways"): x for n, x in adapter.matrices.items()}
    for use in (Adapter.merged, Adapter.base):
        with pytest.raises(GraphgenError, match="sideways"):
            use(Adapter(other, 3, 3.0), model)
    saved = Checkpoint({}, properties={LORA: '{"rank": 2}'})
    with pytest.raises(GraphgenError, match=f"its property {LORA}, or a matrix"):
        Adapter.of(saved, "there")
    with pytest.raises(GraphgenError, match="holds no adapter; train one"):
        Checkpoint({"w": np.ones(1, np.float32)}).save(tmp_path / "c")
        Adapter.load(tmp_path / "c")
    (tmp_path / "peft").mkdir()
    adapter.save(tmp_path / "peft")
    (tmp_path / "peft" / WEIGHTS).write_bytes(safetensors.to_bytes({"x": np.ones(2, np.float32)}))
    with pytest.raises(GraphgenError, match="x is no matrix of a low-rank update"):
        Adapter.load(tmp_path / "peft")
    (tmp_path / "peft" / "notes.txt").touch()
    with pytest.raises(GraphgenError, match=r"holds 'notes.txt', which would be replaced"):
        adapter.save(tmp_path / "peft")


def test_a_frozen_weight_that_could_be_folded_stays_one(tmp_path: Path) -> None:
    """A table of positions read at constant places was folded into the training graph alone."""

    class Positions(nn.Module):
        def __init__(self) -> None:
            self.table, self.linear = nn.Embedding(4, 6), nn.Linear(6, 3)

        def __call__(self, x: Any) -> Any:
            return self.linear(x + self.table(np.arange(4)))

    model = gg.build(Positions(), x=gg.float32["batch", 4, 6], seed=0)
    gg.artifacts(model, tmp_path / "art", trainable="linear")
    assert {*Checkpoint.load(tmp_path / "art" / "checkpoint").frozen} == {"table.weight"}
    export_trained(model, gg.Trainer(tmp_path / "art").parameters, tmp_path / "m.onnx")


def product_model(*names: str, step: bool = False) -> onnx.ModelProto:
    """x W1 W2 ..., with nothing in between, of a file from another tool."""
    ends = ["x", *(f"h{i}" for i in range(1, len(names))), "y"]
    nodes = [
        onnx.helper.make_node("MatMul", [ends[i], name], [ends[i + 1]], f"/attn/MatMul_{i}")
        for i, name in enumerate(names)
    ]
    weights = [
        onnx.numpy_helper.from_array(RNG.standard_normal((4, 4)).astype(np.float32), name)
        for name in names
    ]
    x, y = (onnx.helper.make_tensor_value_info(n, 1, ["batch", 4]) for n in "xy")
    inputs = [x]
    if step:
        inputs.append(onnx.helper.make_tensor_value_info("step", 7, ["batch"]))
        nodes.append(onnx.helper.make_node("Shape", ["step"], ["unused"]))
    graph = onnx.helper.make_graph(nodes, "g", inputs, [y], weights)
    opset = [onnx.helper.make_opsetid("", 20)]
    return onnx.helper.make_model(graph, opset_imports=opset, ir_version=10)


def updates(*modules: str, out: int = 4) -> Adapter:
    random = np.random.default_rng(3)
    sizes = {".lora_A.weight": (2, 4), ".lora_B.weight": (out, 2)}
    return Adapter(
        {
            m + p: random.standard_normal(s).astype(np.float32)
            for m in modules
            for p, s in sizes.items()
        },
        2,
        4.0,
    )


def saved(model: Any, path: Path) -> Path:
    return Path(
        gg.export(ir.from_proto(model) if isinstance(model, onnx.ModelProto) else model, path)
    )


@pytest.mark.parametrize("prefix", ["", "wrapper."])
def test_one_product_right_after_another(tmp_path: Path, prefix: str) -> None:
    """The second reads what the first gives with its adapter; a prefix is no obstacle."""
    path = saved(product_model(f"{prefix}a.weight", f"{prefix}b.weight"), tmp_path / "m.onnx")
    adapter, x = updates("a", "b"), RNG.standard_normal((3, 4)).astype(np.float32)
    wanted = x
    for module, weight in zip("ab", gg.load(path).graph.initializers.values(), strict=True):
        assert weight.const_value is not None
        wanted = wanted @ (
            weight.const_value.numpy()
            + (adapter.updates()[module].b @ adapter.updates()[module].a).T
        )
    merged = gg.Session(saved(adapter.merged(path), tmp_path / "merged.onnx"), threads=1)
    assert relative_rms(wanted, merged(x=x)[0]) < 1e-6
    base = ort.InferenceSession(saved(adapter.base(path), tmp_path / "base.onnx"))
    options, file = ort.RunOptions(), ort.LoraAdapter()
    file.Load(str(adapter.export(tmp_path / "a.onnx_adapter")))
    options.add_active_adapter(file)
    assert relative_rms(wanted, base.run(None, {"x": x}, options)[0]) < 1e-6
    table = gg.artifacts(path, tmp_path / "art", loss="mse", lora="a|b:2")
    assert sum(weight.trained for weight in table) == 4


def test_what_no_module_can_be_told_by(tmp_path: Path) -> None:
    two = saved(product_model("onnx::MatMul_1", "onnx::MatMul_2"), tmp_path / "two.onnx")
    with pytest.raises(GraphgenError, match="adapter: module attn has two weights, onnx::MatMul_1"):
        updates("attn").merged(two)
    one = saved(product_model("m.x.q.weight"), tmp_path / "one.onnx")
    for use in (Adapter.merged, Adapter.base):
        with pytest.raises(GraphgenError, match=r"q and x\.q would both be m\.x\.q in the model"):
            use(updates("q", "x.q"), one)
    with pytest.raises(GraphgenError, match=r"\[6, 4\] for module m.x.q, .* it in another size"):
        updates("q", out=6).base(one)
    broken = updates("q")
    broken.matrices["q.lora_A.weight"][0, 0] = np.nan
    with pytest.raises(GraphgenError, match=r"update of m\.x\.q is not finite"):
        broken.merged(one)
    base = saved(updates("m.x.q").base(one), tmp_path / "base.onnx")
    with pytest.raises(GraphgenError, match=r"has a weight m\.x\.q\.lora_A\.weight already"):
        gg.artifacts(base, tmp_path / "art", loss="mse", lora="q:2")
    steps = saved(product_model("q.weight", step=True), tmp_path / "step.onnx")
    with pytest.raises(
        GraphgenError, match=r"needs the input step .* int64\[\], .* int64\[batch\]"
    ):
        gg.artifacts(steps, tmp_path / "art", loss="mse", lora=LoRA("q", 2, dropout=0.5))
    with pytest.raises(GraphgenError, match=r"one\.onnx is a file; choose a folder"):
        updates("q").save(one)
    with pytest.raises(GraphgenError, match="trainable='nothing' matches no parameter"):
        gg.artifacts(one, tmp_path / "art", loss="mse", lora="q:2", trainable="nothing")


def test_more_than_an_adapter_was_trained(model: Path, tmp_path: Path) -> None:
    gg.artifacts(model, tmp_path / "art", lora="query:2", trainable="(?i)NORM")
    with pytest.raises(
        GraphgenError, match=r"norm.* was trained, too, and is no weight of a product"
    ):
        Adapter.load(tmp_path / "art")


class Classifier(nn.Module):
    """A head of its own behind the encoder."""

    def __init__(self) -> None:
        self.stack = nn.Encoder(8, layers=1, num_heads=2, dropout=0.0, hidden=12)
        self.head = nn.Linear(8, 3)

    def __call__(self, x: Any) -> Any:
        return {"logits": self.head(self.stack(x))}


def test_a_head_that_is_trained_beside_goes_with_the_adapter(tmp_path: Path, capsys: Any) -> None:
    """As PEFT's modules_to_save, [out, in]; a file of the runtime has no place for it."""
    path = tmp_path / "model.onnx"
    gg.export(gg.optimize(gg.build(Classifier(), x=gg.float32["batch", 2, 8], seed=0)), path)
    gg.artifacts(path, tmp_path / "art", lora="query:2", trainable="head")
    trainer = gg.Trainer(tmp_path / "art", threads=1)
    x = RNG.standard_normal((4, 2, 8), np.float32)
    batches = [{"x": x, "labels": RNG.integers(0, 3, (4, 2))}] * 5
    trainer.fit(batches, progress=False, checkpoint=tmp_path / "run")
    export_trained(path, trainer.parameters, tmp_path / "whole.onnx", trainer.adapter)
    own = Adapter.load(tmp_path / "run")
    assert own.saved["head.weight"].shape == (3, 8) and len(own.saved) == 2
    assert main(["adapter", str(tmp_path / "run"), "-o", str(tmp_path / "peft")]) == 0
    assert "rank 2 at 1 modules, and head as a whole, 59 numbers" in capsys.readouterr().out
    config = json.loads((tmp_path / "peft" / CONFIG).read_text())
    assert config["modules_to_save"] == ["head"]
    for found in (own, Adapter.load(tmp_path / "peft")):
        gg.export(found.merged(path), tmp_path / "merged.onnx")
        assert (tmp_path / "merged.onnx").read_bytes() == (tmp_path / "whole.onnx").read_bytes()
        session = gg.Session(beside(path, {"own": found}), threads=1)
        [merged] = gg.Session(tmp_path / "merged.onnx", threads=1)(x=x)
        [plain] = gg.Session(path, threads=1)(x=x)
        [rows] = session(x=x, adapter=np.array([1, 0, 1, 0]))
        assert relative_rms(merged[::2], rows[::2]) < 1e-6
        assert relative_rms(plain[1::2], rows[1::2]) < 1e-6 < relative_rms(plain, merged)
        with pytest.raises(GraphgenError, match="head was trained as a whole beside"):
            found.base(gg.load(path))
        with pytest.raises(GraphgenError, match="head was trained as a whole beside"):
            found.export(tmp_path / "a.onnx_adapter")
    ended, names = trainer.evaluate(batches), {*trainer.parameters}
    for start in (own, str(tmp_path / "peft")):  # goes on from there, the head as well
        table = gg.artifacts(path, tmp_path / "art", lora=start)
        assert {w.name for w in table if w.trained} == {
            n for n in names if "head" in n or "lora" in n
        }
        again = gg.Trainer(tmp_path / "art", threads=1)
        assert again.evaluate(batches) == pytest.approx(ended, rel=1e-6)
        assert again.adapter is not None and again.adapter.alpha == own.alpha
    own.saved["head.bias"] = np.zeros(4, np.float32)
    with pytest.raises(GraphgenError, match=r"head\.bias was trained as a whole, \[4\], and the"):
        own.merged(path)
    with pytest.raises(GraphgenError, match=r"head\.bias was trained as a whole, \[4\], and the"):
        own.placed(gg.load(path))
    # PEFT takes every module whose name ends so, as DistilBERT's pre_classifier for classifier.
    (tmp_path / "peft" / CONFIG).write_text(json.dumps(config | {"modules_to_save": ["ead"]}))
    assert Adapter.load(tmp_path / "peft").saved.keys() == {"head.weight", "head.bias"}
    for listed, told in (
        ("head", "must be a list"),
        ([], r"head\.bias is no matrix of a low-rank"),
    ):
        (tmp_path / "peft" / CONFIG).write_text(json.dumps(config | {"modules_to_save": listed}))
        with pytest.raises(GraphgenError, match=told):
            Adapter.load(tmp_path / "peft")


@pytest.mark.parametrize("noted", [{"alpha": np.nan}, {"rank": 3}, {"saved": [["x", 1]]}])
def test_a_damaged_note_of_an_adapter(model: Path, tmp_path: Path, noted: dict[str, Any]) -> None:
    gg.artifacts(model, tmp_path / "art", lora="query:2")
    found = Checkpoint.load(tmp_path / "art" / "checkpoint")
    found.properties[LORA] = json.dumps({**json.loads(str(found.properties[LORA])), **noted})
    found.save(tmp_path / "c")
    with pytest.raises(GraphgenError, match=f"its property {LORA}, or a matrix"):
        Adapter.load(tmp_path / "c")


def test_each_use_of_a_module_drops_out_by_itself() -> None:
    twice = ir.from_proto(product_model("a.weight", "a.weight"))
    adapt(twice, LoRA("a", 2, dropout=0.5))
    numbers = {str(n.inputs[4].const_value.numpy()) for n in twice.graph if n.op_type == "Dropout"}  # type: ignore[union-attr]
    assert len(numbers) == 2


@pytest.mark.parametrize(
    ("part", "now", "older"),
    [
        ("query", "layers.0.attention.q_proj", "encoder.layer.0.attention.attention.query"),
        ("output", "layers.0.attention.o_proj", "encoder.layer.0.attention.output.dense"),
        ("up", "layers.0.mlp.fc1", "encoder.layer.0.intermediate.dense"),
        ("down", "layers.0.mlp.fc2", "encoder.layer.0.output.dense"),
        (
            "value",
            "encoder.layer.0.attention.v_proj",
            "encoder.layer.0.attention.attention.value",
        ),
    ],
)
def test_modules_have_the_names_that_transformers_gives_them_now(
    part: str, now: str, older: str, tmp_path: Path
) -> None:
    """Checkpoints keep the older ones, as adapters of before do, which are read, too.

    A pattern of what to adapt may have the name here or there.
    """
    kind = "dinov2" if part == "value" else "deit"
    random_checkpoint(tmp_path / "source", published_vision.fields(kind))
    path = gg.export(from_folder(tmp_path / "source").model, tmp_path / "model.onnx")
    gg.artifacts(path, tmp_path / "art", lora=rf"{part}$:2", output="logits")
    found = Checkpoint.load(tmp_path / "art" / "checkpoint")
    gg.artifacts(
        path, tmp_path / "by_its_name", lora=f"{now.partition('.0.')[2]}$:2", output="logits"
    )
    same = Checkpoint.load(tmp_path / "by_its_name" / "checkpoint")
    assert same.trainable.keys() == found.trainable.keys()
    for array in found.trainable.values():
        array[...] = RNG.standard_normal(array.shape)
    found.save(tmp_path / "run")
    own = Adapter.load(tmp_path / "run")
    own.save(tmp_path / "peft")
    file = tmp_path / "peft" / WEIGHTS
    stored = {weight.name: weight.read() for weight in safetensors.read_header(file)}
    assert f"base_model.model.{kind}.{now}.lora_A.weight" in stored
    wanted = gg.export(own.merged(path), tmp_path / "wanted.onnx").read_bytes()
    for names in (
        stored,
        {name.replace(f"{kind}.{now}", f"{kind}.{older}"): x for name, x in stored.items()},
    ):
        file.write_bytes(safetensors.to_bytes(names))
        gg.export(Adapter.load(tmp_path / "peft").merged(path), tmp_path / "again.onnx")
        assert (tmp_path / "again.onnx").read_bytes() == wanted


@pytest.mark.parametrize("dora", [False, True])
def test_the_weight_that_peft_saves_beside_the_update_of_a_head(tmp_path: Path, dora: bool) -> None:
    """It does so for `lm_head`: the head's weight is then that one, with the update."""
    path, own = saved(product_model("q.weight", "lm_head.weight"), tmp_path / "m.onnx"), "lm_head"
    found = updates("q", own)
    if dora:
        sizes = {f"{name}.lora_magnitude_vector": np.ones(4, "f") for name in ("q", own)}
        found.matrices |= sizes
    weight = RNG.standard_normal((4, 4), np.float32)
    config = {"r": 2, "lora_alpha": 4, "lora_dropout": 0, "use_dora": dora}
    more = {f"{own}.base_layer.weight": weight, f"{own}.base_layer.bias": np.ones(4, "f")}
    folder = write_folder(tmp_path / "peft", config, found.matrices | more, {})
    read = Adapter.load(folder)
    assert read.modules == ["q"] and [*read.saved] == ["lm_head.bias", "lm_head.weight"]
    np.testing.assert_array_equal(read.saved["lm_head.weight"], found.updates()[own].of(weight))
    del read.saved["lm_head.bias"]
    merged = {n: x.const_value for n, x in read.merged(path).graph.initializers.items()}
    both = merged[f"{own}.weight"].numpy()  # type: ignore[union-attr]
    np.testing.assert_array_equal(both.T, read.saved["lm_head.weight"])
    for odd in ({"x.base_layer.weight": weight}, {f"{own}.base_layer.weight": weight[:3]}):
        folder = write_folder(tmp_path / "peft", config, found.matrices | odd, {})
        with pytest.raises(GraphgenError, match="a weight base_layer has no update of its size"):
            Adapter.load(folder)


def test_the_last_product_of_torchs_attention_is_not_for_peft(tmp_path: Path) -> None:
    """PEFT adapts the attention as one module, and 0.21 adds this update twice or never."""
    for first in ("m.attn", "m.attn.in_proj_weight"):
        path = saved(
            product_model(f"{first}.weight", "m.attn.out_proj.weight"), tmp_path / "m.onnx"
        )
        gg.artifacts(path, tmp_path / "art", lora="out_proj:2", loss="mse")
        found = Adapter.load(tmp_path / "art" / "checkpoint")
        with pytest.raises(GraphgenError, match=r"out_proj is the last product of torch's attent"):
            found.save(tmp_path / "peft")
        assert found.merged(path)
    one = {f"m.attn.base_layer.out_proj{p}": np.ones((2, 2), "f") for p in (A, B)}
    config = {"r": 2, "lora_alpha": 4, "lora_dropout": 0}
    with pytest.raises(GraphgenError, match=r"out_proj\.lora_A\.weight is no matrix"):
        Adapter.load(write_folder(tmp_path / "peft", config, one, {}))


def test_heads_that_are_stored_as_tables_have_names(tmp_path: Path) -> None:
    for task, own, tied in (
        ("text-classification", "score", False),
        ("text-generation", "lm_head", False),
        ("text-generation", "lm_head", True),
    ):
        config = CAUSAL["llama"] | {"tie_word_embeddings": tied}
        source = random_checkpoint(tmp_path / f"{own}{tied}", config, task)
        path = gg.export(from_folder(source, task=task).model, tmp_path / "model.onnx")
        names = published_names(gg.load(path))
        assert [p.name for n, p in names.items() if "layers" not in n] == [own]
