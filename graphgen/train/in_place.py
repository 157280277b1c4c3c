"""The update of parameters: its formula, as numpy computes it in the arrays that it changes."""

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from graphgen.graph import present_inputs
from graphgen.nn.module import build, float32
from graphgen.op import find_op
from graphgen.operands import UFUNCS, Array
from graphgen.train.on_device import NEXT

CHUNK = 1 << 16
"""Elements to update at a time: with both moments they stay in the cache from pass to pass."""


class InPlace:
    """An elementwise formula `update(**arrays, **numbers)` that returns new arrays by name.

    It is recorded once, as any graph is. Each operator writes over an operand that nothing reads
    any more, or into a spare row.
    """

    def __init__(
        self, update: Callable[..., Any], arrays: Iterable[str], numbers: Iterable[str]
    ) -> None:
        specs: dict[str, Any] = dict.fromkeys(arrays, float32["n"])
        specs |= dict.fromkeys(numbers, float32[()])

        def changes(**given: Any) -> dict[str, Any]:
            return {name + NEXT: y for name, y in update(**given).items()}

        graph = build(changes, **specs).graph
        ufuncs: dict[object, np.ufunc] = {op: ufunc for ufunc, op in UFUNCS.items()}
        left = {x: len(x.uses()) for x in graph.inputs}  # how often each value is still read
        slots: dict[ir.Value, object] = {x: x.name for x in graph.inputs}
        changed = {str(y.name).removesuffix(NEXT) for y in graph.outputs}
        self._constants: dict[object, Any] = {
            x: x.const_value.numpy()[()] for x in graph.initializers.values() if x.const_value
        }
        self._passes: list[tuple[np.ufunc, list[object], object]] = []
        for node in graph:
            [y], op, operands = node.outputs, find_op(node), present_inputs(node)
            for x in operands:
                left[x] = left.get(x, 0) - 1
            busy = {slots[x] for x, times in left.items() if times > 0}
            place: object = y
            if y.shape is None or len(y.shape):  # else it is a number
                own = [str(y.name).removesuffix(NEXT)] if y.is_graph_output() else []
                dead = [slots[x] for x in operands if x in slots]
                places = [*own, *(s for s in dead if s in changed or isinstance(s, int))]
                place = next(s for s in itertools.chain(places, itertools.count()) if s not in busy)
                assert not own or [place] == own, "it would write over what it still reads"
            left[y], slots[y] = len(y.uses()) + y.is_graph_output(), place
            read = [x if x in self._constants else slots[x] for x in operands]
            self._passes.append((ufuncs[op], read, place))
        used = [place for _, _, place in self._passes if isinstance(place, int)]
        self._rows = max(used, default=-1) + 1

    def spare(self) -> Array:
        """Rows for up to CHUNK elements, one for each array that is neither read nor changed."""
        return np.empty((self._rows, CHUNK), np.float32)

    def __call__(
        self, arrays: Mapping[str, Array], numbers: Mapping[str, np.float32], spare: Array
    ) -> None:
        """Change arrays of one size, of up to CHUNK elements, in place."""
        size = len(next(iter(arrays.values())))
        given: Iterable[tuple[object, Any]] = (*numbers.items(), *arrays.items())
        rows = ((i, row[:size]) for i, row in enumerate(spare))
        held = self._constants | dict(given) | dict(rows)
        with np.errstate(all="ignore"):
            for ufunc, operands, place in self._passes:
                held[place] = ufunc(*(held[x] for x in operands), held.get(place))
