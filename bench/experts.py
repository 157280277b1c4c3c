"""What do 8 experts cost, 2 for each row: gathered, all computed, or by onnxruntime's own operator?

`nn.MixtureOfExperts` sorts rows by expert, so each expert computes its own. The other ways compute
every expert on all rows and weight the results, by zero for most, or call com.microsoft's MoE. All
have the same weights, 256 features and an inner size of 512 with SwiGLU, and run on the CPU in
turn, each round in another order. Exit 3 if the results differ, or if gathered rows take longer
than one of the others by 3 % at 16 rows or more.
"""

import argparse
import json
import platform
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx.helper as oh
import onnx.numpy_helper as numpy_helper
import onnxruntime as ort
from rich.console import Console
from rich.table import Table

import graphgen as gg
from graphgen import nn, ops
from graphgen.measure.latency import TIE, measure
from graphgen.nn.module import initialize
from graphgen.processor import processor

D, HIDDEN, EXPERTS, K = 256, 512, 8, 2
ROWS = (1, 16, 128, 1024)


class AllOfThem(nn.MixtureOfExperts):
    """The same sum with every expert on all rows, as one product of three axes each."""

    def __call__(self, x: Any) -> Any:  # (N, D)
        up, gate, down = (
            ops.stack([getattr(f, name).weight for f in self.experts])
            for name in ("up", "gate", "down")
        )
        scores, chosen = ops.top_k(self.router(x), self.k)
        each = ops.one_hot(chosen, EXPERTS) * ops.unsqueeze(ops.softmax(scores), [2])  # (N, k, E)
        weights = ops.transpose(ops.reduce_sum(each, [1], keepdims=0), perm=[1, 0])  # (E, N)
        y = (ops.silu(ops.matmul(x, gate)) * ops.matmul(x, up)) @ down  # (E, N, D)
        return ops.reduce_sum(y * ops.unsqueeze(weights, [2]), [0], keepdims=0)


def operator(weights: dict[str, Any]) -> bytes:
    """com.microsoft's MoE; gates and the other half of SwiGLU are interleaved."""

    def stacked(name: str) -> Any:
        return np.stack([weights[f"experts.{i}.{name}.weight"].T for i in range(EXPERTS)])

    pairs = np.stack([stacked("gate"), stacked("up")], 2).reshape(EXPERTS, 2 * HIDDEN, D)
    held = {"router": weights["router.weight"], "fc1": pairs, "fc2": stacked("down")}
    attributes = {"k": K, "activation_type": "swiglu", "swiglu_fusion": 1, "activation_alpha": 1.0}
    attributes |= {"activation_beta": 0.0, "normalize_routing_weights": 1}
    nodes = [
        oh.make_node("MatMul", ["x", "router"], ["scores"]),
        oh.make_node(
            "MoE", ["x", "scores", "fc1", "", "fc2"], ["y"], domain="com.microsoft", **attributes
        ),
    ]
    x, y = (oh.make_tensor_value_info(name, 1, ["n", D]) for name in "xy")
    arrays = [numpy_helper.from_array(np.ascontiguousarray(a), name) for name, a in held.items()]
    graph = oh.make_graph(nodes, "experts", [x], [y], arrays)
    opsets = [oh.make_opsetid("", 20), oh.make_opsetid("com.microsoft", 1)]
    return bytes(oh.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString())


def contenders(threads: int) -> dict[str, Callable[[Any], Any]]:
    sizes: dict[str, Any] = {"experts": EXPERTS, "k": K, "activation": "silu", "gated": True}
    gathered, every = (
        kind(D, HIDDEN, **sizes, bias=False) for kind in (nn.MixtureOfExperts, AllOfThem)
    )
    weights = {name: p.array for name, p in initialize(gathered).items()}
    found: dict[str, Callable[[Any], Any]] = {}
    for name, module in (("gathered", gathered), ("all computed", every)):
        best = gg.optimize(gg.build(module, weights=weights, x=gg.float32["n", D]))
        session = gg.Session(best, threads=threads)
        found[name] = lambda x, session=session: session(x=x)[0]
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    bare = ort.InferenceSession(operator(weights), options, providers=["CPUExecutionProvider"])
    found["MoE of onnxruntime"] = lambda x: bare.run(None, {"x": x})[0]
    return found


def medians(calls: dict[str, Callable[[Any], Any]], rows: int, seconds: float) -> dict[str, float]:
    """Median milliseconds of each, once their results agree."""
    x = np.random.default_rng(rows).standard_normal((rows, D), np.float32)
    first, *others = (call(x) for call in calls.values())
    for name, y in zip([*calls][1:], others, strict=True):
        difference, limit = np.abs(y - first).max(), 1e-4 * np.abs(first).max()
        if not difference <= limit:  # nor if it is NaN
            print(f"{name}: differs by {difference:.1e} at {rows} rows", file=sys.stderr)
            raise SystemExit(3)
    times = measure([partial(call, x) for call in calls.values()], seconds)
    return dict(zip(calls, np.median(times, axis=0).tolist(), strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1, help="threads of each session (1)")
    parser.add_argument("--seconds", type=float, default=5, help="for each number of rows (5)")
    parser.add_argument("--save", type=Path, metavar="JSON", help="write the figures here too")
    args = parser.parse_args()
    calls = contenders(args.threads)
    found = {rows: medians(calls, rows, args.seconds) for rows in ROWS}
    table = Table("rows", *calls, title=f"median ms, threads: {args.threads}")
    for rows, times in found.items():
        table.add_row(str(rows), *(f"{t:.3f}" for t in times.values()))
    Console().print(table)
    if args.save:
        machine = f"{processor()}, {platform.system()}, onnxruntime {ort.__version__}"
        results = {"machine": machine, "threads": args.threads, "median_ms": found}
        args.save.write_text(json.dumps(results, indent=2) + "\n")
    slower = [
        n for n, t in found.items() if n >= 16 and t["gathered"] > (1 + TIE) * min(t.values())
    ]
    if slower:
        print(f"gathered rows take longer at {', '.join(map(str, slower))} rows")
    return 3 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
