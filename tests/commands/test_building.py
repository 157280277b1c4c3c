"""`build DIR --quantize`: folders of small integers, and what they tell of the loss."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import published_decoders
import pytest
import tokenizers
from random_checkpoints import random_checkpoint

import graphgen as gg
from graphgen.commands import main
from graphgen.export.folders import MODEL
from graphgen.processor import INT8_KEY, NEEDS
from graphgen.quantize.folder import REPORT
from graphgen.runtime import OPTIONS_KEY
from graphgen.subnormals import FLUSH, can_flush
from graphgen.version import minor

FIXTURES = Path(__file__).parents[1] / "fixtures"
needs_int8_cache = pytest.mark.skipif(
    minor(ort.__version__) < (1, 27), reason="onnxruntime below 1.27 reads no cache of int8"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return with_tokenizer("gpt2", tmp_path)


def with_tokenizer(family: str, tmp_path: Path) -> Path:
    """A checkpoint beside which lie a tokenizer of words and a text of them."""
    folder = tmp_path / family
    shutil.copytree(FIXTURES / f"{family}_checkpoint", folder)
    words = {f"w{i}": i for i in range(40)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    text = " ".join(f"w{i}" for i in np.random.default_rng(0).integers(0, 40, 500))
    (tmp_path / "text.txt").write_text(text)
    return folder


def build(folder: Path, *more: str) -> tuple[Path, dict[str, Any]]:
    """The folder of integers, and what it tells."""
    out = folder.with_name("out")
    assert main(["build", str(folder), "-o", str(out), "--quantize", *more]) == 0
    return out, json.loads((out / REPORT).read_text())


def operators(path: Path) -> set[str]:
    found: set[str] = set()
    graphs = [onnx.load(path, load_external_data=False).graph]
    for graph in graphs:
        found |= {node.op_type for node in graph.node}
        graphs += [a.g for node in graph.node for a in node.attribute if a.HasField("g")]
    return found


def options_of(path: Path) -> str | None:
    model = onnx.load(path, load_external_data=False)
    return {entry.key: entry.value for entry in model.metadata_props}.get(OPTIONS_KEY)


def test_sessions_of_a_folder_count_subnormal_numbers_as_0(folder: Path, tmp_path: Path) -> None:
    """Artifacts of it do not, as their loss may depend on them."""
    assert main(["build", str(folder), "-o", str(tmp_path / "out")]) == 0
    file = tmp_path / "out" / MODEL
    assert json.loads(options_of(file) or "{}") == {FLUSH: "1"}
    assert gg.Session(file).plan.config.get(FLUSH) == ("1" if can_flush() else None)
    gg.artifacts(file, tmp_path / "art")
    assert options_of(tmp_path / "art" / "training_model.onnx") is None
    assert main(["build", str(folder), "-o", str(tmp_path / "half"), "--dtype", "fp16"]) == 0
    assert options_of(tmp_path / "half" / MODEL) is None


def test_a_decoder_tells_its_perplexity_before_and_after(folder: Path, capsys: Any) -> None:
    out, told = build(folder, "int8", "--text", str(folder.with_name("text.txt")))
    measured = told["model.onnx"]["effect"]
    assert measured["measure"] == "perplexity" and measured["tokens"] > 100
    assert measured["before"] != measured["after"] == pytest.approx(measured["before"], rel=0.05)
    assert "MatMulIntegerToFloat" in operators(out / MODEL)
    printed = capsys.readouterr().out
    assert "int8 for cpu" in printed and f"perplexity {measured['before']:.4f} before" in printed
    assert len(list(gg.generate(out, [[1, 2, 3]], max_new_tokens=4, eos=[]))) == 4


@needs_int8_cache
def test_two_folders_are_compared_on_a_text(folder: Path, capsys: Any) -> None:
    text, plain, few = (
        str(folder.with_name("text.txt")),
        folder.with_name("a"),
        folder.with_name("b"),
    )
    assert main(["build", str(folder), "-o", str(plain)]) == 0
    assert main(["build", str(folder), "-o", str(few), "--kv", "int8", "--text", text]) == 0
    told = capsys.readouterr().out
    assert "int8 cache: perplexity" in told and "random" not in told
    assert main(["compare", str(plain), "--against", str(few), "--text", text]) == 0
    before, after = re.findall(r"[\d.]+(?= before| after)", told := capsys.readouterr().out)
    assert float(before) != float(after) == pytest.approx(float(before), rel=0.01)
    assert "divergence" in told and "the same next token in" in told
    for more, problem in (
        ([], "--text is for two folders of decoders"),
        (["--against", text], "--text is for two folders of decoders"),
        (["--against", str(few), "--markdown"], "--markdown has no effect with --text"),
        (["--against", str(folder)], "has no model.onnx"),
    ):
        assert main(["compare", str(plain), "--text", text, *more]) == 2
        assert problem in capsys.readouterr().err


def test_both_files_of_an_encoder_decoder_are_of_integers(tmp_path: Path) -> None:
    folder = with_tokenizer("t5", tmp_path)
    text = str(tmp_path / "text.txt")
    out, told = build(folder, "int4", "--block-size", "32", "--text", text)
    names = {"encoder_model.onnx", "decoder_model_merged.onnx"}
    assert {*told} == names
    for name, report in told.items():
        assert report["scheme"] == "int4" and "MatMulNBits" in operators(
            (out / MODEL).with_name(name)
        )
        if "encoder_" in name:  # the decoder reads more than text
            assert report["effect"]["measure"] == "cosine" and 0.7 < report["effect"]["after"] < 1
        else:
            assert report["effect"] is None


def test_the_layout_of_genai_has_the_report_beside_its_config(folder: Path) -> None:
    out, told = build(folder, "int8", "--layout", "genai")
    effect = told["model.onnx"]["effect"]
    assert (out / "genai_config.json").is_file() and effect["measure"] == "cosine"
    assert {"GroupQueryAttention", "MatMulIntegerToFloat"} <= operators(out / "model.onnx")


def test_a_cache_that_cannot_be_in_place_names_the_runtime(tmp_path: Path, capsys: Any) -> None:
    """Older ones have fewer kernels of attention; this one's scores have a bias."""
    random_checkpoint(tmp_path / "in", published_decoders.fields("bloom"))
    args = ["build", str(tmp_path / "in"), "-o", str(tmp_path / "out"), "--layout", "genai"]
    assert main(args) == 2
    said = capsys.readouterr().err
    assert f"for onnxruntime {ort.__version__}; choose --layout plain" in said
    assert not (tmp_path / "out").exists()


