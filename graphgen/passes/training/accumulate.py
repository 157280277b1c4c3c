"""Gradients that are summed up in memory: the official form, and the one for the stock runtime.

A file has an `InPlaceAccumulatorV2(buffer, gradient, reset)` for each parameter; only the official
runtime has its kernel. It also overwrites running statistics that a batch moves. `for_stock` makes
all of these outputs instead, and also the running sums of gradients, so that a trainer can bind
them to one buffer.
"""

import itertools
import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes import common

from graphgen import ops
from graphgen.edit import claim, identity_of, tidy
from graphgen.errors import GraphgenError
from graphgen.graph import present_inputs, produced_by, scalar
from graphgen.infer import same_shape
from graphgen.match import Engine, Pass, PassReport, Refusal, Replacement, Rewrite, whole
from graphgen.op import find_op, is_a, read_attributes
from graphgen.passes.training.activations import share_factors
from graphgen.passes.training.adapters import initializer
from graphgen.passes.training.batch_norms import NEXT, is_moved
from graphgen.passes.training.blocks import in_blocks
from graphgen.places import where_is
from graphgen.recognize.axes import swaps_last
from graphgen.targets import target
from graphgen.value import Tensor, adopt

RESET, ACCUMULATOR = "lazy_reset_grad", "InPlaceAccumulatorV2"
GRADIENT, BUFFER, FLAG = "_grad", "_grad.accumulation.buffer", "_grad.accumulation.out"

_ALWAYS = "lazy_reset_grad.always"
_CONTRIB = "com.microsoft"
_ACCUMULATE = """
    <domain: "com.microsoft", opset_import: ["" : 18]>
    InPlaceAccumulatorV2 (buffer, gradient, reset) => (updated_flag) {
        inverse = Not (reset)
        updated_flag = And (reset, inverse)
    }"""  # False: it changes nothing, and only lets the stock runtime load the file


def into_buffers(names: Sequence[str]) -> Pass:
    """The official form: gradients go into buffers, and a flag for each is the output.

    The outputs of the model are the loss, the gradients of the parameters with these names, and
    statistics that a batch has moved. These, which are inputs as parameters are, are their own
    buffers, and their new values overwrite them.
    """

    def make(model: ir.Model) -> Replacement:
        graph = model.graph
        loss, *gradients = graph.outputs
        moved = [gradients.pop() for _ in range(len(gradients) - len(names))][::-1]
        graph.outputs[:] = [loss]
        inputs, added = {value.name: value for value in graph.inputs}, dict[str, ir.Value]()
        reset = added[RESET] = ir.Value(
            name=RESET, type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape([1])
        )

        def put(name: str, buffer: ir.Value, value: ir.Value, reset: ir.Value) -> None:
            node = ir.node(ACCUMULATOR, [buffer, value, reset], domain=_CONTRIB)
            flag = added[name + FLAG] = node.outputs[0]
            flag.type, flag.shape = reset.type, ir.Shape([1])
            graph.append(node)
            graph.outputs.append(flag)

        for name, gradient in zip(names, gradients, strict=True):
            shape = inputs[name].shape
            buffer = ir.Value(name=name + BUFFER, type=gradient.type, shape=shape)
            added[name + BUFFER] = buffer
            graph.inputs.append(buffer)
            put(name, buffer, gradient, reset)
        graph.inputs.append(reset)
        if moved:
            always = added[_ALWAYS] = initializer(_ALWAYS, np.ones(1, bool))
            graph.register_initializer(always)
            for value in moved:
                name = str(value.name).removesuffix(NEXT)
                put(name, inputs[name], value, always)
        claim(graph, added)
        function = ir.serde.deserialize_function(onnx.parser.parse_function(_ACCUMULATE))
        model.functions[function.identifier()] = function
        tidy(model)
        return Replacement(model, "gradients into buffers")

    return whole("into_buffers", make)


