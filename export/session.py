"""Models in any form, and sessions on those that are not files yet."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir

from graphgen import runtime
from graphgen.errors import GraphgenError
from graphgen.export.read import load
from graphgen.export.write import to_bytes
from graphgen.passes import Optimized
from graphgen.runtime import Provider


def model_of(given: Any, who: str) -> ir.Model:
    """The given model: itself, in what `optimize` returned, or in the file at a path."""
    if isinstance(given, str | os.PathLike):
        return load(given)
    model = getattr(given, "model", given)
    if not isinstance(model, ir.Model):
        raise GraphgenError(f"{who}: {given!r} is not a model; give one, or the path of a file")
    return model


class Session(runtime.Session):
    """A model on ONNX Runtime: `y, = Session("block.onnx")(x=array)`.

    `model` is a path, the bytes of an ONNX file, or what `build`, `load` or `optimize` returned,
    opened as `export` would write it. Everything else is as in `graphgen.runtime.Session`.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | bytes | ir.Model | Optimized,
        *,
        provider: Provider | None = None,
        options: Mapping[str, str] | None = None,
        optimize: bool = True,
        threads: int | None = None,
        outputs: Sequence[str] | None = None,
        profile: str | None = None,
    ) -> None:
        super().__init__(
            to_bytes(model) if isinstance(model, (ir.Model, Optimized)) else model,
            provider=provider,
            options=options,
            optimize=optimize,
            threads=threads,
            outputs=outputs,
            profile=profile,
        )
