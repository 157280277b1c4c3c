"""Whether a model has the weights that an adapter was trained beside, told by a few numbers."""

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir

from graphgen.errors import GraphgenError, warn
from graphgen.operands import Array
from graphgen.passes.training.adapters import (
    FEW_BITS,
    linears,
    published_names,
    spots_in,
)
from graphgen.passes.training.by_row import products, weight_of

Spots: TypeAlias = Mapping[str, Array]
"""Of the weight of each module, float[out, in], some numbers: see `spots_in`. Of those that may be
infinitely far, only the sign is known."""

SPOTS = "graphgen.base"
"""Where the metadata of a file of safetensors has them."""

_SIGNS, _ALL_SIGNS, _OTHER_SIGNS = 30, 1 << 30, 0.25
_FEW = 4  # weights in few bits that are restored to be compared


def to_text(spots: Spots) -> str:
    """As JSON."""
    return json.dumps({name: _plain(array) for name, array in sorted(spots.items())})


def _plain(spots: Array) -> list[list[float]]:
    return [[int(r), int(c), float(str(np.float32(x))), within] for r, c, x, within in spots]


def read_spots(noted: Any) -> dict[str, Array]:
    """What JSON says of them. Raises ValueError if it is damaged."""
    found = {str(name): np.array(rows, np.float64) for name, rows in dict(noted).items()}
    for name, spots in found.items():
        if spots.ndim != 2 or spots.shape[1] != 4 or not (spots[:, [0, 1, 3]] >= 0).all():
            raise ValueError(f"{name} has no numbers of a weight")
    return found


def to_version(spots: Spots, shapes: Mapping[str, tuple[int, int]]) -> int:
    """The signs of the first ones as an integer; 1 if they stand elsewhere than they do by default.

    Files of the runtime have room for no more.
    """
    placed = {name: spots_in(np.zeros(shape)) for name, shape in shapes.items()}
    for name, default in placed.items():
        if name not in spots or not np.array_equal(spots[name][:, :2], default[:, :2]):
            return 1
    signs = [spots[name][i, 2] < 0 for name, i in _order(placed)]
    return _ALL_SIGNS + sum(1 << i for i, negative in enumerate(signs) if negative)


def of_version(version: int, shapes: Mapping[str, tuple[int, int]]) -> dict[str, Array]:
    """The signs that `to_version` put into an integer; {} if it is another one."""
    if not _ALL_SIGNS <= version < 2 * _ALL_SIGNS:
        return {}
    found = {name: spots_in(np.zeros(shape), np.inf) for name, shape in shapes.items()}
    for i, (name, spot) in enumerate(_order(found)):
        found[name][spot, 2] = -1 if version >> i & 1 else 1
    return found


def _order(spots: Spots) -> list[tuple[str, int]]:
    """The spots of which there is a sign: those of the first modules."""
    pairs = ((name, i) for name in sorted(spots) for i in range(len(spots[name])))
    return [*itertools.islice(pairs, _SIGNS)]


def check_base(spots: Spots, model: ir.Model, places: Mapping[str, Sequence[str]]) -> None:
    """Warn if the model has other weights; `places` says what it calls each module, or its parts.

    Weights that are rounded to half precision, or in few bits, are the same ones.
    """
    nodes = {site.module: node for node, site in products(model).items()}
    whole, parts = {*linears(model)}, published_names(model)
    differences, signs, restored = list[tuple[float, float, str]](), list[bool](), 0
    for name, modules in places.items():
        for place in modules if name in spots else ():
            node = nodes.get(place)
            few_bits = node not in whole
            if node is None or (few_bits and restored == _FEW):
                continue
            restored += few_bits
            try:
                weight = weight_of(node)
            except GraphgenError:  # in bits that cannot be restored
                continue
            outputs = np.arange(len(weight))
            if len(modules) > 1:
                outputs = parts[place].outputs(parts[place].whole(len(weight)))
            own = spots[name][np.isin(spots[name][:, 0], outputs)]
            own = own[(own[:, 2] != 0) & (own[:, 1] < weight.shape[1])]
            if not len(own):
                continue
            order, (rows, columns) = np.argsort(outputs), own.T[:2].astype(np.int64)
            rows = order[np.searchsorted(outputs, rows, sorter=order)]
            found, wanted, within = weight[rows, columns], own[:, 2], own[0, 3]
            if np.isinf(within):
                signs += [*(found * wanted < 0)]
                continue
            difference = float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))
            within = max(within, FEW_BITS) if few_bits else within
            differences.append((difference / within, difference, place))
    times, difference, place = max(differences, default=(0.0, 0.0, ""))
    how = ""
    if times > 1:
        how = f"those of {place} differ by {difference:.2g} times their size"
    elif sum(signs) > _OTHER_SIGNS * len(signs):
        how = f"{sum(signs)} of {len(signs)} have another sign"
    if how:
        warn(
            "adapter: it was trained beside other weights than the model has, so it may do nothing "
            f"of what it learned: {how}; give the model that it was trained on"
        )
