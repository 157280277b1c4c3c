"""Special tokens that tokenizer.json does not have: the ids of transformers, or an error."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from graphgen.errors import GraphgenError
from graphgen.models.published.folder import tokenizer
from graphgen.models.published.tokenizer_classes import class_remarks
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


BYTES = {text: i for i, text in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
MERGED = {
    text: 256 + i for i, text in enumerate(["He", "12", "\u0120a", "\u2581", "\u2581a", "<s>"])
}
MERGES = [("H", "e"), ("1", "2"), ("\u0120", "a"), ("\u2581", "a")]
NAMES = ["GPT2", "Roberta", "Bart", "Qwen2", "Cohere", "GPTNeoX", "CodeGen", "Whisper"]
NAMES += ["Llama", "Gemma", "PreTrained"]
SPLITS: dict[str, Any] = {
    "bytes": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    "bytes after a space": lambda: pre_tokenizers.ByteLevel(add_prefix_space=True),
    "digits": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), SPLITS["bytes"]()]
    ),
    "words": lambda: pre_tokenizers.Metaspace(prepend_scheme="always", split=False),
    "the first word": lambda: pre_tokenizers.Metaspace(prepend_scheme="first", split=False),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_line_tells_that_a_class_reads_other_ids(name: str, tmp_path: Path) -> None:
    """There is one if and only if transformers gives other ids."""
    texts = ["Hello World 12345", "  two  spaces\n\nlines\t\u00fc u\u0301", "it's a<s>b <s> c"]
    seen = set()
    for which, normalizer in ((which, nfc) for which in SPLITS for nfc in (False, True)):
        made = Tokenizer(models.BPE(BYTES | MERGED, MERGES))
        made.pre_tokenizer = SPLITS[which]()
        if normalizer:
            made.normalizer = normalizers.NFC()
        made.add_special_tokens(["<s>"])
        made.save(str(tmp_path / "tokenizer.json"))
        told = {"tokenizer_class": f"{name}Tokenizer" + "Fast" * (name == "PreTrained")}
        told |= dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<s>")
        files = {"tokenizer_config": told, "config": {"model_type": "llama", "vocab_size": 400}}
        for file, content in files.items():
            (tmp_path / f"{file}.json").write_text(json.dumps(content))
        theirs, ours = transformers.AutoTokenizer.from_pretrained(tmp_path), tokenizer(tmp_path)
        same = all(
            theirs(text, add_special_tokens=False)["input_ids"]
            == ours.encode(text, add_special_tokens=False).ids
            for text in texts
        )
        assert bool([*class_remarks(tmp_path)]) == (not same), (which, normalizer)
        seen.add(same)
    assert seen == ({True} if name == "PreTrained" else {True, False}) or name == "Gemma"
