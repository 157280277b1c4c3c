"""What objects show at a prompt and in notebooks: a screen at most, and never an error."""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from small_models import block

import graphgen as gg
from graphgen import nn, ops
from graphgen.display import LINES, WIDTH, fitted
from graphgen.export.checkpoint import Checkpoint
from graphgen.export.prepared import Prepared
from graphgen.generation import Generation, Generator
from graphgen.generation.options import Options
from graphgen.laboratory import notebook, page
from graphgen.laboratory.bisect import Bisection, Step
from graphgen.laboratory.diff import diff
from graphgen.laboratory.inspection import inspect
from graphgen.laboratory.remarks import explain
from graphgen.laboratory.rows import Comparison, Figures, Row
from graphgen.match import Site
from graphgen.model import Model
from graphgen.models import find
from graphgen.models.published.config import Config
from graphgen.models.published.decoder import CausalLM
from graphgen.models.published.named import specification
from graphgen.nn.module import Module, TensorSpec, zeros
from graphgen.quantize import quantize
from graphgen.runtime import Session
from graphgen.train.data import Dataset
from graphgen.train.parallel import Processes
from graphgen.train.run import History
from graphgen.value import Size, Value

BAD = "\x1b[31m<script>alert('x')</script>\r\n\u202e\ud800 & \"y\""
"""A name that clears screens, runs scripts, turns text around and cannot be encoded."""


@pytest.fixture(scope="module")
def model() -> Any:
    return block()


@pytest.fixture(scope="module")
def best(model: ir.Model) -> Any:
    return gg.optimize(model, runtime="1.23")


def renamed(model: ir.Model) -> ir.Model:
    """The model with hostile names wherever a file may have them."""
    model = model.clone()
    model.graph.name = BAD
    model.graph.opset_imports[BAD] = 1
    for i, value in enumerate([*model.graph.inputs, *model.graph.outputs]):
        value.name = f"{i}{BAD}"
    node = model.graph[0]
    node.name, node.op_type, node.domain = BAD, BAD, BAD
    return model


def without_shapes(model: ir.Model) -> ir.Model:
    """The model as in a file that says nothing of types, with a weight that has no content."""
    model = model.clone()
    for node in model.graph:
        for value in node.outputs:
            value.type = value.shape = value.name = None
    for value in model.graph.inputs:
        value.shape = None
    next(iter(model.graph.initializers.values())).const_value = None
    return model


def unread(model: ir.Model) -> ir.Model:
    """The model with weights that cannot be read."""

    def fail() -> Any:
        raise AssertionError("a weight was read")

    model = model.clone()
    for name, value in model.graph.initializers.items():
        array = value.const_value
        assert array is not None
        if array.size > 8:  # the page shows what smaller ones hold
            value.const_value = ir.LazyTensor(fail, dtype=array.dtype, shape=array.shape, name=name)
    return model


def long(model: ir.Model) -> ir.Model:
    """The model with very many inputs and outputs."""
    model = model.clone()
    for i in range(3000):
        model.graph.inputs.append(ir.val(f"past.{i}", ir.DataType.FLOAT, [f"size{i}"] * 9))
        model.graph.outputs.append(model.graph.outputs[0])
    return model


def session(name: str, folder: Path) -> Session:
    return Session(gg.export(block(), folder / name))


