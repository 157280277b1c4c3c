"""The Extended Neural GPU: convolutional gated recurrent units over a mental image.

Kaiser and Sutskever, arXiv 1511.08228; its decoder is that of Kaiser and Bengio, arXiv 1610.08613.
"""

import math

import numpy as np
import onnx_ir as ir

from graphgen import nn, ops
from graphgen.errors import GraphgenError, positive, user_line
from graphgen.nn.module import Parameter, in_line, normal, ones, zeros
from graphgen.value import Tensor


class ConvolutionalGRU(nn.Module):
    """u ⊙ s + (1 - u) ⊙ tanh(U * (r ⊙ s) + W * p + B), of images (B, D, w, n).

    The gates are u = σ(U' * s + W' * p + B') and, likewise, r; * is a convolution that keeps the
    size. The tape p, of the same shape, exists only with `tape`. Gates begin with a bias of 1, so
    images change slowly at first.
    """

    def __init__(self, features: int, *, kernel: int, tape: bool):
        planes = 2 * features if tape else features
        std = 1.0 / math.sqrt(planes * kernel * kernel)
        self.before = (kernel - 1) // 2
        self.after = kernel - 1 - self.before
        shape = (features, planes, kernel, kernel)
        self.weight = Parameter(shape, initialize=normal(std))
        self.bias = Parameter((features,), initialize=zeros)
        self.gate_weight = Parameter((2 * features, *shape[1:]), initialize=normal(std))
        self.gate_bias = Parameter((2 * features,), initialize=ones)

    def __call__(self, s: Tensor, p: Tensor | None = None) -> Tensor:
        gates = ops.sigmoid(self._convolve(s, p, self.gate_weight, self.gate_bias))
        u, r = ops.split(gates, axis=1, num_outputs=2)
        return u * s + (1.0 - u) * ops.tanh(self._convolve(r * s, p, self.weight, self.bias))

    def _convolve(self, s: Tensor, p: Tensor | None, weight: Parameter, bias: Parameter) -> Tensor:
        x = s if p is None else ops.concat(s, p, axis=1)  # U * s + W * p as one
        pads = [self.before] * 2 + [self.after] * 2
        return ops.conv(x, weight, bias, pads=pads)


class NeuralGPU(nn.Module):
    """The logits of each next target token, (B, S) and (B, T) to (B, T, vocabulary).

    The image, n columns by w rows of D features, begins with the source in its first row and zeros
    elsewhere; padding of the source is zero, like what follows it. All units of the encoder change
    it, n times. Then all units of the decoder do, once for each output: output k is read from
    column k of the first row after step k, and its token is written there, on the tape that all
    later steps read. The first target id, which is the same for all, is not read.

    The n steps are unrolled. A source or target longer than n is an error: in build if its length
    is known, else in Gather at run time. The cut-off of gates, curriculum, relaxed weights and
    gradient noise of the first paper are left out.

    Args:
        vocabulary: The number of tokens of both languages together.
        features: D, the features of each place.
        layers: The number of units of the encoder, and of the decoder.
        width: w, the rows of the image.
        length: n, its columns, and the steps of the encoder: the longest source or target.
        kernel: The side of each convolution's kernel.
    """

    def __init__(
        self,
        vocabulary: int = 64,
        features: int = 32,
        *,
        layers: int = 2,
        width: int = 4,
        length: int = 16,
        kernel: int = 3,
    ):
        positive("NeuralGPU", vocabulary=vocabulary, features=features, layers=layers)
        positive("NeuralGPU", width=width, length=length, kernel=kernel)
        self.width, self.length = width, length
        self.source, self.target = (nn.Embedding(vocabulary, features) for _ in range(2))
        for table in (self.source, self.target):
            table.weight.initialize = normal(1.0)
        self.encoder, self.decoder = (
            [ConvolutionalGRU(features, kernel=kernel, tape=tape) for _ in range(layers)]
            for tape in (False, True)
        )
        self.output = nn.Linear(features, vocabulary)

    def encode(self, source_ids: Tensor, mask: Tensor) -> Tensor:
        """The image after n steps, (B, S) and bool (B, S) to (B, D, w, n)."""
        x = ops.where(ops.unsqueeze(mask, [-1]), self.source(source_ids), 0.0)  # (B, S, D)
        image = self._first_row(x, self._columns(source_ids))
        for _ in range(self.length):
            for unit in self.encoder:
                image = unit(image)
        return image

    def decode(self, target_ids: Tensor, memory: Tensor, mask: Tensor | None = None) -> Tensor:
        """The logits, from (B, T) and (B, D, w, n) to (B, T, vocabulary); the mask is not read."""
        embedded = self.target(target_ids)  # (B, T, D)
        written = self._first_row(embedded, self._columns(target_ids, late=1))
        image, outputs, places = memory, [], np.arange(self.length)
        for k in range(self.length):
            tape = written * (places < k).astype(np.float32)  # tokens 0 to k - 1
            for unit in self.decoder:
                image = unit(image, tape)
            outputs.append(ops.slice_(image, [0, k], [1, k + 1], [2, 3]))  # (B, D, 1, 1)
        columns = ops.squeeze(ops.concat(*outputs, axis=3), [2])  # (B, D, n)
        return self.output(ops.matmul(self._columns(target_ids), ops.swap_last(columns)))

    def __call__(
        self, source_ids: Tensor, source_mask: Tensor, target_ids: Tensor
    ) -> dict[str, Tensor]:  # (B, S), (B, S) with 0 for padding, (B, T)
        memory = self.encode(source_ids, ops.cast(source_mask, to=ir.DataType.BOOL))
        return {"logits": self.decode(target_ids, memory)}  # (B, T, vocabulary)

    def _columns(self, ids: Tensor, *, late: int = 0) -> Tensor:
        """(1, T, n): row i has a one at the column of its token, i - late."""
        count = ops.dim(ids, 1)
        if isinstance(count, int) and count > self.length:
            raise GraphgenError(
                f"{in_line(self)}: a sequence has {count} tokens, and the image only {self.length} "
                f"columns; build the model with length={count}{user_line()}"
            )
        # The runtime would turn a Gather by a plain Range into a Slice, which refuses nothing.
        rows = ops.unsqueeze(ops.arange(count), [0])
        return ops.gather(np.eye(self.length, k=-late, dtype=np.float32), rows)

    def _first_row(self, x: Tensor, columns: Tensor) -> Tensor:
        """(B, T, D) in the first of w rows of (B, D, w, n), zeros in the others."""
        row = ops.unsqueeze(ops.matmul(ops.swap_last(x), columns), [2])  # (B, D, 1, n)
        return row * np.eye(self.width, 1, dtype=np.float32)