def for_stock(accumulate: bool, *, cpu: bool = True) -> list[Pass]:
    """The passes from the official form to what the stock runtime runs.

    With `accumulate`, the first sum starts from the official buffer. Products take the form that
    the kernel of the `cpu` computes fastest; WebGPU has none for that form.
    """
    in_place = Pass("sums_in_place", _sums_in_place)
    return [
        whole("gradients", _gradients_as_outputs),
        Pass("share_factors", share_factors, "whole"),
        *([Pass("fuse_transposes", _fuse_transposes)] if cpu else []),
        in_place,
        *([whole("from_buffers", _from_buffers), in_place] if accumulate else []),
        *([Pass("transpose_once", _transpose_once), Pass("in_blocks", in_blocks)] if cpu else []),
        whole("bind", _bind),
    ]


def results(model: ir.Model, *, accumulate: bool = False) -> ir.Model:
    """A copy that returns the loss and the gradients or, with `accumulate`, the buffers' contents.

    The official form, the result of `for_stock`, and everything in between give the same numbers,
    in the order of the parameters' names.
    """
    model = model.clone()
    _gradients_as_outputs(model)
    graph = model.graph
    graph.outputs[1:] = sorted(gradients_of(graph), key=lambda y: str(y.name))
    common.RemoveUnusedNodesPass()(model)
    for i, gradient in enumerate(gradients_of(graph), 1):
        name = str(gradient.name).removesuffix(GRADIENT) + BUFFER
        for buffer in [x for x in graph.inputs if x.name == name and not x.uses()]:
            if accumulate:
                graph.append(ir.node(ops.add.name, [gradient, buffer]))
                total = graph[-1].outputs[0]
                total.type, total.shape = gradient.type, gradient.shape
                graph.outputs[i] = total
            else:
                graph.inputs.remove(buffer)
    return model


def gradients_of(graph: ir.Graph) -> list[ir.Value]:
    """The outputs that are gradients, one for each parameter, in order."""
    others = [y for y in graph.outputs[1:] if not is_moved(str(y.name))]
    return [y for y in others if not re.search(_PARTIAL, str(y.name))]


def bindings(graph: ir.Graph) -> dict[str, str]:
    """The inputs and outputs to be bound to the gradient of a parameter, each with its name.

    This is for the result of `for_stock`; parameters come in order.
    """
    names = [n for n in (str(value.name) for value in graph.outputs[1:]) if not is_moved(n)]
    found = {name: re.sub(_PARTIAL, GRADIENT, name).removesuffix(GRADIENT) for name in names}
    given = [str(value.name) for value in graph.inputs if str(value.name).endswith(BUFFER)]
    return found | {name: name.removesuffix(BUFFER) for name in given}


def running_sums(gradient: ir.Value) -> list[ir.Value]:
    """The sums on the way to a gradient that can share its memory, from it back to the first.

    Each has one reader, which adds something from elsewhere: a product to its operand C, scattered
    rows, or an Add.
    """
    sums = [gradient]
    while (node := sums[-1].producer()) is not None and (op := find_op(node)) is not None:
        operands = node.inputs[_ADDED_TO.get(op, slice(0))]
        if any(x is None or x.producer() is None for x in operands):
            break  # it adds to a buffer
        like = [x for x in operands if x is not None and same_shape(x.shape, gradient.shape)]
        own = [x for x in like if len(x.uses()) == 1 and not x.is_graph_output()]
        if not own or own[0].dtype != gradient.dtype:
            break
        sums.append(own[0])
    return sums


def _accumulators(graph: ir.Graph) -> list[ir.Node]:
    """The nodes that add a gradient to its buffer. Raises GraphgenError for other operands."""
    found = [n for n in graph if (n.domain, n.op_type) == (_CONTRIB, ACCUMULATOR)]
    for node in found:
        if len(node.inputs) != 3 or not all(node.inputs):
            raise GraphgenError(
                f"{where_is(node)}: {ACCUMULATOR} has {len(present_inputs(node))} operands; it "
                "must have a buffer, a gradient and a reset: write the artifacts again"
            )
        if not node.outputs[0].is_graph_output():
            raise GraphgenError(
                f"{where_is(node)}: the result of {ACCUMULATOR} is not an output of the graph: "
                "write the artifacts again"
            )
    return found


