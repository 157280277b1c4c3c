"""The examples run, on tiny sizes, and exit with 3 where they miss their figure."""

import datetime
import importlib
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphgen as gg
from graphgen.models import count_parameters

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
NEEDS = {
    "bottleneck": ("matplotlib",),
    "dates": ("babel", "matplotlib"),
    "demo": ("tokenizers", "matplotlib"),
    "digits": ("sklearn",),
    "extrapolation": ("tokenizers", "matplotlib"),
    "gradients": ("matplotlib",),
    "identities": ("matplotlib",),
    "pretraining": ("babel",),
    "questions": (),
    "sequence_models": ("babel", "matplotlib"),
    "words": (),
}


UNTRAINED = ("gradients", "identities")


def test_every_example_is_here() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*NEEDS, "command"}


@pytest.mark.parametrize("name", NEEDS)
def test_an_example_runs(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for module in NEEDS[name]:
        pytest.importorskip(module, reason=f"{module} is missing: install the extra [examples]")
    monkeypatch.syspath_prepend(EXAMPLES)
    arguments = ["--quick", "--threads", "1", "-o", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    out = capsys.readouterr().out
    assert out.splitlines()[-1].startswith(f"{name}: ") and "; 3 steps, " in out
    assert {"demo": "bits per byte", "gradients": "times as large"}.get(name, "%") in out
    assert [*tmp_path.glob("*.png" if name in UNTRAINED else "*.onnx")]


def test_the_demo_fails_where_it_misses_its_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tokenizers", reason="tokenizers is missing: install the extra [demo]")
    monkeypatch.syspath_prepend(EXAMPLES)
    demo: Any = importlib.import_module("demo")

    train, held_out = demo.prose()
    monkeypatch.setattr(demo, "prose", lambda: (train[:40_000], held_out[:4_000]))
    monkeypatch.setattr(demo, "STEPS", 3)
    monkeypatch.setattr(gg, "compare", lambda *_, **__: "")
    with pytest.raises(gg.GateError, match=r"bits per byte held out; at most 2\.3 are wanted"):
        demo.run(tmp_path, quick=True)
    assert (tmp_path / "decoder.fused.onnx").exists()


def test_a_written_date_is_told_into_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention that is all on the field of each token lies on the diagonal of the shares."""
    pytest.importorskip("babel", reason="babel is missing: install the extra [examples]")
    monkeypatch.syspath_prepend(EXAMPLES)
    dates: Any = importlib.import_module("dates")

    date = datetime.date(1987, 9, 16)
    english, japanese = (date, "en_US", "full"), (date, "ja", "long")
    assert dates.fields(*english) == "@EEEEEEEEE--MMMMMMMMM-dd--yyyy"
    assert dates.fields(*japanese) == "@yyyy-M-dd-"
    for written in ((date, *rest) for rest in dates.FORMATS):
        assert len(dates.fields(*written)) == len(dates.tokens(*written)[0])
    found = [dates.fields(*english), dates.fields(*japanese).ljust(30)]
    weights = np.zeros((2, 1, 11, 30))
    for row, field in enumerate("yyyy-MM-dd-"):
        for number, text in enumerate(found):
            weights[number, 0, row, text.index(field)] = 1.0
    shares = dates.shares(weights, [english, japanese])
    np.testing.assert_array_equal(shares, np.eye(3, 6))


def test_the_sequence_models_are_of_one_size(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("babel", reason="babel is missing: install the extra [examples]")
    monkeypatch.syspath_prepend(EXAMPLES)
    example: Any = importlib.import_module("sequence_models")

    modules = [make(len(example.TOKENS), **sizes) for make, sizes, _ in example.MODELS.values()]
    counts = [count_parameters(module) for module in modules]
    assert len(counts) == 6 and max(counts) <= 1.05 * min(counts)


@pytest.mark.parametrize(
    ("reached", "options", "code", "told"),
    [
        (0.9, [], 0, "hit: all; 7 steps"),
        (0.8, [], 3, "hit: all: 80.00% is less than 90%, which is wanted"),
        (0.8, ["--quick"], 0, "hit: all; 3 steps"),
        (gg.GraphgenError("no such thing"), [], 2, "hit: no such thing"),
    ],
)
def test_the_exit_code_tells_whether_the_figure_is_reached(
    reached: Any, options: list[str], code: int, told: str, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(sys, "argv", ["hit.py", *options])
    from command import command

    def run(_: Any) -> tuple[float, str]:
        if isinstance(reached, Exception):
            raise reached
        return reached, "all"

    found = 0
    try:
        command(run, about="", steps=7, wanted=0.9)
    except SystemExit as left:
        found = int(str(left.code))
    assert found == code
    assert "".join(capsys.readouterr()).startswith(told)
