"""Execution providers: which there are, how plugins are found, and what is said without one."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import numpy as np
import onnx.parser
import pytest

import graphgen as gg
from graphgen import providers
from graphgen.commands import main
from graphgen.errors import GraphgenError
from graphgen.runtime import import_runtime
from graphgen.targets.webgpu import faults

DOCS = Path(__file__).resolve().parents[2] / "docs"
LIBRARY = "/lib/libthere.so"
MODEL = onnx.parser.parse_model(
    """<ir_version: 8, opset_import: ["": 18]>
    g (float[n, 4] x) => (float[m] y) {
        shape = Shape(x)
        flat = Constant<value_ints = [-1]>()
        first = Tanh(x)
        y = Reshape(first, flat)
    }"""
)


class Runtime:
    """A runtime with one plugin to register, which then offers a device."""

    __version__ = "1.99.0"
    InferenceSession = object

    def __init__(self, *, devices: int = 1, fails: str = "") -> None:
        self.registered: list[tuple[str, str]] = []
        self.devices, self.fails = devices, fails

    def get_available_providers(self) -> list[str]:
        return ["CPUExecutionProvider", *(name for name, _ in self.registered)]

    def register_execution_provider_library(self, name: str, library: str) -> None:
        if self.fails:
            raise RuntimeError(f"[ONNXRuntimeError] : 1 : FAIL : {self.fails}")
        self.registered.append((name, library))

    def get_ep_devices(self) -> list[Any]:
        kind = SimpleNamespace(name="GPU")
        hardware = SimpleNamespace(type=kind, vendor="Maker", metadata={"Description": "Card 1"})
        offered = SimpleNamespace(
            ep_name="WebGpuExecutionProvider",
            ep_metadata={"library_path": LIBRARY},
            device=hardware,
        )
        other = SimpleNamespace(ep_name="CPUExecutionProvider", ep_metadata={}, device=hardware)
        return [other, *[offered] * (self.devices if self.registered else 0)]


@pytest.fixture
def installed(monkeypatch: Any) -> None:
    """The WebGPU plugin as an installed package."""
    versions = {"onnxruntime-ep-webgpu": "1.2"}
    monkeypatch.setattr(providers, "_version", versions.get)
    module = SimpleNamespace(get_library_path=lambda: LIBRARY)
    monkeypatch.setattr("importlib.import_module", lambda name: module)


def test_a_plugin_is_registered_once_by_its_own_name(installed: None) -> None:
    runtime = Runtime()
    for _ in range(2):
        assert len(providers.devices_of("Session", runtime, "webgpu")) == 1
    assert runtime.registered == [("WebGpuExecutionProvider", LIBRARY)]
    assert providers.devices_of("Session", runtime, "cpu") == []  # built in


@pytest.mark.parametrize(
    ("runtime", "provider", "problem"),
    [
        (Runtime(), "openvino", "'openvino': it is not installed; run `pip install -U onnxruntime"),
        (Runtime(devices=0), "webgpu", "'webgpu': it finds no device here; its documentation"),
        (Runtime(fails="no such symbol"), "webgpu", f"does not load {LIBRARY}: no such symbol"),
        (Runtime(), Path("no/such.so"), "'such.so': there is no library no/such.so"),
        (SimpleNamespace(__version__="1.20.1", get_available_providers=list), "webgpu", "1.20.1 l"),
    ],
)
def test_what_is_missing_is_one_line(
    installed: None, runtime: Any, provider: Any, problem: str
) -> None:
    with pytest.raises(GraphgenError) as refused:
        providers.devices_of("Session(m)", runtime, provider)
    text = str(refused.value)
    assert text.startswith("Session(m): provider='") and problem in text and "\n" not in text


def test_a_package_that_tells_no_library_gives_its_reason(
    installed: None, monkeypatch: Any
) -> None:
    def fails_to_import(name: str) -> Any:
        raise ImportError("DLL load failed")

    def fails() -> str:
        raise RuntimeError("none for\nthis system")

    for import_module, reason in (
        (fails_to_import, "DLL load failed"),
        (lambda _: SimpleNamespace(get_library_path=fails), "none for this system"),
        (lambda _: SimpleNamespace(), "has no attribute 'library_path'"),
    ):
        monkeypatch.setattr(providers.importlib, "import_module", import_module)
        with pytest.raises(GraphgenError) as refused:
            providers.devices_of("Session(m)", Runtime(), "webgpu")
        text = str(refused.value)
        assert reason in text and text.endswith("run `pip install -U onnxruntime-ep-webgpu`")
        assert "\n" not in text


def test_all_known_providers_are_listed(installed: None) -> None:
    rows = {row.name: row for row in providers.providers(Runtime())}
    assert rows["cpu"] == providers.Found("cpu", "CPUExecutionProvider", "onnxruntime 1.99.0")
    assert rows["webgpu"].devices == ("GPU Maker Card 1",) and not rows["webgpu"].problem
    assert rows["webgpu"].source == "onnxruntime-ep-webgpu 1.2"
    assert rows["cuda"].problem == "not installed: pip install onnxruntime-gpu"
    assert {*rows} <= {*providers.KNOWN} and "coreml" not in rows
    nothing = {row.name: row for row in providers.providers(Runtime(devices=0))}
    assert "1.2: it finds no device here" in nothing["webgpu"].problem


def test_the_command_prints_what_its_schema_says(capsys: Any) -> None:
    assert main(["providers"]) == 0
    assert "cpu " in capsys.readouterr().out
    assert main(["providers", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    jsonschema.validate(found, json.loads((DOCS / "providers.schema.json").read_text()))


def test_only_floats_elsewhere_are_told(tmp_path: Path) -> None:
    data, path = MODEL.SerializeToString(), tmp_path / "m.onnx"
    path.write_bytes(data)
    shape, _, tanh, reshape = ((n.op_type, n.name or n.output[0]) for n in MODEL.graph.node)
    named = onnx.load_from_string(data)
    for node in named.graph.node:
        node.name = node.output[0]
    path.write_bytes(named.SerializeToString())
    placed = {"Own": [tanh], "CPUExecutionProvider": [shape, reshape, ("FusedMade", "made")]}
    for model in (path, path.read_bytes()):
        found = providers.floats_elsewhere(model, placed, "Own")
        assert found == {"Reshape": 1, "FusedMade": 1}  # not Shape, which calculates a size
    assert not providers.floats_elsewhere(path, {"Own": [tanh, reshape]}, "Own")


def test_a_node_without_a_name_of_its_own_counts_and_strings_do_not() -> None:
    """The runtime tells nodes by name: an unnamed Shape must not hide an unnamed Tanh."""
    cpu, model = "CPUExecutionProvider", onnx.load_from_string(MODEL.SerializeToString())
    shape, _, tanh, _ = model.graph.node
    for name, found in (("", {"Tanh": 1, "Shape": 1}), ("twin", {"Tanh": 1, "Shape": 1})):
        shape.name = tanh.name = name
        placed = {cpu: [("Tanh", name), ("Shape", name)]}
        data = model.SerializeToString()
        assert providers.floats_elsewhere(data, placed, "Own") == found
    words = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 18]>
        g (string[n] x, float[n] f) => (string[n] y, float[n] z) {
            y = Identity(x)
            z = Identity(f)
        }"""
    )
    for node in words.graph.node:
        node.name = node.output[0]
    placed = {cpu: [("Identity", "y"), ("Identity", "z")]}
    found = providers.floats_elsewhere(words.SerializeToString(), placed, "Own")
    assert found == {"Identity": 1}


