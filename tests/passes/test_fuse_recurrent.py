"""A Scan or Loop over the cell of an LSTM or GRU becomes that operator, nothing else does."""

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from small_models import run_plain

import graphgen as gg
from graphgen import ops
from graphgen.export.read import load
from graphgen.export.write import to_bytes
from graphgen.graph import count_operators
from graphgen.measure.reference import evaluate
from graphgen.ops.layout import split
from graphgen.passes import optimize

D, H, RNG = 3, 4, np.random.default_rng(0)


def drawn(*shape: int) -> Any:
    return RNG.normal(0, 1.5, shape).astype(np.float32)


W, R, B = drawn(D, 4 * H), drawn(H, 4 * H), drawn(4 * H)
W3, R3, B3, C3 = drawn(D, 3 * H), drawn(H, 3 * H), drawn(3 * H), drawn(3 * H)
BOTH = np.concatenate([W, R])

Step = Callable[..., Any]


def lstm_step(h: Any, c: Any, x: Any) -> Any:
    """Gates i, f, g, o, as torch orders them; weights transposed, one bias."""
    i, f, g, o = split(ops.matmul(x, W) + ops.matmul(h, R) + B, num_outputs=4, axis=-1)
    c = ops.sigmoid(f) * c + ops.sigmoid(i) * ops.tanh(g)
    h = ops.sigmoid(o) * ops.tanh(c)
    return [h, c], [h]


def joined_step(h: Any, c: Any, x: Any) -> Any:
    """As TensorFlow multiplies x and h, joined; f has 1 added, and the gates are split after σ."""
    i, g, f, o = split(ops.matmul(ops.concat(x, h, axis=-1), BOTH) + B, num_outputs=4, axis=-1)
    s, t = split(ops.sigmoid(ops.concat(i, f + 1.0, axis=-1)), num_outputs=2, axis=-1)
    c = ops.tanh(g) * s + c * t
    h = ops.tanh(c) * ops.sigmoid(o)
    return [h, c], [h]


def gru_step(h: Any, x: Any, *, sign: float = 1.0) -> Any:
    """As torch: n + z (h - n), with the reset gate behind the product."""
    a, b = ops.matmul(x, W3) + B3, ops.matmul(h, R3) + C3
    (ar, az, an), (br, bz, bn) = (split(v, num_outputs=3, axis=-1) for v in (a, b))
    z = ops.sigmoid(az + bz)
    n = ops.tanh(an + ops.sigmoid(ar + br) * bn)
    h = (h - n) * z + sign * n
    return [h], [h]


def reset_step(h: Any, x: Any) -> Any:
    """As Cho et al.: the reset gate before the product."""
    z, s = split(
        ops.sigmoid(ops.matmul(x, W[:, : 2 * H]) + h @ R[:, : 2 * H]), num_outputs=2, axis=-1
    )
    g = ops.tanh(ops.matmul(x, W[:, 2 * H : 3 * H]) + (s * h) @ R[:, 2 * H : 3 * H])
    h = z * h + (1.0 - z) * g
    return [h], [h]


def rnn_step(h: Any, x: Any) -> Any:
    """Of which onnxruntime's operator loses small states."""
    h = ops.tanh(ops.matmul(x, W[:, :H]) + (h @ R[:, :H] + B[:H]))
    return [h], [h]


def wrong_sign(h: Any, x: Any) -> Any:
    return gru_step(h, x, sign=-1.0)


def same_gate(h: Any, c: Any, x: Any) -> Any:
    """One gate for what is kept and what is added."""
    i, _, g, o = split(ops.matmul(x, W) + ops.matmul(h, R) + B, num_outputs=4, axis=-1)
    c = ops.sigmoid(i) * c + ops.sigmoid(i) * ops.tanh(g)
    h = ops.sigmoid(o) * ops.tanh(c)
    return [h, c], [h]


def state_before(h: Any, x: Any) -> Any:
    """Which gives h as it was before the step."""
    [after], _ = gru_step(h, x)
    return [after], [h]


def old_state_in_the_output(h: Any, c: Any, x: Any) -> Any:
    """The output gate squashes c as it was before the step."""
    [_, after], _ = lstm_step(h, c, x)
    h = ops.sigmoid(ops.matmul(x, W[:, :H])) * ops.tanh(c)
    return [h, after], [h]


