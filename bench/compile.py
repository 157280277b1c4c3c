"""How long does `optimize` take, how much memory, and does the time grow linearly with the layers?

A BERT-base export (bench/exports.py) is read and optimized for the CPU by graphgen and by
onnxscript's optimize_for_ort, in turn: graphgen must not take longer. Memory is the peak above the
interpreter with its imports, each in a process of its own, once with the weights inside the file
and once beside it, where they can be mapped; graphgen's stays under 300 MB (read from /proc, so on
Linux only). Then a pre-norm stack (64 features, 4 heads) is built as primitives and optimized at
each depth in turn: the time per layer at the deepest is at most 1.3 times that at the shallowest.
Exit 3 if any of this fails.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx_ir as ir
from exports import cache_folder, exported
from onnxscript.rewriter.ort_fusions import optimize_for_ort
from rich.console import Console
from rich.table import Table

import graphgen as gg
from graphgen import nn
from graphgen.processor import processor

LINEAR, MEGABYTES = 1.3, 300
FIXTURE = Path(__file__).resolve().parents[1] / "tests/fixtures/bert_dynamo_sdpa_18.onnx"
COMPILERS: dict[str, Callable[[Path], Any]] = {
    "graphgen": lambda path: gg.optimize(gg.load(path), target="cpu"),
    "onnxscript": lambda path: optimize_for_ort(ir.load(path)),
}


def timed(call: Callable[[], Any]) -> float:
    start = time.process_time()  # both are one thread; other work on the machine does not count
    call()
    return time.process_time() - start


def status(key: str) -> float:
    """A line of /proc/self/status in megabytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) / 1024 for line in lines if line.startswith(key))


def peak_memory(name: str, path: Path) -> float | None:
    """Megabytes above the interpreter with its imports; None where there is no /proc."""
    if not Path("/proc/self/clear_refs").exists():
        return None
    command = [sys.executable, __file__, "--memory-of", name, "--model", str(path)]
    return float(subprocess.run(command, capture_output=True, check=True, text=True).stdout)


def print_memory(name: str, path: Path) -> None:
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    before = status("VmRSS")
    COMPILERS[name](path)
    print(status("VmHWM") - before)


def stack(layers: int) -> tuple[float, float, int]:
    """Seconds to build, seconds to optimize, and the number of nodes built."""
    module = nn.Encoder(64, layers=layers, num_heads=4)
    start = time.process_time()
    model = gg.build(module, primitives=True, x=gg.float32["batch", "seq", 64])
    built = time.process_time() - start
    return built, timed(lambda: gg.optimize(model, target="cpu")), model.graph.num_nodes()


def compare(path: Path, beside: Path, rounds: int, *, quick: bool) -> list[dict[str, Any]]:
    """Seconds and megabytes of each compiler; `beside` is the model with external weights.

    With `quick`, megabytes of graphgen alone, with the weights beside: each takes a process.
    """
    seconds: dict[str, list[float]] = {name: [] for name in COMPILERS}
    for turn in range(rounds + 1):
        for name, compiler in COMPILERS.items():
            taken = timed(lambda compiler=compiler: compiler(path))
            if turn:  # the first one warms up: imports, patterns, the file's pages
                seconds[name].append(taken)
    return [
        {
            "compiler": name,
            "seconds": statistics.median(s),
            "peak_mb_weights_inside": None if quick else peak_memory(name, path),
            "peak_mb_weights_beside": (
                None if quick and name != "graphgen" else peak_memory(name, beside)
            ),
        }
        for name, s in seconds.items()
    ]


def depths(layers: list[int], rounds: int) -> list[dict[str, Any]]:
    """Medians for each number of layers, measured in turn."""
    found: dict[int, list[tuple[float, float, int]]] = {n: [] for n in layers}
    stack(1)
    for _ in range(rounds):
        for n, runs in found.items():
            runs.append(stack(n))
    rows = []
    for n, runs in found.items():
        build, optimize = (statistics.median(r[i] for r in runs) for i in (0, 1))
        each = {"ms_a_layer": (build + optimize) / n * 1e3}
        rows.append({"layers": n, "nodes": runs[0][2], "build_s": build, "optimize_s": optimize})
        rows[-1] |= each
    return rows


def failures(compilers: list[dict[str, Any]], rows: list[dict[str, Any]]) -> list[str]:
    """A sentence for each limit that was not kept."""
    ours, theirs = compilers
    told = []
    if ours["seconds"] > theirs["seconds"]:
        told.append(f"graphgen takes {ours['seconds'] / theirs['seconds']:.2f} of onnxscript")
    for place in ("inside", "beside"):
        peak = ours[f"peak_mb_weights_{place}"]
        if peak is not None and peak > MEGABYTES:
            told.append(
                f"graphgen's peak with the weights {place} is {peak:.0f} MB; "
                f"the limit is {MEGABYTES}"
            )
    if (ratio := rows[-1]["ms_a_layer"] / rows[0]["ms_a_layer"]) > LINEAR:
        told.append(f"the time per layer grows to {ratio:.2f} times; the limit is {LINEAR}")
    return told


def print_table(title: str, rows: list[dict[str, Any]]) -> None:
    table = Table(title=title)
    for heading in rows[0]:
        table.add_column(heading.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(f"{v:.3g}" if isinstance(v, float) else str(v) for v in row.values()))
    Console().print(table)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example: python bench/compile.py --layers 12 48 --rounds 5",
    )
    parser.add_argument("--model", type=Path, help="a file (the export of BERT-base)")
    parser.add_argument("--cache", type=Path, default=cache_folder(), help="folder of the exports")
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 24, 48, 96])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a tiny model; nothing can fail")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the tables")
    parser.add_argument("--memory-of", choices=COMPILERS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.memory_of:
        print_memory(args.memory_of, args.model)
        return 0
    if args.quick:
        args.layers, args.rounds = [1, 2], 1
    try:
        path = args.model or (FIXTURE if args.quick else exported("bert", "dynamo", args.cache))
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        model, beside = ir.load(path), Path(folder) / "model.onnx"
        nodes = sum(1 for _ in model.graph.all_nodes())
        ir.save(model, beside, external_data="model.onnx_data")
        del model
        compilers = compare(path, beside, args.rounds, quick=args.quick)
    rows = depths(args.layers, args.rounds)
    told = failures(compilers, rows)
    if args.json:
        machine = f"{processor()}, {platform.system()}"
        found = {"machine": machine, "nodes": nodes, "compilers": compilers, "depths": rows}
        print(json.dumps(found | {"failures": told}, indent=2))
    else:
        print_table(f"{path.name}, {nodes} nodes, {args.rounds} rounds", compilers)
        print_table("stack of layers as primitives", rows)
        for line in told:
            print(line)
    return 3 if told and not args.quick else 0


if __name__ == "__main__":
    sys.exit(main())
