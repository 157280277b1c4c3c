import importlib.metadata
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import onnx
import onnx.helper as oh
import onnxruntime as ort
import pytest
from small_models import ROUNDING, relative_rms

from graphgen import opening
from graphgen.errors import GraphgenError, GraphgenWarning
from graphgen.header import read_header
from graphgen.processor import FITS, INT8_KEY, NEEDS, SATURATES, Processor, processor
from graphgen.providers import CPU, CUDA
from graphgen.runtime import OPTIONS_KEY, Session
from graphgen.version import minor

FLOAT, INT64 = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64
X = np.arange(8, dtype=np.float32).reshape(2, 4)
MASK = np.ones((2, 4), np.float32)


def serialize(nodes, inputs, outputs, initializers=(), *, opset=17, ir=8, options=None):
    def values(specs):
        return [oh.make_tensor_value_info(name, *spec) for name, spec in specs.items()]

    graph = oh.make_graph(nodes, "g", values(inputs), values(outputs), list(initializers))
    model = oh.make_model(graph, opset_imports=[oh.make_opsetid("", opset)], ir_version=ir)
    oh.set_model_props(model, {} if options is None else {OPTIONS_KEY: options})
    return model.SerializeToString()


def masked(**kwargs):
    """y = x * mask, z = -x; both inputs share the symbol batch."""
    kind = (FLOAT, ("batch", 4))
    nodes = [oh.make_node("Mul", ["x", "mask"], ["y"]), oh.make_node("Neg", ["x"], ["z"])]
    return serialize(nodes, {"x": kind, "mask": kind}, {"y": kind, "z": kind}, **kwargs)


def unary(op, kind=(FLOAT, ("n",)), result=None, name="x", **attributes):
    return serialize(
        [oh.make_node(op, [name], ["y"], **attributes)], {name: kind}, {"y": result or kind}
    )


def with_weights(path):
    """y = x @ w, w in weights.bin next to the file."""
    w = onnx.numpy_helper.from_array(np.eye(4, dtype=np.float32), "w")
    kind = (FLOAT, ("n", 4))
    data = serialize([oh.make_node("MatMul", ["x", "w"], ["y"])], {"x": kind}, {"y": kind}, [w])
    model = onnx.load_from_string(data)
    onnx.save(model, path, save_as_external_data=True, location="weights.bin", size_threshold=0)


def test_outputs_come_in_graph_order_from_a_path_or_bytes(tmp_path):
    path = tmp_path / "masked.onnx"
    path.write_bytes(masked())
    for model in (path, str(path), masked()):
        y, z = Session(model)(x=X, mask=MASK * 2)
        np.testing.assert_array_equal(y, X * 2)
        np.testing.assert_array_equal(z, -X)
    (z,) = Session(path, outputs=["z"])(x=X, mask=MASK)
    np.testing.assert_array_equal(z, -X)


def test_names_that_are_no_identifiers_and_the_word_feeds():
    for name in ("a.b", "feeds", "self"):
        (y,) = Session(unary("Neg", name=name))({name: X[0]})
        np.testing.assert_array_equal(y, -X[0])
    np.testing.assert_array_equal(Session(masked())({"x": X}, mask=MASK)[0], X)


def test_an_input_with_an_initializer_may_be_left_out():
    kind, w = (FLOAT, (2,)), onnx.numpy_helper.from_array(X[0, :2], "w")
    add = [oh.make_node("Add", ["x", "w"], ["y"])]
    session = Session(serialize(add, {"x": kind, "w": kind}, {"y": kind}, [w]))
    np.testing.assert_array_equal(session(x=X[1, :2])[0], X[0, :2] + X[1, :2])
    np.testing.assert_array_equal(session(x=X[1, :2], w=X[1, :2])[0], 2 * X[1, :2])


