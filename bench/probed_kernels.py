"""Which kernels does a plugin provider have: the runtime lists those that it has built in only.

For each operator, version and dtype there is a model of one node. The provider has a kernel for it
if a session that may use the provider places that node there; nothing is run. Operators, versions
and types are those of the installed runtime's schemas. Inputs declare no shape, so the types alone
decide; what a kernel refuses for other reasons stands in graphgen/targets/kernels.py. Operators
with graphs as attributes are left out. `kernel_tables.py --plugin` makes a table of it.
"""

import importlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import onnx
from onnx import helper

from graphgen.errors import GraphgenError
from graphgen.providers import RECORD, Name, devices_of, placement
from graphgen.runtime import import_runtime
from graphgen.targets.tables import Kernels, Row, plain

DTYPES = ("float", "float16", "int32", "int64", "bool", "uint32", "uint8", "int8", "double")
FEW = ("float", "float16", "int32", "int64", "bool", "uint8")  # with several parameters
OLDEST = 13  # opset
ATTRIBUTES: dict[str, dict[str, Any]] = {
    "Cast": {"to": onnx.TensorProto.FLOAT},
    "Einsum": {"equation": "ij,jk->ik"},
}
"""What nodes need where not any value will do."""
_ANY = {"INT": 1, "FLOAT": 1.0, "STRING": "x", "INTS": [1], "FLOATS": [1.0]}

Types = dict[str, str]
Placed = Callable[[onnx.ModelProto], bool]


def probed(plugin: Name, domains: Sequence[str]) -> Kernels:
    """The kernels that the plugin has here, for opsets from 13 on, as `registered` has them.

    Raises GraphgenError if the plugin is not installed or finds no device.
    """
    state = importlib.import_module("onnxruntime.capi.onnxruntime_pybind11_state")
    by_name: dict[tuple[str, str], list[Any]] = {}
    for schema in sorted(state.get_all_operator_schema(), key=lambda s: s.since_version):
        domain = "" if schema.domain == "ai.onnx" else schema.domain
        if domain in domains and not schema.deprecated and not schema.name.startswith("Memcpy"):
            by_name.setdefault((domain, schema.name), []).append(schema)
    placed, kernels = placing(plugin), Kernels()
    for (domain, name), versions in sorted(by_name.items()):
        first = max((v.since_version for v in versions if v.since_version <= OLDEST), default=0)
        for schema in versions:
            if schema.since_version >= first and (rows := rows_of(schema, placed)):
                kernels.setdefault(domain, {}).setdefault(name, []).extend(rows)
    return kernels


def placing(plugin: Name) -> Placed:
    """Whether a session of the plugin's first device places the node of a model on it."""
    ort = import_runtime()
    devices = devices_of("probed_kernels", ort, plugin)
    if not devices:
        raise GraphgenError(f"{plugin} is built in, so it needs no probes: give --provider")

    def placed(model: onnx.ModelProto) -> bool:
        options = ort.SessionOptions()
        options.log_severity_level = 4
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.add_session_config_entry(RECORD, "1")
        options.add_provider_for_devices(devices[:1], {})
        try:
            session = ort.InferenceSession(model.SerializeToString(), options)
        except Exception:  # a dtype that the schema or both providers refuse
            return False
        own = placement(session).get(devices[0].ep_name, [])
        return model.graph.node[0].op_type in [op_type for op_type, _ in own]

    return placed


def rows_of(schema: Any, placed: Placed) -> list[Row]:
    """A row for each set of dtypes with which the plugin takes the operator."""
    kinds = [str(i.option).rpartition(".")[2].split(":")[0] for i in schema.inputs]
    required = [i for i, kind in enumerate(kinds) if kind != "Optional"]
    rows: list[Row] = []
    for given in (required, [*range(len(kinds))]):
        found = [t for t in _products(schema, given) if placed(model_of(schema, given, t))]
        for types in found:
            more = dict[str, list[str]]()
            for i in {*range(len(kinds))} - {*given}:
                parameter = schema.inputs[i].typeStr
                if parameter in types or parameter in more:
                    continue
                ways = _products(schema, [i])
                more[parameter] = [
                    own[parameter]
                    for own in ways
                    if own and placed(model_of(schema, sorted([*given, i]), types | own))
                ]
            listed = {parameter: [dtype] for parameter, dtype in types.items()}
            rows.append((schema.since_version, None, listed | {p: d for p, d in more.items() if d}))
        if rows:
            break
    return rows


def _products(schema: Any, given: Sequence[int]) -> Iterator[Types]:
    """The dtypes of the type parameters of some inputs, in all ways."""
    allowed = {
        t.type_param_str: [*map(plain, t.allowed_type_strs)] for t in schema.type_constraints
    }
    names = sorted({schema.inputs[i].typeStr for i in given} & {*allowed})
    known = DTYPES if len(names) == 1 else FEW
    choices = [[d for d in known if d in allowed[name]] for name in names]
    for dtypes in itertools.product(*choices):
        yield dict(zip(names, dtypes, strict=True))


def model_of(schema: Any, given: Sequence[int], types: Types) -> onnx.ModelProto:
    """A model of one node with these inputs, whose type parameters are `types`."""
    inputs, names = [], [""] * len(schema.inputs)
    for i in given:
        formal = schema.inputs[i]
        dtype = types.get(formal.typeStr, plain(formal.typeStr))
        names[i] = f"x{i}"
        inputs.append(helper.make_tensor_value_info(names[i], _number(dtype), None))
    attributes = dict(ATTRIBUTES.get(schema.name, {}))
    for name, attribute in schema.attributes.items():
        if attribute.required and name not in attributes:
            kind = str(attribute.type).rpartition(".")[2]
            attributes[name] = _ANY.get(kind, 1)
    domain = "" if schema.domain == "ai.onnx" else schema.domain
    outputs = [f"y{i}" for i in range(max(schema.min_output, 1))]
    node = helper.make_node(schema.name, names, outputs, "n", domain=domain, **attributes)
    results = [onnx.ValueInfoProto(name=name) for name in outputs]
    opset = 21 if domain else max(schema.since_version, OLDEST)
    opsets = [helper.make_opsetid("", opset)]
    opsets += [helper.make_opsetid(domain, schema.since_version)] if domain else []
    graph = helper.make_graph([node], "probe", inputs, results)
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def _number(dtype: str) -> int:
    try:
        numpy_like = {"float": "FLOAT", "double": "DOUBLE"}.get(dtype, dtype.upper())
        return int(onnx.TensorProto.DataType.Value(numpy_like))
    except ValueError:
        return onnx.TensorProto.FLOAT