OBJECTS: dict[str, Callable[[Any, Path], Any]] = {
    "a dtype": lambda best, _: gg.bool_,
    "the type of an argument": lambda best, _: gg.float16["batch", "past + seq", 64],
    "a value": lambda best, _: recorded(lambda x: x),
    "a result": lambda best, _: recorded(lambda x: x[0] + 1.0),
    "a value with a hostile name": lambda best, _: Value(ir.val(BAD, shape=[BAD])),
    "a value of many dimensions": lambda best, _: Value(ir.val("x", shape=["size"] * 99)),
    "a size": lambda best, _: recorded(lambda x: x.shape[1]),
    "a calculated size": lambda best, _: recorded(lambda x: x.shape[0] * x.shape[1] - 1),
    "a size with a hostile name": lambda best, _: Size(ir.SymbolicDim(BAD)),
    "a size of many others": lambda best, _: Size(ir.SymbolicDim(" + ".join(["size"] * 99))),
    "a parameter": lambda best, _: nn.Parameter((4096, 4096), initialize=zeros),
    "a module": lambda best, _: find("decoder").create(layers=9),
    "a model": lambda best, _: best.model,
    "hostile names": lambda best, _: renamed(best.model),
    "no shapes": lambda best, _: without_shapes(best.model),
    "many inputs": lambda best, _: long(best.model),
    "weights that are not read": lambda best, _: unread(best.model),
    "what optimize returns": lambda best, _: best,
    "its report": lambda best, _: best.report,
    "a pass": lambda best, _: best.report.passes[0],
    "a site": lambda best, _: Site("missed", BAD, BAD),
    "a comparison": lambda best, _: comparison(),
    "a comparison that is interrupted": lambda best, _: replace(
        comparison(), model=BAD, complete=False, dims={"": {BAD: 1}}
    ),
    "very many rows": lambda best, _: replace(comparison(), rows=comparison().rows * 50),
    "a row": lambda best, _: comparison()["pipeline"],
    "a row that failed": lambda best, _: Row(name=BAD, problem=BAD),
    "a row's decode step": lambda best, _: Figures(flops=1),
    "a diff": lambda best, _: diff(best.model, renamed(best.model)),
    "a change": lambda best, _: diff(best.model, renamed(best.model)).changes[0],
    "an explanation": lambda best, _: explain(block(), "fuse_norm"),
    "an inspection": lambda best, _: inspect(best.model, {"batch": 1, "seq": 2}),
    "a critical path": lambda best, _: inspect(best.model, {"batch": 1, "seq": 2}).critical_path,
    "an inspection without sizes": lambda best, _: inspect(best.model),
    "a bisection": lambda best, _: Bisection(1e-4, step(), guilty=[step()] * 99, complete=True),
    "a step": lambda best, _: step(),
    "what quantize reports": lambda best, _: quantize(best, "int8", calibration=())[1],
    "a quantized layer": lambda best, _: quantize(best, "int8", calibration=())[1].layers[0],
    "a session": lambda best, path: session("m.onnx", path),
    "a session on bytes": lambda best, _: gg.Session(best.model),
    "a session with a hostile name": lambda best, path: session("\x1b[31m<b>.onnx", path),
    "a bound run": lambda best, path: session("m.onnx", path).bind(
        {"x": np.zeros((1, 2, 16), np.float32)}
    ),
    "a plan": lambda best, path: session("m.onnx", path).plan,
    "what is trained": lambda best, path: gg.artifacts(best, path / "a", loss="mse"),
    "what is trained, as prepared": lambda best, _: Prepared.of(best, loss="mse"),
    "a checkpoint": lambda best, path: checkpoint(path),
    "its moments": lambda best, path: checkpoint(path).optimizer,
    "a trainer": lambda best, path: trained(path)[0],
    "a trainer's history": lambda best, path: trained(path)[1],
    "no history": lambda best, _: History(),
    "data": lambda best, _: Dataset({BAD: np.zeros((9, 2)), "b": [np.zeros(3)] * 9}, 3),
    "processes": lambda best, _: Processes(),
    "a generator": lambda best, _: Generator(decoder()),
    "what it generates": lambda best, _: generated(),
    "how it generates": lambda best, _: Options(temperature=1.0, suppress_tokens=range(9999)),
    "a decoder": lambda best, _: Generator(decoder()).decoder,
    "the type of an input": lambda best, path: session("m.onnx", path).inputs["x"],
}
"""What users see at a prompt, from the result of `optimize` and a folder."""


