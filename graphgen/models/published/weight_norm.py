"""Weights that torch stores as a direction v and a length g: w = g v / |v| (arXiv 1602.07868)."""

from collections.abc import Mapping
from functools import partial

import numpy as np

from graphgen.models.published.few_bits import Restored
from graphgen.operands import Array
from graphgen.safetensors import Weight

_PAIRS = {
    ".parametrizations.weight.original1": ".parametrizations.weight.original0",
    ".weight_v": ".weight_g",
}
"""How v and g are called, by torch since 2.0 and before."""


def plain(stored: Mapping[str, Weight]) -> dict[str, Weight]:
    """The weights by their names, those of a direction and a length as one."""
    found = dict(stored)
    for name, v in stored.items():
        for direction, length in _PAIRS.items():
            own = name.removesuffix(direction)
            g = stored.get(own + length)
            if own == name or g is None or len(g.shape) != len(v.shape):
                continue
            if not (v.dtype.is_floating_point() and g.dtype.is_floating_point()):
                continue
            kept = [i for i, size in enumerate(g.shape) if size != 1]
            if any(g.shape[i] != v.shape[i] for i in kept):
                continue
            del found[name], found[own + length]
            given = (v.path, f"{own}.weight", v.dtype, v.shape, v.offset)
            found[f"{own}.weight"] = Restored(*given, make=partial(_product, v, g, tuple(kept)))
    return found


def _product(v: Weight, g: Weight, kept: tuple[int, ...]) -> Array:
    x = v.read().astype(np.float32)
    axes = tuple(i for i in range(x.ndim) if i not in kept)
    lengths = np.sqrt(np.sum(x * x, axis=axes, keepdims=True))
    with np.errstate(divide="ignore", invalid="ignore"):  # of no direction it is NaN, and refused
        made: Array = x * (g.read().astype(np.float32) / lengths)
    return made
