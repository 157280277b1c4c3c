"""What does it bring to read the beginning that prompts share once?

A GPT-2 of 12 layers and 768 features, one new token, `--common` tokens that all prompts begin with
and `--own` random ones behind them: seconds with the prefix cache over those without, the median
over rounds in which both take turns in one process. Each row is a batch of a first call, where the
beginning has to be read once, or of a call after another one that began the same. Exit 3 if other
tokens come, or if it takes longer with the cache.

    python bench/prefix_cache.py --threads 1
"""

import argparse
import json
import os
import statistics
import sys
import time
from typing import Any

import numpy as np
import onnxruntime as ort
from rich.console import Console
from rich.table import Table
from speculation import VOCABULARY, make

from graphgen.generation import Generator
from graphgen.processor import processor
from graphgen.quantize import quantize


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--common", type=int, default=512)
    parser.add_argument("--own", type=int, default=32)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--scheme", choices=["int4"], help="of the weights, instead of float32")
    parser.add_argument(
        "--cpu-time", action="store_true", help="of this process, on a busy machine"
    )
    parser.add_argument("--quick", action="store_true", help="small and once; nothing can fail")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    args = parser.parse_args()
    sizes, rounds = ((2, 128), 1) if args.quick else ((12, 768), args.rounds)
    clock = time.process_time if args.cpu_time else time.perf_counter
    random = np.random.default_rng(0)
    graph = make(random.integers(0, VOCABULARY, 8).tolist(), *sizes)
    graph = quantize(graph, args.scheme, threshold=9.0)[0] if args.scheme else graph
    ways = [Generator(graph, threads=args.threads, prefix_cache=on) for on in (False, True)]
    common = random.integers(0, VOCABULARY, args.common).tolist()
    rows, failed = list[dict[str, Any]](), list[str]()
    for count in args.rows:
        for again in (False, True) if count > 1 else (True,):
            seconds: list[list[float]] = [[], []]
            shared = 0
            for turn in range(rounds + 1):
                own = random.integers(0, VOCABULARY, (count, args.own)).tolist()
                prompts, found = [[*common, *row] for row in own], {}
                for way in (0, 1) if turn % 2 else (1, 0):
                    if not again:
                        ways[way].decoder.held = []
                    then = clock()
                    generation = ways[way](prompts, max_new_tokens=1)
                    list(generation)
                    seconds[way] += [clock() - then] if turn else []
                    found[way], shared = generation.tokens, max(shared, generation.shared)
                if found[0] != found[1]:
                    failed.append(f"{count} rows: the cache gives other tokens")
            over = [b / a for a, b in zip(*seconds, strict=True)]
            row = {"rows": count, "after another call": again, "shared": shared}
            row |= {"common": args.common, "own": args.own, "plain": statistics.median(seconds[0])}
            row |= {"ratio": statistics.median(over), "lowest": min(over), "highest": max(over)}
            rows.append(row)
            if row["ratio"] > 1.05:
                failed.append(f"{count} rows: the cache takes {row['ratio']:.2f} of the time")
    machine = f"{processor()}, {args.threads} threads, onnxruntime {ort.__version__}"
    if args.json:
        print(json.dumps({"machine": machine, "rows": rows, "failed": failed}, indent=2))
    else:
        table = Table("rows", "call", "common", "own", "shared", "plain s", "ratio", "from, to")
        for row in rows:
            call = "another" if row["after another call"] else "first"
            table.add_row(
                f"{row['rows']}", call, f"{row['common']}", f"{row['own']}", f"{row['shared']}",
                f"{row['plain']:.3f}", f"{row['ratio']:.3f}",
                f"{row['lowest']:.3f}, {row['highest']:.3f}",
            )  # fmt: skip
        Console().print(table, machine, *failed, sep="\n")
    return 3 if failed and not args.quick else 0


if __name__ == "__main__":
    sys.exit(main())
