"""Whisper with the numbers and tokens of transformers, and the sounds that it refuses."""

import itertools
import json
import shutil
import struct
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from published_speech import (
    FIELDS,
    GENERATION,
    PREPROCESSOR,
    RATE,
    sounds,
    tokens,
    weight,
    write_wav,
)
from random_checkpoints import stored_shapes, write_weights
from small_models import relative_rms, run_plain

import graphgen as gg
from graphgen.commands import main
from graphgen.errors import GraphgenError
from graphgen.export.folders import write_folder
from graphgen.generation import Generator
from graphgen.generation.languages import token_of
from graphgen.generation.sounds import resampled, samples
from graphgen.generation.speech import Ears, first_tokens
from graphgen.generation.timestamps import Timestamps
from graphgen.models.published import FAMILIES, from_folder
from graphgen.models.published.config import Config
from graphgen.models.published.seq2seq import DECODER, ENCODER

MARKS = {"return_timestamps": True}
RESULTS = np.load(Path(__file__).resolve().parents[1] / "fixtures" / "speech" / "results.npz")
BOUND = 1e-5  # relative RMS


@pytest.fixture(scope="module")
def source(tmp_path_factory: Any) -> Path:
    """The folder of a small checkpoint, with the weights that the results are of."""
    folder, family = tmp_path_factory.mktemp("speech"), FAMILIES["whisper"]
    module = family.tasks["automatic-speech-recognition"](Config(FIELDS))
    shapes = stored_shapes(family, module)
    arrays = {name: weight(name, shape) for name, shape in shapes.items()}
    write_weights(folder / "model.safetensors", arrays)
    for name, fields in (
        ("config.json", FIELDS),
        ("preprocessor_config.json", PREPROCESSOR),
        ("generation_config.json", GENERATION),
    ):
        (folder / name).write_text(json.dumps(fields))
    return folder


@pytest.fixture(scope="module")
def built(source: Path, tmp_path_factory: Any) -> Path:
    out: Path = tmp_path_factory.mktemp("built") / "out"
    assert main(["build", str(source), "-o", str(out)]) == 0
    return out


def test_sounds_have_the_features_of_transformers(source: Path) -> None:
    ears = Ears(source, 8, 20)
    for sound, wanted in zip(sounds(), RESULTS["input_features"], strict=True):
        assert np.abs(ears(sound, "sound") - wanted).max() < 1e-6


def test_features_as_transformers_5_saves_them(source: Path, tmp_path: Path) -> None:
    """They are a part of processor_config.json, which then counts."""
    fields = {"feature_extractor": PREPROCESSOR, "processor_class": "WhisperProcessor"}
    (tmp_path / "processor_config.json").write_text(json.dumps(fields))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"feature_size": 9}))
    [sound, *_] = sounds()
    np.testing.assert_array_equal(Ears(tmp_path, 8, 20)(sound, ""), Ears(source, 8, 20)(sound, ""))


def test_numbers_of_transformers(source: Path) -> None:
    models = {n: gg.optimize(m).model for n, m in from_folder(source).models.items()}
    counts = dict.fromkeys(models, 0)
    for name, model in models.items():
        operators = [node.op_type for node in model.graph.all_nodes()]
        assert "Softmax" not in operators
        counts[name] = sum("Attention" in kind for kind in operators)
    assert counts == {ENCODER: 1, DECODER: 2 + 2 * 2}  # those to the encoder have two branches
    features = RESULTS["input_features"]
    [states] = run_plain(models[ENCODER], {"input_features": features})
    assert relative_rms(RESULTS["states"], states) < BOUND
    inputs = models[DECODER].graph.inputs
    past = {
        str(value.name): np.zeros((2, value.shape[1], 0, value.shape[3]), np.float32)
        for value in inputs
        if value.shape is not None and str(value.name).startswith("past")
    }
    names, parts = [str(value.name) for value in models[DECODER].graph.outputs], []
    for begin, end in ((0, 4), (4, 10)):
        feeds = {
            "input_ids": tokens()[:, begin:end],
            "encoder_hidden_states": np.full_like(states, np.nan) if begin else states,
            "use_cache_branch": np.array([begin > 0]),
        }
        found = dict(zip(names, run_plain(models[DECODER], feeds | past), strict=True))
        parts.append(found.pop("logits"))
        past = {name.replace("present", "past_key_values"): x for name, x in found.items()}
    assert relative_rms(RESULTS["logits"], np.concatenate(parts, 1)) < BOUND


