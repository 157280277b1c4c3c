"""Weights of products and tables as int8 or int4, with what each layer loses by it."""

import math
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from rich.progress import track

from graphgen import ops
from graphgen.edit import splice, to_model
from graphgen.errors import GraphgenError
from graphgen.export.opset import bytes_of
from graphgen.graph import constant, parameters, produced_by
from graphgen.op import is_a
from graphgen.operands import Array
from graphgen.ops.quantized import (
    dynamic_quantize_linear,
    gather_block_quantized,
    matmul_integer_to_float,
    matmul_nbits,
)
from graphgen.passes.clean import clean
from graphgen.places import where_is
from graphgen.processor import FITS, INT8_KEY, NEEDS, saturating_product
from graphgen.quantize.calibration import Seen, observed, random_feeds
from graphgen.quantize.effect import Layer, Report, opened
from graphgen.quantize.rounding import BLOCKS, Blocks, Rows, chunks, to_blocks, to_rows
from graphgen.recognize.axes import permutation_of
from graphgen.record import Operand, Tape, recording
from graphgen.targets import Target, target as find_target
from graphgen.traits import Trait, has

THRESHOLDS = {"int8": 0.05, "int4": 0.3}
"""The schemes, and the relative error above which a layer stays in float."""

_CONTRIB = "com.microsoft"
_NEEDED = {
    "int8": [dynamic_quantize_linear, matmul_integer_to_float],
    "int4": [matmul_nbits],
}
_SMALL = 2048  # weights of a table below which there is nothing to gain
_FLOAT = ir.DataType.FLOAT


def quantize(
    model: ir.Model | Any,
    scheme: str,
    *,
    target: str = "cpu",
    calibration: Iterable[Mapping[str, Any]] | None = None,
    random: bool = False,
    threshold: float | None = None,
    embeddings: bool = True,
    block_size: int | None = None,
    full_range: bool = False,
    progress: bool = False,
) -> tuple[ir.Model, Report]:
    """A copy of an optimized model with the weights of its products as small integers.

    int8: a scale for each output channel; x is quantized as the model runs, once for all products
    that read it. int4: each block of weights of a channel has the scale and the zero point of the
    least squared error; with `calibration`, weights make up for what others lose (GPTQ, arXiv
    2210.17323). Weights are read one at a time.

    Args:
        model: A float32 model from `optimize`; in any other there may be less to find.
        scheme: int8 or int4.
        target: cpu, or, for int4, cuda.
        calibration: Feeds to run the model on; errors are then those of each layer's output, else
            of its weight. By default int8, which loses most by rounding what it reads, is run on
            `random_feeds`, and int4 is not run; nor is any model for `()`.
        random: Whether `calibration` is random: the report says so, and int4 is not fitted to it.
        threshold: The relative error above which a layer stays in float, by default that of
            `THRESHOLDS`.
        embeddings: Whether tables that rows are read from are quantized, too.
        block_size: 32, 64 or 128, of int4: larger ones are faster, and lose more. By default 64,
            and 128 with `calibration`.
        full_range: int8 weights that need a processor with an instruction for int8 (VNNI, AMX,
            dot products of Arm), or the session option session.x64quantprecision=1: `to_rows`.
        progress: Show a progress bar.

    Raises GraphgenError for an unknown scheme or block size, a target without its operators, a
    model that is quantized already or has nothing to quantize, and a weight that is not finite.
    """
    who = f"quantize to {scheme}"
    if scheme not in THRESHOLDS:
        raise GraphgenError(
            f"quantize: there is no scheme {scheme!r}; choose {' or '.join(THRESHOLDS)}"
        )
    feeds, fitted = list(calibration or ()), scheme == "int4" and not random
    block_size = (128 if feeds and fitted else 64) if block_size is None else block_size
    if block_size not in BLOCKS:
        raise GraphgenError(f"{who}: the block size is {block_size}; choose 32, 64 or 128")
    profile = _profile(who, scheme, target)
    model = getattr(model, "model", model).clone()
    sites = _find(who, model, embeddings)
    spool = _Spool(who)
    if calibration is None and scheme == "int8":
        feeds, random = random_feeds(model), True
    limit = THRESHOLDS[scheme] if threshold is None else threshold
    report = Report(scheme, str(profile), limit, _bytes(model))
    job = _Job(who, scheme, profile, limit, full_range, block_size, random, spool)
    groups: dict[object, list[_Site]] = {}
    for site in sites:
        groups.setdefault((site.weight, site.by_rows, job.alone(site)), []).append(site)
    read = [{x.x: _columns(x) for x in group if not x.table} for group in groups.values()]
    work = zip(groups.values(), observed(model, read, feeds, moments=fitted), strict=True)
    how: dict[str, Any] = {"total": len(groups), "disable": not progress, "transient": True}
    for group, seen in track(work, who, **how):
        report.layers += _treat(model.graph, group, seen, job)
    clean(model)
    if any(layer.scheme == "int8" and layer.operator != "Gather" for layer in report.layers):
        model.metadata_props[INT8_KEY] = NEEDS if full_range else FITS
    report.bytes_after = _bytes(model)
    return model, report


