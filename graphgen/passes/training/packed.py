"""Frozen weights in few bits, and the nodes that restore one where a product reads it.

As in QLoRA (Dettmers et al., arXiv 2305.14314), such a weight is a float matrix only while a
product runs; the backward pass restores it again (`recompute`).
"""

import mmap
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import onnx_ir as ir

from graphgen import ops
from graphgen.bits import Blocks, Rows, to_blocks, to_rows, unpacked
from graphgen.edit import tidy
from graphgen.errors import GraphgenError
from graphgen.graph import constant, operator_name, present_inputs, produced_by
from graphgen.match import Engine, Pass, PassReport, Rewired, Rewrite, run_passes
from graphgen.op import is_a
from graphgen.operands import Array
from graphgen.ops.quantized import dequantize_linear
from graphgen.passes.training.adapters import (
    MAGNITUDE,
    PRODUCTS,
    Linear,
    for_norm,
    initializer,
    linears,
)
from graphgen.passes.training.updates import norms
from graphgen.value import Tensor, Value, adopt

Base: TypeAlias = Literal["int8", "int4"]

INTEGERS, SCALE, ZERO = ".integers", ".scale", ".zero_point"
"""What follows a weight's name in the names of its parts."""

_SMALL = 2048  # weights below which there is nothing to gain
_BLOCK = 64  # weights with one scale in int4
_FLOAT = ir.DataType.FLOAT


