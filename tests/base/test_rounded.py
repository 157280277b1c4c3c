"""Sizes behind convolutions, which exporters compute from those of inputs."""

import itertools
import math
import subprocess
import sys
from typing import Any

import numpy as np
import onnx.parser
import onnx_ir as ir
import pytest
from small_models import ROUNDING, as_in_a_file, relative_rms, run_plain

import graphgen as gg
from graphgen import ops
from graphgen.edit import infer_model
from graphgen.forms import _short, dim_of, simplified
from graphgen.graph import count_operators
from graphgen.infer import new_context
from graphgen.op import TABLE
from graphgen.ops.numbers_of_sizes import size_at
from graphgen.ops.shapes import is_above_one
from graphgen.passes import optimize
from graphgen.rounded import FileSizes, bounded, flattened, rejoined, rest_below, smallest

H, D = 4, 8
RNG = np.random.default_rng(7)
KERNELS = [RNG.normal(0.0, 1.0, s).astype(np.float32) for s in ((H * D, 1, 5), (H * D, H * D, 3))]


@pytest.mark.parametrize(
    ("size", "wanted"),
    [
        ("floor(floor(floor(s/3 - 5/3)/2 - 1)/2 + 1/2)", "floor(s/12 + 7/12) - 1"),
        ("floor(floor(s/6 - 5/6)/2 - 3/2) + 1", "floor(s/12 + 1/12) - 1"),
        ("floor(2*s/4 + 3/4)", "floor(s/2 + 1/2)"),
        ("floor((floor(s/2) + t)/3)", "floor(s/6 + t/3)"),
        ("Max(0, floor(s/2 - 1))", "Max(0, floor(s/2) - 1)"),
        ("floor(3*floor(s/2)/4)", "floor(3*floor(s/2)/4)"),
        ("floor(-floor(s/2)/3)", "floor(-floor(s/2)/3)"),
        ("floor(s/t + 1/2)", "floor((2*s + t)/(2*t))"),
        ("floor(32*t*(floor(s/3) + 2)/(8*floor(s/3) + 16))", "4*t"),
    ],
)
def test_rounded_quotients_have_one_form(size: str, wanted: str) -> None:
    given, form = ir.SymbolicDim(size), ir.SymbolicDim(flattened(size))
    assert str(form) == wanted
    for s, t in itertools.product(range(30), (1, 2, 5)):
        names = {"s": s, "t": t}
        assert given.evaluate(names) == form.evaluate(names)


def quotient(n: Any, less: int, by: int) -> Any:
    """(n - less) / by as a file has it, which is rounded toward zero."""
    return TABLE["", "Div"](n - np.array([less]), np.array([by]))


def heard(x: Any, less: int = 5) -> Any:
    """Attention on two convolutions of a signal, with the length as an exporter computes it."""
    n = TABLE["", "Shape"](x, start=1, end=2)
    length = quotient(quotient(n, less, 3) + np.array([1 - 3]), 0, 2) + np.array([1])
    y = ops.conv(ops.unsqueeze(x, [1]), KERNELS[0], strides=[3])
    y = ops.transpose(ops.conv(y, KERNELS[1], strides=[2]), perm=[0, 2, 1])
    batch = TABLE["", "Shape"](x, start=0, end=1)
    sizes = ops.concat(batch, length, np.array([-1, D]), axis=0)
    q = ops.transpose(TABLE["", "Reshape"](y, sizes), perm=[0, 2, 1, 3])
    return ops.merge_heads(ops.softmax(q @ ops.swap_last(q) * 0.01) @ q)


def test_a_length_behind_convolutions_is_the_one_that_the_file_computes() -> None:
    model = as_in_a_file(heard, x=gg.float32["b", "n"])
    best = optimize(model)
    counts = count_operators(best.model)
    assert counts["Attention"] == 1 and "Softmax" not in counts
    [site] = next(p.sites for p in best.report.passes if p.name == "fuse_attention")
    assert site.reason == "4 heads, no mask"
    for n in (11, 40):
        x = RNG.normal(0.0, 1.0, (2, n)).astype(np.float32)
        (wanted,), (given,) = run_plain(model, {"x": x}), run_plain(best.model, {"x": x})
        assert relative_rms(wanted, given) < ROUNDING


def test_of_another_length_nothing_is_known() -> None:
    model = as_in_a_file(lambda x: heard(x, 6), x=gg.float32["b", "n"])
    [site] = next(p.sites for p in optimize(model).report.passes if p.name == "fuse_attention")
    assert "4 heads" not in site.reason


