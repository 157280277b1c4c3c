"""Checkpoints with random weights of high variance, in the form in which they are published."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from graphgen.models.published import FAMILIES
from graphgen.models.published.config import Config
from graphgen.models.published.family import Family
from graphgen.models.published.weights import Stack
from graphgen.nn.module import members
from graphgen.safetensors import to_bytes


def write_weights(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """A safetensors file."""
    path.write_bytes(to_bytes(arrays))


def random_checkpoint(folder: Path, fields: dict[str, Any], task: str | None = None) -> Path:
    """A folder of this configuration, with weights for a task, by default the first."""
    family, config = FAMILIES[fields["model_type"]], Config(fields)
    module = family.tasks[task or next(iter(family.tasks))](config)
    random, arrays = np.random.default_rng(0), {}
    for name, shape in stored_shapes(family, module).items():
        arrays[name] = array = random.standard_normal(shape, np.float32)
        if array.ndim > 1:
            array *= 1.5 / shape[-1 if family.transposed else 0] ** 0.5
        else:
            normed = re.search(r"norm|ln_|LayerNorm", name) and name.endswith("weight")
            arrays[name] = 0.1 * array + (1.0 if normed else 0.0)
    folder.mkdir(exist_ok=True)
    if (bias := "cls.predictions.decoder.bias") in arrays:  # as BERT was published
        arrays["cls.predictions.bias"] = arrays.pop(bias)
    (folder / "config.json").write_text(json.dumps(fields))
    write_weights(folder / "model.safetensors", arrays)
    return folder


def stored_shapes(family: Family, module: Any) -> dict[str, tuple[int, ...]]:
    """The shapes of the weights that a checkpoint for a module has, by name."""
    found, turning = dict(members(module)), family.turned(module)
    shapes = dict[str, tuple[int, ...]]()
    for path, source in family.sources(module).items():
        shape = found[path].shape
        if isinstance(source, Stack):
            for name in (n.format(row) for n in source.names for row in range(shape[0])):
                shapes[name] = (shape[1] // len(source.names), *shape[2:])
            continue
        shape = (*shape[:-1], source.whole(shape[-1])) if shape else shape
        shapes[source.name] = (*shape[:-2], *shape[:-3:-1]) if path in turning else shape
    return shapes


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
