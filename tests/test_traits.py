"""What operators are like: traits that follow from their meaning, and who has none."""

import onnx.parser
import onnx_ir as ir
import pytest

import graphgen as gg
from graphgen.graph import fixed_values
from graphgen.op import TABLE, composite, is_a
from graphgen.traits import TRAITS, Trait, declare_traits, has, lookup_of, traits_of


def _node(name: str, domain: str = "") -> ir.Node:
    return ir.Node(domain, name, [])


def test_a_node_has_the_traits_of_its_operator() -> None:
    node = _node("Reshape")
    assert has(node, Trait.VIEW) and has(node, Trait.VIEW | Trait.RANDOM)
    assert not has(node, Trait.RANDOM)
    assert not has(_node("Exp"), Trait.MOVES)
    assert lookup_of(_node("Gather")) == (1, (0,))


def test_the_same_name_in_another_domain_is_another_operator() -> None:
    node = _node("Reshape", "elsewhere")
    assert not traits_of(node) and not is_a(node, gg.ops.transpose, Trait.VIEW)
    assert lookup_of(_node("Gather", "elsewhere")) is None
    assert has(_node("Dropout"), Trait.RANDOM) and not has(_node("Dropout", "graphgen"), ~Trait(0))


def test_what_is_one_of_several_kinds() -> None:
    assert is_a(_node("Transpose"), gg.ops.matmul, gg.ops.transpose)
    assert is_a(_node("Reshape"), gg.ops.matmul, Trait.VIEW)
    assert is_a(_node("Transpose"), "MatMul", "Transpose")
    assert not is_a(_node("Transpose"), gg.ops.matmul, Trait.VIEW, "Reshape")
    assert not is_a(_node("Transpose", "elsewhere"), gg.ops.transpose, "Transpose")


def test_an_operator_may_be_declared_after_it_was_asked_for() -> None:
    node = _node("Late", "elsewhere")
    assert not is_a(node, Trait.VIEW)
    try:
        op = composite("Late", domain="elsewhere", traits=Trait.VIEW | Trait.MOVES)(lambda x: x)
        assert is_a(node, Trait.VIEW) and is_a(node, op)
    finally:
        del TABLE["elsewhere", "Late"], TRAITS["elsewhere", "Late"]


def test_an_operator_is_declared_once() -> None:
    with pytest.raises(RuntimeError, match="::Reshape has traits already"):
        declare_traits("Reshape", Trait.MOVES)


def test_a_view_moves_and_what_generates_has_no_data() -> None:
    for (domain, name), traits in TRAITS.items():
        assert Trait.VIEW not in traits or Trait.MOVES in traits, name
        assert Trait.LAYOUT not in traits or Trait.MOVES in traits, name
        assert Trait.MOVES not in traits or not traits & (Trait.SHAPE | Trait.PRODUCT), name
        assert Trait.GENERATES not in traits or (domain, name) in TABLE


@pytest.mark.parametrize("domain", ["", "elsewhere"])
def test_statistics_are_found_behind_what_moves_them_only(domain: str) -> None:
    """Nothing is known of a node that is only called as one that moves data."""
    text = """agraph (float[1, 4] x, float[4] one) => (float[1, 4] y)
        <float[4] mean = {1, 2, 3, 4}> {
            m = Identity(mean)
            y = BatchNormalization(x, one, one, m, one)
        }"""
    graph = ir.from_proto(onnx.parser.parse_graph(text))
    graph[0].domain = domain
    assert [value.name for value in fixed_values(graph)] == ([] if domain else ["mean"])
