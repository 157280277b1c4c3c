"""What torch gives no gradient: what it detaches, and the row of a table that pads."""

import re
from collections.abc import Collection

import numpy as np
import onnx_ir as ir

from graphgen import ops
from graphgen.errors import GraphgenError, user_line, warn
from graphgen.graph import HELD, TORCH_CALL, is_float, present_inputs
from graphgen.match import Engine, Pass, PassReport, Rewrite, Rule, run_passes
from graphgen.op import Op, is_a
from graphgen.places import block_of
from graphgen.value import adopt

_EMBEDS = r"aten\.embedding\.default\]\(args = \([^,]+, [^,)]+(?:, (-?\d+))?(?:, (\w+))?"
"""A call of torch's: the table, indices, the row that pads, and whether rows are weighed."""


def note_held(node: ir.Node, who: str) -> None:
    """Note that no gradient goes through what torch detaches, nor to the row of a table that pads.

    Raises GraphgenError for a table whose gradients torch divides by how often a row was read.
    """
    call = node.metadata_props.get(TORCH_CALL, "")
    if is_a(node, ops.identity) and "torch.ops.aten.detach." in call:
        node.metadata_props[HELD] = ""
    if is_a(node, ops.gather) and (found := re.search(_EMBEDS, call)):
        if found[1] and int(found[1]) >= 0:
            node.metadata_props[HELD] = found[1]
        if found[2] == "True":
            raise GraphgenError(
                f"{who}: {block_of(node) or 'the module'} has scale_grad_by_freq=True, and "
                f"gradients here are whole: make it without{user_line()}"
            )


def hold(model: ir.Model, trained: Collection[str], *, chosen: bool) -> None:
    """Let no gradient through where the metadata of nodes says so.

    Raises GraphgenError if torch's exporter dropped what detaches what depends on a `trained`
    weight; if these were `chosen`, it warns, since a gradient may be right without it.
    """
    calls = set[str]()
    for node in model.graph.all_nodes():
        note_held(node, "artifacts")
        calls.add(node.metadata_props.get(TORCH_CALL, ""))
    made = {call.partition(" ")[0] for call in calls}
    named = {name for call in calls for name in re.findall(r"%detach(?:_\d+)?\b", call)}
    if (lost := named - made) and (count := _reached(model.graph, lost, trained)):
        told = (
            f"artifacts: torch's exporter dropped {count} nodes that let no gradient through "
            "(detach), so weights before them are trained otherwise than in torch; export with "
            "gg.from_torch, `graphgen import` or optimize=False"
        )
        if not chosen:
            raise GraphgenError(f"{told}, or say what is trained")
        warn(told)
    frozen = {value for value in model.graph.inputs if value.name not in trained}
    nodes = [
        node
        for node in model.graph.all_nodes()
        if HELD in node.metadata_props and node.inputs[0] not in frozen
    ]

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


def _reached(graph: ir.Graph, lost: Collection[str], trained: Collection[str]) -> int:
    """How many of the lost nodes' results are read where something depends on a trained weight."""
    after, found = set[ir.Value](), set[str]()
    weights = {v: f"%p_{str(v.name).replace('.', '_').lower()}" for v in graph.inputs}
    weights = {value: name for value, name in weights.items() if value.name in trained}
    for node in graph:
        call = node.metadata_props.get(TORCH_CALL, "")
        given = present_inputs(node)
        names = {v: weights.get(v, f"%{v.name}") for v in given if v in after or v in weights}
        # What the call names itself, as often as it is read, was not detached.
        read = [v for v in names if given.count(v) > _times(names[v], call)]
        if read and any(map(is_float, read)):
            found |= {name for name in lost if re.search(rf"{name}\b", call)}
        if any(v in after or v in weights for v in given):
            after.update(node.outputs)
    return len(found)


def _times(name: str, call: str) -> int:
    return len(re.findall(rf"{re.escape(name)}\b", call, re.IGNORECASE))
