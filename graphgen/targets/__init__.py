"""What runs natively where, and what pays: the runtime says, or committed tables."""

import importlib
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, TypeAlias

import onnx_ir as ir

from graphgen.errors import GraphgenError, one_of
from graphgen.infer import schema_of
from graphgen.processor import Instructions, instructions
from graphgen.providers import KNOWN
from graphgen.runtime import import_runtime
from graphgen.targets.kernels import REFUSED, Runtime, form_of, ratios_of, unit_of
from graphgen.targets.tables import (
    Kernels,
    committed,
    kernels_of,
    minor,
    plain,
    type_parameters,
    versions_of,
)

TargetName: TypeAlias = Literal["cpu", "cuda", "webgpu", "official"]
Device: TypeAlias = Literal["cpu", "cuda"]
"""Targets that are a provider, too, so that what was made for them can be measured."""

_LOADED = ("cuda", "tensorrt", "migraphx", "openvino")
_OFFICIAL = "1.19"  # the last release with a trainer
_TIE, _WIN = 1.03, 0.97  # in between, fewer nodes win, or the existing graph


@dataclass(frozen=True)
class Target:
    """A runtime's execution provider and its kernels; `processor` is by default this machine's.

    `elsewhere` are the CPU's kernels, to which a plugin leaves sizes, indices and masks on purpose.
    """

    name: str
    runtime: str
    opset: int  # the newest that it reads, or up to which it has its kernels
    kernels: Kernels = field(repr=False)
    processor: Instructions | None = None
    elsewhere: Kernels = field(repr=False, default_factory=Kernels)

    def runs(self, node: ir.Node) -> bool:
        """Whether the provider has a kernel for this node, its opset and its dtypes.

        float16 counts as float32 on the CPU: the runtime puts casts around such a node.
        """
        return self.missing(node) is None

    def missing(self, node: ir.Node) -> str | None:
        """Why there is no kernel for this node, or None if there is one."""
        problem = self._missing_of(self.kernels, node)
        if problem and self._is_left(node) and self._missing_of(self.elsewhere, node) is None:
            return None
        return problem

    def _is_left(self, node: ir.Node) -> bool:
        """Whether a plugin leaves the node to the CPU on purpose: it calculates no floats."""
        dtypes = [y.dtype for y in node.outputs]
        return not any(dtype is None or dtype.is_floating_point() for dtype in dtypes)

    def _missing_of(self, kernels: Kernels, node: ir.Node) -> str | None:
        rows = kernels.get(node.domain, {}).get(node.op_type)
        if not rows:
            return f"{self} has no {node.op_type}"
        for refused in REFUSED.get((node.domain, node.op_type), ()):
            if reason := refused(node, Runtime(self._provider, minor(self.runtime))):
                return f"{self} refuses {node.op_type} {reason}"
        versions = versions_of(node.domain, node.op_type, self.opset)
        by_version = {version: type_parameters(node, version) for version in versions}
        for first, last, parameters in rows:
            for version, dtypes in by_version.items():
                if dtypes is None or not _serves(first, last, version):
                    continue
                if all(self._admits(parameters.get(p), d) for p, d in dtypes.items()):
                    return None
        newest = by_version[max(versions)] or {}
        wanted = ", ".join(f"{p}={d}" for p, d in newest.items())
        return f"{self} has no {node.op_type} for {wanted}"

    def newest(self, node: ir.Node) -> int:
        """The newest opset at which a kernel serves a standard operator; that of all if none does.

        Dtypes do not count.
        """
        rows = self.kernels.get("", {}).get(node.op_type, ()) if not node.domain else ()
        return _newest(node.op_type, self.opset, tuple((first, last) for first, last, _ in rows))

    def lacks(self, node: ir.Node) -> str | None:
        """Why no session can load this node; also None if the runtime knows a body for it.

        Domains whose kernels are not known here count as loadable.
        """
        schema: Any = schema_of(node.domain, node.op_type, self.opset)
        has_body = schema and (schema.has_function or schema.has_context_dependent_function)
        if has_body or node.domain not in self.kernels:
            return None
        missing = self.missing(node)
        return self._missing_of(self.elsewhere, node) if missing and self.elsewhere else missing

    def pays(self, node: ir.Node, *, optional: bool = False, layout: str = "") -> str | None:
        """Why this node is slower than the nodes it replaces, or None, as bench/pays.py measured.

        If the number of rows is unknown, the longest measured one counts, because that is where the
        time goes. An `optional` node, one that replaces good nodes, has to win everywhere. A
        `layout` such as `channels` has figures of its own.
        """
        instead_of, ratios = ratios_of(node, self._where, layout)
        if optional and not ratios:
            dtype = node.outputs[0].dtype
            run = (
                "" if self._provider == "webgpu" else ": run bench/pays.py"
            )  # which knows no plugin
            return f"no figure for {node.op_type} of {dtype} on {self._where}{run}"
        longest, worst = ratios[max(ratios)] if ratios else 0.0, max(ratios.values(), default=0.0)
        if worst < _WIN if optional else longest <= _TIE:
            return None
        figures = ", ".join(f"{ratio:.2f}x at {n:,}" for n, ratio in ratios.items())
        figures += f" {unit_of(form_of(node, layout), max(ratios))}, {self._source}"
        verdict = "takes longer than" if longest > _TIE else "is not faster than"
        return f"{node.op_type} {verdict} {instead_of}: {figures}"

    def prefers(self, other: ir.Node, node: ir.Node) -> str | None:
        """Why `other`, with the same result, is faster than `node`; None if it is not.

        If the number of rows is unknown, the longest counts, as in `pays`.
        """
        (_, theirs), (instead_of, own) = (ratios_of(n, self._where) for n in (other, node))
        rows = max({*theirs} & {*own}, default=0)
        if not rows or theirs[rows] > own[rows] / _TIE:
            return None
        figures = f"{theirs[rows]:.2f}x and {own[rows]:.2f}x the time of {instead_of}"
        which = f"{other.op_type} takes less time than {node.op_type}"
        return f"{which}: {figures} at {rows:,} {unit_of(form_of(node), rows)}, {self._source}"

    @property
    def _where(self) -> str:
        """Whose figures count; on the CPU they depend on its instructions."""
        return self.processor or instructions() if self._provider == "cpu" else self._provider

    @property
    def _source(self) -> str:
        return f"measured by bench/pays.py on {self._where}"

    @property
    def _provider(self) -> str:
        return "cpu" if self.name == "official" else self.name

    def __str__(self) -> str:
        return f"{self.name} (onnxruntime {self.runtime})"

    def _admits(self, allowed: list[str] | None, dtype: str) -> bool:
        if allowed is None or dtype in allowed:
            return True
        return dtype == "float16" and self._provider == "cpu" and "float" in allowed


