"""Products of many rows, in blocks that stay in the processor's cache."""

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import onnx_ir as ir

from graphgen import ops
from graphgen.graph import present_inputs
from graphgen.match import Engine, PassReport, Rewrite
from graphgen.op import find_op, read_attributes
from graphgen.ops.elementwise import logical_and, mod, where
from graphgen.ops.layout import _reshape, _shape, concat, rank, reshape
from graphgen.ops.reduce import reduce_max, reduce_prod
from graphgen.value import Tensor, Value, adopt, sizes_of

_ROWS, _WEIGHT = 512, 1 << 16
"""The rows of a block, at least, and the elements of a weight from which on blocks are faster."""

_COUNTS = np.arange(3, 65)
"""How many blocks there may be; two are not faster than one."""


def in_blocks(model: ir.Model, engine: Engine) -> PassReport:
    """X W of many rows as a batch of products with one W; the numbers are the same.

    The CPU's kernel takes all rows for each few columns of W, and so reads X again and again from
    memory. It would make one product of such a batch, unless W is transposed with its batch, which
    is of size 1: W as (K, 1, N) moves nothing. The number of blocks is computed at run time.
    """
    made: dict[object, Tensor] = {}
    rule = partial(_blocks, model.graph, made)
    rules = {op: [rule] for op in (ops.matmul, ops.fused_matmul, ops.gemm)}
    return engine.run("in_blocks", model, rules, forward=True)


def _blocks(graph: ir.Graph, made: dict[object, Tensor], node: ir.Node) -> Rewrite | None:
    op, given = find_op(node), present_inputs(node)
    if op is None or node.graph is not graph or len(given) != 2:
        return None
    (x, w), flags = map(adopt, given), read_attributes(op, node)
    turned = any(flags.get(name) for name in ("transA", "transBatchA", "transBatchB"))
    if turned or given[1].const_value is not None or given[0].dtype is not ir.DataType.FLOAT:
        return None
    sizes, weight = sizes_of(x), [d for d in sizes_of(w) or () if isinstance(d, int)]
    if sizes is None or len(sizes) < 2 or rank(w) != 2 or len(weight) != 2:
        return None
    rows = tuple(d if isinstance(d, int) else d.value for d in sizes[:-1])
    if None in rows or math.prod(weight) < _WEIGHT:
        return None
    deep, wide = weight[::-1] if flags.get("transB") else weight

    def once(key: object, make: Callable[[], Tensor]) -> Tensor:
        """What `make` records, unless a product before has it."""
        old = made.get(key)
        if not isinstance(old, Value) or getattr(old.value.producer(), "graph", None) is not graph:
            made[key] = make()
        return made[key]

    count = once(("count", rows), lambda: _count(reduce_prod(_shape(x, end=-1), [0])))
    apart = once(("blocks", rows, deep), lambda: concat(count, np.array([-1, deep]), axis=0))
    batch = once(given[1], lambda: reshape(w, [weight[0], 1, weight[1]]))
    kept = {name: flags[name] for name in ("alpha", "transB") if name in flags}
    y = ops.fused_matmul(_reshape(x, apart), batch, **kept, transBatchB=1)
    if len(rows) == 1:
        y = reshape(y, [-1, wide])
    else:
        whole = once(("whole", rows, wide), partial(_with_last, x, wide))
        y = _reshape(y, whole, allowzero=1)
    inputs = [*given, *(v.value for v in made.values() if isinstance(v, Value))]
    return Rewrite(y, inputs, f"{' x '.join(map(str, rows))} rows", may_share=True)


def _with_last(x: Tensor, wide: int) -> Tensor:
    """The sizes of x, but this as the last one."""
    return concat(_shape(x, end=-1), np.array([wide]), axis=0)


def _count(rows: Tensor) -> Tensor:
    """How many blocks, from the number of rows, int64[1]; 1 if none of _COUNTS divides it."""
    fits = logical_and(mod(rows, _COUNTS) == 0, rows >= _COUNTS * _ROWS)
    return reduce_max(where(fits, _COUNTS, np.array(1)), [0])
