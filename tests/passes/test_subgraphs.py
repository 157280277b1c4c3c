"""If, Loop and Scan: what stands inside is fused, and means the same."""

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper
from small_models import ROUNDING, Block, relative_rms, run_plain, vary

import graphgen as gg
from graphgen import ops
from graphgen.errors import GraphgenError
from graphgen.export.read import load
from graphgen.export.write import to_bytes
from graphgen.graph import count_nodes, count_operators
from graphgen.invariants import verify

FEATURES = 16
FUSED = {"Attention": 1, "LayerNormalization": 2, "Gelu": 1}


def primitives(function: Any = None, seed: int = 0, **specs: Any) -> onnx.GraphProto:
    """A block, or what is given, in the operators that an exporter writes."""
    module = vary(Block(FEATURES, num_heads=4, causal=True)) if function is None else function
    specs = specs or {"x": SPEC}
    model = gg.build(module, primitives=True, weights=None, seed=seed, **specs)
    return onnx.load_from_string(to_bytes(model)).graph


def captured(graph: onnx.GraphProto, prefix: str) -> onnx.GraphProto:
    """The graph as a branch: its inputs are those of the main graph, its own names are its own."""
    inputs = {value.name for value in graph.input}
    rename = lambda name: name if not name or name in inputs else prefix + name  # noqa: E731
    for node in graph.node:
        node.input[:] = map(rename, node.input)
        node.output[:] = map(rename, node.output)
    for value in (*graph.initializer, *graph.output, *graph.value_info):
        value.name = rename(value.name)
    del graph.input[:]
    return graph


def value(name: str, dtype: int, *shape: Any) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, None if shape == (...,) else shape)


X = value("x", TensorProto.FLOAT, "batch", "seq", FEATURES)
Y = value("y", TensorProto.FLOAT, "batch", None, FEATURES)
FLAG = value("flag", TensorProto.BOOL, 1)


def write(path: Any, nodes: Any, inputs: Any, outputs: Any, initializers: Any = ()) -> Any:
    graph = helper.make_graph(nodes, "main", inputs, outputs, initializers)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.checker.check_model(proto, full_check=True)
    onnx.save(proto, path)
    return path


def plain(path: Any, feeds: dict[str, Any]) -> list[Any]:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return list(session.run(None, feeds))


def check(path: Any, feeds: list[dict[str, Any]], wanted: dict[str, int]) -> Any:
    """Optimize with every site verified; the counts and the numbers are as they should be."""
    best = gg.optimize(load(path), verify=True, after_each=lambda name, m: verify(m, name))
    counts = count_operators(best.model)
    told = [site.reason for p in best.report.passes for site in p.sites if site.status != "fired"]
    assert {name: counts.get(name, 0) for name in wanted} == wanted, told
    for given in feeds:
        for a, b in zip(plain(path, given), run_plain(best.model, given), strict=True):
            assert a.shape == b.shape
            assert a.size == 0 or relative_rms(a, b) < ROUNDING
    return best


SPEC = gg.float32["batch", "seq", FEATURES]
FLAG_IN = gg.bool_[1]


def x_of(length: int, seed: int = 0, batch: int = 2) -> Any:
    shape = (batch, length, FEATURES)
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def branches(function: Any = None, **specs: Any) -> dict[str, onnx.GraphProto]:
    graphs = [primitives(function, seed, **specs) for seed in (0, 1)]
    return {
        f"{name}_branch": captured(graph, name)
        for name, graph in zip(("then", "else"), graphs, strict=True)
    }


def test_both_branches_are_fused(tmp_path: Any) -> None:
    node = helper.make_node("If", ["flag"], ["y"], **branches())
    path = write(tmp_path / "if.onnx", [node], [X, FLAG], [Y])
    feeds = [{"x": x_of(n), "flag": np.array([flag])} for n in (1, 5) for flag in (True, False)]
    best = check(path, feeds, {name: 2 * n for name, n in FUSED.items()})
    assert all(not graph.initializers for graph in best.model.graph.subgraphs())


