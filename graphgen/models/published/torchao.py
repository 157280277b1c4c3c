"""Checkpoints of torchao in safetensors: integers as bytes with zero points, and FP8."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from graphgen.models.published.compressed import Compressed
from graphgen.models.published.config import Config
from graphgen.safetensors import Weight

_FOR_KERNELS = "one of torchao's with integers of 8 bits or floats: give the checkpoint of floats"
_TORCHAO = "Int8WeightOnly IntxWeightOnly Float8WeightOnly Int8DynamicActivationInt8Weight "
_TORCHAO += "Int8DynamicActivationIntxWeight Float8DynamicActivationFloat8Weight"


@dataclass(frozen=True)
class TorchAo:
    """How torchao stores the weight of a layer in safetensors: integers as bytes, or FP8."""

    bits: int
    rounds: bool
    method = "torchao"
    endings = ("_weight_qdata", "_weight_scale", "_weight_zero_point")
    spare = ()

    def weight(self, layer: str, parts: Mapping[str, Weight]) -> tuple[Weight | None, list[str]]:
        """The weight that the tensors of a layer are, and what is wrong."""
        own = {name.removeprefix("_"): weight for name, weight in parts.items()}
        whole, scale = own.pop("weight_qdata", None), own.get("weight_scale")
        if whole is None or scale is None:
            return None, [f"{layer} has {' and '.join(parts)} alone"]
        count = scale.shape[1] if len(scale.shape) == 2 else 1
        size = max((*whole.shape, 0, 0)[1] // max(count, 1), 1)
        form = Compressed(frozenset({self.bits}), frozenset({size}), None, self.rounds)
        return form.weight(layer, own | {"weight": whole})


def _data(of: Any) -> Any:
    """What torchao writes of a member of an enumeration, {"_type": ..., "_data": name}."""
    return of.get("_data") if isinstance(of, dict) else of


def torchao(own: Config) -> TorchAo:
    """What a quantization_config of torchao says.

    Raises GraphgenError for kinds whose weights are in the order of a kernel.
    """
    kinds, bits, dynamic = set[str](), set[int](), False
    pending: list[Any] = [own.raw("quant_type")]
    for value in pending:
        if isinstance(value, list):
            pending += value
        if not isinstance(value, dict):
            continue
        pending += value.values()
        kind = str(value.get("_type"))
        if kind.endswith("Config"):
            kinds.add(kind.removesuffix("Config"))
            dynamic |= "Dynamic" in kind
            given = value.get("_data")
            given = given if isinstance(given, dict) else {}
            form = _data(given.get("intx_packing_format", "UNPACKED_TO_INT8"))
            name = str(_data(given.get("weight_dtype", "int8")))
            if name[:3] == "int" and name[3:].isdecimal():
                bits.add(int(name[3:]))
            elif not name.startswith("float8"):
                own.refuse("weight_dtype", name, _FOR_KERNELS)
            if form != "UNPACKED_TO_INT8":
                own.refuse("intx_packing_format", form, _FOR_KERNELS)
    kinds -= {"FqnTo", "ModuleFqnTo"}
    if not kinds or not kinds <= {*_TORCHAO.split()} or not bits <= {*range(1, 9)}:
        own.refuse("quant_type", sorted(kinds), _FOR_KERNELS)
    for note in ("modules_to_not_convert", "include_input_output_embeddings"):
        own.raw(note)
    own.ignore("untie_embedding_weights", "quant_type_kwargs")
    return TorchAo(max(bits, default=8), dynamic)
