"""The architectures of GGUF that are encoders of text: BERT and NomicBERT."""

from collections.abc import Collection
from typing import Any

from graphgen.models.published.gguf_architecture import MEAN, SIZES, like_llama

_CAUSAL = "attention.causal"


def _both_sides(own: dict[str, Any], tensors: Collection[str]) -> dict[str, Any]:
    """Encoders see all tokens."""
    if own.get(_CAUSAL) is False:
        own.pop(_CAUSAL)
    return {}


_FIELDS = SIZES | {
    MEAN: "layer_norm_eps",
    "context_length": "max_position_embeddings",
    "vocab_size": "vocab_size",
}
_OTHERS = {
    "token_embd": "embeddings.word_embeddings",
    "token_types": "embeddings.token_type_embeddings",
}

ENCODERS = {
    "bert": like_llama(
        "bert",
        "context_length",
        _CAUSAL,
        layer={f"attn_{name[0]}": f"attention.self.{name}" for name in ("query", "key", "value")}
        | {"attn_output": "attention.output.dense", "ffn_up": "intermediate.dense"}
        | {"attn_output_norm": "attention.output.LayerNorm", "ffn_down": "output.dense"}
        | {"layer_output_norm": "output.LayerNorm"},
        others=_OTHERS
        | {"position_embd": "embeddings.position_embeddings"}
        | {"token_embd_norm": "embeddings.LayerNorm"},
        layers="encoder.layer",
        fields=_FIELDS,
        derive=_both_sides,
    ),
    "nomic_bert": like_llama(
        "nomic-bert",
        _CAUSAL,
        "rope.freq_base",
        layer={"attn_qkv": "attn.Wqkv", "attn_output": "attn.out_proj"}
        | {"attn_output_norm": "norm1", "layer_output_norm": "norm2"}
        | {"ffn_up": "mlp.fc11", "ffn_gate": "mlp.fc12", "ffn_down": "mlp.fc2"},
        others=_OTHERS | {"token_embd_norm": "emb_ln"},
        layers="encoder.layers",
        fields=_FIELDS | {"rope.freq_base": "rope_theta"},
        derive=_both_sides,
    ),
}
"""By model_type."""
