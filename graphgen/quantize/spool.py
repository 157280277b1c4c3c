"""Arrays that wait in a temporary file until they are written into a model's file."""

import math
import os
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import onnx_ir as ir

from graphgen.errors import GraphgenError
from graphgen.operands import Array


class Spool:
    """Arrays in a file without a name, each read when it is wanted: not all fit into memory."""

    def __init__(self, who: str) -> None:
        self._who = who
        with self._own_errors():
            self._file = tempfile.TemporaryFile()  # noqa: SIM115  # kept by its tensors
        weakref.finalize(self, self._file.close)

    @contextmanager
    def _own_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise GraphgenError(
                f"{self._who}: the temporary folder cannot hold the weights: {error.strerror}; "
                "make room there, or name another one in TMPDIR"
            ) from error

    def keep(self, array: Array) -> ir.LazyTensor:
        """The tensor of an array that is written now."""
        start, shape, kind = self._file.seek(0, os.SEEK_END), array.shape, array.dtype
        with self._own_errors():
            self._file.write(np.ascontiguousarray(array).data)
            self._file.flush()

        def read() -> ir.TensorProtocol:
            self._file.seek(start)
            return ir.Tensor(np.fromfile(self._file, kind, math.prod(shape)).reshape(shape))

        return ir.LazyTensor(read, ir.DataType.from_numpy(kind), ir.Shape(shape))

    def weights(
        self, graph: ir.Graph, name: str, arrays: Mapping[str, Array]
    ) -> dict[str, ir.Value]:
        """New weights of a graph for the arrays of one, called after it and their roles."""
        made = dict[str, ir.Value]()
        for role, array in arrays.items():
            tensor, own = self.keep(array), f"{name}_{role}"
            while own in graph.initializers:
                own += "_"
            tensor.name = own
            made[role] = ir.Value(name=own, const_value=tensor, shape=ir.Shape(array.shape))
            made[role].type = ir.TensorType(tensor.dtype)
            graph.register_initializer(made[role])
        return made