def test_the_layout_of_genai_chooses_tokens_as_the_folder_says(folder: Path, capsys: Any) -> None:
    """It chose the most likely one whatever that said, without a word."""
    out, said = folder.with_name("out"), {"eos_token_id": 3, "repetition_penalty": 1.5}
    beams = {"num_beams": 2, "early_stopping": "never", "num_return_sequences": 2}
    for fields, search, told in (
        ({"max_length": 9, "top_p": 0.5}, {"max_length": 9}, ""),
        (
            {"do_sample": True, "top_k": 0, "top_p": 0.5, "max_new_tokens": 5, "min_p": 0.1},
            {"do_sample": True, "temperature": 1.0, "top_k": 50, "top_p": 0.5, "max_length": 12},
            "without max_new_tokens, min_p: ",
        ),
        (
            {**beams, "min_length": 4, "stop_strings": ["w1"], "bad_words_ids": [[1]]},
            {"num_beams": 2, "length_penalty": 1.0, "early_stopping": False, "min_length": 4}
            | {"num_return_sequences": 2, "max_length": 12},
            "without early_stopping, bad_words_ids, stop_strings: ",
        ),
    ):
        (folder / "generation_config.json").write_text(json.dumps(said | fields))
        assert main(["build", str(folder), "-o", str(out), "--layout", "genai"]) == 0
        wanted = search | {"repetition_penalty": 1.5, "past_present_share_buffer": True}
        assert json.loads((out / "genai_config.json").read_text())["search"] == wanted
        printed = capsys.readouterr().out
        assert told in printed and ("onnxruntime-genai" in printed) == bool(told)
    config = json.loads((folder / "config.json").read_text()) | {"eos_token_id": None}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").unlink()
    assert main(["build", str(folder), "-o", str(out), "--layout", "genai"]) == 0
    assert "onnxruntime-genai ends rows at the padding token" in capsys.readouterr().out


