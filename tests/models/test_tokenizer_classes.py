"""A tokenizer.json that the code of a tokenizer's class does not follow gives a line."""

import json

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from graphgen.errors import GraphgenError
from graphgen.models.published.tokenizer import encoded, tokenizer
from graphgen.models.published.tokenizer_classes import class_of, class_remarks
from graphgen.models.published.tokenizer_files import check_tokenizer, unread

BYTES = dict.fromkeys(sorted(pre_tokenizers.ByteLevel.alphabet()))
WORDS = {text: i for i, text in enumerate([*BYTES, "<s>", "He", "\u2581", "12", "\u0120a"])}
MERGES = [("H", "e"), ("1", "2"), ("\u0120", "a")]


def written(folder, kind, told, *, normalizer=None, before=None):
    """A folder with a tokenizer of bytes whose parts are given."""
    made = Tokenizer(models.BPE(WORDS, MERGES, byte_fallback=False))
    if normalizer is not None:
        made.normalizer = normalizer
    made.pre_tokenizer = before or pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.add_special_tokens(["<s>"])
    if kind == "bart":  # whose class puts it there
        number = [("<s>", WORDS["<s>"])]
        made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=number)
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    return folder


def digits():
    space = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), space])


@pytest.mark.parametrize(
    ("kind", "named"),
    [("gpt2", None), ("llama", "GPT2Tokenizer"), ("opt", "GPT2TokenizerFast"), ("bart", None)],
)
def test_a_class_that_splits_otherwise_is_told(tmp_path, kind, named):
    told = {} if named is None else {"tokenizer_class": named}
    assert not [*class_remarks(written(tmp_path, kind, told))]
    [line] = class_remarks(written(tmp_path, kind, told, before=digits()))
    name = class_of(tmp_path)
    assert "reads 'Hello World 12345' as the tokens [" in line
    assert f"{name}Tokenizer of transformers 5, which takes only the vocabulary from it" in line


@pytest.mark.parametrize("kind", ["gpt_neox", "cohere"])
def test_a_class_that_normalizes_is_told(tmp_path, kind):
    before = digits() if kind == "cohere" else None
    assert [*class_remarks(written(tmp_path, kind, {}, before=before))]
    nfc = normalizers.NFC()
    assert not [*class_remarks(written(tmp_path, kind, {}, normalizer=nfc, before=before))]


def test_the_space_before_a_text_of_llama(tmp_path):
    """Older files write it before every part of a text, the class before the first alone."""
    space = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    llama = {"tokenizer_class": "LlamaTokenizer"}
    assert not [*class_remarks(written(tmp_path, "llama", llama, before=space))]
    space = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    [line] = class_remarks(written(tmp_path, "llama", llama, before=space))
    assert "reads 'a<s>b <s> c' as" in line
    assert not [*class_remarks(written(tmp_path, "llama", llama | {"legacy": True}, before=space))]
    never = llama | {"add_prefix_space": False}
    assert [*class_remarks(written(tmp_path, "llama", never, before=space))]


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("llama", {}),
        ("llama", {"tokenizer_class": "LlamaTokenizer"}),  # of bytes: as the file says
        ("gpt2", {"tokenizer_class": "PreTrainedTokenizerFast"}),
        ("granite", {"tokenizer_class": "GPT2Tokenizer"}),
        ("gpt2", {"auto_map": {"AutoTokenizer": [None, "own.Own"]}}),
    ],
)
def test_what_reads_the_file_is_not_told(tmp_path, kind, told):
    assert not [*class_remarks(written(tmp_path, kind, told, before=digits()))]


def test_padding_and_truncation_of_the_file_do_not_count(tmp_path):
    """Padding to 2 ** 32 would end the process for want of memory."""
    file = written(tmp_path, "gpt2", {}) / "tokenizer.json"
    made = Tokenizer.from_file(str(file))
    made.enable_truncation(2)
    made.enable_padding(length=9)
    made.save(str(file))
    assert not [*class_remarks(tmp_path)]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"model": 5}', '{"model": {"vocab": []}}'])
