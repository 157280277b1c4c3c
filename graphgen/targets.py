"""What runs natively where, and what pays: asked of the runtime, or read from committed tables."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

import onnx_ir as ir

from graphgen.errors import GraphgenError
from graphgen.infer import formal_input, schema_of
from graphgen.ops.kernels import REFUSED, Runtime, form_of, rows_of
from graphgen.runtime import import_runtime

_LOWEST_OPSET = 13
_OFFICIAL = "1.19"  # the last release with a trainer

Row = tuple[int, int | None, dict[str, list[str]]]
Kernels = dict[str, dict[str, list[Row]]]
"""Domain to operator to rows: first and last version, and the dtypes of each type parameter."""


@dataclass(frozen=True)
class Target:
    """A runtime's execution provider and its kernels."""

    name: str
    runtime: str
    opset: int  # the newest that it reads
    kernels: Kernels = field(repr=False)

    def runs(self, node: ir.Node) -> bool:
        """Whether the provider has a kernel for this node, its opset and its dtypes.

        float16 counts as float32 on the CPU: the runtime puts casts around such a node.
        """
        return self.missing(node) is None

    def missing(self, node: ir.Node) -> str | None:
        """Why there is no kernel for this node, or None where there is one."""
        rows = self.kernels.get(node.domain, {}).get(node.op_type)
        if not rows:
            return f"{self} has no {node.op_type}"
        for refused in REFUSED.get((node.domain, node.op_type), ()):
            if reason := refused(node, Runtime(self._provider, minor(self.runtime))):
                return f"{self} refuses {node.op_type} {reason}"
        versions = _versions(node.domain, node.op_type, self.opset)
        dtypes = _type_parameters(node, self.opset)
        for first, last, parameters in rows:
            # An open-ended kernel serves the schema it was written for, not a newer one.
            if not any(v == first or (last and first <= v <= last) for v in versions):
                continue
            if all(self._admits(parameters.get(p), d) for p, d in dtypes.items()):
                return None
        told = ", ".join(f"{p}={d}" for p, d in dtypes.items())
        return f"{self} has no {node.op_type} for {told}"

    def lacks(self, node: ir.Node) -> str | None:
        """Why no session can load this node; None too where the runtime knows a body for it.

        Nothing is said of domains whose kernels are not known here.
        """
        schema: Any = schema_of(node.domain, node.op_type, self.opset)
        has_body = schema and (schema.has_function or schema.has_context_dependent_function)
        return None if has_body or node.domain not in self.kernels else self.missing(node)

    def pays(self, node: ir.Node, *, optional: bool = False) -> str | None:
        """Why this node is slower than the nodes it stands for, or None; as bench/pays.py found.

        Where the number of rows is not known, a node has to lose at all that were measured. One
        that is `optional`, because those nodes are good ones themselves, has to win at all.
        """
        instead_of, ratios = self._ratios(node)
        if optional and not ratios:
            dtype = node.outputs[0].dtype
            return f"no figure for {node.op_type} of {dtype} on {self._provider}: run bench/pays.py"
        best, worst = min(ratios.values(), default=0.0), max(ratios.values(), default=0.0)
        if worst < _WIN if optional else best <= _TIE:
            return None
        told = ", ".join(f"{ratio:.2f} x at {n} rows" for n, ratio in ratios.items())
        verdict = "takes longer than" if worst > _TIE else "is not faster than"
        return f"{node.op_type} {verdict} {instead_of}: {told}, measured by bench/pays.py"

    def prefers(self, other: ir.Node, node: ir.Node) -> str | None:
        """Why `other`, of the same result, is faster than `node`; None where it is not.

        Where the number of rows is not known, the longest that were measured count: there, the
        time is spent.
        """
        (_, theirs), (instead_of, own) = self._ratios(other), self._ratios(node)
        rows = max({*theirs} & {*own}, default=0)
        if not rows or theirs[rows] > own[rows] / _TIE:
            return None
        told = f"{other.op_type} takes {theirs[rows]:.2f} of {instead_of} at {rows} rows"
        return f"{told}, {node.op_type} {own[rows]:.2f}, measured by bench/pays.py"

    def _ratios(self, node: ir.Node) -> tuple[str, dict[int, float]]:
        """What a node was measured against, and its time relative to that, by rows."""
        y = node.outputs[0]
        dtype = y.dtype.name.lower() if y.dtype is not None else ""
        measured = _measured().get(self._provider, {}).get(dtype, {}).get("ratios", {})
        row = dict(measured.get(form_of(node), {}))
        instead_of = row.pop("instead_of", "")
        ratios = {int(rows): ratio for rows, ratio in row.items()}
        rows = rows_of(node)
        if rows is not None and ratios:
            near = min(ratios, key=lambda n: abs(math.log(n / max(rows, 1))))
            ratios = {near: ratios[near]}
        return instead_of, ratios

    @property
    def _provider(self) -> str:
        return "cuda" if self.name == "cuda" else "cpu"

    def __str__(self) -> str:
        return f"{self.name} (onnxruntime {self.runtime})"

    def _admits(self, allowed: list[str] | None, dtype: str) -> bool:
        if allowed is None or dtype in allowed:
            return True
        return dtype == "float16" and self.name != "cuda" and "float" in allowed


