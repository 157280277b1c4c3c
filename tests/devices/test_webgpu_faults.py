"""Kernels that the plugin gets wrong or refuses: told when a session opens, and avoided.

If one of them becomes right, its line in graphgen/targets/webgpu.py has to go.
"""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from devices_here import WEBGPU
from small_models import relative_rms

import graphgen as gg
from graphgen.errors import GraphgenError
from graphgen.laboratory.across import across
from graphgen.measure.reference import evaluate

pytestmark = [
    *WEBGPU.marks,
    pytest.mark.filterwarnings("ignore:.*software:graphgen.GraphgenWarning"),
]
RNG = np.random.default_rng(0)
X, PAST = RNG.standard_normal((1, 3, 8), np.float32), RNG.standard_normal((1, 2, 4, 4), np.float32)
IMAGE, LENGTHS = RNG.standard_normal((2, 3, 6, 6), np.float32), np.array([2], np.int32)
ATTEND = "com.microsoft.MultiHeadAttention <num_heads: int = 2>"
GROUP = "com.microsoft.GroupQueryAttention <num_heads: int = 1, kv_num_heads: int = 1, softcap: float = 2.0>"  # noqa: E501
RESIZE = 'Resize <mode: string = "linear", antialias: int = 1>'
KINDS = {"f": "float", "i": "int32", "l": "int64", "?": "bool"}
IMAGE4 = RNG.standard_normal((1, 4, 5, 6), np.float32)


def write(path: Path, call: str, feeds: dict[str, Any], results: str = "y") -> Path:
    """A model of one operator, whose inputs are those that are fed."""
    inputs = ", ".join(f"{KINDS[x.dtype.char]}{[*x.shape]} {name}" for name, x in feeds.items())
    outputs = ", ".join(f"float {name}" for name in results.split())
    text = f"""<ir_version: 8, opset_import: ["": 18, "com.microsoft": 1]>
        g ({inputs}) => ({outputs}) {{ {call} }}"""
    model = onnx.parser.parse_model(text.replace("[] ", " "))
    for output in model.graph.output:
        output.ClearField("type")
    onnx.save(model, path)
    return path


WRONG: dict[str, tuple[str, dict[str, Any]]] = {
    "MultiHeadAttention with a past and without both presents": (
        f"y = {ATTEND} (x, x, x, , , , p, p)",
        {"x": X, "p": PAST},
    ),
    "GroupQueryAttention with a softcap": (
        f"y = {GROUP} (x, x, x, , , n, t)",
        {"x": X, "n": LENGTHS, "t": np.array(3, np.int32)},
    ),
    "ReduceLogSumExp of numbers above 88": (
        "y = ReduceLogSumExp <keepdims = 0> (x)",
        {"x": X * 100},
    ),
    "Slice that goes back from within": (
        "st = Constant <value_ints: ints = [3, 5]> () en = Constant <value_ints: ints = [-9, 9]> ()"
        "ax = Constant <value_ints: ints = [3, 2]> () by = Constant <value_ints: ints = [-2, 1]> ()"
        "y = Slice (x, st, en, ax, by)",
        {"x": RNG.standard_normal((2, 3, 7, 6), np.float32)},
    ),
    "ReduceL2 over no axes": (
        "y = ReduceL2 <noop_with_empty_axes: int = 1> (x)",
        {"x": -np.abs(X)},
    ),
    "Conv of one element with pads at the end": (
        "y = Conv <pads: ints = [0, 0, 0, 2]> (x, w)",
        {"x": IMAGE4, "w": RNG.standard_normal((8, 4, 1, 1), np.float32)},
    ),
    "Resize along the second axis": (
        'n = Constant <value_floats: floats = [1.0, 2.0, 2.0, 1.0]> () y = Resize <mode: string = "linear"> (x, , n)',  # noqa: E501
        {"x": IMAGE4},
    ),
    "Asinh of negative numbers": ("y = Asinh (x)", {"x": np.array([-1e4], np.float32)}),
    "Pow of integers": ("y = Pow (x, x)", {"x": np.array([7, 9], np.int32)}),
}
KEPT = ("Asinh", "Pow", "Resize")
"""Which have no other spelling: they are told after optimizing, too."""


@pytest.mark.parametrize("fault", WRONG)
def test_what_it_gets_wrong_is_told_and_spelled_otherwise(fault: str, tmp_path: Path) -> None:
    call, feeds = WRONG[fault]
    path = write(tmp_path / "m.onnx", call, feeds)
    [wanted] = evaluate(gg.load(path), feeds)
    with pytest.warns(gg.GraphgenWarning, match=f"WebGPU gets 1 {fault} wrong"):
        session = gg.Session(path, provider="webgpu")
    with np.errstate(all="ignore"):
        assert not relative_rms(wanted, session(feeds)[0]) < 1e-7
    best = gg.optimize(gg.load(path), target="webgpu")
    if fault.startswith(KEPT):
        return
    with warnings.catch_warnings(action="error", category=gg.GraphgenWarning):
        warnings.filterwarnings("ignore", ".*software")
        session = gg.Session(best, provider="webgpu")
    assert relative_rms(wanted, session(feeds)[0]) < 1e-6


