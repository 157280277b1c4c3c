"""The command `map`: a model over the rows of a file."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import graphgen as gg
from graphgen.commands.generate import add_sampling, options_of
from graphgen.commands.options import (
    ADAPTER,
    FILE,
    FLAG,
    OUT,
    PROVIDER,
    STRICT,
    N,
    adapters_of,
    keywords,
    print_json,
)
from graphgen.errors import GraphgenError

EXAMPLE = "out --data in.jsonl --out out.parquet --workers 4"


def run(options: argparse.Namespace) -> None:
    """Run a model over the rows of a file, here or on the actors of Ray."""
    from graphgen.batch import Stage, map_file

    given = keywords(map_file, options) | keywords(Stage, options) | options_of(options)
    given |= adapters_of(options.adapter)
    for name in ("batch", "workers", "threads"):
        if not 1 <= given[name] <= 1 << 20:
            raise GraphgenError(f"--{name} is {given[name]}; give 1 to {1 << 20}")
    count = map_file(options.folder, options.data, options.output, **given)
    if options.json:
        found = {"graphgen": gg.__version__, "output": str(options.output), "rows": count}
        print_json(found)
        return
    print(f"{options.output}: {count:,} rows")


def add_options(add: Callable[..., Any]) -> None:
    """Add the options of `map`."""
    add("folder", type=Path, metavar="DIR", help="what `graphgen build CHECKPOINT -o DIR` wrote")
    add(
        "--data",
        required=True,
        help="rows with `text`, `query`, `ids`, `messages`, `image` or `audio`: JSON lines, CSV, "
        "Parquet or Arrow",
        **FILE,
    )
    add("-o", "--out", dest="output", required=True, help="a .parquet file", **OUT)
    add("--engine", default="local", choices=("local", "ray"), help="this process, or Ray's actors")
    tasks = (
        "feature-extraction",
        "text-classification",
        "image-classification",
        "audio-classification",
        "token-classification",
        "fill-mask",
        "text-generation",
        "text2text-generation",
        "automatic-speech-recognition",
    )
    wanted = f"the task the folder must be for (its graph's): {', '.join(tasks)}"
    add("--task", choices=tasks, metavar="TASK", help=wanted)
    add("--batch", default=32, help="rows to run together (32)", **N)
    add("--workers", default=1, help="threads with one session, or actors with one each (1)", **N)
    add("--threads", default=1, help="of the runtime, in each worker (1)", **N)
    add("--provider", **PROVIDER)
    add("--strict", **STRICT)
    add("--adapter", **(ADAPTER | {"help": ADAPTER["help"] + "a row's column `adapter` chooses"}))
    add("--truncate", help="cut texts that are longer than the context", **FLAG)
    add("--json", help="print what docs/map.schema.json describes", **FLAG)
    add_sampling(add)
