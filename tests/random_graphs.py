"""Graphs drawn at random: over the whole table of operators, and near what the passes look for.

Everything is recorded while it is drawn, so that types decide what may come next.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from hypothesis import reject, strategies as st
from samples import LOWEST, SAMPLES, Sample

from graphgen import ops
from graphgen.edit import to_model
from graphgen.errors import GraphgenError
from graphgen.graph import is_float
from graphgen.laboratory.text import short_text
from graphgen.op import TABLE
from graphgen.record import recording
from graphgen.value import Value, graph_value

MODES = ("plain", "large", "zeros", "equal", "tiny", "small", "short", "long")
"""What inputs are filled with; in the last two, every size known at run time only is another."""

ELEMENTWISE = set(
    "Add Sub Mul Div Pow Neg Sqrt Reciprocal Exp Log Abs Sin Cos Tanh Sigmoid Erf Max Min Clip "
    "Where And Or Not Identity Relu Gelu QuickGelu MeanSquaredError BitwiseXor Sum Mean LeakyRelu "
    "Elu Selu Softplus Mish HardSigmoid HardSwish".split()
)
"""Operators that take operands of any shapes that broadcast."""

STEPS = set(
    "Floor Ceil Round Sign Mod Equal Greater GreaterOrEqual Less LessOrEqual IsNaN ArgMax NonZero "
    "Cast CastLike TopK MaxPool".split()
)
"""Operators at whose steps a rounding error becomes a whole one: only for exact operands."""

QUANTIZERS = set(
    "QuantizeLinear DynamicQuantizeLinear QLinearMatMul DynamicQuantizeMatMul QGemm QLinearAdd "
    "QLinearMul QLinearSoftmax".split()
)
"""Operators whose bodies divide and round, so that no operand of the rounding is exact.

