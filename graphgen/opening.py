"""How a session is opened: its options, its provider, and why the runtime refuses a file."""

import contextlib
import importlib
import io
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from graphgen.errors import GraphgenError, near, warn
from graphgen.header import mentions, turns_for_vector
from graphgen.processor import FITS, processor
from graphgen.providers import (
    CPU,
    CUDA,
    KNOWN,
    RECORD,
    Provider,
    can_record,
    checked,
    devices_of,
    faults_of,
    graphs_of,
    proto_of,
    runtime_message,
)
from graphgen.version import minor

_EXACT = "session.x64quantprecision"
"""The session option that sums products of int8 in 32 bits, with slower kernels."""

_AS_FLOATS = "session.disable_quant_qdq"
"""The session option that leaves QuantizeLinear and DequantizeLinear as they are."""

_LEVEL = "session.qdq_matmulnbits_accuracy_level"
"""The session option by which products with restored weights round x to 8 bits (4), or not (1)."""

_FAST_BITS = {onnx.TensorProto.INT4, onnx.TensorProto.UINT4}
"""Of these the product that does not round x is about as fast as that of floats."""

_HEEDED = ("ENABLE_EXTENDED", "ENABLE_LAYOUT", "ENABLE_ALL")  # levels at which that option works

DISABLED = "optimization.disable_specified_optimizers"
"""The session option that names the runtime's optimizers to disable, with ; between them."""

_TURNS = "MatmulTransposeFusion"
"""That which makes a FusedMatMul of a product with a transposed operand."""

_OF_CUDA = "ep.cuda."
"""How options of the CUDA provider begin, such as use_tf32: unless that is 1, products of float32
are those of float32, as elsewhere, and not of 10 bits."""

_RESTORES = "Dequantize"
"""How the operators begin that make floats of integers."""

_ROUNDS = "Quantize"
"""How those begin that make integers of floats."""


def open_session(
    who: str,
    ort: Any,
    model: Any,
    header: onnx.ModelProto,
    options: Any,
    config: dict[str, str],
    provider: Provider | None,
) -> tuple[Any, str, str]:
    """Return the runtime's session, its device, and why it is on the CPU if nobody asked for it.

    `config` has the entries that went into `options`; what is set here is added to both.
    """
    wanted, source = checked(who, provider), model if isinstance(model, bytes) else os.fspath(model)

    def create(**kwargs: Any) -> Any:
        # The runtime's own fallback would print to stdout and hide the reason.
        return ort.InferenceSession(source, options, enable_fallback=0, **kwargs)

    def recorded(**kwargs: Any) -> Any:
        if can_record(ort):
            config[RECORD] = "1"
            options.add_session_config_entry(RECORD, "1")
        return create(**kwargs)

    def examined(session: Any, device: Any = None) -> Any:
        for fault in faults_of(who, source, device, session):
            warn(f"{who}: {fault}")
        return session

    def on_cpu() -> Any:
        try:
            session = create(providers=[CPU])
        except Exception as error:
            raise _load_error(who, ort, header, runtime_message(error)) from error
        # Only such a file needs the libraries that read graphs.
        return examined(session) if mentions(source, b"training_mode") else session

    if wanted == "cpu":
        return on_cpu(), "cpu", ""
    device = wanted if isinstance(wanted, str) else Path(wanted).stem
    if wanted not in ("auto", "cuda"):
        if devices := devices_of(who, ort, wanted):
            options.add_provider_for_devices(devices[:1], {})
        own = {} if devices else {"providers": [KNOWN[device].ep_name, CPU]}
        try:
            session = recorded(**own)
        except Exception as error:
            raise _load_error(who, ort, header, runtime_message(error), f" on {device}") from error
        return examined(session, next(iter(devices), None)), device, ""
    session, reason = None, f"this onnxruntime has no {CUDA}"
    if CUDA in ort.get_available_providers():
        of_cuda = {k.removeprefix(_OF_CUDA): v for k, v in config.items() if k.startswith(_OF_CUDA)}
        try:
            _preload(ort)
            session = recorded(providers=[(CUDA, {"use_tf32": "0"} | of_cuda), CPU])
            reason = "the driver, CUDA or cuDNN did not load"
        except Exception as error:
            reason = runtime_message(error)
    if session is not None and CUDA in session.get_providers():
        return examined(session), "cuda", ""
    broken = session is None and has_cuda()
    session = session or on_cpu()  # if the file does not load there either, CUDA is not at fault
    if wanted == "cuda" and broken:
        raise _load_error(who, ort, header, reason, " on cuda")
    if wanted == "cuda":
        raise GraphgenError(
            f"{who}: provider='cuda' is not available here ({reason}); uninstall onnxruntime and "
            'run `pip install "graphgen-onnx[gpu]"`, or leave `provider` out for the CPU'
        )
    problem = "does not load it" if broken else "is not available"
    return session, "cpu", f"runs on the CPU, CUDA {problem}: {reason}"


