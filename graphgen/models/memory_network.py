"""The end-to-end memory network (Sukhbaatar et al., arXiv 1503.08895)."""

from itertools import pairwise
from typing import Any

import numpy as np

from graphgen import nn, ops
from graphgen.errors import positive
from graphgen.nn.module import int64, normal
from graphgen.value import Tensor


def encode_positions(x: Tensor, keep: Tensor) -> Tensor:
    """Σ_j l_j ⊙ x_j over the words of a sentence (4.1), (..., J, D) to (..., D).

    l_kj = (1 - j/J) - (k/D) (1 - 2j/J), for feature k and word j of J, both counted from 1. The
    bool mask, (..., J), is True for the words, which come first.
    """
    words = ops.unsqueeze(ops.cast_like(keep, x), [-1])  # (..., J, 1)
    count = ops.maximum(ops.reduce_sum(words, [-2]), 1.0)  # (..., 1, 1)
    j = ops.unsqueeze(ops.cast_like(ops.arange(ops.dim(x, -2)), x), [-1]) + 1.0  # (J, 1)
    share = j / count
    k = np.arange(1, x.shape[-1] + 1, dtype=np.float32) / np.float32(x.shape[-1])
    weights = (1.0 - share) - (1.0 - 2.0 * share) * k  # (..., J, D)
    return ops.reduce_sum(weights * words * x, [-2], keepdims=0)


class MemoryNetwork(nn.Module):
    """The logits of the answer, a word, to a question about a story: (B, vocabulary).

    Each hop adds to the question u the sum of c_i weighted by softmax(u · m_i), where m_i and c_i
    are two vectors of sentence i (2.2). Neighbors share their weights: the table and times that
    make c of one hop make m of the next, the first table reads the question, and the last one is
    the output layer. Words are weighted by their place in the sentence, and sentences have a vector
    for how long ago they were told: the story begins with the last one.

    Word 0 is not a word: it pads sentences, stories and questions at the end. A sentence without
    words gets no attention.

    Args:
        vocabulary: The number of words, including word 0.
        features: D, the size of each vector.
        hops: How often the memory is read.
        length: The number of sentences that have a vector for their time: the longest story.
        linear: Whether to leave out the softmax, as in the first part of training (4.2).
    """

    def __init__(
        self,
        vocabulary: int = 256,
        features: int = 32,
        *,
        hops: int = 3,
        length: int = 64,
        linear: bool = False,
    ):
        positive("MemoryNetwork", vocabulary=vocabulary, features=features)
        positive("MemoryNetwork", hops=hops, length=length)
        self.linear = linear
        self.tables = [nn.Embedding(vocabulary, features) for _ in range(hops + 1)]
        self.times = [nn.LearnedPositions(length, features) for _ in range(hops + 1)]
        for table, time in zip(self.tables, self.times, strict=True):
            table.weight.initialize = time.weight.initialize = normal(0.1)

    def __call__(
        self, story_ids: Tensor, question_ids: Tensor
    ) -> dict[str, Tensor]:  # (B, I, J), (B, J'), 0 for no word
        words, asked = ops.greater(story_ids, 0), ops.greater(question_ids, 0)
        present = ops.greater(ops.gather(story_ids, 0, axis=2), 0)  # (B, I)
        memories = [
            time(encode_positions(table(story_ids), words))
            for table, time in zip(self.tables, self.times, strict=True)
        ]  # each (B, I, D)
        u = ops.unsqueeze(encode_positions(self.tables[0](question_ids), asked), [1])  # (B, 1, D)
        for m, c in pairwise(memories):
            u = u + self._read(u, m, c, present)
        return {"logits": self.tables[-1].logits(ops.squeeze(u, [1]))}

    def _read(self, u: Tensor, m: Tensor, c: Tensor, present: Tensor) -> Tensor:
        """What the question u reads from the memory, (B, 1, D)."""
        if self.linear:
            scores = ops.matmul(u, ops.swap_last(m)) * ops.unsqueeze(ops.cast_like(present, u), [1])
            return ops.matmul(scores, c)
        return ops.attention(
            u, m, c, ops.unsqueeze(present, [1, 2]), scale=1.0, q_num_heads=1, kv_num_heads=1
        )


def inputs() -> dict[str, Any]:
    """What `build` needs to know about the arguments."""
    return {
        "story_ids": int64["batch", "sentences", "words"],
        "question_ids": int64["batch", "question"],
    }
