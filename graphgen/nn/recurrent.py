"""Recurrent layers: all steps by one operator, or one step at a time."""

import math
from typing import Any, Literal, TypeAlias

from graphgen import ops
from graphgen.errors import GraphgenError, one_of, positive, user_line
from graphgen.nn.module import Module, Parameter, normal, zeros
from graphgen.ops.recurrent import halves
from graphgen.value import Tensor

Kind: TypeAlias = Literal["rnn", "lstm", "gru"]

_GATES: dict[Kind, int] = {"rnn": 1, "lstm": 4, "gru": 3}
_OPERATORS: dict[Kind, Any] = {"rnn": ops.rnn, "lstm": ops.lstm, "gru": ops.gru}
_CELLS: dict[Kind, Any] = {"rnn": ops.rnn_cell, "lstm": ops.lstm_cell, "gru": ops.gru_cell}


class Recurrent(Module):
    """The states h[t] after x[0] ... x[t], (B, T, features) to (B, T, directions·hidden).

    `kind` is rnn (Elman 1990), lstm (Hochreiter and Schmidhuber 1997; with a state c besides h) or
    gru (Cho et al., arXiv 1406.1078). If `bidirectional`, a second one goes from the end to the
    start, and h holds both. Weights have the layout of ai.onnx, (directions, gates·hidden, ·).
    """

    def __init__(
        self, features: int, hidden: int, *, kind: Kind = "gru", bidirectional: bool = False
    ):
        positive("Recurrent", features=features, hidden=hidden)
        one_of("Recurrent", Kind, kind=kind)
        self.features, self.hidden = features, hidden
        self.kind: Kind = kind
        self.direction = "bidirectional" if bidirectional else "forward"
        directions, gates = 1 + bidirectional, _GATES[kind] * hidden
        std = 1.0 / math.sqrt(hidden)
        self.weight = Parameter((directions, gates, features), initialize=normal(std))
        self.recurrent = Parameter((directions, gates, hidden), initialize=normal(std))
        self.bias = Parameter((directions, 2 * gates), initialize=zeros)

    def __call__(
        self, x: Tensor, *states: Tensor, lengths: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """All h, and the last of each state, (directions, B, hidden), from the first, or zeros.

        Row b takes only its first lengths[b] steps, int32 (B,); after them h is 0.
        """
        self.expect_last(x, self.features, rank=3)
        y, *last = _OPERATORS[self.kind](
            ops.transpose(x, perm=[1, 0, 2]),
            self.weight,
            self.recurrent,
            self.bias,
            lengths,
            *states,
            direction=self.direction,
            hidden_size=self.hidden,
        )
        y = ops.transpose(y, perm=[2, 0, 1, 3])  # (B, T, directions, hidden)
        directions = self.weight.shape[0]
        return ops.reshape(y, [0, 0, directions * self.hidden]), tuple(last)

    def step(self, x: Tensor, *states: Tensor) -> list[Tensor]:
        """The states after one more step, (B, features) and (B, hidden) each."""
        if self.direction != "forward":
            raise GraphgenError(
                "Recurrent.step: two directions have no single order of steps; use one direction"
                f"{user_line()}"
            )
        given = (self.weight, self.recurrent, self.bias)
        weight, recurrent, bias = (ops.squeeze(array, [0]) for array in given)
        own, carried = halves(bias)
        p = ops.matmul(x, ops.swap_last(weight)) + own
        return list(_CELLS[self.kind](p, recurrent, carried, *states))
