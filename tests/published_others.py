"""Small models of types that share little with others, and weights that depend on names alone."""

from typing import Any

import numpy as np
import published_decoders

_TEXT: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "num_labels": 3,
    "pad_token_id": 1,
}
_ETTIN = {**_TEXT, "model_type": "modernbert-decoder", "local_attention": 6, "pad_token_id": 0}
_ESM = {**_TEXT, "model_type": "esm", "mask_token_id": 39}
_WAVLM: dict[str, Any] = {
    "model_type": "wavlm",
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "conv_dim": [6, 8],
    "conv_kernel": [10, 3],
    "conv_stride": [5, 2],
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "vocab_size": 10,
    "classifier_proj_size": 6,
    "num_labels": 3,
    "num_buckets": 16,
    "max_bucket_distance": 20,
}

_SWIN: dict[str, Any] = {
    "model_type": "swin",
    "image_size": [26, 34],
    "patch_size": 2,
    "embed_dim": 8,
    "depths": [1, 2],
    "num_heads": [2, 4],
    "window_size": 4,
    "num_labels": 3,
}
_CONVNEXT: dict[str, Any] = {
    "model_type": "convnext",
    "hidden_sizes": [4, 8],
    "depths": [1, 2],
    "num_stages": 2,
    "num_labels": 3,
}

OTHERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "ettin": ("ModernBertDecoderForCausalLM", "text-generation", _ETTIN),
    "ettin, odd": (
        "ModernBertDecoderForCausalLM",
        "text-generation",
        {**_ETTIN, "tie_word_embeddings": False, "decoder_bias": False, "classifier_bias": True},
    ),
    "ettin, classes": (
        "ModernBertDecoderForSequenceClassification",
        "text-classification",
        {**_ETTIN, "classifier_bias": True, "classifier_activation": "relu", "norm_bias": True},
    ),
    "esm": (
        "EsmForMaskedLM",
        "fill-mask",
        {**_ESM, "position_embedding_type": "rotary", "token_dropout": True},
    ),
    "esm, absolute": (
        "EsmForSequenceClassification",
        "text-classification",
        {**_ESM, "emb_layer_norm_before": True, "token_dropout": False},
    ),
    "wavlm": ("WavLMForCTC", "automatic-speech-recognition", _WAVLM),
    "wavlm, stable": (
        "WavLMForSequenceClassification",
        "audio-classification",
        {**_WAVLM, "feat_extract_norm": "layer", "do_stable_layer_norm": True},
    ),
    "swin": ("SwinForImageClassification", "image-classification", _SWIN),
    "swin, whole": (
        "SwinForImageClassification",
        "image-classification",
        {**_SWIN, "image_size": 24, "window_size": 3, "use_absolute_embeddings": True},
    ),
    "convnext": ("ConvNextForImageClassification", "image-classification", _CONVNEXT),
    "convnextv2": (
        "ConvNextV2ForImageClassification",
        "image-classification",
        {**_CONVNEXT, "model_type": "convnextv2"},
    ),
}
"""By a name: the class of transformers, the task, and the fields of config.json."""


def weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Random numbers so large that each matters; of a name the same, whoever asks."""
    name = name.replace("LayerNorm", "norm").replace("lm_head.decoder.bias", "lm_head.bias")
    array = published_decoders.weight(name, shape)
    if len(shape) > 2:  # of what a convolution adds up
        array = array * np.float32((shape[-1] / np.prod(shape[1:])) ** 0.5)
    # The length of a direction is no small number.
    return np.abs(array) + np.float32(0.5) if name.endswith("original0") else array


def inputs(which: str) -> dict[str, np.ndarray]:
    """What the class of transformers is called with."""
    fields = OTHERS[which][2]
    if "conv_dim" in fields:
        mask = np.arange(130) < np.array([[130], [90]])
        x = np.random.default_rng(0).standard_normal(mask.shape).astype(np.float32) * mask
        masked = fields.get("feat_extract_norm") == "layer"
        return {"input_values": x, **({"attention_mask": mask.astype(np.int64)} if masked else {})}
    if fields["model_type"].startswith(("swin", "convnext")):
        size = fields.get("image_size", [31, 40])
        size = size if isinstance(size, list) else [size, size]
        return {"pixel_values": np.random.default_rng(0).standard_normal((2, 3, *size), "f")}
    mask = published_decoders.mask()
    ids = np.where(mask == 1, published_decoders.ids() % 34 + 6, fields["pad_token_id"])
    found = {"input_ids": ids, "attention_mask": mask}
    if OTHERS[which][1] == "text-generation":
        found["position_ids"] = np.maximum(mask.cumsum(1) - 1, 0)
    return found


def kept(which: str, x: np.ndarray) -> np.ndarray:
    """The results of tokens that are no padding, or all."""
    mask = inputs(which).get("attention_mask")
    tokens = mask is not None and x.ndim == 3 and x.shape[:2] == mask.shape
    return x[mask.astype(bool)] if tokens and mask is not None else x
