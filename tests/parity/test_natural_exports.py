"""What torch's exporters fold, join and drop is refused, or trains as in torch: `make parity`."""

import contextlib
import copy
import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphgen as gg
from graphgen.errors import GraphgenError

torch = pytest.importorskip("torch", reason="needs torch: make parity")
pytestmark = pytest.mark.parity
nn = torch.nn
RATE, STEPS = 1e-2, 5


class Module(nn.Module):  # type: ignore[misc, name-defined]
    """A function of its parts, which have the names that they are given."""

    def __init__(self, forward: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self._forward = forward
        for name, part in parts.items():
            given = nn.Parameter(part) if isinstance(part, torch.Tensor) else part
            setattr(self, name, given)

    def forward(self, x: Any) -> Any:
        return self._forward(self, x)


def zeros(module: Any) -> Any:
    nn.init.zeros_(module.bias)
    return module


def eye(module: Any) -> Any:
    nn.init.eye_(module.weight)
    return module


def rms(m: Any, x: Any) -> Any:
    x = m.first(x)
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * (1 + m.scale)


def image(x: Any) -> Any:
    """Images of vectors."""
    return x[:, :, None, None].expand(-1, -1, 3, 3) * torch.linspace(-1, 1, 3)


def normalized() -> Any:
    return nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))


def weighed(m: Any, x: Any) -> Any:
    mask = torch.where(torch.tril(torch.ones(4, 4)) > 0, 0.0, -1e4)
    return m.head(m.first(x) @ torch.softmax(mask, -1))


def recurrent(kind: str, **how: Any) -> Callable[[], Any]:
    size = 8 if how.get("bidirectional") else 4
    return lambda: Module(
        lambda m, x: m.head(m.first(x[None])[0])[0],
        first=getattr(nn, kind)(4, 4, batch_first=True, **how),
        head=nn.Linear(size, 4),
    )


def two(m: Any, x: Any) -> Any:
    return m.head(torch.tanh(m.first(x)))


def rows(m: Any, x: Any) -> Any:
    return two(m, x[None])[0]


def held(array: Any) -> Any:
    """A module with a buffer."""
    module = nn.Module()
    module.register_buffer("array", array)
    return module


def angles(m: Any, x: Any) -> Any:
    """Two features turned by angles of their rows, as in a rotary embedding."""
    turned = torch.arange(5.0)[:, None] * m.rates.array[None].repeat(1, 2)
    x = m.first(x)
    return m.head(x * turned.cos() + x.flip(-1) * turned.sin())


def cut(m: Any, x: Any) -> Any:
    return m.head(torch.tanh(m.first(x) + getattr(m.table, "array", m.table)[:5]))


def cut_twice(m: Any, x: Any) -> Any:
    return cut(m, x) + m.twin[2:7]


