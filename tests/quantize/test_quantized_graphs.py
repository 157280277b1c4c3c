"""Quantized graphs, ours and those of others: types, meaning, cost, passes and bisecting."""

import re
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import onnx_ir as ir
import pytest
from schemes import SCHEMES
from small_models import ROUNDING, relative_rms, run_plain, vary

import graphgen as gg
from graphgen import nn, ops
from graphgen.autodiff import grad
from graphgen.commands import main
from graphgen.edit import infer_model
from graphgen.errors import GraphgenError
from graphgen.graph import count_operators
from graphgen.infer import describe
from graphgen.laboratory.bisect import bisect
from graphgen.match import Rewrite
from graphgen.measure.cost import flops, moves, traffic
from graphgen.measure.feeds import at_sizes
from graphgen.measure.reference import evaluate
from graphgen.models import create, find
from graphgen.nn.module import DType
from graphgen.op import TABLE
from graphgen.ops.quantized import matmul_integer_to_float
from graphgen.places import where_is
from graphgen.quantize import quantize
from graphgen.recognize.pattern import Pattern
from graphgen.targets import target as find_target
from graphgen.value import adopt

RNG = np.random.default_rng(0)
FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"


def parse(body: str, *, opset: int = 21) -> ir.Model:
    header = f'<ir_version: 10, opset_import: ["": {opset}, "com.microsoft": 1]>'
    return ir.from_proto(onnx.parser.parse_model(header + "g " + body))


def numbers(*shape: int) -> Any:
    return RNG.standard_normal(shape).astype(np.float32)


def steps(*shape: int) -> Any:
    return RNG.uniform(0.05, 0.2, shape).astype(np.float32)


BOTH = "{ q = QuantizeLinear {a} (x, s, z) y = DequantizeLinear {a} (q, s, z) }"
FOREIGN: dict[str, tuple[str, str, dict[str, Any]]] = {
    "one scale": ("", "float[b,3] x, float s, uint8 z", {"x": (2, 3), "s": (), "z": ()}),
    "one scale and an axis": (
        "<axis = 1>", "float[3] x, float s, uint8 z", {"x": (3,), "s": (), "z": ()}),
    "a vector of one scale": (
        "<axis = 3>", "float[b,3] x, float[1] s, uint8[1] z", {"x": (2, 3), "s": (1,), "z": (1,)}),
    "a scale for each column": (
        "<axis = -1>", "float[b,3] x, float[3] s, uint8[3] z", {"x": (2, 3), "s": (3,), "z": (3,)}),
    "a scale for each row": (
        "<axis = 0>", "float[n,3,2] x, float[n] s, uint8[n] z",
        {"x": (4, 3, 2), "s": (4,), "z": (4,)}),
    "blocks": (
        "<axis = 1, block_size = 3>", "float[b,t] x, float[b,k] s, uint8[b,k] z",
        {"x": (2, 7), "s": (2, 3), "z": (2, 3)}),
}  # fmt: skip


@pytest.mark.parametrize("name", FOREIGN)
def test_graphs_of_others_are_typed_and_mean_what_the_runtime_computes(name: str) -> None:
    attributes, inputs, shapes = FOREIGN[name]
    body = BOTH.replace("{a}", attributes)
    shape = inputs.partition("]" if "[" in inputs.split()[0] else " ")[0].partition("[")[2]
    model = parse(f"({inputs}) => (float[{shape}] y) {body}")
    for node in model.graph:
        node.outputs[0].type = node.outputs[0].shape = None
    infer_model(model)
    assert [describe(node.outputs[0]) for node in model.graph] == [
        f"uint8[{shape.replace(',', ', ')}]",
        f"float[{shape.replace(',', ', ')}]",
    ]
    feeds = {"x": numbers(*shapes["x"]), "s": steps(*shapes["s"])}
    feeds["z"] = np.asarray(RNG.integers(0, 256, shapes["z"]), np.uint8)
    [wanted] = evaluate(model, feeds)
    assert relative_rms(wanted, run_plain(model, feeds)[0]) < ROUNDING
    best = gg.optimize(model, verify=True).model
    assert count_operators(best) == {"DequantizeLinear": 1, "QuantizeLinear": 1}


