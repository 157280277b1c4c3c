"""Batch inference over files: the same rows and numbers from one process and from a Ray cluster."""

import importlib.util
import json
import math
import os
import shutil
import signal
import stat
import sys
from functools import partial
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from small_models import pretend_no_placement, relative_rms, vary
from test_checkpoints import random_checkpoint
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import graphgen as gg
from graphgen import batch, nn, ops
from graphgen.batch.engines import on_ray
from graphgen.batch.texts import Texts
from graphgen.commands import main
from graphgen.errors import GraphgenError
from graphgen.export.folders import MODEL
from graphgen.export.rows import scan
from graphgen.generation import Generator
from graphgen.models.encoder import EncoderModel, inputs
from graphgen.models.published import FAMILIES
from graphgen.models.published.config import Config
from graphgen.nn.module import Parameter, members
from graphgen.passes.training.adapters import linears

ray_is_there = importlib.util.find_spec("ray") is not None
needs_ray = pytest.mark.skipif(not ray_is_there, reason="ray is not installed: run `make test-ray`")

WORDS = ["unk", *(f"w{i}" for i in range(39))]
LENGTH = 24
TYPES = "token_type_ids"


class Classifier(nn.Module):
    """Logits of two labels of a text, or of each of its tokens."""

    def __init__(self, *, each):
        self.encoder, self.each = EncoderModel(len(WORDS), 16, layers=1, length=LENGTH), each
        self.head = nn.Linear(16, 2)

    def __call__(self, input_ids, attention_mask, token_type_ids):
        x = self.encoder(input_ids, attention_mask, token_type_ids)["last_hidden_state"]
        y = self.head(x)
        return {"logits": y if self.each else ops.squeeze(ops.slice_(y, [0], [1], [1]), [1])}


def write(folder, module):
    """A folder as `graphgen build` writes them."""
    (folder / MODEL).parent.mkdir(parents=True)
    random = np.random.default_rng(3)
    weights = {
        path: random.normal("norm.weight" in path, "bias" not in path, found.shape).astype("f")
        for path, found in members(module)
        if isinstance(found, Parameter)
    }
    gg.export(gg.build(module, weights=weights, **inputs()), folder / MODEL)
    config = {"model_type": "bert", "vocab_size": len(WORDS), "max_position_embeddings": LENGTH}
    config["id2label"] = {"0": "bad", "1": "good"}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, "unk"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.enable_padding(length=LENGTH)  # as published ones do, and nobody wants
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    module = EncoderModel(len(WORDS), 16, layers=2, length=LENGTH)
    return write(tmp_path_factory.mktemp("encoder"), module)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """150 rows: texts of many lengths, tokens, columns that not all have, an empty line."""
    random, lines = np.random.default_rng(0), []
    for i in range(150):
        ids = random.integers(0, len(WORDS), random.integers(1, LENGTH + 1)).tolist()
        row = {"n": i, "text": " ".join(WORDS[j] for j in ids)} if i % 3 else {"n": i, "ids": ids}
        row |= {"late": {"a": i}} if i > 100 else {}
        row |= {"real": i / 2} if i == 120 else {"real": i}
        lines.append(json.dumps(row))
    file = tmp_path_factory.mktemp("data") / "in.jsonl"
    file.write_text("\n".join([*lines[:70], "", *lines[70:]]) + "\n")
    return file


def tokens(row):
    return row["ids"] or [WORDS.index(word) for word in row["text"].split()]


def alone(folder, row):
    """The outputs of a row that is run by itself, without padding."""
    ids = np.array([tokens(row)])
    session = gg.Session(folder / MODEL)
    given = dict(zip(inputs(), (ids, ids * 0 + 1, ids * 0), strict=True))
    return dict(zip(session.outputs, session(given), strict=True))


def test_embeddings_are_the_means_of_the_vectors(encoder, data, tmp_path):
    out = tmp_path / "out.parquet"
    command = ["map", encoder, "--data", data, "--out", out, "--batch", 4, "--workers", 2]
    assert main([str(word) for word in command]) == 0
    rows = pq.read_table(out).to_pylist()
    assert [row["n"] for row in rows] == list(range(150))
    assert {row["late"]["a"] if row["late"] else None for row in rows} == {None, *range(101, 150)}
    assert rows[7]["real"] == 7.0 and rows[120]["real"] == 60.0
    for row in rows[::10]:
        (wanted,) = alone(encoder, row)["last_hidden_state"].mean(1)
        assert relative_rms(row["embedding"], wanted) < 1e-6
    assert [path.name for path in tmp_path.iterdir()] == ["out.parquet"]
    assert pq.read_schema(out).field("embedding").type == pa.list_(pa.float32())


@needs_ray
def test_ray_is_started_where_it_does_not_run_and_stopped_again(encoder, data, tmp_path):
    import ray

    assert not ray.is_initialized()
    assert batch.map_file(encoder, data, tmp_path / "out.parquet", engine="ray", workers=1) == 150
    assert not ray.is_initialized()


