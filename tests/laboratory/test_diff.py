"""What `diff` lists: nothing where nothing is different, and each planted change as that change."""

import json
import random
import re
from pathlib import Path

import jsonschema
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from random_graphs import KINDS, graphs
from small_models import as_in_a_file, loops, vary

import graphgen as gg
from graphgen.commands import main
from graphgen.edit import tidy
from graphgen.graph import constant
from graphgen.laboratory import diff as difference
from graphgen.laboratory.diff import diff
from graphgen.passes import optimize

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "tests" / "fixtures"
LAYERS = 12


@pytest.fixture(scope="module")
def encoder():
    """Twelve layers whose norms, softmaxes and Gelus are one node each."""
    return twelve()


@pytest.fixture(scope="module")
def primitives():
    return twelve(primitives=True)


def twelve(layers=LAYERS, primitives=False):
    module = gg.nn.Encoder(16, layers=layers, num_heads=4, activation="gelu")
    return gg.build(vary(module), primitives=primitives, x=gg.float32["batch", "seq", 16])


def scrambled(model, seed):
    """The same model: nodes and operands of sums in another order, and other names inside."""
    proto, rng = ir.to_proto(model), random.Random(seed)
    kept = {v.name for v in (*proto.graph.input, *proto.graph.output)} | {""}
    names = {}

    def rename(name):
        if name in kept:
            return name
        return names.setdefault(name, f"v{rng.randrange(10**9)}_{len(names)}")

    def scramble(graph):
        for tensor in graph.initializer:
            tensor.name = rename(tensor.name)
        for value in (*graph.input, *graph.output, *graph.value_info):
            value.name = rename(value.name)
        for node in graph.node:
            node.name = f"n{rng.randrange(10**9)}"
            node.input[:] = map(rename, node.input)
            if node.op_type in ("Add", "Mul", "And") and rng.random() < 0.5:
                node.input[:] = reversed(node.input)
            node.output[:] = map(rename, node.output)
            del node.metadata_props[:]
            for attribute in node.attribute:
                if attribute.type == onnx.AttributeProto.GRAPH:
                    scramble(attribute.g)
            attributes = rng.sample(list(node.attribute), len(node.attribute))
            del node.attribute[:]
            node.attribute.extend(attributes)
        nodes, order = list(graph.node), []
        made = {name: i for i, node in enumerate(nodes) for name in node.output}
        waits = {i: {made[name] for name in reads(n) if name in made} for i, n in enumerate(nodes)}
        while waits:
            i = rng.choice([i for i, others in waits.items() if not others & waits.keys()])
            del waits[i]
            order.append(nodes[i])
        del graph.node[:]
        graph.node.extend(order)

    def reads(node):
        inner = [n for a in node.attribute if a.HasField("g") for n in a.g.node]
        outer = [v.name for a in node.attribute if a.HasField("g") for v in a.g.output]
        return [*node.input, *outer, *(name for n in inner for name in reads(n))]

    scramble(proto.graph)
    del proto.graph.value_info[:]
    return ir.from_proto(proto)


def text(found):
    """The changes alone."""
    return [f"{c.kind} {c.where}: {c.text}" for c in found.changes]


def only(found):
    [change] = found.changes
    return change


def nodes(model, op_type):
    return [node for node in model.graph if node.op_type == op_type]


@pytest.mark.share(3)
@pytest.mark.parametrize("seed", range(3))
def test_a_model_is_itself_whatever_its_names_and_order(encoder, primitives, seed):
    for model in (encoder, primitives):
        found = diff(model, scrambled(model, seed))
        assert text(found) == []
        assert len(found.pairs) == model.graph.num_nodes()