As operators they are given exact operands; as bodies, which the reference calculates in float64,
they are left out: 127.5 is not 127.49999.
"""
STEPS |= QUANTIZERS

POSITIVE = {"Sqrt", "Log", "Pow", "ReduceLogSum"}
SETTINGS = {"Clip", "Dropout", "Range", "ConstantOfShape", "Expand", "Tile", "BatchNormalization"}
"""Operators whose further operands mean sizes, ratios, seeds or what is positive."""

MOVES = set(
    "Reshape Transpose Unsqueeze Squeeze Flatten Expand Concat Split Slice Gather GatherElements "
    "GatherND Trilu Tile Pad Identity Neg Abs".split()
)


class Graph:
    """What is being drawn: a recording, with a way to fill each input."""

    model: ir.Model

    def __init__(self, choices: bytes, tape: Any):
        self._choices, self.tape = iter(choices), tape
        self.dtype: Any = np.float32
        self.fill: dict[str, Callable[[Any, Sequence[int]], Any]] = {}
        self.sizes: dict[str, int] = {}
        self.exact: set[Any] = set()
        self.masks = 0
        self.seed = self.number(0, 255)
        self.places, self.faults = 0, {self.number(0, 31), self.number(0, 63)}

    def __repr__(self) -> str:
        return f"\n{short_text(self.model)}"

    def one(self, *options: Any) -> Any:
        """One of the options; the first is the simplest."""
        return options[self.number(0, len(options) - 1)]

    def usually(self, plain: Any, *others: Any) -> Any:
        """The plain one but at a place or two of a graph: it is to have one fault, not ten."""
        self.places += 1
        return self.one(*others) if self.places in self.faults else plain

    def number(self, low: int, high: int) -> int:
        return low + next(self._choices, 0) % (high - low + 1)

    def chance(self, one_in: int = 4) -> bool:
        return bool(self.number(0, one_in - 1) == one_in - 1)

    def size(self, name: str, *sizes: int) -> Any:
        """A size: a number, or a symbol of that name that stands for it."""
        size = self.one(*(sizes or (2, 3, 1, 5)))
        if not self.chance(2):
            return size
        self.sizes[name] = size
        return name

    def shape_of(self, value: Any) -> list[int] | None:
        """The shape of a value as far as the sizes of its symbols are known."""
        dims = [self.sizes.get(str(d), d) for d in value.shape or ()]
        return dims if all(isinstance(d, int) for d in dims) and value.shape is not None else None

    def known(self, *shape: Any) -> list[int]:
        """A shape with the sizes that symbols stand for."""
        return [self.sizes[d] if isinstance(d, str) else d for d in shape]

    def input(self, shape: Sequence[Any], fill: Any = None, dtype: Any = None) -> Any:
        """A new input. `fill(rng, shape)` makes its content; floats then become edge cases."""
        name = f"x{len(self.fill)}"
        value = self.tape.input(
            name, ir.DataType.from_numpy(np.dtype(dtype or self.dtype)), list(shape)
        )
        self.fill[name] = fill or (lambda rng, shape: rng.standard_normal(shape))
        self.exact.add(value.value)
        return value

    def parameter(self, array: Any) -> Any:
        name = f"weight_{len(self.tape.initializers)}"
        value = ir.Value(name=name, const_value=ir.tensor(array), shape=ir.Shape(array.shape))
        value.type = ir.TensorType(ir.DataType.from_numpy(array.dtype))
        self.tape.initializers[name] = value
        self.exact.add(value)
        return Value(value)

    def operand(self, *shape: Any) -> Any:
        """Floats of a shape, as an input, a parameter or a constant."""
        kind = self.one("input", "parameter", "constant")
        if kind == "input" or any(isinstance(d, str) for d in shape):
            return self.input(shape)
        array = self.random(*shape)
        return self.parameter(array) if kind == "parameter" else array

    def random(self, *shape: int) -> Any:
        self.seed += 1
        return np.random.default_rng(self.seed).standard_normal(shape).astype(self.dtype)

    def feeds(self, mode: str) -> dict[str, Any]:
        """Content for every input."""
        rng = np.random.default_rng(self.seed)
        sizes = dict(self.sizes)
        if mode in ("short", "long"):
            sizes = dict.fromkeys(sizes, 1 if mode == "short" else 7)
        feeds = {}
        for name, value in self.tape.inputs.items():
            assert value.shape is not None and value.dtype is not None
            shape = [d if isinstance(d, int) else sizes[str(d)] for d in value.shape]
            x = np.asarray(self.fill[name](rng, shape))
            if x.dtype == np.float64 and not np.isinf(x).any() and np.abs(x).max(initial=0) < 1e30:
                x = _hostile(x, mode)
            feeds[name] = x.astype(value.dtype.numpy())
        return feeds


def _hostile(x: Any, mode: str) -> Any:
    if mode == "equal" and x.ndim:
        return np.broadcast_to(x[..., :1], x.shape)
    factor = {"large": 30.0, "zeros": 0.0, "small": 1e-3, "tiny": 1e-39}.get(mode)
    return x if factor is None else x * factor + 0.0  # no -0


@st.composite
def graphs(draw: Callable[..., Any], kind: str) -> Graph:
    """Graphs of one of `KINDS`.

    All choices are drawn at once: of single ones, hypothesis would repeat some elsewhere, again
    and again, and most graphs would nearly be others. They shrink to the first option each.
    """
    choices = draw(st.binary(min_size=400, max_size=400))
    with recording(primitives=kind != "any" or choices[-1] % 2 == 0) as tape:
        g = Graph(choices, tape)
        try:
            results = KINDS[kind](g)
        except GraphgenError:
            reject()  # types that do not go together: no graph
        # An output that is taken from the middle: what stands behind it is used elsewhere.
        if g.usually(False, True) and tape.nodes:
            results = [*results, g.one(*tape.nodes).outputs[0]]
        results = [v for v in dict.fromkeys(map(graph_value, results)) if v and v.producer()]
        if not results:
            reject()
        g.model = to_model(tape, {f"y{i}": value for i, value in enumerate(results)})
    return g


# Over the whole table


def anything(g: Graph) -> list[Any]:
    """A few calls of operators as tests/ops/samples.py has them, on each other's results."""
    g.dtype = g.usually(np.float32, np.float16, np.float64)
    pool: list[Any] = []
    keys = list(SAMPLES)
    for _ in range(g.number(2, 9)):
        key = g.one(*keys)
        sample = g.one(*SAMPLES[key])
        if g.tape.primitives and key[1] in QUANTIZERS:
            continue
        try:
            result = _call(g, pool, TABLE[key], sample)
        except GraphgenError:
            continue
        results = result if isinstance(result, tuple) else (result,)
        pool += [v for v in results if isinstance(v, Value)]
    unused = [value for value in pool if not value.uses()]
    return unused or pool[-1:]


