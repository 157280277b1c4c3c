"""Embeddings of texts, as sentence-transformers makes them, from encoders, decoders and T5's."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import published_decoders
import published_encoders
import published_seq2seq
import pytest
from random_checkpoints import stored_shapes, write_weights
from small_models import ROUNDING, relative_rms, run_plain

import graphgen as gg
from graphgen.commands import main
from graphgen.export.checkpoint import Checkpoint
from graphgen.models.published import FAMILIES, from_folder
from graphgen.models.published.config import Config
from graphgen.models.published.folder import context
from graphgen.safetensors import read_header

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
TASK = "feature-extraction"


def checkpoint(folder: Path, own: Any, which: str, *stages: str, **pooling: Any) -> Path:
    """A folder of sentence-transformers, with the weights that depend on names alone."""
    given = own.fields(which)
    family = FAMILIES[given["model_type"]]
    shapes = stored_shapes(family, family.tasks[TASK](Config(given)))
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(given))
    arrays = {name: own.weight(name, shape) for name, shape in shapes.items()}
    write_weights(folder / "model.safetensors", arrays)
    kinds = ["Transformer", "Pooling", *stages]
    listed = [
        {"type": f"sentence_transformers.models.{kind}", "path": f"{n}_{kind}" * bool(n)}
        for n, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    write_part(folder / "1_Pooling", pooling or {"pooling_mode": "mean"})
    return folder


def write_part(folder: Path, fields: dict[str, Any], **arrays: np.ndarray) -> None:
    """The folder of a part."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    if arrays:
        named = {name.replace("__", "."): array for name, array in arrays.items()}
        write_weights(folder / "model.safetensors", named)


def both() -> dict[str, np.ndarray]:
    """Rows without padding, with padding on the left, and on the right."""
    return {"input_ids": published_decoders.ids(), "attention_mask": published_decoders.mask()}


def pooled(mode: str, x: np.ndarray) -> np.ndarray:
    """Each way of pooling the vectors of one text's tokens, (T, D)."""
    ranks = np.arange(1, len(x) + 1)[:, None]
    found: np.ndarray = {
        "cls": x[0],
        "max": x.max(0),
        "mean": x.mean(0),
        "mean_sqrt_len_tokens": x.sum(0) / len(x) ** 0.5,
        "weightedmean": (x * ranks).sum(0) / ranks.sum(),
        "lasttoken": x[-1],
    }[mode]
    return found


def test_every_pooling_reads_tokens_alone(tmp_path: Path) -> None:
    modes = ["lasttoken", "weightedmean", "cls", "max", "mean_sqrt_len_tokens", "mean"]
    folder = checkpoint(tmp_path, published_encoders, "mpnet", pooling_mode=modes)
    model = gg.optimize(from_folder(folder).model).model
    vectors, embedding = run_plain(model, both())
    rows = zip(vectors, both()["attention_mask"], strict=True)
    wanted = [np.concatenate([pooled(mode, x[kept > 0]) for mode in modes]) for x, kept in rows]
    assert relative_rms(np.array(wanted), embedding) < ROUNDING


