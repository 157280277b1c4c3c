"""Kernels that get nodes wrong, fail at the run or end the process: how a table of them is read.

One table for all uses: a session tells of such nodes when it opens, and the target of that name has
no kernel for them.
"""

import math
import os
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import onnx_ir as ir

from graphgen.errors import GraphgenError
from graphgen.maps import from_proto
from graphgen.providers import typed_proto_of


class Fault(NamedTuple):
    """Which nodes of an operator it is about, and what a session tells of them, if anything."""

    of: Callable[[ir.Node], str | None]
    effect: str = ""


_DO = "optimize the model for this provider, or run it on the CPU"
WRONG = "{device} gets {nodes} wrong, without an error; " + _DO
FAILS = "{device} has no kernel for {nodes}, and the run fails; " + _DO
ENDS = "{device}'s kernel of {nodes} ends the process; " + _DO

Faults = Mapping[tuple[str, str], Sequence[Fault]]
"""By domain and operator."""


def operand(node: ir.Node, index: int) -> ir.Value | None:
    """The input of a node, None if it is left out."""
    return node.inputs[index] if len(node.inputs) > index else None


def numbers(node: ir.Node, index: int) -> list[float] | None:
    """What an operand holds, if the file says so beside its graph; None if not."""
    value = operand(node, index)
    known = None if value is None else ir.convenience.get_const_tensor(value)
    if known is None or isinstance(known, ir.ExternalTensor):
        return None
    return [float(n) for n in known.numpy().reshape(-1)]


def sizes_of(node: ir.Node, index: int) -> list[int | ir.SymbolicDim] | None:
    """The shape of an operand, None if it is left out or unknown."""
    value = operand(node, index)
    return None if value is None or value.shape is None else [*value.shape]


def number_of(sizes: Sequence[Any] | None) -> int | None:
    """The product of sizes, None if one is unknown."""
    known = sizes is not None and all(isinstance(n, int) for n in sizes)
    return math.prod(sizes) if sizes is not None and known else None


def trains(node: ir.Node) -> str | None:
    """The run fails: "trainingMode is not supported yet" (WebGPU, plugin 0.4.0), "does not
    support BN opset 14" (CUDA, 1.31)."""
    return "in training mode" if node.attributes.get_int("training_mode", 0) else None


def told(
    who: str,
    device: str,
    faults: Faults,
    model: str | os.PathLike[str] | bytes,
    there: Collection[str],
) -> list[str]:
    """What of a model a device gets wrong or fails on, a line each; it runs the operators `there`.

    Raises GraphgenError for a node that would end the process.
    """
    known = {key: rows for key, rows in faults.items() if key[1] in there}
    if not any(fault.effect for rows in known.values() for fault in rows):
        return []
    read = from_proto(typed_proto_of(model))
    found: dict[str, Counter[str]] = {}
    for node in chain(read.graph.all_nodes(), *(f.all_nodes() for f in read.functions.values())):
        for fault in known.get((node.domain, node.op_type), ()):
            if fault.effect and (which := fault.of(node)):
                found.setdefault(fault.effect, Counter())[f"{node.op_type} {which}"] += 1
    lines = []
    for effect, counts in found.items():
        nodes = ", ".join(f"{n} {which}" for which, n in counts.items())
        lines.append(effect.format(device=device, nodes=nodes))
        if effect is ENDS:
            raise GraphgenError(f"{who}: {lines[-1]}")
    return lines
