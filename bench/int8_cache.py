"""How much faster is attention over a long text if keys and values are int8?

The attentions of several layers of a decoder, each with a cache of its own, as `build --kv int8`
writes them, as `generate` reads them by products of integers, and in float32: one token after N,
all in one process, in turn. Several layers, because one cache alone stays in the processor's. Times
are over that of float32, higher is faster, by the operator and by products; the error is
√(Σ (ŷ - y)² / Σ y²) of the attention's output, for normally distributed numbers. Last comes how
long products take over the operator after 4,096 positions: graphgen/targets/int8_cache.json.
"""

import argparse
import json
import sys
import time
from collections import defaultdict
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.helper as oh
import onnx_ir as ir
import onnxruntime as ort
from rich.console import Console
from rich.table import Table

from graphgen.export.write import to_bytes
from graphgen.passes.integer_attention import attend_by_products
from graphgen.processor import processor
from graphgen.runtime import Session

SIZES = {128: ((16, 2), (32, 8), (16, 8), (12, 12)), 64: ((14, 2), (32, 8), (16, 8), (12, 12))}
SHAPES = [(*heads, features) for features, each in SIZES.items() for heads in each]
LENGTHS = (1024, 4096, 16384)
LARGEST = 4.0  # standard deviations that fit into int8
FLOAT, INT8, INT32 = 1, 3, 6
FORMS = ("float32", "int8", "products")
CACHE = 400e6  # bytes of all caches in float32, at most


def attention(sizes: tuple[int, int, int], layers: int, form: str, threads: int) -> Session:
    """All layers, which read the same queries, and each its own cache."""
    heads, groups, size = sizes
    few = form != "float32"
    cache, quantized = (INT8 if few else FLOAT), [""] * 5 + ["one", "one"]
    inputs = [oh.make_tensor_value_info("q", FLOAT, ["B", "T", heads * size])]
    inputs += [oh.make_tensor_value_info(n, FLOAT, ["B", "T", groups * size]) for n in "kv"]
    inputs += [oh.make_tensor_value_info("held", INT32, ["B"])]
    inputs += [oh.make_tensor_value_info("total", INT32, [])]
    nodes, outputs, read = [], [], ["q", "k", "v"]
    how: dict[str, Any] = {"num_heads": heads, "kv_num_heads": groups}
    if few:  # as graphgen.passes.decoding writes them: the operator's own scales are 1
        read = [f"{n}s" for n in "qkv"]
        nodes = [oh.make_node("Mul", [n, f"by_{n}"], [f"{n}s"]) for n in "qkv"]
        how |= {"k_quant_type": "PER_TENSOR", "v_quant_type": "PER_TENSOR", "kv_cache_bit_width": 8}
    for i in range(layers):
        past = [f"k{i}", f"v{i}"]
        inputs += [oh.make_tensor_value_info(n, cache, ["B", groups, "C", size]) for n in past]
        own = [*read, *past, "held", "total", *(quantized if few else [])]
        made = [f"{'a' if few else 'y'}{i}", *(f"o{n}" for n in past)]
        nodes.append(oh.make_node("GroupQueryAttention", own, made, domain="com.microsoft", **how))
        nodes += [oh.make_node("Mul", [made[0], "by_y"], [f"y{i}"])] * few
        outputs += [oh.make_tensor_value_info(f"y{i}", FLOAT, None)]
        outputs += [oh.make_tensor_value_info(n, cache, None) for n in made[1:]]
    unit = LARGEST / 127
    wide, thin = (np.ones(n * size, np.float32) for n in (heads, groups))
    weights = {"by_q": wide * unit, "by_y": wide * unit, "by_k": thin / unit, "by_v": thin / unit}
    weights = {n: x.astype(np.float32) for n, x in {**weights, "one": np.ones(1)}.items()}
    arrays = [onnx.numpy_helper.from_array(x, n) for n, x in weights.items() if few]
    opsets = [oh.make_opsetid("", 23), oh.make_opsetid("com.microsoft", 1)]
    graph = oh.make_graph(nodes, "g", inputs, outputs, arrays)
    proto = oh.make_model(graph, opset_imports=opsets, ir_version=10)
    model = ir.from_proto(proto)
    if form == "products":
        model = attend_by_products(model, lambda queries, features: True)
    return Session(to_bytes(model), provider="cpu", threads=threads)


