"""Inputs for every operator of the table, plain ones and edge cases.

Arrays become inputs of the graph, lists and numbers constants; floats are float64 here and
narrowed by the tests. A `kink` is a point without a derivative: such a sample is for the meaning.
"""

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import onnx_ir as ir

from graphgen.infer import DOMAIN

F16, F32, I64 = ir.DataType.FLOAT16, ir.DataType.FLOAT, ir.DataType.INT64
MICROSOFT = "com.microsoft"
LOWEST = float(np.finfo(np.float32).min)
TINY = float(np.finfo(np.float32).tiny)


class Sample(NamedTuple):
    inputs: tuple[Any, ...]
    attributes: dict[str, Any]
    kink: bool


_random = np.random.default_rng(11)


def of(*inputs: Any, kink: bool = False, **attributes: Any) -> Sample:
    return Sample(inputs, attributes, kink)


def n(*shape: int, scale: float = 1.0) -> Any:
    """Normal numbers, no two of them equal."""
    return np.asarray(_random.normal(0.0, scale, shape))


def away(*shape: int, least: float = 0.3) -> Any:
    """Numbers of either sign, at least `least` away from zero."""
    x = n(*shape)
    return np.asarray(x + np.copysign(least, x))


def positive(*shape: int) -> Any:
    return np.asarray(_random.uniform(0.4, 2.0, shape))


def i(*values: Any, dtype: Any = np.int64) -> Any:
    return np.asarray(values, dtype)


def flags(*shape: int) -> Any:
    return _random.random(shape) < 0.6


def scalar(value: Any, dtype: Any = np.float64) -> Any:
    return np.asarray(value, dtype)


WIDE = np.array([-800.0, -88.0, -30.0, -5.5, -0.7, -1e-3, 1e-3, 0.7, 5.5, 30.0, 88.0, 800.0])
ODD = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, TINY, -1.5, 2.5])
EMPTY = np.zeros((0, 3))
BEYOND = np.array([[-0.3, 300.0, 448.0, -463.0], [465.0, -470.0, 600.0, -1e9]])  # float8's end


def _unary(domain_points: Any = WIDE, *, special: Any = ODD) -> list[Sample]:
    return [
        of(away(2, 3)),
        of(n(1)),
        of(scalar(0.7)),
        of(EMPTY),
        of(domain_points),
        of(special, kink=True),
    ]


def _inside() -> list[Sample]:
    """Of functions on [-1, 1]."""
    ends = np.array([-1.0, 0.0, 1.0, 1.5, np.nan])
    return [of(n(2, 3, scale=0.2)), of(scalar(0.7)), of(EMPTY), of(ends, kink=True)]


def _binary(make: Any = n, *, kink: bool = False) -> list[Sample]:
    """The same shape, broadcasting to the left, to the right and both ways, scalars, length 1."""
    shapes = [
        ((2, 3), (2, 3)),
        ((2, 3), (3,)),
        ((3,), (5, 2, 3)),
        ((2, 1, 3), (5, 1)),
        ((), (2, 3)),
        ((1,), (1,)),
        ((0, 3), (1, 3)),
    ]
    return [of(make(*a), make(*b), kink=kink) for a, b in shapes]


def _compare() -> list[Sample]:
    ties = [of(np.array([1.0, 2.0, np.inf, np.nan]), np.array([1.0, -2.0, np.inf, np.nan]))]
    return [*_binary(), *ties, of(i(3, -1, 7), i(3, 0, 2))]


def _reduce(x: Any = n, *, tied: bool = False) -> list[Sample]:
    ties = [of(np.array([[2.0, 2.0, 1.0], [-1.0, 3.0, 3.0]]), [1], kink=True)] if tied else []
    large = [] if x is positive else [of(x(2, 5) * 1e4, [-1])]
    return [
        of(x(2, 3), [1]),
        of(x(2, 3, 5), [-1, 0], keepdims=0),
        of(x(3, 1), [1]),
        of(x(2, 3)),
        of(x(3), None, keepdims=0),
        of(x(2, 3), [], noop_with_empty_axes=1),
        of(x(2, 3), None, noop_with_empty_axes=1, keepdims=0),
        *large,
        *ties,
    ]


def _norms(x: Any = n) -> list[Sample]:
    """Reductions whose operator does more than reducing, so that one over no axes does too."""
    return [s for s in _reduce(x) if not s.attributes.get("noop_with_empty_axes")]


def _choice() -> list[Sample]:
    return [
        of(n(2, 3), n(2, 3)),
        of(n(2, 1), n(3), n(5, 1, 1)),
        of(n(3)),
        of(i(1, 5), i(4, 2)),
        of(np.array([1.0, 2.0]), np.array([1.0, 3.0]), kink=True),
        of(n(1), scalar(0.1)),
    ]


def _sums() -> list[Sample]:
    return [of(n(2, 3), n(2, 3)), of(n(2, 1), n(3), n(5, 1, 1)), of(n(3)), of(n(1), scalar(0.1))]


def _heads(q: int, kv: int, t: int, s: int, *, scale: float = 1.0, v: int = 4) -> tuple[Any, ...]:
    return n(2, q, t, 4, scale=scale), n(2, kv, s, 4, scale=scale), n(2, kv, s, v)


def _attention() -> list[Sample]:
    rows = flags(2, 1, 3, 5)
    rows[..., 0] = True
    rows[0, 0, 1] = rows[1, 0, 2] = False  # nothing kept
    added = np.where(flags(3, 5), n(3, 5), LOWEST)
    added[:, 2] = 0.3
    added[1] = LOWEST  # nothing kept
    infinite = np.where(flags(2, 2, 3, 5), 0.0, -np.inf)
    infinite[..., 4] = 0.0
    infinite[1, 1, 0] = -np.inf  # nothing kept
    flat = n(2, 3, 8), n(2, 5, 4), n(2, 5, 6)
    corner = np.ones((3, 3), bool)
    corner[0, 0] = False  # with the causal mask, row 0 keeps nothing
    return [
        of(*_heads(2, 2, 3, 5)),
        of(*_heads(4, 2, 3, 5, v=3), scale=0.3),
        of(*_heads(2, 1, 5, 3), is_causal=1),
        of(*_heads(2, 2, 1, 1), is_causal=1),
        of(*_heads(2, 2, 3, 5), rows),
        of(*_heads(4, 2, 3, 5), added),
        of(*_heads(2, 2, 3, 5), infinite),
        of(*_heads(2, 2, 3, 3), corner, is_causal=1),
        of(*_heads(2, 2, 3, 5, scale=30.0)),
        of(*_heads(2, 2, 3, 5), softcap=1.5),
        of(*_heads(2, 2, 3, 5), rows, softcap=1.5),
        of(*_heads(2, 2, 3, 5), added, softcap=1.5),
        of(*flat, q_num_heads=4, kv_num_heads=2),
        of(n(2, 3, 8), n(2, 5, 8), n(2, 5, 8), q_num_heads=2, kv_num_heads=2),
        of(n(2, 3, 8), n(2, 3, 8), n(2, 3, 6), q_num_heads=2, kv_num_heads=2, is_causal=1),
        of(*flat, np.ones((3, 5), bool), q_num_heads=4, kv_num_heads=2, is_causal=1),
    ]


def _norm(*, bias: bool) -> list[Sample]:
    def parameters(*shape: int) -> list[Any]:
        return [n(*shape) for _ in range(1 + bias)]

    return [
        of(n(2, 3, 5), *parameters(5)),
        of(n(2, 3, 5), n(5)),
        of(n(2, 3, 5), *parameters(3, 5), axis=1),
        of(n(2, 3, 5), *parameters(2, 3, 5), axis=-3, epsilon=0.1),
        of(n(3, 4, scale=300.0), *parameters(4)),
        of(n(2, 1), *parameters(1), epsilon=0.5),
        of(np.full((2, 4), 3.0), *parameters(4), epsilon=0.1),  # no variance
        of(n(1, 7), *parameters(7)),
    ]


def _cross_entropy() -> list[Sample]:
    labels = i([1, -100, 0], [4, 2, -100])
    return [
        of(n(2, 3, 5), labels),
        of(n(2, 3, 5), labels, label_smoothing=0.1),
        of(n(2, 3, 5), labels, z_loss=0.2),
        of(n(2, 3, 5), labels, label_smoothing=0.1, z_loss=0.3),
        of(n(2, 5), i(-100, -100)),
        of(n(2, 5), i(-100, -100), label_smoothing=0.1),
        of(n(3, 5), i(0, 4, 1), ignore_index=0),
        of(n(1, 1), i(0)),
        of(n(4, 3, scale=400.0), i(2, 0, 1, 2)),
        of(n(5), scalar(3, np.int64)),
    ]


def _likelihood() -> list[Sample]:
    return [
        of(n(3, 4), i(1, 3, 0)),
        of(n(2, 4, 3), i([1, 3, 0], [2, 2, -100]), positive(4), ignore_index=-100),
        of(n(3, 4), np.asarray([1, 1, 0], np.int32), reduction="sum", ignore_index=1),
        of(n(3, 4), i(1, 3, 0), positive(4), reduction="none"),
    ]


def _dropout() -> list[Sample]:
    def key(ratio: float, seed: int, step: int, site: int) -> list[Any]:
        return [scalar(ratio), *(scalar(k, np.int64) for k in (seed, step, site))]

    return [
        of(n(3, 5), *key(0.3, 1, 2, 3)),
        of(n(2, 1, 3), *key(0.9, -7, 2**40, 0)),
        of(n(4), *key(0.0, 0, 0, 0)),
        of(n(1), *key(0.5, 2**31, 1, 5)),
    ]


def _softmax(*, kink: bool = False) -> list[Sample]:
    return [
        of(n(2, 5)),
        of(n(2, 3, 5), axis=1),
        of(n(2, 3, 4), axis=-3),
        of(n(3, 1)),
        of(n(5)),
        of(n(2, 6, scale=400.0)),
        of(np.array([[1e30, -1e30, 0.0], [5.0, 5.0, 5.0]])),
        of(np.array([[-np.inf, 0.5, 1.0]]), kink=kink),
        of(EMPTY),
    ]


