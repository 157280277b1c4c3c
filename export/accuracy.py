"""How far results are from those they should be."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from graphgen.op import Array


@dataclass(frozen=True)
class Error:
    """The largest over all outputs of a model; infinite where one has NaN and the other has not.

    `max_abs` is max |x - r|; `max_rel` max |x - r| / max |r|; `rel_rms` |x - r| / |r| in the
    Euclidean norm; `ulp` the largest difference in units of the last place of the result's dtype;
    `argmax_agreement` the share of rows along the last axis whose largest element is at one place.
    """

    max_abs: float
    max_rel: float
    rel_rms: float
    ulp: float
    argmax_agreement: float


def differ(reference: Sequence[Array], got: Sequence[Array]) -> Error:
    """What `got` errs against `reference`, which may be of a wider dtype."""
    errors = [_differ(r, x) for r, x in zip(reference, got, strict=True)]
    largest = {n: max((getattr(e, n) for e in errors), default=0.0) for n in _LARGEST}
    agreement = min((e.argmax_agreement for e in errors), default=1.0)
    return Error(**largest, argmax_agreement=agreement)


_PIECE = 1 << 22
"""Elements of two arrays that are compared at once: weights are large, and mapped."""

_LARGEST = ("max_abs", "max_rel", "rel_rms", "ulp")


def _differ(reference: Array, got: Array) -> Error:
    if reference.shape != got.shape:
        return Error(np.inf, np.inf, np.inf, np.inf, 0.0)
    if got.size == 0:
        return Error(0.0, 0.0, 0.0, 0.0, 1.0)
    kind = got.dtype if np.issubdtype(got.dtype, np.floating) else np.dtype(np.float64)
    r, x = reference.astype(np.float64), got.astype(np.float64)
    difference = _distances(r, x)
    if not np.isfinite(difference).all():
        return Error(np.inf, np.inf, np.inf, np.inf, _agreement(r, x))
    finite = np.where(np.isfinite(r), r, 0)
    largest, norm = np.abs(finite).max(), np.linalg.norm(finite)
    ulp = difference / np.spacing(np.abs(finite).astype(kind)).astype(np.float64)
    return Error(
        float(difference.max()),
        float(difference.max() / max(largest, np.finfo(np.float64).tiny)),
        float(np.linalg.norm(difference) / max(norm, np.finfo(np.float64).tiny)),
        float(ulp.max()),
        _agreement(r, x),
    )


def largest_difference(x: Array, y: Array) -> float:
    """max |x - y| of two arrays of one shape; infinite where texts differ, too."""
    found, (x, y) = 0.0, (x.reshape(-1), y.reshape(-1))
    for i in range(0, x.size, _PIECE):
        a, b = x[i : i + _PIECE], y[i : i + _PIECE]
        if not np.array_equal(a, b):
            texts = a.dtype.kind in "OSU"
            off = np.inf if texts else _distances(a.astype(np.float64), b.astype(np.float64)).max()
            found = max(found, float(off))
    return found


def _distances(x: Array, y: Array) -> Array:
    """|x - y|: 0 for what is the same, NaN and infinities too, else infinite where one is there."""
    same = (x == y) | (np.isnan(x) & np.isnan(y))
    off = np.abs(np.where(same, 0, x - y))
    return np.where(np.isnan(off), np.inf, off)


def _agreement(r: Array, x: Array) -> float:
    if r.ndim == 0:
        return 1.0
    return float(np.mean(np.argmax(r, -1) == np.argmax(x, -1)))
