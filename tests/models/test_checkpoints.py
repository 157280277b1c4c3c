"""Folders of published checkpoints: what is built of them, and bad ones of every kind."""

import itertools
import json
import math
import os
import re
import resource
import shutil
import subprocess
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import published_decoders
import published_encoders
import pytest
import random_checkpoints
from random_checkpoints import write_weights
from small_models import ROUNDING, relative_rms, run_plain

import graphgen as gg
from graphgen.commands import main
from graphgen.models.published import FAMILIES, from_folder
from graphgen.models.published.config import Config
from graphgen.models.published.weights import read_weights

PUBLISHED = Path(__file__).parents[1] / "fixtures" / "bert_checkpoint"
SIZES = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 24}
SIZES |= {"num_attention_heads": 2, "vocab_size": 60, "max_position_embeddings": 16}
CONFIGS = {
    "bert": SIZES,
    "roberta": {**SIZES, "pad_token_id": 3, "type_vocab_size": 1},
    "distilbert": {"n_layers": 2, "dim": 16, "hidden_dim": 24, "n_heads": 2, "vocab_size": 60},
    "vit": {**SIZES, "image_size": 8, "patch_size": 4, "vocab_size": None}
    | {"max_position_embeddings": None},
}
DECODER = {**SIZES, "num_key_value_heads": 1}
ALL_CONFIGS = {
    **CONFIGS,
    "llama": {**DECODER, "rope_scaling": {"rope_type": "llama3", "factor": 2}},
    "mistral": {**DECODER, "sliding_window": 4},
    "qwen2": {**DECODER, "use_sliding_window": True, "sliding_window": 4},
    "qwen3": {**DECODER, "head_dim": 8},
}
NEW = {
    kind: own.fields(kind)
    for own, known in (
        (published_decoders, published_decoders.DECODERS),
        (published_encoders, published_encoders.ENCODERS),
    )
    for kind in known
    if "," not in kind
}
ODD = [[], [[], []], {}, "", "x", -1, 0, True, 0.5, math.inf, math.nan, 10**400, [1, "a"]]
ODD += [
    {"rope_type": kind, "factor": 2, **more}
    for kind in ("linear", "yarn", "llama3")
    for more in (
        {"factor": "x"},
        {"factor": [1]},
        {"rope_theta": 1},
        {"rope_theta": math.nan},
        {"beta_fast": 0},
        {"original_max_position_embeddings": 0},
        {"low_freq_factor": 1, "high_freq_factor": 1},
    )
]


def write_shards(folder, parts):
    """Several of them, with their index."""
    (folder / "model.safetensors").unlink(missing_ok=True)
    names = [f"model-{n + 1:05}-of-{len(parts):05}.safetensors" for n in range(len(parts))]
    for name, part in zip(names, parts, strict=True):
        write_weights(folder / name, part)
    listed = {weight: name for name, part in zip(names, parts, strict=True) for weight in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))


def published():
    """The weights of the published checkpoint, by name."""
    return {name: weight.read() for name, weight in read_weights(PUBLISHED).items()}