class Step(gg.nn.Module):
    """A decoder's step with its cache: attention over past and present, and what follows."""

    def __init__(self) -> None:
        self.norm = gg.nn.LayerNorm(FEATURES)
        self.q, self.k, self.v = (gg.nn.Linear(FEATURES, FEATURES) for _ in range(3))
        self.feed_forward = gg.nn.FeedForward(FEATURES, 32)

    def __call__(self, x: Any, past_k: Any = None, past_v: Any = None) -> Any:
        heads = lambda y: ops.transpose(ops.reshape(y, [0, 0, 4, 4]), perm=[0, 2, 1, 3])  # noqa: E731
        h = self.norm(x)
        k, v = heads(self.k(h)), heads(self.v(h))
        if past_k is not None:
            k, v = ops.concat(past_k, k, axis=2), ops.concat(past_v, v, axis=2)
        y = ops.transpose(
            ops.scaled_dot_product_attention(heads(self.q(h)), k, v), perm=[0, 2, 1, 3]
        )
        x = x + ops.reshape(y, [0, 0, FEATURES])
        return {"out": x + self.feed_forward(x), "k": ops.identity(k), "v": ops.identity(v)}


CACHE = {f"past_{n}": gg.float32["batch", 4, "past", 4] for n in "kv"}
STEP = {"x": SPEC}


def test_a_merged_decoder_is_fused_in_both_branches(tmp_path: Any) -> None:
    """One file for the first step and the later ones, as exporters write it."""
    first = captured(primitives(vary(Step()), **STEP), "first_")
    later = captured(primitives(vary(Step()), **STEP, **CACHE), "later_")
    outputs = [value(n, TensorProto.FLOAT, "batch", 4, "past + seq", 4) for n in "kv"]
    inputs = [value(f"past_{n}", TensorProto.FLOAT, "batch", 4, "past", 4) for n in "kv"]
    node = helper.make_node("If", ["flag"], ["y", "k", "v"], then_branch=later, else_branch=first)
    path = write(tmp_path / "merged.onnx", [node], [X, *inputs, FLAG], [Y, *outputs])
    rng, feeds = np.random.default_rng(0), []
    for flag, seq, past in ((False, 5, 1), (True, 1, 5), (True, 3, 2)):
        cache = {n: rng.standard_normal((2, 4, past, 4)).astype(np.float32) for n in CACHE}
        feeds.append({"x": x_of(seq), **cache, "flag": np.array([flag])})
    check(path, feeds, {"Attention": 2, "LayerNormalization": 2, "Gelu": 2, "Softmax": 0})


def test_a_loop_over_steps_keeps_its_growing_cache(tmp_path: Any) -> None:
    body = primitives(vary(Step()), **STEP, **CACHE)
    for old in ("out", "k", "v"):
        rename_output(body, old, f"next_{old}")
    condition = helper.make_node("Identity", ["go"], ["go_on"])
    stay = helper.make_node("Identity", ["next_out"], ["each"])
    body.node.extend([condition, stay])
    iteration = [value("i", TensorProto.INT64), value("go", TensorProto.BOOL)]
    # Whoever wrote it believed that the cache keeps its size.
    carried = [value("x", TensorProto.FLOAT, "batch", "seq", FEATURES)]
    carried += [value(n, TensorProto.FLOAT, "batch", 4, "past", 4) for n in CACHE]
    rest = list(body.output)
    del body.input[:], body.output[:]
    body.input.extend([*iteration, *carried])
    body.output.extend(
        [value("go_on", TensorProto.BOOL), *rest, value("each", TensorProto.FLOAT, ...)]
    )
    state = ["x0", "k0", "v0"]
    node = helper.make_node("Loop", ["n", "", *state], ["y", "k", "v", "all"], body=body)
    shapes = [("batch", "seq", FEATURES), *[("batch", 4, "past", 4)] * 2]
    inputs = [value(n, TensorProto.FLOAT, *s) for n, s in zip(state, shapes, strict=True)]
    outputs = [
        value(n, TensorProto.FLOAT, *[None] * (3 + (n != "y"))) for n in ("y", "k", "v", "all")
    ]
    path = write(tmp_path / "l.onnx", [node], [value("n", TensorProto.INT64), *inputs], outputs)
    rng, feeds = np.random.default_rng(0), []
    for times, seq, past in ((1, 1, 3), (3, 1, 2), (4, 2, 0), (0, 2, 1)):
        cache = {n: rng.standard_normal((2, 4, past, 4)).astype(np.float32) for n in state[1:]}
        feeds.append({"n": np.array(times), "x0": x_of(seq), **cache})
    best = check(path, feeds, {"Attention": 1, "LayerNormalization": 1, "Gelu": 1})
    [loop] = best.model.graph
    x, k = (value.shape for value in loop.attributes["body"].as_graph().inputs[2:4])
    assert [str(d) for d in x] == ["batch", "seq", "16"]
    assert [str(k[0]), k[1], k[3]] == ["batch", 4, 4] and str(k[2]) != "past"


