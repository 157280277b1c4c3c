"""Targets: the runtime's own answer, the committed table, and what each makes of our operators."""

import itertools
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from small_models import ROUNDING, Block, block, relative_rms, run_plain, vary

import graphgen as gg
from graphgen import nn, ops, targets
from graphgen.edit import infer_model, to_model
from graphgen.graph import count_operators
from graphgen.measure.reference import evaluate
from graphgen.nn.module import DType, build
from graphgen.passes import optimize
from graphgen.passes.legalize import as_variant
from graphgen.record import recording
from graphgen.targets import Target, target
from graphgen.version import minor

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "padded": {"mask": True},
    "grouped": {"kv_heads": 2, "causal": True, "mask": True},
    "rms, tanh": {"norm": "rms", "activation": "gelu_tanh"},
    "silu": {"activation": "silu"},
    "relu": {"activation": "relu"},
}


def half(model: ir.Model) -> ir.Model:
    """The same block in float16: inputs and weights."""
    for value in [*model.graph.inputs, *model.graph.initializers.values()]:
        if value.dtype == ir.DataType.FLOAT:
            value.type = ir.TensorType(ir.DataType.FLOAT16)
            if value.const_value is not None:
                array = np.clip(value.const_value.numpy(), -65504, 65504).astype(np.float16)
                value.const_value = ir.tensor(array, name=value.name)
    for node in model.graph:
        for value in node.outputs:
            value.type = None
    return model


@pytest.mark.share(3)
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("primitives", [True, False])
def test_every_operator_emitted_for_cuda_has_a_kernel(
    name: str, dtype: str, primitives: bool
) -> None:
    model = block(primitives=primitives, **VARIANTS[name])
    model = half(model) if dtype == "float16" else model
    best = optimize(model, target="cuda")
    cuda = target("cuda")
    missing = {node.op_type: cuda.missing(node) for node in best.model.graph}
    assert {op: why for op, why in missing.items() if why} == {}
    if dtype == "float32":
        assert best.report.shortfalls() == []


def test_training_operators_of_the_table_fall_back_to_their_bodies() -> None:
    def loss(x: Any, labels: Any, draw: Any) -> Any:
        return ops.cross_entropy(ops.dropout(x, 0.5, draw, 1, 2), labels)

    model = build(loss, x=gg.float32["b", 7], labels=gg.int64["b"], draw=gg.int64[()])
    best = optimize(model, target="cpu")
    assert not [op for op in count_operators(best.model) if op.startswith("graphgen::")]
    [site] = [s for s in legalized(best).sites if "CrossEntropy" in s.reason]
    assert site.reason.endswith("has no CrossEntropy: its body instead")


def test_the_cpu_profile_is_what_the_installed_runtime_says() -> None:
    import onnxruntime as ort

    cpu = target("cpu")
    assert cpu.runtime == ort.__version__
    node = next(iter(build(ops.softmax, x=gg.float32["n"]).graph))
    assert cpu.runs(node)
    assert cpu.missing(next(iter(build(ops.softmax, x=gg.bfloat16["n"]).graph))) is not None


def without(name: str) -> Target:
    """The CPU without one operator."""
    cpu = target("cpu")
    kernels = {
        d: {op: r for op, r in rows.items() if op != name} for d, rows in cpu.kernels.items()
    }
    return replace(cpu, kernels=kernels)


def legalized(best: Any) -> Any:
    """What the pass `legalize` tells."""
    return next(p for p in best.report.passes if p.name == "legalize")


def feeds_of(model: ir.Model) -> dict[str, Any]:
    """Random inputs; of a mask one row keeps a part and one nothing at all."""
    feeds: dict[str, Any] = {
        "x": np.random.default_rng(0).standard_normal((3, 5, 16), dtype=np.float32)
    }
    if any(value.name == "mask" for value in model.graph.inputs):
        feeds["mask"] = np.array([[True] * 5, [False, False, True, True, False], [False] * 5])
    return feeds


