"""Bad input of every kind: one line that says what to do, exit code 2, and nothing left behind."""

import functools
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

import graphgen as gg
from graphgen.commands import main
from graphgen.export import protobuf
from graphgen.generation.options import Options, read_options
from graphgen.graph import count_operators
from graphgen.models import create
from graphgen.targets import target
from graphgen.train import schedule


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a model and inputs, in which commands run."""
    x = gg.float32["batch", "seq", 64]
    model = gg.build(gg.nn.EncoderLayer(64, num_heads=4, causal=True), x=x)
    gg.export(model, tmp_path / "m.onnx")
    gg.export(model, tmp_path / "large.onnx", external_data=True)
    np.save(tmp_path / "x.npy", np.zeros((1, 3, 64), np.float32))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def contents(folder):
    return {p: p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture
def refused(folder, capsys):
    """Runs a command that must be refused, and returns its one line."""

    def run(*arguments, code=2):
        before = contents(folder)
        assert main([str(a) for a in arguments]) == code
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("graphgen: ")
        assert captured.err.count("\n") == 1
        assert contents(folder) == before
        return captured.err

    return run


# fmt: off
MISTAKES = (
    lambda: create("decodr"),
    lambda: create("decoder", layer=2),
    lambda: create("decoder", layers=10**9),
    lambda: create("dit", features=6),
    lambda: gg.nn.Convolution(4, 4, kernel=3, groups=3),
    lambda: gg.nn.LayerNorm(0),
    lambda: schedule.constant(1e-3, warmup=-1),
    lambda: schedule.cosine(-1, warmup=0, steps=9),
    lambda: schedule.linear(1e-3, warmup=9, steps=9),
    lambda: schedule.noam(0, warmup=1),
    lambda: Options(top_p=2),
    lambda: Options(eos=[-1]),
    lambda: Options(early_stopping="soon"),
    lambda: Options(beams=2, temperature=1),
    lambda: read_options(None, topk=3),
    lambda: gg.Generator("m.onnx", chunk=0),
    lambda: gg.Generator(3),
)
# fmt: on


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_call_is_an_error_at_its_line(mistake):
    with pytest.raises(gg.GraphgenError) as caught:
        mistake()
    line = f"(test_bad_input.py:{mistake.__code__.co_firstlineno})"
    assert str(caught.value).endswith(f" {line}") and str(caught.value).count(line) == 1


BESIDE = Path(gg.__file__).parents[1]


@pytest.mark.parametrize(
    ("file", "line"),
    [
        (functools.__file__, "test_bad_input.py:"),  # the line that calls Python's own library
        (BESIDE / "graphgen_of_mine.py", "graphgen_of_mine.py:1"),
        (BESIDE / "export_a_model.py", "export_a_model.py:1"),
    ],
)
def test_the_line_is_the_users(file, line):
    with pytest.raises(gg.GraphgenError, match=rf" \({line}\d*\)$"):
        exec(compile("gg.nn.LayerNorm(0)", file, "exec"), {"gg": gg})


def test_wrong_shape_at_build():
    with pytest.raises(gg.GraphgenError) as caught:
        gg.build(gg.nn.LayerNorm(512), x=gg.float32["batch", "seq", 256])
    assert str(caught.value) == (
        "LayerNorm(features=512): x is float[batch, seq, 256]; its last dimension must be 512 "
        f"(test_bad_input.py:{caught.traceback[0].lineno + 1})"
    )


def test_unknown_attribute():
    with pytest.raises(gg.GraphgenError, match=r"Softmax: .*'axes'.* its attributes axis") as e:
        gg.build(lambda x: gg.ops.softmax(x, axes=1), x=gg.float32["n"])
    assert "test_bad_input.py:" in str(e.value)


def test_missing_checkpoint_key():
    weights = {"weight": np.ones((4, 3), np.float32), "gain": np.ones(3, np.float32)}
    with pytest.raises(gg.GraphgenError, match="missing: bias; not in the module: gain"):
        gg.build(gg.nn.Linear(4, 3), weights=weights, x=gg.float32["n", 4])


LINEAR = gg.nn.Linear(4, 4)
X = gg.float32["n", 4]


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: gg.build(lambda x: LINEAR(gg.ops.exp(x)), x=X), "pass its module itself to build"),
        (lambda: gg.nn.Linear(0, 4), "Linear: features_in is 0; it must be an integer"),
        (lambda: gg.nn.Linear(4.0, 4), "Linear: features_in is 4.0"),
        (lambda: gg.nn.Embedding(4, -1), "Embedding: features is -1"),
        (lambda: gg.nn.LayerNorm(-4), "LayerNorm: features is -4"),
        (lambda: gg.nn.RMSNorm(0), "RMSNorm: features is 0"),
        (lambda: gg.nn.FeedForward(4, 0), "FeedForward: hidden is 0"),
        (lambda: gg.nn.Attention(8, num_heads=0), "Attention: num_heads is 0"),
        (lambda: gg.nn.Attention(8, num_heads=4, kv_heads=0), "Attention: kv_heads is 0"),
        (lambda: gg.nn.EncoderLayer(8, num_heads=4, hidden=0), "FeedForward: hidden is 0"),
        (lambda: gg.nn.Encoder(8, layers=0, num_heads=4), "Encoder: layers is 0"),
        (lambda: gg.nn.LearnedPositions(0, 8), "LearnedPositions: length is 0"),
        (lambda: gg.nn.SinusoidalPositions(0), "SinusoidalPositions: features is 0"),
        (lambda: gg.build(lambda x: (gg.ops.exp(x), 3), x=X), "'output_1': 3; an output is a"),
        (lambda: gg.build(lambda x: {1: gg.ops.exp(x)}, x=X), "its name a string"),
        (lambda: gg.build(lambda x: x + "a", x=X), "Add: 'a' is not an operand"),
        (lambda: gg.ops.exp(np.ma.masked_greater([1.0, 2.0], 1.0)), "Exp: some of its entries"),
        (
            lambda: gg.build(lambda x: gg.ops.reshape(x, [x]), x=gg.float32["n", 1]),
            "in a list with values; such a list holds sizes",
        ),
        (
            lambda: gg.build(
                lambda x: gg.ops.rotary_embedding(x, x, x, num_heads=2),
                primitives=True,
                x=gg.float32["b", "t", "d"],
            ),
            "its features must be known before the run",
        ),
        (lambda: gg.build(lambda x: gg.ops.softmax(x, axis="last"), x=X), "axis is 'last'"),
        (lambda: gg.build(lambda x: x if x > 0 else -x, x=X), "no truth value"),
        (
            lambda: gg.build(LINEAR, weights={"weight": "a", "bias": 0}, x=X),
            "weight is not an array",
        ),
        (lambda: gg.schedule.constant(float("nan")), "constant(rate=nan)"),
        (lambda: gg.schedule.linear(-1.0, warmup=0, steps=1), "linear(rate=-1.0)"),
    ],
)
def test_what_is_built_is_checked(make, told):
    with pytest.raises(gg.GraphgenError) as caught:
        make()
    assert told in str(caught.value)


def test_weights_may_be_lists():
    weights = {"weight": [[1, 2], [3, 4]], "bias": [0.5, 0]}
    model = gg.build(gg.nn.Linear(2, 2), weights=weights, x=gg.float32["n", 2])
    assert gg.Session(model)(x=np.ones((1, 2), np.float32))[0].tolist() == [[4.5, 6]]


COMMANDS = [
    ("inspect", "bad.onnx"),
    ("optimize", "bad.onnx", "-o", "out.onnx"),
    ("run", "bad.onnx", "--input", "x=x.npy"),
    ("artifacts", "bad.onnx", "-o", "art"),
]
every_command = pytest.mark.parametrize("command", COMMANDS, ids=lambda c: c[0])


@every_command
def test_truncated_onnx_file(folder, refused, command):
    data = (folder / "m.onnx").read_bytes()
    (folder / "bad.onnx").write_bytes(data[: len(data) // 2])
    assert f"cut short at {len(data) // 2} bytes" in refused(*command)


@every_command
def test_text_file(folder, refused, command):
    (folder / "bad.onnx").write_text("not a model\n" * 20)
    assert "bad.onnx" in (line := refused(*command))
    assert "not an ONNX model" in line


@pytest.mark.parametrize(
    "content", [b"", b"PK\3\4" + b"\0" * 99, b"\x89PNG\r\n\x1a\n" + b"\0" * 99]
)
def test_other_files(folder, refused, content):
    (folder / "bad.onnx").write_bytes(content)
    assert "not an ONNX model" in refused("optimize", "bad.onnx", "-o", "out.onnx")


def test_fields_without_a_number_or_without_end(folder, refused, monkeypatch):
    """A file of 3 GB of zeros took hours, and all memory."""
    with pytest.raises(ValueError, match="has no number"):
        protobuf.parse(memoryview(bytes(9)), protobuf.GRAPH, onnx.ModelProto())
    monkeypatch.setattr(protobuf, "_MOST", 1000)
    (folder / "many.onnx").write_bytes(b"\x08\x08" * 1001 + (folder / "m.onnx").read_bytes())
    assert "not an ONNX model" in refused("inspect", "many.onnx")


def test_folder_instead_of_a_file(folder, refused):
    (folder / "bad.onnx").mkdir()
    assert "Is a directory" in refused("optimize", "bad.onnx", "-o", "out.onnx")


def test_a_file_cut_anywhere(folder, refused):
    data = (folder / "m.onnx").read_bytes()
    for i in range(20):
        (folder / "bad.onnx").write_bytes(data[: len(data) * i // 20])
        assert "bad.onnx" in refused("optimize", "bad.onnx", "-o", "out.onnx")


@every_command
def test_missing_external_data(folder, refused, command):
    (folder / "large.onnx").rename("bad.onnx")
    (folder / "large.onnx_data").unlink()
    assert "next to the model" in refused(*command)


@every_command
def test_missing_file(refused, command):
    assert "No such file" in refused(*command)


@pytest.mark.parametrize(
    "call",
    [
        gg.load,
        lambda path: gg.export(gg.build(lambda x: 2.0 * x, x=gg.float32[2]), path),
        lambda path: gg.artifacts("m.onnx", path),
        gg.Trainer,
        gg.TrainingSession,
        gg.Session,
        lambda path: gg.generate(path, [[1]]),
        lambda path: gg.to_checkpoint(path, path, path),
        gg.Adapter.load,
    ],
)
@pytest.mark.parametrize("path", [None, 5, ["m.onnx"], b"m.onnx", "a\0b", "x" * 5000])
def test_paths_that_are_none(call, path):
    with pytest.raises(gg.GraphgenError):
        call(path)


@pytest.mark.parametrize(
    ("name", "array", "wanted"),
    [
        ("x", np.zeros((1, 3, 64)), "float64[1, 3, 64], not float32[batch, seq, 64]"),
        ("x", np.zeros((3, 64), np.float32), "its rank must be 3, not 2"),
        ("x", np.zeros((1, 3, 65), np.float32), "its dimension 2 must be 64, not 65"),
        ("y", np.zeros((1, 3, 64), np.float32), "there is no input 'y', only x"),
    ],
    ids=["dtype", "rank", "size", "name"],
)
def test_input_at_run_time(folder, refused, name, array, wanted):
    np.save(folder / "bad.npy", array)
    assert wanted in refused("run", "m.onnx", "--input", f"{name}=bad.npy", "-o", "out.npz")


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("bad.npy", b"text"),
        ("bad.npz", b"text"),
        ("bad.npz", b"PK\3\4 cut short"),
        ("no.npy", None),
    ],
)
def test_arrays_that_are_none(folder, refused, path, content):
    if content is not None:
        (folder / path).write_bytes(content)
    item = f"x={path}" if path.endswith("npy") else path
    assert path in refused("run", "m.onnx", "--input", item)


def test_unknown_target(refused):
    line = refused("optimize", "m.onnx", "-o", "out.onnx", "--target", "tpu")
    assert "target is 'tpu'; choose 'cpu', 'cuda', 'webgpu' or 'official'" in line


def test_target_that_is_not_installed(refused, monkeypatch):
    target.cache_clear()
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    line = refused("optimize", "m.onnx", "-o", "out.onnx", "--target", "cpu")
    assert 'pip install "graphgen-onnx[cpu]"' in line


def test_provider_that_is_not_installed(refused, monkeypatch):
    import onnxruntime

    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    line = refused("run", "m.onnx", "--input", "x=x.npy", "--provider", "cuda")
    assert "graphgen-onnx[gpu]" in line


@pytest.mark.parametrize("output", ["missing/out.onnx", "m.onnx/out.onnx", "."])
@pytest.mark.parametrize("command", ["build", "optimize", "report", "run"])
def test_unwritable_output(refused, command, output):
    arguments = {
        "build": ("build", "block", "-o", output),
        "optimize": ("optimize", "m.onnx", "-o", output),
        "report": ("optimize", "m.onnx", "-o", "out.onnx", "--report", output),
        "run": ("run", "m.onnx", "--input", "x=x.npy", "-o", output),
    }
    line = refused(*arguments[command])
    assert output in line
    assert "choose another place" in line or "give the path of a file" in line


@pytest.mark.parametrize("command", ["build", "optimize"])
def test_full_disk(refused, command):
    arguments = {
        "build": ("build", "block", "-o", "m.onnx"),
        "optimize": ("optimize", "m.onnx", "-o", "m.onnx", "--report", "r.json"),
    }
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        line = refused(*arguments[command])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "m.onnx cannot be written: File too large" in line


INTERRUPT = """
import os, pathlib, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
import graphgen.export.write
from graphgen import commands
from graphgen.match import Engine