@pytest.mark.parametrize("engine", ["local", pytest.param("ray", marks=needs_ray)])
def test_rows_are_read_from_every_kind_of_table(engine, encoder, tmp_path, request):
    kinds = ["a.jsonl", "a.csv", "a.parquet", "a.arrow", "saved"]
    if engine == "ray":  # which takes lines or slices, whatever they come from
        request.getfixturevalue("cluster")
        kinds = ["a.jsonl", "saved"]
    rows = [{"text": " ".join(WORDS[1 : 2 + i % 7]), "n": str(i)} for i in range(70)]
    table = pa.Table.from_pylist(rows)
    odd = pa.array([1234567891] * 70, pa.timestamp("ns"))  # no time of Python
    folder = tmp_path / "saved"
    folder.mkdir()
    (tmp_path / "a.jsonl").write_text("\ufeff" + "\n".join(map(json.dumps, rows)), "utf-8")
    csv = "".join(f"{row['text']},{row['n']}\n" for row in rows)
    (tmp_path / "a.csv").write_text(f"\ufefftext,n\n{csv}", "utf-8")
    for file in (tmp_path / "a.parquet", folder / "0.parquet"):
        pq.write_table(table, file, row_group_size=9)
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as f, pa.ipc.new_file(f, table.schema) as w:
        w.write_table(table)
    found = []
    for name in kinds:
        out = tmp_path / "out.parquet"
        how = {"engine": engine, "batch": 2, "workers": 2}
        assert batch.map_file(encoder, tmp_path / name, out, **how) == 70
        found.append(pq.read_table(out))
    assert all(one.equals(found[0]) for one in found)
    pq.write_table(table.append_column("time", odd), tmp_path / "a.parquet")
    assert batch.map_file(encoder, tmp_path / "a.parquet", tmp_path / "out.parquet") == 70
    copied = pq.read_table(tmp_path / "out.parquet").column("time")
    assert copied.combine_chunks().equals(odd)
    assert found[0].column("n").to_pylist() == [row["n"] for row in rows]


def test_a_bad_row_of_a_table_is_named(encoder, tmp_path, capsys):
    (file := tmp_path / "in.csv").write_text("text,n\nw1,1\n,2\n")
    refused(capsys, "in.csv, line 3 has 0 tokens", encoder, file, tmp_path / "out.parquet")
    file = tmp_path / "in.parquet"
    pq.write_table(pa.table({"text": ["w1", None]}), file)
    refused(capsys, "in.parquet, row 2 has neither `text`", encoder, file, tmp_path / "out.parquet")
    missing = tmp_path / "no.parquet"
    refused(capsys, "cannot be read: No such file", encoder, missing, tmp_path / "out.parquet")


def test_sentence_embeddings_go_before_means(tmp_path, data):
    class Sentence(nn.Module):
        def __init__(self):
            self.encoder = EncoderModel(len(WORDS), 16, layers=1, length=LENGTH)

        def __call__(self, **given):
            x = self.encoder(**given)["last_hidden_state"]
            first = ops.squeeze(ops.slice_(x, [0], [1], [1]), [1])
            return {"last_hidden_state": x, "sentence_embedding": first}

    folder = write(tmp_path / "sentence", Sentence())
    batch.map_file(folder, data, tmp_path / "out.parquet", batch=8)
    row = pq.read_table(tmp_path / "out.parquet").to_pylist()[5]
    assert np.allclose(row["embedding"], alone(folder, row)["sentence_embedding"], atol=1e-6)


@pytest.mark.parametrize("each", [False, True])
def test_labels_are_the_likeliest(each, tmp_path, data):
    folder = write(tmp_path / "classifier", Classifier(each=each))
    batch.map_file(folder, data, tmp_path / "out.parquet", batch=8)
    plural = "s" if each else ""
    rows = pq.read_table(tmp_path / "out.parquet").to_pylist()
    found = []
    for row in rows[:40]:
        (logits,) = alone(folder, row)["logits"]
        e = np.exp(logits - logits.max(-1, keepdims=True))
        best = logits.argmax(-1)
        names = np.array(["bad", "good"])[best].tolist()
        assert row[f"label{plural}"] == names
        assert np.allclose(row[f"score{plural}"], (e / e.sum(-1, keepdims=True)).max(-1))
        found += names if each else [names]
    assert {*found} == {"bad", "good"}


def test_labels_that_do_not_exclude_each_other(tmp_path, data):
    folder = write(tmp_path / "classifier", Classifier(each=False))
    config = json.loads((folder / "config.json").read_text())
    config |= {"problem_type": "multi_label_classification", "id2label": None}
    (folder / "config.json").write_text(json.dumps(config))
    batch.map_file(folder, data, tmp_path / "out.parquet")
    row = pq.read_table(tmp_path / "out.parquet").to_pylist()[0]
    (logits,) = alone(folder, row)["logits"]
    assert row["label"] == f"LABEL_{logits.argmax()}"
    assert np.isclose(row["score"], 1 / (1 + np.exp(-logits.max())))


class Relevance(Classifier):
    """One logit of a text."""

    def __init__(self):
        super().__init__(each=False)
        self.head = nn.Linear(16, 1)


PAIRS = [{"text": "w1 w2", "text_pair": "w3 w4 w5"}, {"text": "w1 w2"}, {"ids": [1, 2, 3]}]
SCORES = {
    "torch.nn.modules.linear.Identity": lambda x: x,
    "torch.nn.modules.activation.Tanh": np.tanh,
    "torch.nn.modules.activation.Sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    None: lambda x: 1 / (1 + np.exp(-x)),
}