@dataclass
class _Site:
    """y = α x W + bias with a constant W, (N, K) if `by_rows`, else (K, N); or rows of a table."""

    end: ir.Node  # makes y
    node: ir.Node  # the product, or the Gather
    x: ir.Value  # of a table, the indices
    weight: ir.Value
    by_rows: bool
    table: bool = False
    alpha: float = 1.0
    bias: ir.Value | Array | None = None
    symmetric: bool = False


@dataclass(frozen=True)
class _Job:
    who: str
    scheme: str
    profile: Target
    limit: float
    full_range: bool  # of int8
    block_size: int
    random: bool  # what calibration shows is random
    spool: "_Spool"

    def integers(
        self,
        w: Array,
        alone: bool,
        samples: Sequence[Array],
        moments: Array | None,
        symmetric: bool,
    ) -> Rows | Blocks:
        """w (N, K) in the scheme; a table alone in int8, as no product adds its integers up."""
        if alone or self.scheme == "int8":
            with np.errstate(over="ignore"):  # `to_rows` looks at what came of it
                squares = [np.square(x).mean(axis=0) for x in samples]
                total = np.sum(squares, axis=0) if squares else None
            return to_rows(w, total, full_range=alone or self.full_range)
        return to_blocks(w, moments, block_size=self.block_size, symmetric=symmetric)

    def alone(self, site: _Site) -> bool:
        """Whether rows cannot be read out of the integers that a product has."""
        rows = self.profile.kernels[_CONTRIB].get(gather_block_quantized.name, [])
        able = any("uint8" in dtypes.get("T1", ()) for *_, dtypes in rows)
        whole = able and _columns(site) % self.block_size == 0
        return site.table and self.scheme == "int4" and not whole


def _profile(who: str, scheme: str, name: str) -> Target:
    if name == "official":
        raise GraphgenError(
            f"{who}: the target official is for training, and integers have no gradient; choose "
            "cpu or cuda"
        )
    profile = find_target(name)
    for op in _NEEDED[scheme]:
        if op.name not in profile.kernels.get(op.domain, {}):
            other = "int4" if scheme == "int8" else "int8"
            raise GraphgenError(f"{who}: {profile} has no {op.name}; choose {other} or another one")
    return profile


def _find(who: str, model: ir.Model, embeddings: bool) -> list[_Site]:
    """Products with a constant matrix, and tables that are weights, in the order of the nodes."""
    tables = {*parameters(model.graph).values()} if embeddings else set()
    sites = []
    for node in model.graph.all_nodes():
        if has(node, Trait.QUANTIZED):
            raise GraphgenError(
                f"{who}: the model is quantized already, it has {node.op_type}; give the float32 "
                "model that it was made of"
            )
        site = _product_at(node) or _table_at(node)
        if site is not None and (not site.table or site.weight in tables):
            # MatMulNBits misreads zero points from outside of a branch, up to onnxruntime 1.26.
            site.symmetric = not site.table and node.graph is not model.graph
            sites.append(site)
    if all(site.table for site in sites):
        raise GraphgenError(
            f"{who}: the model has no MatMul or Gemm with a constant float32 matrix; give a "
            "float32 model, as optimize returns it"
        )
    return sites