@pytest.mark.parametrize(
    ("feeds", "message"),
    [
        ({"x": X, "mash": MASK}, "no input 'mash', only x, mask; did you mean 'mask'"),
        ({"x": X}, "input 'mask' is missing; pass an array of float32.batch, 4."),
        ({"x": X.astype(np.float64), "mask": MASK}, "'x' is float64.2, 4., not float32.*astype"),
        ({"x": X[0], "mask": MASK}, "'x' is float32.4., not float32.batch, 4.*rank must be 2"),
        ({"x": X[:, :3], "mask": MASK}, "its dimension 1 must be 4, not 3"),
        ({"x": X, "mask": np.ones((3, 4), np.float32)}, "'batch' is 3 here and 2 in 'x'"),
        ({"x": [[1.0], [2.0, 3.0]], "mask": MASK}, "'x' got a list .setting an array"),
        ({"x": np.ma.masked_array(X, X > 0), "mask": MASK}, "entries are masked, and would count"),
        (X, "got a ndarray; give arrays by name, such as x="),
        ({"x": "text", "mask": MASK}, "'x' is <U4"),
    ],
)
def test_a_wrong_feed_is_one_error_before_the_run(feeds, message):
    session = Session(masked())
    session._session = None  # the run itself must not be reached
    with pytest.raises(GraphgenError, match=message):
        session(feeds)


def test_a_scalar_input_takes_rank_0_only():
    session = Session(unary("Neg", (FLOAT, ())))
    assert session(x=2)[0] == -2
    with pytest.raises(GraphgenError, match="its rank must be 0, not 1"):
        session(x=X[0])


def test_python_numbers_convert_only_without_loss():
    session = Session(unary("Neg", (INT64, ("n",))))
    assert session(x=[1, 2])[0].dtype == np.int64
    for value in ([1.5], [2**70], ["a"], object()):
        with pytest.raises(GraphgenError, match="'x'"):
            session(x=value)
    with pytest.raises(GraphgenError, match="'x' is int32"):  # a numpy scalar has a dtype
        Session(unary("Neg", (INT64, ())))(x=np.int32(1))


def test_strings_and_non_contiguous_arrays():
    text = Session(unary("Identity", (onnx.TensorProto.STRING, ("n",))))
    for value in (["a", "b"], np.array(["a", "b"]), np.array(["a", "b"], object)):
        assert text(x=value)[0].tolist() == ["a", "b"]
    square = Session(unary("Neg", (FLOAT, ("m", "n"))))
    np.testing.assert_array_equal(square(x=X.T)[0], -X.T)


def test_a_run_that_fails_is_one_error(capfd):
    reshape = [oh.make_node("Reshape", ["x", "to"], ["y"])]
    inputs = {"x": (FLOAT, ("n",)), "to": (INT64, (1,))}
    session = Session(serialize(reshape, inputs, {"y": (FLOAT, ("m",))}))
    with pytest.raises(GraphgenError, match=r"the run failed: .*Reshape"):
        session(x=X[0], to=[3])
    assert capfd.readouterr() == ("", "")


def test_bound_buffers_are_used_in_place():
    x, mask, y = X.copy(), MASK.copy(), np.zeros_like(X)
    run = Session(masked()).bind({"x": x, "mask": mask}, {"y": y})
    bound_y, z = run()
    assert bound_y is y
    x += 1  # seen by the next run without binding again
    address = y.ctypes.data
    _, later_z = run()
    assert run._inputs["x"].data_ptr() == x.ctypes.data
    assert y.ctypes.data == address
    np.testing.assert_array_equal(y, X + 1)
    np.testing.assert_array_equal(later_z, -X - 1)
    np.testing.assert_array_equal(z, -X)  # what the runtime allocated is not written again


def test_one_buffer_is_input_and_output():
    step = serialize(
        [oh.make_node("Sub", ["p", "g"], ["p_next"])],
        {"p": (FLOAT, ("n",)), "g": (FLOAT, ("n",))},
        {"p_next": (FLOAT, ("n",))},
    )
    p = np.zeros(4, np.float32)
    run = Session(step, outputs=["p_next"]).bind(
        {"p": p, "g": np.ones(4, np.float32)}, {"p_next": p}
    )
    for _ in range(3):
        run()  # the gradient's only reference is the binding's
    np.testing.assert_array_equal(p, np.full(4, -3, np.float32))


