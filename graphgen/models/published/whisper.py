"""Whisper (arXiv 2212.04356): an encoder of sound, and a decoder of the text that is said."""

from typing import Any

from graphgen import nn, ops
from graphgen.models.published.bart import NAMES
from graphgen.models.published.config import ACTIVATIONS, Config
from graphgen.models.published.encoder_decoder import Layer, Side, Stack
from graphgen.models.published.family import Family
from graphgen.models.published.seq2seq import ENCODER, Seq2Seq
from graphgen.nn.module import Parameter, float32, normal
from graphgen.value import Tensor


class Sound(nn.Module):
    """Two convolutions, which make one vector of two frames, positions and layers."""

    def __init__(self, side: Side, *, bands: int, length: int):
        self.bands, self.length = bands, length
        self.convolution1 = nn.Convolution(bands, side.features, kernel=3)
        self.convolution2 = nn.Convolution(side.features, side.features, kernel=3, stride=2)
        self.positions = Parameter((length, side.features), initialize=normal(0.02))
        self.layers = [Layer(side, decoder=False) for _ in range(side.layers)]
        self.last_norm = side.norm(side.features)

    def __call__(self, input_features: Tensor) -> Tensor:
        """(B, bands, 2 · length) to (B, length, D)."""
        x = ops.swap_last(ops.cast_like(input_features, self.positions))
        x = ops.gelu(self.convolution1(x))
        x = ops.gelu(self.convolution2(x)) + self.positions
        for layer in self.layers:
            x = layer(x, None)
        return self.last_norm(x)  # type: ignore[no-any-return]


class Whisper(Seq2Seq):
    """The encoder-decoder; the table of tokens is the output layer."""

    def __init__(self, config: Config):
        config.expect("is_decoder", False)
        config.expect("tie_word_embeddings", True)
        config.expect("num_hidden_layers", config.take("encoder_layers", int))
        config.raw("forced_decoder_ids")  # how to generate
        config.ignore("scale_embedding", "use_weighted_layer_sum", "classifier_proj_size")
        config.ignore("apply_spec_augment", "median_filter_width", "mask_time_min_masks")
        config.ignore("mask_time_prob", "mask_time_length", "mask_feature_min_masks")
        config.ignore("mask_feature_prob", "mask_feature_length")
        encoder, decoder = side(config, "encoder"), side(config, "decoder")
        self.encoder = Sound(
            encoder,
            bands=config.take("num_mel_bins", int, 80),
            length=config.take("max_source_positions", int, 1500),
        )
        embedding = nn.Embedding(decoder.vocabulary, decoder.features)
        self.decoder = Stack(decoder, embedding, decoder=True)
        attention = self.decoder.layers[0].attention
        sizes = attention.kv_heads, attention.head_dim, decoder.features
        self.cached(decoder.layers, *sizes, length=self.encoder.length)
        frames = float32["batch_size", self.encoder.bands, 2 * self.encoder.length]
        self._inputs[ENCODER] = {"input_features": frames}

    def encode(self, input_features: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        """The states of the sound, (B, bands, frames) to (B, frames / 2, D)."""
        return {"last_hidden_state": self.encoder(input_features)}

    def logits(self, x: Tensor) -> Tensor:
        """(B, T, D) to (B, T, vocabulary)."""
        logits: Tensor = self.decoder.embedding.logits(x)
        return logits


def side(config: Config, name: str) -> Side:
    """The encoder or the decoder of a configuration; keys have no bias."""
    features, heads = config.take("d_model", int), config.take(f"{name}_attention_heads", int)
    hidden = config.take(f"{name}_ffn_dim", int)
    activation = config.choose("activation_function", ACTIVATIONS, "gelu")
    length = config.take("max_target_positions", int, 448)

    def attention(kind: type[nn.Attention]) -> nn.Attention:
        made = kind(features, num_heads=heads)
        made.key = nn.Linear(features, features, bias=False)
        return made

    return Side(
        vocabulary=config.take("vocab_size", int),
        features=features,
        layers=config.take(f"{name}_layers", int),
        norm=nn.LayerNorm,
        attention=attention,
        feed_forward=lambda: nn.FeedForward(features, hidden, activation=activation),
        positions=nn.Embedding(length, features) if name == "decoder" else None,
    )


WHISPER: dict[str, Any] = {
    **NAMES,
    "encoder.positions": "embed_positions.weight",
    "convolution1": "conv1",
    "convolution2": "conv2",
}

FAMILIES = {
    "whisper": Family(
        tasks={"automatic-speech-recognition": Whisper},
        names=WHISPER,
        prefix="model.",
        tied={"proj_out.weight": "model.decoder.embed_tokens.weight"},
        unused=r"proj_out\.weight",
        held=r"model\.encoder\.embed_positions\.weight",
    )
}
