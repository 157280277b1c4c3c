"""GGUF files of checkpoints, written as the format and gguf-py's tables of names say."""

import re
import struct
from pathlib import Path
from typing import Any

import gguf_routed
import numpy as np
from published_decoders import fields as decoder
from random_checkpoints import CAUSAL

KINDS = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q4_K": 12}
KINDS |= {"Q5_K": 13, "Q6_K": 14}
ODD_KINDS = {"Q2_K": 10, "Q3_K": 11, "IQ4_NL": 20, "IQ4_XS": 23, "TQ1_0": 34, "TQ2_0": 35}
ODD_KINDS |= {"MXFP4": 39}


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def gguf(path: Path, fields: dict[str, Any], tensors: dict[str, tuple[str, Any, bytes]]) -> None:
    """A file: a field is a string, a boolean, a number, or a list of strings or numbers."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(fields))
    for name, value in fields.items():
        head += text(name)
        if isinstance(value, str):
            head += struct.pack("<I", 8) + text(value)
        elif isinstance(value, bool):
            head += struct.pack("<I?", 7, value)
        elif isinstance(value, list) and isinstance(value[0], bool):
            head += struct.pack("<IIQ", 9, 7, len(value)) + bytes(value)
        elif isinstance(value, list) and not isinstance(value[0], str):
            whole = isinstance(value[0], int)
            head += struct.pack("<IIQ", 9, 5 if whole else 6, len(value))
            head += struct.pack(f"<{len(value)}{'i' if whole else 'f'}", *value)
        elif isinstance(value, list):
            head += struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))
        else:
            head += struct.pack(
                "<II" if isinstance(value, int) else "<If", 4 + 2 * (type(value) is float), value
            )
    body = b""
    for name, (kind, shape, data) in tensors.items():
        body += b"\0" * (-len(body) % 32)
        head += text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
        head += struct.pack("<IQ", (KINDS | ODD_KINDS)[kind], len(body))
        body += data
    path.write_bytes(head + b"\0" * (-len(head) % 32) + body)


def in_pairs(rows: Any, heads: int) -> Any:
    """Rows as llama's files have them: 2 i is row i of a head, 2 i + 1 row i + half of it."""
    each, place = len(rows) // heads, np.zeros_like(rows)
    for head in range(heads):
        for i in range(each // 2):
            place[head * each + 2 * i] = rows[head * each + i]
            place[head * each + 2 * i + 1] = rows[head * each + i + each // 2]
    return place


_BY_NAME = {
    "input_layernorm": "attn_norm",
    **{f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"},
    **{f"self_attn.{x}_norm": f"attn_{x}_norm" for x in "qk"},
    **{f"self_attn.{x}_layernorm": f"attn_{x}_norm" for x in "qk"},
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "post_self_attn_layernorm": "post_attention_norm",
    "post_mlp_layernorm": "post_ffw_norm",
    "attention_layernorm": "attn_norm",
    "feedforward_layernorm": "ffn_norm",
    **{f"self_attn.{name}_layernorm": f"attn_{name[0]}_norm" for name in ("query", "key")},
    "self_attn.dense": "attn_output",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
    "norm_1": "attn_norm",
    "norm_2": "ffn_norm",
    "attn.Wqkv": "attn_qkv",
    "attn.out_proj": "attn_output",
    "ffn.up_proj": "ffn_up",
    "ffn.down_proj": "ffn_down",
    **{f"mlp.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")},
    "mlp.gate_up_proj": "ffn_up",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
    "ln_1": "attn_norm",
    "ln_2": "ffn_norm",
    "ln_mlp": "attn_norm",
    "ln_attn": "attn_norm_2",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    **{f"{x}.query_key_value": "attn_qkv" for x in ("self_attention", "attention")},
    **{f"{x}.dense": "attn_output" for x in ("self_attention", "attention")},
    **{f"{x}.gate": "ffn_gate_inp" for x in ("mlp", "block_sparse_moe")},
    **{f"mlp.experts.{x}_proj": f"ffn_{x}_exps" for x in ("gate", "up", "down")},
    **{
        f"block_sparse_moe.experts.{x}": f"ffn_{part}_exps"
        for x, part in (("w1", "gate"), ("w3", "up"), ("w2", "down"))
    },
    **{f"mlp.shared_expert.{x}_proj": f"ffn_{x}_shexp" for x in ("gate", "up", "down")},
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.dense_h_to_4h": "ffn_up",
    "mlp.dense_4h_to_h": "ffn_down",
}
_OUTSIDE = {
    **dict.fromkeys(("embed_tokens", "wte", "word_embeddings", "embed_in"), "token_embd"),
    "wpe": "position_embd",
    **dict.fromkeys(
        ("norm", "ln_f", "norm_f", "final_layer_norm", "final_layernorm"), "output_norm"
    ),
    "word_embeddings_layernorm": "token_embd_norm",
    **dict.fromkeys(("lm_head", "embed_out"), "output"),
}
ARCHITECTURES = {"cohere": "command-r", "gemma3_text": "gemma3", "gpt_neox": "gptneox"}
ARCHITECTURES |= {"mixtral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe"}
ARCHITECTURES |= {"gpt_bigcode": "starcoder", "hunyuan_v1_dense": "hunyuan-dense", "phi": "phi2"}
ARCHITECTURES |= {"glm": "chatglm", "ministral3": "mistral3", "olmo3": "olmo2"}
ARCHITECTURES |= gguf_routed.ARCHITECTURES
_BY_NAME |= gguf_routed.BY_NAME
_AFTER = (*gguf_routed.AFTER, "gemma2", "gemma3_text", "olmo2", "olmo3", "exaone4", "seed_oss")
PAIRED = (
    "granitemoe",
    "granitemoeshared",
    "llama",
    "granite",
    "smollm3",
    "mixtral",
    "arcee",
    "ministral3",
    "olmo",
)
_GPT2 = ("gpt2", "gpt_bigcode")


def gguf_name(kind: str, name: str) -> str:
    """What a file of a model type calls a weight of its checkpoint."""
    base, _, last = name.rpartition(".")
    parts = base.split(".")
    layer = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    if layer is None:
        return f"{_OUTSIDE[parts[-1]]}.{last}"
    own = ".".join(parts[layer + 1 :])
    if own == "post_attention_layernorm":
        part = "post_attention_norm" if kind in _AFTER else "ffn_norm"
    else:
        part = _BY_NAME[own]
    return f"blk.{parts[layer]}.{part}.{last}"


_COUNTS = {
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "features": ("hidden_size", "n_embd", "d_model"),
    "layers": ("num_hidden_layers", "n_layer", "n_layers"),
    "positions": ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
}


def count(fields: dict[str, Any], what: str) -> int:
    """How many there are, whatever the configuration calls it."""
    return int(next((fields[name] for name in _COUNTS[what] if name in fields), 64))


def old(fields: dict[str, Any]) -> bool:
    """Whether a file is written as before llama.cpp had a cache of latent vectors."""
    return fields.get("topk_method") == "group_limited_greedy"


def converted(fields: dict[str, Any], weights: dict[str, Any]) -> dict[str, Any]:
    """The arrays of a file: as the checkpoint has them, or changed as llama.cpp's code wants it."""
    kind, found = fields["model_type"], dict[str, Any]()
    if kind in gguf_routed.KINDS:
        weights = gguf_routed.taken_apart(fields, weights, old=old(fields))
    stacks = dict[str, dict[int, Any]]()
    heads = count(fields, "heads")
    kv_heads = fields.get("num_key_value_heads", heads)
    groups = heads
    if kind == "falcon":
        groups = fields["num_kv_heads"] if fields.get("new_decoder_architecture") else 1
    for name, w in weights.items():
        if found_row := re.fullmatch(r"(.*)(?:\.norms|(\.experts))\.(\d+)(\..*)", name):
            base, experts, number, last = found_row.groups(default="")
            stacks.setdefault(gguf_name(kind, base + experts + last), {})[int(number)] = w
            continue
        if ".act_fn." in name:
            continue  # a field
        own = gguf_name(kind, name)
        part = own.split(".")[-2]
        if part == "ffn_gate_inp_shexp":
            w = w[0]
        elif kind in PAIRED and part in ("attn_q", "attn_k"):
            w = in_pairs(w, heads if part == "attn_q" else kv_heads)
        elif kind.startswith(("gemma", "nemotron")) and own.endswith("norm.weight"):
            w = w + np.float32(1)
        elif kind == "gpt2" and w.ndim == 2 and own.startswith("blk."):
            w = np.ascontiguousarray(w.T)
        elif part == "attn_qkv" and kind in ("falcon", "gpt_neox", "bloom"):
            each = w.reshape(groups, heads // groups + 2, -1, *w.shape[1:])
            kinds = (each[:, :-2], each[:, -2], each[:, -1])
            w = np.concatenate([x.reshape(-1, *w.shape[1:]) for x in kinds])
        found[own] = w
    return found | {n: np.stack([x[i] for i in sorted(x)]) for n, x in stacks.items()}


_FIVE = ("olmo2", "olmo3", "phi3", "mixtral", "olmoe", "arcee", "ernie4_5", "hunyuan_v1_dense")
_FIVE += ("exaone4", "apertus", "ministral3", "gpt_oss", "glm4_moe", "glm4_moe_lite")
_FIVE += ("ernie4_5_moe",)
"""Whose classes have an epsilon of 1e-5 where a configuration says nothing."""


def _local(fields: dict[str, Any], layers: int) -> list[str]:
    every = fields.get("sliding_window_pattern", 4)
    kinds = ("full_attention", "sliding_attention")
    return [kinds[(i + 1) % every > 0] for i in range(layers)]


def _stretched(given: dict[str, Any], size: int) -> dict[str, Any]:
    """What a file says of positions that are stretched."""
    kind, own = given.get("rope_type"), "rope.scaling."
    if kind == "dynamic":  # alpha of HunYuan
        base = given["rope_theta"] * given["alpha"] ** (size / (size - 2))
        none = {f"{own}type": "none", f"{own}factor": 1.0, f"{own}original_context_length": 262144}
        return {"rope.freq_base": base, **none}
    if kind not in ("linear", "yarn"):
        return {}
    found = {f"{own}type": kind, f"{own}factor": given["factor"]}
    names = {"original_max_position_embeddings": "original_context_length"}
    names |= {f"beta_{x}": f"yarn_beta_{x}" for x in ("fast", "slow")}
    names |= {"attention_factor": "yarn_attn_factor", "mscale_all_dim": "yarn_log_multiplier"}
    found |= {f"{own}{n}": given[x] for x, n in names.items() if x in given}
    if "llama_4_scaling_beta" in given:
        found["attention.temperature_scale"] = given["llama_4_scaling_beta"]
    return found


def metadata(fields: dict[str, Any]) -> dict[str, Any]:
    """What a file says of a configuration, as the conversion writes it."""
    kind = fields["model_type"]
    arch = ARCHITECTURES.get(kind, kind)
    features, heads = count(fields, "features"), count(fields, "heads")
    size = fields.get("head_dim", features // heads)
    rope = fields.get("rope_parameters") or {}
    part = rope.get("partial_rotary_factor", fields.get("partial_rotary_factor"))
    hidden = fields.get("intermediate_size", fields.get("ffn_hidden_size", 4 * features))
    found = {
        "block_count": count(fields, "layers"),
        "embedding_length": features,
        "feed_forward_length": fields.get("n_inner", hidden),
        "context_length": count(fields, "positions"),
        "attention.head_count": heads,
    }
    epsilon = ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
    means = kind in ("stablelm", "starcoder2", "cohere", "cohere2", *_GPT2, "falcon", "gpt_neox")
    if means or kind in ("bloom", "mpt", "nemotron", "olmo", "phi"):
        given = next((fields[n] for n in epsilon if n in fields), 1e-5)
        found["attention.layer_norm_epsilon"] = given
    else:
        absent = dict.fromkeys(_FIVE, 1e-5) | dict.fromkeys(("glm", "glm4"), 1.5625e-7)
        found["attention.layer_norm_rms_epsilon"] = fields.get(
            "rms_norm_eps", absent.get(kind, 1e-6)
        )
    if kind == "falcon":
        new = fields.get("new_decoder_architecture")
        found |= {"attention.head_count_kv": fields["num_kv_heads"] if new else 1}
        found["tensor_data_layout"] = "jploski"
    elif kind == "gpt_bigcode":
        found["attention.head_count_kv"] = 1
    elif kind not in ("gpt2", "gpt_neox", "mpt"):
        found["attention.head_count_kv"] = fields.get("num_key_value_heads", heads)
    if "head_dim" in fields:
        found |= {"attention.key_length": size, "attention.value_length": size}
    absent_parts = {"glm4": 0.5, "phi3": 1.0, "stablelm": 0.25, "gpt_neox": 0.25, "cohere2": 1.0}
    absent_parts |= dict.fromkeys(("glm", "glm4_moe", "nemotron", "phi"), 0.5)
    absent_parts |= dict.fromkeys(("arcee", "apertus", "ministral3"), 1.0)
    if kind in absent_parts:
        part = fields.get("rotary_pct", absent_parts[kind]) if part is None else part
        found["rope.dimension_count"] = int(part * size)
    without = ("gemma", "gemma2", *_GPT2, "stablelm", "gpt_neox", "falcon", "bloom", "mpt", "phi")
    if kind not in without:
        theta = {"cohere": 5e5, "gemma3_text": 1e6, "smollm3": 2e6, "mixtral": 1e6, "olmo3": 5e5}
        theta |= {"ernie4_5": 5e5, "ernie4_5_moe": 5e5, "apertus": 1.2e7, "minimax_m2": 5e6}
        found["rope.freq_base"] = rope.get("rope_theta", theta.get(kind, 1e4))
    found |= _stretched(fields.get("rope_scaling") or rope, size)
    if kind in ("exaone4", "olmo3") and fields.get("sliding_window"):
        local = fields.get("layer_types") or _local(fields, found["block_count"])
        found["attention.sliding_window"] = fields["sliding_window"]
        found["attention.sliding_window_pattern"] = [x == "sliding_attention" for x in local]
    if kind == "mpt":
        own = fields.get("attn_config", {})
        found["attention.max_alibi_bias"] = 8.0
        found |= {"attention.clamp_kqv": own["clip_qkv"]} if "clip_qkv" in own else {}
    if "clip_qkv" in fields:
        found["attention.clamp_kqv"] = fields["clip_qkv"]
    if kind in ("cohere", "cohere2"):
        found["logit_scale"] = fields.get("logit_scale", 0.0625)
        found["rope.scaling.type"] = "none"
        found["vocab_size"] = fields["vocab_size"]
    if kind.startswith("granite"):
        found["attention.scale"] = fields.get("attention_multiplier", 1.0)
        found["embedding_scale"] = fields.get("embedding_multiplier", 1.0)
        found["residual_scale"] = fields.get("residual_multiplier", 1.0)
        found["logit_scale"] = fields.get("logits_scaling", 1.0)
    if kind in ("gemma2", "gemma3_text", "cohere2", "phi3"):
        found["attention.sliding_window"] = fields.get("sliding_window") or 0
    if kind == "phi3":
        original = fields.get("original_max_position_embeddings", 4096)
        found["rope.scaling.original_context_length"] = original
    if kind == "gemma2":
        for name in ("attn_logit_softcapping", "final_logit_softcapping"):
            found[name] = fields[name]
    if kind == "gemma3_text" and "final_logit_softcapping" in fields:
        found["final_logit_softcapping"] = fields["final_logit_softcapping"]
    if kind in gguf_routed.KINDS:
        found |= gguf_routed.more_fields(fields, old=old(fields))
    if kind in ("stablelm", "gpt_neox"):
        absent = kind == "gpt_neox"
        found["use_parallel_residual"] = fields.get("use_parallel_residual", absent)
    names = (
        {}
        if kind in gguf_routed.KINDS
        else {
            "expert_count": ("num_local_experts", "num_experts"),
            "expert_used_count": ("num_experts_per_tok",),
            "expert_feed_forward_length": ("moe_intermediate_size",),
            "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
        }
    )
    found |= {own: fields[n] for own, given in names.items() for n in given if n in fields}
    own = {f"{arch}.{name}": value for name, value in found.items()}
    return {"general.architecture": arch, **own}


def in_bytes(w: Any) -> tuple[bytes, Any]:
    """A matrix as Q8_0, and what it means."""
    each = w.reshape(len(w), -1, 32)
    scales = (np.abs(each).max(-1, keepdims=True) / 127).astype("<f2")
    q = np.rint(each / scales.astype(np.float32)).clip(-127, 127).astype(np.int8)
    data = np.concatenate([scales.view(np.uint8), q.view(np.uint8)], axis=-1)
    return data.tobytes(), (scales.astype(np.float32) * q).reshape(w.shape)


def with_factors(fields: dict[str, Any], arrays: dict[str, Any]) -> dict[str, Any]:
    """The arrays of a file, and those of its stretched positions."""
    rope = fields.get("rope_parameters") or {}
    found = dict(arrays)
    for name in ("short", "long"):
        if (factors := rope.get(f"{name}_factor")) is not None:
            found[f"rope_factors_{name}.weight"] = np.array(factors, np.float32)
    if fields["model_type"] == "apertus" and not rope:  # which its class stretches as Llama 3.1
        half = count(fields, "features") // count(fields, "heads") // 2
        turns = 8192 * 1.2e7 ** (-np.arange(half) / half) / (2 * np.pi)
        keep = np.clip((turns - 1) / 3, 0, 1)
        found["rope_freqs.weight"] = (1 / (keep + (1 - keep) / 8)).astype(np.float32)
    return found


def of_activations(weights: dict[str, Any]) -> dict[str, Any]:
    """The fields of Apertus's activation: a number for each layer."""
    found: dict[str, Any] = {}
    for name, w in weights.items():
        if ".act_fn." in name:
            found.setdefault(f"xielu.{name.rpartition('.')[2]}", []).append(w.item())
    return found


def write_gguf(path: Path, fields: dict[str, Any], weights: dict[str, Any]) -> None:
    """A file, in float32, of a checkpoint with these fields of config.json."""
    arrays = with_factors(fields, converted(fields, weights))
    tensors = {n: ("F32", w.shape, w.astype("<f4").tobytes()) for n, w in arrays.items()}
    gguf(path, metadata(fields) | of_activations(weights), tensors)


# Files lack these fields; all published checkpoints have the same.
PUBLISHED: dict[str, dict[str, Any]] = {
    "smollm3": {"no_rope_layer_interval": 4},
    "gemma2": {
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3_text": {"query_pre_attn_scalar": 16, "sliding_window_pattern": 6},
    "gemma3_text, linear": {
        "query_pre_attn_scalar": 16,
        "sliding_window_pattern": 6,
        "layer_types": None,
    },
    "cohere2": {"sliding_window_pattern": 4},
    "starcoder2": {"sliding_window": 4096, "norm_epsilon": 1e-3},
    "starcoder2, no biases": {"sliding_window": 4096},
    "glm4": {"attention_bias": True},
    "granite": {"attention_bias": True, "rms_norm_eps": 1e-3},
    "falcon": {"bias": False},
    "gpt_neox": {"layer_norm_eps": 1e-3},
    "gpt_neox, in turn": {"hidden_act": "gelu", "attention_bias": True},
    "mixtral": {"num_experts_per_tok": 2, "sliding_window": None},
    "ministral3": {
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 1.0}
        | {"original_max_position_embeddings": 3, "llama_4_scaling_beta": 0.5}
        | {"mscale_all_dim": 1.0}
    },
    "apertus, plain": {"hidden_act": "xielu"},
    "olmo3": {"rope_scaling": None},
    "exaone4": {},
    "exaone4, no windows": {},
    "hunyuan_v1_dense, dynamic": {},
    "mpt": {},
    "mpt, six heads": {"attn_config": {"clip_qkv": 1.5}, "n_heads": 8, "n_layers": 1},
    "bloom": {"n_head": 4},
    "gpt_bigcode": {"n_inner": 128},
    "phi": {"intermediate_size": 128},
    "glm": {"attention_bias": True, "head_dim": 8},
    "seed_oss": {"attention_bias": True},
    **gguf_routed.PUBLISHED,
    "qwen2_moe": {},
    "qwen3_moe": {},
    "olmoe": {},
}
FAMILIES = [
    *PUBLISHED,
    "olmo2",
    "olmo2, biases",
    "phi3",
    "phi3, longrope",
    "phi3, part of a head",
    "gemma",
    "apertus",
    "arcee",
    "ernie4_5",
    "ernie4_5, biases",
    "hunyuan_v1_dense",
    "nemotron",
    "nemotron, biases",
    "olmo",
    "olmo, cut off",
    "cohere",
    "cohere, norms",
    "stablelm",
    "stablelm, parallel",
    "falcon, new",
    "falcon, one norm",
    "gpt2",
    "llama",
    "qwen2",
]


_NULLS = {("exaone4, no windows", "sliding_window"), ("dots1", "sliding_window")}
_NULLS |= {("deepseek_v2, groups", "q_lora_rank")}
"""What would be a number if it were absent."""


def given(which: str) -> dict[str, Any]:
    """The fields of a configuration of which a file says all."""
    known = "gpt_oss" if which == "gpt_oss, plain" else which
    found = CAUSAL[which] if which in CAUSAL else decoder(known) | PUBLISHED.get(which, {})
    return {n: x for n, x in found.items() if x is not None or (which, n) in _NULLS}
