"""Every published encoder with the numbers that transformers gave: called on arrays, and built."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from published_encoders import ENCODERS, fields, inputs, weight
from random_checkpoints import stored_shapes, write_weights
from small_models import relative_rms, run_plain

import graphgen as gg
from graphgen import nn
from graphgen.models.published import FAMILIES, from_folder
from graphgen.models.published.config import Config
from graphgen.models.published.weights import read_weights

RESULTS = np.load(Path(__file__).resolve().parents[1] / "fixtures" / "encoders" / "results.npz")
WHOLE = [which for which in ENCODERS if "," not in which]


def checkpoint(folder: Path, which: str, task: str) -> Any:
    """The module for a task, with the weights that the results are of, which the folder holds."""
    config = Config(fields(which))
    family = FAMILIES[config.model_type]
    module = family.tasks[task](config)
    config.finish()
    shapes = stored_shapes(family, module)
    arrays = {name: weight(name, shape) for name, shape in shapes.items()}
    (folder / "config.json").write_text(json.dumps(fields(which)))
    write_weights(folder / "model.safetensors", arrays)
    weights = family.weights(module, read_weights(folder), ir.DataType.FLOAT, which)
    nn.initialize(module, weights=weights)
    return module


def on_arrays(module: Any, which: str) -> np.ndarray:
    logits: np.ndarray = module(**{name: inputs(which)[name] for name in module.inputs()})["logits"]
    return logits


def check(logits: np.ndarray, which: str) -> None:
    """Where there is no padding."""
    kept = inputs(which)["attention_mask"].astype(bool)
    assert relative_rms(RESULTS[f"{which}, MaskedLM"][kept], logits[kept]) < 1e-5


@pytest.mark.parametrize("which", ENCODERS)
def test_numbers_of_transformers(which: str, tmp_path: Path) -> None:
    check(on_arrays(checkpoint(tmp_path, which, "fill-mask"), which), which)


@pytest.mark.share(3)
@pytest.mark.parametrize("which", WHOLE)
def test_numbers_of_the_graph(which: str, tmp_path: Path) -> None:
    module = checkpoint(tmp_path, which, "fill-mask")
    built = from_folder(tmp_path, "fill-mask").model
    model = gg.optimize(built, expect={"attention": fields(which)["num_hidden_layers"]}).model
    assert not [node.op_type for node in model.graph if node.op_type == "Softmax"]
    [logits] = run_plain(model, {name: inputs(which)[name] for name in module.inputs()})
    check(logits, which)


@pytest.mark.parametrize("which", ENCODERS)
def test_texts_are_classified_as_transformers_does(which: str, tmp_path: Path) -> None:
    logits = on_arrays(checkpoint(tmp_path, which, "text-classification"), which)
    wanted = RESULTS[f"{which}, SequenceClassification"]
    if "deberta" in which:  # a text that begins with padding: its first vector sees nothing there
        logits, wanted = np.delete(logits, 1, 0), np.delete(wanted, 1, 0)
    assert relative_rms(wanted, logits) < 1e-5


def test_gte_as_it_was_published(tmp_path: Path) -> None:
    """Fields and names of its own code: NTK's angles, and `new` before each weight."""
    checkpoint(tmp_path, "gte", "fill-mask")
    given, theta, factor = fields("gte"), 1e4, 2.0
    stored = {w.name.replace("gte.", "new."): w.read() for w in read_weights(tmp_path).values()}
    write_weights(tmp_path / "model.safetensors", stored)
    given |= {"model_type": "new", "pack_qkv": True, "position_embedding_type": "rope"}
    given |= {"rope_theta": theta, "rope_scaling": {"type": "ntk", "factor": factor}}
    (tmp_path / "config.json").write_text(json.dumps(given))
    found = from_folder(tmp_path, "feature-extraction")
    [rotary] = found.module.encoder.rotary
    waves = (theta * factor) ** (-np.arange(0, 8, 2) / 8) / factor ** (2 / 8)
    np.testing.assert_allclose(rotary.frequencies, waves, rtol=1e-6)
    given["rope_scaling"] = {"type": "ntk", "factor": factor, "mixed_b": 0.5}
    (tmp_path / "config.json").write_text(json.dumps(given))
    with pytest.raises(gg.GraphgenError, match="and nothing else"):
        from_folder(tmp_path)
