"""Gradients and training of graphs that torch exported, against torch's own.

The exporters transpose and copy weights: a parameter's gradient is the sum over all initializers
that hold it.
"""

import importlib.util
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphgen as gg
from graphgen.graph import constant, parameters

torch = pytest.importorskip("torch", reason="needs torch: make parity")
pytest.importorskip("transformers", reason="needs transformers: make parity")
pytestmark = pytest.mark.parity

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures"
CASES = [
    ("bert", "torchscript", "eager"),
    ("bert", "dynamo", "sdpa"),
    ("gpt2", "torchscript", "sdpa"),
    ("gpt2", "dynamo", "eager"),
    ("llama", "torchscript", "eager"),
    ("llama", "dynamo", "sdpa"),
    ("t5", "torchscript", "eager"),
    ("t5", "dynamo", "eager"),
    ("vit", "torchscript", "sdpa"),
    ("vit", "dynamo", "sdpa"),
    ("conv_net", "torchscript", "eager"),
    ("conv_net", "dynamo", "eager"),
]


def make_exports() -> Any:
    """The script that makes the fixtures, as a module."""
    spec = importlib.util.spec_from_file_location("make_exports", FIXTURES / "make_exports.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


exports: Any = make_exports()


def conv_net(_: str) -> Any:
    nn = torch.nn
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.LeakyReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, stride=2, padding=1, groups=4), nn.GroupNorm(2, 8), nn.SiLU(),
        nn.AvgPool2d(2), nn.Conv2d(8, 12, 2), nn.Softplus(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 5),
    )  # fmt: skip


def transformer(name: str, attention: str) -> Any:
    module = exports.Positional(name, attention)
    for part in module.modules():
        if isinstance(part, torch.nn.Embedding):
            part.padding_idx = None  # torch leaves this row out, of which no graph knows
    return module


