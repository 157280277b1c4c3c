"""Contributed operators of ONNX Runtime: a sum together with its producer, or its reader.

Whether one is faster than its body depends on the provider.
"""

from graphgen.op import composite
from graphgen.ops.activation import gelu
from graphgen.ops.elementwise import equal, reciprocal, sqrt
from graphgen.ops.embedding import embedding
from graphgen.ops.layout import cast_like, dim, slice_
from graphgen.ops.norm import layer_normalization, rms_normalization
from graphgen.ops.reduce import reduce_mean, reduce_sum
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


@skip_layer_normalization.output(3)
@skip_rms_normalization.output(3)
def _total(x: Tensor, skip: Tensor, bias: Tensor | None) -> Tensor:
    """x + skip + bias."""
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
    mask_index_type: int | None = None,
) -> Tensor:
    """The layer normalization of words[ids] + positions[places] + kinds[segments], (B, T, D).

    `ids` and `segments` are int32[B, T], `places` int32[B or 1, T], or 0 to T - 1 if it is not
    given; the tables are (N, D). Output 1 counts the ones in each row of `mask`, int32[B, T].
    """
    total = _embedded(ids, segments, words, positions, kinds, places)
    return layer_normalization(total, gamma, beta, epsilon=epsilon)


@embed_layer_normalization.output(1)
def _(ids: Tensor, mask: Tensor | None) -> Tensor:
    """How many elements of each row of the mask are 1, int32[B]; 0 without a mask."""
    if mask is None:
        return reduce_sum(ids * 0, [1], keepdims=0)
    return reduce_sum(cast_like(equal(mask, 1), mask), [1], keepdims=0)


@embed_layer_normalization.output(2)
def _embedded(
    ids: Tensor,
    segments: Tensor | None,
    words: Tensor,
    positions: Tensor,
    kinds: Tensor,
    places: Tensor | None,
) -> Tensor:
    """The sum of the embeddings."""
    length = [n] if isinstance(n := dim(ids, 1), int) else n
    at = slice_(positions, [0], length) if places is None else embedding(positions, places)
    x = embedding(words, ids) + at
    return x if segments is None else x + embedding(kinds, segments)
