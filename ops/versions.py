"""What the schemas of standard operators do not say of their versions."""

from collections.abc import Callable

import onnx_ir as ir


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


_REDUCTION, _MODE = _text("reduction"), _text("mode")

REDEFINED: dict[str, tuple[int, Callable[[ir.Node], bool]]] = {
    "AveragePool": (19, lambda node: bool(node.attributes.get_int("ceil_mode", 0))),
    "GridSample": (20, lambda node: _MODE(node) in ("bilinear", "bicubic", "linear", "cubic")),
    "GroupNormalization": (21, lambda node: True),  # scale and bias per channel, not per group
    "Hardmax": (13, lambda node: node.attributes.get_int("axis", 1) != -1),
    "Mod": (28, lambda node: _may_be_float(node) and not node.attributes.get_int("fmod", 0)),
    "Pad": (19, lambda node: _MODE(node) == "wrap"),
    "Resize": (19, lambda node: "half" in _text("coordinate_transformation_mode")(node)),
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

PASSED_OVER = {
    "GroupNormalization": "its scale and bias are per group before opset 21",
    "Hardmax": "it takes all axes from `axis` on as one before opset 13",
}
"""What onnx's converter does not change, although the meaning changes."""