@pytest.mark.parametrize(
    "field", ["sentence_transformers", "sbert_ce_default_activation_function", "a file of its own"]
)
@pytest.mark.parametrize("activation", SCORES)
def test_cross_encoders_score_as_their_configuration_says(activation, field, tmp_path):
    """Two texts are one, by the tokenizer; its second half has types of its own."""
    folder, file = write(tmp_path / "relevance", Relevance()), tmp_path / "in.jsonl"
    config = json.loads((folder / "config.json").read_text()) | {"id2label": {"0": "LABEL_0"}}
    config[field] = {"activation_fn": activation} if field[1] == "e" else activation
    if field[0] == "a":
        noted = {"model_type": "CrossEncoder", "activation_fn": config.pop(field)}
        (folder / "config_sentence_transformers.json").write_text(json.dumps(noted))
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    parts = {"single": "$A", "pair": "$A w9 $B:1", "special_tokens": [("w9", 10)]}
    tokenizer.post_processor = processors.TemplateProcessing(**parts)
    tokenizer.save(str(folder / "tokenizer.json"))
    file.write_text("\n".join(map(json.dumps, PAIRS)))
    assert batch.map_file(folder, file, tmp_path / "out.parquet") == 3
    session = gg.Session(folder / MODEL)
    rows = pq.read_table(tmp_path / "out.parquet").to_pylist()
    for row, (ids, types) in zip(
        rows,
        [([2, 3, 10, 4, 5, 6], [0] * 3 + [1] * 3), ([2, 3], [0] * 2), ([1, 2, 3], [0] * 3)],
        strict=True,
    ):
        ids, types = np.array([ids]), np.array([types])
        [[[logit]]] = session({"input_ids": ids, "attention_mask": ids * 0 + 1} | {TYPES: types})
        assert abs(logit) > 0.1
        assert row["label"] == "LABEL_0"
        assert np.isclose(row["score"], SCORES[activation](logit), rtol=1e-5)


def test_a_regression_gives_its_logit(tmp_path, data):
    folder = write(tmp_path / "relevance", Relevance())
    config = json.loads((folder / "config.json").read_text())
    config |= {"problem_type": "regression", "id2label": None}
    (folder / "config.json").write_text(json.dumps(config))
    batch.map_file(folder, data, tmp_path / "out.parquet")
    row = pq.read_table(tmp_path / "out.parquet").to_pylist()[0]
    [[logit]] = alone(folder, row)["logits"]
    assert np.isclose(row["score"], logit, rtol=1e-5)


def looked(folder, row, **settings):
    """The tokens of a row, and their types."""
    return Texts(folder, 3, **{"truncate": True, **settings}).look(row, "row 1")


def test_the_configuration_of_a_tokenizer_says_where_to_cut(encoder, tmp_path):
    folder, row = shutil.copytree(encoder, tmp_path / "own"), {"text": "w1 w2 w3 w4 w5"}
    assert looked(folder, row).ids == [2, 3, 4]
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({"truncation_side": "left"}))
    assert looked(folder, row).ids == [4, 5, 6]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(9, direction="left")
    tokenizer.save(str(folder / "tokenizer.json"))
    file.write_text("{}")
    assert looked(folder, row).ids == [4, 5, 6]
    file.write_text(json.dumps({"truncation_side": "middle"}))
    with pytest.raises(GraphgenError, match="truncation_side is 'middle'; it must be 'left' or"):
        looked(folder, row)


def test_the_configuration_of_a_tokenizer_says_whether_special_tokens_are_split(encoder, tmp_path):
    folder, row = shutil.copytree(encoder, tmp_path / "own"), {"text": "w1[end]"}
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["[end]"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 1000}))
    end = tokenizer.token_to_id("[end]")
    for given, last in (("{}", [end]), ('{"split_special_tokens": true}', [0, 0])):
        (folder / "tokenizer_config.json").write_text(given)
        assert looked(folder, row).ids == [2, *last]


def test_types_of_tokens_are_given_where_the_model_reads_them(encoder, tmp_path):
    folder = shutil.copytree(encoder, tmp_path / "own")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B:1")
    tokenizer.save(str(folder / "tokenizer.json"))
    row, names = {"text": "w1", "text_pair": "w2"}, ["input_ids", "attention_mask"]
    assert looked(folder, row) == ([2, 3], [0, 1])
    for given, types in (([*names, TYPES], [0, 1]), (names, [0, 0])):
        told = json.dumps({"model_input_names": given})
        (folder / "tokenizer_config.json").write_text(told)
        assert looked(folder, row).types == types


def test_the_default_prompt_of_sentence_transformers_goes_before_texts(encoder, tmp_path):
    folder, row = shutil.copytree(encoder, tmp_path / "own"), {"text": "w1"}
    file = folder / "config_sentence_transformers.json"
    prompts = {"query": "w5 ", "document": ""}
    for name, wanted in ((None, [2]), ("query", [6, 2]), ("document", [2])):
        file.write_text(json.dumps({"prompts": prompts, "default_prompt_name": name}))
        assert looked(folder, row).ids == wanted
    file.write_text(json.dumps({"prompts": prompts, "default_prompt_name": "passage"}))
    with pytest.raises(GraphgenError, match="default_prompt_name is 'passage', but prompts has no"):
        looked(folder, row)


def test_an_activation_that_is_not_known(tmp_path, data, capsys):
    folder = write(tmp_path / "relevance", Relevance())
    config = json.loads((folder / "config.json").read_text())
    config["sentence_transformers"] = {"activation_fn": "torch.nn.modules.activation.Mish"}
    (folder / "config.json").write_text(json.dumps(config | {"id2label": None}))
    refused(capsys, "is 'torch.*Mish'; known are Identity", folder, data, tmp_path / "out.parquet")


