"""Constant folding: the library's pass, which ends with an error where it could leave a node alone.

It is imported when a pass runs: it takes as long as all that `import graphgen` needs.
"""

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
from onnxscript.optimizer import _constant_folding

from graphgen.graph import constant, present_inputs
from graphgen.op import find_op
from graphgen.subgraphs import detach
from graphgen.traits import Trait, has

# It prints a warning for each node that it leaves alone.
logging.getLogger(_constant_folding.__name__).setLevel(logging.ERROR)


class _Folding(_constant_folding.FoldConstantsPass):
    def process_node(self, node: ir.Node, *args: Any, **kwargs: Any) -> Any:
        try:
            found = super().process_node(node, *args, **kwargs)
            self._forget_what_is_no_list_of_sizes(node)
            return found
        except RuntimeError:  # one of its rewrites, such as that of a SplitToSequence
            users = [use.node for value in present_inputs(node) for use in value.uses()]
            detach([user for user in users if user.graph is None])
            return None

    def _prepare_folded_tensor(self, node: ir.Node, output_name: Any, output_array: Any) -> Any:
        """None, so that the node stays, where onnx's reference may differ from the runtime."""
        if not _is_sure(node, output_array):
            return None
        wanted, given = node.outputs[0].dtype, getattr(output_array, "dtype", None)
        if wanted is not None and wanted.is_integer() and given is not None and given.kind in "iu":
            # It sums int32 as int64.
            output_array = output_array if given == wanted.numpy() else None
        return super()._prepare_folded_tensor(node, output_name, output_array)

    def _forget_what_is_no_list_of_sizes(self, node: ir.Node) -> None:
        """It follows sizes through sums, and takes n - 5 for one, and through reshapes.

        It would drop the Abs of the first, and take the first row of [[n], [4]] for n.
        """
        known = self._state.symbolic_value_map
        for value in node.outputs:
            held = known.get(value)
            if isinstance(held, ir.Shape) and (
                value.shape is None or len(value.shape) != 1 or any("-" in str(d) for d in held)
            ):
                del known[value]


def _is_sure(node: ir.Node, result: Any) -> bool:
    """Whether the runtime, too, gives what onnx's reference gives.

    Which number is the largest next to NaN, or the mean of none, each of them answers differently;
    not so what moves numbers, or calculates with two of them. Nor are sums of integers alike that
    a double cannot hold; nor the places in a scalar, which is a vector of one for the runtime; nor
    floats as integers of less than a byte, which the runtime rounds.
    """
    op, operands = find_op(node), [constant(x) for x in node.inputs]
    if has(node, Trait.REDUCES) and operands[0] is not None and np.ndim(result) > operands[0].ndim:
        return False
    whole = getattr(result, "dtype", np.dtype(bool)).kind in "iu"
    if op is not None and whole and has(node, Trait.WHOLE_AS_FLOAT):
        with np.errstate(all="ignore"):
            given = [x.astype(np.float64) for x in operands if x is not None]
            exact = op.compute(given, {})
        return bool(np.all(np.abs(exact) < 1 << 53))
    elementwise = op is not None and not op.composite and has(node, Trait.BROADCASTS)
    if elementwise or (has(node, Trait.MOVES | Trait.GENERATES) and not _chooses(node)):
        return not _rounds_to_bits(node)
    return all(x is None or (_is_tame(x) and (x.size or not np.size(result))) for x in operands)


def _chooses(node: ir.Node) -> bool:
    """Whether it writes the largest or the least of two elements, next to NaN its own choice."""
    return node.attributes.get_string("reduction", "none") in ("max", "min")


def _rounds_to_bits(node: ir.Node) -> bool:
    """Whether it makes integers of less than a byte of floats: the reference cuts fractions off."""
    given, made = (values[0].dtype for values in (present_inputs(node), node.outputs))
    narrow = made is not None and made.is_integer() and made.bitwidth < 8
    return narrow and (given is None or given.is_floating_point())


def _is_tame(x: Any) -> bool:
    """Whether a sum of squares stays finite, and that of integers exact in a double."""
    if x.dtype.kind not in "fiu":
        return True
    squares = float(np.square(x, dtype=np.float64).sum())
    return squares <= np.finfo(x.dtype).max if x.dtype.kind == "f" else squares < 1 << 53


def fold_constants(
    model: ir.Model, limit: int, should_fold: Callable[[ir.Node], bool | None]
) -> bool:
    """Compute what needs no input, with operands and results of at most `limit` elements.

    `should_fold` decides about a node; None leaves it to the library. Returns whether anything has
    changed.
    """
    folding = _Folding(
        shape_inference=False,
        input_size_limit=limit,
        output_size_limit=limit,
        should_fold=should_fold,
    )
    return bool(folding(model).modified)