def test_a_binding_keeps_its_arrays_alive():
    import gc
    import weakref

    x, y = X.copy(), np.zeros_like(X)
    alive = [weakref.ref(x), weakref.ref(y)]
    run = Session(masked(), outputs=["y"]).bind({"x": x, "mask": MASK}, {"y": y})
    del x, y
    gc.collect()
    assert all(ref() is not None for ref in alive)
    np.testing.assert_array_equal(run()[0], X)
    del run
    gc.collect()
    assert all(ref() is None for ref in alive)


def test_an_allocated_output_may_change_its_shape_between_runs():
    x = np.ones(4, np.float32)
    run = Session(unary("NonZero", result=(INT64, (1, "k")))).bind({"x": x})
    assert run()[0].shape == (1, 4)
    x[:3] = 0
    assert run()[0].tolist() == [[3]]


def test_bfloat16_buffers_bind():
    bfloat16, x = onnx.TensorProto.BFLOAT16, np.array([1, 2.5], np.float32)
    y = np.zeros(2, ml_dtypes.bfloat16)
    cast = unary("Cast", (FLOAT, ("n",)), (bfloat16, ("n",)), to=bfloat16)
    Session(cast).bind({"x": x}, {"y": y})()
    assert y.tolist() == [1, 2.5]


@pytest.mark.parametrize(
    ("inputs", "outputs", "message"),
    [
        ({"x": X.T.copy().T, "mask": MASK}, {}, "'x' is not a C-contiguous numpy array"),
        ({"x": X.tolist(), "mask": MASK}, {}, "'x' is not a C-contiguous numpy array"),
        ({"x": X}, {}, "input 'mask' is missing"),
        ({"x": X, "mask": MASK}, {"yy": X}, "no output 'yy', only y, z; did you mean 'y'"),
        ({"x": X, "mask": MASK}, {"y": X.astype(np.int64)}, "output 'y' is int64"),
        ({"x": X, "mask": MASK}, {"y": X[:1].copy()}, "'batch' is 1 here and 2 in 'x'"),
        ({"x": X, "mask": MASK}, {"y": np.broadcast_to(X, X.shape)}, "'y' is read-only"),
    ],
)
def test_a_wrong_buffer_is_one_error(inputs, outputs, message):
    with pytest.raises(GraphgenError, match=message):
        Session(masked()).bind(inputs, outputs)


def test_the_plan_says_what_runs(monkeypatch):
    metadata = {
        "execution_order": "PRIORITY_BASED",
        "enable_mem_pattern": False,
        "enable_mem_reuse": False,
        "graph_optimization_level": "DISABLE_ALL",
        "optimization.disable_specified_optimizers": "MatMulAddFusion;GeluFusion",
        "session.intra_op.allow_spinning": "0",
    }
    model = masked(options=json.dumps(metadata))
    plan = Session(model, threads=1, options={"session.intra_op.allow_spinning": "1"}).plan
    assert json.loads(plan.json()) | {"note": ""} == {
        "runtime": f"onnxruntime {ort.__version__}",
        "processor": str(processor()),
        "device": plan.device,
        "providers": list(plan.providers),
        "placement": plan.placement,
        "note": "",
        "execution_order": "PRIORITY_BASED",
        "enable_mem_pattern": False,
        "enable_mem_reuse": False,
        "graph_optimization_level": "ORT_DISABLE_ALL",
        "disabled_optimizers": ["MatMulAddFusion", "GeluFusion"],
        "threads": 1,
        "config": {
            "optimization.disable_specified_optimizers": "MatMulAddFusion;GeluFusion",
            "session.intra_op.allow_spinning": "1",
        },
    }
    for line in (
        "execution order",
        "int8 by",
        "PRIORITY_BASED",
        "MatMulAddFusion, GeluFusion",
        "spinning",
    ):
        assert line in str(plan)
    monkeypatch.setattr(ort, "InferenceSession", ort.InferenceSession.__base__)  # of all threads
    assert "runtime's default" in str(Session(masked(), provider="cpu").plan)


LEVEL = "session.qdq_matmulnbits_accuracy_level"