def test_long_texts_are_cut_where_asked(encoder, tmp_path):
    file, out = tmp_path / "in.jsonl", tmp_path / "out.parquet"
    file.write_text(json.dumps({"text": "w1 " * 50}) + "\n" + json.dumps({"text": "w1 " * LENGTH}))
    assert batch.map_file(encoder, file, out, truncate=True) == 2
    first, second = pq.read_table(out)["embedding"].to_pylist()
    assert first == second


def test_what_build_writes_is_taken(tmp_path, capsys, monkeypatch):
    """A RoBERTa, whose first positions belong to padding; other tasks are refused by name."""
    monkeypatch.chdir(tmp_path)
    file, out = tmp_path / "in.jsonl", tmp_path / "out.parquet"
    lines = [json.dumps({"ids": [5] * count}) for count in (3, 12)]
    file.write_text("\n".join(lines))
    for task, columns in (
        ("text-classification", ["label", "score"]),
        ("feature-extraction", ["embedding"]),
        ("fill-mask", None),
    ):
        random_checkpoint(tmp_path, "roberta", task)
        assert main(["build", ".", "-o", task, "--task", task]) == 0
        capsys.readouterr()
        if columns is None:
            refused(capsys, "to fill masks, it needs tokenizer.json", task, file, out)
            continue
        assert batch.map_file(task, file, out) == 2
        assert pq.read_schema(out).names == ["ids", *columns]
    file.write_text(json.dumps({"ids": [5] * 13}))
    refused(capsys, "line 1 has 13 tokens; it must have 1 to 12", "feature-extraction", file, out)


def test_texts_of_different_lengths_are_classified_by_a_decoder(tmp_path, data):
    folder = write(tmp_path / "decoder", Classifier(each=False))
    fields = {**CAUSAL, "pad_token_id": 0, "num_labels": 3}
    module = vary(FAMILIES["llama"].tasks["text-classification"](Config(fields)))
    gg.export(gg.optimize(gg.build(module, **module.inputs())), folder / MODEL)
    (folder / "config.json").write_text(json.dumps(fields))
    batch.map_file(folder, data, tmp_path / "out.parquet", batch=8)
    rows, session = pq.read_table(tmp_path / "out.parquet").to_pylist(), gg.Session(folder / MODEL)
    for row in rows[::10]:
        ids = np.array([tokens(row)])
        [[logits]] = session({"input_ids": ids, "attention_mask": ids * 0 + 1})
        e = np.exp(logits - logits.max())
        assert row["label"] == f"LABEL_{logits.argmax()}"
        assert np.isclose(row["score"], e.max() / e.sum(), rtol=1e-5)
    assert len({row["label"] for row in rows}) == 3


GOOD = '{"text": "w1 w2"}'
BAD = {
    "no JSON": ('{"text": "w1"', r"line 2: .*delimiter"),
    "a name twice": ('{"text": "w1", "text": "w2"}', "line 2: two values .* are called 'text'"),
    "no object": ("[1]", "line 2: a list, not an object"),
    "no text": ('{"txt": "w1"}', "line 2 has neither `text`, a string, nor `ids`"),
    "text is a number": ('{"text": 3}', "line 2 has neither"),
    "ids of no token": ('{"ids": [1, 40]}', "line 2 .* numbers from 0 to 39"),
    "ids are no numbers": ('{"ids": [1, 2.5]}', "line 2 has neither"),
    "ids and a text": ('{"text": "w1", "ids": [1]}', "line 2 has `ids` and `text`; give one of"),
    "too long": (json.dumps({"text": "w1 " * 25}), "line 2 has 25 tokens; it must have 1 to 24"),
    "empty": ('{"text": ""}', "line 2 has 0 tokens"),
    "types": ('{"text": "w1", "x": 1}\n{"text": "w1", "x": "a"}', "lines 1 to 3: .*type"),
    "truth": (
        '{"text": "w1", "x": {"a": [1.5]}}\n{"text": "w1", "x": {"a": [true]}}',
        "lines 1 to 3: 'x' has true among numbers",
    ),
    "not UTF-8": (b'{"text": "\xff"}', "line 2: .*utf-8"),
    "half a character": (r'{"text": "\ud800"}', "surrogates|line 2"),
    "taken": ('{"text": "w1", "embedding": 1}', "has a column 'embedding'"),
    "large": (f'{{"text": "w1", "x": {2**70}}}', "lines 1 to 2"),
}


@pytest.mark.parametrize("engine", ["local", pytest.param("ray", marks=needs_ray)])
@pytest.mark.parametrize("case", BAD)
def test_bad_lines_are_named_before_any_is_run(case, engine, encoder, tmp_path, capsys):
    line, told = BAD[case]
    file = tmp_path / "in.jsonl"
    file.write_bytes(f"{GOOD}\n".encode() + (line if isinstance(line, bytes) else line.encode()))
    refused(capsys, told, encoder, file, tmp_path / "out.parquet", "--engine", engine)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_an_output_of_another_kind_is_refused(encoder, tmp_path, capsys):
    (file := tmp_path / "in.jsonl").write_text(GOOD)
    refused(capsys, "writes Parquet, .*ends in .jsonl", encoder, file, tmp_path / "out.jsonl")


def test_strict_reaches_the_runtime(encoder, tmp_path, capsys, monkeypatch):
    pretend_no_placement(monkeypatch)
    (file := tmp_path / "in.jsonl").write_text(GOOD)
    refused(capsys, "strict: onnx", encoder, file, tmp_path / "out.parquet", "--strict")


