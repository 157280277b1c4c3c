"""Checkpoints of GPT-2, T5, BART and Marian: whole, in chunks, and with a cache of the source."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from small_models import ROUNDING, relative_rms, run_plain, vary

import graphgen as gg
from graphgen.commands import main
from graphgen.errors import GraphgenError
from graphgen.export.folders import write_folder
from graphgen.generation import Generator
from graphgen.generation.decoder import EncoderDecoder
from graphgen.models.published import FAMILIES, from_folder
from graphgen.models.published.config import Config
from graphgen.models.published.seq2seq import DECODER, ENCODER
from graphgen.models.published.t5 import t5 as t5_specification
from graphgen.models.published.weights import read_weights
from graphgen.nn.position import buckets
from graphgen.runtime import QUIET

FIXTURES = Path(__file__).parents[1] / "fixtures"
GPT2, T5_FOLDER = FIXTURES / "gpt2_checkpoint", FIXTURES / "t5_checkpoint"
CHUNKS = ([10], [3, 7, 8, 9, 10])
BART = {
    "model_type": "bart",
    "vocab_size": 30,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 20,
    "max_position_embeddings": 10,
}
MARIAN = {**BART, "model_type": "marian", "scale_embedding": True}


GENERATION = {"bos_token_id": 0, "eos_token_id": 2, "num_beams": 4, "early_stopping": True}
PUBLISHED = {
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": 50,
        "n_ctx": 12,
        "n_positions": 12,
        "n_embd": 16,
        "n_head": 2,
        "n_layer": 2,
        "attn_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "resid_pdrop": 0.1,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05,
        "summary_activation": None,
        "summary_first_dropout": 0.1,
        "summary_proj_to_labels": True,
        "summary_type": "cls_index",
        "summary_use_proj": True,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    },
    "t5": {
        "model_type": "t5",
        "vocab_size": 50,
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 24,
        "num_layers": 1,
        "num_heads": 2,
        "n_positions": 512,
        "output_past": True,
        "dropout_rate": 0.1,
        "initializer_factor": 1.0,
        "is_encoder_decoder": True,
        "layer_norm_epsilon": 1e-06,
        "relative_attention_num_buckets": 32,
        "decoder_start_token_id": 0,
        "task_specific_params": {"summarization": {"prefix": "summarize: "}},
    },
    "bart": {
        **BART,
        **GENERATION,
        "_num_labels": 3,
        "activation_dropout": 0.0,
        "activation_function": "gelu",
        "add_bias_logits": False,
        "add_final_layer_norm": False,
        "classif_dropout": 0.0,
        "decoder_layerdrop": 0.0,
        "extra_pos_embeddings": 2,
        "force_bos_token_to_be_generated": True,
        "forced_eos_token_id": 2,
        "gradient_checkpointing": False,
        "id2label": {"0": "LABEL_0"},
        "init_std": 0.02,
        "normalize_before": False,
        "normalize_embedding": True,
        "num_hidden_layers": 1,
        "prefix": " ",
        "replacing_rate": 0,
        "scale_embedding": False,
        "static_position_embeddings": False,
        "student_decoder_layers": None,
    },
    "marian": {
        **MARIAN,
        **GENERATION,
        "add_bias_logits": False,
        "add_final_layer_norm": False,
        "bad_words_ids": [[29]],
        "decoder_start_token_id": 29,
        "decoder_vocab_size": 30,
        "normalize_before": False,
        "normalize_embedding": False,
        "pad_token_id": 29,
        "share_encoder_decoder_embeddings": True,
        "static_position_embeddings": True,
    },
}
"""The fields of published configurations, with small sizes."""


def generation(config: Config) -> Any:
    """The encoder-decoder of a configuration."""
    return FAMILIES[config.model_type].tasks["text2text-generation"](config)


def empty(model: Any, rows: int) -> dict[str, Any]:
    """The cache before the first call."""
    return {
        value.name: np.zeros((rows, value.shape[1], 0, value.shape[3]), np.float32)
        for value in model.graph.inputs
        if value.name.startswith("past_key_values")
    }


def decode(
    model: Any, states: Any, mask: Any, tokens: Any, ends: list[int]
) -> dict[str, np.ndarray]:
    """All logits, and weights of attention, of calls that end there.

    Only the first is given the states of the source.
    """
    past, start = empty(model, len(tokens)), 0
    parts: dict[str, list[Any]] = {}
    names = [value.name for value in model.graph.outputs]
    for end in ends:
        feeds = {
            "input_ids": tokens[:, start:end],
            "encoder_hidden_states": np.full_like(states, np.nan) if start else states,
            "encoder_attention_mask": mask,
            "use_cache_branch": np.array([start > 0]),
        }
        for name, array in zip(names, run_plain(model, {**feeds, **past}), strict=True):
            if not name.startswith("present"):
                ahead = ends[-1] - end if name.startswith("decoder_attentions") else 0
                widths = [(0, 0)] * (array.ndim - 1) + [(0, ahead)]
                parts.setdefault(name, []).append(np.pad(array, widths))
            elif ".decoder." in name or not start:
                past[name.replace("present", "past_key_values")] = array
            else:
                assert array.size == 0, name  # nothing of the source is copied a step
        start = end
    return {name: np.concatenate(found, -2) for name, found in parts.items()}


@pytest.fixture(scope="module")
def t5() -> dict[str, Any]:
    return {n: gg.optimize(m).model for n, m in from_folder(T5_FOLDER).models.items()}


@pytest.mark.parametrize("ends", ([12], [5, 9, 10, 11, 12]))
def test_gpt2(ends: list[int]) -> None:
    given = dict(np.load(GPT2 / "results.npz"))
    model, wanted = gg.optimize(from_folder(GPT2).model).model, given.pop("logits")
    names = [value.name for value in model.graph.outputs]
    past, start, parts = empty(model, 3), 0, []
    for end in ends:
        feeds = {name: array[:, start:end] for name, array in given.items()}
        feeds["attention_mask"] = given["attention_mask"][:, :end]
        results = dict(zip(names, run_plain(model, {**feeds, **past}), strict=True))
        parts.append(results.pop("logits"))
        past = {name.replace("present", "past_key_values"): x for name, x in results.items()}
        start = end
    kept = given["attention_mask"].astype(bool)
    assert relative_rms(wanted[kept], np.concatenate(parts, 1)[kept]) < ROUNDING


@pytest.mark.parametrize("ends", CHUNKS)
def test_t5(t5: dict[str, Any], ends: list[int]) -> None:
    given = np.load(T5_FOLDER / "results.npz")
    mask = given["attention_mask"]
    [states] = run_plain(t5[ENCODER], {"input_ids": given["input_ids"], "attention_mask": mask})
    kept = mask.astype(bool)
    assert relative_rms(given["last_hidden_state"][kept], states[kept]) < ROUNDING
    found = decode(t5[DECODER], states, mask, given["decoder_input_ids"], ends)
    assert relative_rms(given["logits"], found["logits"]) < ROUNDING


@pytest.mark.parametrize("ends", CHUNKS)
def test_attentions_of_t5(ends: list[int]) -> None:
    """Those of the encoder, of the decoder, and of the decoder to the encoder."""
    given = np.load(T5_FOLDER / "results.npz")
    source = {name: given[name] for name in ("input_ids", "attention_mask")}
    parts = from_folder(T5_FOLDER, attentions=True).models
    encoder, decoder = (gg.optimize(model, verify=True).model for model in parts.values())
    states, weights = run_plain(encoder, source)
    mask = source["attention_mask"]
    found = decode(decoder, states, mask, given["decoder_input_ids"], ends)
    found |= {"last_hidden_state": states, "encoder_attentions.0": weights}
    kinds = {"encoder": 1, "decoder": 2, "cross": 2}
    names = [f"{kind}_attentions.{n}" for kind, count in kinds.items() for n in range(count)]
    assert [value.name for value in encoder.graph.outputs] == ["last_hidden_state", names[0]]
    assert {*found} == {"last_hidden_state", "logits", *names}
    for name in ("logits", *names):
        assert relative_rms(given[name], found[name]) < ROUNDING


def test_generation_reads_no_attentions(tmp_path: Path) -> None:
    rows = []
    for more in ([], ["--attentions"]):
        assert main(["build", str(T5_FOLDER), "-o", str(tmp_path / "out"), *more]) == 0
        generator = Generator(tmp_path / "out", threads=1)
        found = generator([[5, 6, 7]], max_new_tokens=5, beams=2, begin=0)
        list(found)
        rows.append(found.tokens)
    assert rows[0] == rows[1]


def test_names_and_sizes_are_those_of_clients(t5: dict[str, Any]) -> None:
    inputs = {value.name: str(value.shape) for value in t5[DECODER].graph.inputs}
    outputs = [value.name for value in t5[DECODER].graph.outputs]
    cache = [
        f"past_key_values.{layer}.{side}.{kind}"
        for layer in range(2)
        for side in ("decoder", "encoder")
        for kind in ("key", "value")
    ]
    first = ["encoder_attention_mask", "input_ids", "encoder_hidden_states"]
    assert list(inputs) == [*first, *cache, "use_cache_branch"]
    assert outputs == ["logits", *(n.replace("past_key_values", "present") for n in cache)]
    for side in ("decoder", "encoder"):
        wanted = f"[batch_size,2,past_{side}_sequence_length,6]"
        assert inputs[f"past_key_values.1.{side}.value"] == wanted


def test_the_command_writes_both_files(tmp_path: Path, capsys: Any) -> None:
    assert main(["build", str(T5_FOLDER), "-o", str(tmp_path / "out")]) == 0
    assert "t5, 8,512 parameters" in capsys.readouterr().out
    for name in (ENCODER, DECODER):
        session = ort.InferenceSession(tmp_path / "out" / "onnx" / name)
        assert session.get_inputs()[0].type == "tensor(int64)"
    assert (tmp_path / "out" / "config.json").is_file()


def test_weights_are_stored_once(tmp_path: Path) -> None:
    """Each file holds its own weights, the embedding both; neither those of both branches twice."""
    main(["build", str(T5_FOLDER), "-o", str(tmp_path / "out")])
    stored = sum(4 * np.prod(weight.shape) for weight in read_weights(T5_FOLDER).values())
    embedding = 4 * 50 * 16
    sizes = [
        tensor.nbytes
        for name in (ENCODER, DECODER)
        for value in gg.load(tmp_path / "out" / "onnx" / name).graph.initializers.values()
        if (tensor := value.const_value) is not None and tensor.dtype.name == "FLOAT"
    ]
    assert stored + embedding <= sum(sizes) < stored + embedding + 512  # tables of distances


@pytest.mark.parametrize("fields", (BART, MARIAN), ids=("bart", "marian"))
def test_chunks_of_bart_and_marian_are_the_whole(fields: dict[str, Any]) -> None:
    module = vary(generation(Config(fields)))
    random, mask = np.random.default_rng(0), np.ones((2, 7), np.int64)
    mask[1, 5:] = 0
    parts = {name: gg.build(part, **inputs) for name, (part, inputs) in module.graphs().items()}
    source = random.integers(0, 30, (2, 7))
    [states] = run_plain(parts[ENCODER], {"input_ids": source, "attention_mask": mask})
    tokens = random.integers(0, 30, (2, 10))
    found = [decode(parts[DECODER], states, mask, tokens, ends) for ends in CHUNKS]
    states[1, 5:] = 100.0  # of padding, which nothing sees
    found.append(decode(parts[DECODER], states, mask, tokens, [10]))
    for other in found[1:]:
        assert relative_rms(found[0]["logits"], other["logits"]) < ROUNDING


def test_stored_sinusoids_are_read() -> None:
    """Where a checkpoint has them, they are weights; where it has none, they are calculated."""
    config = Config(MARIAN)
    config.stored = frozenset({"model.encoder.embed_positions.weight"})
    module = generation(config)
    assert isinstance(module.encoder.positions, gg.nn.Embedding)
    table = module.decoder.positions.table
    angles = np.arange(10)[:, None] / 10000 ** (np.arange(8) / 8)
    np.testing.assert_allclose(table[:, :8], np.sin(angles), atol=1e-6)
    np.testing.assert_allclose(table[:, 8:], np.cos(angles), atol=1e-6)


@pytest.mark.parametrize(
    ("fields", "stored", "own"),
    [
        ({}, ["lm_head.weight"], False),
        ({"tie_word_embeddings": False}, [], True),  # it is missing then
        ({"scale_decoder_outputs": False}, ["lm_head.weight"], True),
        ({"scale_decoder_outputs": False}, [], False),
    ],
)
def test_an_output_layer_is_told_or_stored(
    fields: dict[str, Any], stored: list[str], own: bool
) -> None:
    config = Config({**PUBLISHED["t5"], **fields})
    config.stored = frozenset(stored)
    assert (generation(config).head is not None) == own


@pytest.mark.parametrize("kind", ["t5", "umt5"])
@pytest.mark.parametrize(
    ("fields", "scaled"),
    [
        ({}, True),
        ({"tie_word_embeddings": False}, False),
        ({"scale_decoder_outputs": True}, True),
        ({"scale_decoder_outputs": False}, False),
        ({"scale_decoder_outputs": None}, False),
    ],
)
def test_outputs_are_scaled(kind: str, fields: dict[str, Any], scaled: bool) -> None:
    """As in transformers, where only a field that is absent follows the tied embeddings."""
    given = {n: x for n, x in PUBLISHED["t5"].items() if n != "scale_decoder_outputs"}
    config = Config(given | fields | {"model_type": kind})
    assert (t5_specification(config).last_scale != 1.0) == scaled
    config.finish()


def test_buckets_grow_with_the_distance() -> None:
    """32 buckets to distance 128: ranges double the distance in 16 / log2(128 / 16) buckets."""
    found = buckets(np.arange(1000), 32, 128)
    assert found[:17].tolist() == list(range(17))
    assert found[[127, 128, 999]].tolist() == [31, 31, 31]
    assert np.all(np.diff(found) >= 0)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"feed_forward_proj": "gated-tanh"}, "feed_forward_proj is 'gated-tanh'; it must be"),
        ({"dense_act_fn": "relu"}, "dense_act_fn is 'relu'; it must be 'gelu_new'"),
        ({"relative_attention_max_distance": 2}, "relative_attention_max_distance is 2; it must"),
        ({"is_decoder": True}, "is_decoder is True; it must be False"),
        ({"d_kv": 5}, r"decoder.block.0.layer.1.EncDecAttention.q.weight is \[12, 16\], must be"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], told: str, tmp_path: Path) -> None:
    shutil.copytree(T5_FOLDER, tmp_path, dirs_exist_ok=True)
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**fields, **change}))
    with pytest.raises(GraphgenError, match=told):
        from_folder(tmp_path)


@pytest.mark.parametrize(("fields", "longest"), [({"n_positions": 4}, None), (BART, 10)])
def test_sources_are_as_long_as_the_positions_of_an_encoder(
    t5: dict[str, Any], fields: dict[str, Any], longest: int | None, tmp_path: Path
) -> None:
    write_folder(T5_FOLDER, tmp_path / "out", t5)
    known = json.loads((T5_FOLDER / "config.json").read_text()) if longest is None else {}
    known |= {"decoder_start_token_id": 0, "eos_token_id": 1}
    (tmp_path / "out" / "config.json").write_text(json.dumps({**known, **fields}))
    generator = Generator(tmp_path / "out", threads=1)
    assert isinstance(generator.decoder, EncoderDecoder)
    assert QUIET.items() <= generator.decoder.encoder.plan.config.items()
    assert len(list(generator([[3] * 10], max_new_tokens=3, min_new_tokens=3))) == 3
    if longest is not None:
        with pytest.raises(GraphgenError, match="11 tokens, and the model's context 10; give a"):
            generator([[3] * 11])


@pytest.mark.parametrize("model_type", PUBLISHED)
def test_published_configurations_are_known(model_type: str) -> None:
    config = Config(PUBLISHED[model_type])
    for task in FAMILIES[model_type].tasks.values():
        task(config)
    config.finish()


def test_fields_of_the_other_side_are_refused() -> None:
    with pytest.raises(GraphgenError, match="normalize_before is True; it must be False"):
        generation(Config({**BART, "normalize_before": True}))
    config = Config({"model_type": "t5", "d_model": 16, "d_kv": 8, "d_ff": 8, "num_layers": 1})
    with pytest.raises(GraphgenError, match="the field 'vocab_size' is missing"):
        generation(config)
