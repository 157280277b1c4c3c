"""Checkpoints with random weights of high variance, in the form in which they are published."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from graphgen.models.published import FAMILIES
from graphgen.models.published.config import Config
from graphgen.nn.linear import Linear
from graphgen.nn.module import Parameter, members
from graphgen.safetensors import to_bytes


def write_weights(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """A safetensors file."""
    path.write_bytes(to_bytes(arrays))


def random_checkpoint(folder: Path, fields: dict[str, Any], task: str | None = None) -> Path:
    """A folder of this configuration, with weights for a task, by default the first."""
    family, config = FAMILIES[fields["model_type"]], Config(fields)
    module = family.tasks[task or next(iter(family.tasks))](config)
    found = dict(members(module))
    linear = {f"{path}.weight" for path, item in found.items() if isinstance(item, Linear)}
    random = np.random.default_rng(0)
    parts: dict[str, list[np.ndarray]] = {}
    for path, item in found.items():
        if not isinstance(item, Parameter):
            continue
        name, array = family.source(path).name, random.standard_normal(item.shape, np.float32)
        if array.ndim > 1:
            array *= 1.5 / item.shape[0 if path in linear else -1] ** 0.5
        else:
            array = 0.1 * array + ("norm" in path and path.endswith("weight"))
        turned = family.transposed and path in linear
        parts.setdefault(name, []).append(array.T if turned else array)
    arrays = {name: np.concatenate(arrays, -1) for name, arrays in parts.items()}
    folder.mkdir(exist_ok=True)
    if (bias := "cls.predictions.decoder.bias") in arrays:  # as BERT was published
        arrays["cls.predictions.bias"] = arrays.pop(bias)
    (folder / "config.json").write_text(json.dumps(fields))
    write_weights(folder / "model.safetensors", arrays)
    return folder


SIZES = {
    "vocab_size": 200,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
GROUPED = {**SIZES, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 9}
BART = {
    "is_encoder_decoder": True,
    "vocab_size": 200,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 80,
    "max_position_embeddings": 128,
    "pad_token_id": 1,
    "decoder_start_token_id": 2,
    "eos_token_id": 9,
    "forced_eos_token_id": None,
}
CAUSAL: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **GROUPED},
    "mistral": {"model_type": "mistral", **GROUPED, "sliding_window": 7},
    "qwen2": {"model_type": "qwen2", **GROUPED, "tie_word_embeddings": True},
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": 200,
        "n_embd": 64,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 512,
        "bos_token_id": 1,
        "eos_token_id": 9,
    },
}
SEQ2SEQ: dict[str, dict[str, Any]] = {
    "t5": {
        "model_type": "t5",
        "is_encoder_decoder": True,
        "vocab_size": 200,
        "d_model": 64,
        "d_kv": 16,
        "d_ff": 96,
        "num_layers": 2,
        "num_decoder_layers": 2,
        "num_heads": 4,
        "pad_token_id": 0,
        "decoder_start_token_id": 0,
        "eos_token_id": 9,
    },
    "bart": {"model_type": "bart", **BART},
    "marian": {"model_type": "marian", **BART, "scale_embedding": True},
}
ENCODERS: dict[str, dict[str, Any]] = {
    "bert": {"model_type": "bert", **SIZES},
    "roberta": {"model_type": "roberta", **SIZES, "pad_token_id": 1, "type_vocab_size": 1},
    "distilbert": {
        "model_type": "distilbert",
        "vocab_size": 200,
        "dim": 64,
        "hidden_dim": 96,
        "n_layers": 3,
        "n_heads": 4,
        "max_position_embeddings": 512,
    },
}