def test_a_link_to_itself_is_refused(encoder, tmp_path, capsys):
    (tmp_path / "in.jsonl").symlink_to("in.jsonl")
    refused(capsys, "symbolic links", encoder, tmp_path / "in.jsonl", tmp_path / "out.parquet")
    assert main(["map", str(tmp_path / "in.jsonl"), "--data", "x", "--out", "y.parquet"]) == 2


def test_a_file_that_grows_is_read_to_where_it_ended(tmp_path, monkeypatch):
    (tmp_path / "in.jsonl").write_text('{"id": 1}\n{"id": 2}' + " " * 10000)
    opened = SimpleNamespace(st_size=19, st_mode=stat.S_IFREG)
    monkeypatch.setattr(os, "fstat", lambda _: opened)
    rows = []
    lines = scan(tmp_path / "in.jsonl", 4, lambda row, where: rows.append(row))
    assert [lines.spans, rows] == [[{"offset": 0, "size": 19}], [{"id": 1}, {"id": 2}]]


def refused(capsys, told, folder, data, out, *more):
    command = ["map", folder, "--data", data, "--out", out, *more]
    assert main([str(word) for word in command]) == 2
    error = capsys.readouterr().err
    assert error.startswith("graphgen: ") and error.count("\n") == 1
    with pytest.raises(GraphgenError, match=told):
        raise GraphgenError(error)


@pytest.mark.parametrize(
    "values",
    [({}, {}), (9007199254740993, 1.5)],  # no field to store, and no number of 53 bits
)
def test_columns_that_hold_no_such_values_are_named(values, encoder, tmp_path, capsys):
    lines = [json.dumps({"ids": [1], "x": value}) for value in values]
    file = tmp_path / "in.jsonl"
    file.write_text("\n".join([*(lines[:1] * 16), lines[1]]))
    told = "out.parquet cannot hold these rows: .*; change the columns"
    refused(capsys, told, encoder, file, tmp_path / "out.parquet", "--batch", 1)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_bad_folders_and_places(encoder, data, tmp_path, capsys):
    out = tmp_path / "out.parquet"
    refused(capsys, "none.jsonl: No such file", encoder, tmp_path / "none.jsonl", out)
    refused(capsys, "has no onnx/model.onnx", tmp_path, data, out)
    refused(capsys, "is a folder|not a regular file", encoder, data, tmp_path)
    refused(capsys, "cannot be written", encoder, data, tmp_path / "none" / "out.parquet")
    refused(capsys, "does not fit text-class", encoder, data, out, "--task", "text-classification")
    refused(capsys, "--workers is 0", encoder, data, out, "--workers", 0)
    refused(capsys, "--batch is 1000000000000", encoder, data, out, "--batch", 10**30)
    (tmp_path / "empty.jsonl").write_text("\n")
    refused(capsys, "has no lines", encoder, tmp_path / "empty.jsonl", out)
    (tmp_path / "empty.jsonl").unlink()
    decoder = tmp_path / "decoder"
    (decoder / MODEL).parent.mkdir(parents=True)
    model = gg.build(nn.Embedding(7, 4), ids=gg.int64["batch", "seq"])
    gg.export(model, decoder / MODEL)
    refused(capsys, "does not fit a task", decoder, data, out)
    assert [path.name for path in tmp_path.iterdir()] == ["decoder"]


def test_adapters_are_chosen_by_row(encoder, continued, tmp_path, capsys):
    """Each row has the results of its adapter merged; without a name, those of the base."""
    random, files = np.random.default_rng(5), {}
    for folder, name in ((encoder, "a"), (encoder, "b"), (continued["text-generation"], "c")):
        sites = {s.module: s.sizes for s in linears(gg.load(folder / MODEL)).values()}
        matrices = {}
        for module, (size, out) in sites.items():
            if "query" in module:
                matrices[f"{module}.lora_A.weight"] = random.normal(size=(2, size)).astype("f")
                matrices[f"{module}.lora_B.weight"] = random.normal(size=(out, 2)).astype("f")
        files[name] = gg.Adapter(matrices, 2, 2.0).save(tmp_path / name)
    rows = [{"ids": [i + 1, 2, 5 + i], "adapter": "ab"[i % 2] if i % 3 else None} for i in range(9)]
    file, out = tmp_path / "in.jsonl", tmp_path / "out.parquet"
    file.write_text("\n".join(map(json.dumps, rows)))

    def mapped(folder, *more):
        words = ["map", folder, "--data", file, "--out", out, "--batch", 4, *more]
        assert main([str(word) for word in words]) == 0, capsys.readouterr().err
        return pq.read_table(out).to_pylist()

    both = [w for name in "ab" for w in ("--adapter", f"{name}={files[name]}")]
    found = mapped(encoder, *both)
    merged = {name: mapped(encoder, "--adapter", files[name]) for name in "ab"}
    merged[None] = mapped(encoder)
    for row, given in zip(found, rows, strict=True):
        for name, others in merged.items():
            near = relative_rms(row["embedding"], others[found.index(row)]["embedding"]) < 1e-5
            assert near == (name == given["adapter"])
    refused(capsys, "line 2: adapter is 'b'; there are a", encoder, file, out, *both[:2])
    decoder = continued["text-generation"]
    file.write_text("\n".join(map(json.dumps, [r | {"adapter": "c"} for r in rows])))
    assert mapped(decoder, "--adapter", f"c={files['c']}") == mapped(
        decoder, "--adapter", files["c"]
    )


