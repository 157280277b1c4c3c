"""Public functions refuse arguments of other kinds than they declare, at the user's own line."""

import inspect
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphgen as gg
from graphgen.errors import GraphgenError

HERE = re.escape(Path(__file__).name)
X = gg.float32[2]
MODEL = gg.build(gg.ops.softmax, x=X)
Call = Callable[[], object]


@pytest.mark.parametrize(
    "call, problem",
    [
        (lambda: gg.build(3, x=X), "build: module is 3; it must be a function"),
        (lambda: gg.build(gg.ops.softmax, seed=-1, x=X), ""),
        (lambda: gg.build(gg.nn.Linear(2, 2), seed="a", x=X), "seed is 'a'; it must be an int"),
        (lambda: gg.build(gg.nn.Linear(2, 2), seed=-1, x=X), "seed is -1; it must be from 0"),
        (lambda: gg.build(max, x=X), "build: max called with x: no signature found"),
        (lambda: gg.Session(MODEL, optimize="no"), "optimize is 'no'; it must be True or False"),
        (
            lambda: gg.Session(MODEL, outputs=(name for name in ["output"])),
            "Session: outputs is <generator .*; it must be a list of texts or None",
        ),
        (lambda: gg.Session(MODEL, outputs="output"), "outputs is 'output'; it must be a list of"),
        (lambda: gg.Session(MODEL, options={3: "a"}), "it must be a dictionary of texts or None"),
        (lambda: gg.Session(MODEL, thread=1), "did you mean 'threads'"),
        (lambda: gg.Session(MODEL).bind([X]), "Session.bind: inputs is .*it must be a dictionary"),
        (lambda: gg.Session(MODEL).end_profiling(), "it does not profile, or no longer"),
        (lambda: gg.load(None), "load: path is None; it must be a path"),
        (lambda: gg.load("nothing.onnx"), "cannot be read: No such file"),
        (lambda: gg.export("m.onnx", MODEL), "export: path is Model main, opset 23; it must be a"),
        (lambda: gg.optimize(MODEL, target=["cpu"]), "it must be 'cpu', 'cuda', 'webgpu' or 'off"),
        (lambda: gg.optimize(MODEL, verify="no"), "verify is 'no'; it must be True, False or a f"),
        (lambda: gg.optimize(MODEL, passes="clean"), "passes is 'clean'; it must be a list of te"),
        (
            lambda: gg.optimize(MODEL, expect={"gelu": "1"}),
            "expect.*gelu.* is .1.; it must be an",
        ),
        (lambda: gg.explain(MODEL, "clean", stop_after=1.5), "explain: stop_after is 1.5; it must"),
        (lambda: gg.grad(MODEL, wrt="x"), "grad: wrt is 'x'; it must be a list of texts or None"),
        (lambda: gg.AdamW(betas=0.9), "AdamW: betas is 0.9; it must be a list of floats"),
        (lambda: gg.AdamW(lr=0.1), "AdamW: got an unexpected keyword argument 'lr'"),
        (lambda: gg.Group(["a"]), "Group: pattern is .'a'.; it must be a text"),
        (lambda: gg.Loss("mse", factor="x"), "factor is 'x'; it must be a float"),
        (lambda: gg.LoRA("a", seed=-1), "LoRA: seed is -1; it must be from 0"),
        (lambda: gg.artifacts(MODEL, "art", optimizer=gg.AdamW), "it must be AdamW(...), SGD"),
        (lambda: gg.artifacts(MODEL, "art", outputs="output"), "outputs is 'output'; it must be a"),
        (lambda: gg.artifacts(MODEL, "art", z_loss=None), "z_loss is None; it must be a float"),
        (lambda: gg.Trainer("art", seed=1.5), "Trainer: seed is 1.5; it must be an int"),
        (lambda: gg.Trainer("art", schedule=0.1), "schedule is 0.1; it must be a function or None"),
        (lambda: gg.Trainer("art", seed=True), "Trainer: seed is True; it must be an int"),
        (lambda: gg.schedule.cosine("1e-3", warmup=1, steps=2), "rate is '1e-3'; it must be a f"),
        (
            lambda: gg.generate(MODEL, [[1]], seed="a"),
            "generate: seed is 'a'; it must be an int or None",
        ),
    ],
)
def test_an_argument_of_another_kind_is_one_error(call: Call, problem: str) -> None:
    if not problem:  # a function has no weights
        call()
        return
    with pytest.raises(GraphgenError, match=problem.replace("(...)", r"\(\.\.\.\)")) as refused:
        call()
    assert re.search(rf" \({HERE}:\d+\)$", str(refused.value))


def test_kinds_that_stand_for_others_are_taken() -> None:
    """Tuples for lists, lists for tuples, numbers of numpy, numbers for texts of the runtime."""
    best = gg.optimize(MODEL, stop_after=3, passes=("clean",), expect={})
    assert gg.Session(best, optimize=np.bool_(False), outputs=("output",))(x=[1, 1])[0].sum() == 1
    assert gg.Session(best, options={"intra_op_num_threads": 2}).plan.threads == 2
    assert gg.AdamW(betas=[0.5, 1 / 2]).betas == [0.5, 0.5]
    warmup = gg.schedule.cosine(np.float32(0.5), warmup=np.int64(1), steps=np.int64(2))
    assert repr(warmup) == "cosine(0.5, warmup=1, steps=2, final=0.0)"
    assert gg.build(gg.ops.softmax, seed=np.int64(1), x=X)
    loss = gg.build(lambda x: gg.ops.reduce_sum(x, keepdims=False), x=X)
    assert gg.grad(loss, wrt={"x": 1}).graph.outputs[-1].name == "x_grad"
    with pytest.raises(GraphgenError, match=r"steps is np.float64\(2.5\); it must be an int"):
        gg.schedule.cosine(1.0, warmup=1, steps=np.float64(2.5))


@pytest.mark.parametrize("name", sorted({*gg.__all__} - {"nn", "ops", "schedule", "Tensor"}))
def test_every_public_function_checks(name: str) -> None:
    public: Any = getattr(gg, name)
    if isinstance(public, type) and not issubclass(public, Exception | Warning):
        public = public.__init__
    if inspect.isfunction(public) and name != "Adapter":  # which is made by its class methods
        assert public.__code__.co_name == "wrapper"


def test_modules_and_models_are_pickled() -> None:
    """For other processes; the same weights come back."""
    module = gg.nn.FeedForward(4, 8)
    gg.nn.initialize(module, seed=0)
    x = np.ones((1, 4), np.float32)
    again = pickle.loads(pickle.dumps(module))
    np.testing.assert_array_equal(again(x), module(x))
    model = gg.build(module, x=gg.float32["batch", 4])
    [y] = gg.Session(pickle.loads(pickle.dumps(model)))(x=x)
    np.testing.assert_array_equal(y, gg.Session(model)(x=x)[0])


def test_a_graph_that_was_broken_by_hand_is_one_error() -> None:
    model = gg.build(gg.nn.Linear(2, 2), x=X)
    model.graph.inputs.clear()
    with pytest.raises(GraphgenError, match="the graph main is not valid"):
        gg.optimize(model)
