"""Small configurations of published models of images, and weights that depend on names alone."""

from typing import Any

import numpy as np
import published_decoders

_IMAGES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_channels": 2,
    "image_size": 9,
    "patch_size": 3,
}
_TEXTS: dict[str, Any] = {
    "hidden_size": 12,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "vocab_size": 30,
    "max_position_embeddings": 8,
    "bos_token_id": 1,
    "eos_token_id": 29,
}
VISION: dict[str, dict[str, Any]] = {
    "deit": {**_IMAGES, "image_size": [9, 12], "num_labels": 3},
    "dinov2": {**_IMAGES, "mlp_ratio": 2, "use_swiglu_ffn": True, "num_labels": 3},
    "vit_msn": {**_IMAGES, "num_labels": 3},
    "dinov2_with_registers": {**_IMAGES, "mlp_ratio": 2, "num_register_tokens": 2}
    | {"num_labels": 3, "image_size": 15},
    "clip": {"projection_dim": 10, "text_config": _TEXTS, "vision_config": _IMAGES},
    "siglip": {"text_config": {**_TEXTS, "projection_size": 16}, "vision_config": _IMAGES},
}
for kind in ("dinov2", "dinov2_with_registers"):
    del VISION[kind]["intermediate_size"]
ONE: dict[str, dict[str, Any]] = {
    "clip_text_model": {**_TEXTS, "projection_dim": 10},
    "clip_vision_model": {**_IMAGES, "projection_dim": 10},
    "siglip_text_model": {**_TEXTS, "projection_size": 16},
    "siglip_vision_model": _IMAGES,
}
"""One of the two towers."""

STORED = {"deit": frozenset({"distillation_classifier.weight"})}
"""What tells a configuration more than its fields do."""


def fields(kind: str) -> dict[str, Any]:
    """The fields of a configuration, of config.json."""
    return {**(VISION | ONE)[kind], "model_type": kind}


def weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Random numbers so large that each matters; of a name the same, whoever asks."""
    name = name.removeprefix("vit.")  # which transformers leaves out of some of MSN's
    return np.asarray(published_decoders.weight(name, shape), np.float32)


def inputs(kind: str) -> dict[str, np.ndarray]:
    """Images, of another size than the positions if the model takes any, and texts."""
    random = np.random.default_rng(0)
    size = {"deit": (9, 12), "dinov2": (12, 6), "dinov2_with_registers": (12, 6)}.get(kind, (9, 9))
    images = {"pixel_values": random.standard_normal((2, 2, *size)).astype(np.float32)}
    if "text_config" not in VISION[kind]:
        return images
    ids = random.integers(2, 29, (3, 8))
    ids[0, 7] = ids[1, 4] = ids[2, 3] = ids[2, 6] = 29
    mask = np.ones_like(ids)
    mask[1, 5:] = mask[2, :2] = 0
    texts = {"input_ids": ids, "attention_mask": mask}
    return images | {name: texts[name] for name in [*texts][: 2 if kind == "clip" else 1]}