def squeezed(x: Any, by: int = 2) -> Any:
    """As in SEW, two paths give half of a length, and both are cut to the shorter of them."""
    n = TABLE["", "Shape"](x, start=1, end=2)
    length = quotient(n, 5, 3) + np.array([1])
    half = ops.minimum(quotient(length, 0, 2), quotient(length, by, 2) + np.array([1]))
    y = ops.conv(ops.unsqueeze(x, [1]), KERNELS[0], strides=[3])
    kernel = np.ones((H * D, 1, 4), np.float32)
    y = TABLE["", "Slice"](
        ops.conv(y, kernel, strides=[2], pads=[2, 2], group=H * D), [0], half, [2]
    ) + TABLE["", "Slice"](
        TABLE["", "AveragePool"](y, kernel_shape=[2], strides=[2]), [0], half, [2]
    )
    y = ops.transpose(y, perm=[0, 2, 1])
    batch = TABLE["", "Shape"](x, start=0, end=1)
    sizes = ops.concat(batch, half, np.array([-1, D]), axis=0)
    q = ops.transpose(TABLE["", "Reshape"](y, sizes, allowzero=1), perm=[0, 2, 1, 3])
    return ops.merge_heads(ops.softmax(q @ ops.swap_last(q) * 0.01) @ q)


def test_half_of_a_length_is_one_size_however_it_is_calculated() -> None:
    model = as_in_a_file(squeezed, x=gg.float32["b", "n"])
    best = optimize(model)
    counts = count_operators(best.model)
    assert counts["Attention"] == 1 and "Softmax" not in counts
    [site] = next(p.sites for p in best.report.passes if p.name == "fuse_attention")
    assert site.reason == "4 heads, no mask"
    for n in (11, 14, 40, 44):  # lengths of 3, 4, 12 and 14
        x = RNG.normal(0.0, 1.0, (2, n)).astype(np.float32)
        (wanted,), (given,) = run_plain(model, {"x": x}), run_plain(best.model, {"x": x})
        assert relative_rms(wanted, given) < ROUNDING


def test_less_than_half_of_a_length_is_another_size() -> None:
    """Half of 3 less is not rounded down where the length is 1 and 2: nothing is known."""
    best = optimize(as_in_a_file(lambda x: squeezed(x, 4), x=gg.float32["b", "n"]))
    [site] = next(p.sites for p in best.report.passes if p.name == "fuse_attention")
    assert "4 heads" not in site.reason


def in_blocks(x: Any, by: int, *, in_table: bool) -> Any:
    """Attention to rows that were padded to blocks of 8, computed by block, and cut again.

    Torch's exporters write the pads as a list, and as a table that is turned.
    """
    n = TABLE["", "Shape"](x, start=1, end=2)
    batch = TABLE["", "Shape"](x, start=0, end=1)
    more = np.array([by]) - TABLE["", "Mod"](n, np.array([8]))
    if in_table:
        pads = ops.concat(np.zeros(3, int), more, np.zeros(2, int), axis=0)
        table = TABLE["", "Slice"](ops.reshape(pads, [-1, 2]), [-1], [-(2**63) + 1], [0], [-1])
        pads = ops.reshape(ops.transpose(table, perm=[1, 0]), [-1])
    else:
        pads = ops.concat(np.zeros(4, int), more, np.zeros(1, int), axis=0)
    y = TABLE["", "Pad"](x, pads)
    blocks = ops.concat(batch, quotient(n + more, 0, 8), np.array([8, H * D]), axis=0)
    y = TABLE["", "Reshape"](y, blocks, allowzero=1)
    y = TABLE["", "Reshape"](
        y - ops.reduce_mean(y, [2]),
        ops.concat(batch, n + more, np.array([H * D]), axis=0),
        allowzero=1,
    )
    y = TABLE["", "Slice"](y, [0], n, [1])
    sizes = ops.concat(batch, n, np.array([-1, D]), axis=0)
    k = ops.transpose(TABLE["", "Reshape"](y, sizes, allowzero=1), perm=[0, 2, 1, 3])
    q = ops.split_heads(x, H)
    return ops.merge_heads(ops.softmax(q @ ops.swap_last(k) * 0.3) @ k)