@pytest.mark.share(3)
@pytest.mark.parametrize("path", sorted(FIXTURES.glob("*.onnx")), ids=lambda p: p.stem)
def test_an_export_is_itself(path):
    model = gg.load(path)
    assert text(diff(model, scrambled(model, 1))) == []


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_a_random_graph_is_itself(kind):
    @settings(
        max_examples=5,
        deadline=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(graphs(kind))
    def check(graph):
        assert text(diff(graph.model, scrambled(graph.model, graph.seed))) == []

    check()


def test_the_body_of_a_branch_is_compared():
    def choose(x, factor=2.0):
        above = gg.ops.reduce_sum(x) > 0.0
        [y] = gg.ops.cond(above, lambda: (x * factor,), lambda: (x - 1.0,))
        return y

    model = gg.build(choose, x=gg.float32[2, 3])
    assert any(model.graph.subgraphs())
    assert text(diff(model, scrambled(model, 0))) == []
    other = gg.build(lambda x: choose(x, 3.0), x=gg.float32[2, 3])
    assert text(diff(model, other)) == ["changed : Mul: 2. -> 3."]


def test_branches_exchanged_are_a_difference():
    def choose(x, step=1):
        branches = (lambda: (x * 2.0,)), (lambda: (x - 1.0,))
        [y] = gg.ops.cond(gg.ops.reduce_sum(x) > 0.0, *branches[::step])
        return y

    model = gg.build(choose, x=gg.float32[2])
    other = gg.build(lambda x: choose(x, -1), x=gg.float32[2])
    assert text(diff(model, scrambled(model, 2))) == []
    [told] = text(diff(model, scrambled(other, 2)))
    assert told.startswith("changed : If: ")


def test_loops_in_loops_have_inputs_of_their_own():
    assert text(diff(loops("i"), loops("i"))) == []
    assert text(diff(loops("i"), loops("j"))) == ["changed : Cast: i -> j"]


def test_what_no_node_makes_may_be_an_output():
    """Inputs and weights; a graph may even have no node at all."""

    def model(*outputs, weight=1.0, nodes=()):
        w = onnx.numpy_helper.from_array(np.full(40, weight, np.float32), "w")
        values = {
            name: onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [size])
            for name, size in (("x", 2), ("w", 40), ("y", 2))
        }
        made = [onnx.helper.make_node(name, ["x"], ["y"]) for name in nodes]
        ends = [values[name] for name in outputs]
        return ir.from_proto(
            onnx.helper.make_model(onnx.helper.make_graph(made, "g", [values["x"]], ends, [w]))
        )

    assert text(diff(model("x", "w"), model("x", "w"))) == []
    assert text(diff(model("x", "w"), model("x", "w", weight=1.5))) == ["weight : w"]
    one, both = model("y", nodes=["Relu"]), model("y", "x", nodes=["Relu"])
    assert text(diff(both, one)) == ["output : output x: float[2] -> none"]
    assert text(diff(model("x"), both)) == ["output : output y: none -> float[2]", "added : Relu"]


def test_models_are_given_in_several_ways():
    file = FIXTURES / "vit_torchscript_sdpa_18.onnx"
    found = diff(file, gg.optimize(gg.load(file), passes=["clean"]))
    assert found.a["name"] == str(file) and "opset of ONNX: 18 -> 23" in str(found)
    with pytest.raises(gg.GraphgenError, match="diff: None is not a model; give what"):
        diff(file, None)


def test_one_attribute(encoder):
    other = encoder.clone()
    nodes(other, "LayerNormalization")[7].attributes.add(ir.AttrFloat32("epsilon", 1e-3))
    change = only(diff(encoder, scrambled(other, 0)))
    assert (change.kind, change.where) == ("changed", "layers.3.residual2.norm")
    assert change.text.startswith("LayerNormalization: epsilon ")
    assert change.text.endswith("-> 0.0010000000474974513")
    assert change.a == [nodes(encoder, "LayerNormalization")[7].name]


def test_one_weight_and_how_far_it_is_off(encoder):
    other = encoder.clone()
    name = "layers.5.attention.key.weight"
    array = constant(other.graph.initializers[name]).copy()
    array[3, 4] += 0.5
    other.graph.initializers[name].const_value = ir.tensor(array)
    change = only(diff(encoder, other))
    assert (change.kind, change.text) == ("weight", name)
    np.testing.assert_allclose(change.largest, 0.5, rtol=1e-6)
    assert "0.5" in str(diff(encoder, other))