def one_gate_for_all(h: Any, x: Any) -> Any:
    """z is one number a row, for all of h."""
    z = ops.sigmoid(ops.matmul(x, W[:, :1]))
    g = ops.tanh(ops.matmul(x, W[:, :H]) + h @ R[:, :H])
    h = z * h + (1.0 - z) * g
    return [h], [h]


def no_states(x: Any) -> Any:
    return [], [ops.tanh(x)]


def many_gates(h: Any, x: Any) -> Any:
    """The sum of what 24 gates let through would have 2^24 terms."""
    for i in range(24):
        h = h * (1.0 - ops.sigmoid(ops.matmul(x, W[:, :H] + np.float32(i))))
    return [h], [h]


def many_nodes(h: Any, x: Any) -> Any:
    for i in range(500):
        h = h + np.full(H, i, np.float32)
    return [h], [h]


def many_states(*given: Any) -> Any:
    *states, x = given
    return [ops.tanh(ops.matmul(x, W[:, :H]) + h) for h in states], []


def nothing_of_the_state(h: Any, x: Any) -> Any:
    """A GRU whose product takes 0 h."""
    z = ops.sigmoid(ops.matmul(x, W[:, :H]))
    g = ops.tanh(ops.matmul(x, W[:, :H]) + (h * np.zeros(H, np.float32)) @ R[:, :H])
    h = z * h + (1.0 - z) * g
    return [h], [h]


def model_of(step: Step, states: int, b: Any = "b", t: Any = "t", **way: Any) -> Any:
    def body(x: Any, *given: Any) -> Any:
        last, ys = ops.scan(step, list(given), [x], **way)
        return (*last, *ys)

    x = gg.float32[(b, t, D) if way.get("axis") else (t, b, D)]
    given = {"x": x, **{"hcdefgijklmn"[i]: gg.float32[b, H] for i in range(states)}}
    return gg.build(lambda **values: body(*values.values()), **given)


@pytest.mark.parametrize(
    ("step", "name", "way"),
    [
        (lstm_step, "LSTM", {}),
        (lstm_step, "LSTM", {"reverse": True}),
        (joined_step, "LSTM", {"axis": 1}),
        (gru_step, "GRU", {}),
        (reset_step, "GRU", {"axis": 1, "reverse": True}),
        (state_before, "GRU", {}),
        (state_before, "GRU", {"axis": 1, "reverse": True}),
    ],
)
def test_a_scan_over_a_cell_is_its_operator(step: Step, name: str, way: dict[str, Any]) -> None:
    states = 2 if name == "LSTM" else 1
    model = model_of(step, states, **way)
    best = optimize(model, verify=True)
    found = count_operators(best.model)
    assert found[name] == found["If"] == 1 and "Scan" not in found
    for b, t in ((2, 5), (3, 1), (0, 3)):
        x = drawn(b, t, D) if way.get("axis") else drawn(t, b, D)
        feeds = [x, *(drawn(b, H) for _ in range(states))]
        named = dict(zip("xhc", feeds, strict=False))
        given, made = evaluate(model, named), gg.Session(best)(**named)
        for old, new in zip(given, made, strict=True):
            assert old.shape == new.shape and np.allclose(old, new, 1e-5, 2e-5)


def test_of_known_sizes_no_choice_is_left() -> None:
    best = optimize(model_of(gru_step, 1, b=2, t=7))
    assert {"GRU": 1}.items() <= count_operators(best.model).items()
    assert "If" not in count_operators(best.model)


@pytest.mark.share(2)
@pytest.mark.parametrize(
    ("step", "states"),
    [
        (rnn_step, 1),
        (wrong_sign, 1),
        (no_states, 0),
        (many_states, 12),
        (many_gates, 1),
        (many_nodes, 1),
        (nothing_of_the_state, 1),
        (same_gate, 2),
        (one_gate_for_all, 1),
        (old_state_in_the_output, 2),
    ],
)
def test_what_is_no_cell_stays(step: Step, states: int) -> None:
    found = count_operators(optimize(model_of(step, states)).model)
    assert found["Scan"] == 1 and not {"LSTM", "GRU", "RNN"} & found.keys()


