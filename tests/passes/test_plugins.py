"""Passes of other distributions: found by name, run by the engine, and one error each."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from small_models import block

import graphgen as gg
from graphgen import commands, explain
from graphgen.errors import GraphgenError
from graphgen.match import Engine
from graphgen.passes import PIPELINE, optimize, pipeline

HEAD = "from graphgen import ops\nfrom graphgen.graph import produced_by\n"
HEAD += "from graphgen.match import Miss, Rewrite; from graphgen.record import adopt\n"
ABS = """
def once(node):
    inner = produced_by(node.inputs[0], "Abs")
    if inner is None:
        return Miss("its input is no Abs")
    return Rewrite(ops.abs(adopt(inner.inputs[0])), [inner.inputs[0]], "one of two")

def rules(target):
    return {"Abs": [once]}
"""
WRONG = ABS.replace("ops.abs(adopt(inner.inputs[0]))", "ops.neg(adopt(inner.inputs[0]))")


@pytest.fixture
def offer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Install a distribution with one module and its entry points."""

    def offer(body: str, *names: str, module: str = "plug", value: str = "rules") -> None:
        (tmp_path / f"{module}.py").write_text(HEAD + body)
        folder = tmp_path / f"{module}-1.0.dist-info"
        folder.mkdir(exist_ok=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        lines = "".join(f"{name} = {module}:{value}\n" for name in names)
        (folder / "entry_points.txt").write_text(f"[graphgen.passes]\n{lines}")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, module, raising=False)

    return offer


def twice():
    abs_, neg = gg.ops.abs, gg.ops.neg
    return gg.build(lambda x: {"y": abs_(abs_(x)), "z": abs_(neg(x))}, x=gg.float32["b", 4])


def test_it_runs_like_one_of_ours(offer) -> None:
    offer(ABS, "once")
    best = optimize(twice(), with_passes=["once"], verify=True)
    [done] = [p for p in best.report.passes if p.name == "once"]
    assert best.report.ops_after == {"Abs": 2, "Neg": 1}
    assert [(s.status, s.reason, s.number) for s in done.sites] == [
        ("fired", "one of two", 1),
        ("missed", "its input is no Abs", None),
    ]
    unchanged = optimize(twice(), with_passes=["once"], stop_after=0)
    assert unchanged.report.ops_after == {"Abs": 3, "Neg": 1}
    names = [p.name for p in best.report.passes]
    assert names.index("once") == names.index("fuse_softmax") - 1
    assert {p["name"] for p in best.report.to_json()["passes"]} == {*PIPELINE, "once"}
    for name in ("once", "plug:rules"):
        found = explain(twice(), name)
        assert (found.name, found.tried) == (name, {"Abs": 3})
        assert [s.status for s in found.sites] == ["fired", "missed"]


def test_it_is_loaded_only_when_named(offer) -> None:
    offer("raise RuntimeError('loaded')\n", "once")
    optimize(twice())
    with pytest.raises(GraphgenError, match="loaded"):
        optimize(twice(), with_passes=["once"])


@pytest.mark.wrong_rewrites
def test_a_wrong_one_is_rolled_back(offer) -> None:
    offer(WRONG, "once")
    best = optimize(twice(), with_passes=["once"], verify=True)
    [done] = [p for p in best.report.passes if p.name == "once"]
    assert best.report.ops_after == {"Abs": 3, "Neg": 1}
    assert [s.rolled_back for s in done.sites] == [False, True, False]