def interrupt(*arguments, **more):
    os.kill(os.getpid(), getattr(signal, sys.argv[2]))

unlink = pathlib.Path.unlink

def interrupted_again(self, **options):
    if sys.argv[2] == "SIGTERM":
        os.kill(os.getpid(), signal.SIGTERM)
    unlink(self, **options)

pathlib.Path.unlink = interrupted_again

def write_half(*arguments):
    yield b"half"
    interrupt()

if sys.argv[1] == "passes":
    Engine.run = interrupt
else:
    sys.modules["graphgen.export.write"]._serialize = write_half
sys.exit(commands.main(sys.argv[3:]))
"""


@pytest.mark.share(3)
@pytest.mark.parametrize(
    ("name", "code", "told"), [("SIGINT", 130, "interrupted"), ("SIGTERM", 143, "terminated")]
)
@pytest.mark.parametrize("moment", ["passes", "writing"])
def test_interrupt_in_optimize(folder, moment, name, code, told):
    before = contents(folder)
    arguments = ["optimize", "m.onnx", "-o", "m.onnx", "--report", "report.json"]
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPT, moment, name, *arguments], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (code, "", f"graphgen: {told}\n")
    assert contents(folder) == before


# Graphs that are unusual: right, or refused in one line


def parse(body, inputs="float[b,4] x", outputs="float[b,4] y", constants="", opset=18, rest=""):
    imports = f'"": {opset}, "mine": 1, "com.microsoft": 1'
    return parser.parse_model(
        f"<ir_version: 9, opset_import: [{imports}]> g ({inputs}) => ({outputs}) {constants} "
        f"{{ {body} }} {rest}"
    )


def outputs_of(proto, feeds):
    """What the file gives in the runtime with its optimizations off."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    session = ort.InferenceSession(proto.SerializeToString(), options)
    return [session.run(None, given) for given in feeds]


