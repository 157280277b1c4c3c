"""The tables of kernels: their shape, what they say, and the two sources they are read from."""

import importlib.util
import itertools
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import jsonschema
import onnxruntime
import pytest

ROOT = Path(__file__).resolve().parents[1]
COMMITTED = sorted((ROOT / "graphgen").glob("kernels_*.json"))

ROW = {
    "type": "array",
    "prefixItems": [
        {"type": "integer", "minimum": 1},
        {"type": ["integer", "null"], "maximum": 1000},
        {
            "type": "object",
            "additionalProperties": {
                "type": "array",
                "minItems": 1,
                "uniqueItems": True,
                "items": {
                    "type": "string",
                    "pattern": r"^([a-z0-9]+|(seq|optional|sparse_tensor)\(.+\))$",
                },
            },
        },
    ],
    "minItems": 3,
    "maxItems": 3,
}
SCHEMA = {
    "type": "object",
    "required": ["provider", "runtime", "source", "kernels"],
    "additionalProperties": False,
    "properties": {
        "provider": {"enum": ["CPUExecutionProvider", "CUDAExecutionProvider"]},
        "runtime": {"type": "string", "pattern": r"^\d+\.\d+\.\d+$"},
        "source": {"type": "string"},
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


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kernel_tables", ROOT / "bench/kernel_tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


kernel_tables = load_script()


def admits(content: dict[str, Any], domain: str, name: str, since: int, **types: str) -> bool:
    """The runtime's rule: an open-ended kernel serves its own schema version and no later one."""
    return any(
        (first == since or (last is not None and first <= since <= last))
        and all(dtype in listed.get(parameter, [dtype]) for parameter, dtype in types.items())
        for first, last, listed in content["kernels"].get(domain, {}).get(name, [])
    )


@pytest.fixture(scope="module")
def installed() -> dict[str, Any]:
    provider = "CPUExecutionProvider"
    runtime, kernels = kernel_tables.installed_kernels(provider)
    table: dict[str, Any] = kernel_tables.table(
        kernels, provider=provider, runtime=runtime, source="test"
    )
    return table


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_committed_tables_have_the_shape_and_the_canonical_text(path: Path) -> None:
    text = path.read_text("utf-8")
    content = json.loads(text)
    jsonschema.validate(content, SCHEMA)
    assert text == kernel_tables.dumps(content)
    assert len(text) < 60_000


def test_there_is_a_table_for_cuda_and_for_older_cpu_releases() -> None:
    assert {"kernels_cuda", "kernels_cpu_1.19", "kernels_cpu_1.20"} <= {p.stem for p in COMMITTED}


def test_cuda_table_says_what_is_known_of_cuda() -> None:
    content = json.loads((ROOT / "graphgen/kernels_cuda.json").read_text("utf-8"))
    assert admits(content, "", "LayerNormalization", 17, T="float16")
    assert admits(content, "", "Attention", 23, T1="bfloat16", U="bool")
    assert not admits(content, "", "Swish", 24)
    assert not admits(content, "com.microsoft", "GroupQueryAttention", 1, T="float")


def test_installed_table_says_what_is_known_of_the_cpu(installed: dict[str, Any]) -> None:
    jsonschema.validate(installed, SCHEMA)
    assert admits(installed, "", "LayerNormalization", 17, T="float")
    assert not admits(installed, "", "Swish", 24)
    assert not admits(installed, "com.microsoft", "BiasSoftmax", 1)
    minor = tuple(map(int, onnxruntime.__version__.split(".")[:2]))
    assert admits(installed, "", "Attention", 23, T1="float", T2="float") == (minor >= (1, 23))


def test_merging_admits_exactly_the_registered_kernels(installed: dict[str, Any]) -> None:
    def tuples(rows: list[dict[str, list[str]]]) -> set[tuple[tuple[str, str], ...]]:
        return {
            tuple(zip(row, choice, strict=True))
            for row in rows
            for choice in itertools.product(*row.values())
        }

    registered: dict[Any, list[dict[str, list[str]]]] = {}
    for kernel in kernel_tables.installed_kernels("CPUExecutionProvider")[1]:
        if kernel.domain in kernel_tables.DOMAINS:
            types = {name: sorted(kernel.types[name]) for name in sorted(kernel.types)}
            registered.setdefault(kernel[:4], []).append(types)
    merged: dict[Any, list[dict[str, list[str]]]] = {}
    for domain, operators in installed["kernels"].items():
        for name, rows in operators.items():
            for first, last, types in rows:
                merged.setdefault((domain, name, first, last), []).append(types)
    assert registered.keys() == merged.keys()
    for key, rows in registered.items():
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


def test_document_is_read_into_the_same_shape(tmp_path: Path) -> None:
    source, output = tmp_path / "OperatorKernels.md", tmp_path / "table.json"
    source.write_text(MARKDOWN, "utf-8")
    where = ["--provider", "CUDA", "--markdown", str(source), "--runtime", "1.31.1"]
    assert kernel_tables.main([*where, "--output", str(output)]) == 0
    content = json.loads(output.read_text("utf-8"))
    jsonschema.validate(content, SCHEMA)
    float_only = {"T": ["float"]}
    assert content["kernels"] == {
        "": {
            "Add": [
                [7, 12, float_only],
                [13, 13, float_only],
                [14, None, {"T": ["float", "float16"]}],
            ]
        },
        "com.microsoft": {"Keep": [[1, None, {"S": ["seq(float)"], "T": ["int64"]}]]},
    }


def test_bad_document_is_told_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "other.md"
    source.write_text("# Something else\n", "utf-8")
    assert kernel_tables.main(["--markdown", str(source), "--runtime", "1.31.1"]) == 2
    assert "no section" in capsys.readouterr().err
