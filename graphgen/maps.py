"""Maps (dictionaries): classifiers give them and vectorizers take them, and onnx_ir has no type.

A value that holds maps has no type in a graph. Those of inputs and outputs are kept in the graph's
meta, and stand in files again.
"""

from pathlib import Path
from typing import TypeAlias

import onnx
import onnx_ir as ir

MAPS = "graphgen.maps"
"""In a graph's meta: the types of its inputs and outputs that hold maps, by name."""

Types: TypeAlias = dict[str, onnx.TypeProto]


def holds_maps(kind: onnx.TypeProto) -> bool:
    """Whether a type is a map, or a sequence or optional of maps."""
    for outer in ("sequence_type", "optional_type"):
        if kind.HasField(outer):
            return holds_maps(getattr(kind, outer).elem_type)
    return bool(kind.HasField("map_type"))


def from_proto(proto: onnx.ModelProto) -> ir.Model:
    """The model of a file, from which the types that hold maps are taken."""
    graph, taken = proto.graph, Types()
    for info in [info for info in graph.value_info if holds_maps(info.type)]:
        graph.value_info.remove(info)
    for value in (*graph.input, *graph.output):
        if holds_maps(value.type):
            taken[value.name] = onnx.TypeProto.FromString(value.type.SerializeToString())
            value.ClearField("type")
    model = ir.from_proto(proto)
    if taken:
        model.graph.meta[MAPS] = taken
    return model


def load(path: Path) -> ir.Model:
    """As `onnx_ir.load`: larger weights that lie next to the file stay there."""
    model = from_proto(onnx.load(path, load_external_data=False))
    ir.external_data.set_base_dir(model.graph, path.parent)
    return model


def to_proto(model: ir.Model) -> onnx.ModelProto:
    """The model as a file has it, with the types that were taken."""
    proto: onnx.ModelProto = ir.to_proto(model)
    taken: Types = model.graph.meta.get(MAPS, {})
    for value in (*proto.graph.input, *proto.graph.output) if taken else ():
        if value.name in taken:
            value.type.CopyFrom(taken[value.name])
    return proto