def recorded(of: Callable[[Any], Any]) -> Any:
    """What a line of a module gives while it is recorded."""
    found = []

    def module(x: gg.Tensor) -> gg.Tensor:
        found.append(of(x))
        return ops.relu(x)

    gg.build(module, x=gg.float32["batch", "past + seq", 8])
    return found[0]


@cache
def comparison() -> Comparison:
    dims = {"batch": 1, "seq": 2}
    return gg.compare(block(), dims=dims, kinds=["cumulative"], seconds=0, threads=1)


@cache
def trained(folder: Path) -> tuple[gg.Trainer, History]:
    gg.artifacts(block(), folder / "art", loss="mse")
    trainer = gg.Trainer(folder / "art", threads=1)
    batch = {"x": np.ones((1, 2, 16), np.float32), "labels": np.ones((1, 2, 16), np.float32)}
    return trainer, trainer.fit([batch] * 30, checkpoint=folder / "run", progress=False)


def checkpoint(folder: Path) -> Checkpoint:
    trained(folder)
    return Checkpoint.load(folder / "run" / "checkpoint")


@cache
def decoder() -> Any:
    sizes = {
        "vocab_size": 12,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 16,
    }
    module = CausalLM(specification(Config({"model_type": "llama", **sizes})))
    return gg.optimize(gg.build(module, **module.inputs()))


def generated() -> Generation:
    found = gg.generate(decoder(), [1, 2, 3], max_new_tokens=4)
    next(found)
    return found


