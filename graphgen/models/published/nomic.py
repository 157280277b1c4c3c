"""NomicBERT (arXiv 2402.01613): BERT with rotary positions, a gate, and no biases in layers."""

from functools import partial

from graphgen import nn
from graphgen.models.published.bert import NAMES
from graphgen.models.published.config import ACTIVATIONS, Config
from graphgen.models.published.family import Family, Source
from graphgen.models.published.heads import WITHOUT_ANSWERS, tasks
from graphgen.models.published.rope import rotary
from graphgen.models.published.specification import EncoderSpecification, Sight
from graphgen.parts import Part

_OFF = (
    "causal",
    "last_layer_subset",
    "mlp_fc1_bias",
    "mlp_fc2_bias",
    "parallel_block",
    "parallel_block_tied_norm",
    "prenorm",
    "qkv_proj_bias",
    "reorder_and_upcast_attn",
    "rotary_emb_interleaved",
    "scale_attn_by_inverse_layer_idx",
    "use_rms_norm",
)
"""What the published code can also do, and no published file asks for."""


def nomic(config: Config) -> EncoderSpecification:
    """By the fields of transformers' class, or by those of the files that it was published with."""
    for name in _OFF:
        config.expect(name, False)
    for name in ("rotary_emb_scale_base", "rotary_scaling_factor", "num_experts"):
        config.expect(name)
    config.expect("rotary_emb_fraction", 1.0)
    config.expect("scale_attn_weights", True)
    config.expect("activation_function", "swiglu")
    config.ignore("use_flash_attn", "fused_bias_fc", "fused_dropout_add_ln", "dense_seq_output")
    config.ignore("pad_vocab_size_multiple", "max_trained_positions", "use_xentropy")
    config.ignore("moe_normalize_expert_weights", "moe_resid_pdrop")
    features = config.take(config.named("hidden_size", "n_embd"), int)
    heads = config.take(config.named("num_attention_heads", "n_head"), int)
    hidden = config.take(config.named("intermediate_size", "n_inner"), int)
    size = config.take("head_dim", int, features // heads)
    activation = config.choose("hidden_act", ACTIVATIONS, "silu")
    config.named("max_position_embeddings", "n_positions")  # the angles have no limit
    names = (config.named("rope_theta", "rotary_emb_base"), "partial_rotary_factor")
    turn = rotary(config, size, theta=1000.0, names=names)
    epsilon = config.take(config.named("layer_norm_eps", "layer_norm_epsilon"), float, 1e-12)
    return EncoderSpecification(
        vocabulary=config.take("vocab_size", int),
        features=features,
        layers=[Sight(None, turn)] * config.take(config.named("num_hidden_layers", "n_layer"), int),
        norm=partial(nn.LayerNorm, epsilon=epsilon),
        attention=lambda number: nn.Attention(features, num_heads=heads, head_dim=size, bias=False),
        feed_forward=lambda number: nn.FeedForward(
            features, hidden, activation=activation, gated=True, bias=False
        ),
        activation=activation,
        types=config.take("type_vocab_size", int, 2),
        tied=config.take("tie_word_embeddings", bool, True),
    )


FLASH: dict[str, Source] = {
    **NAMES,
    "norm": "emb_ln",
    "layers": "encoder.layers",
    "query": Part("Wqkv", 0, 3),
    "key": Part("Wqkv", 1, 3),
    "value": Part("Wqkv", 2, 3),
    "output": "out_proj",
    "after1": "norm1",
    "feed_forward": "mlp",
    "down": "fc2",
    "after2": "norm2",
}
"""What the BERT of the package flash-attn, from which others were made, calls its weights."""

FAMILY = Family(
    tasks=tasks(nomic, WITHOUT_ANSWERS),
    names={
        **FLASH,
        "encoder": "nomic_bert",
        "attention": "attn",
        "up": "fc11",
        "gate": "fc12",
        "transform": "cls.predictions.transform.dense",
        "transform_norm": "cls.predictions.transform.layer_norm",
        "decoder": "cls.predictions.decoder",
        "decoder_bias": "cls.predictions.decoder.bias",
        "pooler": "nomic_bert.pooler.dense",
        "classifier": "classifier",
    },
    older={r"cls\.predictions\.bias": "cls.predictions.decoder.bias"},
    tied={"cls.predictions.decoder.weight": "nomic_bert.embeddings.word_embeddings.weight"},
    unused=r"(nomic_bert\.)?(embeddings\.position_ids|pooler\..*)|cls\..*|classifier\..*",
    prefix="nomic_bert.",
)
