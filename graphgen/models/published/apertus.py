"""Apertus (arXiv 2509.14233): norms of queries and keys, and an activation with weights."""

from dataclasses import replace
from typing import Any

from graphgen import nn, ops
from graphgen.models.published.config import Config
from graphgen.models.published.named import (
    all_turned,
    family,
    feed_forward,
    rms_norm,
    specification,
)
from graphgen.models.published.rope import given_parameters
from graphgen.models.published.specification import Specification
from graphgen.nn.module import Parameter, zeros
from graphgen.value import Tensor


class XIELU(nn.Module):
    """a x² + βx above 0, and (exp(min(x, ε)) - 1 - x) b + βx below (arXiv 2411.13010).

    a = softplus(alpha_p), b = β + softplus(alpha_n); β and ε are stored, and not trained.
    """

    def __init__(self) -> None:
        self.alpha_p = Parameter((1,), initialize=zeros)
        self.alpha_n = Parameter((1,), initialize=zeros)
        self.beta = Parameter((), initialize=zeros)
        self.eps = Parameter((), initialize=zeros)

    def __call__(self, x: Tensor) -> Tensor:
        above = ops.softplus(self.alpha_p) * x * x
        below = (ops.exp(ops.minimum(x, self.eps)) - 1.0 - x) * (
            self.beta + ops.softplus(self.alpha_n)
        )
        y: Tensor = ops.where(x > 0.0, above, below)
        return y + self.beta * x


class FeedForward(nn.Module):
    """W₂ xIELU(W₁ x)."""

    def __init__(self, features: int, hidden: int):
        self.up = nn.Linear(features, hidden, bias=False)
        self.activation = XIELU()
        self.down = nn.Linear(hidden, features, bias=False)

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))


STRETCHED = {
    "rope_type": "llama3",
    "rope_theta": 1.2e7,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
"""What the class takes where a configuration says nothing of its positions."""


def apertus(config: Config) -> Specification:
    """The only architecture that the class has, whatever the publisher notes about it."""
    config.expect("mlp_bias", False)
    config.expect("post_norm", False)
    config.expect("qk_norm", True)
    sizes = config.take("hidden_size", int), config.take("intermediate_size", int)
    make: Any = lambda number: FeedForward(*sizes)  # noqa: E731
    if config.take("hidden_act", str, "xielu") != "xielu":
        make = feed_forward(config, gated=False, bias=False)
    given = given_parameters(config)
    if not given:
        given = STRETCHED | {"rope_theta": config.take("rope_theta", float, 1.2e7)}
    layers = config.take("num_hidden_layers", int)
    return specification(
        config,
        attention={"norm": rms_norm(config)},
        feed_forward=make,
        sights=all_turned(config, [None] * layers, parameters=given),
    )


_FAMILY = family(
    apertus, activation="act_fn", norm1="attention_layernorm", norm2="feedforward_layernorm"
)
FAMILIES = {"apertus": replace(_FAMILY, held=r".*\.act_fn\.(beta|eps)")}
