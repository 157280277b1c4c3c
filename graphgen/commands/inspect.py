"""The command `inspect`: what a model consists of and costs."""

import argparse
from collections.abc import Callable
from typing import Any

import graphgen as gg
from graphgen.commands.options import FLAG, MODEL, NUMBERS, N, numbers, print_json, show

EXAMPLE = "decoder.onnx --dim batch=1 --dim seq=128"


def run(options: argparse.Namespace) -> None:
    """Show what a model consists of and costs, without running it."""
    from graphgen.laboratory.inspection import inspect as inspect_model

    result = inspect_model(gg.load(options.model), numbers("--dim", options.dim))
    if options.json:
        print_json(result.to_json())
        return
    print("\n".join(result.lines(command=True)))
    for table in result.tables(options.depth, options.steps):
        show(table)


def add_options(add: Callable[..., Any]) -> None:
    """Add the options of `inspect`."""
    add("model", **MODEL)
    add("--dim", help="fix a symbolic dimension", **NUMBERS)
    add("--depth", default=3, help="how deep to list nested blocks (3)", **N)
    add("--steps", default=10, help="nodes of the critical path to list, by cost (10)", **N)
    add("--json", help="print what docs/inspect.schema.json describes", **FLAG)
