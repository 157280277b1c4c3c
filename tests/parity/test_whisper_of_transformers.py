"""Whisper against transformers: features, logits in 32 cached steps, and what is generated."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from published_speech import FIELDS, GENERATION, PREPROCESSOR, sounds, weight

import graphgen as gg
from graphgen.export.folders import write_folder
from graphgen.generation import Generator
from graphgen.generation.languages import token_of
from graphgen.generation.speech import Ears
from graphgen.generation.timestamps import Timestamps
from graphgen.models.published import from_folder

torch = pytest.importorskip("torch", reason="needs torch (make parity)")
transformers = pytest.importorskip("transformers", reason="needs transformers (make parity)")

from test_families import relative_rms, session  # noqa: E402

pytestmark = pytest.mark.parity

BOUND = 1e-5  # relative RMS
ODD = {"d_model": 42, "encoder_attention_heads": 3, "decoder_attention_heads": 7} | {
    "activation_function": "relu",
    "num_mel_bins": 5,
    "max_source_positions": 7,
    "encoder_layers": 3,
}


def save(folder: Path, **options: Any) -> Any:
    """A checkpoint with weights so large that every one of them matters; the module."""
    config = transformers.WhisperConfig(**FIELDS | options)
    module = transformers.WhisperForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(torch.from_numpy(weight(name, tuple(parameter.shape))))
    module.save_pretrained(folder)
    return module


@pytest.mark.parametrize("options", [{}, ODD, {"scale_embedding": True}])
def test_logits(options: dict[str, Any], tmp_path: Path) -> None:
    module = save(tmp_path, **options)
    models = {name: gg.optimize(m).model for name, m in from_folder(tmp_path).models.items()}
    for model in models.values():
        assert not any(node.op_type == "Softmax" for node in model.graph.all_nodes())
    encoder, decoder = (session(model, tmp_path) for model in models.values())
    random, config = np.random.default_rng(0), module.config
    shape = 3, config.num_mel_bins, 2 * config.max_source_positions
    features = random.standard_normal(shape, np.float32)
    ids = random.integers(0, config.vocab_size, (3, 40))
    with torch.no_grad():
        wanted = module(torch.tensor(features), decoder_input_ids=torch.tensor(ids))
    [states] = encoder.run(None, {"input_features": features})
    assert relative_rms(states, wanted.encoder_last_hidden_state.numpy()) < BOUND
    names = [output.name for output in decoder.get_outputs()]
    past = {
        x.name: np.zeros((3, x.shape[1], 0, x.shape[3]), np.float32)
        for x in decoder.get_inputs()
        if x.name.startswith("past")
    }
    parts, start = [], 0
    for end in [3, 8, *range(9, 41)]:
        feeds = {
            "input_ids": ids[:, start:end],
            "encoder_hidden_states": np.full_like(states, np.nan) if start else states,
            "use_cache_branch": np.array([start > 0]),
        }
        found = dict(zip(names, decoder.run(None, feeds | past), strict=True))
        parts.append(found.pop("logits"))
        for name, x in found.items():
            if start == 0 or ".decoder." in name:
                past[name.replace("present", "past_key_values")] = x
        start = end
    assert relative_rms(np.concatenate(parts, 1), wanted.logits.numpy()) < BOUND


@pytest.mark.parametrize(
    "options",
    [
        {"feature_size": 80},
        {"feature_size": 128},
        {"feature_size": 13, "n_fft": 256, "hop_length": 100, "sampling_rate": 8000}
        | {"chunk_length": 2},
    ],
)
def test_features(options: dict[str, Any], tmp_path: Path) -> None:
    """Exactly those of numpy; those of torch, which calculates in float32, within the bound."""
    wanted = transformers.WhisperFeatureExtractor(**options)
    wanted.save_pretrained(tmp_path)
    ears, size = Ears(tmp_path, wanted.feature_size, wanted.nb_max_frames), wanted.n_samples
    random, time = np.random.default_rng(0), np.arange(size) / wanted.sampling_rate
    for x in (
        random.standard_normal(size // 2) / 10,
        random.standard_normal(size // 3) * 1e-4,
        np.sin(2 * np.pi * 440 * time[: size // 4]),
        np.sin(2 * np.pi * (300 + 40 * time) * time) / 2,
        np.zeros(5),
    ):
        sound = x.astype(np.float32)
        padded = np.pad(sound, (0, size - len(sound)))[None]
        got = ears(sound, "sound")
        assert np.abs(got - wanted._np_extract_fbank_features(padded, "cpu")[0]).max() < 1e-6
        how = {"sampling_rate": wanted.sampling_rate, "return_tensors": "np"}
        assert relative_rms(got, wanted(sound, **how).input_features[0]) < BOUND


LANGUAGES = {
    name: GENERATION[name] for name in ("lang_to_id", "task_to_id", "no_timestamps_token_id")
}
SEARCHES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}, {}),
    "forced": ({"forced_decoder_ids": [[1, 40], [2, 43], [3, 59]]}, {}, {}),
    "English": ({"forced_decoder_ids": [[1, 59]], "no_timestamps_token_id": 59}, {}, {}),
    "detected": (GENERATION, {}, {}),
    "language": (LANGUAGES, {"language": "fr"}, {"language": "fr"}),
    "translate": (LANGUAGES, {"task": "translate"}, {"translate": True}),
    "both": (
        LANGUAGES,
        {"language": "de", "task": "translate"},
        {"language": "de", "translate": True},
    ),
    "in the file": ({**LANGUAGES, "language": "<|fr|>", "task": "translate"}, {}, {}),
    "beams": (LANGUAGES, {"num_beams": 3}, {"beams": 3}),
    "suppressed": ({**LANGUAGES, "suppress_tokens": [6, 18, 47]}, {}, {}),
}


@pytest.mark.parametrize("which", SEARCHES)
def test_tokens(which: str, tmp_path: Path) -> None:
    fields, theirs, ours = SEARCHES[which]
    ends = {n: GENERATION[n] for n in GENERATION if n.endswith("token_id") and "no_" not in n}
    module = save(tmp_path / "in")
    for name, content in (
        ("preprocessor_config.json", PREPROCESSOR),
        ("generation_config.json", ends | fields | {"max_length": 50}),
    ):
        (tmp_path / "in" / name).write_text(json.dumps(content))
    models = {f"onnx/{n}": gg.optimize(m) for n, m in from_folder(tmp_path / "in").models.items()}
    generator = Generator(write_folder(tmp_path / "in", tmp_path / "out", models), threads=1)
    found = generator(sounds(), max_new_tokens=32, **ours)
    list(found)
    assert generator.ears is not None
    features = torch.tensor(np.stack([generator.ears(sound, "") for sound in sounds()]))
    module.generation_config = transformers.GenerationConfig(**ends | fields)
    with torch.no_grad():
        rows = module.generate(features, max_new_tokens=32, **theirs).tolist()
    for tokens, row in zip(found.tokens, rows, strict=True):
        row = row[row.index(tokens[0]) :] if len(row) > len(tokens) else row
        assert tokens == row[: len(tokens)]
        assert set(row[len(tokens) :]) <= {1, 2}


def test_names_of_languages() -> None:
    from transformers.models.whisper import tokenization_whisper as theirs

    for name, code in theirs.TO_LANGUAGE_CODE.items():
        assert token_of(name.title()) == token_of(code.upper()) == f"<|{code}|>"


SPOKEN: dict[str, Any] = {
    **{name: x for name, x in GENERATION.items() if name != "no_repeat_ngram_size"},
    "eos_token_id": 19,  # as published ones, text comes before it, and timestamps last
    "pad_token_id": 19,
    "lang_to_id": {"<|en|>": 20, "<|fr|>": 21},
    "task_to_id": {"transcribe": 22, "translate": 23},
    "forced_decoder_ids": [[1, None], [2, 22]],
    "no_timestamps_token_id": 24,
    "begin_suppress_tokens": [5, 19],
    "suppress_tokens": [6, 18],
}


@pytest.mark.parametrize("which", ["plain", "detected", "latest", "translate", "beams"])
@pytest.mark.parametrize("seconds", [[0.6], [2.73], [3.4, 0.4, 1.9], [1.0, 0.5]])
def test_timestamps_and_long_sounds(which: str, seconds: list[float], tmp_path: Path) -> None:
    """Windows begin where transformers' do, and the parts of all of them have its times."""
    fields = SPOKEN
    fields |= {"max_initial_timestamp_index": 3} if which == "latest" else {}
    ours: dict[str, Any] = {"translate": {"translate": True}, "beams": {"beams": 3}}.get(which, {})
    theirs = {"translate": {"task": "translate"}, "beams": {"num_beams": 3}}.get(which, {})
    if which == "plain":
        fields = {n: x for n, x in fields.items() if n not in ("lang_to_id", "task_to_id")}
        fields["forced_decoder_ids"] = [[1, 20], [2, 22], [3, 24]]
    module = save(tmp_path / "in")
    for name, content in (
        ("preprocessor_config.json", PREPROCESSOR),
        ("generation_config.json", fields),
    ):
        (tmp_path / "in" / name).write_text(json.dumps(content))
    models = {f"onnx/{n}": gg.optimize(m) for n, m in from_folder(tmp_path / "in").models.items()}
    generator = Generator(write_folder(tmp_path / "in", tmp_path / "out", models), threads=1)
    random = np.random.default_rng(len(seconds))
    given = [random.standard_normal(int(s * 16000)).astype(np.float32) / 8 for s in seconds]
    found = generator(given, max_new_tokens=24, timestamps=True, **ours)
    steps = list(found)
    assert [[t for t in row if t is not None] for row in zip(*steps, strict=True)] == found.tokens
    extractor = transformers.WhisperFeatureExtractor(**PREPROCESSOR)
    config = transformers.GenerationConfig(**fields)
    for number, sound in enumerate(given):
        how: dict[str, Any] = {"sampling_rate": 16000, "return_tensors": "pt"}
        if max(seconds) > 1:
            how |= {"truncation": False, "padding": "longest"}
        features = extractor(sound, **how).input_features
        if features.shape[-1] < 20:
            features = extractor(sound, sampling_rate=16000, return_tensors="pt").input_features
        module.generation_config = config
        with torch.no_grad():
            wanted = module.generate(
                features,
                max_new_tokens=24,
                return_timestamps=True,
                return_segments=True,
                time_precision=0.1,
                time_precision_features=0.05,
                **theirs,
            )["segments"][0]
        parts = found.segments[number]
        assert [part.tokens for part in parts] == [part["tokens"].tolist() for part in wanted]
        for name in ("start", "end"):
            times = [float(part[name]) for part in wanted]
            np.testing.assert_allclose([getattr(part, name) for part in parts], times, atol=0.101)


