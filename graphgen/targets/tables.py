"""Which kernels a release of ONNX Runtime has: committed tables, and what a node needs."""

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from importlib.resources import files
from typing import Any

import onnx
import onnx_ir as ir

from graphgen.infer import is_default, schema_of
from graphgen.version import minor

_LOWEST_OPSET = 13

Row = tuple[int, int | None, dict[str, list[str]]]
Kernels = dict[str, dict[str, list[Row]]]
"""Domain to operator to rows: first and last version, and the dtypes of each type parameter."""


@cache
def versions_of(domain: str, op_type: str, newest: int) -> frozenset[int]:
    """The schema versions of an operator that an exported file can ask for.

    Export stamps the lowest legal opset, from 13 on, so any of them may apply.
    """
    schemas = [schema_of(domain, op_type, v) for v in range(_LOWEST_OPSET, newest + 1)]
    return frozenset(schema.since_version for schema in schemas if schema is not None) or frozenset(
        {1}
    )


def type_parameters(node: ir.Node, version: int) -> dict[str, str] | None:
    """The dtype of each type parameter of a node; without a schema, of T: the first output's.

    None if the node has an input or an attribute that this version of its schema has not.
    """
    schema = schema_of(node.domain, node.op_type, version)
    sides: list[tuple[str | None, ir.Value | None]]
    if schema is None:
        sides = [("T", value) for value in node.outputs[:1]]
    else:
        sides = [(_formal(schema.inputs, i), value) for i, value in enumerate(node.inputs)]
        sides += [(_formal(schema.outputs, i), value) for i, value in enumerate(node.outputs)]
        newer = (a for a in node.attributes.values() if a.name not in schema.attributes)
        if not all(is_default(node, attribute) for attribute in newer):
            return None
    found: dict[str, str] = {}
    for name, value in sides:
        if value is not None and isinstance(value.type, ir.TensorType):
            if name is None:
                return None
            found.setdefault(name, value.type.dtype.name.lower())
    return found


def _formal(side: Sequence[onnx.defs.OpSchema.FormalParameter], index: int) -> str | None:
    """The type of an input or output; the last one repeats if it is variadic."""
    if index < len(side):
        return side[index].type_str
    many = onnx.defs.OpSchema.FormalParameterOption.Variadic
    return side[-1].type_str if side and side[-1].option == many else None


@cache
def committed(provider: str) -> dict[str, Any]:
    """The table of `cpu`, `cuda` or `webgpu` that bench/kernel_tables.py wrote."""
    table: dict[str, Any] = json.loads(
        files("graphgen.targets").joinpath(f"kernels_{provider}.json").read_text("utf-8")
    )
    return table


def kernels_of(table: Mapping[str, Any], runtime: str) -> Kernels:
    """The kernels of one version, from a table of several."""
    at = minor(runtime)

    def rows(written: list[Any]) -> list[Row]:
        return [
            (first, last, {p: dtypes.split() for p, dtypes in parameters.items()})
            for first, last, parameters, *span in written
            if not span or minor(span[0]) <= at <= minor((*span, runtime)[1])
        ]

    return {
        domain: {name: found for name, written in operators.items() if (found := rows(written))}
        for domain, operators in table["kernels"].items()
    }


@lru_cache(256)  # a few texts, thousands of times
def plain(written: str) -> str:
    """`float` for `tensor(float)`; other kinds keep their wrapper: `seq(float)`."""
    return re.sub(r"\btensor\((\w+)\)", r"\1", written)
