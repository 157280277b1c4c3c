"""The families of published checkpoints, one for each model type."""

from graphgen.errors import GraphgenError, near
from graphgen.models.published import (
    albert,
    apertus,
    bart,
    bert,
    clip,
    cohere,
    convnext,
    deberta,
    deepseek,
    dinov3,
    distilbert,
    esm,
    eurobert,
    experts,
    falcon,
    gemma,
    gpt2,
    gpt_oss,
    granite,
    gte,
    lfm2,
    llama,
    modernbert,
    modernbert_decoder,
    mpnet,
    mpt,
    near_bert,
    near_llama,
    neox,
    nomic,
    olmo,
    one_tower,
    opt,
    qwen_hybrid,
    routed,
    static,
    swin,
    t5,
    vit,
    wav2vec2,
    whisper,
)
from graphgen.models.published.config import Config
from graphgen.models.published.family import Family
from graphgen.models.published.language_model import TYPES

FAMILIES: dict[str, Family] = {
    **llama.FAMILIES,
    **near_llama.FAMILIES,
    **apertus.FAMILIES,
    **lfm2.FAMILIES,
    **granite.FAMILIES,
    **olmo.FAMILIES,
    **experts.FAMILIES,
    **gpt_oss.FAMILIES,
    **routed.FAMILIES,
    **deepseek.FAMILIES,
    **qwen_hybrid.FAMILIES,
    **gemma.FAMILIES,
    **cohere.FAMILIES,
    **neox.FAMILIES,
    **falcon.FAMILIES,
    **opt.FAMILIES,
    **mpt.FAMILIES,
    **gpt2.FAMILIES,
    **bert.FAMILIES,
    **near_bert.FAMILIES,
    **gte.FAMILIES,
    "esm": esm.FAMILY,
    "distilbert": distilbert.FAMILY,
    "albert": albert.FAMILY,
    "mpnet": mpnet.FAMILY,
    "modernbert": modernbert.FAMILY,
    "modernbert-decoder": modernbert_decoder.FAMILY,
    "eurobert": eurobert.FAMILY,
    "nomic_bert": nomic.FAMILY,
    **deberta.FAMILIES,
    **vit.FAMILIES,
    **dinov3.FAMILIES,
    **convnext.FAMILIES,
    "swin": swin.FAMILY,
    **clip.FAMILIES,
    **one_tower.FAMILIES,
    **static.FAMILIES,
    **t5.FAMILIES,
    **bart.FAMILIES,
    **whisper.FAMILIES,
    **wav2vec2.FAMILIES,
}
"""The families by the `model_type` of their configurations."""


_PARTS = ("text_config", "llm_config", "vision_config", "audio_config")


def find_family(config: Config) -> Family:
    """The family of a configuration; the error for an unknown one names the nearest and all."""
    if config.model_type not in FAMILIES:
        if parts := [name for name in _PARTS if isinstance(config.given(name), dict)]:
            raise GraphgenError(
                f"{config.where}: {config.model_type!r} is a model of several parts, "
                f"{', '.join(parts)}; of such, there are clip and siglip, and the language models "
                f"of {', '.join(TYPES)}"
            )
        raise GraphgenError(
            f"{config.where}: there is no model_type {config.model_type!r}; there are "
            f"{', '.join(FAMILIES)}{near(config.model_type, FAMILIES)}"
        )
    return FAMILIES[config.model_type]
