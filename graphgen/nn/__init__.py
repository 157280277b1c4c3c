"""Blocks of transformers."""

from graphgen.nn.attention import Attention as Attention
from graphgen.nn.blocks import (
    CrossAttentionLayer as CrossAttentionLayer,
    Decoder as Decoder,
    DecoderLayer as DecoderLayer,
    Encoder as Encoder,
    EncoderLayer as EncoderLayer,
)
from graphgen.nn.conditioning import Modulation as Modulation
from graphgen.nn.convolution import Convolution as Convolution, GatedLinearUnit as GatedLinearUnit
from graphgen.nn.feed_forward import FeedForward as FeedForward
from graphgen.nn.linear import Dropout as Dropout, Embedding as Embedding, Linear as Linear
from graphgen.nn.module import (
    Module as Module,
    Parameter as Parameter,
    build as build,
    initialize as initialize,
)
from graphgen.nn.norm import LayerNorm as LayerNorm, RMSNorm as RMSNorm
from graphgen.nn.position import (
    AlibiBias as AlibiBias,
    LearnedPositions as LearnedPositions,
    RelativeBias as RelativeBias,
    Rotary as Rotary,
    SinusoidalPositions as SinusoidalPositions,
    rotary_frequencies as rotary_frequencies,
)
from graphgen.nn.recurrent import Recurrent as Recurrent