def test_a_session_tells_what_runs_elsewhere_and_strict_refuses(monkeypatch: Any) -> None:
    """As if Tanh alone ran on CUDA, whose session is the CPU's under its name."""
    named = onnx.load_from_string(MODEL.SerializeToString())
    for node in named.graph.node:
        node.name = node.output[0]
    ort = import_runtime()
    cpu, cuda = "CPUExecutionProvider", "CUDAExecutionProvider"

    class Divided(ort.InferenceSession):  # type: ignore[misc, name-defined]
        def __init__(self, *args: Any, providers: Any, **kwargs: Any) -> None:
            super().__init__(*args, providers=[cpu], **kwargs)

        def get_providers(self) -> list[str]:
            return [cuda, cpu]

        def get_provider_graph_assignment_info(self) -> list[Any]:
            nodes = {cuda: [("Tanh", "first")], cpu: [("Shape", "shape"), ("Reshape", "y")]}
            return [
                SimpleNamespace(
                    ep_name=name,
                    get_nodes=lambda made=made: [
                        SimpleNamespace(op_type=op_type, name=node) for op_type, node in made
                    ],
                )
                for name, made in nodes.items()
            ]

    monkeypatch.setattr(ort, "get_available_providers", lambda: [cuda, cpu])
    monkeypatch.setattr(ort, "InferenceSession", Divided)
    monkeypatch.setattr(ort, "preload_dlls", lambda: None, raising=False)
    data = named.SerializeToString()
    with pytest.warns(gg.GraphgenWarning, match="for lack of a kernel of cuda: 1 Reshape"):
        session = gg.Session(data, provider="cuda")
    assert session.plan.placement == {cuda: 1, cpu: 2} and "2 on CPU" in str(session.plan)
    assert session(x=np.zeros((1, 4), np.float32))[0].shape == (4,)
    with pytest.raises(GraphgenError, match=r"strict: it runs on the CPU.*1 Reshape; optimize"):
        gg.Session(data, provider="cuda", strict=True)
    assert session.plan.config[providers.RECORD] == "1"
    for module in ("graphgen.opening", "graphgen.runtime"):  # as before 1.24
        monkeypatch.setattr(f"{module}.can_record", lambda ort: False)
    with pytest.raises(GraphgenError, match=r"strict: onnxruntime \S+ does not tell which nodes"):
        gg.Session(data, provider="cuda", strict=True)