def measure(
    sizes: tuple[int, int, int], length: int, rounds: int, clock: Any, threads: int = 1
) -> dict[str, Any]:
    """How many times as fast as float32 both forms of int8 are, their errors, and ms a layer."""
    heads, groups, size = sizes
    rng, capacity = np.random.default_rng(0), length + 16
    each = 2 * groups * capacity * size * 4
    layers = int(np.clip(CACHE / each, 1, 24))
    new = {
        n: rng.standard_normal((1, 1, w * size), np.float32)
        for n, w in zip("qkv", (heads, groups, groups), strict=True)
    }
    new |= {"held": np.array([length], np.int32), "total": np.array(length + 1, np.int32)}
    one = {kind: rng.standard_normal((1, groups, capacity, size), np.float32) for kind in "kv"}
    runs, outputs = {}, {}
    for name in FORMS:
        few = name != "float32"
        session = attention(sizes, layers, name, threads)
        unit = LARGEST / 127
        made = {
            k: np.rint(x / unit).clip(-128, 127).astype(np.int8) if few else x
            for k, x in one.items()
        }
        if name == "products":
            made["k"] = made["k"].view(np.uint8) ^ 128
        past = {f"{kind}{i}": made[kind].copy() for i in range(layers) for kind in "kv"}
        bound = session.bind({**new, **past}, {f"o{n}": x for n, x in past.items()})
        outputs[name] = bound()[0].copy()
        runs[name] = bound
    took: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, bound in runs.items():
            start = clock()
            bound()
            took[name].append(clock() - start)
    ms = {name: float(np.median(t)) * 1e3 / layers for name, t in took.items()}
    a = outputs["float32"].astype(np.float64)
    error = {n: float(np.linalg.norm(a - outputs[n]) / np.linalg.norm(a)) for n in FORMS[1:]}
    times = {n: ms["float32"] / ms[n] for n in FORMS[1:]}
    return {"times": times, "error": error, "ms": ms, "layers": layers}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=25, help="timed calls of each form (25)")
    parser.add_argument("--cpu-time", action="store_true", help="the processor's time: others run")
    parser.add_argument("--threads", type=int, default=1, help="of each session (1)")
    parser.add_argument("--save", type=Path, metavar="JSON", help="write the figures here too")
    parser.add_argument(
        "--table",
        type=Path,
        metavar="JSON",
        help="write the last column into it, for this kind",
    )
    args = parser.parse_args()
    if args.cpu_time and args.threads > 1:
        parser.error("--cpu-time adds up the time of all threads: leave it out with --threads")

    machine = f"{processor()}, onnxruntime {ort.__version__}, threads: {args.threads}"
    columns = (f"after {n:,}" for n in LENGTHS)
    table = Table("heads, of keys, features", *columns, "over the operator", title=machine)
    results: dict[str, Any] = {"machine": machine}
    clock = time.process_time if args.cpu_time else time.perf_counter
    ratios: dict[str, dict[str, float]] = defaultdict(dict)
    for sizes in SHAPES:
        found = [measure(sizes, length, args.rounds, clock, args.threads) for length in LENGTHS]
        title = ", ".join(map(str, sizes))
        results[title] = dict(zip(map(str, LENGTHS), found, strict=True))
        share = found[1]["ms"]["products"] / found[1]["ms"]["int8"]
        both = (
            f"{x['times']['int8']:.2f}, {x['times']['products']:.2f} ({x['error']['products']:.4f})"
            for x in found
        )
        table.add_row(title, *both, f"{share:.2f}")
        ratios[str(sizes[2])][str(sizes[0] // sizes[1])] = round(share, 2)
    Console().print(table)
    if args.save:
        args.save.write_text(json.dumps(results, indent=2) + "\n")
    if args.table:
        known = json.loads(args.table.read_text()) if args.table.exists() else {}
        ordered = {d: dict(sorted(x.items(), key=lambda n: int(n[0]))) for d, x in ratios.items()}
        known[processor().int8] = {"machine": machine, "date": str(date.today()), "ratios": ordered}
        args.table.write_text(json.dumps(known, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
