"""Recurrent networks: RNN, LSTM and GRU of ai.onnx, their bodies a Scan over one cell each."""

from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

import numpy as np
import onnx_ir as ir

from graphgen.errors import GraphgenError
from graphgen.infer import describe
from graphgen.op import composite
from graphgen.ops.activation import relu
from graphgen.ops.control_flow import scan
from graphgen.ops.elementwise import less, sigmoid, tanh, where
from graphgen.ops.layout import (
    arange,
    cast,
    concat,
    dim,
    expand,
    numpy_dtype,
    slice_,
    split,
    squeeze,
    swap_last,
    transpose,
    unsqueeze,
)
from graphgen.ops.linalg import matmul
from graphgen.traits import Trait
from graphgen.value import Tensor

Direction: TypeAlias = Literal["forward", "reverse", "bidirectional"]

_BACKWARDS = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}

Cell = Callable[..., Sequence[Tensor]]
"""From p, the product with x (B, gates·H), its weights r (gates·H, H) and bias, and the states."""


def rnn_cell(p: Tensor, r: Tensor, b: Tensor, h: Tensor) -> list[Tensor]:
    """h' = tanh(p + h Rᵀ + b), p and h (B, H), R (H, H) (Elman 1990)."""
    return [tanh(p + _product(h, r, b))]


def _relu_cell(p: Tensor, r: Tensor, b: Tensor, h: Tensor) -> list[Tensor]:
    """h' = max(0, p + h Rᵀ + b), as `rnn_cell` (Le et al., arXiv 1504.00941)."""
    return [relu(p + _product(h, r, b))]


def lstm_cell(
    p: Tensor, r: Tensor, b: Tensor, h: Tensor, c: Tensor, peepholes: Tensor | None = None
) -> list[Tensor]:
    """c' = f c + i g, h' = o tanh(c'); i, o and f of (0, 1) (Hochreiter and Schmidhuber 1997).

    The gates are i, o, f and g of p + h Rᵀ + b; `peepholes` (3·H) of i, o and f look at c.
    """
    i, o, f, g = split(p + _product(h, r, b), num_outputs=4, axis=-1)
    if peepholes is not None:
        pi, po, pf = split(peepholes, num_outputs=3, axis=-1)
        i, f = i + pi * c, f + pf * c
    c = sigmoid(f) * c + sigmoid(i) * tanh(g)
    o = o if peepholes is None else o + po * c
    return [sigmoid(o) * tanh(c), c]


def gru_cell(p: Tensor, r: Tensor, b: Tensor, h: Tensor, *, before: bool = False) -> list[Tensor]:
    """h' = (1 - z) g + z h, g = tanh(p + (s h) Rᵀ + b), gates z and s (Cho et al. 2014).

    With `before`, s multiplies the product: g = tanh(p + s (h Rᵀ + b)), one product fewer.
    """
    pz, ps, pg = split(p, num_outputs=3, axis=-1)
    hidden = dim(h, -1)
    gates, own = slice_(r, [0], [2 * hidden], [0]), slice_(r, [2 * hidden], [3 * hidden], [0])
    bg = None
    if b is not None:
        b, bg = slice_(b, [0], [2 * hidden], [0]), slice_(b, [2 * hidden], [3 * hidden], [0])
    z, s = split(_product(h, gates, b), num_outputs=2, axis=-1)
    z, s = sigmoid(pz + z), sigmoid(ps + s)
    g = s * _product(h, own, bg) if before else _product(s * h, own, bg)
    return [(1.0 - z) * tanh(pg + g) + z * h]


def halves(b: Tensor) -> tuple[Tensor, Tensor]:
    """The two parts of a bias (2·gates·H): for the product with x, and for that with h."""
    size = b.shape[0] // 2
    return slice_(b, [0], [size], [0]), slice_(b, [size], [2 * size], [0])


