"""Execution providers: those that the runtime has built in, and plugins of other packages.

A plugin is a library that is registered with the process and then offers devices (onnxruntime's
`register_execution_provider_library` and `get_ep_devices`). Its package is named after it, and its
module says where the library lies; a library without a package is named by its path.
"""

import contextlib
import importlib
import importlib.metadata
import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import onnx

from graphgen.errors import GraphgenError, one_of

Name: TypeAlias = Literal[
    "auto", "cpu", "cuda", "webgpu", "openvino", "tensorrt-rtx", "tensorrt", "qnn", "ggml", "mlx",
    "coreml", "directml", "migraphx",
]  # fmt: skip
Provider: TypeAlias = Name | os.PathLike[str]
"""What `provider=` takes: a name, or the path of a plugin's library as a `pathlib.Path`."""

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
WEBGPU = "WebGpuExecutionProvider"


class _Known(NamedTuple):
    """What ONNX Runtime calls a provider, and the distribution that brings it."""

    ep_name: str
    package: str


KNOWN: dict[str, _Known] = {
    "cpu": _Known(CPU, "onnxruntime"),
    "cuda": _Known(CUDA, "onnxruntime-gpu"),
    "webgpu": _Known(WEBGPU, "onnxruntime-ep-webgpu"),
    "openvino": _Known("OpenVINOExecutionProvider", "onnxruntime-ep-openvino"),
    "tensorrt-rtx": _Known("NvTensorRTRTXExecutionProvider", "onnxruntime-ep-nv-tensorrt-rtx"),
    "tensorrt": _Known("TensorrtExecutionProvider", "onnxruntime-gpu"),
    "qnn": _Known("QNNExecutionProvider", "onnxruntime-qnn"),
    "ggml": _Known("ggml", "onnxruntime-ggml"),
    "mlx": _Known("MLXExecutionProvider", "onnxruntime-ep-mlx"),
    "coreml": _Known("CoreMLExecutionProvider", "onnxruntime"),
    "directml": _Known("DmlExecutionProvider", "onnxruntime-directml"),
    "migraphx": _Known("MIGraphXExecutionProvider", "onnxruntime-migraphx"),
}


_FAULTS = {
    CPU: "graphgen.targets.cpu",
    CUDA: "graphgen.targets.cuda",
    WEBGPU: "graphgen.targets.webgpu",
}
"""Where the function `faults` tells what the kernels of a provider get wrong."""


@dataclass(frozen=True)
class Found:
    """A provider on this machine: its devices, or what is missing, in one line."""

    name: str
    ep_name: str
    source: str  # the distribution and its version
    devices: tuple[str, ...] = ()
    problem: str = ""


def runtime_message(error: Exception | str) -> str:
    """The runtime's own words, without its status code and the place in its source."""
    text = re.sub(r"\[ONNXRuntimeError\] : \d+ : \w+ : ", "", " ".join(str(error).split()))
    text = re.sub(r"(?<!\S)\S+\.(cc|h):\d+ ", "", text)  # from its start: else it takes n² steps
    text = _SIGNATURE.sub("", text)
    text += _NO_EMPTY if _EMPTY.search(text) else ""
    return text + _NO_DEVICE if _LOST.search(text) else text


_LOST = re.compile(r"\bdevice\]? (is|was) lost\b", re.IGNORECASE)
_NO_DEVICE = "; start the program again: this process gets no other device"
_SIGNATURE = re.compile(
    r"(?<!\S)(virtual )?[\w:<>]+ [\w:<>]+::\w+\([^()]*\)( const)?( \[with [^]]*\])? "
)
"""Of the runtime's function that failed."""

_EMPTY = re.compile(
    r"(batch_size|sequence_length) > 0 was false\. .* must be greater than 0$"
    r"|total_sequence_length must be positive, got 0"
    r"|idx=0 must be within the inclusive range \[0,-1\]$"  # recognize/group_query.py's
)
_NO_EMPTY = (
    "; if a batch or a sequence is of size 0, optimize with runtime='1.22' (--runtime 1.22), whose "
    "MultiHeadAttention takes it: onnxruntime's Attention and GroupQueryAttention do not"
)


def checked(who: str, provider: Provider | None) -> Provider:
    """The provider, `auto` for None. Raises GraphgenError for anything that is none."""
    if not isinstance(provider, os.PathLike):
        one_of(who, Name | None, provider=provider)
    return provider or "auto"


