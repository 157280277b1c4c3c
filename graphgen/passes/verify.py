"""Each site is checked, not trusted: the part before and the part after run on the same inputs."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from graphlib import TopologicalSorter

import numpy as np
import onnx_ir as ir

from graphgen.errors import GraphgenError
from graphgen.graph import evaluate, infer_model
from graphgen.infer import OPSET, is_named
from graphgen.match import region_of
from graphgen.op import Array, Tape
from graphgen.passes.legalise import legalise
from graphgen.runtime import Session
from graphgen.subgraphs import subgraphs_of
from graphgen.targets import newest_opset
from graphgen.targets import target as find_target

BOUNDS = {"float64": 1e-12, "float32": 5e-6, "float16": 5e-3, "bfloat16": 4e-2}
"""Largest relative RMS difference between after and before, by dtype."""

MARGIN = 1e-6
"""What the fused part may err beyond twice the error of the part it replaces, against float64."""

_BASES = (5, 1, 7, 3)


def compare(
    root: ir.Node, tape: Tape, results: Sequence[ir.Value], empty_rows: bool = False
) -> str | None:
    """What differs between a node's outputs and the recorded results, or None.

    Both parts run in ONNX Runtime with its own optimisations off, on random inputs, on large ones
    and on masks with an empty row, at several sizes. What comes out as NaN before the rewrite is
    undefined there, and with `empty_rows` a row that comes out as zeros after it: a mask keeps
    nothing of it. NaN may not appear where there was none.
    """
    made = set(tape.nodes)
    leaves = [value for value in _outside(tape.nodes) if value.producer() not in made]
    leaves += [value for value in results if value.producer() not in made]
    region = set(region_of(root, leaves))
    leaves += [value for value in _outside(region) if value.producer() not in region]
    inputs, above = _free(leaves, region)
    shared = _in_order(above)
    replaced = [node for node in _in_order(region | above) if node not in above]
    try:
        before = _part(inputs, root.outputs, [*shared, *replaced])
        after = _part(inputs, results, [*shared, *tape.nodes])
        sessions = [_open(part) for part in (before, after)]
    except GraphgenError as e:
        return f"could not be verified: {e}"
    ran = 0
    for trial, sizes in enumerate(_sizes(inputs)):
        if trial >= len(_BASES) and ran:
            break
        feeds = _feeds(inputs, sizes, trial)
        try:
            old = sessions[0](feeds)
        except GraphgenError:
            continue  # sizes that do not go together
        try:
            new = sessions[1](feeds)
        except GraphgenError as e:
            return f"it does not run any more: {e}"
        ran += 1
        exact = _reference(before, feeds)
        for i, (a, b) in enumerate(zip(old, new, strict=True)):
            problem = _differ(a, b, None if exact is None else exact[i], empty_rows)
            if problem:
                return problem
    return None if ran else "could not be verified: no sizes were found at which it runs"


def _open(part: ir.Model) -> Session:
    """A session on the part; a runtime older than our opset gets what it has kernels for."""
    if newest_opset() < OPSET:
        part = part.clone()
        legalise(part, infer_model(part), find_target("cpu"))
        part.graph.opset_imports[""] = newest_opset()
    return Session(ir.to_proto(part).SerializeToString(), provider="cpu", optimize=False)


def _in_order(nodes: set[ir.Node]) -> list[ir.Node]:
    """Each after those whose results it uses, whatever scope they are in."""
    made_by = {node: [v.producer() for v in node.inputs if v is not None] for node in nodes}
    return [node for node in TopologicalSorter(made_by).static_order() if node in nodes]


def _outside(nodes: Iterable[ir.Node]) -> list[ir.Value]:
    """The values that nodes use, without constants."""
    used = (value for node in nodes for value in node.inputs if value is not None)
    return list(dict.fromkeys(value for value in used if value.const_value is None))


def _free(leaves: Sequence[ir.Value], region: set[ir.Node]) -> tuple[list[ir.Value], set[ir.Node]]:
    """Values that random content can be given to, and the nodes from them down to `leaves`.

    Integers are sizes or indices, and a dimension without a name depends on others: those are
    computed from what makes them, and so is what the region computes itself.
    """
    inputs: dict[ir.Value, None] = {}
    above: set[ir.Node] = set()
    pending = list(dict.fromkeys(leaves))
    while pending:
        value = pending.pop()
        node = value.producer()
        named = value.shape is not None and all(map(_is_free, value.shape))
        integers = value.dtype is not None and value.dtype.is_integer()
        opaque = node is None or bool(subgraphs_of(node))
        if opaque or (named and not integers and node not in region):
            inputs[value] = None
        elif node is not None and node not in above:
            above.add(node)
            pending += _outside([node])
    return [value for value in inputs if value.producer() not in above], above


def _is_free(dim: int | ir.SymbolicDim) -> bool:
    """A number, or a symbol of its own, not one computed from others."""
    return isinstance(dim, int) or (is_named(dim) and str(dim).isidentifier())


def _part(
    inputs: Sequence[ir.Value], outputs: Sequence[ir.Value], nodes: Sequence[ir.Node]
) -> ir.Model:
    """A model of some nodes, cloned; values it takes from outside are its inputs."""
    values: dict[ir.Value, ir.Value] = {}
    for i, value in enumerate(inputs):
        shape = None if value.shape is None else ir.Shape(value.shape.dims)
        values[value] = ir.Value(name=f"x{i}", type=value.type, shape=shape)
    initializers: dict[ir.Value, ir.Value] = {}
    copies = []
    for node in nodes:
        for x in node.inputs:
            if x is not None and x not in values:
                constant = ir.Value(name=f"c{len(initializers)}", const_value=x.const_value)
                constant.type, constant.shape = x.type, x.shape
                values[x] = initializers[x] = constant
        operands = [None if value is None else values[value] for value in node.inputs]
        copy = ir.Node(
            node.domain, node.op_type, operands, node.attributes.values(),
            num_outputs=len(node.outputs),
        )  # fmt: skip
        for old, new in zip(node.outputs, copy.outputs, strict=True):
            new.type, new.shape = old.type, old.shape
            values[old] = new
        copies.append(copy)
    results = []
    for value in outputs:
        last = ir.node("Identity", [values[value]])
        last.outputs[0].type, last.outputs[0].shape = value.type, value.shape
        copies.append(last)
        results.append(last.outputs[0])
    graph = ir.Graph(
        [values[value] for value in inputs], results, nodes=copies,
        initializers=list(initializers.values()), opset_imports=_imports(nodes), name="part",
    )  # fmt: skip
    return ir.Model(graph, ir_version=10)


def _imports(nodes: Sequence[ir.Node]) -> dict[str, int]:
    return {"": OPSET, **{node.domain: 1 for node in nodes if node.domain}}


def _sizes(inputs: Sequence[ir.Value]) -> Iterator[dict[str, int]]:
    """Sizes of the symbols to try: all different; those without a name equal; one a sum of two.

    The caches of a loop grow alike, which their symbols do not say; a mask over past and present
    tokens is as long as both together, whatever its axis is called.
    """
    symbols = list(
        dict.fromkeys(
            str(d) for v in inputs for d in v.shape or () if isinstance(d, ir.SymbolicDim)
        )
    )
    for base in _BASES:
        yield {name: base + i for i, name in enumerate(symbols)}
    named = [is_named(ir.SymbolicDim(name)) for name in symbols]
    yield {name: _BASES[0] + named[i] * (i + 1) for i, name in enumerate(symbols)}
    for whole in symbols:
        for one, other in itertools.combinations([s for s in symbols if s != whole], 2):
            sizes = {name: _BASES[0] + i for i, name in enumerate(symbols)}
            yield sizes | {whole: sizes[one] + sizes[other]}


def _feeds(inputs: Sequence[ir.Value], sizes: dict[str, int], trial: int) -> dict[str, Array]:
    """Random inputs, plain or large; in the first trial, masks with an empty first row."""
    rng = np.random.default_rng(trial)
    scale = 30.0 if trial % 2 else 1.0
    feeds: dict[str, Array] = {}
    for i, value in enumerate(inputs):
        shape = [d if isinstance(d, int) else sizes[str(d)] for d in value.shape or ()]
        assert value.dtype is not None
        dtype = value.dtype.numpy()
        if dtype == np.bool_:
            feeds[f"x{i}"] = rng.random(shape) < 0.7
            if len(shape) > 1 and trial == 0:
                feeds[f"x{i}"][..., :1, :] = False
        elif value.dtype.is_floating_point():
            feeds[f"x{i}"] = (rng.standard_normal(shape) * scale).astype(dtype)
        else:
            feeds[f"x{i}"] = rng.integers(0, 2, shape).astype(dtype)
    return feeds


def _reference(model: ir.Model, feeds: dict[str, Array]) -> list[Array] | None:
    try:
        return evaluate(model, feeds)
    except GraphgenError:
        return None


def _differ(before: Array, after: Array, exact: Array | None, empty_rows: bool) -> str | None:
    if str(before.dtype) not in BOUNDS:
        return None if np.array_equal(before, after) else "integers or truth values differ"
    if np.any(np.isnan(after) & ~np.isnan(before)):
        return "NaN where there was none"
    defined = ~np.isnan(before)
    if empty_rows and after.ndim:
        defined &= np.any(after != 0, axis=-1, keepdims=True)
    infinite = defined & (np.isinf(before) | np.isinf(after))
    if not np.array_equal(before[infinite], after[infinite]):
        return "infinite where it was not, or the other way round"
    finite = defined & ~infinite
    a, b = np.where(finite, before, 0), np.where(finite, after, 0)
    difference, bound = _rms(a, b), BOUNDS[str(before.dtype)]
    if not difference <= bound:
        return f"relative RMS difference {difference:.2e}, at most {bound:.0e} is allowed"
    if exact is None or before.dtype != np.float32:
        return None
    c = np.where(finite, exact, 0)
    old, new = _rms(c, a), _rms(c, b)
    if not new <= 2 * old + MARGIN:
        return f"relative RMS error against float64 is {new:.2e}, was {old:.2e}"
    return None


def _rms(wanted: Array, given: Array) -> float:
    scale = float(np.sqrt(np.mean(np.square(wanted, dtype=np.float64)))) if wanted.size else 0.0
    error = np.asarray(given, np.float64) - wanted
    return float(np.sqrt(np.mean(np.square(error)))) / (scale or 1.0) if wanted.size else 0.0
