"""Special tokens that tokenizer.json does not have: the ids of transformers, or an error."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from graphgen.errors import GraphgenError
from graphgen.generation.prompts import removes_spaces, without_spaces
from graphgen.models.published.tokenizer import tokenizer
from graphgen.models.published.tokenizer_classes import class_remarks
from graphgen.models.published.tokenizer_files import check_tokenizer
from graphgen.train.tokens import Tokenizer as Words

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
    "a further one of the vocabulary": ({"additional_special_tokens": ["<s>"]}, {}),
    "named ones of the vocabulary": ({"extra_special_tokens": {"s": "<s>"}}, {}),
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


TEXTS = ["Hello World 12345", "  two  spaces\n\nlines\t\u00fc u\u0301", "it's a<s>b <s> c"]
TEXTS += ["\ufb01 ``x'' \u65e5\u672c \u00c0 \x00", ""]


def same_ids(folder: Path, made: Tokenizer, name: str, named: dict[str, Any]) -> bool:
    """Whether transformers reads the texts as we do; there is a line if and only if it does not."""
    made.save(str(folder / "tokenizer.json"))
    told = {"tokenizer_class": f"{name}Tokenizer" + "Fast" * (name == "PreTrained"), **named}
    files = {"tokenizer_config": told, "config": {"model_type": "llama", "vocab_size": 400}}
    for file, content in files.items():
        (folder / f"{file}.json").write_text(json.dumps(content))
    theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), tokenizer(folder)
    with_ends = name != "Whisper"  # whose prompts are not texts
    same = all(
        theirs(text, add_special_tokens=with_ends)["input_ids"]
        == ours.encode(text, add_special_tokens=with_ends).ids
        for text in TEXTS
    )
    assert bool([*class_remarks(folder)]) == (not same), told
    return same


@pytest.mark.parametrize("name", NAMES)
def test_a_line_tells_that_a_class_reads_other_ids(name: str, tmp_path: Path) -> None:
    """There is one if and only if transformers gives other ids."""
    seen = set()
    for which, normalizer in ((which, nfc) for which in SPLITS for nfc in (False, True)):
        made = Tokenizer(models.BPE(BYTES | MERGED, MERGES))
        made.pre_tokenizer = SPLITS[which]()
        if normalizer:
            made.normalizer = normalizers.NFC()
        made.add_special_tokens(["<s>"])
        if name in ("Roberta", "Bart"):
            made.post_processor = around("<s>", "<s>", numbers=[*BYTES, *MERGED])
        kinds = ("bos_token", "eos_token", "unk_token", "cls_token", "sep_token")
        seen.add(same_ids(tmp_path, made, name, dict.fromkeys(kinds, "<s>")))
    assert seen == ({True} if name == "PreTrained" else {True, False}) or name == "Gemma"


def around(*tokens: str, numbers: Any) -> Any:
    """What puts one token of the vocabulary behind a text, or another before it, too."""
    single = " ".join([*tokens[:-1], "$A", tokens[-1]])
    named = [(token, numbers.index(token)) for token in {*tokens}]
    return processors.TemplateProcessing(single=single, special_tokens=named)


WORDS = [
    "\u2581",
    "\u2581Hello",
    "\u2581hello",
    "\u2581two",
    "l",
    "fi",
    "x",
    "12",
    "\u00fc",
    "u",
    '"',
]
UNIGRAMS: dict[str, list[str]] = {
    "T5": ["</s>"],
    "XLMRoberta": ["[CLS]", "</s>"],
    "Camembert": ["[CLS]", "</s>"],
    "Albert": ["[CLS]", "</s>"],
    "DebertaV2": ["[CLS]", "</s>"],
    "Pegasus": ["</s>"],
}
"""Classes of SentencePiece, and the tokens around a text."""
WHITESPACE: dict[str, Any] = {
    "words": lambda: pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), MARK()]),
    "marks": lambda: MARK(),
}
MARK = lambda: pre_tokenizers.Metaspace(prepend_scheme="always", split=True)  # noqa: E731
COMPOSED: dict[str, Any] = {
    "nothing": lambda: None,
    "nfkc": lambda: normalizers.NFKC(),
    "albert": lambda: normalizers.Sequence(
        [
            *(normalizers.Replace(quotes, '"') for quotes in ("``", "''")),
            *(normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()),
        ]
    ),
}


@pytest.mark.parametrize("name", UNIGRAMS)
def test_a_line_tells_that_a_class_of_sentencepiece_reads_other_ids(
    name: str, tmp_path: Path
) -> None:
    unknown = {"T5": 2, "Albert": 1}.get(name, 3)  # where each has it
    special = ["[CLS]", "</s>", "<pad>"]
    special.insert(unknown, "<unk>")
    vocabulary = [(text, 0.0) for text in special] + [(text, -3.0) for text in WORDS]
    named = {"bos_token": "[CLS]", "cls_token": "[CLS]", "pad_token": "<pad>"}
    named |= dict.fromkeys(("eos_token", "sep_token"), "</s>") | {"unk_token": "<unk>"}
    named |= {"mask_token": "<unk>"} | ({"extra_ids": 0} if name == "T5" else {})
    seen = set()
    for words in WHITESPACE:
        for normalizer in COMPOSED:
            for ends in (UNIGRAMS[name], ["</s>", "</s>"]):
                made = Tokenizer(models.Unigram(vocabulary, unk_id=unknown))
                made.pre_tokenizer = WHITESPACE[words]()
                if (found := COMPOSED[normalizer]()) is not None:
                    made.normalizer = found
                made.post_processor = around(*ends, numbers=special)
                made.add_special_tokens(special)
                seen.add(same_ids(tmp_path, made, name, named))
    assert False in seen
    assert True in seen or name in ("DebertaV2", "Pegasus")


@pytest.mark.parametrize("name", ["Bert", "DistilBert", "Electra"])
def test_a_line_tells_that_bert_reads_other_ids(name: str, tmp_path: Path) -> None:
    special = ["[CLS]", "[SEP]", "[PAD]", "[UNK]", "[MASK]", "<s>"]
    words = [*special, "hello", "it", "'", "s", "a", "c", "\u65e5", "x", "u", "\u00fc", "`"]
    seen = set()
    for own in ({}, {"clean_text": False}, {"handle_chinese_chars": False}):
        for ends in (["[CLS]", "[SEP]"], ["[SEP]"]):
            made = Tokenizer(models.WordPiece({text: i for i, text in enumerate(words)}))
            made.normalizer = normalizers.BertNormalizer(**{"strip_accents": None, **own})
            made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
            made.post_processor = around(*ends, numbers=words)
            made.add_special_tokens(special)
            seen.add(same_ids(tmp_path, made, name, {}))
    assert seen == {True, False}


@pytest.mark.parametrize("kind", ["Unigram", "WordPiece", "BPE"])
@pytest.mark.parametrize("told", [None, True, False, "even for BPE"])
def test_texts_are_those_of_transformers(kind: str, told: Any, tmp_path: Path) -> None:
    words = ["[UNK]", *"do n't it 's he 've you 're I 'm . , ? ! a ' b".split()]
    if kind == "Unigram":
        made = Tokenizer(models.Unigram([(f"\u2581{text}", -1.0) for text in words], unk_id=0))
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
        made.decoder = decoders.Metaspace(prepend_scheme="always")
    else:
        vocabulary = {text: i for i, text in enumerate(words)}
        own = models.WordPiece(vocabulary, unk_token="[UNK]")
        made = Tokenizer(own if kind == "WordPiece" else models.BPE(vocabulary, []))
    made.save(str(tmp_path / "tokenizer.json"))
    name = "clean_up_tokenization_spaces"
    fields = {} if told is None else {name: bool(told)}
    if told == "even for BPE":
        fields[f"{name}_for_bpe_even_though_it_will_corrupt_output"] = True
    fields["tokenizer_class"] = "PreTrainedTokenizerFast"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(fields))
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": 40}')
    theirs, ours = transformers.AutoTokenizer.from_pretrained(tmp_path), tokenizer(tmp_path)
    tokens = list(range(1, len(words)))
    text = ours.decode(tokens)
    text = without_spaces(text) if removes_spaces(tmp_path, ours) else text
    assert text == theirs.decode(tokens, skip_special_tokens=True)
    assert (" ." in text) == (not told or (kind == "BPE" and told is True))


@pytest.mark.parametrize("before", ["ByteLevel", "Metaspace", "Whitespace"])
def test_words_are_split_as_in_transformers(before: str, tmp_path: Path) -> None:
    """For classes of tokens; a byte-level one has `add_prefix_space`, as in the examples."""
    words = ["Hello", "un-believable", "a b", "", "don't"]
    known = {c: i for i, c in enumerate(sorted({*pre_tokenizers.ByteLevel.alphabet(), "\u2581"}))}
    made = Tokenizer(models.BPE(known, [], unk_token="!"))
    kind = getattr(pre_tokenizers, before)
    made.pre_tokenizer = kind(add_prefix_space=False) if before == "ByteLevel" else kind()
    made.save(str(tmp_path / "tokenizer.json"))
    if before == "ByteLevel":
        made.pre_tokenizer = kind(add_prefix_space=True)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=made)
    for limit in (None, 6):
        given = {"truncation": limit is not None, "max_length": limit}
        wanted = theirs(words, is_split_into_words=True, **given)
        [(found, places)] = Words(tmp_path).words([("row 1", words)], limit)
        assert found.ids.tolist() == wanted["input_ids"] and places == wanted.word_ids()
