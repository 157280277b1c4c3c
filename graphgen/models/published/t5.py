"""T5 (arXiv 1910.10683) and its version 1.1 (2002.05202), mT5 (2010.11934), UMT5 (2304.09151)."""

import math
from functools import partial
from typing import Any

import onnx_ir as ir

from graphgen import nn, ops
from graphgen.models.published.config import ACTIVATIONS, Config
from graphgen.models.published.encoder import TOKENS
from graphgen.models.published.encoder_decoder import Side, Specification, Stack, tasks
from graphgen.models.published.family import Family
from graphgen.models.published.heads import Vectors
from graphgen.nn.feed_forward import Activation
from graphgen.nn.module import TensorSpec
from graphgen.parts import Part
from graphgen.value import Tensor


def t5(config: Config) -> Specification:
    """Norms without means, no biases, products that are not scaled, and distances as positions.

    The first T5 has its table as output layer, and divides what it is given by √D; 1.1 and mT5 do
    neither. UMT5 has a bias in each layer.
    """
    kind = config.model_type
    features, layers = config.take("d_model", int), config.take("num_layers", int)
    config.raw("n_positions")  # positions have no weights
    config.ignore("scalable_attention")  # of UMT5; no class has read it
    for name in ("is_decoder", "tie_encoder_decoder"):
        config.expect(name, False)
    vocabulary, heads = config.take("vocab_size", int), config.take("num_heads", int)
    # The products are not scaled: the initial weights are.
    own: Any = {"head_dim": config.take("d_kv", int), "bias": False, "scale": 1.0}
    gated, activation = feed_forward(config)
    how: dict[str, Any] = {"activation": activation, "gated": gated, "bias": False}
    hidden = config.take("d_ff", int)

    def side(layers: int, *, one_sided: bool) -> Side:
        return Side(
            vocabulary=vocabulary,
            features=features,
            layers=layers,
            norm=partial(nn.RMSNorm, epsilon=config.take("layer_norm_epsilon", float, 1e-6)),
            attention=lambda kind: kind(features, num_heads=heads, **own),
            feed_forward=lambda: nn.FeedForward(features, hidden, **how),
            relative=relative_bias(config, one_sided=one_sided),
            relative_each=kind == "umt5",
        )

    tied = config.take("tie_word_embeddings", bool, True)
    scaled = False
    if kind != "mt5":  # of UMT5 since transformers 5.24; null: not
        scaled = bool(config.optional("scale_decoder_outputs", bool, tied))
    # Newer files say that all are tied, but store the ones that are not.
    apart = config.has("lm_head.weight") and not (kind == "t5" and scaled)
    return Specification(
        encoder=side(layers, one_sided=False),
        decoder=side(config.take("num_decoder_layers", int, layers), one_sided=True),
        tied=tied and not apart,
        last_scale=1.0 / math.sqrt(features) if scaled else 1.0,
    )


def relative_bias(config: Config, *, one_sided: bool) -> partial[nn.RelativeBias]:
    """What makes the bias that the configuration describes."""
    count = config.take("relative_attention_num_buckets", int, 32)
    furthest = config.take("relative_attention_max_distance", int, 128)
    side = count if one_sided else count // 2
    if not 0 < side // 2 < furthest <= 1 << 16:
        config.refuse("relative_attention_max_distance", furthest, f"{side // 2 + 1} to 65536")
    heads = config.take("num_heads", int)
    return partial(nn.RelativeBias, heads, count=count, furthest=furthest, one_sided=one_sided)


def feed_forward(config: Config) -> tuple[bool, Activation]:
    """Whether the feed-forward is gated, and its activation."""
    default = "relu" if config.model_type == "t5" else "gated-gelu"
    kind = config.take("feed_forward_proj", str, default)
    name = {"gated-gelu": "gelu_new"}.get(kind, kind.removeprefix("gated-"))
    gated = kind.startswith("gated-")
    if name not in ACTIVATIONS:
        config.refuse("feed_forward_proj", kind, f"[gated-]{'|'.join(ACTIVATIONS)}")
    config.expect("is_gated_act", gated)
    config.expect("dense_act_fn", name)
    return gated, ACTIVATIONS[name]


class Source(nn.Module):
    """The encoder alone: the vectors of a text's tokens, and what the head makes of them."""

    unused = r"decoder\..*"
    """What checkpoints with a decoder hold beyond it."""

    def __init__(self, side: Side):
        self.features = side.features
        self.shared = nn.Embedding(side.vocabulary, side.features)
        self.encoder, self.head = Stack(side, self.shared, decoder=False), Vectors()

    def __call__(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        x = self.encoder(input_ids, ops.cast(attention_mask, to=ir.DataType.BOOL))
        return self.head(x, attention_mask, self.encoder)

    def inputs(self) -> dict[str, TensorSpec]:
        """Tokens, and the mask of those that are not padding."""
        return dict.fromkeys(["input_ids", "attention_mask"], TOKENS)


def last(name: str) -> Any:
    """What the last part of a layer is called; a decoder's layer has one more before it."""
    return lambda layer: Part(f"layer.{1 if layer.cross_attention is None else 2}.{name}")


FAMILY = Family(
    pads="",
    tasks={
        **tasks(t5),
        "feature-extraction": lambda config: Source(t5(config).encoder),
    },
    names={
        "layers": "block",
        "attention": "layer.0.SelfAttention",
        "norm1": "layer.0.layer_norm",
        "cross_attention": "layer.1.EncDecAttention",
        "norm2": "layer.1.layer_norm",
        "query": "q",
        "key": "k",
        "value": "v",
        "output": "o",
        "feed_forward": last("DenseReluDense"),
        "norm3": last("layer_norm"),
        "gate": "wi_0",
        "up": lambda block: Part("wi" if block.gate is None else "wi_1"),
        "down": "wo",
        "relative": "layer.0.SelfAttention.relative_attention_bias",
        **{
            f"{side}.relative": "block.0.layer.0.SelfAttention.relative_attention_bias"
            for side in ("encoder", "decoder")
        },
        "last_norm": "final_layer_norm",
        "head": "lm_head",
    },
    tied={"lm_head.weight": "shared.weight"},
    same={f"{side}.embed_tokens.weight": "shared.weight" for side in ("encoder", "decoder")},
    unused=r"lm_head\.weight|(en|de)coder\.embed_tokens\.weight|"
    r"decoder\.block\.\d+\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",
)

FAMILIES = dict.fromkeys(("t5", "mt5", "umt5"), FAMILY)