def write_config(folder, **fields):
    """config.json of the published checkpoint with other fields."""
    known = json.loads((PUBLISHED / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(known | fields))


def random_checkpoint(folder, kind, task, **fields):
    """A small checkpoint of a family."""
    return random_checkpoints.random_checkpoint(
        folder, {"model_type": kind, **CONFIGS[kind], **fields}, task
    )


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A copy of the published checkpoint, beside which commands run."""
    shutil.copytree(PUBLISHED, tmp_path / "in")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "in"


def compare_with_torch(folder, task, *, bound=1e-5, **options):
    arrays = np.load(PUBLISHED / "results.npz")
    model = gg.optimize(from_folder(folder, task, **options).model, verify=True).model
    feeds = {value.name: arrays[value.name] for value in model.graph.inputs}
    for value, array in zip(model.graph.outputs, run_plain(model, feeds), strict=True):
        assert relative_rms(arrays[value.name], array) < bound


@pytest.mark.parametrize("task", ["fill-mask", "feature-extraction"])
@pytest.mark.parametrize("attentions", [False, True])
def test_numbers_of_torch(task, attentions):
    compare_with_torch(PUBLISHED, task, attentions=attentions)


def test_the_body_alone_and_names_of_today(folder):
    today = {"gamma": "weight", "beta": "bias"}
    body = {
        ".".join(today.get(part, part) for part in name.removeprefix("bert.").split(".")): array
        for name, array in published().items()
        if name.startswith("bert.")
    }
    write_weights(folder / "model.safetensors", body)
    compare_with_torch(folder, "feature-extraction")


@pytest.mark.parametrize("before", ["module.", "_orig_mod.", "module._orig_mod."])
def test_what_torch_wraps_modules_in_is_no_part_of_a_name(folder, before):
    wrapped = {f"{before}{name}": array for name, array in published().items()}
    parts = {name.replace(".layer.0.", ".layer.0._orig_mod."): a for name, a in wrapped.items()}
    write_weights(folder / "model.safetensors", parts)
    assert {*parts} != {*wrapped} and {*read_weights(folder)} == {*published()}
    twice = published() | {f"_orig_mod.{name}": array for name, array in published().items()}
    write_weights(folder / "model.safetensors", twice)
    assert {*read_weights(folder)} == {*twice}  # of which one may be wrong


def initializers(folder):
    """The weights of the graph of a folder, by name."""
    found = from_folder(folder).model.graph.initializers
    return {name: value.const_value.numpy() for name, value in found.items()}


@pytest.mark.parametrize("which", ["camembert", "electra", "albert", "distilbert"])
def test_norms_of_every_family_by_the_names_of_tensorflow(which, tmp_path):
    small = random_checkpoints.ENCODERS
    fields = small[which] if which in small else published_encoders.fields(which)
    random_checkpoints.random_checkpoint(tmp_path, fields)
    wanted = initializers(tmp_path)
    stored = {name: weight.read() for name, weight in read_weights(tmp_path).items()}
    older = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    renamed = {re.sub("|".join(older), lambda m: older[m[0]], n): a for n, a in stored.items()}
    assert renamed.keys() != stored.keys()
    write_weights(tmp_path / "model.safetensors", renamed)
    found = initializers(tmp_path)
    assert all(np.array_equal(array, found[name]) for name, array in wanted.items())


def test_experts_in_several_dtypes(tmp_path):
    fields = published_decoders.fields("mixtral")
    random_checkpoints.random_checkpoint(tmp_path, fields)
    kinds = itertools.cycle([np.float16, ml_dtypes.bfloat16, np.float32])
    stored = {
        name: weight.read().astype(next(kinds)) for name, weight in read_weights(tmp_path).items()
    }
    write_weights(tmp_path / "model.safetensors", stored)
    found = initializers(tmp_path)
    write_weights(
        tmp_path / "model.safetensors", {n: a.astype(np.float32) for n, a in stored.items()}
    )
    wanted = initializers(tmp_path)
    assert all(np.array_equal(array, found[name]) for name, array in wanted.items())


def test_a_name_of_today_comes_before_an_older_one(folder):
    """transformers writes both where they are untied, and uses the newer."""
    weights = published()
    bias = weights["cls.predictions.bias"]
    weights |= {"cls.predictions.decoder.bias": bias, "cls.predictions.bias": bias + 1}
    for given in (weights, dict(reversed(weights.items()))):
        write_weights(folder / "model.safetensors", given)
        compare_with_torch(folder, "fill-mask")


@pytest.mark.parametrize(("kind", "bound"), [("float32", 1e-5), ("float16", 3e-3)])
def test_weights_in_parts_are_those_of_one_file(folder, kind, bound):
    items = [(name, array.astype(kind)) for name, array in published().items()]
    write_shards(folder, [dict(items[n::3]) for n in range(3)])
    compare_with_torch(folder, "fill-mask", bound=bound)


@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16])
def test_stored_in_half_precision_is_read_exactly(folder, stored):
    halves = {name: array.astype(stored) for name, array in published().items()}
    results = []
    for weights in (halves, {name: half.astype(np.float32) for name, half in halves.items()}):
        write_weights(folder / "model.safetensors", weights)
        arrays = np.load(PUBLISHED / "results.npz")
        model = from_folder(folder, "fill-mask").model
        results += run_plain(model, {x.name: arrays[x.name] for x in model.graph.inputs})
    assert np.array_equal(*results)


def test_constants_follow_the_dtype_of_weights():
    for task in FAMILIES["bert"].tasks:
        if task not in ("text-classification", "token-classification", "question-answering"):
            model = from_folder(PUBLISHED, task, dtype=ir.DataType.FLOAT16, attentions=True).model
            floats = {value.dtype for node in model.graph for value in node.outputs}
            assert ir.DataType.FLOAT not in floats
            assert {value.dtype for value in model.graph.outputs} == {ir.DataType.FLOAT16}


OUTPUTS = {
    "feature-extraction": {"last_hidden_state": (2, 9, 16)},
    "fill-mask": {"logits": (2, 9, 60)},
    "text-classification": {"logits": (2, 3)},
    "token-classification": {"logits": (2, 9, 3)},
    "question-answering": {"start_logits": (2, 9), "end_logits": (2, 9)},
}


@pytest.mark.share(3)
@pytest.mark.parametrize("task", OUTPUTS)
@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert"])
def test_every_task_sees_no_padding(kind, task, tmp_path):
    """Outputs are those of the module on arrays, whatever stands where the mask is 0."""
    labels = {"id2label": {"0": "a", "1": "b", "2": "c"}}
    random_checkpoint(tmp_path, kind, task, **labels)
    built = from_folder(tmp_path, task)
    random = np.random.default_rng(0)
    mask = np.array([[1] * 9, [1] * 6 + [0] * 3])
    tokens = np.where(mask == 1, random.integers(4, 60, (2, 9)), 3)
    feeds = {"input_ids": tokens, "attention_mask": mask, "token_type_ids": tokens % 2}
    feeds = {value.name: feeds[value.name] for value in built.model.graph.inputs}
    assert ("token_type_ids" in feeds) == (kind == "bert")
    reference = built.module(**feeds)
    model = gg.optimize(built.model).model
    alone = run_plain(model, {name: array[1:, :6] for name, array in feeds.items()})
    results = run_plain(model, feeds)
    for value, result, short in zip(model.graph.outputs, results, alone, strict=True):
        assert result.shape == OUTPUTS[task][value.name]
        assert relative_rms(reference[value.name], result) < ROUNDING
        kept = result[1:] if task == "text-classification" else result[1:, :6]
        assert relative_rms(short, kept) < ROUNDING


@pytest.mark.share(3)
@pytest.mark.parametrize("attentions", [False, True])
@pytest.mark.parametrize("kind", random_checkpoints.CAUSAL)
def test_decoders_classify_by_the_last_token_that_is_no_padding(kind, attentions, tmp_path):
    """It is masked, or the token of padding, on either side; whatever stands there."""
    fields = {**random_checkpoints.CAUSAL[kind], "pad_token_id": 3, "num_labels": 5}
    random_checkpoints.random_checkpoint(tmp_path, fields, "text-classification")
    built = from_folder(tmp_path, "text-classification", attentions=attentions)
    optimized = gg.optimize(built.model, expect=None if attentions else {"attention": 3})
    random = np.random.default_rng(0)
    ids = random.integers(4, 200, (3, 9))
    mask = np.array([[1] * 9, [1] * 6 + [0] * 3, [0] * 3 + [1] * 6])
    [alone] = run_plain(optimized.model, both(ids[:1, :6]))[:1]
    ids[1], ids[2] = np.r_[ids[0, :6], 199, 198, 3], np.r_[197, 196, 3, ids[0, :6]]
    feeds = {"input_ids": ids, "attention_mask": mask}
    [logits, *weights] = run_plain(optimized.model, feeds)
    assert logits.shape == (3, 5) and len(weights) == (3 if attentions else 0)
    assert relative_rms(built.module(**feeds)["logits"], logits) < ROUNDING
    # Positions with weights begin at the row's start, others say only how far apart tokens are.
    for row in [1] if kind == "gpt2" else [1, 2]:
        assert relative_rms(alone[0], logits[row]) < ROUNDING
    if kind != "mistral":  # whose window is shorter
        ids[0, 6:] = 3
        [padded] = run_plain(optimized.model, both(ids[:1]))[:1]
        assert relative_rms(alone, padded) < ROUNDING


TIED = {
    "llama": ({"tie_word_embeddings": True}, "lm_head.weight", "model.embed_tokens.weight"),
    "gpt2": ({}, "lm_head.weight", "transformer.wte.weight"),
    "t5": ({}, "lm_head.weight", "shared.weight"),
    "bart": ({}, "lm_head.weight", "model.shared.weight"),
}


@pytest.mark.parametrize("kind", [*TIED, "bert"])
def test_a_tied_weight_with_numbers_of_its_own(kind, tmp_path, monkeypatch):
    """transformers 4 takes the table, 5 takes what is stored: which one is meant must be said."""
    monkeypatch.setattr("graphgen.safetensors._PIECE", 1000)
    if kind == "bert":
        random_checkpoint(tmp_path, "bert", "fill-mask")
        name, table = "cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"
    else:
        fields, name, table = TIED[kind]
        known = {**random_checkpoints.CAUSAL, **random_checkpoints.SEQ2SEQ}[kind]
        random_checkpoints.random_checkpoint(tmp_path, {**known, **fields})
    stored = {name: weight.read() for name, weight in read_weights(tmp_path).items()}
    task = "fill-mask" if kind == "bert" else None
    write_weights(tmp_path / "model.safetensors", {**stored, name: stored[table]})
    from_folder(tmp_path, task)
    other = stored[table].copy()
    other[-1, -1] += 1
    write_weights(tmp_path / "model.safetensors", {**stored, name: other})
    with pytest.raises(gg.GraphgenError, match=rf"{name} is tied to {table}, but the file has"):
        from_folder(tmp_path, task)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    from_folder(tmp_path, task)
    if kind == "bert":  # which has no such head here
        (tmp_path / "config.json").write_text(json.dumps(config))
        from_folder(tmp_path, "feature-extraction")


@pytest.mark.parametrize(
    ("kind", "name", "table"),
    [
        ("t5", "encoder.embed_tokens.weight", "shared.weight"),
        ("t5", "decoder.embed_tokens.weight", "shared.weight"),
        ("bart", "model.decoder.embed_tokens.weight", "model.shared.weight"),
        ("marian", "model.decoder.embed_tokens.weight", "model.shared.weight"),
    ],
)
def test_copies_of_a_table_with_numbers_of_their_own(kind, name, table, tmp_path):
    random_checkpoints.random_checkpoint(tmp_path, random_checkpoints.SEQ2SEQ[kind])
    stored = {name: weight.read() for name, weight in read_weights(tmp_path).items()}
    write_weights(tmp_path / "model.safetensors", {**stored, name: stored[table]})
    from_folder(tmp_path)
    write_weights(tmp_path / "model.safetensors", {**stored, name: stored[table] + 1})
    with pytest.raises(gg.GraphgenError, match=rf"{name} and {table} are one table, but the file"):
        from_folder(tmp_path)
    if kind != "t5":  # with a head of its own, each table is read for itself
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
        weights = {**stored, name: stored[table] + 1, "lm_head.weight": stored[table]}
        write_weights(tmp_path / "model.safetensors", weights)
        from_folder(tmp_path)


def test_weights_that_are_integers_are_refused(tmp_path):
    random_checkpoint(tmp_path, "bert", "fill-mask")
    stored = {name: weight.read() for name, weight in read_weights(tmp_path).items()}
    name = "bert.encoder.layer.0.output.dense.weight"
    write_weights(tmp_path / "model.safetensors", {**stored, name: stored[name].astype(np.int8)})
    with pytest.raises(gg.GraphgenError, match=f"{name} is int8, must hold real numbers"):
        from_folder(tmp_path, "fill-mask")


@pytest.mark.parametrize("number", [np.nan, np.inf])
@pytest.mark.parametrize("options", [(), ("--dtype", "fp16"), ("--quantize", "int4")])
def test_weights_that_are_not_finite_are_named(number, options, folder, refused):
    """Products by int4 weights round their inputs: out of NaN came ordinary numbers."""
    arrays = published()
    next(a for name, a in arrays.items() if "layer.0.output.dense.bias" in name)[1] = number
    write_weights(folder / "model.safetensors", arrays)
    told = refused(*options)
    assert "layers.0.feed_forward.down.bias has numbers that are not finite" in told


@pytest.mark.parametrize("kind", [np.float32, ml_dtypes.bfloat16])
def test_weights_that_are_too_large_for_half_precision_are_named(kind, folder, refused):
    arrays = {name: array.astype(kind) for name, array in published().items()}
    next(a for name, a in arrays.items() if "layer.0.output.dense.weight" in name)[1, 2] = -1e5
    write_weights(folder / "model.safetensors", arrays)
    told = refused("--dtype", "fp16")
    assert "layers.0.feed_forward.down.weight: " in told
    assert "is too large for float16; choose another --dtype" in told
    assert main(["build", "in", "-o", "out"]) == 0


def both(ids):
    """Tokens, and a mask that hides none."""
    return {"input_ids": ids, "attention_mask": np.ones_like(ids)}


def test_the_head_of_a_classifier_is_no_head_of_tokens(tmp_path):
    fields = {**random_checkpoints.CAUSAL["gpt2"], "pad_token_id": "x"}
    random_checkpoints.random_checkpoint(tmp_path, {**fields, "pad_token_id": 3})
    with pytest.raises(gg.GraphgenError, match=r"score\.weight is missing"):
        from_folder(tmp_path, "text-classification")
    task = "text-classification"
    random_checkpoints.random_checkpoint(tmp_path, {**fields, "pad_token_id": 3}, task)
    with pytest.raises(gg.GraphgenError, match=r"score\.weight is not in the architecture"):
        from_folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(gg.GraphgenError, match="pad_token_id is 'x'; it must be a token"):
        from_folder(tmp_path, task)


@pytest.mark.parametrize("padding", [None, -1, 512])
def test_positions_of_roberta_need_a_padding(tmp_path, padding):
    random_checkpoints.random_checkpoint(tmp_path, random_checkpoints.ENCODERS["roberta"])
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**fields, "pad_token_id": padding}))
    wanted = "a token from 0" if padding == -1 else "an id that has a position"
    told = rf"roberta: pad_token_id is {padding}; it must be {wanted}"
    with pytest.raises(gg.GraphgenError, match=told):
        from_folder(tmp_path)


def test_positions_of_roberta_skip_padding(tmp_path):
    """On either side: those of BERT begin at the row's start, padding or not."""
    random_checkpoint(tmp_path, "roberta", "feature-extraction")
    model = gg.optimize(from_folder(tmp_path).model).model
    tokens = np.random.default_rng(0).integers(4, 60, (1, 6))
    padded = [np.pad(tokens, ((0, 0), ends), constant_values=3) for ends in ((3, 0), (0, 3))]
    ids = np.concatenate(padded)
    [x] = run_plain(model, {"input_ids": ids, "attention_mask": (ids != 3).astype(np.int64)})
    assert relative_rms(x[0, 3:], x[1, :6]) < ROUNDING


@pytest.mark.parametrize("task", ["image-classification", "feature-extraction"])
def test_image(task, tmp_path):
    random_checkpoint(tmp_path, "vit", task, image_size=[8, 12], num_channels=1, qkv_bias=False)
    built = from_folder(tmp_path, task)
    image = np.random.default_rng(0).normal(size=(3, 1, 8, 12)).astype(np.float32)
    [wanted] = built.module(pixel_values=image).values()
    [result] = run_plain(gg.optimize(built.model).model, {"pixel_values": image})
    assert result.shape == ((3, 2) if task == "image-classification" else (3, 7, 16))
    assert relative_rms(wanted, result) < ROUNDING


def write_modules(folder, kinds, pooling):
    """The files that make a checkpoint one of sentence-transformers."""
    modules = [
        {"type": f"sentence_transformers.models.{kind}", "path": f"{n}_{kind}" * bool(n)}
        for n, kind in kinds
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


WHOLE = list(enumerate(["Transformer", "Pooling", "Normalize"]))


@pytest.mark.parametrize(
    ("modules", "pooling", "names"),
    [
        (WHOLE, {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, ["mean"]),
        (WHOLE, {"pooling_mode": "cls", "embedding_dimension": 16}, ["cls"]),
        (WHOLE[:2], {"pooling_mode_max_tokens": True}, ["max"]),
        (WHOLE, {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, "cls mean"),
    ],
)
def test_sentence_embedding(folder, modules, pooling, names):
    write_modules(folder, modules, pooling)
    arrays = np.load(PUBLISHED / "results.npz")
    model = gg.optimize(from_folder(folder, "feature-extraction").model, verify=True).model
    vectors, embedding = run_plain(model, {x.name: arrays[x.name] for x in model.graph.inputs})
    kept = arrays["attention_mask"][..., None]
    known = {
        "cls": vectors[np.arange(3), arrays["attention_mask"].argmax(1)],
        "mean": (vectors * kept).sum(1) / kept.sum(1),
        "max": np.where(kept, vectors, -np.inf).max(1),
    }
    wanted = np.concatenate([known[name] for name in known if name in names], 1)
    if modules[2:]:
        wanted = wanted / np.linalg.norm(wanted, axis=1, keepdims=True)
    assert embedding.shape == wanted.shape
    assert relative_rms(wanted, embedding) < ROUNDING


def test_build_writes_a_folder(folder, capsys):
    assert main(["build", "in", "-o", "out", "--task", "fill-mask", "--attentions"]) == 0
    assert capsys.readouterr().out.startswith("out: bert, 5,")
    session = ort.InferenceSession("out/onnx/model.onnx")
    assert [x.name for x in session.get_outputs()] == ["logits", "attentions.0", "attentions.1"]
    for value in session.get_inputs():
        assert (value.type, value.shape) == ("tensor(int64)", ["batch_size", "sequence_length"])
    config = json.loads(Path("out/config.json").read_text())
    given = {"use_external_data_format": {"model.onnx": True}}
    assert config.pop("transformers.js_config") == given
    assert config == json.loads((PUBLISHED / "config.json").read_text())


def test_the_class_of_the_checkpoint_says_what_is_built_and_code_is_not_run(
    folder, capsys, refused
):
    code = {"AutoModel": "modeling.Mine"}
    write_config(folder, architectures=["BertForMaskedLM"], auto_map=code)
    assert main(["build", "in", "-o", "out"]) == 0
    told = capsys.readouterr().out
    assert "auto_map names code that comes with the checkpoint, which is not run" in told
    assert "it was saved as BertForMaskedLM: built for fill-mask; there are feature-extr" in told
    assert "logits" in gg.load(Path("out/onnx/model.onnx")).graph.outputs[0].name
    assert main(["build", "in", "-o", "out", "--task", "fill-mask"]) == 0
    assert "BertForMaskedLM" not in capsys.readouterr().out
    told = refused("--task", "text-classification")
    assert "classifier.weight is missing" in told
    assert told.endswith("; it was saved as BertForMaskedLM: --task fill-mask\n")
    write_config(folder, architectures=["BertForTokenClassification"])
    assert "BertForTokenClassification: built for token-classification; --task has" in refused()
    for name in ("BertForCausalLM", "BertLMHeadModel"):
        write_config(folder, architectures=[name])
        told = refused()
        assert f"it was saved as {name}, and bert has no task with that head; --task" in told
    write_config(folder, architectures=["BertForPreTraining"])
    assert main(["build", "in", "-o", "out"]) == 0
    assert "whose head no task has: built for feature-extraction" in capsys.readouterr().out


def test_what_transformers_js_reads(folder, tmp_path):
    """Every graph with weights next to it, along with what the checkpoint says already."""
    write_config(folder, **{"transformers.js_config": {"dtype": "fp32"}}, _name="é")
    assert main(["build", "in", "-o", "out"]) == 0
    told = json.loads(Path("out/config.json").read_text(encoding="utf-8"))["transformers.js_config"]
    assert told == {"dtype": "fp32", "use_external_data_format": {"model.onnx": True}}
    random_checkpoints.random_checkpoint(tmp_path / "t5", random_checkpoints.SEQ2SEQ["t5"])
    assert main(["build", "t5", "-o", "out"]) == 0
    told = json.loads(Path("out/config.json").read_text())["transformers.js_config"]
    names = ("decoder_model_merged.onnx", "encoder_model.onnx")
    assert told == {"use_external_data_format": dict.fromkeys(names, True)}
    random_checkpoints.random_checkpoint(tmp_path / "gpt2", random_checkpoints.CAUSAL["gpt2"])
    assert main(["build", "gpt2", "-o", "genai", "--layout", "genai"]) == 0
    assert "transformers.js_config" not in json.loads(Path("genai/config.json").read_text())


def contents(folder):
    return {p: p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture
def refused(folder, capsys):
    """Builds the folder, which must be refused; its one line."""

    def run(*arguments, out="out"):
        before = contents(folder.parent)
        code = main(["build", "in", "-o", out, *arguments])
        captured = capsys.readouterr()
        assert (code, captured.out) == (2, ""), captured.err
        assert captured.err.startswith("graphgen: ")
        assert captured.err.count("\n") == 1
        assert contents(folder.parent) == before
        assert sorted(p.name for p in folder.parent.iterdir()) == sorted({"in", *_top(before)})
        return captured.err

    return run


def _top(files):
    return {p.parts[len(Path.cwd().parts)] for p in files}


def test_a_model_type_is_unknown(folder, refused):
    write_config(folder, model_type="robert")
    told = refused()
    assert "there is no model_type 'robert'; there are llama" in told
    assert told.rstrip().endswith("; did you mean 'roberta'?")
    write_config(folder, model_type="zzz")
    assert "there is no model_type 'zzz'; there are llama" in refused()
    write_config(folder, model_type="blip-2", text_config={}, vision_config={})
    assert "'blip-2' is a model of several parts, text_config, vision_config; of su" in refused()
    assert all(name in told for name in FAMILIES)


def test_a_task_is_unknown(refused):
    assert "bert has no task 'fill'; it has feature-extraction, fill-mask, " in refused(
        "--task", "fill"
    )


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"rope_theta": 1e4, "scale": 2}, "does not have these fields: rope_theta = 10000.0; sc"),
        ({"hidden_act": "tanh"}, "hidden_act is 'tanh'; it must be one of relu, gelu"),
        ({"position_embedding_type": "relative_key"}, "'relative_key'; it must be 'absolute'"),
        ({"is_decoder": True}, "is_decoder is True; it must be False"),
        ({"add_cross_attention": True}, "add_cross_attention is True; it must be False"),
        ({"hidden_size": 1 << 40}, f"hidden_size is {1 << 40}; it must be a size from 1 to 167"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000; it must be a size from 1 t"),
        ({"hidden_size": 1 << 24}, "bert.embeddings.word_embeddings.weight is [60, 16], must be"),
        ({"hidden_size": 0}, "hidden_size is 0; it must be a size from 1"),
        ({"hidden_size": "16"}, "hidden_size is '16'; it must be an integer"),
        ({"hidden_size": None}, "the field 'hidden_size' is missing"),
        ({"num_attention_heads": 3}, "the heads must divide the features"),
        ({"layer_norm_eps": True}, "layer_norm_eps is True; it must be a number"),
        ({"model_type": 5}, "model_type is 5; it must be a string"),
        (
            {"model_type": "llama", "architectures": [], "sliding_window": 4},
            "llama: sliding_window is 4; it must be absent",
        ),
        ({"layer_norm_eps": -1e-5}, "layer_norm_eps is -1e-05; it must be at least 0"),
        ({"model_type": None}, "the field 'model_type' is missing"),
        ({"model_type": "vit", "architectures": []}, "vit does not have these fields: "),
    ],
)
def test_a_field_is_wrong(folder, refused, fields, told):
    write_config(folder, **fields)
    assert told in refused()


@pytest.mark.share(3)
@pytest.mark.parametrize("kind", [*ALL_CONFIGS, *NEW])
def test_every_field_is_honored_or_refused(kind):
    """Whatever stands in it; no configuration ends in another error."""
    new = kind in NEW
    base = NEW[kind] if new else {"model_type": kind, **ALL_CONFIGS[kind]}
    for task in [*FAMILIES[kind].tasks.values()][: 1 if new else None]:
        known = Config(base)
        task(known)
        known.finish()
        refused = 0
        for field, value in itertools.product(known._taken, ODD[:13] if new else ODD):
            config = Config({**base, field: value}) if field != "model_type" else known
            try:
                task(config)
            except gg.GraphgenError as error:
                refused += 1
                assert kind in str(error)
        assert refused > len(known._taken)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("null", "config.json holds a NoneType; it must hold a JSON object"),
        ("[]", "config.json holds a list; it must hold a JSON object"),
        ('{"model_type": "bert"', "config.json is not JSON: "),
        ("[" * 100_000, "config.json is not JSON: "),
        ("\xff", "config.json is not JSON: "),
        ("", "config.json is not JSON: "),
        ('{"a": {"b": 1, "b": 1}}', "config.json is not JSON: two values of an object"),
        ("{}" + " " * (1 << 24), "it must be a JSON file of at most 16 MiB"),
    ],
)
def test_a_configuration_is_damaged(folder, refused, text, told):
    (folder / "config.json").write_text(text, encoding="latin-1")
    assert told in refused()