def means_the_same(tmp_path, proto, feeds):
    """Optimize from file to file; the report. Names, types and numbers stay."""
    onnx.save(proto, tmp_path / "in.onnx")
    best = gg.optimize(gg.load(tmp_path / "in.onnx"))
    new = onnx.load(gg.export(best, tmp_path / "out.onnx"))
    for old, given in zip(outputs_of(proto, feeds), outputs_of(new, feeds), strict=True):
        for a, b in zip(old, given, strict=True):
            np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-6) if isinstance(
                a, np.ndarray
            ) and a.dtype != object else np.testing.assert_array_equal(a, b)
    assert [v.name for v in new.graph.input] == [v.name for v in proto.graph.input]
    assert [v.name for v in new.graph.output] == [v.name for v in proto.graph.output]
    return best


ROWS = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)


def number(x):
    return np.array(x, np.float32)


FUNCTION = """<domain: "mine", opset_import: ["": 14]>
F <a> (x) => (y) { c = Constant <value_float: float = @a> () h = Mul(x, c) y = Softmax(h) }"""
NORM = """m = ReduceMean(x, last) d = Sub(x, m) q = Mul(d, d) v = ReduceMean(q, last)
e = Add(v, c) r = Sqrt(e) n = Div(d, r) k = Mul(n, z) y = Add(k, z)"""
LOOP = """s = SequenceEmpty() t = Loop(n, c, s) <body = l(int64 i, bool go, seq(float[b,4]) u) =>
(bool on, seq(float[b,4]) w) { on = Identity(go) w = SequenceInsert(u, x) }>
y = ConcatFromSequence <axis = 0> (t)"""
MAP = """s = SequenceConstruct(x, x) t = SequenceMap(s) <body = l(float[b,4] e) => (float[b,4] f)
{ f = Softmax(e) }> y = SequenceAt(t, one)"""
ONE, LAST = (
    "<int64 one = {1}>",
    "<int64[1] last = {-1}, float c = {1.5}, float[4] z = {1, 2, 3, 4}>",
)
QUANTIZED = """q = QuantizeLinear(x, s, zero) d = DequantizeLinear(q, s, zero)
e = DequantizeLinear(w, s, zero) f = MatMul(d, e) r, t, p = DynamicQuantizeLinear(f)
i = MatMulInteger(r, v, p) j = Cast <to = 1> (i) y = Mul(j, t)"""
BYTES = "{1, 2, 3, 4, 5, 6, 7, 8, 9, 8, 7, 6, 5, 4, 3, 2}"
WEIGHTS = f"<int8[4,4] w = {BYTES}, uint8[4,4] v = {BYTES}, float s = {{0.1}}, int8 zero = {{3}}>"
X2 = "float[b,4] x, float c"
UNUSUAL = {
    "function": (parse("y = mine.F <a = 2.0> (x)", rest=FUNCTION), {}),
    "sequence": (
        parse("s = SequenceConstruct(x, x) y = SequenceAt(s, one)", constants=ONE), {}),
    "sequence output": (parse("y = SequenceConstruct(x, x)", outputs="seq(float[b,4]) y"), {}),
    "sequence input": (
        parse("y = SequenceAt(x, one)", inputs="seq(float[b,4]) x", constants=ONE),
        {"x": [ROWS, ROWS + 1]},
    ),
    "sequence in a loop": (
        parse(LOOP, constants="<int64 n = {3}, bool c = {1}>", outputs="float[m,4] y"), {}),
    "sequence map": (parse(MAP, constants=ONE), {}),
    "optional": (parse("o = Optional(x) y = OptionalGetElement(o)"), {}),
    "optional input": (parse("y = OptionalGetElement(x)", inputs="optional(float[b,4]) x"), {}),
    "strings": (
        parse("y = Equal(x, s)", inputs="string[2] x", outputs="bool[2] y", opset=19,
             constants='<string[2] s = {"a", "b"}>'),
        {"x": np.array(["a", "c"], object)},
    ),
    "strings as a result": (
        parse('y = Constant <value_strings = ["a", "b"]> ()', outputs="string[2] y"), {}),
    "quantized": (parse(QUANTIZED, constants=WEIGHTS), {}),
    "no rows": (parse("s = Softmax(x) y = Concat <axis = 0> (s, e)",
                     constants="<float[0,4] e = {}>"), {"x": ROWS[:0]}),
    "scalar": (parse("h = Mul(x, x) u = Unsqueeze(h, a) y = Softmax(u)", inputs="float x",
                    outputs="float[1] y", constants="<int64[1] a = {0}>"), {"x": number(3)}),
    "no inputs": (parse("y = Add(w, w)", inputs="", outputs="float[2] y",
                       constants="<float[2] w = {1, 2}>"), None),
    "no nodes": (parse("", outputs="float[b,4] x, float[2] w",
                      constants="<float[2] w = {1, 2}>"), {}),
    "an output twice": (parse("y = Exp(x)", outputs="float[b,4] y, float[b,4] y"), {}),
    "NaN and infinity": (parse("h = Mul(x, i) k = Add(h, n) l = Where(c, k, x) y = Max(l, i)",
                              constants="<bool[4] c = {0, 1, 0, 1}, float i = {1e38}>",
                              inputs="float[b,4] x, float n"), {"n": number(np.nan)}),
    "names like ours": (
        parse("constant_0 = Exp(x) constant_1 = Div(constant_0, constant_2) h = Pow(constant_1,"
             "c) constant_4 = Div(h, d) y = Add(constant_4, constant_5)",
             constants="<float constant_2 = {3.0}, float c = {2.0}, float d = {4.0}, "
             "float[4] constant_5 = {1, 2, 3, 4}>"), {}),
    "sizes like ours": (
        parse("z = NonZero(x) t = Transpose(z) c = Cast <to = 1> (t) y = Softmax(c)",
             inputs="float[_d0, _d1] x", outputs="float[_d2, _d3] y"), {}),
    "the runtime's own operator": (
        parse("y = SimplifiedLayerNormalization(x, w)",
              constants="<float[4] w = {1, 2, 3, 4}>"), {}),
    "a value replaced by the caller": (
        parse("h = Mul(x, c) p = Pow(h, d) q = Add(c, d) y = Add(p, q)",
             inputs=X2 + ", float d", constants="<float c = {1.0}, float d = {2.0}>"),
        {"c": number(5), "d": number(3)}),
    "an epsilon replaced by the caller": (
        parse(NORM, inputs=X2 + ", float[4] z", constants=LAST), {"c": number(3)}),
    "a shape replaced by the caller": (
        parse("y = Reshape(x, s)", inputs="float[b,4] x, int64[2] s", outputs="float[m,n] y",
             constants="<int64[2] s = {-1, 4}>"), {"s": np.array([2, 6])}),
    "a condition replaced by the caller": (
        parse("y = If(c) <then_branch = t() => (float[b,4] a) { a = Exp(x) }, else_branch = "
             "e() => (float[b,4] q) { q = Relu(x) }>", inputs="float[b,4] x, bool c",
             constants="<bool c = {1}>"), {"c": np.array(False)}),
}  # fmt: skip


