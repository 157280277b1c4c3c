"""Recurrent encoder-decoders: without attention, and with additive or multiplicative attention."""

from typing import Any, Literal, TypeAlias

import onnx_ir as ir

from graphgen import nn, ops
from graphgen.errors import one_of, positive
from graphgen.nn.recurrent import Kind
from graphgen.ops.layout import lowest_of
from graphgen.value import Tensor

Score: TypeAlias = Literal["none", "additive", "multiplicative"]


class RecurrentSeq2Seq(nn.Module):
    """The logits of each next target token, (B, S) and (B, T) to (B, T, vocabulary).

    none: the decoder knows only the encoder's last state of the source (Sutskever et al.,
    arXiv 1409.3215). additive: each step weights the source's states h by
    softmax(vᵀ tanh(W s + U h)) with the state s before it, and reads their sum (Bahdanau et al.,
    arXiv 1409.0473). multiplicative: the weights are softmax(sᵀ W h) with the state s after the
    step, so all steps attend at once (Luong et al., arXiv 1508.04025, "general").

    Args:
        vocabulary: The number of tokens of both languages together.
        features: D, the size of each token's vector and of each state.
        kind: rnn, lstm or gru.
        score: The attention: none, additive or multiplicative.
    """

    def __init__(
        self,
        vocabulary: int = 37000,
        features: int = 512,
        *,
        kind: Kind = "gru",
        score: Score = "none",
    ):
        positive("RecurrentSeq2Seq", vocabulary=vocabulary, features=features)
        one_of("RecurrentSeq2Seq", Score, score=score)
        self.score, attends, additive = score, score != "none", score == "additive"
        self.embedding = nn.Embedding(vocabulary, features)
        self.encoder = nn.Recurrent(features, features, kind=kind, bidirectional=attends)
        width = 2 * features
        self.decoder = nn.Recurrent(features + additive * width, features, kind=kind)
        if attends:
            self.query = nn.Linear(features, features if additive else width, bias=False)
            self.output = nn.Linear(features + width, features)
        if additive:
            self.key = nn.Linear(width, features, bias=False)
            self.energy = nn.Linear(features, 1, bias=False)

    def __call__(
        self, source_ids: Tensor, source_mask: Tensor, target_ids: Tensor
    ) -> dict[str, Tensor]:  # (B, S), (B, S) with 0 for padding at the end, (B, T)
        lengths = ops.cast(ops.reduce_sum(source_mask, [1], keepdims=0), to=ir.DataType.INT32)
        memory, last = self.encoder(self.embedding(source_ids), lengths=lengths)  # (B, S, 1 or 2 D)
        # Of two directions, the one that ends at the first token, as in arXiv 1409.0473.
        first = [ops.slice_(state, [-1], [2**31], [0]) for state in last]  # (1, B, D)
        x = self.embedding(target_ids)  # (B, T, D)
        if self.score == "none":
            y, _ = self.decoder(x, *first)
        else:
            keep = ops.cast(source_mask, to=ir.DataType.BOOL)  # (B, S)
            attend = self._additive if self.score == "additive" else self._multiplicative
            y = attend(x, memory, keep, first)
        return {"logits": self.embedding.logits(y)}  # (B, T, vocabulary)

    def _additive(self, x: Tensor, memory: Tensor, keep: Tensor, first: Any) -> Tensor:
        keys = self.key(memory)  # (B, S, D), once for all steps

        def step(*given: Tensor) -> tuple[list[Tensor], list[Tensor]]:
            *states, now = given  # (B, D) each
            query = ops.unsqueeze(self.query(states[0]), [1])  # (B, 1, D)
            scores = ops.squeeze(self.energy(ops.tanh(query + keys)), [2])  # (B, S)
            context = ops.matmul(ops.unsqueeze(_weights(scores, keep), [1]), memory)
            context = ops.squeeze(context, [1])  # (B, 2 D)
            after = self.decoder.step(ops.concat(now, context, axis=-1), *states)
            return after, [ops.concat(after[0], context, axis=-1)]

        begin = [ops.squeeze(state, [0]) for state in first]
        _, [both] = ops.scan(step, begin, [x], axis=1)  # (B, T, 3 D)
        return ops.tanh(self.output(both))

    def _multiplicative(self, x: Tensor, memory: Tensor, keep: Tensor, first: Any) -> Tensor:
        y, _ = self.decoder(x, *first)  # (B, T, D)
        scores = ops.matmul(self.query(y), ops.swap_last(memory))  # (B, T, S)
        context = ops.matmul(_weights(scores, ops.unsqueeze(keep, [1])), memory)
        return ops.tanh(self.output(ops.concat(y, context, axis=-1)))


def _weights(scores: Tensor, keep: Tensor) -> Tensor:
    """The softmax over the tokens of the source; padding has weight 0."""
    return ops.softmax(ops.where(keep, scores, lowest_of(scores)), axis=-1)
