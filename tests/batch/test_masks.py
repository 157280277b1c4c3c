"""Rows with masked tokens, and what a model puts there."""

import json
from pathlib import Path

import numpy as np
import pytest
from small_models import run_plain
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import graphgen as gg
from graphgen.batch import map_file
from graphgen.errors import GraphgenError
from graphgen.models.published import from_folder

CHECKPOINT = Path(__file__).resolve().parents[1] / "fixtures" / "bert_checkpoint"
WORDS = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(56))]


def test_masks_are_filled(tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow")
    out = tmp_path / "out"
    gg.build_folder(CHECKPOINT, out, task="fill-mask")
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "w0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = [("[CLS]", 1), ("[SEP]", 2)]
    made.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", special_tokens=special)
    made.save(str(out / "tokenizer.json"))
    rows = [{"text": "w5 [MASK] w7 [MASK]"}, {"text": "[MASK]"}, {"ids": [1, 9, 3]}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(GraphgenError, match=r"to fill masks, it needs tokenizer\.json, and its"):
        map_file(out, tmp_path / "in.jsonl", tmp_path / "out.parquet")
    (out / "tokenizer_config.json").write_text('{"mask_token": "[MASK]"}')
    map_file(out, tmp_path / "in.jsonl", tmp_path / "out.parquet", task="fill-mask")
    found = pq.read_table(tmp_path / "out.parquet").to_pylist()
    model = gg.optimize(from_folder(CHECKPOINT, "fill-mask").model).model
    for row, ids in zip(found, ([1, 9, 3, 11, 3, 2], [1, 3, 2], [1, 9, 3]), strict=True):
        given = np.array([ids])
        mask, types = np.ones_like(given), np.zeros_like(given)
        feeds = {"input_ids": given, "attention_mask": mask, "token_type_ids": types}
        [[logits]] = run_plain(model, feeds)
        chances = [np.exp(x - x.max()) for x, i in zip(logits, ids, strict=True) if i == 3]
        assert row["labels"] == [WORDS[x.argmax()] for x in chances]
        wanted = [x.max() / x.sum() for x in chances]
        np.testing.assert_allclose(row["scores"], wanted, rtol=1e-5)
    (tmp_path / "in.jsonl").write_text('{"text": "w5"}\n')
    with pytest.raises(GraphgenError, match=r"no masked token, \[MASK\], which the model could"):
        map_file(out, tmp_path / "in.jsonl", tmp_path / "out.parquet")
