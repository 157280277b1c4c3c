"""Blocks of transformers."""

from typing import TYPE_CHECKING

from graphgen.errors import missing, near
from graphgen.nn.attention import Attention
from graphgen.nn.blocks import (
    CrossAttentionLayer,
    Decoder,
    DecoderLayer,
    Encoder,
    EncoderLayer,
    Norm,
    Placement,
)
from graphgen.nn.conditioning import Modulation
from graphgen.nn.convolution import Convolution, GatedLinearUnit
from graphgen.nn.experts import MixtureOfExperts
from graphgen.nn.feed_forward import Activation, FeedForward
from graphgen.nn.linear import Dropout, Embedding, Linear
from graphgen.nn.module import (
    Module,
    Parameter,
    build,
    count_parameters,
    initialize,
)
from graphgen.nn.norm import LayerNorm, RMSNorm
from graphgen.nn.position import (
    AlibiBias,
    LearnedPositions,
    RelativeBias,
    Rotary,
    SinusoidalPositions,
    rotary_frequencies,
)
from graphgen.nn.recurrent import Recurrent

__all__ = [
    "Activation",
    "AlibiBias",
    "Attention",
    "Convolution",
    "CrossAttentionLayer",
    "Decoder",
    "DecoderLayer",
    "Dropout",
    "Embedding",
    "Encoder",
    "EncoderLayer",
    "FeedForward",
    "GatedLinearUnit",
    "LayerNorm",
    "LearnedPositions",
    "Linear",
    "MixtureOfExperts",
    "Modulation",
    "Module",
    "Norm",
    "Parameter",
    "Placement",
    "RMSNorm",
    "Recurrent",
    "RelativeBias",
    "Rotary",
    "SinusoidalPositions",
    "build",
    "count_parameters",
    "initialize",
    "rotary_frequencies",
]


def __dir__() -> list[str]:
    return __all__


if not TYPE_CHECKING:  # checkers would take every name to exist

    def __getattr__(name):
        raise missing(__name__, name, _hint)

    def _hint(name):
        if name in ("ModuleList", "ModuleDict"):  # PyTorch's
            return "; a list or dictionary of modules is an attribute as it is"
        return near(name, __all__)
