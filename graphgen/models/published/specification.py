"""Specifications of decoders and encoders: what a family's configuration comes down to."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from graphgen import nn, ops
from graphgen.nn.feed_forward import Activation
from graphgen.nn.module import Parameter, ones
from graphgen.operands import Array
from graphgen.value import Tensor


class Sight(NamedTuple):
    """How far back a layer looks (None: to the start), and what turns its queries and keys.

    If it is `stateful`, it looks at nothing: it keeps states of the tokens before it.
    """

    window: int | None = None
    rotary: nn.Rotary | None = None
    stateful: bool = False


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Layers of attention and feed-forward.

    A layer is y = x + r · after1(attention(norm1(x))), then y + r · after2(feed_forward(norm2(y))).
    `norms` names those of the four norms that it has; r is `residual_scale`. If it is `parallel`,
    it is x + attention(norm1(x)) + feed_forward(norm2(x)), where norm1 serves both if there is no
    norm2. If it is `post`, after1 and after2 are taken of the sums, as in arXiv 1706.03762.

    Args:
        vocabulary: The number of tokens.
        features: D, the size of the vectors between layers.
        layers: What each layer sees.
        norm: Makes a norm of so many features.
        attention: Makes the attention of a layer, or what stands in its place.
        feed_forward: Makes the feed-forward of a layer.
        bare_first: Whether the first layer has no norm1, as it follows another norm.
        last_norm: Whether a norm follows the last layer.
        embedding_features: The size of the vectors in the table; D if None.
        embedding_norm: Whether the tokens' vectors have a norm.
        positions: How many learned positions there are; None for none.
        tied: Whether the table of tokens is the output layer.
    """

    vocabulary: int
    features: int
    layers: Sequence[Sight]
    norm: Callable[[int], nn.Module]
    attention: Callable[[int], Any]
    feed_forward: Callable[[int], nn.Module]
    norms: Collection[str] = ("norm1", "norm2")
    parallel: bool = False
    post: bool = False
    residual_scale: float = 1.0
    bare_first: bool = False
    last_norm: bool = True
    embedding_features: int | None = None
    embedding_norm: bool = False
    positions: int | None = None
    tied: bool = False


@dataclass(frozen=True, kw_only=True)
class Specification(Blocks):
    """A decoder of tokens.

    Args:
        embedding_scale: The factor of the tokens' vectors.
        offset: The row of position 0 in the table of learned positions.
        slopes: The slope of each head, (H,), which the place of a key is multiplied by and added to
            its scores (ALiBi, arXiv 2108.12409).
        slopes_scale: The factor of these products.
        rounded: Whether slopes and these products are first rounded to bfloat16.
        both_sides: Whether tokens also see those behind them, as far as a window reaches; such a
            decoder embeds texts, and cannot continue them.
        counted: Whether positions, where none are given, are counted without the padding.
        head_bias: Whether the output layer has a bias.
        head_rows: Whether its weight is stored with a row for each token where products are not.
        logits_scale: The factor of the logits.
        logits_softcap: c of c · tanh(logits / c) (arXiv 2408.00118); 0 for none.
    """

    embedding_scale: float = 1.0
    offset: int = 0
    slopes: Array | None = None
    slopes_scale: float = 1.0
    rounded: bool = False
    both_sides: bool = False
    counted: bool = False
    head_bias: bool = False
    head_rows: bool = False
    logits_scale: float = 1.0
    logits_softcap: float = 0.0


@dataclass(frozen=True, kw_only=True)
class EncoderSpecification(Blocks):
    """An encoder of tokens; by default BERT's (arXiv 1810.04805), with norms after the sums.

    The window of a layer is how far it looks to either side.

    Args:
        activation: The activation of the head of masked tokens.
        pooled: The activation of the head that classifies texts.
        types: How many types of tokens there are; they are an input if there are several.
        padding: The token that has no position: those of others are counted from it on, without
            padding (arXiv 1907.11692). None if positions are places.
        projected: Whether a linear layer, with a bias, follows the norm of the tokens' vectors.
        embedded: Whether the norm is of vectors of D features, which a linear layer without bias
            makes of those in the table if they have another size.
        order: The number of the weights that each layer has; None if each has its own.
        relative: What is added to all scores by distance (arXiv 1910.10683).
        distances: The vectors of distances that the layers' attention reads (arXiv 2006.03654).
        convolution: What the first layer's result is joined with (arXiv 2006.03654).
        head_bias: Whether the linear layer of the head of masked tokens has a bias.
        logits_bias: Whether its logits have one.
    """

    norms: Collection[str] = ("after1", "after2")
    post: bool = True
    last_norm: bool = False
    embedding_norm: bool = True
    tied: bool = True
    activation: Activation = "gelu"
    pooled: Callable[[Tensor], Tensor] = ops.tanh
    types: int = 0
    padding: int | None = None
    projected: bool = False
    embedded: bool = False
    order: Sequence[int] | None = None
    relative: nn.RelativeBias | None = None
    distances: nn.Module | None = None
    convolution: nn.Module | None = None
    head_bias: bool = True
    logits_bias: bool = True


class HeadNorms(nn.Module):
    """Norms of heads that lie side by side, (..., H·D), each with gains of its own, (H, D)."""

    def __init__(self, features: int, head_dim: int, norm: Callable[..., nn.Module]):
        self.head_dim = head_dim
        self.norm = norm(head_dim, gain=False, bias=False)
        self.gains = Parameter((features // head_dim, head_dim), initialize=ones)

    def __call__(self, x: Tensor) -> Tensor:
        sizes = [ops.dim(x, i) for i in range(ops.rank(x))]
        y = ops.reshape(x, [*sizes[:-1], *self.gains.shape])
        return ops.reshape(self.norm(y) * self.gains, sizes)


def each_head(head_dim: int, norm: Callable[..., nn.Module]) -> Callable[[int], HeadNorms]:
    """What makes the norms of queries or keys where each head has its own."""
    return lambda features: HeadNorms(features, head_dim, norm)