@pytest.mark.parametrize("labels", [[], {}, "a", 5])
def test_labels_are_wrong(folder, refused, labels):
    write_config(folder, id2label=labels)
    assert "it must be an object that names each label" in refused("--task", "text-classification")


def test_weights_that_do_not_fit_are_named_at_once(folder, refused):
    weights = published()
    for name in ("bert.embeddings.LayerNorm.gamma", "cls.predictions.transform.dense.weight"):
        del weights[name]
    weights["bert.encoder.layer.1.output.dense.weight"] = np.zeros((16, 25), np.float32)
    weights["bert.encoder.layer.2.output.dense.weight"] = np.zeros((16, 24), np.float32)
    write_weights(folder / "model.safetensors", weights)
    told = refused("--task", "fill-mask")
    for part in (
        "bert.embeddings.LayerNorm.weight is missing",
        "cls.predictions.transform.dense.weight is missing",
        "bert.encoder.layer.1.output.dense.weight is [16, 25], must be [16, 24]",
        "bert.encoder.layer.2.output.dense.weight is not in the architecture",
    ):
        assert part in told


def test_an_adapter_beside_the_weights_is_not_ignored(folder, refused):
    (folder / "adapter_config.json").write_text("{}")
    assert "in holds an adapter, too, which transformers adds to the weights" in refused()
    (folder / "config.json").unlink()
    assert "in has no config.json; build its base, and give this one with --adapter" in refused()


