"""Each site is checked, not trusted: the part before and the part after run on the same inputs."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from graphlib import TopologicalSorter
from hashlib import sha256
from pathlib import Path

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from graphgen.edit import identity_of
from graphgen.errors import GraphgenError
from graphgen.infer import OPSET, is_named
from graphgen.match import UNVERIFIED, Rewrite, region_of
from graphgen.measure.accuracy import tensors
from graphgen.measure.feeds import feeds_of_kind, sizes_of
from graphgen.measure.reference import evaluate
from graphgen.op import is_a
from graphgen.operands import Array
from graphgen.ops.linalg import inverse
from graphgen.passes.legalize import runnable
from graphgen.passes.repros import BOTH, DIFFERENCE, write
from graphgen.passes.runs import Memory, Trials, renumbered, serialized
from graphgen.record import Tape
from graphgen.rounded import SHOWN
from graphgen.runtime import Session
from graphgen.subgraphs import nodes_of, read_by, subgraphs_of
from graphgen.traits import Trait, has

BOUNDS = {"float64": 1e-7, "float32": 5e-6, "float16": 5e-3, "bfloat16": 4e-2}
"""Largest relative RMS difference between after and before, by dtype.

Attributes, such as epsilon, are float32 in files, whatever the dtype: float64 gains no digits.
"""

MARGIN = 1e-6
"""How far the fused part may exceed twice the error of the part it replaces, against float64."""

_MOST_OF_SIZES = 64
"""Behind more values than this a number is not taken for one made of sizes."""

_NOTHING = 1e-30
"""Smaller results are compared with zero: float32 lacks some of its digits there."""

_TRIALS = (
    (5, "masked"), (1, "large"), (7, "small"), (3, "equal"), (5, "infinite"), (7, "zeros"),
    (3, "tiny"),
)  # fmt: skip
"""A size to start from, and the kind of floats: see `feeds_of_kind`."""

_BASES = tuple(dict.fromkeys(base for base, _ in _TRIALS))

_MOST_ABOVE = 64
"""A part with more nodes than this above its site takes the sizes of its inputs from a run."""


def compare(
    root: ir.Node,
    tape: Tape,
    rewrite: Rewrite,
    results: Sequence[ir.Value | None],
    *,
    repros: Path | None = None,
    memory: Memory | None = None,
) -> str | None:
    """What differs between a node's outputs and a rewrite's recorded results, or None.

    Both parts run in ONNX Runtime with its own optimizations off, on random inputs and
    edge cases, at several sizes. A result that is NaN before the rewrite is undefined; with a
    caveat, so is a row that is zeros after it, of which a mask keeps nothing. NaN may not appear
    where there was none. For a difference, a minimal model is left in a folder of `repros`.
    Parts that did not differ are remembered in `memory`: layers repeat them. So are runs of the
    graph, which tell the sizes of values behind many nodes.
    """
    memory = Memory() if memory is None else memory
    inputs, before, after, observed = _parts(root, tape, rewrite, results, memory)
    trials = {base: [run.trial(inputs)] for base, run in memory.runs.items()}
    return compare_models(
        root.op_type,
        before,
        after,
        bool(rewrite.caveat),
        trials if observed else None,
        repros=repros,
        equal=memory.equal,
    )


def parts_of(
    root: ir.Node, tape: Tape, rewrite: Rewrite, results: Sequence[ir.Value | None]
) -> tuple[list[str], ir.Model, ir.Model]:
    """The values of the graph that become x0, x1, ..., and the parts before and after a rewrite."""
    inputs, before, after, _ = _parts(root, tape, rewrite, results)
    return [str(value.name) for value in inputs], before, after


def _parts(
    root: ir.Node,
    tape: Tape,
    rewrite: Rewrite,
    results: Sequence[ir.Value | None],
    memory: Memory | None = None,
) -> tuple[list[ir.Value], ir.Model, ir.Model, bool]:
    """The inputs of both parts, the parts, and whether sizes of the inputs were observed."""
    made = set(tape.nodes)
    olds = [*root.outputs, *rewrite.also]
    outputs = [(y, new) for y, new in zip(olds, results, strict=False) if new is not None]
    leaves = [value for value in _outside(tape.nodes) if value.producer() not in made]
    leaves += [new for _, new in outputs if new.producer() not in made]
    tops = [root, *filter(None, (y.producer() for y in rewrite.also))]
    inner = {node for top in tops for node in region_of(top, rewrite.inputs)}
    stop = [v for v in leaves if v.producer() not in inner]
    region = dict.fromkeys(node for top in tops for node in region_of(top, stop))
    leaves += [value for value in _outside(region) if value.producer() not in region]
    inputs, above = _free(leaves, region, most=None if memory is None else _MOST_ABOVE)
    observed = memory is not None and len(above) > _MOST_ABOVE
    free = {value: value.shape for value in inputs}
    if memory is not None and observed:
        assert root.graph is not None
        _, above = _free(leaves, region, memory, most=_MOST_ABOVE)
        if len(above) > _MOST_ABOVE:
            memory.observe(root.graph, above, _BASES)
        inputs, above = _free(leaves, region, memory)
        free = {value: memory.shape(value, i) for i, value in enumerate(inputs)}
    shared = _in_order(above)
    replaced = [node for node in _in_order(region | above) if node not in above]
    before = _part(free, [y for y, _ in outputs], [*shared, *replaced])
    after = _part(free, [y for _, y in outputs], [*shared, *tape.nodes])
    before.graph.meta[SHOWN] = root.graph.meta.get(SHOWN, {}) if root.graph else {}
    return inputs, before, after, observed


def compare_models(
    name: str,
    before: ir.Model,
    after: ir.Model,
    empty_rows: bool = False,
    trials: Trials | None = None,
    *,
    repros: Path | None = None,
    equal: set[bytes] | None = None,
) -> str | None:
    """What differs between two models of the same inputs and outputs, or None; see `compare`.

    `trials` has the sizes from each base, and what some inputs hold; by default all that may fit.
    """
    try:
        parts = [runnable(part) for part in (before, after)]
        files = list(map(serialized, parts))
        key = b"" if equal is None else _key(files, f"{empty_rows} {trials}")
        if equal is not None and key in equal:
            return None
        # Parts are small: starting and stopping more threads takes longer than all their runs.
        sessions = [Session(x, provider="cpu", optimize=False, threads=1) for x in files]
    except GraphgenError as e:
        return f"{UNVERIFIED}: {e}"
    trials = trials or {b: [(n, {}) for n in sizes_of(before, b, long=True)] for b in _BASES}
    # For matrices that are not square the runtime ends the process; the reference refuses them.
    inverts = any(is_a(node, inverse) for node in nodes_of(before.graph))
    ways: Sequence[int] = range(max(map(len, trials.values())))
    ran = 0
    for trial, (base, kind) in enumerate(_TRIALS):
        for way in ways:
            try:
                sizes, given = trials[base][way]
                feeds = feeds_of_kind(before, sizes, kind, seed=trial) | given
                if inverts:
                    evaluate(before, feeds)
                old = sessions[0](feeds)
            except GraphgenError:
                continue  # sizes that do not fit together
            ran, ways = ran + 1, [way]
            problem = _problem(before, sessions[1], feeds, old, empty_rows)
            if problem and repros is not None:
                pair = dict(zip(BOTH, parts, strict=True))
                problem += f"; {write(repros, name, pair, feeds, DIFFERENCE)} shows it"
            if problem:
                return problem
            break
    if not ran:
        return f"{UNVERIFIED}: no sizes were found at which it runs"
    if equal is not None:
        equal.add(key)
    return None


def _key(files: Sequence[bytes], how: str) -> bytes:
    """What is the same for equal files that are compared in one way."""
    return b"".join(sha256(part).digest() for part in (*files, how.encode()))


def _problem(
    before: ir.Model, after: Session, feeds: dict[str, Array], old: list[Array], empty_rows: bool
) -> str | None:
    try:
        new = after(feeds)
    except GraphgenError as e:
        return f"it does not run any more: {e}"

    @cache
    def reference() -> list[Array] | None:
        with suppress(GraphgenError):
            return [*tensors(evaluate(before, feeds))]
        return None

    def exact(i: int) -> Array | None:
        return None if (known := reference()) is None else known[i]

    was, now = [*tensors(old)], [*tensors(new)]
    if len(was) != len(now):
        return f"the sequences hold {len(now)} tensors, held {len(was)}"
    for i, (a, b) in enumerate(zip(was, now, strict=True)):
        problem = _differ(a, b, partial(exact, i), empty_rows)
        if problem:
            return problem
    return None


def _in_order(nodes: Mapping[ir.Node, None]) -> list[ir.Node]:
    """The nodes, each after those whose results it uses, whatever their scope."""
    made_by = {node: [v.producer() for v in read_by(node)] for node in nodes}
    return [
        node
        for node in TopologicalSorter(made_by).static_order()
        if node is not None and node in nodes
    ]


def _outside(nodes: Iterable[ir.Node]) -> list[ir.Value]:
    """The values that nodes use, without constants."""
    used = (value for node in nodes for value in read_by(node))
    return list(dict.fromkeys(value for value in used if value.const_value is None))


def _free(
    leaves: Sequence[ir.Value],
    region: Mapping[ir.Node, None],
    memory: Memory | None = None,
    *,
    most: int | None = None,
) -> tuple[list[ir.Value], dict[ir.Node, None]]:
    """Values that can take random content, and the nodes from them down to `leaves`.

    Integers are sizes or indices, numbers may be made of them, and a dimension without a name
    depends on others: such values are computed from their operands, and so are values that the
    region, or other leaves, compute, and masks of positions, which a rewrite may have read as
    causal. Runs in `memory` tell sizes, and what such integers hold.
    It stops with more than `most` nodes.
    """
    inputs: dict[ir.Value, None] = {}
    above: dict[ir.Node, None] = {}
    ends = set(leaves)
    pending = list(dict.fromkeys(leaves))
    while pending and (most is None or len(above) <= most):
        value = pending.pop()
        node = value.producer()
        read = [] if node is None else _outside([node])
        if memory is not None:
            free = memory.knows(value)
        else:
            named = value.shape is not None and all(map(is_named, value.shape))
            free = named and not _of_sizes(value) and not _of_positions(value)
        known = all(v in ends or v.producer() in region for v in read)
        derived = node in region or (node is not None and known)
        if node is None or subgraphs_of(node) or (free and not derived):
            inputs[value] = None
        elif node not in above:
            above[node] = None
            pending += read
    return [value for value in inputs if value.producer() not in above], above


def _of_sizes(value: ir.Value) -> bool:
    """Whether it is integers, or one number or a list that a few nodes make of integers alone."""
    pending = [value]
    for x in pending:
        if x.dtype is None or not x.dtype.is_integer():
            node = x.producer()
            if node is None or x.shape is None or len(x.shape) > 1 or len(pending) > _MOST_OF_SIZES:
                return False
            pending += _outside([node])
    return True


def _of_positions(value: ir.Value) -> bool:
    """Whether it is truth values that a few nodes make of sizes alone."""
    pending = [value] if value.dtype is ir.DataType.BOOL else []
    for x in pending:
        node = x.producer()
        if (node is None and x.const_value is None) or len(pending) > _MOST_OF_SIZES:
            return False
        pending += [] if node is None or has(node, Trait.SHAPE) else _outside([node])
    return bool(pending)


def _part(
    inputs: Mapping[ir.Value, ir.Shape | None],
    outputs: Sequence[ir.Value],
    nodes: Sequence[ir.Node],
) -> ir.Model:
    """A model of some nodes, cloned; values from outside are its inputs, of these shapes."""
    values: dict[ir.Value, ir.Value] = {}
    names = dict[str, str]()
    for i, (value, shape) in enumerate(inputs.items()):
        values[value] = ir.Value(name=f"x{i}", type=value.type, shape=renumbered(shape, names))
    initializers: dict[ir.Value, ir.Value] = {}
    copies = []
    for node in nodes:
        for x in read_by(node):
            if x not in values:
                constant = ir.Value(name=f"c{len(initializers)}", const_value=x.const_value)
                constant.type, constant.shape = x.type, x.shape
                values[x] = initializers[x] = constant
        operands = [None if value is None else values[value] for value in node.inputs]
        copy = ir.Node(
            node.domain, node.op_type, operands, _copied(node, values),
            num_outputs=len(node.outputs),
        )  # fmt: skip
        for old, new in zip(node.outputs, copy.outputs, strict=True):
            new.type, new.shape = old.type, renumbered(old.shape, names)
            values[old] = new
        copies.append(copy)
    results = []
    for value in outputs:
        last = identity_of(values[value])
        copies.append(last)
        results.append(last.outputs[0])
    imports = {"": OPSET, **{node.domain: 1 for node in nodes if node.domain}}
    graph = ir.Graph(
        [values[value] for value in inputs], results, nodes=copies,
        initializers=list(initializers.values()), opset_imports=imports, name="part",
    )  # fmt: skip
    part = ir.Model(graph, ir_version=10)
    if any(map(subgraphs_of, copies)):
        common.NameFixPass()(part)  # names of other graphs may be inside
    return part


def _copied(node: ir.Node, values: Mapping[ir.Value, ir.Value]) -> list[ir.Attr]:
    """A node's attributes; subgraphs read the copies of values around them."""
    attributes = dict(node.attributes)
    for name, attribute in node.attributes.items():
        if attribute.type is ir.AttributeType.GRAPH:
            graph = attribute.as_graph().clone(allow_outer_scope_values=True)
            for inner in nodes_of(graph):
                for i, value in enumerate(inner.inputs):
                    if value is not None and value in values:
                        inner.replace_input_with(i, values[value])
            attributes[name] = ir.AttrGraph(name, graph)
    return list(attributes.values())