GATHER = ["row = Gather (x, i)"]
BACKWARDS = ["last = Sub (n, one)", "at = Sub (last, i)", "row = Gather (x, at)"]
FROM_THE_END = ["at = Sub (minus, i)", "row = Gather (x, at)"]
CUT = [
    "at = Unsqueeze (i, zeros)",
    "end = Add (at, one)",
    "part = Slice (x, at, end, axes)",
    "row = Squeeze (part, axes)",
]
COUNT = ["sizes = Shape (x)", "n = Gather (sizes, zero)"]
ALWAYS = ["more = Identity (before)"]
WHILE: dict[str, Any] = {
    "row": ["next = Add (k, one)", "row = Gather (held, k)", "same = Identity (held)"],
    "count": [*COUNT, "start = Less (zero, n)"],
    "more": [
        "here = Less (next, n)",
        "at = Add (i, one)",
        "also = Less (at, n)",
        "more = And (here, also)",
    ],
    "trips": "far",
    "begins": "start",
    "extra": {"k": ("zero", "next"), "held": ("x", "same")},
}
COUNTED = {
    **WHILE,
    "extra": {"k": ("zero", "next")},
    "more": ["at = Add (i, one)", "more = Less (at, n)"],
}
DOUBLED = ["twice = Mul (k, two)", "next = Add (twice, one)"]
BY_DATA = [
    "largest = ReduceMax <keepdims = 0> (row)",
    "bound = CastLike (two, largest)",
    "more = Less (largest, bound)",
]


def loop_of(
    step: Step,
    states: int,
    row: list[str],
    *,
    axis: int = 0,
    count: list[str] = COUNT,
    more: list[str] = ALWAYS,
    trips: str = "n",
    begins: str = "",
    extra: dict[str, tuple[str, str]] | None = None,
    **sizes: Any,
) -> Any:
    """The Scan over a step as a Loop, with these nodes: row `i` of x, the count and whether on.

    Extra states come first: their names, what they start from, and what follows in a step.
    """
    model = onnx.load_from_string(to_bytes(model_of(step, states, axis=axis, **sizes)))
    graph, [scan] = model.graph, model.graph.node
    body = next(a.g for a in scan.attribute if a.name == "body")
    read, nodes = body.input.pop().name, list(map(onnx.parser.parse_node, [*row, *more]))
    inner = [*nodes, *body.node]
    for node in inner:
        node.input[:] = ["row" if name == read else name for name in node.input]
    scalars = {"i": TensorProto.INT64, "before": TensorProto.BOOL, "more": TensorProto.BOOL}
    i, before, on = (helper.make_tensor_value_info(k, v, []) for k, v in scalars.items())
    loop = helper.make_node("Loop", [trips, begins, *scan.input[:-1]], scan.output)
    inside = [i, before, *body.input], [on, *body.output]
    for name, (start, after) in (extra or {}).items():
        dtype = TensorProto.FLOAT if start == "x" else TensorProto.INT64
        inside[0].insert(2, helper.make_tensor_value_info(name, dtype, None))
        inside[1].insert(1, helper.make_tensor_value_info(after, dtype, None))
        loop.input.insert(2, start)
        loop.output.insert(0, f"last_{name}")
    loop.attribute.append(helper.make_attribute("body", helper.make_graph(inner, "body", *inside)))
    del graph.node[:]
    graph.node.extend([*map(onnx.parser.parse_node, count), loop])
    known: dict[str, Any] = {"zero": 0, "one": 1, "two": 2, "minus": -1, "seven": 7}
    known |= {"yes": True, "no": False, "far": 2**63 - 1, "zeros": [0], "axes": [axis]}
    graph.initializer.extend(numpy_helper.from_array(np.array(v), k) for k, v in known.items())
    onnx.checker.check_model(model)
    return model


def check_loop(loop: Any, name: str, states: int, axis: int, sizes: Any, path: Any) -> Any:
    onnx.save(loop, path)
    model = load(path)
    best = optimize(model, verify=True)
    found = count_operators(best.model)
    assert found[name] == 1 and "Loop" not in found, best.report
    for b, t in sizes:
        x = drawn(b, t, D) if axis else drawn(t, b, D)
        feeds = {"x": x, **{name: drawn(b, H) for name in "hc"[:states]}}
        for old, new in zip(run_plain(model, feeds), gg.Session(best)(**feeds), strict=True):
            # Of no steps, onnxruntime stacks rows of which each unknown size is 0.
            assert old.shape == new.shape or (not t and old.size == new.size == 0)
            assert not old.size or np.allclose(old, new, 1e-5, 2e-5)
    return found