def _call(g: Graph, pool: list[Any], op: Any, sample: Sample) -> Any:
    operands: list[Any] = []
    for i, x in enumerate(sample.inputs):
        if not isinstance(x, np.ndarray):
            operands.append(x)
            continue
        floating = x.dtype == np.float64
        dtype = np.dtype(g.dtype) if floating else x.dtype
        fits = [
            value
            for value in pool
            if value.dtype == dtype
            and (op.name not in STEPS or value.value in g.exact)
            and (op.name in ELEMENTWISE or g.shape_of(value) == list(x.shape))
        ]
        if op.name in SETTINGS and i:
            operands.append(x.astype(dtype))
        elif fits and (floating or op.name in ELEMENTWISE) and not g.chance(3):
            value = g.one(*fits[::-1])
            operands.append(ops.abs(value) + 0.5 if op.name in POSITIVE else value)
        elif floating and x.size and g.chance(3) and (made := _floats(g, pool, op)):
            # Any other value, cut and repeated to the shape that is wanted.
            source = g.one(*made)
            count = math.prod(g.shape_of(source) or [])
            index = np.arange(x.size).reshape(x.shape) % count
            operands.append(ops.gather(ops.reshape(source, [-1]), index))
        else:
            # The body of attention has to know the number of heads. And the runtime ends the
            # process where verification gives Inverse a matrix that is not square.
            symbols = "Attention" not in op.name and op is not ops.inverse
            operands.append(_fresh(g, x.astype(dtype), symbols=symbols))
    result = op(*operands, **sample.attributes)
    for value in result if isinstance(result, tuple) else (result,):
        if not isinstance(value, Value) or value.value.dtype is None:
            continue
        moves = op.name in MOVES or not is_float(value.value)
        if moves and all(x.value in g.exact for x in operands if isinstance(x, Value)):
            g.exact.add(value.value)
    return result


def _floats(g: Graph, pool: list[Any], op: Any) -> list[Any]:
    return [
        value
        for value in pool
        if value.dtype == g.dtype
        and (op.name not in STEPS or value.value in g.exact)
        and math.prod(g.shape_of(value) or [0])
    ]


def _fresh(g: Graph, x: Any, *, symbols: bool) -> Any:
    kind = g.usually("input", "parameter", "constant")
    if kind == "constant":
        return x
    if kind == "parameter":
        return g.parameter(x)
    shape: list[Any] = list(x.shape)
    if x.dtype.kind == "f":
        for axis, size in enumerate(shape):
            if symbols and size > 1 and g.chance(4):
                shape[axis] = f"size_{size}"
                g.sizes[f"size_{size}"] = size
        x = x.astype(np.float64)
    return g.input(
        shape, lambda rng, shape: np.resize(x, shape), x.dtype if x.dtype != np.float64 else None
    )


# Near an attention