@pytest.mark.parametrize("how", [{}, {"language": "fr"}, {"translate": True}, {"beams": 2}])
def test_tokens_of_transformers(how: dict[str, Any], built: Path) -> None:
    """Of sounds together; the language is detected for each."""
    found = Generator(built, threads=1)(sounds(), max_new_tokens=32, **how)
    list(found)
    name = ", ".join(how) or "detected"
    for begin, made, wanted in zip(found.prompts, found.tokens, RESULTS[name], strict=True):
        whole = [token for token in wanted.tolist() if token >= 0]
        assert [*begin, *made][-len(whole) :] == whole


def test_a_greatest_length_counts_what_is_new(built: Path, tmp_path: Path) -> None:
    """As in transformers, which adds the number of tokens that rows begin with."""
    folder = tmp_path / "own"
    shutil.copytree(built, folder)
    fields = json.loads((folder / "generation_config.json").read_text())
    ends = {"max_length": 7, "begin_suppress_tokens": [], "eos_token_id": []}
    (folder / "generation_config.json").write_text(json.dumps(fields | ends))
    assert len(list(Generator(folder, threads=1)(sounds()))) == 7


def test_the_command_hears_a_file(built: Path, tmp_path: Path, capsys: Any) -> None:
    file = write_wav(tmp_path / "a.wav", sounds()[0])
    command = ["generate", str(built), "--audio", str(file), "--threads", "1", "--json"]
    assert main([*command, "--language", "fr", "--max-new-tokens", "32"]) == 0
    [row] = json.loads(capsys.readouterr().out)["rows"]
    assert row["prompt"] == [3, 41, 43, 59]
    assert row["tokens"] == [t for t in RESULTS["language"][0].tolist() if t >= 0][-32:]
    assert "segments" not in row


def test_long_sounds_and_timestamps(built: Path, tmp_path: Path, capsys: Any) -> None:
    """Windows cover a sound without a gap, and a sound has the same parts beside others."""
    folder = tmp_path / "own"
    shutil.copytree(built, folder)
    fields = json.loads((folder / "generation_config.json").read_text())
    fields |= {"no_timestamps_token_id": 47, "suppress_tokens": []}
    (folder / "generation_config.json").write_text(json.dumps(fields))
    long = np.concatenate([*sounds(), *sounds()[::-1]])
    generator = Generator(folder, threads=1)
    both = generator([long, *sounds()], max_new_tokens=20)
    steps = [*both]
    assert [[t for t in row if t is not None] for row in zip(*steps, strict=True)] == both.tokens
    assert len(both.segments) == 3 and both.segments[0][-1].end > 2.0
    alone = generator([long], max_new_tokens=20, timestamps=True)
    assert [*alone] and alone.segments == both.segments[:1] and alone.prompts == both.prompts[:1]
    for parts, said in zip(both.segments, both.tokens, strict=True):
        assert [token for part in parts for token in part.tokens] == said
        assert all(0 <= part.start <= part.end for part in parts)
        assert all(a.start < b.start for a, b in itertools.pairwise(parts))
        assert 47 not in said
    file = write_wav(tmp_path / "a.wav", long)
    words = ["generate", str(folder), "--audio", str(file), "--max-new-tokens", "20", "--json"]
    assert main([*words, "--threads", "1"]) == 0
    document = json.loads(capsys.readouterr().out)
    schema = json.loads((Path(__file__).parents[2] / "docs" / "generate.schema.json").read_text())
    jsonschema.validate(document, schema)
    [row] = document["rows"]
    assert [x["start"] for x in row["segments"]] == [round(x.start, 3) for x in alone.segments[0]]
    soon = generator([long], max_new_tokens=20, max_time=0.0)
    assert len([*soon]) < 10 and len(soon.segments[0]) == 1
    more: Any
    for more, told in (
        ({"grammar": "start: /a/"}, "a grammar with timestamps|needs llguidance|no tokenizer"),
        ({"num_return_sequences": 2, "temperature": 1.0}, "several answers with timestamps"),
    ):
        with pytest.raises(GraphgenError, match=told):
            generator([long], **more)
    with pytest.raises(GraphgenError, match="a sound has no tokens to look up; leave"):
        next(generator([long], speculate="prompt-lookup"))