def _gradients_as_outputs(model: ir.Model) -> Replacement:
    """Each gradient or moved statistic is a separate output, in place of its accumulator."""
    graph, made = model.graph, list[ir.Value]()
    for node in _accumulators(graph):
        buffer, gradient, _ = node.inputs
        assert buffer is not None and gradient is not None
        name = str(buffer.name)
        own = name.removesuffix(BUFFER)
        result = own + (GRADIENT if own != name else NEXT)
        if gradient in made or gradient.producer() is None:
            if gradient.name == result:  # a constant, whose name its copy gets
                gradient.name = f"{result}.constant"
            graph.insert_before(node, identity := identity_of(gradient))
            gradient = identity.outputs[0]
        gradient.name = result
        made.append(gradient)
        graph.outputs.remove(node.outputs[0])
        graph.remove(node, safe=True)
    graph.outputs.extend(made)
    for value in [x for x in graph.inputs if x.name == RESET]:
        graph.inputs.remove(value)
    model.functions.clear()
    return Replacement(model, "gradients are outputs" if made else "")


def _fuse_transposes(model: ir.Model, engine: Engine) -> PassReport:
    """FusedMatMul instead of a product with a transposed operand: nothing moves."""
    rule = partial(_transposed_product, model.graph)
    return engine.run("fuse_transposes", model, {ops.matmul: [rule]})


def _transposed_product(graph: ir.Graph, node: ir.Node) -> Rewrite | None:
    inputs, flags = list(map(adopt, node.inputs)), dict[str, Any]()
    for i, letter in enumerate("AB"):
        made = produced_by(inputs[i], ops.transpose)
        apart = letter == "A" and (_is_narrow(node) or _reads_vector(node))
        if made is not None and swaps_last(made) and not apart:
            inputs[i], flags[f"trans{letter}"] = adopt(made.inputs[0]), 1
    floats = node.outputs[0].dtype is ir.DataType.FLOAT
    if not flags or not floats or node.graph is not graph:
        return None
    return Rewrite(ops.fused_matmul(*inputs, **flags), inputs, ", ".join(flags), may_share=True)


def _reads_vector(product: ir.Node) -> bool:
    """Whether the right operand may be a vector, for which the kernel reads A as it is."""
    shape = product.inputs[1].shape if product.inputs[1] is not None else None
    return shape is None or len(shape) == 1


def _is_narrow(product: ir.Node) -> bool:
    """Whether Aᵀ has few rows, such as the features of a head, for many or unknown columns.

    The kernel transposes it for itself, and again for each _PANEL columns: a copy is faster.
    """
    sizes = product.outputs[0].shape
    if sizes is None or len(sizes) < 2:
        return False
    rows, columns = sizes[-2:]
    wide = not isinstance(columns, int) or columns > _PANEL
    return isinstance(rows, int) and rows <= _PANEL and wide


_PANEL = 128
"""The columns for which the kernel turns an operand at a time."""

_WIDE = 8
"""How many times as wide as B an operand A may be: beyond, copies take more memory than time."""


def _transpose_once(model: ir.Model, engine: Engine) -> PassReport:
    """Transposed copies for products of Aᵀ, where kernels that transpose for themselves do so again
    for every few columns; what several products read is copied once."""
    return engine.run("transpose_once", model, {ops.gemm: [_of_columns]}, forward=True)


def _of_columns(node: ir.Node) -> Rewrite | Refusal | None:
    """Aᵀ B of a copy of Aᵀ or, if B is narrower, (Bᵀ A)ᵀ of a copy of Bᵀ."""
    slower = target("cpu").pays(node) if node.attributes.get_int("transA", 0) else None
    inputs, flags = present_inputs(node), read_attributes(ops.gemm, node)
    sizes = node.outputs[0].shape
    if slower is None or sizes is None or flags["transB"]:
        return None
    (rows, columns), (a, b, *c) = sizes, map(adopt, inputs)
    if not isinstance(rows, int) or not isinstance(columns, int):
        return Refusal(f"{slower}; but which operand is wider is unknown")
    if max(rows, columns) <= _PANEL:
        return None
    swapped = rows > columns
    if swapped and (c or rows > _WIDE * columns):
        return Refusal(f"{slower}; but the copy would take as much memory as {rows:,} columns")
    x = b if swapped else a
    copies = [n.outputs[0] for n in inputs[swapped].consumers() if is_a(n, ops.transpose)]
    turned = adopt(copies[0]) if copies else ops.transpose(x, perm=[1, 0])
    flags["transA"] = 0
    y = ops.gemm(turned, a, **flags) if swapped else ops.gemm(turned, b, *c, **flags)
    return Rewrite(ops.transpose(y, perm=[1, 0]) if swapped else y, inputs, slower)