@pytest.mark.parametrize("in_table", [False, True])
def test_rows_that_were_padded_to_blocks_are_as_many_as_before(in_table: bool) -> None:
    model = as_in_a_file(
        lambda x: in_blocks(x, 8, in_table=in_table), x=gg.float32["b", "n", H * D]
    )
    best = optimize(model)
    counts = count_operators(best.model)
    assert counts["Attention"] == 1 and "Softmax" not in counts
    [site] = next(p.sites for p in best.report.passes if p.name == "fuse_attention")
    assert site.reason == "4 heads, no mask"
    for n in (1, 7, 8, 20):
        x = RNG.normal(0.0, 1.0, (2, n, H * D)).astype(np.float32)
        (wanted,), (given,) = run_plain(model, {"x": x}), run_plain(best.model, {"x": x})
        assert relative_rms(wanted, given) < ROUNDING


def test_of_rows_that_were_cut_to_blocks_nothing_is_known() -> None:
    """Of 15 rows, 8 are left."""
    model = as_in_a_file(lambda x: in_blocks(x, 0, in_table=False), x=gg.float32["b", "n", H * D])
    best = optimize(model)
    assert "Attention" not in count_operators(best.model)


@pytest.mark.parametrize(
    ("size", "wanted"),
    [
        ("8*floor(n/8) + 8 - n", 1),
        ("8*floor(n/8) + 7 - n", 0),
        ("n - 8*floor(n/8)", 0),
        ("8*floor((n - 3)/8) + 8 - n", -2),
        ("floor((n - 1)/2)", -1),
        ("floor(n/2) - floor(n/3)", 0),
        ("8*floor(n/8) + 9 - n + m", 2),
        ("floor(n*m/8)*8 + 8 - n*m", 1),
        ("n - 3*floor(n/2)", None),
        ("floor(n/8) - m", None),
    ],
)
def test_the_least_of_a_size_holds_for_all_numbers(size: str, wanted: int | None) -> None:
    least, dim = smallest(size), ir.SymbolicDim(size)
    assert least == (-math.inf if wanted is None else wanted)
    for n, m in itertools.product(range(40), (0, 1, 3)):
        assert least <= int(str(dim.evaluate({"n": n, "m": m})))


def counted(x: Any, *, exact: int) -> Any:
    """Half of n and a quarter, as exporters compute them; reshapes run with as many columns."""
    n = TABLE["", "Shape"](x, start=0, end=1)
    half, same_half = quotient(n, 0, 2), quotient(n, 2, 2) + np.array([1])
    quarter, same_quarter = quotient(same_half, 0, 2), quotient(same_half, 2, 2) + np.array([1])
    counts = [
        TABLE["", "Range"](np.array(0), ops.squeeze(size, [0]), np.array(1))
        for size in (same_half, same_quarter)
    ]
    reshaped = [
        TABLE["", "Reshape"](x, ops.concat(np.array([-1]), size, axis=0), allowzero=exact)
        for size in (half, quarter)
    ]
    return (*counts, *reshaped)