@pytest.mark.share(3)
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("primitives", [True, False])
def test_an_older_runtime_gets_attention_in_its_own_spelling(
    name: str, primitives: bool, monkeypatch: Any
) -> None:
    monkeypatch.setattr("graphgen.passes.find_target", lambda *_: without("Attention"))
    model = block(primitives=primitives, **VARIANTS[name])
    best = optimize(model, verify=True)
    counts = count_operators(best.model)
    assert counts["com.microsoft::MultiHeadAttention"] == 1
    assert not {"Attention", "Softmax"} & set(counts)
    assert name in ("padded", "grouped") or "Transpose" not in counts
    [site] = [s for s in legalized(best).sites if "no Attention" in s.reason]
    assert site.reason.endswith("MultiHeadAttention instead")
    feeds = feeds_of(model)
    (wanted,), (given,) = evaluate(model, feeds), run_plain(best.model, feeds)
    assert relative_rms(wanted, given) < ROUNDING  # rows that keep nothing give zeros in both


FLOAT32 = ir.DataType.FLOAT


def bare_attention(mask: ir.DataType | None = None, rank: int = 4, **attributes: Any) -> ir.Model:
    """Attention alone on (b, h, t, 8) and a mask of ones and the last two sizes."""
    with recording() as tape:
        kv = attributes.pop("kv", 4)
        q = tape.input("q", FLOAT32, ["b", 4, "t", 8])
        k, v = (tape.input(n, FLOAT32, ["b", kv, "s", 8]) for n in "kv")
        sizes: list[int | str] = ["b", 1, "t", "s"]
        given = None if mask is None else tape.input("m", mask, sizes[4 - rank :])
        y = ops.scaled_dot_product_attention(q, k, v, given, **attributes)
        return to_model(tape, {"y": y})


@pytest.mark.parametrize("mask", [None, ir.DataType.BOOL, FLOAT32])
@pytest.mark.parametrize("rank", [2, 4])
@pytest.mark.parametrize("attributes", [{}, {"is_causal": 1}, {"kv": 2}, {"kv": 1, "scale": 0.5}])
def test_the_official_runtime_has_attention_with_any_mask(
    mask: ir.DataType | None, rank: int, attributes: dict[str, Any]
) -> None:
    model = bare_attention(mask, rank, **attributes)
    best = optimize(model, target="official")
    [node] = (n for n in best.model.graph if n.op_type == "MultiHeadAttention")
    if mask is not None:  # onnxruntime 1.19 refuses a bias for all heads, 1.20 misreads it
        assert str(node.inputs[5].shape) == "[b,4,t,s]"
    rng = np.random.default_rng(0)
    kv = attributes.get("kv", 4)
    shapes = {"q": (2, 4, 3, 8), "k": (2, kv, 5, 8), "v": (2, kv, 5, 8)}
    feeds: dict[str, Any] = {n: rng.standard_normal(s, np.float32) for n, s in shapes.items()}
    if mask is not None:
        keep = rng.random((2, 1, 3, 5)[4 - rank :]) < 0.6
        keep[..., 1, :] = False
        low = -np.inf if attributes else np.finfo(np.float32).min
        bias = np.where(keep, rng.standard_normal(keep.shape, np.float32), low)
        feeds["m"] = keep if mask is ir.DataType.BOOL else bias.astype(np.float32)
    (wanted,), (given,) = evaluate(model, feeds), run_plain(best.model, feeds)
    assert relative_rms(wanted, given) < ROUNDING


@pytest.mark.parametrize("name", ["RandomNormalLike", "GlobalLpPool"])
def test_beside_an_operator_that_ends_before_opset_22_attention_has_its_older_spelling(
    name: str,
) -> None:
    """A file has one opset, and of Attention's the runtime has no kernel of random numbers."""
    model = bare_attention()
    node = ir.node(name, [model.graph.inputs[0]])
    node.outputs[0].name = "r"
    model.graph.append(node)
    model.graph.outputs.append(node.outputs[0])
    best = optimize(model)
    assert count_operators(best.model)["com.microsoft::MultiHeadAttention"] == 1
    [site] = legalized(best).sites
    assert " at opset 21) has no Attention for " in site.reason
    feeds = {n: np.ones((2, 4, 3, 8), np.float32) for n in "qkv"}
    np.testing.assert_allclose(run_plain(best.model, feeds)[0], feeds["v"])


