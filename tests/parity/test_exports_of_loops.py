"""Loops over recurrent cells, as torch.jit.script exports them, are the operators."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphgen as gg
from graphgen.export.write import to_bytes
from graphgen.runtime import Session

torch = pytest.importorskip("torch", reason="needs torch (make parity)")

pytestmark = pytest.mark.parity

BOUND = 5e-6  # relative RMS in float32
D, H = 6, 8


class Layer(torch.nn.Module):  # type: ignore[misc,name-defined]
    """An LSTM by its cell, with all its states in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = torch.nn.LSTMCell(D, H)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = x.new_zeros(x.size(0), 8)
        c = x.new_zeros(x.size(0), 8)
        ys: list[torch.Tensor] = []
        for t in range(x.size(1)):
            h, c = self.cell(x[:, t], (h, c))
            ys.append(h)
        return torch.stack(ys, 1), c


class Backwards(Layer):
    """The same from the last step to the first."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = x.new_zeros(x.size(0), 8)
        c = x.new_zeros(x.size(0), 8)
        ys: list[torch.Tensor] = []
        for t in range(x.size(1)):
            h, c = self.cell(x[:, x.size(1) - 1 - t], (h, c))
            ys += [h]
        return torch.stack(ys, 1), c


class Gated(torch.nn.Module):  # type: ignore[misc,name-defined]
    """The cell of a GRU, as people write it."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.own, self.carried = torch.nn.Linear(features, 3 * H), torch.nn.Linear(H, 3 * H)

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        xr, xz, xn = self.own(x).chunk(3, 1)
        hr, hz, hn = self.carried(h).chunk(3, 1)
        n = torch.tanh(xn + torch.sigmoid(xr + hr) * hn)
        return n + torch.sigmoid(xz + hz) * (h - n)


class Stack(torch.nn.Module):  # type: ignore[misc,name-defined]
    """Two cells in one loop over unbound rows, between projections."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = torch.nn.Linear(D, 5), torch.nn.Linear(H, 3)
        self.first, self.second = Gated(5), Gated(H)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = x.unbind(1)
        h = x.new_zeros(x.size(0), 8)
        k = x.new_zeros(x.size(0), 8)
        ys: list[torch.Tensor] = []
        for t in range(len(rows)):
            h = self.first(torch.relu(self.before(rows[t])), h)
            k = self.second(h, k)
            ys.append(self.after(k))
        return torch.stack(ys, 1), h


@pytest.mark.parametrize("opset", [13, 17])
@pytest.mark.parametrize(
    ("made", "operator", "count"), [(Layer, "LSTM", 1), (Backwards, "LSTM", 1), (Stack, "GRU", 2)]
)
def test_a_scripted_loop_is_its_operators(
    made: Any, operator: str, count: int, opset: int, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    module, path = made().eval(), tmp_path / "loop.onnx"
    with torch.no_grad():
        for weight in module.parameters():
            weight.normal_(std=0.7)
    axes = {"x": {0: "rows", 1: "steps"}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            torch.jit.script(module), (torch.randn(2, 5, D),), path, dynamo=False,
            opset_version=opset, input_names=["x"], dynamic_axes=axes,
        )  # fmt: skip
    best = gg.optimize(gg.load(path))
    found = best.report.ops_after
    assert found[operator] == count and not {"Loop", "SequenceInsert"} & {*found}, best.report
    session = Session(to_bytes(best.model), optimize=False)
    for rows, steps in ((3, 1), (1, 9), (4, 6)):
        x = torch.randn(rows, steps, D)
        with torch.no_grad():
            exact = [y.numpy() for y in module.double()(x.double())]
            module.float()
        for got, wanted in zip(session({"x": x.numpy()}), exact, strict=True):
            assert np.linalg.norm(got - wanted) <= BOUND * np.linalg.norm(wanted)
