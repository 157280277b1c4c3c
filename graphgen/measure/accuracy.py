"""How far results are from what they should be."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from graphgen.errors import GraphgenError
from graphgen.measure.reference import evaluate
from graphgen.operands import Array

_EXACT = 2e11  # the most FLOPs of the reference in float64: some seconds


@dataclass(frozen=True)
class Error:
    """The largest over all outputs of a model; infinite if one has NaN where the other does not.

    `max_abs` is max |x - r|; `max_rel` max |x - r| / max |r|; `rel_rms` |x - r| / |r| in the
    Euclidean norm; `ulp` the largest difference in units of the last place of the result's dtype,
    1 for integers; `argmax_agreement` the share of rows along the last axis whose largest element
    is at the same place. If texts differ, all of this is infinite.
    """

    max_abs: float
    max_rel: float
    rel_rms: float
    ulp: float
    argmax_agreement: float


def references(
    model: ir.Model,
    feeds: Sequence[Mapping[str, Array]],
    flops: Sequence[int | None],
    plain: Callable[[Mapping[str, Array]], list[Array]],
) -> tuple[str, list[list[Array]]]:
    """The reference for a model's errors, in words, and its results for each of `feeds`.

    It is the operators' own meanings in float64 if all of them have one and no run takes more than
    2e11 FLOPs; else what `plain` gives: the graph without the runtime's optimizations.
    """
    wanted = [plain(arrays) for arrays in feeds]  # refuses feeds that do not fit
    if all(n and n <= _EXACT for n in flops):
        with suppress(GraphgenError):
            return "float64", [evaluate(model, arrays) for arrays in feeds]
    return "the unfused graph with the runtime's optimizations off", wanted


def differ(reference: Sequence[Any], got: Sequence[Any]) -> Error:
    """The error of `got` against `reference`, which may have a wider dtype; sequences have several.

    Results of another shape, and sequences of another length, have an infinite error.
    """
    wanted, found = [*tensors(reference)], [*tensors(got)]
    if len(wanted) != len(found):
        return _ENDLESS
    errors = [_differ(r, x) for r, x in zip(wanted, found, strict=True)]
    largest = {n: max((getattr(e, n) for e in errors), default=0.0) for n in _LARGEST}
    agreement = min((e.argmax_agreement for e in errors), default=1.0)
    return Error(**largest, argmax_agreement=agreement)


_PIECE = 1 << 16
"""How many elements of two arrays to compare at once, so that a processor's cache holds them."""

_LARGEST = ("max_abs", "max_rel", "rel_rms", "ulp")

_ENDLESS = Error(np.inf, np.inf, np.inf, np.inf, 0.0)


def divergence(logits: Array, others: Array) -> Array:
    """Σ p log(p / q) along the last axis, in nats: Kullback and Leibler's, of two softmaxes."""
    p, q = (x - x.max(axis=-1, keepdims=True) for x in map(np.float64, (logits, others)))
    p, q = (x - np.log(np.exp(x).sum(axis=-1, keepdims=True)) for x in (p, q))
    found: Array = (np.exp(p) * (p - q)).sum(axis=-1)
    return found


def relative(pairs: Iterable[tuple[Array, Array]]) -> float:
    """√(Σ (y - ŷ)² / Σ y²) of pairs (y, ŷ), which may be parts of one; 1 if only y is 0."""
    error = scale = 0.0
    for wanted, given in pairs:
        error += float(np.square(given - wanted, dtype=np.float64).sum())
        scale += float(np.square(wanted, dtype=np.float64).sum())
    return math.sqrt(error / scale) if scale else float(error > 0)


def tensors(results: Iterable[Any]) -> Iterator[Array]:
    """All arrays of results, of which sequences hold several, and maps their keys and values."""
    for x in results:
        if isinstance(x, dict):
            values = np.asarray([*x.values()])  # where they are floats, they are float32
            yield np.asarray([*x])
            yield values.astype(np.float32) if values.dtype == np.float64 else values
        else:
            yield from tensors(x) if isinstance(x, list) else [np.asarray(x)]


