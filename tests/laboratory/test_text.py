"""`assert_graph`: what it takes for equal, and what it says of what is not."""

import pytest

import graphgen as gg
from graphgen import assert_graph
from graphgen.errors import GraphgenError

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
    with pytest.raises(GraphgenError, match="nothing to check; give the wanted text, or counts"):
        assert_graph("nothing.onnx")


@pytest.fixture(scope="module")
def layer():
    return gg.build(gg.nn.EncoderLayer(8, num_heads=2), primitives=True, x=gg.float32["b", "t", 8])


def test_operators_are_counted_in_any_spelling(layer, tmp_path):
    best = gg.optimize(layer)
    assert "LayerNormalization" in best.report.ops_after
    assert_graph(best, attention=1, norm=2, layer_norm=2, rms_norm=0, softmax=0)
    assert_graph(gg.export(best, tmp_path / "m.onnx"), "...", attention=1)
    assert_graph(layer, softmax=0, norm=0)


def test_a_failure_counts_what_is_there_and_tells_why(layer):
    fused = gg.optimize(layer, passes=["clean", "fuse_norm"])
    with pytest.raises(AssertionError, match="\nattention: found 0, wanted 1\nnorm: found 2, wan"):
        assert_graph(fused, attention=1, norm=1)
    with pytest.raises(AssertionError, match="has other operators\nnorm: found 2"):
        assert_graph(fused, "...", norm=3)
    shown = gg.build(
        lambda x: (y := gg.ops.softmax(x @ gg.ops.swap_last(x)), y @ x),
        primitives=True,
        x=gg.float32["b", "t", 8],
    )
    with pytest.raises(AssertionError, match=r"attention: found 0, wanted 1 .*used elsewhere"):
        assert_graph(gg.optimize(shown), attention=1)


def test_an_unknown_operator_is_not_counted(layer):
    with pytest.raises(GraphgenError, match=r"'atention' is not .* did you mean 'attention'"):
        assert_graph(layer, atention=1)
