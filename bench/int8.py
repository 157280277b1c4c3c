"""How should int8 weights be written, so that they are right on every processor, and fast?

One product of float32 activations, quantized as the model runs, with weights in each of the forms
that onnxruntime multiplies: all forms and float32 in one process, in turn. Times are over that of
float32, higher is faster; errors are √(Σ (ŷ - y)² / Σ y²) against float64, on this processor.

    neighbors fit   what graphgen writes: two neighbors sum to ±128 at most
    full range      up to ±127, wrong where pairs of products are added in 16 bits
      + precision   the same with session.x64quantprecision=1
    7 bits          up to ±63
    unsigned        around 128
    weights8        in blocks of 16, times x as it is
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.helper as oh
import onnxruntime as ort
from rich.console import Console
from rich.table import Table

import graphgen as gg
from graphgen.bits import to_rows
from graphgen.export.write import to_bytes
from graphgen.processor import processor
from graphgen.quantize import quantize

SHAPES = (
    (4096, 384, 1536),
    (4096, 384, 384),
    (512, 768, 768),
    (128, 768, 3072),
    (128, 384, 384),
    (1, 768, 3072),
    (1, 2048, 2048),
)
FLOPS = 2e8  # of one timed call, at least


def integers(name: str, w: Any) -> tuple[Any, Any, int]:
    """Weights (K, N) in a form: integers, scales (N,) and their zero point."""
    if name.startswith(("neighbors", "full")):
        rows = to_rows(w.T, full_range=name.startswith("full"))
        return np.ascontiguousarray(rows.integers.T), rows.scales, 0
    zero, largest = (128, 127) if name == "unsigned" else (0, 63)
    scales = (np.abs(w).max(axis=0) / largest).astype(np.float32)
    q = np.rint(w / scales) + zero
    return q.astype(np.uint8 if zero else np.int8), scales, zero


def session(name: str, w: Any) -> Any:
    """The product as a session on one thread."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    if name.endswith("precision"):
        options.add_session_config_entry("session.x64quantprecision", "1")
    if name == "weights8":
        model = gg.build(lambda x: x @ w, x=gg.float32["M", len(w)])
        quantized, _ = quantize(model, "weights8", calibration=())
        return ort.InferenceSession(to_bytes(quantized), options)
    weights, nodes = {"w": w}, [oh.make_node("MatMul", ["x", "w"], ["y"])]
    if name != "float32":
        q, scales, zero = integers(name, w)
        weights = {"w": q, "s": scales, "z": np.array(zero, q.dtype)}
        product = ["q", "w", "a", "s", "o", "z"]
        nodes = [
            oh.make_node("DynamicQuantizeLinear", ["x"], ["q", "a", "o"]),
            oh.make_node("MatMulIntegerToFloat", product, ["y"], domain="com.microsoft"),
        ]
    x, y = (
        oh.make_tensor_value_info(n, 1, ["M", size]) for n, size in zip("xy", w.shape, strict=True)
    )
    arrays = [onnx.numpy_helper.from_array(array, n) for n, array in weights.items()]
    opsets = [oh.make_opsetid("", 17), oh.make_opsetid("com.microsoft", 1)]
    graph = oh.make_graph(nodes, "g", [x], [y], arrays)
    proto = oh.make_model(graph, opset_imports=opsets, ir_version=8)
    return ort.InferenceSession(proto.SerializeToString(), options)


FORMS = (
    "float32", "neighbors fit", "full range", "full range + precision", "7 bits", "unsigned",
    "weights8",
)  # fmt: skip


def measure(shape: tuple[int, int, int], rounds: int, clock: Any) -> dict[str, Any]:
    """For each form, how many times as fast as float32 it is, and its error."""
    m, k, n = shape
    rng = np.random.default_rng(0)
    w, x = rng.standard_normal((k, n), np.float32), rng.standard_normal((m, k), np.float32)
    sessions = {name: session(name, w) for name in FORMS}
    wanted = x.astype(np.float64) @ w
    times: dict[str, list[float]] = {name: [] for name in FORMS}
    for _ in range(rounds):
        for name, one in sessions.items():
            start = clock()
            for _ in range(max(1, int(FLOPS / (2 * m * k * n)))):
                one.run(None, {"x": x})
            times[name].append(clock() - start)
    medians = {name: float(np.median(t)) for name, t in times.items()}
    found = {}
    for name, one in sessions.items():
        error = np.linalg.norm(one.run(None, {"x": x})[0] - wanted) / np.linalg.norm(wanted)
        found[name] = {"times": medians["float32"] / medians[name], "error": float(error)}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=25, help="timed calls of each form (25)")
    parser.add_argument("--cpu-time", action="store_true", help="the processor's time: others run")
    parser.add_argument("--save", type=Path, metavar="JSON", help="write the figures here too")
    args = parser.parse_args()

    machine = f"{processor()}, onnxruntime {ort.__version__}, one thread"
    table = Table("M x K x N", *FORMS[1:], title=machine)
    results: dict[str, Any] = {"machine": machine}
    for shape in SHAPES:
        title = " x ".join(map(str, shape))
        clock = time.process_time if args.cpu_time else time.perf_counter
        found = results[title] = measure(shape, args.rounds, clock)
        cells = (f"{one['times']:.2f} ({one['error']:.4f})" for one in found.values())
        table.add_row(title, *[*cells][1:])
    Console().print(table)
    if args.save:
        args.save.write_text(json.dumps(results, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