@pytest.mark.parametrize("name", ["QuantizeLinear", "DequantizeLinear"])
@pytest.mark.parametrize(
    "shape, scales, axis, block_size, problem",
    [
        ((2, 3), (3,), 3, 0, "axis 3 does not exist in 2 dimensions"),
        ((2, 3), (3,), -3, 0, "axis -3 does not exist in 2 dimensions"),
        ((3,), (3,), 1, 0, "axis 1 does not exist in 1 dimensions"),
        ((2, 1), (3,), 1, 0, r"the shape \[3\]; .* needs one element, or \[1\]"),
        ((2, 7), (1, 7), 1, 0, r"the shape \[1, 7\]; .* needs one element, or \[7\]"),
        ((2, 7), (2, 4), 1, 3, r"the shape \[2, 4\]; .* needs one element, or \[2, 3\]"),
        ((2, 7), (2, 3), 2, 3, "axis 2 does not exist in 2 dimensions"),
    ],
)
def test_scales_that_do_not_fit_are_refused(
    name: str,
    shape: tuple[int, ...],
    scales: tuple[int, ...],
    axis: int,
    block_size: int,
    problem: str,
) -> None:
    """The runtime refuses all of these; with one scale it does not look at the axis."""
    op, dtype = TABLE["", name], gg.float32 if name[0] == "Q" else DType(ir.DataType.INT8)
    x = np.zeros(shape, dtype.dtype)
    call = partial(op, axis=axis, block_size=block_size)
    for given in ((np.ones(scales, np.float32),), (1.0, np.zeros(scales, np.int8))):
        with pytest.raises(GraphgenError, match=f"^{name}: .*{problem}.*test_quantized"):
            call(x, *given)
        with pytest.raises(GraphgenError, match=rf"^{name}\(.*{problem}.*test_quantized_graphs"):
            gg.build(lambda x, given=given: call(x, *given), x=dtype[shape])


def test_a_gather_from_blocks_along_an_axis_that_does_not_exist_is_refused() -> None:
    gather_blocks = TABLE["com.microsoft", "GatherBlockQuantized"]
    table, rows, scales = np.ones((4, 32), np.int8), np.array([1]), np.ones((4, 1), np.float32)
    for name in ("gather_axis", "quantize_axis"):
        with pytest.raises(GraphgenError, match=f"{name}: axis -3 does not exist in 2 dimensions"):
            gather_blocks(table, rows, scales, block_size=32, **{name: -3})


def test_a_gemm_of_integers_gives_integers() -> None:
    """The library of rules has it that it gives floats, and a file of them was refused."""
    model = parse(
        "(uint8[n,4] a, uint8[4,3] b, float s, uint8 z) => (float[n,3] y) "
        "{ q = com.microsoft.QGemm(a, s, z, b, s, z, , s, z) y = DequantizeLinear(q, s, z) }"
    )
    infer_model(model)
    assert describe(model.graph[0].outputs[0]) == "uint8[n, 3]"
    feeds = {"a": RNG.integers(0, 256, (2, 4)), "b": RNG.integers(0, 256, (4, 3))}
    feeds = {name: x.astype(np.uint8) for name, x in feeds.items()}
    feeds |= {"s": np.array(0.03, np.float32), "z": np.array(120, np.uint8)}
    [wanted] = evaluate(model, feeds)
    assert relative_rms(wanted, run_plain(model, feeds)[0]) < ROUNDING


def test_a_dtype_that_is_written_out_is_widened_in_the_reference() -> None:
    model = parse(
        "(uint8[3] x, float s) => (float[3] y) { y = DequantizeLinear <output_dtype = 1> (x, s) }",
        opset=23,
    )
    feeds = {"x": np.array([1, 3, 255], np.uint8), "s": np.float32(0.1)}
    [y] = evaluate(model, feeds)
    np.testing.assert_array_equal(y, feeds["x"] * np.float64(feeds["s"]))


