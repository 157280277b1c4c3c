"""What the schemas of standard operators do not say of their versions."""

from collections.abc import Callable
from typing import Any, TypeAlias

import onnx_ir as ir

from graphgen.subgraphs import nodes_of


def _text(name: str, default: str = "") -> Callable[[ir.Node], str]:
    return lambda node: node.attributes.get_string(name, default) or default


def _may_be_float(node: ir.Node) -> bool:
    return any(
        v is not None and (v.dtype is None or v.dtype.is_floating_point()) for v in node.inputs
    )


def _may_skip_a_window(node: ir.Node) -> bool:
    """Whether a pool may leave a window out, because it would begin behind the image."""
    x, step = node.inputs[0], max(node.attributes.get_ints("strides", ()) or (), default=1)
    if not node.attributes.get_int("ceil_mode", 0) or step == 1 or x is None or x.shape is None:
        return False
    return any(isinstance(size, int) for size in [*x.shape][2:])


def _rounds_up_or_pads_below_0(node: ir.Node) -> bool:
    """Whether it is a pool that the kernel of older versions computes otherwise, or refuses."""
    window, steps = (node.attributes.get_ints(n, ()) or () for n in ("kernel_shape", "strides"))
    apart = any(step > size for size, step in zip(window, steps, strict=False))
    same = apart and _text("auto_pad")(node).startswith("SAME")
    return bool(same or node.attributes.get_int("ceil_mode", 0))


_REDUCTION, _MODE = _text("reduction"), _text("mode")

REDEFINED: dict[str, tuple[int, Callable[[ir.Node], bool]]] = {
    "AveragePool": (19, _rounds_up_or_pads_below_0),
    "GridSample": (20, lambda node: _MODE(node) in ("bilinear", "bicubic", "linear", "cubic")),
    "GroupNormalization": (21, lambda node: True),  # scale and bias per channel, not per group
    "Hardmax": (13, lambda node: node.attributes.get_int("axis", 1) != -1),
    "Mod": (28, lambda node: _may_be_float(node) and not node.attributes.get_int("fmod", 0)),
    "Pad": (19, lambda node: _MODE(node) == "wrap"),
    "Resize": (
        19,  # or of opset 10
        lambda node: (
            "half" in _text("coordinate_transformation_mode")(node) or len(node.inputs) == 2
        ),
    ),
    "RoiAlign": (16, lambda node: "coordinate_transformation_mode" not in node.attributes),
    "ScatterElements": (18, lambda node: _REDUCTION(node) in ("min", "max")),
    "ScatterND": (18, lambda node: _REDUCTION(node) in ("min", "max")),
    "Split": (18, lambda node: len(node.inputs) == 1),  # equal parts now need num_outputs
}
"""Later versions that changed the meaning but not the signature: from when, for which nodes.

Complete from opset 13 on.
"""

INFERRED_ANEW: dict[str, tuple[int, Callable[[ir.Node], bool]]] = {
    "AveragePool": (22, _may_skip_a_window),
    "LpPool": (22, _may_skip_a_window),
    "MaxPool": (22, _may_skip_a_window),
}
"""Later versions of which readers infer other sizes, the right ones: since when, of which nodes.

A node may be raised to them, but not lowered: the runtime computes the same at all of them.
"""

BY_BODY: dict[str, int] = {"ReduceLogSumExp": 18, "Softplus": 18}
"""An opset at which the runtime computes these in float16 by their bodies, where exp overflows.

It is that of onnx's bodies. At all others, it computes them in float32 between casts.
"""


def overflows_at(node: ir.Node, opset: int) -> bool:
    """Whether the runtime computes a node in float16 by its body at this opset."""
    if BY_BODY.get(node.op_type) != opset or node.domain:
        return False
    return any(v is not None and v.dtype == ir.DataType.FLOAT16 for v in node.inputs)


_Add = Callable[..., ir.Value]


def _hardmax(node: ir.Node, add: _Add) -> ir.Value:
    """Before opset 13, all axes from `axis` on are one."""
    x = node.inputs[0]
    flat = add("Flatten", x, axis=node.attributes.get_int("axis", 1))
    return add("Reshape", add("Hardmax", flat, axis=-1), add("Shape", x), allowzero=1)