def _scatter(**attributes: Any) -> list[Sample]:
    return [
        of(n(3, 4), i([0, 2, 1, 0], [2, 0, 0, 1]), n(2, 4), **attributes),
        of(n(3, 4), i([-1], [0], [3]), n(3, 1), axis=1, **attributes),
        of(n(2, 3, 2), i([[1, -2]]), n(1, 1, 2), axis=-2, **attributes),
    ]


def _group_query(mask: bool) -> Sample:
    """Two heads of queries for each of keys, over two rows of three."""
    lengths = (np.array([2, 2], np.int32), np.array(3, np.int32))
    bias = (None, None, None, n(2, 1, 3, 3)) if mask else ()
    operands = (n(2, 3, 32), n(2, 3, 16), n(2, 3, 16), None, None)
    return of(*operands, *lengths, *bias, num_heads=4, kv_num_heads=2)


def _cached(rows: int, new: int, lengths: Any, total: int, **attributes: Any) -> Sample:
    """New tokens behind those that each row of a buffer for 7 holds."""
    buffers = (n(rows, 2, 7, 8), n(rows, 2, 7, 8))
    sizes = (np.array(lengths, np.int32) - 1, np.array(total, np.int32))
    operands = (n(rows, new, 32), n(rows, new, 16), n(rows, new, 16), *buffers, *sizes)
    return of(*operands, num_heads=4, kv_num_heads=2, **attributes)


def _with_sinks(sample: Sample, at: int) -> Sample:
    """Such operands with a score of each of 4 heads as operand `at`."""
    operands = [*sample.inputs, *[None] * (at - len(sample.inputs))]
    return of(*operands[:at], n(4), *operands[at:], **sample.attributes)


def _packed(
    rows: int, new: int, lengths: Any, total: int, *, past: int = 0, **attributes: Any
) -> Sample:
    """Q, K and V in one, turned by half of their features, behind a buffer of that many places."""
    buffers = (n(rows, 2, past, 16), n(rows, 2, past, 16)) if past else (None, None)
    sizes = (np.array(lengths, np.int32) - 1, np.array(total, np.int32))
    operands = (n(rows, new, 128), None, None, *buffers, *sizes, n(8, 8), n(8, 8))
    return of(*operands, num_heads=4, kv_num_heads=2, do_rotary=1, **attributes)


def _recurrent(gates: int, *, states: int = 1, **attributes: Any) -> list[Sample]:
    """Both directions, rows of different length, first states; a single step."""
    length, known = 3, {"hidden_size": 3, **attributes}

    def given(directions: int, *sizes: int) -> list[Any]:
        whole = [(gates * 3, 4), (gates * 3, 3), (2 * gates * 3,)]
        return [n(*sizes, 4), *(n(directions, *shape) for shape in whole)]

    lengths = np.array([length, 1], np.int32)
    first = [n(2, 2, 3) for _ in range(states)]
    return [
        of(*given(1, 1, 2), **known),
        of(*given(1, length, 2)[:3], direction="reverse", **known),
        of(*given(2, length, 2), lengths, *first, direction="bidirectional", **known),
    ]


_IDS = np.asarray([[1, 0], [4, 4]], np.int32)


_SHARES = [(scalar(1 / 256), scalar(0, np.uint8)), (scalar(1 / 256), scalar(-128, np.int8))]
"""The scale and zero point of numbers from 0 to 1."""


def _two_quantized(scale: float) -> list[Sample]:
    """Two quantized operands that broadcast, and the scale of their sum or product."""
    samples = []
    for a, b in (((2, 3), (2, 3)), ((2, 1, 4), (3, 4)), ((2, 5), ()), ((3,), (2, 3))):
        for dtype in (np.uint8, np.int8):
            x = q8(*a, dtype=dtype), scalar(0.0417), scalar(100, dtype)
            y = q8(*b, dtype=dtype), scalar(0.0731), scalar(7, dtype)
            samples.append(of(*x, *y, scalar(scale), scalar(99, dtype)))
    return [*samples, of(*samples[0].inputs[:7])]  # the last zero point is 0 by default


def q8(*shape: int, dtype: Any = np.uint8) -> Any:
    """Integers of 8 bits, both ends among them where there is room."""
    info = np.iinfo(dtype)
    x = _random.integers(info.min, info.max, shape, dtype, endpoint=True)
    x.ravel()[:2] = [info.min, info.max][: x.size]
    return x


def q4(*shape: int, dtype: Any = ml_dtypes.uint4) -> Any:
    low = -8 if dtype is ml_dtypes.int4 else 0
    return _random.integers(low, low + 16, shape).astype(dtype)


