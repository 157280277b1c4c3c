"""Rows that are sounds: WAV files or samples, scaled as preprocessor_config.json says."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from graphgen.errors import GraphgenError
from graphgen.generation.speech import samples
from graphgen.models.published.config import Config
from graphgen.models.published.folder import preprocessor, settings
from graphgen.models.published.hearing import shortest
from graphgen.models.published.wav2vec2 import SAMPLES
from graphgen.operands import Array

_LEAST = 1e-7
"""What the variance is added to."""


class Sound(NamedTuple):
    """A file, or the samples themselves."""

    where: str
    file: Path | None
    samples: Array | None
    size: int = 1


class Sounds:
    """Rows with `input_values`, samples between -1 and 1, or `audio`, the path of a WAV file.

    The samples of each have mean 0 and variance 1 if `do_normalize` says so, as transformers'
    Wav2Vec2FeatureExtractor makes them. Each row runs alone: what pads a shorter one would change
    it, in checkpoints that were trained without a mask.
    Raises GraphgenError for a preprocessor_config.json that asks for more, and names the field.
    """

    reads = ("audio", SAMPLES)

    def __init__(self, folder: Path, base: Path):
        self.base, self.missing = base, ""
        self.least = shortest(settings(folder, "config.json"))
        path, fields = preprocessor(folder, "feature_extractor")
        if not fields:
            raise GraphgenError(
                f"{folder} has no preprocessor_config.json, which says how sound is read; copy it "
                "from the checkpoint"
            )
        config = Config({"model_type": "preprocessor", **fields}, str(path))
        config.expect("feature_extractor_type", "Wav2Vec2FeatureExtractor")
        for name, value in (("padding_side", "right"), ("padding_value", 0.0), ("feature_size", 1)):
            config.expect(name, value)
        for name in ("processor_class", "return_attention_mask"):
            config.raw(name)
        self.rate = config.take("sampling_rate", int, 16000)
        self.scaled = config.take("do_normalize", bool, True)
        config.finish()

    def look(self, row: dict[str, Any], where: str) -> Sound:
        """The sound of a row; its file is read. Raises GraphgenError."""
        path, given = row.get("audio"), row.get(SAMPLES)
        if path is not None and given is not None:
            raise GraphgenError(f"{where} has `audio` and `{SAMPLES}`; give one of them")
        if isinstance(path, str):
            file = self.base / path
            self._check(samples(file, self.rate), f"{where}: {file}")
            return Sound(where, file, None)
        try:
            with np.errstate(over="ignore"):
                array: Array = np.array(given, np.float32)
        except (TypeError, ValueError):
            array = np.zeros((0, 0))
        if array.ndim != 1 or given is None:
            raise GraphgenError(
                f"{where} has neither `audio`, the path of a WAV file, nor `{SAMPLES}`, a list of "
                "samples"
            )
        self._check(array, where)
        return Sound(where, None, array)

    def _check(self, x: Array, where: str) -> None:
        if not np.isfinite(x).all():
            raise GraphgenError(f"{where} has samples that are not finite; give numbers")
        if len(x) < self.least:
            raise GraphgenError(
                f"{where} has {len(x)} samples; the model hears {self.least} or more: give a "
                "longer sound"
            )

    def feeds(self, sounds: Sequence[Sound]) -> dict[str, Array]:
        """The arrays of one sound, (1, S); all of it is sound."""
        [sound] = sounds
        x = sound.samples if sound.file is None else samples(sound.file, self.rate)
        x = np.asarray(x, np.float64)
        if self.scaled:
            x = (x - x.mean()) / np.sqrt(x.var() + _LEAST)
        values = x.astype(np.float32)[None]
        return {SAMPLES: values, "attention_mask": np.ones(values.shape, np.int64)}
