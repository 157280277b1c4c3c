"""Contributed operators of ONNX Runtime: a sum together with its producer, or its reader.

Whether one is faster than its body depends on the provider.
"""

from graphgen.errors import GraphgenError
from graphgen.op import composite
from graphgen.ops.activation import gelu
from graphgen.ops.elementwise import reciprocal, sqrt
from graphgen.ops.embedding import embedding
from graphgen.ops.layout import dim, slice_
from graphgen.ops.norm import layer_normalization, rms_normalization
from graphgen.ops.reduce import reduce_mean
from graphgen.value import Tensor


@composite("SkipLayerNormalization", domain="com.microsoft", outputs=4)
def skip_layer_normalization(
    x: Tensor,
    skip: Tensor,
    gamma: Tensor,
    beta: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    epsilon: float = 1e-12,
) -> Tensor:
    """The layer normalization of x + skip + bias, (B, T, D); bias is (D,)."""
    return layer_normalization(_total(x, skip, bias), gamma, beta, epsilon=epsilon)


@composite("SkipSimplifiedLayerNormalization", domain="com.microsoft", outputs=4)
def skip_rms_normalization(
    x: Tensor, skip: Tensor, gamma: Tensor, bias: Tensor | None = None, *, epsilon: float = 1e-12
) -> Tensor:
    """The RMS normalization of x + skip + bias, (B, T, D); bias is (D,)."""
    return rms_normalization(_total(x, skip, bias), gamma, epsilon=epsilon)


@skip_layer_normalization.output(3)
def _(x: Tensor, skip: Tensor, bias: Tensor | None) -> Tensor:
    """x + skip + bias."""
    return _total(x, skip, bias)


@skip_layer_normalization.output(1)
def _(x: Tensor, skip: Tensor, bias: Tensor | None) -> Tensor:
    """The mean of the sum."""
    return reduce_mean(_total(x, skip, bias), [-1])


@skip_layer_normalization.output(2)
def _(x: Tensor, skip: Tensor, bias: Tensor | None, epsilon: float) -> Tensor:
    """1 / √(variance + ε) of the sum."""
    total = _total(x, skip, bias)
    d = total - reduce_mean(total, [-1])
    return reciprocal(sqrt(reduce_mean(d * d, [-1]) + epsilon))


@skip_rms_normalization.output(3)
def _(x: Tensor, skip: Tensor, bias: Tensor | None) -> Tensor:
    """x + skip + bias."""
    return _total(x, skip, bias)


def _total(x: Tensor, skip: Tensor, bias: Tensor | None) -> Tensor:
    return x + skip if bias is None else x + bias + skip  # the bias of the product that makes x


@composite("BiasGelu", domain="com.microsoft")
def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """Gelu of x + bias, (..., D) and (D,)."""
    return gelu(x + bias)


@composite("EmbedLayerNormalization", domain="com.microsoft", outputs=2, looks_up=(0, (2, 3, 4)))
def embed_layer_normalization(
    ids: Tensor,
    segments: Tensor,
    words: Tensor,
    positions: Tensor,
    kinds: Tensor,
    gamma: Tensor,
    beta: Tensor,
    mask: Tensor | None = None,
    places: Tensor | None = None,
    *,
    epsilon: float = 1e-12,
) -> Tensor:
    """The layer normalization of words[ids] + positions[places] + kinds[segments], (B, T, D).

    `ids` and `segments` are int32[B, T], `places` int32[B or 1, T], or 0 to T - 1 if it is not
    given; the tables are (N, D).
    """
    if mask is not None:
        raise GraphgenError("EmbedLayerNormalization: a mask has no body")
    length = [n] if isinstance(n := dim(ids, 1), int) else n
    at = slice_(positions, [0], length) if places is None else embedding(positions, places)
    x = embedding(words, ids) + at
    x = x if segments is None else x + embedding(kinds, segments)
    return layer_normalization(x, gamma, beta, epsilon=epsilon)