def test_a_head_is_missing(refused):
    told = refused("--task", "text-classification")
    assert "classifier.weight is missing; classifier.bias is missing" in told


def change_header(folder, change):
    data = (folder / "model.safetensors").read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    change(header["bert.embeddings.LayerNorm.beta"])
    told = json.dumps(header).encode()
    new = len(told).to_bytes(8, "little") + told + data[end:]
    (folder / "model.safetensors").write_bytes(new)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"dtype": "C64"}, "LayerNorm.beta is C64; supported are F64, F32"),
        ({"dtype": "F16"}, "the file is truncated or damaged"),
        ({"dtype": []}, "LayerNorm.beta is []; supported are"),
        ({"shape": [-16]}, "its header is damaged"),
        ({"shape": [1.5]}, "its header is damaged"),
        ({"shape": None}, "its header is damaged"),
        ({"shape": [1 << 62, 1 << 62]}, "the file is truncated or damaged"),
        ({"shape": [10**400]}, "the file is truncated or damaged"),
        ({"shape": [2, 8]}, "LayerNorm.bias is [2, 8], must be [16]"),
        ({"data_offsets": [0, 1 << 60]}, "the file is truncated or damaged"),
        ({"data_offsets": [64, 0]}, "the file is truncated or damaged"),
        ({"data_offsets": [0, 1, 2]}, "its header is damaged"),
        ({"data_offsets": [10**6, 10**6 + 64]}, "the file is truncated or damaged"),
        ({"data_offsets": [4, 68]}, "share bytes: the file is damaged"),
    ],
)
def test_a_header_is_wrong(folder, refused, change, told):
    change_header(folder, lambda entry: entry.update(change))
    assert told in refused()