def near_attention(g: Graph) -> list[Any]:
    """Attention by hand, with a few things about it changed."""
    b, t, s = g.size("B", 2, 1, 3), g.size("T", 3, 1, 4), g.size("S", 5, 1, 3)
    s = t if g.one(True, False) else s
    h, d = g.one(2, 1, 4), g.one(4, 1, 3)
    kv = g.usually(h, 1)
    e = g.usually(d, 1, 2)
    q = _heads(g, b, t, h, d)
    k = q if g.usually(False, True) and s == t and kv == h else _heads(g, b, s, kv, d)
    v = k if g.usually(False, True) and e == d else _heads(g, b, s, kv, e)
    if kv != h and g.chance(2):
        k, v = (ops.repeat_heads(x, h) if hasattr(ops, "repeat_heads") else x for x in (k, v))
    if g.usually(False, True):
        q, k = k, q
    scale = 1.0 / math.sqrt(d)
    place = g.one("scores", "q", "k", "both", "none")
    wrong = g.usually(1.0, -1.0, 2.0, 1e-3, 0.0)
    if place in ("q", "both"):
        q = _scaled(g, q, wrong * (math.sqrt(scale) if place == "both" else scale))
    kt = ops.transpose(k, perm=g.usually([0, 1, 3, 2], [0, 1, 2, 3], [3, 1, 0, 2], [1, 0, 3, 2]))
    if place in ("k", "both"):
        kt = _scaled(g, kt, math.sqrt(scale) if place == "both" else scale)
    scores = ops.matmul(q, kt)
    if place == "scores":
        scores = _scaled(g, scores, wrong * scale)
    softcap = g.one("none", "none", "none", "none", "first", g.usually("none", "last"))
    if softcap == "first":
        scores = _capped(g, scores)
    keeps: list[Any] = []
    for _ in range(g.one(1, 0, 1, 2)):
        scores = _masked(g, scores, keeps, b, h, t, s)
    if softcap == "last":
        scores = _capped(g, scores)
    if g.usually(False, True):
        scores = _scaled(g, scores, g.one(2.0, -1.0, 0.5))
    weights = _softmax(g, scores)
    if g.chance():
        guard = g.one("keep", "isnan", "other")
        if guard == "isnan":
            weights = ops.where(ops.is_nan(weights), g.usually(0.0, 1.0), weights)
        elif guard == "keep" and keeps:
            weights = ops.where(g.one(*keeps), weights, g.usually(0.0, 1.0))
        elif g.one(True, False):
            other = g.input([t, s], lambda rng, shape: rng.random(shape) < 0.6, np.bool_)
            weights = ops.where(other, weights, 0.0)
        else:
            weights = weights * g.one(1.0, 0.5)
    y = ops.matmul(weights, v) if g.usually(True, False) else ops.matmul(v, weights)
    results = [y]
    if g.one(True, False):
        moved = ops.transpose(y, perm=g.usually([0, 2, 1, 3], [0, 1, 2, 3], [2, 0, 1, 3]))
        y = ops.reshape(moved, [0, 0, -1])
        results = [y @ g.random(h * e, 3)] if g.chance(2) else [y]
    if g.usually(False, True):
        results.append(ops.reduce_sum(g.one(weights, scores, kt), [-1]))
    return results


def _capped(g: Graph, scores: Any) -> Any:
    cap = g.one(3.0, 1.0)
    return ops.tanh(scores / cap) * g.usually(cap, 2.0)


def _heads(g: Graph, b: Any, t: Any, h: int, d: int) -> Any:
    """(B, H, T, D): an input, or split from (B, T, H·D) or (B, T, H, D)."""
    kind = g.one("split", "input", "transposed", "projected")
    if kind == "input":
        return g.input([b, h, t, d])
    if kind == "transposed":
        return ops.transpose(g.input([b, t, h, d]), perm=[0, 2, 1, 3])
    x = g.input([b, t, h * d])
    if kind == "projected":
        x = x @ g.parameter(g.random(h * d, h * d))
    order = g.usually(False, True)
    sizes = [0, 0, d, h] if order else [0, 0, h, d]
    return ops.transpose(ops.reshape(x, sizes), perm=[0, 3, 1, 2] if order else [0, 2, 1, 3])


def _scaled(g: Graph, x: Any, factor: float) -> Any:
    kind = g.one("mul", "div", "left", "array", "input")
    if kind == "div" and factor:
        return x / (1.0 / factor)
    if kind == "left":
        return ops.mul(g.dtype(factor), x)
    if kind == "array":
        return x * np.full([1] * g.usually(g.number(0, 4), 5), factor, g.dtype)
    if kind == "input" and g.chance(3):
        return x * g.input([])
    return x * factor