RESTORED = {  # weights of int8, and whether the runtime can make them uint8
    "of a row": ("DequantizeLinear<axis = 1>(w, s, z)", "", True),
    "without zeros": ("DequantizeLinear<axis = 1>(w, s)", "", False),
    "read twice": (
        "DequantizeLinear<axis = 1>(w, s, z)",
        "r = DequantizeLinear<axis = 1>(w, s, z) v = MatMul(x, r) y = Add(u, v)",
        False,
    ),
}


@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("product", ["MatMul(x, q)", "Gemm(x, q)", "MatMul(x, t)"])
@pytest.mark.parametrize("dtype", ["int4", "uint4", "int8", "uint8"])
def test_what_is_multiplied_by_restored_weights_is_not_rounded(monkeypatch, dtype, product, rounds):
    """The runtime rounds x to 8 bits, an error of 5e-3, though the file says nothing of it."""
    rng = np.random.default_rng(0)
    numbers = np.ravel(rng.integers(0, 8, (64, 64)))
    w = oh.make_tensor("w", onnx.TensorProto.DataType.Value(dtype.upper()), (64, 64), numbers)
    rounded = "e = QuantizeLinear(d, one) y = DequantizeLinear(e, one)"
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 21]>
        g (float[n, 64] x) => (float[n, 64] u, float[n, 64] y)
        <float one = {{1}}, float s = {{0.3}}> {{
            q = DequantizeLinear(w, s) t = Transpose<perm = [1, 0]>(q) u = {product}
            d = Neg(u) {rounded if rounds else "y = Identity(d)"}
        }}"""
    )
    model.graph.initializer.append(w)
    x = rng.standard_normal((3, 64)).astype(np.float32)
    (wanted, _) = Session(model.SerializeToString(), optimize=False)(x=x)
    monkeypatch.setattr(opening, "processor", lambda: Processor("one", "VNNI"))
    session = Session(model.SerializeToString(), provider="cpu")
    assert relative_rms(wanted, session(x=x)[0]) < ROUNDING
    floats, unsigned = "session.disable_quant_qdq", minor(ort.__version__) < (1, 28)
    slow = dtype.endswith("8") and not rounds
    assert {*session.plan.config} == ({floats} if slow or unsigned else {LEVEL})
    asked = {LEVEL: "4"}
    kept = Session(model.SerializeToString(), provider="cpu", options=asked).plan.config
    assert kept[LEVEL] == "4" and (floats in kept) is unsigned


@pytest.mark.parametrize("case", RESTORED)
def test_weights_of_int8_that_cannot_be_made_unsigned_are_read_as_they_are(monkeypatch, case):
    restored, more, possible = RESTORED[case]
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 21]> g (float[2, 3] x) => (float[2, 2] y)
        <int8[3, 2] w = {{-127, 3, 5, 127, 99, -7}}, float[2] s = {{0.5, 0.25}},
         int8[2] z = {{0, 0}}> {{
            q = {restored} u = MatMul(x, q) {more or "y = Identity(u)"}
        }}"""
    )
    x = np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)
    (wanted,) = Session(model.SerializeToString(), optimize=False)(x=x)
    monkeypatch.setattr(opening, "processor", lambda: Processor("one", SATURATES))
    # With this option, the runtime makes integers of them.
    session = Session(model.SerializeToString(), options={LEVEL: "4"})
    rounded = 1e-2 if possible else 1e-6  # else the runtime's product rounds x to 8 bits
    np.testing.assert_allclose(session(x=x)[0], wanted, rtol=rounded)
    assert session.plan.config.get("session.x64quantprecision") == "1"
    assert session.plan.config.get("session.disable_quant_qdq") == (None if possible else "1")


SIGNED = {  # integers below zero, without a zero point, behind what the runtime moves
    "a row": "q = DequantizeLinear<axis = 0>(w, s) y = Transpose<perm = [1, 0]>(q)",
    "a table": "q = DequantizeLinear(w, one) y = Transpose<perm = [1, 0]>(q)",
    "another shape": "q = DequantizeLinear(w, one) y = Reshape(q, sizes)",
    "an input": "q = DequantizeLinear(k, one) y = Reshape(q, sizes)",
    "rows": "v = Gather(w, i) q = DequantizeLinear(v, one) y = Squeeze(q)",
    "sums": "v = MatMulInteger(k, turned) q = DequantizeLinear(v, one) y = Reshape(q, n)",
    "turned": "q = DequantizeLinear(k, one) y = Transpose<perm = [1, 0]>(q)",
}


