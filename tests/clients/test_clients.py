"""The official trainer, onnxruntime-training 1.19.2, as a client of artifacts: make test-trainer.

It lives in an interpreter of its own, which GRAPHGEN_OFFICIAL_PYTHON names: both runtimes are
called onnxruntime. Model, optimizer and data are the same there and here, and so are the losses.
"""

import json
import os
import runpy
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import pytest

import graphgen as gg
from graphgen import nn, ops
from graphgen.export.checkpoint import Checkpoint
from graphgen.models import create, find
from graphgen.nn.module import ones

FIXTURES = Path(__file__).parents[1] / "fixtures"
STEPS, VOCABULARY = 20, 23
SIZES = {"vocabulary": VOCABULARY, "features": 16, "layers": 2, "num_heads": 2}

pytestmark = pytest.mark.skipif(
    not os.environ.get("GRAPHGEN_OFFICIAL_PYTHON"),
    reason="GRAPHGEN_OFFICIAL_PYTHON names no Python with onnxruntime-training 1.19.2",
)


@pytest.fixture(scope="module")
def official() -> Callable[..., str]:
    """Runs code on the official runtime, and returns what it prints."""
    script = runpy.run_path(str(FIXTURES / "make_official_checkpoint.py"))
    run: Callable[..., str] = script["official"]
    return run


def build(name: str, **sizes: Any) -> Any:
    return gg.build(create(name, **SIZES, **sizes), training=True, **find(name).inputs())


def counting(rng: np.random.Generator, rows: int, length: int) -> np.ndarray:
    """Tokens that count up, from random ones."""
    return (rng.integers(0, VOCABULARY, (rows, 1)) + np.arange(length)) % VOCABULARY


def padding(rng: np.random.Generator, rows: int, length: int) -> np.ndarray:
    """1 for tokens, 0 for the padding behind them; no row is empty."""
    return (np.arange(length) < rng.integers(1, length + 1, (rows, 1))).astype(np.int64)


def decoder(rng: np.random.Generator) -> dict[str, np.ndarray]:
    tokens = counting(rng, 3, 8)
    return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}


def encoder(rng: np.random.Generator) -> dict[str, np.ndarray]:
    mask, tokens = padding(rng, 3, 7), counting(rng, 3, 8)
    types, labels = rng.integers(0, 2, (3, 7)), np.where(mask, tokens[:, 1:], -100)
    named = {"input_ids": tokens[:, :-1], "attention_mask": mask, "token_type_ids": types}
    return {**named, "labels": labels}


def translation(rng: np.random.Generator) -> dict[str, np.ndarray]:
    tokens = counting(rng, 3, 14)
    source = {"source_ids": tokens[:, :8], "source_mask": padding(rng, 3, 8)}
    return {**source, "target_ids": tokens[:, 8:-1], "labels": tokens[:, 9:]}


def exported(rng: np.random.Generator) -> dict[str, np.ndarray]:
    arrays = np.load(FIXTURES / "gpt2.npz")
    tokens = arrays["input_ids"]
    labels = rng.integers(0, arrays["logits"].shape[-1], tokens.shape)
    return {"input_ids": tokens, "attention_mask": np.ones_like(tokens), "labels": labels}


class Normalized(nn.Module):
    """A norm in training mode: each batch moves its running statistics."""

    def __init__(self) -> None:
        self.up, self.down = nn.Linear(6, 5), nn.Linear(5, 2)
        self.scale, self.bias = (nn.Parameter((5,), initialize=ones) for _ in range(2))
        self.mean, self.var = (nn.Parameter((5,), initialize=ones) for _ in range(2))

    def __call__(self, x: Any) -> Any:
        weights = self.scale, self.bias, self.mean, self.var
        y = ops.batch_normalization(self.up(x), *weights, momentum=0.8, training_mode=1)
        return {"y": self.down(y)}


def numbers(rng: np.random.Generator) -> dict[str, np.ndarray]:
    x = rng.normal(1.0, 2.0, (7, 6)).astype(np.float32)
    return {"x": x, "labels": np.tanh(x[:, :2])}


def distance(output: Any, labels: Any) -> Any:
    """Its weight is calculated in eval_model.onnx, which returns the loss alone."""
    return ops.reduce_mean(ops.abs(output - labels), None, keepdims=0), ops.dim(labels, 0)


class Case(NamedTuple):
    """A model, how its artifacts are written, and where a batch comes from."""

    model: Callable[[], Any]
    options: dict[str, Any]
    batch: Callable[[np.random.Generator], dict[str, np.ndarray]]


