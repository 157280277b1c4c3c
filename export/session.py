"""Sessions on models that are not files yet."""

import os
from collections.abc import Mapping, Sequence

import onnx_ir as ir

from graphgen import runtime
from graphgen.export.files import to_bytes
from graphgen.passes import Optimized


class Session(runtime.Session):
    """A model on ONNX Runtime: `y, = Session("block.onnx")(x=array)`.

    `model` is a path, the bytes of an ONNX file, or what `build`, `load` or `optimize` returned,
    which is opened as `export` would write it. All else is as in `graphgen.runtime.Session`.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | bytes | ir.Model | Optimized,
        *,
        provider: str | None = None,
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