def _identical(a: Array, b: Array) -> bool:
    known = a.dtype == b.dtype and a.dtype.kind in "fiub"
    return known and a.shape == b.shape and a.tobytes() == b.tobytes()


def _differ(
    before: Array,
    after: Array,
    exact: Callable[[], Array | None] = lambda: None,
    empty_rows: bool = False,
) -> str | None:
    """What differs; `exact` computes what is right in float64, and is asked only where it decides.

    With errors e of before and d between both, that of after is at most e + d (1 + e): it need not
    be known for a d up to `MARGIN`.
    """
    if _identical(before, after):
        return None  # whatever is exact: a rewrite of layouts changes no bit
    if (before.shape, before.dtype) != (after.shape, after.dtype):
        one, other = (f"{x.dtype}{list(x.shape)}" for x in (after, before))
        return f"the result is {one}, was {other}"
    if str(before.dtype) not in BOUNDS:
        return None if np.array_equal(before, after) else "integers or truth values differ"
    if np.any(np.isnan(after) & ~np.isnan(before)):
        return "NaN where there was none"
    defined = ~np.isnan(before)
    if empty_rows and after.ndim:
        defined &= np.any(after != 0, axis=-1, keepdims=True)
    if np.any(np.isinf(before)) and (right := exact()) is not None:
        # Where the part before overflowed, the one after may be right.
        defined &= ~(np.isinf(before) & np.isfinite(right))
    infinite = defined & (np.isinf(before) | np.isinf(after))
    if not np.array_equal(before[infinite], after[infinite]):
        return "infinite where it was not, or the other way round"
    finite = defined & ~infinite
    a, b = np.where(finite, before, 0), np.where(finite, after, 0)
    difference, bound = _rms(a, b), BOUNDS[str(before.dtype)]
    if not difference <= bound:
        return f"relative RMS difference {difference:.2e}, at most {bound:.0e} is allowed"
    if difference <= MARGIN or before.dtype != np.float32 or (right := exact()) is None:
        return None
    c = np.where(finite, right, 0)
    old, new = _rms(c, a), _rms(c, b)
    if not new <= 2 * old + MARGIN:
        return f"relative RMS error against float64 is {new:.2e}, was {old:.2e}"
    return None


def _rms(wanted: Array, given: Array) -> float:
    scale = float(np.sqrt(np.mean(np.square(wanted, dtype=np.float64)))) if wanted.size else 0.0
    error = np.asarray(given, np.float64) - wanted
    scale = scale if scale > _NOTHING else 1.0
    return float(np.sqrt(np.mean(np.square(error)))) / scale if wanted.size else 0.0
