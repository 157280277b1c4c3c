"""Other optimizers work apart: their files compute the same, and what goes wrong is a reason."""

import os
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_models import ROUNDING, relative_rms

import graphgen as gg
from graphgen.graph import count_operators
from graphgen.laboratory import others
from graphgen.laboratory.others import in_background, optimized_by_others
from graphgen.targets import newest_opset

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
BERT = FIXTURES / "bert_torchscript_eager_14.onnx"


def found(folder: Path, monkeypatch: pytest.MonkeyPatch, *only: str, **options: Any) -> Any:
    installed = others._installed
    monkeypatch.setattr(others, "_installed", lambda name: name in only and installed(name))
    return dict(optimized_by_others(BERT, folder, "cpu", **options))


def result_of(model: Any) -> Any:
    feeds = np.load(FIXTURES / "bert.npz")
    session = gg.Session(model, provider="cpu", optimize=False)
    return session({name: feeds[name] for name in session.inputs})[0]


def where_installed(name):
    """A simplifier as a parameter: only the benchmarks install onnxslim, and nothing onnxsim."""
    reason = f"{name} is not installed: pip install {name}"
    return pytest.param(name, [name], marks=pytest.mark.skipif(not find_spec(name), reason=reason))


@pytest.mark.share(3)
@pytest.mark.parametrize(
    ("library", "names"),
    [
        ("onnxscript", ["onnxscript.optimizer", "onnxscript optimize_for_ort"]),
        where_installed("onnxslim"),
        where_installed("onnxsim"),
    ],
)
def test_what_they_write_computes_the_same(library, names, tmp_path, monkeypatch, capfd):
    made = found(tmp_path, monkeypatch, library)
    assert [*made] == names
    wanted, nodes = result_of(BERT), gg.load(BERT).graph.num_nodes()
    for path in made.values():
        assert relative_rms(wanted, result_of(path)) < ROUNDING
        assert gg.load(path).graph.num_nodes() < nodes
    assert capfd.readouterr() == ("", "")
    left = {path.suffix for path in tmp_path.iterdir()}
    assert left <= {".onnx", ".data"}


@pytest.mark.exhaustive
@pytest.mark.skipif(newest_opset() < 23, reason="its older versions find no attention here at all")
def test_transformers_is_told_heads_and_type(tmp_path, monkeypatch):
    """Without heads it fuses no attention here; what it lacks itself is told."""
    made = found(tmp_path, monkeypatch, "onnxruntime.transformers")
    assert [*made] == [f"onnxruntime.transformers, level {level}" for level in range(3)]
    for result in made.values():
        if isinstance(result, str):
            assert "No module named" in result
        else:
            assert count_operators(gg.load(result))["com.microsoft::Attention"] == 2


@pytest.mark.share(3)
@pytest.mark.parametrize("path", sorted(FIXTURES.glob("*.onnx")), ids=lambda path: path.stem)
def test_heads_of_a_file(path):
    assert others._heads(path) == (4, 16 if "t5" in path.stem else 32)


@pytest.mark.share(2)
@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("raise ValueError('what I do\\nnot know')", "not know"),
        ("import nonsense_module", "ModuleNotFoundError: No module named 'nonsense_module'"),
        ("import os; os._exit(7)", "it ended with 7"),
        ("import os; os.abort()", "it ended with -6"),
        ("import time; time.sleep(60)", "it wrote nothing in 1 s"),
        ("return 'no model', True", "AttributeError"),
    ],
)
def test_what_goes_wrong_is_a_reason(body, reason, tmp_path, monkeypatch, capfd):
    library = tmp_path / "library"
    library.mkdir()
    text = f"def simplify(path):\n    print('hello', path)\n    {body}\n"
    (library / "onnxsim.py").write_text(text)
    monkeypatch.syspath_prepend(library)
    monkeypatch.setenv("PYTHONPATH", str(library))
    made = found(tmp_path, monkeypatch, "onnxsim", seconds=1 if "sleep" in body else 60)
    assert made["onnxsim"].startswith(reason)
    assert capfd.readouterr() == ("", "")
    assert [*tmp_path.glob("*.onnx*")] == []


def test_none_is_left_behind_when_no_more_is_wanted(tmp_path, monkeypatch):
    """The one that works then ends at once, and the next does not begin."""
    library, begun = tmp_path / "library", tmp_path / "begun"
    library.mkdir()
    begun.touch()
    told = f"open({str(begun)!r}, 'a').write(f'{{os.getpid()}} ')"
    for _, _, name in others._PLAIN[-2:]:
        (library / f"{name}.py").write_text(f"import os, time\n{told}\ntime.sleep(600)\n")
    monkeypatch.setenv("PYTHONPATH", str(library))
    monkeypatch.setattr(others, "_installed", lambda name: (library / f"{name}.py").exists())
    with in_background(lambda stop: optimized_by_others(BERT, tmp_path, "cpu", stop=stop)) as made:
        while not begun.read_text():
            time.sleep(0.01)
    assert dict(made) == {"onnxslim": "it ended with -9"}
    with pytest.raises(ProcessLookupError):
        os.kill(int(begun.read_text()), 0)


@pytest.mark.parametrize(("library", "names"), [*map(where_installed, ("onnxslim", "onnxsim"))])
def test_what_they_write_is_a_row(library, names, tmp_path, monkeypatch):
    monkeypatch.setattr(others, "_installed", lambda name: name == library)
    sizes = {"batch": 2, "sequence": 5}
    rows = gg.compare(BERT, dims=sizes, seconds=0.05, threads=1, kinds=["other"])
    row = rows[library]
    assert [row.name for row in rows.rows if row.kind == "other"] == names
    assert row.problem is None and row.verdict in ("faster", "slower", "tie")
    assert row.nodes < rows["baseline"].nodes and 0 < row.flops <= rows["baseline"].flops
    assert row.latency_ms.low > 0 and row.error.rel_rms < ROUNDING


def test_one_that_is_not_installed_is_no_row(tmp_path, monkeypatch):
    monkeypatch.setattr(others, "_PLAIN", (("other", "simplified", "nonsense_module"),))
    assert found(tmp_path, monkeypatch, "nonsense_module") == {}