@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_graphs_mean_the_same(tmp_path, name):
    proto, more = UNUSUAL[name]
    feeds = {} if more is None else {"x": ROWS, **more}
    defaults = {t.name for t in proto.graph.initializer}
    given = [feeds, {k: v for k, v in feeds.items() if k not in defaults}]
    means_the_same(tmp_path, proto, given)


@pytest.mark.parametrize("indices", [[1, 3], [[0, 1], [2, 3]]], ids=["linear", "by axis"])
def test_sparse_constants_become_dense(tmp_path, indices):
    tensor = sparse(indices, (3, 4))
    means_the_same(tmp_path, with_sparse(tensor), [{"x": ROWS}])
    means_the_same(tmp_path, with_sparse_value(tensor), [{"x": ROWS}])
    feeds = [{"x": ROWS, "c": np.array(c)} for c in (True, False)]
    means_the_same(tmp_path, with_sparse_in_a_branch(tensor), feeds)
    proto = parse("y = mine.F(x)", rest='<domain: "mine", opset_import: ["": 18]> '
                  "F (x) => (y) { h = Exp(x) y = Add(h, w) }")  # fmt: skip
    made = helper.make_node("Constant", [], ["w"], sparse_value=tensor)
    proto.functions[0].node.insert(0, made)
    means_the_same(tmp_path, proto, [{"x": ROWS}])


