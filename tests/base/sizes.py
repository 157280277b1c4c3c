"""Small graphs whose sizes depend on symbols, and bindings of these to run them with.

A row is: inputs, bindings, nodes, and given inputs (others are random numbers from 0 to 2). `#5`,
`#0.5` and `#[1, 2]` are constants. Bindings are those that the runtime runs; one of 0 is left out
where it does not.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

FAR, BIG = 2**63 - 1, 10**9


class Case(NamedTuple):
    """A graph, with inputs that are given instead of drawn."""

    inputs: str
    bindings: str
    nodes: str
    given: Mapping[str, Any] = MappingProxyType({})


X, N = "float[n, 4] x", "n=5; n=1; n=8; n=2; n=0"
XM, NM = "float[n, m] x", "n=4 m=5; n=2 m=3; n=0 m=3"
XZ, BOTH = "float[n] x, float[m] z", "n=5 m=1; n=1 m=5; n=5 m=5; n=1 m=0"
SIZES = "s = Shape (x) k = Gather (s, #0) m = Gather (s, #1) "
ONE = {"k": np.array(1), "c": np.array(True)}

SLICED = (
    *((0, BIG, 0, 1), (0, BIG, 0, 2), (3, BIG, 0, 1), (2, 2**31 - 1, 0, 1), (2, FAR, 0, 3)),
    *((0, 4, 0, 1), (1, 4, 0, 1), (2, 3, 0, 1), (0, -1, 0, 1), (0, -3, 0, 1), (1, -1, 0, 2)),
    *((-3, FAR, 0, 1), (-3, -1, 0, 1), (-1, -FAR, 0, -1), (FAR, -FAR, 0, -1), (-1, -4, 0, -1)),
    *((3, 0, 0, -1), (3, -FAR, 0, -1), (0, 0, 0, 1), (5, 2, 0, 1), (-2, 2, 0, 1)),
    *((-FAR, FAR, 0, 1), (-FAR, 3, 0, 1), (-BIG, BIG, 0, 1), (BIG, -BIG, 0, -1)),
    *((BIG, -BIG, 0, -2), (BIG, FAR, 0, 1), (0, BIG, -2, 1), (1, BIG, 1, 1), (0, BIG, 1, 3)),
    *((-3, BIG, 1, 1), (BIG, -BIG, 1, -1), (-1, -5, 1, -1), (-1, -4, 1, -1), (2, 0, 1, -1)),
    *((0, -1, 1, 1), (0, -5, 1, 1), (-9, 2, 1, 1), (9, -9, 1, -2)),
)
SLICES = [
    Case(
        X, N, " ".join(f"y{i} = Slice (x, #[{s}], #[{e}], #[{a}], #[{t}])" for s, e, a, t in [row])
    )
    for i, row in enumerate(SLICED)
]
SLICES += [
    Case(X, N, "y = Slice (x, #[0, 1], #[1000000000, 3]) z = Slice (x, #[0, 1], #[9, 3], #[1, 0])"),
    Case(X, N, "y = Slice (x, #[1, 0], #[-1, 2], #[-1, -2], #[2, 1])"),
    Case(X + ", float[m] z", "n=5 m=3; n=2 m=6; n=3 m=0", "s = Shape (z) y = Slice (x, #[0], s)"),
    Case(
        X + ", float[m] z",
        "n=5 m=3; n=2 m=0; n=4 m=1",
        "s = Shape (z) e = Sub (s, #[1]) y = Slice (x, #[0], e, #[0]) f = Add (s, s) "
        "a = Slice (x, s, f, #[0]) b = Slice (x, e, f, #[0]) c = Slice (x, s, #[3], #[0])",
    ),
    Case(
        "float[n, 4] x, float[m] z",
        "n=5 m=3; n=2 m=6; n=3 m=0",
        "s = Shape (z) y = Slice (x, s, #[9223372036854775807], #[0]) e = Sub (s, #[1]) "
        "a = Slice (x, e, #[2147483647], #[0]) t = Concat <axis = 0> (z, z, z) "
        "b = Slice (t, s, #[9223372036854775807], #[0])",
    ),
    Case(
        "float[n, 4] x",
        "n=3; n=6",
        "s = Shape (x) c = Concat <axis = 0> (x, x, x) k = Gather (s, #[0]) t = Add (k, k) "
        "a = Slice (c, k, t, #[0]) b = Slice (c, t, #[1000000000], #[0]) d = Add (a, x) ",
    ),
    Case(
        X,
        N,
        "a = Pad (x, #[0, 0, 1, 0]) b = Slice (a, #[0], #[2147483647], #[0]) "
        "c = Slice (a, #[2], #[2147483647], #[0]) d, e = Split <num_outputs = 2> (a) "
        "f = Slice (e, #[0], #[9223372036854775807], #[0], #[2])",
    ),
    Case(
        "float[1, 4] x, float[m] z",
        "m=0; m=3",
        "s = Shape (z) a = Slice (x, #[0], s, #[0]) b = Shape (a) c = Slice (z, #[0], #[1])",
    ),
    Case(X, N, SIZES + "e = Unsqueeze (k, #[0]) y = Slice (x, #[0], e, #[0])"),
    Case(  # nothing is left of a size of 1 but where n is 0
        "float[1, n] x",
        "n=0; n=1; n=3",
        "s = Shape <start = 1> (x) t = Add (s, s) y = Slice (x, t, #[1000000000], #[0])",
    ),
    Case(X, N, SIZES + "j = Sub (k, #1) e = Unsqueeze (j, #[0]) y = Slice (x, #[0], e, #[0])"),
    Case(
        "float[n, 4, m] x",
        "n=5 m=2; n=1 m=3",
        "s = Shape (x) a = Slice (s, #[0], #[2]) b = Slice (s, #[-1], #[1000000000]) "
        "c = Slice (s, #[-1], #[-1000000000], #[0], #[-1]) d = Slice (s, #[0], #[-9]) "
        "e = Slice (s, #[-9], #[-1]) f = Slice (s, #[2], #[0], #[0], #[-2])",
    ),
    Case(
        "float[4, n] x, float[m] z",
        "n=2 m=0; n=3 m=1; n=1 m=3; n=2 m=4; n=0 m=9",
        "s = Shape (z) f = Neg (s) y = Slice (x, f, #[9223372036854775807], #[0]) "
        "t = Concat <axis = 0> (z, #[0.5]) u = Shape (t) g = Neg (u) "
        "b = Slice (x, g, #[2147483647], #[0]) c = Slice (b, f, #[9223372036854775807], #[0])",
    ),
    Case(
        "float[m] z",
        "m=1; m=3; m=4",
        "s = Shape (z) f = Neg (s) y = Slice (#[1.5, 2.5, 3.5, 4.5], f, #[9223372036854775807]) "
        "b = Add (y, z)",
    ),
    Case(X + ", int64[1] a", "n=5", "y = Slice (x, #[1], #[3], a)", {"a": np.array([1])}),
    Case(X + ", int64[1] s", N, "y = Slice (x, s, #[3], #[0])", {"s": np.array([1])}),
    Case(X + ", int64[1] s", N, "y = Slice (x, #[0], #[3], #[0], s)", {"s": np.array([2])}),
]

REPEATED = (
    "s = Shape (x) b = Slice (s, #[0], #[1]) m = Slice (s, #[3], #[5]) "
    "k = Concat <axis = 0> (b, #[-1], m) y = Reshape (x, k)"
)
"""As exporters write repeat_interleave: (n, 4, m, 8), but (n, 0, 2, 8) where m is 0."""

EMPTY = [
    *(
        Case(
            f"float[n, 2, 2, m, 8] x, float[n, {heads}, 5, 8] q",
            "n=3 m=2; n=2 m=0; n=0 m=2",
            f"{REPEATED} t = Transpose <perm = [0, 1, 3, 2]> (y) p = MatMul (q, t)",
        )
        for heads in (1, 4)
    ),
    Case(
        "float[n, m, 2, 4] x",
        "n=3 m=2; n=0 m=2; n=2 m=0",
        "s = Shape (x) b = Slice (s, #[0], #[1]) m = Slice (s, #[1], #[2]) "
        "k = Concat <axis = 0> (b, #[4], m, #[2]) y = Reshape (x, k)",
    ),
    Case(
        "float[n, 4] x",
        "n=3; n=1; n=0",
        "a = Slice (x, #[1], #[2147483647], #[0]) p = Pad (a, #[1, 0, 0, 0]) z = Add (x, p) "
        "b = Slice (x, #[0], #[-2], #[0]) c = Slice (b, #[1], #[2147483647], #[0], #[2])",
    ),
]

EXPANDED = [
    Case(X, N, "s = Shape (x) y = ConstantOfShape (s) z = Expand (x, #[1, 1])"),
    Case(
        X,
        N,
        "s = Shape (x) r = Shape (s) f = ConstantOfShape <value = int64[1] {1}> (r) "
        "y = Expand (x, f) g = ConstantOfShape <value = int64[1] {3}> (#[40]) "
        "h = ConstantOfShape <value = int64[1] {3}> (e) e = Slice (s, #[0], #[0]) ",
    ),
    Case(X, "n=4; n=9", SIZES + "d = Sub (k, #3) u = Unsqueeze (d, #[0]) y = ConstantOfShape (u)"),
    Case(X, N, "y = Expand (x, #[3, 1, 1]) z = Expand (y, #[1])"),
    Case(
        "float[1, 4] x, float[n, m] z",
        "n=5 m=4; n=1 m=1; n=0 m=4",
        "s = Shape (z) y = Expand (x, s)",
    ),
    Case(XZ, BOTH, "s = Shape (z) y = Expand (x, s)"),
    Case("float[n] x", "n=5; n=1", "y = Expand (x, #[5])"),
    Case("float[n] x", "n=0; n=1", "y = Expand (x, #[0])"),
    Case("float[4] x, float[m] z", "m=4; m=1", "s = Shape (z) y = Expand (x, s)"),
    Case(
        "float[n, 1] x, int64[k] s, int64[3] t",
        "n=5 k=3; n=1 k=3",
        "y = Expand (x, s) z = Expand (x, t)",
        {"s": np.array([2, 1, 3]), "t": np.array([2, 1, 3])},
    ),
    Case(
        "float[n, 1] x",
        N,
        "s = Shape (x) q = Equal (#[-1, 5], #[-1]) t = Where (q, #[1, 1], #[-1, 5]) "
        "y = Expand (x, t) p = Equal (s, #[-1]) u = Where (p, #[1], s) z = Expand (x, u) "
        "f = Cast <to = 9> (#[0, 1]) v = Where (f, #[1, 1], s) w = Expand (x, v)",
    ),
]

BROADCASTS = [
    Case("float[n] x", N, "a, b = Split <num_outputs = 2> (x) s = Size (b) y = Min (s, #-3)"),
    Case(XZ, BOTH, "y = Add (x, z) u = Mul (x, y) s = Shape (y) a = Min (x, z) b = Pow (x, z)"),
    Case("float[n] x, float[5] z", "n=5; n=1", "y = Add (x, z) u = Sum (x, z) v = Max (z, x)"),
    Case(
        "float[n] x, float[m] z, bool[1, k] c",
        "n=5 m=1 k=1; n=1 m=5 k=1; n=1 m=1 k=3",
        "y = Where (c, x, z)",
    ),
    Case("float[n, 1] x, float[m] z", "n=0 m=3; n=2 m=0; n=2 m=1", "y = Add (x, z)"),
    Case("float[n] x", "n=2", "a = Slice (x, #[1], #[9]) y = Add (x, a)"),
    Case(
        "float[n, n] x",
        "n=2; n=1; n=3",
        "s = Shape <start = 1> (x) a = Slice (#[1, 2, 3], #[0], s) e = Slice (x, #[0], #[3]) "
        "c = Cast <to = 1> (a) y = Add (x, c) z = Add (e, c) w = Mul (e, x)",
    ),
    Case(
        "float[n] x, float[m] z", "n=1 m=2; n=2 m=4", "c = Concat <axis = 0> (x, x) y = Add (z, c)"
    ),
    Case(
        "float[n, m] x, float[m] z, float[k] p",
        "n=2 m=3 k=1; n=1 m=1 k=1",
        "y = PRelu (x, z) w = PRelu (x, p)",
    ),
    Case("float[n, 2, 3] x, float[m, 3, 2] z", "n=5 m=1; n=1 m=5", "y = MatMul (x, z)"),
    Case(
        "float[3] x, float[n, 3, m] z",
        "n=5 m=2; n=1 m=1",
        "y = MatMul (x, z) w = MatMul (x, x) t = Transpose <perm = [0, 2, 1]> (z) v = MatMul "
        "(t, x)",
    ),
    Case(
        "float[n, 2, 3] x, float[m, 3, 2] z",
        "n=5 m=1; n=1 m=5",
        'y = Einsum <equation = "bij,cjk->bik"> (x, z) '
        'w = Einsum <equation = "...ij,...jk->...ik"> (x, z) '
        'v = Einsum <equation = "bij,bjk->bik"> (x, z) u = Einsum <equation = "bij,bjk"> (x, z)',
    ),
]

SCALES = (2.0, 0.5, 0.7, 1.3, 0.1, 1.1, 2.5, 0.3333333)
NEAREST = 'Resize <mode = "nearest">'
IMAGE = "float[1, 1, n, m] x"
RESIZED = [
    *(
        Case(shape, bindings, f"y = {NEAREST} (x, , #[1.0, 1.0, {scale}, {scale}])")
        for scale in SCALES
        for shape, bindings in (
            (IMAGE, "n=10 m=10; n=13 m=17; n=30 m=20"),
            ("float[1, 1, 10, 19] x", ""),
        )
    ),
    Case(
        IMAGE,
        "n=5 m=10; n=3 m=7",
        f"y = {NEAREST} (x, , , #[1, 1, 6, 7]) e = Constant <value = float[0] {{}}> () "
        f"z = {NEAREST} (x, , e, #[1, 1, 6, 7]) "
        'a = Resize <mode = "nearest", axes = [-1]> (x, , , #[6])',
    ),
    Case(
        IMAGE + ", float[1, 1, k, l] z, float[4] f",
        "n=5 m=10 k=2 l=3; n=3 m=7 k=7 l=8",
        f"s = Shape (z) y = {NEAREST} (x, , , s) w = {NEAREST} (x, , f)",
        {"f": np.array([1, 1, 2, 3], "f4")},
    ),
    *(
        Case(
            shape,
            bindings,
            'y = Resize <mode = "nearest", axes = [2, 3], '
            f'keep_aspect_ratio_policy = "{policy}"> (x, , , #[6, 7])',
        )
        for policy in ("not_larger", "not_smaller")
        for shape, bindings in ((IMAGE, "n=5 m=10; n=3 m=7"), ("float[1, 1, 5, 11] x", ""))
    ),
]

WINDOWS = [
    *((3, 2, 0, 0), (2, 2, 1, 1), (3, 3, 1, 1), (1, 2, 0, 0), (2, 3, 0, 1), (3, 1, 1, 1)),
    *((1, 3, 0, 0), (2, 1, 0, 0)),
]
LENGTHS = "n=3; n=4; n=5; n=6; n=7; n=8"
FIXED = ", ".join(f"float[1, 2, {n}] x{n}" for n in (3, 4, 5, 7))
POOLS = [
    case
    for op in ("MaxPool", "AveragePool", "LpPool")
    for ceil in (0, 1)
    for kernel, stride, first, last in WINDOWS
    for how in [
        f"{op} <kernel_shape = [{kernel}], strides = [{stride}], pads = [{first}, {last}], "
        f"ceil_mode = {ceil}>"
    ]
    for case in (
        Case("float[1, 2, n] x", LENGTHS, f"y = {how} (x)"),
        Case(FIXED, "", " ".join(f"y{n} = {how} (x{n})" for n in (3, 4, 5, 7))),
    )
]
POOLS += [
    Case(
        "float[1, 2, n] x, float[1, 2, 5] z",
        LENGTHS,
        " ".join(
            f"{name} = {op} <kernel_shape = [2], strides = [{stride}], auto_pad = {pad}> "
            f"({name[0]})"
            for stride in (1, 2)
            for name in (f"x{stride}", f"z{stride}")
        ),
    )
    for op in ("MaxPool", "AveragePool", "LpPool")
    for pad in ('"SAME_UPPER"', '"SAME_LOWER"', '"VALID"')
]
SHORT = [*WINDOWS, (5, 2, 0, 0), (4, 3, 0, 0), (5, 3, 2, 1), (7, 2, 0, 0)]
POOLS += [
    Case(
        "float[1, n, 1] x, float[1, n, 2] z",
        "n=3; n=1",
        f"y = {op} <kernel_shape = [3], strides = [3], pads = [0, 1]> (x) "
        f"d = {op} <kernel_shape = [4], strides = [3], pads = [1, 0]> (z)",
    )
    for op in ("MaxPool", "AveragePool", "LpPool")
]
POOLS += [
    Case(
        "float[1, 2, n] x, float[1, 1, m] z",
        f"{lengths}; n=8 m=1",
        f"y = {op} <kernel_shape = [{kernel}], strides = [{stride}], pads = [{first}, {last}]> (x) "
        f"d = Mul (y, y) a = {op} <kernel_shape = [2], strides = [2]> (z) "
        "s = Shape (z) k = Gather (s, #[2]) q = Div (k, #2) t = Concat <axis = 0> (#[1, 1], q) "
        "f = Expand (#0.5, t) b = Add (f, a) e = Expand (a, t)",
    )
    for i, (kernel, stride, first, last) in enumerate(SHORT)
    for op in [("MaxPool", "AveragePool", "LpPool")[i % 3]]
    # Those in which the runtime finds 0 windows or more: it rounds a negative quotient to 0.
    for least in [max(1, kernel - first - last - 2 * stride + 1)]
    for lengths in ["; ".join(f"n={n} m={n}" for n in range(least, least + 7))]
]
POOLS += [
    Case(
        "float[1, 2, n, m] x",
        "n=5 m=8; n=7 m=9; n=3 m=5",
        "y, i = MaxPool <kernel_shape = [3, 3], strides = [2, 3], dilations = [1, 2]> (x) "
        "z = MaxPool <kernel_shape = [2, 2], strides = [1, 4], dilations = [2, 3]> (x) "
        "a = AveragePool <kernel_shape = [3, 2], strides = [3, 1]> (x)",
    ),
    Case(  # pools behind pools, also with a number between
        "float[1, 2, n, m] x, float[2, 2, 2, 2] w",
        "n=5 m=8; n=19 m=9; n=2 m=3; n=1 m=1; n=11 m=16; n=6 m=40",
        "a = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (x) "
        "b = MaxPool <kernel_shape = [2, 3], strides = [2, 3]> (a) "
        "c = AveragePool <kernel_shape = [2, 2], strides = [3, 2]> (b) "
        "d = Conv <pads = [1, 1, 1, 1]> (b, w) "
        "y = MaxPool <kernel_shape = [2, 1], strides = [2, 2]> (d) "
        "z = MaxPool <kernel_shape = [3, 3], strides = [3, 3], pads = [1, 0, 0, 1]> (d)",
    ),
    Case(  # two sizes that are 0 at once: a pool of strides as long as its windows gives nothing
        "float[b, 2, n] x",
        "b=2 n=5; b=0 n=0; b=1 n=1; b=3 n=17; b=0 n=4",
        "a = MaxPool <kernel_shape = [2], strides = [2]> (x) "
        "c = AveragePool <kernel_shape = [3], strides = [3]> (a) "
        "d = MaxPool <kernel_shape = [1], strides = [2]> (a) "
        "y = MaxPool <kernel_shape = [3], strides = [2], pads = [1, 1]> (c) "
        "s = Shape (c) k = Gather (s, #[2]) e = Expand (#0.5, k)",
    ),
    Case(  # what a slice leaves may be nothing, and then a pool gives nothing
        "float[n, 4, m] x",
        "n=3 m=4; n=2 m=0; n=5 m=1",
        "s = Slice (x, #[0], #[-4], #[0]) y = AveragePool <kernel_shape = [2], strides = [2]> (s)",
    ),
]
IMAGES = "float[b, 2, n] x, float[3, 2, 2] w, float[2, 3, 2] v"
PADS = [f"pads = [{a}, {b}]" for a, b in ((0, 0), (1, 1), (0, 2))]
PADS += [f'auto_pad = "{pad}"' for pad in ("SAME_UPPER", "SAME_LOWER", "VALID")]
CONVOLUTIONS = [
    Case(
        IMAGES,
        "n=3 b=1; n=4 b=2; n=5 b=1; n=6 b=1",
        f"y = Conv <strides = [{stride}], {pads}> (x, w) "
        f"z = ConvTranspose <strides = [{stride}], {pads}> (x, v)",
    )
    for stride in (1, 2, 3)
    for pads in PADS
]
CONVOLUTIONS += [
    Case(
        "float[b, 4, n] x, float[4, 2, k] w, float[4, 3, 2] v",
        "n=5 b=1 k=1; n=5 b=1 k=3; n=6 b=2 k=2",
        "y = Conv <group = 2> (x, w) z = ConvTranspose <group = 2> (x, v) "
        "c = ConvTranspose <output_padding = [1], strides = [2], group = 2> (x, v) "
        "d = Conv <group = 2, dilations = [2]> (x, w)",
    ),
    Case(
        "float[b, 8, n, m] x",
        "b=2 n=4 m=2; b=1 n=2 m=6",
        "y = GlobalAveragePool (x) z = GlobalMaxPool (x) d = DepthToSpace <blocksize = 2> (x) "
        "e = SpaceToDepth <blocksize = 2> (x)",
    ),
]

SPLIT = [
    *(
        Case(
            f"float[{size}, 2] x",
            bindings,
            f"{', '.join(f'y{i}' for i in range(parts))} = Split <num_outputs = {parts}> (x)",
        )
        for size, bindings in (("n", "n=4; n=7; n=10"), ("7", ""), ("10", ""))
        for parts in (1, 2, 3, 4)
    ),
    Case(
        "float[n, 6] x",
        N,
        "y = Concat <axis = 0> (x, x) a, b = Split <num_outputs = 2> (y) z = Add (a, x)",
    ),
    Case("float[n, 6] x", N, "a, b, c = Split <axis = -1> (x, #[1, 2, 3])"),
    Case("float[n, 6] x", "n=5", "a, b = Split <axis = 0> (x, #[1, 4])"),
    Case("float[n, 6] x, int64[2] s", N, "a, b = Split <axis = 1> (x, s)", {"s": np.array([2, 4])}),
    Case("float[6] x, int64[2] s", "", "a, b = Split (x, s)", {"s": np.array([2, 4])}),
    Case(
        "float[n, 6, m] x",
        NM,
        "s = Shape (x) a, b = Split <axis = 0> (s, #[1, 2]) c, d = Split <num_outputs = 2> (s)",
    ),
    Case(
        "float[n, 6] x",
        N,
        "y = Concat <axis = 0> (x, x) s = Shape (x) t = Gather (s, #[0, 0]) a, b = Split (y, t)",
    ),
    Case(
        "float[n, 6] x",
        N,
        "s = SplitToSequence (x) y = SequenceAt (s, #0) l = SequenceLength (s) "
        "t = SplitToSequence <keepdims = 0> (x) z = SequenceAt (t, #0) "
        "u = SplitToSequence (x, #2) v = SequenceAt (u, #-1) w = ConcatFromSequence <axis = 0> (u) "
        "a = SplitToSequence <axis = 1> (x, #[2, 4]) b = SequenceAt (a, #1) "
        "c = ConcatFromSequence <axis = 1> (a) d = SplitToSequence <axis = 1> (x, #4) "
        "e = SequenceAt (d, #1) f = SequenceEmpty () g = SequenceInsert (f, x) "
        "h = SequenceAt (g, #0)",
    ),
    Case(
        "float[n, 6] x, float[m, 6] z, float[k] y",
        "n=2 m=3 k=1; n=1 m=1 k=4",
        "s = SequenceConstruct (x, z) a = SequenceAt (s, #1) b = ConcatFromSequence <axis = 0> (s) "
        "t = SequenceInsert (s, x, #1) c = SequenceAt (t, #1) r = SequenceErase (s, #1) "
        "l = SequenceLength (r) u = SequenceConstruct (x, y) d = SequenceAt (u, #1) "
        "v = SequenceConstruct (x, x) e = ConcatFromSequence <axis = 0, new_axis = 1> (v)",
    ),
]

SHAPED = [
    Case(  # u has an unknown rank
        "float[n, 4] x, int64[m] t",
        "n=3 m=2; n=6 m=2",
        "u = Reshape (x, t) s = Shape (u) k = Gather (s, #0) e = Unsqueeze (k, #[0]) "
        "r = Concat <axis = 0> (e, #[2, -1]) v = Reshape (u, r) p = Gemm <transB = 1> (u, u) "
        "q = Gemm <transA = 1> (u, u) y = Add (v, #0.5) "
        "z = Transpose <perm = [1, 0]> (u)",
        {"t": np.array([-1, 6])},
    ),
    Case(
        "float[n, 4, m] x",
        "n=5 m=2; n=1 m=1; n=3 m=7",
        "a = Reshape (x, #[-1]) b = Reshape (x, #[0, -1]) c = Reshape (x, #[0, 0, -1]) "
        "d = Reshape (x, #[-1, 4]) e = Reshape (x, #[2, -1]) f = Flatten (x) "
        "g = Flatten <axis = 0> (x) h = Flatten <axis = -1> (x) i = Flatten <axis = 3> (x)",
    ),
    Case(X, N, "a = Reshape (x, #[0, -1, 4]) b = Reshape (x, #[0, 0]) c = Reshape (x, #[-1, 2])"),
    Case(
        "float[n, 0] x",
        "n=2; n=1",
        "a = Reshape (x, #[0, 0]) b = Reshape <allowzero=1> (x, #[0, 3])",
    ),
    Case(
        "float[n, 0, 3] x, float[n, 4] z",
        "n=0",
        "a = Reshape (x, #[0, 5]) b = Reshape (z, #[0, 2])",
    ),
    Case(
        X + ", float[m] z",
        "n=5 m=2; n=1 m=4; n=2 m=1; n=2 m=8; n=3 m=3",
        "s = Shape (z) t = Concat <axis = 0> (s, #[-1]) y = Reshape (x, t) "
        "u = Concat <axis = 0> (#[-1], s) v = Reshape (x, u)",
    ),
    Case(
        "float[4, m, m] x, float[m] z",  # 0 keeps 4, so that 0 rows are left
        "m=3; m=0",
        "s = Shape (z) t = Concat <axis = 0> (s, #[-1, 4]) r = Reshape (x, t) y = Shape (r)",
    ),
    Case(
        "float[n, 4, n] x",  # the runtime takes (0 - 1) / 2 for 0 where there is no row
        "n=3; n=0",
        "y = AveragePool <kernel_shape = [2], strides = [2], pads = [1, 0]> (x)",
    ),
    Case(
        X + ", int64[3] s, int64[k] t",
        "n=5 k=3",
        "y = Reshape (x, s) z = Reshape (x, t)",
        {"s": np.array([2, -1, 5]), "t": np.array([2, -1, 5])},
    ),
    Case(
        X + ", float[m] z",
        "n=5 m=8; n=5 m=2; n=5 m=3",
        "s = Shape (z) d = Sub (s, #[3]) t = Concat <axis = 0> (d, #[4]) y = Reshape (x, t)",
    ),
    Case(
        "float[n, 4, m] x",
        "n=2 m=1; n=5 m=3",
        "y = Slice (x, #[1], #[9], #[0]) s = Shape (x) k = Gather (s, #[0]) d = Sub (k, #[1]) "
        "e = Gather (s, #[2]) t = Concat <axis = 0> (d, e, #[4]) z = Reshape (y, t)",
    ),
    Case(
        X,
        N,
        "s = Shape (x) a = Reshape (s, #[-1]) b = Reshape (s, #[1, 2]) c = Flatten <axis = 0> (b) "
        "d = Squeeze (b, #[0]) e = Unsqueeze (s, #[0]) f = Concat <axis = 0> (e, e) "
        "g = Transpose (f) h = Reshape (g, #[-1]) i = Gather <axis = 0> (g, #[1]) "
        "j = Reshape (s, #[2, 1]) k = Gather <axis = 0> (j, #[1]) l = Concat <axis = 1> (j, j)",
    ),
    Case(
        X,
        "n=5; n=2",
        "y = Pad (x, #[1, 0, 2, 3]) z = Pad (x, #[-1, 0, 0, -2]) w = Pad (x, #[1, 3], , #[-1])",
    ),
    Case(X + ", int64[4] p", N, "y = Pad (x, p)", {"p": np.array([1, 0, 0, 2])}),
    Case(
        X,
        "n=8; n=5; n=9",
        SIZES + "d = Sub (#8, k) u = Unsqueeze (d, #[0]) p = Concat <axis = 0> (#[0, 0], u, #[0]) "
        "y = Pad (x, p)",
    ),
    Case(
        X,
        N,
        "z = ConstantOfShape <value = int64[1] {0}> (#[2]) q = Concat <axis = 0> (#[1, 2], z) "
        "r = Reshape (q, #[-1, 2]) v = Slice (r, #[-1], #[-9223372036854775807], #[0], #[-1]) "
        "t = Transpose <perm = [1, 0]> (v) w = Reshape (t, #[-1]) y = Pad (x, w)",
    ),
    Case(
        "float[n, 1, m] x",
        "n=2 m=5; n=1 m=5",
        "y = Squeeze (x, #[1]) z = Unsqueeze (y, #[-1, 0]) w = Squeeze (x)",
    ),
    Case(
        "float[n, 1, m] x, int64[1] a",
        "n=1 m=5",
        "y = Squeeze (x, #[-3]) z = Unsqueeze (x, a)",
        {"a": np.array([1])},
    ),
    Case("float[n, m, 3] x", NM, "y = Transpose (x) z = Transpose <perm = [1, 0, 2]> (x)"),
    Case(
        X + ", int64[2] r",
        N,
        "s = Shape (x) a = Tile (x, #[2, 1]) b = Tile (x, #[0, 3]) c = Tile (x, s) d = Tile (x, r)",
        {"r": np.array([2, 3])},
    ),
    Case(X, N, "y = CenterCropPad (x, #[3, 6]) z = CenterCropPad <axes = [-1]> (x, #[3])"),
]

CALCULATED = [
    Case(
        XM,
        NM + "; n=1 m=1; n=9 m=3; n=3 m=9",
        SIZES + "a = Pow (k, #2) b = Sub (k, m) c = Pow (b, #2) d = Pow (b, #3) e = Div (k, #4) "
        "f = Pow (e, #2) g = Add (f, #1) h = Pow (k, #0) i = Pow (k, #4) j = Pow (#2, k) "
        "l = Pow (s, #2) o = Pow (k, m) p = Reshape (g, #[1]) q = Concat <axis = 0> (p, #[3]) "
        "y = Expand (#0.5, q) u = Pow (#3, #2) v = Cast <to = 1> (k) w = Pow (v, #2) "
        "z = Pow (k, #2.0) t = Pow (k, #0.5)",
    ),
    Case(
        XM,
        NM + "; n=1 m=1; n=9 m=3; n=3 m=9; n=1 m=7",
        SIZES + "h = Div (k, #2) a = Min (k, #3) b = Max (h, #1) c = Min (h, m) d = Sub (k, m) "
        "e = Max (d, #0) f = Min (d, #0, k) g = Max (h, m, #2) i = Min (a, g) j = Max (i, c, b) "
        "l = Add (k, #1) o = Min (k, l) p = Max (k, l) q = Max (l, #1) r = Min (l, #-1) "
        "t = Neg (k) u = Max (t, h) v = Min (s, #[3, 4]) w = Max (s, #2) z = Expand (#0.5, v) "
        "y = ConstantOfShape (w) A = Unsqueeze (e, #[0]) B = ConstantOfShape (A) "
        "C = Cast <to = 1> (k) D = Min (C, #0.5) E = Cast <to = 7> (D) F = Cast <to = 6> (k) "
        "G = Cast <to = 6> (#3) H = Max (F, G) I = Sub (k, #1) J = Div (I, #-2) K = Max (J, #0) "
        "N = Reshape (J, #[1]) O = Concat <axis = 0> (N, N) P = Max (O, #[0, 0]) "
        "L = Min (O, #[1, 2])",
    ),
    Case(
        XM + ", int64 i, int64[2] j",
        NM,
        SIZES + "a = Max (i, #0) b = Min (i, k) c = Unsqueeze (b, #[0]) d = Slice (x, #[0], c) "
        "e = Max (s, j) f = Min (j, #3) g = ConstantOfShape (e) h = Min (k, m, i)",
        {"i": np.array(-2), "j": np.array([-1, 7])},
    ),
    Case(
        "float[n, 4] x",
        "n=1; n=2; n=4; n=8",
        "s = Shape (x) k = Gather (s, #[0]) h = Div (k, #[2]) t = Concat <axis = 0> (h, #[-1]) "
        "y = Reshape (x, t) z = Abs (y)",
    ),
    Case(
        X,
        "n=3; n=4",
        SIZES
        + "a = Mul (k, k) b = Range (#0, a, #2) c = Unsqueeze (a, #[0]) d = ConstantOfShape (c) "
        "e, f = Split <num_outputs = 2> (d) g = Mul (k, #0) h = Mul (s, g) i = Reshape (x, h)",
    ),
    Case(
        X,
        "n=3; n=7",
        "s = Shape <end = 1> (x) d = Add (s, #[-5]) a = Abs (d) e = Add (d, #[5]) "
        "t = Concat <axis = 0> (e, #[4]) b = Reshape (x, t) c = Expand (x, t)",
    ),
    Case(
        X,
        N + "; n=0",
        SIZES + "a = Range (#0, k, #1) b = Range (#1, k, #2) c = Range (k, #0, #-1) "
        "d = Range (k, m, #1) e = Div (k, #2) f = Range (#0, e, #1) g = Sub (k, #1) "
        "h = Div (g, #2) i = Range (#0, h, #1) j = Div (g, #-2) l = Mod (g, #4) o = Abs (g) "
        "p = Neg (g) q = Cast <to = 1> (k) r = Range (#0.0, q, #0.5) t = Range (#0.0, #1.0, #0.1) "
        "u = Range (#0.0, q, #1.0)",
    ),
    Case("int64 k", "", "y = Range (#0, k, #1)", {"k": np.array(4)}),
    Case(
        XM,
        NM + "; n=300 m=3; n=2051 m=1; n=2 m=2; n=1 m=3",
        SIZES + "a = Div (k, #2) b = Mul (a, #2) c = Sub (k, b) d = Div (b, #2) e = Mul (k, m) "
        "f = Div (e, m) g = Mod (k, #2) h = Cast <to = 1> (k) i = Mul (h, #0.5) "
        "j = Cast <to = 7> (i) l = Ceil (i) o = Cast <to = 7> (l) p = Div (h, #2.0) "
        "q = Cast <to = 7> (p) r = Sqrt (h) t = Cast <to = 7> (r) u = Max (k, #3) v = Min (k, m) "
        "w = Max (k, k) y = Mul (s, #[2, 3]) z = Mul (k, #[2, 3])",
    ),
    Case(
        XM,
        NM + "; n=300 m=3; n=2051 m=1",
        SIZES + "a = Cast <to = 9> (k) b = Cast <to = 7> (a) c = Cast <to = 3> (k) "
        "d = Cast <to = 7> (c) e = Cast <to = 6> (k) f = Cast <to = 7> (e) g = Cast <to = 10> (k) "
        "h = Cast <to = 7> (g) i = Cast <to = 2> (#-1) j = Cast <to = 7> (i) "
        "l = Cast <to = 9> (#300) o = Cast <to = 7> (l)",
    ),
    Case(
        XM,
        "n=2 m=2; n=2 m=3; n=1 m=3; n=0 m=3",
        SIZES + "a = Equal (k, m) b = Where (a, k, m) c = Equal (k, #1) d = Where (c, #1, k) "
        "e = Equal (k, #0) f = Sub (k, m) g = Equal (f, #-1) h = Where (g, #1, f) "
        "i = Sub (k, #1) j = Equal (i, #-1) l = Abs (i)",
    ),
    Case(
        XM,
        NM,
        "s = Shape (x) a = ReduceProd <keepdims = 0> (s) b = ReduceSum <keepdims = 0> (s) "
        "c = ReduceMax <keepdims = 0> (s) d = ReduceProd (s) e = CumSum (s, #0) "
        "f = ReduceProd (s, #[0]) g = Unsqueeze (s, #[0]) h = ReduceProd <keepdims = 0> (g, #[0]) "
        "i = ReduceProd <noop_with_empty_axes = 1> (s) j = Unsqueeze (s, #[1]) l = Mul (g, j)",
    ),
    Case(
        "float[n, m, 3] x, int64[1] r",
        NM,
        "a = ReduceSum (x, #[1]) b = ReduceSum <keepdims = 0> (x, #[1]) "
        "c = ReduceMean <keepdims = 0> (x) d = ReduceMax <noop_with_empty_axes = 1> (x) "
        "e = ArgMax <axis = 1> (x) f = ArgMin <axis = -1, keepdims = 0> (x) "
        "g = ReduceSum (x, r) h = ReduceSum <keepdims = 0> (x, r)",
        {"r": np.array([1])},
    ),
    Case(
        "float[n, 4, m] x, float[k] z, int64[2] i, int64 j",
        "n=3 m=5 k=1; n=3 m=6 k=0",
        "s = Shape (x) t = Shape (z) a = Gather (s, #[-1, 0]) b = Gather (s, #-2) "
        "w = Constant <value = int64[1, 2] {0, 1}> () c = Gather (s, w) d = Gather (s, i) "
        "e = Gather <axis = 1> (x, i) f = Gather <axis = 1> (x, j) g = Concat <axis = 0> (s, t, s) "
        "h = ConstantOfShape (g) l = Shape <start = 1> (x) o = Shape <start = -1> (x) "
        "p = Shape <end = -1> (x) q = Shape <start = 2, end = 1> (x) "
        "r = Shape <start = -9, end = 9> (x) u = Size (x) v = ConstantOfShape (p)",
        {"i": np.array([2, 0]), "j": np.array(2)},
    ),
    Case(
        "float[n, 4] x, float[m, 4] z",
        "n=2 m=2; n=5 m=5",
        "a = Concat <axis = 1> (x, z) b = Concat <axis = 0> (x, z)",
    ),
]

FOUND = [
    Case(
        X,
        N,
        "a = NonZero (x) b = Shape (a) c, d, e, f = Unique (x) g, h, i, j = Unique <axis = 0> "
        "(x) k, l, m, o = Unique <axis = -1> (x)",
    ),
    Case("float x", "", "y = NonZero (x)"),
    Case(
        X + ", bool[4] c",
        N,
        "a = Compress <axis = 1> (x, c) b = Compress (x, c) "
        "k = Constant <value = bool[3] {1, 0, 1}> () d = Compress <axis = 1> (x, k) ",
        {"c": np.array([True, False, True, True])},
    ),
    Case("float[1, n, 4] b, float[1, 1, n] s", "n=2; n=4", "y = NonMaxSuppression (b, s, #[2])"),
    Case(
        X + ", int64[1] r",
        N,
        SIZES + "a, b = TopK <axis = 0> (x, #[1]) c, d = TopK (x, #[3]) u = Unsqueeze (k, #[0]) "
        "e, f = TopK <axis = 0> (x, u) g, h = TopK (x, r)",
        {"r": np.array([2])},
    ),
    Case(
        "int64[n] x, float[m] z",
        "n=2 m=3; n=1 m=4",
        "d = Shape (z) a = OneHot (x, d, #[0.0, 1.0]) b = OneHot <axis = 0> (x, #5, #[0.0, 1.0])",
    ),
    Case(
        "float[n, 4, m] x, int64[k, 2] i",
        "n=2 m=5 k=3",
        "y = GatherND (x, i)",
        {"i": np.array([[0, 1], [1, 2], [0, 0]])},
    ),
    Case(
        "float[n, 4, m] x, int64[n, 1] i, int64[n, 2, m] j",
        "n=2 m=5; n=3 m=5",
        "y = GatherND <batch_dims = 1> (x, i) z = GatherElements <axis = 1> (x, j)",
    ),
]

MODELS = [
    Case(
        "float[b, 2, t, 4] q, float[b, 2, s, 4] k, float[b, 2, s, v] w",
        "b=1 t=3 s=2 v=4; b=2 t=1 s=4 v=5",
        "y = Attention (q, k, w)",
    ),
    Case(
        "float[b, t, 8] q, float[b, s, 4] k, float[b, s, v] w",
        "b=1 t=3 s=2 v=8; b=2 t=1 s=4 v=4",
        "y = Attention <q_num_heads = 4, kv_num_heads = 2> (q, k, w)",
    ),
    Case(
        "float[b, 2, t, 4] q, float[b, 2, s, 4] k, float[b, 2, s, 4] w, float[b, 2, p, 4] i, "
        "float[b, 2, p, 4] j",
        "b=1 t=3 s=2 p=4; b=2 t=1 s=4 p=1",
        "y, o, u, z = Attention <qk_matmul_output_mode = 0> (q, k, w, , i, j)",
    ),
    Case(
        "float[t, b, 2] x, float[1, 9, 2] w, float[1, 9, 3] r, float[2, 12, 2] v, float[2, "
        "12, 3] p",
        "t=3 b=2; t=1 b=1",
        "a, c = GRU <hidden_size = 3> (x, w, r) d, e, f = LSTM <hidden_size = 3, direction = "
        '"bidirectional"> (x, v, p)',
    ),
    Case(
        "float[b, 4, n] x, float[4] s, float[4] z",
        "b=2 n=3; b=1 n=2",
        "a = InstanceNormalization (x, s, z) c = GroupNormalization <num_groups = 2> (x, s, z) "
        "k = Shape <start = 1> (x) o = Expand (#1.0, k) l, m, v = LayerNormalization <axis = "
        "1> (x, o)",
    ),
    Case(X, N, SIZES + "a = EyeLike (x) c, b = Dropout (x) d = HannWindow (#5) e = HannWindow (k)"),
    Case(
        "float[b, n, 1] x",
        "b=2 n=8; b=2 n=9",
        "y = DFT (x) z = DFT <onesided = 1> (x) w = STFT (x, #2, , #4)",
    ),
    Case(
        "float[b, 2, n, m] x, float[b, h, w, 2] g", "b=2 n=3 m=4 h=2 w=1", "y = GridSample (x, g)"
    ),
    Case("float[b, 2, 3] t", "b=2", "y = AffineGrid (t, #[2, 3, 4, 5])"),
    Case("float[b, 4, n] x", "b=2 n=4", "y = Col2Im (x, #[3, 3], #[2, 2])"),
    Case("float[b, 2, t, 4] x, float[b, t, 2] c", "b=2 t=4", "y = RotaryEmbedding (x, c, c)"),
    Case(
        X,
        N,
        "q, s, z = DynamicQuantizeLinear (x) y = DequantizeLinear (q, s, z) t = Transpose (q) "
        "m = MatMulInteger (q, t)",
    ),
    Case(
        "float[n, 4, m] x, int64[n, m] l",
        "n=2 m=3",
        'y = SoftmaxCrossEntropyLoss <reduction = "none"> (x, l) z, p = '
        'SoftmaxCrossEntropyLoss (x, l) w = NegativeLogLikelihoodLoss <reduction = "none"> '
        "(x, l)",
    ),
]

LOOP = "float[n, 4] x, int64 k, bool c"


def loop(state: str, nodes: str) -> str:
    """A loop over x whose state has this size."""
    inside = (
        f"(int64 i, bool d, float[{state}, 4] s) => (bool e, float[{state}, 4] t, float[{state}, "
        f"4] u)"
    )
    return f"y, z = Loop (k, c, x) <body = b {inside} {{ e = Identity (d) {nodes} }}>"


TWICE = {"k": np.array(2), "c": np.array(True)}
BRANCHES = (
    "then_branch = t () => ({0} u) {{ u = Identity ({1}) }}, else_branch = f () => ({0} v) {{ v = "
    "Identity ({2}) }}"
)
CONTROL = [
    Case(LOOP, "n=2; n=1", loop("p", "t = Concat <axis = 0> (s, s) u = Identity (x)"), TWICE),
    Case(LOOP, "n=2; n=1", loop("n", "t = Concat <axis = 0> (s, s) u = Identity (x)"), TWICE),
    Case(LOOP, "n=2; n=1", loop("n", "t = Add (s, s) u = Identity (s)"), TWICE),
    Case(
        "float[n, 1] x, float[1, m] w, int64 k, bool c",
        "n=2 m=3; n=1 m=1",
        "y, z = Loop (k, c, x) <body = b (int64 i, bool d, float[o, p] s) => (bool e, "
        "float[q, r] t, "
        "float[v, a] u) { e = Identity (d) t = Add (s, w) u = Transpose (s) }>",
        ONE,
    ),
    Case(
        LOOP,
        "n=2; n=1",
        "y = Loop (k, c, #0) <body = b (int64 i, bool d, int64 s) => (bool e, int64 t) "
        "{ e = Identity (d) t = Add (s, i) }> u = Unsqueeze (y, #[0]) w = ConstantOfShape (u) "
        "o = Shape (x) p = Loop (k, c, o) <body = b (int64 j, bool f, int64[2] g) => (bool h, "
        "int64[2] l) "
        "{ h = Identity (f) l = Add (g, o) }> q = ConstantOfShape (p)",
        TWICE,
    ),
    *(
        Case(
            "float[n, 4] x, float[m, 4] w, bool c",
            "n=2 m=3; n=1 m=1",
            f"y = If (c) <{BRANCHES.format('float[p, 4]', 'x', 'w')}> s = Shape (x) k = "
            f"Identity (#[3, 3]) "
            "z = If (c) <"
            + BRANCHES.format("int64[2]", "s", "k").replace(" u", " q").replace(" v", " r")
            + "> a = ConstantOfShape (z)",
            {"c": np.array(truth)},
        )
        for truth in (True, False)
    ),
    Case(
        "float[n, 4] x, float[4, n] w, float[4] s",
        "n=2; n=1",
        "y, z = Scan <num_scan_inputs = 1, body = b (float[4] a, float[4] p) => (float[4] q, "
        "float[4] r) "
        "{ q = Add (a, p) r = Mul (a, p) }> (s, x) u, v = Scan <num_scan_inputs = 1, "
        "scan_input_axes = [1], "
        "scan_output_axes = [1], body = b (float[4] c, float[4] d) => (float[4] e, float[4] f) "
        "{ e = Add (c, d) f = Mul (c, d) }> (s, w)",
    ),
]
N8, NK = "n=5; n=1; n=8; n=17; n=0", "n=5 m=3; n=1 m=9; n=8 m=8; n=0 m=2"
BLOCK = "s = Shape (x) k = Gather (s, #[0]) m = Mod (k, #[8]) p = Sub (#[8], m) "
BLOCKS = [
    Case(
        X,
        N8,
        BLOCK + "l = Concat <axis = 0> (#[0, 0], p, #[0]) y = Pad (x, l) t = Add (k, p) "
        "b = Div (t, #[8]) c = Concat <axis = 0> (b, #[8, 4]) u = Reshape (y, c) "
        "v = Reshape (u, #[-1, 4]) w = Slice (v, #[0], k, #[0]) z = Add (w, x) "
        "e = Concat <axis = 0> (#[0], k) f = ConstantOfShape (e) d = Min (k, t)",
    ),
    Case(
        XM,
        NM,
        BLOCK + "o = Mod (p, #[8]) l = Concat <axis = 0> (#[0, 1, 2], o) t = Reshape (l, #[-1, 2]) "
        "r = Slice (t, #[-1], #[-9223372036854775807], #[0], #[-1]) "
        "q = Transpose <perm = [1, 0]> (r) a = Reshape (q, #[-1]) y = Pad (x, a)",
    ),
    Case(
        X,
        N8,
        "s = Shape (x) k = Gather (s, #0) a = Sub (k, #5) b = Mod (a, #4) "
        "c = Mod <fmod = 1> (a, #4) d = Mod (k, #-3) e = Mod <fmod = 1> (k, #3) "
        "f = Sub (k, e) g = Range (f, k, #1) h = Range (#0, b, #1) i = Abs (c) "
        "j = Range (#0, i, #1)",
    ),
    Case(
        "float[n, 4] x, float[m, 4] z",
        NK,
        BLOCK + "l = Concat <axis = 0> (#[0, 0], p, #[0]) y = Pad (x, l) t = Sub (p, #[1]) "
        "a = Concat <axis = 0> (#[0, 0], t, #[0]) b = Pad (x, a) c = Slice (b, #[0], k, #[0]) "
        "d = Slice (y, k, #[9], #[0]) e = Slice (z, #[0], m, #[0])",
    ),
    Case(
        "float[n, 4] x, float[m, 4] z",
        "n=1 m=8; n=9 m=1; n=9 m=16; n=0 m=1",
        BLOCK + "l = Concat <axis = 0> (#[0, 0], p, #[0]) y = Pad (x, l) a = Add (y, z)",
    ),
]
BLOCKS += [
    Case(
        "float[1, 1, n] x, float[1, 1, 3] w, float[1] v",
        "n=3; n=4; n=8",
        "y = Conv <strides = [2]> (x, w) s = Shape (y) e = Equal (s, #[-1, -1, -1]) "
        "o = Where (e, #[1, 1, 1], s) z = Expand (v, o)",
    ),
    *(
        Case(
            "float[n, 16] x",
            bindings,
            "s = Shape (x) k = Gather (s, #0) a = Sub (k, #2) b = Div (a, #2) c = Add (b, #1) "
            "r = Range (#0, c, #1) h = Div (k, #2) u = Unsqueeze (h, #[0]) "
            f"t = Concat <axis = 0> (#[-1], u) y = Reshape <allowzero = {exact}> (x, t)",
        )
        for exact, bindings in ((1, "n=2; n=3; n=4; n=8"), (0, "n=1; n=2; n=3; n=8"))
    ),
]
POOLS += [
    Case(
        "float[n, 2, m] x",
        "n=3 m=2; n=1 m=1",
        "s = Shape (x) z = Sub (s, s) a = Abs (z) t = Tile (x, a) "
        f"y = {op} <kernel_shape = [1], strides = [2]> (t)",
    )
    for op in ("MaxPool", "AveragePool", "LpPool")
]
CASES = {
    "blocks": BLOCKS,
    "slice": SLICES,
    "empty": EMPTY,
    "expand": EXPANDED,
    "broadcast": BROADCASTS,
    "resize": RESIZED,
    "pool": POOLS,
    "convolution": CONVOLUTIONS,
    "split": SPLIT,
    "reshape": SHAPED,
    "sizes": CALCULATED,
    "found": FOUND,
    "models": MODELS,
    "control": CONTROL,
}
"""By family."""