def _group_normalization(node: ir.Node, add: _Add) -> ir.Value:
    """Before opset 21, scale and bias are per group."""
    x, *given = node.inputs
    one, groups = (add(ir.tensor([n])) for n in (1, node.attributes["num_groups"].as_int()))
    each = add("Div", add("Shape", x, start=1, end=2), groups)
    sizes, rows = add("Concat", one, each, axis=0), add(ir.tensor([-1]))
    scale, bias = (
        add("Reshape", add("Expand", add("Unsqueeze", v, one), sizes), rows) for v in given
    )
    return add(node.op_type, x, scale, bias, **{n: a.value for n, a in node.attributes.items()})


def _batch_normalization(node: ir.Node, add: _Add) -> ir.Value | None:
    """Before opset 14, one with more than one output normalizes by its batch.

    The others use the statistics they are given, as the converter has it. Raises ValueError if
    another output is used: the variance among them is defined otherwise.
    """
    a = node.attributes
    if len(node.outputs) == 1 or a.get_int("is_test", 0) != 0 or a.get_int("spatial", 1) == 0:
        return None
    if any(v.uses() or v.is_graph_output() for v in node.outputs[1:]):
        raise ValueError("the statistics that BatchNormalization gives are used")
    given = {n: a[n].value for n in ("epsilon", "momentum") if n in a}
    return add(node.op_type, *node.inputs, **given, training_mode=1, outputs=3)


def _resize(node: ir.Node, add: _Add) -> ir.Value | None:
    """Before opset 11, x / scale is the place in x, whole or weighted.

    A place that is to be whole is cut off along axes that grow, rounded up along those that shrink.
    The converter would write half pixels. A later Resize, with a region, is left to it.
    """
    attributes, mode = node.attributes, node.attributes.get_string("mode", "nearest")
    if len(node.inputs) == 2:
        x, scales = node.inputs
    elif node.op_type == "Upsample" and "scales" in attributes:
        given = ir.tensor(attributes["scales"].as_floats(), ir.DataType.FLOAT)
        x, scales = node.inputs[0], add(given)
    else:
        return None
    place = {"mode": mode, "coordinate_transformation_mode": "asymmetric"}
    if mode != "nearest":
        return add("Resize", x, None, scales, **place)
    known = None if scales is None else ir.convenience.get_const_tensor(scales)
    if node.op_type == "Upsample" or (known is not None and known.numpy().min() >= 1):
        return add("Resize", x, None, scales, nearest_mode="floor", **place)
    one = add(ir.tensor([1.0], ir.DataType.FLOAT))
    wide = add("Resize", x, None, add("Max", scales, one), nearest_mode="floor", **place)
    return add("Resize", wide, None, add("Min", scales, one), nearest_mode="ceil", **place)


def _reduction(node: ir.Node, add: _Add) -> ir.Value:
    """Before opset 18 (a sum's, 13), axes are an attribute; none are all."""
    given = {n: a.value for n, a in node.attributes.items()}
    axes = given.pop("axes", ())
    inputs = [*node.inputs, *([add(ir.tensor(axes, ir.DataType.INT64))] if axes else [])]
    return add(node.op_type, *inputs, **given)


_REDUCTIONS = ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")

_Rules: TypeAlias = dict[str, Callable[[ir.Node, _Add], ir.Value | None]]

_RAISED: _Rules = {
    "BatchNormalization": _batch_normalization,
    "GroupNormalization": _group_normalization,
    "Hardmax": _hardmax,
    "Resize": _resize,
    "Upsample": _resize,
}
"""What onnx's converter does not change, although the meaning changes, or refuses.

None is left to the converter.
"""

_RAISED_ALONE: _Rules = {f"Reduce{name}": _reduction for name in _REDUCTIONS}
_RAISED_ALONE["GroupNormalization"] = _group_normalization
"""What needs no converter from opset 13 on."""


def raise_alone(model: ir.Model, redefined: Callable[[ir.Node], bool]) -> bool:
    """Write such nodes in operators of opset 23, from 13 on, or return False and leave them.

    The converter takes a quarter of the time of reading a file whose reductions alone have changed.
    """
    nodes = [n for n in nodes_of(model.graph) if not n.domain and redefined(n)]
    if not all(n.op_type in _RAISED_ALONE or _is_split(n) for n in nodes):
        return False
    for node in filter(_is_split, nodes):
        node.attributes["num_outputs"] = ir.AttrInt64("num_outputs", len(node.outputs))
    _raise(model, _RAISED_ALONE, redefined, "")
    return True


def _is_split(node: ir.Node) -> bool:
    """Whether it is a Split into equal parts."""
    return node.op_type == "Split" and len(node.inputs) == 1 and "split" not in node.attributes