@pytest.mark.parametrize("ways", ["0, 0", "1, 0"])
def test_scan_with_a_batch(tmp_path, ways):
    """The Scan of opset 8: over the rows of a batch, of their own lengths."""
    body = """<num_scan_inputs = 2, body = l (float[2] h, float[2] a, float[2] c) =>
    (float[2] n, float[] s) { p = Mul(h, a) n = Add(p, w) d = Sub(n, c)
    s = ReduceSum <axes = [0], keepdims = 0> (d) }, directions = [WAYS]>""".replace("WAYS", ways)
    rng = np.random.default_rng(0)
    for lengths, given in (("", {}), ("lens", {"lens": np.array([3, 1, 5])})):
        proto = parse(
            f"t, y = Scan({lengths or '_'}, h, x, x) {body} k = Softmax <axis = 1> (t)",
            inputs="float[b,2] h, float[b,t,2] x, float[2] w" + ", int64[b] lens" * bool(lengths),
            outputs="float[b,2] k, float[b,t] y",
            opset=8,
        )
        node = proto.graph.node[0]
        node.input[0], proto.ir_version = lengths, 3
        x, h, w = (rng.standard_normal(s).astype(np.float32) for s in ((3, 5, 2), (3, 2), 2))
        means_the_same(tmp_path, proto, [{"h": h, "x": x, "w": w, **given}])


