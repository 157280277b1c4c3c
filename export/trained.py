"""An inference model written with trained parameters."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import onnx_ir as ir

from graphgen.errors import GraphgenError
from graphgen.export.adapters import Adapter
from graphgen.export.by_row import parts_within
from graphgen.export.checkpoint import Checkpoint
from graphgen.export.read import load
from graphgen.export.session import model_of
from graphgen.export.write import export
from graphgen.graph import ModelLike
from graphgen.infer import describe
from graphgen.operands import Array
from graphgen.passes import Optimized
from graphgen.passes.training.batch_norms import in_evaluation
from graphgen.passes.training.dropouts import in_inference
from graphgen.passes.training.packed import Packed

BASE = "graphgen.base"
"""Property of a checkpoint with weights in few bits: the fields of `Packed` by name, as JSON."""


def parameters_of(saved: Checkpoint, where: str) -> dict[str, Array]:
    """The parameters in a checkpoint by their names in the model; all as floats.

    Raises GraphgenError if what it says of weights in few bits is damaged.
    """
    found = saved.trainable | saved.frozen
    try:
        for name, fields in json.loads(str(saved.properties.get(BASE, "{}"))).items():
            packed = Packed(*fields)
            found[name] = packed.float_of(name, found)
            for part in packed.names(name):
                del found[part]
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise GraphgenError(
            f"{where}: its property {BASE}, or a weight that it names, is missing or damaged "
            f"({error}); write the artifacts again"
        ) from None
    return found


def export_trained(
    model: str | os.PathLike[str] | ModelLike,
    parameters: Mapping[str, Array],
    path: str | os.PathLike[str],
    adapter: Adapter | None = None,
) -> Path:
    """Write what `trained_model` returns."""
    return export(trained_model(model, parameters, Path(path).name, adapter), path)


def trained_model(
    model: str | os.PathLike[str] | ModelLike,
    parameters: Mapping[str, Array],
    file: str,
    adapter: Adapter | None = None,
) -> ModelLike:
    """A copy of `model`, an inference model or its file, with `parameters` instead of its own.

    An adapter, whose matrices may be among them, is merged into its weights.

    Raises GraphgenError, for what is called `file`, if the model lacks one of the parameters, or
    has it in another shape.
    """
    who = f"export({file})"
    result = model_of(model, "export").clone()
    in_inference(result)
    in_evaluation(result)
    own = {} if adapter is None else adapter.matrices
    for name, array in parameters.items():
        if name in own:
            continue
        value = result.graph.initializers.get(name)
        tensor = ir.tensor(array, name=name)
        if value is None or value.shape != array.shape or value.dtype != tensor.dtype:
            found = "missing" if value is None else describe(value)
            raise GraphgenError(
                f"{who}: parameter {name}, {array.dtype}{list(array.shape)}, "
                f"is {found} in the model; give the model that the artifacts were made from, and "
                "optimize it afterwards"
            )
        value.const_value = tensor
    if adapter is not None:  # whose weights are these, or what they are in few bits
        result = replace(adapter, spots={}).merged(result)
    return replace(model, model=result) if isinstance(model, Optimized) else result


def trained_models(
    files: Sequence[Path],
    parameters: Mapping[str, Array],
    file: str,
    adapter: Adapter | None = None,
) -> list[ModelLike]:
    """What `trained_model` makes of each file of a folder, with its part of what was trained."""
    if len(files) == 1:
        return [trained_model(files[0], parameters, file, adapter)]
    models, left = [load(path) for path in files], {*parameters}
    parts: list[Adapter | None] = [None] * len(models)
    if adapter is not None:
        left -= {*adapter.matrices}
        every = parts_within("export", replace(adapter, spots={}), models)
        parts = [part if part.matrices or part.saved else None for part in every]
    found = list[ModelLike]()
    for model, part in zip(models, parts, strict=True):
        own = {n: x for n, x in parameters.items() if n in model.graph.initializers}
        left -= {*own}
        found.append(trained_model(model, own, file, part))
    if left:
        raise GraphgenError(
            f"export({file}): no graph of the folder has the parameter {min(left)}; give the "
            "folder that the artifacts were made from"
        )
    return found
