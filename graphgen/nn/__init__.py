"""Blocks of transformers."""

from graphgen.nn.attention import Attention
from graphgen.nn.blocks import Decoder, DecoderLayer, Encoder, EncoderLayer
from graphgen.nn.convolution import Convolution, GatedLinearUnit
from graphgen.nn.feed_forward import FeedForward
from graphgen.nn.linear import Dropout, Embedding, Linear
from graphgen.nn.module import Module, Parameter, build, initialize
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
