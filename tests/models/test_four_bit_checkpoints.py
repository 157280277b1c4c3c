"""Checkpoints of which some weights are stored in four bits, MXFP4."""

import json
from pathlib import Path

import numpy as np
import pytest
from published_decoders import checkpoint
from random_checkpoints import write_weights
from small_models import relative_rms

import graphgen as gg
from graphgen.bits import STACKED
from graphgen.errors import GraphgenError
from graphgen.models.published import from_folder
from graphgen.models.published.weights import read_weights

EXPERTS = "model.layers.0.mlp.experts."
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


def packed(folder: Path, scale: int = 124) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """A checkpoint whose first products of the experts are in four bits, and these as numbers."""
    arrays = {name: x.read() for name, x in read_weights(checkpoint(folder, "gpt_oss")).items()}
    count, features, rows = arrays.pop(EXPERTS + "gate_up_proj").shape
    random = np.random.default_rng(0)
    codes = random.integers(0, 16, (count, rows, features // 32, 32)).astype(np.uint8)
    scales = random.integers(scale - 2, scale + 1, codes.shape[:3]).astype(np.uint8)
    arrays[EXPERTS + "gate_up_proj_blocks"] = codes[..., ::2] | codes[..., 1::2] << 4
    arrays[EXPERTS + "gate_up_proj_scales"] = scales
    numbers = np.array(E2M1)[codes] * 2.0 ** (scales[..., None].astype(float) - 127)
    write_weights(folder / "model.safetensors", arrays)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": []}
    (folder / "config.json").write_text(json.dumps(config))
    return arrays, numbers.reshape(count, rows, features)


def test_four_bits_are_the_numbers_they_stand_for(tmp_path: Path) -> None:
    _, numbers = packed(tmp_path)
    found = from_folder(tmp_path)
    assert (found.few_bits, found.again) == ("mxfp4", True)
    inner = found.model.graph.initializers["layers.0.feed_forward.inner"].const_value
    assert inner is not None
    np.testing.assert_array_equal(inner.numpy(), numbers)
    [blocks] = inner.meta[STACKED]()
    np.testing.assert_array_equal(blocks.dequantized().reshape(numbers.shape), numbers)


@pytest.mark.parametrize("part", ["blocks", "scales"])
def test_what_does_not_fit_is_refused(part: str, tmp_path: Path) -> None:
    arrays, _ = packed(tmp_path)
    name = f"{EXPERTS}gate_up_proj_{part}"
    for wrong in (None, arrays[name][:, :-1], arrays[name].astype(np.float32)):
        given = {n: x for n, x in arrays.items() if n != name}
        given |= {} if wrong is None else {name: wrong}
        write_weights(tmp_path / "model.safetensors", given)
        with pytest.raises(GraphgenError, match="gate_up_proj is missing"):
            from_folder(tmp_path)


def test_a_scale_that_is_no_number_is_refused(tmp_path: Path) -> None:
    packed(tmp_path, 255)
    weights = from_folder(tmp_path).model.graph.initializers
    inner = weights["layers.0.feed_forward.inner"].const_value
    assert inner is not None
    with pytest.raises(GraphgenError, match="gate_up_proj_scales has a scale of 255"):
        inner.numpy()


def test_sinks_take_their_share_of_each_row() -> None:
    random = np.random.default_rng(0)
    q, k, v = (random.standard_normal((2, heads, 5, 8)) for heads in (4, 2, 2))
    sinks, keep = 2.0 * random.standard_normal(4), random.random((2, 1, 5, 5)) < 0.6
    keep[0, 0, 1] = False
    scores = np.exp(q @ np.repeat(k, 2, 1).swapaxes(2, 3) / 8**0.5) * keep
    weights = scores / (scores.sum(-1, keepdims=True) + np.exp(sinks)[:, None, None])
    y, found = gg.ops.attention_with_weights(q, k, v, keep, sinks=sinks)
    assert relative_rms(weights, found) < 1e-14
    assert relative_rms(weights @ np.repeat(v, 2, 1), y) < 1e-14
    assert not y[0, :, 1].any()
    with pytest.raises(GraphgenError, match="a pattern has no sinks"):
        gg.nn.Attention(8, num_heads=2, sinks=True, pattern=gg.ops.window_attention)
