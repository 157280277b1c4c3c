"""How much faster are experts in few bits, and what do they lose?

The experts of one layer in float32, and as `build --quantize int4` and int8 write them, in turn, in
one process. Times are over that of float32, higher is faster; the error is √(Σ (ŷ - y)² / Σ y²) of
the result, for normally distributed weights and rows.
"""

import argparse
import sys
import time

import numpy as np
import onnxruntime as ort
from rich.console import Console
from rich.table import Table

import graphgen as gg
from graphgen import ops
from graphgen.processor import processor
from graphgen.quantize import Scheme, quantize

SHAPES = ((8, 2, 1024, 1792), (60, 4, 1024, 704), (32, 4, 1440, 1440))
ROWS = (1, 8, 64, 512)
SCHEMES: tuple[Scheme, ...] = ("int4", "int8")


def forms(experts: int, k: int, features: int, hidden: int) -> list[gg.Session]:
    """The layer in float32, in four bits, and in eight."""
    rng = np.random.default_rng(0)
    sizes = (features, experts), (experts, 2 * hidden, features), (experts, features, hidden)
    router, inner, outer = (rng.standard_normal(size, np.float32) for size in sizes)
    inner, outer = inner / np.float32(features**0.5), outer / np.float32(hidden**0.5)
    how = {"activation_type": "swiglu", "swiglu_fusion": 1, "normalize_routing_weights": 1}
    model = gg.build(
        lambda x: ops.mixture_of_experts(x, x @ router, inner, None, outer, None, k=k, **how),
        x=gg.float32["rows", features],
    )
    few = [quantize(model, scheme, calibration=())[0] for scheme in SCHEMES]
    return [gg.Session(one, provider="cpu", threads=1) for one in (model, *few)]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15, help="timed calls of each form (15)")
    parser.add_argument("--cpu-time", action="store_true", help="the processor's time: others run")
    args = parser.parse_args()
    clock = time.process_time if args.cpu_time else time.perf_counter

    title = f"{processor()}, onnxruntime {ort.__version__}, one thread"
    columns = ("experts, chosen, features, inner", "", *(f"{rows} rows" for rows in ROWS))
    table = Table(*columns, title=title)
    for shape in SHAPES:
        sessions = forms(*shape)
        cells: list[list[str]] = [[] for _ in SCHEMES]
        for rows in ROWS:
            x = np.random.default_rng(1).standard_normal((rows, shape[2]), np.float32)
            y, *others = (session(x=x)[0] for session in sessions)
            times: list[list[float]] = [[] for _ in sessions]
            for _ in range(args.rounds):
                for session, own in zip(sessions, times, strict=True):
                    start = clock()
                    session(x=x)
                    own.append(clock() - start)
            for row, other, own in zip(cells, others, times[1:], strict=True):
                gain = float(np.median(times[0]) / np.median(own))
                row.append(f"{gain:.2f} ({np.linalg.norm(other - y) / np.linalg.norm(y):.3f})")
        for scheme, row in zip(SCHEMES, cells, strict=True):
            table.add_row(", ".join(map(str, shape)), scheme, *row)
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