@pytest.mark.parametrize("case", SIGNED)
def test_integers_without_a_zero_point_keep_their_sign(monkeypatch, case):
    monkeypatch.setattr(opening, "processor", lambda: Processor("one", "VNNI"))  # else floats, too
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 13]> g (int8[2, 3] k, int64[2] i) => (float[n, m] z)
        <int8[2, 3] w = {{-127, 3, 5, 127, 99, -7}}, float[2] s = {{0.5, 0.25}},
         float one = {{0.5}}, int64[2] sizes = {{3, 2}}, int64[2] n = {{2, -1}},
         int8[3, 1] turned = {{-9, 1, 2}}> {{ {SIGNED[case]} z = Neg(y) }}"""
    )
    feeds = {"k": np.array([[-3, 2, 1], [5, -6, 4]], np.int8), "i": np.array([1, 0])}
    (wanted,) = Session(model.SerializeToString(), optimize=False)(feeds)
    assert wanted.max() > 0
    old = minor(ort.__version__) < (1, 28)
    if old and case == "turned":  # it cannot be told to leave that
        with pytest.raises(GraphgenError, match=r"upgrade onnxruntime .* to 1\.28"):
            Session(model.SerializeToString())
        return
    session = Session(model.SerializeToString())
    np.testing.assert_array_equal(session(feeds)[0], wanted)
    constant = case in ("a row", "a table", "another shape")
    option = session.plan.config.get("session.disable_quant_qdq")
    assert option == (None if constant and not old else "1")


def test_integers_without_a_zero_point_keep_their_sign_in_functions():
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 13, "own": 1]>
        g (int8[2, 3] k) => (float[3, 2] z) { z = own.turn(k) }
        <domain: "own", opset_import: ["": 13]> turn (k) => (z) {
            one = Constant<value = float {0.5}>() q = DequantizeLinear(k, one)
            two = Constant<value = int64[2] {3, 2}>() y = Reshape(q, two) z = Neg(y)
        }"""
    ).SerializeToString()
    k = np.array([[-3, 2, 1], [5, -6, 4]], np.int8)
    np.testing.assert_array_equal(Session(model)(k=k)[0], -0.5 * k.reshape(3, 2))


@pytest.mark.parametrize("stored", [False, True])
def test_a_file_without_restored_weights_is_not_parsed(monkeypatch, tmp_path, stored):
    def refused(_):
        raise AssertionError("parsed")

    monkeypatch.setattr(opening, "processor", lambda: Processor("one", SATURATES))
    monkeypatch.setattr("graphgen.opening.proto_of", refused)
    (path := tmp_path / "m.onnx").write_bytes(masked())
    plan = Session(path if stored else masked()).plan
    assert "session.disable_quant_qdq" not in plan.config


@pytest.mark.parametrize("needs", [None, FITS, NEEDS])
@pytest.mark.parametrize("asked", [{}, {"session.x64quantprecision": "0"}])
@pytest.mark.parametrize("optimize", [True, False])
def test_sums_of_int8_are_exact_or_it_is_said(monkeypatch, recwarn, needs, asked, optimize):
    """Other files' int8 runs exactly where sums are cut off; one that needs more says what."""
    model = onnx.load_from_string(masked())
    oh.set_model_props(model, {} if needs is None else {INT8_KEY: needs})
    exact = needs != FITS and optimize and not asked
    for how, saturates in (("VNNI", False), (SATURATES, True)):
        monkeypatch.setattr(opening, "processor", lambda how=how: Processor("one", how))
        recwarn.clear()
        plan = Session(model.SerializeToString(), options=asked, optimize=optimize).plan
        option = plan.config.get("session.x64quantprecision")
        assert option == ("1" if exact and saturates else asked.get("session.x64quantprecision"))
        told = [str(w.message) for w in recwarn if w.category is GraphgenWarning]
        assert len(told) == (saturates and needs == NEEDS)
        if told:
            end = "runs exactly by slower kernels" if exact else "gives wrong numbers"
            assert told[0].endswith(f"on this processor (one, int8 by {SATURATES}) it {end}")