def test_one_element_far_inside_a_large_weight_is_seen():
    """Weights are aligned by a sample of their elements, and compared by all."""
    weight = np.random.default_rng(0).standard_normal((512, 64)).astype(np.float32)
    other = weight.copy()
    other[100, 37] += 1.0
    models = [gg.build(lambda x, w=w: x @ w, x=gg.float32["n", 512]) for w in (weight, other)]
    assert only(diff(*models)).largest == pytest.approx(1.0)


def test_all_weights_of_a_model_that_was_trained_on(encoder):
    other = encoder.clone()
    for value in other.graph.initializers.values():
        array = constant(value)
        if array.dtype == np.float32 and array.size > 1:
            value.const_value = ir.tensor(array * np.float32(1.25))
    found = diff(encoder, scrambled(other, 0))
    assert {change.kind for change in found.changes} == {"weight"}
    assert len(found.changes) == sum(
        constant(v).dtype == np.float32 and constant(v).size > 1 and np.any(constant(v))
        for v in encoder.graph.initializers.values()
    )
    folded = [line for line in str(found).splitlines() if "layers.*.attention.key.weight" in line]
    assert len(folded) == 1 and "in 12 blocks" in folded[0]


def bypass(node):
    node.outputs[0].replace_all_uses_with(node.inputs[0])
    node.graph.remove(node, safe=True)


def test_one_node_that_was_removed_or_added(encoder):
    other = encoder.clone()
    gelu = nodes(other, "Gelu")[4]
    name = gelu.name
    bypass(gelu)
    change = only(diff(encoder, scrambled(other, 0)))
    assert (change.kind, change.where, change.text, change.a) == (
        "removed",
        "layers.4.feed_forward",
        "Gelu",
        [name],
    )
    change = only(diff(other, encoder))
    assert (change.kind, change.where, change.text) == ("added", "layers.4.feed_forward", "Gelu")


def test_one_operator_in_the_place_of_another(encoder):
    other = encoder.clone()
    gelu = nodes(other, "Gelu")[9]
    relu = ir.node("Relu", [gelu.inputs[0]])
    other.graph.insert_before(gelu, relu)
    gelu.outputs[0].replace_all_uses_with(relu.outputs[0])
    other.graph.remove(gelu, safe=True)
    change = only(diff(encoder, other))
    assert (change.kind, change.text) == ("replaced", "Gelu -> Relu")


def test_swapped_operands(primitives):
    other = primitives.clone()
    sub = nodes(other, "Sub")[5]
    sub.replace_input_with(0, (pair := list(sub.inputs))[1])
    sub.replace_input_with(1, pair[0])
    add = nodes(other, "Add")[6]  # the order of its operands says nothing
    add.replace_input_with(0, (pair := list(add.inputs))[1])
    add.replace_input_with(1, pair[0])
    change = only(diff(primitives, scrambled(other, 0)))
    assert (change.kind, change.text) == ("changed", "Sub: operands in the order 1, 0")


def test_a_node_that_reads_another(primitives):
    other = primitives.clone()
    exp = nodes(other, "Exp")[3]
    earlier = nodes(other, "Exp")[2]
    exp.replace_input_with(0, earlier.inputs[0])
    change = diff(primitives, other).changes
    assert [c.kind for c in change][:1] in (["changed"], ["removed"])
    assert any("Exp" in c.text for c in change)


def test_a_constant(primitives):
    other = primitives.clone()
    add = next(
        n
        for n in nodes(other, "Add")[20:]
        if (a := constant(n.inputs[1])) is not None and a.size == 1
    )
    new = ir.Value(name="small", const_value=ir.tensor(np.float32(1e-3)))
    other.graph.register_initializer(new)
    add.replace_input_with(1, new)
    change = only(diff(primitives, other))
    assert (change.kind, change.text) == ("changed", "Add: 1.e-05 -> 0.001")


def test_a_layer_that_is_missing_is_one_change(encoder):
    other = encoder.clone()
    path = {node.metadata_props["graphgen.path"]: node for node in other.graph}
    last, before = path["layers.6.residual2"], path["layers.5.residual2"]
    last.outputs[0].replace_all_uses_with(before.outputs[0])
    tidy(other)
    change = only(diff(encoder, scrambled(other, 0)))
    assert (change.kind, change.where) == ("removed", "layers.6")
    assert len(change.a) == encoder.graph.num_nodes() - other.graph.num_nodes()