def _product(h: Tensor, r: Tensor, b: Tensor) -> Tensor:
    y = matmul(h, swap_last(r))
    return y if b is None else y + b


@composite("RNN", outputs=2, together=True, traits=Trait.PRODUCT)
def rnn(
    x: Tensor,
    w: Tensor,
    r: Tensor,
    b: Tensor | None = None,
    sequence_lens: Tensor | None = None,
    initial_h: Tensor | None = None,
    *,
    activations: Sequence[str] = ("Tanh", "Tanh"),
    activation_alpha: Sequence[float] | None = None,
    activation_beta: Sequence[float] | None = None,
    clip: float | None = None,
    direction: Direction = "forward",
    hidden_size: int | None = None,
    layout: int = 0,
) -> tuple[Tensor, Tensor]:
    """`rnn_cell` over x (T, B, I): all its states (T, directions, B, H), and the last ones.

    x is (T, B, I), w (directions, H, I), r (directions, H, H), b (directions, 2·H), and the first
    states (directions, B, H), zeros by default. The activation may be Relu instead of tanh. Row b
    takes its first sequence_lens[b] steps, int32 (B,); after them h is 0.
    """
    kind = "Relu" if activations and activations[0].lower() == "relu" else "Tanh"
    _expect("RNN", [kind], activations, clip=clip)
    cell = _relu_cell if kind == "Relu" else rnn_cell
    y, h = _over(cell, x, w, r, b, sequence_lens, [initial_h], direction, layout)
    return y, h