def _product_at(node: ir.Node) -> _Site | None:
    if not is_a(node, ops.matmul, ops.gemm, ops.fused_matmul):
        return None
    given, y = node.attributes, node.outputs[0]
    (x, matrix), c = node.inputs[:2], node.inputs[2] if len(node.inputs) > 2 else None
    weight, turned = _matrix(matrix)
    names = ("transA", "transBatchA", "transBatchB")
    other = any(given.get_int(name, 0) != 0 for name in names)
    if x is None or weight is None or other or x.dtype is not _FLOAT:
        return None
    if x.shape is None or len(x.shape) < 2 or y.shape is None:
        return None
    by_rows = turned != (given.get_int("transB", 0) != 0)
    site = _Site(node, node, x, weight, by_rows, alpha=given.get_float("alpha", 1.0) or 0.0)
    columns = weight.shape[0 if by_rows else 1] if weight.shape is not None else None
    if c is not None:
        site.bias = _bias(c, columns, given.get_float("beta", 1.0))
        return None if site.bias is None else site
    [*users] = [use.node for use in y.uses()]
    if len(users) == 1 and not y.is_graph_output() and produced_by(users[0].outputs[0], "Add"):
        site.bias = _bias(next((v for v in users[0].inputs if v is not y), None), columns, 1.0)
        site.end = node if site.bias is None else users[0]
    return site


def _matrix(value: ir.Value | None) -> tuple[ir.Value | None, bool]:
    """The float32 weight that a matrix is, and whether it is the weight's transpose."""
    turn = produced_by(value, "Transpose")
    if turn is not None and permutation_of(turn) == [1, 0]:
        value = turn.inputs[0]
    tensor = ir.convenience.get_const_tensor(value) if value is not None else None
    if value is None or value.is_graph_input() or tensor is None or tensor.dtype is not _FLOAT:
        return None, False
    return (value, turn is not None) if len(tensor.shape) == 2 and tensor.size else (None, False)


def _bias(value: ir.Value | None, columns: Any, factor: float | None) -> ir.Value | Array | None:
    """A vector of N, or None for what is none."""
    array = constant(value)
    if array is None or array.shape not in ((columns,), (1, columns)):
        return None
    if array.ndim == 1 and factor == 1.0:
        return value
    scaled: Array = (array.reshape(-1) * np.float32(factor)).astype(np.float32)
    return scaled


def _table_at(node: ir.Node) -> _Site | None:
    if not is_a(node, ops.gather) or node.attributes.get_int("axis", 0) != 0:
        return None
    table, indices = node.inputs
    weight, turned = _matrix(table)
    if weight is None or turned or indices is None or constant(indices) is not None:
        return None
    tensor = weight.const_value
    small = tensor is None or tensor.size < _SMALL
    return None if small else _Site(node, node, indices, weight, True, table=True)


def _columns(site: _Site) -> int:
    """K, of a product x (..., K) Wᵀ."""
    shape = site.weight.shape
    return int(shape.numpy()[1 if site.by_rows else 0]) if shape is not None else 0


