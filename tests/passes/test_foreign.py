"""A small BERT as torch exports it in four ways: found whole, equal to torch."""

from pathlib import Path

import numpy as np
import pytest
from small_models import relative_rms, run_plain

import graphgen as gg
from graphgen.graph import count_operators

FIXTURES = Path(__file__).parents[1] / "fixtures"
EXPORTS = sorted(FIXTURES.glob("bert_*.onnx"))


@pytest.mark.parametrize("path", EXPORTS, ids=lambda p: p.stem)
def test_every_site_is_found_and_torch_agrees(path: Path) -> None:
    model = gg.load(path)
    best = gg.optimize(model, target="cpu", verify=True)
    counts = count_operators(best.model)
    assert (counts["Attention"], counts["LayerNormalization"], counts["Gelu"]) == (2, 5, 2)
    assert not {"Softmax", "Erf", "Transpose"} & set(counts)
    with np.load(FIXTURES / "bert.npz") as arrays:
        given = {name: arrays[name] for name in ("input_ids", "attention_mask", "token_type_ids")}
        wanted = arrays["last_hidden_state"]
    assert relative_rms(wanted, run_plain(best.model, given)[0]) < 5e-6
    assert relative_rms(wanted, run_plain(model, given)[0]) < 5e-6


def test_there_are_four_exports() -> None:
    assert len(EXPORTS) == 4
