"""Every published encoder with the numbers that transformers gave."""

import json
from pathlib import Path

import numpy as np
import pytest
from published_encoders import ENCODERS, fields, inputs, weight
from random_checkpoints import stored_shapes, write_weights
from small_models import relative_rms, run_plain

import graphgen as gg
from graphgen.models.published import FAMILIES, from_folder
from graphgen.models.published.config import Config

RESULTS = np.load(Path(__file__).resolve().parents[1] / "fixtures" / "encoders" / "results.npz")


def checkpoint(folder: Path, which: str, task: str) -> Path:
    """A folder of a small encoder, with the weights that the results are of."""
    given = fields(which)
    family = FAMILIES[given["model_type"]]
    shapes = stored_shapes(family, family.tasks[task](Config(given)))
    (folder / "config.json").write_text(json.dumps(given))
    arrays = {name: weight(name, shape) for name, shape in shapes.items()}
    write_weights(folder / "model.safetensors", arrays)
    return folder


@pytest.mark.parametrize("which", ENCODERS)
def test_numbers_of_transformers(which: str, tmp_path: Path) -> None:
    built = from_folder(checkpoint(tmp_path, which, "fill-mask"), "fill-mask").model
    model = gg.optimize(built, expect={"attention": fields(which)["num_hidden_layers"]}).model
    assert not [node.op_type for node in model.graph if node.op_type == "Softmax"]
    feeds = inputs(which)
    kept = feeds["attention_mask"].astype(bool)
    [logits] = run_plain(model, {str(x.name): feeds[str(x.name)] for x in model.graph.inputs})
    wanted = RESULTS[f"{which}, MaskedLM"]
    assert relative_rms(wanted[kept], logits[kept]) < 1e-5


@pytest.mark.parametrize("which", ENCODERS)
def test_texts_are_classified_as_transformers_does(which: str, tmp_path: Path) -> None:
    built = from_folder(checkpoint(tmp_path, which, "text-classification"), "text-classification")
    feeds = inputs(which)
    [logits] = built.module(**{x.name: feeds[x.name] for x in built.model.graph.inputs}).values()
    wanted = RESULTS[f"{which}, SequenceClassification"]
    if "deberta" in which:  # a text that begins with padding: its first vector sees nothing there
        logits, wanted = np.delete(logits, 1, 0), np.delete(wanted, 1, 0)
    assert relative_rms(wanted, logits) < 1e-5
