"""The command `export`: the parameters of a checkpoint in the inference model."""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from graphgen.commands.options import ANEW, FLAG
from graphgen.errors import GraphgenError

EXAMPLE = """decoder.onnx --checkpoint runs/a -o trained.onnx
  graphgen export bert --checkpoint run -o tuned                   # bert is a folder of build
  graphgen export bert --checkpoint run -o tuned --safetensors     # for transformers"""


def run(options: argparse.Namespace) -> None:
    """Write a model with the parameters of a checkpoint, for inference."""
    import graphgen as gg
    from graphgen.export.adapters import Adapter
    from graphgen.export.artifact_files import CHECKPOINT
    from graphgen.export.checkpoint import Checkpoint
    from graphgen.export.folders import write_like
    from graphgen.export.precision import DTYPES
    from graphgen.export.trained import export_trained, parameters_of, trained_models

    if options.dtype is not None and not options.safetensors:
        raise GraphgenError("export: --dtype needs --safetensors; add that option")
    if options.safetensors:
        kind = None if options.dtype is None else DTYPES[options.dtype] or "float32"
        made = gg.to_checkpoint(options.model, options.checkpoint, options.output, dtype=kind)
        line = f"{len(made.weights)} weights by the checkpoint's own names"
        if made.rounded:
            line += (
                f"; {len(made.rounded)} rounded to its dtype: --dtype fp32 keeps them as trained"
            )
        print(f"{options.output}: {line}")
        return
    path = options.checkpoint / CHECKPOINT if options.checkpoint.is_dir() else options.checkpoint
    saved = Checkpoint.load(path)
    parameters = parameters_of(saved, str(path))
    adapter = Adapter.of(saved, str(path))
    if options.model.is_dir():
        given = {"parameters": parameters, "file": options.output.name, "adapter": adapter}
        write_like("export", options.model, options.output, partial(trained_models, **given))
    else:
        export_trained(options.model, parameters, options.output, adapter)
    merged = f", {len(adapter.modules)} updates merged" if adapter is not None else ""
    print(f"{options.output}: {len(parameters)} parameters of {path}{merged}")


def add_options(add: Callable[..., Any]) -> None:
    """Add the options of `export`."""
    inference = "the inference model that the artifacts were made from, or the folder it is in"
    add("model", type=Path, metavar="FILE | DIR", help=inference)
    add("--checkpoint", required=True, type=Path, help="a checkpoint, or its folder")
    add("-o", "--output", required=True, **ANEW)
    again = "write a folder for transformers, with the names that the checkpoint had"
    add("--safetensors", help=again, **FLAG)
    dtype = "with --safetensors: of all weights (as the checkpoint stored each)"
    add("--dtype", choices=("fp32", "fp16", "bf16"), help=dtype)
