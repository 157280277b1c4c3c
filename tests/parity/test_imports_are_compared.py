"""What torch's exporter writes wrongly is refused when it is imported: `make parity`."""

import warnings
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import graphgen as gg
from graphgen.errors import GraphgenError, GraphgenWarning

torch = pytest.importorskip("torch", reason="needs torch: make parity")
pytestmark = pytest.mark.parity
nn, functional = torch.nn, torch.nn.functional
X = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 1, 2, 3, 4, 0])
SEVERAL = torch.tensor([[0, 2, -1, 1, 1]] * 6)
WEIGHT = torch.tensor([0.3, 1.0, 2.0, 0.5, 0.7])


class Of(nn.Module):  # type: ignore[misc, name-defined]
    """A module of a function, after a product."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function, self.product = function, nn.Linear(5, 5)

    def forward(self, x: Any, *more: Any) -> Any:
        return self.function(self.product(x), *more)


class Counting(nn.Module):  # type: ignore[misc, name-defined]
    """One whose results depend on how often it was called, if they `matter`."""

    def __init__(self, matter: bool) -> None:
        super().__init__()
        self.matter = matter
        self.register_buffer("calls", torch.zeros(5))

    def forward(self, x: Any) -> Any:
        self.calls.add_(1.0)
        return x * 2 + (self.calls if self.matter else 1)


class Twice(nn.Module):  # type: ignore[misc, name-defined]
    """Values that are returned twice, and an input."""

    def forward(self, x: Any) -> Any:
        y = x * 2
        return y, y, x


class InTraining(nn.Module):  # type: ignore[misc, name-defined]
    """One with other outputs in training."""

    def __init__(self) -> None:
        super().__init__()
        self.product, self.drop, self.norm = nn.Linear(5, 5), nn.Dropout(0.5), nn.BatchNorm1d(5)

    def forward(self, x: Any) -> Any:
        y = self.norm(self.drop(self.product(x)))
        return (y, y.mean()) if self.training else y


@pytest.mark.parametrize(
    ("function", "more"),
    [
        (lambda x, y: functional.cross_entropy(x, y, WEIGHT, label_smoothing=0.1), LABELS),
        (functional.multilabel_margin_loss, SEVERAL),
        (
            lambda x, y: torch.zeros(5, 5).scatter_reduce(0, y[:, None].expand(6, 5), x, "mean"),
            LABELS,
        ),
    ],
)
def test_another_result_is_refused(function: Any, more: Any) -> None:
    with pytest.raises(GraphgenError, match=r"computes something else: result differs by \d"):
        gg.from_torch(Of(function).eval(), (X, more), output_names=["result"])


def test_what_is_only_right_at_the_size_of_the_example_is_refused() -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 1), nn.AdaptiveAvgPool2d(2))
    sizes = ({0: "batch", 2: "height", 3: "width"},)
    images = (torch.randn(2, 3, 8, 10),)
    with pytest.raises(GraphgenError, match=r"at batch=3, height=7, width=9: .* 1, 1\], and the"):
        gg.from_torch(module.eval(), images, dynamic_shapes=sizes)
    gg.from_torch(module.eval(), images, dynamic_shapes=({0: "batch"},))


def test_state_and_randomness() -> None:
    with pytest.raises(GraphgenError, match="each call changes calls, and the next one computes"):
        gg.from_torch(Counting(matter=True).eval(), X)
    module = Counting(matter=False).eval()
    gg.from_torch(module, X)
    assert not module.calls.any()
    always = Of(lambda x: functional.dropout(x, 0.5, training=True)).eval()
    with pytest.warns(GraphgenWarning, match="not compared .* draws random numbers"):
        gg.from_torch(always, X)
    with pytest.warns(GraphgenWarning, match=r"not compared .* no kernel"):
        gg.from_torch(nn.Linear(5, 5).bfloat16(), X.bfloat16())


def test_a_module_and_its_inputs_stay_as_they_are() -> None:
    module, x = InTraining(), X.clone()
    module.norm.eval()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error", GraphgenWarning)
        model = gg.from_torch(module, (x,), dynamic_shapes=({0: "rows"},))
    assert len(model.graph.outputs) == 2
    assert module.training and module.drop.training and not module.norm.training
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name])
    model = gg.from_torch(Of(lambda x: x.mul_(2)).eval(), x)
    assert torch.equal(x, X) and len(model.graph.outputs) == 1


@pytest.mark.parametrize("names", [None, ["first", "mul_1", "input"]])
def test_outputs_have_names_of_their_own(names: list[str] | None) -> None:
    model = gg.from_torch(Twice(), X, output_names=names)
    assert [value.name for value in model.graph.inputs] == ["x"]
    assert [value.name for value in model.graph.outputs] == (names or ["mul", "mul_1", "x"])
    one, other, same = gg.Session(model)(x=X.numpy())
    np.testing.assert_array_equal(one, 2 * X)
    np.testing.assert_array_equal(other, one)
    np.testing.assert_array_equal(same, X)
    for wrong in (["a", "b", "c", "d"], ["a", "a"], ["a", "b", "x"]):
        with pytest.raises(GraphgenError, match="output_names"):
            gg.from_torch(Twice(), X, output_names=wrong)


Pair = namedtuple("Pair", ["sums", "mul"])


@dataclass
class Named:
    """A result with a name, and what may be missing."""

    logits: Any
    more: Any = None


torch.export.register_dataclass(Named)


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (lambda x: {"z": x, "a": x + 1}, ["z", "a"]),
        (lambda x: {"z": x, "no": None, "d": {"p": x + 1, 0: [x + 2]}}, ["z", "d.p", "d.0.0"]),
        (lambda x: Pair(x, x + 1), ["sums", "mul"]),
        (lambda x: (x, None, {"b": x + 1}), ["linear", "2.b"]),
        (lambda x: Named(x), ["logits"]),
        (lambda x: Named({"a": x}, [x + 1]), ["logits.a", "more.0"]),
        (lambda x: {"product.weight": x, "x": x + 1, "sums": x + 2}, ["linear", "add", "sums"]),
        (lambda x: {"add_1": x, "add": x + 1, "c": x + 2}, ["add_1", "add", "c"]),
    ],
)  # fmt: skip
def test_outputs_are_called_as_the_module_calls_them(function: Any, names: list[str]) -> None:
    module = Of(function).eval()
    model = gg.from_torch(module, {"x": X})
    assert [value.name for value in model.graph.outputs] == names
    results = gg.Session(model)(x=X.numpy())
    for i, result in enumerate(results):
        np.testing.assert_allclose(result, module.product(X).detach() + i, atol=1e-6)
    first = gg.from_torch(module, {"x": X}, output_names=["mine"])
    assert [value.name for value in first.graph.outputs] == ["mine", *names[1:]]


class Unknown(Named):
    """A dataclass that torch does not know."""


def test_results_that_torch_cannot_export_are_one_error_with_what_to_do() -> None:
    with pytest.raises(GraphgenError, match=r"Unknown.*: call torch.export.register_dataclass"):
        gg.from_torch(Of(Unknown).eval(), X)
    with pytest.raises(GraphgenError, match="returns numbers or texts, leave them out"):
        gg.from_torch(Of(lambda x: (x, 3)).eval(), X)


def test_an_lstm_whose_projection_the_exporter_drops_is_refused() -> None:
    module = nn.Sequential(nn.LSTM(5, 6, proj_size=3, num_layers=2))
    with pytest.raises(GraphgenError, match="0 has proj_size=3, and torch's exporter writes an LS"):
        gg.from_torch(module, torch.zeros(2, 3, 5))


class Counted(torch.nn.Module):  # type: ignore[misc, name-defined]
    """A mean that training moves, and that only evaluation reads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(6, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Any) -> Any:
        y = self.linear(x)
        if not self.training:
            return y - self.mean
        self.mean.lerp_(y.detach().mean(0), 0.1)
        return y - y.mean(0)


def test_buffers_that_training_moves_and_reads() -> None:
    """The vectors of a spectral norm, which have converged, so that the next call seems equal."""
    norm = torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(6, 8))
    kept, x = {n: b.clone() for n, b in norm.named_buffers()}, torch.randn(3, 6)
    told = r"in training mode changes .*_u, and the next one reads it; .* in evaluation mode"
    with pytest.raises(GraphgenError, match=told):
        gg.from_torch(norm.train(), x)
    assert all(torch.equal(b, kept[n]) for n, b in norm.named_buffers())
    gg.from_torch(norm.eval(), x)
    gg.from_torch(Counted().train(), x)