class Weighted(torch.nn.Module):  # type: ignore[misc, name-defined]
    """Σ c y over the outputs y of a model, the last argument being c."""

    def __init__(self, name: str, attention: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        if name == "conv_net":
            self.model = conv_net(attention)
            exports.draw_weights(self.model)
            self.eval()
        else:
            self.model = transformer(name, attention)

    def forward(self, *arguments: Any) -> Any:
        return (self.model(*arguments[:-1]) * arguments[-1]).sum()


def inputs_of(name: str) -> dict[str, Any]:
    if name == "conv_net":
        return {"pixel_values": np.random.default_rng(6).standard_normal((2, 3, 16, 16), "f4")}
    given: dict[str, Any] = exports.FAMILIES[name].inputs()
    return given


def dynamic_of(name: str, inputs: dict[str, Any]) -> dict[str, dict[int, str]]:
    return {
        each: {0: "batch"} if each in ("c", "pixel_values") and name in ("vit", "conv_net")
        else exports.axes("decoder_c" if each == "c" and name == "t5" else each, has_past=False)
        for each in inputs
    }  # fmt: skip


def export(
    module: Any,
    path: Path,
    name: str,
    inputs: dict[str, Any],
    exporter: str,
    *,
    folded: bool = True,
) -> None:
    """A file of the module; unless `folded`, weights as torch has them, and norms of their own."""
    dynamic, given = dynamic_of(name, inputs), tuple(map(torch.from_numpy, inputs.values()))
    modes = torch.onnx.TrainingMode
    names = {"input_names": list(inputs), "output_names": ["output"]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if exporter == "torchscript":
            torch.onnx.export(
                module, given, path, opset_version=17, dynamo=False, dynamic_axes=dynamic,
                do_constant_folding=folded, training=modes.EVAL if folded else modes.PRESERVE,
                **names,
            )  # fmt: skip
            return
        shapes = [
            {axis: torch.export.Dim(label) for axis, label in dynamic[each].items()}
            for each in inputs
        ]
        torch.onnx.export(
            module, given, path, opset_version=18, dynamo=True, external_data=False,
            verbose=False, optimize=folded, dynamic_shapes=(tuple(shapes),), **names,
        )  # fmt: skip


def holders(model: Any, module: Any) -> dict[str, list[tuple[str, bool]]]:
    """The initializers that hold each of torch's parameters, and whether they are transposed."""
    found: dict[str, list[tuple[str, bool]]] = {}
    for name, parameter in module.named_parameters():
        wanted = parameter.detach().numpy()
        for other, value in parameters(model.graph).items():
            array = constant(value)
            assert array is not None
            if array.size != wanted.size:
                continue
            if np.array_equal(array.ravel(), wanted.ravel()):
                found.setdefault(name, []).append((other, False))
            elif array.ndim == 2 and np.array_equal(array, wanted.T):
                found.setdefault(name, []).append((other, True))
    return found


@pytest.mark.parametrize("name, exporter, attention", CASES)
def test_gradients_of_all_parameters(
    name: str, exporter: str, attention: str, tmp_path: Path
) -> None:
    module, inputs = Weighted(name, attention), inputs_of(name)
    with torch.no_grad():
        shape = module.model(*map(torch.from_numpy, inputs.values())).shape
    c = np.random.default_rng(8).standard_normal(shape).astype(np.float32)
    if name in ("gpt2", "llama"):
        c *= inputs["attention_mask"][:, :, None]  # other rows see no key
    inputs["c"] = c
    loss = module(*map(torch.from_numpy, inputs.values()))
    loss.backward()
    folded = name != "conv_net"
    export(module, tmp_path / "model.onnx", name, inputs, exporter, folded=folded)
    model = gg.load(tmp_path / "model.onnx")
    found = holders(model, module)
    wanted = {n: p.grad.numpy() for n, p in module.named_parameters() if p.grad is not None}
    assert {*wanted} <= {*found}
    wrt = list(dict.fromkeys(other for n in wanted for other, _ in found[n]))
    got, *values = gg.Session(gg.grad(model, wrt=wrt))(inputs)
    assert got == pytest.approx(loss.item(), rel=1e-4)
    gradients = dict(zip(wrt, values, strict=True))
    largest = max(np.abs(g).max() for g in wanted.values())
    for parameter, want in wanted.items():
        parts = [gradients[o].T if turned else gradients[o] for o, turned in found[parameter]]
        error = np.abs(sum(p.reshape(want.shape) for p in parts) - want).max()
        # Of a key's bias, say, the gradient is nothing but rounding.
        assert error <= 1e-4 * np.abs(want).max() + 1e-6 * largest, parameter


@pytest.mark.parametrize(
    "name, exporter, attention",
    [("gpt2", "torchscript", "sdpa"), ("bert", "dynamo", "sdpa"), ("t5", "torchscript", "eager")],
)
def test_fifty_steps_of_adamw(name: str, exporter: str, attention: str, tmp_path: Path) -> None:
    module, inputs = transformer(name, attention), inputs_of(name)
    export(module, tmp_path / "model.onnx", name, inputs, exporter, folded=False)
    model = gg.load(tmp_path / "model.onnx")
    held = [holder for found in holders(model, module).values() for holder in found]
    assert not any(turned for _, turned in held)
    random, batches = np.random.default_rng(9), []
    for _ in range(50):
        batch = {
            each: random.integers(0, 64, x.shape) if each.endswith("input_ids") else x
            for each, x in inputs.items()
        }
        shape = batch["decoder_input_ids" if name == "t5" else "input_ids"].shape
        labels = random.integers(0, 32, shape)
        if name != "t5":
            labels[inputs["attention_mask"] == 0] = -100
        batches.append({**batch, "labels": labels})
    # A weight that two modules share is named by both, or it would be a part of one weight.
    names = {other for other, _ in held}
    names.update(name for name, _ in module.named_parameters(remove_duplicate=False))
    gg.artifacts(
        model, tmp_path / "art", loss="cross_entropy", optimizer=gg.AdamW(weight_decay=0.1),
        trainable="^(" + "|".join(sorted(map(re.escape, names))) + ")$",
    )  # fmt: skip
    trainer = gg.Trainer(tmp_path / "art", schedule=gg.schedule.constant(1e-3))
    losses = [entry["loss"] for entry in trainer.fit(batches, progress=False)]
    optimizer, wanted = torch.optim.AdamW(module.parameters(), lr=1e-3, weight_decay=0.1), []
    for batch in batches:
        *given, labels = map(torch.from_numpy, batch.values())
        loss = torch.nn.functional.cross_entropy(module(*given).flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        wanted.append(loss.item())
    assert len(losses) == 50
    np.testing.assert_allclose(losses, wanted, rtol=1e-4)
    assert np.mean(wanted[-5:]) < np.mean(wanted[:5])
