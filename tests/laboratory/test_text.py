"""`assert_graph`: what it takes for equal, and what it says of what is not."""

import pytest

import graphgen as gg
from graphgen.errors import GraphgenError
from graphgen.laboratory import assert_graph

WANTED = """
    input x: float[batch, 3]
    %0 = Relu(x): float[batch, 3]
    %output = Sub(%0, Exp(%0)): float[batch, 3]
    return %output
"""


def function(x):
    y = gg.ops.relu(x)
    return y - gg.ops.exp(y)


@pytest.fixture
def model():
    return gg.build(function, x=gg.float32["batch", 3])


def test_models_files_and_results_of_optimize(model, tmp_path):
    assert_graph(model, WANTED)
    gg.export(model, tmp_path / "m.onnx")
    assert_graph(tmp_path / "m.onnx", WANTED)
    assert_graph(str(tmp_path / "m.onnx"), WANTED)
    assert_graph(gg.optimize(model), WANTED)


def test_names_of_values_and_white_space_say_nothing(model):
    for i, node in enumerate(model.graph):
        node.name, node.outputs[0].name = f"n{i}", node.outputs[0].name and f"z{i}"
    model.graph.outputs[0].name = "output"
    assert_graph(model, WANTED.replace("Relu(x):", "  Relu(x):   ").replace("\n", "\n\n"))


def test_the_order_of_attributes_says_nothing():
    model = gg.build(lambda x: gg.ops.layout._shape(x, start=1, end=2), x=gg.float32["n", "m"])
    wanted = "...\n%output = Shape(x, end=2, start=1): int64[1]\n..."
    assert_graph(model, wanted)
    [node] = model.graph
    attributes = dict(reversed(list(node.attributes.items())))
    node.attributes.clear()
    node.attributes.update(attributes)
    assert_graph(model, wanted)


def test_dots_stand_for_any_lines(model):
    assert_graph(model, "...\n%output = Sub(%0, Exp(%0)): float[batch, 3]\n...")
    assert_graph(model, "...")
    with pytest.raises(AssertionError):
        assert_graph(model, "%output = Sub(%0, Exp(%0)): float[batch, 3]\n...")


def test_module_paths_are_compared_where_some_are_given():
    model = gg.build(gg.nn.FeedForward(4, 8, activation="relu"), x=gg.float32["n", 4])
    assert_graph(model, "...\n# up\n...\n# down\n...")
    with pytest.raises(AssertionError):
        assert_graph(model, "...\n# sideways\n...")


def test_a_failure_shows_the_difference(model):
    with pytest.raises(AssertionError) as caught:
        assert_graph(model, WANTED.replace("Relu", "Tanh"))
    lines = str(caught.value).splitlines()
    assert "-%0 = Tanh(x): float[batch, 3]" in lines
    assert "+%0 = Relu(x): float[batch, 3]" in lines
    assert " input x: float[batch, 3]" in lines


def test_what_is_no_model_is_told():
    with pytest.raises(GraphgenError, match="3 is not a model"):
        assert_graph(3, "...")
    with pytest.raises(GraphgenError):
        assert_graph("nothing.onnx", "...")
