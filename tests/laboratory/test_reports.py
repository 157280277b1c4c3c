"""Two saved reports, row by row."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from graphgen import commands

DOCS = Path(__file__).parents[2] / "docs"


def row(name: str, ms: float | None, nodes: int = 9, **more: Any) -> dict[str, Any]:
    """A row as `compare` writes it, measured to a hundredth."""
    latency = ms and {"median": ms, "low": ms * 0.99, "high": ms * 1.01, "runs": 9}
    found = {"name": name, "kind": "cumulative", "latency_ms": latency, "nodes": nodes}
    return {**found, "error": {"rel_rms": 2e-7}, "decode": None, **more}


A = {
    "machine": "one",
    "runtime": "1.2",
    "rows": [
        row("baseline", 2.0, kind="baseline"),
        row("fuse_norm", 1.0, 7),
        row("fuse_norm", 1.02, 7),
        row("clean", 0.8, 5, decode={"latency_ms": row("", 0.1)["latency_ms"], "error": None}),
        row("without fuse_norm", None, 8, kind="leave_one_out", error={"rel_rms": None}),
    ],
}
B = {
    **A,
    "machine": "two",
    "rows": [
        row("baseline", 2.01, kind="baseline"),
        row("fuse_norm", 0.5, 6),
        row("clean", 0.9, 4, decode={"latency_ms": row("", 0.1)["latency_ms"], "error": None}),
        row("without fuse_norm", None, 8, kind="leave_one_out", error={"rel_rms": 1e-3}),
        row("onnxslim\x1b[2J", 1.0, kind="other"),  # not what the pipeline ends with
    ],
}


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, report in (("a", A), ("b", B)):
        Path(f"{name}.json").write_text(json.dumps(report))


@pytest.mark.usefixtures("files")
def test_rows_are_matched_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["diff", "a.json", "b.json"]) == 0
    setting, _, *rows, last = capsys.readouterr().out.splitlines()
    assert setting == "machine: one -> two"
    assert [line.split("  ")[0] for line in rows] == [
        "baseline",
        "fuse_norm",
        "fuse_norm 2",
        "clean",
        "clean, decode",
        "without fuse_norm",
        "onnxslim\\x1b[2J",
    ]
    assert rows[1].split() == "fuse_norm faster 1 -> 0.5 0.500 2.0e-07 7 -> 6".split()
    assert "tie" in rows[0] and "slower" in rows[3] and "inf -> 1.0e-03" in rows[5]
    assert last == (
        "b.json against a.json: verdict slower, ms 0.8 -> 0.9, ratio 1.125, "
        "error 2.0e-07, nodes 5 -> 4; 7 rows: 2 tie, 2 in one, 1 faster, 1 slower, 1 same nodes"
    )


@pytest.mark.usefixtures("files")
def test_its_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["diff", "a.json", "b.json", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    jsonschema.validate(found, json.loads((DOCS / "diff-reports.schema.json").read_text()))
    by_name = {each["name"]: each for each in found["rows"]}
    assert by_name["fuse_norm"]["ratio"] == 0.5 and by_name["clean"]["ms"] == [0.8, 0.9]
    assert by_name["without fuse_norm"]["error"] == [None, 1e-3]
    assert by_name["fuse_norm 2"]["verdict"] is None


def test_intervals_that_overlap_are_a_tie(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = []
    for median, low, high in ((1.0, 0.8, 1.2), (0.9, 0.7, 1.1)):
        found = row("clean", 1.0, latency_ms={"median": median, "low": low, "high": high})
        names.append(str(tmp_path / f"{median}.json"))
        Path(names[-1]).write_text(json.dumps({"rows": [found]}))
    assert commands.main(["diff", *names]) == 0
    assert ": verdict tie, ms 1 -> 0.9" in capsys.readouterr().out


def test_reports_of_optimize(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They have nodes after each pass, and no times."""
    file = tmp_path / "o.json"
    passes = [{"name": "clean", "nodes_after": n} for n in (5, 4)]
    file.write_text(json.dumps({"passes": passes}))
    assert commands.main(["diff", str(file), str(file)]) == 0
    assert ": verdict same nodes, nodes 4; 2 rows: 2 same nodes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ("a.json m.onnx", "give two models or two reports"),
        ("a.json b.json --html x.html --exit-code", "--exit-code, --html"),
        ("a.json none.json", "none.json cannot be read"),
        ("a.json no.json", "is not what `compare --json` or `optimize --report` wrote"),
        ("a.json nan.json", "a time is not finite"),
        ("a.json list.json", "must hold a JSON object"),
    ],
)
@pytest.mark.usefixtures("files")
def test_what_is_refused(options: str, wanted: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("no.json").write_text('{"rows": [{"name": "x", "latency_ms": "soon"}]}')
    Path("nan.json").write_text(json.dumps({"rows": [row("x", float("nan"))]}))
    Path("list.json").write_text("[]")
    assert commands.main(["diff", *options.split()]) == 2
    error = capsys.readouterr().err
    assert wanted in error and len(error.splitlines()) == 1