def test_what_multi_head_attention_cannot_say_becomes_the_body() -> None:
    best = optimize(bare_attention(softcap=30.0), target="official")
    assert "com.microsoft::MultiHeadAttention" not in count_operators(best.model)
    [site] = [s for s in legalized(best).sites if "Attention" in s.reason]
    assert site.reason == "official (onnxruntime 1.19.2) has no Attention: its body instead"


def official_models(folder: Path) -> list[tuple[Path, ir.Model]]:
    """Every variant as a file for the official runtime, and the model it was made from."""
    made = []
    for number, (name, primitives) in enumerate(itertools.product(VARIANTS, (True, False))):
        model = block(primitives=primitives, **VARIANTS[name])
        best = optimize(model, target="official", verify=number == 0)
        path = gg.export(best, folder / f"{number}.onnx")
        made.append((path, model))
    return made


def test_the_official_runtime_gets_what_it_has(tmp_path: Path) -> None:
    official = target("official")
    assert (official.runtime, official.opset) == ("1.19.2", 21)
    for path, model in official_models(tmp_path):
        proto = onnx.load(path)
        assert proto.ir_version <= 10
        assert {o.domain: o.version for o in proto.opset_import}[""] <= 21
        written = ir.from_proto(proto)
        assert {why for node in written.graph if (why := official.missing(node))} == set()
        counts = count_operators(written)
        assert counts["com.microsoft::MultiHeadAttention"] == 1
        feeds = feeds_of(model)
        (wanted,), (given,) = evaluate(model, feeds), run_plain(written, feeds)
        assert relative_rms(wanted, given) < ROUNDING


@pytest.mark.parametrize("name", VARIANTS)
def test_webgpu_gets_what_it_has(name: str, tmp_path: Path) -> None:
    """All that calculates floats has a kernel there, and the CPU runs the file, too."""
    webgpu, model = target("webgpu"), block(primitives=True, **VARIANTS[name])
    best = optimize(model, target="webgpu", verify=name == "grouped")
    proto = onnx.load(gg.export(best, tmp_path / "m.onnx"))
    assert {o.domain: o.version for o in proto.opset_import}[""] <= webgpu.opset == 21
    infer_model(written := ir.from_proto(proto))
    assert {why for node in written.graph if (why := webgpu.missing(node))} == set()
    counts = count_operators(written)
    assert counts["com.microsoft::MultiHeadAttention"] == 1 and "Attention" not in counts
    feeds = feeds_of(model)
    (wanted,), (given,) = evaluate(model, feeds), run_plain(written, feeds)
    assert relative_rms(wanted, given) < ROUNDING


def test_webgpu_leaves_to_the_cpu_what_calculates_no_floats() -> None:
    """Int64 has no kernels there, but nobody wants the body of such a node."""

    model, webgpu = gg.build(ops.relu, x=gg.int32["a"]), target("webgpu")
    assert count_operators(optimize(model, target="webgpu").model) == {"Relu": 1}
    [node] = model.graph
    assert webgpu.runs(node) and not replace(webgpu, elsewhere={}).runs(node)


GROUP = "GroupQueryAttention <num_heads = 2, kv_num_heads = 2"


@pytest.mark.parametrize(
    ("call", "given", "told"),
    [
        (f"{GROUP}, softcap = 9.0>", ", n, m", "with a softcap"),
        ("MultiHeadAttention <num_heads = 2>", "n", "with a mask of padding"),
    ],
)
def test_webgpu_refuses_what_it_leaves_out_or_fails_on(call: str, given: str, told: str) -> None:
    lengths = "int32[1] n" + ", int32 m" * (", m" in given)
    written = f"""<ir_version: 8, opset_import: ["": 18, "com.microsoft": 1]>
        g (float[1, 3, 16] x, {lengths}) => (float[1, 3, 16] y) {{
            y = com.microsoft.{call} (x, x, x, , {given})
        }}"""
    model = ir.from_proto(onnx.parser.parse_model(written))
    infer_model(model)
    [node] = model.graph
    assert told in (target("webgpu").missing(node) or "") and target("cpu").runs(node)
    done = optimize(model, target="webgpu").model.graph
    assert {why for node in done if (why := target("webgpu").missing(node))} == set()


