"""Experts that are chosen by other scores than they are weighed with (arXiv 2412.19437, 2.1.2)."""

from graphgen import nn, ops
from graphgen.models.published.experts import Experts
from graphgen.nn.module import Parameter, zeros
from graphgen.ops.layout import lowest_of
from graphgen.value import Tensor


class Router(nn.Module):
    """Which k of E experts a row is for: those with the largest s + b, weighed by s.

    s is the sigmoid of linear scores, or their softmax. Experts may be in groups of neighbors, of
    which only some count: those whose two largest s + b have the largest sums, or whose largest s
    are the largest where there is no b.

    Args:
        features: D, the size of each row.
        experts: E.
        k: How many each row uses.
        softmax: Whether s is the softmax, over all experts.
        groups: The number of groups, and of those that count.
        corrected: Whether there is a b.
    """

    def __init__(
        self,
        features: int,
        experts: int,
        k: int,
        *,
        softmax: bool,
        groups: tuple[int, int],
        corrected: bool = True,
    ):
        self.experts, self.k, self.softmax, self.groups = experts, k, softmax, groups
        self.scores = nn.Linear(features, experts, bias=False)
        # ERNIE stores its softmax's with an axis of 1.
        shape = (1, experts) if softmax else (experts,)
        self.correction = Parameter(shape, initialize=zeros) if corrected else None

    def __call__(self, rows: Tensor) -> tuple[Tensor, Tensor]:  # (N, D)
        """Scores whose softmax weighs the chosen, (N, E), and Σ s over these, (N, 1)."""
        linear = self.scores(rows)
        s = ops.softmax(linear) if self.softmax else ops.sigmoid(linear)
        corrected = s if self.correction is None else s + self.correction
        chosen = _largest(self._counting(corrected), self.k)
        log = linear if self.softmax else -ops.softplus(-linear)
        total = ops.reduce_sum(ops.where(chosen, s, 0.0), axis=1)
        return ops.where(chosen, log, lowest_of(log)), total

    def _counting(self, y: Tensor) -> Tensor:
        """The scores of experts in groups that count, and no others."""
        groups, used = self.groups
        if used == groups:
            return y
        each = ops.reshape(y, [0, groups, -1])  # (N, groups, E / groups)
        best, _ = ops.top_k(each, [1 if self.correction is None else 2])
        kept = _largest(ops.reduce_sum(best, axis=2, keepdims=False), used)
        kept = ops.unsqueeze(kept, [2])
        return ops.reshape(ops.where(kept, each, lowest_of(each)), [0, self.experts])


def _largest(y: Tensor, k: int) -> Tensor:
    """Whether each of a row, (N, E), is one of the k largest."""
    _, places = ops.top_k(y, [k])
    return ops.reduce_sum(ops.one_hot(places, y.shape[1]), axis=1, keepdims=False) > 0.5


class Routed(Experts):
    """Experts that a `Router` chooses, and a feed-forward that all rows use beside them.

    Args:
        features: D, the size of each row.
        hidden: H, the inner size of each expert.
        router: Makes the scores.
        normalized: Whether the weights of the chosen sum to 1.
        factor: The factor of what they give.
        beside: What all rows use, or None.
    """

    def __init__(
        self,
        features: int,
        hidden: int,
        router: Router,
        *,
        normalized: bool = True,
        factor: float = 1.0,
        beside: nn.Module | None = None,
    ):
        super().__init__(features, hidden, experts=router.experts, k=router.k, normalized=True)
        self.router, self.summing, self.factor = router, not normalized, factor
        self.beside = beside

    def __call__(self, x: Tensor) -> Tensor:  # (B, T, D)
        rows = ops.reshape(x, [-1, x.shape[2]])
        scores, total = self.router(rows)
        y = self.mixed(rows, scores)
        y = y * total if self.summing else y
        y = y if self.factor == 1.0 else y * self.factor
        y = ops.reshape(y, [ops.dim(x, 0), ops.dim(x, 1), x.shape[2]])
        return y if self.beside is None else y + self.beside(x)
