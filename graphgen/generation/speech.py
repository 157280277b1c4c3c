"""What Whisper hears (arXiv 2212.04356, 2.2), and the tokens that its answer begins with."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from graphgen.errors import GraphgenError, near, user_line
from graphgen.generation.config import fields_of_generation, read_fields
from graphgen.generation.languages import token_of
from graphgen.generation.sounds import samples
from graphgen.generation.timestamps import Timestamps
from graphgen.models.published.config import Config
from graphgen.models.published.folder import preprocessor
from graphgen.operands import Array

FEATURES = "input_features"
_HIGHEST = 8000.0
"""The end of the highest band, in hertz, whatever the rate is."""


class Ears:
    """Sounds as the logarithms of bands over time, (bands, frames), float32.

    A sound is a file, or samples between -1 and 1. One shorter than `chunk_length` seconds, a
    window, is padded with silence; the power of `n_fft` samples under a Hann window, every
    `hop_length` samples, is summed by bands of equal width on Slaney's mel scale, as transformers'
    WhisperFeatureExtractor does.
    Raises GraphgenError for a preprocessor_config.json that asks for more, and names the field.
    """

    def __init__(self, folder: Path | None, bands: int, frames: int):
        parts = ("feature_extractor", "audio_processor")
        path, fields = (Path(), {}) if folder is None else preprocessor(folder, *parts)
        if not fields:
            raise GraphgenError(
                f"generate: {folder or 'the model'} has no preprocessor_config.json, which "
                f"says how sound is read; copy it from the checkpoint{user_line()}"
            )
        config = Config({"model_type": "preprocessor", **fields}, str(path))
        config.expect("feature_extractor_type", "WhisperFeatureExtractor")
        for name, value in (("padding_side", "right"), ("padding_value", 0.0), ("dither", 0.0)):
            config.expect(name, value)
        config.expect("do_normalize", False)
        for name in ("processor_class", "return_attention_mask", "mel_filters"):
            config.raw(name)  # the filters are calculated again
        self.rate = config.take("sampling_rate", int, 16000)
        self.size, self.hop = config.take("n_fft", int, 400), config.take("hop_length", int, 160)
        self.samples, self.frames = config.take("chunk_length", int, 30) * self.rate, frames
        config.expect("feature_size", bands)
        config.expect("n_samples", self.samples)
        config.expect("nb_max_frames", frames)
        if self.samples // self.hop != frames:
            config.refuse("hop_length", self.hop, f"a {frames}th of {self.samples} samples")
        config.finish()
        self.filters = filters(bands, 1 + self.size // 2, self.rate)

    def __call__(self, sound: Any, where: str) -> Array:
        """The features of a file or of samples. Raises GraphgenError if it is no such sound."""
        if isinstance(sound, str | Path):
            x, name = samples(Path(sound), self.rate), str(sound)
        else:
            x, name = np.asarray(sound), where
            if x.ndim != 1 or x.dtype.kind != "f" or not np.isfinite(x).all():
                raise GraphgenError(
                    f"{where} is {x.dtype} of shape {x.shape}; give a WAV file, or samples as "
                    f"floats, one channel at {self.rate:,} Hz{user_line()}"
                )
        if not len(x):
            raise GraphgenError(f"{name} is a sound of no samples; give at least one")
        x = np.pad(x.astype(np.float64), (0, max(0, self.samples - len(x))))
        x = np.pad(x, self.size // 2, mode="reflect")
        frames = np.lib.stride_tricks.sliding_window_view(x, self.size)[:: self.hop][:-1]
        window = np.hanning(self.size + 1)[:-1]
        y = np.empty((len(frames), self.filters.shape[1]))
        for at in range(0, len(frames), self.frames):  # all spectra would take 20 times the memory
            part = slice(at, at + self.frames)
            power = np.abs(np.fft.rfft(frames[part] * window)) ** 2  # (frames, 1 + size / 2)
            y[part] = np.log10(np.maximum(power @ self.filters, 1e-10))
        y = np.maximum(y, y.max() - 8.0)
        return np.ascontiguousarray((y.T + 4.0) / 4.0, np.float32)

    def window(self, features: Array, at: int) -> Array:
        """The frames of a window from `at` on; 0 behind the last."""
        part = features[:, at : at + self.frames]
        return np.pad(part, ((0, 0), (0, self.frames - part.shape[1])))

    @property
    def seconds(self) -> float:
        """How long a frame is."""
        return self.hop / self.rate


def filters(bands: int, bins: int, rate: int) -> Array:
    """What each frequency counts in each band, (bins, bands): triangles that overlap by half.

    Their middles are equally far apart on Slaney's scale (Auditory Toolbox, 1998): linear up to
    1000 Hz, and from there 27 steps for each factor of 6.4; each has the area 1.
    """
    step, factor = 200.0 / 3.0, np.log(6.4) / 27.0
    mels = np.linspace(0.0, 15.0 + np.log(_HIGHEST / 1000.0) / factor, bands + 2)
    hertz = np.where(mels < 15.0, mels * step, 1000.0 * np.exp(factor * (mels - 15.0)))
    given = np.linspace(0.0, rate // 2, bins)[:, None]
    low, middle, high = hertz[:-2], hertz[1:-1], hertz[2:]
    rising, falling = (given - low) / (middle - low), (high - given) / (high - middle)
    return np.asarray(np.maximum(0.0, np.minimum(rising, falling)) * 2.0 / (high - low))


def listed_sounds(given: Any) -> list[Any]:
    """One sound or several, as a list."""
    if isinstance(given, str | Path | Mapping):
        return [given]
    samples = len(given) > 0 and isinstance(given[0], float | np.floating)
    return [given] if samples else list(given)


def first_tokens(
    folder: Path,
    begin: int,
    *,
    language: str,
    translate: bool,
    timestamps: bool,
    detect: Callable[[Sequence[int]], list[int]],
) -> list[list[int]]:
    """The tokens that rows begin with; one row for all, or one for each sound.

    They are the start, the language, the task and, but for `timestamps`, that there are none, as
    the folder's generation_config.json names them. `detect` chooses one of the tokens of languages
    for each sound, if none is given.
    """
    file, fields = fields_of_generation(folder)
    for name in ("language", "task"):
        if not isinstance(fields.get(name, ""), str):
            raise GraphgenError(f"{file}: {name} is {fields[name]!r:.100}; give a text")
    language = language or fields.get("language", "")
    task = "translate" if translate else fields.get("task")
    named: list[int | None] = []
    if not language and task is None:
        given = fields.get("forced_decoder_ids", read_fields(folder).get("forced_decoder_ids"))
        named = _forced(file, given)
    known, tasks = (_tokens(file, fields, name) for name in ("lang_to_id", "task_to_id"))
    rows: list[list[int | None]] = [named]
    if language:
        rows = [[_chosen(file, "language", token_of(language), known), *named[1:]]]
        task = task or ("transcribe" if tasks else None)
    elif known and (not named or named[0] is None):
        rows = [[token, *named[1:]] for token in detect([*known.values()])]
    if task is not None:
        rows = [[*row, _chosen(file, "task", task, tasks)] for row in rows]
    last = fields.get("no_timestamps_token_id")
    if timestamps:
        rows = [row[:-1] if row[-1:] == [last] else row for row in rows]
    elif last is not None:
        rows = [row if row[-1:] == [last] else [*row, last] for row in rows]
    return [[begin, *(token for token in row if token is not None)] for row in rows]


def timestamps_of(folder: Path, end: Sequence[int], vocabulary: int | None) -> Timestamps:
    """The timestamps of a folder's model. Raises GraphgenError if it names none."""
    file, fields = fields_of_generation(folder)
    before, latest = fields.get("no_timestamps_token_id"), fields.get("max_initial_timestamp_index")
    if type(before) is not int or before < 0 or not end:
        raise GraphgenError(
            f"{file} names no no_timestamps_token_id, or no eos_token_id, which timestamps and "
            "sounds longer than a window need"
        )
    if not (latest is None or (type(latest) is int and latest >= 0)):
        raise GraphgenError(
            f"{file}: max_initial_timestamp_index is {latest!r}; give a whole number, or remove it"
        )
    if vocabulary is not None and before + 1 >= vocabulary:
        raise GraphgenError(
            f"{file}: no_timestamps_token_id is {before}, and the model has tokens 0 to "
            f"{vocabulary - 1}: none is a timestamp"
        )
    return Timestamps(before + 1, end[0], latest)


def _forced(file: Path, given: Any) -> list[int | None]:
    """The tokens of forced_decoder_ids, whose places have to be 1, 2, 3 ..."""
    pairs = [] if given is None else given
    try:
        found = [token for _, token in pairs]
        fits = [place for place, _ in pairs] == [*range(1, len(pairs) + 1)]
    except (TypeError, ValueError):
        found, fits = [], False
    if not fits or not all(t is None or (type(t) is int and t >= 0) for t in found):
        raise GraphgenError(
            f"{file}: forced_decoder_ids is {given!r:.100}; it must be [[1, TOKEN], [2, TOKEN] ...]"
        )
    return found


def _tokens(file: Path, fields: dict[str, Any], name: str) -> dict[str, int]:
    found = fields.get(name, {})
    if not isinstance(found, dict) or not all(type(t) is int and t >= 0 for t in found.values()):
        raise GraphgenError(f"{file}: {name} is {found!r:.100}; it must be an object of tokens")
    return found


def _chosen(file: Path, what: str, name: str, known: dict[str, int]) -> int:
    if name not in known:
        problem = f"there are {', '.join(known)}{near(name, known)}" if known else "there are none"
        raise GraphgenError(f"{file}: there is no {what} {name}; {problem}")
    return known[name]
