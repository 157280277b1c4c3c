"""Places of tokens: what a decoder computes of them, and the same for places that are given."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from graphgen.graph import constant, operator_name
from graphgen.match import Miss
from graphgen.op import find_op, read_attributes
from graphgen.operands import Array
from graphgen.ops.layout import cast_like, dim, reshape, size
from graphgen.recognize.sampled import Sampled, depends, reads_sizes
from graphgen.value import Tensor, adopt


class Places:
    """What a graph computes of the sizes B, T and P, with every token kept by its padding.

    T tokens come after P others; without a past, P is None.
    """

    def __init__(self, dims: Sequence[Any], padding: ir.Value | None) -> None:
        b, t, p = dims
        self.trials = [(2, 4, 3), (3, 4, 3), (2, 5, 3), (2, 4, 2)]
        if p is None:
            self.trials = [(b, t, 0) for b, t, _ in self.trials[:-1]]
        self._names, self._padding = [str(b), str(t), str(p)], padding
        self._samples = [self._sampled(trial) for trial in self.trials]
        self.forget()

    def forget(self) -> None:
        """Forget what depends on the content of tokens, after a change of the graph."""
        self._content: dict[ir.Value, bool] = {}

    def _sampled(self, trial: Sequence[int], *more: tuple[ir.Value, Array]) -> Sampled:
        sizes, given = dict(zip(self._names, trial, strict=True)), dict(more)
        b, t, p = trial
        if self._padding is not None and self._padding.shape is not None:
            given[self._padding] = np.ones((b, t + p), np.int64)
            sizes.setdefault(str(self._padding.shape[-1]), t + p)
        return Sampled(sizes, given)

    def reads_content(self, value: ir.Value) -> bool:
        """Whether a value depends on more than sizes and the padding."""
        if value.is_graph_input() and value is not self._padding:
            self._content[value] = True
        for graph_input in value.graph.inputs if value.graph is not None else ():
            self._content.setdefault(graph_input, graph_input is not self._padding)
        return depends(value, self._content)

    def arrays(self, value: ir.Value) -> list[Array] | None:
        """A value at all sizes tried; None if it is not known at one of them."""
        found = [sample(value) for sample in self._samples]
        arrays = [array for array in found if array is not None]
        return arrays if len(arrays) == len(found) else None

    def rewired(
        self, node: ir.Node, positions: Tensor, mask: ir.Value | None = None
    ) -> "dict[int, Tensor] | Miss":
        """What a node reads of places, made of `positions`, int64 (B, T); or why it cannot be.

        Its `mask` does not count.
        """
        found: dict[int, Tensor] = {}
        for i, value, arrays in self._read(node):
            if value is mask:
                continue
            of_batch = _differ(arrays[:2])
            if of_batch and self._are_places(arrays, whole=True):
                found[i] = cast_like(positions, adopt(value))
            elif not of_batch:
                rows = self._rows(value, arrays, positions)
                if isinstance(rows, Miss):
                    return rows
                found[i] = rows
            elif any(map(self.reads_content, node.outputs)):
                return Miss(f"{node.op_type} reads {value.name}, which depends on the padding")
        return found

    def _read(self, node: ir.Node) -> Iterator[tuple[int, ir.Value, list[Array]]]:
        """The operands that hold something for each place, where they meet the tokens."""
        if reads_sizes(node):
            return
        meets = any(map(self.reads_content, node.outputs))
        for i, value in enumerate(node.inputs):
            if value is None or constant(value) is not None or self.reads_content(value):
                continue
            arrays = self.arrays(value)
            if arrays is None or not _differ(arrays) or _is_one_number(arrays):
                continue
            if arrays[0].shape != arrays[2].shape:
                made = None if meets else self.arrays(node.outputs[0])
                if meets or made is None or _differ(made[:2]):
                    yield i, value, arrays

    def length_read(self, node: ir.Node, mask: ir.Value | None = None) -> str:
        """The operand other than a mask that depends on the length of the past, or ""."""
        if len(self.trials) < 4 or not any(map(self.reads_content, node.outputs)):
            return ""
        for value in node.inputs:
            skipped = value is None or value is mask or self.reads_content(value)
            arrays = None if value is None or skipped else self.arrays(value)
            if arrays is not None and _differ([arrays[0], arrays[3]]):
                return str(value and value.name)
        return ""

    def _are_places(self, arrays: Sequence[Array], *, whole: bool = False) -> bool:
        """Whether a value counts T tokens from P on: (B, T) if `whole`, else along one axis."""
        for array, (b, t, p) in zip(arrays, self.trials, strict=True):
            wanted = np.arange(p, p + t)
            if (whole and array.shape != (b, t)) or (not whole and array.size != t):
                return False
            if np.any(array != (wanted if whole else wanted.reshape(array.shape))):
                return False
        return True

    def _rows(self, value: ir.Value, arrays: Sequence[Array], positions: Tensor) -> Tensor | Miss:
        """The rows that a value has for the T places, (..., T, ...), as (B, ..., T, ...).

        They are computed for B·T places, which the graph takes for one row of so many.
        """
        shapes = [array.shape for array in arrays]
        axes = [i for i, sizes in enumerate(zip(*shapes, strict=True)) if len({*sizes}) > 1]
        if len(axes) != 1 or {*shapes[0][: axes[0]]} - {1} or shapes[0][axes[0]] != 4:
            return Miss(f"{value.name} has the sizes {shapes[0]} for 4 tokens, wanted rows")
        [axis] = axes
        counted: dict[ir.Value, Array] = {}
        flat = self._flat(value, positions, counted)
        if isinstance(flat, Miss):
            return flat
        order = np.array([2, 0, 3, 1])  # each row depends on its own place alone
        moved = [(v, a.reshape(-1)[order].reshape(a.shape)) for v, a in counted.items()]
        other = self._sampled(self.trials[0], *moved)(value)
        if other is None or not np.array_equal(other, arrays[0].take(order, axis)):
            return Miss(f"a row of {value.name} depends on other places than its own")
        sizes = [dim(positions, 0), *[1] * (axis - 1), dim(positions, 1), *shapes[0][axis + 1 :]]
        return reshape(flat, sizes)

    def _flat(
        self, value: ir.Value, positions: Tensor, counted: dict[ir.Value, Array]
    ) -> Tensor | Miss:
        """A value of one row of T tokens, for B·T tokens; `counted` gets the places in it."""
        arrays, node = self.arrays(value), value.producer()
        if constant(value) is not None or (arrays is not None and not _differ(arrays)):
            return adopt(value)
        if arrays is not None and self._are_places(arrays):
            counted[value] = arrays[0]
            sizes = [-1 if n > 1 else 1 for n in arrays[0].shape]
            return cast_like(reshape(positions, sizes), adopt(value))
        if arrays is not None and value.dtype == ir.DataType.INT64 and self._are_lengths(arrays):
            return reshape(size(positions), [1] * arrays[0].ndim)
        op = None if node is None or reads_sizes(node) else find_op(node)
        if op is None or node is None:
            return Miss(f"{value.name} depends on more than the places of tokens")
        operands: list[Any] = []
        for x in node.inputs:
            made = None if x is None else self._flat(x, positions, counted)
            if isinstance(made, Miss):
                return made
            operands.append(made)
        results = op(*operands, **read_attributes(op, node))
        results = results if isinstance(results, tuple) else (results,)
        result: Tensor = results[node.outputs.index(value)]
        return result

    def _are_lengths(self, arrays: Sequence[Array]) -> bool:
        pairs = zip(arrays, self.trials, strict=True)
        return all(array.size == 1 and array.item() == t for array, (_, t, _) in pairs)


def read_beside(node: ir.Node, value: str) -> Miss:
    """Why a graph cannot take its places from outside."""
    return Miss(f"{operator_name(node)} reads the length of the past, {value}, wanted masks alone")


def _differ(arrays: Sequence[Array]) -> bool:
    return any(not np.array_equal(arrays[0], other) for other in arrays[1:])


def _is_one_number(arrays: Sequence[Array]) -> bool:
    numbers = {number for array in arrays for number in np.unique(array).tolist()}
    return len(numbers) == 1 and all(array.ndim > 0 for array in arrays)
