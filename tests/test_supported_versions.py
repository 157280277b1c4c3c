"""Export and fusion on whatever versions are installed: run with the oldest and the newest.

An old runtime has no kernel for some fused operators. What counts is that every site is found or
refused for that reason, and that the file which is written runs there and gives the same.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_models import ROUNDING, block, relative_rms

import graphgen as gg
from graphgen.measure.reference import evaluate

FIXTURES = Path(__file__).resolve().parent / "fixtures"
BLOCKS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "padded": {"mask": True},
    "grouped": {"kv_heads": 2},
    "rms, tanh": {"norm": "rms", "activation": "gelu_tanh"},
    "silu": {"activation": "silu"},
}


def check_sites(report: Any, fusions: dict[str, int]) -> None:
    """Each fusion has its number of sites, every one fired or without a kernel here."""
    sites: dict[str, list[Any]] = {p.name: p.sites for p in report.passes}
    for name, count in fusions.items():
        assert all(
            s.status == "fired" or (s.status == "refused" and " has no " in s.reason)
            for s in sites[name]
        ), sites[name]
        assert len(sites[name]) >= count, name


@pytest.mark.parametrize("name", BLOCKS)
def test_a_fused_block_runs_from_its_file(name: str, tmp_path: Path) -> None:
    model = block(**BLOCKS[name])
    best = gg.optimize(model, target="cpu", verify=True)
    check_sites(best.report, {"fuse_norm": 2, "fuse_activation": 1, "fuse_attention": 1})
    feeds = {"x": np.random.default_rng(0).standard_normal((2, 5, 16), np.float32)}
    if "mask" in BLOCKS[name]:
        feeds["mask"] = np.array([[True] * 5, [True] * 3 + [False] * 2])
    path = gg.export(best, tmp_path / "block.onnx")
    (expected,), (y,) = evaluate(model, feeds), gg.Session(path)(feeds)
    assert relative_rms(expected, y) < ROUNDING


@pytest.mark.parametrize("path", sorted(FIXTURES.glob("bert_*.onnx")), ids=lambda p: p.stem)
def test_a_foreign_bert_runs_fused(path: Path, tmp_path: Path) -> None:
    arrays = dict(np.load(FIXTURES / "bert.npz"))
    expected = arrays.pop("last_hidden_state")
    best = gg.optimize(gg.load(path), target="cpu", verify=True)
    written = gg.export(best, tmp_path / "bert.onnx")
    (y,) = gg.Session(written)(arrays)
    real = arrays["attention_mask"] != 0
    assert relative_rms(expected[real], y[real]) < ROUNDING
