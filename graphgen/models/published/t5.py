"""T5 (Raffel et al., arXiv 1910.10683) and its version 1.1 (gated, arXiv 2002.05202; untied)."""

import math
from typing import Any

from graphgen import nn, ops
from graphgen.models.published.config import Config
from graphgen.models.published.family import ACTIVATIONS, Family
from graphgen.models.published.seq2seq import CrossAttention, Memory, Seq2Seq, causal
from graphgen.nn.feed_forward import Activation
from graphgen.ops.layout import lowest_of
from graphgen.value import Tensor


class Residual(nn.Module):
    """x + f(norm(x)); f is the attribute with the given name."""

    def __init__(self, config: Config, **function: nn.Module):
        [self.name] = function
        vars(self).update(function)
        features = config.take("d_model", int)
        self.norm = nn.RMSNorm(features, epsilon=config.take("layer_norm_epsilon", float, 1e-6))

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # (B, T, D)
        y: Tensor = getattr(self, self.name)(self.norm(x), *args, **kwargs)
        return x + y


class Block(nn.Module):
    """Self-attention, attention to the encoder if a decoder, and feed-forward."""

    def __init__(self, config: Config, *, decoder: bool):
        features, heads = config.take("d_model", int), config.take("num_heads", int)
        gated, activation = feed_forward(config)
        # The products are not scaled: the initial weights are.
        own: Any = {"head_dim": config.take("d_kv", int), "bias": False, "scale": 1.0}
        hidden = config.take("d_ff", int)
        last = nn.FeedForward(features, hidden, activation=activation, gated=gated, bias=False)
        self.sublayers = [
            Residual(config, attention=nn.Attention(features, num_heads=heads, **own)),
            *(
                [Residual(config, cross=CrossAttention(features, num_heads=heads, **own))]
                if decoder
                else []
            ),
            Residual(config, **{"gated" if gated else "feed_forward": last}),
        ]

    def __call__(self, x: Tensor, bias: Tensor, memory: Memory | None = None) -> Tensor:
        first, *cross, last = self.sublayers
        x = first(x, mask=bias, cache=memory)  # (B, T, D)
        for layer in cross:
            x = layer(x, memory)
        return last(x)


class Stack(nn.Module):
    """The blocks of the encoder or the decoder, (B, T) to (B, T, D)."""

    def __init__(self, config: Config, embedding: nn.Embedding, *, layers: int, decoder: bool):
        self.embedding, self.decoder = embedding, decoder
        self.blocks = [Block(config, decoder=decoder) for _ in range(layers)]
        self.relative = relative_bias(config, one_sided=decoder)
        features = config.take("d_model", int)
        self.last_norm = nn.RMSNorm(
            features, epsilon=config.take("layer_norm_epsilon", float, 1e-6)
        )

    def __call__(self, input_ids: Tensor, given: Any) -> Tensor:
        """`given` is the decoder's memory, or the mask of the encoder's tokens, (B, S)."""
        if self.decoder:
            rows, columns = given.positions()
            keep = causal(rows, columns)
        else:
            rows = columns = ops.arange(ops.dim(input_ids, 1))
            keep = ops.unsqueeze(given, [1, 2])  # (B, 1, 1, S)
        bias = self.relative(rows, columns)
        bias = ops.where(keep, bias, lowest_of(bias))  # (B or 1, H, T, S)
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x, bias, given if self.decoder else None)
        return self.last_norm(x)


def relative_bias(config: Config, *, one_sided: bool) -> nn.RelativeBias:
    """The bias that the configuration describes."""
    count = config.take("relative_attention_num_buckets", int, 32)
    furthest = config.take("relative_attention_max_distance", int, 128)
    side = count if one_sided else count // 2
    if not 0 < side // 2 < furthest <= 1 << 16:
        config.refuse("relative_attention_max_distance", furthest, f"{side // 2 + 1} to 65536")
    heads = config.take("num_heads", int)
    return nn.RelativeBias(heads, count=count, furthest=furthest, one_sided=one_sided)


def feed_forward(config: Config) -> tuple[bool, Activation]:
    """Whether the feed-forward is gated, and its activation."""
    kind = config.take("feed_forward_proj", str, "relu")
    name = {"gated-gelu": "gelu_new"}.get(kind, kind.removeprefix("gated-"))
    gated = kind.startswith("gated-")
    if name not in ACTIVATIONS:
        config.refuse("feed_forward_proj", kind, f"[gated-]{'|'.join(ACTIVATIONS)}")
    config.expect("is_gated_act", gated)
    config.expect("dense_act_fn", name)
    return gated, ACTIVATIONS[name]


class T5(Seq2Seq):
    """The encoder-decoder; its output layer is the embedding, or a layer of its own."""

    def __init__(self, config: Config):
        features, layers = config.take("d_model", int), config.take("num_layers", int)
        config.raw("n_positions")  # positions have no weights
        for name in ("is_decoder", "tie_encoder_decoder"):
            config.expect(name, False)
        self.embedding = nn.Embedding(config.take("vocab_size", int), features)
        self.encoder = Stack(config, self.embedding, layers=layers, decoder=False)
        layers = config.take("num_decoder_layers", int, layers)
        self.decoder = Stack(config, self.embedding, layers=layers, decoder=True)
        self.cached(layers, config.take("num_heads", int), config.take("d_kv", int), features)
        tied = config.take("tie_word_embeddings", bool, True)
        scaled = config.take("scale_decoder_outputs", bool, tied)
        self.scale = 1.0 / math.sqrt(features) if scaled else 1.0
        # Newer files say that all are tied, but store the ones that are not.
        own = not tied or (not scaled and "lm_head.weight" in config.stored)
        self.head = nn.Embedding(self.embedding.count, features) if own else None

    def logits(self, x: Tensor) -> Tensor:
        """(B, T, D) to (B, T, vocabulary)."""
        return (self.head or self.embedding).logits(x * self.scale if self.scale != 1.0 else x)


FAMILY = Family(
    tasks={"text2text-generation": T5},
    names={
        "embedding": "shared",
        "blocks": "block",
        "sublayers": "layer",
        "relative": "block.0.layer.0.SelfAttention.relative_attention_bias",
        "norm": "layer_norm",
        "last_norm": "final_layer_norm",
        "head": "lm_head",
        "attention": "SelfAttention",
        "cross": "EncDecAttention",
        "query": "q",
        "key": "k",
        "value": "v",
        "output": "o",
        "feed_forward": "DenseReluDense",
        "feed_forward.up": "wi",
        "gated": "DenseReluDense",
        "gated.gate": "wi_0",
        "gated.up": "wi_1",
        "down": "wo",
    },
    tied={"lm_head.weight": "shared.weight"},
    same={f"{side}.embed_tokens.weight": "shared.weight" for side in ("encoder", "decoder")},
    unused=r"lm_head\.weight|(en|de)coder\.embed_tokens\.weight|"
    r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",
)
