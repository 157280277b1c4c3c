"""Answers that follow a grammar: each parses, however tokens are chosen; others are refused."""

import itertools
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from test_generate import CONFIG, model

from graphgen import commands
from graphgen.errors import GraphgenError
from graphgen.export.folders import MODEL, write_folder
from graphgen.generation import Generator, speculation
from graphgen.generation.speculation import Lookup, Speculation

pytest.importorskip("llguidance", reason="llguidance is missing: the extra [grammar] installs it")
tokenizers = pytest.importorskip("tokenizers")

END, VOCABULARY = 256, 300  # the model has tokens that the tokenizer lacks, as published ones do
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Ada", "Zoë"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "odd": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "age", "odd"],
    "additionalProperties": False,
}
DATE = re.compile(r"(19|20)[0-9]{2}-(0[1-9]|1[0-2])")
SUM = 'start: NUMBER (("+" | "*") NUMBER)~1..3\nNUMBER: /[1-9][0-9]?/\n'
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 3.0, "num_return_sequences": 3},
    "beams": {"beams": 3, "num_return_sequences": 2},
    "guesses": {"speculate": "prompt-lookup", "temperature": 1.0},
    "penalties": {"repetition_penalty": 1.5, "logits_processors": lambda row, x: np.arange(len(x))},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    """A decoder of bytes."""
    source: Path = tmp_path_factory.mktemp("bytes")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokens = {character: number for number, character in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(tokens, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(source / "tokenizer.json"))
    fields = {"vocab_size": VOCABULARY, "max_position_embeddings": 400, "eos_token_id": END}
    (source / "config.json").write_text(json.dumps({**CONFIG, **fields}))
    return write_folder(source, source / "out", {MODEL: model(vocab_size=VOCABULARY)})


@pytest.fixture(scope="module")
def generator(folder: Path) -> Generator:
    return Generator(folder, threads=1)


def texts(found: Any) -> list[str]:
    list(found)
    assert all(row[-1] == END for row in found.tokens if len(row) < found.options.max_new_tokens)
    said: list[str] = found.texts()
    return said


@pytest.mark.parametrize("way", WAYS)
def test_every_answer_parses(
    way: str, generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speculation, "_GAIN", 0.0)  # whatever a check costs
    monkeypatch.setattr(Lookup, "chances", lambda *_: [0.9, 0.9])
    monkeypatch.setattr(Lookup, "guess", lambda self, row, tokens, count: tokens[-count:])
    monkeypatch.setattr(Speculation, "took", lambda self, *_: self._steps.append(1.0))
    how = {"max_new_tokens": 250, **WAYS[way]}
    prompts: Any = ["Who?", "A long question"]
    dense = {**SCHEMA, "x-guidance": {"whitespace_flexible": False}}
    for text in texts(generator(prompts, grammar=dense, **how)):
        jsonschema.validate(json.loads(text), SCHEMA)
    dates = texts(generator(prompts, grammar=DATE, **how))
    assert all(map(DATE.fullmatch, dates)) and len(dates) == 2 * how.get("num_return_sequences", 1)
    for text in texts(generator(prompts, grammar=SUM, **how)):
        assert 10 > len(re.findall(r"[0-9]+", text)) > 1 and eval(text) > 1


def test_guesses_and_adapting_rows_give_the_same(generator: Generator) -> None:
    """Rows that end early are removed, and the parsers of the others go on where they were."""
    grammar = re.compile("a{1,30}|b{1,3}|(cd){2,9}")
    how: dict[str, Any] = {"grammar": grammar, "temperature": 2.0, "max_new_tokens": 60}
    rows = texts(generator([[i] for i in range(8)], **how))
    guessed = texts(generator([[i] for i in range(8)], speculate="prompt-lookup", **how))
    assert rows == guessed and all(map(grammar.fullmatch, rows))
    assert len({*map(len, rows)}) > 3


def test_chances_are_those_of_the_allowed_tokens(generator: Generator) -> None:
    prompt, tokens = [5, 9, 2], generator.tokenizer.encode("abc").ids
    logits = generator.decoder.start([prompt], 1)[0].astype(np.float64)[tokens] / 4.0
    wanted = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    count = 600
    how: dict[str, Any] = {"temperature": 4.0, "num_return_sequences": count, "max_new_tokens": 2}
    found = Counter(texts(generator(prompt, grammar=re.compile("[abc]"), **how)))
    counts = np.array([found[letter] for letter in "abc"])
    assert counts.sum() == count
    assert (np.abs(counts - count * wanted) <= 4 * np.sqrt(count * wanted * (1 - wanted))).all()


def test_a_text_that_is_not_whole_is_an_error(generator: Generator) -> None:
    found = generator("x", grammar=re.compile("[a-z]{20}"), max_new_tokens=7)
    told = "row 0 ended after 7 tokens, and the grammar wants more; give more max_new_tokens"
    assert len([*itertools.islice(found, 7)]) == 7 and len(found.tokens[0]) == 7
    with pytest.raises(GraphgenError, match=told):
        next(found)
    for how in ({"max_time": 0}, {"stop": ["a"]}, {"beams": 2}):
        with pytest.raises(GraphgenError, match="the grammar wants more"):
            list(generator("x", grammar=re.compile("a{7}"), max_new_tokens=5, **how))
    exactly = generator("x", grammar=re.compile("[a-z]{7}"), max_new_tokens=7)
    assert len(texts(exactly)[0]) == 7


BAD: list[tuple[Any, str]] = [
    (re.compile("[^\\d\\D]"), "no token of the tokenizer can come behind the 0 tokens of row 0"),
    (re.compile("(?=a)b"), "regular expression: .*look-around"),
    (re.compile("a", re.IGNORECASE), "regular expression of text without flags"),
    ("start: nothing", 'Lark grammar: .*unknown name: "nothing"'),
    ("start (", "Lark grammar: .*Expected token ':'"),
    ({"type": "integer", "minimum": 5, "maximum": 3}, "Unsatisfiable schema: minimum"),
    ({"type": "whole"}, "JSON schema: Invalid type: whole"),
    ({"type": "array", "uniqueItems": True}, r'JSON schema: Unimplemented keys: \["uniqueItems"\]'),
    ({"a": {1, 2}}, "grammar is no JSON schema: Object of type set"),
    ({"properties": {"a": False}, "required": ["a"], "type": "object"}, "Unsatisfiable schema"),
    (5, "grammar is 5; give a file that ends in .json, .regex, .lark, a schema as a dict"),
    (Path("a.txt"), "give a file that ends in .json"),
    (Path("none.lark"), "generate: none.lark cannot be read: "),
]


@pytest.mark.parametrize(("grammar", "told"), BAD)
def test_what_cannot_be_followed_is_refused(grammar: Any, told: str, generator: Generator) -> None:
    with pytest.raises(GraphgenError, match=told) as found:
        list(generator("x", grammar=grammar, max_new_tokens=4))
    assert "\n" not in str(found.value)


def test_what_has_no_end_or_no_tokenizer_is_refused(generator: Generator) -> None:
    with pytest.raises(GraphgenError, match="needs a token that ends a row"):
        generator("x", grammar=DATE, eos=[])
    with pytest.raises(GraphgenError, match="no grammar for this tokenizer: EOS token ID 258"):
        generator("x", grammar=DATE, eos=[258])
    with pytest.raises(GraphgenError, match=r"has no tokenizer\.json"):
        Generator(model(vocab_size=VOCABULARY), threads=1)([1], grammar=DATE, eos=[END])
    bad = [generator.tokenizer.encode("a").ids]
    with pytest.raises(GraphgenError, match=r"no token may come next.*or change the grammar"):
        list(generator("x", grammar=re.compile("a"), bad_words=bad))


def test_the_command(folder: Path, tmp_path: Path, capsys: Any) -> None:
    files = {"a.json": json.dumps(SCHEMA), "b.regex": DATE.pattern + "\n", "c.lark": SUM}
    said = []
    for name, text in files.items():
        marked = "\ufeff" + text.replace("\n", "\r\n")  # as Windows writes it
        (tmp_path / name).write_bytes(marked.encode())
        words = ["generate", str(folder), "--prompt", "x", "--max-new-tokens", "200", "--grammar"]
        assert commands.main([*words, str(tmp_path / name)]) == 0
        said.append(capsys.readouterr().out.partition("prefill")[0].strip())
    jsonschema.validate(json.loads(said[0]), SCHEMA)
    assert DATE.fullmatch(said[1]) and eval(said[2])
    (tmp_path / "a.json").write_text("{")
    assert commands.main([*words, str(tmp_path / "a.json")]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "a.json" in line
