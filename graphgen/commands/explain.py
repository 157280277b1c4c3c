"""The command `explain`."""

import argparse
from collections.abc import Callable
from typing import Any

import graphgen as gg
from graphgen.commands.options import (
    FLAG,
    MODEL,
    NUMBERS,
    OWN,
    PROCESSOR,
    RUNTIME,
    TARGET,
    doing,
    keywords,
    numbers,
    print_json,
)

EXAMPLE = """export.onnx --pass fuse_attention
  graphgen explain decoder.onnx --pass fuse_sums --where layers.3"""


def run(options: argparse.Namespace) -> None:
    """Show why a pass rewrote its candidates or did not, and where."""
    from graphgen.laboratory.remarks import explain
    from graphgen.measure.feeds import at_sizes

    given = keywords(gg.optimize, options)
    with doing(f"optimizing {options.model} for {options.target}"):
        model = at_sizes(gg.load(options.model), numbers("--dim", options.dim))
        found = explain(model, options.pass_, options.where, **given)
    if options.json:
        print_json(found.to_json())
    else:
        print(found.text(every=options.all, command=True))


def add_options(add: Callable[..., Any]) -> None:
    """Add the options of `explain`."""
    add("model", **MODEL)
    add(
        "--pass",
        dest="pass_",
        required=True,
        metavar="NAME",
        help="the pass to explain, such as fuse_attention",
    )
    add("--where", metavar="PATH", help="only in this module, or at nodes whose names contain this")
    add("--target", **TARGET)
    add("--runtime", **RUNTIME)
    add("--processor", **PROCESSOR)
    add("--dim", help="fix a symbolic dimension", **NUMBERS)
    add("--with", **OWN)
    add("--verify", help="check every rewrite by running both sides", **FLAG)
    add("--all", help="list every site, even if many are alike", **FLAG)
    add("--json", help="print what docs/explain.schema.json describes", **FLAG)
