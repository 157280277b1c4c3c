"""Random graphs: whatever a pass does to one, it computes what it did.

Each graph is built, exported, loaded and optimized for every target, with the invariants and the
checker after every pass; then both graphs run in ONNX Runtime, its own optimizations off, and in
float64, on plain inputs and edge cases. GRAPHS=2000 (`make fuzz`) draws new ones every time.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from devices_here import CUDA
from fuzzing import again, count, examples
from hypothesis import given, note, reject
from onnx_ir.convenience import replace_all_uses_with
from random_graphs import KINDS, MODES, Graph, graphs
from small_models import ROUNDING, U, is_cut_off

import graphgen as gg
from graphgen import ops
from graphgen.errors import GraphgenError
from graphgen.export.write import to_bytes
from graphgen.invariants import verify
from graphgen.measure.reference import evaluate
from graphgen.passes import Optimized, optimize
from graphgen.passes.verify import _differ, _rms
from graphgen.runtime import Session
from graphgen.targets import target

GRAPHS = count(50)
SHARES = {"any": 0.12, "attention": 0.34, "norm": 0.12, "chains": 0.14}
"""How many of the graphs are of a kind; the others share the rest."""


def known(name: str) -> bool:
    try:
        return bool(target(name))
    except GraphgenError:
        return False


TARGETS = [name for name in ("cpu", "cuda", "official") if known(name)]
FUSED = {("fuse_attention", "fired"), ("fuse_softmax", "fired")}
CAVEAT = "masked entirely"


def share(kind: str) -> int:
    rest = (1 - sum(SHARES.values())) / (len(KINDS) - len(SHARES))
    return round(GRAPHS * SHARES.get(kind, rest))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # infinities are welcome
@pytest.mark.parametrize("kind", KINDS)
def test_random_graphs_keep_their_meaning(
    kind: str, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    told: Counter[str] = Counter()

    @examples(share(kind))
    @given(graphs(kind))
    def run(graph: Graph) -> None:
        note(f"again with: {again(f'tests/test_fuzz.py -k {kind}', pytestconfig)}")
        check(graph, tmp_path / "graph.onnx", told)

    run()
    print(f"{kind}: {', '.join(f'{n} {what}' for what, n in told.most_common())}")
    if kind in ("attention", "norm", "activation", "softmax"):
        assert told[f"fuse_{kind}"] > 0.1 * told["graphs"], "little was fused: little is tested"
    assert told["compared"] > told["graphs"] and told["in the runtime"] > told["graphs"]


def check(graph: Graph, path: Path, told: Counter[str]) -> None:
    try:
        gg.export(graph.model, path)
    except GraphgenError as error:  # what inference lets pass and the checker does not
        assert "is not valid ONNX" in str(error)
        reject()
    try:
        loaded = gg.load(path)
    except GraphgenError:  # what was recorded without sizes, and does not run with any
        with pytest.raises(GraphgenError):
            Session(path, optimize=False)(graph.feeds("plain"))
        reject()
    told["graphs"] += 1
    modes = list(dict.fromkeys(["plain", "small", MODES[graph.seed % len(MODES)]]))
    trials = [trial for mode in modes if (trial := Trial.of(loaded, path, graph.feeds(mode), mode))]
    checked: set[bytes] = set()  # most passes leave a graph that another one has left
    for name in TARGETS:
        masked: list[ir.Model] = []

        def after(done: str, model: ir.Model, masked: list[ir.Model] = masked) -> None:
            verify(model, done)
            if (data := ir.to_proto(model).SerializeToString(deterministic=True)) not in checked:
                to_bytes(model)  # asks the checker
                checked.add(data)
            if done == "fuse_softmax":
                masked.append(model.clone())

        best = optimize(loaded, target=name, after_each=after, verify=graph.seed % 8 == 7)
        note(f"# {name}\n{remarks(best)}")
        sites = [(p.name, site) for p in best.report.passes for site in p.sites]
        told.update({done for done, site in sites if site.status == "fired"})
        wrong = [site.reason for _, site in sites if site.rolled_back]
        wrong = [reason for reason in wrong if not reason.startswith("could not be verified")]
        assert not wrong, f"{name}: verified: {wrong}"
        reasons = [site.reason for done, site in sites if (done, site.status) in FUSED]
        undefined = any(CAVEAT in reason or reason == "LogSoftmax" for reason in reasons)
        session = open_session(to_bytes(best), name)
        for trial in trials:
            hidden = bool(reasons) and hides_rows(masked[0], trial.feeds)
            if hidden and undefined:
                told["undefined"] += 1  # what becomes of such rows is not said
            else:
                trial.compare(best.model, session, name, told, wide=not hidden)


def remarks(best: Optimized) -> str:
    return "\n".join(
        f"{site.status} {p.name} at {site.where}: {site.reason}"
        for p in best.report.passes
        for site in p.sites
    )


def open_session(data: bytes, target: str = "cpu") -> ort.InferenceSession | None:
    """A session with the runtime's own optimizations off, or None where it has no kernels.

    What is made for CUDA runs there if there is a GPU, and on the CPU if not.
    """
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    cuda = [("CUDAExecutionProvider", {"use_tf32": "0"})]
    providers = [*(cuda if target == "cuda" and not CUDA.lacks else []), "CPUExecutionProvider"]
    try:
        return ort.InferenceSession(data, options, providers=providers)
    except Exception as error:  # each has its own class
        note(f"no session: {error}")
        return None


class Trial:
    """One set of inputs and what the input graph makes of it."""

    def __init__(self, feeds: dict[str, Any], mode: str, exact: list[Any], old: list[Any] | None):
        self.feeds, self.mode, self.exact, self.old = feeds, mode, exact, old
        self.noise: list[float] = []

    @classmethod
    def of(cls, model: ir.Model, path: Path, feeds: dict[str, Any], mode: str) -> "Trial | None":
        try:
            exact = evaluate(model, feeds)
        except GraphgenError:
            return None  # sizes that do not go together
        session, old = open_session(path.read_bytes()), None
        if any(is_cut_off(n.op_type, filter(None, n.inputs[1:])) for n in model.graph.all_nodes()):
            session = None
        if session is not None:
            try:
                old = session.run(None, feeds)
            except Exception as error:
                note(f"{mode}: the runtime fails on the input graph: {error}")
        trial = cls(feeds, mode, exact, old)
        trial.noise = list(trial._noise(model))
        for i, y in enumerate(old or []):
            if any(n.op_type == "Clip" for n in model.graph) and np.isinf(_distance(exact[i], y)):
                trial.noise[i] = np.inf  # without a limit, it is the dtype's lowest number
            trial._agree(f"output {i} of the input graph", y, exact[i].astype(y.dtype), i)
            trial.noise[i] = max(trial.noise[i], _distance(exact[i], y))
        return trial

    def _noise(self, model: ir.Model) -> Iterator[float]:
        """What rounding alone does to each output: with other rounding it would differ as much."""
        rng = np.random.default_rng(0)
        dtypes = {x.dtype for x in self.feeds.values() if x.dtype.kind == "f"} or {np.dtype("f4")}
        half = np.dtype(np.float16) in dtypes
        dtype: Any = np.float16 if half else min(dtypes, key=lambda d: d.itemsize)
        shaken = {
            name: (x * (1 + np.finfo(x.dtype).eps * rng.choice([-1, 1], x.shape))).astype(x.dtype)
            if x.dtype.kind == "f"
            else x
            for name, x in self.feeds.items()
        }
        try:
            others = [evaluate(model, f, dtype=dtype) for f in (self.feeds, shaken)]
        except GraphgenError:  # rounding makes another choice, whose sizes do not go together
            yield from [np.inf] * len(self.exact)
            return
        if any(node.op_type in KERNELS for node in model.graph):
            others.append(evaluate(with_errors_of_kernels(model, self.feeds), self.feeds))
        for i, y in enumerate(self.exact):
            yield max(_distance(y, other[i]) for other in others)

    def _agree(self, what: str, new: Any, old: Any, i: int) -> None:
        noise = self.noise[i]
        if np.isinf(noise):
            return  # rounding alone makes it infinite, or NaN
        assert new.shape == old.shape, f"{what}, {self.mode}: {new.shape}, was {old.shape}"
        problem = _differ(old, new.astype(old.dtype))
        if problem and old.dtype.kind == "f" and _distance(old, new) <= 10 * noise:
            return
        if problem and old.dtype.kind == "f" and _distance(self.exact[i], new) <= ROUNDING:
            return  # it is the input graph that rounds: x - mean(x) of equal x, for one
        assert not problem, f"{what}, {self.mode}: {problem}; rounding alone makes {noise:.1e}"

    def compare(
        self,
        model: ir.Model,
        session: ort.InferenceSession | None,
        target: str,
        told: Counter[str],
        *,
        wide: bool,
    ) -> None:
        """Raise AssertionError where the fused model makes something else of it.

        In float64 not, without `wide`: -1e9 and a score are -1e9 in float32 only.
        """
        told["compared"] += 1
        told["ill-conditioned"] += max(self.noise) > 1e-5
        exact = evaluate(model, self.feeds) if wide else self.exact
        for i, (old, new) in enumerate(zip(self.exact, exact, strict=True)):
            wanted = np.float32 if old.dtype.kind == "f" else old.dtype
            self._agree(
                f"{target}: output {i} in float64", new.astype(wanted), old.astype(wanted), i
            )
        if self.old is None:
            return
        assert session is not None or target != "cpu", "the fused graph does not load"
        if session is None:
            return
        told["in the runtime"] += 1
        for i, (old, new) in enumerate(zip(self.old, session.run(None, self.feeds), strict=True)):
            self._agree(f"{target}: output {i}", new, old, i)


def _distance(a: Any, b: Any) -> float:
    """Relative RMS, infinite where one is finite and the other is not."""
    if a.dtype.kind != "f":
        return 0.0
    finite = np.isfinite(a)
    with np.errstate(all="ignore"):
        if not np.array_equal(finite, np.isfinite(b)):
            return float("inf")
        return _rms(np.where(finite, a, 0), np.where(finite, b, 0))


def _of_1(y: Any, x: Any) -> Any:
    return 1.0


def _of_x(y: Any, x: Any) -> Any:
    return np.abs(x)


def _of_deviation(y: Any, x: Any, scale: Any, shift: Any) -> Any:
    axes = tuple(range(2, x.ndim))
    scale = scale.reshape(-1, *(1 for _ in axes))
    return np.abs(x * scale) / np.sqrt(x.var(axes, keepdims=True) + 1e-5)


KERNELS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("RNN", "LSTM", "GRU"), lambda y, *inputs: y != 0),
    **dict.fromkeys(("Sigmoid", "Elu", "Selu", "Celu"), _of_1),
    **dict.fromkeys(("QuickGelu", "Gelu", "Mish"), _of_x),
    "LogSoftmax": lambda y, x: np.max(np.abs(x), initial=0.0),
    "InstanceNormalization": _of_deviation,
    **dict.fromkeys(("Atan", "Asin", "Acos", "Sin", "Cos", "Log"), lambda y, x: np.abs(y)),
}
"""Kernels of the runtime whose errors are not relative to each result, and to what they are.

