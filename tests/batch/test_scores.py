"""`compare --text FILE.jsonl`: scores on labels and answers, gates, and bad rows."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import tokenizers
from random_checkpoints import GROUPED, SIZES, random_checkpoint

from graphgen.batch.scores import scores
from graphgen.commands import main
from graphgen.generation import Generator
from graphgen.generation.caches import sized
from graphgen.runtime import Session

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "quality.schema.json").read_text())
NAMES = ["bad", "good", "odd"]


def built(root: Path, fields: dict[str, Any], *more: str, task: str | None = None) -> Path:
    """A folder of a random checkpoint with a tokenizer of words."""
    source, out = root / "source", root / "-".join(["out", *more])
    if not source.exists():
        random_checkpoint(source, fields, task)
        words = {f"w{i}": i for i in range(200)}
        tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "w0"))
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        tokenizer.save(str(source / "tokenizer.json"))
    chosen = ["--task", task] if task else []
    assert main(["build", str(source), "-o", str(out), *chosen, *more]) == 0
    return out


@pytest.fixture(scope="module")
def decoders(tmp_path_factory: Any) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("decoders")
    fields = {
        "model_type": "qwen2",
        **GROUPED,
        "num_hidden_layers": 1,
        "max_position_embeddings": 24,
    }
    return built(root, fields), built(root, fields, "--quantize", "int4")


@pytest.fixture(scope="module")
def classifiers(tmp_path_factory: Any) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("classifiers")
    named = {"id2label": dict(enumerate(NAMES)), "label2id": {n: i for i, n in enumerate(NAMES)}}
    fields = {"model_type": "bert", **SIZES, **named, "type_vocab_size": 2}
    task = "text-classification"
    return built(root, fields, task=task), built(root, fields, "--quantize", "int8", task=task)


def lines(path: Path, rows: list[Any]) -> Path:
    text = "\n".join(json.dumps(row) for row in rows) + "\n\n"
    path.write_text(text, encoding="utf-8-sig")  # as Windows writes it
    return path


def as_text(ids: Any) -> str:
    return " ".join(f"w{i}" for i in ids)


def test_a_long_answer_is_not_read_beside_a_long_prompt(tmp_path: Path) -> None:
    """Each row has places for itself, but the prompt none for the other's answer."""
    fields = {"model_type": "gpt2", "vocab_size": 200, "n_embd": 16, "n_head": 2, "n_layer": 1}
    folder = built(tmp_path, fields | {"n_positions": 12})
    rows = [{"prompt": as_text(range(1, 11)), "answer": " w1"}]
    rows.append({"prompt": "w1", "answer": " " + as_text(range(1, 12))})
    both, *alone = (
        scores(folder, folder, lines(tmp_path / "rows.jsonl", some))
        for some in (rows, rows[:1], rows[1:])
    )
    lost = [one.perplexity_after for one in alone]
    assert both.perplexity_after == pytest.approx((lost[0] * lost[1] ** 11) ** (1 / 12), rel=1e-5)


def test_answers_are_right_where_greedy_decoding_gives_them(
    decoders: tuple[Path, Path], tmp_path: Path, capsys: Any
) -> None:
    plain, few = decoders
    rng, rows, wanted, losses = np.random.default_rng(0), [], [[], []], [[], []]
    writers = [Generator(folder, provider="cpu") for folder in decoders]
    sessions = [Session(folder / "onnx" / "model.onnx", provider="cpu") for folder in decoders]
    for i in range(12):
        prompt = rng.integers(1, 200, 3 + i).tolist()
        written = writers[i % 2]([prompt], max_new_tokens=1 + i % 3, eos=[])
        answer = [int(step[0] or 0) for step in written]
        if i % 4 == 3:
            answer[-1] = (answer[-1] + 1) % 200
        rows.append({"prompt": as_text(prompt), "answer": " " + as_text(answer), "id": i})
        ids = np.array([prompt + answer])
        for session, right, lost in zip(sessions, wanted, losses, strict=True):
            feed: dict[str, Any] = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
            feed["position_ids"] = np.arange(ids.shape[1])[None]
            for name, kind in session.inputs.items():
                if name.startswith("past"):
                    feed[name] = np.zeros(sized(name, kind, 1, 0), np.float32)
            logits = session({n: feed[n] for n in session.inputs})[0][0].astype(np.float64)
            logits = logits[len(prompt) - 1 : -1]
            log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
            right.append((logits.argmax(-1) == answer).all())
            lost += (-log_p[np.arange(len(answer)), answer]).tolist()
    file = lines(tmp_path / "rows.jsonl", rows)
    found = scores(plain, few, file)
    a, b = np.array(wanted)
    assert (found.before, found.after) == (a.mean(), b.mean()) and 0 < a.mean() < 1
    assert (found.lost, found.gained) == ((a & ~b).sum(), (b & ~a).sum()) and found.rows == 12
    first, second = np.exp([np.mean(lost) for lost in losses])
    assert found.perplexity_before == pytest.approx(first, rel=1e-4)
    assert found.perplexity_after == pytest.approx(second, rel=0.02)  # in int4 tokens read alone
    out = tmp_path / "out.json"
    command = ["compare", str(plain), "--against", str(few), "--text", str(file)]
    assert main([*command, "--json", str(out)]) == 0
    jsonschema.validate(json.loads(out.read_text()), SCHEMA)
    assert "right whole answers" in capsys.readouterr().out
    if found.after < found.before:
        assert main([*command, "--fail-if-worse", "0%"]) == 3
        assert "fewer rows are right, more than 0.00%" in capsys.readouterr().err
    assert main([*command, "--fail-if-worse", "99%"]) == 0


