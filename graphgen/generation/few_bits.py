"""Keys and values as int8, with scales that are measured on tokens."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx_ir as ir

from graphgen.errors import GraphgenError
from graphgen.export.write import export
from graphgen.generation.caches import MASK, PAST, PRESENT, sized
from graphgen.graph import ModelLike, model_in
from graphgen.match import Miss
from graphgen.operands import Array
from graphgen.passes.decoding import in_place, lacks
from graphgen.plan import TensorType
from graphgen.runtime import Session, import_runtime
from graphgen.targets import target as find_target
from graphgen.version import minor

_NEEDED = (1, 27)
_ROOM = 1.1  # times the largest that was seen fits into int8
_ROWS = 8  # windows at a time


def int8_cache(model: ModelLike, tokens: Array, *, longest: int | None = None) -> ir.Model:
    """A copy of a decoder whose cache is in place and holds int8, for the CPU.

    A key or value x becomes round(x / s), at most ±127. s is 1.1 / 127 of the largest |x| that its
    head and feature have for `tokens`, windows (N, T), which are read at places up to `longest`:
    rotary positions mix two features by the place. It does not depend on what else is in a batch.

    Raises GraphgenError for a model that has no cache, or none that can be in place, and a runtime
    without the kernel.
    """
    model = model_in(model, "int8_cache")
    who = "build --kv int8"
    if not any(str(value.name).startswith(PAST) for value in model.graph.inputs):
        raise GraphgenError(f"{who}: the model has no cache; give a decoder")
    runtime = import_runtime().__version__
    if minor(runtime) < _NEEDED:
        problem = f"the kernels of onnxruntime {runtime} read no such cache, 1.27 does"
        raise GraphgenError(f"{who}: {problem}; upgrade it, or leave the option out")
    largest = dict[str, Array]()
    with _opened(model) as session:
        for feed in _feeds(session, tokens, longest or tokens.shape[1]):
            for name, y in zip(session.outputs, session(feed), strict=True):
                if name.startswith(f"{PRESENT}."):
                    own = name.replace(PRESENT, PAST)
                    found: Array = np.abs(y).max(axis=(0, 2))
                    before: Array = largest.get(own, found)
                    largest[own] = np.maximum(before, found)
    floors = {name: np.float32(1e-6) * (x.max() or 1.0) for name, x in largest.items()}
    scales = {
        name: (np.maximum(x, floors[name]) * np.float32(_ROOM / 127)).astype(np.float32)
        for name, x in largest.items()
    }
    placed = in_place(model, scales=scales)
    if isinstance(placed, Miss):
        raise GraphgenError(f"{who}: the cache cannot be in place: {placed.reason}; leave it out")
    if reason := lacks(placed, find_target("cpu")):
        raise GraphgenError(f"{who}: {reason}; upgrade onnxruntime, or leave it out")
    return placed


def _feeds(session: Session, tokens: Array, longest: int) -> Iterator[dict[str, Array]]:
    """Windows without a past, each at places of its own from 0 to `longest`."""

    def empty(name: str, kind: TensorType, rows: int) -> Array:
        return np.zeros(sized(name, kind, rows, 0), kind.dtype)

    last = max(longest - tokens.shape[1], 0)
    starts = np.linspace(0, last, len(tokens)).astype(np.int64)
    for at in range(0, len(tokens), _ROWS):
        rows = tokens[at : at + _ROWS]
        places = starts[at : at + _ROWS, None] + np.arange(rows.shape[1])
        known = {"input_ids": rows, MASK: np.ones_like(rows), "position_ids": places}
        feed = {
            n: x.astype(session.inputs[n].dtype) for n, x in known.items() if n in session.inputs
        }
        pasts = {n: x for n, x in session.inputs.items() if n.startswith("past_")}
        feed |= {n: empty(n, x, len(rows)) for n, x in pasts.items()}
        yield feed


@contextmanager
def _opened(model: ir.Model) -> Iterator[Session]:
    with tempfile.TemporaryDirectory() as folder:
        yield Session(export(model, Path(folder) / "model.onnx"), provider="cpu")
