"""A process that loads, optimizes and exports files for days needs no more memory than at first."""

import gc
import sys
from pathlib import Path

import onnx
import pytest
from onnx import parser

import graphgen as gg

SMALL = """<ir_version: 10, opset_import: ["": 23]>
g (float[n, {size}] x) => (float[n, {size}] y) {{
    s = Shape (x) r = Reshape (x, s) m = Mul (r, r) t = Tanh (m) y = Softmax <axis = -1> (t)
}}"""
WARM, LOOPS = 10, 60


@pytest.mark.parametrize("whole", [True, False])
def test_nothing_stays(tmp_path: Path, whole: bool) -> None:
    """Counted in blocks of Python's memory; a file that is not `whole` is refused."""
    path, counts = tmp_path / "model.onnx", list[int]()
    for i in range(WARM + LOOPS):
        proto = parser.parse_model(SMALL.format(size=i + 2))
        if not whole:
            proto.graph.node[-1].input[0] = "missing"
        onnx.save(proto, path)
        try:
            gg.export(gg.optimize(gg.load(path), target="cpu"), tmp_path / "out.onnx")
        except gg.GraphgenError:
            assert not whole
        if i + 1 in (WARM, WARM + LOOPS):
            gc.collect()
            counts.append(sys.getallocatedblocks())
    assert counts[1] - counts[0] < LOOPS, counts
