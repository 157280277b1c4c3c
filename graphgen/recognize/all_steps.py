"""What a step of a loop computes row by row, computed for all steps at once."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from graphgen.errors import GraphgenError
from graphgen.graph import constant, present_inputs
from graphgen.op import find_op, is_a, read_attributes
from graphgen.ops.activation import relu
from graphgen.ops.elementwise import sigmoid, tanh
from graphgen.ops.layout import (
    _split,
    concat,
    dim,
    expand,
    gather,
    slice_,
    swap_last,
    transpose,
    unsqueeze,
)
from graphgen.ops.linalg import gemm, matmul
from graphgen.ops.sizes import sizes_vector
from graphgen.recognize.cells import UnreadableError
from graphgen.recognize.steps import Steps, bare
from graphgen.traits import Trait
from graphgen.value import Tensor, adopt, graph_value


class AllSteps:
    """Values of a body with an axis of steps in front, in the order of the rows stepped over."""

    def __init__(self, steps: Steps):
        self.body, self.reverse = steps.rows[0].row.graph, steps.reverse
        self.known, self.failed = dict[ir.Value, Tensor](), set[ir.Value]()
        self.same = set[ir.Value]()
        """Values of the body that are the same in each step, without that axis."""
        for row, x, axis in steps.rows:
            count = len(x.shape or ())
            perm = [axis, *(i for i in range(count) if i != axis % count)]
            self.known[row] = transpose(adopt(x), perm=perm) if axis % count else adopt(x)

    def add(self, state: ir.Value, new: ir.Value, first: Tensor, y: Tensor) -> None:
        """Let a state be known: y (T, B, H) behind each step, from `first` before the first one."""
        begin, end = unsqueeze(first, [0]), np.iinfo(np.int64).max
        # Joined first and cut then: of no steps there is no row before one, either.
        whole = concat(*((y, begin) if self.reverse else (begin, y)), axis=0)
        self.known[state] = slice_(whole, *(([1], [end]) if self.reverse else ([0], [-1])), [0])
        self.known[new] = self.known[bare(new)] = y
        self.failed.clear()

    def matrices(self) -> list[ir.Value]:
        """The known values (B, n) of floats."""
        return [x for x in self.known if is_matrix(x)]

    def has(self, value: ir.Value) -> bool:
        """Whether a value (B, n) of a step can be computed for all steps."""
        if not is_matrix(value):
            return False
        try:
            self.of(value)
        except UnreadableError:
            return False
        return True

    def rows(self, values: Sequence[ir.Value]) -> list[Tensor]:
        """These values (B, n), each (T, B, n)."""
        return [self.of(value) for value in values]

    def of(self, value: ir.Value) -> Tensor:
        """A value of each step, (T, ...). Raises UnreadableError, which says why."""
        y = self._read(value)
        if not self._is_same(value):
            return y
        n, count = dim(next(iter(self.known.values())), 0), len(graph_value(y).shape or ())
        return expand(unsqueeze(y, [0]), sizes_vector(n, *[1] * count))

    def _is_same(self, value: ir.Value) -> bool:
        return value in self.same or value.graph is not self.body

    def _read(self, value: ir.Value) -> Tensor:
        if value in self.known:
            return self.known[value]
        if (number := constant(value)) is not None and value.graph is self.body:
            self.same.add(value)
            return number
        if value.graph is not self.body:
            return adopt(value)
        node = value.producer()
        if node is None:
            raise UnreadableError(f"{value.name} is only known after the step before")
        if value in self.failed:
            raise UnreadableError(f"a step has {node.op_type}")
        try:
            results = self._computed(node)
        except (UnreadableError, GraphgenError):
            self.failed.add(value)
            raise
        for y, result in zip(node.outputs, results, strict=True):
            self.known[y] = result
        return self.known[value]

    def _computed(self, node: ir.Node) -> Sequence[Tensor]:
        op, given = find_op(node), present_inputs(node)
        if op is None or node.domain or len(given) != len(node.inputs):
            raise UnreadableError(f"a step has {node.op_type}")
        xs = [self._read(x) for x in given]
        moving = [x for x in given if not self._is_same(x)]
        options = read_attributes(op, node)
        if not moving:
            made = op(*xs, **options)
            self.same.update(node.outputs)
            return made if isinstance(made, tuple) else [made]
        ranks = [None if x.shape is None else len(x.shape) for x in moving]
        first = ranks[0] or 0
        if None in ranks or any(y.shape is None for y in node.outputs):
            raise UnreadableError(f"a step has {node.op_type} of unknown sizes")
        still = [number for x in given[1:] if (number := constant(x)) is not None]
        alone = moving == given[:1] and len(still) == len(given) - 1  # the rest are numbers
        y_rank = len(node.outputs[0].shape or ())
        if is_a(node, Trait.BROADCASTS, tanh, sigmoid, relu, "Identity", "Cast"):
            if all(rank == y_rank for rank in ranks):
                return [op(*xs, **options)]
        elif is_a(node, matmul) and moving == given[:1] and first > 1:
            return [matmul(*xs)]
        elif is_a(node, gemm) and moving == given[:1] and not options["transA"]:
            return [_product(xs, options)]
        elif is_a(node, concat) and len(moving) == len(given):
            return [concat(*xs, axis=options["axis"] % first + 1)]
        elif is_a(node, _split) and alone:
            parts = _split(*xs, **{**options, "axis": options["axis"] % first + 1})
            return parts if isinstance(parts, tuple) else [parts]
        elif is_a(node, slice_) and alone and len(still) > 2:
            starts, ends, axes, *by = still
            return [slice_(xs[0], starts, ends, axes % first + 1, *by)]
        elif is_a(node, gather) and moving == given[1:] and options["axis"] == 0:
            return [gather(*xs, axis=0)]
        elif is_a(node, unsqueeze) and alone:
            return [unsqueeze(xs[0], still[0] % y_rank + 1)]
        raise UnreadableError(f"a step has {node.op_type}")


def _product(xs: Sequence[Tensor], options: Mapping[str, Any]) -> Tensor:
    x, w, *bias = xs
    alpha, beta = options["alpha"], options["beta"]
    y = matmul(x, swap_last(w) if options["transB"] else w)
    y = y if alpha == 1 else y * alpha
    return y + (bias[0] if beta == 1 else bias[0] * beta) if bias and beta else y


def is_matrix(value: ir.Value) -> bool:
    """Whether a value is float[batch, features]."""
    return value.dtype == ir.DataType.FLOAT and value.shape is not None and len(value.shape) == 2
