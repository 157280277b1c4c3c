"""What torch gives no gradient: what it detaches, and the row of a table that pads."""

import numpy as np
import onnx_ir as ir

from graphgen import ops
from graphgen.graph import present_inputs
from graphgen.match import Engine, Pass, PassReport, Rewrite, Rule, run_passes
from graphgen.op import Op
from graphgen.value import adopt

HELD = "graphgen.held"
"""Metadata of an Identity that detaches: ""; of a Gather: the row that no gradient reaches."""


def hold(model: ir.Model) -> None:
    """Let no gradient through where the metadata of nodes says so."""
    nodes = [node for node in model.graph.all_nodes() if HELD in node.metadata_props]

    def held(node: ir.Node) -> Rewrite:
        row, [x, *ids] = node.metadata_props[HELD], map(adopt, present_inputs(node))
        if not row:
            return Rewrite(ops.stop_gradient(x), present_inputs(node), "detached")
        y = ops.gather(x, ids[0])
        pads = ops.unsqueeze(ops.equal(ids[0], np.asarray(int(row), ids[0].dtype)), [-1])
        rows = ops.where(pads, ops.stop_gradient(y), y)
        return Rewrite(rows, present_inputs(node), f"row {row} is held")

    def run(model: ir.Model, engine: Engine) -> PassReport:
        kinds: dict[Op, list[Rule]] = {ops.identity: [held], ops.gather: [held]}
        return engine.run("held", model, kinds, forward=True, nodes=nodes)

    if nodes:
        run_passes(model, [Pass("held", run)], Engine())
