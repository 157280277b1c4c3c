"""How many weights of int4 should share a scale?

The error of weights √(Σ (w - ŵ)² / Σ w²) by the size of blocks, for normally distributed ones and
for Student's t, whose few large weights are what trained layers have; in parentheses, rounded to
nearest. And how many times as fast as in blocks of 128 one token's product is, all sizes in turn.
"""

import argparse
import sys
import time

import numpy as np
import onnxruntime as ort
from rich.console import Console
from rich.table import Table

import graphgen as gg
from graphgen.bits import to_blocks
from graphgen.processor import processor
from graphgen.quantize import quantize

SIZES = (32, 64, 128, 256)
SHAPES = ((768, 3072), (2048, 2048))


def errors(w: np.ndarray) -> list[str]:
    """The error of weights (N, K) for each size."""
    cells = []
    for size in SIZES:
        found = [to_blocks(w, block_size=size, search=search) for search in (True, False)]
        lost = [np.linalg.norm(w - blocks.dequantized()) / np.linalg.norm(w) for blocks in found]
        cells.append(f"{lost[0]:.3f} ({lost[1]:.3f})")
    return cells


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1, help="of each session (1)")
    parser.add_argument("--rounds", type=int, default=41, help="rounds of timed calls (41)")
    args = parser.parse_args()

    title = f"{processor()}, onnxruntime {ort.__version__}, threads: {args.threads}"
    table = Table("", *(f"blocks of {size}" for size in SIZES), title=title)
    rng = np.random.default_rng(0)
    table.add_row("normal", *errors(rng.standard_normal((512, 2048), np.float32)))
    for freedom in (8, 4, 3):
        w = rng.standard_t(freedom, (512, 2048)).astype(np.float32)
        table.add_row(f"Student's t, {freedom} degrees of freedom", *errors(w))
    for columns, rows in SHAPES:
        w = rng.standard_normal((columns, rows), np.float32)
        model = gg.build(lambda x, w=w: x @ w, x=gg.float32["M", columns])
        forms = [quantize(model, "int4", block_size=size)[0] for size in SIZES]
        sessions = [gg.Session(form, provider="cpu", threads=args.threads) for form in forms]
        x, calls = rng.standard_normal((1, columns), np.float32), 1 + 4_000_000 // w.size
        times: list[list[float]] = [[] for _ in sessions]
        for _ in range(args.rounds):
            for session, own in zip(sessions, times, strict=True):
                start = time.perf_counter()
                for _ in range(calls):
                    session(x=x)
                own.append(time.perf_counter() - start)
        medians = [float(np.median(own)) for own in times]
        gains = (medians[SIZES.index(128)] / t for t in medians)
        table.add_row(f"a token by {columns} x {rows}", *(f"{gain:.2f}" for gain in gains))
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