def test_images_need_pillow(vision, tmp_path, capsys, monkeypatch):
    folder, images = vision
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    told = r"images need Pillow, .*graphgen-onnx\[image\]"
    refused(capsys, told, folder, images / "in.jsonl", tmp_path / "out.parquet")


@pytest.mark.parametrize("missing", ["ray", "pyarrow", "tokenizers"])
def test_what_is_not_installed_is_named(missing, encoder, data, tmp_path, capsys, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == missing]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    extra = rf"graphgen-onnx\[{ {'pyarrow': 'map', 'tokenizers': 'text'}.get(missing, missing) }\]"
    engine = ["--engine", "ray"] if missing == "ray" else []
    refused(capsys, extra, encoder, data, tmp_path / "out.parquet", *engine)
    assert list(tmp_path.iterdir()) == []


VIT = {"model_type": "vit", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
VIT |= {"num_attention_heads": 2, "image_size": [8, 12], "patch_size": 4}
PREPROCESSOR = {"size": {"height": 8, "width": 12}, "resample": 3, "rescale_factor": 1 / 255}
PREPROCESSOR |= {"image_mean": [0.1, 0.5, 0.4], "image_std": [0.5, 0.2, 0.3], "do_rescale": True}
PREPROCESSOR |= {"image_processor_type": "ViTImageProcessor", "do_center_crop": None}


@pytest.fixture(scope="module", params=["image-classification", "feature-extraction"])
def vision(request, tmp_path_factory):
    """The folder of a ViT, and next to it a folder of images and the lines that name them."""
    folder, task = tmp_path_factory.mktemp("vit"), request.param
    module = vary(FAMILIES["vit"].tasks[task](Config(VIT)))
    (folder / MODEL).parent.mkdir()
    gg.export(gg.optimize(gg.build(module, **module.inputs())), folder / MODEL)
    (folder / "config.json").write_text(json.dumps(VIT))
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    images, random = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    (images / "in").mkdir()
    kinds = {"a.png": "RGB", "b.jpg": "L", "c.png": "RGBA", "d.gif": "P"}
    for i, (name, mode) in enumerate(kinds.items()):
        array = random.integers(0, 256, (30 + 7 * i, 21, 3), np.uint8)
        Image.fromarray(array).convert(mode).save(images / "in" / name)
    pixels = random.standard_normal((3, 8, 12)).round(3).tolist()
    lines = [*({"image": f"in/{name}"} for name in kinds), {"pixel_values": pixels}]
    (images / "in.jsonl").write_text("\n".join(map(json.dumps, lines * 9)))
    return folder, images


def seen(images, row):
    """The image that the model sees."""
    if row["pixel_values"] is not None:
        return np.array(row["pixel_values"], np.float32)
    image = Image.open(images / row["image"]).convert("RGB").resize((12, 8), 3)
    scaled = np.array(image).transpose(2, 0, 1) / 255
    mean, deviation = (np.array(PREPROCESSOR[f"image_{n}"])[:, None, None] for n in ("mean", "std"))
    return ((scaled - mean) / deviation).astype(np.float32)


def test_images(vision, tmp_path, monkeypatch):
    folder, images = vision
    out = tmp_path / "out.parquet"
    monkeypatch.chdir(tmp_path)  # paths are relative to the file that names them
    command = ["map", folder, "--data", images / "in.jsonl", "--out", out, "--batch", 2]
    assert main([str(word) for word in [*command, "--workers", 2]]) == 0
    rows, session = pq.read_table(out).to_pylist(), gg.Session(folder / MODEL)
    assert len(rows) == 45
    for row in rows[:10]:
        [result] = session({"pixel_values": seen(images, row)[None]})
        if "embedding" in row:
            assert relative_rms(result[0, 0], row["embedding"]) < 1e-5
        else:
            e = np.exp(result[0])
            assert row["label"] == f"LABEL_{e.argmax()}"
            assert np.isclose(row["score"], e.max() / e.sum(), rtol=1e-5)
    results = {str(list(row.values())[2:]) for row in rows}
    assert len(results) == 5
    given = [{"bytes": (images / "in" / "a.png").read_bytes(), "path": None}]
    given += [{"bytes": None, "path": str(images / "in" / "b.jpg")}]  # as `datasets` saves them
    pq.write_table(pa.table({"image": given}), tmp_path / "in.parquet")
    assert batch.map_file(folder, tmp_path / "in.parquet", out) == 2
    name = "embedding" if "embedding" in rows[0] else "score"
    for row, wanted in zip(pq.read_table(out).to_pylist(), rows, strict=False):
        np.testing.assert_allclose(row[name], wanted[name], rtol=1e-5)


def test_bad_images(vision, tmp_path, capsys):
    folder, images = vision
    file, out, own = tmp_path / "in.jsonl", tmp_path / "out.parquet", tmp_path / "own"
    shutil.copytree(folder, own)
    (tmp_path / "text.png").write_text("text")
    half = (images / "in" / "a.png").read_bytes()[:900]
    (tmp_path / "half.png").write_bytes(half)
    (tmp_path / "program.eps").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")
    for row, told in (
        ({"image": "none.png"}, "line 1: .*none.png: No such file"),
        ({"image": "text.png"}, "line 1: .*text.png: not an image that Pillow knows"),
        ({"image": "program.eps"}, "line 1: .*program.eps: not an image that Pillow knows"),
        ({"image": "half.png"}, "row 1: .*half.png is damaged"),
        ({"image": 3}, r"line 1 has neither `image`, a path, nor `pixel_values`, lists of \(3, 8"),
        ({"pixel_values": [[1.0], [2.0]]}, "line 1 has neither"),
        ({"image": "a", "pixel_values": [[1.0]]}, "has `image` and `pixel_values`; give one of"),
        ({"pixel_values": [[[1.0]], [["a"]]]}, "line 1 has neither"),
        ({"pixel_values": [[[math.nan] * 12] * 8] * 3}, "line 1: a number of .* is not finite"),
        ({"pixel_values": [[[1e39] * 12] * 8] * 3}, "line 1: a number of .* is not finite"),
        ({"text": "w1"}, "line 1 has neither"),
    ):
        file.write_text(json.dumps(row))
        refused(capsys, told, own, file, out)
    shutil.copyfile(images / "in" / "a.png", tmp_path / "a.png")
    file.write_text(json.dumps({"image": "a.png"}))
    for fields, told in (
        ({"size": {"shortest_edge": 8}}, "size is {'shortest_edge': 8}; it must be height and"),
        ({"size": 8}, "it must be height and width of the graph's images"),
        ({"do_center_crop": True}, "crop_size is .*height and width of the graph's images"),
        ({"do_center_crop": True, "size": {"longest_edge": 9}}, "size is .*the shortest_edge, or"),
        ({"resample": 9}, "resample is 9"),
        ({"image_std": [1, 1, 0]}, "image_std is .*no deviation 0"),
        ({"image_mean": [1, 1]}, "image_mean is .*must be 3 numbers"),
        ({"do_reduce_labels": True}, "does not have these fields: do_reduce_labels"),
        ({"do_resize": False}, "do_resize is false; resize the image"),
        ({"image_processor_type": "BeitImageProcessor"}, "is 'BeitImageProcessor'; it must be of"),
        ({"feature_extractor_type": 7}, "feature_extractor_type is 7; it must be of ViT, Siglip"),
    ):
        (own / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR | fields))
        refused(capsys, told, own, file, out)
    (own / "preprocessor_config.json").unlink()
    refused(capsys, "preprocessor_config.json is missing", own, file, out)
    assert not out.exists()


