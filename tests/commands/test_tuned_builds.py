"""`build --tune`: what is measured, what is picked and why, and that folders do what was picked."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import onnxruntime as ort
import pytest
from random_checkpoints import GROUPED, SIZES, random_checkpoint

import graphgen as gg
from graphgen.commands import main
from graphgen.generation import Generator
from graphgen.generation.caches import InPlace
from graphgen.measure.choices import choose
from graphgen.version import minor

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "build.schema.json").read_text())
OLD = minor(ort.__version__) < (1, 27)  # no cache of int8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    path: Path = tmp_path_factory.mktemp("llama")
    random_checkpoint(path, {"model_type": "llama", **GROUPED, "num_hidden_layers": 1})
    return path


class Clock:
    """Runs each way once, and says that it took a time by how many are measured, and their turn."""

    def __init__(self, times: Sequence[Sequence[float]]) -> None:
        self.times, self.turn = times, 0

    def __call__(self, runs: Sequence[Any], seconds: float, *, warm: bool = False) -> Any:
        for run in runs:
            run()
        if not warm:
            self.current = self.times[min(self.turn, len(self.times) - 1)]
            self.turn += 1
        return np.array([self.current[: len(runs)]] * 2)


def built(folder: Path, out: Path, capsys: Any, *more: str) -> Any:
    command = ["build", str(folder), "-o", str(out), "--quantize", "int4", "--tune", *more]
    assert main([*command, "--tune-for", "48x2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    jsonschema.validate(found, SCHEMA)
    written = json.loads((out / "tuning.json").read_text())
    assert written == found["tuning"] and (written["prompt"], written["batch"]) == (48, 2)
    return found


@pytest.mark.skipif(OLD, reason="onnxruntime below 1.27 reads no cache of int8")
def test_the_folder_has_what_was_fastest(
    folder: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 64, 32, 128 and 256 weights at level 4, then at level 0; the caches; prompts of 48, 32, 16, 8.
    clock = Clock([[2, 1.01, 1, 3, 9, 9, 9, 9], [2, 1], [2, 1], [2, 1], [2, 1], [1, 1.5]])
    monkeypatch.setattr("graphgen.measure.choices.measure", clock)
    found = built(folder, tmp_path / "out", capsys)
    picks = found["tuning"]["picks"]
    assert picks == {
        "block_size": 32,  # a tie, which loses less
        "accuracy_level": 4,
        "kv": "int8",
        "prompts": "int8",
        "prompts_from": 32,  # two rows of 16
    }
    assert {*found["costs"]} == {
        "onnx/model.onnx: int8 cache",
        "onnx/prompt_model.onnx: int8 prompts",
    }
    decoder = Generator(tmp_path / "out", provider="cpu").decoder
    assert isinstance(decoder, InPlace) and decoder.reader is not None
    assert decoder.reader.least == 32 and decoder.reader.session.inputs == decoder.session.inputs
    assert all(kind.dtype == np.int8 for kind in decoder.caches.values())
    # Given the picks, the folder is the same bytes.
    plain = ["build", str(folder), "-o", str(tmp_path / "plain"), "--quantize", "int4"]
    plain += ["--block-size", "32", "--accuracy-level", "4", "--kv", "int8"]
    assert main(plain) == 0
    name = "onnx/model.onnx"
    assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()


@pytest.mark.exhaustive
def test_what_does_not_pay_is_left_out_and_what_is_given_stays(
    folder: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock([[5, 1], [1, 0.95], [1, 0.95]])  # levels 4 and 0 of 128; gains below a tenth
    monkeypatch.setattr("graphgen.measure.choices.measure", clock)
    found = built(folder, tmp_path / "out", capsys, "--block-size", "128")
    picks = found["tuning"]["picks"]
    assert picks["block_size"] == 128 and picks["accuracy_level"] == 0
    assert (picks["kv"], picks["prompts"], picks["prompts_from"]) == ("float32", "int4", None)
    assert not (tmp_path / "out" / "onnx" / "prompt_model.onnx").exists() and not found["costs"]
    graph = gg.load(tmp_path / "out" / "onnx" / "model.onnx").graph
    levels = {
        n.attributes.get_int("accuracy_level", 0) for n in graph if n.op_type == "MatMulNBits"
    }
    assert levels == {0}
    clock.turn = 0
    found = built(
        folder,
        tmp_path / "out",
        capsys,
        "--kv",
        "float32",
        "--prompts",
        "int8",
        "--block-size",
        "32",
    )
    assert {*found["costs"]} == {"onnx/prompt_model.onnx: int8 prompts"}
    assert "kv" not in found["tuning"]["picks"]


def test_a_table_says_what_was_measured(
    folder: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graphgen.quantize.tuning._SECONDS", 0.01)
    command = ["build", str(folder), "-o", str(tmp_path / "out"), "--quantize", "weights8"]
    more = ["--block-size", "32", "--kv", "float32", "--tune", "--tune-for", "8"]
    assert main([*command, *more, "--no-run"]) == 0
    printed = capsys.readouterr().out
    assert "Tuned on this machine for a prompt of 8 tokens, rows: 1" in printed
    assert "blocks of 32, level 4" in printed and "picked: the fastest" in printed


def test_bad_options_are_one_line(folder: Path, tmp_path: Path, capsys: Any) -> None:
    bert = tmp_path / "bert"
    random_checkpoint(bert, {"model_type": "bert", **SIZES})
    for source, more, problem in (
        (bert, ["--tune"], "bert has no cache; give a decoder"),
        (folder, ["--tune", "--layout", "genai"], "--tune is for --layout plain"),
        (folder, ["--tune-for", "8"], "--tune-for needs --tune"),
        (folder, ["--accuracy-level", "0"], "--accuracy-level needs --quantize int4"),
        (folder, ["--block-size", "32"], "--block-size needs --quantize int4 or weights8"),
        (folder, ["--tune", "--tune-for", "0x3"], "'0x3' is not TOKENS or TOKENSxROWS"),
    ):
        assert main(["build", str(source), "-o", str(tmp_path / "no"), *more]) == 2
        assert problem in capsys.readouterr().err
    assert not (tmp_path / "no").exists()


def test_ties_go_to_the_least_error_and_costs_have_to_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    for times, worth, picked in (
        ([1.0, 1.02, 3.0], None, "b"),
        ([1.0, 1.2, 3.0], None, "a"),
        ([1.0, 0.95, 0.92], 1.1, "a"),
        ([1.0, 0.95, 0.8], 1.1, "c"),
    ):
        monkeypatch.setattr("graphgen.measure.choices.measure", Clock([times]))
        runs = [(name, int, error) for name, error in zip("abc", (0.3, 0.2, 0.1), strict=True)]
        found = choose("products", 1, runs, worth=worth)
        assert found.picked == picked, times
        assert [way.name for way in found.ways] == ["a", "b", "c"]


@pytest.mark.skipif(OLD, reason="onnxruntime below 1.27 reads no cache of int8")
def test_prompts_are_measured_whole(
    folder: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a prompt that it has just read, a decoder would read the end alone."""
    clock = Clock([[2, 1.01, 1, 3, 9, 9, 9, 9], [2, 1]])
    monkeypatch.setattr("graphgen.measure.choices.measure", clock)
    read, start = list[tuple[int, int]](), InPlace.start

    def counted(decoder: InPlace, rows: Any, *more: Any, **options: Any) -> Any:
        logits = start(decoder, rows, *more, **options)
        read.append((len(rows[0]), decoder.shared))
        return logits

    monkeypatch.setattr(InPlace, "start", counted)
    built(folder, tmp_path / "out", capsys)
    assert [length for length, _ in read].count(48) >= 4
    assert not any(shared for _, shared in read)