def rename_output(graph: onnx.GraphProto, old: str, new: str) -> None:
    for node in graph.node:
        node.output[:] = [new if name == old else name for name in node.output]
    for output in graph.output:
        output.name = new if output.name == old else output.name


def test_a_scan_over_layers(tmp_path: Any) -> None:
    """The layers' weights are stacked, and the state goes through all of them."""
    body = primitives()
    weights = [t for t in body.initializer if numpy_helper.to_array(t).ndim == 2]
    stacked, slices, rng = [], [], np.random.default_rng(0)
    for tensor in weights:
        shape = list(tensor.dims)
        layers = rng.standard_normal([3, *shape]).astype(np.float32) * 0.5
        stacked.append(numpy_helper.from_array(layers, f"all_{tensor.name}"))
        slices.append(value(tensor.name, TensorProto.FLOAT, *shape))
        body.initializer.remove(tensor)
    rename_output(body, "output", "next")
    state = value("x", TensorProto.FLOAT, "batch", "seq", FEATURES)
    del body.input[:]
    body.input.extend([state, *slices])
    body.node.append(helper.make_node("ReduceMean", ["next"], ["mean"], keepdims=0))
    body.output.append(value("mean", TensorProto.FLOAT, ...))
    names = [tensor.name for tensor in stacked]
    node = helper.make_node(
        "Scan", ["x0", *names], ["y", "means"], body=body, num_scan_inputs=len(names)
    )
    outputs = [Y, value("means", TensorProto.FLOAT, 3)]
    start = value("x0", TensorProto.FLOAT, "batch", "seq", FEATURES)
    path = write(tmp_path / "scan.onnx", [node], [start], outputs, stacked)
    best = check(path, [{"x0": x_of(n)} for n in (1, 4)], FUSED)
    assert [str(d) for d in best.model.graph.outputs[0].shape] == ["batch", "seq", "16"]


def test_an_if_in_a_loop(tmp_path: Any) -> None:
    inner = helper.make_node("If", ["even"], ["next"], **branches())
    body = helper.make_graph(
        [
            helper.make_node("Mod", ["i", "two"], ["rest"]),
            helper.make_node("Equal", ["rest", "zero"], ["even"]),
            inner,
            helper.make_node("Identity", ["go"], ["go_on"]),
        ],
        "body",
        [
            value("i", TensorProto.INT64),
            value("go", TensorProto.BOOL),
            value("x", TensorProto.FLOAT, ...),
        ],
        [value("go_on", TensorProto.BOOL), value("next", TensorProto.FLOAT, ...)],
        [numpy_helper.from_array(np.array(n), name) for n, name in ((2, "two"), (0, "zero"))],
    )
    node = helper.make_node("Loop", ["n", "", "x0"], ["y"], body=body)
    start = value("x0", TensorProto.FLOAT, "batch", "seq", FEATURES)
    path = write(tmp_path / "l.onnx", [node], [value("n", TensorProto.INT64), start], [Y])
    feeds = [{"n": np.array(n), "x0": x_of(5)} for n in (1, 2, 3)]
    check(path, feeds, {name: 2 * n for name, n in FUSED.items()})


