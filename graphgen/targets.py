"""What runs natively where: asked of the installed runtime, or read from committed tables."""

import json
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

import onnx_ir as ir

from graphgen.errors import GraphgenError
from graphgen.infer import OPSET, formal_input, schema_of
from graphgen.runtime import import_runtime

_LOWEST_OPSET = 13

Kernels = dict[str, dict[str, list[tuple[int, int | None, dict[str, list[str]]]]]]
"""Domain to operator to rows: first and last version, and the dtypes of each type parameter."""


@dataclass(frozen=True)
class Target:
    """A runtime's execution provider: its kernels, and how a session should load our graphs."""

    name: str
    runtime: str
    kernels: Kernels = field(repr=False)
    session_options: dict[str, str] = field(default_factory=dict)

    def runs(self, node: ir.Node) -> bool:
        """Whether the provider has a kernel for this node, its opset and its dtypes.

        float16 counts as float32 on the CPU: the runtime puts casts around such a node.
        """
        return self.missing(node) is None

    def missing(self, node: ir.Node) -> str | None:
        """Why there is no kernel for this node, or None where there is one."""
        rows = self.kernels.get(node.domain, {}).get(node.op_type)
        if not rows:
            return f"{self.name} (onnxruntime {self.runtime}) has no {node.op_type}"
        versions = _versions(node.domain, node.op_type)
        dtypes = _type_parameters(node)
        for first, last, parameters in rows:
            # An open-ended kernel serves the schema it was written for, not a newer one.
            if not any(v == first or (last and first <= v <= last) for v in versions):
                continue
            if all(self._admits(parameters.get(p), d) for p, d in dtypes.items()):
                return None
        told = ", ".join(f"{p}={d}" for p, d in dtypes.items())
        return f"{self.name} (onnxruntime {self.runtime}) has no {node.op_type} for {told}"

    def _admits(self, allowed: list[str] | None, dtype: str) -> bool:
        if allowed is None or dtype in allowed:
            return True
        return dtype == "float16" and self.name == "cpu" and "float" in allowed


@cache
def _versions(domain: str, op_type: str) -> frozenset[int]:
    """The schema versions of an operator that an exported file can ask for.

    Export stamps the lowest legal opset, from 13, so any of them may be the one in force.
    """
    schemas = [schema_of(domain, op_type, v) for v in range(_LOWEST_OPSET, OPSET + 1)]
    return frozenset(schema.since_version for schema in schemas if schema is not None) or frozenset(
        {1}
    )


def _type_parameters(node: ir.Node) -> dict[str, str]:
    """The dtype of each type parameter of a node; of each input where there is no schema."""
    schema = schema_of(node.domain, node.op_type, OPSET)
    found: dict[str, str] = {}
    for i, value in enumerate(node.inputs):
        if value is not None and isinstance(value.type, ir.TensorType):
            name = formal_input(schema, i).type_str if schema is not None else "T"
            found.setdefault(name, value.type.dtype.name.lower())
    return found


# The runtime's own passes that undo a choice of ours: on the CPU, SkipLayerNormalization takes
# 2.6 to 6 times as long as Add and LayerNormalization, BiasGelu up to 1.2 times as Add and Gelu.
_CPU_OPTIONS = {
    "optimization.disable_specified_optimizers": "SkipLayerNormFusion;BiasGeluFusion",
}


@cache
def target(name: str) -> Target:
    """The profile `cpu` or `cuda`; raises GraphgenError for any other.

    `cpu` asks the installed runtime; `cuda` reads a committed table, so that no GPU is needed.
    """
    if name == "cpu":
        runtime = import_runtime()
        return Target("cpu", runtime.__version__, _installed("CPUExecutionProvider"), _CPU_OPTIONS)
    if name == "cuda":
        table = json.loads(files("graphgen").joinpath("kernels_cuda.json").read_text())
        return Target("cuda", table["runtime"], table["kernels"])
    raise GraphgenError(f"target {name!r} is not known: choose cpu or cuda")


@cache
def newest_opset() -> int:
    """The newest opset of the standard domain that the installed runtime reads."""
    import_runtime()
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    schemas = state.get_all_operator_schema()
    newest: int = max(s.since_version for s in schemas if s.domain in ("", "ai.onnx"))
    return newest


def _installed(provider: str) -> Kernels:
    """The kernels of the installed runtime, in the shape of the committed tables."""
    import_runtime()
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    kernels: Kernels = {}
    for kernel in state.get_all_opkernel_def():
        if kernel.provider != provider:
            continue
        first, last = kernel.version_range
        parameters: dict[str, Any] = {
            p: [_plain(t) for t in types] for p, types in kernel.type_constraints.items()
        }
        row = (first, None if last >= 2**31 - 1 else last, parameters)
        domain = "" if kernel.domain == "ai.onnx" else kernel.domain
        kernels.setdefault(domain, {}).setdefault(kernel.op_name, []).append(row)
    return kernels


def _plain(written: str) -> str:
    return written.removeprefix("tensor(").removesuffix(")")