def _serves(first: int, last: int | None, version: int) -> bool:
    """Whether a kernel serves this schema: an open-ended one no newer one than its own."""
    return version == first or (last is not None and first <= version <= last)


@cache
def _newest(op_type: str, opset: int, rows: tuple[tuple[int, int | None], ...]) -> int:
    for each in range(opset, 0, -1) if rows else ():
        schema = schema_of("", op_type, each)
        if schema is not None and any(_serves(*row, schema.since_version) for row in rows):
            return each
    return opset


@cache
def target(
    name: TargetName, runtime: str | None = None, processor: Instructions | None = None
) -> Target:
    """The profile `cpu`, `cuda`, `webgpu` or `official`, of a version such as "1.20".

    `cpu` without a version asks the installed runtime; `official` is the last runtime that comes
    with a trainer, 1.19. All others are read from committed tables, so they need neither a GPU nor
    that version. What pays on the CPU depends on its instructions, of `processor` or this machine.
    Raises GraphgenError for an unknown name, version or processor.
    """
    one_of("targets", TargetName, target=name)
    one_of("targets", Instructions | None, processor=processor)
    if name == "cpu" and runtime is None:
        ort = import_runtime()
        kernels = registered("CPUExecutionProvider") if _lists_kernels(ort) else _nearest(ort)
        return Target(name, ort.__version__, newest_opset(), kernels, processor)
    table = committed("cpu" if name == "official" else name)
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
    opset, kernels = table["runtimes"][version], kernels_of(table, version)
    elsewhere = kernels_of(committed("cpu"), version) if name == "webgpu" else Kernels()
    return Target(name, version, opset, kernels, processor, elsewhere)


def _lists_kernels(ort: Any) -> bool:
    """Whether the installed runtime lists its kernels.

    A build with others than the CPU's loads their libraries for that, and the process ends where
    one is missing: onnxruntime-gpu 1.31 without TensorRT, onnxruntime-openvino 1.24.
    """
    return not {KNOWN[n].ep_name for n in _LOADED}.intersection(ort.get_available_providers())


def _nearest(ort: Any) -> Kernels:
    """The CPU's kernels of the newest committed version up to the installed one, or the oldest."""
    table = committed("cpu")
    older = [v for v in table["runtimes"] if minor(v) <= minor(ort.__version__)]
    return kernels_of(table, max(older or [min(table["runtimes"], key=minor)], key=minor))


def _state() -> Any:
    """The installed runtime's own tables, in an extension of which type checkers know nothing."""
    import_runtime()
    return importlib.import_module("onnxruntime.capi.onnxruntime_pybind11_state")


@cache
def newest_opset() -> int:
    """The newest opset of the standard domain that the installed runtime reads."""
    schemas = _state().get_all_operator_schema()
    newest: int = max(s.since_version for s in schemas if s.domain in ("", "ai.onnx"))
    return newest


def registered(provider: str) -> Kernels:
    """The kernels of the installed runtime, in the shape of `kernels_of`."""
    kernels: Kernels = {}
    for kernel in _state().get_all_opkernel_def():
        if kernel.provider != provider:
            continue
        first, last = kernel.version_range
        types = kernel.type_constraints  # made anew each time
        parameters = {name: list(map(plain, given)) for name, given in types.items()}
        row = (first, None if last >= 2**31 - 1 else last, parameters)
        domain = "" if kernel.domain == "ai.onnx" else kernel.domain
        kernels.setdefault(domain, {}).setdefault(kernel.op_name, []).append(row)
    return kernels
