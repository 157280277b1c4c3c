"""The sizes at which a graph is tried."""

import graphgen as gg
from graphgen.measure.feeds import sizes_of


def test_axes_that_torchscript_numbered_are_tried_as_equal() -> None:
    """Without names each input has symbols of its own, and rows of all inputs are as many."""
    model = gg.build(
        lambda x, mask: {"y": -x, "z": -mask},
        x=gg.float32["x_dynamic_axes_1", "x_dynamic_axes_2"],
        mask=gg.float32["mask_dynamic_axes_1", "mask_dynamic_axes_2"],
    )
    rows = {"x_dynamic_axes_1": 6, "mask_dynamic_axes_1": 6}
    assert rows | {"x_dynamic_axes_2": 7, "mask_dynamic_axes_2": 7} in sizes_of(model, 5)
