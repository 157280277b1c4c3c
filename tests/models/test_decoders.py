"""Every published decoder with the numbers that transformers gave, whole and behind a cache."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from published_decoders import (
    DECODERS,
    LENGTH,
    RESULTS,
    WRITTEN,
    checkpoint,
    fields,
    ids,
    mask,
    no_past,
    past_of,
)
from small_models import relative_rms, run_plain

import graphgen as gg
from graphgen.errors import GraphgenError
from graphgen.models.published import FAMILIES, from_folder
from graphgen.models.published.config import Config


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


@pytest.mark.parametrize(
    ("which", "name", "value", "told"),
    [
        ("lfm2", "conv_L_cache", 1, "conv_L_cache is 1; it must be 2 at least"),
        ("lfm2", "full_attn_idxs", [3], "a list of layers from 0 to 2"),
        ("lfm2", "layer_types", ["conv"] * 3, "one at least that attends"),
        ("qwen3_next", "linear_num_value_heads", 3, "it must be a multiple of 2"),
        ("qwen3_5_text", "attn_output_gate", False, "it must be True"),
        ("qwen3_5_moe_text", "mlp_only_layers", [1], r"it must be \[\]"),
        ("granitemoehybrid, mamba", "hidden_act", "relu", "it must be 'silu' or 'swish'"),
        ("granitemoehybrid, mamba", "time_step_limit", [0.0, 1.0], "time_step_limit is"),
        ("granitemoehybrid, mamba", "mamba_d_head", 9, "it must be auto"),
    ],
)
def test_what_layers_with_states_refuse(which: str, name: str, value: Any, told: str) -> None:
    given = fields(which) | {name: value}
    with pytest.raises(GraphgenError, match=told):
        FAMILIES[given["model_type"]].tasks["text-generation"](Config(given))