def test_arguments_go_before_options_and_options_before_the_file():
    model = masked(options='{"graph_optimization_level": "ENABLE_BASIC"}')
    level = "graph_optimization_level"
    assert Session(model).plan.graph_optimization_level == "ORT_ENABLE_BASIC"
    extended = Session(model, options={level: "ORT_ENABLE_EXTENDED"})
    assert extended.plan.graph_optimization_level == "ORT_ENABLE_EXTENDED"
    off = Session(model, options={level: "ENABLE_ALL"}, optimize=False)
    assert off.plan.graph_optimization_level == "ORT_DISABLE_ALL"


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"options": {"enable_mem_patern": "0"}}, "did you mean 'enable_mem_pattern'"),
        ({"options": {"execution_order": "RANDOM"}}, "'RANDOM'; choose from DEFAULT, PRIORITY"),
        ({"threads": -1}, "intra_op_num_threads is '-1'"),
        ({"provider": "tpu"}, "provider is 'tpu'; choose 'auto', 'cpu', 'cuda', 'webgpu'"),
        ({"outputs": ["w"]}, "no output 'w'"),
    ],
)
def test_a_wrong_option_is_one_error(kwargs, message):
    with pytest.raises(GraphgenError, match=message):
        Session(masked(), **kwargs)


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_wrong_metadata_is_one_error(text):
    with pytest.raises(GraphgenError, match="must be a JSON object"):
        Session(masked(options=text))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"),
        (b"This is a text file, of some length.\n" * 9, "not an ONNX model"),
        (masked()[:-30], "cut short at"),
        (masked()[:20], "cut short at"),
        (masked(ir=99), "IR version 99, the runtime reads up to .*upgrade onnxruntime"),
        (masked(opset=99), "opset 99 of ai.onnx, the runtime reads up to .*upgrade onnxruntime"),
        (unary("Frobnicate"), "does not load the model .*Frobnicate"),
        (None, "No such file"),
    ],
)
def test_a_file_that_does_not_load_is_one_error(tmp_path, capfd, data, message):
    path = tmp_path / "model.onnx"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(GraphgenError, match=rf"Session\(model.onnx\): .*{message}"):
        Session(path)
    if data:
        with pytest.raises(GraphgenError, match=message):
            Session(data)
    assert capfd.readouterr() == ("", "")


def test_no_prefix_of_a_model_ends_in_another_error():
    whole = masked()
    for size in range(len(whole)):
        with pytest.raises(GraphgenError):
            Session(whole[:size])
            raise GraphgenError("cut where a field ends: what is left is a model")


def test_a_graph_cut_in_its_last_field_is_seen():
    graph = onnx.load_from_string(masked()).graph
    graph.value_info.append(graph.input[0])
    data = onnx.ModelProto(ir_version=8, graph=graph).SerializeToString()
    with pytest.raises(GraphgenError, match="cut short at"):
        Session(data[:-5])


def test_a_directory_and_a_model_object_are_refused(tmp_path):
    with pytest.raises(GraphgenError, match="Is a directory"):
        Session(tmp_path)
    with pytest.raises(GraphgenError, match="path or the bytes"):
        Session(onnx.ModelProto())


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"short")])
def test_missing_or_short_external_data_is_one_error(tmp_path, damage):
    path = tmp_path / "model.onnx"
    with_weights(path)
    np.testing.assert_array_equal(Session(path)(x=X)[0], X)
    damage(tmp_path / "weights.bin")
    with pytest.raises(
        GraphgenError, match=r"weights outside itself .*(weights\.bin|file_length: 5)"
    ):
        Session(path)