def test_without_text_int8_is_measured_on_random_tokens(folder: Path, capsys: Any) -> None:
    _, told = build(folder, "int8")
    report = told["model.onnx"]
    effect, errors = report["effect"], [layer["error"] for layer in report["layers"]]
    assert effect["random"] and max(errors) / 4 < effect["error"] < 0.1
    assert effect["after"] == pytest.approx(1 - effect["error"] ** 2 / 2, abs=effect["error"] ** 2)
    told_on = {layer["measured_on"] for layer in report["layers"]}
    assert told_on == {"output, random inputs"}
    assert "random inputs)" in capsys.readouterr().out
    _, told = build(folder, "int8", "--no-run")
    assert told["model.onnx"]["effect"] is None
    assert {layer["measured_on"] for layer in told["model.onnx"]["layers"]} == {"weight"}


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_only_the_first_layers_are_quantized(folder: Path, scheme: str) -> None:
    _, told = build(folder, scheme, "--stop-after", "3", "--verify")
    schemes = [layer["scheme"] for layer in told["model.onnx"]["layers"]]
    assert sum(name != "float" for name in schemes) == 3


def test_what_needs_a_processor_says_so(folder: Path) -> None:
    out, told = build(folder, "int8", "--full-range")
    props = onnx.load(out / MODEL, load_external_data=False).metadata_props
    assert {p.key: p.value for p in props}[INT8_KEY] == NEEDS
    layers = told["model.onnx"]["layers"]
    assert all(layer["error_saturated"] >= 0 for layer in layers if layer["operator"] != "Gather")


def test_what_cannot_be_measured_is_told_and_nothing_is_written(folder: Path, capsys: Any) -> None:
    text, short = str(folder.with_name("text.txt")), folder.with_name("short.txt")
    short.write_text("w1 w2")
    (folder.with_name("binary.txt")).write_bytes(b"\xff\xfe\x00")
    start = ["build", str(folder), "-o", str(folder.with_name("out"))]
    quantized = [*start, "--quantize", "int8", "--text"]
    cases = {
        "--text needs --quantize": [*start, "--text", text],
        "--full-range needs --quantize int8": [*start, "--quantize", "int4", "--full-range"],
        "--no-run needs --quantize int8": [*start, "--no-run"],
        "--verify needs --quantize; add": [*start, "--verify"],
        "--stop-after needs --quantize; add": [*start, "--stop-after", "3"],
        "--text runs the model; leave out --no-run": [*quantized, text, "--no-run"],
        "has 2 tokens; give 24 or more": [*quantized, str(short)],
        "is not UTF-8": [*quantized, str(folder.with_name("binary.txt"))],
        "cannot be read": [*quantized, str(folder)],
    }
    for told, command in cases.items():
        assert main(command) == 2
        error = capsys.readouterr().err
        assert told in error
    (folder / "tokenizer.json").unlink()
    assert main([*quantized, text]) == 2
    assert "has no tokenizer.json, which --text needs" in capsys.readouterr().err
    assert not folder.with_name("out").exists()


@needs_int8_cache
def test_python_builds_the_same_folder_as_the_command(folder: Path, tmp_path: Path) -> None:
    text = folder.with_name("text.txt")
    out, _ = build(folder, "int4", "--text", str(text), "--kv", "int8")
    built = gg.build_folder(folder, tmp_path / "other", quantize="int4", text=text, kv="int8")
    files = {path.relative_to(out) for path in out.rglob("*") if path.is_file()}
    assert files == {p.relative_to(built.output) for p in built.output.rglob("*") if p.is_file()}
    assert all((out / name).read_bytes() == (built.output / name).read_bytes() for name in files)
    assert (built.kind, built.parameters) == ("gpt2", 7584)
    assert [*built.costs] == [f"{MODEL}: int8 cache"] and built.quantized[MODEL].effect is not None


@pytest.mark.parametrize(
    "options, told",
    [
        ({"dtype": "fp8"}, "dtype is 'fp8'"),
        ({"quantize": "int4", "block_size": 48}, "block_size is 48"),
        ({"kv": "int4"}, "kv is 'int4'"),
        ({"tune": True, "tune_for": (0, 1)}, "tune_for is .*at least 1"),
        ({"tune_for": (8, 1)}, "--tune-for needs --tune"),
        ({"seed": 1}, "--seed has no effect when building from a checkpoint"),
        ({"task": 3}, "task is 3; it must be a text or None"),
    ],
)
def test_python_is_told_what_an_option_must_be(
    folder: Path, tmp_path: Path, options: dict[str, Any], told: str
) -> None:
    with pytest.raises(gg.GraphgenError, match=rf"^build.*{told}.*test_building.py"):
        gg.build_folder(folder, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()
