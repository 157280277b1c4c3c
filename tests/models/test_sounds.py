"""wav2vec 2.0 and HuBERT: what `map` writes of sounds, and what is refused."""

import json
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from random_checkpoints import stored_shapes, write_weights
from small_models import relative_rms, run_plain

import graphgen as gg
from graphgen.batch import map_file
from graphgen.batch.spelling import Spelling
from graphgen.errors import GraphgenError
from graphgen.models.published import FAMILIES, from_folder
from graphgen.models.published.config import Config
from graphgen.models.published.weights import read_weights

LETTERS = ["<pad>", "<s>", "</s>", "<unk>", "|", "E", "T", "A", "S", "M"]
FIELDS: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "conv_dim": [6, 8],
    "conv_kernel": [10, 3],
    "conv_stride": [5, 2],
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "vocab_size": len(LETTERS),
    "classifier_proj_size": 6,
    "num_labels": 3,
}
LAYERED: dict[str, Any] = {"feat_extract_norm": "layer", "do_stable_layer_norm": True}
SPEECH = "automatic-speech-recognition"
SOUNDS = [np.random.default_rng(i).standard_normal(n) / 4 for i, n in enumerate((400, 131, 25))]


def checkpoint(folder: Path, kind: str, task: str, **own: Any) -> Path:
    """A folder with the weights of the convolution of positions as a direction and a length."""
    fields, random = {"model_type": kind, **FIELDS, **own}, np.random.default_rng(0)
    module = FAMILIES[kind].tasks[task](Config(fields))
    arrays = {
        name: (random.standard_normal(shape) * 1.5 / np.prod(shape[1:]) ** 0.5).astype(np.float32)
        for name, shape in stored_shapes(FAMILIES[kind], module).items()
    }
    near = f"{kind}.encoder.pos_conv_embed.conv"
    v = arrays.pop(f"{near}.weight")
    arrays[f"{near}.parametrizations.weight.original1"] = 3 * v
    length = np.sqrt((v**2).sum((0, 1), keepdims=True))
    arrays[f"{near}.parametrizations.weight.original0"] = length
    folder.mkdir(exist_ok=True)
    write_weights(folder / "model.safetensors", arrays)
    (folder / "config.json").write_text(json.dumps(fields))
    (folder / "vocab.json").write_text(json.dumps({text: i for i, text in enumerate(LETTERS)}))
    known = {"feature_extractor_type": "Wav2Vec2FeatureExtractor", "do_normalize": True}
    (folder / "preprocessor_config.json").write_text(json.dumps(known))
    return folder


def mapped(folder: Path, tmp_path: Path, *rows: dict[str, Any]) -> list[dict[str, Any]]:
    pq = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow")
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    map_file(folder, tmp_path / "in.jsonl", tmp_path / "out.parquet")
    found: list[dict[str, Any]] = pq.read_table(tmp_path / "out.parquet").to_pylist()
    return found


def test_sounds_become_text(tmp_path: Path) -> None:
    """As files or samples; each alone, with the mean 0 and the variance 1."""
    folder = checkpoint(tmp_path / "in", "wav2vec2", SPEECH)
    built = gg.build_folder(folder, tmp_path / "out", task=SPEECH)
    assert built.remarks == []
    whole = np.round(SOUNDS[0] * 8000).astype("<i2")
    with wave.open(str(tmp_path / "a.wav"), "wb") as file:
        file.setparams((1, 2, 16000, 0, "NONE", ""))
        file.writeframes(whole.tobytes())
    rows = [{"input_values": x.tolist()} for x in (whole / 2**15, *SOUNDS[1:])]
    texts = [row["generated_text"] for row in mapped(tmp_path / "out", tmp_path, *rows)]
    [one] = mapped(tmp_path / "out", tmp_path, {"audio": "a.wav"})
    assert one["generated_text"] == texts[0] != ""
    model, spelled = gg.optimize(from_folder(folder, SPEECH).model).model, Spelling(folder, 10)
    for x, text in zip((whole / 2**15, *SOUNDS[1:]), texts, strict=True):
        x = (x - x.mean()) / np.sqrt(x.var() + 1e-7)
        [logits] = run_plain(model, {"input_values": x[None].astype(np.float32)})
        assert spelled(logits[0].argmax(-1)) == text


