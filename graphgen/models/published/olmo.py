"""OLMo 1, 2 and 3 (arXiv 2402.00838, 2501.00656, 2512.13961)."""

from functools import partial
from typing import Any

from graphgen import nn
from graphgen.models.published.absent import absent
from graphgen.models.published.config import Config
from graphgen.models.published.llama import AFTER
from graphgen.models.published.named import (
    all_turned,
    divided_heads,
    family,
    feed_forward,
    layer_windows,
    rms_norm,
    specification,
)
from graphgen.models.published.rope import parameters_by_kind
from graphgen.models.published.specification import Specification


def olmo(config: Config) -> Specification:
    """Norms without weights, and projections that may be cut off."""
    divided_heads(config)
    norm = partial(nn.LayerNorm, epsilon=1e-5, gain=False, bias=False)
    return specification(
        config,
        attention={"clip": clip(config)},
        norm=norm,
        feed_forward=feed_forward(config, bias=False),
    )


def clip(config: Config) -> float | None:
    """Where queries, keys and values are cut off on either side."""
    found = config.optional("clip_qkv", float)
    if found is not None and found <= 0.0:
        config.refuse("clip_qkv", found, "above 0, or null")
    return found


def olmo2(config: Config) -> Specification:
    """Norms after attention and feed-forward, and of all queries and keys.

    OLMo 3 has three local layers, then one that looks to the start, whose angles alone are changed.
    """
    own: dict[str, Any] = {}
    if config.model_type == "olmo3":
        layers = config.take("num_hidden_layers", int)
        window = config.optional("sliding_window", int, absent(config, "window"))
        local = layer_windows(config, 1, [(i + 1) % 4 > 0 for i in range(layers)])
        far, near = parameters_by_kind(config)
        theta = config.take("rope_theta", float, 5e5)
        if theta != 5e5 and not all("rope_theta" in kind for kind in (far, near)):
            wanted = "500000, or in rope_parameters for each kind of layer: programs differ"
            config.refuse("rope_theta", theta, wanted)
        [start] = all_turned(config, [None], parameters=far)
        [part] = all_turned(config, [window], parameters=near)
        own["sights"] = [start if one is None else part for one in local]
    wide = {"norm": rms_norm(config), "wide_norm": True}
    return specification(config, attention=wide, norms=("after1", "after2"), **own)


FAMILIES = {
    "olmo": family(olmo),
    **dict.fromkeys(("olmo2", "olmo3"), family(olmo2, **AFTER)),
}