def _masked(g: Graph, scores: Any, keeps: list[Any], b: Any, h: Any, t: Any, s: Any) -> Any:
    g.masks += 1
    kind = g.one("bool", "bias", "causal", "where added", "added")
    shapes = [[b, 1, t, s], [b, 1, 1, s], [t, s], [1, s], [s], [h, t, s], [b, h, t, s]]
    odd = [[t, 1], [b, 1, t, 1], [1], [h, 1, 1], [1, 1, 1, t, s], [b, 1, s, t]]
    shape = g.one(*shapes) if g.usually(True, False) else g.one(*odd)
    low = g.one(LOWEST, -math.inf) if g.usually(True, False) else g.one(-1e9, -1e4, -10.0)
    if kind == "bias":
        bias = g.input(shape) if g.one(True, False) else g.random(*g.known(*shape))
        return g.usually(ops.add, ops.sub, lambda x, y: ops.sub(y, x))(scores, bias)
    if kind == "added":
        few = g.one(True, False)

        def fill(rng: Any, shape: Any) -> Any:
            x = np.where(rng.random(shape) < 0.6, 0.0, low)
            if few and x.ndim:
                x[..., 0] = 0.0  # nothing masked entirely
            return x

        return scores + g.input(shape, fill)
    keep = _causal(g, scores) if kind == "causal" else None
    if keep is None:
        few = g.one(True, False)

        def flags(rng: Any, shape: Any) -> Any:
            x = rng.random(shape) < 0.6
            if few and x.ndim:
                x[..., 0] = True
            return x

        keep = g.input(shape, flags, np.bool_)
        keep = keep if g.one(True, False) else ops.logical_not(keep)
    if keeps and g.chance(3):
        keep = ops.logical_and(keeps[-1], keep) if g.usually(True, False) else keeps[-1] | keep
    keeps.append(keep)
    if kind == "where added":
        return scores + ops.where(keep, *g.usually((0.0, low), (low, 0.0), (1.0, low)))
    if g.one(True, False):
        return ops.where(keep, scores, low)
    return ops.where(ops.logical_not(keep) if g.one(True, False) else keep, low, scores)


def _causal(g: Graph, scores: Any) -> Any:
    """Column ≤ row, or something like it."""
    t, s = (ops.dim(scores, axis) for axis in (-2, -1))
    if isinstance(t, int) and isinstance(s, int) and g.one(True, False):
        return np.tril(np.ones((t, s), bool), k=g.usually(0, 1, -1))
    rows, columns = ops.unsqueeze(ops.arange(t), [1]), ops.unsqueeze(ops.arange(s), [0])
    if g.usually(False, True):
        rows = rows + np.int64(1)
    keep = g.usually(ops.greater_or_equal, ops.greater, ops.less_or_equal)(rows, columns)
    if g.usually(False, True):
        keep = ops.logical_and(keep, ops.less(rows - columns, np.int64(2)))
    return keep


def _softmax(g: Graph, x: Any) -> Any:
    """Over the last axis, as exporters and hands write it, or nearly so."""
    if g.one(True, True, True, False):
        return ops.softmax(x, axis=g.usually(-1, 3 if len(x.shape) == 4 else -1, -2, 0))
    axis = g.usually(-1, -2, 0)
    if g.usually(True, False):
        pick = g.usually(ops.reduce_max, ops.reduce_min, ops.reduce_sum)
        x = x - pick(x, [g.usually(axis, 0)])
    e = ops.exp(x)
    total = g.usually(ops.reduce_sum, ops.reduce_mean, ops.reduce_max)(e, [g.usually(axis, 0)])
    if g.usually(False, True):
        total = total + g.one(1e-6, 1.0)
    right = g.one(lambda: e / total, lambda: e * ops.reciprocal(total))
    return g.usually(right, lambda: total / e)()


# Near the small fusions


