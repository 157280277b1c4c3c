"""A compiler for transformers: declare, fuse, export as ONNX, run and train on ONNX Runtime."""

import os.path  # and what else is loaded already: Ctrl-C has a traceback until this is imported
import sys
from importlib import import_module
from types import ModuleType

from graphgen.version import VERSION

TYPE_CHECKING = False
__version__ = VERSION

_folder = os.path.dirname(os.path.abspath(__file__))
if not os.path.isdir(f"{_folder}/ops"):  # a clone without symbolic links, run in place
    __path__.append(os.path.dirname(_folder))

if TYPE_CHECKING:  # others import a name when it is first used: see `_Roof`
    from graphgen import nn, ops
    from graphgen.autodiff import grad
    from graphgen.deployment import build_folder
    from graphgen.errors import GateError, GraphgenError, GraphgenWarning
    from graphgen.export.adapters import Adapter
    from graphgen.export.artifacts import artifacts
    from graphgen.export.named_losses import Loss
    from graphgen.export.optimizers import SGD, AdamW, Group
    from graphgen.export.read import load
    from graphgen.export.session import Session
    from graphgen.export.torch_modules import from_torch
    from graphgen.export.write import export
    from graphgen.generation import generate
    from graphgen.laboratory.bisect import bisect
    from graphgen.laboratory.compare import compare
    from graphgen.laboratory.diff import diff
    from graphgen.laboratory.remarks import explain
    from graphgen.laboratory.text import assert_graph
    from graphgen.nn.module import bfloat16, bool_, build, float16, float32, float64, int32, int64
    from graphgen.passes import optimize
    from graphgen.passes.training.adapters import LoRA
    from graphgen.train import Trainer, TrainingSession, schedule, to_checkpoint
    from graphgen.value import Tensor

__all__ = [
    "SGD",
    "AdamW",
    "Adapter",
    "GateError",
    "GraphgenError",
    "GraphgenWarning",
    "Group",
    "LoRA",
    "Loss",
    "Session",
    "Tensor",
    "Trainer",
    "TrainingSession",
    "artifacts",
    "assert_graph",
    "bfloat16",
    "bisect",
    "bool_",
    "build",
    "build_folder",
    "compare",
    "diff",
    "explain",
    "export",
    "float16",
    "float32",
    "float64",
    "from_torch",
    "generate",
    "grad",
    "int32",
    "int64",
    "load",
    "nn",
    "ops",
    "optimize",
    "schedule",
    "to_checkpoint",
]

_HOMES = {
    "autodiff": "grad",
    "deployment": "build_folder",
    "errors": "GateError GraphgenError GraphgenWarning",
    "export.adapters": "Adapter",
    "export.artifacts": "artifacts",
    "export.named_losses": "Loss",
    "export.optimizers": "SGD AdamW Group",
    "export.read": "load",
    "export.session": "Session",
    "export.torch_modules": "from_torch",
    "export.write": "export",
    "generation": "generate",
    "laboratory.bisect": "bisect",
    "laboratory.compare": "compare",
    "laboratory.diff": "diff",
    "laboratory.remarks": "explain",
    "laboratory.text": "assert_graph",
    "nn.module": "bfloat16 bool_ build float16 float32 float64 int32 int64",
    "passes": "optimize",
    "passes.training.adapters": "LoRA",
    "train": "Trainer TrainingSession schedule to_checkpoint",
    "value": "Tensor",
}
"""The same imports, for `_Roof`."""

_HOME_OF = {name: f"graphgen.{home}" for home, names in _HOMES.items() for name in names.split()}


class _Roof(ModuleType):
    """This package: each public name, and each module, is imported when it is first used."""

    def __getattr__(self, name: str) -> object:
        if name in _HOME_OF:
            found = vars(self)[name] = getattr(import_module(_HOME_OF[name]), name)
            return found
        module = f"{__name__}.{name}"
        if not name.startswith("_"):
            try:
                return import_module(module)
            except ModuleNotFoundError as error:
                if error.name != module:
                    raise
        from graphgen.errors import missing, near

        raise missing(__name__, name, lambda public: near(public, __all__))

    def __setattr__(self, name: str, value: object) -> None:
        """Keep `graphgen.export` the function, not the subpackage that holds it.

        The import system sets a subpackage on its package, whoever imports it first. Reach the
        modules of this one by `from graphgen.export`.
        """
        if name not in _HOME_OF or not isinstance(value, ModuleType):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*__all__, *(name for name in vars(self) if name.startswith("__"))})


sys.modules[__name__].__class__ = _Roof
