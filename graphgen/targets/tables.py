"""Which kernels a release of ONNX Runtime has: committed tables, and what a node needs."""

import json
import re
from collections.abc import Mapping
from functools import cache, lru_cache
from importlib.resources import files
from typing import Any

import onnx_ir as ir

from graphgen.infer import formal_input, schema_of
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


def type_parameters(node: ir.Node, opset: int) -> dict[str, str]:
    """The dtype of each type parameter of a node; without a schema, of T: the first output's."""
    schema = schema_of(node.domain, node.op_type, opset)
    found: dict[str, str] = {}
    for i, value in enumerate(node.inputs if schema is not None else node.outputs[:1]):
        if value is not None and isinstance(value.type, ir.TensorType):
            name = formal_input(schema, i).type_str if schema is not None else "T"
            found.setdefault(name, value.type.dtype.name.lower())
    return found


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