class Packed(NamedTuple):
    """A matrix W (N, K), or its transpose if not `by_rows`, that is kept in few bits.

    int8: W.integers int8[N, K] and W.scale float[N]. int4: a row is divided into blocks; of each,
    W.integers uint8[blocks, size / 2] holds the first half in the low four bits and the second in
    the high ones, W.scale float[blocks] and W.zero_point uint8[blocks].
    """

    scheme: Base
    rows: int
    columns: int
    by_rows: bool

    def restored(self, integers: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        """(q - zero point) · scale, float[N, K]; on arrays, too."""
        if zero is None:
            return dequantize_linear(integers, scale, axis=0)
        four = np.uint8(4)
        # Bytes are split, and rows scaled, in 0.7 ns a weight; DequantizeLinear of blocks of int4
        # takes 1.6 (onnxruntime 1.32, AVX-512).
        halves = [integers & np.uint8(15), ops.bit_shift(integers, four, direction="RIGHT")]
        blocks = dequantize_linear(ops.concat(halves, axis=1), scale, zero, axis=0)
        w = ops.reshape(blocks, [self.rows, -1])
        whole = scale.shape[0] * 2 * integers.shape[1] == self.rows * self.columns
        return w if whole else ops.slice_(w, [0], [self.columns], [1])

    def float_of(self, name: str, parts: Mapping[str, Array]) -> Array:
        """The weight of this name as float32, in its own orientation.

        Raises ValueError for parts of another size.
        """
        integers, scale, *zero = (parts[part] for part in self.names(name))
        width = integers.shape[1] if self.scheme == "int8" else 2 * integers.shape[1]
        each = 1 if self.scheme == "int8" else -(-self.columns // width)
        sizes = [len(integers), len(scale), *map(len, zero)]
        if {*sizes} != {self.rows * each} or (not zero and width != self.columns):
            raise ValueError(f"{name} has parts of {sizes} rows, {width} wide")
        w = np.asarray(self.restored(integers, scale, zero[0] if zero else None))
        return w if self.by_rows else np.ascontiguousarray(w.T)

    def names(self, name: str) -> list[str]:
        """The names of its parts."""
        return [
            name + part for part in (INTEGERS, SCALE, ZERO)[: 3 if self.scheme == "int4" else 2]
        ]


def parts_of(name: str, integers: Rows | Blocks) -> dict[str, Array]:
    """The parts of a weight of this name, as above."""
    if isinstance(integers, Rows):
        return {name + INTEGERS: integers.integers, name + SCALE: integers.scales}
    size, scales = 2 * integers.integers.shape[-1], integers.scales
    q = unpacked(integers.integers).reshape(-1, size)
    zeros = unpacked(integers.zero_points)[:, : scales.shape[1]].reshape(-1)
    halves: Array = q[:, : size // 2] | q[:, size // 2 :] << 4
    return {name + INTEGERS: halves, name + SCALE: scales.reshape(-1), name + ZERO: zeros}


@dataclass
class Packing:
    """The pass that keeps `frozen` weights in few bits; `weights` are those it did, by name."""

    base: Base
    frozen: Collection[str]
    weights: dict[str, Packed] = field(default_factory=dict)

    def as_pass(self) -> Pass:
        """The pass. Raises GraphgenError for a weight that is not finite."""
        return Pass("packed", self._run)

    def _run(self, model: ir.Model, engine: Engine) -> PassReport:
        self.weights = {}
        found, graph = linears(model), model.graph
        outcomes: dict[ir.Node, Callable[[], Any]] = {}
        values: dict[str, ir.Value] = {}
        for name in self.frozen:
            weight = graph.initializers[name]
            nodes = _readers(weight, found)
            if nodes is None:
                continue
            tables = [node for node in nodes if is_a(node, ops.gather)]
            products = [found[node] for node in nodes if node in found]
            by_rows = bool(tables) or any(site.by_rows for site in products)
            packed, parts = self._packed(name, weight, by_rows, bool(tables))
            self.weights[name] = packed
            values |= {n: initializer(n, array) for n, array in parts.items()}
            for module in {site.module + MAGNITUDE for site in products}:
                if (magnitude := graph.initializers.get(module)) is not None:
                    w = packed.float_of(name, parts)
                    magnitude.const_value = ir.tensor(norms(w if by_rows else w.T), name=module)
            for node in nodes:
                make = partial(_row, values) if node in tables else partial(_product, values)
                outcomes[node] = partial(make, name, packed, weight, node)
        if clash := sorted(values.keys() & graph.initializers.keys()):
            raise GraphgenError(
                f"artifacts: the model has a weight {clash[0]} already, so that of base= would be "
                "a second one: rename it"
            )
        rules = {operator_name(node): [lambda node: outcomes[node]()] for node in outcomes}
        report = engine.run("packed", model, rules, forward=True, nodes=[*outcomes])
        for value in values.values():
            graph.register_initializer(value)
        tidy(model)
        return report

    def _packed(
        self, name: str, weight: ir.Value, by_rows: bool, table: bool
    ) -> tuple[Packed, dict[str, Array]]:
        """The weight in few bits; a table has eight: its rows are read one by one."""
        w = constant(weight)
        assert w is not None
        if not np.isfinite(w).all():
            raise GraphgenError(f"artifacts: the weight {name} is not finite; train it again")
        matrix = w if by_rows else w.T
        scheme: Base = "int8" if table else self.base
        eight = scheme == "int8"
        made = to_rows(matrix, full_range=True) if eight else to_blocks(matrix, block_size=_BLOCK)
        result = Packed(scheme, len(matrix), matrix.shape[1], by_rows), parts_of(name, made)
        _unload(w)
        return result


def _unload(array: Array) -> None:
    """Let the system take back the memory of an array that is mapped from a file.

    No more than one weight of a large file is then in memory; it is read again where it is needed.
    """
    source: Any = array
    while isinstance(source, np.ndarray):
        source = source.base
    whole = source.obj if isinstance(source, memoryview) else source
    if isinstance(whole, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        first = array.ctypes.data - np.frombuffer(whole, np.uint8).ctypes.data
        start, end = -(-first // mmap.PAGESIZE), (first + array.nbytes) // mmap.PAGESIZE
        if end > start:
            pages = start * mmap.PAGESIZE, (end - start) * mmap.PAGESIZE
            whole.madvise(mmap.MADV_DONTNEED, *pages)


def _readers(weight: ir.Value, found: Mapping[ir.Node, Linear]) -> list[ir.Node] | None:
    """The products and lookups that read a weight; None if it is small, or has another use.

    A sum reads it for the norm of a low-rank update.
    """
    if weight.dtype is not _FLOAT or weight.shape is None or len(weight.shape) != 2:
        return None
    if weight.const_value is None or weight.const_value.size < _SMALL or weight.is_graph_output():
        return None
    nodes = list[ir.Node]()
    for use in weight.uses():
        turned = produced_by(use.node.outputs[0], ops.transpose)
        uses = [*use.node.outputs[0].uses()] if turned is not None else [use]
        for one in uses:
            product = one.node in found and found[one.node].weight is weight and one.idx == 1
            table = is_a(one.node, ops.gather) and turned is None and one.idx == 0
            axis = one.node.attributes.get_int("axis", 0) if table else 0
            norm = turned is None and one.idx == 0 and for_norm(one.node)
            if not (product or table or norm) or axis != 0 or one.node.graph is not weight.graph:
                return None
            nodes.append(one.node)
    return nodes or None


def _product(
    values: Mapping[str, ir.Value], name: str, packed: Packed, weight: ir.Value, node: ir.Node
) -> Rewired:
    """A product, or the sum of a norm, that reads the weight restored."""
    integers, scale, *zero = (Value(values[part]) for part in packed.names(name))
    w = packed.restored(integers, scale, zero[0] if zero else None)
    place = 1 if is_a(node, *PRODUCTS) else 0
    as_stored = node.inputs[place] is weight
    w = w if packed.by_rows == as_stored else ops.transpose(w, perm=[1, 0])
    return Rewired({place: w}, packed.scheme)


def _row(
    values: Mapping[str, ir.Value], name: str, packed: Packed, weight: ir.Value, node: ir.Node
) -> Rewrite:
    """Rows of a table, each restored by itself."""
    integers, scale = (Value(values[part]) for part in packed.names(name))
    indices = adopt(node.inputs[1])
    factors = ops.unsqueeze(ops.gather(scale, indices), [-1])
    rows = ops.cast(ops.gather(integers, indices), to=_FLOAT) * factors
    return Rewrite(rows, present_inputs(node), packed.scheme)


def pack(model: ir.Model, base: Base, frozen: Collection[str]) -> dict[str, Packed]:
    """Keep frozen weights in few bits; return which."""
    packing = Packing(base, frozen)
    run_passes(model, [packing.as_pass()], Engine())
    return packing.weights
