"""Small configurations of published encoder-decoders, and weights that depend on names alone."""

from typing import Any

import numpy as np
import published_decoders

LENGTH, VOCABULARY = published_decoders.LENGTH, 40
_T5: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 6,
    "d_ff": 24,
    "num_layers": 1,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12,
    "decoder_start_token_id": 0,
}
_BART: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 20,
    "max_position_embeddings": 16,
    "scale_embedding": True,
    "decoder_start_token_id": 2,
}
SEQ2SEQ: dict[str, dict[str, Any]] = {
    "mt5": _T5,
    "umt5": {**_T5, "feed_forward_proj": "relu", "num_layers": 2},
    "mbart": _BART,
    "pegasus": {**_BART, "activation_function": "relu"},
    "m2m_100": {**_BART, "d_model": 21, "encoder_attention_heads": 3, "pad_token_id": 3}
    | {"decoder_attention_heads": 7},
}


def fields(kind: str) -> dict[str, Any]:
    """The fields of a configuration, of config.json."""
    return {**SEQ2SEQ[kind], "is_encoder_decoder": True, "model_type": kind}


def weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Random numbers so large that each matters; of a name the same, whoever asks."""
    found = published_decoders.weight(name, shape)
    # The scores of T5 are not scaled, so what makes its queries is.
    return found / np.float32(_T5["d_kv"] ** 0.5) if ".q." in name else found


def inputs() -> dict[str, np.ndarray]:
    """Sources with padding on each side, and the tokens that are decoded."""
    return {
        "input_ids": published_decoders.ids(),
        "attention_mask": published_decoders.mask(),
        "decoder_input_ids": np.random.default_rng(1).integers(4, VOCABULARY, (3, LENGTH + 1)),
    }
