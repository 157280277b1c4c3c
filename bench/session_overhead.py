"""What does a Session call cost on top of bare onnxruntime? At batch 1 x 128 tokens.

Both run the same transformer-like block (d = 256, 8 heads) on the CPU in one process with the same
number of threads, in turn and with the order swapped every time, so that the machine's drift
affects both equally. The ratio of the medians has to stay below 1.05.
"""

import argparse
import json
import platform
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import onnx
import onnx.helper as oh
import onnxruntime as ort
from rich.console import Console
from rich.table import Table

from graphgen.processor import processor
from graphgen.runtime import Session

LIMIT = 1.05
D, HEADS, TOKENS = 256, 8, 128


def block() -> bytes:
    """y = h + W2 gelu(W1 norm(h)), h = x + Wo softmax(q kᵀ / sqrt(head_dim) + mask) v."""
    rng = np.random.default_rng(0)
    weights: dict[str, np.ndarray] = {
        name: rng.standard_normal(shape, np.float32) / np.float32(shape[0] ** 0.5)
        for name, shape in {
            "wq": (D, D), "wk": (D, D), "wv": (D, D), "wo": (D, D),
            "w1": (D, 4 * D), "w2": (4 * D, D),
        }.items()
    }  # fmt: skip
    weights |= {
        "gain": np.ones(D, np.float32),
        "bias": np.zeros(D, np.float32),
        "scale": np.float32((D // HEADS) ** -0.5),
        "split": np.array([0, 0, HEADS, D // HEADS]),
        "merge": np.array([0, 0, D]),
    }
    nodes: list[onnx.NodeProto] = []

    def add(op: str, *inputs: str, to: str, **attributes: object) -> None:
        nodes.append(oh.make_node(op, inputs, [to], **attributes))

    add("LayerNormalization", "x", "gain", "bias", to="n1")
    for name, perm in {"q": (0, 2, 1, 3), "k": (0, 2, 3, 1), "v": (0, 2, 1, 3)}.items():
        add("MatMul", "n1", f"w{name}", to=f"{name}3")
        add("Reshape", f"{name}3", "split", to=f"{name}4")
        add("Transpose", f"{name}4", to=name, perm=perm)
    add("MatMul", "q", "k", to="qk")
    add("Mul", "qk", "scale", to="scaled")
    add("Add", "scaled", "mask", to="masked")
    add("Softmax", "masked", to="p", axis=-1)
    add("MatMul", "p", "v", to="pv")
    add("Transpose", "pv", to="pv4", perm=(0, 2, 1, 3))
    add("Reshape", "pv4", "merge", to="pv3")
    add("MatMul", "pv3", "wo", to="o")
    add("Add", "x", "o", to="h")
    add("LayerNormalization", "h", "gain", "bias", to="n2")
    add("MatMul", "n2", "w1", to="f1")
    add("Gelu", "f1", to="f2")
    add("MatMul", "f2", "w2", to="f3")
    add("Add", "h", "f3", to="y")

    values = {
        name: oh.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)
        for name, shape in {
            "x": ("batch", "seq", D), "mask": ("batch", 1, "seq", "seq"), "y": ("batch", "seq", D),
        }.items()
    }  # fmt: skip
    initializers = [onnx.numpy_helper.from_array(np.asarray(w), k) for k, w in weights.items()]
    graph = oh.make_graph(
        nodes, "block", [values["x"], values["mask"]], [values["y"]], initializers
    )
    model = oh.make_model(graph, opset_imports=[oh.make_opsetid("", 20)], ir_version=9)
    onnx.checker.check_model(model)
    return model.SerializeToString()


def measure(path: Path, threads: int, runs: int) -> dict[str, float]:
    """Median milliseconds of each way to run the block, calls interleaved."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    bare = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    session = Session(path, provider="cpu", threads=threads)
    feeds = {
        "x": np.random.default_rng(1).standard_normal((1, TOKENS, D), np.float32),
        "mask": np.triu(np.full((1, 1, TOKENS, TOKENS), -1e4, np.float32), 1),
    }
    bound = session.bind(feeds, {"y": np.zeros((1, TOKENS, D), np.float32)})
    calls = {
        "onnxruntime": lambda: bare.run(None, feeds),
        "Session": lambda: session(**feeds),
        "Session.bind": bound,
    }
    np.testing.assert_array_equal(calls["onnxruntime"]()[0], calls["Session"]()[0])
    times: dict[str, list[int]] = {name: [] for name in calls}
    order = list(calls)
    for turn in range(runs + 10):
        for name in order:
            start = time.perf_counter_ns()
            calls[name]()
            if turn >= 10:  # the first ones warm up
                times[name].append(time.perf_counter_ns() - start)
        order.reverse()
    return {name: float(np.median(t)) / 1e6 for name, t in times.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="a model with inputs x and mask of these shapes")
    parser.add_argument("--threads", type=int, default=1, help="threads of each session (1)")
    parser.add_argument("--runs", type=int, default=500, help="timed calls of each kind (500)")
    parser.add_argument("--save", type=Path, metavar="JSON", help="write the figures here too")
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        path = args.model or Path(folder) / "block.onnx"
        if not args.model:
            path.write_bytes(block())
        medians = measure(path, args.threads, args.runs)
    bare = medians["onnxruntime"]
    table = Table(title=f"1 x {TOKENS} tokens, d = {D}, threads: {args.threads}")
    for heading in ("call", "median ms", "ratio"):
        table.add_column(heading, justify="left" if heading == "call" else "right")
    for name, milliseconds in medians.items():
        table.add_row(name, f"{milliseconds:.3f}", f"{milliseconds / bare:.3f}")
    Console().print(table)
    if args.save:
        machine = f"{processor()}, {platform.system()}, onnxruntime {ort.__version__}"
        results = {"machine": machine, "threads": args.threads, "median_ms": medians}
        args.save.write_text(json.dumps(results, indent=2) + "\n")
    if medians["Session"] / bare >= LIMIT:
        print(f"Session costs {medians['Session'] / bare:.3f} of bare; the limit is {LIMIT}")
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