def test_floats_of_eight_bits_are_rounded_in_the_reference() -> None:
    model = parse(
        "(float[3] x, float s) => (float[3] y) "
        "{ q = QuantizeLinear <output_dtype = 17> (x, s) y = DequantizeLinear(q, s) }"
    )
    feeds = {"x": np.array([0.3, 17.5, -1e9], np.float32), "s": np.array(1, np.float32)}
    [y] = evaluate(model, feeds)
    np.testing.assert_array_equal(y, [0.3125, 18.0, -448.0])
    np.testing.assert_array_equal(run_plain(model, feeds)[0], y)


@pytest.mark.parametrize(
    "call, message",
    [
        ("MatMulNBits <K = 16, N = 1, block_size = 16> (x, b, s, , g)", "g_idx is deprecated"),
        ("MatMulNBits <K = 16, N = 1, block_size = 16, bits = 3> (x, b, s)", "bits is 3"),
        ("MatMulNBits <K = 16, N = 1, block_size = 16, weight_prepacked = 1> (x, b, s)",
         "weight_prepacked is not supported"),
        ("GatherBlockQuantized <gather_axis = 2, block_size = 16> (b, g, s)",
         "gathered along axis 0 and quantized along its last one, 2, not 2 and 1"),
    ],
)  # fmt: skip
def test_what_has_no_body_is_typed_and_kept_but_not_evaluated(call: str, message: str) -> None:
    model = parse(
        "(float[n, 16] x, uint8[1, 1, 8] b, float[1, 1] s, int32[16] g) => (float[n, 1] y)"
        f"{{ y = com.microsoft.{call} }}"
    )
    operators = count_operators(model)
    assert count_operators(gg.optimize(model).model) == operators
    with pytest.raises(GraphgenError, match=message):
        arrays = {"x": numbers(2, 16), "s": steps(1, 1), "g": np.zeros(16, np.int32)}
        evaluate(model, arrays | {"b": np.zeros((1, 1, 8), np.uint8)})


@cache
def made(scheme: str) -> ir.Model:
    sizes = {"vocabulary": 96, "features": 64, "layers": 2, "num_heads": 4, "length": 32}
    module = create("decoder", **sizes)
    model = gg.optimize(gg.build(module, **find("decoder").inputs())).model
    return quantize(model, scheme, threshold=1.0)[0]


def language_model(scheme: str) -> ir.Model:
    return made(scheme).clone()


def exact(model: ir.Model) -> ir.Model:
    """The same with int4 products that round nothing."""
    for node in model.graph:
        if "accuracy_level" in node.attributes:
            node.attributes["accuracy_level"] = ir.AttrInt64("accuracy_level", 0)
    return model


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_reference_knows_our_own_models(scheme: str) -> None:
    model, feeds = language_model(scheme), {"input_ids": RNG.integers(0, 96, (2, 9))}
    kernels = find_target("cpu").kernels["com.microsoft"].get("GatherBlockQuantized")
    packed = scheme == "int4" and "uint8" in str(kernels)  # from onnxruntime 1.22 on
    assert ("GatherBlockQuantized" in str(count_operators(model))) == packed
    [wanted] = evaluate(model, feeds)
    if scheme == "int4":  # at level 4, kernels round to int8 what they read
        assert 1e-4 < relative_rms(wanted, run_plain(model, feeds)[0]) < 3e-2
    assert relative_rms(wanted, run_plain(exact(model), feeds)[0]) < ROUNDING


