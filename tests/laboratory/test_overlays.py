"""Figures of nodes: of which graphs, and under which names."""

import numpy as np
import onnx_ir as ir
import pytest
from small_models import block

import graphgen as gg
from graphgen.laboratory import overlays as module
from graphgen.laboratory.overlays import overlays
from graphgen.laboratory.placement import Kernel
from graphgen.targets import newest_opset

FEEDS = {"x": np.random.default_rng(0).standard_normal((2, 3, 16)).astype(np.float32)}


def graphs() -> list[tuple[str, ir.Model]]:
    found = [("as given", block())]
    gg.optimize(found[0][1], after_each=lambda name, model: found.append((name, model.clone())))
    return found


@pytest.mark.skipif(newest_opset() < 23, reason="this runtime has no Attention of opset 23")
def test_every_node_has_a_time_and_the_ends_an_error(monkeypatch):
    asked = []
    profile = module.profile
    monkeypatch.setattr(module, "profile", lambda *a, **k: asked.append(1) or profile(*a, **k))
    given = graphs()
    found = overlays(given, FEEDS)
    for times, (_, model) in zip(found["time"].values, given, strict=True):
        assert {node.name for node in model.graph} == times.keys()
        assert all(x >= 0 for x in times.values()) and sum(times.values()) > 0
    assert len(asked) < len(given)  # what a pass left as it was is measured once
    first, *others, last = found["error"].values
    assert not any(others)
    for errors, (_, model) in ((first, given[0]), (last, given[-1])):
        makes = {n.name for n in model.graph if n.outputs[0].dtype == ir.DataType.FLOAT}
        assert errors.keys() == makes
        assert 0 < max(errors.values()) < 1e-5


def test_the_time_of_a_branch_is_counted_once(monkeypatch):
    """The runtime's time of an If has that of its nodes in it."""
    x = ir.val("x", ir.DataType.FLOAT, [2])
    inner = [ir.node("Relu", [x], name="inner")]
    branch = ir.Graph([], inner[0].outputs, nodes=inner, name="branch")
    choice = ir.node("If", [ir.val("c", ir.DataType.BOOL, [])], {"then_branch": branch}, name="if")
    graph = ir.Graph([x], choice.outputs, nodes=[choice], opset_imports={"": 23}, name="g")
    spent = {"if": Kernel("If", "cpu", 5000.0), "inner": Kernel("Relu", "cpu", 3000.0)}
    monkeypatch.setattr(module, "profile", lambda *a, **k: spent)
    found = overlays([("g", ir.Model(graph, ir_version=10))], {}, exact=False)
    assert found["time"].values == [{"if": 2.0, "inner": 3.0}]


def test_what_cannot_be_measured_is_left_out():
    x = ir.val("x", ir.DataType.FLOAT, [2])
    node = ir.node("NoSuchOperator", [x], name="n")
    node.outputs[0].name = "y"
    graph = ir.Graph([x], node.outputs, nodes=[node], opset_imports={"": 23}, name="g")
    broken = [("broken", ir.Model(graph, ir_version=10))]
    found = overlays(broken, {"x": np.zeros(2, np.float32)})
    assert [overlay.values for overlay in found.values()] == [[{}], [{}]]
    assert overlays(graphs()[:1], FEEDS, exact=False)["error"].values == [{}]
