"""Random graphs: their gradients are central differences, also as artifacts train them.

Each float output is weighted and summed up to a loss; every second input becomes a weight.
GRAPHS=2000 (`make fuzz`) draws new graphs instead of the same.
"""

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from fuzzing import again, count, examples
from hypothesis import given, note, reject
from random_graphs import KINDS, Graph, graphs

import graphgen as gg
from graphgen import ops
from graphgen.autodiff import grad
from graphgen.edit import register_constants
from graphgen.errors import GraphgenError
from graphgen.export.write import to_bytes
from graphgen.graph import is_float
from graphgen.measure.reference import evaluate
from graphgen.passes.legalize import runnable
from graphgen.record import recording
from graphgen.value import adopt

GRAPHS = count(60)
LARGEST = 1e5  # beyond, as for masks, a step is lost in rounding
STEPS = {"Ceil", "Floor", "Round", "Sign", "Mod", "StopGradient"}
"""Operators whose gradient is not that of what they compute."""

ROOTS = {"Div", "Sqrt", "Pow", "ReduceL2", "LpNormalization", "ReduceMin", "Reciprocal", "Log"}
"""Operators that may be infinite inside, or have an infinite gradient, as at 0."""

ROUGH = {"Sigmoid"}
"""Operators whose kernel is off by more than rounding: onnxruntime's is never below 1.5e-8."""

REFUSED = (
    r"quantized numbers|known before the run|must be known|not finite in float32|has no rule"
    r"|needs opset|has no samples|looks up rows|depends on none|no float input"
    r"|dimension size (is )?known|which the runtime packs"
)
"""What may be refused, with the reason."""

HOW: tuple[dict[str, Any], ...] = (
    {"profile": "stock"}, {"profile": "official"},
    {"profile": "stock", "recompute": "full"}, {"profile": "stock", "recompute": "auto"},
)  # fmt: skip