def near_norm(g: Graph) -> list[Any]:
    """A normalization with a few things about it changed."""
    b, t, d = g.size("B"), g.size("T"), g.one(4, 1, 3, 6)
    g.dtype = g.usually(np.float32, np.float16, np.float64)
    x = g.input([b, t, d])
    if g.one(True, False):
        x = x + g.operand(d)
    wide = ops.cast(x, to=ir.DataType.FLOAT) if g.dtype == np.float16 else x
    dtype = wide.dtype.type
    axes = g.usually([-1], [2], [1, 2], [1], [-2], [0])
    center, spread = axes, g.usually(axes, [-1], [1])
    d_ = wide
    if g.one(True, False):
        mean = g.usually(ops.reduce_mean, ops.reduce_max)(wide, center)
        d_ = g.usually(wide - mean, mean - wide, wide + mean)
    square = g.usually(
        g.one(lambda: d_ * d_, lambda: d_**2.0),
        lambda: d_ * wide,
        lambda: ops.abs(d_),
        lambda: d_**3.0,
    )
    variance = g.usually(ops.reduce_mean, ops.reduce_sum)(square(), spread)
    epsilon = g.one(1e-5, 1e-12, 0.5, 0.0, -1e-5)
    epsilon = g.usually(epsilon, np.full((1, 1), epsilon, dtype), np.full(d, epsilon, dtype))
    total = variance + epsilon if g.one(True, False) else ops.add(epsilon, variance)
    power = ops.pow(total, np.array(0.5, dtype))
    root = g.usually(ops.sqrt(total), power, ops.sqrt(variance) + epsilon)
    other = g.usually(d_, wide)
    right = g.one(
        lambda: other / root,
        lambda: other * ops.reciprocal(root),
        lambda: other * (1.0 / root),
        lambda: other * total**-0.5,
    )
    y = g.usually(right, lambda: root / other)()
    if g.dtype == np.float16 and g.usually(True, False):
        y = ops.cast(y, to=ir.DataType.FLOAT16)
    for _ in range(g.one(1, 2, 0)):
        shape = g.usually([d], [1], [], [1, d], [t, d], [t, 1], [1, 1, d], [b, t, d])
        gain = (
            ops.cast(g.operand(*shape), to=y.dtype) if g.dtype == np.float16 else g.operand(*shape)
        )
        if g.usually(False, True):
            gain = gain + 1.0
        y = g.one(lambda: y * gain, lambda: gain * y, lambda: y + gain)()  # noqa: B023
    if g.usually(True, False):
        y = y + (np.zeros(d, y.dtype) if g.chance() else g.random(d).astype(y.dtype))
    return [y, *([variance * dtype(2)] if g.usually(False, True) else [])]


def near_activation(g: Graph) -> list[Any]:
    """GELU, SiLU and their gated forms with a few things about them changed."""
    n, d = g.size("N"), g.one(4, 1, 3)
    x = g.input([n, d])
    if g.one(True, False):
        x = x @ g.random(d, d)
    other = g.usually(x, g.input([n, d]), g.input([d]), x + 1.0)
    kind = g.one("erf", "tanh", "sigmoid", "relu")
    if kind == "erf":
        root = g.usually(math.sqrt(2.0), 1.4142, 1.5, -math.sqrt(2.0))
        inner = ops.erf(x / root if g.one(True, False) else x * (1.0 / root))
    elif kind == "tanh":
        cube = g.one(lambda: x * x * x, lambda: x**3.0, lambda: x**2.0, lambda: x * (x * other))()
        slope = g.usually(math.sqrt(2.0 / math.pi), 0.7978846, 0.8, 0.79)
        inner = ops.tanh(slope * (x + g.usually(0.044715, 0.0447, 0.05) * cube))
    elif kind == "sigmoid":
        alpha = g.usually(1.702, 1.0, 0.0, -1.702, 1.7, 3e4, np.full((1, 1, 1), 1.702, np.float32))
        y = other * ops.sigmoid(x * alpha if g.one(True, False) else x)
        return [y * g.input([n, d]) if g.chance(3) else y]
    else:
        return [ops.maximum(x, g.usually(0.0, 0.1, -0.0, np.zeros((1, 1, 1), np.float32)))]
    one = inner + g.usually(1.0, 1.001, 0.0, -1.0)
    half = g.usually(0.5, 0.4, 1.0, -0.5, 2.0)
    y = g.one(
        lambda: other * one * half,
        lambda: half * (other * one),
        lambda: (other * half) * one,
        lambda: other * (one * half),
        lambda: other * one / (1.0 / half),
        lambda: other + one * half,
    )()
    return [y, *([one * 2.0] if g.usually(False, True) else [])]


def near_softmax(g: Graph) -> list[Any]:
    """A softmax, or its logarithm, with a few things about it changed."""
    b, n, d = g.size("B"), g.size("N"), g.one(4, 1, 3)
    x = g.input([b, n, d])
    if g.chance(2):
        x = _scaled(g, x, g.one(0.5, -2.0))
    if g.chance(2):
        x = _masked(g, x, [], b, 1, n, d)
    y = _softmax(g, x)
    if g.chance():
        z = x - ops.reduce_max(x, [-1])
        total = ops.reduce_sum(ops.exp(z), [g.usually(-1, 1)])
        y = g.usually(z, x) - ops.log(total)
    return [y, *([ops.reduce_sum(y * 2.0, [-1])] if g.chance() else [])]


