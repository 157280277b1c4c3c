"""Configurations of published checkpoints, with their real fields."""

from typing import Any

import pytest
from published_configurations import PUBLISHED
from published_decoders import fields as decoder

from graphgen.errors import GraphgenError
from graphgen.models.published import FAMILIES
from graphgen.models.published.config import Config
from graphgen.models.published.frequencies import LongRotary
from graphgen.models.published.rope import rotary


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_configuration_is_accepted(name: str) -> None:
    """For every task, with all its fields, as large as it is."""
    fields = PUBLISHED[name]["fields"]
    assert PUBLISHED[name]["task"] in FAMILIES[fields["model_type"]].tasks
    for task in FAMILIES[fields["model_type"]].tasks.values():
        config = Config(fields)
        task(config)
        config.finish()


@pytest.mark.parametrize(
    ("kind", "outer", "inner", "length"),
    [
        ("phi3", None, 16, 4096),
        ("phi3", 12, 16, 12),
        ("llama", None, 16, 16),
        ("llama", 12, 16, 12),
        ("llama", None, None, 64),
    ],
)
def test_where_long_texts_begin(kind: str, outer: Any, inner: Any, length: int) -> None:
    """The class of Phi-3 has the field: its default comes before that of rope_parameters."""
    name = "original_max_position_embeddings"
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    given = {"rope_type": "longrope", **factors, name: inner}
    fields = {"model_type": kind, "max_position_embeddings": 64, name: outer}
    found = rotary(Config(fields | {"rope_parameters": given}), 8)
    assert isinstance(found, LongRotary)
    assert found.length == length


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"rope_theta": 2e4, "partial_rotary_factor": 0.5}, ""),
        ({"rope_theta": 1e4}, "rope_theta is 10000.0; it must be 20000.0"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor is 0.25; it must be 0.5"),
    ],
)
def test_what_neox_says_twice_has_to_agree(given: dict[str, Any], wanted: str) -> None:
    """transformers 4.45 writes both fields, which no version reads."""
    fields = dict(PUBLISHED["pythia-70m"]["fields"])
    config = Config(fields | {"rotary_emb_base": 2e4, "rotary_pct": 0.5} | given)
    try:
        FAMILIES["gpt_neox"].tasks["text-generation"](config)
        config.finish()
        told = ""
    except GraphgenError as error:
        told = str(error)
    assert wanted in told
    assert bool(wanted) == bool(told)


@pytest.mark.parametrize("which", ["gpt_bigcode", "falcon, alibi"])
def test_more_heads_than_features_are_refused(which: str) -> None:
    """They ended in a division by zero."""
    given = decoder(which)
    features = "n_embd" if "n_embd" in given else "hidden_size"
    config = Config(given | {features: 2})
    with pytest.raises(GraphgenError, match=r"is 4; it must be at most 2, the features"):
        FAMILIES[config.model_type].tasks["text-generation"](config)