def test_what_follows_the_pooling(tmp_path: Path) -> None:
    """Dense with an activation, biases and residuals, a norm, and the length 1; no dropout."""
    stages = ("Dense", "LayerNorm", "Dense", "Dropout", "Normalize")
    folder = checkpoint(tmp_path / "in", published_encoders, "mpnet", *stages)
    random = np.random.default_rng(0)
    w, v, r = (random.standard_normal(s, np.float32) for s in ((8, 32), (8, 8), (8, 32)))
    b, gain = random.standard_normal((2, 8), np.float32)
    kind = "torch.nn.modules.activation.Tanh"
    fields = {"in_features": 32, "out_features": 8, "activation_function": kind}
    arrays = {"linear__weight": w, "linear__bias": b, "residual__weight": r}
    write_part(folder / "2_Dense", fields | {"use_residual": True}, **arrays)
    write_part(folder / "3_LayerNorm", {"dimension": 8}, norm__weight=gain, norm__bias=b)
    kind = "torch.nn.modules.linear.Identity"
    fields = {"in_features": 8, "out_features": 8, "bias": False, "activation_function": kind}
    write_part(folder / "4_Dense", fields, linear__weight=v)
    write_part(folder / "5_Dropout", {"dropout": 0.4})
    model = gg.optimize(from_folder(folder).model).model
    vectors, embedding = run_plain(model, both())
    x = vectors[:1].mean(1)
    assert main(["build", str(folder), "-o", str(tmp_path / "out")]) == 0
    for name in ("1_Pooling/config.json", "2_Dense/model.safetensors", "3_LayerNorm/config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes()
    new = random.standard_normal(v.shape, np.float32)  # as if it had been trained
    trained = {"head.stages.2.linear.weight": new.T.copy()}
    Checkpoint(trainable=trained, frozen={}).save(tmp_path / "checkpoint")
    back = tmp_path / "back"
    gg.to_checkpoint(tmp_path / "out", tmp_path / "checkpoint", back)
    for file in folder.rglob("*.safetensors"):
        before, after = (
            {w.name: w.read() for w in read_header(place / file.relative_to(folder))}
            for place in (folder, back)
        )
        if file.parent.name == "4_Dense":
            before["linear.weight"] = new
        assert before.keys() == after.keys()
        assert all(np.array_equal(before[name], after[name]) for name in before)
    again = gg.optimize(from_folder(back).model).model
    assert relative_rms(run_plain(again, both())[1], embedding) > 0.1
    x = np.tanh(x @ w.T + b) + x @ r.T
    x = (x - x.mean()) / np.sqrt(x.var() + 1e-5) * gain + b
    x = x @ v.T
    assert relative_rms(x / np.linalg.norm(x), embedding[:1]) < 1e-5


@pytest.mark.parametrize("which", ["olmo2", "gptj", "opt"])
def test_a_decoder_embeds_by_its_last_token(which: str, tmp_path: Path) -> None:
    """Its logits with that vector are those that transformers gave."""
    own = published_decoders
    folder = checkpoint(tmp_path, own, which, "Normalize", pooling_mode_lasttoken=True)
    model = gg.optimize(from_folder(folder).model, expect={"attention": 2}).model
    vectors, embedding = run_plain(model, both())
    last = vectors[[0, 1, 2], [8, 8, 6]]
    wanted = np.load(FIXTURES / "decoders" / "results.npz")[which][[0, 1, 2], [8, 8, 6]]
    table = own.weight("lm_head.weight", (40, 32))
    bias = own.weight("lm_head.bias", (40,)) if which == "gptj" else 0
    if which == "opt":
        table = own.weight("model.decoder.embed_tokens.weight", (40, 32))
    assert relative_rms(wanted, last @ table.T + bias) < 1e-5
    assert relative_rms(last / np.linalg.norm(last, axis=1, keepdims=True), embedding) < ROUNDING


@pytest.mark.parametrize("which", ["mt5", "umt5"])
def test_the_encoder_of_t5_embeds(which: str, tmp_path: Path) -> None:
    """Its decoder's weights may be there."""
    own = published_seq2seq
    folder = checkpoint(tmp_path, own, which)
    family, fields = FAMILIES[which], own.fields(which)
    shapes = stored_shapes(family, family.tasks["text2text-generation"](Config(fields)))
    arrays = {name: own.weight(name, shape) for name, shape in shapes.items()}
    write_weights(folder / "model.safetensors", arrays)
    vectors, embedding = run_plain(gg.optimize(from_folder(folder).model).model, both())
    kept = both()["attention_mask"].astype(bool)
    wanted = np.load(FIXTURES / "seq2seq" / "results.npz")[f"{which}, states"]
    assert relative_rms(wanted[kept], vectors[kept]) < 1e-5
    assert relative_rms(wanted[:1].mean(1), embedding[:1]) < 1e-5


def test_the_body_of_a_decoder_alone(tmp_path: Path) -> None:
    """Its names have no prefix, and a folder of sentence-transformers needs no --task."""
    folder = checkpoint(tmp_path / "in", published_decoders, "smollm3", pooling_mode="lasttoken")
    family, fields = FAMILIES["smollm3"], published_decoders.fields("smollm3")
    shapes = stored_shapes(family, family.tasks[TASK](Config(fields)))
    bare = {
        name.removeprefix("model."): published_decoders.weight(name, shape)
        for name, shape in shapes.items()
    }
    whole = run_plain(from_folder(folder).model, both())
    write_weights(folder / "model.safetensors", bare)
    assert main(["build", str(folder), "-o", str(tmp_path / "out")]) == 0
    built = gg.Session(tmp_path / "out" / "onnx" / "model.onnx")(**both())
    assert relative_rms(whole[1], built[1]) < ROUNDING


def test_a_decoder_that_sees_both_sides_continues_no_texts(tmp_path: Path) -> None:
    """EmbeddingGemma: tokens up to half a window, 2, behind a token change its vector."""
    own, which = published_decoders, "gemma3_text"
    folder = checkpoint(tmp_path, own, which)
    given = own.fields(which) | {"use_bidirectional_attention": True, "num_hidden_layers": 1}
    given |= {"layer_types": ["sliding_attention"]}
    (folder / "config.json").write_text(json.dumps(given))
    family = FAMILIES[which]
    shapes = stored_shapes(family, family.tasks[TASK](Config(given)))
    arrays = {name: own.weight(name, shape) for name, shape in shapes.items()}
    write_weights(folder / "model.safetensors", arrays)
    model = from_folder(folder).model
    ids = np.array([[1, 2, 3, 4, 5, 6, 7]])
    other = np.where(np.arange(7) == 6, 8, ids)
    x, y = (
        run_plain(model, {"input_ids": i, "attention_mask": ids * 0 + 1})[0] for i in (ids, other)
    )
    np.testing.assert_array_equal((x != y).any(-1)[0], np.arange(7) >= 4)
    with pytest.raises(gg.GraphgenError, match="use_bidirectional_attention is True; it must be f"):
        from_folder(folder, "text-generation")


def test_a_decoder_whose_configuration_is_not_causal_sees_both_sides(tmp_path: Path) -> None:
    own, which = published_decoders, "olmo2"
    given = own.fields(which)
    folder = checkpoint(tmp_path, own, which, pooling_mode="lasttoken")
    feeds = {"input_ids": np.array([[1, 2, 3, 4]]), "attention_mask": np.ones((1, 4), np.int64)}
    other = feeds | {"input_ids": np.array([[1, 2, 3, 5]])}
    for causal in (True, False):
        (folder / "config.json").write_text(json.dumps(given | {"is_causal": causal}))
        model = from_folder(folder).model
        x, y = (run_plain(model, f)[0] for f in (feeds, other))
        assert (x != y).any(-1)[0].tolist() == [not causal] * 3 + [True]
    with pytest.raises(gg.GraphgenError, match="is_causal is False; it must be true to continue"):
        from_folder(folder, "text-generation")
    windows = own.fields("cohere2")
    (folder / "config.json").write_text(json.dumps(windows | {"is_causal": False}))
    with pytest.raises(gg.GraphgenError, match="is_causal is False; it must be true with windows"):
        from_folder(folder)


SETTINGS, NOTES = "config_sentence_transformers.json", "sentence_distilbert_config.json"


def test_embeddings_may_be_cut(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, published_encoders, "mpnet", "Normalize")
    whole, cut, more = (
        run_plain(from_folder(folder).model, both())[1]
        for size in (None, 5, 500)
        if (folder / SETTINGS).write_text(json.dumps({"truncate_dim": size}))
    )
    np.testing.assert_array_equal(cut, whole[:, :5])
    np.testing.assert_array_equal(more, whole)
    (folder / SETTINGS).write_text('{"truncate_dim": 0}')
    with pytest.raises(gg.GraphgenError, match="truncate_dim is 0; make it a size, or null"):
        from_folder(folder)


def test_what_sentence_transformers_notes_of_reading_texts(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, published_encoders, "mpnet")
    usual = {"method": "forward", "method_output_name": "last_hidden_state"}
    notes: dict[str, Any] = {"transformer_task": TASK, "module_output_name": "token_embeddings"}
    notes |= {"max_seq_length": 9, "do_lower_case": False, "modality_config": {"text": usual}}
    (folder / NOTES).write_text(json.dumps(notes | {"processing_kwargs": {}, "model_args": {}}))
    out = tmp_path / "out"
    assert main(["build", str(folder), "-o", str(out)]) == 0
    assert context(out) == 9
    for more, told in (
        ({"processing_kwargs": {"text": {"max_length": 8}}}, "does not have these fields: process"),
        ({"modality_config": {"text": usual | {"method_output_name": "x"}}}, "modality_config is"),
        ({"transformer_task": "fill-mask"}, "it must be 'feature-extraction'"),
        ({"module_output_name": "sentence_embedding"}, "it must be 'token_embeddings'"),
    ):
        (folder / NOTES).write_text(json.dumps(notes | more))
        with pytest.raises(gg.GraphgenError, match=told):
            from_folder(folder)


def test_a_cross_encoder_classifies(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, published_encoders, "mpnet")
    (folder / "modules.json").write_text("[]")
    (folder / SETTINGS).write_text('{"model_type": "CrossEncoder"}')
    with pytest.raises(gg.GraphgenError, match=r"classifier.dense.weight is missing"):
        from_folder(folder)


DENSE = {"in_features": 32, "out_features": 8}


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        (DENSE | {"in_features": 16}, "Dense: in_features is 16; it must be 32"),
        ({"in_features": 32}, "the field 'out_features' is missing"),
        (DENSE | {"activation_function": "x.Mine"}, "activation_function is 'x.Mine'; it must be"),
        (DENSE | {"module_input_name": "token_embeddings"}, "it must be 'sentence_embedding'"),
        (DENSE | {"more": 1}, "Dense does not have these fields: more = 1"),
        (DENSE | {"out_features": 9}, "linear.weight is [8, 32], must be [9, 32]"),
        (DENSE | {"bias": False}, "linear.bias is not in the architecture"),
    ],
)
def test_a_dense_layer_is_wrong(fields: dict[str, Any], told: str, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, published_encoders, "mpnet", "Dense")
    arrays = {"linear__weight": np.ones((8, 32), np.float32), "linear__bias": np.ones(8, "f")}
    write_part(folder / "2_Dense", fields, **arrays)
    with pytest.raises(gg.GraphgenError) as error:
        from_folder(folder)
    assert told in str(error.value)