PAPER = gg.AdamW(0.0, betas=(0.9, 0.98), epsilon=1e-9)
CASES = {
    "decoder": Case(
        lambda: build("decoder", length=16, dropout=0.2),
        {"optimizer": gg.AdamW(0.1, clip_norm=0.3)},
        decoder,
    ),
    "decoder, SGD": Case(
        lambda: build("decoder", length=16),
        {"optimizer": gg.SGD(clip_norm=0.3), "z_loss": 1e-2},
        decoder,
    ),
    "encoder": Case(
        lambda: build("encoder", length=16, logits=True),
        {"output": "logits", "trainable": r"^(?!positions)"},
        encoder,
    ),
    "encoder-decoder": Case(
        lambda: build("transformer-base", dropout=0.1),
        {"optimizer": PAPER, "label_smoothing": 0.1},
        translation,
    ),
    "norms by the batch, SGD": Case(
        lambda: gg.build(Normalized(), seed=0, x=gg.float32["n", 6]),
        {"optimizer": gg.SGD(), "loss": "mse"},
        numbers,
    ),
    "a loss of one's own, SGD": Case(
        lambda: gg.build(nn.Linear(6, 2), seed=0, x=gg.float32["n", 6]),
        {"optimizer": gg.SGD(), "loss": distance, "labels": gg.float32["n", 2]},
        numbers,
    ),
    "export of torch": Case(
        lambda: FIXTURES / "gpt2_dynamo_eager_23.onnx",
        # of a tied weight, which it stored twice
        {"optimizer": gg.AdamW(0.1, clip_norm=1.0), "frozen": "val_243"},
        exported,
    ),
}

TRAIN = """
import json
import numpy as np
folder, data, saved = sys.argv[1:]
data = np.load(data)
state = CheckpointState.load_checkpoint(folder + "/checkpoint")
module = Module(folder + "/training_model.onnx", state, folder + "/eval_model.onnx")
optimizer = Optimizer(folder + "/optimizer_model.onnx", module)
optimizer.set_learning_rate(0.01)
def run(step):
    return float(module(*(np.asarray(data[name][step]) for name in module.input_names())))

losses = []
for step in range(len(data["labels"])):
    losses.append(run(step))
    optimizer.step()
    module.lazy_reset_grad()
module.eval()
losses.append(run(step))
print(json.dumps(losses))
CheckpointState.save_checkpoint(state, saved, include_optimizer_state=True)
"""


def trainer(folder: Path) -> Any:
    return gg.Trainer(folder, threads=1, schedule=gg.schedule.constant(0.01), seed=5)


def batches(case: Case) -> Iterator[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    for _ in range(STEPS):
        yield case.batch(rng)


@pytest.mark.parametrize("name", CASES)
def test_it_trains_the_same_files_alike(
    name: str, tmp_path: Path, official: Callable[..., str]
) -> None:
    case = CASES[name]
    gg.artifacts(case.model(), tmp_path / "art", **case.options)
    data = [*batches(case)]
    arrays = {key: np.stack([batch[key] for batch in data]) for key in data[0]}
    keys = {"seed": np.full(STEPS, 5), "step": np.arange(STEPS)}  # read by dropout alone
    np.savez(tmp_path / "data.npz", **arrays, **keys)
    told = official(TRAIN, tmp_path / "art", tmp_path / "data.npz", tmp_path / "saved")
    *theirs, last = json.loads(told)

    ours = trainer(tmp_path / "art")
    losses = [line["loss"] for line in ours.fit(data, progress=False)]
    np.testing.assert_allclose(losses, theirs, rtol=0, atol=1e-4)
    assert losses[0] - last > 0.01

    saved = Checkpoint.load(tmp_path / "saved")
    assert saved.optimizer is not None and saved.optimizer.step == STEPS
    assert {*saved.trainable, *saved.frozen} == {*ours.parameters}
    if name.endswith("SGD"):  # Adam makes steps of rounding errors where the slope is 0
        for parameter, array in ours.parameters.items():
            found = (saved.trainable | saved.frozen)[parameter]
            np.testing.assert_allclose(array, found, rtol=0, atol=1e-5, err_msg=parameter)
    shutil.copyfile(tmp_path / "saved", tmp_path / "art" / "checkpoint")
    continued = trainer(tmp_path / "art")
    assert continued.step == STEPS
    assert continued.evaluate(data[-1:]) == pytest.approx(last, abs=1e-5)


def test_it_refuses_parameters_without_decay(tmp_path: Path, official: Callable[..., str]) -> None:
    case, groups = CASES["decoder, SGD"], gg.AdamW(no_decay="bias")
    gg.artifacts(case.model(), tmp_path / "art")
    onnx.save(groups.official(), tmp_path / "art" / "optimizer_model.onnx")
    data = {key: array[None] for key, array in next(batches(case)).items()}
    np.savez(tmp_path / "data.npz", **data)
    with pytest.raises(RuntimeError, match="Unrecognized attribute: no_decay"):
        official(TRAIN, tmp_path / "art", tmp_path / "data.npz", tmp_path / "saved")
