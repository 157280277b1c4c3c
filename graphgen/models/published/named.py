"""What decoders share whose fields and weights are named as Llama's (arXiv 2302.13971)."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from graphgen import nn
from graphgen.models.published.absent import absent
from graphgen.models.published.config import ACTIVATIONS, Config
from graphgen.models.published.decoder import tasks
from graphgen.models.published.family import Family, Source
from graphgen.models.published.rope import rotary
from graphgen.models.published.specification import Sight, Specification


def specification(
    config: Config,
    *,
    attention: Mapping[str, Any] | Callable[[int], nn.Attention] | None = None,
    stateful: Callable[[int], nn.Module] | None = None,
    sights: list[Sight] | None = None,
    kind: type[nn.Attention] = nn.Attention,
    **own: Any,
) -> Specification:
    """The decoder that the fields of Llama's classes describe, with terms of its own.

    `attention` are further options of `nn.Attention`, or its subclass `kind`, or what makes another
    one for each layer, and `stateful` makes what stands in its place in layers that keep a state.
    Fields are not read where the family's own terms replace what they say.
    """
    attends = attention if callable(attention) else _grouped(config, kind, attention or {})
    layers = all_turned(config, windows(config)) if sights is None else sights

    def mixer(number: int) -> nn.Module:
        keeps = stateful if layers[number].stateful else None
        return attends(number) if keeps is None else keeps(number)

    given: dict[str, Any] = {
        "vocabulary": config.take("vocab_size", int),
        "features": config.take("hidden_size", int),
        "layers": layers,
        "attention": mixer,
        "tied": config.take("tie_word_embeddings", bool, absent(config, "tied", False)),
        "norm": own.get("norm") or rms_norm(config),
        "feed_forward": own.get("feed_forward") or feed_forward(config),
    }
    return Specification(**given | own)


def _grouped(
    config: Config, kind: type[nn.Attention], own: Mapping[str, Any]
) -> Callable[[int], nn.Attention]:
    """What makes the attention of each layer, with options of its own."""
    features, options = config.take("hidden_size", int), dict(own)
    heads = config.take("num_attention_heads", int)
    options["num_heads"], options["head_dim"] = heads, head_dim(config)
    kv_heads = config.optional("num_key_value_heads", int, absent(config, "kv_heads"))
    options["kv_heads"] = kv_heads or heads
    if "bias" not in options:
        options["bias"] = config.take("attention_bias", bool, absent(config, "bias", False))
    return lambda number: kind(features, **options)


def feed_forward(
    config: Config,
    *,
    field: str = "hidden_act",
    inner: str = "intermediate_size",
    activation: str = "silu",
    **options: Any,
) -> Callable[[int], nn.FeedForward]:
    """What makes the feed-forward of each layer; gated by default."""
    options = {"gated": True, **options}
    if "bias" not in options:
        options["bias"] = config.take("mlp_bias", bool, False)
    sizes = config.take("hidden_size", int), config.take(inner, int)
    kind = config.choose(field, ACTIVATIONS, activation)
    return lambda number: nn.FeedForward(*sizes, activation=kind, **options)


def rms_norm(config: Config, **options: Any) -> partial[nn.RMSNorm]:
    """The norm of a configuration."""
    epsilon = config.take("rms_norm_eps", float, absent(config, "epsilon", 1e-6))
    return partial(nn.RMSNorm, epsilon=epsilon, **options)


def head_dim(config: Config) -> int:
    """The features of a head; in Qwen3 they are not the model's divided by the heads."""
    divided = config.take("hidden_size", int) // config.take("num_attention_heads", int)
    found: int = config.take("head_dim", int, absent(config, "head_dim", divided))
    return found


def divided_heads(config: Config) -> None:
    """Refuse heads of another size: the class divides the features by the heads."""
    config.expect(
        "head_dim", config.take("hidden_size", int) // config.take("num_attention_heads", int)
    )


def all_turned(config: Config, windows: list[int | None], **how: Any) -> list[Sight]:
    """Layers with these windows and the same rotary positions."""
    how = {"theta": absent(config, "theta", 1e4), "partial": absent(config, "partial"), **how}
    turn = rotary(config, head_dim(config), **how)
    return [Sight(window, turn) for window in windows]


def windows(config: Config) -> list[int | None]:
    """How far back each layer looks; None means to the start."""
    kind, layers = config.model_type, config.take("num_hidden_layers", int)
    if kind == "ministral":
        window = config.optional("sliding_window", int, absent(config, "window"))
        return layer_windows(config, window, [window is not None] * layers)
    if kind in ("mistral", "ministral3", "mixtral", "phi3", "starcoder2"):
        return [config.optional("sliding_window", int, absent(config, "window"))] * layers
    if kind not in ("qwen2", "qwen3"):
        config.expect("sliding_window")
        return [None] * layers
    window = config.optional("sliding_window", int, absent(config, "window"))
    used = config.take("use_sliding_window", bool, False)
    first = config.raw("max_window_layers", 28)
    if type(first) is not int:
        config.refuse("max_window_layers", first, "an integer")
    found = layer_windows(config, window, [used and i >= first for i in range(layers)])
    kinds = config.raw("layer_types", [])
    if not used and "sliding_attention" in kinds:
        config.refuse("layer_types", kinds, "of full_attention where use_sliding_window is false")
    return found


def layer_windows(config: Config, window: int | None, local: list[bool]) -> list[int | None]:
    """The window of each layer by layer_types; by whether the layer is `local` if they are absent.

    `window` is that of local layers.
    """
    known = {"full_attention": None, "sliding_attention": window}
    kinds = config.raw("layer_types", [[*known][one] for one in local])
    if (
        not isinstance(kinds, list)
        or len(kinds) != len(local)
        or not set(map(str, kinds)) <= set(known)
    ):
        config.refuse("layer_types", kinds, f"a list of {len(local)} of {', '.join(known)}")
    return [known[kind] for kind in kinds]


NAMES = {
    "decoder": "",
    "embedding": "model.embed_tokens",
    "layers": "model.layers",
    "norm": "model.norm",
    "head": "lm_head",
    "attention": "self_attn",
    "query": "q_proj",
    "key": "k_proj",
    "value": "v_proj",
    "output": "o_proj",
    "query_norm": "q_norm",
    "key_norm": "k_norm",
    "feed_forward": "mlp",
    "up": "up_proj",
    "gate": "gate_proj",
    "down": "down_proj",
    "norm1": "input_layernorm",
    "norm2": "post_attention_layernorm",
}


def family(specify: Callable[[Config], Specification], **names: Source) -> Family:
    """A family with Llama's names of weights, except for these."""
    return Family(
        tasks=tasks(specify),
        names=NAMES | names,
        tied={"lm_head.weight": "model.embed_tokens.weight"},
        prefix="model.",
        unused=r"lm_head\.weight|.*rotary_emb\.inv_freq",
    )
