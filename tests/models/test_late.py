"""ColBERT as PyLate saves it: a vector for each token, and rows that are queries or documents."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import published_encoders
import pytest
from small_models import ROUNDING, relative_rms, run_plain
from test_sentences import SETTINGS, both, checkpoint, write_part
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import graphgen as gg
from graphgen.batch import map_file
from graphgen.batch.late import KEPT, LateTexts
from graphgen.models.published import from_folder

WORDS = ["<s>", "</s>", "<mask>", "<unk>", "[Q] ", "[D] ", ".", *"abcdefgh"]
GIVEN: dict[str, Any] = {"query_length": 8, "document_length": 6, "skiplist_words": [".", "!"]}


def late(folder: Path, **given: Any) -> Path:
    """A folder of MPNet with two Dense layers behind it."""
    checkpoint(folder, published_encoders, "mpnet")
    kinds = ["sentence_transformers.models.Transformer", *["pylate.models.Dense.Dense"] * 2]
    listed = [{"type": kind, "path": f"{n}_Dense" * bool(n)} for n, kind in enumerate(kinds)]
    (folder / "modules.json").write_text(json.dumps(listed))
    random = np.random.default_rng(0)
    kind = {"activation_function": "torch.nn.modules.linear.Identity", "bias": False}
    for n, (size, made, adds) in enumerate(((32, 6, True), (6, 4, False)), 1):
        fields = {"in_features": size, "out_features": made, "use_residual": adds, **kind}
        own = {"linear__weight": random.standard_normal((made, size), np.float32)}
        own |= (
            {"residual__weight": random.standard_normal((made, size), np.float32)} if adds else {}
        )
        write_part(folder / f"{n}_Dense", fields, **own)
    (folder / SETTINGS).write_text(json.dumps({**GIVEN, **given}))
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = [("<s>", 0), ("</s>", 1)]
    made.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=special)
    made.save(str(folder / "tokenizer.json"))
    named = {"mask_token": "<mask>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return folder


def test_vectors_of_tokens_and_what_map_keeps_of_them(tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow")
    folder = late(tmp_path / "in")
    found = from_folder(folder)
    [vectors] = run_plain(gg.optimize(found.model).model, both())
    x = run_plain(
        from_folder(checkpoint(tmp_path / "bare", published_encoders, "mpnet")).model, both()
    )
    w, r, v = (
        found.model.graph.initializers[f"head.stages.{name}.weight"].const_value
        for name in ("0.linear", "0.residual", "1.linear")
    )
    assert w is not None
    assert r is not None
    assert v is not None
    y = (x[0] @ w.numpy() + x[0] @ r.numpy()) @ v.numpy()
    assert relative_rms(y / np.linalg.norm(y, axis=-1, keepdims=True), vectors) < ROUNDING
    gg.build_folder(folder, tmp_path / "out")
    rows = [{"text": "a . z b"}, {"query": " a ."}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    map_file(tmp_path / "out", tmp_path / "in.jsonl", tmp_path / "out.parquet", truncate=True)
    document, query = pq.read_table(tmp_path / "out.parquet")["embeddings"].to_pylist()
    assert np.array(query).shape == (8, 4)
    ids = np.array([[0, 5, 7, 6, 3, 1]])  # z and "!" are unknown
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    [alone] = run_plain(found.model, feeds)
    assert relative_rms(alone[0][[0, 1, 2, 5]], np.array(document)) < ROUNDING


@pytest.mark.parametrize(
    ("given", "ids", "seen"),
    [
        ({}, [0, 4, 7, 6, 1, 2, 2, 2], 5),
        ({"attend_to_expansion_tokens": True, "query_prefix": ""}, [0, 7, 6, 1, 2, 2, 2, 2], 8),
        ({"do_query_expansion": False, "prompts": {"q": "b "}, "default_prompt_name": "q"}
         | {"attend_to_expansion_tokens": True}, [0, 4, 8, 7, 6, 1], 6),
    ],
)  # fmt: skip
def test_how_queries_are_lengthened(
    given: dict[str, Any], ids: list[int], seen: int, tmp_path: Path
) -> None:
    texts = LateTexts(late(tmp_path, **given), truncate=False)
    row = texts.look({"query": "a ."}, "row 1")
    assert (row.ids, row.seen, row.kept) == (ids, seen, [True] * len(ids))
    feeds = texts.feeds([row, row._replace(ids=ids[:2], seen=1, kept=[True, False])])
    assert feeds["attention_mask"].sum(1).tolist() == [seen, 1]
    assert feeds[KEPT].sum(1).tolist() == [len(ids), 1]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            {"query_prefix": "[X] "},
            r"query_prefix is '\[X\] '; it must be a token of tokenizer.json",
        ),
        ({"query_prefix": 5}, "query_prefix is 5; it must be"),
        ({"document_length": 1}, "document_length is 1; it must be 2 or more"),
        ({"document_length": "6"}, "document_length is '6'"),
        ({"skiplist_words": [1]}, r"skiplist_words is \[1\]; it must be a list of texts"),
        ({"similarity_fn_name": "cosine"}, "similarity_fn_name is 'cosine'; it must be 'MaxSim'"),
        ({}, "row 1 has 9 tokens; it must have 1 to 6, by .*: --truncate cuts"),
    ],
)
def test_what_is_refused(given: dict[str, Any], told: str, tmp_path: Path) -> None:
    folder = late(tmp_path, **given)
    with pytest.raises(gg.GraphgenError, match=told):
        LateTexts(folder, truncate=False).look({"text": "a b c d e f"}, "row 1")


def test_an_activation_has_to_be_named(tmp_path: Path) -> None:
    """sentence-transformers has one by default, which PyLate has not."""
    folder = late(tmp_path)
    write_part(folder / "2_Dense", {"in_features": 6, "out_features": 4, "bias": False})
    with pytest.raises(gg.GraphgenError, match="the field 'activation_function' is missing"):
        from_folder(folder)


def test_what_else_is_refused(tmp_path: Path) -> None:
    folder = late(tmp_path)
    texts = LateTexts(folder, truncate=False)
    for row, told in (({"text": "a", "query": "b"}, "query and text"), ({"ids": [1]}, "neither")):
        with pytest.raises(gg.GraphgenError, match=f"row 1 has {told}"):
            texts.look(row, "row 1")
    (folder / "tokenizer_config.json").write_text("{}")
    with pytest.raises(
        gg.GraphgenError, match="lengthened by mask_token, which the tokenizer lack"
    ):
        LateTexts(folder, truncate=False)
    listed = [{"type": f"pylate.models.{kind}", "path": ""} for kind in ("Dense.Dense", "Other")]
    (folder / "modules.json").write_text(json.dumps(listed))
    with pytest.raises(gg.GraphgenError, match=r"pylate\.models\.Other is code in the checkpoint"):
        from_folder(folder)
    (folder / "modules.json").write_text(json.dumps(listed[:1]))
    with pytest.raises(gg.GraphgenError, match=r"pylate\.models\.Dense\.Dense are not supported"):
        from_folder(folder)
