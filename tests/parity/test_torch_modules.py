"""Gradients of many small modules as torch exports them, against torch's own in float64."""

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import graphgen as gg
from graphgen.graph import parameters

torch = pytest.importorskip("torch", reason="needs torch: make parity")
pytestmark = pytest.mark.parity
nn, F = torch.nn, torch.nn.functional
Case = tuple[Any, tuple[Any, ...]]


class Squared(nn.Module):  # type: ignore[misc, name-defined]
    """Σ y² over what some modules give, one after the other, or the first of several."""

    def __init__(self, *modules: Any) -> None:
        super().__init__()
        self.all = nn.ModuleList(modules)

    def forward(self, *xs: Any) -> Any:
        for module in self.all:
            y = module(*xs)
            xs = y if isinstance(y, tuple) else (y,)
        return sum(x.square().sum() for x in xs if isinstance(x, torch.Tensor))


class Own(nn.Module):  # type: ignore[misc, name-defined]
    """A function of parameters with these shapes, and inputs."""

    def __init__(self, function: Callable[..., Any], **shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.randn(*shape) * 0.5))

    def forward(self, *xs: Any) -> Any:
        return self.function(self, *xs)


class Transformed(nn.Module):  # type: ignore[misc, name-defined]
    """A spatial transformer (arXiv 1506.02025)."""

    def __init__(self, mode: str, padding: str, align: bool) -> None:
        super().__init__()
        self.conv, self.place = nn.Conv2d(2, 2, 3, padding=1), nn.Linear(6, 6)
        self.how = {"mode": mode, "padding_mode": padding, "align_corners": align}

    def forward(self, x: Any, z: Any) -> Any:
        theta = self.place(z).view(-1, 2, 3)
        grid = F.affine_grid(theta, (2, 2, 4, 5), align_corners=self.how["align_corners"])
        return F.grid_sample(self.conv(x), grid, **self.how).square().sum()