def test_letters_are_joined_as_ctc_reads_them(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "in", "wav2vec2", SPEECH)
    assert (
        Spelling(folder, 10)(np.array([4, 9, 9, 0, 5, 5, 0, 5, 4, 4, 6, 3, 0, 4])) == "MEE T<unk>"
    )
    own = {"do_lower_case": True, "word_delimiter_token": "A", "pad_token": {"content": "S"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(own))
    assert Spelling(folder, 10)(np.array([9, 8, 9, 7, 5, 0])) == "mm e<pad>"


def test_a_weight_without_a_direction_is_refused(tmp_path: Path) -> None:
    """torch makes NaN of it."""
    folder = checkpoint(tmp_path, "hubert", SPEECH)
    arrays = {name: x.read() for name, x in read_weights(folder).items()}
    arrays[next(name for name in arrays if name.endswith("original1"))][...] = 0
    write_weights(folder / "model.safetensors", arrays)
    weights = from_folder(folder).model.graph.initializers
    near = next(x.const_value for name, x in weights.items() if name.endswith("near.weight"))
    assert near is not None
    with pytest.raises(GraphgenError, match="has numbers that are not finite"):
        near.numpy()


@pytest.mark.parametrize(
    ("kind", "task"), [("wav2vec2", "audio-classification"), ("hubert", SPEECH)]
)
def test_what_is_padded_counts_as_if_it_were_alone(kind: str, task: str, tmp_path: Path) -> None:
    """Of checkpoints that were trained with a mask."""
    own = {"use_weighted_layer_sum": True, "conv_bias": True}
    folder = checkpoint(tmp_path, kind, task, **LAYERED, **own)
    model = gg.optimize(from_folder(folder, task).model, expect={"attention": 1}).model
    x, mask = np.zeros((3, 400), np.float32), np.zeros((3, 400), np.int64)
    for row, sound in enumerate(SOUNDS):
        x[row, : len(sound)], mask[row, : len(sound)] = sound, 1
    [together] = run_plain(model, {"input_values": x, "attention_mask": mask})
    for row, sound in enumerate(SOUNDS):
        given = {"input_values": x[row : row + 1, : len(sound)]}
        ones = np.ones((1, len(sound)), np.int64)
        [alone] = run_plain(model, given | {"attention_mask": ones})
        assert relative_rms(alone, together[row : row + 1, : alone.shape[1]]) < 1e-5


def test_a_sound_is_classified(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "in", "hubert", "audio-classification")
    (folder / "config.json").write_text(
        json.dumps(
            {"model_type": "hubert", **FIELDS, "architectures": ["HubertForSequenceClassification"]}
        )
    )
    gg.build_folder(folder, tmp_path / "out")
    [row] = mapped(tmp_path / "out", tmp_path, {"input_values": SOUNDS[0].tolist()})
    assert row["label"].startswith("LABEL_")
    assert 1 / 3 < row["score"] < 1


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"input_values": [0.0] * 19}, "line 1 has 19 samples; the model hears 20 or more"),
        ({"input_values": [[0.0]]}, "line 1 has neither `audio`, the path of a WAV file, nor"),
        ({"text": "a"}, "line 1 has neither `audio`, the path of a WAV file, nor"),
        ({"input_values": [1e39] * 30}, "line 1 has samples that are not finite"),
        ({"audio": "none.wav"}, "none.wav cannot be read"),
        ({"audio": "a", "input_values": [0.0]}, "line 1 has `audio` and `input_values`"),
    ],
)
def test_other_rows_are_refused(row: dict[str, Any], told: str, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "in", "wav2vec2", SPEECH)
    gg.build_folder(folder, tmp_path / "out", task=SPEECH)
    with pytest.raises(gg.GraphgenError, match=told):
        mapped(tmp_path / "out", tmp_path, row)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"conv_dim": []}, r"conv_dim is \[\]; it must be a list of sizes"),
        ({"conv_kernel": [10]}, r"conv_kernel is \[10\]; it must be 2 sizes, as conv_dim has"),
        ({"conv_stride": "5"}, "conv_stride is '5'; it must be a list of sizes"),
        ({"num_feat_extract_layers": 7}, "num_feat_extract_layers is 7; it must be 2"),
        ({"feat_extract_norm": "batch"}, "feat_extract_norm is 'batch'; it must be one of"),
        ({"adapter_attn_dim": 16}, "adapter_attn_dim is 16; it must be absent"),
        ({"add_adapter": True}, "add_adapter is True; it must be False"),
        ({"conv_pos_batch_norm": True}, "conv_pos_batch_norm is True; it must be False"),
        ({"num_conv_pos_embedding_groups": 3}, "the groups must divide features_in"),
        ({"num_attention_heads": 3}, "must be a multiple|do not divide|divide"),
        ({"own": 1}, "does not have these fields: own = 1"),
    ],
)
def test_other_fields_are_refused(fields: dict[str, Any], told: str, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "in", "wav2vec2", SPEECH)
    given = {"model_type": "wav2vec2", **FIELDS, **fields}
    (folder / "config.json").write_text(json.dumps(given))
    with pytest.raises(gg.GraphgenError, match=told):
        from_folder(folder, SPEECH)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("vocab.json", {"en": {"a": 1}}, "is not the vocabulary of one language"),
        ("vocab.json", {"a": 10}, "has 11 tokens and the model 10"),
        ("preprocessor_config.json", {"do_normalize": 2}, "do_normalize is 2; it must be true or"),
        ("preprocessor_config.json", {"feature_size": 80}, "feature_size is 80; it must be 1"),
        ("preprocessor_config.json", {}, "has no preprocessor_config.json"),
    ],
)
def test_other_files_are_refused(name: str, content: Any, told: str, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "in", "wav2vec2", SPEECH)
    (folder / name).write_text(json.dumps(content))
    gg.build_folder(folder, tmp_path / "out", task=SPEECH)
    with pytest.raises(gg.GraphgenError, match=told):
        mapped(tmp_path / "out", tmp_path, {"input_values": SOUNDS[0].tolist()})