def step() -> Step:
    return Step(BAD, 1, 1, number=3, where=BAD, reason="no reason " * 99, alike=[*range(1000)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


@pytest.fixture(scope="module", params=OBJECTS)
def shown(request: pytest.FixtureRequest, best: Any, folder: Path) -> Any:
    return OBJECTS[request.param](best, folder)


class Page(HTMLParser):
    """Which elements a text has, and what stands between them; a page in a frame is read, too."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[str] = []
        self.text = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_repr_is_at_most_a_screen(shown: Any) -> None:
    text = repr(shown)
    plain = isinstance(shown, tuple | type(gg.int64) | TensorSpec | Size)
    assert plain or type(shown).__name__ in text.partition("\n")[0]
    assert "incomplete" not in text
    assert len(text.splitlines()) == text.count("\n") + 1 <= LINES
    assert all(len(line) <= WIDTH and line.isprintable() for line in text.split("\n"))
    assert text == repr(shown)


def test_what_is_half_made_says_so(shown: Any) -> None:
    """An `__init__` that fails leaves such an object to debuggers and tracebacks."""
    kind = type(shown)
    if isinstance(shown, tuple | list):
        return  # it is made in one piece, or empty at first
    half = kind.__new__(kind)
    assert repr(half).count("\n") < 2
    assert getattr(half, "_repr_html_", lambda: None)() is None
    if not isinstance(shown, Processes | Figures | Options | Module):
        assert repr(half) == f"<{kind.__name__}, incomplete>"


def test_html_shows_names_as_text(shown: Any) -> None:
    if not hasattr(shown, "_repr_html_"):
        return
    html = shown._repr_html_()
    html.encode()
    page = Page(html)
    allowed = "pre iframe p div table caption tr th td".split()
    assert set(page.elements) <= {*allowed} and page.elements
    assert "<script>" not in html and "\x1b" not in html


def test_a_model_in_a_few_lines(best: Any) -> None:
    assert repr(best).split("\n") == [
        f"Optimized for cpu (onnxruntime {best.report.runtime}), 54 -> 19 nodes",
        "  fused      1 of 1 Attention, 1 of 1 Gelu, 2 of 2 LayerNormalization",
        "Model main, opset 23",
        "  inputs     x: float[batch, seq, 16]",
        "  outputs    output: float[batch, seq, 16]",
        "  nodes      19: 8 Add, 6 MatMul, 2 LayerNormalization, 1 Attention, 1 Gelu and 1 more",
        "  weights    8,920 bytes in 17 tensors; 2,224 parameters",
    ]


def test_without_the_layout_the_lines_say_what_is_missing(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "find_spec", lambda name: None)
    told = Page(model._repr_html_())
    assert told.elements == ["pre", "p"]
    assert told.text.startswith(repr(model)) and "graphgen-onnx[html]" in told.text


def test_a_graph_that_is_too_large_is_not_drawn(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notebook, "_NODES", 53)
    told = Page(model._repr_html_())
    assert told.elements == ["pre", "p"]
    assert told.text.endswith("54 nodes are too many to draw in a notebook.")


def test_a_report_is_its_table(best: Any) -> None:
    head, columns, *rows = repr(best.report).split("\n")
    assert head == f"Report of optimize for {best.report.summary()}"
    assert columns.split() == "pass fired missed refused nodes before after ms".split()
    assert [row.split()[0] for row in rows] == [done.name for done in best.report.passes]
    page = Page(best.report._repr_html_())
    assert page.elements.count("tr") == 1 + len(rows)
    assert "fuse_attention" in page.text


def test_models_stay_models(model: Any, best: Any, tmp_path: Any) -> None:
    """What onnx_ir does to an `ir.Model` it does to these; the repr goes along where it can."""
    path = gg.export(best, tmp_path / "m.onnx")
    for made in (model, best.model, gg.load(path), best.model.clone(), copy.copy(model)):
        assert type(made) is Model and isinstance(made, ir.Model)
    assert gg.optimize(ir.load(path)).model.clone().graph is not best.model.graph
    assert len(str(model)) > 5000, "print shows the graph"


def test_lines_in_the_middle_are_left_out() -> None:
    lines = fitted([f"line {i}" for i in range(1000)])
    assert len(lines) == LINES
    assert lines[-3:] == ["line 17", "... 981 more lines", "line 999"]
    assert fitted(["a\nb\x1b[2J"]) == ["a\\nb\\x1b[2J"]
    assert fitted(["x" * 1000]) == [f"{'x' * (WIDTH - 3)}..."]


@pytest.mark.parametrize("name", "float64 float32 float16 bfloat16 int64 int32 bool_".split())
def test_dtypes_and_their_sizes_are_shown_as_one_writes_them(name: str) -> None:
    dtype = getattr(gg, name)
    assert repr(dtype) == f"graphgen.{name}"
    spec = dtype["batch", "past + seq", 64]
    assert repr(spec) == f'graphgen.{name}["batch", "past + seq", 64]'
    for one in (dtype, spec, dtype["n"], dtype[()], dtype[3]):
        assert repr(eval(repr(one), {"graphgen": gg})) == repr(one)


def test_values_and_sizes_in_an_expression() -> None:
    assert recorded(lambda x: repr([x, x[0] > 0, x.shape, x.shape[1] - 1])) == (
        "[Value(x: float[batch, past + seq, 8]), Value(bool[past + seq, 8]), "
        "(batch, past + seq, 8), past + seq - 1]"
    )


def test_a_trainer_shows_which_settings_are_not_the_default(tmp_path: Path) -> None:
    optimizer = gg.AdamW(betas=(0.9, 0.95), clip_norm=1.0)
    gg.artifacts(block(), tmp_path, loss="mse", optimizer=optimizer)
    assert "optimizer  AdamW(betas=(0.9, 0.95), clip_norm=1.0)\n" in repr(gg.Trainer(tmp_path))


def test_a_parameter_shows_no_numbers() -> None:
    linear = nn.Linear(2, 3)
    assert repr(linear.weight) == "Parameter(float32[2, 3], no value yet)"
    nn.initialize(linear)
    assert repr(linear.weight) == "Parameter(float32[2, 3])"
