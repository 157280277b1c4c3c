"""Adapters in files of the runtime, which its LoraAdapter reads."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from graphgen.errors import GraphgenError
from graphgen.export.write import replacing
from graphgen.files import path_of, regular
from graphgen.operands import Array
from graphgen.providers import runtime_message
from graphgen.runtime import import_runtime


def _adapter_format() -> Any:
    """The runtime's class of adapters' files."""
    ort = import_runtime()
    if not hasattr(ort, "AdapterFormat"):
        raise GraphgenError(
            f"adapter: onnxruntime {ort.__version__} has no AdapterFormat, which 1.20 has: "
            "upgrade it"
        )
    return ort.AdapterFormat


def read_file(file: Path) -> tuple[dict[str, Array], int]:
    """The arrays in a file, by name, and the number of the model's version."""
    form = _adapter_format()
    try:
        regular(file).open("rb").close()
        read = form.read_adapter(os.fspath(file))
        # Copies: its values are views of memory that it frees.
        arrays = {name: np.array(x.numpy()) for name, x in read.get_parameters().items()}
        version = int(read.get_model_version())
        del read
    except OSError as error:
        raise GraphgenError(
            f"{file} cannot be read: {error.strerror}; give what graphgen adapter wrote"
        ) from None
    except Exception as error:
        raise GraphgenError(
            f"{file} is no adapter of the runtime ({runtime_message(error)}); write it again"
        ) from None
    return arrays, version


def write_file(path: str | os.PathLike[str], arrays: Mapping[str, Array], version: int) -> Path:
    """Write arrays for a version of a model."""
    form, ort = _adapter_format()(), import_runtime()
    form.set_adapter_version(1)
    form.set_model_version(version)
    form.set_parameters({n: ort.OrtValue.ortvalue_from_numpy(x) for n, x in arrays.items()})
    with replacing("adapter", path := path_of(path, "adapter")) as [file]:
        form.export_adapter(os.fspath(file))
    return path