def near_rotary(g: Graph) -> list[Any]:
    """Rotary embedding with a few things about it changed."""
    b, t, h = g.size("B", 2, 1), g.size("T", 3, 1, 5), g.one(2, 1)
    d = g.one(4, 2, 6)
    half = d // 2
    x = g.input([b, h, t, d])
    if g.usually(False, True):
        x = ops.transpose(g.input([b, t, h, d]), perm=[0, 2, 1, 3])
    angles = ops.unsqueeze(ops.cast(ops.arange(ops.dim(x, 2)), to=ir.DataType.FLOAT), [1])
    angles = angles * (10000.0 ** (-np.arange(half, dtype=np.float32) / half)).astype(np.float32)
    if g.one(True, False):
        angles = g.input(g.usually([t, half], [b, 1, t, half], [1, half], [half]))
    join = g.usually([angles, angles], [angles, ops.neg(angles)])
    kind = g.one("half", "interleaved")
    if kind == "half":
        at = g.usually(half, 1)
        first, second = ops.split(x, [at, d - at], axis=g.usually(3, -1), num_outputs=2)
        rotated = ops.concat(
            *g.usually([-second, first], [second, -first], [first, -second], [second, first]),
            axis=-1,
        )
        angles = ops.concat(*join, axis=-1)
    else:
        pairs = ops.reshape(x, [0, 0, -1, half, 2])
        even, odd = (ops.gather(pairs, np.int64(i), axis=4) for i in g.usually((0, 1), (1, 0)))
        pair = [ops.unsqueeze(v, [4]) for v in (-odd, even)]
        rotated = ops.reshape(ops.concat(*pair, axis=4), [0, 0, -1, d])
        pair = [ops.unsqueeze(v, [-1]) for v in join]
        wide = ops.concat(*pair, axis=-1)
        angles = (
            ops.flatten(wide, axis=1)
            if len(wide.shape) == 2
            else ops.reshape(wide, [*[0] * (len(wide.shape) - 2), d])
        )
    cos, sin = g.usually((ops.cos, ops.sin), (ops.sin, ops.cos), (ops.cos, ops.cos))
    y = g.one(
        lambda: x * cos(angles) + rotated * sin(angles),
        lambda: cos(angles) * x + sin(angles) * rotated,
        lambda: x * cos(angles) - rotated * sin(angles),
        lambda: x * sin(angles) + rotated * cos(angles),
    )()
    return [y, *([rotated * 2.0] if g.usually(False, True) else [])]


# Near the canonical form


def chains(g: Graph) -> list[Any]:
    """Scalar factors, divisions, neutral operands, powers and shapes, one after the other."""
    n, d = g.size("N"), g.one(3, 1, 4)
    g.dtype = g.one(np.float32, np.int64, np.float64, np.int64)
    whole = g.dtype == np.int64
    x = g.input([n, d], (lambda rng, shape: rng.integers(-9, 9, shape)) if whole else None)
    made = [x]
    for _ in range(g.number(2, 7)):
        x = g.usually(x, g.one(*made))
        numbers = (2, 3, -1, 1, 0) if whole else (2.0, 0.3, -3.0, 1.0, 0.0)
        if not whole and g.chance(9):
            numbers = (1e-30, 1e30, math.inf)
        c: Any = g.one(*numbers)
        c = g.one(c, c, np.asarray(c, g.dtype), np.full([1] * g.number(1, 4), c, g.dtype))
        other = c if g.usually(True, False) else g.one(*made)
        step = g.one("mul", "add", "sub", "div", "rdiv", "rsub", "pow", "mean", "max", "eq")
        if step == "pow":
            y = (
                x
                if whole
                else x ** g.one(2.0, 3.0, 0.5, -0.5, 1.0, 0.0, -1.0, np.full(1, 2.0, g.dtype))
            )
        elif step == "mean":
            reduce = g.one(ops.reduce_max, ops.reduce_sum) if whole else ops.reduce_mean
            axes = g.one([-1], [0], None, [0, 1] if len(x.shape) == 2 else [-1])
            y = reduce(x, axes, keepdims=g.usually(1, 0))
        elif step == "max":
            y = g.one(ops.maximum, ops.minimum)(x, other)
        elif step == "eq":
            y = ops.where(ops.equal(made[0], other), x, g.one(x, 0 if whole else 0.0))
        elif step in ("div", "rdiv") and whole:
            y = (
                x / g.one(2, -3, 1)
                if step == "div"
                else ops.div(np.int64(7), g.one(-2, np.int64(3)) + x * 0)
            )
        else:
            y = {
                "mul": lambda: x * other,  # noqa: B023
                "add": lambda: x + other,  # noqa: B023
                "sub": lambda: x - other,  # noqa: B023
                "div": lambda: x / other,  # noqa: B023
                "rdiv": lambda: ops.div(other, x),  # noqa: B023
                "rsub": lambda: ops.sub(other, x),  # noqa: B023
            }[step]()
        if math.prod(d if isinstance(d, int) else 7 for d in y.shape) < 5000:
            x = y
            made.append(x)
    return [x, *(v for v in made if g.chance(6))]


