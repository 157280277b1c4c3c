"""What is trained of foreign graphs: statistics, states, weights merged or renamed by exporters."""

import ast
import json
import re
import shlex
import warnings

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

import graphgen as gg
from graphgen import commands
from graphgen.errors import GraphgenError, GraphgenWarning
from graphgen.export.checkpoint import Checkpoint
from graphgen.export.chosen import patterns_of
from graphgen.graph import ORIGIN

RNG = np.random.default_rng(0)


def normal(*shape):
    return RNG.normal(size=shape).astype(np.float32)


def save(path, nodes, weights, x, **outputs):
    """A file from (block, node) pairs, as torch's exporters write them."""
    for i, (block, node) in enumerate(nodes):
        node.name = f"node_{i}"
        if block.startswith("/"):  # TorchScript
            node.name = f"{block}/{node.op_type}"
        elif block:
            entry = node.metadata_props.add()
            entry.key, entry.value = "pkg.torch.onnx.name_scopes", f"['', '{block}', 'op_{i}']"
    graph = helper.make_graph(
        [node for _, node in nodes],
        "main_graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, x)],
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, y) for n, y in outputs.items()],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    opsets = [helper.make_opsetid("", 18)]
    model = helper.make_model(graph, opset_imports=opsets, producer_name="pytorch", ir_version=8)
    onnx.checker.check_model(model)
    onnx.save(model, path)
    return path


def trained(path, pattern=None, **options):
    table = gg.artifacts(
        path, path.with_suffix(""), loss="mse", output="y", trainable=pattern, **options
    )
    names = [weight.name for weight in table if weight.trained]
    assert names == [*Checkpoint.load(path.with_suffix("") / "checkpoint").trainable]
    return names


def told(path, pattern=None):
    table = gg.artifacts(path, path.with_suffix(""), loss="mse", output="y", trainable=pattern)
    return {weight.name: weight.why for weight in table}


@pytest.fixture
def norm(tmp_path):
    """A linear map, a BatchNorm, and a weight that the output does not need."""
    weights = {
        "0.weight": normal(3, 4),
        **{f"1.{name}": np.abs(normal(4)) + 1 for name in ("weight", "bias")},
        **{f"1.{name}": np.abs(normal(4)) + 1 for name in ("running_mean", "running_var")},
        "unused": normal(2),
        "steps": np.arange(2),
        "scale": np.float32(3),
    }
    node = helper.make_node
    nodes = [
        ("0", node("MatMul", ["x", "0.weight"], ["h"])),
        ("1", node("BatchNormalization", ["h", *[*weights][1:5]], ["n"])),
        ("", node("Mul", ["n", "scale"], ["y"])),
        ("", node("Cast", ["steps"], ["s"], to=1)),
        ("", node("Add", ["unused", "s"], ["z"])),
    ]
    return save(tmp_path / "norm.onnx", nodes, weights, ["n", 3], y=["n", 4], z=[2])


def test_running_statistics_are_not_trained(norm):
    assert trained(norm) == ["0.weight", "1.weight", "1.bias"]
    with pytest.raises(
        GraphgenError,
        match=r"'\^1' matches 1.running_mean, which is a running statistic of 1: no .*; name "
        "only 1.weight, 1.bias, or, if it is meant, its whole name",
    ):
        trained(norm, "^1")
    assert trained(norm, r"^1\.(weight|bias)") == ["1.weight", "1.bias"]


def test_a_weight_that_is_a_statistic_too_is_refused(norm):
    """Of a norm that was not trained yet, torch's exporters store ones and zeros once."""
    model = onnx.load(norm)
    node = next(node for node in model.graph.node if node.op_type == "BatchNormalization")
    node.input[3], node.input[4] = "1.bias", "1.weight"
    for name in ("1.running_mean", "1.running_var"):
        model.graph.initializer.remove(next(x for x in model.graph.initializer if x.name == name))
    onnx.save(model, norm)
    for pattern in (None, "1.weight", "^1"):
        with pytest.raises(
            GraphgenError,
            match=r"1.weight is a running statistic of 1, and a weight of 1: they were equal, and",
        ):
            trained(norm, pattern)
    assert trained(norm, frozen="^1") == ["0.weight"] == trained(norm, "^0")
    assert told(norm, "^0")["1.weight"] == "a running statistic of 1"


def test_a_weight_that_was_normalized_before_the_export_is_refused(tmp_path):
    """Its parts, as torch's weight_norm has them, would be trained; it is called like a product."""
    nodes = [("c", helper.make_node("Conv", ["x", "mul_1"], ["y"]))]
    path = save(tmp_path / "m.onnx", nodes, {"mul_1": normal(4, 3, 1)}, ["n", 3, 5], y=["n", 4, 5])
    assert trained(path) == ["mul_1"]
    model = onnx.load(path)
    model.graph.initializer.append(numpy_helper.from_array(normal(4), "c.bias"))
    model.graph.node[0].input.append("c.bias")
    value = helper.make_tensor_value_info("c.bias", TensorProto.FLOAT, [4])
    kind = value.metadata_props.add()
    kind.key, kind.value = "pkg.torch.export.graph_signature.InputSpec.kind", "PARAMETER"
    model.graph.value_info.append(value)
    onnx.save(model, path)
    with pytest.raises(GraphgenError, match=r"calculated mul_1, of constants or of parameters, wh"):
        trained(path)
    with pytest.warns(GraphgenWarning, match="calculated mul_1"):
        assert trained(path, "bias") == ["c.bias"]
    with pytest.raises(GraphgenError, match="to train mul_1, a constant, give its whole name"):
        trained(path, "mul_")
    assert trained(path, "mul_1") == ["mul_1"]


def test_slopes_are_weights_of_other_names(tmp_path):
    """Exporters give a slope for each channel further axes, and all begin with 0.25."""
    weights = {"0.weight": normal(3, 4), "onnx::PRelu_8": np.full((4,), 0.25, np.float32)}
    nodes = [
        ("/0", helper.make_node("MatMul", ["x", "0.weight"], ["h"])),
        ("/1", helper.make_node("PRelu", ["h", "onnx::PRelu_8"], ["y"])),
    ]
    path = save(tmp_path / "slopes.onnx", nodes, weights, ["n", 3], y=["n", 4])
    assert trained(path) == [*weights]
    assert told(path)["onnx::PRelu_8"] == "the weight of 1, renamed"


def test_a_matrix_that_is_called_like_a_constant_is_told(tmp_path):
    nodes = [
        ("", helper.make_node("MatMul", ["x", "constant_0"], ["h"])),
        ("", helper.make_node("MatMul", ["h", "w"], ["y"])),
    ]
    weights = {"constant_0": normal(3, 4), "w": normal(4, 2)}
    path = save(tmp_path / "m.onnx", nodes, weights, [None, 3], y=[None, 2])
    with pytest.warns(GraphgenWarning, match="constant_0 multiplies .* rename it if it is a weig"):
        assert trained(path) == ["w"]


def test_a_pattern_means_no_constant(norm):
    """Those of names alone do: `scale`, a scalar of a file, or a shape."""
    assert trained(norm, r"^(0|1)\.(weight|bias)|scale|steps") == ["0.weight", "1.weight", "1.bias"]
    assert trained(norm, "scale") == ["scale"]
    with pytest.raises(
        GraphgenError,
        match=r"trainable='\^scale' matches no parameter; there are .*; to train scale, a "
        "constant, give its whole name",
    ):
        trained(norm, "^scale")


