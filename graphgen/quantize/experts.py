"""Experts in few bits: both weights of all experts, which one operator multiplies."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir

from graphgen import ops
from graphgen.bits import Bits, Blocks, joined, layout_of, to_blocks
from graphgen.errors import GraphgenError
from graphgen.graph import bytes_of, constant, present_inputs
from graphgen.infer import describe
from graphgen.match import Refusal, Rewrite
from graphgen.measure.accuracy import relative
from graphgen.op import is_a, read_attributes
from graphgen.operands import Array
from graphgen.ops.experts import quantized_experts
from graphgen.places import where_is
from graphgen.quantize.effect import Layer
from graphgen.targets import Target
from graphgen.value import Value, adopt
from graphgen.version import minor

Treated: TypeAlias = tuple[list[Layer], Refusal | Callable[[], Rewrite]]
"""The layers of experts, and their rewrite, or why they stay in float."""

Keep: TypeAlias = Callable[[str, Mapping[str, Array]], dict[str, ir.Value]]
"""Makes weights of a graph, called after one, of arrays by their roles: `Spool.weights`."""

Stack: TypeAlias = Callable[[], Iterable[Blocks | None]]
"""Makes the blocks of the weight of each expert."""

_FIRST = (1, 32)  # version whose kernel of the operator was compared with its body
_SMALLEST = 16  # block
_WEIGHTS = (2, 4)  # which inputs of the operator
_LARGEST = 32  # block of eight bits: their kernel rounds in blocks of the same size what it reads


def experts_of(model: ir.Model) -> Iterator[ir.Node]:
    """The nodes of experts, in the order of the graph."""
    return (node for node in model.graph.all_nodes() if is_a(node, ops.mixture_of_experts))


def weights_of(node: ir.Node) -> list[ir.Value]:
    """Both weights of experts."""
    return [value for index in _WEIGHTS if (value := node.inputs[index]) is not None]


def scores_of_experts(model: ir.Model) -> set[ir.Value]:
    """What experts are chosen by: their scores, and all behind the product that these come from."""
    found, left = set[ir.Value](), [node.inputs[1] for node in experts_of(model)]
    while left:
        value = left.pop()
        if value is None or value in found:
            continue
        found.add(value)
        node = value.producer()
        if node is not None and not is_a(node, ops.matmul) and not is_a(node, ops.gemm):
            left += node.inputs
    return found


def layers_of(node: ir.Node, scheme: str) -> list[Layer]:
    """A layer for each weight, with the bytes that it has in float."""
    found = []
    for value in weights_of(node):
        tensor = value.const_value
        shape = () if tensor is None else tuple(tensor.shape.numpy())
        size = 0 if tensor is None else bytes_of(tensor)
        name = str(value.name)
        found.append(Layer(name, where_is(node), node.op_type, shape, scheme, 0.0, "weight", size))
    return found


def obstacle(node: ir.Node, scheme: str, profile: Target) -> str:
    """Why experts stay in float, or ""."""
    for value in weights_of(node):
        tensor = ir.convenience.get_const_tensor(value)
        if tensor is None or value.is_graph_input():
            return f"its weight is {describe(value)}, not a constant"
        if tensor.dtype is not ir.DataType.FLOAT or len(tensor.shape) != 3 or not tensor.size:
            return f"its weight is {describe(value)}, not float32 of three dimensions"
        if len(value.uses()) != 1:
            return f"{value.name} is read elsewhere, too"
        if tensor.shape.numpy()[2] % _SMALLEST:
            return f"{value.name} has rows of {tensor.shape[2]} weights, not whole blocks of 16"
    if scheme == "weights8":
        return "the kernel of experts in eight bits rounds what they read: choose int8 or int4"
    op = quantized_experts
    kernels = op.name in profile.kernels.get(op.domain, {})
    if profile.name != "cpu" or not kernels or minor(profile.runtime) < _FIRST:
        return (
            f"{profile} has no kernel of {op.name} that is known to be right; onnxruntime 1.32 has"
        )
    return ""


def treat(
    who: str,
    node: ir.Node,
    scheme: str,
    size: int,
    level: int,
    limit: float,
    keep: Keep,
) -> Treated:
    """Experts in blocks of at most `size` weights, as large as rows of both have whole ones."""
    layers = layers_of(node, scheme)
    bits: Bits = 4 if scheme == "int4" else 8
    size = math.gcd(size if bits == 4 else _LARGEST, *(layer.shape[2] for layer in layers))
    made = list[dict[str, ir.Value]]()
    for layer, index in zip(layers, _WEIGHTS, strict=True):
        blocks = _rounded(who, node, index, layer, size, bits)
        if not layer.error <= limit:
            return layers, Refusal(f"its relative error is {layer.error:.3g}, above {limit:.3g}")
        made.append(_kept(layer, blocks, keep))

    errors = ", ".join(f"{layer.error:.3g}" for layer in layers)
    why = f"{scheme}, relative errors of its weights {errors}"
    return layers, partial(_rewritten, node, made, size, bits, level, why)


def kept(who: str, node: ir.Node, stacks: Sequence[Stack], level: int, keep: Keep) -> Treated:
    """Experts that were stored in few bits; `stacks` make the blocks of both.

    They are as they were, in blocks of the largest size that both have. Where the kernel has no
    blocks such as theirs, because of minima, an order of columns or several forms, it is given
    eight bits.
    """
    wholes = [_whole(stack) for stack in stacks]
    bits: Bits = 4 if all(x is not None and x.bits == 4 for x in wholes) else 8
    layers, found = layers_of(node, f"{bits} bits"), list[dict[str, ir.Value]]()
    sizes = [_LARGEST if x is None else x.integers.shape[2] * 8 // x.bits for x in wholes]
    size = math.gcd(*sizes, *(layer.shape[2] for layer in layers))
    for layer, index, whole in zip(layers, _WEIGHTS, wholes, strict=True):
        if whole is not None:
            blocks = whole.divided(size, bits)
        else:
            blocks = _rounded(who, node, index, layer, size, bits)
            layer.reason = (
                "no kernel of experts reads the minima, the order of columns or the several forms "
                "of blocks that it has"
            )
        found.append(_kept(layer, blocks, keep))
    why = f"{bits} bits, as the checkpoint has them"
    return layers, partial(_rewritten, node, found, size, bits, level, why)


def _whole(stack: Stack) -> Blocks | None:
    """The blocks of all experts, or None if they cannot be one array."""
    parts = [*stack()]
    blocks = [part for part in parts if part is not None]
    return joined(blocks, alternate=False) if len(blocks) == len(parts) else None


def _rounded(who: str, node: ir.Node, index: int, layer: Layer, size: int, bits: Bits) -> Blocks:
    """The weight of all experts in blocks; the layer gets its error."""
    weight = constant(node.inputs[index])
    assert weight is not None
    if not all(np.isfinite(expert).all() for expert in weight):
        raise GraphgenError(f"{who}: the weight {layer.name} is not finite; train it again")
    parts = [to_blocks(expert, bits=bits, block_size=size) for expert in weight]  # one at a time
    layer.error = relative((w, x.dequantized()) for w, x in zip(weight, parts, strict=True))
    whole = joined(parts, alternate=False)
    assert whole is not None  # all have one form
    return whole


def _kept(layer: Layer, blocks: Blocks, keep: Keep) -> dict[str, ir.Value]:
    """The weights of a layer's integers, each (experts, rows, bytes or blocks of a row)."""
    arrays = layout_of(blocks, False)
    shaped = {role: array.reshape(*layer.shape[:2], -1) for role, array in arrays.items()}
    layer.bytes_after = sum(array.nbytes for array in shaped.values())
    return keep(layer.name, shaped)


def _rewritten(
    node: ir.Node,
    made: Sequence[Mapping[str, ir.Value]],
    size: int,
    bits: Bits,
    level: int,
    why: str,
) -> Rewrite:
    """The node as one whose weights are these integers."""
    given: list[Any] = [None if v is None else adopt(v) for v in [*node.inputs, None][:6]]
    x, scores, _, inner_bias, _, outer_bias = given
    inner, outer = ([Value(part) for part in weight.values()] for weight in made)
    attributes = read_attributes(ops.mixture_of_experts, node)
    normalized = attributes["normalize_routing_weights"]
    y = quantized_experts(
        x,
        scores,
        inner[0],
        inner[1],
        inner_bias,
        outer[0],
        outer[1],
        outer_bias,
        inner_zeros=inner[2],
        outer_zeros=outer[2],
        weights=None if normalized else ops.softmax(scores),  # else the kernel normalizes
        expert_weight_bits=bits,
        block_size=size,
        accuracy_level=level,
        **attributes,
    )
    return Rewrite(y, present_inputs(node), why)
