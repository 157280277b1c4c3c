"""Where nodes come from: as exporters write it, and after conversion, folding and rewrites."""

from pathlib import Path

import onnx
import onnx_ir as ir
import pytest
from small_models import block

import graphgen as gg
from graphgen.places import block_of, source_of, where_is

FIXTURES = Path(__file__).parents[1] / "fixtures"
TRACE = (
    'File "/home/me/train.py", line 9, in forward\n    return self.model(x)\n'
    '  File "/usr/lib/python3.11/site-packages/bert/model.py", line 12, in forward\n'
    "    y = self.norm(x)\n"
    '  File "/usr/lib/python3.11/site-packages/torch/nn/functional.py", line 3, in f\n    pass'
)
SCOPES = "['', 'model', 'model.layers.0', 'model.layers.0.norm', 'layer_norm_1']"


def node(name: str = "", **metadata: str) -> ir.Node:
    made = ir.node("Relu", [ir.Value(name="x")], name=name)
    made.metadata_props.update({f"pkg.torch.onnx.{k}": v for k, v in metadata.items()})
    return made


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("/encoder/layer.0/attention/self/MatMul_1", "encoder.layer.0.attention.self"),
        ("bert/encoder/layer_0/MatMul", "bert.encoder.layer_0"),
        ("/Constant_3", ""),
        ("node_MatMul_4", ""),
        ("", ""),
    ],
)
def test_a_name_with_slashes_is_a_path(name: str, block: str) -> None:
    assert block_of(node(name)) == block


def test_what_torch_writes_is_read() -> None:
    told = node("node_norm", name_scopes=SCOPES, stack_trace=TRACE)
    assert where_is(told) == "model.layers.0.norm"
    assert source_of(told) == "bert/model.py:12: y = self.norm(x)"
    assert where_is(node("node_norm", name_scopes="['', 'relu']")) == "node_norm"


@pytest.mark.parametrize("trace", ["", "nothing known", 'File "a.py", line 3', 'File "'])
def test_a_trace_of_another_form_is_no_error(trace: str) -> None:
    assert source_of(node(stack_trace=trace)) == ("a.py:3" if "line" in trace else "")
    assert source_of(node()) == ""


def test_places_outlive_all_passes() -> None:
    model = gg.load(FIXTURES / "gpt2_torchscript_sdpa_14.onnx")
    result = gg.optimize(model).model
    places = [block_of(n) for n in result.graph if n.op_type.endswith("Attention")]
    assert places == [f"gpt2.transformer.h.{i}.attn" for i in (0, 1)]
    for each in (model, result):
        assert not [n.name for n in each.graph if not block_of(n).startswith("gpt2")]


def test_places_outlive_the_converter(tmp_path: Path) -> None:
    """It drops all metadata, and writes three nodes for a softmax over the last two axes."""
    model = onnx.parser.parse_model(
        """<ir_version: 7, opset_import: ["": 11]>
        g (float[2, 3, 4] x) => (float[2, 3, 4] y) { y = Softmax <axis = 1> (x) }"""
    )
    model.graph.node[0].name = "/layers.0/attention/Softmax"
    trace = model.graph.node[0].metadata_props.add()
    trace.key, trace.value = "pkg.torch.onnx.stack_trace", TRACE
    onnx.save(model, tmp_path / "old.onnx")
    loaded = list(gg.load(tmp_path / "old.onnx").graph)
    assert len(loaded) > 1
    assert {block_of(n) for n in loaded} == {"layers.0.attention"}
    assert {source_of(n) for n in loaded} == {"bert/model.py:12: y = self.norm(x)"}


def test_metadata_outlives_the_passes(tmp_path: Path) -> None:
    model = block()
    for each in model.graph:
        each.metadata_props["pkg.torch.onnx.stack_trace"] = TRACE
    gg.export(gg.optimize(model), tmp_path / "a.onnx")
    loaded = gg.load(tmp_path / "a.onnx")
    assert all(source_of(n).startswith("bert/model.py:12") for n in loaded.graph)
    assert "attention" in {block_of(n) for n in loaded.graph}


def test_a_canonical_node_keeps_its_name() -> None:
    model = gg.build(lambda x: 2.0 * x, primitives=True, x=gg.float32["b", 4])
    [product] = model.graph
    product.name = "mine"
    [product] = gg.optimize(model, passes=["canonicalize"]).model.graph
    assert product.inputs[0].name == "x" and product.name == "mine"