@pytest.mark.parametrize("target", ["cpu", "cuda", "official"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_no_target_gets_the_body_of_a_quantized_operator(scheme: str, target: str) -> None:
    model = language_model(scheme)
    counts = {k: n for k, n in count_operators(model).items() if "Quant" in k or "MatMul" in k}
    best = gg.optimize(model, target=target, verify=target == "cpu")
    after = count_operators(best.model)
    assert counts and {name: after.get(name, 0) for name in counts} == counts
    if target == "cpu":
        assert not [s for p in best.report.passes for s in p.sites if s.rolled_back]


def test_cost_is_that_of_the_product_and_of_packed_weights() -> None:
    w = numbers(40, 24)
    plain = gg.build(lambda x: x @ w, x=gg.float32[6, 40])
    for scheme, packed in (("int8", 40 * 24 + 4 * 24), ("int4", 24 * 32 + 4 * 24 + 24)):
        model, _ = quantize(plain, scheme, threshold=9.0)
        context, product = infer_model(model), model.graph[-1]
        assert flops(product, context) == (2 * 6 * 40 * 24, 0)
        x = 6 * 40 * 4 if scheme == "int4" else 6 * 40 + 4 + 1
        operands = {value for value in product.inputs if value is not None}
        assert moves(product, operands) == (x + packed, 6 * 24 * 4)
        if scheme == "int8":
            rounded = model.graph[0]
            assert flops(rounded, context).products == 0 < flops(rounded, context).others
        assert traffic(model) is not None


@pytest.mark.parametrize("scheme", SCHEMES)
def test_types_follow_without_a_look_at_weights(scheme: str) -> None:
    model = language_model(scheme)

    def read() -> Any:
        raise AssertionError("a weight was read")

    for value in model.graph.initializers.values():
        tensor = value.const_value
        if tensor is not None and tensor.size > 64:
            value.const_value = ir.LazyTensor(read, tensor.dtype, tensor.shape)
    wanted = {v.name: describe(v) for node in model.graph for v in node.outputs}
    for node in model.graph:
        for value in node.outputs:
            value.type = value.shape = None
    context = infer_model(model)
    assert {v.name: describe(v) for node in model.graph for v in node.outputs} == wanted
    fixed = at_sizes(model, {"batch": 2, "seq": 5})
    assert all(flops(node, context).total >= 0 for node in fixed.graph)


def test_the_body_of_layers_that_are_alike_is_recorded_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, found = language_model("int8"), matmul_integer_to_float.function
    recorded: list[str] = []

    def body(*operands: Any) -> Any:
        recorded.append(", ".join(map(describe, operands)))
        return found(*operands)

    monkeypatch.setattr(matmul_integer_to_float, "function", body)
    for _ in range(2):
        recorded.clear()
        infer_model(model)
        assert len(recorded) == len({*recorded}) == 4  # of 13: attention, up, down and the head


@pytest.mark.parametrize("scheme", SCHEMES)
def test_quantized_numbers_have_no_gradient(scheme: str) -> None:
    w = numbers(64, 64)
    model = gg.build(lambda x: ops.reduce_sum(x @ w, None, keepdims=0), x=gg.float32["n", 64])
    quantized, _ = quantize(model, scheme, calibration=())
    with pytest.raises(
        GraphgenError, match="uses quantized numbers, which have no gradient; train the"
    ):
        grad(quantized)


class Layer(nn.Module):
    """x + gelu(W norm(x / 500)): the variance that the norm sees is near its epsilon."""

    def __init__(self) -> None:
        self.norm, self.up = nn.LayerNorm(32), nn.Linear(32, 32)

    def __call__(self, x: Any) -> Any:
        return x + ops.gelu(self.up(self.norm(x * 0.002)))


class Layers(nn.Module):
    def __init__(self) -> None:
        self.layers = [Layer() for _ in range(3)]

    def __call__(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.share(3)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_fault_in_a_pass_is_found_in_a_quantized_graph(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = gg.float32["batch", "seq", 32]
    plain = gg.build(vary(Layers()), primitives=True, weights=None, x=x)
    model, _ = quantize(plain, scheme, threshold=9.0)
    options: dict[str, Any] = {"tolerance": 1e-4, "dims": {"batch": 2, "seq": 5}}
    sound = bisect(model, **options)
    assert sound.complete and not sound.guilty and sound.reference.startswith("the unfused graph")
    found = Pattern.match

    def match(self: Pattern, node: ir.Node, *above: Any) -> Rewrite | None:
        rewrite = found(self, node, *above)
        layer = re.match(r"layers\.(\d+)", where_is(node))
        norm = self.op.name == "LayerNormalization"
        if rewrite is not None and norm and layer is not None and layer[1] == "1":
            made = rewrite.results.producer()
            epsilon = 10 * made.attributes["epsilon"].as_float()
            operands = map(adopt, made.inputs)
            rewrite.results = ops.layer_normalization(*operands, epsilon=epsilon)
        return rewrite

    monkeypatch.setattr(Pattern, "match", match)
    path = gg.export(model, tmp_path / "model.onnx")
    [step] = bisect(gg.load(path), **options).guilty
    assert (step.name, step.where) == ("fuse_norm", "layers.1.norm")
    told = ["bisect", str(path), "--tolerance", "1e-4", "--dim", "batch=2", "--dim", "seq=5"]
    assert main([*told, "-o", str(tmp_path / "found")]) == 3


@pytest.mark.share(3)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_commands_take_a_quantized_folder(
    scheme: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out, source = tmp_path / "out", str(FIXTURES / "gpt2_checkpoint")
    assert main(["build", source, "--quantize", scheme, "-o", str(out)]) == 0
    [model] = map(str, out.rglob("*.onnx"))
    sizes = ["batch_size=2", "sequence_length=5", "past_sequence_length=3"]
    dims = [word for size in sizes for word in ("--dim", size)]
    capsys.readouterr()
    assert main(["inspect", model, *dims]) == 0
    assert "in matrix products" in capsys.readouterr().out
    assert main(["bisect", model, *dims, "--tolerance", "1e-5", "-o", str(tmp_path / "b")]) == 0
    best = str(tmp_path / "best.onnx")
    assert main(["optimize", model, "--verify", "-o", best]) == 0
    first, second = gg.load(model), gg.load(best)
    counts, fewer = count_operators(first), count_operators(second)
    if scheme == "weights8":  # whose terms begin with a Reshape, which may follow another one
        assert counts.pop("Reshape") >= fewer.pop("Reshape")
    assert counts == fewer

    def wrong(rule: Any, node: ir.Node) -> Any:
        rewrite = rule(node)
        if isinstance(rewrite, Rewrite) and where_is(node) == "norm":
            rewrite.results = ops.tanh(adopt(rewrite.results))  # a norm sees no factor
        return rewrite

    reshape = TABLE["", "Reshape"]
    monkeypatch.setattr(reshape, "canonical", [partial(wrong, f) for f in reshape.canonical])
    capsys.readouterr()
    assert main(["bisect", model, *dims, "--tolerance", "1e-3", "-o", str(tmp_path / "c")]) == 3
    assert re.search(r"\nrewrite \d, canonicalize at norm: ", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("scale", "size"), [(gg.float32[8], 8), (gg.float32["n"], "n"), (gg.float32[1], "n")]
)
def test_scales_fit_sizes_that_have_a_name(scale: Any, size: Any) -> None:
    """Recorded as its body, rounding to int8 and back is what it is on arrays."""

    def function(x: Any, scale: Any) -> Any:
        q = TABLE["", "QuantizeLinear"](x, scale, output_dtype="int8")
        return TABLE["", "DequantizeLinear"](q, scale)

    model = gg.build(function, primitives=True, x=gg.float32["b", size], scale=scale)
    random = np.random.default_rng(0)
    x = random.standard_normal((3, 8), np.float32)
    steps = random.random(1 if scale.shape == (1,) else 8, np.float32) + np.float32(0.01)
    [got] = run_plain(model, {"x": x, "scale": steps})
    np.testing.assert_array_equal(got, function(x, steps))