class Branches(nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        taken = torch.cond(x.sum() > 0, lambda x: self.a(x).tanh(), lambda x: self.b(x) * 2, (x,))
        return taken.square().sum()


class While(nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        from torch._higher_order_ops.while_loop import while_loop

        def body(i: Any, y: Any) -> Any:
            return i + 1, torch.tanh(self.a(y))

        return while_loop(lambda i, y: i < 3, body, (torch.tensor(0), x))[1].square().sum()


class Scanned(nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        from torch._higher_order_ops.scan import scan

        def step(h: Any, part: Any) -> Any:
            y = torch.tanh(self.a(h) + part)
            return y, y * 1.0

        last, ys = scan(step, x[0] * 0, x, dim=0)
        return ys.square().sum() + last.sum()


class Cells(nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(4, 5)

    def forward(self, x: Any) -> Any:
        h = x.new_zeros(2, 5)
        for part in x:
            h = self.cell(part, h)
        return h.square().sum()


def bag(*inputs: Any, **options: Any) -> Callable[[], Case]:
    return lambda: (Squared(nn.EmbeddingBag(7, 4, **options)), tuple(map(torch.tensor, inputs)))


def einsum(equation: str, *shapes: tuple[int, ...]) -> Callable[[], Case]:
    names = {f"p{i}": shape for i, shape in enumerate(shapes)}

    def function(own: Any, x: Any) -> Any:
        return (torch.einsum(equation, *(getattr(own, name) for name in names)) * x).sin().sum()

    return lambda: (Own(function, **names), (torch.randn(1),))


def of(function: Callable[..., Any], *sizes: tuple[int, ...], **shapes: tuple[int, ...]) -> Any:
    return lambda: (Own(function, **shapes), tuple(torch.randn(*size) for size in sizes))


def layers(size: tuple[int, ...], *make: Callable[[], Any]) -> Callable[[], Case]:
    return lambda: (Squared(*(one() for one in make)), (torch.randn(*size),))


def blocks(own: Any, x: Any) -> Any:
    columns = F.unfold(x, (2, 3), stride=2, padding=1) * own.a
    return F.fold(columns, (6, 7), (2, 3), stride=2, padding=1).square().sum()


def filtered(own: Any, x: Any) -> Any:
    spectrum = torch.fft.rfft(x, dim=1) * torch.view_as_complex(own.a)
    return torch.fft.irfft(spectrum, n=7, dim=1).square().sum()


BAG, OFFSETS = [1, 2, 2, 0, 6, 1], [0, 2, 2, 5]
ROWS = torch.tensor([[0, 1, 1, 1], [3, 2, 3, 3], [2, 0, 0, 0]])
CASES: dict[str, Callable[[], Case]] = {
    "gru": layers((3, 2, 4), lambda: nn.GRU(4, 5, bidirectional=True, num_layers=2)),
    "lstm": layers((2, 3, 4), lambda: nn.LSTM(4, 5, bidirectional=True, batch_first=True)),
    "rnn": layers((3, 2, 4), lambda: nn.RNN(4, 5, nonlinearity="relu", bias=False)),
    "cells": lambda: (Cells(), (torch.randn(3, 2, 4),)),
    "bag": bag([[1, 2, 2], [0, 6, 1]], mode="sum"),
    "bag_offsets": bag(BAG, OFFSETS, mode="mean"),
    "bag_max": bag(BAG, [0, 2, 5], mode="max"),
    "bag_padding": bag([[1, 2, 2], [0, 6, 1]], padding_idx=2),
    **{
        f"transformer_{mode}_{padding}_{align}": lambda m=mode, p=padding, a=align: (
            Transformed(m, p, a), (torch.randn(2, 2, 5, 6), torch.randn(2, 6) * 0.3),
        )
        for mode in ("bilinear", "bicubic")
        for padding, align in (("zeros", False), ("border", True), ("reflection", False))
    },
    "volume": of(
        lambda o, x: F.grid_sample(x, o.a, align_corners=False).square().sum(),
        (1, 2, 3, 4, 3), a=(1, 2, 3, 2, 3),
    ),
    "fnet": of(lambda o, x: torch.fft.fft2(x @ o.a).real.square().sum(), (2, 4, 6), a=(6, 6)),
    "filter": of(filtered, (2, 7, 3), a=(4, 1, 2)),
    "magnitudes": of(lambda o, x: torch.fft.rfft(x * o.a).abs().sum(), (2, 7), a=(7,)),
    "spectrogram": of(
        lambda o, x: torch.stft(x, 8, 4, window=o.a, return_complex=True).abs().square().sum(),
        (2, 32), a=(8,),
    ),
    "diagonal": einsum("...ii->...i", (2, 3, 3)),
    "trace": einsum("ii", (3, 3)),
    "contraction": einsum("ijij,jk,kl->il", (2, 3, 2, 3), (3, 4), (4, 2)),
    "bilinear": lambda: (Squared(nn.Bilinear(3, 4, 5)), (torch.randn(2, 3), torch.randn(2, 4))),
    "attention": layers((2, 3, 8), lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)),
    "cond": lambda: (Branches(), (torch.ones(2, 4),)),
    "cond_else": lambda: (Branches(), (-torch.ones(2, 4),)),
    "while": lambda: (While(), (torch.randn(2, 4),)),
    "scan": lambda: (Scanned(), (torch.randn(3, 2, 4),)),
    "convolutions": layers(
        (2, 3, 4, 5),
        lambda: nn.ConvTranspose2d(3, 4, 3, stride=2, padding=1, output_padding=1),
        lambda: nn.GroupNorm(2, 4), nn.GELU,
        lambda: nn.ConvTranspose2d(4, 2, 2, groups=2, dilation=2),
        lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"),
    ),
    "pixels": layers(
        (2, 2, 4, 4), lambda: nn.Conv2d(2, 8, 3, padding=1), lambda: nn.PixelShuffle(2),
        lambda: nn.PixelUnshuffle(2), lambda: nn.Conv2d(8, 2, 1),
    ),
    "pools": layers(
        (2, 2, 12, 14), lambda: nn.Conv2d(2, 4, 3), lambda: nn.InstanceNorm2d(4, affine=True),
        lambda: nn.MaxPool2d(3, 2, 1, ceil_mode=True), lambda: nn.LPPool2d(2, 2),
    ),
    "responses": layers(
        (2, 2, 5, 5), lambda: nn.Conv2d(2, 6, 3), lambda: nn.LocalResponseNorm(3, alpha=0.5)
    ),
    "blocks": of(blocks, (2, 2, 6, 7), a=(12, 1)),
    **{
        f"resized_{mode}": of(
            lambda o, x, mode=mode: F.interpolate(x * o.a, (7, 3), mode=mode).square().sum(),
            (1, 2, 5, 6), a=(2, 1, 1),
        )
        for mode in ("nearest", "bilinear", "bicubic", "area")
    },
    "sums": of(
        lambda o, x: ((x * o.a).cumsum(1) + (x * o.a).logcumsumexp(1)).sin().sum()
        + (x * o.a).logsumexp(1).sum(), (3, 4), a=(4,),
    ),
    "norms": of(
        lambda o, x: (x * o.a).norm(dim=1).sum() + (x * o.a).norm(p=3, dim=1).sum()
        + F.normalize(x * o.a, dim=1).sin().sum() + (x * o.a).std(1).sum()
        + F.cosine_similarity(x * o.a, x + o.a).sum(), (3, 4), a=(4,),
    ),
    "scattered": of(
        lambda o, x: (x * o.a).gather(1, ROWS).sin().sum()
        + torch.zeros_like(x).scatter_add(1, ROWS, x * o.a).sin().sum()
        + torch.ones_like(x).scatter_reduce(1, ROWS, x * o.a, "prod").sin().sum()
        + x.index_put((torch.tensor([0, 2]),), x[:2] * o.a).sin().sum(), (3, 4), a=(4,),
    ),
    "losses": of(
        lambda o, x: F.multi_margin_loss(x * o.a, torch.tensor([0, 3, 1]))
        + F.hinge_embedding_loss(x * o.a, torch.sign(x).detach())
        + F.triplet_margin_loss(x * o.a, x, x.flip(0))
        + F.kl_div((x * o.a).log_softmax(1), x.softmax(1), reduction="batchmean")
        + F.multilabel_soft_margin_loss(x * o.a, (x > 0).to(x.dtype)), (3, 4), a=(4,),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_gradients_of_parameters_and_inputs(name: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    module, inputs = CASES[name]()
    wide = copy.deepcopy(module).double()
    given = [x.double().requires_grad_() if x.is_floating_point() else x for x in inputs]
    loss = wide(*given)
    loss.backward()
    names = [f"x{i}" for i in range(len(inputs))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module, inputs, tmp_path / "m.onnx", dynamo=True, optimize=False, verbose=False,
            external_data=False, input_names=names,
        )  # fmt: skip
    onnx.checker.check_model(tmp_path / "m.onnx")
    model = gg.load(tmp_path / "m.onnx")
    wanted = {n: p.grad.numpy() for n, p in wide.named_parameters() if p.grad is not None}
    assert {*wanted} <= {*parameters(model.graph)}
    wanted |= {n: x.grad.numpy() for n, x in zip(names, given, strict=True) if x.requires_grad}
    feeds = {n: x.numpy() for n, x in zip(names, inputs, strict=True)}
    got, *gradients = gg.Session(gg.grad(model, wrt=[*wanted]))(feeds)
    assert got == pytest.approx(loss.item(), rel=1e-5)
    largest = max(np.abs(g).max() for g in wanted.values())
    for (each, want), gradient in zip(wanted.items(), gradients, strict=True):
        error = np.abs(gradient - want).max()
        assert error <= 1e-4 * np.abs(want).max() + 1e-6 * largest, each
