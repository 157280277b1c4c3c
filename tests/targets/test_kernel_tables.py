"""The tables of kernels: their shape, what they say, and the two sources they are read from."""

import importlib
import importlib.util
import itertools
import json
import platform
from pathlib import Path
from types import ModuleType
from typing import Any

import jsonschema
import onnxruntime
import pytest

from graphgen.targets import newest_opset, registered
from graphgen.targets.tables import Kernels, kernels_of
from graphgen.version import minor

ROOT = Path(__file__).resolve().parents[2]
COMMITTED = sorted((ROOT / "graphgen" / "targets").glob("kernels_*.json"))
CPU = "CPUExecutionProvider"

RELEASE = {"type": "string", "pattern": r"^\d+\.\d+$"}
ROW = {
    "type": "array",
    "prefixItems": [
        {"type": "integer", "minimum": 1},
        {"type": ["integer", "null"], "minimum": 13, "maximum": 1000},
        {
            "type": "object",
            "additionalProperties": {
                "type": "string",
                "pattern": r"^([a-z0-9]+|(seq|optional|sparse_tensor)\([^ ]+\))( |\b|$)",
            },
        },
        RELEASE,
        RELEASE,
    ],
    "minItems": 3,
    "maxItems": 5,
}
SCHEMA = {
    "type": "object",
    "required": ["provider", "source", "runtimes", "kernels"],
    "additionalProperties": False,
    "properties": {
        "provider": {"enum": [CPU, "CUDAExecutionProvider", "WebGpuExecutionProvider"]},
        "source": {"type": "string"},
        "runtimes": {
            "type": "object",
            "minProperties": 1,
            "propertyNames": {"pattern": r"^\d+\.\d+\.\d+$"},
            "additionalProperties": {"type": "integer", "minimum": 13},
        },
        "kernels": {
            "type": "object",
            "required": ["", "com.microsoft"],
            "propertyNames": {"enum": ["", "com.microsoft"]},
            "additionalProperties": {
                "type": "object",
                "additionalProperties": {"type": "array", "minItems": 1, "items": ROW},
            },
        },
    },
}


def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "bench" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


kernel_tables = load_script("kernel_tables")
probed_kernels = load_script("probed_kernels")


def admits(kernels: Kernels, domain: str, name: str, since: int, **types: str) -> bool:
    """The runtime's rule: an open-ended kernel serves its own schema version and no later one."""
    return any(
        (first == since or (last is not None and first <= since <= last))
        and all(dtype in listed.get(parameter, [dtype]) for parameter, dtype in types.items())
        for first, last, listed in kernels.get(domain, {}).get(name, [])
    )