@pytest.mark.parametrize("dtype", ["FLOAT8E4M3FN", "FLOAT8E5M2", "INT4", "UINT4", "BFLOAT16"])
def test_weights_of_few_bits(tmp_path, dtype):
    proto = parse("c = Cast <to = 1> (w) y = Mul(x, c)", opset=21)
    weight = helper.make_tensor("w", getattr(TensorProto, dtype), [4], [1, 2, 3, 4])
    proto.graph.initializer.append(weight)
    proto.ir_version = 10
    means_the_same(tmp_path, proto, [{"x": ROWS}])


def test_sizes_whose_names_are_no_words(tmp_path):
    proto = parse(
        "h = Concat <axis = 0> (x, x) y = Reshape(h, s)", constants="<int64[2] s = {-1, 4}>"
    )
    for name in ("!!**", "batch size", "2*(", "lambda"):
        proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param = name
        means_the_same(tmp_path, proto, [{"x": ROWS}])


def test_inputs_and_outputs_without_a_rank(tmp_path):
    proto = parse("h = Exp(x) y = Softmax(h)")
    for value in (proto.graph.input[0], proto.graph.output[0]):
        value.type.tensor_type.ClearField("shape")
    means_the_same(tmp_path, proto, [{"x": ROWS}])


def test_unknown_operators_stay_and_what_is_around_them_is_fused(tmp_path):
    body = """a = mine.Odd <k = 1> (x) m = ReduceMax(a, last) d = Sub(a, m) e = Exp(d)
    s = ReduceSum(e, last) p = Div(e, s) b = mine.Odd(p) y = Add(b, x)"""
    onnx.save(parse(body, constants="<int64[1] last = {-1}>"), tmp_path / "m.onnx")
    best = gg.optimize(gg.load(tmp_path / "m.onnx"))
    gg.export(best, tmp_path / "out.onnx")
    assert count_operators(best.model) == {"Add": 1, "Softmax": 1, "mine::Odd": 2}
    told = [site.reason for p in best.report.passes for site in p.sites if site.status == "missed"]
    assert told == ["mine::Odd is not known, 2 left as they were"]


