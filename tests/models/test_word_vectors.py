"""Skip-gram: its scores and loss against float64 numpy, its gradients, and its data."""

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gradients import check_trained_step, checked_gradients
from small_models import ROUNDING, relative_rms, run_plain, vary

import graphgen as gg
from graphgen.measure.reference import evaluate
from graphgen.models.word_vectors import SkipGram, inputs, negative_sampling
from graphgen.nn.module import initialize

RNG = np.random.default_rng(16)
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def pairs_of(batch: int = 5, noise: int = 3) -> dict[str, Any]:
    ids = RNG.integers(0, 9, (batch, 2 + noise))
    return {"word_ids": ids[:, 0], "context_ids": ids[:, 1:]}


def test_scores_and_loss_are_those_of_the_paper() -> None:
    module, feeds = vary(SkipGram(9, 6)), pairs_of()
    w = {name: p.array.astype(np.float64) for name, p in initialize(module).items()}
    v, c = w["embedding.weight"][feeds["word_ids"]], w["context.weight"][feeds["context_ids"]]
    scores = np.einsum("bd,bnd->bn", v, c)
    model = gg.build(module, **inputs())
    assert relative_rms(scores, run_plain(model, feeds)[0]) < ROUNDING
    signed = np.concatenate([scores[:, :1], -scores[:, 1:]], 1)
    wanted = -np.log(1 / (1 + np.exp(-signed))).sum(1).mean()
    loss = gg.build(negative_sampling, scores=gg.float32["batch", 4])
    assert abs(evaluate(loss, {"scores": scores})[0] - wanted) < 1e-12 * wanted


def test_gradients_are_the_central_difference_and_those_of_a_trained_step(tmp_path: Any) -> None:
    module, batch = vary(SkipGram(9, 6)), pairs_of()
    specs = inputs() | {"context_ids": gg.int64["batch", 4]}
    gradients = checked_gradients(module, negative_sampling, specs, batch)
    model = gg.build(module, training=True, **specs)
    check_trained_step(model, tmp_path, batch, gradients, loss=negative_sampling)


def test_the_data_of_the_example(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs stand next to each other, frequent words are left out, and the seed decides."""
    pytest.importorskip("rich")
    monkeypatch.syspath_prepend(EXAMPLES)
    words: Any = importlib.import_module("words")
    counts = np.array([4000.0, 100.0, 100.0, 100.0, 100.0])
    pairs = words.Pairs(counts)
    assert pairs.kept[0] == pytest.approx(np.sqrt(words.FREQUENT / (4000 / 4400)))
    noise = pairs.by_chance(np.random.default_rng(0), 100_000)
    share = np.bincount(noise) / len(noise)
    np.testing.assert_allclose(share, counts**0.75 / (counts**0.75).sum(), atol=5e-3)

    rare = words.Pairs(np.ones(2000))
    ids = np.arange(2000)
    a, b = rare.draw(np.random.default_rng(1), ids)
    distance = np.abs(a - b)
    assert distance.min() == 1 and distance.max() == words.WINDOW
    # A window of random size 1 to 5 reaches to distance d with probability (6 - d) / 5.
    found = np.bincount(distance)[1:] / len(ids) / 2
    np.testing.assert_allclose(found, (6 - np.arange(1, 6)) / 5, atol=0.05)

    one, same, other = (next(rare.batches(ids, seed=seed, size=32)) for seed in (0, 0, 1))
    assert one["word_ids"].shape == (32,) and one["context_ids"].shape == (32, 1 + words.NOISE)
    assert all(np.array_equal(one[n], same[n]) for n in one)
    assert not np.array_equal(one["word_ids"], other["word_ids"])
