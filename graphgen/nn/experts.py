"""Feed-forward blocks of which each token uses a few."""

from typing import Any

import onnx_ir as ir

from graphgen import ops
from graphgen.errors import GraphgenError, positive, user_line
from graphgen.nn.feed_forward import FeedForward
from graphgen.nn.linear import Linear
from graphgen.nn.module import Module
from graphgen.ops.layout import reshape_like
from graphgen.value import Tensor


class MixtureOfExperts(Module):
    """Σ p_e f_e(x) over the k experts e with the largest scores x W (arXiv 1701.06538, 2).

    Each f_e is a `FeedForward`, and p the softmax of those k scores: that of all scores,
    renormalized over the k chosen (arXiv 2401.04088, 2.1). (..., features) to the same.

    The rows are put in the order of their experts, so each expert computes its own rows only: the
    cost is k feed-forwards for each row, however many experts there are, and no row is dropped.
    Gradients flow to the scores of the chosen experts; `balance` makes the router use all.

    Args:
        features: The size of each row.
        hidden: The inner size of each expert.
        experts: How many there are.
        k: How many of them each row uses.
        feed_forward: Options of `FeedForward`: activation, gated, bias, dropout.
    """

    def __init__(
        self, features: int, hidden: int, *, experts: int, k: int = 2, **feed_forward: Any
    ):
        positive("MixtureOfExperts", features=features, hidden=hidden, experts=experts, k=k)
        if k > experts:
            given = f"MixtureOfExperts(experts={experts}, k={k})"
            problem = f"k must be at most {experts}, one for each expert"
            raise GraphgenError(f"{given}: {problem}{user_line()}")
        self.features, self.hidden, self.k = features, hidden, k
        self.router = Linear(features, experts, bias=False)
        self.experts = [FeedForward(features, hidden, **feed_forward) for _ in range(experts)]

    def __call__(self, x: Tensor) -> Tensor:
        self.expect_last(x, self.features)
        rows = ops.reshape(x, [-1, self.features])  # (N, D)
        scores, chosen = ops.top_k(self.router(rows), self.k)  # (N, k)
        slots = ops.reshape(chosen, [-1])  # (N·k), a row and one of its experts each
        order = ops.top_k(slots, ops.dim(slots, 0), largest=0)[1]  # by expert
        counts = self._counts(slots)
        sorted_rows = ops.gather(rows, ops.div(order, self.k))  # (N·k, D)
        parts = ops.split(sorted_rows, counts, axis=0, num_outputs=len(self.experts))
        results = [f(part) for f, part in zip(self.experts, parts, strict=True)]
        y = ops.scatter_nd(
            ops.zeros_like(sorted_rows), ops.unsqueeze(order, [1]), ops.concat(*results, axis=0)
        )
        y = ops.reshape(y, [-1, self.k, self.features]) * ops.unsqueeze(ops.softmax(scores), [2])
        return reshape_like(ops.reduce_sum(y, [1], keepdims=0), x)

    def balance(self, x: Tensor) -> Tensor:
        """E Σ_e f_e P_e, a scalar to add to the loss, times 0.01, say (arXiv 2101.03961, 4-6).

        f_e is the part of all choices that fell on expert e, P_e the mean over all rows of its
        softmax over all E scores; the paper has k = 1. It is 1 if both are the same for all
        experts, E / k if all rows are sure of the same k, and 0 without rows. The gradient flows
        through P only. Call it on what the experts get; `optimize` merges the scores of both.
        """
        self.expect_last(x, self.features)
        scores = self.router(ops.reshape(x, [-1, self.features]))  # (N, E)
        _, chosen = ops.top_k(scores, self.k)
        counts = ops.cast_like(self._counts(ops.reshape(chosen, [-1])), scores)  # (E,)
        choices = ops.maximum(ops.reduce_sum(counts, [0]), 1.0)  # N k
        parts = ops.reduce_sum(ops.softmax(scores), [0], keepdims=0) * self.k / choices
        return ops.reduce_sum(counts / choices * parts, [0], keepdims=0) * len(self.experts)

    def _counts(self, slots: Tensor) -> Tensor:
        """How many choices fell on each expert, int64 (E,)."""
        each = ops.one_hot(slots, len(self.experts), dtype=ir.DataType.INT64)
        return ops.reduce_sum(each, [0], keepdims=0)
