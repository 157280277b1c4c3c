"""Generation: tokens against a graph that reads everything anew at each step, options, errors."""

import dataclasses
import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import onnx_ir as ir
import pytest
from random_checkpoints import CAUSAL, random_checkpoint
from schemes import SCHEMES
from small_models import pretend_no_placement, vary

import graphgen as gg
from graphgen import commands
from graphgen.edit import infer_model
from graphgen.errors import GraphgenError
from graphgen.export.folders import GENAI, MODEL, write_folder, write_genai
from graphgen.generation import Generator, decoder as decoders
from graphgen.generation.beams import Beams
from graphgen.generation.caches import InPlace, sized
from graphgen.generation.config import ignored
from graphgen.generation.growing import Growing
from graphgen.generation.options import Options, read_options
from graphgen.generation.prompts import says
from graphgen.generation.sampling import draw, processed
from graphgen.match import Miss
from graphgen.models.published.config import Config
from graphgen.models.published.decoder import CausalLM
from graphgen.models.published.named import specification
from graphgen.passes.decoding import KEPT
from graphgen.plan import TensorType
from graphgen.quantize import quantize
from graphgen.targets import target

tokenizers = pytest.importorskip("tokenizers")

DOCS = Path(__file__).parents[2] / "docs"
VOCABULARY, CONTEXT = 96, 64
CONFIG: dict[str, Any] = {
    "model_type": "mistral",
    "sliding_window": 6,
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
}
PROMPTS = [[5, 9, 2, 40, 41, 7, 33, 12, 90], [3], [17, 60, 61, 62]]


def model(**fields: Any) -> Any:
    module = vary(CausalLM(specification(Config({**CONFIG, **fields}))))
    return gg.optimize(gg.build(module, **module.inputs())).model


@pytest.fixture(scope="module")
def graph() -> Any:
    return model()


@pytest.fixture(scope="module")
def source(tmp_path_factory: Any) -> Path:
    """A configuration and a tokenizer with a token for each character from the blank on."""
    folder: Path = tmp_path_factory.mktemp("source")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    characters = {chr(32 + i): i for i in range(VOCABULARY - 1)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(characters, []))
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.enable_padding(pad_token=" ", length=16)  # as published ones do, and nobody wants
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def folder(source: Path, graph: Any, tmp_path_factory: Any) -> Path:
    return write_folder(source, tmp_path_factory.mktemp("out") / "model", {MODEL: graph})


@pytest.fixture(scope="module")
def generator(folder: Path) -> Generator:
    return Generator(folder, threads=1)


def copied(folder: Path, target: Path, **generation: Any) -> Path:
    shutil.copytree(folder, target)
    (target / "generation_config.json").write_text(json.dumps(generation))
    return target


@pytest.fixture(scope="module")
def logits_after(graph: Any) -> Callable[[list[int]], Any]:
    """The logits behind a row that is read as a whole."""
    session = gg.Session(graph, threads=1)
    empty = {name: np.zeros((1, 2, 0, 8), np.float32) for name in session.inputs if "past" in name}

    def run(row: list[int]) -> Any:
        ids, mask = np.array([row]), np.ones((1, len(row)), np.int64)
        places = np.arange(len(row))[None]
        return session({"input_ids": ids, "attention_mask": mask, "position_ids": places, **empty})[
            0
        ][0, -1]

    return run


@pytest.fixture(scope="module")
def greedy(logits_after: Any) -> list[list[int]]:
    """Twenty tokens behind each prompt."""
    rows = [list(prompt) for prompt in PROMPTS]
    for row in rows:
        for _ in range(20):
            row.append(int(logits_after(row).argmax()))
    return [row[len(prompt) :] for row, prompt in zip(rows, PROMPTS, strict=True)]


