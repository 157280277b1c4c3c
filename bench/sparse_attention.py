"""What does attention to a pattern of keys cost, next to attention to all of them?

The operators alone, on float32 (1, n, 512) in 8 heads, as `gg.optimize` writes them for the CPU:
attention to a window of 256 tokens (128 to each side where it is not causal), strided by √n, to
blocks of 64 as in BigBird, and by two rounds of hashing in chunks of 64; and to all keys, fused for
the installed runtime and for 1.20, whose operator is another.

Time: all sides in one process, in turn, the order reversed every round; medians, and the ratio is
the median over the rounds of the faster full attention's time over theirs. Memory: each side in a
process of its own, by how much a first run raises its peak; `weights` is full attention written
out, which holds the (8, n, n) weights. Growth: the same by n, with the exponent between the two
longest, 2 for full attention.

Exit 3 if attention in a window or by hashing is not 4 times as fast as the fused full one, or not 8
times smaller than each full form that holds the weights of all pairs, or if a pattern's time or
memory grows like n^1.8 or more.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from rich.console import Console
from rich.table import Table

import graphgen as gg
from graphgen import ops
from graphgen.processor import processor

HEADS, HEAD_DIM, BLOCK, ROUNDS = 8, 64, 64, 2
FASTER, SMALLER, EXPONENT = 4.0, 8.0, 1.8
JUDGED = ("window", "hashed")
LENGTHS = (1024, 2048, 4096, 8192, 16384)
FULL = ("full", "full 1.20")
PATTERNS = ("window", "strided", "blocks", "hashed")


def function(pattern: str, n: int, causal: bool) -> Callable[..., Any]:
    heads = {"q_num_heads": HEADS, "kv_num_heads": HEADS, "is_causal": int(causal)}
    if pattern == "hashed":
        root = 2 * math.ceil(math.sqrt(n / BLOCK / 2))  # two buckets for a chunk
        hashes: dict[str, Any] = {"buckets": (root, root), "chunk": BLOCK, "rounds": ROUNDS}
        attend = partial(ops.hashed_attention, num_heads=HEADS, is_causal=int(causal), **hashes)
        return lambda q, v: attend(q, v)
    layout = ops.big_bird_layout(n // BLOCK)
    found: dict[str, Callable[..., Any]] = {
        "full": ops.attention,
        "full 1.20": ops.attention,
        "weights": lambda *x, **options: ops.attention_with_weights(*x, **options)[0],
        "window": partial(ops.window_attention, window=256 if causal else 128),
        "strided": partial(ops.strided_attention, stride=round(math.sqrt(n))),
        "blocks": partial(ops.block_sparse_attention, layout=layout, block=BLOCK),
    }
    return lambda q, k, v: found[pattern](q, k, v, **heads)


def write(folder: Path, pattern: str, n: int, causal: bool) -> Path:
    """The file of one side, for any length but of blocks and buckets."""
    path = folder / f"{pattern}-{n}-{causal}.onnx"
    spec = gg.float32[1, "n", HEADS * HEAD_DIM]
    names = ("q", "v") if pattern == "hashed" else ("q", "k", "v")
    model = gg.build(function(pattern, n, causal), **dict.fromkeys(names, spec))
    runtime = "1.20" if pattern == "full 1.20" else None
    gg.export(model if pattern == "weights" else gg.optimize(model, runtime=runtime), path)
    return path


def run_of(path: Path, n: int, threads: int) -> Callable[[], Any]:
    session = gg.Session(path, provider="cpu", threads=threads)
    rng = np.random.default_rng(0)
    given = {x: rng.standard_normal((1, n, HEADS * HEAD_DIM), np.float32) for x in "qkv"}
    names = "qv" if path.name.startswith("hashed") else "qkv"
    return lambda: session({x: given[x] for x in names})


def status(key: str) -> float:
    """A line of this process's status in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return float(next(x for x in lines if x.startswith(key)).split()[1]) / 1024


def peak(path: Path, n: int, threads: int) -> float:
    """By how many MB a first run raises what this process holds; for a process of its own."""
    run = run_of(path, n, threads)
    Path("/proc/self/clear_refs").write_text("5")  # which resets the peak
    before = status("VmRSS")
    run()
    return status("VmHWM") - before


