"""Guessed tokens: checking them changes no token, for any rows, caches and draft models."""

import itertools
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import published_seq2seq as seq2seq
import pytest
from published_decoders import checkpoint
from random_checkpoints import stored_shapes, write_weights
from test_generate import CONFIG, CONTEXT, PROMPTS, copied, folder, graph, model, source

import graphgen as gg
from graphgen import commands
from graphgen.errors import GraphgenError
from graphgen.export.folders import MODEL, write_folder, write_genai
from graphgen.generation import Generator, decoder as decoders, speculation
from graphgen.generation.growing import Growing
from graphgen.generation.speculation import Lookup, Speculation
from graphgen.match import Miss
from graphgen.models.published import FAMILIES, from_folder
from graphgen.models.published.config import Config
from graphgen.quantize import quantize

pytest.importorskip("tokenizers")
__all__ = ["folder", "graph", "source"]  # fixtures

STEPS = 40
PERIOD = [5, 9, 2, 40, 41, 7, 33, 5, 9, 2, 40, 41, 7, 33, 5, 9, 2]


class Always(Lookup):
    """Guesses at most steps, mostly wrong, in numbers that differ from row to row."""

    def chances(self, row: int, tokens: Any, most: int) -> list[float]:
        found = super().chances(row, tokens, most)
        if not found:
            self._guess[row] = 1, [*itertools.islice(itertools.cycle(tokens), most)]
        return [0.99] * (min(most, 2 + 3 * row) if len(tokens) % 7 else 0)


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step checks guesses, whatever that costs."""
    monkeypatch.setattr("graphgen.generation.continuation.Lookup", Always)
    monkeypatch.setattr(speculation, "_GAIN", 0.0)
    monkeypatch.setattr(Speculation, "took", lambda self, *_: self._steps.append(1.0))


@pytest.fixture(scope="module")
def generator(folder: Path) -> Generator:
    return Generator(folder, threads=1)


def tokens(found: Any) -> list[list[int]]:
    steps = list(found)
    rows = [[t for t in row if t is not None] for row in zip(*steps, strict=True)]
    assert rows == found.tokens
    return rows


OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 1.5, "seed": 3},
    "drawn from few": {"temperature": 0.7, "top_k": 9, "top_p": 0.8},
    "penalties": {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2, "min_new_tokens": 30},
    "ends": {"eos": [*range(20, 40)]},
    "answers": {"temperature": 0.9, "num_return_sequences": 2},
    "bad words": {"bad_words": [[5], [9, 2]]},
}


@pytest.mark.share(3)
@pytest.mark.parametrize("kind", ["in place", "growing", "int4"])
@pytest.mark.parametrize("name", OPTIONS)
def test_guesses_change_no_token(
    name: str, kind: str, generator: Generator, graph: Any, eager: None, monkeypatch: Any
) -> None:
    options = {"max_new_tokens": STEPS, **OPTIONS[name]}
    prompts: Any = [*PROMPTS, PERIOD]
    if kind == "growing":
        monkeypatch.setattr(decoders, "in_place", lambda model: Miss("asked not to be"))
        generator = Generator(graph, threads=1)
    elif kind == "int4":
        generator = Generator(quantize(graph, "int4", threshold=9.0)[0], threads=1)
    assert isinstance(generator.decoder, Growing) == (kind == "growing")
    wanted = tokens(generator(prompts, **options))
    found = generator(prompts, speculate="prompt-lookup", **options)
    assert tokens(found) == wanted
    assert found.speculation is not None and found.speculation.checked > 0


def test_a_first_token_is_forced_for_all_rows_or_none(generator: Generator) -> None:
    """As in transformers, which looks at the longest; guesses look at the tokens of each row."""
    prompts: Any = [[3], PERIOD]
    options: Any = {"max_new_tokens": 3, "forced_bos": [7]}
    wanted = tokens(generator(prompts, **options))
    assert wanted[0][0] != 7 and tokens(generator(prompts[:1], **options))[0][0] == 7
    assert tokens(generator(prompts, speculate="prompt-lookup", **options)) == wanted


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_draft_model_changes_no_token(
    temperature: float, graph: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speculation, "_GAIN", 0.0)
    monkeypatch.setattr(Speculation, "took", lambda self, *_: self._steps.append(1.0))
    options: Any = {"max_new_tokens": STEPS, "temperature": temperature, "seed": 5}
    prompts = [*PROMPTS, PERIOD]
    wanted = tokens(gg.generate(graph, prompts, threads=1, **options))
    rates = {}
    for name, other in (("itself", graph), ("another", model(num_hidden_layers=1))):
        found = gg.generate(graph, prompts, threads=1, draft=other, **options)
        assert tokens(found) == wanted
        assert found.speculation is not None and found.speculation.checked
        rates[name] = found.speculation.right / found.speculation.checked
    assert rates["itself"] > 0.9 and rates["another"] < rates["itself"]


def test_what_is_drawn_with_a_draft_has_the_same_chances(graph: Any) -> None:
    """The second token of 400 rows with another draft model, next to those without."""
    options: Any = {"max_new_tokens": 6, "temperature": 2.0, "num_return_sequences": 400}
    draft = model(num_hidden_layers=1)
    one = tokens(gg.generate(graph, [5, 9], threads=1, **options))
    other = tokens(gg.generate(graph, [5, 9], threads=1, draft=draft, **options))
    assert one == other and len({row[1] for row in one}) > 20


def test_what_repeats_is_looked_up_and_the_rest_is_not() -> None:
    lookup = Lookup(1)
    row = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3]
    chances = lookup.chances(0, row, 4)
    assert lookup.guess(0, row, 4) == [4, 5, 6, 7] and chances == sorted(chances)
    lookup.learn(0, [4, 5, 6, 7])
    row += [4, 5, 6, 7]
    after = lookup.chances(0, row, 8)
    assert lookup.guess(0, row, 8) == [8, 9, 1, 2, 3, 4, 5, 6] and after[0] > chances[0]
    assert lookup.chances(0, [*row, 50], 8) == []
    pair = Lookup(1)
    assert pair.chances(0, [7, 8, 7], 3) and pair.guess(0, [7, 8, 7], 3) == [8, 7, 8]


def test_guesses_that_fail_are_no_longer_checked() -> None:
    """A row in which every token has come before, and is followed by another one each time."""
    random, lookup = np.random.default_rng(0), Lookup(1)
    ahead = Speculation(lookup, 10)
    row, checks = random.integers(0, 12, 64).tolist(), list[int]()
    for _ in range(400):
        guesses = ahead.guesses({0: row}, 100)
        ahead.took(1.0 + 0.1 * len(guesses.get(0, ())), guesses, 1)
        new = random.integers(0, 12, 1).tolist()
        ahead.learn(0, guesses.get(0, []), 0, new)
        checks.append(len(guesses.get(0, ())))
        row += new
    assert sum(checks) * 0.1 < 0.05 * 400 and sum(checks[200:]) <= sum(checks[:200])


def test_a_dear_check_is_not_made() -> None:
    ahead = Speculation(Lookup(1), 10)
    row = PERIOD * 4
    for i in range(30):
        guesses = ahead.guesses({0: row}, 100)
        assert bool(guesses) == (i == 2)  # until one was measured
        ahead.took(1.0 + 3.0 * len(guesses.get(0, ())), guesses, 1)
        ahead.learn(0, guesses.get(0, []), 0, row[-7:-6])
        row = [*row, row[-7]]


def test_the_folder_may_say_so(
    folder: Path, generator: Generator, tmp_path: Path, capsys: Any
) -> None:
    own = Generator(copied(folder, tmp_path / "a", prompt_lookup_num_tokens=3), threads=1)
    found = own(PERIOD, max_new_tokens=STEPS)
    assert tokens(found) == tokens(generator(PERIOD, max_new_tokens=STEPS))
    assert found.speculation is not None and found.speculation.most == 3
    assert own(PERIOD, beams=2, max_new_tokens=2).speculation is None  # no error
    assert commands.main(["generate", str(own.folder), "--ids", "5,9,2", "--draft", str(folder),
                          "--max-new-tokens", "9"]) == 0  # fmt: skip
    assert commands.main(["generate", str(own.folder), "--ids", "5,9,2", "--max-new-tokens", "9",
                          "--speculate", "prompt-lookup"]) == 0  # fmt: skip
    one, other = capsys.readouterr().out.split("decode")[:2]
    assert one.splitlines()[0] == other.splitlines()[2]
    assert "tokens checked, " in other.splitlines()[1]


def test_what_cannot_be_checked_is_refused(
    folder: Path, graph: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(told: str, model: Any, prompts: Any = PERIOD, **options: Any) -> None:
        with pytest.raises(GraphgenError, match=told):
            gg.generate(model, prompts, threads=1, **options)

    lookup = {"speculate": "prompt-lookup"}
    refused("2 beams with guesses: a beam search checks none", folder, beams=2, **lookup)
    refused("2 beams with a draft model", folder, beams=2, draft=folder)
    refused("speculate is 'often'; give 'prompt-lookup'", folder, speculate="often")
    refused("leave out draft or speculate", folder, draft=folder, **lookup)
    small = quantize(graph, "int8", threshold=9.0)[0]
    refused("int8 products scale all tokens that are read together", small, **lookup)
    genai = write_genai(folder, tmp_path / "genai", graph, {**CONFIG, "eos_token_id": 95})
    refused("logits of the last token alone: build it with --layout plain", genai, **lookup)
    other = copied(folder, tmp_path / "other")
    shutil.copy(folder / "config.json", other / "config.json")
    fields = json.loads((other / "tokenizer.json").read_text())
    vocabulary = fields["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (other / "tokenizer.json").write_text(json.dumps(fields))
    refused("has another vocabulary than", folder, draft=other)
    refused("has 90 tokens and the model 96", graph, draft=model(vocab_size=90))
    monkeypatch.setattr(decoders, "in_place", lambda model: Miss("asked not to be"))


@pytest.mark.share(3)
@pytest.mark.parametrize("which", ["bloom", "gemma2", "opt", "gpt_oss", "phi3, longrope"])
def test_guesses_change_no_token_of_a_family(which: str, tmp_path: Path, eager: None) -> None:
    """Biases by distance, caps, learned positions, experts and sinks, and angles that change."""
    graph = from_folder(checkpoint(tmp_path, which)).model
    generator = Generator(write_folder(tmp_path, tmp_path / "out", {MODEL: graph}), threads=1)
    period = [token % 40 for token in PERIOD]
    prompts: Any = [period, [5], [7, 9]]
    if "longrope" in which:
        with pytest.raises(GraphgenError, match="beyond 12 tokens longrope turns all rows"):
            generator(prompts, speculate="prompt-lookup")
        with pytest.raises(GraphgenError, match="turn by the last token of a call"):
            gg.generate(graph, prompts, threads=1, speculate="prompt-lookup")
        prompts = [5, 9, 2, 5, 9, 2, 5, 9]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gg.GraphgenWarning)
        wanted = tokens(generator(prompts, max_new_tokens=30, eos=[]))
        found = generator(prompts, max_new_tokens=30, eos=[], speculate="prompt-lookup")
    assert tokens(found) == wanted
    assert found.speculation is not None and found.speculation.checked


def test_a_long_prompt_of_longrope_is_read_whole(tmp_path: Path) -> None:
    """Its first tokens, read before the others, would turn as those of a short text."""
    graph = from_folder(checkpoint(tmp_path, "phi3, longrope")).model
    folder = write_folder(tmp_path, tmp_path / "out", {MODEL: graph})
    prompt, other = [p % 40 for p in PERIOD], [5, 9]
    starts = [Generator(folder, threads=1, chunk=chunk).decoder.start for chunk in (512, 4)]
    for rows in ([prompt], [prompt, other], [other]):
        whole, parts = (start(rows, 1) for start in starts)
        np.testing.assert_allclose(parts, whole, rtol=0, atol=1e-5 * whole.std())


def test_calls_do_not_mix(generator: Generator) -> None:
    """A Generator holds the rows of one call; a second one before the end is no silent mistake."""
    first, second = generator([1], max_new_tokens=5), generator([2, 3], max_new_tokens=5)
    next(first)
    wanted = tokens(generator([2, 3], max_new_tokens=5))
    next(second)
    with pytest.raises(GraphgenError, match="another call used this Generator before"):
        next(first)
    assert [*second] and second.tokens == wanted
    done = generator([1], max_new_tokens=3, speculate="prompt-lookup")
    assert list(done) and list(done) == []


def test_rows_end_at_the_context(generator: Generator, eager: None) -> None:
    found = generator([[7] * (CONTEXT - 5)], max_new_tokens=50, speculate="prompt-lookup")
    assert len(tokens(found)[0]) == 5


def test_a_draft_with_a_short_context(folder: Path, tmp_path: Path) -> None:
    """It guesses as long as it can read what stands before."""
    short = copied(folder, tmp_path / "short")
    fields = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps({**fields, "max_position_embeddings": 24}))
    wanted = tokens(gg.generate(folder, PERIOD, threads=1, max_new_tokens=30))
    found = gg.generate(folder, PERIOD, threads=1, max_new_tokens=30, draft=short)
    assert tokens(found) == wanted
    with pytest.raises(GraphgenError, match="the draft model reads 24 tokens and a prompt has 30"):
        list(gg.generate(folder, [1] * 30, threads=1, draft=short))


def test_answers_are_the_best_of_the_beams_or_drawn(generator: Generator) -> None:
    prompts = PROMPTS[:2]
    best = tokens(generator(prompts, beams=3, max_new_tokens=8))
    three = generator(prompts, beams=3, num_return_sequences=2, max_new_tokens=8)
    rows = tokens(three)
    assert rows[::2] == best and all(a != b for a, b in zip(rows[::2], rows[1::2], strict=True))
    assert three.prompts == [prompts[0], prompts[0], prompts[1], prompts[1]]
    drawn = generator(prompts, temperature=2.0, num_return_sequences=3, max_new_tokens=8)
    assert len({*map(tuple, tokens(drawn))}) == 6
    again = generator([p for p in prompts for _ in range(3)], temperature=2.0, max_new_tokens=8)
    assert tokens(again) == drawn.tokens
    with pytest.raises(GraphgenError, match="num_return_sequences is 2, but 1 beam at temp"):
        generator(prompts, num_return_sequences=2)


@pytest.mark.parametrize("how", [{}, {"speculate": "prompt-lookup"}, {"beams": 2}])
def test_time_ends_all_rows(how: Any, generator: Generator) -> None:
    assert [len(row) for row in tokens(generator(PROMPTS, max_time=0, **how))] == [1, 1, 1]
    assert len(tokens(generator([1], max_time=1000.0, max_new_tokens=9, **how))[0]) == 9


def test_processors_and_bad_words(generator: Generator) -> None:
    [plain] = tokens(generator([3], max_new_tokens=12))
    seen = list[list[int]]()

    def never_first(row: Any, logits: Any) -> Any:
        seen.append([*row])
        logits[plain[0]] = -np.inf
        return logits

    [other] = tokens(generator([3], max_new_tokens=12, logits_processors=never_first))
    assert plain[0] not in other and seen == [[3, *other[:n]] for n in range(12)]
    for how in ({}, {"beams": 3}):
        [word] = tokens(generator([3], max_new_tokens=12, bad_words=[plain[:3], plain[4:6]], **how))
        said = ",".join(map(str, [3, *word]))
        assert ",".join(map(str, plain[:3])) not in said
        assert ",".join(map(str, plain[4:6])) not in said
    with pytest.raises(GraphgenError, match="bad_words has token 96; the model has tokens 0"):
        generator([3], bad_words=[[1, 96]])
    with pytest.raises(GraphgenError, match=r"bad_words is \[\[\]\]; give lists of tokens"):
        generator([3], bad_words=[[]])
    with pytest.raises(GraphgenError, match="logits_processors is 5; give functions"):
        generator([3], logits_processors=5)
    wrong: Any
    for wrong in (lambda row, x: x[:5], lambda row, x: x * np.nan, lambda row, x: None):
        with pytest.raises(GraphgenError, match="the logits processor <lambda> returned"):
            next(generator([3], logits_processors=[wrong]))


@pytest.mark.share(2)
@pytest.mark.parametrize("which", ["mt5", "pegasus"])
def test_guesses_behind_an_encoder(which: str, tmp_path: Path, eager: None) -> None:
    """They are looked up in what the encoder reads, too; the cache grows by several tokens."""
    fields = seq2seq.fields(which)
    fields |= {"max_position_embeddings": 64} if which == "pegasus" else {}
    family, source = FAMILIES[which], tmp_path / "in"
    module = family.tasks["text2text-generation"](Config(fields))
    arrays = {n: seq2seq.weight(n, shape) for n, shape in stored_shapes(family, module).items()}
    source.mkdir()
    (source / "config.json").write_text(json.dumps(fields))
    write_weights(source / "model.safetensors", arrays)
    models = {f"onnx/{n}": gg.optimize(m).model for n, m in from_folder(source).models.items()}
    generator = Generator(write_folder(source, tmp_path / "out", models), threads=1)
    prompt, looked_up = [token % 40 for token in PERIOD], set[int]()
    for options in ({}, {"temperature": 1.5, "seed": 3}, {"repetition_penalty": 1.4}):
        how: Any = {"max_new_tokens": 30, "eos": [], **options}
        wanted = tokens(generator(prompt, **how))
        found = generator(prompt, speculate="prompt-lookup", **how)
        assert tokens(found) == wanted
        assert found.speculation is not None and found.speculation.checked > 9
        looked_up |= {*found.speculation.guesser._places[0].values()}  # type: ignore[union-attr]
    assert min(looked_up) < len(prompt) < max(looked_up)
    with pytest.raises(GraphgenError, match="all rows have one length: give one prompt at a time"):
        generator([prompt, prompt], speculate="prompt-lookup")
    with pytest.raises(GraphgenError, match="the model has an encoder, and a draft is for decod"):
        gg.generate(tmp_path / "out", prompt, draft=model())
    small = {n: quantize(x, "int8", threshold=9.0)[0] for n, x in models.items()}
    own = Generator(write_folder(source, tmp_path / "small", small), threads=1)
    with pytest.raises(GraphgenError, match="int8 products scale all tokens that are read tog"):
        own(prompt, speculate="prompt-lookup")
