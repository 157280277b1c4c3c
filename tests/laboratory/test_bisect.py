"""A planted fault is found to the exact site, and what is sound is left alone."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import onnx_ir as ir
import pytest
from small_models import relative_rms, run_plain, vary

import graphgen as gg
from graphgen import nn, ops, passes
from graphgen.commands import main
from graphgen.edit import infer_model
from graphgen.errors import GraphgenError
from graphgen.graph import count_operators
from graphgen.laboratory import bisect as laboratory
from graphgen.laboratory.bisect import Bisection, bisect
from graphgen.match import Engine, Rewrite
from graphgen.measure import accuracy
from graphgen.measure.feeds import at_sizes, invent
from graphgen.measure.reference import evaluate
from graphgen.op import TABLE
from graphgen.passes import optimize
from graphgen.places import where_is
from graphgen.recognize.pattern import Pattern
from graphgen.value import adopt

LAYERS, GUILTY, FEATURES = 4, 2, 16
DIMS = {"batch": 2, "seq": 5}
QUICK = ["fuse_norm", "fuse_activation"]
SCHEMA = Path(__file__).resolve().parents[2] / "docs" / "bisect.schema.json"


class Layer(nn.Module):
    """x + gelu(W norm(x / 500)): the variance that the norm sees is near its epsilon."""

    def __init__(self) -> None:
        self.norm, self.up = nn.LayerNorm(FEATURES), nn.Linear(FEATURES, FEATURES)

    def __call__(self, x: Any) -> Any:
        return x + ops.gelu(self.up(self.norm(x * 0.002)))


class Layers(nn.Module):
    def __init__(self, count: int) -> None:
        self.layers = [Layer() for _ in range(count)]

    def __call__(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


def layers(count: int) -> ir.Model:
    x = gg.float32["batch", "seq", FEATURES]
    return gg.build(vary(Layers(count)), primitives=True, weights=None, x=x)


@pytest.fixture(scope="module")
def model() -> ir.Model:
    return layers(LAYERS)


@pytest.fixture(scope="module")
def file(model: ir.Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gg.export(model, tmp_path_factory.mktemp("model") / "layers.onnx")


Wrong = Callable[[Any], Any]


def plant(monkeypatch: pytest.MonkeyPatch, name: str, layers: set[int], wrong: Wrong) -> None:
    """Let a pattern's matches within some layers be what `wrong` makes of the right result."""
    found = Pattern.match

    def match_(self: Pattern, node: ir.Node, *above: Any) -> Rewrite | None:
        rewrite = found(self, node, *above)
        layer = re.match(r"layers\.(\d+)", where_is(node))
        if rewrite is not None and self.op.name == name and layer and int(layer[1]) in layers:
            rewrite.results = wrong(rewrite.results)
        return rewrite

    monkeypatch.setattr(Pattern, "match", match_)


def ten_times(y: Any) -> Any:
    """The norm that made y, its epsilon ten times as large."""
    node = y.producer()
    epsilon = 10 * node.attributes["epsilon"].as_float()
    return ops.layer_normalization(*map(adopt, node.inputs), epsilon=epsilon)


def of_twice_as_much(y: Any) -> Any:
    """The Gelu that made y, of its operand beside itself; half of it is taken."""
    x = adopt(y.producer().inputs[0])
    return ops.slice_(ops.gelu(ops.concat(x, x, axis=-1)), [0], [FEATURES], [2])


def number_of(model: ir.Model, name: str, layer: int, **options: Any) -> int:
    """The number of a fusion of a layer, in the report of `optimize`."""
    report = optimize(model, **options).report
    [done] = [p for p in report.passes if p.name == name]
    [number] = [s.number for s in done.sites if s.where.startswith(f"layers.{layer}") and s.number]
    return number


def only(found: Bisection) -> laboratory.Step:
    [step] = found.guilty
    return step


