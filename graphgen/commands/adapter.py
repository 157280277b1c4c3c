"""The command `adapter`: what low-rank training made, as files for other programs."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from graphgen.commands.options import FILE, written
from graphgen.errors import GraphgenError

EXAMPLE = "runs/a -o adapter"
_ENDING = ".onnx_adapter"


def run(options: argparse.Namespace) -> None:
    """Write what low-rank training made, for PEFT or the runtime."""
    from graphgen.export.adapters import Adapter
    from graphgen.export.write import export

    if (options.model is None) != (options.base is None):
        raise GraphgenError("--model and --base write the model for the adapter; give both")
    found = Adapter.load(options.source)
    if options.base is not None:
        if options.output.suffix != _ENDING:
            raise GraphgenError(
                f"--base is for an adapter in a file {_ENDING}: give -o such a name"
            )
        export(found.base(options.model), options.base)
    if options.output.suffix == _ENDING:
        found.export(options.output)
    else:
        found.save(options.output)
    size = sum(array.size for array in found.matrices.values())
    print(f"{options.output}: rank {found.rank} at {len(found.modules)} modules, {size:,} numbers")
    if options.base is not None:
        print(f"{options.base}: the model, with inputs for the adapter")


def add_options(add: Callable[..., Any]) -> None:
    """Add the options of `adapter`."""
    add("source", metavar="RUN", type=Path, help="a run, a checkpoint, or a folder of PEFT")
    place = "a folder for PEFT, or a file .onnx_adapter"
    add("-o", "--output", required=True, type=written, metavar="PATH", help=place)
    add("--model", help="with --base: the ONNX file that was trained", **FILE)
    takes = "with .onnx_adapter: write the model with inputs for such adapters"
    add("--base", type=written, metavar="FILE", help=takes)
