"""A small Whisper, weights that depend on names alone, and sounds for it."""

import wave
from pathlib import Path
from typing import Any

import numpy as np
import published_decoders

RATE = 16000
FIELDS: dict[str, Any] = {
    "model_type": "whisper",
    "is_encoder_decoder": True,
    "vocab_size": 60,
    "num_mel_bins": 8,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 20,
    "max_source_positions": 10,
    "max_target_positions": 50,
    "pad_token_id": 1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 3,
}
PREPROCESSOR: dict[str, Any] = {
    "feature_extractor_type": "WhisperFeatureExtractor",
    "feature_size": 8,
    "chunk_length": 1,
    "hop_length": 800,
    "sampling_rate": RATE,
}
GENERATION: dict[str, Any] = {
    "pad_token_id": 1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 3,
    "max_length": 50,
    "forced_decoder_ids": [[1, None], [2, 43]],
    "lang_to_id": {"<|en|>": 40, "<|fr|>": 41, "<|de|>": 42},
    "task_to_id": {"transcribe": 43, "translate": 44},
    "no_timestamps_token_id": 59,
    "is_multilingual": True,
    "return_timestamps": False,
    "no_repeat_ngram_size": 2,
    "suppress_tokens": [5, 7],
    "begin_suppress_tokens": [20, 2],
}


def weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Random numbers so large that each matters; of a name the same, whoever asks."""
    return published_decoders.weight(name, shape)


def sounds() -> list[np.ndarray]:
    """A rising tone and noise, shorter; samples that 16 bits hold exactly."""
    time = np.arange(RATE) / RATE
    noise = np.random.default_rng(0).standard_normal(RATE // 3) / 8
    rising = np.sin(2 * np.pi * (300 + 400 * time) * time) / 2
    return [np.round(x * 32768).astype(np.float32) / 32768 for x in (rising, noise)]


def tokens() -> np.ndarray:
    """What is decoded, (2, 10)."""
    return np.random.default_rng(1).integers(0, 60, (2, 10))


def write_wav(
    path: Path, x: np.ndarray, *, rate: int = RATE, width: int = 2, channels: int = 1
) -> Path:
    """A WAV file of these samples."""
    whole = np.round(x * 2.0 ** (8 * width - 1)).astype("<i4")
    data = whole.view(np.uint8).reshape(-1, 4)[:, :width].tobytes()
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(data)
    return path
