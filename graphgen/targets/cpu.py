"""What kernels of the CPU get wrong, without an error (seen in onnxruntime 1.20 to 1.32)."""

import os
from typing import Any

import onnx_ir as ir

from graphgen.targets.faults import Fault, Faults, sizes_of, told


def _turns_for_vector(node: ir.Node) -> str | None:
    """Aᵀ v of a vector v: the results are wrong, without an error (1.20 to 1.32)."""
    shape = sizes_of(node, 1)
    turned = node.attributes.get_int("transA", 0) and shape is not None and len(shape) == 1
    return "of a transposed matrix and a vector" if turned else None


def _overwrites(node: ir.Node) -> str | None:
    """Statistics that no graph gives out are written over the operands, whoever else reads them.

    If those are constants, y is wrong as well, another one at each run (1.20 to 1.32).
    """
    given_out = len(node.outputs) > 2 and all(y.is_graph_output() for y in node.outputs[1:])
    trains = node.attributes.get_int("training_mode", 0)
    return "in training mode that keeps its statistics inside" if trains and not given_out else None


_WRONG = "the {device} gets {nodes} wrong, without an error; optimize the model"

FAULTS: Faults = {
    ("", "BatchNormalization"): [Fault(_overwrites, _WRONG)],
    # `header.turns_for_vector` keeps the runtime from making one of these.
    ("com.microsoft", "FusedMatMul"): [Fault(_turns_for_vector)],
}


def faults(who: str, model: str | os.PathLike[str] | bytes, device: Any, session: Any) -> list[str]:
    """What a session gets wrong on the CPU, a line each."""
    return told(who, "CPU", FAULTS, model, {"BatchNormalization"})
