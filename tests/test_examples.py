"""The examples run, on tiny sizes, and exit with 3 where they miss their figure."""

import datetime
import importlib
import math
import runpy
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphgen as gg
from graphgen.nn import count_parameters

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
NEEDS = {
    "bottleneck": ("matplotlib",),
    "dates": ("babel", "matplotlib"),
    "demo": ("tokenizers", "matplotlib"),
    "digits": ("sklearn",),
    "extrapolation": ("tokenizers", "matplotlib"),
    "gradients": ("matplotlib",),
    "heads": ("babel", "matplotlib"),
    "identities": ("matplotlib",),
    "norms": ("matplotlib",),
    "parallel": ("matplotlib",),
    "pretraining": ("babel",),
    "questions": (),
    "sequence_models": ("babel", "matplotlib"),
    "words": (),
}


FIGURES = {
    "demo": "bits per byte",
    "gradients": "times as large",
    "norms": "nats a byte",
    "parallel": "times as fast",
}
UNTRAINED = ("gradients", "identities", "norms", "parallel")  # or nothing of it is exported


def test_every_example_is_here() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*NEEDS, "command"}


LONG = ("bottleneck", "dates", "extrapolation", "heads", "norms", "parallel", "sequence_models")
MARKS = {name: [pytest.mark.exhaustive] * (name in LONG) for name in NEEDS}


@pytest.mark.share(2)
@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS[name]) for name in NEEDS])
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
    assert FIGURES.get(name, "%") in out
    assert [*tmp_path.glob("*.png" if name in UNTRAINED else "*.onnx")]


@pytest.mark.parametrize("warmed", [2.8, math.inf])
def test_norms_fails_where_warm_up_brings_nothing(
    warmed: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is missing: install the extra [demo]")
    monkeypatch.syspath_prepend(EXAMPLES)
    norms: Any = importlib.import_module("norms")

    def trained(folder: Path, share: float, *_: Any) -> Any:
        if folder.name.startswith("post"):
            return (warmed if share else 3.2), [3.2]
        return 2.1, [2.1]

    monkeypatch.setattr(norms, "DEPTHS", [1, 2])
    monkeypatch.setattr(norms, "trained", trained)
    monkeypatch.setattr(norms, "gradients", lambda *_: [0.1, 0.2])
    monkeypatch.setattr(gg, "artifacts", lambda *_, **__: None)
    options = Namespace(output=tmp_path, quick=False, seed=0, steps=1, threads=1, rate=1e-2)
    with pytest.raises(gg.GateError, match=r"3\.20 nats a byte with 1 layers"):
        norms.run(options)
    warmed = 2.2
    assert norms.run(options)[0] == pytest.approx(1.0)


def test_heads_fails_where_their_cost_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in NEEDS["heads"]:
        pytest.importorskip(module, reason=f"{module} is missing: install the extra [examples]")
    monkeypatch.syspath_prepend(EXAMPLES)
    heads: Any = importlib.import_module("heads")

    def session(**_: Any) -> None:
        pass

    counts = {count: (10, 20, 30 + count) for count in heads.HEADS}
    monkeypatch.setattr(heads, "counted", lambda count, _: counts[count])
    monkeypatch.setattr(heads, "trained", lambda count, *_: (session, 0.1, count / 32))
    options = Namespace(output=tmp_path, quick=False, seed=0, steps=1, threads=1)
    assert heads.run(options)[0] == pytest.approx(7 / 32)
    counts[32] = (10, 21, 62)
    with pytest.raises(gg.GateError, match="parameters or products are not the same"):
        heads.run(options)


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
    resource = pytest.importorskip("resource", reason="this system has no limit of files to set")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))  # as on a full disk
    try:
        with pytest.raises(gg.GraphgenError, match=r"tokenizer\.json cannot be written"):
            demo.run(tmp_path, quick=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not [*tmp_path.iterdir()]
    with pytest.raises(gg.GateError, match=r"bits per byte held out; at most 2\.3 are wanted"):
        demo.run(tmp_path, quick=True)
    assert (tmp_path / "decoder.fused.onnx").exists()


@pytest.mark.parametrize("package", ["tokenizers", "matplotlib"])
def test_the_demo_asks_for_a_package_before_the_training(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    demo: Any = importlib.import_module("demo")
    monkeypatch.setattr(demo, "find_spec", lambda name: None if name == package else name)
    with pytest.raises(gg.GraphgenError, match=rf"needs {package}; .*graphgen-onnx\[demo\]"):
        demo.run(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_training_at_once_needs_the_causal_mask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is missing: install the extra [examples]")
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr("graphgen.models.published.decoder.cached_mask", lambda *_, **__: None)
    monkeypatch.setattr(sys, "argv", ["parallel.py", "--quick", "-o", str(tmp_path)])
    with pytest.raises(SystemExit, match="3"):
        runpy.run_path(str(EXAMPLES / "parallel.py"), run_name="__main__")
    assert "of the gradient" in capsys.readouterr().err


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
