"""Every published decoder with the numbers that transformers gave, whole and behind a cache."""

from pathlib import Path

import numpy as np
import pytest
from published_decoders import (
    DECODERS,
    LENGTH,
    RESULTS,
    WRITTEN,
    checkpoint,
    ids,
    mask,
    no_past,
    past_of,
)
from small_models import relative_rms, run_plain

import graphgen as gg
from graphgen.models.published import from_folder


@pytest.mark.share(2)
@pytest.mark.parametrize("which", DECODERS)
def test_numbers_of_transformers(which: str, tmp_path: Path) -> None:
    model = gg.optimize(from_folder(checkpoint(tmp_path, which)).model).model
    operators = [node.op_type for node in model.graph]
    # The kernel for a softcap on the CPU is slower than its body, sinks have none, and some
    # experts are chosen by a softmax.
    written = which == "gemma2" or which.startswith(WRITTEN)
    assert operators.count("Softmax") == 0 or written
    tokens, kept = ids(), mask()
    positions = np.maximum(kept.cumsum(1) - 1, 0)
    names = [str(value.name) for value in model.graph.outputs]
    past = no_past({str(value.name): [*(value.shape or ())] for value in model.graph.inputs}, 3)
    parts, start = [], 0
    # Where angles depend on the length, those of an earlier call would be of another one.
    for end in (LENGTH,) if "longrope" in which else (4, LENGTH):
        feeds = {
            "input_ids": tokens[:, start:end],
            "attention_mask": kept[:, :end],
            "position_ids": positions[:, start:end],
        }
        feeds = {str(v.name): feeds[v.name] for v in model.graph.inputs if v.name in feeds}
        found = dict(zip(names, run_plain(model, feeds | past), strict=True))
        parts.append(found["logits"])
        past = past_of(found)
        start = end
    real = kept.astype(bool)
    assert relative_rms(RESULTS[which][real], np.concatenate(parts, 1)[real]) < 1e-5