def test_a_name_stands_twice_in_a_header(folder, refused):
    data = (folder / "model.safetensors").read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    one, other, *_ = json.loads(data[8:end])
    told = data[8:end].replace(f'"{other}"'.encode(), f'"{one}"'.encode())
    new = len(told).to_bytes(8, "little") + told + data[end:]
    (folder / "model.safetensors").write_bytes(new)
    assert "two values of an object are called" in refused()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x05",
        (10**9).to_bytes(8, "little") + b"{}",  # says that gigabytes follow
        (1 << 63).to_bytes(8, "little") + b" " * 100,
        (99).to_bytes(8, "little") + b"{" * 99,
        (10**5).to_bytes(8, "little") + b"[" * 10**5,
        (2).to_bytes(8, "little") + b"[]",
        (4).to_bytes(8, "little") + b"null",
        (9).to_bytes(8, "little") + b'{"a": {}}',
        (10).to_bytes(8, "little") + b'{"a": "b"}',
        (4).to_bytes(8, "little") + b"\xff\xfe\xfd\xfc",
        b"PK\x03\x04" + bytes(1000),  # a pickle of torch under the wrong name
    ],
)
def test_a_file_is_no_safetensors(folder, refused, data):
    (folder / "model.safetensors").write_bytes(data)
    assert "model.safetensors" in refused()


