"""Norms by the statistics of a batch, as modules have them in training (arXiv 1502.03167).

In a graph, such a norm uses its running statistics, and a note says how much a batch moves them. A
training model is made of this by `by_batch`; evaluation and inference keep the graph as it is.
"""

import math
import re

import numpy as np
import onnx_ir as ir

from graphgen import ops
from graphgen.edit import infer_model, register_constants
from graphgen.errors import GraphgenError
from graphgen.graph import TORCH_CALL, present_inputs, uses_outputs_beyond
from graphgen.match import Engine, Rewrite
from graphgen.op import is_a, read_attributes
from graphgen.ops.norm import batch_statistics
from graphgen.places import where_is
from graphgen.record import recording
from graphgen.traits import Trait, has
from graphgen.value import Tensor, adopt

MOMENTUM = "graphgen.batch_norm"
"""Metadata of a norm of a module in training mode: the part that a batch's statistics count for."""

UNBIASED = "graphgen.batch_norm_unbiased"
"""Metadata of one whose running variance is of the N / (N - 1) fold of the batch's, as in torch."""

_BY_BATCH = r"aten\.\w*batch_norm\w*\.(\w+)\]\(args = \(.*, True, ([-+.e\d]+), [-+.e\d]+[,)]"
"""A call of torch that normalizes by the batch: its overload, and its momentum."""

_BY_RUNNING = r"aten\.\w*batch_norm\w*\.\w+\]\(args = \(.*, False, [-+.e\d]+, [-+.e\d]+[,)]"
"""One that normalizes by running statistics."""

_BY_SAMPLE = r"aten\.instance_norm\.\w+\]\(args = \(.*, %\w+, %\w+, True, "
"""One that normalizes by each sample, and moves running statistics."""

NEXT = ".moved"
"""What follows a statistic's name in that of its new value."""


def is_norm(node: ir.Node) -> bool:
    """Whether a node is a norm by running statistics."""
    return is_a(node, ops.batch_normalization)


def note(node: ir.Node, momentum: float, *, unbiased: bool) -> None:
    """Let a norm use the batch in training, whose statistics count for `momentum`."""
    node.metadata_props[MOMENTUM] = repr(momentum)
    if unbiased:
        node.metadata_props[UNBIASED] = "1"


def in_evaluation(model: ir.Model) -> None:
    """Norms that a file has in training mode as they are afterwards, with the note.

    Dynamo's exporter writes all as in evaluation, and the call in torch beside them.

    Raises GraphgenError if their running statistics are used, or were dropped by an exporter.
    """
    torchs = model.producer_name == "pytorch"
    for node in model.graph.all_nodes():
        note_as_called(node)
        if not is_norm(node):
            continue
        found = read_attributes(ops.batch_normalization, node)
        if not found.get("training_mode") or is_by_batch_alone(node):
            continue
        if uses_outputs_beyond(node, 1):
            raise GraphgenError(
                f"{where_is(node)}: its running statistics are outputs of the graph, or used in "
                "it: export the model without them"
            )
        if torchs and not found["momentum"]:
            raise GraphgenError(
                f"artifacts: {where_is(node)}: its momentum is 0, as torch's exporter also writes "
                "momentum=None, for statistics that are the mean of all batches: make it with a "
                "number, such as momentum=0.1, or export it in evaluation mode"
            )
        note(node, 1.0 - float(found["momentum"]), unbiased=torchs)
        del node.attributes["training_mode"]
        node.resize_outputs(1)
    for node in _sites(model):
        for index in (3, 4):
            node.replace_input_with(index, _before(node.inputs[index]))


def _before(running: ir.Value | None) -> ir.Value | None:
    """The stored statistic: torch's exporter writes what a call leaves of it as a copy.

    Raises GraphgenError if something but norms in training mode reads this copy.
    """
    made = None if running is None else running.producer()
    if made is None or not is_a(made, ops.identity):
        return running
    others = [n for n in made.outputs[0].consumers() if MOMENTUM not in n.metadata_props]
    if others or made.outputs[0].is_graph_output():
        raise GraphgenError(
            f"artifacts: {where_is(others[0]) if others else 'an output'} reads a running "
            "statistic after a norm in training mode has moved it, and a graph has the one before: "
            "read it before the norm, or export the module in evaluation mode"
        )
    return _before(made.inputs[0])


def is_by_batch_alone(node: ir.Node) -> bool:
    """Whether a norm's statistics are calculated in the graph, as of one that keeps none."""
    makers = [None if value is None else value.producer() for value in node.inputs[3:5]]
    return all(made is not None and has(made, Trait.REDUCES) for made in makers)


