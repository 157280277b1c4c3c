"""Many files that share one model's weights, which are written once."""

from pathlib import Path

import onnx
import onnx_ir as ir

from graphgen.export.opset import in_memory
from graphgen.export.valid import check_file
from graphgen.export.write import Beside, export, tensors_of, write_data
from graphgen.maps import from_proto, to_proto


class Shelf:
    """The weights of a model in one file of a folder; all models made from it refer to them."""

    def __init__(self, model: ir.Model, folder: Path) -> None:
        self.folder, self._model, copy = folder, model, model.clone()
        kept, file = list(tensors_of(copy)), folder / "weights.onnx_data"
        write_data(copy, file, file, iter)
        self._by_tensor: dict[int, Beside] = {}  # by id: the model keeps the tensors alive
        self._by_name: dict[str, Beside] = {}
        for value, old in kept:
            if isinstance(value.const_value, Beside):
                value.const_value.base_dir = folder
                self._by_tensor[id(old)] = self._by_name[str(value.name)] = value.const_value
        self.size = file.stat().st_size

    def refer(self, model: ir.Model) -> ir.Model:
        """A copy of a model that shares tensors with the first; the copy refers to the file."""
        copy = model.clone()
        for value, tensor in list(tensors_of(copy)):
            value.const_value = self._by_tensor.get(id(tensor), tensor)
        return copy

    def write(self, model: ir.Model, name: str) -> Path:
        """`export` a model that shares tensors with the first; those are not written again."""
        return export(self.refer(model), self.folder / f"{name}.onnx", external_data=False)

    def copy(self, source: Path, name: str) -> Path:
        """The file that the first model was read from, node for node."""
        check_file(proto := onnx.load(source, load_external_data=False))
        model, path = from_proto(proto), self.folder / f"{name}.onnx"
        ir.external_data.set_base_dir(model.graph, source.parent)
        for value, tensor in list(tensors_of(model)):
            shelved = self._by_name.get(str(value.name))
            main = model.graph.initializers.get(str(value.name)) is value
            if shelved and main and (shelved.dtype, shelved.shape) == (tensor.dtype, tensor.shape):
                value.const_value = shelved
            elif isinstance(tensor, ir.ExternalTensor):
                value.const_value = in_memory(tensor)
        path.write_bytes(to_proto(model).SerializeToString())
        return path