Its tanh in an RNN, as if it were 2 σ(2x) - 1, is off by some 2 u of 1, not of its result: 1.2 u at
1e-6, 1.9 u at 0.1, 3 u at 1, and exact at 0. σ(x) is off by 2.5 u of 1, so x σ(x) by as much of x;
and so are other differences and products with what has a larger one (measured with 1.32). An
instance norm's x - mean is off by as much as x, and is divided by a deviation that may be nearly 0.
The last row's take the ends of a tensor by another formula: equal arguments have unequal results.
So small results have a large error, and what divides by them a larger one.
"""


def with_errors_of_kernels(model: ir.Model, feeds: dict[str, Any]) -> ir.Model:
    """A copy in which results of `KERNELS` are off by as much as in the runtime."""
    copy, rng = model.clone(), np.random.default_rng(0)
    for node in [node for node in copy.graph if node.op_type in KERNELS]:
        for y in [y for y in node.outputs if y.uses() or y.is_graph_output()]:
            given = [x for x in node.inputs if x is not None]
            array, *arrays = evaluate(copy, feeds, values=[y, *given])
            size = np.nan_to_num(KERNELS[node.op_type](array, *arrays), posinf=0.0)
            error = 3 * U * rng.choice([-1, 1], array.shape) * size
            off = ir.Value(name=f"{y.name}_error", const_value=ir.tensor(np.float32(error)))
            off.shape, off.type = ir.Shape(error.shape), ir.TensorType(ir.DataType.FLOAT)
            copy.graph.register_initializer(off)
            total = ir.node("Add", [y, off])
            replace_all_uses_with(y, total.outputs[0], replace_graph_outputs=True)
            total.replace_input_with(0, y)
            copy.graph.insert_after(node, total)
    return copy


def hides_rows(model: ir.Model, feeds: dict[str, Any]) -> bool:
    """Whether a softmax is over nothing but the lowest numbers, or infinite ones.

    Without its own maximum subtracted, the logarithm of such a sum is infinite.
    """
    copy = model.clone()
    found = [n for n in copy.graph if n.op_type in ("Softmax", "LogSoftmax")]
    copy.graph.outputs[:] = [n.inputs[0] for n in found]
    pairs = zip(found, evaluate(copy, feeds), strict=True)
    axes = [(n.attributes.get_int("axis", -1), x) for n, x in pairs]
    return any(not (np.max(x, axis=axis) > -5e8).all() for axis, x in axes if x.size)


def test_the_runtime_s_error_in_an_rnn_is_known_and_passed_on(tmp_path: Path) -> None:
    def small(x: Any, w: Any, r: Any) -> Any:
        y, _ = ops.rnn(x, w, r, hidden_size=3)
        return {"y": y, "inverse": 1.0 / y, "exp": ops.exp(x)}

    x, w, r = gg.float32[4, 50, 2], gg.float32[1, 3, 2], gg.float32[1, 3, 3]
    model = gg.build(small, x=x, w=w, r=r)
    path, rng = tmp_path / "rnn.onnx", np.random.default_rng(0)
    gg.export(model, path)
    scales = {"x": 1e-4, "w": 0.5, "r": 0.2}
    feeds = {
        str(x.name): (rng.standard_normal(x.shape.numpy()) * scales[str(x.name)]).astype("f4")
        for x in model.graph.inputs
    }
    trial = Trial.of(gg.load(path), path, feeds, "small")  # fails if it differs by more
    assert trial is not None
    y, inverse, exp = trial.noise
    assert 1e-4 < y < 1e-2 < inverse and exp < 1e-6
    assert trial.old is not None and _distance(trial.exact[0], trial.old[0]) < y