@cache
def has_cuda() -> bool:
    """Whether CUDA loads a model that has nothing to run."""
    ort: Any = importlib.import_module("onnxruntime")
    if CUDA not in ort.get_available_providers():
        return False
    x = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1])
    graph = onnx.helper.make_graph([], "g", [x], [x])
    opset = onnx.helper.make_opsetid("", 13)
    model = onnx.helper.make_model(graph, opset_imports=[opset], ir_version=8)
    _preload(ort)
    with contextlib.suppress(Exception):
        options = ort.SessionOptions()
        options.log_severity_level = 4
        data = model.SerializeToString()
        session = ort.InferenceSession(data, options, providers=[CUDA, CPU], enable_fallback=0)
        return CUDA in session.get_providers()
    return False


def _preload(ort: Any) -> None:
    """Let the runtime find the CUDA libraries that pip installed."""
    if hasattr(ort, "preload_dlls"):
        with contextlib.redirect_stdout(io.StringIO()):
            ort.preload_dlls()


def _load_error(
    who: str, ort: Any, header: onnx.ModelProto, reason: str, where: str = ""
) -> GraphgenError:
    """Why the runtime refused the file, and what to do about it."""
    runtime = f"onnxruntime {ort.__version__}{where}"
    has = {opset.domain or "ai.onnx": opset.version for opset in header.opset_import}
    newer = f"upgrade onnxruntime (now {ort.__version__}) or export the model for this version"
    if limit := re.search(r"max supported IR version: (\d+)", reason):
        problem = f"IR version {header.ir_version}, the runtime reads up to {limit[1]}; {newer}"
    elif limit := re.search(r"support for domain (\S+) is till opset (\d+)", reason):
        problem = f"opset {has.get(limit[1])} of {limit[1]}, the runtime reads up to {limit[2]}"
        problem += f"; {newer}"
    elif lacking := re.search(r"not find an implementation for (\w+)\(\d+\)", reason):
        problem = f"{lacking[1]} of a dtype or version for which {runtime} has no kernel on this "
        problem += f"machine: run it where it was built for, or build it for this one ({reason})"
    elif "QuantizeLinear_" in reason and "does not match expected type" in reason:
        problem = "integers without a zero point, which this runtime takes for unsigned ones; "
        problem += f"upgrade onnxruntime (now {ort.__version__}) to 1.28 or later ({reason})"
    elif "external" in reason.lower():
        problem = "weights outside itself that are missing or cut short; put that data file back "
        problem += f"next to the model and load the model by its path ({reason})"
    elif lacking := re.search(r"Failed to get a \w+ adapter.*", reason):
        return GraphgenError(
            f"{who}: {runtime} finds no device that it can use; its documentation names the "
            f"drivers and variables it needs ({lacking[0]})"
        )
    else:
        return GraphgenError(f"{who}: {runtime} does not load the model ({has}): {reason}")
    return GraphgenError(f"{who}: the file has {problem}")


