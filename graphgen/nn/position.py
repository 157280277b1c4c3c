"""Positions added to embeddings."""

import onnx_ir as ir

from graphgen import ops
from graphgen.errors import GraphgenError
from graphgen.nn.module import Module, Parameter, normal
from graphgen.nn.sizes import positive
from graphgen.op import Operand


class SinusoidalPositions(Module):
    """x + PE (arXiv 1706.03762, 3.5), (B, T, features); any length, beyond the trained one too."""

    def __init__(self, features: int):
        positive("SinusoidalPositions", features=features)
        if features % 2:
            raise GraphgenError(f"SinusoidalPositions(features={features}): features must be even")
        self.features = features

    def __call__(self, x: Operand) -> Operand:
        self.expect_last(x, self.features)
        positions = ops.cast_like(ops.arange(ops.dim(x, 1)), x)
        return x + ops.sinusoidal_positions(positions, features=self.features)


class LearnedPositions(Module):
    """x + table[0 ... T-1], (B, T, features).

    The table has `length` rows, so a position from `length` on was never learned and has no
    vector: a known length beyond it is refused at build, an unknown one by Gather at run time.
    """

    def __init__(self, length: int, features: int):
        positive("LearnedPositions", length=length, features=features)
        self.length, self.features = length, features
        self.weight = Parameter((length, features), initialise=normal(0.02))

    def __call__(self, x: Operand) -> Operand:
        self.expect_last(x, self.features)
        count = ops.dim(x, 1)
        if not isinstance(count, ir.Value) and int(count) > self.length:
            raise GraphgenError(
                f"{self!r}: the sequence has {count} positions; position {self.length} was never "
                "learned, so it has no vector: use SinusoidalPositions, or a longer table"
            )
        # ONNX Runtime makes a Slice of a Gather by a plain Range, and a Slice refuses nothing.
        rows = ops.unsqueeze(ops.arange(count), [0])  # (1, T)
        return x + ops.embedding(self.weight, rows)