def test_what_a_pass_fused_stands_beside_what_it_was(primitives):
    found = diff(primitives, optimize(primitives, passes=["canonicalize", "fuse_norm"]).model)
    fused = [c for c in found.changes if c.text.endswith("LayerNormalization")]
    assert len(fused) == 2 * LAYERS + 1
    assert {c.kind for c in fused} == {"replaced"}
    assert all("ReduceMean" in c.text and len(c.b) == 1 for c in fused)
    lines = [line for line in str(found).splitlines() if line.endswith("in 12 blocks")]
    assert any("ReduceMean" in line and "-> LayerNormalization" in line for line in lines)


def test_inputs_outputs_and_opsets():
    def add(x, y):
        return x + y

    spec = gg.float32["n", 3]
    a = gg.build(add, x=spec, y=spec)
    b = as_in_a_file(add, x=gg.float32["m", 3], y=gg.float32[4, 3])
    assert text(diff(a, b)) == [  # names of sizes are none
        "input : input y: float[n, 3] -> float[4, 3]",
        "output : output output: float[n, 3] -> float[4, 3]",
    ]
    b.graph.opset_imports["com.microsoft"] = 1
    assert text(diff(a, b))[0] == "opset : opset of com.microsoft: none -> 1"
    renamed = a.clone()
    renamed.graph.inputs[1].name = "z"
    assert text(diff(a, renamed)) == [
        "input : input y: float[n, 3] -> none",
        "input : input z: none -> float[n, 3]",
    ]


EXPORTS = {
    "bert": ("bert_torchscript_eager_14", "bert_dynamo_sdpa_23"),
    "llama": ("llama_torchscript_eager_14", "llama_dynamo_sdpa_18"),
    "gpt2": ("gpt2_torchscript_sdpa_14", "gpt2_dynamo_eager_23"),
    "vit": ("vit_torchscript_sdpa_18", "vit_dynamo_sdpa_23"),
}

TIED = ("gpt2.transformer.wte", "gpt2.lm_head")  # one weight has both names


@pytest.mark.share(2)
@pytest.mark.parametrize("family", EXPORTS)
def test_two_exporters_of_one_model(family):
    """In canonical form the layers are the same; they differ in how masks and sizes are made."""
    paths = [FIXTURES / f"{name}.onnx" for name in EXPORTS[family]]
    found = diff(*paths, canonical=True)
    computing = {"MatMul", "Gemm", "Attention", "LayerNormalization", "RMSNormalization", "Gelu"}
    for graph, mine in zip(found.graphs, (found.pairs.keys(), found.pairs.values()), strict=True):
        alone = [n for n in graph.graph if n.name not in set(mine) and n.op_type in computing]
        assert alone == []
    assert len(found.changes) < 20
    assert not [change for change in found.changes if change.kind == "weight"]
    # The blocks that both exporters name are the same ones.
    graph, other = ({n.name: n for n in g.graph} for g in found.graphs)
    told = [
        (graph[x].metadata_props.get("graphgen.path"), other[y].metadata_props.get("graphgen.path"))
        for x, y in found.pairs.items()
    ]
    both = [(x, y) for x, y in told if x and y]
    assert len(both) > 5
    assert [x for x, y in both if x != y and (x, y) != TIED] == []


def test_as_they_are_written_what_was_decomposed_stands_beside_the_operator():
    a, b = (FIXTURES / f"{name}.onnx" for name in EXPORTS["bert"])
    lines = str(diff(a, b)).splitlines()
    norm = "ReduceMean, Sub, Pow, ReduceMean, Add, Sqrt, Div, Mul, Add -> LayerNormalization"
    assert lines.count(f"  ~ {norm}  in 2 blocks") == 2
    assert "bert.encoder.layer.*.output.LayerNorm:" in lines
    assert "  ~ Div, Erf, Add, Mul, Mul -> Gelu  in 2 blocks" in lines