FAILS: dict[str, tuple[str, dict[str, Any], str]] = {
    "MultiHeadAttention with a mask of padding": (
        f"y = {ATTEND} (x, x, x, , n)", {"x": X, "n": LENGTHS}, "y",
    ),
    "BatchNormalization in training mode": (
        "y, m, v = BatchNormalization <training_mode: int = 1> (x, a, a, a, b)",
        {"x": IMAGE, "a": np.array([1, 2, 3], np.float32), "b": np.array([3, 2, 1], np.float32)},
        "y m v",
    ),
    "Pow that broadcasts along the last axis": (
        "y = Pow (x, b)", {"x": np.abs(X), "b": X[:, :, :1]}, "y",
    ),
    "LayerNormalization with a scale that broadcasts": (
        "y = LayerNormalization (x, b)", {"x": X, "b": X[0, :1, :1]}, "y",
    ),
    "ConvTranspose of three spatial axes": (
        "y = ConvTranspose (x, w)",
        {"x": IMAGE.reshape(1, 2, 3, 6, 6), "w": IMAGE.reshape(2, 2, 3, 3, 6)},
        "y",
    ),
    "MaxPool with indices": (
        "y, m = MaxPool <kernel_shape: ints = [2, 2]> (x)", {"x": IMAGE}, "y m",
    ),
    "Resize with antialias": (
        f"y = {RESIZE} (x, , , s)", {"x": IMAGE, "s": np.array([2, 3, 3, 4])}, "y",
    ),
    "Conv of three spatial axes in groups": (
        "y = Conv <group: int = 2> (x, w)",
        {"x": IMAGE.reshape(1, 2, 3, 6, 6), "w": IMAGE.reshape(4, 1, 3, 3, 6)},
        "y",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAILS)
def test_what_it_refuses_at_the_run_is_told_before(fault: str, tmp_path: Path) -> None:
    call, feeds, results = FAILS[fault]
    path = write(tmp_path / "m.onnx", call, feeds, results)
    with pytest.warns(gg.GraphgenWarning, match=f"WebGPU has no kernel for 1 {fault}, and the run"):
        session = gg.Session(path, provider="webgpu")
    said = r"(not (yet )?(impl|supp)|NOT impl|Only Conv2d|must match|map<|Invalid ShaderModule)"
    with pytest.raises(GraphgenError, match=f"the run failed: .*{said}") as e:
        session(feeds)
    assert "\n" not in str(e.value)
    best = gg.optimize(gg.load(path), target="webgpu")
    if fault.startswith(("Resize", "Conv", "MaxPool")):  # which have no body
        [site] = [site for done in best.report.passes for site in done.sites]
        assert f"refuses {fault}" in site.reason and site.status == "missed"
        return
    for wanted, given in zip(
        evaluate(gg.load(path), feeds), gg.Session(best, provider="webgpu")(feeds), strict=True
    ):
        assert relative_rms(wanted, given) < 1e-6


def test_and_keeps_its_shader_for_other_shapes(tmp_path: Path) -> None:
    """Two nodes, one of which is read as the other."""
    sizes = {"a": (3, 1), "b": (1, 4), "c": (4, 8), "d": (4, 1)}
    feeds = {name: RNG.random(size) < 0.5 for name, size in sizes.items()}
    call = "p = And (a, b) q = And (c, d) y = Cast <to: int = 1> (p) z = Cast <to: int = 1> (q)"
    path = write(tmp_path / "m.onnx", call, feeds, "y z")
    wanted = evaluate(gg.load(path), feeds)
    with pytest.warns(gg.GraphgenWarning, match="gets 2 And that broadcasts along the last axis"):
        session = gg.Session(path, provider="webgpu")
    assert not all(map(np.array_equal, wanted, session(feeds)))
    best = gg.optimize(gg.load(path), target="webgpu")
    with warnings.catch_warnings(action="error", category=gg.GraphgenWarning):
        session = gg.Session(best, provider="webgpu")
    assert all(map(np.array_equal, wanted, session(feeds)))


def test_products_that_would_end_the_process_are_refused(tmp_path: Path) -> None:
    a = RNG.standard_normal((40, 40), np.float32)
    feeds = {"a": a, "b": a, "c": np.array(2, np.float32)}
    path = write(tmp_path / "m.onnx", "y = Gemm (a, b, c)", feeds)
    with pytest.raises(GraphgenError, match="WebGPU's kernel of 1 Gemm with C of rank 0 ends"):
        gg.Session(path, provider="webgpu")
    session = gg.Session(gg.optimize(gg.load(path), target="webgpu"), provider="webgpu")
    assert relative_rms(evaluate(gg.load(path), feeds)[0], session(feeds)[0]) < 1e-6


def test_bisect_names_attention_that_loses_its_past(tmp_path: Path) -> None:
    call, feeds = WRONG["MultiHeadAttention with a past and without both presents"]
    path = write(
        tmp_path / "m.onnx", f"s = Tanh(x) {call.replace('(x', '(s')} z = Tanh(y)", feeds, "z"
    )
    found = across(path, "webgpu", feeds=feeds, output=tmp_path / "found")
    [one] = found.differing
    assert one.operator == "MultiHeadAttention" and one.error > 0.1


def test_empty_inputs_do_not_end_the_process(tmp_path: Path) -> None:
    path = write(tmp_path / "m.onnx", "y = Softmax (x)", {"x": np.zeros((2, 0), np.float32)})
    with pytest.raises(GraphgenError, match="all inputs are empty, and kernels of WebGPU end"):
        gg.Session(path, provider="webgpu")(x=np.zeros((2, 0), np.float32))