def test_what_timestamps_may_follow_and_what_they_mark() -> None:
    """400 random rows of text and timestamps, of which transformers' functions say the same."""
    from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor
    from transformers.models.whisper.generation_whisper import WhisperGenerationMixin

    random = np.random.default_rng(0)
    for n in range(400):
        latest = 3 if n % 2 else None
        config = SimpleNamespace(no_timestamps_token_id=24, eos_token_id=19, bos_token_id=1)
        config.max_initial_timestamp_index = latest
        marks = Timestamps(25, 19, latest)
        row = list[int]()
        for _ in range(int(random.integers(0, 14))):
            row.append(
                int(random.integers(25, 45) if random.random() < 0.5 else random.integers(19))
            )
        scores = random.normal(0, 3, 45).astype(np.float32)
        processor = WhisperTimeStampLogitsProcessor(config, begin_index=2)
        wanted = processor(torch.tensor([[3, 22, *row]]), torch.tensor(scores[None]))[0].numpy()
        marks.choose(row, scores)
        np.testing.assert_array_equal(scores, wanted)
        row = [int(random.integers(25, 45)), *row]
        frames = int(random.integers(1, 21))
        segments, taken = WhisperGenerationMixin._retrieve_segment(
            seek_sequence=torch.tensor(row),
            seek_outputs=[None],
            time_offset=torch.zeros(1, dtype=torch.float64),
            timestamp_begin=25,
            seek_num_frames=torch.tensor([frames]),
            time_precision=1.0,
            time_precision_features=0.5,
            input_stride=2,
            prev_idx=0,
            idx=0,
            return_token_timestamps=False,
            decoder_input_ids=torch.zeros(1, 2),
        )
        parts, ours = marks.split(row, frames)
        assert ours == int(taken)
        times = [(float(x["start"]), float(x["end"]), x["tokens"].tolist()) for x in segments]
        assert parts == times
