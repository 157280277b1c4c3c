"""Several documents in a row: how they are fitted, and that a model keeps them apart."""

import numpy as np
import pytest
from random_checkpoints import GROUPED, random_checkpoint
from test_texts import BOS, MASKED, W, write_lines, write_tokenizer

import graphgen as gg
from graphgen.commands import main
from graphgen.errors import GraphgenError
from graphgen.export.tables import open_table
from graphgen.train.packing import fitted
from graphgen.train.sources import read
from graphgen.train.texts import Texts, texts_for

SMALL = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
GPT2 = {"vocab_size": 40, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
FAMILIES = {
    "gpt2": GPT2,
    "mistral": {**GROUPED, **SMALL, "max_position_embeddings": 64, "sliding_window": 4},
}


def test_documents_fill_rows():
    random = np.random.default_rng(0)
    sizes = random.integers(1, 65, 2000)
    rows = fitted(sizes, 64)
    assert sorted(document for row in rows for document in row) == list(range(2000))
    filled = [int(sizes[row].sum()) for row in rows]
    assert max(filled) == 64 and len(rows) <= 1.02 * sizes.sum() / 64 + 1
    assert fitted(np.array([3, 5, 2, 4, 1]), 5) == [[1], [3, 4], [0, 2]]
    assert fitted(np.array([4, 3, 1, 1]), 5) == [[0, 2], [1, 3]]


def test_rows_of_several_texts(tmp_path):
    texts = Texts(write_tokenizer(tmp_path / "tokens"), MASKED, 40, pack=6, apart=True)
    rows = [{"text": text} for text in ("w1 w2", "w3", "w4 w5 w6 w7 w8 w9 w10", "w11 w12 w13")]
    columns = texts.columns(open_table(write_lines(tmp_path / "a.jsonl", *rows)))
    found = {name: [row.tolist() for row in column] for name, column in columns.items()}
    long = [BOS, *range(W + 4, W + 9)]
    assert found["input_ids"] == [long, [BOS, W + 11, W + 12, BOS, W + 1, BOS]]
    assert found["labels"][1] == [W + 11, W + 12, W + 13, W + 1, W + 2, W + 3]
    assert found["attention_mask"] == [[1] * 6, [1, 1, 1, 2, 2, 3]]
    assert found["position_ids"] == [[*range(6)], [0, 1, 2, 0, 1, 0]]
    report = texts.reports[0]
    assert (report.rows, report.packed_rows, report.cut_tokens) == (4, 2, 1)


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    """A decoder's folder, with a tokenizer."""
    place = tmp_path_factory.mktemp(request.param)
    fields = {"model_type": request.param, **FAMILIES[request.param]}
    checkpoint = random_checkpoint(place / "checkpoint", fields)
    write_tokenizer(checkpoint, config=fields)
    assert main(["build", str(checkpoint), "-o", str(place / "built")]) == 0
    return place / "built"


@pytest.fixture
def source(tmp_path):
    random = np.random.default_rng(1)
    words = [random.integers(0, 32, size) for size in (9, 2, 5, 14, 3, 7, 4)]
    rows = [{"text": " ".join(f"w{word}" for word in row)} for row in words]
    return str(write_lines(tmp_path / "a.jsonl", *rows))


@pytest.mark.share(2)
def test_losses_and_gradients_are_those_of_rows_of_their_own(folder, source, tmp_path):
    for packed in (False, True):
        gg.artifacts(
            folder / "onnx/model.onnx", tmp_path / str(packed), output="logits", documents=packed
        )
    apart, together = (gg.Trainer(tmp_path / str(one), threads=1) for one in (False, True))
    reads = [texts_for(apart, tmp_path, folder), texts_for(together, tmp_path, folder, pack=16)]
    one, other = (
        read(source, t.inputs, batch=size, seed=None, texts=x)
        for t, x, size in zip((apart, together), reads, (7, 2), strict=True)
    )
    [batch] = one
    first, _ = other
    assert first["input_ids"].shape == (2, 16) and batch["input_ids"].shape == (7, 14)
    for x, data in zip(reads, (one, other), strict=True):
        x.check(together, data)
    assert abs(together.evaluate(one) - apart.evaluate(one)) < 1e-6, "numbered 1: as before"
    assert abs(together.evaluate(other) - apart.evaluate(one)) < 1e-5
    seen = [{**b, "attention_mask": np.minimum(b["attention_mask"], 1)} for b in other]
    assert abs(together.evaluate(seen) - apart.evaluate(one)) > 1e-2, "the mask matters"
    norms = [
        gg.Trainer(tmp_path / str(way), threads=1, accumulate=count).fit(data, progress=False)
        for way, data, count in ((False, one, 1), (True, other, 2))
    ]
    [[a], [b]] = norms
    assert abs(a["loss"] - b["loss"]) < 1e-5
    assert abs(a["gradient_norm"] - b["gradient_norm"]) < 1e-5 * a["gradient_norm"]
    with pytest.raises(GraphgenError, match="does not keep the documents of a row apart: the loss"):
        texts = texts_for(together, tmp_path, folder, pack=16)
        texts.check(apart, read(source, apart.inputs, batch=2, texts=texts))
    with pytest.raises(GraphgenError, match="--pack 16: this model cannot keep the documents of a"):
        texts_for(apart, tmp_path, folder, pack=16)


@pytest.mark.parametrize("name", ["gpt2_dynamo_eager_23", "bert_dynamo_sdpa_18"])
def test_a_mask_that_cannot_tell_documents_apart_is_refused(name, tmp_path):
    path = f"tests/fixtures/{name}.onnx"
    with pytest.raises(
        GraphgenError, match=r"artifacts: documents: attention_mask is read by \w+ \("
    ):
        gg.artifacts(path, tmp_path / "art", documents=True)
    with pytest.raises(GraphgenError, match="artifacts: documents need the input attention_mask"):
        gg.artifacts("tests/fixtures/layer_dynamo_20.onnx", tmp_path / "art", documents=True)


@pytest.mark.share(2)
def test_the_command_packs(folder, source, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = f"artifacts {folder / 'onnx/model.onnx'} -o art --output logits --documents"
    assert main(command.split()) == 0
    train = f"train art --data {source} --tokenizer {folder} --pack 16 --batch 2 --threads 1"
    capsys.readouterr()
    assert main(train.split()) == 0
    head, row, _ = capsys.readouterr().out.splitlines()
    assert head.endswith("packed rows") and row.split()[-1] == "3"