def test_the_table_tells_why_a_weight_is_not_trained(norm, capsys):
    assert told(norm, "bias") == {
        "0.weight": "not named by trainable=",
        "1.weight": "not named by trainable=",
        "1.bias": "",
        "1.running_mean": "a running statistic of 1",
        "1.running_var": "a running statistic of 1",
        "unused": "not reached by the loss",
        "steps": "only float32 is trained",
        "scale": "a constant",
    }
    [row] = [
        w
        for w in gg.artifacts(norm, norm.parent / "art", loss="mse", output="y")
        if w.name == "0.weight"
    ]
    assert row == ("0.weight", "float", (3, 4), True, "")
    capsys.readouterr()
    command = [
        "artifacts",
        str(norm),
        "-o",
        str(norm.parent / "art"),
        "--loss",
        "mse",
        "--output",
        "y",
    ]
    assert commands.main([*command, "--trainable", "0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for wanted in ("0.weight float[3, 4] trained", "1.running_var float[4] frozen a running stat"):
        assert any(wanted in " ".join(line.replace("│", " ").split()) for line in lines), wanted
    assert "and 2 constants" in lines


@pytest.mark.parametrize("op", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("how", ["itself", "moved"])
def test_initial_states_are_not_trained(tmp_path, op, how):
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[op]
    names = ["initial_h", "initial_c"] if op == "LSTM" else ["initial_h"]
    shape = (1, 1, 5) if how == "moved" else (1, 2, 5)
    weights = {"w": normal(1, gates * 5, 3), "r": normal(1, gates * 5, 5)}
    weights |= {f"rnn.{name}": np.zeros(shape, np.float32) for name in names}
    nodes, states = [], [f"rnn.{name}" for name in names]
    if how == "moved":
        weights["sizes"] = np.array([1, 2, 5])
        nodes = [("rnn", helper.make_node("Expand", [n, "sizes"], [f"{n}_2"])) for n in states]
        states = [f"{name}_2" for name in states]
    inputs = ["x", "w", "r", "", "", *states]
    nodes.append(("rnn", helper.make_node(op, inputs, ["", "y"], hidden_size=5)))
    path = save(tmp_path / "m.onnx", nodes, weights, ["t", 2, 3], y=[1, 2, 5])
    assert trained(path) == ["w", "r"]
    assert told(path, "^[wr]$")["rnn.initial_h"] == "an initial state of rnn"
    with pytest.raises(GraphgenError, match=r"rnn.initial_h, which is an initial state of rnn"):
        trained(path, "initial")


def test_an_initial_state_that_is_a_parameter_is_trained(tmp_path):
    """Torch's exporters say so, or keep its name; what they calculated of it is refused."""
    weights = {"r.w": normal(1, 20, 3), "r.r": normal(1, 20, 5)}
    for state, dynamo, found in (
        ("r.h", True, ["r.w", "r.r", "r.h"]),
        ("r.h", False, ["r.w", "r.r", "r.h"]),
        ("onnx::LSTM_7", False, "exporter calculated onnx::LSTM_7, of"),
    ):
        node = helper.make_node("LSTM", ["x", "r.w", "r.r", "", "", state], ["", "y"])
        node.attribute.append(helper.make_attribute("hidden_size", 5))
        given = weights | {state: normal(1, 2, 5)}
        block = "r" if dynamo else "/r"
        path = save(tmp_path / "m.onnx", [(block, node)], given, ["t", 2, 3], y=[1, 2, 5])
        if dynamo:
            model = onnx.load(path)
            value = helper.make_tensor_value_info(state, TensorProto.FLOAT, [1, 2, 5])
            key = "pkg.torch.export.graph_signature.InputSpec.kind"
            value.metadata_props.add(key=key, value="PARAMETER")
            model.graph.value_info.append(value)
            onnx.save(model, path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if isinstance(found, list):
                assert trained(path) == found
            else:
                with pytest.raises(GraphgenError, match=found):
                    trained(path)


def linear_stack(path, names, weights, blocks=("0", "2", "4")):
    """x · W₀ · W₁ · W₂ in three modules, by the names of their weights."""
    values = ["x", *(f"h{i}" for i in range(len(blocks) - 1)), "y"]
    nodes = [
        (block, helper.make_node("MatMul", [values[i], name], [values[i + 1]]))
        for i, (block, name) in enumerate(zip(blocks, names, strict=True))
    ]
    return save(path, nodes, weights, ["n", 4], y=["n", 4])


@pytest.mark.parametrize("script", ["", "/"])
def test_equal_weights_that_were_stored_once_are_refused(tmp_path, script):
    """As the zero matrices of LoRA, and the ones of norms, are."""
    blocks = [script + block for block in ("0", "2", "4")]
    weights = {"0.lora_B": np.zeros((4, 4), np.float32), "2.base": normal(4, 4)}
    names = ["0.lora_B", "2.base", "0.lora_B"]
    path = linear_stack(tmp_path / "m.onnx", names, weights, blocks)
    for pattern in (None, "lora", "[024]"):
        with pytest.raises(
            GraphgenError,
            match=r"0.lora_B is one weight of 0 and 4, whose weights were equal and were stored "
            r"once; .*optimize=False\)",
        ):
            trained(path, pattern)
    assert trained(path, "base") == ["2.base"]
    assert told(path, "base")["0.lora_B"].startswith("not named by trainable=; one weight of 0 and")


@pytest.mark.parametrize("identity", [False, True])
def test_a_part_of_what_is_one_weight_is_refused(tmp_path, identity):
    weights, names = {"0.w": normal(4, 4), "2.w": normal(4, 4)}, ["0.w", "2.w", "0.w"]
    path = linear_stack(tmp_path / "m.onnx", names, weights)
    if identity:  # as TorchScript shares weights
        model = onnx.load(path)
        model.graph.node.insert(0, helper.make_node("Identity", ["0.w"], ["4.w"]))
        model.graph.node[-1].input[1] = "4.w"
        onnx.save(model, path)
    for pattern, named in (("^0", "0"), ("^4", "4"), ("^[24]", "4")):
        with pytest.raises(
            GraphgenError,
            match=rf"names {named}, whose weight is 0.w in this file, one weight of 0 and 4; name "
            "all of it or none",
        ):
            trained(path, pattern)
    assert trained(path, "^2") == ["2.w"]
    for pattern in (None, "w"):
        with pytest.warns(UserWarning, match="0.w is one weight of 0 and 4: tied in the") as caught:
            assert trained(path, pattern) == ["0.w", "2.w"]
        assert len(caught) == 1 and caught[0].filename == __file__
    with pytest.warns(UserWarning):
        assert told(path)["0.w"] == "one weight of 0 and 4: tied, or stored once since equal"


@pytest.mark.parametrize("name", ["onnx::MatMul_33", "val_0", "permute_1"])
def test_a_renamed_weight_is_not_left_out_silently(tmp_path, name):
    weights = {"0.w": normal(4, 4), name: normal(4, 4), "4.w": normal(4, 4)}
    path = linear_stack(tmp_path / "m.onnx", [*weights], weights)
    for pattern in ("^[24]", "weight$", r"2\."):
        with pytest.raises(GraphgenError, match=rf"names 2, whose weight is {name} in this file; "):
            trained(path, pattern)
    assert trained(path, "^4") == ["4.w"]
    assert trained(path, f"^4|{name}") == [name, "4.w"]
    assert trained(path) == [*weights]
    assert told(path)[name] == "the weight of 2, renamed"


def test_a_folded_constant_is_none_of_the_weights(tmp_path):
    weights = {"0.w": normal(4, 4), "val_3": np.full(1, 0.5, np.float32), "val_4": normal(4)}
    nodes = [
        ("0", helper.make_node("MatMul", ["x", "0.w"], ["h"])),
        ("0", helper.make_node("Mul", ["h", "val_3"], ["k"])),
        ("0", helper.make_node("Mul", ["k", "val_4"], ["y"])),
    ]
    path = save(tmp_path / "m.onnx", nodes, weights, ["n", 4], y=["n", 4])
    assert trained(path) == ["0.w", "val_4"]
    assert trained(path, "^0") == ["0.w"]
    table = told(path)
    assert (table["val_3"], table["val_4"]) == ("a constant", "of 0: a constant?")


def test_a_tied_weight_that_became_two_is_told(tmp_path):
    table = normal(4, 4)
    weights = {"emb.w": table, "onnx::MatMul_9": np.ascontiguousarray(table.T)}
    path = linear_stack(tmp_path / "m.onnx", [*weights], weights, ["emb", "head"])
    with pytest.raises(
        GraphgenError, match=r"onnx::MatMul_9 is emb.w transposed: one weight .*gg\.f"
    ):
        trained(path)
    assert trained(path, frozen="onnx::MatMul_9") == ["emb.w"]
    with pytest.warns(UserWarning, match="onnx::MatMul_9 is emb.w transposed, trained apart from"):
        assert trained(path, [*weights]) == [*weights]


def test_weights_of_a_module_and_its_copy_are_refused(tmp_path):
    """As torch's TransformerEncoder begins, whose layers are copies."""
    weights = {"a.w": normal(4, 4), "a.b": normal(4)}
    nodes = []
    for x, part, y in (("x", "a", "h"), ("h", "b", "y")):
        nodes.append((part, helper.make_node("MatMul", [x, "a.w"], [f"{part}_p"])))
        nodes.append((part, helper.make_node("Add", [f"{part}_p", "a.b"], [y])))
    path = save(tmp_path / "m.onnx", nodes, weights, ["n", 4], y=["n", 4])
    with pytest.raises(
        GraphgenError, match=r"all weights of a and b are stored once, .*gg\.from_t"
    ):
        trained(path)
    with pytest.warns(UserWarning, match="a.w is one weight of a and b"):
        assert trained(path, [*weights]) == [*weights]


def test_scalars_of_torchscript_are_trained_and_what_it_calculated_is_refused(tmp_path):
    """Its constants are nodes; what stands beside them by a name of its own is the module's."""
    weights = {"w": normal(4, 4), "scale": np.float32(2), "onnx::Add_7": normal(4)}
    weights = {name: np.asarray(array, np.float32) for name, array in weights.items()}
    nodes = [
        ("/m", helper.make_node("MatMul", ["x", "w"], ["h"])),
        ("/a", helper.make_node("Mul", ["h", "scale"], ["k"])),
        ("/a", helper.make_node("Add", ["k", "onnx::Add_7"], ["y"])),
    ]
    path = save(tmp_path / "m.onnx", nodes, weights, ["n", 4], y=["n", 4])
    with pytest.raises(
        GraphgenError, match=r"calculated onnx::Add_7, .* in torch: export with gg\."
    ):
        trained(path)
    assert trained(path, frozen="onnx::Add_7") == ["w", "scale"]
    with pytest.warns(
        UserWarning, match="calculated onnx::Add_7, of constants or of parameters, so"
    ):
        assert trained(path, "w|scale") == ["w", "scale"]
    with pytest.warns(UserWarning, match="calculated onnx::Add_7"):  # no pattern means it
        assert trained(path, ".") == ["w", "scale"]


def test_weights_that_are_declared_shared_are_as_declared(tmp_path):
    """In graphs of our own: nothing is merged that is not declared so, constants or not."""

    class Twice(gg.nn.Module):
        def __init__(self):
            self.a, self.b = gg.nn.Linear(4, 4), gg.nn.Linear(4, 4)

        def __call__(self, x):
            return self.b(self.a(self.b(x)))

    gg.export(gg.build(Twice(), x=gg.float32["n", 4]), tmp_path / "m.onnx")
    gg_file = tmp_path / "m.onnx"
    table = gg.artifacts(gg_file, tmp_path / "art", loss="mse", trainable=r"^b\.")
    assert [weight.name for weight in table if weight.trained] == ["b.weight", "b.bias"]


def test_names_patterns_lists_and_what_is_frozen(norm):
    assert trained(norm, ["0.weight", "bias$"]) == ["0.weight", "1.bias"]
    assert trained(norm, "1.weight") == ["1.weight"]
    assert trained(norm, frozen="^1") == ["0.weight"]
    assert trained(norm, ["weight"], frozen=["1.weight"]) == ["0.weight"]
    table = gg.artifacts(norm, norm.parent / "art", loss="mse", output="y", frozen="^1")
    assert {w.name: w.why for w in table}["1.bias"] == "named by frozen="
    for options, problem in (
        ({"frozen": "^2"}, r"frozen='\^2' matches no parameter; there are 0.weight"),
        ({"pattern": ["0", "("]}, r"trainable='\(' is not a regular expression"),
        ({"pattern": "0", "frozen": "weight"}, "frozen='weight' leaves nothing to train"),
        ({"pattern": ["0", "^2"]}, r"trainable='\^2' matches no parameter"),
        ({"pattern": gg.nn.Linear(2, 2)}, "has Linear, and the model is read from a file"),
    ):
        with pytest.raises(GraphgenError, match=problem):
            trained(norm, **options)


def test_a_whole_name_is_meant(norm, tmp_path):
    assert trained(norm, ["1.bias", "1.running_mean"]) == ["1.bias", "1.running_mean"]
    told_of = told(norm, ["1.running_mean"])
    assert told_of["1.running_mean"] == "a running statistic of 1, trained since it is named"
    weights = {"0.lora_B": np.zeros((4, 4), np.float32), "2.base": normal(4, 4)}
    path = linear_stack(tmp_path / "m.onnx", ["0.lora_B", "2.base", "0.lora_B"], weights)
    with pytest.warns(UserWarning, match="0.lora_B is one weight of 0 and 4"):
        assert trained(path, ["0.lora_B"]) == ["0.lora_B"]


def test_a_part_of_one_weight_is_not_frozen_alone(tmp_path):
    weights, names = {"0.w": normal(4, 4), "2.w": normal(4, 4)}, ["0.w", "2.w", "0.w"]
    path = linear_stack(tmp_path / "m.onnx", names, weights)
    with pytest.raises(GraphgenError, match=r"frozen='\^4' names 4, whose weight is 0.w in this"):
        trained(path, frozen="^4")
    assert trained(path, frozen=["0.w"]) == ["2.w"]


def test_modules_of_a_built_model(tmp_path):
    class Two(gg.nn.Module):
        def __init__(self):
            self.body, self.head = gg.nn.Linear(4, 4), gg.nn.Linear(4, 2)

        def __call__(self, x):
            return self.head(self.body(x))

    module = Two()
    model = gg.build(module, x=gg.float32["n", 4])

    def names(**options):
        return [w.name for w in gg.artifacts(model, tmp_path / "a", **options) if w.trained]

    assert names(trainable=module.head) == ["head.weight", "head.bias"]
    assert names(trainable=module, frozen=[module.body, "bias"]) == ["head.weight"]
    assert names(trainable=module.body.weight) == ["body.weight"]
    with pytest.raises(GraphgenError, match="has Linear, and the model is not made of it"):
        names(trainable=gg.nn.Linear(4, 2))


def test_what_the_maker_says_of_weights(tmp_path):
    """Such as torch's requires_grad, buffers, and weights that several modules share."""
    weights = {name: normal(4, 4) for name in ("0.w", "2.w", "4.w")}
    path = linear_stack(tmp_path / "m.onnx", [*weights], weights)
    model = onnx.load(path)
    entry = model.metadata_props.add()
    entry.key = "graphgen.origin"
    entry.value = '{"frozen": {"2.w": "a buffer"}, "tied": {"0.w": ["6.w"]}}'
    onnx.save(model, path)
    assert trained(path) == ["0.w", "4.w"]
    assert told(path)["2.w"] == "a buffer" and told(path)["0.w"] == "tied: also 6.w"
    assert trained(path, "2.w") == ["2.w"] and trained(path, "w") == ["0.w", "4.w"]
    with pytest.raises(GraphgenError, match=r"no parameter.*to train 2\.w, a constant, give its"):
        trained(path, "2")
    entry.value = '{"frozen": [2]}'
    onnx.save(model, path)
    with pytest.raises(GraphgenError, match=r"metadata 'graphgen.origin' is damaged: .*import"):
        trained(path)


@pytest.mark.parametrize(
    "old", ["", "u = Unsqueeze (x, last) d = DFT <axis = 1> (u) z = Shape (d)"]
)
def test_what_torch_calls_a_parameter_is_trained_and_not_what_its_exporter_made(tmp_path, old):
    """Such as the scale of CLIP's logits, and not a causal mask; a transposed weight stays one.

    A number that it made of parameters is called like the last operator, and told.
    """
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 18]>
        g (float[b, 4] x) => (float[b, 4] y{", int64[3] z" if old else ""})
        <float[4, 4] w = {{1.0}}, float scale = {{2.0}}, float val_0 = {{0.5}}, float exp = {{0.5}},
            float[4] mask = {{0.0}}, float[4, 4] v = {{1.0}}, int64[1] last = {{2}}> {{
            h = MatMul (x, w) s = Mul (h, scale) e = Add (s, val_0) f = Mul (e, exp)
            m = Add (f, mask)
            y = MatMul (m, v) {old} }}""")
    del model.graph.initializer[:-1]
    sizes = {"w": (4, 4), "scale": (), "val_0": (), "exp": (), "mask": (4,), "v": (4, 4)}
    for name, shape in sizes.items():
        array = np.full(shape, 0.5, np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
        value = onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)
        if name in ("w", "scale"):
            kind = value.metadata_props.add()
            kind.key = "pkg.torch.export.graph_signature.InputSpec.kind"
            kind.value = "PARAMETER"
        model.graph.value_info.append(value)
    onnx.save(model, tmp_path / "m.onnx")
    with pytest.warns(GraphgenWarning, match="calculated mask, exp, of constants or"):
        assert trained(tmp_path / "m.onnx") == ["w", "scale", "v"]
    with pytest.warns(GraphgenWarning):
        why = told(tmp_path / "m.onnx")
    assert why["val_0"] == "a constant"
    assert why["mask"] == why["exp"] == "calculated by an exporter"
    assert trained(tmp_path / "m.onnx", "mask") == ["mask"]


def made_old(path):
    """Put a node into a file that no reader but onnx's converter raises, and its opset to 18."""
    model = onnx.load(path)
    model.graph.node.add().CopyFrom(helper.make_node("Unsqueeze", ["x", "last"], ["x_1"]))
    model.graph.node.add().CopyFrom(helper.make_node("DFT", ["x_1"], ["dft"], axis=1))
    model.graph.node.add().CopyFrom(helper.make_node("Shape", ["dft"], ["shape"]))
    model.graph.initializer.append(numpy_helper.from_array(np.array([2]), "last"))
    model.graph.output.add().CopyFrom(helper.make_tensor_value_info("shape", 7, [3]))
    model.opset_import[0].version = 18
    onnx.save(model, path)


def of_dynamo(path, nodes, weights, parameters, mutated=()):
    """A file with what dynamo's exporter says of a module: its parameters, and its calls.

    `nodes` are (block, call, node); `mutated` are the buffers that a call changes.
    """
    save(path, [(block, node) for block, _, node in nodes], weights, ["n", 4], y=["n", 4])
    model = onnx.load(path)
    for node, (_, call, _) in zip(model.graph.node, nodes, strict=True):
        entry = node.metadata_props.add()
        entry.key, entry.value = "pkg.torch.onnx.fx_node", call
    lines = [f"p_{name.replace('.', '_')}: PARAMETER target='{name}'" for name in parameters]
    entry = model.graph.metadata_props.add()
    entry.key = "pkg.torch.export.ExportedProgram.graph_signature"
    lines += ["b_m: BUFFER target='m' persistent=True\n", "# outputs"]
    lines += [f"add: BUFFER_MUTATION target='{name}'" for name in mutated]
    entry.value = "\n# inputs\n" + "\n".join(lines)
    onnx.save(model, path)
    return path


@pytest.mark.parametrize("of", ["m", "w", "late"])
def test_what_dynamo_calculated_is_a_constant_if_it_says_so(tmp_path, of):
    """Not of a parameter, nor where one is nowhere, as one that was equal to a buffer."""
    call = "%{} : [num_users=1] = call_function[target=torch.ops.aten.{}(args = ({}))"
    nodes = [
        ("", call.format("s", "add.Tensor", "%x, %slice_1"), "Add", ["x", "slice_1"], "s"),
        ("a", call.format("y", "linear.default", "%s, %p_a_weight"), "MatMul", ["s", "val_0"], "y"),
    ]
    path = of_dynamo(
        tmp_path / "m.onnx",
        [(b, call, helper.make_node(op, args, [y])) for b, call, op, args, y in nodes],
        {"slice_1": normal(1, 4), "val_0": normal(4, 4)},
        ["a.weight"] + ["w"] * (of == "w") + ["w"] * (of == "late"),
    )
    model = onnx.load(path)
    made = {"slice_1": "'w', 'val_1'" if of == "w" else "'m', 'val_1'", "val_0": "'a.weight'"}
    for name, names in made.items():
        shape = [1, 4] if name == "slice_1" else [4, 4]
        value = helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        value.metadata_props.add(key="pkg.onnxscript.optimizer.folded_from", value=f"[{names}]")
        model.graph.value_info.append(value)
    onnx.save(model, path)
    if of == "m":
        assert trained(path) == trained(path, ".") == ["val_0"]
        assert told(path)["slice_1"] == told(path, ".")["slice_1"] == "calculated of constants"
        assert trained(path, ["slice_1"]) == ["slice_1"]
        return
    with pytest.raises(GraphgenError, match=r"(exporter calculated slice_1, of|lacks w, which)"):
        trained(path)


def test_what_is_in_doubt_is_left_out_by_what_one_refusal_says(tmp_path):
    """Equal norms are stored once, a product is renamed, a token expanded, a bias dropped."""
    call = "%{} : [num_users=1] = call_function[target=torch.ops.aten.{}(args = ({}))"
    node = helper.make_node
    nodes = [
        (
            "n",
            call.format("a", "mul.Tensor", "%x, %p_n_weight"),
            node("Mul", ["x", "n.weight"], ["a"]),
        ),
        (
            "m",
            call.format("b", "mul.Tensor", "%a, %p_m_weight"),
            node("Mul", ["a", "n.weight"], ["b"]),
        ),
        ("", call.format("c", "add.Tensor", "%b, %expand"), node("Add", ["b", "expand"], ["c"])),
        (
            "h",
            call.format("y", "linear.default", "%c, %p_h_weight, %p_h_bias"),
            node("MatMul", ["c", "h.weight"], ["y"]),
        ),
    ]
    weights = {"n.weight": np.ones(4, np.float32), "expand": normal(1, 4), "h.weight": normal(4, 4)}
    parameters = ["n.weight", "m.weight", "token", "h.weight", "h.bias"]
    path = of_dynamo(tmp_path / "m.onnx", nodes, weights, parameters)
    with pytest.raises(GraphgenError, match=r"the file lacks m\.weight and ") as caught:
        trained(path)
    listed = str(caught.value).partition("frozen=")[2].rpartition("]")[0] + "]"
    left_out = ast.literal_eval(listed)
    assert {"n.weight", "m.weight", "expand", "h.bias"} <= {*left_out}
    assert trained(path, frozen=left_out) == ["h.weight"]


@pytest.mark.parametrize("old", [False, True])
def test_a_parameter_that_dynamo_dropped_is_refused(tmp_path, old):
    """A bias of zeros, which its optimizer takes out of a Gemm; nothing else is lost.

    Not even where onnx converts the graph, which drops what the file says of it.
    """
    parameters = ["a.weight", "a.bias", "b.weight", "b.bias", "head.weight", "pooler.weight"]
    weights = {"val_0": normal(4, 4), "b.bias": normal(4), "val_3": normal(4, 4)}
    weights |= {"head.weight": normal(4, 4)}
    call = (
        "%{0} : [num_users=1] = call_function[target=torch.ops.aten.linear.default](args = ({1}))"
    )
    a, b = call.format("a", "%x, %p_a_weight, %p_a_bias"), "%a, %p_b_weight, %p_b_bias"
    nodes = [
        ("a", a, helper.make_node("MatMul", ["x", "val_0"], ["a"])),
        ("b", call.format("b", b), helper.make_node("MatMul", ["a", "val_3"], ["p"])),
        ("b", call.format("b", b), helper.make_node("Add", ["p", "b.bias"], ["b"])),
        ("head", call.format("y", "%b, %p_head_weight"), None),
    ]
    nodes[3] = (*nodes[3][:2], helper.make_node("MatMul", ["b", "head.weight"], ["y"]))
    path = of_dynamo(tmp_path / "m.onnx", nodes, weights, parameters)
    if old:
        made_old(path)
    with pytest.raises(GraphgenError, match=r"lacks a.bias, which torch.*from_torch"):
        trained(path)
    with pytest.raises(GraphgenError, match=r"lacks a.bias, which torch"):
        trained(path, "bias")
    assert trained(path, "b.bias|head") == ["b.bias", "head.weight"]
    assert trained(path, frozen=["a.bias"]) == [*weights]
    assert trained(path, ["val_0"]) == ["val_0"]


@pytest.mark.parametrize(
    ("operand", "call", "problem"),
    [
        ("softmax", "%x, %softmax", "exporter calculated softmax, of constants or of parameters"),
        ("val_1", "%x, %weight_norm", "lacks a.g, which torch's exporter folded"),
        ("mul_2", "%x, %mul_2", "lacks a.g, which torch's exporter folded"),
        ("t", "%x, %t", None),
        ("view", "%x, %view", "lacks a.g, which torch's exporter folded"),
        ("cat", "%x, %cat", None),
        ("stack", "%x, %stack", "lacks a.g, which torch's exporter folded"),
        ("m", "%x, %b_m", "depends on none of the"),
    ],
)
def test_an_operand_of_a_product_that_is_no_weight_is_not_trained(tmp_path, operand, call, problem):
    """Unless it is called like one that was only moved; the stack has one weight twice."""
    node = helper.make_node("MatMul", ["x", operand], ["y"])
    weight = normal(4, 4)
    if operand == "stack":
        weight[:, 2] = weight[:, 0]
    parameters = [] if operand in ("softmax", "m") else ["a.g"]
    path = of_dynamo(
        tmp_path / "m.onnx",
        [("a", f"%y = call_function[target=torch.ops.aten.linear](args = ({call}))", node)],
        {operand: weight},
        ["other.weight", *parameters],
    )
    model = onnx.load(path)
    if operand in ("t", "view"):  # of a sum, which was then moved as the other was
        value = helper.make_tensor_value_info(operand, TensorProto.FLOAT, [4, 4])
        names = "['a.g', 'add', 'val_0']" if operand == "view" else "['a.g', 'clone', 'val_0']"
        value.metadata_props.add(key="pkg.onnxscript.optimizer.folded_from", value=names)
        model.graph.value_info.append(value)
        onnx.save(model, path)
    if operand == "m":
        value = helper.make_tensor_value_info("m", TensorProto.FLOAT, [4, 4])
        kind = value.metadata_props.add()
        kind.key, kind.value = "pkg.torch.export.graph_signature.InputSpec.kind", "BUFFER"
        model.graph.value_info.append(value)
        onnx.save(model, path)
    if problem is None:
        assert trained(path) == [operand]
    else:
        with pytest.raises(GraphgenError, match=problem):
            trained(path)


@pytest.mark.parametrize("kind", ["uniform", "mask", "of a softmax"])
def test_a_weight_may_begin_with_one_number(tmp_path, kind):
    """As that of a GroupNorm, which TorchScript gives further axes; a mask has two, or is added."""
    start = np.ones((4,), np.float32) if kind != "mask" else np.eye(4, dtype=np.float32)[0]
    nodes = [
        ("/a", helper.make_node("MatMul", ["x", "a.weight"], ["h"])),
        ("/n", helper.make_node("Add", ["h", "onnx::Add_4"], ["k"])),
    ]
    last = "Softmax" if kind == "of a softmax" else "Tanh"
    nodes.append(("/n", helper.make_node(last, ["k"], ["y"])))
    weights = {"a.weight": normal(4, 4), "onnx::Add_4": start}
    path = save(tmp_path / "m.onnx", nodes, weights, ["n", 4], y=["n", 4])
    if kind == "uniform":
        with pytest.raises(GraphgenError, match="calculated onnx::Add_4, of constants or of par"):
            trained(path)
        assert trained(path, frozen="Add") == ["a.weight"]
    else:
        with pytest.warns(GraphgenWarning, match="calculated onnx::Add_4"):
            assert trained(path) == ["a.weight"]


def test_equal_weights_of_one_module_that_torchscript_stored_once_are_refused(tmp_path):
    """The second one is an Identity by its name."""
    nodes = [
        ("", helper.make_node("Identity", ["u"], ["v"])),
        ("/", helper.make_node("Mul", ["x", "u"], ["h"])),
        ("/", helper.make_node("Add", ["h", "v"], ["y"])),
    ]
    for u, outcome in ((np.full((4,), 0.5, np.float32), "refused"), (normal(4), "told")):
        path = save(tmp_path / "m.onnx", nodes, {"u": u}, ["n", 4], y=["n", 4])
        if outcome == "refused":
            with pytest.raises(GraphgenError, match="u is one weight of u and v, whose weights we"):
                trained(path)
        else:
            with pytest.warns(GraphgenWarning, match="u is one weight of u and v: tied in the mod"):
                assert trained(path) == ["u"]


def test_what_may_be_a_buffer_is_told_of_files_by_torchscript(tmp_path):
    """Not where it is said what is trained."""
    nodes = [
        ("/", helper.make_node("Mul", ["x", "a.scale"], ["h"])),
        ("/a/", helper.make_node("Add", ["h", "a.bias"], ["y"])),
    ]
    weights = {"a.scale": normal(4), "a.bias": normal(4)}
    path = save(tmp_path / "m.onnx", nodes, weights, ["n", 4], y=["n", 4])
    with pytest.warns(GraphgenWarning, match="from buffers: a.scale, which are all trained; exp"):
        assert trained(path) == ["a.scale", "a.bias"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert trained(path, frozen="scale") == ["a.bias"]
        assert trained(path, ["a.scale", "a.bias"]) == ["a.scale", "a.bias"]


@pytest.mark.parametrize(
    ("op", "name", "zeros", "problem"),
    [
        ("Gemm", "onnx::Gemm_9", 0, "exporter calculated onnx::Gemm_9, of"),
        ("MatMul", "onnx::MatMul_9", 4, "exporter calculated onnx::MatMul_9, of"),
        ("MatMul", "onnx::MatMul_9", 0, ""),
        ("Gemm", "a.weight", 4, ""),
    ],
)
def test_a_weight_that_torchscript_multiplied_is_not_trained(tmp_path, op, name, zeros, problem):
    """As by a mask: a Linear has its own name in a Gemm, and its transpose has few zeros."""
    array = normal(4, 4)
    array.flat[:zeros] = 0
    node = helper.make_node(op, ["x", name], ["y"])
    path = save(tmp_path / "m.onnx", [("/a", node)], {name: array}, ["n", 4], y=["n", 4])
    if problem:
        with pytest.raises(GraphgenError, match=problem):
            trained(path)
        return
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        assert trained(path) == [name]
    told = [str(w.message) for w in found]
    assert any("weights that it moved from calculated ones: onnx" in x for x in told) == (
        op == "MatMul"
    )


@pytest.mark.parametrize(
    ("numbers", "output", "between", "refused"),
    [
        ((6, 7), "5", "", ()),
        ((6, 8), "5", "", ("onnx::MatMul_8",)),
        ((7, 8), "5", "", ("onnx::MatMul_7", "onnx::MatMul_8")),  # either of them
        ((7, 8), "y", "", ()),
        ((6, 8), "5", "/Constant_output_0", ()),
        ((6, 8), "5", "onnx::MatMul_6", ()),  # stored once for an equal one, which took number 7
    ],
)
def test_a_gap_in_torchscripts_numbers_is_a_calculated_weight(
    tmp_path, numbers, output, between, refused
):
    """A weight that is scaled, then transposed, takes two numbers, and that of a Linear one."""
    first, last = names = [f"onnx::MatMul_{number}" for number in numbers]
    weights = {first: normal(4, 4), last: normal(4, 4), "/Constant_output_0": normal(4, 4)}
    nodes = [("/a", helper.make_node("MatMul", ["x", first], ["h"]))]
    nodes += [("/b", helper.make_node("MatMul", ["h", between or last], [output]))]
    if between:
        nodes[-1][1].output[0] = "k"
        nodes += [("/c", helper.make_node("MatMul", ["k", last], [output]))]
    if output != "y":
        nodes += [("/d", helper.make_node("Relu", [output], ["y"]))]
    path = save(tmp_path / "m.onnx", nodes, weights, ["n", 4], y=["n", 4])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if not refused:
            assert trained(path) == names
            return
        with pytest.raises(GraphgenError, match=f"exporter calculated {', '.join(refused)}, of"):
            trained(path)
        if rest := [name for name in names if name not in refused]:
            assert trained(path, frozen=[*refused]) == rest
        assert trained(path, names) == names


def test_a_straight_through_estimator_of_torchscript_is_refused(tmp_path):
    """(round(h) - h).detach() + h: its file lacks the detach, and h would have no gradient."""
    steps = [("MatMul", ["x", "a.weight"], "h"), ("Round", ["h"], "r"), ("Sub", ["r", "h"], "d")]
    nodes = [("/a", helper.make_node(op, inputs, [y])) for op, inputs, y in steps]
    nodes += [("/a", helper.make_node("Add", ["d", "h"], ["y"]))]
    path = save(tmp_path / "m.onnx", nodes, {"a.weight": normal(4, 4)}, ["n", 4], y=["n", 4])
    with pytest.raises(GraphgenError, match="/a/Add adds what was subtracted before, as a stra"):
        trained(path)
    nodes[2:] = [  # the same as h - (h - round(h)).detach()
        ("/a", helper.make_node("Sub", ["h", "r"], ["d"])),
        ("/a", helper.make_node("Sub", ["h", "d"], ["y"])),
    ]
    path = save(tmp_path / "m.onnx", nodes, {"a.weight": normal(4, 4)}, ["n", 4], y=["n", 4])
    with pytest.raises(GraphgenError, match=r"/a/Sub\S* adds what was subtracted before, as a str"):
        trained(path)


def test_a_refusal_says_what_a_command_takes(tmp_path, capsys):
    """As Python has it, it would be a pattern of letters in brackets."""
    weights = {"a.it's": normal(4, 4), "onnx::Gemm_9": normal(4, 4)}
    nodes = [
        ("/a", helper.make_node("Gemm", ["x", "a.it's"], ["h"])),
        ("/b", helper.make_node("Gemm", ["h", "onnx::Gemm_9"], ["y"])),
    ]
    path = save(tmp_path / "m.onnx", nodes, weights, ["n", 4], y=["n", 4])
    command = ["artifacts", str(path), "-o", str(tmp_path / "art"), "--loss", "mse"]
    assert commands.main(command) == 2
    found = re.search("leave them out with (.*)$", capsys.readouterr().err.strip())
    assert found is not None and found[1] == "--frozen onnx::Gemm_9"
    assert commands.main([*command, *shlex.split(found[1])]) == 0
    assert commands.main([*command, "--trainable", "b", "--trainable", "it's[", "--json"]) == 2
    assert "--trainable 'it'\"'\"'s[' is not a regular" in capsys.readouterr().err


def test_a_long_refusal_says_it_by_patterns(tmp_path, capsys):
    """A command's error is cut at some length, and was so in the middle of a name."""
    names = [f"onnx::Gemm_{number}" for number in range(100, 140)]
    names += [f"m.layers.{number}.scale" for number in range(12)]
    others = ["onnx::Gemm_1x", "m.layers.12.scale", "a.weight"]
    assert patterns_of(names[:3], others) == names[:3]
    found = patterns_of(names, others)
    assert found[0] == r"^onnx::Gemm_\d+$" and len(found) == 2
    assert all(sum(map(bool, (re.search(x, n) for x in found))) == 1 for n in names)
    assert not [n for n in others if any(re.search(x, n) for x in found)]
    nodes, h = [], "x"
    for name in [*names[:40], "a.weight"]:
        nodes.append(("/a", helper.make_node("Gemm", [h, name], [f"h{name}"])))
        h = f"h{name}"
    nodes[-1][1].output[0] = "y"
    weights = {n: normal(4, 4) for n in [*names[:40], "a.weight"]}
    path = save(tmp_path / "m.onnx", nodes, weights, ["n", 4], y=["n", 4])
    command = ["artifacts", str(path), "-o", str(tmp_path / "art"), "--loss", "mse"]
    assert commands.main(command) == 2
    text = re.search("leave them out with (.*)$", capsys.readouterr().err.strip())[1]
    assert text == r"--frozen '^onnx::Gemm_\d+$'"
    assert commands.main([*command, *shlex.split(text)]) == 0
    assert [*Checkpoint.load(tmp_path / "art/checkpoint").trainable] == ["a.weight"]


@pytest.mark.parametrize("script", [False, True])
def test_a_layer_that_peft_wrapped_is_not_trained_unless_told(tmp_path, script):
    """It freezes the layer's own weight, and no file says so."""
    weights = {"q.base_layer.weight": normal(4, 4), "q.lora_A.default.weight": normal(4, 2)}
    weights |= {"q.lora_B.default.weight": normal(2, 4), "head.weight": normal(4, 4)}
    slash = "/" * script
    nodes = [
        (f"{slash}q{slash or '.'}base_layer", ("x", "q.base_layer.weight", "b")),
        ("", ("x", "q.lora_A.default.weight", "a")),
        ("", ("a", "q.lora_B.default.weight", "u")),
        ("", ("b", "u", "s")),
        ("", ("s", "head.weight", "y")),
    ]
    kinds = ["MatMul"] * 3 + ["Add", "MatMul"]
    made = [
        (block, helper.make_node(kind, [x, w], [y]))
        for kind, (block, (x, w, y)) in zip(kinds, nodes, strict=True)
    ]
    path = save(tmp_path / "m.onnx", made, weights, ["n", 4], y=["n", 4])
    with pytest.raises(GraphgenError, match=r"PEFT has wrapped, .*from_torch") as e:
        trained(path)
    assert ("trainable=['lora_A', 'lora_B']" in str(e.value)) != script
    assert trained(path, ["lora_A", "lora_B"]) == [*weights][1:3]
    assert trained(path, frozen=["base_layer"]) == [*weights][1:]


def test_buffers_of_spectral_norm_and_prune_are_not_trained(tmp_path):
    nodes = [
        ("/a", helper.make_node("Mul", ["x", "a.weight_orig"], ["h"])),
        ("/a", helper.make_node("Mul", ["h", "a.weight_mask"], ["k"])),
        ("/b", helper.make_node("Mul", ["k", "b.weight_v"], ["y"])),  # of weight_norm
    ]
    weights = {n: normal(4) for n in ("a.weight_orig", "a.weight_mask", "b.weight_v")}
    path = save(tmp_path / "m.onnx", nodes, weights, ["n", 4], y=["n", 4])
    assert trained(path) == trained(path, ".") == ["a.weight_orig", "b.weight_v"]


@pytest.mark.parametrize("case", ["read", "of it", "gone", "norm"])
def test_buffers_that_each_call_changes_are_refused_where_they_are_read(tmp_path, case):
    """A graph has one value of them."""
    operand = {"read": "m", "of it": "mul", "gone": "c"}.get(case, "w")
    call = "%y = call_function[target=torch.ops.aten.add.Tensor](args = (%x, %z))"
    path = of_dynamo(
        tmp_path / "m.onnx",
        [
            ("", call, helper.make_node("Add", ["x", operand], ["h"])),
            ("", call, helper.make_node("Mul", ["h", "w"], ["y"])),
        ],
        {operand: normal(4), "w": normal(4)},
        ["w"],
        ["norm.running_mean" if case == "norm" else "m"],
    )
    if case == "of it":
        model = onnx.load(path)
        value = helper.make_tensor_value_info("mul", TensorProto.FLOAT, [4])
        value.metadata_props.add(key="pkg.onnxscript.optimizer.folded_from", value="['m', 'val_1']")
        model.graph.value_info.append(value)
        onnx.save(model, path)
    if case in ("read", "of it"):
        with pytest.raises(GraphgenError, match="each call of the module changes m, and the next"):
            trained(path)
        return
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        assert "w" in trained(path, "^w$")
    gone = "each call of the module changes m, which the file no longer has"
    assert any(gone in str(w.message) for w in found) == (case == "gone")


def test_a_number_that_dynamo_calculated_of_a_parameter_is_refused(tmp_path):
    """As a penalty on weights."""
    call = "%y = call_function[target=torch.ops.aten.add.Tensor](args = (%x, %mul))"
    nodes = [
        ("", call, helper.make_node("Mul", ["x", "w"], ["h"])),
        ("", call, helper.make_node("Add", ["h", "mul"], ["y"])),
    ]
    given = nodes, {"w": normal(4), "mul": np.float32(0.5)}, ["w"]
    model = onnx.load(of_dynamo(tmp_path / "m.onnx", *given))
    value = helper.make_tensor_value_info("mul", TensorProto.FLOAT, [])
    value.metadata_props.add(key="pkg.onnxscript.optimizer.folded_from", value="['w', 'sum_1']")
    weight = helper.make_tensor_value_info("w", TensorProto.FLOAT, [4])
    key = "pkg.torch.export.graph_signature.InputSpec.kind"
    weight.metadata_props.add(key=key, value="PARAMETER")
    model.graph.value_info.extend([value, weight])
    onnx.save(model, tmp_path / "m.onnx")
    with pytest.raises(GraphgenError, match="exporter calculated mul, of"):
        trained(tmp_path / "m.onnx")


def test_an_lstm_with_projections_is_refused_by_name(tmp_path):
    node = helper.make_node("Mul", ["x", "rnn.w"], ["y"])
    names = ["rnn.w", "rnn.weight_hr_l0"]
    path = of_dynamo(tmp_path / "m.onnx", [("rnn", "", node)], {"rnn.w": normal(4)}, names)
    with pytest.raises(GraphgenError, match="artifacts: rnn is an LSTM with proj_size, which"):
        trained(path)


def test_a_gradient_that_dynamo_let_through_is_refused(tmp_path):
    """Its optimizer drops what detaches; that matters if a weight stands before it."""
    call = "%{} = call_function[target=torch.ops.aten.mul.Tensor](args = (%{}, %p_{}_weight))"
    arrays = {"a.weight": normal(4), "b.weight": normal(4)}
    for first, second, wrong in (
        ("x", "detach_1", True),
        ("detach_1", "h", False),
        ("x", "h, %detach_1", False),  # of what no weight is before
        ("x", "detached", False),
    ):
        nodes = [
            ("a", call.format("h", first, "a"), helper.make_node("Mul", ["x", "a.weight"], ["h"])),
            ("b", call.format("y", second, "b"), helper.make_node("Mul", ["h", "b.weight"], ["y"])),
        ]
        path = of_dynamo(tmp_path / "m.onnx", nodes, arrays, [*arrays])
        if not wrong:
            assert trained(path) == [*arrays]
            continue
        with pytest.raises(GraphgenError, match="exporter dropped 1 nodes that let no gradient"):
            trained(path)
        with pytest.warns(GraphgenWarning, match="exporter dropped 1 nodes that let no gradient"):
            assert trained(path, "weight") == [*arrays]
        assert trained(path, "b.weight") == ["b.weight"]  # no trained weight is before it


CONV = {"stem.weight": normal(4, 3, 1, 1), "stem.bias": normal(4)}


@pytest.mark.parametrize(
    ("block", "names", "folded"),
    [
        ("norm", ["stem.weight", "stem.bias"], "stem.weight is used in norm alone, a norm that"),
        ("stem", ["stem.weight", "stem.weight_bias"], "the shift of a norm that was folded into"),
        ("/stem", ["onnx::Conv_7", "onnx::Conv_8"], "a weight of stem into which a norm was"),
        ("", ["getitem_3_weight", "getitem_3_bias"], "a weight of a convolution into which a norm"),
        ("", ["/n/BatchNormalization_output_0_weight", "b"], "a weight of a convolution into"),
        ("stem", ["_v_32", "_v_33"], "a weight of stem into which a norm was"),
        ("stem", ["ConvBnFusion_W_a", "ConvBnFusion_BN_B_n"], "a weight of stem into which a norm"),
        ("", ["conv0_weight", "conv0_bias"], ""),
        ("", ["y_weight", "y_bias"], "y_weight is a weight of a convolution into which a norm"),
        ("stem", ["stem.weight", "stem.bias"], ""),
        ("", ["stem.weight", "stem.bias"], ""),
        ("stem.inner", ["stem.weight", "stem.bias"], ""),
        ("/outer/outer.stem", ["stem.weight", "stem.bias"], ""),
    ],
)
def test_a_convolution_with_a_folded_norm_is_not_trained_unless_told(
    tmp_path, block, names, folded
):
    weights = dict(zip(names, CONV.values(), strict=True))
    nodes = [(block, helper.make_node("Conv", ["x", *names], ["y"]))]
    path = save(tmp_path / "conv.onnx", nodes, weights, ["n", 3, 2, 2], y=["n", 4, 2, 2])
    if folded:
        with pytest.raises(GraphgenError, match=f"artifacts: .*{folded}.*: export with gg.from_t"):
            trained(path)
        assert trained(path, names) == names  # it is meant
    else:
        assert trained(path) == names


@pytest.mark.parametrize("form", ["folded", "parts", "apart", "adapted"])
def test_statistics_of_a_norm_in_parts_are_not_trained_unless_told(tmp_path, form):
    """As onnxoptimizer leaves them that folds the norm into a convolution, and as JAX writes it.

    That of Keras scales x and -mean apart, and an adapted Normalization has no number to add.
    """
    folded = form == "folded"
    weights = {n: normal(4, 1, 1) for n in ("scale", "shift", "13", "bias")}
    weights |= {"14": np.abs(normal(4, 1, 1)), "w": normal(4, 3, 1, 1)}
    steps = [("Constant", [], "e"), ("Add", ["14", "e"], "v"), ("Sqrt", ["v"], "s")]
    if folded:
        steps += [("Div", ["scale", "s"], "q"), ("Reshape", ["q", "as"], "k")]
        steps += [("Mul", ["w", "k"], "u"), ("Sub", ["bias", "13"], "d"), ("Mul", ["d", "q"], "m")]
        steps += [("Add", ["m", "shift"], "a"), ("Reshape", ["a", "flat"], "b")]
        steps += [("Conv", ["x", "u", "b"], "y")]
    elif form == "apart":
        steps[1:1] = [("Reshape", ["14", "as"], "t"), ("Reshape", ["13", "as"], "n")]
        steps[3] = ("Add", ["t", "e"], "v")
        steps += [("Conv", ["x", "w"], "c"), ("Add", ["c", "bias"], "p")]
        steps += [("Div", ["scale", "s"], "q"), ("Neg", ["n"], "d"), ("Mul", ["d", "q"], "m")]
        steps += [("Add", ["m", "shift"], "a"), ("Mul", ["p", "q"], "b"), ("Add", ["a", "b"], "y")]
    else:
        if form == "adapted":
            steps[1:] = [("Sqrt", ["14"], "v"), ("Max", ["v", "e"], "s")]
        steps += [("Conv", ["x", "w"], "c"), ("Add", ["c", "bias"], "p"), ("Sub", ["p", "13"], "d")]
        steps += [("Div", ["d", "s"], "q"), ("Mul", ["q", "scale"], "m")]
        steps += [("Add", ["m", "shift"], "y")]
    weights |= {"as": np.array([4, 1, 1, 1][: 4 if folded else 3]), "flat": np.array([4])}
    nodes = [
        ("", helper.make_node(op, inputs, [y], **({"value_float": 1e-5} if y == "e" else {})))
        for op, inputs, y in steps
    ]
    path = save(tmp_path / "norm.onnx", nodes, weights, ["n", 3, 2, 2], y=["n", 4, 2, 2])
    problem = r"1[34] is the (mean|variance) of a norm that .*frozen=\['1[34]', '1[34]'\]"
    with pytest.raises(GraphgenError, match=problem):
        trained(path)
    rest = ["bias", "scale", "shift", "w"]
    assert sorted(trained(path, frozen=["13", "14"])) == rest
    assert sorted(trained(path, [*rest, "13", "14"])) == ["13", "14", *rest]


@pytest.mark.parametrize("name", ["bn/batchnorm/mul:0", "conv/merged_input_1:0", "m/dense_mul:0"])
def test_what_tensorflow_calculated_is_not_trained(tmp_path, name):
    """It has γ / √(variance + ε) in a norm, also times a kernel, by the name of the operation."""
    nodes = [
        ("", helper.make_node("Mul", ["x", name], ["h"])),
        ("", helper.make_node("Add", ["h", "bn/ReadVariableOp:0"], ["y"])),
    ]
    weights = {name: normal(4), "bn/ReadVariableOp:0": normal(4)}
    path = save(tmp_path / "m.onnx", nodes, weights, ["n", 4], y=["n", 4])
    assert len(trained(path)) == 2
    path = by_maker(path, "tf2onnx")
    with pytest.warns(GraphgenWarning, match="by tf2onnx does not tell which variables are"):
        if "dense" in name:
            assert len(trained(path)) == 2
            return
        with pytest.raises(GraphgenError, match=rf"TensorFlow calculated {name}, .*\['{name}'\]"):
            trained(path)
        assert trained(path, frozen=name) == ["bn/ReadVariableOp:0"]


def test_the_bias_of_a_cell_that_keras_has_once_is_not_trained(tmp_path):
    """ONNX has two and adds them, so it would move twice as far; of torch's file it has two."""
    bias = np.concatenate([normal(1, 8), np.zeros((1, 8), np.float32)], 1)
    weights = {"W": normal(1, 8, 4), "R": normal(1, 8, 2), "B": bias}
    node = helper.make_node("LSTM", ["x", *weights], ["y"], hidden_size=2)
    path = save(tmp_path / "m.onnx", [("", node)], weights, ["s", "n", 4], y=["s", 1, "n", 2])
    assert trained(path) == ["W", "R", "B"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(GraphgenError, match="TensorFlow calculated B, of constants or of"):
            trained(by_maker(path, "tf2onnx"))
        assert trained(path, frozen="B") == ["W", "R"]


def by_maker(path, maker):
    model = onnx.load(path)
    model.producer_name = maker
    onnx.save(model, path)
    return path


def test_what_is_subtracted_from_a_normalized_value_is_a_weight(tmp_path):
    """A norm of x in parts, whose ε is stored, makes no statistic of what comes behind it."""
    weights = {"center": normal(4), "gate": normal(4), "e": np.array([1e-5], np.float32)}
    steps = [("Mul", ["x", "x"], "s"), ("ReduceMean", ["s", "last"], "v"), ("Add", ["v", "e"], "a")]
    steps += [("Sqrt", ["a"], "r"), ("Div", ["x", "r"], "h"), ("Sub", ["h", "center"], "d")]
    nodes = [("", helper.make_node(op, inputs, [y])) for op, inputs, y in steps]
    nodes += [("", helper.make_node("Mul", ["d", "gate"], ["y"]))]
    weights |= {"last": np.array([-1])}
    path = save(tmp_path / "norm.onnx", nodes, weights, ["n", 4], y=["n", 4])
    assert sorted(trained(path, ["center", "gate"], frozen=["e"])) == ["center", "gate"]
    assert sorted(trained(path, "center|gate")) == ["center", "gate"]


def test_a_known_tie_is_named_by_each_of_its_names(tmp_path):
    table = {"wte.weight": normal(4, 4), "other": normal(4)}
    nodes = [
        ("wte", helper.make_node("MatMul", ["x", "wte.weight"], ["h"])),
        ("", helper.make_node("Add", ["h", "other"], ["g"])),
        ("head", helper.make_node("MatMul", ["g", "wte.weight"], ["y"])),
    ]
    path = save(tmp_path / "tied.onnx", nodes, table, ["n", 4], y=["n", 4])
    with pytest.raises(GraphgenError, match=r"'wte' names wte, .* one weight of head and wte"):
        trained(path, "wte")  # the file may have merged what was only equal
    model = onnx.load(path)
    helper.set_model_props(model, {ORIGIN: json.dumps({"tied": {"wte.weight": ["head.weight"]}})})
    onnx.save(model, path)
    assert trained(path, "wte") == trained(path, "^head") == ["wte.weight"]
    assert told(path, "wte")["wte.weight"] == "tied: also head.weight"
    assert trained(path, frozen="head") == ["other"]


def test_a_pattern_that_renaming_broke_is_told_how_to_export(tmp_path):
    nodes = [("up", helper.make_node("MatMul", ["x", "val_0"], ["y"]))]
    path = save(tmp_path / "renamed.onnx", nodes, {"val_0": normal(4, 4)}, ["n", 4], y=["n", 4])
    with pytest.raises(GraphgenError, match=r"no parameter; .* renamed val_0: export with gg.from"):
        trained(path, "down")


def test_a_weight_whose_declared_sizes_are_symbols_has_those_of_its_tensor(tmp_path):
    nodes = [("", helper.make_node("MatMul", ["x", "up"], ["y"]))]
    path = save(tmp_path / "m.onnx", nodes, {"up": normal(4, 4)}, ["n", 4], y=["n", 4])
    model = gg.load(path)
    model.graph.initializers["up"].shape = ir.Shape(["_d0", 4])
    [weight] = gg.artifacts(model, tmp_path / "art", loss="mse", output="y")
    assert weight.shape == (4, 4)