@pytest.fixture(scope="module")
def cluster():
    import ray

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(
        num_cpus=2,
        log_to_driver=False,
        logging_level="ERROR",
        include_dashboard=False,
        # An actor that does not end by itself would keep its CPU from the next test for 30 s.
        _system_config={"actor_graceful_shutdown_timeout_ms": 1000},
    )
    yield ray
    ray.shutdown()


@needs_ray
def test_a_worker_that_is_killed_is_replaced(cluster, encoder, data, tmp_path, monkeypatch):
    here, there, marker = (tmp_path / name for name in ("here", "there", "marker"))
    workers = tmp_path / "workers"
    workers.mkdir()
    settings = {"batch": 1, "workers": 2}
    assert batch.map_file(encoder, data, here, **settings) == 150

    class Killed(batch.Spans):
        def __call__(self, spans):
            (workers / str(os.getpid())).touch()
            if spans["offset"][0].as_py() > 4000 and not marker.exists():
                marker.write_text(str(os.getpid()))
                os.kill(os.getpid(), signal.SIGKILL)
            return super().__call__(spans)

    monkeypatch.setitem(batch.ENGINES, "ray", partial(on_ray, stage=Killed))
    assert batch.map_file(encoder, data, there, engine="ray", **settings) == 150
    assert marker.exists() and (workers / marker.read_text()).exists()
    assert there.read_bytes() == here.read_bytes()