def peak_of(path: Path, n: int, threads: int) -> float:
    command = [sys.executable, __file__, "--peak", str(path), str(n), "--threads", str(threads)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(done.stderr)
    return float(done.stdout)


def times_of(
    paths: dict[str, Path], n: int, threads: int, rounds: int, clock: Callable[[], float]
) -> dict[str, Any]:
    """Seconds of each side, round by round, in turn."""
    runs = {name: run_of(path, n, threads) for name, path in paths.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    order = list(runs)
    for turn in range(rounds + 1):
        for name in order:
            start = clock()
            runs[name]()
            if turn:  # the first one warms up
                times[name].append(clock() - start)
        order.reverse()
    return {name: np.array(t) for name, t in times.items()}


def compare(
    folder: Path, n: int, threads: int, rounds: int, clock: Callable[[], float]
) -> list[dict[str, Any]]:
    rows = []
    for causal in (True, False):
        sides = (*FULL, *PATTERNS)
        paths = {name: write(folder, name, n, causal) for name in sides}
        times = times_of(paths, n, threads, rounds, clock)
        paths["weights"] = write(folder, "weights", n, causal)
        memory = {name: peak_of(path, n, threads) for name, path in paths.items()}
        fastest = np.minimum(*(times[name] for name in FULL))
        weights_mb = 4 * HEADS * n * n / 2**20
        held = [memory[name] for name in (*FULL, "weights")]
        holding = min((mb for mb in held if mb > weights_mb), default=math.nan)
        for name in paths:
            row = {"attention": name, "causal": causal, "n": n, "peak_mb": memory[name]}
            row["smaller"] = holding / memory[name]
            if name in times:
                row["ms"] = 1e3 * float(np.median(times[name]))
                row["faster"] = float(np.median(fastest / times[name]))
            rows.append(row)
    return rows


def grow(
    folder: Path, lengths: list[int], threads: int, rounds: int, clock: Callable[[], float]
) -> list[dict[str, Any]]:
    """Causal, each side with its sizes at each length."""
    rows = []
    for n in lengths:
        sides = ("full", *PATTERNS) if n <= 8192 else PATTERNS
        paths = {name: write(folder, name, n, True) for name in sides}
        times = times_of(paths, n, threads, rounds, clock)
        for name, path in paths.items():
            milliseconds = 1e3 * float(np.median(times[name]))
            row = {"attention": name, "n": n, "ms": milliseconds}
            rows.append(row | {"peak_mb": peak_of(path, n, threads)})
    return rows


def exponents(rows: list[dict[str, Any]], key: str) -> dict[str, float]:
    """log (y₂ / y₁) / log (n₂ / n₁) between the two longest of each side."""
    found = {}
    for name in dict.fromkeys(row["attention"] for row in rows):
        a, b = [row for row in rows if row["attention"] == name][-2:]
        found[name] = math.log(b[key] / a[key]) / math.log(b["n"] / a["n"])
    return found


def failures(found: dict[str, Any]) -> list[str]:
    told = []
    for row in found["rows"]:
        side = f"{row['attention']}, {'causal' if row['causal'] else 'both sides'}"
        if row["attention"] in JUDGED and row["faster"] < FASTER:
            told.append(f"{side}: {row['faster']:.2f} times as fast as full attention")
        if row["attention"] in JUDGED and row["smaller"] < SMALLER:
            told.append(f"{side}: {row['smaller']:.1f} times smaller than full attention")
    for key in ("ms", "peak_mb"):
        for name, power in found["exponents"][key].items():
            if name != "full" and power >= EXPONENT:
                told.append(f"{name}: {key} grows like n^{power:.2f}")
    return told


def show(found: dict[str, Any]) -> None:
    console = Console(width=120)
    n, threads = found["rows"][0]["n"], found["threads"]
    table = Table(title=f"n = {n}, {HEADS} heads of {HEAD_DIM}, threads: {threads}")
    for column in ("attention", "pattern", "ms", "times as fast", "peak MB", "times smaller"):
        table.add_column(column, justify="left" if column in ("attention", "pattern") else "right")
    for row in found["rows"]:
        times = (f"{row['ms']:.0f}", f"{row['faster']:.2f}") if "ms" in row else ("", "")
        sides = "causal" if row["causal"] else "both sides"
        memory = f"{row['peak_mb']:.0f}", f"{row['smaller']:.1f}"
        table.add_row(row["attention"], sides, *times, *memory)
    console.print(table)
    growth = found["growth"]
    lengths = list(dict.fromkeys(row["n"] for row in growth))
    table = Table(title="causal: ms, and peak MB")
    for column in ("attention", *map(str, lengths), "exponents"):
        table.add_column(column, justify="left" if column == "attention" else "right")
    for name in found["exponents"]["ms"]:
        cells = dict.fromkeys(lengths, "") | {
            row["n"]: f"{row['ms']:.0f}, {row['peak_mb']:.0f}"
            for row in growth
            if row["attention"] == name
        }
        powers = ", ".join(f"{found['exponents'][key][name]:.2f}" for key in ("ms", "peak_mb"))
        table.add_row(name, *cells.values(), powers)
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1, help="threads of each session (1)")
    parser.add_argument("--rounds", type=int, default=5, help="timed calls of each side (5)")
    parser.add_argument("--length", type=int, default=8192, help="n of the first table (8192)")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="of the second")
    parser.add_argument(
        "--cpu-time", action="store_true", help="the processor's time, for one thread: others run"
    )
    parser.add_argument("--quick", action="store_true", help="short sequences, no bounds")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the tables")
    parser.add_argument("--peak", nargs=2, metavar=("FILE", "N"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    clock = time.process_time if args.cpu_time else time.perf_counter
    if args.peak:
        print(peak(Path(args.peak[0]), int(args.peak[1]), args.threads))
        return 0
    if args.quick:
        args.length, args.lengths, args.rounds = 256, (256, 512), 1
    with tempfile.TemporaryDirectory() as folder:
        settings = (args.threads, args.rounds, clock)
        rows = compare(Path(folder), args.length, *settings)
        growth = grow(Path(folder), list(args.lengths), *settings)
    found = {
        "machine": str(processor()),
        "onnxruntime": ort.__version__,
        "threads": args.threads,
        "clock": clock.__name__,
        "rows": rows,
        "growth": growth,
        "exponents": {key: exponents(growth, key) for key in ("ms", "peak_mb")},
    }
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        show(found)
    missed = [] if args.quick else failures(found)
    for told in missed:
        print(f"missed: {told}", file=sys.stderr)
    return 3 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
