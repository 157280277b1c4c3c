"""Every published encoder-decoder with the numbers of transformers, in chunks behind a cache."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from published_seq2seq import SEQ2SEQ, fields, inputs, weight
from random_checkpoints import stored_shapes, write_weights
from small_models import relative_rms, run_plain
from test_seq2seq import decode

import graphgen as gg
from graphgen.commands import main
from graphgen.errors import GraphgenError
from graphgen.export.folders import write_folder
from graphgen.models.published import FAMILIES, from_folder
from graphgen.models.published.config import Config
from graphgen.models.published.seq2seq import DECODER, ENCODER

RESULTS = np.load(Path(__file__).resolve().parents[1] / "fixtures" / "seq2seq" / "results.npz")
BOUND = 1e-5  # relative RMS
PUBLISHED: dict[str, dict[str, Any]] = {
    "mt5": {
        "dense_act_fn": "gelu_new",
        "feed_forward_proj": "gated-gelu",
        "is_gated_act": True,
        "layer_norm_epsilon": 1e-06,
        "initializer_factor": 1.0,
        "output_past": True,
        "tie_word_embeddings": False,
        "tokenizer_class": "T5Tokenizer",
    },
    "umt5": {
        "classifier_dropout": 0.0,
        "dense_act_fn": "gelu_new",
        "feed_forward_proj": "gated-gelu",
        "is_gated_act": True,
        "scalable_attention": True,
        "tie_word_embeddings": False,
    },
    "mbart": {
        "_num_labels": 3,
        "add_bias_logits": False,
        "add_final_layer_norm": True,
        "classif_dropout": 0.0,
        "forced_eos_token_id": 2,
        "normalize_before": True,
        "normalize_embedding": True,
        "num_hidden_layers": 1,
        "static_position_embeddings": False,
        "task_specific_params": {"translation_en_to_ro": {"decoder_start_token_id": 25}},
    },
    "pegasus": {
        "add_bias_logits": False,
        "add_final_layer_norm": True,
        "extra_pos_embeddings": 1,
        "force_bos_token_to_be_generated": False,
        "length_penalty": 0.8,
        "normalize_before": True,
        "normalize_embedding": False,
        "num_beams": 8,
        "static_position_embeddings": True,
    },
    "m2m_100": {"decoder_layerdrop": 0.05, "early_stopping": True, "max_length": 200},
}
"""What published configurations have besides sizes."""


def specified(config: Config) -> Any:
    """The module of a configuration."""
    return FAMILIES[config.model_type].tasks["text2text-generation"](config)


def checkpoint(folder: Path, kind: str) -> Path:
    """A folder of a small encoder-decoder, with the weights that the results are of."""
    given = fields(kind)
    shapes = stored_shapes(FAMILIES[kind], specified(Config(given)))
    (folder / "config.json").write_text(json.dumps(given))
    arrays = {name: weight(name, shape) for name, shape in shapes.items()}
    write_weights(folder / "model.safetensors", arrays)
    return folder


@pytest.mark.share(2)
@pytest.mark.parametrize("kind", SEQ2SEQ)
def test_numbers_of_transformers(kind: str, tmp_path: Path) -> None:
    built = from_folder(checkpoint(tmp_path, kind)).models
    models = {name: gg.optimize(model).model for name, model in built.items()}
    for model in models.values():
        assert not any(node.op_type == "Softmax" for node in model.graph.all_nodes())
    given = inputs()
    mask, tokens = given["attention_mask"], given["decoder_input_ids"]
    [states] = run_plain(models[ENCODER], {"input_ids": given["input_ids"], "attention_mask": mask})
    real = mask.astype(bool)
    assert relative_rms(RESULTS[f"{kind}, states"][real], states[real]) < BOUND
    found = decode(models[DECODER], states, mask, tokens, [4, 10])
    assert relative_rms(RESULTS[f"{kind}, logits"], found["logits"]) < BOUND


def test_the_command_chooses_the_language(tmp_path: Path, capsys: Any) -> None:
    source, out = checkpoint(tmp_path, "m2m_100"), tmp_path / "out"
    models = from_folder(source).models
    write_folder(source, out, {f"onnx/{name}": model for name, model in models.items()})
    command = ["generate", str(out), "--ids", "5,6,7", "--max-new-tokens", "2", "--json"]
    assert main([*command, "--forced-bos", "9"]) == 0
    [row] = json.loads(capsys.readouterr().out)["rows"]
    assert row["tokens"][0] == 9
    assert main([*command, "--forced-bos", "40"]) == 2
    assert "forced_bos has token 40; the model has tokens 0 to 39" in capsys.readouterr().err


@pytest.mark.parametrize("kind", PUBLISHED)
def test_published_fields_are_known(kind: str) -> None:
    config = Config(fields(kind) | PUBLISHED[kind])
    specified(config)
    config.finish()


@pytest.mark.parametrize(
    ("kind", "change", "told"),
    [
        ("mbart", {"normalize_before": False}, "normalize_before is False; it must be True"),
        ("mbart", {"add_final_layer_norm": False}, "add_final_layer_norm is False; it must be"),
        ("pegasus", {"normalize_embedding": True}, "normalize_embedding is True; it must be False"),
        ("m2m_100", {"pad_token_id": -1}, "pad_token_id is -1; it must be a token"),
        ("m2m_100", {"d_model": 2}, "d_model is 2; it must be 4 or more"),
        ("umt5", {"feed_forward_proj": "swiglu"}, "feed_forward_proj is 'swiglu'; it must be"),
        ("mt5", {"relative_attention_num_buckets": 1}, "relative_attention_max_distance is 12; it"),
        ("mt5", {"num_experts": 4}, "does not have these fields: num_experts = 4"),
    ],
)
def test_what_would_change_results_is_refused(kind: str, change: dict[str, Any], told: str) -> None:
    config = Config(fields(kind) | change)
    with pytest.raises(GraphgenError, match=told):
        specified(config)
        config.finish()


@pytest.mark.parametrize("kind", ["mt5", "umt5"])
def test_an_output_layer_of_its_own_is_read_where_it_is_stored(kind: str) -> None:
    """Files of transformers 5 say that it is tied, but store the ones that are not."""
    for stored, own in (("lm_head.weight", True), ("shared.weight", False)):
        config = Config(fields(kind))
        config.stored = frozenset({stored})
        assert (specified(config).head is not None) == own


def test_vectors_are_scaled_where_umt5_says_that_it_is_tied() -> None:
    given = fields("umt5")
    assert specified(Config(given)).spec.last_scale == pytest.approx(32**-0.5)
    assert specified(Config({**given, "tie_word_embeddings": False})).spec.last_scale == 1.0
