"""A compiler for transformers: declare, fuse, export as ONNX, run and train on ONNX Runtime."""

from pathlib import Path
from typing import Any

if not Path(__file__).with_name("ops").is_dir():  # a clone without symbolic links, run in place
    __path__.append(str(Path(__file__).parents[1]))

from graphgen import display, nn, ops
from graphgen.autodiff import grad
from graphgen.errors import GateError, GraphgenError, GraphgenWarning
from graphgen.export.artifacts import artifacts
from graphgen.export.optimizers import SGD, AdamW

# `graphgen.export` names this function, not the subpackage, which was bound to the name when it
# was first imported, above, and is not bound again: reach its modules by `from graphgen.export`.
from graphgen.export.read import load
from graphgen.export.session import Session
from graphgen.export.write import export
from graphgen.generation import generate
from graphgen.laboratory.compare import compare
from graphgen.nn.module import bfloat16, bool_, build, float16, float32, float64, int32, int64
from graphgen.passes import optimize
from graphgen.train import Trainer, schedule

__all__ = [
    "SGD",
    "AdamW",
    "GateError",
    "GraphgenError",
    "GraphgenWarning",
    "Session",
    "Trainer",
    "artifacts",
    "bfloat16",
    "bool_",
    "build",
    "compare",
    "export",
    "float16",
    "float32",
    "float64",
    "generate",
    "grad",
    "int32",
    "int64",
    "load",
    "nn",
    "ops",
    "optimize",
    "schedule",
]


def _page(model: Any) -> str:
    from graphgen.laboratory.notebook import of_model

    return of_model(model)


display.PAGES.append(_page)
