"""Models of types that share little with others, with the numbers that transformers gave."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from published_others import OTHERS, inputs, kept, weight
from random_checkpoints import stored_shapes, write_weights
from small_models import relative_rms, run_plain

import graphgen as gg
from graphgen.models.published import FAMILIES, from_folder
from graphgen.models.published.config import Config

RESULTS = np.load(Path(__file__).resolve().parents[1] / "fixtures" / "others" / "results.npz")
NEAR = "encoder.pos_conv_embed.conv"


def checkpoint(folder: Path, which: str) -> Path:
    """A folder with the weights that the results are of."""
    _, task, given = OTHERS[which]
    family, config = FAMILIES[given["model_type"]], Config(given)
    shapes = stored_shapes(family, family.tasks[task](config))
    for name in [name for name in shapes if name.endswith(f"{NEAR}.weight")]:
        own, shape = name.removesuffix("weight"), shapes.pop(name)
        shapes[f"{own}parametrizations.weight.original1"] = shape
        shapes[f"{own}parametrizations.weight.original0"] = (1, 1, shape[2])
    (folder / "config.json").write_text(json.dumps(given))
    arrays = {name: weight(name, shape) for name, shape in shapes.items()}
    write_weights(folder / "model.safetensors", arrays)
    return folder


@pytest.mark.parametrize("which", OTHERS)
def test_numbers_of_transformers(which: str, tmp_path: Path) -> None:
    _, task, given = OTHERS[which]
    model = gg.optimize(from_folder(checkpoint(tmp_path, which), task).model).model
    layers = given.get("num_hidden_layers", 0)
    feeds: dict[str, Any] = dict(inputs(which))
    if task == "text-generation":
        past = np.zeros((3, given["num_attention_heads"], 0, 8), np.float32)
        names = [f"past_key_values.{i}.{kind}" for i in range(layers) for kind in ("key", "value")]
        feeds |= dict.fromkeys(names, past)
    outputs = [x.name for x in model.graph.outputs]
    results = dict(zip(outputs, run_plain(model, feeds), strict=True))
    found = results.get("last_hidden_state", results.get("logits"))
    assert found is not None
    assert relative_rms(kept(which, RESULTS[which]), kept(which, found)) < 1e-5


@pytest.mark.parametrize(
    ("which", "field", "value", "told"),
    [
        ("ettin", "sliding_window", 5, "sliding_window is 5; it must be 3"),
        ("ettin", "local_attention", "6", "local_attention is '6'"),
        ("esm", "is_folding_model", True, "is_folding_model is True; it must be False"),
        ("esm", "mask_token_id", None, "the field 'mask_token_id' is missing"),
        ("esm", "position_embedding_type", "relative_key", "one of absolute, rotary"),
        ("esm", "rope_scaling", {"factor": 2.0}, "rope_scaling is .*; it must be absent"),
        ("wavlm", "num_buckets", 200, "num_buckets is 200; it must be 4 or more"),
        ("wavlm", "adapter_attn_dim", 4, "adapter_attn_dim is 4; it must be absent"),
        ("swin", "window_size", 14, "window_size is 14; it must be at most 13, the smallest grid"),
        ("swin", "image_size", 27, "image_size is .*; it must be whole"),
        ("swin", "num_heads", [2, 3], "num_heads is .*; it must be 3 a divisor of 16"),
        ("swin", "depths", "2", "depths is '2'; it must be a list of sizes"),
        ("convnext", "depths", [1], "depths is .*; it must be 2 sizes, as hidden_sizes has"),
        ("convnext", "num_stages", 4, "num_stages is 4; it must be 2"),
    ],
)
def test_what_is_refused(which: str, field: str, value: Any, told: str) -> None:
    _, task, given = OTHERS[which]
    config = Config({**given, field: value})
    with pytest.raises(gg.GraphgenError, match=told):
        FAMILIES[given["model_type"]].tasks[task](config)
        config.finish()
