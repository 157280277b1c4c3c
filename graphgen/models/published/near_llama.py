"""Decoders with Llama's fields and names, but other activations, norms or turns."""

from functools import partial
from typing import Any

from graphgen import nn
from graphgen.models.published.absent import absent
from graphgen.models.published.config import Config
from graphgen.models.published.llama import AFTER
from graphgen.models.published.named import (
    all_turned,
    family,
    feed_forward,
    head_dim,
    layer_windows,
    rms_norm,
    specification,
)
from graphgen.models.published.rope import given_parameters
from graphgen.models.published.specification import Sight, Specification


def arcee(config: Config) -> Specification:
    """Squares of ReLU without a gate (AFM)."""
    plain = feed_forward(config, activation="relu2", gated=False)
    return specification(config, feed_forward=plain)


def seed_oss(config: Config) -> Specification:
    """Biases of queries, keys and values; that of the output has a field of its own."""
    bias = config.take("attention_out_bias", bool, False)
    return specification(config, attention={"output_bias": bias})


def helium(config: Config) -> Specification:
    """Neighbors are turned, and the output never has a bias (Helium 1)."""
    return specification(config, attention={"interleaved": True, "output_bias": False})


def ernie(config: Config) -> Specification:
    """ERNIE 4.5 without experts: neighbors are turned, and all products have a bias or none."""
    # What the publisher notes about training, products in one and experts that there are none of.
    config.ignore("compression_ratio", "fuse_rope", "weight_share_add_bias", "use_rmsnorm")
    bias = config.take("use_bias", bool, False)
    return specification(
        config,
        attention={"interleaved": True, "bias": bias},
        feed_forward=feed_forward(config, bias=bias),
    )


_OF_HUNYUAN = """
add_classification_head class_num pool_type cla_share_factor dense_list org_vocab_size mask_init_id
eod_token_id enable_lm_head_fp32 num_experts moe_topk use_mixed_mlp_moe capacity_factor
""".split()
"""Heads, tokens and experts that the dense class does not have."""


def hunyuan(config: Config) -> Specification:
    """HunYuan without experts: queries and keys are normalized after they are turned."""
    config.ignore(*_OF_HUNYUAN)
    config.expect("use_qk_norm", True)
    config.expect("use_rotary_pos_emb", True)
    config.expect("use_cla", False)
    config.expect("norm_type", "rms")
    size = head_dim(config)
    config.expect("attention_head_dim", size)
    sights = all_turned(
        config,
        [None] * config.take("num_hidden_layers", int),
        parameters=stretched(config, given_parameters(config), size),
    )
    return specification(
        config,
        attention={"norm": rms_norm(config), "normed_last": True},
        sights=sights,
        feed_forward=feed_forward(config, bias=config.take("mlp_bias", bool, False)),
    )


def stretched(config: Config, given: dict[str, Any], head_dim: int) -> dict[str, Any]:
    """What `alpha` of the dynamic kind comes down to: a larger theta, whatever the length."""
    alpha = given.get("alpha")
    if given.get("rope_type", given.get("type")) != "dynamic" or not alpha:
        return given
    theta = given.get("rope_theta", config.take("rope_theta", float, 1e4))
    if not all(type(x) in (int, float) for x in (alpha, theta)) or head_dim < 4:
        config.refuse("rope_parameters", given, "with numbers for alpha and rope_theta")
    return {"rope_theta": float(theta) * float(alpha) ** (head_dim / (head_dim - 2))}


def exaone4(config: Config) -> Specification:
    """Norms after attention and feed-forward; beside local layers, others have no positions."""
    layers = config.take("num_hidden_layers", int)
    window = config.optional("sliding_window", int, absent(config, "window"))
    every, kinds = config.raw("sliding_window_pattern", 4), config.raw("layer_types")
    local = [False] * layers
    if kinds is None and window is not None:
        if type(every) is not int or every < 1:  # the published pattern is a text
            config.refuse("sliding_window_pattern", every, "an integer, or beside layer_types")
        local = [(i + 1) % every > 0 for i in range(layers)]
    found = layer_windows(config, 0 if window is None else window, local)
    if window is None and 0 in found:
        config.refuse("layer_types", kinds, "of full_attention where there is no sliding_window")
    sights = all_turned(config, found)
    if window is not None:
        sights = [Sight() if sight.window is None else sight for sight in sights]
    return specification(
        config,
        attention={"norm": rms_norm(config), "bias": False},
        feed_forward=feed_forward(config, bias=False),
        norms=("after1", "after2"),
        sights=sights,
    )


def nemotron(config: Config) -> Specification:
    """Minitron and Nemotron-4 (arXiv 2402.16819): gains of 1 + w, squares of ReLU, half turned."""
    epsilon = config.take("norm_eps", float, 1e-5)
    return specification(
        config,
        norm=partial(nn.LayerNorm, epsilon=epsilon, unit_offset=True),
        feed_forward=feed_forward(config, activation="relu2", gated=False),
    )


def phi(config: Config) -> Specification:
    """Phi-1 and Phi-2 (arXiv 2306.11644): one norm for attention and feed-forward side by side."""
    config.expect("tie_word_embeddings", False)  # the head has a bias
    norm = partial(nn.LayerNorm, epsilon=config.take("layer_norm_eps", float, 1e-5))
    attention: dict[str, Any] = {"bias": True}
    if config.take("qk_layernorm", bool, False):
        attention["norm"] = norm
    plain = feed_forward(config, activation="gelu_new", gated=False, bias=True)
    return specification(
        config,
        attention=attention,
        norm=norm,
        feed_forward=plain,
        norms=("norm1",),
        parallel=True,
        head_bias=True,
    )


FAMILIES = {
    "arcee": family(arcee),
    "seed_oss": family(seed_oss),
    "helium": family(helium),
    "ernie4_5": family(ernie),
    "hunyuan_v1_dense": family(hunyuan, query_norm="query_layernorm", key_norm="key_layernorm"),
    "exaone4": family(exaone4, **AFTER),
    "nemotron": family(nemotron),
    "phi": family(
        phi,
        output="dense",
        up="fc1",
        down="fc2",
        norm="model.final_layernorm",
        query_norm="q_layernorm",
        key_norm="k_layernorm",
    ),
}