def layouts(g: Graph) -> list[Any]:
    """Transposes, reshapes and the like, one after the other."""
    b, n = g.size("B"), g.size("N")
    # Equal sizes: else a wrong order shows in the shape, and the engine refuses it.
    x = g.input(
        g.one([2, 2, 2, 2], [3, 3, 3], [b, n, g.one(2, 4, 1), g.one(3, 2, 1)], [b, b, 2, 2])
    )
    made = [x]
    for _ in range(g.number(2, 8)):
        x = g.usually(x, g.one(*made))
        x = _moved(g, x, len(x.shape))
        made.append(x)
    return [x, *(v for v in made if g.chance(6))]


def _moved(g: Graph, x: Any, n: int) -> Any:
    steps = ("reshape", "unsqueeze", "squeeze", "split", "concat", "mul", "expand")
    step = g.one("transpose", "transpose", "transpose", "batched", *steps)
    if step == "batched" and n == 4 and all(isinstance(d, int) for d in x.shape[1:]):
        # Leading axes merged, the others turned, leading axes split again.
        second, third, last = (int(d) for d in x.shape[1:])
        merged = ops.reshape(x, [-1, third, last])
        turned = ops.transpose(merged, perm=g.usually([0, 2, 1], [1, 0, 2], [2, 0, 1]))
        return ops.reshape(turned, g.usually([-1, second, last, third], [-1, last, second, third]))
    axis = g.number(-n, n - 1) if n else 0
    if step == "transpose":
        order = list(range(n))
        perm = [order.pop(g.number(0, len(order) - 1)) for _ in range(n)]
        return ops.transpose(x, perm=g.usually(perm, None))
    if step == "reshape":
        sizes = [0] * n
        kind = g.one("merge", "split", "drop", "same", "flat")
        if kind == "merge" and n > 1:
            sizes = [0] * g.number(0, n - 2) + [-1]
        elif kind == "split" and n:
            sizes = [0] * (n - 1) + [g.one(1, 2), -1]
        elif kind == "drop" and n > 2 and all(isinstance(d, int) for d in x.shape[-2:]):
            sizes = [0] * (n - 2) + [int(x.shape[-1]) * int(x.shape[-2])]
        elif kind == "flat":
            sizes = [-1]
        if kind == "same" and n:
            return ops.reshape(x, [ops.dim(x, i) for i in range(n)])
        return ops.reshape(x, sizes)
    if step == "unsqueeze" and n < 6:
        return ops.unsqueeze(x, [axis])
    ones = [i for i, d in enumerate(x.shape) if d == 1]
    if step == "squeeze" and ones:
        return ops.squeeze(x, [g.one(*ones)])
    if (
        step == "split"
        and n
        and isinstance(x.shape[axis], int)
        and x.shape[axis] % 2 == 0
        and x.shape[axis]
    ):
        return g.one(*ops.split(x, axis=axis, num_outputs=2))
    if step == "concat" and n:
        return ops.concat(x, g.one(x, x * 2.0), axis=axis)
    if step == "expand":
        return ops.expand(x, g.one([1] * n or [1], [1], [2, *[1] * n] if n < 5 else [1]))
    return x * g.one(2.0, 0.5)


KINDS: dict[str, Callable[[Graph], list[Any]]] = {
    "any": anything,
    "attention": near_attention,
    "norm": near_norm,
    "activation": near_activation,
    "softmax": near_softmax,
    "rotary": near_rotary,
    "chains": chains,
    "layouts": layouts,
}
"""What is drawn, by name."""