def chain(length, *operators):
    nodes = [
        helper.make_node(operators[i % len(operators)], [f"v{i}"], [f"v{i + 1}"])
        for i in range(length)
    ]
    x, y = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["b", 4])
        for name in ("v0", f"v{length}")
    )
    return model_of(nodes, [x], [y])


def model_of(nodes, inputs, outputs, initializers=()):
    graph = helper.make_graph(nodes, "g", inputs, outputs, initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def test_long_chains(tmp_path):
    means_the_same(tmp_path, chain(2000, "Tanh", "Sigmoid"), [{"v0": ROWS}])


def test_many_operands_and_outputs(tmp_path):
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["b", 4]) for n in "xy")
    numbers = [numpy_helper.from_array(number(i), f"c{i}") for i in range(500)]
    nodes = [helper.make_node("Mul", ["x", f"c{i}"], [f"a{i}"]) for i in range(500)]
    more = [helper.make_tensor_value_info(f"a{i}", TensorProto.FLOAT, ["b", 4]) for i in range(500)]
    nodes.append(helper.make_node("Sum", [f"a{i % 500}" for i in range(3000)], ["y"]))
    best = means_the_same(tmp_path, model_of(nodes, [x], [y, *more], numbers), [{"x": ROWS}])
    assert len(best.model.graph.outputs) == 501


def branches(then, otherwise="q = Relu(x)", result="float[b,4] q"):
    return parse(
        f"y = If(c) <then_branch = t() => (float[b,4] p) {{ {then} }}, "
        f"else_branch = e() => ({result}) {{ {otherwise} }}>",
        "float[b,4] x, bool c",
    )


def edit(body, change, **more):
    proto = parse(body, **more)
    change(proto)
    return proto


def set_weight(count, cut):
    def change(proto):
        tensor = proto.graph.initializer[0]
        tensor.CopyFrom(numpy_helper.from_array(np.zeros((count, 4), np.float32), "w"))
        tensor.raw_data = tensor.raw_data[:-cut]

    return change


SUM = {"body": "y = Add(x, w)", "constants": "<float[4] w = {1, 2, 3, 4}>"}


def sparse(indices, shape=(1, 4), values=(3.0, 5.0), dtype="FLOAT"):
    values = helper.make_tensor("w", getattr(TensorProto, dtype), [len(values)], values)
    return helper.make_sparse_tensor(values, numpy_helper.from_array(np.array(indices)), shape)


def with_sparse(tensor, nodes="y = Add(x, w)"):
    return edit(nodes, lambda p: p.graph.sparse_initializer.append(tensor))


def with_sparse_value(tensor, nodes="h = Exp(x) y = Add(h, w)"):
    made = helper.make_node("Constant", [], ["w"], sparse_value=tensor)
    return edit(nodes, lambda p: p.graph.node.insert(0, made))


def with_sparse_in_a_branch(tensor):
    def change(proto):
        proto.graph.node[0].attribute[0].g.sparse_initializer.append(tensor)

    return edit("", change=lambda p: (p.CopyFrom(branches("p = Add(x, w)")), change(p)))