def test_parts_of_a_window() -> None:
    """Text and timestamps from 25 on, in 20 frames, which are 10 steps."""
    marks = Timestamps(25, 19)
    for said, wanted in (
        ([25, 1, 2], ([(0, 10, [25, 1, 2])], 20)),  # no end: the whole window
        ([25, 1, 29], ([(0, 4, [25, 1, 29])], 20)),  # nothing is said behind it
        ([25, 1, 29, 29, 2, 33], ([(0, 4, [25, 1, 29]), (4, 8, [29, 2, 33])], 20)),
        ([25, 1, 29, 30, 2], ([(0, 4, [25, 1, 29, 30])], 8)),  # the second is not whole
        ([25, 1, 29, 30, 2, 31, 31], ([(0, 4, [25, 1, 29]), (5, 6, [30, 2, 31, 31])], 12)),
    ):
        assert marks.split(said, 20) == wanted


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_samples_of_each_width(width: int, tmp_path: Path) -> None:
    x = np.array([0.0, 0.5, -1.0, 0.25])
    if width == 1:  # a byte has no sign
        path = write_wav(tmp_path / "a.wav", x + 1.0, width=width)
    else:
        path = write_wav(tmp_path / "a.wav", x, width=width)
    assert samples(path, RATE).tolist() == x.tolist()


def wave(kind: int, bits: int, data: bytes, *, channels: int = 1, size: int = -1) -> bytes:
    """A WAV file; samples of an extensible one are of `kind`."""
    form = struct.pack("<HHIIHH", kind, channels, RATE, 0, 0, bits)
    if kind > 7:
        form = form.replace(form[:2], b"\xfe\xff", 1) + struct.pack(
            "<HHIH14x", 22, bits, 0, kind - 8
        )
    size = len(data) if size < 0 else size
    parts = b"LIST" + struct.pack("<I", 3) + b"abc\0fmt " + struct.pack("<I", len(form)) + form
    return b"RIFF\0\0\0\0WAVE" + parts + b"data" + struct.pack("<I", size) + data


@pytest.mark.parametrize(
    ("kind", "bits", "data", "wanted"),
    [
        (3, 32, struct.pack("<2f", 0.5, -1.5), [0.5, -1.5]),
        (3, 64, struct.pack("<2d", 0.5, 1 / 3), [0.5, 1 / 3]),
        (8 + 3, 32, struct.pack("<f", 0.25), [0.25]),
        (8 + 1, 24, b"\0\0\x40\0\0\xc0", [0.5, -0.5]),
        # the ends and the middle of the tables of ITU-T G.711
        (7, 8, b"\x00\x80\xff\x7f\x45", [-32124 / 32768, 32124 / 32768, 0, 0, -1564 / 32768]),
        (
            6,
            8,
            b"\xaa\x2a\xd5\x55\x13",
            [32256 / 32768, -32256 / 32768, 8 / 32768, -8 / 32768, -2880 / 32768],
        ),
    ],
)
def test_samples_of_other_kinds(
    kind: int, bits: int, data: bytes, wanted: list[float], tmp_path: Path
) -> None:
    (path := tmp_path / "a.wav").write_bytes(wave(kind, bits, data))
    assert samples(path, RATE).tolist() == wanted
    path.write_bytes(wave(kind, bits, data, size=0xFFFFFFFF))  # as it comes from a pipe
    assert samples(path, RATE).tolist() == wanted
    path.write_bytes(wave(kind, bits, data * 2, channels=2))
    pairs = np.reshape(wanted * 2, (-1, 2))
    assert samples(path, RATE).tolist() == pairs.mean(1).tolist()


@pytest.mark.parametrize("rate", [8000, 11025, 44100, 48000])
def test_sounds_of_another_rate(rate: int, tmp_path: Path) -> None:
    """A tone below half of both rates stays; one that the new rate cannot hold is gone."""
    time, wanted = np.arange(rate) / rate, np.arange(RATE) / RATE
    path = write_wav(tmp_path / "a.wav", np.sin(2 * np.pi * 440 * time) / 2, rate=rate)
    found = samples(path, RATE)
    assert len(found) == RATE
    inner = slice(100, -100)
    assert np.abs(found - np.sin(2 * np.pi * 440 * wanted) / 2)[inner].max() < 2e-3
    if rate > 2 * RATE:
        high = np.sin(2 * np.pi * 12000 * time)
        assert np.abs(resampled(high, rate, RATE))[inner].max() < 2e-3


