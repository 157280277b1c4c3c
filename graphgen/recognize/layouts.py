"""One form for what layout operators do: reshapes, transposes and repetitions."""

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from graphgen.graph import constant, present_inputs, produced_by
from graphgen.infer import is_named, same_dim, same_shape
from graphgen.match import Rewrite
from graphgen.op import canonical
from graphgen.ops.layout import _reshape, expand, flatten, reshape, squeeze, transpose, unsqueeze
from graphgen.ops.padding import tile
from graphgen.recognize.axes import LAYOUT, View
from graphgen.record import current_tape
from graphgen.value import Tensor, Value, graph_value, sizes_of


@canonical(tile)
def repeated(node: ir.Node) -> Rewrite | None:
    """Tile is Expand along axes of size 1, as TensorFlow repeats masks."""
    [x, repeats], tape = present_inputs(node), current_tape()
    times = None if tape is None else tape.context.get_symbolic_value(repeats)
    if x.shape is None or times is None or x.dtype == ir.DataType.STRING:
        return None
    if any(1 not in (size, n) for size, n in zip(x.shape, times, strict=True)):
        return None
    return Rewrite(expand(Value(x), Value(repeats)), [x, repeats], "repeats axes of size 1")


@canonical(_reshape)
def known_shape(node: ir.Node) -> Rewrite | None:
    """A shape that is computed at run time but known by inference becomes a constant.

    It also drops allowzero, which only changes what a size of 0 means, if no size is 0. A size that
    has a name keeps it: of a slice, say, "what is left" may be less than was asked for. Nor is
    "what is left" written next to another size that may be 0, where the runtime cannot know it.
    """
    x, sizes = present_inputs(node)
    shape, known, zeros = node.outputs[0].shape, constant(sizes), "allowzero" in node.attributes
    if shape is None or x.shape is None or (known is not None and (not zeros or 0 in known)):
        return None
    tape = current_tape()
    given = () if tape is None else tape.context.get_symbolic_value(sizes) or ()
    target: Any = _sizes(x, shape, given) if known is None else known
    reason = "reshape without allowzero" if zeros else "shape as a constant"
    result: Tensor | None = None if target is None else reshape(Value(x), target)
    if result is None or (known is None and any(map(_loses_name, shape, sizes_of(result) or ()))):
        return None
    return Rewrite(result, [x, sizes], reason)


def _loses_name(old: Any, new: Any) -> bool:
    return is_named(old) and not is_named(new)


def _sizes(x: ir.Value, shape: ir.Shape, given: Sequence[Any]) -> list[int] | None:
    """`shape` as constant sizes of a reshape of x, or None if two are known only at run time.

    Also if one is, and another may be 0, unless the graph, too, asks for what is left there.
    """
    result: list[int] = []
    for i, d in enumerate(shape):
        if isinstance(d, int) and d != 0:
            result.append(d)
        elif x.shape is not None and i < len(x.shape) and same_dim(d, x.shape[i]):
            result.append(0)
        else:
            result.append(-1)
    rests = [i for i, d in enumerate(result) if d == -1]
    asked = [i for i, d in enumerate(given) if d == -1]
    return None if len(rests) > 1 or (0 in result and rests not in ([], asked)) else result


@canonical(_reshape, transpose, unsqueeze, squeeze, flatten)
def layout(node: ir.Node) -> Rewrite | None:
    """A chain of layout operators becomes at most a reshape, a transpose and a reshape."""
    y, tape = node.outputs[0], current_tape()
    view = View.of(y, repeated=False)
    if view is None or tape is None or not view.steps:
        return None
    if view.steps == 1 and not same_shape(graph_value(view.source).shape, y.shape):
        return None  # it does something, and cannot be shorter
    result = view.arranged(view.dims, at_most=view.steps - 1)
    added = [made for made in tape.nodes if made.op_type in LAYOUT]
    replaced = [node]
    while len(replaced) < view.steps and (made := produced_by(replaced[-1].inputs[0], *LAYOUT)):
        replaced.append(made)
    fixed = all(constant(n.inputs[1]) is not None for n in added if n.op_type == "Reshape")
    fixed = fixed and not (_leaves_rest(added) and not _leaves_rest(replaced))
    if result is None or len(added) >= view.steps or not fixed:
        return None
    reason = f"{view.steps} layout operators as {len(added)}"
    return Rewrite(result, [view.source], reason, may_share=True)


def _leaves_rest(nodes: Sequence[ir.Node]) -> bool:
    """Whether a reshape's -1 is next to a 0, the size of an axis that may be 0, too."""
    contents = [constant(n.inputs[1]) for n in nodes if n.op_type == "Reshape"]
    return any(content is not None and {-1, 0} <= {*content.tolist()} for content in contents)