def devices_of(who: str, ort: Any, provider: Provider) -> list[Any]:
    """The devices that a plugin offers; [] for a provider that the runtime has built in.

    Raises GraphgenError if it is not installed, does not load, or finds no device here.
    """
    if isinstance(provider, str) and _is_built_in(ort, KNOWN[provider].ep_name):
        return []
    try:
        return _offered(ort, provider)
    except GraphgenError as error:
        name = provider if isinstance(provider, str) else Path(provider).name
        raise GraphgenError(f"{who}: provider={name!r}: {error}") from error


def _is_built_in(ort: Any, ep_name: str) -> bool:
    """A registered plugin is among the available providers, too."""
    known: set[str] = {*ort.get_available_providers()}
    devices = ort.get_ep_devices() if hasattr(ort, "get_ep_devices") else ()
    return ep_name in known - {d.ep_name for d in devices if "library_path" in d.ep_metadata}


def _offered(ort: Any, provider: Provider) -> list[Any]:
    """The devices of a plugin. Raises GraphgenError with the problem alone."""
    if isinstance(provider, str):
        ep_name, package = KNOWN[provider]
        library = _library_of(package)
    else:
        ep_name, library = Path(provider).stem, str(Path(provider).absolute())
        if not Path(library).is_file():
            raise GraphgenError(f"there is no library {os.fspath(provider)}")
    if not hasattr(ort, "register_execution_provider_library"):
        raise GraphgenError(
            f"it is a plugin, and onnxruntime {ort.__version__} loads none; upgrade onnxruntime "
            "to 1.24 or later"
        )
    try:
        _register(ort, ep_name, library)
    except Exception as error:
        raise GraphgenError(
            f"onnxruntime {ort.__version__} does not load {library}: {runtime_message(error)}"
        ) from error
    found = [d for d in ort.get_ep_devices() if d.ep_metadata.get("library_path") == library]
    if not found:
        raise GraphgenError(
            "it finds no device here; its documentation names the drivers and variables it needs"
        )
    return found


@cache
def _register(ort: Any, ep_name: str, library: str) -> None:
    """Once a process. Some plugins take the name under which they are registered as theirs."""
    ort.register_execution_provider_library(ep_name, library)


def _library_of(package: str) -> str:
    """The path of a plugin's library, as its package says. Raises GraphgenError with the problem.

    The package is code of others, so whatever it raises is its reason.
    """
    problem = "it is not installed"
    if _version(package) is not None:
        try:
            module = importlib.import_module(package.replace("-", "_"))
            where = getattr(module, "get_library_path", None) or module.library_path
            return str(Path(where()).absolute())
        except Exception as error:
            problem = f"its package tells no library ({runtime_message(error)})"
    raise GraphgenError(f"{problem}; run `pip install -U {package}`")


def faults_of(
    who: str, model: str | os.PathLike[str] | bytes, device: Any, session: Any
) -> list[str]:
    """What the kernels of a session's provider are known to get wrong or to fail on, a line each.

    `device` is the plugin's, or None where the provider is built in.
    """
    module = _FAULTS.get(session.get_providers()[0])
    if module is None:
        return []
    found: list[str] = importlib.import_module(module).faults(who, model, device, session)
    return found


def providers(ort: Any) -> list[Found]:
    """The providers that are built in or installed, and the known ones that are not."""
    rows = []
    for name, (ep_name, package) in KNOWN.items():
        source, devices, problem = "", tuple[str, ...](), ""
        if _is_built_in(ort, ep_name):
            source = f"onnxruntime {ort.__version__}"
        elif package == "onnxruntime":  # of another system
            continue
        elif (version := _version(package)) is None:
            problem = f"not installed: pip install {package}"
        else:
            source = f"{package} {version}"
            try:
                devices = tuple(map(_device, _offered(ort, name)))  # type: ignore[arg-type]
            except GraphgenError as error:
                problem = f"{source}: {error}"
        rows.append(Found(name, ep_name, source, devices, problem))
    return rows


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _device(device: Any) -> str:
    """`GPU NVIDIA`, by what the plugin tells."""
    found = device.device
    description = found.metadata.get("Description", "")
    return " ".join(filter(None, [found.type.name, found.vendor, description]))


