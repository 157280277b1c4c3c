"""What runs natively where, and what pays: asked of the runtime, or read from committed tables."""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

import onnx_ir as ir

from graphgen.errors import GraphgenError
from graphgen.infer import describe, formal_input, same_dim, schema_of
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
            if reason := refused(node, self):
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
        rows = _rows_of(node)
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


def form_of(node: ir.Node) -> str:
    """The row of graphgen/pays.json: the operator, and of attention how it is called."""
    given = {name: attr.value for name, attr in node.attributes.items()}
    if not node.op_type.endswith("Attention"):
        return f"{node.op_type} tanh" if given.get("approximate") == "tanh" else node.op_type
    shapes = [_shape_of_input(node, i) for i in range(2)]
    split = all(shape is not None and len(shape) == 4 for shape in shapes)
    query, key = given.get("q_num_heads", given.get("num_heads")), given.get("kv_num_heads")
    if split:
        query, key = (shape[1] for shape in shapes if shape is not None)
    causal = given.get("is_causal") or given.get("unidirectional") or "Group" in node.op_type
    traits = {"causal": causal, "grouped": key and key != query, "4D": split}
    return " ".join([node.op_type, *(trait for trait, has in traits.items() if has)])


def _rows_of(node: ir.Node) -> int | None:
    """The product of the result's sizes but the last; of attention, the number of queries."""
    shape = node.outputs[0].shape
    if shape is None or len(shape) < 2:
        return None
    sizes = shape.dims[-2:-1] if node.op_type.endswith("Attention") else shape.dims[:-1]
    known = [d for d in sizes if isinstance(d, int)]
    return math.prod(known) if len(known) == len(sizes) else None


def _is_empty(node: ir.Node, target: Target) -> str | None:
    """Attention wants sizes above 0; before 1.29, MultiHeadAttention ended the process there."""
    if node.domain and minor(target.runtime) >= (1, 29):
        return None
    shapes = [_shape_of_input(node, i) for i in range(3)]
    return "of an empty tensor" if any(s is not None and 0 in s.dims for s in shapes) else None


def _mask_broadcasts(node: ir.Node, target: Target) -> str | None:
    """The mask is read by the sizes of Q and K: the last two must be there, (B, 1, 1, S) fails."""
    mask, *others = (_shape_of_input(node, i) for i in (3, 0, 1))
    if mask is None:
        return None
    wanted = [None if shape is None else shape[-2] for shape in others]
    ones = len(mask) < 2 or any(m == 1 != w for m, w in zip(mask[-2:], wanted, strict=True))
    return f"with a mask that broadcasts, {list(mask)}" if ones else None


def _rows_are_not_zero(node: ir.Node, target: Target) -> str | None:
    """Before 1.28, a row that the mask hides entirely gives the mean of V, or NaN."""
    old = minor(target.runtime) < (1, 28) and _shape_of_input(node, 3) is not None
    return "with a mask that may hide all keys" if old else None


def _is_packed(node: ir.Node, target: Target) -> str | None:
    """Q, K and V in one tensor, or K and V: the schema has it, the kernel of the CPU has not."""
    packed = len([x for x in node.inputs[:3] if x is not None]) < 3
    return "with packed operands" if packed and target.name != "cuda" else None


def _caches_broadcast(node: ir.Node, target: Target) -> str | None:
    """Without positions, the caches have a row of angles for each place in the batch."""
    x, cos, sin = (_shape_of_input(node, i) for i in range(3))
    if (len(node.inputs) > 3 and node.inputs[3] is not None) or x is None:
        return None
    wanted = [x[0], x[1 if len(x) == 3 else 2]]
    full = all(c is not None and all(map(same_dim, c.dims[:2], wanted)) for c in (cos, sin))
    return None if full else f"with caches that broadcast, {describe(node.inputs[1])}"


def _shape_of_input(node: ir.Node, index: int) -> ir.Shape | None:
    value = node.inputs[index] if len(node.inputs) > index else None
    return None if value is None else value.shape


REFUSED: dict[tuple[str, str], list[Callable[[ir.Node, Target], str | None]]] = {
    ("", "Attention"): [_is_empty, _mask_broadcasts, _rows_are_not_zero],
    ("", "RotaryEmbedding"): [_caches_broadcast],
    ("com.microsoft", "MultiHeadAttention"): [_is_empty, _is_packed],
}
"""What kernels refuse though schemas and type constraints admit it; a test asks for each."""


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
