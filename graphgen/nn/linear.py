"""Linear maps, embeddings, dropout."""

import math
from typing import Any

import numpy as np
import onnx_ir as ir

from graphgen import ops
from graphgen.errors import GraphgenError, positive, user_line
from graphgen.nn.module import Module, Parameter, normal, zeros
from graphgen.ops.layout import numpy_dtype
from graphgen.record import current_tape
from graphgen.value import Tensor


class Linear(Module):
    """x W + b, with W (features_in, features_out); (..., features_in) to (..., features_out)."""

    def __init__(self, features_in: int, features_out: int, *, bias: bool = True):
        positive("Linear", features_in=features_in, features_out=features_out)
        self.features_in, self.features_out = features_in, features_out
        std = 1.0 / math.sqrt(features_in)
        self.weight = Parameter((features_in, features_out), initialize=normal(std))
        self.bias = Parameter((features_out,), initialize=zeros) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        self.expect_last(x, self.features_in)
        y = ops.matmul(x, self.weight)
        return y if self.bias is None else y + self.bias


class Embedding(Module):
    """Rows of a table, (count, features), at integer ids: (...) to (..., features)."""

    def __init__(self, count: int, features: int):
        positive("Embedding", count=count, features=features)
        self.count, self.features = count, features
        self.weight = Parameter((count, features), initialize=normal(0.02))

    def __call__(self, ids: Tensor) -> Tensor:
        return ops.embedding(self.weight, ids)

    def logits(self, x: Tensor) -> Tensor:
        """x Wᵀ: the same table as the output layer, (..., features) to (..., count)."""
        return ops.matmul(x, ops.transpose(self.weight, perm=[1, 0]))


class Dropout(Module):
    """Zeros with probability `ratio`, the rest times 1 / (1 - ratio); the identity in inference."""

    def __init__(self, ratio: float):
        if not 0.0 <= ratio < 1.0:
            problem = "the ratio must be at least 0 and below 1"
            raise GraphgenError(f"Dropout(ratio={ratio}): {problem}{user_line()}")
        self.ratio = ratio

    def __call__(self, x: Tensor) -> Tensor:
        tape: Any = current_tape()
        if tape is None or not tape.training or self.ratio == 0.0:
            return x
        seed, step = (tape.input(name, ir.DataType.INT64, []) for name in ("seed", "step"))
        site = tape.declared[ops.dropout.name]
        return ops.dropout(x, np.asarray(self.ratio, numpy_dtype(x)), seed, step, site)