@pytest.mark.parametrize("count", [0, 3])
def test_bfloat16_goes_in_and_comes_out(count):
    """The runtime's Python has no such arrays: they are handed over by their memory."""
    kind = (onnx.TensorProto.BFLOAT16, ("n", 2))
    twice = oh.make_node("Concat", ["x", "x"], ["y"], axis=0)
    out = (kind[0], ("m", 2))
    session = Session(serialize([twice], {"x": kind}, {"y": out}))
    x = np.arange(2 * count).reshape(2, count).T.astype(ml_dtypes.bfloat16)  # not contiguous
    (y,) = session(x=x)
    assert y.dtype == x.dtype and np.array_equal(y, np.concatenate([x, x]))
    y[:] = 1  # an array of its own
    out = np.empty_like(y)
    assert session.bind({"x": np.ascontiguousarray(x)}, {"y": out})()[0] is out
    assert np.array_equal(out, np.concatenate([x, x]))


@pytest.mark.skipif(
    minor(ort.__version__) < (1, 23), reason="the runtime casts no four bits before 1.23"
)
@pytest.mark.parametrize("name", ["UINT4", "INT4"])
@pytest.mark.parametrize("shape", [(3, 5), (), (0, 3), (1, 2)])
def test_elements_of_four_bits_go_in_and_come_out(name, shape):
    """The runtime packs two into a byte; NumPy has one in each."""
    narrow, axes = getattr(onnx.TensorProto, name), tuple("ab")[: len(shape)]
    nodes = [oh.make_node("Cast", ["x"], ["y"], to=FLOAT)]
    nodes += [oh.make_node("Cast", ["y"], ["z"], to=narrow)]
    kinds = {"y": (FLOAT, axes), "z": (narrow, axes)}
    session = Session(serialize(nodes, {"x": (narrow, axes)}, kinds, opset=21))
    dtype = onnx.helper.tensor_dtype_to_np_dtype(narrow)
    x = np.asarray(np.arange(np.prod(shape, dtype=int)).reshape(shape) % 8, dtype)
    y, z = session(x=x)
    np.testing.assert_array_equal(y, x.astype(np.float32))
    assert z.dtype == dtype and z.shape == shape and np.array_equal(z, x)
    with pytest.raises(GraphgenError, match="'x' has elements of 4 bits, which the runtime packs"):
        session.bind({"x": x})


def test_the_header_is_read_without_weights_and_nodes(tmp_path):
    w = onnx.numpy_helper.from_array(np.zeros((64, 64), np.float32), "w")
    kind = (FLOAT, ("n", 64))
    matmul = [oh.make_node("MatMul", ["x", "w"], ["y"])]
    path = tmp_path / "model.onnx"
    path.write_bytes(serialize(matmul, {"x": kind}, {"y": kind}, [w], options="{}"))
    whole = onnx.load(path)
    _, header = read_header(path)
    assert not header.graph.node and not header.graph.initializer
    assert header.graph.input == whole.graph.input
    assert header.graph.output == whole.graph.output
    assert header.metadata_props == whole.metadata_props
    assert header.opset_import == whole.opset_import


def install(monkeypatch, *names):
    def distributions(*, name):
        return [SimpleNamespace(name=name)] if name in names else []

    monkeypatch.setattr(importlib.metadata, "distributions", distributions)


def test_both_runtimes_installed_is_one_error(monkeypatch):
    install(monkeypatch, "onnxruntime", "onnxruntime-gpu")
    with pytest.raises(GraphgenError, match=r"both installed.*pip uninstall -y .*\[cpu\].*\[gpu\]"):
        Session(masked())


def test_no_runtime_installed_is_one_error(monkeypatch):
    install(monkeypatch)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(GraphgenError, match=r"no onnxruntime is installed.*\[cpu\].*\[gpu\]"):
        Session(masked())