TABLE = torch.linspace(-1, 1, 36).reshape(9, 4) ** 2
MADE: dict[str, Callable[[], Any]] = {
    "fresh GroupNorms": lambda: Module(
        lambda m, x: m.n2(m.b(torch.relu(m.n1(m.a(image(x)))))).mean((2, 3)),
        a=nn.Conv2d(4, 4, 3, padding=1),
        n1=nn.GroupNorm(2, 4),
        b=nn.Conv2d(4, 4, 3, padding=1),
        n2=nn.GroupNorm(2, 4),
    ),
    "fresh LayerNorms": lambda: Module(
        lambda m, x: m.n2(m.head(m.n1(m.first(x)))),
        first=nn.Linear(4, 4),
        n1=nn.LayerNorm(4),
        head=nn.Linear(4, 4),
        n2=nn.LayerNorm(4),
    ),
    "one LayerNorm": lambda: Module(
        lambda m, x: m.n(m.first(x)), first=nn.Linear(4, 4), n=nn.LayerNorm(4)
    ),
    "no bias": lambda: Module(two, first=zeros(nn.Linear(4, 4)), head=nn.Linear(4, 4)),
    "no bias of rows": lambda: Module(
        rows, first=zeros(nn.Linear(4, 4)), head=zeros(nn.Linear(4, 4))
    ),
    "no bias of images": lambda: Module(
        lambda m, x: m.head(torch.relu(m.first(image(x))).mean((2, 3))),
        first=zeros(nn.Conv2d(4, 4, 2)),
        head=nn.Linear(4, 4),
    ),
    "weights that are normalized": lambda: Module(two, first=normalized(), head=normalized()),
    "weights of rows that are": lambda: Module(rows, first=normalized(), head=nn.Linear(4, 4)),
    "a scale of 1 and more": lambda: Module(rms, first=nn.Linear(4, 4), scale=torch.zeros(4)),
    "an exponent": lambda: Module(
        lambda m, x: m.first(x) * m.scale.exp(), first=nn.Linear(4, 4), scale=torch.tensor(0.3)
    ),
    "a token that is expanded": lambda: Module(
        lambda m, x: m.first(x + m.token.expand(5, 4)),
        first=nn.Linear(4, 4),
        token=torch.zeros(1, 4),
    ),
    "a product of weights": lambda: Module(
        lambda m, x: m.first(torch.relu(x @ (m.u @ m.v))),
        first=nn.Linear(4, 4),
        u=torch.randn(4, 2),
        v=torch.randn(2, 4),
    ),
    "equal scales": lambda: Module(
        lambda m, x: m.u * x + m.v * m.first(x),
        first=nn.Linear(4, 4),
        u=torch.full((4,), 0.1),
        v=torch.full((4,), 0.1),
    ),
    "identities": lambda: Module(two, first=eye(nn.Linear(4, 4)), head=eye(nn.Linear(4, 4))),
    "a constant operand": lambda: Module(weighed, first=nn.Linear(4, 4), head=nn.Linear(4, 4)),
    "a transposed weight": lambda: Module(
        lambda m, x: m.head(torch.tanh(x @ m.w.t())), w=torch.randn(4, 4), head=nn.Linear(4, 4)
    ),
    "an unused layer": lambda: Module(
        rows, first=nn.Linear(4, 4), head=nn.Linear(4, 4), pooler=nn.Linear(4, 4)
    ),
    "an encoder": lambda: Module(
        rows,
        first=nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2),
        head=nn.Linear(4, 4),
    ),
    "a buffer that is cut": lambda: Module(
        cut, first=nn.Linear(4, 4), head=nn.Linear(4, 4), table=held(TABLE)
    ),
    "a parameter that is cut": lambda: Module(
        cut, first=nn.Linear(4, 4), head=nn.Linear(4, 4), table=TABLE.clone()
    ),
    "a parameter like a buffer": lambda: Module(
        cut_twice, first=nn.Linear(4, 4), head=nn.Linear(4, 4), table=held(TABLE), twin=TABLE + 0
    ),
    "angles of a buffer": lambda: Module(
        angles, first=nn.Linear(4, 4), head=nn.Linear(4, 4), rates=held(torch.tensor([1.0, 0.1]))
    ),
    "LSTM": recurrent("LSTM", bidirectional=True),
    "GRU": recurrent("GRU", num_layers=2),
}
TRAINS = {"one LayerNorm", "a transposed weight", "an unused layer", "LSTM", "GRU"}
"""Of which nothing is lost."""
CONSTANTS = {"a buffer that is cut", "angles of a buffer", "a constant operand"}
"""Of which dynamo's exporter says that it calculated something of no parameter."""


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("dynamo", [True, False])
def test_what_an_export_lost_is_refused(name: str, dynamo: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    random, module = np.random.default_rng(0), MADE[name]().eval()
    batches = [
        {key: random.standard_normal((5, 4), np.float32) for key in ("x", "labels")}
        for _ in range(STEPS)
    ]
    how: dict[str, Any] = {"output": "y", "loss": "mse", "optimizer": gg.SGD()}
    example = torch.tensor(batches[0]["x"])
    gg.artifacts(gg.from_torch(module, example, output_names=["y"]), tmp_path / "own", **how)
    path = tmp_path / "m.onnx"
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module,
            (example,),
            path,
            dynamo=dynamo,
            input_names=["x"],
            output_names=["y"],
            opset_version=18,
        )
        try:
            table = gg.artifacts(path, tmp_path / "art", **how)
        except GraphgenError as error:
            assert "export with gg.from_torch" in str(error)
            assert name not in TRAINS and not (dynamo and name in CONSTANTS)
            table = None
    twin = copy.deepcopy(module)
    sgd, expected = torch.optim.SGD(twin.parameters(), lr=RATE), []
    for batch in batches:
        x, labels = (torch.tensor(batch[key]) for key in ("x", "labels"))
        loss = nn.functional.mse_loss(twin(x), labels)
        sgd.zero_grad()
        loss.backward()
        sgd.step()
        expected.append(loss.item())
    for folder in ("own", "art") if table is not None else ("own",):
        trainer = gg.Trainer(tmp_path / folder, schedule=gg.schedule.constant(RATE), threads=1)
        losses = [line["loss"] for line in trainer.fit(batches, steps=STEPS, progress=False)]
        np.testing.assert_allclose(losses, expected, rtol=1e-4)
