"""The named losses of artifacts against torch's: value and gradient."""

from typing import Any

import numpy as np
import pytest

import graphgen as gg
from graphgen import nn

torch = pytest.importorskip("torch", reason="needs torch: make parity")
pytestmark = pytest.mark.parity

F = torch.nn.functional
RNG = np.random.default_rng(5)


class Scaled(nn.Module):
    """x times a gain for each element of a sample."""

    def __init__(self, gain: Any):
        self.gain = nn.Parameter(gain.shape, initialize=lambda *_: gain)

    def __call__(self, x: Any) -> Any:
        return x * self.gain


def check(folder: Any, loss: Any, theirs: Any, x: Any, labels: Any) -> None:
    gain = RNG.uniform(0.5, 1.5, x.shape[1:]).astype("f")
    model = gg.build(Scaled(gain), x=gg.float32["n", *x.shape[1:]])
    gg.artifacts(model, folder, loss=loss, optimizer=gg.SGD())
    trainer = gg.Trainer(folder, threads=1, schedule=gg.schedule.constant(1.0))
    [line] = trainer.fit([{"x": x, "labels": labels}], steps=1, progress=False)
    weight = torch.tensor(gain, requires_grad=True)
    wanted = theirs(torch.tensor(x) * weight, torch.tensor(labels))
    wanted.backward()
    assert line["loss"] == pytest.approx(wanted.item(), rel=1e-5)
    slope = gain - trainer.parameters["gain"]
    np.testing.assert_allclose(slope, weight.grad.numpy(), 1e-4, 3e-7)


@pytest.mark.parametrize("shape", [(6, 4), (5, 4, 3), (2, 4, 3, 5)], ids=str)
@pytest.mark.parametrize("weight", [None, [0.5, 3.0, 1.0, 0.0]], ids=["equal", "weighted"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_cross_entropy(tmp_path: Any, shape: Any, weight: Any, smoothing: float) -> None:
    labels = RNG.integers(0, 4, (shape[0], *shape[2:]))
    labels.flat[[0, 3]] = -100
    given = None if weight is None else torch.tensor(weight)
    check(
        tmp_path / "art",
        gg.Loss("cross_entropy", axis=1, weight=weight, label_smoothing=smoothing),
        lambda x, y: F.cross_entropy(x, y, weight=given, label_smoothing=smoothing),
        RNG.normal(size=shape).astype("f") * 3,
        labels,
    )


@pytest.mark.parametrize("weight", [None, 3.0, [0.5, 3.0, 1.0, 0.1]])
def test_binary_cross_entropy(tmp_path: Any, weight: Any) -> None:
    given = None if weight is None else torch.tensor(weight)
    check(
        tmp_path / "art",
        gg.Loss("binary_cross_entropy", weight=weight),
        lambda x, y: F.binary_cross_entropy_with_logits(x, y, pos_weight=given),
        RNG.normal(size=(5, 4)).astype("f") * 30,
        RNG.random((5, 4)).astype("f").round(1),
    )


@pytest.mark.parametrize(
    ("loss", "theirs"),
    [
        ("mse", F.mse_loss),
        ("l1", F.l1_loss),
        ("huber:delta=0.7", lambda x, y: F.huber_loss(x, y, delta=0.7)),
        ("smooth_l1:delta=0.7", lambda x, y: F.smooth_l1_loss(x, y, beta=0.7)),
    ],
    ids=lambda x: x if isinstance(x, str) else "torch",
)
def test_losses_of_differences(tmp_path: Any, loss: str, theirs: Any) -> None:
    x = RNG.normal(size=(5, 4)).astype("f")
    x[0], labels = 0.0, RNG.normal(size=(5, 4)).astype("f")
    labels[0] = 0.0  # no difference at all
    check(tmp_path / "art", loss, theirs, x, labels)