@pytest.mark.parametrize("kept", [100, 5000, -1])
def test_a_file_is_truncated(folder, refused, kept):
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:kept])
    assert "truncated" in refused()


@pytest.mark.parametrize(
    ("index", "told"),
    [
        ({"weight_map": {"a": "../model.safetensors"}}, "is not the name of a file next to it"),
        ({"weight_map": {"a": "/etc/passwd"}}, "is not the name of a file next to it"),
        ({"weight_map": {"a": ".."}}, ""),
        ({"weight_map": {"a": ""}}, ""),
        ({"weight_map": {"a": "b\0c"}}, ""),
        ({"weight_map": {"a": "other.safetensors"}}, "other.safetensors is missing; model.safe"),
        ({"weight_map": {"a": "part.safetensors"}}, "lists weights that no file has: a"),
        ({"weight_map": {}}, "is missing"),
        ({"weight_map": {"a": 5}}, "weight_map must give a file for each weight"),
        ({"weight_map": None}, "weight_map must give a file for each weight"),
        ({}, "weight_map must give a file for each weight"),
        ([], "holds a list"),
    ],
)
def test_an_index_is_wrong(folder, refused, index, told):
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    shutil.copy(folder / "part.safetensors", folder.parent / "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert told in refused()


def test_a_weight_that_two_shards_have(folder, refused):
    weights = published()
    name = max(weights)
    write_shards(folder, [weights, {name: weights[name] + 1}])
    told = "00001-of-00002.safetensors and model-00002-of-00002.safetensors have different numbers"
    assert f"{told} for {name}" in refused()
    write_shards(folder, [weights, {name: weights[name]}])
    assert main(["build", "in", "-o", "out"]) == 0


@pytest.mark.parametrize(
    ("other", "mend"),
    [
        ("pytorch_model.bin", "save_pretrained of transformers, where you trust them, write model"),
        ("tf_model.h5", "save_pretrained"),
        ("model.fp16.safetensors", "give the one of this model that name"),
        ("", "give the folder of a checkpoint"),
    ],
)
def test_there_are_no_weights(folder, refused, other, mend):
    (folder / "model.safetensors").unlink()
    if other:
        (folder / other).write_bytes(b"")
    told = refused()
    assert "has no model.safetensors" in told and other in told and mend in told


def test_there_is_no_configuration(folder, refused):
    (folder / "config.json").unlink()
    assert "in has no config.json; give the folder of a checkpoint" in refused()


@pytest.mark.parametrize(
    ("modules", "pooling", "told"),
    [
        (
            [(0, "Transformer"), (1, "Pooling"), (2, "WordWeights")],
            {},
            "the modules WordWeights are not supported; supported are Transformer, Pooling, Dense",
        ),
        ([*WHOLE, (3, "Pooling")], {}, "lists Transformer, Pooling, Normalize, Pooling; it must"),
        ([(0, "Transformer")], {}, "lists Transformer; it must list Transformer, Pooling"),
        ([(1, "Transformer"), (0, "Pooling")], {}, "the first in this folder"),
        (WHOLE, {}, "pooling_mode is []; it must be one or more of cls, max, mean"),
        (WHOLE, {"pooling_mode": "last"}, "it must be one or more of cls, max, mean"),
        (WHOLE, {"pooling_mode": [[]]}, "it must be one or more of cls, max, mean"),
        (WHOLE, {"pooling_mode": "cls", "include_prompt": 1}, "it must be true or false"),
        (WHOLE, {"pooling_mode": "cls", "word_embedding_dimension": 9}, "is 9; it must be 16"),
        (WHOLE, {"pooling_mode": "cls", "more": 1}, "does not have these fields: more = 1"),
        (WHOLE, [], "holds a list; it must hold a JSON object"),
    ],
)
def test_a_folder_of_sentence_transformers_is_wrong(folder, refused, modules, pooling, told):
    write_modules(folder, modules, pooling)
    assert told in refused("--task", "feature-extraction")


def test_modules_of_a_checkpoint_of_its_own_are_not_run(folder, refused):
    write_modules(folder, WHOLE, {"pooling_mode": "cls"})
    listed = json.loads((folder / "modules.json").read_text())
    listed[0]["type"] = "custom_st.Transformer"
    (folder / "modules.json").write_text(json.dumps(listed))
    told = refused("--task", "feature-extraction")
    assert "custom_st.Transformer is code in the checkpoint, which is not run" in told


def test_texts_that_sentence_transformers_lowers_are_refused(folder, refused):
    write_modules(folder, WHOLE, {"pooling_mode": "cls"})
    file = folder / "sentence_bert_config.json"
    file.write_text('{"max_seq_length": 8, "do_lower_case": true}')
    told = refused("--task", "feature-extraction")
    assert "in/sentence_bert_config.json: do_lower_case is True" in told
    file.write_text('{"max_seq_length": 8, "do_lower_case": false}')
    assert main(["build", "in", "-o", "out", "--task", "feature-extraction"]) == 0


def test_texts_that_the_tokenizer_lowers_anyway_are_not(folder, refused):
    """As those of BGE."""
    tokenizers = pytest.importorskip("tokenizers")
    write_modules(folder, WHOLE, {"pooling_mode": "cls"})
    file = folder / "sentence_bert_config.json"
    file.write_text('{"max_seq_length": 8, "do_lower_case": true}')
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece({"[UNK]": 0, "a": 1}))
    for lowercase in (False, True):
        made.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=lowercase)
        made.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": lowercase}))
        built = main(["build", "in", "-o", "out", "--task", "feature-extraction"])
        assert built == (0 if lowercase else 2)