def can_record(ort: Any) -> bool:
    """Whether the runtime can tell which node runs where."""
    return hasattr(ort.InferenceSession, "get_provider_graph_assignment_info")


def placement(session: Any) -> dict[str, list[tuple[str, str]]]:
    """By provider, the operator and the name of each node that a session runs there.

    The session must have the option `RECORD`; a runtime that cannot record gives {}.
    """
    found: dict[str, list[tuple[str, str]]] = {}
    recorded: list[Any] = getattr(session, "get_provider_graph_assignment_info", list)()
    for part in recorded:
        nodes = [(node.op_type, node.name) for node in part.get_nodes()]
        found.setdefault(part.ep_name, []).extend(nodes)
    return found


RECORD = "session.record_ep_graph_assignment_info"
"""The session option that lets the runtime tell which node runs where, from 1.24 on."""


def proto_of(model: str | os.PathLike[str] | bytes) -> onnx.ModelProto:
    """The model, without the data of weights that are in other files."""
    if isinstance(model, bytes):
        return onnx.load_from_string(model)
    return onnx.load(model, load_external_data=False)


def typed_proto_of(model: str | os.PathLike[str] | bytes) -> onnx.ModelProto:
    """The model with the types that onnx infers."""
    proto = proto_of(model)
    with contextlib.suppress(Exception):  # then some are unknown
        proto = onnx.shape_inference.infer_shapes(proto)
    return proto


def floats_elsewhere(
    model: str | os.PathLike[str] | bytes, placed: Mapping[str, Sequence[tuple[str, str]]], own: str
) -> Counter[str]:
    """The operators, counted, that another provider than `own` runs and that calculate floats.

    Sizes, places and masks are left on the CPU on purpose, with casts of them to floats, and so are
    single numbers, as CUDA does with what it makes of sizes; of a loop or a branch, the nodes
    inside count. A node that the file does not have, as the runtime makes some, counts as one of
    floats; so does one whose types onnx does not infer, and one without a name, by which the
    runtime could tell it.
    """
    others = [node for name, nodes in placed.items() if name != own for node in nodes]
    if not others:
        return Counter()
    proto = typed_proto_of(model)
    floats: dict[str, bool] = {}
    many: dict[str, bool] = {}
    graphs = [*graphs_of(proto.graph)]
    for graph in graphs:
        for value in (*graph.value_info, *graph.input, *graph.output):
            floats[value.name] = floats.get(value.name, False) or _is_float(value.type)
            many[value.name] = many.get(value.name, False) or not _is_single(value.type)
        for array in graph.initializer:
            floats[array.name] = floats.get(array.name, False) or _is_inexact(array.data_type)
            many[array.name] = many.get(array.name, False) or math.prod(array.dims) != 1
    exact: dict[str, bool] = {"": False}
    for node in (node for graph in graphs for node in graph.node):
        sides = [[x for x in part if x] for part in (node.input, node.output)]
        none = any(side and not any(floats.get(x, True) for x in side) for side in sides)
        single = not any(many.get(x, True) for side in sides for x in side)
        inner = bool([*_inner(node)])
        exact[node.name] = exact.get(node.name, True) and (inner or none or single)
    return Counter(op_type for op_type, name in others if not exact.get(name, False))


def graphs_of(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """A graph and those inside it."""
    yield graph
    for inner in (inner for node in graph.node for inner in _inner(node)):
        yield from graphs_of(inner)


def _inner(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    for attribute in node.attribute:
        yield from (*([attribute.g] if attribute.HasField("g") else ()), *attribute.graphs)


def _is_float(declared: onnx.TypeProto) -> bool:
    if not declared.HasField("tensor_type"):
        return True
    return _is_inexact(declared.tensor_type.elem_type)


def _is_single(declared: onnx.TypeProto) -> bool:
    """Whether it is one number, as far as the model tells."""
    known = declared.tensor_type.HasField("shape")
    return known and all(dim.dim_value == 1 for dim in declared.tensor_type.shape.dim)


def _is_inexact(number: int) -> bool:
    """Whether a dtype of ONNX, by its number, is none of integers, bools or strings."""
    return onnx.helper.tensor_dtype_to_np_dtype(number).kind not in "biuO"  # O: strings
