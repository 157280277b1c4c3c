"""BERT with rotary positions: GTE (arXiv 2407.19669) and Jina Embeddings v3 (2409.10173)."""

from functools import partial
from typing import Any

from graphgen import nn
from graphgen.models.published.bert import NAMES, specification
from graphgen.models.published.config import ACTIVATIONS, Config
from graphgen.models.published.family import Family, Source
from graphgen.models.published.heads import WITHOUT_ANSWERS, tasks
from graphgen.models.published.nomic import FLASH
from graphgen.models.published.rope import given_parameters, rotary
from graphgen.models.published.specification import EncoderSpecification, Sight
from graphgen.parts import Part


def jina(config: Config) -> EncoderSpecification:
    """RoBERTa without learned positions."""
    epsilon = config.take("layer_norm_eps", float, 1e-5)
    return specification(
        config,
        norm=partial(nn.LayerNorm, epsilon=epsilon),
        types=config.take("type_vocab_size", int, 1),
        layers=_turned(config, given_parameters(config), 2e4),
        positions=None,
        activation="gelu",
    )


def gte(config: Config) -> EncoderSpecification:
    """A feed-forward with a gate, of which only the last product has a bias.

    Fields are those of transformers' class, or of the files that it was published with.
    """
    config.expect("layer_norm_type", "layer_norm")
    config.expect("logn_attention_scale", False)
    config.ignore("logn_attention_clip1", "unpad_inputs", "use_memory_efficient_attention")
    config.expect("pack_qkv", True)
    types = config.count("type_vocab_size", 1)
    sizes = config.take("hidden_size", int), config.take("intermediate_size", int)
    activation = config.choose("hidden_act", ACTIVATIONS, "gelu")

    def feed_forward(number: int) -> nn.FeedForward:
        made = nn.FeedForward(*sizes, activation=activation, gated=True, bias=False)
        made.down = nn.Linear(made.hidden, made.features)
        return made

    given = given_parameters(config)
    if given.get("rope_type", given.get("type")) == "ntk":
        given = _ntk(config, given)
    return specification(
        config,
        feed_forward=feed_forward,
        types=types,
        layers=_turned(config, given, 1.6e5 if config.model_type == "gte" else 1e4),
        positions=None,
        activation="gelu",
    )


def _head_dim(config: Config) -> int:
    return config.take("hidden_size", int) // config.take("num_attention_heads", int)


def _ntk(config: Config, given: dict[str, Any]) -> dict[str, Any]:
    """A theta `factor` times as large, and angles divided so that the longest wave is, too."""
    factor: Any = given.get("factor")
    if type(factor) not in (int, float) or factor < 1 or {*given} - {"factor", "type", "rope_type"}:
        config.refuse("rope_scaling", given, "with a factor of at least 1, and nothing else")
    theta = config.take("rope_theta", float, 1e4) * factor
    divisor = factor ** (2.0 / _head_dim(config))
    return {"rope_type": "linear", "rope_theta": theta, "factor": divisor}


def _turned(config: Config, given: dict[str, Any], theta: float) -> list[Sight]:
    turn = rotary(config, _head_dim(config), theta=theta, parameters=given)
    return [Sight(None, turn)] * config.take("num_hidden_layers", int)


_HEAD: dict[str, Source] = {
    "transform": "lm_head.dense",
    "transform_norm": "lm_head.layer_norm",
    "decoder": "lm_head.decoder",
    "decoder_bias": "lm_head.decoder.bias",
    "classifier": "classifier",
}
_UNUSED = r"(embeddings\.position_ids|pooler\..*)|(lm_head|classifier|qa_outputs)\..*"

GTE = Family(
    tasks=tasks(gte, WITHOUT_ANSWERS),
    names={
        **NAMES,
        **_HEAD,
        "encoder": "gte",
        "query": Part("qkv_proj", 0, 3),
        "key": Part("qkv_proj", 1, 3),
        "value": Part("qkv_proj", 2, 3),
        "output": "o_proj",
        "after1": "attn_ln",
        "feed_forward": "mlp",
        "up": Part("up_gate_proj", 0, 2),
        "gate": Part("up_gate_proj", 1, 2),
        "down": "down_proj",
        "after2": "mlp_ln",
        "transform_norm": "lm_head.norm",
        "pooler": "gte.pooler.dense",
    },
    older={r"new\.(.*)": r"gte.\1"},
    tied={"lm_head.decoder.weight": "gte.embeddings.word_embeddings.weight"},
    unused=r"(gte\.)?" + _UNUSED,
    prefix="gte.",
)
FAMILIES = {
    **dict.fromkeys(("gte", "new"), GTE),
    "jina_embeddings_v3": Family(
        tasks=tasks(jina),
        names={
            **FLASH,
            **_HEAD,
            "encoder": "roberta",
            "attention": "mixer",
            "up": "fc1",
            "pooler": "classifier.dense",
            "classifier": "classifier.out_proj",
        },
        older={r"lm_head\.bias": "lm_head.decoder.bias"},
        tied={"lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight"},
        unused=r"(roberta\.)?" + _UNUSED,
        prefix="roberta.",
    ),
}