def run_script(folder: str | None) -> str:
    """What run.py prints; it knows nothing of us."""
    assert folder is not None
    script = Path(folder, "run.py")
    assert "graphgen" not in script.read_text()
    command = [sys.executable, str(script)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_of_what_is_sound_nothing_is_found(model: ir.Model, tmp_path: Path) -> None:
    found = bisect(model, tolerance=1e-5, dims=DIMS, output=tmp_path / "none")
    assert found.guilty == [] and found.undecided == []
    assert "no step is found guilty" in str(found)
    assert found.probes == 2  # the reference and the whole
    assert not (tmp_path / "none").exists()


def test_a_pass_that_changes_nothing_leaves_the_state_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A copy and a session of each would take long where a model is large."""
    clone, copies = ir.Model.clone, list[ir.Model]()
    monkeypatch.setattr(ir.Model, "clone", lambda model: copies.append(model) or clone(model))
    found = bisect(gg.build(ops.tanh, x=gg.float32[FEATURES]), tolerance=1e-5)
    assert found.guilty == [] and found.steps > 10
    assert found.probes == 1 and len(copies) < 10


def test_a_wrong_epsilon_in_one_layer_of_twelve_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model, guilty = layers(12), 7
    plant(monkeypatch, "LayerNormalization", {guilty}, ten_times)
    found = bisect(model, tolerance=1e-5, dims=DIMS, output=tmp_path)
    step = only(found)
    assert (step.name, step.where) == ("fuse_norm", f"layers.{guilty}.norm")
    assert step.number == number_of(model, "fuse_norm", guilty)
    assert (step.alike, step.compared) == ([], 11)
    assert found.probes < 2 + np.log2(found.steps) + 1 + 2 * 12 + 1
    # The states around it, by another way.
    x = np.random.default_rng(0).standard_normal((2, 5, FEATURES)).astype(np.float32)
    wanted = run_plain(model, {"x": x})[0]
    assert step.number is not None
    around = [optimize(model, stop_after=step.number - n).model for n in (1, 0)]
    errors = [relative_rms(wanted, run_plain(m, {"x": x})[0]) for m in around]
    assert errors[0] < 1e-5 < errors[1]
    # On random inputs of variance 1 the site would err by 5e-5.
    told = re.search(r"relative RMS difference (\S+)", run_script(step.folder))
    assert told is not None
    assert float(told[1]) == pytest.approx(step.figures["error_alone"], rel=0.01)
    assert step.figures["error_alone"] > 0.05
    assert sorted(p.name for p in Path(str(step.folder)).iterdir()) == [
        *("after.onnx", "before.onnx", "run.py", "x0.npy")
    ]


def test_errors_are_against_float64_where_that_can_be(
    model: ir.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else against the unfused graph, which then has none; the report says which."""
    feeds = invent(at_sizes(model, DIMS))
    exact, plain = evaluate(model, feeds), run_plain(model, feeds)
    told = {"tolerance": 1e-5, "dims": DIMS, "passes": QUICK}
    found = bisect(model, **told)
    assert found.reference == found.to_json()["reference"] == "float64"
    assert str(found).splitlines()[0].endswith("; errors against float64")
    own = found.whole.figures["error_before"]
    assert own == pytest.approx(relative_rms(exact[0], plain[0]), rel=1e-6) and own > 0
    with pytest.raises(
        GraphgenError,
        match=r"unchanged model has an error of .* against float64, above the limit 1e-09",
    ):
        bisect(model, **told | {"tolerance": 1e-9})
    monkeypatch.setattr(accuracy, "_EXACT", 0)
    found = bisect(model, **told)
    assert found.reference == "the unfused graph with the runtime's optimizations off"
    assert found.whole.figures["error_before"] == 0 < found.whole.figures["error_after"]
    other = gg.compare(model, dims=DIMS, kinds=[], seconds=0.01, threads=1)
    assert other.reference == found.reference


def test_of_several_the_others_are_told(model: ir.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    guilty = {0, GUILTY, LAYERS - 1}
    plant(monkeypatch, "LayerNormalization", guilty, ten_times)
    step = only(bisect(model, tolerance=1e-5, dims=DIMS, passes=QUICK))
    assert step.compared == LAYERS - 1
    numbers = {number_of(model, "fuse_norm", layer, passes=QUICK) for layer in guilty}
    assert {step.number, *step.alike} == numbers
    assert step.number == min(numbers)


@pytest.mark.parametrize("hidden", [False, True])
def test_a_pass_without_sites_is_a_step(
    hidden: bool, model: ir.Model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The first `clean` negates the output. What the second does again, no halving can see."""
    clean = passes.clean

    def negates(model: ir.Model) -> Any:
        last = model.graph.outputs[0].producer()
        assert last is not None

        def negative(node: ir.Node) -> Rewrite | None:
            y = TABLE["", node.op_type](*map(adopt, node.inputs))
            return Rewrite(-y, node.inputs, "wrong") if node is last else None

        if hidden or "LayerNormalization" not in count_operators(model):
            rules = {last.op_type: [negative]}
            assert Engine(context=infer_model(model)).run("wrong", model, rules).count("fired") == 1
        return replace(clean(model), reason="negated")

    monkeypatch.setattr(passes, "clean", negates)
    some = ["canonicalize", "clean", "fuse_norm", "clean"]
    found = bisect(model, tolerance=1e-5, dims=DIMS, passes=some, output=tmp_path)
    if hidden:
        assert found.guilty == []
        return
    step = only(found)
    assert (step.name, step.index, step.where) == ("clean", 1, "the whole model")
    report = optimize(model, passes=some[:2]).report
    assert [step.number] == [site.number for site in report.passes[1].sites]
    assert (step.figures["error_before"], step.figures["error_after"]) == (
        pytest.approx(0, abs=1e-6),
        pytest.approx(2, rel=1e-6),
    )
    assert "relative RMS difference 2.00e+00" in run_script(step.folder)


def test_a_state_that_does_not_run_is_found(
    model: ir.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_range(y: Any) -> Any:
        row = ops.cast(ops.reduce_max(y, keepdims=0) * 0.0 + 99.0, to=ir.DataType.INT64)
        return y + ops.gather(np.zeros(3, np.float32), row)

    plant(monkeypatch, "Gelu", {GUILTY}, out_of_range)
    found = bisect(model, tolerance=1e-5, dims=DIMS, passes=QUICK)
    step = only(found)
    assert step.number == number_of(model, "fuse_activation", GUILTY, passes=QUICK)
    assert "it does not run" in step.reason and "Gather" in step.reason
    assert found.to_json()["guilty"][0]["figures"]["error_after"] is None


FAST: dict[str, Any] = {
    "passes": QUICK,
    "dims": {"batch": 8, "seq": 256},
    "slower_than": 0.5,
    "seconds": 0.05,
}


@pytest.mark.exhaustive
def test_a_slow_site_is_found(
    model: ir.Model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert bisect(model, **FAST).guilty == []
    plant(monkeypatch, "Gelu", {GUILTY}, of_twice_as_much)
    step = only(bisect(model, **FAST, output=tmp_path))
    assert (step.name, step.where) == ("fuse_activation", f"layers.{GUILTY}")
    assert step.alike == [] and step.figures["ratio_low"] > 1.5
    told = re.search(r"before (\S+) ms, after (\S+) ms", run_script(step.folder))
    assert told is not None and float(told[2]) > 1.5 * float(told[1])


def test_equal_parts_are_measured_once(model: ir.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, "Gelu", {1, GUILTY}, of_twice_as_much)
    measured = []
    measure = laboratory.measure

    def counted(runs: Any, seconds: float) -> Any:
        measured.append(seconds)
        return measure(runs, seconds)

    monkeypatch.setattr(laboratory, "measure", counted)
    step = only(bisect(model, **FAST))
    assert len(step.alike) == step.compared == 1
    assert len(measured) < 3 * 4 + 2  # norms, Gelus, the slow ones twice, the whole


def test_a_site_of_weights_alone_is_measured() -> None:
    class Turned(nn.Linear):
        def __call__(self, x: Any) -> Any:
            return x + ops.swap_last(ops.swap_last(ops.exp(self.weight)))

    options = {"passes": ["canonicalize"], "seconds": 0.01}
    found = bisect(gg.build(Turned(2, 3), x=gg.float32[2, 3]), slower_than=99.0, **options)
    assert found.rewrites > 0 and found.guilty == [] and found.undecided == []


def test_what_noise_hides_is_undecided(model: ir.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, asked = np.random.default_rng(0), []

    def noise(runs: Any, seconds: float) -> Any:
        asked.append(seconds)
        return np.stack([np.ones(50), rng.uniform(0.5, 2.5, 50)], axis=1)

    monkeypatch.setattr(laboratory, "measure", noise)
    found = bisect(model, **FAST)
    assert found.guilty == [] and len(found.undecided) == 3  # norms, Gelus, the whole
    assert asked == [0.05, 0.1, 0.2] * 3
    assert "undecided: rewrite" in str(found)


def test_the_command(
    file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["bisect", str(file), "--tolerance", "1e-5", "--dim", "batch=2", "--dim", "seq=5"]
    command += ["-o", str(tmp_path / "found"), "--json", "--passes", *QUICK]
    schema = json.loads(SCHEMA.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    assert main(command) == 0
    told = json.loads(capsys.readouterr().out)
    jsonschema.validate(told, schema)
    assert told["guilty"] == []

    plant(monkeypatch, "Gelu", {1, GUILTY}, ops.gelu)
    assert main(command) == 3
    out, err = capsys.readouterr()
    jsonschema.validate(json.loads(out), schema)
    [step] = json.loads(out)["guilty"]
    assert step["alike"] and Path(step["folder"]).parent == tmp_path / "found"
    assert err.splitlines()[-1].startswith(f"graphgen: rewrite {step['number']}, fuse_activation")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ([], "either a tolerance or slower_than"),
        (["--tolerance", "1e-5", "--slower-than", "3%"], "either a tolerance or slower_than"),
        (["--tolerance", "-1"], "either a tolerance or slower_than"),
        (["--slower-than", "3 %%"], "'3 %%' is not a share of at least 0, such as 0.03 or 3%"),
        (["--tolerance", "1e-9"], "against float64, above the limit 1e-09; give a larger"),
        (["--tolerance", "1e-5"], "give --dim batch=... --dim seq=..."),
        (["--tolerance", "1e-5", "--dim", "length=2"], "'length' is in no input"),
        (["--tolerance", "1e-5", "--input", "none.npz"], "none.npz cannot be read"),
        (["--tolerance", "1e-5", "--target", "npu"], "target is 'npu'; choose"),
    ],
)
def test_bad_input_is_one_line(
    options: list[str], told: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dims = [] if "give --dim" in told else ["--dim", "batch=2", "--dim", "seq=5"]
    assert main(["bisect", str(file), *dims, *options]) == 2
    err = capsys.readouterr().err
    assert told in err and len(err.strip().splitlines()) == 1


@pytest.mark.share(3)
@pytest.mark.parametrize("probes", [0, 1, 3, 8])
def test_an_interrupt_leaves_the_steps_still_suspected(
    probes: int,
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The guilty one is among them, between two errors that are within and beyond the limit."""
    plant(monkeypatch, "LayerNormalization", {1, GUILTY}, ten_times)
    guilty, left = only(bisect(gg.load(file), tolerance=1e-5, dims=DIMS)), [0]
    opened = laboratory._Search.open

    def open_(self: Any, *given: Any, **options: Any) -> Any:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        return opened(self, *given, **options)

    monkeypatch.setattr(laboratory._Search, "open", open_)
    command = ["bisect", str(file), "--tolerance", "1e-5", "--dim", "batch=2", "--dim", "seq=5"]
    command += ["-o", str(tmp_path / "found")]
    for form in ("--json", "--debug"):
        left[0] = probes
        assert main([*command, form]) == 130
        out, err = capsys.readouterr()
        assert err.splitlines()[-1] == "graphgen: interrupted"
        if form == "--json":
            told = json.loads(out)
    jsonschema.validate(told, json.loads(SCHEMA.read_text()))
    assert told["probes"] == probes and not told["complete"] and not told["guilty"]
    assert "INTERRUPTED, not complete" in out and "no step is found" not in out
    assert not (tmp_path / "found").exists()
    suspected = told["suspected"]
    if probes == 0:
        assert suspected == []
        return
    assert guilty.number in [step["number"] for step in suspected]
    assert f"{len(suspected)} steps are still suspected" in out
    if probes == 1:
        assert len(suspected) == told["steps"]
        return
    assert len(suspected) <= np.ceil(told["steps"] / 2 ** (probes - 2))
    assert suspected[0]["figures"]["error_before"] < 1e-5
    assert suspected[-1]["figures"]["error_after"] > 1e-5
    for step in (suspected[0], suspected[-1]):
        assert f"{step['name']} at {step['where']}: {step['reason']}\n  error " in out


def test_an_interrupt_leaves_what_is_known_to_be_slow(
    model: ir.Model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls = []

    def slow_then_stop(runs: Any, seconds: float) -> Any:
        calls.append(seconds)
        if len(calls) > 2:  # the first site is measured twice
            raise KeyboardInterrupt
        return np.stack([np.ones(50), np.full(50, 9.0)], axis=1)

    monkeypatch.setattr(laboratory, "measure", slow_then_stop)
    found = bisect(model, **FAST, output=tmp_path)
    step = only(found)
    assert not found.complete and Path(str(step.folder), "run.py").exists()
    assert len(found.suspected) + 1 + len(step.alike) == found.rewrites > 2
    order = [(s.index, s.applied) for s in found.suspected]
    assert order == sorted(order)
    assert {s.number for s in found.suspected}.isdisjoint({step.number, *step.alike})
    assert "still suspected" in str(found)


def test_arrays_say_how_large_a_size_is(file: Path) -> None:
    feeds = {"x": np.zeros((2, 5, FEATURES), np.float32)}
    for given in (file, gg.load(file), gg.optimize(gg.load(file), passes=["clean"])):
        found = bisect(given, tolerance=1e-5, feeds=feeds, passes=["fuse_norm"])
        assert found.whole.figures["error_after"] < 1e-5
    with pytest.raises(GraphgenError, match=r"for x is of shape \[2, 5, 16\], and seq is 4; give"):
        bisect(file, tolerance=1e-5, feeds=feeds, dims={"seq": 4})
    with pytest.raises(GraphgenError, match="bisect: None is not a model; give what"):
        bisect(None, tolerance=1e-5)


def test_a_model_that_no_session_runs_is_told() -> None:
    fails = gg.build(lambda x: ops.gather(x, np.array([99])), x=gg.float32["n", 3])
    with pytest.raises(GraphgenError, match="the run failed"):
        bisect(fails, tolerance=1e-5, dims={"n": 2})
