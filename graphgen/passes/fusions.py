"""What each fusion looks for: operators by their bodies, or by recognizers written by hand."""

from functools import cache
from typing import Any

from graphgen import ops
from graphgen.op import Op
from graphgen.ops.contrib import embed_layer_normalization, skip_layer_normalization
from graphgen.recognize.pattern import Pattern, make_pattern

# Operator, number of inputs, float attribute to find or input whose factor is to be found, fixed
# attributes: the formulas of a body. Those with more inputs come first: no bias is left out.
Formula = tuple[Op, int, str | None, dict[str, Any]]

FORMULAS: dict[str, list[Formula]] = {
    "fuse_softmax": [(ops.softmax, 1, None, {}), (ops.log_softmax, 1, None, {})],
    "fuse_norm": [
        (ops.layer_normalization, 3, "epsilon", {}),
        (ops.layer_normalization, 2, "epsilon", {}),
        (ops.rms_normalization, 2, "epsilon", {}),
        # torch's exporter drops 1e-8, onnxscript's optimizer 1e-12.
        (ops.layer_normalization, 3, None, {"epsilon": 0.0}),
        (ops.layer_normalization, 2, None, {"epsilon": 0.0}),
        (ops.rms_normalization, 2, None, {"epsilon": 0.0}),
    ],
    "fuse_activation": [
        (ops.gelu, 1, None, {"approximate": "none"}),
        (ops.gelu, 1, None, {"approximate": "tanh"}),
        (ops.gelu, 1, "x", {"approximate": "none"}),
        (ops.quick_gelu, 1, "alpha", {}),
        (ops.relu, 1, None, {}),
    ],
}

RECOGNIZED: dict[str, tuple[Op, ...]] = {
    "fuse_softmax": (ops.softmax,),
    "fuse_norm": (ops.group_normalization,),
    "fuse_recurrent": (ops.lstm, ops.gru),
    "fuse_rotary": (ops.rotary_embedding,),
    "fuse_attention": (ops.scaled_dot_product_attention,),
    "fuse_sums": (
        ops.gemm,
        embed_layer_normalization,
        skip_layer_normalization,
    ),
}
"""The operators with recognizers written by hand."""


@cache
def patterns(name: str) -> list[Pattern]:
    """The patterns of one pass, made once from the bodies."""
    return [
        make_pattern(op, inputs, unknown=unknown, **attributes)
        for op, inputs, unknown, attributes in FORMULAS[name]
    ]
