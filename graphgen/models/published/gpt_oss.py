"""GPT-OSS (arXiv 2508.10925)."""

from dataclasses import replace

from graphgen.models.published.config import Config
from graphgen.models.published.experts import Experts, sizes_of
from graphgen.models.published.named import all_turned, family, layer_windows, specification
from graphgen.models.published.rope import given_parameters
from graphgen.models.published.specification import Specification


def gpt_oss(config: Config) -> Specification:
    """Sinks, every other layer local, a limit on gates and values."""
    sizes = config.take("hidden_size", int), config.take("intermediate_size", int)
    layers = config.take("num_hidden_layers", int)
    options = sizes_of(config, 128, 4)
    config.expect("experts_per_token", options["k"])
    config.ignore("initial_context_length")  # rope_scaling says it, too
    limit = config.take("swiglu_limit", float, 7.0)
    if limit <= 0.0:
        config.refuse("swiglu_limit", limit, "above 0")
    options["activation_alpha"] = config.take("swiglu_alpha", float, 1.702)
    options |= {"activation_beta": 1.0, "swiglu_limit": limit, "bias": True}
    window = config.optional("sliding_window", int, 128)
    if window is None and "sliding_attention" in config.raw("layer_types", ["sliding_attention"]):
        config.refuse("sliding_window", None, "a size, as layer_types has sliding_attention")
    found = layer_windows(config, window, [i % 2 == 0 for i in range(layers)])
    parameters = given_parameters(config) or {
        "rope_type": "yarn",
        "factor": 32.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    }
    return specification(
        config,
        attention={"sinks": True},
        feed_forward=lambda number: Experts(*sizes, normalized=True, **options),
        sights=all_turned(config, found, parameters=parameters),
    )


FAMILIES = {
    "gpt_oss": replace(
        family(
            gpt_oss,
            inner="experts.gate_up_proj",
            inner_bias="experts.gate_up_proj_bias",
            outer="experts.down_proj",
            outer_bias="experts.down_proj_bias",
        ),
        swapped=("inner", "outer"),
    ),
}