CAUSAL = {"model_type": "llama", "vocab_size": len(WORDS), "hidden_size": 16}
CAUSAL |= {"intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
CAUSAL |= {"max_position_embeddings": 2 * LENGTH}
SOURCE = {"model_type": "marian", "vocab_size": len(WORDS), "d_model": 16}
SOURCE |= {f"{side}_layers": 1 for side in ("encoder", "decoder")}
SOURCE |= {f"{side}_attention_heads": 2 for side in ("encoder", "decoder")}
SOURCE |= {f"{side}_ffn_dim": 24 for side in ("encoder", "decoder")}
SOURCE |= {"max_position_embeddings": LENGTH + 8, "decoder_start_token_id": 0}


@pytest.fixture(scope="module")
def continued(encoder, tmp_path_factory):
    """A decoder and an encoder-decoder with the same tokenizer, by their tasks."""
    found = {}
    for task, fields in (("text-generation", CAUSAL), ("text2text-generation", SOURCE)):
        folder = tmp_path_factory.mktemp(task)
        module = vary(FAMILIES[fields["model_type"]].tasks[task](Config(fields)))
        (folder / "onnx").mkdir()
        several = hasattr(module, "graphs")
        parts = module.graphs() if several else {"model.onnx": (module, module.inputs())}
        for name, (part, specs) in parts.items():
            gg.export(gg.optimize(gg.build(part, **specs)), folder / "onnx" / name)
        (folder / "config.json").write_text(json.dumps(fields))
        (folder / "tokenizer.json").write_bytes((encoder / "tokenizer.json").read_bytes())
        found[task] = folder
    return found


@pytest.mark.parametrize("task", ["text-generation", "text2text-generation"])
def test_texts_are_continued(task, continued, data, tmp_path):
    """As `generate` does it alone; a thread has a cache of its own."""
    folder, out = continued[task], tmp_path / "out.parquet"
    command = ["map", folder, "--data", data, "--out", out, "--batch", 2, "--workers", 2]
    assert main([str(w) for w in [*command, "--max-new-tokens", 6, "--stop", "#7"]]) == 0
    rows = pq.read_table(out).to_pylist()
    assert [row["n"] for row in rows] == list(range(150))
    generator = Generator(folder, threads=1)
    for row in rows[::15]:
        found = generator([tokens(row)], max_new_tokens=6, stop=[7])
        list(found)
        assert row["generated_tokens"] == found.tokens[0]
        assert row["generated_text"] == found.texts()[0]
        assert 7 not in row["generated_tokens"][:-1] and len(row["generated_tokens"]) <= 6
    assert len({tuple(row["generated_tokens"]) for row in rows}) > 10


def test_an_encoder_decoder_goes_on_with_the_rows_that_are_left(continued):
    """Their sources, too: the first rows end, the others are as they are alone."""
    generator = Generator(continued["text2text-generation"], threads=1)
    random, options = np.random.default_rng(0), {"max_new_tokens": 9, "temperature": 3.0}
    rows = [random.integers(0, len(WORDS), n).tolist() for n in (3, 9, 14, 5, 11, 20)]
    free = generator(rows, **options)
    list(free)
    ends = [row[i % 2] for i, row in enumerate(free.tokens[:4])]
    found = generator(rows, stop=ends, **options)
    list(found)
    wanted = [
        row[: next((i + 1 for i, t in enumerate(row) if t in ends), 9)] for row in free.tokens
    ]
    assert found.tokens == wanted and max(map(len, wanted[4:])) > 1
    assert len(generator.decoder.given["encoder_attention_mask"]) < len(rows)


def test_options_are_those_of_generate(continued, encoder, data, tmp_path, capsys):
    folder, out = continued["text-generation"], tmp_path / "out.parquet"
    found = []
    for seed in (1, 1, 2):
        batch.map_file(folder, data, out, temperature=1.5, seed=seed, max_new_tokens=4)
        found.append(out.read_bytes())
    assert found[0] == found[1] != found[2]
    out.unlink()
    refused(capsys, "top_p is 2.0; it must be", folder, data, out, "--top-p", 2)
    refused(capsys, "--seed needs a model that continues texts", encoder, data, out, "--seed", 2)
    refused(
        capsys,
        "is for text-generation, not for image",
        folder,
        data,
        out,
        "--task",
        "image-classification",
    )
    long = tmp_path / "in.jsonl"
    long.write_text(json.dumps({"ids": [1] * 2 * LENGTH}))
    refused(capsys, "line 1 has 48 tokens; it must have 1 to 47", folder, long, out)
    long.write_text(json.dumps({"ids": [1], "generated_text": "x"}))
    refused(capsys, "has a column 'generated_text'", folder, long, out)
    alone = tmp_path / "alone"
    shutil.copytree(folder, alone)
    (alone / "tokenizer.json").unlink()
    long.write_text(json.dumps({"ids": [1]}))
    assert batch.map_file(alone, long, out, max_new_tokens=3) == 1
    assert pq.read_schema(out).names == ["ids", "generated_tokens"]


def test_a_tokenizer_of_another_model(encoder, data, tmp_path, capsys):
    folder = tmp_path / "other"
    shutil.copytree(encoder, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": len(WORDS) - 1}))
    told = (
        "tokenizer.json has 40 tokens and the model 39: it belongs to another model; copy the right"
    )
    refused(capsys, told, folder, data, tmp_path / "out.parquet")


@needs_ray
def test_a_cluster_continues_as_one_process(cluster, continued, data, tmp_path):
    out, found = tmp_path / "out.parquet", []
    for engine in ("local", "ray"):
        settings = {"batch": 2, "max_new_tokens": 5, "temperature": 1.0, "stop": ["w7"]}
        folder = continued["text-generation"]
        assert batch.map_file(folder, data, out, engine=engine, workers=2, **settings) == 150
        found.append(out.read_bytes())
    assert found[0] == found[1]


@needs_ray
def test_what_a_worker_refuses_is_told_in_one_line(cluster, encoder, data, tmp_path, monkeypatch):
    class Refusing(batch.Spans):
        def __call__(self, spans):
            raise GraphgenError("Session(model.onnx): the run failed")

    monkeypatch.setitem(batch.ENGINES, "ray", partial(on_ray, stage=Refusing))
    with pytest.raises(GraphgenError, match=r"^ray: Session\(model.onnx\): the run failed \("):
        batch.map_file(encoder, data, tmp_path / "out.parquet", engine="ray")
    with pytest.raises(GraphgenError, match="3 workers of 1 threads need 3 CPUs, and Ray has 2"):
        batch.map_file(encoder, data, tmp_path / "out.parquet", engine="ray", workers=3)
    assert list(tmp_path.iterdir()) == []


@needs_ray
def test_a_stage_on_rows_from_anywhere(cluster, encoder):
    rows = [{"text": "w1 w2 w3"}, {"text": "w4"}]
    dataset = cluster.data.from_items(rows).map_batches(
        batch.Stage,
        fn_constructor_args=[encoder],
        batch_format="pyarrow",
        compute=cluster.data.ActorPoolStrategy(size=1),
    )
    assert {len(row["embedding"]) for row in dataset.take_all()} == {16}