@pytest.mark.parametrize(
    ("step", "name", "row", "axis"),
    [
        (lstm_step, "LSTM", GATHER, 0),
        (joined_step, "LSTM", CUT, 1),
        (gru_step, "GRU", BACKWARDS, 0),
        (reset_step, "GRU", ["row = Gather <axis = 1> (x, i)"], 1),
        (gru_step, "GRU", FROM_THE_END, 0),
    ],
)
def test_a_loop_over_all_rows_is_a_scan(
    step: Step, name: str, row: list[str], axis: int, tmp_path: Any
) -> None:
    states = 2 if name == "LSTM" else 1
    count = COUNT if not axis else ["sizes = Shape (x)", "n = Gather (sizes, one)"]
    loop = loop_of(step, states, row, axis=axis, count=count)
    sizes = ((2, 5), (3, 1), (0, 3), (2, 0), (1, 7))
    found = check_loop(loop, name, states, axis, sizes, tmp_path / "loop.onnx")
    assert found["If"] == 1


def test_a_loop_while_rows_are_left_is_a_scan(tmp_path: Any) -> None:
    sizes, path = ((2, 5), (3, 1), (2, 0)), tmp_path / "loop.onnx"
    check_loop(loop_of(lstm_step, 2, **WHILE), "LSTM", 2, 0, sizes, path)


def test_a_loop_whose_count_is_used_stays(tmp_path: Any) -> None:
    loop = loop_of(gru_step, 1, **WHILE)
    loop.graph.output.append(helper.make_tensor_value_info("last_k", TensorProto.INT64, []))
    onnx.save(loop, tmp_path / "loop.onnx")
    assert count_operators(optimize(load(tmp_path / "loop.onnx")).model)["Loop"] == 1


def test_a_loop_of_known_sizes_needs_no_choice(tmp_path: Any) -> None:
    count, more = ["n = Identity (seven)"], ["more = Identity (yes)"]
    loop = loop_of(gru_step, 1, GATHER, count=count, more=more, begins="yes", b=2, t=7)
    found = check_loop(loop, "GRU", 1, 0, [(2, 7)], tmp_path / "loop.onnx")
    assert "If" not in found


@pytest.mark.share(3)
@pytest.mark.parametrize(
    ("step", "change"),
    [
        (wrong_sign, {}),
        (gru_step, {"row": ["at = Mul (i, minus)", "row = Gather (x, at)"]}),  # 0, T - 1, ...
        (gru_step, {"row": ["at = Mul (i, zero)", "row = Gather (x, at)"]}),
        (gru_step, {"row": ["at = Sub (i, one)", "row = Gather (x, at)"]}),  # T - 1, 0, ...
        (gru_step, {"row": ["at = Sub (n, i)", "at1 = Sub (at, two)", "row = Gather (x, at1)"]}),
        (gru_step, {"count": [*COUNT[:1], "m = Gather (sizes, zero)", "n = Sub (m, one)"]}),
        (gru_step, {"count": ["n = Identity (seven)"]}),
        (gru_step, {"count": [*COUNT[:1], "n = Gather (sizes, one)"]}),
        (gru_step, {"more": BY_DATA}),
        (gru_step, {"more": ["more = Less (i, two)"]}),
        (gru_step, {"more": ["more = Not (yes)"]}),
        (gru_step, {"begins": "no"}),
        (gru_step, {"trips": "far"}),
        (gru_step, {**WHILE, "trips": "seven"}),
        (gru_step, {**COUNTED, "row": ["next = Add (k, two)", "row = Gather (x, k)"]}),
        (gru_step, {**COUNTED, "row": [*DOUBLED, "row = Gather (x, k)"]}),
        (gru_step, {**COUNTED, "row": ["next = Add (k, one)", "row = Gather (x, next)"]}),
        (gru_step, {**WHILE, "more": ["more = Less (k, n)"]}),
        (gru_step, {**WHILE, "more": ["more = Less (next, two)"]}),
        (
            gru_step,
            {
                **WHILE,
                "more": [
                    "here = Less (next, n)",
                    *BY_DATA[:2],
                    "also = Less (largest, bound)",
                    "more = And (here, also)",
                ],
            },
        ),
        (gru_step, {**WHILE, "count": [*COUNT, "start = Less (one, n)"]}),
    ],
)
def test_a_loop_over_other_rows_stays(step: Step, change: dict[str, Any], tmp_path: Any) -> None:
    onnx.save(loop_of(step, 1, **{"row": GATHER, **change}), tmp_path / "loop.onnx")
    found = count_operators(optimize(load(tmp_path / "loop.onnx")).model)
    assert found["Loop"] == 1 and not {"LSTM", "GRU", "RNN"} & found.keys()


