"""Bytes that graphs move and keep, and operations, by hand and against brute force."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import graphgen as gg
from graphgen.edit import infer_model
from graphgen.measure.cost import Traffic, of_model, peak_alive, traffic

T, D = 6, 4
WHOLE = T * D * 4
"""The bytes of a float32[T, D]."""


def of(function, **inputs):
    return traffic(gg.build(function, **inputs, primitives=False))


def of_text(text):
    header = '<ir_version: 10, opset_import: ["" : 23]>'
    model = ir.from_proto(onnx.parser.parse_model(header + text))
    infer_model(model)
    return traffic(model)


@pytest.mark.parametrize(
    ("function", "read", "written", "peak"),
    [
        (lambda x: x + x, WHOLE, WHOLE, WHOLE),  # one operand
        (lambda x: x + 1.0, WHOLE + 4, WHOLE, WHOLE),
        (lambda x: gg.ops.transpose(x, perm=[1, 0]), WHOLE, WHOLE, WHOLE),
        (
            lambda x: gg.ops.matmul(x, np.ones((D, 5), np.float32)),
            WHOLE + D * 5 * 4,
            T * 5 * 4,
            T * 5 * 4,
        ),
        (lambda x: gg.ops.cast(x, to=ir.DataType.FLOAT16), WHOLE, WHOLE // 2, WHOLE // 2),
        (
            lambda x: gg.ops.gather(x, np.array([0, 3], np.int64)),
            2 * D * 4 + 2 * 8,
            2 * D * 4,
            2 * D * 4,
        ),
        (
            lambda x: gg.ops.gather(x, np.array([[1] * 9] * 9, np.int64), axis=1),
            WHOLE + 81 * 8,  # the same column again and again: never more than the table
            T * 81 * 4,
            T * 81 * 4,
        ),
        (lambda x: gg.ops.softmax(x, axis=-1), WHOLE, WHOLE, WHOLE),  # one kernel
        (  # a view on the way is nothing, one that is an output is a copy
            lambda x: gg.ops.exp(gg.ops.reshape(gg.ops.exp(x), [D, T])),
            2 * WHOLE,
            2 * WHOLE,
            2 * WHOLE,
        ),
        (lambda x: gg.ops.reshape(x, [D, T]), WHOLE, WHOLE, WHOLE),
        (lambda x: gg.ops.exp(gg.ops.exp(gg.ops.exp(x))), 3 * WHOLE, 3 * WHOLE, 2 * WHOLE),
        (  # the first result waits for the last node
            lambda x: (lambda y: y + gg.ops.exp(gg.ops.exp(y)))(gg.ops.exp(x)),
            5 * WHOLE,
            4 * WHOLE,
            3 * WHOLE,
        ),
    ],
)
def test_by_hand(function, read, written, peak):
    assert of(function, x=gg.float32[T, D]) == Traffic(read, written, peak)


@pytest.mark.parametrize(
    "function, flops",
    [
        (lambda x: gg.ops.matmul(x, np.ones((D, 5), np.float32)), 2 * T * D * 5),
        (
            lambda x: gg.ops.einsum(x, np.ones((D, 5), np.float32), equation="td,de->te"),
            2 * T * D * 5,
        ),
        (lambda x: gg.ops.einsum(x, equation="td->t"), T * D),
        (lambda x: gg.ops.reduce_sum(x), T * D),
        (lambda x: gg.ops.reshape(x, [D, T]), 0),
        (lambda x: gg.ops.exp(x), T * D),
    ],
)
def test_operations_follow_from_the_declaration(function, flops):
    assert of_model(gg.build(function, x=gg.float32[T, D]))[0] == flops


def test_outputs_stay_to_the_end():
    def function(x):
        first = gg.ops.exp(x)
        return {"first": first, "last": gg.ops.exp(gg.ops.exp(gg.ops.exp(x)))}

    assert of(function, x=gg.float32[T, D]).peak == 3 * WHOLE


def test_a_slice_and_a_shape_do_not_read_the_whole():
    found = of_text("""graph (float[6, 4] x) => (float[2, 4] y, int64[2] s)
    <int64[1] a = {1}, int64[1] b = {3}, int64[1] c = {0}>
    { y = Slice(x, a, b, c)  s = Shape(x) }""")
    assert found == Traffic(2 * D * 4 + 3 * 8, 2 * D * 4 + 2 * 8, 2 * D * 4 + 2 * 8)


def test_tables_of_an_embedding_are_looked_up():
    words, places = np.ones((1000, D), np.float32), np.ones((500, D), np.float32)
    kinds, norm = np.ones((2, D), np.float32), np.ones(D, np.float32)
    ids = gg.int32[3, T]

    def function(input_ids, segments):
        embed = gg.ops.contrib.embed_layer_normalization
        return embed(input_ids, segments, words, places, kinds, norm, norm + 1)

    rows, indices = 3 * WHOLE, 3 * T * 4
    read = 2 * indices + rows + rows + 2 * D * 4 + 2 * D * 4
    assert of(function, input_ids=ids, segments=ids) == Traffic(read, rows, rows)


def test_a_subgraph_moves_what_crosses_its_edge():
    found = of_text("""graph (float[6, 4] x, bool c) => (float[6, 4] y) {
      s = Exp(x)
      y = If (c) <then_branch = a () => (float[6, 4] p) { e = Exp(s) p = Mul(e, s) },
                  else_branch = b () => (float[6, 4] q) { q = Identity(x) }>
    }""")
    assert found == Traffic(WHOLE + WHOLE + WHOLE + 1, 2 * WHOLE, 2 * WHOLE)


def test_nothing_is_said_where_a_size_is_missing():
    assert of(lambda x: x + 1.0, x=gg.float32["batch", D]) is None
    assert of_text("graph (float[6] x) => (int64[1, n] y) { y = NonZero(x) }") is None
    assert of_text("graph (string[6] x) => (string[2, 3] y) <int64[2] s = {2, 3}> "
                   "{ y = Reshape(x, s) }") is None  # fmt: skip


def brute_force(graph):
    """At each node: the memory of all values that are made by then and read by it or later."""
    nodes = list(graph)
    views = ("Reshape", "Identity")

    def memory(value):
        node = value.producer()
        if node is None or node.op_type not in views or value in graph.outputs:
            return value
        return memory(node.inputs[0])

    needed = {v for node in nodes for v in node.inputs} | set(graph.outputs)
    most = 0
    for i, now in enumerate(nodes):
        made = {v for node in nodes[: i + 1] for v in node.outputs} & needed
        later = {v for node in nodes[i:] for v in node.inputs} | {*now.outputs, *graph.outputs}
        held = {memory(v) for v in made & later} - set(graph.inputs)
        most = max(most, sum(int(np.prod(v.shape.numpy())) * 4 for v in held))
    return most


@pytest.mark.parametrize("seed", range(40))
def test_the_peak_is_that_of_brute_force(seed):
    rng = np.random.default_rng(seed)

    def make(value, size):
        value.type, value.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape([int(size)])
        return value

    values = [make(ir.Value(name="x"), rng.integers(1, 50))]
    inputs, nodes = values[:], []
    for _ in range(30):
        kind = rng.choice(["Max", "Reshape", "Identity", "Exp", "Split"])
        places = np.minimum(rng.geometric(0.3, 1 + (kind == "Max")), len(values))
        operands = [values[-place] for place in places]
        node = ir.node(kind, operands, num_outputs=1 + (kind == "Split"))
        for value in node.outputs:
            view = kind in ("Reshape", "Identity")
            size = operands[0].shape[0] if view else rng.integers(1, 50)
            values.append(make(value, size))
        nodes.append(node)
    graph = ir.Graph(inputs, values[7:30:9] + values[-1:], nodes=nodes, opset_imports={"": 23})
    assert peak_alive(graph) == brute_force(graph) > 0


def products(x):
    """A chain: at each node, what it reads and what it makes."""
    for sizes in ((64, 300), (300, 1000), (1000, 200), (200, 700), (700, 64)):
        x = x @ np.ones(sizes, np.float32)
    return x


@pytest.mark.parametrize("primitives", [False, True])
@pytest.mark.parametrize(
    ("function", "shape"),
    [(products, (1000, 64)), (gg.nn.Encoder(64, layers=2, num_heads=4), (4, 128, 64))],
    ids=["chain", "encoder"],
)
def test_the_peak_is_what_the_runtime_asks_its_arena_for(function, shape, primitives, tmp_path):
    """To the byte, where it frees what nobody reads any more; by default it asks for more."""
    asked = {}
    model = gg.build(function, primitives=primitives, x=gg.float32[shape])
    infer_model(model)
    for reuse in ("0", "1"):
        options = {"enable_mem_pattern": "0", "enable_mem_reuse": reuse}
        session = gg.Session(
            model, provider="cpu", options=options, optimize=False, profile=str(tmp_path / reuse)
        )
        session(x=np.ones(shape, np.float32))
        told = [event["args"] for event in session.end_profiling() if event["cat"] == "Node"]
        if "mem_bytes_requested_in_use" not in told[0]:
            pytest.skip("the profiles of this runtime do not tell its arena")
        held = [int(args["mem_bytes_requested_in_use"]) for args in told]
        asked[reuse] = max(held) - (held[0] - int(told[0]["output_size"]))  # weights are before
    peak = traffic(model).peak
    assert asked["0"] == peak <= asked["1"] <= 2.5 * peak