def session_options(who: str, ort: Any, settings: Mapping[str, Any]) -> tuple[Any, dict[str, str]]:
    """The runtime's SessionOptions, and the config entries that went into them."""
    options, config = ort.SessionOptions(), {}
    options.log_severity_level = 4  # errors are raised already, so they are not printed too
    switch = {"1": True, "TRUE": True, "0": False, "FALSE": False}
    attributes: dict[str, Mapping[str, Any]] = {
        "execution_order": ort.ExecutionOrder.__members__,
        "graph_optimization_level": ort.GraphOptimizationLevel.__members__,
        "enable_mem_pattern": switch,
        "enable_mem_reuse": switch,
        "intra_op_num_threads": {str(count): count for count in range(1025)},
    }
    for key, value in sorted(settings.items()):
        text = str(int(value)) if isinstance(value, bool) else str(value)
        if key in attributes:
            choices, short = attributes[key], text.upper()
            if short not in choices and f"ORT_{short}" not in choices:
                some = ", ".join([*choices][:6])
                raise GraphgenError(f"{who}: session option {key} is {text!r}; choose from {some}")
            setattr(options, key, choices.get(short, choices.get(f"ORT_{short}")))
        elif "." not in key:  # the runtime accepts any key, but all of its own have a dot
            raise GraphgenError(f"{who}: {unknown('session option', key, attributes)}")
        else:
            options.add_session_config_entry(key, text)
            config[key] = text
    return options, config


def keep_integers(
    who: str,
    ort: Any,
    model: str | os.PathLike[str] | bytes,
    needs: str | None,
    settings: dict[str, Any],
    provider: Provider | None,
) -> None:
    """Set the options without which the runtime cuts off integers, or rounds floats to 8 bits.

    A file that says that its sums fit needs none for them. Any other may have such products, and
    only the runtime's extended optimizations can replace them. Where that option fails, and where
    the runtime would take integers for unsigned ones, products between QuantizeLinear and
    DequantizeLinear are calculated in float32, as the file says.
    """
    graphs = _restoring(model)
    if _loses_signs(graphs, minor(ort.__version__)):
        settings.setdefault(_AS_FLOATS, "1")
    level = str(settings.get("graph_optimization_level", "ENABLE_ALL")).upper()
    if level.endswith(_HEEDED):
        cuda = provider in (None, "auto") and CUDA in ort.get_available_providers()
        _keep_floats(graphs, settings, on_cpu=provider in (None, "auto", "cpu") and not cuda)
    if needs == FITS or not processor().saturates:
        return
    exact = level.endswith(_HEEDED) and str(settings.setdefault(_EXACT, "1")) == "1"
    if exact and _fails_unsigned(graphs):
        settings.setdefault(_AS_FLOATS, "1")
    if needs is not None:
        effect = "runs exactly by slower kernels" if exact else "gives wrong numbers"
        warn(f"{who}: the file needs {needs}; on this processor ({processor()}) it {effect}")


def keep_vectors(model: str | os.PathLike[str] | bytes, settings: dict[str, Any]) -> None:
    """Keep the runtime from a fusion of Aᵀ v, v a vector, that it gets wrong (1.20 to 1.32).

    It also ends the process where it finds a batch that is transposed and then cast (1.32).
    """
    level = str(settings.get("graph_optimization_level", "ENABLE_ALL")).upper()
    disabled = str(settings.get(DISABLED, ""))
    if level.endswith(_HEEDED) and _TURNS not in disabled and turns_for_vector(model):
        settings[DISABLED] = ";".join(filter(None, [disabled, _TURNS]))


