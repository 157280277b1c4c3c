"""What sets the GGUF files of an architecture apart from the folder of a checkpoint."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from graphgen.operands import Array
from graphgen.safetensors import Weight

Derive: TypeAlias = Callable[[dict[str, Any], Collection[str]], dict[str, Any]]
Finish: TypeAlias = Callable[[dict[str, Weight], Mapping[str, Any]], dict[str, Weight]]
Order: TypeAlias = Callable[[int, int, int], Array]
When: TypeAlias = Callable[[Mapping[str, Any], Mapping[str, Weight]], bool]
HEADS, WINDOW = "attention.head_count", "attention.sliding_window"
PATTERN = f"{WINDOW}_pattern"

LAYER = {
    "attn_norm": "input_layernorm",
    **{f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"},
    **{f"attn_{x}_norm": f"self_attn.{x}_norm" for x in "qk"},
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    **{f"ffn_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")},
}
OTHERS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}

SIZES = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    HEADS: "num_attention_heads",
}
FIELDS = SIZES | {
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "rope.dimension_count": "head_dim",
    "rope.freq_base": "rope_theta",
    "context_length": "max_position_embeddings",
    "vocab_size": "vocab_size",
}
RMS, MEAN = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
WITH_RMS = FIELDS | {RMS: "rms_norm_eps"}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The files of one `general.architecture`, called `name`.

    Args:
        when: Whether a file is of this model type, where several have the name: by its fields and
            its tensors.
        layer: What the parts of a layer, such as attn_q, are called in a checkpoint's layer; with
            {} for several tensors: rows of one, or the matrices of experts. A part with its ending,
            such as attn_sinks.weight, has a name without one.
        instead: Other names in files that have the part of the key.
        others: The same for parts outside of layers.
        layers: What the checkpoint calls layers.
        fields: The configuration's names of fields, each without the architecture's name.
        needed: The fields without which a file does not say enough.
        derive: Takes fields that have no name in the configuration out of the file's and returns
            what they and the names of the tensors say, and what all published checkpoints have.
        yarn: Takes further fields out of the file's, and returns what they say of `rope_scaling` of
            the kind yarn.
        lacks: The fields among those that files say nothing of.
        order: Where the rows of parts stand in the file, by the number of rows, of heads, and of
            heads of keys.
        gains: Whether gains of norms are stored as 1 + w, where the checkpoint has w.
        finish: Makes the checkpoint's weights of those that have its names, by the file's fields.
    """

    name: str
    when: When = lambda own, tensors: True
    layer: Mapping[str, str]
    instead: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    others: Mapping[str, str]
    layers: str = "model.layers"
    fields: Mapping[str, str]
    needed: Collection[str]
    derive: Derive = lambda own, tensors: {}
    yarn: Derive = lambda own, tensors: {}
    lacks: Collection[str] = ()
    order: Mapping[str, Order] = field(default_factory=dict)
    gains: bool = False
    finish: Finish = lambda found, fields: found


def like_llama(name: str, *needed: str, **own: Any) -> Architecture:
    """With Llama's names of tensors and fields, except where `own` says otherwise."""
    given: dict[str, Any] = {"layer": LAYER, "others": OTHERS, "fields": WITH_RMS} | own
    epsilon = RMS if RMS in given["fields"] else MEAN
    return Architecture(name=name, needed=(*SIZES, epsilon, *needed), **given)


def in_pairs(rows: int, heads: int) -> Array:
    """Where the rows of heads stand: the file has two that turn together side by side."""
    return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).ravel()


def grouped(rows: int, heads: int, kv_heads: int) -> Array:
    """Where queries, keys and values of each group stand: the file has all of a kind in turn."""
    each = np.arange(rows).reshape(heads + 2 * kv_heads, -1)
    kinds = np.split(each, [heads, heads + kv_heads])
    return np.concatenate([x.reshape(kv_heads, -1) for x in kinds], axis=1).ravel()


PAIRED: dict[str, Order] = {
    "attn_q": lambda rows, heads, kv_heads: in_pairs(rows, heads),
    "attn_k": lambda rows, heads, kv_heads: in_pairs(rows, kv_heads),
}


def has(**parts: str) -> Derive:
    """Fields that say whether there are these tensors in the first layer."""
    return lambda own, tensors: {name: f"blk.0.{part}" in tensors for name, part in parts.items()}


BIASES = has(attention_bias="attn_q.bias")
BOTH_BIASES = has(attention_bias="attn_q.bias", mlp_bias="ffn_up.bias")


def divided(own: dict[str, Any], tensors: Collection[str]) -> dict[str, Any]:
    """The features of a head where files do not say them, which classes have a number for."""
    size = own["embedding_length"] // own[HEADS]
    return {} if "attention.key_length" in own else {"head_dim": size}


def each(*parts: Derive) -> Derive:
    """What several say, one after the other."""

    def derive(own: dict[str, Any], tensors: Collection[str]) -> dict[str, Any]:
        return {name: x for part in parts for name, x in part(own, tensors).items()}

    return derive


def local(own: dict[str, Any], tensors: Collection[str]) -> dict[str, Any]:
    """Which layers have a window."""
    pattern = own.get(PATTERN)
    if not isinstance(pattern, list) or not {*map(type, pattern)} <= {bool}:
        return {}
    kinds = ["sliding_attention" if one else "full_attention" for one in own.pop(PATTERN)]
    return {"layer_types": kinds}


def without_mamba(own: dict[str, Any], tensors: Collection[str]) -> dict[str, Any]:
    """Sizes of Mamba's layers say nothing where there are none, as their tensors would be named.

    Nor does that of what all tokens use beside experts, if that is all that they use.
    """
    for name in [name for name in own if name.startswith("ssm.")]:
        own.pop(name)
    shared = "expert_shared_feed_forward_length"
    if "expert_count" not in own and own.get(shared) == own.get("feed_forward_length"):
        own.pop(shared, None)
    return BIASES(own, tensors)


def unstretched(own: dict[str, Any], tensors: Collection[str]) -> dict[str, Any]:
    """Positions as they are, where classes stretch those of a configuration without the field."""
    plain = "rope_freqs.weight" not in tensors and "rope.scaling.type" not in own
    return {"rope_scaling": {"rope_type": "default"}} if plain else {}


def turned(name: str, *more: Derive) -> Derive:
    """A field that says which part of a head is turned, and `more`."""

    def derive(own: dict[str, Any], tensors: Collection[str]) -> dict[str, Any]:
        size = own.get("attention.key_length") or own["embedding_length"] // own[HEADS]
        count = own.pop("rope.dimension_count", size)
        part = count / size
        part = part if int(size * part) == count else float(np.nextafter(part, 2.0))
        return {name: part} | {k: x for one in more for k, x in one(own, tensors).items()}

    return derive
