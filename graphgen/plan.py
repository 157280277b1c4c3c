"""What a session says of itself: the types of its inputs and outputs, and how it runs."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import onnx

from graphgen.display import on_screen


class TensorType(NamedTuple):
    """What a graph declares about an input or output; `dims` is None if its rank is unknown."""

    dtype: np.dtype[Any] | None
    dims: tuple[int | str | None, ...] | None

    @classmethod
    def of(cls, declared: onnx.TypeProto) -> "TensorType":
        """What a file declares; anything but a tensor has neither dtype nor rank."""
        tensor = declared.tensor_type
        if not declared.HasField("tensor_type"):
            return cls(None, None)
        dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)
        if not tensor.HasField("shape"):
            return cls(dtype, None)
        sizes = (
            d.dim_value if d.HasField("dim_value") and d.dim_value >= 0 else d.dim_param or None
            for d in tensor.shape.dim
        )
        return cls(dtype, tuple(sizes))

    def __str__(self) -> str:
        dims = ["..."] if self.dims is None else ["?" if d is None else str(d) for d in self.dims]
        return f"{self.dtype or 'not a tensor'}[{', '.join(dims)}]"

    @on_screen
    def __repr__(self) -> Iterator[str]:
        yield str(self)


@dataclass(frozen=True)
class Plan:
    """How a session runs its model: `print(plan)` to read it, `plan.json()` to keep it."""

    runtime: str
    processor: str
    device: str
    providers: tuple[str, ...]
    placement: dict[str, int]  # how many nodes run on each, where that was asked of the runtime
    note: str  # why the session runs on the CPU though nobody asked for it, else ''
    execution_order: str
    enable_mem_pattern: bool
    enable_mem_reuse: bool
    graph_optimization_level: str
    disabled_optimizers: tuple[str, ...]
    threads: int | None  # None: the runtime's default
    config: dict[str, str]  # every session config entry, as the runtime got it

    def json(self) -> str:
        """The plan as a JSON object with one member per field."""
        return json.dumps(asdict(self), indent=2)

    def __str__(self) -> str:
        rows = {key.replace("_", " "): value for key, value in asdict(self).items() if value != ""}
        rows |= {f"  {key}": value for key, value in rows.pop("config").items()}
        placed = [f"{count} on {name}" for name, count in rows.pop("placement").items()]
        rows |= {"nodes": ", ".join(placed)} if placed else {}
        rows["threads"] = rows["threads"] or "runtime's default"
        for key, value in rows.items():
            if isinstance(value, tuple):
                rows[key] = ", ".join(value) or "none"
        width = max(map(len, rows))
        return "\n".join(f"{key:<{width}}  {value}" for key, value in rows.items())

    @on_screen
    def __repr__(self) -> Iterator[str]:
        yield "Plan"
        yield from (f"  {line}" for line in str(self).split("\n"))