def test_webgpu_rounds_to_the_even_number(tmp_path: Path) -> None:
    """It has no Round: of floor, which must not carry just below a half, or above 2²³."""
    x = np.array(
        [0.5, 1.5, -0.5, -1.5, -2.5, 2.4999998, 0.49999997, 2**23 + 1, -7.7, 3e38, -np.inf]
    )
    model = gg.build(ops.round, x=gg.float32["n"])
    best = optimize(model, target="webgpu").model
    assert "Round" not in count_operators(best)
    x = np.concatenate([x, np.random.default_rng(0).normal(size=999) * 50]).astype(np.float32)
    np.testing.assert_array_equal(run_plain(best, {"x": x})[0], np.rint(x))


@pytest.mark.parametrize("version", ["1.24.1", "1.99.0", "1.3.0"])
@pytest.mark.parametrize("own", ["OpenVINOExecutionProvider", "CUDAExecutionProvider"])
def test_builds_for_other_devices_are_not_asked_for_their_kernels(
    own: str, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There, get_all_opkernel_def ends the process if a library is missing."""
    build = SimpleNamespace(
        __version__=version, get_available_providers=lambda: [own, "CPUExecutionProvider"]
    )
    monkeypatch.setattr(targets, "import_runtime", lambda: build)
    monkeypatch.setattr(targets, "registered", lambda provider: pytest.fail("it was asked"))
    found = targets.target.__wrapped__("cpu")
    newest = {"1.24.1": "1.24", "1.99.0": "1.32", "1.3.0": "1.19"}[version]
    assert found.runtime == version and found.kernels == target("cpu", newest).kernels


@pytest.mark.parametrize("shape", [(2, 6, 9, 7), (2, 9, 12)])
def test_webgpu_convolves_channels_of_zeros_too(shape: tuple[int, ...]) -> None:
    """Its kernel reads the wrong ones of 6 or 9 channels; those of a multiple of 4 are right."""
    n, generator = len(shape) - 2, np.random.default_rng(0)
    w = generator.standard_normal((8, shape[1], *[3] * n), np.float32)
    b = generator.standard_normal(8, np.float32)

    def convolve(x: Any) -> Any:
        return ops.conv(x, w, b, strides=[2] * n, pads=[1] * 2 * n, dilations=[2] * n)

    sizes: Any = ("batch", shape[1], *"hw"[:n])
    model = gg.build(convolve, x=gg.float32[sizes])
    assert count_operators(optimize(model, target="cpu").model) == {"Conv": 1}
    best = optimize(model, target="webgpu").model
    [node] = [node for node in best.graph if node.op_type == "Conv"]
    channels = [value.shape[1] for value in node.inputs[:2] if value is not None and value.shape]
    assert channels == [-(-shape[1] // 4) * 4] * 2
    feeds = {"x": generator.standard_normal(shape, np.float32)}
    assert relative_rms(*evaluate(model, feeds), *run_plain(best, feeds)) < ROUNDING


RUN = """
import sys, collections, numpy as np, onnxruntime
assert onnxruntime.__version__.startswith("1.19."), onnxruntime.__version__
folder = sys.argv[1]
for number in range(int(sys.argv[2])):
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = f"{folder}/{number}.loaded.onnx"
    session = onnxruntime.InferenceSession(
        f"{folder}/{number}.onnx", options, providers=["CPUExecutionProvider"])
    feeds = dict(np.load(f"{folder}/{number}.npz"))
    np.save(f"{folder}/{number}.npy", session.run(None, feeds)[0])
"""


@pytest.mark.skipif(
    "GRAPHGEN_OFFICIAL_PYTHON" not in os.environ,
    reason="GRAPHGEN_OFFICIAL_PYTHON names no interpreter with onnxruntime-training 1.19.2",
)
def test_the_official_runtime_runs_what_it_gets(tmp_path: Path) -> None:
    made = official_models(tmp_path)
    for path, model in made:
        np.savez(path.with_suffix(".npz"), **feeds_of(model))
    command = [os.environ["GRAPHGEN_OFFICIAL_PYTHON"], "-c", RUN, str(tmp_path), str(len(made))]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    subprocess.run(command, check=True, env=environment)
    for path, model in made:
        (wanted,) = evaluate(model, feeds_of(model))
        assert relative_rms(wanted, np.load(path.with_suffix(".npy"))) < ROUNDING
        loaded = [node.op_type for node in onnx.load(path.with_suffix(".loaded.onnx")).graph.node]
        norms = [op for op in loaded if op.endswith("LayerNormalization")]
        assert len(norms) == 2  # the body of RMSNormalization is one node there


def one_node(
    op_type: str,
    shapes: dict[str, Any],
    domain: str = "",
    mask: Any = np.float32,
    dtype: Any = np.float32,
    **attributes: Any,
) -> tuple[ir.Model, dict[str, Any]]:
    """A node on inputs of these shapes, and arrays for it; a mask hides the first row."""
    feeds = {n: np.ones(s, mask if n == "mask" else dtype) for n, s in shapes.items()}
    if "mask" in feeds:
        feeds["mask"][...] = mask is np.bool_
        np.atleast_2d(feeds["mask"])[..., :1, :] = 0 if mask is np.bool_ else -np.inf
    if "v" in feeds:
        feeds["v"][..., 0, :] = 3.0
    inputs = [ir.val(n, ir.DataType.from_numpy(x.dtype), x.shape) for n, x in feeds.items()]
    node = ir.node(op_type, inputs, attributes, domain=domain)
    node.outputs[0].name = "y"
    node.outputs[0].type = ir.TensorType(ir.DataType.from_numpy(np.dtype(dtype)))
    flat = "q" in feeds and feeds["q"].ndim == 3
    node.outputs[0].shape = ir.Shape([None] * (3 if flat else 4))
    imports = {"": 23, **({domain: 1} if domain else {})}
    graph = ir.Graph(inputs, node.outputs, nodes=[node], opset_imports=imports, name="one")
    return ir.Model(graph, ir_version=11), feeds


HEADS = {"q": (2, 4, 3, 8), "k": (2, 4, 5, 8), "v": (2, 4, 5, 8)}
EMPTY = {name: (0, *shape[1:]) for name, shape in HEADS.items()}
MULTI = {"domain": "com.microsoft", "num_heads": 4}
FLAT = {"q": (2, 3, 32), "k": (2, 5, 32), "v": (2, 5, 32)}
HIDDEN = {"hidden_size": 5}
BATCH_FIRST = {**HIDDEN, "layout": 1}
KNOWN_REFUSALS: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    ("Attention", "", HEADS, {}),
    ("Attention", "of an empty tensor", EMPTY, {}),
    ("Attention", "", {**HEADS, "mask": (2, 1, 3, 5)}, {}),
    ("Attention", "", {**HEADS, "mask": (4, 3, 5)}, {"mask": np.bool_}),
    ("Attention", "with a mask that broadcasts", {**HEADS, "mask": (2, 1, 1, 5)}, {}),
    ("Attention", "with a mask that broadcasts", {**HEADS, "mask": (3, 1)}, {"mask": np.bool_}),
    ("Attention", "with a mask that broadcasts", {**HEADS, "mask": (5,)}, {}),
    ("MultiHeadAttention", "", FLAT, MULTI),
    ("MultiHeadAttention", "with packed operands", {"q": (2, 3, 4, 3, 8)}, MULTI),
    ("MultiHeadAttention", "with packed operands", {"q": (2, 3, 32), "k": (2, 5, 4, 2, 8)}, MULTI),
    ("GRU", "", {"x": (3, 2, 4), "w": (1, 15, 4), "r": (1, 15, 5)}, HIDDEN),
    ("GRU", "with layout 1", {"x": (2, 3, 4), "w": (1, 15, 4), "r": (1, 15, 5)}, BATCH_FIRST),
    (
        "LSTM",
        "in float64",
        {"x": (3, 2, 4), "w": (1, 20, 4), "r": (1, 20, 5)},
        {**HIDDEN, "dtype": np.float64},
    ),
    ("RNN", "with layout 1", {"x": (2, 3, 4), "w": (1, 5, 4), "r": (1, 5, 5)}, BATCH_FIRST),
]


@pytest.mark.parametrize(("op_type", "refused", "shapes", "attributes"), KNOWN_REFUSALS)
def test_known_refusals_are_what_the_installed_runtime_refuses(
    op_type: str, refused: str, shapes: Any, attributes: dict[str, Any], tmp_path: Path
) -> None:
    """Where this fails for a newer runtime, it has been mended: the entry needs a version."""
    cpu = target("cpu")
    if op_type == "Attention" and (cpu.opset < 23 or minor(cpu.runtime) < (1, 28)):
        pytest.skip(f"the kernel of onnxruntime {cpu.runtime} is refused as a whole, or not there")
    model, feeds = one_node(op_type, shapes, **attributes)
    missing = cpu.missing(model.graph[0])
    assert (missing is not None) == bool(refused)
    assert refused in (missing or "")
    gg.export(model, tmp_path / "one.onnx")
    try:
        run_plain(model, feeds)
        runs = True
    except Exception:  # of the runtime, which has several kinds
        runs = False
    assert runs == (not refused)


def test_attention_runs_though_no_reader_can_infer_the_width_of_v(tmp_path: Path) -> None:
    """The runtime infers a width of 0 for V[..., ?], and refuses the product that follows."""
    text = """<ir_version: 10, opset_import: ["": 23]>
        g (float[b, t, 8] q, float[b, s, 8] k, float[m, l] v, float[8, 3] w) => (float[b, t, 3] y)
        <int64[1] last = {8}> {
        z = Shape <end = 2> (k) sizes = Concat <axis = 0> (z, last) r = Reshape (v, sizes)
        a = Attention <q_num_heads = 2, kv_num_heads = 2> (q, k, r) y = MatMul (a, w) }"""
    path = tmp_path / "a.onnx"
    onnx.save(onnx.parser.parse_model(text), path)
    best = gg.optimize(gg.load(path))
    rng = np.random.default_rng(0)
    sizes = {"q": (1, 3, 8), "k": (1, 4, 8), "v": (8, 4), "w": (8, 3)}
    feeds = {name: rng.standard_normal(size).astype("f4") for name, size in sizes.items()}
    [y] = run_plain(best.model, feeds)
    [want] = evaluate(gg.load(path), feeds)
    assert relative_rms(y, want) < ROUNDING


def test_rows_that_a_mask_hides_are_zeros_where_attention_with_a_mask_is_emitted() -> None:
    model, feeds = one_node("Attention", {**HEADS, "mask": (2, 1, 3, 5)}, mask=np.bool_)
    told = "cpu (onnxruntime 1.27.0) refuses Attention with a mask that may hide all keys"
    assert target("cpu", "1.27").missing(model.graph[0]) == told
    assert target("cpu", "1.28").missing(model.graph[0]) is None
    cpu = target("cpu")
    if cpu.opset >= 23:
        [y] = run_plain(model, feeds)
        assert bool(np.all(y[:, :, 0] == 0.0)) == cpu.runs(model.graph[0])


def test_weights_of_eight_bits_need_a_runtime_that_multiplies_them() -> None:
    model = ir.from_onnx_text("""<ir_version: 8, opset_import: ["": 18, "com.microsoft": 1]>
        g (float[m, 32] x, uint8[8, 2, 16] w, float[8, 2] s) => (float[m, 8] y) {
            y = com.microsoft.MatMulNBits <K = 32, N = 8, bits = 8, block_size = 16> (x, w, s)
        }""")
    told = "(onnxruntime 1.22.1) refuses MatMulNBits with eight bits"
    assert target("cpu", "1.22").missing(model.graph[0]) == f"cpu {told}"
    assert target("cpu", "1.23").missing(model.graph[0]) is None


def test_empty_operands_go_to_multi_head_attention_where_that_bears_them() -> None:
    model, feeds = one_node(
        "MultiHeadAttention", {n: (0, *s[1:]) for n, s in FLAT.items()}, **MULTI
    )
    assert "of an empty tensor" in str(target("cpu", "1.28").missing(model.graph[0]))
    assert target("cpu", "1.29").missing(model.graph[0]) is None
    if target("cpu").runs(model.graph[0]):  # others end the process
        assert run_plain(model, feeds)[0].shape == (0, 3, 32)


def test_what_no_kernel_runs_and_no_operator_here_means_stays_with_a_remark() -> None:
    newer, _ = one_node("Swish", {"q": (2, 3, 4)})
    newer.graph.opset_imports[""] = 24
    assert legalized(optimize(newer, runtime="1.32")).sites == []  # which inlines it
    [site] = legalized(optimize(newer, target="official")).sites
    assert site.reason == "official (onnxruntime 1.19.2) has no Swish, 1 left as they were"


def test_another_version_is_read_from_its_table() -> None:
    old = target("cpu", "1.20")
    assert (old.runtime, old.opset, str(old)) == ("1.20.1", 21, "cpu (onnxruntime 1.20.1)")
    assert target("cpu", "1.20.7") == old
    model = block(causal=True)
    best = optimize(model, runtime="1.22")
    assert best.report.to_json()["runtime"] == "1.22.1"
    assert count_operators(best.model)["com.microsoft::MultiHeadAttention"] == 1
    newer = optimize(model, runtime="1.23")
    assert count_operators(newer.model)["Attention"] == 1


@pytest.mark.parametrize(
    ("name", "version", "told"),
    [
        ("cpu", "1.18", "there are kernel tables of 1.19, 1.20, "),
        ("cpu", "new", "onnxruntime 'new' is not known"),
        ("cuda", "1.20", "there are kernel tables of 1.31"),
        ("webgpu", "1.20", "there are kernel tables of 1.32"),
        ("official", "1.31", "there are kernel tables of 1.19"),
        ("tpu", None, "target is 'tpu'; choose 'cpu', 'cuda', 'webgpu' or 'official'"),
    ],
)
def test_an_unknown_version_is_told_with_those_known(
    name: str, version: str | None, told: str
) -> None:
    with pytest.raises(gg.GraphgenError, match=told):
        optimize(block(), target=name, runtime=version)


def test_no_variant_is_taken_where_nothing_fits() -> None:
    model = gg.build(vary(Block(16, num_heads=4)), x=gg.float32["b", "s", 16])
    norm = next(node for node in model.graph if node.op_type == "LayerNormalization")
    assert as_variant(norm, target("cpu")) is None


def test_half_precision_models_keep_their_dtype() -> None:
    best = optimize(half(block(primitives=True)), target="cuda").model
    assert best.graph.outputs[0].dtype == ir.DataType.FLOAT16


@pytest.mark.parametrize(
    "options", [{"causal": True}, {"mask": True}, {"causal": True, "mask": True}]
)
def test_attention_is_found_in_half_precision(options: dict[str, Any]) -> None:
    counts = count_operators(optimize(half(block(**options)), target="cuda").model)
    norms = sum(n for name, n in counts.items() if name.endswith("LayerNormalization"))
    assert (counts["Attention"], norms) == (1, 2)


def test_dtypes_are_specifications() -> None:
    assert isinstance(gg.float16, DType)
    with pytest.raises(gg.GraphgenError, match="is not a size"):
        gg.float32["batch", 1.5]  # type: ignore[index]
    assert isinstance(nn.Linear(2, 3), nn.Module)


def test_sines_for_webgpu_are_close_at_any_angle() -> None:
    """Its own have no bound beyond π; 2¹⁷ turns are an angle of 823,549."""
    model = gg.build(lambda x: (ops.sin(x), ops.cos(x), ops.tan(x)), x=gg.float32["n"])
    best = optimize(model, target="webgpu").model
    assert not {"Sin", "Cos", "Tan"} & count_operators(best).keys()
    for most in (4.0, 1e5, 8e5):
        x = np.linspace(-most, most, 20001, dtype=np.float32)
        sines, cosines, tangents = run_plain(best, {"x": x})
        wide = x.astype(np.float64)
        np.testing.assert_allclose(sines, np.sin(wide), rtol=0, atol=6e-7)
        np.testing.assert_allclose(cosines, np.cos(wide), rtol=0, atol=6e-7)
        np.testing.assert_array_equal(tangents, sines / cosines)
