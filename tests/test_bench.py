"""The questions of bench/ that need nothing but the committed fixtures still run."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_models import ROUNDING

import graphgen as gg
from graphgen import ops
from graphgen.errors import GraphgenError

BOUNDS = {"fp32": 5e-6, "fp16": 5e-3}
BENCH = Path(__file__).resolve().parents[1] / "bench"


def run(script: str, *arguments: str) -> Any:
    command = [sys.executable, BENCH / script, "--quick", "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


@pytest.mark.exhaustive
def test_fusion_measures_every_contender_or_says_why_not():
    rows = run("fusion.py", "--only", "llama")["rows"]
    contenders = {row["contender"] for row in rows}
    assert {"graphgen", "the export", "onnxscript optimize_for_ort"} < contenders
    assert len(rows) == 2 * len(contenders)
    for row in rows:
        if row["contender"].startswith("graphgen"):
            assert row["error"] < ROUNDING
        if row["problem"]:
            assert row["problem"].startswith(("invalid: ", "wrong: "))
            assert row["ratio"] is None
        else:
            low, high = row["interval"]
            assert 0 < low <= high and row["ratio"] > 0 and 0 < row["peak_share"] < 1
    assert all(r["ratio"] == 1 for r in rows if r["contender"] == "graphgen")


def test_fusion_counts_no_wrong_file(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(BENCH)
    import fusion

    at = ("m", "dynamo", 1, 8)
    ours = fusion.Row(*at, "graphgen", median_ms=2.0, ratio=1.0)
    wrong = fusion.Row(*at, "other", problem="wrong: 1e-1")
    tie, faster = (fusion.Row(*at, "other", median_ms=2 * r, ratio=r) for r in (0.98, 0.9))
    assert fusion.failures([ours, wrong, tie], speed=True) == []
    assert (tie.verdict(), faster.verdict()) == ("tie", "FASTER")
    (told,) = fusion.failures([ours, wrong, faster], speed=True)
    assert told == "m (dynamo) at 1 x 8: graphgen takes 1.111 of other"
    broken = fusion.Row(*at, "graphgen", problem="invalid: no kernel")
    assert fusion.failures([broken, faster], speed=False)


@pytest.mark.exhaustive
def test_compile_runs_both_compilers():
    found = run("compile.py")
    assert [each["compiler"] for each in found["compilers"]] == ["graphgen", "onnxscript"]
    assert all(each["seconds"] > 0 for each in found["compilers"])
    memory = found["compilers"][0]["peak_mb_weights_beside"]
    assert memory > 0 or not Path("/proc/self/clear_refs").exists()
    assert [row["layers"] for row in found["depths"]] == [1, 2]


@pytest.mark.exhaustive
def test_start_compares_each_program():
    rows = {row["program"]: row for row in run("start.py")["rows"]}
    assert {"import graphgen", "graphgen --help", "graphgen --version"} < rows.keys()
    assert all(row["ms"] > 0 for row in rows.values())


@pytest.mark.exhaustive
def test_diff_finds_the_one_difference():
    command = [sys.executable, BENCH / "diff.py", "--layers", "2", "--rounds", "1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "['Erf']" in done.stdout


@pytest.mark.exhaustive
def test_the_cost_table_is_counted_measured_and_plotted(tmp_path: Path):
    pytest.importorskip("matplotlib", reason="matplotlib is missing: install the extra [demo]")
    command = [sys.executable, BENCH / "cost_table.py", "--quick", "-o", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    text = (tmp_path / "cost-table.md").read_text()
    assert "| O(n²·d) | 4 n²d + 8 nd² | O(1) | 4, 4, 4 | O(1) | 3, 3, 3 | 1, 1, 1 |" in text
    assert text.count("\n| recurrent |") == 3
    assert (tmp_path / "cost-table.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.exhaustive
def test_cuda_tries_every_operator_on_the_cpu(tmp_path: Path):
    page = tmp_path / "cuda.md"
    arguments = ["--quick", "--json", "--provider", "cpu", "--dtypes", "fp32", "fp16"]
    command = [sys.executable, BENCH / "on_cuda.py", *arguments, "--page", page]
    done = subprocess.run(command, capture_output=True, text=True)
    rows = json.loads(done.stdout)["rows"]
    assert len(rows) == 42 and all(row["error"] < BOUNDS[row["dtype"]] for row in rows)
    fp32 = [row for row in rows if row["dtype"] == "fp32"]
    assert not any(row["fault"] or row["problem"] for row in fp32)
    assert {r["ran_on"] for r in fp32 if r["operator"] != "GroupNormalization"} == {"cpu"}
    # some runtimes put the body in the place of fp16, which the table does not know
    faults = [row for row in rows if row["fault"]]
    assert all(row["fault"].endswith("it ran on inlined") for row in faults)
    assert done.returncode == (3 if faults else 0)
    assert "| Softmax | fp32 | 3 | native | cpu |" in page.read_text()


def test_cuda_keeps_what_is_known_when_a_device_fails_or_somebody_stops_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.syspath_prepend(BENCH)
    import on_cuda

    def measure(case: Any, *args: Any) -> Any:
        if case.name == "Relu":
            raise KeyboardInterrupt
        raise RuntimeError(f"the device is lost in {case.name}")

    monkeypatch.setattr(on_cuda, "measure", measure)
    arguments = ["--quick", "--provider", "cpu", "--dtypes", "fp32", "--page", tmp_path / "p.md"]
    monkeypatch.setattr("sys.argv", ["on_cuda.py", *map(str, arguments)])
    assert on_cuda.main() == 3
    page, shown = (tmp_path / "p.md").read_text(), capsys.readouterr().out
    for text in (page, shown):
        assert "Softmax fp32 at 3: the table says native, and it ran on nothing" in text
        assert "the device is lost in QuickGelu" in text and "interrupted after 8 of 21" in text


def test_cuda_says_what_is_missing_and_its_page_that_nobody_has_run_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.syspath_prepend(BENCH)
    import on_cuda

    def lacks(who: str, provider: str) -> None:
        raise GraphgenError(f"{who}: provider={provider!r}: it is not installed")

    monkeypatch.setattr(on_cuda, "check_provider", lacks)
    monkeypatch.setattr("sys.argv", ["on_cuda.py"])
    assert on_cuda.main() == 2
    assert capsys.readouterr().err == "on_cuda.py: provider='cuda': it is not installed\n"
    known = (BENCH.parent / "docs" / "cuda.md").read_text()
    assert known.startswith(on_cuda.HEAD) and "Nobody has run it" in on_cuda.page([], "", [])
    wrong = on_cuda.Row("Gelu", "fp16", 1, table=True, ran_on="cuda", error=0.1)
    assert wrong.fault("cuda") == "Gelu fp16 at 1: its error is 1.0e-01, above 5e-03"
    left = on_cuda.Row("Gelu", "fp16", 1, table=True, ran_on="cpu", error=0.0)
    assert left.fault("cuda") == "Gelu fp16 at 1: the table says native, and it ran on cpu"
    assert not on_cuda.Row("Gelu", "fp16", 1, table=False, ran_on="cpu", error=0.0).fault("cuda")


def test_model_types_counts_what_is_left(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(BENCH)
    import model_types

    def unfused(q: Any, k: Any, v: Any) -> Any:
        weights = ops.softmax(q @ ops.swap_last(k) / 4.0)
        y = (weights * weights) @ v
        centered = y - ops.reduce_mean(y, axis=-1)
        return centered / ops.sqrt(ops.reduce_mean(centered * centered, axis=-1) + 1e-5)

    x = gg.float32["batch", 8, 16]
    model = gg.build(unfused, q=x, k=x, v=x, primitives=True)
    assert model_types.norms_left(model.graph) == 1
    assert model_types.softmaxes_left(gg.optimize(model).model.graph) == 1
    assert model_types.apart(gg.optimize(model).model.graph) == 0

    def told(q: Any, k: Any, v: Any) -> Any:
        weights = ops.softmax(q @ ops.swap_last(k))
        return weights @ v, weights

    model = gg.build(told, q=x, k=x, v=x, primitives=True)
    assert model_types.apart(gg.optimize(model).model.graph) == 1
    dense = np.ones((16, 24), np.float32)

    def kernels(q: Any, v: Any) -> Any:
        weights = ops.softmax(ops.reshape(q @ dense, [-1, 8, 8, 3]), axis=-1)
        return weights @ ops.reshape(v, [-1, 8, 3, 16])

    model = gg.build(kernels, q=x, v=gg.float32["batch", 24, 16], primitives=True)
    assert model_types.apart(gg.optimize(model).model.graph) == 1
    lower = np.tril(np.ones((8, 8), np.float32))
    for masked in (
        lambda s: ops.where(lower > 0, s, -10000.0),
        lambda s: s * lower - 10000.0 * (1.0 - lower),
    ):

        def hidden(q: Any, k: Any, v: Any, masked: Any = masked) -> Any:
            return ops.softmax(masked(q @ ops.swap_last(k))) @ v

        model = gg.build(hidden, q=x, k=x, v=x)
        assert model_types.apart(gg.optimize(model).model.graph) == 1
    plain = gg.optimize(gg.build(gg.nn.LayerNorm(16), x=x, seed=0)).model.graph
    assert model_types.softmaxes_left(plain) == model_types.norms_left(plain) == 0