@pytest.mark.parametrize("field", ["module_input_name", "module_output_name"])
def test_a_normalize_of_something_else_is_refused(field: str, tmp_path: Path) -> None:
    """Since sentence-transformers 5.5 it may be the vectors of tokens, or have another name."""
    folder = checkpoint(tmp_path, published_encoders, "mpnet", "Normalize")
    own = {"module_input_name": "sentence_embedding", "module_output_name": None}
    write_part(folder / "2_Normalize", own)
    from_folder(folder)
    write_part(folder / "2_Normalize", own | {field: "token_embeddings"})
    with pytest.raises(gg.GraphgenError, match=f"Normalize: {field} is 'token_embeddings'; it"):
        from_folder(folder)


@pytest.mark.parametrize(
    ("listed", "told"),
    [
        ([("base.modules.router.Router", "")], "the modules Router are not supported: its q"),
        ([("models.StaticEmbedding", ""), ("models.Pooling", "1")], "must list Transformer, Poo"),
        ([("models.Transformer", "0_Transformer"), ("models.Pooling", "1_Pooling")], "in this fo"),
        (
            [("models.Transformer", ""), ("models.Pooling", "1"), ("models.Normalize", "")],
            "'' is not the name of a folder",
        ),
    ],
)
def test_modules_are_refused_by_name_where_a_folder_has_no_configuration(
    listed: Any, told: str, tmp_path: Path
) -> None:
    entries = [{"type": f"sentence_transformers.{kind}", "path": path} for kind, path in listed]
    (tmp_path / "modules.json").write_text(json.dumps(entries))
    with pytest.raises(gg.GraphgenError, match=r"modules\.json.* " + told):
        from_folder(tmp_path)


