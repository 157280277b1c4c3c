"""Embeddings and positions."""

import math

import numpy as np

from graphgen.ops.elementwise import cos, sin
from graphgen.ops.layout import concat, gather, numpy_dtype, reshape, unsqueeze
from graphgen.record import Tensor


def embedding(table: Tensor, ids: Tensor) -> Tensor:
    """The rows of `table`, (N, D), at `ids`, (...): (..., D)."""
    return gather(table, ids, axis=0)


def sinusoidal_positions(positions: Tensor, *, features: int) -> Tensor:
    """PE(p, 2i) = sin(p / 10000^(2i/D)), PE(p, 2i+1) = cos(the same) (arXiv 1706.03762, 3.5).

    `positions` is float[T]; the result is float[T, D]. Any position has one, even beyond the
    trained length.
    """
    rates = np.exp(np.arange(0, features, 2) * (-math.log(10000.0) / features))
    angles = unsqueeze(positions, [1]) * rates.astype(numpy_dtype(positions))
    pairs = concat(unsqueeze(sin(angles), [2]), unsqueeze(cos(angles), [2]), axis=2)
    return reshape(pairs, [-1, features])