@composite("LSTM", outputs=3, together=True, traits=Trait.PRODUCT)
def lstm(
    x: Tensor,
    w: Tensor,
    r: Tensor,
    b: Tensor | None = None,
    sequence_lens: Tensor | None = None,
    initial_h: Tensor | None = None,
    initial_c: Tensor | None = None,
    peepholes: Tensor | None = None,
    *,
    activations: Sequence[str] | None = None,
    activation_alpha: Sequence[float] | None = None,
    activation_beta: Sequence[float] | None = None,
    clip: float | None = None,
    direction: Direction = "forward",
    hidden_size: int | None = None,
    input_forget: int = 0,
    layout: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """`lstm_cell` over x (T, B, I): all h (T, directions, B, H), the last h, and the last c.

    x is (T, B, I), w (directions, gates·H, I), r (directions, gates·H, H), b (directions,
    2·gates·H), and the first states (directions, B, H), zeros by default. Row b takes its first
    sequence_lens[b] steps, int32 (B,); after them h is 0.
    The gates are i, o, f and g; p is (directions, 3·H).
    """
    wanted = ["Sigmoid", "Tanh", "Tanh"]
    _expect("LSTM", wanted, activations, clip=clip, input_forget=input_forget)
    states = [initial_h, initial_c]
    y, h, c = _over(lstm_cell, x, w, r, b, sequence_lens, states, direction, layout, peepholes)
    return y, h, c


@composite("GRU", outputs=2, together=True, traits=Trait.PRODUCT)
def gru(
    x: Tensor,
    w: Tensor,
    r: Tensor,
    b: Tensor | None = None,
    sequence_lens: Tensor | None = None,
    initial_h: Tensor | None = None,
    *,
    activations: Sequence[str] | None = None,
    activation_alpha: Sequence[float] | None = None,
    activation_beta: Sequence[float] | None = None,
    clip: float | None = None,
    direction: Direction = "forward",
    hidden_size: int | None = None,
    layout: int = 0,
    linear_before_reset: int = 0,
) -> tuple[Tensor, Tensor]:
    """`gru_cell` over x (T, B, I): all its states (T, directions, B, H), and the last ones.

    x is (T, B, I), w (directions, gates·H, I), r (directions, gates·H, H), b (directions,
    2·gates·H), and the first states (directions, B, H), zeros by default. Row b takes its first
    sequence_lens[b] steps, int32 (B,); after them h is 0.
    The gates are z, s and g.
    """
    _expect("GRU", ["Sigmoid", "Tanh"], activations, clip=clip)

    def cell(p: Tensor, r: Tensor, b: Tensor, h: Tensor) -> list[Tensor]:
        return gru_cell(p, r, b, h, before=bool(linear_before_reset))

    y, h = _over(cell, x, w, r, b, sequence_lens, [initial_h], direction, layout)
    return y, h


def _expect(
    name: str, wanted: list[str], activations: Sequence[str] | None, **unset: float | None
) -> None:
    given = [a.lower() for a in activations or ()]
    if given and given != [a.lower() for a in wanted] * (len(given) // len(wanted)):
        raise GraphgenError(f"{name}: activations are {', '.join(given)}; its body has {wanted}")
    for option, value in unset.items():
        if value:
            raise GraphgenError(f"{name}: {option} is {value}; its body is for none")


def _over(
    cell: Cell,
    x: Tensor,
    w: Tensor,
    r: Tensor,
    b: Tensor | None,
    lengths: Tensor | None,
    states: Sequence[Tensor | None],
    direction: str,
    layout: int,
    peepholes: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """All first states (T, directions, B, H), 0 after a row's length, and the last of each.

    In layout 1 the batch comes first: (B, T, I), (B, T, directions, H), (B, directions, H).
    """
    if direction not in _BACKWARDS:
        raise GraphgenError(f"direction is {direction!r}; choose {', '.join(_BACKWARDS)}")
    hidden = r.shape[-1]
    if not isinstance(hidden, int):
        raise GraphgenError(f"its recurrent weights are {describe(r)}; their sizes must be known")
    turn = [1, 0, 2]
    if layout:
        x = transpose(x, perm=turn)
        states = [None if state is None else transpose(state, perm=turn) for state in states]
    ys, lasts = list[Tensor](), list[list[Tensor]]()
    for d, reverse in enumerate(_BACKWARDS[direction]):

        def own(value: Tensor, d: int = d) -> Tensor:
            return squeeze(slice_(value, [d], [d + 1], [0]), [0])

        rd, bd = own(r), None if b is None else own(b)
        more = [] if peepholes is None else [own(peepholes)]
        p = matmul(x, swap_last(own(w)))  # (T, B, gates·H), of all steps at once
        if bd is not None:
            wb, bd = halves(bd)
            p = p + wb
        zeros = expand(np.zeros((), numpy_dtype(x)), [dim(x, 1), hidden])
        first = [zeros if state is None else own(state) for state in states]

        def step(
            *given: Tensor,
            rd: Tensor = rd,
            bd: Tensor | None = bd,
            more: Sequence[Tensor] = more,
        ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
            before, (p, *t) = given[: len(states)], given[len(states) :]
            after = cell(p, rd, bd, *before, *more)
            if not t or lengths is None:
                return after, after[:1]
            live = unsqueeze(less(t[0], cast(lengths, to=ir.DataType.INT64)), [1])  # (B, 1)
            kept = [where(live, new, old) for new, old in zip(after, before, strict=True)]
            return kept, [where(live, after[0], np.zeros((), numpy_dtype(x)))]

        xs = [p] if lengths is None else [p, arange(dim(x, 0))]
        last, [y] = scan(step, first, xs, reverse=reverse)
        ys.append(unsqueeze(y, [1]))
        lasts.append([unsqueeze(state, [0]) for state in last])
    y, ends = concat(*ys, axis=1), [concat(*parts, axis=0) for parts in zip(*lasts, strict=True)]
    if layout:
        y, ends = transpose(y, perm=[2, 0, 1, 3]), [transpose(h, perm=turn) for h in ends]
    return y, *ends


STATE = "an initial state"
"""What a foreign file gives a recurrence to begin with, which no gradient may change."""

for _op in (rnn, lstm, gru):
    _op.fixed = {name: STATE for name in _op.inputs if name.startswith("initial_")}
