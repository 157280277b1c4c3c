"""Static embeddings, as model2vec and sentence-transformers make them of their folders."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from random_checkpoints import write_weights

import graphgen as gg
from graphgen.batch import map_file
from graphgen.commands import main
from graphgen.export.checkpoint import Checkpoint
from graphgen.safetensors import read_header

pq = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow")
pytest.importorskip("tokenizers", reason="needs tokenizers")

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "cat", "sat", "on", "mat", "##s"]
ROWS = {"cats sat": [4, 8, 5], "": [], "cat \u65e5 on": [4, 1, 6], "[SEP] mat": [3, 7]}
"""Texts, and their tokens: without special ones, but for those that stand in the text."""
RANDOM = np.random.default_rng(0)
TABLE = RANDOM.standard_normal((9, 4), np.float32)
FIELDS: dict[str, Any] = {"model_type": "model2vec", "architectures": ["StaticModel"]} | {
    "hidden_dim": 4,
    "normalize": True,
    "apply_pca": 256,
    "sif_coefficient": 1e-4,
    "embedding_dtype": "float32",
}
MODULE = "sentence_transformers.models."


def tokenizer() -> dict[str, Any]:
    template = [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}, {"Sequence": {"id": "A"} | TYPE}]
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0",
        "truncation": {"direction": "Right", "max_length": 3, "strategy": "LongestFirst"}
        | {"stride": 0},
        "padding": None,
        "added_tokens": [
            {"id": i, "content": text, "special": True, **plain} for i, text in enumerate(WORDS[:4])
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": template,
            "pair": [*template, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"[CLS]": {"id": "[CLS]", "ids": [2], "tokens": ["[CLS]"]}},
        },
        "decoder": None,
        "model": {
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": {word: i for i, word in enumerate(WORDS)},
        },
    }


TYPE = {"type_id": 0}


def write(folder: Path, place: str = "", **arrays: Any) -> Path:
    """A folder of model2vec, or of sentence-transformers with a Normalize, if `place` is given."""
    (folder / place).mkdir(parents=True)
    (folder / place / "tokenizer.json").write_text(json.dumps(tokenizer()))
    write_weights(folder / place / "model.safetensors", arrays)
    if place:
        entries = [(f"{MODULE}StaticEmbedding", place), (f"{MODULE}Normalize", "1_Normalize")]
        listed = [{"type": kind, "path": path} for kind, path in entries]
        (folder / "modules.json").write_text(json.dumps(listed))
    else:
        (folder / "config.json").write_text(json.dumps(FIELDS))
    return folder


def embeddings(folder: Path, tmp_path: Path, *rows: str, **how: Any) -> np.ndarray:
    """What `map` gives for texts."""
    data, out = tmp_path / "in.jsonl", tmp_path / "out.parquet"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
    map_file(folder, data, out, **how)
    found: list[Any] = pq.read_table(out)["embedding"].to_pylist()
    return np.array(found)


def means(table: np.ndarray, *ignored: int) -> np.ndarray:
    found = []
    for ids in ROWS.values():
        kept = [i for i in ids if i not in ignored]
        x = table[kept].astype(np.float64).mean(0) if kept else np.zeros(table.shape[1])
        found.append(x / max(float(np.linalg.norm(x)), 1e-12))
    return np.array(found)


@pytest.mark.parametrize("which", ["plain", "mapped", "int8", "sentence-transformers"])
def test_texts_have_the_mean_of_their_tokens(which: str, tmp_path: Path) -> None:
    """model2vec leaves unknown tokens out, sentence-transformers counts them."""
    table, place, arrays = TABLE, "", dict[str, Any]()
    if which == "mapped":
        rows, weights = RANDOM.integers(0, 5, 9), RANDOM.standard_normal(9, np.float32)
        arrays = {"mapping": rows, "weights": weights, "embeddings": TABLE[:5]}
        table = TABLE[rows] * weights[:, None]
    elif which == "int8":
        table = (TABLE * 30).astype(np.int8)
    elif which != "plain":
        place, arrays = "0_StaticEmbedding", {"embedding.weight": TABLE}
    folder = write(tmp_path / "in", place, **(arrays or {"embeddings": table}))
    built = gg.build_folder(folder, tmp_path / "out")
    assert built.kind == "model2vec"
    wanted = means(table, *([] if place else [1]))
    assert np.allclose(embeddings(tmp_path / "out", tmp_path, *ROWS), wanted, atol=1e-6)


def test_texts_are_cut_as_model2vec_cuts_them(tmp_path: Path) -> None:
    """First to so many characters, of the median token's, and then to so many tokens."""
    folder, out = write(tmp_path / "in", embeddings=TABLE), tmp_path / "out"
    (folder / "config.json").write_text(json.dumps({**FIELDS, "max_length": 3}))
    gg.build_folder(folder, out)
    with pytest.raises(gg.GraphgenError, match=r"13 characters, of which model2vec reads the .* 9"):
        embeddings(out, tmp_path, "cat       mat")
    with pytest.raises(gg.GraphgenError, match=r"has 4 tokens; it must have 1 to 3"):
        embeddings(out, tmp_path, "cats cats")
    cut = embeddings(out, tmp_path, "cat       mat", "cat", "cats cats", truncate=True)
    x = TABLE[[4, 8, 4]].mean(0)
    assert np.array_equal(cut[0], cut[1])
    assert np.allclose(cut[2], x / np.linalg.norm(x), atol=1e-6)