T = 4


def unrolled(step: Step, states: int, axis: int | None, change: str = "") -> Any:
    """Steps one after another, as exporters write a loop of Python; all h, or the last one."""

    def run(x: Any, h: Any, c: Any = None) -> Any:
        after, all_h, others = [h, c][:states], [], {}
        for t in range(2 if change == "two" else T):
            row = x[:, t]
            if change == "fed back" and t == 2:
                row = row + after[0][:, :D]
            used = wrong_sign if change == "another cell" and t == 1 else step
            after, _ = used(*after, row)
            all_h.append(after[0])
            if t == 1:  # used before the steps that follow
                others = {"between": ops.relu(after[0]), "inner": after[-1]}
        if change == "one left out":
            del all_h[1]
        y = after[0]
        if axis is not None:
            y = ops.concat(*(ops.unsqueeze(h, [axis]) for h in all_h), axis=axis)
        others |= {"last": after[0], "kept": after[-1]}
        return {"y": y, **({change: others[change]} if change in others else {})}

    given = dict.fromkeys("hc"[:states], gg.float32["b", H])
    return gg.build(run, primitives=True, x=gg.float32["b", T, D], **given)


@pytest.mark.share(3)
@pytest.mark.parametrize("axis", [None, 0, 1])
@pytest.mark.parametrize(
    ("step", "name", "states"),
    [
        (lstm_step, "LSTM", 2),
        (joined_step, "LSTM", 2),
        (gru_step, "GRU", 1),
        (reset_step, "GRU", 1),
    ],
)
def test_unrolled_cells_are_one_operator(
    step: Step, name: str, states: int, axis: int | None
) -> None:
    model = unrolled(step, states, axis)
    check_unrolled(model, optimize(model).model, name, states)


def check_unrolled(model: Any, best: Any, name: str, states: int) -> None:
    counts = count_operators(best)
    assert counts[name] == 1 and not {"Sigmoid", "Tanh"} & {*counts}
    for batch in (2, 0):
        feeds = {"x": drawn(batch, T, D)} | {n: drawn(batch, H) for n in "hc"[:states]}
        for a, b in zip(run_plain(model, feeds), run_plain(best, feeds), strict=True):
            np.testing.assert_allclose(b, a, rtol=1e-5, atol=2e-6)


@pytest.mark.share(3)
@pytest.mark.parametrize(
    ("step", "states", "axis", "change"),
    [
        (gru_step, 1, 1, "last"),
        (gru_step, 1, 0, "between"),
        (gru_step, 1, 1, "one left out"),
        (joined_step, 2, 1, "last"),
        (lstm_step, 2, 1, "kept"),
        (lstm_step, 2, None, "kept"),
        (lstm_step, 2, None, "between"),
    ],
)
def test_other_states_in_use_are_replaced_as_well(
    step: Step, states: int, axis: int | None, change: str
) -> None:
    model = unrolled(step, states, axis, change)
    best = optimize(model, verify=True).model
    check_unrolled(model, best, "LSTM" if states == 2 else "GRU", states)


@pytest.mark.parametrize(
    ("step", "states", "axis", "change"),
    [
        (gru_step, 1, 1, "two"),
        (gru_step, 1, 1, "fed back"),
        (gru_step, 1, 1, "another cell"),
        (lstm_step, 2, 1, "inner"),
        (same_gate, 2, 1, ""),
        (wrong_sign, 1, None, ""),
        (one_gate_for_all, 1, None, ""),
    ],
)
def test_unrolled_steps_that_are_no_operator_stay(
    step: Step, states: int, axis: int | None, change: str
) -> None:
    counts = count_operators(optimize(unrolled(step, states, axis, change)).model)
    assert not {"GRU", "LSTM"} & {*counts} and counts["Tanh"] > 1
