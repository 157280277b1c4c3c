"""Cotangents: how several of one value add up, and how one of a broadcast value becomes its own."""

import onnx_ir as ir

from graphgen.errors import GraphgenError
from graphgen.graph import produced_by, scalar
from graphgen.infer import same_dim, same_shape
from graphgen.op import Operand, adopt
from graphgen.ops.elementwise import equal
from graphgen.ops.layout import non_zero, scatter_elements, shape, squeeze
from graphgen.ops.reduce import reduce_sum


def accumulate(a: Operand, b: Operand) -> Operand:
    """a + b; what is scattered into zeros, as for an embedding, is scattered into the other."""
    for total, part in ((a, b), (b, a)):
        node = part.producer() if isinstance(part, ir.Value) else None
        if node is None or node.op_type != "ScatterElements" or node.domain:
            continue
        zeros, indices, updates = map(adopt, node.inputs)
        made, axis = produced_by(zeros, "Expand"), node.attributes.get_int("axis", 0)
        added = node.attributes.get_string("reduction", "none") == "add"
        if added and made is not None and scalar(made.inputs[0]) == 0:
            return scatter_elements(total, indices, updates, axis=axis, reduction="add")
    return a + b


def sum_to(g: Operand, x: ir.Value) -> Operand:
    """Sum g over the dimensions along which x was broadcast.

    Known ones by their places; where two symbols differ, over those that are 1 at run time.
    """
    dims = g.shape if isinstance(g, ir.Value) else ir.Shape(g.shape)  # an array is known already
    if same_shape(dims, x.shape):
        return g
    if dims is None or x.shape is None:
        raise GraphgenError(f"gradient: the rank of {x.name} is not known before the run")
    extra = len(dims) - len(x.shape)
    pairs = list(zip(dims[extra:], x.shape, strict=True))
    known = [extra + i for i, (a, b) in enumerate(pairs) if b == 1 and not same_dim(a, b)]
    undecided = any(b != 1 and not same_dim(a, b) and not isinstance(b, int) for a, b in pairs)
    if known:
        g = reduce_sum(g, known, keepdims=1)
    if extra:
        g = reduce_sum(g, list(range(extra)), keepdims=0)
    if undecided:
        ones = squeeze(non_zero(equal(shape(x), 1)), [0])
        g = reduce_sum(g, ones, keepdims=1, noop_with_empty_axes=1)
        g.shape = ir.Shape(x.shape)
    return g
