"""Where the first value that is not finite is made, and what is no cause: masks, later values."""

import numpy as np
import onnx.parser
import pytest

from graphgen.runtime import Session
from graphgen.train.nonfinite import find_not_finite


def cause(body, **feeds):
    """What is found in a graph from x and y, float[n], to z."""
    model = onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["" : 20]>
        g (float[n] x, float[n] y) => (float[n] z)
        <float[1] mask = {{-inf}}, float big = {{1e30}}> {{ {body} }}""")
    for i, node in enumerate(model.graph.node):
        node.name = f"node{i}"
    arrays = {name: np.array(values, np.float32) for name, values in feeds.items()}
    return find_not_finite(model.SerializeToString(), arrays, Session)


SOFTMAX = "k = Cast <to=9> (x) m = Where (k, y, mask) z = Softmax <axis=0> (m)"


@pytest.mark.parametrize(
    ("body", "x", "y", "found"),
    [
        ("a = Add (x, y) z = Mul (a, big)", [1, 2], [3, 4], None),
        ("a = Log (x) z = Exp (a)", [0, 1], [0, 0], None),  # -inf on the way, and finite again
        (
            "b = Log (y) a = Log (x) z = Sqrt (a)",
            [-1, 1],
            [1, 1],
            "'a', made by Log in node1, is N",
        ),
        (
            "a = Mul (x, big) b = Mul (a, a) z = Sub (b, b)",
            [9],
            [1],
            "'b', made by Mul in node1, is",
        ),
        ("b = Log (y) z = Mul (x, big)", [1e30], [0], "'z', made by Mul in node1, is inf"),
        (SOFTMAX, [0, 1], [5, 6], None),
        (SOFTMAX, [0, 0], [5, 6], "'z', made by Softmax in node2, is NaN"),
        ("z = Add (x, y)", [0, 1], [np.nan, 6], "y, which was fed, is not finite"),
    ],
)
def test_the_first_value_is_found(body, x, y, found):
    result = cause(body, x=x, y=y)
    assert (result is None) if found is None else result.startswith(found), result