def raise_redefined(model: ir.Model, redefined: Callable[[ir.Node], bool], domain: str) -> None:
    """Write nodes that no converter raises in operators of opset 23, in a domain it ignores."""
    _raise(model, _RAISED, redefined, domain)


def _raise(
    model: ir.Model, raised: _Rules, redefined: Callable[[ir.Node], bool], domain: str
) -> None:
    for node in [n for n in nodes_of(model.graph) if not n.domain and n.op_type in raised]:
        if not redefined(node):
            continue
        nodes: list[ir.Node] = []

        def add(
            what: Any,
            *inputs: ir.Value | None,
            outputs: int = 1,
            nodes: Any = nodes,
            **given: Any,
        ) -> ir.Value:
            constant = None if isinstance(what, str) else ir.node("Constant", [], {"value": what})
            made = constant or ir.node(what, inputs, given, domain=domain, num_outputs=outputs)
            nodes.append(made)
            return nodes[-1].outputs[0]  # type: ignore[no-any-return]

        y, old = raised[node.op_type](node, add), node.outputs[0]
        if y is None:
            continue
        assert node.graph is not None
        for new in nodes:
            new.metadata_props.update(node.metadata_props)
        node.graph.insert_before(node, nodes)
        name, old.name = old.name, None
        y.name, y.type, y.shape = name, old.type, old.shape
        old.replace_all_uses_with(y, replace_graph_outputs=True)
        node.graph.remove(node, safe=True)
        model.graph.opset_imports.setdefault(domain, 1)


def raise_scans(model: ir.Model, domain: str) -> bool:
    """Write each Scan of opset 8 as two of opset 9; whether there was one.

    It has a batch: a Scan without a state goes over the rows, its body the Scan that is left. With
    sequence_lens, a row is cut to its length, and what it gives is padded with zeros. The nodes
    that cut and pad are of opset 23; they get a domain that no converter looks into.
    """
    scans = [node for node in nodes_of(model.graph) if (node.domain, node.op_type) == ("", "Scan")]
    for node in scans:
        assert node.graph is not None
        outer = _over_rows(node, domain)
        outer.metadata_props.update(node.metadata_props)
        node.graph.insert_before(node, outer)
        for old, new in zip(node.outputs, outer.outputs, strict=True):
            name, old.name = old.name, None
            new.name, new.type, new.shape = name, old.type, old.shape
            old.replace_all_uses_with(new, replace_graph_outputs=True)
        node.graph.remove(node, safe=True)
    return bool(scans)


def _over_rows(node: ir.Node, domain: str) -> ir.Node:
    lengths, *given = node.inputs
    nodes: list[ir.Node] = []

    def add(op_type: str, *inputs: ir.Value | None, **attributes: int) -> ir.Value:
        nodes.append(ir.node(op_type, inputs, attributes, domain=domain))
        return nodes[-1].outputs[0]

    count, body = (node.attributes[name] for name in ("num_scan_inputs", "body"))
    rows, length = [ir.Value() for _ in given], ir.Value()
    states, xs = rows[: -count.as_int()], rows[-count.as_int() :]
    attributes = [count, body]
    if "directions" in node.attributes:
        ways = node.attributes["directions"].as_ints()
        attributes.append(ir.AttrInt64s("scan_input_directions", ways))
    if lengths is not None:
        nodes.append(ir.node("Constant", [], {"value": ir.tensor([0], ir.DataType.INT64)}))
        zero = nodes[0].outputs[0]
        end = add("Unsqueeze", length, zero)
        left = add("Sub", add("Shape", xs[0], start=0, end=1), end)
        pads = add("Concat", zero, left, axis=0)
        xs = [add("Slice", x, zero, end, zero) for x in xs]
    outputs = len(node.outputs)
    inner = ir.Node("", "Scan", [*states, *xs], attributes, num_outputs=outputs)
    nodes.append(inner)
    results = [*inner.outputs]
    if lengths is not None:
        ys = results[len(states) :]
        results[len(states) :] = [add("Pad", y, pads, None, zero) for y in ys]
        rows, given = [length, *rows], [lengths, *given]
    around = ir.Graph(rows, results, nodes=nodes, name="rows")
    scanned = [ir.AttrGraph("body", around), ir.AttrInt64("num_scan_inputs", len(rows))]
    return ir.Node("", "Scan", given, scanned, num_outputs=outputs, name=node.name)
