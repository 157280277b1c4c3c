"""Command R and Command R7B (Cohere; arXiv 2504.00698)."""

from functools import partial
from typing import Any

from graphgen import nn
from graphgen.models.published.absent import absent
from graphgen.models.published.config import Config
from graphgen.models.published.named import (
    all_turned,
    divided_heads,
    family,
    feed_forward,
    head_dim,
    layer_windows,
    specification,
)
from graphgen.models.published.specification import Sight, Specification, each_head


def cohere(config: Config) -> Specification:
    """Attention and feed-forward side by side, after one norm; neighbors are turned."""
    norm = partial(nn.LayerNorm, epsilon=config.take("layer_norm_eps", float, 1e-5), bias=False)
    attention: dict[str, Any] = {"interleaved": True}
    # What the publisher notes about the only architecture that the classes have.
    for name in ("use_embedding_sharing", "use_gated_activation", "use_parallel_block"):
        config.expect(name, True)
    config.ignore("use_parallel_embedding")  # how a table is divided among devices
    config.expect("rotary_pct", 1.0)
    config.expect("position_embedding_type", "rope_gptj")
    own: dict[str, Any] = {}
    if config.model_type == "cohere2":
        own["sights"] = _local(config)
    elif config.take("use_qk_norm", bool, False):
        attention |= {"wide_norm": True, "norm": each_head(head_dim(config), norm)}
    return specification(
        config,
        attention=attention,
        norm=norm,
        feed_forward=feed_forward(config, bias=False),
        norms=("norm1",),
        parallel=True,
        logits_scale=config.take("logit_scale", float, 0.0625),
        **own,
    )


def _local(config: Config) -> list[Sight]:
    """Three local layers with positions, then one without that looks to the start."""
    layers, every = (
        config.take("num_hidden_layers", int),
        config.take("sliding_window_pattern", int, 4),
    )
    config.expect("layer_switch", every)
    config.expect("use_qk_norm", False)
    config.expect("order_of_interleaved_layers", "local_attn_first")
    divided_heads(config)
    window = config.optional("sliding_window", int, absent(config, "window"))
    local = layer_windows(config, 1, [(i + 1) % every > 0 for i in range(layers)])
    [near] = all_turned(config, [window])
    return [Sight() if one is None else near for one in local]


FAMILIES = {kind: family(cohere, gains="weight") for kind in ("cohere", "cohere2")}
