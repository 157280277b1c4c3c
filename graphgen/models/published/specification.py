"""One specification of a decoder of tokens: what a family's configuration comes down to."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from graphgen import nn, ops
from graphgen.nn.module import Parameter, ones
from graphgen.operands import Array
from graphgen.value import Tensor


class Sight(NamedTuple):
    """How far back a layer looks (None: to the start), and what turns its queries and keys."""

    window: int | None = None
    rotary: nn.Rotary | None = None


@dataclass(frozen=True, kw_only=True)
class Specification:
    """A decoder of tokens.

    A layer is y = x + r · after1(attention(norm1(x))), then y + r · after2(feed_forward(norm2(y))).
    `norms` names those of the four norms that it has; r is `residual_scale`. If it is `parallel`,
    it is x + attention(norm1(x)) + feed_forward(norm2(x)), where norm1 serves both if there is no
    norm2. If it is `post`, after1 and after2 are taken of the sums, as in arXiv 1706.03762.

    Args:
        vocabulary: The number of tokens.
        features: D, the size of the vectors between layers.
        layers: What each layer sees.
        norm: Makes a norm of so many features.
        attention: Makes the attention of a layer.
        feed_forward: Makes the feed-forward of a layer.
        last_norm: Whether a norm follows the last layer.
        embedding_features: The size of the vectors in the table; D if None.
        embedding_scale: The factor of the tokens' vectors.
        embedding_norm: Whether they have a norm.
        positions: How many learned positions there are; None for none.
        offset: The row of position 0 in their table.
        slopes: The slope of each head, (H,), which the place of a key is multiplied by and added to
            its scores (ALiBi, arXiv 2108.12409).
        slopes_scale: The factor of these products.
        rounded: Whether slopes and these products are first rounded to bfloat16.
        counted: Whether positions, where none are given, are counted without the padding.
        tied: Whether the table of tokens is the output layer.
        head_bias: Whether the output layer has a bias.
        head_rows: Whether its weight is stored with a row for each token where products are not.
        logits_scale: The factor of the logits.
        logits_softcap: c of c · tanh(logits / c) (arXiv 2408.00118); 0 for none.
    """

    vocabulary: int
    features: int
    layers: Sequence[Sight]
    norm: Callable[[int], nn.Module]
    attention: Callable[[int], nn.Attention]
    feed_forward: Callable[[int], nn.Module]
    norms: Collection[str] = ("norm1", "norm2")
    parallel: bool = False
    post: bool = False
    residual_scale: float = 1.0
    last_norm: bool = True
    embedding_features: int | None = None
    embedding_scale: float = 1.0
    embedding_norm: bool = False
    positions: int | None = None
    offset: int = 0
    slopes: Array | None = None
    slopes_scale: float = 1.0
    rounded: bool = False
    counted: bool = False
    tied: bool = False
    head_bias: bool = False
    head_rows: bool = False
    logits_scale: float = 1.0
    logits_softcap: float = 0.0


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
