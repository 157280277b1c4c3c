"""Models in any form, and sessions on those that are not files yet.

A session on a file needs the runtime alone: what reads and writes graphs is imported for models.
"""

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from graphgen import runtime
from graphgen.arguments import checked
from graphgen.runtime import Provider

if TYPE_CHECKING:
    import onnx_ir as ir

    from graphgen.graph import ModelLike


def model_of(given: "str | os.PathLike[str] | ModelLike", who: str) -> "ir.Model":
    """The given model: itself, in what `optimize` returned, or in the file at a path."""
    from graphgen.export.read import load
    from graphgen.graph import model_in

    return load(given) if isinstance(given, str | os.PathLike) else model_in(given, who)


@checked
class Session(runtime.Session):
    """A model on ONNX Runtime: `y, = Session("block.onnx")(x=array)`.

    `model` is a path, the bytes of an ONNX file, or what `build`, `load` or `optimize` returned,
    opened as `export` would write it. Everything else is as in `graphgen.runtime.Session`.
    """

    def __init__(
        self,
        model: "str | os.PathLike[str] | bytes | ModelLike",
        *,
        provider: Provider | None = None,
        options: Mapping[str, str] | None = None,
        optimize: bool = True,
        threads: int | None = None,
        outputs: Sequence[str] | None = None,
        profile: str | None = None,
        strict: bool = False,
    ) -> None:
        super().__init__(
            model if isinstance(model, str | os.PathLike | bytes) else _written(model),
            provider=provider,
            options=options,
            optimize=optimize,
            threads=threads,
            outputs=outputs,
            profile=profile,
            strict=strict,
        )


def _written(given: Any) -> Any:
    """The bytes of a model, or what is none as it is given: the session refuses it."""
    import onnx_ir as ir

    from graphgen.export.write import to_bytes

    return to_bytes(given) if isinstance(getattr(given, "model", given), ir.Model) else given
