"""Embeddings and positions."""

import math

import numpy as np

from graphgen.errors import GraphgenError, user_line
from graphgen.infer import describe
from graphgen.operands import DTypeLike
from graphgen.ops.elementwise import equal
from graphgen.ops.layout import (
    arange,
    cast,
    cast_like,
    concat,
    gather,
    numpy_dtype,
    rank,
    reshape,
    unsqueeze,
)
from graphgen.ops.trigonometry import cos, sin
from graphgen.record import SizeLike
from graphgen.value import Tensor


def embedding(table: Tensor, ids: Tensor) -> Tensor:
    """The rows of `table`, (N, D), at `ids`, (...): (..., D)."""
    return gather(table, ids, axis=0)


def one_hot(ids: Tensor, count: SizeLike, *, dtype: DTypeLike = np.float32) -> Tensor:
    """1 at each integer id on a new last axis, 0 elsewhere: (...) to (..., count).

    An id outside 0 ... count - 1 gives zeros. No gradient goes to the ids. Raises GraphgenError if
    they are not integers.
    """
    if numpy_dtype(ids).kind not in "iu":
        problem = "ids must be integers; cast them"
        raise GraphgenError(f"one_hot: ids are {describe(ids)}; {problem}{user_line()}")
    places = arange(count)  # int64: a narrower dtype of the ids may not hold them all
    return cast(equal(cast_like(unsqueeze(ids, [-1]), places), places), to=dtype)


def sinusoidal_positions(positions: Tensor, *, features: int) -> Tensor:
    """PE(p, 2i) = sin(p / 10000^(2i/D)), PE(p, 2i+1) = cos(the same) (arXiv 1706.03762, 3.5).

    `positions` is float[T]; the result is float[T, D]. Any position has one, even beyond the
    trained length. D is even.
    """
    if rank(positions) != 1 or features < 1 or features % 2:
        raise GraphgenError(
            f"sinusoidal_positions(features={features}): positions are {describe(positions)}; give "
            f"one axis of positions, and an even number of features{user_line()}"
        )
    rates = np.exp(np.arange(0, features, 2) * (-math.log(10000.0) / features))
    angles = unsqueeze(positions, [1]) * rates.astype(numpy_dtype(positions))
    pairs = concat(unsqueeze(sin(angles), [2]), unsqueeze(cos(angles), [2]), axis=2)
    return reshape(pairs, [-1, features])
