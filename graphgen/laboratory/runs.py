"""What the runtime makes of a file: the graph that runs, and which of its optimizers changed it."""

import hashlib
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx_ir as ir

from graphgen import maps
from graphgen.runtime import DISABLED, Provider, Session, import_runtime

_GRAPH = ir.AttributeType.GRAPH
_PLAIN = [ir.AttributeType[n + s] for n in ("INT", "FLOAT", "STRING") for s in ("", "S")]


def fingerprint(graph: ir.Graph, outer: Sequence[Mapping[ir.Value, str]] = ()) -> str:
    """Equal for graphs that differ only in names; weights at one place in a file are equal.

    `outer` holds the digests of values in the graphs around it, the outermost first.
    """
    known = dict(outer[-1]) if outer else {}
    for i, value in enumerate(graph.inputs):
        known[value] = _digest("input", len(outer), i if outer else value.name)
    for value in graph.initializers.values():
        known[value] = _digest("weight", known.get(value), _content(value.const_value))
    nodes = []
    for node in graph:
        attributes = sorted(
            (n, fingerprint(a.as_graph(), [*outer, known]) if a.type == _GRAPH else _written(a))
            for n, a in node.attributes.items()
        )
        inputs = [None if value is None else known[value] for value in node.inputs]
        nodes.append(_digest(node.domain, node.op_type, attributes, inputs))
        known.update((value, _digest(nodes[-1], i)) for i, value in enumerate(node.outputs))
    return _digest(sorted(nodes), [known[value] for value in graph.outputs])


def _digest(*parts: object) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def _written(attribute: ir.Attr) -> str:
    if attribute.type in _PLAIN:
        return repr((attribute.type, attribute.value))
    if attribute.type == ir.AttributeType.TENSOR:
        return repr(_content(attribute.as_tensor()))
    return repr(ir.to_proto(attribute))  # takes longer than all the others


def _content(tensor: ir.TensorProtocol | None) -> object:
    if isinstance(tensor, ir.ExternalTensor):
        return tensor.location, tensor.offset, tensor.length
    assert tensor is not None
    texts = tensor.dtype == ir.DataType.STRING
    held = repr(tensor.numpy().tolist()).encode() if texts else tensor.tobytes()
    return str(tensor.dtype), tuple(tensor.shape), hashlib.blake2b(held).hexdigest()


def optimized(path: Path, folder: Path, options: Mapping[str, str], provider: Provider) -> ir.Model:
    """The graph that runs, as the session saves it; weights that it keeps stay outside.

    `options` are those of `Session`: the level, and optimizers to disable. Raises GraphgenError if
    no session loads the file.
    """
    saved = folder / f"{path.stem}.runs.onnx"
    ort = import_runtime()
    settings = ort.SessionOptions()
    settings.log_severity_level, settings.optimized_model_filepath = 4, str(saved)
    level = f"ORT_{options['graph_optimization_level']}"
    settings.graph_optimization_level = ort.GraphOptimizationLevel.__members__[level]
    for key, value in ((_UNPACKED, "1"), (DISABLED, options.get(DISABLED, ""))):
        settings.add_session_config_entry(key, value)
    try:
        ort.InferenceSession(path, settings, providers=_providers(provider))
        model = maps.load(saved)
        model.graph.sort()  # the runtime accepts nodes in any order, and keeps the file's
        return model
    except Exception:
        Session(path, provider=provider, options=options)  # raises our error
        raise


def optimizers(path: Path, provider: Provider) -> tuple[list[str], list[str]]:
    """The runtime's optimizers that change a graph, and those that do not.

    The runtime names them in its log, which a separate process writes.
    """
    command = [sys.executable, "-c", _LOGS, str(path), *_providers(provider)]
    log = subprocess.run(command, capture_output=True, text=True, errors="replace").stderr
    found: dict[str, bool] = {}
    for name, changed in re.findall(r"GraphTransformer (\w+) modified: ([01])", log):
        found[name] = found.get(name, False) or changed == "1"
    changing = [name for name, changed in found.items() if changed]
    return changing, [name for name in found if name not in changing]


def _providers(provider: Provider) -> list[str]:
    return [*(["CUDAExecutionProvider"] if provider == "cuda" else []), "CPUExecutionProvider"]


_UNPACKED = "session.disable_prepacking"  # faster, and nothing is to run
_LOGS = f"""import sys, onnxruntime as ort
options = ort.SessionOptions()
options.log_severity_level = 1
options.add_session_config_entry("{_UNPACKED}", "1")
ort.InferenceSession(sys.argv[1], options, providers=sys.argv[2:])
"""
