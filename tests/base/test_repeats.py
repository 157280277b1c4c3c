"""Nodes that are alike get the types that were worked out for the first, and no others do."""

from pathlib import Path

import onnx_ir as ir
import pytest
from small_models import as_in_a_file

import graphgen as gg
from graphgen import infer, nn, ops
from graphgen.edit import infer_model
from graphgen.graph import all_values

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


def test_sizes_that_are_made_up_stay_apart():
    def added(x, y, z):
        return x + y, x + z  # the result of two names has a third

    n, m = gg.float32["n"], gg.float32["m"]
    model = as_in_a_file(added, x=n, y=m, z=m)
    infer_model(model)
    first, second = (y.shape[0] for y in model.graph.outputs)
    assert isinstance(first, ir.SymbolicDim) and first != second


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
