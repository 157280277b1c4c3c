"""x[...] on values is x[...] on arrays: NumPy's result, or an error at the line."""

import re
from typing import Any

import numpy as np
import pytest
from small_models import run_plain

import graphgen as gg
from graphgen import ops
from graphgen.errors import GraphgenError

X = np.arange(2 * 3 * 4, dtype=np.float32).reshape(2, 3, 4)
I = np.array([2, 0, -1])  # noqa: E741
M = np.array([True, False, True])
NAMED = {"x": gg.float32["a", "b", "c"], "i": gg.int64["k"], "m": gg.bool_["b"]}
KNOWN = {"x": gg.float32[2, 3, 4], "i": gg.int64[3], "m": gg.bool_[3]}

KEYS = """
0 | -1 | 1, 2 | 1, 2, 3 | -2, -3, -4 | :, 1 | ..., 1 | 0, ..., 1 | ... | :, :, -1 | np.int64(1)
np.uint8(1), 2 | 1: | :1 | :-1 | -2: | ::2 | ::-1 | :, ::-1 | :, ::-2 | :, 2:0:-1 | :, 5:0:-1
:, 1:-1 | :, -9:9 | :, -9::-1 | :, -3::-1 | :, -4::-1 | :, -4:9:-2 | :, -1:-3:-1 | :, :9:-1
:, :2**31 - 1:-1 | :, :2**63 - 1:-1 | :, :2**70:-1 | :, 2:2 | :, 3:1 | None | :, None, ..., None
None, 0, None | ..., None, ::2 | [0] | [-1, 0] | :, [2, 0] | :, np.array([[0], [2]]) | :, I
np.array(1) | [] | 0, [1, 2] | [0, 1], [1, 2] | [0, 1], :, [1, 2] | :, [0, 1], [1, 2]
[[0], [1]], [1, 2] | :, None, [0, 2] | 0, :, [1, 3] | None, [0, 1], [1, 2] | :, M | M[:2]
np.array([True, False]), 1 | x > 3 | x[..., 0] > 0 | :, m | 0, m | i % 2 | :, i | 0, i, i | :, i, i
i[1] | i[:, None] % 2, i | i[1:2], ..., 0 | :, i[0]: | :, i[2]::-1 | :, : i[0] : 2
x.shape[0] - 1 | :, x.shape[1] // 2 : | :, : x.shape[1] - 1 | :, -x.shape[0] :: -1
:, -x.shape[0] - 2 :: -1 | :, x.shape[0] :: -1 | ..., x.shape[1] - 4 : 0 : -1
:, i.astype(np.int32) | i % 2, x.shape[1] - 1 | :, i, x.shape[0]
np.array([[True, False, True], [False, True, True]])
:, [0, 1], ..., [1, 2] | :, i, ..., i | :, 1, ..., [0, 2] | [0, 1], ..., [1, 2], [0, 3]
"""


def at(key: str) -> Any:
    return eval(f"lambda x, i, m: x[{key}]", {"np": np, "I": I, "M": M})


@pytest.mark.parametrize(
    "key", [key.strip() for key in re.split(r" \| |\n", KEYS) if key.strip(" |")]
)
def test_a_key_means_what_it_does_in_numpy(key: str) -> None:
    feeds, function = {"x": X, "i": I, "m": M}, at(key)
    wanted = np.asarray(function(**feeds))
    for inputs in (NAMED, KNOWN):
        if inputs is NAMED and re.search(r"M|True", key):
            continue  # a mask of a known size next to a name: refused
        model = gg.build(lambda x, i, m: function(x, i, m) * 1, **inputs)
        [got] = run_plain(model, feeds)
        np.testing.assert_array_equal(got, wanted)
        assert len(model.graph.outputs[0].shape or ()) == wanted.ndim


@pytest.mark.parametrize(
    ("key", "problem"),
    [
        ("0, 0, 0, 0", "there are 4 indices for 3 dimensions"),
        ("x > 0, 0", "there are 4 indices for 3 dimensions"),
        ("..., ...", "only one ... can be written"),
        ("2", "axis 0 has 2 places, and 2 is none of them"),
        ("-3", "axis 0 has 2 places, and -3 is none of them"),
        (":, [0, 3]", "axis 1 has 3 places, and 3 is none of them"),
        (":, np.array([-4])", "axis 1 has 3 places, and -4 is none of them"),
        ("1.0", "1.0 is not an index"),
        ("'a'", "'a' is not an index"),
        ("True", "True is not an index"),
        ("[0.5]", "is not an index"),
        ("x", "is not an index"),
        ("{}", "{} is not an index"),
        ("::0", "the step of a slice is 0; it must be an int other than 0"),
        ("::1.5", "the step of a slice is 1.5; it must be an int"),
        ("0.5:", "the start of a slice is 0.5; it must be an int or a size"),
        (":'a'", "the stop of a slice is 'a'; it must be an int or a size"),
        ("True:", "the start of a slice is True; it must be an int or a size"),
        ("i:", "the start of a slice is .*; it must be an int or a size"),
        ("x[0, 0, 0]:", "the start of a slice is .*; it must be an int or a size"),
        ("np.array([True, False, True])", "dimensions 2 and 3 differ"),
        ("m", "dimensions 2 and 3 differ"),
        ("[0, 1], [0, 1, 2]", "shape mismatch|broadcast"),
        ("i, i[:2]", "do not broadcast"),
    ],
)
def test_what_numpy_refuses_is_refused_at_the_line(key: str, problem: str) -> None:
    code = compile(f"def f(x, i, m):\n    return x[{key}]", "program.py", "exec")
    space: dict[str, Any] = {"np": np}
    exec(code, space)
    with pytest.raises(GraphgenError, match=problem) as error:
        gg.build(space["f"], **KNOWN)
    assert str(error.value).endswith("(program.py:2)")


def test_a_value_is_not_written_to() -> None:
    def write(x: Any) -> Any:
        x[0] = 1.0
        return ops.relu(x)

    with pytest.raises(GraphgenError, match=r"cannot be changed; ops.where .*\(test_indexing.py"):
        gg.build(write, x=KNOWN["x"])
