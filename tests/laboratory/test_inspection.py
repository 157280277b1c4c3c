"""What a model consists of and costs, against formulas and brute force."""

from itertools import pairwise

import networkx as nx
import numpy as np
import onnx_ir as ir
import pytest

import graphgen as gg
from graphgen.commands.options import show
from graphgen.edit import infer_model
from graphgen.laboratory.inspection import inspect
from graphgen.measure.cost import flops
from graphgen.measure.feeds import at_sizes

T, D = 24, 32


def cost(function, **inputs):
    return inspect(gg.build(function, **inputs))


def test_systems_row_3_h_heads_cost_what_one_does():
    """In matrix products exactly; only the softmax of h maps of T x T comes on top."""
    x = gg.float32[1, 64, 256]
    found = {h: cost(gg.nn.Attention(256, num_heads=h), x=x) for h in (1, 2, 8, 32)}
    assert len({one.product_flops for one in found.values()}) == 1
    assert found[1].product_flops == 4 * 2 * 64 * 256 * 256 + 2 * 2 * 64 * 64 * 256
    for h, one in found.items():
        assert one.flops - found[1].flops == (h - 1) * 5 * 64 * 64  # softmax


def test_grouped_heads_cost_less_only_in_their_projections():
    x = gg.float32[1, T, D]
    full, grouped = (
        cost(gg.nn.Attention(D, num_heads=4, kv_heads=g, bias=False), x=x).product_flops
        for g in (4, 1)
    )
    assert full - grouped == 2 * (2 * T * D * (D - D // 4))


@pytest.mark.parametrize(
    ("function", "products", "others"),
    [
        (lambda x: gg.ops.matmul(x, np.ones((D, 5), np.float32)), 2 * T * D * 5, 0),
        (lambda x: x + 1.0, 0, T * D),
        (lambda x: gg.ops.reduce_sum(x, [-1]), 0, T * D),
        (lambda x: gg.ops.transpose(x, perm=[1, 0]), 0, 0),
        (lambda x: gg.ops.softmax(x, axis=-1), 0, 5 * T * D),
        (lambda x: gg.ops.gemm(x, np.ones((D, 5), np.float32)), 2 * T * D * 5, 0),
        (
            lambda x: gg.ops.conv(
                gg.ops.reshape(x, [1, 2, -1]), np.ones((4, 1, 3), np.float32), group=2, strides=[2]
            ),
            2 * 3 * 4 * ((T * D // 2 - 3) // 2 + 1),
            0,
        ),
    ],
    ids=["matmul", "elementwise", "reduction", "layout", "composite", "gemm", "convolution"],
)
def test_flops_of_one_operator(function, products, others):
    found = cost(function, x=gg.float32[T, D])
    assert (found.product_flops, found.flops) == (products, products + others)


@pytest.mark.parametrize("name", ["Softmax", "LayerNormalization", "Gelu", "Attention"])
def test_a_composite_costs_what_its_body_does(name):
    functions = {
        "Softmax": gg.ops.softmax,
        "LayerNormalization": lambda x: gg.ops.layer_norm(x, np.ones(8, np.float32)),
        "Gelu": gg.ops.gelu,
        "Attention": lambda x: gg.ops.attention(x, x, x, is_causal=1),
    }
    spec = gg.float32[2, 4, T, 8]
    whole, parts = (gg.build(functions[name], primitives=p, x=spec) for p in (False, True))
    assert [node.op_type for node in whole.graph] == [name]
    assert inspect(whole).flops == inspect(parts).flops > 0


def model_of_layers(layers=11):
    encoder = gg.nn.Encoder(D, layers=layers, num_heads=4)
    return gg.build(encoder, x=gg.float32["batch", "seq", D])


def test_missing_dimensions_are_named():
    found = inspect(model_of_layers(1))
    assert found.missing_dims == ["batch", "seq"]
    wanted = "FLOPs          unknown; give sizes={'batch': ..., 'seq': ...}"
    assert wanted in repr(found).splitlines()
    assert found.flops is found.product_flops is found.read_bytes is found.critical_path is None
    assert found.written_bytes is found.peak_bytes is None
    partly = inspect(model_of_layers(1), {"batch": 2})
    assert partly.missing_dims == ["seq"]
    assert inspect(model_of_layers(1), {"batch": 2, "seq": T}).flops > 0


def test_names_in_brackets_are_shown_whole(capsys):
    """To rich they would be styles."""
    model = gg.build(lambda x: x + x, x=gg.float32[2])
    model.graph[0].name = model.graph[0].op_type = "[bold]a"
    model.graph[0].domain = "other"
    for table in inspect(model).tables(3):
        show(table)
    assert "other::[bold]a" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ({"time": 3}, "'time' is in no input; the symbolic ones are batch, seq"),
        ({"sek": 3}, "the symbolic ones are batch, seq; did you mean 'seq'"),
        ({"seq": 0}, "is 0"),
    ],
)
def test_sizes_that_fit_no_dimension_are_refused(sizes, told):
    with pytest.raises(gg.GraphgenError, match=told):
        at_sizes(model_of_layers(1), sizes)


def test_fixed_sizes_reach_every_value_and_change_no_result():
    model = model_of_layers(1)
    fixed = at_sizes(model, {"batch": 2, "seq": T})
    assert all(v.shape.is_static() for node in fixed.graph for v in node.outputs)
    x = np.random.default_rng(0).standard_normal((2, T, D)).astype(np.float32)
    np.testing.assert_array_equal(gg.Session(fixed)(x=x), gg.Session(model)(x=x))
    assert str(model.graph.inputs[0].shape) == "[batch,seq,32]"  # a copy was made


def test_blocks_hold_everything_in_the_order_of_the_layers():
    found = inspect(model_of_layers(), {"batch": 1, "seq": T})
    blocks = {block.path: block for block in found.blocks}
    tops = [block for path, block in blocks.items() if "." not in path]
    assert sum(block.flops for block in tops) == found.flops
    assert sum(block.parameters for block in tops) == found.parameters
    assert sum(block.nodes for block in tops) == found.nodes
    layers = [path for path in blocks if path.count(".") == 1]
    assert layers == [f"layers.{i}" for i in range(11)]
    assert len({blocks[path].flops for path in layers}) == 1


def test_a_weight_without_a_path_belongs_to_the_block_that_reads_it():
    model = model_of_layers(2)
    wanted = {block.path: block.parameters for block in inspect(model).blocks}
    for i, value in enumerate(list(model.graph.initializers.values())):
        value.name = f"val_{i}"
    assert {block.path: block.parameters for block in inspect(model).blocks} == wanted


def test_bytes():
    def two(x):
        return gg.ops.cast(x + np.ones((3, 1), np.float32), to=ir.DataType.DOUBLE)

    found = cost(two, x=gg.float32[3, 5])
    assert found.weight_bytes == 3 * 4
    assert (found.read_bytes, found.written_bytes) == (15 * 4 + 3 * 4 + 15 * 4, 15 * 4 + 15 * 8)
    assert found.peak_bytes == 15 * 4 + 15 * 8


def test_the_critical_path_is_the_heaviest_chain():
    model = at_sizes(model_of_layers(1), {"batch": 1, "seq": T})
    found, context = inspect(model), infer_model(model)
    order = nx.DiGraph()
    for node in model.graph:
        order.add_node(node.name, cost=flops(node, context).total)
        for value in node.inputs:
            if value is not None and value.producer() is not None:
                order.add_edge(value.producer().name, node.name)
    starts = [n for n in order if not order.in_degree(n)]
    chains = [
        chain
        for start in starts
        for end in order
        for chain in ([start],) * (start == end) or nx.all_simple_paths(order, start, end)
    ]
    heaviest = max(sum(order.nodes[n]["cost"] for n in chain) for chain in chains)
    assert found.critical_path.flops == heaviest < found.flops
    names = [step.name for step in found.critical_path.nodes]
    assert all(order.has_edge(a, b) for a, b in pairwise(names))
    assert found.depth == max(map(len, chains))


def test_the_first_node_counts_on_the_critical_path():
    def branches(x):
        heavy = gg.ops.matmul(x, np.ones((D, D), np.float32))
        return heavy + gg.ops.exp(gg.ops.exp(gg.ops.exp(x)))

    path = cost(branches, x=gg.float32[T, D]).critical_path
    assert [step.operator for step in path.nodes] == ["MatMul", "Add"]
    assert path.flops == 2 * T * D * D + T * D


def test_only_the_heaviest_nodes_of_the_critical_path_are_listed():
    """In the order of the path, with the sum of the others below."""
    found = inspect(model_of_layers(2), {"batch": 1, "seq": T})
    path = found.critical_path
    assert len(path.nodes) > 10

    def rows(steps):
        *_, (title, (_, *rows)) = found._tables(3, steps)
        assert title == f"critical path: {path.flops:,} FLOPs"
        assert sum(int(row[2].replace(",", "")) for row in rows) == path.flops
        return rows

    *listed, (others, _, _) = rows(10)
    whole = rows(1000)
    costly = sorted((int(row[2].replace(",", "")) for row in whole), reverse=True)
    assert sorted((int(row[2].replace(",", "")) for row in listed), reverse=True) == costly[:10]
    assert [row for row in whole if row in listed] == listed
    assert others == f"{len(whole) - 10} others"


def test_an_operator_that_is_not_ours_is_named_and_not_counted():
    model = gg.build(lambda x: x + 1.0, x=gg.float32[T, D])
    add = model.graph[0]
    det = ir.node("Unheard", [add.outputs[0]], domain="elsewhere", name="last")
    det.outputs[0].type, det.outputs[0].shape = add.outputs[0].type, add.outputs[0].shape
    model.graph.append(det)
    model.graph.outputs[0] = det.outputs[0]
    found = inspect(model)
    assert found.uncounted == ["elsewhere::Unheard at last: no cost is known of it"]
    assert found.flops == T * D
