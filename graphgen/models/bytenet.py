"""ByteNet: a decoder of convolutions on top of an encoder of them (arXiv 1610.10099)."""

import onnx_ir as ir

from graphgen import nn, ops
from graphgen.errors import GraphgenError, positive, user_line
from graphgen.nn.module import normal
from graphgen.value import Tensor


class ResidualBlock(nn.Module):
    """x + up(f(convolution(f(down(f(x)))))), f a norm and ReLU (3.6): (B, T, D) to (B, T, D).

    The convolution between the two linear maps has D / 2 features.
    """

    def __init__(self, features: int, *, kernel: int, dilation: int, causal: bool):
        inner = features // 2
        self.norm1, self.down = nn.LayerNorm(features), nn.Linear(features, inner)
        self.norm2, self.norm3 = nn.LayerNorm(inner), nn.LayerNorm(inner)
        self.convolution = nn.Convolution(
            inner, inner, kernel=kernel, dilation=dilation, causal=causal
        )
        self.up = nn.Linear(inner, features)

    def __call__(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = self.down(ops.relu(self.norm1(x)))  # (B, T, D / 2)
        y = self.convolution(ops.relu(self.norm2(y)), mask)
        return x + self.up(ops.relu(self.norm3(y)))


class ByteNet(nn.Module):
    """The logits of each next target token, (B, S) and (B, T) to (B, T, vocabulary).

    The encoder has a column for each of the first a · |s| places, where |s| is the number of source
    tokens and a the stretch. Column t is added to the embedding of target token t, and zeros after
    the last column (dynamic unfolding, 3.2). Blocks have dilations 1, 2, 4 ... r, and again from 1.
    Padding comes after the source.

    This has the blocks of the paper's translation model, but not the multiplicative units of its
    language model, nor the embeddings of n-grams of characters. The paper does not say how a column
    and an embedding are joined; their sum keeps the size.

    Args:
        vocabulary: The number of tokens, characters in the paper, of both languages together.
        features: D, the size of each column, twice the paper's d; even.
        layers: The number of blocks of the encoder, and of the decoder; 30 in the paper.
        kernel: How many elements each convolution reads.
        dilation: r, the largest dilation, rounded down to a power of 2.
        stretch: a, at least 1; hundredths count.
        dropout: The ratio of zeros before the last layer, in training only.
    """

    def __init__(
        self,
        vocabulary: int = 320,
        features: int = 256,
        *,
        layers: int = 10,
        kernel: int = 3,
        dilation: int = 16,
        stretch: float = 1.2,
        dropout: float = 0.1,
    ):
        positive("ByteNet", vocabulary=vocabulary, features=features, layers=layers)
        positive("ByteNet", kernel=kernel, dilation=dilation)
        if features % 2:
            raise GraphgenError(f"ByteNet: features is {features}; it must be even{user_line()}")
        if not 1.0 <= stretch <= 100.0:
            raise GraphgenError(
                f"ByteNet: stretch is {stretch}; it must be from 1 to 100{user_line()}"
            )
        self.hundredths = round(100 * stretch)
        self.source, self.target = (nn.Embedding(vocabulary, features) for _ in range(2))
        for table in (self.source, self.target):
            table.weight.initialize = normal(1.0)
        self.encoder, self.decoder = (
            [
                ResidualBlock(
                    features,
                    kernel=kernel,
                    dilation=2 ** (i % dilation.bit_length()),
                    causal=causal,
                )
                for i in range(layers)
            ]
            for causal in (False, True)
        )
        self.hidden, self.output = nn.Linear(features, features), nn.Linear(features, vocabulary)
        self.dropout = nn.Dropout(dropout)

    def encode(self, source_ids: Tensor, mask: Tensor) -> Tensor:
        """The columns of the source, (B, S) and bool (B, S) to (B, ⌈a S⌉, D)."""
        size = ops.dim(source_ids, 1)
        places = ops.arange(ops.div(size * self.hundredths + 99, 100))  # (⌈a S⌉,)
        inside = ops.minimum(places, size - 1)
        kept = ops.logical_and(ops.gather(mask, inside, axis=1), ops.less(places, size))
        count = ops.reduce_sum(ops.cast(mask, to=ir.DataType.INT64), [1])  # (B, 1)
        columns = ops.less(places * 100, count * self.hundredths)  # (B, ⌈a S⌉)
        x = self.source(ops.gather(source_ids, inside, axis=1))  # (B, ⌈a S⌉, D)
        x = ops.where(ops.unsqueeze(kept, [-1]), x, 0.0)
        for block in self.encoder:
            x = block(x, columns)
        return ops.where(ops.unsqueeze(columns, [-1]), x, 0.0)

    def decode(self, target_ids: Tensor, memory: Tensor, mask: Tensor | None = None) -> Tensor:
        """The logits, from (B, T) and (B, U, D) to (B, T, vocabulary).

        The source's mask is not read: what it hides is zero in the memory.
        """
        places, size = ops.arange(ops.dim(target_ids, 1)), ops.dim(memory, 1)
        column = ops.gather(memory, ops.minimum(places, size - 1), axis=1)  # (B, T, D)
        column = ops.where(ops.unsqueeze(ops.less(places, size), [-1]), column, 0.0)
        x: Tensor = self.target(target_ids) + column
        for block in self.decoder:
            x = block(x)
        return self.output(self.dropout(ops.relu(self.hidden(x))))

    def __call__(
        self, source_ids: Tensor, source_mask: Tensor, target_ids: Tensor
    ) -> dict[str, Tensor]:  # (B, S), (B, S) with 0 for padding, (B, T)
        memory = self.encode(source_ids, ops.cast(source_mask, to=ir.DataType.BOOL))
        return {"logits": self.decode(target_ids, memory)}  # (B, T, vocabulary)
