"""The inputs that random numbers are a function of."""

import onnx_ir as ir

from graphgen.errors import GraphgenError
from graphgen.infer import describe


def random_numbers(graph: ir.Graph, what: str) -> tuple[ir.Value, ir.Value]:
    """The inputs `seed` and `step`; new ones if the graph has no dropout of its own."""
    known = {value.name: value for value in graph.inputs}
    for name in ("seed", "step"):
        if name not in known:
            kind = ir.TensorType(ir.DataType.INT64)
            known[name] = ir.Value(name=name, type=kind, shape=ir.Shape([]))
            graph.inputs.append(known[name])
        elif known[name].dtype is not ir.DataType.INT64 or known[name].shape != ():
            raise GraphgenError(
                f"artifacts: {what} needs the input {name} for its random numbers, "
                f"int64[], and the model has it as {describe(known[name])}: rename that, or leave "
                "dropout out"
            )
    return known["seed"], known["step"]