@pytest.mark.parametrize("modules", [{}, [5], [{"type": "Transformer"}], "["])
def test_its_modules_are_damaged(folder, refused, modules):
    text = modules if isinstance(modules, str) else json.dumps(modules)
    (folder / "modules.json").write_text(text)
    assert "modules.json" in refused("--task", "feature-extraction")


@pytest.mark.parametrize(
    "name",
    ["config.json", "generation_config.json", "tokenizer.json", "vocab.txt", "model.safetensors",
     "model.safetensors.index.json"],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["pipe", "folder", "link"])
def test_what_is_no_file_does_not_count_as_absent(folder, name, kind, capsys):
    path = folder / name
    path.unlink(missing_ok=True)
    if name.endswith(".index.json"):
        (folder / "model.safetensors").unlink()
    {"pipe": os.mkfifo, "folder": os.mkdir, "link": partial(os.symlink, "missing")}[kind](path)
    assert main(["build", "in", "-o", "out"]) == 2
    assert f"in/{name} cannot be read: " in capsys.readouterr().err
    assert not Path("out").exists()


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"a": "\\ud800"}', "[" * 10**5])
def test_the_configuration_of_the_tokenizer_is_damaged(folder, refused, text):
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text(text)
    assert re.search("in/tokenizer_config.json (is not JSON|holds a)", refused())


@pytest.mark.parametrize(
    ("field", "own"),
    [
        ("do_lower_case", "lowercase"),
        ("strip_accents", "strip_accents"),
        ("tokenize_chinese_chars", "handle_chinese_chars"),
    ],
)
def test_two_files_of_a_tokenizer_have_to_agree(folder, refused, field, own):
    normalizer = {"type": "BertNormalizer", "clean_text": True, own: True}
    (folder / "tokenizer.json").write_text(json.dumps({"normalizer": normalizer}))
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({"tokenizer_class": "BertTokenizer", field: False}))
    told = refused()
    assert f"in/tokenizer_config.json: {field} is False, but {own} in tokenizer.json is" in told
    for given in ({field: True}, {field: None}, {"tokenizer_class": "Other", field: False}):
        file.write_text(json.dumps(given))
        assert main(["build", "in", "-o", "out"]) == 0


