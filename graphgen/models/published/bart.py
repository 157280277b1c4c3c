"""BART (Lewis et al., arXiv 1910.13461) and Marian (Junczys-Dowmunt et al., arXiv 1804.00344)."""

import math
from typing import Any

import numpy as np

from graphgen import nn, ops
from graphgen.models.published.config import Config
from graphgen.models.published.family import ACTIVATIONS, Family
from graphgen.models.published.seq2seq import CrossAttention, Memory, Seq2Seq, causal
from graphgen.nn.module import zeros
from graphgen.value import Tensor


class Layer(nn.Module):
    """Self-attention, attention to the encoder if a decoder, feed-forward; a norm after each."""

    def __init__(self, config: Config, side: str):
        features, heads = config.take("d_model", int), config.take(f"{side}_attention_heads", int)
        self.attention = nn.Attention(features, num_heads=heads)
        self.norm1 = nn.LayerNorm(features)
        decoder = side == "decoder"
        self.cross_attention = CrossAttention(features, num_heads=heads) if decoder else None
        self.norm2 = nn.LayerNorm(features) if decoder else None
        self.feed_forward = nn.FeedForward(
            features,
            config.take(f"{side}_ffn_dim", int),
            activation=config.choose("activation_function", ACTIVATIONS, "gelu"),
        )
        self.norm3 = nn.LayerNorm(features)

    def __call__(self, x: Tensor, mask: Tensor, memory: Memory | None = None) -> Tensor:
        x = self.norm1(x + self.attention(x, mask=mask, cache=memory))  # (B, T, D)
        if memory is not None and self.cross_attention is not None and self.norm2 is not None:
            x = self.norm2(x + self.cross_attention(x, memory))
        return self.norm3(x + self.feed_forward(x))


class Stack(nn.Module):
    """Embeddings, positions and the layers of one side, (B, T) to (B, T, D)."""

    def __init__(self, config: Config, embedding: nn.Embedding, side: str):
        self.embedding, self.side = embedding, side
        features = embedding.features
        self.scale = math.sqrt(features) if config.take("scale_embedding", bool, False) else 1.0
        length = config.take("max_position_embeddings", int, 1024)
        marian = config.model_type == "marian"
        # The first rows of BART's table are for padding; no token uses them.
        self.offset = 0 if marian else 2
        learned = not marian or stored(config, f"{side}.embed_positions")
        rows = length + self.offset
        self.positions: Any = (nn.Embedding if learned else Sinusoids)(rows, features)
        self.norm = None if marian else nn.LayerNorm(features)
        self.layers = [Layer(config, side) for _ in range(config.take(f"{side}_layers", int))]

    def __call__(self, input_ids: Tensor, given: Any) -> Tensor:
        """`given` is the decoder's memory, or the mask of the encoder's tokens, (B, S)."""
        decoder = self.side == "decoder"
        if decoder:
            rows, columns = given.positions()
            mask = ops.unsqueeze(causal(rows, columns), [0, 1])
        else:
            rows, mask = ops.arange(ops.dim(input_ids, 1)), given
        x = self.embedding(input_ids)
        x = x * self.scale if self.scale != 1.0 else x
        x = x + ops.cast_like(self.positions(rows + self.offset if self.offset else rows), x)
        x = x if self.norm is None else self.norm(x)
        for layer in self.layers:
            x = layer(x, mask, given if decoder else None)
        return x


class Sinusoids(nn.Module):
    """The sines and then the cosines of positions (arXiv 1706.03762, 3.5), (T) to (T, D)."""

    def __init__(self, length: int, features: int):
        pairs = np.arange(features) // 2 * 2
        angles = np.arange(length)[:, None] / 10000.0 ** (pairs / features)
        table = [np.sin(angles[:, 0::2]), np.cos(angles[:, 1::2])]
        self.table = np.concatenate(table, axis=1).astype(np.float32)

    def __call__(self, positions: Tensor) -> Tensor:
        return ops.embedding(self.table, positions)


def stored(config: Config, name: str) -> bool:
    """Whether the checkpoint has a table of that name."""
    return bool({f"{name}.weight", f"model.{name}.weight"} & config.stored)


class ConditionalGeneration(Seq2Seq):
    """The encoder-decoder; by default one table embeds both languages and gives the logits."""

    def __init__(self, config: Config):
        marian = config.model_type == "marian"
        for name in ("normalize_before", "add_final_layer_norm", "add_bias_logits"):
            config.expect(name, False)
        for name in ("is_decoder", "tie_encoder_decoder"):
            config.expect(name, False)
        config.expect("normalize_embedding", not marian)
        config.expect("static_position_embeddings", marian)
        config.raw("extra_pos_embeddings")  # the padding token plus one
        layers = [config.take(f"{side}_layers", int) for side in ("encoder", "decoder")]
        config.expect("num_hidden_layers", *layers)
        features, count = config.take("d_model", int), config.take("vocab_size", int)
        shared = not marian or config.take("share_encoder_decoder_embeddings", bool, True)
        counts = {"encoder": count, "decoder": count}
        if marian:
            written = config.take("decoder_vocab_size", int, count)
            counts["decoder"] = count if shared else written
        own = [side for side in counts if not shared or stored(config, f"{side}.embed_tokens")]
        self.shared = nn.Embedding(count, features) if len(own) < 2 else None
        tables: dict[str, Any] = dict.fromkeys(counts, self.shared)
        tables |= {side: nn.Embedding(counts[side], features) for side in own}
        self.encoder = Stack(config, tables["encoder"], "encoder")
        self.decoder = Stack(config, tables["decoder"], "decoder")
        heads = config.take("decoder_attention_heads", int)
        self.cached(layers[1], heads, features // heads, features)
        tied = config.take("tie_word_embeddings", bool, True)
        count = counts["decoder"]
        self.head = None if tied else nn.Linear(features, count, bias=False)
        biased = "final_logits_bias" in config.stored
        self.final_logits_bias = nn.Parameter((1, count), initialize=zeros) if biased else None

    def logits(self, x: Tensor) -> Tensor:
        """(B, T, D) to (B, T, vocabulary)."""
        y = self.decoder.embedding.logits(x) if self.head is None else self.head(x)
        return y if self.final_logits_bias is None else y + self.final_logits_bias


FAMILY = Family(
    tasks={"text2text-generation": ConditionalGeneration},
    names={
        "shared": "model.shared",
        "encoder": "model.encoder",
        "decoder": "model.decoder",
        "embedding": "embed_tokens",
        "positions": "embed_positions",
        "encoder.norm": "layernorm_embedding",
        "decoder.norm": "layernorm_embedding",
        "head": "lm_head",
        "attention": "self_attn",
        "norm1": "self_attn_layer_norm",
        "cross_attention": "encoder_attn",
        "norm2": "encoder_attn_layer_norm",
        "query": "q_proj",
        "key": "k_proj",
        "value": "v_proj",
        "output": "out_proj",
        "feed_forward": "",
        "up": "fc1",
        "down": "fc2",
        "norm3": "final_layer_norm",
    },
    prefix="model.",
    tied={"lm_head.weight": "model.shared.weight"},
    same={"model.decoder.embed_tokens.weight": "model.shared.weight"},
    unused=r"lm_head\.weight|(model\.)?(shared\.weight|(en|de)coder\.version)",
)