def _treat(
    graph: ir.Graph, group: Sequence[_Site], seen: Mapping[ir.Value, Seen], job: _Job
) -> list[Layer]:
    """Quantize one weight wherever it is used, unless it loses too much at one of the places."""
    weight, by_rows = group[0].weight, group[0].by_rows
    w = constant(weight)
    assert w is not None
    if not np.isfinite(w).all():
        raise GraphgenError(f"{job.who}: the weight {weight.name} is not finite; train it again")
    rows = w if by_rows else w.T
    alone = all(site.table for site in group)  # a table costs no time: eight bits are enough
    # Rows that a Gather reads stand for themselves: what one loses, another cannot make up for.
    products = [] if any(site.table for site in group) else group
    moments = [m for x in products if x.x in seen and (m := seen[x.x].shrunk()) is not None]
    scheme = "int8" if alone else job.scheme
    total = np.sum(moments, axis=0) if moments else None
    symmetric = any(site.symmetric for site in group)
    samples = {x.x: np.concatenate(seen[x.x].rows) for x in group if x.x in seen}
    multiplied = [samples[x.x] for x in products if x.x in samples]
    integers = job.integers(rows, alone, multiplied, total, symmetric)
    shared = by_rows and any(site.table for site in group)
    arrays = _layout(integers, shared)
    if alone:
        arrays["scale"] = arrays["scale"][:, None]
    layers = []
    for site in group:
        read = samples.get(site.x)
        error = _error(rows, integers, arrays, read, shared)
        of = "weight" if read is None else "output" + ", random inputs" * job.random
        path, operator = where_is(site.end), site.node.op_type
        layers.append(Layer(str(weight.name), path, operator, w.shape, scheme, error, of))
        if read is not None and job.full_range and isinstance(integers, Rows):
            layers[-1].error_saturated = _saturated_error(rows, integers, read)
        if not error <= job.limit:
            layers[-1].reason = f"its relative error is {error:.3g}, above {job.limit:.3g}"
    layers[0].bytes_before = layers[0].bytes_after = w.nbytes
    if losing := [layer.path for layer in layers if layer.reason]:
        for layer in layers:
            layer.scheme = "float"
            layer.reason = layer.reason or f"{losing[0]} has the same weight"
        return layers
    layers[0].bytes_after = sum(array.nbytes for array in arrays.values())
    made = {
        role: _named(graph, f"{weight.name}_{role}", job.spool.keep(array))
        for role, array in arrays.items()
    }
    for site in group:
        with recording() as tape:
            if site.table:
                y = _gathered(site, made, rows.shape)
            else:
                y = _product(tape, site, made, rows.shape, shared)
            splice(site.end, tape, [y])
    return layers


def _layout(integers: Rows | Blocks, shared: bool) -> dict[str, Array]:
    """The arrays of the file, as the operators read them: (N, K) where a table is shared."""
    if isinstance(integers, Rows):
        q = integers.integers if shared else np.ascontiguousarray(integers.integers.T)
        return {"int8": q, "scale": integers.scales}
    zeros = integers.zero_points
    return {"int4": integers.integers, "scale": integers.scales, "zero_point": zeros}


def _named(graph: ir.Graph, name: str, tensor: ir.LazyTensor) -> ir.Value:
    """A new weight of the graph."""
    while name in graph.initializers:
        name += "_"
    tensor.name = name
    value = ir.Value(name=name, const_value=tensor, shape=ir.Shape(tensor.shape.numpy()))
    value.type = ir.TensorType(tensor.dtype)
    graph.register_initializer(value)
    return value


class _Spool:
    """Arrays in a file without a name, each read when it is wanted: not all fit into memory."""

    def __init__(self, who: str) -> None:
        self._who = who
        with self._told():
            self._file = tempfile.TemporaryFile()  # noqa: SIM115  # kept by its tensors

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise GraphgenError(
                f"{self._who}: the temporary folder cannot hold the weights: {error.strerror}; "
                "make room there, or name another one in TMPDIR"
            ) from error

    def keep(self, array: Array) -> ir.LazyTensor:
        """The tensor of an array that is written now."""
        start, shape, kind = self._file.seek(0, os.SEEK_END), array.shape, array.dtype
        with self._told():
            self._file.write(np.ascontiguousarray(array).data)
            self._file.flush()

        def read() -> ir.TensorProtocol:
            self._file.seek(start)
            return ir.Tensor(np.fromfile(self._file, kind, math.prod(shape)).reshape(shape))

        return ir.LazyTensor(read, ir.DataType.from_numpy(kind), ir.Shape(shape))