def test_an_interrupt_while_the_runtime_is_imported_is_an_interrupt(monkeypatch):
    """Its extension module says that its initialization failed."""

    def interrupted(name):
        raise ImportError("initialization failed") from KeyboardInterrupt()

    monkeypatch.setattr(importlib, "import_module", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Session(masked())


def test_a_broken_runtime_is_one_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", SimpleNamespace())
    with pytest.raises(GraphgenError, match="has lost its library; run `pip uninstall"):
        Session(masked())


def pretend_cuda(monkeypatch, create):
    monkeypatch.setattr(opening, "has_cuda", opening.has_cuda.__wrapped__)  # not remembered
    monkeypatch.setattr(ort, "get_available_providers", lambda: [CUDA, CPU])
    monkeypatch.setattr(ort, "InferenceSession", create)
    monkeypatch.setattr(ort, "preload_dlls", lambda: print("noise"), raising=False)


class Loaded(ort.InferenceSession):
    """The CPU's session under the name of CUDA's, as far as one can tell without the device."""

    def __init__(self, model, options, providers, **kwargs):
        self.cuda = CUDA in (providers[0], providers[0][0])  # with options, or alone
        super().__init__(model, options, providers=[CPU], **kwargs)

    def get_providers(self):
        return [CUDA, CPU] if self.cuda else [CPU]

    def get_provider_graph_assignment_info(self):
        return []


class NotLoaded(Loaded):
    def get_providers(self):
        return [CPU]


class NoDevice(Loaded):
    def __init__(self, model, options, providers, **kwargs):
        # The runtime's own fallback would go on with the CPU after a few words on stdout.
        own = CUDA in (providers[0], providers[0][0])
        if own and not kwargs.get("enable_fallback", 1):
            raise RuntimeError("CUDA failure 100: no CUDA-capable device is detected")
        super().__init__(model, options, providers, **kwargs)


def test_cuda_is_taken_where_it_works(monkeypatch, capsys):
    pretend_cuda(monkeypatch, Loaded)
    for provider in (None, "cuda"):
        session = Session(masked(), provider=provider)
        assert (session.plan.device, session.plan.note) == ("cuda", "")
        np.testing.assert_array_equal(session.bind({"x": X, "mask": MASK})()[0], X)
    assert Session(masked(), provider="cpu").plan.device == "cpu"
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("create", "reason"), [(NotLoaded, "cuDNN did not load"), (NoDevice, "CUDA failure 100")]
)
def test_cuda_by_name_is_refused_where_it_does_not_work(monkeypatch, create, reason):
    pretend_cuda(monkeypatch, create)
    plan = Session(masked()).plan
    assert plan.device == "cpu" and reason in plan.note and reason in str(plan)
    with pytest.raises(GraphgenError, match=rf'{reason}.*pip install "graphgen-onnx\[gpu\]"'):
        Session(masked(), provider="cuda")
    with pytest.raises(GraphgenError, match="Frobnicate"):  # the file's fault, not CUDA's
        Session(unary("Frobnicate"), provider="cuda")


class Refusing(Loaded):
    """A device that works, and refuses a model that has nodes."""

    def __init__(self, model, options, providers, **kwargs):
        own = CUDA in (providers[0], providers[0][0])
        if own and onnx.load_from_string(model).graph.node:
            raise RuntimeError("Training mode does not support BN opset 14")
        super().__init__(model, options, providers, **kwargs)


def test_a_file_that_cuda_does_not_load_is_not_taken_for_a_missing_device(monkeypatch):
    pretend_cuda(monkeypatch, Refusing)
    note = "runs on the CPU, CUDA does not load it: Training mode does not support BN opset 14"
    assert Session(masked()).plan.note == note
    with pytest.raises(GraphgenError, match=r"on cuda does not load the model .*Training mode"):
        Session(masked(), provider="cuda")


def test_cuda_by_name_is_refused_where_the_runtime_lacks_it(monkeypatch):
    monkeypatch.setattr(ort, "get_available_providers", lambda: [CPU])
    assert "CUDA is not available" in Session(masked()).plan.note
    with pytest.raises(GraphgenError, match=r"no CUDAExecutionProvider.*graphgen-onnx\[gpu\]"):
        Session(masked(), provider="cuda")


@pytest.mark.cuda
@pytest.mark.skipif(
    CUDA not in ort.get_available_providers(),
    reason="this onnxruntime has no CUDAExecutionProvider",
)
def test_cuda_runs_and_sees_changed_buffers():
    session = Session(masked(), provider="cuda")
    assert session.plan.device == "cuda"
    np.testing.assert_array_equal(session(x=X, mask=MASK)[0], X)
    x, y = X.copy(), np.zeros_like(X)
    run = session.bind({"x": x, "mask": MASK}, {"y": y})
    run()
    x += 1
    run()
    np.testing.assert_array_equal(y, X + 1)