def test_on_the_cpu_nothing_is_recorded() -> None:
    data = MODEL.SerializeToString()
    for provider in ("cpu", None):
        assert providers.RECORD not in gg.Session(data, provider=provider, strict=True).plan.config


def test_a_device_without_an_adapter_is_not_the_fault_of_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*args: Any, **kwargs: Any) -> None:
        lines = "api.cc:3 Init status == Success was false. Failed to get a WebGPU adapter:"
        raise RuntimeError(f"[ONNXRuntimeError] : 1 : FAIL : {lines} No supported adapters")

    monkeypatch.setattr("graphgen.opening.devices_of", lambda *args: [])
    monkeypatch.setattr(import_runtime(), "InferenceSession", fails)
    with pytest.raises(GraphgenError) as refused:
        gg.Session(MODEL.SerializeToString(), provider="webgpu")
    text = str(refused.value).partition(" (test_")[0]
    assert "on webgpu finds no device that it can use" in text and "\n" not in text
    assert text.endswith("(Failed to get a WebGPU adapter: No supported adapters)")


def placed(ep_name: str, *op_types: str) -> Any:
    """A session with such nodes on a provider."""
    nodes = [SimpleNamespace(op_type=op_type, name="n") for op_type in op_types]
    part = SimpleNamespace(ep_name=ep_name, get_nodes=lambda: nodes)
    return SimpleNamespace(get_provider_graph_assignment_info=lambda: [part])


def test_attention_that_webgpu_gets_wrong_is_told() -> None:
    attend = "GroupQueryAttention"
    capped = onnx.load_from_string(MODEL.SerializeToString())
    for cap in (0.0, 9.0):
        given: dict[str, Any] = {"softcap": cap, "domain": "com.microsoft"}
        capped.graph.node.append(onnx.helper.make_node(attend, ["x"], [f"z{cap}"], **given))
    software, left_out = (
        "is wrong: 1 Group",
        f"WebGPU gets 1 {attend} with a softcap wrong, without",
    )
    for name, ep_name, model, wanted in (
        ("CPU", providers.WEBGPU, MODEL, [software]),
        ("CPU", providers.WEBGPU, capped, [software, left_out]),
        ("GPU", providers.WEBGPU, capped, [left_out]),
        (None, providers.WEBGPU, capped, ["not those of a runtime that has WebGPU", left_out]),
        ("GPU", providers.WEBGPU, MODEL, []),
        ("CPU", "OpenVINOExecutionProvider", capped, []),
    ):
        data, own = model.SerializeToString(), None if name is None else offered(name)
        found = faults("m", data, own, placed(ep_name, attend, "Softmax"))
        assert len(found) == len(wanted)
        assert all(part in line for part, line in zip(wanted, found, strict=True))
        assert faults("m", data, own, placed(ep_name, "Softmax")) == found[: own is None]


def offered(kind: str, version: str = "0.4.0") -> Any:
    """A device of a WebGPU plugin."""
    device = SimpleNamespace(type=SimpleNamespace(name=kind))
    return SimpleNamespace(device=device, ep_metadata={"version": version})


