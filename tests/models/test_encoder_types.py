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