def _error(
    w: Array, integers: Rows | Blocks, arrays: Mapping[str, Array], x: Array | None, shared: bool
) -> float:
    """√(mean (y - ŷ)² / mean y²) of y = x Wᵀ as the runtime computes it; without x, of W (N, K)."""
    if x is None:
        pairs: Iterable[tuple[Array, Array]] = (
            (w[rows], integers.dequantized(rows)) for rows in chunks(w.shape)
        )
    else:
        with recording() as tape:
            value = tape.input("x", _FLOAT, ["rows", w.shape[1]])
            node = ir.node("Identity", [value])
            site = _Site(node, node, value, value, True)
            made: dict[str, ir.Value] = {k: tape.constant(array) for k, array in arrays.items()}
            model = to_model(tape, {"y": _product(tape, site, made, w.shape, shared)})
        with opened(model) as session:
            pairs = [(x @ w.T, session(x=x)[0])]
    return _relative(pairs)


def _saturated_error(w: Array, rows: Rows, x: Array) -> float:
    """The same of int8 where the processor adds two products in 16 bits, simulated."""
    low, high = min(x.min(), 0), max(x.max(), 0)
    scale = np.float32((high - low) / 255) or np.float32(1)
    zero = np.clip(np.rint(-low / scale), 0, 255)
    q = np.clip(np.rint(x / scale) + zero, 0, 255).astype(np.uint8)
    total = saturating_product(q, rows.integers.T) - zero * rows.integers.sum(axis=1, dtype=int)
    return _relative([(x @ w.T, total * (scale * rows.scales))])


def _relative(pairs: Iterable[tuple[Array, Array]]) -> float:
    """√(Σ (y - ŷ)² / Σ y²) of pairs (y, ŷ)."""
    error = scale = 0.0
    for wanted, given in pairs:
        error += float(np.square(given - wanted, dtype=np.float64).sum())
        scale += float(np.square(wanted, dtype=np.float64).sum())
    return math.sqrt(error / scale) if scale else float(error > 0)


def _product(
    tape: Tape, site: _Site, made: Mapping[str, ir.Value], shape: tuple[int, ...], shared: bool
) -> Operand:
    x, scale, (rows, columns) = site.x, made["scale"], shape
    bias = None if site.bias is None else tape.operand(site.bias)
    if site.alpha != 1.0:
        array = constant(scale)
        assert array is not None
        scale = tape.constant(array * np.float32(site.alpha))
    if "int4" in made:
        # Level 4: x is rounded to int8 in blocks, of which the products are exact.
        zeros = None if site.symmetric else made["zero_point"]
        sizes = {"K": columns, "N": rows, "block_size": _block_size(made["int4"])}
        how = {**sizes, "accuracy_level": 4}
        return matmul_nbits(x, made["int4"], scale, zeros, None, bias, **how)
    q, x_scale, x_zero = dynamic_quantize_linear(x)
    b = ops.transpose(made["int8"], perm=[1, 0]) if shared else made["int8"]
    return matmul_integer_to_float(q, b, x_scale, scale, x_zero, None, bias)


def _gathered(site: _Site, made: Mapping[str, ir.Value], shape: tuple[int, ...]) -> Operand:
    indices, scale = site.x, made["scale"]
    if "int8" in made:
        q = ops.cast(ops.gather(made["int8"], indices), to=_FLOAT)
        factors = ops.gather(scale, indices)
        if scale.shape is not None and len(scale.shape) == 1:  # as a product wants it
            factors = ops.unsqueeze(factors, [-1])
        return q * factors
    table, size = ops.reshape(made["int4"], [shape[0], -1]), _block_size(made["int4"])
    return gather_block_quantized(table, indices, scale, made["zero_point"], block_size=size)


def _block_size(integers: ir.Value) -> int:
    assert integers.const_value is not None
    return 2 * int(integers.const_value.shape.numpy()[-1])


def _bytes(model: ir.Model) -> int:
    tensors = [value.const_value for value in model.graph.initializers.values()]
    return sum(bytes_of(tensor) for tensor in tensors if tensor is not None)