EXP = "h = Exp(x) y = Softmax(h)"
REFUSED = {
    "newer opset": (parse(EXP, opset=99), "the model has opset 99, but the installed onnx"),
    "no opset": (parse(EXP, opset=0), "the model has opset 0, but the installed onnx"),
    "newer IR": (edit(EXP, lambda p: setattr(p, "ir_version", 99)), "install a newer onnx"),
    "no outputs": (parse(EXP, outputs=""), "has no outputs"),
    "unknown standard operator": (parse("y = Strange(x)"), "No Op registered for Strange"),
    "unknown attribute": (parse("y = Exp <k = 1> (x)"), "Unrecognized attribute: k"),
    "sparse out of range": (with_sparse(sparse([1, 4])), "position [1] out of range [0, 3]"),
    "sparse out of order": (with_sparse(sparse([2, 1])), "position [1] not in sorted order"),
    "sparse twice": (with_sparse_value(sparse([[0, 1], [0, 1]])), "not in lexicographic sorted"),
    "sparse and large": (with_sparse(sparse([1, 3], (1 << 20, 1 << 10))),
                         "has 4,294,967,296 bytes when dense, where at most 67,1"),
    "sparse and large together": (
        edit("y = Sum(x, w0, w1)", lambda p: p.graph.sparse_initializer.extend(
            sparse([1, 3], (1 << 10, 10 << 10)) for _ in range(2))), "at most 25,1"),
    "sparse in a function": (
        edit("y = mine.F(x)", lambda p: p.functions[0].node.insert(0, helper.make_node(
            "Constant", [], ["w"], sparse_value=sparse([1, 3], (1 << 20, 4)))),
            rest='<domain: "mine", opset_import: ["": 18]> F (x) => (y) { y = Add(x, w) }'),
        "16,777,216 bytes when dense, where at most 1,0"),
    "sparse texts": (with_sparse(sparse([0, 1], values=[b"a", b"b"], dtype="STRING")),
                     "the sparse tensor 'w' is not of numbers"),
    "input twice": (
        edit(EXP, lambda p: p.graph.input.append(p.graph.input[0])), "assigned 2 times"),
    "nameless output": (edit(EXP, lambda p: setattr(p.graph.output[0], "name", "")), "output ''"),
    "bad dtype": (
        edit(EXP, lambda p: setattr(p.graph.input[0].type.tensor_type, "elem_type", 77)), "77"),
    "small weight cut": (edit(change=set_weight(1, 4), **SUM), "cannot reshape array of size 3"),
    "large weight cut": (edit(change=set_weight(2048, 4), **SUM), "cannot reshape array of size"),
    "large weight torn": (edit(change=set_weight(2048, 3), **SUM), "multiple of element size"),
    "negative sizes": (edit(change=lambda p: p.graph.initializer[0].dims.__setitem__(0, -4), **SUM),
                       "-4"),
    "recursive function": (
        parse("y = mine.F(x)", rest='<domain: "mine", opset_import: ["": 18, "mine": 1]> '
              "F (x) => (y) { y = mine.F(x) }"), "call each other without end"),
    "function of another opset": (
        parse("y = mine.F(x)", rest='<domain: "mine", opset_import: ["": 17]> '
              "F (x) => (y) { y = ReduceMean <axes = [0]> (x) }"), "Opset mismatch"),
    "dangling in a branch": (branches("p = Exp(nothing)"), "reads 'nothing', which nothing makes"),
    "cycle in a branch": (branches("p = Exp(h) h = Exp(p)"), "cycle"),
    "outer value as a result": (branches("p = Exp(x)", "", "float[b,4] x"), "not made by anything"),
    "a result too many": (branches("p = Exp(x)", "q = Exp(x) r = Exp(q)", "float[b,4] q, float r"),
                          "a subgraph has 2 outputs where the operator needs 1"),
    "body without state": (
        parse("y = Loop(n, c, x) <body = l(int64 i, bool go) => (bool on) { on = Identity(go) }>",
              "float[b,4] x, int64 n, bool c"), "a subgraph has 2 inputs where"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_model_is_refused_in_one_line(folder, refused, name):
    proto, told = REFUSED[name]
    (folder / "bad.onnx").write_bytes(proto.SerializeToString())
    assert told in refused("optimize", "bad.onnx", "-o", "out.onnx")
