"""A Scan over the cell of an LSTM, GRU or RNN becomes that operator, and nothing else does."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import graphgen as gg
from graphgen import ops
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


def state_elsewhere(h: Any, x: Any) -> Any:
    [after], _ = rnn_step(h, x)
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


def model_of(step: Step, states: int, b: Any = "b", t: Any = "t", **way: Any) -> Any:
    def body(x: Any, *given: Any) -> Any:
        last, ys = ops.scan(step, list(given), [x], **way)
        return (*last, *ys)

    x = gg.float32[(b, t, D) if way.get("axis") else (t, b, D)]
    both = {"h": gg.float32[b, H], "c": gg.float32[b, H]}
    if states == 1:
        return gg.build(lambda x, h: body(x, h), x=x, h=both["h"])
    return gg.build(lambda x, h, c: body(x, h, c), x=x, **both)


@pytest.mark.parametrize(
    ("step", "name", "way"),
    [
        (lstm_step, "LSTM", {}),
        (lstm_step, "LSTM", {"reverse": True}),
        (joined_step, "LSTM", {"axis": 1}),
        (gru_step, "GRU", {}),
        (reset_step, "GRU", {"axis": 1, "reverse": True}),
        (rnn_step, "RNN", {}),
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


@pytest.mark.parametrize(
    ("step", "states"),
    [
        (wrong_sign, 1),
        (same_gate, 2),
        (state_elsewhere, 1),
        (one_gate_for_all, 1),
        (old_state_in_the_output, 2),
    ],
)
def test_what_is_no_cell_stays(step: Step, states: int) -> None:
    found = count_operators(optimize(model_of(step, states)).model)
    assert found["Scan"] == 1 and not {"LSTM", "GRU", "RNN"} & found.keys()
