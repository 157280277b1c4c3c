"""How long do build and optimise take, and does the time grow linearly with the layers?

A pre-norm stack (64 features, 4 heads) is built as primitives and optimised for the CPU at each
depth in turn, several rounds, so that the machine's drift meets all alike. Linear means: the time
per layer at the deepest is at most LIMIT times that at the shallowest.
"""

import argparse
import json
import platform
import statistics
import sys
import time

from rich.console import Console
from rich.table import Table

import graphgen as gg
from graphgen import nn

LIMIT = 1.3


def once(layers: int) -> tuple[float, float, int]:
    """Seconds to build, seconds to optimise, and the number of nodes built."""
    stack = nn.Encoder(64, layers=layers, num_heads=4)
    start = time.perf_counter()
    model = gg.build(stack, primitives=True, x=gg.float32["batch", "seq", 64])
    built = time.perf_counter()
    gg.optimize(model, target="cpu")
    return built - start, time.perf_counter() - built, model.graph.num_nodes()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example: python bench/compile.py --layers 12 48 --rounds 5",
    )
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 48])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    args = parser.parse_args()
    once(1)  # imports, and the patterns, which are made once
    found: dict[int, list[tuple[float, float, int]]] = {n: [] for n in args.layers}
    for _ in range(args.rounds):
        for layers, runs in found.items():
            runs.append(once(layers))
    rows = [
        {
            "layers": layers,
            "nodes": runs[0][2],
            "build_s": statistics.median(r[0] for r in runs),
            "optimize_s": statistics.median(r[1] for r in runs),
        }
        for layers, runs in found.items()
    ]
    per_layer = [(r["build_s"] + r["optimize_s"]) / r["layers"] for r in rows]
    ratio = per_layer[-1] / per_layer[0]
    if args.json:
        print(json.dumps({"machine": platform.processor(), "rows": rows, "per_layer_ratio": ratio}))
    else:
        table = Table(title=f"medians of {args.rounds} rounds, {platform.machine()}")
        for column in ("layers", "nodes", "build s", "optimise s", "ms a layer"):
            table.add_column(column, justify="right")
        for row, each in zip(rows, per_layer, strict=True):
            seconds = (f"{row['build_s']:.2f}", f"{row['optimize_s']:.2f}")
            table.add_row(str(row["layers"]), str(row["nodes"]), *seconds, f"{each * 1e3:.1f}")
        Console().print(table)
        print(f"time per layer, deepest / shallowest: {ratio:.2f} (linear: at most {LIMIT})")
    return 0 if ratio <= LIMIT else 3


if __name__ == "__main__":
    sys.exit(main())
