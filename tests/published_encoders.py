"""Small configurations of published encoders, and weights for them that depend on names alone."""

from typing import Any

import numpy as np
import published_decoders

_BASE: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "num_labels": 3,
}
_DISTANCES: dict[str, Any] = {
    "relative_attention": True,
    "position_biased_input": False,
    "pos_att_type": "p2c|c2p",
    "type_vocab_size": 0,
    "layer_norm_eps": 1e-7,
}

ENCODERS: dict[str, dict[str, Any]] = {
    "camembert": {**_BASE, "pad_token_id": 1},
    "camembert, odd": {"hidden_act": "relu", "pad_token_id": 5, "type_vocab_size": 1}
    | {"tie_word_embeddings": False},
    "data2vec-text": {**_BASE, "pad_token_id": 1},
    "roberta-prelayernorm": {**_BASE, "pad_token_id": 1, "hidden_act": "gelu_new"},
    "xlm-roberta-xl": {**_BASE, "pad_token_id": 1, "type_vocab_size": 1},
    "megatron-bert": {**_BASE, "tie_word_embeddings": False, "num_hidden_layers": 3},
    "electra": {**_BASE, "embedding_size": 20},
    "electra, one size": {"embedding_size": 32, "hidden_act": "gelu_new", "num_attention_heads": 2},
    "albert": {**_BASE, "embedding_size": 20, "num_hidden_layers": 3},
    "albert, groups": {
        "num_hidden_layers": 5,
        "num_hidden_groups": 2,
        "hidden_act": "relu",
        "tie_word_embeddings": False,
        "num_attention_heads": 8,
    },
    "mpnet": {**_BASE, "pad_token_id": 1},
    "mpnet, odd": {"hidden_act": "silu", "num_attention_heads": 1, "layer_norm_eps": 1e-3}
    | {"tie_word_embeddings": False, "num_hidden_layers": 3},
    "modernbert": {**_BASE, "local_attention": 6, "pad_token_id": 0, "num_hidden_layers": 3},
    "modernbert, odd": {
        "classifier_pooling": "mean",
        "classifier_activation": "relu",
        "classifier_bias": True,
        "hidden_activation": "gelu_new",
        "attention_bias": True,
        "mlp_bias": True,
        "norm_bias": True,
        "decoder_bias": False,
        "local_attention": 5,
        "global_attn_every_n_layers": 2,
        "tie_word_embeddings": False,
    },
    "modernbert, no bias": {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0}},
        "num_attention_heads": 2,
    },
    "eurobert": {**_BASE, "pad_token_id": 0},
    "eurobert, odd": {
        "classifier_pooling": "mean",
        "num_key_value_heads": 2,
        "head_dim": 12,
        "hidden_act": "gelu",
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
    },
    "eurobert, first": {"classifier_pooling": "bos"},
    "nomic_bert": _BASE,
    "nomic_bert, odd": {
        "head_dim": 12,
        "hidden_act": "gelu",
        "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
        "type_vocab_size": 1,
        "tie_word_embeddings": False,
    },
    "gte": {**_BASE, "pad_token_id": 1, "type_vocab_size": 1},
    "gte, odd": {
        "hidden_act": "silu",
        "type_vocab_size": 0,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 300.0, "factor": 1.5},
        "tie_word_embeddings": False,
    },
    "jina_embeddings_v3": {**_BASE, "pad_token_id": 1, "type_vocab_size": 2},
    "jina_embeddings_v3, odd": {
        "hidden_act": "relu",
        "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
        "tie_word_embeddings": False,
    },
    "deberta": {**_BASE, **_DISTANCES, "max_relative_positions": -1},
    "deberta, odd": {
        "pos_att_type": ["c2p"],
        "max_relative_positions": 5,
        "position_biased_input": True,
        "type_vocab_size": 2,
        "embedding_size": 20,
        "pooler_hidden_act": "tanh",
    },
    "deberta-v2": {
        **_BASE,
        **_DISTANCES,
        "max_relative_positions": -1,
        "position_buckets": 8,
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
    },
    "deberta-v2, odd": {
        "pos_att_type": ["p2c"],
        "max_relative_positions": 20,
        "position_buckets": 5,
        "share_att_key": False,
        "norm_rel_ebd": "none",
        "conv_kernel_size": 3,
        "conv_act": "gelu",
        "conv_groups": 2,
        "type_vocab_size": 2,
        "legacy": False,
    },
    "deberta-v2, absolute": {
        "relative_attention": False,
        "position_biased_input": True,
        "norm_rel_ebd": "none",
        "num_attention_heads": 2,
        "tie_word_embeddings": False,
    },
    "deberta-v2, no ranges": {"position_buckets": -1, "max_relative_positions": 4}
    | {"share_att_key": False, "pos_att_type": ["p2c", "c2p"], "conv_kernel_size": 5},
}
"""The first of a model type is whole; the others are named after it, and differ in these fields."""


def fields(which: str) -> dict[str, Any]:
    """The fields of a configuration, of config.json."""
    kind = which.split(",")[0]
    return ENCODERS.get(kind, {}) | ENCODERS[which] | {"model_type": kind}


HEADS = {"MaskedLM": "fill-mask", "SequenceClassification": "text-classification"}
"""What transformers calls the heads whose results are kept, and their tasks."""


def weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Random numbers so large that each matters; of a name the same, whoever asks."""
    name = name.removeprefix("roberta_prelayernorm.")  # which is no name of a norm
    name = name.replace("LayerNorm", "norm").replace("decoder.bias", "bias")
    return published_decoders.weight(name, shape)


def inputs(which: str) -> dict[str, np.ndarray]:
    """A full row, one with padding on the left, and one with it on the right, (3, 9) each."""
    ids, mask = published_decoders.ids() % 34 + 6, published_decoders.mask()
    given = fields(which)
    ids = np.where(mask == 1, ids, given.get("pad_token_id", 0))
    types = ids % max(given.get("type_vocab_size", 2), 1)
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}