def test_a_damaged_tokenizer_is_not_told(tmp_path, text):
    """What needs it gives the error."""
    written(tmp_path, "gpt2", {})
    (tmp_path / "tokenizer.json").write_text(text)
    assert not [*class_remarks(tmp_path)]


def test_a_tokenizer_on_which_its_library_panics(tmp_path):
    """A panic of Rust's code is no Exception in Python, but an error of the file."""
    file = written(tmp_path, "gpt2", {}) / "tokenizer.json"
    made = json.loads(file.read_text())
    token = {"SpecialToken": {"id": "<no>", "type_id": 0}}
    made["post_processor"] = {"type": "TemplateProcessing", "single": [token], "pair": []}
    made["post_processor"]["special_tokens"] = {}
    file.write_text(json.dumps(made))
    with pytest.raises(GraphgenError, match=r"map: tokenizer\.json does not split the text 'a'"):
        encoded("map", tokenizer(tmp_path), "a")
    made["model"]["continuing_subword_prefix"] = "\u2581"
    file.write_text(json.dumps(made))
    with pytest.raises(GraphgenError, match=r"tokenizer\.json is not a tokenizer: "):
        tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["spiece.model", "vocab.txt", "tekken.json"])
def test_a_tokenizer_that_no_text_can_be_read_by_is_told(name, tmp_path):
    assert not [*unread(tmp_path)]
    (tmp_path / name).touch()
    [line] = unread(tmp_path)
    assert f"has {name}, but no tokenizer.json, by which texts are read: write it" in line
    (tmp_path / "tokenizer.json").write_text("null")
    [line] = unread(tmp_path)
    assert line.startswith("no text can be read: ") and "is not a tokenizer" in line
    written(tmp_path, "gpt2", {})
    assert not [*unread(tmp_path)]
    (tmp_path / "config.json").write_text('{"vocab_size": 1}')
    [line] = unread(tmp_path)
    assert "tokens and the model 1: it belongs to another model" in line


@pytest.mark.parametrize("kind", [[], {}, 5])
def test_a_part_of_no_type(tmp_path, kind):
    (tmp_path / "tokenizer.json").write_text(json.dumps({"pre_tokenizer": {"type": kind}}))
    check_tokenizer(tmp_path)  # reading it gives the error


def test_tokens_around_a_text_and_classes_of_words_are_told(tmp_path):
    """The class of BERT puts [CLS] and [SEP] there, and leaves out what prints nothing."""
    words = ["[CLS]", "[SEP]", "[UNK]", "hello", "x"]
    made = Tokenizer(models.WordPiece({text: i for i, text in enumerate(words)}, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    ends = [("[CLS]", 0), ("[SEP]", 1)]
    right = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    for normalizer, after, told in (
        (normalizers.BertNormalizer(), right, 0),
        (normalizers.BertNormalizer(), None, 1),
        (normalizers.BertNormalizer(clean_text=False), right, 1),
    ):
        made.normalizer, made.post_processor = normalizer, after
        made.save(str(tmp_path / "tokenizer.json"))
        assert len([*class_remarks(tmp_path)]) == told


@pytest.mark.parametrize("kind", ["t5", "xlm-roberta", "camembert", "albert"])
def test_a_class_of_sentencepiece_that_normalizes_otherwise_is_told(tmp_path, kind):
    made = Tokenizer(models.Unigram([("<s>", 0.0), ("</s>", 0.0), ("\u2581x", -1.0)], unk_id=0))
    space = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    words = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), space])
    single = "$A </s>" if kind == "t5" else "<s> $A </s>"
    numbers = [("<s>", 0), ("</s>", 1)]
    made.post_processor = processors.TemplateProcessing(single=single, special_tokens=numbers)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    for before, told in ((words, False), (space, True)):
        made.pre_tokenizer = before
        made.save(str(tmp_path / "tokenizer.json"))
        assert bool([*class_remarks(tmp_path)]) == told