def test_a_tokenizer_that_its_class_makes_lower_case_is_refused(folder, refused):
    normalizer = {"type": "BertNormalizer", "lowercase": False}
    (folder / "tokenizer.json").write_text(json.dumps({"normalizer": normalizer}))
    file = folder / "tokenizer_config.json"
    for name in ("BertTokenizer", "ElectraTokenizerFast", "MPNetTokenizer", None):
        file.write_text(json.dumps({"tokenizer_class": name}))
        assert "do_lower_case (by default) is True, but lowercase in tokenizer.json" in refused()
    for given in ({"do_lower_case": False}, {"tokenizer_class": "PreTrainedTokenizerFast"}):
        file.write_text(json.dumps(given))
        assert main(["build", "in", "-o", "out"]) == 0


def test_two_files_of_a_tokenizer_agree_on_the_leading_space(folder, refused):
    space = {"type": "ByteLevel", "add_prefix_space": False}
    file = folder / "tokenizer_config.json"
    file.write_text('{"add_prefix_space": true}')
    for before in (space, {"type": "Sequence", "pretokenizers": [{"type": "Digits"}, space]}):
        (folder / "tokenizer.json").write_text(json.dumps({"pre_tokenizer": before}))
        assert "add_prefix_space is True, but add_prefix_space in tokenizer.json" in refused()
    file.write_text('{"add_prefix_space": false}')
    assert main(["build", "in", "-o", "out"]) == 0


def test_two_files_of_a_tokenizer_agree_on_added_tokens(folder, refused):
    token = {"content": "<x>", "lstrip": True, "rstrip": False, "special": True}
    model = {"type": "BPE", "vocab": {"a": 0, "<u>": 1}}
    whole = {"added_tokens": [{"id": 7, **token}], "model": model}
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    file = folder / "tokenizer_config.json"
    for given, told in (
        ({"added_tokens_decoder": {"7": token | {"lstrip": False}}}, "lstrip of token 7 is False"),
        ({"added_tokens_decoder": {"8": token}}, "content of token 8 is '<x>', but content of"),
        ({"additional_special_tokens": ["<y>"]}, "one of additional_special_tokens is '<y>'"),
        ({"extra_special_tokens": {"y": "<y>"}}, "one of extra_special_tokens is '<y>'"),
    ):
        file.write_text(json.dumps(given))
        assert f"in/tokenizer_config.json: {told}" in refused()
    special = ["<u>", {"content": "<x>"}]
    given = {"added_tokens_decoder": {"7": token}, "additional_special_tokens": special}
    file.write_text(json.dumps(given))
    assert main(["build", "in", "-o", "out"]) == 0
    (folder / "tokenizer.json").write_text('{"added_tokens": 5, "model": {"vocab": [[]]}}')
    file.write_text('{"added_tokens_decoder": [], "extra_special_tokens": 5}')
    assert main(["build", "in", "-o", "out"]) == 0


def test_a_tokenizer_is_told_what_the_graph_reads(folder):
    (folder / "tokenizer.json").write_text("{}")
    file, types = folder / "tokenizer_config.json", ["input_ids", "token_type_ids"]
    for given, wanted in (({}, [*types, "attention_mask"]), ({"model_input_names": types}, types)):
        file.write_text(json.dumps(given))
        assert main(["build", "in", "-o", "out"]) == 0
        told = json.loads(Path("out/tokenizer_config.json").read_text())
        assert told == {"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": wanted}
    file.write_text('{"tokenizer_class": "TokenizersBackend"}')  # which gives no types by itself
    assert main(["build", "in", "-o", "out"]) == 0
    told = json.loads(Path("out/tokenizer_config.json").read_text())
    assert told["model_input_names"] == ["input_ids", "attention_mask"]


def test_the_configuration_of_another_tokenizer_is_kept(folder):
    (folder / "tokenizer.json").unlink(missing_ok=True)
    (folder / "tokenizer_config.json").write_text('{"source_lang": "en"}')
    (folder / "sentencepiece.bpe.model").write_bytes(b"x")
    (folder / "config_sentence_transformers.json").write_text("{}")
    assert main(["build", "in", "-o", "out"]) == 0
    assert json.loads(Path("out/tokenizer_config.json").read_text()) == {"source_lang": "en"}
    assert Path("out/sentencepiece.bpe.model").is_file()
    assert Path("out/config_sentence_transformers.json").is_file()


def test_out_is_never_a_folder_that_holds_something_else(folder, refused):
    (folder / "onnx").mkdir()
    (folder / "onnx" / "model.onnx").write_bytes(b"")
    told = "exists and is not a folder of a model: it holds "
    assert re.search(f"in {told}(model.safetensors|results.npz)", refused(out="in"))
    assert f"{told}in/" in refused(out=".")
    (folder.parent / "file").write_bytes(b"")
    assert "file exists and is not a folder of a model: it is a file" in refused(out="file")


def test_out_that_was_built_before_is_replaced(folder):
    for task in ("fill-mask", "feature-extraction"):
        assert main(["build", "in", "-o", "out", "--task", task]) == 0
    [output] = ort.InferenceSession("out/onnx/model.onnx").get_outputs()
    assert output.name == "last_hidden_state"


@pytest.mark.parametrize("pages", [2, 4, 6])
def test_a_disk_that_fills_up(pages, folder, refused, tmp_path):
    """While files are copied, and while weights are written."""
    (tmp_path / "disk").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={4 * pages}k", "tmpfs", tmp_path / "disk"]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this process may not mount a small tmpfs")
    try:
        (tmp_path / "disk" / "kept").write_text("kept")
        (folder / "tokenizer.json").write_text("{}" + " " * 5000)
        told = refused(out="disk/out")
        assert "No space left on device" in told and "disk/out" in told and "partial" not in told
    finally:
        subprocess.run(["umount", tmp_path / "disk"], check=True)


@pytest.mark.parametrize("limit", [1000, 10_000])
def test_a_file_that_may_not_grow(limit, folder, refused):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        assert "File too large" in refused()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
