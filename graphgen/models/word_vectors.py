"""Word vectors: skip-gram with negative sampling (Mikolov et al., arXiv 1310.4546)."""

from typing import Any

from graphgen import nn, ops
from graphgen.errors import positive
from graphgen.nn.module import int64
from graphgen.value import Tensor


class SkipGram(nn.Module):
    """The scores v'_c · v_w of words w with contexts c, (B,) and (B, N) to (B, N).

    `embedding` is the table of the vectors v, which are the result; `context` holds the vectors v'
    of words as contexts.

    Args:
        vocabulary: The number of words.
        features: The size of each vector.
    """

    def __init__(self, vocabulary: int = 10000, features: int = 128):
        positive("SkipGram", vocabulary=vocabulary, features=features)
        self.embedding = nn.Embedding(vocabulary, features)
        self.context = nn.Embedding(vocabulary, features)

    def __call__(self, word_ids: Tensor, context_ids: Tensor) -> dict[str, Tensor]:
        v = ops.unsqueeze(self.embedding(word_ids), [-1])  # (B, D, 1)
        scores = ops.matmul(self.context(context_ids), v)  # (B, N, 1)
        return {"scores": ops.squeeze(scores, [-1])}


def negative_sampling(scores: Tensor) -> Tensor:
    """-log σ(s_0) - Σ log σ(-s_i), the mean over (B, 1 + k).

    s_0 is of a context found next to the word; the others are of k drawn from the noise (2.2).
    """
    every = ops.reduce_sum(ops.softplus(scores), [1], keepdims=0)  # log σ(-s) is -softplus(s)
    found = ops.gather(scores, 0, axis=1)  # and log σ(s) is s - softplus(s)
    return ops.reduce_mean(every - found, None, keepdims=0)


def inputs() -> dict[str, Any]:
    """What `build` needs to know about the arguments."""
    return {"word_ids": int64["batch"], "context_ids": int64["batch", "contexts"]}