_ADDED_TO = {ops.gemm: slice(2, 3), ops.scatter_elements: slice(1), ops.add: slice(2)}
"""Which operands may share the memory of the result."""


def _sums_in_place(model: ir.Model, engine: Engine) -> PassReport:
    """An Add in a running sum as part of the node that makes one of its operands."""
    rule = partial(_sum_in_place, model.graph)
    return engine.run("sums_in_place", model, {ops.add: [rule]})


def _sum_in_place(graph: ir.Graph, node: ir.Node) -> Rewrite | None:
    if node.graph is not graph or not _is_running(node.outputs[0]):
        return None
    for part, other in itertools.permutations(present_inputs(node)):
        made = None if part.is_graph_output() else _added_to(other, part)
        if made is not None:
            maker = part.producer()
            reason = "" if maker is None else f"{maker.op_type} adds to {other.name}"
            return Rewrite(made, [other, *present_inputs(maker)] if maker else [], reason)
    return None


def _is_running(total: ir.Value) -> bool:
    """Whether a value is one of the running sums of a gradient."""
    value = total
    while not value.is_graph_output():
        [*uses] = value.uses()
        op = find_op(uses[0].node) if len(uses) == 1 else None
        if op not in _ADDED_TO:
            return False
        value = uses[0].node.outputs[0]
    graph = value.graph
    return graph is not None and value is not graph.outputs[0] and total in running_sums(value)


def _added_to(total: ir.Value, part: ir.Value) -> Tensor | None:
    """`total` + `part` in the node that makes `part`: a product, or rows scattered into zeros."""
    node = part.producer()
    op = None if node is None else find_op(node)
    if node is None or op is None or len(part.uses()) > 1:
        return None
    if not same_shape(total.shape, part.shape):
        return None
    inputs, attributes = list(map(adopt, node.inputs)), read_attributes(op, node)
    if is_a(node, ops.gemm) and len(present_inputs(node)) == 2:
        a, b = inputs[:2]
        return ops.gemm(a, b, adopt(total), **attributes)
    if not is_a(node, ops.scatter_elements) or attributes["reduction"] != "add":
        return None
    zeros = produced_by(inputs[0], ops.expand)
    if zeros is None or scalar(zeros.inputs[0]) != 0:
        return None
    _, indices, updates = inputs
    return ops.scatter_elements(adopt(total), indices, updates, **attributes)


def _from_buffers(model: ir.Model) -> Replacement:
    """The first of the sums of each gradient starts from the official buffer."""
    graph = model.graph
    buffers = {x.name: x for x in graph.inputs}
    for gradient in gradients_of(graph):
        buffer = buffers[str(gradient.name).removesuffix(GRADIENT) + BUFFER]
        first = running_sums(gradient)[-1]
        made = first.producer()
        assert made is not None
        add = ir.node(ops.add.name, [buffer, buffer])
        add.metadata_props.update(made.metadata_props)
        ir.convenience.replace_nodes_and_values(graph, made, [], [add], [first], add.outputs)
        add.replace_input_with(0, first)
        first.name = f"{first.name}.batch"
    return Replacement(model, "sums start from buffers")


def _bind(model: ir.Model) -> Replacement:
    """Running sums of gradients become outputs too; buffers that nothing reads go."""
    graph = model.graph
    for gradient in gradients_of(graph):
        for number, value in enumerate(running_sums(gradient)[1:]):
            value.name = f"{gradient.name}.{number}"
            graph.outputs.append(value)
    common.RemoveUnusedNodesPass()(model)
    for value in [x for x in graph.inputs if str(x.name).endswith(BUFFER) and not x.uses()]:
        graph.inputs.remove(value)
    return Replacement(model, "sums are outputs")


_PARTIAL = re.escape(GRADIENT) + r"\.\d+$"
"""The names of outputs that are running sums of a gradient."""