@cache
def _versions(domain: str, op_type: str, newest: int) -> frozenset[int]:
    """The schema versions of an operator that an exported file can ask for.

    Export stamps the lowest legal opset, from 13, so any of them may be the one in force.
    """
    schemas = [schema_of(domain, op_type, v) for v in range(_LOWEST_OPSET, newest + 1)]
    return frozenset(schema.since_version for schema in schemas if schema is not None) or frozenset(
        {1}
    )


def _type_parameters(node: ir.Node, opset: int) -> dict[str, str]:
    """The dtype of each type parameter of a node; without a schema, of T: the first output's."""
    schema = schema_of(node.domain, node.op_type, opset)
    found: dict[str, str] = {}
    for i, value in enumerate(node.inputs if schema is not None else node.outputs[:1]):
        if value is not None and isinstance(value.type, ir.TensorType):
            name = formal_input(schema, i).type_str if schema is not None else "T"
            found.setdefault(name, value.type.dtype.name.lower())
    return found


_TIE, _WIN = 1.03, 0.97  # between them the graph with fewer nodes wins, or that which is there


@cache
def _measured() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(files("graphgen").joinpath("pays.json").read_text("utf-8"))
    return table


@cache
def target(name: str, runtime: str | None = None) -> Target:
    """The profile `cpu`, `cuda` or `official`, of a version such as "1.20".

    `cpu` without a version asks the installed runtime; `official` is the last runtime that comes
    with a trainer, 1.19. All others are read from committed tables, so that neither a GPU nor that
    version is needed. Raises GraphgenError for a name or a version that is not known.
    """
    if name not in ("cpu", "cuda", "official"):
        raise GraphgenError(f"target {name!r} is not known: choose cpu, cuda or official")
    if name == "cpu" and runtime is None:
        installed = import_runtime().__version__
        return Target(name, installed, newest_opset(), registered("CPUExecutionProvider"))
    table = committed("cuda" if name == "cuda" else "cpu")
    known = {minor(v): v for v in table["runtimes"]}
    if name == "official":
        known = {minor(_OFFICIAL): known[minor(_OFFICIAL)]}
    wanted = max(known) if runtime is None else minor(runtime)
    if wanted not in known:
        raise GraphgenError(
            f"target {name}: onnxruntime {runtime!r} is not known; there are kernel tables of "
            + ", ".join(v.rpartition(".")[0] for v in known.values())
        )
    version = known[wanted]
    return Target(name, version, table["runtimes"][version], kernels_of(table, version))


def minor(version: str) -> tuple[int, ...]:
    """(1, 20) of "1.20.1" and of "1.20"; () of what is no version."""
    return tuple(map(int, version.split(".")[:2])) if re.match(r"\d+\.\d+", version) else ()


@cache
def committed(provider: str) -> dict[str, Any]:
    """The table of `cpu` or `cuda` that bench/kernel_tables.py wrote."""
    table: dict[str, Any] = json.loads(
        files("graphgen").joinpath(f"kernels_{provider}.json").read_text("utf-8")
    )
    return table


def kernels_of(table: Mapping[str, Any], runtime: str) -> Kernels:
    """The kernels of one version, out of a table of several."""
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


@cache
def newest_opset() -> int:
    """The newest opset of the standard domain that the installed runtime reads."""
    import_runtime()
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    schemas = state.get_all_operator_schema()
    newest: int = max(s.since_version for s in schemas if s.domain in ("", "ai.onnx"))
    return newest


def registered(provider: str) -> Kernels:
    """The kernels of the installed runtime, in the shape of `kernels_of`."""
    import_runtime()
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    kernels: Kernels = {}
    for kernel in state.get_all_opkernel_def():
        if kernel.provider != provider:
            continue
        first, last = kernel.version_range
        parameters = {
            p: list(map(plain, kernel.type_constraints[p])) for p in kernel.type_constraints
        }
        row = (first, None if last >= 2**31 - 1 else last, parameters)
        domain = "" if kernel.domain == "ai.onnx" else kernel.domain
        kernels.setdefault(domain, {}).setdefault(kernel.op_name, []).append(row)
    return kernels


def plain(written: str) -> str:
    """`float` of `tensor(float)`; other kinds keep their wrapper: `seq(float)`."""
    return re.sub(r"\btensor\((\w+)\)", r"\1", written)
