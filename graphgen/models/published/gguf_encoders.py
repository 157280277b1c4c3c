"""The architectures of GGUF that are encoders of text: BERT, XLM-RoBERTa and NomicBERT."""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from graphgen.errors import GraphgenError
from graphgen.models.published.few_bits import Made
from graphgen.models.published.gguf_architecture import MEAN, SIZES, like_llama
from graphgen.operands import Array
from graphgen.safetensors import Weight

_CAUSAL = "attention.causal"


def _both_sides(own: dict[str, Any], tensors: Collection[str]) -> dict[str, Any]:
    """Encoders see all tokens."""
    if own.get(_CAUSAL) is False:
        own.pop(_CAUSAL)
    return {}


_BEFORE = 2  # rows of the table of positions of RoBERTa: files are without those
_TYPES, _POSITIONS = "token_types.weight", "embeddings.position_embeddings.weight"


def _one_type(own: Mapping[str, Any], tensors: Mapping[str, Weight]) -> bool:
    """Whether tokens have no types, as in RoBERTa's classes."""
    return _TYPES in tensors and tensors[_TYPES].shape[0] == 1


def _roberta(own: dict[str, Any], tensors: Collection[str]) -> dict[str, Any]:
    """Positions are counted from behind the padding's."""
    own["context_length"] += _BEFORE
    return {"type_vocab_size": 1, **_both_sides(own, tensors)}


def _with_padding(found: dict[str, Weight], fields: Mapping[str, Any]) -> dict[str, Weight]:
    """The table of positions with the rows that no token has."""
    padding, table = fields.get("tokenizer.ggml.padding_token_id"), found.get(_POSITIONS)
    if table is None:
        return found
    if padding not in (None, _BEFORE - 1):
        problem = f"padding is token {padding!r:.40}, in RoBERTa's files it is {_BEFORE - 1}"
        raise GraphgenError(f"{table.path}: {problem}; build the checkpoint that it was made of")

    def make() -> Array:
        rows: Array = table.read().astype(np.float32)
        return np.concatenate([np.zeros((_BEFORE, *rows.shape[1:]), np.float32), rows])

    shape = (table.shape[0] + _BEFORE, *table.shape[1:])
    where = (table.path, _POSITIONS, ir.DataType.FLOAT, shape, table.offset)
    return found | {_POSITIONS: Made(*where, make=make)}


_FIELDS = SIZES | {
    MEAN: "layer_norm_eps",
    "context_length": "max_position_embeddings",
    "vocab_size": "vocab_size",
}
_OTHERS = {
    "token_embd": "embeddings.word_embeddings",
    "token_types": "embeddings.token_type_embeddings",
}

_OF_BERT: dict[str, Any] = {
    "layer": {f"attn_{name[0]}": f"attention.self.{name}" for name in ("query", "key", "value")}
    | {"attn_output": "attention.output.dense", "ffn_up": "intermediate.dense"}
    | {"attn_output_norm": "attention.output.LayerNorm", "ffn_down": "output.dense"}
    | {"layer_output_norm": "output.LayerNorm"},
    "others": _OTHERS
    | {"position_embd": "embeddings.position_embeddings"}
    | {"token_embd_norm": "embeddings.LayerNorm"},
    "layers": "encoder.layer",
    "fields": _FIELDS,
}
_ROBERTA = like_llama(
    "bert",
    "context_length",
    _CAUSAL,
    when=_one_type,
    derive=_roberta,
    finish=_with_padding,
    **_OF_BERT,
)

ENCODERS = {
    "bert": like_llama(
        "bert",
        "context_length",
        _CAUSAL,
        when=lambda own, tensors: not _one_type(own, tensors),
        derive=_both_sides,
        **_OF_BERT,
    ),
    **dict.fromkeys(("xlm-roberta", "roberta", "camembert"), _ROBERTA),
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
