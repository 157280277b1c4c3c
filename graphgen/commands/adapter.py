"""The command `adapter`: what low-rank training made, as files for other programs."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from graphgen.commands.options import written
from graphgen.errors import GraphgenError

EXAMPLE = "runs/a -o adapter"


def run(options: argparse.Namespace) -> None:
    """Write what low-rank training made, for PEFT or the runtime."""
    from graphgen.export.adapters import ENDING, Adapter
    from graphgen.export.by_row import parts_within
    from graphgen.export.folders import write_like
    from graphgen.export.read import load
    from graphgen.export.write import export

    if (options.model is None) != (options.base is None):
        raise GraphgenError("--model and --base write the model for the adapter; give both")
    found = Adapter.load(options.source)
    files = {options.output: found}

    def bases(graphs: Sequence[Path]) -> list[Any]:
        """The graphs with inputs; a session refuses a file with matrices of another graph."""
        models = [load(graph) for graph in graphs]
        parts = dict(zip(graphs, parts_within("adapter", found, models), strict=True))
        if len(graphs) > 1:
            files.clear()
            own = {g: options.output.with_suffix(f".{g.stem}{ENDING}") for g in graphs}
            files.update({own[graph]: part for graph, part in parts.items() if part.modules})
        return [
            part.base(model) if part.matrices or part.saved else model
            for part, model in zip(parts.values(), models, strict=True)
        ]

    if options.base is not None:
        if options.output.suffix != ENDING:
            raise GraphgenError(f"--base is for an adapter in a file {ENDING}: give -o such a name")
        if options.model.is_dir():
            write_like("adapter", options.model, options.base, bases)
        else:
            export(found.base(options.model), options.base)
    if options.output.suffix == ENDING:
        for path, part in files.items():
            part.export(path)
    else:
        found.save(options.output)
    for path, part in files.items():
        size = sum(array.size for array in (part.matrices | part.saved).values())
        whole = f", and {', '.join(part.whole)} as a whole" if part.saved else ""
        sizes = f"rank {part.rank} at {len(part.modules)} modules{whole}, {size:,} numbers"
        print(f"{path}: {sizes}")
    if options.base is not None:
        print(f"{options.base}: the model, with inputs for the adapter")


def add_options(add: Callable[..., Any]) -> None:
    """Add the options of `adapter`."""
    source = "a run, a checkpoint, a folder of PEFT, or a file .onnx_adapter"
    add("source", metavar="RUN", type=Path, help=source)
    place = "a folder for PEFT, or a file .onnx_adapter"
    add("-o", "--output", required=True, type=written, metavar="PATH", help=place)
    trained = "with --base: the ONNX file that was trained, or a folder of the same checkpoint"
    add("--model", type=Path, metavar="FILE | DIR", help=trained)
    takes = "with .onnx_adapter: write the model, or the folder, with inputs for such adapters"
    add("--base", type=written, metavar="FILE | DIR", help=takes)
