"""The command `export`: the parameters of a checkpoint in the inference model."""

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphgen.commands.options import ANEW, FLAG
from graphgen.errors import GraphgenError

if TYPE_CHECKING:
    from graphgen.export.adapters import Adapter
    from graphgen.operands import Array

EXAMPLE = """decoder.onnx --checkpoint runs/a/best -o trained.onnx
  graphgen export bert --checkpoint run -o tuned                   # bert is a folder of build
  graphgen export bert --checkpoint run -o tuned --safetensors     # for transformers"""


def run(options: argparse.Namespace) -> None:
    """Write a model with the parameters of a checkpoint, for inference."""
    from graphgen.export.adapters import Adapter
    from graphgen.export.artifact_files import CHECKPOINT
    from graphgen.export.checkpoint import Checkpoint
    from graphgen.export.folders import write_like
    from graphgen.export.trained import export_trained, parameters_of, trained_model

    if options.dtype is not None and not options.safetensors:
        raise GraphgenError("export: --dtype needs --safetensors; add that option")
    path = options.checkpoint / CHECKPOINT if options.checkpoint.is_dir() else options.checkpoint
    saved = Checkpoint.load(path)
    parameters = parameters_of(saved, str(path))
    adapter = Adapter.of(saved, str(path))
    if options.safetensors:
        line = _to_safetensors(options, parameters, adapter)
        print(f"{options.output}: {line}")
        return
    if options.model.is_dir():
        given = {"parameters": parameters, "file": options.output.name, "adapter": adapter}
        write_like("export", options.model, options.output, partial(trained_model, **given))
    else:
        export_trained(options.model, parameters, options.output, adapter)
    merged = f", {len(adapter.modules)} updates merged" if adapter is not None else ""
    print(f"{options.output}: {len(parameters)} parameters of {path}{merged}")


def _to_safetensors(
    options: argparse.Namespace, parameters: "Mapping[str, Array]", adapter: "Adapter | None"
) -> str:
    """Write a folder that transformers loads; return what it holds."""
    import onnx_ir as ir

    import graphgen as gg
    from graphgen.export.folders import write_checkpoint
    from graphgen.export.precision import DTYPES
    from graphgen.export.trained import trained_model
    from graphgen.graph import model_in
    from graphgen.models.published import find_family
    from graphgen.models.published.back import stored_weights
    from graphgen.models.published.config import Config

    folder = options.model
    files = sorted(folder.glob("onnx/*.onnx"))
    if not files or not (folder / "config.json").is_file():
        raise GraphgenError(
            f"export --safetensors: {folder} is not a folder that graphgen build wrote: it has no "
            "onnx/*.onnx or no config.json; give that folder, not a file in it"
        )
    models = [gg.load(file) for file in files]
    if adapter is not None and len(models) > 1:
        raise GraphgenError(
            f"export --safetensors: {folder} has {len(models)} graphs, and an adapter is merged "
            "into one: save it with graphgen adapter, and merge it with PEFT"
        )
    known = [model.graph.initializers for model in models]
    if len(models) > 1 and (other := sorted(parameters.keys() - set[str]().union(*known))):
        raise GraphgenError(
            f"export --safetensors: no graph of {folder} has the parameter {other[0]}; give the "
            "folder that the artifacts were made from"
        )
    for i, names in enumerate(known):
        own = {n: x for n, x in parameters.items() if len(models) == 1 or n in names}
        models[i] = model_in(trained_model(models[i], own, options.output.name, adapter), "export")
    config = Config.read(folder / "config.json")
    dtype = None if options.dtype is None else DTYPES[options.dtype] or ir.DataType.FLOAT
    made = stored_weights(config, find_family(config), models, dtype)
    kept = None if dtype is None else dtype.numpy().name
    fields: dict[str, Any] = {name: kept for name in ("dtype", "torch_dtype") if kept}
    write_checkpoint(folder, options.output, made.weights, fields)
    line = f"{len(made.weights)} weights by the checkpoint's own names"
    if made.rounded:
        line += f"; {len(made.rounded)} rounded to its dtype: --dtype fp32 keeps them as trained"
    return line


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