@pytest.mark.parametrize(
    "fields", [{}, {"pooling_strategy": "sum", "activation_function": "log1p_relu"}]
)
def test_sparse_vectors(fields: dict[str, str], tmp_path: Path) -> None:
    """SPLADE: a number for each token of the vocabulary, without the padding."""
    folder = checkpoint(tmp_path, published_encoders, "mpnet")
    family, given = FAMILIES["mpnet"], published_encoders.fields("mpnet")
    shapes = stored_shapes(family, family.tasks["fill-mask"](Config(given)))
    arrays = {name: published_encoders.weight(name, shape) for name, shape in shapes.items()}
    write_weights(folder / "model.safetensors", arrays)
    kinds = [("models.MLMTransformer", ""), ("sparse_encoder.models.SpladePooling", "1_Pooling")]
    listed = [{"type": f"sentence_transformers.{kind}", "path": path} for kind, path in kinds]
    (folder / "modules.json").write_text(json.dumps(listed))
    write_part(folder / "1_Pooling", {**fields, "embedding_dimension": None})
    logits, found = run_plain(gg.optimize(from_folder(folder).model).model, both())
    wanted = np.log1p(np.maximum(logits * both()["attention_mask"][..., None], 0))
    wanted = np.log1p(wanted).sum(1) if fields else wanted.max(1)
    assert relative_rms(wanted, found) < ROUNDING
    with pytest.raises(gg.GraphgenError, match="SpladePooling reads the logits of tokens: give"):
        from_folder(folder, TASK)


def test_who_writes_the_weights_of_a_stage(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, published_encoders, "mpnet", "Dense")
    write_part(folder / "2_Dense", DENSE)
    (folder / "2_Dense" / "pytorch_model.bin").touch()
    with pytest.raises(gg.GraphgenError, match=r"SentenceTransformer\(DIR\)\.save\(DIR2\), where"):
        from_folder(folder)


def test_a_prompt_that_is_not_pooled_needs_its_length(tmp_path: Path) -> None:
    """Texts without a prompt are pooled whole either way."""
    given = {"pooling_mode": "mean", "include_prompt": False}
    folder = checkpoint(tmp_path, published_encoders, "mpnet", **given)
    from_folder(folder)
    told = {"prompts": {"query": "query: "}, "default_prompt_name": "query"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(told))
    with pytest.raises(gg.GraphgenError, match="include_prompt is False; it must be True"):
        from_folder(folder)