@pytest.mark.parametrize("version", ["0.3.0", "0.5.0", "0.4.0"])
def test_a_webgpu_plugin_whose_kernels_nobody_examined_is_told(version: str) -> None:
    found = faults(
        "m", MODEL.SerializeToString(), offered("GPU", version), placed(providers.WEBGPU, "Relu")
    )
    wanted = f"graphgen knows the kernels of onnxruntime-ep-webgpu 0.4.0, not those of {version}: "
    assert [line[: len(wanted)] for line in found] == ([] if version == "0.4.0" else [wanted])


def test_a_runtime_message_leaves_out_where_it_was_raised() -> None:
    where = "/src/webgpu/reduction_ops.h:94 onnxruntime::Status onnxruntime::Reduce<many>::Check("
    said = (
        f"[ONNXRuntimeError] : 6 : FAIL : {where}const Tensor*) const [with bool many = true] x\n"
    )
    assert providers.runtime_message(said) == "x"
    kept = "input of tensor(float) is a::b, wanted tensor(int64)"
    assert providers.runtime_message(kept) == kept


def test_a_node_that_ends_the_process_is_an_error() -> None:
    node = onnx.helper.make_node("Attention", ["x", "w"], ["y"], domain="com.microsoft")
    data = onnx.helper.make_model(onnx.helper.make_graph([node], "g", [], [])).SerializeToString()
    with pytest.raises(
        GraphgenError, match="m: WebGPU's kernel of 1 Attention without a bias ends"
    ):
        faults("m", data, None, placed(providers.WEBGPU, "Attention"))


@pytest.mark.parametrize(
    ("weights", "attributes", "wrong"),
    [
        ((8, 6, 3, 3), {}, True),
        ((8, 9, 3), {}, True),
        ((8, 6, 1, 1), {"strides": [2, 2]}, True),
        ((8, 6, 1, 1), {"pads": [0, 1, 0, 0]}, True),
        ((8, 6, 1, 1), {"strides": [1, 1], "pads": [0, 0, 0, 0]}, False),
        ((8, 6, 3, 3), {"group": 2}, False),
        ((8, 3, 3, 3), {}, False),
        ((8, 12, 3, 3), {}, False),
        ((8, 10, 3, 3), {}, False),
        ((6, 6, 3, 3), {}, False),
        ((8, 6, 2, 2, 2), {}, False),
    ],
)
def test_convolutions_that_webgpu_gets_wrong_are_told(
    weights: tuple[int, ...], attributes: dict[str, Any], wrong: bool
) -> None:
    node = onnx.helper.make_node("Conv", ["x", "w"], ["y"], **attributes)
    array = onnx.numpy_helper.from_array(np.zeros(weights, np.float32), "w")
    graph = onnx.helper.make_graph([node], "g", [], [], [array])
    data = onnx.helper.make_model(graph).SerializeToString()
    found = faults("m", data, offered("GPU"), placed(providers.WEBGPU, "Conv"))
    assert found == (
        [
            f"WebGPU gets 1 Conv of {weights[1]} channels to 8 wrong, without an error; optimize "
            "the model for this provider, or run it on the CPU"
        ]
        if wrong
        else []
    )
    assert faults("m", data, None, placed(providers.CPU, "Conv")) == []


def test_integers_as_floats_do_not_count_and_of_a_loop_its_nodes_do() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 18]>
        g (int64[n] i, float[n] x, int64 m, bool c) => (float[n] f, float[n] y) {
            [f] f = Cast<to = 1>(i)
            [y] y = Loop(m, c, x) <body = b (int64 k, bool a, float[n] u) => (bool t, float[n] w) {
                [twin] t = Not(a)
                [w] w = Tanh(u)
            }>
        }"""
    )
    placed = {
        "CPUExecutionProvider": [("Cast", "f"), ("Loop", "y"), ("Not", "twin"), ("Tanh", "w")]
    }
    data = model.SerializeToString()
    assert providers.floats_elsewhere(data, placed, "Own") == {"Tanh": 1}
    model.graph.node[1].attribute[0].g.node[1].name = "twin"  # which of the two is it?
    found = providers.floats_elsewhere(model.SerializeToString(), placed, "Own")
    assert found == {"Not": 1, "Tanh": 1}