def _bits(rows: int, columns: int, size: int, *more: Any, **attributes: Any) -> Sample:
    """MatMulNBits of (2, 3, K) and (N, K); `more` are scales, zero points, groups and a bias."""
    bits = attributes.get("bits", 4)
    b = q8(rows, -(-columns // size), size * bits // 8)
    sizes = {"K": columns, "N": rows, "block_size": size}
    return of(n(2, 3, columns), b, *more, **sizes, **attributes)


_STEPS = [scalar(-0.75), scalar(2.0**-3)]
"""Scales with which quotients are exact, so that halves are halves in float32 and in float64."""
_HALVES = np.arange(-40.0, 40.0) / 16


def _quantized(make: Any) -> list[Sample]:
    """`make(x shape, scale shape, zero shape)` with a scale for all, a row, a column or a block."""
    return [
        make((2, 3), (), ()),
        make((2, 3), (1,), None),
        make((2, 3), (), (), axis=1),
        make((5,), (), (), axis=1),
        make((2, 3, 4), (3,), (3,)),
        make((2, 3, 4), (2,), (2,), axis=-3),
        make((2, 7, 3), (2, 3, 3), (2, 3, 3), axis=1, block_size=3),
        make((4, 6), (2, 6), None, axis=0, block_size=2),
        make((0, 3), (3,), (3,)),
    ]


_SWIGLU: dict[str, Any] = {"activation_type": "swiglu", "swiglu_fusion": 1}

SAMPLES: dict[tuple[str, str], list[Sample]] = {
    # sizes and moves
    ("", "Shape"): [of(n(2, 3)), of(n(2, 3, 5), start=-2), of(n(2, 3, 5), start=1, end=-1)],
    ("", "Size"): [of(n(2, 3)), of(scalar(1.0)), of(EMPTY)],
    ("", "Reshape"): [
        of(n(2, 6), [3, 4]),
        of(n(2, 3, 4), [0, -1]),
        of(n(2, 3), [-1]),
        of(n(1), []),
        of(EMPTY, [3, 0], allowzero=1),
    ],
    ("", "Transpose"): [of(n(2, 3, 5)), of(n(2, 3, 5), perm=[1, 2, 0]), of(n(3), perm=[0])],
    ("", "Unsqueeze"): [of(n(2, 3), [0, 2]), of(n(2, 3), [-1, 0]), of(scalar(2.0), [0])],
    ("", "Squeeze"): [of(n(1, 3, 1), [0]), of(n(1, 3, 1), [-1, 0]), of(n(1, 3, 1))],
    ("", "Flatten"): [of(n(2, 3, 5)), of(n(2, 3), axis=0), of(n(2, 3, 5), axis=-1), of(EMPTY)],
    ("", "Expand"): [
        of(n(2, 1), [5, 1, 3]),
        of(n(2, 3), [1, 1]),
        of(n(3), [3]),
        of(scalar(2.0), [2, 2]),
    ],
    ("", "Concat"): [
        of(n(2, 3), n(1, 3), axis=0),
        of(n(2, 3), n(2, 0), n(2, 2), axis=-1),
        of(n(3), axis=0),
        of(i(1), i(2, 3), axis=0),
    ],
    ("", "Split"): [
        of(n(5, 2), [2, 3]),
        of(n(2, 7), num_outputs=3, axis=-1),
        of(n(4), num_outputs=4),
        of(n(2, 3), [0, 3], axis=1),
    ],
    ("", "Slice"): [
        of(n(5, 4), [1], [4]),
        of(n(5, 4), [-3, 0], [99, -1], [0, -1]),
        of(n(5), [4], [-99], [0], [-2]),
        of(n(5), [3], [0], [0], [-1]),
        of(n(5), [-99], [3], [0], [2]),
        of(n(5, 4), [-2, 0], [-9, 9], [0, 1], [-2, 1]),
        of(n(3), [2], [1]),
    ],
    ("", "Gather"): [
        of(n(4, 3), i([1, 1], [0, -1])),
        of(np.arange(12.0).reshape(4, 3), np.asarray([1, -1], np.int32)),
        of(n(2, 4, 3), i(3, -4, 3), axis=1),
        of(n(2, 4), scalar(2, np.int64), axis=-1),
        of(n(0, 4), scalar(2, np.int64), axis=-1),
        of(n(0, 4), i([0, 1, 1], [2, 3, 0]), axis=1),
        of(n(1, 2), i(0)),
        of(i(5, 6, 7), i(2, 0)),
    ],
    ("", "GatherElements"): [
        of(n(3, 4), i([0, 2, 1, 0], [2, 2, -1, 1])),
        of(n(3, 4), i([3], [-4], [0]), axis=1),
        of(n(2, 3, 2), i([[0, -1]], [[2, 2]]), axis=-2),
        of(n(3, 4), i([3, 0]), axis=1),  # fewer rows than x has
    ],
    ("", "ScatterElements"): [
        *_scatter(),
        *_scatter(reduction="add"),
        of(n(2, 3), i([1, 1, 1], [0, 1, 1]), n(2, 3), reduction="add"),  # twice into one place
    ],
    ("", "GatherND"): [
        of(n(3, 4), i([0, 1], [2, -1])),
        of(n(3, 4), i([1], [1], [0])),
        of(n(2, 3, 4), i([[1, 0], [0, -3]])),
    ],
    ("", "ScatterND"): [
        of(n(3, 4), i([0], [2]), n(2, 4)),
        of(n(3, 4), i([0, 1], [2, -1]), n(2)),
        of(n(3, 4), i([1], [1], [-3]), n(3, 4), reduction="add"),
    ],
    ("", "Range"): [
        of(scalar(0, np.int64), scalar(5, np.int64), scalar(1, np.int64)),
        of(scalar(7, np.int64), scalar(-2, np.int64), scalar(-3, np.int64)),
        of(scalar(0.5), scalar(2.4), scalar(0.5)),
        of(scalar(3, np.int64), scalar(3, np.int64), scalar(1, np.int64)),
    ],
    ("", "ConstantOfShape"): [
        of(i(2, 3)),
        of(i(2), value=ir.tensor(np.array([7], np.int64))),
        of(i(0, 2)),
    ],
    ("", "Trilu"): [
        of(n(3, 4)),
        of(n(2, 4, 3), -1, upper=0),
        of(n(3, 3), 1),
        of(n(1, 1), 9),
    ],
    ("", "NonZero"): [
        of(np.array([[0.0, 2.0], [-1.0, 0.0]])),
        of(i(0, 0)),
        of(np.array([True, False, True])),
    ],
    ("", "Tile"): [of(n(2, 3), [2, 1]), of(n(2), [3]), of(n(1, 2), [1, 0])],
    # arithmetic
    ("", "Add"): [*_binary(), of(n(3) * 1e30, n(3)), of(i(2, 3), i(5))],
    ("", "Sub"): [*_binary(), of(i(2, 3), i(5))],
    ("", "Mul"): [
        *_binary(),
        of(i(2, 3), i(5)),
        of(i(2**31, dtype=np.uint32), i(3, dtype=np.uint32)),
    ],
    ("", "Div"): [
        *_binary(away),
        of(i(7, -7, 7, -7), i(2, 2, -2, -2)),
        of(away(2), i(0) * 1.0, kink=True),
    ],
    ("", "Pow"): [
        *_binary(positive),
        of(away(2, 3), 2.0),
        of(away(3), 3),
        of(np.array([-1.5, 2.0]), i(3, 2)),
        of(np.array([0.0, 2.0, 0.0]), i(2, 3, 4)),
        of(np.array([2.0, 0.0]), np.array([0.0, 0.0]), kink=True),
    ],
    ("", "Mod"): [
        of(np.array([5.3, -5.3, 5.3]), np.array([2.0, -3.0, 2.5]), fmod=1),
        of(np.array([[5.3], [-7.1]]), np.array([2.0, -3.1]), fmod=1),
        of(i(7, -7, 7, -7), i(3, 3, -3, -3)),
        of(i(7, -7, 7, -7), i(3, 3, -3, -3), fmod=1),
    ],
    ("", "Neg"): [*_unary(), of(i(3, -2))],
    ("", "Sqrt"): [
        *_unary(np.array([0.1, 1.0, 1e6]))[4:],
        of(positive(2, 3)),
        of(positive(1)),
    ],
    ("", "Reciprocal"): _unary(np.array([-1e3, 0.02, 1e3])),
    ("", "Exp"): [
        *_unary(np.array([-800.0, -5.0, 0.0, 5.0, 40.0])),
        of(np.array([800.0]), kink=True),
    ],
    ("", "Log"): [
        *_unary(np.array([0.1, 1.0, 1e6]))[4:],
        of(positive(2, 3)),
        of(positive(1)),
    ],
    ("", "Abs"): [*_unary(), of(i(3, -2))],
    ("", "Sign"): [*_unary(), of(i(3, -2, 0))],
    ("", "Floor"): _unary(),
    ("", "Sin"): _unary(np.array([-30.0, 0.0, 1.6, 30.0])),
    ("", "Cos"): _unary(np.array([-30.0, 0.0, 1.6, 30.0])),
    ("", "Tanh"): _unary(),
    ("", "Sigmoid"): _unary(),
    ("", "Erf"): _unary(),
    ("", "Max"): _choice(),
    ("", "Min"): _choice(),
    ("", "Clip"): [
        of(away(2, 3), scalar(-0.9), scalar(0.8)),
        of(away(3), scalar(-0.25)),
        of(away(3), None, scalar(0.25)),
        of(away(3)),
        of(away(4), scalar(0.5), scalar(-0.5)),  # the upper limit wins
        of(ODD, scalar(-1.0), scalar(1.0), kink=True),
    ],
    ("", "Where"): [
        of(flags(2, 3), n(2, 3), n(2, 3)),
        of(flags(3), n(2, 1), scalar(2.0)),
        of(flags(5, 1, 1), n(3), n(2, 1)),
        of(np.array([True, False]), i(1), i(2, 3)),
        of(np.array([True, False]), np.array([1.0, np.nan]), np.array([np.inf, 2.0])),
    ],
    # comparison, logic, bits
    ("", "Equal"): [*_compare(), of(np.array([True, False]), np.array([True]))],
    ("", "Greater"): _compare(),
    ("", "Less"): _compare(),
    ("", "GreaterOrEqual"): _compare(),
    ("", "LessOrEqual"): _compare(),
    ("", "And"): [of(flags(2, 3), flags(3)), of(flags(1), flags(2, 2))],
    ("", "Or"): [of(flags(2, 3), flags(3)), of(flags(1), flags(2, 2))],
    ("", "Not"): [of(flags(2, 3)), of(scalar(True, bool))],
    ("", "IsNaN"): [of(ODD), of(n(2, 3))],
    ("", "BitwiseXor"): [
        of(i(6, -1, 0), i(3)),
        of(i(2**32 - 1, dtype=np.uint32), i(7, dtype=np.uint32)),
    ],
    ("", "BitShift"): [
        of(i(1, 2**31 + 5, dtype=np.uint32), i(3, dtype=np.uint32), direction="RIGHT"),
        of(i(1, 2**31 + 5, dtype=np.uint32), i(1, 31, dtype=np.uint32), direction="LEFT"),
    ],
    ("", "Cast"): [
        of(np.array([1.7, -1.7, 0.0, 300.0]), to=I64),
        of(i(3, -2, 0), to=F32),
        of(ODD, to=ir.DataType.BOOL),
        of(i(-1, 2**33 + 5), to=ir.DataType.UINT32),
        of(flags(3), to=F16),
    ],
    ("", "Identity"): [of(n(2, 3)), of(scalar(1.0)), of(i(1, 2))],
    (DOMAIN, "StopGradient"): [of(n(2, 3)), of(scalar(1.0))],
    # activations
    ("", "Relu"): _unary(),
    ("", "Gelu"): [
        *(of(x) for x in (n(2, 5), n(1), np.array([-40.0, -6.0, 0.0, 6.0, 40.0]))),
        *(of(x, approximate="tanh") for x in (n(2, 5), n(1), np.array([-40.0, -6.0, 0.0, 40.0]))),
    ],
    (MICROSOFT, "QuickGelu"): [
        of(n(2, 5)),
        of(n(2, 5), alpha=1.0),
        of(np.array([-40.0, 0.0, 40.0])),
        of(np.array([-90.0, 90.0]), alpha=-0.5),
    ],
    (MICROSOFT, "MoE"): [
        of(n(5, 8), n(5, 3), n(3, 12, 8), None, n(3, 8, 6), k=2, **_SWIGLU),
        of(
            n(4, 8),
            n(4, 3),
            n(3, 12, 8),
            n(3, 12),
            n(3, 8, 6),
            n(3, 8),
            activation_alpha=1.7,
            activation_beta=1.0,
            swiglu_limit=0.7,
            normalize_routing_weights=1,
            **_SWIGLU,
        ),
    ],
    (MICROSOFT, "QMoE"): [
        of(
            n(5, 32),
            n(5, 3),
            *(q8(3, 64, 16), positive(3, 64, 2), n(3, 64)),
            *(q8(3, 32, 16), positive(3, 32, 2), None),
            *(None, None, None, None, None, None, positive(5, 3)),
            k=2,
            block_size=16,
            **_SWIGLU,
        ),
        of(
            n(4, 48),
            n(4, 3),
            *(q8(3, 32, 24), positive(3, 32, 3), None),
            *(q8(3, 48, 8), positive(3, 48, 1), n(3, 48)),
            *(None, None, None),
            *(q8(3, 32, 2), q8(3, 48, 1)),
            k=1,
            block_size=16,
            activation_alpha=1.7,
            activation_beta=1.0,
            swiglu_limit=0.7,
            normalize_routing_weights=1,
            **_SWIGLU,
        ),
    ],
    # reductions and products
    ("", "ReduceSum"): [*_reduce(), of(n(2, 0), [1])],
    ("", "ReduceMean"): _reduce(),
    ("", "ReduceMax"): _reduce(tied=True),
    ("", "ReduceMin"): _reduce(tied=True),
    ("", "ReduceProd"): _reduce(positive),
    ("", "ArgMax"): [
        of(n(3, 4)),
        of(n(3, 4), axis=-1, keepdims=0),
        of(np.array([[2.0, 5.0, 5.0]]), axis=1),
        of(np.array([[2.0, 5.0, 5.0]]), axis=-1, select_last_index=1),
        of(np.array([[2.0, 5.0, 5.0]]), axis=1, keepdims=0, select_last_index=1),
    ],
    ("", "CumSum"): [
        of(n(3, 4), scalar(0, np.int64)),
        of(n(3, 4), scalar(-1, np.int64), exclusive=1),
        of(n(3, 4), scalar(1, np.int64), reverse=1),
        of(n(5), scalar(0, np.int64), exclusive=1, reverse=1),
        of(n(1), scalar(0, np.int64), exclusive=1),
    ],
    ("", "MatMul"): [
        of(n(2, 3), n(3, 5)),
        of(n(5, 2, 3), n(3, 4)),
        of(n(2, 3), n(5, 3, 4)),
        of(n(5, 1, 2, 3), n(2, 3, 1)),
        of(n(3), n(3)),
        of(n(3), n(2, 3, 4)),
        of(n(2, 4, 3), n(3)),
        of(n(1, 1), n(1, 1)),
        of(n(2, 0), n(0, 3)),
        of(n(3, 3) * 1e15, n(3, 3)),
    ],
    ("", "Gemm"): [
        of(n(2, 3), n(3, 5)),
        of(n(2, 3), n(3, 5), n(5)),
        of(n(3, 2), n(5, 3), n(2, 1), transA=1, transB=1, alpha=0.5, beta=2.0),
        of(n(2, 3), n(3, 5), scalar(0.3), beta=0.5),
    ],
    ("", "Softmax"): _softmax(),
    ("", "LogSoftmax"): _softmax(kink=True),
    ("", "Attention"): _attention(),
    (MICROSOFT, "MultiHeadAttention"): [
        of(n(2, 3, 8), n(2, 5, 8), n(2, 5, 6), num_heads=2),
        of(n(2, 3, 4), n(2, 3, 4), n(2, 3, 4), num_heads=4, scale=0.3, unidirectional=1),
        of(n(1, 1, 3), n(1, 1, 3), n(1, 1, 3), num_heads=1, unidirectional=1),
        of(n(2, 3, 8, scale=30.0), n(2, 5, 8, scale=30.0), n(2, 5, 8), num_heads=2),
        of(n(2, 3, 8), n(2, 5, 8), n(2, 5, 6), None, None, n(2, 2, 3, 5), num_heads=2),
    ],
    (MICROSOFT, "GroupQueryAttention"): [
        *(_group_query(mask) for mask in (False, True)),
        _cached(2, 1, [5, 3], 5),
        _cached(2, 1, [7, 3], 7, local_window_size=3, scale=0.7),
        _cached(1, 3, [5], 5, softcap=2.0),
        _cached(1, 3, [6], 6, local_window_size=2),
        _cached(2, 3, [3, 3], 3),
    ],
    ("", "RNN"): [
        *_recurrent(1),
        _recurrent(1, activations=["Relu"])[0],
        _recurrent(1, activations=["Relu", "Relu"])[2],
    ],
    ("", "LSTM"): [
        *_recurrent(4, states=2),
        of(n(3, 2, 4), n(1, 12, 4), n(1, 12, 3), None, None, None, None, n(1, 9), hidden_size=3),
    ],
    ("", "GRU"): [*_recurrent(3), *_recurrent(3, linear_before_reset=1)],
    ("", "RotaryEmbedding"): [
        of(n(2, 3, 5, 8), n(2, 5, 4), n(2, 5, 4)),
        of(n(2, 5, 24), n(2, 5, 4), n(2, 5, 4), num_heads=3),
        of(n(2, 3, 5, 8), n(7, 4), n(7, 4), i([0, 1, 2, 3, 6], [4, 4, 0, 5, 1]), interleaved=1),
        of(n(2, 5, 24), n(2, 5, 2), n(2, 5, 2), num_heads=3, rotary_embedding_dim=4),
        of(n(1, 3, 1, 8), n(1, 1, 2), n(1, 1, 2), rotary_embedding_dim=4, interleaved=1),
    ],
    (MICROSOFT, "RotaryEmbedding"): [
        of(n(2, 5, 24), i([0, 1, 2, 3, 6], [4, 4, 0, 5, 1]), n(7, 4), n(7, 4), num_heads=3),
        of(n(2, 3, 1, 8), i([1], [0]), n(7, 4), n(7, 4), interleaved=1),
        of(
            n(2, 5, 24),
            i([0, 1, 2, 3, 6], [4, 4, 0, 5, 1]),
            n(7, 2),
            n(7, 2),
            num_heads=3,
            rotary_embedding_dim=4,
        ),
    ],
    ("", "LayerNormalization"): _norm(bias=True),
    ("", "RMSNormalization"): _norm(bias=False),
    (MICROSOFT, "SkipLayerNormalization"): [
        of(n(2, 3, 8), n(2, 3, 8), n(8)),
        of(n(2, 3, 8), n(2, 3, 8), n(8), n(8), epsilon=1e-3),
        of(n(2, 3, 8), n(2, 3, 8), n(8), n(8), n(8), epsilon=1e-5),
    ],
    (MICROSOFT, "SkipSimplifiedLayerNormalization"): [
        of(n(2, 3, 8), n(2, 3, 8), n(8)),
        of(n(2, 3, 8), n(2, 3, 8), n(8), n(8), epsilon=1e-3),
    ],
    (MICROSOFT, "FusedMatMul"): [
        of(n(2, 3, 4), n(2, 5, 4), transB=1),
        of(n(2, 4, 3), n(4, 5), transA=1, alpha=0.5),
        of(n(4, 3), n(5, 4), transA=1, transB=1),
        of(n(3, 2, 4), n(5, 2, 4), transBatchA=1, transBatchB=1, transB=1, alpha=-2.0),
        of(n(4, 2, 3, 5), n(2, 3, 4, 6), transA=1, transBatchA=1),
        of(n(4), n(2, 4, 3), transA=1),
    ],
    (MICROSOFT, "EmbedLayerNormalization"): [
        of(_IDS, None, n(5, 8), n(3, 8), None, n(8), n(8)),
        of(_IDS, _IDS // 4, n(5, 8), n(2, 8), n(2, 8), n(8), n(8)),
        of(_IDS, None, n(5, 8), n(3, 8), None, n(8), n(8), None, _IDS[1:] // 2, epsilon=1e-3),
    ],
    (MICROSOFT, "BiasGelu"): [of(n(2, 3, 8), n(8)), of(n(5, 4), n(4))],
    (MICROSOFT, "Gelu"): [of(away(2, 3)), of(n(1)), of(WIDE)],
    (MICROSOFT, "FastGelu"): [of(n(2, 3, 8)), of(n(2, 8), n(8)), of(WIDE)],
    ("", "SimplifiedLayerNormalization"): [
        of(n(2, 3, 5), n(5)),
        of(n(2, 3, 5), n(3, 5), axis=1, epsilon=0.1),
        of(n(3, 4, scale=300.0), n(4)),
        of(np.zeros((2, 4)), n(4), epsilon=0.1),
    ],
    (MICROSOFT, "FusedGemm"): [
        of(away(2, 3), n(4, 3), n(4), activation="Relu", transB=1, alpha=0.5, beta=2.0),
        of(n(2, 3), n(3, 4), n(4), activation="LeakyRelu", activation_alpha=0.2),
        of(n(2, 3), n(3, 4), n(2, 1), activation="Elu", activation_alpha=0.3),
        of(
            *(n(2, 3), n(3, 4), n(4)),
            activation="HardSigmoid",
            activation_alpha=0.05,
            activation_beta=0.4,
        ),
        of(n(3, 2), n(3, 4), transA=1, activation="Sigmoid"),
        of(n(2, 3), n(3, 4), activation="Tanh"),
        of(n(2, 3), n(3, 4), activation="Softplus"),
    ],
    (MICROSOFT, "FusedConv"): [
        of(n(1, 2, 5, 5), n(3, 2, 3, 3), n(3), activation="Relu", pads=[1, 1, 1, 1]),
        of(n(1, 4, 6, 5), n(2, 2, 3, 2), group=2, strides=[2, 1], activation="Tanh"),
        of(n(1, 2, 4, 4), n(3, 2, 3, 3), n(3), n(1, 3, 2, 2), activation="Sigmoid"),
        of(n(1, 2, 4, 4), n(3, 2, 3, 3), None, n(1, 3, 2, 2)),
        of(n(1, 2, 4, 4), n(3, 2, 3, 3), activation="Clip", activation_params=[-20.0, 40.0]),
        of(n(1, 2, 4, 4), n(3, 2, 3, 3), activation="LeakyRelu", activation_params=[0.3]),
        of(n(1, 2, 4, 4), n(3, 2, 3, 3), activation="HardSigmoid", activation_params=[0.01, 0.5]),
    ],
    # ours
    (DOMAIN, "Dropout"): _dropout(),
    (DOMAIN, "CrossEntropy"): _cross_entropy(),
    (DOMAIN, "MeanSquaredError"): [
        of(n(2, 3), n(2, 3)),
        of(n(2, 3), n(3)),
        of(n(1), n(4, 1)),
        of(n(3) * 1e6, n(3)),
    ],
    # what foreign graphs have
    ("", "Pad"): [
        of(n(2, 3), [1, 0, 2, 3]),
        of(n(2, 3), [1, 2], scalar(0.5), [-1]),
        of(n(3, 4), [-1, 2, 1, -3], scalar(-2.0)),
        of(n(4, 3), [3, 1, 1, 2], mode="reflect"),
        of(n(2, 3), [1, 4, 2, 0], mode="edge"),
        of(n(3, 3), [1, 2], None, [1], mode="wrap"),
        of(i(1, 2), [1, 1], scalar(7, np.int64)),
        of(n(2, 0), [1, 1, 0, 0]),
    ],
    ("", "TopK"): [
        of(n(3, 5), [2]),
        of(n(4, 3), [4], axis=0),
        of(n(2, 5), [3], largest=0),
        of(np.array([[2.0, 5.0, 5.0, 2.0]]), [3], kink=True),
        of(n(2, 3), [0], axis=1),
        of(i(3, 1, 2), [2]),
    ],
    ("", "CastLike"): [of(n(2, 3), n(1)), of(i(3, -2), n(2)), of(n(3) * 9, i(1))],
    ("", "Ceil"): _unary(),
    ("", "Round"): [*_unary(), of(np.array([0.5, 1.5, -0.5, -2.5]), kink=True)],
    ("", "Sum"): [*_sums(), of(np.array([np.inf, 1.0]), np.array([-np.inf, 2.0]), kink=True)],
    ("", "Mean"): _sums(),
    ("", "LeakyRelu"): [*_unary(), of(away(5), alpha=0.3)],
    ("", "PRelu"): [
        of(away(2, 3, 4), n(3, 1)),
        of(away(2, 3), n(2, 3)),
        of(away(4), scalar(0.25)),
        of(away(2, 3), n(1)),
        of(ODD, n(1), kink=True),
    ],
    ("", "Elu"): [*_unary(), of(away(5), alpha=0.3)],
    ("", "Selu"): [*_unary(), of(away(5), alpha=0.3, gamma=2.0)],
    ("", "Softplus"): _unary(),
    ("", "Mish"): _unary(),
    ("", "HardSigmoid"): [*_unary(), of(away(5), alpha=0.3, beta=0.2)],
    ("", "HardSwish"): _unary(),
    ("", "ReduceSumSquare"): _norms(),
    ("", "ReduceL1"): _norms(away),
    ("", "ReduceL2"): [*_norms(), of(np.array([[0.0, 0.0], [3.0, 4.0]]), [1], kink=True)],
    ("", "ReduceLogSum"): _norms(positive),
    ("", "ReduceLogSumExp"): [*_norms(), of(np.array([[800.0, 799.0], [-800.0, -799.0]]), [1])],
    ("", "Einsum"): [
        of(n(2, 3), n(3, 4), equation="ij,jk->ik"),
        of(n(2, 5, 3), n(2, 4, 3), equation="bik, bjk -> bij"),
        of(n(2, 3, 4), n(3, 4), n(4, 2), equation="abc,bc,cd->ad"),
        of(n(2, 3), equation="ij->j"),
        of(n(3), n(4), equation="i,j->ij"),
        of(n(5, 3), n(5, 3, 2), equation="...i,...ij->...j"),
        of(n(2, 3), n(3, 4), equation="ij,jk"),
        of(n(2, 3), n(4), equation="ij,k->jk"),
        of(n(3, 3), equation="ii->i"),
        of(n(3, 3), equation="ii"),
        of(n(3, 3, 3), equation="iii"),
        of(n(2, 3, 3, 4), n(4, 5), equation="...iij,jk->...ik"),
        of(n(2, 3, 2, 3), n(3, 2), equation="ijij,ji->j"),
        of(n(2, 1, 3), n(2, 4, 3), equation="...i,...i->..."),
        of(n(3, 1), n(4, 5), n(5, 2), n(2), equation="ij,jk,kl,l->i"),
    ],
    ("", "BatchNormalization"): [
        of(n(2, 3, 4), n(3), n(3), n(3), positive(3)),
        of(n(5, 3), n(3), n(3), n(3), positive(3), epsilon=0.1),
        of(n(1, 2, 3, 2), n(2), n(2), n(2), positive(2), momentum=0.5),
    ],
    ("", "InstanceNormalization"): [
        of(n(2, 3, 4), n(3), n(3)),
        of(n(1, 2, 3, 2), n(2), n(2), epsilon=0.1),
        of(n(2, 3, 5, scale=300.0), n(3), n(3)),
    ],
    ("", "GroupNormalization"): [
        of(n(2, 4, 3), n(4), n(4), num_groups=2),
        of(n(1, 3, 2, 2), n(3), n(3), num_groups=3, epsilon=0.1),
        of(n(2, 4, 5), n(4), n(4), num_groups=1),
    ],
    ("", "Conv"): [
        of(n(2, 3, 8, 8), n(5, 3, 4, 4), n(5), strides=[4, 4]),  # patches
        of(n(2, 3, 5, 6), n(4, 3, 3, 3), pads=[1, 1, 1, 1]),
        of(n(1, 4, 7, 6), n(6, 2, 3, 2), n(6), group=2, strides=[2, 3], pads=[0, 1, 2, 0]),
        of(n(2, 3, 9), n(3, 1, 3), group=3, dilations=[2], pads=[3, 1]),
        of(n(2, 2, 8), n(2, 2, 3), strides=[3]),  # the last element is not reached
        of(n(1, 2, 5, 6), n(3, 2, 3, 2), strides=[2, 2], auto_pad="SAME_UPPER"),
        of(n(1, 2, 6), n(3, 2, 4), auto_pad="SAME_LOWER", kernel_shape=[4]),
        of(n(1, 2, 3, 4, 3), n(2, 2, 2, 2, 2), n(2), auto_pad="VALID"),
    ],
    ("", "ConvTranspose"): [
        of(n(2, 3, 2, 2), n(3, 5, 4, 4), n(5), strides=[4, 4]),
        of(n(1, 4, 3), n(4, 3, 3), group=2, strides=[2], pads=[1, 0], output_padding=[1]),
        of(n(2, 2, 3, 4), n(2, 3, 3, 2), dilations=[2, 1], pads=[1, 0, 0, 1]),
    ],
    ("", "AveragePool"): [
        of(n(2, 3, 6, 6), kernel_shape=[2, 2], strides=[2, 2]),
        of(n(1, 2, 5), kernel_shape=[3], pads=[1, 1]),
        of(n(1, 2, 5), kernel_shape=[3], pads=[1, 1], count_include_pad=1, strides=[2]),
        of(n(1, 2, 5, 4), kernel_shape=[3, 2], auto_pad="SAME_UPPER", strides=[2, 1]),
    ],
    ("", "MaxPool"): [
        of(n(2, 3, 6, 6), kernel_shape=[2, 2], strides=[2, 2]),
        of(n(1, 2, 5, 6), kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
        of(n(1, 2, 7), kernel_shape=[3], strides=[2], pads=[0, 1], dilations=[2]),
        of(n(1, 2, 6), kernel_shape=[3], strides=[2], ceil_mode=1),
        of(n(1, 2, 5), kernel_shape=[2], auto_pad="SAME_LOWER"),
        of(np.array([[[2.0, 2.0, 1.0]]]), kernel_shape=[2], kink=True),
    ],
    ("", "GlobalAveragePool"): [of(n(2, 3, 4)), of(n(1, 2, 3, 2))],
    ("", "GlobalMaxPool"): [of(n(2, 3, 4)), of(n(1, 2, 3, 2))],
    ("", "NegativeLogLikelihoodLoss"): _likelihood(),
    ("", "SoftmaxCrossEntropyLoss"): _likelihood(),
    ("", "Dropout"): [
        of(n(2, 3)),
        of(n(2, 3), scalar(0.3)),
        of(n(3), scalar(0.3), False),
    ],
    # integers
    ("", "QuantizeLinear"): [
        *_quantized(
            lambda x, s, z, **a: of(
                n(*x, scale=40.0), positive(*s), None if z is None else q8(*z), **a
            )
        ),
        *_quantized(
            lambda x, s, z, **a: of(n(*x), np.asarray(-positive(*s)), q8(*s, dtype=np.int8), **a)
        ),
        *[of(_HALVES, step, scalar(3, np.int8)) for step in _STEPS],
        of(ODD[:4] * 1e30, scalar(0.5), scalar(7, np.uint8)),  # what NaN becomes is not defined
        of(np.zeros((2, 3)), positive(3), q8(3)),
        of(n(3, 5) * 9e3, scalar(0.3), scalar(-5, np.int16)),
        of(n(3, 5) * 9e3, scalar(0.3), output_dtype=int(ir.DataType.UINT16)),
        of(n(3, 5) * 4, scalar(0.7), q4(dtype=ml_dtypes.int4)),
        of(n(4, 6) * 9, positive(2, 6), q4(2, 6), axis=0, block_size=2),
        of(n(3, 5) * 99, scalar(0.7), scalar(0, ml_dtypes.float8_e4m3fn)),
        of(n(3, 5) * 1e9, scalar(0.7), scalar(0, ml_dtypes.float8_e5m2)),
        # Not around 480, for which ONNX Runtime gives 448, and ONNX NaN.
        of(BEYOND, scalar(1.0), scalar(0, ml_dtypes.float8_e4m3fn), saturate=0),
        of(n(3, 5) * 99, positive(5), np.zeros(5, ml_dtypes.float8_e4m3fnuz)),
        of(n(3, 5) * 99, positive(3), output_dtype=int(ir.DataType.FLOAT8E5M2FNUZ), axis=0),
    ],
    ("", "DequantizeLinear"): [
        *_quantized(
            lambda x, s, z, **a: of(q8(*x), positive(*s), None if z is None else q8(*z), **a)
        ),
        of(q8(2, 3, dtype=np.int8), n(3), q8(3, dtype=np.int8)),
        of(q8(2, 3, dtype=np.int16), scalar(0.3), scalar(-(2**15), np.int16)),
        of(i(2**24, -7, 0, dtype=np.int32), scalar(0.5)),
        of(q4(3, 5, dtype=ml_dtypes.int4), scalar(0.3)),
        of(q4(4, 6), positive(2, 6), q4(2, 6), axis=0, block_size=2),
        of(np.arange(-6.0, 6.0).astype(ml_dtypes.float8_e4m3fn), scalar(0.3)),
    ],
    ("", "DynamicQuantizeLinear"): [
        of(n(2, 3)),
        of(n(4, 5) * 1e3),
        of(positive(3)),
        of(-positive(2, 2)),
        of(np.full((2, 3), 0.3)),
        of(np.full((2, 3), -7.0)),
        of(np.array([-1.0, 1.0, 0.25])),  # 127.5 in numbers, 127.49999 in float32
        of(np.zeros((2, 3))),
        of(scalar(2.0)),
    ],
    ("", "MatMulInteger"): [
        of(q8(2, 3), q8(3, 5)),
        of(q8(2, 3), q8(3, 5, dtype=np.int8), scalar(255, np.uint8), scalar(-128, np.int8)),
        of(q8(2, 7, 3), q8(3, 5), i(9, dtype=np.uint8), q8(5)),
        of(q8(2, 2, 3, dtype=np.int8), q8(2, 3, 1, dtype=np.int8)),
        of(np.full((1, 300), 255, np.uint8), np.full((300, 2), -128, np.int8)),
    ],
    ("", "QLinearMatMul"): [
        of(
            q8(2, 3),
            scalar(0.1),
            scalar(3, np.uint8),
            q8(3, 5),
            scalar(0.3),
            scalar(7, np.uint8),
            scalar(9.0),
            scalar(120, np.uint8),
        ),
        of(
            q8(2, 4, 3),
            scalar(0.1),
            scalar(3, np.uint8),
            q8(3, 5, dtype=np.int8),
            positive(5),
            q8(5, dtype=np.int8),
            scalar(70.0),
            scalar(120, np.uint8),
        ),
    ],
    (MICROSOFT, "QGemm"): [
        of(
            q8(2, 3),
            scalar(0.1),
            scalar(3, np.uint8),
            q8(3, 5, dtype=np.int8),
            positive(5),
            q8(5, dtype=np.int8),
            i(9, -700, 30, 0, 8, dtype=np.int32),
            scalar(70.0),
            scalar(120, np.uint8),
        ),
        of(
            q8(3, 2),
            scalar(0.1),
            scalar(3, np.uint8),
            q8(5, 3),
            positive(5),
            q8(5),
            None,
            None,
            None,
            transA=1,
            transB=1,
            alpha=0.5,
        ),
        of(q8(2, 3), scalar(0.1), scalar(3, np.uint8), q8(3, 1), scalar(0.3), scalar(7, np.uint8)),
    ],
    (MICROSOFT, "MatMulIntegerToFloat"): [
        of(q8(2, 3), q8(3, 5), scalar(0.3), scalar(0.7)),
        of(
            q8(2, 4, 7),
            q8(7, 5, dtype=np.int8),
            scalar(0.3),
            n(5),
            scalar(129, np.uint8),
            None,
            n(5),
        ),
        of(q8(4, 3), q8(3, 5), n(1), n(5), i(9, dtype=np.uint8), q8(5)),
        of(
            q8(1, 3, dtype=np.int8),
            q8(3, 1, dtype=np.int8),
            scalar(0.3),
            n(1),
            scalar(-128, np.int8),
        ),
    ],
    (MICROSOFT, "DynamicQuantizeMatMul"): [
        of(n(2, 3), q8(3, 5), scalar(0.3)),
        of(n(2, 4, 7), q8(7, 5, dtype=np.int8), n(5), q8(5, dtype=np.int8), n(5)),
        of(np.zeros((2, 3)), q8(3, 5), positive(5), None, n(5)),
    ],
    (MICROSOFT, "MatMulNBits"): [
        _bits(5, 32, 16, n(5, 2)),
        _bits(5, 40, 16, n(5, 3), q8(5, 2)),  # the last block is partly filled
        _bits(3, 17, 16, n(6), q8(3), None, n(3)),
        _bits(4, 32, 32, n(4, 1), None, None, n(4)),
        _bits(4, 32, 16, n(4, 2), n(4, 2)),  # zero points as floats
        _bits(4, 33, 16, n(4, 3), q8(4, 3), bits=8),
        _bits(4, 32, 16, n(8), None, bits=8),
        _bits(4, 96, 16, n(4, 6), q8(4, 2), bits=2),
        _bits(1, 1, 16, n(1, 1), q8(1, 1)),
    ],
    (MICROSOFT, "GatherBlockQuantized"): [
        of(q8(7, 16), i([1, 6], [0, 1]), n(7, 2), block_size=16),
        of(q8(7, 20), i(3, 3, -1), n(7, 3), q8(7, 2), block_size=16),
        of(q8(7, 16), i(0), n(7, 1), q8(7, 1), block_size=16, bits=8),
        of(q8(7, 8), i([2]), n(7, 2), q8(7, 1), block_size=16, bits=2, quantize_axis=-1),
        of(
            q4(3, 5, 32),
            i(1, 4),
            n(3, 5, 2),
            q4(3, 5, 2),
            block_size=16,
            gather_axis=1,
            quantize_axis=2,
        ),
        of(
            q4(32, 5, dtype=ml_dtypes.int4),
            i([1], [4]),
            n(2, 5),
            block_size=16,
            gather_axis=1,
            quantize_axis=0,
        ),
        of(q4(20, 3), i(19, 2), n(2, 3), block_size=16, gather_axis=0, quantize_axis=0),
        of(q8(7, 16), i(3, 0, -1), n(7, 2), q8(7, 1), block_size=16),
        of(q8(7, 8), i([5, 0]), n(7, 1), q8(7, 1), block_size=16),
    ],
    (MICROSOFT, "QLinearAdd"): _two_quantized(0.0953),
    (MICROSOFT, "QLinearMul"): _two_quantized(0.0953),
    (MICROSOFT, "QLinearSoftmax"): [
        of(q8(2, 5), scalar(0.1), scalar(9, np.uint8), *_SHARES[0], opset=13),
        of(q8(3, 4, 5, dtype=np.int8), scalar(0.03), None, *_SHARES[1], axis=1, opset=13),
        of(q8(3, 2, 5), scalar(0.03), scalar(9, np.uint8), *_SHARES[0], axis=1, opset=12),
        of(q8(3, 2, 5), scalar(0.03), scalar(9, np.uint8), *_SHARES[0], axis=-1, opset=12),
    ],
    ("", "Xor"): [of(flags(2, 3), flags(3)), of(flags(1), flags(2, 2))],
    ("", "BitwiseNot"): [of(i(6, -1, 0)), of(i(2**32 - 1, dtype=np.uint32))],
    **{
        ("", name): [
            of(i(6, -1, 0), i(3)),
            of(i(2**32 - 1, dtype=np.uint32), i(7, dtype=np.uint32)),
        ]
        for name in ("BitwiseAnd", "BitwiseOr")
    },
}

_PAST, _KEPT = (n(2, 3, 8), n(2, 3, 8), n(2, 3, 8)), (n(2, 2, 4, 4), n(2, 2, 4, 4))
_MERGED = (n(2, 3, 5, scale=2.0), n(5, 24), n(24))

SAMPLES[MICROSOFT, "MultiHeadAttention"] += [
    of(n(2, 3, 8), n(2, 5, 8), n(2, 5, 6), n(22), i(3, 5, dtype=np.int32), num_heads=2),
    of(
        *(n(2, 3, 8, scale=3.0), n(2, 5, 8, scale=3.0), n(2, 5, 8), n(24)),
        *(flags(2, 5).astype(np.int32), n(1, 2, 3, 5)),
        num_heads=2,
        mask_filter_value=-3.0,
    ),
    of(*_PAST, n(24), i([0, 1] * 3 + [1], [1] * 7, dtype=np.int32), None, *_KEPT, num_heads=2),
    of(*_PAST, None, None, n(2, 1, 3, 7), *_KEPT, num_heads=2, unidirectional=1, scale=0.0),
    of(n(2, 3, 8), n(2, 2, 5, 4), n(2, 2, 5, 4), num_heads=2),
    of(n(2, 3, 8), n(2, 2, 5, 4), n(2, 2, 5, 4), n(24), num_heads=2),
]
SAMPLES[MICROSOFT, "Attention"] = [
    of(n(2, 3, 5), n(5, 24), n(24), num_heads=2),
    of(n(2, 3, 5), n(5, 22), n(22), num_heads=2, qkv_hidden_sizes=[8, 8, 6]),
    of(*_MERGED, i(1, 3, dtype=np.int32), num_heads=2, scale=0.3),
    of(*_MERGED, i(2, 3, 1, 0, dtype=np.int32), num_heads=2),
    of(*_MERGED, i([0, 2, 1], [0, -1, 1], dtype=np.int32), num_heads=2),
    of(
        *(*_MERGED, flags(2, 3, 3).astype(np.int32), None, n(2, 2, 3, 3)),
        num_heads=2,
        mask_filter_value=-3.0,
    ),
    of(*_MERGED, i([1, 0, 1], [1, 1, 0], dtype=np.int32), num_heads=2, unidirectional=1),
    of(*_MERGED, None, n(2, 2, 2, 4, 4), num_heads=2, unidirectional=1),
    of(*_MERGED, i([0, 1] * 3 + [1], [1] * 7, dtype=np.int32), n(2, 2, 2, 4, 4), num_heads=2),
]
SAMPLES[MICROSOFT, "GroupQueryAttention"] += [
    _packed(2, 3, [3, 3], 3),
    _packed(2, 1, [7, 3], 7, past=7),
    _packed(1, 3, [5], 5, past=7, rotary_interleaved=1, local_window_size=2),
    _packed(2, 3, [3, 3], 3, past=7, local_window_size=2),
]
SAMPLES[MICROSOFT, "RotaryEmbedding"] += [
    of(n(2, 5, 24), i(2), n(7, 4), n(7, 4), num_heads=3, scale=1.0, is_packed_batching=0),
    of(n(2, 3, 4, 8), i(3), n(7, 4), n(7, 4), interleaved=1),
    of(n(2, 5, 24), i([0, 1, 2, 3, 6], [4, 4, 0, 5, 1]), n(7, 4), n(7, 4)),
]
SAMPLES[MICROSOFT, "EmbedLayerNormalization"] += [
    of(_IDS, None, n(5, 8), n(3, 8), None, n(8), n(8), _IDS % 3, mask_index_type=1)
]
SAMPLES |= {
    (MICROSOFT, "BiasSoftmax"): [
        of(n(2, 3, 4, 5), n(2, 1, 1, 5), axis=3, is_inner_broadcast=1),
        of(n(2, 3, 5), n(1, 3, 5), is_inner_broadcast=0),
    ],
    (MICROSOFT, "GemmFastGelu"): [of(n(2, 3, 4), n(4, 5)), of(n(3, 4), n(4, 5), n(5))],
    (MICROSOFT, "BiasAdd"): [of(n(2, 3, 4), n(4), n(2, 3, 4))],
    (MICROSOFT, "BiasSplitGelu"): [of(n(2, 3, 8), n(8))],
    (MICROSOFT, "GroupNorm"): [
        of(n(2, 3, 5, 8), n(8), n(8), groups=4, activation=1),
        of(n(2, 8, 3, 5), n(8), n(8), groups=2, activation=0, channels_last=0, epsilon=0.1),
    ],
    (MICROSOFT, "SkipGroupNorm"): [
        of(n(2, 3, 5, 8), n(8), n(8), n(2, 8), n(8), groups=4, activation=1),
        of(n(2, 3, 5, 8), n(8), n(8), n(2, 3, 5, 8), groups=2, activation=0),
    ],
    (MICROSOFT, "NhwcConv"): [
        of(n(2, 5, 6, 4), n(3, 3, 2, 4), n(3), pads=[1, 0, 1, 0]),
        of(n(1, 5, 6, 4), n(6, 2, 2, 2), group=2, strides=[2, 1]),
    ],
    (MICROSOFT, "RelativePositionBias"): [
        of(n(8, 3), scalar(9, np.int64), scalar(9, np.int64), max_distance=6),
        of(n(8, 3), i(30), i(30), max_distance=20, is_bidirectional=1),
    ],
    (MICROSOFT, "GatedRelativePositionBias"): [
        of(n(2, 3, 8), n(8), n(1, 2, 3, 3), n(4, 6), n(6), n(1, 2, 1, 1), num_heads=2)
    ],
    # losses
    (DOMAIN, "WeightedCrossEntropy"): [
        of(n(2, 3, 5), i([1, -100, 0], [4, 2, -100]), positive(5)),
        of(n(3, 5), i(0, 4, -1), positive(5), label_smoothing=0.1, z_loss=0.3, ignore_index=-1),
        of(n(4, 3, scale=400.0), i(2, 0, 1, 2), positive(3) / 100),
        of(n(2, 5), i(-100, -100), positive(5), label_smoothing=0.1, kink=True),
        of(n(2, 3), i(0, 2), np.array([0.0, 1.0, 0.0]), kink=True),  # Σ w is 0
    ],
    (DOMAIN, "BinaryCrossEntropy"): [
        of(n(2, 3), positive(2, 3) / 2),
        of(n(2, 3), np.array([[0.0, 1.0, 1.0], [1.0, 0.0, 0.0]]), positive(3)),
        of(WIDE, np.arange(12.0) % 2, scalar(3.0)),
    ],
    (DOMAIN, "MeanAbsoluteError"): [of(n(2, 3), n(2, 3)), of(n(4) * 1e6, n(4)), of(n(1), n(1))],
    (DOMAIN, "HuberLoss"): [
        of(n(2, 3), n(2, 3)),
        of(n(5, scale=4.0), n(5), delta=0.3),
        of(np.array([0.0, 0.4, -0.6, 9.0]), np.zeros(4)),
    ],
    # what image and sequence models have
    ("", "Tan"): _unary(np.array([-30.0, 0.0, 1.3, 30.0])),
    ("", "Asin"): _inside(),
    ("", "Acos"): _inside(),
    ("", "Atan"): _unary(),
    ("", "Sinh"): _unary(np.array([-30.0, 0.0, 1.3, 30.0])),
    ("", "Cosh"): _unary(np.array([-30.0, 0.0, 1.3, 30.0])),
    ("", "Asinh"): _unary(np.array([-1e3, -1e-3, 0.0, 1e3])),
    ("", "Acosh"): [of(1.1 + positive(2, 3)), of(np.array([1.0, 0.5, np.inf]), kink=True)],
    ("", "Atanh"): _inside(),
    ("", "DepthToSpace"): [
        of(n(2, 8, 2, 3), blocksize=2),
        of(n(1, 9, 1, 2), blocksize=3, mode="CRD"),
    ],
    ("", "SpaceToDepth"): [of(n(2, 2, 4, 6), blocksize=2), of(n(1, 1, 3, 3), blocksize=3)],
    ("", "ReverseSequence"): [
        of(n(4, 3, 2), i(1, 4, 2)),
        of(n(3, 4), i(4, 1, 3), time_axis=1, batch_axis=0),
    ],
    ("", "GridSample"): [
        *(
            of(n(2, 3, 4, 5), n(2, 2, 3, 2), mode=mode, padding_mode=padding, align_corners=align)
            for mode in ("linear", "cubic")
            for padding in ("zeros", "border", "reflection")
            for align in (0, 1)
        ),
        of(n(1, 2, 3, 4, 2), n(1, 2, 1, 3, 3), padding_mode="reflection"),
        of(n(2, 1, 1, 3), n(2, 2, 1, 2, scale=2.0), padding_mode="reflection", align_corners=1),
        of(
            n(1, 2, 3, 3),
            scalar([[[[-1, 1], [0, 0]]]]),
            padding_mode="border",
            align_corners=1,
            kink=True,
        ),
        of(n(1, 2, 3, 3), scalar([[[[-9, 1e4], [0, -1e4]]]]), kink=True),
        of(n(2, 2, 4, 5), n(2, 3, 1, 2), mode="nearest", kink=True),
        of(
            n(2, 2, 4, 5),
            n(2, 3, 1, 2, scale=3.0),
            mode="nearest",
            padding_mode="reflection",
            kink=True,
        ),
    ],
    ("", "DFT"): [
        of(n(2, 5, 1)),
        of(n(2, 6, 2)),
        of(n(2, 4, 3, 2), None, 1),
        of(n(2, 4, 3, 2), None, -3, inverse=1),
        of(n(2, 5, 1), None, 1, onesided=1),
        of(n(2, 8, 1), None, 1, onesided=1),
        of(n(2, 4, 1), None, 1, inverse=1),
        of(n(2, 5, 1), 7, 1),
        of(n(2, 5, 2), 3, 1),
        of(n(2, 5, 2), 8, 1, inverse=1),
        of(n(2, 5, 1), 8, 1, onesided=1),
        of(n(2, 7, 1), 4, 1, onesided=1),
        of(n(1, 1, 1)),
        of(n(2, 5, 2), None, 1, inverse=1, onesided=1),
        of(n(2, 5, 2), 8, 1, inverse=1, onesided=1),
        of(n(2, 4, 2), 4, 1, inverse=1, onesided=1),
    ],
    ("", "STFT"): [
        of(n(2, 16, 1), 3, n(6)),
        of(n(2, 16, 1), 4, None, 5),
        of(n(1, 9, 1), 2, n(4), 4, onesided=0),
        of(n(2, 9, 2), 2, n(5), onesided=0),
    ],
    ("", "Col2Im"): [
        of(n(2, 12, 8), [4, 5], [2, 2], strides=[2, 1], pads=[1, 0, 0, 0]),
        of(n(1, 8, 16), [6, 5], [2, 2], dilations=[2, 1]),
        of(n(2, 12, 9), [4, 5], [2, 3]),
    ],
    ("", "MaxUnpool"): [
        of(
            n(1, 2, 2, 2),
            i([[[0, 3], [9, 15]], [[16, 19], [24, 31]]]),
            kernel_shape=[2, 2],
            strides=[2, 2],
        ),
        of(
            n(1, 1, 2, 2),
            i([[[1, 4], [12, 18]]]),
            [1, 1, 5, 5],
            kernel_shape=[2, 2],
            strides=[2, 2],
        ),
    ],
    ("", "LpNormalization"): [
        of(away(2, 3)),
        of(away(2, 3, 4), axis=1, p=1),
        of(np.array([[0.0, 0.0], [3.0, 4.0]]), kink=True),
    ],
    ("", "LRN"): [
        of(n(2, 5, 3, 2), size=3, alpha=0.5),
        of(n(1, 4, 2, 2), size=5, beta=0.5, bias=2.0, alpha=0.3),
    ],
    ("", "Compress"): [
        of(n(3, 4), np.array([True, False, True]), axis=0),
        of(n(2, 4), np.array([False, True]), axis=-1),
        of(n(2, 3), np.array([False, True, True, False, True])),
    ],
    ("", "OneHot"): [
        of(i([0, 2], [-1, 5]), [3], n(2)),
        of(i(1, 0), [4], n(2), axis=0),
        of(i([1, 0]), [2], i(0, 1), axis=1),
    ],
    ("", "LpPool"): [
        of(n(2, 3, 7), kernel_shape=[3], strides=[2]),
        of(n(1, 2, 5, 6), kernel_shape=[2, 3], pads=[1, 0, 1, 1], p=3),
        of(n(1, 2, 6), kernel_shape=[3], strides=[2], ceil_mode=1, p=1),
        of(np.zeros((1, 1, 4)), kernel_shape=[2], kink=True),
    ],
}


def _resized() -> list[Sample]:
    """Up and down, by whole and odd factors, in all modes."""
    scales = [1.0, 1.0, 2.0, 3.0], [1.0, 1.0, 0.6, 1.7]
    samples = []
    for mode in ("half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric"):
        how = {"coordinate_transformation_mode": mode}
        samples += [of(n(1, 2, 4, 5), None, scales[1], mode="linear", **how)]
        samples += [of(n(1, 2, 4, 5), None, scales[1], mode="cubic", **how)]
        for rounding in ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil"):
            samples += [of(n(1, 2, 3, 4), None, scales[1], nearest_mode=rounding, **how)]
    symmetric = {"coordinate_transformation_mode": "half_pixel_symmetric", "mode": "linear"}
    crop = {"coordinate_transformation_mode": "tf_crop_and_resize", "mode": "linear"}
    region = [0.0, 0.0, 0.2, 0.3, 1.0, 1.0, 0.7, 1.4]
    sizes = {"axes": [2, 3], "mode": "linear"}
    corners = {"coordinate_transformation_mode": "align_corners"}
    return [
        *samples,
        of(n(1, 2, 4, 5), None, scales[0]),
        of(n(1, 2, 4, 5), None, scales[1], **symmetric),
        of(n(1, 2, 4, 5), None, scales[1], mode="cubic", exclude_outside=1, cubic_coeff_a=-0.5),
        of(n(1, 2, 4, 5), None, None, [1, 2, 3, 1], mode="linear"),
        of(n(1, 2, 4, 5), None, None, [7, 1], **corners, **sizes),
        of(n(1, 2, 8, 9), None, None, [3, 12], antialias=1, **sizes),
        of(n(1, 2, 8, 9), None, None, [3, 12], antialias=1, mode="cubic", axes=[2, 3]),
        of(n(1, 2, 4, 5), region, None, [1, 2, 3, 6], extrapolation_value=7.0, **crop),
        of(n(1, 2, 3, 4, 2), None, None, [1, 2, 5, 3, 3], mode="linear"),
        of(n(2, 3, 5), None, [1.0, 1.0, 1.5], mode="linear"),
    ]


SAMPLES["", "Resize"] = _resized()
SAMPLES["", "ScatterElements"] += [
    *(s for how in ("mul", "max", "min") for s in _scatter(reduction=how)),
    of(n(2, 3), i([1, 1, 1], [0, 1, 1]), n(2, 3), reduction="mul"),
    of(n(2, 3), i([1, 1, 1], [1, 1, 1]), n(2, 3), reduction="max"),
    of(n(2, 2), i([1, 1], [1, 0]), np.array([[0.0, 0.0], [0.0, 2.0]]), reduction="mul"),
]
SAMPLES["", "ScatterND"] += [
    of(n(3, 4), i([0, 1], [2, -1]), n(2), reduction="max"),
    of(n(3, 4), i([1], [1], [-3]), n(3, 4), reduction="mul"),
    of(n(3, 4), i([1], [1]), n(2, 4), reduction="min"),
]
SAMPLES["", "GatherND"] += [
    of(n(2, 3, 4), i([1], [-1]), batch_dims=1),
    of(n(2, 3, 4, 2), i([[0], [3], [0]], [[1], [-2], [0]]), batch_dims=2),
]
SAMPLES["", "ReduceProd"] += [
    of(np.array([[0.0, 2.0, 3.0], [0.0, 0.0, 1.0], [5.0, 1.0, 2.0]]), [1]),
    of(np.array([2.0, 0.0]), None, keepdims=0),
]
SAMPLES["", "Pow"] += [
    of(np.array([0.0, -2.0, 0.0, 3.0]), np.asarray([0, 3, 2, 0], np.int64)),
    of(np.array([-2.0, 0.0, 2.0]), 3.0),
]
SAMPLES["", "AveragePool"] += [
    of(n(1, 2, 6), kernel_shape=[3], strides=[2], ceil_mode=1),
    of(n(1, 2, 6, 5), kernel_shape=[3, 2], strides=[2, 2], pads=[1, 0, 0, 1], ceil_mode=1),
    of(
        *[n(1, 2, 6, 5)],
        kernel_shape=[3, 2],
        strides=[2, 2],
        pads=[1, 0, 0, 1],
        ceil_mode=1,
        count_include_pad=1,
    ),
]
SAMPLES[MICROSOFT, "GroupQueryAttention"] += [
    _with_sinks(_cached(2, 1, [7, 3], 7), 11),
    _with_sinks(_cached(1, 3, [5], 5, local_window_size=2), 11),
    _with_sinks(_group_query(False), 11),
]
SAMPLES["graphgen", "SinkAttention"] = [
    _with_sinks(of(*_heads(4, 2, 3, 5), scale=0.3), 3),
    _with_sinks(of(*_heads(4, 2, 3, 5), flags(2, 1, 3, 5), softcap=1.5), 3),
    _with_sinks(
        of(n(2, 3, 8), n(2, 3, 8), n(2, 3, 8), q_num_heads=4, kv_num_heads=4, is_causal=1), 3
    ),
]

ROIS = scalar([[0.4, 1.3, 6.1, 5.2], [2.2, -0.6, 4.9, 3.7], [-3.1, 0.2, 9.7, 8.8]])
"""One inside, and others beyond the borders."""

SAMPLES |= {
    ("", "CumProd"): [
        *(
            of(n(3, 4, 2), 1, exclusive=exclusive, reverse=reverse)
            for exclusive in (0, 1)
            for reverse in (0, 1)
        ),
        of(scalar([[1.5, 0.0, -2.0, 0.0, 3.0], [0.5, 2.0, 0.0, 1.0, -1.0]]), -1),
        of(n(1), 0),
        of(i(2, -3, 5), 0, reverse=1),
    ],
    ("", "TensorScatter"): [
        of(n(2, 3, 6, 2), n(2, 3, 2, 2)),
        of(n(2, 3, 6, 2), n(2, 3, 2, 2), i(1, 4)),
        of(n(2, 5, 3), n(2, 4, 3), i(3, 9), axis=1, mode="circular"),
        of(n(2, 3, 4), n(2, 3, 4), i(0, 0), axis=-1),
    ],
    ("com.microsoft", "Inverse"): [of(n(3, 3)), of(n(2, 1, 4, 4)), of(n(1, 1)), of(n(0, 2, 2))],
    ("", "Det"): [
        of(n(3, 3)),
        of(n(2, 1, 4, 4)),
        of(n(1, 1)),
        of(n(2, 2) * 1e3),
        of(n(9, 9)),
        of(np.arange(18.0).reshape(2, 3, 3) * [[[1.0]], [[0.0]]]),  # singular, of ranks 2 and 0
        of(n(0, 3, 3)),
    ],
    ("", "RoiAlign"): [
        *(
            of(
                n(2, 3, 5, 6),
                ROIS,
                i(1, 0, 1),
                output_height=2,
                output_width=3,
                mode=mode,
                sampling_ratio=ratio,
                coordinate_transformation_mode=how,
                spatial_scale=0.7,
            )
            for mode in ("avg", "max")
            for ratio in (0, 2)
            for how in ("half_pixel", "output_half_pixel")
        ),
        of(n(1, 1, 1, 1), scalar([[0.3, -0.2, 0.8, 0.4]]), i(0), sampling_ratio=1),
        of(n(1, 2, 3, 3), scalar([[2.0, 2.0, 2.0, 2.0], [-9, -9, -7, -7]]), i(0, 0), kink=True),
        of(n(1, 2, 3, 3), n(0, 4), i(0)[:0], sampling_ratio=2),
    ],
    ("", "DeformConv"): [
        of(n(2, 4, 5, 6), n(3, 4, 3, 2), n(2, 12, 3, 5)),
        of(
            n(2, 4, 5, 6),
            n(6, 2, 2, 3),
            n(2, 24, 3, 2),
            n(6),
            n(2, 12, 3, 2),
            group=2,
            offset_group=2,
            pads=[1, 0, 0, 2],
            strides=[2, 2],
            dilations=[1, 2],
        ),
        of(n(1, 1, 3, 3), n(1, 1, 2, 2), n(1, 8, 2, 2) * 5, None, n(1, 4, 2, 2)),
        of(n(1, 1, 3, 3), n(1, 1, 1, 1), n(1, 2, 3, 3) * 0, n(1), kernel_shape=[1, 1], kink=True),
    ],
}

SAMPLES["", "BatchNormalization"] += [
    of(n(4, 3, 2), n(3), n(3), n(3), away(3) ** 2, training_mode=1),
    of(n(5, 2) + 30.0, n(2), n(2), n(2), away(2) ** 2, training_mode=1, momentum=0.3, epsilon=0.1),
    of(n(2, 3, 2, 2, 2), n(3), n(3), n(3), away(3) ** 2, training_mode=1),
]

_EQUAL = np.array([[1.0, 1, 1], [0, 2, 2], [2, 0, 2], [2, 2, 0]])  # scores of experts
SAMPLES[MICROSOFT, "MoE"] += [
    of(n(4, 8), _EQUAL, n(3, 12, 8), None, n(3, 8, 6), k=k, kink=True, **_SWIGLU) for k in (1, 2)
]
SAMPLES[MICROSOFT, "QMoE"] += [
    of(
        n(4, 32),
        _EQUAL,
        *(q8(3, 64, 16), positive(3, 64, 2), n(3, 64)),
        *(q8(3, 32, 16), positive(3, 32, 2), None),
        k=1,
        block_size=16,
        normalize_routing_weights=1,
        kink=True,
        **_SWIGLU,
    ),
    *(  # of negative shares, too
        of(
            n(5, 32),
            n(5, 3),
            *(q8(3, 64, 16), positive(3, 64, 2), n(3, 64)),
            *(q8(3, 32, 16), positive(3, 32, 2), None),
            *(None, None, None, None, None, None, n(5, 3)),
            k=2,
            block_size=16,
            normalize_routing_weights=normalized,
            kink=True,
            **_SWIGLU,
        )
        for normalized in (0, 1)
    ),
]

SAMPLES[MICROSOFT, "LinearAttention"] = [
    # Every rule, more heads of queries than of keys, decays of keys, and a past.
    of(
        n(2, 5, 8),
        n(2, 5, 8),
        n(2, 5, 6),
        n(2, 2, 4, 3),
        -positive(2, 5, 2),
        positive(2, 5, 2),
        q_num_heads=2,
        kv_num_heads=2,
    ),
    of(
        n(2, 3, 8),
        n(2, 3, 8),
        n(2, 3, 6),
        None,
        None,
        positive(2, 3, 1),
        q_num_heads=2,
        kv_num_heads=2,
        update_rule="delta",
        scale=0.7,
    ),
    of(
        n(1, 4, 16),
        n(1, 4, 8),
        n(1, 4, 6),
        n(1, 2, 4, 3),
        -positive(1, 4, 8),
        q_num_heads=4,
        kv_num_heads=2,
        update_rule="gated",
    ),
    of(n(1, 1, 4), n(1, 1, 4), n(1, 1, 3), q_num_heads=1, kv_num_heads=1, update_rule="linear"),
]
SAMPLES[MICROSOFT, "CausalConvWithState"] = [
    of(n(2, 3, 5), n(3, 1, 4), n(3), n(2, 3, 3), activation="silu"),
    of(n(1, 2, 1), n(2, 1, 3)),
]