@pytest.mark.parametrize("chunk", [512, 3, 1])
@pytest.mark.parametrize("kind", [InPlace, Growing])
def test_tokens_are_those_of_the_whole(
    graph: Any, greedy: Any, kind: type, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind is Growing:
        monkeypatch.setattr(decoders, "in_place", lambda model: Miss("it was asked not to be"))
    found = gg.generate(graph, PROMPTS, max_new_tokens=20, chunk=chunk, threads=1)
    steps = list(found)
    assert type(found._decoder) is kind
    assert found._generator.decoder.note == ("it was asked not to be" if kind is Growing else "")
    assert found.tokens == greedy
    assert [list(row) for row in zip(*steps, strict=True)] == greedy
    assert found.prefill[0] == 14 and found.decode[0] == 57 and found.decode[1] > 0


@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights_may_be_quantized(graph: Any, scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row by row: in int8 the scale of activations is that of all rows, padding included."""
    small, _ = quantize(graph, scheme, threshold=9.0)
    rows: list[list[list[int]]] = []
    for place in (decoders.in_place, lambda model: Miss("it was asked not to be")):
        monkeypatch.setattr(decoders, "in_place", place)
        generator = Generator(small, threads=1)
        assert generator.decoder.session.outputs["logits"].dims == ("batch_size", KEPT, VOCABULARY)
        found = [generator(prompt, max_new_tokens=20) for prompt in PROMPTS]
        rows.append([own.tokens[0] for own in found if list(own)])
    assert rows[0] == rows[1] and len(rows[0]) == 3
    if scheme != "int8":
        together = gg.generate(small, PROMPTS, max_new_tokens=20, threads=1)
        list(together)
        assert together.tokens == rows[0]


def test_a_graph_that_gives_all_logits_has_those_of_each_row(
    graph: Any, greedy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are padded behind their last token, and the last of all is none of theirs."""
    monkeypatch.setattr(decoders, "keep_last", lambda model, several: False)
    found = gg.generate(graph, PROMPTS, max_new_tokens=20, threads=1)
    list(found)
    assert type(found._decoder) is InPlace
    assert found._decoder.session.outputs["logits"].dims[1] not in (KEPT, 1)
    assert found.tokens == greedy


def test_one_row_is_as_in_a_batch(generator: Generator, greedy: Any) -> None:
    for prompt, wanted in zip(PROMPTS, greedy, strict=True):
        found = generator(prompt, max_new_tokens=20)
        list(found)
        assert found.tokens == [wanted]


def test_nothing_of_the_cache_is_copied(generator: Generator) -> None:
    found = generator(PROMPTS, max_new_tokens=20)
    steps, decoder = iter(found), generator.decoder
    next(steps)
    addresses = {name: array.ctypes.data for name, array in decoder.past.items()}
    for _ in range(10):
        before = {name: array.copy() for name, array in decoder.past.items()}
        lengths = decoder.lengths.copy()  # type: ignore[attr-defined]
        next(steps)
        assert {name: array.ctypes.data for name, array in decoder.past.items()} == addresses
        for name, array in decoder.past.items():
            changed = (array != before[name]).any((1, 3))  # (B, capacity)
            assert (changed == (np.arange(array.shape[2]) == lengths[:, None])).all()
    assert array.shape[2] == 9 + 20


def test_the_runtime_reads_the_weights_of_the_folder(
    folder: Path, greedy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []
    session = decoders.Session

    def spy(model: Any, **options: Any) -> Any:
        sizes.append(len(model))
        return session(model, **options)

    monkeypatch.setattr(decoders, "Session", spy)
    found = gg.generate(folder, PROMPTS, max_new_tokens=20)
    list(found)
    assert found.tokens == greedy
    data = (folder / MODEL).with_suffix(".onnx_data").stat().st_size
    assert sizes[0] < 40_000 < data


def test_a_folder_for_genai_gives_the_same(
    source: Path, graph: Any, greedy: Any, tmp_path: Path
) -> None:
    out = write_genai(source, tmp_path / "genai", graph, {**CONFIG, "eos_token_id": 95})
    found = gg.generate(out, PROMPTS, max_new_tokens=20)
    list(found)
    assert found.tokens == greedy and found._generator.decoder.note == ""
    told = json.loads((out / "genai_config.json").read_text())
    assert told["search"] == {"max_length": CONTEXT, "past_present_share_buffer": True}
    assert told["model"]["type"] == "decoder" and told["model"]["eos_token_id"] == 95
    part = told["model"]["decoder"]
    sizes = {key: part[key] for key in part if key.startswith(("num", "head", "hidden"))}
    assert sizes == {
        "head_size": 8,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
    }


@pytest.mark.parametrize(
    ("given", "kept"), [(95, 95), ([95], 95), ([95, 96, 3], [95, 3]), (50256, None), (-1, None)]
)
def test_a_folder_for_genai_ends_with_tokens_of_the_model(
    source: Path, graph: Any, tmp_path: Path, given: Any, kept: Any
) -> None:
    """With another one it does not open the folder."""
    out = write_genai(source, tmp_path / "genai", graph, {**CONFIG, "eos_token_id": given})
    told = json.loads((out / "genai_config.json").read_text())
    assert told["model"].get("eos_token_id") == kept


def test_a_folder_for_webgpu_has_its_kernels_alone(
    source: Path, graph: Any, greedy: Any, tmp_path: Path
) -> None:
    fields, webgpu = {**CONFIG, "eos_token_id": 95}, target("webgpu")
    out = write_genai(source, tmp_path / "genai", graph, fields, target="webgpu")
    told = json.loads((out / "genai_config.json").read_text())["model"]["decoder"]
    assert told["session_options"]["provider_options"] == [{"webgpu": {}}]
    infer_model(written := gg.load(out / GENAI))
    lacks = {why for node in written.graph if (why := webgpu.missing(node))}
    assert lacks == {f"{webgpu} has no Cast for T1=int64, T2=float"}  # of places
    found = gg.generate(out, PROMPTS, max_new_tokens=20)
    list(found)
    assert found.tokens == greedy
    capped = graph.clone()
    for node in capped.graph:
        if node.op_type == "Attention":
            node.attributes["softcap"] = ir.AttrFloat32("softcap", 9.0)
    with pytest.raises(GraphgenError, match="refuses GroupQueryAttention with a softcap; choose"):
        write_genai(source, tmp_path / "capped", capped, fields, target="webgpu")
    out = write_genai(source, tmp_path / "capped", capped, fields)
    with pytest.raises(GraphgenError, match="refuses GroupQueryAttention with a softcap; build it"):
        gg.generate(out, PROMPTS, provider="webgpu")


def test_genai_needs_the_context_and_the_cache_in_place(
    source: Path, graph: Any, tmp_path: Path
) -> None:
    with pytest.raises(GraphgenError, match="no max_position_embeddings"):
        write_genai(source, tmp_path / "genai", graph, {"vocab_size": VOCABULARY})
    odd = model(head_dim=12)
    with pytest.raises(
        GraphgenError, match=r"12 features; wanted as many, in eights, for onnxruntime .*; choose"
    ):
        write_genai(source, tmp_path / "genai", odd, CONFIG)
    with pytest.raises(GraphgenError, match="no max_position_embeddings, which genai_config"):
        write_genai(source, tmp_path / "genai", model(), {"vocab_size": VOCABULARY})
    assert not (tmp_path / "genai").exists()
    found = gg.generate(odd, PROMPTS, max_new_tokens=2)
    assert "eights" in found._generator.decoder.note and len(list(found)) == 2


def test_windows_grow_where_the_kernel_has_others(
    source: Path, graph: Any, greedy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = write_genai(source, tmp_path / "genai", graph, {**CONFIG, "eos_token_id": 95})
    monkeypatch.setattr(decoders, "minor", lambda version: (1, 23))
    found = gg.generate(graph, PROMPTS, max_new_tokens=20)
    list(found)
    assert found.tokens == greedy and "one token too many" in found._generator.decoder.note
    refused = r"below 1\.24 sees one token too many in a window; build it.*upgrade onnxruntime"
    with pytest.raises(GraphgenError, match=refused):
        gg.generate(out, PROMPTS)
    assert isinstance(decoders.open_decoder(model(sliding_window=None)), InPlace)


def test_enough_beams_find_the_best(generator: Generator, logits_after: Any) -> None:
    """With a beam for every start, a search is exhaustive."""
    allowed = [4, 18, 50, 77]
    others = sorted(set(range(VOCABULARY)) - set(allowed))
    found = generator([PROMPTS[1], PROMPTS[2]], max_new_tokens=3, beams=16, suppress_tokens=others)
    list(found)
    for prompt, tokens in zip((PROMPTS[1], PROMPTS[2]), found.tokens, strict=True):
        scores = {}
        for way in itertools.product(allowed, repeat=3):
            total = 0.0
            for i, token in enumerate(way):
                logits = logits_after([*prompt, *way[:i]]).astype(np.float64)
                total += logits[token] - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
            scores[way] = total
        assert tuple(tokens) == max(scores, key=lambda way: scores[way])


def test_a_beam_goes_on_from_the_one_that_is_told() -> None:
    rng = np.random.default_rng(5)
    search = Beams(2, Options(beams=3), most=6, ends=lambda tokens: False, candidates=6)
    moved = 0
    for step in range(6):
        before = [tokens for row in search.sequences for tokens in row]
        source = search.advance(np.log(rng.dirichlet(np.ones(11), 6)))
        after = [tokens for row in search.sequences for tokens in row]
        assert (source is None) == (step == 5)
        if source is not None:
            assert [tokens[:-1] for tokens in after] == [before[i] for i in source]
            moved += source.tolist() != [*range(6)]
    assert moved and all(len(tokens) == 6 for tokens in search.best())


def test_beams_score_by_length(generator: Generator, greedy: Any) -> None:
    ends = sorted({row[2] for row in greedy})
    lengths = []
    for power in (-4.0, 4.0):
        found = generator(PROMPTS, max_new_tokens=12, beams=4, eos=ends, length_penalty=power)
        list(found)
        lengths.append(sum(map(len, found.tokens)))
    assert lengths[0] < lengths[1]


def test_a_search_ends_when_nothing_better_is_likely(generator: Generator) -> None:
    counts = []
    for early in (True, False, "never"):
        own: Any = {"eos": list(range(0, 96, 4)), "early_stopping": early, "length_penalty": 1.2}
        found = generator(PROMPTS[0], max_new_tokens=40, beams=4, **own)
        list(found)
        counts.append(found.decode[0])
    assert counts[0] <= counts[1] < counts[2] <= 39


def test_rows_end_for_themselves(generator: Generator, greedy: Any) -> None:
    ends = [greedy[0][4], greedy[2][7]]
    found = generator(PROMPTS, max_new_tokens=20, stop=ends)
    steps = list(found)
    wanted = [row[: next((i + 1 for i, t in enumerate(row) if t in ends), 20)] for row in greedy]
    assert found.tokens == wanted and len(steps) == max(map(len, wanted))
    assert steps[-1].count(None) >= 1 or len({*map(len, wanted)}) == 1


@pytest.mark.parametrize("drawn", [False, True])
def test_rows_that_have_ended_are_not_computed(
    graph: Any, generator: Generator, drawn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a cache in place and of one that grows; what is left goes on as it would alone."""
    monkeypatch.setattr(decoders, "minor", lambda version: (1, 23))
    for own in (generator, Generator(graph, threads=1)):
        rows, options = PROMPTS * 3, {"max_new_tokens": 20, "repetition_penalty": 1.1}
        options |= {"temperature": 1.5, "seed": 3} if drawn else {}
        free = own(rows, **options)
        list(free)
        ends = [row[n] for row, n in zip(free.tokens, (1, 18, 4, 2, 1, 6, 3, 1, 12), strict=True)]
        wanted = [
            row[: next((i + 1 for i, t in enumerate(row) if t in ends), 20)] for row in free.tokens
        ]
        found, widths = own(rows, stop=ends, **options), []
        for _ in found:
            widths.append(len(next(iter(own.decoder.past.values()))))
        assert found.tokens == wanted and found.decode[0] == sum(map(len, wanted)) - len(rows)
        live = [sum(len(row) > step for row in wanted) for step in range(len(widths))]
        assert widths[0] == 9 > widths[-1]
        assert all(width < 2 * now for width, now in zip(widths, live, strict=True))


STOPS = ["é日", "\n\n", "b", " the end", "日本語", "🙂", "Wort ist "]
TEXT = "Das Wort ist é日 a\n b🙂\n\n and so on, the end. 日本語日本語日本語日本語日本語日本語 b" * 3


def byte_level() -> Any:
    """A token for each byte, and some for several, which end or begin within a character."""
    pieces = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    vocabulary = {piece: i for i, piece in enumerate(sorted(pieces))}
    encoded = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    signs = "".join(piece for piece, _ in encoded.pre_tokenize_str(TEXT))
    merges = [(signs[i], signs[i + 1]) for i in range(0, len(signs) - 1, 5)]
    merges = list(dict.fromkeys(merges))
    vocabulary |= {a + b: len(vocabulary) + i for i, (a, b) in enumerate(merges)}
    own = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    own.pre_tokenizer, own.decoder = encoded, tokenizers.decoders.ByteLevel()
    return own


def byte_fallback() -> Any:
    """Llama's: bytes are tokens for characters that have none; all of a run are lost together."""
    vocabulary = {f"<0x{i:02X}>": i for i in range(256)}
    known = sorted({*TEXT.replace(" ", "▁")} - {*"é日本語🙂"})
    vocabulary |= {sign: 256 + i for i, sign in enumerate(["<unk>", *known])}
    model = tokenizers.models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True)
    own = tokenizers.Tokenizer(model)
    own.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    steps = [tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.ByteFallback()]
    steps += [tokenizers.decoders.Fuse(), tokenizers.decoders.Strip(" ", 1, 0)]
    own.decoder = tokenizers.decoders.Sequence(steps)
    return own


def word_pieces() -> Any:
    """BERT's: the blanks are put between words, but not before what goes on."""
    letters = sorted({*TEXT} - {" ", "\n"})
    vocabulary = {"[UNK]": 0}
    vocabulary |= {piece: i + 1 for i, piece in enumerate([*letters, *("##" + x for x in letters)])}
    own = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"))
    own.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    own.decoder = tokenizers.decoders.WordPiece(cleanup=True)
    return own


@pytest.mark.parametrize("kind", [byte_level, byte_fallback, word_pieces])
def test_a_string_is_found_when_the_whole_has_it(kind: Callable[[], Any]) -> None:
    """Also with tokens that say nothing or no character, and none is found that is not there."""
    own, random, found = kind(), np.random.default_rng(0), 0
    own.add_special_tokens(["<s>"])
    special, size = own.token_to_id("<s>"), own.get_vocab_size()
    for turn in range(60):
        text = "".join(str(piece) for piece in random.permutation(TEXT.split(" "))[:60])
        tokens = own.encode(text if turn % 3 else TEXT[turn % 40 :]).ids
        if turn % 4 == 1:
            tokens = np.insert(tokens, random.integers(0, len(tokens), 30), special).tolist()
        if turn % 4 == 2:
            tokens = random.integers(0, size, 150).tolist()
        strings = [STOPS[i] for i in random.permutation(len(STOPS))[: 1 + turn % 2]]
        for end in range(1, len(tokens) + 1):
            wanted = any(string in own.decode(tokens[:end]) for string in strings)
            assert says(tokens[:end], strings, own.decode_batch) == wanted, (strings, tokens[:end])
            if wanted:
                found += end > 60
                break
    assert found > 2  # beyond the first tail


def test_a_tail_that_begins_otherwise_than_the_whole() -> None:
    """Within a character, with which all bytes next to it are lost, or within a word."""
    own = byte_fallback()
    for text in ("日本語" * 20, "日本語" * 19 + "é日", "日本語" * 20 + "é"):
        tokens = own.encode(text + " b").ids
        assert says(tokens, [text[-1] + " b"], own.decode_batch)
        assert not says(tokens[:-1], [text[-1] + " b"], own.decode_batch)
    own = word_pieces()
    tokens = own.encode("a" * 90).ids
    assert not says(tokens, ["##a"], own.decode_batch)


def test_a_tail_is_read_not_the_whole() -> None:
    own, reads = byte_level(), 0

    def texts(rows: list[list[int]]) -> list[str]:
        nonlocal reads
        reads += sum(map(len, rows))
        return own.decode_batch(rows)  # type: ignore[no-any-return]

    tokens = own.encode("some words of a long text " * 40).ids
    for end in range(1, len(tokens) + 1):
        assert not says(tokens[:end], ["stop"], texts)
    assert reads < 36 * len(tokens)


def test_strings_stop_a_row(generator: Generator, greedy: Any) -> None:
    [text] = generator.texts([greedy[0]])
    assert text == "".join(chr(32 + token) for token in greedy[0] if token < VOCABULARY - 1)
    string = text[3:5]
    found = generator("".join(chr(32 + t) for t in PROMPTS[0]), max_new_tokens=20, stop=string)
    list(found)
    assert found.prompts == [PROMPTS[0]]
    assert found.texts() == [text[: text.index(string)]]
    assert len(found.tokens[0]) < 20


def test_a_special_token_is_a_string_to_stop_at(folder: Path, greedy: Any, tmp_path: Path) -> None:
    """Texts leave it out, and two strings that it parts are not one, as in transformers."""
    row = greedy[0]
    at = next(
        i for i in range(3, 19) if row[i] not in row[:i] and VOCABULARY - 1 not in row[: i + 2]
    )
    before, special, after = (chr(32 + token) for token in row[at - 1 : at + 2])
    own = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    own.add_special_tokens([special])
    own.save(str(copied(folder, tmp_path / "a") / "tokenizer.json"))
    generator = Generator(tmp_path / "a", threads=1)
    for stop, end in (([special], at + 1), ([before + after], 20), ([before + special], at + 1)):
        found = generator([PROMPTS[0]], max_new_tokens=20, stop=stop)
        list(found)
        assert found.tokens == [row[:end]]
        kept = [token for token in row[:end] if token not in (row[at], VOCABULARY - 1)]
        assert found.texts() == ["".join(chr(32 + token) for token in kept)]


def test_what_is_drawn_depends_on_seed_and_row_alone(generator: Generator) -> None:
    def tokens(prompts: Any, seed: int) -> Any:
        found = generator(prompts, max_new_tokens=12, temperature=1.5, seed=seed)
        list(found)
        return found.tokens

    first = tokens(PROMPTS, 1)
    assert tokens(PROMPTS, 1) == first != tokens(PROMPTS, 2)
    assert tokens(PROMPTS[:1], 1) == first[:1]
    assert tokens([PROMPTS[1]] * 2, 1)[0] != tokens([PROMPTS[1]] * 2, 1)[1]


@pytest.mark.parametrize(
    "options, kept",
    [
        ({}, 5),
        ({"top_k": 2}, 2),
        ({"top_p": 0.81}, 3),
        ({"top_p": 0.79}, 2),
        ({"min_p": 0.29}, 3),
        ({"min_p": 0.29, "top_k": 2}, 2),
        ({"typical_p": 0.79}, 2),
        ({"epsilon_cutoff": 0.1}, 3),
        ({"eta_cutoff": 0.1}, 3),  # the square root of 0.1, times exp(-1.167): 0.098
        ({"top_h": 0.7}, 2),
    ],
)
def test_chances(options: Any, kept: int) -> None:
    chances = np.array([0.5, 0.04, 0.3, 0.15, 0.01])
    random = np.random.default_rng(0)
    chosen = Options(temperature=2.0, **options)
    scores = (2.0 * np.log(chances)).astype(np.float32)
    drawn = [draw(scores, chosen, random) for _ in range(4000)]
    wanted = np.where(chances >= np.sort(chances)[-kept], chances, 0)
    given = np.bincount(drawn, minlength=5) / 4000
    np.testing.assert_allclose(given, wanted / wanted.sum(), atol=0.03)
    assert not given[wanted == 0].any()


def test_no_temperature_brings_what_may_not_come() -> None:
    scores, random = np.array([1, -np.inf, 0], np.float32), np.random.default_rng(0)
    for temperature in (1e-320, 1e308, np.inf):
        drawn = {draw(scores, Options(temperature=temperature), random) for _ in range(20)}
        assert drawn == ({0} if temperature < 1 else {0, 2})


def test_biases_and_what_the_source_forbids() -> None:
    given = np.array([[1.0, 2.0, -4.0, np.inf, np.nan]])
    for fields, tokens, wanted in (
        ({"sequence_bias": [[[0], 1.5], ([3, 1], -1)]}, [2, 3], [2.5, 1, -4, np.inf, np.nan]),
        ({"sequence_bias": [[[0], 1.5], ([3, 1], -1)]}, [3, 2], [2.5, 2, -4, np.inf, np.nan]),
        ({"encoder_repetition_penalty": 2}, [0], [1, 4, -2, np.inf, np.nan]),
        ({"encoder_no_repeat_ngram_size": 2}, [0, 1], [1, 2, -np.inf, np.inf, np.nan]),
        ({"exponential_decay_length_penalty": (1, 3.0), "eos": [1, 2]}, [], [1, 18, 28, 3, 0]),
    ):
        finite = np.nan_to_num(given, posinf=3) if "eos" in fields else given
        more = {} if "eos" in fields else {"logits_processors": lambda _, x: np.nan_to_num(x)}
        options = Options(**fields, **more)
        [found] = processed(finite, [tokens], options, step=3, sources=[[1, 2]])
        np.testing.assert_array_equal(found, np.nan_to_num(np.array(wanted)))
    [found] = processed(given, [[]], Options(remove_invalid_values=True), step=0)
    np.testing.assert_array_equal(found, np.nan_to_num(given[0]))
    later = Options(eos=[0], min_new_tokens=9, exponential_decay_length_penalty=(1, 3.0))
    later = dataclasses.replace(later, remove_invalid_values=True)
    [found] = processed(np.ones((1, 2), np.float32), [[]], later, step=8)
    assert found.tolist() == [np.finfo(np.float32).min, 1]  # what may not come yet stays so


@pytest.mark.parametrize(
    "fields",
    [
        {"sequence_bias": [[[1], "a"]]},
        {"sequence_bias": [[[], 1.0]]},
        {"sequence_bias": {"1": 2.0}},
        {"exponential_decay_length_penalty": [2]},
        {"exponential_decay_length_penalty": [2, 0.0]},
        {"typical_p": 1.1},
        {"remove_invalid_values": 1},
    ],
)
def test_what_is_no_bias(fields: dict[str, Any]) -> None:
    with pytest.raises(GraphgenError, match=f"generate: {next(iter(fields))} is .*; "):
        Options(**fields)


def test_penalties(generator: Generator) -> None:
    found = generator(PROMPTS, max_new_tokens=40, no_repeat_ngram_size=2)
    list(found)
    for prompt, tokens in zip(PROMPTS, found.tokens, strict=True):
        pairs = list(itertools.pairwise([*prompt, *tokens]))
        assert len({*pairs}) == len(pairs)
    found = generator(PROMPTS, max_new_tokens=30, repetition_penalty=1e6)
    list(found)
    for prompt, tokens in zip(PROMPTS, found.tokens, strict=True):
        assert len({*prompt, *tokens}) == len({*prompt}) + len(tokens)


def test_defaults_are_those_of_the_folder(folder: Path, greedy: Any, tmp_path: Path) -> None:
    end = greedy[0][3]
    own = copied(folder, tmp_path / "a", eos_token_id=[end, 1], max_new_tokens=9)
    found = gg.generate(own, PROMPTS[0])
    list(found)
    assert found.tokens == [greedy[0][: greedy[0].index(end) + 1]]
    found = gg.generate(own, PROMPTS[0], min_new_tokens=9, suppress_tokens=[0])
    list(found)
    assert len(found.tokens[0]) == 9 and not {end, 1, 0} & {*found.tokens[0]}
    drawing = read_options(copied(folder, tmp_path / "b", do_sample=True, top_p=0.9))
    assert (drawing.temperature, drawing.top_k, drawing.top_p) == (1.0, 50, 0.9)
    assert (drawing.context, drawing.vocabulary) == (CONTEXT, VOCABULARY)
    bad = copied(folder, tmp_path / "c", bad_words_ids=[[4], [9]], eos_token_id=9, num_beams=3)
    assert read_options(bad).bad_words == [[4]] and read_options(bad).beams == 3
    stops = copied(folder, tmp_path / "d", stop_strings=["ab", "c"], renormalize_logits=True)
    assert read_options(stops).stop == ["ab", "c"] and read_options(stops).renormalize_logits
    none = copied(folder, tmp_path / "e", bos_token_id=-1)  # a decoder begins with its prompt
    assert read_options(none).begin is None


def test_generation_config_alone_says_how_to_choose(folder: Path, tmp_path: Path) -> None:
    """As in transformers: config.json counts where there is no generation_config.json."""
    own = copied(folder, tmp_path / "a", top_k=7, min_length=30)
    old = {"num_beams": 4, "repetition_penalty": 1.3, "eos_token_id": 5, "penalty_alpha": 0.5}
    (own / "config.json").write_text(json.dumps({**CONFIG, **old}))
    options = read_options(own, temperature=0.5)
    assert (options.beams, options.repetition_penalty, options.eos) == (1, 1.0, [5])
    assert (options.temperature, options.top_k) == (0.5, 7)
    assert options.min_length == 30
    assert read_options(own, min_new_tokens=2).min_length == 0
    (own / "generation_config.json").unlink()
    with pytest.raises(GraphgenError, match=r"a.config\.json: penalty_alpha is 0\.5, which has no"):
        read_options(own)
    (own / "config.json").write_text(json.dumps({**CONFIG, **old, "penalty_alpha": 0}))
    assert read_options(own).beams == 4


@pytest.mark.parametrize(
    "fields", [{"guidance_scale": 0}, {"typical_p": 0}, {"num_beam_groups": 0}, {"top_h": 0}]
)
def test_a_zero_is_a_value_too(folder: Path, tmp_path: Path, fields: Any) -> None:
    with pytest.raises(GraphgenError, match=r"is 0, which has no option here|is 0; it must be"):
        read_options(copied(folder, tmp_path / "a", **fields))


@pytest.mark.parametrize(
    ("name", "value"),
    [("do_sample", "false"), ("do_sample", 1), ("renormalize_logits", "no"), ("stop_strings", [1])],
)
def test_a_field_of_another_kind_is_not_read_as_true(folder, tmp_path, name, value):
    with pytest.raises(GraphgenError, match=f"{name} is .*; give "):
        read_options(copied(folder, tmp_path / "a", **{name: value}))


EMPTY: dict[str, Any] = {
    "sequence_bias": None,
    "watermarking_config": {},
    "constraints": None,
    "max_time": None,
    "use_mtp": False,
    "use_cache": True,
    "cache_implementation": "hybrid",
    "_from_model_config": True,
    "transformers_version": "5.23.0",
    "pad_token_id": 0,
}


def test_fields_without_effect_are_told_once(
    folder: Path, tmp_path: Path, capsys: Any, recwarn: pytest.WarningsRecorder
) -> None:
    Generator(copied(folder, tmp_path / "quiet", **EMPTY), threads=1)
    assert not [one for one in recwarn if one.category is gg.GraphgenWarning]
    others = {"max_time": 9, "assistant_early_exit": 4, "chat_format": "chatml"}
    own = copied(folder, tmp_path / "a", **EMPTY | others)
    told = (
        f"{own / 'generation_config.json'} has these fields, which have no effect here: "
        "assistant_early_exit, chat_format"
    )
    with pytest.warns(gg.GraphgenWarning) as found:
        list(gg.generate(own, [[1]], max_new_tokens=1))
    ours = [str(one.message) for one in found if one.category is gg.GraphgenWarning]
    assert ours == [told]  # others' files may be collected meanwhile
    assert commands.main(["generate", str(own), "--ids", "1", "--max-new-tokens", "2"]) == 0
    assert capsys.readouterr().err == f"graphgen: {told}\n"
    data, out = tmp_path / "rows.jsonl", tmp_path / "rows.parquet"
    data.write_text('{"ids": [1]}\n' * 70)
    words = ["map", str(own), "--data", str(data), "-o", str(out), "--max-new-tokens", "1"]
    assert commands.main([*words, "--batch", "2", "--workers", "2"]) == 0
    assert capsys.readouterr().err == f"graphgen: {told}\n"


def test_every_field_of_transformers_is_an_option_or_told(folder: Path, tmp_path: Path) -> None:
    """The fields of GenerationConfig 5.23 that have a meaning for text: none is left out."""
    fields = "speculation_type assistant_early_exit use_mtp"
    own = copied(folder, tmp_path / "a", **dict.fromkeys(fields.split(), 1))
    assert ignored(own).endswith(f"no effect here: {', '.join(fields.split())}")
    assert ignored(folder) == ignored(None) == ""


LEAST = {"min_new_tokens": 1}


def test_a_least_number_of_new_tokens_takes_the_place_of_a_length(
    folder: Path, greedy: Any, tmp_path: Path
) -> None:
    own = copied(folder, tmp_path / "a", eos_token_id=greedy[0][3], min_length=20)
    first = greedy[0].index(greedy[0][3])
    found = [gg.generate(own, PROMPTS[0], max_new_tokens=20, **o) for o in ({}, LEAST)]
    assert [len(list(one)) > first + 1 for one in found] == [True, False]


def test_a_length_that_the_prompt_has_already_is_refused(folder: Path, tmp_path: Path) -> None:
    own = copied(folder, tmp_path / "a", max_length=9)
    with pytest.raises(GraphgenError, match="max_length is 9, and a row begins with 9 tokens; giv"):
        gg.generate(own, PROMPTS)
    assert len(list(gg.generate(own, PROMPTS, max_new_tokens=2))) == 2
    assert len(list(gg.generate(own, PROMPTS[1:]))) == 5


def test_the_first_token_that_is_not_forced_is_the_one_to_suppress_at_the_beginning(
    generator: Generator, logits_after: Any
) -> None:
    free = int(logits_after([3, 7]).argmax())
    found = generator([3], max_new_tokens=2, forced_bos=[7], begin_suppress_tokens=[free])
    list(found)
    assert found.tokens[0][0] == 7 and found.tokens[0][1] != free
    unforced = generator([3, 7], max_new_tokens=1, begin_suppress_tokens=[free])
    list(unforced)
    assert unforced.tokens[0] == found.tokens[0][1:]


def test_what_is_forced_may_be_suppressed_and_the_end_is_forced_last(generator: Generator) -> None:
    """As in transformers, where the processors that force come before those that suppress."""
    found = generator([3], max_new_tokens=1, forced_bos=[7], forced_eos=[8, 9], suppress_tokens=[8])
    assert list(found) == [[9]]
    with pytest.raises(GraphgenError, match="no token may come next"):
        list(generator([3], max_new_tokens=2, forced_bos=[7], suppress_tokens=[7]))

    def other(tokens: Any, logits: Any) -> Any:
        return np.where(np.arange(len(logits)) == 5, 1.0, logits)

    assert list(generator([3], max_new_tokens=1, forced_bos=[7], logits_processors=other)) == [[5]]


def test_the_end_is_forced_where_the_first_row_has_ended_before(
    generator: Generator, greedy: Any
) -> None:
    end = next(t for t in greedy[0] if t not in {*greedy[1], *greedy[2]})
    found = generator(PROMPTS, max_new_tokens=20, eos=[end], forced_eos=[8])
    list(found)
    assert found.tokens[0][-1] == end and len(found.tokens[0]) < 20
    assert found.tokens[1:] == [[*row[:19], 8] for row in greedy[1:]]


def test_a_token_to_stop_at_waits_for_the_least_number(generator: Generator, greedy: Any) -> None:
    stop = greedy[0][:1]
    found = generator(PROMPTS[0], max_new_tokens=9, min_new_tokens=4, stop=stop)
    assert len(list(found)) > 4 and stop[0] not in found.tokens[0][:4]


def test_renormalized_scores_sum_to_one() -> None:
    scores, options = np.array([[1.0, 2.0, 3.0]]), Options(suppress_tokens=[1])
    assert processed(scores, [[0]], options, step=0).tolist() == [[1, -np.inf, 3]]
    options = Options(suppress_tokens=[1], renormalize_logits=True)
    chances = np.exp(processed(scores, [[0]], options, step=0))
    assert chances[0, 1] == 0 and abs(chances.sum() - 1) < 1e-12


def test_the_context_ends_every_row(generator: Generator) -> None:
    found = generator([list(range(1, CONTEXT - 3)), [4]], max_new_tokens=50)
    list(found)
    assert [len(row) for row in found.tokens] == [4, 4]


@pytest.mark.parametrize(
    ("options", "lacking"),
    [({"top_k": 3}, "a temperature above 0"), ({"length_penalty": 2}, "beams above 1")],
)
def test_what_changes_nothing_is_told(
    generator: Generator, options: dict[str, Any], lacking: str
) -> None:
    with pytest.warns(
        gg.GraphgenWarning, match=f"{min(options)} changes nothing without {lacking}"
    ):
        gg.generate(generator, [[1]], max_new_tokens=2, **options)


@pytest.mark.parametrize(
    "prompts, options, told",
    [
        ("", {}, "prompt 0 is empty"),
        ([[1], []], {}, "prompt 1 is empty"),
        ([], {}, "there is no prompt"),
        ([[1, 96]], {}, "tokens from 1 to 96; the model has tokens 0 to 95"),
        ([[1] * 64], {}, "64 tokens, and the model's context 64"),
        ([1], {"beam": 2}, "no option 'beam'; there are max_new_tokens,"),
        ([1], {"beams": 0}, "beams is 0; it must be a whole number of at least 1"),
        ([1], {"beams": 2, "temperature": 0.5}, "2 beams at temperature 0.5"),
        ([1], {"temperature": -1}, "temperature is -1; it must be a number of at least 0"),
        ([1], {"temperature": True}, "temperature is True"),
        ([1], {"top_p": 1.5}, "top_p is 1.5; it must be a number of at least 1e-09 and at most 1"),
        ([1], {"max_new_tokens": 0}, "max_new_tokens is 0"),
        ([1], {"max_new_tokens": 2.5}, "max_new_tokens is 2.5"),
        ([1], {"stop": [""]}, r"stop is \[''\]; give tokens or strings"),
        ([1], {"stop": 2.5}, "stop is 2.5; give tokens or strings"),
        ([1], {"eos": "x"}, "eos is 'x'; give tokens, whole numbers of at least 0"),
        ([1], {"suppress_tokens": [96]}, "suppress_tokens has token 96; the model has tokens 0"),
        ([1], {"forced_eos": [-1]}, r"forced_eos is \[-1\]; give tokens"),
        ([1], {"suppress_tokens": range(96), "temperature": 1.0}, "no token may come next"),
        ([1], {"suppress_tokens": range(96), "beams": 2}, "no token may come next"),
        ([1], {"temperature": float("nan")}, "temperature is nan; it must be a number"),
        ([1], {"length_penalty": "a"}, "length_penalty is 'a'; it must be a number"),
        ([1], {"length_penalty": 1e6}, "of at least -8 and at most 8"),
        ([1], {"max_length": "a"}, "max_length is 'a'; it must be a whole number of at least 1"),
        ([1], {"min_length": -1}, "min_length is -1"),
        ([1], {"context": 10**9, "max_new_tokens": 10**12}, "give fewer max_new_tokens"),
        (None, {}, "there is no prompt"),
        ([None, 5], {}, "prompt 0 is empty"),
        ([[1.5]], {}, r"prompt 0 is \[1.5\]; give a text, a list of tokens, or"),
        ([[3], [True]], {}, r"prompt 1 is \[True\]; give a text"),
        ([1], {"early_stopping": "soon"}, "early_stopping is 'soon'"),
        (b"ab", {}, "prompt 0 is b'ab'; give a text, a list of tokens"),
        (np.array(3), {}, r"prompt 0 is array\(3\); give a text, a list of tokens"),
    ],
)
def test_bad_input(generator: Generator, prompts: Any, options: Any, told: str) -> None:
    with pytest.raises(GraphgenError, match=told):
        next(generator(prompts, **options))


def test_options_may_be_numbers_of_numpy(generator: Generator) -> None:
    found = generator([[3, 4]], max_new_tokens=np.int64(9), temperature=np.float32(0))
    [first, second, *_] = (token for [token] in found)
    ends = np.array([second])
    assert [row for [row] in generator([[3, 4]], stop=ends)] == [first, second]


@pytest.mark.parametrize(
    "given", [{"threads": 2}, {"provider": "cuda"}, {"strict": True}, {"chunk": 1}]
)
def test_an_open_generator_has_its_own_way_to_run(generator: Generator, given: Any) -> None:
    with pytest.raises(GraphgenError, match=f"is open already; give {min(given)} when you open"):
        gg.generate(generator, [[1]], **given)


@pytest.mark.parametrize(
    "fields, told",
    [
        ({"bad_words_ids": 5}, r"bad_words_ids is \[5\]; give lists of tokens, or remove it"),
        ({"bad_words_ids": [[1], []]}, r"bad_words_ids is \[\[1\], \[\]\]; give lists of tokens"),
        ({"bad_words_ids": [["a"]]}, r"bad_words_ids is \[\['a'\]\]; give lists of tokens"),
        ({"eos_token_id": [["a"]]}, "eos is .*; give tokens"),
        ({"max_position_embeddings": "a"}, "context is 'a'; it must be a whole number"),
        ({"cache_implementation": "quantized"}, "which rounds keys and values; remov"),
        ({"vocab_size": -1}, "vocabulary is -1; it must be a whole number of at least 1"),
    ],
)
def test_bad_fields(folder: Path, tmp_path: Path, fields: Any, told: str) -> None:
    with pytest.raises(GraphgenError, match=told):
        read_options(copied(folder, tmp_path / "a", **fields))


@pytest.mark.parametrize(
    "fields, code, told",
    [
        ({"eos_token_id": "9"}, 2, "eos is '9'; give tokens"),
        ({"num_beams": 1.5}, 2, "beams is 1.5; it must be a whole number"),
        ({"forced_bos_token_id": 500}, 0, "forced_bos has token 500; the model has tokens 0 to"),
        ({"eos_token_id": [500, -1]}, 0, "the model lacks: eos_token_id 500, -1"),
        ({"guidance_scale": 2.0}, 0, "guidance_scale is 2.0, which has no option here"),
        ({"num_return_sequences": 2}, 0, "num_return_sequences is 2, but 1 beam"),
    ],
)
def test_a_build_says_what_generate_would_refuse_or_leave_out(
    tmp_path: Path, fields: Any, code: int, told: str, capsys: Any
) -> None:
    """A wrong kind is refused; what has a meaning elsewhere, or with other options, is told."""
    source = random_checkpoint(tmp_path, CAUSAL["gpt2"])
    (source / "generation_config.json").write_text(json.dumps(fields))
    assert commands.main(["build", str(source), "-o", str(tmp_path / "out")]) == code
    shown = capsys.readouterr()
    assert told in (shown.err if code else shown.out)
    assert (tmp_path / "out").exists() == (code == 0)


@pytest.mark.parametrize("name", ["eos_token_id", "suppress_tokens", "begin_suppress_tokens"])
def test_a_token_that_the_model_lacks_never_comes(
    folder: Path, greedy: Any, tmp_path: Path, name: str
) -> None:
    """A small GPT-2 keeps the 50256 of its class; what a caller gives has to be a token."""
    fields = {"eos_token_id": [50256]} | {name: [50256, greedy[0][4]]}
    own = copied(folder, tmp_path / "a", **fields)
    with pytest.warns(gg.GraphgenWarning, match=f"that the model lacks: .*{name} 50256"):
        generator = Generator(own, threads=1)
    assert getattr(generator([[3]]).options, name.removesuffix("_token_id")) == [greedy[0][4]]
    ends = copied(folder, tmp_path / "b", eos_token_id=greedy[0][4])
    if name == "eos_token_id":
        found, wanted = (x([PROMPTS[0]], max_new_tokens=9) for x in (generator, Generator(ends)))
        assert [*found] == [*wanted] and len(found.tokens[0]) == 5
    with pytest.raises(GraphgenError, match="eos has token 50256; the model has tokens 0"):
        generator([[3]], eos=50256)


def test_low_temperatures_take_the_likeliest(generator: Generator, greedy: Any) -> None:
    found = generator(PROMPTS, temperature=1e-310, max_new_tokens=20)
    list(found)
    assert found.tokens == greedy


def test_bad_folders(folder: Path, graph: Any, tmp_path: Path) -> None:
    with pytest.raises(GraphgenError, match="chunk is 0"):
        gg.generate(graph, [1], chunk=0)
    with pytest.raises(GraphgenError, match=r"the model has no tokenizer\.json"):
        gg.generate(graph, "text")
    with pytest.raises(GraphgenError, match=r"has no model\.onnx; write it with graphgen build"):
        gg.generate(tmp_path, [1])
    with pytest.raises(GraphgenError, match="got a int; give a folder or a model"):
        gg.generate(7, [1])
    block = gg.build(gg.models.create("block"), **gg.models.find("block").inputs())
    with pytest.raises(GraphgenError, match="a decoder has the inputs input_ids, attention_mask"):
        gg.generate(block, [1])
    refused = copied(folder, tmp_path / "refused", guidance_scale=2.0)
    with pytest.raises(GraphgenError, match=r"guidance_scale is 2\.0, which has no option here"):
        gg.generate(refused, [1])
    larger = copied(folder, tmp_path / "larger")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({chr(i): i for i in range(200)}, []))
    tokenizer.save(str(larger / "tokenizer.json"))
    with pytest.raises(GraphgenError, match="has 200 tokens and the model 96: it belongs"):
        gg.generate(larger, "a")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 1}, unk_token="[UNK]"))
    words.save(str(larger / "tokenizer.json"))
    with pytest.raises(GraphgenError, match=r"does not split the text 'b': .*Missing \[UNK\]"):
        gg.generate(larger, "b")
    (larger / "tokenizer.json").write_text("{}")
    with pytest.raises(GraphgenError, match=r"tokenizer\.json is not a tokenizer"):
        gg.generate(larger, "a")


