"""What does it bring to count numbers below 2⁻¹²⁶ as 0 while a model with a mask runs?

A causal decoder and an encoder of 12 layers of 768 features, optimized, in one process: a session
of the file as `graphgen build` writes it (session.set_denormal_as_zero=1) and one without the
option take turns. In the encoder's batch all rows but the first are padded behind `--share` of the
tokens. Milliseconds without the option, and the time with it over that, as medians of the rounds.
Exit 3 if a result differs by more than 1e-6, or if it takes longer with the option.

    python bench/subnormals.py --threads 1
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnxruntime as ort
from rich.console import Console
from rich.table import Table

import graphgen as gg
from graphgen.export.write import to_bytes
from graphgen.models import decoder, encoder
from graphgen.processor import processor
from graphgen.subnormals import FLUSH

VOCABULARY = 1000


def questions(args: argparse.Namespace) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """A name, a model and its inputs."""
    layers, features = (2, 64) if args.quick else (12, 768)
    random, longest = np.random.default_rng(0), max(args.tokens)
    sizes: dict[str, Any] = {"layers": layers, "num_heads": features // 64, "length": longest}
    causal = gg.build(decoder.DecoderLM(VOCABULARY, features, **sizes), **decoder.inputs())
    both = gg.build(encoder.EncoderModel(VOCABULARY, features, **sizes), **encoder.inputs())
    for tokens in args.tokens:
        ids = random.integers(0, VOCABULARY, (args.rows, tokens))
        yield f"decoder, 1 x {tokens}", causal, {"input_ids": ids[:1]}
        mask = np.ones_like(ids)
        mask[1:, int(args.share * tokens) :] = 0
        feeds = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
        yield f"encoder, {args.rows} x {tokens}, padded", both, feeds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, nargs="*", default=[128, 512, 1024])
    parser.add_argument("--rows", type=int, default=4, help="of the encoder's batch")
    parser.add_argument("--share", type=float, default=0.5, help="of tokens that are no padding")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--cpu-time", action="store_true", help="of this process, on a busy machine"
    )
    parser.add_argument("--quick", action="store_true", help="small and once; nothing can fail")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    args = parser.parse_args()
    rounds = 1 if args.quick else args.rounds
    clock = time.process_time if args.cpu_time else time.perf_counter
    rows, failed = list[dict[str, Any]](), list[str]()
    for name, model, feeds in questions(args):
        file = to_bytes(gg.optimize(model, target="cpu"))
        sessions = [
            gg.Session(file, options={FLUSH: on}, threads=args.threads, provider="cpu")
            for on in "01"
        ]
        seconds: list[list[float]] = [[], []]
        results: list[Any] = [None, None]
        for turn in range(rounds + 1):
            for way in (0, 1) if turn % 2 else (1, 0):
                then = clock()
                results[way] = sessions[way](feeds)[0]
                seconds[way] += [clock() - then] if turn else []
        over = [b / a for a, b in zip(*seconds, strict=True)]
        row = {"model": name, "ms": 1e3 * statistics.median(seconds[0])}
        row |= {"ratio": statistics.median(over), "lowest": min(over), "highest": max(over)}
        row["error"] = float(abs(results[1] - results[0]).max() / results[0].std())
        rows.append(row)
        if row["error"] > 1e-6:
            failed.append(f"{name}: results differ by {row['error']:.1e}")
        if row["ratio"] > 1.03:
            failed.append(f"{name}: the option takes {row['ratio']:.2f} of the time")
    machine = f"{processor()}, {args.threads} threads, onnxruntime {ort.__version__}"
    if args.json:
        print(json.dumps({"machine": machine, "rows": rows, "failed": failed}, indent=2))
    else:
        table = Table("model and batch", "ms without", "ratio", "from, to", "error")
        for row in rows:
            table.add_row(
                row["model"], f"{row['ms']:.1f}", f"{row['ratio']:.3f}",
                f"{row['lowest']:.3f}, {row['highest']:.3f}", f"{row['error']:.1e}",
            )  # fmt: skip
        Console().print(table, machine, *failed, sep="\n")
    return 3 if failed and not args.quick else 0


if __name__ == "__main__":
    sys.exit(main())