@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::graphgen.errors.GraphgenWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_central_differences(
    kind: str, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    told: Counter[str] = Counter()

    @examples(-(-GRAPHS // len(KINDS)))
    @given(graphs(kind))
    def run(graph: Graph) -> None:
        note(f"again with: {again(f'tests/test_fuzz_gradients.py -k {kind}', pytestconfig)}")
        check(graph, tmp_path, told)

    run()
    print(f"{kind}: {', '.join(f'{n} {what}' for what, n in told.most_common())}")
    assert told["trained"] > told["graphs"] / 10


def check(graph: Graph, folder: Path, told: Counter[str]) -> None:
    feeds = {name: _apart(x) for name, x in graph.feeds("plain").items()}
    try:
        model = with_loss(gg.load(gg.export(graph.model, folder / "graph.onnx")))
        before = evaluate(model, feeds)[0]
    except GraphgenError:  # sizes, or dtypes, that do not go together
        reject()
    told["graphs"] += 1
    names = {node.op_type for node in model.graph}
    constants = (v.const_value for v in model.graph.initializers.values())
    arrays = [*feeds.values(), before, *(x.numpy() for x in constants if x is not None)]
    if names & STEPS or not all(np.all(np.abs(x) < LARGEST) for x in arrays if x.dtype.kind == "f"):
        told["not smooth"] += 1
        return
    wrt = [str(x.name) for x in model.graph.inputs if x.dtype == ir.DataType.FLOAT]
    try:
        slope, wrt = _slope(model, wrt)
        exact = dict(zip(wrt, evaluate(slope, feeds)[1:], strict=True))
    except GraphgenError as error:
        _expect_refusal(error, told)
        return
    if not all(np.isfinite(g).all() for g in exact.values()):
        assert names & ROOTS, "a gradient is not finite"
        told["infinite"] += 1
        return
    told["compared"] += compared(model, feeds, exact)
    noise = _noise(slope, feeds, exact, rough=bool(names & ROUGH))
    trained(model, feeds, exact, noise, folder / "art", told)


def _apart(x: Any) -> Any:
    """Equal numbers made different: a maximum of these has no gradient."""
    if x.dtype.kind != "f":
        return x
    return np.asarray(x + 1e-3 * np.random.default_rng(9).standard_normal(x.shape), x.dtype)


def with_loss(model: ir.Model) -> ir.Model:
    """The sum of all float outputs, weighted with sines."""
    graph, loss = model.graph, None
    with recording() as tape:
        for value in filter(is_float, graph.outputs):
            y = ops.reshape(adopt(value), [-1])
            weights = ops.sin(ops.cast(ops.arange(ops.dim(y, 0)), to=value.dtype) + 1.0)
            part = ops.reduce_sum(y * weights, [0], keepdims=0)
            loss = part if loss is None else loss + part
        if loss is None:
            reject()
        graph.extend(tape.nodes)
        tape.kept = True
    register_constants(graph, tape.constants.values())
    loss.value.name = "loss"
    graph.outputs[:] = [loss.value]
    return model


def _slope(model: ir.Model, wrt: list[str]) -> tuple[ir.Model, list[str]]:
    """Gradients with respect to what the loss depends on."""
    while True:
        try:
            return grad(model, wrt=wrt), wrt
        except GraphgenError as error:
            unused = str(error).partition("does not depend on ")[2].partition(" (")[0]
            if not unused:
                raise
            wrt = [name for name in wrt if name not in unused.split(", ")]


def _noise(
    slope: ir.Model, feeds: dict[str, Any], exact: dict[str, Any], *, rough: bool
) -> dict[str, float]:
    """How far gradients in float32 are from the exact ones: NumPy's, and the runtime's if rough."""
    runs = [evaluate(slope, feeds, dtype=np.float32)]
    if rough:
        session = gg.Session(to_bytes(runnable(slope)), optimize=False)
        runs.append(session({name: x for name, x in feeds.items() if name in session.inputs}))
    pairs = (zip(exact.values(), run[1:], strict=True) for run in runs)
    errors = ([np.abs(x - y).max(initial=0.0) for x, y in pair] for pair in pairs)
    return dict(zip(exact, map(max, *errors, [0.0] * len(exact)), strict=True))


def compared(model: ir.Model, feeds: dict[str, Any], gradients: dict[str, Any]) -> bool:
    """Whether the loss is smooth around `feeds`: then its slope in one direction is right."""
    rng, h = np.random.default_rng(4), 1e-6
    d = {name: rng.standard_normal(feeds[name].shape) for name in gradients}
    at = {name: x.astype(np.float64) if name in d else x for name, x in feeds.items()}
    steps = [{**at, **{k: at[k] + s * h * d[k] for k in d}} for s in (-1, 0, 1)]
    low, middle, high = (float(evaluate(model, step)[0]) for step in steps)
    size = sum(np.abs(g * d[k]).sum() for k, g in gradients.items())
    if not np.isfinite(low + high) or abs(low + high - 2 * middle) > 1e-4 * h * size:
        return False
    got = sum((g * d[k]).sum() for k, g in gradients.items())
    wanted = (high - low) / (2 * h)
    assert abs(got - wanted) <= 1e-5 * size + 1e-9 * max(abs(middle), 1) / h, (
        f"the slope is {got}, and should be {wanted}"
    )
    return True


def trained(
    model: ir.Model,
    feeds: dict[str, Any],
    exact: dict[str, Any],
    noise: dict[str, float],
    folder: Path,
    told: Counter[str],
) -> None:
    """Every second input as a weight: the gradients of a training session are the exact ones."""
    weights = [name for name in exact if feeds[name].size][::2]
    for value in [x for x in model.graph.inputs if x.name in weights]:
        value.const_value = ir.tensor(feeds[str(value.name)])
        value.shape = ir.Shape(value.const_value.shape)
        model.graph.inputs.remove(value)
        model.graph.register_initializer(value)
    if not weights:
        return
    shutil.rmtree(folder, ignore_errors=True)
    how = HOW[told["trained"] % len(HOW)]
    try:
        gg.artifacts(model, folder, loss="loss", trainable=weights, optimizer=gg.SGD(), **how)
        session = gg.TrainingSession(folder, threads=1)
        session.train_step({name: x for name, x in feeds.items() if name in session.inputs})
    except GraphgenError as error:
        _expect_refusal(error, told)
        return
    told["trained"] += 1
    for name, found in session.gradients.items():
        wanted = exact[name]
        bound = 1e-4 * np.abs(wanted).max() + 1e-5 + 20 * noise[name]
        assert not np.abs(found - wanted).max() > bound, f"{how}: the gradient of {name} is {found}"


def _expect_refusal(error: GraphgenError, told: Counter[str]) -> None:
    with pytest.raises(GraphgenError, match=REFUSED):
        raise error
    told["refused"] += 1
