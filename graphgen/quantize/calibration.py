"""What products read as a model runs: samples, and how their channels correlate."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from graphgen.edit import identity_of
from graphgen.errors import GraphgenError
from graphgen.export.write import export
from graphgen.graph import all_values
from graphgen.measure.feeds import feeds_of_kind, sizes_of
from graphgen.operands import Array
from graphgen.quantize.effect import feeds_of, opened
from graphgen.runtime import Session

_MOMENTS = 1 << 29  # the most bytes of Σ x xᵀ kept at a time
_SAMPLE = 256  # rows of each input
_SIZES = (16, 8, 4, 2, 1)  # dimensions of a random feed: the first with which a model runs


@dataclass
class Seen:
    """What calibration saw of a product's input x (..., K)."""

    rows: list[Array] = field(default_factory=list)  # (n, K), a sample
    moments: Array | None = None  # Σ x xᵀ (K, K)
    runs: list[float] = field(default_factory=list)  # |Σ x xᵀ|² of each run, off the diagonal

    def add(self, x: Array, count: int, moments: bool) -> None:
        """Add x (n, K) of one run, and `count` of its rows to the sample."""
        if not len(x):
            return
        picked = np.linspace(0, len(x) - 1, count).astype(int)
        widest = int(np.abs(x).max(axis=1).argmax())  # it sets int8's range
        self.rows.append(x[np.unique([*picked, widest])])
        if not moments:
            return
        with np.errstate(over="ignore", invalid="ignore"):  # `shrunk` checks the result
            found: Array = x.T @ x
            self.runs.append(_off_diagonal(found))
            self.moments = found if self.moments is None else np.add(self.moments, found, out=found)

    def shrunk(self) -> Array | None:
        """The moments; the more the runs differ off the diagonal, the more that part shrinks.

        It shrinks by the factor 1 - ρ with the least expected squared error: ρ = Σ var(m) / Σ m²
        over the means m of the runs (Schäfer and Strimmer 2005). Otherwise it would fit what one
        text has by chance. None if they are beyond float32.
        """
        if self.moments is None or not np.isfinite(self.moments).all():
            return None
        runs, mean = len(self.runs), _off_diagonal(self.moments) / len(self.runs) ** 2
        variance = (np.mean(self.runs) - mean) / (runs - 1) if runs > 1 else mean
        kept = max(0.0, 1 - variance / mean) if mean > 0 else 0.0
        shrunk: Array = self.moments * np.float32(kept)
        np.fill_diagonal(shrunk, self.moments.diagonal())
        return shrunk


def _off_diagonal(moments: Array) -> float:
    """Σ m² over all elements except the diagonal."""
    flat, diagonal = moments.ravel(), moments.diagonal()
    return float(np.dot(flat, flat)) - float(np.dot(diagonal, diagonal))


def random_feeds(model: ir.Model) -> list[Mapping[str, Any]]:
    """Feeds for a model with unknown inputs: random numbers and tokens.

    Masks keep everything, and nothing comes before the tokens. The list is empty if the model runs
    at none of the sizes.
    """
    with opened(model) as session:
        for base in _SIZES:
            for sizes in sizes_of(model, base):
                with suppress(GraphgenError):
                    feed = feeds_of_kind(model, sizes, "normal")
                    tokens = feed.get("input_ids", np.zeros(0))
                    feeds = feeds_of(model, tokens) if tokens.ndim == 2 else []
                    feeds = feeds or [feed]
                    session(feeds[0])
                    return [*feeds]
    return []


def observed(
    model: ir.Model,
    groups: Sequence[Mapping[ir.Value, int]],
    feeds: Sequence[Mapping[str, Any]],
    *,
    moments: bool,
) -> Iterator[dict[ir.Value, Seen]]:
    """For each group of values, each with its K, what they were in runs of the present model.

    Each run covers as many values as `_MOMENTS` has room for their moments; the rest take further
    runs. Values inside a branch are not seen.
    """
    copy, known = model.clone(), list(all_values(model.graph))
    twins = dict(zip(known, all_values(copy.graph), strict=True))
    taps: dict[ir.Value, ir.Node] = {}
    for x in (x for group in groups for x in group if feeds and x in twins):
        if x not in taps:  # it may be an input, or an output
            taps[x] = identity_of(twins[x])
    if not taps:
        yield from ({} for _ in groups)
        return
    copy.graph.extend(taps.values())
    copy.graph.outputs[:] = [tap.outputs[0] for tap in taps.values()]
    with tempfile.TemporaryDirectory() as folder:
        path, at = export(copy, Path(folder) / "model.onnx"), 0
        while at < len(groups):
            seen, end, room = dict[ir.Value, Seen](), at, _MOMENTS
            while end < len(groups):
                new = {x: k for x, k in groups[end].items() if x in taps and x not in seen}
                room -= sum(4 * k**2 for k in new.values()) if moments else 0
                if room < 0 and end > at:
                    break
                seen |= {x: Seen() for x in new}
                end += 1
            if seen:
                names = [str(taps[x].outputs[0].name) for x in seen]
                session, count = Session(path, provider="cpu", outputs=names), _SAMPLE // len(feeds)
                for feed in feeds:
                    for one, result in zip(seen.values(), session(feed), strict=True):
                        one.add(result.reshape(-1, result.shape[-1]), max(1, count), moments)
            seen = {x: one for x, one in seen.items() if one.rows}
            yield from (seen for _ in range(at, end))
            at = end