def test_the_command(folder: Path, greedy: Any, capsys: Any) -> None:
    def run(*words: str) -> str:
        assert commands.main(["generate", str(folder), "--max-new-tokens", "20", *words]) == 0
        captured = capsys.readouterr()
        assert captured.err == ""
        return str(captured.out)

    ids = [",".join(map(str, prompt)) for prompt in PROMPTS]
    lines = run(*(word for row in ids for word in ("--ids", row))).splitlines()
    assert lines[:3] == [",".join(map(str, row)) for row in greedy]
    assert lines[3].startswith("prefill     14 tokens") and lines[3].endswith(" tokens/s")
    assert lines[4].startswith("decode      57 tokens")
    text = "".join(chr(32 + t) for t in PROMPTS[0])
    spoken = "".join(chr(32 + t) for t in greedy[0] if t < VOCABULARY - 1)
    assert run("--prompt", text).startswith(f"{spoken}\n")
    document = json.loads(run("--prompt", text, "--stop", spoken[6:8], "--beams", "1", "--json"))
    schema = json.loads((DOCS / "generate.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(document, schema)
    assert document["rows"][0]["text"] == spoken[: spoken.index(spoken[6:8])]
    assert document["rows"][0]["tokens"] == greedy[0][: len(document["rows"][0]["tokens"])]
    stopped = run("--ids", ids[0], "--stop", f"#{greedy[0][4]}").splitlines()[0]
    assert stopped == ",".join(map(str, greedy[0][: greedy[0].index(greedy[0][4]) + 1]))


@pytest.mark.parametrize(
    "words, told",
    [
        ([], "generate needs a --prompt, --ids, --chat or --audio"),
        (["--ids", "1,b"], "'1,b' is not INT,INT,..."),
        (["--ids", "1", "--top-k", "-3"], "top_k is -3"),
    ],
)
def test_bad_commands(folder: Path, words: list[str], told: str, capsys: Any) -> None:
    assert commands.main(["generate", str(folder), *words]) == 2
    assert told in capsys.readouterr().err


def test_strict_reaches_the_runtime(folder: Path, capsys: Any, monkeypatch: Any) -> None:
    pretend_no_placement(monkeypatch)
    assert commands.main(["generate", str(folder), "--ids", "1", "--strict"]) == 2
    assert "strict: onnx" in capsys.readouterr().err


def test_a_cache_without_known_heads_is_refused() -> None:
    kind = TensorType(np.dtype(np.float32), ("batch", 1, 8, "past"))
    with pytest.raises(
        gg.GraphgenError, match=r"float32\[batch, 1, 8, past\]; its second and last"
    ):
        sized("past_key_values.0.key", kind, 1, 0)


@pytest.mark.parametrize(
    ("prompt", "tokens", "warned"), [(3, 5, False), (3, 6, True), (8, 1, True), (9, 6, False)]
)
def test_a_text_that_grows_beyond_the_short_factors_is_warned_of(
    folder: Path, tmp_path: Path, prompt: int, tokens: int, warned: bool, recwarn: Any
) -> None:
    own = copied(folder, tmp_path / "a")
    rope = {"rope_type": "longrope", "long_factor": [2.0], "original_max_position_embeddings": 8}
    (own / "config.json").write_text(json.dumps({**CONFIG, "rope_parameters": rope}))
    Generator(own, threads=1)([[1] * prompt], max_new_tokens=tokens)
    told = [str(one.message) for one in recwarn if one.category is gg.GraphgenWarning]
    assert [("beyond 8 tokens" in text) for text in told] == [True] * warned


def test_a_decoder_starts_without_a_choice_of_adapters(folder: Path) -> None:
    decoder = Generator(folder, threads=1).decoder
    logits = decoder.start(PROMPTS[:1], 2)
    assert np.isfinite(logits).all() and np.isfinite(decoder.step(np.array([1]))).all()
