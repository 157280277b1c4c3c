"""The command `import`: a module of torch as a model with all its names."""

import argparse
import sys
from collections.abc import Callable
from typing import Any

import graphgen as gg
from graphgen.commands.options import OUT

EXAMPLE = "my_models:tagger -o tagger.onnx"


def run(options: argparse.Namespace) -> None:
    """Write a module of torch as ONNX, with every weight by its own name."""
    from graphgen.export.torch_modules import from_function
    from graphgen.graph import parameters

    if "" not in sys.path:
        sys.path.insert(0, "")  # the folder where the command runs
    model = from_function(options.source)
    gg.export(model, options.output)
    print(f"{options.output}: {len(parameters(model.graph))} parameters, by torch's names")


def add_options(add: Callable[..., Any]) -> None:
    """Add the options of `import`."""
    returns = (
        "returns a module, its inputs and, if any, dynamic shapes: model, (x,), {'x': {0: 'n'}}"
    )
    add("source", metavar="MODULE:FUNCTION", help=f"a function that {returns}")
    add("-o", "--output", required=True, help="the ONNX file to write", **OUT)
