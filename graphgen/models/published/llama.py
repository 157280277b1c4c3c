"""Decoders of the Llama family: Llama, Mistral, Qwen2, Qwen3 (arXiv 2302.13971, 2310.06825)."""

from typing import Any

from graphgen import nn, ops
from graphgen.models.published.cache import Cache, cache_inputs, causal_mask, token_inputs
from graphgen.models.published.classifier import CausalClassifier
from graphgen.models.published.config import Config
from graphgen.models.published.family import ACTIVATIONS, Family
from graphgen.models.published.rope import rotary
from graphgen.nn.module import TensorSpec
from graphgen.value import Tensor

ABSENT: dict[str, dict[str, int]] = {
    "llama": {},
    "mistral": {"kv_heads": 8, "window": 4096},
    "qwen2": {"kv_heads": 32, "window": 4096},
    "qwen3": {"kv_heads": 32, "window": 4096},
}
"""What the classes of transformers use if a configuration lacks the field."""


class Layer(nn.Module):
    """Attention with rotary positions and a gated feed-forward, with the norm before each."""

    def __init__(self, config: Config, *, window: int | None):
        features = config.take("hidden_size", int)
        bias = config.take("attention_bias", bool, False)
        config.expect("use_mrope", False)
        # What the publishers of SmolLM2 and Falcon3 note about their architecture.
        config.expect("is_llama_config", True)
        config.expect("rope_interleaved", False)
        config.expect("activation", "swiglu")
        epsilon = config.take("rms_norm_eps", float, 1e-6)

        def norm(size: int) -> nn.RMSNorm:
            return nn.RMSNorm(size, epsilon=epsilon)

        heads, absent = config.take("num_attention_heads", int), ABSENT[config.model_type]
        self.window = window
        self.attention = nn.Attention(
            features,
            num_heads=heads,
            kv_heads=config.optional("num_key_value_heads", int, absent.get("kv_heads")) or heads,
            head_dim=head_dim(config),
            bias=bias or config.model_type == "qwen2",
            output_bias=bias,
            norm=norm if config.model_type == "qwen3" else None,
        )
        self.feed_forward = nn.FeedForward(
            features,
            config.take("intermediate_size", int),
            activation=config.choose("hidden_act", ACTIVATIONS, "silu"),
            gated=True,
            bias=config.take("mlp_bias", bool, False),
        )
        self.norm1, self.norm2 = norm(features), norm(features)

    def __call__(
        self, x: Tensor, *, mask: Tensor, rotary: tuple[Tensor, Tensor], cache: Cache | None
    ) -> Tensor:  # (B, T, D)
        x = x + self.attention(self.norm1(x), mask=mask, rotary=rotary, cache=cache)
        return x + self.feed_forward(self.norm2(x))


class Decoder(nn.Module):
    """A vector for each token, (B, T) to (B, T, D), which has seen the tokens before it."""

    def __init__(self, config: Config):
        vocabulary, features = config.take("vocab_size", int), config.take("hidden_size", int)
        self.embedding = nn.Embedding(vocabulary, features)
        self.rotary = rotary(config, head_dim(config))
        self.layers = [Layer(config, window=window) for window in windows(config)]
        self.norm = nn.RMSNorm(features, epsilon=config.take("rms_norm_eps", float, 1e-6))

    def states(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        cache: Cache | None = None,
    ) -> Tensor:
        """The vectors of tokens at these positions, after those in the cache."""
        masks = {
            window: causal_mask(attention_mask, ops.dim(input_ids, 1), window=window)
            for window in {layer.window for layer in self.layers}
        }
        x = self.embedding(input_ids)  # (B, T, D)
        rotary = self.rotary(position_ids, x)
        for layer in self.layers:
            x = layer(x, mask=masks[layer.window], rotary=rotary, cache=cache)
        return self.norm(x)


class CausalLM(Decoder):
    """The logits of each next token, (B, T) to (B, T, vocabulary), and the cache after them."""

    def __init__(self, config: Config):
        super().__init__(config)
        tied, table = config.take("tie_word_embeddings", bool, False), self.embedding
        self.head = None if tied else nn.Linear(table.features, table.count, bias=False)

    def __call__(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, **past: Tensor
    ) -> dict[str, Tensor]:
        cache = Cache(past)
        x = self.states(input_ids, attention_mask, position_ids, cache)
        logits = self.embedding.logits(x) if self.head is None else self.head(x)
        return {"logits": logits, **cache.present}

    def inputs(self) -> dict[str, TensorSpec]:
        """Tokens, their positions, and the keys and values of earlier tokens."""
        attention: Any = self.layers[0].attention
        cache = cache_inputs(len(self.layers), attention.kv_heads, attention.head_dim)
        return {**token_inputs("position_ids"), **cache}


def head_dim(config: Config) -> int:
    """The features of a head; in Qwen3 they are not the model's divided by the heads."""
    divided = config.take("hidden_size", int) // config.take("num_attention_heads", int)
    return config.take("head_dim", int, 128 if config.model_type == "qwen3" else divided)


def windows(config: Config) -> list[int | None]:
    """How far back each layer looks; None means to the start."""
    layers, absent = config.take("num_hidden_layers", int), ABSENT[config.model_type]
    window = config.optional("sliding_window", int, absent.get("window"))
    if config.model_type == "mistral":
        return [window] * layers
    if config.model_type == "llama":
        config.expect("sliding_window")
        return [None] * layers
    used = config.take("use_sliding_window", bool, False)
    first = config.raw("max_window_layers", 28)
    if type(first) is not int:
        config.refuse("max_window_layers", first, "an integer")
    kinds = config.raw(
        "layer_types",
        ["sliding_attention" if used and i >= first else "full_attention" for i in range(layers)],
    )
    known = {"full_attention": None, "sliding_attention": window}
    if (
        not isinstance(kinds, list)
        or len(kinds) != layers
        or not set(map(str, kinds)) <= set(known)
    ):
        config.refuse("layer_types", kinds, f"a list of {layers} of {', '.join(known)}")
    if not used and "sliding_attention" in kinds:
        config.refuse("layer_types", kinds, "of full_attention where use_sliding_window is false")
    return [known[kind] for kind in kinds]


FAMILY = Family(
    tasks={
        "text-generation": CausalLM,
        "text-classification": lambda config: CausalClassifier(config, Decoder(config)),
    },
    names={
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
    },
    tied={"lm_head.weight": "model.embed_tokens.weight"},
    unused=r"lm_head\.weight|.*rotary_emb\.inv_freq",
)