def _texts(array: Array) -> list[Any]:
    """The elements in one form: texts of a file are bytes."""
    return [x.decode() if isinstance(x, bytes) else x for x in array.reshape(-1).tolist()]


def _differ(reference: Array, got: Array) -> Error:
    texts = got.dtype.kind in "OSU"
    if reference.shape != got.shape or (texts and _texts(reference) != _texts(got)):
        return _ENDLESS
    if texts or got.size == 0:
        return Error(0.0, 0.0, 0.0, 0.0, 1.0)
    floats = ir.DataType.from_numpy(got.dtype).is_floating_point()
    rows = [array.reshape(-1, array.shape[-1] if array.ndim else 1) for array in (reference, got)]
    parts = min(len(rows[0]), -(-got.size // _PIECE))
    apart = largest = ulp = 0.0
    squares, norm, agreed = 0.0, 0.0, 0
    for r, x in zip(*(np.array_split(array, parts) for array in rows), strict=True):
        r, x = r.astype(np.float64), x.astype(np.float64)
        agreed += int(np.sum(np.argmax(r, -1) == np.argmax(x, -1)))
        difference = _distances(r, x)
        size = np.abs(np.where(np.isfinite(r), r, 0))
        apart, largest = max(apart, float(difference.max())), max(largest, float(size.max()))
        with np.errstate(over="ignore"):  # after the largest number comes infinity
            unit = np.spacing(size.astype(got.dtype)).astype(np.float64) if floats else 1.0
        ulp = max(ulp, float((difference / unit).max()))
        squares, norm = squares + float(np.sum(difference**2)), norm + float(np.sum(size**2))
    agreement = agreed / len(rows[0])
    if not np.isfinite(apart):
        return Error(np.inf, np.inf, np.inf, np.inf, agreement)
    tiny = float(np.finfo(np.float64).tiny)
    relative = np.sqrt(squares) / max(np.sqrt(norm), tiny)
    return Error(apart, apart / max(largest, tiny), float(relative), ulp, agreement)


def gradients_differ(wanted: Sequence[Array], got: Sequence[Array]) -> float:
    """The largest relative RMS error of a loss and its gradients, which come behind it.

    A gradient below a thousandth of the largest is compared with that thousandth: one that is zero
    but for rounding, as that of the bias of keys, has no digits of its own.
    """
    loss = differ(wanted[:1], got[:1]).rel_rms
    sizes = [float(np.sqrt(np.mean(np.square(x)))) if x.size else 0.0 for x in wanted[1:]]
    least = max(sizes, default=0.0) / 1000 or 1.0
    errors = [
        float(np.sqrt(np.mean(np.square(b - a)))) / max(size, least)
        if a.shape == b.shape
        else np.inf
        for size, a, b in zip(sizes, wanted[1:], got[1:], strict=True)
        if a.size
    ]
    return max([loss, *(e if e >= 0 else np.inf for e in errors)])  # NaN is beyond any limit


def largest_difference(x: Array, y: Array) -> float:
    """max |x - y| of two arrays of one shape; also infinite if texts differ."""
    found, (x, y) = 0.0, (x.reshape(-1), y.reshape(-1))
    for i in range(0, x.size, _PIECE):
        a, b = x[i : i + _PIECE], y[i : i + _PIECE]
        if not np.array_equal(a, b):
            if a.dtype.kind in "OSU":
                return float(np.inf)
            with np.errstate(invalid="ignore"):  # a NaN that signals
                off = _distances(a.astype(np.float64), b.astype(np.float64)).max()
            found = max(found, float(off))
    return found


def _distances(x: Array, y: Array) -> Array:
    """|x - y|: 0 for equal elements, even NaN and infinities; else infinite if either is one."""
    same = (x == y) | (np.isnan(x) & np.isnan(y))
    with np.errstate(invalid="ignore"):  # ∞ - ∞, two equal elements
        off = np.abs(np.where(same, 0, x - y))
    return np.where(np.isnan(off), np.inf, off)


def finite(value: Any) -> Any:
    """A form for JSON: infinities and NaN become null."""
    if isinstance(value, dict):
        return {key: finite(x) for key, x in value.items()}
    if isinstance(value, tuple | list):
        return [finite(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
