"""Special tokens that tokenizer.json does not have: the ids of transformers, or an error."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from graphgen.errors import GraphgenError
from graphgen.models.published.folder import tokenizer
from graphgen.models.published.tokenizer_files import check_tokenizer

transformers = pytest.importorskip("transformers", reason="needs transformers (make parity)")

pytestmark = pytest.mark.parity

TEXT = "a <s> b <pad> <x> <end> a<s>b"
FOLDERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nothing": ({}, {}),
    "one of the vocabulary": ({"bos_token": "<s>"}, {}),
    "one that is new": ({"pad_token": "<pad>"}, {}),
    "several, in another order": (
        {"pad_token": "<pad>", "x_token": "<x>", "eos_token": "<end>"},
        {},
    ),
    "of the model's kind": ({"model_specific_special_tokens": {"x_token": "<x>"}}, {}),
    "an older file": ({"eos_token": "<s>"}, {"special_tokens_map": {"eos_token": "<end>"}}),
    "an older file that does not count": (
        {"added_tokens_decoder": {}},
        {"special_tokens_map": {"eos_token": "<end>"}},
    ),
    "an object": ({}, {"special_tokens_map": {"eos_token": {"content": "<end>", "lstrip": False}}}),
    "known to both": ({}, {"added_tokens": {"<k>": 4}}),
}
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "further ones": ({"additional_special_tokens": ["<x>"]}, {}),
    "further ones of an older file": (
        {},
        {"special_tokens_map": {"extra_special_tokens": ["<x>"]}},
    ),
    "numbers of an older file": ({}, {"added_tokens": {"<x>": 5}}),
}


def written(folder: Path, config: dict[str, Any], others: dict[str, Any]) -> Path:
    made = Tokenizer(models.WordLevel({"unk": 0, "a": 1, "b": 2, "<s>": 3}, "unk"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens(["<k>"])
    made.save(str(folder / "tokenizer.json"))
    files = {"tokenizer_config": {"tokenizer_class": "PreTrainedTokenizerFast", **config}, **others}
    files["config"] = {"model_type": "llama", "vocab_size": 20}
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("which", FOLDERS)
def test_ids_are_those_of_transformers(which: str, tmp_path: Path) -> None:
    folder = written(tmp_path, *FOLDERS[which])
    check_tokenizer(folder)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer(folder).encode(TEXT).ids == theirs(TEXT)["input_ids"]


@pytest.mark.parametrize("which", REFUSED)
def test_what_has_no_number_is_refused(which: str, tmp_path: Path) -> None:
    with pytest.raises(GraphgenError, match="make them agree"):
        check_tokenizer(written(tmp_path, *REFUSED[which]))