def test_a_trained_table_goes_back(tmp_path: Path) -> None:
    """By the names of the library that reads it, and built again, over the folder before, too."""
    folder, new = write(tmp_path / "in", "0_StaticEmbedding", embeddings=TABLE), TABLE[::-1].copy()
    fields: dict[str, Any] = {"in_features": 4, "out_features": 2, "bias": False}
    fields["activation_function"] = "torch.nn.modules.linear.Identity"
    (folder / "2_Dense").mkdir()
    (folder / "2_Dense" / "config.json").write_text(json.dumps(fields))
    write_weights(folder / "2_Dense" / "model.safetensors", {"linear.weight": TABLE[:2]})
    listed = json.loads((folder / "modules.json").read_text())
    listed.append({"type": f"{MODULE}Dense", "path": "2_Dense"})
    (folder / "modules.json").write_text(json.dumps(listed))
    for _ in range(2):
        assert main(["build", str(folder), "-o", str(tmp_path / "out")]) == 0
    Checkpoint(trainable={"table.embedding.weight": new}, frozen={}).save(tmp_path / "checkpoint")
    gg.to_checkpoint(tmp_path / "out", tmp_path / "checkpoint", tmp_path / "back")
    [only] = read_header(tmp_path / "back" / "model.safetensors")
    assert only.name == "embeddings"
    assert np.array_equal(only.read(), new)
    assert {*json.loads((tmp_path / "back" / "modules.json").read_text())[2]} >= {"idx", "name"}
    gg.build_folder(tmp_path / "back", tmp_path / "again")
    wanted = means(new) @ TABLE[:2].T
    assert np.allclose(embeddings(tmp_path / "again", tmp_path, *ROWS), wanted, atol=1e-6)


def test_a_table_alone_is_quantized(tmp_path: Path) -> None:
    table = np.repeat(TABLE, 150, axis=1)
    folder = write(tmp_path / "in", embeddings=table)
    gg.build_folder(folder, tmp_path / "out", quantize="int8", run=False)
    found = embeddings(tmp_path / "out", tmp_path, *ROWS)
    assert np.abs(found - means(table, 1)).max() < 1e-3
    data = tmp_path / "out" / "onnx" / "model.onnx_data"
    assert data.stat().st_size < table.nbytes / 3


@pytest.mark.parametrize(
    ("arrays", "fields", "told"),
    [
        ({}, {}, "embeddings is missing; it must be a row for each token"),
        ({"embeddings": TABLE[0]}, {}, r"embeddings is \[4\]; it must be a row"),
        ({"embeddings": TABLE.astype(np.int32)}, {}, "embeddings is int32, must hold real numbers"),
        ({"embeddings": TABLE[:8]}, {}, "has 9 tokens and the table 8"),
        ({"embeddings": TABLE, "mapping": np.full(9, 9)}, {}, r"mapping is int64\[9\]; it must be"),
        ({"embeddings": TABLE, "mapping": TABLE[:, 0]}, {}, r"mapping is float\[9\]; it must be 9"),
        ({"embeddings": TABLE, "weights": TABLE[:4, 0]}, {}, r"weights is \[4\], must be \[9\]"),
        ({"embeddings": TABLE, "other": TABLE}, {}, "other is not in the architecture"),
        ({"embeddings": TABLE}, {"max_length": "a"}, "max_length is 'a'; make it a size, or null"),
        ({"embeddings": TABLE}, {"normalize": 1}, "normalize is 1; it must be true or false"),
        ({"embeddings": TABLE}, {"pools": "max"}, "does not have these fields: pools = 'max'"),
    ],
)
def test_other_tables_are_refused(arrays: Any, fields: Any, told: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "in", **arrays)
    (folder / "config.json").write_text(json.dumps(FIELDS | fields))
    with pytest.raises(gg.GraphgenError, match=told) as error:
        gg.build_folder(folder, tmp_path / "out")
    assert str(folder) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("tokenizer.json", None, "is missing, by which static embeddings read texts"),
        ("tokenizer.json", {"model": {"vocab": 5}}, "has no vocabulary"),
        ("tokenizer.json", {"model": {"vocab": {"a": "b"}}}, "has no vocabulary"),
        ("modules.json", [{"type": f"{MODULE}StaticEmbedding", "path": "."}], "make them agree"),
        ("modules.json", [{"type": f"{MODULE}StaticEmbedding", "path": ".."}], "is not the name"),
    ],
)
def test_other_files_beside_a_table_are_refused(
    name: str, content: Any, told: str, tmp_path: Path
) -> None:
    folder = write(tmp_path / "in", embeddings=TABLE)
    (folder / name).unlink(missing_ok=True)
    if content is not None:
        (folder / name).write_text(json.dumps(content))
    with pytest.raises(gg.GraphgenError, match=told):
        gg.build_folder(folder, tmp_path / "out")