def table_of(path: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((ROOT / "graphgen" / "targets" / path).read_text("utf-8"))
    return content


@pytest.fixture(scope="module")
def installed() -> dict[str, Any]:
    releases = {onnxruntime.__version__: (newest_opset(), registered(CPU))}
    table: dict[str, Any] = kernel_tables.table(releases, provider=CPU, source="test")
    return table


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_committed_tables_have_the_shape_and_the_canonical_text(path: Path) -> None:
    text = path.read_text("utf-8")
    content = json.loads(text)
    jsonschema.validate(content, SCHEMA)
    assert text == kernel_tables.dumps(content)
    assert len(text) < 90_000


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_taking_a_table_apart_and_together_changes_nothing(path: Path) -> None:
    content = json.loads(path.read_text("utf-8"))
    again = kernel_tables.table(
        kernel_tables.read(path), provider=content["provider"], source=content["source"]
    )
    assert again == content


def test_there_is_a_table_for_cuda_webgpu_and_every_minor_version_on_the_cpu() -> None:
    assert [path.stem for path in COMMITTED] == ["kernels_cpu", "kernels_cuda", "kernels_webgpu"]
    known = [minor(version) for version in table_of("kernels_cpu.json")["runtimes"]]
    assert known == [(1, i) for i in range(19, known[-1][1] + 1)]
    assert known[-1] >= (1, 32)


def test_cuda_table_says_what_is_known_of_cuda() -> None:
    content = kernels_of(table_of("kernels_cuda.json"), "1.31.1")
    assert admits(content, "", "LayerNormalization", 17, T="float16")
    assert admits(content, "", "Attention", 23, T1="bfloat16", U="bool")
    assert not admits(content, "", "Swish", 24)
    assert not admits(content, "com.microsoft", "GroupQueryAttention", 1, T="float")


@pytest.mark.parametrize(("release", "attention"), [("1.22", False), ("1.23", True)])
def test_a_release_has_what_came_with_it(release: str, attention: bool) -> None:
    kernels = kernels_of(table_of("kernels_cpu.json"), release)
    assert admits(kernels, "", "Attention", 23, T1="float", T2="float") == attention
    assert admits(kernels, "com.microsoft", "MultiHeadAttention", 1, T="float")


def test_installed_table_says_what_is_known_of_the_cpu(installed: dict[str, Any]) -> None:
    jsonschema.validate(installed, SCHEMA)
    kernels = kernels_of(installed, onnxruntime.__version__)
    assert admits(kernels, "", "LayerNormalization", 17, T="float")
    assert not admits(kernels, "", "Swish", 24)
    assert not admits(kernels, "com.microsoft", "BiasSoftmax", 1)


def test_the_committed_table_is_what_that_release_says(installed: dict[str, Any]) -> None:
    runtimes = table_of("kernels_cpu.json")["runtimes"]
    version = onnxruntime.__version__
    if version not in runtimes:
        pytest.skip(f"onnxruntime {version} is in no table: that has {', '.join(runtimes)}")
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("the table is of x86-64; on Arm, onnxruntime has further kernels for float16")
    assert installed["runtimes"] == {version: runtimes[version]}
    committed = kernels_of(table_of("kernels_cpu.json"), version)
    assert committed == kernels_of(installed, version)


def test_merging_admits_exactly_the_registered_kernels(installed: dict[str, Any]) -> None:
    def tuples(rows: list[dict[str, list[str]]]) -> set[tuple[tuple[str, str], ...]]:
        return {
            tuple(zip(row, choice, strict=True))
            for row in rows
            for choice in itertools.product(*row.values())
        }

    def by_span(kernels: Kernels) -> dict[Any, list[dict[str, list[str]]]]:
        found: dict[Any, list[dict[str, list[str]]]] = {}
        for domain in kernel_tables.DOMAINS:
            for name, rows in kernels[domain].items():
                for first, last, types in rows:
                    if last is None or last >= kernel_tables.OLDEST:
                        types = {p: sorted(types[p]) for p in sorted(types)}
                        found.setdefault((domain, name, first, last), []).append(types)
        return found

    from_runtime = by_span(registered(CPU))
    merged = by_span(kernels_of(installed, onnxruntime.__version__))
    assert from_runtime.keys() == merged.keys()
    for key, rows in from_runtime.items():
        assert tuples(rows) == tuples(merged[key]), key


MARKDOWN = """## Operators implemented by CUDAExecutionProvider

| Op Name | Parameters | OpSet Version | Types Supported |
|---------|------------|---------------|-----------------|
|**Operator Domain:** *ai.onnx*||||
|Add|*in* A:**T**<br> *out* C:**T**|14+|**T** = tensor(float), tensor(float16)|
|||13|**T** = tensor(float)|
|||[7, 12]|**T** = tensor(float)|
|**Operator Domain:** *com.microsoft*||||
|Keep|*in* x:**T**<br> *in* y:**S**|1+|**S** = seq(tensor(float))<br/> **T** = tensor(int64)|

## Operators implemented by DmlExecutionProvider
|Add|||7+|**T** = tensor(double)|
"""


def add(folder: Path, text: str, release: str, opset: int) -> dict[str, Any]:
    """The table in `folder` after a release was added from a document."""
    (folder / "OperatorKernels.md").write_text(text, "utf-8")
    where = ["--provider", "CUDA", "--markdown", str(folder / "OperatorKernels.md")]
    output = folder / "table.json"
    told = ["--release", release, "--opset", str(opset), "--output", str(output)]
    assert kernel_tables.main([*where, *told]) == 0
    content: dict[str, Any] = json.loads(output.read_text("utf-8"))
    jsonschema.validate(content, SCHEMA)
    return content


def test_document_is_read_into_the_same_shape(tmp_path: Path) -> None:
    content = add(tmp_path, MARKDOWN, "1.31.1", 27)
    assert content["runtimes"] == {"1.31.1": 27}
    assert content["kernels"] == {
        "": {"Add": [[13, 13, {"T": "float"}], [14, None, {"T": "float float16"}]]},
        "com.microsoft": {"Keep": [[1, None, {"S": "seq(float)", "T": "int64"}]]},
    }


def test_releases_are_added_one_by_one_and_told_apart(tmp_path: Path) -> None:
    half = "tensor(float), tensor(float16)"
    add(tmp_path, MARKDOWN.replace(half, "tensor(float)"), "1.9.0", 15)
    add(tmp_path, MARKDOWN.replace("13|", "[13, 13]|"), "1.10.2", 16)
    content = add(tmp_path, MARKDOWN.replace("|||13|**T** = tensor(float)|\n", ""), "1.11.0", 17)
    assert content["runtimes"] == {"1.9.0": 15, "1.10.2": 16, "1.11.0": 17}
    assert content["kernels"][""]["Add"] == [
        [13, 13, {"T": "float"}, "1.9", "1.10"],
        [14, None, {"T": "float float16"}, "1.10"],
        [14, None, {"T": "float"}, "1.9", "1.9"],
    ]
    assert kernels_of(content, "1.10")[""]["Add"] == [
        (13, 13, {"T": ["float"]}),
        (14, None, {"T": ["float", "float16"]}),
    ]
    assert add(tmp_path, MARKDOWN, "1.11.3", 17)["runtimes"] == {
        "1.9.0": 15,
        "1.10.2": 16,
        "1.11.3": 17,
    }


def test_bad_document_is_told_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "other.md"
    source.write_text("# Something else\n", "utf-8")
    told = ["--markdown", str(source), "--release", "1.31.1", "--opset", "27"]
    assert kernel_tables.main(told) == 2
    assert "no section" in capsys.readouterr().err


def test_a_plugin_is_probed_by_models_of_one_node() -> None:
    """As if it had Gather of floats by int32, and GroupQueryAttention with caches of float16."""
    kinds = {"x0": 1, "x1": 6, "x3": 10, "x4": 10, "x5": 6, "x6": 6}  # by the number of the input

    def placed(model: Any) -> bool:
        found = {value.name: value.type.tensor_type.elem_type for value in model.graph.input}
        if model.graph.node[0].op_type == "GroupQueryAttention":
            found.pop("x1", None)
        return all(kinds.get(name) == dtype for name, dtype in found.items())

    state = importlib.import_module("onnxruntime.capi.onnxruntime_pybind11_state")
    schemas = {
        s.name: s
        for s in state.get_all_operator_schema()
        if s.name in ("Gather", "GroupQueryAttention")
    }
    assert probed_kernels.rows_of(schemas["Gather"], placed) == [
        (schemas["Gather"].since_version, None, {"T": ["float"], "Tind": ["int32"]})
    ]
    [(first, _, found)] = probed_kernels.rows_of(schemas["GroupQueryAttention"], placed)
    assert first == 1 and (found["T"], found["M"]) == (["float"], ["int32"])
    assert found["T_CACHE"] == ["float16"]