def test_what_only_a_dead_branch_uses_goes_with_it(tmp_path: Any) -> None:
    nodes = [
        helper.make_node("Exp", ["x"], ["e"]),
        helper.make_node("If", ["flag"], ["unused"], **branches(lambda e: ops.relu(e), e=SPEC)),
        helper.make_node("Abs", ["x"], ["y"]),
    ]
    path = write(tmp_path / "dead.onnx", nodes, [X, FLAG], [Y])
    assert count_operators(load(path)) == {"Abs": 1}


def test_a_branch_that_gives_an_outer_value_stays(tmp_path: Any) -> None:
    """Its output needs a value of its own, and what is made outside stays outside."""

    def again(e: Any) -> Any:
        return ops.identity(e) * 1.0

    nodes = [
        helper.make_node("Exp", ["x"], ["e"]),
        helper.make_node("If", ["flag"], ["y"], **branches(again, e=SPEC)),
    ]
    path = write(tmp_path / "outer.onnx", nodes, [X, FLAG], [Y])
    feeds = [{"x": x_of(3), "flag": np.array([True])}]
    check(path, feeds, {"Exp": 1, "If": 1, "Identity": 2, "Mul": 0})


def test_invariants_hold_inside_too(tmp_path: Any) -> None:
    node = helper.make_node("If", ["flag"], ["y"], **branches())
    model = load(write(tmp_path / "if.onnx", [node], [X, FLAG], [Y]))
    verify(model)
    branch = next(iter(model.graph.subgraphs()))
    first = branch.node(0)
    branch.remove(first)
    branch.append(first)
    with pytest.raises(GraphgenError, match="is not made yet"):
        verify(model)


class Either(gg.nn.Module):
    """One of two branches that share a weight, of which one also reads what stands outside."""

    def __init__(self) -> None:
        self.linear = gg.nn.Linear(FEATURES, FEATURES)

    def __call__(self, x: Any, flag: Any) -> dict[str, Any]:
        h = x * 2.0
        y, z = ops.cond(
            flag,
            lambda: (ops.gelu(self.linear(x)), ops.slice_(x, [0], [0], [1])),
            lambda: (self.linear(h) + h, x),
        )
        return {"y": y + 1.0, "z": z}


def test_branches_are_recorded() -> None:
    """Only the chosen one's values, with their own sizes; the same on arrays and in a graph."""
    module, x = vary(Either()), np.random.default_rng(0).standard_normal((2, 3, FEATURES), "f4")
    model = gg.build(module, x=gg.float32["batch", "seq", FEATURES], flag=gg.bool_[1])
    assert count_operators(model)["If"] == 1
    assert str(model.graph.outputs[0].shape) == f"[batch,seq,{FEATURES}]"
    found = gg.optimize(model, verify=True)
    best, report = found.model, found.report
    assert report.passes[0].nodes_before == sum(report.ops_before.values()) == count_nodes(model)
    assert report.passes[-1].nodes_after == sum(report.ops_after.values()) > best.graph.num_nodes()
    for flag in (True, False):
        wanted = module(x, np.array([flag]))
        assert wanted["z"].shape == ((2, 0, FEATURES) if flag else x.shape)
        for graph in (model, best):
            y, z = run_plain(graph, {"x": x, "flag": np.array([flag])})
            assert relative_rms(wanted["y"], y) < ROUNDING
            assert z.shape == wanted["z"].shape


def test_branches_give_as_many_values() -> None:
    with pytest.raises(GraphgenError, match="If: the branches give 1 and 2 values"):
        gg.build(lambda x, flag: ops.cond(flag, lambda: [x], lambda: [x, x]), x=SPEC, flag=FLAG_IN)
