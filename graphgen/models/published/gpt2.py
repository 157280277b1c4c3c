"""GPT-2 (Radford et al., 2019, "Language Models are Unsupervised Multitask Learners")."""

import math
from typing import Any

from graphgen import nn, ops
from graphgen.models.published.cache import Cache, cache_inputs, causal_mask, token_inputs
from graphgen.models.published.classifier import CausalClassifier
from graphgen.models.published.config import Config
from graphgen.models.published.family import ACTIVATIONS, Family, Part
from graphgen.nn.module import TensorSpec
from graphgen.value import Tensor


class Layer(nn.Module):
    """Attention and feed-forward, with the norm before each."""

    def __init__(self, config: Config, number: int):
        features, heads = config.take("n_embd", int), config.take("n_head", int)
        epsilon = config.take("layer_norm_epsilon", float, 1e-5)
        scale = 1.0
        if config.take("scale_attn_weights", bool, True):
            scale /= math.sqrt(features // heads)
        if config.take("scale_attn_by_inverse_layer_idx", bool, False):
            scale /= number + 1
        self.attention = nn.Attention(features, num_heads=heads, scale=scale)
        self.feed_forward = nn.FeedForward(
            features,
            config.take("n_inner", int, 4 * features),
            activation=config.choose("activation_function", ACTIVATIONS, "gelu_new"),
        )
        self.norm1 = nn.LayerNorm(features, epsilon=epsilon)
        self.norm2 = nn.LayerNorm(features, epsilon=epsilon)

    def __call__(self, x: Tensor, *, mask: Tensor, cache: Cache | None) -> Tensor:  # (B, T, D)
        x = x + self.attention(self.norm1(x), mask=mask, cache=cache)
        return x + self.feed_forward(self.norm2(x))


class Decoder(nn.Module):
    """A vector for each token, (B, T) to (B, T, D), which has seen the tokens before it."""

    def __init__(self, config: Config):
        vocabulary, features = config.take("vocab_size", int), config.take("n_embd", int)
        length = config.take("n_positions", int, 1024)
        config.expect("n_ctx", length)
        config.expect("add_cross_attention", False)
        # The order and precision of one product; in exact arithmetic they change no result.
        config.expect("reorder_and_upcast_attn", False, True)
        self.embedding = nn.Embedding(vocabulary, features)
        self.positions = nn.Embedding(length, features)
        self.layers = [Layer(config, i) for i in range(config.take("n_layer", int))]
        self.norm = nn.LayerNorm(features, epsilon=config.take("layer_norm_epsilon", float, 1e-5))

    def states(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        cache: Cache | None = None,
    ) -> Tensor:
        """The vectors of tokens at these positions, after those in the cache."""
        mask = causal_mask(attention_mask, ops.dim(input_ids, 1))
        x: Tensor = self.embedding(input_ids) + self.positions(position_ids)  # (B, T, D)
        for layer in self.layers:
            x = layer(x, mask=mask, cache=cache)
        return self.norm(x)


class CausalLM(Decoder):
    """The logits of each next token, (B, T) to (B, T, vocabulary), and the cache after them."""

    def __init__(self, config: Config):
        super().__init__(config)
        tied = config.take("tie_word_embeddings", bool, True)
        # Its weight is stored like an embedding's, not like those of the other products.
        sizes = self.embedding.count, self.embedding.features
        self.head = None if tied else nn.Embedding(*sizes)

    def __call__(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, **past: Tensor
    ) -> dict[str, Tensor]:
        cache = Cache(past)
        x = self.states(input_ids, attention_mask, position_ids, cache)
        head = self.embedding if self.head is None else self.head
        return {"logits": head.logits(x), **cache.present}

    def inputs(self) -> dict[str, TensorSpec]:
        """Tokens, their positions, and the keys and values of earlier tokens."""
        attention: Any = self.layers[0].attention
        cache = cache_inputs(len(self.layers), attention.num_heads, attention.head_dim)
        return {**token_inputs("position_ids"), **cache}


FAMILY = Family(
    tasks={
        "text-generation": CausalLM,
        "text-classification": lambda config: CausalClassifier(config, Decoder(config)),
    },
    names={
        "decoder": "",
        "embedding": "transformer.wte",
        "positions": "transformer.wpe",
        "layers": "transformer.h",
        "norm": "transformer.ln_f",
        "head": "lm_head",
        "attention": "attn",
        "query": Part("c_attn", 0, 3),
        "key": Part("c_attn", 1, 3),
        "value": Part("c_attn", 2, 3),
        "output": "c_proj",
        "feed_forward": "mlp",
        "up": "c_fc",
        "down": "c_proj",
        "norm1": "ln_1",
        "norm2": "ln_2",
    },
    prefix="transformer.",
    transposed=False,
    tied={"lm_head.weight": "transformer.wte.weight"},
    unused=r"lm_head\.weight|(transformer\.)?h\.\d+\.attn\.(masked_)?bias",
)
