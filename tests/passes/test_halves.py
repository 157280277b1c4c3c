"""Causal attention in two halves: less to compute, the same numbers at every length."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from small_models import relative_rms, vary

import graphgen as gg
from graphgen import nn, ops
from graphgen.export.artifacts import Prepared, artifacts
from graphgen.export.checkpoint import Checkpoint
from graphgen.infer import DOMAIN
from graphgen.match import Engine, PassReport, run_passes
from graphgen.op import is_a
from graphgen.passes.runs import Memory
from graphgen.passes.verify import compare
from graphgen.train.lower import lower

HEADS, GROUPS, WIDTH = 4, 2, 16
X = gg.float32["batch", "seq", WIDTH]
FLAT = {"q_num_heads": HEADS, "kv_num_heads": HEADS}
GROUPED = {"q_num_heads": HEADS, "kv_num_heads": GROUPS, "softcap": 2.0, "scale": 0.7}
LENGTHS = (1, 2, 3, 7, 64, 65)
ROUNDING = 2e-6


class Attend(nn.Module):
    """Causal attention of three products, after which a mask may come, of `masks`."""

    def __init__(self, mask: str = "", width: int = WIDTH, **options: Any):
        self.options, self.mask = {"is_causal": 1} | options, mask
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, width)
        self.value = nn.Linear(WIDTH, width)
        self.bias = nn.RelativeBias(HEADS, one_sided=True) if mask == "trained" else None

    def __call__(self, x: Any) -> Any:
        q, k, v = self.query(x), self.key(x), self.value(x)
        if "q_num_heads" not in self.options:
            q, k, v = (ops.split_heads(y, HEADS) for y in (q, k, v))
        mask, rows = None, ops.arange(ops.dim(x, 1))
        if self.mask == "padding":  # some rows keep nothing
            mask = ops.unsqueeze(x[:, :, 0] > 0.3, [1, 2])
        elif self.mask == "one row":
            mask = ops.unsqueeze(ops.cast(rows % 3, to=np.float32), [0]) * -1.5
        elif self.mask == "window":
            mask = ops.unsqueeze(rows, [1]) - ops.unsqueeze(rows, [0]) < 5
        elif self.bias is not None:
            mask = self.bias(rows, rows)
        attend = ops.attention if self.mask == "padding" else ops.scaled_dot_product_attention
        y = attend(q, k, v, mask, **self.options)
        return y if "q_num_heads" in self.options else ops.merge_heads(y)


KINDS: dict[str, Any] = {
    "flat": Attend(**FLAT),
    "heads": Attend(),
    "grouped": Attend(width=WIDTH * GROUPS // HEADS, **GROUPED),
    "padding": Attend("padding", **FLAT),
    "one row of a mask": Attend("one row"),
    "window": Attend("window", **FLAT),
    "trained": Attend("trained", **FLAT),
}
KINDS = {kind: vary(module) for kind, module in KINDS.items()}


def made(module: nn.Module, *, x: Any = X, **options: Any) -> Prepared:
    return Prepared.of(gg.build(module, x=x, training=True, seed=0), loss="mse", **options)


def report_of(prepared: Prepared, **options: Any) -> PassReport:
    [report] = run_passes(prepared.training, prepared.passes[:1], Engine(**options))
    assert report.name == "causal_halves"
    return report


def gradients(folder: Path, x: Any) -> list[Any]:
    """The loss and the gradients, in a session without the runtime's optimizations."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(lower(folder).training, options)
    feeds = {"x": x, "labels": np.cos(x), **Checkpoint.load(folder / "checkpoint").trainable}
    return list(session.run(None, {i.name: feeds[i.name] for i in session.get_inputs()}))


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradients_are_the_same_at_every_length(kind: str, tmp_path: Path) -> None:
    model = gg.build(KINDS[kind], x=X, training=True, seed=0)
    for name, dims in (("whole", {"seq": 8}), ("halves", None)):
        artifacts(model, tmp_path / name, loss="mse", dims=dims)
    for length in LENGTHS:
        x = np.random.default_rng(length).standard_normal((3, length, WIDTH), np.float32)
        wanted, found = (gradients(tmp_path / name, x) for name in ("whole", "halves"))
        for a, b in zip(wanted, found, strict=True):
            assert np.isfinite(b).all()
            scale = np.abs(a).max()  # a key's bias has no gradient but rounding
            assert relative_rms(a, b) < ROUNDING or np.abs(a - b).max() < ROUNDING * (1 + scale)


@pytest.mark.parametrize("kind", KINDS)
def test_each_site_is_verified(kind: str) -> None:
    report = report_of(made(KINDS[kind]), verify=partial(compare, memory=Memory()))
    assert [(s.status, s.number) for s in report.sites] == [("fired", 1)], report.sites[0].reason


def test_a_quarter_of_the_scores_is_not_computed() -> None:
    """And no softmax is computed twice, nor is a size unknown."""
    prepared = made(KINDS["flat"])
    run_passes(prepared.training, prepared.passes[:-1], Engine())
    softmaxes = [n for n in prepared.training.graph if is_a(n, ops.softmax)]
    shapes = [[str(d) for d in n.outputs[0].shape or ()] for n in softmaxes]
    first, last = "floor(seq/2)", "seq - floor(seq/2)"
    assert shapes == [["batch", "4", first, first], ["batch", "4", last, "seq"]]
    assert all(n.domain != DOMAIN for n in prepared.training.graph)
    unknown = [v.name for n in prepared.training.graph for v in n.outputs if v.shape is None]
    assert not unknown


def test_evaluation_stays_whole() -> None:
    prepared = made(KINDS["flat"])
    prepared.run()
    assert sum(is_a(n, ops.softmax) for n in prepared.evaluation.graph) == 1


class Crossed(nn.Module):
    def __init__(self) -> None:
        self.key = nn.Linear(WIDTH, WIDTH)

    def __call__(self, x: Any) -> Any:
        longer = ops.concat(self.key(x), x, axis=1)
        return ops.scaled_dot_product_attention(x, longer, longer, is_causal=1, **FLAT)


def test_few_tokens_stay_whole() -> None:
    few = "63 tokens are too few for two halves, which pay from 64 on"
    for prepared in (
        made(KINDS["flat"], x=gg.float32["batch", 63, WIDTH]),
        made(KINDS["flat"], dims={"seq": 63}),
    ):
        assert [(s.status, s.reason) for s in report_of(prepared).sites] == [("refused", few)]
    for prepared in (
        made(KINDS["flat"], x=gg.float32["batch", 64, WIDTH]),
        made(KINDS["flat"], dims={"seq": 64}),
    ):
        assert report_of(prepared).count("fired") == 1


def test_only_causal_attention_to_as_many_keys_is_a_candidate() -> None:
    assert not report_of(made(Attend(is_causal=0, **FLAT))).sites
    [site] = report_of(made(Crossed())).sites
    assert (site.status, site.reason) == (
        "missed",
        "its queries and keys are seq and 2*seq, wanted as many",
    )


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_the_profile_stock_keeps_it_whole(dtype: Any) -> None:
    prepared = made(KINDS["flat"], dtype=dtype, profile="stock")
    assert prepared.passes[0].name != "causal_halves"
