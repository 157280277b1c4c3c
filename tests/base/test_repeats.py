"""Nodes that are alike get the types that were worked out for the first, and no others do."""

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from small_models import as_in_a_file

import graphgen as gg
from graphgen import infer, nn, ops
from graphgen.edit import infer_model
from graphgen.graph import all_values
from graphgen.op import TABLE

FIXTURES = Path(__file__).parents[1] / "fixtures"


def types_of(name):
    model = gg.load(FIXTURES / f"{name}.onnx")
    known = infer_model(model).get_symbolic_value
    values = [v for g in model.graphs() for v in all_values(g)]
    return [(v.name, v.type, v.shape, str(known(v)), v.const_value is None) for v in values]


@pytest.mark.parametrize("name", ["t5_torchscript_eager_14", "llama_cached_dynamo_eager_18"])
def test_types_are_those_of_each_node_alone(name, monkeypatch):
    given = types_of(name)
    monkeypatch.setattr(infer, "operands_of", lambda *_: None)
    assert types_of(name) == given


@pytest.fixture
def ran(monkeypatch):
    """The nodes for which a rule has run."""
    nodes, rules = [], infer._run_rules
    monkeypatch.setattr(infer, "_run_rules", lambda node, c: (nodes.append(node), rules(node, c)))
    return nodes


def test_rules_run_for_one_layer(ran):
    counts = []
    for layers in (2, 6):
        module = nn.Encoder(8, layers=layers, num_heads=2)
        model = gg.build(module, primitives=True, x=gg.float32["batch", "seq", 8])
        ran.clear()
        infer_model(model)
        counts.append(len(ran))
    assert counts[0] == counts[1]


def test_rules_run_for_one_layer_of_a_program(ran):
    counts = []
    for layers in (2, 6):
        ran.clear()
        gg.build(nn.Encoder(8, layers=layers, num_heads=2), x=gg.float32["batch", "seq", 8])
        counts.append(len(ran))
    assert counts[0] == counts[1] > 5


def test_rules_of_sizes_run_once(ran):
    def turned(x, ids):
        for _ in range(5):
            x = ops.reshape(ops.relu(x), ops.concat([ops.shape(ids), ops.shape(x)[2:]], axis=0))
        return x

    model = as_in_a_file(turned, x=gg.float32["n", "m", 4], ids=gg.int64["n", "m"])
    ran.clear()
    infer_model(model)
    assert len(ran) == 6  # each operator once, and Shape of both
    assert str(model.graph.outputs[0].shape) == "[n,m,4]"


def made_up(body, **inputs):
    """The sizes that inference finds for the results of a program, none of which has a name."""
    model = as_in_a_file(body, **inputs)
    infer_model(model)
    sizes = [y.shape[0] for y in model.graph.outputs]
    assert all(isinstance(size, ir.SymbolicDim) for size in sizes)
    return sizes


def test_sizes_that_are_made_up_are_one_where_operands_decide_them():
    n, m, k = (gg.float32[name] for name in "nmk")
    first, second, other = made_up(lambda x, y, z, w: (x + y, x + z, x + w), x=n, y=m, z=m, w=k)
    assert first == second != other


def test_elements_that_are_made_up_are_one_where_operands_decide_them():
    def turned(x, y, n):
        size = ops.reduce_max(ops.shape(n) - np.array([7]), keepdims=True)
        quotient = TABLE["", "Div"](size, np.array([2]))
        sizes = ops.concat(quotient, np.array([-1]), axis=0)
        other = ops.concat(TABLE["", "Div"](size, np.array([3])), np.array([-1]), axis=0)
        return tuple(TABLE["", "Reshape"](z, s) for s in (sizes, other) for z in (x, y))

    x = gg.float32["n", 4]
    first, same, other, last = made_up(turned, x=x, y=x, n=gg.float32["n"])
    assert first == same != other == last


def test_what_operands_hold_may_decide_sizes():
    """Two masks of one shape keep different numbers of rows, and other factors resize otherwise."""

    def picked(x, a, b, s, t):
        kept = [TABLE["", "Compress"](x, mask, axis=0) for mask in (a, b)]
        larger = [TABLE["", "Resize"](x, None, scales) for scales in (s, t)]
        places = [ops.dim(TABLE["", "NonZero"](mask), 1) for mask in (a, b)]
        kept += [ops.expand(np.ones((), np.float32), [size]) for size in places]
        return *kept, *larger, *(TABLE["", "Range"](0.0, n[0], 1.0) for n in (s, t))

    two = gg.float32[2]
    sizes = made_up(picked, x=gg.float32["n", 4], a=gg.bool_["n"], b=gg.bool_["n"], s=two, t=two)
    assert len(set(sizes)) == 8


def test_names_of_a_converter_may_be_two_sizes():
    """Where two inputs have one: of one input alone it is a size like any other."""
    named, other = gg.float32["unk__0"], gg.float32["unk__1"]
    first, second = made_up(lambda x, y: (ops.relu(x), ops.relu(y)), x=named, y=named)
    assert first != second and not {"unk__0"} & {str(first), str(second)}
    first, second = made_up(lambda x, y: (ops.relu(x), ops.relu(y)), x=named, y=other)
    assert (first, second) == ("unk__0", "unk__1")


def test_sizes_count_as_operands():
    def turned(x, y):
        n, m = ops.dim(x, 0), ops.dim(y, 0)
        return tuple(ops.reshape(x, sizes) for sizes in ([n, 2, 2], [n, m, -1], [4, -1], [2, -1]))

    model = as_in_a_file(turned, x=gg.float32["n", "m"], y=gg.float32["m"])
    infer_model(model)
    assert str(model.graph.outputs[0].shape) == "[n,2,2]"
    assert [y.shape[-2] for y in model.graph.outputs] == [2, "m", 4, 2]


def test_attributes_count():
    def turned(x):
        return ops.transpose(x, perm=[1, 0, 2]), ops.transpose(x, perm=[2, 1, 0])

    model = as_in_a_file(turned, x=gg.float32["n", 4, 8])
    infer_model(model)
    assert [y.shape[0] for y in model.graph.outputs] == [4, 8]