def test_thousands_of_nodes(tmp_path):
    """bench/diff.py takes the time of 10,000."""
    encoder = gg.nn.Encoder(4, layers=40, num_heads=2)
    a = gg.build(encoder, primitives=True, x=gg.float32["n", 3, 4])
    assert a.graph.num_nodes() > 2_000
    gg.export(a, tmp_path / "a.onnx")
    bypass(nodes(a, "Erf")[37])
    gg.export(a, tmp_path / "b.onnx")
    assert only(diff(tmp_path / "a.onnx", tmp_path / "b.onnx")).text == "Erf"


@pytest.fixture
def files(encoder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    other = encoder.clone()
    for gelu in nodes(other, "Gelu"):
        bypass(gelu)
    gg.export(encoder, "a.onnx")
    gg.export(other, "b.onnx")


def test_the_command(files, capsys):
    assert main(["diff", "a.onnx", "b.onnx"]) == 0
    told = capsys.readouterr().out
    assert told.splitlines()[2:] == [
        "205 nodes are in both; 12 differences",
        "layers.*.feed_forward:",
        "  - Gelu  in 12 blocks",
    ]
    assert main(["diff", "a.onnx", "a.onnx", "--exit-code"]) == 0
    assert main(["diff", "a.onnx", "b.onnx", "--exit-code"]) == 3
    Path("b[").mkdir()  # no markup of rich
    Path("a.onnx").rename("b[/a].onnx")
    assert main(["diff", "b[/a].onnx", "b.onnx"]) == 0
    assert main(["explain", "b[/a].onnx", "--pass", "clean"]) == 0
    assert capsys.readouterr().err == "graphgen: a.onnx and b.onnx have 12 differences\n"


def test_the_document_is_that_of_the_schema(files, capsys):
    assert main(["diff", "a.onnx", "b.onnx", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    schema = json.loads((ROOT / "docs" / "diff.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(document, schema)
    assert not document["equal"] and len(document["changes"]) == 12
    assert len(document["pairs"]) == document["b"]["nodes"]


def test_the_page_shows_both_graphs(files, capsys):
    """A pair has one number in both; what only A has is in A alone, and the changes are told."""
    assert main(["diff", "a.onnx", "b.onnx", "--html", "diff.html", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    told = re.search(r'id="data">(.*?)</script>', Path("diff.html").read_text("utf-8"), re.DOTALL)
    data = json.loads(told[1])
    assert data["view"] == "diff"
    assert data["report"] == {key: x for key, x in document.items() if key != "pairs"}
    assert [stage["name"] for stage in data["stages"]] == ["a.onnx", "b.onnx"]
    first, second = data["stages"]
    rows = [{*first["add"]}, {*first["add"]} - {*second["drop"]} | {*second["add"]}]
    before, after = ({data["nodes"][i][0]: data["nodes"][i][1] for i in some} for some in rows)
    ends = {"x", "output"}  # of the graphs, which are shown as nodes
    same = {before[number]: after[number] for number in before.keys() & after.keys()}
    assert {name: y for name, y in same.items() if name not in ends} == document["pairs"]
    alone = {name for number, name in before.items() if number not in after}
    assert alone == {name for change in document["changes"] for name in change["a"]}
    assert not after.keys() - before.keys()


def test_a_page_that_cannot_be_written_fails_before_the_work(files, capsys, monkeypatch):
    monkeypatch.setattr(difference, "diff", lambda *_, **__: pytest.fail("it was compared"))
    assert main(["diff", "a.onnx", "b.onnx", "--html", "none/diff.html"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("graphgen: diff: none/diff.html cannot be written: ")
    assert said.count("\n") == 1


def test_bad_input_leaves_the_page_as_it_was(files):
    Path("diff.html").write_text("old")
    assert main(["diff", "a.onnx", "none.onnx", "--html", "diff.html"]) == 2
    assert Path("diff.html").read_text() == "old"
    assert {path.name for path in Path().iterdir()} == {"a.onnx", "b.onnx", "diff.html"}


def test_it_is_deterministic(files, capsys):
    said = []
    for _ in range(2):
        assert main(["diff", "a.onnx", "b.onnx", "--json"]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]


def test_bad_input_is_one_line(files, capsys):
    for command in (["diff", "a.onnx", "none.onnx"], ["diff", "a.onnx"]):
        assert main(command) == 2
        assert capsys.readouterr().err.count("\n") == 1
