"""Dropout whose mask is a function of (seed, step, site, index), not of hidden state."""

from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_shape_inference import registry

from graphgen.errors import GraphgenError
from graphgen.graph import constant
from graphgen.infer import DOMAIN, describe
from graphgen.op import composite
from graphgen.ops.elementwise import identity, where
from graphgen.ops.integers import bit_shift, bitwise_xor
from graphgen.ops.layout import arange, cast, expand, reshape_like, shape, size
from graphgen.traits import Trait
from graphgen.value import Tensor, Value

_UINT32, _INT64, _FLOAT = ir.DataType.UINT32, ir.DataType.INT64, ir.DataType.FLOAT


def _times(h: Tensor, factor: int) -> Tensor:
    """The product of two uint32, modulo 2³²; in int64, since ONNX Runtime 1.20 has no such Mul."""
    return cast(cast(h, to=_INT64) * factor, to=_UINT32)


def _mix(h: Tensor) -> Tensor:
    """A bijection of uint32 in which each input bit flips about half of the output bits.

    Constants: C. Wellons' lowbias32, found by search for the lowest bias.
    """
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, None)):
        h = bitwise_xor(h, bit_shift(h, shift, direction="RIGHT"))
        h = h if factor is None else _times(h, factor)
    return h


@composite("Dropout", domain=DOMAIN)
def dropout(x: Tensor, ratio: Tensor, seed: Tensor, step: Tensor, site: Tensor) -> Tensor:
    """x / (1 - ratio) where the hash of (seed, step, site, index) / 2³² ≥ ratio, else 0.

    `ratio` is a scalar of x's dtype; seed, step and site are int64 scalars. A session that starts
    at step n, or computes the forward pass again, sees the same mask.
    """
    return where(_keep(x, ratio, seed, step, site), x / (1.0 - ratio), 0.0)


dropout.whole = True  # so that evaluation can find it and leave it out


@registry.register(DOMAIN, "Dropout", since_version=1)
def _(context: Any, node: ir.Node) -> None:
    """The result is like x; its body, which says so too, has 40 nodes."""
    x, ratio, y = node.inputs[0], node.inputs[1], node.outputs[0]
    assert x is not None and ratio is not None
    if None not in (x.dtype, ratio.dtype) and ratio.dtype != x.dtype:
        raise ValueError(f"ratio is {describe(ratio)}; it must be a scalar of x's dtype")
    y.type, y.shape = x.type, None if x.shape is None else x.shape.copy()


@dropout.vjp
def _(g: Tensor, x: Tensor, ratio: Tensor, seed: Tensor, step: Tensor, site: Tensor) -> Tensor:
    """dx = dropout(g): the same mask and scale, written alike so that both passes share it."""
    return where(_keep(x, ratio, seed, step, site), g / (1.0 - ratio), 0.0)


def _keep(x: Tensor, ratio: Tensor, seed: Tensor, step: Tensor, site: Tensor) -> Tensor:
    """The bool mask, of x's shape."""
    key = _mix(cast(seed, to=_UINT32))
    key = _mix(bitwise_xor(key, cast(step, to=_UINT32)))
    key = _mix(bitwise_xor(key, cast(site, to=_UINT32)))
    # Weyl's sequence spreads the indices over all of uint32, so two keys, which only permute
    # them, do not meet in the same few points.
    index = cast(arange(size(x)) * 0x9E3779B9, to=_UINT32)
    uniform = cast(_mix(bitwise_xor(index, key)), to=_FLOAT)  # times 2³²
    return reshape_like(uniform >= cast(ratio, to=_FLOAT) * 2.0**32, x)


@composite("Dropout", traits=Trait.RANDOM)
def dropout_in_inference(
    x: Tensor,
    ratio: Tensor | None = None,
    training_mode: Tensor | None = None,
    *,
    seed: int | None = None,
) -> Tensor:
    """x: ONNX's own dropout outside training; no graph determines its masks."""
    mode = training_mode if not isinstance(training_mode, Value) else constant(training_mode)
    if training_mode is not None and (mode is None or mode):
        raise GraphgenError(
            "Dropout: its training_mode is or may be set, and its mask is no function of the "
            "graph: export in evaluation mode, and declare dropout with gg.ops.dropout"
        )
    return identity(x)


@dropout_in_inference.output(1)
def _(x: Tensor) -> Tensor:
    """The mask, which keeps everything."""
    return expand(np.array(True), shape(x))
