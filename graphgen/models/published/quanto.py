"""Weights of optimum-quanto, of which their names alone say that they are of few bits."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from graphgen.errors import GraphgenError
from graphgen.files import present, read_json
from graphgen.models.published.compressed import Compressed
from graphgen.safetensors import Weight

_DATA, _PACKED, _SCALE = "weight._data", "weight._data._data", "weight._scale"
_EIGHT = Compressed(frozenset({8}), frozenset(), None, False)


@dataclass(frozen=True)
class Quanto:
    """How optimum-quanto stores the weight of a layer: int8 or FP8 with a scale for each row."""

    rounds: bool
    method = "quanto"
    endings = (_DATA, _SCALE, "input_scale", "output_scale")
    spare = ()

    def weight(self, layer: str, parts: Mapping[str, Weight]) -> tuple[Weight | None, list[str]]:
        """The weight that the tensors of a layer are, and what is wrong."""
        if _DATA not in parts or _SCALE not in parts:
            return None, []
        return _EIGHT.weight(layer, {"weight": parts[_DATA], "weight_scale": parts[_SCALE]})


def quanto_in(folder: Path, stored: Mapping[str, Weight]) -> Quanto | None:
    """The form, if weights have its names. Raises GraphgenError for two or four bits."""
    for name in stored:
        if name.endswith(f".{_PACKED}"):
            raise GraphgenError(
                f"{folder}: {name} is of optimum-quanto in two or four bits, which are not read: "
                "its dequantize() makes floats, which you save"
            )
    if not any(name.endswith(f".{_DATA}") for name in stored):
        return None
    path = folder / "quanto_qmap.json"
    layers = (read_json(path) if present(path) else {}).values()
    kinds = [layer.get("activations", "none") for layer in layers if isinstance(layer, dict)]
    return Quanto(any(kind != "none" for kind in kinds))
