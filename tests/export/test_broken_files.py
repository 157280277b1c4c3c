"""Files that are broken or mean harm: one line, or read as the runtime reads them."""

import itertools
import logging
import time
from unittest import mock

import numpy as np
import onnx
import pytest
from onnx import StringStringEntryProto, TensorProto, helper, numpy_helper

import graphgen as gg
from graphgen.commands import main
from graphgen.export.read import load
from graphgen.export.valid import legible
from graphgen.laboratory.inspection import inspect
from graphgen.version import minor


def model(*nodes, weights=(), functions=(), sizes=("n", 4), domains=()):
    """A file with the input x, and what the nodes make of it as the output y."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, sizes)
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    imports = [helper.make_opsetid("", 18), *(helper.make_opsetid(d, 1) for d in domains)]
    graph = helper.make_graph(nodes, "g", [x], [y], weights)
    return helper.make_model(graph, opset_imports=imports, functions=functions, ir_version=9)


def node(kind, inputs=("x",), outputs=("y",), **attributes):
    return helper.make_node(kind, inputs, outputs, **attributes)


def typed(kind, **fields):
    """A Softmax whose axis is an attribute of this kind."""
    made = node("Softmax")
    attribute = made.attribute.add(name="axis", type=getattr(onnx.AttributeProto, kind))
    for name, value in fields.items():
        setattr(attribute, name, value)
    return model(made)


def added(**fields):
    """The sum of x and a weight of 4 floats with this content."""
    return model(
        node("Add", ("x", "w")),
        weights=[TensorProto(**({"name": "w", "data_type": 1, "dims": [4]} | fields))],
    )


def constant(**fields):
    """The same with the weight in a function."""
    tensor = TensorProto(**({"data_type": 1, "dims": [4]} | fields))
    body = [node("Constant", (), ("w",), value=tensor), node("Add", ("a", "w"), ("b",))]
    function = helper.make_function("mine", "F", ["a"], ["b"], body, [helper.make_opsetid("", 18)])
    return model(node("F", domain="mine"), functions=[function], domains=["mine"])


def passed_on(value):
    """A Softmax in a function, whose axis the call gives."""
    body = node("Softmax", ("a",), ("b",))
    body.attribute.add(name="axis", ref_attr_name="k", type=onnx.AttributeProto.INT)
    imports = [helper.make_opsetid("", 18)]
    function = helper.make_function("mine", "F", ["a"], ["b"], [body], imports, ["k"])
    return model(node("F", domain="mine", k=value), functions=[function], domains=["mine"])


def given_twice():
    """A Softmax in a function, whose axis the call gives, and itself, as numbers."""
    made = passed_on(1)
    made.functions[0].node[0].attribute[0].ints.append(1 << 32)
    return made


def doubling(count):
    """Functions that each call the one before twice."""
    functions = []
    for i in range(count):
        called = {"kind": f"F{i - 1}", "domain": "mine"} if i else {"kind": "Relu"}
        body = [node(**called, inputs=("a",), outputs=("h",))]
        body += [node(**called, inputs=("h",), outputs=("b",))]
        imports = [helper.make_opsetid("", 18), helper.make_opsetid("mine", 1)]
        functions += [helper.make_function("mine", f"F{i}", ["a"], ["b"], body, imports)]
    return model(node(f"F{count - 1}", domain="mine"), functions=functions, domains=["mine"])


def cycle():
    made = doubling(2)
    made.functions[0].node[0].op_type, made.functions[0].node[0].domain = "F1", "mine"
    return made


def damaged(**notes):
    """A model with metadata of ours that we do not write, of the model and of its graph."""
    made = model(node("Relu"))
    made.metadata_props.add(key="graphgen.declared", value=notes["declared"])
    made.graph.metadata_props.add(key="graphgen.scalars", value=notes["scalars"])
    return made


def on_devices():
    """A node that runs on several devices, and a dimension that has an empty name."""
    made = model(node("Relu"), sizes=("", 4))
    made.graph.node[0].device_configurations.add(configuration_id="two")
    made.graph.input[0].type.tensor_type.shape.dim[0].dim_param = ""
    return made


def outside(**where):
    """The data of a weight lies in another file, there."""
    pairs = {"location": "w", **where}.items()
    data = [StringStringEntryProto(key=key, value=value) for key, value in pairs]
    return added(data_location=1, external_data=data)


def twice(last, *columns):
    """The mean of a product with a weight that is there twice, ending in 3 and in `last`."""
    made = model(
        node("MatMul", ("x", "w"), ("h",)),
        node("ReduceMean", ("h",), ("y",), axes=[1]),
        weights=[numpy_helper.from_array(np.full((4, n), 3, "f"), "w") for n in columns],
    )
    numbers = np.full((4, columns[-1]), 3, "f")
    numbers[-1, -1] = last
    made.graph.initializer[-1].raw_data = numbers.tobytes()
    made.opset_import[0].version = 17
    return made


ONE = helper.make_tensor("a", TensorProto.INT8, (), [1])

REFUSED = {
    "two weights": (twice(4, 8, 8), "'w' is assigned 2 times"),
    "two mapped weights": (twice(4, 2000, 2000), "'w' is assigned 2 times"),
    "a small weight and a mapped one": (twice(3, 2000, 8), "'w' is assigned 2 times"),
    "a mapped weight and a small one": (twice(3, 8, 2000), "'w' is assigned 2 times"),
    "no heads": (
        model(node("Attention", ("x", "x", "x"), q_num_heads=0, kv_num_heads=1), sizes=(1, 2, 4)),
        "q_num_heads=0; it must be at least 1",
    ),
    "an unknown key of a weight elsewhere": (
        outside(x="w"),
        "'w', which is missing",
    ),
    "an offset that is no number": (outside(offset="a"), "offset of the data of 'w' is 'a', not"),
    "a length below 0": (outside(length="-4"), "length of the data of 'w' is '-4', not a number"),
    "too many axes": (model(node("Relu"), sizes=["n"] * 257), "257 axes is declared; 256 at most"),
    "an attribute of another type": (typed("STRING", s=b"1"), "axis of Softmax is of type STRING"),
    "a product of numbers": (
        model(node("MatMulInteger", ("a", "a")), weights=[ONE]),
        "MatMulInteger(int8[], int8[]): an operand has too few dimensions",
    ),
    "an attribute that is not there": (
        model(node("Concat", ("x", "x"))),
        "Concat has no attribute axis; it must have one",
    ),
    "an attribute without its value": (typed("INT", f=1.0), "of type INT and holds f"),
    "an attribute with two values": (typed("INT", i=1, s=b"1"), "of type INT and holds i, s"),
    "an attribute without a type": (typed("UNDEFINED", i=1), "of type UNDEFINED and holds i"),
    "an attribute that a call gives": (passed_on(1.5), "axis of Softmax is of type FLOAT"),
    "too few bytes": (added(raw_data=bytes(12)), "cannot reshape array of size 3"),
    "a part of an element": (added(raw_data=bytes(13)), "must be a multiple of element size"),
    "too many bytes": (added(raw_data=bytes(20)), "cannot reshape array of size 5"),
    "too few numbers": (added(float_data=[1, 2, 3]), "cannot reshape array of size 3"),
    "a negative size": (added(dims=[-4], raw_data=bytes(16)), "'w' has sizes"),
    "too few bytes in a function": (constant(raw_data=bytes(12)), "cannot reshape array of size 3"),
    "a negative size in a function": (constant(dims=[-4], raw_data=bytes(16)), "has sizes"),
    "functions without end": (cycle(), "F0, F1 call each other without end"),
    "functions that explode": (doubling(30), "more than 13,904 nodes"),
}


@pytest.mark.parametrize(("proto", "told"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused(tmp_path, proto, told):
    onnx.save(proto, tmp_path / "m.onnx")
    started = time.process_time()
    with pytest.raises(gg.GraphgenError, match=r"m\.onnx") as caught:
        load(tmp_path / "m.onnx")
    assert told in str(caught.value)
    assert time.process_time() - started < 2


def test_the_runtime_does_not_get_functions_that_explode_either():
    gg.Session(doubling(4).SerializeToString())
    with pytest.raises(gg.GraphgenError, match="more than 13,840 nodes"):
        gg.Session(doubling(30).SerializeToString())


def test_a_long_name_in_an_error_of_the_runtime_takes_no_time():
    started = time.process_time()
    with pytest.raises(gg.GraphgenError, match="a" * 1000):
        gg.Session(model(node("a" * 100_000)).SerializeToString())
    assert time.process_time() - started < 2


def undecodable(path, text):
    """A file with a text that is not UTF-8 where `text` is."""
    made = model(node("Relu", outputs=("TEXT",), name="NODE"), node("Exp", ("TEXT",)))
    made.graph.node[0].doc_string, made.graph.name, made.producer_name = "WORDS", "GRAPH", "MAKER"
    made.metadata_props.add(key="KEY", value="VALUE")
    content = made.SerializeToString()
    assert text.encode() in content
    path.write_bytes(content.replace(text.encode(), b"\xff\xfe" + text[2:].encode()))
    return path


def of_another_version():
    """A function of a domain that has another version in the model."""
    made = doubling(2)
    made.opset_import[1].version = 0
    return made


KEPT = {
    "a weight that is there twice": twice(3, 8, 8),
    "a weight that is there twice, and mapped": twice(3, 2000, 2000),
    "a version of a domain without operators": of_another_version(),
    "a device, and a name without letters": on_devices(),
    "a size below 0, which is any": model(node("Relu"), sizes=(-(2**63), 4)),
    "numbers of an attribute that a call gives": given_twice(),
    "a type of an attribute that a call gives": passed_on(1),
    "functions that call each other": doubling(4),
    "a reference outside functions": typed("INT", i=0, ref_attr_name="k"),
    "a reference without a value": typed("INT", ref_attr_name="k"),
    "numbers of another dtype": added(float_data=[1, 2, 3, 4], double_data=[1], int32_data=[9]),
    "two kinds of content": added(raw_data=bytes(16), float_data=[1, 2, 3, 4]),
    **dict.fromkeys(("TEXT", "NODE", "WORDS", "GRAPH", "MAKER", "KEY", "VALUE")),
}


@pytest.mark.parametrize("text", ["", "{", "3", '[["a"]]', '{"Softmax": "a"}', "[" * 10**5])
def test_damaged_metadata_is_left_out(tmp_path, text):
    onnx.save(damaged(declared=text, scalars=text), tmp_path / "m.onnx")
    with pytest.warns(gg.GraphgenWarning, match="'graphgen.(declared|scalars)' is damaged") as told:
        read = load(tmp_path / "m.onnx")
    assert len(told) == 2 and not read.metadata_props and not read.graph.metadata_props
    assert gg.optimize(read).report.declared == {}


@pytest.mark.parametrize(("name", "proto"), KEPT.items(), ids=KEPT)
def test_what_the_runtime_runs_means_the_same(tmp_path, name, proto):
    path = tmp_path / "m.onnx"
    undecodable(path, name) if proto is None else onnx.save(proto, path)
    x = np.array([[-1, 2, 0.5, 3], [4, 0, -2, 1]], np.float32)
    out = gg.export(gg.optimize(load(path)), tmp_path / "out.onnx")
    [wanted], [given] = (gg.Session(p, optimize=False)(x=x) for p in (path, out))
    np.testing.assert_allclose(given, wanted, rtol=1e-6)


def test_a_name_that_a_caller_has_to_write_is_text(tmp_path):
    content = model(node("Relu", ("INPUT",))).SerializeToString()
    made = onnx.ModelProto.FromString(content)
    made.graph.input[0].name = "INPUT"
    (tmp_path / "m.onnx").write_bytes(made.SerializeToString().replace(b"INPUT", b"\xff\xfePUT"))
    with pytest.raises(gg.GraphgenError, match="of an input or output is not UTF-8"):
        load(tmp_path / "m.onnx")


@pytest.mark.parametrize(
    "name",
    ["n", "input.1_dim", "a + b", "n**2", "floor(n/2 - 1/2) + 1", "Max(1, n)", "(-n)//2 + (n % 3)"],
)
def test_a_size_may_be_an_expression(name):
    assert legible(name) == name


@pytest.mark.parametrize(
    "name",
    ["9**9**9**9", "2**9", "(9**4)**4", "n**99", "n**(9)", "n**2**3", "1/0", "n/(1 - 1)", "f(n)",
     "a b", "Mod(n)", "__import__('os')", "1" * 20, "n" * 200, "(" * 50 + "n" + ")" * 50, "\ud800",
     "+".join("n" * 40)],
)  # fmt: skip
def test_a_name_of_a_size_is_never_calculated(name):
    started = time.process_time()
    assert legible(name).isidentifier()
    assert time.process_time() - started < 0.5


def test_different_names_stay_different_sizes(tmp_path):
    assert len({legible(name) for name in ("a$b", "a&b", "a$ b", "a" * 200, "a" * 201)}) == 5
    made = model(node("Relu"), sizes=("9**9**9**9", "9**9**9**8"))
    onnx.save(made, tmp_path / "m.onnx")
    assert len(set(load(tmp_path / "m.onnx").graph.inputs[0].shape)) == 2


def test_what_a_file_says_of_a_weight_is_not_taken_for_its_shape(tmp_path):
    made = added(raw_data=bytes(16))
    made.graph.value_info.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, ["n", 3]))
    onnx.save(made, tmp_path / "m.onnx")
    found = inspect(load(tmp_path / "m.onnx"))
    assert (found.parameters, found.uncounted) == (4, [])


def test_nodes_behind_an_unknown_operator_have_an_unknown_cost(tmp_path):
    weight = helper.make_tensor("w", TensorProto.FLOAT, [4, 4], [0.5] * 16)
    nodes = [node("Odd", outputs=("h",), domain="mine"), node("MatMul", ("h", "w"))]
    onnx.save(model(*nodes, weights=[weight], domains=["mine"]), tmp_path / "m.onnx")
    found = inspect(load(tmp_path / "m.onnx"), {"n": 2})
    assert [line.partition(" at")[0] for line in found.uncounted] == ["mine::Odd", "MatMul"]


@pytest.mark.parametrize("sizes", [[1] * 70, [f"d{i}" for i in range(40)], [2**50, 4]])
def test_a_model_for_which_no_arrays_can_be_made_is_not_verified(tmp_path, sizes):
    onnx.save(model(node("Relu"), node("Identity", ("y",), ("z",)), sizes=sizes), tmp_path / "m")
    started = time.process_time()
    report = gg.optimize(load(tmp_path / "m"), verify=True).report
    assert report.passes and time.process_time() - started < 2


@pytest.mark.skipif(
    minor(onnx.__version__) < (1, 23), reason="onnx 1.19 itself writes the million sizes: 7 s"
)
@pytest.mark.parametrize("first", ["Expand", "ConstantOfShape"])
def test_a_list_of_a_million_sizes_takes_no_time(tmp_path, first):
    made = model(node(first, ("x", "s")[first != "Expand" :], ("z",)), node("Shape", ("z",)))
    made.graph.input.append(helper.make_tensor_value_info("s", TensorProto.INT64, [10**6]))
    onnx.save(made, tmp_path / "m.onnx")
    started = time.process_time()
    gg.optimize(load(tmp_path / "m.onnx"))
    assert time.process_time() - started < 2


def test_the_time_of_slices_of_slices_does_not_explode(tmp_path):
    numbers = [("one", 1), ("end", 2**62), ("axis", 0)]
    names = ["x", *(f"h{i}" for i in range(29)), "y"]
    nodes = [node("Slice", (a, "one", "end", "axis"), (b,)) for a, b in itertools.pairwise(names)]
    weights = [helper.make_tensor(name, TensorProto.INT64, [1], [n]) for name, n in numbers]
    onnx.save(model(*nodes, weights=weights), tmp_path / "m.onnx")
    started = time.process_time()
    load(tmp_path / "m.onnx")
    assert time.process_time() - started < 5


def test_what_libraries_log_is_one_line_of_ours(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # pytest has some
    onnx.save(model(node("Relu")), tmp_path / "m.onnx")
    with mock.patch("graphgen.load", lambda _: logging.getLogger("onnx_ir.x").warning("a\nb")):
        assert main(["inspect", str(tmp_path / "m.onnx")]) != 0
    assert capsys.readouterr().err.startswith("graphgen: onnx_ir: a b\ngraphgen: ")