def refused(capsys: Any, told: str, *command: str) -> None:
    assert main(["generate", *command]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1


def test_what_is_no_such_sound_is_refused(built: Path, tmp_path: Path, capsys: Any) -> None:
    good = write_wav(tmp_path / "good.wav", sounds()[0])
    (tmp_path / "text.wav").write_text("a text")
    (tmp_path / "empty.wav").write_bytes(b"")
    (tmp_path / "half.wav").write_bytes(good.read_bytes()[:9000])
    (tmp_path / "head.wav").write_bytes(good.read_bytes()[:30])
    (tmp_path / "nan.wav").write_bytes(wave(3, 32, struct.pack("<2f", 0.5, np.nan)))
    (tmp_path / "odd.wav").write_bytes(wave(1, 16, b"\0\0\0"))
    (tmp_path / "ogg.wav").write_bytes(b"OggS" + bytes(60))
    wide = bytearray(good.read_bytes())
    wide[34] = 64  # bits of a sample
    (tmp_path / "wide.wav").write_bytes(wide)
    write_wav(tmp_path / "rate.wav", sounds()[0], rate=44101)
    write_wav(tmp_path / "six.wav", sounds()[0], channels=6)
    write_wav(tmp_path / "none.wav", np.zeros(0))
    ears = Ears(built, 8, 20)
    for name, told in (
        ("text", "is not a WAV file .*: it begins with b'a te'"),
        ("ogg", "is not a WAV file .*: it begins with b'OggS'; convert it"),
        ("empty", "is not a WAV file .*: it begins with b''"),
        ("head", "is not a WAV file .*: it ends too early"),
        ("nan", "has samples that are not finite"),
        ("odd", "is not a WAV file .*: it ends inside a sample, after 1"),
        ("wide", "is not a WAV file .*: samples of kind 1 with 64 bits"),
        ("half", "ends after 8,956 of 32,000 bytes"),
        ("absent", "No such file"),
        ("rate", "is at 44,101 Hz, of which 16,000 Hz is no simple part"),
        ("six", "6 channels at 16,000 Hz"),
        ("none", "is a sound of no samples"),
    ):
        with pytest.raises(GraphgenError, match=told):
            ears(str(tmp_path / f"{name}.wav"), "sound")
    refused(capsys, "is not a WAV", str(built), "--audio", str(tmp_path / "text.wav"))
    refused(capsys, "cannot be read", str(built), "--audio", str(tmp_path))
    refused(capsys, "reads sound: give --audio alone", str(built), "--prompt", "Hi")
    both = ["--audio", str(good), "--ids", "3"]
    refused(capsys, "reads sound: give --audio alone", str(built), *both)
    refused(capsys, "there is no language <|xx|>", str(built), *both[:2], "--language", "xx")


def test_other_models_hear_nothing(tmp_path: Path, capsys: Any) -> None:
    gpt2 = Path(__file__).resolve().parents[1] / "fixtures" / "gpt2_checkpoint"
    write_folder(gpt2, tmp_path / "out", {"onnx/model.onnx": from_folder(gpt2).model})
    out = str(tmp_path / "out")
    refused(capsys, "reads text: give --prompt, --ids or --chat alone", out, "--audio", "a.wav")
    refused(
        capsys,
        "language, translate and timestamps are for models of sound",
        out,
        "--ids",
        "3",
        "--translate",
    )


def test_rows_are_not_heard(built: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n')
    command = [
        "map",
        str(built),
        "--data",
        str(tmp_path / "in.jsonl"),
        "--out",
        str(tmp_path / "o"),
    ]
    assert main(command) == 2
    assert "word by word: use graphgen generate" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "change", "told"),
    [
        ("preprocessor_config.json", None, "has no preprocessor_config.json, which says how sound"),
        ("preprocessor_config.json", {"feature_size": 9}, "feature_size is 9; it must be 8"),
        ("preprocessor_config.json", {"dither": 0.1}, "dither is 0.1; it must be 0.0"),
        ("preprocessor_config.json", {"hop_length": 80}, "hop_length is 80; it must be a 20th of"),
        ("preprocessor_config.json", {"mel_scale": "htk"}, "not have these fields: mel_scale"),
        ("generation_config.json", {"condition_on_prev_tokens": True}, "which has no option here"),
        (
            "generation_config.json",
            {"return_timestamps": "yes"},
            "timestamps is 'yes'; give True or",
        ),
        ("generation_config.json", MARKS | {"no_timestamps_token_id": None}, "names no no_timest"),
        ("generation_config.json", MARKS | {"no_timestamps_token_id": 59}, "none is a timestamp"),
        (
            "generation_config.json",
            MARKS | {"max_initial_timestamp_index": -1},
            "index is -1; give",
        ),
        ("generation_config.json", {"forced_decoder_ids": [[2, 4]]}, r"it must be \[\[1, TOKEN\]"),
        ("generation_config.json", {"lang_to_id": [1]}, "lang_to_id is .* an object of tokens"),
        ("generation_config.json", {"language": 5}, "json: language is 5; give a text"),
        (
            "generation_config.json",
            {"task": ["transcribe"]},
            r"json: task is \['transcribe'\]; give",
        ),
        ("generation_config.json", {"task": "sing"}, "there is no task sing; there are transcribe"),
    ],
)
def test_files_that_ask_for_more_are_refused(
    file: str, change: dict[str, Any] | None, told: str, built: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "own"
    shutil.copytree(built, folder)
    fields = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(fields | (change or {})))
    if change is None:
        (folder / file).unlink()
    with pytest.raises(GraphgenError, match=told):
        Generator(folder, threads=1)(sounds(), max_new_tokens=1)