def test_labels_are_those_of_the_graph(
    classifiers: tuple[Path, Path], tmp_path: Path, capsys: Any
) -> None:
    rng, rows = np.random.default_rng(1), []
    texts = [rng.integers(1, 200, 2 + i % 7).tolist() for i in range(20)]
    found = []
    for folder in classifiers:
        session = Session(folder / "onnx" / "model.onnx", provider="cpu")
        feeds = [{n: np.array([ids]) for n in session.inputs} for ids in texts]
        for feed in feeds:
            feed["attention_mask"] = np.ones_like(feed["input_ids"])
            feed |= {n: np.zeros_like(x) for n, x in feed.items() if n == "token_type_ids"}
        found.append([int(session(feed)[0].argmax()) for feed in feeds])
    for i, ids in enumerate(texts):  # of the first folder, but each fourth is wrong
        label = found[0][i] if i % 4 else (found[0][i] + 1) % 3
        rows.append({"text": as_text(ids), "label": label if i % 2 else NAMES[label]})
    file = lines(tmp_path / "rows.jsonl", rows)
    got = scores(*classifiers, file)
    assert got.before == 0.75 and got.rows == 20 and got.perplexity_before is None
    assert abs(got.after - 0.75) <= 0.15  # int8 depends on what is read together
    again = scores(classifiers[0], classifiers[0], file)
    assert again.after == again.before and again.lost == again.gained == 0
    bad = lines(tmp_path / "bad.jsonl", [*rows, {"text": "w1", "label": "none"}])
    command = ["compare", *map(str, (classifiers[0], "--against", classifiers[1], "--text"))]
    assert main([*command, str(bad)]) == 2
    assert "line 21" in (told := capsys.readouterr().err) and "no label 'none'" in told


def test_a_text_has_gates_and_json(
    decoders: tuple[Path, Path], tmp_path: Path, capsys: Any
) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "out.json"
    text.write_text(as_text(np.random.default_rng(0).integers(0, 200, 72)), "utf-8-sig")
    command = ["compare", str(decoders[0]), "--against", str(decoders[1]), "--text", str(text)]
    assert main([*command, "--json", str(out), "--fail-if-diverges", "1e-9"]) == 3
    assert "the divergence is" in capsys.readouterr().err
    found = json.loads(out.read_text())
    jsonschema.validate(found, SCHEMA)
    rises = found["after"] > found["before"]
    assert main([*command, "--fail-if-worse", "0%"]) == (3 if rises else 0)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "has no rows"),
        ("{", "line 1 is not JSON"),
        ('{"text": "w1", "label": 0, "label": 1}', "two values of an object are called 'label'"),
        ('{"text": "w1"}', "text and label, or prompt and answer"),
        ('{"prompt": "w1", "answer": 3}', "a row has prompt and answer, which are texts"),
        ('{"prompt": "w1", "answer": " w2"}\n{"text": "w1", "label": 0}', "line 2: a row has prom"),
        ('{"prompt": "w1", "answer": ""}', "an answer of 0; both need some"),
        ('{"prompt": "", "answer": "w1"}', "a prompt of 0 tokens"),
        ('{"text": "w1", "label": 0}', "is for text-generation, not for text-class"),
    ],
)
def test_bad_rows_are_one_line(
    decoders: tuple[Path, Path], tmp_path: Path, capsys: Any, content: str, problem: str
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(content)
    assert (
        main(["compare", *map(str, (decoders[0], "--against", decoders[1], "--text", file))]) == 2
    )
    assert problem in (told := capsys.readouterr().err) and told.count("\n") == 1
    assert main(["compare", "x.onnx", "--fail-if-worse", "1%"]) == 2