def note_as_called(node: ir.Node) -> bool:
    """Note what a call in torch says of the batch; return whether it says anything.

    Raises GraphgenError for what the exporter wrote otherwise than torch trains it.
    """
    called = node.metadata_props.get(TORCH_CALL, "")
    if re.search(_BY_SAMPLE, called):
        raise GraphgenError(
            f"artifacts: {where_is(node)}: an instance norm with running statistics in training "
            "mode, for which torch's exporter leaves them out: make it with "
            "track_running_stats=False, or export it in evaluation mode"
        )
    call = re.search(_BY_BATCH, called)
    if call is None:
        return re.search(_BY_RUNNING, called) is not None
    product = has(node, Trait.PRODUCT) or is_a(node, ops.conv, ops.conv_transpose)
    if call[1] == "no_stats" and (product or (is_norm(node) and not is_by_batch_alone(node))):
        raise GraphgenError(
            f"artifacts: {where_is(node)}: a norm without running statistics, for which torch's "
            "exporter wrote 0 and 1: export with torch 2.13, or make it with "
            "track_running_stats=True"
        )
    if is_norm(node) and call[1] != "no_stats":
        note(node, float(call[2]), unbiased=True)
    elif product:
        raise GraphgenError(
            f"artifacts: {where_is(node)}: torch's exporter folded a norm in training mode into "
            "it, which so no longer uses the batch: export with gg.from_torch or optimize=False, "
            "or, if the running statistics are meant, in evaluation mode"
        )
    return True


def statistics(model: ir.Model) -> list[str]:
    """The names of the running statistics that a batch moves.

    Raises GraphgenError for a norm in training mode whose statistics are not stored, or that a
    branch or a loop holds.
    """
    found = dict[str, None]()
    for node in _sites(model):
        for value in node.inputs[3:5]:
            if value is None or not value.is_initializer() or node.graph is not model.graph:
                raise GraphgenError(
                    f"artifacts: {where_is(node)} is in training mode, and its running statistics "
                    "are no weights, or it is in a branch or loop: export it in evaluation mode, "
                    "with track_running_stats=True"
                )
            found[str(value.name)] = None
    return [*found]


def by_batch(model: ir.Model) -> dict[str, str]:
    """Let norms of modules in training mode use the batch; return their statistics' new values.

    These are outputs of the model, by the name of the statistic: the one before, moved towards that
    of the batch.
    """
    graph, sites = model.graph, _sites(model)
    if not sites:
        return {}
    moved = dict[ir.Value, Tensor]()
    with recording(context=infer_model(model)) as tape:
        for node in sites:
            x, _, _, *running = node.inputs
            assert x is not None
            mean, variance, count = _of_batch(adopt(x))
            if UNBIASED in node.metadata_props:
                variance = variance * (count / (count - np.float32(1)))
            part = np.float32(float(node.metadata_props[MOMENTUM]))
            for value, new in zip(running, (mean, variance), strict=True):
                assert value is not None
                old = moved.get(value, adopt(value))  # a norm that is used twice moves it twice
                moved[value] = old + (new - old) * part
        names = {str(value.name): str(value.name) + NEXT for value in moved}
        made = [tape.operand(new) for new in moved.values()]
        graph.extend(tape.nodes)
        tape.kept = True
        register_constants(graph, tape.constants.values())
    for name, output in zip(names.values(), made, strict=True):
        output.name = name
    graph.outputs.extend(made)
    done = Engine().run("by_batch", model, {ops.batch_normalization: [_by_batch]}, forward=True)
    for site in done.sites:
        if site.status != "fired":
            raise GraphgenError(f"artifacts: {site.where}: it cannot use the batch: {site.reason}")
    return names


def is_moved(name: str) -> bool:
    """Whether an output is a running statistic that a batch has moved."""
    return name.endswith(NEXT)


def _sites(model: ir.Model) -> list[ir.Node]:
    return [node for node in model.graph.all_nodes() if MOMENTUM in node.metadata_props]


def _by_batch(node: ir.Node) -> Rewrite | None:
    """(x - mean) / √(variance + ε) · scale + bias, with the statistics of x."""
    if MOMENTUM not in node.metadata_props:
        return None
    x, scale, bias = (adopt(value) for value in node.inputs[:3])
    mean, variance, _ = _of_batch(x)
    epsilon = np.float32(read_attributes(ops.batch_normalization, node)["epsilon"])
    y = (x - _of_channels(mean, x)) / _of_channels(ops.sqrt(variance + epsilon), x)
    y = y * _of_channels(scale, x) + _of_channels(bias, x)
    return Rewrite(y, present_inputs(node)[:3], "by the batch")


def _of_batch(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and variance, (C,), of x, (N, C, ...), and of how many numbers, float[]."""
    axes = [axis for axis in range(ops.rank(x)) if axis != 1]
    count = math.prod((ops.dim(x, axis) for axis in axes[1:]), start=ops.dim(x, axes[0]))
    return *batch_statistics(x), ops.cast(count, to=np.float32)


def _of_channels(v: Tensor, x: Tensor) -> Tensor:
    return ops.reshape(v, [-1, *[1] * (ops.rank(x) - 2)])