def test_what_python_gives_has_to_be_samples(built: Path) -> None:
    generator = Generator(built, threads=1)
    for given, told in (
        ([], "there is no sound"),
        ([[3, 4]], "sound 0 is int64 of shape"),
        (np.zeros((1, 2, 3), np.float32), r"sound 0 is float32 of shape \(2, 3\)"),
        ([np.array([np.nan])], "sound 0 is float64"),
    ):
        with pytest.raises(GraphgenError, match=told):
            generator(given)


def test_first_tokens_without_languages(tmp_path: Path) -> None:
    """English models name no languages, and older files force the last token alone."""
    fields = {"forced_decoder_ids": [[1, 59]], "no_timestamps_token_id": 59}
    (tmp_path / "generation_config.json").write_text(json.dumps(fields))
    how: dict[str, Any] = {"translate": False, "timestamps": False, "detect": None}
    assert first_tokens(tmp_path, 3, language="", **how) == [[3, 59]]
    with pytest.raises(GraphgenError, match=r"no language <\|en\|>; there are none"):
        first_tokens(tmp_path, 3, language="en", **how)


@pytest.mark.parametrize("language", ["fr", "FR", "<|fr|>", "French", "french"])
def test_a_language_has_a_name_and_a_code(language: str, tmp_path: Path) -> None:
    how: dict[str, Any] = {"translate": False, "timestamps": False, "detect": None}
    for given, fields in ((language, GENERATION), ("", GENERATION | {"language": language})):
        (tmp_path / "generation_config.json").write_text(json.dumps(fields))
        [row] = first_tokens(tmp_path, 3, language=given, **how)
        assert row[:2] == [3, GENERATION["lang_to_id"]["<|fr|>"]]
    assert token_of("Haitian Creole") == "<|ht|>" and token_of("Klingon") == "<|klingon|>"


def test_published_fields_are_known() -> None:
    more = {
        "apply_spec_augment": False,
        "begin_suppress_tokens": [220, 50257],
        "classifier_proj_size": 256,
        "forced_decoder_ids": [[1, 50259], [2, 50359], [3, 50363]],
        "mask_feature_length": 10,
        "mask_feature_min_masks": 0,
        "mask_feature_prob": 0.0,
        "mask_time_length": 10,
        "mask_time_min_masks": 2,
        "mask_time_prob": 0.05,
        "max_length": 448,
        "median_filter_width": 7,
        "num_hidden_layers": 1,
        "scale_embedding": False,
        "suppress_tokens": [1, 2],
        "use_weighted_layer_sum": False,
    }
    config = Config(FIELDS | more)
    FAMILIES["whisper"].tasks["automatic-speech-recognition"](config)
    config.finish()