def test_beside_a_size_that_is_left_open_no_other_is_0() -> None:
    """One reshape shows that n is 2 or more, with that the next one that it is 4 or more."""
    model = as_in_a_file(lambda x: counted(x, exact=1), x=gg.float32["n", 16])
    infer_model(model)
    shapes = [str(y.shape) for y in model.graph.outputs[:2]]
    assert shapes == ["[floor(n/2)]", "[floor(n/4)]"]
    for n in (4, 8):
        found = run_plain(model, {"x": np.ones((n, 16), np.float32)})
        assert [y.shape for y in found[:2]] == [(n // 2,), (n // 4,)]


def test_a_size_of_0_may_be_that_of_the_operand() -> None:
    """Of one row, a half is 0, which is 16 columns; calculated otherwise it is 1."""
    model = as_in_a_file(lambda x: counted(x, exact=0), x=gg.float32["n", 16])
    infer_model(model)
    assert [str(y.shape) for y in model.graph.outputs[:1]] != ["[floor(n/2)]"]
    found = run_plain(model, {"x": np.ones((1, 16), np.float32)})
    assert [y.shape for y in found] == [(1,), (1,), (1, 16), (1, 16)]


def test_a_length_behind_a_convolution_is_not_minus_one() -> None:
    """TorchScript's `expand` asks which of the sizes are -1."""

    def body(x: Any) -> Any:
        y = ops.conv(ops.unsqueeze(x, [1]), KERNELS[0], strides=[3])
        sizes = TABLE["", "Shape"](y, start=2)
        asked = TABLE["", "Equal"](sizes, np.array([-1]))
        return TABLE["", "Expand"](np.ones(1, np.float32), ops.where(asked, np.array([1]), sizes))

    model = as_in_a_file(body, x=gg.float32["b", "n"])
    infer_model(model)
    assert str(model.graph.outputs[0].shape) == "[floor(n/3 + 1/3) - 1]"


def test_a_difference_that_may_be_below_zero_is_rounded_toward_zero() -> None:
    def body(x: Any) -> Any:
        n = TABLE["", "Shape"](x, start=0, end=1)
        length = ops.squeeze(quotient(n, 5, 3) + np.array([1]), [0])
        return TABLE["", "Range"](np.array(0), length, np.array(1))

    model = as_in_a_file(body, x=gg.float32["n"])
    infer_model(model)
    [size] = model.graph.outputs[0].shape or ()
    assert "n" not in str(size), "of 4 elements it is 1, and floor(-1/3) + 1 is 0"
    assert run_plain(model, {"x": np.ones(4, np.float32)})[0].shape == (1,)


SIZES = [
    "a",
    "a - 7*b",
    "Max(0, a - 5) * b",
    "(a + 6)//7 * ((b + 6)//7)",
    "floor((floor(a/2) + 3)/5) - Mod(a, 4)",
    "ceiling(a/3)**2",
    "a*b / 4",
    "Min(a, 8) // b",
    "Mod(b, a - 7)",
    "Max(2, a/b)",
    "a**b",
    "a*missing",
]


@pytest.mark.parametrize("text", SIZES)
def test_a_size_at_numbers_is_that_of_sympy(text: str) -> None:
    size = ir.SymbolicDim(text)

    def outcome(evaluate: Any, sizes: dict[str, int]) -> tuple[type, str]:
        try:
            found = evaluate(sizes)
        except (TypeError, ValueError, ZeroDivisionError) as error:
            return type(error), ""
        return type(found), str(found)

    for a, b in itertools.product((0, 1, 7, 5040), (0, 1, 2)):
        sizes = {"a": a, "b": b}
        assert outcome(lambda s: size_at(size, s), sizes) == outcome(size.evaluate, sizes)


def test_sizes_without_a_text_stay_unknown() -> None:
    assert size_at(3, {}) == 3
    assert str(size_at(ir.SymbolicDim(None), {"a": 1})) == "None"


def test_sizes_that_differ_in_made_up_names_alone_take_no_more_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Equal sizes have one form, whichever names stand first, and names are never mixed up."""
    asked, simplify = list[str](), ir.SymbolicDim.simplify

    def counted(size: ir.SymbolicDim) -> ir.SymbolicDim:
        asked.append(str(size))
        return simplify(size)

    monkeypatch.setattr(ir.SymbolicDim, "simplify", counted)
    for a, b in (("_d7", "_d31"), ("_d9", "_d10"), ("unk__8", "_d4")):
        first, last = sorted((a, b))
        for one, other in ((a, b), (b, a)):
            assert simplified(f"width*{one}*{other}//{one}") == f"{other}*width"
            wanted = f"floor({first}/2 + {last}/2 + width/2)"
            assert simplified(f"({other} + {one} + width)//2") == wanted
            assert str(dim_of(f"Max(0, {one} - 2 + 2) * {other}")) == f"{first}*{last}"
    assert len(asked) <= 12


def test_both_parts_of_an_axis_are_all_of_it() -> None:
    """As torch.roll cuts and joins one."""
    assert rejoined("Min(3, n) + Max(0, n - 3) + m") == "m + n"
    assert rejoined("Max(0, floor(n/2) - 2) + Min(2, floor(n/2))") == "floor(n/2)"
    for other in (
        "Max(0, n - 3) + Min(2, n)",
        "Max(0, n - 2)*Min(2, n)",
        "2*Max(0, n-2)+Min(2, n)",
    ):
        assert rejoined(other) == other

    text = """<ir_version: 8, opset_import: ["" : 17]>
    main (float[b,n,4] x) => (float[b,m,4] y)
      <int64[1] none = {0}, int64[1] some = {3}, int64[1] all = {9223372036854775807},
       int64[1] one = {1}> {
      after = Slice (x, some, all, one)
      before = Slice (x, none, some, one)
      y = Concat <axis = 1> (after, before)
    }"""
    model = ir.from_proto(onnx.parser.parse_model(text))
    infer_model(model)
    joined = next(node for node in model.graph if node.op_type == "Concat")
    assert str(joined.outputs[0].shape) == "[b,n,4]"


@pytest.mark.parametrize("form", ["{}*{}", "Max({}, {})", "Min({}, Max({}, 3))", "Max(0, {} - {})"])
def test_a_size_that_is_simple_is_what_sympy_makes_of_it(form: str) -> None:
    for one, other in itertools.product(["a", "b", "2", "0"], repeat=2):
        text = form.format(one, other)
        assert _short(text) == str(ir.SymbolicDim(text).simplify())


def test_sizes_of_pools_behind_pools_stay_as_they_are() -> None:
    """To simplify one more took twice as long, and even to read one takes three times as long."""
    text = "floor(h/8 + 3/8)"
    for _ in range(6):
        text = f"Max(1, floor({text}/2))"
    assert _short(text) == text


def test_simple_sizes_import_no_units() -> None:
    """Which sympy does to simplify anything; it takes as long as numpy."""
    code = "from graphgen.forms import _short; _short('Max(3, a)*1')"
    unwanted = "import sys; assert 'sympy.physics' not in sys.modules"
    subprocess.run([sys.executable, "-c", f"{code}; {unwanted}"], check=True)


@pytest.mark.parametrize(
    ("size", "wanted"),
    [
        ("Max(1, floor(n/2))", ("max", "1", "floor(n/2)")),
        ("Min(m, Max(1, floor(m/2)))", ("min", "m", "Max(1, floor(m/2))")),
        ("Max(1, n) - 1", None),
        ("Max(1, n) + Min(m, Max(1, k))", None),
        ("Min(m, (n) + Max(1, k)) + Min(m, (n))", None),
        ("Min(9, n) * Min(9, m)", None),
        ("Max(1, m, n)", None),
        ("n", None),
    ],
)
def test_a_bound_holds_for_the_whole_size(size: str, wanted: Any) -> None:
    assert bounded(size) == wanted


@pytest.mark.parametrize(
    ("size", "wanted"),
    [
        ("Min(9, n)", "n"),
        ("4*Min(9, n)", "4*n"),
        ("4*Min(9, n + 1)", "4*n + 4"),
        ("Min(1, n)", None),
        ("Min(m, n)", None),
        ("Min(9, n) + 1", None),
        ("m*Min(9, n)", None),
    ],
)
def test_what_is_cut_by_a_number_is_the_rest_beside_it(size: str, wanted: str | None) -> None:
    assert rest_below(size) == wanted


def test_sizes_that_are_never_1_are_multiples() -> None:
    sure = ["2", "10", "2*n", "12*m*n", "3*Min(9, n)", "2*floor(n/2)", "2*Max(0, n - 4)"]
    assert all(map(is_above_one, map(ir.SymbolicDim, sure)))
    unsure = ["1", "0", "n", "m*n", "n/2", "2*n - 1", "n + 2", "2*(n - 1)", "-2*n", "Min(2, n)"]
    assert not any(map(is_above_one, map(ir.SymbolicDim, unsure)))
    assert is_above_one(2) and not is_above_one(1)


def test_windows_of_two_lengths_are_concatenated() -> None:
    """Their sum begins with Max(1, and ends with a parenthesis, but is no maximum."""
    nodes = """
        a = MaxPool <kernel_shape = [2], strides = [2]> (x)
        b = MaxPool <kernel_shape = [1], strides = [3]> (a)
        y = Concat <axis = 2> (a, b)"""
    text = '<ir_version: 9, opset_import: ["": 18]> g (float[n, 4, m] x) => (float[u, v, w] y) {'
    model = ir.from_onnx_text(text + nodes + "}")
    infer_model(model)
    x = RNG.normal(size=(2, 4, 9)).astype(np.float32)
    [y] = run_plain(model, {"x": x})
    shape = model.graph.outputs[0].shape
    assert shape is not None and shape.evaluate({"n": 2, "m": 9}) == y.shape


CHOICES = {
    "numbers": """
        m = Equal (labels, one) l = Where (m, zero, labels) i = Unsqueeze (l, axis)
        g = GatherElements <axis = 1> (x, i) y = Squeeze (g, axis)""",
    "a size": """
        s = Shape <start = 0, end = 1> (x) m = Equal (s, one) y = Where (m, five, s)""",
    "two sizes": """
        s = Shape <start = 0, end = 1> (x) t = Shape <start = 1, end = 2> (x)
        m = Equal (s, one) y = Where (m, t, s)""",
}


@pytest.mark.parametrize("nodes", CHOICES.values(), ids=CHOICES)
def test_b_where_a_is_one_is_no_size_by_itself(nodes: str) -> None:
    """But for sizes that the graph has broadcast, a is the result wherever it is not 1."""
    weights = "int64[3] labels = {1, 1, 2}, int64[1] one = {1}, int64[1] zero = {0},"
    weights += "int64[1] five = {5}, int64[1] axis = {1}"
    text = '<ir_version: 9, opset_import: ["": 18]> g (float[n, k] x) => (float[u] y)'
    text = f"{text} <{weights}> {{ {nodes} }}"
    text = text if "Gather" in nodes else text.replace("float[u] y", "int64[u] y")
    model = ir.from_onnx_text(text)
    best = optimize(model.clone())
    for rows in (3,) if "Gather" in nodes else (1, 3):
        x = RNG.normal(size=(rows, 4)).astype(np.float32)
        [wanted], [got] = (run_plain(m, {"x": x}) for m in (model, best.model))
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize(
    ("size", "least"),
    [
        ("n", 2),
        ("-floor(-floor(n/2)/4)", 1),
        ("-4*floor(-floor(n/2)/4)", 4),
        ("m*n", 0),
        ("n*floor(n/2)", 2),
        ("Max(m, n)", 2),
        ("Min(3, n)", 2),
        ("n - m", -math.inf),
        ("Min(m, n) + 3", 3),
        ("n**2", -math.inf),
    ],
)
def test_a_size_is_as_large_as_what_it_is_made_of(size: str, least: float) -> None:
    sizes = new_context()
    assert isinstance(sizes, FileSizes)
    sizes.note(ir.SymbolicDim("n"), 2)
    for bound in (-9, 0, 1, 2, 3, 4, 5):
        assert sizes.is_at_least(ir.SymbolicDim(size), bound) == (bound <= least)


def test_windows_of_an_image_of_any_length_are_not_nothing() -> None:
    """A convolution of 2 had a row or more, so ⌈⌊n / 2⌋ / 4⌉ windows are 1 or more, as in Swin."""
    weights = "int64 four = {4}, int64 axis = {2}, int64[1] first = {0}, int64[1] second = {1},"
    weights += "int64[1] at = {2}, int64[2] before = {0, 0}, int64[2] end = {4, 8},"
    weights += "int64[1] rest = {-1}"
    nodes = """
        c = Conv <strides = [2]> (x, w)
        s = Shape (c) k = Gather (s, axis) more = Sub (four, k) wide = Mod (more, four)
        pad = Unsqueeze (wide, first)
        none = Slice (before, first, second) b = Gather (s, none)
        pads = Concat <axis = 0> (before, first, first, first, pad) p = Pad (c, pads)
        one = Slice (p, first, second, at)
        t = Transpose <perm = [0, 2, 1]> (p) u = Shape (t) long = Gather (u, second)
        fours = Unsqueeze (four, first) m = Div (long, fours)
        sizes = Concat <axis = 0> (b, m, end) windows = Reshape (t, sizes)
        flat = Concat <axis = 0> (rest, end) rows = Reshape (windows, flat)
        v = Shape (rows) total = Gather (v, first)
        last = Concat <axis = 0> (total, fours, rest, fours) y = Reshape (rows, last)"""
    text = '<ir_version: 9, opset_import: ["": 23]> g (float[b, 3, n] x, float[8, 3, 2] w) => '
    text = f"{text} (float[u, v, f, g] y, float[b, c, o] one) <{weights}> {{ {nodes} }}"
    model = ir.from_onnx_text(text)
    infer_model(model)
    y, one = (value.shape for value in model.graph.outputs)
    assert y is not None and one is not None and (y[2], one[2]) == (2, 1)
    for n in (2, 3, 8, 9, 16, 21):
        x = RNG.normal(size=(2, 3, n)).astype(np.float32)
        got = run_plain(model, {"x": x, "w": RNG.normal(size=(8, 3, 2)).astype(np.float32)})
        assert [z.evaluate({"b": 2, "n": n}) for z in (y, one)] == [z.shape for z in got]