def _keep_floats(
    graphs: Sequence[onnx.GraphProto], settings: dict[str, Any], *, on_cpu: bool
) -> None:
    """Keep the runtime from rounding the floats that it multiplies by restored weights.

    It makes one operator of a product and a DequantizeLinear of a constant matrix, which rounds the
    other factor to 8 bits, unless an option forbids that (onnxruntime 1.32; an error of 5e-3). On
    the CPU it then is 40 times slower for weights of 2 and 8 bits: they become floats instead,
    unless the file has other integers, which would become floats with them.
    """
    weights = _restored_matrices(graphs)
    slow = on_cpu and _LEVEL not in settings and not weights <= _FAST_BITS
    if slow and not _named(graphs, _ROUNDS):
        settings.setdefault(_AS_FLOATS, "1")
    if weights and str(settings.get(_AS_FLOATS)) != "1":
        settings.setdefault(_LEVEL, "1")


def _restored_matrices(graphs: Sequence[onnx.GraphProto]) -> set[int]:
    """The types of constant matrices of integers from which the second factor is restored."""
    nodes = [node for graph in graphs for node in graph.node]
    factors = {name for node in nodes for name in node.input[1:2]}
    factors |= {n.input[0] for n in nodes if len(n.input) == 1 and factors & {*n.output}}
    constants = {x.name: x for g in graphs for x in g.initializer}
    sources = [node for node in nodes if not node.input]
    constants |= {n.output[0]: a.t for n in sources for a in n.attribute if a.HasField("t")}
    restored = [node for node in _named(graphs, _RESTORES) if factors & {*node.output}]
    read = [constants.get(node.input[0]) for node in restored]
    return {x.data_type for x in read if x is not None and len(x.dims) == 2}


def _fails_unsigned(graphs: Sequence[onnx.GraphProto]) -> bool:
    """Whether session.x64quantprecision fails on a file (seen in onnxruntime 1.32).

    It makes the int8 constants of DequantizeLinear uint8. One that two nodes read is then an error,
    and weights with a scale per channel or block and no zero points get a single one, which the
    kernel refuses.
    """
    int8 = {x.name for g in graphs for x in g.initializer if x.data_type == onnx.TensorProto.INT8}
    restored = [node.input for node in _named(graphs, _RESTORES) if int8 & {*node.input}]
    changed = Counter(name for inputs in restored for name in inputs if name in int8)
    return any(len(inputs) < 3 for inputs in restored) or any(n > 1 for n in changed.values())


def _loses_signs(graphs: Sequence[onnx.GraphProto], runtime: tuple[int, ...]) -> bool:
    """Whether the runtime may cut off integers below zero, or refuse the file.

    It puts QuantizeLinear and DequantizeLinear, with the same scale, behind a Transpose or Reshape
    and their like that reads a DequantizeLinear. Without a zero point that gives uint8, whatever
    the integers were. From 1.28 on, it knows the type of constants and of what was just quantized.
    """
    known = {x.name for g in graphs for x in g.initializer}
    known |= {y for node in _named(graphs, _ROUNDS) for y in node.output}
    unsigned = (n for n in _named(graphs, _RESTORES) if len(n.input) < 3 or not n.input[2])
    return any(runtime < (1, 28) or node.input[0] not in known for node in unsigned)


def _restoring(model: str | os.PathLike[str] | bytes) -> list[onnx.GraphProto]:
    """The graphs of a file that names DequantizeLinear, its functions too; no other is parsed."""
    if not mentions(model, _RESTORES.encode()):
        return []
    try:
        proto = proto_of(model)
    except DecodeError:  # which the runtime reports
        return []
    functions = (onnx.GraphProto(node=function.node) for function in proto.functions)
    return [graph for body in (proto.graph, *functions) for graph in graphs_of(body)]


def _named(graphs: Iterable[onnx.GraphProto], start: str) -> list[onnx.NodeProto]:
    return [node for graph in graphs for node in graph.node if node.op_type.startswith(start)]


def unknown(role: str, name: str, known: Iterable[str]) -> str:
    """That there is no `name`, and what there is."""
    return f"there is no {role} {name!r}, only {', '.join(known)}{near(name, known)}"