def test_it_stands_where_it_is_told() -> None:
    assert pipeline(()) == PIPELINE
    late = pipeline(["a", "b@legalize", "c"])
    assert late.index("a") + 2 == late.index("c") + 1 == late.index("fuse_softmax")
    assert late.index("b") + 1 == late.index("legalize")
    assert pipeline(["a"], ["clean"]) == ("clean", "a")
    with pytest.raises(GraphgenError, match="'a@clear': no pass 'clear' runs, but"):
        pipeline(["a@clear"])
    with pytest.raises(GraphgenError, match="'clean' is the name of a built-in pass; one of your"):
        pipeline(["clean"])


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("import nowhere\n", r"'plug:rules' cannot be loaded: ModuleNotFoundError: No module"),
        ("import nowhere\n", r"'nowhere' \(.*plug.py:4\); --debug shows all of it"),
        ("rules = 3\n", r"it failed: TypeError: 'int' object is not callable"),
        ("x = 1\n", r"cannot be loaded: AttributeError: module 'plug' has no attribute 'rules'"),
        ("def rules(target): return [1]\n", r"it failed: TypeError: gave \[1\], wanted rules by"),
        (
            "def rules(target): return {'Abs': [3]}\n",
            r"it failed at .*: TypeError: 'int' object is not",
        ),
        ("def rules(): return {}\n", r"it failed: TypeError: rules\(\) takes 0 positional"),
        (ABS.replace("if inner is None", "if 1 / 0"), r"failed at \w*Abs_\d \(Abs\): ZeroDivision"),
        (ABS.replace("if inner is None", "if 1 / 0"), r"division by zero \(.*plug.py:7\)"),
        (ABS.replace("Miss(", "("), r"at \w*Abs_\d \(Abs\): TypeError: gave 'its input is no"),
        (
            ABS.replace("ops.abs(adopt(inner.inputs[0]))", "(ops.neg(node.inputs[0]),) * 2"),
            r"it failed at \w*Abs_\d \(Abs\): ValueError",
        ),
        (
            "from onnx_ir import Value\n"
            "def edit(node): node.replace_input_with(0, Value(name='w'))\n"
            "def rules(target): return {'Abs': [edit]}\n",
            r"at \w*Abs_\d \(Abs\): TypeError: a rule has edited this node, wanted a Rewrite",
        ),
        (
            "def edit(node): node.op_type = 'Neg'\ndef rules(target): return {'Abs': [edit]}\n",
            r"at \w*Abs_\d \(Neg\): TypeError: a rule has edited this node, wanted a Rewrite",
        ),
        (
            "from onnx_ir import AttrInt64, Value\n"
            "def edit(node): node.inputs[0].producer() and node.inputs[0].producer()"
            ".attributes.add(AttrInt64('axis', 1))\n"
            "def rules(target): return {'Abs': [edit]}\n",
            r"at \w*(Abs|Neg)_\d \((Abs|Neg)\): TypeError: a rule has edited this node",
        ),
        ("import sys\nsys.exit(0)\n", r"cannot be loaded: SystemExit: 0 \(.*plug.py:5\)"),
        (
            "def rules(target): raise SystemExit\n",
            r"'once': it failed: SystemExit:  \(.*plug.py:4\)",
        ),
    ],
)
def test_what_is_wrong_with_it_is_one_error(offer, body: str, told: str) -> None:
    offer(body, "once")
    with pytest.raises(GraphgenError, match=told) as error:
        optimize(twice(), with_passes=["once"])
    assert "once" in str(error.value)


def test_names_that_are_not_known_or_not_one(offer) -> None:
    offer(ABS, "once")
    with pytest.raises(
        GraphgenError, match=r"no pass 'onse'; there are .*, once; did you mean 'once'\?"
    ):
        optimize(twice(), with_passes=["onse"])
    with pytest.raises(GraphgenError, match="'no_module:f' cannot be loaded: ModuleNotFound"):
        optimize(twice(), with_passes=["no_module:f"])
    offer(ABS, "once", module="other")
    with pytest.raises(GraphgenError, match="other:rules and plug:rules both offer it; name one"):
        optimize(twice(), with_passes=["once"])
    assert optimize(twice(), with_passes=["other:rules"]).report.ops_after["Abs"] == 2


def test_on_the_command_line(offer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    offer(ABS, "once")
    source, out = str(tmp_path / "a.onnx"), str(tmp_path / "b.onnx")
    gg.export(twice(), source)
    assert commands.main(["optimize", source, "-o", out, "--with", "once@legalize"]) == 0
    assert "once" in capsys.readouterr().out
    assert gg.load(out).graph.num_nodes() == 3
    assert commands.main(["explain", source, "--pass", "once"]) == 0
    assert "fired, 1: one of two" in capsys.readouterr().out
    some = ["--dim", "b=2", "--seconds", "0.01"]
    assert commands.main(["compare", source, "--with", "once", "--kinds", "only", *some]) == 0
    [row] = (r for r in capsys.readouterr().out.splitlines() if r.startswith("only once "))
    assert re.search(r"e[+-]\d+ +3 +1 +1 ", row)  # after the error: nodes, fired, missed
    for command in (
        ["optimize", source, "-o", out],
        ["explain", source, "--pass", "once"],
        ["compare", source, *some],
        ["bisect", source, "--tolerance", "1e-5", *some[:2]],
    ):
        assert commands.main([*command, "--with", "clean"]) == 2
        told = capsys.readouterr().err
        assert told.startswith("graphgen: with_passes: 'clean' is the name of a"), command


def test_bisect_finds_a_wrong_one(
    offer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    offer(WRONG, "once")
    source = str(tmp_path / "a.onnx")
    gg.export(twice(), source)
    command = ["bisect", source, "--tolerance", "1e-5", "--dim", "b=2", "-o", str(tmp_path / "out")]
    assert commands.main(command) == 0
    assert commands.main([*command, "--with", "plug:rules@legalize"]) == 3
    assert "graphgen: rewrite 1, plug:rules at" in capsys.readouterr().err
    [folder] = (tmp_path / "out").iterdir()
    assert folder.name == "1-plug_rules" and (folder / "run.py").exists()  # a name for any system


def test_rules_may_look_at_operators_of_other_domains() -> None:
    model = gg.optimize(block(activation="silu"), passes=PIPELINE[:6]).model
    seen: list[str] = []
    rule = lambda node: seen.append(node.op_type)  # noqa: E731
    Engine(context=gg.edit.infer_model(model)).run("a", model, {"com.microsoft::QuickGelu": [rule]})
    assert set(seen) <= {"QuickGelu"} and seen
